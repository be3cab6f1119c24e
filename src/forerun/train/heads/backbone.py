"""Medusa-2: the target is trained together with heads that read its last hidden state (Cai et al. 2024, section 2.2.2).

The paper's recipe has two stages. In the first stage, only the heads learn, as in Medusa-1, because the loss of
untrained heads should not change the target. In the second stage, heads and target learn from one loss,

    L = L_target + w * L_heads,   w rising to `heads_weight`,

and the target's learning rate is the heads' rate times `backbone_rate`. L_target is KL(p || q) on text that the
original target wrote, where p is the distribution of the original target and q is the distribution of the new target.
The paper uses this loss for models without a data set (section 2.3.2, self-distillation), and otherwise the cross
entropy of a text. All layers and the final norm are trained here, while the paper trains low-rank adapters. Embeddings
and LM head stay unchanged, because the heads use rows of both.

The new target is a different model from the original. `save` writes it as a separate checkpoint, with a model card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.blocks import weight_shapes
from forerun.errors import BadOption
from forerun.models.loading import Checkpoint
from forerun.models.saving import config_to_dict, save_checkpoint
from forerun.ops.torch import TorchModel
from forerun.ops.torch_tensors import HostWeights, tensor_of
from forerun.registry import option
from forerun.train import losses
from forerun.train.fingerprint import fingerprint
from forerun.train.heads import Batch, Teacher, visible
from forerun.train.ops import RememberingOps, run_rows

FROZEN = ("model.embed_tokens.weight", "lm_head.weight")
PREFIX = "target."  # of the names of the target's weights, among all weights that are trained
ROWS = 256  # of a batch: `_own` compares about as many, and `renewed` computes the logits of as many at a time


@dataclass(frozen=True)
class BackboneOptions:
    """The options for training the target together with its heads."""

    backbone: bool = option(False, "train the target along (Medusa-2); OUT/model is then another target")
    backbone_rate: float = option(0.25, "its learning rate relative to the heads'")
    heads_weight: float = option(0.2, "weight of the heads' loss beside its own")
    heads_first: float = option(0.3, "first share of the steps, in which heads learn alone")

    def __post_init__(self) -> None:
        if not (0 < self.backbone_rate <= 1 and self.heads_weight > 0 and 0 <= self.heads_first < 1):
            raise BadOption(
                "backbone_rate must be above 0 and at most 1, heads_weight above 0, heads_first from 0 to below 1"
            )


class Backbone:
    """A copy of the target in float32, whose layers and final norm are trained.

    weights: the trained weights, by their names with PREFIX in front. share: the share of finished steps. Raises
    BadOption for a target that cannot be trained, and UnsupportedModel for a target that cannot be written.
    """

    def __init__(self, options: BackboneOptions, teacher: Teacher) -> None:
        config = teacher.config
        if config.has_windows:
            raise BadOption("a target with sliding windows cannot be trained along: leave out backbone=true")
        if config.has_states:
            raise BadOption("a target that keeps states cannot be trained along: leave out backbone=true")
        config_to_dict(config)
        self.options = options
        self.share = 0.0
        self._head = teacher.head
        self._ops = RememberingOps()
        weights = {name: tensor_of(teacher.model.weight(name)).clone() for name in weight_shapes(config)}
        self.weights = {f"{PREFIX}{n}": w.requires_grad_(True) for n, w in weights.items() if n not in FROZEN}
        self._model = TorchModel(config, weights, self._ops)

    @property
    def learns(self) -> bool:
        """Whether the second stage, in which the target also learns, has begun."""
        return self.share >= self.options.heads_first

    def rows(self, batch: Batch) -> Tensor:
        """Return the new target's hidden states after the final norm, float32 [S, L, H]."""
        self._ops.begin(visible(batch), remembers=True)
        rows = run_rows(self._model, batch.ids, batch.at)
        self._ops.memory = []
        return torch.unflatten(rows, 0, batch.ids.shape)

    def loss(self, batch: Batch, rows: Tensor, heads: Tensor) -> Tensor:
        """Return the joint loss of target and heads.

        rows: the result of the method `rows` for the batch. heads: the loss of the heads on these hidden states. The
        weight of `heads` rises to `heads_weight` in the first half of the second stage.
        """
        place = (self.share - self.options.heads_first) / (1 - self.options.heads_first)
        return self._own(batch, rows).mean() + self.options.heads_weight * min(1.0, 2 * place) * heads

    @torch.no_grad()
    def renewed(self, batch: Batch) -> Batch:
        """Return the batch with `hidden`, `best` and `mass` of the new target instead of the original target."""
        rows = self.rows(batch)
        best, mass = torch.empty_like(batch.best), torch.empty_like(batch.mass)
        for s, row in enumerate(rows):
            for start in range(0, len(row), ROWS):
                part = slice(start, start + ROWS)
                logits = F.linear(row[part], self._head).float()
                best[s, part], mass[s, part] = logits.argmax(-1), logits.logsumexp(-1)
        return replace(batch, hidden=rows, best=best, mass=mass)

    @torch.no_grad()
    def measure(self, batch: Batch, renewed: Batch) -> dict[str, tuple[float, float]]:
        """Compare the new target with the original. renewed: the result of `renewed` for the batch.

        Returns two measures, each as a sum and its divisor: kl, the KL divergence in nats, and same_best, the share of
        rows with the same likeliest id.
        """
        kl, rows = self._own(batch, renewed.hidden), batch.ahead(1)
        same = (batch.best == renewed.best)[rows]
        return {"kl": (float(kl.sum()), float(len(kl))), "same_best": (float(same.sum()), float(len(same)))}

    @torch.no_grad()
    def save(self, folder: Path, original: Checkpoint, log: Mapping[str, Any], method: str) -> None:
        """Write the checkpoint of the new target and a model card to `folder`.

        log: the last logged value of each measure, for the card. method: the spec of the method, for the card.
        """
        config = self._model.config
        weights = {name: self._model.weights[name].detach().bfloat16() for name in weight_shapes(config)}
        save_checkpoint(
            folder, config, HostWeights(weights), end_ids=original.end_ids, tokenizer_folder=original.folder
        )
        written = TorchModel(config, {name: weight.float() for name, weight in weights.items()})
        card = CARD.format(
            original=original.name,
            method=method,
            kl=log.get("kl", float("nan")),
            same=log.get("same_best", float("nan")),
            old=fingerprint(original.model),
            new=fingerprint(written),
        )
        (folder / "README.md").write_text(card, encoding="utf-8")

    def _own(self, batch: Batch, rows: Tensor) -> Tensor:
        """Return KL(original || new) at R rows of text that the original target wrote, [R], in nats.

        rows: the new target's hidden states. The R rows are spread evenly over the batch; R is about ROWS.
        """
        written = batch.ahead(1).flatten().nonzero()[:, 0]
        written = written[:: max(1, len(written) // ROWS)]
        new, old = (F.linear(part.flatten(0, 1)[written].float(), self._head).float() for part in (rows, batch.hidden))
        return losses.by_row("kl", new, old)


CARD = """# Another target

`forerun train head --method {method}` has trained this model along with its heads, from {original}. **It is not that
model**: its texts are its own, and speculation with it reproduces it, not {original}.

| | |
|---|---|
| KL(original, this) on held-out text of the original, nats per token | {kl:.4f} |
| the same likeliest id as the original | {same:.3f} |
| fingerprint of the original | `{old}` |
| fingerprint of this model | `{new}` |
"""
