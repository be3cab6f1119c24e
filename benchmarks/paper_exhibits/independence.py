"""How far acceptances are from independent, which equation (1) of Leviathan et al. 2023 takes them for."""

import math
from collections.abc import Iterator, Sequence as Seq

from benchmarks.paper_alpha import Found
from benchmarks.paper_work import Work
from forerun.bench.exhibits import Exhibit, Panel, Plot, Value, columns, dots
from forerun.bench.tables import Column
from forerun.theory import formulas

NAME = "independence"
TITLE = "Tokens of a round: independent acceptances, and those of the texts"


def make(work: Work) -> Iterator[Exhibit]:
    """Make it for the pair without an encoder."""
    recipe = work.recipe(NAME, "num_tokens", "ngram", "spec_lengths")
    yield independence(work.alphas, NAME, TITLE, work.plan.spec_lengths, recipe)


def independence(found: Found, name: str, title: str, spec_lengths: Seq[int], recipe: str) -> Exhibit:
    """Return what equation (1) says of a round, beside what the texts say without assuming independence."""
    rows: list[tuple[Value, ...]] = []
    for setting in ("T=0", "T=1"):
        for guess in found.guessers:
            one = found.acceptances[setting, guess.name]
            for gamma in spec_lengths:
                by_formula, along = formulas.expected_tokens(one.alpha, gamma), one.tokens(gamma)
                correlation = one.correlation() if gamma == spec_lengths[0] else math.nan
                more = along.mean / by_formula - 1
                shown = None if math.isnan(correlation) else correlation
                rows.append((guess.name, setting, gamma, one.alpha, by_formula, *along, more, shown))
    curves = (dots("equation (1)", rows, 4), dots("along the texts", rows, 5))
    return Exhibit(
        name,
        title,
        (
            *columns("{}", "draft", "T", "K"),
            *columns("{:.3f}", "alpha", "equation\n(1)", "along\ntexts", "+-"),
            Column("more", form="{:+.1%}"),
            Column("neighbours'\ncorrelation", form="{:+.2f}"),
        ),
        rows,
        Plot([Panel("", "tokens of a round", "", curves, [f"{row[0]}, {row[1]}, K={row[2]}" for row in rows])]),
        "along texts: mean, over rounds that begin anywhere in the texts of table 3, of products of min(1, q / p): it "
        "assumes nothing; +-: one standard error, from text to text. correlation: of the acceptances of neighbouring "
        "tokens. Rounds of an engine begin behind the token that ended the round before, not anywhere.",
        recipe,
    )
