"""Native CPU kernels of forerun; loaded through forerun.native."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

source_hash: str = ...

def supported_isas() -> list[str]:
    """Instruction sets that this processor runs, best first."""

class BandwidthProbe:
    """A buffer that threads read as fast as this machine can."""

    def __init__(self, num_bytes: int, num_threads: int) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    def read(self, num_repeats: int) -> list[tuple[str, list[float]]]:
        """
        Bytes per second of each way of reading, once per repeat, the ways in turn.
        """

class Packed:
    """A matrix in panels; see docs/kernels.md."""

    @property
    def num_bytes(self) -> int: ...
    def unpack_row(self, arg0: int, arg1: int, /) -> None: ...

class Pools:
    """Addresses of a cache's keys and values, one pool for each layer."""

    def __init__(self, arg0: Sequence[int], arg1: Sequence[int], arg2: int, arg3: int, /) -> None: ...
    def copy(self, arg0: Sequence[int], arg1: Sequence[int], /) -> None: ...

class Backend:
    """The kernels of one instruction set and a team of threads."""

    def __init__(self, arg0: str, arg1: int, /) -> None: ...
    def pack(
        self, arg0: bool, arg1: Sequence[tuple[int, int]], arg2: int, arg3: bool, arg4: int, arg5: bool, /
    ) -> Packed: ...
    def pack_quantised(
        self, arg0: int, arg1: Sequence[int], arg2: int, arg3: bool, arg4: int, arg5: bool, arg6: int, /
    ) -> Packed: ...
    def fill(self, arg0: Packed, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, /) -> bool: ...
    def linear(self, arg0: Packed, arg1: int, arg2: int, arg3: int, /) -> None: ...
    def add_linear(self, arg0: Packed, arg1: int, arg2: int, arg3: int, /) -> None: ...
    def gated_linear(self, arg0: Packed, arg1: Packed, arg2: int, arg3: int, arg4: int, /) -> None: ...
    def rms_norm(self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: float, arg5: int, /) -> None: ...
    def silu_mul(self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, /) -> None: ...
    def rope(self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, arg6: int, /) -> None: ...
    def attention(
        self,
        arg0: bool,
        arg1: int,
        arg2: int,
        arg3: int,
        arg4: int,
        arg5: int,
        arg6: int,
        arg7: int,
        arg8: int,
        arg9: int,
        arg10: Sequence[int],
        arg11: int,
        /,
    ) -> None: ...

class Decoder:
    """A whole decoder; one call for each pass."""

    def forward(
        self,
        arg0: Sequence[int],
        arg1: Sequence[int],
        arg2: int,
        arg3: int,
        arg4: Sequence[int],
        arg5: Pools,
        arg6: Sequence[int],
        arg7: int,
        arg8: Sequence[tuple[int, int]],
        arg9: bool,
        arg10: int,
        /,
    ) -> None: ...
    def logits(self, arg0: int, arg1: int, arg2: int, /) -> None: ...
    def argmax(self, arg0: int, arg1: Sequence[int], arg2: int, /) -> tuple[list[int], list[float]]: ...
    def run_ahead(
        self,
        arg0: Sequence[int],
        arg1: Sequence[int],
        arg2: Sequence[int],
        arg3: Sequence[int],
        arg4: int,
        arg5: Sequence[int],
        arg6: Pools,
        arg7: Sequence[int],
        arg8: int,
        /,
    ) -> list[list[int]] | None: ...

def make_decoder(
    backend: Backend,
    sizes: Sequence[int],
    eps: float,
    bfloat16: bool,
    norms: Sequence[int],
    matrices: Sequence[Packed],
    windows: Sequence[int],
    packed_embedding: Packed | None,
    embedding: int,
    final_norm: int,
    head: Packed,
) -> Decoder: ...

class Sampler:
    def __init__(self, isa: str) -> None: ...
    def argmax(
        self, row: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> int | None:
        """The lowest index of the largest; None where it is no number."""

    def probs(
        self,
        row: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        temperature: float,
        top_k: int,
        log_min_p: float,
        top_p: float,
        most_listed: int,
    ) -> object:
        """(ids or None, probabilities); None where logits are no numbers."""

    def place(
        self,
        weights: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        uniform: int,
    ) -> int | None:
        """
        Where the cumulative sum is above uniform * 2^-53 of all; None where there is no mass.
        """

    def race(
        self,
        weights: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)] | None,
        seed: int,
        position: int,
    ) -> int | None:
        """The id with the least -log u / weight; None where there is no mass."""

    def log(self, x: float) -> float:
        """Natural logarithm of a positive number, as the race takes it."""

    def philox(self, c0: int, c1: int, c2: int, c3: int, key0: int, key1: int) -> tuple[int, int, int, int]:
        """Philox4x32-10: four words of counter, two of key -> four words."""
