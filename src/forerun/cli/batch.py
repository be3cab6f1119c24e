"""The command `forerun batch`: parses its arguments and calls the engine, which is not imported to print help."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import flags
from forerun.cli.signatures import Given
from forerun.errors import BadOption, not_installed

INPUT_HELP = (
    'requests, one JSON object per line: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions" or '
    '"/v1/completions", "body": {...}}'
)
REDO_HELP = "answer again what was answered before its line of the input changed; the old answer is removed"
RETRY_HELP = "ask again what was refused before; the old answer is removed"
SERVED_HELP = (
    "name that requests must give as their model, if any, and answers have; may be repeated, the first is the answers' "
    "[default: every name is accepted]"
)
RAY_HELP = (
    "answer on a Ray cluster: that of RAY_ADDRESS, else the one that runs here, else one of this machine alone [needs "
    "the extra ray]"
)
RAY_ENGINES_HELP = "with --ray: engines [default: one for each node]"
RAY_CPUS_HELP = "with --ray: cores of each engine [default: those of the smallest node]"
OUTPUT_HELP = "answers, appended one per line as they come; what is there already is not asked again"


def batch(
    engine: Annotated[Given, flags.engine(leave_out=("target",))],
    requests: Annotated[Path, typer.Argument(help=INPUT_HELP, metavar="IN.JSONL", show_default=False)],
    answers: Annotated[Path, typer.Argument(help=OUTPUT_HELP, metavar="OUT.JSONL", show_default=False)],
    target: flags.TargetArgument = None,
    redo_changed: Annotated[bool, typer.Option("--redo-changed", help=REDO_HELP)] = False,
    retry_refused: Annotated[bool, typer.Option("--retry-refused", help=RETRY_HELP)] = False,
    served_model_name: Annotated[list[str] | None, typer.Option(help=SERVED_HELP, show_default=False)] = None,
    ray: Annotated[bool, typer.Option("--ray", help=RAY_HELP)] = False,
    ray_engines: Annotated[int | None, typer.Option(help=RAY_ENGINES_HELP, min=1, show_default=False)] = None,
    ray_cpus: Annotated[float | None, typer.Option(help=RAY_CPUS_HELP, min=0, show_default=False)] = None,
    ray_gpus: Annotated[float, typer.Option(help="with --ray: GPUs of each engine", min=0)] = 0.0,
) -> None:
    """Answer a file of requests in the OpenAI batch format. The same command continues a run that was stopped.

    Exit code 2: a request was refused (its line says why), or nothing was run.
    """
    if str(requests) == "-":
        raise BadOption("batch reads a file, which a later run compares with: write the requests into one and name it")
    config = flags.engine_config({**engine, "target": target})
    place = _place(ray_engines, ray_cpus, ray_gpus) if ray else None
    if not ray and (ray_engines is not None or ray_cpus is not None or ray_gpus):
        raise BadOption("--ray-engines, --ray-cpus and --ray-gpus say how --ray is done: give it, too, or none of them")
    from forerun.cli.waiting import loading
    from forerun.serve.batch import in_this_process, run

    code = run(
        requests,
        answers,
        config,
        served_names=tuple(served_model_name or ()),
        redo_changed=redo_changed,
        retry_refused=retry_refused,
        place=place or partial(in_this_process, loading=loading),
    )
    raise typer.Exit(code)


def _place(num_engines: int | None, num_cpus: float | None, num_gpus: float) -> Any:
    try:
        from forerun.deploy.batch import on_ray
    except ImportError as error:
        raise not_installed("--ray", "ray", error.name) from None
    return on_ray(num_engines, num_cpus, num_gpus)
