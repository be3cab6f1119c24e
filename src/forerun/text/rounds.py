"""Lists the tokens of a round with their outcomes: accepted, rejected, never tested, or chosen by the target itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from forerun.types import RoundDetail

Kind = Literal["accepted", "rejected", "untested", "correction", "bonus", "plain"]
# Styles in a terminal, and marks that survive without colour.
STYLES: dict[Kind, str] = {
    "accepted": "green",
    "rejected": "red",
    "untested": "dim",
    "correction": "bold blue",
    "bonus": "bold blue",
    "plain": "",
}
MARKS: dict[Kind, tuple[str, str]] = {
    "rejected": ("[-", "-]"),
    "untested": ("{", "}"),
    "correction": ("[+", "+]"),
    "bonus": ("[+", "+]"),
}


@dataclass(frozen=True)
class Piece:
    """One token of a round and its outcome."""

    token: int
    kind: Kind


def committed_pieces(detail: RoundDetail, num_committed: int) -> list[Piece]:
    """Return the tokens of a round that entered the output, each with its outcome.

    num_committed: how many tokens entered the output. A stop condition may have cut off the last tokens of the round.
    """
    pieces = [Piece(detail.tokens[node], "accepted") for node in detail.accepted]
    drafted = bool(detail.tokens)
    rejected = any(not test.accepted for test in detail.tests)
    last: Kind = "correction" if rejected else "bonus"
    if not drafted:
        last = "plain"
    return [*pieces, Piece(detail.next_token, last)][:num_committed]


def round_pieces(detail: RoundDetail, num_committed: int) -> list[Piece]:
    """Return the drafted tokens of a round and the target's own token, each with its outcome.

    The accepted tokens come first, then the rejected tokens, the target's token, and the untested tokens. Accepted
    tokens and the target's token are left out if a stop condition has cut them off. num_committed: how many tokens
    entered the output.
    """
    kept = committed_pieces(detail, num_committed)
    at, accepted = len(detail.accepted), set(detail.accepted)
    tested = {test.node for test in detail.tests}
    rejected = [Piece(detail.tokens[test.node], "rejected") for test in detail.tests if not test.accepted]
    behind = [Piece(t, "untested") for i, t in enumerate(detail.tokens) if i not in accepted and i not in tested]
    return [*kept[:at], *rejected, *kept[at:], *behind]
