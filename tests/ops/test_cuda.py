"""The CUDA backend's kernels: the function that torch computes, and the bits of a row whatever is beside it.

They run on a card where there is one, and else under Triton's interpreter, for which Triton must be installed; it is a
package of its own, which nothing else here needs. Triton 3.6's interpreter fails with numpy 2.4, and 3.9's does not.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import ops
from forerun.blocks import Attention, Block, Mlp, Plain, Rope, Spec
from forerun.config import Quantization
from forerun.errors import BadOption
from forerun.kv.cache import BlockCache
from forerun.ops import cuda, load_model
from forerun.ops.reference import ReferenceOps
from forerun.types import RaggedBatch, ancestor_words
from ops.native_blocks import RMS, SPECS, random_weights, spec_of
from ops.native_cases import path_to, same_bits, seeded

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TREE = [-1, 0, 0, 1, 1, 2, -1, 6]
TYPES = [(torch.float32, 1e-5), (torch.float16, 0.02), (torch.bfloat16, 0.06)]
every_type = pytest.mark.parametrize(("dtype", "tolerance"), TYPES, ids=["float32", "float16", "bfloat16"])


@pytest.fixture(scope="module")
def operators() -> Iterator[cuda.CudaOps]:
    """The operators, interpreted where there is no card."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        yield cuda.CudaOps()


def test_what_keeps_the_kernels_from_running_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no card, or no Triton, the file is imported all the same."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert (reason := cuda.usable("cpu")) is not None
    assert "Triton" in reason or "CUDA device" in reason
    with pytest.raises(BadOption, match="ops='cuda'"):
        ops.resolve("cuda", "cpu")
    assert cuda.supports(Plain("llama", 61, 32, 2, 4, 2, 8, 48, 1e-5, 64).spec) is None


@needs_triton
@every_type
def test_a_product_is_that_of_torch_and_a_rows_bits_its_own(
    operators: cuda.CudaOps, dtype: torch.dtype, tolerance: float
) -> None:
    generator = seeded(1)
    for num_out, num_in in ((64, 256), (57, 200)):
        weight = torch.randn(num_out, num_in, generator=generator).to(DEVICE, dtype)
        bias = torch.randn(num_out, generator=generator).to(DEVICE, dtype)
        x = torch.randn(64, num_in, generator=generator).to(DEVICE)
        whole = operators.linear(x, weight, bias)
        exact = x.to(dtype).double() @ weight.double().T + bias.double()
        assert float((whole - exact).norm()) <= 1e-5 * float(exact.norm())
        for first, num in ((0, 1), (5, 1), (63, 1), (3, 2), (8, 8), (20, 17)):
            assert same_bits(operators.linear(x[first : first + num], weight, bias), whole[first : first + num])


@needs_triton
def test_the_largest_logit_is_the_lowest_of_equal_ones(operators: cuda.CudaOps) -> None:
    logits = torch.randn(3, 9000, generator=seeded(4))
    logits[0, 77] = logits[0, 8000] = 9.0
    logits[1, 5] = torch.nan
    pairs, found = operators.largest(logits.to(DEVICE))
    assert found.tolist() == [77, -1, int(logits[2].argmax())]
    assert pairs[0, 0] == 77
    assert not pairs[1, 1].isfinite()


LARGE = Block(RMS, Attention(2, 1, 320, rope=Rope()), pre_mlp=RMS, mlp=Mlp(33))
FOUND = SPECS | {"large heads": spec_of([LARGE])}
MODELS = ["gemma3", "gpt2", "partial", "sums", "experts", "gpt_oss, experts", "gemma4, experts", "gemma4, own inputs"]
MODELS += ["large heads"]


class Text:
    """A model with a cache, fed by slots."""

    def __init__(self, spec: Spec, weights: dict[str, Tensor], operators: ReferenceOps) -> None:
        self.model = load_model(spec, weights, operators)
        shape = replace(spec.cache_shape, windows=None)  # as on a card
        self.cache = BlockCache.of(self.model, "paged", max_batch_size=4, max_seq_len=96, shape=shape)
        for slot in range(4):
            self.cache.open(slot)

    def batch(self, runs: dict[int, list[int]], trees: dict[int, list[int]], more: int = 0) -> RaggedBatch:
        tokens = list[int]()
        positions = list[int]()
        starts = [0]
        ancestors = list[int]()
        cached = [self.cache.length(slot) for slot in runs]
        for (slot, run), length in zip(runs.items(), cached, strict=True):
            self.cache.reserve(slot, len(run) + more)
            words = ancestor_words(trees[slot]) if slot in trees else [0] * len(run)
            places = [w.bit_count() - 1 for w in words] if slot in trees else range(len(run))
            positions += [length + place for place in places]
            ancestors += words
            tokens += run
            starts.append(len(tokens))
        return RaggedBatch(tokens, positions, starts, list(runs), cached, ancestors=ancestors if trees else ())

    def run(self, runs: dict[int, list[int]], tree: list[int] | None = None) -> Tensor:
        """Run and keep the runs, of a tree in slot 0 the path to its last row."""
        trees = {0: tree} if tree else {}
        found: Tensor = self.model.forward(self.batch(runs, trees), self.cache).hidden
        self.cache.keep({s: path_to(len(r) - 1, tree) if s in trees else range(len(r)) for s, r in runs.items()})
        return found.float()


@needs_triton
@pytest.mark.parametrize("name", MODELS)
@every_type
def test_rows_of_a_model_are_those_of_torch_and_their_bits_those_of_rows_alone(
    operators: cuda.CudaOps, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Chunks, a tree with a sequence beside it, and the same text one token at a time.

    With these tokens no router's scores are equal, of which torch and the kernels choose different ones.
    """
    if dtype != torch.float32 and name not in ("gemma3", "sums", "gpt_oss, experts"):
        pytest.skip("one family of joined kernels, one without, and one with experts stand for all in narrow types")
    spec = FOUND[name]
    weights = {n: w.to(DEVICE, dtype) for n, w in random_weights(spec, torch.float32, 0).items()}
    wide = {n: w.float() for n, w in weights.items()}
    own, exact, alone = Text(spec, weights, operators), Text(spec, wide, ReferenceOps()), Text(spec, weights, operators)
    generator = seeded(6)

    def tokens(num: int) -> list[int]:
        return torch.randint(61, (num,), generator=generator).tolist()

    text, rows = list[int](), list[Tensor]()
    passes = [({0: tokens(5), 1: tokens(1)}, None), ({0: tokens(8), 1: tokens(3)}, TREE), ({0: tokens(2)}, None)]
    for runs, tree in passes:
        found, expected = own.run(runs, tree), exact.run(runs, tree)
        assert float((found - expected).norm()) <= tolerance * float(expected.norm())
        path = path_to(len(runs[0]) - 1, tree) if tree else range(len(runs[0]))
        text += [runs[0][i] for i in path]
        rows += [found[i] for i in path]
    for i, token in enumerate(text):
        assert same_bits(alone.run({0: [token]})[0], rows[i]), i


@needs_triton
@pytest.mark.parametrize("name", ["gemma3", "sums"])
def test_a_pass_of_64_rows_has_the_bits_of_passes_of_fewer(operators: cuda.CudaOps, name: str) -> None:
    """On joined kernels, and operator by operator."""
    weights = {n: w.to(DEVICE).bfloat16() for n, w in random_weights(FOUND[name], torch.float32, 0).items()}
    tokens = torch.randint(61, (64,), generator=seeded(6)).tolist()
    whole = Text(FOUND[name], weights, operators).run({0: tokens})
    for num_rows, num_passes in ((8, 3), (2, 1), (1, 1)):
        text = Text(FOUND[name], weights, operators)
        for first in range(0, num_rows * num_passes, num_rows):
            found = text.run({0: tokens[first : first + num_rows]})
            assert same_bits(found, whole[first : first + num_rows]), (num_rows, first)


@needs_triton
def test_a_run_ahead_finds_what_single_passes_find(operators: cuda.CudaOps) -> None:
    spec = Plain("qwen3", 61, 32, 2, 4, 2, 16, 48, 1e-5, 96, tied=True, qk_norm=True).spec
    weights = {n: w.to(DEVICE) for n, w in random_weights(spec, torch.float32, 0).items()}
    text = Text(spec, weights, operators)
    model: Any = text.model
    found = model.run_ahead(text.batch({0: [3, 4, 5], 1: [7]}, {}, more=3), [4, 2], text.cache, 61).ids
    single = Text(spec, weights, operators)
    for slot, run in ((0, [3, 4, 5]), (1, [7])):
        fed, expected = run, list[int]()
        for _ in range(len(found[slot])):
            expected.append(int(model.logits(single.run({slot: fed})[-1:]).argmax()))
            fed = expected[-1:]
        assert found[slot] == expected


@needs_triton
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_rounded_model_is_what_its_codes_stand_for(operators: cuda.CudaOps, quantization: str) -> None:
    spec = Plain("qwen2", 61, 128, 2, 4, 2, 32, 256, 1e-5, 96, qkv_bias=True).spec
    weights = {n: w.to(DEVICE).bfloat16() for n, w in random_weights(spec, torch.float32, 0).items()}
    wanted = Quantization.parse(quantization)
    own, exact = (Text(spec, weights, made) for made in (operators, ReferenceOps()))
    for text in (own, exact):
        text.model = text.model.rounded(wanted)
    assert own.model.weight_bits == ((8,) if quantization == "int8" else (4, 8))
    assert own.model.bytes_per_pass < 0.7 * exact.model.bytes_per_pass
    tokens = list(range(4))
    found, expected = own.run({0: tokens}), exact.run({0: tokens})
    assert float((found - expected).norm()) <= 0.06 * float(expected.norm())
    assert same_bits(torch.cat([own.run({1: [token]}) for token in tokens]), found)
    logits, others = own.model.logits(found), exact.model.logits(expected.bfloat16())
    assert float((logits - others).norm()) <= 0.06 * float(others.norm())
