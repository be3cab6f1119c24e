"""Runs a benchmark's command as `forerun` runs its own: the same help, errors and exit codes."""

import sys
from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from typing import Annotated, Any

from forerun.bench.plans import Plan
from forerun.cli import flags
from forerun.cli.bench import JsonFile, keep
from forerun.cli.help import App
from forerun.cli.main import main
from forerun.cli.signatures import Fields, Given


def measuring(
    run: Callable[..., Mapping[str, Any]], plan_type: type[Plan], options: Fields, about: str
) -> Callable[..., None]:
    """Return the command that calls `run(config, plan)`. options: of the engine that it takes. about: its help."""

    def command(engine: Given, plan: Given, json_file: Path | None = None) -> None:
        keep(run(flags.engine_config(engine), plan_type(**plan)), json_file)

    command.__doc__, command.__module__ = about, run.__module__
    given = {"engine": options, "plan": Fields(plan_type, is_plan=True)}
    command.__annotations__ |= {name: Annotated[Given, fields] for name, fields in given.items()}
    command.__annotations__["json_file"] = JsonFile
    return command


def start(command: Callable[..., None], arguments: Seq[str] | None = None) -> None:
    """Run the command of a benchmark's module and exit. arguments: None = those of this process."""
    app = App("")
    app.command()(command)
    spec: Any = sys.modules[command.__module__].__spec__
    main(arguments, app, f"python -m {spec.name}")
