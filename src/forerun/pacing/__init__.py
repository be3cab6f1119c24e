"""The pacing policies, which decide how far to draft. Each policy is one file, found by scanning this folder.

A file `<name>.py` holds `Options` (a frozen dataclass) and `build(options, spec_length, costs) -> Pacing`. spec_length
is the engine's option, or None if it was not given. costs holds the times of passes. `auto` is built from files that
any policy may use: cost.py (the pass times of an engine), pass_time.py (the time of a pass by its rows), measuring.py
(the measurement of that time), mixing.py (pass times of a mixture of experts), acceptance.py (how likely each drafted
token is to be accepted), stopping.py (where a chain ends, if its drafter tells its confidence), reading.py (when a
draft model reads a text).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

from forerun.pacing.cost import Costs
from forerun.pacing.measuring import NOW, Pause
from forerun.registry import load, make_options, parse_spec
from forerun.sampling.arithmetic import Row
from forerun.types import Probs, Sequence, StepReport, Stop

BEAM_LEVELS = 2  # levels that a beam search drafts by default


class Pacing:
    """A policy that decides how many tokens to draft, before drafting and before each draw.

    A decision about a token may depend on everything that is known before the token is drawn, but never on the token
    itself; otherwise the output's distribution would change (docs/exactness.md).
    """

    reads_logits = False  # whether `go_on` and `go_behind` want the drafter's logits, which it must then compute

    def budget(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[int]:
        """Return the largest number of nodes that each decoding sequence may draft in this step, [B].

        limits [B]: the number of nodes for which each sequence has room, in the caches and up to its longest output.
        """
        wanted = [seq.params.spec_length or self.wanted(seq) for seq in seqs]
        return [min(pair) for pair in zip(wanted, limits, strict=True)]

    def wanted(self, seq: Sequence) -> int:
        """Return the largest number of nodes for a sequence's draft. Called only if no `spec_length` is requested."""
        raise NotImplementedError

    def stops(self, seqs: Seq[Sequence], granted: Seq[int]) -> Mapping[int, Stop]:
        """Return further rules that end the sequences' drafts, by index in `seqs`, as in `Budget.stops`.

        granted [B]: the number of nodes that each sequence may have.
        """
        return {}

    def levels(self, seqs: Seq[Sequence], num_rows: int) -> int:
        """Return how many levels each of these beam searches drafts. Their requests set no `spec_length`.

        num_rows: the number of rows of the target's pass, without the rows of these searches.
        """
        return BEAM_LEVELS

    def go_on(self, seq: Sequence, depth: int, draft_probs: Probs, logits: Row | None = None) -> bool:
        """Return whether to draw the token at `depth` (0 = first) from `draft_probs`.

        logits [V]: the drafter's logits; None unless `reads_logits` is set and the drafter has a model.
        """
        return True

    def go_behind(self, seq: Sequence, depth: int, token: int, draft_probs: Probs, logits: Row | None = None) -> bool:
        """Return whether a token may follow `token`, which was just drawn at `depth` and stays in the draft."""
        return True

    def facts(self, seq: Sequence) -> Mapping[str, float]:
        """Return named values of the policy about a sequence's last round, for listeners that ask for detail."""
        return {}

    def prepares(self, seq: Sequence) -> bool:
        """Return whether the drafter should run a sequence's prompt when the target runs it, before the first round."""
        return True

    def measure(self, pause: Pause = NOW) -> None:
        """Measure the pass times that the policy needs, between two steps. The measurement stops when `pause` ends."""

    def observe(self, report: StepReport) -> None:
        """Learn from the report of the step that was just done."""

    def end(self, seq: Sequence) -> None:
        """Forget a sequence that is finished or aborted."""


def make(spec: str, spec_length: int | None, costs: Costs | None = None) -> Pacing:
    """Return the policy that `spec` describes, as `name[:option=value,...]`.

    Raises BadOption for an unknown policy or option, and for a value that is not allowed.
    """
    name, options = parse_spec(spec)
    module = load(__name__, name, "pacing policy")
    policy: Pacing = module.build(make_options(module.Options, options, name), spec_length, costs or Costs())
    return policy


def overrides(policy: Pacing, name: str) -> bool:
    """Return whether a policy overrides the method `name` of Pacing. Only such a method needs to be called."""
    return getattr(type(policy), name) is not getattr(Pacing, name)
