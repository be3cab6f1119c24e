"""The version, which is also part of the names of cached files."""

__version__ = "0.3.0"
