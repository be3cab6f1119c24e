"""The training loop: steps, learning rate, log, curves, and checkpoints from which a run is resumed bit for bit.

The loop trains a `Task`: a language model (lm.py) or a drafter's head (head.py). The out folder gets `log.jsonl` (one
object per logged step; the first is a validation before any step), `run.json` (options and data), `state.pt` (to resume
from) and, where matplotlib is installed, `curves.png`. Beside these files, the task exports the trained weights.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from forerun.errors import BadOption, raising_os_errors, shown
from forerun.text.json_files import read_json_lines
from forerun.text.progress import Bar
from forerun.text.waiting import Waiting
from forerun.train.config import LoopConfig
from forerun.train.stopping import Stopped, uninterrupted

LOG_EVERY_STEPS = 10


class Task(Protocol):
    """The interface of a model or head that is trained.

    weights: the weights, by name, which are trained in place. identity: the settings, by name, that must not change
    when a run is resumed from a saved state. facts: entries for run.json. rates: the learning rates of some weights, by
    name, as multiples of the usual rate.
    """

    @property
    def weights(self) -> Mapping[str, Tensor]: ...
    @property
    def identity(self) -> Mapping[str, Any]: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...
    @property
    def rates(self) -> Mapping[str, float]: ...

    def loss(self, step: int) -> Tensor:
        """Return the loss of the batch of one step. The batch depends only on the seed and the step."""

    def validate(self) -> dict[str, float]:
        """Return measures on held-out data, such as losses, by name."""

    def export(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Write the current weights as a checkpoint or head that can be loaded. log: the lines of log.jsonl."""


@dataclass
class Run:
    """Holds the state of a run in memory.

    step: the number of finished steps. elapsed_s: the seconds that all finished steps took, earlier sessions included.
    rng: the random state of torch behind the last finished step. saved_step: the step in out/state.pt; 0 = no state.
    """

    config: LoopConfig
    task: Task
    optimizer: torch.optim.AdamW
    step: int = 0
    elapsed_s: float = 0.0
    rng: Tensor = field(default_factory=torch.get_rng_state)
    saved_step: int = 0


def train(
    config: LoopConfig, prepare: Callable[[], Task], *, resume: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Train for config.steps steps, save regularly, and export. Returns the measures of the last validation, by name.

    prepare: reads the data and makes the task, which may take long. resume: whether to continue from the state in the
    out folder; if the folder has no state, a new run begins. On the same machine with the same number of threads, every
    loss of a resumed run equals the loss of an uninterrupted run bit for bit. Raises BadOption if the out folder has
    the state of another run, and if the folder has a state and resume is False. Raises Stopped for Ctrl-C once a step
    was done; the state is then saved.
    """
    if not resume and (config.out / "state.pt").exists():
        raise BadOption(f"{shown(str(config.out))} holds a run: go on with --resume, or name another folder with --out")
    task = prepare()
    config.out.mkdir(parents=True, exist_ok=True)
    with Waiting("preparing the first step", is_quiet=quiet):  # torch imports what compiles for its first optimizer
        for weight in task.weights.values():
            weight.requires_grad_(True)
        run = Run(config, task, make_optimizer(config, task.weights, task.rates))
        if is_resumed := resume and (config.out / "state.pt").exists():
            load_state(run)
    if not is_resumed:
        (config.out / "log.jsonl").write_text("", encoding="utf-8")
        log(run, _validated(task, quiet))  # before the first step
    describe_run(run)
    try:
        with deterministic(), progress_bar(quiet) as progress:
            row = progress.add_task("training", total=config.steps, completed=run.step, note="")
            for note in steps_of(run):
                progress.update(row, completed=run.step, note=note)
        numbers = _validated(task, quiet)
        log(run, {"final": True, **numbers})
        with Waiting("saving", is_quiet=quiet):
            save(run)
    except KeyboardInterrupt:
        if not run.step:
            raise
        if run.saved_step < run.step:
            with Waiting("saving", is_quiet=quiet):
                save_state(run)
        raise Stopped(f"step {run.step}") from None
    return numbers


def _validated(task: Task, quiet: bool) -> dict[str, float]:
    """Return the measures of a validation, and say meanwhile that it runs. quiet: whether to say nothing."""
    with Waiting("validating", is_quiet=quiet):
        return task.validate()


def make_optimizer(
    config: LoopConfig, weights: Mapping[str, Tensor], rates: Mapping[str, float] = MappingProxyType({})
) -> torch.optim.AdamW:
    """Make an AdamW optimizer (Loshchilov and Hutter 2019) with betas 0.9 and 0.95, and weight decay for matrices only.

    rates: see Task.
    """
    groups = [
        {
            "params": [w for name, w in weights.items() if (w.ndim > 1) == decays and rates.get(name, 1.0) == rate],
            "weight_decay": config.weight_decay if decays else 0.0,
            "rate": rate,
        }
        for rate in (1.0, *sorted(set(rates.values()) - {1.0}))
        for decays in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=(0.9, 0.95), fused=True
    )


def steps_of(run: Run) -> Iterator[str]:
    """Run the remaining steps, and yield a line for the progress bar after each step."""
    config = run.config
    note, last_saved_s = "", time.perf_counter()
    if _is_to_validate(run) and not any(_is_validation(line, run.step) for line in read_log(config.out)):
        note = _validate_and_log(run)  # Ctrl-C stopped the run while it validated
    while run.step < config.steps:
        before_s = run.elapsed_s
        loss, _ = train_step(run)
        tokens_per_s = config.rows_per_step * config.seq_len_tokens / (run.elapsed_s - before_s)
        if _is_to_validate(run):
            note = _validate_and_log(run)
        if time.perf_counter() - last_saved_s >= config.checkpoint_every_s:
            save(run)
            last_saved_s = time.perf_counter()
        yield f"loss {loss:.4f} {tokens_per_s:.0f} tok/s {note}"


def train_step(run: Run) -> tuple[float, float]:
    """Train on one batch: forward, backward, clip, update, log. Returns the loss and the gradient's norm.

    The norm is that before clipping. Ctrl-C ends the step before the update, or after the log: never in between.
    """
    config, started_s = run.config, time.perf_counter()
    batch_loss = run.task.loss(run.step)
    batch_loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(run.task.weights.values(), config.grad_clip)
    for group in run.optimizer.param_groups:
        group["lr"] = config.lr_at(run.step) * group.get("rate", 1.0)
    with uninterrupted():
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        loss, grad_norm = float(batch_loss.detach()), float(norm)
        step_s = time.perf_counter() - started_s
        run.step += 1
        run.elapsed_s += step_s
        run.rng = torch.get_rng_state()
        if run.step % LOG_EVERY_STEPS == 0 or run.step <= LOG_EVERY_STEPS:
            tokens_per_s = round(config.rows_per_step * config.seq_len_tokens / step_s)
            log(run, {"train_loss": loss, "grad_norm": grad_norm, "tokens_per_s": tokens_per_s})
    return loss, grad_norm


def _is_to_validate(run: Run) -> bool:
    return 0 < run.step < run.config.steps and run.step % run.config.validate_every_steps == 0


def _is_validation(line: Mapping[str, Any], step: int) -> bool:
    """Return whether a line of the log has the measures of a validation after `step` steps."""
    return line.get("step") == step and "train_loss" not in line


def _validate_and_log(run: Run) -> str:
    """Validate, log the measures, and return them as a text."""
    numbers = run.task.validate()
    with uninterrupted():
        log(run, numbers)
        run.rng = torch.get_rng_state()
    return " ".join(f"{key} {value:.4f}" for key, value in numbers.items())


@contextmanager
def deterministic() -> Iterator[None]:
    """Return a context manager in which torch's sums are repeatable.

    Otherwise threads add up the gradient of the embeddings in a changing order.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def autocast(config: LoopConfig) -> AbstractContextManager[Any]:
    """Return the context manager for a forward pass with the option autocast.

    Matrix products are computed in bfloat16 with `bf16`, and with `auto` if the device has instructions for bfloat16.
    Otherwise the context changes nothing.
    """
    device = torch.device(config.device).type
    if config.autocast == "off" or (config.autocast == "auto" and not has_bf16(device)):
        return nullcontext()
    return torch.autocast(device, dtype=torch.bfloat16)


def has_bf16(device: str) -> bool:
    """Return whether the device has instructions for bfloat16: CUDA, or a processor with AVX512-BF16 or AMX.

    Other processors emulate bfloat16, which is slower than float32.
    """
    if device == "cuda":
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


# ---------------------------------------------------------------------------------------------- log, state and curves


def log(run: Run, numbers: Mapping[str, Any]) -> None:
    """Append one line to log.jsonl: the step, the tokens so far, the seconds so far, and the measures in `numbers`."""
    tokens = run.step * run.config.rows_per_step * run.config.seq_len_tokens
    head = {"step": run.step, "tokens": tokens, "elapsed_s": round(run.elapsed_s, 1)}
    path = run.config.out / "log.jsonl"
    with raising_os_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**head, **numbers}) + "\n")


def read_log(out: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log; [] where there is no log. Raises BadOption for a line that is no JSON object."""
    path = out / "log.jsonl"
    return [line for _, line in read_json_lines(path, "log", "remove the line")] if path.exists() else []


def save(run: Run) -> None:
    """Write the state, the exported weights, and the curves."""
    save_state(run)
    lines = read_log(run.config.out)
    run.task.export(lines)
    draw_curves(lines, run.config.out / "curves.png")


def save_state(run: Run) -> None:
    """Save weights, optimizer, step and random state to out/state.pt.

    The old file is replaced only when the new file is complete.
    """
    state = {
        "identity": run.task.identity,
        "weights": {name: weight.detach() for name, weight in run.task.weights.items()},
        "optimizer": run.optimizer.state_dict(),
        "step": run.step,
        "elapsed_s": run.elapsed_s,
        "rng": run.rng,
    }
    partial = run.config.out / "state.pt.partial"
    with raising_os_errors(partial), partial.open("wb") as file:
        torch.save(state, file)
    partial.replace(run.config.out / "state.pt")
    run.saved_step = run.step


def load_state(run: Run) -> None:
    """Load the state that `save_state` wrote, put it into `run`, and remove later lines from log.jsonl.

    Raises BadOption for the state of another run, and for a file that cannot be read.
    """
    path = run.config.out / "state.pt"
    try:
        # This command wrote the file itself; weights_only would refuse the record of the shape.
        state = torch.load(path, map_location=run.config.device, weights_only=False)
    except Exception as error:  # torch and pickle raise many kinds for a file that is cut or of another kind
        reason = " ".join(str(error).split(".")[0].split()) or type(error).__name__
        raise BadOption(
            f"the state {shown(str(path))} cannot be read ({reason}): remove it to begin anew, or name another folder "
            "with --out"
        ) from error
    had, wanted = state["identity"], run.task.identity
    if name := next((name for name in wanted if not isinstance(had, dict) or had.get(name) != wanted[name]), None):
        of = shown(str(had[name])) if isinstance(had, dict) and name in had else "another"
        raise BadOption(
            f"{shown(str(run.config.out))} holds a run of {name}={of}, and asked for is {shown(str(wanted[name]))}: "
            "take the same to go on, or name another folder with --out"
        )
    with torch.no_grad():
        for name, weight in run.task.weights.items():
            weight.copy_(state["weights"][name])
    run.optimizer.load_state_dict(state["optimizer"])
    run.step, run.elapsed_s, run.rng = state["step"], state["elapsed_s"], state["rng"].cpu()
    run.saved_step = run.step
    torch.set_rng_state(run.rng)
    kept = [line for line in read_log(run.config.out) if line["step"] <= run.step and "final" not in line]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    (run.config.out / "log.jsonl").write_text(text, encoding="utf-8")


def describe_run(run: Run) -> None:
    """Write out/run.json with the options, the facts of the task, and versions, for the model card."""
    record = {
        "options": asdict(run.config),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **run.task.facts,
    }
    (run.config.out / "run.json").write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")


def draw_curves(lines: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw the training loss and each measure of the validations over the steps, and write the picture to `path`.

    lines: the lines of log.jsonl. Does nothing without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    known = {"step", "tokens", "elapsed_s", "final", "tokens_per_s", "grad_norm"}
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name in line.keys() - known:
            curves.setdefault(name, []).append((line["step"], line[name]))
    losses = sorted(name for name in curves if "loss" in name or name == "kl")
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    parts = [("nats per token", losses), ("held out, share", sorted(curves.keys() - set(losses)))]
    for axes, (label, names) in zip(figure.subplots(1, 2), parts, strict=True):
        for name in names:
            axes.plot(*zip(*curves[name], strict=True), label=name, marker="." if len(curves[name]) < 20 else None)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if names:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def progress_bar(quiet: bool) -> Bar:
    """Make a progress bar that shows finished steps, remaining time, and a note. quiet: whether to show nothing."""
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        is_quiet=quiet,
    )
