"""Limits the number of committed tokens that drafters may run in a step to catch up.

A draft model whose cache lacks committed tokens has to run these tokens before it can draft. Running all of them in one
step would pause every stream, so the tokens are spread over several steps. Catching up may make a step at most about
twice as long. The time of a token and the time of a usual step are learned from the reports of steps. This module reads
no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from forerun.kv.cache import PAGED_BLOCK_TOKENS
from forerun.types import StepReport

SHARE = 0.75  # of a usual step's time, the most that catching up may add to a step
LEAST_TOKENS = PAGED_BLOCK_TOKENS  # per step, however long they take: else catching up might never end
FIRST_TOKENS = 64  # while nothing is known
_NUM_STEPS = 9  # the usual step is the median of so many
_NUM_CATCHUPS = 4  # a drafter's seconds per token are counted over its last so many reports


class CatchUp:
    """Computes the limit on the tokens that all drafters together run in a step to catch up.

    most_tokens: the largest value of the limit.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._catchups: dict[str, deque[tuple[int, float]]] = {}  # by drafter: tokens, seconds
        self._token_s: dict[str, float] = {}  # by drafter: seconds per token

    def tokens(self, drafts: Iterable[str], num_used: int = 0) -> int:
        """Return how many tokens the drafters `drafts` may run in a step to catch up with the decoding sequences.

        num_used: the number of tokens that drafters have already run in this step.
        """
        return min(self.most_tokens - num_used, max(LEAST_TOKENS, self._affordable(drafts) - num_used))

    def _affordable(self, drafts: Iterable[str]) -> int:
        """Return how many tokens the slowest drafter can run in the fraction SHARE of the time of a usual step."""
        token_s = [self._token_s[name] for name in drafts if name in self._token_s]
        if not self._steps_s or not token_s:
            return FIRST_TOKENS
        return int(SHARE * median(self._steps_s) / max(*token_s, 1e-9))

    def observe(self, report: StepReport) -> None:
        """Update the time of a usual step and the drafters' times per token from the report of the last step."""
        catchup_s = 0.0
        for name, draft in report.drafts.items():
            if draft.num_catchup_tokens:
                known = self._catchups.setdefault(name, deque(maxlen=_NUM_CATCHUPS))
                known.append((draft.num_catchup_tokens, draft.catchup_s))
                self._token_s[name] = sum([seconds for _, seconds in known]) / sum([tokens for tokens, _ in known])
                catchup_s += draft.catchup_s
        if report.num_decoding and not report.num_prefill_tokens:
            self._steps_s.append(report.seconds - catchup_s)
