"""The ids of the largest logits in each of many rows; the lowest ids on ties.

numpy and torch do not define which of several equal values their partial sorts take. Also, argmax and topk of torch
wake torch's thread pool. The next pass of the operators, which have another thread pool, then takes several
milliseconds longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_STRIPES = 64  # a row is read as so many stripes, whose elementwise maximum is cheap

Rows = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.int64]


def best(logits: npt.ArrayLike) -> list[int]:
    """Return, for each row of logits [R, ids], the id of the largest logit; the lowest id on ties."""
    return np.asarray(logits).argmax(axis=1).tolist()  # type: ignore[no-any-return]


def top(logits: npt.ArrayLike, num: int) -> tuple[Ids, Rows]:
    """Return the ids and the values of the `num` largest logits in each row of logits [R, ids].

    Both arrays are [R, num], with the largest logit first. On ties the lowest ids are taken. If a row has fewer than
    `num` ids, all its ids are returned.
    """
    rows = np.asarray(logits)
    num = min(num, rows.shape[1])
    ids = np.array([_top(row, num) for row in rows], np.int64).reshape(len(rows), num)
    return ids, np.take_along_axis(rows, ids, axis=1)


def _top(row: Rows, num: int) -> Ids:
    """Return the ids of the `num` largest values of a row, largest first, the lowest ids on ties.

    The ids form n groups: group i has the ids i, i + n, i + 2n, ... The smallest of the `num` largest group maxima is a
    threshold that at least `num` values reach. So only values that reach this threshold are sorted.
    """
    num_groups = len(row) // _STRIPES
    candidates = np.arange(len(row))
    if num_groups > num:
        maxima = row[: num_groups * _STRIPES].reshape(_STRIPES, num_groups).max(axis=0)
        least = np.partition(maxima, num_groups - num)[num_groups - num]
        if not np.isnan(least):
            candidates = np.flatnonzero(row >= least)
    return candidates[np.argsort(-row[candidates], kind="stable")[:num]]
