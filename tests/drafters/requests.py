"""Requests for drafters that are asked directly, without an engine."""

import itertools
from collections.abc import Callable, Sequence as Seq

from forerun.drafters import Drafter
from forerun.types import Budget, Draft, FinishReason, Probs, SamplingParams, Sequence

_ids = itertools.count()


def request(tokens: Seq[int], salt: str | None = None, end_ids: frozenset[int] = frozenset()) -> Sequence:
    """A decoding sequence with these committed tokens."""
    params = SamplingParams(cache_salt=salt)
    return Sequence(next(_ids), list(tokens), len(tokens), params, 0, 10**6, end_ids=end_ids)


def finished(drafter: Drafter, tokens: Seq[int], salt: str | None = None, reason: FinishReason | None = "stop") -> None:
    """Serve a request to its end. reason: None = it is preempted."""
    seq = request(tokens, salt)
    drafter.begin(seq)
    seq.finish_reason = reason
    drafter.end(seq)


def drafted(
    drafter: Drafter, seq: Sequence, num_tokens: int = 8, go_on: Callable[[int, int, Probs], bool] | None = None
) -> Draft:
    """What a drafter drafts for one sequence; it is checked that each node is a point mass behind its parent."""
    budget = Budget([num_tokens], 0) if go_on is None else Budget([num_tokens], 0, go_on)
    draft = drafter.propose([seq], budget, [])
    draft.check(0)
    assert [probs.point for probs in draft.probs] == draft.tokens
    assert len(draft.tokens) <= num_tokens
    return draft
