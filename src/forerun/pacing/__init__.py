"""How far to draft: one policy per file, found by scanning this folder.

A file `<name>.py` holds `Options` (a frozen dataclass) and `build(options, spec_length) -> Pacing`; spec_length is the
engine's, None where it was not said.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.pacing._times import StepTimes
from forerun.registry import load, make_options, parse_spec
from forerun.types import Probs, Sequence, StepReport


class Pacing:
    """Decides how many tokens to draft, before drafting and before each draw.

    Admissible control only: a decision may depend on everything known before the token in question is
    drawn, never on that token.

    times: what steps took, where a policy learns that; who reads it calls its `learn` first.
    """

    @property
    def stops_early(self) -> bool:
        """Whether `go_on` may say no."""
        return type(self).go_on is not Pacing.go_on

    @property
    def times(self) -> StepTimes | None:
        return None

    def budget(self, seqs: Seq[Sequence], limits: Seq[int], lags: Seq[int], num_other_rows: int) -> list[int]:
        """Most draft nodes for each decoding sequence of this step, [B].

        limits [B]: nodes that a sequence could have at most, by its own end and by the room in the caches. lags [B]:
        committed tokens that its drafter has yet to run before it can draft, beyond what a round leaves.
        num_other_rows: rows of the target pass that are no sequence's decoding, such as prompt chunks.
        """
        raise NotImplementedError

    def end(self, seq: Sequence) -> None:
        """A sequence is finished or aborted: forget it."""

    def go_on(self, seq: Sequence, depth: int, draft_probs: Probs) -> bool:
        """Asked before drawing the token at `depth` (0 = first) from `draft_probs`."""
        return True

    def prepares(self, seq: Sequence) -> bool:
        """Whether the drafter of a sequence is to run its prompt beside the target, to be ready for the first round."""
        return True

    def observe(self, report: StepReport) -> None:
        """The numbers of the step that was just done."""


def make(spec: str, spec_length: int | None) -> Pacing:
    """A policy from `name[:option=value,...]`. Raises BadOption for anything unknown."""
    name, options = parse_spec(spec)
    module = load(__name__, name, "pacing policy")
    policy: Pacing = module.build(make_options(module.Options, options, name), spec_length)
    return policy
