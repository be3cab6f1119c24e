"""The reference operators, in torch, on any device.

The operators have two modes. *Fast* gives whole batches to torch's libraries, whose kernels round differently for
different batch shapes. *row_by_row* copies each row to a fresh buffer and computes the row alone, with attention over
exactly the keys that the row sees. The bits of a row then depend on that row alone, not on the rest of the batch. This
mode is slow; bitwise tests compare with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.blocks import Act, Buckets
from forerun.host_tensor import HostTensor
from forerun.ops.operators import Operators
from forerun.ops.rotary import buckets_of_distances
from forerun.ops.torch_pools import TorchPool
from forerun.ops.torch_tensors import tensor_of
from forerun.types import CacheView

# A private operator of torch's oneDNN build; where it is missing, F.linear serves.
_ONEDNN_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch._C._has_mkldnn else None
ONEDNN_MIN_WEIGHTS = 1 << 20
FOLD_MAX_ROWS = 16
SCORES_AT_ONCE = 1 << 20  # the scores of one head (rows x keys) in memory, where `_scored` computes them

Rows = slice | Tensor


@dataclass(frozen=True)
class Plan(CacheView):
    """A cache view with the data that attention derives from it once per pass instead of once per layer.

    writes: the cache rows to write. reads[b]: the cache rows of the keys of run b (the new tokens of one sequence). A
    slice stands for consecutive rows, which can be read without a copy. masks: the masks by run and window, float32 [n,
    keys of the run], 0 or -inf; None = no mask is needed.
    """

    writes: Rows = field(default_factory=lambda: slice(0, 0))
    reads: list[Rows] = field(default_factory=list)
    masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)
    device: torch.device | str = "cpu"

    def mask(self, b: int, window: int | None) -> Tensor | None:
        """Return the mask of run b for a sliding window, or None if the run has one row and this row sees every key."""
        if (b, window) not in self.masks:
            sees_all = len(self.batch.run(b)) == 1 and window is None and not self.batch.is_tree(b)
            self.masks[b, window] = None if sees_all else run_mask(self, b, window).to(self.device)
        return self.masks[b, window]

    def positions(self, b: int) -> Tensor:
        """Return the logical position of each cache row that run b reads, [rows]. The run's own rows come last.

        A pending row (not committed yet) that no row of the run sees gets its index as a placeholder, because no row
        uses its position.
        """
        places = list(range(self.batch.end(b)))
        if self.batch.is_tree(b):
            cached = self.batch.cached[b]
            for path in self.batch.seen(b):
                for depth, j in enumerate(path):
                    places[cached + j] = cached + depth
        return torch.tensor(places, device=self.device)


@dataclass(frozen=True)
class Scoring:
    """The ways in which attention scores differ from q k / sqrt(D); see blocks.Attention.

    scale: the factor of scores; None = 1 / sqrt(D). sinks [heads]: the attention sinks. buckets: the division of
    distances into buckets. table [buckets, heads]: the bias of each bucket. sees_all: whether every row sees all rows
    of its run.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    buckets: Buckets | None = None
    table: Tensor | None = None
    sees_all: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether scores are only scaled by a number."""
        return self.softcap is None and self.sinks is None and self.buckets is None

    def bias(self, distances: Tensor) -> Tensor | None:
        """Return the bias [heads, n, m] for distances [n, m] from rows back to keys; None if this scoring has no bias.

        The distance to a later key is negative.
        """
        if self.buckets is None or self.table is None:
            return None
        return self.table[bucket_of(distances, self.buckets)].permute(2, 0, 1).float()


PLAIN = Scoring()


@dataclass(frozen=True)
class Gated:
    """The operands of the gated delta rule for each token. The rule updates a state [key_dim, value_dim] for each head.

    q, k: [T, heads, key_dim]. v: [T, heads, value_dim]. beta, decay: [T, heads]; decay multiplies the state.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor

    def after(self, token: int, state: Tensor) -> Tensor:
        """Return the state [heads, key_dim, value_dim] after a token, from the state before that token."""
        k, v = self.k[token], self.v[token]
        state = state * self.decay[token][:, None, None]
        known = (state * k[:, :, None]).sum(1)
        return state + k[:, :, None] * ((v - known) * self.beta[token][:, None])[:, None]

    def read(self, token: int, state: Tensor) -> Tensor:
        """Return a token's output [heads, value_dim], read from the state after that token."""
        return (state * self.q[token][:, :, None]).sum(1)


class ReferenceOps(Operators):
    """Operators over rows: x is [T, features], one row per token."""

    def __init__(self, *, row_by_row: bool = False) -> None:
        self.row_by_row = row_by_row
        self.row_invariant = row_by_row
        self.extra_row = 1.0 if row_by_row else Operators.extra_row
        self.name = "reference_row_by_row" if row_by_row else "reference"

    @property
    def build(self) -> str:
        """The version of torch, and the instruction set that it uses."""
        return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"

    @property
    def num_threads(self) -> int:
        """The number of torch's threads that compute on a CPU."""
        return torch.get_num_threads()

    def inference(self) -> AbstractContextManager[Any]:
        """Return a context in which nothing is recorded for gradients."""
        return torch.inference_mode()

    def auto_dtype(self, device: str, stored: str) -> str:
        """Return float32 on a CPU, where it is torch's fastest dtype, and the stored dtype on other devices."""
        return "float32" if device == "cpu" else stored

    def multiplier(self, model: Any, matrix: HostTensor, bias: HostTensor | None = None) -> Callable[[Tensor], Tensor]:
        """See `Operators.multiplier`."""
        operands = [
            None if part is None else tensor_of(part.to(model.weight_dtype), model.place) for part in (matrix, bias)
        ]
        return lambda rows: self.linear(rows.to(model.rows_dtype), operands[0], operands[1])  # type: ignore[arg-type]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply: x [T, I], weight [O, I], bias [O] -> [T, O]."""
        return self._rows(lambda row: _linear(row, weight, bias), x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the root mean square norm over the last dimension, in float32 (Zhang and Sennrich 2019, eq. 4)."""
        return self._rows(lambda row: _rms_norm(row, weight, eps), x)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Compute the layer norm over the last dimension, in float32 (Ba et al. 2016, eq. 4)."""
        return self._rows(lambda row: _layer_norm(row, weight, bias, eps), x)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute silu(gate) * up, the gated activation of the feed-forward block."""
        return self._rows(lambda g, u: F.silu(g) * u, gate, up)

    def activated(self, act: Act, x: Tensor) -> Tensor:
        """Apply an activation to every element of x."""
        return self._rows(ACTIVATIONS[act], x)

    def gated(self, act: Act, gate: Tensor, up: Tensor) -> Tensor:
        """Compute act(gate) * up; "clamped_silu" clamps gate and up, and adds 1 to up, as gpt-oss does."""
        if act == "silu":
            return self.silu_mul(gate, up)
        if act == "clamped_silu":
            return self._rows(_clamped_gate, gate, up)
        function = ACTIVATIONS[act]
        return self._rows(lambda g, u: function(g) * u, gate, up)

    def of_length_one(self, x: Tensor, eps: float) -> Tensor:
        """Divide each vector along the last dimension by its length; eps is added to the squared length."""
        return self._rows(lambda row: row * torch.rsqrt(row.pow(2).sum(-1, keepdim=True) + eps), x)

    def gates_of(self, x: Tensor, bias: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gates of the delta rule, beta and exp(g), each [T, heads], from x [T, 2 heads].

        The first half of x is b and the second is a; see blocks.Recurrence for the formulas. bias [heads]: dt_bias.
        decay [heads]: the factor of the softplus.
        """

        def both(row: Tensor) -> Tensor:
            b, a = row.chunk(2, -1)
            return torch.cat((b.sigmoid(), (decay * F.softplus(a + bias)).exp()), -1)

        beta, share = self._rows(both, x).chunk(2, -1)
        return beta, share

    def convolved(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, parents: Seq[int]) -> Tensor:
        """Convolve the last `conv` inputs of each token with weight [width, conv] -> [tokens, width].

        The first column of weight multiplies the oldest input. inputs [conv - 1 + tokens, width]: the last inputs
        before the tokens, which are stored with the state, then the tokens' inputs. parents: for each token, the index
        of the token before it in its chain or tree; -1 = the token follows the state.
        """
        num, conv = len(parents), weight.shape[1]
        if parents == range(-1, num - 1):
            taps = [inputs[j : j + num] for j in range(conv)]
        else:
            windows = torch.tensor([_window(parents, token, conv) for token in range(num)], device=inputs.device)
            taps = [inputs[windows[:, j]] for j in range(conv)]
        total = taps[0] * weight[:, 0]
        for j in range(1, conv):
            total = total + taps[j] * weight[:, j]
        return total if bias is None else total + bias

    def delta_rule(
        self, gated: Gated, state: Tensor, parents: Seq[int], first: int, wanted: Collection[int]
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Run the delta rule token by token (Yang et al. 2024, eq. 10).

        state [heads, key_dim, value_dim]: the state to begin with. parents: as in `convolved`. wanted: the tokens whose
        states are returned. Returns the outputs [T - first, heads, value_dim] of the tokens from `first` on, and the
        state after each wanted token.
        """
        states = {-1: state}
        left = dict[int, Tensor]()
        outs = list[Tensor]()
        is_chain = parents == range(-1, len(parents) - 1)
        for token, parent in enumerate(parents):
            states[token] = gated.after(token, states[parent])
            if is_chain:
                del states[parent]
            if token >= first:
                outs.append(gated.read(token, states[token]))
            if token in wanted:
                left[token] = states[token]
        return torch.stack(outs) if outs else state.new_empty(0, state.shape[0], state.shape[2]), left

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, heads, D] by position; pairs are (i, i + D/2) as in the published Llama weights.

        cos, sin: [T, 1, D] in the dtype of x. The first half of sin is negated, so that a single roll of x gives the
        whole rotation. Every element is two products and a sum, each rounded once, with the same bits in any batch. So
        both modes use this method.
        """
        return x * cos + torch.roll(x, x.shape[-1] // 2, -1) * sin

    def routed(self, scores: Tensor, chosen: Tensor) -> None:
        """Receive a router's scores [T, experts] and the chosen experts [T, chosen]; do nothing by default."""

    def plan(self, view: CacheView, device: torch.device | str = "cpu") -> Plan:
        """Return the view as a Plan, with data for attention on `device` that is computed once per forward pass."""
        reads = [_on_device(rows, device) for rows in view.read_rows]
        if len(reads) == 1 and isinstance(reads[0], slice):
            writes: Rows = slice(reads[0].stop - len(view.write_rows), reads[0].stop)
        else:
            writes = torch.from_numpy(view.write_rows).to(device)
        return Plan(view.batch, view.write_rows, view.read_rows, writes, reads, device=device)

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
        """Write k, v [T, kv_heads, D] into a layer's pool, then attend: q [T, heads, D] -> [T, heads, D].

        view: the rows of the pool to write and to read. k, v: None = the pool holds the keys and values already. pool:
        None = k and v are all keys and values, in the order of the view. A row sees the cached tokens of its slot, its
        pending and new ancestors, and itself. With a sliding `window`, a row sees only the last `window` logical
        positions, its own included.
        """
        assert view is not None
        plan = view if isinstance(view, Plan) else self.plan(view, q.device)
        if pool is None:
            assert k is not None
            assert v is not None
            pool = TorchPool(k, v)
        elif k is not None and v is not None:
            pool.write(plan.writes, k, v)
        attend = self._attend_alone if self.row_by_row else self._attend_run
        if len(plan.reads) == 1:
            return attend(q, *pool.read(plan.reads[0]), plan, 0, window, scoring)
        outs = []
        for b, read in enumerate(plan.reads):
            rows = plan.batch.run(b)
            outs.append(attend(q[rows.start : rows.stop], *pool.read(read), plan, b, window, scoring))
        return torch.cat(outs) if outs else torch.empty_like(q)

    def _rows(self, op: Callable[..., Tensor], *xs: Tensor) -> Tensor:
        if not self.row_by_row or len(xs[0]) == 0:
            return op(*xs)
        return torch.cat([op(*(x[i : i + 1].clone() for x in xs)) for i in range(len(xs[0]))])

    def _attend_run(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: Plan, b: int, window: int | None, scoring: Scoring
    ) -> Tensor:
        """Attend with all rows of run b at once, under a mask: q [n, heads, D], keys and values [keys, kv_heads, D]."""
        if window is not None and window >= len(keys):
            window = None
        mask = None
        if scoring.sees_all and window is not None:
            mask = both_ways_mask(len(q), len(keys), window).to(q.device)
        elif not scoring.sees_all:
            if len(q) == 1 and window is not None and not plan.batch.is_tree(b):
                keys, values = keys[-window:], values[-window:]
            else:
                mask = plan.mask(b, window)
        if scoring.is_plain:
            return _sdpa(q, keys, values, mask, scoring.scale)
        positions = plan.positions(b)
        own_positions, theirs = positions[len(positions) - len(q) :], positions[None, len(positions) - len(keys) :]
        step = max(1, SCORES_AT_ONCE // max(1, len(keys)))
        if len(q) <= step:
            return _scored(q, keys, values, mask, scoring, own_positions[:, None] - theirs)
        parts = [slice(first, first + step) for first in range(0, len(q), step)]
        masks = [None if mask is None else mask[part] for part in parts]
        return torch.cat(
            [
                _scored(q[part], keys, values, own_mask, scoring, own_positions[part, None] - theirs)
                for part, own_mask in zip(parts, masks, strict=True)
            ]
        )

    def _attend_alone(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: Plan, b: int, window: int | None, scoring: Scoring
    ) -> Tensor:
        """Attend with each row of run b alone, over a fresh copy of exactly the keys that it sees, in logical order."""
        outs = []
        for i in range(len(q)):
            if scoring.sees_all:
                at = len(keys) - len(q) + i
                ends = (0, len(keys)) if window is None else (max(0, at - window + 1), min(len(keys), at + window))
                seen = torch.arange(*ends, device=keys.device)
                at = at - ends[0]
            else:
                seen = torch.tensor(plan.batch.visible(b, i), device=keys.device)
                seen = seen if window is None else seen[-window:]
                at = len(seen) - 1
            row = q[i].clone()[None]
            if scoring.is_plain:
                outs.append(_sdpa(row, keys[seen], values[seen], None, scoring.scale))
                continue
            distances = at - torch.arange(len(seen), device=keys.device)[None]
            outs.append(_scored(row, keys[seen], values[seen], None, scoring, distances))
        return torch.cat(outs) if outs else torch.empty_like(q)


def _window(parents: Seq[int], token: int, conv: int) -> list[int]:
    """Return the indices of the inputs that a token's convolution reads; see `ReferenceOps.convolved`."""
    path = list[int]()
    while token != -1 and len(path) < conv:
        path.append(token + conv - 1)
        token = parents[token]
    return [*range(len(path) - 1, conv - 1), *reversed(path)]


def run_mask(view: CacheView, b: int, window: int | None) -> Tensor:
    """Return the mask of run b, float32 [n, keys of the run]: 0 where a row sees a key, otherwise -inf.

    With a window, a row sees the last `window` logical positions, its own included. The logical position of a row in a
    tree is the number of cached rows plus the number of the row's ancestors.
    """
    batch, cached, n = view.batch, view.batch.cached[b], len(view.batch.run(b))
    if not batch.is_tree(b):
        hidden = torch.full((n, cached + n), -torch.inf)
        mask = hidden.triu(cached + 1)
        return mask if window is None else mask + hidden.tril(cached - window)
    seen = np.zeros((n, batch.end(b)), dtype=bool)
    seen[:, :cached] = True
    for row, seen_rows in zip(seen, batch.seen(b), strict=True):
        row[[cached + j for j in seen_rows]] = True
        if window is not None:  # seen keys are in the order of logical positions, the row's own key last
            places = np.flatnonzero(row)
            row[places[:-window]] = False
    return torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))


def both_ways_mask(num_rows: int, num_keys: int, window: int) -> Tensor:
    """Return the mask, float32 [n, keys], 0 or -inf, of rows that see `window` keys in each direction.

    The number `window` includes the row's own key. The rows' own keys are the last n keys.
    """
    hidden = torch.full((num_rows, num_keys), -torch.inf)
    first = num_keys - num_rows
    return hidden.triu(first + window) + hidden.tril(first - window)


def _on_device(rows: npt.NDArray[np.int64], device: torch.device | str) -> Rows:
    """Return cache rows as indices on a device, or as a slice if the rows are consecutive."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


def _scored(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring, distances: Tensor
) -> Tensor:
    """Attend as `_sdpa` does, but compute scores in float32, and apply everything in `scoring` to them.

    distances [n, m]: the distances from rows back to keys.
    """
    n, heads, dim = q.shape
    num_kv = keys.shape[1]
    scale = dim**-0.5 if scoring.scale is None else scoring.scale
    grouped = q.reshape(n, num_kv, heads // num_kv, dim).permute(1, 2, 0, 3).float()
    scores = (grouped @ keys.permute(1, 2, 0)[:, None].float()).reshape(heads, n, -1) * scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    bias = scoring.bias(distances)
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else scores + mask
    if scoring.sinks is not None:  # a further key without a value
        scores = torch.cat((scores, scoring.sinks.float()[:, None, None].expand(-1, n, 1)), -1)
    weights = scores.softmax(-1)
    weights = weights if scoring.sinks is None else weights[..., :-1]
    sums = weights.to(q.dtype).reshape(num_kv, heads // num_kv, n, -1) @ values.transpose(0, 1)[:, None]
    return sums.permute(2, 0, 1, 3).reshape(n, heads, dim)


def bucket_of(distances: Tensor, buckets: Buckets) -> Tensor:
    """Return the bucket of each distance from a row back to a key; the distance of a later key is negative."""
    reach = buckets.max_distance
    return _buckets(buckets, distances.device)[distances.clamp(-reach, reach) + reach]


def _sdpa(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Attend: q [n, heads, D], keys and values [m, kv_heads, D], mask [n, m] -> [n, heads, D].

    scale: the factor of scores; None = 1 / sqrt(D).

    For a few rows, the query heads that share a key head become rows of one head. torch then reads each key once, and
    not once per query head (1.5 to 2 times faster at 32 query and 8 key heads, 1 to 6 rows, 300 keys).
    """
    n, heads, dim = q.shape
    num_kv, group = keys.shape[1], heads // keys.shape[1]
    mask = mask if mask is None or mask.dtype == q.dtype else mask.to(q.dtype)
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    if n > FOLD_MAX_ROWS:
        q = q.transpose(0, 1)[None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)[
            0
        ].transpose(0, 1)
    if n == 1:
        q = q.reshape(1, num_kv, group, dim)
        return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale).reshape(1, heads, dim)
    q = q.reshape(n, num_kv, group, dim).transpose(0, 1).reshape(1, num_kv, n * group, dim)
    mask = mask if mask is None or group == 1 else mask.repeat_interleave(group, dim=0)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(num_kv, n, group, dim).transpose(0, 1).reshape(n, heads, dim)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == weight.dtype == torch.float32:
        # Five calls replace the fifteen inside F.rms_norm (8 us, not 13): calls are most of a small draft model's time.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt()
        return x * inverse * weight
    wide = x.float()
    if weight.dtype.itemsize > x.dtype.itemsize:  # a weight with an offset, which published code adds in float32
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
    # In narrow types the published code rounds before it multiplies by the weight.
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if x.dtype == torch.float32 or x.dtype == torch.float64:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    weight, bias = (None if part is None else part.float() for part in (weight, bias))
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def _clamped_silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(CLAMPED_SLOPE * x)


def _clamped_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Compute the gated activation of gpt-oss (its model card, section 2.2)."""
    gate, up = gate.clamp(max=CLAMPED_AT), up.clamp(-CLAMPED_AT, CLAMPED_AT)
    return (up + 1) * _clamped_silu(gate)


CLAMPED_SLOPE, CLAMPED_AT = 1.702, 7.0
ACTIVATIONS: Mapping[Act, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "clamped_silu": _clamped_silu,
}


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    """Return a number as a cached tensor, because torch would wrap a Python number anew at every call."""
    with torch.inference_mode(False):
        return torch.tensor(value, device=device)


@cache
def _buckets(buckets: Buckets, device: torch.device) -> Tensor:
    """Return `buckets_of_distances(buckets)` as a tensor on `device`. Each device gets one copy, which is cached."""
    with torch.inference_mode(False):
        return torch.from_numpy(buckets_of_distances(buckets)).to(device)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply with oneDNN for large float32 matrices on a CPU, and with torch's default BLAS otherwise.

    Measured on two AVX2 cores, 2048 x 2048 to 8192 x 2048, in GB/s of weights: the default BLAS reads 17-19 at 1 row
    and 4-7 at 6 rows; oneDNN reads 29-32 at 1 row and 12-14 at 6 rows. Below a million weights, oneDNN's call overhead
    (30 us) outweighs the gain. Prepacked weights give 15-18 at 6 rows but only 16-26 at 1 row, so a model would need
    both forms of its weights. That is not worth twice the memory.
    """
    if weight.numel() < ONEDNN_MIN_WEIGHTS or not _onednn_serves(x, weight):
        return F.linear(x, weight, bias)
    assert _ONEDNN_LINEAR is not None
    return _ONEDNN_LINEAR(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _onednn_serves(x: Tensor, weight: Tensor) -> bool:
    inference = not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    single = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    return _ONEDNN_LINEAR is not None and single and inference and x.shape[0] > 0
