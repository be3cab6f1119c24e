"""The sources of an encoder-decoder's sequences: what the encoder has made of them, in the decoder's own KV cache.

A source has a slot of its own, whose rows the blocks that read an encoder have for keys and values. They are written
once, all of them, and never cut. Every row depends on the whole source, so the rows of one are shared by sequences
whose sources are equal, and are found again under a salt that names all of it, which no text has: one that copies its
source would be taken for it. Rows are filled up to whole blocks, because full blocks alone can be found; the last ones
hold nothing, and no run reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from forerun.errors import InternalError
from forerun.kv import KVCache, source_slot
from forerun.ops.model import Model
from forerun.types import Source, salt_of


@dataclass
class _Known:
    """One sequence's source: its tokens, and the salt that its rows are found under."""

    ids: Seq[int]
    salt: str
    is_run: bool = False


class Sources:
    """Which sequences have which sources. model: an encoder-decoder; cache: the decoder's, in which sources lie."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model: Any = model
        self._cache = cache
        self._known: dict[int, _Known] = {}

    def open(self, slot: int, ids: Seq[int], salt: str | None) -> None:
        """Begin a sequence's source, with the rows of an equal one that was run before, if they are there still."""
        if slot in self._known:
            raise InternalError(f"slot {slot} has a source already")
        own = self._known[slot] = _Known(ids, f"{salt_of(ids, salt)} source")
        padded = self._padded(own)
        found = self._cache.open(source_slot(slot), [*padded, 0], own.salt)
        own.is_run = found == len(padded)
        if not own.is_run:  # every row needs the whole source
            self._cache.truncate_to(source_slot(slot), 0)

    def release(self, slot: int) -> None:
        """End a sequence's source; unknown slots are ignored."""
        if self._known.pop(slot, None) is not None:
            self._cache.release(source_slot(slot))

    def slots(self, slots: Iterable[int]) -> list[int]:
        """Return these slots and those of their sources, in the cache."""
        return [own for slot in slots for own in ((slot, source_slot(slot)) if slot in self._known else (slot,))]

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks that a source of so many tokens takes."""
        return -(-num_tokens // self._cache.block_tokens)

    def missing_blocks(self, slot: int) -> int:
        """Return how many blocks a sequence's source will still take."""
        own = self._known.get(slot)
        return 0 if own is None or own.is_run else self.num_blocks(len(own.ids))

    def num_unrun(self, slot: int) -> int:
        """Return the tokens of a sequence's source that the encoder has to run: all of them or none."""
        own = self._known.get(slot)
        return 0 if own is None or own.is_run else len(own.ids)

    def run(self, slots: Seq[int]) -> None:
        """Run the sources of these sequences, those that are equal once. Raises CapacityError without room."""
        first: dict[str, int] = {}
        for slot in slots:
            first.setdefault(self._known[slot].salt, slot)
        for slot in first.values():
            self._cache.reserve(source_slot(slot), len(self._padded(self._known[slot])))
        self._model.begin({source_slot(slot): self._known[slot].ids for slot in first.values()}, self._cache)
        for slot in first.values():
            own = self._known[slot]
            self._cache.keep({source_slot(slot): range(len(self._padded(own)))})
            self._cache.publish(source_slot(slot), self._padded(own))
            own.is_run = True
        for slot in slots:
            if not (own := self._known[slot]).is_run:  # an equal one was run just now
                self._cache.release(source_slot(slot))
                self._cache.fork(source_slot(first[own.salt]), source_slot(slot))
                own.is_run = True

    def of(self, slots: Iterable[int]) -> list[Source]:
        """Return where the sources of these sequences lie. Raises InternalError for one that was not run."""
        found = []
        for slot in slots:
            own = self._known.get(slot)
            if own is None or not own.is_run:
                raise InternalError(f"the source of slot {slot} was not run")
            found.append(Source(source_slot(slot), len(own.ids)))
        return found

    def _padded(self, own: _Known) -> list[int]:
        """Return its tokens, and zeros up to the end of a block."""
        return [*own.ids, *[0] * (-len(own.ids) % self._cache.block_tokens)]
