"""Operators for training: whole sequences of one length, differentiable, no cache."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from forerun.ops.reference import ReferenceOps
from forerun.types import CacheView


class TrainingOps(ReferenceOps):
    """The reference operators with attention over rows that are consecutive sequences of `seq_len_tokens` each.

    The decoder's forward is then the one that serves; only where keys and values come from differs. Sliding windows
    are refused: no trainable shape has one.
    """

    def __init__(self, seq_len_tokens: int) -> None:
        super().__init__()
        self.seq_len_tokens = seq_len_tokens

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        keys: Tensor | None,
        values: Tensor | None,
        view: CacheView | None,
        window: int | None,
    ) -> Tensor:
        """Causal attention within each sequence: q [S * seq_len, heads, D], k and v [S * seq_len, kv_heads, D]."""
        if window is not None or view is not None:
            raise NotImplementedError("training attends over whole sequences, without a cache and without a window")
        num_heads, num_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        q, k, v = (x.view(-1, self.seq_len_tokens, x.shape[1], head_dim).transpose(1, 2) for x in (q, k, v))
        # Repeating costs little, and every SDPA kernel differentiates it; enable_gqa does not reach all of them.
        k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(-1, num_heads, head_dim)
