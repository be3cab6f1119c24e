"""Speculation over packed weights says what plain decoding says, bit for bit: a sample of `make parity`."""

import pytest

from forerun import native
from forerun.ops.cpu import CpuOps
from parity.bitwise import Models, compare, cut_prompts
from parity.covering import design


@pytest.mark.skipif(native.isa() == "reference", reason=f"no native operators: {native.why_not()}")
@pytest.mark.parametrize("quantization", ["int8", "int4", "int4:group=64"])
def test_packed_weights(quantization: str) -> None:
    models = Models.shipped(quantization, CpuOps())
    found = compare(models, models, design({2: 2, 4: 2}, seed=5), cut_prompts(16, seed=5, longest=200), 16)
    assert models.target.model.weight_bits
    assert found.num_outputs == 16
    assert found.num_accepted > 20
    assert not found.mismatches, "\n".join(found.mismatches)
