"""The native CPU operators: each call runs one operator of forerun._native.

Operators take numpy rows and return float32 rows. A matrix must be packed before it can be used (`CpuOps.pack`).
Between two operators everything is float32. With bfloat16 weights, the inputs of a product are rounded to bfloat16, and
so are keys and values before they enter the cache. The bits of a row depend only on that row, its keys and values, and
the instruction set. The number of rows, the number of threads, and the place of a token in the cache change no bits
(docs/development/kernels.md).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from forerun import native
from forerun.blocks import Act
from forerun.errors import CapacityError, InternalError
from forerun.host_tensor import Floats, HostTensor, address
from forerun.kv.pool import Pool, type_number
from forerun.ops.cpu.packed import Format, PackedMatrix, packs, run_numbers, section_numbers, sections_of
from forerun.ops.operators import Operators
from forerun.ops.passes import float_rows
from forerun.ops.quantised import QuantisedMatrix, Scheme, dequantised
from forerun.types import CacheView

DTYPES = ("float32", "bfloat16")
# Measured with weights of 4 bits. A vector of "baseline" has only 16 bytes.
EXTRA_ROW = {"avx512": 0.05, "avx_vnni": 0.1, "avx2": 0.2, "baseline": 0.5}


class CpuOps(Operators):
    """The kernels of one instruction set, run by their own team of threads. Rows are numpy arrays.

    isa: avx512, avx_vnni, avx2 or baseline; None = FORERUN_ISA if it is set, otherwise the best that this processor
    has. num_threads: None = forerun.native.num_threads(). Raises InternalError if the extension was not built.
    """

    name, row_invariant = "native", True

    def __init__(self, isa: str | None = None, num_threads: int | None = None) -> None:
        extension = native.extension()
        self.isa = isa or native.isa()
        self.extra_row = EXTRA_ROW.get(self.isa, Operators.extra_row)
        if extension is None or self.isa == "reference":
            raise InternalError("the native operators were asked for and are not there")
        self._num_threads = num_threads or native.num_threads()
        self.extension = extension
        self.backend = extension.Backend(self.isa, self._num_threads)

    @property
    def build(self) -> str:
        """The name of the kernels in use, for reports. Nothing else in a build changes the bits of a result."""
        return f"native kernels, {self.isa}"

    @property
    def num_threads(self) -> int:
        """The number of threads of the team, the calling thread included."""
        return self._num_threads

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Return a context in which torch, if it is imported, computes on the calling thread alone.

        Threads that torch wakes for an operator spin for milliseconds after the operator, on processors that the next
        pass needs. With these threads, a verification step at temperature 1 took 1.3 times as long.
        """
        torch = sys.modules.get("torch")
        # Another thread may still be importing torch; then these functions are missing.
        ask, tell = (getattr(torch, name, None) for name in ("get_num_threads", "set_num_threads"))
        if ask is None or tell is None:
            yield
            return
        num_threads = ask()
        tell(1)
        try:
            yield
        finally:
            tell(num_threads)

    def auto_dtype(self, device: str, stored: str) -> str:
        """Return bfloat16, so that a pass reads half the bytes. A row's bits still do not depend on other rows."""
        return "bfloat16"

    def rows_dtype(self, weights: str) -> str:
        """Return float32, whatever the weights are."""
        return "float32"

    # ------------------------------------------------------------------------------------------------- matrices

    def packs_scheme(self, scheme: Scheme) -> bool:
        """Tell whether matrices of this scheme can be packed."""
        return packs(scheme)

    def pack(
        self,
        parts: HostTensor | QuantisedMatrix | Seq[HostTensor | QuantisedMatrix],
        bias: HostTensor | None = None,
        *,
        paired: bool = False,
        consume: bool = False,
    ) -> PackedMatrix:
        """Pack weights [O, I] for the kernels; several parts are joined into one matrix along their outputs.

        paired: whether the parts are gate and up; see PackedMatrix. consume: whether the parts' memory is given back to
        the system while the parts are packed. If so, the caller must not read the parts again. Raises CapacityError if
        there is not enough memory, and InternalError for dtypes other than float32 and bfloat16.

        Quantised parts are read while they are packed, and keep exactly the weights of their file. If parts with
        different schemes share a panel of 32 outputs, all parts are packed with the most bits and the smallest groups
        among their schemes.
        """
        given = [parts] if isinstance(parts, HostTensor | QuantisedMatrix) else list(parts)
        floats = None if bias is None else np.ascontiguousarray(bias.float32())
        if all(isinstance(part, QuantisedMatrix) for part in given):
            return self._pack_quantised(cast(list[QuantisedMatrix], given), floats, paired)
        dense = [part if isinstance(part, HostTensor) else dequantised(part) for part in given]
        dtype, num_in = dense[0].dtype, dense[0].shape[1]
        if dtype not in DTYPES or any(p.dtype != dtype or p.shape[1] != num_in for p in dense):
            raise InternalError(f"weights of {[p.dtype for p in dense]} cannot be packed together")
        rows = [part.contiguous() for part in dense]
        places = [(address(part.values), len(part)) for part in rows]
        try:
            handle = self.backend.pack(dtype == "bfloat16", places, num_in, paired, address(floats), consume)
        except MemoryError as error:
            raise _no_room(sum(p.nbytes for p in rows), dtype) from error
        return PackedMatrix(handle, sum(len(p) for p in rows), num_in, dtype, paired, bias=floats)

    def _pack_quantised(self, parts: list[QuantisedMatrix], bias: Floats | None, paired: bool) -> PackedMatrix:
        num_in = parts[0].shape[1]
        num_out = sum(part.shape[0] for part in parts)
        sections = sections_of(parts, paired)
        formats = [Format.of([part.scheme for part in section]) for section in sections]
        misfit: int | None = 0
        while misfit is not None:
            numbers = section_numbers(sections, formats)
            try:
                handle = self.backend.pack_quantised(numbers, num_in, paired, address(bias))
            except MemoryError as error:
                raise _no_room(num_out * num_in * parts[0].scheme.bits // 8, "bfloat16") from error
            misfit = self._fill(handle, sections, formats)
            if misfit is not None:  # float16 holds most files' scales and minimums exactly, float32 all
                formats[misfit] = replace(formats[misfit], number_bytes=4)
        bits = tuple(sorted({format.bits for format in formats}))
        return PackedMatrix(handle, num_out, num_in, "bfloat16", paired, bits, bias)

    def _fill(self, handle: Any, sections: list[list[QuantisedMatrix]], formats: list[Format]) -> int | None:
        """Read all rows into the packed matrix `handle`.

        Returns the index of the first section whose scales need float32. None = the scales of all sections fit the
        packed format. formats: the packed format of each section.
        """
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
        """Let the kernels read a part's rows from its file. Returns whether the scales fit the packed format.

        handle: the packed matrix. first: the index of the matrix's row that gets the first row of `part`. None = the
        kernels cannot read these rows. The caller then reads the rows block by block, which also raises the errors of a
        broken file.
        """
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

    def multiplier(self, model: Any, matrix: HostTensor, bias: HostTensor | None = None) -> Callable[[Floats], Floats]:
        """See `Operators.multiplier`."""
        return partial(self.linear, weight=self.pack(matrix.to(model.weight_dtype), bias))

    def linear(self, x: Floats, weight: PackedMatrix) -> Floats:
        """Multiply x [T, I] by a packed weight [O, I], and add the bias that is packed with the weight -> [T, O]."""
        if weight.paired:
            raise InternalError("gate and up are no product by themselves")
        x, out = float_rows(x, weight.num_in), np.empty((len(x), weight.num_out), np.float32)
        self.backend.linear(weight.handle, address(x), len(x), address(out))
        return out

    def add_linear(self, residual: Floats, x: Floats, weight: PackedMatrix) -> Floats:
        """Return residual [T, O] plus the product of x [T, I] and weight, in one sweep over the weights.

        The result is a new array.
        """
        x, out = float_rows(x, weight.num_in), float_rows(residual, weight.num_out, len(x)).copy()
        self.backend.add_linear(weight.handle, address(x), len(x), address(out))
        return out

    def add_gated(self, residual: Floats, x: Floats, gate_up: PackedMatrix, down: PackedMatrix) -> Floats:
        """Compute a feed-forward block, residual [T, O] + down(silu(gate x) * up x), as a new array."""
        x, out = float_rows(x, gate_up.num_in), float_rows(residual, down.num_out, len(x)).copy()
        self.backend.gated_linear(gate_up.handle, down.handle, address(x), len(x), address(out))
        return out

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        """Compute the root mean square norm over the last dimension (Zhang and Sennrich 2019, eq. 4)."""
        shape, width = x.shape, x.shape[-1]
        x = float_rows(x.reshape(-1, width), width)
        weight = np.ascontiguousarray(weight, np.float32)
        out = np.empty_like(x)
        self.backend.rms_norm(address(x), address(weight), len(x), width, eps, address(out))
        return out.reshape(shape)

    def layer_norm(self, x: Floats, weight: Floats | None, bias: Floats | None, eps: float) -> Floats:
        """Compute the layer norm over the last dimension (Ba et al. 2016, eq. 4)."""
        shape, width = x.shape, x.shape[-1]
        x = float_rows(x.reshape(-1, width), width)
        scale = np.ones(width, np.float32) if weight is None else np.ascontiguousarray(weight, np.float32)
        added = None if bias is None else np.ascontiguousarray(bias, np.float32)
        out = np.empty_like(x)
        self.backend.layer_norm(address(x), address(scale), address(added), len(x), width, eps, address(out))
        return out.reshape(shape)

    def silu_mul(self, gate: Floats, up: Floats) -> Floats:
        """Compute silu(gate) * up, [T, F]."""
        return self.gated("silu", gate, up)

    def gated(self, act: Act, gate: Floats, up: Floats) -> Floats:
        """Compute act(gate) * up, [T, F]; for clamped_silu, see ReferenceOps.gated."""
        gate, up = float_rows(gate, gate.shape[-1]), float_rows(up, gate.shape[-1], len(gate))
        out = np.empty_like(gate)
        self.backend.gated(act, address(gate), address(up), len(gate), gate.shape[-1], address(out))
        return out

    def rope(self, x: Floats, cos: Floats, sin: Floats) -> Floats:
        """Rotate x [T, heads, D] by position; cos, sin [T, 1, D] are as in ReferenceOps.rope."""
        num, heads, dim = x.shape
        cos, sin = (float_rows(part.reshape(num, -1), dim, num) for part in (cos, sin))
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty_like(x)
        self.backend.rope(address(x), address(cos), address(sin), num, heads, dim, address(out))
        return out

    def attention(
        self,
        q: Floats,
        k: Floats | None,
        v: Floats | None,
        *,
        pool: Pool,
        view: CacheView,
        window: int | None,
        scale: float | None = None,
        sees_all: bool = False,
    ) -> Floats:
        """Write k, v [T, kv_heads, D] into a layer's pool and attend with q -> [T, heads, D].

        scale: the factor of scores; None = 1 / sqrt(D). sees_all: whether each row sees its whole run.
        """
        if pool.keys.dtype == "int8" and pool.refined:
            raise InternalError("native attention by itself reads no second codes of keys")
        if k is not None and v is not None:
            pool.write(view.write_rows, k, v)
        q = np.asarray(q, np.float32) * np.float32(_scale(q.shape[-1]) if scale is None else scale)
        out = np.empty_like(q)
        numbers = run_numbers(view.batch, [rows.tolist() for rows in view.read_rows])
        self.backend.attention(
            type_number(pool.keys.dtype),
            address(q),
            q.shape[0],
            address(pool.keys.values),
            address(pool.values.values),
            pool.keys.shape[0],
            q.shape[1],
            pool.keys.shape[1],
            q.shape[2],
            window or 0,
            1,  # block size: the table has an entry for each row
            len(view.batch.slots),
            numbers,
            address(out),
            sees_all,
        )
        return out


def _no_room(num_bytes: int, dtype: str) -> CapacityError:
    other = ", or dtype='bfloat16'" if dtype == "float32" else ""
    return CapacityError(
        f"there is no memory to pack a matrix of {num_bytes / 1e9:.2f} GB for the native operators: choose a smaller "
        f"model{other}; forerun plan says what fits"
    )


def _scale(head_dim: int) -> float:
    """Return 1 / sqrt(head_dim), rounded in float32 as the kernels round it."""
    return float(np.float32(1) / np.float32(math.sqrt(np.float32(head_dim))))
