"""The commands `forerun train ...`, which parse and call. torch is imported when one runs, not to print help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.help import App
from forerun.cli.methods import MethodName, list_methods

app = App(
    "Train small language models and drafters.",
    moved={"examples": "t5 examples", "seq2seq": "t5 train", "score": "t5 score"},
)


@app.callback()
def main() -> None:
    """Train small language models and drafters."""


@app.command()
def lm(
    out: Annotated[Path, typer.Option(help="Folder for log, state and the checkpoint (out/model).")],
    hidden_size: Annotated[int, typer.Option(help="Width of the residual stream, elements.")] = 512,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 6,
    heads: Annotated[int, typer.Option(help="Query heads, each of hidden-size / heads elements.")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key-value heads; default: 2, and of gpt2 all heads.", show_default=False)
    ] = None,
    ffn_size: Annotated[int, typer.Option(help="Width of the feed-forward block, elements.")] = 1536,
    family: Annotated[
        str,
        typer.Option(
            help="llama; gpt2: layer norms, GELU, biases, learned positions (seq-len-tokens of them); or qwen3_moe, a "
            "mixture of experts."
        ),
    ] = "llama",
    experts: Annotated[int, typer.Option(help="Of a mixture: experts of a layer, each of ffn-size.")] = 0,
    experts_per_token: Annotated[int, typer.Option(help="Of a mixture: how many of them each token takes.")] = 0,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Token ids; at least 257 if a tokenizer is trained; default: the teacher's, else 4096.",
            show_default=False,
        ),
    ] = None,
    max_steps: Annotated[int, typer.Option(help="Steps in all; the learning rate reaches 0 at the last.")] = 600,
    tokens_per_step: Annotated[int, typer.Option(help="Tokens of one batch.")] = 4096,
    seq_len_tokens: Annotated[int, typer.Option(help="Length of the training sequences, tokens.")] = 512,
    lr: Annotated[float, typer.Option(help="Peak learning rate of AdamW.")] = 2e-3,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 50,
    decay_share: Annotated[
        float, typer.Option(help="Share of the steps, at the end, with falling rate, 0 to 1.")
    ] = 0.4,
    seed: Annotated[int, typer.Option(help="Of first weights and data order.")] = 0,
    loss: Annotated[str, typer.Option(help="ce (text), kl (target's distribution) or alpha (acceptance).")] = "ce",
    teacher: Annotated[
        str | None, typer.Option(help="The target, for kl, alpha and --after: folder, GGUF file, name or hub id.")
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(help="An earlier draft of the teacher: learn where they do not agree; may be repeated."),
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="Checkpoint folder to start from; may have fewer layers.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json to use instead of training one.")] = None,
    text: Annotated[Path | None, typer.Option(help="Folder of Python sources; default: the standard library.")] = None,
    ids: Annotated[
        Path | None, typer.Option(help="In place of text: rows of token ids of one length, integers in a .npy file.")
    ] = None,
    samples: Annotated[Path | None, typer.Option(help="Target's own text: a file of `train sample`.")] = None,
    samples_share: Annotated[float, typer.Option(help="Share of each batch taken from samples, 0 to 1.")] = 0.5,
    validate_every_steps: Annotated[int, typer.Option(help="Validation interval, steps.")] = 100,
    validation_windows: Annotated[int, typer.Option(help="Sequences of one validation.")] = 16,
    checkpoint_every_s: Annotated[float, typer.Option(help="Checkpoint interval, seconds.")] = 300.0,
    autocast: Annotated[str, typer.Option(help="auto, bf16 or off (float32).")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    resume: Annotated[bool, typer.Option(help="Go on from the state in the out folder.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
) -> None:
    """Train a small model on Python source, ids or a target's text: from them, or from soft labels (--teacher)."""
    from forerun.train import lm as loop
    from forerun.train.config import TrainConfig
    from forerun.train.shape import ModelShape

    with refusals():
        if vocab_size is None:
            vocab_size = 4096 if teacher is None else loop.num_ids_of(teacher)
        sizes = {
            "family": family,
            "hidden_size": hidden_size,
            "num_layers": layers,
            "num_heads": heads,
            "ffn_size": ffn_size,
            "vocab_size": vocab_size,
            "num_experts": experts,
            "num_chosen": experts_per_token,
            **({} if kv_heads is None else {"num_kv_heads": kv_heads}),
        }
        config = TrainConfig(
            shape=ModelShape.given(sizes, seq_len_tokens),
            out=out,
            steps=max_steps,
            tokens_per_step=tokens_per_step,
            seq_len_tokens=seq_len_tokens,
            lr=lr,
            warmup_steps=warmup_steps,
            decay_share=decay_share,
            seed=seed,
            loss=loss,  # type: ignore[arg-type]
            teacher=teacher,
            after=tuple(after or ()),
            init_from=init_from,
            tokenizer=tokenizer,
            text=text,
            ids=ids,
            samples=samples,
            samples_share=samples_share,
            validate_every_steps=validate_every_steps,
            validation_windows=validation_windows,
            checkpoint_every_s=checkpoint_every_s,
            autocast=autocast,  # type: ignore[arg-type]
            device=device,
        )
        numbers = loop.train(config, resume=resume, quiet=quiet)
    typer.echo(" ".join(f"{key}={value:.4f}" for key, value in numbers.items()))


@app.command()
def sample(
    out: Annotated[Path, typer.Option(help="File to append to; where it is there already, sampling goes on.")],
    target: Annotated[str | None, typer.Option(help="Folder, GGUF file, name or hub id; none = smollm2.")] = None,
    num_tokens: Annotated[int, typer.Option(help="Tokens in the file when it is done, prompts included.")] = 300_000,
    batch_size: Annotated[int, typer.Option(help="Texts that are written at once.", min=1)] = 32,
    chat: Annotated[
        float | None, typer.Option(help="Share of conversations; none = 0.7, or 0 where no chat template opens a turn.")
    ] = None,
    task: Annotated[
        float | None, typer.Option(help="Share of instructions with a passage; none = half of what is left.")
    ] = None,
    passage_tokens: Annotated[int, typer.Option(help="Tokens of a passage of a given text at most.", min=16)] = 160,
    question_tokens: Annotated[int, typer.Option(help="Tokens of a question at most.", min=2)] = 160,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer or a continuation at most.", min=1)] = 320,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="File, or folder of files, to cut passages from; default: those of installed packages."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    ops: Annotated[str, typer.Option(help="auto, native or reference.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of prompts and draws.")] = 0,
    quiet: Annotated[bool, typer.Option(help="No progress line.")] = False,
) -> None:
    """Let the target write conversations, answers and continuations, half of them greedily."""
    import time

    from rich.progress import Progress, TextColumn

    from forerun.engine.llm import LLM
    from forerun.train.samples import SampleWriter, begun_with
    from forerun.train.texts import packaged_texts, read_texts
    from forerun.train.writing import Frame, Lengths, Shares, Writer, longest

    with refusals(), Progress(TextColumn("{task.description}"), transient=True, disable=quiet) as progress:
        lengths = Lengths((16, passage_tokens), question_tokens, answer_tokens)
        llm = LLM(
            target,
            draft="none",
            max_batch_size=batch_size,
            max_seq_len=longest(lengths),
            max_num_batched_tokens=max(1024, batch_size),
            calibrate=False,
            dtype=dtype,
            ops=ops,
        )
        if chat is None:
            chat = Shares.chat if Frame.opens_a_turn(llm) else 0.0
        if task is None:
            task = (1 - chat) / 2 if chat > 0 else 0.0
        texts = list(read_texts(text, 10**8)) if text else packaged_texts()
        shares = Shares(chat, task, 1 - chat - task)
        writer = Writer(llm, texts, seed=seed, shares=shares, lengths=lengths, begun=begun_with(out))
        file = SampleWriter(out, writer.options())
        row, start, had = progress.add_task(""), time.perf_counter(), file.num_tokens

        def show(file: SampleWriter) -> None:
            speed = (file.num_tokens - had) / (time.perf_counter() - start)
            progress.update(row, description=f"{file.num_tokens:,} tokens, {speed:,.0f} per second")

        try:
            writer.write(file, num_tokens, batch_size, show)
        finally:
            file.close()
    seconds = time.perf_counter() - start
    size = out.stat().st_size / 1e6
    _say(f"{file.num_tokens:,} tokens, {size:.1f} MB, in {out}; {(file.num_tokens - had) / seconds:.0f} tokens/s")


@app.command()
def head(
    method: Annotated[
        str,
        typer.Option(
            help="What is trained, with its options, as in eagle:draft_vocab=4096,steps=3: see `train heads`."
        ),
    ],
    samples: Annotated[Path, typer.Option(help="File of `train sample`, of the same target.")],
    out: Annotated[Path, typer.Option(help="Folder for log, curves, state and the head (out/head).")],
    target: Annotated[str | None, typer.Option(help="Folder, GGUF file, name or hub id; none = smollm2.")] = None,
    max_steps: Annotated[int, typer.Option(help="Steps in all; the learning rate reaches 0 at the last.")] = 1000,
    tokens_per_step: Annotated[int, typer.Option(help="Tokens of one batch.")] = 2048,
    seq_len_tokens: Annotated[int, typer.Option(help="Tokens of a row, into which whole texts are packed.")] = 512,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate of AdamW; none = the method's own: see `train heads NAME`.")
    ] = None,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 50,
    decay_share: Annotated[float, typer.Option(help="Share of the steps, at the end, with falling rate.")] = 0.6,
    init_from: Annotated[
        str | None,
        typer.Option(
            help="A head of this method to go on from, with learning rate and steps of this run: a folder of "
            "`train head`, a name, or a hub id."
        ),
    ] = None,
    num_tokens: Annotated[int | None, typer.Option(help="Tokens of the samples, the first ones; none = all.")] = None,
    features: Annotated[
        Path | None,
        typer.Option(help="Folder to store the target's hidden states in; none = recompute them at every step."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of first weights and data order.")] = 0,
    validate_every_steps: Annotated[int, typer.Option(help="Validation interval, steps.")] = 100,
    validation_rows: Annotated[int, typer.Option(help="Rows of held-out texts of one validation.")] = 8,
    checkpoint_every_s: Annotated[float, typer.Option(help="Checkpoint interval, seconds.")] = 300.0,
    autocast: Annotated[
        str, typer.Option(help="auto, bf16 or off (float32, which torch computes faster on many CPUs).")
    ] = "off",
    dtype: Annotated[str, typer.Option(help="Of the target: auto, float32 or bfloat16.")] = "auto",
    ops: Annotated[str, typer.Option(help="Of the target: auto, native or reference.")] = "auto",
    resume: Annotated[bool, typer.Option(help="Go on from the state in the out folder.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
) -> None:
    """Train a drafter that reads its target's hidden states, on what the target wrote itself; on the CPU."""
    from forerun.config import EngineConfig
    from forerun.engine.factory import load_target
    from forerun.train import head as training, heads as methods, loop
    from forerun.train.config import HeadConfig

    with refusals():
        config = HeadConfig(
            out=out,
            steps=max_steps,
            tokens_per_step=tokens_per_step,
            seq_len_tokens=seq_len_tokens,
            lr=methods.rate_of(method) if lr is None else lr,
            warmup_steps=warmup_steps,
            decay_share=decay_share,
            weight_decay=0.01,
            seed=seed,
            validate_every_steps=validate_every_steps,
            checkpoint_every_s=checkpoint_every_s,
            autocast=autocast,  # type: ignore[arg-type]
            method=method,
            samples=samples,
            num_tokens=num_tokens,
            features=features,
            init_from=init_from,
            validation_rows=validation_rows,
        )
        # A head learns on the CPU: it is small, and what it reads of the target may be stored once, by --features.
        checkpoint = load_target(EngineConfig(target=target, dtype=dtype, ops=ops, device="cpu"))
        numbers = training.train(config, checkpoint, resume=resume, quiet=quiet, warn=lambda text: _say(text, err=True))
    if init_from is not None:
        first = loop.read_log(out)[0]
        typer.echo("before: " + " ".join(f"{key}={first[key]:.4f}" for key in numbers))
    typer.echo(" ".join(f"{key}={value:.4f}" for key, value in numbers.items()))


@app.command("heads")
def list_heads(name: MethodName = None) -> None:
    """List what `train head` can train, or show one of them with its options."""
    from forerun.train.heads import WHAT, rate_of

    how = "Train one with forerun train head --method NAME or --method NAME:option=value,option=value."
    with refusals():
        rate = "" if name is None else f" Without --lr its learning rate is {rate_of(name):g}."
        list_methods("forerun.train.heads", WHAT, name, how + rate)


@app.command()
def prompts(
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json, or a folder with one, that counts the tokens.")],
    out: Annotated[Path, typer.Option(help="File to write: one JSON object per line with id, module, text.")],
    limit: Annotated[int, typer.Option(help="Prompts at most.")] = 240,
    min_tokens: Annotated[int, typer.Option(help="Tokens of a prompt at least.")] = 40,
    max_tokens: Annotated[int, typer.Option(help="Tokens of a prompt at most.")] = 120,
    text: Annotated[Path | None, typer.Option(help="Folder of Python sources; default: the standard library.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice.")] = 0,
) -> None:
    """Write the benchmark prompts: beginnings of functions and classes from held-out modules."""
    from forerun.train.corpus import bench_prompts, load_corpus, write_prompts
    from forerun.train.tokenizer import load_tokenizer

    with refusals():
        count = load_tokenizer(tokenizer).encode
        chosen = bench_prompts(
            load_corpus(text).bench, lambda text: len(count(text).ids), limit, min_tokens, max_tokens, seed
        )
        write_prompts(chosen, out)
    _say(f"{len(chosen)} prompts in {out}")


@app.command()
def pair(
    target: Annotated[Path, typer.Option(help="Checkpoint folder of the target.")],
    draft: Annotated[Path, typer.Option(help="Checkpoint folder of the draft model.")],
    prompts: Annotated[Path, typer.Option(help="prompts.jsonl, as `train prompts` writes it.")],
    out: Annotated[Path | None, typer.Option(help="File for the numbers, one JSON object per temperature.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Prompts, spread evenly over the file.")] = 240,
    max_tokens: Annotated[int, typer.Option(help="Tokens after each prompt.")] = 128,
    spec_length: Annotated[int, typer.Option(help="Tokens drafted per round.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Measure alpha-hat of a pair at temperatures 0 and 1, in real speculative decoding."""
    from forerun.train.evaluate import measure_pair, read_prompts, write_numbers

    with refusals():
        texts = read_prompts(prompts, num_prompts)
        numbers = [
            measure_pair(target, draft, texts, t, max_tokens=max_tokens, spec_length=spec_length, seed=seed)
            for t in (0.0, 1.0)
        ]
    for n in numbers:
        typer.echo(f"T={n.temperature:g}: alpha-hat {n.alpha_hat}, {n.mean_accepted_length} tokens per target pass")
    if out is not None:
        write_numbers(numbers, out)


@app.command()
def tree(
    out: Annotated[Path, typer.Option(help="File to write, for --draft tree:shape=sequoia,file=FILE.")],
    target: Annotated[str, typer.Option(help="The target.")] = "shipped",
    draft: Annotated[str | None, typer.Option(help="Its draft model; none = that of the shipped pair.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="prompts.jsonl (`train prompts`); default: held-out Python sources.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Texts, spread evenly over the file.")] = 24,
    longest: Annotated[int, typer.Option(help="Tokens of a text at most.")] = 128,
    num_ranks: Annotated[int, typer.Option(help="Children of a node that are measured.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Measure how often a target accepts the first, second, ... child of a draft model, for Sequoia's trees."""
    import numpy as np

    from forerun.drafters.artifacts import fingerprint, save
    from forerun.engine.factory import SHIPPED_DRAFT, is_shipped
    from forerun.errors import BadOption
    from forerun.models.loading import load_checkpoint
    from forerun.text.tokenizer import compare
    from forerun.train.corpus import bench_prompts, load_corpus
    from forerun.train.evaluate import read_prompts
    from forerun.train.shares import measure

    with refusals():
        if draft is None and not is_shipped(target):
            raise BadOption("only the shipped model has a draft model that need not be named: give --draft")
        pair = [load_checkpoint(name, with_tokenizer=True) for name in (target, draft or SHIPPED_DRAFT)]
        tokenizer = pair[0].text_tokenizer
        compare(tokenizer, pair[1].text_tokenizer, pair[1].name)
        if prompts is None:
            held_out = bench_prompts(
                load_corpus(None).bench, lambda text: len(tokenizer.encode(text)), num_prompts, 40, longest, seed
            )
            texts = [prompt.text for prompt in held_out]
        else:
            texts = read_prompts(prompts, num_prompts)
        shares = measure(pair[0], pair[1], [tokenizer.encode(text) for text in texts], num_ranks, longest, seed)
        num_ids = min(tokenizer.num_ids, pair[0].model.config.vocab_size)
        save(out, "tree", {"shares": shares.astype(np.float32)}, fingerprint(tokenizer, num_ids))
    for name, row in zip(("T=0", "T=1"), shares, strict=True):
        typer.echo(f"{name}: " + " ".join(f"{share:.3f}" for share in row))


@app.command()
def card(
    target: Annotated[Path, typer.Option(help="Out folder of the target's run.")],
    draft: Annotated[Path, typer.Option(help="Out folder of the draft's run.")],
    numbers: Annotated[Path, typer.Option(help="File that `train pair --out` wrote.")],
    prompts: Annotated[Path, typer.Option(help="prompts.jsonl; five of them are continued in the card.")],
    out: Annotated[Path, typer.Option(help="File to write, Markdown; the list of sources goes beside it.")],
    commands: Annotated[Path | None, typer.Option(help="Text file with the commands that were run.")] = None,
    history: Annotated[list[Path] | None, typer.Option(help="Out folders of runs that the draft started from.")] = None,
    target_history: Annotated[list[Path] | None, typer.Option(help="The same for the target.")] = None,
) -> None:
    """Write the model card of a pair from the logs of its runs."""
    from forerun.train.card import write_card

    with refusals():
        write_card(target, draft, numbers, prompts, out, commands, history or [], target_history or [])
    _say(str(out))


@app.command()
def datastore(
    out: Annotated[Path, typer.Option(help="File to write, for --draft datastore:path=FILE.")],
    target: Annotated[
        str | None, typer.Option(help="Model whose ids are stored; none = smollm2.", show_default=False)
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="File, or folder of files; may be repeated; default: the standard library.", show_default=False
        ),
    ] = None,
    max_text_mb: Annotated[int, typer.Option(help="Reading of named texts ends there, megabytes.", min=1)] = 100,
    quiet: Annotated[bool, typer.Option(help="No progress line.")] = False,
) -> None:
    """Store texts and a suffix array of them, for the drafter datastore."""
    import time

    from rich.progress import Progress, TextColumn

    from forerun.train import datastore as making

    start = time.perf_counter()
    with refusals(), Progress(TextColumn("{task.description}"), transient=True, disable=quiet) as progress:
        task = progress.add_task("")
        num_tokens = making.train(
            target,
            text or [],
            out,
            max_text_bytes=max_text_mb * 10**6,
            progress=lambda num: progress.update(task, description=f"{num:,} tokens read"),
        )
    seconds = time.perf_counter() - start
    _say(f"{num_tokens:,} tokens, {out.stat().st_size / 1e6:.1f} MB, in {out} after {seconds:.1f} s")


@app.command()
def ngram(
    out: Annotated[Path, typer.Option(help="File to write, for --draft bigram:path=FILE or unigram:path=FILE.")],
    target: Annotated[
        str | None, typer.Option(help="Model whose tokenizer counts; none = smollm2.", show_default=False)
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="File, or folder of files; may be repeated; default: the standard library.", show_default=False
        ),
    ] = None,
    order: Annotated[int, typer.Option(help="1 = single tokens, 2 = pairs, too.")] = 2,
    max_followers: Annotated[int, typer.Option(help="Tokens kept behind each token, the most frequent.")] = 64,
    max_text_mb: Annotated[int, typer.Option(help="Reading of named texts ends there, megabytes.", min=1)] = 100,
    quiet: Annotated[bool, typer.Option(help="No progress line.")] = False,
) -> None:
    """Count tokens and pairs of tokens in texts, for the drafters unigram and bigram."""
    from rich.progress import Progress, TextColumn

    from forerun.train import ngram as fitting

    with refusals(), Progress(TextColumn("{task.description}"), transient=True, disable=quiet) as progress:
        task = progress.add_task("")
        fit = fitting.train(
            target,
            text or [],
            out,
            order=order,
            max_followers=max_followers,
            max_text_bytes=max_text_mb * 10**6,
            progress=lambda fit: progress.update(task, description=f"{fit.num_tokens:,} tokens counted"),
        )
    _say(f"{fit.num_tokens:,} tokens counted into {out}")


@app.command()
def skip(
    out: Annotated[Path, typer.Option(help="File to write, for --draft early_exit:path=FILE.")],
    text: Annotated[list[Path], typer.Option(help="File, or folder, like what the target will write; repeatable.")],
    target: Annotated[str | None, typer.Option(help="Folder, GGUF file, name or hub id; none = smollm2.")] = None,
    num_tokens: Annotated[int, typer.Option(help="Tokens of the text that are run for each set.", min=2)] = 256,
    evaluations: Annotated[int, typer.Option(help="Sets of layers that are scored at most.", min=1)] = 100,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    ops: Annotated[str, typer.Option(help="auto, native or reference.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the flips at the end.")] = 0,
) -> None:
    """Search the layers of a target that draft for it best, and write them to a file."""
    from forerun.config import EngineConfig
    from forerun.engine.factory import load_target
    from forerun.train.skip import Scored, fit
    from forerun.train.texts import read_texts

    def show(found: Scored) -> None:
        _say(f"{len(found.layers)} layers, agreement {found.agreement:.3f}, estimated speed-up {found.speedup:.2f}")

    with refusals():
        config = EngineConfig(target=target, dtype=dtype, ops=ops)
        whole = "\n\n".join(read_texts(text, 10**6))
        sizes = {"num_tokens": num_tokens, "evaluations": evaluations, "seed": seed}
        best = fit(load_target(config), whole, out, **sizes, say=show)
    _say(f"layers {', '.join(map(str, best.layers))} in {out}")
    if best.speedup <= 1:
        _say("By this estimate plain decoding is faster than any set that was tried.")


def _say(text: str, err: bool = False) -> None:
    """A line about files: their names may hold control characters."""
    from forerun.text.terminal import visible

    typer.echo(visible(text), err=err)


@contextmanager
def refusals() -> Iterator[None]:
    """Print an error that the caller can correct as one sentence, and exit with code 2."""
    from forerun.errors import UserError

    try:
        yield
    except UserError as error:
        _say(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error


if __name__ == "__main__":
    app()
