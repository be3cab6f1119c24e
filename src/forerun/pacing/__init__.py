"""How far to draft: one policy per file, found by scanning this folder.

A file `<name>.py` holds `Options` (a frozen dataclass) and `build(options, spec_length, costs) -> Pacing`; spec_length
is the engine's, None where none was named, and costs says what passes take. `auto` is built of two things that any
policy may use: cost.py (the time of a pass) and acceptance.py (how likely each drafted token is to be accepted).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.pacing.cost import Costs
from forerun.registry import load, make_options, parse_spec
from forerun.types import Probs, Sequence, StepReport


class Pacing:
    """Decides how many tokens to draft, before drafting and before each draw.

    Admissible control only: a decision may depend on everything known before the token in question is drawn, never on
    that token (docs/exactness.md).
    """

    @property
    def stops_early(self) -> bool:
        """Whether `go_on` may say no."""
        return type(self).go_on is not Pacing.go_on

    @property
    def guesses(self) -> bool:
        """Whether `guess` wants to be called."""
        return type(self).guess is not Pacing.guess

    def budget(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[int]:
        """Most draft nodes for each decoding sequence of this step, [B].

        limits [B]: nodes that a sequence could have at most, by its own end and by the room in the caches.
        """
        raise NotImplementedError

    def go_on(self, seq: Sequence, depth: int, draft_probs: Probs) -> bool:
        """Asked before drawing the token at `depth` (0 = first) from `draft_probs`."""
        return True

    def prepares(self, seq: Sequence) -> bool:
        """Whether the drafter of a sequence is to run its prompt beside the target, to be ready for the first round."""
        return True

    def guess(self, seq: Sequence, tokens: Seq[int]) -> None:
        """Hear what a drafter that costs nothing would have drafted for a sequence that was granted nothing."""

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
