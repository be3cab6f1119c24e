"""A request's grammar as drafters see it: tokens that it forces count as committed before the target commits them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from forerun.types import Constraint


@dataclass(frozen=True, slots=True)
class Behind:
    """A constraint, such as a grammar, after tokens that it forces and that are not committed yet.

    walk: the target's constraint. It computes all results, so that a result that both target and drafters need is
    computed once. given: the target's committed tokens. sure: the forced tokens after the committed tokens. In each
    method, `committed` must be `given` followed by `sure`.
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
        """Return the token ids that may follow these tokens."""
        return self.walk.allowed(self.given, (*self.sure, *drafted))

    def is_over(self, committed: Seq[int], drafted: Seq[int] = ()) -> bool:
        """Return whether nothing can follow these tokens."""
        return self.walk.is_over(self.given, (*self.sure, *drafted))

    def forced(self, committed: Seq[int], drafted: Seq[int] = ()) -> list[int]:
        """Return the tokens that must come next."""
        return self.walk.forced(self.given, (*self.sure, *drafted))

    def behind(self, committed: Seq[int], sure: Seq[int]) -> Behind:
        """Return this constraint after further forced tokens."""
        return Behind(self.walk, self.given, (*self.sure, *sure))
