"""The command `forerun serve`, which parses and calls. torch and the web framework are imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from forerun.cli import flags
from forerun.cli.signatures import Given
from forerun.errors import BadOption, not_installed

SERVED_HELP = (
    "name that requests may give as their model, and answers have; may be repeated, the first is the answers' "
    "[default: the target's]"
)
IGNORE_HELP = (
    "serve requests with fields that are not built (tools, reasoning, ...) without them; the header x-forerun-ignored "
    "of the answer lists them [default: such requests are refused]"
)
ORIGIN_HELP = (
    "web page that may use this server, as SCHEME://HOST[:PORT], or * for any; may be repeated [default: its own "
    "pages alone]"
)
HOST_HELP = (
    "name by which this server may be called without a key, or * for any; may be repeated [default: addresses and the "
    "names of this machine]"
)


def serve(
    engine: Annotated[Given, flags.engine(leave_out=("target",))],
    target: flags.TargetArgument = None,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 = all of this machine")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 = one that is free")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="FORERUN_API_KEY", help="what requests must bring [default: nothing]", show_default=False),
    ] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(help=ORIGIN_HELP, show_default=False)] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help=HOST_HELP, show_default=False)] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help=SERVED_HELP, show_default=False)] = None,
    ignore_unsupported: Annotated[bool, typer.Option("--ignore-unsupported", help=IGNORE_HELP)] = False,
    max_queue: Annotated[int, typer.Option(help="choices that wait at most; more get status 429")] = 256,
    max_body_bytes: Annotated[int, typer.Option(help="of a request; larger ones get status 413")] = 4 << 20,
    request_timeout_s: Annotated[float, typer.Option(help="for an answer; then status 504")] = 600.0,
    body_timeout_s: Annotated[float, typer.Option(help="for headers, and for a body; then status 408")] = 30.0,
    stall_timeout_s: Annotated[float, typer.Option(help="that a client may take nothing of its answer")] = 60.0,
    metrics_prefix: Annotated[str, typer.Option(help="of the names in /metrics: forerun or vllm")] = "forerun",
    log_format: Annotated[str, typer.Option(help="text or json, one line for each request")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error")] = "info",
    log_texts: Annotated[bool, typer.Option("--log-texts", help="log what requests and answers say")] = False,
    lab: Annotated[bool, typer.Option(help="whether the page of `forerun lab` is there, under /lab")] = True,
) -> None:
    """Serve a model by the APIs of OpenAI and Anthropic. SIGTERM and Ctrl-C let accepted requests finish."""
    given = dict(locals())
    for name in ("max_queue", "max_body_bytes", "request_timeout_s", "body_timeout_s", "stall_timeout_s"):
        if given[name] < (0 if name == "max_queue" else 1e-3):
            raise BadOption(f"--{name.replace('_', '-')}={given[name]} is not possible: it must be above 0")
    config = flags.engine_config({**engine, "target": target})
    try:
        from forerun.lab.app import make_lab
        from forerun.serve.limits import Limits
        from forerun.serve.server import ServerOptions, run
    except ImportError as error:
        raise not_installed("forerun serve", "serve", error.name) from None
    options = ServerOptions(
        host=host,
        port=port,
        served_names=tuple(served_model_name or ()),
        api_key=api_key or None,
        allow_origins=tuple(allow_origin or ()),
        allow_hosts=tuple(allow_host or ()),
        ignore_unsupported=ignore_unsupported,
        metrics_prefix=metrics_prefix,
        log_format=log_format,
        log_level=log_level,
        log_texts=log_texts,
        limits=Limits(
            max_queue=max_queue,
            max_body_bytes=max_body_bytes,
            request_timeout_s=request_timeout_s,
            body_timeout_s=body_timeout_s,
            stall_timeout_s=stall_timeout_s,
        ),
    )
    raise typer.Exit(run(config, options, {"/lab": make_lab} if lab else None))
