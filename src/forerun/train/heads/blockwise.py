"""Blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115, section 6); the drafter is drafters/blockwise.py.

One feed-forward layer reads the target's last hidden state of token m. Its output k (from 1), added to that state, goes
through the rows of the target's LM head and learns the target's distribution of token m+k+1. All outputs are made of
one hidden layer; that is what differs from medusa.py. The target stays as it is.

The first matrix begins as random numbers, and the second by least squares (`begin`): output k is to be the target's
hidden state of token m+k.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters import head_files
from forerun.models.layers import DecoderConfig
from forerun.train import losses
from forerun.train.heads import Batch, Teacher, shifted
from forerun.train.heads.medusa import AheadHead

RIDGE = 1e-2  # of the mean square of the hidden layer's outputs, added to the fit's normal equations


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
    """The layer. Until `begin` its second matrix is 0."""

    method = "blockwise"

    def __init__(self, options: Options, teacher: Teacher, seed: int) -> None:
        self._width, inner = teacher.config.hidden_size, options.heads * options.units
        generator = torch.Generator().manual_seed(seed)
        shapes = head_files.feed_forward_shapes(options.heads, inner, self._width)
        weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
        weights["hidden.weight"].normal_(0, self._width**-0.5, generator=generator)
        super().__init__(options, teacher, weights, {"num_heads": options.heads, "intermediate_size": inner})

    @torch.no_grad()
    def begin(self, batches: Iterable[Batch]) -> None:
        """Fit the second matrix: what makes the hidden states of the next tokens when it is added to that of one."""
        num, units = self.options.heads, len(self.weights["hidden.weight"]) + 1
        squares, products = torch.zeros(units, units), torch.zeros(units, num * self._width)
        for batch in batches:
            rows = batch.ahead(num) & (batch.text >= 0)
            x = batch.hidden[rows].float()
            inner = F.pad(self._inner(x), (0, 1), value=1.0)
            wanted = [shifted(batch.hidden, k + 1)[rows].float() - x for k in range(num)]
            squares += inner.T @ inner
            products += inner.T @ torch.cat(wanted, -1)
        ridge = RIDGE * squares.diagonal().mean() * torch.eye(units)
        fitted = torch.linalg.solve(squares + ridge, products).T
        self.weights["output.weight"].copy_(fitted[:, :-1])
        self.weights["output.bias"].copy_(fitted[:, -1])

    def output(self, head: int, hidden: Tensor) -> Tensor:
        """See AheadHead."""
        w, own = self.weights, slice(head * self._width, (head + 1) * self._width)
        return hidden + F.linear(self._inner(hidden), w["output.weight"][own], w["output.bias"][own])

    def _inner(self, hidden: Tensor) -> Tensor:
        return F.relu(F.linear(hidden, self.weights["hidden.weight"], self.weights["hidden.bias"]))
