"""The target's own weights at fewer bits as the draft model: nothing to find, to train or to match (self-speculation).

Each matrix of the target is read from memory and rounded when the engine starts (models/quantising.py). Embedding and
LM head get 8 bits. The rounded model agrees with the target in most tokens, and reads about a third (int4) or half
(int8) of bfloat16's bytes. On operators without quantised products, it computes with the dequantised weights, which
saves nothing.
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
    """How the weights are rounded, and how the rounded model draws."""

    quantization: str = option("int4", "int8 or int4[:group=N]: what the target's weights are rounded to")
    draft_temperature: float | None = field(default=None, metadata=TEMPERATURE)
    draft_top_k: int | None = field(default=None, metadata=TOP_K)
    draft_vocab: str = field(default=AUTO, metadata=VOCAB)

    def __post_init__(self) -> None:
        Quantization.parse(self.quantization)
        check_temperature("self", self.draft_temperature)
        head_rows("self", self.draft_vocab)


def needs(options: Options, target: Known) -> Needs:
    """Return the draft model that is to be made: a rounded copy of the target."""
    return Needs(makes=OwnModel(options.quantization))


def build(options: Options, target: Target) -> Drafter:
    """Round the target's weights to make a draft model, once for all drafters of one engine.

    Raises BadOption where the target's weights have no more bits than the rounded ones, as with most GGUF files under
    dtype bfloat16. The same file under dtype float32 is dequantised, and can be rounded.
    """
    holes: Seq[int] = target.holes
    bits = Quantization.parse(options.quantization)
    return over(target.shared(bits, lambda: target.model.rounded(bits)), target, options, holes)
