"""The certificate runs all checks, judges all statistical tests together, and lists what it does not prove."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import forerun
from forerun import native
from forerun.certify import cells, streams, texts, toys
from forerun.certify.checks import ETA, LEVEL, POWER, Check, Clock, Tell, Test
from forerun.certify.pair import Pair
from forerun.config import EngineConfig
from forerun.errors import BadOption, CapacityError
from forerun.registry import unknown
from forerun.testing.wrong import find
from forerun.theory.significance import holm

# The share of the time at which each part ends. The rest of the time is for the last batch of the last part.
PARTS = {"toys": 0.2, "texts": 0.4, "cells": 0.68, "streams": 0.96}
NOT_PROVEN = (
    "that the target computes what its makers meant: it is compared with this package's own plain decoding",
    "anything of another model, machine, instruction set, build, type of weights or device",
    "that the pair deviates by less than what `sees TV` and `at most` say",
    "options that were not run: stop texts, ends of sequences, log-probabilities, long contexts; the tests of the "
    "package have them",
    "lossy rules (lenience, typical), which requests must ask for by name",
)


@dataclass(frozen=True)
class Plan:
    """The options of a certificate.

    mutant: the name of a wrong version of the code. It replaces the right code, and the certificate must then fail.
    parts: the names of the parts to run; a whole certificate has all PARTS.
    """

    minutes: float = 10.0
    seed: int = 1
    mutant: str | None = None
    parts: tuple[str, ...] = tuple(PARTS)

    def __post_init__(self) -> None:
        if not 0 < self.minutes < float("inf"):
            raise BadOption(f"minutes={self.minutes:g} is not possible: it must be above 0, such as 10")
        if not 0 <= self.seed < 2**32:
            raise BadOption(f"seed={self.seed} is not possible: it must be in 0 .. {2**32 - 1}")
        if self.mutant is not None:
            find(self.mutant)
        for name in self.parts:
            if name not in PARTS:
                raise BadOption(unknown("part", name, PARTS))


@dataclass
class Certificate:
    """The results of all checks. facts: the facts about models, engine and machine, by name."""

    plan: Plan
    facts: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    taken_s: float = 0.0

    @property
    def tests(self) -> list[Test]:
        """All statistical tests, which are judged as one family."""
        return [test for check in self.checks for test in check.tests]

    @property
    def passed(self) -> bool:
        """Whether there is at least one check, and no check found a problem."""
        return bool(self.checks) and all(check.passed is not False for check in self.checks)

    def detects(self, check: Check) -> float | None:
        """Return the least total variation that each test of a check finds with probability POWER; None = not known."""
        known = [one for test in check.tests if (one := test.detects(len(self.tests))) is not None]
        return max(known, default=None)

    def record(self) -> dict[str, Any]:
        """Return the whole certificate for JSON."""
        return {
            "certificate": "forerun",
            "passed": self.passed,
            "verdict": self.verdict(),
            **self.facts,
            "plan": dataclasses.asdict(self.plan),
            "seconds": round(self.taken_s, 1),
            "level": LEVEL,
            "power": POWER,
            "eta": ETA,
            "num_tests": len(self.tests),
            "checks": [self._record_of(check) for check in self.checks],
            "not_proven": list(NOT_PROVEN),
        }

    def _record_of(self, check: Check) -> dict[str, Any]:
        fields = {f.name: getattr(check, f.name) for f in dataclasses.fields(check) if f.name != "tests"}
        tests = [
            {**dataclasses.asdict(test), "tv_upper": test.tv_upper, "detects_tv": test.detects(len(self.tests))}
            for test in check.tests
        ]
        return {**fields, "passed": check.passed, "detects_tv": self.detects(check), "tests": tests}

    def verdict(self) -> str:
        """Return the verdict in words."""
        ran = [check for check in self.checks if check.passed is not None]
        bad = [check.name for check in ran if not check.passed]
        what = f"{self.facts['target']} with {self.facts['draft_spec']}"
        left_out = [name for name in PARTS if name not in self.plan.parts]
        only = f" Left out: {', '.join(left_out)}." if left_out else ""
        if bad:
            return f"FAILED: {what} is not lossless here: {', '.join(bad)} ({len(bad)} of {len(ran)} checks).{only}"
        return (
            f"PASSED: {len(ran)} of {len(ran)} checks found no difference between {what} and plain decoding; a right "
            f"engine fails by chance with probability {LEVEL:g} at most.{only}"
        )


def certify(config: EngineConfig, plan: Plan, tell: Tell | None = None) -> Certificate:
    """Run the plan's checks on a configuration's target and drafter. Raises UserError and CapacityError as LLM does.

    tell: called with the current work in words, and the share of the plan's time that is over, from 0 to 1.
    """
    clock = Clock(plan.minutes, tell)
    clock.part("loading", 0.0)
    pair = Pair(config)
    certificate = Certificate(plan, _facts(pair, plan))
    mutant = None if plan.mutant is None else find(plan.mutant)
    parts: dict[str, Callable[[], list[Check]]] = {
        "toys": lambda: toys.checks(clock, mutant),
        "texts": lambda: texts.checks(clock, pair, plan.seed),
        "cells": lambda: [cells.check(clock, pair, plan.seed)],
        "streams": lambda: streams.checks(clock, pair, plan.seed),
    }
    with contextlib.nullcontext() if mutant is None else mutant.switched_in():
        for name, run in parts.items():
            if name in plan.parts:
                clock.part(name, PARTS[name])
                certificate.checks += _guarded(name, run)
    if failed := pair.failed_drafters():
        names = ", ".join(failed)
        certificate.checks.append(
            Check("drafters", "pair", "whether one raised", "", problems=[f"{names} failed: see the log"])
        )
    _judge(certificate)
    certificate.taken_s = clock.taken_s
    return certificate


def _guarded(name: str, run: Callable[[], list[Check]]) -> list[Check]:
    """Run a part. An exception inside of the part becomes a failed check, but CapacityError is raised."""
    try:
        return run()
    except CapacityError:
        raise
    except Exception as error:
        return [Check(name, "pair", "runs to its end", "", problems=[f"it raised {error!r:.200}"])]


def _judge(certificate: Certificate) -> None:
    """Mark the tests that Holm's method rejects, taking all tests as one family, and note them as problems."""
    tests = certificate.tests
    for test, is_rejected in zip(tests, holm([test.p_value for test in tests], LEVEL), strict=True):
        test.rejected = is_rejected
    for check in certificate.checks:
        check.problems += [f"{test.about}: p = {test.p_value:.2g}" for test in check.tests if test.rejected]


def _facts(pair: Pair, plan: Plan) -> dict[str, Any]:
    """Return the facts about the models, the engine and the machine, by name."""
    model, llm = pair.llm.checkpoint.model, pair.llm
    return {
        "target": llm.checkpoint.name,
        "model_type": model.config.model_type,
        "precision": str(model.precision),
        "draft": pair.own.draft,
        "draft_spec": llm.config.draft,
        "device": str(model.device),
        "ops": model.ops.name,
        "build": model.ops.build,
        "num_threads": model.ops.num_threads,
        "row_invariant": pair.row_invariant,
        "vocabulary": llm.engine.runner.num_ids,
        "forerun": forerun.__version__,
        "torch": native.torch_version(),
        "mutant": plan.mutant,
    }
