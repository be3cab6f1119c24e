"""The ruling on a draft: which drafted tokens are accepted, and which token follows them."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.types.draft import Draft

NO_TOKEN = -2  # stands for a missing token: where the beams of a search differ next, or where masks leave no id


@dataclass(frozen=True)
class AcceptanceTest:
    """One test of a verdict: the node, its target and draft probability, and the outcome.

    Where a node has several children, they are tested in turn. Each test after the first uses the residual of the
    target's distribution after the earlier tests. price: the total variation between the target's distribution and the
    distribution of the token emitted here; None unless a lossy rule computes it.
    """

    node: int
    target_prob: float
    draft_prob: float
    accepted: bool
    price: float | None = None


@dataclass
class Verdict:
    """The ruling on a Draft, in lists over the B sequences. A step emits the path's tokens, then the next token."""

    paths: list[list[int]]  # accepted nodes, flat indices, root to tip
    # A correction after a rejection, a bonus after none, a plain token where nothing was drafted. NO_TOKEN = only the
    # path is emitted, because the beams of a beam search differ after it.
    next_tokens: list[int]
    tests: list[list[AcceptanceTest]]  # one for every child that was tested, in order

    def num_tested(self, b: int) -> int:
        """Return the number of nodes on sequence b's path, root included, that had a tested child.

        Several tested children of one node count once.
        """
        is_rejected = bool(self.tests[b]) and not self.tests[b][-1].accepted
        return len(self.paths[b]) + is_rejected

    def emitted(self, draft: Draft, b: int) -> list[int]:
        """Return the tokens that the step emits for sequence b: the accepted tokens, then the next token if any."""
        path, next_token = self.paths[b], self.next_tokens[b]
        behind = [] if next_token == NO_TOKEN else [next_token]
        return [*[draft.tokens[n] for n in path], *behind] if path else behind
