"""The time of a pass by its rows, which is measured once, kept in a file, and updated by one slow average.

Drafting pays where a pass over several rows takes little more time than a pass over one row. That ratio depends on the
machine, the weights and the kernels, not on the text, so it is measured before the first draft and not learned. Of a
mixture of experts it depends on the text, too: see mixing.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.blocks import Spec
from forerun.errors import CapacityError
from forerun.models.runner import Runner
from forerun.native import cache_folder
from forerun.pacing.mixing import Mixture, expected
from forerun.theory.roofline import expert_part
from forerun.types import StepReport

LOG = logging.getLogger(__name__)
Floats = npt.NDArray[np.float64]
WIDTHS = (1, 2, 4, 8, 16, 32)  # rows
NARROW_ROWS = 8  # of the passes that are timed before the wide ones
SETTLING_PASSES = 40  # at most, before the first that is timed
NUM_ROUNDS = 5
LEAST_LIMIT_S, LIMIT_PASSES = 0.7, 12  # a calibration takes at most the larger of 0.7 s and 12 passes of one row
UNLIKE_PASSES = 36  # in place of 12, where each row brings experts of its own, so that 8 rows take 5 times as long
AGREEMENT = 1.1  # by which the middle rounds of a calibration may differ that is kept for later processes
KEPT_S = 30 * 86400.0  # for so long
CONTEXT_TOKENS = 128  # behind the rows of a calibration: attention to them takes longer for more rows, too
FRESH = 0.02  # weight of a new measurement in the slow average
WIDE = 1.1  # passes of one row that a pass takes which says something of the curve
NUM_PASSES = 64  # narrow ones, and wide ones, before they can contradict the curve
MUCH = 1.5  # by which wide passes must be slower or faster than the curve says


@dataclass
class PassTime:
    """Time of a pass: `ratios[i]` times a pass of one row at `widths[i]` rows, linear between and beyond.

    one_row_s: seconds of a pass of one row, None until one was measured; `observe` updates it. is_steady: whether the
    rounds of its calibration agreed, so that it says something of another hour, too. mixture: of experts, what passes
    take longer than these ratios, which are of rows that all choose the same ones; None = there are no experts.
    """

    widths: Seq[float] = WIDTHS
    ratios: Seq[float] = (1.0, 1.02, 1.06, 1.3, 2.2, 4.2)  # between an AVX2 and an AVX-512 server, bfloat16
    one_row_s: float | None = None
    is_steady: bool = True
    mixture: Mixture | None = None
    _num_seen: int = 0

    def __post_init__(self) -> None:
        far, last = 1e6, self.widths[-1]  # where the last slope leads
        slope = (self.ratios[-1] - self.ratios[-2]) / (last - self.widths[-2])
        self._rows = np.array([*self.widths, far])
        self._passes = np.array([*self.ratios, self.ratios[-1] + slope * (far - last)])

    def ratio(self, num_rows: npt.ArrayLike, num_experts: float | None = None) -> Floats:
        """Return the time of a pass over `num_rows` rows, in passes of one row, elementwise.

        num_experts: that they have chosen, on average over layers; None = as many as such rows usually do.
        """
        passes = np.asarray(np.interp(np.asarray(num_rows), self._rows, self._passes))
        return passes if self.mixture is None else passes + self.mixture.extra_passes(num_rows, num_experts)

    def observe(self, seconds: float, num_ratios: float) -> None:
        """Update the average by a pass of `seconds`, which should take as long as `num_ratios` passes of one row."""
        self._num_seen += 1
        had = self.one_row_s or seconds / num_ratios
        found = min(seconds / num_ratios, 3 * had)  # another process may have held one pass up
        self.one_row_s = had + max(FRESH, 1 / (self._num_seen + 1)) * (found - had)

    @staticmethod
    def together(curves: Seq[PassTime]) -> PassTime:
        """Return the time of a pass of several models, one after the other; the built-in curve if one is unknown."""
        known = [(curve, curve.one_row_s) for curve in curves if curve.one_row_s is not None]
        if len(curves) == 1 or len(known) < len(curves):
            return curves[0] if len(curves) == 1 else PassTime()
        widths = max((curve.widths for curve in curves), key=len)
        seconds = np.sum([curve.ratio(widths) * one_row_s for curve, one_row_s in known], axis=0)
        return PassTime(widths, (seconds / seconds[0]).tolist(), float(seconds[0]))


class _Doubt:
    """Whether passes of steps contradict a curve: the wide ones must say of one row what the narrow ones say."""

    def __init__(self) -> None:
        self._counts = {False: 0, True: 0}
        self._logs = {False: 0.0, True: 0.0}  # decaying mean of the logarithm of the seconds of one row

    def observe(self, seconds: float, ratio: float) -> bool:
        """Add a pass; return whether the curve is contradicted. ratio: what it should take, in passes of one row."""
        is_wide = ratio > WIDE
        self._counts[is_wide] += 1
        weight = 1 / min(self._counts[is_wide], NUM_PASSES)
        self._logs[is_wide] += weight * (math.log(seconds / ratio) - self._logs[is_wide])
        is_enough = min(self._counts.values()) >= NUM_PASSES
        return is_enough and abs(self._logs[True] - self._logs[False]) > math.log(MUCH)


@dataclass(frozen=True)
class Traits:
    """What a drafter is like.

    tells_confidence: whether it tells how sure it is of what it drafts. searches: whether it searches the text before
    it asks its model. is_free: whether it has no model, so that its guesses cost the same whatever they are.
    """

    tells_confidence: bool = False
    searches: bool = False
    is_free: bool = False


@dataclass
class Costs:
    """The times of an engine's passes, and what its drafters are like.

    drafts: by drafter; one without a model counts as free until a step of it was seen. runners: the models to calibrate
    before the first draft, by drafter, the target under ""; without runners the curves stay as they are. traits: by
    drafter.
    """

    target: PassTime = field(default_factory=PassTime)
    drafts: dict[str, PassTime] = field(default_factory=dict)
    runners: Mapping[str, Seq[Runner]] = field(default_factory=dict)
    traits: Mapping[str, Traits] = field(default_factory=dict)
    _calibrated: Seq[Runner] = ()  # of the target, until its curve was contradicted once
    _doubt: _Doubt = field(default_factory=_Doubt)
    _is_contradicted: bool = False

    def ready(self) -> None:
        """Calibrate the models that were not calibrated yet, and the target again where its curve was contradicted."""
        found = {
            name: PassTime.together([of_runner(runner, self._is_contradicted) for runner in runners])
            for name, runners in self.runners.items()
        }
        self._calibrated = () if self._is_contradicted else self.runners.get("", self._calibrated)
        self._is_contradicted = False
        self.runners = {}
        self.target = found.pop("", self.target)
        self.drafts.update(found)

    def draft(self, name: str) -> PassTime:
        """Return the time of a pass of one drafter."""
        return self.drafts.setdefault(name, PassTime((1, 2), (1.0, 1.0)))

    def traits_of(self, draft: str) -> Traits:
        """Return what a drafter is like."""
        return self.traits.get(draft, Traits())

    def target_s(self, num_rows: npt.ArrayLike) -> Floats:
        """Return the seconds of a pass of the target; in passes of one row while those are not known."""
        return (self.target.one_row_s or 1.0) * self.target.ratio(num_rows)

    def pass_s(self, draft: str, num_sequences: npt.ArrayLike) -> Floats:
        """Return the seconds of a pass of a drafter over one row of so many sequences."""
        cost = self.draft(draft)
        return cost.ratio(num_sequences) * (cost.one_row_s or 0.0)

    def read_s(self, draft: str) -> float:
        """Return the seconds that a drafter's model takes for each token of a prompt."""
        cost = self.draft(draft)
        few, many = cost.ratio((16, 32))
        return float(many - few) / 16 * (cost.one_row_s or 0.0)

    def observe(self, report: StepReport) -> None:
        """Update the averages by a step, unless it ran a prompt."""
        if report.num_prefill_tokens or not report.num_decoding:
            return
        num_experts = report.num_experts or None
        ratio = float(self.target.ratio(report.num_rows, num_experts))
        self.target.observe(report.seconds - report.draft_s, ratio)
        if self.target.mixture is not None and num_experts is not None:
            self.target.mixture.observe(report.num_rows, num_experts)
        if self._calibrated and report.target_forward_s > 0 and self._doubt.observe(report.target_forward_s, ratio):
            LOG.info("passes take another time than was measured: they are measured again when nothing runs")
            self.runners = {"": self._calibrated}
            self._calibrated = ()
            self._is_contradicted = True
        for name, step in report.drafts.items():
            if step.passes and not step.num_catchup_tokens:
                cost = self.draft(name)
                num_ratios = step.passes * float(cost.ratio((step.num_nodes - step.num_found) / step.passes))
                cost.observe(step.seconds - step.search_s, num_ratios)


def of_runner(runner: Runner, anew: bool = False) -> PassTime:
    """Return the curve of a model on this machine, from the cache folder, else measured and written there.

    anew: whether it is measured although a curve was kept.
    """
    what = f"{runner.fingerprint} behind {CONTEXT_TOKENS}" + ", alike and unlike" * runner.has_experts
    name = hashlib.sha256(what.encode()).hexdigest()[:16]
    path = cache_folder() / f"passes-{name}.json"
    if not anew and (kept := _kept(path, runner.has_experts)):
        return kept
    found = measured(runner, CONTEXT_TOKENS)
    if found.one_row_s is None:  # such a text may have no room
        found = measured(runner)
    if found.one_row_s is None:  # nothing was measured, so that a later engine must try again
        return found
    if not found.is_steady:
        LOG.info("measured what passes of this model take beside other work: measured again by the next process")
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_written(found)), encoding="utf-8")
        LOG.info("measured what passes of this model take, once: kept in %s", path)
    except OSError as error:
        LOG.warning("measured what passes of this model take; %s cannot be written (%s)", path, error)
    return found


def _written(curve: PassTime) -> list[Any]:
    """Return what is kept of a curve that was measured now."""
    mixture = curve.mixture
    experts = [] if mixture is None else [[mixture.num, mixture.alike, mixture.unlike, mixture.extra]]
    return [curve.widths, curve.ratios, curve.one_row_s, time.time(), *experts]


def _kept(path: Path, has_experts: bool) -> PassTime | None:
    """Return the curve that a file holds, None where it holds none: it may be of another version, or cut off."""
    try:
        widths, ratios, one_row_s, measured_at, *experts = json.loads(path.read_text(encoding="utf-8"))
        numbers = np.array([widths, ratios], dtype=np.float64)
        is_curve = bool((numbers > 0).all() and (np.diff(numbers[0]) > 0).all() and (np.diff(numbers[1]) >= 0).all())
        is_curve = is_curve and abs(time.time() - measured_at) < KEPT_S and len(experts) == has_experts
        if is_curve and numbers.shape[1] > 1 and np.isfinite(numbers).all() and 0 < float(one_row_s) < np.inf:
            mixture = _mixture_of(widths, *experts[0]) if has_experts else None
            return PassTime(widths, ratios, float(one_row_s), mixture=mixture)
    except (OSError, ValueError, TypeError, RecursionError):
        pass
    return None


def _mixture_of(widths: Seq[float], num: float, *columns: Seq[float]) -> Mixture:
    """Return what a file holds of a mixture. Raises ValueError for numbers that are none of one."""
    alike, unlike, extra = numbers = np.array(columns, dtype=np.float64)
    is_mixture = numbers.shape[1] == len(widths) and np.isfinite(numbers).all() and (numbers >= 0).all()
    if not (is_mixture and alike.min() > 0 and num >= max(alike.max(), unlike.max()) and (np.diff(extra) >= 0).all()):
        raise ValueError("no mixture of experts")
    return Mixture(float(num), widths, alike.tolist(), unlike.tolist(), extra.tolist())


def usual(runner: Runner) -> PassTime:
    """Return the curve of a model of which nothing was measured."""
    spec = runner.model.config if runner.has_experts else None
    if not isinstance(spec, Spec):
        return PassTime()
    mixed = [block.experts for block in spec.blocks if block.experts is not None]
    num, chosen = (round(statistics.fmean(sizes)) for sizes in zip(*[(e.num, e.chosen) for e in mixed], strict=True))
    return PassTime(mixture=expected(num, chosen, expert_part(spec), WIDTHS))


def measured(runner: Runner, num_behind: int = 0, **given: Any) -> PassTime:
    """Measure the curve of a model behind so many tokens; the usual one where nothing could be measured.

    Of a mixture of experts over rows of one token and over unlike ones, with the experts that they chose. given: as
    `calibrated` takes them.
    """
    if not runner.has_experts:
        return calibrated(lambda num_rows: runner.try_pass(num_rows, num_behind), **given)
    chosen = {is_alike: defaultdict[float, list[float]](list) for is_alike in (False, True)}
    try:
        with runner.scratch(num_behind) as scratch:

            def run(num_rows: int, is_alike: bool) -> None:
                chosen[is_alike][num_rows].append(scratch(num_rows, is_alike))

            unlike = calibrated(lambda num_rows: run(num_rows, False), **given, limit_passes=UNLIKE_PASSES)
            alike = calibrated(lambda num_rows: run(num_rows, True), **given)
    except CapacityError:
        return usual(runner)
    widths = [rows for rows in unlike.widths if rows in alike.widths]
    default = usual(runner)
    if unlike.one_row_s is None or alike.one_row_s is None or len(widths) < 2 or default.mixture is None:
        return default
    ratios = alike.ratio(widths)
    extra = np.maximum.accumulate(np.maximum(0.0, unlike.ratio(widths) - ratios))
    alike_num, unlike_num = ([statistics.fmean(chosen[kind][rows]) for rows in widths] for kind in (True, False))
    mixture = Mixture(default.mixture.num, widths, alike_num, unlike_num, extra.tolist())
    is_steady = unlike.is_steady and alike.is_steady
    return PassTime(widths, ratios.tolist(), unlike.one_row_s, is_steady, mixture)


def calibrated(
    run: Callable[[int], Any],
    clock: Callable[[], float] = time.perf_counter,
    widths: Seq[int] = WIDTHS,
    least_limit_s: float = LEAST_LIMIT_S,
    limit_passes: int = LIMIT_PASSES,
) -> PassTime:
    """Measure the curve: run passes of all widths in turn, in several rounds. The first width is one row.

    In each round the time of a width is divided by the time of one row, so that it does not matter if the machine slows
    down from round to round. The ratio of a width is the median of its rounds, and at least that of the width before.
    Wide passes are timed last, and against the widest of the narrow ones. While a wide pass computes, the processor's
    last cache loses weights to other processes, and a pass of one row behind it takes up to twice as long as it does in
    plain decoding. At the time limit rounds are dropped, then widths. A width for which the cache has no room is
    dropped, too. Where nothing could be measured the built-in curve is returned.
    """
    rounds = _Rounds(run, clock, least_limit_s, limit_passes)
    try:
        rounds.settle()
    except CapacityError:
        return PassTime()
    narrow = [rows for rows in widths if rows <= NARROW_ROWS]
    known, ones_s = rounds.of(narrow)
    is_steady = rounds.agree
    last = max([rows for rows in narrow if rows in known], default=1)
    if last == narrow[-1] and len(narrow) < len(widths):
        more, _ = rounds.of([last, *(rows for rows in widths if rows > NARROW_ROWS)])
        known |= {rows: known.get(last, 1.0) * ratio for rows, ratio in more.items()}
    curve = np.maximum.accumulate([1.0, *known.values()]).tolist()
    return PassTime([1, *known], curve, statistics.median(ones_s), is_steady) if known else PassTime()


class _Rounds:
    """Times passes until a limit: seconds, or passes as long as the first one."""

    def __init__(
        self, run: Callable[[int], Any], clock: Callable[[], float], least_limit_s: float, limit_passes: int
    ) -> None:
        self.run, self.clock, self.limit_s, self.begun, self.last_s = run, clock, least_limit_s, clock(), 0.0
        self.limit_passes = limit_passes

    agree = False  # whether the rounds that were timed last are alike

    def settle(self) -> None:
        """Run passes of one row within a small part of the limit: weights come into caches only little by little."""
        self.timed(1)
        self.limit_s = max(self.limit_s, self.limit_passes * self.last_s)
        for _ in range(SETTLING_PASSES):
            if self.clock() - self.begun + self.last_s > self.limit_s / 10:
                break
            self.timed(1)

    def of(self, widths: Seq[int]) -> tuple[dict[int, float], list[float]]:
        """Return the time of each width but the first over that of the first, and the seconds of the first."""
        firsts_s, ratios = list[float](), {rows: list[float]() for rows in widths[1:]}
        try:
            while len(firsts_s) < NUM_ROUNDS and not self._is_over(self.last_s):
                firsts_s.append(self.timed(widths[0]))
                for rows, found in ratios.items():
                    if self._is_over(2 * self.last_s):  # twice the rows take at most twice as long
                        break
                    found.append(self.timed(rows) / firsts_s[-1])
        except CapacityError:
            LOG.info("the KV cache has no room for a whole calibration")
        self.agree = all(_agree(found) for found in (firsts_s, *ratios.values()))
        return {rows: statistics.median(found) for rows, found in ratios.items() if found}, firsts_s

    def timed(self, rows: int) -> float:
        """Run a pass, and return its seconds."""
        start = self.clock()
        self.run(rows)
        self.last_s = self.clock() - start
        return self.last_s

    def _is_over(self, next_s: float) -> bool:
        return self.clock() - self.begun + next_s > self.limit_s


def _agree(found: Seq[float]) -> bool:
    """Whether measurements are alike, but for the least and the largest of four and more."""
    middle = sorted(found)[1:-1] if len(found) > 3 else found
    return not middle or max(middle) <= AGREEMENT * min(middle)
