"""The n-gram store: what it drafts, what it counts, how much it keeps and reads."""

import random

import pytest

from drafters.toys import engine_with
from engine.load import greedy, run
from forerun.drafters import ngram
from forerun.drafters.ngram import NgramDrafter, Options, Recent, Store
from forerun.drafters.shared import chains
from forerun.sampling.random import PhiloxCoins
from forerun.types import Budget, SamplingParams, Sequence


def store_of(tokens: list[int], **options: int) -> Store:
    store = Store(Options(**options))
    store.read(tokens, len(tokens))
    return store


def test_the_longest_known_context_speaks() -> None:
    text = [1, 2, 3, 9, 2, 5, 2, 5, 1, 2]
    assert store_of(text, max_n=3).guess(text) == 3  # behind (1, 2)
    assert store_of(text, max_n=2).guess(text) == 5  # behind (2): 5 twice, 3 once
    assert store_of(text, max_n=4).guess(text) == 3  # (5, 1, 2) is unknown
    assert store_of(text, max_n=4, min_n=4).guess(text) is None
    assert store_of(text, max_n=4).guess([7]) is None
    assert store_of([1], max_n=4).guess([]) is None


def test_of_equal_counts_the_first_stays() -> None:
    assert store_of([1, 2, 1, 3], max_n=2).guess([1]) == 2
    assert store_of([1, 2, 1, 3, 1, 3], max_n=2).guess([1]) == 3
    assert store_of([1, 2, 1, 3, 1, 3, 1, 2], max_n=2).guess([1]) == 3


def test_fillers_make_alternatives_known_and_outvote_nothing() -> None:
    text = [1, 2]
    store = store_of(text, max_n=2)
    store.make_known(text, 1, [3, 2])
    assert store.guess([1]) == 2
    store.read([1, 2, 1, 3], 4)  # the filler and one occurrence are two
    assert store.guess([1]) == 3
    assert store_of([1, 2, 1, 3], max_n=2).guess([1]) == 2


def test_a_random_text_agrees_with_counting() -> None:
    text = random.Random(0).choices(range(4), k=400)
    store = store_of(text, max_n=3)
    for context in [(a, b) for a in range(4) for b in range(4)]:
        followers = [text[i] for i in range(2, len(text)) if tuple(text[i - 2 : i]) == context]
        assert followers.count(store.guess(list(context))) == max(map(followers.count, range(4)))


def test_a_source_is_a_text_of_its_own() -> None:
    """It is counted before the answer, of which none of its n-grams is a part."""
    store = Store(Options(max_n=3), before=[1, 2, 3])
    store.read([0, 1, 2], 3)
    assert store.guess([0, 1]) == 2
    assert store.guess([0, 1, 2]) == 3  # as of the source
    assert store.guess([7, 3]) is None  # what the answer begins with does not follow the source's end
    store.read([0, 1, 2, 5, 1, 2, 5], 7)
    assert store.guess([1, 2]) == 5  # of the answer, twice
    drafter, coins = NgramDrafter(Options()), [PhiloxCoins(0, 1, 0)]
    seq = Sequence(0, [2], 1, SamplingParams(temperature=0), 0, 9, source_ids=(1, 2, 3))
    assert drafter.propose([seq], Budget([3], 0), coins).tokens == [3]


def test_reading_in_pieces_is_reading() -> None:
    text = random.Random(1).choices(range(5), k=200)
    whole, pieces = store_of(text), Store(Options())
    for stop in (0, 1, 17, 18, 150, 200):
        pieces.read(text, stop)
    assert (whole._best._new, whole._counts._new) == (pieces._best._new, pieces._counts._new)


def test_what_was_not_set_for_longest_is_forgotten() -> None:
    recent = Recent[int](6)
    for i in range(100):
        recent.set((i,), i)
        recent.set((-1,), i)
        assert len(recent) <= 6
        assert recent.get((-1,)) == i
    assert recent.get((50,)) is None
    assert recent.get((99,)) == 99


def test_memory_is_bounded_and_recent_text_is_known() -> None:
    store = store_of([i % 997 for i in range(0, 50_000, 7)] + [1, 2, 3, 4] * 3, max_ngrams=64)
    assert len(store._counts) <= 64
    assert len(store._best) <= 64
    assert store.guess([1, 2, 3]) == 4


def test_only_committed_tokens_are_counted_and_ends_forget() -> None:
    """Behind each step the store is that of the committed tokens alone, however many drafted ones were rejected."""
    drafter = NgramDrafter(Options())
    engine = engine_with(drafter, 3)
    requests = [engine.add([1, 2, 3, 1, 2, 3, i], SamplingParams(max_tokens=20, seed=i)) for i in range(3)]
    while any(r.seq.finish_reason is None for r in requests):
        engine.step()
        for request in engine.scheduler.running:
            if (known := drafter._texts.by_id.get(request.seq.id)) is not None:
                assert known._counts._new == store_of(request.seq.tokens[: known.num_read])._counts._new
    assert sum(r.report.num_accepted < r.report.num_drafted for r in requests) > 0
    assert not drafter._texts.by_id


def test_a_long_prompt_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk; a prompt found in the prefix cache at most READ_TOKENS in a call, and drafts wait for that."""
    monkeypatch.setattr(chains, "READ_TOKENS", 20)
    sizes: list[int] = []
    read = ngram.Store.read

    def counted(self: Store, tokens: list[int], stop: int) -> None:
        sizes.append(stop - self.num_read)
        read(self, tokens, stop)

    monkeypatch.setattr(ngram.Store, "read", counted)
    engine = engine_with(NgramDrafter(Options()), 3, prefill_chunk_tokens=16)
    for _ in range(2):
        request = engine.add([i % 9 for i in range(100)], SamplingParams(max_tokens=12, temperature=0.0))
        run(engine, [request])
        assert request.report.num_drafted > 0
        assert max(sizes) <= 20
        assert sum(sizes) >= 110
        sizes.clear()


def test_fillers_are_the_targets_tokens_behind_kept_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each step, what was made known are the likeliest tokens behind committed ones, and the steps draft."""
    made: list[tuple[int, list[int]]] = []
    make_known = Store.make_known

    def noted(self: Store, tokens: list[int], stop: int, fillers: list[int]) -> None:
        made.append((stop, list(fillers)))
        make_known(self, tokens, stop, fillers)

    monkeypatch.setattr(Store, "make_known", noted)
    engine = engine_with(NgramDrafter(Options(filler_top_k=2)), 3)
    run(engine, [request := engine.add([1, 2, 3, 1, 2, 3], SamplingParams(max_tokens=16, temperature=0.0, logprobs=2))])
    assert [stop for stop, _ in made] == list(range(6, 6 + len(made)))
    for stop, fillers in made:
        assert fillers == [token for token, _ in request.seq.logprobs[stop - 6].top]
    assert len(made) == len(request.seq.output_ids)


def test_nothing_is_shared_between_requests() -> None:
    """What one request says is no draft of another, whatever their salts."""
    engine = engine_with(NgramDrafter(Options()), 3)
    run(engine, [engine.add([1, 2, 3, 4, 5, 6, 7, 8], greedy(8, ignore_eos=True))])
    run(engine, [second := engine.add([1], greedy(1))])
    assert second.report.num_drafted == 0
