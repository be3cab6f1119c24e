"""Converts text to token ids and back: a checkpoint's tokenizer, and a detokenizer for ids that come piece by piece."""

from forerun.text.detokenizer import Detokenizer, PushResult
from forerun.text.tokenizer import Tokenizer, compare

__all__ = ["Detokenizer", "PushResult", "Tokenizer", "compare"]
