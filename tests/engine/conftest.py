"""Every test of the engine runs with speculation off and with speculation auto."""

from speculation import pytest_generate_tests, speculation

__all__ = ["pytest_generate_tests", "speculation"]
