"""Reading GGUF files: the header, blocks of quantised weights, and the metadata as a config and a tokenizer.

models/source/gguf.py makes a source of weights from these parts.
"""
