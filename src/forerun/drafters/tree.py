"""A draft model that guesses a tree: several tokens for each position, so that a wrong first guess is not the end.

The tree grows level by level. Each level is one pass of the draft model. The cache rows of a level stay pending, so
that the next level can read them. Later the rows of the accepted path are kept, so no node is run twice. There are
three ways to choose a shape. Two of them use shares: how often a child is accepted, by its rank among its siblings.

    4x2x1        the number of children of a node, by depth. If fewer nodes are granted, the tree has the nodes that
                 are likeliest to be accepted, by usual shares
    sequoia      the nodes that are likeliest to be accepted, by shares that were measured for this pair of models,
                 without fixed numbers of children (`forerun train tree`; Chen et al. 2024, arXiv 2402.12374)
    best_first   the nodes in which the draft model has most confidence (EAGLE-2, Li et al. 2024, arXiv 2406.16858).
                 This choice looks at drafted tokens, so it is exact for point masses only (docs/exactness.md)

shared/siblings.py has the ways in which the children of a node are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from forerun.drafters import Drafter, Known, Needs, Seen, Target
from forerun.drafters.shared import artifacts
from forerun.drafters.shared.compound import Compound, made, of_model
from forerun.drafters.shared.feeding import Feeds
from forerun.drafters.shared.model_drafter import ModelDrafter
from forerun.drafters.shared.siblings import children_of, distribution, kind_of
from forerun.errors import BadOption, UnsupportedModel, shown
from forerun.models.runner import Run
from forerun.registry import option
from forerun.sampling import History
from forerun.sampling.arithmetic import Row
from forerun.theory.trees import Node, best_first
from forerun.types import Budget, Coins, Draft, Next, Probs, Sequence

# How often a child is accepted, by its rank, where no shares were measured.
USUAL_SHARES = (0.6, 0.2, 0.08, 0.04, 0.02, 0.01, 0.008, 0.006)
KIND = "tree"  # the kind of the file with shares


@dataclass(frozen=True)
class Options:
    """The options: the draft model, the shape of the trees, and how siblings are drawn."""

    of: str = option("model", "spec of the draft model, as in (model:path=FOLDER)")
    shape: str = option("3x2x1x1", "children of a node by depth, as in 4x2x1; or best_first; or sequoia")
    draws: str = option("distinct", "of siblings: distinct, independent or point")
    file: str | None = option(None, "shares that forerun train tree measured, for sequoia")
    top_k: int = option(4, "best_first: children of a node", min=1, max=64)
    width: int = option(4, "best_first: nodes of a level that get children", min=1)
    depth: int = option(6, "best_first: levels", min=1, max=64)

    def __post_init__(self) -> None:
        of_model("tree", self.of)
        if self.draws not in ("distinct", "independent", "point"):
            raise BadOption(f"tree:draws={shown(self.draws)} is not possible: distinct, independent or point")
        if self.shape == "best_first" and self.draws != "point":
            raise BadOption("tree:shape=best_first looks at tokens, which is exact for draws=point alone: add that")
        if (self.shape == "sequoia") != (self.file is not None):
            raise BadOption("tree:shape=sequoia and tree:file belong together: give both, or neither")
        if self.shape not in ("best_first", "sequoia"):
            _widths(self.shape)


def _widths(shape: str) -> list[int]:
    try:
        widths = [int(width) for width in shape.split("x")]
    except ValueError:
        widths = [0]
    if not all(0 < width <= len(USUAL_SHARES) for width in widths):
        raise BadOption(
            f"tree:shape={shown(shape)} is not possible: widths of 1 to {len(USUAL_SHARES)}, as in 4x2x1, best_first "
            "or sequoia"
        )
    return widths


@dataclass
class _Node:
    """A drafted token. goes_on: whether the node may have children. row: the node's pending cache row; -1 = none."""

    token: int
    probs: Probs
    parent: int  # index among the nodes of the sequence, -1 = the last committed token
    depth: int
    value: float
    goes_on: bool = True
    row: int = -1


@dataclass
class _Tree:
    """The tree of one sequence while it grows.

    limit: the largest number of nodes in the draft. shape: the nodes to draw, known in advance; None = the draft
    model's confidence decides. num_rows: the number of pending cache rows, which are written but not committed yet.
    """

    nodes: list[_Node]
    limit: int
    shape: list[Node] | None
    places: dict[int, int] = field(default_factory=lambda: {-1: -1})  # node of the shape -> node of the tree
    num_rows: int = 0

    def path(self, node: int) -> list[int]:
        """Return the tokens on the path from the first level down to a node."""
        tokens = []
        while node >= 0:
            tokens.append(self.nodes[node].token)
            node = self.nodes[node].parent
        return tokens[::-1]


class TreeDrafter(Compound):
    """Drafts trees with the draft model `model`.

    shares: how often a child is accepted, by its rank, as two lists: for greedy requests, and for all other requests.
    """

    branches = True

    def __init__(self, model: ModelDrafter, options: Options, shares: tuple[Seq[float], Seq[float]]) -> None:
        super().__init__([model])
        self.model, self.options, self.shares = model, options, shares
        self.shape, self.draws = "tree", options.draws
        self._trees: dict[int, _Tree] = {}  # by sequence id: the trees of the last round, with pending cache rows

    def end(self, seq: Sequence) -> None:
        self._trees.pop(seq.id, None)
        super().end(seq)

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """Keep the cache rows of the accepted path, but not the row of the last token, which the next round runs."""
        for seq in seqs:
            if (tree := self._trees.pop(seq.id, None)) is not None:
                self.model.keep_pending(seq, list(_accepted(tree, seq, self.model.num_held(seq))))
        super().observe(seqs, seen)

    def branch(self, seqs: Seq[Sequence], levels: Seq[Seq[int]], catchup_tokens: int) -> list[list[Next | None]]:
        self.start()
        following = self.model.branch(seqs, levels, catchup_tokens)
        self.count(self.model)
        return following

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        self.start()
        self._trees = {}
        limits, feeds = self.model.ready(seqs, budget)
        self.count(self.model)
        trees = {b: _Tree([], limits[b], self._shape(seq, limits[b])) for b, (seq, _) in feeds.items()}
        rows = self._first_rows(feeds)
        levels = {b: [-1] for b in feeds}  # the nodes whose children come next
        depth = 0
        while rows:
            for b, level in levels.items():
                self._grow(trees[b], level, rows[b], seqs[b], b, depth, budget, coins[b])
            depth += 1
            levels = {b: level for b, tree in trees.items() if (level := self._parents(tree, depth))}
            rows = self._rows(trees, levels, seqs)
        self._trees = {seqs[b].id: tree for b, tree in trees.items() if tree.num_rows}
        return Draft.joined([_draft(trees[b]) if b in trees else Draft.empty(1) for b in range(len(seqs))])

    def _shape(self, seq: Sequence, num_nodes: int) -> list[Node] | None:
        shares = self.shares[0 if self.model.params(seq).greedy else 1]
        if self.options.shape == "best_first":
            return None
        return best_first(shares, num_nodes, None if self.options.shape == "sequoia" else _widths(self.options.shape))

    def _first_rows(self, feeds: Feeds) -> dict[int, Seq[Row]]:
        """Run the committed tokens that the cache lacks. Returns the logits after each sequence's last token."""
        runs = [Run(seq.id, tokens, "last") for seq, tokens in feeds.values()]
        scores = self.model.runner.forward(runs)
        self.model.runner.cache.keep({seq.id: range(len(tokens)) for seq, tokens in feeds.values()})
        for seq, tokens in feeds.values():
            self.model.commit(seq, tokens)
        return {b: [scores.logits[i][-1]] for i, b in enumerate(feeds)}

    def _parents(self, tree: _Tree, depth: int) -> list[int]:
        """Return the nodes at depth `depth` - 1 that get children."""
        if tree.shape is not None:
            wanted = {tree.places.get(node.parent, -1) for node in tree.shape if node.depth == depth > 0}
            return sorted(i for i in wanted - {-1} if tree.nodes[i].goes_on)
        if depth >= self.options.depth:
            return []
        level = [i for i, node in enumerate(tree.nodes) if node.depth == depth - 1 and node.goes_on]
        most = min(self.options.width, tree.limit - 1 - tree.num_rows)  # the cache has room for so many rows
        return sorted(sorted(level, key=lambda i: -tree.nodes[i].value)[: max(0, most)])

    def _rows(self, trees: dict[int, _Tree], levels: dict[int, list[int]], seqs: Seq[Sequence]) -> dict[int, Seq[Row]]:
        """Run the nodes levels[b] of each tree, with pending cache rows. Returns the logits after each of the nodes."""
        runs = []
        for b, level in levels.items():
            nodes = trees[b].nodes
            parents = [nodes[nodes[i].parent].row if nodes[i].parent >= 0 else -1 for i in level]
            runs.append(Run(seqs[b].id, [nodes[i].token for i in level], "all", parents, pending=True))
            for i in level:
                nodes[i].row = trees[b].num_rows
                trees[b].num_rows += 1
        return dict(zip(levels, map(list, self.model.runner.forward(runs).logits), strict=True)) if runs else {}

    def _grow(
        self,
        tree: _Tree,
        level: list[int],
        rows: Seq[Row],
        seq: Sequence,
        b: int,
        depth: int,
        budget: Budget,
        coins: Coins,
    ) -> None:
        """Draw the children of the nodes in `level`. rows: the draft model's logits after each of these nodes.

        depth: the depth of the children. b: the index of `seq` in `budget`. coins: the random numbers of `seq` (see
        `Coins`).
        """
        lane, params = 0, self.model.params(seq)
        kind = kind_of(self.draws, params, seq)
        for at, row in zip(level, rows, strict=True):
            draft_probs = distribution(row, params, History.of(seq, tree.path(at)), self.draws)
            if draft_probs is None or not budget.go_on(b, depth, draft_probs, row):
                continue
            wanted = self._wanted(tree, at, depth)
            above = tree.nodes[at].value if at >= 0 else 1.0
            children = list(children_of(draft_probs, kind, len(wanted), depth, coins, lane))
            lane += len(wanted)
            for place, (token, stated, confidence) in zip(wanted, children, strict=False):
                tree.places[place] = len(tree.nodes)
                value = above * confidence if tree.shape is None else tree.shape[place].value
                goes_on = budget.go_behind(b, depth, token, draft_probs, row)
                tree.nodes.append(_Node(token, stated, at, depth, value, goes_on))

    def _wanted(self, tree: _Tree, at: int, depth: int) -> Seq[int]:
        """Return the shape's indices of the children to draw for node `at`; without a shape, `top_k` new indices."""
        if tree.shape is None:
            return range(len(tree.nodes), len(tree.nodes) + self.options.top_k)
        return [
            i for i, node in enumerate(tree.shape) if node.depth == depth and tree.places.get(node.parent, None) == at
        ]


def _draft(tree: _Tree) -> Draft:
    """Return a draft of the nodes with the largest values, best first.

    Values never rise along a path, so the parents of the chosen nodes are chosen, too.
    """
    nodes = tree.nodes
    if tree.shape is not None:
        order = [tree.places[i] for i in range(len(tree.shape)) if i in tree.places]
    else:
        order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].value, i))[: tree.limit]
    places = {-1: -1} | {i: place for place, i in enumerate(order)}
    parents = [places[nodes[i].parent] for i in order]
    return Draft([nodes[i].token for i in order], parents, [0, len(order)], [nodes[i].probs for i in order])


def _accepted(tree: _Tree, seq: Sequence, num_held: int) -> Iterator[int]:
    """Yield the pending cache rows of committed tokens from `num_held` on, without the last, up to a missing row."""
    at = -1
    for token in seq.tokens[num_held : len(seq.tokens) - 1]:
        run = (i for i, node in enumerate(tree.nodes) if node.parent == at and node.token == token and node.row >= 0)
        at = next(run, -2)
        if at == -2:
            return
        yield tree.nodes[at].row


def needs(options: Options, target: Known) -> Needs:
    """Return the needs: the spec of the draft model. Raises the errors of `artifacts.load` for the file of shares."""
    _shares(options, target.fingerprint)
    return Needs(parts=(options.of,))


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter. Raises the errors of `artifacts.load` for `file`, and BadOption if `of` is no draft model."""
    shares = _shares(options, artifacts.fingerprint(target.tokenizer, target.num_ids))
    (model,) = made([options.of], target)
    if not isinstance(model, ModelDrafter):
        raise BadOption(f"tree:of={shown(options.of)} is not possible: it is no draft model; name one")
    return TreeDrafter(model, options, shares)


def _shares(options: Options, fingerprint: str | None) -> tuple[list[float], list[float]]:
    """Return the shares of a file for greedy and for other requests, as two lists. Without a file: usual shares."""
    if options.file is None:
        return list(USUAL_SHARES), list(USUAL_SHARES)
    arrays, _ = artifacts.load(options.file, KIND, fingerprint)
    shares = arrays.get("shares", np.empty(0)).astype(np.float64)
    if shares.ndim != 2 or len(shares) != 2 or shares.size == 0 or not ((shares >= 0) & (shares <= 1)).all():
        raise UnsupportedModel(f"{shown(options.file)} holds no shares: measure them again with `forerun train tree`")
    greedy, drawn = np.minimum.accumulate(shares, axis=1)
    return greedy.tolist(), drawn.tolist()
