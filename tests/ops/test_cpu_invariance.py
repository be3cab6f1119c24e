"""Row invariance of the native operators: the bits of a row are a function of that row alone (docs/exactness.md).

They do not depend on the number of rows, on the row's place among them, on the other rows, on threads, on the cache's
layout, or on whether the row is in a chain or in a tree. The fast reference operators must fail the same test.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun import native
from forerun.ops.cpu import CpuOps
from forerun.ops.cpu.model import CpuModel
from forerun.ops.reference import ReferenceOps
from ops.native_cases import (
    BFLOAT16,
    FLOAT32,
    INF,
    ISAS,
    NAN,
    AttentionCase,
    RunShape,
    attention_case,
    chain,
    make_config,
    needs_native,
    normal,
    ops_of,
    same_bits,
    seeded,
    several_sets,
)
from tensors import load_model

pytestmark = needs_native
num_threads = pytest.mark.parametrize("threads", [1, 2, 3])

Operator = Callable[..., Tensor]  # tensors of T rows each -> a tensor of T rows
EVERY_COUNT = range(1, 65)
SOME_COUNTS = (2, 3, 5, 8, 14, 15, 16, 17, 27, 28, 29, 33, 48, 64)
WILD = (NAN, INF, -INF, 3e38, -3e38, 1e-40)


def first_difference(
    op: Operator, alone: Operator, rows: tuple[Tensor, ...], counts: Iterable[int], *, wild: bool = True
) -> str | None:
    """Every row alone by `alone`, then among others by `op`: where the bits first differ, None = nowhere.

    For each count so many of the rows in random order. A third of them are wild (NaN, infinite, huge, denormal), and
    are compared like the others.
    """
    generator, num = seeded(0), len(rows[0])
    rows = tuple(r.clone() for r in rows)
    for r in rows:
        for i in range(1, num if wild else 0, 3):
            r[i].view(-1)[:: 1 + i % 2] = WILD[i // 3 % len(WILD)]
    expected = torch.cat([alone(*(r[i : i + 1].clone() for r in rows)) for i in range(num)])
    for count in counts:
        chosen = torch.randperm(num, generator=generator)[:count]
        found = op(*(r[chosen] for r in rows))
        for i in range(count):
            if not same_bits(found[i], expected[chosen[i]]):
                return f"row {i} of {count}"
    return None


# ---------------------------------------------------------------------------------------------------------- products


def product_of(ops: ReferenceOps, num_in: int, num_out: int, dtype: torch.dtype) -> Operator:
    weight, bias = normal(1, num_out, num_in).to(dtype), normal(2, num_out)
    if isinstance(ops, CpuOps):
        packed = ops.pack(weight, bias)
        return lambda x: ops.linear(x, packed)
    return lambda x: ops.linear(x, weight, bias)


def added_product_of(ops: CpuOps, num_in: int, num_out: int, dtype: torch.dtype) -> Operator:
    packed = ops.pack(normal(1, num_out, num_in).to(dtype), normal(2, num_out))
    return lambda x, residual: ops.add_linear(residual, x, packed)


def feed_forward_of(ops: CpuOps, num_in: int, num_out: int, dtype: torch.dtype) -> Operator:
    gate, up, down = (normal(s, *n).to(dtype) for s, n in ((3, (131, num_in)), (4, (131, num_in)), (5, (num_out, 131))))
    gate_up, down_packed = ops.pack([gate, up], normal(6, 262), paired=True), ops.pack(down)
    return lambda x, residual: ops.add_gated(residual, x, gate_up, down_packed)


@num_threads
@pytest.mark.parametrize(("num_in", "num_out"), [(1024, 161), (77, 33), (3, 100)])
def test_products(isa: str, dtype: torch.dtype, threads: int, num_in: int, num_out: int) -> None:
    op, alone = (product_of(ops_of(isa, n), num_in, num_out, dtype) for n in (threads, 1))
    assert first_difference(op, alone, (normal(7, 64, num_in),), EVERY_COUNT) is None


@pytest.mark.parametrize("num_in", [2049, 4096, 14336])
def test_products_as_wide_as_published_models(isa: str, dtype: torch.dtype, num_in: int) -> None:
    """Products with few outputs and many inputs, where other kernels would split the inputs."""
    op = product_of(ops_of(isa), num_in, 40, dtype)
    assert first_difference(op, op, (normal(7, 64, num_in),), SOME_COUNTS) is None


@num_threads
@pytest.mark.parametrize("make", [added_product_of, feed_forward_of])
def test_products_with_what_follows(isa: str, dtype: torch.dtype, threads: int, make: Callable[..., Operator]) -> None:
    op, alone = (make(ops_of(isa, n), 257, 97, dtype) for n in (threads, 1))
    assert first_difference(op, alone, (normal(7, 64, 257), normal(8, 64, 97)), EVERY_COUNT) is None


def test_products_of_whole_prompts(isa: str, dtype: torch.dtype) -> None:
    op = product_of(ops_of(isa), 150, 40, dtype)
    assert first_difference(op, op, (normal(7, 512, 150),), (65, 100, 168, 169, 255, 512)) is None


@pytest.mark.parametrize("num_out", [161, 1024])
def test_the_fast_reference_fails_the_same_test(num_out: int) -> None:
    """Negative control: torch's libraries choose their kernels by shape."""
    op = product_of(ReferenceOps(), 1024, num_out, FLOAT32)
    assert first_difference(op, op, (normal(7, 64, 1024),), EVERY_COUNT, wild=False) is not None


def test_the_slow_reference_passes_it() -> None:
    op = product_of(ReferenceOps(row_by_row=True), 1024, 161, FLOAT32)
    assert first_difference(op, op, (normal(7, 64, 1024),), SOME_COUNTS) is None


# -------------------------------------------------------------------------------------------------------- row by row


@num_threads
@pytest.mark.parametrize("width", [1, 17, 52, 128, 2051])
def test_norms_and_activations(isa: str, threads: int, width: int) -> None:
    x, y, weight = normal(1, 64, width), normal(2, 64, width), normal(3, width)
    op, alone = ops_of(isa, threads), ops_of(isa)
    norms = [lambda x, ops=ops: ops.rms_norm(x, weight, 1e-5) for ops in (op, alone)]
    assert first_difference(*norms, (x,), SOME_COUNTS) is None
    assert first_difference(op.silu_mul, alone.silu_mul, (x, y), SOME_COUNTS) is None


@num_threads
@pytest.mark.parametrize("dim", [8, 20, 64, 80])
def test_rotary_positions(isa: str, threads: int, dim: int) -> None:
    rows = normal(1, 64, 3, dim), normal(2, 64, 1, dim), normal(3, 64, 1, dim)
    assert first_difference(ops_of(isa, threads).rope, ops_of(isa).rope, rows, SOME_COUNTS) is None


# -------------------------------------------------------------------------------------------------------- the LM head


@num_threads
def test_logits_and_their_argmax(isa: str, dtype: torch.dtype, threads: int) -> None:
    config = make_config(num_layers=0, vocab_size=5003, hidden_size=64)
    names = {"model.embed_tokens.weight": normal(1, 5003, 64), "model.norm.weight": torch.ones(64)}
    weights = {name: weight.to(dtype) for name, weight in names.items()}
    op, alone = (load_model(config, weights, ops_of(isa, n)) for n in (threads, 1))
    rows = (normal(2, 64, 64),)
    assert first_difference(op.logits, alone.logits, rows, SOME_COUNTS) is None

    def best(decoder: CpuModel) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.tensor(decoder.best(x, list(range(len(x))), 4999)[0])

    assert first_difference(best(op), best(alone), rows, EVERY_COUNT) is None


# ---------------------------------------------------------------------------------------------------------- attention


def tree_of(num_rows: int, seed: int) -> tuple[int, ...]:
    """Random parents, each before its child; -1 is one of them."""
    generator = seeded(seed)
    return tuple(int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(num_rows))


def random_runs(seed: int) -> list[RunShape]:
    """Up to six runs of 1 to 40 rows, chains and trees, behind 0 to 300 tokens, some with pending rows between."""
    generator = seeded(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    runs = []
    for i in range(draw(1, 6)):
        cached = (0, draw(1, 20), 64 * draw(1, 4) - draw(0, 8), draw(0, 300))[draw(0, 3)]
        num_rows = (1, draw(2, 9), draw(10, 40))[draw(0, 2)]
        num_pending = draw(0, 1) * draw(1, 30)
        tree = RunShape(cached, tree_of(num_pending + num_rows, seed + i), num_pending)
        runs.append(tree if draw(0, 1) else chain(cached, num_rows))
    return runs


def with_wild_run(case: AttentionCase) -> AttentionCase:
    """Put NaN and huge numbers into the first run, which must not change its neighbours."""
    rows = case.view.batch.run(0)
    past = case.view.read_rows[0][: case.runs[0].num_before]
    changed = {name: getattr(case, name).clone() for name in ("q", "k", "v", "keys", "values")}
    for i, name in enumerate(changed):
        part = past if name in ("keys", "values") else torch.tensor(rows)
        changed[name][part] = WILD[i]
    return replace(case, **changed)


def check_rows(case: AttentionCase, found: Tensor, isa: str, window: int | None = None) -> None:
    """Each row of each run has the bits that it has alone."""
    for b, run in enumerate(case.runs):
        for i, row in enumerate(case.view.batch.run(b)):
            assert same_bits(found[row : row + 1], case.alone(b, i).attend(ops_of(isa), window)), (run, i)


def check_beside_wild_rows(
    case: AttentionCase, wild: list[int], isa: str, window: int | None, threads: int = 1
) -> None:
    """Rows of one run that see none of the wild ones are numbers, and have the bits that they have alone."""
    k, v = case.k.clone(), case.v.clone()
    k[wild], v[wild] = NAN, INF
    case = replace(case, k=k, v=v)
    found = case.attend(ops_of(isa, threads), window)
    for row in set(range(len(found))) - set(wild):
        assert bool(found[row].isfinite().all())
        assert same_bits(found[row : row + 1], case.alone(0, row).attend(ops_of(isa), window))


@pytest.mark.parametrize("window", [None, 1, 5, 64, 100])
def test_attention(isa: str, dtype: torch.dtype, window: int | None) -> None:
    """Rows of chains and trees in scattered caches are what they are alone, behind a cache in order."""
    for seed in range(12):
        heads = ((4, 2, 20), (3, 3, 8), (8, 1, 64), (4, 1, 80), (2, 2, 128))[seed % 5]
        case = attention_case(seed, random_runs(seed), heads, dtype)
        case = with_wild_run(case) if len(case.runs) > 1 else case
        check_rows(case, case.attend(ops_of(isa, 1 + seed % 3), window), isa, window)


@pytest.mark.parametrize("group", range(1, 9))
def test_attention_of_few_and_many_queries(isa: str, dtype: torch.dtype, group: int) -> None:
    """Instruction sets that have several layouts choose one by the number of queries; heads end in half a vector."""
    for dim, window in ((2, None), (8, 3), (24, None), (40, 33), (72, None), (104, 64), (120, 1)):
        case = attention_case(dim, [chain(61, 16), RunShape(127, tree_of(9, dim))], (2 * group, 2, dim), dtype)
        check_rows(case, case.attend(ops_of(isa, 2), window), isa, window)


def test_wild_siblings_in_a_tree(isa: str, dtype: torch.dtype) -> None:
    """A tree row shares its blocks of keys with nodes that it does not see."""
    run = RunShape(50, tree_of(30, 3))
    case = attention_case(1, [run], (4, 2, 20), dtype)
    wild = [row for row in range(30) if row not in run.path(29)]
    for window in (None, 7):
        check_beside_wild_rows(case, wild, isa, window)


@pytest.mark.parametrize("window", [None, 1, 7])
def test_wild_rows_behind_in_a_chain(isa: str, dtype: torch.dtype, window: int | None) -> None:
    """Rows of a chain share their last block of keys, with lanes that the earlier rows do not see."""
    case = attention_case(1, [chain(51, 16)], (6, 2, 20), dtype)
    check_beside_wild_rows(case, list(range(9, 16)), isa, window, threads=2)


@pytest.mark.skipif("avx512" not in ISAS, reason="other instruction sets multiply pairs of bfloat16 in one way")
@pytest.mark.parametrize("dim", [2, 24, 40, 64, 120])
@pytest.mark.parametrize("window", [None, 3, 64])
def test_both_ways_to_multiply_pairs_give_the_same_bits(dim: int, window: int | None) -> None:
    """The processor decides which of them is faster."""
    ops, rows = ops_of("avx512"), normal(7, 20, 257)
    rows[3], rows[5, ::3] = torch.tensor(WILD).repeat(43)[:257], 1e-40
    product = product_of(ops, 257, 97, BFLOAT16)
    case = attention_case(dim, [chain(70, 1), chain(61, 16), RunShape(127, tree_of(9, dim))], (6, 2, dim), BFLOAT16)

    def results(is_wide: bool) -> list[Tensor]:
        before = native.extension().widen_pairs(is_wide)
        try:
            return [case.attend(ops, window), *(product(rows[:n]) for n in (1, 3, 8, 20))]
        finally:
            native.extension().widen_pairs(before)

    assert all(map(same_bits, results(True), results(False)))


@several_sets
@pytest.mark.parametrize("window", [None, 23])
@pytest.mark.parametrize("dim", [8, 40, 64, 80, 128])
def test_sets_have_the_same_bits(dtype: torch.dtype, dim: int, window: int | None) -> None:
    """Of products, and of attention of few rows, many, and trees; of numbers near the least ones and infinite ones.

    What is no number is none on each of them, and its sign and payload are the processor's.
    """
    rows = normal(7, 20, 257)
    rows[3] *= 1e-37  # times weights some products are denormal, and sums are not
    rows[5] *= 1e-38
    rows[7, 100], rows[9, 3], rows[11, 200] = INF, -INF, 3e38
    shapes = [chain(70, 1), chain(61, 16), chain(300, 40), RunShape(127, tree_of(9, dim))]
    case = attention_case(dim, shapes, (6, 2, dim), dtype)
    tiny = replace(case, k=case.k * 1e-38, keys=case.keys * 1e-38, v=case.v * 1e-37, values=case.values * 1e-37)

    def results(isa: str) -> list[Tensor]:
        ops = ops_of(isa)
        products = [product_of(ops, 257, 97, dtype)(rows[:n]) for n in (1, 3, 8, 20)]
        return [found.nan_to_num(1.5) for found in (case.attend(ops, window), tiny.attend(ops, window), *products)]

    first = results(ISAS[0])
    for isa in ISAS[1:]:
        assert all(map(same_bits, results(isa), first)), isa


def test_a_chain_behind_a_pending_chain(isa: str) -> None:
    """Written as a tree, with its pending rows named; the other runs of the pass carry no parents."""
    runs = [RunShape(50, chain(0, 20).parents, 11), chain(0, 70), RunShape(3, (-1, -1))]
    case = attention_case(2, runs, (4, 2, 20), FLOAT32)
    assert [case.view.batch.is_tree(b) for b in range(3)] == [True, False, True]
    check_rows(case, case.attend(ops_of(isa)), isa)
