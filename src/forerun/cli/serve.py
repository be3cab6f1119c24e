"""The command `forerun serve`: parses its arguments and calls the server, which is not imported to print help."""

from __future__ import annotations

from typing import Annotated

import typer

from forerun.cli import flags
from forerun.cli.signatures import Fields, Given
from forerun.errors import not_installed
from forerun.serve.options import Limits, ServerOptions


def serve(
    engine: Annotated[Given, flags.engine(leave_out=("target",))],
    server: Annotated[Given, Fields(ServerOptions, is_plan=True)],
    limits: Annotated[Given, Fields(Limits, is_plan=True)],
    target: flags.TargetsArgument = None,
    lab: Annotated[bool, typer.Option(help="whether the page of `forerun lab` is there, under /lab")] = True,
) -> None:
    """Serve models by the APIs of OpenAI, Anthropic and Ollama. SIGTERM and Ctrl-C let accepted requests finish.

    Engine options apply to every served model. In a config file, a table [models.NAME] sets options of one model.
    """
    options = ServerOptions(**server, limits=Limits(**limits))
    configs = flags.engine_configs(engine, target or ())
    try:
        from forerun.cli.waiting import loading, opened
        from forerun.lab.app import make_lab
        from forerun.serve.server import run
    except ImportError as error:
        raise not_installed("forerun serve", "serve", error.name) from None
    raise typer.Exit(run(configs, options, {"/lab": make_lab} if lab else None, opened, loading))
