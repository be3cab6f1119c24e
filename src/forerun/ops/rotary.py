"""Positions as numbers: rotations, with the frequencies of each kind, and sinusoids that are added to embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forerun.blocks import Rope


class Rotations:
    """cos and sin by position, computed in blocks of fixed shape so that a table's size never changes its bits."""

    BLOCK = 256

    def __init__(self, rope: Rope, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self.rope = rope
        self.inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self._factor = attention_factor(rope)
        self._table = torch.empty(0, 2, 1, 2 * len(self.inv_freq), device=device, dtype=dtype)
        self._num_positions = 0

    def at(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, 1, turned dimensions] of positions [T] below `end`; sin as ops.rope wants it."""
        cos, sin = self.table(end)[positions].unbind(1)
        return cos, sin

    def table(self, end: int) -> Tensor:
        """Return cos and sin of every position below `end`, and some more: [positions, 2, 1, turned dimensions]."""
        while end > self._num_positions:  # a tensor's len() takes as long as a layer's norm
            first = self._num_positions
            block = torch.arange(first, first + self.BLOCK, device=self.inv_freq.device)
            angles = block[:, None].float() * self.inv_freq[None]
            cos, sin = angles.cos(), angles.sin()
            if self._factor != 1:
                cos, sin = cos * self._factor, sin * self._factor
            table = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
            self._table = torch.cat((self._table, table[:, :, None].to(self._table.dtype)))
            self._num_positions = self._table.shape[0]
        return self._table


def sinusoids(num: int, width: int) -> Tensor:
    """Sines of positions times falling frequencies, then cosines (Vaswani et al. 2017, 3.5), float32 [num, width].

    In float64 until the end, as published code computes its tables.
    """
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(num, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()[:, : width // 2]), -1).float()


def turned(rope: Rope, head_dim: int) -> int:
    """Return how many dimensions of a head a table of rotations has; some of them may turn by 0."""
    return head_dim if rope.kind == "proportional" else rope.dims or head_dim


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the angle per position of each turned pair of dimensions, float32 [pairs].

    llama3 blends scaled and unscaled frequencies by wavelength (Llama 3.1 release), yarn by dimension (Peng et al.
    2023, section 3.2). longrope divides by factors of its own for texts within those of training and for longer ones
    (Ding et al. 2024). proportional turns the first dims / 2 pairs of a head as if all were turned.
    """
    dims = rope.dims or head_dim
    whole = head_dim if rope.kind == "proportional" else dims
    exponents = torch.arange(0, dims, 2, dtype=torch.int64).float() / whole
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return inv_freq
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "proportional":
        rest = torch.zeros(head_dim // 2 - dims // 2)
        return torch.cat((inv_freq, rest)) / rope.factor
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.long_factor if rope.far else rope.short_factor) * rope.theta**exponents)
    if rope.kind == "yarn":
        return _yarn(rope, dims, inv_freq)
    wavelength = 2 * math.pi / inv_freq
    low = rope.original_max_positions / rope.low_freq_factor
    high = rope.original_max_positions / rope.high_freq_factor
    spread = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / spread
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > low, inv_freq / rope.factor, inv_freq)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, scaled)


def _yarn(rope: Rope, dims: int, inv_freq: Tensor) -> Tensor:
    def dimension(num_turns: float) -> float:
        turns = math.log(rope.original_max_positions / (num_turns * 2 * math.pi))
        return dims * turns / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, dims - 1)
    ramp = (torch.arange(dims // 2).float() - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return inv_freq / rope.factor * (1 - kept) + inv_freq * kept


def attention_factor(rope: Rope) -> float:
    """Return what cos and sin are multiplied by: yarn's and longrope's correction of the scores' temperature."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope" and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))
    if rope.kind != "yarn" or rope.factor <= 1:
        return 1.0
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0
