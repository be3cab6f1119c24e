"""Appendix A.4 of Leviathan et al. 2023 (arXiv 2211.17192), beam search with drafts, on an encoder-decoder pair.

The paper leaves its analysis open and measured nothing. Beams of width w are searched with a draft of u of them for
some levels; the texts are those of plain beam search, which is measured in turns with them.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.paper_exhibits.table_2_t5 import speeds
from benchmarks.paper_tasks import Task
from benchmarks.paper_work import Pair, Work, described
from benchmarks.peers import say
from forerun.bench.exhibits import Exhibit, Panel, Plot, Value, columns, dots
from forerun.bench.latency import PLAIN, EncoderClock, run_once
from forerun.bench.results import Tally, Variant
from forerun.bench.tables import Column
from forerun.engine.llm import LLM
from forerun.types import SamplingParams

NAME = "beams-t5"
WIDTHS = ((4, 4, 2), (4, 8, 2), (4, 4, 4), (2, 4, 3))  # w, u, levels
NUM_PROMPTS, NUM_REPEATS = 12, 2  # where the plan says none


def make(work: Work) -> Iterator[Exhibit]:
    """Search with every draft model and width, task by task."""
    pair, plan = work.task_pair, work.plan
    num_prompts, num_repeats = plan.num_prompts or NUM_PROMPTS, plan.num_repeats or NUM_REPEATS
    config = replace(work.config, max_batch_size=1, prefix_caching=False)
    options = {**config.options(), "draft": "none"}
    llms = {PLAIN.draft: LLM(pair.target, **options)}
    llms |= {size: LLM(pair.target, **{**options, "draft": draft}) for size, draft in pair.drafts.items()}
    clocks = {name: EncoderClock(llm) for name, llm in llms.items()}
    recipe = work.task_recipe(NAME, "num_prompts", "max_tokens", "num_repeats")
    for task in pair.tasks:
        sources = list(task.measured[:num_prompts])
        say(f"{task.name}: beam searches for {len(sources)} prompts ...")
        found = searched(llms, clocks, sources, plan.max_tokens, num_repeats)
        about = (
            f"Target: {described(pair.target)}, on {work.machine}; {len(sources)} prompts, in turns, {num_repeats} "
            f"times, at most {plan.max_tokens} tokens."
        )
        yield beams(found, pair, task, len(sources), about, recipe)


Found = dict[tuple[str, tuple[int, int, int]], tuple[Tally, list[list[int]]]]  # by draft and widths, with the texts


def searched(
    llms: dict[str, LLM], clocks: dict[str, EncoderClock], sources: list[str], max_tokens: int, num_repeats: int
) -> Found:
    """Search for every source with every draft and all widths, in turns."""
    found: Found = {(name, widths): (Tally(Variant(name, widths[2]), 0.0), []) for widths in WIDTHS for name in llms}

    def search(name: str, widths: tuple[int, int, int], source: str, tally: Tally) -> list[int]:
        w, u, levels = widths
        params = SamplingParams(temperature=0, max_tokens=max_tokens, num_beams=w, draft_beams=u, spec_length=levels)
        return run_once(llms[name], source, params, tally, None, clocks[name])

    for name, widths in found:  # warms up
        search(name, widths, sources[0], Tally(PLAIN, 0.0))
    for _ in range(num_repeats):
        for source in sources:
            for (name, widths), (tally, texts) in found.items():
                texts.append(search(name, widths, source, tally))
    return found


def beams(found: Found, pair: Pair, task: Task, num_prompts: int, about: str, recipe: str) -> Exhibit:
    """Return the table of one task."""
    rows: list[tuple[Value, ...]] = []
    for (name, widths), (tally, texts) in found.items():
        if name == PLAIN.draft:
            continue
        plain, wanted = found[PLAIN.draft, widths]
        per_pass = [tally.total(count) / len(tally.steps) for count in ("num_emitted", "num_rows")]
        speed, whole = (speeds(plain, tally, num_prompts, is_whole) for is_whole in (False, True))
        same = f"{sum(one == other for one, other in zip(texts, wanted, strict=True))}/{len(texts)}"
        rows.append((name, *widths, *per_pass, speed.median, speed.range, whole.median, same))
    names = [f"{row[0]}, w={row[1]}, u={row[2]}, K={row[3]}" for row in rows]
    curves = [dots("drafted over plain", rows, 6, 7), dots("steps per pass", rows, 4)]
    return Exhibit(
        f"{NAME}-{task.name}",
        f"Appendix A.4: beam search with drafts over plain beam search ({task.name})",
        (
            *columns("{}", "draft", "w", "u", "K"),
            Column("steps/\npass", form="{:.2f}"),
            Column("rows/\npass", form="{:.1f}"),
            *columns("{:.2f}", "speed", "least\n-most", "whole"),
            Column("same\ntexts"),
        ),
        rows,
        Plot([Panel("", "times plain beam search", "", curves, names)]),
        f"{about} w: beams; u: those of a draft; K: its levels. steps/pass: of the search, for one pass of the target; "
        "rows/pass: tokens that it runs. speed: plain beam search's seconds per token of the best text over these, "
        "without encoders, median of the repeats; whole: with encoders. The paper has no numbers of it.",
        recipe,
    )
