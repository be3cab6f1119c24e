"""Tables that drafters learn: one table for each request, or one for all requests with the same cache salt.

A shared table outlives its requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from forerun.types import Sequence

T = TypeVar("T")


class BySalt(Generic[T]):
    """The tables of running requests. Shared tables are also kept while no request uses them, up to a limit.

    make: returns a new table. size: returns the number of entries of a table. most: the limit for the entries of all
    unused tables together. The unused table that was released last is always kept. tables: by salt or by request; a
    released table moves to the end.
    """

    def __init__(self, make: Callable[[], T], size: Callable[[T], int], most: int, *, is_shared: bool) -> None:
        self._make, self._size, self._most, self._is_shared = make, size, most, is_shared
        self.tables: dict[Hashable, T] = {}
        self.num_users: Counter[Hashable] = Counter()  # running requests of each table

    def begin(self, seq: Sequence) -> T:
        """Return the table for a request that begins."""
        key = self._key(seq)
        self.num_users[key] += 1
        if key not in self.tables:
            self.tables[key] = self._make()
        return self.tables[key]

    def of(self, seq: Sequence) -> T:
        """Return the table of a running request."""
        return self.tables[self._key(seq)]

    def end(self, seq: Sequence) -> None:
        """Release a request's table. If the unused tables now exceed the limit, drop the oldest of them."""
        key = self._key(seq)
        self.num_users[key] -= 1
        if self.num_users[key] <= 0:
            del self.num_users[key]
        table = self.tables.pop(key)
        if self._is_shared:
            self.tables[key] = table
            self._drop_idle()

    def _key(self, seq: Sequence) -> Hashable:
        return ("salt", seq.params.cache_salt) if self._is_shared else seq.id

    def _drop_idle(self) -> None:
        idle = [key for key in self.tables if not self.num_users[key]]
        held = sum(self._size(self.tables[key]) for key in idle)
        for key in idle[:-1]:
            if held > self._most:
                held -= self._size(self.tables.pop(key))
