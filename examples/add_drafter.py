"""A drafter in one file, used and proven: `python examples/add_drafter.py [MODEL]`.

It counts which token followed which in the text so far, and draws from these counts. A drafter of the package is such a
file in src/forerun/drafters; this one stands elsewhere, so its folder is added to those that are searched.
"""

import sys
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from forerun import LLM, SamplingParams, drafters
from forerun.drafters import Drafter, Target
from forerun.types import Budget, Coins, Draft, Probs, Sequence


@dataclass(frozen=True)
class Options:
    """Which pairs of tokens are used."""

    min_count: int = field(default=1, metadata={"help": "occurrences before a pair is used", "min": 1, "max": 1000})


class FollowersDrafter(Drafter):
    """Counts the pairs of the text anew in each step, which is fast enough for short texts."""

    def __init__(self, min_count: int, num_ids: int) -> None:
        self.min_count = min_count
        self.num_ids = num_ids

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        """Return a chain of guesses for each sequence, and the distribution that each was drawn from."""
        chains = [self._chain(seq, b, budget, coins[b]) for b, seq in enumerate(seqs)]
        return Draft.chains([tokens for tokens, _ in chains], [probs for _, probs in chains])

    def _chain(self, seq: Sequence, b: int, budget: Budget, coins: Coins) -> tuple[list[int], list[Probs]]:
        pairs = Counter(pairwise(seq.tokens))
        # Match verification draws the target's token with the noise of the position: draw with the same noise.
        draw = coins.pick if seq.acceptance == "match" else coins.draft
        tokens: list[int] = []
        probs: list[Probs] = []
        while len(tokens) < budget.num_tokens[b]:
            last = tokens[-1] if tokens else seq.tokens[-1]
            weights = np.zeros(self.num_ids)
            for (before, after), count in pairs.items():
                if before == last and count >= self.min_count:
                    weights[after] = count
            if not weights.any():
                break  # to draft less, or nothing, is always allowed
            draft_probs = Probs(dense=weights / weights.sum())
            if not budget.go_on(b, len(tokens), draft_probs):
                break  # asked before the draw: whether a token is drafted must not depend on the token
            tokens.append(draw(draft_probs, len(tokens)))
            probs.append(draft_probs)
        return tokens, probs


def build(options: Options, target: Target) -> Drafter:
    """Make the drafter. The engine calls this once, with the options that the user gave."""
    return FollowersDrafter(options.min_count, target.num_ids)


def main() -> None:
    drafters.__path__.append(str(Path(__file__).parent))  # this file is a drafter, named as the file

    # Used: greedy and with a seed the text is plain decoding's.
    model = sys.argv[1] if len(sys.argv) > 1 else None
    prompt = "for i in range(10):\n    for j in range(10):\n        for k in"
    requests = [SamplingParams(max_tokens=16, temperature=0), SamplingParams(max_tokens=16, temperature=0.8, seed=7)]
    plain = LLM(model, draft="none").generate([prompt, prompt], requests, raw=True)
    drafted = LLM(model, draft="add_drafter:min_count=1", spec_length=3).generate([prompt, prompt], requests, raw=True)
    print("accepted of", drafted[0].report.num_drafted, "guesses:", drafted[0].report.num_accepted)
    print("the same texts:", [out.token_ids for out in drafted] == [out.token_ids for out in plain])

    # Proven: the real engine runs through every outcome of every coin on a toy model.
    from forerun.testing.engines import Case, error

    for rule in ("ratio", "match"):
        distance = error(Case("add_drafter", SamplingParams(max_tokens=3, acceptance=rule)))
        print(f"{rule}: the distribution is plain decoding's:", distance < 1e-12)


if __name__ == "__main__":
    main()
