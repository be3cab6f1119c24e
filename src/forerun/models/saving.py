"""Writes standard checkpoint folders: config.json, generation_config.json, safetensors files, and tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forerun.blocks import Spec, difference, itemsize, weight_shapes
from forerun.errors import BadOption, UnsupportedModel
from forerun.host_tensor import HostTensor
from forerun.models import safetensors_file
from forerun.models.families import family, names_of
from forerun.models.loading import check_shapes
from forerun.models.naming import published
from forerun.models.opened import read_config

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
BEGINNING = ("pad_token_id", "decoder_start_token_id")  # ids of an encoder-decoder that its family writes
SHARD_BYTES = 4 << 30


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make a folder for the files that the `with` block writes.

    If the block raises, the files are removed, so that the same command can be run again. Raises BadOption for a folder
    that is not empty. An OSError of the block that names no file gets the folder's name.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadOption(f"the output folder {folder} exists and is not empty: name a new one")
    was_there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException as error:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not was_there:
            folder.rmdir()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(folder)
        raise


def save_checkpoint(
    folder: str | Path,
    spec: Spec,
    weights: Mapping[str, HostTensor],
    dtype: str = "bfloat16",
    *,
    end_ids: Collection[int] = (),
    bos_id: int | None = None,
    tokenizer_folder: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that `load_checkpoint`, transformers and other runtimes can read.

    weights: a tensor for every name in `blocks.weights(spec)`; each is converted to `dtype`. end_ids, bos_id: token ids
    for config.json and generation_config.json. tokenizer_folder: the folder from which TOKENIZER_FILES are copied; None
    = copy no files. shard_bytes: the largest size of a file with weights, in bytes; larger weights are split into
    several files with an index. Raises UnsupportedModel for weights that do not fit the spec.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    check_shapes({name: tuple(w.shape) for name, w in weights.items()}, weight_shapes(spec), str(folder))
    eos = sorted(end_ids)
    ids = {"bos_token_id": bos_id, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}
    raw = config_to_dict(spec) | ids | {"torch_dtype": dtype}
    write_json(folder / "config.json", raw)
    begun = {key: raw[key] for key in BEGINNING if key in raw}
    write_json(folder / "generation_config.json", {k: v for k, v in (ids | begun).items() if v is not None})
    names = names_of(spec)
    stored = weights if names is None else published(names, spec, weights)
    write_weights(folder, stored, dtype, shard_bytes)
    for name in TOKENIZER_FILES if tokenizer_folder is not None else ():
        source = Path(tokenizer_folder or folder) / name
        if source.exists() and source.resolve() != (folder / name).resolve():
            shutil.copyfile(source, folder / name)


def config_to_dict(spec: Spec) -> dict[str, Any]:
    """Return the config.json of a model, from which `read_config` reads the same spec again.

    Raises UnsupportedModel for a spec that the family's config.json cannot describe completely.
    """
    raw = dict(family(spec.model_type).write(spec))
    if (other := difference(read_config(raw), spec)) is not None:
        raise UnsupportedModel(f"a {spec.model_type} checkpoint cannot say {other}: use another model_type")
    return raw


def write_weights(folder: Path, weights: Mapping[str, HostTensor], dtype: str | None, shard_bytes: int) -> None:
    """Write tensors as safetensors files, in place of such files in the folder.

    If the tensors take more than `shard_bytes` bytes, they are split into several files with an index. dtype: the dtype
    in which tensors are written; None = each tensor keeps its dtype.
    """
    shards = list(_shards(weights, dtype, shard_bytes))
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = files if len(shards) > 1 else ["model.safetensors"]
    for old in (*folder.glob("model*.safetensors"), *folder.glob("model.safetensors.index.json")):
        old.unlink()  # a shard left over from an earlier write would be read, or shadow the new ones
    for file, names in zip(files, shards, strict=True):
        tensors = {name: weights[name].to(dtype or weights[name].dtype) for name in names}
        safetensors_file.write(folder / file, tensors, metadata={"format": "pt"})
    if len(files) > 1:
        total = sum(_num_bytes(weight, dtype) for weight in weights.values())
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _num_bytes(weight: HostTensor, dtype: str | None) -> int:
    return weight.values.size * itemsize(dtype or weight.dtype)


def _shards(weights: Mapping[str, HostTensor], dtype: str | None, shard_bytes: int) -> Iterator[list[str]]:
    """Yield the tensor names of each shard. A new shard begins where the next tensor would exceed shard_bytes."""
    names: list[str] = []
    filled = 0
    for name, weight in weights.items():
        num_bytes = _num_bytes(weight, dtype)
        if names and filled + num_bytes > shard_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += num_bytes
    yield names


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file with one JSON object, formatted like config.json in published checkpoints."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
