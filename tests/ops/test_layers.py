"""Passes over ranges of layers, with outputs of inner layers, and with embeddings given as vectors.

The native operators and the reference operators in row_by_row mode agree bit for bit with the whole pass; in fast mode
they agree by value.
"""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.blocks import Plain, Spec, resized
from forerun.errors import InternalError
from forerun.host_tensor import dtype_name
from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, Runner, Scores, pack
from forerun.models.toy import ToyModel
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import TorchModel
from forerun.ops.torch_tensors import torch_dtype
from ops.native_cases import (
    BFLOAT16,
    EXACT,
    FLOAT32,
    ISAS,
    NAN,
    Same,
    by_value,
    every_ops,
    make_config,
    needs_native,
    normal,
    ops_of,
    pool_tensors,
    random_weights,
    same_bits,
    tokens_of,
)
from tensors import as_tensor, load_model

NUM_LAYERS = 4
VARIANTS: dict[str, dict[str, Any]] = {"tied": {}, "untied": {"tied": False, "windows": (9, None, 70, 5)}}
CONTEXT, TOKENS, PARENTS = tokens_of(61, 1), tokens_of(6, 2), [-1, 0, 0, 1, 2, 1]  # over the end of a block of 64 keys


every_variant = pytest.mark.parametrize("variant", VARIANTS)
exact = pytest.mark.parametrize(("ops", "dtype", "same"), EXACT)


def config_of(variant: str) -> Spec:
    return make_config(num_layers=NUM_LAYERS, **VARIANTS[variant])


def decoder(ops: ReferenceOps, dtype: torch.dtype, variant: str = "tied") -> TorchModel:
    return load_model(config_of(variant), random_weights(config_of(variant), dtype), ops)


def cache_of(model: TorchModel, context: Seq[int] = CONTEXT) -> BlockCache:
    """Slot 0 holds the context, and slot 1 a part of it; rows that were never written are NaN."""
    cache = BlockCache.of(model, "paged", max_batch_size=4, max_seq_len=128)
    for part in pool_tensors(cache):
        part.fill_(NAN)
    for slot, num in ((0, len(context)), (1, len(context) // 2)):
        cache.open(slot)
        Runner(model, cache).forward([Run(slot, context[:num], "none")])
        cache.keep({slot: range(num)})
    return cache


def both(**tree: Any) -> list[Run]:
    """A tree behind the context, and a chain beside it."""
    return [Run(1, [5, 6, 7]), Run(0, TOKENS, parents=PARENTS, **tree)]


def everything(scores: Scores) -> Tensor:
    """Hidden states and logits of all rows, side by side."""
    return torch.cat((scores.hidden, torch.from_numpy(np.concatenate(scores.logits))), dim=1)


def held(cache: BlockCache, layers: Seq[int]) -> Tensor:
    """All that is in the pools of these layers."""
    pools = [cache.pools[i] for i in layers]
    parts = [as_tensor(part).flatten() for pool in pools for part in (pool.keys, pool.values)]
    return torch.cat([torch.empty(0, dtype=torch_dtype(cache.dtype)), *parts])


# ------------------------------------------------------------------------------------------------------- inner layers


@exact
@every_variant
def test_taps_do_not_depend_on_the_pass(ops: ReferenceOps, dtype: torch.dtype, same: Same, variant: str) -> None:
    """Eight rows beside other runs, and one row alone: the same inner layers, and the same outputs as without taps."""
    model, taps = decoder(ops, dtype, variant), range(NUM_LAYERS + 1)
    text = tokens_of(8, 3)
    beside, plain = (Runner(model, cache_of(model), taps=wanted) for wanted in (taps, ()))
    many = beside.forward([Run(1, [5, 6, 7]), Run(0, text)])
    assert same(everything(many), everything(plain.forward([Run(1, [5, 6, 7]), Run(0, text)])))
    alone = Runner(model, cache_of(model), taps=taps)
    for i, token in enumerate(text):
        one = alone.forward([Run(0, [token])])
        alone.cache.keep({0: [0]})
        for k in taps:
            assert one.taps[k].dtype == FLOAT32
            assert same(one.taps[k], many.taps[k][3 + i : 4 + i]), (i, k)
    assert plain.forward([Run(0, text)]).taps == {}


@every_ops
@every_variant
def test_taps_begin_with_embeddings_and_end_before_the_final_norm(
    ops: ReferenceOps, dtype: torch.dtype, same: Same, variant: str
) -> None:
    model = decoder(ops, dtype, variant)
    scores = Runner(model, cache_of(model), taps=[NUM_LAYERS, 0]).forward(both())
    ids = [5, 6, 7, *TOKENS]
    assert same(scores.taps[0], random_weights(model.config, dtype)["model.embed_tokens.weight"][ids].float())
    assert same(model.embed(ids), scores.taps[0])
    assert same(model.norm(scores.taps[NUM_LAYERS]), scores.hidden)


@needs_native
@every_variant
def test_native_taps_are_those_of_the_reference(isa: str, dtype: torch.dtype, variant: str) -> None:
    """In float64, of the same weights; bfloat16 rounds the inputs of each product on the way."""
    native = decoder(ops_of(isa), dtype, variant)
    weights = {name: weight.double() for name, weight in random_weights(native.config, dtype).items()}
    reference = TorchModel(native.config, weights)
    taps = range(NUM_LAYERS + 1)
    found, expected = (Runner(model, cache_of(model), taps=taps).forward(both()).taps for model in (native, reference))
    most = 1e-5 if dtype == FLOAT32 else 0.03
    for k in taps:
        assert float((found[k] - expected[k]).abs().max() / expected[k].abs().max()) < most


# ---------------------------------------------------------------------------------------------------- ranges of layers


@every_ops
@every_variant
def test_two_parts_are_the_whole(ops: ReferenceOps, dtype: torch.dtype, same: Same, variant: str) -> None:
    """[0, e), then [e, n) on the rows of tap e in the same cache, whose other layers each part leaves alone."""
    model = decoder(ops, dtype, variant)
    whole, everywhere = Runner(model, cache_of(model)), range(NUM_LAYERS)
    expected = whole.forward(both())
    for e in range(NUM_LAYERS + 1):
        cache = cache_of(model)
        lower, upper = everywhere[:e], everywhere[e:]
        before = held(cache, upper)
        first = Runner(model, cache, layers=lower, taps=[e]).forward(both())
        assert same_bits(held(cache, upper), before)
        written, rows = held(cache, lower), first.taps[e]
        chain, tree = both()
        runs = [chain._replace(vectors=dict(enumerate(rows[:3]))), tree._replace(vectors=dict(enumerate(rows[3:])))]
        second = Runner(model, cache, layers=upper).forward(runs)
        assert same_bits(held(cache, lower), written)
        assert same(everything(second), everything(expected)), e
        assert same_bits(held(cache, everywhere), held(whole.cache, everywhere)) or same is by_value


@every_ops
def test_a_tree_grown_by_the_lower_layers_is_judged_by_the_upper(
    ops: ReferenceOps, dtype: torch.dtype, same: Same
) -> None:
    """Level by level as pending rows of the target's own cache; then all at once through the other layers."""
    model, e = decoder(ops, dtype), 2
    expected = Runner(model, cache_of(model)).forward([Run(0, TOKENS, parents=PARENTS)])
    cache = cache_of(model)
    lower = Runner(model, cache, layers=range(e), taps=[e])
    found = []
    for level in ([0], [1, 2], [3, 4, 5]):
        run = Run(0, [TOKENS[i] for i in level], parents=[PARENTS[i] for i in level], pending=True)
        found.append(lower.forward([run]).taps[e])
    cache.keep({0: []})
    upper = Runner(model, cache, layers=range(e, NUM_LAYERS))
    judged = upper.forward([Run(0, TOKENS, parents=PARENTS, vectors=dict(enumerate(torch.cat(found))))])
    assert same(everything(judged), everything(expected))


@every_ops
@every_variant
@pytest.mark.parametrize("layers", [(0, 2), (1, 3), (3,), (0, 1)])
def test_skipped_layers_are_not_there(
    ops: ReferenceOps, dtype: torch.dtype, same: Same, variant: str, layers: tuple[int, ...]
) -> None:
    """A model that skips layers is the shallower one of the others, its final norm included."""
    deep = decoder(ops, dtype, variant)
    found = Plain.of(deep.config).windows
    windows = tuple(found[i] for i in layers) if found else ()
    config = resized(deep.config, num_layers=len(layers), windows=windows)
    weights = {name: w for name, w in random_weights(deep.config, dtype).items() if "layers." not in name}
    for name, weight in random_weights(deep.config, dtype).items():
        parts = name.split(".")
        if parts[1] == "layers" and int(parts[2]) in layers:
            weights[".".join((*parts[:2], str(layers.index(int(parts[2]))), *parts[3:]))] = weight
    shallow = load_model(config, weights, ops)
    skipping, expected = Runner(deep, cache_of(deep, []), layers=layers), Runner(shallow, cache_of(shallow, []))
    for run in (Run(0, CONTEXT), Run(0, TOKENS, parents=PARENTS)):
        found, whole = skipping.forward([run]), expected.forward([run])
        assert same(everything(found), everything(whole))
        for runner in (skipping, expected):
            runner.cache.keep({0: range(len(run.tokens))})
    if skipping.finds_best:
        start = [Run(0, [3, 4])], [5]
        assert skipping.run_ahead(*start) == expected.run_ahead(*start)


@every_ops
def test_an_early_exit_is_read_through_the_final_norm(ops: ReferenceOps, dtype: torch.dtype, same: Same) -> None:
    """A pass of the model itself gives the residual stream."""
    model, e = decoder(ops, dtype), 2
    stream = Runner(model, cache_of(model), taps=[e]).forward(both()).taps[e]
    early = Runner(model, cache_of(model), layers=range(e)).forward(both())
    assert same(early.hidden, model.norm(stream))
    assert same(torch.from_numpy(np.concatenate(early.logits)), model.logits(model.norm(stream)))
    runs, cache = both(), cache_of(model)
    for run in runs:
        cache.reserve(run.slot, len(run.tokens))
    with torch.inference_mode():
        assert same(model.forward(pack(runs, cache), cache, range(e)).hidden, stream)


@every_ops
def test_what_is_no_part_of_a_model_is_refused(ops: ReferenceOps, dtype: torch.dtype, same: Same) -> None:
    model = decoder(ops, dtype)
    cache = cache_of(model)
    cache.reserve(0, 2)
    batch = pack([Run(0, [1, 2])], cache)
    width = model.config.hidden_size
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"layers": [1, 0]}, "layers"),
        ({"layers": [0, 0]}, "layers"),
        ({"layers": [-1]}, "layers"),
        ({"layers": range(NUM_LAYERS + 1)}, "layers"),
        ({"taps": [NUM_LAYERS + 1]}, "taps"),
        ({"taps": [-1]}, "taps"),
        ({"hidden": torch.zeros(2, width + 1)}, "hidden rows"),
    ]
    for arguments, message in wrong:
        with pytest.raises(InternalError, match=message):
            model.forward(batch, cache, **arguments)
    for row in (2, -1):
        with pytest.raises(InternalError, match=f"no row {row}"):
            Runner(model, cache).forward([Run(1, [1, 2]), Run(0, [1, 2], vectors={row: torch.zeros(width)})])
    for ids in ([77], [-1]):
        with pytest.raises(IndexError):
            model.embed(ids)


# ------------------------------------------------------------------------------------------------ embeddings by vector


@every_ops
@every_variant
def test_vectors_stand_for_tokens(ops: ReferenceOps, dtype: torch.dtype, same: Same, variant: str) -> None:
    """Rows with an embedding in place of their token, beside rows of tokens, in one run and in one batch."""
    model = decoder(ops, dtype, variant)
    plain, other = Runner(model, cache_of(model)), Runner(model, cache_of(model))
    expected = plain.forward(both())
    vectors = dict(zip((1, 4), model.embed([TOKENS[1], TOKENS[4]]).float(), strict=True))
    tokens = [0 if i in vectors else token for i, token in enumerate(TOKENS)]
    chain, tree = both(vectors=vectors)
    assert same(everything(other.forward([chain, tree._replace(tokens=tokens)])), everything(expected))
    assert same(held(other.cache, range(NUM_LAYERS)).nan_to_num(), held(plain.cache, range(NUM_LAYERS)).nan_to_num())


@every_ops
def test_a_vector_need_not_be_an_embedding(ops: ReferenceOps, dtype: torch.dtype, same: Same) -> None:
    """A vector changes the rows that see it, and no others."""
    model = decoder(ops, dtype)
    plain, other = Runner(model, cache_of(model)), Runner(model, cache_of(model))
    expected, found = plain.forward(both()), other.forward(both(vectors={2: normal(1, model.config.hidden_size)}))
    sees = [3 + i for i in (2, 4)]  # node 4 is the only child of node 2
    blind = [i for i in range(3 + len(TOKENS)) if i not in sees]
    assert same(everything(found)[blind], everything(expected)[blind])
    assert not bool(torch.isclose(found.hidden[sees], expected.hidden[sees]).all(dim=1).any())


# --------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("ops", "weights", "rows"),
    [
        *(pytest.param(ops_of(isa), d, FLOAT32, id=f"{isa}-{d}") for isa in ISAS for d in (FLOAT32, BFLOAT16)),
        *(pytest.param(ReferenceOps(), d, d, id=f"reference-{d}") for d in (FLOAT32, BFLOAT16, torch.float64)),
    ],
)
def test_types_of_weights_of_rows_and_of_the_cache(ops: ReferenceOps, weights: torch.dtype, rows: torch.dtype) -> None:
    model = decoder(ops, weights)
    wanted = tuple(map(dtype_name, (weights, rows, weights)))
    assert (model.weight_dtype, model.activation_dtype, model.cache_dtype) == wanted
    runner = Runner(model, cache_of(model))
    hidden = runner.forward([Run(0, TOKENS)]).hidden
    assert {hidden.dtype, model.embed([1]).dtype, model.norm(hidden).dtype} == {rows}
    assert dtype_name(runner.cache.pools[0].keys.dtype) == dtype_name(weights)


# ------------------------------------------------------------------------------------------------------------- the toy


def test_the_toy_has_taps_and_takes_vectors() -> None:
    """Tap 0 is one at the id, tap 1 the logits; a vector stands for the id where it is largest."""
    model, text = ToyModel(5, 3), [1, 4, 2]

    def run(**changes: Any) -> Scores:
        cache = BlockCache.of(model, "paged", max_batch_size=1, max_seq_len=16)
        cache.open(0)
        return Runner(model, cache, taps=(0, 1)).forward([Run(0, **{"tokens": text, **changes})])

    scores = run()
    assert scores.taps[0].argmax(axis=1).tolist() == text
    assert np.array_equal(scores.taps[1], scores.hidden)
    assert np.array_equal(run(tokens=[1, 0, 2], vectors={1: model.embed([4])[0]}).hidden, scores.hidden)
