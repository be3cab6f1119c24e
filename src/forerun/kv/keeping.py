"""The link from a KV cache to its shelf on disk. It writes published blocks, and fetches blocks before requests run.

A cache notifies its `Keeper` of each block that it publishes. The folder's thread copies the block's rows and writes
them later, because the rows of a published block do not change. If the block is withdrawn (evicted, or made private)
before it is written, its rows are copied at once. The keeper is also notified of later uses of a published block,
because used blocks stay on disk longer. If a used block is no longer on disk, it is written again.

A *fetch* takes blocks of the cache for the rows that are on disk and not in memory. Threads read the rows into these
blocks while steps go on. Then the cache publishes the blocks, so that `open` finds them as if another sequence had
published them. A fetch can be given up at any moment. The blocks whose rows were read until then are published. The
other blocks are free at once, without a wait for the disk.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

from forerun.kv.disk import Folder, Place, Shelf
from forerun.kv.prefix import Key

if TYPE_CHECKING:
    from forerun.kv.pool import Pools

LOG = logging.getLogger(__name__)
MOST_COPIED_BYTES = 256 << 20  # of withdrawn blocks that wait to be written; further such blocks are not written
NUM_READERS = 2


class _Waiting(NamedTuple):
    """A published block that is not written yet. uses: the number of its uses since it was published."""

    key: Key
    tokens: Seq[int]
    uses: int


class Missing(NamedTuple):
    """A block that must be fetched from disk. A state of recurrent layers is fetched in the same way.

    kind: the kind of layers; for a state, the number after the last kind. key: the prefix key. block: the block (or
    state) of the cache to which the rows are written. place: the place of the rows on disk.
    """

    kind: int
    key: Key
    block: int
    place: Place


class Fetch:
    """A read of blocks from disk by several threads.

    slot: the slot in which the cache holds the blocks until their rows are read. loaded: the blocks whose rows were
    read. readers: the running reads, one for each thread.
    """

    def __init__(self, slot: int, pools: Pools) -> None:
        self.slot, self.loaded = slot, list[Missing]()
        self.readers: Seq[Future[None]] = ()
        self._pools, self._is_given_up = pools, False
        self._loading = [threading.Lock() for _ in range(NUM_READERS)]

    @property
    def is_over(self) -> bool:
        """Whether all threads have finished reading."""
        return all(reader.done() for reader in self.readers)

    def wait(self) -> None:
        """Wait until all threads have finished reading."""
        wait(self.readers)

    def load(self, reader: int, missing: Missing, rows: memoryview) -> bool:
        """Write `rows` to the block of `missing` unless the fetch was given up. Returns whether the fetch goes on.

        reader: the index in `readers` of the read that calls this method.
        """
        with self._loading[reader]:
            if not self._is_given_up:
                self._pools.load(missing.kind, missing.block, rows)
                self.loaded.append(missing)
            return not self._is_given_up

    def give_up(self) -> None:
        """End the fetch: no block is written to after this call.

        The call waits for blocks that are being written at the moment. It does not wait for threads that are reading
        from disk, because each thread reads into a buffer of its own.
        """
        self._is_given_up = True
        for lock in self._loading:
            with lock:
                pass  # until the block that is being written just now is whole
        for reader in self.readers:
            reader.cancel()


class Keeper:
    """The link between one cache and its shelf on disk: it writes published blocks there, and fetches blocks."""

    def __init__(self, pools: Pools, shelf: Shelf) -> None:
        self.shelf, self._pools = shelf, pools
        self._waiting: dict[tuple[int, int], _Waiting] = {}  # by kind and block
        self._copied: deque[tuple[int, _Waiting, memoryview]] = deque()
        self._copied_bytes = 0
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="forerun-kv-read")
        self._buffer = _buffer(shelf)
        shelf.folder.add(self._write_some)

    @property
    def folder(self) -> Folder:
        """The folder of the shelf."""
        return self.shelf.folder

    # -------------------------------------------------------------------------------------------------------- writing

    def used(self, kind: int, block: int, key: Key, tokens: Seq[int]) -> None:
        """Count a use of a published block. If the block is not on disk, queue it for the writing thread.

        kind: the block's kind of layers, as an index. key: the block's prefix key. tokens: the block's tokens.
        """
        if not self.folder.is_writable or self.shelf.use(kind, key):
            return
        with self._lock:
            waiting = self._waiting.get((kind, block))
            self._waiting[kind, block] = _Waiting(key, list(tokens), 0 if waiting is None else waiting.uses + 1)
        self.folder.wake()

    def withdrawn(self, kind: int, block: int) -> None:
        """Copy the rows of a block that waits to be written, before the cache overwrites them.

        If the copies take MOST_COPIED_BYTES already, the rows are not copied, and the block is never written.
        """
        with self._lock:
            waiting = self._waiting.pop((kind, block), None)
            if waiting is not None and self._copied_bytes < MOST_COPIED_BYTES:
                rows = memoryview(bytearray(self.shelf.record_bytes[kind]))
                self._pools.save(kind, block, rows)
                self._copied.append((kind, waiting, rows))
                self._copied_bytes += rows.nbytes

    def _write_some(self) -> bool:
        """Write one waiting block and return True. If no block waits, write the numbers of uses and return False."""
        with self._lock:
            block = self._next()
        if block is None:
            self.shelf.write_uses()
            return False
        kind, waiting, rows = block
        self.shelf.write(kind, waiting.key, waiting.tokens, rows, waiting.uses)
        return True

    def _next(self) -> tuple[int, _Waiting, memoryview] | None:
        """Return the next block to write: its kind, its entry in the queue and its rows; None if no block waits.

        Blocks that the cache has withdrawn are returned first.
        """
        if self._copied:
            kind, waiting, rows = self._copied.popleft()
            self._copied_bytes -= rows.nbytes
        elif self._waiting:
            (kind, block), waiting = next(iter(self._waiting.items()))
            del self._waiting[kind, block]
            rows = self._buffer[: self.shelf.record_bytes[kind]]
            self._pools.save(kind, block, rows)
        else:
            return None
        return kind, waiting, rows

    # -------------------------------------------------------------------------------------------------------- reading

    def fetch(self, slot: int, blocks: Seq[Missing]) -> Fetch:
        """Begin to read the rows of these blocks. Nothing else may read or write the blocks until the fetch is over."""
        share = -(-len(blocks) // NUM_READERS)
        parts = [blocks[first : first + share] for first in range(0, len(blocks), share)]
        fetch = Fetch(slot, self._pools)
        fetch.readers = [self._readers.submit(self._read, fetch, reader, part) for reader, part in enumerate(parts)]
        return fetch

    def _read(self, fetch: Fetch, reader: int, blocks: Seq[Missing]) -> None:
        buffer = _buffer(self.shelf)
        try:
            for missing in blocks:
                rows = buffer[: missing.place.entry.num_bytes]
                is_right = self.shelf.read(missing.kind, missing.key, missing.place, rows)
                if is_right and not fetch.load(reader, missing, rows):
                    return
        except Exception:  # the model computes the rows that were not read
            LOG.exception("kv_disk %s: rows were not read", self.folder.path)


def _buffer(shelf: Shelf) -> memoryview:
    """Allocate a buffer that is large enough for the rows of one block of any kind."""
    return memoryview(bytearray(max(shelf.record_bytes)))
