"""The ways to draw the children of a node of a draft tree, and the distribution that goes with each child.

"distinct": siblings are drawn without replacement, each from the distribution without the earlier siblings.
"independent": each sibling is drawn from the whole distribution. "point": siblings are point masses. For a greedy
request, they are the likeliest tokens. For a request under `match`, they are the tokens with the largest sums of
log-probability and noise; the target uses the same noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from forerun.errors import BadOption
from forerun.sampling import History, arithmetic, probs
from forerun.sampling.arithmetic import Row
from forerun.types import Coins, Probs, SamplingParams, Sequence


def kind_of(draws: str, params: SamplingParams, seq: Sequence) -> str:
    """Return how siblings are drawn for one request: "match", "point", or the value of the drafter's `draws`.

    params: the drafter's sampling parameters, whose temperature may differ from the request's.
    """
    if seq.acceptance == "match" and not seq.params.greedy:
        return "match"
    return "point" if params.greedy and draws == "distinct" else draws


def distribution(row: Row, params: SamplingParams, history: History, draws: str) -> Probs | None:
    """Return the distribution for drawing a node's children; None if masks leave no token.

    Greedy parameters leave only one token. To get several children, they are replaced by temperature 1 without filters,
    unless siblings are drawn independently. The likeliest tokens of the resulting distribution are then the children.
    """
    if params.greedy and draws != "independent":
        params = dataclasses.replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    try:
        return probs(row, params, history)
    except BadOption:
        return None


def children_of(
    draft_probs: Probs, kind: str, num: int, depth: int, coins: Coins, lane: int
) -> Iterator[tuple[int, Probs, float]]:
    """Yield at most `num` child tokens, each with its distribution and the model's confidence in it.

    The distribution of a token is the distribution from which it was drawn, or a point mass. kind: see `kind_of`.
    depth: the depth of the children. coins: the sequence's random numbers. lane: the lane (see `Coins`) of the first
    child's random draw; each further child uses the next lane. Point masses need no random draws.
    """
    if draft_probs.point is not None:
        yield draft_probs.point, draft_probs, 1.0
    elif kind == "match":
        confidences = [draft_probs.at(token) for token in likeliest(draft_probs, num)]
        for token, confidence in zip(coins.picks(draft_probs, depth, num), confidences, strict=False):
            yield token, Probs.of_point(token), confidence
    elif kind == "point":
        for token in likeliest(draft_probs, num):
            yield token, Probs.of_point(token), draft_probs.at(token)
    else:
        left: Probs | None = draft_probs
        for i in range(num):
            if left is None:
                return
            token = coins.draft(left, depth, lane + i)
            yield token, left, draft_probs.at(token)
            left = without(left, token) if kind == "distinct" else draft_probs


def likeliest(draft_probs: Probs, num: int) -> list[int]:
    """Return the `num` ids with the largest probabilities above 0, the likeliest id first.

    Ids with equal probabilities are in ascending order. If only some of these ids are among the `num` ids, it is
    undefined which ones.
    """
    weights = draft_probs.weights
    places = np.argpartition(-weights, num - 1)[:num] if num < len(weights) else np.arange(len(weights))
    places = places[weights[places] > 0]
    places = places[np.lexsort((places, -weights[places]))]
    best: list[int] = (places if draft_probs.ids is None else draft_probs.ids[places]).tolist()
    return best


def without(draft_probs: Probs, token: int) -> Probs | None:
    """Return the distribution without a token, normalised again; None if no probability is left."""
    weights = draft_probs.weights.copy()
    weights[token if draft_probs.ids is None else draft_probs.ids.searchsorted(token)] = 0
    mass = arithmetic.mass(weights)
    if not mass > 0:
        return None
    weights = weights / mass
    return Probs(dense=weights) if draft_probs.ids is None else Probs(ids=draft_probs.ids, listed=weights)
