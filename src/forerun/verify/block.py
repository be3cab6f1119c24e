"""Block verification: the tokens of a chain are judged together, which keeps more than judging them one by one.

Sun et al. 2024, arXiv 2403.10444, Algorithm 2. Let p_i be the target's distribution for the i-th drafted token x_i, and
q_i the distribution that x_i was drawn from:

    P_0 = 1,  P_i = min(1, P_(i-1) p_i(x_i) / q_i(x_i))       the share of the draft's mass that may stay on x_1 .. x_i
    R_i = sum_x (P_i p_(i+1)(x) - q_(i+1)(x))+                the room that longer prefixes leave to x_1 .. x_i
    h_i = R_i / (R_i + 1 - P_i),  at the last token P_i       accept x_1 .. x_i if every longer prefix is rejected

The longest accepted prefix wins. After it comes a token drawn from norm((P_i p_(i+1) - q_(i+1))+), or the bonus. Then
P(at least i tokens are accepted | x_1 .. x_i) = P_i. At the last token this holds by the choice of h_i. Before the last
token E[P_(i+1)] = P_i - R_i, so that P_i - R_i + (1 - P_i + R_i) h_i = P_i. The probability mass emitted after
x_1 .. x_i is then P_i p_(i+1) times the draft's probability of x_1 .. x_i. P_i is never below the product of
min(1, p / q), the share that verification token by token keeps. A P_i that underflows to 0 loses no more than the mass
that it stands for, so that no logarithms are needed.

No exact rule keeps more in a round, on any prefix, if the target alone continues after the round. Let A_i be the
probability that the draft begins with x_1 .. x_i and the rule accepts them all. An output may also begin with
x_1 .. x_(i-1) although the rule has not accepted them all. Its round has then ended at x_(i-1) or earlier, so that the
output goes on with p_i. As the rule is exact, the outputs in which the rule has accepted x_1 .. x_(i-1) must go on with
p_i, too. Hence A_i <= A_(i-1) p_i(x_i). A_i is also at most the draft's probability of x_1 .. x_i. Divided by this
probability, these two bounds of A_i become the two bounds of P_i.

The exact and stateless form of hierarchical verification (Zhou et al. 2026, arXiv 2601.05724) is this rule. That method
caps r_i, the product of p / q, by the largest product so far: r_i / max(r_0, ..., r_i) = P_i. Its acceptance
probability is the ratio of the excess R_i to the deficit sum_x (q_(i+1)(x) - P_i p_(i+1)(x))+ = R_i + 1 - P_i.
tests/verify/test_hierarchical.py compares the two rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.types import AcceptanceTest, Coins, Draft, Probs
from forerun.verify import Ruling
from forerun.verify.arithmetic import acceptance, excess

LOSSLESS = True
SHAPES = ("chain",)
DRAWS = ("point", "independent", "distinct")
NEEDS_ALL_ROWS = True


@dataclass(frozen=True)
class Options:
    """No options."""


def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins, options: Options | None = None) -> Ruling:
    """Judge one chain. Returns (accepted nodes, correction or bonus, acceptance tests).

    The tests cover the accepted tokens and the first rejected token.
    """
    nodes, shares, tests = list(draft.nodes(b)), [1.0], list[AcceptanceTest]()  # shares: P_0, P_1, ...
    num_judged = len(nodes)
    for i, node in enumerate(nodes):
        target_prob, draft_prob = target_probs[i].at(draft.tokens[node]), draft.probs[node].at(draft.tokens[node])
        tests.append(AcceptanceTest(node, target_prob, draft_prob, False))
        if draft_prob == 0:  # only by underflow: judged as if the draft had ended before this node
            num_judged = i
        if target_prob == 0 or draft_prob == 0:
            break
        shares.append(acceptance(shares[-1] * target_prob, draft_prob))
    for i in reversed(range(len(shares))):
        rest, share = target_probs[i], shares[i]
        if i < num_judged:
            rest, room = excess(rest, draft.probs[nodes[i]], share)
            share = remaining_share(share, room)
        if i == 0 or coins.accept(share, i - 1):
            kept = [dataclasses.replace(test, accepted=True) for test in tests[:i]]
            return nodes[:i], coins.draw(rest, i), kept + tests[i : i + 1]
    raise AssertionError("the empty prefix is always accepted")


def remaining_share(share: float, room: float) -> float:
    """Return h = R / (R + 1 - P), the share that a prefix keeps if every longer prefix is rejected; 1 if P = 1.

    The symbols are explained at the top of the file. The arguments are P (share) and R (room).
    """
    return 1.0 if share == 1 else room / (room + 1 - share)
