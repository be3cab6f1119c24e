"""A checkpoint -> a model: a folder or a hub id, its config.json, its weights, its end-of-sequence ids.

Whatever would be computed wrongly is refused by name: see configs.py for the policy on config.json, refusals.py for
checkpoints of other formats, weights.py for how the weights are read.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from forerun.errors import BadOption, CapacityError, UnsupportedModel
from forerun.models import refusals
from forerun.models.generation import end_ids_of
from forerun.models.hub import is_hub_id, locate
from forerun.models.layers import Decoder, DecoderConfig, empty_weights, parameter_shapes
from forerun.models.weights import StoredWeights
from forerun.ops.reference import ReferenceOps
from forerun.text.json_files import read_json
from forerun.text.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Checkpoint:
    """A loaded folder. name: the folder's, or the hub id.

    config: config.json as it is. end_ids: ids that end the output, see `end_ids_of`. tokenizer: None where it was not
    asked for; it may know more ids than tokenizer.json in `folder` (a widened vocabulary).
    """

    name: str
    folder: Path
    model: Decoder
    config: Mapping[str, Any]
    end_ids: frozenset[int]
    tokenizer: Tokenizer | None = None


class Architecture(Protocol):
    """What a file of this folder must define to be an architecture."""

    def read_config(self, raw: Mapping[str, Any]) -> DecoderConfig: ...
    def Model(  # noqa: N802
        self, config: DecoderConfig, weights: Mapping[str, Tensor], ops: ReferenceOps, *, consume: bool = False
    ) -> Decoder: ...


def load_checkpoint(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    ops: ReferenceOps | None = None,
    with_tokenizer: bool = False,
) -> Checkpoint:
    """Read a checkpoint as `save_pretrained` writes it; with its tokenizer.json if asked, before any weight is read.

    name: a folder, or a hub id org/name[@revision], see `locate`. dtype: "float32", "bfloat16", a torch.dtype, or
    "auto" = bfloat16 with the native operators, float32 with others on a CPU, the checkpoint's own elsewhere. ops:
    None = the reference. Weights are read in blocks into their final place, and native operators that pack them give
    back what they have packed: the peak is the model itself and some 64 MB.

    Raises NotFound for what is not there, UnsupportedModel for what would be computed wrongly, CapacityError where
    the disk cannot hold what is fetched.
    """
    folder, device = locate(name, check=_check), torch.device(device)
    raw = read_raw_config(folder)
    config = read_config(raw)
    _refuse_files(folder, with_tokenizer)
    end_ids = end_ids_of(folder, raw)
    tokenizer = Tokenizer.load(folder) if with_tokenizer else None
    stored = StoredWeights(folder)
    check_shapes(_without_tied_head(stored, config, str(folder)), parameter_shapes(config), str(folder))
    ops = ops or ReferenceOps()
    weights = _allocate(config, _dtype(dtype, device, stored, ops), device)
    stored.fill(weights)
    return Checkpoint(
        name=str(name) if is_hub_id(name) else folder.resolve().name,
        folder=folder,
        model=architecture(config.model_type).Model(config, weights, ops, consume=True),
        config=raw,
        end_ids=end_ids,
        tokenizer=tokenizer,
    )


def _allocate(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    try:
        return empty_weights(config, dtype, device)
    except RuntimeError as error:  # torch's OutOfMemoryError is one, and a CPU's refusal is a plain one
        num_bytes = sum(math.prod(shape) for shape in parameter_shapes(config).values()) * dtype.itemsize
        raise CapacityError(
            f"there is no memory for weights of {num_bytes / 1e9:.1f} GB on {device}: choose a smaller model, or "
            "dtype='bfloat16'; forerun plan says what fits"
        ) from error


def small_files(name: str | Path) -> Path:
    """The folder of a checkpoint, fetched without its weights; raises UserError for all that its small files show."""
    folder = locate(name, weights=False)
    _check(folder)
    if not is_hub_id(name):  # whose listing was looked through
        _refuse_files(folder, with_tokenizer=True)
    return folder


def _check(folder: Path) -> None:
    raw = read_raw_config(folder)
    read_config(raw)
    end_ids_of(folder, raw)


def _refuse_files(folder: Path, with_tokenizer: bool) -> None:
    names, where = _names(folder), str(folder)
    refusals.refuse_without_weights(names, where, lambda name: read_json(folder / name))
    refusals.refuse_quantiser_files(names, where, lambda name: read_json(folder / name))
    if with_tokenizer:
        refusals.refuse_without_tokenizer(names, where)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


# ------------------------------------------------------------------------------------------------------ architectures


@cache
def model_types() -> tuple[str, ...]:
    """Every known `model_type`: the files of this folder that define `read_config`, found without importing them."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    found = [f.stem for f in files if "\ndef read_config(" in f.read_text(encoding="utf-8")]
    return tuple(name for name in found if name != Path(__file__).stem)


def architecture(model_type: object) -> Architecture:
    """The file named like the checkpoint's `model_type`. Raises UnsupportedModel with the list of known ones."""
    if model_type not in model_types():
        raise UnsupportedModel(f"model_type={model_type!r} is not supported: it must be one of {list(model_types())}")
    return cast(Architecture, importlib.import_module(f"forerun.models.{model_type}"))


def read_raw_config(name: str | Path) -> dict[str, Any]:
    """config.json of a folder or of a hub id, as it is. Raises NotFound or UnsupportedModel, saying what would work."""
    folder = locate(name, config_only=True)
    if not folder.is_dir():
        refusals.refuse_file(folder)
    refusals.refuse_without_config(_names(folder), str(folder), lambda file: read_json(folder / file))
    return read_json(folder / refusals.CONFIG)


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """config.json, read by the architecture it names. Raises UnsupportedModel for what would be computed wrongly."""
    refusals.refuse_code(raw, model_types())
    module = architecture(raw.get("model_type"))
    refusals.refuse_quantised_config(raw)
    return module.read_config(raw)


# ------------------------------------------------------------------------------------------------------------ weights


def _without_tied_head(stored: StoredWeights, config: DecoderConfig, where: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape, less an LM head stored beside the embedding it is tied to. Raises where the two differ."""
    shapes = stored.shapes
    if config.tie_embeddings and {HEAD, EMBEDDING} <= shapes.keys():
        if not stored.same(HEAD, EMBEDDING):
            # transformers 4 used the embedding here, transformers 5 uses the head: the file means two models.
            raise UnsupportedModel(
                f"{where} sets tie_word_embeddings=True and holds a different {HEAD}: set it to False, or drop that "
                "tensor"
            )
        del shapes[HEAD]
    return shapes


def check_shapes(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise UnsupportedModel, naming the first tensor that is missing, unexpected or of another shape."""
    for name, shape in wanted.items():
        if name not in found:
            raise UnsupportedModel(f"{where} has no tensor {name}, which its config.json asks for{_tie_hint(name)}")
        if found[name] != shape:
            raise UnsupportedModel(
                f"{where} has {name} of shape {list(found[name])}, and its config.json asks for {list(shape)}"
            )
    for name in found:
        if name not in wanted:
            raise UnsupportedModel(f"{where} holds the tensor {name}, which its config.json does not ask for")


def _tie_hint(name: str) -> str:
    return ": set tie_word_embeddings to true if the embedding is meant" if name == HEAD else ""


def _dtype(dtype: str | torch.dtype, device: torch.device, stored: StoredWeights, ops: ReferenceOps) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return ops.auto_dtype(device.type, stored.stored[EMBEDDING].dtype)
    if dtype not in DTYPES:
        raise BadOption(f"dtype={dtype!r} is not possible: it must be one of {['auto', *DTYPES]}")
    return DTYPES[dtype]
