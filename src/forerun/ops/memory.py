"""The memory that backends take: lines of a memory plan, largest passes of models, and weights of draft heads.

A backend's `sizes(wanted)` returns an object of the protocol Sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from forerun.blocks import Spec, itemsize, products, weights
from forerun.errors import CapacityError
from forerun.ops.quantised import Scheme
from forerun.ops.rotary import Rotations, turned

Schemes = Mapping[str, Scheme]  # the schemes of quantised matrices, by the name of the weight

FLOAT_BYTES = 4
PROB_BYTES = FLOAT_BYTES  # logits and probabilities are float32, see Model.logits and sampling.probs
KERNEL_BYTES = 1 << 20  # workspace of torch's kernels; attention on a CPU was measured at 0.2 MB per thread


BLOCK_BYTES = 8 << 20  # of a file that are read at a time, and in memory meanwhile


@dataclass(frozen=True)
class Beside:
    """The weights of a trained draft head that is loaded beside a model, as the headers of its files describe them.

    matrices: the shape (outputs, inputs) of each matrix, and the scheme to which the matrix is rounded; None = the
    matrix is not rounded. num_looked_up: the number of embedding weights, which are kept in the dtype of the model's
    weights. num_floats: the number of weights that are kept in float32, such as norms.
    """

    matrices: tuple[tuple[tuple[int, int], Scheme | None], ...]
    num_looked_up: int = 0
    num_floats: int = 0

    @property
    def num_weights(self) -> int:
        """The number of all weights."""
        return sum(math.prod(shape) for shape, _ in self.matrices) + self.num_looked_up + self.num_floats


@dataclass(frozen=True)
class MemoryPart:
    """One line of a memory plan. how: the calculation of `bytes`, in words."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True)
class Pass:
    """The largest forward pass of a model. name: "target", "draft", or the name of an extra draft model.

    num_rows: the number of new tokens. longest_run: the largest number of new tokens of one sequence. num_masked: the
    number of rows that need a mask, because their sequence has several new tokens. context: the largest number of
    cached and new tokens that one row may see. num_read: the number of cached and new tokens of all sequences together.
    num_logits: the number of rows whose logits are wanted. num_taps: the number of inner layers whose rows the pass
    returns.
    """

    name: str
    model: Spec
    num_rows: int
    longest_run: int
    num_masked: int
    context: int
    num_read: int
    num_logits: int
    num_taps: int = 0

    @property
    def tap_bytes(self) -> int:
        """The bytes of the rows of inner layers that the pass returns, which are float32 on every backend."""
        return self.num_taps * self.num_rows * self.model.hidden_size * FLOAT_BYTES

    @property
    def taps_said(self) -> str:
        """The text about the rows of inner layers that ends `MemoryPart.how`; "" if the pass returns no such rows."""
        rows = f"{self.num_taps} x {self.num_rows:,} rows of inner layers, {self.tap_bytes / 1e6:,.1f} MB"
        return f"; {rows}" if self.num_taps else ""

    @property
    def kept_bytes(self) -> int:
        """The bytes of a draft model's last logits, which stay in memory during the next pass; 0 for the target."""
        return self.num_logits * self.model.vocab_size * PROB_BYTES if self.name != "target" else 0


@dataclass(frozen=True)
class Wanted:
    """The settings, besides the models, on which the memory of a backend depends.

    dtype: the dtype of weights. in_place: whether consecutive rows of the cache are read without a copy. schemes: by
    model name, the schemes of the model's quantised matrices. rounded: the names of models whose matrices are rounded
    in memory.
    """

    dtype: str
    device: str
    max_seq_len: int
    in_place: bool = False
    schemes: Mapping[str, Schemes] = field(default_factory=dict)
    rounded: frozenset[str] = frozenset()


class Sizes(Protocol):
    """The memory that a backend's operators need. Each backend has its own class."""

    def cache_dtype_of(self, name: str) -> str:
        """Return the dtype of keys and values in a model's cache. name: the model's name, as in `weights`."""

    def weights(
        self, models: Mapping[str, Spec], beside: Mapping[str, Beside] = MappingProxyType({})
    ) -> list[MemoryPart]:
        """Return one MemoryPart for each model's weights, as the operators keep them, then one for each draft head.

        models: the specs by name: "target", "draft" and the names of extra draft models. beside: the weights of trained
        draft heads, by name.
        """

    def activations(self, passes: list[Pass]) -> list[MemoryPart]:
        """Return an upper bound of the memory of passes that run one after another."""

    def later(self, passes: list[Pass]) -> tuple[MemoryPart, ...]:
        """Return the extra memory that a process takes only after it has run for a long time."""

    def loading_bytes(self, model: Spec) -> int:
        """Return an upper bound of the bytes that loading a model takes beyond its weights."""


@dataclass(frozen=True)
class Widths:
    """The largest widths of rows over all blocks.

    q: the width of queries, all heads together. kv: the width of keys, or of values, all heads together. ffn: the inner
    width of the feed-forward part. head_dim: the width of one head. heads: the number of query heads. has_head_norm:
    whether queries are normed in some block.
    """

    q: int
    kv: int
    ffn: int
    head_dim: int
    heads: int
    has_head_norm: bool

    @classmethod
    def of(cls, spec: Spec) -> Widths:
        """Return the largest widths over all blocks of a spec."""
        attentions = [block.attention for block in spec.blocks if block.attention is not None]
        mlps = [block.mlp for block in spec.blocks if block.mlp is not None]
        return cls(
            q=max((a.heads * a.head_dim for a in attentions), default=0),
            kv=max((a.kv_heads * a.head_dim for a in attentions), default=0),
            ffn=max((mlp.size for mlp in mlps), default=0),
            head_dim=max((a.head_dim for a in attentions), default=0),
            heads=max((a.heads for a in attentions), default=0),
            has_head_norm=any(a.q_norm is not None for a in attentions),
        )


def matrix_shapes(spec: Spec) -> set[tuple[int, int]]:
    """Return the shapes (outputs, inputs) of all matrices in layers, after matrices with one input are joined."""
    groups = products(weights(spec)).items()
    return {(sum(w.shape[0] for w in group), group[0].shape[1]) for n, group in groups if n not in OUTER}


OUTER = ("embedding", "head")  # products outside of layers


def rope_table_bytes(spec: Spec, max_seq_len: int, size: int) -> int:
    """Return the bytes of all rotary tables of cos and sin. size: the bytes of one entry.

    Each table counts twice, because it is in memory twice while it grows.
    """
    num_positions = -(-max_seq_len // Rotations.BLOCK) * Rotations.BLOCK
    dims = {(a.rope, a.head_dim): turned(a.rope, a.head_dim) for b in spec.blocks if (a := b.attention) and a.rope}
    return 2 * num_positions * 2 * sum(dims.values()) * size


def weight_bytes(config: Spec, dtype: str) -> int:
    """Return the bytes of all weights. A tied LM head is the embedding, so it does not count again."""
    return config.num_weights * itemsize(dtype)


def block_bytes(config: Spec) -> int:
    """Return the bytes of the largest block that loading reads from a file at once, at 4 bytes per number.

    Files with float64 weights, which can be loaded but do not occur in practice, would need twice as much.
    """
    largest = max(math.prod(weight.shape) for weight in weights(config))
    return min(BLOCK_BYTES, 4 * largest)


def no_room(num_bytes: int, device: str) -> CapacityError:
    """Return the error for weights that do not fit into memory."""
    return CapacityError(
        f"there is no memory for weights of {num_bytes / 1e9:.1f} GB on {device}: choose a smaller model, or "
        "dtype='bfloat16'; forerun plan says what fits"
    )
