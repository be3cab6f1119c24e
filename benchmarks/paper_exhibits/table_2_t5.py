"""Tables 2 and 4 of Leviathan et al. 2023 (arXiv 2211.17192), measured on an encoder-decoder pair, for each task.

Every length of every draft model is a row, with what theory predicts from its alpha, c, v and o, A / (c K + v + o), and
what Theorem 3.8 does, which has v = 1 and o = 0. Costs are over a plain step, which is what a token takes without
drafts. Seconds and tokens are summed over the prompts of a repeat, for answers have lengths of their own.
"""

from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from benchmarks.paper_alpha import T5
from benchmarks.paper_tasks import Task
from benchmarks.paper_work import Work, described
from benchmarks.peers import say
from forerun.bench import latency
from forerun.bench.exhibits import Exhibit, Panel, Plot, Value, columns, dots
from forerun.bench.latency import PLAIN
from forerun.bench.plans import LatencyPlan
from forerun.bench.results import FULL_DRAFTS, Tally, Variant
from forerun.bench.tables import Column, Ratio
from forerun.memory.machine import spare_what_is_loaded
from forerun.text.terminal import make_console
from forerun.theory import formulas
from forerun.theory.published import TABLE_4, Speed
from forerun.types import SamplingParams

NAME = "table-2-t5"
NUM_PROMPTS, NUM_REPEATS = 24, 3  # where the plan says none
AGAIN = Variant("plain", 0)  # once more
WARM_UP_TOKENS = 8
Tallies = Mapping[tuple[float, Variant], Tally]


class Predicted(NamedTuple):
    """Costs of one repeat, and what they let expect of its speed.

    c, v, o: means, over a plain step. expected: by the formula; of_lengths: of answers that are as long as these, whose
    last rounds nobody knows to be the last.
    """

    c: float
    v: float
    o: float
    theorem_3_8: float
    expected: float
    of_lengths: float


@dataclass(frozen=True)
class Row:
    """One draft model, temperature and length.

    predicted: of each repeat; () where nothing was drafted, or most drafts were shorter. speed: plain decoding's
    seconds per token over these, of decoding, whose clock stops while encoders run; whole: of requests.
    """

    draft: str
    temperature: float
    spec_length: int
    alpha: float | None
    predicted: Seq[Predicted]
    speed: Ratio
    whole: Ratio

    def median(self, name: str) -> float | None:
        """Return the median of one number of the predictions."""
        return median(getattr(one, name) for one in self.predicted) if self.predicted else None

    def deviation(self, name: str) -> float | None:
        """Return the median of a prediction over the same repeat's speed, minus one."""
        pairs = zip(self.predicted, self.speed.values, strict=True) if self.predicted else ()
        ratios = [getattr(one, name) / speed - 1 for one, speed in pairs]
        return median(ratios) if ratios else None


def make(work: Work) -> Iterator[Exhibit]:
    """Measure the speeds of all draft models in turns, task by task."""
    pair, asked = work.task_pair, work.plan
    plan = LatencyPlan(
        drafts=tuple(pair.specs.values()),
        spec_lengths=asked.spec_lengths,
        num_prompts=asked.num_prompts or NUM_PROMPTS,
        max_tokens=asked.max_tokens,
        num_repeats=asked.num_repeats or NUM_REPEATS,
        seed=asked.seed,
        until_end=True,
    )
    config = replace(work.config, draft="none", max_batch_size=1)
    llms = latency.engines(pair.target, config, plan, make_console())
    variants = list(llms)
    variants.insert(len(variants) // 2, AGAIN)  # not beside plain decoding, whose engine it is
    llms = {variant: llms[PLAIN if variant == AGAIN else variant] for variant in variants}
    spare_what_is_loaded()
    recipe = work.task_recipe(NAME, "num_prompts", "max_tokens", "num_repeats", "spec_lengths")
    sizes = {spec: size for size, spec in pair.specs.items()}
    for task in pair.tasks:
        prompts = [(str(i), source) for i, source in enumerate(task.measured[: plan.num_prompts])]
        for llm in llms.values():
            llm.generate(prompts[0][1], SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0))
        say(f"{task.name}: {len(prompts)} prompts, {len(llms)} variants in turns, {plan.num_repeats} times ...")
        with latency.progress_bar() as progress:
            tallies = latency.tallied(llms, prompts, plan, progress)
        rows = rows_of(tallies, len(prompts))
        length = sum(tallies[0.0, PLAIN].num_tokens) / len(tallies[0.0, PLAIN].num_tokens)
        about = (
            f"Target: {described(pair.target)}, on {work.machine}; {len(prompts)} prompts, in turns, "
            f"{plan.num_repeats} times, answers to their end: {length:.1f} tokens in the mean at T=0."
        )
        yield table_2(rows, task, sizes, about, recipe)


def rows_of(tallies: Tallies, num_prompts: int) -> list[Row]:
    """Return a row for each variant but plain decoding, in the order of the tallies.

    num_prompts: runs of a repeat, over which seconds and tokens are summed.
    """
    return [
        row_of(tally, tallies[temperature, PLAIN], num_prompts)
        for (temperature, variant), tally in tallies.items()
        if variant != PLAIN
    ]


def row_of(tally: Tally, plain: Tally, num_prompts: int) -> Row:
    """Return rates and predictions of a tally. plain: plain decoding of the same prompts in the same run."""
    tested, accepted = (tally.total(name) for name in ("num_tested", "num_accepted"))
    pairs = list(zip(repeats_of(tally, num_prompts), repeats_of(plain, num_prompts), strict=True))
    predicted = [predicted_of(one, other) for one, other in pairs]
    known = [one for one in predicted if one is not None]
    return Row(
        draft=tally.variant.draft,
        temperature=tally.temperature,
        spec_length=tally.variant.spec_length,
        alpha=accepted / tested if tested else None,
        predicted=known if len(known) == len(predicted) else (),
        speed=speeds(plain, tally, num_prompts),
        whole=speeds(plain, tally, num_prompts, is_whole=True),
    )


def repeats_of(tally: Tally, num_prompts: int) -> Iterator[Tally]:
    """Yield the runs of each repeat as a tally."""
    step = 0
    for i in range(0, len(tally.num_tokens), num_prompts):
        own, num_steps = slice(i, i + num_prompts), sum(tally.num_steps[i : i + num_prompts])
        yield replace(
            tally,
            seconds_per_token=tally.seconds_per_token[own],
            num_tokens=tally.num_tokens[own],
            encoder_s=tally.encoder_s[own],
            num_steps=tally.num_steps[own],
            steps=tally.steps[step : step + num_steps],
        )
        step += num_steps


def predicted_of(tally: Tally, plain: Tally) -> Predicted | None:
    """Return what a repeat's costs let expect; None where nothing was drafted, or most drafts were shorter."""
    gamma, steps, plain_step_s = tally.variant.spec_length, tally.steps, _seconds(plain) / len(plain.steps)
    full = [step for step in steps if step.num_drafted == gamma]
    tested = tally.total("num_tested")
    if not tested or len(full) < FULL_DRAFTS * len(steps):
        return None
    alpha = tally.total("num_accepted") / tested
    drafting_s = sum(step.draft_s for step in steps)
    c = drafting_s / tally.total("num_drafted") / plain_step_s
    v = sum(step.target_forward_s for step in full) / len(full) / plain_step_s
    outside_s = _seconds(tally) - drafting_s - sum(step.target_forward_s for step in steps)
    o = max(0.0, outside_s) / len(steps) / plain_step_s
    expected = formulas.speedup(alpha, gamma, c, v, o)
    passes = [n / formulas.speedup_of_length(alpha, gamma, c, n, v, o, knows_end=False) for n in tally.num_tokens]
    return Predicted(c, v, o, formulas.speedup(alpha, gamma, c), expected, sum(tally.num_tokens) / sum(passes))


def _seconds(tally: Tally) -> float:
    """Return the seconds of all runs, without encoders."""
    return sum(each * num for each, num in zip(tally.seconds_per_token, tally.num_tokens, strict=True))


def _rate(tally: Tally, is_whole: bool = False) -> float:
    """Return the seconds per token of all runs. is_whole: with those of encoders."""
    return (_seconds(tally) + is_whole * sum(tally.encoder_s)) / sum(tally.num_tokens)


def speeds(plain: Tally, tally: Tally, num_prompts: int, is_whole: bool = False) -> Ratio:
    """Return plain decoding's seconds per token over those of another tally, for each repeat.

    is_whole: with the seconds of encoders.
    """
    pairs = zip(repeats_of(plain, num_prompts), repeats_of(tally, num_prompts), strict=True)
    return Ratio.of([_rate(one, is_whole) / _rate(other, is_whole) for one, other in pairs])


def table_2(rows: Seq[Row], task: Task, sizes: Mapping[str, str], about: str, recipe: str) -> Exhibit:
    """Return the table of one task. sizes: names of draft models by what they were called, the smallest first."""
    order = [*sizes, AGAIN.draft]
    cells: list[tuple[Value, ...]] = []
    for row in sorted(rows, key=lambda row: (row.temperature, order.index(row.draft), row.spec_length)):
        theirs = published(task, order.index(row.draft), row)
        named = sizes.get(row.draft, row.draft), f"{row.temperature:g}", row.spec_length or None
        predicted = row.alpha, *map(row.median, ("c", "v", "theorem_3_8", "expected", "of_lengths"))
        found = row.speed.median, row.speed.range, row.deviation("expected"), row.whole.median
        cells.append(
            (*named, *predicted, *found, *((None, None) if theirs is None else (theirs.alpha, theirs.measured)))
        )
    curves = (
        dots("Theorem 3.8", cells, 6),
        dots("with costs", cells, 7),
        dots("and ends", cells, 8),
        dots("measured, band: repeats", cells, 9, 10),
        dots("published", cells, 14),
    )
    names = [f"{cell[0]}, T={cell[1]}" + (f", K={cell[2]}" if cell[2] else "") for cell in cells]
    said = within("with costs", [row.deviation("expected") for row in rows])
    said += within("and ends", [row.deviation("of_lengths") for row in rows])
    beside_paper = "" if task.published is None else f" Published: T5-XXL, {task.published}, in the order of sizes."
    return Exhibit(
        f"{NAME}-{task.name}",
        f"Table 2: improvement over plain decoding ({task.name})",
        (
            *columns("{}", "draft", "T", "K"),
            *columns("{:.2f}", "al-\npha", "c", "v(K)", "Thm\n3.8", "with\ncosts", "and\nends"),
            *columns("{:.2f}", "mea-\nsured", "least\n-most"),
            Column("off", form="{:+.0%}"),
            *columns("{:.2f}", "all", "publ.\nalpha"),
            Column("publ.\nspeed", form="{:.1f}"),
        ),
        cells,
        Plot([Panel("", "tokens/s over plain decoding's", "", curves, names)]),
        f"{about} alpha: accepted / tested tokens. c, v(K): seconds of a drafted token, and of a pass over K + 1, / of "
        "a plain step. with costs: the formula A / (cK + v + o), where o is the rest of a step; and ends: of answers "
        "of these lengths, whose last rounds draft K tokens, too. measured: without encoders, ratios "
        "of seconds per token; all: with encoders. off: with costs / measured. All are "
        "medians of the repeats."
        f"{said}{beside_paper}",
        recipe,
    )


def within(name: str, deviations: Seq[float | None]) -> str:
    """Say how many predictions are near enough, and how far the farthest is away."""
    known = [one for one in deviations if one is not None]
    if not known:
        return ""
    near, worst = sum(abs(one) <= BAR for one in known), max(known, key=abs)
    return f" {name}: {near} of {len(known)} are within {BAR:.0%}, the farthest is {worst:+.0%} off."


BAR = 0.15  # of the distance between prediction and measurement


def published(task: Task, place: int, row: Row) -> Speed | None:
    """Return the paper's row of the same task, temperature and length, of the draft model at a place by size."""
    if place >= len(T5):
        return None
    wanted = (task.published, T5[place], row.temperature, row.spec_length)
    return next((one for one in TABLE_4 if (one.task, one.draft, one.temperature, one.gamma) == wanted), None)
