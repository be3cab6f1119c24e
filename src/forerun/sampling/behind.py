"""The view of a request's grammar for drafters: tokens that the grammar forces are treated as committed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from forerun.types import Constraint


@dataclass(frozen=True, slots=True)
class Behind:
    """Represents a constraint, such as a grammar, with forced tokens treated as committed.

    walk: the target's constraint. All calls go to `walk`, so a result that target and drafters both need is computed
    once. given: the target's committed tokens. sure: the forced tokens after `given`. In each method, the argument
    `committed` must be `given` followed by `sure`.
    """

    walk: Constraint
    given: Seq[int]
    sure: tuple[int, ...]

    @property
    def failure(self) -> Exception | None:
        return self.walk.failure

    @property
    def may_draft(self) -> bool:
        return self.walk.may_draft

    def allowed(self, committed: Seq[int], drafted: Seq[int] = ()) -> Any:
        """Return the token ids that may follow `committed` and `drafted`."""
        return self.walk.allowed(self.given, (*self.sure, *drafted))

    def is_over(self, committed: Seq[int], drafted: Seq[int] = ()) -> bool:
        """Return whether no token can follow `committed` and `drafted`."""
        return self.walk.is_over(self.given, (*self.sure, *drafted))

    def forced(self, committed: Seq[int], drafted: Seq[int] = ()) -> list[int]:
        """Return the tokens that must follow `committed` and `drafted`."""
        return self.walk.forced(self.given, (*self.sure, *drafted))

    def behind(self, committed: Seq[int], sure: Seq[int]) -> Behind:
        """Return this constraint with the further forced tokens `sure` treated as committed, too."""
        return Behind(self.walk, self.given, (*self.sure, *sure))
