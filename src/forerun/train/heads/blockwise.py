"""Blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115, section 6); the drafter is drafters/blockwise.py.

One feed-forward layer reads the target's last hidden state of token m. Its output k (from 1), added to that state, goes
through the rows of the target's LM head and learns the target's distribution of token m+k+1. All outputs are made of
one hidden layer; that is all that differs from medusa.py. The target stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters.blockwise import shapes
from forerun.models.layers import DecoderConfig
from forerun.train import losses
from forerun.train.heads import Teacher
from forerun.train.heads.medusa import AheadHead


@dataclass(frozen=True)
class Options:
    """The sizes of the layer, and how it learns."""

    heads: int = field(default=4, metadata={"help": "outputs, one for each token ahead", "min": 1, "max": 16})
    units: int = field(default=256, metadata={"help": "units of the hidden layer for each output", "min": 1})
    draft_vocab: int = field(
        default=8192, metadata={"help": "ids that are drafted, those that the target wrote most often", "min": 2}
    )
    decay: float = field(default=0.8, metadata={"help": "weight of an output's loss over that of the one before"})
    loss: str = field(default="kl", metadata={"help": losses.HELP})

    def __post_init__(self) -> None:
        losses.check(self.loss)


def layers(options: Options, config: DecoderConfig) -> tuple[int, ...]:
    """None: the last hidden state is behind the final norm."""
    return ()


class Head(AheadHead):
    """The layer. It begins as the target's own head, for its second matrix is 0."""

    method = "blockwise"

    def __init__(self, options: Options, teacher: Teacher, seed: int) -> None:
        self._width, inner = teacher.config.hidden_size, options.heads * options.units
        generator = torch.Generator().manual_seed(seed)
        weights = {name: torch.zeros(shape) for name, shape in shapes(options.heads, inner, self._width).items()}
        weights["hidden.weight"].normal_(0, self._width**-0.5, generator=generator)
        super().__init__(options, teacher, weights, {"num_heads": options.heads, "intermediate_size": inner})

    def output(self, head: int, hidden: Tensor) -> Tensor:
        """See AheadHead."""
        w, own = self.weights, slice(head * self._width, (head + 1) * self._width)
        inner = F.relu(F.linear(hidden, w["hidden.weight"], w["hidden.bias"]))
        return hidden + F.linear(inner, w["output.weight"][own], w["output.bias"][own])
