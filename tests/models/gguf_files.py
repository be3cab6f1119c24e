"""GGUF files written with the `gguf` package, whose dequantisation is the oracle."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import pre_tokenizers

from benchmarks.random_file import add_key, finish
from forerun.blocks import Plain, Recurrence, Rope, Spec, weight_shapes
from forerun.models.configs import ROPE_KINDS
from forerun.models.families import names_of
from forerun.models.naming import Place, places
from forerun.models.source import STACKED
from forerun.ops.rotary import attention_factor, inverse_frequencies
from models.conftest import random_weights
from saved import published

DENSE = ("F32", "F16", "BF16")
# The float16 numbers of a block, by their first bytes; all other bytes may be anything.
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
          "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (), "Q2_K": (80, 82), "Q3_K": (108,), "IQ3_S": (0,),
          "IQ3_XXS": (0,), "NVFP4": ()}  # fmt: skip
# A type for each matrix of a layer, with as many others as there are: gate and up have different ones.
MIXED = {"embed_tokens": "Q3_K", "q_proj": "IQ4_XS", "k_proj": "IQ3_XXS", "v_proj": "Q2_K", "o_proj": "MXFP4",
         "gate_proj": "IQ4_NL", "up_proj": "NVFP4", "down_proj": "IQ3_S"}  # fmt: skip
Array = np.ndarray[Any, Any]
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "ministral3": "mistral3", "gpt_neox": "gptneox",
                 "gemma4_text": "gemma4", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
                 "gpt_oss": "gpt-oss", "qwen3_5_text": "qwen35",
                 "qwen3_5_moe_text": "qwen35moe", "lfm2_moe": "lfm2moe",
                 "qwen3_next": "qwen3next"}  # fmt: skip
SEEING = ("qwen2vl", "qwen3vl", "qwen3vlmoe")  # whose files have the text model, a qwen2, qwen3 or qwen3_moe
TILED = ("qwen35", "qwen35moe")  # whose value heads are in another order than in folders
SHIFTED = ("gemma2", "gemma3", *TILED, "qwen3next")  # which have 1 added to the weights of norms
TURNED = ("llama", "granite", "smollm3", "mistral3")


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0, scale: float = 1.0) -> Array:
    """Rows of a tensor of any type as a file has them; the scales of blocks have both signs, zeros and subnormals."""
    generator = np.random.default_rng(seed)
    if kind in DENSE:
        numbers = (generator.standard_normal((rows, columns)) * scale).astype(np.float32)
        return np.asarray(gguf.quants.quantize(numbers, Type[kind]))
    block, num_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    data = generator.integers(0, 256, (rows, columns // block, num_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = (generator.standard_normal(data.shape[:2]) * scale).astype(np.float16)
        halves[generator.random(halves.shape) < 0.05] = -0.0
        halves[generator.random(halves.shape) < 0.05] = 5e-8
        data[..., at : at + 2] = halves[..., None].view(np.uint8)
    if kind == "MXFP4":  # powers of two; with zeros, whose exponent may be the lowest, as that of no other block
        data[..., 0] = generator.integers(120, 128, data.shape[:2])
        data[generator.random(data.shape[:2]) < 0.05] = np.array([0] + [0x80] * 8 + [8] * 8, np.uint8)
    if kind == "NVFP4" and scale < 1:
        data[..., :4] &= 0x1F
    return data.reshape(rows, -1)


def numbers_of(data: Array, kind: str) -> Array:
    """What the `gguf` package makes of rows, in float32."""
    with np.errstate(over="ignore"):  # of MXFP4's largest scales
        return np.asarray(gguf.quants.dequantize(data, Type[kind]), np.float32)


def stored_as(kind: str, weight: Array) -> Array:
    """Rows as a type has them: those of a matrix, or random ones of about that size where the package writes none."""
    try:
        return np.asarray(gguf.quants.quantize(weight, Type[kind]))
    except NotImplementedError:
        rows, columns = weight.shape
        size = numbers_of(random_blocks(kind, rows, columns, rows), kind).std()
        return random_blocks(kind, rows, columns, rows, float(weight.std() / size))


def turned(weight: Array, num_heads: int) -> Array:
    """Rows of q or k as convert_hf_to_gguf.py orders them for llama (LlamaModel.permute)."""
    parts = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def turned_back(weight: Array, num_heads: int) -> Array:
    """The inverse of `turned`."""
    parts = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def by_part(weight: Array, num_heads: int) -> Array:
    """Rows of q, k and v as convert_hf_to_gguf.py orders them for gptneox: those of one below those of another."""
    return weight.reshape(num_heads, 3, -1, *weight.shape[1:]).swapaxes(0, 1).reshape(weight.shape)


def by_head(weight: Array, num_heads: int) -> Array:
    """The inverse of `by_part`."""
    return weight.reshape(3, num_heads, -1, *weight.shape[1:]).swapaxes(0, 1).reshape(weight.shape)


def in_file(spec: Spec) -> Spec:
    """What a model is in a file: decays are stored as they are computed, and value heads may be in another order."""
    arch = ARCHITECTURES.get(spec.model_type, spec.model_type)

    def stored(r: Recurrence) -> Recurrence:
        return replace(r, decay="negative", grouped=arch not in TILED or r.value_heads == r.key_heads)

    blocks = [
        replace(block, recurrence=stored(r)) if (r := block.recurrence) and r.kind == "gated_delta" else block
        for block in spec.blocks
    ]
    return replace(spec, blocks=tuple(blocks))


def recurrence_of(spec: Spec) -> Recurrence | None:
    """What its layers with a state have."""
    return next((block.recurrence for block in spec.blocks if block.recurrence is not None), None)


def value_rows(spec: Spec, arch: str, name: str) -> tuple[list[int], int] | None:
    """The order in which a file has the rows or columns of a tensor with value heads, and which; None = the usual.

    As convert_hf_to_gguf.py has it (_LinearAttentionVReorderBase): the first head of each group, then each second.
    """
    r = recurrence_of(spec)
    part = name.partition(".linear_attn.")[2].partition(".")[0]
    if r is None or arch not in TILED or part in ("", "norm"):
        return None
    size = 1 if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else r.value_dim
    before = 2 * r.key_heads * r.key_dim if part in ("in_proj_qkv", "conv1d") else 0
    each = r.value_heads // r.key_heads
    heads = [group * each + i for i in range(each) for group in range(r.key_heads)]
    rows = [before + head * size + row for head in heads for row in range(size)]
    return [*range(before), *rows], int(part == "out_proj")


def write_model(
    path: Path,
    config: Spec,
    weights: Mapping[str, torch.Tensor],
    quantise: Callable[[str], str] = lambda name: "F32",
    arch: str | None = None,
    more: Mapping[str, Array] | None = None,
    **metadata: Any,
) -> dict[str, torch.Tensor]:
    """Write a model as llama.cpp's converter does; returns the weights that the file has, dequantised.

    quantise: the type of each matrix, by its name in checkpoints. arch: None = that of the model's family. more:
    further tensors, by their names in the file. metadata: keys with . as __, on top of the usual ones; None leaves one
    out.
    """
    arch = arch or ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    own = {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in {**usual(config, arch), **byte_vocabulary(), **own}.items():
        add_key(writer, key, value)
    kept = {}
    names = names_of(config) if arch != "gpt-oss" else None
    stacked = dict[tuple[str, str], list[Array]]()
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    theirs = gguf.get_tensor_name_map(known[arch], config.num_layers)
    stored = dict(weights) if names is None else published(names, config, weights)
    for name in [name for name in stored if STACKED.fullmatch(name)]:
        stored |= {f"{name}.{i}": part for i, part in enumerate(stored.pop(name))}
    attention = next((block.attention for block in config.blocks if block.attention is not None), None)
    for name in [name for name in stored if name.endswith("in_proj_qkvz.weight")]:
        # As the converter parts them, which our reader does not need to know.
        parts = (name.replace("qkvz", part) for part in ("qkv", "z"))
        stored |= {part: weights[part] for part in parts}
        del stored[name]
    for name, tensor in stored.items():
        weight, heads = tensor.float().numpy(), 0
        whole = weight
        order = value_rows(config, arch, name)
        weight = weight[:, 0] if weight.ndim == 3 else weight  # as the converter squeezes weights of convolutions
        weight = weight if order is None else weight.take(*order)
        weight = -np.exp(weight) if name.endswith("A_log") else weight
        if arch in TURNED and (".q_proj." in name or ".k_proj." in name):
            heads = attention.heads if ".q_proj." in name else attention.kv_heads
            weight = turned(weight, heads)
        is_by_head = "query_key_value" in name
        weight = by_part(weight, attention.heads) if is_by_head else weight
        is_turned = arch == "gpt2" and ".c_" in name and weight.ndim == 2  # as the converter turns them
        weight = np.ascontiguousarray(weight.T) if is_turned else weight
        offset = float(arch in SHIFTED and "norm" in name and "linear_attn" not in name)
        kind = quantise(name) if weight.ndim == 2 and ".conv" not in name else "F32"
        weight = weight[0] if "shared_expert_gate" in name else weight  # as the converter squeezes it
        data = stored_as(kind, weight + np.float32(offset))
        if STACKED.fullmatch(name.rpartition(".")[0]):  # of all experts one tensor, as in the folder
            stacked.setdefault((f"{name.rpartition('.')[0]}.weight", kind), []).append(data)
        elif "router." in name and name.endswith("scale"):
            scaled = name.replace("router.scale", "router.proj").replace("router.per_expert_scale", "experts.down_proj")
            writer.add_tensor(f"{theirs.get_name(scaled)}.scale", data)
        elif name.endswith(("in_proj_qkv.weight", "in_proj_z.weight")):
            module = "attn_qkv" if name.endswith("qkv.weight") else "attn_gate"
            writer.add_tensor(f"blk.{name.split('.')[2]}.{module}.weight", data, raw_dtype=Type[kind])
        elif name.endswith("dt_bias"):
            writer.add_tensor(theirs.get_name(name.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias")), data)
        elif name.endswith(("expert_bias", "layer_scalar")):
            ending = "bias" if name.endswith("bias") else "weight"
            writer.add_tensor(f"{theirs.get_name(name)}.{ending}", data)
        elif ".experts." in name:
            before, _, after = name.partition(".experts.")
            stacked.setdefault((f"{before}.experts.{after.partition('.')[2]}", kind), []).append(data)
        else:
            writer.add_tensor(theirs.get_name(name, (".weight", ".bias")), data, raw_dtype=Type[kind])
        numbers = numbers_of(data, kind) - np.float32(offset)
        numbers = turned_back(numbers, heads) if heads else numbers
        numbers = by_head(numbers, attention.heads) if is_by_head else numbers
        numbers = numbers[None] if "shared_expert_gate" in name else numbers
        numbers = numbers if order is None else numbers.take(np.argsort(order[0]), order[1])
        numbers = whole if name.endswith("A_log") or whole.ndim == 3 else numbers
        kept[name] = torch.from_numpy(np.ascontiguousarray(numbers.T if is_turned else numbers))
    for (name, kind), parts in stacked.items():
        name = name.removeprefix("model.") if arch == "lfm2moe" else name  # as the converter calls them
        writer.add_tensor(theirs.get_name(name, (".weight", ".bias")), np.stack(parts), raw_dtype=Type[kind])
    for name, data in (more or {}).items():
        writer.add_tensor(name, data)
    rope = attention.rope
    if rope is not None and rope.kind == "llama3":
        plain = inverse_frequencies(Rope(rope.theta), attention.head_dim)
        factors = plain / inverse_frequencies(rope, attention.head_dim)
        writer.add_tensor("rope_freqs.weight", factors)
    if arch == "gemma4":
        full = next(b.attention for b in config.blocks if b.attention is not None and b.attention.window is None)
        turned_dims = (full.rope.dims if full.rope else None) or full.head_dim
        factors = np.array([1.0] * (turned_dims // 2) + [1e30] * ((full.head_dim - turned_dims) // 2), np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    if rope is not None and rope.kind == "longrope":
        for name, found in (("short", rope.short_factor), ("long", rope.long_factor)):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(found, np.float32))
    finish(writer)
    return {ours: _held(kept[place.name], place) for ours, place in places(names, config, kept).items()}


def write_random(path: Path, config: Spec, *given: Any, **options: Any) -> Path:
    """Write a model of random weights with what `write_model` takes besides, and return the file."""
    write_model(path, config, random_weights(config), *given, **options)
    return path


def _held(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    tensor = tensor.T if place.transposed else tensor[:, 0] if place.squeezed else tensor
    return (tensor if place.rows is None else tensor[place.rows]).contiguous()


def write_tiny_model(path: Path) -> Path:
    """A random llama of a few thousand weights of 4 bits over 258 ids."""
    config = Plain("llama", 258, 64, 1, 4, 2, 16, 96, 1e-5, 256).spec
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(s, generator=generator) * 0.1 for name, s in weight_shapes(config).items()}
    write_model(path, config, weights, lambda name: "Q4_0")
    return path


def usual(spec: Spec, arch: str) -> dict[str, Any]:
    """The metadata of a model, without its tokenizer."""
    found = [block.attention for block in spec.blocks if block.attention is not None]
    a = found[0]
    norm = spec.final_norm
    experts = next((b.experts for b in spec.blocks if b.experts is not None), None)
    mlp = next((block.mlp for block in spec.blocks if block.mlp is not None), experts and experts.mlp)
    own = {
        "block_count": spec.num_layers,
        "context_length": spec.max_positions,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": mlp.size,
        "attention.head_count": a.heads,
        f"attention.layer_norm_{'' if norm.kind == 'layer' else 'rms_'}epsilon": norm.eps,
    }
    if a.rope is not None:
        full = next((x.rope for x in found if x.window is None), a.rope)
        own |= {
            "attention.head_count_kv": a.kv_heads,
            "attention.key_length": a.head_dim,
            "attention.value_length": a.head_dim,
            "rope.freq_base": full.theta,
            "rope.dimension_count": a.rope.dims or a.head_dim,
            "vocab_size": spec.vocab_size,
        }
        assert full.kind in ROPE_KINDS or arch == "gemma4"
        if full.kind == "linear":
            own |= {"rope.scaling.type": "linear", "rope.scaling.factor": full.factor}
        if full.kind in ("yarn", "longrope"):
            own |= {"rope.scaling.original_context_length": full.original_max_positions}
        if full.kind == "yarn":
            said = {"rope.scaling.yarn_log_multiplier": full.mscale_all_dim}
            own |= {"rope.scaling.type": "yarn", "rope.scaling.factor": full.factor}
            own |= {key: value for key, value in said.items() if value is not None}
        if full.kind == "longrope":
            own |= {"rope.scaling.attn_factor": attention_factor(full)}
    if experts is not None:
        own |= {"expert_count": experts.num, "expert_used_count": experts.chosen}
        own |= {"expert_feed_forward_length": experts.mlp.size}
        own |= {} if experts.shared is None else {"expert_shared_feed_forward_length": experts.shared.size}
    if arch in SEEING:
        third = a.head_dim // 6
        own |= {"rope.dimension_sections": [a.head_dim // 2 - 2 * third, third, third, 0]}
        own |= {} if arch == "qwen2vl" else {"n_deepstack_layers": 3}
    if arch == "phi3":
        own |= {"rope.scaling.original_context_length": a.rope.original_max_positions if a.rope else 0}
        own |= {"attention.sliding_window": 0}
    if arch == "granite":
        first = spec.blocks[0]
        own |= {"embedding_scale": spec.embed_scale, "attention.scale": a.scale, "residual_scale": first.branch_scale}
        own |= {"logit_scale": 1 / spec.logit_scale}
    if arch == "gptneox":
        own = {key: value for key, value in own.items() if key not in ("rope.freq_base", "attention.head_count_kv")}
        own |= {"use_parallel_residual": spec.blocks[0].parallel}
    if arch == "gemma4":
        own |= _by_layer(spec)
    if arch.startswith("lfm2"):  # which say only by layer what depends on it, and nothing of whole heads
        own = {key: value for key, value in own.items() if not key.endswith(("_length", "dimension_count"))} | {
            key: value for key, value in own.items() if key.endswith(("context_length", "embedding_length",
            "feed_forward_length"))}  # fmt: skip
        if experts is not None:
            num_dense = sum(block.experts is None for block in spec.blocks)
            own |= {"leading_dense_block_count": num_dense, "expert_gating_func": 2}
        own["attention.head_count_kv"] = [0 if b.attention is None else b.attention.kv_heads for b in spec.blocks]
        own["shortconv.l_cache"] = r.conv if (r := recurrence_of(spec)) else 0
    if (r := recurrence_of(spec)) is not None and r.kind == "gated_delta":
        own |= {"ssm.conv_kernel": r.conv, "ssm.state_size": r.key_dim, "ssm.group_count": r.key_heads}
        own |= {"ssm.time_step_rank": r.value_heads, "ssm.inner_size": r.value_heads * r.value_dim}
        own["full_attention_interval"] = 1 + next(i for i, b in enumerate(spec.blocks) if b.attention is not None)
        pairs = int(own["rope.dimension_count"]) // 2
        own |= {"rope.dimension_sections": [pairs - 2, 1, 1, 0]} if arch in TILED else {}
    if a.position_scale is not None:
        own |= {"attention.temperature_scale": a.position_scale[0]}
    caps = {"attn_logit_softcapping": a.softcap, "final_logit_softcapping": spec.logit_softcap}
    own |= {key: value for key, value in caps.items() if value is not None}
    if window := next((x.window for x in found if x.window is not None), None):
        own["attention.sliding_window"] = window
    return {f"{arch}.{key}": value for key, value in own.items()}


def _by_layer(spec: Spec) -> dict[str, Any]:
    """What files of Gemma 4 say by layer, or of both kinds of layers."""
    found = [block.attention for block in spec.blocks if block.attention is not None]
    full = next(a for a in found if a.window is None)
    local = next(a for a in found if a.window is not None)
    sizes = [block.mlp.size for block in spec.blocks if block.mlp is not None]
    own: dict[str, Any] = {
        "attention.head_count_kv": [a.kv_heads for a in found],
        "attention.sliding_window_pattern": [a.window is not None for a in found],
        "attention.shared_kv_layers": sum(a.shares_kv_of is not None for a in found),
        "embedding_length_per_layer_input": spec.layer_input.size if spec.layer_input else 0,
        "rope.freq_base": full.rope.theta,
        "rope.freq_base_swa": local.rope.theta,
        "feed_forward_length": sizes if len(set(sizes)) > 1 else sizes[0],
    }
    for name, a in (("", full), ("_swa", local)):
        own |= {f"attention.{part}_length{name}": a.head_dim for part in ("key", "value")}
        own[f"rope.dimension_count{name}"] = a.head_dim
    return own


def byte_vocabulary() -> dict[str, Any]:
    """A tokenizer of one end token, 256 bytes and one merge, which llama.cpp insists on."""
    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] + [1] * 257, "tokenizer.ggml.merges": ["h e"],
            "tokenizer.ggml.eos_token_id": 0}  # fmt: skip


def write_tensors(
    path: Path, tensors: Mapping[str, tuple[str, Array]], metadata: Mapping[str, Any], arch: str, alignment: int = 32
) -> None:
    """Write a file of these tensors, each with its type, and of these keys."""
    writer = gguf.GGUFWriter(path, arch)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        add_key(writer, key, value)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=Type[kind])
    finish(writer)


def split(whole: Path, most_tensors: int) -> list[Path]:
    """Write the pieces of a file beside it, of so many tensors each or fewer, as the `gguf` package splits them."""
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(whole, reader.fields["general.architecture"].contents(), split_max_tensors=most_tensors)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], items)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    finish(writer)
    return sorted(whole.parent.glob(f"{whole.stem}-*-of-*.gguf"))


def write_vocabulary(path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a file without tensors, of which llama.cpp reads the tokenizer with vocab_only."""
    write_tensors(path, {}, {"llama.block_count": 1, "llama.context_length": 64, **metadata}, "llama")
