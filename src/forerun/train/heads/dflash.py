"""A block drafter as in DFlash (Chen et al. 2026, arXiv 2602.06036); the drafter is drafters/dflash.py.

A block consists of a token of the text, its anchor, and of mask tokens. Row k of a block learns the target's
distribution of the token k positions after the anchor. Every row attends to its own block and to the context. The
context has keys and values made from the target's features of the tokens before the anchor. Each step learns blocks at
many anchors of each text: every n-th token (`every`), from an offset that changes with the batch. An attention mask
separates the blocks. The loss is the sum over k of decay^(k-1) times a loss of losses.py over the drafted ids.

Each layer begins as a copy of the target's last layer with attention, and the context begins as the input of this
layer of the target. So before the first step, the context's keys and values equal the target's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.blocks import Norm, Spec
from forerun.drafters.shared import head_files
from forerun.drafters.shared.dflash_model import DFlashConfig, shapes
from forerun.errors import BadOption
from forerun.registry import option, parse_list
from forerun.train import losses
from forerun.train.heads import (
    Batch,
    Rows,
    Teacher,
    TrainedBlock,
    Vocabulary,
    decayed,
    last_attending,
    norm_of,
    own_blocks,
    shifted,
)

LR = 8e-4


@dataclass(frozen=True)
class Options:
    """The options of the method: the layers and sizes of the drafter, and the settings of its training."""

    layers: str | None = option(
        None,
        "layers of the target behind which it reads, ascending, from 1, as in 15+29+30; none = half "
        "of them, all but one, and all",
    )
    depth: int = option(2, "layers of its own", min=1, max=32)
    block: int = option(6, "rows of a pass: one more than tokens it guesses", min=2)
    draft_vocab: int = option(8192, "ids that it drafts, those that the target wrote most often", min=2)
    decay: float = option(0.8, "weight of a place's loss relative to the place before")
    every: int = option(4, "tokens from one block that is learned to the next", min=1)
    loss: str = option("kl", losses.HELP)

    def __post_init__(self) -> None:
        losses.check(self.loss)


def layers(options: Options, config: Spec) -> tuple[int, ...]:
    """Return the numbers of the residual streams of the target that are read; k = the stream after the first k layers.

    Raises BadOption for k = 0, which the drafter's files cannot express.
    """
    num = config.num_layers
    if options.layers is None:
        return tuple(dict.fromkeys((max(1, num // 2), max(1, num - 1), num)))
    numbers = tuple(int(part) if part.isdigit() else -1 for part in parse_list(options.layers))
    if 0 in numbers:
        raise BadOption("dflash:layers=0 is not possible: its files count layers by their outputs, so 1 is the first")
    return numbers


class Head:
    """The drafter's layers in float32, with gradients."""

    def __init__(self, options: Options, teacher: Teacher, seed: int) -> None:
        target = teacher.config
        self.options, self._teacher = options, teacher
        self._vocab = Vocabulary(teacher, options.draft_vocab)
        self.ids = self._vocab.ids
        decoder = own_blocks(target, options.depth)
        mask_id = int(teacher.counts.argsort(descending=True, stable=True)[-1])  # the rarest id
        self.config = DFlashConfig(decoder, layers(options, target), options.block, mask_id, len(self.ids))
        self.weights = _first_weights(self.config, teacher)
        self._blocks = [TrainedBlock(decoder, self.weights, f"layers.{i}.", i) for i in range(options.depth)]
        self._norm = decoder.final_norm or Norm()

    def begin(self, batches: Iterable[Batch]) -> None:
        """Do nothing, because no first weights are fitted."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch. The anchors depend only on the batch, so a resumed run has the same anchors."""
        start = int(batch.ids.sum()) % self.options.every
        return decayed(self._places(batch, self._anchors(batch, start)), self.options.decay, self.options.loss)

    def measure(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Return agreement, overlap and loss (`Rows.numbers`) by position, summed over all possible anchors."""
        sums: dict[str, tuple[float, float]] = {}
        for start in range(self.options.every):
            anchors = self._anchors(batch, start)
            reached = torch.ones_like(batch.is_written[:, anchors])
            for k, (learned, logits, target) in enumerate(self._places(batch, anchors)):
                best, mass = (shifted(rows, k)[:, anchors] for rows in (batch.best, batch.mass))
                rows = Rows(batch.ahead(k + 1)[:, anchors], learned, self.ids, best, mass)
                for name, (total, count) in rows.numbers(f"_{k + 1}", logits, target, reached).items():
                    had = sums.get(name, (0.0, 0.0))
                    sums[name] = had[0] + total, had[1] + count
                reached = reached & rows.agreement(logits)
        return sums

    def files(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the config.json that the drafter reads."""
        weights = {name: weight.detach().bfloat16() for name, weight in self.weights.items()}
        return weights | {"d2t": self._vocab.offsets()}, self.config.to_json(self._teacher.config.num_layers)

    def go_on_as(self, config: Mapping[str, Any]) -> None:
        """Take over the id of the mask token from an earlier head, because its layers were trained with this id.

        config: the config.json of the earlier head.
        """
        self.config = dataclasses.replace(self.config, mask_id=int(config["dflash_config"]["mask_token_id"]))

    def _anchors(self, batch: Batch, start: int) -> Tensor:
        """Return the indices of the anchors in a row of the batch, [A]: every n-th token (`every`) from 1 + `start` on.

        Index 0 cannot be an anchor, because an anchor needs the features of an earlier token.
        """
        return torch.arange(1 + start, batch.ids.shape[1], self.options.every)

    def _places(self, batch: Batch, anchors: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each distance from the anchors the learned anchors, their logits, and the target's logits.

        The distances are 1 to block - 1. The learned anchors are [S, A] bool. The logits are [R, n], for R learned
        anchors and n drafted ids.
        """
        x = torch.unflatten(self._streams(batch, anchors), 1, (len(anchors), self.options.block))
        x = self._normed(x, "norm")
        for k in range(self.options.block - 1):
            learned = batch.ahead(k + 1)[:, anchors] & self._vocab.has(shifted(batch.best, k))[:, anchors]
            logits = self._vocab.logits(x[:, :, k + 1][learned])
            with torch.no_grad():
                target = self._vocab.logits(shifted(batch.hidden, k)[:, anchors][learned])
            yield learned, logits, target

    def _streams(self, batch: Batch, anchors: Tensor) -> Tensor:
        """Return the residual stream after the drafter's last layer, [S, A * block, H], for the tokens of all blocks.

        anchors [A]: the indices of the anchors in a row of the batch. Each anchor begins a block of `block` tokens.
        """
        block = self.options.block
        context = self._context(batch)
        at = batch.at[:, anchors].unsqueeze(-1) + torch.arange(block)
        ids = torch.full((*at.shape[:2], block), self.config.mask_id)
        ids[:, :, 0] = batch.ids[:, anchors]
        x = F.embedding(ids.flatten(1), self._teacher.embeddings)
        mask = _visible(batch, anchors).repeat_interleave(block, dim=1).unsqueeze(1)
        places = at.flatten(1)
        for layer in self._blocks:
            y = layer.read(x)
            far, near = layer.keys_values(context, batch.at), layer.keys_values(y, places)
            x = layer.behind(x, y, _attend(layer.queries(y, places), far, near, mask, block, layer.scale))
        return x

    def _context(self, batch: Batch) -> Tensor:
        """Return the rows from which each layer computes the keys and values of the context, [S, L, H]."""
        rows = batch.layers.float().clamp(-head_files.LARGEST, head_files.LARGEST).flatten(2)
        return self._normed(F.linear(rows, self.weights["fc.weight"]), "hidden_norm")

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return norm_of(x, self.weights[f"{name}.weight"], self._norm.eps, self._norm.offset)


def _first_weights(config: DFlashConfig, teacher: Teacher) -> dict[str, Tensor]:
    """Return the first weights: each layer is a copy of the target's last layer with attention.

    The first context is the input of this layer of the target. If this input is not among the residual streams that
    are read, the first context is the last of these streams.
    """
    width = config.decoder.hidden_size
    num = len(config.layers)
    at = "layers.0."
    wanted = last_attending(teacher.config)
    place = config.layers.index(wanted) if wanted in config.layers else num - 1
    fc = torch.zeros(width, num, width)
    fc[:, place] = torch.eye(width)
    weights = {"fc.weight": fc.flatten(1), "norm.weight": teacher.last["model.norm.weight"].clone()}
    weights["hidden_norm.weight"] = teacher.last[f"model.{at}input_layernorm.weight"].clone()
    for name in shapes(config):
        if name.startswith("layers."):
            weights[name] = teacher.last["model.layers.0." + name.split(".", 2)[2]].clone()
    return weights


def _visible(batch: Batch, anchors: Tensor) -> Tensor:
    """Return the mask of the context for each anchor's block, [S, A, L] bool: earlier tokens of the anchor's text."""
    before = torch.arange(batch.ids.shape[1]) < anchors.unsqueeze(1)
    return (batch.text[:, anchors].unsqueeze(2) == batch.text.unsqueeze(1)) & before


def _attend(
    q: Tensor, context: tuple[Tensor, Tensor], block_kv: tuple[Tensor, Tensor], mask: Tensor, block: int, scale: float
) -> Tensor:
    """Return the attention of queries q to the context, under the mask, and to all rows of their own block.

    q [S, heads, A * block, D]. context: keys and values [S, heads, L, D]. block_kv: keys and values of the blocks, in
    the shape of q. mask [S, 1, A * block, L]. The result has the shape of q.
    """
    length = context[0].shape[2]
    far = (q @ context[0].transpose(-1, -2)).float().masked_fill(~mask, -torch.inf)
    blocks, keys, values = (torch.unflatten(rows, 2, (-1, block)) for rows in (q, *block_kv))
    near = (blocks @ keys.transpose(-1, -2)).float().flatten(2, 3)
    weights = (torch.cat((far, near), -1) * scale).softmax(-1).to(q.dtype)
    around: Tensor = torch.unflatten(weights[..., length:], 2, (-1, block)) @ values
    attended: Tensor = weights[..., :length] @ context[1] + around.flatten(2, 3)
    return attended
