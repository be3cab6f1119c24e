"""The encoder inputs (sources) of an encoder-decoder's sequences, kept in the decoder's KV cache.

A source is, for example, a text to translate. Each source has a separate slot in the KV cache. The rows of the slot are
the keys and values of the cross-attention blocks, made from the encoder's output. All rows of a source are written once
and never truncated. Every row depends on the whole source, so sequences share rows only if their sources are equal. The
prefix cache finds rows under a key, and a part of this key, the salt, identifies the whole source. No text has such a
salt, so a text that copies its source never gets the source's rows. Rows are padded to whole blocks, because the prefix
cache finds only whole blocks. The padding rows hold no data, and no run reads them.
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
    """The source of one sequence: its token ids, its salt (see the module), and whether the encoder has run it."""

    ids: Seq[int]
    salt: str
    is_run: bool = False


class Sources:
    """Keeps the source of each sequence. model: an encoder-decoder. cache: the decoder's cache, which holds sources."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model: Any = model
        self._cache = cache
        self._known: dict[int, _Known] = {}

    def open(self, slot: int, ids: Seq[int], salt: str | None) -> None:
        """Set the source of the sequence in `slot`. If an equal source is still cached, its rows are used again.

        ids: the token ids of the source. salt: the salt of the request; None = no salt.
        """
        if slot in self._known:
            raise InternalError(f"slot {slot} has a source already")
        source = self._known[slot] = _Known(ids, f"{salt_of(ids, salt)} source")
        padded = self._padded(source)
        num_cached = self._cache.open(source_slot(slot), [*padded, 0], source.salt)
        source.is_run = num_cached == len(padded)
        if not source.is_run:  # every row needs the whole source
            self._cache.truncate_to(source_slot(slot), 0)

    def release(self, slot: int) -> None:
        """Drop the source of the sequence in `slot`, if there is one, and release the source's rows in the KV cache."""
        if self._known.pop(slot, None) is not None:
            self._cache.release(source_slot(slot))

    def slots(self, slots: Iterable[int]) -> list[int]:
        """Return `slots`; after the slot of each sequence that has a source, insert the slot of this source."""
        return [each for slot in slots for each in ((slot, source_slot(slot)) if slot in self._known else (slot,))]

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of cache blocks that a source of `num_tokens` tokens takes."""
        return -(-num_tokens // self._cache.block_tokens)

    def missing_blocks(self, slot: int) -> int:
        """Return the number of cache blocks that a sequence's source still needs: 0 once the encoder has run it."""
        source = self._known.get(slot)
        return 0 if source is None or source.is_run else self.num_blocks(len(source.ids))

    def num_unrun(self, slot: int) -> int:
        """Return the number of tokens in a sequence's source; 0 once the encoder has run it."""
        source = self._known.get(slot)
        return 0 if source is None or source.is_run else len(source.ids)

    def run(self, slots: Seq[int]) -> None:
        """Run the encoder on the sources of these sequences. Equal sources are run once.

        Raises CapacityError where the cache has too few free rows.
        """
        first: dict[str, int] = {}
        for slot in slots:
            first.setdefault(self._known[slot].salt, slot)
        for slot in first.values():
            self._cache.reserve(source_slot(slot), len(self._padded(self._known[slot])))
        self._model.begin({source_slot(slot): self._known[slot].ids for slot in first.values()}, self._cache)
        for slot in first.values():
            source = self._known[slot]
            self._cache.keep({source_slot(slot): range(len(self._padded(source)))})
            self._cache.publish(source_slot(slot), self._padded(source))
            source.is_run = True
        for slot in slots:
            if not (source := self._known[slot]).is_run:  # an equal source was run just now
                self._cache.release(source_slot(slot))
                self._cache.fork(source_slot(first[source.salt]), source_slot(slot))
                source.is_run = True

    def of(self, slots: Iterable[int]) -> list[Source]:
        """Return the cache slot and the length of each sequence's source.

        Raises InternalError for a source that the encoder has not run.
        """
        sources = []
        for slot in slots:
            source = self._known.get(slot)
            if source is None or not source.is_run:
                raise InternalError(f"the source of slot {slot} was not run")
            sources.append(Source(source_slot(slot), len(source.ids)))
        return sources

    def _padded(self, source: _Known) -> list[int]:
        """Return the tokens of a source, padded with zeros to whole blocks."""
        return [*source.ids, *[0] * (-len(source.ids) % self._cache.block_tokens)]
