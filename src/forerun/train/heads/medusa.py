"""Medusa (Cai et al. 2024, arXiv 2401.10774). The target is not changed, or is trained too (Medusa-2, backbone.py).

The drafter is drafters/medusa.py.

Head k (from 1) reads the target's last hidden state of token m, and learns the target's distribution of token m+k+1. A
head has one or more residual blocks, followed by rows of the target's LM head. The loss is the sum over heads of
decay^(k-1) times a loss of losses.py over the drafted ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.blocks import Spec
from forerun.registry import option
from forerun.train import losses
from forerun.train.heads import Batch, Teacher, Vocabulary, decayed, measured, shifted
from forerun.train.heads.backbone import PREFIX, Backbone, BackboneOptions

LR = 1e-3


@dataclass(frozen=True)
class Options(BackboneOptions):
    """The options of the method: the number and size of the heads, and the settings of their training."""

    heads: int = option(4, "heads, one for each token ahead", min=1, max=16)
    blocks: int = option(1, "residual blocks of a head", min=1, max=8)
    draft_vocab: int = option(8192, "ids that are drafted, those that the target wrote most often", min=2)
    decay: float = option(0.8, "weight of a head's loss relative to the head before")
    loss: str = option("kl", losses.HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        losses.check(self.loss)


def layers(options: Options, config: Spec) -> tuple[int, ...]:
    """Return no layers, because the heads read only the last hidden state, after the final norm."""
    return ()


class Head:
    """All heads in float32, with gradients.

    The first weights of all blocks are 0, so each head first computes the logits of the target's LM head.
    """

    def __init__(self, options: Options, teacher: Teacher, seed: int) -> None:
        self.options, self._teacher = options, teacher
        self._vocab = Vocabulary(teacher, options.draft_vocab)
        self.ids = self._vocab.ids
        self.weights = self.first_weights(teacher.config.hidden_size)
        self.backbone = Backbone(options, teacher) if options.backbone else None
        if self.backbone is not None:
            self.weights |= self.backbone.weights

    @property
    def rates(self) -> dict[str, float]:
        """The learning rates of the target's weights as multiples of the heads' rate; {} if only heads are trained."""
        return {} if self.backbone is None else dict.fromkeys(self.backbone.weights, self.options.backbone_rate)

    def at(self, share: float) -> None:
        """Set the share of finished steps, which decides whether the target learns, too."""
        if self.backbone is not None:
            self.backbone.share = share

    def begin(self, batches: Iterable[Batch]) -> None:
        """Do nothing, because no first weights are fitted."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, with its gradient."""
        if self.backbone is None or not self.backbone.learns:
            return decayed(self._heads(batch), self.options.decay, self.options.loss)
        rows = self.backbone.rows(batch)
        heads = decayed(self._heads(replace(batch, hidden=rows)), self.options.decay, self.options.loss)
        return self.backbone.loss(batch, rows, heads)

    def measure(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Return agreement, overlap and loss (`Rows.numbers`) by position.

        If the target is trained too, the heads are compared with the new target, and `Backbone.measure` is added.
        """
        if self.backbone is None:
            return measured(self._heads(batch), batch, self.ids)
        renewed = self.backbone.renewed(batch)
        return measured(self._heads(renewed), renewed, self.ids) | self.backbone.measure(batch, renewed)

    def files(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the config.json that the drafter reads."""
        trained = {name: weight for name, weight in self.weights.items() if not name.startswith(PREFIX)}
        weights = {name: weight.detach().bfloat16() for name, weight in trained.items()}
        sizes = {"hidden_size": self._teacher.config.hidden_size, "draft_vocab_size": len(self.ids)}
        return weights | {"d2t": self._vocab.offsets()}, {**self.sizes(), **sizes}

    def first_weights(self, width: int) -> dict[str, Tensor]:
        """Return the first weights of all heads, by their names in the file. width: the hidden size."""
        return {
            f"{head}.{block}.linear.{part}": torch.zeros((width, width) if part == "weight" else (width,))
            for head in range(self.options.heads)
            for block in range(self.options.blocks)
            for part in ("weight", "bias")
        }

    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the heads for config.json."""
        return {"medusa_num_heads": self.options.heads, "medusa_num_layers": self.options.blocks}

    def rows(self, head: int, batch: Batch, learned: Tensor) -> Tensor:
        """Return the output of the blocks of head `head` for the learned rows, [R, H]."""
        return self._through([f"{head}.{i}.linear" for i in range(self.options.blocks)], batch.hidden[learned].float())

    def _heads(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each head the learned rows [S, L] bool, the head's logits, and the target's logits, float32 [R, n].

        R is the number of learned rows, and n the number of drafted ids.
        """
        for head in range(self.options.heads):
            learned = batch.ahead(head + 2) & self._vocab.has(shifted(batch.best, head + 1))
            logits = self._vocab.logits(self.rows(head, batch, learned))
            with torch.no_grad():
                target = self._vocab.logits(shifted(batch.hidden, head + 1)[learned])
            yield learned, logits, target

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _through(self, names: Iterable[str], x: Tensor) -> Tensor:
        """Return the output of the residual blocks `names` for x [R, H]."""
        for name in names:
            x = x + F.silu(self._linear(name, x))
        return x
