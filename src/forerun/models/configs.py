"""Reads config.json for all architectures: checks sizes, reads rotary positions, and refuses unknown keys.

Each architecture's file names the keys that it reads. INERT_KEYS, and keys that begin with an underscore, do not change
inference. Any other key must be absent, null, false or empty, or have a value that changes nothing (NEUTRAL). Otherwise
the key might change what the model computes, and the checkpoint is refused with an error that names the key. Numbers
have bounds, which are far beyond the values of all published models. Two keys of config.json may have the same meaning
if their values agree. The formats of two versions of transformers are read: `rope_theta`, `rope_scaling` and
`torch_dtype` (version 4), and `rope_parameters`, `layer_types` and `dtype` (version 5).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from forerun.blocks import STATE_TOKENS, Act, Attention, Block, Norm, Plain, Rope, Spec
from forerun.errors import UnsupportedModel, shown

Raw = Mapping[str, Any]
T = TypeVar("T")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _by_key(*groups: tuple[T, str]) -> dict[str, T]:
    """Return a dict from keys to values. groups: pairs of a value and a string of all its keys, separated by spaces."""
    return {key: value for value, keys in groups for key in keys.split()}


SHARED_KEYS = _words(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim rms_norm_eps max_position_embeddings tie_word_embeddings hidden_act partial_rotary_factor "
    "rope_theta rope_scaling rope_parameters layer_types torch_dtype dtype"
)

# Training, bookkeeping, the shape of Python return values, and defaults for sampling, which forerun reads from
# generation_config.json only where it says so. pretraining_tp splits matrices and changes no result. A block
# for multi-token prediction is no part of the model (next_tokens.py). "forerun" names a head's method and tokenizer.
INERT_KEYS = _words(
    "architectures transformers_version name_or_path auto_map use_cache cache_implementation initializer_range "
    "pretraining_tp attention_dropout hidden_dropout attn_pdrop embd_pdrop resid_pdrop neftune_noise_alpha "
    "bos_token_id eos_token_id pad_token_id "
    "unk_token_id sep_token_id decoder_start_token_id return_dict return_dict_in_generate output_attentions "
    "output_hidden_states output_scores output_past torchscript use_bfloat16 id2label label2id problem_type "
    "finetuning_task task_specific_params tokenizer_class prefix chunk_size_feed_forward attn_implementation "
    "max_sequence_length model_max_length seq_length tokenizer_model_max_length gradient_checkpointing "
    "classifier_dropout embedding_dropout ffn_dropout "
    "layerdrop output_router_logits router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux "
    "is_llama_config unsloth_fixed unsloth_version transformers.js_config custom_pipeline custom_pipelines "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "num_return_sequences remove_invalid_values exponential_decay_length_penalty "
    "suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id bad_words_ids "
    "mtp_num_hidden_layers forerun"
)

CAUSAL = _words("is_causal causal attention.causal")  # keys that change what is computed where they are false
# Values that change nothing, by key of config.json or by GGUF key without the architecture.
NEUTRAL: Mapping[str, tuple[float | bool, ...]] = _by_key(
    ((True,), f"{' '.join(CAUSAL)} is_decoder"),
    (
        (0,),
        "num_experts num_local_experts n_routed_experts n_shared_experts num_nextn_predict_layers expert_count "
        "expert_used_count expert_shared_count leading_dense_block_count nextn_predict_layers pooling_type "
        "attention.max_alibi_bias attention.clamp_kqv attention.shared_kv_layers attention.temperature_scale "
        "embedding_length_per_layer_input attn_logit_softcapping final_logit_softcapping "
        "shared_expert_intermediate_size rope.scaling.yarn_log_multiplier",
    ),
    (
        (1,),
        "embedding_multiplier residual_multiplier logits_scaling logit_scale scale_emb rope_ratio residual_scale "
        "embedding_scale rope.scaling.attn_factor",
    ),
    ((0, 1), "expert_group_count expert_group_used_count expert_weights_scale"),
)
# Values that change nothing where a kind of rotary positions does not have the key.
NEUTRAL_ROPE: Mapping[str, tuple[float, ...]] = {"factor": (1,), "attention_factor": (1,), "mscale": (1,)}

ROPE_KINDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
                       "mscale", "mscale_all_dim", "truncate"}),
    "longrope": frozenset({"factor", "original_max_position_embeddings", "attention_factor", "short_factor",
                           "long_factor"}),
}  # fmt: skip
LISTS = ("short_factor", "long_factor")  # one number for each pair of rotated dimensions
# Keys of rotary positions that may be left out. A missing factor is the context length, divided by the one in training.
MAY_LACK = frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
# Keys that are written although they matter to training alone.
UNTRAINED = {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
# For families to which transformers gives a default padding id, which may lie beyond a small vocabulary.
UNPADDED = {"pad_token_id": None}
LAYER_KINDS = ("full_attention", "sliding_attention")
TURNED = ("rope_theta", "partial_rotary_factor")  # of all kinds of rotary positions; may stand outside of them
ACTS: Mapping[str, Act] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

MOST_TOKENS = (1 << 31) - 1
MOST_NAMED = 5  # keys in one refusal
# The largest size under each key; MOST_TOKENS under any other.
LARGEST = _by_key(
    (1 << 24, "vocab_size"),
    (1 << 17, "hidden_size n_embd d_model"),
    (1 << 20, "intermediate_size block_ff_dim block_multiple_of n_inner d_ff encoder_ffn_dim decoder_ffn_dim"),
    (1 << 10, "num_hidden_layers n_layer num_layers num_decoder_layers encoder_layers decoder_layers"),
    (1 << 12, "num_attention_heads num_key_value_heads n_head num_heads encoder_attention_heads"),
    (1 << 12, "decoder_attention_heads linear_num_key_heads linear_num_value_heads"),
    (1 << 12, "head_dim d_kv linear_key_head_dim linear_value_head_dim"),
    (STATE_TOKENS, "linear_conv_kernel_dim conv_L_cache"),
)
# The least and the largest value of each number.
RANGES: Mapping[str, tuple[float, float]] = _by_key(
    ((1e-20, 1), "rms_norm_eps norm_eps norm_epsilon layer_norm_eps layer_norm_epsilon"),
    ((1, 1e15), "rope_theta"),
    ((1e-3, 1e6), "factor low_freq_factor high_freq_factor beta_fast beta_slow"),
    ((1e-3, 1e6), "query_pre_attn_scalar final_logit_softcapping attn_logit_softcapping"),
    ((1e-3, 1e3), "attention_factor block_ffn_dim_multiplier"),
    ((0, 1e3), "mscale mscale_all_dim llama_4_scaling_beta"),
    ((0, 1), "partial_rotary_factor"),
    ((1e-6, 1e6), "embedding_multiplier attention_multiplier residual_multiplier logits_scaling routed_scaling_factor"),
)


class Filled(dict[str, Any]):
    """Holds the entries of config.json. Keys that are missing or null have the default values in `usual`.

    said: the entries that the file itself sets. `agree` checks only these entries for contradictions. nullable: the
    keys that stay null if the file sets them to null.
    """

    def __init__(self, raw: Raw, usual: Raw, nullable: Collection[str] = ()) -> None:
        said = {key: value for key, value in raw.items() if value is not None or key in nullable}
        super().__init__({**usual, **said})
        self.said: Raw = said

    def also(self, **usual: Any) -> Filled:
        """Return a copy in which the keys that are still missing have the default values in `usual`."""
        return Filled(self.said, {**usual, **self}, self.said.keys())


def understood(
    raw: Raw,
    honoured: Collection[str],
    usual: Raw,
    again: Mapping[str, str] | None = None,
    nullable: Collection[str] = (),
) -> Filled:
    """Return config.json (`raw`) with default values for missing keys.

    honoured: the keys that the family reads. usual: the values of keys that a family's published files leave out.
    again: maps each key that only repeats another key to that other key. nullable: see Filled. Raises UnsupportedModel
    for keys that `refuse_unknown` refuses, and for keys of `again` that contradict each other.
    """
    again = again or {}
    refuse_unknown(raw, {*honoured, *again})
    c = Filled(raw, usual, nullable)
    for key, other in again.items():
        agree(c, key, c.get(other), other)
    return c


def agree(c: Filled, key: str, value: object, other: str) -> None:
    """Raise UnsupportedModel where config.json sets `key` to a value that differs from `value`.

    other: the key whose value is `value`, and which has the same meaning as `key`.
    """
    said = c.said.get(key)
    if said is not None and value is not None and said != value:
        raise UnsupportedModel(
            f"config.json has {key}={shown(said)} where {other} is {shown(value)}, which say the same thing: "
            f"give them one value, or take {key} out"
        )


def plain_spec(
    raw: Raw,
    *,
    honoured: Collection[str] = (),
    defaults: Raw | None = None,
    again: Mapping[str, str] | None = None,
    turns_parts: bool = False,
    **more: Any,
) -> Spec:
    """Return the spec of a decoder that is built like Llama, as config.json (`raw`) describes the decoder.

    honoured: keys beyond SHARED_KEYS that the family reads itself. defaults: the values of keys that the family's
    published files leave out. again: maps each key that only repeats another key to that other key, see `understood`.
    turns_parts: whether the family may rotate only a part of a head. more: further fields of `Plain`. Raises
    UnsupportedModel, naming the key, for any value that is missing or impossible, and for keys that `refuse_unknown`
    refuses.
    """
    c = understood(raw, SHARED_KEYS | frozenset(honoured), {"rms_norm_eps": 1e-6, **(defaults or {})}, again)
    require(is_silu(c.get("hidden_act", "silu")), c, "hidden_act", "'silu'")
    heads, kv_heads, head_dim = head_sizes(c)
    return Plain(
        model_type=str(raw.get("model_type")),
        vocab_size=size(c, "vocab_size"),
        hidden_size=size(c, "hidden_size"),
        num_layers=size(c, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=size(c, "intermediate_size"),
        norm_eps=number(c, "rms_norm_eps"),
        max_positions=size(c, "max_position_embeddings"),
        rope=rope_of(c, head_dim if turns_parts else None),
        tied=flag(c, "tie_word_embeddings"),
        **more,
    ).spec


def spec_of(c: Filled, model_type: str, blocks: Iterable[Block], norm: Norm, **more: Any) -> Spec:
    """Return the spec of a model with the given blocks and final norm.

    The sizes of the vocabulary, the hidden states and the context come from config.json (`c`). more: further fields of
    Spec that the family sets.
    """
    sizes = size(c, "vocab_size"), size(c, "hidden_size"), size(c, "max_position_embeddings")
    return Spec(model_type, *sizes, tuple(blocks), norm, **{"tied": flag(c, "tie_word_embeddings"), **more})


def text_of(raw: Raw, honoured: Collection[str], kind: str, usual: Raw) -> Raw:
    """Return the config of the text model inside a multimodal config.json (`raw`), as `text_part` does.

    honoured: the keys of `raw` that the family reads. kind: the model_type that the text model must have. usual: the
    values of keys that the text model's config leaves out. Raises UnsupportedModel for another model_type, and for keys
    of `raw` that are not honoured.
    """
    refuse_unknown(raw, honoured)
    text = text_part(raw, {"model_type": kind, **usual})
    require(text["model_type"] == kind, text, "model_type", f"{kind!r} in text_config")
    return text


def text_part(raw: Raw, usual: Raw) -> Raw:
    """Return the config of the text model inside a multimodal config.json (`raw`). usual: the values of missing keys.

    If `raw` itself sets `tie_word_embeddings`, this value replaces the text model's value, as in transformers.
    """
    text = raw.get("text_config")
    require(isinstance(text, Mapping), raw, "text_config", "a mapping")
    said = {k: v for k, v in (text or {}).items() if v is not None or k not in usual}
    return {**usual, **said, **given({"tie_word_embeddings": raw.get("tie_word_embeddings")})}


def plain_config(spec: Spec, architecture: str) -> dict[str, Any]:
    """Return the config.json of a decoder built like Llama. Old and new versions of transformers can read it."""
    return {**usual_config(spec, architecture), "hidden_act": "silu", **rope_config(Plain.of(spec).rope)}


def usual_config(spec: Spec, architecture: str) -> dict[str, Any]:
    """Return the entries of config.json for a decoder's sizes, and the entries in UNTRAINED.

    Raises UnsupportedModel if the blocks differ in size, or if the decoder has no final norm.
    """
    sizes = {(a.heads, a.kv_heads, a.head_dim, mlp.size) for b in spec.blocks if (a := b.attention) and (mlp := b.mlp)}
    if len(sizes) != 1 or spec.final_norm is None:
        raise UnsupportedModel(f"a {spec.model_type} checkpoint cannot say blocks of several sizes")
    first = next(a for b in spec.blocks if b.mlp and (a := b.attention))
    [(*_, ffn_size)] = sizes
    return {**sizes_config(spec, architecture, first, intermediate_size=ffn_size), **UNTRAINED}


def sizes_config(spec: Spec, architecture: str, a: Attention, eps: str = "rms_norm_eps", **more: int) -> dict[str, Any]:
    """Return the entries of config.json for a model's sizes.

    a: the attention of the model's blocks. eps: the key of config.json for the epsilon of norms. more: further sizes.
    """
    return {
        "architectures": [architecture],
        "model_type": spec.model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        **more,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        eps: (spec.final_norm or Norm()).eps,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied,
    }


def rope_config(rope: Rope | None, head_dim: int | None = None) -> dict[str, Any]:
    """Return the entries of config.json for rotary positions. rope: None = the default `Rope()`.

    head_dim: the head size, for a family that may rotate only a part of a head; None = the family rotates whole heads.
    """
    rope = rope or Rope()
    turned = {} if head_dim is None else {"partial_rotary_factor": share(rope.dims or head_dim, head_dim)}
    return {"rope_theta": rope.theta, "rope_scaling": rope_scaling(rope), **turned}


def share(dims: int, head_dim: int) -> float:
    """Return the partial_rotary_factor that gives `dims` when it is multiplied by `head_dim` and rounded down."""
    quotient = dims / head_dim
    return quotient if int(head_dim * quotient) == dims else math.nextafter(quotient, 1)


def rope_scaling(rope: Rope) -> dict[str, Any] | None:
    """Return the value of the key `rope_scaling` of config.json; None for plain rotary positions."""
    if rope.kind == "default":
        return None
    names = {"original_max_position_embeddings": "original_max_positions"}
    values = {key: getattr(rope, names.get(key, key)) for key in sorted(ROPE_KINDS[rope.kind])}
    usual = {key: getattr(Rope(), key) for key in (*MAY_LACK, "truncate")}
    said = {key: value for key, value in values.items() if key not in usual or value != usual[key]}
    return {"rope_type": rope.kind, **{key: list(v) if key in LISTS else v for key, v in said.items()}}


def head_sizes(c: Filled) -> tuple[int, int, int]:
    """Return the number of query heads, the number of key-value heads, and the head size."""
    heads, hidden = size(c, "num_attention_heads"), size(c, "hidden_size")
    c = c.also(num_key_value_heads=heads)
    kv_heads = size(c, "num_key_value_heads")
    require(heads % kv_heads == 0, c, "num_key_value_heads", f"a divisor of {heads}")
    if "head_dim" not in c:
        require(hidden % heads == 0, c, "num_attention_heads", f"a divisor of {hidden} where head_dim is missing")
    c = c.also(head_dim=hidden // heads)
    head_dim = size(c, "head_dim")
    require(head_dim % 2 == 0, c, "head_dim", "even, because rotary positions turn pairs")
    return heads, kv_heads, head_dim


def refuse_unknown(raw: Raw, honoured: Collection[str]) -> None:
    """Raise UnsupportedModel for keys that are set, are not honoured, and may change what the model computes."""
    known = {key for key in raw if key in honoured or key in INERT_KEYS or key.startswith("_")}
    unknown = [key for key, value in raw.items() if key not in known and not _is_neutral(value, key)]
    if not unknown:
        return
    named = unknown[:MOST_NAMED]
    said = ", ".join(f"{key:.80}={shown(raw[key])}" for key in named)
    said += f" and {len(unknown) - len(named)} more" if len(unknown) > len(named) else ""
    options = " ".join(f"--ignore-config-key {key:.80}" for key in named)
    it, changes = ("it", "it changes") if len(unknown) == 1 else ("them", "they change")
    raise UnsupportedModel(
        f"config.json sets {said}, which forerun does not compute for "
        f"model_type={shown(raw.get('model_type'))}: use a checkpoint without {it}, or, where {changes} nothing "
        f"that is computed, {options} (ignore_config_keys= in Python)"
    )


def rope_of(c: Filled, turned_of: int | None = None, names: Mapping[str, str] | None = None) -> Rope:
    """Return the rotary positions, read from `rope_parameters`, or from `rope_theta` and `rope_scaling`.

    Raises UnsupportedModel where config.json has both forms and the two disagree. turned_of: the head size, for a
    family that may rotate only a part of a head; None = the family rotates whole heads. names: maps each key of TURNED
    to the top-level key of config.json that the family uses for it; None = the same key.
    """
    names = names or dict(zip(TURNED, TURNED, strict=True))
    ropes = {key: part for key in ("rope_parameters", "rope_scaling") if (part := c.get(key))}
    for key, part in ropes.items():
        require(isinstance(part, Mapping), c, key, "null or a mapping")
        require(not part.keys() & {*LAYER_KINDS}, c, key, "one mapping for all layers")
    base = {key: c.get(name) for key, name in names.items()}
    readings = {read_rope({**base, **given(part)}, c, turned_of) for part in ropes.values()}
    if len(readings) > 1:
        said = " and ".join(f"{key}={shown(part)}" for key, part in ropes.items())
        raise UnsupportedModel(f"config.json has {said}, which disagree: keep one")
    for key, part in ropes.items():
        for own_key, name in names.items():
            agree(c, name, part.get(own_key), f"{own_key} of {key}")
    return readings.pop() if readings else read_rope(base, c, turned_of)


def ropes_by_kind(c: Filled, names: Mapping[str, str]) -> dict[str, Rope]:
    """Return the rotary positions of each kind of layer, for families in which each kind has its own.

    names: maps each kind to the top-level key of config.json that sets theta for this kind. Where `rope_parameters` is
    missing, `rope_scaling` applies only to layers with full attention.
    """
    both, old = c.get("rope_parameters") or {}, c.get("rope_scaling") or {}
    fits = isinstance(both, Mapping) and isinstance(old, Mapping) and not (both and old)
    fits = fits and all(kind in names and isinstance(part or {}, Mapping) for kind, part in both.items())
    require(fits, c, "rope_parameters", f"a mapping for each of {list(names)}, without rope_scaling beside it")
    # transformers 4 also reads the kind under the key `type` there; transformers 5 does not.
    require("type" not in old or "rope_type" in old, c, "rope_scaling", "one whose kind is called rope_type")
    ropes = {}
    for kind, name in names.items():
        part = given(old if old and kind == LAYER_KINDS[0] else both.get(kind) or {})
        agree(c, name, part.get("rope_theta"), f"rope_theta of {kind}")
        ropes[kind] = read_rope({"rope_theta": c[name], **part}, c)
    return ropes


def read_rope(rope: Raw, c: Filled, turned_of: int | None = None) -> Rope:
    """Return the rotary positions that `rope`, a mapping inside config.json, describes.

    c: the whole config.json. turned_of: the head size, for a family that may rotate only the part partial_rotary_factor
    of a head; None = the family rotates whole heads, and UnsupportedModel is raised for another partial_rotary_factor
    than 1.
    """
    rope = given(rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(rope.get("type", kind) == kind, rope, "type", f"{shown(kind)}, as rope_type is")
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise UnsupportedModel(
            f"config.json sets rope_type={shown(kind)}, which forerun does not compute: it must be one of "
            f"{list(ROPE_KINDS)}, or, where it was only added for texts longer than those in training, be taken out"
        )
    dims = None
    if turned_of is None:
        require(rope.get("partial_rotary_factor", 1) == 1, rope, "partial_rotary_factor", "1")
    else:
        dims = int(turned_of * number({"partial_rotary_factor": 1, **rope}, "partial_rotary_factor"))
        require(dims > 1 and dims % 2 == 0, rope, "partial_rotary_factor", f"an even part of a head's {turned_of}")
    known = ROPE_KINDS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind in ("default", "linear"):
        known |= {"original_max_position_embeddings"}  # which they ignore
    unknown = [k for k, value in rope.items() if k not in known and not _is_one_of(value, NEUTRAL_ROPE.get(k, ()))]
    if unknown:
        said = ", ".join(f"{key:.80}={shown(rope[key])}" for key in unknown[:MOST_NAMED])
        raise UnsupportedModel(
            f"config.json sets {said} for rope_type={shown(kind)}, which forerun does not compute: use a checkpoint "
            f"without {'it' if len(unknown) == 1 else 'them'}"
        )
    config = Rope(
        theta=number({"rope_theta": 10000.0, **rope}, "rope_theta"),
        kind=kind,  # type: ignore[arg-type]
        dims=None if dims == turned_of else dims,
    )
    if "original_max_position_embeddings" in ROPE_KINDS[kind]:
        rope = {"original_max_position_embeddings": c.get("max_position_embeddings"), **rope}
        trained = size(rope, "original_max_position_embeddings")
        config = replace(config, original_max_positions=trained)
        if kind in ("yarn", "longrope") and rope.get("factor") is None:
            rope = {**rope, "factor": size(c, "max_position_embeddings") / trained}
    for key in sorted(ROPE_KINDS[kind] - {"original_max_position_embeddings", "truncate", *LISTS}):
        if key in rope or key not in MAY_LACK:
            config = replace(config, **{key: number(rope, key)})  # type: ignore[arg-type]
    for key in LISTS:
        if key in ROPE_KINDS[kind]:
            config = replace(config, **{key: _factors(rope, key, dims or head_sizes(c)[2])})  # type: ignore[arg-type]
    if kind == "llama3":
        require(config.high_freq_factor > config.low_freq_factor, rope, "high_freq_factor", "above low_freq_factor")
    return replace(config, truncate=flag({"truncate": True, **rope}, "truncate"))


def _factors(rope: Raw, key: str, dims: int) -> tuple[float, ...]:
    """Return longrope's list of factors under `key`. Each factor divides the frequency of one rotated pair.

    dims: the number of rotated dimensions, which is twice the length of the list.
    """
    factors, (least, most) = rope.get(key), RANGES["factor"]
    fits = isinstance(factors, list) and len(factors) == dims // 2
    fits = fits and all(type(x) in (int, float) and least <= x <= most for x in factors or ())
    require(fits, rope, key, f"a list of {dims // 2} numbers in {least} .. {most:g}")
    return tuple(float(x) for x in rope[key])


def windows(raw: Raw, num_layers: int, window: int | None, first: int = 0) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in tokens, None = full attention; () if all layers have full attention.

    window: the size of the window; None = config.json sets no window. `layer_types` lists the layers with the window.
    Where that key is missing, all layers from index `first` on have the window.
    """
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [LAYER_KINDS[window is not None and i >= first] for i in range(num_layers)]
    fits = isinstance(kinds, list) and len(kinds) == num_layers and all(kind in LAYER_KINDS for kind in kinds)
    require(fits, raw, "layer_types", f"a list of {num_layers} entries out of {list(LAYER_KINDS)}")
    if "sliding_attention" not in kinds:
        return ()
    if window is None:
        raise UnsupportedModel(
            "config.json has sliding_attention in layer_types and no sliding_window in force: set sliding_window to "
            "the number of tokens"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layer_kinds(c: Filled, usual: list[str], kinds: tuple[str, str]) -> list[str]:
    """Return the kind of each layer, one of the two in `kinds`. At least one layer must have kinds[0].

    usual: the kinds that are returned where `layer_types` is missing.
    """
    c = c.also(layer_types=usual)
    listed = c["layer_types"]
    fits = isinstance(listed, list) and len(listed) == len(usual) and all(kind in kinds for kind in listed)
    require(fits, c, "layer_types", f"a list of {len(usual)} entries out of {list(kinds)}")
    require(kinds[0] in listed, c, "layer_types", f"such that some layer has {kinds[0]}")
    return list(listed)


def same_window(raw: Raw, window: int | None) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, in a family where all layers have the same window; () = no window.

    Raises UnsupportedModel where `layer_types` has full attention although there is a window, because transformers
    ignores `layer_types` in such a family.
    """
    by_layer = windows(raw, size(raw, "num_hidden_layers"), window)
    if window is not None and (not by_layer or None in by_layer):
        raise UnsupportedModel(
            f"config.json has full_attention in layer_types, which model_type={shown(raw.get('model_type'))} does not "
            f"mix with a sliding_window, here {window}: set sliding_window to null, or slide in every layer"
        )
    return by_layer


def full_attention_only(raw: Raw) -> None:
    """Raise UnsupportedModel where `layer_types` has any kind but full attention. For families without a window."""
    kinds = raw.get("layer_types") or []
    fits = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    require(fits, raw, "layer_types", "'full_attention' in every layer")


def size(raw: Raw, key: str, least: int = 1) -> int:
    """Return the integer under `key` of config.json. A file may write 4096 as 4096.0.

    Raises UnsupportedModel for a value below `least` or above the key's limit in LARGEST.
    """
    value, most = raw.get(key), LARGEST.get(key, MOST_TOKENS)
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    require(fits, raw, key, f"an integer in {least} .. {most}")
    return int(raw[key])


def number(raw: Raw, key: str) -> float:
    """Return the number under `key` of config.json. Raises UnsupportedModel for a value outside of RANGES[key]."""
    value, (least, most) = raw.get(key), RANGES[key]
    fits = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    require(fits, raw, key, f"a number in {least} .. {most:g}")
    return float(raw[key])


def whole(number: float) -> float:
    """Return `number`; if an int is within 1e-6 of it, return the int, as published files write such numbers."""
    return round(number) if abs(number - round(number)) < 1e-6 else number


def act_name(act: Act) -> str:
    """Return the name by which published files call an activation."""
    return next(name for name, other in ACTS.items() if other == act)


def flag(raw: Raw, key: str) -> bool:
    """Return a boolean of config.json; a missing key is false."""
    value = raw.get(key)
    require(value is None or isinstance(value, bool), raw, key, "true or false")
    return bool(value)


def require(ok: bool, raw: Raw, key: str, what: str) -> None:
    """Raise UnsupportedModel, naming a key of config.json, unless `ok` is true. what: the possible values, in words."""
    if ok:
        return
    value = shown(raw.get(key))
    if isinstance(raw, Filled) and key in raw and key not in raw.said:
        raise UnsupportedModel(f"config.json leaves out {key}, which is usually {value}: here it must be {what}")
    raise UnsupportedModel(f"config.json has {key}={value}, which is not supported: it must be {what}")


def gelu_only(c: Raw) -> None:
    """Raise UnsupportedModel for any activation except gelu_pytorch_tanh, which all Gemma models have."""
    for key in ("hidden_activation", "hidden_act"):
        require(c.get(key, "gelu_pytorch_tanh") == "gelu_pytorch_tanh", c, key, "'gelu_pytorch_tanh'")


def act_of(c: Raw, key: str, acts: Mapping[str, Act] = ACTS) -> Act:
    """Return the activation that `key` of config.json names. Raises UnsupportedModel for a name not in `acts`."""
    require(c[key] in list(acts), c, key, f"one of {list(acts)}")
    return acts[c[key]]


def is_silu(act: object) -> bool:
    """Whether `act` is a name of SiLU: "silu" or "swish"."""
    return isinstance(act, str) and ACTS.get(act) == "silu"


def _is_neutral(value: object, key: str) -> bool:
    name = key.partition(".")[2]  # after the architecture's name
    if value is None or value in ("", [], {}) or (value is False and not {key, name} & CAUSAL):
        return True
    return any(_is_one_of(value, NEUTRAL.get(known, ())) for known in (key, name))


def _is_one_of(value: object, values: Collection[object]) -> bool:
    """Whether a number or a boolean is among `values`. Unlike in Python, true is not equal to 1."""
    return any(value == other and (value is True) == (other is True) for other in values)


def given(raw: Raw) -> dict[str, Any]:
    """Return the entries of a mapping whose values are not null."""
    return {key: value for key, value in raw.items() if value is not None}
