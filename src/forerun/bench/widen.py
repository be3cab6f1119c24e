"""Widening: a trained llama becomes a larger llama that computes the same function.

A speed measurement needs a large model, and a real acceptance rate needs a trained one. Widening gives both: the
result has the shape, the bytes and the time of the larger model, and says what the small one says. Call it by its
name wherever a number comes from it: *a widened small model*.

How the function survives, with d -> D the residual widths:

* The new residual dimensions hold exact zeros throughout: new embedding columns, new output rows of o_proj and
  down_proj are zero. Columns that read them may be anything, and are noise.
* An RMS norm now divides by D instead of d: weights times sqrt(d/D), eps times d/D undo it. For D/d a power of 4 the
  factor is a power of two, so the weights stay exact in bfloat16.
* Query head j of group g goes to slot j of group g of the wider model, so that it meets its own keys and values. New
  heads and feed-forward units are noise whose outputs meet zero columns of o_proj and down_proj.
* New layers are noise with o_proj = down_proj = 0: they add exact zeros to the residual stream.

Noise is no larger than the trained weights, and is there because memory full of zeros would not be an honest stand-in:
a dense checkpoint of the same shape must take the same time. What has to be zero is written as zeros, page by page.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import BadOption, UnsupportedModel
from forerun.methods import unknown
from forerun.models.layers import JOINED, DecoderConfig, parameter_shapes
from forerun.models.loading import Checkpoint, load_checkpoint, read_raw_config
from forerun.models.saving import save_checkpoint


@dataclass(frozen=True)
class WideShape:
    """The sizes to reach, in elements; each at least the trained model's. The head size and vocabulary stay."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int


SHAPES = {
    "demo": WideShape(hidden_size=2048, num_layers=5, num_heads=32, num_kv_heads=8, ffn_size=8192),  # about 0.3 B
    "1b": WideShape(hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, ffn_size=8192),  # Llama-3.2-1B
}


NOISE_NUMBERS = (1 << 20) + 7  # of the block that is repeated; no row length divides it, so no two rows are equal


def shape_named(name: str, config: DecoderConfig) -> WideShape:
    """A preset for a trained model; it gets as many layers as the model has, at least.

    Raises BadOption for an unknown name.
    """
    if name not in SHAPES:
        raise BadOption(unknown("shape", name, SHAPES))
    shape = SHAPES[name]
    return dataclasses.replace(shape, num_layers=max(shape.num_layers, config.num_layers))


def widen(
    config: DecoderConfig, weights: Mapping[str, Tensor], shape: WideShape, *, seed: int = 0
) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """The same function in a larger shape: (config, weights) with the dtype and device of the weights given.

    Raises BadOption for a shape that the model does not fit into, UnsupportedModel for QK norm (its eps is the one
    that has to change).
    """
    wide = _wide_config(config, shape)
    trained = weights["model.layers.0.mlp.gate_proj.weight"]
    generator = torch.Generator(trained.device).manual_seed(seed)
    # Uniform noise of this half-width has half the standard deviation of the trained feed-forward weights.
    limit = float(trained.float().std()) * math.sqrt(3) / 2
    scale = math.sqrt(config.hidden_size / shape.hidden_size)
    q_rows = _query_rows(config, shape.num_heads // shape.num_kv_heads).to(trained.device)
    block = torch.empty(NOISE_NUMBERS, dtype=trained.dtype, device=trained.device)
    block.uniform_(-limit, limit, generator=generator)
    made = _allocate(wide, trained)
    for name, out in made.items():
        if _must_be_zero(name):
            out.zero_()  # writes every page: memory that was never written is not read from memory at all
        elif name.endswith("norm.weight"):
            out.fill_(scale)
        else:
            _fill(out, block)
        if name in weights:
            _place(out, weights[name] * scale if name.endswith("norm.weight") else weights[name], name, q_rows)
    return wide, made


def widen_checkpoint(checkpoint: Checkpoint, shape: WideShape) -> Checkpoint:
    """A loaded checkpoint in a larger shape, in memory; tokenizer and end ids stay. Raises as `widen`."""
    model = checkpoint.model
    config, weights = widen(model.config, model.weights, shape)
    return dataclasses.replace(checkpoint, model=type(model)(config, weights, model.ops))


def write_widened(folder_in: str | Path, folder_out: str | Path, shape: WideShape) -> DecoderConfig:
    """Widen a checkpoint folder into a new one that any llama runtime loads; returns its config.

    The weights keep their stored type; the tokenizer's files are copied. Raises NotFound, BadOption, UnsupportedModel.
    """
    target = Path(folder_out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadOption(f"the output folder {target} exists and is not empty: name a new one")
    dtype = _stored_dtype(Path(folder_in))
    checkpoint = load_checkpoint(folder_in, dtype=dtype)
    config, weights = widen(checkpoint.model.config, checkpoint.model.weights, shape)
    bos = checkpoint.config.get("bos_token_id")
    save_checkpoint(target, config, weights, dtype, end_ids=checkpoint.end_ids, bos_id=bos, tokenizer_folder=folder_in)
    return config


def _stored_dtype(folder: Path) -> torch.dtype:
    """The type that config.json names, float32 where it names none."""
    raw = read_raw_config(folder)
    dtype = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype") or "float32"), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


# ------------------------------------------------------------------------------------------------------- the config


def _wide_config(config: DecoderConfig, shape: WideShape) -> DecoderConfig:
    if config.qk_norm:
        raise UnsupportedModel(
            f"a {config.model_type} model cannot be widened: its QK norm shares the eps that changes"
        )
    for field in dataclasses.fields(shape):
        have, want = getattr(config, field.name), getattr(shape, field.name)
        if want < have:
            raise BadOption(f"{field.name}={want} is not possible: the model has {have}, and widening cannot shrink it")
    if shape.num_heads % shape.num_kv_heads:
        raise BadOption(f"num_heads={shape.num_heads} is not possible: it must be a multiple of {shape.num_kv_heads}")
    if shape.num_heads // shape.num_kv_heads < config.num_heads // config.num_kv_heads:
        group = config.num_heads // config.num_kv_heads
        raise BadOption(f"num_heads={shape.num_heads} is not possible: {group} query heads share a key-value head")
    more = shape.num_layers - config.num_layers
    return dataclasses.replace(
        config,
        **dataclasses.asdict(shape),
        norm_eps=config.norm_eps * config.hidden_size / shape.hidden_size,
        windows=config.windows + config.windows[-1:] * more,
    )


# ------------------------------------------------------------------------------------------------------ the weights


def _allocate(config: DecoderConfig, like: Tensor) -> dict[str, Tensor]:
    """Every weight, unwritten. Projections of one input lie back to back, as load_checkpoint lays them out: a widened

    model must not be slower than a loaded one.
    """
    shapes = parameter_shapes(config)
    made: dict[str, Tensor] = {}
    for i in range(config.num_layers):
        for group in JOINED:
            names = [f"model.layers.{i}.{name}.weight" for name in group]
            rows = [shapes[name][0] for name in names]
            whole = torch.empty(sum(rows), config.hidden_size, dtype=like.dtype, device=like.device)
            made.update(zip(names, torch.split_with_sizes(whole, rows), strict=True))
    rest = {name: shape for name, shape in shapes.items() if name not in made}
    made.update({name: torch.empty(shape, dtype=like.dtype, device=like.device) for name, shape in rest.items()})
    return {name: made[name] for name in shapes}


def _fill(out: Tensor, block: Tensor) -> None:
    """The block again and again: drawing a billion numbers would take longer than all the rest."""
    flat = out.view(-1)
    for start in range(0, len(flat), len(block)):
        part = flat[start : start + len(block)]
        part.copy_(block[: len(part)])


def _must_be_zero(name: str) -> bool:
    """What writes into the residual stream, and biases, whose noise would buy nothing."""
    writers = ("model.embed_tokens.weight", "o_proj.weight", "down_proj.weight")
    return name.endswith(writers) or name.endswith(".bias")


def _query_rows(config: DecoderConfig, wide_group: int) -> Tensor:
    """Rows of the wide q_proj (columns of o_proj) for the trained query heads, in their order.

    Head j of group g goes to slot j of the wide group g; a group shares one key-value head.
    """
    group = config.num_heads // config.num_kv_heads
    slots = torch.tensor([(i // group) * wide_group + i % group for i in range(config.num_heads)])
    return (slots[:, None] * config.head_dim + torch.arange(config.head_dim)).flatten()


def _place(out: Tensor, trained: Tensor, name: str, q_rows: Tensor) -> None:
    """Write trained weights into the wide ones: query heads into their slots, everything else into the first corner."""
    if ".q_proj." in name:
        out[(q_rows, slice(0, trained.shape[1])) if trained.dim() == 2 else q_rows] = trained
    elif name.endswith("o_proj.weight"):
        out[: trained.shape[0]].index_copy_(1, q_rows, trained)
    else:
        out[tuple(slice(0, size) for size in trained.shape)] = trained


# ---------------------------------------------------------------------------------------------------- what it weighs


def num_parameters(config: DecoderConfig) -> int:
    """Number of weights of a decoder."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def bytes_per_pass(config: DecoderConfig, weights: Mapping[str, Tensor]) -> int:
    """Bytes of weights that one forward pass of a few rows reads, counted from the tensors: every matrix once.

    An embedding matrix that is not tied to the LM head is only looked up, a few rows of it.
    """
    looked_up = "" if config.tie_embeddings else "model.embed_tokens.weight"
    return sum(tensor.nbytes for name, tensor in weights.items() if name != looked_up)


def describe(config: DecoderConfig) -> str:
    """The shape in words, for the line beside a number."""
    return (
        f"hidden {config.hidden_size}, {config.num_layers} layers, ffn {config.ffn_size}, "
        f"{config.num_heads}/{config.num_kv_heads} heads of {config.head_dim}, {config.vocab_size} ids"
    )
