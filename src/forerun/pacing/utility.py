"""Test a few draft lengths in turn, then keep the best for a while (Cascade, Saxena et al. 2025, arXiv 2506.20675).

The utility of a draft length K is the factor by which K raises the tokens of a pass, divided by the factor by which it
raises the time of the pass:

    U(K) = (tokens with K / tokens without drafts) / (seconds with K / seconds without drafts)

A length pays if its utility is above 1. Each request goes through test phases of a few trials and set phases of many
rounds. A trial is `test_rounds` rounds of one length. A test phase begins with the best length of the last test phase.
If the best length so far pays, the next longer length is tried. If it does not pay, or the longer length was tried
before, the next shorter length is tried. The phase ends when neither length is left to try, or after four trials. The
set phase keeps the best length for `set_rounds` rounds. If no length paid, the set phase drafts nothing. Each time that
this happens again in a row, the set phase lasts twice as long as the last time, up to 32 times `set_rounds`.

The paper times passes with and without drafts. This policy reads the time of a pass from its calibrated curve, for the
number of experts that were chosen (cost.py), and only the drafter's time is measured. So no pass is run without drafts
for the comparison. In a batch, a pass is compared with the same pass without the draft of this one request. The draft
pays if the tokens per second of the pass are higher with it. The tried lengths and their order are this file's choice,
and not the paper's.

A length depends only on earlier rounds, on their accepted tokens and the time of their passes, and never on the token
that is drawn. So the output has exactly the target's distribution (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forerun.config import AUTO_SPEC_LENGTH
from forerun.pacing import Pacing
from forerun.pacing.cost import Costs
from forerun.pacing.measuring import NOW, Pause
from forerun.registry import option
from forerun.types import Sequence, SequenceStep, StepReport

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # neighbours differ by enough that a few rounds may tell which is better
FIRST_LENGTH = 3
MOST_TRIALS = 4  # of a test phase
MOST_DOUBLINGS = 5  # of a set phase without drafts


@dataclass(frozen=True)
class Options:
    """The lengths of the phases, in rounds."""

    test_rounds: int = option(4, "rounds for which each length is tested", min=1)
    set_rounds: int = option(16, "rounds for which the best length is kept", min=1)


@dataclass
class _Trial:
    """The passes of one trial: their tokens and seconds.

    plain_tokens, plain_s: the tokens and seconds that these passes would have had without this request's drafts.
    """

    tokens: int = 0
    plain_tokens: int = 0
    seconds: float = 0.0
    plain_s: float = 0.0

    @property
    def utility(self) -> float:
        return self.tokens / self.plain_tokens * self.plain_s / self.seconds


@dataclass
class _Request:
    """The progress of a request through its test phases and set phases.

    length: the number of tokens that the request may draft. num_left: the number of rounds left in the trial or in the
    set phase. trial: the current trial; None = the request is in a set phase. utilities: the utility of each length
    that the last test phase has tried. num_failed: the number of test phases in a row that found no length that pays.
    """

    length: int
    num_left: int
    trial: _Trial | None = field(default_factory=_Trial)
    utilities: dict[int, float] = field(default_factory=dict)
    num_failed: int = 0

    @property
    def best(self) -> int:
        return max(self.utilities, key=self.utilities.__getitem__)

    @property
    def pays(self) -> bool:
        return self.utilities[self.best] > 1

    def begin_trial(self, length: int, num_rounds: int) -> None:
        self.length = length
        self.num_left = num_rounds
        self.trial = _Trial()

    def begin_set_phase(self, num_rounds: int) -> None:
        self.trial = None
        self.length = self.best if self.pays else 0
        self.num_left = num_rounds
        if self.pays:
            self.num_failed = 0
        else:
            self.num_left *= 2 ** min(self.num_failed, MOST_DOUBLINGS)
            self.num_failed += 1


class UtilityPacing(Pacing):
    """The policy that grants each request the length that had the highest utility in its last test phase."""

    def __init__(self, options: Options, longest: int, costs: Costs) -> None:
        self.options, self.costs = options, costs
        self.lengths = [*[length for length in LENGTHS if length < longest], longest]
        self._requests: dict[int, _Request] = {}

    def wanted(self, seq: Sequence) -> int:
        if seq.id not in self._requests:
            first = max(length for length in self.lengths if length <= FIRST_LENGTH)
            self._requests[seq.id] = _Request(first, self.options.test_rounds)
        return self._requests[seq.id].length

    def measure(self, pause: Pause = NOW) -> None:
        self.costs.measure(pause)

    def observe(self, report: StepReport) -> None:
        self.costs.observe(report)
        if report.num_prefill_tokens:  # most of such a pass is the prompt's
            return
        for round_ in report.sequences:
            request = self._requests.get(round_.sequence_id)
            # A round in which the drafter found nothing is a plain one, and says nothing about a length.
            if request is not None and (round_.num_drafted or not request.length):
                if request.trial is not None:
                    self._add(request.trial, round_, report)
                request.num_left -= 1
                if not request.num_left:
                    self._go_on(request)

    def end(self, seq: Sequence) -> None:
        self._requests.pop(seq.id, None)

    def facts(self, seq: Sequence) -> Mapping[str, float]:
        request = self._requests.get(seq.id)
        if request is None:
            return {}
        utility = {"utility": request.utilities[request.best]} if request.utilities else {}
        return {"spec_length": float(request.length), "is_test": float(request.trial is not None), **utility}

    def _add(self, trial: _Trial, round_: SequenceStep, report: StepReport) -> None:
        """Add a round of a request to its trial."""
        target, one_row_s = self.costs.target, self.costs.target.one_row_s or 1.0
        plain = float(target.ratio(report.num_rows - round_.num_drafted))
        # How many experts the pass chose is known; how many it would have chosen without the draft is a guess.
        ratio = max(plain, float(target.ratio(report.num_rows, report.num_experts or None)))
        trial.tokens += report.num_emitted
        trial.plain_tokens += report.num_emitted - round_.num_accepted
        trial.seconds += one_row_s * ratio + _draft_s(round_, report)
        trial.plain_s += one_row_s * plain

    def _go_on(self, request: _Request) -> None:
        """Begin a request's next trial or set phase, once the last one is over."""
        if request.trial is None:
            start = request.best
            request.utilities = {}
            request.begin_trial(start, self.options.test_rounds)
            return
        request.utilities[request.length] = request.trial.utility
        untested = [length for length in self._neighbours(request) if length not in request.utilities]
        if untested and len(request.utilities) < MOST_TRIALS:
            request.begin_trial(untested[0], self.options.test_rounds)
        else:
            request.begin_set_phase(self.options.set_rounds)

    def _neighbours(self, request: _Request) -> list[int]:
        """Return the lengths next to a request's best length that may be tried, in the order of trials."""
        at = self.lengths.index(request.best)
        above = self.lengths[at + 1 : at + 2] if request.pays else []
        return above + self.lengths[max(0, at - 1) : at]


def _draft_s(round_: SequenceStep, report: StepReport) -> float:
    """Return one draft's share of its drafter's seconds in a step, without the seconds for catching up."""
    step = report.drafts.get(round_.draft)
    return 0.0 if step is None else (step.seconds - step.catchup_s) / max(1, step.num_sequences)


def build(options: Options, spec_length: int | None, costs: Costs) -> Pacing:
    """Return the policy; the longest draft is spec_length, or 16 where it is not given."""
    return UtilityPacing(options, spec_length or AUTO_SPEC_LENGTH, costs)
