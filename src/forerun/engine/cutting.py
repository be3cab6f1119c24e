"""Removes drafted tokens that cannot be accepted, because the model never writes them or a grammar refuses them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence as Seq
from dataclasses import replace

import numpy as np

from forerun.errors import BadOption
from forerun.sampling.arithmetic import mass
from forerun.sampling.grammar import Bits
from forerun.types import Draft, Extra, Probs, Sequence

LEAST = 1e-3  # probability of all unwanted ids together: below it, a drafter's draws stay as they are


def without(draft: Draft, ids: Collection[int]) -> Draft:
    """Return a draft without the nodes whose tokens are among `ids`, and without the nodes and extra rows below them.

    Let q be the distribution from which a token was drawn. If q gives `ids` less than LEAST in total, the token is
    kept, even if it is one of `ids`. Otherwise a token among `ids` is removed, and each remaining node gets a new
    distribution: q conditioned on all ids but `ids`.

    This does not change the distribution of the request's output. Keeping q for the remaining nodes would change it.
    With the conditioned q, each draw is equivalent to a draw in two steps. First, with the probability that q gives to
    `ids`, no token is drafted at this position. Otherwise, a token is drawn from the conditioned q. The first step
    depends only on earlier draws, and the node states the distribution from which its token was drawn. Verification
    rules require only that. If siblings were drawn from q independently, or without replacement, then the remaining
    siblings were drawn from the conditioned q in the same way. The node of a point mass may be removed, because its
    token is known before the draw. Greedy and `match` texts do not depend on the draft.
    """
    unwanted, seen = sorted(ids), dict[int, Probs | None]()

    def conditioned(_: int, node: int) -> Probs | None:
        given = draft.probs[node]
        if id(given) not in seen:
            seen[id(given)] = _without(given, unwanted)
        return seen[id(given)]

    return _kept(draft, conditioned, lambda _, node: draft.tokens[node] not in ids)


def within_grammars(draft: Draft, seqs: Seq[Sequence]) -> Draft:
    """Return a draft without the nodes that the requests' grammars refuse, and without the nodes below these nodes.

    So tokens with target probability 0 take no rows of the pass. As in `without`, the distribution of each remaining
    node is conditioned on the ids that the grammar allows.
    """
    seen = dict[tuple[int, int], tuple[Bits | None, Probs | None]]()  # by parent and distribution

    def found(b: int, node: int) -> tuple[Bits | None, Probs | None]:
        """Return the ids allowed after the node's parent, and the node's distribution conditioned on these ids."""
        parent, given = draft.parents[node], draft.probs[node]
        key = (b if parent < 0 else -1 - parent, id(given))
        if key not in seen:
            seen[key] = _allowed(seqs[b], [draft.tokens[n] for n in draft.path(parent)], given)
        return seen[key]

    def conditioned(b: int, node: int) -> Probs | None:
        return draft.probs[node] if seqs[b].grammar is None else found(b, node)[1]

    def stays(b: int, node: int) -> bool:
        bits, token = found(b, node)[0], draft.tokens[node]
        return bits is not None and token < len(bits) and bool(bits[token])

    return _kept(draft, conditioned, stays)


def _kept(draft: Draft, conditioned: Callable[[int, int], Probs | None], stays: Callable[[int, int], bool]) -> Draft:
    """Return the draft without removed nodes, and with new distributions for the remaining nodes.

    conditioned(b, node): the new distribution of a node of sequence b; None = remove the node. stays(b, node): whether
    the node's token is possible in the new distribution; if not, the node is removed. The nodes below a removed node
    are removed as well.
    """
    changed = False
    places: dict[int, int] = {-1: -1}  # node -> node of the new draft
    tokens, parents, starts = list[int](), list[int](), [0]
    probs, extra = list[Probs](), dict[int, Extra]()
    for b in range(draft.num_sequences):
        for node in draft.nodes(b):
            if draft.parents[node] not in places:
                continue
            stated = conditioned(b, node)
            changed |= stated is not draft.probs[node]
            if stated is None or (stated is not draft.probs[node] and not stays(b, node)):
                continue
            places[node] = len(tokens)
            tokens.append(draft.tokens[node])
            parents.append(places[draft.parents[node]])
            probs.append(stated)
        starts.append(len(tokens))
        if b in draft.extra:
            extra[b] = _rows_left(draft, b, places, len(tokens) - starts[b])
    forced = frozenset(places[node] for node in draft.forced if node in places)
    return Draft(tokens, parents, starts, probs, extra, forced=forced) if changed else draft


def _allowed(seq: Sequence, drafted: Seq[int], probs: Probs) -> tuple[Bits | None, Probs | None]:
    """Return the ids that the grammar of `seq` allows after `drafted`, and `probs` conditioned on these ids.

    Both are None if nothing may be drafted after `drafted`. The distribution is None if `probs` gives probability 0 to
    all allowed ids. It is `probs` itself if `probs` gives probability 0 to all forbidden ids.
    """
    assert seq.grammar is not None
    if not seq.grammar.may_draft:
        return None, None
    try:
        bits: Bits = seq.grammar.allowed(seq.tokens, drafted).bits
    except BadOption:  # the output ends before this place, so nothing is drafted here; judging refuses such a token
        return None, None
    if probs.point is not None:
        return bits, probs if probs.point < len(bits) and bits[probs.point] else None
    weights = probs.weights
    allowed = bits if probs.ids is None else bits[probs.ids]
    if probs.ids is None:
        allowed = np.pad(allowed, (0, max(0, len(weights) - len(allowed))))[: len(weights)]
    left = weights * allowed
    if (left == weights).all():
        return bits, probs
    total = mass(left)
    if not total > 0:
        return bits, None
    left /= total
    return bits, replace(probs, dense=left) if probs.ids is None else replace(probs, listed=left)


def _without(probs: Probs, ids: list[int]) -> Probs | None:
    """Return `probs` conditioned on all token ids but `ids`; None where only `ids` can be drawn.

    Where `probs` gives `ids` less than LEAST in total, `probs` itself is returned.
    """
    if probs.point is not None:
        return None if probs.point in ids else probs
    if probs.afar is not None and probs.afar.draw.shares_noise:
        return replace(probs)  # a device keeps no q for `match`: texts do not depend on q there, so any token may go
    weights = probs.weights
    if probs.ids is None:
        places = np.array([i for i in ids if i < len(weights)], np.int64)
    else:
        places = np.flatnonzero(np.isin(probs.ids, ids))
    if not len(places) or mass(weights[places]) < LEAST:
        return probs
    left = weights.copy()
    left[places] = 0
    total = mass(left)
    if not total > 0:
        return None
    left /= total
    return replace(probs, dense=left) if probs.ids is None else replace(probs, listed=left)


def _rows_left(draft: Draft, b: int, places: dict[int, int], num_nodes: int) -> Extra:
    """Return the extra rows of sequence b, without the extra rows below removed nodes.

    places: the new index of each remaining node. num_nodes: the number of remaining nodes of sequence b.
    """
    nodes, given = draft.nodes(b), draft.extra[b]
    first = num_nodes and min(place for node, place in places.items() if node in nodes)
    rows = {-1: -1} | {node - nodes.start: places[node] - first for node in nodes if node in places}
    left = Extra([], [], {})
    vectors = {}
    for i, (token, parent) in enumerate(zip(given.tokens, given.parents, strict=True)):
        if parent not in rows:
            continue
        rows[len(nodes) + i] = num_nodes + len(left.tokens)
        if i in given.vectors:
            vectors[len(left.tokens)] = given.vectors[i]
        left.tokens.append(token)
        left.parents.append(rows[parent])
    return replace(left, vectors=vectors)
