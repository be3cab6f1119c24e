"""Blockwise parallel decoding: one feed-forward layer guesses k tokens ahead (Stern et al. 2018, arXiv 1811.03115).

One feed-forward layer with k outputs reads the target's last hidden state. Each output is added to this hidden state,
and the sum goes to the target's LM head (section 6 of the paper). Output i, counted from 1, guesses the token i places
after the next token. The pass that verifies one block also gives the hidden state for guessing the next block.

In the paper, the layer and the base model are trained together as one model, and a guess is accepted if this model
would choose it greedily. Here the target stays unchanged, and the k guesses are a draft that any verification rule may
judge.
`forerun train head --method blockwise` trains the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

from forerun.drafters import Drafter, Known, Needs, Target
from forerun.drafters.medusa import Following, MedusaDrafter
from forerun.drafters.shared import artifacts, head_files
from forerun.drafters.shared.head_matrices import Weight, dense_of
from forerun.host_tensor import HostTensor
from forerun.models.configs import size
from forerun.ops.model import Model
from forerun.registry import option
from forerun.sampling.largest import Ids


@dataclass(frozen=True)
class Options:
    """The options: the folder of the trained layer."""

    path: str | None = option(None, head_files.path_help("blockwise"))


class FeedForward:
    """The trained layer, whose outputs share one hidden layer, and the LM head. ids [n]: the ids that are drafted."""

    def __init__(self, weights: Mapping[str, Weight], num_heads: int, ids: Ids, target: Model) -> None:
        self.num_heads, self._ids, self._rows = num_heads, ids, target.rows
        multiplier = partial(target.ops.multiplier, target)
        self._hidden, self._output = (
            multiplier(dense_of(weights[f"{name}.weight"]), dense_of(weights[f"{name}.bias"]))
            for name in ("hidden", "output")
        )
        self._head = multiplier(HostTensor.of(target.head(ids.tolist())))

    def following(self, hidden: Any, last: Seq[int], num_heads: int, num: int) -> Following:
        """Return a function that gives the guesses after a path of drafted tokens (see medusa.TreeHeads).

        All guesses are computed at once, because no guess depends on the tokens of a path.
        """
        x = hidden.clip(-head_files.LARGEST, head_files.LARGEST)
        added = self._output(self._hidden(x).clip(min=0)).reshape(len(x), self.num_heads, -1)
        outputs = x[:, None] + added[:, :num_heads]
        logits = self._head(outputs.reshape(-1, outputs.shape[-1]))
        guesses = self._ids[self._rows.top(logits, num)].reshape(len(x), num_heads, -1).tolist()
        return lambda depth, nodes: [guesses[row][depth] for row, _ in nodes]


def needs(options: Options, target: Known) -> Needs:
    """Return the memory needs of the layer's weights.

    Raises the errors of `build` for a folder without such a layer, or with a layer for another tokenizer.
    """
    path = head_files.located(options.path, "blockwise")
    head_files.read_config(path, "blockwise", target.fingerprint)
    return Needs(weights=head_files.own_weights(path, target, all_rows=True))


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter from the layer's folder. Raises the errors of shared/head_files.py."""
    path = head_files.located(options.path, "blockwise")
    config = head_files.read_config(path, "blockwise", artifacts.fingerprint(target.tokenizer, target.num_ids))
    num_heads, inner = size(config, "num_heads"), size(config, "intermediate_size")
    wanted: dict[str, tuple[int, ...]] = {"d2t": (size(config, "draft_vocab_size"),)}
    wanted |= head_files.feed_forward_shapes(num_heads, inner, target.model.config.hidden_size)
    weights = head_files.read_weights(path, wanted, target.model, target.num_ids)
    ids = head_files.draft_ids(path, weights.pop("d2t"), target.num_ids)
    layer = FeedForward(weights, num_heads, ids, target.model)
    return MedusaDrafter(layer, "x".join(["1"] * num_heads), target.model.rows)
