"""Penalties count a sequence once, not once per row: the same bits as the direct formula, at the same cost anywhere."""

from collections import Counter
from collections.abc import Sequence as Seq

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from engine.load import alone, engine_with
from forerun.sampling import History, probs
from forerun.types import SamplingParams, Sequence

ALL = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.2}


def direct(row: np.ndarray, params: SamplingParams, tokens: Seq[int], num_prompt: int) -> np.ndarray:
    """The formulas over the whole history, in the order of docs/exactness.md."""
    row = row.copy()
    seen = np.unique([token for token in tokens if token < len(row)]).astype(int)
    penalty = params.repetition_penalty
    row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    ids, counts = np.unique([token for token in tokens[num_prompt:] if token < len(row)], return_counts=True)
    row[ids.astype(int)] -= (params.presence_penalty + params.frequency_penalty * counts).astype(row.dtype)
    return row


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 11), min_size=1, max_size=20),
    rounds=st.lists(st.lists(st.integers(0, 11), max_size=4), max_size=8),
    dtype=st.sampled_from([np.float32, np.float64]),
    penalties=st.dictionaries(st.sampled_from(sorted(ALL)), st.sampled_from([0.5, 1.0, 1.7]), min_size=1),
    seed=st.integers(0, 99),
)
def test_the_bits_are_those_of_the_direct_formula(prompt, rounds, dtype, penalties, seed):
    """Rows of one round see different drafted paths; some ids are beyond the row, as of a draft model with fewer."""
    params = SamplingParams(**penalties)
    seq = Sequence(0, list(prompt), len(prompt), params, 0, 10**6)
    generator = np.random.default_rng(seed)
    for emitted in rounds:
        for drafted in (emitted, emitted[:1], [], emitted[::-1], [11, 3, 3]):
            row = generator.standard_normal(9).astype(dtype)
            wanted = probs(direct(row, params, seq.tokens + drafted, len(prompt)), SamplingParams())
            assert probs(row, params, History.of(seq, drafted)).dense.tolist() == wanted.dense.tolist()
        for token in emitted:
            seq.commit(token, "accepted")


class Watched(list):
    """Committed tokens that count how many of them are read."""

    num_read = 0

    def __iter__(self):
        for token in super().__iter__():
            self.num_read += 1
            yield token

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


def tokens_read(context: int, num_rounds: int = 10, num_rows: int = 6) -> int:
    """Tokens that `num_rounds` rounds of `num_rows` rows read behind the first, two tokens committed in each."""
    seq = Sequence(0, [i % 50 for i in range(context)], context // 2, SamplingParams(**ALL), 0, 10**6)
    logits = np.random.default_rng(1).standard_normal(64, np.float32)
    probs(logits, seq.params, History.of(seq))
    seq.tokens = watched = Watched(seq.tokens)
    for _ in range(num_rounds):
        for token in (3, 60):
            seq.commit(token, "accepted")
        for row in range(num_rows):
            probs(logits, seq.params, History.of(seq, [7] * row))
    assert len(seq.counts.ids) == 51
    return watched.num_read


def test_a_row_costs_the_same_however_long_the_context_is():
    assert tokens_read(100) == tokens_read(4000) == tokens_read(40_000) == 20, "each committed token once"


def test_a_request_without_penalties_counts_nothing():
    seq = Sequence(0, [1, 2, 3], 2, SamplingParams(), 0, 99)
    probs(np.random.default_rng(0).standard_normal(9, np.float32), seq.params, History.of(seq, [5]))
    assert not seq.counts.ids


@pytest.mark.parametrize("draft", ["none", "model", "lookup"])
def test_counts_survive_preemption(draft):
    """Each request alone never waits; together they are evicted, and what is counted stays what was committed."""
    params = [SamplingParams(max_tokens=40, seed=i, **ALL, draft=draft) for i in range(3)]
    wanted = [([i] * 12 + [5, 6], one) for i, one in enumerate(params)]
    engine = engine_with(96, max_batch_size=3)
    requests = [engine.add(*one) for one in wanted]
    while any(request.seq.finish_reason is None for request in requests):
        engine.step()
        for seq in (request.seq for request in requests if request.seq.num_output_tokens):
            History.of(seq).counts()
            counted = dict(zip(seq.counts.ids, seq.counts.counts, strict=True))
            assert counted == {token: Counter(seq.output_ids)[token] for token in set(seq.tokens)}
    assert engine.scheduler.num_preemptions > 0
    assert [request.seq.output_ids for request in requests] == alone(wanted)
