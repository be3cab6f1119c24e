"""The commands `forerun train ...`: parse their arguments and call train/. torch is not imported to print help."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.help import App
from forerun.cli.methods import MethodName, list_methods
from forerun.cli.signatures import Fields, Given
from forerun.train.config import DrafterConfig, HeadConfig, SampleConfig, TrainConfig
from forerun.train.shape import ModelShape

if TYPE_CHECKING:
    from forerun.text.progress import Bar
    from forerun.text.waiting import Waiting

app = App(
    "Train small language models and drafters.",
    moved={"examples": "t5 examples", "seq2seq": "t5 train", "score": "t5 score"},
)

Target = Annotated[
    str | None, typer.Argument(help="a folder, GGUF file, name or hub id; none = smollm2", show_default=False)
]
Dtype = Annotated[str, typer.Option(help="of the target: auto, float32 or bfloat16")]
Ops = Annotated[str, typer.Option(help="of the target: auto, native or reference")]
Texts = Annotated[
    list[Path] | None,
    typer.Option(help="file, or folder of files; may be repeated; default: the standard library", show_default=False),
]
MaxTextMb = Annotated[int, typer.Option(help="reading of named texts ends there, megabytes", min=1)]
NumPrompts = Annotated[int, typer.Option(help="prompts, spread evenly over the file", min=1)]
SeedOfDraws = Annotated[int, typer.Option(help="of the draws")]
Resume = Annotated[bool, typer.Option(help="go on from the state in the out folder")]
Quiet = Annotated[bool, typer.Option(help="no progress is shown")]
RESUMED = "the same command with --resume"


# ------------------------------------------------------------------------------------------------------------ models


def _waiting(quiet: bool, text: str = "starting") -> Waiting:
    """Return a display of what the command waits for, first for the import of torch, which takes seconds."""
    from forerun.text.waiting import Waiting

    return Waiting(text, is_quiet=quiet)


def _bar(quiet: bool) -> Bar:
    """Return a progress bar of what is measured. It is removed at the end."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from forerun.text.progress import Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Bar(*columns, is_quiet=quiet, transient=True)


@contextmanager
def _saying_how_to_go_on(kept: Path, again: str = "the same command") -> Iterator[None]:
    """Say on standard error, where Ctrl-C stops the `with` block, what is kept and which command goes on.

    kept: the file from which a later run goes on. again: the command that goes on, in words.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        if str(stop):
            say(f"stopped at {stop}: {again} goes on from there", err=True)
        elif kept.exists():
            say(f"stopped: {again} goes on from what {kept} holds", err=True)
        else:
            say("stopped: nothing was saved to go on from, and the same command begins anew", err=True)
        raise


@app.command()
def lm(
    run: Annotated[Given, Fields(TrainConfig, is_plan=True)],
    sizes: Annotated[Given, Fields(ModelShape, is_plan=True)],
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Train a small model on Python source, token ids or a target's text. With --teacher it learns from soft labels."""
    with _saying_how_to_go_on(run["out"] / "state.pt", RESUMED):
        with _waiting(quiet):
            from forerun.train import lm as training

        if "vocab_size" not in sizes and "teacher" in run:
            sizes["vocab_size"] = training.num_ids_of(run["teacher"])
        config = TrainConfig(shape=ModelShape.given(sizes, run["seq_len_tokens"]), **run)
        numbers = training.train(config, resume=resume, quiet=quiet)
    say(_numbers(numbers))


@app.command()
def head(
    run: Annotated[Given, Fields(HeadConfig, is_plan=True)],
    target: Target = None,
    dtype: Dtype = "auto",
    ops: Ops = "auto",
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Train a drafter that reads its target's hidden states, on texts that the target has written. Runs on the CPU."""
    from forerun.cli import waiting
    from forerun.config import EngineConfig
    from forerun.drafters.shared import trained

    with _saying_how_to_go_on(run["out"] / "state.pt", RESUMED):
        with _waiting(quiet):
            from forerun.train import head as training, heads as methods, loop

        config = HeadConfig(**{"lr": methods.rate_of(run["method"]), **run})
        # A head learns on the CPU: it is small, and the target's hidden states may be stored once, by --features.
        opened = waiting.opened(EngineConfig(target=target, dtype=dtype, ops=ops, device="cpu"))
        if "lr" not in run:
            config = replace(config, lr=methods.rate_of(config.method, opened.files.spec.hidden_size))
        checkpoint = opened.load()
        numbers = training.train(config, checkpoint, resume=resume, quiet=quiet, warn=lambda text: say(text, err=True))
    if config.init_from is not None:
        first = loop.read_log(config.out)[0]
        say("before: " + _numbers({key: first[key] for key in numbers}))
    say(_numbers(numbers))
    if config.keep:
        say(f"kept in {trained.keep(checkpoint.opened, config.out / 'head')}: draft=auto uses it for {checkpoint.name}")


@app.command()
def drafter(
    run: Annotated[Given, Fields(DrafterConfig, is_plan=True)],
    target: Target = None,
    dtype: Dtype = "auto",
    ops: Ops = "auto",
    quiet: Quiet = False,
) -> None:
    """Make a drafter for a target within --hours: sample texts, train a head on them, and keep it for draft=auto."""
    from forerun.drafters.shared import trained

    with _saying_how_to_go_on(run["out"] / "recipe.json"):
        with _waiting(quiet):
            from forerun.train import recipe

        config = DrafterConfig(**run)
        head = recipe.make(
            config, target, dtype=dtype, ops=ops, quiet=quiet, say=say, warn=lambda text: say(text, err=True)
        )
    say(_numbers(head.numbers))
    if config.keep:
        say(f"kept in {trained.keep(head.target, head.folder)}: draft=auto uses it for {head.target.name}")


@app.command("heads")
def list_heads(name: MethodName = None) -> None:
    """List the methods that `train head` can train, or show one method with its options."""
    how = "Train one with forerun train head --method NAME or --method NAME:option=value,option=value."
    if name is None:
        list_methods("forerun.train.heads", "method", None, how)
        return
    from forerun.train.heads import WHAT, rate_of  # which import torch: the list does without

    less = ", and less for a wide target" if rate_of(name, 1 << 20) < rate_of(name) else ""
    rate = f" Without --lr its learning rate is {rate_of(name):g}{less}."
    list_methods("forerun.train.heads", WHAT, name, how + rate)


@app.command()
def sample(
    run: Annotated[Given, Fields(SampleConfig, is_plan=True)],
    target: Target = None,
    dtype: Dtype = "auto",
    ops: Ops = "auto",
    quiet: Quiet = False,
) -> None:
    """Let the target write conversations, answers and continuations, half of them greedily."""
    with _saying_how_to_go_on(run["out"]):
        with _waiting(quiet):
            from forerun.train.sampling import Progress, write

        config = SampleConfig(**run)
        with _waiting(quiet, "opening the target") as waiting:

            def show(now: Progress) -> None:
                waiting.tell(f"{now.num_tokens:,} tokens, {now.tokens_per_s:,.0f} per second")

            done = write(config, target, show, tell=waiting.tell, dtype=dtype, ops=ops)
    size = config.out.stat().st_size / 1e6
    say(f"{done.num_tokens:,} tokens, {size:.1f} MB, in {config.out}; {done.tokens_per_s:.0f} tokens/s")


# ------------------------------------------------------------------------------------------------ prompts and numbers


@app.command()
def prompts(
    tokenizer: Annotated[str, typer.Option(help="tokenizer.json, or a model, that counts the tokens")],
    out: Annotated[Path, typer.Option(help="file to write: one JSON object per line with id, module, text")],
    limit: Annotated[int, typer.Option(help="prompts at most")] = 240,
    min_tokens: Annotated[int, typer.Option(help="tokens of a prompt at least")] = 40,
    max_tokens: Annotated[int, typer.Option(help="tokens of a prompt at most")] = 120,
    text: Annotated[Path | None, typer.Option(help="folder of Python sources; default: the standard library")] = None,
    seed: Annotated[int, typer.Option(help="of the choice")] = 0,
) -> None:
    """Write the benchmark prompts: beginnings of functions and classes from held-out modules."""
    from forerun.train.corpus import bench_prompts, load_corpus, write_prompts
    from forerun.train.texts import counting

    count = counting(tokenizer)
    held_out = load_corpus(text).bench
    chosen = bench_prompts(held_out, count, limit, min_tokens, max_tokens, seed)
    write_prompts(chosen, out)
    say(f"{len(chosen)} prompts in {out}")


@app.command()
def pair(
    target: Annotated[Path, typer.Option(help="checkpoint folder of the target")],
    draft: Annotated[Path, typer.Option(help="checkpoint folder of the draft model")],
    prompts: Annotated[Path, typer.Option(help="prompts.jsonl, as `train prompts` writes it")],
    out: Annotated[Path | None, typer.Option(help="file for the numbers, one JSON object per temperature")] = None,
    num_prompts: NumPrompts = 240,
    max_tokens: Annotated[int, typer.Option(help="tokens after each prompt")] = 128,
    spec_length: Annotated[int, typer.Option(help="tokens drafted per round")] = 5,
    seed: SeedOfDraws = 0,
    quiet: Quiet = False,
) -> None:
    """Measure alpha-hat of a pair at temperatures 0 and 1, in real speculative decoding."""
    with _waiting(quiet):
        from forerun.train.evaluate import PairNumbers, measure_pair, read_prompts, write_numbers

    texts = read_prompts(prompts, num_prompts, target=target)
    sizes = {"max_tokens": max_tokens, "spec_length": spec_length, "seed": seed}

    def measured(t: float) -> PairNumbers:
        row = bar.add_task(f"tokens at T={t:g}", total=max_tokens * len(texts))
        return measure_pair(target, draft, texts, t, **sizes, progress=lambda num: bar.update(row, completed=num))

    with _bar(quiet) as bar:
        numbers = [measured(0.0), measured(1.0)]
    for n in numbers:
        say(f"T={n.temperature:g}: alpha-hat {n.alpha_hat}, {n.mean_accepted_length} tokens per target pass")
    if out is not None:
        write_numbers(numbers, out)


@app.command()
def card(
    target: Annotated[Path, typer.Option(help="out folder of the target's run")],
    draft: Annotated[Path, typer.Option(help="out folder of the draft's run")],
    numbers: Annotated[Path, typer.Option(help="file that `train pair --out` wrote")],
    prompts: Annotated[Path, typer.Option(help="prompts.jsonl; five of them are continued in the card")],
    out: Annotated[Path, typer.Option(help="file to write, Markdown; the list of sources goes beside it")],
    commands: Annotated[Path | None, typer.Option(help="text file with the commands that were run")] = None,
    history: Annotated[list[Path] | None, typer.Option(help="out folders of runs that the draft started from")] = None,
    target_history: Annotated[list[Path] | None, typer.Option(help="the same for the target")] = None,
) -> None:
    """Write the model card of a pair from the logs of its runs."""
    from forerun.train.card import write_card

    write_card(target, draft, numbers, prompts, out, commands, history or [], target_history or [])
    say(str(out))


# ------------------------------------------------------------------------------------------------- files of drafters


@app.command()
def tree(
    out: Annotated[Path, typer.Option(help="file to write, for --draft tree:shape=sequoia,file=FILE")],
    target: Annotated[str, typer.Option(help="the target")] = "shipped",
    draft: Annotated[str | None, typer.Option(help="its draft model; none = that of the shipped pair")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="prompts.jsonl (`train prompts`); default: held-out Python sources")
    ] = None,
    num_prompts: NumPrompts = 24,
    longest: Annotated[int, typer.Option(help="tokens of a text at most")] = 128,
    num_ranks: Annotated[int, typer.Option(help="children of a node that are measured")] = 8,
    seed: SeedOfDraws = 0,
    quiet: Quiet = False,
) -> None:
    """Measure how often a target accepts the first, second, ... child of a draft model, for Sequoia's trees."""
    with _waiting(quiet):
        from forerun.train import shares

    with _bar(quiet) as bar:
        row = bar.add_task("loading, and reading texts", total=None)

        def show(num: int, of: int) -> None:
            bar.update(row, description="texts", completed=num, total=of)

        measured = shares.fit(out, target, draft, prompts, num_prompts, longest, num_ranks, seed, show)
    for name, row in zip(("T=0", "T=1"), measured, strict=True):
        say(f"{name}: " + " ".join(f"{share:.3f}" for share in row))


@app.command()
def datastore(
    out: Annotated[Path, typer.Option(help="file to write, for --draft datastore:path=FILE")],
    target: Target = None,
    text: Texts = None,
    max_text_mb: MaxTextMb = 100,
    quiet: Quiet = False,
) -> None:
    """Store texts and a suffix array of them, for the drafter datastore."""
    from forerun.train import datastore as making

    start = time.perf_counter()
    with _waiting(quiet, "reading texts") as waiting:
        num_tokens = making.train(
            target,
            text or [],
            out,
            max_text_bytes=max_text_mb * 10**6,
            progress=lambda num: waiting.tell(f"{num:,} tokens read"),
        )
    seconds = time.perf_counter() - start
    say(f"{num_tokens:,} tokens, {out.stat().st_size / 1e6:.1f} MB, in {out} after {seconds:.1f} s")


@app.command()
def ngram(
    out: Annotated[Path, typer.Option(help="file to write, for --draft bigram:path=FILE or unigram:path=FILE")],
    target: Target = None,
    text: Texts = None,
    order: Annotated[int, typer.Option(help="1 = single tokens, 2 = pairs, too")] = 2,
    max_followers: Annotated[int, typer.Option(help="tokens kept behind each token, the most frequent")] = 64,
    max_text_mb: MaxTextMb = 100,
    quiet: Quiet = False,
) -> None:
    """Count tokens and pairs of tokens in texts, for the drafters unigram and bigram."""
    from forerun.train import ngram as fitting

    with _waiting(quiet, "reading texts") as waiting:
        fit = fitting.train(
            target,
            text or [],
            out,
            order=order,
            max_followers=max_followers,
            max_text_bytes=max_text_mb * 10**6,
            progress=lambda fit: waiting.tell(f"{fit.num_tokens:,} tokens counted"),
        )
    say(f"{fit.num_tokens:,} tokens counted into {out}")


@app.command()
def skip(
    out: Annotated[Path, typer.Option(help="file to write, for --draft early_exit:path=FILE")],
    text: Annotated[list[Path], typer.Option(help="file, or folder, like what the target will write; repeatable")],
    target: Target = None,
    num_tokens: Annotated[int, typer.Option(help="tokens of the text that are run for each set", min=2)] = 256,
    evaluations: Annotated[int, typer.Option(help="sets of layers that are scored at most", min=1)] = 100,
    dtype: Dtype = "auto",
    ops: Ops = "auto",
    seed: Annotated[int, typer.Option(help="of the flips at the end")] = 0,
    quiet: Quiet = False,
) -> None:
    """Search for the layers of a target that draft for the target best, and write their indices to a file."""
    with _waiting(quiet):
        from forerun.config import EngineConfig
        from forerun.engine.opened import Opened
        from forerun.train.skip import Scored, fit
        from forerun.train.texts import read_texts

    def show(tried: Scored) -> None:
        with bar.aside():
            say(f"{len(tried.layers)} layers, agreement {tried.agreement:.3f}, estimated speed-up {tried.speedup:.2f}")

    config = EngineConfig(target=target, dtype=dtype, ops=ops)
    whole = "\n\n".join(read_texts(text, 10**6))
    sizes = {"num_tokens": num_tokens, "evaluations": evaluations, "seed": seed}
    with _waiting(quiet, "loading the target"):
        checkpoint = Opened.of(config).load()
    with _bar(quiet) as bar:
        row = bar.add_task("sets of layers", total=evaluations)
        best = fit(checkpoint, whole, out, **sizes, say=show, progress=lambda num: bar.update(row, completed=num))
    say(f"layers {', '.join(map(str, best.layers))} in {out}")
    if best.speedup <= 1:
        say("By this estimate plain decoding is faster than any set that was tried.")


# ----------------------------------------------------------------------------------------------------------- printing


def say(text: str, err: bool = False) -> None:
    """Print a line. Control characters are made visible, because names of files in the line may contain some."""
    from forerun.text.terminal import close_line, visible

    close_line()
    typer.echo(visible(text), err=err)


def _numbers(numbers: Mapping[str, float]) -> str:
    return " ".join(f"{key}={value:.4f}" for key, value in numbers.items())
