"""Native attention against the reference: ragged runs, trees, windows, grouped heads, contexts of many key blocks.

The reference computes in float64, each row alone over exactly its keys; keys and values are rounded as in
the cache.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.kv.pool import Pool
from forerun.ops.reference import ReferenceOps, Scoring
from forerun.ops.torch_tensors import host_of
from ops.native_cases import (
    BFLOAT16,
    FLOAT32,
    INF,
    NAN,
    TINY,
    AttentionCase,
    RunShape,
    attention_case,
    chain,
    close,
    needs_native,
    ops_of,
)

pytestmark = needs_native

# Queries are normal numbers: scores of a few units, whose error of some 2^-22 is what the weights, and so the outputs,
# inherit; values are a few units, too.
TOLERANCE = 4e-6
# Pairs of bfloat16 round queries, which the reference gets rounded, and weights: 2^-9 of each, and twice that
# of their quotient with the sum, times the largest value.
PAIR_TOLERANCE = 2.0**-8
TREE = (-1, 0, 0, 1, 2, 1, 4, -1, 7, 3)
RAGGED = [chain(0, 1), chain(17, 3), RunShape(62, TREE), chain(5, 70), RunShape(0, TREE), chain(64, 1), chain(129, 2)]


def in_pairs(case: AttentionCase) -> bool:
    """Whether queries and weights are rounded to bfloat16, as keys and values are."""
    return case.keys.dtype == BFLOAT16


def expected_of(case: AttentionCase, window: int | None = None) -> Tensor:
    return case.wide().attend(ReferenceOps(row_by_row=True), window)


def agrees(case: AttentionCase, isa: str, window: int | None = None) -> bool:
    """Whether an instruction set's attention equals the reference's within what its rounding allows."""
    found = case.attend(ops_of(isa), window)
    if not in_pairs(case):
        return close(found, expected_of(case, window), TOLERANCE)
    scale = float(np.float32(1) / np.sqrt(np.float32(case.q.shape[-1])))
    seen = replace(case, q=(case.q * scale).to(BFLOAT16).double() / scale)
    expected = seen.wide().attend(ReferenceOps(row_by_row=True), window)
    return close(found, expected, PAIR_TOLERANCE * float(expected.abs().max().clamp(min=4)))


def by_formula(case: AttentionCase, window: int | None = None) -> Tensor:
    """softmax(q k / sqrt(head_dim)) v, as it stands: torch's operator makes 0 of a row whose scores are all NaN."""
    wide = case.wide()
    keys, values = wide.keys.clone(), wide.values.clone()
    keys[wide.view.write_rows], values[wide.view.write_rows] = wide.k, wide.v
    group, outs = wide.q.shape[1] // keys.shape[1], []
    for b, run in enumerate(case.runs):
        for i, row in enumerate(wide.view.batch.run(b)):
            seen = np.array([*range(run.cached), *(run.cached + r for r in run.path(i))])
            rows = wide.view.read_rows[b][seen[-(window or len(seen)) :]]
            k, v = (x[rows].repeat_interleave(group, dim=1) for x in (keys, values))
            weights = torch.softmax((wide.q[row] * k).sum(-1) / wide.q.shape[-1] ** 0.5, dim=0)
            outs.append((weights[:, :, None] * v).sum(0))
    return torch.stack(outs)


@pytest.mark.parametrize("heads", [(1, 1, 8), (4, 2, 20), (4, 1, 32), (8, 1, 64), (6, 6, 80), (8, 4, 128), (16, 2, 64)])
def test_ragged_runs_and_trees(isa: str, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    """Every head size, 1 to 8 query heads for each key head; rows of the pools that no run owns are NaN."""
    assert agrees(attention_case(1, RAGGED, heads, dtype), isa)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("heads", [(1, 1, 8), (4, 2, 20), (8, 1, 64)])
def test_rows_that_see_their_whole_run(isa: str, scale: float | None, heads: tuple[int, int, int]) -> None:
    """What a block drafter asks for: rows of a block see what is before it and all of it, in one batch of several."""
    scoring = Scoring(scale, sees_all=True)
    case = attention_case(4, [chain(0, 4), chain(3, 4), chain(61, 4), chain(64, 1), chain(130, 16)], heads, FLOAT32)
    found = case.attend(ops_of(isa), scoring=scoring)
    assert close(found, case.wide().attend(ReferenceOps(row_by_row=True), scoring=scoring), TOLERANCE)
    assert not close(found, case.attend(ops_of(isa), scoring=Scoring(scale)), 1e-2)
    keys, values = case.keys.clone(), case.values.clone()
    keys[case.view.write_rows], values[case.view.write_rows] = case.k, case.v
    written = {"pool": Pool(host_of(keys), host_of(values)), "view": case.view, "window": None, "scoring": scoring}
    assert torch.equal(ops_of(isa).attention(case.q, None, None, **written), found)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [1, 3, 16, 64, 65, 100, 500])
def test_sliding_windows(isa: str, dtype: torch.dtype, window: int) -> None:
    assert agrees(attention_case(2, [*RAGGED, RunShape(200, TREE)], (4, 2, 20), dtype), isa, window)


@pytest.mark.parametrize("window", [1, 2, 7, 40])
def test_what_left_the_window_does_not_count(isa: str, dtype: torch.dtype, window: int) -> None:
    """Keys outside the window have no effect, even if they are NaN, wherever in a block the window begins."""
    for cached in (63, 64, 75, 76, 130):
        case = attention_case(12, [chain(cached, 3)], (4, 2, 20), dtype)
        keys, values = case.keys.clone(), case.values.clone()
        gone = case.view.read_rows[0][: cached + 1 - window]
        keys[gone], values[gone] = NAN, NAN
        case = replace(case, keys=keys, values=values)
        assert bool(case.attend(ops_of(isa), window).isfinite().all())
        assert agrees(case, isa, window)


@pytest.mark.parametrize("cached", [0, 1, 14, 15, 16, 62, 63, 64, 65, 126, 127, 128, 129, 191, 192, 200, 1000])
def test_contexts_that_end_anywhere_in_a_key_block(isa: str, cached: int) -> None:
    for run in (chain(cached, 1), chain(cached, 6), RunShape(cached, TREE)):
        case = attention_case(3, [run], (4, 2, 32), FLOAT32)
        for window in (None, 63, 64, 130):
            assert agrees(case, isa, window)


@pytest.mark.parametrize("cached", [240, 254, 255, 256, 257, 319, 510, 512, 3000])
def test_contexts_that_end_anywhere_in_a_range_of_keys(isa: str, dtype: torch.dtype, cached: int) -> None:
    """Ranges of 256 keys have sums of their own; windows begin and end in any of them."""
    for run in (chain(cached, 1), chain(cached, 8), chain(cached, 16), RunShape(cached, TREE)):
        case = attention_case(14, [run], (6, 2, 64), dtype)
        for window in (None, 3, 255, 256, 300):
            assert agrees(case, isa, window)


@pytest.mark.parametrize("num_rows", [15, 16, 17, 33, 63, 64, 65, 130, 513])
def test_long_runs(isa: str, num_rows: int) -> None:
    case = attention_case(4, [chain(3, num_rows), chain(0, 2)], (2, 1, 16), BFLOAT16)
    assert agrees(case, isa)
    assert agrees(case, isa, 40)


def exact_case(runs: list[RunShape], heads: tuple[int, int, int], dtype: torch.dtype) -> AttentionCase:
    """Keys and values that are small whole numbers, exact in both types."""
    case = attention_case(11, runs, heads, dtype)
    parts = {name: (getattr(case, name) * 20).round() for name in ("v", "values")}
    parts |= {name: (getattr(case, name) * 3).round() for name in ("k", "keys")}
    return replace(case, **parts)


EXACT = 1e-6 * 100  # of values up to 100: a sum without rounding, times the rounded inverse of a count


@pytest.mark.parametrize("heads", [(4, 2, 20), (8, 1, 64), (2, 2, 80)])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 64, 77])
def test_a_query_of_zeros_averages_what_it_sees(
    isa: str, dtype: torch.dtype, heads: tuple[int, int, int], window: int | None
) -> None:
    """All weights are exactly 1, so one lane too many or too few shows, with bfloat16's weights, too."""
    case = exact_case([*RAGGED, RunShape(200, TREE)], heads, dtype)
    case = replace(case, q=torch.zeros_like(case.q))
    assert close(case.attend(ops_of(isa), window), by_formula(case, window), EXACT)


@pytest.mark.parametrize("heads", [(4, 2, 8), (4, 2, 20), (8, 1, 64), (2, 2, 80), (1, 1, 128)])
@pytest.mark.parametrize("window", [None, 5, 77])
def test_a_large_query_picks_its_keys(
    isa: str, dtype: torch.dtype, heads: tuple[int, int, int], window: int | None
) -> None:
    """Scores are exact, thousands apart or equal: the best keys weigh exactly 1 and all others 0.

    So every key has to be where its value is, and every dimension counts.
    """
    case = exact_case([*RAGGED, RunShape(200, TREE)], heads, dtype)
    scale = np.float32(1) / np.sqrt(np.float32(heads[2]))
    near = np.float32(2.0**14) / scale
    size = next(q for q in (near, *(np.nextafter(near, np.float32(e)) for e in (0, INF))) if q * scale == 2.0**14)
    case = replace(case, q=case.q.round().clamp(-1, 1) * float(size))
    assert close(case.attend(ops_of(isa), window), by_formula(case, window), EXACT)


def test_one_key_is_its_value(isa: str) -> None:
    """A softmax over one key weighs it 1, whatever the score; so the first row's output is v itself."""
    case = attention_case(5, [chain(0, 1), chain(0, 3)], (4, 2, 20), FLOAT32, scale=1e4)
    found = case.attend(ops_of(isa))
    for row in (0, 1):
        assert torch.equal(found[row], case.v[row].repeat_interleave(2, dim=0))


def test_weights_are_rounded_to_nearest_and_sum_to_one(isa: str, dtype: torch.dtype) -> None:
    """Two keys that score 0 and -d, with values 0 and 1: out comes w / (1 + w), w = e^-d as the tile keeps it."""
    case = attention_case(13, [chain(1, 1)], (64, 64, 16), dtype)
    q, k, keys = (torch.zeros_like(x) for x in (case.q, case.k, case.keys))
    q[:, :, 0] = 4.0  # times 1 / sqrt(16)
    k[0, :, 0] = -torch.linspace(0.01, 5, 64).to(BFLOAT16).float()
    case = replace(case, q=q, k=k, keys=keys, v=torch.ones_like(case.v), values=torch.zeros_like(case.values))
    weights = k[0, :, 0].double().exp()
    if in_pairs(case):
        weights = weights.to(BFLOAT16).double()
    assert close(case.attend(ops_of(isa)), (weights / (1 + weights))[None, :, None].expand(1, 64, 16), TOLERANCE)


def test_scores_of_any_size(isa: str) -> None:
    """Where e^x would overflow, the largest score has weight 1 and all others exactly 0."""
    case = attention_case(6, [chain(140, 4), RunShape(70, TREE)], (2, 1, 32), FLOAT32, scale=3e4)
    found, expected = case.attend(ops_of(isa)), expected_of(case)
    assert bool((found.isfinite()).all())
    assert close(found, expected, 1e-2)  # two keys that are nearly alike share what rounding of scores near 1e5 leaves


def test_denormal_numbers(isa: str) -> None:
    """Denormal keys make equal weights; denormal values come out as what they are, or 0 with bfloat16's least ones."""
    for dtype in (FLOAT32, BFLOAT16):
        case = attention_case(7, [chain(70, 3)], (2, 1, 20), dtype)
        tiny = replace(case, k=case.k * 1e-40, keys=case.keys * 1e-40, v=case.v * 1e-39, values=case.values * 1e-39)
        expected = expected_of(tiny)
        assert bool(expected.any())
        assert close(tiny.attend(ops_of(isa)), expected, TINY if in_pairs(tiny) else 2.0**-149 * 80)


@pytest.mark.parametrize("where", ["q", "k", "v", "keys", "values"])
@pytest.mark.parametrize("what", [INF, -INF, NAN])
def test_infinities_and_nan_come_out_where_the_reference_has_them(isa: str, where: str, what: float) -> None:
    """NaN and infinities in one row reach the rows that see it, and no others."""
    case = attention_case(8, [chain(100, 6), RunShape(66, TREE), chain(0, 5)], (4, 2, 20), FLOAT32)
    changed = getattr(case, where).clone()
    rows = [3, 9, 18] if where in "qkv" else [int(case.view.read_rows[b][i]) for b, i in ((0, 70), (1, 2), (1, 65))]
    changed[rows, -1, 7] = what
    case = replace(case, **{where: changed})
    for window in (None, 20):
        expected = by_formula(case, window)
        assert not bool(expected.isfinite().all())
        assert bool(expected.isfinite().any())
        assert close(case.attend(ops_of(isa), window), expected, TOLERANCE)


@pytest.mark.parametrize("cached", [5, 64, 70, 130])
def test_a_score_of_minus_infinity_weighs_nothing(isa: str, cached: int) -> None:
    """Even where a whole block of keys has no other score, and the maximum so far is minus infinity."""
    case = attention_case(9, [chain(cached, 3)], (2, 1, 20), FLOAT32)
    q, keys = case.q.clone(), case.keys.clone()
    q[:, :, 3] = 1.0
    keys[case.view.read_rows[0][:cached], :, 3] = -INF
    case = replace(case, q=q, keys=keys)
    expected = by_formula(case)
    assert bool(expected.isfinite().all())
    assert close(case.attend(ops_of(isa)), expected, TOLERANCE)


@pytest.mark.parametrize("cached", [0, 3, 300])
def test_scores_that_are_all_minus_infinity_make_nan(isa: str, dtype: torch.dtype, cached: int) -> None:
    """As a softmax over them is; nothing of the run that was computed before in the same memory comes out."""
    case = attention_case(16, [chain(5, 1), chain(cached, 1)], (2, 1, 20), dtype)
    q, k, keys = case.q.clone(), case.k.clone(), case.keys.clone()
    q[:, :, 3] = 1.0
    k[1, :, 3], keys[case.view.read_rows[1], :, 3] = -INF, -INF
    case = replace(case, q=q, k=k, keys=keys)
    found = case.attend(ops_of(isa))
    assert bool(found[0].isfinite().all())
    assert bool(found[1].isnan().all())


def test_runs_of_nothing(isa: str) -> None:
    assert agrees(attention_case(10, [chain(3, 0), chain(4, 2), chain(0, 0)], (2, 1, 8), FLOAT32), isa)


def test_an_odd_head_dim_is_refused(isa: str, dtype: torch.dtype) -> None:
    case = attention_case(1, [chain(3, 2)], (2, 1, 7), dtype)
    with pytest.raises(ValueError, match="head_dim must be even, not 7"):
        case.attend(ops_of(isa))
