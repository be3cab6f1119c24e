"""The options of training runs. Each run's options are written beside its results. This file does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from forerun.errors import BadOption
from forerun.registry import REQUIRED, check_fields, inherited, option
from forerun.train.shape import ModelShape

Autocast = Literal["auto", "bf16", "off"]
LossName = Literal["ce", "kl", "alpha"]


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The options that all training runs have, such as steps and learning rate. Sizes are in tokens, times in seconds.

    weight_decay: the weight decay of matrices; other weights have none. grad_clip: the largest norm of the gradient.
    """

    out: Path = option(REQUIRED, "folder for log, curves, state and what was learned (out/model, of a head out/head)")
    steps: int = option(600, "steps in all; the learning rate reaches 0 at the last", flag="--max-steps", min=1)
    tokens_per_step: int = option(4096, "tokens of one batch")
    seq_len_tokens: int = option(512, "length of the training sequences, tokens", min=2)
    lr: float = option(2e-3, "peak learning rate of AdamW", above=0)
    warmup_steps: int = option(50, "steps of linear warm-up")
    decay_share: float = option(0.4, "share of the steps, at the end, with falling rate", min=0, max=1)
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    seed: int = option(0, "of first weights and data order")
    validate_every_steps: int = option(100, "validation interval, steps", min=1)
    checkpoint_every_s: float = option(300.0, "checkpoint interval, seconds")
    autocast: Autocast = option(
        "auto",
        "bf16 or off (float32, which torch computes faster on many CPUs), or auto: bf16 where the device has "
        "instructions for it",
        choices=get_args(Autocast),
    )
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tokens_per_step < self.seq_len_tokens:
            raise BadOption(
                f"--tokens-per-step {self.tokens_per_step} is less than one sequence of --seq-len-tokens "
                f"{self.seq_len_tokens}: give more of them, or shorter sequences"
            )

    @property
    def rows_per_step(self) -> int:
        """The number of sequences in one batch."""
        return self.tokens_per_step // self.seq_len_tokens

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step: first a linear warm-up, then constant, then linear decay to nearly 0.

        step: 0 .. steps - 1.
        """
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        decay_steps = max(1, round(self.steps * self.decay_share))
        return self.lr * min(warm, (self.steps - step) / decay_steps)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """The options of one run of `forerun train lm`."""

    shape: ModelShape
    loss: LossName = option(
        "ce", "ce (text), kl (target's distribution) or alpha (acceptance)", choices=get_args(LossName)
    )
    teacher: str | None = option(None, "the target, for kl, alpha and --after: a folder, GGUF file, name or hub id")
    after: tuple[str, ...] = option((), "an earlier draft of the teacher: learn where they do not agree")
    init_from: Path | None = option(None, "checkpoint folder to start from; may have fewer layers")
    tokenizer: Path | None = option(None, "tokenizer.json to use", usual="the teacher's, else one is trained")
    text: Path | None = option(None, "folder of Python sources", usual="the standard library")
    ids: Path | None = option(None, "in place of text: rows of token ids of one length, integers in a .npy file")
    samples: Path | None = option(None, "target's own text: a file of `train sample`")
    samples_share: float = option(0.5, "share of each batch taken from samples", min=0, max=1)
    validation_windows: int = option(16, "sequences of one validation")
    device: str = option("cpu", "cpu or cuda", choices=("cpu", "cuda"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_teacher(self.loss, self.teacher)
        if self.seq_len_tokens > self.shape.max_positions:
            raise BadOption(
                f"--seq-len-tokens {self.seq_len_tokens} is more than the {self.shape.max_positions} positions of the "
                "model: give fewer"
            )
        for name in ("text", "tokenizer", "samples"):
            if self.ids is not None and getattr(self, name) is not None:
                raise BadOption(f"--ids are all that is learned from, and --{name} is for text: drop one")
        if self.after and self.teacher is None:
            raise BadOption("--after learns where earlier drafts and a target do not agree: give --teacher PATH")
        if self.samples is not None and self.num_sample_rows == 0:
            raise BadOption(
                f"--samples-share {self.samples_share} of {self.rows_per_step} rows is none, so no sample is read: "
                "give more --tokens-per-step, or leave --samples out"
            )
        from forerun.engine.opened import torch_device

        torch_device(self.device)

    @property
    def num_sample_rows(self) -> int:
        """The number of rows of a batch that are cut from samples (texts that the target wrote), if there are any."""
        return round(self.rows_per_step * self.samples_share)

    @property
    def reads_text(self) -> bool:
        """Whether some rows of a batch are cut from text that the target did not write."""
        return self.samples is None or self.num_sample_rows < self.rows_per_step


@dataclass(frozen=True, kw_only=True)
class HeadConfig(LoopConfig):
    """The options of one run of `forerun train head`.

    fit_tokens: the number of tokens on which the head's first weights are fitted before the first step.
    """

    method: str = option(
        REQUIRED, "what is trained, with its options, as in eagle:draft_vocab=4096,steps=3: see `train heads`"
    )
    samples: Path = option(REQUIRED, "file of `train sample`, of the same target")
    steps: int = inherited(LoopConfig, "steps", 1000)
    tokens_per_step: int = inherited(LoopConfig, "tokens_per_step", 2048)
    seq_len_tokens: int = inherited(
        LoopConfig, "seq_len_tokens", 512, help="tokens of a row, into which whole texts are packed"
    )
    lr: float = inherited(
        LoopConfig, "lr", 2e-3, usual="the method's own, and less for a wide target: see `train heads NAME`"
    )
    decay_share: float = inherited(LoopConfig, "decay_share", 0.6)
    weight_decay: float = 0.01
    autocast: Autocast = inherited(LoopConfig, "autocast", "off")
    num_tokens: int | None = option(None, "tokens of the samples, the first ones", usual="all")
    features: Path | None = option(
        None, "folder to store the target's hidden states in", usual="none: they are recomputed at every step"
    )
    init_from: str | None = option(
        None,
        "a head of this method to go on from, with learning rate and steps of this run: a folder of `train head`, a "
        "name, or a hub id",
    )
    validation_rows: int = option(8, "rows of held-out texts of one validation")
    keep: bool = option(False, "draft=auto drafts with the head from then on, where this target is run")
    fit_tokens: int = 32768


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The options of one run of `forerun train sample`."""

    out: Path = option(REQUIRED, "file to append to; where it is there already, sampling goes on")
    num_tokens: int = option(300_000, "tokens in the file when it is done, prompts included")
    batch_size: int = option(32, "texts that are written at once", min=1)
    chat: float | None = option(None, "share of conversations", usual="0.7, or 0 where no chat template opens a turn")
    task: float | None = option(None, "share of instructions with a passage", usual="half of what is left")
    passage_tokens: int = option(160, "tokens of a passage of a given text at most", min=16)
    question_tokens: int = option(160, "tokens of a question at most", min=2)
    answer_tokens: int = option(320, "tokens of an answer or a continuation at most", min=1)
    texts: tuple[Path, ...] = option(
        (), "file, or folder of files, to cut passages from", flag="--text", usual="those of installed packages"
    )
    questions: tuple[Path, ...] = option(
        (),
        "file of questions, JSON or JSON lines: conversations begin with them, and not with the target's own",
        flag="--questions",
    )
    seed: int = option(0, "of prompts and draws")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """The options of one run of `forerun train drafter`."""

    out: Path = option(REQUIRED, "folder for samples, hidden states and the head; the same command goes on in it")
    hours: float = option(4.0, "that it may take in all; the target writes for 60 % of them", above=0)
    questions: tuple[Path, ...] = option(
        (), "file of questions like those that users ask, JSON or JSON lines", usual="the target's own, and passages"
    )
    method: str = option("eagle:draft_vocab=8192,steps=3", "what is trained, with its options: see `train heads`")
    lr: float | None = option(
        None, "peak learning rate of AdamW", usual="the method's own, and less for a wide target", above=0
    )
    batch_size: int = option(16, "texts that the target writes at once", min=1)
    keep: bool = option(True, "draft=auto drafts with the head from then on, where this target is run")
    seed: int = option(0, "of prompts, draws, first weights and data order")

    def __post_init__(self) -> None:
        check_fields(self)


def check_teacher(loss: LossName, teacher: str | None) -> None:
    """Raise BadOption where the loss needs a target and `teacher` is None."""
    if loss != "ce" and teacher is None:
        raise BadOption(f"--loss {loss} learns from a target's distribution: give --teacher PATH")
