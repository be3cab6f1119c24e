"""The ruling on a draft."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.types.draft import Draft

NO_TOKEN = -2  # where there is no token: behind a beam search whose texts differ, or where masks leave none


@dataclass(frozen=True)
class AcceptanceTest:
    """One test of a verdict: the node, its target and draft probability, and the outcome.

    Where a node has several children, each test after the first uses the residual of the target's probabilities that
    the earlier tests left. price: of a lossy rule that knows it, the total variation between the target's distribution
    and the distribution of the token emitted here.
    """

    node: int
    target_prob: float
    draft_prob: float
    accepted: bool
    price: float | None = None


@dataclass
class Verdict:
    """The ruling on a Draft. Lists over the B sequences; a step emits len(paths[b]) + 1 tokens."""

    paths: list[list[int]]  # accepted nodes, flat indices, root to tip
    # A correction after a rejection, a bonus after none, plain where nothing was drafted; NO_TOKEN = the path alone is
    # emitted, by a beam search whose texts differ behind it.
    next_tokens: list[int]
    tests: list[list[AcceptanceTest]]  # of every child that was tested, in order

    def num_tested(self, b: int) -> int:
        """Return how many nodes of sequence b's path had a tested child, the root included.

        Several tested children of one node count once.
        """
        is_rejected = bool(self.tests[b]) and not self.tests[b][-1].accepted
        return len(self.paths[b]) + is_rejected

    def emitted(self, draft: Draft, b: int) -> list[int]:
        """Return the tokens that the step emits for sequence b: the accepted ones, then the next token."""
        path, next_token = self.paths[b], self.next_tokens[b]
        behind = [] if next_token == NO_TOKEN else [next_token]
        return [*[draft.tokens[n] for n in path], *behind] if path else behind
