"""Small random models of every kind of block, in every kind of file: the same numbers for ever, whatever computes.

`write` makes a folder of one. Weights are made of words of PCG64 (tiny.numbers): torch's generator is not in them.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.blocks import Spec, weight_shapes
from forerun.models.opened import read_config
from forerun.models.saving import config_to_dict
from saved import save_checkpoint
from tiny import byte_tokenizer, numbers

Raw = dict[str, Any]
COUNTS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
BASE: Raw = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 96, "rms_norm_eps": 1e-6, "hidden_act": "silu",
             "max_position_embeddings": 256, "rope_theta": 10000.0, "eos_token_id": 0, **COUNTS}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 16.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.4, "max_position_embeddings": 256}  # fmt: skip
LONG = {"type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)]}  # fmt: skip
PAIR = {"full_attention": {"rope_type": "proportional", "rope_theta": 1e3, "partial_rotary_factor": 0.5, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2}}  # fmt: skip
GEMMA = {"query_pre_attn_scalar": 13, "sliding_window": 24, "hidden_activation": "gelu_pytorch_tanh"}
PLAIN = {key: BASE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings",
         "num_hidden_layers", "num_attention_heads")}  # fmt: skip
T5 = {"model_type": "t5", "vocab_size": 257, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
      "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": 3,
      "eos_token_id": 0}  # fmt: skip
BART = {"vocab_size": 257, "d_model": 64, "max_position_embeddings": 256, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "pad_token_id": 1, "bos_token_id": 4, "eos_token_id": 0, "decoder_start_token_id": 2}  # fmt: skip
HALF = {**PLAIN, **COUNTS, **GEMMA}
# By kind, its config.json; what is not there is as in BASE.
LIKE_LLAMA: dict[str, Raw] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "rope_scaling": LLAMA3},
    "mistral": {"sliding_window": 24, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}
OTHERS: dict[str, Raw] = {
    "experts": {**BASE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 32, "norm_topk_prob": True},
    "shared experts": {**BASE, "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2,
                       "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "sinks": {**BASE, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24,
              "rope_theta": 1e3,
              "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e3, "factor": 8.0, "beta_fast": 32.0,
                                  "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 32}},
    "yarn": {**BASE, "model_type": "ministral3", "rope_theta": 1e3, "rope_parameters": YARN,
             "tie_word_embeddings": True},
    "longrope": {**BASE, "model_type": "phi3", "original_max_position_embeddings": 64, "rope_scaling": LONG},
    "longrope, within": {**BASE, "model_type": "phi3", "original_max_position_embeddings": 256, "rope_scaling": LONG},
    "part of a head": {**PLAIN, "model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 1000},
    "adjacent pairs": {**BASE, "model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
    "proportional": {**PLAIN, **COUNTS, "model_type": "gemma4_text", "sliding_window": 24, "global_head_dim": 32,
                     "num_hidden_layers": 4,
                     "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
                     "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 257, "rope_parameters": PAIR,
                     "pad_token_id": None},
    "caps": {**HALF, "model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "positions": {"model_type": "gpt2", "vocab_size": 257, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "scales": {**BASE, "model_type": "granite", "embedding_multiplier": 12.0, "attention_multiplier": 0.31,
               "residual_multiplier": 0.22, "logits_scaling": 7.0},
}  # fmt: skip
ENCODERS: dict[str, Raw] = {
    "t5": T5,
    "t5 with gates": {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bart": {**BART, "model_type": "bart", "scale_embedding": True, "activation_function": "gelu"},
    "sines": {**BART, "model_type": "marian", "scale_embedding": True, "activation_function": "swish"},
    "t5gemma": {"model_type": "t5gemma", "vocab_size": 257, "encoder": HALF,
                "decoder": {**HALF, "attn_logit_softcapping": 2.0}},
}  # fmt: skip
RAW: dict[str, Raw] = {name: {**BASE, "model_type": name, **own} for name, own in LIKE_LLAMA.items()}
RAW |= OTHERS | ENCODERS
BLOCK = 32  # rows and columns that share a scale in a file of 8-bit floats


def write(folder: Path, kind: str, noise: float = 0.0) -> Path:
    """Write a folder of a kind; noise: how far its weights are from those of the same kind without it."""
    spec = read_config(RAW[kind])
    _with_tokenizer(folder)
    weights = {name: torch.from_numpy(weight) for name, weight in weights_of(spec, kind, noise).items()}
    save_checkpoint(folder, spec, weights, torch.float32, end_ids=[0])
    if kind in ENCODERS:
        ids = {"eos_token_id": 0, "decoder_start_token_id": RAW[kind].get("decoder_start_token_id", 2)}
        (folder / "generation_config.json").write_text(json.dumps(ids), encoding="utf-8")
    return folder


def weights_of(spec: Spec, kind: str, noise: float = 0.0) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return random weights by our names."""
    shapes, first = weight_shapes(spec), 1000 * list(RAW).index(kind)
    found = {}
    for i, (name, shape) in enumerate(sorted(shapes.items())):
        found[name] = numbers(first + i, *shape) * np.float32(0.25) + np.float32("norm" in name)
        if noise:
            found[name] = found[name] + numbers(first + i + 500, *shape) * np.float32(noise)
    return found


def write_floats(folder: Path) -> Path:
    """Write a llama whose matrices are floats of 8 bits, with a scale for each block (quant_method fp8)."""
    spec = read_config(RAW["mistral"])
    tensors = dict[str, tuple[str, np.ndarray[Any, Any]]]()
    for i, (name, weight) in enumerate(sorted(weights_of(spec, "mistral").items())):
        if "_proj" in name:
            magnitudes = np.abs(numbers(90_000 + i, *weight.shape)) * 60 + np.float32(1)
            codes = magnitudes.astype(np.uint8) | ((weight < 0).astype(np.uint8) << 7)
            blocks = [-(-size // BLOCK) for size in weight.shape]
            scales = np.abs(numbers(91_000 + i, *blocks)) * np.float32(0.05) + np.float32(0.01)
            tensors |= {name: ("F8_E4M3", codes), f"{name}_scale_inv": ("F32", scales)}
        else:
            tensors[name] = ("F32", weight)
    _with_tokenizer(folder)
    said = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    raw = {**config_to_dict(spec), "eos_token_id": 0, "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    _write_tensors(folder / "model.safetensors", tensors)
    return folder


def write_gguf(path: Path) -> Path:
    """Write a llama as a GGUF file, each of whose matrices is of another type of 2 to 8 bits."""
    from models.gguf_files import MIXED, write_model

    sizes = {"vocab_size": 258, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    spec = read_config(RAW["mistral"] | sizes)
    more = {"q_proj": "Q6_K", "k_proj": "Q5_K", "v_proj": "Q8_0", "o_proj": "Q4_K", "up_proj": "Q5_1"}
    weights = {name: torch.from_numpy(weight) for name, weight in weights_of(spec, "mistral").items()}

    def type_of(name: str) -> str:
        part = name.split(".")[-2]
        return more.get(part, "F16") if ".layers.0." in name else MIXED.get(part, "F16")

    write_model(path, spec, weights, type_of)
    return path


def _with_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True)
    byte_tokenizer("<|end|>").save(str(folder / "tokenizer.json"))


def _write_tensors(file: Path, tensors: Mapping[str, tuple[str, np.ndarray[Any, Any]]]) -> None:
    """Write safetensors by hand: numpy knows no floats of 8 bits."""
    header, data = dict[str, Any](), b""
    for name, (kind, array) in tensors.items():
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
