"""`benchmarks.further` measures what a block that guesses further tokens (drafter mtp) adds to a prompt and to a draft.

The file has a few layers of a model, whose prompt pass counts as often as the whole model has them:

    python -m benchmarks.random_file qwen3.5-9b layers.gguf --type Q4_K --further --ids 248320
    python -m benchmarks.further layers.gguf --layers 32

The block reads each token of the prompt once, in the steps of the prompt and in those behind it. A draft is timed with
the whole LM head and with the first rows of it alone.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer

from benchmarks.start import start
from forerun.bench.tables import Column, table
from forerun.engine.llm import LLM
from forerun.models.opened import spec_of
from forerun.text.terminal import make_console
from forerun.types import SamplingParams, StepReport

NUM_TOKENS = 48  # of an answer
METHOD = "mtp"


@dataclass(frozen=True)
class Line:
    """Medians over the prompts: milliseconds.

    first_ms: of the steps until the first token; in_first_ms: the block's part of them. prompt_ms: of the target's
    passes over the prompt; block_ms: of the block's. draft_ms: of a pass of the block that drafts one token; row_ms: of
    the target's pass over one row and its draft.
    """

    drafted_ids: str
    first_ms: float
    in_first_ms: float
    prompt_ms: float
    block_ms: float
    draft_ms: float
    row_ms: float

    def share(self, times: float) -> float:
        """Of the time of a prompt, what the block takes where the target has so many times the layers."""
        return self.block_ms / (self.prompt_ms * times + self.block_ms)

    def share_of_first(self, times: float) -> float:
        """The same of the time until the first token."""
        return self.in_first_ms / ((self.first_ms - self.in_first_ms) * times + self.in_first_ms)


TABLE = (
    Column("drafted\nids", "drafted_ids"),
    Column("first\ntoken ms", "first_ms", "{:.1f}"),
    Column("block in\nit ms", "in_first_ms", "{:.1f}"),
    Column("prompt\nms", "prompt_ms", "{:.1f}"),
    Column("block's\nms", "block_ms", "{:.1f}"),
    Column("a draft's\npass ms", "draft_ms", "{:.1f}"),
    Column("target's\npass ms", "row_ms", "{:.1f}"),
)


def measured(target: Path, drafted_ids: str, prompts: Seq[list[int]]) -> Line:
    """Continue prompts one after the other, and return the medians of the steps' reports."""
    llm = LLM(str(target), draft=f"{METHOD}:search=none,draft_vocab={drafted_ids}", spec_length=4, max_batch_size=1)
    reports, numbers = list[StepReport](), list[list[float]]()
    llm.listen(reports.append)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for ids in prompts:
        reports.clear()
        llm.generate([ids], params)
        first = [report for report in reports if report.num_prefill_tokens]
        caught_up = [sum(draft.catchup_s for draft in report.drafts.values()) for report in reports]
        drafts = [report.drafts[METHOD] for report in reports if METHOD in report.drafts]
        passes = [(d.seconds - d.catchup_s) / d.passes for d in drafts if d.passes and not d.num_catchup_tokens]
        rows = [report.target_forward_s for report in reports if not report.num_prefill_tokens]
        numbers.append([
            sum(report.seconds for report in first),
            sum(caught_up[: len(first)]),
            sum(report.target_forward_s for report in first),
            sum(caught_up),
            median(passes),
            median(rows),
        ])  # fmt: skip
    return Line(drafted_ids, *(1e3 * median(column) for column in zip(*numbers[1:], strict=True)))


def further(
    target: Annotated[Path, typer.Argument(help="GGUF file with such a block", show_default=False)],
    layers: Annotated[int | None, typer.Option(help="of the whole model", show_default="as the file has")] = None,
    tokens: Annotated[int, typer.Option(help="of each prompt", min=64)] = 512,
    prompts: Annotated[int, typer.Option(help="that count; one more goes before them", min=1)] = 5,
    drafted_ids: Annotated[list[str], typer.Option(help="mtp's draft_vocab; may be repeated")] = ["none"],  # noqa: B006
) -> None:
    """Measure what a block that guesses further tokens adds to a prompt and to a draft."""
    console, generator = make_console(), np.random.default_rng(1)
    ids = [generator.integers(1, 4096, tokens).tolist() for _ in range(1 + prompts)]
    lines = [measured(target, number, ids) for number in drafted_ids]
    num_layers = spec_of(target).num_layers
    times = (layers or num_layers) / num_layers
    console.print(f"{target.name}, {num_layers} layers, prompts of {tokens} tokens")
    console.print(table(lines, TABLE))
    for line in lines:
        console.print(
            f"of a prompt of {times * num_layers:.0f} layers the block takes {100 * line.share(times):.1f} %, and of "
            f"the time until its first token {100 * line.share_of_first(times):.1f} %"
        )


if __name__ == "__main__":
    start(further)
