"""Tables 2 and 4 of Leviathan et al. 2023 (arXiv 2211.17192), measured with `forerun bench latency`."""

from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import replace

from benchmarks.paper_alpha import T5
from benchmarks.paper_work import Work, described
from forerun.bench import latency
from forerun.bench.exhibits import Exhibit, Panel, Plot, Value, columns, dots
from forerun.bench.latency import Measured
from forerun.bench.plans import LatencyPlan
from forerun.bench.results import Line
from forerun.bench.tables import Column
from forerun.models import named
from forerun.text.terminal import make_console
from forerun.theory import formulas
from forerun.theory.published import TABLE_4, Speed

NAME = "table-2"
NUM_PROMPTS, NUM_REPEATS = 5, 1  # where the plan says none


def make(work: Work) -> Iterator[Exhibit]:
    """Measure the speeds of all draft models, and yield the two tables of them."""
    plan = work.plan
    num_prompts, num_repeats = plan.num_prompts or NUM_PROMPTS, plan.num_repeats or NUM_REPEATS
    sizes = {spec: size for size, spec in work.pair.specs.items()}
    asked = LatencyPlan(
        drafts=tuple(sizes),
        shape=plan.shape,
        spec_lengths=plan.spec_lengths,
        num_prompts=num_prompts,
        max_tokens=plan.max_tokens,
        num_repeats=num_repeats,
        seed=plan.seed,
    )
    config = replace(work.config, target=work.config.target or named.PAIR, draft="none")
    found = latency.measured(config, asked, make_console())
    widened = "" if plan.shape == "none" else f" (a small model widened to the shape {plan.shape})"
    about = (
        f"Target: {described(found.target)}{widened}, {found.ceiling.bytes_per_s / 1e9:.0f} GB/s, on {work.machine}; "
        f"{num_prompts} held-out prompts of {plan.max_tokens} tokens."
    )
    recipe = plan.recipe(NAME, config.target, "shape", "num_prompts", "max_tokens", "num_repeats", "spec_lengths")
    yield table_2(found, sizes, about, recipe)
    yield table_4_measured(found, sizes, about, recipe)


def table_2(found: Measured, sizes: Mapping[str, str], about: str, recipe: str) -> Exhibit:
    """Return the fastest length of every draft model and temperature, beside the published ones.

    sizes: names of the draft models by what they were called when they were measured, the smallest first.
    """
    rows: list[tuple[Value, ...]] = []
    for temperature in (0, 1):
        for place, draft in enumerate(sizes):
            own = [line for line in found.lines if (line.draft, line.temperature) == (draft, temperature)]
            best = max(own, key=lambda line: line.speedup)
            beside = _published(temperature, place)
            theirs = (None, None, None) if beside is None else (beside.draft, beside.alpha, beside.measured)
            measured = (best.spec_length, best.alpha_hat, best.c, best.speedup, best.speedup_range)
            rows.append((sizes[draft], temperature, *measured, *theirs))
    curves = (dots("measured, band: prompts", rows, 5, 6), dots("published, T5-XXL EnDe", rows, 9))
    return Exhibit(
        "table-2",
        "Table 2: speed over plain decoding",
        (
            *columns("{}", "draft", "T", "K"),
            Column("alpha", form="{:.2f}"),
            Column("c", form="{:.3f}"),
            *columns("{:.2f}", "speed", "least-most"),
            Column("published\ndraft"),
            Column("published\nalpha", form="{:.2f}"),
            Column("published\nspeed", form="{:.1f}"),
        ),
        rows,
        Plot([Panel("", "tokens/s over plain decoding's", "", curves, [f"{row[0]}, T={row[1]}" for row in rows])]),
        f"{about} K: the fastest of the measured lengths. alpha: accepted / tested tokens. c: seconds of a drafted "
        "token / of a plain pass. speed: median over the prompts, with the least and the most. Published: T5-XXL, "
        "EnDe, one TPU-v4, in the order of sizes.",
        recipe,
    )


def _published(temperature: int, place: int) -> Speed | None:
    if place >= len(T5):
        return None
    return next(row for row in TABLE_4 if (row.task, row.draft, row.temperature) == ("EnDe", T5[place], temperature))


def table_4_measured(found: Measured, sizes: Mapping[str, str], about: str, recipe: str) -> Exhibit:
    """Return what Theorem 3.8 expects of measured alpha and costs, beside the measured speed."""
    rows: list[tuple[Value, ...]] = []
    for line in _drafting(found.lines, sizes):
        tokens = formulas.expected_tokens(line.alpha_hat, line.spec_length) if line.alpha_hat is not None else None
        share = line.speedup / line.expected - 1 if line.expected else None
        of_tokens = line.tokens_per_step / tokens - 1 if tokens else None
        about_line = (sizes[line.draft], f"{line.temperature:g}", line.spec_length, line.alpha_hat, line.c, line.v)
        rows.append((*about_line, of_tokens, line.theorem_3_8, line.expected, line.speedup, share))
    curves = [
        dots(label, rows, column) for label, column in (("Theorem 3.8", 7), ("with v and overhead", 8), ("measured", 9))
    ]
    names = [f"{row[0]}, T={row[1]}, K={row[2]}" for row in rows]
    return Exhibit(
        "table-4-measured",
        "Table 4, measured: expected and measured improvement",
        (
            *columns("{}", "draft", "T", "K"),
            Column("alpha", form="{:.2f}"),
            Column("c", form="{:.3f}"),
            Column("v(K)", form="{:.2f}"),
            Column("tokens over\nequation (1)", form="{:+.0%}"),
            *columns("{:.2f}", "Thm\n3.8", "with\ncosts", "measured"),
            Column("over\ncosts", form="{:+.0%}"),
        ),
        rows,
        Plot([Panel("", "tokens/s over plain decoding's", "", curves, names)]),
        f"{about} v(K): seconds of a pass over K + 1 tokens / over one. with costs: Theorem 3.8 with v(K) and the time "
        "outside of the models. tokens over equation (1): measured tokens of a pass, where acceptances are not "
        "independent and the last round is cut, over the formula's at this alpha.",
        recipe,
    )


def _drafting(lines: Seq[Line], sizes: Mapping[str, str]) -> list[Line]:
    order = list(sizes)
    drafting = [line for line in lines if line.draft in sizes]
    return sorted(drafting, key=lambda line: (line.temperature, order.index(line.draft), line.spec_length))
