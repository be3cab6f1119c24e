"""The commands `forerun bench ...`. They parse arguments and call benchmarks. Printing help imports no benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.bench import suites
from forerun.bench.plans import SHAPE_NAMES, LatencyPlan, MethodsPlan, SuitePlan
from forerun.cli import flags
from forerun.cli.help import App
from forerun.cli.signatures import STANDARD_OUTPUT, Fields, Given, writable
from forerun.output_file import write_whole
from forerun.registry import parse_specs

# Benchmarks for developers, which are no longer commands.
MOVED = (
    *("attacks", "bits", "gaps", "newcomers", "grammars", "kernels", "kv_disk", "peers", "peers_t5", "quality"),
    *("random_file", "replicas", "schemas", "hostile", "serving", "throughput", "tools"),
)
app = App(
    "Measure this machine and model; each benchmark prints what it does, a table, and how to read it.",
    moved={name: name for name in MOVED} | {"tune": "tune_grid"},
)
JSON_HELP = "file for all that was measured, one line of JSON; - = standard output"
Size = Annotated[int | None, typer.Option(help="elements; overrides the preset's", show_default=False)]
JsonFile = Annotated[Path | None, typer.Option("--json", help=JSON_HELP, show_default=False, callback=writable)]


def keep(record: Mapping[str, Any], file: Path | None) -> None:
    """Write a record as JSON to a file, or to standard output for `-`. file: None = write nothing."""
    if file == STANDARD_OUTPUT:
        print(json.dumps(record), flush=True)
    elif file is not None:
        write_whole(file, f"{json.dumps(record)}\n")


@app.command()
def latency(
    engine: Annotated[Given, flags.engine("ignore_config_keys", *flags.MODEL)],
    plan: Annotated[Given, Fields(LatencyPlan, is_plan=True)],
    target: flags.TargetArgument = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="w1: a draft model in the shape of Llama 3.2 1B, a target in that of 3B, bfloat16, K = 1, 2, 3, 5",
            show_default=False,
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare plain decoding with every drafter on held-out prompts, and show the speed-up that theory predicts."""
    from forerun.bench import latency as bench

    wanted, options = bench.planned(workload, plan)
    given = {**options, **{k: v for k, v in {**engine, "target": target}.items() if v is not None}}
    keep(bench.run(flags.engine_config(given), wanted), json_file)


@app.command()
def methods(
    engine: Annotated[Given, flags.engine("ignore_config_keys", "spec_length", *flags.MODEL, "max_seq_len")],
    plan: Annotated[Given, Fields(MethodsPlan, is_plan=True)],
    target: flags.TargetArgument = None,
    json_file: JsonFile = None,
) -> None:
    """Compare plain decoding with drafters, pacing policies and rules on six kinds of work, and check the texts."""
    config = flags.engine_config({**engine, "target": target})
    from forerun.bench import methods as bench

    keep(bench.run(config, MethodsPlan(**_once_each(plan))), json_file)


@app.command()
def suite(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(suites.names())}", show_default=False)],
    engine: Annotated[Given, flags.engine("ignore_config_keys", "spec_length", *flags.MODEL, "max_seq_len")],
    plan: Annotated[Given, Fields(SuitePlan, is_plan=True)],
    target: flags.TargetArgument = None,
    json_file: JsonFile = None,
) -> None:
    """Compare plain decoding with the engine's default drafting on a public benchmark, and check the texts."""
    config = flags.engine_config({**engine, "target": target})
    from forerun.bench import suite as bench

    keep(bench.run(config, SuitePlan(**_once_each(plan)), name), json_file)


def _once_each(plan: Given) -> Given:
    """Return a plan without repeated temperatures, policies and rules."""
    reading: dict[str, Any] = {"temperatures": dict.fromkeys, "pacings": parse_specs, "acceptances": parse_specs}
    return plan | {name: tuple(read(plan[name])) for name, read in reading.items() if name in plan}


@app.command()
def widen(
    source: Annotated[str, typer.Argument(help="trained model: a folder, a name or a hub id", show_default=False)],
    out: Annotated[Path, typer.Argument(help="folder to write, new or empty", show_default=False)],
    shape: Annotated[str, typer.Option(help=f"{SHAPE_NAMES}, at the sizes of these models")] = "llama-3.2-1b",
    hidden_size: Size = None,
    num_layers: Size = None,
    num_heads: Size = None,
    num_kv_heads: Size = None,
    ffn_size: Size = None,
    head_dim: Size = None,
    vocab_size: Size = None,
    head: Annotated[
        str | None,
        typer.Option(help="eagle head of the source, named as drafters name it; widened to OUT/head [default: none]"),
    ] = None,
) -> None:
    """Write a larger checkpoint that computes the same function: a widened small model, for speed measurements."""
    sizes = {k: v for k, v in locals().items() if k not in ("source", "out", "shape", "head") and v is not None}
    import dataclasses

    from forerun.bench import widen as bench
    from forerun.models.hub import locate
    from forerun.models.opened import spec_of
    from forerun.text.terminal import visible

    folder = locate(source)
    small = spec_of(folder)
    wide = dataclasses.replace(bench.shape_named(shape, small), **sizes)
    of = None if head is None else bench.head_to_widen(head, wide, small.vocab_size)
    config = bench.write_widened(folder, out, wide)
    if of is not None:
        bench.write_widened_head(of, out / "head", wide)
    size = f"{bench.num_parameters(config):,} parameters"
    typer.echo(f"{visible(str(out))}: {size}, a widened small model ({bench.describe(config)})")


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="what benchmarks wrote with --json", show_default=False)],
    out: Annotated[Path, typer.Option(help="the page to write", callback=writable)] = Path("report.html"),
) -> None:
    """Collect the results of benchmarks in one HTML page with plots, which needs no other file. Needs matplotlib."""
    from forerun.bench import report as bench
    from forerun.text.terminal import visible

    num_records = bench.run(files, out)
    typer.echo(f"{visible(str(out))}: {num_records} record{'s' * (num_records != 1)}")
