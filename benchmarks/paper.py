"""`benchmarks.paper`: which tables and figures of Leviathan et al. 2023 (arXiv 2211.17192) are made, and where they go.

paper_formulas.py makes those that follow from formulas, and the files of paper_exhibits/ those that are measured, with
what paper_work.py lends them; theory/published.py has what the paper prints, and exhibits.py draws and writes all of
them. torch is loaded to measure, and not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.paper_formulas import EXHIBITS
from benchmarks.paper_plan import MEASURED, ROOM, PaperPlan
from benchmarks.paper_tasks import NoPair
from benchmarks.start import start
from forerun.bench.exhibits import Exhibit, check_can_draw, print_exhibit, write_exhibit
from forerun.cli import flags
from forerun.cli.signatures import Fields, Given
from forerun.errors import BadOption, NotFound
from forerun.registry import unknown
from forerun.text.terminal import make_console, note

if TYPE_CHECKING:
    from forerun.config import EngineConfig


def run(plan: PaperPlan, config: EngineConfig | None) -> list[Exhibit]:
    """Make, print and write exhibits, and return them. config: of the engine that measures, None = nothing is measured.

    Raises UserError for what is unknown or cannot be measured.
    """
    for name in plan.names:
        if name in MEASURED and config is None:
            raise BadOption(f"{name} is measured: add --measure")
        if name not in (*EXHIBITS, *MEASURED):
            raise BadOption(unknown("table or figure", name, (*EXHIBITS, *MEASURED)))
    if plan.ngram is not None and not plan.ngram.is_file():
        raise NotFound(f"there is no file {plan.ngram}: `forerun train ngram` makes it")
    if plan.out is not None:
        check_can_draw()
    console = make_console()
    made = []
    for exhibit in _exhibits(plan, config):
        print_exhibit(exhibit, console)
        made.append(exhibit)
        if plan.out is not None:
            write_exhibit(exhibit, plan.out)
    if plan.out is not None:
        note(f"{plan.out}: {len(made)} tables and figures, each as .txt, .svg, .png and .json")
    return made


def _exhibits(plan: PaperPlan, config: EngineConfig | None) -> Iterator[Exhibit]:
    for name, make in EXHIBITS.items():
        if plan.wants(name):
            yield make()
    if config is not None and any(map(plan.wants, MEASURED)):
        yield from _measured(plan, config)


def _measured(plan: PaperPlan, config: EngineConfig) -> Iterator[Exhibit]:
    """Yield what is measured. Without names, what there are no models for is left out, and said."""
    from benchmarks.paper_work import Work

    work = Work(plan, config)
    for name, file in MEASURED.items():
        if plan.wants(name):
            try:
                yield from importlib.import_module(f"{ROOM}.{file}").make(work)
            except NoPair as error:
                if plan.names:
                    raise
                note(f"{name} is left out: {error}")


NAMES_HELP = (
    "table-1, table-4, lenience, figure-2 to figure-5, from formulas; with --measure also "
    f"{', '.join(MEASURED)} [default: all]"
)


def command(
    engine: Annotated[Given, flags.engine("target", "dtype", "ops")],
    plan: Annotated[Given, Fields(PaperPlan, is_plan=True)],
    names: Annotated[list[str] | None, typer.Argument(help=NAMES_HELP, show_default=False)] = None,
    measure: Annotated[bool, typer.Option("--measure", help="also what is measured, with own models")] = False,
) -> None:
    """Make the tables and figures of the paper on speculative decoding again, beside what it prints.

    The paper is Leviathan, Kalman, Matias 2023 (arXiv 2211.17192); docs/study/theory.md explains where digits differ.
    """
    asked = PaperPlan(names=tuple(dict.fromkeys(names or ())), **plan)
    run(asked, flags.engine_config(engine) if measure else None)


if __name__ == "__main__":
    start(command)
