"""Keys and values in 8 bits: a row of a cache that depends on itself alone, at half to two thirds of bfloat16's bytes.

A head is stored as its codes, int8, and behind them the scale of each group of them, bfloat16: 32 dimensions of keys
share one, and 64 of values. A number is scale * code, with scale = the largest magnitude of the group / 127 and code =
the nearest integer, ties to even. Keys of models with a bias have a few dimensions that are a hundred times as large as
the others, and those that share their scales would lose their bits (KIVI, Liu et al. 2024, finds such channels). So the
kernels put dimensions whose biases are about as large side by side, and what the codes of the first 32 have left is
stored as further codes, a group of its own (`CacheShape.refined_keys`). Here dimensions are in the order in which they
are stored.

The kernels do the same operations (csrc/rounding.h).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.blocks import KEY_GROUP, REFINED, VALUE_GROUP

LEAST_SCALE = 1e-36  # a group whose scale is less counts as zeros


def rounded_keys(keys: Tensor, *, refined: bool) -> Tensor:
    """Return keys [..., head_dim] of any type as they are stored, int8 [..., width]."""
    keys = keys.float()
    scales, codes = _groups(keys, KEY_GROUP)
    if refined:
        left = keys[..., :REFINED] - codes[..., :REFINED].float() * scales[..., :1].float()
        more, second = _groups(left, KEY_GROUP)
        scales, codes = torch.cat([scales, more], -1), torch.cat([codes, second], -1)
    return torch.cat([codes, scales.contiguous().view(torch.int8)], -1)


def rounded_values(values: Tensor) -> Tensor:
    """Return values [..., head_dim] of any type as they are stored, int8 [..., width]."""
    scales, codes = _groups(values.float(), VALUE_GROUP)
    return torch.cat([codes, scales.contiguous().view(torch.int8)], -1)


def plain_keys(stored: Tensor, head_dim: int, *, refined: bool) -> Tensor:
    """Return the float32 keys [..., head_dim] that stored ones stand for."""
    keys = _plain(stored, head_dim + REFINED * refined, KEY_GROUP)
    if refined:
        keys[..., :REFINED] += keys[..., head_dim:]
    return keys[..., :head_dim]


def plain_values(stored: Tensor, head_dim: int) -> Tensor:
    """Return the float32 values [..., head_dim] that stored ones stand for."""
    return _plain(stored, head_dim, VALUE_GROUP)


def _groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return scales, bfloat16 [..., groups], and codes [..., dim] of float32 numbers; NaN for what is not finite."""
    dim = x.shape[-1]
    padded = F.pad(x, (0, -dim % group))
    own = padded.view(*x.shape[:-1], padded.shape[-1] // group, group)
    most = own.abs().amax(-1)
    scales = torch.where(most.isfinite(), most / 127, torch.nan).to(torch.bfloat16)
    scales = torch.where(scales.float() < LEAST_SCALE, 0, scales)
    codes = (own / scales.float()[..., None]).round().clamp(-127, 127)
    codes = torch.where(scales.float()[..., None] > 0, codes, 0).to(torch.int8)
    return scales, codes.flatten(-2)[..., :dim]


def _plain(stored: Tensor, dim: int, group: int) -> Tensor:
    scales = stored[..., dim:].contiguous().view(torch.bfloat16).float()
    return stored[..., :dim].float() * scales.repeat_interleave(group, -1)[..., :dim]
