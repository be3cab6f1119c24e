"""Rotary tables of cos and sin by position, as tensors for the operators in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.blocks import Rope
from forerun.ops.rotary import Rotations


class TorchRotations:
    """A table of rotations on a device, in one dtype, which grows when higher positions are needed."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._host = Rotations(rope, head_dim)
        self._device = device
        self._dtype = dtype
        self._table = torch.from_numpy(self._host.table(0)).to(device, dtype)

    def at(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [T, 1, turned dimensions], at positions [T] below `end`, for ReferenceOps.rope."""
        cos, sin = self.table(end)[positions].unbind(1)
        return cos, sin

    def table(self, end: int) -> Tensor:
        """Return cos and sin of at least every position below `end`: [positions, 2, 1, turned dimensions]."""
        if end > self._table.shape[0]:
            more = torch.from_numpy(self._host.table(end)[self._table.shape[0] :])
            self._table = torch.cat((self._table, more.to(self._device, self._dtype)))
        return self._table
