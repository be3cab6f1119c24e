"""Match verification: the target draws with noise of its own position, and a drafted token is kept where it agrees.

The draw at absolute index t is a function of the history and of noise(t) alone (Gumbel-max), so the output is, token
for token, that of plain decoding with the same seed, whatever the drafter, its length or the batch (Daliri,
Musco, Suresh 2024, arXiv 2408.07978). A drafter that uses the same noise is accepted with probability at least
(1 - TV) / (1 + TV). The draw that disagreed is emitted; drawing again would favour the drafted token (mutant m5).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.types import Coins, Draft, Probs, Trial, Verdict
from forerun.verify import Ruling, chain_nodes, collected

NAME = "match"


def verify(draft: Draft, target_probs: Seq[Seq[Probs]], coins: Seq[Coins]) -> Verdict:
    """Rule on every sequence of the draft; shapes as in `forerun.verify.judge`. Raises BadOption for a tree."""
    return collected([rule(draft, b, target_probs[b], coins[b]) for b in range(draft.num_sequences)])


def rule(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins) -> Ruling:
    """One sequence: (accepted nodes, correction or bonus, trials)."""
    path: list[int] = []
    trials: list[Trial] = []
    for depth, node in enumerate(chain_nodes(draft, b, NAME)):
        token, law = draft.tokens[node], target_probs[depth]
        drawn = coins.pick(law, depth)
        trials.append(Trial(node, law.at(token), draft.probs[node].at(token), drawn == token))
        if drawn != token:
            return path, drawn, trials
        path.append(node)
    return path, coins.pick(target_probs[len(path)], len(path)), trials
