"""Text to token ids and back: the tokenizer of a checkpoint, and the incremental way from ids to text."""

from forerun.text.detokenizer import Detokenizer, PushResult
from forerun.text.tokenizer import Tokenizer, compare

__all__ = ["Detokenizer", "PushResult", "Tokenizer", "compare"]
