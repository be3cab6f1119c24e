"""Small models for training: shape, first weights, and checkpoint folders that any runtime of their family reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.blocks import Spec, weight_shapes
from forerun.errors import BadOption, shown
from forerun.models.families import family
from forerun.models.loading import load_checkpoint, read_config, read_raw_config
from forerun.models.saving import save_checkpoint
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import TorchModel
from forerun.types import RaggedBatch

# Of each family that is trained: what its config.json calls the sizes, and what else stands there.
SIZES: Mapping[str, Mapping[str, str]] = {
    "llama": {
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "ffn_size": "intermediate_size",
        "vocab_size": "vocab_size",
        "rope_theta": "rope_theta",
        "max_positions": "max_position_embeddings",
    },
    "gpt2": {
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "ffn_size": "n_inner",
        "vocab_size": "vocab_size",
        "max_positions": "n_positions",
    },
    "qwen3_moe": {
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "ffn_size": "moe_intermediate_size",
        "num_experts": "num_experts",
        "num_chosen": "num_experts_per_tok",
        "vocab_size": "vocab_size",
        "rope_theta": "rope_theta",
        "max_positions": "max_position_embeddings",
    },
}
FIXED: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-5},
    "gpt2": {"layer_norm_epsilon": 1e-5},
    "qwen3_moe": {"rms_norm_eps": 1e-6, "norm_topk_prob": True},
}


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder with tied embeddings, in elements; heads have hidden_size / num_heads of them.

    family: llama; gpt2, which learns each of its max_positions, and has as many key-value heads as query heads; or
    qwen3_moe, of whose num_experts parts of ffn_size each row takes num_chosen.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    rope_theta: float = 10000.0
    max_positions: int = 2048
    family: str = "llama"
    num_experts: int = 0
    num_chosen: int = 0

    def __post_init__(self) -> None:
        if self.family not in SIZES:
            raise BadOption(f"family={shown(self.family)} is not trained: it must be {' or '.join(SIZES)}")
        if "num_experts" in SIZES[self.family]:
            if not 1 <= self.num_chosen <= self.num_experts:
                raise BadOption(
                    f"each row of a {self.family} takes some of its experts, not {self.num_chosen} of "
                    f"{self.num_experts}: give --experts 8 --experts-per-token 2"
                )
        elif self.num_experts or self.num_chosen:
            raise BadOption(f"a {self.family} has no experts: leave those options out, or say --family qwen3_moe")
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise BadOption(
                f"{self.num_heads} query heads must divide hidden size {self.hidden_size} and be a multiple of "
                f"{self.num_kv_heads} key-value heads"
            )
        if "num_kv_heads" not in SIZES[self.family] and self.num_kv_heads != self.num_heads:
            raise BadOption(
                f"a {self.family} has as many key-value heads as its {self.num_heads} query heads, not "
                f"{self.num_kv_heads}: leave --kv-heads out"
            )

    @classmethod
    def of_family(cls, family: str, seq_len_tokens: int, num_kv_heads: int | None, **sizes: int) -> ModelShape:
        """Return a shape whose other fields are the family's: learned positions are those of its sequences."""
        if family == "gpt2":
            sizes |= {"max_positions": seq_len_tokens}
        usual = sizes["num_heads"] if family == "gpt2" else 2
        return cls(**sizes, num_kv_heads=usual if num_kv_heads is None else num_kv_heads, family=family)

    def spec(self) -> Spec:
        """Return the shape as a list of blocks, as the family describes it."""
        sizes = {key: getattr(self, name) for name, key in SIZES[self.family].items()}
        more = {"model_type": self.family, "tie_word_embeddings": True, **FIXED[self.family]}
        return family(self.family).read(sizes | more)

    @property
    def num_parameters(self) -> int:
        """The number of weights, with the tied embedding counted once."""
        return self.spec().num_weights


class Shape(Protocol):
    """The sizes of a model that is trained."""

    @property
    def num_layers(self) -> int: ...
    def spec(self) -> Spec: ...


def initial_weights(
    shape: Shape, seed: int, deviations: Mapping[str, float] | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Draw float32 weights: norms are 1, biases 0, others normal. deviations: by module; None = 0.02, as in GPT-2.

    In GPT-2's way projections into the residual stream are divided by sqrt(2 layers) (Radford et al. 2019, section
    2.3). All are drawn on the CPU, so that a seed gives the same model for every device.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in weight_shapes(shape.spec()).items():
        if len(size) == 1:
            weights[name] = torch.zeros(size) if name.endswith(".bias") else torch.ones(size)
            continue
        module = name.split(".")[-2]
        std = _like_gpt2(module, shape.num_layers) if deviations is None else deviations[module]
        weights[name] = torch.randn(size, generator=generator) * std
    return {name: weight.to(device) for name, weight in weights.items()}


def _like_gpt2(module: str, num_layers: int) -> float:
    return 0.02 / math.sqrt(2 * num_layers) if module in ("o_proj", "down_proj") else 0.02


def deepen(weights: Mapping[str, Tensor], old: ModelShape, new: ModelShape, seed: int) -> dict[str, Tensor]:
    """Return the weights of a shallower model with new layers behind its own, which compute the same function.

    A new layer's projections into the residual stream are zero, so it adds nothing until it has learned something
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


def run_windows(model: TorchModel, tokens: Tensor) -> Tensor:
    """Compute the final hidden states of sequences, [S, L] -> [S * L, H]; the model must have TrainingOps of L."""
    num_sequences, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(num_sequences)
    batch = RaggedBatch(tokens.reshape(-1), positions, [0, tokens.numel()], [0], [0])
    return model.forward(batch, None)


# ------------------------------------------------------------------------------------------------ checkpoint folders


def export(
    folder: Path,
    shape: ModelShape,
    weights: Mapping[str, Tensor],
    tokenizer_folder: Path | None,
    end_id: int | None,
    end_ids: Collection[int] = (),
) -> None:
    """Write a standard checkpoint folder of the family, with weights in bfloat16 and the tokenizer's files beside them.

    end_id: behind each text of the training; a model of ids alone has neither it nor a tokenizer. end_ids: what ends an
    output; none = end_id.
    """
    save_checkpoint(
        folder,
        shape.spec(),
        weights,
        end_ids=end_ids or (() if end_id is None else {end_id}),
        bos_id=end_id,
        tokenizer_folder=tokenizer_folder,
    )


def read_shape(folder: Path) -> ModelShape:
    """Read the shape of a checkpoint folder. Raises NotFound without one, BadOption for a shape not possible."""
    spec = read_config(read_raw_config(folder))
    if (names := SIZES.get(spec.model_type)) is not None:
        raw = family(spec.model_type).write(spec)
        sizes = {name: raw[key] for name, key in names.items()}
        shape = ModelShape(**{"num_kv_heads": sizes["num_heads"], **sizes}, family=spec.model_type)
        if shape.spec() == spec:
            return shape
    raise BadOption(
        f"{folder} is no plain {' or '.join(SIZES)} with tied embeddings: name a folder made by `forerun train lm`"
    )


def load_decoder(name: Path | str, ops: ReferenceOps, device: torch.device | str = "cpu") -> TorchModel:
    """Load a model in float32: from a folder; a str may be a GGUF file, a name or a hub id, too."""
    model = load_checkpoint(name, dtype="float32", device=device, ops=ops).model
    assert isinstance(model, TorchModel)
    return model


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint folder that `export` wrote, in float32 on the host, each in its own memory."""
    return {name: weight.clone() for name, weight in load_decoder(folder, ReferenceOps()).weights.items()}
