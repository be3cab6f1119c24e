"""The models of torch.py with each row computed alone: slow, but row-invariant on any device, for bitwise tests."""

from __future__ import annotations

from functools import cache

from forerun.ops.memory import Sizes, Wanted
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import load as load, supports as supports, usable as usable
from forerun.ops.torch_memory import ReferenceSizes

NAME = "reference_row_by_row"
NEEDS = "torch"
RANK = 0  # never chosen by auto
row_invariant = True


@cache
def make() -> ReferenceOps:
    """Return the operators that compute each row alone."""
    return ReferenceOps(row_by_row=True)


def sizes(wanted: Wanted) -> Sizes:
    """Return the object that computes the memory of weights and passes."""
    return ReferenceSizes(wanted.dtype, wanted.device, wanted.max_seq_len, wanted.in_place, row_by_row=True)
