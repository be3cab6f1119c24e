"""The times of the target's and the drafters' passes: measured or default curves, corrected by the times of steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy.typing as npt

from forerun.models.runner import Runner
from forerun.pacing import measuring
from forerun.pacing.measuring import NOW, Pause, Unwanted
from forerun.pacing.pass_time import LEAST_STEEP, Doubt, Fit, Floats, PassTime
from forerun.types import StepReport

LOG = logging.getLogger(__name__)

LEAST_READ = 16  # tokens: a few are read in a time that says nothing of a prompt's
FRESH = 0.25  # weight of a new measurement in the average of seconds that reading takes


@dataclass(frozen=True)
class Traits:
    """The properties of a drafter that matter to pacing.

    tells_confidence: whether the drafter tells how sure it is of each drafted token. searches: whether the drafter
    searches the text before it runs its model. is_free: whether the drafter has no model, so that all its guesses cost
    the same.
    """

    tells_confidence: bool = False
    searches: bool = False
    is_free: bool = False


@dataclass
class Costs:
    """The times of an engine's passes, and the traits of its drafters.

    drafts: the curve of each drafter's passes, by name. The drafts of a drafter without a model are assumed to cost no
    time until one of its steps is observed. runners: the models that are to be measured when nothing runs, by drafter;
    the target's models are under "". traits: the traits of each drafter, by name.
    """

    target: PassTime = field(default_factory=PassTime)
    drafts: dict[str, PassTime] = field(default_factory=dict)
    runners: dict[str, Seq[Runner]] = field(default_factory=dict)
    traits: Mapping[str, Traits] = field(default_factory=dict)
    _reads_s: dict[str, float] = field(default_factory=dict)  # seconds of a prompt's token, by drafter, where seen
    _measured: Seq[Runner] = ()  # the target's runners if its curve was measured and never contradicted
    _doubt: Doubt = field(default_factory=Doubt)
    _was_doubted: bool = False

    @staticmethod
    def of(runners: Mapping[str, Seq[Runner]], traits: Mapping[str, Traits], *, measures: bool) -> Costs:
        """Return the first costs of an engine: curves kept on this machine, and default curves for the other models.

        runners: the models of each drafter, by name; the target's models are under "". measures: whether to use kept
        curves, and to measure the other models when nothing runs.
        """
        costs = Costs(traits=traits)
        for name, models in runners.items():
            kept = [measuring.kept(runner) for runner in models] if measures else []
            curves = [curve for curve in kept if curve is not None]
            if len(curves) == len(models):
                costs._take(name, PassTime.together(curves), models)
            else:
                costs._take(name, PassTime.together([measuring.usual(runner) for runner in models]))
                costs.runners |= {name: models} if measures else {}
        if "" in runners and not costs._measured:
            costs.target.fit = Fit(costs.target)
        return costs

    def _take(self, name: str, curve: PassTime, measured: Seq[Runner] = ()) -> None:
        if name:
            self.drafts[name] = curve
        else:
            self.target, self._measured = curve, measured

    def measure(self, pause: Pause = NOW) -> None:
        """Measure the models that were not measured yet, and the target again if its curve was contradicted.

        When the pause ends, the measurement is given up, and begins anew at another time. A model for which the cache
        has no room now is also measured at another time. A model that fails is not measured again.
        """
        for name, models in list(self.runners.items()):
            try:
                curve = PassTime.together([self._measured_now(runner, pause) for runner in models])
            except Unwanted:
                return
            except BaseException:
                del self.runners[name]
                raise
            if curve.one_row_s is None:
                continue
            del self.runners[name]
            self._take(name, curve, () if self._was_doubted else models)
            if not name and not curve.is_steady:
                if float(curve.ratio(4)) < LEAST_STEEP:  # too flat for passes to tell how steep it is
                    usual = PassTime.together([measuring.usual(runner) for runner in models])
                    self.target = curve = replace(usual, one_row_s=curve.one_row_s)
                curve.fit = Fit(curve)

    def _measured_now(self, runner: Runner, pause: Pause) -> PassTime:
        """Return the curve of a model. Measure it now, unless another drafter or process has measured it meanwhile."""
        known = None if self._was_doubted else measuring.kept(runner)
        return known or measuring.of_runner(runner, pause)

    def draft(self, name: str) -> PassTime:
        """Return the curve of one drafter's passes; for a new drafter, a flat curve whose passes cost no time."""
        return self.drafts.setdefault(name, PassTime((1, 2), (1.0, 1.0)))

    def traits_of(self, draft: str) -> Traits:
        """Return the traits of a drafter."""
        return self.traits.get(draft, Traits())

    def target_s(self, num_rows: npt.ArrayLike) -> Floats:
        """Return the seconds of a target pass over `num_rows` rows.

        While the seconds of one row are unknown, the result is in passes of one row.
        """
        return (self.target.one_row_s or 1.0) * self.target.ratio(num_rows)

    def pass_s(self, draft: str, num_sequences: npt.ArrayLike) -> Floats:
        """Return the seconds of a drafter's pass over `num_sequences` sequences, with one row of each."""
        cost = self.draft(draft)
        return cost.ratio(num_sequences) * (cost.one_row_s or 0.0)

    def read_s(self, draft: str) -> float:
        """Return the seconds that a drafter's model takes for each token of a prompt."""
        if draft in self._reads_s:
            return self._reads_s[draft]
        cost = self.draft(draft)
        few, many = cost.ratio((16, 32))
        return float(many - few) / 16 * (cost.one_row_s or 0.0)

    def observe(self, report: StepReport) -> None:
        """Update the pass times with the report of a step. If it ran a prompt, only the drafters' reading counts."""
        for name, step in report.drafts.items():
            if step.num_catchup_tokens >= LEAST_READ:
                each_s = step.catchup_s / step.num_catchup_tokens
                had_s = self._reads_s.get(name, each_s)
                self._reads_s[name] = had_s + FRESH * (min(each_s, 3 * had_s) - had_s)
        if report.num_prefill_tokens or not report.num_decoding:
            return
        num_experts = report.num_experts or None
        ratio = float(self.target.ratio(report.num_rows, num_experts))
        self.target.observe(report.seconds - report.draft_s, ratio)
        if self.target.mixture is not None and num_experts is not None:
            self.target.mixture.observe(report.num_rows, num_experts)
        if self._measured and report.target_forward_s > 0 and self._doubt.observe(report.target_forward_s, ratio):
            LOG.info("passes take another time than was measured: they are measured again when nothing runs")
            self.runners[""], self._measured, self._was_doubted = self._measured, (), True
        for name, step in report.drafts.items():
            if step.passes and not step.num_catchup_tokens:
                cost = self.draft(name)
                num_ratios = step.passes * float(cost.ratio((step.num_nodes - step.num_found) / step.passes))
                cost.observe(step.seconds - step.search_s, num_ratios)
