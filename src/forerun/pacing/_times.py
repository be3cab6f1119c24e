"""What the steps of an engine take, learned from their reports: for the policy that paces, and for the log."""

from __future__ import annotations

from forerun.pacing._costs import DraftTime, PassTime
from forerun.types import StepReport

LEARNING_STEPS = 128  # every one of them counts


class StepTimes:
    """passes: the target's side of a step; drafts: of each drafter, by name. Both in the same, drifting, unit.

    every: of steps that repeat the width before them, one in so many is learned from, where that must cost little.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self._num_steps = 0
        self._last_rows = 0
        self.passes = PassTime()
        self.drafts: dict[str, DraftTime] = {}

    def observe(self, report: StepReport) -> None:
        """The numbers of a step; those in which nobody decoded say nothing."""
        if not report.num_decoding:
            return
        self._num_steps += 1
        rows, self._last_rows = self._last_rows, report.num_rows
        if self._num_steps > LEARNING_STEPS and rows == report.num_rows and self._num_steps % self.every:
            return
        seconds, other = report.score_s + report.judge_s + report.commit_s, report.num_prefill_tokens
        rows = report.num_rows - other
        if other:
            self.passes.observe_mixed(seconds, other, rows)
        else:
            self.passes.observe(seconds, rows, report.num_decoding)
        unit_s = self.passes.unit_s(seconds, other, rows)
        for name, draft in report.drafts.items():
            costs = self.drafts.setdefault(name, DraftTime())
            if draft.num_catchup_tokens:
                costs.observe_catchup(draft.catchup_s / unit_s, draft.num_catchup_tokens)
            if draft.num_nodes or not draft.num_catchup_tokens:
                costs.observe((draft.seconds - draft.catchup_s) / unit_s, draft.depth, draft.num_nodes)

    def step(self, draft: str, num_sequences: float, length: int) -> float:
        """Relative seconds of a step in which so many sequences draft so many tokens each."""
        seconds = self.passes.rows(num_sequences * (1 + length))
        if length and draft in self.drafts:
            seconds += self.drafts[draft].of(length, num_sequences * length)
        return seconds
