"""Blockwise parallel decoding: one feed-forward layer guesses k tokens ahead (Stern et al. 2018, arXiv 1811.03115).

Behind the target's last layer stands one feed-forward layer with k outputs, each added to its input and given to the
target's LM head (section 6 of the paper). Output i guesses the token i places behind the next one. The pass that
verifies one block gives the hidden state that the next block is guessed from. In the paper the block is what is
decoded, and the base model is trained along; here it is a draft for a target that stays as it is, so that any rule may
judge it. `forerun train head --method blockwise` makes the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forerun.drafters import Drafter, Target, artifacts, head_files
from forerun.drafters.medusa import Guesser, MedusaDrafter, linear_of
from forerun.models.configs import size
from forerun.models.runner import Model


@dataclass(frozen=True)
class Options:
    """Which layer."""

    path: str | None = field(
        default=None, metadata={"help": "folder that `forerun train head --method blockwise` made"}
    )


class FeedForward:
    """One hidden layer that all outputs share."""

    def __init__(self, weights: Mapping[str, Tensor], num_heads: int, target: Model) -> None:
        self.num_heads, self._ops, self._width = num_heads, target.ops, target.config.hidden_size
        self._in, self._out = (linear_of(weights, f"{name}.", target) for name in ("hidden", "output"))

    def outputs(self, hidden: Tensor, num_heads: int) -> list[Tensor]:
        """See medusa.Heads."""
        inner = torch.nn.functional.relu(self._ops.linear(hidden, *self._in))
        added = torch.unflatten(self._ops.linear(inner, *self._out), -1, (self.num_heads, self._width))
        return list((hidden.unsqueeze(1) + added)[:, :num_heads].unbind(1))


def check(options: Options, tokenizer: Any, ignore_config_keys: frozenset[str]) -> None:
    """Refuse a folder that has no such layer, or that of another tokenizer, before any weight is read."""
    head_files.config_of(options.path, "blockwise", artifacts.fingerprint(tokenizer, tokenizer.num_ids))


def build(options: Options, target: Target) -> Drafter:
    """Read the layer. Raises what head_files.py raises."""
    config = head_files.config_of(options.path, "blockwise", artifacts.fingerprint(target.tokenizer, target.num_ids))
    assert options.path is not None
    num_heads, inner = size(config, "num_heads"), size(config, "intermediate_size")
    wanted: dict[str, tuple[int, ...]] = {"d2t": (size(config, "draft_vocab_size"),)}
    wanted |= head_files.feed_forward_shapes(num_heads, inner, target.model.config.hidden_size)
    weights = head_files.read_weights(options.path, wanted, target.model, target.num_ids)
    ids = head_files.draft_ids(options.path, weights.pop("d2t"), target.num_ids)
    layer = FeedForward(weights, num_heads, target.model)
    return MedusaDrafter(Guesser(layer, ids, target.model), [1] * num_heads)
