"""The command `forerun tune`: parses its arguments and calls bench/tune.py, which is not imported to print help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.bench.plans import TunePlan
from forerun.cli import flags
from forerun.cli.bench import JsonFile, keep
from forerun.cli.inputs import read_prompt_file
from forerun.cli.signatures import Fields, Given
from forerun.errors import BadOption, shown

PROMPTS_HELP = (
    "prompts like yours: one text, or JSON lines with prompt or messages, as forerun generate --prompt-file reads them "
    "[default: six kinds of work; code for the shipped model]"
)
ENGINE = ("ignore_config_keys", "calibrate", "chat_template", "max_seq_len")


def tune(
    plan: Annotated[Given, Fields(TunePlan, is_plan=True)],
    engine: Annotated[Given, flags.engine(*ENGINE, *flags.MODEL)],
    target: flags.TargetArgument = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help=PROMPTS_HELP, show_default=False)] = None,
    json_file: JsonFile = None,
) -> None:
    """Find the fastest drafter and draft length for your prompts, model and machine, and write a config file."""
    config = flags.engine_config({**engine, "target": target})
    asked = TunePlan(**plan)
    if not 0 < asked.minutes < float("inf"):
        raise BadOption(f"--minutes {asked.minutes:g} is not possible: it must be above 0")
    defaults = flags.sampling_params({name: plan[name] for name in ("temperature", "max_tokens", "seed")})
    requests = read_prompt_file(prompts, defaults, ignored=("id", "kind")) if prompts is not None else []
    if prompts is not None and not any(prompt for prompt, _ in requests):
        raise BadOption(f"--prompts {shown(str(prompts))} holds no prompt: write one, or leave the option out")
    from forerun.bench import tune as bench

    keep(bench.run(config, TunePlan(**plan, requests=tuple(requests))), json_file)
