"""Ratio verification: rejection sampling, token by token, over chains and trees.

Chains are judged as in Leviathan et al. 2023, Algorithm 1, and Chen et al. 2023, Algorithm 2. Let p be the target's
distribution, and q the distribution that the token x was drawn from:

    accept x with probability min(1, p(x) / q(x));  else go on with p <- norm(max(0, p - q)).

Then P(emit x) = min(p, q)(x) + (1 - beta) (p - min(p, q))(x) / (1 - beta) = p(x), where beta = sum_x min(p, q)(x).
Several children of a node are tested in turn, each with the p that remains after the test before it (recursive
rejection sampling; SpecInfer, Miao et al. 2023, Algorithm 2; without replacement Jeon et al. 2024). Where no child is
accepted, the emitted token is drawn from the p that remains after the last test. A chain is a tree without siblings.
Equal siblings are separate draws, and each is tested. The second of two equal siblings is always rejected, but its q is
subtracted. Greedy decoding needs no special case, because p is a point mass then. docs/exactness.md has the edge cases.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.types import AcceptanceTest, Coins, Draft, Probs, Verdict
from forerun.verify import Ruling, children_of, collected, equal_siblings
from forerun.verify.arithmetic import acceptance, residual

LOSSLESS = True
SHAPES = ("chain", "tree")
DRAWS = ("point", "independent", "distinct", "any")
NEEDS_ALL_ROWS = False


@dataclass(frozen=True)
class Options:
    """No options."""


def verify(draft: Draft, target_probs: Seq[Seq[Probs]], coins: Seq[Coins]) -> Verdict:
    """Judge every sequence of the draft. For each sequence, the arguments are as in `forerun.verify.ruling`."""
    return collected([rule(draft, b, target_probs[b], coins[b]) for b in range(draft.num_sequences)])


def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins, options: Options | None = None) -> Ruling:
    """Judge one sequence. Returns (accepted nodes, correction or bonus, acceptance tests)."""
    path: list[int] = []
    tests: list[AcceptanceTest] = []
    at, first = [-1], draft.node_starts[b]  # at: the last node of the path, with its equal siblings
    while True:
        depth, siblings = len(path), children_of(draft, b, at)
        p = target_probs[path[-1] - first + 1 if path else 0]
        for lane, node in enumerate(siblings):
            token, q = draft.tokens[node], draft.probs[node]
            target_prob, draft_prob = p.at(token), q.at(token)
            is_accepted = coins.accept(acceptance(target_prob, draft_prob), depth, lane)
            tests.append(AcceptanceTest(node, target_prob, draft_prob, is_accepted))
            if is_accepted:
                path.append(node)
                at = equal_siblings(draft, siblings, node)
                break
            # A token with q(x) = 0 can only come from underflow: it is rejected, and its q is not subtracted.
            p = residual(p, q) if draft_prob > 0 else p
        else:
            return path, coins.draw(p, depth), tests
