"""EAGLE-3 with training-time test (Li et al. 2025, arXiv 2503.01840); the drafter is drafters/eagle.py.

Row m has the target's features of token m and the embedding of token m+1, and learns the target's distribution of
token m+2. Then it goes on as it will when it drafts: step j takes its own output of the step before in place of
features and the embedding of token m+j+1, and sees the rows of true features up to m and its own of steps 1 to j. The
loss is the sum over steps of decay^j times the cross entropy to the target's distribution over the ids that are
drafted; where the target's likeliest id is not one of them, a row is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters import head_files
from forerun.drafters.eagle import EagleConfig, parameter_shapes
from forerun.models.layers import DecoderConfig, inverse_frequencies
from forerun.registry import parse_list
from forerun.train.heads import Batch, Rows, Teacher, cross_entropy, shifted


@dataclass(frozen=True)
class Options:
    """What the head reads, how wide it is, and how it learns."""

    layers: str | None = field(
        default=None, metadata={"help": "layers of the target behind which it reads, as in 2+15+27; none = of EAGLE-3"}
    )
    draft_vocab: int = field(
        default=8192, metadata={"help": "ids that it drafts, those that the target wrote most often", "min": 2}
    )
    ffn: int | None = field(default=None, metadata={"help": "width of its feed-forward block; none = the target's"})
    steps: int = field(default=4, metadata={"help": "tokens that it learns to draft one after another", "min": 1})
    decay: float = field(default=0.8, metadata={"help": "weight of a step's loss over that of the step before"})


def layers(options: Options, config: DecoderConfig) -> tuple[int, ...]:
    """Return the layers whose residual streams are read; by default behind 2, half, and all but 3 of them."""
    if options.layers is not None:
        return tuple(int(part) if part.isdigit() else -1 for part in parse_list(options.layers))
    num = config.num_layers
    return (min(2, num), num // 2, max(num - 3, num // 2))


class Head:
    """The head in float32, with gradients."""

    def __init__(self, options: Options, teacher: Teacher, seed: int) -> None:
        target = teacher.config
        self.options, self._teacher = options, teacher
        self.ids = teacher.counts.argsort(descending=True, stable=True)[: options.draft_vocab].sort().values
        self.config = EagleConfig(
            dataclasses.replace(
                target,
                model_type="llama",
                num_layers=1,
                ffn_size=options.ffn or target.ffn_size,
                tie_embeddings=False,
                qkv_bias=False,
                o_bias=False,
                mlp_bias=False,
                qk_norm=False,
                windows=(),
            ),
            layers(options, target),
            len(self.ids),
        )
        self.weights = _first_weights(self.config, teacher, seed)
        self._rows = teacher.head[self.ids]
        self._inv_freq = inverse_frequencies(target.rope, target.head_dim)
        self._place = torch.full((target.vocab_size,), -1)
        self._place[self.ids] = torch.arange(len(self.ids))

    def loss(self, batch: Batch) -> Tensor:
        """See `Head` in this package."""
        total = torch.zeros(())
        for j, (_, own, target) in enumerate(self._steps(batch)):
            if len(own):
                total = total + self.options.decay**j * cross_entropy(own, target).mean()
        return total

    def measure(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """See `Head` in this package."""
        numbers, reached = dict[str, tuple[float, float]](), torch.ones_like(batch.is_written)
        for j, (learned, own, target) in enumerate(self._steps(batch)):
            rows = Rows(batch.ahead(j + 2), learned, self.ids, shifted(batch.best, j + 1), shifted(batch.mass, j + 1))
            numbers |= rows.numbers(f"_{j + 1}", own, target, reached)
            reached = reached & rows.found(own)
        return numbers

    def _steps(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each step: which rows are learned [S, L], and own and target logits of those, float32 [R, draft_vocab]."""
        w, eps = self.weights, self.config.decoder.norm_eps
        rows = batch.layers.float()
        if self.config.has_fc_norm:
            rows = _norm(rows, torch.stack([w[f"fc_norm.{i}.weight"] for i in range(rows.shape[2])]), eps)
        feature = F.linear(rows.flatten(2), w["fc.weight"])
        mask, memory = _visible(batch), list[tuple[Tensor, Tensor]]()
        for j in range(self.options.steps):
            embedded = F.embedding(shifted(batch.ids, j + 1), self._teacher.embeddings)
            feature = self._layer(embedded, feature, batch.at + j, memory, mask)
            learned = batch.ahead(j + 2) & (self._place[shifted(batch.best, j + 1)] >= 0)
            own = F.linear(_norm(feature[learned], w["norm.weight"], eps), self._rows).float()
            with torch.no_grad():
                target = F.linear(shifted(batch.hidden, j + 1)[learned].to(self._rows.dtype), self._rows).float()
            yield learned, own, target

    def save(self, folder: Path, tokenizer: str) -> None:
        """See `Head` in this package."""
        weights = {name: weight.detach().bfloat16() for name, weight in self.weights.items()}
        weights["d2t"] = self.ids - torch.arange(len(self.ids))
        weights[head_files.PROBE] = self._teacher.probe
        head_files.save(folder, "eagle", weights, self.config.to_json(), tokenizer)

    def _layer(
        self, embedded: Tensor, feature: Tensor, at: Tensor, memory: list[tuple[Tensor, Tensor]], mask: Tensor
    ) -> Tensor:
        """One step of all rows [S, L, H]. memory: keys and values of the steps before, to which this step's come."""
        w, c, own = self.weights, self.config.decoder, "midlayer.self_attn."
        eps = c.norm_eps
        x = torch.cat(
            (
                _norm(embedded, w["midlayer.input_layernorm.weight"], eps),
                _norm(feature, w["midlayer.hidden_norm.weight"], eps),
            ),
            -1,
        )
        q, k, v = (
            torch.unflatten(F.linear(x, w[f"{own}{name}_proj.weight"]), -1, (-1, c.head_dim)).transpose(1, 2)
            for name in "qkv"
        )
        rotation = _rotation(at, self._inv_freq)
        q, k = _rope(q, rotation), _rope(k, rotation)
        k, v = (rows.repeat_interleave(c.num_heads // c.num_kv_heads, dim=1) for rows in (k, v))
        memory.append((k, v))
        out = _attend(q, memory, mask)
        x = feature + F.linear(out.transpose(1, 2).flatten(2), w[f"{own}o_proj.weight"])
        y = _norm(x, w["midlayer.post_attention_layernorm.weight"], eps)
        gate, up = (F.linear(y, w[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, w["midlayer.mlp.down_proj.weight"])


def _first_weights(config: EagleConfig, teacher: Teacher, seed: int) -> dict[str, Tensor]:
    """Normal(0, 0.02), and norms 1; the final norm begins as half of the target's, whose rows of the LM head follow."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict[str, Tensor]()
    for name, shape in parameter_shapes(config).items():
        scale = 0.02 / 2**0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        weights[name] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * scale
    weights["norm.weight"] = teacher.norm / 2
    return weights


def _visible(batch: Batch) -> Tensor:
    """[S, 1, L, L] bool: rows of the same text that are not behind; padding sees itself."""
    length = batch.ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return ((batch.text.unsqueeze(1) == batch.text.unsqueeze(2)) & causal).unsqueeze(1)


def _attend(q: Tensor, memory: Seq[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """q [S, heads, L, D] over the rows of step 0 under the mask, and its own row of each later step."""
    (keys, values), later = memory[0], memory[1:]
    if not later:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    scale = q.shape[-1] ** -0.5
    scores = (q @ keys.transpose(-1, -2)).float().masked_fill(~mask, -torch.inf)
    own = [(q * k).sum(-1, keepdim=True).float() for k, _ in later]
    weights = (torch.cat((scores, *own), -1) * scale).softmax(-1).to(q.dtype)
    length = keys.shape[2]
    out: Tensor = weights[..., :length] @ values
    for i, (_, v) in enumerate(later):
        out = out + weights[..., length + i, None] * v
    return out


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotation(at: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [S, 1, L, D] of positions [S, L]; sin as ops.rope wants it."""
    angles = (at.float().unsqueeze(-1) * inv_freq).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _rope(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    return x * cos + torch.roll(x, x.shape[-1] // 2, -1) * sin
