"""The command `forerun lab`: parses its arguments and calls the engine and the server, which help does not import."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from forerun.cli import flags
from forerun.cli.signatures import Fields, Given
from forerun.errors import not_installed
from forerun.serve.options import LabOptions

VIEWERS = 4  # sequences that run together by default; few, because each drafter with a model gets a cache

OWN = ("host", "port", "api_key", "allow_origins", "allow_hosts")


def lab(
    engine: Annotated[Given, flags.everyday("extra_drafts", "ops", "kv_cache_backend", "max_batch_size")],
    server: Annotated[Given, Fields(LabOptions, OWN, is_plan=True)],
    target: flags.TargetArgument = None,
) -> None:
    """Show a page in the browser that explains speculative decoding, with your model running live behind it."""
    options = LabOptions(**server)
    config = flags.engine_config({**engine, "target": target}, max_batch_size=VIEWERS)
    try:
        from forerun.cli.waiting import loading, opened
        from forerun.engine.fitting import usable_drafts
        from forerun.lab.app import make_lab
        from forerun.serve.server import run
    except ImportError as error:
        raise not_installed("forerun lab", "serve", error.name) from None
    if config.extra_drafts is None:  # all usable drafters, for the menu of the widget Live
        config = dataclasses.replace(config, extra_drafts=";".join(usable_drafts(opened(config))))
    raise typer.Exit(run([config], options, {"/lab": make_lab}, opened, loading))
