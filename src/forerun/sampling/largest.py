"""The ids of the largest logits of many rows.

On the host numpy finds them: torch's topk and argmax of several rows wake a team of threads of their own, which costs
the next pass of the operators' team several milliseconds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_STRIPES = 64  # a row is read as so many stripes, whose elementwise maximum is cheap


def best(logits: Tensor) -> list[int]:
    """Return the id of the largest logit of each row of [R, ids], the lowest id on ties."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.argmax(dim=1).tolist()
    return logits.numpy().argmax(axis=1).tolist()  # type: ignore[no-any-return]


def top(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return ids and values of the `num` largest logits of each row of [R, ids], largest first, each [R, num].

    On the host, columns i, i + n, i + 2n, ... of a row form group i. The `num` groups with the largest maxima hold the
    `num` largest logits, so only their members are sorted.
    """
    num_ids = logits.shape[1]
    num = min(num, num_ids)
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        found = logits.topk(num)
        return found.indices, found.values
    rows, num_groups = logits.numpy(), num_ids // _STRIPES
    if num_groups <= num:
        candidates = np.broadcast_to(np.arange(num_ids), rows.shape)
    else:
        striped = num_groups * _STRIPES
        maxima = rows[:, :striped].reshape(len(rows), _STRIPES, num_groups).max(axis=1)
        groups = np.argpartition(maxima, num_groups - num, axis=1)[:, num_groups - num :]
        members = groups[:, :, None] + num_groups * np.arange(_STRIPES)
        rest = np.broadcast_to(np.arange(striped, num_ids), (len(rows), num_ids - striped))
        candidates = np.concatenate((members.reshape(len(rows), num * _STRIPES), rest), axis=1)
    values = np.take_along_axis(rows, candidates, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")[:, :num]
    ids = np.take_along_axis(candidates, order, axis=1)
    return torch.from_numpy(ids), torch.from_numpy(np.take_along_axis(values, order, axis=1))
