"""Tie certificates: evidence that two texts differ only because rounding decided (docs/exactness.md, Rounding).

At the first position where the texts differ, the logits are computed once more, row by row, so that batching cannot
change them. At this position, the two tokens must be the two best tokens (for `match`, after temperature and noise),
and the difference of their scores must be at most tau. Tau is twice the largest deviation of a logit between passes
with one row, with six rows and with all rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from forerun.models.runner import Run, Runner
from forerun.sampling import History, probs
from forerun.sampling.arithmetic import Row
from forerun.sampling.random import gumbel
from forerun.types import SamplingParams

SLOT = -1  # of the cache; nothing else uses it
PASSES = (1, 6, 512)  # rows of the passes that are compared


def last_logits(runner: Runner, ids: Seq[int], chunk: int) -> Row:
    """Run `ids` through the cache in chunks of `chunk` tokens. Return the float64 logits [V] after the last token."""
    runner.cache.open(SLOT)
    try:
        for start in range(0, len(ids), chunk):
            tokens = list(ids[start : start + chunk])
            scores = runner.forward([Run(SLOT, tokens, "last")])
            runner.cache.keep({SLOT: range(len(tokens))})
        row: Row = scores.logits[0][-1].astype(np.float64)
        return row
    finally:
        runner.cache.release(SLOT)


def measured_tau(runner: Runner, texts: Seq[Seq[int]]) -> float:
    """Return twice the largest deviation of a logit between passes over different numbers of tokens of these texts."""
    deviation = 0.0
    for ids in texts:
        first, *others = (last_logits(runner, ids, chunk) for chunk in PASSES)
        finite = np.isfinite(first)
        deviation = max(deviation, *(float(np.abs((one - first)[finite]).max()) for one in others))
    return 2 * deviation


def best_two(oracle: Runner, ids: Seq[int], num_prompt_tokens: int, params: SamplingParams) -> tuple[set[int], float]:
    """Return the two best ids of the next position, and the difference of their scores.

    For greedy requests, which have no penalties here, the score is the logit. For sampled requests the score is
    log p + the seed's Gumbel noise.
    """
    logits = last_logits(oracle, ids, PASSES[-1])
    scores = logits
    if not params.greedy:
        target_probs = probs(logits, params, History(ids, num_prompt_tokens))
        kept = np.arange(len(target_probs.weights)) if target_probs.ids is None else target_probs.ids
        scores = np.full(len(logits), -np.inf)
        with np.errstate(divide="ignore"):
            scores[kept] = np.log(target_probs.weights.astype(np.float64)) + gumbel(params.seed or 0, len(ids), kept)
    best = np.argsort(-scores, kind="stable")[:2]
    return {int(i) for i in best}, float(scores[best[0]] - scores[best[1]])


def why_no_tie(
    oracle: Runner, prompt: Seq[int], plain: Seq[int], ours: Seq[int], params: SamplingParams, tau: float
) -> str | None:
    """Return the reason why the first difference of two outputs is no tie; None where it is a tie."""
    at = next(i for i, (a, b) in enumerate(zip(plain, ours, strict=False)) if a != b)
    pair, gap = best_two(oracle, [*prompt, *plain[:at]], len(prompt), params)
    limit = tau if params.greedy else tau / params.temperature
    if pair != {plain[at], ours[at]}:
        return f"token {at} is {ours[at]} and not {plain[at]}, and these are not the two best"
    return None if gap <= limit else f"token {at} is {ours[at]} and not {plain[at]}, {gap:.3g} apart (tau {limit:.3g})"
