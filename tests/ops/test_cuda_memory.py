"""The plan of the CUDA backend counts the bytes that its weights have."""

from typing import Any

import pytest
import torch

from forerun import blocks
from forerun.blocks import Experts, Mlp, Plain
from forerun.ops.cuda.memory import CudaSizes
from forerun.ops.cuda.packed import CudaWeights, packs
from forerun.ops.memory import Pass
from forerun.ops.quantised import QuantisedMatrix, Scheme
from ops.native_blocks import mixture, spec_of
from ops.test_quantised import SCHEMES, rows_of

SPEC = Plain("qwen2", 300, 512, 2, 4, 2, 128, 768, 1e-5, 96, tied=True, qkv_bias=True).spec
PACKED = {name: scheme for name, scheme in SCHEMES.items() if packs(scheme) and 256 % scheme.group == 0}


@pytest.mark.parametrize("name", ["none", *PACKED])
def test_weights_are_counted_to_the_byte(name: str) -> None:
    """Biases and norms are dense, and so is all of a model that is not quantised."""
    scheme: Scheme | None = PACKED.get(name)
    made, schemes = dict[str, Any](), dict[str, Scheme]()
    for weight in blocks.weights(SPEC):
        if scheme is None or len(weight.shape) == 1:
            made[weight.name] = torch.zeros(weight.shape, dtype=torch.bfloat16)
        else:
            rows = rows_of(scheme, *weight.shape)
            made[weight.name] = QuantisedMatrix(scheme, weight.shape, lambda own=rows: iter([own]))
            schemes[weight.name] = scheme
    weights = CudaWeights(SPEC, made)
    dense = sum(part.nbytes for part in weights.values() if isinstance(part, torch.Tensor))
    (part,) = CudaSizes("bfloat16", "cuda", 96, False, False, {"target": schemes}).weights({"target": SPEC})
    assert part.bytes == dense + sum(whole.nbytes for whole in weights.wholes.values())


def test_a_pass_and_its_graphs_are_counted() -> None:
    """More rows take more, and the graphs keep probabilities of each of their sizes."""
    sizes = CudaSizes("bfloat16", "cuda", 96, False, False)
    one, many = (sizes.activations([Pass("target", SPEC, rows, rows, 0, 96, 96, rows)]) for rows in (64, 512))
    assert [part.name for part in one] == ["activations", "graphs"]
    assert many[0].bytes > 4 * one[0].bytes
    assert one[1].bytes == many[1].bytes > 127 * 300 * 4


def test_a_pass_counts_the_experts_that_rows_choose() -> None:
    """Inner outputs of all of them are in memory at once, gates and ups, in float32."""
    sizes, found = CudaSizes("bfloat16", "cuda", 96, False, False), list[int]()
    for chosen in (1, 8):
        spec = spec_of([mixture(Experts(8, chosen, Mlp(700)))])
        found.append(sizes.activations([Pass("target", spec, 512, 0, 0, 96, 96, 1)])[0].bytes)
    assert found[1] - found[0] >= 512 * 7 * 1400 * 4
