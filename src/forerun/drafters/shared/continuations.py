"""Search a text: find earlier occurrences of its end, and guess from the tokens that followed there.

`levels` finds the occurrences of every suffix of a context, and `grow` turns the tokens after these occurrences into a
chain or a tree by frequency. Both work on plain tokens, without an index. docs/methods/suffix.md gives the reasons.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forerun.errors import BadOption, shown
from forerun.types import Budget, Draft, Probs, Sequence

END_OF_TEXT = -1  # is put after each text in an array of texts, so that no match and no guess goes across it
NUM_FOLLOWED = 128  # at most so many places are compared with the context; while there are more, masks find them
NUM_MASKS = 8  # longest suffix, in tokens, that masks find; after that only its latest places are compared

Tokens = npt.NDArray[np.intc]

SHAPES = {"path": "chain", "tree": "tree"}  # value of an option `shape` -> shape of the drafts
SHAPE_HELP = "path = the most frequent chain, tree = the likeliest nodes"


def check_shape(method: str, shape: str) -> None:
    """Raise BadOption for an unknown value of the option `shape`."""
    if shape not in SHAPES:
        raise BadOption(f"{method}:shape={shown(shape)} is not possible: it must be {' or '.join(SHAPES)}")


@dataclass(frozen=True)
class Level:
    """The occurrences in a text of the last `length` tokens of a context.

    found: the index after each occurrence, ascending; or a mask of the text that is True where occurrences begin.
    """

    length: int
    found: npt.NDArray[np.bool_ | np.intp]

    def ends(self, most: int) -> list[int]:
        """Return the index after each of the last `most` occurrences, the latest first."""
        is_mask = self.found.dtype == np.bool_
        ends = np.flatnonzero(self.found) + self.length if is_mask else self.found
        latest: list[int] = ends[-most:][::-1].tolist()
        return latest


def levels(text: Tokens, context: Seq[int]) -> list[Level]:
    """Find where the suffixes of a context occur in a text [L]. Returns a Level for each suffix, the shortest first.

    If several suffixes occur at the same places, only the longest of them is returned, because their continuations are
    equal. An occurrence may end at the end of the text. Suffixes of NUM_MASKS tokens or more are searched only at the
    last NUM_FOLLOWED occurrences of the suffix of NUM_MASKS tokens. So the work is bounded for any text: NUM_MASKS
    passes over the text, and one comparison of NUM_FOLLOWED places with the context.
    """
    suffixes: list[Level] = []
    mask, num_before, length = np.ones(len(text) + 1, dtype=bool), -1, 0  # mask[i]: the last `length` tokens are at i
    while length < min(len(context), len(text)):
        length += 1
        mask = (text[: len(text) - length + 1] == context[-length]) & mask[1:]
        num_places = int(np.count_nonzero(mask))
        if num_places == num_before:
            suffixes.pop()
        if num_places <= NUM_FOLLOWED or length == NUM_MASKS:
            ends = (np.flatnonzero(mask) + length)[-NUM_FOLLOWED:]
            return suffixes + _longer(text, context, ends)
        suffixes.append(Level(length, mask))
        num_before = num_places
    return suffixes


def _longer(text: Tokens, context: Seq[int], ends: npt.NDArray[np.intp]) -> list[Level]:
    """Compare the end of the context with the text before each place. Returns a Level for each match length.

    ends [n]: the places, each as the index after the last token to compare.
    """
    if not len(ends):
        return []
    before = ends[:, None] - np.arange(1, len(context) + 1)
    same = (text[np.maximum(before, 0)] == np.asarray(context, dtype=np.intc)[::-1]) & (before >= 0)
    lengths = np.where(same.all(1), len(context), same.argmin(1))
    return [Level(length, ends[lengths >= length]) for length in sorted(set(lengths.tolist()))]


@dataclass
class Guess:
    """The guessed nodes of one sequence, best first.

    parents: the index of each node's parent; -1 = the last committed token. probs: for each node, the probability by
    the counts of the whole path down to the node. match: the length, in tokens, of the suffix whose occurrences gave
    the guess.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    match: int = 0

    @property
    def score(self) -> float:
        """The expected number of accepted nodes, if the tokens follow with the counted frequencies."""
        return sum(self.probs)

    def confidence(self, node: int, depth: int) -> float:
        """Return the confidence in a node: the probability of its token after its parent, by the counts.

        The probability is reduced for short matches. depth: the number of nodes above this node.
        """
        parent = self.parents[node]
        before = 1.0 if parent < 0 else self.probs[parent]
        return self.probs[node] / before * (1 - 1 / (1 + self.match + depth))

    def draft(self, seq: Sequence, b: int, budget: Budget) -> Draft:
        """Return a draft of the nodes that the budget of sequence b allows, as point masses.

        Nodes that the grammar refuses are left out, together with all nodes below them. Nodes that the grammar forces
        are marked as forced, and the budget is not asked about them.
        """
        places = {-1: -1}
        paths = {-1: list[int]()}
        forced = set[int]()
        taken = {-1: -1}  # by node: its index in `stop`; forced nodes have the index of their parent
        tokens, parents, probs = list[int](), list[int](), list[Probs]()
        stop = budget.stops.get(b)
        is_held = bool(budget.limits and budget.limits[b])
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent not in places:
                continue
            is_possible, is_forced = _judged(seq, paths[parent], token)
            if not is_possible:
                continue
            mass = Probs.of_point(token)
            depth = len(paths[parent])
            taken[node] = taken[parent]
            if is_forced and is_held:
                forced.add(len(tokens))
            elif not budget.go_on(b, depth, mass):
                continue
            elif stop is not None:
                if not stop.takes(self.confidence(node, depth), taken[parent]):
                    break
                taken[node] = len(stop.confidences) - 1
            places[node], paths[node] = len(tokens), [*paths[parent], token]
            tokens.append(token)
            parents.append(places[parent])
            probs.append(mass)
        while tokens and len(tokens) - 1 in forced:  # whether forced tokens after the last guess pay is decided later
            forced.remove(len(tokens) - 1)
            del tokens[-1], parents[-1], probs[-1]
        return Draft(tokens, parents, [0, len(tokens)], probs, forced=frozenset(forced))


def _judged(seq: Sequence, drafted: Seq[int], token: int) -> tuple[bool, bool]:
    """Return whether the grammar allows `token` after the tokens `drafted`, and whether it forces `token`."""
    if seq.grammar is None:
        return True, False
    if not seq.grammar.may_draft:
        return False, False
    try:
        allowed = seq.grammar.allowed(seq.tokens, drafted)
    except BadOption:  # after an end of the output, or over the grammar's limits: verification refuses such tokens
        return False, False
    return token < len(allowed.bits) and bool(allowed.bits[token]), allowed.only == token


def grow(
    rows: Seq[Seq[int]], num_nodes: int, is_tree: bool, min_prob: float = 0.0, end_ids: Collection[int] = ()
) -> Guess:
    """Make a guess of at most `num_nodes` nodes from the tokens that followed the occurrences of a suffix.

    rows: for each occurrence, the next `num_nodes` tokens. Nothing is guessed after an END_OF_TEXT in a row. A row is
    shorter if it reaches the end of the text that is being continued. Such a row goes on with the guessed tokens, so
    that a repetition like "ab ab ab" is continued. end_ids: ids after which nothing is guessed.

    The probability of a node is the share of rows that begin with the node's path. Nodes below `min_prob` are left out.
    The likeliest node comes first, and equally likely nodes stay in the order in which they were found. If `is_tree` is
    false, the guess is a chain: at each depth, only the most frequent next token is kept. Among equally frequent
    tokens, the token in the earliest row is kept.
    """
    guess = Guess()
    open_nodes: list[tuple[float, int, int, list[int], Seq[Seq[int]]]] = []  # -prob, number, parent, path, rows
    num_opened = 0

    def open_behind(parent: int, path: list[int], rows_here: Seq[Seq[int]]) -> None:
        nonlocal num_opened
        depth = len(path)
        behind = defaultdict[int, list[Seq[int]]](list)
        for row in rows_here:
            behind[row[depth] if depth < len(row) else path[depth - len(row)]].append(row)
        behind.pop(END_OF_TEXT, None)
        children = list(behind)
        if children and not is_tree:
            children = [max(behind, key=lambda token: len(behind[token]))]
        for token in children:
            prob = len(behind[token]) / len(rows)
            if prob >= min_prob:
                heapq.heappush(open_nodes, (-prob, num_opened, parent, [*path, token], behind[token]))
                num_opened += 1

    open_behind(-1, [], rows)
    while open_nodes and len(guess.tokens) < num_nodes:
        minus_prob, _, parent, path, rows_here = heapq.heappop(open_nodes)
        guess.tokens.append(path[-1])
        guess.parents.append(parent)
        guess.probs.append(-minus_prob)
        if path[-1] not in end_ids and len(guess.tokens) < num_nodes:
            open_behind(len(guess.tokens) - 1, path, rows_here)
    return guess
