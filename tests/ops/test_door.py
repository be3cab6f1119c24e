"""Numbers that do not hold together are refused before a kernel follows them: nothing ends the process by a signal.

Each test changes a call that is right. The checks are the same for every instruction set.
"""

import ctypes
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from forerun.blocks import Spec
from forerun.errors import InternalError
from forerun.kv.cache import BlockCache
from forerun.models.opened import read_config
from forerun.models.runner import Run, Runner, pack
from forerun.ops.cpu.packed import run_numbers
from forerun.ops.passes import end_of
from forerun.sampling.arithmetic import native_sampler
from forerun.types import RaggedBatch, Source
from ops.native_cases import FLOAT32, ISAS, make_config, needs_native, ops_of, random_weights
from refusals import refusal
from tensors import load_model

pytestmark = needs_native

REFUSED = (InternalError, IndexError, ValueError, TypeError)  # TypeError: what is no number of so many bits
T5 = {"model_type": "t5", "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4,
      "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}  # fmt: skip
SPECS: dict[str, Callable[[], Spec]] = {
    "windows": lambda: make_config(windows=(None, 20)),
    "sources": lambda: read_config(T5),
}
MOST = 2**31 - 1
Path = tuple[Any, ...]  # keys and indices, from the arguments to a number


class Good:
    """A call of a model of two blocks that is right: two sequences behind 20 tokens, of which one may be a tree."""

    def __init__(self, name: str) -> None:
        spec = SPECS[name]()
        self.model: Any = load_model(spec, random_weights(spec, FLOAT32), ops_of(ISAS[0]))
        self.cache = BlockCache.create(spec.cache_shape, "paged", max_batch_size=4, max_seq_len=96)
        self.runner = Runner(self.model, self.cache)
        for slot in (0, 1):
            self.cache.open(slot)
            if (sources := self.runner.sources) is not None:
                sources.open(slot, range(3, 25 + slot), None)
                sources.run([slot])
        self.runner.forward([Run(slot, [*range(1, 21)], "none") for slot in (0, 1)])
        self.cache.keep({0: range(20), 1: range(20)})
        for slot in (0, 1):
            self.cache.reserve(slot, 5)
        self.hidden, self.tap = torch.empty(2, 5, spec.hidden_size)

    def batch(self, parents: list[int] | None = None) -> RaggedBatch:
        return pack([Run(0, [5, 6, 7], parents=parents), Run(1, [8, 9])], self.cache, self.runner.sources)

    def arguments(self, batch: RaggedBatch) -> dict[str, Any]:
        """What both calls take."""
        tokens, positions = batch.ids()
        numbers = [run_numbers(batch, kind.tables(batch)) for kind in self.cache.kinds]
        common = {"tokens": tokens, "positions": positions, "rotations": self.model._turns(end_of(batch) + 8)}
        common |= {"numbers": numbers, "pools": self.cache.pools.native, "layers": [0, 1]}
        return common | {"sources": self.model._sources(batch, self.cache)}

    def of_forward(self, parents: list[int] | None = None) -> dict[str, Any]:
        given = self.arguments(self.batch(parents)) | {"num_runs": 2, "is_normed": True, "input": 0}
        return given | {"taps": [(1, self.tap.data_ptr())], "hidden": self.hidden.data_ptr()}

    def of_run_ahead(self) -> dict[str, Any]:
        batch = self.batch()
        given = self.arguments(dataclasses.replace(batch, run_starts=[0, 5, 9]))
        given |= {"tokens": batch.tokens, "positions": batch.positions, "counts": [3, 2], "lengths": [3, 3]}
        return given | {"num_ids": 70}

    def call(self, given: dict[str, Any]) -> Any:
        call = self.model._native.forward if "num_runs" in given else self.model._native.run_ahead
        return call(**given)


def changed(value: Any, path: Path, number: Any) -> Any:
    """The same arguments with another number in one place; a list is copied on the way."""
    if not path:
        return number
    parts = dict(value) if isinstance(value, dict) else list(value)
    parts[path[0]] = changed(parts[path[0]], path[1:], number)
    return tuple(parts) if isinstance(value, tuple) else parts


@pytest.fixture(scope="module", params=SPECS)
def good(request: pytest.FixtureRequest) -> Good:
    return Good(request.param)


FIRST, NUM_ROWS, CACHED, PENDING, TABLE, PARENTS = range(6)  # of the six numbers of a run
WRONG: list[tuple[Path, Any, type[Exception], str]] = [
    (("tokens", 0), -1, IndexError, "no token with the id -1"),
    (("tokens", 4), 97, IndexError, "no token with the id 97"),
    (("tokens",), [5, 6, 7, 8], ValueError, "every token needs a position"),
    (("positions", 1), -1, IndexError, "no position -1"), (("num_runs",), -1, InternalError, "six numbers"),
    (("num_runs",), 1, InternalError, "needs a run"), (("num_runs",), MOST, InternalError, "six numbers"),
    (("numbers",), [], ValueError, "every kind of pools"), (("numbers", 0), [], InternalError, "six numbers"),
    (("numbers", 0, FIRST), 1, InternalError, "one behind the other"),
    (("numbers", 0, FIRST), -1, InternalError, "less than no rows"),
    (("numbers", 0, NUM_ROWS), 2, InternalError, "one behind the other"),
    (("numbers", 0, NUM_ROWS), MOST, InternalError, "ends before its rows do"),
    (("numbers", 0, CACHED), -1, InternalError, "less than no rows"),
    (("numbers", 0, CACHED), 2000, InternalError, "ends before its rows do"),
    (("numbers", 0, PENDING), -1, InternalError, "less than no rows"),
    (("numbers", 0, PENDING), MOST, InternalError, "ends before its rows do"),
    (("numbers", 0, TABLE), 11, InternalError, "ends before its rows do"),
    (("numbers", 0, TABLE), MOST, InternalError, "ends before its rows do"),
    (("numbers", 0, PARENTS), 1, InternalError, "fewer parents"),
    (("numbers", 0, PARENTS), MOST, InternalError, "fewer parents"),
    (("numbers", 0, 12), -1, InternalError, "run 0 of a pass has a block that its cache has not"),
    (("numbers", 0, 14), 1000, InternalError, "run 1 of a pass has a block that its cache has not"),
    (("layers",), [-1, 0], InternalError, "layers must ascend"),
    (("layers",), [0, 2], InternalError, "layers must ascend"),
    (("layers",), [1, 0], InternalError, "layers must ascend"), (("taps", 0, 0), -1, InternalError, "taps must ascend"),
    (("taps", 0, 0), 3, InternalError, "taps must ascend"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "number", "error", "words"), WRONG)
def test_a_wrong_number_of_a_pass_is_refused(
    good: Good, path: Path, number: Any, error: type[Exception], words: str
) -> None:
    given = wrong = good.of_forward()
    good.call(given)
    for kind in range(len(given["numbers"]) if path[0] == "numbers" and len(path) > 2 else 1):
        wrong = changed(wrong, ("numbers", kind, *path[2:]) if kind else path, number)
    assert words in refusal(error, good.call, wrong)


@pytest.mark.parametrize("parent", [1, 2, -2, MOST])
def test_a_node_comes_behind_its_parent(good: Good, parent: int) -> None:
    given = good.of_forward([-1, 0, 0])
    at = given["numbers"][0][PARENTS]
    assert at > 0
    good.call(given)
    with pytest.raises(InternalError, match="comes before its parent"):
        good.call(changed(given, ("numbers", 0, at + 1), parent))


@pytest.mark.parametrize(
    ("path", "number", "error", "words"),
    [
        (("counts", 0), 0, ValueError, "all that is wanted"),
        (("lengths", 0), MOST, ValueError, "all that is wanted"),
        (("num_ids",), 0, InternalError, "ids that are there"),
        (("layers",), [5], InternalError, "layers must ascend"),
        (("numbers", 0, CACHED), 2000, InternalError, "ends before its rows do"),
    ],
)
def test_a_wrong_number_of_runs_that_are_continued_is_refused(
    good: Good, path: Path, number: Any, error: type[Exception], words: str
) -> None:
    given = good.of_run_ahead()
    good.call(given)
    assert words in refusal(error, good.call, changed(given, path, number))


@pytest.mark.parametrize(
    ("at", "number", "words"),
    [(CACHED, 1000, "ends before its rows do"), (CACHED, -1, "less than no rows"), (TABLE, MOST, "ends before"),
     (12, -1, "a block that its cache has not"), (12, 1000, "a block that its cache has not"),
     (NUM_ROWS, 1, "and no others"), (PENDING, 1, "and no others"), (PARENTS, 12, "and no others")],
)  # fmt: skip
def test_a_wrong_number_of_a_source_is_refused(at: int, number: int, words: str) -> None:
    good = Good("sources")
    for given in (good.of_forward(), good.of_run_ahead()):
        good.call(given)
        assert words in refusal(InternalError, good.call, changed(given, ("sources", at), number))
        assert "six numbers" in refusal(InternalError, good.call, given | {"sources": given["sources"][:6]})
        assert "sees a source needs one" in refusal(ValueError, good.call, given | {"sources": []})


def test_a_source_of_other_tokens_than_were_run_is_refused() -> None:
    good = Good("sources")
    batch = good.batch()
    wrong = [Source(batch.sources[0].slot, 10**6), batch.sources[1]]
    with pytest.raises(InternalError, match="run 0 of a pass has a block table that ends before its rows do"):
        good.model.forward(dataclasses.replace(batch, sources=wrong), good.cache)


def test_kinds_of_layers_agree_on_their_runs_and_tables_of_rotations_are_long_enough() -> None:
    good = Good("windows")
    given = good.of_forward()
    for at in (FIRST, NUM_ROWS, CACHED):
        with pytest.raises(InternalError, match="differ in their rows of the cache alone"):
            good.call(changed(given, ("numbers", 1, at), given["numbers"][1][at] + 1))
    (rows, _), *_ = given["rotations"]
    assert "no position 22" in refusal(IndexError, good.call, given | {"rotations": [(rows, 22)]})
    assert "every kind of rotation" in refusal(ValueError, good.call, given | {"rotations": []})


def test_pools_of_another_model_are_refused(good: Good) -> None:
    """Of fewer blocks, or of other heads."""
    for changes in ({"num_layers": 1}, {"head_dim": 12}):
        pools = BlockCache.create(make_config(**changes).cache_shape, "paged", max_batch_size=4, max_seq_len=96).pools
        assert "pool" in refusal(InternalError, good.call, good.of_forward() | {"pools": pools.native})


def test_rows_and_blocks_that_a_cache_has_not_are_refused(good: Good) -> None:
    pools = good.cache.pools
    num_blocks = good.cache.num_blocks
    rows = memoryview(bytearray(pools.record_bytes(0)))
    for move in (pools.save, pools.load):
        move(0, num_blocks - 1, rows)
        for block in (-1, num_blocks, MOST):
            assert "no such block" in refusal(InternalError, move, 0, block, rows)
        assert "as many as its rows have" in refusal(InternalError, move, 0, 0, rows[:-1])
    pools.copy([0], [16 * num_blocks - 1])
    for sources, targets in (([16 * num_blocks], [0]), ([0], [16 * num_blocks]), ([0, 1], [0])):
        assert "row" in refusal(InternalError, pools.copy, sources, targets)


def test_rows_of_another_shape_are_refused(good: Good) -> None:
    """What native calls read is as wide and as long as they take it to be."""
    model, width = good.model, good.hidden.shape[1]
    for call in (model.norm, model.logits, lambda hidden: model.best(hidden, [0], 70)):
        assert "do not fit" in refusal(InternalError, call, torch.empty(2, width - 1))
    for row in (-1, 2):
        assert "rows and ids that are there" in refusal(InternalError, model.best, torch.zeros(2, width), [0, row], 70)
    with pytest.raises(InternalError, match="is not the shape"):
        model.run_ahead(good.batch(), [1, 1], good.cache, 70, hidden=good.hidden[:-1])


def test_rows_of_a_packed_matrix_are_those_that_it_has() -> None:
    ops = ops_of(ISAS[0])
    packed = ops.pack(torch.ones(40, 8))
    out = (ctypes.c_float * 8)()
    for row in (-1, 40, MOST):
        assert "no such rows" in refusal(InternalError, packed.handle.unpack_row, row, ctypes.addressof(out))
    for first, count in ((-1, 1), (39, 2), (0, 41), (MOST, MOST)):
        assert "no such rows" in refusal(InternalError, ops.backend.fill, packed.handle, first, count, [0] * 5)
        with pytest.raises(InternalError, match="no such rows"):
            ops.backend.fill_stored(packed.handle, first, count, 0, -1, 0, 0)


def test_a_race_has_an_id_for_each_weight() -> None:
    native = native_sampler()
    weights = torch.full((5,), 0.2).numpy()
    assert native.race(weights, torch.arange(5).numpy(), 1, 2) is not None
    for num in (0, 4, 6):
        with pytest.raises(InternalError, match="every weight of a race needs an id"):
            native.race(weights, torch.arange(num).numpy(), 1, 2)


def numbers_in(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where the numbers of a call are, without addresses and sizes of memory."""
    if isinstance(value, dict):
        for name in value.keys() - {"pools", "rotations", "input", "hidden", "is_normed"}:
            yield from numbers_in(value[name], (name,))
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from numbers_in(part, (*path, i))
    elif isinstance(value, int) and value < 2**32:
        yield path


@pytest.mark.parametrize("kind", ["chain", "tree", "ahead"])
def test_whatever_one_number_is_a_pass_ends_with_a_result_or_an_exception(good: Good, kind: str) -> None:
    chance = random.Random(kind)
    given = good.of_run_ahead() if kind == "ahead" else good.of_forward([-1, 0, 0] if kind == "tree" else None)
    places = sorted(numbers_in(given), key=str)
    num_refused = 0
    for _ in range(1500):
        number = chance.choice([-1, 0, 1, 7, 17, 100, MOST, -MOST, 2**40, chance.randrange(64)])
        try:
            good.call(changed(given, chance.choice(places), number))
        except REFUSED:
            num_refused += 1
    assert 0 < num_refused < 1500
