"""Guess what followed the last token most often, or draw from what followed it (Leviathan et al. 2023, section 3.6).

q(v | u) = (C2[u][v] + k U1[v]) / (sum C2[u] + k) with U1 = C1 / sum C1: counts of pairs, which back off to the
frequencies of tokens. A point mass knows no back-off: behind a token that was never seen nothing is drafted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.drafters import Drafter, Target, tables
from forerun.drafters.tables import Table
from forerun.text.tokenizer import Tokenizer
from forerun.types import Probs


@dataclass(frozen=True)
class Options:
    """Where the counts are from, and how they are used."""

    path: str | None = field(default=None, metadata={"help": tables.PATH_HELP})
    k: float = field(
        default=1.0,
        metadata={"help": "weight of the back-off to single tokens, in occurrences of the last token", "min": 0.0},
    )
    draws: str = field(default="point", metadata={"help": tables.DRAWS_HELP})

    def __post_init__(self) -> None:
        tables.check_draws("bigram", self.draws)


def check(options: Options, tokenizer: Tokenizer, ignore_config_keys: frozenset[str]) -> None:
    """Refuse a file of another tokenizer, or one that is not whole."""
    tables.check_file(options.path, tokenizer)


def build(options: Options, target: Target) -> Drafter:
    """A drafter with a fitted table or none. Raises UserError for a file that is not of this target."""
    fitted = None if options.path is None else tables.load(options.path, target, order=2)
    dtype = tables.draft_dtype(target)

    def after(table: Table, token: int, samples: bool) -> Probs | None:
        if not samples:
            return tables.point(table.best(token))
        return tables.listed(*tables.mixture(table.behind(token), table.unigram(), options.k), dtype)

    return tables.drafter(options.draws, fitted, after)
