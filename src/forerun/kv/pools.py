"""The memory of a KV cache: keys and values per layer, one row for each token that fits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import CapacityError


@dataclass(frozen=True)
class CacheShape:
    """What one token costs: num_layers x 2 x num_kv_heads x head_dim numbers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def make_pools(
    shape: CacheShape, num_rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values per layer, not zeroed: untouched pages cost no memory on a CPU, and no row is read unwritten.

    Raises CapacityError where there is no memory for them.
    """
    pool = (num_rows, shape.num_kv_heads, shape.head_dim)
    try:
        keys = [torch.empty(pool, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        return keys, [torch.empty(pool, dtype=dtype, device=device) for _ in range(shape.num_layers)]
    except RuntimeError as error:  # torch's OutOfMemoryError is one, and a CPU's refusal is a plain one
        num_gb = num_rows * shape.bytes_per_token(dtype) / 1e9
        raise CapacityError(
            f"there is no memory for a KV cache of {num_gb:.1f} GB on {device}: lower max_batch_size, max_seq_len "
            "or kv_cache_tokens; forerun plan says what fits"
        ) from error
