"""The command `forerun certify`: parses its arguments, shows progress and calls the checks.

The engine is imported when the command runs, not to print help.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import flags
from forerun.cli.bench import keep
from forerun.cli.signatures import Given, writable

if TYPE_CHECKING:
    from forerun.certify.checks import Tell

MINUTES_HELP = "minutes of statistics, after the checks on toy models; more find smaller deviations"
MUTANT_HELP = "m1 to m19: a wrong version that is switched in first, to see the certificate fail [default: none]"
BATCH = 8  # sequences that run together by default


def certify(
    engine: Annotated[Given, flags.engine("ignore_config_keys", "draft", "max_batch_size", *flags.MODEL)],
    target: flags.TargetArgument = None,
    minutes: Annotated[float, typer.Option(help=MINUTES_HELP)] = 10.0,
    seed: Annotated[int, typer.Option(help="of everything that is drawn")] = 1,
    mutant: Annotated[str | None, typer.Option(help=MUTANT_HELP, show_default=False)] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="toys, texts, cells or streams: these alone; may be repeated [default: all]", show_default=False
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="file for the whole certificate", show_default=False, callback=writable),
    ] = None,
) -> None:
    """Test whether a model writes with its drafter exactly what it writes alone. Exit code 0: yes, 1: a difference.

    The command enumerates toy models, checks that wrong versions are found, compares texts, and tests samples of the
    pair.
    """
    config = flags.engine_config({**engine, "target": target}, max_batch_size=BATCH)
    from forerun.certify.certificate import PARTS, Plan, certify as run
    from forerun.cli.certificate import print_certificate
    from forerun.text.terminal import make_console

    plan = Plan(minutes, seed, mutant, tuple(part) if part else tuple(PARTS))
    with _progress() as tell:
        certificate = run(config, plan, tell)
    print_certificate(certificate, make_console())
    keep(certificate.record(), json_file)
    raise typer.Exit(0 if certificate.passed else 1)


@contextmanager
def _progress() -> Iterator[Tell]:
    """Yield a function that shows progress on standard error: as a bar in a terminal, otherwise as lines."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    from forerun.text.progress import Bar

    columns = (
        BarColumn(20),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, transient=True) as bar:
        task = bar.add_task("loading", total=1)
        yield lambda what, share: bar.update(task, description=what, completed=share)
