"""Weights of 4 and 8 bits on a CUDA device, as the product kernel reads them, and where matrices lie side by side."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor

from forerun import blocks
from forerun.blocks import Spec, Weight
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme
from forerun.ops.torch import Projections, empty_weights

LEAST_GROUP = 16  # weights of a group: what the matrix instructions take at least


def packs(scheme: Scheme) -> bool:
    """Tell whether matrices of this scheme are packed."""
    return scheme.bits in (2, 3, 4, 8) and scheme.group >= LEAST_GROUP and scheme.group & (scheme.group - 1) == 0


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix [O, I] of 4 or 8 bits: weight = scale * (code - zero) - minimum, by group.

    codes: 8 bits, int8 [O, I], a code less 128; 4 bits, uint8 [O, units x group], whose byte j of unit u has weight j
    of group 2u in its low half and that of group 2u + 1 in its high one. scales [O, groups]. zeros: uint8 [O, groups],
    None = all 0 (of 8 bits 128). minimums: float32 [O, groups] or None.
    """

    bits: int
    group: int
    num_in: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    minimums: Tensor | None
    ndim = 2

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.codes), self.num_in

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.codes.device

    dtype = torch.bfloat16  # of the numbers that it is multiplied with
    itemsize = 1

    @property
    def nbytes(self) -> int:
        """The bytes in memory."""
        return sum(part.nbytes for part in (self.codes, self.scales, self.zeros, self.minimums) if part is not None)

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, rows: slice) -> Packed: ...
    @overload
    def __getitem__(self, rows: list[int]) -> Tensor: ...
    def __getitem__(self, rows: slice | list[int]) -> Packed | Tensor:
        """Return some outputs: of a slice as they are, of a list what they stand for."""
        if isinstance(rows, slice):
            parts = {name: self._rows(name, rows) for name in ("codes", "scales", "zeros", "minimums")}
            return replace(self, **parts)
        return self.rows(torch.tensor(rows, dtype=torch.int64, device=self.device))

    def _rows(self, name: str, rows: slice | Tensor) -> Any:
        part = getattr(self, name)
        return None if part is None else part[rows]

    def rows(self, ids: Tensor) -> Tensor:
        """Return what some outputs stand for, float32 [n, I]."""
        codes, scales, zeros, minimums = (self._rows(n, ids.long()) for n in ("codes", "scales", "zeros", "minimums"))
        if self.bits == 4:
            units = codes.unflatten(-1, (-1, self.group))
            codes = torch.stack((units & 15, units >> 4), -2)
        groups = codes.flatten(1)[:, : self.num_in].float().unflatten(-1, (-1, self.group))
        if zeros is not None:
            groups = groups - zeros.float().unsqueeze(-1)
        found = groups * scales.float().unsqueeze(-1)
        whole: Tensor = found if minimums is None else found - minimums.unsqueeze(-1)
        return whole.flatten(1)

    def float(self) -> Tensor:
        """Return the whole matrix as it is multiplied, in float32."""
        return torch.cat([self[first : first + 4096]._all() for first in range(0, len(self), 4096)])

    def _all(self) -> Tensor:
        return self.rows(torch.arange(len(self), device=self.device))

    @classmethod
    def of(cls, matrix: QuantisedMatrix, device: torch.device) -> Packed:
        """Read a quantised matrix on its way to the device."""
        return cls.joined([cls._of_rows(rows, device) for rows in matrix.blocks()])

    @classmethod
    def joined(cls, parts: Seq[Packed]) -> Packed:
        """Put the outputs of several matrices of one scheme one behind the other."""
        first = parts[0]
        if len(parts) == 1:
            return first
        found: dict[str, Any] = {
            name: None if getattr(first, name) is None else torch.cat([getattr(part, name) for part in parts])
            for name in ("codes", "scales", "zeros", "minimums")
        }
        return replace(first, **found)

    @classmethod
    def _of_rows(cls, rows: QuantisedRows, device: torch.device) -> Packed:
        rows = rows.looked_up()
        scheme, codes, num_in = rows.scheme, rows.codes.to(device), rows.codes.shape[1]
        is_centred = scheme.bits == 8 and scheme.zero == 128  # what is packed are the numbers that scales multiply
        exact = scheme.super_group == 0 and scheme.offset == "zero"
        zeros: Tensor | None = None
        minimums: Tensor | None = None
        if exact:
            assert rows.zeros is not None
            scales = rows.scales.to(device)
            zeros = None if is_centred else rows.zeros.to(device)
        elif is_centred:
            scales = rows.numbers(scheme.group, num_in // scheme.group, "zero")[0].to(device)
        else:
            both = rows.numbers(scheme.group, num_in // scheme.group, "minimum")
            scales, minimums = (part.to(device) for part in both)
        if scheme.bits == 8:
            if zeros is not None or minimums is not None:  # a code less 128 has 128 added where it counts
                lifted = scales.float() * 128 if minimums is not None else None
                minimums = None if minimums is None or lifted is None else minimums - lifted
                if zeros is not None:
                    minimums, zeros = (zeros.float() - 128) * scales.float(), None
            return cls(8, scheme.group, num_in, (codes.int() - 128).to(torch.int8), scales, zeros, minimums)
        groups = torch.unflatten(codes, -1, (-1, scheme.group))
        if groups.shape[1] % 2:
            groups = torch.cat((groups, torch.zeros_like(groups[:, :1])), 1)
        units = torch.unflatten(groups, 1, (-1, 2))
        packed = (units[:, :, 0] | units[:, :, 1] << 4).flatten(1).contiguous()
        return cls(4, scheme.group, num_in, packed, scales, zeros, minimums)


class Laid(Mapping[str, Any]):
    """The weights of a model on the device, matrices of one product side by side.

    wholes: by the names of its matrices, the whole of a product that is packed.
    """

    def __init__(self, spec: Spec, weights: Mapping[str, Tensor | QuantisedMatrix]) -> None:
        self.wholes: dict[tuple[str, ...], Packed] = {}
        known = blocks.weights(spec)
        groups = blocks.products(known)
        some = self._some(known, weights)
        tensors: dict[str, Tensor] = {}
        self._found: dict[str, Any] = {some[0]: some[1]}
        for group in groups.values():
            parts = [(w, weights[w.name]) for w in group]
            if not self._packed(parts, some[1].device):
                tensors |= {w.name: _dense(part, some[1]) for w, part in parts}
        rest = {w.name: weights[w.name] for w in known if w.name not in tensors and w.name not in self._found}
        tensors |= {name: part for name, part in rest.items() if isinstance(part, Tensor)}
        self._found |= _side_by_side(spec, [w for w in known if w.name in tensors], tensors)

    @staticmethod
    def _some(known: Seq[Weight], weights: Mapping[str, Tensor | QuantisedMatrix]) -> tuple[str, Tensor]:
        """Some tensor, which says the type and the device."""
        for weight in known:
            if weight.role == "vector" and isinstance(found := weights[weight.name], Tensor):
                return weight.name, found
        found = weights[known[0].name]
        assert isinstance(found, Tensor)
        return known[0].name, found

    def _packed(self, parts: Seq[tuple[Weight, Tensor | QuantisedMatrix]], device: torch.device) -> bool:
        """Pack the matrices of a product, where they are of one scheme."""
        found = [part for _, part in parts if isinstance(part, QuantisedMatrix)]
        if len(found) < len(parts) or len({part.scheme for part in found}) > 1:
            return False
        whole = Packed.joined([Packed.of(part, device) for part in found])
        self.wholes[tuple(w.name for w, _ in parts)] = whole
        first = 0
        for weight, part in parts:
            self._found[weight.name] = whole[first : first + part.shape[0]]
            first += part.shape[0]
        return True

    def join(self, weights: Mapping[str, Any], names: list[str]) -> Projections:
        """Return the product of the matrices of these names."""
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
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _dense(part: Tensor | QuantisedMatrix, some: Tensor) -> Tensor:
    if isinstance(part, Tensor):
        return part
    return torch.cat([rows.dequantise().to(some.device, some.dtype) for rows in part.blocks()])


def _side_by_side(spec: Spec, known: Seq[Weight], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors, those of one product in one storage: as they are, or copied where they lie apart."""
    groups = [group for group in blocks.products(known).values() if len(group) > 1]
    pairs = [(tensors[a.name], tensors[b.name]) for group in groups for a, b in itertools.pairwise(group)]
    if all(a.is_contiguous() and b.data_ptr() == a.data_ptr() + a.nbytes for a, b in pairs):
        return tensors
    some = next(iter(tensors.values()))
    own = empty_weights(spec, some.dtype, some.device)
    for name in tensors:
        own[name].copy_(tensors[name])
    return {name: own[name] for name in tensors}
