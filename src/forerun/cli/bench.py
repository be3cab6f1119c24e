"""The commands `forerun bench ...`, which parse and call. torch is imported when one runs, not to print help."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import flags
from forerun.cli.help import App
from forerun.errors import BadOption, not_installed, shown
from forerun.registry import parse_specs

app = App("Measure this machine and model; each benchmark prints what it does, a table, and how to read it.")
SHAPE_NAMES = "demo (about 0.4 B), llama-3.2-1b or llama-3.2-3b (with as many layers as it has, at least)"
JSON_HELP = "file for all that was measured, one line of JSON [default: standard output where that is no terminal]"
Size = Annotated[int | None, typer.Option(help="elements; overrides the preset's", show_default=False)]


def writable(option: typer.CallbackParam, file: Path | None) -> Path | None:
    """The file of an option. Raises BadOption for one that cannot be written, before anything is measured."""
    if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise BadOption(
            f"{option.opts[0]} {shown(str(file))} cannot be written: name a file in a folder that may be written to"
        )
    return file


PromptFile = Annotated[Path | None, typer.Option(help='JSON lines with "id" and "text" [default: the shipped ones]')]
LatencyPromptFile = Annotated[
    Path | None,
    typer.Option(help='JSON lines with "id", and "text" or a list of "ids" [default: the shipped ones]'),
]
WorkFile = Annotated[
    Path | None, typer.Option(help='JSON lines with "id", "kind" and "messages" [default: the shipped ones]')
]
Kinds = Annotated[
    list[str] | None,
    typer.Option(
        help="chat, summary, edit, question, list or story; may be repeated [default: all]", show_default=False
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help=JSON_HELP, show_default=False, callback=writable)]


def keep(record: Mapping[str, Any], file: Path | None) -> None:
    """Write what was measured where programs look for it; a table is all that a terminal gets."""
    if file is not None:
        file.write_text(f"{json.dumps(record)}\n", encoding="utf-8")
    elif not sys.stdout.isatty():
        print(json.dumps(record), flush=True)


@app.command()
def latency(
    target: flags.Target = None,
    ignore_config_keys: flags.IgnoreConfigKeys = None,
    draft: Annotated[
        list[str] | None, typer.Option(help="drafter to measure; may be repeated [default: all]", show_default=False)
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="w1: a draft model in the shape of Llama 3.2 1B, a target in that of 3B, bfloat16, K = 1, 2, 3, 5",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help=f"the target is widened to it in memory: {SHAPE_NAMES} [default: none]")
    ] = None,
    draft_shape: Annotated[
        str | None, typer.Option(help="the same for the draft model, which is then the only drafter [default: none]")
    ] = None,
    spec_length: Annotated[
        list[int] | None, typer.Option(help="tokens drafted per step (K); may be repeated [default: 5]", min=1)
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="may be repeated [default: 0 and 1]")] = None,
    acceptance: Annotated[str, typer.Option(help="verification rule at temperature > 0")] = "ratio",
    num_prompts: Annotated[int, typer.Option("--prompts", help="held-out prompts", min=1)] = 5,
    max_tokens: Annotated[int, typer.Option(help="tokens per prompt", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="times every prompt is run", min=1)] = 1,
    prompt_file: LatencyPromptFile = None,
    seed: Annotated[int, typer.Option(help="of the sampled runs; each prompt adds its index")] = 1,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    quantization: flags.Quantization = None,
    ops: flags.Ops = None,
    kv_cache_backend: flags.CacheBackend = None,
    config: flags.ConfigFile = None,
    json_file: JsonFile = None,
) -> None:
    """Compare plain decoding with every drafter on held-out prompts, beside the speed-up that theory predicts."""
    given = {k: v for k, v in locals().items() if k not in ("draft", "spec_length", "json_file")}
    from forerun.bench import latency as bench

    plan, options = bench.planned(
        workload,
        drafts=tuple(draft or ()),
        shape=shape,
        draft_shape=draft_shape,
        spec_lengths=tuple(spec_length or ()),
        temperatures=tuple(temperature or (0.0, 1.0)),
        acceptance=acceptance,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        num_repeats=repeats,
        prompt_file=prompt_file,
        seed=seed,
    )
    keep(
        bench.run(flags.engine_config({**options, **{k: v for k, v in given.items() if v is not None}}, config), plan),
        json_file,
    )


@app.command()
def methods(
    target: flags.Target = None,
    ignore_config_keys: flags.IgnoreConfigKeys = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="drafter to measure, with its options; may be repeated [default: all]", show_default=False),
    ] = None,
    kind: Kinds = None,
    shape: Annotated[str, typer.Option(help=f"the target is widened to it in memory: {SHAPE_NAMES}, or none")] = "none",
    temperature: Annotated[list[float] | None, typer.Option(help="may be repeated [default: 0 and 1]")] = None,
    acceptance: Annotated[
        list[str] | None,
        typer.Option(
            help="verification rules to compare, as in ratio,block; may be repeated [default: match at temperature > "
            "0, which keeps texts]",
            show_default=False,
        ),
    ] = None,
    spec_length: flags.SpecLength = None,
    pacing: Annotated[
        list[str] | None,
        typer.Option(
            help="pacing policies to compare, as in auto,fixed,svip; may be repeated [default: fixed where "
            "--spec-length is given, else auto]",
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option("--prompts", help="of each kind", min=1)] = 2,
    max_tokens: Annotated[int, typer.Option(help="tokens per prompt at most", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="times every prompt is run", min=1)] = 1,
    prompt_file: WorkFile = None,
    seed: Annotated[int, typer.Option(help="of the first run; each turn adds one")] = 1,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="file for a picture, .svg or .png; both where its name ends in neither; needs matplotlib",
            show_default=False,
            callback=writable,
        ),
    ] = None,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    quantization: flags.Quantization = None,
    ops: flags.Ops = None,
    kv_cache_backend: flags.CacheBackend = None,
    max_seq_len: flags.MaxSeqLen = None,
    config: flags.ConfigFile = None,
    json_file: JsonFile = None,
) -> None:
    """Compare plain decoding with drafters, pacing policies and rules on six kinds of work, and check the texts."""
    engine = flags.engine_config({k: v for k, v in locals().items() if k not in ("draft", "pacing")}, config)
    from forerun.bench import methods as bench

    plan = bench.MethodsPlan(
        drafts=tuple(draft or ()),
        kinds=tuple(kind or ()),
        shape=shape,
        temperatures=tuple(dict.fromkeys(temperature or (0.0, 1.0))),
        pacings=tuple(parse_specs(pacing or ())),
        acceptances=tuple(parse_specs(acceptance or ())),
        prompts_per_kind=num_prompts,
        max_tokens=max_tokens,
        num_repeats=repeats,
        prompt_file=prompt_file,
        picture=picture,
        seed=seed,
    )
    keep(bench.run(engine, plan), json_file)


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
    from forerun.models.loading import read_config, read_raw_config
    from forerun.text.terminal import visible

    folder = locate(source)
    small = read_config(read_raw_config(folder))
    wide = dataclasses.replace(bench.shape_named(shape, small), **sizes)
    of = None if head is None else bench.head_to_widen(head, wide, small.vocab_size)
    config = bench.write_widened(folder, out, wide)
    if of is not None:
        bench.write_widened_head(of, out / "head", wide)
    size = f"{bench.num_parameters(config):,} parameters"
    typer.echo(f"{visible(str(out))}: {size}, a widened small model ({bench.describe(config)})")


@app.command()
def peers(
    target: flags.Target = None,
    draft: flags.Draft = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help=f"the target is widened to it in a folder: {SHAPE_NAMES}, or none "
            "[default: llama-3.2-1b for the shipped target]",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="keeps the widened model and what peers convert it to, about 4 GB [default: a temporary one]",
            show_default=False,
        ),
    ] = None,
    spec_length: Annotated[
        list[int] | None, typer.Option(help="tokens drafted per step (K); may be repeated [default: 5]", min=1)
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option("--prompts", help="held-out prompts [default: 5]", min=1, show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="tokens per prompt [default: 64]", min=2, show_default=False)
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            help="times every prompt is run [default: 1], or every pass [default: 15]", min=1, show_default=False
        ),
    ] = None,
    prompt_file: PromptFile = None,
    forward: Annotated[
        list[int] | None,
        typer.Option(
            help="instead of prompts, measure single passes of this many tokens with all their logits; may be repeated",
            min=1,
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="tokens before a pass of --forward; may be repeated [default: 256]", min=1, show_default=False
        ),
    ] = None,
    quantization: flags.Quantization = None,
    num_threads: Annotated[
        int | None,
        typer.Option(help="of every engine [default: FORERUN_NUM_THREADS]", min=1, max=1024, show_default=False),
    ] = None,
    transformers_python: Annotated[
        Path | None, typer.Option(help="interpreter that can import transformers [default: this one]")
    ] = None,
    openvino_python: Annotated[
        Path | None,
        typer.Option(help="interpreter that can import openvino_genai and optimum.intel [default: this one]"),
    ] = None,
    llama_cpp_python: Annotated[
        Path | None, typer.Option(help="interpreter that can import llama_cpp, for GGUF files [default: this one]")
    ] = None,
    ops: flags.Ops = None,
    kv_cache_backend: flags.CacheBackend = None,
    config: flags.ConfigFile = None,
    json_file: JsonFile = None,
) -> None:
    """Run the same checkpoint, prompts and threads in forerun, transformers, OpenVINO and llama.cpp, greedily."""
    engine = flags.engine_config({k: v for k, v in locals().items() if k != "spec_length"}, config)
    from forerun.bench import peer_forwards, peers as bench

    pythons = {"transformers": transformers_python, "openvino": openvino_python, "llama.cpp": llama_cpp_python}
    both = {"shape": shape, "folder": folder, "num_repeats": repeats, "num_threads": num_threads, "pythons": pythons}
    of_prompts = {
        "spec_lengths": tuple(spec_length or ()),
        "num_prompts": num_prompts,
        "max_tokens": max_tokens,
        "prompt_file": prompt_file,
    }
    if forward:
        options = {"draft": draft, **of_prompts}
        keep(peer_forwards.run(engine, peer_forwards.planned(forward, context, both, options)), json_file)
    else:
        keep(bench.run(engine, bench.planned(context, both, of_prompts)), json_file)


@app.command()
def throughput(
    target: flags.Target = None,
    ignore_config_keys: flags.IgnoreConfigKeys = None,
    draft: flags.Draft = None,
    shape: Annotated[str, typer.Option(help=f"the target is widened to it in memory: {SHAPE_NAMES}, or none")] = "none",
    concurrency: Annotated[
        list[int] | None,
        typer.Option(help="requests at once; may be repeated [default: 1, 2, 4, 8, 16 and 32]", min=1),
    ] = None,
    spec_length: Annotated[
        list[int] | None,
        typer.Option(help="fixed draft length to compare with; may be repeated [default: 1, 3, 5 and 8]", min=1),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="tokens per request, on average", min=2)] = 48,
    waves: Annotated[int, typer.Option(help="requests of a run, over those at once", min=1)] = 3,
    repeats: Annotated[int, typer.Option(help="times everything is run, each time on other prompts", min=2)] = 3,
    temperature: Annotated[float, typer.Option(help="0 = greedy")] = 0.0,
    prompt_file: PromptFile = None,
    wrong_drafter: Annotated[bool, typer.Option(help="measure auto with a drafter that is always wrong, too")] = True,
    seed: Annotated[int, typer.Option(help="of the sampled runs; each prompt adds its index")] = 1,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    quantization: flags.Quantization = None,
    ops: flags.Ops = None,
    kv_cache_backend: flags.CacheBackend = None,
    config: flags.ConfigFile = None,
    json_file: JsonFile = None,
) -> None:
    """Compare plain decoding, fixed draft lengths and pacing=auto with many requests at once, in tokens per second."""
    engine = flags.engine_config({k: v for k, v in locals().items() if k != "spec_length"}, config)
    from forerun.bench import throughput as bench

    lists = {"concurrencies": tuple(concurrency or ()), "spec_lengths": tuple(spec_length or ())}
    plan = bench.ThroughputPlan(
        shape=shape,
        max_tokens=max_tokens,
        num_repeats=repeats,
        num_waves=waves,
        temperature=temperature,
        prompt_file=prompt_file,
        wrong_drafter=wrong_drafter,
        seed=seed,
        **{name: values for name, values in lists.items() if values},
    )
    keep(bench.run(engine, plan), json_file)


@app.command()
def replicas(
    target: Annotated[str, typer.Option(help="what every replica serves")] = "shipped",
    replicas: Annotated[int, typer.Option(help="on each side", min=1)] = 2,
    concurrency: Annotated[int, typer.Option(help="requests at once", min=1)] = 16,
    max_tokens: Annotated[int, typer.Option(help="tokens per request", min=1)] = 64,
    seconds: Annotated[float, typer.Option(help="of each round", min=0.1)] = 10.0,
    repeats: Annotated[int, typer.Option(help="rounds of each side", min=1)] = 5,
    json_file: JsonFile = None,
) -> None:
    """Compare replicas of Ray on this machine with pinned `forerun serve` processes, in tokens per second."""
    if find_spec("ray") is None:
        raise not_installed("this benchmark", "ray", "ray")
    from forerun.bench import replicas as bench

    plan = bench.ReplicasPlan(target, replicas, concurrency, max_tokens, seconds, repeats)
    keep(bench.run(plan), json_file)


@app.command()
def gaps(
    target: flags.Target = None,
    ignore_config_keys: flags.IgnoreConfigKeys = None,
    draft: flags.Draft = None,
    shape: Annotated[str, typer.Option(help=f"the target is widened to it in memory: {SHAPE_NAMES}, or none")] = "none",
    spec_length: Annotated[int, typer.Option(help="fixed draft length beside plain decoding and auto", min=1)] = 5,
    prompt_tokens: Annotated[int, typer.Option(help="of the prompt that is read twice", min=2)] = 2000,
    long_prompt_tokens: Annotated[int, typer.Option(help="of the prompt that comes in beside a stream", min=2)] = 4000,
    steps: Annotated[
        int, typer.Option(help="behind the first token of that, of which the gaps are measured", min=2)
    ] = 100,
    repeats: Annotated[int, typer.Option(help="times everything is run, each time on other prompts", min=1)] = 3,
    prompt_file: Annotated[
        Path | None, typer.Option(help='JSON lines with "id" and "text", joined [default: the shipped ones]')
    ] = None,
    prefill_chunk_tokens: flags.PrefillChunkTokens = None,
    draft_catchup_tokens: flags.DraftCatchupTokens = None,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    quantization: flags.Quantization = None,
    ops: flags.Ops = None,
    kv_cache_backend: flags.CacheBackend = None,
    config: flags.ConfigFile = None,
    json_file: JsonFile = None,
) -> None:
    """Measure the time to the first token, cold and cached, and the gaps between tokens while a long prompt is read."""
    engine = flags.engine_config({k: v for k, v in locals().items() if k != "spec_length"}, config)
    from forerun.bench import gaps as bench

    plan = bench.GapsPlan(
        shape=shape,
        spec_length=spec_length,
        prompt_tokens=prompt_tokens,
        long_prompt_tokens=long_prompt_tokens,
        num_steps=steps,
        num_repeats=repeats,
        prompt_file=prompt_file,
    )
    keep(bench.run(engine, plan), json_file)


@app.command()
def quality(
    target: flags.Target = None,
    ignore_config_keys: flags.IgnoreConfigKeys = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="float32, bfloat16, int8, int4[:group=N], or file: a quantised checkpoint as it is; may be repeated "
            "[default: all that are possible]",
            show_default=False,
        ),
    ] = None,
    num_tokens: Annotated[int, typer.Option("--tokens", help="of the text", min=16)] = 20_000,
    window: Annotated[int, typer.Option(help="tokens that are read with one cache", min=8)] = 512,
    num_prompts: Annotated[int, typer.Option("--prompts", help="texts that lookup continues, 0 = none", min=0)] = 8,
    max_tokens: Annotated[int, typer.Option(help="tokens of each", min=2)] = 64,
    text_file: Annotated[
        Path | None,
        typer.Option(help="file with the text [default: Python's documentation; held-out code for the shipped target]"),
    ] = None,
    ops: flags.Ops = None,
    config: flags.ConfigFile = None,
    json_file: JsonFile = None,
) -> None:
    """Measure what fewer bits cost: perplexity, and how often drafts are accepted."""
    engine = flags.engine_config(dict(locals()), config)
    from forerun.bench import quality as bench

    keep(
        bench.run(
            engine, bench.QualityPlan(tuple(variant or ()), num_tokens, window, num_prompts, max_tokens, text_file)
        ),
        json_file,
    )


@app.command()
def kernels(
    shape: Annotated[str, typer.Option(help="random-1.24b (Llama 3.2 1B), or demo; random weights")] = "random-1.24b",
    dtype: Annotated[str, typer.Option(help="bfloat16, float32, int8 or int4[:group=N]")] = "bfloat16",
    isa: Annotated[
        str | None, typer.Option(help="avx512, avx2 or baseline [default: the best]", show_default=False)
    ] = None,
    num_threads: Annotated[
        int | None,
        typer.Option(help="of the kernels [default: FORERUN_NUM_THREADS]", min=1, max=1024, show_default=False),
    ] = None,
    repeats: Annotated[int, typer.Option(help="rounds, each with a bandwidth of its own", min=1)] = 5,
    json_file: JsonFile = None,
) -> None:
    """Measure each operator at 1 to 64 rows: time, bytes per second, share of the bandwidth, and t(M)/t(1)."""
    from forerun.bench import kernels as bench

    config = bench.config_named(shape)
    keep(
        bench.run(bench.KernelsPlan(config=config, dtype=dtype, isa=isa, num_threads=num_threads, num_repeats=repeats)),
        json_file,
    )


@app.command()
def serving(
    target: flags.Target = None,
    ignore_config_keys: flags.IgnoreConfigKeys = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="server that runs already and speaks OpenAI's API, as URL or NAME=URL; may be repeated "
            "[default: servers are started]",
            show_default=False,
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="what requests to --url call it [default: the first it lists]", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="FORERUN_API_KEY", help="of --url [default: none]", show_default=False)
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="server to start: plain, fixed, auto, llama-server or vllm; may be repeated [default: the first "
            "three, and the others where they are on the PATH and run the target]",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            help="requests at once; may be repeated [default: 1, 4 and 8; 16 with --overhead; none with --rate]",
            min=1,
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="requests per second, as a Poisson process; may be repeated", show_default=False),
    ] = None,
    num_requests: Annotated[int, typer.Option("--requests", help="of a run", min=1)] = 32,
    max_tokens: Annotated[int, typer.Option(help="tokens per request", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="times every load is run, each time with other prompts", min=1)] = 3,
    temperature: Annotated[float, typer.Option(help="0 = greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="of arrivals, and of sampled requests; each adds its index")] = 1,
    ignore_eos: Annotated[
        bool, typer.Option(help="all answers have --max-tokens; off for servers that refuse the field ignore_eos")
    ] = True,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="goodput counts requests whose TTFT is at most this", show_default=False)
    ] = None,
    slo_itl_ms: Annotated[
        float | None,
        typer.Option(help="and whose time per token behind the first is at most this", show_default=False),
    ] = None,
    kind: Kinds = None,
    prompt_file: WorkFile = None,
    timeout_s: Annotated[float, typer.Option(help="for one answer")] = 600.0,
    overhead: Annotated[
        bool, typer.Option("--overhead", help="instead, what HTTP and texts take of the engine's throughput")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="file for a plot, .svg or .png; needs matplotlib", show_default=False, callback=writable),
    ] = None,
    draft: flags.Draft = None,
    spec_length: flags.SpecLength = None,
    pacing: flags.Pacing = None,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    quantization: flags.Quantization = None,
    chat_template: flags.ChatTemplate = None,
    ops: flags.Ops = None,
    kv_cache_backend: flags.CacheBackend = None,
    kv_cache_tokens: flags.CacheTokens = None,
    max_batch_size: flags.MaxBatchSize = None,
    max_seq_len: flags.MaxSeqLen = None,
    prefill_chunk_tokens: flags.PrefillChunkTokens = None,
    config: flags.ConfigFile = None,
    json_file: JsonFile = None,
) -> None:
    """Measure servers under load: tokens per second, time to the first token, gaps, goodput; forerun's and others'."""
    given = dict(locals())
    engine = flags.engine_config(given, config)
    try:
        from forerun.bench import serving as bench, serving_overhead
    except ImportError as error:
        raise not_installed("forerun bench serving", "serve", error.name) from None
    from forerun.bench.serving_client import Load
    from forerun.bench.serving_results import Limits

    usual = () if rate else ((16,) if overhead else (1, 4, 8))
    loads = [*(Load(concurrency=num) for num in concurrency or usual), *(Load(rate=one) for one in rate or ())]
    plan = bench.ServingPlan(
        urls=tuple(url or ()),
        model=served_model_name,
        api_key=api_key or None,
        loads=tuple(dict.fromkeys(loads)),
        num_requests=num_requests,
        num_repeats=repeats,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        limits=Limits(*(None if limit is None else limit / 1e3 for limit in (slo_ttft_ms, slo_itl_ms))),
        kinds=tuple(kind or ()),
        prompt_file=prompt_file,
        timeout_s=timeout_s,
        picture=picture,
        **({"variants": tuple(dict.fromkeys(variant))} if variant else {}),
    )
    keep((serving_overhead if overhead else bench).run(engine, plan), json_file)


@app.command()
def tune(
    target: flags.Target = None,
    ignore_config_keys: flags.IgnoreConfigKeys = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="drafter beside those that need no file; may be repeated", show_default=False),
    ] = None,
    only: Annotated[bool, typer.Option("--only", help="those of --draft alone")] = False,
    shape: Annotated[str, typer.Option(help=f"the target is widened to it in memory: {SHAPE_NAMES}, or none")] = "none",
    temperature: Annotated[float, typer.Option(help="0 = greedy")] = 0.0,
    concurrency: Annotated[int, typer.Option(help="requests at once", min=1)] = 1,
    minutes: Annotated[float, typer.Option(help="of the tuning, about")] = 5.0,
    max_tokens: Annotated[int, typer.Option(help="tokens per prompt at most", min=2)] = 64,
    spec_length: Annotated[
        list[int] | None,
        typer.Option(
            help="length of the grid; may be repeated [default: 1, 2, 3, 4, 6, 8, 12 and 16]",
            min=1,
            max=16,
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="rounds of the grid", min=1)] = 3,
    dtype: flags.Dtype = None,
    quantization: flags.Quantization = None,
    ops: flags.Ops = None,
    config: flags.ConfigFile = None,
    json_file: JsonFile = None,
) -> None:
    """Check `forerun tune`: measure every drafter at every length beside what it predicted and chose."""
    engine = flags.engine_config({k: v for k, v in locals().items() if k not in ("draft", "spec_length")}, config)
    from forerun.bench import tune_grid as bench
    from forerun.bench.tune_engine import TunePlan

    plan = TunePlan(
        drafts=tuple(draft or ()),
        only=only,
        temperature=temperature,
        concurrency=concurrency,
        minutes=minutes,
        max_tokens=max_tokens,
        shape=shape,
    )
    lengths = {"lengths": tuple(dict.fromkeys(spec_length))} if spec_length else {}
    keep(bench.run(engine, bench.GridPlan(plan, num_rounds=repeats, **lengths)), json_file)


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="what benchmarks wrote with --json", show_default=False)],
    out: Annotated[Path, typer.Option(help="the page to write", callback=writable)] = Path("report.html"),
) -> None:
    """Collect what benchmarks measured into one HTML page with plots, which needs nothing else; needs matplotlib."""
    from forerun.bench import report as bench
    from forerun.text.terminal import visible

    num_records = bench.run(files, out)
    typer.echo(f"{visible(str(out))}: {num_records} record{'s' * (num_records != 1)}")
