"""The guesses of one step, as trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from forerun.errors import InternalError, shown
from forerun.types.batch import Rows
from forerun.types.probs import Probs

FORCED = "forced"  # name of the drafter of tokens that a grammar dictates, which is asked before a request's drafter


@dataclass(frozen=True)
class Extra:
    """Further rows of one sequence, which the target scores for `Drafter.observe`. They never enter the output.

    The budget counts these rows as nodes. tokens [M]. parents [M]: indices that count the sequence's nodes first and
    then these rows; -1 = the last committed token. The depth of a row is the number of its ancestors. vectors: by row,
    a vector [H] that replaces the token's embedding as the input of the first layer (learned look-ahead tokens).
    """

    tokens: list[int]
    parents: list[int]
    vectors: Mapping[int, Rows] = field(default_factory=dict)


class SharedRows(NamedTuple):
    """The rows that score the nodes of one sequence: tokens [M], parents [M] (-1 = the last committed token).

    places: for each node, the index in `tokens` of the row that scores it. parents: indices into `tokens`, too.
    """

    tokens: list[int]
    parents: list[int]
    places: list[int]


@dataclass(frozen=True)
class Draft:
    """The drafted tokens of all sequences of one step, in flat lists.

    tokens [N]. parents [N]: the parent node of each node, in the same flat numbering; -1 = the last committed token.
    Parents come before children. node_starts [B+1]: each sequence's first node, then N. probs [N]: the distribution
    that each token was drawn from. A chain is a tree in which the parent of each node is the node before it. A sequence
    without nodes decodes plainly. The nodes of a sequence come best first, and siblings in the order in which they were
    drawn. extra: by sequence, further rows that are scored. shared: by sequence, how its nodes share rows (`packed`).
    forced: the nodes that a grammar dictates; no drafter guessed them.

    Three numberings meet in a step. A *node* is an index into `tokens`, over all sequences. A *row of a run* is an
    index into the run of one sequence: row 0 is its last committed token, then come its nodes, then extra rows (`row`).
    A *row of the pass* is an index into the runs of all sequences, one after the other (models.runner.Scores.rows).
    """

    tokens: list[int]
    parents: list[int]
    node_starts: list[int]
    probs: list[Probs]
    extra: Mapping[int, Extra] = field(default_factory=dict)
    shared: Mapping[int, SharedRows] = field(default_factory=dict)
    forced: frozenset[int] = frozenset()

    @staticmethod
    def empty(num_sequences: int) -> Draft:
        """Return a draft in which no sequence has a node."""
        return Draft([], [], [0] * (num_sequences + 1), [])

    @staticmethod
    def chains(tokens: Seq[Seq[int]], probs: Seq[Seq[Probs]]) -> Draft:
        """Make a draft of one chain per sequence; `tokens[b][i]` was drawn from `probs[b][i]` after `tokens[b][:i]`."""
        starts, parents = [0], []
        for chain in tokens:
            parents += [-1 if i == 0 else starts[-1] + i - 1 for i in range(len(chain))]
            starts.append(starts[-1] + len(chain))
        return Draft([t for c in tokens for t in c], parents, starts, [p for c in probs for p in c])

    @staticmethod
    def joined(drafts: Seq[Draft]) -> Draft:
        """Join the drafts of several groups of sequences into one draft, one after the other."""
        tokens: list[int] = []
        parents: list[int] = []
        starts, probs = [0], list[Probs]()
        extra: dict[int, Extra] = {}
        shared: dict[int, SharedRows] = {}
        forced = set[int]()
        for draft in drafts:
            first = len(tokens)
            forced |= {first + node for node in draft.forced}
            extra |= {len(starts) - 1 + b: rows for b, rows in draft.extra.items()}
            shared |= {len(starts) - 1 + b: rows for b, rows in draft.shared.items()}
            tokens += draft.tokens
            parents += [p if p < 0 else first + p for p in draft.parents]
            starts += [first + start for start in draft.node_starts[1:]]
            probs += draft.probs
        return Draft(tokens, parents, starts, probs, extra, shared, frozenset(forced))

    def only(self, b: int) -> Draft:
        """Return the draft of sequence b as a draft of one sequence, its nodes numbered from 0."""
        nodes = self.nodes(b)
        parents = [p if p < 0 else p - nodes.start for p in self.parents[nodes.start : nodes.stop]]
        cut = slice(nodes.start, nodes.stop)
        extra = {0: self.extra[b]} if b in self.extra else {}
        shared = {0: self.shared[b]} if b in self.shared else {}
        forced = frozenset(node - nodes.start for node in self.forced if node in nodes)
        return Draft(self.tokens[cut], parents, [0, len(nodes)], self.probs[cut], extra, shared, forced)

    @property
    def num_sequences(self) -> int:
        return len(self.node_starts) - 1

    def nodes(self, b: int) -> range:
        """Return the flat indices of sequence b's nodes."""
        return range(self.node_starts[b], self.node_starts[b + 1])

    def behind(self, run: Seq[int]) -> Draft:
        """Return this draft (of one sequence) with the tokens `run` as a forced chain before its nodes."""
        num = len(run)
        extra = {b: replace(rows, parents=[num + p for p in rows.parents]) for b, rows in self.extra.items()}
        return Draft(
            [*run, *self.tokens],
            [*range(-1, num - 1), *(num + p for p in self.parents)],  # a parent of -1 becomes the end of the chain
            [0, num + len(self.tokens)],
            [*map(Probs.of_point, run), *self.probs],
            extra,
            forced=frozenset({*range(num), *(num + node for node in self.forced)}),
        )

    def before(self, run: Seq[int], tip: int) -> Draft:
        """Return this draft (of one sequence) with the tokens `run` as a forced chain after its node `tip`.

        A draft with extra rows is returned unchanged, because the numbers of extra rows begin after the last node.
        """
        if not run or self.extra:
            return self
        num = len(self.tokens)
        return Draft(
            [*self.tokens, *run],
            [*self.parents, tip, *range(num, num + len(run) - 1)],
            [0, num + len(run)],
            [*self.probs, *map(Probs.of_point, run)],
            forced=self.forced | set(range(num, num + len(run))),
        )

    def num_own(self, b: int) -> int:
        """Return the number of sequence b's nodes that come from its drafter, not from a grammar."""
        return sum([node not in self.forced for node in self.nodes(b)]) if self.forced else len(self.nodes(b))

    def num_asked(self, b: int) -> int:
        """Return the number of nodes and extra rows that sequence b has from its drafter. The budget counts both."""
        return self.num_own(b) + (len(self.extra[b].tokens) if b in self.extra else 0)

    def num_rows(self, b: int) -> int:
        """Return the number of rows in sequence b's run that score its nodes."""
        return len(self.shared[b].tokens) if b in self.shared else len(self.nodes(b))

    def row(self, b: int, node: int) -> int:
        """Return the index, within sequence b's run, of the row that scores `node`."""
        place = node - self.node_starts[b]
        return 1 + (self.shared[b].places[place] if b in self.shared else place)

    def packed(self) -> Draft:
        """Return the draft with `shared` set for each sequence whose nodes need fewer rows than there are nodes.

        Chains stay as they are. So do sequences with extra rows, because the parents of extra rows are nodes.
        """
        shared: dict[int, SharedRows] = {}
        for b in range(self.num_sequences):
            nodes = self.nodes(b)
            is_chain = self.parents[nodes.start + 1 : nodes.stop] == list(nodes[:-1])
            if len(nodes) > 1 and not is_chain and b not in self.extra:
                rows = self.shared_rows(b)
                if len(rows.tokens) < len(nodes):
                    shared[b] = rows
        return replace(self, shared=shared) if shared else self

    def shared_rows(self, b: int) -> SharedRows:
        """Return the rows of sequence b as a prefix tree: equal siblings share a row, and so do their subtrees.

        The nodes stay separate: each was drawn separately, and is judged separately with its own probs. So several
        drafts of one sequence, packed as a tree, cost only the rows of their distinct prefixes.
        """
        nodes = self.nodes(b)
        places: list[int] = []
        rows: dict[tuple[int, int], int] = {}  # (row of the parent, token) -> row
        for node in nodes:
            parent = self.parents[node]
            key = (places[parent - nodes.start] if parent >= 0 else -1, self.tokens[node])
            places.append(rows.setdefault(key, len(rows)))
        return SharedRows([token for _, token in rows], [parent for parent, _ in rows], places)

    def check(self, b: int) -> None:
        """Raise InternalError where a node or an extra row of sequence b has a parent that does not come before it."""
        nodes, extra = self.nodes(b), self.extra.get(b)
        is_tree = all(p == -1 or nodes.start <= p < n for n, p in zip(nodes, self.parents[nodes.start :], strict=False))
        if not is_tree or any(not -1 <= p < i for i, p in enumerate(extra.parents if extra else (), len(nodes))):
            raise InternalError(f"the parents of the draft {shown(self)} are no trees: a parent comes before its child")

    def depth(self, b: int) -> int:
        """Return the number of nodes on the longest path of sequence b."""
        depths: dict[int, int] = {-1: 0}
        for node in self.nodes(b):
            depths[node] = depths[self.parents[node]] + 1
        return max(depths.values())

    def path(self, node: int) -> list[int]:
        """Return the flat indices of the nodes on the path down to `node`, with `node` itself as the last."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]
