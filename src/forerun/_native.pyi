"""Native CPU kernels of forerun; loaded through forerun.native."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

source_hash: str = ...

def known_isas() -> list[tuple[str, str]]:
    """
    Instruction sets that kernels were compiled for, best first, with the features that a processor needs.
    """

def supported_isas() -> list[str]:
    """Those that this processor runs, best first."""

def widens_pairs() -> bool:
    """Whether AVX-512 multiplies pairs of bfloat16 as floats."""

def widen_pairs(arg: bool, /) -> bool:
    """
    Chooses that, for tests: the bits are the same. Returns what was chosen before.
    """

def has_byte_tiles() -> bool:
    """Whether this process may multiply tiles of bytes (AMX)."""

def multiply_tiles(arg: bool, /) -> bool:
    """
    Chooses that for quantised products of many rows, for tests: the bits are the same. Returns what was chosen before.
    """

class BandwidthProbe:
    """A buffer that threads read as fast as this machine can."""

    def __init__(self, num_bytes: int, num_threads: int) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    def read(self, num_repeats: int) -> list[tuple[str, list[float]]]:
        """
        Bytes per second of each way of reading, once per repeat, the ways in turn.
        """

PANEL: int = 32

KEY_BLOCK: int = 64

UNIT: int = 32

GIVE_BACK_BYTES: int = 8388608

def allocated_bytes(num_bytes: int) -> int:
    """
    Counts the bytes that the system gives for a buffer: whole pages from the size of a huge one on.
    """

def packed_bytes(num_out: int, num_in: int, bfloat16: bool, paired: bool = False) -> int:
    """
    Counts the bytes of a packed matrix, padding included; num_out: of all parts.
    """

def quantised_bytes(sections: Sequence[Sequence[int]], num_in: int, paired: bool = False) -> int:
    """
    Counts those of a quantised one, whose sections are as `pack_quantised` takes them.
    """

class Packed:
    """A matrix in panels; see docs/development/kernels.md."""

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, padding included."""

    @property
    def address(self) -> int:
        """Where they begin."""

    def unpack_row(self, index: int, out: int) -> None:
        """Writes a row as it was before packing to the address `out`."""

class Backend:
    """The kernels of one instruction set and a team of threads."""

    def __init__(self, arg0: str, arg1: int, /) -> None: ...
    def pack(
        self, arg0: bool, arg1: Sequence[tuple[int, int]], arg2: int, arg3: bool, arg4: int, arg5: bool, /
    ) -> Packed: ...
    def pack_quantised(self, arg0: Sequence[Sequence[int]], arg1: int, arg2: bool, arg3: int, /) -> Packed: ...
    def fill(self, arg0: Packed, arg1: int, arg2: int, arg3: Sequence[int], /) -> bool: ...
    def fill_stored(
        self, packed: Packed, first: int, count: int, type: int, file: int, start: int, numbers: int
    ) -> bool:
        """
        Packs rows of a file as it stores them; returns False where `fill` has to be asked.

        type: its number in GGUF files. file: a descriptor. start: the first byte of row 0. numbers: address of the rows' numbers, int32, 0 = from row 0 on.
        """

    def round_groups(self, x: int, num_groups: int, group: int, bits: int, codes: int, scales: int, zeros: int) -> None:
        """
        Rounds groups of float32 that follow each other to 4 or 8 bits.

        Writes codes (uint8, one for each weight), scales (bfloat16) and zeros (uint8), one for each group.
        """

    def round_stored(
        self, packed: Packed, first: int, count: int, type: int, file: int, start: int, numbers: int, group: int
    ) -> tuple[bool, bool]:
        """
        Rounds rows of a file to 4 bits (ops/quantising.py) and packs them; returns whether it could, and whether all scales fit.

        The rest is as for `fill_stored`.
        """

    def linear(self, arg0: Packed, arg1: int, arg2: int, arg3: int, /) -> None: ...
    def add_linear(self, arg0: Packed, arg1: int, arg2: int, arg3: int, /) -> None: ...
    def gated_linear(self, arg0: Packed, arg1: Packed, arg2: int, arg3: int, arg4: int, /) -> None: ...
    def rms_norm(self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: float, arg5: int, /) -> None: ...
    def layer_norm(self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, arg5: float, arg6: int, /) -> None: ...
    def gated(self, arg0: str, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, /) -> None: ...
    def rope(self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, arg6: int, /) -> None: ...
    def attention(
        self,
        type: int,
        q: int,
        num_rows: int,
        keys: int,
        values: int,
        pool_rows: int,
        num_heads: int,
        num_kv_heads: int,
        dim: int,
        window: int,
        block_tokens: int,
        num_runs: int,
        numbers: Sequence[int],
        out: int,
        sees_all: bool,
    ) -> None: ...

def empty(num_bytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
    """
    Makes so many bytes that are not written yet, uint8 [num_bytes]: aligned to 64, in huge pages from 2 MiB on where the system has them.
    """

def convert(backend: Backend, source: int, source_type: str, target: int, target_type: str, count: int) -> None:
    """
    Writes numbers of one type as those of another, on all threads, from an address to an address.

    Types: float64, float32, float16, bfloat16; float8_e4m3fn is read alone. Every number is rounded to float32 first, then to the nearest of the type, ties to even.
    """

STATE_TOKENS: int = 16

def refusal(spec: object) -> str | None:
    """
    Says why these kernels do not compute a forerun.blocks.Spec, in a sentence without an end; None where they do.
    """

def pass_bytes(
    isa: str, spec: object, bfloat16: bool, quantised: bool, num_rows: int, context: int, num_threads: int
) -> int:
    """
    Counts the bytes of a model's buffers after a pass of so many rows behind so many tokens, an upper bound.
    """

class Stop:
    """When a run that is continued greedily ends before its length."""

    def __init__(self, edges: Sequence[float], shares: Sequence[float], least: Sequence[float]) -> None:
        """
        edges: ascending probabilities. shares: one more; how often an id is right whose probability is at least so many of the edges. least: the product of the shares of all ids so far, below which nothing follows, behind each id.
        """

class Draw:
    """
    How the ids of a run that is continued are drawn: with the bits of forerun.sampling.
    """

    def __init__(
        self,
        temperature: float,
        top_k: int,
        log_min_p: float,
        top_p: float,
        most_listed: int,
        shares_noise: bool,
        seed: int,
        position: int,
        round: int,
    ) -> None:
        """
        temperature: 0 = the id of the largest logit. shares_noise: whether an id is picked by the noise of match verification. position: of the first id.
        """

class Pools:
    """Addresses of a cache's keys and values, one pool for each block."""

    def __init__(
        self,
        keys: Sequence[int],
        values: Sequence[int],
        block_tokens: int,
        row_bytes: Sequence[Sequence[int]],
        num_rows: Sequence[int],
        type: int,
        refined: bool = False,
        kinds: Sequence[int] = [],
    ) -> None:
        """
        row_bytes: of keys and of values, one pair for all pools or one for each; num_rows alike. type: 0 float32, 1 bfloat16, 2 bytes. refined: whether keys in bytes have second codes, see KeyOrder in csrc/kernels.h. kinds: of each pool, which of the runs of a pass have its rows; none = the first.
        """

    def save(self, block: int, bytes: int, num_bytes: int) -> None:
        """
        Writes the rows of a block, keys then values of each pool, to an address.
        """

    def load(self, block: int, bytes: int, num_bytes: int) -> None:
        """Reads the rows of a block from where `save` wrote them."""

    def keep_states(
        self, num_states: int, num_rows: int, layers: Sequence[tuple[int, Sequence[int], Sequence[int]]]
    ) -> None:
        """
        Says where recurrent layers have their states, and the inputs of tokens behind them.

        layers: of each its number; the addresses of states, of the inputs before each, of inputs of tokens and of their gates; and the bytes of one of each.
        """

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """
        Copies row sources[i] to row targets[i] in every block, one after the other.
        """

class Model:
    """
    A whole model; one call for each pass. Arguments that are integers where a tensor is meant are addresses of contiguous memory, which the caller keeps alive.
    """

    @property
    def rotations(self) -> list[int]:
        """
        Of each table of cos and sin that a pass takes, the first block that it is of.
        """

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        rotations: Sequence[tuple[int, int]],
        num_runs: int,
        numbers: Sequence[Sequence[int]],
        pools: Pools,
        layers: Sequence[int],
        input: int,
        taps: Sequence[tuple[int, int]],
        is_normed: bool,
        hidden: int,
        sources: Sequence[int] = [],
        states: Sequence[int] = [],
    ) -> list[int]:
        """
        Runs a ragged pass through some blocks and writes its rows, float32 [tokens, hidden_size], to `hidden`.

        rotations: of each kind, cos and sin by position, float32 [positions, 2, turned dimensions], and how many positions; see the property. numbers: the runs, as forerun.ops.cpu.packed.run_numbers makes them. layers: ascending. input: float32 rows for the first of them, 0 = the tokens' embeddings; of a head features, 0 = zeros. taps: ascending pairs (k, address) that receive the residual stream before block k. is_normed: whether the final norm is applied. sources: of each run the rows that blocks see of its source, as a run of cached rows alone. states: what recurrent blocks read and write of each run, as forerun.ops.cpu.packed.state_numbers makes it. Returns how many experts some row chose, of each of these blocks that has experts. Raises IndexError for a token that is no row of the embedding, and for a position that has none, and InternalError for numbers that do not hold together: of runs, blocks, sources, layers and taps.
        """

    def features(self, layer_rows: Sequence[int], num_rows: int, out: int) -> None:
        """
        Writes what a head makes of its target's rows behind each of its layers, float32 [num_rows, size], to `out`, float32 [num_rows, hidden_size].
        """

    def remember(
        self,
        positions: Sequence[int],
        rotations: Sequence[tuple[int, int]],
        num_runs: int,
        numbers: Sequence[Sequence[int]],
        pools: Pools,
        layer_rows: Sequence[int],
    ) -> None:
        """
        Writes keys and values of what a head makes of its target's rows into all pools, as its blocks' context.

        positions: of the rows. The rest is as for `forward` and `features`.
        """

    def norm(self, hidden: int, num_rows: int, out: int) -> None:
        """
        Writes rows behind the final norm, float32 [num_rows, hidden_size], to `out`.
        """

    def logits(self, hidden: int, num_rows: int, num_ids: int, out: int) -> None:
        """
        Writes the first `num_ids` logits of rows after the final norm, float32 [num_rows, num_ids], to `out`.
        """

    def argmax(self, hidden: int, num_rows: int, rows: Sequence[int], num_ids: int) -> tuple[list[int], list[float]]:
        """
        Returns the ids of the largest of the first `num_ids` logits of some of the rows, and these logits.

        Ties go to the lowest id, and NaN counts as the largest.
        """

    def run_ahead(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        counts: Sequence[int],
        lengths: Sequence[int],
        rotations: Sequence[tuple[int, int]],
        numbers: Sequence[Sequence[int]],
        pools: Pools,
        layers: Sequence[int],
        num_ids: int,
        input: int = 0,
        stops: Sequence[Stop] = [],
        layer_rows: Sequence[int] = [],
        sources: Sequence[int] = [],
        draws: Sequence[Draw] = [],
        states: Sequence[int] = [],
    ) -> tuple[list[list[int]], list[list[float]], list[list[object]]] | None:
        """
        Continues each run by lengths[i] ids, and returns them, their probabilities where there are stops, and the distribution of each where there are draws, as of Sampler.probs, which is empty where nothing was drawn; None where a logit is NaN.

        draws: of each run, or none at all: ids of the largest logits. stops: of each run when it ends earlier, or none at all. counts: tokens that each run begins with. numbers: as for `forward`, with cache rows for all tokens that are fed. input: of a head, the features of these tokens, float32 [tokens, hidden_size]. layer_rows: in place of them the target's rows behind each of its layers, of the same shape. states: as for `forward`, of all tokens that are fed.
        """

def make_model(
    backend: Backend,
    spec: object,
    bfloat16: bool,
    matrices: Mapping[str, Packed],
    vectors: Mapping[str, int],
    tables: Mapping[str, int],
    target: Model | None = None,
    ids: Sequence[int] = [],
) -> Model:
    """
    Makes a model of a forerun.blocks.Spec.

    bfloat16: the type of keys, values and plain rows, else float32. matrices: packed, by the products of blocks.weights(spec), with their biases; gate and up paired; "head" unless it is "embedding". vectors: addresses of norms' weights and biases, float32, by name. tables: those of an embedding that is not packed, and of learned positions, in the type above. The caller keeps all. target: of a head, whose embedding it reads where it has none of its own; ids: those of the target that its own stand for. Raises ValueError for a spec that `refusal` refuses and for a weight that is missing.
    """

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

    def mass(
        self, weights: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> float:
        """The sum of weights >= 0; 0 where one is no finite number."""

    def mass_of_logits(
        self, row: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> float:
        """The sum of e^(logit - the largest); 0 where logits are no numbers."""

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
