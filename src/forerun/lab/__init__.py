"""The lab, a page on which one sees why speculative decoding is exact, what makes it fast, and where that ends."""
