"""The weights of a checkpoint folder, read in blocks of rows.

safetensors maps a file into memory: what is read stays resident as long as its mapping does. Every block has a mapping
of its own, which is gone when the next one is read; beyond the tensors that it fills, loading takes one or two blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import NotFound, UnsupportedModel
from forerun.models.refusals import INDEX, SINGLE, quantised_tensor
from forerun.text.json_files import shard_names

# As safetensors names them; whatever else a file may hold means quantised weights.
READABLE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK_BYTES = 32 << 20  # of the file; large enough that opening it once per block costs nothing


@dataclass(frozen=True)
class Stored:
    """Where and how a tensor is stored."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class StoredWeights:
    """The tensors of a folder by name, without the rotary buffers of old checkpoints, which follow from config.json.

    Only headers are read here. Raises NotFound for a missing file, UnsupportedModel for a broken one and for integer
    and 8-bit types.
    """

    def __init__(self, folder: Path) -> None:
        self.stored: dict[str, Stored] = {}
        for path in weight_files(folder):
            self.stored.update((n, s) for n, s in _headers(path) if not n.endswith("rotary_emb.inv_freq"))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self.stored.items()}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Read each of these into the tensor given for it, converted to its type and device."""
        for name, tensor in tensors.items():
            first = 0
            for block in self.blocks(name):
                tensor[first : first + len(block)].copy_(block)
                first += len(block)

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are equal, type included."""
        a, b = self.stored[name], self.stored[other]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return all(torch.equal(x, y) for x, y in zip(self.blocks(name), self.blocks(other), strict=True))

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The rows of a tensor in order, as views of the file: each is to be let go before the next is asked for."""
        stored = self.stored[name]
        num_rows = stored.shape[0] if stored.shape else 0
        row_bytes = stored.dtype.itemsize * torch.Size(stored.shape[1:]).numel()
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        for first in range(0, num_rows, step):
            with safe_open(stored.file, framework="pt") as file:
                yield file.get_slice(name)[first : min(first + step, num_rows)]


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, else the shards that model.safetensors.index.json names. Raises NotFound for a missing one."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    names = shard_names(folder / INDEX)
    for name in names:
        if not (folder / name).exists():
            raise NotFound(f"{INDEX} names {name}, which is not in {folder}: fetch the whole checkpoint")
    return [folder / name for name in names]


def _headers(path: Path) -> Iterator[tuple[str, Stored]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                entry = file.get_slice(name)
                if (dtype := entry.get_dtype()) not in READABLE:
                    raise quantised_tensor(name, path, dtype)
                yield name, Stored(path, tuple(entry.get_shape()), READABLE[dtype])
    except SafetensorError as error:
        raise UnsupportedModel(f"{path} is not a readable safetensors file ({error}): fetch it again") from error
