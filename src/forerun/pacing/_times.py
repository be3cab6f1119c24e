"""What the steps of an engine take, learned from their reports: for the policy that paces, and for the log.

Reports are kept until somebody wants to know, and steps in a row that did the same are learned from together, because
learning from each one by itself, between two passes, would cost more than some drafts do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median

from forerun.pacing._costs import PassTime
from forerun.pacing._drafts import DraftTime
from forerun.pacing._twins import draft_time, pass_time
from forerun.types import StepReport

MOST_WAITING = 128  # reports


def size_of(num_sequences: float) -> int:
    """The class of a batch: twice as many sequences are the next one, and a few more or less the same."""
    return round(math.log2(max(1, num_sequences)))


@dataclass
class Costs:
    """passes: the target's side of a step; drafts: of each drafter, by name. Both in the same, drifting, unit."""

    passes: PassTime = field(default_factory=pass_time)
    drafts: defaultdict[str, DraftTime] = field(default_factory=lambda: defaultdict(draft_time))


class StepTimes:
    """By the size of the batch, doubling: what is added to rows by sequences and their contexts differs with it.

    A size that comes for the first time begins with what the nearest one has shown, and learns as a new one does.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, Costs] = {}
        self._waiting: list[StepReport] = []

    def of(self, num_sequences: float) -> Costs:
        """The costs of steps in which so many sequences decode."""
        size = size_of(num_sequences)
        costs = self._by_size.setdefault(size, Costs())
        if not costs.passes.num_steps:
            known = [other for other, seen in self._by_size.items() if seen.passes.num_steps]
            if known:
                costs = deepcopy(self._by_size[min(known, key=lambda other: abs(other - size))])
                costs.passes.carry_over()
                self._by_size[size] = costs
        return costs

    def observe(self, report: StepReport) -> None:
        """The numbers of a step; those in which nobody decoded say nothing."""
        if report.num_decoding:
            self._waiting.append(report)
            if len(self._waiting) >= MOST_WAITING:
                self.learn()

    def learn(self) -> None:
        """Learn from the reports that came since."""
        sizes: dict[int, list[StepReport]] = {}
        for report in self._waiting:
            sizes.setdefault(size_of(report.num_decoding), []).append(report)
        self._waiting = []
        for reports in sizes.values():
            costs = self.of(reports[0].num_decoding)
            _learn_passes(costs, reports)
            _learn_drafts(costs, reports)

    def step(self, draft: str, num_sequences: float, length: int) -> float:
        """Relative seconds of a step in which so many sequences draft so many tokens each."""
        nearest = min(self._by_size, key=lambda known: abs(known - size_of(num_sequences)), default=None)
        costs = Costs() if nearest is None else self._by_size[nearest]
        seconds = costs.passes.rows(num_sequences * (1 + length))
        if length and draft in costs.drafts:
            seconds += costs.drafts[draft].of(length, num_sequences * length)
        return seconds


def _learn_passes(costs: Costs, reports: list[StepReport]) -> None:
    for (other, rows, num_sequences), alike in groupby(reports, _kind):
        seconds = [_pass_s(report) for report in alike]
        if other:
            costs.passes.observe_mixed(median(seconds), other, rows)
            costs.passes.rest(len(seconds))
        else:
            costs.passes.observe(seconds, rows, num_sequences)


def _kind(report: StepReport) -> tuple[int, int, int]:
    """Rows of prompts, other rows, sequences."""
    other = report.num_prefill_tokens
    return other, report.num_rows - other, report.num_decoding


def _learn_drafts(costs: Costs, reports: list[StepReport]) -> None:
    """What drafters took, over the passes of the same steps."""
    alike: dict[tuple[str, int, int, int], list[float]] = {}
    for report in reports:
        other, pass_s = report.num_prefill_tokens, _pass_s(report)
        for name, draft in report.drafts.items():
            if draft.num_catchup_tokens:
                unit_s = costs.passes.unit_s(pass_s, other, report.num_rows - other)
                costs.drafts[name].observe_catchup(draft.catchup_s / unit_s, draft.num_catchup_tokens)
            if not other and (draft.num_nodes or not draft.num_catchup_tokens):
                shape = name, draft.depth, draft.num_nodes, report.num_rows
                alike.setdefault(shape, []).append((draft.seconds - draft.catchup_s) / max(pass_s, 1e-9))
    for (name, depth, num_nodes, rows), ratios in alike.items():
        costs.drafts[name].observe(median(ratios), depth, num_nodes, rows, len(ratios))
    for drafts in costs.drafts.values():
        drafts.fit(costs.passes)


def _pass_s(report: StepReport) -> float:
    """The target's side of a step."""
    return report.score_s + report.judge_s + report.commit_s
