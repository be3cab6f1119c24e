"""First weights for small models that are trained, and their checkpoint folders, which other runtimes can load."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from forerun.blocks import Spec, weight_shapes
from forerun.errors import BadOption
from forerun.models.families import family
from forerun.models.loading import load_checkpoint
from forerun.models.opened import spec_of
from forerun.models.saving import save_checkpoint
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import TorchModel
from forerun.ops.torch_tensors import HostWeights
from forerun.train.shape import SIZES, ModelShape
from forerun.types import RaggedBatch

INTO_STREAM = ("o_proj", "out_proj", "down_proj")  # modules that end a branch of the residual stream


def initial_weights(shape: ModelShape, seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Draw random first weights as for GPT-2, with a standard deviation of 0.02 (Radford et al. 2019, section 2.3).

    For projections into the residual stream, the deviation is divided by the square root of twice the number of layers.
    """
    small = 0.02 / math.sqrt(2 * shape.num_layers)
    return drawn_weights(shape.spec(), seed, lambda name: small if name in INTO_STREAM else 0.02, device)


def drawn_weights(
    spec: Spec, seed: int, deviation_of: Callable[[str], float], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Draw float32 weights, by name. Norms multiply by 1, biases are 0, and other weights are normally distributed.

    deviation_of: returns the standard deviation for the name of a module. Decays and convolutions of recurrent layers
    are drawn as in published code (Gu and Dao 2023, arXiv 2312.00752, section 3.6): exp(A_log) is uniform,
    softplus(dt_bias) is log-uniform, and a convolution over n inputs is uniform between -1 / sqrt(n) and 1 / sqrt(n).
    All weights are drawn on the CPU, so that a seed gives the same model on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    offset = 0.0 if spec.final_norm is None else spec.final_norm.offset
    weights = {}
    for name, size in weight_shapes(spec).items():
        module = name.split(".")[-2]
        if module == "A_log":
            drawn = torch.empty(size).uniform_(*DECAYS, generator=generator).log()
        elif module == "dt_bias":
            steps = torch.empty(size).uniform_(*map(math.log, TIME_STEPS), generator=generator).exp()
            drawn = steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus
        elif module in CONVOLUTIONS and len(size) == 2:
            drawn = torch.empty(size).uniform_(-(size[1] ** -0.5), size[1] ** -0.5, generator=generator)
        elif len(size) > 1:
            drawn = torch.randn(size, generator=generator) * deviation_of(module)
        elif name.endswith(".bias"):
            drawn = torch.zeros(size)
        else:
            drawn = torch.full(size, 1.0 if "linear_attn." in name else 1.0 - offset)
        weights[name] = drawn
    return {name: weight.to(device) for name, weight in weights.items()}


CONVOLUTIONS = ("conv", "conv1d")
DECAYS, TIME_STEPS = (1e-2, 16.0), (1e-3, 1e-1)


def deepen(weights: Mapping[str, Tensor], old: ModelShape, new: ModelShape, seed: int) -> dict[str, Tensor]:
    """Return the weights of a deeper model: the old layers, followed by new layers.

    The new layers' projections into the residual stream are zero, so at first the deeper model computes the same
    function (Chen, Goodfellow, Shlens 2016, "Net2Net", section 2.3). Raises BadOption where the shapes `old` and `new`
    differ in more than the number of layers, or where `new` has fewer layers.
    """
    if old.num_layers > new.num_layers:
        raise BadOption(
            f"a model of {old.num_layers} layers cannot be made shallower: give --layers {old.num_layers}, or more"
        )
    others = [f for f in dataclasses.fields(old) if f.name != "num_layers"]
    if differing := [f for f in others if getattr(old, f.name) != getattr(new, f.name)]:
        flags = [f.metadata.get("flag") or f"--{f.name.replace('_', '-')}" for f in differing]
        had = " ".join(f"{flag} {getattr(old, f.name)}" for flag, f in zip(flags, differing, strict=True))
        raise BadOption(f"only layers can be added to a model, whose other sizes stay as they are: give {had}")
    grown = initial_weights(new, seed)
    for name, weight in grown.items():
        if name in weights:
            grown[name] = weights[name].clone()
        elif name.split(".")[-2] in INTO_STREAM:
            weight.zero_()
    return grown


def run_windows(model: TorchModel, tokens: Tensor) -> Tensor:
    """Run the sequences `tokens` [S, L], and return the final hidden states [S * L, H].

    The model must use TrainingOps(L).
    """
    num_sequences, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(num_sequences)
    batch = RaggedBatch(tokens.reshape(-1), positions, [0, tokens.numel()], [0], [0])
    rows: Tensor = model.forward(batch, None).hidden
    return rows


# ------------------------------------------------------------------------------------------------ checkpoint folders


def export(
    folder: Path,
    shape: ModelShape,
    weights: Mapping[str, Tensor],
    tokenizer_folder: Path | None,
    end_id: int | None,
    end_ids: Collection[int] = (),
) -> None:
    """Write a standard checkpoint folder of the shape's family: weights in bfloat16, and the tokenizer's files.

    end_id: the id that came after each text in training. tokenizer_folder and end_id are None for a model that learned
    from ids without text. end_ids: the ids that end an output; empty = only end_id.
    """
    save_checkpoint(
        folder,
        shape.spec(),
        HostWeights(weights),
        end_ids=end_ids or (() if end_id is None else {end_id}),
        bos_id=end_id,
        tokenizer_folder=tokenizer_folder,
    )


def read_shape(folder: Path) -> ModelShape:
    """Return the shape of the model in a checkpoint folder.

    Raises NotFound where there is no checkpoint, and BadOption for a model that no ModelShape describes.
    """
    spec = spec_of(folder)
    if (names := SIZES.get(spec.model_type)) is not None:
        raw = family(spec.model_type).write(spec)
        raw = {**raw, **raw.get("rope_parameters", {})}
        sizes = {name: raw[key] for name, key in names.items()}
        shape = ModelShape(**{"num_kv_heads": sizes["num_heads"], **sizes}, family=spec.model_type)
        if shape.spec() == spec:
            return shape
    raise BadOption(
        f"{folder} is no plain {' or '.join(SIZES)} with tied embeddings: name a folder made by `forerun train lm`"
    )


def load_decoder(name: Path | str, ops: ReferenceOps, device: str = "cpu") -> TorchModel:
    """Load a model in float32. name: a folder, a GGUF file, a model's name or a hub id."""
    model = load_checkpoint(name, dtype="float32", device=device, ops=ops).model
    assert isinstance(model, TorchModel)
    return model


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint folder that `export` wrote, by name, in float32 on the host.

    The tensors share no memory, so that each can be trained in place.
    """
    return {name: weight.clone() for name, weight in load_decoder(folder, ReferenceOps()).weights.items()}
