"""T5 models for the paper's tables on encoder-decoders: examples of two tasks, a target, and drafts of it.

`python -m benchmarks.t5 --help`; docs/training.md has the commands. What measures such a pair is paper_exhibits/.
"""
