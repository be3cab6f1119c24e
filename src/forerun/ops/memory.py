"""The memory that backends take: lines of a plan, the largest pass of a model, weights beside a model.

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

Schemes = Mapping[str, Scheme]  # of quantised matrices, by the name of the weight

FLOAT_BYTES = 4
PROB_BYTES = FLOAT_BYTES  # logits and probabilities are float32, see Model.logits and sampling.probs
KERNEL_BYTES = 1 << 20  # workspace of torch's kernels; attention on a CPU was measured at 0.2 MB per thread


BLOCK_BYTES = 8 << 20  # of a file, held while a tensor is read


@dataclass(frozen=True)
class Beside:
    """Weights of trained heads beside a model, as far as file headers tell.

    matrices: (outputs, inputs) of each, and how it is rounded; None = not. num_looked_up: embedding weights, of the
    type of other weights. num_floats: weights that are kept in float32, such as norms.
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
    """One line of a plan. how: the multiplication behind `bytes`, in words."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True)
class Pass:
    """The largest forward pass of a model. name: "target", "draft", or the name of an extra draft model.

    num_rows: new tokens. longest_run: new tokens of one sequence. num_masked: rows in runs of more than one token,
    which need a mask. context: cached and new tokens that one row may see. num_read: the same over all runs.
    num_logits: rows whose logits are wanted. num_taps: inner layers whose rows it returns.
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
        """Bytes of the rows of inner layers, which are float32 with every operator."""
        return self.num_taps * self.num_rows * self.model.hidden_size * FLOAT_BYTES

    @property
    def taps_said(self) -> str:
        """The end of a sentence about the bytes of a pass; empty without taps."""
        rows = f"{self.num_taps} x {self.num_rows:,} rows of inner layers, {self.tap_bytes / 1e6:,.1f} MB"
        return f"; {rows}" if self.num_taps else ""

    @property
    def kept_bytes(self) -> int:
        """Bytes of a draft model's last logits, which are held while the next pass runs; 0 for the target."""
        return self.num_logits * self.model.vocab_size * PROB_BYTES if self.name != "target" else 0


@dataclass(frozen=True)
class Wanted:
    """What decides the sizes of a backend, beside its models.

    dtype: of weights. schemes: by model, how its quantised matrices are stored. rounded: models whose matrices are
    rounded in memory. in_place: whether consecutive rows of the cache are read without a copy.
    """

    dtype: str
    device: str
    max_seq_len: int
    in_place: bool = False
    schemes: Mapping[str, Schemes] = field(default_factory=dict)
    rounded: frozenset[str] = frozenset()


class Sizes(Protocol):
    """The memory that operators need; each kind of operators has a class of its own."""

    def cache_dtype_of(self, name: str) -> str:
        """Return the type of keys and values in the cache of a model."""

    def weights(
        self, models: Mapping[str, Spec], beside: Mapping[str, Beside] = MappingProxyType({})
    ) -> list[MemoryPart]:
        """Return a part for each model's weights as the operators keep them, then a part for each head.

        models: "target", "draft" and extra draft models. beside: the weights of trained heads, by name.
        """

    def activations(self, passes: list[Pass]) -> list[MemoryPart]:
        """Return an upper bound of the memory of passes that run one after another."""

    def later(self, passes: list[Pass]) -> tuple[MemoryPart, ...]:
        """Return the memory that a process takes in addition when it runs for long."""

    def loading_bytes(self, model: Spec) -> int:
        """Return an upper bound of the bytes that loading a model takes beyond its weights."""


@dataclass(frozen=True)
class Widths:
    """The widest rows of any block. q, kv: over all heads. ffn: inside the feed-forward part. head_dim: of one head."""

    q: int
    kv: int
    ffn: int
    head_dim: int
    heads: int
    has_head_norm: bool

    @classmethod
    def of(cls, spec: Spec) -> Widths:
        """Return the widths over all blocks of a spec."""
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
    """Return (outputs, inputs) of the products of all layers; matrices of one input count as one product."""
    groups = products(weights(spec)).items()
    return {(sum(w.shape[0] for w in group), group[0].shape[1]) for n, group in groups if n not in OUTER}


OUTER = ("embedding", "head")  # products outside of layers


def rope_table_bytes(spec: Spec, max_seq_len: int, size: int) -> int:
    """Return the bytes of the tables of cos and sin, each twice while it grows. size: bytes of a number."""
    num_positions = -(-max_seq_len // Rotations.BLOCK) * Rotations.BLOCK
    dims = {(a.rope, a.head_dim): turned(a.rope, a.head_dim) for b in spec.blocks if (a := b.attention) and a.rope}
    return 2 * num_positions * 2 * sum(dims.values()) * size


def weight_bytes(config: Spec, dtype: str) -> int:
    """Return the bytes of all weights; a tied LM head is its embedding and counts once."""
    return config.num_weights * itemsize(dtype)


def block_bytes(config: Spec) -> int:
    """Return the bytes of the largest block of the files that loading reads at once, at 4 bytes per number.

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
