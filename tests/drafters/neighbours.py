"""Drafts a tree of the tokens that followed the most similar inner hidden states in this text, as point masses."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from forerun.drafters import Drafter, Seen, Target
from forerun.host_tensor import Floats
from forerun.types import Budget, Coins, Draft, Probs, Sequence

LAYER = 2  # of the target, whose rows are compared


@dataclass(frozen=True)
class Options:
    """The width of the tree."""

    width: int = field(default=3, metadata={"help": "children of the root; each has one child", "min": 1, "max": 8})


class NeighbourDrafter(Drafter):
    """Keeps the hidden state of every token that was run; the last token's comes with the next pass."""

    shape, draws, hidden_layers = "tree", "point", (LAYER,)

    def __init__(self, options: Options) -> None:
        self.options, self._rows = options, dict[int, Floats]()

    def resumes_from(self, seq: Sequence, num_tokens: int) -> int:
        return 0  # the states of a prefix that the target does not run would be missing

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        for seq, one in zip(seqs, seen, strict=True):
            rows = one.layer(LAYER)
            had = self._rows.get(seq.id, rows[:0])[: one.start]
            self._rows[seq.id] = np.concatenate((had, rows / np.linalg.norm(rows, axis=1, keepdims=True)))

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        return Draft.joined([self._tree(seq, budget.num_tokens[b]) for b, seq in enumerate(seqs)])

    def end(self, seq: Sequence) -> None:
        self._rows.pop(seq.id, None)

    def _tree(self, seq: Sequence, most: int) -> Draft:
        """Draft the two tokens that followed the last token elsewhere, nearest hidden states first."""
        rows, tokens = self._rows[seq.id], seq.tokens
        order = np.argsort(-(rows[:-2] @ rows[-1])).tolist() if len(rows) > 2 else []
        followed = [i for i in order if tokens[i + 1] == tokens[-1]]
        firsts = {tokens[i + 2]: i + 3 for i in reversed(followed)}  # the nearest neighbour of a token wins
        roots = sorted(firsts, key=lambda token: followed.index(firsts[token] - 3))[: min(self.options.width, most)]
        seconds = [(n, tokens[firsts[t]]) for n, t in enumerate(roots) if firsts[t] < len(tokens)][: most - len(roots)]
        nodes = [*roots, *(token for _, token in seconds)]
        parents = [-1] * len(roots) + [n for n, _ in seconds]
        return Draft(nodes, parents, [0, len(nodes)], [Probs.of_point(token) for token in nodes])


def build(options: Options, target: Target) -> Drafter:
    return NeighbourDrafter(options)
