"""Models of the CUDA backend: a pass of a few rows is one CUDA graph, with one copy to the device before it.

Blocks like Llama's or Gemma's run on fused kernels: two for the products of attention, two for the products of the
feed-forward part, and further kernels for all work between two products. Experts may take the place of the feed-forward
part (ops/cuda/experts.py). Other blocks run operator by operator, as in ops/torch.py, in the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from forerun import blocks
from forerun.blocks import Norm, Spec
from forerun.config import Quantization
from forerun.errors import BadOption, InternalError
from forerun.kv.cache import BlockCache
from forerun.ops.cuda.experts import CudaExperts, on_device
from forerun.ops.cuda.operators import SPLIT_KEYS, CudaOps, PartialSums
from forerun.ops.cuda.packed import CudaWeights, Packed
from forerun.ops.cuda.rows import (
    GRAPH_ROWS,
    NO_ROWS,
    Layout,
    Rows,
    fill,
    fill_alike,
    layout_alike,
    layout_of,
    rows_alike,
    rows_of,
    rows_of_themselves,
)
from forerun.ops.cuda.sampling import Cuts, Drawn, Sampler, Settings
from forerun.ops.passes import Lent, Passed, RanAhead, check_layers, check_pass, check_sources, end_of, kinds_in_words
from forerun.ops.quantising import RoundedWeights
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import Step, TorchBlock, TorchModel, Turn, _write
from forerun.ops.torch_parts import Normed
from forerun.ops.torch_tensors import DeviceWeights, host_of, torch_dtype
from forerun.sampling.arithmetic import Row
from forerun.types import Afar, Draw, Probs, RaggedBatch, Stop

GRAPH_TAIL = 64  # the most nodes on the path to a row of a tree, for passes in a graph
LEAST_POSITIONS = 4096  # of a table of cos and sin, which grows where a text is longer

WeightedNorm = tuple[Norm, Tensor | None, Tensor | None]  # a norm with its weights


@dataclass
class _ResidualStream:
    """The residual stream x [T, H] inside a pass, and the branch that is still to be added to x.

    post: the norm of the branch or, with at_sum, of the sum. scale: the factor by which the branch is multiplied.
    """

    x: Tensor
    branch: PartialSums | None = None
    post: WeightedNorm | None = None
    at_sum: bool = False
    scale: float = 1.0


class _FusedBlock:
    """A block that runs on fused kernels. The function `can_fuse` tells which blocks can run on them."""

    def __init__(self, ops: CudaOps, block: TorchBlock, dtype: torch.dtype) -> None:
        self.ops, self.block, self.dtype = ops, block, dtype
        spec, attention = block.spec, block.attention
        assert attention is not None
        assert attention.spec is not None
        self.attention, self.a = attention, attention.spec
        self.pre_attention, self.post_attention = _weighted(block.pre_attention), _weighted(block.post_attention)
        self.pre_mlp, self.post_mlp = _weighted(block.pre_mlp), _weighted(block.post_mlp)
        self.at_sum = spec.norm_at == "sum"
        self.scale = spec.branch_scale
        self.qkv = _whole(attention._products[0][1])
        self.o = attention.o.parts[0]
        self.mlp = block.mlp
        self.experts = cast("CudaExperts | None", block.experts)
        if self.mlp is not None:
            self.up = _whole(self.mlp.up)
            self.down = self.mlp.down.parts[0]

    def run(self, stream: _ResidualStream, i: int, step: Step, tables: Mapping[Turn, Tensor]) -> _ResidualStream:
        """Run the block. In the returned stream, the output of the feed-forward part is not added yet."""
        ops, a, rows = self.ops, self.a, cast(Rows, step.views[0])
        assert step.cache is not None
        x, y = added(ops, stream, self.pre_attention, self.dtype)
        pool = step.cache.pools[i]
        queries = self._heads(ops.product(y, *self.qkv), pool, rows, tables)
        attended = ops.attend(queries, pool, rows, a.window, self.attention.scoring, self.dtype)
        branch = ops.product(attended.view(len(x), -1), *self.o)
        stream = _ResidualStream(x, branch, self.post_attention, self.at_sum, self.scale)
        x, y = added(ops, stream, self.pre_mlp, self.dtype)
        return _ResidualStream(x, self._fed_forward(x, y), self.post_mlp, self.at_sum, self.scale)

    def _fed_forward(self, x: Tensor, y: Tensor) -> PartialSums:
        """Compute the feed-forward part, or the experts, on rows y, which are the rows x after their norm."""
        ops = self.ops
        if self.experts is not None:
            return self.experts.partial_sums(y, x)
        assert self.mlp is not None
        inner = ops.inner(self.mlp.spec.act, self.mlp.spec.gated, ops.product(y, *self.up), self.dtype)
        return ops.product(inner, *self.down)

    def _heads(self, product: PartialSums, pool: Any, rows: Rows, tables: Mapping[Turn, Tensor]) -> Tensor:
        """Return the queries [T, heads, D], and write keys and values into the pool."""
        a, attention = self.a, self.attention
        num = product.sums.shape[1]
        queries = torch.empty(num, a.heads, a.head_dim, dtype=torch.float32, device=product.sums.device)
        table = queries if a.rope is None else tables[a.rope, a.head_dim]
        q_norm, k_norm = attention.q_norm, attention.k_norm
        self.ops.kernels.heads_of[(num, a.heads + 2 * a.kv_heads)](
            product.sums,
            product.sums if product.bias is None else product.bias,
            queries if q_norm is None or q_norm.weight is None else q_norm.weight,
            queries if k_norm is None or k_norm.weight is None else k_norm.weight,
            table,
            rows.positions,
            rows.writes,
            queries,
            pool.keys,
            pool.values,
            num,
            *_eps_of(q_norm),
            *_eps_of(k_norm),
            SPLITS=product.splits,
            BIAS=product.bias is not None,
            Q_NORM=_kind_of(q_norm),
            K_NORM=_kind_of(k_norm),
            HEADS=a.heads,
            KV_HEADS=a.kv_heads,
            DIM=a.head_dim,
            TURNED=0 if a.rope is None else table.shape[-1],
            ADJACENT=a.rope is not None and a.rope.pairs == "adjacent",
            BLOCK=1 << (a.head_dim - 1).bit_length(),
            num_warps=1,
            **self.ops.launch,
        )
        return queries


def _whole(product: Any) -> tuple[Tensor, Tensor | None]:
    """Return the single matrix of a product, and its bias."""
    return product.joined if product.joined is not None else product.parts[0]  # type: ignore[no-any-return]


def _weighted(norm: Normed | None) -> WeightedNorm | None:
    return None if norm is None else (norm.norm, norm.weight, norm.bias)


def _eps_of(norm: Normed | None) -> tuple[float, float]:
    return (1.0, 0.0) if norm is None else (float(norm.norm.eps), float(norm.norm.offset))


def _kind_of(norm: Normed | None) -> str:
    return "none" if norm is None else "plain" if norm.weight is None else "weight"


def added(ops: CudaOps, stream: _ResidualStream, pre: WeightedNorm | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the residual stream with its branch added, and this sum after the norm `pre`."""
    if stream.branch is None and pre is None and dtype == stream.x.dtype:
        return stream.x, stream.x
    return ops.added(stream.x, stream.branch, stream.post, pre, dtype, at_sum=stream.at_sum, scale=stream.scale)


def can_fuse(block: TorchBlock) -> bool:
    """Tell whether a block can run on fused kernels."""
    spec, attention = block.spec, block.attention
    if attention is None or (block.mlp is None) == (block.experts is None):
        return False
    if block.mlp is not None and not block.mlp.spec.down:
        return False
    a = attention.spec
    is_causal_self = a.shares_kv_of is None and not a.k_is_v and a.reads is None and a.sees == "past" and a.bias is None
    plain = is_causal_self and not a.gate and a.position_scale is None
    norms = [norm for norm in (a.q_norm, a.k_norm) if norm is not None]
    if len(norms) == 1 or any(norm.kind != "rms" or norm.span != "head" or norm.bias for norm in norms):
        return False
    ropes = a.rope is None or a.rope.pairs == "half" or a.rope.pairs == "adjacent"
    simple = not spec.parallel and not spec.out_scale and a.v_norm is None and spec.per_layer_input is None
    products = [attention._products[0][1], *([] if block.mlp is None else [block.mlp.up])]
    whole = len(attention._products) == 1 and all(p.joined is not None or len(p.parts) == 1 for p in products)
    return plain and ropes and simple and whole and _same_biases(attention._products[0][1])


def _same_biases(product: Any) -> bool:
    """Return whether a product has a bias for all of its matrices or for none, as opposed to only some."""
    return len({bias is None for _, bias in product.parts}) == 1


# ----------------------------------------------------------------------------------------------------------- graphs


@dataclass
class _Graph:
    """A captured pass with the tensors that it reads and writes.

    keeps: other objects that must live as long as the graph.
    """

    replay: Callable[[], None]
    out: Tensor
    rows: Rows | None = None
    hidden: Tensor | None = None
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    keeps: Any = None


class _PlanBuffer:
    """The plan of a pass (see Rows) in a pinned array of the host, and the device buffer to which it is copied."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, is_cuda = layout, device.type == "cuda"
        self.host = torch.zeros(layout.size, dtype=torch.int32, pin_memory=is_cuda)
        self.device = torch.zeros(layout.size, dtype=torch.int32, device=device)
        self._array = self.host.numpy()
        self._sent: Any = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def send(self, batch: RaggedBatch, tables: Seq[Seq[int]], block_tokens: int, *, sees_all: bool) -> int:
        """Copy a pass's plan (Rows) to the device. Returns the largest number of keys that a row sees.

        sees_all: see `fill` in rows.py.
        """
        return self._send(lambda array: fill(array, self.layout, batch, tables, block_tokens, sees_all=sees_all))

    def send_alike(self, batch: RaggedBatch, tables: Seq[Seq[int]], lengths: Seq[int]) -> int:
        """Copy the plan (Rows) of a pass that writes no keys, and in which each row of run b sees lengths[b] keys.

        Returns the largest number of keys that a row sees.
        """
        return self._send(lambda array: fill_alike(array, self.layout, batch, tables, lengths))

    def _send(self, write: Callable[[Any], int]) -> int:
        if self._sent is not None:
            self._sent.synchronize()  # the previous copy may not have read the host's array yet
        most = write(self._array)
        self.device.copy_(self.host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return most


class CudaModel(TorchModel):
    """A model on a CUDA device. Input and output rows are float32. See TorchModel for the interface."""

    def __init__(self, spec: Spec, weights: CudaWeights, ops: ReferenceOps, lent: Lent | None = None) -> None:
        super().__init__(spec, weights, ops, weights.join, lent)
        self.weights, self._packed = weights, None  # super() dropped the weights, for backends that copy them
        self._cuda = cast(CudaOps, ops)
        self._expert_counts = on_device(self._cuda, self.blocks, torch_dtype(self.weight_dtype))
        self._fused_blocks = [
            _FusedBlock(self._cuda, b, torch_dtype(self.weight_dtype)) if can_fuse(b) else None for b in self.blocks
        ]
        self._captures = self.device == "cuda"
        self._graphs: dict[Any, _Graph] = {}
        self._plan_buffers: dict[Any, _PlanBuffer] = {}
        self._num_positions = 0
        self._sampler = Sampler(self._cuda.largest_in_parts)
        self._memory: Any = None  # the memory pool that all graphs share
        self._num_draws = 0
        inputs = self._layer_inputs
        if inputs is not None and isinstance(inputs.table, Packed):
            inputs.look_up = inputs.table.rows

    def _made_encoder(self, spec: Spec, weights: Mapping[str, Tensor], join: Any) -> TorchModel:
        assert isinstance(join.__self__, CudaWeights)
        return CudaModel(spec, join.__self__.of_encoder(weights), self.ops)

    # ------------------------------------------------------------------------------------------------- one pass

    @torch.inference_mode()
    def forward(
        self,
        batch: RaggedBatch,
        cache: BlockCache | None,
        layers: Seq[int] | None = None,
        hidden: Tensor | None = None,
        taps: Seq[int] = (),
    ) -> Passed:
        """Run one pass; see TorchModel.forward. The returned rows are float32, and `wait` fills in num_experts."""
        passed = self._pass(batch, cache, layers, hidden, taps)
        if self._expert_counts is None or not len(passed.hidden):
            return passed
        num_experts = list[int]()
        ran = self.blocks if layers is None else [self.blocks[i] for i in layers]
        self._expert_counts.fetch(num_experts, [b.experts.layer for b in ran if isinstance(b.experts, CudaExperts)])
        return replace(passed, num_experts=num_experts)

    def _pass(
        self,
        batch: RaggedBatch,
        cache: BlockCache | None,
        layers: Seq[int] | None = None,
        hidden: Tensor | None = None,
        taps: Seq[int] = (),
    ) -> Passed:
        """Run one pass, and return its result without the numbers of chosen experts."""
        chosen, is_normed = check_pass(self.config, batch, layers, hidden, taps)
        num = batch.run_starts[-1]
        if num == 0:
            nothing = torch.empty(0, self.config.hidden_size, device=self.place)
            return Passed(nothing, dict.fromkeys(taps, nothing))
        inner = {k: self.rows.empty(num, self.config.hidden_size) for k in taps}
        tables = [] if cache is None else cache.tables(batch)
        self._need_positions(end_of(batch))
        layout = layout_of(batch, tables)
        if cache is None and (self._sees_all or not any(block.attention for block in self.config.blocks)):
            out = self._run(rows_of_themselves(batch, self.place), cache, chosen, is_normed, hidden, inner)
            return Passed(out, inner)
        if cache is None or not self._captures or num > GRAPH_ROWS[-1] or layout.tail > GRAPH_TAIL:
            block_tokens = 1 if cache is None else cache.block_tokens
            rows = rows_of(batch, tables, block_tokens, self.place, sees_all=self._sees_all)
            sources = None if cache is None else self._rows_of_sources(batch, cache)
            out = self._run(rows, cache, chosen, is_normed, hidden, inner, sources)
            return Passed(out, inner)
        wanted = tuple(chosen), is_normed, hidden is not None, tuple(sorted(taps))
        graph = self._graph(batch, cache, tables, layout, wanted)
        if graph.hidden is not None and hidden is not None:
            graph.hidden[:num].copy_(hidden)
        graph.replay()
        for k, rows_of_tap in inner.items():
            rows_of_tap.copy_(graph.taps[k][:num])
        return Passed(graph.out[:num].clone(), inner)

    def wait(self) -> None:
        """Wait until everything that was launched is computed, and fill in the expert counts of `forward`."""
        super().wait()
        if self._expert_counts is not None:
            self._expert_counts.append_counts()

    def _run(
        self,
        rows: Rows,
        cache: BlockCache | None,
        chosen: Seq[int],
        is_normed: bool,
        hidden: Tensor | None,
        taps: Mapping[int, Tensor],
        sources: Rows | None = None,
    ) -> Tensor:
        """Launch the kernels of one pass, and return the output rows.

        chosen: the layers to run. is_normed: whether the final norm follows. taps: by k, the tensor that receives the
        residual stream before layer k.
        """
        ops = self._cuda
        x, read = self._begun(rows.ids, rows.positions, hidden, chosen)
        stream = _ResidualStream(x.float().contiguous())
        tables = {turn: self._table(turn) for turn in self._rotations}
        inputs = None
        if self._layer_inputs is not None:
            inputs = self._layer_inputs.run(ops, rows.ids, self._embedded(rows.ids))
        step = Step(rows.positions, {}, cache, [rows], sources, inputs)
        if self._expert_counts is not None:
            self._expert_counts.live = None if cache is None else rows.lengths
        first = 0
        for i in chosen:
            if any(k in taps for k in range(first, i + 1)):
                stream = _ResidualStream(added(ops, stream, None, torch.float32)[0])
                _write(taps, range(first, i + 1), stream.x)
            first = i + 1
            fused = self._fused_blocks[i]
            if fused is not None and read is None and cache is not None:
                stream = fused.run(stream, i, step, tables)
            else:
                if not step.rotations:
                    step.rotations = {
                        turn: (table[rows.positions, 0, None], table[rows.positions, 1, None])
                        for turn, table in tables.items()
                    }
                x = added(ops, stream, None, torch.float32)[0]
                stream = _ResidualStream(self.blocks[i].run(ops, x, i, step, read))
            read = None
        if taps:
            stream = _ResidualStream(added(ops, stream, None, torch.float32)[0])
            _write(taps, range(first, self.config.num_layers + 1), stream.x)
        norm = _weighted(self._final_norm) if is_normed else None
        x, y = added(ops, stream, norm, torch.float32)
        return y if is_normed else x

    def _embedded(self, tokens: Tensor) -> Tensor:
        if not isinstance(self._embedding, Packed):
            return super()._embedded(tokens).float()
        x = self._embedding.rows(tokens)
        if self.config.embed_scale == 1:
            return x
        return x * float(torch.tensor(self.config.embed_scale, dtype=torch_dtype(self.weight_dtype)))

    def _table(self, turn: Turn) -> Tensor:
        """Return cos and sin of every position that was needed so far, [positions, 2, turned dimensions]."""
        table = self._rotations[turn].table(self._num_positions)
        return table.view(len(table), 2, -1)

    def _need_positions(self, end: int) -> None:
        """Grow the rotation tables to at least `end` positions, and drop the graphs, which read the shorter tables."""
        if end > self._num_positions:
            self._num_positions = max(LEAST_POSITIONS, 1 << (end - 1).bit_length())
            for rotations in self._rotations.values():
                rotations.table(self._num_positions)
            self._graphs.clear()

    # -------------------------------------------------------------------------------------------------- graphs

    def _graph(
        self,
        batch: RaggedBatch,
        cache: BlockCache,
        tables: Seq[Seq[int]],
        layout: Layout,
        wanted: tuple[tuple[int, ...], bool, bool, tuple[int, ...]],
    ) -> _Graph:
        """Return the graph that serves a pass of this shape, and send the plan of the pass (Rows) to the device.

        If there is no such graph yet, it is captured first. wanted: the layers to run, whether the final norm follows,
        whether `hidden` replaces the embeddings, and the layers of `taps`.
        """
        size = next(n for n in GRAPH_ROWS if n >= layout.rows)
        runs = next(n for n in GRAPH_ROWS if n >= layout.runs)
        tail = 1 if layout.tail == 1 else GRAPH_TAIL
        whole = Layout(size, tail, runs, max(64, 1 << (layout.blocks - 1).bit_length()))
        buffer = self._plan_buffers.get(whole)
        if buffer is None:
            buffer = self._plan_buffers[whole] = _PlanBuffer(whole, self.place)
        most = buffer.send(batch, tables, cache.block_tokens, sees_all=self._sees_all)
        splits = max(1, -(-most // SPLIT_KEYS))
        num_keys = SPLIT_KEYS << (splits - 1).bit_length()
        sources, of_sources = self._sent_sources(batch, cache, size, runs)
        key = (whole, num_keys, of_sources, wanted, id(cache))
        chosen, is_normed, has_hidden, taps = wanted
        if key not in self._graphs:
            rows = self._static_rows(batch, buffer, whole, cache, num_keys)
            shape = size, self.config.hidden_size
            hidden = torch.zeros(shape, device=self.place) if has_hidden else None
            static = {k: torch.empty(shape, device=self.place) for k in taps}

            def run() -> Tensor:
                return self._run(rows, cache, chosen, is_normed, hidden, static, sources=sources)

            replay, out = self._captured(run)
            self._graphs[key] = _Graph(replay, out, rows, hidden, static, (cache, buffer))
        return self._graphs[key]

    def _static_rows(
        self, batch: RaggedBatch, buffer: _PlanBuffer, layout: Layout, cache: BlockCache, num_keys: int
    ) -> Rows:
        return Rows(batch, NO_ROWS, [], buffer.device, layout, cache.block_tokens, num_keys)

    def _rows_of_sources(self, batch: RaggedBatch, cache: BlockCache) -> Rows | None:
        """Return a plan by which each row sees the cached encoder input of its run, or None if there is no encoder."""
        if self.encoder is None:
            return None
        check_sources(batch)
        tables = [cache.table(source.slot) for source in batch.sources]
        lengths = [source.num_tokens for source in batch.sources]
        return rows_alike(batch, tables, cache.block_tokens, lengths, self.place)

    def _sent_sources(self, batch: RaggedBatch, cache: BlockCache, rows: int, runs: int) -> tuple[Rows | None, Any]:
        """In a model with an encoder, copy to the device which encoder rows each row of a pass attends to.

        The copy is padded to the size of a CUDA graph: `rows` rows and `runs` sequences. Returns the copy as Rows, and
        the part of the graph's key that depends on the sizes of the copy. If there is no encoder, both are None.
        """
        if self.encoder is None:
            return None, None
        check_sources(batch)
        tables = [cache.table(source.slot) for source in batch.sources]
        blocks = max(64, 1 << (layout_alike(batch, tables).blocks - 1).bit_length())
        layout = Layout(rows, 1, runs, blocks)
        key = ("sources", layout)
        if key not in self._plan_buffers:
            self._plan_buffers[key] = _PlanBuffer(layout, self.place)
        buffer = self._plan_buffers[key]
        most = buffer.send_alike(batch, tables, [source.num_tokens for source in batch.sources])
        num_keys = SPLIT_KEYS << (max(1, -(-most // SPLIT_KEYS)) - 1).bit_length()
        source_rows = self._static_rows(batch, buffer, layout, cache, num_keys)
        return source_rows, (layout, num_keys)

    def _captured(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Run a function once, then capture it as a graph.

        Returns the function that replays the graph, and the result that each replay overwrites.
        """
        with torch.inference_mode():
            stream = torch.cuda.Stream(self.place)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self.place))
            with torch.cuda.stream(stream):
                run()  # compiles the kernels
            torch.cuda.current_stream(self.place).wait_stream(stream)
            torch.cuda.synchronize(self.place)
            graph = torch.cuda.CUDAGraph()
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._memory, stream=stream):
                out = run()
        return graph.replay, out

    # ------------------------------------------------------------------------------------------------ the head

    @torch.inference_mode()
    def best(self, hidden: Tensor, rows: list[int], num_ids: int) -> tuple[list[int], list[float]]:
        """Return the token id and the value of the largest logit in each row of hidden [T, H] that `rows` lists.

        Only the first `num_ids` ids are considered. Ties go to the lowest id, and NaN counts as the largest. The
        results come to the host in one copy.
        """
        if not rows:
            return [], []
        largest = self._best(hidden if len(rows) == len(hidden) else hidden[rows], num_ids)
        ids, values = largest.cpu().tolist()
        return [int(id_) for id_ in ids], values

    def _best(self, hidden: Tensor, num_ids: int) -> Tensor:
        """Return the token id and the value of each row's largest logit, float32 [2, R]."""
        num = len(hidden)
        if not self._captures or num > GRAPH_ROWS[-1]:
            return self._largest(hidden, num_ids)
        size = next(n for n in GRAPH_ROWS if n >= num)
        key = ("best", size, num_ids)
        if key not in self._graphs:
            given = torch.zeros(size, self.config.hidden_size, device=self.place)
            replay, out = self._captured(lambda: self._largest(given, num_ids))
            self._graphs[key] = _Graph(replay, out, hidden=given)
        graph = self._graphs[key]
        assert graph.hidden is not None
        graph.hidden[:num].copy_(hidden)
        graph.replay()
        return graph.out[:, :num]

    def _largest(self, hidden: Tensor, num_ids: int) -> Tensor:
        return self._cuda.largest(self.logits(hidden, num_ids))[0]

    # ------------------------------------------------------------------------------------------- draws from rows

    tells_confidence, draws_ahead = False, True  # `run_ahead` takes draws

    @torch.inference_mode()
    def draw(
        self, hidden: Tensor, rows: list[int], num_ids: int, draws: Seq[Draw], asked: Seq[Seq[int]]
    ) -> tuple[list[Probs], list[int]]:
        """Draw a token id for each row of hidden [T, H] that `rows` lists; draws[i] has the settings for rows[i].

        Only the first `num_ids` ids can be drawn. asked: by row, further ids whose probabilities are wanted. Returns
        each row's distribution and likeliest id. The likeliest id is -1 where the row's largest logit is NaN or
        infinite. The weights of the distributions stay on the device, and can be fetched until the next draw. All other
        results come to the host in one copy.
        """
        drawn = self._drawn(hidden if len(rows) == len(hidden) else hidden[rows], num_ids, draws)
        width = drawn.probs.shape[1]
        flat = [i * width + id_ for i, ids in enumerate(asked) for id_ in ids if id_ < width]
        chances = drawn.probs.view(-1)[torch.tensor(flat, dtype=torch.int64).to(self.place)]
        num = len(rows)
        parts = (drawn.ids[:num], drawn.best[:num], drawn.chances[:num].view(torch.int32), chances.view(torch.int32))
        numbers = torch.cat(parts).cpu()
        ids, best = numbers[:num].tolist(), numbers[num : 2 * num].tolist()
        floats = numbers[2 * num :].view(torch.float32).tolist()
        of_asked = iter(floats[num:])
        known = [{id_: next(of_asked) for id_ in ids if id_ < width} for ids in asked]
        distributions = list[Probs]()
        for i, draw in enumerate(draws):
            chances_of = known[i] | {ids[i]: floats[i]}
            distributions.append(_afar(draw, ids[i], chances_of, self._fetching(drawn.probs, i)))
        return distributions, best

    def _fetching(self, probs: Tensor, row: int) -> Callable[[], Row]:
        """Return a function that copies a row of `probs` to the host; after the next draw, it raises InternalError."""
        number = self._num_draws

        def fetch() -> Row:
            if number != self._num_draws:
                raise InternalError("a distribution was asked for behind the next draws from rows of its model")
            return probs[row].cpu().numpy()

        return fetch

    def _drawn(self, hidden: Tensor, num_ids: int, draws: Seq[Draw]) -> Drawn:
        """Draw a token id for each row of hidden [R, H] from its logits. The result is valid until the next call."""
        self._num_draws += 1
        num, cuts = len(hidden), Cuts.of(draws, num_ids)
        size = next((n for n in GRAPH_ROWS if n >= num), num) if self._captures else num
        key = ("draw", size, num_ids, cuts)
        if self._captures and size <= GRAPH_ROWS[-1]:
            if key not in self._graphs:
                given = torch.zeros(size, self.config.hidden_size, device=self.place)
                settings = Settings(size, num_ids, self.place)
                settings.send(draws)
                depths = torch.zeros(size, dtype=torch.int32, device=self.place)

                def run() -> Drawn:
                    return self._sampler.draw(self.logits(given, num_ids), settings.device, depths, cuts)

                replay, drawn = self._captured(run)
                self._graphs[key] = _Graph(replay, drawn.probs, hidden=given, keeps=(settings, drawn, depths))
            graph = self._graphs[key]
            assert graph.hidden is not None
            graph_settings, graph_drawn, _ = graph.keeps
            graph_settings.send(draws)
            graph.hidden[:num].copy_(hidden)
            graph.replay()
            return graph_drawn  # type: ignore[no-any-return]
        alone = Settings(num, num_ids, self.place)
        alone.send(draws)
        none = torch.zeros(num, dtype=torch.int32, device=self.place)
        return self._sampler.draw(self.logits(hidden, num_ids), alone.device, none, cuts)

    # --------------------------------------------------------------------------------------------- running ahead

    @torch.inference_mode()
    def run_ahead(
        self,
        batch: RaggedBatch,
        lengths: list[int],
        cache: BlockCache,
        num_ids: int,
        layers: Seq[int] | None = None,
        hidden: Tensor | None = None,
        *,
        stops: Seq[Stop] = (),
        layer_rows: Seq[Tensor] = (),
        draws: Seq[Draw] = (),
    ) -> RanAhead | None:
        """Continue each run; see CpuModel.run_ahead. The host waits for the device once, or twice with draws."""
        chosen = range(self.config.num_layers) if layers is None else layers
        check_layers(self.config, chosen)
        if not batch.slots:
            return RanAhead([])
        out = self._pass(batch, cache, layers, hidden).hidden
        if layers is not None and self.config.num_layers - 1 not in layers:
            out = self.norm(out)
        num, steps = len(batch.slots), max(lengths)
        lasts = [stop - 1 for stop in batch.run_starts[1:]]
        self._need_positions(end_of(batch) + steps)
        rows = out if num == len(out) else out[lasts]
        distributions = _DrawnDistributions(draws)
        if draws:
            drawn = self._drawn(rows, num_ids, draws)
            next_ids = drawn.ids[:num]
            distributions.add(drawn)
        else:
            next_ids = self._ids(rows, num_ids)
        if steps == 1:
            ids = self._ids_by_run(next_ids[None].tolist(), lengths)
        else:
            ids = self._go_on(batch, lengths, cache, num_ids, tuple(chosen), next_ids, distributions)
        return None if ids is None else RanAhead(ids, probs=distributions.probs_of(ids))

    def _go_on(
        self,
        batch: RaggedBatch,
        lengths: list[int],
        cache: BlockCache,
        num_ids: int,
        chosen: tuple[int, ...],
        first_ids: Tensor,
        distributions: _DrawnDistributions,
    ) -> list[list[int]] | None:
        """Continue each run after its first id. Return all ids by run, or None if a row's largest logit is not finite.

        chosen: the layers to run. first_ids: the first id of each run. distributions: has the settings of the draws,
        and receives the draws of each pass. Each pass replays a graph that ends with the choice of the next ids.
        """
        num, steps = len(batch.slots), max(lengths)
        size = next((n for n in GRAPH_ROWS if n >= num), num)
        starts = list(range(num + 1))
        positions = [batch.ids()[1][stop - 1] for stop in batch.run_starts[1:]]
        cached = [batch.end(b) - 1 for b in range(num)]
        tables = cache.tables(batch)
        last = RaggedBatch([0] * num, positions, starts, batch.slots, cached, sources=batch.sources)
        blocks = max(64, 1 << (max(map(len, tables)) - 1).bit_length())
        layout = Layout(size, 1, size, blocks)
        most = max(cached) + steps + 1
        num_keys = SPLIT_KEYS << (max(1, -(-most // SPLIT_KEYS)) - 1).bit_length()
        sources, of_sources = self._sent_sources(last, cache, size, size)
        cuts = Cuts.of(distributions.draws, num_ids) if distributions.draws else None
        key = ("ahead", layout, num_keys, of_sources, chosen, num_ids, id(cache), cuts)
        loop = self._graphs.get(key)
        if loop is None:
            loop = self._graphs[key] = self._loop(last, layout, num_keys, cache, chosen, num_ids, cuts, sources)
        state: _RunAheadState = loop.keeps
        if state.settings is not None:
            state.settings.send(distributions.draws)
        limits = [start + length for start, length in zip(cached, lengths, strict=True)]
        state.begin(last, tables, cache.block_tokens, limits, first_ids)
        for _ in range(steps - 1):
            loop.replay()
            if state.drawn is not None:
                distributions.add(state.drawn)
        state.fed[steps - 1].copy_(state.next_ids)
        return self._ids_by_run(state.fed[:steps, :num].cpu().tolist(), lengths)

    def _loop(
        self,
        batch: RaggedBatch,
        layout: Layout,
        num_keys: int,
        cache: BlockCache,
        chosen: tuple[int, ...],
        num_ids: int,
        cuts: Cuts | None,
        sources: Rows | None,
    ) -> _Graph:
        state = _RunAheadState(layout, self.place)
        if cuts is not None:
            state.settings = Settings(layout.rows, num_ids, self.place)
        rows = Rows(batch, NO_ROWS, [], state.plan, layout, cache.block_tokens, num_keys)

        def run() -> Tensor:
            self._cuda.kernels.advanced[(layout.rows,)](
                state.next_ids,
                state.fed,
                state.step,
                rows.ids,
                rows.positions,
                rows.writes,
                rows.lengths,
                rows.seen,
                rows.runs,
                state.limits,
                rows.tables,
                rows.tables.stride(0),
                cache.block_tokens,
                layout.rows,
                **self._cuda.launch,
            )
            out = self._run(rows, cache, chosen, True, None, {}, sources=sources)
            if state.settings is None or cuts is None:
                state.next_ids.copy_(self._ids(out, num_ids))
            else:
                logits = self.logits(out, num_ids)
                state.drawn = self._sampler.draw(logits, state.settings.device, state.step, cuts)
                state.next_ids.copy_(state.drawn.ids)
            return state.next_ids

        if not self._captures:
            return _Graph(lambda: (run(), None)[1], state.next_ids, rows, keeps=state)
        replay, out = self._captured(run)
        return _Graph(replay, out, rows, keeps=state)

    def _ids(self, hidden: Tensor, num_ids: int) -> Tensor:
        """Return each row's likeliest token id, int32 on the device; -1 where the largest logit is NaN or infinite."""
        return self._cuda.largest(self.logits(hidden, num_ids))[1]

    @staticmethod
    def _ids_by_run(ids_of_steps: list[list[int]], lengths: list[int]) -> list[list[int]] | None:
        ids = [[ids_of_steps[i][b] for i in range(length)] for b, length in enumerate(lengths)]
        return None if any(id_ < 0 for run_ids in ids for id_ in run_ids) else ids

    # ------------------------------------------------------------------------------------------------- the rest

    @property
    def weight_bits(self) -> tuple[int, ...]:  # type: ignore[override]
        """The bit widths of the quantised matrices, ascending; () = no matrix is quantised."""
        return tuple(sorted({w.bits for w in cast(CudaWeights, self.weights).values() if isinstance(w, Packed)}))

    @property
    def precision(self) -> str:
        """The precision of the weights in words, such as "4-bit and 8-bit weights" or "bfloat16 weights"."""
        dense = any(part.ndim > 1 for part in self.weights.values() if isinstance(part, Tensor))
        return kinds_in_words(self.weight_bits, [self.weight_dtype] * (dense or not self.weight_bits))

    def rounded(self, quantization: Quantization) -> CudaModel:
        """Return a second model of these weights with every matrix rounded; this model stays as it is.

        Raises BadOption if some matrix already has at most `quantization.bits` bits, or if the group size does not
        divide the length of a row.
        """
        if self.weight_bits and self.weight_bits[0] <= quantization.bits:
            raise BadOption(
                f"quantization={str(quantization)!r} is not possible: the model has {self.precision} in memory; load "
                "it from an unquantised checkpoint"
            )
        weights = RoundedWeights(
            blocks.weights(self.config),
            lambda name, rows: host_of(self._dense_rows(name, rows)),
            lambda name: host_of(self.weights[name]),
            quantization,
            None,
        )
        placed = DeviceWeights(weights, self.device)
        return CudaModel(self.config, CudaWeights(self.config, placed), self.ops, self._lent)

    def _dense_rows(self, name: str, rows: range) -> Tensor:
        """Return rows of a matrix, dequantised where the matrix is packed."""
        matrix = self.weights[name][rows.start : rows.stop]
        return matrix.float() if isinstance(matrix, Packed) else matrix


MOST_AHEAD = 256  # passes of one call of `run_ahead`


def _afar(draw: Draw, id_: int, chances: Mapping[int, float], fetch: Callable[[], Row]) -> Probs:
    """Return the distribution from which a token id was drawn on the device.

    chances: the probabilities that are already on the host, by id. fetch: copies the whole distribution.
    """
    if id_ < 0 or draw.filters[0] == 0:
        return Probs.of_point(id_)
    return Probs(afar=Afar(fetch, chances, draw, id_))


class _DrawnDistributions:
    """The probabilities of the ids that `run_ahead` draws, and whole distributions where verification may need them.

    Verification needs no whole distributions if the drafter shares the noise of its target. A rejected token is then
    replaced without a look at the draft's distributions.
    """

    def __init__(self, draws: Seq[Draw]) -> None:
        self.draws = draws
        self._keeps_rows = any(not draw.shares_noise and draw.filters[0] > 0 for draw in draws)
        self._chances: list[Tensor] = []
        self._rows: list[Tensor] = []

    def add(self, drawn: Drawn) -> None:
        """Copy the draws of one pass before the next pass overwrites them."""
        num = len(self.draws)
        self._chances.append(drawn.chances[:num].clone())
        if self._keeps_rows:
            self._rows.append(drawn.probs[:num].clone())

    def probs_of(self, ids: list[list[int]]) -> list[list[Probs]]:
        """Return, by run, the distribution from which each id was drawn."""
        chances = torch.stack(self._chances).tolist() if self._chances else []
        return [
            [_afar(draw, id_, {id_: chances[i][b]}, self._fetching(i, b)) for i, id_ in enumerate(run_ids)]
            for b, (draw, run_ids) in enumerate(zip(self.draws, ids, strict=False))
        ]

    def _fetching(self, step: int, row: int) -> Callable[[], Row]:
        def fetch() -> Row:
            if not self._rows:
                raise InternalError("the rows of a draft that shares its target's noise were not kept")
            return self._rows[step][row].cpu().numpy()

        return fetch


class _RunAheadState:
    """The data that `run_ahead` keeps on the device between its passes."""

    settings: Settings | None = None  # how rows are drawn; None = they take the likeliest id
    drawn: Drawn | None = None  # the draws of the last pass

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.plan = torch.zeros(layout.size, dtype=torch.int32, device=device)
        self.next_ids = torch.zeros(layout.rows, dtype=torch.int32, device=device)
        self.fed = torch.zeros(MOST_AHEAD, layout.rows, dtype=torch.int32, device=device)
        self.step = torch.zeros(layout.rows, dtype=torch.int32, device=device)
        self.limits = torch.zeros(layout.rows, dtype=torch.int32, device=device)
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(layout.size + layout.rows, dtype=torch.int32, pin_memory=is_cuda)

    def begin(
        self, batch: RaggedBatch, tables: Seq[Seq[int]], block_tokens: int, limits: list[int], first_ids: Tensor
    ) -> None:
        """Prepare to continue each run after its last row.

        first_ids: for each run, the first token id to feed. limits: for each run, the position from which on no row is
        written to the cache.
        """
        array = self._host.numpy()
        size, num = self.layout.size, len(limits)
        fill(array[:size], self.layout, batch, tables, block_tokens)
        array[size : size + num] = limits
        self.plan.copy_(self._host[:size], non_blocking=True)
        self.limits.copy_(self._host[size:], non_blocking=True)
        self.next_ids[:num].copy_(first_ids)
        self.step.zero_()
