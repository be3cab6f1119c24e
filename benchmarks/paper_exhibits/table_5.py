"""Table 5 of Leviathan et al. 2023 (arXiv 2211.17192), measured: alpha by lenience."""

from collections.abc import Iterator

from benchmarks.paper_alpha import Found, published
from benchmarks.paper_work import Work
from forerun.bench.exhibits import Curve, Exhibit, Panel, Plot, Value, columns
from forerun.bench.tables import Column
from forerun.theory.published import LENIENCES, TABLE_5

NAME = "table-5"
TITLE = "Table 5: alpha by lenience"
NOTE = " Published (T5-XXL, EnDe, T=1) in the order of sizes."


def make(work: Work) -> Iterator[Exhibit]:
    """Make it for the pair without an encoder."""
    yield table_5(work.alphas, NAME, TITLE, True, NOTE, work.recipe(NAME, "num_tokens", "ngram"))


def table_5(found: Found, name: str, title: str, with_published: bool, note: str, recipe: str) -> Exhibit:
    """Return alpha by lenience, at temperature 1 and, by the largest probability, at 0."""
    rows: list[tuple[Value, ...]] = []
    for setting in ("T=1", "T=0"):
        for guess in found.guessers:
            own = found.acceptances[setting, guess.name].alphas_by_lenience
            beside = published(found, TABLE_5, guess) if with_published and setting == "T=1" else None
            price = own[-1] - own[0] if setting == "T=1" else None
            theirs = beside or [None] * len(LENIENCES)
            rows.append((guess.name, setting, *own, price, *(theirs if with_published else ())))
    curves = [
        Curve(str(row[0]), LENIENCES, [float(str(value)) for value in row[2:6]]) for row in rows if row[1] == "T=1"
    ]
    return Exhibit(
        name,
        title,
        (
            *columns("{}", "draft", "T"),
            *(Column(f"l={x:g}", form="{:.3f}") for x in LENIENCES),
            Column("TV at\n.1", form="{:.3f}"),
            *(Column(f"publ.\nl={x:g}", form="{:.2f}") for x in LENIENCES if with_published),
        ),
        rows,
        Plot([Panel("temperature 1", "lenience l", "alpha", curves, y_limit=1, x_limit=1)]),
        f"Over the {found.tokens} tokens of table 3. T=1: mean of sum min(p / l, q); TV at .1: what that costs, "
        "the total variation distance to the target at a tested position. T=0: share of the draft's likeliest tokens "
        f"with p >= l max p, where the paper prints <=.{note}",
        recipe,
    )
