"""Medusa: heads that guess several tokens ahead from the target's last hidden state (Cai et al. 2024, 2401.10774).

Head k is a residual block on the hidden state of the last token that the target has run. It guesses the token k places
after the next token, whichever tokens come between. The draft is a tree of fixed shape. The children of a node are the
likeliest ids of the head for the children's depth. All nodes are point masses, so the verification rules are exact. The
published typical acceptance is a separate rule (docs/methods/typical.md). `forerun train head --method medusa` trains
heads. Their LM head consists of the target's LM head rows for the ids that the target emits most often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from forerun.blocks import HEAD, Features
from forerun.drafters import Drafter, Known, Needs, Seen, Target
from forerun.drafters.shared import artifacts, head_files, head_layouts
from forerun.drafters.shared.head_matrices import Weight
from forerun.drafters.shared.residual_heads import ResidualHead
from forerun.errors import BadOption, shown
from forerun.host_tensor import HostTensor
from forerun.models.configs import size
from forerun.ops.model import Model, RowsOf
from forerun.registry import option
from forerun.sampling.largest import Ids
from forerun.theory.trees import Node, best_first
from forerun.types import Budget, Coins, Draft, Probs, Sequence

# How often the target chooses the id of each rank in a head's guess. These shares shape the tree.
SHARES = (0.5, 0.14, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01)


@dataclass(frozen=True)
class Options:
    """The options: the folder of the heads, and the shape of the draft."""

    path: str | None = option(None, head_files.path_help("medusa"))
    shape: str = option("3x2x1x1", "children of a node by depth, as in 3x2x1; 1x1x1 = a chain")

    def __post_init__(self) -> None:
        widths(self.shape)


def widths(shape: str, method: str = "medusa") -> list[int]:
    """Return the number of children of a node, by depth, from a shape such as 3x2x1. Raises BadOption if invalid."""
    numbers = [int(part) if part.isdigit() and len(part) < 3 else 0 for part in shape.split("x")]
    if not all(0 < width <= len(SHARES) for width in numbers):
        raise BadOption(f"{method}:shape={shown(shape)} is not possible: widths of 1 to {len(SHARES)}, as in 3x2x1")
    return numbers


# (depth; for each node, the index of its hidden state and the tokens of its path) -> for each node, the likeliest ids
# of the head for that depth, best first.
Following = Callable[[int, Seq[tuple[int, Seq[int]]]], list[list[int]]]


class TreeHeads(Protocol):
    """Heads that guess the tokens of a tree, one head for each depth."""

    num_heads: int

    def following(self, hidden: Any, last: Seq[int], num_heads: int, num: int) -> Following:
        """Return a function that guesses `num` children for each node of a depth, with the first `num_heads` heads.

        hidden [B, H]: each sequence's hidden state of the last token that the target has run. last [B]: the last
        committed token of each sequence, which the target has not run yet.
        """


class Heads:
    """The Medusa heads of one target. ids [n]: the ids that the heads draft.

    weights: the tensors by name: residual blocks for each head, and perhaps LM heads. Each head may have its own LM
    head `lm_head.{head}.weight` [n, H], or all heads may share the LM head `lm_head.weight`. Without LM heads in
    `weights`, the heads use the target's LM head.
    """

    def __init__(self, weights: Mapping[str, Weight], num_heads: int, num_blocks: int, ids: Ids, target: Model) -> None:
        self.num_heads, self._ids, self._rows = num_heads, ids, target.rows
        self._has_own = "lm_head.0.weight" in weights  # an LM head for each head
        features = Features(target.config.vocab_size, target.config.hidden_size, input="features")
        self._heads = list[ResidualHead]()
        for head in range(num_heads):
            parts = {
                f"{block}.{end}": weights[name]
                for block in range(num_blocks)
                for end in ("weight", "bias")
                if (name := f"{head}.{block}.linear.{end}") in weights
            }
            if self._has_own:
                parts[HEAD] = weights[f"lm_head.{head}.weight"]
            elif head == 0:
                parts[HEAD] = weights[HEAD] if HEAD in weights else HostTensor.of(target.head(ids.tolist()))
            first = self._heads[0] if head and not self._has_own else None
            self._heads.append(ResidualHead.of(target, features, parts, len(ids), first))

    def following(self, hidden: Any, last: Seq[int], num_heads: int, num: int) -> Following:
        """Return a function that gives the guesses for the nodes of a depth (see TreeHeads).

        All heads are computed at once, because no head reads the tokens of a path.
        """
        guesses = self.guesses(hidden, num_heads, num)
        return lambda depth, nodes: [guesses[row][depth] for row, _ in nodes]

    def guesses(self, hidden: Any, num_heads: int, num: int) -> list[list[list[int]]]:
        """Return, for each hidden state of `hidden` [B, H], the `num` likeliest ids of each head, as [B][head][num]."""
        heads = self._heads[:num_heads]
        rows = [head.rows([hidden]) for head in heads]
        each = [head.logits(read) for head, read in zip(heads, rows, strict=True)] if self._has_own else []
        logits = self._rows.join(each) if each else heads[0].logits(self._rows.join(rows))
        best = self._ids[self._rows.top(logits, num)].tolist()
        by_head = [best[i : i + len(hidden)] for i in range(0, len(best), len(hidden))]
        return [list(guesses) for guesses in zip(*by_head, strict=True)]


@dataclass
class _Tree:
    """The draft of one sequence while it grows, depth by depth.

    nodes: the nodes of the fixed tree. places: maps a node's index in `nodes` to the node's index in the draft.
    """

    nodes: list[Node]
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)

    def families(self, depth: int) -> dict[int, list[int]]:
        """Return the fixed tree's nodes of one depth, by parent (-1 = the root).

        Nodes whose parent is not in the draft are left out.
        """
        families: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if node.depth == depth and (node.parent < 0 or node.parent in self.places):
                families.setdefault(node.parent, []).append(i)
        return families

    def path(self, node: int) -> list[int]:
        """Return the tokens on the path from the root down to a node of the fixed tree."""
        tokens = list[int]()
        while node >= 0:
            tokens.append(self.tokens[self.places[node]])
            node = self.nodes[node].parent
        return tokens[::-1]

    def add(self, node: int, token: int) -> None:
        """Add a node of the fixed tree to the draft, with the token `token`."""
        parent = self.nodes[node].parent
        self.places[node] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(self.places[parent] if parent >= 0 else -1)

    def draft(self) -> Draft:
        """Return the tree as a draft of one sequence, with point masses."""
        each_probs = [Probs.of_point(token) for token in self.tokens]
        return Draft(self.tokens, self.parents, [0, len(self.tokens)], each_probs)


class MedusaDrafter(Drafter):
    """Drafts a tree from the heads' guesses, which depend on each sequence's last hidden state."""

    drafts_behind = False  # the heads read the target's row right before the last committed token
    draws = "point"

    def __init__(self, heads: TreeHeads, shape: str, rows: RowsOf) -> None:
        self._heads, self._widths = heads, widths(shape)[: heads.num_heads]
        self.shape = "chain" if max(self._widths) == 1 else "tree"
        self._rows = rows
        self._hidden = dict[int, tuple[int, Any]]()  # by sequence: the number of tokens up to the row, and the row

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        for seq, view in zip(seqs, seen, strict=True):
            if len(view.kept):
                self._hidden[seq.id] = view.start + len(view.kept), self._rows.take(view.hidden, [-1])

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        ready = [b for b, seq in enumerate(seqs) if budget.num_tokens[b] > 0 and self._is_known(seq)]
        drafts = [Draft.empty(1) for _ in seqs]
        if ready:
            last = [seqs[b].tokens[-1] for b in ready]
            rows = self._rows.join([self._hidden[seqs[b].id][1] for b in ready])
            following = self._heads.following(rows, last, len(self._widths), max(self._widths))
            for b, tree in zip(ready, self._trees(ready, following, budget), strict=True):
                drafts[b] = tree.draft()
        return Draft.joined(drafts)

    def end(self, seq: Sequence) -> None:
        self._hidden.pop(seq.id, None)

    def _is_known(self, seq: Sequence) -> bool:
        """Return whether the target's hidden state of the token before the last committed token is stored."""
        return self._hidden.get(seq.id, (-1, None))[0] == len(seq.tokens) - 1

    def _trees(self, ready: Seq[int], following: Following, budget: Budget) -> list[_Tree]:
        """Draft a tree for each sequence in `ready`, as far as pacing allows. ready: the sequences' indices."""
        trees = [_Tree(best_first(SHARES, budget.num_tokens[b], self._widths)) for b in ready]
        for depth in range(len(self._widths)):
            families = [(i, *family) for i, tree in enumerate(trees) for family in tree.families(depth).items()]
            if not families:
                break
            guesses = following(depth, [(i, trees[i].path(parent)) for i, parent, _ in families])
            for (i, _, nodes), ids in zip(families, guesses, strict=True):
                for node, token in zip(nodes, ids, strict=False):  # fewer ids than nodes: a small vocabulary
                    if budget.go_on(ready[i], depth, Probs.of_point(token)):
                        trees[i].add(node, token)
        return trees


def needs(options: Options, target: Known) -> Needs:
    """Return the memory needs of the heads' weights. Raises the errors of `build` if there are no fitting heads."""
    path = head_files.located(options.path, "medusa")
    if head_layouts.find(path, "medusa") is None:
        head_files.read_config(path, "medusa", target.fingerprint)
    return Needs(weights=head_files.own_weights(path, target, all_rows=True))


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter. Raises the errors of shared/head_files.py and shared/head_layouts.py."""
    path = head_files.located(options.path, "medusa")
    if (published := head_layouts.find(path, "medusa")) is not None:
        stored = head_layouts.read_medusa(published, target)
        heads = Heads(stored.weights, stored.num_heads, stored.num_blocks, stored.ids, target.model)
    else:
        heads = _read_own(path, target)
    return MedusaDrafter(heads, options.shape, target.model.rows)


def _read_own(path: str, target: Target) -> Heads:
    config = head_files.read_config(path, "medusa", artifacts.fingerprint(target.tokenizer, target.num_ids))
    num_heads, num_blocks = size(config, "medusa_num_heads"), size(config, "medusa_num_layers")
    width = target.model.config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"d2t": (size(config, "draft_vocab_size"),)}
    for head in range(num_heads):
        for block in range(num_blocks):
            shapes |= {f"{head}.{block}.linear.weight": (width, width), f"{head}.{block}.linear.bias": (width,)}
    weights = head_files.read_weights(path, shapes, target.model, target.num_ids)
    ids = head_files.draft_ids(path, weights.pop("d2t"), target.num_ids)
    return Heads(weights, num_heads, num_blocks, ids, target.model)
