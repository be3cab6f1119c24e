"""Certificates: right code passes, each wrong version fails, and numbers are what they are called."""

import contextlib
import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest

from forerun.certify import streams, toys
from forerun.certify.cells import BIAS
from forerun.certify.certificate import NOT_PROVEN, PARTS, Certificate, Plan, certify
from forerun.certify.checks import Check, Clock, Test as Fitted
from forerun.certify.pair import Pair, listed
from forerun.certify.texts import spoiled
from forerun.config import EngineConfig
from forerun.errors import BadOption, ForerunError
from forerun.models.named import named_models
from forerun.testing.engines import Case
from forerun.testing.wrong import WRONG
from forerun.theory.significance import g_test
from forerun.types import Probs, SamplingParams
from refusals import refusal
from tiny import write_tiny

ON_THE_PAIR = ("texts", "cells", "streams")
SHORT = 1e-4  # minutes: every part does the least that it can
QUICK = ("m10", "m13", "m15", "m17", "m18", "m19")  # the mutants that `make test` has; `make parity` has all


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "target")
    write_tiny(folder / "draft", seed=1)
    return folder


def config(models: Path, **options: object) -> EngineConfig:
    return EngineConfig(**{"target": str(models / "target"), "draft": str(models / "draft"), **options})


def found(models: Path, plan: Plan, **options: object) -> Certificate:
    return certify(config(models, **options), plan)


def check(certificate: Certificate, name: str) -> Check:
    return next(one for one in certificate.checks if one.name == name)


# ------------------------------------------------------------------------------------------------- the right code


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.parity) for seed in (2, 3))])
def test_the_right_code_passes(models: Path, seed: int) -> None:
    """A right engine fails one certificate in a thousand; these seeds are fixed."""
    made = found(models, Plan(SHORT, seed, parts=ON_THE_PAIR))
    assert made.passed, made.record()
    assert all(one.passed for one in made.checks)
    assert check(made, "equal texts").num_samples >= 36
    assert not check(made, "counted outputs").facts["nothing_drafted"]
    assert json.loads(json.dumps(made.record()))["passed"]


@pytest.mark.parametrize("draft", ["random", "suffix:shape=tree"])
def test_a_bad_drafter_and_one_of_trees_pass(models: Path, draft: str) -> None:
    made = found(models, Plan(SHORT, parts=("texts", "cells")), draft=draft)
    assert made.passed, made.record()
    assert made.facts["draft_spec"] == draft


def test_rows_that_may_round_differently_need_tie_certificates(models: Path) -> None:
    made = found(models, Plan(SHORT, parts=("texts",)), ops="reference", dtype="float32")
    assert made.passed, made.record()
    assert made.facts["row_invariant"] is False


def test_a_mutant_that_nothing_finds_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are found: one by its outputs, one because it raises; the third changes nothing."""
    raising = dataclasses.replace(WRONG["m3"], name="raises", case=Case("nowhere", SamplingParams(max_tokens=1)))
    harmless = dataclasses.replace(WRONG["m3"], name="harmless", switched_in=contextlib.nullcontext)
    monkeypatch.setattr(toys, "WRONG", {w.name: w for w in (WRONG["m3"], raising, harmless)})
    suite = toys.wrong_versions(Clock(1))
    assert suite.result == "2 of 3 found"
    assert suite.problems == [f"harmless ({harmless.about}) was not found"]


@pytest.mark.parity
def test_every_check_on_toys() -> None:
    checks = toys.checks(Clock(60), None)
    wanted = ["every outcome", "wrong versions", "float32 sampling", "caches", "production coins"]
    assert [one.name for one in checks] == wanted
    assert all(one.passed for one in checks), [one.problems for one in checks]
    every = checks[0]
    assert every.num_samples > 250
    of_heads = ["assistant", "blockwise", "dflash", "eagle", "hydra", "medusa", "mtp", "pass"]
    assert every.facts["drafters_left_out"] == sorted([*of_heads, "datastore"])


# ------------------------------------------------------------------------------------------------- wrong versions


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.parity) for name in WRONG]
)
def test_every_wrong_version_fails(models: Path, name: str) -> None:
    made = found(models, Plan(SHORT, mutant=name, parts=("toys",)))
    assert not made.passed, made.record()
    assert made.verdict().startswith("FAILED: ")
    expected = {"outputs": "every outcome", "caches": "caches", "coins": "production coins"}[WRONG[name].shows_in]
    assert expected in [one.name for one in made.checks if one.passed is False]


@pytest.mark.parametrize("name", ["m5", "m17"])
def test_the_pair_shows_wrong_versions_too(models: Path, name: str) -> None:
    """m5 in texts of `match`; m17 where a copy errs, or reads rows that were never written."""
    made = found(models, Plan(SHORT, mutant=name, parts=("texts",)))
    expected = {"equal texts"} if name == "m5" else {"a perfect copy", "drafters"}
    assert expected & {one.name for one in made.checks if one.passed is False}, made.record()


def test_counted_outputs_show_a_wrong_rule(models: Path) -> None:
    """m11 is far off, so that few samples are enough."""
    made = found(models, Plan(SHORT, mutant="m11", parts=("cells", "streams")))
    assert check(made, "counted outputs").passed is False
    assert check(made, "u is uniform").passed is False


@pytest.mark.drafter_fails
def test_a_drafter_that_fails_is_a_failed_check(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would decode plainly from there on, which is equal to plain decoding and proves nothing."""
    from forerun.drafters.random import RandomDrafter

    def failing(*_: object) -> None:
        raise ValueError("out of order")

    monkeypatch.setattr(RandomDrafter, "propose", failing)
    made = found(models, Plan(SHORT, parts=("texts",)))
    assert check(made, "drafters").problems == ["random ids failed: see the log"]
    assert not made.passed


# -------------------------------------------------------------------------------------------------------- its parts


def test_u_is_uniform_for_every_draw_of_a_known_distribution() -> None:
    """Dense, listed and of a model's width: u of draws is uniform, of the wrong distribution it is not."""
    rng = np.random.default_rng(1)
    weights = rng.dirichlet(np.full(50, 0.3))
    law = Probs(dense=weights)
    few = Probs(ids=np.array([3, 7, 40]), listed=np.array([0.2, 0.5, 0.3]))
    for one, ids, p in ((law, np.arange(50), weights), (few, np.array([3, 7, 40]), np.array([0.2, 0.5, 0.3]))):
        right = [streams.transformed(one, int(x), rng.random())[0] for x in rng.choice(ids, size=8000, p=p)]
        wrong = [streams.transformed(one, int(x), rng.random())[0] for x in rng.choice(ids, size=8000)]
        p_right, p_wrong = (g_test(np.histogram(u, 64, (0, 1))[0], np.full(64, 1 / 64)).p_value for u in (right, wrong))
        assert p_right > 1e-3
        assert p_wrong < 1e-6


def test_impossible_tokens_are_rare_where_none_can_be() -> None:
    assert streams.transformed(Probs(point=3), 4, 0.5) == (1.0, True, 0.0)
    assert streams.transformed(Probs(point=3), 3, 0.25) == (0.25, False, 0.0)
    assert streams.transformed(Probs(dense=np.array([0.5, 0.5, 0.0])), 2, 0.5) == (1.0, True, 0.0)
    u, is_rare, mass = streams.transformed(Probs(dense=np.array([1 - 1e-6, 1e-6])), 1, 0.5)
    assert is_rare
    assert mass == pytest.approx(1e-6)
    assert u == pytest.approx(1 - 0.5e-6)


@functools.cache
def pair(models: Path) -> Pair:
    return Pair(config(models))


def test_the_bias_leaves_the_allowed_ids_alone(models: Path) -> None:
    one = pair(models)
    prompt = one.prompts()[0]
    params = SamplingParams(max_tokens=3, logit_bias=dict.fromkeys((5, 9), BIAS))
    outputs = dict(one.plain.outputs(prompt, 3, params))
    assert len(outputs) == 8
    assert sum(outputs.values()) == pytest.approx(1)
    assert {token for output in outputs for token in output} == {5, 9}


def test_plain_distributions_are_the_same_however_they_are_asked_for(models: Path) -> None:
    """Row by row, from the prefix of another text, and all at once."""
    one = pair(models)
    first, second = one.prompts()[:2]
    ids = [*first, 3, 200, 17]
    params = SamplingParams(repetition_penalty=1.3)
    together = one.plain.distributions(ids, len(first), params)
    assert len(together) == 4
    for i, law in enumerate(together):
        one.plain.logits(second, len(second))
        assert listed(one.plain.next(ids[: len(first) + i], len(first), params)) == listed(law)


def test_the_lying_draft_is_right_until_it_is_not() -> None:
    text = tuple(range(20))
    for first in (1, 4, 7):
        wrong = [i for i, (a, b) in enumerate(zip(text, spoiled(text, 257, first), strict=True)) if a != b]
        assert len(wrong) == 4
        assert np.diff(wrong).tolist() == [5, 5, 5]


def test_all_tests_are_judged_as_one_family() -> None:
    """One of forty with p = 0.0005 is chance; with p = 1e-6 it is none."""
    from forerun.certify.certificate import _judge

    def certificate(p_value: float) -> Certificate:
        tests = [Fitted(f"test {i}", 0.5, 1000, 7) for i in range(39)] + [Fitted("the last", p_value, 1000, 7)]
        made = Certificate(Plan(), {"target": "t", "draft": "d"}, [Check("one", "pair", "", "", tests=tests)])
        _judge(made)
        return made

    assert certificate(5e-4).passed
    failed = certificate(1e-6)
    assert not failed.passed
    assert failed.checks[0].problems == ["the last: p = 1e-06"]
    assert failed.tests[0].detects(40) > failed.tests[0].detects(1)


def test_a_part_that_takes_longer_tells_no_more_than_its_share() -> None:
    shares = list[float]()
    clock = Clock(1e-9, lambda what, share: shares.append(share))
    for until in (0.25, 0.5):
        clock.part("checks", until)
        assert not clock.look()
    assert shares == pytest.approx([0.25, 0.25, 0.5, 0.5], abs=0.01)


def test_a_check_without_samples_is_neither_passed_nor_failed() -> None:
    assert Check("one", "pair", "", "", ran=False).passed is None
    assert not Certificate(Plan(), {"target": "t", "draft": "d"}).passed, "nothing was tested"


def test_plans_that_cannot_be() -> None:
    for options, message in (
        ({"minutes": 0}, "minutes=0 is not possible"),
        ({"minutes": -1}, "must be above 0"),
        ({"minutes": float("nan")}, "minutes=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"mutant": "m20"}, "there is no mutant 'm20'"),
    ):
        assert message in refusal(BadOption, Plan, **options)


def test_plain_decoding_needs_no_certificate(models: Path) -> None:
    assert "draft='none' is plain decoding" in refusal(BadOption, found, models, Plan(SHORT), draft="none")


# ------------------------------------------------------------------------------------------------------ at full size


@pytest.mark.parity
def test_smollm2_passes() -> None:
    if not named_models()["smollm2"].is_here():
        pytest.skip("smollm2 is not here")
    made = certify(EngineConfig(target="smollm2"), Plan(9.0))
    assert made.passed, made.record()
    assert check(made, "every outcome").num_samples > 250


@pytest.mark.parity
@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_version_fails_with_the_whole_certificate(models: Path, name: str) -> None:
    made = found(models, Plan(0.2, mutant=name))
    assert not made.passed
    assert set(PARTS) == set(made.plan.parts)


def test_errors_of_loading_are_raised(models: Path) -> None:
    assert "there is no folder" in refusal(ForerunError, found, models, Plan(SHORT), target="./nowhere")
    assert len(NOT_PROVEN) > 3
