"""`forerun tune`: whether to draft, with which drafter and how far, for these prompts, this model and this machine.

1. Each drafter runs the prompts once with the longest drafts, in turns with plain decoding. This shows which of its
   guesses are right, and how long drafting takes.
2. The time of a pass is measured for many numbers of rows (as in pacing/measuring.py, but in smaller steps). The
   results of steps 1 and 2 predict the speed-up of every drafter at every length (tune_prediction.py).
3. The most promising lengths, some drafters with `pacing=auto`, and plain decoding run in turns until the time is over.
   The times of their passes improve the predictions. If an unmeasured length then has a higher predicted speed-up than
   all measured ways, it is measured, too. The fastest way is chosen, or plain decoding where no way was faster by
   PLAIN_MARGIN.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from forerun.bench.exhibits import check_picture
from forerun.bench.latency import progress_bar, rotated
from forerun.bench.plans import TunePlan
from forerun.bench.results import Tally, Variant
from forerun.bench.tune_engine import TuningEngine, candidates_of
from forerun.bench.tune_picture import draw
from forerun.bench.tune_prediction import LONGEST, Passes, Prediction, Predictor, Turn, alphas, full_steps, per_token_s
from forerun.bench.tune_results import (
    PLAIN,
    Contender,
    Found,
    Way,
    chosen_of,
    config_of,
    measured_of,
    print_found,
    write_config,
)
from forerun.bench.widen import load_widened, measured_target
from forerun.config import EngineConfig
from forerun.text.terminal import make_console

PROBE_SHARE = 0.35  # the share of the time that step 1 may take
FEWEST_ROUNDS = 2  # of step 3, however little time is left
MOST_ROUNDS = 15
PLAIN_EVERY = 8  # after this many ways of a turn, plain decoding runs once more
SEARCH_ROUNDS = 4  # the first rounds of step 3: after each of them, a further length may be added
NUM_FIXED, NUM_AUTO = 4, 2  # the ways that are measured at first: with fixed lengths, and with auto
HOPELESS = 0.85  # the predicted speed-up below which a fixed length is not measured
CLOSE = 0.97  # the share of the best prediction above which a second length of the same drafter is measured
OUT = 0.9  # the share of the best measured speed-up below which a way is not measured after FEWEST_ROUNDS


def run(config: EngineConfig, plan: TunePlan) -> dict[str, Any]:
    """Measure, print the results, write the config file, and return the results for JSON.

    Raises UserError where the measurement is impossible, and InternalError where a drafter fails.
    """
    console = make_console()
    opened = measured_target(config, plan.shape)
    config = opened.config
    check_picture(plan.picture)
    candidates = candidates_of(opened, plan)
    checkpoint = load_widened(opened, plan.shape, console)
    bench = TuningEngine.of(checkpoint, config, plan, candidates, console)
    result = tuned(bench, console)
    print_found(result, console)
    if plan.picture is not None:
        draw(result, plan.picture, "shipped model" if opened.is_shipped else checkpoint.name)
        console.print(f"{plan.picture}: speed-up by draft length, predicted and measured")
    options = config_of(result.chosen, config, plan.concurrency)
    if plan.out is not None:
        write_config(plan.out, options, result)
    print_use(options, plan.out, console)
    return {
        "bench": "tune",
        "target": checkpoint.name,
        "build": checkpoint.model.ops.build,
        "precision": checkpoint.model.precision,
        "num_prompts": result.num_prompts,
        "config": options,
        **result.as_dict(),
    }


def print_use(options: Mapping[str, Any], out: Path | None, console: Console) -> None:
    """Print the options, or how to use the config file that holds them."""
    if out is None:
        console.print(f"Options: {', '.join(f'{k}={v}' for k, v in options.items())}; --out FILE writes a config file.")
    else:
        console.print(f'Written to {out}: forerun generate --config {out} "..." uses it, as every command does.')


# ------------------------------------------------------------------------------------------------------------ measuring


def tuned(bench: TuningEngine, console: Console) -> Found:
    """Probe the drafters, measure the pass times, measure the most promising ways to draft, and return all results."""
    plan, begun = bench.plan, time.monotonic()
    drawn = "greedy" if plan.temperature == 0 else f"temperature {plan.temperature:g}"
    at_once = "one request" if plan.concurrency == 1 else f"{plan.concurrency} requests"
    num_prompts = sum(map(len, bench.groups))
    console.print(
        f"{num_prompts} prompt{'s' * (num_prompts != 1)}, at most {plan.max_tokens} tokens, {drawn}, {at_once} at a "
        f"time, about {plan.minutes:g} min: {len(bench.candidates)} drafters in turns with plain decoding"
    )
    with progress_bar() as progress:
        turns = _probe(bench, begun + 60 * plan.minutes * PROBE_SHARE, progress)
        progress.add_task("what passes take", total=None)
        curve = bench.pass_times()
        passes = Passes(lambda rows: float(curve.ratio(rows)), _together(turns))
        for turn in (turn for spec_turns in turns.values() for turn in spec_turns):
            passes.add(turn.plain.steps, turn.drafted.steps)
        predictors = {spec: Predictor(spec_turns, passes, bench.runs_model(spec)) for spec, spec_turns in turns.items()}
        contenders = _race(bench, predictors, passes, begun + 60 * plan.minutes, progress)
    num_used = sum(map(len, bench.groups))
    if num_used < num_prompts:
        console.print(f"There was time for the first {num_used} of them: more --minutes, or fewer prompts, use all")
    chosen, doubt = chosen_of(contenders, num_used)
    return Found(
        predictions={spec: predictor.all() for spec, predictor in predictors.items()},
        contenders=contenders,
        chosen=chosen,
        doubt=doubt,
        alphas={
            spec: alphas([text for turn in spec_turns for text in turn.texts]) for spec, spec_turns in turns.items()
        },
        alpha_hats={spec: _alpha_hat(spec_turns) for spec, spec_turns in turns.items()},
        pass_s=curve.one_row_s,
        curve={int(rows): float(ratio) for rows, ratio in zip(curve.widths, curve.ratio(curve.widths), strict=True)},
        v={int(rows): passes.v(rows) for rows in curve.widths if rows >= plan.concurrency},
        num_prompts=num_used,
        seconds=time.monotonic() - begun,
    )


def _probe(bench: TuningEngine, until: float, progress: Progress) -> dict[str, list[Turn]]:
    """Run step 1, and return each drafter's turns: the runs of a group of prompts with and without the drafter.

    Groups of prompts for which no time is left are dropped, also for step 3. until: the time, by time.monotonic(), at
    which no time is left.
    """
    ways = [Way(PLAIN, 0), *(Way(spec, LONGEST) for spec in bench.candidates)]
    task = progress.add_task("what is guessed right", total=len(ways) * (len(bench.groups) + 1))
    for way in ways:
        bench.warm_up(way)
        progress.advance(task)
    turns: dict[str, list[Turn]] = {spec: [] for spec in bench.candidates}
    for group in range(len(bench.groups)):
        if group and time.monotonic() > until:
            bench.groups = bench.groups[:group]
            break
        tallies = dict[str, Tally]()
        for way in rotated(ways, group):
            progress.update(task, description=f"what is guessed right: {way.draft}")
            tallies[way.draft] = Tally(Variant(way.draft, 0), bench.plan.temperature)
            bench.once(way, group, "probe", tallies[way.draft], detail=way.draft != PLAIN)
            progress.advance(task)
        for spec in bench.candidates:
            turns[spec].append(Turn(tallies[PLAIN], tallies[spec]))
    progress.remove_task(task)
    return turns


def contenders_of(predictions: Mapping[str, Seq[Prediction]]) -> list[Way]:
    """Return the ways to measure: plain decoding, the most promising fixed lengths, and drafters with pacing=auto.

    Each of the best drafters is measured at its best length. The best drafter is also measured at a second length. The
    second length is the length farthest from the best length, among the lengths that are predicted to reach CLOSE times
    the best speed-up. A drafter that was never right is not measured.
    """
    is_right = {spec for spec, lengths in predictions.items() if any(one.tokens_per_pass > 1 for one in lengths)}
    best = {spec: max(predictions[spec], key=lambda one: one.speedup) for spec in predictions if spec in is_right}
    order = sorted(best, key=lambda spec: -best[spec].speedup)
    fixed = [Way(spec, best[spec].spec_length) for spec in order if best[spec].speedup > HOPELESS][: NUM_FIXED - 1]
    for first in order[:1]:
        close = [one.spec_length for one in predictions[first] if one.speedup > CLOSE * best[first].speedup]
        other = max(close, key=lambda length: (abs(length - best[first].spec_length), -length))
        fixed += [Way(first, other)] if fixed and other != best[first].spec_length else []
    return [Way(PLAIN, 0), *fixed, *(Way(spec, None) for spec in order[:NUM_AUTO])]


def _alpha_hat(turns: Seq[Turn]) -> float | None:
    tested, accepted = (sum(turn.drafted.total(name) for turn in turns) for name in ("num_tested", "num_accepted"))
    return accepted / tested if tested else None


def prediction_of(way: Way, predictions: Mapping[str, Seq[Prediction]]) -> Prediction | None:
    """Return the prediction for a way; None for plain decoding and pacing=auto."""
    if way.spec_length is None or way.draft == PLAIN:
        return None
    return next(one for one in predictions[way.draft] if one.spec_length == way.spec_length)


def _race(
    bench: TuningEngine, predictors: Mapping[str, Predictor], passes: Passes, until: float, progress: Progress
) -> list[Contender]:
    """Run step 3: rounds in which every way to draft runs all prompts. Returns the ways with their measurements.

    There are at least FEWEST_ROUNDS rounds, and more until the time `until`, by time.monotonic(). predictors: by spec
    of the drafter.
    """
    predictions = {spec: predictor.all() for spec, predictor in predictors.items()}
    contenders = [Contender(way, prediction_of(way, predictions)) for way in contenders_of(predictions)]
    task = progress.add_task("measuring", total=FEWEST_ROUNDS * len(contenders) * len(bench.groups))
    for contender in contenders:
        if contender.way.spec_length is None:
            bench.warm_up(contender.way)
    for number in range(MOST_ROUNDS):
        begun = time.monotonic()
        one_round(bench, contenders, number, progress, task, passes)
        now = time.monotonic()
        for one in contenders:
            one.measured = measured_of(one.seconds, contenders[0].seconds)
        is_late = now + (now - begun) > until
        if is_late and all(one.is_out or one.measured.num_rounds >= FEWEST_ROUNDS for one in contenders):
            break
        drop_slow(contenders)
        if number == 0 or (number < SEARCH_ROUNDS and not is_late):
            predictions = {spec: predictor.all() for spec, predictor in predictors.items()}
            contenders += [Contender(way, prediction_of(way, predictions)) for way in further(contenders, predictions)]
        left = max(1, min(MOST_ROUNDS - number - 1, int((until - now) / (now - begun))))
        total = left * len(bench.groups) * sum(not one.is_out for one in contenders)
        progress.update(task, completed=0, total=total)
    progress.remove_task(task)
    return contenders


def further(contenders: Seq[Contender], predictions: Mapping[str, Seq[Prediction]]) -> list[Way]:
    """Return the unmeasured length with the highest predicted speed-up; [] if a measured way has that speed-up.

    Each drafter's predictions are corrected first, by the median of measured / predicted speed-up over the drafter's
    measured lengths.
    """
    known = {one.way for one in contenders}
    best = max(one.measured.speedup for one in contenders)
    promising = list[tuple[float, Way]]()
    for spec, lengths in predictions.items():
        fixed = [one for one in contenders if one.way.draft == spec and one.way.spec_length]
        if fixed:
            now = [prediction_of(one.way, predictions) for one in fixed]
            errors = [one.measured.speedup / guess.speedup for one, guess in zip(fixed, now, strict=True) if guess]
            ways = [(one.speedup * median(errors), Way(spec, one.spec_length)) for one in lengths]
            promising += [(speedup, way) for speedup, way in ways if speedup > best and way not in known]
    return [max(promising, key=lambda pair: pair[0])[1]] if promising else []


def one_round(
    bench: TuningEngine,
    contenders: Seq[Contender],
    number: int,
    progress: Progress,
    task: TaskID,
    passes: Passes | None = None,
) -> None:
    """Run all prompts with each contender that is not out, in turns.

    number: the round's number, from 0; it sets the order of the contenders. task: the task of `progress` to advance.
    passes: the predicted pass times, which the passes of this round correct.
    """
    plain = contenders[0]
    running = [one for one in contenders if not one.is_out]
    for group in range(len(bench.groups)):
        order = rotated(running, number + group)
        for place in reversed(range(PLAIN_EVERY, len(order), PLAIN_EVERY)):
            order.insert(place, plain)  # every speed-up depends on plain decoding, and the machine's speed drifts
        tallies: dict[Way, list[Tally]] = {one.way: [] for one in running}
        for one in order:
            progress.update(task, description=f"measuring: {one.way}")
            tally = Tally(Variant(one.way.draft, 0), bench.plan.temperature)
            bench.once(one.way, group, f"round {number} of {one.way}", tally)
            tallies[one.way].append(tally)
            one.tally.steps += tally.steps
            progress.advance(task)
        plain_steps = [step for tally in tallies[plain.way] for step in tally.steps]
        for one in running:
            one.seconds.setdefault(group, {})[number] = median(per_token_s(t.steps) for t in tallies[one.way])
            if passes is not None and one is not plain:
                passes.add(plain_steps, tallies[one.way][0].steps)


def _together(turns: Mapping[str, Seq[Turn]]) -> float:
    """Return the mean number of requests that plain decoding ran at once. turns: by spec of the drafter."""
    return fmean(
        step.num_decoding for spec_turns in turns.values() for t in spec_turns for step in full_steps(t.plain.steps)
    )


def drop_slow(contenders: Seq[Contender]) -> None:
    """Stop measuring ways that are much slower than the best way, once they have run in FEWEST_ROUNDS rounds."""
    running = [one for one in contenders if not one.is_out]
    best = max(one.measured.speedup for one in running)
    for one in running:
        is_plain = one is contenders[0]
        if not is_plain and one.measured.num_rounds >= FEWEST_ROUNDS and one.measured.speedup < OUT * best:
            one.is_out = True
