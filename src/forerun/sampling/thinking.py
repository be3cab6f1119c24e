"""Limits the number of reasoning tokens of a request, and applies the request's grammar after the reasoning.

Reasoning may consist of any tokens, so the grammar does not read them. Once the reasoning has reached the limit, only
the token that closes the reasoning is allowed. The grammar reads the output from this closing token on.
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
    """Represents the constraint of a request with a limit on reasoning.

    grammar: the compiled grammar; None = any text. An output without reasoning must follow the grammar. An output with
    reasoning must follow the grammar from the token that closes the reasoning. num_ids: the vocabulary size.
    """

    limit: Thinking
    grammar: Grammar | None
    num_ids: int

    def start(self, end_ids: frozenset[int], num_prompt_tokens: int) -> Counting:
        """Return the state at the beginning of a sequence's output. end_ids: token ids that end the output."""
        return Counting(self, end_ids, num_prompt_tokens)


class _Place(NamedTuple):
    """Describes whether the next token is before, in or after the reasoning.

    begin: the index in the sequence of the first token that the grammar reads. left: the number of reasoning tokens
    that may still follow; None if the reasoning is not open. opens: the next token id of the opening mark, such as
    <think>; None where reasoning cannot begin.
    """

    begin: int
    left: int | None = None
    opens: int | None = None


class Counting:
    """Holds the state of a constraint with a limit on reasoning, for one sequence.

    Between calls, tokens may be appended to `committed`, but its earlier tokens must not change.
    """

    def __init__(self, held: Limited, end_ids: frozenset[int], num_prompt_tokens: int) -> None:
        self._limit, self._grammar, self._end_ids = held.limit, held.grammar, end_ids
        self._first = num_prompt_tokens
        self._any = Allowed(np.ones(held.num_ids, np.bool_), None)
        self._whole = self._walk_from(num_prompt_tokens)  # the grammar's state along an output without reasoning
        self._rest: GrammarState | None = None  # the grammar's state from the token that closes the reasoning
        self._closed_at: int | None = None  # the index of this token, once it is committed
        self._num_seen = num_prompt_tokens + len(held.limit.opening)  # committed tokens in which it was looked for

    @property
    def failure(self) -> Exception | None:
        return next((walk.failure for walk in self._walks if walk.failure is not None), None)

    @property
    def may_draft(self) -> bool:
        return all(walk.may_draft for walk in self._walks)

    def allowed(self, committed: Seq[int], drafted: Seq[int] = ()) -> Allowed:
        """Return the token ids that may follow `committed` and `drafted`. Raises BadOption as GrammarState does."""
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
        """Return whether no token can follow `committed` and `drafted`, because the grammar ends there."""
        place = self._place(committed, drafted)
        walk, path = self._walk(place.begin, committed, drafted)
        return place.left is None and walk is not None and walk.is_over(committed, path)

    def forced(self, committed: Seq[int], drafted: Seq[int] = ()) -> list[int]:
        """Return the tokens that must follow `committed` and `drafted`."""
        place = self._place(committed, drafted)
        closing = self._limit.closing
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
        """Return the index of the token that closes the reasoning; None where the reasoning is not closed."""
        closing, seen = self._limit.closing, self._num_seen
        if self._closed_at is None and closing in (new := committed[seen:]):
            self._closed_at = seen + new.index(closing)
        if self._closed_at is not None:
            return self._closed_at
        self._num_seen = max(seen, len(committed))
        ahead = drafted[self._num_seen - len(committed) :]
        return self._num_seen + ahead.index(closing) if closing in ahead else None

    def _walk(self, begin: int, committed: Seq[int], drafted: Seq[int]) -> tuple[GrammarState | None, Seq[int]]:
        """Return the state of the grammar that reads from index `begin`, and the drafted tokens that it reads.

        The state is None where there is no grammar.
        """
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
