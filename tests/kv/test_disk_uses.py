"""What a full folder keeps: blocks that were used, wherever they were found, and a text's beginning before its end."""

import os
import random
import signal
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from forerun.blocks import CacheShape
from forerun.kv import fetch_slot
from forerun.kv.cache import BlockCache
from forerun.kv.disk import Folder, kept
from forerun.kv.keeping import Keeper
from forerun.kv.prefix import keys_of
from forerun.kv.segments import ENTRIES, ENTRY_BYTES, ROWS, remove
from forerun.models.runner import Run, pack

SHAPE = CacheShape(num_layers=1, num_kv_heads=1, head_dim=4)
FOLDER_BYTES = 1 << 18  # of a folder that holds some 6,000 tokens
ROWS_OF_ONE = memoryview(bytes(512))


class Process:
    """A cache beside a shelf. Blocks are written by `idle` alone, so that nothing depends on when a thread runs."""

    def __init__(self, path: Path, num_tokens: int = 2048) -> None:
        self.folder = Folder(path, FOLDER_BYTES)
        self.cache = BlockCache.create(SHAPE, "paged", max_batch_size=4, max_seq_len=512, num_tokens=num_tokens)
        self.shelf = self.folder.shelf(["x"], [self.cache.pools.record_bytes(0)])
        self.cache.keep_on_disk(Keeper(self.cache.pools, self.shelf))
        self._write = self.folder._jobs.pop()

    def idle(self) -> None:
        """Let the thread write what waits."""
        while self._write():
            pass

    def run(self, tokens: list[int], slot: int = 0) -> int:
        """Run what is not found of a text, and publish it; returns how many tokens came from disk."""
        num_fetched = 0
        if (fetch := self.cache.fetch(fetch_slot(0), tokens)) is not None:
            fetch.wait()
            num_fetched = self.cache.arrived(fetch)
        rest = tokens[self.cache.open(slot, tokens) :]
        self.cache.reserve(slot, len(rest))
        self.cache.view(pack([Run(slot, rest)], self.cache))
        self.cache.keep({slot: range(len(rest))})
        return num_fetched

    def ask(self, tokens: list[int]) -> int:
        """Run a text, publish it and end. Returns how many tokens came from disk."""
        num_fetched = self.run(tokens)
        self.cache.publish(0, tokens)
        self.cache.release(0)
        self.idle()
        return num_fetched

    def close(self) -> None:
        """End as a process does that writes what waits."""
        self.idle()
        self.folder.close()

    def left(self, *texts: list[int]) -> list[int]:
        """End; returns how many tokens of each text a new process finds, of those whose blocks are full."""
        self.close()
        nums = []
        for tokens in texts:
            process = Process(self.folder.path)
            nums.append(process.ask([*tokens, 0]))
            process.close()
        return nums


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path / "kv")


def texts(seed: int) -> Iterator[list[int]]:
    """Texts of 160 tokens of which no two begin alike."""
    chance = random.Random(seed)
    while True:
        yield [chance.randrange(1000) for _ in range(160)]


OTHERS = texts(1)
SHARED, ONCE = next(OTHERS), next(OTHERS)
TURNOVER = 40  # other texts that fill a folder


def ask_others(process: Process, num: int = TURNOVER) -> None:
    for _ in range(num):
        process.ask(next(OTHERS))


@pytest.mark.parametrize("num_tokens", [512, 65536], ids=["memory loses it", "it stays in memory"])
def test_what_many_begin_with_is_found_behind_a_restart(tmp_path: Path, num_tokens: int) -> None:
    process = Process(tmp_path / "kv", num_tokens)
    process.ask(ONCE)
    for number in range(4 * TURNOVER // 5):
        process.ask([*SHARED, *range(number, number + 32)])
        ask_others(process, 5)
    assert process.left(SHARED, ONCE) == [160, 0]


def test_uses_are_known_to_later_processes(tmp_path: Path, process: Process) -> None:
    process.ask(ONCE)
    for _ in range(3):
        process.ask(SHARED)
    process.close()
    process = Process(tmp_path / "kv")
    ask_others(process, 2 * TURNOVER)
    assert process.left(ONCE, SHARED) == [0, 160]


def test_what_nobody_uses_any_more_goes(process: Process) -> None:
    for _ in range(100):
        process.ask(SHARED)
    ask_others(process, 6 * TURNOVER)
    assert process.left(SHARED) == [0]


def test_what_several_compute_at_the_same_time_is_used_by_all(process: Process) -> None:
    for slot in range(3):
        process.run(SHARED, slot)
    for slot in range(3):
        process.cache.publish(slot, SHARED)
        process.cache.release(slot)
    ask_others(process, 2 * TURNOVER)
    assert process.left(SHARED) == [160]


def test_a_beginning_stays_as_long_as_what_goes_on_behind_it(tmp_path: Path) -> None:
    """The second half of a text is written when the folder has been filled up behind the first."""
    process = Process(tmp_path / "kv", 65536)
    process.ask(ONCE)
    ask_others(process, TURNOVER * 2 // 3)
    process.ask([*ONCE, *SHARED])
    ask_others(process, TURNOVER * 2 // 3)
    assert process.left([*ONCE, *SHARED]) == [320]


def test_of_more_than_can_be_carried_the_most_used_stays(process: Process) -> None:
    many = [next(OTHERS) for _ in range(TURNOVER)]
    for number, text in enumerate(many):
        for _ in range(2 if number % 5 else 4):
            process.ask(text)
    for _ in range(TURNOVER // 2):  # half of what is written are blocks that are carried
        text = next(OTHERS)
        process.ask(text)
        process.ask(text)
    assert set(process.left(*many[15::5])) == {160}
    assert sum(process.left(*many)) < 160 * TURNOVER // 2


def test_the_folder_keeps_to_its_size_while_blocks_are_carried(process: Process) -> None:
    for _ in range(3 * TURNOVER):
        text = next(OTHERS)
        process.ask(text)
        process.ask(text)
        assert sum(size for _, size, _ in process.folder.segments()) <= FOLDER_BYTES + len(text) // 16 * ENTRY_BYTES
    process.close()
    assert len(process.folder.segments()) < 32, "what is carried from several segments goes to one"


def test_what_is_in_memory_and_on_disk_no_more_is_written_when_it_is_used(process: Process) -> None:
    process.ask(SHARED)
    for path, _, _ in process.folder.segments():
        remove(path)
    process.shelf._looked_at = 0  # else it looks a fifth of a second later
    process.ask([*SHARED, 0])
    assert process.left(SHARED) == [160]


def test_nothing_is_written_to_a_segment_that_another_process_has_removed(process: Process) -> None:
    """Though the shelf has not been looked at since."""
    process.ask(ONCE)
    for path, _, _ in process.folder.segments():
        remove(path)
    process.shelf._looked_at = time.monotonic() + 100
    process.ask(SHARED)
    assert process.left(SHARED) == [160]


def test_a_segment_may_be_removed_while_it_is_written(tmp_path: Path) -> None:
    """One thread writes, another sees that the files are gone: no descriptor is closed under the one that writes."""
    folder = Folder(tmp_path / "kv", 1 << 30)
    shelf, written = folder.shelf(["x"], [512]), list[int]()

    def write() -> None:
        for number in range(2000):
            shelf.write(0, b"%d" % number, range(16), ROWS_OF_ONE)
            written.append(number)

    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive():
        for path, _, _ in folder.segments():
            remove(path)
        shelf._looked_at = 0
        shelf.refresh()
    assert len(written) == 2000
    assert folder.is_writable
    folder.close()


def test_rows_without_entries_go_in_their_turn(process: Process) -> None:
    """They are what a process leaves that is killed while it removes a segment."""
    process.ask(ONCE)
    (path,) = process.shelf.path.glob(f"*{ENTRIES}")
    path.unlink()
    ask_others(process, 2 * TURNOVER)
    process.close()
    assert not path.with_suffix(ROWS).exists()


def test_files_of_before_uses_were_counted_are_read(process: Process) -> None:
    """A byte that was 0 counts the uses; everything else is where it was."""
    process.ask(SHARED)
    process.ask(SHARED)
    process.close()
    (path,) = process.shelf.path.glob(f"*{ENTRIES}")
    entry, data, uses = struct.Struct("<32s64sB3xIQQ"), path.read_bytes(), list[int]()
    for at in range(0, len(data), ENTRY_BYTES):
        old = entry.pack(*entry.unpack_from(data, at))
        uses += [one ^ other for one, other in zip(data[at : at + entry.size], old, strict=True) if one != other]
        data = data[:at] + old + struct.pack("<Q", xxhash.xxh3_64_intdigest(old)) + data[at + ENTRY_BYTES :]
    assert uses == [1] * 10
    path.write_bytes(data)
    assert process.left(SHARED) == [160]


def test_a_process_may_be_killed_while_it_carries_blocks(tmp_path: Path) -> None:
    """Each turn another child writes until it is killed; what all of them use is never lost, nor anything damaged."""
    chance, keys = random.Random(2), keys_of([*SHARED, 0], None, 16)

    def write(seed: int) -> None:
        shelf = Folder(tmp_path / "kv", FOLDER_BYTES).shelf(["x"], [512])
        for number in range(10**9):
            for key in keys:
                shelf.write(0, key, range(16), ROWS_OF_ONE)
            shelf.write_uses()
            shelf.write(0, b"%d %d" % (seed, number), range(16), ROWS_OF_ONE)

    for seed in range(12):
        if (child := os.fork()) == 0:
            try:
                write(seed)
            finally:
                os._exit(1)
        while seed == 0 and not _has_all(tmp_path / "kv", keys):
            time.sleep(0.01)
        time.sleep(0.02 + chance.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert _has_all(tmp_path / "kv", keys)
    (one,) = kept(tmp_path / "kv", verifies=True)
    assert one.num_damaged == 0
    assert one.num_bytes < 2 * FOLDER_BYTES


def _has_all(path: Path, keys: list[bytes]) -> bool:
    folder = Folder(path, FOLDER_BYTES)
    shelf = folder.shelf(["x"], [512])
    folder.close()
    return all(shelf.find(0, key, range(16)) is not None for key in keys)
