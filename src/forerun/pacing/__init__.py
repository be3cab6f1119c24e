"""Pacing policies decide how far to draft. Each is one file, found by scanning this folder.

A file `<name>.py` holds `Options` (a frozen dataclass) and `build(options, spec_length, costs) -> Pacing`; spec_length
is the engine's, None where none was named, and costs holds the time of passes. `auto` is built of two files that any
policy may use: cost.py (the time of a pass) and acceptance.py (how likely each drafted token is to be accepted).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.pacing.cost import Costs
from forerun.registry import load, make_options, parse_spec
from forerun.types import Probs, Sequence, StepReport


class Pacing:
    """A policy decides how many tokens to draft, before drafting and before each draw.

    A decision may depend on everything that is known before the token in question is drawn, never on that token;
    otherwise the output's distribution would change (docs/exactness.md).
    """

    @property
    def stops_early(self) -> bool:
        """Whether `go_on` may return False."""
        return type(self).go_on is not Pacing.go_on

    @property
    def guesses(self) -> bool:
        """Whether the policy uses `guess`, so that the engine has to call it."""
        return type(self).guess is not Pacing.guess

    def budget(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[int]:
        """Return the most draft nodes of each decoding sequence of this step, [B].

        limits [B]: nodes that a sequence could have at most, by its own end and by the room in the caches.
        """
        raise NotImplementedError

    def go_on(self, seq: Sequence, depth: int, draft_probs: Probs) -> bool:
        """Return whether to draw the token at `depth` (0 = first) from `draft_probs`."""
        return True

    def prepares(self, seq: Sequence) -> bool:
        """Return whether the drafter is to run a sequence's prompt beside the target, ready for the first round."""
        return True

    def guess(self, seq: Sequence, tokens: Seq[int]) -> None:
        """Take note of what a free drafter would have drafted for a sequence that was granted no nodes."""

    def observe(self, report: StepReport) -> None:
        """Learn from the numbers of the step that was just done."""

    def end(self, seq: Sequence) -> None:
        """Forget a sequence that is finished or aborted."""


def make(spec: str, spec_length: int | None, costs: Costs | None = None) -> Pacing:
    """Return the policy of `name[:option=value,...]`. Raises BadOption for anything unknown."""
    name, options = parse_spec(spec)
    module = load(__name__, name, "pacing policy")
    made: Pacing = module.build(make_options(module.Options, options, name), spec_length, costs or Costs())
    return made
