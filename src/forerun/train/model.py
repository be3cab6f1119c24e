"""Small llama models for training: shape, first weights, and checkpoint folders that any llama runtime reads."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import BadOption, NotFound
from forerun.models.layers import Decoder, DecoderConfig, RopeConfig, parameter_shapes
from forerun.ops.reference import ReferenceOps
from forerun.types import RaggedBatch

NORM_EPS = 1e-5


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a llama with tied embeddings, in elements; heads have hidden_size / num_heads of them."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    rope_theta: float = 10000.0
    max_positions: int = 2048

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise BadOption(
                f"{self.num_heads} query heads must divide hidden size {self.hidden_size} and be a multiple of "
                f"{self.num_kv_heads} key-value heads"
            )

    def decoder_config(self) -> DecoderConfig:
        """The same shape as the decoder wants it."""
        return DecoderConfig(
            model_type="llama",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.hidden_size // self.num_heads,
            ffn_size=self.ffn_size,
            norm_eps=NORM_EPS,
            max_positions=self.max_positions,
            rope=RopeConfig(theta=self.rope_theta),
            tie_embeddings=True,
        )

    @property
    def num_parameters(self) -> int:
        """Weights in all, the tied embedding counted once."""
        return sum(math.prod(shape) for shape in parameter_shapes(self.decoder_config()).values())


def initial_weights(shape: ModelShape, seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Float32 weights: normal(0, 0.02), norms 1, and projections into the residual stream divided by sqrt(2 layers).

    Source of the last: Radford et al. 2019 (GPT-2), section 2.3. Drawn on the CPU, so that a seed means one model.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in parameter_shapes(shape.decoder_config()).items():
        if len(size) == 1:
            weights[name] = torch.ones(size)
            continue
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / math.sqrt(2 * shape.num_layers) if into_residual else 0.02
        weights[name] = torch.randn(size, generator=generator) * std
    return {name: weight.to(device) for name, weight in weights.items()}


def deepen(weights: Mapping[str, Tensor], old: ModelShape, new: ModelShape, seed: int) -> dict[str, Tensor]:
    """The weights of a shallower model with fresh layers behind its own; the function stays what it was.

    A fresh layer's projections into the residual stream are zero, so it adds nothing until it has learned something
    (Chen, Goodfellow, Shlens 2016, "Net2Net", section 2.3). Raises BadOption where more than the depth differs.
    """
    if dataclasses.replace(old, num_layers=new.num_layers) != new or old.num_layers > new.num_layers:
        raise BadOption(f"a model of the shape {old} cannot be deepened to {new}: only layers can be added")
    grown = initial_weights(new, seed)
    for name, weight in grown.items():
        if name in weights:
            grown[name] = weights[name].clone()
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    return grown


def run_windows(model: Decoder, tokens: Tensor) -> Tensor:
    """Final hidden states of whole sequences: tokens [S, L] -> [S * L, H]; the model must have TrainingOps of L."""
    num_sequences, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(num_sequences)
    batch = RaggedBatch(tokens.reshape(-1), positions, [0, tokens.numel()], [0], [0])
    return model.forward(batch, None)


# ------------------------------------------------------------------------------------------------ checkpoint folders


def hf_config(shape: ModelShape, end_id: int) -> dict[str, Any]:
    """config.json in the spelling that old and new versions of transformers read."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.hidden_size // shape.num_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": NORM_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "pretraining_tp": 1,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "torch_dtype": "bfloat16",
    }


def export(folder: Path, shape: ModelShape, weights: Mapping[str, Tensor], tokenizer_folder: Path, end_id: int) -> None:
    """Writes a standard llama checkpoint folder, weights in bfloat16, with the tokenizer's files beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner alone
    (folder / "config.json").write_text(json.dumps(hf_config(shape, end_id), indent=2) + "\n", encoding="utf-8")
    generation = {"bos_token_id": end_id, "eos_token_id": end_id, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer_folder / name).resolve() != (folder / name).resolve():
            shutil.copyfile(tokenizer_folder / name, folder / name)


def read_shape(folder: Path) -> ModelShape:
    """The shape of a checkpoint folder written by `export`. Raises NotFound where there is none."""
    if not (folder / "config.json").exists():
        raise NotFound(f"there is no config.json in {folder}: name a checkpoint folder made by `forerun train lm`")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return ModelShape(
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        ffn_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        rope_theta=config["rope_theta"],
        max_positions=config["max_position_embeddings"],
    )


def read_weights(folder: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Weights of a checkpoint folder written by `export`, widened to float32."""
    weights = load_file(folder / "model.safetensors", device=str(device))
    return {name: weight.float() for name, weight in weights.items()}


def load_decoder(folder: Path, ops: ReferenceOps, device: torch.device | str = "cpu") -> Decoder:
    """A decoder in float32 from a checkpoint folder written by `export`."""
    return Decoder(read_shape(folder).decoder_config(), read_weights(folder, device), ops)
