"""One decoder layer in float32 with gradients, for the heads that have such layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.blocks import Plain, Spec

Rotation = tuple[Tensor, Tensor]


class Layer:
    """weights: a head's, of which this layer's names begin with `at`. Rows are [S, L, H]."""

    def __init__(self, config: Spec, weights: Mapping[str, Tensor], at: str) -> None:
        self._config, self._weights, self._at = Plain.of(config), weights, at

    def normed(self, x: Tensor, name: str) -> Tensor:
        """Rows behind one of the layer's norms."""
        return norm_of(x, self._weights[f"{self._at}{name}.weight"], self._config.norm_eps)

    def queries(self, y: Tensor, rotation: Rotation) -> Tensor:
        """[S, heads, L, D]."""
        return rope(self._heads(y, "q"), rotation)

    def keys_values(self, y: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Each [S, heads, L, D]: those of a group are repeated for its queries."""
        num = self._config.num_heads // self._config.num_kv_heads
        k, v = rope(self._heads(y, "k"), rotation), self._heads(y, "v")
        return k.repeat_interleave(num, dim=1), v.repeat_interleave(num, dim=1)

    def behind(self, x: Tensor, attended: Tensor) -> Tensor:
        """The residual stream behind the layer. x: before it. attended [S, heads, L, D]."""
        x = x + self._linear(attended.transpose(1, 2).flatten(2), "self_attn.o_proj")
        y = self.normed(x, "post_attention_layernorm")
        return x + self._linear(
            F.silu(self._linear(y, "mlp.gate_proj")) * self._linear(y, "mlp.up_proj"), "mlp.down_proj"
        )

    def _heads(self, y: Tensor, name: str) -> Tensor:
        rows = torch.unflatten(self._linear(y, f"self_attn.{name}_proj"), -1, (-1, self._config.head_dim))
        rows = rows.transpose(1, 2)
        return self.normed(rows, f"self_attn.{name}_norm") if self._config.qk_norm and name != "v" else rows

    def _linear(self, x: Tensor, name: str) -> Tensor:
        at = f"{self._at}{name}."
        return F.linear(x, self._weights[f"{at}weight"], self._weights.get(f"{at}bias"))


def norm_of(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The root mean square norm of rows, float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotation_of(at: Tensor, inv_freq: Tensor) -> Rotation:
    """cos and sin [S, 1, L, D] of positions [S, L]; sin as ops.rope wants it."""
    angles = (at.float().unsqueeze(-1) * inv_freq).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rope(x: Tensor, rotation: Rotation) -> Tensor:
    """x [S, heads, L, D], turned by its positions."""
    cos, sin = rotation
    return x * cos + torch.roll(x, x.shape[-1] // 2, -1) * sin
