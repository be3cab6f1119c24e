"""The pipeline: each rule by hand, the order, ties, edges, and agreement with transformers where definitions agree."""

import itertools
import math
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.special import log_softmax, softmax
from transformers.generation import logits_process as hf

from forerun.errors import BadOption, InternalError
from forerun.sampling import History, likeliest, logprobs_of, probs, takes_the_best
from forerun.testing.engines import second_pipeline
from forerun.types import Probs, SamplingParams, Sequence

INF = math.inf


def row(*logits: float, dtype: type = np.float64) -> np.ndarray:
    return np.array(logits, dtype)


def distribution(logits: np.ndarray, history: History = History(), **params) -> list[float]:  # noqa: B008 - frozen
    return probs(logits, SamplingParams(**params), history).dense.tolist()


def support(logits: np.ndarray, **params) -> list[int]:
    return [i for i, p in enumerate(distribution(logits, **params)) if p > 0]


# ------------------------------------------------------------------------------------------------------- the softmax


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softmax_keeps_the_width_and_the_logits(dtype):
    logits = np.random.default_rng(0).standard_normal(97, dtype)
    before = logits.copy()
    everything = {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 1.0, "logit_bias": {3: 1.0}}
    for params in ({}, {"temperature": 0.7}, {"temperature": 0.0, "repetition_penalty": 2.0}, everything):
        made = probs(logits, SamplingParams(**params), History([1, 2, 3], 1))
        assert (logits == before).all(), "the row belongs to the model"
        assert made.dense is None or made.dense.dtype == dtype
    assert distribution(logits) == pytest.approx(softmax(logits.astype(np.float64)).tolist(), abs=1e-7)


def test_half_precision_is_widened():
    assert probs(np.zeros(9, np.float16), SamplingParams()).dense.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 3, "logit_bias": {1: 0.5}}], ids=str)
def test_a_row_is_whatever_numpy_takes_for_one(params, dtype):
    """A tensor of torch on the host, a column of a matrix, a list of numbers: the same bits."""
    logits = np.random.default_rng(0).standard_normal(9, dtype)
    wanted = probs(logits, SamplingParams(**params))
    columns = np.stack((logits, logits), axis=1)
    for other in (torch.from_numpy(logits), columns[:, 1], list(logits)):
        made = probs(other, SamplingParams(**params))
        assert made.point == wanted.point
        assert made.dense is wanted.dense is None or made.dense.dtype == dtype
        assert made.dense is None or made.dense.tolist() == wanted.dense.tolist()
        assert likeliest(other, SamplingParams(), History(), 3) == likeliest(logits, SamplingParams(), History(), 3)
        assert logprobs_of(other, 2, 1) == logprobs_of(logits, 2, 1)


@pytest.mark.parametrize("temperature", [1e-5, 0.01, 1.0, 1e6])
def test_no_temperature_overflows(temperature):
    made = distribution(row(1e30, -1e30, 3.0, -INF, dtype=np.float32), temperature=temperature)
    assert made[0] == 1
    assert made[3] == 0
    assert sum(distribution(row(80.0, 79.9, -INF, dtype=np.float32), temperature=temperature)) == pytest.approx(1)


def test_excluded_ids_are_exact_zeros():
    assert distribution(row(0.0, -INF, 0.0)) == [0.5, 0.0, 0.5]


# ------------------------------------------------------------------------------------------------------------ greedy


def test_greedy_is_a_point_and_takes_the_lowest_id_on_ties():
    assert probs(row(1.0, 5.0, 5.0, 2.0), SamplingParams(temperature=0)).point == 1
    wide = np.full(100_003, 1.0, np.float32)
    wide[[40_000, 99_999]] = 2.0
    made = probs(wide, SamplingParams(temperature=0, top_k=1, top_p=0.1))
    assert (made.point, made.dense) == (40_000, None)


def test_greedy_leaves_after_penalties_and_masks():
    logits, history = row(3.0, 2.9, 2.8), History([0, 1], 0, end_ids=frozenset({2}))
    assert probs(logits, SamplingParams(temperature=0, presence_penalty=1.0), history).point == 2
    assert probs(logits, SamplingParams(temperature=0, presence_penalty=1.0, min_tokens=3), history).point == 0


# --------------------------------------------------------------------------------------------------------- penalties


def test_the_largest_logit_is_all_that_greedy_needs_where_nothing_moves_it():
    greedy = {"temperature": 0.0, "max_tokens": 9}
    assert takes_the_best(SamplingParams(**greedy, top_k=3, top_p=0.5, min_p=0.1, seed=1))
    assert not takes_the_best(SamplingParams(**greedy), [(5,)])
    moved = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "min_tokens": 1}
    for name, value in {**moved, "logit_bias": {3: 1.0}, "logprobs": 0, "temperature": 1.0}.items():
        assert not takes_the_best(SamplingParams(**{**greedy, name: value})), name


def test_repetition_divides_positive_and_multiplies_other_logits_once_per_id():
    history = History([0, 0, 1, 3], 3)  # prompt and output alike; id 0 twice
    made = np.log(distribution(row(2.0, -1.0, 1.0, 0.0), history, repetition_penalty=2.0))
    assert made - made[2] == pytest.approx([0.0, -3.0, 0.0, -1.0])


def test_presence_and_frequency_count_the_output_only():
    history = History([0, 0, 1, 1, 1, 2], 2)
    made = np.log(distribution(row(0.0, 0.0, 0.0, 0.0), history, presence_penalty=0.5, frequency_penalty=0.25))
    assert made - made[0] == pytest.approx([0.0, -1.25, -0.75, 0.0])


def test_drafted_tokens_count_like_committed_ones():
    seq = Sequence(0, [0, 1, 1], 1, SamplingParams(), 0, 99)
    rest = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.3}
    logits = np.random.default_rng(0).standard_normal(5)
    drafted = distribution(logits, History.of(seq, [3, 3]), **rest)
    for token in (3, 3):
        seq.commit(token, "accepted")
    assert drafted == distribution(logits, History.of(seq), **rest)
    assert drafted != distribution(logits, History.of(seq, [3]), **rest)


def test_ids_beyond_the_row_are_no_ones_penalty():
    """A draft model may have a smaller head than the target whose tokens it continues."""
    history = History([7, 1], 0, end_ids=frozenset({9}), bad_word_ids=((8,),))
    params = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "min_tokens": 3}
    logits = row(1.0, 1.0, 1.0)
    assert distribution(logits, history, **params) == distribution(logits, History([1], 0), **params)


# ------------------------------------------------------------------------------------------------------------- masks


def test_end_ids_are_masked_until_min_tokens():
    logits, ends = row(0.0, 5.0, 0.0), frozenset({1})
    for num_output in range(4):
        history = History([0] * (2 + num_output), 2, end_ids=ends)
        made = distribution(logits, history, min_tokens=2)
        assert (made[1] == 0) == (num_output < 2)
    assert distribution(logits, History((), 0, ends))[1] > 0


@pytest.mark.parametrize(
    ("tokens", "banned"), [([], [4]), ([0], [1, 4]), ([0, 1], [2, 4]), ([2, 0, 1], [2, 4]), ([1], [4])]
)
def test_bad_words_are_not_completed(tokens, banned):
    history = History(tokens, 0, bad_word_ids=((4,), (0, 1), (0, 1, 2)))
    assert [i for i, p in enumerate(distribution(np.zeros(6, np.float32), history)) if p == 0] == banned


def test_a_bad_word_may_begin_in_the_prompt_or_in_the_draft():
    seq = Sequence(0, [5, 0], 2, SamplingParams(), 0, 99, bad_word_ids=((0, 1, 2),))
    assert distribution(np.zeros(4, np.float32), History.of(seq, [1]))[2] == 0
    assert distribution(np.zeros(4, np.float32), History.of(seq, [1, 1]))[2] > 0


def test_bias():
    made = np.log(distribution(row(0.0, 0.0, 0.0), logit_bias={2: 1.5}))
    assert made - made[0] == pytest.approx([0, 0, 1.5])
    assert distribution(row(1.0, 1.0), logit_bias={0: -INF}) == [0.0, 1.0]


# ---------------------------------------------------------------------------------------------------------- the order


def test_bias_comes_before_the_repetition_penalty():
    made = np.log(distribution(row(-1.0, 0.0), History([0], 0), repetition_penalty=2.0, logit_bias={0: 3.0}))
    assert made[0] - made[1] == pytest.approx(1.0)  # (-1 + 3) / 2; the other order gives 1


def test_the_penalty_comes_before_the_presence_penalty():
    made = np.log(distribution(row(4.0, 0.0), History([0], 0), repetition_penalty=2.0, presence_penalty=1.0))
    assert made[0] - made[1] == pytest.approx(1.0)  # 4 / 2 - 1, not (4 - 1) / 2


def test_temperature_comes_before_min_p_and_top_p():
    logits = row(2.0, 1.0, 0.0)
    assert support(logits, min_p=0.2) == [0, 1]
    assert support(logits, min_p=0.2, temperature=10.0) == [0, 1, 2]
    assert support(logits, top_p=0.7) == [0, 1]
    assert support(logits, top_p=0.7, temperature=0.1) == [0]


def test_top_p_is_of_what_top_k_and_min_p_left():
    logits = row(*np.log([0.4, 0.3, 0.2, 0.1]))
    assert support(logits, top_p=0.65) == [0, 1]
    assert support(logits, top_p=0.5, top_k=2) == [0], "0.4 / 0.7 reaches 0.5"
    assert support(logits, top_p=0.5, min_p=0.7) == [0]
    assert support(logits, top_p=0.65, top_k=2) == [0, 1]


# ------------------------------------------------------------------------------------------------------- the filters


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 99])
def test_top_k_is_exact_and_fills_ties_by_lowest_id(k):
    assert support(row(1.0, 3.0, 2.0, 2.0, 2.0, 0.0), top_k=k) == sorted([1, 2, 3, 4, 0, 5][:k])


def test_top_k_over_excluded_ids():
    assert support(row(-INF, 1.0, -INF, -INF), top_k=3) == [1]


def test_min_p_keeps_what_is_equal():
    assert support(row(*np.log([0.5, 0.25, 0.125, 0.125])), min_p=1.0) == [0]
    assert support(row(0.0, 0.0, -1.0), min_p=1.0) == [0, 1]
    assert support(row(0.0, math.log(0.25), -9.0), min_p=0.25) == [0, 1]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [0, 1, 3]), (1, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_token_that_crosses(top_p, kept):
    assert support(row(*np.log([0.2, 0.4, 0.1, 0.3])), top_p=top_p) == kept


def test_top_p_breaks_ties_by_lowest_id():
    assert support(np.zeros(8, np.float32), top_p=0.5) == [0, 1, 2, 3]
    assert support(np.zeros(8, np.float32), top_p=0.51) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 20.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1 - 1e-12])
def test_top_p_without_a_full_sort_is_top_p_with_one(scale, top_p):
    """Candidates by growing thresholds, against the definition over a stable sort of everything."""
    logits = np.random.default_rng(1).standard_normal(3001) * scale
    order = sorted(range(3001), key=lambda i: (-float(logits[i]), i))
    weights = np.exp(logits - logits.max())
    count = int(np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum())) + 1
    assert abs(len(support(logits, top_p=top_p)) - len(order[:count])) <= (1 if top_p > 0.9999 else 0)
    assert set(support(logits, top_p=top_p)) <= set(order[: count + 1])


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.integers(0, 7),
        "top_p": st.sampled_from([0.17, 0.53, 0.91, 1.0]),
        "min_p": st.sampled_from([0.0, 0.03, 0.37, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.9]),
        "presence_penalty": st.sampled_from([0.0, -0.4, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.35]),
        "min_tokens": st.integers(0, 4),
        "logit_bias": st.dictionaries(st.integers(0, 5), st.sampled_from([-2.0, 0.7]), max_size=3),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.data(), PARAMS, st.lists(st.integers(0, 5), max_size=8), st.integers(0, 10**6))
def test_the_pipeline_is_the_one_written_twice(data, params, tokens, seed):
    """Against lists and full sorts (tests/house/enumeration.py), whole numbers included so that ties happen."""
    num_prompt = data.draw(st.integers(0, len(tokens)))
    logits = np.random.default_rng(seed).standard_normal(6) * 2
    if seed % 3 == 0:
        logits = logits.round()
    wanted = SamplingParams(**params)
    made = probs(logits, wanted, History(tokens, num_prompt, frozenset({4})))
    expected = second_pipeline(logits.tolist(), wanted, tokens[:num_prompt], tokens[num_prompt:], {4})
    assert [made.at(i) for i in range(6)] == pytest.approx(expected, abs=1e-12)


# ----------------------------------------------------------------------------------------------------- transformers


def warped(logits: np.ndarray, tokens: Seq[int], *steps) -> np.ndarray:
    scores = torch.from_numpy(logits[None].copy())
    for step in steps:
        scores = step(torch.tensor([tokens]), scores)
    return scores[0].softmax(0).numpy()


@pytest.mark.parametrize("seed", range(6))
def test_transformers_agrees_where_definitions_agree(seed):
    """Same steps in the same order; rows without ties. Its top-p sums from the other end, in the row's width."""
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal(500) * 3
    tokens = generator.integers(500, size=40).tolist()
    steps = {
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor(1.3),
        "temperature": hf.TemperatureLogitsWarper(0.8),
        "top_k": hf.TopKLogitsWarper(60),
        "min_p": hf.MinPLogitsWarper(0.02),
        "top_p": hf.TopPLogitsWarper(0.9),
    }
    values = {"repetition_penalty": 1.3, "temperature": 0.8, "top_k": 60, "min_p": 0.02, "top_p": 0.9}
    for n in range(1, len(steps) + 1):
        for names in itertools.combinations(steps, n):
            made = probs(logits, SamplingParams(**{k: values[k] for k in names}), History(tokens, 10)).dense
            assert made == pytest.approx(warped(logits, tokens, *(steps[k] for k in names)), abs=1e-13)


def test_transformers_agrees_on_bad_words_and_min_tokens():
    logits = np.random.default_rng(0).standard_normal(20)
    words = [[3], [5, 6], [1, 2, 4]]
    for tokens in ([7, 1, 2], [7, 8, 5], [9, 9, 9]):
        steps = (hf.NoBadWordsLogitsProcessor(words, eos_token_id=19), hf.MinNewTokensLengthLogitsProcessor(1, 3, 19))
        history = History(tokens, 1, frozenset({19}), tuple(map(tuple, words)))
        made = distribution(logits, history, min_tokens=3)
        assert made == pytest.approx(warped(logits, tokens, *steps).tolist(), abs=1e-14)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"min_tokens": 3}, {"logit_bias": {2: -INF}}], ids=str)
def test_an_end_is_forced_at_the_last_place_and_nowhere_else(fields):
    """As in transformers, whatever else is said; drafted tokens count."""
    logits, step = np.random.default_rng(0).standard_normal(4), hf.ForcedEOSTokenLogitsProcessor(5, 2)
    params = SamplingParams(**fields, max_tokens=3, forced_eos_token_id=2)
    for num in range(2, 5):
        history = History([0, 1], 2, frozenset({2}), drafted=[0] * (num - 2), max_len=5)
        made, without = (probs(logits, p, history, soft=True) for p in (params, SamplingParams(**fields, max_tokens=3)))
        best = likeliest(logits, params, history, 4)
        if num < 4:
            assert made.point == without.point
            assert made.dense is without.dense is None or (made.dense == without.dense).all()
            assert best == likeliest(logits, SamplingParams(**fields, max_tokens=3), history, 4)
            continue
        assert (made.point, best) == (2, ([2], [0.0]))
        assert made.soft == Probs.of_point(2)
        assert warped(logits, [0] * num, step).tolist() == [0, 0, 1, 0]


# ------------------------------------------------------------------------------------------------- dead ends, errors


def test_nothing_left_is_the_users_affair():
    for params in ({"logit_bias": {0: -INF, 1: -INF}}, {"temperature": 0, "logit_bias": {0: -INF, 1: -INF}}):
        with pytest.raises(BadOption, match="no token is left"):
            probs(row(1.0, 2.0), SamplingParams(**params))
    with pytest.raises(BadOption, match="no token is left"):
        probs(row(1.0, 2.0), SamplingParams(min_tokens=1), History((), 0, frozenset({0, 1})))


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_logits_that_are_no_numbers_are_ours(bad):
    for temperature in (0.0, 1.0):
        with pytest.raises(InternalError, match="no numbers"):
            probs(row(1.0, bad, 0.0), SamplingParams(temperature=temperature))
    with pytest.raises(InternalError, match="no numbers"):
        probs(row(-INF, -INF), SamplingParams())
    with pytest.raises(InternalError, match="no numbers"):
        logprobs_of(row(bad, 1.0), 0, 1)


def test_a_bias_beyond_the_vocabulary_is_refused():
    with pytest.raises(BadOption, match=r"logit_bias names id 7.*ids 0 to 2"):
        probs(row(1.0, 2.0, 3.0), SamplingParams(logit_bias={7: 1.0}))


# ----------------------------------------------------------------------------------------------- history, logprobs


def test_history_reads_both_parts_without_a_copy():
    seq = Sequence(0, [1, 2, 3], 2, SamplingParams(), 0, 99)
    joined = History.of(seq, [4, 5]).tokens
    assert list(joined) == [1, 2, 3, 4, 5]
    assert (len(joined), joined[0], joined[3], joined[-1], joined[-3]) == (5, 1, 4, 5, 3)
    assert (list(joined[2:4]), list(joined[-2:])) == ([3, 4], [4, 5])
    assert History.of(seq).tokens is seq.tokens
    assert (History.of(seq, [4, 5]).num_output_tokens, History().num_output_tokens) == (3, 0)
    with pytest.raises(IndexError):
        joined[5]


def test_logprobs_are_of_the_raw_distribution():
    logits = np.random.default_rng(0).standard_normal(50)
    expected = log_softmax(logits)
    made = logprobs_of(logits, 7, 5)
    assert (made.token_id, made.logprob) == (7, pytest.approx(float(expected[7])))
    ids = np.argsort(-expected)[:5]
    assert [i for i, _ in made.top] == ids.tolist()
    assert [p for _, p in made.top] == pytest.approx(expected[ids].tolist())
    assert logprobs_of(logits, 7, 0).top == []
    assert len(logprobs_of(logits[:3], 1, 20).top) == 3


def test_logprobs_list_ties_by_lowest_id():
    assert [i for i, _ in logprobs_of(row(0.0, 1.0, 0.0, 1.0, 0.0), 0, 4).top] == [1, 3, 0, 2]
    assert logprobs_of(row(0.0, -INF), 1, 2).logprob == -INF


def test_a_row_does_not_depend_on_where_it_lies():
    """Row invariance (docs/exactness.md): the bits are those of the row alone, whatever array it is a slice of."""
    block = np.random.default_rng(0).standard_normal((7, 1003), np.float32)
    params = SamplingParams(temperature=0.9, top_k=200, top_p=0.95, min_p=0.001)
    for i in range(7):
        for view in (block[i], block[i].copy(), np.asfortranarray(block)[i]):
            assert (probs(view, params).dense == probs(block[i : i + 1].copy()[0], params).dense).all()
