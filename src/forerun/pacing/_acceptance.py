"""What is known of a drafter's luck: per request, and over all requests of a drafter as the prior of the next one.

Every rate is a Beta posterior with forgetting. Acceptance has one for each class of depths, because what survived the
first tests is often easier than the first token was; the prior of a class is the class before it, shifted by what the
drafter's other requests showed. Two more rates say how often a drafter that was asked finds anything to propose, and
how often it goes on to the next token once it has: a search in the text often does not.
"""

from __future__ import annotations

import math

# First depth (0 = first drafted token) of each class of depths.
CLASS_STARTS = (0, 1, 3, 7)
_CLASSES = [*zip(CLASS_STARTS, (*CLASS_STARTS[1:], 1024), strict=True)]
_FOUND, _WENT_ON = len(CLASS_STARTS), len(CLASS_STARTS) + 1

# Before anything is known: two of three drafted tokens are accepted, and a drafter that is asked mostly proposes all
# that it may. A strength is the number of tests that a mean counts for.
_FIRST_MEANS = (2 / 3, 2 / 3, 2 / 3, 2 / 3, 0.9, 0.99)
_DRAFTER_STRENGTHS = (12.0, 8.0, 8.0, 8.0, 2.0, 10.0)
_REQUEST_STRENGTHS = (16.0, 16.0, 16.0, 16.0, 4.0, 20.0)
# Requests differ, and the first of them says little about the next: where a drafter was tested in so many rounds, which
# is what one request contributes, its word counts half; and never less than this share.
_FEW_ROUNDS, _LEAST_KNOWN = 32.0, 0.25

_MIN_GAIN = 0.02  # expected tokens of a node below which it is not worth a thought
_RECENT = 0.9  # forgetting per round of the watch for a change
_ALARM = 9.0  # squared standard deviations at which the past is dropped
_KEPT = 4.0  # tests that stand for the rounds since
_DISTRUST = 0.1  # weight of the prior from then on


class Acceptance:
    """Rates of one request, or, without a parent, of one drafter over all of its requests.

    memory_rounds: rounds after which a test counts 1/e.
    """

    __slots__ = ("_is_fresh", "_keep", "_recent", "_trust", "hits", "means", "misses", "parent")

    def __init__(self, memory_rounds: float, parent: Acceptance | None = None) -> None:
        self.parent = parent
        self.hits = [0.0] * len(_FIRST_MEANS)
        self.misses = [0.0] * len(_FIRST_MEANS)
        self._keep = 1 - 1 / memory_rounds
        self._trust = 1.0  # in the prior
        self._recent = (0.0, 0.0, 0.0, 0.0)  # hits, tests, hits beyond the expected ones, variance of these
        self.means = [0.0] * len(_FIRST_MEANS)
        self.refresh()

    def count(self, granted: int, num_drafted: int, num_tested: int, num_accepted: int) -> bool:
        """One round in which `granted` >= 1 nodes were asked for, of a drafter that had caught up.

        True where the last rounds contradict those before, which are forgotten then.
        """
        self._add(_FOUND, num_drafted > 0, num_drafted == 0)
        if num_drafted:
            self._add(_WENT_ON, num_drafted - 1, num_drafted < granted)
        if self.parent is None:
            self._count_tests(num_tested, num_accepted)
            return False
        return self._watch(num_tested, num_accepted)

    def _count_tests(self, num_tested: int, num_accepted: int) -> None:
        self._is_fresh = False
        for c, (start, end) in enumerate(_CLASSES):
            if num_tested <= start:
                break
            hits = max(0, min(num_accepted, end) - start)
            self._add(c, hits, min(num_tested, end) - start - hits)

    def _watch(self, num_tested: int, num_accepted: int) -> bool:
        """Count, and compare with what was expected."""
        self._count_tests(num_tested, num_accepted)
        all_hits, tests, surprise, variance = (value * _RECENT for value in self._recent)
        for c, (start, end) in enumerate(_CLASSES):
            if num_tested <= start:
                break
            tested = min(num_tested, end) - start
            hits = max(0, min(num_accepted, end) - start)
            mean = self.means[c]
            all_hits, tests = all_hits + hits, tests + tested
            surprise += hits - tested * mean
            variance += tested * mean * (1 - mean)
        self._recent = (all_hits, tests, surprise, variance)
        if surprise * surprise > _ALARM * (0.5 + variance):
            self._forget(all_hits / tests)
            return True
        return False

    def _add(self, c: int, hits: float, misses: float) -> None:
        self.hits[c] = self.hits[c] * self._keep + hits
        self.misses[c] = self.misses[c] * self._keep + misses

    def _forget(self, mean: float) -> None:
        """The last rounds are all that is left of the past, and the prior counts less."""
        for c in range(_FOUND):
            self.hits[c], self.misses[c] = _KEPT * mean, _KEPT * (1 - mean)
        self._recent = (0.0, 0.0, 0.0, 0.0)
        self._trust = _DISTRUST
        self.refresh()

    def _strength(self, c: int) -> float:
        parent = self.parent
        if parent is None:
            return _DRAFTER_STRENGTHS[c]
        rounds = parent.hits[0] + parent.misses[0]
        known = max(_LEAST_KNOWN, rounds / (rounds + _FEW_ROUNDS)) if c < _FOUND else 1.0
        return _REQUEST_STRENGTHS[c] * known * self._trust

    def refresh(self) -> None:
        """Compute `means` anew: posterior means of the classes of depths, then of finding and going on.

        A drafter that was hardly tested gets the benefit of the doubt: a standard deviation more.
        """
        parent, means = self.parent, self.means
        self._is_fresh = True
        if parent is not None and not parent._is_fresh:
            parent.refresh()
        for c in range(len(means)):
            strength = self._strength(c)
            prior = _FIRST_MEANS[c] if parent is None else parent.means[c]
            if 0 < c < _FOUND:
                prior = means[c - 1] if parent is None else _shift(means[c - 1], parent.means[c - 1], prior)
            total = strength + self.hits[c] + self.misses[c]
            means[c] = (strength * prior + self.hits[c]) / total
            if parent is None and not c:
                means[c] += math.sqrt(means[c] * (1 - means[c]) / (total + 1))

    def gains(self, limit: int) -> tuple[list[float], float]:
        """Expected tokens that each granted node adds (7.4: posterior mean of the product), and the rate of finding.

        The list ends at `limit` or where a node hardly adds anything; it never rises.
        """
        self.refresh()
        found, went_on = self.means[_FOUND], self.means[_WENT_ON]
        gain, gains = found / went_on, list[float]()
        for c, (start, end) in enumerate(_CLASSES):
            total = self._strength(c) + self.hits[c] + self.misses[c]
            accepted = self.means[c] * total
            for i in range(min(end, limit) - start):
                gain *= went_on * (accepted + i) / (total + i)
                if gain < _MIN_GAIN:
                    return gains, found
                gains.append(gain)
        return gains, found


def _shift(mean: float, other: float, other_next: float) -> float:
    """A rate moved as far, in odds, as another one was from `other` to `other_next`."""
    odds = _odds(mean) * _odds(other_next) / _odds(other)
    return odds / (1 + odds)


def _odds(mean: float) -> float:
    mean = min(max(mean, 1e-3), 1 - 1e-3)
    return mean / (1 - mean)
