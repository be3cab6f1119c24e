"""Measurements: one file per benchmark. Each prints the ceiling first, then a table, then one line of JSON."""
