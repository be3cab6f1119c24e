"""Tiny random models of every kind of block that the kernels compute, on the extension and in plain torch.

`Native` packs the weights of a spec and runs passes over pools of its own. `Reference` computes one sequence, all of
its rows at once, with nothing but torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from forerun import blocks
from forerun.blocks import (
    Attention,
    Block,
    Experts,
    LayerInput,
    Mlp,
    Norm,
    Positions,
    Recurrence,
    Rope,
    Spec,
    products,
    recurrence_name,
    weights,
)
from forerun.host_tensor import dtype_name
from forerun.kv.pool import StateRoom, state_sizes, type_number
from forerun.kv.states import StateRun
from forerun.ops.cpu.packed import state_numbers
from forerun.ops.quantised import QuantisedMatrix
from forerun.ops.quantising import quantise, scheme_of
from ops.native_cases import FLOAT32, NAN, ops_of, seeded

NUM_POSITIONS = 96
RMS, PLUS_ONE, LAYER = Norm(eps=1e-5), Norm(eps=1e-6, offset=1.0), Norm("layer", eps=1e-5, bias=True)


def of_heads(norm: Norm) -> Norm:
    return replace(norm, span="head")


def spec_of(found: list[Block], **changes: Any) -> Spec:
    return replace(Spec("test", 61, 44, NUM_POSITIONS, tuple(found), RMS, tied=True), **changes)


def gemma(window: int | None, theta: float, softcap: float | None = None) -> Block:
    a = Attention(4, 2, 24, 0.3, window, q_norm=of_heads(PLUS_ONE), k_norm=of_heads(PLUS_ONE))
    a = replace(a, rope=Rope(theta), softcap=softcap)
    return Block(PLUS_ONE, a, None, PLUS_ONE, PLUS_ONE, Mlp(57, "gelu_tanh"), post_mlp=PLUS_ONE)


OF_GPT2 = Attention(4, 4, 10, qkv_bias=True, o_bias=True)
GPT2 = Block(LAYER, OF_GPT2, pre_mlp=LAYER, mlp=Mlp(88, "gelu_tanh", gated=False, bias=True))
PLAIN = Block(RMS, Attention(2, 1, 16, rope=Rope()), pre_mlp=RMS, mlp=Mlp(33))
MLP = Mlp(70, "gelu", gated=False, bias=True)


def mixture(experts: Experts, **changes: Any) -> Block:
    return Block(RMS, PLAIN.attention, pre_mlp=RMS, experts=experts, **changes)


# Norms behind the sums, as BERT's; norms over all heads at once, as OLMo 2's.
OVER_HEADS = Attention(2, 2, 22, rope=Rope(), q_norm=RMS, k_norm=replace(RMS, bias=True))
GELU = Mlp(50, "gelu", gated=False)
SUMMED = Block(attention=OVER_HEADS, post_attention=LAYER, mlp=GELU, post_mlp=LAYER, norm_at="sum")

SPECS: dict[str, Spec] = {
    "gemma3": spec_of([gemma(5, 1e4), gemma(None, 1e6), gemma(5, 1e4)], final_norm=PLUS_ONE, embed_scale=math.sqrt(44)),
    "gemma2": spec_of([gemma(None, 1e4, 2.0), gemma(7, 1e4, 2.0)], final_norm=PLUS_ONE, logit_softcap=3.0),
    "gpt2": spec_of([GPT2, GPT2], final_norm=LAYER, positions=Positions(NUM_POSITIONS)),
    "opt": spec_of(
        [dataclasses.replace(GPT2, mlp=Mlp(70, "relu", gated=False, bias=True))],
        final_norm=LAYER,
        positions=Positions(NUM_POSITIONS, offset=2),
        embed_norm=replace(LAYER, bias=False),
    ),
    "partial": spec_of(
        [
            Block(RMS, Attention(4, 2, 20, rope=Rope(dims=8, pairs="adjacent")), pre_mlp=RMS, mlp=Mlp(40, "gelu")),
            Block(RMS, Attention(4, 2, 20, rope=Rope(dims=12)), pre_mlp=RMS, mlp=Mlp(40, "gelu", gated=False)),
            Block(RMS, Attention(4, 2, 20, rope=Rope(pairs="adjacent")), pre_mlp=RMS, mlp=Mlp(40, "relu")),
        ],
        tied=False,
        head_bias=True,
    ),
    "sizes": spec_of(
        [
            replace(PLAIN, mlp=Mlp(90)),
            replace(PLAIN, attention=Attention(6, 3, 12, rope=Rope(), window=6), branch_scale=0.5),
            Block(RMS, Attention(1, 1, 64, rope=None, v_norm=replace(of_heads(RMS), weight=False))),
            Block(pre_mlp=LAYER, mlp=Mlp(31, bias=True)),
        ],
        tied=False,
        logit_scale=0.25,
        logit_softcap=5.0,
    ),
    "parallel": spec_of(
        [
            Block(LAYER, Attention(4, 2, 20, rope=Rope(dims=8)), pre_mlp=LAYER, mlp=MLP, parallel=True),
            Block(RMS, Attention(4, 2, 20), None, RMS, RMS, MLP, post_mlp=RMS, parallel=True, branch_scale=0.5),
        ],
        final_norm=LAYER,
    ),
    "growing": spec_of(
        [replace(PLAIN, attention=Attention(4, 2, 16, rope=Rope(), scale=0.2, position_scale=(0.7, 5)))] * 2
    ),
    "sums": spec_of([SUMMED] * 2, final_norm=None),
    "experts": spec_of(  # of Qwen 3, DeepSeek, gpt-oss and Qwen 2; the last between norms
        [
            mixture(Experts(8, 3, Mlp(33))),
            mixture(Experts(5, 2, Mlp(20, "gelu_tanh"), score="sigmoid", normalise=False, scale=1.5)),
            mixture(
                Experts(6, 4, Mlp(17, "gelu", gated=False, bias=True), score="softmax_of_chosen", router_bias=True),
                branch_scale=0.5,
            ),
            mixture(Experts(7, 1, Mlp(24), Mlp(40), True, router_norm=PLUS_ONE, normalise=False), post_mlp=PLUS_ONE),
            mixture(Experts(4, 2, Mlp(24), Mlp(16, "relu"), score="sigmoid"), norm_at="sum", post_mlp=RMS),
        ],
        tied=False,
    ),
    "experts, chosen otherwise": spec_of(
        [
            mixture(Experts(7, 2, Mlp(24), score="sigmoid", choice_bias=True, sum_eps=0.5)),
            mixture(Experts(7, 2, Mlp(24), choice_bias=True, normalise=False)),
        ]
    ),
}


LARGE = Rope(1e3, "proportional", dims=8)
OF_VALUES = replace(of_heads(RMS), weight=False)


def gemma4(window: int | None, kv_heads: int, head_dim: int, *, size: int = 33, **changes: Any) -> Block:
    """A layer of Gemma 4. changes: of its attention."""
    a = Attention(4, kv_heads, head_dim, 0.4, window, q_norm=of_heads(RMS), k_norm=of_heads(RMS), v_norm=OF_VALUES)
    a = replace(a, rope=LARGE if window is None else Rope(), **changes)
    return Block(RMS, a, None, RMS, RMS, Mlp(size, "gelu_tanh"), post_mlp=RMS, out_scale=True)


OWN_INPUT = LayerInput(12, "gelu_tanh", RMS)
BESIDE = Experts(6, 2, Mlp(20, "gelu_tanh"), router_norm=RMS, reads_stream=True, score_scale=0.5, scaled=True)
SPECS |= {
    "gemma4": spec_of([gemma4(5, 2, 16), gemma4(None, 1, 24, k_is_v=True), gemma4(5, 2, 16)], logit_softcap=3.0),
    "gemma4, own inputs": spec_of(
        [
            replace(block, per_layer_input=OWN_INPUT)
            for block in (
                gemma4(5, 2, 16),
                gemma4(None, 2, 24, k_is_v=True),
                gemma4(5, 2, 16, shares_kv_of=0, size=66),
                gemma4(None, 2, 24, shares_kv_of=1, size=66),
            )
        ],
        embed_scale=math.sqrt(44),
    ),
    "gemma4, experts": spec_of(
        [
            replace(block, experts=BESIDE, post_dense=RMS, pre_experts=PLUS_ONE, post_experts=RMS)
            for block in (gemma4(5, 2, 16), gemma4(None, 1, 24, k_is_v=True))
        ]
    ),
}


def gpt_oss(window: int | None) -> Block:
    a = Attention(4, 2, 16, window=window, rope=Rope(), qkv_bias=True, o_bias=True, sinks=True)
    experts = Experts(6, 2, Mlp(33, "clamped_silu", bias=True), score="softmax_of_chosen", router_bias=True)
    return Block(RMS, a, pre_mlp=RMS, experts=experts)


SPECS["gpt_oss, experts"] = spec_of([gpt_oss(5), gpt_oss(None)], tied=False)


def with_state(recurrence: Recurrence, **changes: Any) -> Block:
    return Block(RMS, recurrence=recurrence, pre_mlp=RMS, mlp=Mlp(33), **changes)


GATED = replace(PLAIN, attention=Attention(4, 2, 16, rope=Rope(dims=8), q_norm=of_heads(PLUS_ONE), gate=True))
DELTA = Recurrence("gated_delta", 4, 2, 6, 12, 20, RMS)  # key_heads, value_heads, key_dim, value_dim
SHORT = Recurrence("short_conv", 3)
SPECS |= {
    "gated": spec_of(
        [
            GATED,
            replace(GATED, attention=Attention(2, 1, 40, qkv_bias=True, gate=True, window=6)),
            replace(GATED, attention=Attention(4, 2, 16, rope=Rope(), gate=True, shares_kv_of=0)),
        ]
    ),
    "delta": spec_of(
        [with_state(DELTA), with_state(replace(DELTA, decay="negative", conv=2, norm=None, grouped=False)), GATED]
    ),
    "delta alone": spec_of(
        [with_state(Recurrence("gated_delta", 4, 3, 3, 16, 70, RMS), post_attention=RMS), with_state(DELTA)]
    ),
    "short": spec_of([with_state(SHORT), PLAIN, with_state(replace(SHORT, conv=4, biases=True), branch_scale=0.5)]),
}
MATRICES = ("matrix", "experts")


def is_wide(weight: blocks.Weight) -> bool:
    return weight.product.endswith(blocks.SCORES)


def random_weights(spec: Spec, dtype: torch.dtype, bits: int = 0) -> dict[str, Tensor]:
    """Tensors of these numbers; with bits, matrices are what their rounded weights stand for, in float32."""
    generator, found = seeded(len(spec.blocks) + spec.hidden_size), {}
    for weight in weights(spec):
        is_factor = "norm" in weight.name or "_scal" in weight.name
        centre = 1.0 if is_factor and weight.name.endswith("weight") else 0.0
        size = 2.0 if is_wide(weight) else 0.25  # scores that differ much, so that rounding seldom changes a choice
        made = (torch.randn(weight.shape, generator=generator) * size + centre * 0.8).to(dtype)
        found[weight.name] = made.float() if is_wide(weight) or (bits and weight.role in MATRICES) else made
    return found


@dataclass(frozen=True)
class Table:
    """cos and sin by position, as the kernels take them: float32 [positions, 2, turned dimensions]."""

    rows: Tensor

    @classmethod
    def of(cls, rope: Rope, head_dim: int) -> Table:
        dims = whole = rope.dims or head_dim
        if rope.kind == "proportional":
            whole = head_dim
        frequencies = rope.theta ** -(torch.arange(0, dims, 2).double() / whole)
        frequencies = torch.cat((frequencies, torch.zeros((whole - dims) // 2).double()))
        angles = torch.arange(NUM_POSITIONS).double()[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        return cls(torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1).float().contiguous())


def _state_pool(r: Recurrence, spec: Spec, num_rows: int, dtype: torch.dtype) -> list[Tensor]:
    """One state, and inputs of tokens, that are NaN until they are written."""
    sizes = state_sizes(r.state(spec.hidden_size), StateRoom(1, num_rows))
    kinds = (FLOAT32, dtype, dtype, FLOAT32)
    return [torch.full(size, NAN, dtype=kind) for size, kind in zip(sizes, kinds, strict=True)]


class Native:
    """A model on the extension, with pools for some slots of NUM_POSITIONS rows, which lie in shuffled order."""

    def __init__(
        self,
        spec: Spec,
        stored: Mapping[str, Tensor],
        dtype: torch.dtype,
        isa: str,
        *,
        bits: int = 0,
        num_threads: int = 1,
        num_slots: int = 3,
    ) -> None:
        self.spec = spec
        self.kept = dict[str, Any]()
        ops = ops_of(isa, num_threads)
        for product, members in products(weights(spec)).items():
            if product == "embedding" and not spec.tied:
                continue
            parts: list[Any] = [stored[m.name] for m in members]
            if bits and members[0].role in MATRICES and not is_wide(members[0]):
                scheme = scheme_of(bits, _group(members[0].shape[1]))
                parts = [_rounded(part, bits) for part in parts]
                assert all(part.scheme == scheme for part in parts)
            biases = [stored.get(m.name.removesuffix("weight") + "bias") for m in members]
            bias = None if biases[0] is None else torch.cat([b.float() for b in biases])  # type: ignore[union-attr]
            self.kept[product] = ops.pack(parts, bias, paired=product.endswith("gate_up") and len(members) == 2)
        vectors = {w.name: stored[w.name].float().contiguous() for w in weights(spec) if w.role == "vector"}
        names = [blocks.POSITIONS, *([] if spec.tied else [blocks.EMBEDDING])]
        self._addressed = (vectors, {name: stored[name].contiguous() for name in names if name in stored})
        handles = {name: m.handle for name, m in self.kept.items()}
        at = [{name: tensor.data_ptr() for name, tensor in group.items()} for group in self._addressed]
        self.model = ops.extension.make_model(ops.backend, spec, dtype == torch.bfloat16, handles, *at)
        shapes = [(b.attention.kv_heads, b.attention.head_dim) if b.attention else (0, 0) for b in spec.blocks]
        num_rows = num_slots * NUM_POSITIONS
        self.pools = [torch.full((2, num_rows, heads * dim), NAN, dtype=dtype) for heads, dim in shapes]
        keys, values = ([pool[i].data_ptr() for pool in self.pools] for i in (0, 1))
        sizes = [(heads * dim * dtype.itemsize,) * 2 for heads, dim in shapes]
        self.native_pools = ops.extension.Pools(keys, values, 1, sizes, [num_rows], type_number(dtype_name(dtype)))
        recurrences = {i: block.recurrence for i, block in enumerate(spec.blocks) if block.recurrence is not None}
        self.state_pools = {i: _state_pool(r, spec, num_rows, dtype) for i, r in recurrences.items()}
        of = self.state_pools.items()
        places = [(i, [part.data_ptr() for part in pool], [part[0].nbytes for part in pool]) for i, pool in of]
        self.native_pools.keep_states(1, num_rows, places)
        order = torch.randperm(num_rows, generator=seeded(1)).tolist()
        self.rows = [order[s * NUM_POSITIONS : (s + 1) * NUM_POSITIONS] for s in range(num_slots)]
        self.tables = []
        for i in self.model.rotations:
            a = spec.blocks[i].attention
            self.tables.append(Table.of(a.rope, a.head_dim))

    def numbers(
        self, cached: Mapping[int, int], counts: Mapping[int, int], trees: Mapping[int, list[int]]
    ) -> list[int]:
        found, first = [0] * (6 * len(counts)), 0
        for b, (slot, count) in enumerate(counts.items()):
            table, start = self.rows[slot][: cached[slot] + count], len(found)
            tree = trees.get(slot)
            at_parents = 0 if tree is None else start + len(table)
            found[6 * b : 6 * b + 6] = (first, count, cached[slot], 0, start, at_parents)
            found += [*table, *(tree or ())]
            first += count
        return found

    def run(
        self,
        runs: Mapping[int, list[int]],
        cached: Mapping[int, int],
        trees: Mapping[int, list[int]] | None = None,
        **given: Any,
    ) -> Tensor:
        """Rows [T, H + V] of one pass: hidden states behind the final norm, and logits."""
        trees = trees or {}
        positions = [cached[slot] + depth for slot, run in runs.items() for depth in depths(run, trees.get(slot))]
        tokens = [token for run in runs.values() for token in run]
        numbers = self.numbers(cached, {slot: len(run) for slot, run in runs.items()}, trees)
        hidden = torch.empty(len(tokens), self.spec.hidden_size)
        layers = given.get("layers", list(range(self.spec.num_layers)))
        parts = [given.get(name, usual) for name, usual in (("input", 0), ("taps", []), ("is_normed", True))]
        states = given.get("states", self.state_numbers(cached, {slot: len(run) for slot, run in runs.items()}))
        rows = (tokens, given.get("positions", positions), self.addresses, len(runs), [numbers], self.native_pools)
        self.num_experts = self.model.forward(*rows, layers, *parts, hidden.data_ptr(), states=states)
        return torch.cat((hidden, self.logits(hidden)), 1)

    def state_numbers(self, cached: Mapping[int, int], counts: Mapping[int, int]) -> list[int]:
        """No state is ever written: every pass goes through all that is cached again."""
        found = []
        for slot, count in counts.items():
            rows = self.rows[slot]
            found.append(StateRun(-1, rows[: cached[slot]], (), rows[cached[slot] : cached[slot] + count], (), ()))
        return state_numbers(found)

    @property
    def addresses(self) -> list[tuple[int, int]]:
        return [(table.rows.data_ptr(), len(table.rows)) for table in self.tables]

    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.empty(len(hidden), self.spec.vocab_size)
        self.model.logits(hidden.data_ptr(), len(hidden), self.spec.vocab_size, out.data_ptr())
        return out


def depths(run: list[int], tree: list[int] | None) -> list[int]:
    found: list[int] = []
    for i in range(len(run)):
        parent = i - 1 if tree is None else tree[i]
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def _group(num_in: int) -> int:
    return next(group for group in (128, 64, 32, 16) if num_in % group == 0)


def _rounded(rows: Tensor, bits: int) -> QuantisedMatrix:
    scheme = scheme_of(bits, _group(rows.shape[1]))
    num_out, num_in = rows.shape
    return QuantisedMatrix(scheme, (num_out, num_in), lambda: iter([quantise(rows.float().numpy(), scheme)]))


# ------------------------------------------------------------------------------------------------------- in plain torch


@dataclass(frozen=True)
class Reference:
    """The same function in float64, of one sequence of tokens. weights: as `random_weights` has them.

    chosen: of each block with experts that has run, those that some row chose. kept: keys and values by block.
    bound: of clamped_silu.
    """

    spec: Spec
    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    chosen: list[set[int]] = field(default_factory=list)
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    bound: float = 7

    def rows(self, tokens: list[int]) -> Tensor:
        """[T, H + V]."""
        s = self.spec
        x = self.w(blocks.EMBEDDING)[tokens] * float(torch.tensor(s.embed_scale).to(self.dtype))
        if s.positions is not None:
            x = x + self.w(blocks.POSITIONS)[torch.arange(len(tokens)) + s.positions.offset]
        x = self.norm(x, s.embed_norm, "model.embed_norm")
        inputs = None if s.layer_input is None else self.layer_inputs(tokens, x, s.layer_input)
        self.kept.clear()
        for i, block in enumerate(s.blocks):
            at, before = f"model.layers.{i}.", x
            if block.attention is not None or block.recurrence is not None:
                y = self.norm(x, block.pre_attention, at + "input_layernorm")
                if block.attention is not None:
                    y = self.attention(y, block.attention, at + "self_attn.", i)
                else:
                    y = self.recurrence(y, block.recurrence, at + recurrence_name(block.recurrence))
                x = self.added(x, y, block, block.post_attention, at + "post_attention_layernorm")
            if block.mlp is not None and block.experts is not None:
                y = self.norm(x, block.pre_mlp, at + blocks.pre_mlp_name(block))
                y = self.mlp(y, block.mlp, at + "mlp.")
                y = self.norm(y, block.post_dense, f"{at}post_feedforward_layernorm_1")
                z = self.norm(x, block.pre_experts, f"{at}pre_feedforward_layernorm_2")
                z = self.experts(z, block.experts, at + "mlp.", x)
                y = y + self.norm(z, block.post_experts, f"{at}post_feedforward_layernorm_2")
            elif block.mlp is not None:
                y = self.norm(before if block.parallel else x, block.pre_mlp, at + blocks.pre_mlp_name(block))
                y = self.mlp(y, block.mlp, at + "mlp.")
            elif block.experts is not None:
                y = self.norm(x, block.pre_mlp, at + blocks.pre_mlp_name(block))
                y = self.experts(y, block.experts, at + "mlp.")
            if block.mlp is not None or block.experts is not None:
                x = self.added(x, y, block, block.post_mlp, at + "post_feedforward_layernorm")
            if inputs is not None and (own := block.per_layer_input) is not None:
                gate = torch.nn.functional.gelu(self.product(x, f"{at}per_layer_input_gate"), approximate="tanh")
                y = self.product(gate * inputs[:, i], f"{at}per_layer_projection")
                x = x + self.norm(y, own.norm, f"{at}post_per_layer_input_norm")
            x = x * self.w(f"{at}layer_scalar.weight") if block.out_scale else x
        x = self.norm(x, s.final_norm, "model.norm")
        logits = x @ self.w(blocks.EMBEDDING if s.tied else blocks.HEAD).T
        logits = (logits + (self.w("lm_head.bias") if s.head_bias else 0)) * s.logit_scale
        return torch.cat((x, self.capped(logits, s.logit_softcap)), 1)

    def layer_inputs(self, tokens: list[int], x: Tensor, own: LayerInput) -> Tensor:
        """[T, layers, size]."""
        projected = self.product(x, "model.per_layer_model_projection") / math.sqrt(x.shape[1])
        projected = self.norm(projected.view(len(x), -1, own.size), own.norm, "model.per_layer_projection_norm")
        found = self.w(blocks.LAYER_EMBEDDING)[tokens] * float(torch.tensor(math.sqrt(own.size)).to(self.dtype))
        return (projected + found.view(projected.shape)) / math.sqrt(2)

    def w(self, name: str) -> Tensor:
        return self.weights[name].double()

    def capped(self, x: Tensor, cap: float | None) -> Tensor:
        return x if cap is None else cap * torch.tanh(x / cap)

    def added(self, x: Tensor, y: Tensor, block: Block, post: Norm | None, at: str) -> Tensor:
        if block.norm_at == "branch":
            return x + self.norm(y, post, at) * block.branch_scale
        return self.norm(x + y * block.branch_scale, post, at)

    def norm(self, x: Tensor, norm: Norm | None, at: str) -> Tensor:
        if norm is None:
            return x
        if norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        x = x * (self.w(at + ".weight") + norm.offset) if norm.weight else x
        return x + self.w(at + ".bias") if norm.bias else x

    def product(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(name + ".bias")
        return x @ self.w(name + ".weight").T + (0 if bias is None else bias.double())

    def heads(self, x: Tensor, num: int, dim: int, norm: Norm | None, at: str) -> Tensor:
        if norm is not None and norm.span == "all":
            x = self.norm(x, norm, at)
        x = x.view(len(x), num, dim)
        return self.norm(x, norm, at) if norm is not None and norm.span == "head" else x

    def attention(self, y: Tensor, a: Attention, at: str, i: int = 0) -> Tensor:
        q = self.heads(self.product(y, at + "q_proj"), a.heads, a.head_dim, a.q_norm, at + "q_norm")
        q = self.turned(q, a)
        if a.shares_kv_of is None:
            k = self.heads(self.product(y, at + "k_proj"), a.kv_heads, a.head_dim, a.k_norm, at + "k_norm")
            of_values = at + ("k_proj" if a.k_is_v else "v_proj")
            v = self.heads(self.product(y, of_values), a.kv_heads, a.head_dim, a.v_norm, at + "v_norm")
            self.kept[i] = self.turned(k, a), v
        k, v = self.kept[i if a.shares_kv_of is None else a.shares_kv_of]
        if a.position_scale is not None:
            beta, length = a.position_scale
            q = q * (1 + beta * torch.log1p(torch.arange(len(q)).double() // length))[:, None, None]
        k, v = (x.repeat_interleave(a.heads // a.kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (a.head_dim**-0.5 if a.scale is None else a.scale)
        scores = self.capped(scores, a.softcap)
        distance = torch.arange(len(y))[:, None] - torch.arange(len(y))
        hidden = (distance < 0) | (distance >= (a.window or len(y)))
        scores = scores.masked_fill(hidden, -math.inf)
        if a.sinks:  # a further key, whose value is nothing
            scores = torch.cat((scores, self.w(at + "sinks.weight")[:, None, None].expand(-1, len(y), 1)), -1)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(y)], v).flatten(1)
        if a.gate:
            out = out * self.product(y, at + "gate_proj").sigmoid()
        return self.product(out, at + "o_proj")

    def convolved(self, x: Tensor, r: Recurrence, name: str) -> Tensor:
        weight, padded = self.w(name + ".weight"), torch.cat((torch.zeros(r.conv - 1, x.shape[1]).double(), x))
        return sum((padded[j : j + len(x)] * weight[:, j] for j in range(r.conv)), torch.zeros(()))

    def recurrence(self, y: Tensor, r: Recurrence, at: str) -> Tensor:
        """One token after the other, as blocks.Recurrence says it."""
        if r.kind == "short_conv":
            b, c, x = self.product(y, at + "in_proj").chunk(3, -1)
            bias = self.w(at + "conv.bias") if r.biases else 0
            return self.product(c * (self.convolved(b * x, r, at + "conv") + bias), at + "out_proj")
        inputs = torch.nn.functional.silu(self.convolved(self.product(y, at + "in_proj_qkv"), r, at + "conv1d"))
        keys, num = r.key_heads * r.key_dim, len(y)
        q, k, v = inputs.split([keys, keys, r.value_heads * r.value_dim], -1)
        q, k = (x.view(num, r.key_heads, r.key_dim) for x in (q, k))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        heads = [i * r.key_heads // r.value_heads if r.grouped else i % r.key_heads for i in range(r.value_heads)]
        q, k = q[:, heads] / math.sqrt(r.key_dim), k[:, heads]
        v, stored = v.view(num, r.value_heads, r.value_dim), self.w(at + "A_log.weight")
        beta = self.product(y, at + "in_proj_b").sigmoid()
        a = torch.nn.functional.softplus(self.product(y, at + "in_proj_a") + self.w(at + "dt_bias.weight"))
        decay = (a * (stored if r.decay == "negative" else -stored.exp())).exp()
        state = torch.zeros(r.value_heads, r.key_dim, r.value_dim).double()
        outs = []
        for t in range(num):
            state = state * decay[t, :, None, None]
            added = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[t, :, None]
            state = state + torch.einsum("hk,hv->hkv", k[t], added)
            outs.append(torch.einsum("hk,hkv->hv", q[t], state))
        out = self.norm(torch.stack(outs), r.norm, at + "norm")
        z = torch.nn.functional.silu(self.product(y, at + "in_proj_z"))
        return self.product(out.flatten(1) * z, at + "out_proj")

    def turned(self, x: Tensor, a: Attention) -> Tensor:
        if a.rope is None:
            return x
        dims = a.head_dim if a.rope.kind == "proportional" else a.rope.dims or a.head_dim
        table = Table.of(a.rope, a.head_dim).rows[: len(x)].double()
        cos, sin = table[:, 0, None, : dims // 2], table[:, 1, None, dims // 2 :]
        first, second = slice(0, dims // 2), slice(dims // 2, dims)
        if a.rope.pairs == "adjacent":
            first, second = slice(0, dims, 2), slice(1, dims, 2)
        out = x.clone()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out

    def mlp(self, y: Tensor, mlp: Mlp, at: str) -> Tensor:
        acts = {
            "silu": torch.nn.functional.silu,
            "relu": torch.relu,
            "gelu": torch.nn.functional.gelu,
            "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        }
        up = self.product(y, at + "up_proj")
        if mlp.act == "clamped_silu":
            gate = self.product(y, at + "gate_proj").clamp(max=self.bound)
            inner = (up.clamp(-self.bound, self.bound) + 1) * gate * torch.sigmoid(1.702 * gate)
            return self.product(inner, at + "down_proj")
        inner = acts[mlp.act](self.product(y, at + "gate_proj")) * up if mlp.gated else acts[mlp.act](up)
        return self.product(inner, at + "down_proj")

    def experts(self, y: Tensor, e: Experts, at: str, stream: Tensor | None = None) -> Tensor:
        read = y if stream is None else stream
        scores = self.product(self.norm(read, e.router_norm, at + "router_norm"), at + "gate") * e.score_scale
        shares = {"softmax": scores.softmax(-1), "sigmoid": scores.sigmoid()}.get(e.score, scores)
        ranks = shares + self.w(f"{at}choice_bias.weight") if e.choice_bias else scores
        out = torch.zeros_like(y)
        self.chosen.append(set())
        for row in range(len(y)):
            # Rows of the router that are alike may differ in the last bit, by the order of a library's sums.
            found = sorted(range(e.num), key=lambda i: -round(float(ranks[row, i]), 9))[: e.chosen]
            self.chosen[-1].update(found)
            own = shares[row, found]
            if e.score == "softmax_of_chosen":
                own = own.softmax(-1)
            elif e.normalise:
                own = own / (own.sum() + e.sum_eps)
            for i, share in zip(found, own, strict=True):
                share = share * self.w(f"{at}expert_scale.weight")[i] if e.scaled else share
                out[row] += self.mlp(y[row : row + 1], e.mlp, f"{at}experts.{i}.")[0] * share * e.scale
        if e.shared is not None:
            gate = self.product(y, at + "shared_expert_gate").sigmoid() if e.shared_gate else 1.0
            out = out + self.mlp(y, e.shared, at + "shared_expert.") * gate
        return out


def stands_for(spec: Spec, stored: Mapping[str, Tensor], bits: int) -> dict[str, Tensor]:
    """The same weights with matrices as their rounded integers stand for them."""
    found = dict(stored)
    for weight in weights(spec):
        if bits and weight.role in MATRICES and not is_wide(weight):
            found[weight.name] = torch.from_numpy(next(_rounded(stored[weight.name], bits).blocks()).dequantise())
    return found
