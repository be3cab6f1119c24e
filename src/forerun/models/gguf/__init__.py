"""Reads the parts of GGUF files: the header, blocks of quantised weights, and the metadata as config and tokenizer.

models/source/gguf.py makes a source of weights from these parts.
"""
