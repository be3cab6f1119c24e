"""The ids of the largest logits in each of many rows; the lowest ids on ties.

Libraries do not define which of several equal values their sorts take. Besides, an argmax or topk of torch wakes
torch's own team of threads, and then the next pass of the operators' team takes several milliseconds longer.
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
    """Return the ids and the values of the `num` largest logits in each row of [R, ids], largest first, each [R, num].

    On ties the lowest ids are taken.
    """
    rows = np.asarray(logits)
    num = min(num, rows.shape[1])
    ids = np.array([_top(row, num) for row in rows], np.int64).reshape(len(rows), num)
    return ids, np.take_along_axis(rows, ids, axis=1)


def _top(row: Rows, num: int) -> Ids:
    """Return the ids of the `num` largest values of a row.

    The columns form n groups: i, i + n, i + 2n, ... are group i. The least of the `num` largest group maxima is a
    threshold that at least `num` values reach. So only the values that reach this threshold are sorted.
    """
    num_groups = len(row) // _STRIPES
    candidates = np.arange(len(row))
    if num_groups > num:
        maxima = row[: num_groups * _STRIPES].reshape(_STRIPES, num_groups).max(axis=0)
        least = np.partition(maxima, num_groups - num)[num_groups - num]
        if not np.isnan(least):
            candidates = np.flatnonzero(row >= least)
    return candidates[np.argsort(-row[candidates], kind="stable")[:num]]
