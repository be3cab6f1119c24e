"""Benchmarks that answer a developer's question: `benchmarks.NAME --help`, in a copy of the repository.

What answers a user's question is in the package: `forerun bench` and `forerun tune`.
"""
