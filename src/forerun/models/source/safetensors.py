"""Reads folders in the format of `save_pretrained`: config.json, the tokenizer's files, and weights in safetensors.

safetensors_file.py reads headers and tensors. A quantised matrix consists of several tensors, see packings.py. Two
kinds of quantised matrices are dequantised: matrices in which the inputs of one group are not adjacent, and matrices of
8-bit floats if the operators do not compute with 8-bit floats.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun.errors import NotFound, UnsupportedModel
from forerun.host_tensor import HostTensor
from forerun.models import refusals
from forerun.models.open_file import OpenFile
from forerun.models.packings import FLOAT8, SCALE_DTYPES, Floats, Layout, floats, in_order, layout_of, widened
from forerun.models.refusals import CONFIG, INDEX, SINGLE, shard_names
from forerun.models.safetensors_file import TYPES, Entry, read_header
from forerun.models.source import BLOCK_BYTES, STACKED, STACKED_SIZES, Stored
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme
from forerun.text.json_files import read_json

OF_IDS = ".token_ordering"  # an order of ids, which is no weight
# Types by their names in safetensors; any other type means quantised weights.
READABLE = {word: TYPES[word] for word in ("F64", "F32", "F16", "BF16")}
BASE_PREFIX, BASE_EMBEDDING = "model.", "embed_tokens.weight"
BLOCK_WEIGHTS = 1 << 20  # weights of a quantised matrix that are unpacked at a time, at some 8 bytes each
COPIES = 8  # copies of a block in memory at most: the last one and this one, of two tensors, converted
ALL = slice(None)


def recognises(path: Path) -> bool:
    """Whether a path is a folder with a config.json. Weights are not looked at; see `SafetensorsFolder.check`."""
    return os.path.lexists(path / CONFIG)


class SafetensorsFolder:
    """A source of a folder with model.safetensors, or with an index and the shards that the index names."""

    names = None

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, read_json(folder / CONFIG)
        self._open = list[OpenFile]()

    def close(self) -> None:
        """Close the files with weights."""
        for file in self._open:
            file.close()

    def check(self, with_tokenizer: bool) -> None:
        """Raise UserError if the names of the folder's files show a fault, see `Source.check`."""
        names = refusals.names_in(self.folder)
        where = str(self.folder)
        refusals.refuse_without_weights(names, where, lambda name: read_json(self.folder / name))
        refusals.refuse_quantiser_files(names, where, lambda name: read_json(self.folder / name))
        if with_tokenizer:
            refusals.refuse_slow_tokenizer(names, where)

    @cached_property
    def _entries(self) -> Mapping[str, Entry]:
        """The tensors of the files, by name, without the rotary buffers of old checkpoints.

        The buffers follow from config.json. Files that AutoModel saved have no LM head, and their tensor names lack the
        prefix "model.". This property adds the prefix.
        """
        self._open = [OpenFile(path) for path in self._files()]
        entries = {name: entry for file in self._open for name, entry in read_header(file).items()}
        prefix = BASE_PREFIX if BASE_EMBEDDING in entries else ""
        return {
            name if name.startswith("lm_head.") else prefix + name: entry
            for whole, of_all in entries.items()
            if not whole.endswith("rotary_emb.inv_freq")
            for name, entry in _each_expert(whole, of_all)
        }

    @cached_property
    def matrices(self) -> Mapping[str, Parts]:
        """The quantised matrices with integer codes, by the names of unquantised weights. Raises as `tensors`."""
        layout = layout_of(self.config)
        if not isinstance(layout, Layout):
            return {}
        matrices = {}
        for name, entry in self._entries.items():
            if (matrix := layout.matrix_of(name, entry.dtype)) is not None:
                matrices[matrix[0]] = self._parts(layout, *matrix)
        return matrices

    def _parts(self, layout: Layout, name: str, names: Mapping[str, str]) -> Parts:
        entries = {part: self._entries[name] for part, name in names.items() if name in self._entries}
        shapes = {part: entry.shape for part, entry in entries.items()}
        if "weight_shape" in entries:
            shapes["weight_shape"] = tuple(self._entries[names["weight_shape"]].whole().values[:2].tolist())
        scales = "scales" if "scales" in layout.parts else "weight_scale"
        try:
            shape, scheme = layout.scheme_of(shapes, entries[scales].dtype)
            indices = [part for part in ("g_idx", "weight_g_idx") if part in entries]
            groups = self._groups(names[indices[0]], shape[1], scheme.group) if indices else None
        except (ValueError, KeyError, IndexError) as error:
            missing = f"beside {', '.join(sorted(shapes))} a part is missing, or has another shape"
            why = str(error) if type(error) is ValueError else missing
            raise self._not_read(layout.method, name.removesuffix(".weight"), why) from error
        return Parts(layout, scheme, shape, names, shapes, groups)

    def _not_read(self, method: str, prefix: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.folder} has a {method} matrix {prefix} that is not read ({why}): fetch it again, or name another "
            "checkpoint"
        )

    def _groups(self, name: str, num_in: int, group: int) -> npt.NDArray[np.int64] | None:
        """Return the group of each input, from the tensor `name`; None if the inputs of each group are adjacent.

        group: the group size. Raises ValueError for a group that does not exist.
        """
        groups = self._entries[name].whole().values.astype(np.int64)
        usual = np.arange(num_in) // group
        if name.endswith("weight_g_idx") and bool((groups == -1).any()):  # as where no order was found
            return None
        if groups.shape != usual.shape or int(groups.min()) < 0 or int(groups.max()) > int(usual[-1]):
            raise ValueError(f"its {name.rpartition('.')[2]} names groups that are not there")
        return None if np.array_equal(groups, usual) else groups

    @cached_property
    def _floats(self) -> Mapping[str, FloatParts]:
        """The matrices of 8-bit floats, by name. Raises as `tensors`."""
        layout = layout_of(self.config)
        if not isinstance(layout, Floats):
            return {}
        matrices = {}
        for name, entry in self._entries.items():
            prefix, _, part = name.rpartition(".")
            if part != "weight" or entry.dtype != FLOAT8:
                continue
            names = {ending: f"{prefix}.{ending}" for ending in (*layout.scales, *layout.others)}
            there = {ending: tensor for ending, tensor in names.items() if tensor in self._entries}
            scales = [tensor for ending, tensor in there.items() if ending in layout.scales]
            try:
                if len(scales) != 1 or len(entry.shape) != 2:
                    raise ValueError("it has no scales, or is no matrix")
                stored = self._entries[scales[0]]
                if stored.dtype not in SCALE_DTYPES:
                    raise ValueError(f"its scales have type {stored.dtype}")
                shape = entry.shape[0], entry.shape[1]
                spans = layout.spans(shape, stored.shape)
                scheme = layout.scheme(shape[1], spans[1], stored.dtype)
            except ValueError as error:
                raise self._not_read(layout.method, prefix, str(error)) from error
            matrices[name] = FloatParts(shape, scales[0], spans, frozenset({name, *there.values()}), scheme)
        return matrices

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """The stored form of each tensor and of each quantised matrix, by name.

        Raises NotFound for a missing file. Raises UnsupportedModel for a broken file, for integers and 8-bit types in
        an unquantised checkpoint, and for quantised matrices that cannot be read.
        """
        taken = {name for parts in self.matrices.values() for name in parts.names.values()}
        taken |= {name for matrix in self._floats.values() for name in matrix.names}
        tensors = {}
        for name, entry in self._entries.items():
            if name in taken:
                continue
            if name.endswith(OF_IDS) and entry.dtype == "I64":
                tensors[name] = Stored(entry.file.path, entry.shape, TYPES["I64"])
                continue
            if entry.dtype not in READABLE:
                raise refusals.quantised_tensor(name, entry.file.path, entry.dtype)
            tensors[name] = Stored(entry.file.path, entry.shape, READABLE[entry.dtype])
        for name, parts in self.matrices.items():
            file = self._entries[parts.names[parts.layout.codes]].file.path
            tensors[name] = Stored(file, parts.shape, "float32", parts.scheme)
            if parts.groups is not None:
                was = f"{parts.scheme.bits}-bit integers with inputs in another order (g_idx)"
                tensors[name] = replace(tensors[name], scheme=None, was=was)
        for name, matrix in self._floats.items():
            file = self._entries[name].file.path
            tensors[name] = Stored(file, matrix.shape, "float32", was="8-bit floats", floats=matrix.scheme)
        return tensors

    def blocks(self, name: str) -> Iterator[HostTensor]:
        """Yield the rows of a tensor. See `Source.blocks`. Quantised rows are dequantised to float32."""
        if name in self.matrices:
            groups = self.matrices[name].groups
            for rows in self._quantised_rows(name):
                yield HostTensor.of(rows.dequantise() if groups is None else in_order(rows, groups))
            return
        if name in self._floats:
            yield from self._widened(name)
            return
        entry = self._entries[name]
        num_rows = entry.shape[0] if entry.shape else 0
        step = max(1, BLOCK_BYTES // COPIES // max(1, entry.num_bytes // max(1, num_rows)))
        for first in range(0, num_rows, step):
            yield entry.rows(first, min(first + step, num_rows))

    def _widened(self, name: str) -> Iterator[HostTensor]:
        spans = self._floats[name].spans
        for numbers, scales, first in self._float_rows(name):
            yield HostTensor.of(widened(numbers, scales, first, spans))

    def _float_rows(self, name: str) -> Iterator[tuple[HostTensor, HostTensor, int]]:
        """Yield (block, scales, first) for each block of rows of a matrix of 8-bit floats.

        scales: all scales of the matrix. first: the index of the block's first row.
        """
        matrix = self._floats[name]
        scales = self._entries[matrix.scales].whole()
        if not scales.is_finite():
            raise UnsupportedModel(f"{name} in {self.folder} has scales that are no finite numbers: fetch it again")
        scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
        step = max(1, BLOCK_WEIGHTS // matrix.shape[1])
        for first in range(0, matrix.shape[0], step):
            yield self._entries[name].rows(first, min(first + step, matrix.shape[0])), scales, first

    def quantised(self, name: str) -> QuantisedMatrix:
        """Return a quantised matrix as it is stored."""
        if name in self._floats:
            matrix = self._floats[name]
            assert matrix.scheme is not None
            scheme, spans = matrix.scheme, matrix.spans
            return QuantisedMatrix(
                scheme, matrix.shape, lambda: (floats(*rows, spans, scheme) for rows in self._float_rows(name))
            )
        parts = self.matrices[name]
        return QuantisedMatrix(parts.scheme, parts.shape, partial(self._quantised_rows, name))

    def _quantised_rows(self, name: str) -> Iterator[QuantisedRows]:
        parts = self.matrices[name]
        num_out, num_in = parts.shape
        step = max(1, BLOCK_WEIGHTS // num_in // 32) * 32
        whole = dict[str, HostTensor]()  # parts without a row for each output: read once, as a whole

        def read(part: str, rows: slice, columns: slice) -> HostTensor:
            entry = self._entries[parts.names[part]]
            if rows != ALL:
                first, end, _ = rows.indices(entry.shape[0])
                return entry.rows(first, end)[:, columns]
            if part not in whole:
                whole[part] = entry.whole()
            return whole[part][:, columns].copy()

        for first in range(0, num_out, step):
            chosen = range(first, min(first + step, num_out))
            rows = parts.layout.rows(parts.scheme, parts.shapes, num_in, chosen, read)
            if not rows.scales.is_finite():
                raise UnsupportedModel(f"{name} in {self.folder} has scales that are no finite numbers: fetch it again")
            yield rows

    def _files(self) -> list[Path]:
        if os.path.lexists(self.folder / SINGLE):
            return [self.folder / SINGLE]
        names = shard_names(self.folder / INDEX)
        for name in names:
            if not os.path.lexists(self.folder / name) or (self.folder / name).is_dir():
                raise NotFound(f"{INDEX} names {name}, which is not in {self.folder}: fetch the whole checkpoint")
        return [self.folder / name for name in names]


open_source = SafetensorsFolder


@dataclass(frozen=True, eq=False)
class Parts:
    """A quantised matrix with integer codes. names: the names of its tensors in the files, by part (see Layout).

    shapes: the shape of each tensor, by part; for the part weight_shape, the two numbers that the tensor holds. groups:
    int64, the group of each input; None = the inputs of each group are adjacent, in the order of the groups.
    """

    layout: Layout
    scheme: Scheme
    shape: tuple[int, int]
    names: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    groups: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class FloatParts:
    """A matrix of 8-bit floats. scales: the name of the tensor with its scales.

    spans: the number of rows and the number of columns that share a scale. names: the names of all tensors of the
    matrix. scheme: see `Floats.scheme`.
    """

    shape: tuple[int, int]
    scales: str
    spans: tuple[int, int]
    names: frozenset[str]
    scheme: Scheme | None


def _each_expert(name: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
    """Yield (name, entry) of a tensor. For a stack of all experts, yield one tensor per expert: NAME.0, NAME.1 ..."""
    stacked = STACKED.fullmatch(name)
    if stacked is None or len(entry.shape) != STACKED_SIZES[stacked[2]]:
        yield name, entry
        return
    each = entry.num_bytes // max(1, entry.shape[0])
    for i in range(entry.shape[0]):
        yield f"{name}.{i}", replace(entry, shape=entry.shape[1:], start=entry.start + i * each, num_bytes=each)
