"""The measurement of a model's passes: the time of a pass by its number of rows. A file keeps the result.

Drafting pays where a pass over several rows takes little more time than a pass over one row. The ratio of these times
depends on the machine, the weights and the kernels, and not on the text. So it is measured once, while nothing else
runs. Until then a default curve is used (`usual`). For a mixture of experts the ratio depends on the text, too
(mixing.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.blocks import Spec
from forerun.errors import CapacityError
from forerun.models.runner import Runner
from forerun.native import cache_folder
from forerun.pacing.mixing import Mixture, expected
from forerun.pacing.pass_time import WIDTHS, PassTime
from forerun.theory.roofline import expert_part

LOG = logging.getLogger(__name__)
NARROW_ROWS = 8  # passes of at most so many rows are narrow: they are timed before the wide ones
SETTLING_PASSES = 40  # the most passes before the first that is timed
NUM_ROUNDS = 5
LEAST_LIMIT_S, LIMIT_PASSES = 0.7, 12  # a calibration takes at most the larger of 0.7 s and 12 passes of one row
UNLIKE_PASSES = 36  # in place of 12, where each row brings experts of its own, so that 8 rows take 5 times as long
AGREEMENT = 1.1  # the factor by which the middle rounds of a calibration may differ if it is kept for later processes
KEPT_S = 30 * 86400.0  # how long a calibration is kept
CONTEXT_TOKENS = 128  # before the rows of a calibration: attention to them takes longer for more rows, too


class Unwanted(Exception):
    """A calibration was given up because a request waits."""


@dataclass(frozen=True)
class Pause:
    """The time in which passes may be measured.

    goes_on: returns whether the time goes on; by default it never ends. turn: returns the context in which each pass
    runs; by default passes wait for nothing.
    """

    goes_on: Callable[[], bool] = lambda: True
    turn: Callable[[], AbstractContextManager[Any]] = nullcontext

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Return the context in which one pass runs. Raises Unwanted if the pause has ended."""
        if not self.goes_on():
            raise Unwanted
        with self.turn():
            yield


NOW = Pause()


def kept(runner: Runner) -> PassTime | None:
    """Return the pass times of a model that were measured and kept on this machine; None if there are none."""
    return _read(_path_of(runner), runner.has_experts)


def of_runner(runner: Runner, pause: Pause = NOW) -> PassTime:
    """Measure the pass times of a model on this machine, and keep them for later processes.

    Nothing is kept if repeated measurements differ much, because other programs were running. The curve's `one_row_s`
    is None if nothing could be measured. pause: the time in which passes may be measured. Raises Unwanted if it ends.
    """
    curve = measured(runner, CONTEXT_TOKENS, pause)
    if curve.one_row_s is None:  # the cache may have no room for the context
        curve = measured(runner, 0, pause)
    if curve.one_row_s is None:  # nothing is kept, so that a later engine tries again
        return curve
    if not curve.is_steady:
        LOG.info("measured what passes of this model take beside other work: measured again by the next process")
        return curve
    path = _path_of(runner)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_written(curve)), encoding="utf-8")
        LOG.info("measured what passes of this model take, once: kept in %s", path)
    except OSError as error:
        LOG.warning("measured what passes of this model take; %s cannot be written (%s)", path, error)
    return curve


def _path_of(runner: Runner) -> Path:
    what = f"{runner.fingerprint} behind {CONTEXT_TOKENS}" + ", alike and unlike" * runner.has_experts
    return cache_folder() / f"passes-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


def _written(curve: PassTime) -> list[Any]:
    """Return a newly measured curve as the list that its JSON file holds."""
    mixture = curve.mixture
    experts = [] if mixture is None else [[mixture.num, mixture.alike, mixture.unlike, mixture.extra]]
    return [curve.widths, curve.ratios, curve.one_row_s, time.time(), *experts]


def _read(path: Path, has_experts: bool) -> PassTime | None:
    """Return the curve that a file holds; None where the file holds no valid curve.

    A file may be missing, cut off, too old, or written by another version of forerun.
    """
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
    """Return the Mixture that a file describes. Raises ValueError for values that are not possible."""
    alike, unlike, extra = numbers = np.array(columns, dtype=np.float64)
    is_mixture = numbers.shape[1] == len(widths) and np.isfinite(numbers).all() and (numbers >= 0).all()
    if not (is_mixture and alike.min() > 0 and num >= max(alike.max(), unlike.max()) and (np.diff(extra) >= 0).all()):
        raise ValueError("no mixture of experts")
    return Mixture(float(num), widths, alike.tolist(), unlike.tolist(), extra.tolist())


def usual(runner: Runner) -> PassTime:
    """Return the default curve of an unmeasured model: each further row adds the same share of a pass of one row."""
    ratios = [1 + runner.model.ops.extra_row * (rows - 1) for rows in WIDTHS]
    spec = runner.model.config if runner.has_experts else None
    if not isinstance(spec, Spec):
        return PassTime(WIDTHS, ratios)
    mixed = [block.experts for block in spec.blocks if block.experts is not None]
    num, chosen = (round(statistics.fmean(sizes)) for sizes in zip(*[(e.num, e.chosen) for e in mixed], strict=True))
    return PassTime(WIDTHS, ratios, mixture=expected(num, chosen, expert_part(spec), WIDTHS))


def measured(runner: Runner, num_behind: int = 0, pause: Pause = NOW, **given: Any) -> PassTime:
    """Measure the curve of a model after `num_behind` context tokens.

    A mixture of experts is measured over equal rows and over unlike rows, together with the number of experts that the
    router chose for these rows. Returns the default curve where nothing could be measured. given: arguments of
    `calibrated`. Raises Unwanted when the pause ends.
    """

    def try_pass(num_rows: int) -> None:
        with pause.one_pass():
            runner.try_pass(num_rows, num_behind)

    if not runner.has_experts:
        return calibrated(try_pass, **given)
    chosen = {is_alike: defaultdict[float, list[float]](list) for is_alike in (False, True)}
    try:
        with runner.scratch(num_behind) as scratch:

            def run(num_rows: int, is_alike: bool) -> None:
                with pause.one_pass():
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
    """Measure the curve: run passes of all widths in turn, in several rounds. A width is a number of rows.

    The first width is one row. In each round the time of each width is divided by the time of one row, so that it does
    not matter if the machine slows down from round to round. The ratio of a width is the median over the rounds, and at
    least the ratio of the width before it. Wide passes are timed last, and their time is divided by the time of the
    widest narrow pass instead. While a wide pass computes, other processes push weights out of the processor's
    last-level cache. So a pass of one row after a wide pass would take up to twice as long as in plain decoding. Where
    the time limit is too short, rounds are left out first, and then widths. A width for which the cache has no room is
    left out, too. Where nothing could be measured, the built-in curve is returned.
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
    """Rounds of timed passes, up to a time limit.

    The limit is the longer of `least_limit_s` seconds and `limit_passes` passes of one row.
    """

    def __init__(
        self, run: Callable[[int], Any], clock: Callable[[], float], least_limit_s: float, limit_passes: int
    ) -> None:
        self.run, self.clock, self.limit_s, self.begun, self.last_s = run, clock, least_limit_s, clock(), 0.0
        self.limit_passes = limit_passes

    agree = False  # whether the rounds that were timed last are alike

    def settle(self) -> None:
        """Run passes of one row for a tenth of the limit, because weights reach the caches only little by little."""
        self.timed(1)
        self.limit_s = max(self.limit_s, self.limit_passes * self.last_s)
        for _ in range(SETTLING_PASSES):
            if self.clock() - self.begun + self.last_s > self.limit_s / 10:
                break
            self.timed(1)

    def of(self, widths: Seq[int]) -> tuple[dict[int, float], list[float]]:
        """Measure passes of `widths` in rounds. Returns ratios by width, and the first width's seconds in each round.

        In each round, the time of each width is divided by the first width's time. The ratio of a width is the median
        over the rounds. The first width has no ratio.
        """
        firsts_s = list[float]()
        ratios = {rows: list[float]() for rows in widths[1:]}
        try:
            while len(firsts_s) < NUM_ROUNDS and not self._is_over(self.last_s):
                firsts_s.append(self.timed(widths[0]))
                for rows, samples in ratios.items():
                    if self._is_over(2 * self.last_s):  # twice the rows take at most twice as long
                        break
                    samples.append(self.timed(rows) / firsts_s[-1])
        except CapacityError:
            LOG.info("the KV cache has no room for a whole calibration")
        self.agree = all(_agree(samples) for samples in (firsts_s, *ratios.values()))
        return {rows: statistics.median(samples) for rows, samples in ratios.items() if samples}, firsts_s

    def timed(self, rows: int) -> float:
        """Run a pass over `rows` rows, and return its seconds."""
        start = self.clock()
        self.run(rows)
        self.last_s = self.clock() - start
        return self.last_s

    def _is_over(self, next_s: float) -> bool:
        return self.clock() - self.begun + next_s > self.limit_s


def _agree(measurements: Seq[float]) -> bool:
    """Return whether measurements agree. The least and the largest of four or more measurements do not count."""
    middle = sorted(measurements)[1:-1] if len(measurements) > 3 else measurements
    return not middle or max(middle) <= AGREEMENT * min(middle)
