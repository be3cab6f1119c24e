"""Operators for training: they are differentiable and run whole sequences of one length without a cache."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from forerun.ops.reference import ReferenceOps
from forerun.types import CacheView


class TrainingOps(ReferenceOps):
    """The reference operators with attention over rows that are consecutive sequences of `seq_len_tokens` each.

    So training runs the same forward pass of the decoder as serving; only the source of keys and values differs.
    Sliding windows are refused, because no trainable shape has one.
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
        """Attend causally within each sequence: q [S * seq_len, heads, D], k and v [S * seq_len, kv_heads, D]."""
        if window is not None or view is not None:
            raise NotImplementedError("training attends over whole sequences, without a cache and without a window")
        num_heads, num_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        q, k, v = (x.view(-1, self.seq_len_tokens, x.shape[1], head_dim).transpose(1, 2) for x in (q, k, v))
        # Repeated heads cost little, and every SDPA kernel can differentiate them; not all support enable_gqa.
        k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(-1, num_heads, head_dim)
