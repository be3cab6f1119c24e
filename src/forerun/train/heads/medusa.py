"""Medusa-1 (Cai et al. 2024, arXiv 2401.10774): the backbone stays as it is; the drafter is drafters/medusa.py.

Head k (from 1) reads the target's last hidden state of token m and learns the target's distribution of token m+k+1: one
residual block, and the rows of the target's own LM head. The loss is the sum over heads of decay^k times a loss of
losses.py over the ids that are drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters import head_files
from forerun.models.layers import DecoderConfig
from forerun.train import losses
from forerun.train.heads import Batch, Rows, Teacher, shifted


@dataclass(frozen=True)
class Options:
    """How many heads there are, and how they learn."""

    heads: int = field(default=4, metadata={"help": "heads, one for each token ahead", "min": 1, "max": 16})
    blocks: int = field(default=1, metadata={"help": "residual blocks of a head", "min": 1, "max": 8})
    draft_vocab: int = field(
        default=8192, metadata={"help": "ids that are drafted, those that the target wrote most often", "min": 2}
    )
    decay: float = field(default=0.8, metadata={"help": "weight of a head's loss over that of the head before"})
    loss: str = field(default="kl", metadata={"help": losses.HELP})

    def __post_init__(self) -> None:
        losses.check(self.loss)


def layers(options: Options, config: DecoderConfig) -> tuple[int, ...]:
    """None: the last hidden state is behind the final norm."""
    return ()


class AheadOptions(Protocol):
    """What heads that guess ahead of one hidden state have in common."""

    @property
    def heads(self) -> int: ...
    @property
    def draft_vocab(self) -> int: ...
    @property
    def decay(self) -> float: ...
    @property
    def loss(self) -> str: ...


class AheadHead:
    """Heads that guess ahead of the target's last hidden state, in float32. weights: in the beginning, by name.

    method: the drafter that reads them. sizes: for config.json.
    """

    method: str

    def __init__(
        self, options: AheadOptions, teacher: Teacher, weights: dict[str, Tensor], sizes: Mapping[str, int]
    ) -> None:
        self.options = options
        self.ids = teacher.counts.argsort(descending=True, stable=True)[: options.draft_vocab].sort().values
        self._rows = teacher.head[self.ids]
        self._place = torch.full((teacher.config.vocab_size,), -1)
        self._place[self.ids] = torch.arange(len(self.ids))
        self._width, self._probe = teacher.config.hidden_size, teacher.probe
        self.weights, self._sizes = weights, sizes

    def output(self, head: int, hidden: Tensor) -> Tensor:
        """hidden [R, H] -> what the LM head reads for this head [R, H]."""
        raise NotImplementedError

    def begin(self, batches: Iterable[Batch]) -> None:
        """See `Head` in this package: nothing, unless a method overrides it."""

    def loss(self, batch: Batch) -> Tensor:
        """See `Head` in this package."""
        total = torch.zeros(())
        for head, (_, own, target) in enumerate(self._guesses(batch)):
            if len(own):
                total = total + self.options.decay**head * losses.by_row(self.options.loss, own, target).mean()
        return total

    def measure(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """See `Head` in this package."""
        numbers, reached = dict[str, tuple[float, float]](), torch.ones_like(batch.is_written)
        for k, (learned, own, target) in enumerate(self._guesses(batch)):
            rows = Rows(batch.ahead(k + 2), learned, self.ids, shifted(batch.best, k + 1), shifted(batch.mass, k + 1))
            numbers |= rows.numbers(f"_{k + 1}", own, target, reached)
            reached = reached & rows.found(own)
        return numbers

    def _guesses(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each head: which rows are learned [S, L], and own and target logits of those, float32 [R, draft_vocab]."""
        for head in range(self.options.heads):
            learned = batch.ahead(head + 2) & (self._place[shifted(batch.best, head + 1)] >= 0)
            own = F.linear(self.output(head, batch.hidden[learned].float()), self._rows).float()
            with torch.no_grad():
                target = F.linear(shifted(batch.hidden, head + 1)[learned].to(self._rows.dtype), self._rows).float()
            yield learned, own, target

    def save(self, folder: Path, tokenizer: str) -> None:
        """See `Head` in this package."""
        weights = {name: weight.detach().bfloat16() for name, weight in self.weights.items()}
        weights["d2t"] = self.ids - torch.arange(len(self.ids))
        weights[head_files.PROBE] = self._probe
        sizes = {**self._sizes, "hidden_size": self._width, "draft_vocab_size": len(self.ids)}
        head_files.save(folder, self.method, weights, sizes, tokenizer)


class Head(AheadHead):
    """All heads of Medusa. They begin as the target's own head, for their blocks add nothing."""

    method = "medusa"

    def __init__(self, options: Options, teacher: Teacher, seed: int) -> None:
        width = teacher.config.hidden_size
        weights = {
            f"{head}.{block}.linear.{part}": torch.zeros((width, width) if part == "weight" else (width,))
            for head in range(options.heads)
            for block in range(options.blocks)
            for part in ("weight", "bias")
        }
        self._num_blocks = options.blocks
        sizes = {"medusa_num_heads": options.heads, "medusa_num_layers": options.blocks}
        super().__init__(options, teacher, weights, sizes)

    def output(self, head: int, hidden: Tensor) -> Tensor:
        """See AheadHead."""
        for block in range(self._num_blocks):
            linear = f"{head}.{block}.linear."
            hidden = hidden + F.silu(F.linear(hidden, self.weights[linear + "weight"], self.weights[linear + "bias"]))
        return hidden
