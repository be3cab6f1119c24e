"""The native CPU operators: forerun._native behind the interface of ops/reference.py, and whole models in one call.

Operators take rows and return float32 rows; a matrix must be packed before it can be used (`CpuOps.pack`). Between two
operators everything is float32. With bfloat16 weights the inputs of a product are rounded to bfloat16, and so are keys
and values before they enter the cache. The bits of a row depend on that row, its keys and values and the instruction
set alone, not on the number of rows or threads, nor on where the cache keeps a token (docs/kernels.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from forerun import native
from forerun.blocks import Act, Spec
from forerun.errors import CapacityError, InternalError
from forerun.kv.pool import KV_DTYPES as KV_DTYPES, Pool, type_number
from forerun.ops.cpu_memory import NativeSizes
from forerun.ops.cpu_model import CpuModel, address
from forerun.ops.memory import Sizes, Wanted
from forerun.ops.packed import Format, PackedMatrix, packs, run_numbers, section_numbers, sections_of
from forerun.ops.passes import float_rows
from forerun.ops.quantised import QuantisedMatrix, Scheme, dequantised
from forerun.ops.reference import PLAIN, ReferenceOps, Scoring
from forerun.types import CacheView

NAME = "native"
RANK = 2
DEVICE = "cpu"
DTYPES = (torch.float32, torch.bfloat16)
row_invariant = True


def usable(device: str) -> str | None:
    """Return what keeps these kernels from a device, as a sentence goes on behind their name; None where they run."""
    if device != "cpu":
        return f"computes on the CPU and contradicts device={device!r}: drop one of them"
    if native.isa() == "reference":
        return f"is not possible: {native.why_not() or 'FORERUN_ISA=reference switches them off'}"
    return None


def supports(spec: Spec) -> str | None:
    """Return why a model is not computed here, in a sentence without an end; None where it is."""
    extension = native.extension()
    return "the native extension is not there" if extension is None else extension.refusal(spec)


@cache
def make() -> ReferenceOps:
    """Return the operators of the best kernels here, which a process has once: they own a team of threads."""
    return CpuOps()


def load(spec: Spec, weights: Mapping[str, Tensor], operators: ReferenceOps, *, consume: bool = False) -> CpuModel:
    """Make a model that runs each pass in one native call; see ops.load_model."""
    return CpuModel(cast(CpuOps, operators), spec, weights, consume=consume)


def sizes(wanted: Wanted) -> Sizes:
    """Return the memory that packed weights and passes take."""
    return NativeSizes(wanted.dtype, wanted.max_seq_len, native.num_threads(), wanted.schemes, wanted.rounded)


class CpuOps(ReferenceOps):
    """The kernels of one instruction set, run by their own team of threads.

    isa: avx512, avx_vnni, avx2 or baseline; None = FORERUN_ISA, else the best that this processor has. num_threads:
    None = as forerun.native.num_threads. Raises InternalError where the extension was not built.
    """

    packs = True

    def __init__(self, isa: str | None = None, num_threads: int | None = None) -> None:
        super().__init__()
        extension = native.extension()
        self.isa = isa or native.isa()
        if extension is None or self.isa == "reference":
            raise InternalError("the native operators were asked for and are not there")
        self.row_invariant, self.name = True, "native"
        self._num_threads = num_threads or native.num_threads()
        self.extension = extension
        self.backend = extension.Backend(self.isa, self._num_threads)

    @property
    def build(self) -> str:
        """The name of the kernels that compute; the bits of a result depend on no other part of the build."""
        return f"native kernels, {self.isa}"

    @property
    def num_threads(self) -> int:
        """The number of threads of the team, the calling thread included."""
        return self._num_threads

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context in which torch computes on the calling thread alone.

        Threads that torch has woken for one of its own operators spin for milliseconds behind it, on the processors
        that the next pass needs: with them a verified step at temperature 1 took 1.3 times as long.
        """
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)

    def auto_dtype(self, device: str, stored: torch.dtype) -> torch.dtype:
        """Return bfloat16: it halves the bytes to read, and a row's bits stay independent of the rest of the batch."""
        return torch.bfloat16

    def rows_dtype(self, weights: torch.dtype) -> torch.dtype:
        """Return float32, whatever the weights are."""
        return torch.float32

    # ------------------------------------------------------------------------------------------------- matrices

    def packs_scheme(self, scheme: Scheme) -> bool:
        """Tell whether matrices of this scheme can be packed."""
        return packs(scheme)

    def pack(
        self,
        parts: Tensor | QuantisedMatrix | Seq[Tensor | QuantisedMatrix],
        bias: Tensor | None = None,
        *,
        paired: bool = False,
        consume: bool = False,
    ) -> PackedMatrix:
        """Pack the weights [O, I] of one product; several parts are joined along their outputs.

        paired: the parts are gate and up, see PackedMatrix. consume: the memory of the parts is given back to the
        system while they are packed, and the caller must not read them again. Raises CapacityError where there is no
        memory, InternalError for types other than float32 and bfloat16.

        Quantised parts are read while they are packed, and keep the weights of their file exactly. Parts that share a
        panel of 32 outputs and differ in their schemes get the most bits and the smallest groups of all.
        """
        given = [parts] if isinstance(parts, Tensor | QuantisedMatrix) else list(parts)
        if all(isinstance(part, QuantisedMatrix) for part in given):
            return self._pack_quantised(cast(list[QuantisedMatrix], given), bias, paired)
        dense = [part if isinstance(part, Tensor) else dequantised(part) for part in given]
        dtype, num_in = dense[0].dtype, dense[0].shape[1]
        if dtype not in DTYPES or any(p.dtype != dtype or p.shape[1] != num_in for p in dense):
            raise InternalError(f"weights of {[p.dtype for p in dense]} cannot be packed together")
        rows = [p.detach().contiguous() for p in dense]
        bias = None if bias is None else bias.detach().float().contiguous()
        try:
            handle = self.backend.pack(
                dtype == torch.bfloat16,
                [(p.data_ptr(), len(p)) for p in rows],
                num_in,
                paired,
                0 if bias is None else bias.data_ptr(),
                consume,
            )
        except MemoryError as error:
            raise _no_room(sum(p.nbytes for p in rows), dtype) from error
        return PackedMatrix(handle, sum(len(p) for p in rows), num_in, dtype, paired, bias=bias)

    def _pack_quantised(self, parts: list[QuantisedMatrix], bias: Tensor | None, paired: bool) -> PackedMatrix:
        num_in, num_out = parts[0].shape[1], sum(part.shape[0] for part in parts)
        sections = sections_of(parts, paired)
        formats = [Format.of([part.scheme for part in section]) for section in sections]
        bias = None if bias is None else bias.detach().float().contiguous()
        misfit: int | None = 0
        while misfit is not None:
            numbers = section_numbers(sections, formats)
            try:
                handle = self.backend.pack_quantised(numbers, num_in, paired, 0 if bias is None else bias.data_ptr())
            except MemoryError as error:
                raise _no_room(num_out * num_in * parts[0].scheme.bits // 8, torch.bfloat16) from error
            misfit = self._fill(handle, sections, formats)
            if misfit is not None:  # float16 holds most files' scales and minimums exactly, float32 all
                formats[misfit] = replace(formats[misfit], number_bytes=4)
        bits = tuple(sorted({format.bits for format in formats}))
        return PackedMatrix(handle, num_out, num_in, torch.bfloat16, paired, bits, bias)

    def _fill(self, handle: Any, sections: list[list[QuantisedMatrix]], formats: list[Format]) -> int | None:
        """Read all rows into a packed matrix; returns the index of a section that needs float32, or None."""
        first = 0
        for i, (section, format) in enumerate(zip(sections, formats, strict=True)):
            for part in section:
                fits = self._fill_stored(handle, first, part)
                if fits is None:
                    fits = self._fill_blocks(handle, first, part, format)
                if not fits:
                    return i
                first += part.shape[0]
        return None

    def _fill_blocks(self, handle: Any, first: int, part: QuantisedMatrix, format: Format) -> bool:
        for rows in part.blocks():
            tensors = format.numbers_of(rows, part.shape[1])
            if not self.backend.fill(handle, first, len(rows), [address(tensor) for tensor in tensors]):
                return False
            first += len(rows)
        return True

    def _fill_stored(self, handle: Any, first: int, part: QuantisedMatrix) -> bool | None:
        """Let the kernels read the rows of a file; returns whether they fit. None = they cannot: blocks say why."""
        if (stored := part.stored) is None:
            return None
        try:
            place = (stored.type, stored.file.fileno(), stored.start, address(stored.numbers))
            rows = (handle, first, part.shape[0], *place)
            if not stored.rounded:
                return self.backend.fill_stored(*rows) or None
            could, fits = self.backend.round_stored(*rows, stored.rounded)
            return bool(fits) if could else None
        except OSError:
            return None

    # ------------------------------------------------------------------------------------------ single operators

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """Multiply: x [T, I] float32, weight packed [O, I] (its bias packed with it) -> float32 [T, O]."""
        if not isinstance(weight, PackedMatrix) or bias is not None or weight.paired:
            raise InternalError("native products take one packed matrix, which brings its bias along")
        x = float_rows(x, weight.num_in)
        out = torch.empty(len(x), weight.num_out)
        self.backend.linear(weight.handle, x.data_ptr(), len(x), out.data_ptr())
        return out

    def add_linear(self, residual: Tensor, x: Tensor, weight: PackedMatrix) -> Tensor:
        """Return residual [T, O] + the product as a new tensor, in one sweep over the weights."""
        x, out = float_rows(x, weight.num_in), float_rows(residual, weight.num_out, len(x)).clone()
        self.backend.add_linear(weight.handle, x.data_ptr(), len(x), out.data_ptr())
        return out

    def add_gated(self, residual: Tensor, x: Tensor, gate_up: PackedMatrix, down: PackedMatrix) -> Tensor:
        """Return a feed-forward block, residual [T, O] + down(silu(gate x) * up x), as a new tensor."""
        x, out = float_rows(x, gate_up.num_in), float_rows(residual, down.num_out, len(x)).clone()
        self.backend.gated_linear(gate_up.handle, down.handle, x.data_ptr(), len(x), out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the root mean square norm over the last dimension, in float32 (Zhang and Sennrich 2019, eq. 4)."""
        shape, width = x.shape, x.shape[-1]
        x, weight = float_rows(x.reshape(-1, width), width), weight.detach().float().contiguous()
        out = torch.empty_like(x)
        self.backend.rms_norm(x.data_ptr(), weight.data_ptr(), len(x), width, eps, out.data_ptr())
        return out.view(shape)

    def join(
        self, parts: Seq[Tensor], norms: Seq[Tensor | None], eps: float, weight: Any, bias: Tensor | None = None
    ) -> Tensor:
        """Multiply rows side by side in one call; see ReferenceOps, and `linear` for the weight."""
        if not isinstance(weight, PackedMatrix) or bias is not None or weight.paired:
            raise InternalError("native products take one packed matrix, which brings its bias along")
        width = parts[0].shape[-1]
        rows = [float_rows(x, width, len(parts[0])) for x in parts]
        weights = [None if norm is None else norm.detach().float().contiguous() for norm in norms]
        out = torch.empty(len(rows[0]), weight.num_out)
        places = [[address(x) for x in tensors] for tensors in (weights, rows)]
        self.backend.join(places[0], eps, weight.handle, places[1], width, len(out), out.data_ptr())
        return out

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Compute the layer norm over the last dimension, in float32 (Ba et al. 2016, eq. 4)."""
        shape, width = x.shape, x.shape[-1]
        x = float_rows(x.reshape(-1, width), width)
        own = torch.ones(width) if weight is None else weight.detach().float().contiguous()
        added = None if bias is None else bias.detach().float().contiguous()
        out = torch.empty_like(x)
        places = x.data_ptr(), own.data_ptr(), address(added)
        self.backend.layer_norm(*places, len(x), width, eps, out.data_ptr())
        return out.view(shape)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute silu(gate) * up, [T, F]."""
        return self.gated("silu", gate, up)

    def gated(self, act: Act, gate: Tensor, up: Tensor) -> Tensor:
        """Compute act(gate) * up, [T, F]; see ReferenceOps for clamped_silu."""
        gate, up = float_rows(gate, gate.shape[-1]), float_rows(up, gate.shape[-1], len(gate))
        out = torch.empty_like(gate)
        self.backend.gated(act, gate.data_ptr(), up.data_ptr(), len(gate), gate.shape[-1], out.data_ptr())
        return out

    def activated(self, act: Act, x: Tensor) -> Tensor:
        """Compute an activation of every number, [T, F]: times 1, which changes no bit."""
        return self.gated(act, x, torch.full_like(x, 0.0 if act == "clamped_silu" else 1.0))

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [T, heads, D] by position; cos, sin [T, 1, D] as for the reference."""
        num, heads, dim = x.shape
        x, cos, sin = x.float().contiguous(), *(float_rows(part.flatten(1), dim, num) for part in (cos, sin))
        out = torch.empty_like(x)
        self.backend.rope(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), num, heads, dim, out.data_ptr())
        return out

    def attention(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        pool: Pool | None,
        view: CacheView | None,
        window: int | None,
        scoring: Scoring = PLAIN,
    ) -> Tensor:
        """Write k, v [T, kv_heads, D] into a layer's pool and attend with q -> [T, heads, D], as the reference does."""
        assert pool is not None
        assert view is not None
        if replace(scoring, scale=None, sees_all=False) != PLAIN:
            raise InternalError(f"native attention has no scores like {scoring}")
        if pool.keys.dtype == torch.int8 and pool.refined:
            raise InternalError("native attention by itself reads no second codes of keys")
        if k is not None and v is not None:
            pool.write(view.write_rows, k, v)
        q = (q.float() * (_scale(q.shape[-1]) if scoring.scale is None else scoring.scale)).contiguous()
        out = torch.empty_like(q)
        numbers = run_numbers(view.batch, [rows.tolist() for rows in view.read_rows])
        self.backend.attention(
            type_number(pool.keys.dtype),
            q.data_ptr(),
            q.shape[0],
            pool.keys.data_ptr(),
            pool.values.data_ptr(),
            pool.keys.shape[0],
            q.shape[1],
            pool.keys.shape[1],
            q.shape[2],
            window or 0,
            1,  # block size: the table has an entry for each row
            len(view.batch.slots),
            numbers,
            out.data_ptr(),
            scoring.sees_all,
        )
        return out


def _no_room(num_bytes: int, dtype: torch.dtype) -> CapacityError:
    other = ", or dtype='bfloat16'" if dtype == torch.float32 else ""
    return CapacityError(
        f"there is no memory to pack a matrix of {num_bytes / 1e9:.2f} GB for the native operators: choose a smaller "
        f"model{other}; forerun plan says what fits"
    )


def _scale(head_dim: int) -> float:
    """Return 1 / sqrt(head_dim), rounded in float32 as the kernels round it."""
    return float(np.float32(1) / np.float32(math.sqrt(np.float32(head_dim))))
