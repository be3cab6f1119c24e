"""Blockwise parallel decoding: one feed-forward layer guesses k tokens ahead (Stern et al. 2018, arXiv 1811.03115).

Behind the target's last layer stands one feed-forward layer with k outputs, each added to its input and given to the
target's LM head (section 6 of the paper). Output i guesses the token i places behind the next one. The pass that
verifies one block gives the hidden state that the next block is guessed from. In the paper the block is what is
decoded, and the base model is trained along; here it is a draft for a target that stays as it is, so that any rule may
judge it. `forerun train head --method blockwise` makes the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.drafters import Drafter, Known, Needs, Target, artifacts, head_files
from forerun.drafters.head_matrices import Product
from forerun.drafters.medusa import Following, MedusaDrafter, finite, likeliest, linear
from forerun.models.configs import size
from forerun.types import Model


@dataclass(frozen=True)
class Options:
    """Which layer."""

    path: str | None = field(default=None, metadata={"help": head_files.path_help("blockwise")})


class FeedForward:
    """One hidden layer that all outputs share, and the LM head behind them. ids [n]: those that are drafted."""

    def __init__(self, weights: Mapping[str, Tensor], num_heads: int, ids: Tensor, target: Model) -> None:
        self.num_heads, self._ids, self._dtype = num_heads, ids, target.activation_dtype
        self._hidden, self._output = (linear(weights, f"{name}.", target) for name in ("hidden", "output"))
        self._head = Product.of(target, [target.head(ids.tolist())])

    def following(self, hidden: Tensor, last: Seq[int], num_heads: int, num: int) -> Following:
        """See medusa.TreeHeads: all outputs at once, for none looks at a path."""
        x = finite(hidden, self._dtype)
        added = self._output(self._hidden.ops.activated("relu", self._hidden(x)))
        outputs = x.unsqueeze(1) + torch.unflatten(added, -1, (self.num_heads, x.shape[-1]))
        logits = self._head(outputs[:, :num_heads].flatten(0, 1))
        found = torch.unflatten(likeliest(logits, self._ids, num), 0, (len(x), num_heads)).tolist()
        return lambda depth, nodes: [found[row][depth] for row, _ in nodes]


def needs(options: Options, target: Known) -> Needs:
    """Return what the layer's weights take. Refuses a folder without such a layer, or that of another tokenizer."""
    path = head_files.located(options.path, "blockwise")
    head_files.read_config(path, "blockwise", target.fingerprint)
    return Needs(weights=head_files.own_weights(path, target, all_rows=True))


def build(options: Options, target: Target) -> Drafter:
    """Read the layer. Raises what head_files.py raises."""
    path = head_files.located(options.path, "blockwise")
    config = head_files.read_config(path, "blockwise", artifacts.fingerprint(target.tokenizer, target.num_ids))
    num_heads, inner = size(config, "num_heads"), size(config, "intermediate_size")
    wanted: dict[str, tuple[int, ...]] = {"d2t": (size(config, "draft_vocab_size"),)}
    wanted |= head_files.feed_forward_shapes(num_heads, inner, target.model.config.hidden_size)
    weights = head_files.read_weights(path, wanted, target.model, target.num_ids)
    ids = head_files.draft_ids(path, weights.pop("d2t"), target.num_ids)
    layer = FeedForward(weights, num_heads, ids, target.model)
    return MedusaDrafter(layer, "x".join(["1"] * num_heads))
