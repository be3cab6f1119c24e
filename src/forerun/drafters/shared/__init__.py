"""Code that several drafters share: files of heads, searches, tables, chains. Methods are files one level above."""
