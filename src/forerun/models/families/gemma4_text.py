"""Text models of Gemma 4 (google/gemma-4-31B, -26B-A4B, -E2B, -E4B): Gemma 3 with two head sizes and norms of values.

Layers with a window have small heads. Layers without a window have large heads, and only a part of a large head is
rotated. Scores are not scaled. Layers with large heads may use their keys, before norm and rotation, as values. The
last layers may read the keys and values of an earlier layer. E2B and E4B have per-layer embeddings. 26B-A4B has experts
beside each feed-forward part. The computation is the same as in transformers and llama.cpp. Unlike in Gemma 3, norms do
not add 1 to their weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from forerun.blocks import Attention, Block, Experts, LayerInput, Mlp, Norm, Rope, Spec
from forerun.errors import UnsupportedModel
from forerun.models import configs
from forerun.models.configs import LAYER_KINDS, SHARED_KEYS, Filled, Raw, flag, number, size
from forerun.models.naming import EXPERT_GATE_UP, EXPERTS, INNER, OUTER, ROPE_FREQS, SIZES, Fused, Gguf, Metadata, Names

FULL, LOCAL = LAYER_KINDS
NEVER = 1e29  # a larger factor of rotary frequencies means that the pair is not rotated
CAP, SHARES = "final_logit_softcapping", "num_kv_shared_layers"
INPUT = "hidden_size_per_layer_input"
GLOBAL = ("global_head_dim", "num_global_key_value_heads")
OWN_KEYS = {"hidden_activation", "attention_bias", "sliding_window", CAP, SHARES, INPUT, *GLOBAL,
            "vocab_size_per_layer_input", "use_bidirectional_attention", "attention_k_eq_v", "enable_moe_block",
            "use_double_wide_mlp", "num_experts", "top_k_experts", "moe_intermediate_size",
            "per_layer_config"}  # fmt: skip
DEFAULTS = {"vocab_size": 262144, "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "head_dim": 256,
            "tie_word_embeddings": True, "sliding_window": 512, "num_key_value_heads": 4, GLOBAL[0]: 512, SHARES: 0,
            "num_attention_heads": 8, "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
ROPES: Mapping[str, Raw] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    LOCAL: {"rope_type": "default", "rope_theta": 1e4},
}
NORMS = tuple(f"{at}_feedforward_layernorm" for at in ("pre", "post"))
INPUTS = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
BESIDE = (f"{NORMS[1]}_1", f"{NORMS[0]}_2", f"{NORMS[1]}_2")
SAME = {name for how in INNER.values() if isinstance(name := how, str)} | {*NORMS, *INPUTS, *BESIDE}
OUTER_INPUTS = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
BARE: Mapping[str, str | Fused] = {
    "layer_scalar": "layer_scalar",
    "router.scale": "mlp.router_norm",
    "router.per_expert_scale": "mlp.expert_scale",
    "experts.gate_up_proj.{}": Fused(EXPERT_GATE_UP),
    "experts.down_proj.{}": "mlp.experts.{}.down_proj",
}


def names_at(start: str) -> Names:
    """Return the map of tensor names for a text model whose published names begin with `start`."""
    outer = {f"{start}{name}": f"model.{name}" for name in ("embed_tokens", "norm", *OUTER_INPUTS)}
    inner = {name: name for name in SAME} | {"router.proj": "mlp.gate", **BARE}
    return Names(outer, f"{start}layers.{{}}.", inner, bare=frozenset(BARE))


NAMES = names_at("model.")


def _by_layer(value: Any, num: int) -> list[Any]:
    return value if isinstance(value, list) else [value] * num


def _turned_part(metadata: Metadata) -> float:
    """Return the share of a large head that is rotated, from the frequency factors in a GGUF file.

    The factor of a rotated pair is 1, and the factor of any other pair is huge.
    """
    stored = metadata.get(ROPE_FREQS)
    factors: list[float] = stored if isinstance(stored, list) else []
    num = sum(factor == 1 for factor in factors)
    if not num or not all(type(factor) is float and factor >= NEVER for factor in factors[num:]):
        raise UnsupportedModel(
            f"a GGUF file of gemma4 has other factors of rotary frequencies than 1 and {NEVER:g}: fetch it again"
        )
    return configs.share(2 * num, 2 * len(factors))


def _more(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    """Return the entries of config.json for layers, heads, feed-forward sizes, experts and rotary positions.

    llama.cpp stores the numbers of key-value heads, and which layers have a window, as lists with one entry for each
    layer. The usual keys have the sizes of large heads, and keys that end with _swa have the sizes of small heads.
    """
    num, shared = metadata.get("block_count"), metadata.get("attention.shared_kv_layers", 0)
    local = metadata.get("attention.sliding_window_pattern")
    if type(num) is not int or type(shared) is not int or not isinstance(local, list) or len(local) != num:
        raise UnsupportedModel("a GGUF file of gemma4 has no list of its layers with a window: fetch it again")
    heads, sizes = (_by_layer(metadata.get(key), num) for key in ("attention.head_count_kv", "feed_forward_length"))
    if not len(heads) == len(sizes) == num > shared >= 0 or not all(type(num) is int for num in (*heads, *sizes)):
        raise UnsupportedModel("a GGUF file of gemma4 has no numbers of heads or sizes of its layers: fetch it again")
    of = {bool(is_local): count for is_local, count in zip(local, heads, strict=False)}
    wide = [sizes[0] * 2 if sizes[-1] != sizes[0] and i >= num - shared else sizes[0] for i in range(num)]
    if heads != [of[bool(is_local)] for is_local in local] or sizes != wide:
        raise UnsupportedModel(
            "a GGUF file of gemma4 has other heads or feed-forward parts in some layer than in those of its kind, "
            "which forerun does not compute: use another file"
        )
    large, small = (metadata.get(f"attention.key_length{of}") for of in ("", "_swa"))
    for key in ("rope.dimension_count", "attention.value_length"):
        if metadata.get(key, large) != large or metadata.get(f"{key}_swa", small) != small:
            raise UnsupportedModel(
                f"a GGUF file of gemma4 has another {key} than its heads' size, which forerun does not compute: use "
                "another file"
            )
    turned_part = _turned_part(metadata)
    is_missing = [f"blk.{i}.attn_v.weight" not in tensors for i in range(num - shared) if not local[i]]
    raw: dict[str, Any] = {
        "layer_types": [LAYER_KINDS[bool(is_local)] for is_local in local],
        "head_dim": small,
        GLOBAL[0]: large,
        "num_key_value_heads": of.get(True, heads[0]),
        "per_layer_config": {
            str(i): {"head_dim": large, "num_key_value_heads": of[False]} for i in range(num) if not local[i]
        },
        "attention_k_eq_v": any(is_missing),
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] != sizes[0],
        "sliding_window": metadata.get("attention.sliding_window"),
        SHARES: shared,
        INPUT: metadata.get("embedding_length_per_layer_input") or 0,
        CAP: metadata.get(CAP),
        "rope_parameters": {
            FULL: {**ROPES[FULL], "rope_theta": metadata.get("rope.freq_base"), "partial_rotary_factor": turned_part},
            LOCAL: {**ROPES[LOCAL], "rope_theta": metadata.get("rope.freq_base_swa")},
        },
    }
    if "blk.0.ffn_gate_inp.weight" in tensors:
        raw |= {"enable_moe_block": True, "num_experts": metadata.get("expert_count")}
        raw |= {
            "top_k_experts": metadata.get("expert_used_count"),
            "moe_intermediate_size": metadata.get("expert_feed_forward_length"),
        }
    return raw


GGUF_KEYS = {name: key for name, key in SIZES.items() if key not in ("rope_theta", "head_dim", "num_key_value_heads",
             "intermediate_size")}  # fmt: skip
GGUF = Gguf(
    "gemma4",
    takes_factors=True,
    keys=GGUF_KEYS,
    more=_more,
    by_more=frozenset(
        "attention.head_count_kv feed_forward_length attention.key_length attention.key_length_swa rope.freq_base "
        "attention.value_length_swa rope.freq_base_swa rope.dimension_count_swa attention.sliding_window_pattern "
        "attention.shared_kv_layers embedding_length_per_layer_input expert_count expert_feed_forward_length "
        f"{CAP}".split()
    ),
    names=Names(
        {**OUTER, **{theirs: f"model.{ours}" for theirs, ours in zip(
            ("per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm"), OUTER_INPUTS, strict=True)}},
        "blk.{}.",
        {
            **INNER, **EXPERTS, "post_attention_norm": "post_attention_layernorm", "ffn_norm": NORMS[0],
            "post_ffw_norm": NORMS[1], "post_ffw_norm_1": BESIDE[0], "pre_ffw_norm_2": BESIDE[1],
            "post_ffw_norm_2": BESIDE[2], "inp_gate": INPUTS[0], "proj": INPUTS[1], "post_norm": INPUTS[2],
            "layer_output_scale": "layer_scalar", "ffn_gate_up_exps.{}": Fused(EXPERT_GATE_UP),
            "ffn_gate_inp.scale": "mlp.router_norm", "ffn_down_exps.scale": "mlp.expert_scale",
        },
        bare=frozenset({"ffn_gate_inp.scale", "ffn_down_exps.scale"}),
    ),
)  # fmt: skip


def read(raw: Raw) -> Spec:
    """Read config.json into a spec. Raises UnsupportedModel for entries that forerun cannot compute."""
    c = configs.understood(raw, (SHARED_KEYS - {*configs.TURNED}) | OWN_KEYS, DEFAULTS)
    configs.gelu_only(c)
    seen = c.get("use_bidirectional_attention")
    configs.require(seen in (None, "vision"), c, "use_bidirectional_attention", "null, or 'vision', of images alone")
    num = size(c, "num_hidden_layers")
    hidden = size(c, "hidden_size")
    bias = flag(c, "attention_bias")
    c = c.also(layer_types=[LAYER_KINDS[(i + 1) % 6 > 0] for i in range(num)])
    windows = list(configs.windows(c, num, size(c, "sliding_window")) or (None,) * num)
    windows[-1] = None  # as transformers has it, whatever is said
    kinds = [LAYER_KINDS[window is not None] for window in windows]
    norm, per_head = Norm(eps=number(c, "rms_norm_eps")), Norm(eps=number(c, "rms_norm_eps"), span="head")
    shared = size(c, SHARES, least=0)
    configs.require(shared < num, c, SHARES, f"less than the {num} layers")
    donors = {kind: i for i, kind in enumerate(kinds[: num - shared])}
    configs.require(
        not shared or set(kinds) == donors.keys(), c, SHARES, "so few that each kind of layer is before them"
    )
    own_input = _layer_input(raw, c, norm)
    blocks = []
    for i, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        heads = _heads(c, i, kind)
        shares = donors[kind] if i >= num - shared else None
        attention = Attention(
            *heads,
            scale=1.0,
            window=window,
            rope=_rope(c, kind, heads[2]),
            q_norm=per_head,
            k_norm=per_head,
            v_norm=replace(per_head, weight=False),
            qkv_bias=bias,
            o_bias=bias,
            k_is_v=flag(c, "attention_k_eq_v") and kind == FULL,
            shares_kv_of=shares,
        )
        wide = 2 if shares is not None and flag(c, "use_double_wide_mlp") else 1
        mlp = Mlp(size(c, "intermediate_size") * wide, "gelu_tanh")
        block = Block(norm, attention, post_attention=norm, pre_mlp=norm, mlp=mlp, post_mlp=norm, out_scale=True)
        blocks.append(_with_experts(replace(block, per_layer_input=own_input), c, norm, hidden))
    scale = math.sqrt(hidden)
    cap = number(c, CAP) if CAP in c else None
    return configs.spec_of(c, "gemma4_text", blocks, norm, embed_scale=scale, logit_softcap=cap)


def _layer_input(raw: Raw, c: Raw, norm: Norm) -> LayerInput | None:
    width = {INPUT: raw.get(INPUT, 256) or 0}
    if not size(width, INPUT, least=0):
        return None
    rows = "vocab_size_per_layer_input"
    configs.require(c.get(rows, c["vocab_size"]) == c["vocab_size"], c, rows, f"vocab_size={c['vocab_size']}")
    return LayerInput(width[INPUT], "gelu_tanh", norm)


def _heads(c: Filled, i: int, kind: str) -> tuple[int, int, int]:
    """Return the number of query heads, the number of key-value heads, and the head size of layer `i`."""
    given = c.get("per_layer_config")
    fits = given is None or (isinstance(given, Mapping) and all(str(key).isdecimal() for key in given))
    configs.require(fits, c, "per_layer_config", "a mapping of numbers of layers")
    sizes: Any = {}
    if given is not None:
        sizes = {int(key): found for key, found in given.items()}.get(i) or {}
        known = isinstance(sizes, Mapping) and sizes.keys() <= {"head_dim", "num_key_value_heads"}
        configs.require(known, c, "per_layer_config", "head_dim and num_key_value_heads of layers")
    elif kind == FULL:
        sizes = {"head_dim": c[GLOBAL[0]]}
        if flag(c, "attention_k_eq_v") and GLOBAL[1] in c:
            sizes["num_key_value_heads"] = c[GLOBAL[1]]
    return configs.head_sizes(Filled({**c, **sizes}, {}))


def _rope(c: Filled, kind: str, head_dim: int) -> Rope:
    given: Any = c.get("rope_parameters") or ROPES
    fits = isinstance(given, Mapping) and isinstance(given.get(kind), Mapping) and given.keys() <= set(LAYER_KINDS)
    configs.require(
        fits and not c.get("rope_scaling"), c, "rope_parameters", f"a mapping for each of {list(LAYER_KINDS)}"
    )
    rope = {key: value for key, value in given[kind].items() if value is not None}
    if rope.get("rope_type") != "proportional":
        return configs.read_rope({"rope_theta": ROPES[kind]["rope_theta"], **rope}, c)
    known = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
    configs.require(rope.keys() <= known, {"rope_parameters": rope}, "rope_parameters", f"of the keys {sorted(known)}")
    rope = {"rope_theta": ROPES[kind]["rope_theta"], "partial_rotary_factor": 1.0, "factor": 1.0, **rope}
    dims = 2 * int(number(rope, "partial_rotary_factor") * head_dim // 2)
    configs.require(dims > 0, rope, "partial_rotary_factor", f"at least a pair of a head's {head_dim}")
    return Rope(
        number(rope, "rope_theta"), "proportional", number(rope, "factor"), dims=None if dims == head_dim else dims
    )


def _with_experts(block: Block, c: Raw, norm: Norm, hidden: int) -> Block:
    if not flag(c, "enable_moe_block"):
        return block
    chosen, total = size(c, "top_k_experts"), size(c, "num_experts")
    configs.require(chosen <= total, c, "top_k_experts", f"at most {total}, the number of experts")
    mlp = Mlp(size(c, "moe_intermediate_size"), "gelu_tanh")
    experts = Experts(total, chosen, mlp, router_norm=norm, reads_stream=True, score_scale=hidden**-0.5, scaled=True)
    return replace(block, experts=experts, post_dense=norm, pre_experts=norm, post_experts=norm)


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    attentions = [block.attention for block in spec.blocks if block.attention is not None]
    kinds = [LAYER_KINDS[a.window is not None] for a in attentions]
    first = next((a for a in attentions if a.window is not None), attentions[0])
    ropes = {kind: _rope_config(a.rope or Rope(), a.head_dim) for kind, a in zip(kinds, attentions, strict=True)}
    layer_input, mlp, experts = spec.layer_input, spec.blocks[0].mlp, spec.blocks[0].experts
    raw = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": spec.model_type,
        "vocab_size": spec.vocab_size,
        "vocab_size_per_layer_input": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": 0 if mlp is None else mlp.size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": first.heads,
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.head_dim,
        "per_layer_config": {
            str(i): {"head_dim": a.head_dim, "num_key_value_heads": a.kv_heads}
            for i, a in enumerate(attentions)
            if a.window is None
        },
        "rms_norm_eps": (spec.final_norm or Norm()).eps,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": first.o_bias,
        "rope_parameters": {**ROPES, **ropes},
        "layer_types": kinds,
        "sliding_window": first.window or DEFAULTS["sliding_window"],
        "attention_k_eq_v": any(a.k_is_v for a in attentions),
        SHARES: sum(a.shares_kv_of is not None for a in attentions),
        "use_double_wide_mlp": spec.blocks[-1].mlp != mlp,
        INPUT: 0 if layer_input is None else layer_input.size,
        CAP: spec.logit_softcap,
        "enable_moe_block": experts is not None,
        **configs.UNTRAINED,
        **configs.UNPADDED,
    }
    if experts is not None:
        raw |= {"num_experts": experts.num, "top_k_experts": experts.chosen}
        raw |= {"moe_intermediate_size": experts.mlp.size}
    return raw


def _rope_config(rope: Rope, head_dim: int) -> Raw:
    if rope.kind != "proportional":
        return {"rope_type": "default", "rope_theta": rope.theta, **(configs.rope_scaling(rope) or {})}
    share = configs.share(rope.dims or head_dim, head_dim)
    return {"rope_type": rope.kind, "rope_theta": rope.theta, "partial_rotary_factor": share,
            **({} if rope.factor == 1 else {"factor": rope.factor})}  # fmt: skip
