"""A block for multi-token prediction, as in published models (Gloeckle et al. 2024; DeepSeek-V3, section 2.2).

Row m reads the target's hidden state of token m, after the target's final norm, and the embedding of token m+1. The
target's LM head maps the block's output to logits, which learn the target's distribution of token m+2. Then the row
continues as in drafting: it reads the block's own output, after the block's norm, instead of the target's hidden state.
Steps, masks, loss and first fit are as in eagle.py. The block begins as the target's last block with attention.

The block is written twice: by itself, and into a copy of the target's folder, with the names of weights in published
files. The drafter finds the block in this copy without an option (models/next_tokens.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.blocks import EMBEDDING, SIDES, Spec, weight_shapes
from forerun.drafters.shared import head_files
from forerun.models import next_tokens
from forerun.models.families import names_of, published_names
from forerun.models.loading import Checkpoint
from forerun.models.naming import SAID
from forerun.models.opened import OpenedCheckpoint
from forerun.models.saving import config_to_dict
from forerun.ops.torch_tensors import HostWeights, tensor_of
from forerun.train.heads import Batch, Teacher, Vocabulary, last_attending
from forerun.train.heads.eagle import LR, Learning, SteppingHead, stepping_block

__all__ = ["LR", "Head", "Options", "layers", "remark"]


@dataclass(frozen=True, kw_only=True)
class Options(Learning):
    """The options of the method: the settings of the block's training.

    The block drafts all ids, but the loss is only over the `draft_vocab` ids that the target wrote most often.
    """


def layers(options: Options, config: Spec) -> tuple[int, ...]:
    """Return the number of the residual stream on which the block is fitted before the first step.

    It is the input of the target's last layer with attention.
    """
    return (max(0, last_attending(config)),)


def remark(checkpoint: Checkpoint) -> str | None:
    """Return a warning that the block cannot be added to a GGUF file; None for other targets."""
    if _has_folder(checkpoint.opened):
        return None
    return f"{checkpoint.name} is a GGUF file, to which nothing is added: name the block with mtp:path=OUT/head"


class Head(SteppingHead):
    """The block of the drafter mtp."""

    def __init__(self, options: Options, teacher: Teacher, seed: int) -> None:
        decoder = stepping_block(teacher.config)
        width = teacher.config.hidden_size
        self._config = config_to_dict(decoder) | {SAID: 1}
        self.decoder = replace(decoder, tied=False, head=False)
        weights = {f"{side}.weight": torch.ones(width) for side in SIDES}
        weights["input.weight"] = torch.eye(width).repeat(1, 2)
        for name in weight_shapes(self.decoder):  # in order, by which an optimiser's state is resumed
            if name != EMBEDDING:
                weights[name] = teacher.last[name].clone()
        super().__init__(teacher, decoder, Vocabulary(teacher, options.draft_vocab), weights, options, 0)

    def features(self, batch: Batch) -> Tensor:
        """Return the target's hidden states after its final norm, [S, L, H]."""
        return batch.hidden.float().clamp(-head_files.LARGEST, head_files.LARGEST)

    def fed(self, stream: Tensor) -> Tensor:
        """Return the features [1, n, H] that the block reads in the next drafting step: `stream` after the norm.

        stream [1, n, H]: the residual stream of n rows after the block's layer, before the block's norm.
        """
        return self.normed(stream)

    def files(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the config.json that the drafter reads."""
        return {
            name: tensor_of(weight) for name, weight in self._published(names_of(self.decoder)).items()
        }, self._config

    def read(self, folder: str) -> dict[str, Tensor]:
        """Read the weights of an earlier head from `folder`, and convert published names to the names of `weights`."""
        block = next_tokens.find(OpenedCheckpoint.of(folder))
        assert block is not None  # an earlier check has read its file
        weights = {
            name: torch.cat([tensor_of(rows).float() for rows in block.source.blocks(name)]) for name in self.weights
        }
        return {
            name: w + block.side_offset if name.removesuffix(".weight") in SIDES else w for name, w in weights.items()
        }

    def save_beside(self, out: Path, checkpoint: Checkpoint) -> None:
        """Write a copy of the target's folder, with the block added, to out/model. Does nothing for a GGUF target."""
        opened = checkpoint.opened
        if _has_folder(opened):
            assert opened.source is not None
            names = published_names(opened.source.config, opened.spec)
            next_tokens.save_with_block(out / "model", opened, self._published(names))

    def _published(self, names: Any) -> dict[str, Any]:
        weights = HostWeights({name: weight.detach().bfloat16() for name, weight in self.weights.items()})
        return next_tokens.published_block(self.decoder, weights, names)


def _has_folder(opened: OpenedCheckpoint) -> bool:
    """Return whether a target is a folder of safetensors. Only to such a folder can the block be added."""
    return opened.source is not None and opened.source.names is None
