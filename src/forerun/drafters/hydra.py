"""Hydra: Medusa's heads, which also read the tokens drafted before their own (Ankner et al. 2024, arXiv 2402.05109).

Head k (from 0) reads the hidden state of the last token that the target has run, and the embeddings of the token behind
it and of the k tokens of the path: so what it guesses fits its path, where a head of Medusa guesses for the average of
what may stand there. The draft is Medusa's tree of point masses, which grows depth by depth: the nodes of a depth are
one batch. `forerun train head --method hydra` makes heads; the rows of their LM head are the target's, of the ids that
it writes most often. Published heads have LM heads of their own. The prefix layer of Hydra++ is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forerun.drafters import Drafter, Known, Needs, Target, artifacts, head_files
from forerun.drafters.head_matrices import Product
from forerun.drafters.medusa import Following, MedusaDrafter, finite, likeliest, linear, through, widths
from forerun.errors import UnsupportedModel, shown
from forerun.models.configs import size
from forerun.types import Model

FIRST = ("linear", "res_connection")  # of the first block, whose input is wider than its output


@dataclass(frozen=True)
class Options:
    """Which heads, and the shape of the draft."""

    path: str | None = field(default=None, metadata={"help": head_files.path_help("hydra")})
    shape: str = field(
        default="3x2x1x1", metadata={"help": "children of a node by depth, as in 3x2x1; 1x1x1 = a chain"}
    )

    def __post_init__(self) -> None:
        widths(self.shape, "hydra")


def shapes(num_heads: int, num_blocks: int, width: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the blocks of all heads, under the published names."""
    found: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        layers = {f"0.{name}": (head + 2) * width for name in FIRST}
        layers |= {f"{block}.linear": width for block in range(1, num_blocks)}
        for name, num_in in layers.items():
            at = f"hydra_mlp.{head}.{name}."
            found |= {f"{at}weight": (width, num_in), f"{at}bias": (width,)}
    return found


class HydraHeads:
    """The heads of one target. ids [n]: those that are drafted, ascending. weights: with LM heads, or without."""

    def __init__(
        self, weights: Mapping[str, Tensor], num_heads: int, num_blocks: int, ids: Tensor, target: Model
    ) -> None:
        self.num_heads, self._dtype, self._target, self._ids = num_heads, target.activation_dtype, target, ids
        self._first = [
            [linear(weights, f"hydra_mlp.{head}.0.{name}.", target) for name in FIRST] for head in range(num_heads)
        ]
        self._blocks = [
            [linear(weights, f"hydra_mlp.{head}.{block}.linear.", target) for block in range(1, num_blocks)]
            for head in range(num_heads)
        ]
        if "hydra_lm_head.0.weight" in weights:
            self._heads = [
                Product.of(target, [weights[f"{at}weight"][ids]], weights[f"{at}bias"][ids])
                for at in (f"hydra_lm_head.{head}." for head in range(num_heads))
            ]
        else:
            self._heads = [Product.of(target, [target.head(ids.tolist())])] * num_heads

    def following(self, hidden: Tensor, last: Seq[int], num_heads: int, num: int) -> Following:
        """See TreeHeads: the nodes of one depth at once."""
        rows = finite(hidden, self._dtype)

        def at(depth: int, nodes: Seq[tuple[int, Seq[int]]]) -> list[list[int]]:
            read = [token for row, path in nodes for token in (last[row], *path)]
            embedded = self._target.embed(read).to(self._dtype).view(len(nodes), -1)
            x = torch.cat((rows[[row for row, _ in nodes]], embedded), -1)
            found: list[list[int]] = likeliest(self._logits(depth, x), self._ids, num).tolist()
            return found

        return at

    def _logits(self, head: int, x: Tensor) -> Tensor:
        """x [R, (head + 2) H] -> logits of its ids [R, n]."""
        inner, around = self._first[head]
        return self._heads[head](through(self._blocks[head], around(x) + inner.ops.activated("silu", inner(x))))


def _read_config(path: str, tokenizer: str | None) -> dict[str, Any]:
    published = head_files.published_config(path, "hydra_num_heads")
    if published is None:
        return head_files.read_config(path, "hydra", tokenizer)
    for key, wanted in {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}.items():
        if (found := published.get(key, wanted)) != wanted:
            raise UnsupportedModel(
                f"{shown(path)} has {key}={shown(str(found))}, and forerun computes {key}={wanted} alone: "
                "train heads for this target with `forerun train head --method hydra`"
            )
    return published


def needs(options: Options, target: Known) -> Needs:
    """Return what the heads' weights take. Refuses a folder without heads, or with those of another tokenizer."""
    path = head_files.located(options.path, "hydra")
    _read_config(path, target.fingerprint)
    return Needs(weights=head_files.own_weights(path, target, all_rows=True))


def build(options: Options, target: Target) -> Drafter:
    """Read the heads. Raises what head_files.py raises, and UnsupportedModel for other kinds of heads."""
    path = head_files.located(options.path, "hydra")
    config = _read_config(path, artifacts.fingerprint(target.tokenizer, target.num_ids))
    num_heads, num_blocks = size(config, "hydra_num_heads"), size({"hydra_num_layers": 1, **config}, "hydra_num_layers")
    model = target.model
    width, vocab_size = model.config.hidden_size, model.config.vocab_size
    wanted = shapes(num_heads, num_blocks, width)
    is_own = "draft_vocab_size" in config
    if is_own:
        wanted["d2t"] = (size(config, "draft_vocab_size"),)
    else:
        for head in range(num_heads):
            at = f"hydra_lm_head.{head}."
            wanted |= {f"{at}weight": (vocab_size, width), f"{at}bias": (vocab_size,)}
    weights = head_files.read_weights(path, wanted, model, target.num_ids)
    d2t = weights.pop("d2t") if is_own else torch.zeros(target.num_ids, dtype=torch.int64)
    ids = head_files.draft_ids(path, d2t, target.num_ids)
    return MedusaDrafter(HydraHeads(weights, num_heads, num_blocks, ids, model), options.shape)
