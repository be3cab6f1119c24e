"""Wrong decoders that the enumeration must catch (docs/exactness.md), each a small change of the real code.

A proof is worth something only if it can fail. The numbers m1 ... m17 are fixed names. A test in which a mutant is not
caught any more shows that the enumeration has become blind to it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from forerun import sampling
from forerun.drafters import model as model_drafter
from forerun.errors import InternalError
from forerun.sampling.random import PhiloxCoins
from forerun.testing import MUTANTS, SECOND_DRAW, Branching
from forerun.types import Probs, SamplingParams
from forerun.verify import match, ratio
from house.enumeration import HORIZON, TARGET, Case, engine_for, plain_outputs, resembling, spoken, total_variation

CAUGHT = 1e-6
EXACT = 1e-12


def case(rule: str = "ratio", **options) -> Case:
    return Case("model", SamplingParams(max_tokens=HORIZON, acceptance=rule, **options))


def error(of: Case, wrap=lambda coins: coins) -> float:
    """Return the total variation between the outputs of the engine and those of plain decoding."""
    return total_variation(spoken(of, wrap), plain_outputs(of))


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.needs == "chain"], ids=lambda m: m.name)
def test_wrong_rules_in_the_engine(monkeypatch, mutant):
    """The draft model draws from all ids, of which the target's top-k forbids one."""
    wider = dataclasses.replace(case(top_k=2), options={"draft_top_k": 0})
    monkeypatch.setattr(ratio, "rule", mutant.apply(ratio.rule))
    assert error(wider) > CAUGHT


def test_m4_residual_without_the_clamp(monkeypatch):
    """A rule that does not clamp the residual gets an error, because no token is drawn from negative weights."""
    monkeypatch.setattr(ratio, "residual", lambda p, q: Probs(dense=p.dense - q.dense))
    with pytest.raises(InternalError, match="negative"):
        error(case())


def test_m5_a_second_draw_after_a_mismatch(monkeypatch):
    assert error(case("match")) < EXACT
    monkeypatch.setattr(match, "rule", SECOND_DRAW.apply(match.rule))
    assert error(case("match")) > CAUGHT


class ArgmaxCoins:
    """Coins that draw the argmax, but decide acceptance correctly."""

    def __init__(self, coins: Branching) -> None:
        self.accept = coins.accept

    def draw(self, probs: Probs, depth: int, lane: int = 0) -> int:
        return int(probs.dense.argmax()) if probs.point is None else probs.point

    draft = pick = draw


def test_m10_greedy_by_the_ratio_of_softmaxes(monkeypatch):
    """Found in the wild (docs/exactness.md): T = 0 as argmax draws, judged by soft vectors."""
    right = sampling.probs

    def soft(logits, params, history, *rest):
        return right(logits, dataclasses.replace(params, temperature=1.0), history)

    greedy = case(temperature=0.0)
    assert error(greedy, ArgmaxCoins) < EXACT, "with point masses no draw is ever random"
    monkeypatch.setattr(sampling, "probs", soft)
    monkeypatch.setattr(model_drafter, "probs", soft)
    assert error(greedy, ArgmaxCoins) > CAUGHT


class Reused(Branching):
    """Coins without the round number: the uniform of a purpose, a position and a lane is one number in all rounds.

    What earlier rounds saw of a uniform leaves an interval for it, and each use cuts that interval.
    """

    def __init__(self, coins: Branching) -> None:
        super().__init__(coins._way, coins._position)
        self._left: dict[tuple[str, int, int], tuple[float, float]] = coins._way.__dict__.setdefault("left", {})

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        return prob >= 1 or (prob > 0 and self._cut("accept", depth, lane, np.array([prob, 1 - prob])) == 0)

    def _draw(self, probs: Probs, purpose: str, depth: int, lane: int) -> int:
        return probs.point if probs.point is not None else self._cut(purpose, depth, lane, probs.dense.numpy())

    def _cut(self, purpose: str, depth: int, lane: int, weights: np.ndarray) -> int:
        """Which of these shares the uniform falls into; all that it can be are taken in turn."""
        key = (purpose, self._position + depth, lane)
        low, high = self._left.get(key, (0.0, 1.0))
        ends = np.append(0.0, weights.cumsum() / weights.sum())
        cuts = ends.clip(low, high)
        i = self._branch(np.diff(cuts), rounding=1e-14)
        self._left[key] = (float(cuts[i]), float(cuts[i + 1]))
        return i


@pytest.mark.parametrize("rule", ["block", "traversal", "ratio"])
def test_m13_noise_reused_by_rules_that_look_ahead(rule):
    """block and traversal look at coins of positions that they discard, which are drafted again in the next round.

    So the round number belongs into the counter (forerun.sampling.random). ratio looks at none that it discards.
    """
    long = dataclasses.replace(case(rule), gamma=3)
    assert error(long) < EXACT
    assert error(long, Reused) < EXACT if rule == "ratio" else error(long, Reused) > CAUGHT


@pytest.mark.parametrize("rule", ["ratio", "match", "block"])
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
    """Count rows of both caches that differ from those of the committed tokens, over one generation (docs/journey.md).

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
    """Count the wrong ones among the kept rows before the last committed token."""
    held = min(cache.length(slot), len(tokens) - 1)
    rows = cache.rows(slot, 0, held)
    right_ids = cache.keys[0][rows, 0, 0] == torch.tensor(tokens[:held])
    right_positions = cache.values[0][rows, 0, 0] == torch.arange(held)
    return int((~(right_ids & right_positions)).sum())


def test_the_caches_are_those_of_the_committed_tokens():
    assert cache_errors(perfect_draft()) == 0


def test_m17_stale_draft_cache_after_full_acceptance(monkeypatch):
    """The output stays exact and only acceptance falls, so that only the cache shows this mutant.

    The mutant counts the last drafted token as fed, which it was not, and then reads an old row of the cache.
    """
    right = model_drafter.ModelDrafter._forget_rejected

    def extend_upward(self, seq):
        fed, cache = self._fed[seq.id], self.runner.cache
        if fed.tokens and len(fed.tokens) == len(seq.tokens) - 2:
            cache.reserve(seq.id, 1)
            cache.keep({seq.id: [0]})
            fed.tokens.append(seq.tokens[-2])
        right(self, seq)

    monkeypatch.setattr(model_drafter.ModelDrafter, "_forget_rejected", extend_upward)
    assert cache_errors(perfect_draft()) > 0
    assert error(dataclasses.replace(perfect_draft(), params=case().params)) < EXACT
