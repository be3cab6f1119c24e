"""Chooses how many levels beam searches draft: the number that gives the most search steps per second.

A level is accepted if the target's best beams are among its drafted nodes. Let a be the share of tested levels that are
accepted, w the number of beams, and u the number of drafted nodes of a level. A pass with K levels then has w + u K
rows, and advances the search by (1 - a^(K+1)) / (1 - a) steps on average (docs/methods/beam.md). The choice changes no
text, so it may depend on anything.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.pacing.cost import Costs
from forerun.types import Sequence, SequenceStep

MOST_LEVELS = 4
FIRST_GUESS, GUESS_WEIGHT = 0.6, 4.0  # assumed share of accepted levels, and its weight in tested levels
KEEP = 0.95  # factor of the old counts after each pass
PROBE_PASSES = 16  # passes without drafts until one level is tried again

Key = tuple[str, int, int]  # drafter, num_beams, draft_beams


class Levels:
    """The share of tested levels that beam searches accept, by drafter, num_beams and draft_beams."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._counts: dict[Key, tuple[float, float]] = {}  # decaying: tested, accepted
        self._keys: dict[int, Key] = {}
        self._num_plain = 0  # passes in a row without drafts

    def wanted(self, seqs: Seq[Sequence], num_rows: int) -> int:
        """Return how many levels each of these searches drafts.

        num_rows: the number of rows of other requests in the pass. Each of these rows yields one token, which a longer
        pass delays.
        """
        keys = [(s.draft, s.params.num_beams, s.params.draft_beams or s.params.num_beams) for s in seqs]
        self._keys |= zip((seq.id for seq in seqs), keys, strict=True)
        rates = [self._rate(keys, num_rows, num_levels) for num_levels in range(MOST_LEVELS + 1)]
        best = max(range(len(rates)), key=rates.__getitem__)
        self._num_plain = 0 if best else self._num_plain + 1
        if self._num_plain == PROBE_PASSES:
            self._num_plain, best = 0, 1
        return best

    def observe(self, steps: Seq[SequenceStep]) -> None:
        """Count the tested and accepted levels of a pass."""
        for step in steps:
            key = self._keys.get(step.sequence_id)
            if key is not None and step.num_tested:
                tested, accepted = self._counts.get(key, (0.0, 0.0))
                self._counts[key] = KEEP * tested + step.num_tested, KEEP * accepted + step.num_accepted

    def end(self, seq: Sequence) -> None:
        """Forget a search that is over."""
        self._keys.pop(seq.id, None)

    def _rate(self, keys: Seq[Key], num_rows: int, num_levels: int) -> float:
        """Return how many tokens and search steps all requests together make per second with `num_levels` levels."""
        num_steps = num_rows + sum(sum(self._share(key) ** i for i in range(num_levels + 1)) for key in keys)
        rows = num_rows + sum(width + num_levels * wide for _, width, wide in keys)
        seconds = float(self.costs.target.ratio(rows)) * (self.costs.target.one_row_s or 1.0)
        for name in {draft for draft, _, _ in keys}:
            cost = self.costs.draft(name)
            fed = sum(wide for draft, _, wide in keys if draft == name)
            seconds += num_levels * float(cost.ratio(fed)) * (cost.one_row_s or 0.0)
        return num_steps / seconds

    def _share(self, key: Key) -> float:
        tested, accepted = self._counts.get(key, (0.0, 0.0))
        return (accepted + FIRST_GUESS * GUESS_WEIGHT) / (tested + GUESS_WEIGHT)
