"""Models: code that reads and writes checkpoints, names their weights, and runs the models (runner.py).

The architectures are in families/, one file for each `model_type`. The file formats are in source/ and gguf/.
"""
