"""Beam search with and without drafts against target-only beam search, written here a second time on tables."""

import itertools
import math
from collections.abc import Iterator, Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine.load import check, run, take_steps
from forerun import BadOption, SamplingParams
from forerun.drafters import Drafter
from forerun.drafters.lookup import LookupDrafter, Options
from forerun.drafters.model import Options as Draws
from forerun.drafters.shared.model_drafter import ModelDrafter
from forerun.engine.beams import BeamSearch, SearchRequest
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.router import Router
from forerun.kv import Held
from forerun.kv.cache import BlockCache
from forerun.models.branches import Branches
from forerun.models.runner import Runner
from forerun.models.toy import ToyModel, ToyTable
from forerun.pacing.fixed import FixedPacing
from forerun.sampling import arithmetic
from forerun.verify import beams
from refusals import refusal

pytestmark = pytest.mark.once("beam searches choose their drafters and levels themselves")

V, LENGTH, END = 5, 6, 0


class Reversed(ToyModel):
    """The adversarial draft model: it ranks tokens as the target does, from the last to the first."""

    def _make(self, context: tuple[int, ...]) -> np.ndarray:
        logits = self.near.logits_after(context)
        return np.where(np.isinf(logits), logits, -logits)


def target(seed: int, **table: Any) -> ToyModel:
    return ToyModel(V, seed, ToyTable(**table))


def drafts_of(model: ToyModel) -> dict[str, ToyModel]:
    """A good, a bad and an adversarial draft model."""
    return {
        "good": ToyModel(V, 50, ToyTable(distance=0.3), near=model),
        "bad": ToyModel(V, 51),
        "reversed": Reversed(V, 52, near=model),
    }


def runner_of(model: ToyModel, num_tokens: int | None, backend: str = "paged") -> Runner:
    return Runner(model, BlockCache.of(model, backend, max_batch_size=24, max_seq_len=64, num_tokens=num_tokens))


def engine_of(model: ToyModel, num_tokens: int | None = None, backend: str = "paged", **options: Any) -> Engine:
    drafters: dict[str, Drafter] = {
        name: ModelDrafter(runner_of(draft, num_tokens, backend)) for name, draft in drafts_of(model).items()
    }
    router = Router({**drafters, "lookup": LookupDrafter(Options())})
    options = {"end_ids": frozenset([END]), "max_seq_len": 64, "max_batch_size": 24, **options}
    return Engine(runner_of(model, num_tokens, backend), router, FixedPacing(2), **options)


# ------------------------------------------------------------------------------------------------ the search once more


class Found(NamedTuple):
    penalised: float
    score: float
    tokens: tuple[int, ...]


def searched(model: ToyModel, prompt: Seq[int], params: SamplingParams, end: int | None = END) -> list[Found]:
    """All texts of the pool of a beam search by the target alone, best first: every candidate is made and sorted."""
    width, most, penalty = params.num_beams, params.max_tokens or 0, params.length_penalty
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[Found] = []
    for length in range(1, most + 1):
        candidates = []
        for place, (score, tokens) in enumerate(live):
            row = model.logits_after([*prompt, *tokens])
            log_mass = float(row.max()) + float(arithmetic.log(arithmetic.mass_of_logits(row)))
            ids = [i for i in range(V) if row[i] > -np.inf and not (i == end and length <= params.min_tokens)]
            candidates += [(-(score + (float(row[i]) - log_mass)), place, i, tokens) for i in ids]
        candidates.sort()
        is_end = [c[2] == end or length == most for c in candidates]
        ended = [(-c[0], (*c[3], c[2])) for c, over in list(zip(candidates, is_end, strict=True))[:width] if over]
        pool += [Found(score / length**penalty, score, tokens) for score, tokens in ended]
        pool = sorted(pool, key=lambda found: -found.penalised)[:width]
        live = [(-c[0], (*c[3], c[2])) for c, over in zip(candidates, is_end, strict=True) if not over][:width]
        if not live:
            break
        if len(pool) == width:
            reach = most if params.early_stopping == "never" and penalty > 0 else length
            if params.early_stopping is True or live[0][0] / reach**penalty <= pool[-1].penalised:
                break
    return pool


def search(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": LENGTH, "num_beams": 3, **given})


def assert_found(outputs: Seq[Request], expected: Seq[Found]) -> None:
    """Tokens, order and scores of the outputs are those of the search, to the last bit."""
    for request, found in zip(outputs, [*expected, *[None] * len(outputs)], strict=False):
        output = request.output()
        if found is None:
            assert (output.finish_reason, output.token_ids, output.score) == ("abort", [], None)
        else:
            assert tuple(output.token_ids) == found.tokens
            assert (output.score, output.cumulative_logprob) == (found.penalised, found.score)
            assert output.finish_reason == ("stop" if found.tokens[-1] == END else "length")
            assert len(request.seq.origins) == len(found.tokens)


PENALTIES, STOPPINGS = (0.0, 0.7, 1.0, 2.0), (True, False, "never")


def configurations() -> Iterator[dict[str, Any]]:
    """The options of 1,080 searches."""
    names = ("draft", "num_beams", "spec_length", "draft_beams", "length_penalty", "early_stopping")
    for draft, width, levels in itertools.product(("good", "bad", "reversed"), (1, 2, 3), (1, 3)):
        for more in itertools.product(range(width, 3 * width + 1), PENALTIES, STOPPINGS):
            yield {**dict(zip(names, (draft, width, levels, *more), strict=True)), "n": width}


TABLES = {"plain": {}, "ties": {"tie_step": 0.5}, "excluded": {"zero_share": 0.3}, "peaked": {"scale": 3.0}}


def test_1080_configurations_find_what_the_target_alone_finds() -> None:
    """In one batch of many searches each; the adversarial drafter is worst, and no search takes less than a step."""
    steps: dict[str, list[int]] = {"good": [0, 0], "bad": [0, 0], "reversed": [0, 0]}
    wanted = list(configurations())
    assert len(wanted) == 1080
    for number, (table, part) in enumerate(zip(TABLES.values(), np.array_split(np.arange(1080), 4), strict=True)):
        model = target(number, **table)
        engine = engine_of(model)
        free = engine.scheduler.free_kv_tokens
        added = []
        for i in part:
            prompt, params = [1 + int(i) % 4, int(i) % 5, 2], search(**wanted[int(i)])
            added.append((prompt, params, engine.add_all(prompt, params)))
        run(engine, [request for _, _, outputs in added for request in outputs])
        for prompt, params, outputs in added:
            assert_found(outputs, searched(model, prompt, params))
            report = outputs[0].report
            assert report.num_emitted >= report.num_steps, "a step in every pass"
            count = steps[params.draft or ""]
            count[0] += report.num_emitted
            count[1] += report.num_steps
        assert engine.scheduler.free_kv_tokens == free
    means = {draft: emitted / passes for draft, (emitted, passes) in steps.items()}
    assert means["good"] > means["bad"] > means["reversed"] > 1, means


# -------------------------------------------------------------------------------------------------- beside one another

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True)


def mixture() -> list[tuple[list[int], SamplingParams]]:
    """Searches of all kinds, and requests that are none."""
    made: list[tuple[list[int], SamplingParams]] = []
    for i, draft in enumerate(("good", "none", "lookup", "bad", "reversed", "good")):
        prompt = [1, 2, 3, 1, 2] + [i % V] * (1 + 7 * (i % 3))
        options = {"num_beams": 2 + i % 3, "n": 1 + i % 2, "spec_length": 1 + i % 3, "priority": i % 2}
        made.append((prompt, search(draft=draft, max_tokens=25, **options)))
        made.append(([2, 1, i % V], [GREEDY, DRAWN][i % 2]))
    return made


def answers(engine: Engine, wanted: Seq[tuple[list[int], SamplingParams]]) -> list[list[list[int]]]:
    """Of requests in one batch, whose caches are sound behind each step, and empty at the end."""
    free = engine.scheduler.free_kv_tokens
    requests = [engine.add_all(prompt, params) for prompt, params in wanted]
    run(engine, [request for outputs in requests for request in outputs])
    assert engine.scheduler.free_kv_tokens == free
    assert not engine.scheduler.running
    return [[request.seq.output_ids for request in outputs] for outputs in requests]


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
def test_searches_and_other_requests_in_one_batch_are_what_they_are_alone(backend: str) -> None:
    model = target(7)
    alone = [answers(engine_of(model), [one])[0] for one in mixture()]
    for (prompt, params), texts in zip(mixture(), alone, strict=True):
        if params.searches:
            assert texts == [list(found.tokens) for found in searched(model, prompt, params)[: params.n]]
    assert answers(engine_of(model, backend=backend, max_batch_size=16), mixture()) == alone


def test_what_was_preempted_goes_on_where_it_was() -> None:
    """A cache of a few blocks, for more than fits into it; and now and then the last in rank loses its place."""
    model = target(7)
    alone = [answers(engine_of(model), [one])[0] for one in mixture()]
    engine = engine_of(model, num_tokens=16 * 8, max_num_batched_tokens=24, prefill_chunk_tokens=8)
    scheduler, free = engine.scheduler, engine.scheduler.free_kv_tokens
    requests = [engine.add_all(prompt, params) for prompt, params in mixture()]
    lost: set[bool] = set()
    for step in itertools.count(1):
        if all(request.seq.finish_reason is not None for outputs in requests for request in outputs):
            break
        engine.step()
        check(engine)
        if step % 4 == 0 and scheduler.running:
            lost.add(isinstance(scheduler.running[-1], SearchRequest))
            scheduler._preempt(scheduler.running[-1])
    assert [[request.seq.output_ids for request in outputs] for outputs in requests] == alone
    assert lost == {True, False}
    assert scheduler.num_preemptions > 10
    assert scheduler.free_kv_tokens == free


def test_a_lost_tree_is_fed_in_parts() -> None:
    """Without room for more, a pass feeds as many nodes as there are beams; a step is taken when all are there."""
    model, params = target(5), search(n=3, max_tokens=20, draft="none", ignore_eos=True)
    engine = engine_of(model)
    outputs = engine.add_all([1, 2, 3], params)
    take_steps(engine, 6)
    (searcher,) = engine.scheduler.running
    assert len(searcher.search.tree.live()) > 4, "the beams have little in common"  # type: ignore[union-attr]
    engine.scheduler._preempt(searcher)
    rows: list[tuple[int, int]] = []
    engine.listen(lambda report: rows.append((report.num_rows - report.num_prefill_tokens, report.num_emitted)))
    run(engine, outputs)
    expected = searched(model, [1, 2, 3], params, end=None)
    assert [request.seq.output_ids for request in outputs] == [list(found.tokens) for found in expected]
    fed = [pair for pair in rows if pair[0]]
    assert fed[0] == (3, 0), "too few rows for a step"
    assert all(num_rows <= 3 for num_rows, _ in fed)
    assert outputs[0].report.num_emitted == 20


def test_an_ended_search_gives_everything_back() -> None:
    engine = engine_of(target(3))
    free = engine.scheduler.free_kv_tokens
    first = engine.add_all([1, 2, 3], search(n=3, max_tokens=30, draft="good", ignore_eos=True))
    other = engine.add([1, 2, 3], GREEDY)
    take_steps(engine, 5)
    engine.abort(first[1])
    assert len(engine.scheduler.running) == 2, "two outputs are still waited for"
    engine.abort(first[0])
    engine.abort(first[2])
    assert [request.seq for request in engine.scheduler.running] == [other.seq]
    run(engine, [other])
    assert [request.output().finish_reason for request in first] == ["abort"] * 3
    assert engine.scheduler.free_kv_tokens == free


def test_no_draft_is_one_step_in_each_pass_and_rows_are_counted() -> None:
    engine = engine_of(target(4), end_ids=frozenset())
    plain, drafted = (engine.add_all([1, 2], search(max_tokens=20, draft=draft))[0] for draft in ("none", "good"))
    run(engine, [plain, drafted])
    assert plain.report.mean_accepted_length == 1
    assert plain.report.num_rows == 1 + 3 * 19, "the prompt's last token, then three beams"
    report = drafted.report
    assert 1.3 < report.mean_accepted_length <= 3
    assert 3 < report.rows_per_pass <= 3 + 2 * 3
    assert report.num_accepted == report.num_emitted - report.num_steps
    assert plain.output().token_ids == drafted.output().token_ids


def test_rules_of_a_text_hold_for_every_beam() -> None:
    """min_tokens here; the repetition penalty and biases are compared with transformers (models/test_beams.py)."""
    model = target(11)
    engine = engine_of(model)
    for draft in ("none", "good", "reversed"):
        params = search(n=3, min_tokens=4, max_tokens=9, draft=draft, length_penalty=-1.0)
        outputs = engine.add_all([3, 1], params)
        run(engine, outputs)
        assert_found(outputs, searched(model, [3, 1], params))
        assert min(len(request.seq.output_ids) for request in outputs) == 5
        penalised = search(n=3, repetition_penalty=1.5, presence_penalty=0.5, max_tokens=9, draft=draft)
        outputs = engine.add_all([3, 1], penalised)
        run(engine, outputs)
        if draft == "none":
            plain = [request.output().token_ids for request in outputs]
        assert [request.output().token_ids for request in outputs] == plain


def test_fewer_texts_than_beams() -> None:
    """Where masks leave one token, there is one text; the output that has none is aborted, and says so."""
    engine = engine_of(target(2))
    outputs = engine.add_all([1], search(n=2, logit_bias={token: -math.inf for token in range(V) if token != END}))
    run(engine, outputs)
    assert [(o.output().token_ids, o.output().finish_reason) for o in outputs] == [([END], "stop"), ([], "abort")]
    nothing = engine.add_all([1], search(n=2, logit_bias=dict.fromkeys(range(V), -math.inf)))
    beside = engine.add([1], GREEDY)
    run(engine, [*nothing, beside])
    assert all("no token is left" in str(request.error) for request in nothing)
    assert len(beside.seq.output_ids) == 30


def test_a_step_that_fails_for_another_request_is_taken_again() -> None:
    """A request that may emit nothing ends the step; the searches beside it go on as if it had not been."""
    model = target(9)
    engine = engine_of(model)
    params = search(n=3, max_tokens=12, ignore_eos=True, draft="good")
    outputs = engine.add_all([1, 2, 3], params)
    nothing = SamplingParams(temperature=0.0, max_tokens=9, logit_bias=dict.fromkeys(range(V), -math.inf))
    failing = [engine.add([2, i], nothing) for i in range(3)]
    run(engine, [*outputs, *failing])
    assert all(request.error is not None for request in failing)
    assert [(request.seq.output_ids, request.score) for request in outputs] == [
        (list(found.tokens), found.penalised) for found in searched(model, [1, 2, 3], params, end=None)
    ]
    assert all(len(request.seq.origins) == 12 for request in outputs)


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams=2 is not possible where tokens are drawn": {"temperature": 1.0},
    "n=3 is not possible: it must be at most num_beams=2": {"n": 3},
    "draft_beams=1 is not possible: it must be at least num_beams=2": {"draft_beams": 1},
    "logprobs=1 is not possible with num_beams=2": {"logprobs": 1},
    "acceptance='match' is not possible with num_beams=2": {"acceptance": "match"},
    "prediction='x' is not possible with num_beams=2": {"prediction": "x"},
    "length_penalty=17.0 is not possible: it must be in": {"length_penalty": 17},
    "early_stopping='always' is not possible: it must be True, False or 'never'": {"early_stopping": "always"},
    "length_penalty=2.0 belongs to a beam search": {"num_beams": 1, "length_penalty": 2},
    "early_stopping=True belongs to a beam search": {"num_beams": 1, "early_stopping": True},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_does_not_go_together_is_refused_in_a_sentence(sentence: str) -> None:
    assert refusal(BadOption, search, **{"num_beams": 2, **REFUSED[sentence]}).startswith(sentence)


def test_options_of_draws_say_nothing_to_a_search_and_the_drafter_goes_on() -> None:
    model = target(1)
    drafter = ModelDrafter(runner_of(drafts_of(model)["good"], None), Draws(draft_temperature=0.5, draft_top_k=2))
    router = Router({"model": drafter})
    engine = Engine(runner_of(model, None), router, FixedPacing(2), end_ids=frozenset([END]), max_seq_len=64)
    outputs = engine.add_all([1, 2, 3], search(n=3))
    run(engine, outputs)
    assert_found(outputs, searched(model, [1, 2, 3], search(n=3)))
    run(engine, [sampled := engine.add([1, 2, 3], SamplingParams(max_tokens=8, seed=1, ignore_eos=True))])
    assert min(outputs[0].report.num_drafted, sampled.report.num_drafted) > 0


def test_a_drafter_that_knows_one_text_is_refused() -> None:
    model = target(1)
    router = Router({"own": Drafter(), "lookup": LookupDrafter(Options())})
    engine = Engine(runner_of(model, None), router, FixedPacing(2))
    sentence = "draft='own' cannot draft for the beams of num_beams=3: ask for draft='lookup'"
    assert sentence in refusal(BadOption, engine.add, [1], search())
    with pytest.raises(BadOption, match="num_beams=3 is more than max_num_batched_tokens=2"):
        engine_of(model, max_batch_size=2, max_num_batched_tokens=2).add([1], search())
    assert "may grow to" in refusal(Exception, engine_of(model, num_tokens=32).add, [1], search(max_tokens=20))


# ------------------------------------------------------------------------------------------------------------- mutants


def _no_subset_check(before: beams.Search, scored: Any) -> Any:
    """Goes on with the live texts that happen to be scored."""
    after, num_steps = REPLAYED(before, scored)
    while not after.is_over and any(nexts := [scored(tip) for tip in after.tips]):
        after._step([known or (lambda num: ((), ())) for known in nexts])
        num_steps += 1
    return after, num_steps


def _wrong_parent(*given: Any, **named: Any) -> Any:
    live, ended = STEP(*given, **named)
    return [made._replace(beam=(made.beam + 1) % len(given[0])) for made in live], ended


def _any_rank_ends(scores: Any, nexts: Any, width: int, ends: Any, num: int, is_last: bool = False) -> Any:
    live, _ = STEP(scores, nexts, width, ends, num, is_last)
    candidates = itertools.islice(beams.best_first(scores, nexts, num), 3 * width)
    ended = [made for made in candidates if is_last or ends(made.beam, made.token)]
    return live, ended[: width if is_last else None]


def _draft_scores(search_: BeamSearch, nexts: Any) -> None:
    GROW(search_, nexts)
    search_.__dict__.setdefault("drafted", {}).update(zip(search_._level, search_._scores, strict=True))


def _scored_by_the_draft(search_: BeamSearch, *given: Any) -> Any:
    def took(after: beams.Search, nexts: Any) -> None:
        TOOK(after, nexts)
        drafted = search_.__dict__.get("drafted", {})
        after.scores = [drafted.get(tip, own) for tip, own in zip(after.tips, after.scores, strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beams.Search, "_step", took)
        return RULE(search_, *given)


def _lost_ancestors(branches: Branches, tree: Any) -> Any:
    kept, held = SETTLE(branches, tree)
    return kept, Held(held.rows, [min(parent, 0) for parent in held.parents])


STEP, GROW, RULE, SETTLE = beams.step, BeamSearch.grow, BeamSearch.rule, Branches.settle
TOOK, REPLAYED = beams.Search._step, beams.Search.replayed
MUTANTS: dict[str, list[tuple[Any, str, Any]]] = {
    "no subset check": [(beams.Search, "replayed", _no_subset_check)],
    "wrong parent on replay": [(beams, "step", _wrong_parent)],
    "the pool is not compared": [(beams.Pool, "is_final", lambda pool, best, length: best is None)],
    "the pool ends the search": [
        (beams.Pool, "is_final", lambda pool, best, length: best is None or len(pool.texts) == pool.rules.num_beams)
    ],
    "scores of the draft": [(BeamSearch, "grow", _draft_scores), (BeamSearch, "rule", _scored_by_the_draft)],
    "texts end at any rank": [(beams, "step", _any_rank_ends)],
    "ancestors are lost": [(Branches, "settle", _lost_ancestors)],
}


def _disagreements() -> int:
    """Of a few dozen searches, how many do not find what the target alone finds."""
    model, num = target(0), 0
    for i, draft in enumerate(("good", "bad", "good", "reversed") * 8):
        width, prompt = 2 + i % 2, [1 + i % 4, i % V, 2]
        options = {"num_beams": width, "draft_beams": 2 * width, "draft": draft, "n": width, "max_tokens": 8}
        params = search(**options, length_penalty=(0.0, 1.0, 2.0)[i % 3], early_stopping=STOPPINGS[i % 3])
        engine = engine_of(model)
        outputs = engine.add_all(prompt, params)
        run(engine, outputs)
        expected = searched(model, prompt, params)
        num += [(tuple(r.seq.output_ids), r.score) for r in outputs] != [(f.tokens, f.penalised) for f in expected]
    return num


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_broken_searches_are_caught(mutant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, broken in MUTANTS.get(mutant or "", []):
        monkeypatch.setattr(owner, name, broken)
    assert (_disagreements() > 0) == (mutant is not None)
