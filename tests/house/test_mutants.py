"""Wrong decoders that the enumeration must catch (docs/exactness.md), each a small change of the real code.

A certificate is worth what it can refuse. Numbers m1 ... m17 are fixed names; a test that stops failing on its mutant
has gone blind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence as Seq

import pytest
import torch

from forerun import sampling
from forerun.drafters import model as model_drafter
from forerun.errors import InternalError
from forerun.sampling.random import Branching, PhiloxCoins
from forerun.types import Coins, Draft, Probs, SamplingParams, Trial
from forerun.verify import chain, match
from house.enumeration import HORIZON, TARGET, Case, engine_for, plain_law, resembling, spoken, total_variation

CAUGHT = 1e-6
EXACT = 1e-12
Ruling = tuple[list[int], int, list[Trial]]


def case(rule: str = "ratio", **options) -> Case:
    return Case("model", SamplingParams(max_tokens=HORIZON, acceptance=rule, **options))


def error(of: Case, wrap=lambda coins: coins) -> float:
    """Total variation between what the engine says and what it should."""
    return total_variation(spoken(of, wrap), plain_law(of))


def ratio_with(
    accepts: Callable[[float, float], float] = chain.acceptance,
    left: Callable[[Probs, Probs], Probs] = chain.residual,
    bonus: Callable[[Probs, Probs], Probs] = lambda p, q_last: p,
) -> Callable[[Draft, int, Seq[Probs], Coins], Ruling]:
    """chain.rule with three holes."""

    def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins) -> Ruling:
        path: list[int] = []
        for depth, node in enumerate(draft.nodes(b)):
            p, q, token = target_probs[depth], draft.probs[node], draft.tokens[node]
            if not coins.accept(accepts(p.at(token), q.at(token)), depth):
                return path, coins.draw(left(p, q), depth), []
            path.append(node)
        last = draft.probs[draft.nodes(b)[-1]]
        return path, coins.draw(bonus(target_probs[len(path)], last), len(path)), []

    return rule


def changing(change: Callable[[Draft, Seq[Probs]], tuple[Draft, Seq[Probs]]]):
    """chain.rule on a draft or laws that were tampered with."""
    right = chain.rule

    def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins) -> Ruling:
        draft, target_probs = change(draft, target_probs)
        return right(draft, b, target_probs, coins)

    return rule


def flatter(law: Probs) -> Probs:
    """The same ids at another temperature."""
    assert law.dense is not None
    return Probs(dense=law.dense.sqrt() / law.dense.sqrt().sum())


def without_unlikely(draft: Draft, laws: Seq[Probs]) -> tuple[Draft, Seq[Probs]]:
    """Cut a chain of one sequence before the first drawn token whose probability is low."""
    n = next((i for i, t in enumerate(draft.tokens) if draft.probs[i].at(t) < 0.4), len(draft.tokens))
    return Draft(draft.tokens[:n], draft.parents[:n], [0, n], draft.probs[:n]), laws


MUTANTS = {
    "m1 correction drawn from p": ratio_with(left=lambda p, q: p),
    "m2 bonus drawn from q": ratio_with(bonus=lambda p, q_last: q_last),
    "m3 accepted iff p >= q": ratio_with(accepts=lambda p, q: float(p >= q)),
    "m4 residual folded, not clamped": ratio_with(left=lambda p, q: Probs(dense=(p.dense - q.dense).abs())),
    "m6 unlikely draws dropped": changing(without_unlikely),
    "m11 rows of p shifted by one": changing(lambda draft, laws: (draft, [*list(laws)[1:], laws[len(laws) - 1]])),
    "m12 q at another temperature": changing(
        lambda draft, laws: (dataclasses.replace(draft, probs=[flatter(q) for q in draft.probs]), laws)
    ),
}


def test_the_hollow_rule_without_a_mutation_is_right(monkeypatch):
    monkeypatch.setattr(chain, "rule", ratio_with())
    assert error(case()) < EXACT


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_ratio_rules(monkeypatch, mutant):
    monkeypatch.setattr(chain, "rule", MUTANTS[mutant])
    assert error(case()) > CAUGHT


def test_m4_residual_without_the_clamp(monkeypatch):
    """Negative probabilities are not drawn from: whoever forgets the clamp gets an error, not a wrong law."""
    monkeypatch.setattr(chain, "rule", ratio_with(left=lambda p, q: Probs(dense=p.dense - q.dense)))
    with pytest.raises(InternalError, match="negative"):
        error(case())


def test_m5_a_second_draw_after_a_mismatch(monkeypatch):
    def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins) -> Ruling:
        path, token, trials = right(draft, b, target_probs, coins)
        return path, token if trials[-1].accepted else coins.draw(target_probs[len(path)], len(path)), trials

    right = match.rule
    assert error(case("match")) < EXACT
    monkeypatch.setattr(match, "rule", rule)
    assert error(case("match")) > CAUGHT


class ArgmaxCoins:
    """Draws that are argmaxes, on top of honest acceptance coins."""

    def __init__(self, coins: Branching) -> None:
        self.accept = coins.accept

    def draw(self, probs: Probs, depth: int) -> int:
        return int(probs.dense.argmax()) if probs.point is None else probs.point

    draft = pick = draw


def test_m10_greedy_by_the_ratio_of_softmaxes(monkeypatch):
    """Found in the wild (docs/exactness.md): T = 0 as argmax draws, judged by soft vectors."""
    right = sampling.probs

    def soft(logits, params, history):
        return right(logits, dataclasses.replace(params, temperature=1.0), history)

    greedy = case(temperature=0.0)
    assert error(greedy, ArgmaxCoins) < EXACT, "with point masses no draw is ever random"
    monkeypatch.setattr(sampling, "probs", soft)
    monkeypatch.setattr(model_drafter, "probs", soft)
    assert error(greedy, ArgmaxCoins) > CAUGHT


@pytest.mark.parametrize("rule", ["ratio", "match"])
@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_m16_penalties_frozen_at_the_round(monkeypatch, penalty, rule):
    penalized = dataclasses.replace(case(rule, **{penalty: 1.5}), prompt=(0, 1, 0))
    right = sampling.History.of
    assert error(penalized) < EXACT
    monkeypatch.setattr(sampling.History, "of", staticmethod(lambda seq, drafted=(): right(seq)))
    assert error(penalized) > CAUGHT


# ------------------------------------------------------------------------------------------- m17: only the cache knows


def perfect_draft() -> Case:
    """A draft model equal to its target, so that full acceptance happens."""
    return dataclasses.replace(case(), near=resembling(TARGET, distance=0.0), params=SamplingParams(max_tokens=12))


def cache_errors(of: Case) -> int:
    """Rows of both caches that differ from those of the committed tokens, over one generation (docs/journey.md).

    The toy keeps ids and positions in its cache, so a rebuilt cache is the token list itself.
    """
    engine = engine_for(of, lambda seq: PhiloxCoins(seq.seed, len(seq.tokens), seq.round))
    request = engine.add(of.prompt, dataclasses.replace(of.params, seed=3, acceptance="ratio"))
    errors = 0
    while request.seq.finish_reason is None:
        engine.step()
        for runner in (engine.runner, engine.drafter.first.runner):
            if request.seq.finish_reason is None:
                errors += wrong_rows(runner.cache, request.seq.id, request.seq.tokens)
    return errors


def wrong_rows(cache, slot: int, tokens: list[int]) -> int:
    """What must be right are the rows that are kept, and of those the ones before the pending token."""
    held = min(cache.length(slot), len(tokens) - 1)
    rows = cache.rows(slot, 0, held)
    right_ids = cache.keys[0][rows, 0, 0] == torch.tensor(tokens[:held])
    right_positions = cache.values[0][rows, 0, 0] == torch.arange(held)
    return int((~(right_ids & right_positions)).sum())


def test_the_caches_are_those_of_the_committed_tokens():
    assert cache_errors(perfect_draft()) == 0


def test_m17_stale_draft_cache_after_full_acceptance(monkeypatch):
    """The law stays exact, only acceptance would fall: nothing but the cache shows it.

    The mutant takes the last drafted token as fed, which it never was, and reads whatever the row held.
    """
    right = model_drafter.ModelDrafter._forget_rejected

    def extend_upward(self, seq):
        fed, cache = self._fed[seq.id], self.runner.cache
        if fed.tokens and len(fed.tokens) == len(seq.tokens) - 2:
            cache.reserve(seq.id, 1)
            cache.keep(seq.id, [0])
            fed.tokens.append(seq.tokens[-2])
        right(self, seq)

    monkeypatch.setattr(model_drafter.ModelDrafter, "_forget_rejected", extend_upward)
    assert cache_errors(perfect_draft()) > 0
    assert error(dataclasses.replace(perfect_draft(), params=case().params)) < EXACT
