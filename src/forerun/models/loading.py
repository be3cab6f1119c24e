"""A checkpoint folder -> a model: config.json, safetensors (one file or shards), end-of-sequence ids.

Whatever would be computed wrongly is refused by name; see configs.py for the policy on config.json.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import BadOption, NotFound, UnsupportedModel
from forerun.models.layers import Decoder, DecoderConfig, join_projections, parameter_shapes
from forerun.ops.reference import ReferenceOps

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FOREIGN_WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".safetensors")  # by suffix
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded folder. config: config.json as it is. end_ids: ids that end the output, see `end_ids_of`."""

    name: str
    folder: Path
    model: Decoder
    config: Mapping[str, Any]
    end_ids: frozenset[int]
    tokenizer_path: Path


class Architecture(Protocol):
    """What a file of this folder must define to be an architecture."""

    def read_config(self, raw: Mapping[str, Any]) -> DecoderConfig: ...
    def Model(self, config: DecoderConfig, weights: Mapping[str, Tensor], ops: ReferenceOps) -> Decoder: ...  # noqa: N802


def load_checkpoint(
    folder: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    ops: ReferenceOps | None = None,
) -> Checkpoint:
    """Read a folder as `save_pretrained` writes it.

    dtype: "float32", "bfloat16", a torch.dtype, or "auto" = float32 on a CPU and the checkpoint's own elsewhere.
    Raises NotFound for what is not there, UnsupportedModel for what would be computed wrongly.
    """
    folder, device = Path(folder), torch.device(device)
    raw = read_raw_config(folder)
    config = read_config(raw)
    tensors = _Tensors(folder)
    tied = _check_tie(tensors, config, str(folder))
    check_shapes({k: v for k, v in tensors.shapes.items() if k not in tied}, parameter_shapes(config), str(folder))
    target = _dtype(dtype, device, tensors)
    weights = {name: tensors.read(name).to(device, target) for name in parameter_shapes(config)}
    module = architecture(config.model_type)
    return Checkpoint(
        name=folder.resolve().name,
        folder=folder,
        model=module.Model(config, join_projections(config, weights), ops or ReferenceOps()),
        config=raw,
        end_ids=end_ids_of(folder, raw),
        tokenizer_path=folder / "tokenizer.json",
    )


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


def read_raw_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises NotFound or UnsupportedModel, saying what would work."""
    wanted = "name a folder that holds config.json, model.safetensors and tokenizer.json"
    if folder.suffix in FOREIGN_WEIGHTS and folder.is_file():
        raise UnsupportedModel(f"{folder} is a single file and forerun reads checkpoint folders: {wanted}")
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}: {wanted}")
    if not (folder / "config.json").exists():
        raise NotFound(f"there is no config.json in {folder}: {wanted}")
    return _read_json(folder / "config.json")


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """config.json, read by the architecture it names."""
    return architecture(raw.get("model_type")).read_config(raw)


def end_ids_of(folder: Path, raw: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end the output: the union of generation_config.json, config.json and tokenizer_config.json."""
    generation = _read_json_if_there(folder / "generation_config.json")
    named = _read_json_if_there(folder / "tokenizer_config.json")
    ids: set[int] = set()
    for source in (generation, raw):
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    token = named.get("eos_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    return frozenset(int(i) for i in ids) | _ids_of_token(folder, named, text)


def _ids_of_token(folder: Path, named: Mapping[str, Any], text: str | None) -> frozenset[int]:
    """The id of a token, by tokenizer_config.json or tokenizer.json; none where no id has that text: it never comes."""
    if text is None:
        return frozenset()
    for token_id, entry in named.get("added_tokens_decoder", {}).items():
        if entry.get("content") == text:
            return frozenset([int(token_id)])
    tokenizer = _read_json_if_there(folder / "tokenizer.json")
    for entry in tokenizer.get("added_tokens") or []:
        if entry["content"] == text:
            return frozenset([int(entry["id"])])
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    return frozenset([int(vocab[text])]) if isinstance(vocab, Mapping) and text in vocab else frozenset()


# ------------------------------------------------------------------------------------------------------------ weights


class _Tensors:
    """The tensors of a folder by name, read one at a time so that nothing is held twice.

    shapes: name -> shape, without the rotary buffers that old checkpoints carry; they follow from config.json.
    """

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _weight_files(folder):
            for name, shape in _names_and_shapes(path):
                if not name.endswith("rotary_emb.inv_freq"):
                    self.files[name], self.shapes[name] = path, shape

    def read(self, name: str) -> Tensor:
        """One tensor. Raises UnsupportedModel for integer and 8-bit types: they mean a quantised checkpoint."""
        with safe_open(self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        if tensor.dtype not in READABLE:
            raise UnsupportedModel(
                f"{name} in {self.files[name]} has type {tensor.dtype}, which looks quantised: "
                "use a float32, bfloat16 or float16 checkpoint"
            )
        return tensor


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors, else the shards that model.safetensors.index.json names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        others = sorted(f.name for f in folder.iterdir() if f.suffix in FOREIGN_WEIGHTS)
        if others:
            raise UnsupportedModel(
                f"{folder} has weights in {', '.join(others[:3])} only, and forerun reads model.safetensors: convert "
                "it with transformers, from_pretrained and then save_pretrained"
            )
        raise NotFound(f"there is neither model.safetensors nor model.safetensors.index.json in {folder}")
    names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    for name in names:
        if Path(name).name != name or not (folder / name).exists():
            raise NotFound(f"{index} names {name}, which is not in {folder}: fetch the whole checkpoint")
    return [folder / name for name in names]


def _names_and_shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                yield name, tuple(file.get_slice(name).get_shape())
    except SafetensorError as error:
        raise UnsupportedModel(f"{path} is not a readable safetensors file ({error}): fetch it again") from error


def _check_tie(tensors: _Tensors, config: DecoderConfig, where: str) -> set[str]:
    """Names to skip: an LM head stored beside the embedding it is tied to. Raises where the two differ."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not config.tie_embeddings or head not in tensors.files or embedding not in tensors.files:
        return set()
    if not torch.equal(tensors.read(head), tensors.read(embedding)):
        # transformers 4 used the embedding here, transformers 5 uses the head: the file means two models.
        raise UnsupportedModel(
            f"{where} sets tie_word_embeddings=True and holds a different {head}: set it to False, or drop that tensor"
        )
    return {head}


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
    return ": set tie_word_embeddings to true if the embedding is meant" if name == "lm_head.weight" else ""


def _dtype(dtype: str | torch.dtype, device: torch.device, tensors: _Tensors) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else tensors.read("model.embed_tokens.weight").dtype
    if dtype not in DTYPES:
        raise BadOption(f"dtype={dtype!r} is not possible: it must be one of {['auto', *DTYPES]}")
    return DTYPES[dtype]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object: fetch it again")
    return value


def _read_json_if_there(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.exists() else {}
