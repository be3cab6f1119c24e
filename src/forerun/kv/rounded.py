"""Keys and values in 8 bits: each row is rounded by itself, and takes half to two thirds of the bytes of bfloat16.

Each head of a row is stored as int8 codes, followed by the bfloat16 scale of each group of codes. In keys, 32
dimensions share a scale; in values, 64 do. A number is scale * code. The scale is the largest magnitude of the group,
divided by 127, and the code is the nearest integer, ties to even.

In models whose keys have a bias, a few dimensions of the keys are a hundred times as large as the other dimensions.
Dimensions that share a scale with them would lose precision (KIVI, Liu et al. 2024, finds such channels). So the
kernels put dimensions with biases of similar size side by side, and store the rounding error of the first 32 dimensions
as a further group of codes (`CacheShape.refined_keys`). In this file, dimensions are in their stored order.

The kernels do the same operations (csrc/rounding.h).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forerun.blocks import KEY_GROUP, REFINED, VALUE_GROUP
from forerun.host_tensor import Floats, HostTensor

Stored = npt.NDArray[np.int8]
LEAST_SCALE = 1e-36  # a group with a smaller scale counts as zeros


def rounded_keys(keys: Floats, *, refined: bool) -> Stored:
    """Round keys [..., head_dim] to the stored form, int8 [..., width].

    refined: whether to store the rounding errors of the first dimensions, too.
    """
    scales, codes = _groups(keys, KEY_GROUP)
    if refined:
        left = keys[..., :REFINED] - codes[..., :REFINED].astype(np.float32) * scales.float32()[..., :1]
        more, second = _groups(left, KEY_GROUP)
        scales = HostTensor.joined([scales, more], -1)
        codes = np.concatenate([codes, second], -1)
    return np.concatenate([codes, _bytes_of(scales)], -1)


def rounded_values(values: Floats) -> Stored:
    """Round values [..., head_dim] to the stored form, int8 [..., width]."""
    scales, codes = _groups(values, VALUE_GROUP)
    return np.concatenate([codes, _bytes_of(scales)], -1)


def plain_keys(stored: Stored, head_dim: int, *, refined: bool) -> Floats:
    """Convert stored keys back to float32 [..., head_dim]. refined: as in `rounded_keys`."""
    keys = _plain(stored, head_dim + REFINED * refined, KEY_GROUP)
    if refined:
        keys[..., :REFINED] += keys[..., head_dim:]
    return keys[..., :head_dim]


def plain_values(stored: Stored, head_dim: int) -> Floats:
    """Convert stored values back to float32 [..., head_dim]."""
    return _plain(stored, head_dim, VALUE_GROUP)


def _bytes_of(scales: HostTensor) -> Stored:
    return np.ascontiguousarray(scales.values).view(np.int8)


def _groups(x: Floats, group: int) -> tuple[HostTensor, Stored]:
    """Round float32 numbers. Returns their scales, bfloat16 [..., groups], and their codes, int8 [..., dim].

    The scale is NaN for a group with a number that is not finite.
    """
    dim = x.shape[-1]
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -dim % group)])
    groups = padded.reshape(*x.shape[:-1], padded.shape[-1] // group, group)
    with np.errstate(invalid="ignore", divide="ignore"):
        most = np.abs(groups).max(-1, initial=0.0)
        scales = HostTensor.of(np.where(np.isfinite(most), most / np.float32(127), np.float32(np.nan))).to("bfloat16")
        wide = scales.float32()
        wide = np.where(wide < LEAST_SCALE, np.float32(0), wide)
        codes = np.clip(np.rint(groups / wide[..., None]), -127, 127)
        codes = np.where(wide[..., None] > 0, codes, 0).astype(np.int8)
    return HostTensor.of(wide).to("bfloat16"), codes.reshape(padded.shape)[..., :dim]


def _plain(stored: Stored, dim: int, group: int) -> Floats:
    scales = HostTensor(np.ascontiguousarray(stored[..., dim:]).view(np.uint16), "bfloat16").float32()
    return stored[..., :dim].astype(np.float32) * np.repeat(scales, group, -1)[..., :dim]
