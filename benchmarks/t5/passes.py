"""Passes of an encoder-decoder that is trained: operators for padded batches, which are differentiable."""

import torch
from torch import Tensor

from forerun.ops.reference import PLAIN, Plan, ReferenceOps, Scoring
from forerun.ops.torch import TorchModel
from forerun.ops.torch_pools import TorchPool
from forerun.types import CacheView, RaggedBatch


class PairOps(ReferenceOps):
    """Operators of an encoder-decoder for S sources and S texts of one length each, which may be padded at their ends.

    `begin` says which places of the sources are filled. memory: keys and values of the sources [S * L, heads, D], for
    each block that reads them, in order; `run_pairs` puts them there between the passes of encoder and decoder.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[tuple[Tensor, Tensor]] = []
        self._filled = torch.empty(0)
        self._biases: dict[int, Tensor] = {}

    def begin(self, filled: Tensor) -> None:
        """Prepare for a pass over sources. filled [S, L]: True where there is a token."""
        self.memory, self._biases = [], {}
        self._filled = torch.zeros(filled.shape, device=filled.device).masked_fill(~filled, -torch.inf)[:, None, None]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `ReferenceOps`. With autocast rows are rounded here, once, and not by each product that reads them."""
        found, kind = super().rms_norm(x, weight, eps), x.device.type
        return found.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else found

    def plan(self, view: CacheView, device: torch.device | str = "cpu") -> Plan:
        """Return a view that nothing is asked of."""
        return Plan(view.batch, view.write_rows, view.read_rows)

    def attention(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        pool: TorchPool | None,
        view: CacheView | None,
        window: int | None,
        scoring: Scoring = PLAIN,
    ) -> Tensor:
        """q [S * rows, heads, D]; k and v of the same rows, or None where a block reads the sources."""
        if k is None or v is None:
            k, v = self.memory.pop(0)
        num_heads, num_rows = q.shape[1], len(self._filled)
        q, k, v = (torch.unflatten(x, 0, (num_rows, -1)).transpose(1, 2) for x in (q, k, v))
        mask = self._mask(q.shape[2], k.shape[2], scoring)
        scores = q @ k.transpose(-1, -2)
        if scoring.scale != 1:
            scores = scores * (q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale)
        out = (scores + mask).softmax(-1).to(v.dtype) @ v  # the sum is in float32, which the mask is
        return out.transpose(1, 2).reshape(-1, num_heads, out.shape[-1])

    def _mask(self, num_rows: int, num_keys: int, scoring: Scoring) -> Tensor:
        """What is added to scores [S or 1, heads or 1, rows, keys]; made once for all blocks that share it."""
        if scoring.sees_all and scoring.table is None:
            return self._filled
        key = id(scoring.table)
        if key not in self._biases:
            at = torch.arange(num_keys, device=self._filled.device)
            bias = scoring.bias(at[:, None] - at)
            if bias is None or num_rows != num_keys:
                raise NotImplementedError("training knows encoder-decoders whose scores have a bias by distance alone")
            hidden = torch.full((num_rows, num_keys), -torch.inf, device=at.device).triu(1)
            self._biases[key] = bias[None] + (self._filled if scoring.sees_all else hidden)
        return self._biases[key]


def run_pairs(model: TorchModel, ops: PairOps, sources: Tensor, filled: Tensor, texts: Tensor) -> Tensor:
    """Run sources [S, L] and what the decoder reads of their texts [S, M] -> rows behind the final norm [S * M, H].

    filled [S, L]: where sources have a token. ops: those that the model was made with.
    """
    assert model.encoder is not None
    ops.begin(filled)
    rows = model.encoder.forward(_as_one_run(sources), None).hidden
    read = [block.attention for block in model.blocks if block.attention is not None]
    ops.memory = [attention.of_source(ops, rows) for attention in read if attention.spec.sees == "encoder"]
    hidden: Tensor = model.forward(_as_one_run(texts), None).hidden
    return hidden


def _as_one_run(ids: Tensor) -> RaggedBatch:
    """Ids [S, L] as a batch for operators that know S and L."""
    positions = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids))
    return RaggedBatch(ids.flatten(), positions, [0, ids.numel()], [0], [0])
