"""The benchmarks of `forerun bench` and `forerun tune`. Each measures, prints tables, and returns a record for JSON."""
