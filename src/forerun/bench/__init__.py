"""The benchmarks, one per file. Each prints the machine's limit first, then a table, then one line of JSON."""
