"""Requests for drafters that are asked directly, without an engine."""

import itertools
from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np

from forerun.drafters import Drafter, Seen
from forerun.engine.engine import philox_coins
from forerun.models.runner import Run, Scores
from forerun.types import Budget, Draft, FinishReason, Probs, SamplingParams, Sequence

NONE = np.empty((0, 1))  # logits of no row
_ids = itertools.count()


def request(tokens: Seq[int], salt: str | None = None, end_ids: frozenset[int] = frozenset()) -> Sequence:
    """A decoding sequence with these committed tokens."""
    return Sequence(next(_ids), list(tokens), len(tokens), SamplingParams(cache_salt=salt), 0, 10**6, end_ids=end_ids)


def finished(drafter: Drafter, tokens: Seq[int], salt: str | None = None, reason: FinishReason | None = "stop") -> None:
    """Serve a request to its end. reason: None = it is preempted."""
    seq = request(tokens, salt)
    drafter.begin(seq)
    seq.finish_reason = reason
    drafter.end(seq)


def proposed(drafter: Drafter, seq: Sequence, budget: Budget) -> Draft:
    """Return what a drafter drafts for a sequence that it has not seen before and then forgets."""
    drafter.begin(seq)
    draft = drafter.propose([seq], budget, [philox_coins(seq)])
    drafter.end(seq)
    return draft


def seen_of(run: Run, logits: Any = NONE, best: Seq[int] = (), *, start: int = 0, kept: Seq[int] = (0,)) -> Seen:
    """Return what a drafter sees of a pass over one sequence; logits and best are those of its rows."""
    rows = range(len(run.tokens))
    return Seen(start, kept, rows, 0, Scores(np.empty((len(rows), 1)), [rows], [logits], [list(best)], 0.0, runs=[run]))


def read_prompt(drafter: Drafter, seq: Sequence, chunk: int) -> None:
    """Show a drafter the passes over a prompt, so many tokens in each."""
    num = len(seq.tokens) - 1  # the last one has not been run
    for start in range(0, num, chunk):
        run = Run(0, seq.tokens[start : min(start + chunk, num)], "none")
        drafter.observe([seq], [seen_of(run, start=start, kept=range(len(run.tokens)))])


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
