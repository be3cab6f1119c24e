"""A checkpoint -> a model: a folder or a hub id, its config.json, its weights, its end-of-sequence ids.

Whatever would be computed wrongly is refused by name: see configs.py for the policy on config.json, refusals.py for
checkpoints of other formats, source/ for the formats that are read, weights.py for what is checked on the way.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from forerun.config import Quantization
from forerun.errors import BadOption, UnsupportedModel, shown
from forerun.models import packings, refusals
from forerun.models.generation import end_ids_of
from forerun.models.hub import is_hub_id, locate
from forerun.models.layers import Decoder, DecoderConfig, empty_weights, parameter_shapes
from forerun.models.quantising import QuantisingSource
from forerun.models.source import Source, open_source
from forerun.models.weights import StoredWeights, no_room, same
from forerun.ops.reference import ReferenceOps
from forerun.text.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Checkpoint:
    """A loaded folder. name: the folder's, or the hub id.

    config: config.json as it is. end_ids: ids that end the output, see `end_ids_of`. tokenizer: None where it was not
    asked for; it may know more ids than tokenizer.json in `folder` (a widened vocabulary). quantization: what was asked
    for when it was loaded.
    """

    name: str
    folder: Path
    model: Decoder
    config: Mapping[str, Any]
    end_ids: frozenset[int]
    tokenizer: Tokenizer | None = None
    quantization: str | None = None


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
    ignore_config_keys: Collection[str] = (),
    quantization: str | None = None,
) -> Checkpoint:
    """Read a checkpoint as `save_pretrained` writes it; with its tokenizer.json if asked, before any weight is read.

    name: a folder, or a hub id org/name[@revision], see `locate`. dtype: "float32", "bfloat16", a torch.dtype, or
    "auto" = bfloat16 with the native operators, float32 with others on a CPU, the checkpoint's own elsewhere. ops:
    None = the reference. ignore_config_keys: of config.json, which is read as if it did not have them. quantization:
    int8 or int4[:group=N]: matrices are rounded while they are read; operators that pack no such weights get what the
    rounded ones stand for, in `dtype`.

    One tensor at a time is read. Operators that pack weights get it alone, and it is gone when it is packed; others
    get all of them, each read into its final place. The peak is the model itself and some 64 MB.

    Raises NotFound for what is not there, UnsupportedModel for what would be computed wrongly, CapacityError where
    the disk or the memory cannot hold it.
    """
    opened = partial(_opened, ignore=ignore_config_keys)
    path = locate(name, check=opened)
    source, raw, config, end_ids = opened(path)
    source.check(with_tokenizer)
    if quantization is not None:
        source = cast(Source, QuantisingSource(source, Quantization.parse(quantization)))
    tokenizer = Tokenizer.load(source.folder) if with_tokenizer else None
    check_shapes(stored_shapes(source, config), parameter_shapes(config), str(path))
    ops, device = ops or ReferenceOps(), torch.device(device)
    computed = _dtype(dtype, device, source, ops)
    # Packed products round their inputs to int8: not where float32 was asked for.
    packs = ops.packs_scheme if computed == torch.bfloat16 else ReferenceOps().packs_scheme
    stored = StoredWeights(source, computed, device, packs)
    # Quantised matrices are among the weights only where the operators say that they pack them.
    weights = cast(Mapping[str, Tensor], stored) if ops.packs else _read_all(stored, config)
    return Checkpoint(
        name=str(name) if is_hub_id(name) else path.resolve().name,
        folder=source.folder,
        model=architecture(config.model_type).Model(config, weights, ops, consume=True),
        config=raw,
        end_ids=end_ids,
        tokenizer=tokenizer,
        quantization=quantization,
    )


def _read_all(stored: StoredWeights, config: DecoderConfig) -> dict[str, Tensor]:
    """Every weight, in the layout of `empty_weights`."""
    try:
        weights = empty_weights(config, stored.dtype, stored.device)
    except RuntimeError as error:  # torch's OutOfMemoryError is one, and a CPU's refusal is a plain one
        num = sum(math.prod(shape) for shape in parameter_shapes(config).values())
        raise no_room(num * stored.dtype.itemsize, stored.device) from error
    for name, tensor in weights.items():
        stored.read(name, tensor)
    return weights


def small_files(name: str | Path, ignore_config_keys: Collection[str] = ()) -> Path:
    """The folder of a checkpoint, fetched without its weights; raises UserError for all that its small files show."""
    source = _opened(locate(name, weights=False), ignore_config_keys)[0]
    if not is_hub_id(name):  # whose listing was looked through
        source.check(with_tokenizer=True)
    return source.folder


def _opened(path: Path, ignore: Collection[str]) -> tuple[Source, dict[str, Any], DecoderConfig, frozenset[int]]:
    """A source, its config.json, the same as it is understood, and the end ids. Raises for what these files show."""
    source = open_source(path)
    raw = _without(source.config, ignore)
    return source, raw, read_config(raw), end_ids_of(source.folder, raw)


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
        raise UnsupportedModel(
            f"model_type={shown(model_type)} is not supported: it must be one of {list(model_types())}"
        )
    return cast(Architecture, importlib.import_module(f"forerun.models.{model_type}"))


def read_raw_config(name: str | Path, ignore: Collection[str] = ()) -> dict[str, Any]:
    """config.json of a folder or of a hub id, as if it did not have the keys `ignore`.

    Raises NotFound or UnsupportedModel, saying what would work.
    """
    return _without(open_source(locate(name, config_only=True)).config, ignore)


def _without(config: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ignore}


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """config.json, read by the architecture it names. Raises UnsupportedModel for what would be computed wrongly."""
    refusals.refuse_code(raw, model_types())
    module = architecture(raw.get("model_type"))
    packings.layout_of(raw)
    return module.read_config({key: value for key, value in raw.items() if key not in packings.KEYS})


# ------------------------------------------------------------------------------------------------------------ weights


def stored_shapes(source: Source, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape, less an LM head stored beside the embedding it is tied to. Raises where the two differ."""
    shapes = {name: stored.shape for name, stored in source.tensors.items()}
    if config.tie_embeddings and {HEAD, EMBEDDING} <= shapes.keys():
        if not same(source, HEAD, EMBEDDING):
            # transformers 4 used the embedding here, transformers 5 uses the head: the file means two models.
            raise UnsupportedModel(
                f"{source.folder} sets tie_word_embeddings=True and holds a different {HEAD}: set it to False, or drop "
                "that tensor"
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


def _dtype(dtype: str | torch.dtype, device: torch.device, source: Source, ops: ReferenceOps) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        stored = source.tensors[EMBEDDING]
        return ops.auto_dtype(device.type, stored.dtype if stored.scheme is None else torch.bfloat16)
    if dtype not in DTYPES:
        raise BadOption(f"dtype={shown(dtype)} is not possible: it must be one of {['auto', *DTYPES]}")
    return DTYPES[dtype]
