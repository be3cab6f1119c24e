"""The ids of the largest logits of many rows, the lowest on ties.

On the host numpy finds them: torch's topk leaves open which of equal ones it takes, and its topk and argmax of several
rows wake a team of threads of their own, which costs the next pass of the operators' team several milliseconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_STRIPES = 64  # a row is read as so many stripes, whose elementwise maximum is cheap

Rows = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.int64]


def best(logits: Tensor) -> list[int]:
    """Return the id of the largest logit of each row of [R, ids], the lowest id on ties."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=1).tolist()
    return _host(logits).argmax(axis=1).tolist()  # type: ignore[no-any-return]


def top(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return ids and values of the `num` largest logits of each row of [R, ids], largest first, each [R, num].

    Of equal ones on the host the lowest ids.
    """
    num = min(num, logits.shape[1])
    if logits.device.type != "cpu":
        found = logits.topk(num)
        return found.indices, found.values
    ids = torch.from_numpy(np.array([_top(row, num) for row in _host(logits)], np.int64).reshape(len(logits), num))
    return ids, logits.gather(1, ids)


def _host(logits: Tensor) -> Rows:
    rows: Rows = (logits if logits.dtype in (torch.float32, torch.float64) else logits.float()).detach().numpy()
    return rows


def _top(row: Rows, num: int) -> Ids:
    """Return the ids of the `num` largest values of a row.

    Columns i, i + n, i + 2n, ... form group i. The `num` largest values are not below the maxima of the `num` groups
    that have the largest ones, so only what is not below those is sorted.
    """
    num_groups = len(row) // _STRIPES
    candidates = np.arange(len(row))
    if num_groups > num:
        maxima = row[: num_groups * _STRIPES].reshape(_STRIPES, num_groups).max(axis=0)
        least = np.partition(maxima, num_groups - num)[num_groups - num]
        if not np.isnan(least):
            candidates = np.flatnonzero(row >= least)
    return candidates[np.argsort(-row[candidates], kind="stable")[:num]]
