"""Text models of Qwen 3.5 (Qwen3.5-0.8B to -27B): three of four layers are recurrent, the others have gated attention.

The recurrence is the gated delta rule, see blocks.Recurrence. A quarter of each head is rotated. Norms add 1 to their
weights, except the norm after a recurrence. In the files, the query rows of a head are followed by the gate rows of
this head. A token has three positions (mrope), which differ only in images. In a text the three positions are equal, so
usual rotary positions give the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from forerun.blocks import Attention, Block, Mlp, Norm, Recurrence, Rope, Spec
from forerun.errors import UnsupportedModel
from forerun.models import configs
from forerun.models.configs import LARGEST, SHARED_KEYS, Filled, Raw, flag, number, size
from forerun.models.naming import INNER, NEXT, OUTER, SAID, SIZES, Fused, Gguf, Metadata, Names

FULL, LINEAR = "full_attention", "linear_attention"
INTERVAL = "full_attention_interval"
LINEAR_SIZES = ("linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
                "linear_value_head_dim")  # fmt: skip
# How decays and value heads are stored. Published files use the first way without saying so; the config that is made
# from a GGUF file says that it uses the second.
DECAY, HEADS = "linear_decay", "linear_value_heads"
STORED = {DECAY: ("log", "negative"), HEADS: ("grouped", "tiled")}
# Keys of the multi-token prediction block, which is no part of the model.
MTP_KEYS = {SAID, "mtp_use_dedicated_embeddings", "num_mtp_layers", "mtp_layer_types"}
# Keys of published files with only one possible value, and that value in words.
FIXED = {"attn_output_gate": (True, "true"), "mamba_ssm_dtype": ("float32", "'float32'"),
         "output_gate_type": ("swish", "'swish'")}  # fmt: skip
LINEAR_KEYS = {"attention_bias", INTERVAL, *LINEAR_SIZES, *STORED, *MTP_KEYS, *FIXED}
OWN_KEYS = LINEAR_KEYS
LINEAR_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "hidden_act": "silu",
                   "max_position_embeddings": 32768, "num_attention_heads": 16, "tie_word_embeddings": False,
                   **dict(zip(LINEAR_SIZES, (4, 16, 32, 128, 128), strict=True))}  # fmt: skip
DEFAULTS = {**LINEAR_DEFAULTS, "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 32, "num_key_value_heads": 4}  # fmt: skip
SECTIONS, INTERLEAVED = "mrope_section", "mrope_interleaved"

Q_AND_GATE = Fused(("self_attn.q_proj", "self_attn.gate_proj"), by_head=True)
AT = "linear_attn."
BARE = {f"{AT}{name}": f"{AT}{name}" for name in ("A_log", "dt_bias")}
SPECIAL: Mapping[str, str | Fused] = {
    "self_attn.q_proj": Q_AND_GATE,
    f"{AT}conv1d": Fused((f"{AT}conv1d",), squeezed=True),
    **BARE,
}
PARTS = {f"{AT}{name}": f"{AT}{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm",
         "out_proj")}  # fmt: skip


def names_at(start: str, more: Mapping[str, str | Fused] | None = None, bare: Collection[str] = ()) -> Names:
    """Return the map of tensor names for a text model whose published names begin with `start`.

    more: a map of further names in a block, for models with more tensors than Qwen 3.5. bare: the names in `more` that
    are whole tensor names, not module names.
    """
    outer = {f"{start}{name}": f"model.{name}" for name in ("embed_tokens", "norm")}
    usual = {name: name for name in INNER.values() if isinstance(name, str)}
    inner = {**(more or {}), **usual, **PARTS, **SPECIAL}  # the first of several names is the one to write
    return Names(outer, f"{start}layers.{{}}.", inner, beside=NEXT, bare=frozenset({*BARE, *bare}))


# A text model by itself may keep its names from a checkpoint with vision.
NAMES = replace(names_at("model."), more=(names_at("model.language_model."),))

GGUF_INNER: Mapping[str, str | Fused] = {
    **{theirs: ours for theirs, ours in INNER.items() if theirs != "ffn_norm"},
    "attn_q": Q_AND_GATE,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": f"{AT}in_proj_qkv",
    "attn_gate": f"{AT}in_proj_z",
    "ssm_beta": f"{AT}in_proj_b",
    "ssm_alpha": f"{AT}in_proj_a",
    "ssm_conv1d": f"{AT}conv1d",
    "ssm_dt.bias": f"{AT}dt_bias",
    "ssm_a": f"{AT}A_log",
    "ssm_norm": f"{AT}norm",
    "ssm_out": f"{AT}out_proj",
}
GGUF_BARE = frozenset({"ssm_dt.bias", "ssm_a"})
GGUF_KEYS = {name: key for name, key in SIZES.items() if key != "num_key_value_heads"}
_BY_MORE = (
    "attention.head_count_kv attention.recurrent_layers rope.dimension_sections full_attention_interval "
    "nextn_predict_layers ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size"
)
BY_MORE = frozenset(_BY_MORE.split())


def linear_keys(kind: str, metadata: Metadata, tensors: Collection[str], heads: str) -> dict[str, Any]:
    """Return the entries of config.json for recurrences, layers and key-value heads, from a GGUF file.

    kind: the architecture's name, for messages. heads: how the file orders the value heads, "grouped" or "tiled".
    """
    whole, further = metadata.get("block_count"), metadata.get("nextn_predict_layers", 0)
    if type(whole) is not int or type(further) is not int or not 0 <= further < whole <= LARGEST["num_hidden_layers"]:
        raise UnsupportedModel(f"a GGUF file of {kind} has no possible number of layers: fetch it again")
    kinds = [LINEAR if f"blk.{i}.ssm_out.weight" in tensors else FULL for i in range(whole - further)]
    given = metadata.get("attention.recurrent_layers")
    is_list = isinstance(given, list) and given[: len(kinds)] == [kind == LINEAR for kind in kinds]
    if given is not None and not is_list:
        raise UnsupportedModel(f"a GGUF file of {kind} has other layers with a state than it says: fetch it again")
    inner, value_heads, key_heads = (metadata.get(f"ssm.{k}") for k in ("inner_size", "time_step_rank", "group_count"))
    if type(inner) is not int or type(value_heads) is not int or value_heads < 1 or inner % value_heads:
        raise UnsupportedModel(f"a GGUF file of {kind} has no possible number of value heads: fetch it again")
    sections, dims = metadata.get("rope.dimension_sections"), metadata.get("rope.dimension_count")
    if sections is not None and (not _are_sections(sections) or type(dims) is not int or 2 * sum(sections) != dims):
        raise UnsupportedModel(
            f"a GGUF file of {kind} has parts of positions (rope.dimension_sections) that are not the {dims!r:.80} "
            "turned dimensions of a head together: fetch it again"
        )
    return {
        "num_hidden_layers": whole - further,
        "num_key_value_heads": heads_of_layers(kind, metadata, [kind == FULL for kind in kinds]),
        "layer_types": kinds,
        INTERVAL: metadata.get(INTERVAL),
        **dict(zip(LINEAR_SIZES, (metadata.get("ssm.conv_kernel"), key_heads, value_heads,
                                  metadata.get("ssm.state_size"), inner // value_heads), strict=True)),
        DECAY: "negative",
        HEADS: heads if value_heads != key_heads else "grouped",
    }  # fmt: skip


def heads_of_layers(kind: str, metadata: Metadata, has_heads: list[bool]) -> Any:
    """Return the number of key-value heads in layers with attention. A file has one number, or a list of numbers.

    The list has an entry for each layer; a layer without attention has 0, or the same entry as the other layers. At its
    end, the list may have entries for multi-token prediction blocks. has_heads: for each layer, whether it has
    attention.
    """
    said = metadata.get("attention.head_count_kv")
    if not isinstance(said, list):
        return said
    number = next((num for num, has in zip(said, has_heads, strict=False) if has), None)
    if said[: len(has_heads)] not in ([number if has else 0 for has in has_heads], [number] * len(has_heads)):
        raise UnsupportedModel(
            f"a GGUF file of {kind} has other numbers of heads in some layer than in those of its kind, which forerun "
            "does not compute: use another file"
        )
    return number


GGUF = Gguf(
    "qwen35",
    keys=GGUF_KEYS,
    more=lambda metadata, tensors: linear_keys("qwen35", metadata, tensors, "tiled"),
    by_more=BY_MORE,
    names=Names(OUTER, "blk.{}.", GGUF_INNER, bare=GGUF_BARE),
    stored_offset=1.0,
    as_stored=("ssm_norm",),
    turned_part="partial_rotary_factor",
    next_blocks="nextn_predict_layers",
)


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = understood(raw, OWN_KEYS, DEFAULTS)
    mlp = Mlp(size(c, "intermediate_size"))
    return hybrid(c, "qwen3_5_text", lambda i: Block(mlp=mlp))


def understood(raw: Raw, own_keys: Collection[str], usual: Raw) -> Filled:
    """Return config.json (`raw`) with the default values in `usual` for missing keys. The keys of mrope are left out.

    Raises UnsupportedModel for keys that are neither in SHARED_KEYS nor in `own_keys`, and for impossible values.
    """
    turned = raw.get("rope_parameters")
    sections = None
    if isinstance(turned, Mapping):
        sections = turned.get(SECTIONS)
        configs.require(turned.get(INTERLEAVED) in (None, True, False), turned, INTERLEAVED, "true or false")
        raw = {**raw, "rope_parameters": {k: v for k, v in turned.items() if k not in (SECTIONS, INTERLEAVED)}}
    c = configs.understood(raw, SHARED_KEYS | set(own_keys), usual, nullable={"partial_rotary_factor"})
    for key, (value, words) in FIXED.items():
        configs.require(c.get(key, value) == value, c, key, words)
    for key, values in STORED.items():
        configs.require(c.get(key, values[0]) in values, c, key, f"one of {list(values)}")
    if sections is not None:
        dims = rope_of(c).dims or configs.head_sizes(c)[2]
        fits = _are_sections(sections) and 2 * sum(sections) == dims
        configs.require(fits, {SECTIONS: sections}, SECTIONS, f"the {dims // 2} pairs of a head that are turned")
    return c


def _are_sections(sections: object) -> bool:
    return isinstance(sections, list) and all(type(part) is int and part >= 0 for part in sections)


def rope_of(c: Filled) -> Rope:
    """Return the rotary positions, which rotate a part of each head."""
    return configs.rope_of(c, configs.head_sizes(c)[2])


def layer_kinds(c: Filled) -> list[str]:
    """Return the kind of each layer, from `layer_types`.

    Where that key is missing, one layer in every n has attention. `full_attention_interval` sets n; otherwise n is 4.
    """
    num = size(c, "num_hidden_layers")
    every = size({INTERVAL: c.get(INTERVAL, 4)}, INTERVAL)
    usual = [FULL if (i + 1) % every == 0 else LINEAR for i in range(num)]
    kinds = configs.layer_kinds(c, usual, (FULL, LINEAR))
    if c.said.get(INTERVAL) is not None:
        configs.require(kinds == usual, c, "layer_types", f"as {INTERVAL}={every} says, or without that")
    return kinds


def hybrid(c: Filled, model_type: str, fed: Callable[[int], Block]) -> Spec:
    """Return the spec of a model with recurrent layers and attention layers.

    fed(i): returns a block that has only the feed-forward part, or the experts, of layer i.
    """
    configs.require(configs.is_silu(c["hidden_act"]), c, "hidden_act", "'silu'")
    heads, bias = configs.head_sizes(c), flag(c, "attention_bias")
    eps = number(c, "rms_norm_eps")
    norm, per_head = Norm(eps=eps, offset=1.0), Norm(eps=eps, offset=1.0, span="head")
    attention = Attention(
        *heads, rope=rope_of(c), q_norm=per_head, k_norm=per_head, qkv_bias=bias, o_bias=bias, gate=True
    )
    kinds = layer_kinds(c)
    recurrence = recurrence_of(c) if LINEAR in kinds else None
    return configs.spec_of(c, model_type, layers_of_two_kinds(kinds, norm, attention, recurrence, fed), norm)


def layers_of_two_kinds(
    kinds: list[str], norm: Norm, attention: Attention, recurrence: Recurrence | None, fed: Callable[[int], Block]
) -> list[Block]:
    """Return the block of each layer: with `attention` if the layer's kind is full attention, else with `recurrence`.

    fed(i): returns a block that has only the feed-forward part, or the experts, of layer i.
    """
    parts: list[dict[str, Any]] = [
        {"attention": attention} if kind == FULL else {"recurrence": recurrence} for kind in kinds
    ]
    return [replace(fed(i), pre_attention=norm, pre_mlp=norm, **part) for i, part in enumerate(parts)]


def recurrence_of(c: Filled) -> Recurrence:
    """Return the recurrence of a model's recurrent layers."""
    conv, key_heads, value_heads, key_dim, value_dim = LINEAR_SIZES
    num_keys, num_values = size(c, key_heads), size(c, value_heads)
    configs.require(num_values % num_keys == 0, c, value_heads, f"a multiple of {num_keys}, the key heads")
    return Recurrence(
        "gated_delta",
        size(c, conv, least=2),
        num_keys,
        num_values,
        size(c, key_dim),
        size(c, value_dim),
        Norm(eps=number(c, "rms_norm_eps")),
        decay=c.get(DECAY, "log"),
        grouped=c.get(HEADS, "grouped") == "grouped" or num_values == num_keys,
    )


def hybrid_config(spec: Spec, architecture: str) -> dict[str, Any]:
    """Return the config.json of a model with recurrent and attention layers, without the feed-forward entries.

    Raises UnsupportedModel if the recurrences are stored as in GGUF files, because other programs would misread their
    weights.
    """
    a = next(block.attention for block in spec.blocks if block.attention is not None)
    usual = recurrence_of(Filled({}, LINEAR_DEFAULTS))
    r = next((block.recurrence for block in spec.blocks if block.recurrence is not None), usual)
    if r.decay != "log" or not r.grouped:
        raise UnsupportedModel(
            f"a {spec.model_type} checkpoint cannot say that its states are stored as in a GGUF file: name the folder "
            "that the file was made of"
        )
    rope = a.rope or Rope()
    sizes = (r.conv, r.key_heads, r.value_heads, r.key_dim, r.value_dim)
    return {
        **configs.sizes_config(spec, architecture, a),
        "hidden_act": "silu",
        "attention_bias": a.o_bias,
        "layer_types": [LINEAR if block.recurrence is not None else FULL for block in spec.blocks],
        **dict(zip(LINEAR_SIZES, sizes, strict=True)),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rope.theta,
            "partial_rotary_factor": configs.share(rope.dims or a.head_dim, a.head_dim),
            **(configs.rope_scaling(rope) or {}),
        },
        **configs.UNTRAINED,
        **configs.UNPADDED,
    }


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    mlp = spec.blocks[0].mlp
    return {**hybrid_config(spec, "Qwen3_5ForCausalLM"), "intermediate_size": 0 if mlp is None else mlp.size}
