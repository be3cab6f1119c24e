"""Hydra (Ankner et al. 2024, arXiv 2402.05109), trained as in medusa.py; the drafter is drafters/hydra.py.

Head k (from 0) reads the target's last hidden state of token m and the embeddings of tokens m+1 to m+k+1, and learns
the target's distribution of token m+k+2. In training, tokens m+1 to m+k+1 come from the text. In drafting, token m+1 is
committed and the other tokens are drafted.

The first block of a head is linear(x) + silu(linear(x)), where x joins the hidden state and the embeddings. It returns
one hidden state, which before the first step equals the target's hidden state. The later blocks are as in medusa.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.train.heads import Batch, medusa, shifted

LR = 1e-3
layers = medusa.layers


@dataclass(frozen=True)
class Options(medusa.Options):
    """The options of the method: the number and size of the heads, and the settings of their training."""


class Head(medusa.Head):
    """All heads in float32, with gradients. Before the first step, each head computes the logits of the LM head."""

    def first_weights(self, width: int) -> dict[str, Tensor]:
        """Return the initial weights of all heads, by their names in the file. width: the hidden size.

        The input of block 0 of head k joins k + 2 vectors: a hidden state and k + 1 embeddings. All weights are 0,
        except that block 0 passes the hidden state through unchanged.
        """
        weights: dict[str, Tensor] = {}
        for head in range(self.options.heads):
            layers = {f"0.{name}": head + 2 for name in ("linear", "res_connection")}
            layers |= {f"{block}.linear": 1 for block in range(1, self.options.blocks)}
            for name, num_rows in layers.items():
                at = f"hydra_mlp.{head}.{name}."
                weights |= {f"{at}weight": torch.zeros(width, num_rows * width), f"{at}bias": torch.zeros(width)}
            weights[f"hydra_mlp.{head}.0.res_connection.weight"][:, :width] = torch.eye(width)
        return weights

    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the heads for config.json."""
        numbers = {"hydra_num_heads": self.options.heads, "hydra_num_layers": self.options.blocks}
        return {**numbers, "hydra_head_arch": "mlp", "grounded_heads": True}

    def rows(self, head: int, batch: Batch, learned: Tensor) -> Tensor:
        """Return the output of the blocks of head `head` for the learned rows, [R, H].

        The blocks read the row's hidden state and the embeddings of the next `head + 1` tokens.
        """
        tokens = [shifted(batch.ids, j)[learned] for j in range(1, head + 2)]
        embedded = [F.embedding(ids, self._teacher.embeddings) for ids in tokens]
        x = torch.cat((batch.hidden[learned].float(), *embedded), -1)
        at = f"hydra_mlp.{head}."
        first = self._linear(f"{at}0.res_connection", x) + F.silu(self._linear(f"{at}0.linear", x))
        return self._through([f"{at}{block}.linear" for block in range(1, self.options.blocks)], first)
