"""What a GGUF file says: its header, its blocks of quantised weights, its metadata as a config and as a tokenizer.

models/source/gguf.py makes a source of it.
"""
