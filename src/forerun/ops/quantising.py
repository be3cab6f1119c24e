"""Rounds dense weights to 4 or 8 bits, the nearest integers of each group; no text is looked at.

8 bits are symmetric around a zero point of 128. 4 bits have a zero point within the group's range, and the scale is the
one of a few that leaves the least squared error: a range that clips the largest weight a little rounds all others
finer (the search that GGUF's K-quants do, with fewer steps).
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.ops.quantised import QuantisedRows, Scheme

SCALE_DTYPE = torch.bfloat16  # as published checkpoints have them, whose model is computed in bfloat16
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)  # of a group's range


def scheme_of(bits: int, group: int) -> Scheme:
    """Return the scheme of weights that `quantise` rounds."""
    return Scheme(bits, group, "zero", SCALE_DTYPE, zero=128 if bits == 8 else None)


def quantise(rows: Tensor, scheme: Scheme) -> QuantisedRows:
    """Round rows [R, I] to a scheme of `scheme_of`, whose group divides I. The weights must be finite."""
    groups = rows.float().reshape(len(rows), -1, scheme.group)
    codes, scales, zeros = _eight_bits(groups) if scheme.bits == 8 else _four_bits(groups)
    return QuantisedRows(scheme, codes.to(torch.uint8).flatten(1), scales, zeros.to(torch.uint8))


def _eight_bits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = _positive(groups.abs().amax(-1) / 127)
    codes = torch.round(groups / scales.float().unsqueeze(-1)).clamp_(-127, 127).add_(128)
    return codes, scales, torch.full_like(scales, 128)


def _four_bits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = torch.empty(0)
    for share in SHARES:
        scales = _positive((high - low) * (share / 15))
        step = scales.float()
        zeros = torch.round(-share * low / step).clamp_(0, 15)
        codes = torch.round(groups / step.unsqueeze(-1)).add_(zeros.unsqueeze(-1)).clamp_(0, 15)
        errors = (codes - zeros.unsqueeze(-1)).mul_(step.unsqueeze(-1)).sub_(groups).square_().sum(-1)
        if best is None:
            best, least = (codes, scales, zeros), errors
            continue
        better = errors < least
        least = torch.where(better, errors, least)
        best = (
            torch.where(better.unsqueeze(-1), codes, best[0]),
            torch.where(better, scales, best[1]),
            torch.where(better, zeros, best[2]),
        )
    assert best is not None
    return best


def _positive(scales: Tensor) -> Tensor:
    """Return scales in their type; 1 where a group is all zeros, or too small for the type."""
    rounded = scales.to(SCALE_DTYPE)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))
