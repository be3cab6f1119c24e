"""The target's own weights at fewer bits as the draft model: nothing to find, to train or to match (self-speculation).

Each matrix of the target is read from memory and rounded when the engine starts (models/quantising.py). Embedding and
LM head get 8 bits. The rounded model agrees with the target in most tokens. It reads about a third (int4) or half
(int8) of the bytes that bfloat16 weights take. Operators without quantised products compute with dequantised weights.
On these operators the drafter saves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.config import AUTO, Quantization
from forerun.drafters import Drafter, Known, Needs, OwnModel, Target
from forerun.drafters.shared.draft_models import over
from forerun.drafters.shared.model_options import TEMPERATURE, TOP_K, VOCAB, check_temperature, head_rows
from forerun.registry import option


@dataclass(frozen=True)
class Options:
    """The options: how the weights are rounded, and how the rounded model draws tokens."""

    quantization: str = option("int4", "int8 or int4[:group=N]: what the target's weights are rounded to")
    draft_temperature: float | None = field(default=None, metadata=TEMPERATURE)
    draft_top_k: int | None = field(default=None, metadata=TOP_K)
    draft_vocab: str = field(default=AUTO, metadata=VOCAB)

    def __post_init__(self) -> None:
        Quantization.parse(self.quantization)
        check_temperature("self", self.draft_temperature)
        head_rows("self", self.draft_vocab)


def needs(options: Options, target: Known) -> Needs:
    """Return the needs: a draft model made from the target by rounding its weights."""
    return Needs(makes=OwnModel(options.quantization))


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter. The target's weights are rounded once for all drafters of one engine.

    Raises BadOption if the target's weights have no more bits than the rounded weights would have, as with most GGUF
    files under dtype bfloat16. Under dtype float32, the same file is dequantised, and can be rounded.
    """
    holes: Seq[int] = target.holes
    bits = Quantization.parse(options.quantization)
    return over(target.shared(bits, lambda: target.model.rounded(bits)), target, options, holes)
