"""Drafts that end by the drafter's own probabilities, and texts that are searched before the model is run."""

import dataclasses
from collections.abc import Iterator

import pytest

from drafters.requests import proposed
from forerun import LLM, BadOption, SamplingParams
from forerun.drafters.shared.continuations import Guess
from forerun.engine.engine import philox_coins
from forerun.sampling.grammar import vocabulary
from forerun.testing.engines import letters
from forerun.types import EDGES, Budget, DraftStep, Sequence, Stop
from support import heard, needs_native

TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n"
SHARES = [0.3, 0.5, 0.6, 0.7, 0.85, 0.95, 0.99]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("shipped", draft="model", max_seq_len=512, max_batch_size=4) as made:
        yield made


@needs_native
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", ["ratio", "match"])
def test_a_stopped_draft_is_the_beginning_of_one_that_is_not(llm: LLM, temperature: float, acceptance: str) -> None:
    """With the same coins; and where it ends follows from the tokens in it, so that no drawn token is taken back."""
    drafter = llm.drafters["model"]
    lengths = set[int]()
    for seed in range(20):
        params = SamplingParams(temperature=temperature, acceptance=acceptance, seed=seed)
        ids = llm.tokenizer.encode(TEXT)[: 6 + seed]
        found = []
        for stop in (Stop.never(8), Stop(SHARES, [0.25] * 8)):
            seq = Sequence(1000 + seed, list(ids), len(ids), params, seed, 500, draft="model")
            draft = proposed(drafter, seq, Budget([8], 64, stops={0: stop}))
            assert len(stop.confidences) == len(draft.tokens)
            found.append((draft.tokens, stop.confidences))
        (whole, all_sure), (cut, sure) = found
        assert cut == whole[: len(cut)]
        assert sure == pytest.approx(all_sure[: len(sure)], rel=1e-4)
        again = Stop(SHARES, [0.25] * 8)
        goes_on = [again.goes_on(p) for p in sure]
        assert all(goes_on[:-1])
        assert not goes_on[-1] or len(cut) == 8
        lengths.add(len(cut))
    assert len(lengths) > 1


@needs_native
def test_the_text_is_searched_before_the_model_is_run(llm: LLM) -> None:
    """What a text repeats costs no pass of the model; what is said is what plain decoding says."""
    steps = heard(llm)
    params = SamplingParams(max_tokens=96, temperature=0)
    prompts = [TEXT * 4, "class Stack:\n", "import os\nimport sys\n" * 6]
    plain = llm.generate(prompts, dataclasses.replace(params, draft="none"))
    own = list[DraftStep]()
    for _ in range(20):  # while this machine does something else, a search may seem to take long
        assert [out.token_ids for out in llm.generate(prompts, params)] == [out.token_ids for out in plain]
        own = [report.drafts["model"] for report in steps if "model" in report.drafts]
        if any(step.num_nodes and not step.passes for step in own):
            break
    assert any(step.num_nodes and not step.passes for step in own)
    assert all(step.num_found == step.num_nodes for step in own if not step.passes)
    assert any(step.passes for step in own)


@needs_native
@pytest.mark.parametrize(("bar", "is_shut", "passes"), [(0.0, False, 0), (100.0, False, 3), (100.0, True, 0)])
def test_the_search_must_promise_more_than_the_model(llm: LLM, bar: float, is_shut: bool, passes: int) -> None:
    """A guess below the bar is not drafted; and where the model is shut, neither is anything of its own."""
    drafter = llm.drafters["model"]
    ids = llm.tokenizer.encode(TEXT * 3)
    seq = Sequence(2000, list(ids), len(ids), SamplingParams(temperature=0), 0, 500, draft="model")
    search = Stop(SHARES, [0.05] * 8)
    stop = dataclasses.replace(Stop.never(3), search=search, bar=bar, is_shut=is_shut)
    draft = proposed(drafter, seq, Budget([3], 500, stops={0: stop}))
    assert search.gain > 0
    assert drafter.num_passes == passes
    assert drafter.num_found == len(draft.tokens) - passes
    assert len(stop.confidences) == passes
    assert len(draft.tokens) == (0 if is_shut else 3)


@needs_native
def test_a_search_that_could_not_be_compared_is_refused() -> None:
    for search in ("lookup", "recycle", "eagle"):
        with pytest.raises(BadOption):
            LLM("shipped", draft=f"model:search=({search})", max_seq_len=64)
    assert not LLM("shipped", draft="model:search=none", max_seq_len=64).drafters["model"].searches


def test_a_path_ends_before_the_first_node_that_is_not_worth_its_row() -> None:
    """A longer match is surer; a node that few of the places had before it is less so."""
    guess = Guess([5, 6, 7], [-1, 0, 1], [1.0, 1.0, 0.4], match=9)
    assert guess.confidence(0, 0) == pytest.approx(0.9)
    assert guess.confidence(1, 1) == pytest.approx(1 - 1 / 11)
    assert guess.confidence(2, 2) == pytest.approx(0.4 * (1 - 1 / 12))
    shares = [0.1] * 2 + [0.9] * (len(EDGES) - 1)
    stop, seq = Stop(shares, [0.2] * 8), Sequence(0, [1], 1, SamplingParams(), 0, 99)
    assert guess.draft(seq, 0, Budget([8], 0, stops={0: stop})).tokens == [5, 6]
    assert stop.gain == pytest.approx(0.9 - 0.2 + 0.81 - 0.2)
    assert guess.draft(seq, 0, Budget([8], 0, stops={0: Stop(shares, [0.95])})).tokens == []
    assert guess.draft(seq, 0, Budget([8], 0)).tokens == [5, 6, 7]


def test_a_node_of_a_tree_is_weighed_behind_its_own_parent() -> None:
    guess = Guess([5, 6, 7, 8], [-1, -1, 1, 0], [0.5, 0.5, 0.5, 0.25], match=9)
    assert [guess.confidence(*node) for node in ((0, 0), (1, 0), (2, 1), (3, 1))] == pytest.approx(
        [0.45, 0.45, 1 - 1 / 11, 0.5 * (1 - 1 / 11)]
    )
    shares = [0.1] + [0.5] * 2 + [0.9] * (len(EDGES) - 2)
    stop, seq = Stop(shares, [0.2] * 8), Sequence(0, [1], 1, SamplingParams(), 0, 99)
    draft = guess.draft(seq, 0, Budget([8], 0, stops={0: stop}))
    assert (draft.tokens, draft.parents) == ([5, 6, 7, 8], [-1, -1, 1, 0])
    assert (stop.parents, stop.gain) == ([-1, -1, 1, 0], pytest.approx(0.5 + 0.5 + 0.45 + 0.25 - 4 * 0.2))


def test_a_grammar_cuts_a_path_before_it_is_weighed_and_what_it_forces_is_free() -> None:
    """So that what is counted of guesses is counted of choices, and of those that may be right."""
    params = SamplingParams(choice=("abcab", "abdab", "abdb"))
    compiled = vocabulary(letters(5, frozenset())).compiled(params)
    assert compiled is not None
    seq = Sequence(0, [4], 1, params, 0, 99, grammar=compiled.start(frozenset(), 1))
    guess = Guess([0, 1, 3, 0, 1, 4], [-1, 0, 1, 2, 3, 4], [1.0] * 6, match=9)
    stop = Stop([0.9] * len(SHARES), [0.1] * 8)
    draft = guess.draft(seq, 0, Budget([8], 0, stops={0: stop}, limits=[8]))
    assert (draft.tokens, sorted(draft.forced), len(stop.confidences)) == ([0, 1, 3, 0], [0, 1], 2)
    stop = Stop([0.9] * len(SHARES), [0.1] * 8)
    alone = guess.draft(seq, 0, Budget([8], 0, stops={0: stop}))
    assert (alone.tokens, alone.forced, len(stop.confidences)) == ([0, 1, 3, 0, 1], frozenset(), 5), "nothing is free"
    between = Sequence(0, [4], 1, SamplingParams(choice=("acb", "acd", "bcb")), 0, 99)
    compiled = vocabulary(letters(5, frozenset())).compiled(between.params)
    assert compiled is not None
    between.grammar = compiled.start(frozenset(), 1)
    stop = Stop([0.9] * len(SHARES), [0.1] * 8)
    draft = Guess([0, 2, 1], [-1, 0, 1], [1.0] * 3, match=9).draft(
        between, 0, Budget([8], 0, stops={0: stop}, limits=[8])
    )
    assert (draft.tokens, sorted(draft.forced), stop.parents) == ([0, 2, 1], [1], [-1, 0]), (
        "what stands above it counts"
    )
    wrong = Guess([0, 1, 1], [-1, 0, 1], [1.0] * 3, match=9)
    assert wrong.draft(seq, 0, Budget([8], 0, limits=[8])).tokens == [], "what is forced last is another's to draft"


def test_what_is_forced_behind_guesses_is_drafted_where_it_pays() -> None:
    """The surer the guesses are, the more rows may be lost; and the search is asked where it was believed."""
    assert [Budget([8], 0).carries(0, num, 6) for num in (0, 3, 4)] == [True, True, False]
    assert not Budget([8], 0).carries(0, 2, 20)
    assert [Budget([8], 0).carries(0, 1, num, 0.5) for num in (4, 5)] == [True, False]
    stop = Stop(SHARES, [0.0] * 8, search=Stop(SHARES, [0.0] * 8))
    assert stop.search is not None
    budget = Budget([8], 0, stops={0: stop})
    assert stop.search.takes(0.2, -1)
    assert stop.survival == pytest.approx(0.3)
    assert [budget.carries(0, 1, num) for num in (1, 2)] == [True, False]
    stop.goes_on(0.9)
    assert stop.survival == pytest.approx(0.85), "the model was asked"
    assert [budget.carries(0, 1, num) for num in (22, 23)] == [True, False]


@needs_native
def test_the_drafter_says_what_its_model_has_not_read(llm: LLM) -> None:
    """A prompt that begins like an earlier one is read as far."""
    drafter, ids = llm.drafters["model"], llm.tokenizer.encode(TEXT * 3)[::-1]
    params, found = SamplingParams(temperature=0.0), list[int]()
    for number, tokens in enumerate((ids, [*ids, *ids[:7]])):
        seq = Sequence(2000 + number, list(tokens), len(tokens), params, 0, 500, draft="model")
        drafter.begin(seq)
        for _ in range(2):  # with room to read it all in the first
            stop = dataclasses.replace(Stop.never(2), search=Stop(SHARES, [2.0] * 8))
            drafter.propose([seq], Budget([2], len(ids), stops={0: stop}), [philox_coins(seq)])
            assert stop.num_unread is not None
            found.append(stop.num_unread)
        drafter.end(seq)
    assert found[0] == len(ids)
    assert max(found[1], found[3]) <= 2
    assert 7 <= found[2] <= 7 + 16
