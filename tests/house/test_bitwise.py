"""Native operators give the same bits however rows are batched: the short form of tests/parity/test_bitwise.py.

First the design that decides what runs with what; then whole engines against plain decoding; then single passes, in
which logits and the cache's keys and values must have the bits of one-token decoding.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from forerun import native
from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, Runner
from forerun.ops.cpu import CpuOps
from forerun.ops.reference import ReferenceOps
from ops.native_cases import several_sets
from parity.bitwise import Models, bits, cached, compare, cut_prompts, feed
from parity.covering import LEAST, LEVELS, SIXTY, THOUSAND, Group, all_pairs, count_pairs, design
from parity.trees import compare_trees

FORTY = {1: 4, 2: 2, 3: 1, 4: 1, 7: 1, 8: 1}
NUM_TOKENS, LONGEST = 32, 64
ISAS = [isa for isa in native.available_isas() if isa != "reference"]
DTYPES = ["float32", "bfloat16"]
needs_native = pytest.mark.skipif(not ISAS, reason=f"no native operators: {native.why_not()}")


# --------------------------------------------------------------------------------------------------------- the design


@cache
def thousand() -> list[Group]:
    return design(THOUSAND, seed=1)


def test_every_pair_of_values_meets_often_enough() -> None:
    groups = thousand()
    counts = count_pairs(groups)
    assert sum(len(group.rules) for group in groups) == 1000
    assert sum(counts.values()) == 1000 * 15  # pairs of six factors
    assert min(counts[pair] for pair in all_pairs()) >= LEAST


@pytest.mark.parametrize("factor", ["spec_length", "chunk_tokens"])
def test_every_single_value_occurs(factor: str) -> None:
    counts: Counter[int] = Counter()
    for group in thousand():
        counts[getattr(group.setting, factor)] += len(group.rules)
    assert set(counts) == {value for level in LEVELS[factor] for value in level}
    assert min(counts.values()) >= LEAST


def test_a_design_is_a_function_of_its_seed() -> None:
    assert design(SIXTY, seed=1) == design(SIXTY, seed=1) != design(SIXTY, seed=2)


def test_prompts_differ_in_text_and_length() -> None:
    prompts = cut_prompts(1000, seed=1)
    lengths = [len(ids) for ids in prompts]
    assert len({tuple(ids) for ids in prompts}) == 1000
    assert min(lengths) == 1
    assert max(lengths) > 512


# -------------------------------------------------------------------------------------------------------- whole engines


@cache
def models(isa: str, num_threads: int, dtype: str) -> Models:
    return Models.shipped(dtype, CpuOps(isa, num_threads))


@pytest.fixture(scope="module", autouse=True)
def _give_back() -> Iterator[None]:
    """Models of every instruction set and type are most of a gigabyte."""
    yield
    models.cache_clear()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_drafter_says_what_plain_decoding_says(isa: str, dtype: str) -> None:
    """40 prompts in bfloat16 with the best instruction set; fewer in float32, and with the others."""
    groups, num_tokens = design(FORTY, seed=3), NUM_TOKENS
    if isa != ISAS[0]:
        small = [g for g in groups if g.setting.num_neighbours < 3 and g.setting.drafter.startswith("model")]
        groups, num_tokens = small[:2], NUM_TOKENS // 2
    elif dtype == "float32":
        groups = groups[::3]
    pair = models(isa, 2, dtype)
    found = compare(pair, pair, groups, cut_prompts(40, seed=3, longest=LONGEST), num_tokens)
    assert found.num_outputs == sum(len(group.rules) for group in groups)
    assert found.num_accepted > 0
    assert not found.mismatches, "\n".join(found.mismatches)


def test_the_comparison_can_fail() -> None:
    """Negative control: torch's own kernels are chosen by shape."""
    fast = Models.shipped("float32", ReferenceOps())
    groups = [g for g in design(FORTY, seed=3) if g.setting.num_neighbours == 3]
    found = compare(fast, fast, groups, cut_prompts(4, seed=3, longest=LONGEST), 4)
    assert found.num_other_rows > 0


# ------------------------------------------------------------------------------------------------------- single passes


TEXT = cut_prompts(16, seed=4)[-1][:90]
CASES = [pytest.param(isa, dtype, id=f"{isa}-{dtype}") for isa in ISAS for dtype in DTYPES]


def runner_of(pair: Models, backend: str) -> Runner:
    model = pair.target.model
    pools = BlockCache.of(model, backend, max_batch_size=4, max_seq_len=192)
    for slot in range(3):
        pools.open(slot)
    return Runner(model, pools)


@cache
def one_by_one(isa: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of the logits and of the cache of TEXT, decoded token by token, alone, by one thread."""
    runner = runner_of(models(isa, 1, dtype), "contiguous")
    return feed(runner, 0, TEXT, 1), cached(runner, 0, 0, len(TEXT))


@several_sets
@pytest.mark.parametrize("dtype", DTYPES)
def test_sets_have_the_same_bits(dtype: str) -> None:
    logits, keys_and_values = one_by_one(ISAS[0], dtype)
    for isa in ISAS[1:]:
        others = one_by_one(isa, dtype)
        assert torch.equal(others[0], logits), isa
        assert torch.equal(others[1], keys_and_values), isa


CHUNKS = [(13, "paged"), (64, "contiguous")]
MORE_CHUNKS = [pytest.param(*case, marks=pytest.mark.parity) for case in ((7, "contiguous"), (90, "paged"))]


@needs_native
@pytest.mark.parametrize(("chunk", "backend"), [*CHUNKS, *MORE_CHUNKS])
@pytest.mark.parametrize(("isa", "dtype"), CASES)
def test_a_prompt_in_chunks(isa: str, dtype: str, chunk: int, backend: str) -> None:
    """By two threads, as everything below, and behind a neighbour."""
    runner, (logits, keys_and_values) = runner_of(models(isa, 2, dtype), backend), one_by_one(isa, dtype)
    assert torch.equal(feed(runner, 2, TEXT, chunk, [Run(1, TEXT[40:53])]), logits)
    assert torch.equal(cached(runner, 2, 0, len(TEXT)), keys_and_values)


@needs_native
@pytest.mark.parametrize(("isa", "dtype"), CASES)
def test_a_verified_draft(isa: str, dtype: str) -> None:
    """K + 1 rows for K = 1 .. 16, across the end of a block of 64 keys, after a draft that was rejected."""
    runner, (logits, keys_and_values) = runner_of(models(isa, 2, dtype), "paged"), one_by_one(isa, dtype)
    start = 58
    feed(runner, 0, TEXT[:start], 64)
    for k in range(1, 17):
        stop = start + k + 1
        rejected = runner.forward([Run(0, [TEXT[start], *TEXT[:k]])]).logits[0]
        assert torch.equal(bits(rejected)[0], logits[start])
        assert not torch.equal(bits(rejected), logits[start:stop])
        verified = runner.forward([Run(1, TEXT[k : 2 * k]), Run(0, TEXT[start:stop])]).logits[1]
        assert torch.equal(bits(verified), logits[start:stop])
        assert torch.equal(cached(runner, 0, 0, stop), keys_and_values[:, :, :stop])


@needs_native
@pytest.mark.parametrize("start", [3, 62, 64])
@pytest.mark.parametrize(("isa", "dtype"), CASES)
def test_a_path_through_a_tree(isa: str, dtype: str, start: int) -> None:
    """The text goes on at the nodes 0, 2, 3 and 6, and others stand between them; then the path is kept, as a chain."""
    runner, (logits, keys_and_values) = runner_of(models(isa, 2, dtype), "paged"), one_by_one(isa, dtype)
    path, parents = [0, 2, 3, 6], [-1, 0, 0, 2, 2, 1, 3, 6]
    tokens = [7, 8, 9, 10, 11, 12, 13, 14]
    for depth, node in enumerate(path):
        tokens[node] = TEXT[start + depth]
    stop = start + len(path)
    feed(runner, 0, TEXT[:start], 64)
    found = runner.forward([Run(1, TEXT[9:14]), Run(0, tokens, parents=parents)]).logits[1]
    assert torch.equal(bits(found[path]), logits[start:stop])
    runner.cache.keep({0: path})
    assert torch.equal(cached(runner, 0, 0, stop), keys_and_values[:, :, :stop])
    assert torch.equal(feed(runner, 0, TEXT[stop : stop + 2], 2), logits[stop : stop + 2])


@needs_native
@pytest.mark.parametrize(("isa", "dtype"), CASES)
def test_trees_of_random_shape(isa: str, dtype: str) -> None:
    num_trees = 5 if isa == ISAS[0] else 2
    found = compare_trees(models(isa, 2, dtype).target, num_trees, seed=5, max_nodes=16)
    assert found.num_grown > (2 if isa == ISAS[0] else 0)
    assert found.num_other_rows == 0, str(found)


def test_the_comparison_of_trees_can_fail() -> None:
    """Negative control, as above."""
    assert compare_trees(Models.shipped("float32", ReferenceOps()).target, 2, seed=5).num_other_rows > 0
