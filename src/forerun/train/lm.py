"""`forerun train lm` trains a small llama on Python source, from the text or from a target's soft labels.

The shipped target and its draft were both trained by this loop. Arithmetic is float32 (or bfloat16 autocast where the
processor has it); the result is a standard checkpoint folder. The out folder gets `log.jsonl` (one object per logged
step), `run.json` (options and data of the run), `state.pt` (to resume from) and `model/` (the checkpoint folder).
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor

from forerun.errors import BadOption
from forerun.models.layers import Decoder
from forerun.train import batches, losses
from forerun.train.config import TrainConfig
from forerun.train.corpus import Corpus, load_corpus
from forerun.train.model import (
    deepen,
    export,
    initial_weights,
    load_decoder,
    read_shape,
    read_weights,
    run_windows,
)
from forerun.train.ops import TrainingOps
from forerun.train.tokenizer import END_OF_TEXT, load_tokenizer, save_tokenizer, tokenizer_hash, train_tokenizer

LOG_EVERY_STEPS = 10


@dataclass
class Run:
    """The state of a run in memory. `step` counts finished steps, `elapsed_s` the seconds of all its sessions."""

    config: TrainConfig
    corpus: Corpus
    tokenizer: Tokenizer
    model: Decoder
    weights: dict[str, Tensor]
    optimizer: torch.optim.AdamW
    data: batches.Mixture
    validation: Tensor  # [n, seq_len + 1]
    teacher: Decoder | None
    step: int = 0
    elapsed_s: float = 0.0


def train(config: TrainConfig, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train until config.steps, save along the way, and export. Returns the last validation's numbers.

    With resume=True it goes on from the state in the out folder (from the beginning where there is none). Every loss
    after that is bit for bit the one of an uninterrupted run on the same machine with the same number of threads.
    Raises BadOption where the out folder's state belongs to another shape.
    """
    run = prepare(config)
    if resume and (config.out / "state.pt").exists():
        load_state(run)
    else:
        (config.out / "log.jsonl").write_text("", encoding="utf-8")
    describe_run(run)
    with deterministic(), progress_bar(quiet) as progress:
        task = progress.add_task("training", total=config.steps, completed=run.step, note="")
        for note in steps_of(run):
            progress.update(task, completed=run.step, note=note)
    numbers = validate(run)
    log(run, {"final": True, **numbers})
    save_state(run)
    export_model(run)
    return numbers


def prepare(config: TrainConfig) -> Run:
    """Read the data, and make tokenizer, model and optimizer. A large corpus takes minutes."""
    config.out.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(config.text)
    tokenizer = make_tokenizer(config, corpus)
    weights = first_weights(config)
    ops = TrainingOps(config.seq_len_tokens)
    for weight in weights.values():
        weight.requires_grad_(True)
    teacher = load_decoder(config.teacher, ops, config.device) if config.teacher else None
    held_out = batches.encode_documents(corpus.validation, tokenizer)
    return Run(
        config=config,
        corpus=corpus,
        tokenizer=tokenizer,
        model=Decoder(config.shape.decoder_config(), weights, ops),
        weights=weights,
        optimizer=make_optimizer(config, weights),
        data=make_mixture(config, corpus, tokenizer),
        validation=batches.validation_windows(held_out, config.seq_len_tokens, config.validation_windows),
        teacher=teacher,
    )


def make_tokenizer(config: TrainConfig, corpus: Corpus) -> Tokenizer:
    """Return the given tokenizer, else the teacher's, else a newly trained one; its files go to out/tokenizer."""
    source = config.tokenizer or config.teacher
    if source is not None:
        tokenizer = load_tokenizer(source)
    else:
        tokenizer = train_tokenizer((document.text for document in corpus.train), config.shape.vocab_size)
    if tokenizer.get_vocab_size() > config.shape.vocab_size:
        raise BadOption(f"the tokenizer has {tokenizer.get_vocab_size()} ids, the model {config.shape.vocab_size}")
    save_tokenizer(tokenizer, config.out / "tokenizer", config.shape.max_positions)
    return tokenizer


def first_weights(config: TrainConfig) -> dict[str, Tensor]:
    """Return random weights, or those of config.init_from, with new layers where it is shallower. Raises BadOption."""
    if config.init_from is None:
        return initial_weights(config.shape, config.seed, config.device)
    grown = deepen(read_weights(config.init_from), read_shape(config.init_from), config.shape, config.seed)
    return {name: weight.to(config.device) for name, weight in grown.items()}


def make_optimizer(config: TrainConfig, weights: dict[str, Tensor]) -> torch.optim.AdamW:
    """Make AdamW (Loshchilov and Hutter 2019) with betas 0.9 and 0.95, and weight decay on matrices only."""
    groups = [
        {"params": [w for w in weights.values() if w.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [w for w in weights.values() if w.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def make_mixture(config: TrainConfig, corpus: Corpus, tokenizer: Tokenizer) -> batches.Mixture:
    """Make the batches from the train split, and from the target's own text where it is given."""
    tokens = batches.encode_documents(corpus.train, tokenizer, seed=config.seed)
    text = batches.WindowStream(tokens, config.seq_len_tokens, config.seed)
    if config.samples is None:
        return batches.Mixture(text, config.rows_per_step)
    own = batches.WindowStream(batches.load_samples(config.samples), config.seq_len_tokens, config.seed + 1)
    return batches.Mixture(text, config.rows_per_step, own, round(config.rows_per_step * config.samples_share))


# ------------------------------------------------------------------------------------------------------- the loop


def steps_of(run: Run) -> Iterator[str]:
    """Run the remaining steps, and yield a line for the progress bar after each."""
    config = run.config
    note, last_saved_s = "", time.perf_counter()
    while run.step < config.steps:
        started_s = time.perf_counter()
        loss, grad_norm = train_step(run)
        run.step += 1
        step_s = time.perf_counter() - started_s
        run.elapsed_s += step_s
        tokens_per_s = config.rows_per_step * config.seq_len_tokens / step_s
        if run.step % LOG_EVERY_STEPS == 0 or run.step <= LOG_EVERY_STEPS:
            log(run, {"train_loss": loss, "grad_norm": grad_norm, "tokens_per_s": round(tokens_per_s)})
        if run.step % config.validate_every_steps == 0 and run.step < config.steps:
            numbers = validate(run)
            log(run, numbers)
            note = " ".join(f"{key} {value:.4f}" for key, value in numbers.items())
        if time.perf_counter() - last_saved_s >= config.checkpoint_every_s:
            save_state(run)
            export_model(run)
            last_saved_s = time.perf_counter()
        yield f"loss {loss:.4f} {tokens_per_s:.0f} tok/s {note}"


@contextmanager
def deterministic() -> Iterator[None]:
    """Make sums repeatable: otherwise threads add up the embedding's gradient in an order that changes."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def train_step(run: Run) -> tuple[float, float]:
    """Train on one batch: forward, backward, clip, update. Returns the loss and the gradient's norm before clipping."""
    config = run.config
    windows = run.data.batch(run.step).to(config.device)
    with autocast(config):
        hidden = run_windows(run.model, windows[:, :-1])
        logits = run.model.logits(hidden)
    loss = losses.loss_of(config.loss, logits, windows[:, 1:].reshape(-1), teacher_logits(run, windows))
    loss.backward()  # type: ignore[no-untyped-call]
    grad_norm = torch.nn.utils.clip_grad_norm_(run.weights.values(), config.grad_clip)
    for group in run.optimizer.param_groups:
        group["lr"] = config.lr_at(run.step)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return float(loss.detach()), float(grad_norm)


def teacher_logits(run: Run, windows: Tensor) -> Tensor | None:
    """Return the target's logits [S * L, V] for windows [S, L + 1], or None where the loss does not need them."""
    if run.teacher is None or run.config.loss == "ce":
        return None
    with torch.no_grad(), autocast(run.config):
        return run.teacher.logits(run_windows(run.teacher, windows[:, :-1]))


@torch.no_grad()
def validate(run: Run) -> dict[str, float]:
    """Measure cross entropy in nats per token on held-out modules.

    With a teacher also alpha at temperature 1, and the share of tokens on which both agree greedily.
    """
    sums: dict[str, float] = {}
    for start in range(0, len(run.validation), run.config.rows_per_step):
        windows = run.validation[start : start + run.config.rows_per_step].to(run.config.device)
        with autocast(run.config):
            logits = run.model.logits(run_windows(run.model, windows[:, :-1]))
        numbers = {"validation_loss": losses.cross_entropy(logits, windows[:, 1:].reshape(-1))}
        if run.teacher is not None:
            with autocast(run.config):
                target = run.teacher.logits(run_windows(run.teacher, windows[:, :-1]))
            numbers["kl"] = losses.forward_kl(logits, target)
            numbers["alpha"] = losses.overlap(logits, target).mean()
            numbers["agreement"] = losses.agreement(logits, target)
        for key, value in numbers.items():
            sums[key] = sums.get(key, 0.0) + float(value) * len(windows)
    return {key: value / len(run.validation) for key, value in sums.items()}


def autocast(config: TrainConfig) -> AbstractContextManager[Any]:
    """Return the context of bfloat16 products where asked for, or with `auto` where the device has instructions."""
    device = torch.device(config.device).type
    if config.autocast == "off" or (config.autocast == "auto" and not has_bf16(device)):
        return nullcontext()
    return torch.autocast(device, dtype=torch.bfloat16)


def has_bf16(device: str) -> bool:
    """Return whether the device is CUDA or a processor with AVX512-BF16 or AMX.

    Other processors emulate bfloat16, which is slower than float32.
    """
    if device == "cuda":
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


# ------------------------------------------------------------------------------------------------------ what is kept


def log(run: Run, numbers: dict[str, Any]) -> None:
    """Append one JSON line with the step, tokens seen and seconds so far."""
    tokens = run.step * run.config.rows_per_step * run.config.seq_len_tokens
    head = {"step": run.step, "tokens": tokens, "elapsed_s": round(run.elapsed_s, 1)}
    with (run.config.out / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**head, **numbers}) + "\n")


def save_state(run: Run) -> None:
    """Write weights, optimizer, position and random state to out/state.pt; the old file stays until that is done."""
    state = {
        "shape": run.config.shape,
        "weights": {name: weight.detach() for name, weight in run.weights.items()},
        "optimizer": run.optimizer.state_dict(),
        "step": run.step,
        "elapsed_s": run.elapsed_s,
        "rng": torch.get_rng_state(),
    }
    partial = run.config.out / "state.pt.partial"
    torch.save(state, partial)
    partial.replace(run.config.out / "state.pt")


def load_state(run: Run) -> None:
    """Read what `save_state` wrote, and drop later lines of the log."""
    # This command wrote the file itself; weights_only would refuse the record of the shape.
    state = torch.load(run.config.out / "state.pt", map_location=run.config.device, weights_only=False)
    if state["shape"] != run.config.shape:
        raise BadOption(f"{run.config.out} holds a run of shape {state['shape']}, asked for is {run.config.shape}")
    with torch.no_grad():
        for name, weight in run.weights.items():
            weight.copy_(state["weights"][name])
    run.optimizer.load_state_dict(state["optimizer"])
    run.step, run.elapsed_s = state["step"], state["elapsed_s"]
    torch.set_rng_state(state["rng"].cpu())
    path = run.config.out / "log.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] <= run.step and "final" not in json.loads(line)]
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def describe_run(run: Run) -> None:
    """Write out/run.json: options, shape, data and versions, for the model card."""
    record = {
        "options": run.config.to_json(),
        "num_parameters": run.config.shape.num_parameters,
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "corpus_sha256": run.corpus.fingerprint(),
        "tokenizer_sha256": tokenizer_hash(run.config.out / "tokenizer"),
        "num_text_tokens": len(run.data.text.tokens),
        "num_sample_tokens": 0 if run.data.samples is None else len(run.data.samples.tokens),
    }
    (run.config.out / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def export_model(run: Run) -> None:
    """Write the checkpoint folder out/model."""
    end_id = run.tokenizer.token_to_id(END_OF_TEXT)
    assert end_id is not None
    export(run.config.out / "model", run.config.shape, run.weights, run.config.out / "tokenizer", end_id)


def progress_bar(quiet: bool) -> Progress:
    """Make the progress bar of steps done, loss, speed and time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        disable=quiet,
    )
