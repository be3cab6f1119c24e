"""cos and sin by position, as torch's operators take them."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.blocks import Rope
from forerun.ops.rotary import Rotations


class TorchRotations:
    """A table of rotations on a device, in one type, which grows as positions are asked for."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._host, self._device, self._dtype = Rotations(rope, head_dim), device, dtype
        self._table = torch.from_numpy(self._host.table(0)).to(device, dtype)

    def at(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, 1, turned dimensions] of positions [T] below `end`; sin as ops.rope wants it."""
        cos, sin = self.table(end)[positions].unbind(1)
        return cos, sin

    def table(self, end: int) -> Tensor:
        """Return cos and sin of every position below `end`, and some more: [positions, 2, 1, turned dimensions]."""
        if end > self._table.shape[0]:
            more = torch.from_numpy(self._host.table(end)[self._table.shape[0] :])
            self._table = torch.cat((self._table, more.to(self._device, self._dtype)))
        return self._table
