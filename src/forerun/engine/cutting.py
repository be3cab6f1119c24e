"""The removal of drafted tokens that cannot be accepted: the model never writes them, or a grammar refuses them."""

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

    Where the probabilities of `ids` add up to less than LEAST in the distribution that a token was drawn from, the
    token is kept, even if it is one of `ids`.

    The distribution of the request's output does not change. It would change if nodes were removed because of their
    drawn token while the remaining nodes were still judged by the drafter's q. So each remaining node that was drawn
    from such a q gets a new distribution: q conditioned on all other ids. The effect is as if each draw had two steps.
    The first step decides whether a token is drafted at all: with the probability that q gives to `ids`, this place
    gets no token. Otherwise the second step draws the token from the conditioned q. The first step depends only on
    earlier draws, and the node has the distribution from which its token was drawn. A verification rule requires no
    more. If siblings were drawn from q independently, or without replacement, the remaining siblings are draws of the
    same kind from the conditioned q. A point mass may be removed because its token is known before the draw. Greedy and
    `match` texts do not depend on a draft.
    """
    unwanted, seen = sorted(ids), dict[int, Probs | None]()

    def conditioned(_: int, node: int) -> Probs | None:
        given = draft.probs[node]
        if id(given) not in seen:
            seen[id(given)] = _without(given, unwanted)
        return seen[id(given)]

    return _kept(draft, conditioned, lambda _, node: draft.tokens[node] not in ids)


def within_grammars(draft: Draft, seqs: Seq[Sequence]) -> Draft:
    """Return a draft without the nodes that the requests' grammars refuse, and without the nodes below them.

    So guesses with target probability 0 cost no rows. As in `without`, each remaining node gets the distribution that
    it was drawn from, conditioned on the ids that the grammar allows.
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
    """Return the draft with the nodes that remain, and with their new distributions.

    conditioned(b, node): the node's new distribution; None = remove the node. stays(b, node): whether the node's token
    is possible in the new distribution. The nodes below a removed node are removed as well.
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
    """Return the token ids that a grammar allows after drafted tokens, and `probs` conditioned on these ids.

    The ids are None if nothing may be drafted after these tokens. The distribution is None if `probs` gives all allowed
    ids probability 0. It is `probs` itself where all other ids have probability 0.
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
    """Return a distribution conditioned on all token ids but `ids`; None where no other id can be drawn.

    Where `ids` have less than LEAST of the probability together, `probs` itself is returned.
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
