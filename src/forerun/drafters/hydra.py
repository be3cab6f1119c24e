"""Hydra: Medusa's heads, which also read the tokens drafted before their own (Ankner et al. 2024, arXiv 2402.05109).

Head k (counted from 0) reads the hidden state of the last token that the target has run, the embedding of the next
token, and the embeddings of the k drafted tokens on the path. So a guess fits its path, while a Medusa head guesses for
the average of all paths. The draft is a tree of point masses, as in Medusa. It grows depth by depth, and the nodes of
one depth are one batch. `forerun train head --method hydra` trains heads. Their LM head consists of the target's LM
head rows for the ids that the target emits most often. Published heads include their own LM heads. Heads with the
prefix layer of Hydra++ are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from forerun.blocks import HEAD, Features
from forerun.drafters import Drafter, Known, Needs, Target
from forerun.drafters.medusa import Following, MedusaDrafter, widths
from forerun.drafters.shared import artifacts, head_files
from forerun.drafters.shared.residual_heads import ResidualHead
from forerun.errors import UnsupportedModel, shown
from forerun.host_tensor import HostTensor
from forerun.models.configs import size
from forerun.ops.model import Model
from forerun.registry import option
from forerun.sampling.largest import Ids

FIRST = ("linear", "res_connection")  # the layers of the first block; their input is wider than their output


@dataclass(frozen=True)
class Options:
    """The options: the folder of the heads, and the shape of the draft."""

    path: str | None = option(None, head_files.path_help("hydra"))
    shape: str = option("3x2x1x1", "children of a node by depth, as in 3x2x1; 1x1x1 = a chain")

    def __post_init__(self) -> None:
        widths(self.shape, "hydra")


def shapes(num_heads: int, num_blocks: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in the blocks of all heads, by their published names."""
    by_name: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        layers = {f"0.{name}": (head + 2) * width for name in FIRST}
        layers |= {f"{block}.linear": width for block in range(1, num_blocks)}
        for name, num_in in layers.items():
            at = f"hydra_mlp.{head}.{name}."
            by_name |= {f"{at}weight": (width, num_in), f"{at}bias": (width,)}
    return by_name


class HydraHeads:
    """The Hydra heads of one target.

    ids [n]: the ids that the heads draft, ascending. weights: the tensors by their published names. If `weights` has no
    LM heads, all heads use the target's LM head rows for `ids`.
    """

    def __init__(
        self, weights: Mapping[str, HostTensor], num_heads: int, num_blocks: int, ids: Ids, target: Model
    ) -> None:
        self.num_heads, self._target, self._ids = num_heads, target, ids
        has_own = "hydra_lm_head.0.weight" in weights
        sizes = (target.config.vocab_size, target.config.hidden_size)
        self._heads = list[ResidualHead]()
        for head in range(num_heads):
            at = f"hydra_mlp.{head}."
            names = {"fc_act": f"{at}0.linear", "fc": f"{at}0.res_connection"}
            names |= {str(block - 1): f"{at}{block}.linear" for block in range(1, num_blocks)}
            parts = {f"{ours}.{end}": weights[f"{n}.{end}"] for ours, n in names.items() for end in ("weight", "bias")}
            if has_own:
                parts |= {f"lm_head.{end}": weights[f"hydra_lm_head.{head}.{end}"][ids] for end in ("weight", "bias")}
            elif head == 0:
                parts[HEAD] = HostTensor.of(target.head(ids.tolist()))
            features = Features(*sizes, num=head + 2, joined=True, bias=True, act="silu", input="features")
            first = self._heads[0] if head and not has_own else None
            self._heads.append(ResidualHead.of(target, features, parts, len(ids), first))

    def following(self, hidden: Any, last: Seq[int], num_heads: int, num: int) -> Following:
        """Return a function that guesses the children of all nodes of one depth at once (see medusa.TreeHeads)."""

        def at(depth: int, nodes: Seq[tuple[int, Seq[int]]]) -> list[list[int]]:
            paths = [(last[row], *path) for row, path in nodes]
            embedded = [self._target.embed(tokens) for tokens in zip(*paths, strict=True)]
            head = self._heads[depth]
            rows = self._target.rows
            logits = head.logits(head.rows([rows.take(hidden, [row for row, _ in nodes]), *embedded]))
            guesses: list[list[int]] = self._ids[rows.top(logits, num)].tolist()
            return guesses

        return at


def _read_config(path: str, tokenizer: str | None) -> dict[str, Any]:
    published = head_files.published_config(path, "hydra_num_heads")
    if published is None:
        return head_files.read_config(path, "hydra", tokenizer)
    for key, wanted in {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}.items():
        if (value := published.get(key, wanted)) != wanted:
            raise UnsupportedModel(
                f"{shown(path)} has {key}={shown(str(value))}, and forerun computes {key}={wanted} alone: "
                "train heads for this target with `forerun train head --method hydra`"
            )
    return published


def needs(options: Options, target: Known) -> Needs:
    """Return the memory needs of the heads' weights. Raises the errors of `build` if there are no fitting heads."""
    path = head_files.located(options.path, "hydra")
    _read_config(path, target.fingerprint)
    return Needs(weights=head_files.own_weights(path, target, all_rows=True))


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter. Raises the errors of shared/head_files.py, and UnsupportedModel for other kinds of heads."""
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
    ids = head_files.draft_ids(path, weights.pop("d2t", None), target.num_ids)
    return MedusaDrafter(HydraHeads(weights, num_heads, num_blocks, ids, model), options.shape, model.rows)
