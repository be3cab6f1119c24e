"""The commands `python -m benchmarks.t5 ...`."""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.t5 import examples as making, training
from benchmarks.t5.config import PairConfig, PairShape
from benchmarks.t5.scoring import ScorePlan, measure
from forerun.cli.help import App
from forerun.cli.main import main
from forerun.cli.signatures import Fields, Given

app = App("Make a T5 and its drafts, for the paper's tables on encoder-decoders; nothing is downloaded.")


@app.command()
def examples(
    task: Annotated[str, typer.Option(help="translation (English sentences to German) or summary (of docstrings)")],
    out: Annotated[Path, typer.Option(help="folder for train.jsonl, validation.jsonl and bench.jsonl")],
    num_examples: Annotated[int, typer.Option(help="examples in all; of summaries as many as there are")] = 300_000,
    seed: Annotated[int, typer.Option(help="of the sentences that are drawn, and of the order")] = 0,
) -> None:
    """Write examples with a source and a target, of installed packages and a grammar."""
    counts = making.write(task, out, num_examples, seed)
    typer.echo(", ".join(f"{count:,} {split}" for split, count in counts.items()) + f" in {out}")


@app.command()
def train(
    run: Annotated[Given, Fields(PairConfig, is_plan=True)],
    sizes: Annotated[Given, Fields(PairShape, is_plan=True)],
    resume: Annotated[bool, typer.Option(help="go on from the state in the out folder")] = False,
    quiet: Annotated[bool, typer.Option(help="no progress is shown")] = False,
) -> None:
    """Train a T5 (version 1.1) on examples of tasks, or from a larger one's soft labels (--teacher); on the CPU."""
    numbers = training.train(PairConfig(shape=PairShape(**sizes), **run), resume=resume, quiet=quiet)
    typer.echo(" ".join(f"{key}={value:.4f}" for key, value in numbers.items()))


@app.command()
def score(plan: Annotated[Given, Fields(ScorePlan, is_plan=True)]) -> None:
    """Measure answers of a T5 against known ones, and alpha-hat of its drafts, at temperatures 0 and 1."""
    for one in measure(ScorePlan(**plan)):
        text = f"{one.task} T={one.pair.temperature:g}: exact {one.score.exact:.3f}, overlap {one.score.overlap:.3f}"
        if one.draft is not None:
            text += (
                f"; {one.draft}: alpha-hat {one.pair.alpha_hat}, {one.pair.mean_accepted_length} tokens per target pass"
            )
        typer.echo(text)


def run(arguments: Seq[str] | None = None) -> None:
    """Run a command and exit. arguments: None = those of this process."""
    main(arguments, app, "python -m benchmarks.t5")


if __name__ == "__main__":
    run()
