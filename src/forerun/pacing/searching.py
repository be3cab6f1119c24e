"""The decision whether to search a text for guesses: a search takes time even if it finds nothing.

A search of one text takes a tenth of a millisecond. This is little beside a pass of a large model, but the searches of
a batch may take half of a small model's step. So the tokens that searches gain are counted. Where these tokens are
worth less than the time of the searches, only a few searches are made, as probes. Probes need not pay, because they
take at most 1% of the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from forerun.types import DraftStep

SHARE = 0.01  # of the time, the most that searches may take where they do not pay
FEW, MOST_SPARED = 4, 8  # this time is saved up: for at least 4 searches before probes begin, and for at most 8
FIRST_GAIN, FIRST_WEIGHT = 0.5, 8.0  # tokens that a search is assumed to gain at first, with the weight of 8 searches
MEMORY = 32  # searches after which the weight of a search has fallen to 1/e
REQUEST_WEIGHT = 4.0  # weight, in searches, of all requests' mean gain in a request's estimate
FRESH = 0.05  # weight of a new measurement in the slow average of seconds


@dataclass
class _Gains:
    """Decaying sums: the number of searches, and the tokens that they gained."""

    num: float = 0.0
    tokens: float = 0.0

    def add(self, tokens: float) -> None:
        keep = 1 - 1 / MEMORY
        self.num, self.tokens = keep * self.num + 1, keep * self.tokens + tokens

    def mean(self, expected: float = 0.0, weight: float = 0.0) -> float:
        return (self.tokens + weight * expected) / (self.num + weight)


@dataclass
class Searching:
    """The time and the gain of one drafter's searches.

    search_s: the seconds to search one text and to decide about one request's draft, together; None = not known yet.
    """

    search_s: float | None = None
    _all: _Gains = field(default_factory=lambda: _Gains(FIRST_WEIGHT, FIRST_WEIGHT * FIRST_GAIN))
    _requests: dict[int, _Gains] = field(default_factory=dict)
    _spared_s: float = 0.0
    _num_seen: int = 0
    _last: dict[int, int] = field(default_factory=dict)  # by request: the step of its last probe

    def pays(self, request: int, rate: float) -> bool:
        """Return whether a search gains more tokens than its time costs. rate: tokens per second of all requests."""
        gain = self._all.mean()
        if (gains := self._requests.get(request)) is not None:
            gain = gains.mean(gain, REQUEST_WEIGHT)
        return gain >= rate * (self.search_s or 0.0)

    def probes(self, requests: Iterable[int], step: int) -> set[int]:
        """Choose the requests whose texts are searched as probes, and count the time of these searches.

        The requests whose last probe was longest ago come first. requests: the requests whose searches do not pay.
        """
        num = int(self._spared_s / self.search_s) if self.search_s else MOST_SPARED
        chosen = sorted(requests, key=lambda request: self._last.get(request, -1))[:num]
        self._last |= dict.fromkeys(chosen, step)
        self._spared_s -= len(chosen) * (self.search_s or 0.0)
        return set(chosen)

    def may_probe(self) -> bool:
        """Return whether enough time is saved up for several probes at once.

        The decision to probe itself takes as long as a probe, so it is not made for a single probe.
        """
        return self._spared_s >= FEW * (self.search_s or 0.0)

    def observe(self, request: int, gain: float) -> None:
        """Add a search. gain: the number of accepted tokens of the guess, less the guess's cost in tokens."""
        self._all.add(gain)
        self._requests.setdefault(request, _Gains()).add(gain)

    def observe_step(self, seconds: float, drafting: DraftStep | None, deciding_s: float) -> None:
        """Save up a share of a step's seconds for probes, and update `search_s`.

        drafting: the drafter's work in the step. deciding_s: the seconds to decide about one request's draft.
        """
        self._spared_s = min(self._spared_s + SHARE * seconds, MOST_SPARED * (self.search_s or 0.0))
        if drafting is not None and drafting.num_searched:
            self._num_seen += 1
            seconds_each = drafting.search_s / drafting.num_searched + max(0.0, deciding_s)
            had = seconds_each if self.search_s is None else self.search_s
            weight = max(FRESH, 1 / self._num_seen)  # the first searches run with cold caches
            self.search_s = had + weight * (min(seconds_each, 3 * had) - had)  # another process may have held it up

    def forget(self, request: int) -> None:
        """Forget the counts of a request."""
        self._requests.pop(request, None)
        self._last.pop(request, None)
