"""The options of one training run, as a frozen record that is written beside its results."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from forerun.errors import BadOption, shown
from forerun.train.losses import LossName
from forerun.train.model import ModelShape

Autocast = Literal["auto", "bf16", "off"]


@dataclass(frozen=True)
class TrainConfig:
    """One run of `forerun train lm`; the command's help explains each field. Sizes in tokens, times in seconds."""

    shape: ModelShape
    out: Path
    steps: int
    tokens_per_step: int = 4096
    seq_len_tokens: int = 512
    lr: float = 2e-3  # peak
    warmup_steps: int = 50
    decay_share: float = 0.4  # last share of the steps, in which the rate falls linearly to 0
    weight_decay: float = 0.1  # of matrices; norms are left alone
    grad_clip: float = 1.0  # largest norm of the gradient
    seed: int = 0
    loss: LossName = "ce"
    teacher: Path | None = None  # checkpoint folder of the target
    init_from: Path | None = None  # checkpoint folder to start from: the same shape, or fewer layers
    tokenizer: Path | None = None  # tokenizer.json to use; None = the teacher's, else one is trained
    text: Path | None = None  # folder of Python sources; None = the standard library
    samples: Path | None = None  # .npy of token ids, the target's own text
    samples_share: float = 0.5  # of each batch's rows, where samples are given
    validate_every_steps: int = 100
    validation_windows: int = 16
    checkpoint_every_s: float = 300.0
    autocast: Autocast = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        checks = {
            "steps": self.steps >= 1,
            "tokens_per_step": self.tokens_per_step >= self.seq_len_tokens,
            "seq_len_tokens": 2 <= self.seq_len_tokens <= self.shape.max_positions,
            "lr": self.lr > 0,
            "decay_share": 0 <= self.decay_share <= 1,
            "samples_share": 0 <= self.samples_share <= 1,
        }
        for name, ok in checks.items():
            if not ok:
                raise BadOption(f"{name}={getattr(self, name)} is out of range")
        if self.loss not in ("ce", "kl", "alpha"):
            raise BadOption(f"loss {shown(self.loss)} is unknown: it must be ce, kl or alpha")
        if self.loss != "ce" and self.teacher is None:
            raise BadOption(f"loss {self.loss} learns from a target's distribution: give --teacher PATH")

    @property
    def rows_per_step(self) -> int:
        """The number of sequences of one batch."""
        return self.tokens_per_step // self.seq_len_tokens

    def lr_at(self, step: int) -> float:
        """Return the learning rate of step 0 .. steps-1: linear warm-up, constant, linear decay to (nearly) 0."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        decay_steps = max(1, round(self.steps * self.decay_share))
        return self.lr * min(warm, (self.steps - step) / decay_steps)

    def to_json(self) -> dict[str, Any]:
        """Return the options as plain values, with paths as text."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}
