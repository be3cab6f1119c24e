"""What the steps of an engine take, learned from their reports: for the policy that paces, and for the log.

Reports are kept until somebody wants to know, and those of steps that did the same are learned from together: their
median says as much, and learning from each one by itself, between two passes, would cost more than some drafts do.
"""

from __future__ import annotations

from statistics import median

from forerun.pacing._costs import DraftTime, PassTime
from forerun.types import StepReport

MOST_WAITING = 32  # reports


class StepTimes:
    """passes: the target's side of a step; drafts: of each drafter, by name. Both in the same, drifting, unit."""

    def __init__(self) -> None:
        self.passes = PassTime()
        self.drafts: dict[str, DraftTime] = {}
        self._waiting: list[StepReport] = []

    def observe(self, report: StepReport) -> None:
        """The numbers of a step; those in which nobody decoded say nothing."""
        if report.num_decoding:
            self._waiting.append(report)
            if len(self._waiting) >= MOST_WAITING:
                self.learn()

    def learn(self) -> None:
        """Learn from the reports that came since."""
        reports, self._waiting = self._waiting, []
        alike: dict[tuple[int, int], list[float]] = {}
        for report in reports:
            other = report.num_prefill_tokens
            if other:
                self.passes.observe_mixed(_pass_s(report), other, report.num_rows - other)
            else:
                alike.setdefault((report.num_rows, report.num_decoding), []).append(_pass_s(report))
        for (rows, num_sequences), seconds in alike.items():
            self.passes.observe(median(seconds), rows, num_sequences, len(seconds))
        self._learn_drafts(reports)

    def _learn_drafts(self, reports: list[StepReport]) -> None:
        """What drafters took, in units of the passes of the same steps."""
        alike: dict[tuple[str, int, int], list[float]] = {}
        for report in reports:
            other = report.num_prefill_tokens
            unit_s = self.passes.unit_s(_pass_s(report), other, report.num_rows - other)
            for name, draft in report.drafts.items():
                if draft.num_catchup_tokens:
                    costs = self.drafts.setdefault(name, DraftTime())
                    costs.observe_catchup(draft.catchup_s / unit_s, draft.num_catchup_tokens)
                if not other and (draft.num_nodes or not draft.num_catchup_tokens):
                    relative = (draft.seconds - draft.catchup_s) / unit_s
                    alike.setdefault((name, draft.depth, draft.num_nodes), []).append(relative)
        for (name, depth, num_nodes), relatives in alike.items():
            self.drafts.setdefault(name, DraftTime()).observe(median(relatives), depth, num_nodes, len(relatives))

    def step(self, draft: str, num_sequences: float, length: int) -> float:
        """Relative seconds of a step in which so many sequences draft so many tokens each."""
        seconds = self.passes.rows(num_sequences * (1 + length))
        if length and draft in self.drafts:
            seconds += self.drafts[draft].of(length, num_sequences * length)
        return seconds


def _pass_s(report: StepReport) -> float:
    """The target's side of a step."""
    return report.score_s + report.judge_s + report.commit_s
