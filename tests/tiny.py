"""Complete random checkpoint folders of a few thousand weights, with a tokenizer of bytes."""

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forerun.blocks import Plain, Spec, weight_shapes
from forerun.models.opened import read_config
from saved import save_checkpoint

SIZES = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}  # fmt: skip
# Families that are not like Llama, in the words of their config.json.
OTHERS = {
    "gemma3_text": {**SIZES, "query_pre_attn_scalar": 13, "sliding_window": 6, "sliding_window_pattern": 2},
    "qwen3_moe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_5_text": {**SIZES, "num_hidden_layers": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                     "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "lfm2": {**SIZES, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
             "block_multiple_of": 8},
    "phi3": {**SIZES, "num_hidden_layers": 4},
    "glm4": {**SIZES, "num_hidden_layers": 4},
    "olmo2": {**SIZES, "num_hidden_layers": 4},
    "starcoder2": {key: value for key, value in SIZES.items() if key != "head_dim"},
    "gpt2": {"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}  # fmt: skip


def tiny_config(model_type: str, num_layers: int = 2, max_positions: int = 256) -> Spec:
    """A model of a few thousand weights over 257 ids: one special token, 256 bytes."""
    if model_type in OTHERS:
        return read_config({**OTHERS[model_type], "model_type": model_type})
    sizes = {"vocab_size": 257, "hidden_size": 32, "num_layers": num_layers, "ffn_size": 48, "norm_eps": 1e-6}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_positions": max_positions}
    own = {"tied": True, "qkv_bias": model_type == "qwen2", "qk_norm": model_type == "qwen3"}
    return Plain(model_type=model_type, **sizes, **heads, **own).spec  # type: ignore[arg-type]


def write_tiny(
    folder: Path,
    model_type: str = "llama",
    *,
    seed: int = 0,
    end_token: str = "<|end|>",
    max_positions: int = 256,
    num_layers: int = 2,
    inner_scale: float = 1.0,
) -> Path:
    """A complete random checkpoint folder; `end_token` is id 0.

    inner_scale: of what layers add to the residual stream; with a small one the likeliest token is often the last one.
    """
    config = tiny_config(model_type, num_layers, max_positions)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        weights[name] = torch.randn(shape, generator=generator) * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= inner_scale
    folder.mkdir(parents=True)
    byte_tokenizer(end_token).save(str(folder / "tokenizer.json"))
    save_checkpoint(folder, config, weights, torch.float32, end_ids=[0], tokenizer_folder=folder)
    return folder


def write_thinking(folder: Path, **given: Any) -> Path:
    """A folder as of `write_tiny` whose tokenizer has marks of reasoning, each one token and no special one."""
    write_tiny(folder, **given)
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text(encoding="utf-8"))
    vocab, like = whole["model"]["vocab"], whole["added_tokens"][0]
    for byte, mark in (("þ", "<think>"), ("ÿ", "</think>")):  # bytes that no text has
        vocab[mark] = vocab.pop(byte)
        whole["added_tokens"].append({**like, "id": vocab[mark], "content": mark, "special": False})
    file.write_text(json.dumps(whole), encoding="utf-8")
    return folder


def byte_tokenizer(*special: str) -> Tokenizer:
    """Return a tokenizer of the 256 bytes, behind special tokens."""
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


def numbers(seed: int, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return random numbers of mean 0 and deviation 1, the same for ever: whole words of PCG64, multiplied once."""
    words = np.random.PCG64(seed).random_raw(prod(shape)) >> np.uint64(40)
    spread = (words.astype(np.float32) - np.float32(1 << 23)) * np.float32(2 * 3**0.5 / (1 << 24))
    return spread.reshape(shape)
