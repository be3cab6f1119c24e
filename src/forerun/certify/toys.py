"""The certificate's first part: checks of the installed package on toy models.

Enumerated outputs must have exactly the probabilities of plain decoding, wrong versions of the package must be found,
and the caches must agree with the committed tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from forerun import drafters, pacing, registry, verify
from forerun.certify.checks import Check, Clock
from forerun.errors import BadOption, NotFound
from forerun.models.toy import ToyModel
from forerun.testing.engines import HORIZON, Case, V, as_they_are, drafter_for, error, every_way, resembling
from forerun.testing.wrong import CAUGHT, EXACT, NUM_ROUNDS, PERFECT, WRONG, Wrong, cache_errors, coin_error
from forerun.types import SamplingParams

FLOAT32 = 1e-5  # the total variation that rounding to float32 may cause over a few tokens
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "all options": {
        "temperature": 1.3,
        "top_k": 2,
        "min_p": 0.1,
        "top_p": 0.9,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {1: 0.3},
    },
}
# The toy has one layer, so that an early exit is the whole target: a draft temperature makes it wrong sometimes.
OPTIONS: Mapping[str, Mapping[str, Any]] = {"early_exit": {"draft_temperature": 0.5}}
NARROW: Mapping[str, Any] = MappingProxyType({})


def checks(clock: Clock, mutant: Wrong | None) -> list[Check]:
    """Run the checks on toys. mutant: the wrong version that is switched in, None = the right code runs."""
    all_checks = [enumeration(clock, mutant), in_float32(clock, mutant), caches(), production_coins()]
    if mutant is None:
        all_checks.insert(1, wrong_versions(clock))
    return all_checks


def enumeration(clock: Clock, mutant: Wrong | None) -> Check:
    """Enumerate the outcomes of toy engines: every drafter with every lossless rule that can judge its drafts."""
    check = Check(
        "every outcome",
        "toy",
        "exact enumeration of all coins, against products of the target's probabilities",
        f"the code draws exactly what it should: {V} ids, {HORIZON} tokens, several rounds, float64; not other sizes, "
        "other options, or the kernels of real models",
        unit="engines",
    )
    worst, names, rules = 0.0, set[str](), set[str]()
    cases, missing = _cases()
    core = _core()
    if mutant is not None:  # the case in which the mutant shows comes first
        core = [(about, case) for about, case in core if case is mutant.case]
        cases = [*core, *cases]
    for number, (about, case) in enumerate(cases):
        if not clock.look(f"{number} of {len(cases)} engines") and number >= len(core):
            break
        check.num_samples += 1
        distance = _distance(check, about, case, mutant)
        worst = max(worst, distance)
        names.add(case.drafter)
        rules.add(str(case.params.acceptance))
        if distance > EXACT:
            check.problems.append(f"{about}: the distribution is off by {distance:.3g} in total variation")
    check.result = f"TV {worst:.0e} at most"
    check.facts = {"largest_tv": worst, "limit": EXACT, "num_cases": len(cases), "drafters_left_out": missing}
    check.facts |= {"drafters": sorted(names), "rules": sorted(rules)}
    return check


def _distance(check: Check, about: str, case: Case, mutant: Wrong | None) -> float:
    """Return the total variation of a case from plain decoding. If the case raises, note a problem and return 0."""
    wrap = as_they_are if mutant is None else mutant.wrap
    try:
        return error(case, wrap)
    except Exception as failure:
        check.problems.append(f"{about}: it raised {failure!r:.150}")
        return 0.0


def _core() -> list[tuple[str, Case]]:
    """Return the cases in which wrong versions have wrong outputs. These cases are run even where no time is left."""
    cases = dict[int, tuple[str, Case]]()
    for wrong in WRONG.values():
        if wrong.shows_in == "outputs":
            cases.setdefault(id(wrong.case), (_label(wrong.case, "as for " + wrong.name), wrong.case))
    return list(cases.values())


@functools.cache
def _cases() -> tuple[list[tuple[str, Case]], list[str]]:
    """Return all cases, the wrong versions' cases first; and the names of the drafters that need a file."""
    missing, matrix = list[str](), list[tuple[str, Case]]()
    for name in registry.names(drafters.__name__):
        options = OPTIONS.get(name, NARROW)
        try:
            drafter = drafter_for(Case(name, SamplingParams(), options))
        except (BadOption, NotFound):
            missing.append(name)
            continue
        for rule in verify.rules():
            if verify.find(rule).is_lossless and verify.find(rule).judges(drafter.shape, drafter.draws):
                matrix += [(_label(case, said), case) for said, case in _sampled(name, rule, options)]
    early = [policy for policy in registry.names(pacing.__name__) if pacing.overrides(pacing.make(policy, 3), "go_on")]
    paced = [dataclasses.replace(_case("model", "ratio", temperature=0.8), pacing=policy, gamma=3) for policy in early]
    return [*_core(), *[(_label(case, case.pacing), case) for case in paced], *matrix], missing


def _sampled(name: str, rule: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Case]]:
    for said, sampling in SAMPLING.items():
        yield said, dataclasses.replace(_case(name, rule, **sampling), options=options)


def _case(name: str, rule: str, **sampling: Any) -> Case:
    return Case(name, SamplingParams(max_tokens=HORIZON, acceptance=rule, **sampling))


def _label(case: Case, said: str) -> str:
    return f"{case.drafter}, {case.params.acceptance}, {said}"


def wrong_versions(clock: Clock) -> Check:
    """Check that each wrong version is found: a check that cannot fail would prove nothing about the right code."""
    check = Check(
        "wrong versions",
        "toy",
        "m1 to m19 switched into this process, one after the other",
        "the enumeration and the looks at caches and coins can fail; not that they find every possible mistake",
        unit="mutants",
    )
    for wrong in WRONG.values():
        clock.look(wrong.name)
        check.num_samples += 1
        try:
            with wrong.switched_in():
                distance = wrong.error()
        except Exception:  # a wrong version that raises is found, too
            continue
        if distance <= CAUGHT:
            check.problems.append(f"{wrong.name} ({wrong.about}) was not found")
    check.result = f"{check.num_samples - len(check.problems)} of {check.num_samples} found"
    return check


def in_float32(clock: Clock, mutant: Wrong | None) -> Check:
    """Enumerate the outcomes of a few toy engines with float32 logits, as the kernels of real models return them."""
    check = Check(
        "float32 sampling",
        "toy",
        "exact enumeration with float32 logits, as the kernels of real models return them",
        "penalties, filters and softmax of the build that is installed, up to rounding",
        unit="engines",
    )
    target = ToyModel(V, 1, dtype="float32")
    worst = 0.0
    for rule in ("ratio", "match"):
        for said, sampling in SAMPLING.items():
            if not clock.look(f"{rule}, {said}") and mutant is not None and check.num_samples:
                break  # the mutant had its chance to show
            case = dataclasses.replace(_case("model", rule, **sampling), target=target, near=resembling(target))
            distance = _distance(check, _label(case, said), case, mutant)
            check.num_samples += 1
            worst = max(worst, distance)
            if distance > FLOAT32:
                check.problems.append(f"{_label(case, said)}: off by {distance:.3g} in total variation")
    check.result = f"TV {worst:.0e} at most"
    check.facts = {"largest_tv": worst, "limit": FLOAT32}
    return check


def caches() -> Check:
    """Compare the caches of target and draft model with the committed tokens.

    Also check that the tokens of a perfect copy, used as draft model, are always accepted.
    """
    check = Check(
        "caches",
        "toy",
        "rows of target's and draft's cache against the committed tokens; a perfect copy as the draft",
        "no stale row after rejections or full acceptance (m17 changes speed alone, and shows only here)",
        unit="engines",
    )
    for about, case in (("a perfect copy", PERFECT), ("a draft that errs", dataclasses.replace(PERFECT, near=None))):
        check.num_samples += 1
        if wrong_rows := cache_errors(case):
            check.problems.append(f"{about}: {wrong_rows} rows of a cache are not those of the committed tokens")
    alpha = perfect_alpha()
    if alpha < 1:
        check.problems.append(f"a perfect copy is accepted with probability {alpha:.3f}, not always")
    check.result = f"no wrong row, copy accepted {alpha:.0%}" if not check.problems else "wrong rows"
    check.facts = {"perfect_copy_alpha": alpha}
    return check


def production_coins() -> Check:
    """Test rounds with the random numbers of real requests, because the enumeration replaces these numbers."""
    check = Check(
        "production coins",
        "toy",
        "rounds of ratio with Philox coins, each with its own seed; G-test of the tokens that they emit",
        "drafts, acceptance and corrections are drawn with numbers that do not depend on each other (m18, m19)",
        unit="rounds",
        num_samples=NUM_ROUNDS,
    )
    if (distance := coin_error()) > 0:
        check.problems.append(f"what rounds emit is off by {distance:.3f} in total variation")
    check.result = f"TV {distance:.3f}" if distance else "no difference"
    return check


def perfect_alpha() -> float:
    """Return the share of tested tokens that are accepted when the draft model is an exact copy of the target."""
    tested = accepted = 0.0
    long = dataclasses.replace(PERFECT, params=dataclasses.replace(PERFECT.params, max_tokens=4))
    for weight, (_, reports) in every_way(long):
        tested += weight * sum(report.num_tested for report in reports)
        accepted += weight * sum(report.num_accepted for report in reports)
    return accepted / tested
