"""docs/methods/: one page of one form for each method, and the table of all of them, which a command writes."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun import verify
from forerun.registry import names
from forerun.types import SamplingParams

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "methods"
ROOMS = ("drafters", "verify", "pacing")
METHODS = [(room, name) for room in ROOMS for name in names(f"forerun.{room}")]
SEARCH, SEARCH_OPTIONS = "beam", ("num_beams", "draft_beams", "length_penalty", "early_stopping")
HEADINGS = ["When it wins", "When it loses", "Cost", "Exactness", "Options", "Source", "Measured"]
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", re.M)
spec = importlib.util.spec_from_file_location("methods_table", ROOT / "docs" / "methods_table.py")
assert spec is not None
assert spec.loader is not None
methods_table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(methods_table)


def test_the_table_is_that_of_the_code() -> None:
    written = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert written == methods_table.page(), "write it again: python docs/methods_table.py"


def test_pages_and_methods_are_the_same() -> None:
    """Names are unique over the rooms, for a page is found by its name."""
    pages = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "README")
    assert pages == sorted([*(name for _, name in METHODS), SEARCH])


@pytest.mark.parametrize(("room", "name"), METHODS, ids=[name for _, name in METHODS])
def test_a_page_has_the_form_of_all_and_the_options_of_its_file(room: str, name: str) -> None:
    check_page(name, dataclasses.fields(importlib.import_module(f"forerun.{room}.{name}").Options))


def test_the_page_of_the_search_has_the_form_and_the_parameters_of_a_request() -> None:
    check_page(SEARCH, [field for field in dataclasses.fields(SamplingParams) if field.name in SEARCH_OPTIONS])


def check_page(name: str, fields: Sequence[dataclasses.Field[Any]]) -> None:
    page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", page, re.M) == HEADINGS
    assert not re.search(r"^## .+\n\s*(?=^#|\Z)", page, re.M), "a section is empty"
    section = page.partition("## Options\n")[2].partition("\n## ")[0]
    told = ROW.findall(section)
    assert [option for option, _, _ in told] == [field.name for field in fields]
    for (option, default, _), field in zip(told, fields, strict=True):
        assert is_written(field.default, default.strip("`")), f"{option} has the default {field.default!r}"
    assert fields or section.strip() == "None."


def is_written(default: object, text: str) -> bool:
    """Whether a text says a default as a command line does."""
    if isinstance(default, float):
        return float(text) == default
    return text == (str(default).lower() if default is None or isinstance(default, bool) else str(default))


def test_a_sentence_ends_where_it_ends() -> None:
    module = type("M", (), {"__doc__": "A rule (Leviathan et al. 2023; a | b):\nit judges. It is fast.\n\nMore."})
    assert methods_table.first_sentence(module) == r"A rule (Leviathan et al. 2023; a \| b): it judges."


def test_the_front_page_counts_them() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lossless = [verify.find(name).is_lossless for name in verify.rules()]
    for num, what in (
        (len(set(names("forerun.drafters")) - {"none", "forced"}), "drafters beside plain decoding"),
        (len(lossless), "verification rules"),
        (sum(lossless), "are exact"),
        (len(names("forerun.pacing")), "pacing policies"),
    ):
        assert f" {num} {what}" in text
