"""Models: reading checkpoints and writing them, naming their weights, and running them (runner.py).

The architectures are in families/, one file for each `model_type`. The file formats are in source/ and gguf/.
"""
