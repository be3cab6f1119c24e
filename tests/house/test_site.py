"""mkdocs.yml, without mkdocs: `make docs` builds the site and takes links and anchors strictly."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from forerun import registry

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
MADE = {"contributing.md", "changelog.md", "examples.md"}  # docs/site/hooks.py makes them
FOLDERS = ("methods", "development/history")  # which it lists


def pages(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [value] if isinstance(value, str) else pages(value)


def test_each_page_is_in_the_navigation_once() -> None:
    listed = list(pages(SITE["nav"]))
    files = [page.relative_to(DOCS) for page in DOCS.rglob("*.md")]
    written = {page.as_posix() for page in files if page.parent.as_posix() not in FOLDERS}
    assert sorted(listed) == sorted(written | MADE)


def test_what_the_api_pages_name_exists() -> None:
    """Each `::: module.name`, without which mkdocstrings fails; and every public name is on the first page."""
    for page in (DOCS / "api").glob("*.md"):
        for path in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.M):
            home, _, name = path.rpartition(".")
            try:
                importlib.import_module(path)
            except ImportError:
                assert hasattr(importlib.import_module(home), name), path
    first = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    forerun = importlib.import_module("forerun")
    errors = {name for name in forerun.__all__ if forerun.__dict__.get("_HOMES", {}).get(name) is None}
    for name in set(forerun.__all__) - errors:
        assert re.search(rf"^::: forerun\.\S+\.{name}$", first, re.M), f"forerun.{name} is not on the page"
    assert "::: forerun.errors" in first


@pytest.mark.parametrize("name", ["bug", "slow", "model"])
def test_an_issue_form_is_one(name: str) -> None:
    """The fields that a form must have, and commands that exist in what it asks for."""
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    assert all(field["attributes"]["label"] for field in form["body"])


def test_the_hooks_of_pre_commit_are_the_tools_of_make_check() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    entries = [hook["entry"].split()[0] for hook in hooks if "stages" not in hook]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipes = [makefile.partition(f"\n{target}:")[2].partition("\n\n")[0] for target in ("check", "lint")]
    tools = [tool for recipe in recipes for tool in re.findall(r"^\t\$\(BIN\)/(\S+)", recipe, re.M)]
    assert {entry.removeprefix(".venv/bin/") for entry in entries} == set(tools)


def test_contributing_names_each_room_of_methods() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for room in ("drafters", "verify", "pacing"):
        assert registry.names(f"forerun.{room}")
        assert f"`src/forerun/{room}/NAME.py`" in page


def test_each_table_of_numbers_has_a_command_a_commit_and_a_day() -> None:
    """docs/development/numbers.md, section by section; the first one sums the others up."""
    text = (DOCS / "development" / "numbers.md").read_text(encoding="utf-8")
    first, *sections = re.split(r"^## ", text, flags=re.M)[1:]
    assert first.startswith("In short")
    for section in sections:
        name = section.partition("\n")[0]
        assert re.search(r"`(?:[A-Z_]+=\S+ )?(?:forerun|python|make) [^`]+`", section), f"{name}: no command"
        assert re.search(r"\b[0-9a-f]{7}\b", section), f"{name}: no commit"
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", section), f"{name}: no day"
