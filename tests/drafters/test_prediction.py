"""prediction: where the copy stands, which requests it serves, and that no prediction changes an output."""

import random
from typing import Any

import numpy as np
import pytest

from drafters.toys import engine_with as engine_around
from engine.load import run
from forerun import LLM, SamplingParams
from forerun.drafters import lookup
from forerun.drafters.none import NoDrafter
from forerun.drafters.prediction import Copy, Options, PredictionDrafter, behind
from forerun.engine.engine import Engine
from forerun.engine.router import Router
from forerun.errors import BadOption
from forerun.sampling.random import PhiloxCoins
from forerun.testing import Branching, enumerate_outcomes
from forerun.testing.engines import engine_for, plain_outputs, summed, total_variation
from forerun.types import Budget, Sequence
from house.enumeration import Case

TEXT = list(range(10, 30))


def copy_of(output: list[int], resync_n: int = 2, text: list[int] = TEXT) -> Copy:
    """A copy of `text` behind a prompt of one token and this output."""
    copy = Copy(text, 1, resync_n, is_at_start=True)
    copy.read([0, *output], 1 + len(output))
    return copy


# --------------------------------------------------------------------------------------------------- where it stands


@pytest.mark.parametrize(
    ("output", "at"),
    [
        ([], 0),
        (TEXT[:5], 5),
        (TEXT, 20),  # all copied: nothing follows
        ([*TEXT[:5], 1], None),  # left
        ([*TEXT[:5], 1, TEXT[6]], None),  # one token is not enough
        ([*TEXT[:5], 1, *TEXT[6:8]], 8),  # one was replaced
        ([*TEXT[:5], 1, 2, *TEXT[5:7]], 7),  # two were put in
        ([*TEXT[:5], *TEXT[9:11]], 11),  # four were left out
        ([*TEXT[:5], 1, *TEXT[0:2]], 2),  # it began again
    ],
    ids=str,
)
def test_the_place_of_an_output(output: list[int], at: int | None) -> None:
    copy = copy_of(output)
    assert copy.at == at
    ahead = [] if at is None else TEXT[at : at + 3]
    assert [token for depth in range(3) if (token := copy.next_token(depth)) is not None] == ahead


def test_one_token_is_enough_where_the_option_says_so() -> None:
    assert copy_of([*TEXT[:5], 1, TEXT[6]], resync_n=1).at == 7
    assert copy_of([*TEXT[:5], 1, *TEXT[6:8]], resync_n=3).at is None


def test_the_next_occurrence_counts_and_then_the_last_before() -> None:
    ids = np.array([1, 2, 3, 1, 2, 4, 9, 1, 2, 5])
    assert [behind(ids, [1, 2], place) for place in (0, 2, 3, 5, 6, 9)] == [2, 2, 5, 5, 9, 9]
    assert behind(ids, [1, 2], 10) == 9
    assert behind(ids, [2, 5], 0) is None  # nothing follows it
    assert behind(ids, [7, 7], 0) is None
    assert behind(np.array([], dtype=np.int64), [1], 0) is None
    assert behind(ids, list(range(20)), 0) is None


def test_a_wrong_place_does_not_move_where_it_was_lost() -> None:
    """The replacement (7, 8) stands far behind, where nothing matches; then the copy goes on where it was left."""
    assert copy_of([1, 2, 3, 7, 8, 4, 5], text=[1, 2, 3, 4, 5, 6, 4, 5, 9, 7, 8, 0, 0, 4, 5, 0]).at == 5


@pytest.mark.parametrize(
    ("begun", "said", "wanted"),
    [
        ([0], [], TEXT[:3]),
        ([0], TEXT[:4], TEXT[4:7]),
        ([0], [*TEXT[:4], 1], []),
        ([0], [*TEXT[:4], 1, *TEXT[5:7]], TEXT[7:10]),
        ([0, *TEXT[5:8]], [], TEXT[8:11]),  # told to begin in the middle
        ([0, 1, 2], [], TEXT[:3]),  # told to begin with something else
        ([0, 1, 2], [3, *TEXT[15:17]], TEXT[17:20]),
    ],
    ids=str,
)
def test_the_answer_of_an_encoder_decoder_follows_its_source(
    begun: list[int], said: list[int], wanted: list[int]
) -> None:
    seq = Sequence(0, [*begun, *said], len(begun), greedy(), 0, 99, source_ids=tuple(TEXT))
    assert PredictionDrafter(Options()).propose([seq], Budget([3], 0), [PhiloxCoins(0, 9, 0)]).tokens == wanted
    seq.prediction_ids = (50, 51)
    other = PredictionDrafter(Options()).propose([seq], Budget([3], 0), [PhiloxCoins(0, 9, 0)])
    assert other.tokens == ([] if said else [50, 51])  # what a request predicts comes first


def test_the_place_is_a_function_of_the_tokens_alone() -> None:
    rng = random.Random(0)
    for _ in range(200):
        text, output = ([rng.randrange(3) for _ in range(rng.randrange(1, 12))] for _ in range(2))
        whole, pieces = copy_of(output, text=text), Copy(text, 1, 2, is_at_start=True)
        for stop in sorted(rng.randrange(1, len(output) + 2) for _ in range(3)):
            pieces.read([0, *output], max(stop, pieces.num_read))
        pieces.read([0, *output], len(output) + 1)
        assert (whole.at, whole._lost_at, whole._found_at) == (pieces.at, pieces._lost_at, pieces._found_at)


# ------------------------------------------------------------------------------------------------------- in an engine


def engine_with(**members: Any) -> Engine:
    return engine_around(Router({**members, "prediction": PredictionDrafter(Options())}), 8)


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=33, temperature=0.0, **fields)


def plain(prompt: list[int]) -> list[int]:
    engine = engine_with(none=NoDrafter())
    return run(engine, [engine.add(prompt, greedy())])[0]


PROMPT = [5, 9, 2, 44, 17]


def test_a_right_prediction_saves_passes_and_a_wrong_one_changes_nothing() -> None:
    output = plain(PROMPT)
    assert len(set(output)) > 3
    changed = [*output[:10], 60, *output[11:]]
    steps = {}
    for name, text in {"right": output, "changed": changed, "wrong": [60] * 40, "none": None}.items():
        engine = engine_with(lookup=lookup.LookupDrafter(lookup.Options()))
        request = engine.add(PROMPT, greedy(prediction=text))
        assert request.seq.draft == ("lookup" if text is None else "prediction")
        run(engine, [request])
        assert request.seq.output_ids == output
        steps[name] = request.report.num_steps
        assert not engine.drafter.members["prediction"]._texts.by_id
    assert steps["right"] == 4  # 33 tokens, 8 and a bonus a pass
    assert steps["right"] < steps["changed"] <= 9
    assert steps["wrong"] == 33


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, acceptance="match")])
@pytest.mark.parametrize("text", [(0, 1, 2), (2, 2), (1,), (0, 2, 0, 2, 1)])
def test_a_prediction_changes_no_distribution(params: SamplingParams, text: tuple[int, ...]) -> None:
    case = Case("prediction", params)

    def once(way: Branching) -> tuple[tuple[int, ...], int]:
        engine = engine_for(case, lambda seq: way.at(len(seq.tokens)))
        run(engine, [request := engine.add(case.prompt, SamplingParams(**{**vars(params), "prediction": text}))])
        return tuple(request.seq.output_ids), request.report.num_accepted

    ways = enumerate_outcomes(once)
    assert total_variation(summed(ways), plain_outputs(case)) < 1e-12
    assert any(num_accepted for _, (_, num_accepted) in ways)


def test_which_requests_it_serves() -> None:
    text = {"prediction": [1, 2]}
    some = engine_with(lookup=lookup.LookupDrafter(lookup.Options()))
    assert some.add(PROMPT, greedy(**text)).seq.draft == "prediction"
    assert some.add(PROMPT, greedy(draft="lookup", **text)).seq.draft == "lookup"
    assert some.add(PROMPT, greedy(draft="auto", **text)).seq.draft == "lookup"
    assert some.add(PROMPT, greedy(draft="none", **text)).seq.draft == "none"
    assert some.add(PROMPT, greedy(prediction=[])).seq.draft == "lookup"
    assert some.add(PROMPT, greedy(draft="prediction")).seq.draft == "prediction"
    assert engine_with(none=NoDrafter()).add(PROMPT, greedy(**text)).seq.draft == "none"


def test_what_is_refused() -> None:
    engine = engine_with()
    with pytest.raises(BadOption, match="prediction holds the id 61, but the model's ids are 0"):
        engine.add(PROMPT, greedy(prediction=[60, 61]))
    with pytest.raises(BadOption, match="needs a tokenizer: this engine has none; give its token ids"):
        engine.add(PROMPT, greedy(prediction="text"))
    for value in (3, b"ab", {"type": "content"}, [1.5], ["a"], "\ud800"):
        with pytest.raises(BadOption, match=r"prediction=.* is not possible: it must be a text in valid UTF-8 or"):
            greedy(prediction=value)
    with pytest.raises(BadOption, match=r"prediction=.*: it must be a text, or ids in 0"):
        greedy(prediction=[-1])


def test_each_request_has_its_own() -> None:
    """Two requests of one batch, and the outputs of one prompt: a prediction is of the request that brought it."""
    engine = engine_with()
    requests = [engine.add(PROMPT, greedy(prediction=text)) for text in (plain(PROMPT), [60] * 40)]
    run(engine, requests)
    assert [r.report.num_accepted > 0 for r in requests] == [True, False]
    both = engine.make(PROMPT, SamplingParams(max_tokens=4, n=2, prediction=[1, 2, 3]))
    assert [r.seq.prediction_ids for r in both] == [(1, 2, 3)] * 2


def test_it_is_always_there(llm: LLM) -> None:
    """A text is encoded without special tokens, and reaches the drafter."""
    text = llm.generate("def f(x):", SamplingParams(max_tokens=24, temperature=0.0))[0].text
    (out,) = llm.generate("def f(x):", SamplingParams(max_tokens=24, temperature=0.0, prediction=text))
    assert out.text == text
    assert out.report.num_accepted > 10
    (request,) = llm.submit("def f(x):", SamplingParams(max_tokens=1, prediction=text))
    assert list(request.seq.prediction_ids) == llm.tokenizer.encode(text, add_special_tokens=False)
    assert request.seq.draft == "prediction"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("shipped", draft="lookup", spec_length=8, pacing="fixed", max_batch_size=2, max_seq_len=128)
