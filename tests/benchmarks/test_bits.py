"""The list of what has the same bits: every operator by itself, on each set that this processor has."""

import numpy as np
import pytest

from benchmarks import bits
from forerun import native
from forerun.ops.cpu import CpuOps

CASES = [case for case in bits.cases() if case.num_rows in (8, 64) and not case.name.startswith("model")]


@pytest.mark.skipif(len(native.processor_isas()) < 2, reason="one set alone runs here")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_set_has_the_same_bits(case: bits.Case) -> None:
    first, *others = (case.compute(CpuOps(isa, 1)) for isa in native.processor_isas())
    assert bool(np.isfinite(first).all())
    assert [bits.difference(other, first) for other in others] == ["equal"] * len(others)


def test_a_difference_is_told_in_units_of_the_last_place() -> None:
    x = np.array([1.0, -0.0, 2.0, -2.0], np.float32)
    assert bits.difference(x.copy(), x) == "equal"
    assert bits.difference(np.nextafter(x, np.float32(9)), x) == "100%, up to 1 units"
    assert bits.difference(np.array([1.0, 0.0, 2.0, -2.0], np.float32), x) == "25%, up to 0 units"
