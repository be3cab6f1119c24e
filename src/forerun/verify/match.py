"""Match verification: the target draws a token with the position's noise, and an equal drafted token is accepted.

The draw at absolute index t is a function of the history and of noise(t) alone (Gumbel-max). So plain decoding with the
same seed yields the same output, token for token, whatever the drafter, the draft length or the batch (Daliri, Musco,
Suresh 2024, arXiv 2408.07978). A drafter that uses the same noise is accepted with probability at least
(1 - TV) / (1 + TV), where TV is the total variation between the target's and the draft's distribution. After a mismatch
the target's draw is emitted; a second draw would favour the drafted token (mutant m5).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.types import AcceptanceTest, Coins, Draft, Probs, Verdict
from forerun.verify import Ruling, children_of, collected, equal_siblings

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
        p = target_probs[path[-1] - first + 1 if path else 0]
        drawn = coins.pick(p, len(path))
        siblings = children_of(draft, b, at)
        for node in siblings:
            token = draft.tokens[node]
            tests.append(AcceptanceTest(node, p.at(token), draft.probs[node].at(token), drawn == token))
            if drawn == token:
                path.append(node)
                at = equal_siblings(draft, siblings, node)
                break
        else:
            return path, drawn, tests
