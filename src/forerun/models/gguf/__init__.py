"""The contents of a GGUF file: its header, its blocks of quantised weights, its metadata as a config and a tokenizer.

models/source/gguf.py makes a source from it.
"""
