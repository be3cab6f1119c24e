"""Native attention over a cache in 8 bits, on every instruction set: bits of rows, what is stored, how near it is."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.host_tensor import HostTensor
from forerun.kv.pool import Pool
from forerun.kv.rounded import rounded_keys, rounded_values
from ops.native_cases import (
    BFLOAT16,
    FLOAT32,
    ISAS,
    NAN,
    AttentionCase,
    Session,
    attention_case,
    chain,
    make_config,
    make_decoder,
    needs_native,
    one_by_one,
    ops_of,
    path_to,
    random_weights,
    read,
    same_bits,
    tokens_of,
)

pytestmark = needs_native

EIGHT = "int8"
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"head_dim": 64, "num_heads": 3, "num_kv_heads": 1},
    "biased": {"head_dim": 64, "num_heads": 14, "num_kv_heads": 2, "qkv_bias": True},
    "biased_128": {"head_dim": 128, "num_heads": 2, "num_kv_heads": 1, "qkv_bias": True},
    "biased_32": {"head_dim": 32, "num_heads": 4, "num_kv_heads": 4, "qkv_bias": True},
    "windows": {"head_dim": 80, "num_heads": 5, "num_kv_heads": 1, "windows": (5, 70)},
    "small": {"head_dim": 10, "num_heads": 2, "num_kv_heads": 2, "qkv_bias": True},
    "wide": {"head_dim": 256, "num_heads": 2, "num_kv_heads": 1},
}
TREE = [-1, 0, 0, 1, 2, 1, 4, -1]


def alone(model: Any, runs: list[list[int]]) -> Tensor:
    """Rows of one sequence, token by token, in a cache whose rows lie scattered."""
    return one_by_one(Session(model, 1, seed=1, kept=EIGHT), [token for run in runs for token in run])


@pytest.mark.parametrize("name", MODELS)
def test_sets_have_the_same_bits(isa: str, name: str) -> None:
    if isa == ISAS[0]:
        pytest.skip("the others are compared with it")
    runs = [tokens_of(n, i) for i, n in enumerate((150, 1, 67))]
    first, own = (make_decoder(make_config(**MODELS[name]), BFLOAT16, name_of_set) for name_of_set in (ISAS[0], isa))
    assert same_bits(alone(own, runs), alone(first, runs))


@pytest.mark.parametrize("name", MODELS)
def test_bits_of_a_row_are_those_of_the_row_alone(isa: str, dtype: torch.dtype, name: str) -> None:
    """Prompts in chunks, beside others and on several threads: as token by token, whatever the layout."""
    config = make_config(**MODELS[name])
    runs = [tokens_of(n, i) for i, n in enumerate((150, 1, 67, 5, 64))]
    expected = alone(make_decoder(config, dtype, isa), runs)
    assert bool(expected.isfinite().all())
    for layout, threads in ((16, 1), (0, 2), (1, 3)):
        session = Session(make_decoder(config, dtype, isa, threads), layout, kept=EIGHT)
        found = []
        for i, run in enumerate(runs):
            rows = session.run({1: tokens_of(7 + i, 90 + i), 0: run, 2: tokens_of(2, 80 + i)})
            found.append(rows[7 + i : 7 + i + len(run)])
        assert same_bits(torch.cat(found), expected)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_tree_are_those_of_its_paths(isa: str, name: str) -> None:
    """Every row of a tree behind 70 tokens, with neighbours that it does not see, is its path's last row alone."""
    model, prompt = make_decoder(make_config(**MODELS[name]), BFLOAT16, isa), tokens_of(70, 3)
    tree = tokens_of(len(TREE), 4)
    session = Session(model, kept=EIGHT)
    session.run({0: prompt})
    found = session.run({0: tree}, {0: TREE}, {0: []})
    for row in range(len(TREE)):
        assert same_bits(found[row : row + 1], alone(model, [prompt, [tree[i] for i in path_to(row, TREE)]])[-1:])


@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_store_what_torch_would(isa: str, name: str) -> None:
    """The first layer's keys and values, which no attention came before: byte for byte, largest biases first."""
    config = make_config(**MODELS[name] | {"windows": None})
    model, tokens = make_decoder(config, FLOAT32, isa), tokens_of(90, 5)
    plain, eight = Session(model), Session(model, kept=EIGHT)
    for session in (plain, eight):
        session.run({0: tokens})
    rows = eight.cache.rows(0, 0, len(tokens))
    keys, values = read(plain.cache.pools[0], plain.cache.rows(0, 0, len(tokens)))
    pool, refined = eight.cache.pools[0], eight.cache.shape.refined_keys
    assert refined == (name in ("biased", "biased_128", "biased_32"))
    if refined:
        bias = make_biases(config)
        half = bias.shape[1] // 2
        sizes = (bias[:, :half] ** 2 + bias[:, half:] ** 2).repeat(1, 2)
        keys = keys.gather(2, sizes.sort(dim=1, descending=True, stable=True).indices.expand(keys.shape))
    assert np.array_equal(pool.keys.values[rows], rounded_keys(keys.numpy(), refined=refined))
    assert np.array_equal(pool.values.values[rows], rounded_values(values.numpy()))


def make_biases(config: Any) -> Tensor:
    a = config.blocks[0].attention
    return random_weights(config, FLOAT32)["model.layers.0.self_attn.k_proj.bias"].view(a.kv_heads, a.head_dim)


def rounded_pool(case: AttentionCase) -> Pool:
    """The past of a case as a cache in 8 bits keeps it."""
    keys, values = rounded_keys(case.keys.numpy(), refined=False), rounded_values(case.values.numpy())
    return Pool(HostTensor.of(keys), HostTensor.of(values), case.keys.shape[-1])


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 7, 8])
def test_attention_is_near_that_of_what_is_stored(isa: str, dim: int, group: int) -> None:
    """Within 2 % of the size of the values of attention in float64 over the same stored rows."""
    runs = [chain(200, 1), chain(0, 40), chain(131, 3)]
    case = attention_case(dim + group, runs, (group, 1, dim), FLOAT32)
    pool = rounded_pool(case)
    found = ops_of(isa).attention(case.q, case.k, case.v, pool=pool, view=case.view, window=None)
    keys, values = (part.double() for part in read(pool, slice(None)))
    starts = [0, *itertools.accumulate(run.num_rows for run in runs)]
    for b, run in enumerate(runs):
        for i in range(run.num_rows):
            seen = case.view.read_rows[b][: run.cached + i + 1]
            q = case.q[starts[b] + i].double()
            for head in range(group):
                wanted = (keys[seen, 0] @ q[head] / dim**0.5).softmax(0) @ values[seen, 0]
                assert (found[starts[b] + i, head] - wanted).abs().max() < 0.02 * values[seen].abs().max()


def test_a_fault_reaches_those_who_see_it_alone(isa: str) -> None:
    """A value or a key that is not a number makes the rows behind it NaN and leaves those before it as they are."""
    case = attention_case(1, [chain(100, 6)], (3, 1, 64), FLOAT32)
    clean = ops_of(isa).attention(case.q, case.k, case.v, pool=rounded_pool(case), view=case.view, window=None)
    for which in range(2):
        new = [case.k.clone(), case.v.clone()]
        new[which][3, 0, 5] = NAN
        found = ops_of(isa).attention(case.q, *new, pool=rounded_pool(case), view=case.view, window=None)
        assert same_bits(found[:3], clean[:3])
        assert bool(found[3:].isnan().any(-1).all())


def test_numbers_of_a_cache_need_not_be_those_of_weights(isa: str) -> None:
    """A model in bfloat16 with keys and values in float32: another cache than its own, the same bits row by row."""
    model, tokens = make_decoder(make_config(**MODELS["plain"]), BFLOAT16, isa), tokens_of(80, 6)
    whole, single = Session(model, kept="float32"), Session(model, 1, kept="float32")
    found = whole.run({0: tokens})
    assert same_bits(found, one_by_one(single, tokens))
    assert not same_bits(found, Session(model).run({0: tokens}))
