"""Whether a text is searched: that takes time whether or not anything is found.

A search of one text takes a tenth of a millisecond: nothing beside a pass of a large model, and half of the step of a
small one with a batch. So the tokens that searches gain are counted. Where they are worth less than the time, searches
become probes, which take so small a share of the time that they need not pay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from forerun.types import DraftStep

SHARE = 0.01  # of the time: the most for searches that do not pay
FEW, MOST_SPARED = 4, 8  # searches for which that time is saved up: the least before probes begin, and the most
FIRST_GAIN, FIRST_WEIGHT = 0.5, 8.0  # tokens that a search is assumed to gain at first, with the weight of 8 searches
MEMORY = 32  # searches until the weight of one is 1/e
REQUEST_WEIGHT = 4.0  # weight, in searches, of all requests' mean gain in a request's estimate
FRESH = 0.05  # weight of a new measurement in the slow average of seconds


@dataclass
class _Gains:
    """Decaying sums of searches, and of the tokens that they gained."""

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

    search_s: seconds to search one text, and to decide about one request's draft; None = not known yet.
    """

    search_s: float | None = None
    _all: _Gains = field(default_factory=lambda: _Gains(FIRST_WEIGHT, FIRST_WEIGHT * FIRST_GAIN))
    _requests: dict[int, _Gains] = field(default_factory=dict)
    _spared_s: float = 0.0
    _num_seen: int = 0
    _last: dict[int, int] = field(default_factory=dict)  # by request: the step of its last probe

    def pays(self, request: int, rate: float) -> bool:
        """Return whether a search gains more than its time. rate: tokens per second that all requests make."""
        gain = self._all.mean()
        if (gains := self._requests.get(request)) is not None:
            gain = gains.mean(gain, REQUEST_WEIGHT)
        return gain >= rate * (self.search_s or 0.0)

    def probes(self, requests: Iterable[int], step: int) -> set[int]:
        """Return the requests to search although it does not pay, longest waiting first, and count their time."""
        num = int(self._spared_s / self.search_s) if self.search_s else MOST_SPARED
        chosen = sorted(requests, key=lambda request: self._last.get(request, -1))[:num]
        self._last |= dict.fromkeys(chosen, step)
        self._spared_s -= len(chosen) * (self.search_s or 0.0)
        return set(chosen)

    def may_probe(self) -> bool:
        """Return whether there is time for several probes at once, because deciding costs as much as one of them."""
        return self._spared_s >= FEW * (self.search_s or 0.0)

    def observe(self, request: int, gain: float) -> None:
        """Add a search. gain: accepted tokens of its guess, less the tokens that it cost."""
        self._all.add(gain)
        self._requests.setdefault(request, _Gains()).add(gain)

    def observe_step(self, seconds: float, drafting: DraftStep | None, deciding_s: float) -> None:
        """Add a step, what the drafter did in it, and the seconds that it took to decide about one request's draft."""
        self._spared_s = min(self._spared_s + SHARE * seconds, MOST_SPARED * (self.search_s or 0.0))
        if drafting is not None and drafting.num_searched:
            self._num_seen += 1
            seconds_each = drafting.search_s / drafting.num_searched + max(0.0, deciding_s)
            had = seconds_each if self.search_s is None else self.search_s
            weight = max(FRESH, 1 / self._num_seen)  # the first ones come from cold caches
            self.search_s = had + weight * (min(seconds_each, 3 * had) - had)  # another process may have held one up

    def forget(self, request: int) -> None:
        """Forget what a request has shown."""
        self._requests.pop(request, None)
        self._last.pop(request, None)
