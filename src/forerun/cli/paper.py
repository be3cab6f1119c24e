"""The command `forerun paper`: the tables and figures of the paper that introduced speculative decoding, once more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli import flags
from forerun.cli.bench import SHAPE_NAMES

NAMES_HELP = (
    "table-1, table-4, lenience, figure-2 to figure-5, from formulas; with --measure also table-2, table-3, table-5, "
    "figure-1, independence [default: all]"
)


def paper(
    names: Annotated[list[str] | None, typer.Argument(help=NAMES_HELP, show_default=False)] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="folder for text, SVG, PNG and JSON of each; needs matplotlib", show_default=False),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="also what is measured, with own models")] = False,
    target: flags.Target = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="draft model to measure; may be repeated [default: the shipped one]", show_default=False),
    ] = None,
    ngram: Annotated[
        Path | None,
        typer.Option(
            help="file of `forerun train ngram` for unigram and bigram [default: without]", show_default=False
        ),
    ] = None,
    num_tokens: Annotated[
        int, typer.Option("--tokens", help="that the target writes for tables 3 and 5", min=256)
    ] = 10_240,
    shape: Annotated[
        str, typer.Option(help=f"to which the target of table 2 is widened: {SHAPE_NAMES}, or none")
    ] = "demo",
    spec_length: Annotated[
        list[int] | None, typer.Option(help="lengths of table 2; may be repeated [default: 3, 5, 7]", min=1)
    ] = None,
    num_prompts: Annotated[int, typer.Option("--prompts", help="of table 2", min=1)] = 5,
    max_tokens: Annotated[int, typer.Option(help="tokens per prompt of table 2", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="times table 2 runs every prompt", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="of what is sampled")] = 1,
    dtype: flags.Dtype = None,
    ops: flags.Ops = None,
) -> None:
    """Make the tables and figures of the paper on speculative decoding again, beside what it prints.

    The paper is Leviathan, Kalman, Matias 2023 (arXiv 2211.17192); docs/theory.md explains where digits differ.
    """
    from forerun.bench import paper as bench
    from forerun.bench.paper_plan import PaperPlan

    plan = PaperPlan(
        names=tuple(dict.fromkeys(names or ())),
        out=out,
        drafts=tuple(draft or ()),
        ngram=ngram,
        num_tokens=num_tokens,
        shape=shape,
        spec_lengths=tuple(spec_length or (3, 5, 7)),
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        num_repeats=repeats,
        seed=seed,
    )
    config = flags.engine_config({"target": target, "dtype": dtype, "ops": ops}, None) if measure else None
    bench.run(plan, config)
