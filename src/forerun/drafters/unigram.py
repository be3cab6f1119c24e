"""Guess the token that is most frequent at all, or draw one by its frequency: the least that any drafter can know.

It is the floor that other methods are compared with (Leviathan et al. 2023, arXiv 2211.17192, section 3.6, use tables).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.drafters import Drafter, Target, tables
from forerun.drafters.tables import Table
from forerun.text.tokenizer import Tokenizer
from forerun.types import Probs


@dataclass(frozen=True)
class Options:
    """Where the frequencies are from, and how they are used."""

    path: str | None = field(default=None, metadata={"help": tables.PATH_HELP})
    draws: str = field(default="point", metadata={"help": tables.DRAWS_HELP})

    def __post_init__(self) -> None:
        tables.check_draws("unigram", self.draws)


def check(options: Options, tokenizer: Tokenizer, ignore_config_keys: frozenset[str]) -> None:
    """Refuse a file of another tokenizer, or one that is not whole."""
    tables.check_file(options.path, tokenizer)


def build(options: Options, target: Target) -> Drafter:
    """A drafter with a fitted table or none. Raises UserError for a file that is not of this target."""
    fitted = None if options.path is None else tables.load(options.path, target, order=1)
    dtype = tables.draft_dtype(target)

    def after(table: Table, token: int, samples: bool) -> Probs | None:
        if not samples:
            return tables.point(table.best(None))
        return tables.listed(*tables.mixture(tables.NOTHING, table.unigram(), 1.0), dtype)

    return tables.drafter(options.draws, fitted, after)
