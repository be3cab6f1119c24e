"""House test 1: every drafter x verification rule x sampling option has exactly the target's distribution.

Drafters, rules and pacing policies are found by scanning their rooms, so that a new file is tested at once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from scipy.special import softmax

from forerun import drafters, pacing, registry, theory, verify
from forerun.engine import cutting
from forerun.errors import BadOption
from forerun.models.toy import ToyModel, ToyTable
from forerun.pacing.fixed import FixedPacing
from forerun.testing.engines import (
    HORIZON,
    TARGET,
    V,
    drafter_for,
    every_way,
    plain_outputs,
    resembling,
    spoken,
    summed,
    total_variation,
)
from forerun.theory import formulas
from forerun.types import EDGES, SamplingParams, Stop
from house.enumeration import Case
from methods import VARIANTS

EXACT = 1e-12
RULES = [name for name in verify.rules() if verify.find(name).is_lossless]
PACINGS = registry.names(pacing.__name__)
NAMES = registry.names(drafters.__name__)


def judges(rule: str, name: str, options: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether the rule can judge the drafts of a drafter with these options; the engine refuses the other pairs."""
    drafter = drafter_for(Case(name, SamplingParams(), options))
    try:
        verify.find(rule).check(name, drafter.shape, drafter.draws)
    except BadOption:
        return False
    return True


PAIRS = [(name, rule) for name in NAMES for rule in RULES if judges(rule, name)]
OPTIONS = [
    (name, options, rule)
    for name in NAMES
    for options in VARIANTS.get(name, [])
    for rule in RULES
    if judges(rule, name, options)
]
# `make test` takes a part of the cases, chosen below; `make parity` runs the others.
SAMPLE = ("greedy", "plain", "all")  # the sampling options of every drafter by one rule,
BY_OTHERS = ("plain",)  # and those by ALWAYS_BY and one more in turn: what others make of them EVERY_RULE shows
ALWAYS = ("model", "lookup", "none")  # the drafters that are tested with every option in both,
ALWAYS_BY = ("ratio", "match")  # by these rules;
EVERY_RULE = ("model",)  # and the one with these sampling options by every rule, one of which depends on the path
OF_EVERY_RULE = ("greedy", "plain", "repetition", "all", "grammar")
WITH_GRAMMARS = ("grammar", "greedy grammar")  # of every drafter, too
COMPOUND = [name for name in NAMES if hasattr(registry.load(drafters.__name__, name, "drafter"), "parts")]
ENDING = ("a", "ab", "aab", "bb", "bba", "bbb")  # letters, a = 0: some are a text that may end, and may go on
# One of these texts is the beginning of another, and what is left to choose differs by the path.
CHOICE = ("ab", "abc", "acb", "bb", "ba", "cac", "caba")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.4},
    "top_p": {"top_p": 0.8},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": -1.1},
    "grammar": {"choice": CHOICE},
    "greedy grammar": {"choice": CHOICE, "temperature": 0.0},
    "bias": {"logit_bias": {0: 1.5, 2: -float("inf")}},
    "forced": {"forced_eos_token_id": 1},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 0.9},
    "all": {"temperature": 1.3, "top_k": 2, "min_p": 0.1, "top_p": 0.9, "repetition_penalty": 1.4,
            "presence_penalty": 0.5, "frequency_penalty": 0.4, "logit_bias": {1: 0.3}},
}  # fmt: skip


def params(rule: str, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=HORIZON, acceptance=rule, **options)


def label(value: Any) -> str | None:
    return ",".join(f"{k}={v}" for k, v in value.items()) or "defaults" if isinstance(value, dict) else None


def assert_lossless(case: Case, *, drafts: bool = False) -> list[Any]:
    """Return every way that was enumerated.

    drafts: whether drafts must be both right and wrong here, as otherwise plain would be compared with plain. A draft
    of one id (top-k 1, greedy, lookup) is a point mass, so both need a target that is not.
    """
    ways = every_way(case)
    if drafts:
        reports = [report for _, (_, of_way) in ways for report in of_way]
        assert any(r.num_accepted for r in reports)
        assert any(r.num_accepted < r.num_tested for r in reports)
    outputs = summed(ways)
    assert sum(outputs.values()) == pytest.approx(1, abs=EXACT)
    assert total_variation(outputs, plain_outputs(case)) < EXACT
    return ways


def also_long(cases: list[Any], is_short: Callable[[Any], bool]) -> list[Any]:
    """Mark the cases that only `make parity` runs."""
    return [case if is_short(case) else pytest.param(*case, marks=pytest.mark.parity) for case in cases]


def is_always(name: str, rule: str, *_: Any) -> bool:
    """Whether every case of the pair is part of `make test`."""
    return name in ALWAYS and rule in ALWAYS_BY


def is_first(name: str, rule: str) -> bool:
    """Whether it is the rule by which `make test` tests what is the same by each rule: one for each drafter."""
    return rule == next(r for n, r in sorted(PAIRS, key=lambda pair: pair[1] != "ratio") if n == name)


def has_turn(name: str, rule: str) -> bool:
    """Whether it is the drafter's turn of those rules that `make test` has not with every drafter."""
    others = [r for n, r in PAIRS if n == name and r not in ALWAYS_BY]
    return bool(others) and rule == others[NAMES.index(name) % len(others)]


def is_sampled(name: str, rule: str, sampling: str) -> bool:
    """Whether `make test` has the pair with these sampling options: a compound's parts are tested by their own."""
    if is_always(name, rule):
        return True
    if name in EVERY_RULE:
        return sampling in OF_EVERY_RULE
    if is_first(name, rule):
        return sampling in (*SAMPLE, *WITH_GRAMMARS)
    return sampling in BY_OTHERS and (rule in ALWAYS_BY or (name not in COMPOUND and has_turn(name, rule)))


@pytest.mark.parametrize(
    ("name", "rule", "sampling"),
    also_long([(*pair, sampling) for pair in PAIRS for sampling in SAMPLING], lambda c: is_sampled(*c)),
)
def test_every_sampling_option(name, rule, sampling):
    drafts = sampling == "plain" and name not in ("none", "forced")  # without a grammar nothing is forced
    assert_lossless(Case(name, params(rule, **SAMPLING[sampling])), drafts=drafts)


READS = ToyModel(V, 1, source=(2, 0, 1, 0, 1))


READING = [pair for pair in PAIRS if pair[0] != "translated"]  # which refuses a source


@pytest.mark.parametrize(("name", "rule"), also_long(READING, lambda c: is_always(*c) or is_first(*c)))
def test_an_encoder_decoder(name, rule):
    """What it says depends on a source, which stands in a slot of its own."""
    assert_lossless(Case(name, params(rule), target=READS))


def test_another_source_is_another_distribution():
    other = ToyModel(V, 1, source=(2, 0, 1, 1, 1))
    found = spoken(Case("model", params("ratio"), target=READS))
    assert total_variation(found, plain_outputs(Case("none", params("ratio"), target=other))) > 0.1


@pytest.mark.parametrize("sampling", SAMPLE)
@pytest.mark.parametrize(("name", "options", "rule"), also_long(OPTIONS, lambda c: is_first(c[0], c[2])), ids=label)
def test_options_of_a_drafter(name, options, rule, sampling):
    """Options of a drafter may change how much is accepted, and nothing else."""
    assert_lossless(Case(name, params(rule, **SAMPLING[sampling]), options), drafts=sampling == "plain")


def is_cut(name: str, rule: str, least: float) -> bool:
    """Whether `make test` has it: the draft model by every rule, two more drafters by one."""
    if name in EVERY_RULE:
        return rule in ALWAYS_BY or least != cutting.LEAST
    return name in ("lookup", "tree") and is_first(name, rule)


@pytest.mark.parametrize(
    ("name", "rule", "least"),
    also_long([(*pair, least) for pair in PAIRS for least in (cutting.LEAST, 0.3)], lambda c: is_cut(*c)),
)
def test_drafts_free_of_some_ids(monkeypatch, name, rule, least):
    """A token that was drawn is taken out because of what it is, and the target, which writes it, writes it as often.

    Without the condition on the distributions of the others this is biased. least: where some are left alone.
    """
    monkeypatch.setattr(cutting, "LEAST", least)
    assert_lossless(Case(name, params(rule), gamma=3, unwritten=frozenset({1})))


SHAPES = {
    "zeros": (ToyTable(zero_share=0.5), ToyTable(distance=0.7, zero_share=0.5)),
    "ties": (ToyTable(tie_step=2.0), ToyTable(distance=2.0, tie_step=2.0)),
    "peaked": (ToyTable(scale=9.0), ToyTable(distance=4.0)),
    "equal": (ToyTable(), ToyTable(distance=0.0)),
    "unlike": (ToyTable(scale=3.0, zero_share=0.4), ToyTable(distance=9.0)),
    "short memory": (ToyTable(order=1), ToyTable(distance=0.7, order=1)),
}


@functools.cache
def pair(shape: str) -> tuple[ToyModel, ToyModel]:
    """Target and draft model; their tables are made once."""
    target = ToyModel(V, 11, SHAPES[shape][0])
    return target, ToyModel(V, 12, SHAPES[shape][1], near=target)


def is_shaped(name: str, rule: str, shape: str, temperature: float) -> bool:
    """Whether `make test` has it: greedy requests by one rule, for their distributions are points by any."""
    if is_always(name, rule) or (name in EVERY_RULE and shape == "zeros"):
        return True
    return shape == "zeros" and (is_first(name, rule) or (temperature > 0 and has_turn(name, rule)))


@pytest.mark.parametrize(
    ("name", "rule", "shape", "temperature"),
    also_long(
        [(*pair, shape, temperature) for pair in PAIRS for shape in SHAPES for temperature in (0.0, 1.0)],
        lambda c: is_shaped(*c),
    ),
)
def test_every_shape_of_distribution(name, rule, shape, temperature):
    target, near = pair(shape)
    assert_lossless(Case(name, params(rule, temperature=temperature), {}, target, near))


@pytest.mark.parametrize("min_tokens", [0, 2])
@pytest.mark.parametrize(("name", "rule"), also_long(PAIRS, lambda c: c[0] == "model" or is_first(*c)))
def test_an_end_inside_a_draft(name, rule, min_tokens):
    """The end id may stand anywhere in a draft; before min_tokens it has probability 0, position by position."""
    assert_lossless(Case(name, params(rule, min_tokens=min_tokens), end_ids=frozenset({2})))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("name", "rule"), also_long(PAIRS, lambda c: is_always(*c) or is_first(*c)))
def test_a_grammar_that_may_end_inside_a_draft(name, rule, temperature):
    """The end id has a probability where a text may end, and nowhere else; other ids behind it are of no path."""
    given = params(rule, temperature=temperature, choice=ENDING)
    assert_lossless(Case(name, given, end_ids=frozenset({2})))


@pytest.mark.parametrize(("name", "rule"), also_long(PAIRS, lambda c: c[0] in ("model", "lookup", "tree")))
def test_a_grammar_beside_all_other_options(name, rule):
    given = {**SAMPLING["all"], "min_tokens": 2, "choice": ENDING}
    assert_lossless(Case(name, params(rule, **given), end_ids=frozenset({2})))


# What is forced comes first, between two choices, and last, of several lengths.
FORKS = {
    "runs": ("abacba", "abacbb", "abbcaa", "abbcba", "abcc"),
    "ends": ("ab", "abba", "abbb", "abaab", "abaaa"),
}


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize(("temperature", "gamma"), [(0.0, 2), (1.0, 1), (1.0, 3)])
@pytest.mark.parametrize(
    ("name", "rule"), also_long(PAIRS, lambda c: is_always(*c) or is_first(*c) or c[0] in (*EVERY_RULE, "tree"))
)
def test_what_a_grammar_forces_around_guesses(name, rule, temperature, gamma, fork):
    """A drafter goes on behind what is forced, in the same pass, and its guess has what is forced behind it."""
    given = SamplingParams(max_tokens=6, acceptance=rule, temperature=temperature, choice=FORKS[fork])
    ends = frozenset({2} if fork == "ends" else ())
    ways = assert_lossless(Case(name, given, end_ids=ends, forced=True, gamma=gamma))
    steps = [step for _, (_, reports) in ways for report in reports for step in report.sequences]
    assert any(step.forced for step in steps) or name == "none"
    if name in ("model", "tree") and temperature:
        around = [step for step in steps if 0 in step.forced and len(step.forced) < step.num_drafted]
        assert any(step.without_forced.num_accepted for step in around)
        assert any(step.without_forced.num_tested > step.without_forced.num_accepted for step in around)
        ends = [step for step in around if gamma == 1 and step.num_drafted - 1 in step.forced]
        assert any(step.num_drafted - 1 in step.accepted_ranks for step in ends) or gamma > 1


NOTHING_BEHIND_AN_END = tuple((2, token) for token in range(V))  # as bad words


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("name", "rule"), also_long(PAIRS, lambda c: c[0] in ("lookup", "model", "random", "tree")))
def test_masks_may_leave_no_token_behind_an_end(name, rule, temperature):
    """Plain decoding never asks for a token there, and an accepted end must not fail, either."""
    given = params(rule, temperature=temperature)
    assert_lossless(Case(name, given, end_ids=frozenset({2}), bad_words=NOTHING_BEHIND_AN_END))


def stops_early(policy: str) -> bool:
    """Whether a policy may end a draft while it is drawn."""
    made = pacing.make(policy, 3)
    return pacing.overrides(made, "go_on") or pacing.overrides(made, "go_behind")


EARLY = [policy for policy in PACINGS if stops_early(policy)]


def is_paced(name: str, rule: str, policy: str, gamma: int) -> bool:
    """Whether `make test` has it: every policy with `model`, and one that stops early with each drafter, in turn."""
    if is_always(name, rule) and (rule == "ratio" or policy in EARLY):
        return gamma == (3 if name == "model" else 1)
    return gamma == 3 and is_first(name, rule) and policy == EARLY[NAMES.index(name) % len(EARLY)]


@pytest.mark.parametrize(
    ("name", "rule", "policy", "gamma"),
    also_long(
        [(*pair, policy, gamma) for pair in PAIRS for policy in PACINGS for gamma in (1, 3)], lambda c: is_paced(*c)
    ),
)
def test_every_pacing_and_length(name, rule, policy, gamma):
    assert_lossless(Case(name, params(rule, temperature=0.8), gamma=gamma, pacing=policy))


@pytest.mark.parametrize("rule", ["ratio", "match"])
@pytest.mark.parametrize("name", ["eagle", "model"])
def test_chains_that_end_by_their_own_probabilities(monkeypatch, name, rule):
    """Behind a token that was not likely enough, which stays in the chain."""

    def stops(self, seqs, granted):
        return {b: Stop([0.2, 0.4, *[0.7] * (len(EDGES) - 1)], [0.5] * 4) for b in range(len(seqs))}

    monkeypatch.setattr(FixedPacing, "stops", stops)
    ways = assert_lossless(Case(name, params(rule), gamma=3))
    assert len({report.num_drafted for _, (_, reports) in ways for report in reports if report.num_drafted}) > 1


@pytest.mark.parametrize("inner", ["random", "unigram"])
@pytest.mark.parametrize("rule", ["ratio", "match"])
def test_a_cascade_judges_guesses_that_its_model_has_no_embedding_for(rule, inner):
    """They were drawn, so they are rejected; to drop them before the test would favour the others."""
    near = ToyModel(2, 12, ToyTable(order=1))
    assert_lossless(Case("cascade", params(rule), {"inner": inner}, near=near, prompt=(0, 1, 1, 0, 1)))


def test_a_member_that_tossed_coins_and_drafted_nothing_leaves_others_to_the_next():
    """Branching refuses a coin that is used twice in a round."""
    options = {"of": "(cascade:inner=random)+early_exit"}  # entropies of the first token: 1.05 and 0.99 nats
    assert_lossless(Case("mixed", params("ratio"), options, pacing="svip:threshold=1.01", prompt=(2, 0, 1)))


@pytest.mark.parametrize("rule", RULES)
def test_more_rounds(rule):
    """Five tokens over two ids: state is carried through up to five rounds."""
    target = ToyModel(2, 5)
    five = dataclasses.replace(params(rule, repetition_penalty=1.3), max_tokens=5)
    assert_lossless(Case("model", five, {}, target, resembling(target), prompt=(0, 1, 0)))


@pytest.mark.parametrize("rule", ["ratio", "match", "block"])
def test_lengths_that_follow_from_what_was_accepted(rule):
    """Phases of one round, so that `utility` goes through several of them and drafts nothing in some."""
    target = ToyModel(2, 5)
    five = dataclasses.replace(params(rule), max_tokens=5)
    policy = "utility:test_rounds=1,set_rounds=1"
    ways = assert_lossless(Case("model", five, {}, target, resembling(target), 3, policy, prompt=(0, 1, 0)))
    assert {tuple(report.num_drafted for report in reports[:2]) for _, (_, reports) in ways} >= {(3, 1), (3, 2)}


# ---------------------------------------------------------------------------------------------------- mean lengths


def first_round(case: Case) -> float:
    """Mean emitted tokens of the first step, exactly."""
    return sum(weight * reports[0].num_emitted for weight, (_, reports) in every_way(case))


@pytest.mark.parametrize(("rule", "acceptance"), [("ratio", formulas.acceptance), ("match", formulas.match_acceptance)])
def test_mean_length_is_the_closed_form(rule, acceptance):
    """Without memory there is one alpha, and the mean length of a round is equation (1) of Leviathan et al. 2023."""
    target = ToyModel(V, 3, ToyTable(order=0))
    near = ToyModel(V, 4, ToyTable(order=0, distance=1.0), near=target)
    alpha = acceptance(softmax(target.logits_after(())), softmax(near.logits_after(())))
    assert 0.3 < alpha < 0.95
    mean = first_round(Case("model", params(rule), {}, target, near))
    assert mean == pytest.approx(theory.formulas.expected_tokens(alpha, 2), abs=EXACT)


def test_mean_length_with_memory():
    """With context it is 1 + beta() + sum_x min(p, q)(x) beta(x) for two drafted tokens."""
    case = Case("model", params("ratio"), near=resembling(TARGET))

    def both_probs(*drafted: int):
        history = [*case.prompt, *drafted]
        return [softmax(model.logits_after(history)) for model in (case.target, case.near)]

    p, q = both_probs()
    kept = [min(a, b) for a, b in zip(p, q, strict=True)]
    expected = 1 + sum(kept) + sum(k * formulas.acceptance(*both_probs(x)) for x, k in enumerate(kept))
    assert first_round(case) == pytest.approx(expected, abs=EXACT)
