"""Weights of 4 and 8 bits, laid out for the CUDA product kernel, and the placing of a model's weights on the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, cast, overload

import numpy as np
import torch
from torch import Tensor

from forerun import blocks
from forerun.blocks import Spec, Weight
from forerun.host_tensor import Array, HostTensor
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme
from forerun.ops.torch import empty_weights
from forerun.ops.torch_parts import Projections
from forerun.ops.torch_tensors import tensor_of

TILE = 64  # outputs of a tile: what the matrix instructions of four warps take
STEP = 128  # inputs of a step of the kernel; rows of codes are filled up with zeros
LEAST_GROUP = 16  # weights of a group: what the matrix instructions take at least
OF_GROUPS = ("scales", "zeros", "minimums", "supers", "super_minimums")  # tensors with a value for each group


def packs(scheme: Scheme) -> bool:
    """Tell whether matrices of this scheme can be packed."""
    return scheme.bits in (2, 3, 4, 5, 6, 8) and _span(scheme.group) >= LEAST_GROUP


def _span(group: int) -> int:
    """Return how many inputs share a scale in memory: a multiple of STEP, or a power of two that divides STEP."""
    return group if group % STEP == 0 else group & -group


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix [O, I] of 4 or 8 bits: weight = scale * (code - zero) - minimum, by group.

    kind: "int4" (codes 0 to 15), "int8" (signed bytes, without zeros) or "fp8" (floats of 8 bits, e4m3, without zeros).
    group: the number of inputs that share a scale. scales, zeros, minimums: [tiles, groups, 64]. zeros are uint8; None
    = every 4-bit code has the zero point `zero`. minimums: None = 0. super_group: the number of inputs whose scales
    share one more factor; 0 = there are no such factors. supers [tiles, super groups, 64]: these factors of scales.
    super_minimums: the same factors of minimums; None = minimums have no factors.

    codes: int32 [tiles, units, 4, 8, 4, 4], the words in the order in which threads multiply them. A tile is 64
    outputs. A unit is 64 inputs of 4 bits, or 32 of 8 bits, and belongs to 4 warps of 8 by 4 threads, with 4 words for
    each thread. The code of output 16 w + 8 h + g and input 16 n + 8 j + 2 t + e lies with warp w and thread (g, t). A
    code of 4 bits is nibble 4 e + 2 h + j of the thread's word n. A code of 8 bits is byte 2 e + j of the thread's word
    2 n + h. The 64 scales, zeros or minimums of a group lie in the order w, g, h.
    """

    kind: str
    num_out: int
    num_in: int
    group: int
    codes: Tensor
    scales: Tensor
    zero: int = 0
    zeros: Tensor | None = None
    minimums: Tensor | None = None
    super_group: int = 0
    supers: Tensor | None = None
    super_minimums: Tensor | None = None
    ndim = 2

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return 4 if self.kind == "int4" else 8

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        return self.num_out, self.num_in

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.codes.device

    dtype = torch.bfloat16  # of the rows that it is multiplied by
    itemsize = 1

    @property
    def nbytes(self) -> int:
        """The bytes in memory."""
        return sum(part.nbytes for part in self._tensors().values())

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {name: getattr(self, name) for name in ("codes", *OF_GROUPS)}
        return {name: part for name, part in tensors.items() if part is not None}

    @property
    def for_kernels(self) -> list[Tensor]:
        """The codes, then the tensors of OF_GROUPS in order. The codes take the place of each missing tensor."""
        tensors = self._tensors()
        return [tensors.get(name, self.codes) for name in ("codes", *OF_GROUPS)]

    def __len__(self) -> int:
        return self.num_out

    @overload
    def __getitem__(self, rows: slice) -> Packed: ...
    @overload
    def __getitem__(self, rows: list[int]) -> Tensor: ...
    def __getitem__(self, rows: slice | list[int]) -> Packed | Tensor:
        """Return the chosen outputs, which are the rows of the matrix.

        A slice stays packed, and is not copied if it begins where a tile begins. For a list of outputs, dequantised
        rows are returned; see `rows`.
        """
        if not isinstance(rows, slice):
            return self.rows(torch.tensor(rows, dtype=torch.int64, device=self.device))
        first, stop, _ = rows.indices(self.num_out)
        num = max(stop - first, 0)
        if first % TILE and num:
            ids = torch.arange(first, first + num, device=self.device)
            return self._tiled({name: self._taken(name, ids) for name in self._tensors()})
        tiles = slice(first // TILE, -(-(first + num) // TILE))
        parts: dict[str, Any] = {name: part[tiles] for name, part in self._tensors().items()}
        return replace(self, num_out=num, **parts)

    def _taken(self, name: str, ids: Tensor) -> Tensor:
        """Return the outputs `ids` of the tensor `name`: uint8 codes [n, I], or one number per group [n, groups]."""
        part: Tensor = getattr(self, name)
        tile, place = ids // TILE, ids % TILE
        warp, half, thread = place // 16, place // 8 % 2, place % 8
        if name != "codes":
            return part[tile, :, warp * 16 + thread * 2 + half]
        words = part[tile, :, warp, thread]  # [n, units, 4 threads, 4 words]
        if self.kind == "int4":
            shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=part.device)
            codes = (words.unsqueeze(-1) >> shifts & 15).to(torch.uint8)
            codes = torch.unflatten(codes, -1, (2, 2, 2))  # e, h, j
            codes = torch.where(half.view(-1, *[1] * 5).bool(), codes[..., 1, :], codes[..., 0, :])
            codes = codes.permute(0, 1, 3, 5, 2, 4)
        else:
            codes = torch.unflatten(words.contiguous().view(torch.uint8), -1, (2, 2, 2, 2))  # n, h, e, j
            codes = torch.where(half.view(-1, *[1] * 5).bool(), codes[:, :, :, :, 1], codes[:, :, :, :, 0])
            codes = codes.permute(0, 1, 3, 5, 2, 4)
        return codes.flatten(1)[:, : self.num_in]

    def _tiled(self, parts: Mapping[str, Tensor]) -> Packed:
        """Lay out the tensors of another matrix in the form of this matrix.

        parts: the other matrix's tensors in the order of outputs, as `_taken` returns them.
        """
        num_out, num_in = parts["codes"].shape
        codes = _filled(parts["codes"], -(-num_in // STEP) * STEP)
        if self.kind == "int4":  # w, h, g, n (units of 4), j, t, e
            tiled = codes.view(-1, 4, 2, 8, codes.shape[1] // 64, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 5, 8, 2, 6)
            pairs = tiled.reshape(-1, 2)
            tiled = (pairs[:, 0] | pairs[:, 1] << 4).view(len(codes) // TILE, -1, 4, 8, 4, 16)
        else:
            tiled = codes.view(-1, 4, 2, 8, codes.shape[1] // 32, 2, 2, 4, 2).permute(0, 4, 1, 3, 7, 5, 2, 8, 6)
            tiled = tiled.reshape(len(codes) // TILE, -1, 4, 8, 4, 16)
        laid: dict[str, Any] = {"codes": tiled.contiguous().view(torch.int32)}
        for name, part in parts.items():
            if name != "codes":
                span = self.group if not name.startswith("super") else self.super_group
                numbers = _filled(part, -(-codes.shape[1] // span))
                numbers = numbers.view(-1, 4, 2, 8, numbers.shape[1]).permute(0, 4, 1, 3, 2)
                laid[name] = numbers.reshape(len(numbers), -1, TILE)
        return replace(self, num_out=num_out, num_in=num_in, **laid)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the outputs with these indices, dequantised, float32 [n, I]."""
        taken = {name: self._taken(name, ids.long()) for name in self._tensors()}
        groups = -(-self.num_in // self.group)
        numbers = {name: part[:, :groups].float() for name, part in taken.items() if name != "codes"}
        for name, factors in (("scales", "supers"), ("minimums", "super_minimums")):
            if factors in taken:
                repeated = taken[factors].float().repeat_interleave(self.super_group // self.group, 1)
                numbers[name] = numbers[name] * repeated[:, :groups]
        codes = taken["codes"]
        if self.kind == "fp8":
            values = codes.view(torch.float8_e4m3fn).float()
        else:
            values = (codes if self.kind == "int4" else codes.view(torch.int8)).float()
        values = torch.unflatten(_filled(values, groups * self.group, len(values)), -1, (-1, self.group))
        if self.kind == "int4":
            values = values - (numbers["zeros"].unsqueeze(-1) if self.zeros is not None else self.zero)
        values = values * numbers["scales"].unsqueeze(-1)
        if self.minimums is not None:
            values = values - numbers["minimums"].unsqueeze(-1)
        whole: Tensor = values.flatten(1)[:, : self.num_in]
        return whole

    def float(self) -> Tensor:
        """Return the whole matrix dequantised in float32: the weights that products use."""
        ids = torch.arange(self.num_out, device=self.device)
        return torch.cat([self.rows(part) for part in torch.split(ids, 4096)])

    @classmethod
    def of(cls, matrix: QuantisedMatrix, device: torch.device) -> Packed:
        """Read a quantised matrix and lay it out on the device, whole tiles at a time."""
        tiles, left = list[Packed](), dict[str, Tensor]()
        unlaid: Packed | None = None
        for rows in matrix.blocks():
            unlaid, parts = cls._of_rows(rows, device)
            left = {name: torch.cat((left[name], part)) if left else part for name, part in parts.items()}
            if whole := len(left["codes"]) // TILE * TILE:
                tiles.append(unlaid._tiled({name: part[:whole] for name, part in left.items()}))
                left = {name: part[whole:].clone() for name, part in left.items()}
        assert unlaid is not None
        if len(left["codes"]):
            tiles.append(unlaid._tiled(left))
        return cls.joined(tiles)

    @classmethod
    def joined(cls, parts: Seq[Packed]) -> Packed:
        """Join matrices of one scheme along their outputs."""
        first = parts[0]
        if len(parts) == 1:
            return first
        if all(part.num_out % TILE == 0 for part in parts[:-1]):
            whole = {name: torch.cat([getattr(part, name) for part in parts]) for name in first._tensors()}
            return replace(first, num_out=sum(map(len, parts)), **cast(Any, whole))
        ids = [torch.arange(len(part), device=part.device) for part in parts]
        return first._tiled(
            {
                name: torch.cat([part._taken(name, ids_of_part) for part, ids_of_part in zip(parts, ids, strict=True)])
                for name in first._tensors()
            }
        )

    @classmethod
    def _of_rows(cls, rows: QuantisedRows, device: torch.device) -> tuple[Packed, dict[str, Tensor]]:
        """Return a matrix in the form of these rows, not laid out yet, and its tensors in the order of outputs."""
        rows = rows.looked_up()
        scheme, num_in = rows.scheme, rows.codes.shape[1]
        kind = "fp8" if scheme.floats else "int4" if scheme.bits <= 4 else "int8"
        super_group = scheme.super_group if scheme.super_group % STEP == 0 else 0
        numbers: dict[str, HostTensor | Array | None] = {"scales": rows.scales, "minimums": rows.minimums}
        if super_group:
            numbers |= {"supers": rows.super_scales, "super_minimums": rows.super_minimums}
        elif scheme.super_group:
            numbers["scales"], least = rows.numbers(scheme.group, num_in // scheme.group, "minimum")
            numbers["minimums"] = None if rows.minimums is None else least
        codes, zero = tensor_of(rows.codes), 0
        if scheme.zero is not None:
            codes, zero = (codes, scheme.zero) if kind == "int4" else (codes - scheme.zero, 0)  # fp8 has zero point 0
        elif kind == "int4":
            numbers["zeros"] = rows.zeros
        else:  # bytes have a sign and no zeros, and the product of a scale and a whole number of 8 bits is exact
            lift = 128 if scheme.bits == 8 else 0
            codes = codes - lift
            scales, least = rows.numbers(scheme.group, num_in // scheme.group, "minimum")
            if rows.zeros is not None:
                numbers["minimums"] = (rows.zeros.astype(np.float32) - np.float32(lift)) * scales
            elif lift:
                numbers["minimums"], numbers["super_minimums"] = least - np.float32(lift) * scales, None
        span = _span(scheme.group)
        tensors = {name: tensor_of(part, device) for name, part in numbers.items() if part is not None}
        if span != scheme.group:
            for name in [name for name in tensors if not name.startswith("super")]:
                tensors[name] = tensors[name].repeat_interleave(scheme.group // span, 1)
        codes = codes.to(device)
        unlaid = cls(kind, len(codes), num_in, span, codes, codes, zero, super_group=super_group)
        return unlaid, {"codes": codes, **tensors}


def _filled(part: Tensor, columns: int, rows: int | None = None) -> Tensor:
    """Pad a matrix with zeros to this number of columns and rows. rows: None = as many as fill whole tiles."""
    rows = -(-len(part) // TILE) * TILE if rows is None else rows
    return torch.nn.functional.pad(part, (0, columns - part.shape[1], 0, rows - len(part))).contiguous()


class CudaWeights(Mapping[str, Any]):
    """The weights of a model on the device. Matrices that share an input lie side by side.

    wholes: the joined packed matrix of each group that shares an input, by the names of the matrices in the group.
    """

    def __init__(self, spec: Spec, weights: Mapping[str, Tensor | QuantisedMatrix]) -> None:
        self.wholes: dict[tuple[str, ...], Packed] = {}
        known = blocks.weights(spec)
        groups = blocks.products(known)
        some = self._some(known, weights)
        tensors: dict[str, Tensor] = {}
        self._by_name: dict[str, Any] = {some[0]: some[1]}
        for group in groups.values():
            parts = [(w, weights[w.name]) for w in group]
            if not self._packed(parts, some[1].device):
                tensors |= {w.name: _dense(part, some[1]) for w, part in parts}
        rest = {w.name: weights[w.name] for w in known if w.name not in tensors and w.name not in self._by_name}
        tensors |= {name: part for name, part in rest.items() if isinstance(part, Tensor)}
        self._by_name |= _side_by_side(spec, [w for w in known if w.name in tensors], tensors)

    @staticmethod
    def _some(known: Seq[Weight], weights: Mapping[str, Tensor | QuantisedMatrix]) -> tuple[str, Tensor]:
        """Return one tensor with its name; the dtype and the device of the model are read from it."""
        for weight in known:
            if weight.role == "vector" and isinstance(tensor := weights[weight.name], Tensor):
                return weight.name, tensor
        tensor = weights[known[0].name]
        assert isinstance(tensor, Tensor)
        return known[0].name, tensor

    def _packed(self, parts: Seq[tuple[Weight, Tensor | QuantisedMatrix]], device: torch.device) -> bool:
        """Pack matrices that share an input, if they also share one scheme. Returns whether they were packed."""
        matrices = [part for _, part in parts if isinstance(part, QuantisedMatrix)]
        if len(matrices) < len(parts) or len({part.scheme for part in matrices}) > 1:
            return False
        whole = Packed.joined([Packed.of(part, device) for part in matrices])
        self.wholes[tuple(w.name for w, _ in parts)] = whole
        first = 0
        for weight, part in parts:
            self._by_name[weight.name] = whole[first : first + part.shape[0]]
            first += part.shape[0]
        return True

    def of_encoder(self, weights: Mapping[str, Any]) -> CudaWeights:
        """Return an encoder's weights as CudaWeights. weights: the encoder's weights by their names in its own spec."""
        encoder = CudaWeights.__new__(CudaWeights)
        names = {blocks.of_encoder(name): name for name in weights}
        encoder._by_name = dict(weights)
        encoder.wholes = {
            tuple(names[name] for name in group): whole
            for group, whole in self.wholes.items()
            if all(name in names and name.startswith("encoder.") for name in group)
        }
        return encoder

    def join(self, weights: Mapping[str, Any], names: list[str]) -> Projections:
        """Return one Projections of the matrices with these names, which share their input."""
        whole = self.wholes.get(tuple(f"{name}.weight" for name in names))
        if whole is None:
            return Projections.of(weights, names)
        parts: list[tuple[Any, Tensor | None]] = [
            (weights[f"{name}.weight"], weights.get(f"{name}.bias")) for name in names
        ]
        biases = [bias for _, bias in parts if bias is not None]
        joined = (whole, torch.cat(biases) if biases else None)
        return Projections(parts, [len(part) for part, _ in parts], joined if len(parts) > 1 else None)

    def __getitem__(self, name: str) -> Any:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


def _dense(part: Tensor | QuantisedMatrix, some: Tensor) -> Tensor:
    if isinstance(part, Tensor):
        return part
    return torch.cat([tensor_of(rows.dequantise()).to(some.device, some.dtype) for rows in part.blocks()])


def _side_by_side(spec: Spec, known: Seq[Weight], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors in which matrices with one input share a storage. If some do not yet, all tensors are copied."""
    groups = [group for group in blocks.products(known).values() if len(group) > 1]
    pairs = [(tensors[a.name], tensors[b.name]) for group in groups for a, b in itertools.pairwise(group)]
    if all(a.is_contiguous() and b.data_ptr() == a.data_ptr() + a.nbytes for a, b in pairs):
        return tensors
    some = next(iter(tensors.values()))
    placed = empty_weights(spec, some.dtype, some.device)
    for name in tensors:
        placed[name].copy_(tensors[name])
    return {name: placed[name] for name in tensors}
