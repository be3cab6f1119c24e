"""A limit of the tokens of reasoning: a count along the sequence, and the grammar that holds behind it.

Reasoning may be any tokens, so no grammar reads it: behind as many as the limit says, the token that closes it is the
only one allowed. The rest of the request's constraint begins with that token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forerun.params import Thinking
from forerun.sampling.behind import Behind
from forerun.sampling.grammar import Allowed, Grammar, GrammarState


@dataclass(frozen=True)
class Limited:
    """The constraint of a request with such a limit. grammar: the limit's rules, compiled; None = any text."""

    limit: Thinking
    grammar: Grammar | None
    num_ids: int

    def start(self, end_ids: frozenset[int], num_prompt_tokens: int) -> Counting:
        """Return the state of a sequence that begins. end_ids: ids that end its output."""
        return Counting(self, end_ids, num_prompt_tokens)


class _Place(NamedTuple):
    """Where a path stands. left: tokens of reasoning that may follow; None outside of it.

    opens: the next id of the opening, where the reasoning may begin. begin: where the text of the grammar begins.
    """

    begin: int
    left: int | None = None
    opens: int | None = None


class Counting:
    """Where a sequence stands along its reasoning or behind it, by its committed and drafted tokens.

    Committed tokens stay what they are, and more are added to them.
    """

    def __init__(self, held: Limited, end_ids: frozenset[int], num_prompt_tokens: int) -> None:
        self._limit, self._grammar, self._end_ids = held.limit, held.grammar, end_ids
        self._first = num_prompt_tokens
        self._any = Allowed(np.ones(held.num_ids, np.bool_), None)
        self._whole = self._walk_from(num_prompt_tokens)  # along an output without reasoning
        self._rest: GrammarState | None = None  # from the token that closes it
        self._closed_at: int | None = None  # among the committed tokens; so many were looked at
        self._num_seen = num_prompt_tokens + len(held.limit.opening)

    @property
    def failure(self) -> Exception | None:
        return next((walk.failure for walk in self._walks if walk.failure is not None), None)

    @property
    def may_draft(self) -> bool:
        return all(walk.may_draft for walk in self._walks)

    def allowed(self, committed: Seq[int], drafted: Seq[int] = ()) -> Allowed:
        """Return the ids that may follow these tokens. Raises as `GrammarState.allowed`."""
        place = self._place(committed, drafted)
        if place.left is not None:
            return self._any if place.left > 0 else self._only(self._limit.closing)
        walk, path = self._walk(place.begin, committed, drafted)
        if walk is None:
            return self._any
        if place.opens is None:
            return walk.allowed(committed, path)
        if not walk.takes(committed, path):
            return self._only(place.opens)
        bits = walk.allowed(committed, path).bits.copy()
        bits[self._limit.closing] = False  # there is nothing to be closed
        bits[place.opens] = True
        return Allowed(bits, place.opens if np.count_nonzero(bits) == 1 else None)

    def is_over(self, committed: Seq[int], drafted: Seq[int] = ()) -> bool:
        """Return whether nothing can follow these tokens, which are a whole text of the grammar."""
        place = self._place(committed, drafted)
        walk, path = self._walk(place.begin, committed, drafted)
        return place.left is None and walk is not None and walk.is_over(committed, path)

    def forced(self, committed: Seq[int], drafted: Seq[int] = ()) -> list[int]:
        """Return the tokens that must come next."""
        place, closing = self._place(committed, drafted), self._limit.closing
        if place.left == 0:
            return [closing, *self.forced(committed, (*drafted, closing))]
        walk, path = self._walk(place.begin, committed, drafted)
        if place.left is not None or place.opens is not None or walk is None:
            return []
        return walk.forced(committed, path)

    def behind(self, committed: Seq[int], sure: Seq[int]) -> Behind:
        """Return this constraint with the forced tokens `sure` treated as committed."""
        return Behind(self, committed, tuple(sure))

    def _place(self, committed: Seq[int], drafted: Seq[int]) -> _Place:
        first, opening = self._first, self._limit.opening
        head = (*committed[first : first + len(opening)], *drafted)[: len(opening)]
        if head != opening[: len(head)]:
            return _Place(first)
        if len(head) < len(opening):
            return _Place(first, opens=opening[len(head)])
        end = self._end(committed, drafted)
        if end is not None:
            return _Place(end)
        return _Place(first, left=self._limit.most - (len(committed) + len(drafted) - first - len(opening)))

    def _end(self, committed: Seq[int], drafted: Seq[int]) -> int | None:
        """Return the place of the token that closes the reasoning; None where none has."""
        closing, seen = self._limit.closing, self._num_seen
        if self._closed_at is None and closing in (new := committed[seen:]):
            self._closed_at = seen + new.index(closing)
        if self._closed_at is not None:
            return self._closed_at
        self._num_seen = max(seen, len(committed))
        ahead = drafted[self._num_seen - len(committed) :]
        return self._num_seen + ahead.index(closing) if closing in ahead else None

    def _walk(self, begin: int, committed: Seq[int], drafted: Seq[int]) -> tuple[GrammarState | None, Seq[int]]:
        """Return the walk of a text that begins at a place, and its part of the drafted tokens."""
        if begin == self._first:
            return self._whole, drafted
        place = min(begin, len(committed))
        if self._rest is None or self._rest.num_prompt_tokens != place:
            self._rest = self._walk_from(place)
        return self._rest, drafted[begin - place :]

    def _walk_from(self, place: int) -> GrammarState | None:
        return None if self._grammar is None else self._grammar.start(self._end_ids, place)

    @property
    def _walks(self) -> list[GrammarState]:
        return [walk for walk in (self._whole, self._rest) if walk is not None]

    def _only(self, token: int) -> Allowed:
        bits = np.zeros_like(self._any.bits)
        bits[token] = True
        return Allowed(bits, token)
