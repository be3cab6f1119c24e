"""Specs of trained heads: every backend computes of them what the operators in torch compute."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.blocks import Block, Features, Mlp, Norm, Plain, Spec, weights
from forerun.drafters.shared.head_matrices import quantised
from forerun.errors import InternalError
from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, pack
from forerun.ops.passes import Lent
from forerun.ops.quantising import scheme_of
from forerun.ops.reference import ReferenceOps
from forerun.types import RaggedBatch
from ops.native_cases import needs_native, ops_of, same_bits, seeded
from ops.test_cuda import DEVICE, needs_triton, operators
from refusals import refusal
from tensors import TensorOps, as_host, load_model

__all__ = ["operators"]  # a fixture
WIDTH, IDS, OWN_IDS, BLOCK = 32, 61, 23, 4
TARGET = Plain("llama", IDS, WIDTH, 1, 4, 2, 8, 48, 1e-5, 64, tied=True).spec
LAYER = replace(TARGET, vocab_size=OWN_IDS, tied=False)
JOINED: dict[str, Any] = {"num_ids": IDS, "size": WIDTH, "joined": True}


def headed(features: Features, blocks: tuple[Block, ...], **more: Any) -> Spec:
    return replace(LAYER, features=features, blocks=blocks, **more)


def attending(**changes: Any) -> Block:
    [block] = LAYER.blocks
    return replace(block, attention=replace(block.attention, **changes))


def reading(reads: int | None) -> Block:
    return replace(attending(reads=reads), pre_attention=None)


RESIDUAL = Block(mlp=Mlp(WIDTH, gated=False, bias=True, down=False))
PRODUCT = Features(**JOINED, num=2, row_norms=True, side_norms=True, input_bias=True)
READ = Features(**JOINED, num=3, whole_norm=True, side_norms=True, input="read", normed_stream=True, feeds="normed")
GATED = Features(**JOINED, num=3, bias=True, act="silu", input="features")
CONTEXT = Features(**JOINED, num=2, input="context", context_norm=Norm(offset=1.0))
HEADS = {
    "product": headed(PRODUCT, LAYER.blocks),
    "product, the target's LM head": headed(PRODUCT, LAYER.blocks, head=False, vocab_size=IDS),
    "read": headed(READ, (reading(2 * WIDTH), *LAYER.blocks)),
    "no final norm, an embedding of its own": headed(
        Features(IDS, WIDTH), (reading(None),), final_norm=None, own_embedding=True
    ),
    "features": headed(GATED, (RESIDUAL, RESIDUAL), final_norm=None, head_bias=True),
    "context": headed(CONTEXT, (attending(sees="all"), attending(sees="all"))),
}


def random_weights(spec: Spec, seed: int) -> dict[str, Tensor]:
    generator = seeded(seed)
    return {w.name: torch.randn(w.shape, generator=generator) * 0.3 + ("norm" in w.name) for w in weights(spec)}


def loaded(spec: Spec, ops: ReferenceOps, device: torch.device) -> Any:
    target_weights, own = ({n: w.to(device) for n, w in random_weights(s, 1).items()} for s in (TARGET, spec))
    return load_model(spec, own, ops, lent=Lent(load_model(TARGET, target_weights, ops), list(range(OWN_IDS))))


def rows_of(spec: Spec, model: Any, layer_rows: list[Tensor]) -> list[Tensor]:
    """What a head makes of two texts side by side: features, rows and logits of the first tokens, then of more."""
    texts, cut = {0: [3, 9, 60, 1, 5], 1: [4, 8]}, {0: 3, 1: 1}
    if not any(block.attention for block in spec.blocks):
        features = model.features(layer_rows)
        rows = model.forward(RaggedBatch([0] * 7, list(range(7)), [0, 7], [0], [0]), None, None, features).hidden
        return [features, rows, model.logits(rows)]
    shape = replace(spec.cache_shape, windows=None)
    cache = BlockCache.create(shape, "paged", max_batch_size=2, max_seq_len=32, dtype="float32", pools=model.make_pools)
    found = list[Tensor]()
    for slot in texts:
        cache.open(slot)
    for part in (lambda slot: texts[slot][: cut[slot]], lambda slot: texts[slot][cut[slot] :]):
        runs = [Run(slot, part(slot)) for slot in texts]
        for run in runs:
            cache.reserve(run.slot, len(run.tokens))
        batch = pack(runs, cache)
        own = [rows[: batch.run_starts[-1]].contiguous() for rows in layer_rows]
        if spec.features is not None and spec.features.input == "context":
            model.remember(batch, cache, own)
            cache.keep({run.slot: range(len(run.tokens)) for run in runs})
            runs = [Run(slot, [7] * BLOCK) for slot in texts]
            for run in runs:
                cache.reserve(run.slot, BLOCK)
            rows = model.forward(pack(runs, cache), cache).hidden
        else:
            rows = model.forward(batch, cache, None, model.features(own)).hidden
            cache.keep({run.slot: range(len(run.tokens)) for run in runs})
        found += [rows, model.logits(rows, 9)]
    return found


@pytest.mark.parametrize(
    "backend", [pytest.param("native", marks=needs_native), pytest.param("cuda", marks=needs_triton)]
)
@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_what_torch_computes(name: str, backend: str, request: pytest.FixtureRequest) -> None:
    spec = HEADS[name]
    generator = seeded(9)
    layer_rows = [torch.randn(7, WIDTH, generator=generator) * 3 for _ in range(spec.features.num)]
    layer_rows[0][1, 2] = 1e9  # which is cut
    ops = TensorOps() if backend == "native" else request.getfixturevalue("operators")
    device = torch.device("cpu") if backend == "native" else DEVICE
    wanted = rows_of(spec, loaded(spec, ReferenceOps(), torch.device("cpu")), layer_rows)
    given = rows_of(spec, loaded(spec, ops, device), [rows.to(device) for rows in layer_rows])
    for one, other in zip(given, wanted, strict=True):
        assert torch.allclose(one.cpu(), other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None], ids=["float32", "bfloat16", "int8"])
def test_a_row_of_features_is_its_own(isa: str, dtype: torch.dtype | None) -> None:
    """Its bits do not depend on how many rows are joined, nor do those of what a head makes of it."""
    stored: dict[str, Any] = {n: w.to(dtype or torch.bfloat16) for n, w in random_weights(HEADS["product"], 1).items()}
    if dtype is None:
        scheme = scheme_of(8, WIDTH)
        stored |= {n: quantised(as_host(w), scheme) for n, w in stored.items() if n in ("fc.weight", "input.weight")}
    of_target = {n: w.to(dtype or torch.bfloat16) for n, w in random_weights(TARGET, 1).items()}
    lent = Lent(load_model(TARGET, of_target, ops_of(isa)), list(range(OWN_IDS)))
    model: Any = load_model(HEADS["product"], stored, ops_of(isa), lent=lent)
    layer_rows = [torch.randn(29, WIDTH, generator=seeded(i)) for i in range(2)]
    whole = model.features(layer_rows)
    for i in range(29):
        assert same_bits(model.features([rows[i : i + 1] for rows in layer_rows]), whole[i : i + 1])


@needs_native
def test_rows_that_are_not_a_heads_own_are_refused() -> None:
    model = loaded(HEADS["context"], TensorOps(), torch.device("cpu"))
    for wrong in ([torch.zeros(2, WIDTH)], [torch.zeros(2, WIDTH)] * 3):
        assert "rows of as many layers" in refusal(ValueError, model.features, wrong)
    assert "do not fit a width" in refusal(InternalError, model.features, [torch.zeros(2, WIDTH + 1)] * 2)
    with pytest.raises(InternalError, match="1 rows are given where there must be 2"):
        model.features([torch.zeros(2, WIDTH), torch.zeros(1, WIDTH)])
    plain = load_model(TARGET, random_weights(TARGET, 1), TensorOps())
    with pytest.raises(ValueError, match="rows of as many layers"):
        plain.features([torch.zeros(2, WIDTH)])  # type: ignore[union-attr]
