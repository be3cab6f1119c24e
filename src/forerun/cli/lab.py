"""The command `forerun lab`, which parses and calls. torch and the web framework are imported when it runs."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from forerun.cli import flags
from forerun.cli.serve import HOST_HELP, ORIGIN_HELP
from forerun.cli.signatures import Given
from forerun.errors import not_installed

VIEWERS = 4  # sequences that run together, where nothing else is said: a cache for each drafter with a model is made

ENGINE = (
    "ignore_config_keys",
    "draft",
    "extra_drafts",
    "spec_length",
    "pacing",
    "calibrate",
    "generation_config",
    "chat_template",
    "kv_cache_tokens",
    "max_batch_size",
    "max_seq_len",
    *flags.MODEL,
)


def lab(
    engine: Annotated[Given, flags.engine(*ENGINE)],
    target: flags.TargetArgument = None,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 = all of this machine")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 = one that is free")] = 8001,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="FORERUN_API_KEY", help="what the page asks for [default: nothing]", show_default=False),
    ] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(help=ORIGIN_HELP, show_default=False)] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help=HOST_HELP, show_default=False)] = None,
) -> None:
    """Show a page in the browser that explains speculative decoding, with your model running live behind it."""
    config = flags.engine_config({**engine, "target": target}, max_batch_size=VIEWERS)
    try:
        from forerun.engine.factory import usable_drafts
        from forerun.lab.app import make_lab
        from forerun.serve.server import ServerOptions, run
    except ImportError as error:
        raise not_installed("forerun lab", "serve", error.name) from None
    options = ServerOptions(
        host=host,
        port=port,
        api_key=api_key or None,
        allow_origins=tuple(allow_origin or ()),
        allow_hosts=tuple(allow_host or ()),
    )
    if config.extra_drafts is None:  # all that can be had, for the menu of the widget Live
        config = dataclasses.replace(config, extra_drafts=";".join(usable_drafts(config)))
    raise typer.Exit(run(config, options, {"/lab": make_lab}))
