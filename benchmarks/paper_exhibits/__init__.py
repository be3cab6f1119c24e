"""The tables and figures that are measured: a file each, which says its NAME, and has `make(work)`.

The files are found by their NAME; none of them is imported before its exhibit is wanted.
"""
