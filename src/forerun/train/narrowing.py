"""Makes a feed-forward part that is narrower than the target's, for a head.

The inner outputs of a feed-forward part are the inputs of its last matrix. Each inner output adds its value times its
column of this matrix to the result. So inner outputs are ranked by their mean square times the sum of squares of their
column (a diagonal of Optimal Brain Surgeon, Hassibi and Stork 1993), and the best are kept. Then the last matrix is
fitted by least squares, on texts that the target wrote, so that the kept inner outputs give the result of all inner
outputs. In Qwen2.5-Coder 1.5B, the best 2,048 of 8,960 inner outputs miss 14 % of the result's sum of squares without
the fit, and 3 % with the fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.blocks import Spec
from forerun.train.heads import Batch, TrainedBlock, visible

RIDGE = 1e-3  # of the mean square of the inner outputs, added to the normal equations
UP = ("gate_proj.weight", "gate_proj.bias", "up_proj.weight", "up_proj.bias")
DOWN = "down_proj.weight"


def narrowed(decoder: Spec, size: int) -> Spec:
    """Return `decoder` with only its first layer, whose feed-forward part gets at most `size` intermediate outputs."""
    block = decoder.blocks[0]
    assert block.mlp is not None
    return replace(decoder, blocks=(replace(block, mlp=replace(block.mlp, size=min(size, block.mlp.size))),))


class Narrowing:
    """Chooses the inner outputs that a narrowed feed-forward part keeps, and fits its last matrix to them.

    Inner outputs are the inputs of the last matrix. decoder: the spec of a head that is as wide as the target. last:
    the weights of the target's layer, by name. at: the prefix of these names. read: the index in `Batch.layers` of the
    input of this layer.
    """

    def __init__(self, decoder: Spec, last: Mapping[str, Tensor], at: str, read: int) -> None:
        self._block = TrainedBlock(decoder, last, at)
        self._last = last
        self._at = f"{at}mlp."
        self._read = read
        width = last[self._at + DOWN].shape[1]
        self._squares = torch.zeros(width, width)

    def seen(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches unchanged. Before, add the inner outputs of each batch to the sums that `weights` reads."""
        for batch in batches:
            inner = self._inner(batch)[batch.inside.flatten()]
            self._squares += inner.T @ inner
            yield batch

    def weights(self, size: int) -> dict[str, Tensor]:
        """Return the matrices and biases of the feed-forward part that has `size` inner outputs, by name."""
        down = self._last[self._at + DOWN]
        added = self._squares.diagonal() * down.pow(2).sum(0)
        kept = added.argsort(descending=True, stable=True)[:size].sort().values
        squares = self._squares[kept][:, kept]
        products = self._squares[kept] @ down.T
        ridge = RIDGE * squares.diagonal().mean() * torch.eye(len(kept))
        names = [self._at + name for name in UP if self._at + name in self._last]
        return {name: self._last[name][kept] for name in names} | {
            self._at + DOWN: torch.linalg.solve(squares + ridge, products).T
        }

    def _inner(self, batch: Batch) -> Tensor:
        """Return the target's inner outputs [S * L, size], computed from the input of the target's layer."""
        block, x = self._block, batch.layers[:, :, self._read].float()
        y = block.read(x)
        keys, values = block.keys_values(y, batch.at)
        mask = visible(batch) | torch.eye(x.shape[1], dtype=torch.bool)  # padding, which has no text, attends to itself
        queries = block.queries(y, batch.at)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=block.scale)
        return block.inner(x, y, attended)
