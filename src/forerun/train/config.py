"""The options of one run of `forerun train lm`, as a frozen record that is written beside its results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.engine.factory import torch_device
from forerun.errors import BadOption
from forerun.train import losses
from forerun.train.loop import LoopConfig
from forerun.train.losses import LossName
from forerun.train.model import ModelShape


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """One run of `forerun train lm`; the command's help explains each field. Sizes in tokens, times in seconds."""

    shape: ModelShape
    loss: LossName = "ce"
    teacher: str | None = None  # the target: folder, GGUF file, name or hub id
    after: tuple[str, ...] = ()  # earlier drafts of the target, in the same ways: see lm.py
    init_from: Path | None = None  # checkpoint folder to start from: the same shape, or fewer layers
    tokenizer: Path | None = None  # tokenizer.json to use; None = the teacher's, else one is trained
    text: Path | None = None  # folder of Python sources; None = the standard library
    ids: Path | None = None  # rows of token ids (.npy) to learn from in place of text
    samples: Path | None = None  # file of `forerun train sample`, the target's own text
    samples_share: float = 0.5  # of each batch's rows, where samples are given
    validation_windows: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        losses.check_teacher(self.loss, self.teacher)
        for name in ("text", "tokenizer", "samples"):
            if self.ids is not None and getattr(self, name) is not None:
                raise BadOption(f"--ids are all that is learned from, and --{name} is for text: drop one")
        if self.after and self.teacher is None:
            raise BadOption("after learns where earlier drafts and a target do not agree: give --teacher PATH")
        if self.samples is not None and self.num_sample_rows == 0:
            raise BadOption(
                f"--samples-share {self.samples_share} of {self.rows_per_step} rows is none, so no sample is read: "
                "give more --tokens-per-step, or leave --samples out"
            )
        torch_device(self.device)

    @property
    def num_sample_rows(self) -> int:
        """Rows of a batch that the target wrote, where samples are given."""
        return round(self.rows_per_step * self.samples_share)

    @property
    def reads_text(self) -> bool:
        """Whether some of what it learns from is not written by the target."""
        return self.samples is None or self.num_sample_rows < self.rows_per_step

    def checks(self) -> dict[str, bool]:
        return {
            **super().checks(),
            "seq_len_tokens": 2 <= self.seq_len_tokens <= self.shape.max_positions,
            "samples_share": 0 <= self.samples_share <= 1,
            "device": self.device in ("cpu", "cuda"),
        }
