"""Heads of residual blocks, x + silu(W x + b), as specs that any backend runs. Each head guesses one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

from forerun.blocks import HEAD, Block, Features, Mlp, Spec
from forerun.drafters.shared.eagle_model import HeadModel
from forerun.drafters.shared.head_matrices import Weight, loadable
from forerun.ops import load_model
from forerun.ops.model import Model
from forerun.ops.passes import Lent
from forerun.types import RaggedBatch


@dataclass(frozen=True)
class ResidualHead:
    """One head of residual blocks, loaded as a model."""

    model: HeadModel

    @classmethod
    def of(
        cls,
        target: Model,
        features: Features,
        weights: Mapping[str, Weight],
        num_ids: int,
        beside: ResidualHead | None = None,
    ) -> ResidualHead:
        """Load a head. features: how the input of the first block is made. num_ids: how many ids the head drafts.

        weights: the weights of the features and of the LM head, by their names in a spec. The weights of block i are
        named "{i}.weight" and, if there is a bias, "{i}.bias". beside: a loaded head whose LM head is used if `weights`
        has no LM head.
        """
        width = target.config.hidden_size
        blocks = list[Block]()
        named = dict(weights)
        while f"{(i := len(blocks))}.weight" in weights:
            has_bias = f"{i}.bias" in weights
            for end in ("weight", "bias") if has_bias else ("weight",):
                named[f"model.layers.{i}.mlp.up_proj.{end}"] = named.pop(f"{i}.{end}")
            blocks.append(Block(mlp=Mlp(width, gated=False, bias=has_bias, down=False)))
        spec = Spec(
            "residual_head",
            num_ids,
            width,
            target.config.max_positions,
            tuple(blocks),
            final_norm=None,
            head=HEAD in named,
            head_bias="lm_head.bias" in named,
            features=features,
        )
        lent = None if beside is None else Lent(beside.model, [])
        loaded = load_model(spec, loadable(spec, named, target, None), target.ops, device=target.device, lent=lent)
        return cls(cast(HeadModel, loaded))

    def rows(self, read: Seq[Any]) -> Any:
        """Return the input rows of the LM head, [n, H]. read: the arrays [n, H] from which the features are made."""
        features = self.model.features(read)
        num = len(features)
        batch = RaggedBatch([0] * num, list(range(num)), [0, num], [0], [0])
        return self.model.forward(batch, None, None, features).hidden

    def logits(self, rows: Any) -> Any:
        """Return the logits of the head's ids, [n, ids]. rows [n, H]: inputs of the LM head."""
        return self.model.logits(rows)
