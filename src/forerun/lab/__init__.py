"""The lab, a page that shows why speculative decoding is exact, what makes it fast, and where it stops being fast."""
