"""The command `forerun`: its flags, its inputs and what it prints. Only modules that compute are slow to import."""
