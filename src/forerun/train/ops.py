"""Differentiable operators for training, which run whole sequences without a cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.ops.reference import PLAIN, Gated, ReferenceOps, Scoring
from forerun.ops.torch import TorchModel
from forerun.ops.torch_pools import TorchPool
from forerun.train import losses
from forerun.types import CacheView, RaggedBatch


class TrainingOps(ReferenceOps):
    """Reference operators for passes whose rows are consecutive sequences of `seq_len_tokens` tokens each.

    With these operators, training runs the same forward pass as serving, except that keys, values and states come from
    the sequences in the pass and not from a cache. Recurrent layers are computed by chunks, because gradients through a
    separate step for each token take too long. Sliding windows raise an error, because no trainable shape has windows.
    imbalances: the `losses.imbalance` of each router in each pass since the list was last emptied.
    """

    def __init__(self, seq_len_tokens: int) -> None:
        super().__init__()
        self.seq_len_tokens = seq_len_tokens
        self.imbalances: list[Tensor] = []

    def routed(self, scores: Tensor, chosen: Tensor) -> None:
        """Record a router's imbalance. Nothing is recorded in passes without gradients, such as a teacher's."""
        if scores.requires_grad:
            self.imbalances.append(losses.imbalance(scores, chosen))

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
        """Return causal attention within each sequence. q [S * seq_len, heads, D], k, v [S * seq_len, kv_heads, D]."""
        if window is not None or view is not None:
            raise NotImplementedError("training attends over whole sequences, without a cache and without a window")
        k, v = _trainable(k, v, scoring)
        num_heads, num_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        q, k, v = (x.view(-1, self.seq_len_tokens, x.shape[1], head_dim).transpose(1, 2) for x in (q, k, v))
        # Repeated heads cost little, and every SDPA kernel can differentiate them; not all support enable_gqa.
        k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scoring.scale)
        return out.transpose(1, 2).reshape(-1, num_heads, head_dim)

    def convolved(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, parents: Seq[int]) -> Tensor:
        """Convolve within each sequence, with zeros before the sequence's first token. See `ReferenceOps`."""
        conv = weight.shape[1]
        texts = inputs[conv - 1 :].view(-1, self.seq_len_tokens, inputs.shape[1])
        padded = F.pad(texts, (0, 0, conv - 1, 0))
        total = padded[:, : self.seq_len_tokens] * weight[:, 0]
        for j in range(1, conv):
            total = total + padded[:, j : j + self.seq_len_tokens] * weight[:, j]
        total = total.flatten(0, 1)
        return total if bias is None else total + bias

    def delta_rule(
        self, gated: Gated, state: Tensor, parents: Seq[int], first: int, wanted: Collection[int]
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Compute the gated delta rule within each sequence, by chunks of CHUNK_TOKENS tokens. See `ReferenceOps`.

        Returns the outputs, and no states.
        """
        assert not wanted
        with torch.autocast(gated.q.device.type, enabled=False):
            rows = (getattr(gated, name) for name in ("q", "k", "v", "beta", "decay"))
            texts = (torch.unflatten(x.float(), 0, (-1, self.seq_len_tokens)).transpose(1, 2) for x in rows)
            return delta_chunks(*texts).transpose(1, 2).flatten(0, 1), {}


CHUNK_TOKENS = 64  # of a sequence: within a chunk the gated delta rule is a few products of matrices
LEAST_DECAY = 1e-30  # of a token, as 0 has no logarithm


def delta_chunks(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """Compute the gated delta rule by chunks (Yang et al. 2024, arXiv 2412.06464, section 3.3; arXiv 2406.06484).

    q, k [S, heads, L, key_dim], v [S, heads, L, value_dim], beta, decay [S, heads, L] -> [S, heads, L, value_dim].
    Within a chunk, the corrections of all tokens are the solution of one triangular system. Only the states at the
    chunks' borders are computed one after the other.
    """
    length = q.shape[2]
    short = -length % CHUNK_TOKENS
    q, k, v = (F.pad(x, (0, 0, 0, short)) for x in (q, k, v))  # a token of zeros changes no state
    beta, logs = F.pad(beta, (0, short)), F.pad(decay.clamp(min=LEAST_DECAY).log(), (0, short))
    q, k, v, beta, logs = (torch.unflatten(x, 2, (-1, CHUNK_TOKENS)) for x in (q, k, v, beta, logs))
    sums = logs.cumsum(-1)
    later = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=q.device).triu(1)
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()
    from_start, to_end = sums.exp()[..., None], (sums[..., -1:] - sums).exp()[..., None]
    scaled = k * beta[..., None]
    system = (scaled @ k.transpose(-1, -2) * between).tril(-1)  # and ones on the diagonal
    sides = torch.cat((v * beta[..., None], scaled * from_start), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores, queries = q @ k.transpose(-1, -2) * between, q * from_start
    added = (k * to_end).transpose(-1, -2)
    share = sums[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outs = list[Tensor]()
    for i in range(q.shape[2]):
        new = values[:, :, i] - keys[:, :, i] @ state
        outs.append(queries[:, :, i] @ state + scores[:, :, i] @ new)
        state = state * share[:, :, i] + added[:, :, i] @ new
    return torch.cat(outs, 2)[:, :, :length]


class RememberingOps(ReferenceOps):
    """Operators for S sequences of equal length, whose attention uses a mask instead of a cache.

    mask [S, 1, rows, keys]. memory: the keys and values of each layer, [S, heads, L, D]. A pass with `remembers` = True
    writes its keys and values to `memory`. Any other pass attends to the keys and values in `memory`, followed by its
    own keys and values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.empty(0)
        self.memory: list[tuple[Tensor, Tensor]] = []
        self.remembers, self._layer = False, 0

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
        """Return attention under `self.mask`. q [S * rows, heads, D], k, v [S * rows, kv_heads, D].

        The layers must be run in order, because each call takes the keys and values of the next layer from
        `self.memory`.
        """
        k, v = _trainable(k, v, scoring)
        num_heads, num_rows = q.shape[1], len(self.mask)
        q, k, v = (torch.unflatten(x, 0, (num_rows, -1)).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(num_heads // k.shape[1], dim=1) for x in (k, v))
        if self.remembers:
            self.memory.append((k, v))
        else:
            k, v = (torch.cat(pair, 2) for pair in zip(self.memory[self._layer], (k, v), strict=True))
            self._layer += 1
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=scoring.scale)
        return out.transpose(1, 2).flatten(0, 1)

    def begin(self, mask: Tensor, remembers: bool) -> None:
        """Prepare for a pass over all layers. remembers: whether the pass clears and writes `memory`."""
        self.mask, self.remembers, self._layer = mask, remembers, 0
        if remembers:
            self.memory = []


def _trainable(k: Tensor | None, v: Tensor | None, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return k and v unchanged. Raises NotImplementedError for attention that training does not support."""
    if k is None or v is None or not scoring.is_plain or scoring.sees_all:
        raise NotImplementedError("training knows attention without soft caps, sinks, biases or keys of other layers")
    return k, v


def run_rows(model: TorchModel, ids: Tensor, at: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Run a model that uses RememberingOps, and return the rows after the final norm, [S * rows, H].

    ids, at [S, rows]: token ids and positions. hidden [S * rows, H]: inputs that replace the embeddings of the ids.
    """
    run = RaggedBatch(ids.flatten(), at.flatten(), [0, ids.numel()], [0], [int(at.max()) + 1])
    rows: Tensor = model.forward(run, None, hidden=hidden).hidden
    return rows
