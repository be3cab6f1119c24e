"""Lenience: more drafted tokens are accepted than the target's distribution allows. LOSSY, only on request.

Leviathan et al. 2023, arXiv 2211.17192, appendix A.5. With l in (0, 1], at a temperature above 0:

    accept x with probability min(1, p(x) / (l q(x)));  else emit norm((p - q)+)

The emitted token is then at most 1 / l times as likely as in p. The total variation between its distribution and p is
exactly alpha_l - alpha_1, where alpha_l = sum_x min(q(x), p(x) / l). This difference is the price. The mean price of
the tested tokens is reported as tv_price. No other residual has a lower price. A text of N tokens is at most 1 / l^N
times as likely as in plain decoding. Nothing bounds the probability of a text from below.

The paper does not say from which distribution a correction is drawn. The option correction=target draws the correction
from p, as code without the residual does. Likely tokens then become likelier, even at l = 1, and the price says by how
much.

For greedy requests p is the target's distribution at temperature 1. A drafted token is kept if p(x) >= l max p;
otherwise the argmax is emitted. (The paper prints "p(x) <= l max p", which accepts everything at l = 1 and less for
smaller l; its own table shows the opposite.) At l = 1 only the lowest id among ties is kept, so that l = 1 is plain
greedy decoding.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from forerun.errors import BadOption, shown
from forerun.registry import option
from forerun.sampling.arithmetic import mass
from forerun.types import AcceptanceTest, Coins, Draft, Probs
from forerun.verify import Ruling
from forerun.verify.arithmetic import acceptance, aligned, residual, reweighted

LOSSLESS = False
SHAPES = ("chain",)
DRAWS = ("point", "independent", "distinct")
NEEDS_ALL_ROWS = False
READS_SOFT_ROWS = True


@dataclass(frozen=True)
class Options:
    """How lenient the rule is, and what replaces a rejected token."""

    l: float = option(  # noqa: E741 - the paper's letter
        0.8, "share of q, above 0, that p must reach; 1 = exact", min=0.0, max=1.0
    )
    correction: str = option("residual", "what a correction is drawn from: residual, or target (biased also at l=1)")

    def __post_init__(self) -> None:
        if self.correction not in ("residual", "target"):
            raise BadOption(
                f"lenience:correction={shown(self.correction)} is not possible: it must be residual or target"
            )
        if self.l == 0:
            raise BadOption("lenience:l=0 is not possible: it would keep every drafted token; it must be above 0")


def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins, options: Options) -> Ruling:
    """Judge one chain. Returns (accepted nodes, correction or bonus, acceptance tests with their prices)."""
    tests: list[AcceptanceTest] = []
    nodes = draft.nodes(b)
    for depth, node in enumerate(nodes):
        p, q, token = target_probs[depth], draft.probs[node], draft.tokens[node]
        lenient = _caps(p, options.l)
        anew = options.correction == "target"
        is_accepted = coins.accept(acceptance(lenient.at(token), q.at(token)), depth)
        tests.append(AcceptanceTest(node, p.at(token), q.at(token), is_accepted, _price(p, q, lenient, anew)))
        if not is_accepted:
            return list(nodes[:depth]), coins.draw(p if anew else residual(p, q), depth), tests
    return list(nodes), coins.draw(target_probs[len(nodes)], len(nodes)), tests


def _price(p: Probs, q: Probs, lenient: Probs, anew: bool) -> float:
    """Return the total variation between p and the emitted token's distribution. anew: whether p gives corrections."""
    if anew and p.point is None:
        kept = np.minimum(aligned(q, lenient), lenient.weights)
        target_probs = p.weights.astype(np.float64)
        return mass(np.abs(kept + (1 - mass(kept)) * target_probs - target_probs)) / 2
    return max(0.0, _accepted_share(q, lenient) - _accepted_share(q, _caps(p, 1.0)))


def _caps(p: Probs, share: float) -> Probs:
    """Return for each id the largest part of q that is kept: p / share, or 1 for ids that a greedy request may keep.

    The result has the form of a distribution, but its weights need not sum to 1.
    """
    if p.point is None:
        return reweighted(p, p.weights.astype(np.float64) / share)
    if p.soft is None or p.soft.point is not None or share == 1:  # only one token is possible
        return p
    soft = p.soft.weights.astype(np.float64)
    return reweighted(p.soft, (soft >= share * soft.max()).astype(np.float64))


def _accepted_share(q: Probs, caps: Probs) -> float:
    """Return alpha = sum_x min(q(x), cap(x))."""
    if caps.point is not None:
        return q.at(caps.point)
    return mass(np.minimum(aligned(q, caps), caps.weights))
