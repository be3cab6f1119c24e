"""Models in torch. They compute every block that blocks.py can describe, on any device, with gradients if wanted.

A model runs block by block on its operators (reference.py, or others with the same interface), whole batches at once or
row by row. Model families that no other backend computes run here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun import blocks
from forerun.blocks import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_EMBEDDING,
    POSITIONS,
    Attention,
    Block,
    Experts,
    Features,
    LayerInput,
    Mlp,
    Norm,
    Rope,
    Spec,
    itemsize,
)
from forerun.config import Quantization
from forerun.errors import BadOption, InternalError
from forerun.host_tensor import Floats, HostTensor, dtype_name
from forerun.kv.cache import BlockCache
from forerun.kv.states import StateRun, runs_alone
from forerun.ops.memory import Sizes, Wanted, no_room
from forerun.ops.passes import Lent, Passed, batch_of_sources, check_pass, check_sources, end_of, kinds_in_words
from forerun.ops.quantising import RoundedWeights
from forerun.ops.reference import PLAIN, ReferenceOps, Scoring
from forerun.ops.rotary import sinusoids
from forerun.ops.torch_memory import ReferenceSizes
from forerun.ops.torch_parts import Join, Normed, Parts, Projections, normed
from forerun.ops.torch_pools import pools_on
from forerun.ops.torch_rotations import TorchRotations
from forerun.ops.torch_states import TorchRecurrence
from forerun.ops.torch_tensors import TorchRows, as_tensors, dtype_of, host_of, tensor_of, torch_dtype
from forerun.types import CacheView, RaggedBatch

NAME = "reference"
NEEDS = "torch"
RANK = 1
row_invariant = False
Rotation = tuple[Tensor, Tensor]  # cos and sin of rows
Turn = tuple[Rope, int]  # a rope and the size of the heads that it rotates


def usable(device: str) -> str | None:
    """Return None, because torch computes on every device that torch can find."""
    return None


def supports(spec: Spec) -> str | None:
    """Return None if this backend can compute a model, otherwise the reason as a sentence without a full stop."""
    if spec.encoder is not None and (why_not := supports(spec.encoder)) is not None:
        return why_not
    return None


@cache
def make() -> ReferenceOps:
    """Return the fast operators in torch, which are not row-invariant."""
    return ReferenceOps()


def load(
    spec: Spec,
    weights: Mapping[str, Any],
    operators: ReferenceOps,
    *,
    device: str = "cpu",
    consume: bool = False,
    lent: Lent | None = None,
) -> TorchModel:
    """Load a model that runs operator by operator; see ops.load_model."""
    return TorchModel(spec, placed(spec, weights, device), operators, lent=lent)


def placed(spec: Spec, weights: Mapping[str, Any], device: str) -> Mapping[str, Tensor]:
    """Return the weights as tensors on a device; each host tensor is read straight into its final place."""
    return as_tensors(weights, lambda: _room_for(spec, dtype_of(weights), device))


def _room_for(spec: Spec, dtype: str, device: str) -> dict[str, Tensor]:
    try:
        return empty_weights(spec, torch_dtype(dtype), device)
    except RuntimeError as error:  # OutOfMemoryError is a subclass; a CPU raises RuntimeError itself
        raise no_room(spec.num_weights * itemsize(dtype), device) from error


def sizes(wanted: Wanted) -> Sizes:
    """Return the object that computes the memory of weights and passes."""
    return ReferenceSizes(wanted.dtype, wanted.device, wanted.max_seq_len, wanted.in_place, row_by_row=False)


@dataclass
class Step:
    """The data that all blocks of a pass share.

    positions: [T]. rotations: cos and sin of the rows, by rope and head size. views: for each kind of layers, the cache
    rows to write and to read. Without a cache, `views` holds one view of the pass's own rows if rows see all of their
    run; otherwise `views` is empty. sources: the cache rows of each run's encoder input; None = no block reads an
    encoder's input. layer_inputs [T, layers, size]: the second inputs of blocks, see blocks.LayerInput; None = no block
    has a second input. num_experts: for each block with experts that has run, the number of experts that were chosen
    for at least one row. batch: the batch of the pass. states: for each run, the states and rows that recurrent blocks
    read and write.
    """

    positions: Tensor
    rotations: Mapping[Turn, Rotation]
    cache: BlockCache | None
    views: Seq[CacheView]
    sources: CacheView | None = None
    layer_inputs: Tensor | None = None
    num_experts: list[int] = field(default_factory=list)
    batch: RaggedBatch | None = None
    states: Seq[StateRun] = ()

    def view(self, layer: int) -> CacheView | None:
        """Return the cache rows that a layer writes and reads."""
        kind = 0 if self.cache is None else self.cache.shape.kind_of(layer)
        return self.views[kind] if self.views else None


class TorchAttention:
    """The attention of one block.

    at: the prefix of the block's weight names. biased: the attention of another block, whose position bias this block
    uses, too; None = the block uses no other block's bias.
    """

    def __init__(self, a: Attention, parts: Parts, at: str, biased: TorchAttention | None = None) -> None:
        self.spec = a
        name_prefix = at + blocks.attention_name(a)
        q = ["q_proj", *(["gate_proj"] if a.gate else [])]
        kv = list[str]()
        if a.shares_kv_of is None:
            kv = ["k_proj", *([] if a.k_is_v else ["v_proj"])]
        apart = parts.apart or a.sees == "encoder"
        groups = [group for group in ([[name] for name in q] if parts.apart else [q]) + [kv] if group]
        groups = groups if apart else [q + kv]
        self._products = [(group, parts.product(*(name_prefix + name for name in group))) for group in groups]
        self.o = parts.product(f"{name_prefix}o_proj")
        makes_keys = a.shares_kv_of is None
        self.q_norm = Normed.of(parts, f"{name_prefix}q_norm", a.q_norm)
        self.k_norm = Normed.of(parts, f"{name_prefix}k_norm", a.k_norm) if makes_keys else None
        self.v_norm = Normed.of(parts, f"{name_prefix}v_norm", a.v_norm) if makes_keys else None
        sinks = parts.vector(f"{name_prefix}sinks.weight") if a.sinks else None
        buckets, table = (None, None) if biased is None else (biased.scoring.buckets, biased.scoring.table)
        if isinstance(a.bias, blocks.Buckets):
            buckets = a.bias
            table = parts.vector(f"{name_prefix}relative_attention_bias.weight")
        is_plain = (a.scale, a.softcap, sinks, table, a.sees) == (None, None, None, None, "past")
        self.scoring: Scoring = (
            PLAIN if is_plain else Scoring(a.scale, a.softcap, sinks, buckets, table, a.sees != "past")
        )

    def run(self, ops: ReferenceOps, y: Tensor, i: int, step: Step) -> Tensor:
        """Return the output of attention [T, H]. y: the rows that the projections read. i: the block's index."""
        a = self.spec
        projected = self.project(ops, y, "q_proj" if a.sees == "encoder" else None)
        rotation = None if a.rope is None else step.rotations[a.rope, a.head_dim]
        q = self.queries(ops, projected["q_proj"], rotation, step.positions)
        k = v = None
        if a.shares_kv_of is None and a.sees != "encoder":
            k, v = self.keys_values(ops, projected, rotation)
        layer = i if a.shares_kv_of is None else a.shares_kv_of
        pool = None if step.cache is None else step.cache.pools[layer]
        view = step.sources if a.sees == "encoder" else step.view(layer)
        more = {} if self.scoring is PLAIN else {"scoring": self.scoring}
        out = ops.attention(q, k, v, pool=pool, view=view, window=a.window, **more)
        out = out.flatten(1)
        if a.gate:
            out = out * torch.sigmoid(projected["gate_proj"])
        return self.o.apply(ops, out)[0]

    def of_source(self, ops: ReferenceOps, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [S, kv_heads, D] that the cache keeps for an encoder's output rows [S, H]."""
        return self.keys_values(ops, self.project(ops, rows, "k_proj"), None)

    def project(self, ops: ReferenceOps, y: Tensor, wanted: str | None = None) -> dict[str, Tensor]:
        """Multiply rows y by the matrices and return the results by name.

        wanted: the name of a matrix; only the product with this matrix is computed. None = all products are computed.
        """
        projected = dict[str, Tensor]()
        for names, product in self._products:
            if wanted is None or wanted in names:
                projected |= dict(zip(names, product.apply(ops, y), strict=True))
        return projected

    def queries(
        self, ops: ReferenceOps, q: Tensor, rotation: Rotation | None, positions: Tensor | None = None
    ) -> Tensor:
        """Split q [T, heads D] into heads [T, heads, D], then norm, rotate and scale them as the spec says.

        positions [T]: needed only if the spec scales queries by their positions.
        """
        q = _turned(ops, self._heads(ops, q, self.spec.heads, self.q_norm), rotation, self.spec.rope)
        if self.spec.position_scale is None or positions is None:
            return q
        beta, length = self.spec.position_scale
        scale = 1 + beta * torch.log(1 + torch.floor(positions.float() / length))
        return q * scale.to(q.dtype)[:, None, None]

    def keys_values(
        self, ops: ReferenceOps, products: Mapping[str, Tensor], rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [T, kv_heads, D] as the cache keeps them.

        products: as `project` returned them.
        """
        num, k = self.spec.kv_heads, products["k_proj"]
        values = self._heads(ops, products.get("v_proj", k), num, self.v_norm)
        return _turned(ops, self._heads(ops, k, num, self.k_norm), rotation, self.spec.rope), values

    def _heads(self, ops: ReferenceOps, x: Tensor, num: int, norm: Normed | None) -> Tensor:
        if norm is not None and norm.norm.span == "all":
            return norm.apply(ops, x).view(len(x), num, self.spec.head_dim)
        return normed(norm, ops, x.view(len(x), num, self.spec.head_dim))


def _turned(ops: ReferenceOps, x: Tensor, rotation: Rotation | None, rope: Rope | None) -> Tensor:
    """Rotate x [T, heads, D] by position: whole heads, or their first dimensions."""
    if rotation is None or rope is None:
        return x
    dims = rotation[0].shape[-1]
    if rope.pairs == "adjacent":
        pairs = torch.unflatten(x[..., :dims], -1, (-1, 2)).transpose(-1, -2).flatten(-2)
        turned = torch.unflatten(ops.rope(pairs, *rotation), -1, (2, -1)).transpose(-1, -2).flatten(-2)
    else:
        turned = ops.rope(x if dims == x.shape[-1] else x[..., :dims], *rotation)
    return turned if dims == x.shape[-1] else torch.cat((turned, x[..., dims:]), -1)


class TorchMlp:
    """One feed-forward part."""

    def __init__(self, mlp: Mlp, parts: Parts, at: str) -> None:
        self.spec = mlp
        self.up = parts.product(*([f"{at}gate_proj"] if mlp.gated else []), f"{at}up_proj")
        self.down = parts.product(f"{at}down_proj") if mlp.down else Projections([], [], None)

    def run(self, ops: ReferenceOps, y: Tensor) -> Tensor:
        """Apply the feed-forward part to y [T, H] -> [T, H]."""
        inner = self.inner(ops, y)
        return self.down.apply(ops, inner)[0] if self.spec.down else inner

    def inner(self, ops: ReferenceOps, y: Tensor) -> Tensor:
        """Return the input of the down projection: y [T, H] -> [T, size]."""
        parts = self.up.apply(ops, y)
        return ops.gated(self.spec.act, *parts) if self.spec.gated else ops.activated(self.spec.act, parts[0])


class TorchExperts:
    """A mixture of experts. The outputs of a row's experts are added in the order of the experts' indices."""

    def __init__(self, e: Experts, parts: Parts, at: str) -> None:
        self.spec = e
        self.router = parts.product(f"{at}gate")
        self.router_norm = Normed.of(parts, f"{at}router_norm", e.router_norm)
        self.scales = parts.vector(f"{at}expert_scale.weight") if e.scaled else None
        self.choice_bias = parts.weights[f"{at}choice_bias.weight"].float() if e.choice_bias else None
        self.experts = [TorchMlp(e.mlp, parts, f"{at}experts.{i}.") for i in range(e.num)]
        self.shared = None if e.shared is None else TorchMlp(e.shared, parts, f"{at}shared_expert.")
        self.shared_gate = parts.product(f"{at}shared_expert_gate") if e.shared_gate else None

    def run(self, ops: ReferenceOps, y: Tensor, stream: Tensor) -> tuple[Tensor, int]:
        """Apply the mixture to y [T, H] -> [T, H]. Also returns how many experts were chosen for at least one row.

        stream [T, H]: y before its norm.
        """
        chosen, shares = self.chosen(ops, stream if self.spec.reads_stream else y)
        out, num_experts = torch.zeros_like(y), 0
        for i, expert in enumerate(self.experts):
            rows, places = (chosen == i).nonzero(as_tuple=True)
            if len(rows):
                num_experts += 1
                part = expert.run(ops, y[rows]) * shares[rows, places].to(y.dtype)[:, None]
                out = out.index_add(0, rows, part)
        if self.shared is not None:
            part = self.shared.run(ops, y)
            if self.shared_gate is not None:
                part = part * torch.sigmoid(self.shared_gate.apply(ops, y)[0])
            out = out + part
        return out, num_experts

    @property
    def unread_bytes(self) -> float:
        """The bytes of experts' matrices that a pass of a single row does not read, on average."""
        num_bytes = sum(expert.up.nbytes + expert.down.nbytes for expert in self.experts)
        return num_bytes * (1 - self.spec.chosen / self.spec.num)

    def chosen(self, ops: ReferenceOps, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts of each row, and their shares in float32; both are [T, chosen]."""
        e = self.spec
        scores = self.router.apply(ops, normed(self.router_norm, ops, y))[0].float() * e.score_scale
        if e.score == "softmax":
            scores = scores.softmax(-1)
        elif e.score == "sigmoid":
            scores = scores.sigmoid()
        ranks = scores if self.choice_bias is None else scores + self.choice_bias
        experts = ranks.topk(e.chosen, -1)[1]
        shares = scores.gather(-1, experts)
        ops.routed(ranks, experts)
        if e.score == "softmax_of_chosen":
            shares = shares.softmax(-1)
        elif e.normalise:
            shares = shares / (shares.sum(-1, keepdim=True) + e.sum_eps)
        return experts, shares * e.scale if self.scales is None else shares * e.scale * self.scales[experts].float()


class TorchLayerInput:
    """The part of a block that reads the block's second input, beside the residual stream; see blocks.LayerInput."""

    def __init__(self, spec: LayerInput, parts: Parts, at: str) -> None:
        self.spec = spec
        self.gate = parts.product(f"{at}per_layer_input_gate")
        self.up = parts.product(f"{at}per_layer_projection")
        self.norm = Normed.of(parts, f"{at}post_per_layer_input_norm", spec.norm)

    def run(self, ops: ReferenceOps, x: Tensor, inputs: Tensor) -> Tensor:
        """Compute the rows [T, H] that the block adds, from the residual stream x [T, H] and the inputs [T, size]."""
        inner = ops.activated(self.spec.act, self.gate.apply(ops, x)[0]) * inputs
        return normed(self.norm, ops, self.up.apply(ops, inner)[0])


class TorchLayerInputs:
    """The computation of every block's second input, beside the residual stream; see blocks.LayerInput."""

    def __init__(self, spec: LayerInput, parts: Parts) -> None:
        self.spec, self.table = spec, parts.weights[LAYER_EMBEDDING]
        self.look_up: Callable[[Tensor], Tensor] = lambda tokens: F.embedding(tokens, self.table)
        self.projection = parts.product("model.per_layer_model_projection")
        self.norm = Normed.of(parts, "model.per_layer_projection_norm", spec.norm)

    def run(self, ops: ReferenceOps, tokens: Tensor, x: Tensor) -> Tensor:
        """Compute the second inputs [T, layers, size] from tokens [T] and their embeddings x [T, H]."""
        projected = self.projection.apply(ops, x)[0] * x.shape[-1] ** -0.5
        projected = normed(self.norm, ops, projected.unflatten(-1, (-1, self.spec.size)))
        looked_up = self.look_up(tokens)
        looked_up = looked_up * torch.tensor(math.sqrt(self.spec.size), dtype=looked_up.dtype)
        return (projected + looked_up.view(projected.shape)) * 2**-0.5


class TorchFeatures:
    """The input of a draft head: each token's embedding, and features made from the target's hidden states."""

    def __init__(self, spec: Features, parts: Parts) -> None:
        self.spec = spec
        rows, sides = (Norm(eps=spec.eps) if has else None for has in (spec.row_norms, spec.side_norms))
        self.row_norms = [Normed.of(parts, f"fc_norm.{i}", rows) for i in range(spec.num)]
        self.whole_norm = Normed.of(parts, "input_norm", Norm(eps=spec.eps) if spec.whole_norm else None)
        self.layers = parts.product("fc", *(["fc_act"] if spec.act else [])) if spec.joined else None
        self.side_norms = [Normed.of(parts, side, sides) for side in blocks.SIDES]
        self.context_norm = Normed.of(parts, blocks.SIDES[1], spec.context_norm)
        self.input = parts.product("input") if spec.input == "product" else None
        self.output = parts.product("output") if spec.feeds == "projected" else None

    def of_rows(self, ops: ReferenceOps, layer_rows: Seq[Tensor], dtype: torch.dtype) -> Tensor:
        """Compute features [n, H] from the target's hidden states [n, size] after each layer that the head reads."""
        cut = [x.to(dtype).clamp(-self.spec.largest, self.spec.largest) for x in layer_rows]
        rows = torch.cat([normed(norm, ops, x) for norm, x in zip(self.row_norms, cut, strict=True)], -1)
        rows = normed(self.whole_norm, ops, rows)
        if self.layers is None:
            return rows
        made, *acted = self.layers.apply(ops, rows)
        return made if self.spec.act is None else made + ops.activated(self.spec.act, acted[0])

    def begun(self, ops: ReferenceOps, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the first block's input x [T, H], and the rows [T, 2 H] that attention reads instead of x.

        None in place of the rows = attention reads x.
        """
        sides = [normed(norm, ops, x) for norm, x in zip(self.side_norms, (embedded, features), strict=True)]
        both = torch.cat(sides, -1)
        if self.input is not None:
            return self.input.apply(ops, both)[0], None
        return sides[1] if self.spec.normed_stream else features, both


class TorchBlock:
    """One block: its norms, its attention, and its feed-forward part or experts."""

    def __init__(self, block: Block, parts: Parts, at: str, biased: TorchAttention | None = None) -> None:
        self.spec = block
        self.pre_attention = Normed.of(parts, f"{at}input_layernorm", block.pre_attention)
        self.post_attention = Normed.of(parts, f"{at}post_attention_layernorm", block.post_attention)
        self.pre_mlp = Normed.of(parts, at + blocks.pre_mlp_name(block), block.pre_mlp)
        self.post_mlp = Normed.of(parts, f"{at}post_feedforward_layernorm", block.post_mlp)
        a, r, mlp, experts = block.attention, block.recurrence, block.mlp, block.experts
        self.attention = None if a is None else TorchAttention(a, parts, at, biased)
        self.recurrence = None
        if r is not None:
            norm = Normed.of(parts, f"{at}{blocks.recurrence_name(r)}norm", r.norm)
            self.recurrence = TorchRecurrence(r, parts, norm, at)
        self.mlp = None if mlp is None else TorchMlp(mlp, parts, f"{at}mlp.")
        self.experts = None if experts is None else TorchExperts(experts, parts, f"{at}mlp.")
        beside = {name: Normed.of(parts, at + name, norm) for name, norm in blocks.beside_norms(block).items()}
        self.post_dense, self.pre_experts, self.post_experts = beside.values()
        layer_input = block.per_layer_input
        self.layer_input = None if layer_input is None else TorchLayerInput(layer_input, parts, at)
        self.out_scale = parts.vector(f"{at}layer_scalar.weight") if block.out_scale else None

    def run(self, ops: ReferenceOps, x: Tensor, i: int, step: Step, read: Tensor | None = None) -> Tensor:
        """Run the block on the residual stream x [T, H].

        read [T, ...]: the rows that attention reads; None = attention reads x after its norm.
        """
        before = x
        if self.attention is not None:
            y = normed(self.pre_attention, ops, x) if read is None else read
            x = self.attended(ops, x, self.attention.run(ops, y, i, step))
        if self.recurrence is not None and step.batch is not None:
            y = normed(self.pre_attention, ops, x)
            pool = None if step.cache is None else step.cache.pools.states[i]
            x = self.attended(ops, x, self.recurrence.run(ops, y, pool, step.states, step.batch))
        if self.mlp is not None or self.experts is not None:
            x = self.fed_forward(ops, x, before if self.spec.parallel else x, step.num_experts)
        if self.layer_input is not None and step.layer_inputs is not None:
            x = x + self.layer_input.run(ops, x, step.layer_inputs[:, i])
        return x if self.out_scale is None else x * self.out_scale

    def attended(self, ops: ReferenceOps, x: Tensor, branch: Tensor) -> Tensor:
        """Add a branch, the output of attention or of a recurrence, to rows x [T, H]."""
        return self._added(ops, x, branch, self.post_attention)

    def fed_forward(self, ops: ReferenceOps, x: Tensor, reads: Tensor, num_experts: list[int] | None = None) -> Tensor:
        """Add the output of the feed-forward part to rows x [T, H]. reads: the part's input rows, before their norm.

        num_experts: a list. A block with experts appends the number of experts that were chosen for at least one row.
        """
        y = normed(self.pre_mlp, ops, reads)
        parts = [] if self.mlp is None else [normed(self.post_dense, ops, self.mlp.run(ops, y))]
        if self.experts is not None:
            y = y if self.mlp is None else normed(self.pre_experts, ops, reads)
            part, num = self.experts.run(ops, y, reads)
            parts.append(normed(self.post_experts, ops, part))
            if num_experts is not None:
                num_experts.append(num)
        return self._added(ops, x, parts[0] if len(parts) == 1 else parts[0] + parts[1], self.post_mlp)

    def _added(self, ops: ReferenceOps, x: Tensor, branch: Tensor, post: Normed | None) -> Tensor:
        at_sum = self.spec.norm_at == "sum"
        branch = branch if at_sum else normed(post, ops, branch)
        if self.spec.branch_scale != 1:
            branch = branch * self.spec.branch_scale
        return normed(post, ops, x + branch) if at_sum else x + branch


# --------------------------------------------------------------------------------------------------------------- models


class TorchModel:
    """Weights and one forward pass over a ragged batch. The model knows nothing of drafts, requests or text.

    weights: a tensor for every name of `blocks.weights(spec)`; see ops.load_model. weight_dtype: the dtype of the
    weights. activation_dtype: the dtype of input and output rows. cache_dtype: the dtype of a KV cache for this model.
    The reference operators have one dtype for all three. join: the function that joins matrices with a common input
    into a Projections. None = Projections.of, which does not move the matrices in memory; only the reference operators
    can use this form. lent: for a draft head, the parts that it borrows from its target.
    """

    feeds_itself = False  # whether it has a `run_ahead` that takes a head's own rows as features

    def __init__(
        self,
        spec: Spec,
        weights: Mapping[str, Tensor],
        ops: ReferenceOps | None = None,
        join: Join | None = None,
        lent: Lent | None = None,
    ) -> None:
        if (why_not := supports(spec)) is not None:
            raise InternalError(f"model_type={spec.model_type!r} cannot be run in torch: {why_not}")
        self.config = spec
        self.ops = ops or ReferenceOps()
        self._lent = lent
        self.weights: Mapping[str, Tensor] = weights
        some = next(iter(weights.values()))
        self.place, self.device = some.device, some.device.type
        self.weight_dtype = self.cache_dtype = dtype_name(some.dtype)
        self.activation_dtype = self.ops.rows_dtype(self.weight_dtype)
        self.rows_dtype = torch_dtype(self.activation_dtype)
        self.make_pools = pools_on(str(some.device))
        self.rows = TorchRows(some.device, self.rows_dtype)
        parts = Parts(weights, self.rows_dtype, join or Projections.of)
        self._embedding = weights.get(EMBEDDING)
        self._head = self._embedding if spec.tied else weights.get(HEAD)
        self._head_bias = weights["lm_head.bias"] if spec.head_bias else None
        self._positions = self._table_of_positions()
        self._embed_norm = Normed.of(parts, "model.embed_norm", spec.embed_norm)
        self._final_norm = Normed.of(parts, FINAL_NORM.removesuffix(".weight"), spec.final_norm)
        self.blocks: list[TorchBlock] = []
        for i, block in enumerate(spec.blocks):
            shared = None if block.attention is None else block.attention.bias
            biased = self.blocks[shared].attention if isinstance(shared, int) else None
            self.blocks.append(TorchBlock(block, parts, f"model.layers.{i}.", biased))
        attentions = [a for block in spec.blocks if (a := block.attention) is not None]
        turns = dict.fromkeys((a.rope, a.head_dim) for a in attentions if a.rope is not None)
        self._features = None if spec.features is None else TorchFeatures(spec.features, parts)
        own_inputs = spec.layer_input
        self._layer_inputs = None if own_inputs is None else TorchLayerInputs(own_inputs, parts)
        self.encoder: TorchModel | None = None
        if spec.encoder is not None:
            names = [weight.name for weight in blocks.weights(spec.encoder)]
            of_decoder = "" if spec.encoder.own_embedding else EMBEDDING
            encoder_weights = {name: weights[name if name == of_decoder else blocks.of_encoder(name)] for name in names}
            self.encoder = self._made_encoder(spec.encoder, encoder_weights, join)
        self._rotations = {turn: TorchRotations(*turn, self.place, self.rows_dtype) for turn in turns}
        self._packed = None if join is None else parts.made
        if join is not None:  # the products hold the weights; these are dropped, so that nothing is in memory twice
            self.weights = {}

    def _made_encoder(self, spec: Spec, weights: Mapping[str, Tensor], join: Join | None) -> TorchModel:
        """Return the encoder's model. weights: the encoder's weights, by their names in its own spec."""
        return TorchModel(spec, weights, self.ops, join)

    def stored(self) -> Iterator[tuple[str, HostTensor]]:
        """Yield each weight with its name, as it is in memory. Raises BadOption if `join` took over the weights."""
        if self._packed is not None:
            raise BadOption("kv_disk is not built for these operators: leave it out")
        yield from ((name, host_of(weight)) for name, weight in self.weights.items())

    weight_bits: tuple[int, ...] = ()  # no weights are multiplied as integers here

    @property
    def precision(self) -> str:
        """The precision of the weights in words, such as "bfloat16 weights"."""
        return kinds_in_words((), [self.weight_dtype])

    @property
    def bytes_per_pass(self) -> int:
        """The bytes of weights that one pass of a few rows reads: every matrix once, as it is in memory.

        An untied embedding does not count, because only a few of its rows are looked up. In a mixture of experts, only
        the experts of a single row are counted.
        """
        unread = round(sum(block.experts.unread_bytes for block in self.blocks if block.experts is not None))
        if self._packed is not None:
            return sum(product.nbytes for product in self._packed) - unread
        looked_up = {LAYER_EMBEDDING, "" if self.config.tied else EMBEDDING}
        return sum(tensor.nbytes for name, tensor in self.weights.items() if name not in looked_up) - unread

    def forward(
        self,
        batch: RaggedBatch,
        cache: BlockCache | None,
        layers: Seq[int] | None = None,
        hidden: Tensor | None = None,
        taps: Seq[int] = (),
    ) -> Passed:
        """Run all new tokens through these layers, and write their keys and values into the cache.

        layers: ascending, with gaps allowed; None = all. hidden [T, H]: the input of the first layer; None = the
        tokens' embeddings. For a draft head, hidden is the tokens' features; None = zeros. Position embeddings are
        added to the input of layer 0. The returned rows are the output of the final norm if the last layer ran,
        otherwise the residual stream. taps: indices of layers; the residual stream before each of these layers is
        returned, too. The index num_layers means after all layers, before the final norm. Raises InternalError for
        layers, taps and rows that do not fit the model.
        """
        chosen, is_normed = check_pass(self.config, batch, layers, hidden, taps)
        views, sources = list[CacheView](), None
        if cache is not None:
            views = [self.ops.plan(cache.view(batch, kind), self.place) for kind in range(len(cache.kinds))]
            sources = None if self.encoder is None else self.ops.plan(_sources_of(batch, cache), self.place)
        elif self._sees_all:
            views = [self.ops.plan(_of_itself(batch), self.place)]
        tokens, positions = _on_device(batch, self.place)
        x, read = self._begun(tokens, positions, hidden, chosen)
        end = end_of(batch)
        rotations = {k: table.at(positions, end) for k, table in self._rotations.items()}
        inputs = None
        if self._layer_inputs is not None:
            inputs = self._layer_inputs.run(self.ops, tokens, self._embedded(tokens))
        states = self._states(batch, cache)
        step = Step(positions, rotations, cache, views, sources, inputs, batch=batch, states=states)
        first = 0
        inner = {k: self.rows.empty(len(x), self.config.hidden_size) for k in taps}
        for i in chosen:
            _write(inner, range(first, i + 1), x)
            first = i + 1
            x = self.blocks[i].run(self.ops, x, i, step, read)
            read = None
        _write(inner, range(first, self.config.num_layers + 1), x)
        return Passed(self.norm(x) if is_normed else x, inner, step.num_experts)

    def begin(self, sources: Mapping[int, Seq[int]], cache: BlockCache) -> None:
        """Run the encoder over each of its inputs, and write the keys and values that the decoder reads into the cache.

        sources: by cache slot, all token ids of an encoder input. Each token of an input sees the whole input. The
        caller has reserved the slot's cache rows, from the first on, and keeps them reserved.
        """
        if self.encoder is None:
            raise InternalError(f"model_type={self.config.model_type!r} has no encoder, and was given a source")
        rows = self.encoder.forward(batch_of_sources(sources), None).hidden
        rows_of = [cache.rows(slot, 0, len(tokens)) for slot, tokens in sources.items()]
        places = torch.from_numpy(np.concatenate(rows_of)).to(self.place)
        for i in cache.shape.kept:
            attention = self.blocks[i].attention
            if attention is not None and attention.spec.sees == "encoder":
                cache.pools[i].write(places, *attention.of_source(self.ops, rows))

    def _states(self, batch: RaggedBatch, cache: BlockCache | None) -> Seq[StateRun]:
        """Return, for each run, the states and rows that recurrent blocks read and write; () without such blocks."""
        if not self.config.has_states:
            return ()
        return runs_alone(batch) if cache is None or cache.states is None else cache.states.plan(batch)

    @property
    def _sees_all(self) -> bool:
        return any(block.attention is not None and block.attention.sees == "all" for block in self.config.blocks)

    def _begun(
        self, tokens: Tensor, positions: Tensor, hidden: Tensor | None, chosen: Seq[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the first layer's input x [T, H], and the rows that attention reads instead of x.

        None in place of the rows = attention reads x.
        """
        is_first = len(chosen) > 0 and chosen[0] == 0
        if self._features is None or not is_first or self._features.spec.input in ("features", "context"):
            x = self._embedded(tokens) if hidden is None else hidden.to(self.rows_dtype)
            return self._entered(x, positions) if hidden is None or is_first else x, None
        embedded = self._embedded(tokens).to(self.rows_dtype)
        features = torch.zeros_like(embedded) if hidden is None else hidden.to(self.rows_dtype)
        x, read = self._features.begun(self.ops, embedded, features)
        return self._entered(x, positions), read

    def features(self, layer_rows: Seq[Tensor]) -> Tensor:
        """Return a draft head's features [n, H].

        layer_rows: the target's hidden states [n, size] after each layer that the head reads.
        """
        if self._features is None:
            raise InternalError(f"model_type={self.config.model_type!r} is no head, and was given rows of a target")
        return self._features.of_rows(self.ops, layer_rows, self.rows_dtype)

    def fed(self, hidden: Tensor) -> Tensor:
        """Project the output of a draft head's final norm [n, H] to rows [n, size].

        These rows replace the target's hidden states when the head drafts its next token. Raises InternalError unless
        the head's features have feeds="projected".
        """
        if self._features is None or self._features.output is None:
            raise InternalError(f"model_type={self.config.model_type!r} has no matrix behind its final norm")
        return self._features.output.apply(self.ops, hidden)[0]

    def remember(self, batch: RaggedBatch, cache: BlockCache, layer_rows: Seq[Tensor]) -> None:
        """Write the keys and values of these tokens' features into the cache of a draft head with a context.

        batch: the runs of these tokens; their cache rows are reserved. layer_rows: see `features`.
        """
        if self._features is None:
            raise InternalError(f"model_type={self.config.model_type!r} is no head, and was given rows of a target")
        x = normed(self._features.context_norm, self.ops, self.features(layer_rows))
        positions, places = _on_device(batch, self.place)[1], cache.view(batch).write_rows
        rotations = {turn: table.at(positions, end_of(batch)) for turn, table in self._rotations.items()}
        for i, block in enumerate(self.blocks):
            if block.attention is None:
                continue
            a = block.attention.spec
            rotation = None if a.rope is None else rotations[a.rope, a.head_dim]
            projected = block.attention.project(self.ops, x, "k_proj")
            cache.pools[i].write(places, *block.attention.keys_values(self.ops, projected, rotation))

    def _table_of_positions(self) -> Tensor | None:
        positions = self.config.positions
        if positions is None or positions.kind == "learned":
            return None if positions is None else self.weights[POSITIONS]
        table = torch.from_numpy(sinusoids(positions.num + positions.offset, self.config.hidden_size))
        return table.to(self.place, self.rows_dtype)

    def _embedded(self, tokens: Tensor) -> Tensor:
        if self._embedding is None and self._lent is not None:
            target = self._lent.target
            return target._embedded(tokens) if isinstance(target, TorchModel) else target.embed(tokens.tolist())
        if self._embedding is None:
            raise InternalError(f"model_type={self.config.model_type!r} has no embedding, and was given no rows")
        x = F.embedding(tokens, self._embedding)
        if self.config.embed_scale == 1:
            return x
        return x * torch.tensor(self.config.embed_scale, dtype=x.dtype)  # rounded to the type, as published code does

    def _entered(self, x: Tensor, positions: Tensor) -> Tensor:
        """Make the first layer's input: x [T, H] plus position embeddings, normed. A spec may leave out either step."""
        if self._positions is not None and self.config.positions is not None:
            x = x + F.embedding(positions + self.config.positions.offset, self._positions)
        return normed(self._embed_norm, self.ops, x)

    def wait(self) -> None:
        """Wait until the device has computed all launched work. On a CPU, nothing is pending, so return at once."""
        if self.device == "cuda":
            torch.cuda.synchronize(self.place)

    def rounded(self, quantization: Quantization) -> TorchModel:
        """Return a second model with all matrices rounded and then dequantised; this model stays as it is.

        Raises BadOption if the group size does not divide the length of a row.
        """
        weights = RoundedWeights(
            blocks.weights(self.config),
            lambda name, rows: host_of(self.weights[name][rows.start : rows.stop]),
            lambda name: host_of(self.weights[name]),
            quantization,
            self.weight_dtype,
        )
        tensors = {name: tensor_of(weight, self.place) for name, weight in weights.items()}  # type: ignore[arg-type]
        return TorchModel(self.config, tensors, self.ops, lent=self._lent)

    def embed(self, ids: Seq[int]) -> Tensor:
        """Return the embeddings [n, H] of these token ids, without the positions that a pass adds.

        A draft head returns zeros, because it takes features in place of embeddings.
        """
        if self._features is not None:
            shape = len(ids), self.config.hidden_size
            return torch.zeros(shape, dtype=self.rows_dtype, device=self.place)
        return self._embedded(torch.tensor(ids, dtype=torch.int64, device=self.place))

    def weight(self, name: str) -> Floats:
        """Return a weight by its name in a checkpoint, float32."""
        return host_of(self.weights[name]).float32()

    def head(self, ids: Seq[int]) -> Floats:
        """Return the LM head's rows [n, H] for these token ids, on the host."""
        return host_of(self._lm_head()[list(ids)]).float32()

    def norm(self, hidden: Tensor) -> Tensor:
        """Apply the final norm to rows of the residual stream [R, H], so that `logits` can read an inner layer."""
        return normed(self._final_norm, self.ops, hidden.to(self.rows_dtype))

    def logits(self, hidden: Tensor, num_ids: int | None = None) -> Tensor:
        """Compute float32 logits: hidden [R, H] -> [R, V], or [R, num_ids] from only the first rows of the LM head."""
        if self._lent is not None and not self.config.head:
            return self._lent.target.logits(hidden, num_ids)  # type: ignore[no-any-return]
        bias = None if self._head_bias is None else self._head_bias[:num_ids]
        logits = self.ops.linear(hidden, self._lm_head()[:num_ids], bias).float()
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _lm_head(self) -> Tensor:
        if self._head is None:
            raise InternalError(f"model_type={self.config.model_type!r} has no LM head")
        return self._head


def empty_weights(spec: Spec, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
    """Allocate every weight of a spec without writing it: the system takes memory only when something is written.

    Matrices that share an input lie back to back in one storage, so that a model multiplies by all of them at once.
    """
    weights = blocks.weights(spec)
    tensors: dict[str, Tensor] = {}
    for group in blocks.products(weights).values():
        if len(group) > 1 and len({weight.shape[1:] for weight in group}) == 1:
            rows = [weight.shape[0] for weight in group]
            whole = torch.empty(sum(rows), *group[0].shape[1:], dtype=dtype, device=device)
            parts = torch.split_with_sizes(whole, rows)
            tensors.update({weight.name: part for weight, part in zip(group, parts, strict=True)})
    return {
        w.name: tensors[w.name] if w.name in tensors else torch.empty(w.shape, dtype=dtype, device=device)
        for w in weights
    }


def _sources_of(batch: RaggedBatch, cache: BlockCache) -> CacheView:
    """Return the cache rows of each run's encoder input. Raises InternalError for a run without an encoder input."""
    check_sources(batch)
    reads = [cache.rows(source.slot, 0, source.num_tokens) for source in batch.sources]
    return CacheView(batch, np.empty(0, np.int64), reads)


def _of_itself(batch: RaggedBatch) -> CacheView:
    """Return a view of a pass without a cache: each run sees only its own rows."""
    rows = np.arange(batch.run_starts[-1])
    return CacheView(batch, rows, [rows[batch.run(b).start : batch.run(b).stop] for b in range(len(batch.slots))])


def _write(taps: Mapping[int, Tensor], wanted: range, x: Tensor) -> None:
    """Copy the residual stream x [T, H] into the taps whose layer indices are in `wanted`."""
    for k, rows in taps.items():
        if k in wanted:
            rows.copy_(x)


def _on_device(batch: RaggedBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the token ids and the positions of a batch on a device, each int64 [T]."""
    if isinstance(batch.tokens, Tensor) and isinstance(batch.positions, Tensor):
        return batch.tokens, batch.positions
    ids = torch.tensor(batch.ids(), dtype=torch.int64, device=device)
    return ids[0], ids[1]
