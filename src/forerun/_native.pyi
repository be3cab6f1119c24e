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
        Returns the bytes per second of each way of reading, once per repeat. The ways take turns.
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
    Counts the bytes of a packed matrix, padding included.

    num_out: the number of outputs of all parts.
    """

def quantised_bytes(sections: Sequence[Sequence[int]], num_in: int, paired: bool = False) -> int:
    """
    Counts the bytes of a packed quantised matrix.

    sections: as `pack_quantised` takes them.
    """

class Packed:
    """A matrix in panels; see docs/development/kernels.md."""

    @property
    def num_bytes(self) -> int:
        """The bytes in memory, padding included."""

    @property
    def address(self) -> int:
        """The address of the first byte."""

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
        Packs rows of a file in the form in which the file stores them; returns False if `fill` must pack them.

        type: the number of the stored type in GGUF files. file: a descriptor. start: the first byte of row 0. numbers: the address of the rows' numbers, int32, 0 = from row 0 on.
        """

    def round_groups(self, x: int, num_groups: int, group: int, bits: int, codes: int, scales: int, zeros: int) -> None:
        """
        Rounds consecutive groups of float32 to 4 or 8 bits.

        Writes codes (uint8, one for each weight), scales (bfloat16) and zeros (uint8), one for each group.
        """

    def round_stored(
        self, packed: Packed, first: int, count: int, type: int, file: int, start: int, numbers: int, group: int
    ) -> tuple[bool, bool]:
        """
        Rounds rows of a file to 4 bits (ops/quantising.py) and packs them.

        Returns whether that was possible, and whether all scales fit. The other arguments are as for `fill_stored`.
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
    Converts numbers at one address to another type at another address, on all threads.

    Types: float64, float32, float16 and bfloat16; float8_e4m3fn can only be read. Each number is rounded to float32 first, then to the nearest number of the type, ties to even.
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
        temperature: 0 = the id of the largest logit. shares_noise: whether ids are drawn with the noise of match verification. position: the position of the first id.
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
        row_bytes: the bytes of a row of keys and of a row of values, one pair for all pools or one for each pool. num_rows: the number of rows, likewise. type: 0 float32, 1 bfloat16, 2 bytes. refined: whether keys in bytes have second codes, see KeyOrder in csrc/kernels.h. kinds: for each pool the index of the runs, among a pass's lists of runs, that tell the pool's rows; none = the first.
        """

    def save(self, block: int, bytes: int, num_bytes: int) -> None:
        """
        Writes the rows of a block to an address: for each pool its keys, then its values.
        """

    def load(self, block: int, bytes: int, num_bytes: int) -> None:
        """Reads the rows of a block from where `save` wrote them."""

    def keep_states(
        self, num_states: int, num_rows: int, layers: Sequence[tuple[int, Sequence[int], Sequence[int]]]
    ) -> None:
        """
        Says where recurrent layers keep their states, and the inputs of the tokens after these states.

        layers: for each layer its number, then four addresses (of states, of the inputs before each state, of the inputs of tokens, and of the gates of tokens), then the bytes of one entry at each address.
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
        For each table of cos and sin that a pass takes, the first block that uses the table.
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

        rotations: for each table of the property `rotations`, the address of cos and sin by position, float32 [positions, 2, turned dimensions], and the number of positions. numbers: the runs, from forerun.ops.cpu.packed.run_numbers. layers: the blocks to run, ascending. input: float32 rows for the first block, 0 = the tokens' embeddings; for a head the features of the tokens, 0 = zeros. taps: ascending pairs (k, address) that receive the residual stream before block k. is_normed: whether the final norm is applied. sources: for each run the rows of its source, written as a run with cached rows alone. states: the states that recurrent blocks read and write for each run, from forerun.ops.cpu.packed.state_numbers. Returns for each block with experts how many experts the rows chose. Raises IndexError for a token without a row in the embedding, and for a position without cos and sin. Raises InternalError for numbers of runs, blocks, sources, layers or taps that contradict each other.
        """

    def features(self, layer_rows: Sequence[int], num_rows: int, out: int) -> None:
        """
        Writes a head's features, float32 [num_rows, hidden_size], to `out`.

        layer_rows: the target's rows after each layer that the head reads, float32 [num_rows, size].
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
        Writes the keys and values of a head's features into all pools, as the context of the head's blocks.

        positions: the position of each row. The other arguments are as for `forward` and `features`.
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
        Continues each run by lengths[i] ids, and returns these ids.

        With stops, also returns the ids' probabilities; with draws, also their distributions in the form of Sampler.probs, empty for an id that was not drawn. Returns None if a logit is NaN. draws: one for each run, or none; without draws, the id with the largest logit is taken. stops: one for each run, which may end the run earlier, or none. counts: the number of tokens that each run begins with. numbers: as for `forward`, with cache rows for all tokens that are fed. input: for a head, the features of the tokens in `counts`, float32 [tokens, hidden_size]. layer_rows: in place of the features, the target's rows after each layer that the head reads, each of the features' shape. states: as for `forward`, for all tokens that are fed.
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

    bfloat16: whether keys, values and plain rows are bfloat16; otherwise they are float32. matrices: packed matrices with their biases, by the products of blocks.weights(spec); gate and up are paired, and "head" is left out if it is "embedding". vectors: the addresses of the norms' weights and biases, float32, by name. tables: an embedding that is not packed, and learned positions, in the type of plain rows. The caller keeps all weights alive. target: for a head, the model whose embedding the head reads if it has none of its own. ids: the target's token id for each id of the head. Raises ValueError for a spec that `refusal` refuses, and for a missing weight.
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
