"""Blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115, section 6); the drafter is drafters/blockwise.py.

One feed-forward layer reads the target's last hidden state of token m. Its output k (from 1) is added to this hidden
state. Rows of the target's LM head map the sum to logits, which learn the target's distribution of token m+k+1. All
outputs share one hidden layer, unlike the heads of medusa.py. The target is not changed.

The first matrix begins with random numbers. The second matrix begins with a least squares fit (`begin`): the hidden
state of token m plus output k is fitted to the target's hidden state of token m+k.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters.shared import head_files
from forerun.registry import option
from forerun.train.heads import Batch, Teacher, medusa, shifted

RIDGE = 1e-2  # of the mean square of the hidden layer's outputs, added to the fit's normal equations
LR = 3e-4  # at 1e-3 it did not learn
layers = medusa.layers


@dataclass(frozen=True)
class Options(medusa.Options):
    """The options of the method: the sizes of the layer, and the settings of its training."""

    heads: int = option(4, "outputs, one for each token ahead", min=1, max=16)
    units: int = option(256, "units of the hidden layer for each output", min=1)


class Head(medusa.Head):
    """The feed-forward layer in float32, with gradients. Its second matrix is 0 until `begin` has fitted it."""

    def __init__(self, options: Options, teacher: Teacher, seed: int) -> None:
        self._units = options.heads * options.units
        self._random = torch.Generator().manual_seed(seed)
        super().__init__(options, teacher, seed)

    def first_weights(self, width: int) -> dict[str, Tensor]:
        """Return the first weights: the first matrix is random, and the other weights are 0."""
        shapes = head_files.feed_forward_shapes(self.options.heads, self._units, width)
        weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
        weights["hidden.weight"].normal_(0, width**-0.5, generator=self._random)
        return weights

    def sizes(self) -> dict[str, Any]:
        """Return the layer's sizes for config.json."""
        return {"num_heads": self.options.heads, "intermediate_size": self._units}

    @torch.no_grad()
    def begin(self, batches: Iterable[Batch]) -> None:
        """Fit the second matrix and its bias by least squares.

        A hidden state plus output k (from 1) is fitted to the hidden state k tokens later.
        """
        num, units = self.options.heads, self._units + 1
        squares, products = torch.zeros(units, units), torch.zeros(units, len(self.weights["output.bias"]))
        for batch in batches:
            rows = batch.ahead(num + 1)  # a text's last token may have no features, see Batch.inside
            x = batch.hidden[rows].float()
            inner = F.pad(F.relu(self._linear("hidden", x)), (0, 1), value=1.0)
            wanted = [shifted(batch.hidden, k + 1)[rows].float() - x for k in range(num)]
            squares += inner.T @ inner
            products += inner.T @ torch.cat(wanted, -1)
        ridge = RIDGE * squares.diagonal().mean() * torch.eye(units)
        fitted = torch.linalg.solve(squares + ridge, products).T
        self.weights["output.weight"].copy_(fitted[:, :-1])
        self.weights["output.bias"].copy_(fitted[:, -1])

    def rows(self, head: int, batch: Batch, learned: Tensor) -> Tensor:
        """Return the sum of the hidden states and output `head` (from 0) of the layer, [R, H].

        learned [S, L] bool: marks the R tokens of the batch for which the sum is computed.
        """
        x = batch.hidden[learned].float()
        width = x.shape[-1]
        output = slice(head * width, (head + 1) * width)
        inner = F.relu(self._linear("hidden", x))
        return x + F.linear(inner, self.weights["output.weight"][output], self.weights["output.bias"][output])
