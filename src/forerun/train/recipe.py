"""Trains a head for any target in a given time, for `forerun train drafter`. No data set is needed.

For the share SAMPLE_SHARE of the time, the target writes texts, and its hidden states are stored. The remaining time is
for training. A few steps are timed, and then as many steps are trained as fit into the remaining time. The out folder
gets `samples.ids`, `features`, the files of the training run (log.jsonl, state.pt, head) and `recipe.json`, which
records the progress. If the command was stopped, the same command continues.

Steps are computed in float32 or under bfloat16 autocast, whichever was faster when they were timed: on some processors
with instructions for bfloat16 its products take half the time of float32, on others more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from forerun.config import EngineConfig
from forerun.engine.opened import Opened
from forerun.errors import BadOption, shown
from forerun.models.opened import OpenedCheckpoint
from forerun.output_file import write_whole
from forerun.text.json_files import read_json
from forerun.train import head as training, heads, loop
from forerun.train.config import Autocast, DrafterConfig, HeadConfig, SampleConfig
from forerun.train.recording import Recording
from forerun.train.sampling import Progress, write

SAMPLE_SHARE = 0.6  # of the time
LEAST_SHARE = 0.1  # of the time is kept for steps, however long all else took
MOST_PASSES = 10  # over the samples; after five passes a head still learned
LEAST_TOKENS = 2048  # of samples: fewer teach nothing
NO_END = 1 << 40  # tokens, which no run reaches
TIMED_STEPS = 3
CLEARLY = 0.9  # of float32's time, and bfloat16 is worth its rounding
TOKENS_PER_STEP = 1024
PASSAGE_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 160, 600, 512
SAMPLES, FEATURES = "samples.ids", "features"


class _TimeIsUp(Exception):
    """Raised to end the sampling when its time is over."""


@dataclass(frozen=True)
class State:
    """Holds the progress of a run of `forerun train drafter`, which is stored in the out folder.

    hours, method: the options with which the run began. sampled_s: the seconds of sampling so far, in all sessions.
    is_sampled: whether the sampling is over. steps: the number of training steps; None = not known yet. autocast: the
    arithmetic of the steps.
    """

    hours: float
    method: str
    sampled_s: float = 0.0
    is_sampled: bool = False
    steps: int | None = None
    autocast: Autocast = "off"

    @classmethod
    def of(cls, config: DrafterConfig) -> State:
        """Return the state in the out folder, or a new state if the folder has no state.

        Raises BadOption if the run in the folder began with other hours or another method.
        """
        path = config.out / "recipe.json"
        asked = cls(config.hours, config.method)
        if not path.exists():
            return asked
        known = read_json(path)
        fields = asdict(asked)
        if not fields.keys() - {"autocast"} <= known.keys():  # older runs computed in float32
            raise BadOption(f"{shown(str(path))} is not of `forerun train drafter`: name another folder with --out")
        state = cls(**{name: known.get(name, value) for name, value in fields.items()})
        for name in ("hours", "method"):
            had, wanted = getattr(state, name), getattr(asked, name)
            if had != wanted:
                raise BadOption(
                    f"{shown(str(config.out))} was begun with {name}={shown(str(had))}, and asked for is "
                    f"{shown(str(wanted))}: take the same to go on, or name another folder with --out"
                )
        return state

    def save(self, out: Path) -> None:
        """Write the state to the out folder. The old file is replaced only when the new file is complete."""
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "recipe.json", json.dumps(asdict(self)) + "\n")


@dataclass(frozen=True)
class TrainedHead:
    """Describes a trained head. folder: the head's folder. numbers: the measures of the last validation, by name."""

    folder: Path
    target: OpenedCheckpoint
    numbers: dict[str, float]


def make(
    config: DrafterConfig,
    target: str | None,
    *,
    dtype: str = "auto",
    ops: str = "auto",
    quiet: bool = False,
    say: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> TrainedHead:
    """Let the target write texts, and train a head on these texts. Continues from the state in the out folder.

    say: called with a message when a stage begins. warn: see `head.train`. clock: returns the time in seconds. Raises
    UserError as `train sample` and `train head` do.
    """
    state = State.of(config)
    opened = Opened.of(EngineConfig(target=target, dtype=dtype, ops=ops, device="cpu"))
    _, method, options = heads.load(config.method, opened.files.spec)  # refuses a wrong method before hours of work
    if not state.is_sampled:
        sampling = _sampling_of(config, opened.files.spec.max_positions)
        layers = method.layers(options, opened.files.spec)
        writing = partial(write, sampling, target, dtype=dtype, ops=ops)
        state = _sample(config, state, writing, layers, quiet, say, clock)
    begun = clock()
    checkpoint = opened.load()
    run = _run_of(config, state, opened.files.spec.hidden_size)
    task = training.shown_prepare(run, checkpoint, quiet, warn)
    if state.steps is None:
        state = planned(config, state, task, clock, begun)
        state.save(config.out)
        say(f"{state.steps} steps of {TOKENS_PER_STEP} tokens, on {task.facts['num_tokens']:,} that the target wrote")
        run = task.config = _run_of(config, state, opened.files.spec.hidden_size)
    numbers = loop.train(run, lambda: task, resume=True, quiet=quiet)
    return TrainedHead(config.out / "head", checkpoint.opened, numbers)


def planned(
    config: DrafterConfig, state: State, task: training.HeadTask, clock: Callable[[], float], prepared_from_s: float
) -> State:
    """Return the state with the faster arithmetic, and with the number of training steps that fit into the time left.

    The time that is left is `config.hours` without the time of sampling and of preparing the training, but at least
    the share LEAST_SHARE of `config.hours`. The samples are read at most MOST_PASSES times. A few steps are timed in
    each arithmetic, without changing weights. prepared_from_s: the time on `clock` at which the preparation of the
    training began.
    """
    for weight in task.weights.values():
        weight.requires_grad_(True)
    run = task.config
    ways: tuple[Autocast, ...] = ("off", "bf16") if loop.has_bf16("cpu") else ("off",)
    timed_s: dict[Autocast, list[float]] = {way: [] for way in ways}
    with loop.deterministic():
        for step in range(1 + TIMED_STEPS):  # in turns, because other programs may be busy for a while
            for way in ways:
                task.config = replace(run, autocast=way)
                begun = clock()
                task.loss(step).backward()  # type: ignore[no-untyped-call]
                timed_s[way].append(clock() - begun)
    task.config = run
    step_s = {way: median(seconds[1:]) for way, seconds in timed_s.items()}  # the first one takes longer
    for weight in task.weights.values():
        weight.grad = None
    faster: Autocast = "bf16" if step_s.get("bf16", inf) < CLEARLY * step_s["off"] else "off"
    whole_s = 3600 * config.hours
    left_s = max(LEAST_SHARE * whole_s, whole_s - state.sampled_s - (clock() - prepared_from_s))
    num_tokens: int = task.facts["num_tokens"]
    most = MOST_PASSES * num_tokens // TOKENS_PER_STEP
    return replace(state, autocast=faster, steps=max(1, min(round(left_s / step_s[faster]), most)))


def _sample(
    config: DrafterConfig,
    state: State,
    writing: Callable[..., Progress],
    layers: tuple[int, ...],
    quiet: bool,
    say: Callable[[str], None],
    clock: Callable[[], float],
) -> State:
    """Let the target write samples until the time for sampling is over, or all questions are answered.

    The target writes at least LEAST_TOKENS tokens; if the questions end earlier, BadOption is raised. Returns the new
    state. writing: lets the target write, see `sampling.write`. layers: the layers of the target after which
    hidden states are stored.
    """
    begun, limit_s = clock(), SAMPLE_SHARE * 3600 * config.hours
    num_tokens = 0
    with loop.progress_bar(quiet) as progress:
        row = progress.add_task("seconds of sampling", total=round(limit_s), note="")

        def look(now: Progress) -> None:
            nonlocal num_tokens
            num_tokens = now.num_tokens
            sampled_s = state.sampled_s + clock() - begun
            replace(state, sampled_s=sampled_s).save(config.out)
            note = f"{num_tokens:,} tokens, {now.tokens_per_s:,.0f} per second"
            progress.update(row, completed=round(sampled_s), note=note)
            if sampled_s >= limit_s and num_tokens >= LEAST_TOKENS:
                raise _TimeIsUp

        def begin(text: str) -> None:
            progress.update(row, note=text)

        def compute(num: int, of: int) -> None:
            replace(state, sampled_s=state.sampled_s + clock() - begun).save(config.out)
            progress.update(row, note=f"hidden states of {num:,} of {of:,} texts that are there")

        recording = Recording(config.out / FEATURES, layers, compute)
        try:
            writing(look, tell=begin, recording=recording)
        except _TimeIsUp:
            pass
        except BadOption:
            if num_tokens < LEAST_TOKENS:
                raise
            say("all questions are answered: what is left of the time is for learning")
    state = replace(state, sampled_s=state.sampled_s + clock() - begun, is_sampled=True)
    state.save(config.out)
    return state


def _sampling_of(config: DrafterConfig, max_positions: int) -> SampleConfig:
    """Return the options for sampling, with lengths of texts that fit into max_positions.

    max_positions: the target's largest number of tokens in a sequence.
    """
    asked: dict[str, Any] = {"chat": 0.9} if config.questions else {}
    return SampleConfig(
        out=config.out / SAMPLES,
        num_tokens=NO_END,
        batch_size=config.batch_size,
        passage_tokens=min(PASSAGE_TOKENS, max_positions // 4),
        question_tokens=min(QUESTION_TOKENS, max_positions // 4),
        answer_tokens=min(ANSWER_TOKENS, max_positions // 4),
        questions=config.questions,
        seed=config.seed,
        **asked,
    )


def _run_of(config: DrafterConfig, state: State, hidden_size: int) -> HeadConfig:
    options: dict[str, Any] = {} if config.lr is None else {"lr": config.lr}
    steps = state.steps or TIMED_STEPS
    return HeadConfig(
        out=config.out,
        method=config.method,
        samples=config.out / SAMPLES,
        features=config.out / FEATURES,
        steps=steps,
        autocast=state.autocast,
        tokens_per_step=TOKENS_PER_STEP,
        warmup_steps=max(1, min(50, steps // 10)),
        validate_every_steps=max(1, steps // 10),
        validation_rows=24,
        seed=config.seed,
        **{"lr": heads.rate_of(config.method, hidden_size), **options},
    )
