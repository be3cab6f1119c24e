"""Prints the rounds of a text as lines of a terminal, for debug=True.

The form follows a published toolkit for speculative decoding, with its counting mended: tokens are numbered from 1
over the whole text, a correction has the number of the token that it replaces, and "Accepted" counts the ticks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forerun.text.rounds import committed_pieces
from forerun.types import RoundDetail, Sequence, StepReport

WIDTH = 39


class DebugPrinter:
    """A listener that prints every round of one text.

    tokenizer: an object with `decode(ids)`; None = ids are printed. seq: the text. Its output up to a round is printed
    with the round.
    """

    def __init__(self, tokenizer: Any, seq: Sequence) -> None:
        self._tokenizer, self._seq = tokenizer, seq

    def __call__(self, report: StepReport) -> None:
        for detail, step in zip(report.rounds, report.sequences, strict=True):
            print("\n".join(self.lines(detail, step.num_committed)))

    def lines(self, detail: RoundDetail, num_committed: int) -> Iterator[str]:
        """Yield the lines of one round: the drafted tokens with probabilities and coins, and the target's token.

        num_committed: how many of the round's tokens entered the output, which may end within the round.
        """
        num, accepted = len(detail.tokens), set(detail.accepted)
        yield " Speculative Step ".center(WIDTH, "=")
        yield f"Position: {detail.position}, Gamma: {num}, Accepted: {len(accepted)}"
        for name in ("entropy_normalized", "gamma"):
            if name in detail.pacing:
                yield f"{name}: {detail.pacing[name]:.3g}"
        if num:
            yield from ("", "Drafts (Drafter):")
        tested = {test.node: test for test in detail.tests}
        coins = {toss.depth: toss.coin for toss in detail.tosses}
        for node, token in enumerate(detail.tokens):
            line = f"  [{detail.position + 1 + node}]: {self._text(token)} (q={_prob(detail.draft_probs[node])})"
            if node in accepted:
                yield f"{line} ✓"
            elif node in tested:
                yield f"{line} ✗ (rejected: {_why(tested[node], coins.get(node))})"
            else:
                yield f"{line} - (not tested)"
        last = "bonus" if len(accepted) == num else "adjusted distribution"
        if not num:
            last = "target's own"
        yield from ("", "Final Sample:")
        yield f"  [{detail.position + 1 + len(accepted)}]: {self._text(detail.next_token)} ({last})"
        said = self._seq.tokens[self._seq.num_prompt_tokens : detail.position]
        said += [piece.token for piece in committed_pieces(detail, num_committed)]
        yield from ("", f"Generated: {self._text(*said)}", "=" * WIDTH)

    def _text(self, *tokens: int) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return f'"{self._tokenizer.decode(list(tokens))}"'


def _why(test: Any, coin: float | None) -> str:
    ratio = test.target_prob / test.draft_prob if test.draft_prob else 0.0
    return f"p/q={_prob(ratio)}" if coin is None else f"r={_prob(coin)} > p/q={_prob(ratio)}"


def _prob(value: float) -> str:
    """Return a number with two decimals, or with two significant digits where two decimals would show 0.00."""
    return f"{value:.2f}" if value == 0 or value >= 0.005 else f"{value:.2g}"
