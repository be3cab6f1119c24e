"""Folders as `save_pretrained` writes them: config.json, the tokenizer's files, and weights in safetensors.

safetensors maps a file into memory: what is read stays resident as long as its mapping does. Every block has a mapping
of its own, which is gone when the next one is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import NotFound, UnsupportedModel, shown
from forerun.models import refusals
from forerun.models.refusals import CONFIG, INDEX, SINGLE
from forerun.models.source import BLOCK_BYTES, Stored
from forerun.text.json_files import read_json

# As safetensors names them; whatever else a file may hold means quantised weights.
READABLE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def recognises(path: Path) -> bool:
    """Every folder with a config.json: what is wrong with its weights is said by `check`."""
    return (path / CONFIG).exists()


class SafetensorsFolder:
    """A folder of model.safetensors, or of the shards that its index names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, read_json(folder / CONFIG)

    def check(self, with_tokenizer: bool) -> None:
        """See `Source.check`."""
        names, where = refusals.names_in(self.folder), str(self.folder)
        refusals.refuse_without_weights(names, where, lambda name: read_json(self.folder / name))
        refusals.refuse_quantiser_files(names, where, lambda name: read_json(self.folder / name))
        if with_tokenizer:
            refusals.refuse_without_tokenizer(names, where)

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """Name -> how it is stored, without the rotary buffers of old checkpoints, which follow from config.json.

        Raises NotFound for a missing file, UnsupportedModel for a broken one and for integer and 8-bit types.
        """
        found = (entry for path in self._files() for entry in _headers(path))
        return {name: stored for name, stored in found if not name.endswith("rotary_emb.inv_freq")}

    def blocks(self, name: str) -> Iterator[Tensor]:
        """See `Source.blocks`; they are views of the file."""
        stored = self.tensors[name]
        num_rows = stored.shape[0] if stored.shape else 0
        row_bytes = stored.dtype.itemsize * torch.Size(stored.shape[1:]).numel()
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        for first in range(0, num_rows, step):
            with safe_open(stored.file, framework="pt") as file:
                yield file.get_slice(name)[first : min(first + step, num_rows)]

    def _files(self) -> list[Path]:
        if (self.folder / SINGLE).exists():
            return [self.folder / SINGLE]
        names = shard_names(self.folder / INDEX)
        for name in names:
            if not (self.folder / name).is_file():
                raise NotFound(f"{INDEX} names {name}, which is not in {self.folder}: fetch the whole checkpoint")
        return [self.folder / name for name in names]


open_source = SafetensorsFolder


def shard_names(index: Path) -> list[str]:
    """The files that an index names.

    Raises NotFound for a name that is no plain file name: a path, `..`, nothing, or control characters.
    """
    places = read_json(index).get("weight_map")
    names = list(places.values()) if isinstance(places, Mapping) else []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", "..") or not name.isprintable():
            raise NotFound(f"{index} names {shown(name)}, which is no file beside it: fetch the whole checkpoint")
    if not names:
        raise UnsupportedModel(f"{index} names no file of weights: fetch it again")
    return sorted(set(names))


def _headers(path: Path) -> Iterator[tuple[str, Stored]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                entry = file.get_slice(name)
                if (dtype := entry.get_dtype()) not in READABLE:
                    raise refusals.quantised_tensor(name, path, dtype)
                yield name, Stored(path, tuple(entry.get_shape()), READABLE[dtype])
    except SafetensorError as error:
        raise UnsupportedModel(f"{path} is not a readable safetensors file ({error}): fetch it again") from error
