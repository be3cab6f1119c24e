"""The command `forerun tune`, which parses and calls. torch is imported when it runs, not to print help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli import flags
from forerun.cli.bench import JsonFile, keep, writable
from forerun.cli.inputs import read_prompt_file
from forerun.errors import BadOption, shown

PROMPTS_HELP = (
    "prompts like yours: one text, or JSON lines with prompt or messages, as forerun generate --prompt-file reads them "
    "[default: six kinds of work; code for the shipped model]"
)
DRAFT_HELP = "drafter to consider beside those that need no file: a draft model, or a name; may be repeated"
OUT_HELP = "config file to write, TOML, or JSON where its name ends in .json; every command takes it with --config"
PICTURE_HELP = "file for a plot of the speed-up by draft length, .svg or .png; needs matplotlib"

Drafts = Annotated[list[str] | None, typer.Option("--draft", help=DRAFT_HELP, show_default=False)]
Only = Annotated[bool, typer.Option("--only", help="consider those of --draft alone")]
Prompts = Annotated[Path | None, typer.Option("--prompts", help=PROMPTS_HELP, show_default=False)]
Temperature = Annotated[float, typer.Option(help=flags.TEMPERATURE_HELP)]
Concurrency = Annotated[int, typer.Option(help="requests at once", min=1, max=1024)]
Minutes = Annotated[float, typer.Option(help="of measuring, about; a large model may need more")]
MaxTokens = Annotated[int, typer.Option(help="tokens per prompt at most", min=2)]
Picture = Annotated[Path | None, typer.Option(help=PICTURE_HELP, show_default=False, callback=writable)]


def tune(
    target: Annotated[str | None, typer.Argument(help=str(flags.TARGET_HELP), show_default=False)] = None,
    prompts: Prompts = None,
    out: Annotated[Path | None, typer.Option(help=OUT_HELP, show_default=False, callback=writable)] = None,
    picture: Picture = None,
    draft: Drafts = None,
    only: Only = False,
    temperature: Temperature = 0.0,
    concurrency: Concurrency = 1,
    minutes: Minutes = 5.0,
    max_tokens: MaxTokens = 64,
    seed: Annotated[int, typer.Option(help="of the sampled runs; each prompt adds its index")] = 1,
    ignore_config_keys: flags.IgnoreConfigKeys = None,
    calibrate: flags.Calibrate = None,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    quantization: flags.Quantization = None,
    chat_template: flags.ChatTemplate = None,
    ops: flags.Ops = None,
    kv_cache_backend: flags.CacheBackend = None,
    max_seq_len: flags.MaxSeqLen = None,
    config: flags.ConfigFile = None,
    json_file: JsonFile = None,
) -> None:
    """Find the fastest drafter and draft length for your prompts, model and machine, and write a config file."""
    engine = flags.engine_config({k: v for k, v in locals().items() if k != "draft"}, config)
    if not 0 < minutes < float("inf"):
        raise BadOption(f"--minutes {minutes:g} is not possible: it must be above 0")
    defaults = flags.sampling_params({"temperature": temperature, "max_tokens": max_tokens, "seed": seed})
    requests = read_prompt_file(prompts, defaults, ignored=("id", "kind")) if prompts is not None else []
    if prompts is not None and not any(prompt for prompt, _ in requests):
        raise BadOption(f"--prompts {shown(str(prompts))} holds no prompt: write one, or leave the option out")
    from forerun.bench import tune as bench
    from forerun.bench.tune_engine import TunePlan

    plan = TunePlan(
        requests=tuple(requests),
        drafts=tuple(draft or ()),
        only=only,
        temperature=temperature,
        concurrency=concurrency,
        minutes=minutes,
        max_tokens=max_tokens,
        seed=seed,
        out=out,
        picture=picture,
    )
    keep(bench.run(engine, plan), json_file)
