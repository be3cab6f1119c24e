"""The texts that a beam search looks at."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq

# What may follow a text: num -> its `num` likeliest tokens, or fewer, best first, and their log-probabilities.
Next = Callable[[int], tuple[Seq[int], Seq[float]]]


class Hypotheses:
    """The texts that a beam search looks at, as a tree that only grows: each node is a token behind its parent.

    tokens, parents: by node; -1 = the prompt. base: node of the last committed token, which all live texts share. tips:
    the last nodes of the live texts, best first. Drafters read it, and add the nodes that they guess.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.base, self.tips = -1, [-1]
        self._children: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int | None:
        """Return the node of `token` behind a node; None where there is none."""
        return self._children.get((parent, token))

    def add(self, parent: int, token: int) -> int:
        """Return the node of `token` behind `parent`, added where there is none."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def path(self, node: int, above: int = -1) -> list[int]:
        """Return the nodes behind the ancestor `above` down to `node`, itself included unless it is `above`."""
        path = []
        while node != above:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def text(self, node: int, above: int = -1) -> list[int]:
        """Return the tokens of `path`."""
        return [self.tokens[n] for n in self.path(node, above)]

    def live(self) -> list[int]:
        """Return the base and all nodes from it to the tips, tips included, each behind its parent."""
        return sorted({self.base}.union(*(self.path(tip, self.base) for tip in self.tips)))
