"""A distribution given as a list of ids is the same as its vector: for draws, for both rules, in exact enumeration."""

import itertools

import numpy as np
import pytest
import torch

from forerun.drafters.model import Options
from forerun.drafters.shared.model_drafter import ModelDrafter
from forerun.errors import InternalError
from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, Runner
from forerun.models.toy import ToyModel
from forerun.sampling import arithmetic, pipeline, probs
from forerun.sampling.random import PhiloxCoins
from forerun.testing import enumerate_outcomes
from forerun.testing.engines import every_way
from forerun.types import Draft, Probs, SamplingParams, Sequence
from forerun.verify import match, ratio
from house.enumeration import Case
from house.test_lossless import assert_lossless
from refusals import refusal
from sampling.samplers import BY_NUMPY, row

V = 4096


def listed(ids: list[int], weights: list[float], dtype: type = np.float64) -> Probs:
    return Probs(ids=np.array(ids), listed=np.array(weights, dtype))


def spelled(made: Probs, size: int) -> Probs:
    """The same distribution as a vector."""
    dense = np.zeros(size, made.weights.dtype)
    dense[made.ids] = made.weights
    return Probs(dense=dense)


def test_at():
    made = listed([2, 5, 9], [0.5, 0.25, 0.25])
    assert [made.at(i) for i in range(12)] == [0, 0, 0.5, 0, 0, 0.25, 0, 0, 0, 0.25, 0, 0]
    assert made.weights.tolist() == [0.5, 0.25, 0.25]
    assert Probs(point=3).at(3) == 1
    assert "needs a point or a dense" in refusal(InternalError, Probs().at, 0)
    assert "needs a point or a dense" in refusal(InternalError, ratio.residual, Probs(), Probs(point=0))


def test_what_filters_leave_of_a_wide_row_is_a_list():
    logits = row("flat", V, 0)
    for params in ({"top_k": 50}, {"min_p": 0.5}, {"top_k": 256}, {"top_k": 50, "top_p": 0.9}):
        made = probs(logits, SamplingParams(**params))
        assert (made.dense, made.point) == (None, None)
        assert made.ids.tolist() == sorted(made.ids.tolist())
        assert (made.ids.dtype, made.listed.dtype) == (np.int64, np.float32)
        assert float(made.listed.sum()) == pytest.approx(1, abs=1e-6)
    for params in ({}, {"top_k": 257}, {"top_p": 0.99}):
        assert probs(logits, SamplingParams(**params)).dense.shape == (V,)
    assert probs(logits[:-1], SamplingParams(top_k=5)).dense.shape == (V - 1,), "a narrow row stays a vector"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_draws_are_those_of_the_vector(kernels, dtype, monkeypatch):
    monkeypatch.setattr(arithmetic, "native_sampler", lambda: None if kernels is BY_NUMPY else kernels)
    generator = np.random.default_rng(0)
    for seed in range(40):
        ids = np.sort(generator.permutation(1000)[: 1 + seed * 3])
        made = Probs(ids=ids, listed=generator.random(len(ids), dtype))
        made.listed[:: 1 + seed % 4] = 0
        made.listed[-1] = 0.5
        coins = PhiloxCoins(seed, 5, 1)
        for draw in (coins.draw, coins.draft, coins.pick):
            assert draw(made, 2) == draw(spelled(made, 1000), 2)


FORMS = {
    "point": Probs(point=4),
    "point beyond": Probs(point=7),
    "vector": Probs(dense=np.array([0.1, 0.2, 0.0, 0.3, 0.4, 0.0])),
    "shorter": Probs(dense=np.array([0.5, 0.25, 0.25])),
    "longer": Probs(dense=np.array([0.0, 0.1, 0.1, 0.1, 0.2, 0.0, 0.0, 0.5])),
    "list": listed([1, 3, 4], [0.5, 0.25, 0.25]),
    "other list": listed([0, 3, 5], [0.25, 0.25, 0.5]),
    "list beyond": listed([4, 7, 9], [0.25, 0.25, 0.5]),
}


@pytest.mark.parametrize(("p", "q"), list(itertools.product(FORMS, FORMS)))
def test_the_residual_of_every_pair_of_forms(p, q):
    """norm(max(0, p - q)), id by id; p where nothing is left; neither distribution is changed."""
    p, q = FORMS[p], FORMS[q]
    before = [[one.at(i) for i in range(10)] for one in (p, q)]
    made = ratio.residual(p, q)
    if p.point is None:
        expected = [max(0.0, p.at(i) - q.at(i)) for i in range(10)]
        expected = [share / sum(expected) for share in expected] if any(expected) else before[0]
        assert [made.at(i) for i in range(10)] == pytest.approx(expected, abs=1e-15)
        assert (made.ids is None) == (p.ids is None)
        assert len(made.weights) == len(p.weights)
    else:
        assert made is p
    assert [[one.at(i) for i in range(10)] for one in (p, q)] == before


def test_a_distribution_is_whatever_numpy_takes_for_arrays() -> None:
    """Tensors of torch on the host share their memory with it; lists are copied."""
    weights = torch.tensor([0.2, 0.0, 0.8])
    p, q = Probs(dense=weights), Probs(ids=[0, 2], listed=[0.5, 0.5])  # type: ignore[arg-type]
    assert np.shares_memory(p.weights, weights.numpy())
    assert (p.weights.dtype, q.weights.dtype) == (np.float32, np.float64)
    draft = Draft.chains([[2]], [[q]])
    made, alike = (
        ratio.verify(draft, [[given, Probs(point=1)]], [PhiloxCoins(3, 5, 0)])
        for given in (p, Probs(dense=np.array([0.2, 0.0, 0.8], np.float32)))
    )
    assert made == alike
    assert ratio.residual(p, q).weights.tolist() == [0.0, 0.0, 1.0]


def test_the_residual_is_as_wide_as_the_wider_type():
    single, double = (listed([0, 2], [0.5, 0.5], dtype) for dtype in (np.float32, np.float64))
    for a, b in ((single, double), (double, single)):
        assert ratio.residual(a, Probs(dense=b.weights * 0.5)).weights.dtype == np.float64
    assert ratio.residual(single, listed([0], [0.25], np.float32)).weights.dtype == np.float32


@pytest.mark.parametrize("module", [ratio, match])
def test_enumerated_rounds_do_not_depend_on_the_form(module):
    """Every way of one round, by lists and by vectors: the same outcomes with the same probabilities."""
    p, q = listed([0, 2], [0.75, 0.25]), listed([1, 2], [0.5, 0.5])

    def ways(p: Probs, q: Probs) -> list[tuple[float, list[int]]]:
        def run(coins) -> list[int]:
            draft = Draft.chains([[coins.pick(q, 0) if module is match else coins.draft(q, 0)]], [[q]])
            return module.verify(draft, [[p, p]], [coins]).emitted(draft, 0)

        return enumerate_outcomes(run)

    by_lists, by_vectors = ways(p, q), ways(spelled(p, 3), spelled(q, 3))
    assert [tokens for _, tokens in by_lists] == [tokens for _, tokens in by_vectors]
    assert [w for w, _ in by_lists] == pytest.approx([w for w, _ in by_vectors], abs=1e-15)


@pytest.mark.parametrize("rule", ["ratio", "match"])
@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.4, "repetition_penalty": 1.7}])
def test_the_engine_is_lossless_with_lists(rule, options, monkeypatch):
    """The real engine in exact enumeration, with every filtered distribution of either model as a list."""
    monkeypatch.setattr(pipeline, "most_listed", lambda width: width)
    assert pipeline.probs(np.zeros(3, np.float32), SamplingParams(top_k=2)).ids.tolist() == [0, 1]
    assert_lossless(Case("model", SamplingParams(max_tokens=3, acceptance=rule, **options)))
    assert_lossless(Case("model", SamplingParams(max_tokens=3, acceptance=rule, **options), {"draft_top_k": 1}))


# ------------------------------------------------------------------------------------------------------ narrow drafts


def narrow_runner(num_rows: int, num_ids: int, holes: tuple[int, ...] = ()) -> Runner:
    model = ToyModel(num_rows, 3)
    return Runner(model, BlockCache.of(model, "paged", max_batch_size=1, max_seq_len=32), num_ids, holes)


@pytest.mark.parametrize(("num_rows", "num_ids", "width"), [(3, 5, 3), (5, 3, 3), (4, 4, 4)])
def test_rows_of_logits_end_where_ids_or_the_matrix_do(num_rows, num_ids, width):
    runner = narrow_runner(num_rows, num_ids, holes=(1, 4))
    runner.cache.open(0)
    scores = runner.forward([Run(0, [0, 2])])
    assert scores.logits[0].shape == (2, width)
    assert runner.forward([Run(0, [0], "none")]).logits[0].shape == (0, width)
    assert np.unique(np.isinf(scores.logits[0]).nonzero()[1]).tolist() == [1]


@pytest.mark.parametrize("rule", ["ratio", "match"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"logit_bias": {2: 1.0}}])
def test_a_draft_with_fewer_ids_than_its_target_is_lossless(rule, options):
    case = Case(
        "model", SamplingParams(max_tokens=3, acceptance=rule, **options), near=ToyModel(2, 8), prompt=(0, 1, 0)
    )
    assert any(report.num_drafted for _, (_, reports) in every_way(case) for report in reports)
    assert_lossless(case)


def test_biases_of_ids_that_the_draft_does_not_have_do_not_keep_it_from_drafting():
    drafter = ModelDrafter(narrow_runner(3, 5), Options(draft_temperature=0.5))
    for bias, kept in (({1: 2.0, 4: 9.0}, {1: 2.0}), ({3: 1.0}, {}), ({0: 1.0}, {0: 1.0})):
        seq = Sequence(0, [0, 1], 2, SamplingParams(logit_bias=bias), 0, 9)
        drafter.begin(seq)
        assert dict(drafter._fed[0].params.logit_bias) == kept
        assert probs(np.zeros(3, np.float32), drafter._fed[0].params).dense.shape == (3,)
        drafter.end(seq)
