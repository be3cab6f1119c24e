"""A model as data: a list of blocks, described before a byte of the weights is read.

A family's file (`models/families/<model_type>.py`) turns a config.json into a `Spec`. All code that computes, packs,
plans, rounds, saves, widens or shards a model reads the spec and `weights(spec)`; no other code lists the matrices of a
layer. A spec may describe a block that a backend does not compute yet: the backend's `supports(spec)` says why not.

Sizes are numbers of elements. Windows and positions are numbers of tokens.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from forerun.errors import UnsupportedModel

Role = Literal["matrix", "vector", "table", "experts"]
Split = Literal["out", "in"]


def _above_zero(**numbers: float | None) -> None:
    """Raise UnsupportedModel for a number that is not above 0. None is allowed: it means that there is no number."""
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise UnsupportedModel(f"{name}={number} is not possible: it must be above 0; None says that there is none")


@dataclass(frozen=True)
class Norm:
    """A norm of rows: root mean square (Zhang and Sennrich 2019, eq. 4) or layer norm (Ba et al. 2016, eq. 4).

    offset: the number that is added to the stored weight (1 in Gemma). weight, bias: whether a weight and a bias are
    stored. span: whether the norm is taken over the whole row, or over each head separately.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0
    weight: bool = True
    bias: bool = False
    span: Literal["all", "head"] = "all"


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, eq. 34).

    dims: how many dimensions of a head are rotated, None = all. pairs: dimension i is rotated together with i + dims/2
    ("half"), or 2i with 2i + 1 ("adjacent"). factor: the factor by which the context is stretched, for all kinds but
    default. original_max_positions: the length of the longest text in training, for llama3, yarn and longrope.

    Each of the other fields belongs to one or two kinds. llama3: low_freq_factor and high_freq_factor. yarn: beta_fast,
    beta_slow, mscale, mscale_all_dim, truncate and attention_factor. longrope: short_factor, long_factor, far and
    attention_factor. far: whether all positions use long_factor, which is made for texts longer than in training.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    dims: int | None = None
    pairs: Literal["half", "adjacent"] = "half"
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    truncate: bool = True
    far: bool = False

    def __post_init__(self) -> None:
        _above_zero(dims=self.dims)


@dataclass(frozen=True)
class Buckets:
    """A learned bias for each head and bucket of distances, added to the scores of attention (Raffel et al. 2020)."""

    num: int
    max_distance: int
    both_ways: bool = False


@dataclass(frozen=True)
class Attention:
    """Attention with `heads` query heads, and `kv_heads` heads of keys and values. All heads are `head_dim` wide.

    scale: the factor of the scores; None = 1 / sqrt(head_dim). window: the number of positions that a row sees, its own
    included; a row that also sees later rows sees this number to either side. None = all positions. softcap: the number
    c with which scores become c tanh(score / c). sinks: whether each head has a learned score without a value, which
    takes its share of the softmax. gate: whether the output is multiplied by the sigmoid of a projection. sees: the
    rows that a row attends to: earlier rows, all rows, or the encoder's rows. reads: the width of the rows that are
    projected to queries, keys and values; in encoder attention, only of the rows that are projected to keys and values.
    None = the hidden size. k_is_v: whether the values are the keys before the norm of keys. position_scale: (beta,
    length); q is scaled by 1 + beta log(1 + floor(position / length)). bias: the bias of relative positions; a number
    is the index of the block whose bias this block shares. shares_kv_of: the index of the block whose keys and values
    this block reads; None = its own keys and values. A block with its own index in this field reads keys and values
    that another model keeps (kv/lent.py).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float | None = None
    window: int | None = None
    rope: Rope | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    softcap: float | None = None
    sinks: bool = False
    gate: bool = False
    sees: Literal["past", "all", "encoder"] = "past"
    reads: int | None = None
    k_is_v: bool = False
    position_scale: tuple[float, int] | None = None
    bias: Buckets | int | None = None
    shares_kv_of: int | None = None

    def __post_init__(self) -> None:
        length = None if self.position_scale is None else self.position_scale[1]
        _above_zero(window=self.window, softcap=self.softcap, reads=self.reads, position_scale=length)


@dataclass(frozen=True)
class Recurrence:
    """A recurrent layer, which keeps a state in place of keys and values.

    kind gated_delta: q, k and v are projections, followed by a causal convolution of `conv` inputs and by silu; q and k
    are then scaled to length 1. The state S of a value head is key_dim x value_dim. A token multiplies S by exp(g),
    adds k times beta (v - k S) to S, and reads q S / sqrt(key_dim). The output is `norm` of this product, times silu(z)
    (Yang et al. 2024, eq. 10). beta is sigmoid(b) and g is -exp(A_log) softplus(a + dt_bias); z, b and a are
    projections, too. grouped: whether consecutive value heads share a key head; if not, value head i reads key head i %
    key_heads (llama.cpp's files). decay: whether A_log or -exp(A_log) is stored.

    kind short_conv: [B, C, x] are projections, and the output is C times a causal convolution of B x (LFM2). biases:
    whether the convolution and its projections have biases.
    """

    kind: Literal["gated_delta", "short_conv"]
    conv: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    norm: Norm | None = None
    decay: Literal["log", "negative"] = "log"
    biases: bool = False
    grouped: bool = True

    def __post_init__(self) -> None:
        if not 1 < self.conv <= STATE_TOKENS:
            raise UnsupportedModel(f"conv={self.conv} is not possible: it must be from 2 to {STATE_TOKENS}")
        if self.kind == "gated_delta" and (not self.key_heads or self.value_heads % self.key_heads):
            raise UnsupportedModel(
                f"key_heads={self.key_heads} is not possible: it must divide the {self.value_heads} value heads"
            )

    def width(self, hidden: int) -> int:
        """Return how many numbers the convolution reads for each token. hidden: the width of the residual stream."""
        if self.kind == "short_conv":
            return hidden
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state(self, hidden: int) -> StateShape:
        """Return the shape of the state that a cache keeps for this layer."""
        if self.kind == "short_conv":
            return StateShape(self.conv, hidden)
        return StateShape(
            self.conv, self.width(hidden), 2 * self.value_heads, self.value_heads, self.key_dim, self.value_dim
        )


STATE_TOKENS = 16  # a state is written after every so many tokens, as a block of keys and values is whole then


@dataclass(frozen=True)
class StateShape:
    """The sizes of the states, and of the token inputs after the last state, that a cache keeps for a recurrent layer.

    conv: the number of inputs that a convolution reads, the token's own included. width: how many numbers of a token's
    input are convolved. num_gates: how many numbers of a token's input are not convolved. heads, key_dim, value_dim:
    the sizes of a state; 0 = there is no state, and only the last inputs are kept.
    """

    conv: int
    width: int
    num_gates: int = 0
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    def state_bytes(self, dtype: str) -> int:
        """Return the bytes of a state (float32), together with the convolution inputs stored with it (`dtype`)."""
        return 4 * self.heads * self.key_dim * self.value_dim + (self.conv - 1) * self.width * itemsize(dtype)

    def input_bytes(self, dtype: str) -> int:
        """Return the bytes of a token's input in type `dtype`; gates are always float32."""
        return self.width * itemsize(dtype) + 4 * self.num_gates


Act = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_silu"]


@dataclass(frozen=True)
class Mlp:
    """A feed-forward part of inner width `size`: down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate.

    down: whether there is a last matrix. Without this matrix and without a gate, the output is act(up(x)), and `size`
    is the width of its rows.
    """

    size: int
    act: Act = "silu"
    gated: bool = True
    bias: bool = False
    down: bool = True


@dataclass(frozen=True)
class Experts:
    """A mixture of `num` feed-forward experts; each row runs through `chosen` of them (Shazeer et al. 2017, eq. 1).

    shared: an expert that every row runs through. shared_gate: whether the shared expert's output is weighted by a
    sigmoid. reads_stream: whether the router reads rows as they are before the norm of the experts' input. router_norm:
    the norm of the router's input. score_scale: the factor of the router's outputs; `score` then turns them into
    scores. normalise: whether the chosen scores are divided by their sum plus sum_eps. scale: the factor of the
    resulting shares. choice_bias: whether a stored number is added to each score, for the choice of experts only.
    scaled: whether each expert's share is also multiplied by a stored number.
    """

    num: int
    chosen: int
    mlp: Mlp
    shared: Mlp | None = None
    shared_gate: bool = False
    router_norm: Norm | None = None
    score: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    router_bias: bool = False
    reads_stream: bool = False
    score_scale: float = 1.0
    scaled: bool = False
    choice_bias: bool = False
    sum_eps: float = 0.0


@dataclass(frozen=True)
class LayerInput:
    """A second input of a block beside the residual stream (Gemma 3n, Gemma 4): `size` numbers for each token.

    These numbers are (sqrt(size) e + norm(p / sqrt(hidden size))) / sqrt(2). e is the token's row of an embedding that
    belongs to the block, and p is a projection of the token's embedding. After its feed-forward part, a block adds
    norm(up(act(gate(x)) * inputs)) to the stream. norm: the kind of both norms in these formulas.
    """

    size: int
    act: Act = "gelu_tanh"
    norm: Norm = Norm()


@dataclass(frozen=True)
class Block:
    """One layer: attention or a recurrence, then a feed-forward part, experts, both or neither.

    pre_*, post_*: the norms before and after a part. If experts run beside a feed-forward part, the feed-forward part
    has the norms pre_mlp and post_dense, the experts have pre_experts and post_experts, and the sum of both has
    post_mlp. norm_at: whether a post-norm applies to a part's output before it is added to the stream, or to the sum.
    parallel: whether attention and the feed-forward part read the same rows. branch_scale: the factor of a part's
    output. out_scale: whether the block's output is multiplied by a stored number. per_layer_input: the input that the
    block reads beside the residual stream.
    """

    pre_attention: Norm | None = None
    attention: Attention | None = None
    recurrence: Recurrence | None = None
    post_attention: Norm | None = None
    pre_mlp: Norm | None = None
    mlp: Mlp | None = None
    experts: Experts | None = None
    post_mlp: Norm | None = None
    norm_at: Literal["branch", "sum"] = "branch"
    parallel: bool = False
    branch_scale: float = 1.0
    out_scale: bool = False
    per_layer_input: LayerInput | None = None
    post_dense: Norm | None = None
    pre_experts: Norm | None = None
    post_experts: Norm | None = None


@dataclass(frozen=True)
class Positions:
    """An embedding of each position, added to the token's embedding. offset: the index of the row for position 0.

    kind: "learned", or "sinusoidal": the sines and then the cosines of positions times falling frequencies (Vaswani et
    al. 2017, 3.5).
    """

    num: int
    offset: int = 0
    kind: Literal["learned", "sinusoidal"] = "learned"


@dataclass(frozen=True)
class Features:
    """The features that a trained drafting head reads beside a token's embedding.

    The features are computed from hidden states of the target and, after drafted tokens, from the head's hidden states.

    num_ids: the number of input ids, which are the target's ids. num: the number of the target's hidden states that are
    read for a token. size: the width of these hidden states. joined: whether a matrix turns these hidden states into
    features; if not, there is one hidden state, and it is used as the features. act: the activation with which features
    are fc(rows) + act(fc_act(rows)); None = the features are fc(rows). row_norms: whether each hidden state has a norm
    before the matrix. whole_norm: whether all hidden states of a token, side by side, have a common norm. side_norms:
    whether the embedding and the features have a norm each.

    input: how the residual stream begins. "product": with a matrix product of embedding and features. "read": with the
    features; the first block's attention reads embedding and features in place of the stream. "features": with the
    features alone. "context": with the embedding alone; every block also keeps keys and values of earlier tokens'
    features, after context_norm. normed_stream: for "read", whether the stream begins with the normed features.

    feeds: the head's hidden states that are the features of the next step. "stream": the residual stream. "normed": the
    rows after the final norm. "projected": the normed rows times a matrix, as wide as the target's hidden states. eps:
    the eps of row_norms, whole_norm and side_norms, which are RMS norms. largest: the limit to which the target's
    hidden states are clipped, because an infinity would turn all later values into NaN.
    """

    num_ids: int
    size: int
    num: int = 1
    joined: bool = False
    bias: bool = False
    act: Act | None = None
    row_norms: bool = False
    whole_norm: bool = False
    side_norms: bool = False
    context_norm: Norm | None = None
    input: Literal["product", "read", "features", "context"] = "product"
    input_bias: bool = False
    normed_stream: bool = False
    feeds: Literal["stream", "normed", "projected"] = "stream"
    eps: float = 1e-6
    largest: float = 6e4


@dataclass(frozen=True)
class Spec:
    """A whole model: everything that decides what the model computes.

    model_type: the name of the family's file. max_positions: the largest number of tokens in a text. head: whether
    there is an LM head. tied: whether the LM head is the embedding. embed_scale: the factor of embeddings, rounded to
    the compute type as in published code. positions: position embeddings, which are added to the token embeddings;
    rotary embeddings are in the blocks. logit_softcap: the number c with which logits become c tanh(logit / c).
    logit_scale: the factor of logits. encoder: the encoder of an encoder-decoder; it has no LM head, and shares the
    decoder's token embedding unless the encoder's spec has own_embedding. next_tokens: the blocks that guess further
    tokens (MTP).

    features: the features that a trained head reads. The input ids of such a head are the target's, and its vocabulary
    is the ids that it drafts. It uses the target's embedding unless it has own_embedding, and the target's LM head
    unless it has an LM head.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    blocks: tuple[Block, ...]
    final_norm: Norm | None = Norm()
    embed_scale: float = 1.0
    embed_norm: Norm | None = None
    positions: Positions | None = None
    head: bool = True
    tied: bool = False
    head_bias: bool = False
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    encoder: Spec | None = None
    own_embedding: bool = False
    next_tokens: Spec | None = None
    features: Features | None = None

    def __post_init__(self) -> None:
        _above_zero(logit_softcap=self.logit_softcap)

    @property
    def num_layers(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    @property
    def num_slots(self) -> int:
        """The number of cache slots of one sequence: one for its text, and one more for its encoder input, if any."""
        return 1 if self.encoder is None else 2

    @property
    def num_weights(self) -> int:
        """The number of parameters; a tied LM head is the same matrix as the embedding and counts once."""
        return sum(math.prod(weight.shape) for weight in weights(self))

    @property
    def has_experts(self) -> bool:
        """Whether some block has a mixture of experts."""
        return any(block.experts is not None for block in self.blocks)

    @property
    def has_windows(self) -> bool:
        """Whether the attention of some block has a window."""
        return any(block.attention is not None and block.attention.window is not None for block in self.blocks)

    @property
    def has_states(self) -> bool:
        """Whether some block keeps a state in place of keys and values."""
        return any(block.recurrence is not None for block in self.blocks)

    @property
    def cache_shape(self) -> CacheShape:
        """The sizes of a token in the KV cache. Raises UnsupportedModel for a block with no attention or recurrence."""
        if not self.blocks:
            return CacheShape(0, 1, 1)
        if any(block.attention is None and block.recurrence is None for block in self.blocks):
            raise UnsupportedModel(
                f"model_type={self.model_type!r} has blocks that keep no rows, which the KV cache does not hold: use "
                "another model"
            )
        attentions = [a for block in self.blocks if (a := block.attention) is not None]
        largest = max(((a.kv_heads, a.head_dim) for a in attentions), key=math.prod, default=(1, 1))
        sizes = tuple(largest if (a := block.attention) is None else (a.kv_heads, a.head_dim) for block in self.blocks)
        kept = tuple(
            i for i, block in enumerate(self.blocks) if (a := block.attention) is not None and a.shares_kv_of is None
        )
        return CacheShape(
            self.num_layers,
            *largest,
            layers=None if len(kept) == self.num_layers else kept,
            sizes=None if len(set(sizes)) == 1 else sizes,
            windows=_cached_windows([block.attention for block in self.blocks]) if self.has_windows else None,
            refined_keys=any(a.qkv_bias for a in attentions) and all(a.head_dim % KEY_GROUP == 0 for a in attentions),
            states=tuple(
                (i, block.recurrence.state(self.hidden_size))
                for i, block in enumerate(self.blocks)
                if block.recurrence is not None
            ),
        )

    def only(self, layers: Seq[int]) -> Spec:
        """Return the spec of a model that has only these layers. layers: their indices, ascending.

        If a remaining layer read the keys and values of a layer that is left out, it now has its own keys and values.
        """
        place = {layer: i for i, layer in enumerate(layers)}

        def moved(block: Block) -> Block:
            a = block.attention
            if a is None or a.shares_kv_of is None:
                return block
            return replace(block, attention=replace(a, shares_kv_of=place.get(a.shares_kv_of)))

        return replace(self, blocks=tuple(moved(self.blocks[layer]) for layer in layers))

    @property
    def layer_input(self) -> LayerInput | None:
        """The second input of all blocks, or None if blocks have none. Raises UnsupportedModel if the blocks differ."""
        inputs = {block.per_layer_input for block in self.blocks}
        if len(inputs) > 1:
            raise UnsupportedModel(f"model_type={self.model_type!r} has blocks that read different inputs of their own")
        return next(iter(inputs), None)


def _cached_windows(attentions: Seq[Attention | None]) -> tuple[int | None, ...]:
    """Return how far back any layer reads each layer's keys, in positions; None = to the beginning of the text."""
    windows = [None if a is None or a.sees != "past" else a.window for a in attentions]
    for a, window in zip(attentions, list(windows), strict=True):
        if a is not None and a.shares_kv_of is not None:
            widest = windows[a.shares_kv_of]
            windows[a.shares_kv_of] = None if widest is None or window is None else max(widest, window)
    return tuple(windows)


def reaching(spec: Spec, num_tokens: int | None) -> Spec:
    """Return the spec for texts of at most `num_tokens` tokens; None = as many as longrope's short factors allow.

    Published code uses longrope's short factors until a text is longer than the texts of training. Then it uses the
    long factors, and computes the whole text again. forerun uses one list of factors for all texts of a model, because
    the bits of a row may not depend on the tokens that follow it. The model uses the short factors if no text can be
    longer than the texts of training, otherwise the long factors.
    """
    lengths = {rope.original_max_positions for rope in _ropes(spec) if rope.kind == "longrope"}
    if not lengths:
        return spec
    if num_tokens is None or num_tokens <= min(lengths):
        return replace(spec, max_positions=min(spec.max_positions, *lengths))

    def far(block: Block) -> Block:
        a = block.attention
        if a is None or a.rope is None or a.rope.kind != "longrope":
            return block
        return replace(block, attention=replace(a, rope=replace(a.rope, far=True)))

    return replace(spec, blocks=tuple(map(far, spec.blocks)))


def _ropes(spec: Spec) -> list[Rope]:
    return [a.rope for block in spec.blocks if (a := block.attention) is not None and a.rope is not None]


ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}


def itemsize(dtype: str) -> int:
    """Return the bytes of one number of a dtype. The dtype is named as in torch, safetensors and config.json."""
    return ITEMSIZES[dtype]


def inputs_of(dtype: str) -> str:
    """Return the dtype of recurrent layers' inputs in a cache of this dtype. Only keys and values can be in 8 bits."""
    return "bfloat16" if dtype == "int8" else dtype


# For keys and values in 8 bits, as in csrc/kernels.h: how many dimensions of a key and of a value share a scale, and
# how many dimensions of a key have second codes.
KEY_GROUP, VALUE_GROUP, REFINED = 32, 64, 32


@dataclass(frozen=True)
class CacheShape:
    """The sizes that decide how much cache a token takes: 2 x num_kv_heads x head_dim numbers in each kept layer.

    layers: the layers whose keys and values are kept, ascending; None = all. The other layers do not run, or read the
    keys and values of a kept layer. sizes: num_kv_heads and head_dim of each layer, where layers differ; the fields
    num_kv_heads and head_dim are then the largest. windows: for each layer, the number of positions that a row sees,
    its own included; None in place of a number = all positions, None in place of the tuple = all positions in every
    layer. refined_keys: whether keys in 8 bits have second codes where a bias makes some dimensions large
    (kv/rounded.py). states: the recurrent layers, ascending, with the shapes of their states.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[int, ...] | None = None
    sizes: tuple[tuple[int, int], ...] | None = None
    windows: tuple[int | None, ...] | None = None
    refined_keys: bool = False
    states: tuple[tuple[int, StateShape], ...] = ()

    @cached_property
    def kinds(self) -> Seq[int | None]:
        """The distinct windows of the kept layers, the widest first. Layers with the same window share block tables."""
        windows = {None if self.windows is None else self.windows[layer] for layer in self.kept} or {None}
        return sorted(windows, key=lambda window: -math.inf if window is None else -window)

    def kind_of(self, layer: int) -> int:
        """Return the index of a layer's window in `kinds`; 0 for a layer that keeps no keys and values."""
        if self.windows is None or layer not in self.kept:
            return 0
        return self.kinds.index(self.windows[layer])

    @property
    def kept(self) -> Seq[int]:
        """The indices of the layers whose keys and values are kept in the cache."""
        return range(self.num_layers) if self.layers is None else self.layers

    def size_of(self, layer: int) -> tuple[int, int]:
        """Return the number of a layer's key and value heads, and the width of a head."""
        return (self.num_kv_heads, self.head_dim) if self.sizes is None else self.sizes[layer]

    def only(self, layers: Iterable[int]) -> CacheShape:
        """Return the cache shape of a model that runs only these layers."""
        layers = tuple(layers)
        states = tuple((layer, shape) for layer, shape in self.states if layer in layers)
        return replace(self, layers=tuple(layer for layer in layers if layer in self.kept), states=states)

    def state_bytes(self, dtype: str) -> int:
        """Return the bytes of one state over all recurrent layers, in a cache of this dtype."""
        return sum(shape.state_bytes(inputs_of(dtype)) for _, shape in self.states)

    def input_bytes(self, dtype: str) -> int:
        """Return the bytes of one token's inputs over all recurrent layers, in a cache of this dtype."""
        return sum(shape.input_bytes(inputs_of(dtype)) for _, shape in self.states)

    def bytes_per_token(self, dtype: str, kind: int | None = None) -> int:
        """Return the bytes of a token's keys and values in all layers, or in the layers with the window kinds[kind]."""
        layers = [layer for layer in self.kept if kind is None or self.kind_of(layer) == kind]
        return itemsize(dtype) * sum(self.size_of(layer)[0] * sum(self.widths_of(layer, dtype)) for layer in layers)

    def widths_of(self, layer: int, dtype: str) -> tuple[int, int]:
        """Return how many numbers of this dtype a key head and a value head take. In 8 bits, scales are included."""
        dim = self.size_of(layer)[1]
        if dtype != "int8":
            return dim, dim
        key_dim = dim + REFINED * self.refined_keys
        return key_dim + 2 * -(-key_dim // KEY_GROUP), dim + 2 * -(-dim // VALUE_GROUP)

    def within(self, num_tokens: int) -> CacheShape:
        """Return the cache shape for texts of at most `num_tokens` tokens.

        Windows of at least `num_tokens` positions are dropped.
        """
        if self.windows is None:
            return self
        windows = tuple(None if window is None or window >= num_tokens else window for window in self.windows)
        return replace(self, windows=windows if any(windows) else None)


@dataclass(frozen=True)
class Weight:
    """One stored tensor of a spec, under the name that published checkpoints usually give it.

    product: the name of a matrix product; matrices of the same product have the same input, and may be joined.
    least_bits: the fewest bits to which the tensor may be rounded. split: the side that tensor parallelism cuts.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    product: str = ""
    least_bits: int = 16
    split: Split | None = None


EMBEDDING, POSITIONS = "model.embed_tokens.weight", "model.embed_positions.weight"
FINAL_NORM, HEAD = "model.norm.weight", "lm_head.weight"
BEFORE_BLOCKS = ("fc", "input", "embedding_norm", "hidden_norm")  # prefixes of a head's weights before its first block
SIDES = ("embedding_norm", "hidden_norm")  # a head's norms: of the token's embedding, and of the features
LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"  # the rows of all blocks, side by side
LAYER_PRODUCTS = ("model.layer_embedding", "model.layer_inputs")  # that embedding, and the projection beside it
SCORES = (".router", ".shared_gate")  # products that choose experts: in float32, as a small error may change a choice
MATRIX_BITS, TABLE_BITS = 4, 8  # the fewest bits; errors of an LM head or an embedding go into every token


def weights(spec: Spec) -> list[Weight]:
    """Return every stored tensor of a spec, block by block; the LM head comes last."""
    hidden, features = spec.hidden_size, spec.features
    num_ids = spec.vocab_size if features is None else features.num_ids
    tensors = list[Weight]()
    if features is None or spec.own_embedding:
        tensors += [Weight(EMBEDDING, (num_ids, hidden), "table", "embedding", TABLE_BITS, "out")]
    if features is not None:
        tensors += _features(features, hidden)
    if spec.encoder is not None:
        shared = None if spec.encoder.own_embedding else EMBEDDING
        encoder = [weight for weight in weights(spec.encoder) if weight.name != shared]
        tensors += [replace(w, name=of_encoder(w.name), product=w.product and of_encoder(w.product)) for w in encoder]
    if spec.positions is not None and spec.positions.kind == "learned":
        tensors += [Weight(POSITIONS, (spec.positions.num + spec.positions.offset, hidden), "table")]
    tensors += _norm("model.embed_norm", spec.embed_norm, hidden)
    if (inputs := spec.layer_input) is not None:
        width, (looked_up, projected) = spec.num_layers * inputs.size, LAYER_PRODUCTS
        tensors += [Weight(LAYER_EMBEDDING, (spec.vocab_size, width), "table", looked_up, TABLE_BITS)]
        tensors += _matrix("model.per_layer_model_projection", width, hidden, projected, False, None)
        tensors += _norm("model.per_layer_projection_norm", inputs.norm, inputs.size)
    for i, block in enumerate(spec.blocks):
        tensors += block_weights(block, hidden, f"model.layers.{i}.")
    tensors += _norm("model.norm", spec.final_norm, hidden)
    if spec.head and not spec.tied:
        tensors += [Weight(HEAD, (spec.vocab_size, hidden), "matrix", "head", TABLE_BITS, "out")]
    if spec.head and spec.head_bias:
        tensors += [Weight("lm_head.bias", (spec.vocab_size,), "vector", "head")]
    return tensors


def _features(features: Features, hidden: int) -> Iterator[Weight]:
    """Yield the tensors of a drafting head that make its input, and the projection of its output."""
    whole = features.num * features.size
    if features.row_norms:
        yield from (Weight(f"fc_norm.{i}.weight", (features.size,), "vector") for i in range(features.num))
    if features.whole_norm:
        yield Weight("input_norm.weight", (whole,), "vector")
    if features.side_norms:
        yield from (Weight(f"{side}.weight", (hidden,), "vector") for side in SIDES)
    yield from _norm(SIDES[1], features.context_norm, hidden)
    if features.joined:
        yield from _matrix("fc", hidden, whole, "fc", features.bias, None)
    if features.act is not None:
        yield from _matrix("fc_act", hidden, whole, "fc", features.bias, None)
    if features.input == "product":
        yield from _matrix("input", hidden, 2 * hidden, "input", features.input_bias, None)
    if features.feeds == "projected":
        yield from _matrix("output", features.size, hidden, "output", False, None)


def missing_keys(spec: Spec, layers: Seq[int]) -> dict[int, int]:
    """Map each layer that reads the keys and values of a layer outside of `layers` to that other layer.

    layers: the indices of the layers that run.
    """
    sources = {i: a.shares_kv_of for i in layers if (a := spec.blocks[i].attention) is not None}
    return {i: other for i, other in sources.items() if other is not None and other not in layers}


def read_share(spec: Spec, name: str) -> float:
    """Return the average share of a weight or a product that a pass over one row reads.

    The share is 1, or chosen / num for experts. An embedding that is only looked up has share 0.
    """
    if name in (LAYER_EMBEDDING, LAYER_PRODUCTS[0]):
        return 0.0
    match = re.match(r"model\.layers\.(\d+)\.mlp\.experts\.", name)
    experts = None if match is None else spec.blocks[int(match[1])].experts
    return 1.0 if experts is None else experts.chosen / experts.num


def of_encoder(name: str) -> str:
    """Return the name that a weight of the encoder's spec has in the encoder-decoder."""
    return f"encoder.{name.removeprefix('model.')}"


def block_weights(block: Block, hidden: int, at: str) -> list[Weight]:
    """Return the tensors of one block of hidden size `hidden`; their names begin with `at`.

    Norms of rows come first, then matrices, then all other tensors. Random weights are drawn in this order, so another
    order would make another model from the same seed.
    """
    tensors: list[Weight] = []
    tensors += _norm(at + "input_layernorm", block.pre_attention, hidden)
    if block.attention is not None:
        tensors += _attention(block.attention, hidden, at)
    if block.recurrence is not None:
        tensors += _recurrence(block.recurrence, hidden, at)
    tensors += _norm(at + "post_attention_layernorm", block.post_attention, hidden)
    tensors += _norm(at + pre_mlp_name(block), block.pre_mlp, hidden)
    if block.mlp is not None:
        tensors += _mlp(block.mlp, hidden, at + "mlp.")
    if block.experts is not None:
        tensors += _experts(block.experts, hidden, at + "mlp.")
    tensors += _norm(at + "post_feedforward_layernorm", block.post_mlp, hidden)
    for name, norm in beside_norms(block).items():
        tensors += _norm(at + name, norm, hidden)
    if (inputs := block.per_layer_input) is not None:
        tensors += _matrix(f"{at}per_layer_input_gate", inputs.size, hidden, f"{at}layer_gate", False, "out")
        tensors += _matrix(f"{at}per_layer_projection", hidden, inputs.size, f"{at}layer_up", False, "in")
        tensors += _norm(f"{at}post_per_layer_input_norm", inputs.norm, hidden)
    if block.out_scale:
        tensors += [Weight(f"{at}layer_scalar.weight", (1,), "vector")]
    return sorted(tensors, key=_rank)


def _rank(weight: Weight) -> int:
    if weight.name.endswith("layernorm.weight"):
        return 0
    if weight.role in ("matrix", "experts"):
        return 2 if weight.product.endswith(".gate_up") else 1
    return 3 if weight.name.endswith("_proj.bias") else 4


def pre_mlp_name(block: Block) -> str:
    """Return the name of the norm before the feed-forward part; it depends on whether attention has a post-norm."""
    return "post_attention_layernorm" if block.post_attention is None else "pre_feedforward_layernorm"


def beside_norms(block: Block) -> dict[str, Norm | None]:
    """Return, by name, the norms of experts that run beside a feed-forward part, and the post-norm of this part."""
    return {
        "post_feedforward_layernorm_1": block.post_dense,
        "pre_feedforward_layernorm_2": block.pre_experts,
        "post_feedforward_layernorm_2": block.post_experts,
    }


def attention_name(a: Attention) -> str:
    """Return the prefix of an attention's weight names within its block."""
    return "encoder_attn." if a.sees == "encoder" else "self_attn."


def _norm(name: str, norm: Norm | None, size: int) -> Iterator[Weight]:
    if norm is not None and norm.weight:
        yield Weight(f"{name}.weight", (size,), "vector")
    if norm is not None and norm.bias:
        yield Weight(f"{name}.bias", (size,), "vector")


def _matrix(name: str, outputs: int, inputs: int, product: str, bias: bool, split: Split | None) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (outputs, inputs), "matrix", product, MATRIX_BITS, split)
    if bias:
        yield Weight(f"{name}.bias", (outputs,), "vector", product, split="out" if split == "out" else None)


def _attention(a: Attention, hidden: int, at: str) -> Iterator[Weight]:
    prefix = at + attention_name(a)
    reads = a.reads or hidden
    q = a.heads * a.head_dim
    kv = a.kv_heads * a.head_dim
    of_q = hidden if a.sees == "encoder" else reads
    qkv = f"{at}kv" if a.sees == "encoder" else f"{at}qkv"  # keys and values of an encoder's rows have another input
    yield from _matrix(f"{prefix}q_proj", q, of_q, f"{at}qkv", a.qkv_bias, "out")
    if a.gate:
        yield from _matrix(f"{prefix}gate_proj", q, of_q, f"{at}qkv", a.qkv_bias, "out")
    yield from _norm(f"{prefix}q_norm", a.q_norm, _span(a.q_norm, a.heads, a.head_dim))
    if a.shares_kv_of is None:
        yield from _matrix(f"{prefix}k_proj", kv, reads, qkv, a.qkv_bias, "out")
        if not a.k_is_v:
            yield from _matrix(f"{prefix}v_proj", kv, reads, qkv, a.qkv_bias, "out")
        yield from _norm(f"{prefix}k_norm", a.k_norm, _span(a.k_norm, a.kv_heads, a.head_dim))
        yield from _norm(f"{prefix}v_norm", a.v_norm, _span(a.v_norm, a.kv_heads, a.head_dim))
    if a.sinks:
        yield Weight(f"{prefix}sinks.weight", (a.heads,), "vector", split="out")
    if isinstance(a.bias, Buckets):
        yield Weight(f"{prefix}relative_attention_bias.weight", (a.bias.num, a.heads), "table")
    yield from _matrix(f"{prefix}o_proj", hidden, q, f"{at}o", a.o_bias, "in")


def recurrence_name(r: Recurrence) -> str:
    """Return the prefix of a recurrence's weight names within its block."""
    return "conv." if r.kind == "short_conv" else "linear_attn."


def _recurrence(r: Recurrence, hidden: int, at: str) -> Iterator[Weight]:
    prefix, width = at + recurrence_name(r), r.width(hidden)
    if r.kind == "short_conv":
        yield from _matrix(f"{prefix}in_proj", 3 * hidden, hidden, f"{at}state_in", r.biases, None)
        yield Weight(f"{prefix}conv.weight", (hidden, r.conv), "vector")
        if r.biases:
            yield Weight(f"{prefix}conv.bias", (hidden,), "vector")
        yield from _matrix(f"{prefix}out_proj", hidden, hidden, f"{at}o", r.biases, None)
        return
    inner = r.value_heads * r.value_dim
    yield from _matrix(f"{prefix}in_proj_qkv", width, hidden, f"{at}state_in", False, None)
    yield from _matrix(f"{prefix}in_proj_z", inner, hidden, f"{at}state_in", False, None)
    for gate in ("b", "a"):
        yield from _matrix(f"{prefix}in_proj_{gate}", r.value_heads, hidden, f"{at}state_gates", False, None)
    yield Weight(f"{prefix}conv1d.weight", (width, r.conv), "vector")
    yield Weight(f"{prefix}dt_bias.weight", (r.value_heads,), "vector")
    yield Weight(f"{prefix}A_log.weight", (r.value_heads,), "vector")
    yield from _norm(f"{prefix}norm", r.norm, r.value_dim)
    yield from _matrix(f"{prefix}out_proj", hidden, inner, f"{at}o", False, None)


def _span(norm: Norm | None, heads: int, head_dim: int) -> int:
    return head_dim if norm is not None and norm.span == "head" else heads * head_dim


def _mlp(mlp: Mlp, hidden: int, at: str) -> Iterator[Weight]:
    if mlp.gated:
        yield from _matrix(f"{at}gate_proj", mlp.size, hidden, f"{at}gate_up", mlp.bias, "out")
    yield from _matrix(f"{at}up_proj", mlp.size, hidden, f"{at}gate_up", mlp.bias, "out")
    if mlp.down:
        yield from _matrix(f"{at}down_proj", hidden, mlp.size, f"{at}down", mlp.bias, "in")


def _experts(e: Experts, hidden: int, at: str) -> Iterator[Weight]:
    yield from _norm(f"{at}router_norm", e.router_norm, hidden)
    yield Weight(f"{at}gate.weight", (e.num, hidden), "matrix", f"{at}router")
    if e.router_bias:
        yield Weight(f"{at}gate.bias", (e.num,), "vector", f"{at}router")
    if e.scaled:
        yield Weight(f"{at}expert_scale.weight", (e.num,), "vector")
    if e.choice_bias:
        yield Weight(f"{at}choice_bias.weight", (e.num,), "vector")
    for i in range(e.num):
        for weight in _mlp(e.mlp, hidden, f"{at}experts.{i}."):
            yield replace(weight, role="experts") if weight.role == "matrix" else weight
    if e.shared is not None:
        yield from _mlp(e.shared, hidden, f"{at}shared_expert.")
    if e.shared_gate:
        yield Weight(f"{at}shared_expert_gate.weight", (1, hidden), "matrix", f"{at}shared_gate")


def weight_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Map the name of every stored tensor to its shape."""
    return {weight.name: weight.shape for weight in weights(spec)}


def products(all_weights: Seq[Weight]) -> dict[str, list[Weight]]:
    """Group matrices by product, in order. Matrices of a product have the same input and may be joined."""
    groups: dict[str, list[Weight]] = {}
    for weight in all_weights:
        if weight.role in ("matrix", "experts", "table") and weight.product:
            groups.setdefault(weight.product, []).append(weight)
    return groups


# --------------------------------------------------------------------------------------- Llama and its like, in numbers


@dataclass(frozen=True)
class Plain:
    """A decoder like Llama, given by the sizes in its config.json. Its blocks differ only in their windows.

    This is a short form for writing and reading such a spec. windows: the window of each block; () = no block has a
    window. qk_norm: whether queries and keys have norms, over each head.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    max_positions: int
    rope: Rope = Rope()
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()

    @property
    def spec(self) -> Spec:
        """The model as a list of blocks."""
        norm = Norm(eps=self.norm_eps)
        head_norm = Norm(eps=self.norm_eps, span="head") if self.qk_norm else None
        attention = Attention(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            rope=self.rope,
            q_norm=head_norm,
            k_norm=head_norm,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
        )
        mlp = Mlp(self.ffn_size, bias=self.mlp_bias)
        windows = self.windows or (None,) * self.num_layers
        blocks = tuple(
            Block(norm, replace(attention, window=window), pre_mlp=norm, mlp=mlp)
            for window in windows[: self.num_layers]
        )
        return Spec(
            self.model_type, self.vocab_size, self.hidden_size, self.max_positions, blocks, norm, tied=self.tied
        )

    @classmethod
    def of(cls, spec: Spec) -> Plain:
        """Make a Plain from the spec of a model like Llama.

        Raises UnsupportedModel for any other spec. The message names what Llama does not have.
        """
        norm = spec.final_norm or Norm()
        first = Block(norm, Attention(1, 1, 2, rope=Rope()), pre_mlp=norm, mlp=Mlp(1))  # where there is no block
        first = spec.blocks[0] if spec.blocks else first
        if first.attention is None or first.mlp is None or first.pre_attention is None:
            raise UnsupportedModel(f"model_type={spec.model_type!r} has blocks without attention or feed-forward part")
        a = first.attention
        windows = tuple(block.attention.window if block.attention is not None else None for block in spec.blocks)
        plain = cls(
            spec.model_type,
            spec.vocab_size,
            spec.hidden_size,
            spec.num_layers,
            a.heads,
            a.kv_heads,
            a.head_dim,
            first.mlp.size,
            first.pre_attention.eps,
            spec.max_positions,
            a.rope or Rope(),
            spec.tied,
            a.qkv_bias,
            a.o_bias,
            first.mlp.bias,
            a.q_norm is not None,
            windows if any(windows) else (),
        )
        if (other := difference(plain.spec, spec)) is not None:
            raise UnsupportedModel(f"model_type={spec.model_type!r} has {other}, which Llama and its like do not have")
        return plain


def resized(spec: Spec, **sizes: Any) -> Spec:
    """Return a Llama-like spec with other sizes, named as in Plain. Raises UnsupportedModel for any other spec."""
    return replace(Plain.of(spec), **sizes).spec


def difference(a: Any, b: Any, at: str = "") -> str | None:
    """Return the first field in which two specs, or parts of specs, differ; None if they are equal.

    The result has the field's path and its value in `b`.
    """
    if a == b:
        return None
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return next(
            mismatch for i, (x, y) in enumerate(zip(a, b, strict=True)) if (mismatch := difference(x, y, f"{at}[{i}]"))
        )
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        names = [field.name for field in dataclasses.fields(a)]
        parts = ((getattr(a, name), getattr(b, name), f"{at}.{name}".lstrip(".")) for name in names)
        return next(mismatch for part in parts if (mismatch := difference(*part)))
    return f"{at}={b!r:.80}"
