"""The sequences that a beam search considers."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

# The next tokens of a sequence: num -> the `num` likeliest, or fewer, best first, and their log-probabilities.
Next = Callable[[int], tuple[Seq[int], Seq[float]]]


class Hypotheses:
    """The sequences that a beam search considers, as a tree that only grows. Each node is a token after its parent.

    tokens, parents: the token and the parent of each node; parent -1 = the prompt. base: the node of the last committed
    token, which all beams share. tips: the last nodes of the beams, best first. Drafters read the tree, and add the
    nodes that they guess.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.base, self.tips = -1, [-1]
        self._children: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int | None:
        """Return the child of node `parent` with this token; None where there is no such child."""
        return self._children.get((parent, token))

    def add(self, parent: int, token: int) -> int:
        """Return the child of node `parent` with this token. The child is added where it is missing."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def path(self, node: int, above: int = -1) -> list[int]:
        """Return the nodes below the ancestor `above` down to and including `node`; [] where both are the same."""
        path = []
        while node != above:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def text(self, node: int, above: int = -1) -> list[int]:
        """Return the tokens of the nodes that `path` returns."""
        return [self.tokens[n] for n in self.path(node, above)]

    def live(self) -> list[int]:
        """Return the base and all nodes between the base and the tips, tips included, each after its parent."""
        return sorted({self.base}.union(*(self.path(tip, self.base) for tip in self.tips)))
