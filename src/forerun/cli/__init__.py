"""The command `forerun`: flags, inputs and what it prints. Only modules that compute (demo.py) are slow to import."""
