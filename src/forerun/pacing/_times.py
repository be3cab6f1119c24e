"""What the steps of an engine take, learned from their reports: for the policy that paces, and for the log.

Reports are kept until somebody wants to know, and steps in a row that did the same are learned from together, because
learning from each one by itself, between two passes, would cost more than some drafts do.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median

from forerun.pacing._costs import PassTime
from forerun.pacing._drafts import DraftTime
from forerun.pacing._twins import draft_time, pass_time
from forerun.types import StepReport

MOST_WAITING = 128  # reports
# A small model's weights are in the caches, unless a prompt has just run: behind 512 rows of one, passes take
# 2.3, 2.0, 1.4 and 1.15 times as long, behind 64 rows 1.4, 1.2 and 1.06 times. Doubt fades faster than that, because
# where prompts come every few steps there are no others to learn from.
_COLD, _COLD_ROWS, _LEAST_COLD, _COLD_DECAY = 0.9, 256, 0.05, 3


@dataclass
class StepTimes:
    """passes: the target's side of a step; drafts: of each drafter, by name. Both in the same, drifting, unit."""

    passes: PassTime = field(default_factory=pass_time)
    drafts: defaultdict[str, DraftTime] = field(default_factory=lambda: defaultdict(draft_time))
    _waiting: list[StepReport] = field(default_factory=list)
    _disturbance: float = 0.0  # of the next pass, by prompts before it: deviation of the logarithm of what it takes

    def observe(self, report: StepReport) -> None:
        """The numbers of a step; those in which nothing ran say nothing."""
        if report.num_rows:
            self._waiting.append(report)
            if len(self._waiting) >= MOST_WAITING:
                self.learn()

    def learn(self) -> None:
        """Learn from the reports that came since."""
        if self._waiting:
            reports, self._waiting = self._waiting, []
            self._learn_passes(reports)
            self._learn_drafts(reports)

    def step(self, draft: str, num_sequences: float, length: int) -> float:
        """Relative seconds of a step in which so many sequences draft so many tokens each."""
        seconds = self.passes.of(num_sequences * (1 + length), num_sequences)
        if length and draft in self.drafts:
            seconds += self.drafts[draft].of(length, num_sequences * length)
        return seconds

    def _learn_passes(self, reports: list[StepReport]) -> None:
        for (other, rows, num_sequences), alike in groupby(reports, _kind):
            seconds = [_pass_s(report) for report in alike]
            if other:
                self._disturbance = max(self._disturbance, _COLD * min(1.0, other / _COLD_ROWS))
                self.passes.observe_prompts(median(seconds), other, rows, num_sequences)
                self.passes.rest(len(seconds))
                continue
            while seconds and self._disturbance > _LEAST_COLD:
                self.passes.observe([seconds.pop(0)], rows, num_sequences, disturbance=self._disturbance)
                self._disturbance /= _COLD_DECAY
            if seconds:
                self.passes.observe(seconds, rows, num_sequences)

    def _learn_drafts(self, reports: list[StepReport]) -> None:
        """What drafters took, over the passes of the same steps."""
        alike: dict[tuple[str, tuple[int, int, int, int]], list[float]] = {}
        for report in reports:
            (other, rows, num_sequences), pass_s = _kind(report), _pass_s(report)
            around_s = _around_drafts_s(report)
            for name, draft in report.drafts.items() if rows else ():
                if draft.num_catchup_tokens:
                    unit_s = self.passes.unit_s(pass_s, other, rows, num_sequences)
                    self.drafts[name].observe_catchup(draft.catchup_s / unit_s, draft.num_catchup_tokens)
                if not other and (draft.num_nodes or not draft.num_catchup_tokens):
                    shape = draft.depth, draft.num_nodes, rows, num_sequences
                    draft_s = draft.seconds - draft.catchup_s + around_s
                    alike.setdefault((name, shape), []).append(draft_s / max(pass_s, 1e-9))
        for (name, shape), ratios in alike.items():
            self.drafts[name].observe(median(ratios), shape, len(ratios))
        for drafts in self.drafts.values():
            drafts.fade(len(reports))
            drafts.fit(self.passes)


def _kind(report: StepReport) -> tuple[int, int, int]:
    """Rows of prompts, other rows, sequences."""
    other = report.num_prefill_tokens
    return other, report.num_rows - other, report.num_decoding


def _pass_s(report: StepReport) -> float:
    """The target's side of a step, and what every step takes besides, however much it drafts."""
    return report.seconds - report.draft_s


def _around_drafts_s(report: StepReport) -> float:
    """What asking takes besides the drafters, for each of them."""
    around_s = report.draft_s - report.pacing_s - sum([draft.seconds for draft in report.drafts.values()])
    return max(0.0, around_s) / max(1, len(report.drafts))
