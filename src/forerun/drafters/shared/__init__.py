"""What several drafters share: files of heads, searches, tables, chains. A method is a file one level above."""
