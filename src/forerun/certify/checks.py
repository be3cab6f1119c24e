"""The elements of a certificate: statistical tests, the checks that contain them, and the clock of the checks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forerun.theory.significance import Fit, detectable_tv

LEVEL = 1e-3  # at most this is the probability that a right engine fails any of all statistical tests
POWER = 0.99
ETA = 1e-3  # at most this is the probability that a stated bound is too small

Tell = Callable[[str, float], None]  # called with the current work, and the share of the time that is over, 0 to 1


@dataclass
class Test:
    """One statistical test of a family that is judged together (Holm 1979).

    about: the setting in words. num_free: degrees of freedom; 0 = none are stated, and the power is not known. tv: the
    total variation between the sample's shares and the stated probabilities. tv_bound: the margin that Weissman's bound
    adds to tv.
    """

    about: str
    p_value: float
    num_samples: int
    num_free: int = 0
    tv: float | None = None
    tv_bound: float | None = None
    rejected: bool = False

    @classmethod
    def of(cls, about: str, fit: Fit, tv: float | None = None, tv_bound: float | None = None) -> Test:
        """Make a test from `fit`, the result of a function of forerun.theory.significance."""
        return cls(about, fit.p_value, fit.num_samples, fit.num_free, tv, tv_bound)

    def detects(self, num_tests: int) -> float | None:
        """Return the least total variation that the test finds with probability POWER; None = not known.

        num_tests: the size of the family that the test belongs to.
        """
        return detectable_tv(self.num_samples, self.num_free, LEVEL / num_tests, POWER) if self.num_free else None

    @property
    def tv_upper(self) -> float | None:
        """An upper bound of the total variation, which holds with probability 1 - ETA."""
        return None if self.tv is None or self.tv_bound is None else min(1.0, self.tv + self.tv_bound)


@dataclass
class Check:
    """One line of a certificate.

    subject: "toy" (models whose probabilities are known), "pair" (the user's target and drafters), or "few ids" (the
    pair, which may then use at most 8 ids). num_samples: the number of samples, counted in `unit`. problems: a sentence
    for each failure. ran: whether there was anything to check. result: the outcome in short. proves: the claim that the
    check supports, and the claim's limits.
    """

    name: str
    subject: str
    method: str
    proves: str
    unit: str = "samples"
    num_samples: int = 0
    result: str = ""
    problems: list[str] = field(default_factory=list)
    tests: list[Test] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    ran: bool = True

    @property
    def passed(self) -> bool | None:
        """Whether the check found no problem; None where there was nothing to check."""
        return not self.problems if self.ran else None


class Clock:
    """The clock of a certificate. Parts take shares of the time in turn, and unused time goes to the next part."""

    def __init__(self, minutes: float, tell: Tell | None = None) -> None:
        self._begun_s, self._all_s = time.monotonic(), 60 * minutes
        self._tell, self._what = tell, ""
        self.deadline_s = self._begun_s + self._all_s

    def part(self, what: str, until: float) -> None:
        """Begin a part. It may run until the share `until` of the whole time is over."""
        self._what = what
        self.deadline_s = self._begun_s + until * self._all_s
        self.look()

    def look(self, detail: str = "") -> bool:
        """Report the progress, and return whether there is time left in this part."""
        now = time.monotonic()
        if self._tell is not None:
            what = f"{self._what}: {detail}" if detail else self._what
            # Checks on toys are never cut short, so the first part may take longer than its share.
            self._tell(what, (min(now, self.deadline_s) - self._begun_s) / self._all_s)
        return now < self.deadline_s

    @property
    def left_s(self) -> float:
        """The seconds that are left in this part."""
        return max(0.0, self.deadline_s - time.monotonic())

    @property
    def taken_s(self) -> float:
        """The seconds since the beginning of the checks."""
        return time.monotonic() - self._begun_s
