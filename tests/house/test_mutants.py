"""Wrong decoders that the enumeration must catch (docs/exactness.md), each a small change of the real code.

A proof is worth something only if it can fail. The numbers m1 ... m19 are fixed names (forerun.testing.wrong). A test
in which a mutant is not caught any more shows that the enumeration has become blind to it.
"""

import dataclasses

import pytest

from forerun import sampling
from forerun.drafters.shared import model_drafter
from forerun.errors import BadOption, InternalError
from forerun.testing import Branching
from forerun.testing.coins import Reused
from forerun.testing.engines import HORIZON, error
from forerun.testing.wrong import CAUGHT, EXACT, PERFECT, WRONG, cache_errors, find, replaced
from forerun.types import Probs, SamplingParams
from forerun.verify import ratio
from house.enumeration import Case
from refusals import refusal


def case(rule: str = "ratio", **options) -> Case:
    return Case("model", SamplingParams(max_tokens=HORIZON, acceptance=rule, **options))


def test_the_list_is_whole():
    assert list(WRONG) == [f"m{i}" for i in range(1, 20)]
    assert "no mutant 'm20'" in refusal(BadOption, find, "m20")


@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_version_is_caught_and_the_right_one_is_not(name):
    wrong = WRONG[name]
    assert wrong.error(is_in=False) < EXACT
    with wrong.switched_in():
        assert wrong.error() > CAUGHT


def test_a_mutant_is_gone_behind_its_block():
    m3 = WRONG["m3"]
    with m3.switched_in():
        pass
    assert m3.error(is_in=False) < EXACT


def test_what_is_replaced_comes_back_when_the_block_fails():
    before = ratio.rule
    with pytest.raises(ValueError, match="out of order"), replaced((ratio, "rule", None)):
        raise ValueError("out of order")
    assert ratio.rule is before


def test_m4_residual_without_the_clamp(monkeypatch):
    """A rule that does not clamp the residual gets an error, because no token is drawn from negative weights."""
    monkeypatch.setattr(ratio, "residual", lambda p, q: Probs(dense=p.dense - q.dense))
    assert "negative" in refusal(InternalError, error, case())


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


@pytest.mark.parametrize("rule", ["traversal", "ratio"])
def test_m13_noise_reused_by_rules_that_look_ahead(rule):
    """block and traversal look at coins of positions that they discard, which are drafted again in the next round.

    So the round number belongs into the counter (forerun.sampling.random). ratio looks at none that it discards.
    """
    long = dataclasses.replace(case(rule), gamma=3)
    assert error(long, Reused) < EXACT if rule == "ratio" else error(long, Reused) > CAUGHT


@pytest.mark.parametrize("rule", ["ratio", "match", "block"])
@pytest.mark.parametrize("penalty", ["repetition_penalty", "frequency_penalty"])
def test_m16_penalties_frozen_at_the_round(penalty, rule):
    penalized = dataclasses.replace(case(rule, **{penalty: 1.5}), prompt=(0, 1, 0))
    assert error(penalized) < EXACT
    with WRONG["m16"].switched_in():
        assert error(penalized) > CAUGHT


def test_m17_leaves_the_output_exact():
    """Only acceptance falls, so that only the cache shows this mutant."""
    assert cache_errors(PERFECT) == 0
    with WRONG["m17"].switched_in():
        assert error(PERFECT) < EXACT
