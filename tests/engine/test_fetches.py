"""Rows on their way from disk hold blocks of too small a cache: who has no room gives way, and nobody is ended."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.load import alone, assert_empty, caches, check, engine_with, mixed, plain, run, wait_for
from forerun.engine.engine import Engine, philox_coins
from forerun.engine.request import Request
from forerun.errors import CapacityError
from forerun.kv import SCRATCH_SLOT
from forerun.kv.disk import Folder, Shelf
from forerun.kv.keeping import Fetch
from forerun.types import Coins, SamplingParams, Sequence

pytestmark = pytest.mark.once("its requests choose their drafters")

PROMPT = [i % 13 for i in range(40)]  # two blocks and a half


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """A disk that reads a block for each ticket, and as many as there are where a step can do nothing but wait."""
    tickets, read, wait = threading.Semaphore(0), Shelf.read, Fetch.wait

    def slow(self: Shelf, *given: Any) -> bool:
        tickets.acquire()
        return read(self, *given)

    def patient(self: Fetch) -> None:
        tickets.release(64)
        wait(self)
        while tickets.acquire(blocking=False):
            pass

    monkeypatch.setattr(Shelf, "read", slow)
    monkeypatch.setattr(Fetch, "wait", patient)
    yield tickets
    tickets.release(10_000)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Folder]:
    """A folder that has the blocks of PROMPT."""
    folder = Folder(tmp_path / "kv", 1 << 30)
    run(engine := engine_with(folder=folder), [engine.add(PROMPT, plain(1, draft="model"))])
    folder.close()
    yield (folder := Folder(tmp_path / "kv", 1 << 30))
    folder.close()


@pytest.fixture
def engine(kept: Folder, disk: threading.Semaphore) -> Engine:
    """One of eight blocks, beside a disk that has those of PROMPT."""
    return engine_with(128, folder=kept)


@pytest.mark.parametrize("draft", ["none", "model"])
def test_a_request_that_grows_takes_the_blocks_of_what_is_fetched_for_another(engine: Engine, draft: str) -> None:
    """Eight blocks: one request fills them all, while two of them are on their way from a disk that never answers."""
    first = engine.add([1] * 60, plain(60, draft=draft))
    engine.step()
    late = engine.add(PROMPT, plain(4, draft=draft))
    engine.step()
    assert late.num_fetching == 1 + (draft == "model")
    run(engine, [first])
    assert (first.error, first.report.num_preemptions) == (None, 0)
    assert late.num_fetching == 0, "its fetch was given up"
    assert run(engine, [first, late]) == alone([([1] * 60, plain(60)), (PROMPT, plain(4))])
    assert_empty(*caches(engine))


def test_who_comes_later_gives_way_to_what_is_fetched_for_an_earlier_one(engine: Engine) -> None:
    worse = engine.add([1] * 60, plain(60, priority=1))
    engine.step()
    late = engine.add(PROMPT, plain(4))
    engine.step()
    while not worse.report.num_preemptions:
        assert late.num_fetching == 1
        engine.step()
    assert run(engine, [worse, late]) == alone([([1] * 60, plain(60)), (PROMPT, plain(4))])
    assert late.report.num_disk_tokens == 32


def test_who_comes_before_does_not_wait_for_what_is_fetched_for_a_later_one(engine: Engine) -> None:
    """Eight blocks: one runs, and may grow by one; two are on their way; the urgent prompt takes six."""
    running = engine.add([1], plain(20))
    engine.step()
    late = engine.add(PROMPT, plain(4))
    engine.step()
    assert late.num_fetching == 1
    urgent = engine.add([2] * 90, plain(2, priority=-1))
    engine.step()
    assert engine.scheduler.running == [urgent, running]
    assert run(engine, [running, urgent, late])[0] == alone([([1], plain(20))])[0]


def test_an_aborted_request_leaves_nothing_of_its_fetch(engine: Engine) -> None:
    other = engine.add([1], plain(9))
    late = engine.add(PROMPT, plain(4))
    engine.step()
    assert late.num_fetching == 1
    engine.abort(late)
    engine.abort(other)
    assert_empty(*caches(engine))


def test_a_preempted_request_is_sought_on_disk_again(kept: Folder) -> None:
    """What it had run is written there, and what takes its place pushes it out of memory."""
    engine = engine_with(128, folder=kept, max_batch_size=1)
    late = engine.add([5] * 40, plain(30, priority=1))
    while late.seq.num_output_tokens < 9:
        engine.step()
    urgent = engine.add([7] * 100, plain(20))
    engine.step()
    keeper = caches(engine)[0].keeper
    wait_for(lambda: keeper is None or len(keeper.shelf) >= 2 + 3)  # those of PROMPT, and what the request had filled
    assert run(engine, [late, urgent]) == alone([([5] * 40, plain(30)), ([7] * 100, plain(20))])
    assert late.report.num_preemptions == 1
    assert late.num_fetched == 48


def test_a_pass_that_has_less_room_than_was_counted_ends_nobody() -> None:
    """Something takes all blocks between the plan and the pass, once; who gave way is let in behind the next step."""
    taken = list[int]()

    def coins(seq: Sequence) -> Coins:
        cache = engine.runner.cache
        if not taken and first.seq.num_output_tokens == 16:  # its next token needs a block
            taken.append(cache.free_tokens())
            cache.open(SCRATCH_SLOT)
            cache.reserve(SCRATCH_SLOT, taken[0])
        return philox_coins(seq)

    engine = engine_with(coins=coins, prefix_caching=False)
    wanted = [([1] * 17, plain(20)), ([2] * 20, plain(20))]
    first, second = (engine.add(*one) for one in wanted)
    while not taken:
        assert second.report.num_preemptions == 0
        engine.step()
    assert engine.scheduler.running == [first]
    engine.runner.cache.release(SCRATCH_SLOT)
    engine.step()
    assert first.seq.num_output_tokens == 17
    assert engine.scheduler.waiting == [second], "what is counted was wrong just now"
    assert run(engine, [first, second]) == alone(wanted)


def test_a_request_for_which_nobody_could_make_room_fails_by_itself() -> None:
    engine = engine_with()
    request = engine.add([1] * 17, plain(20))
    while request.seq.num_output_tokens < 16:
        engine.step()
    engine.runner.cache.open(SCRATCH_SLOT)
    engine.runner.cache.reserve(SCRATCH_SLOT, engine.runner.cache.free_tokens())
    with pytest.raises(CapacityError, match="16 are needed"):
        engine.step()


# ------------------------------------------------------------------------------------------------------------- load


def arrivals(seed: int, num: int) -> list[tuple[list[int], SamplingParams]]:
    """Mixed requests, a fifth of which are beam searches."""
    random_, made = random.Random(seed), mixed(seed, num)
    search = plain(20, num_beams=3, ignore_eos=False)
    return [(prompt, search if random_.random() < 0.2 else params) for prompt, params in made]


@pytest.mark.speculation("off", "auto")
@pytest.mark.parametrize(("seed", "num"), [(0, 40), pytest.param(1, 1000, marks=pytest.mark.parity)])
def test_random_arrivals_and_aborts_on_a_slow_disk_end_nobody_else(
    tmp_path: Path, disk: threading.Semaphore, seed: int, num: int
) -> None:
    """The disk answers at random: some fetches are over before their request is let in, others are given up."""
    random_, folder = random.Random(seed), Folder(tmp_path / "kv", 1 << 30)
    engine = engine_with(random_.choice((128, 144)), folder=folder, prefill_chunk_tokens=random_.choice((16, 64)))
    wanted = arrivals(seed, num)
    requests, aborted = list[Request](), set[Request]()
    while len(requests) < num or engine.scheduler.running or engine.scheduler.waiting:
        if len(requests) < num and random_.random() < 0.15:
            requests += engine.add_all(*wanted[len(requests)])
        if requests and random_.random() < 0.05 and (victim := random_.choice(requests)).seq.finish_reason is None:
            engine.abort(victim)
            aborted.add(victim)
        if random_.random() < 0.02:
            disk.release(4)
        engine.step()
        check(engine)
    assert sum(request.report.num_disk_tokens > 0 for request in requests) > num // 10
    assert {request for request in requests if request.seq.finish_reason == "abort"} == aborted
    assert_empty(*caches(engine))
    folder.close()
