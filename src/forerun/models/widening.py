"""Widens a trained Llama model to a larger Llama model that computes the same function.

A speed measurement needs a large model, and a real acceptance rate needs a trained model. Widening gives both: the
result has the shape, the bytes and the time of the large model, and the output of the small trained model. When you
report a number from such a model, call the model *a widened small model*.

Why the output stays the same where the hidden size grows from d to D:

* The new dimensions of the residual stream are exact zeros in all layers, because the new columns of the embedding and
  the new output rows of o_proj and down_proj are zero. Matrices that read the stream have noise in their new columns,
  which meets these zeros.
* An RMS norm now divides by D instead of d. To undo this, its weights are multiplied by sqrt(d/D), and its eps by d/D.
* A head of s dimensions becomes a head of S = f s dimensions. In the trained head, rotary pair i turns by
  theta^(-2i/s). Pair f i of the wider head turns by the same angle, so the dimensions of pair i become pair f i. This
  holds under each rope scaling that `_check_heads` allows. Scores are divided by sqrt(S) instead of sqrt(s); to undo
  this, query weights are multiplied by sqrt(f). The new dimensions of a head are zero in queries and noise in keys, so
  their product is zero. In values, the new dimensions are noise, which meets zero columns of o_proj.
* Query heads that share a key-value head still share it. If groups of query heads are smaller in the wide model, the
  heads of one trained group are spread over several groups, and each of these groups has a copy of the key-value head.
  New heads and new feed-forward units are noise, and their outputs meet zero columns of o_proj and down_proj.
* New layers are noise with o_proj = down_proj = 0, so they add exact zeros to the residual stream.
* New ids get probability 0, in tied models too, through the last of the new residual dimensions. This dimension is not
  zero: it holds a small constant c at every token. The constant adds c^2 to every sum of squares, and eps' = (eps d -
  c^2) / D subtracts c^2 again. Only the final norm reads this dimension, with a weight that turns c into h, a number
  about as large as the other dimensions. In the LM head, the rows of new ids hold -n in this dimension, and zeros in
  the d trained dimensions. So the logits of new ids are -n h. At every token of a run of random ids, -n h is at most
  -2^15, so float32 softmax gives exact zeros even at temperature 100. The rows of old ids hold 0 in this dimension, or
  c if the LM head is the embedding. With c, all logits of old ids rise by the same number c h, some 1e-3, which does
  not change their softmax. Feed no new id to a tied model: the output has no meaning.

In float32 the results agree up to the order of summation. In bfloat16 the factors sqrt(d/D) and sqrt(f) are exact where
they are powers of two (D = 4 d, S = 4 s). With other factors, each norm weight and query weight is rounded once more,
by up to 0.2 %. The result is then a slightly disturbed model, as after any rounding to bfloat16.

Noise is no larger than the trained weights. Noise is used in place of zeros because the widened model must take as long
as a dense checkpoint with the same shape, and memory full of zeros might be read faster. Weights that have to be zero
are written explicitly, so that all of their memory pages exist.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun import ops
from forerun.blocks import Plain, Spec, weight_shapes
from forerun.errors import BadOption, UnsupportedModel
from forerun.host_tensor import LARGEST, Floats, HostTensor
from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, Runner
from forerun.sampling.largest import Ids

NOISE_NUMBERS = (1 << 20) + 7  # in the repeated block; no row length divides it, so no two rows are equal
OFFSET_STEP = 104_729  # a prime: hundreds of tensors begin at as many places
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LARGEST_CARRIED = 2.0**-10  # c is a power of two, exact in every type
PROBE_TOKENS = 256
COMPUTED = ("float32", "bfloat16")  # types that all operators compute with
MARGIN = 2.0**15  # logits of new ids lie at least this far below 0: at temperature 100, 327 in the exponent


@dataclass(frozen=True)
class WideShape:
    """The sizes of the larger model, in elements. None = the trained size. No size may be below the trained size."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    head_dim: int | None = None
    vocab_size: int | None = None


def widen(
    spec: Spec, weights: Mapping[str, HostTensor], shape: WideShape, *, seed: int = 0
) -> tuple[Spec, dict[str, HostTensor]]:
    """Return the spec and the weights of a larger model that computes the same function. The weights keep their dtype.

    Widening takes memory for the result and some MB. With new token ids, it temporarily takes memory for a copy of the
    trained weights, too. seed: for the noise in new weights. Raises BadOption for a shape that the model does not fit
    into. Raises UnsupportedModel for models unlike Llama, and for models with QK norm, because QK norm shares the eps
    that must change.
    """
    config, wide = Plain.of(spec), Plain.of(wide_config(spec, shape))
    trained = weights["model.layers.0.mlp.gate_proj.weight"]
    block = _noise(trained, seed)
    heads = _HeadPlaces.of(config, wide)
    scale = math.sqrt(config.hidden_size / wide.hidden_size)
    widened = {name: HostTensor.empty(sizes, trained.dtype) for name, sizes in weight_shapes(wide.spec).items()}
    for i, (name, out) in enumerate(widened.items()):
        is_norm = name.endswith("norm.weight")
        if _must_be_zero(name):
            out.values[...] = 0  # writes every page: memory that was never written is not read from memory at all
        elif is_norm:
            _set(out, ..., scale)
        else:
            _fill(out, block, i * OFFSET_STEP % len(block))
        if name in weights:
            _place(out, _times(weights[name], scale) if is_norm else weights[name], name, heads)
    if wide.vocab_size > config.vocab_size:
        _separate(widened, config, _spare_lane(config, weights, wide, seed))
    return wide.spec, widened


# ------------------------------------------------------------------------------------------------------- the config


def wide_config(spec: Spec, shape: WideShape) -> Spec:
    """Return the spec of the widened model. Raises as `widen`."""
    config = Plain.of(spec)
    if config.qk_norm:
        raise UnsupportedModel(
            f"a {config.model_type} model cannot be widened: its QK norm shares the eps that changes"
        )
    sizes = {name: size for name, size in dataclasses.asdict(shape).items() if size is not None}
    for name, want in sizes.items():
        if want < (have := getattr(config, name)):
            raise BadOption(f"{name}={want} is not possible: the model has {have}, and widening cannot shrink it")
    wide = dataclasses.replace(
        config, **sizes, windows=config.windows + config.windows[-1:] * (shape.num_layers - config.num_layers)
    )
    _check_heads(config, wide)
    if wide.vocab_size > config.vocab_size and wide.hidden_size == config.hidden_size:
        raise BadOption(
            f"vocab_size={wide.vocab_size} is not possible with hidden_size={wide.hidden_size}: new ids need a "
            "residual dimension that the model does not have"
        )
    return dataclasses.replace(wide, norm_eps=_wide_eps(config, wide)).spec


def _check_heads(config: Plain, wide: Plain) -> None:
    rope = config.rope
    if wide.head_dim != config.head_dim and (rope.kind in ("yarn", "longrope") or rope.dims is not None):
        raise UnsupportedModel(
            f"head_dim={wide.head_dim} is not possible: the model has {config.head_dim}, and its rotary positions "
            f"({rope.kind}, of {rope.dims or 'all'} dimensions) are not the same in another size"
        )
    if wide.head_dim % config.head_dim:
        raise BadOption(f"head_dim={wide.head_dim} is not possible: it must be a multiple of {config.head_dim}")
    if wide.num_heads % wide.num_kv_heads:
        raise BadOption(f"num_heads={wide.num_heads} is not possible: it must be a multiple of {wide.num_kv_heads}")
    needed = config.num_kv_heads * _copies(config, wide)
    if needed > wide.num_kv_heads:
        raise BadOption(
            f"num_kv_heads={wide.num_kv_heads} is not possible: {_group(config)} query heads share a key-value head "
            f"and would have to in groups of {_group(wide)}, which takes {needed} key-value heads"
        )


def _group(config: Plain) -> int:
    """Return the number of query heads that share a key-value head."""
    return config.num_heads // config.num_kv_heads


def _copies(config: Plain, wide: Plain) -> int:
    """Return the number of copies that each trained key-value head gets in the wide model.

    This is the number of groups in the wide model over which the query heads of one trained group are spread.
    """
    return math.ceil(_group(config) / _group(wide))


def _carried(config: Plain) -> float:
    """Return c, the constant in the last residual dimension: a power of two with c^2 at most a quarter of eps d."""
    limit = math.sqrt(config.norm_eps * config.hidden_size / 4)
    return min(LARGEST_CARRIED, 2.0 ** math.floor(math.log2(limit)))


def _wide_eps(config: Plain, wide: Plain) -> float:
    added = _carried(config) ** 2 if wide.vocab_size > config.vocab_size else 0.0
    return (config.norm_eps * config.hidden_size - added) / wide.hidden_size


# --------------------------------------------------------------------------------------------------------- the noise


def _noise(trained: HostTensor, seed: int) -> HostTensor:
    """Return NOISE_NUMBERS uniform random numbers, with half the standard deviation of the weights `trained`."""
    limit = float(trained.float32().std()) * math.sqrt(3) / 2
    numbers = (np.random.default_rng(seed).random(NOISE_NUMBERS, np.float32) * 2 - 1) * np.float32(limit)
    return HostTensor.of(numbers).to(trained.dtype)


def _set(out: HostTensor, places: Any, number: float) -> None:
    """Write a number into some elements of a tensor, rounded to the tensor's dtype."""
    out.values[places] = HostTensor.of(np.float32(number)).to(out.dtype).values


def _times(weight: HostTensor, factor: float) -> HostTensor:
    """Return a weight times a factor, rounded to the weight's dtype."""
    return HostTensor.of(weight.float32() * np.float32(factor)).to(weight.dtype)


def _fill(out: HostTensor, block: HostTensor, offset: int) -> None:
    """Fill a tensor with copies of one block of noise, because drawing a billion numbers would take too long.

    offset: the index in the block of the tensor's first number. It differs between tensors, so that no two tensors are
    equal. An engine might store equal tensors only once, and would then take less time and memory than for a real large
    model.
    """
    flat = out.values.reshape(-1)
    start = min(len(block) - offset, len(flat))
    flat[:start] = block.values[offset : offset + start]
    while start < len(flat):
        part = flat[start : start + len(block)]
        part[:] = block.values[: len(part)]
        start += len(part)


def _must_be_zero(name: str) -> bool:
    """Whether the new weights of a tensor are zero: in a bias, and in a matrix whose output is in the residual stream.

    Noise in a bias would serve no purpose.
    """
    return name.endswith((EMBEDDING, "o_proj.weight", "down_proj.weight", ".bias"))


# ------------------------------------------------------------------------------------------------ the trained weights


@dataclass(frozen=True)
class _HeadPlaces:
    """Locates the rows of trained heads in the wide matrices. A lane is one dimension of a head.

    q_rows: for each row of the trained q_proj, the index of its row in the wide q_proj, which is also the index of its
    column in the wide o_proj. q_new_rows: the other rows of the same heads in the wide q_proj. q_scale: the factor for
    query weights. kv_rows: the indices of the rows of the wide k_proj and v_proj that get trained rows. kv_sources: for
    each index in kv_rows, the index of the trained row.
    """

    q_rows: Ids
    q_new_rows: Ids
    q_scale: float
    kv_rows: Ids
    kv_sources: Ids

    @classmethod
    def of(cls, config: Plain, wide: Plain) -> _HeadPlaces:
        copies, group = _copies(config, wide), _group(config)
        # The query heads of a trained group follow one another, from the first of the wide groups with its copies on.
        q_heads = [i // group * copies * _group(wide) + i % group for i in range(config.num_heads)]
        lanes = _lanes(config.head_dim, wide.head_dim)
        size = wide.head_dim
        new_lanes = [lane for lane in range(size) if lane not in set(lanes)]
        kv_heads = range(config.num_kv_heads * copies)
        sources = [i // copies for i in kv_heads]
        return cls(
            q_rows=_rows(q_heads, lanes, size),
            q_new_rows=_rows(q_heads, new_lanes, size),
            q_scale=_query_scale(config, wide),
            kv_rows=_rows(kv_heads, lanes, size),
            kv_sources=_rows(sources, range(config.head_dim), config.head_dim),
        )


def _lanes(head_dim: int, wide: int) -> list[int]:
    """Return, for each dimension of a trained head, its index in a wide head.

    Rotary pair i, which is dimensions i and i + head_dim / 2, becomes pair i * wide / head_dim.
    """
    step, half = wide // head_dim, head_dim // 2
    return [step * i for i in range(half)] + [step * i + wide // 2 for i in range(half)]


def _query_scale(config: Plain, wide: Plain) -> float:
    return math.sqrt(wide.head_dim / config.head_dim)


def _rows(heads: list[int] | range, lanes: list[int] | range, size: int) -> Ids:
    """Return the row indices of the dimensions `lanes` of each head in `heads`. size: the dimensions of a head."""
    return (np.array(heads, np.int64)[:, None] * size + np.array(lanes, np.int64)).ravel()


def _place(out: HostTensor, trained: HostTensor, name: str, heads: _HeadPlaces) -> None:
    """Write trained weights into the wide tensor `out`.

    Rows and columns of heads go to the places in `heads`. All other weights go to the first rows and columns.
    """
    whole = out.values
    corner = whole[:, : trained.shape[1]] if trained.ndim == 2 else whole
    if ".q_proj." in name:
        whole[heads.q_new_rows] = 0
        corner[heads.q_rows] = _times(trained, heads.q_scale).values
    elif ".k_proj." in name or ".v_proj." in name:
        corner[heads.kv_rows] = trained.values[heads.kv_sources]
    elif name.endswith("o_proj.weight"):
        whole[: trained.shape[0], heads.q_rows] = trained.values
    else:
        corner[: trained.shape[0]] = trained.values


# ----------------------------------------------------------------------------------------------------------- new ids


@dataclass(frozen=True)
class _SpareLane:
    """Holds the values of the last residual dimension, which gives new ids probability 0.

    carried: the constant value of the residual stream in this dimension (c in the module's docstring). norm_weight: the
    final norm's weight for this dimension. new_id: the negative value in this dimension of the LM head's rows of new
    ids (-n in the module's docstring).
    """

    carried: float
    norm_weight: float
    new_id: float


def _separate(weights: Mapping[str, HostTensor], config: Plain, spare: _SpareLane) -> None:
    """Write the values of the last residual dimension into the norms, the embedding and the LM head.

    In an untied LM head, the rows of new ids get zeros in the trained dimensions.
    """
    for name, out in weights.items():
        if name.endswith("norm.weight"):
            _set(out, -1, spare.norm_weight if name == FINAL_NORM else 0.0)
    embedding = weights[EMBEDDING]
    head = weights.get(HEAD)
    old = config.vocab_size
    _set(embedding, (slice(None), -1), spare.carried)
    if head is None:
        _set(embedding, (slice(old, None), -1), spare.new_id)
        return
    _set(head, (slice(old), -1), 0.0)
    _set(head, (slice(old, None), slice(config.hidden_size)), 0.0)
    _set(head, (slice(old, None), -1), spare.new_id)


def _spare_lane(config: Plain, weights: Mapping[str, HostTensor], wide: Plain, seed: int) -> _SpareLane:
    """Return the values of the last residual dimension in the embedding, the final norm and the LM head.

    The values depend on how large the trained model's residual stream gets, which is measured in a run over random ids.
    Raises BadOption if the dtype of the weights cannot hold the values (float16).
    """
    stream, hidden = _last_stream(config, weights, seed)
    rms = np.sqrt(np.square(stream).mean(-1) + config.norm_eps)
    carried = _carried(config)
    shrink = math.sqrt(config.hidden_size / wide.hidden_size)
    typical = math.sqrt(np.square(hidden).mean())
    norm_weight = typical * float(np.median(rms)) * shrink / carried
    smallest = typical * float(np.median(rms) / rms.max())
    new_id = -(2.0 ** math.ceil(math.log2(MARGIN / smallest)))
    dtype = weights[FINAL_NORM].dtype
    if max(norm_weight, -new_id) > LARGEST[dtype]:
        raise BadOption(
            f"vocab_size={wide.vocab_size} is not possible in {dtype}, whose range is too small: use bfloat16"
        )
    return _SpareLane(carried, norm_weight, new_id)


def _last_stream(config: Plain, weights: Mapping[str, HostTensor], seed: int) -> tuple[Floats, Floats]:
    """Return the residual stream before and after the final norm, float32 [T, H] each, from a run over random ids."""
    spec = config.spec
    num = min(PROBE_TOKENS, config.max_positions)
    end = config.num_layers
    if weights[FINAL_NORM].dtype not in COMPUTED:
        weights = {name: weights[name].to("float32") for name in weight_shapes(spec)}
    model = ops.load_model(spec, weights, ops.make("auto", "cpu", spec))
    ids = np.random.default_rng(seed).integers(config.vocab_size, size=num).tolist()
    cache = BlockCache.of(model, "paged", max_batch_size=1, max_seq_len=num)
    cache.open(0)
    runner = Runner(model, cache, taps=[end])
    scores = runner.forward([Run(0, ids, logits="none")])
    stream, hidden = (model.rows.to_host(rows).astype(np.float32) for rows in (scores.taps[end], scores.hidden))
    return stream, hidden
