"""Drafters made of drafters: how they are written, who drafts, and what members see."""

import dataclasses
import itertools
from collections.abc import Sequence as Seq
from typing import Any

import pytest

import support
from forerun import LLM, drafters, pacing
from forerun.config import EngineConfig
from forerun.drafters import Drafter
from forerun.drafters.lookup import LookupDrafter, Options
from forerun.drafters.mixed import MixedDrafter
from forerun.drafters.switch import SwitchDrafter
from forerun.engine import fitting
from forerun.engine.engine import Engine
from forerun.engine.opened import SHIPPED_DRAFT, Opened
from forerun.errors import BadOption
from forerun.registry import parse_list, parse_spec, unwrapped
from forerun.sampling.random import PhiloxCoins
from forerun.types import Budget, Coins, Draft, Probs, SamplingParams, Sequence
from house.test_same_as_plain import check_draft_cache, prompts
from refusals import refusal
from support import everyone, random_decoder

GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
GREEDY_PLAIN = SamplingParams(max_tokens=8, temperature=0.0, draft="none")
COINS = PhiloxCoins(0, 0, 0)


# ------------------------------------------------------------------------------------------------------ how to write it


def test_a_spec_holds_specs_in_parentheses() -> None:
    assert parse_spec("a:of=(lookup:max_n=8,min_n=2)+b,n=3") == ("a", {"of": "(lookup:max_n=8,min_n=2)+b", "n": "3"})
    assert parse_spec("a:of=(lookup:max_n=8)") == ("a", {"of": "(lookup:max_n=8)"})
    assert unwrapped("((c:d=(e:f=1)))") == "c:d=(e:f=1)"
    assert unwrapped("(a)+(b)") == "(a)+(b)"
    assert parse_list("(lookup:max_n=8)+b") == ["lookup:max_n=8", "b"]
    assert parse_list("(a:b=c+d)") == ["a:b=c+d"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mixed:of=(lookup", "a parenthesis without its counterpart"),
        ("mixed:of=lookup)", "a parenthesis without its counterpart"),
        ("mixed:of=lookup+", "is no list"),
        ("mixed:of=lookp+model", "did you mean 'lookup'"),
        ("switch:of=(lookup:max=3)+model", "did you mean 'max_n'"),
        ("cascade:of=lookup", "must be a draft model"),
        ("cascade:inner=(mixed:of=nothing)", "there is no drafter 'nothing'"),
        ("datastore:max_match=2,min_match=3", "at most max_match=2"),
        ("datastore:shape=star", "must be path or tree"),
        ("dflash:draws=point", "add shape=tree"),
        ("dflash:shape=tree,draws=independent", "distinct or point"),
        ("dflash:shape=2x1", "dflash:shape='2x1' is not possible"),
        ("hydra:shape=0x2", "hydra:shape='0x2' is not possible"),
        ("ngram:max_n=4,min_n=5", "ngram:min_n=5 is not possible"),
        ("recycle:shape=star", "recycle:shape='star' is not possible: it must be path or tree"),
        ("stand:shape=star", "stand:shape='star' is not possible: it must be path or tree"),
        ("suffix:shape=star", "must be path or tree"),
        ("translated:how=ids", "how='ids' is not possible: it must be tokens or text"),
        ("translated:how=text,draft_temperature=0.5", "leave draft_temperature and draft_top_k out"),
        ("tree:shape=4x0", "as in 4x2x1"),
        ("tree:shape=wide", "as in 4x2x1"),
        ("tree:shape=best_first", "add that"),
        ("tree:shape=sequoia", "belong together"),
        ("tree:draws=all", "distinct, independent or point"),
        ("tree:of=lookup", "must be a draft model"),
        ("unigram:draws=best", "unigram:draws='best' is not possible: it must be point or sampled"),
        ("bigram:draws=best", "bigram:draws='best' is not possible: it must be point or sampled"),
    ],
)
def test_a_wrong_spec_is_refused_at_the_door(spec: str, words: str) -> None:
    assert words in refusal(BadOption, drafters.resolve, spec)
    assert words in refusal(BadOption, Opened.of, EngineConfig.make(target="shipped", extra_drafts=f"lookup;{spec}"))


def test_models_inside_are_planned_for() -> None:
    config = EngineConfig.make(target="shipped", draft="mixed:of=lookup+(cascade:inner=model)")
    assert list(fitting.Outlines.of(Opened.of(config)).models) == ["target", "draft", "draft, model 2"]


def test_models_inside_that_are_made_of_the_target_are_planned_for() -> None:
    spec = "mixed:of=model+(early_exit:layers=2,draft_vocab=100)+self"
    found = fitting.Outlines.of(Opened.of(EngineConfig.make(target="shipped", draft=spec, dtype="float32")))
    assert set(found.models) == {"target", "draft", "draft, model 2", "draft, model 3"}
    assert [found.models[name].is_made for name in ("draft", "draft, model 2", "draft, model 3")] == [False, True, True]


def test_drafters_of_one_engine_share_the_weights_that_they_load_and_round() -> None:
    """Whatever the path is written like, and however they draw; other weights of the same file are others."""
    path = str(SHIPPED_DRAFT)
    same = f"several:of=model+(model:path={path}/.,draft_temperature=0.5)+(self:quantization=int4)"
    options = {"target": "shipped", "max_seq_len": 64, "max_batch_size": 2, "spec_length": 2}
    config = EngineConfig.make(draft=same, extra_drafts=f"cascade;self;model:path={path},quantization=int8", **options)
    plan = fitting.Outlines.of(Opened.of(config)).plan(None)
    llm = LLM.from_config(config)
    members = llm.engine.drafter.members
    first, second, rounded = (
        member.runner for member in everyone(members["several"]) if member is not members["several"]
    )
    assert first is not None
    assert second is not None
    assert rounded is not None
    assert first.model is second.model is members["cascade"].runner.model  # type: ignore[union-attr]
    assert first.cache is not second.cache
    assert rounded.model is members["self"].runner.model  # type: ignore[union-attr]
    assert members["model"].runner.model is not first.model  # type: ignore[union-attr]
    out = llm.generate("def f(", dataclasses.replace(GREEDY_PLAIN, draft=None))
    assert out[0].token_ids == llm.generate("def f(", GREEDY_PLAIN)[0].token_ids

    names = [part.name for part in plan.parts]
    of_drafts = [name for name in names if "draft" in name and name.endswith("weights")]  # 8 bits, the target's in 4
    assert of_drafts == ["draft weights", "extra draft 3 weights", "extra draft 4 weights"]
    assert len([name for name in names if name.endswith("KV cache")]) == 7


# ----------------------------------------------------------------------------------------------------------- who drafts


class Fixed(Drafter):
    """Guesses the same tokens always, from a text that it counts as drafted."""

    draws, is_free = "point", True

    def __init__(self, tokens: Seq[int]) -> None:
        self.tokens, self.num_asked = list(tokens), 0

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        self.num_asked += 1
        chains = [self.tokens[:most] for most in budget.num_tokens]
        return Draft.chains(chains, [[Probs.of_point(token) for token in chain] for chain in chains])


def sequence(tokens: Seq[int]) -> Sequence:
    return Sequence(1, list(tokens), len(tokens), GREEDY, 0, 100)


def test_mixed_asks_in_order_and_only_where_nothing_was_found() -> None:
    nothing, first, second = Fixed([]), Fixed([5]), Fixed([6])
    mixed = MixedDrafter([nothing, first, second])
    seqs: Any = [sequence([1, 2]), sequence([3])]
    assert mixed.propose(seqs, Budget([2, 0], 0), [COINS, COINS]).node_starts == [0, 1, 1]
    assert (nothing.num_asked, first.num_asked, second.num_asked) == (1, 1, 0)
    assert mixed.is_free


def test_lookup_guesses_behind_drafted_tokens_and_keeps_nothing_of_them() -> None:
    lookup, seq = LookupDrafter(Options()), sequence([1, 2, 3, 4, 1, 2])
    assert list(lookup.ahead(seq, [3], 2)) == [4, 1]
    assert list(lookup.ahead(seq, [9], 2)) == []
    assert lookup.propose([seq], Budget([2], 0), [None]).tokens == [3, 4]  # type: ignore[list-item]


def test_the_passes_of_each_model_are_measured() -> None:
    shipped = str(SHIPPED_DRAFT)
    engine = LLM("shipped", draft=f"several:of=model+(model:path={shipped},quantization=int8)", max_seq_len=64).engine
    runners = engine.costs.runners["several"]
    assert len({id(runner) for runner in runners}) == 2
    assert list(runners) == [member.runner for member in engine.drafter.first.members]  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------- cascades


def spoken(draft: str, **options: Any) -> tuple[list[int], Engine, int]:
    """What a request says, its engine before the end, and the passes of the draft model; the rows are invariant."""
    model = random_decoder(1, row_by_row=True)
    drafter = support.drafter_for(draft, model, **options)
    runner, passes = drafter.runner, itertools.count()
    assert runner is not None
    forward = runner.forward
    runner.forward = lambda runs: (next(passes), forward(runs))[1]  # type: ignore[method-assign]
    engine = Engine(support.runner_for(model), drafter, pacing.make("fixed", 6), max_seq_len=256)
    drafted: list[int] = []
    engine.listen(lambda report: drafted.extend(t for round in report.rounds for t in round.tokens), detail=True)
    request = engine.add(prompts()[4], SamplingParams(max_tokens=40, temperature=0.3, seed=5))
    while request.seq.finish_reason is None:
        engine.step()
        if request.seq.finish_reason is None:
            assert len(request.seq.tokens) - check_draft_cache(getattr(drafter, "model", drafter), request.seq) <= 2
    return drafted, engine, next(passes)


def test_with_shared_noise_a_cascade_drafts_what_its_model_drafts_in_fewer_passes() -> None:
    alone, _, many = spoken("model")
    within, _, few = spoken("cascade", inner="lookup")
    assert within == alone
    assert few < many


# ----------------------------------------------------------------------------------------------------------- the switch


def switched(right: Seq[int], members: Seq[Drafter], num_rounds: int) -> list[int]:
    """Serve a text that is known, and return how many nodes each round drafted; a clock that counts its calls."""
    switch, seq = SwitchDrafter(members, 0.02), sequence(right[:1])
    ticks = itertools.count()
    switch.clock = lambda: next(ticks) * 1e-3
    switch.begin(seq)
    drafted = []
    for _ in range(num_rounds):
        draft = switch.propose([seq], Budget([4], 0), [COINS])
        drafted.append(len(draft.tokens))
        for token in draft.tokens:
            if token != right[len(seq.tokens)]:
                break
            seq.tokens.append(token)
        seq.tokens.append(right[len(seq.tokens)])
        switch.observe([seq], [])
    return drafted


def test_switch_takes_a_free_member_that_is_right_and_leaves_one_that_is_wrong() -> None:
    ones = [1] * 400
    assert switched(ones, [Fixed([2] * 4), Fixed([1] * 4)], 40)[-10:] == [4] * 10
    assert switched(ones, [Fixed([2] * 4), Fixed([3] * 4)], 40)[-10:] == [0] * 10, "plain decoding is a choice, too"


def test_a_member_that_costs_something_is_probed_after_pauses_that_double() -> None:
    wrong = Fixed([2] * 4)
    wrong.is_free = False
    probes = [i for i, nodes in enumerate(switched([1] * 400, [wrong], 300)) if nodes][-4:]
    first, second, third = (b - a for a, b in itertools.pairwise(probes))
    assert first < second < third
    assert second == 2 * first
