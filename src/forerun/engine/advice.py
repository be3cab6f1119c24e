"""What a finished request has shown: how many of its drafted tokens were accepted, and which length would have paid.

The costs are those that this engine measured; the tokens are the posterior mean of book 7.4 (theory/formulas.py).
"""

from __future__ import annotations

from forerun.config import AUTO_SPEC_LENGTH
from forerun.engine.request import Request
from forerun.pacing._times import StepTimes
from forerun.theory.formulas import expected_tokens_beta
from forerun.types import StepReport

PRIOR = (2.0, 1.0)  # accepted and rejected tokens that stand for what is not known yet
WORTH_SAYING = 1.02  # times as fast


class Advisor:
    """times: what steps take, where the pacing policy learns that; else it is learned here."""

    def __init__(self, times: StepTimes | None = None) -> None:
        self._learns, self._times = times is None, times or StepTimes()
        self._num_decoding = 1.0  # requests of a step, lately

    def observe(self, report: StepReport) -> None:
        """The numbers of a step."""
        if self._learns:
            self._times.observe(report)
        if report.num_decoding:
            self._num_decoding += 0.1 * (report.num_decoding - self._num_decoding)

    def sentence(self, request: Request) -> str:
        """For the log, when a request has finished."""
        seq, report = request.seq, request.report
        done = f"request {seq.id}: {seq.num_output_tokens} tokens in {report.num_steps} steps ({seq.finish_reason})"
        if report.alpha_hat is None:
            return f"{done}; nothing was drafted"
        drafting = [drafted for drafted, _ in report.rounds if drafted]
        used = round(sum(drafting) / len(drafting))
        shown = f"alpha-hat {report.alpha_hat:.2f} ({report.num_accepted} of {report.num_tested} tested tokens)"
        rate = f"acceptance rate {report.acceptance_rate:.2f}"
        return f"{done}; {seq.draft}: {shown}, {rate}; {self._advice(request, used)}"

    def _advice(self, request: Request, used: int) -> str:
        """Whether a longer or a shorter draft than the usual one of this request, or none, would have been faster."""
        speeds = [self.tokens_per_unit(request, length) for length in range(max(AUTO_SPEC_LENGTH, used) + 1)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        gain = speeds[best] / speeds[used]
        if best == used or gain < WORTH_SAYING:
            return f"{used} tokens per draft were about right"
        way = "plain decoding" if best == 0 else f"a {'longer' if best > used else 'shorter'} draft, of {best},"
        return f"{way} would have been {gain - 1:.0%} faster than {used}"

    def tokens_per_unit(self, request: Request, length: int) -> float:
        """Expected tokens per unit of time with drafts of this length, beside as many requests as there were lately."""
        self._times.learn()
        report = request.report
        accepted = PRIOR[0] + report.num_accepted
        rejected = PRIOR[1] + report.num_tested - report.num_accepted
        tokens = expected_tokens_beta(accepted, rejected, length)
        return tokens / self._times.step(request.seq.draft, self._num_decoding, length)
