"""Table 3 of Leviathan et al. 2023 (arXiv 2211.17192), measured: alpha by draft and sampling."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.paper_alpha import SETTINGS, Found, Guesser, published, size_name
from benchmarks.paper_work import Work
from forerun.bench.exhibits import Exhibit, Panel, Plot, Value, columns, dots
from forerun.bench.tables import Column
from forerun.theory.published import TABLE_3

NAME = "table-3"
NOTE = (
    " Published: of other models and texts: unigram and bigram beside theirs, T5-small, base and large and LaMDA 100M, "
    "2B and 8B beside the draft models in the order of their sizes, GPT-like 6M beside the one with the nearest ratio "
    "of sizes. LaMDA always samples through top-k 40."
)


def make(work: Work) -> Iterator[Exhibit]:
    """Make it for the pair without an encoder, beside all published targets."""
    given: dict[str, Mapping[str, Any]] = {
        "GPT-like 97M": {"is_gpt": True},
        "T5-XXL EnDe": {},
        "T5-XXL CNNDM": {},
        "LaMDA 137B": {"drafts": tuple(TABLE_3["LaMDA 137B"])},
    }
    recipe = work.recipe(NAME, "num_tokens", "ngram")
    yield table_3(work.alphas, NAME, "Table 3: alpha by draft and sampling", given, NOTE, recipe)


def table_3(
    found: Found, name: str, title: str, beside: Mapping[str, Mapping[str, Any]], note: str, recipe: str
) -> Exhibit:
    """Return alpha of every guesser and setting. beside: the published targets, and how `published` finds an entry."""
    rows: list[tuple[Value, ...]] = []

    def entry(target: str, guess: Guesser, at: int | None) -> float | None:
        pair = None if at is None else published(found, TABLE_3[target], guess, **beside[target])
        return None if pair is None or at is None else pair[at]

    for guess in found.guessers:
        for setting in SETTINGS:
            one = found.acceptances[setting, guess.name]
            at = {"T=0": 0, "T=1": 1}.get(setting)
            theirs = [entry(target, guess, at) for target in beside]
            rows.append((guess.name, setting, one.alpha, one.alpha_error, *theirs))
    curves = [
        dots("measured", rows, 2),
        *(dots(f"published, {target}", rows, 4 + i) for i, target in enumerate(beside)),
    ]
    return Exhibit(
        name,
        title,
        (
            *columns("{}", "draft", "sampling"),
            *columns("{:.3f}", "alpha", "+-"),
            *(Column(f"published,\n{target}", form="{:.2f}") for target in beside),
        ),
        rows,
        Plot([Panel("", "alpha", "", curves, [f"{row[0]}, {row[1]}" for row in rows], x_limit=1)]),
        f"alpha: mean of sum min(p, q) over {found.tokens} tokens that the target, of "
        f"{size_name(found.target_parameters)} parameters, wrote in each setting; +-: one standard error, from text to "
        f"text.{note}",
        recipe,
    )
