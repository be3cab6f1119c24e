"""Typical acceptance: a drafted token is kept if the target finds it likely enough. LOSSY, only on request.

Medusa, Cai et al. 2024, arXiv 2401.10774, section 3.3.1. Let p be the target's distribution after the path, at the
request's temperature, and H(p) its entropy in nats. A token x is kept if

    p(x) > min(epsilon, delta exp(-H(p)))

The longest path of kept tokens wins; of several longest paths, the likeliest. The next token is drawn from the p after
this path. No coin is tossed, and nothing bounds how far the output's distribution is from the target's. For greedy
requests p is a point, so only the argmax is kept and the output is exact. (Helper functions of the published code
exchange the defaults of the two options. The defaults here follow the models of that code.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.registry import option
from forerun.sampling.arithmetic import entropy
from forerun.types import AcceptanceTest, Coins, Draft, Probs
from forerun.verify import Ruling, children_of

LOSSLESS = False
SHAPES = ("chain", "tree")
DRAWS = ("point", "independent", "distinct")
NEEDS_ALL_ROWS = True


@dataclass(frozen=True)
class Options:
    """The two limits on a token's probability. A token above either limit is kept."""

    epsilon: float = option(0.09, "probability above which a token is always kept", min=0.0, max=1.0)
    delta: float = option(0.3, "share of exp(-entropy) above which it is kept, too", min=0.0, max=1.0)


def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins, options: Options) -> Ruling:
    """Judge one sequence. Returns (accepted nodes, next token, acceptance tests).

    The tests cover all children of the root and of the accepted nodes.
    """
    first = draft.node_starts[b]
    rows = {-1: target_probs[0]}  # the target's distributions after the root (-1) and after kept nodes
    reached = {-1: (0, 0.0)}  # the depth of these nodes, and the log-probability of the path to each
    for node in draft.nodes(b):
        above = draft.parents[node]
        if above in rows and (prob := rows[above].at(draft.tokens[node])) > threshold(rows[above], options):
            depth, logprob = reached[above]
            rows[node], reached[node] = target_probs[node - first + 1], (depth + 1, logprob + math.log(prob))
    end = max(reached, key=lambda node: (reached[node], -node))
    path = draft.path(end)
    tests = []
    for above, kept in zip([-1, *path], [*path, None], strict=True):
        siblings = [node for node in children_of(draft, b, [above]) if node != kept]
        for node in siblings if kept is None else [*siblings, kept]:
            target_prob, draft_prob = rows[above].at(draft.tokens[node]), draft.probs[node].at(draft.tokens[node])
            tests.append(AcceptanceTest(node, target_prob, draft_prob, node == kept))
    return path, coins.draw(rows[end], len(path)), tests


def threshold(p: Probs, options: Options) -> float:
    """Return min(epsilon, delta exp(-H(p))), H in nats."""
    if p.point is not None:
        return min(options.epsilon, options.delta)
    return min(options.epsilon, options.delta * math.exp(-entropy(p.weights)))
