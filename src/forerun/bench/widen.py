"""Widens whole checkpoints for measurements, in memory or into a folder, to preset or given shapes.

models/widening.py explains why a widened model computes the same as the small model.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import tokenizers
from rich.console import Console

from forerun import drafters
from forerun.blocks import Spec, weight_shapes
from forerun.config import EngineConfig, Quantization
from forerun.drafters.shared import head_files
from forerun.drafters.shared.eagle_model import EagleConfig, input_shapes, layer_shapes
from forerun.drafters.shared.head_matrices import dense_of
from forerun.engine.opened import SHIPPED_DRAFT, Opened
from forerun.errors import BadOption, shown
from forerun.host_tensor import HostTensor
from forerun.models import named
from forerun.models.loading import Checkpoint, checked, load_checkpoint, packed_schemes
from forerun.models.opened import OpenedCheckpoint
from forerun.models.quantising import QuantisingSource
from forerun.models.saving import new_folder, save_checkpoint
from forerun.models.source import Source, Stored
from forerun.models.weights import StoredWeights
from forerun.models.widening import WideShape, widen
from forerun.ops import load_model
from forerun.ops.model import LoadedModel
from forerun.ops.operators import Operators
from forerun.registry import unknown
from forerun.text.grow import grow
from forerun.text.json_files import read_json
from forerun.text.tokenizer import Tokenizer
from forerun.text.waiting import Waiting

# The last two are the sizes of the published models of these names. `demo` keeps head size and vocabulary.
SHAPES = {
    "demo": WideShape(hidden_size=2048, num_layers=6, num_heads=32, num_kv_heads=8, ffn_size=8192),  # about 0.4 B
    "llama-3.2-1b": WideShape(2048, 16, 32, 8, 8192, head_dim=64, vocab_size=128256),
    "llama-3.2-3b": WideShape(3072, 28, 24, 8, 8192, head_dim=128, vocab_size=128256),
}
PROMPTS = named.DATA / "prompts.jsonl"
SHARD_BYTES = 1 << 29  # size of a shard in a written folder; up to two shards are in memory beside the model


def shape_named(name: str, config: Spec) -> WideShape:
    """Return a preset shape for a trained model, with at least as many layers as the model has.

    Raises BadOption for an unknown name.
    """
    if name not in SHAPES:
        raise BadOption(unknown("shape", name, SHAPES))
    shape = SHAPES[name]
    return dataclasses.replace(shape, num_layers=max(shape.num_layers, config.num_layers))


def widen_checkpoint(
    checkpoint: Checkpoint, shape: WideShape, ops: Operators | None = None, quantization: str | None = None
) -> Checkpoint:
    """Widen a checkpoint in memory.

    ops: the operators of the widened model, None = the checkpoint's. quantization: int8 or int4[:group=N] for the
    widened weights. The ids that end a text do not change, and the tokenizer gets tokens for new ids. Raises what
    `widen`, `grow` and `QuantisingSource` raise.
    """
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    grown = _grown_tokenizer(model.config, checkpoint.folder, shape)
    if grown is not None:
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(grown), checkpoint.folder)
    config, weights = widen(model.config, WeightsOf(model), shape)
    ops = ops or model.ops
    if quantization is not None:
        dense = _InMemory(checkpoint.folder, checkpoint.config, weights)
        source = cast(Source, QuantisingSource(dense, config, Quantization.parse(quantization)))
        packs = packed_schemes(ops, model.weight_dtype)
        wide = load_model(config, StoredWeights(source, model.weight_dtype, packs), ops, consume=True)
    else:
        wide = load_model(config, weights, ops, consume=True)
    return dataclasses.replace(checkpoint, model=wide, tokenizer=tokenizer, quantization=quantization)


@dataclass(frozen=True)
class WeightsOf(Mapping[str, HostTensor]):
    """The weights of a model in memory, unpacked, each in the model's weight_dtype."""

    model: LoadedModel

    def __getitem__(self, name: str) -> HostTensor:
        return HostTensor.of(self.model.weight(name)).to(self.model.weight_dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(weight_shapes(self.model.config))

    def __len__(self) -> int:
        return len(weight_shapes(self.model.config))


@dataclass
class _InMemory:
    """Weights in memory, in the form of a `Source`, which otherwise reads files."""

    folder: Path
    config: Mapping[str, Any]
    weights: Mapping[str, HostTensor]
    names: None = None

    @property
    def tensors(self) -> Mapping[str, Stored]:
        return {name: Stored(self.folder, w.shape, w.dtype) for name, w in self.weights.items()}

    def check(self, with_tokenizer: bool) -> None:
        """Do nothing, because no file can be missing."""

    def close(self) -> None:
        """Do nothing, because no file is open."""

    def blocks(self, name: str) -> Iterator[HostTensor]:
        yield self.weights[name]


def with_positions(checkpoint: Checkpoint, num: int) -> Checkpoint:
    """Return a checkpoint with the same weights that takes texts of up to `num` tokens.

    The result is only for measuring times, because its output is meaningless beyond the trained positions.
    """
    model = copy.copy(checkpoint.model)
    cast(Any, model).config = dataclasses.replace(model.config, max_positions=num)
    return dataclasses.replace(checkpoint, model=model)


def write_widened(folder_in: str | Path, folder_out: str | Path, shape: WideShape) -> Spec:
    """Widen a checkpoint folder into a new folder that any llama runtime loads, and return the new spec.

    The weights keep their stored dtype. The tokenizer's files are copied, with tokens for new ids. Raises what `widen`
    and `grow` raise, and NotFound for a missing checkpoint.
    """
    target = Path(folder_out)
    with new_folder(target):
        opened = OpenedCheckpoint.of(folder_in, with_tokenizer=False)
        opened.fetch_weights()
        spec = checked(opened.weights, opened.spec, opened.path)
        stored = StoredWeights(opened.weights, opened.stored_dtype)
        tokenizer = _grown_tokenizer(spec, opened.folder, shape)
        config, weights = widen(spec, cast(Mapping[str, HostTensor], stored), shape)
        opened.close()
        save_checkpoint(
            target,
            config,
            weights,
            opened.stored_dtype,
            end_ids=opened.end_ids,
            bos_id=opened.raw.get("bos_token_id"),
            tokenizer_folder=opened.folder,
            shard_bytes=SHARD_BYTES,
        )
        if tokenizer is not None:
            (target / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        return config


def head_to_widen(name: str, shape: WideShape, num_ids: int) -> Path:
    """Return the folder of a trained `eagle` head. name: the head, as a drafter's options name it.

    num_ids: the number of token ids of the head's target. Raises what a drafter raises where there is no such head.
    Raises BadOption for a shape with more ids: the widened target's hidden states would have a dimension that the head
    does not expect.
    """
    path = head_files.located(name, "eagle")
    EagleConfig.from_json(head_files.read_config(path, "eagle"))
    if shape.vocab_size is not None and shape.vocab_size > num_ids:
        raise BadOption(f"vocab_size={shape.vocab_size} is not possible with a head: its target has {num_ids} ids")
    return Path(path)


def write_widened_head(folder: Path, out: Path, shape: WideShape) -> None:
    """Widen the head in `folder` as its target was widened, and write it into the new folder `out`.

    The widened head drafts the same tokens. Matrices that read the target's hidden states get zeros for the new
    dimensions of inputs and outputs.
    """
    config = EagleConfig.from_json(head_files.read_config(str(folder), "eagle"))
    small, facts = config.decoder, read_json(folder / head_files.CONFIG)["forerun"]
    weights = {name: dense_of(tensor) for name, tensor in head_files.stored(folder).items()}
    layer = {name: weights[name] for name in layer_shapes(config)}
    decoder, grown = widen(small, layer, dataclasses.replace(shape, num_layers=1, vocab_size=None))
    wide = dataclasses.replace(config, decoder=decoder)
    old, new = small.hidden_size, decoder.hidden_size
    scale = math.sqrt(old / new)
    grown = {name: grown[name] for name in layer_shapes(wide)}
    for name, sizes in input_shapes(wide).items():
        numbers = np.full(sizes, scale if len(sizes) == 1 else 0.0, np.float32)
        trained = weights[name].float32()
        if len(sizes) == 1:
            numbers[:old] = trained * np.float32(scale)
        else:
            numbers.reshape(new, -1, new)[:old, :, :old] = trained.reshape(old, -1, old)
        grown[name] = HostTensor.of(numbers).to(weights[name].dtype)
    probe = np.pad(weights[head_files.PROBE].values, ((0, 0), (0, new - old)))
    grown[head_files.PROBE] = HostTensor(probe, weights[head_files.PROBE].dtype)
    head_files.save(out, "eagle", {**grown, "d2t": weights["d2t"]}, wide.to_json(), facts["tokenizer"])


def _grown_tokenizer(spec: Spec, folder: Path, shape: WideShape) -> str | None:
    """Return the text of tokenizer.json with tokens for the new ids; None without new ids or tokenizer.json."""
    have = spec.vocab_size
    file = folder / "tokenizer.json"
    if shape.vocab_size is None or shape.vocab_size <= have or not file.is_file():
        return None
    return grow(file.read_text(encoding="utf-8"), shape.vocab_size, first_id=have)


# ------------------------------------------------------------------------------------------ sizes of widened models


def num_parameters(config: Spec) -> int:
    """Return the number of all weights of a model."""
    return config.num_weights


def describe(spec: Spec) -> str:
    """Return the shape of a model in words."""
    if spec.encoder is not None:
        reading = sum(block.attention is not None and block.attention.sees == "encoder" for block in spec.blocks)
        layers = f"{spec.encoder.num_layers} encoder and {spec.num_layers - reading} decoder layers"
        return f"{spec.model_type}, hidden {spec.hidden_size}, {layers}, {spec.vocab_size} ids"
    said = [f"hidden {spec.hidden_size}", f"{spec.num_layers} layers"]
    of_parts = {
        "mlp": "ffn {0.size}",
        "experts": "{0.chosen} of {0.num} experts of {0.mlp.size}",
        "attention": "{0.heads}/{0.kv_heads} heads of {0.head_dim}",
    }
    for part, text in of_parts.items():
        parts = [getattr(block, part) for block in spec.blocks]
        kinds = dict.fromkeys(text.format(one) for one in parts if one is not None)
        said += [" and ".join(kinds)] if kinds else []
    return ", ".join([*said, f"{spec.vocab_size} ids"])


def measured_target(config: EngineConfig, shape: str) -> Opened:
    """Open the target of a measurement.

    If the configuration names no target, open the default target. If `shape` is not none, the target is to be widened,
    so open the shipped model instead of the default target.
    """
    return Opened.of(config if shape == "none" else dataclasses.replace(config, target=config.target or named.PAIR))


def load_widened(opened: Opened, shape: str, console: Console) -> Checkpoint:
    """Load the target, and widen it to a shape (none = not widened). Print its size and the seconds of loading."""
    start, note, config = time.perf_counter(), "", opened.config
    with Waiting("loading the target") as waiting:
        if shape == "none":
            checkpoint = opened.load()
        else:
            small = opened.under(dataclasses.replace(config, quantization=None)).load()
            ops = opened.operators
            waiting.tell("widening the target")
            checkpoint = widen_checkpoint(small, shape_named(shape, small.model.config), ops, config.quantization)
            note = ", a widened small model"
    model = checkpoint.model
    kind = f"{model.precision} on {model.device}"
    console.print(
        f"target: {num_parameters(model.config):,} parameters{note} ({describe(model.config)}), {kind}; "
        f"ready in {time.perf_counter() - start:.1f} s"
    )
    return checkpoint


def draft_options(spec: str) -> tuple[str, str | None]:
    """Return the path and the quantization of the draft model that `spec` names, by default the shipped model.

    Raises BadOption for other drafters, and for options that a widened draft model lacks.
    """
    method, options = drafters.resolve(spec, drafters.BY_MODEL)
    if method != "model":
        raise BadOption(f"draft={shown(spec)} is no model that could be widened: name a draft model, or leave it out")
    if options != type(options)(path=options.path, quantization=options.quantization):
        raise BadOption(
            f"draft={shown(spec)} has options that a widened draft model has not: it takes path and quantization"
        )
    return options.path or str(SHIPPED_DRAFT), options.quantization


def load_widened_draft(spec: str, config: EngineConfig, target: Checkpoint, shape: str) -> Checkpoint:
    """Load the draft model that `spec` names, by default the shipped model, widened to a shape.

    The draft model gets the target's weight dtype, device and operators.
    """
    path, quantization = draft_options(spec)
    checkpoint = load_beside(target.model, path, config.ignored_config_keys)
    return widen_checkpoint(checkpoint, shape_named(shape, checkpoint.model.config), target.model.ops, quantization)


def load_beside(
    target: LoadedModel, path: str | Path, ignore: Collection[str] = (), quantization: str | None = None
) -> Checkpoint:
    """Load a draft model with the target's weight dtype, device and operators.

    ignore: entries of the draft model's config.json that are ignored.
    """
    return load_checkpoint(
        path,
        dtype=target.weight_dtype,
        device=target.device,
        ops=target.ops,
        with_tokenizer=True,
        quantization=quantization,
        ignore_config_keys=ignore,
    )
