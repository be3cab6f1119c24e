"""README.md and docs/*.md are executed. An HTML comment on the line above a fenced block says how:

    <!-- file: PATH -->      the block is a file; it is written to PATH before anything runs
    <!-- needs: REASON -->   the block is not run, because of what it needs
    <!-- printed -->         (```text) what the ```python block before it prints
    <!-- stable -->          (```console) what stands below each `$ ` line is compared with what the command prints

Every other ```python block is run: one namespace and one process per document, in order. Every other ```console block
is run after them, line by line. Both see a copy of the package in an empty folder, so that a document can add a file
to it. In compared output `...` stands for anything.
"""

from __future__ import annotations

import doctest
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [page for folder in ("", "methods", "tutorials") for page in (ROOT / "docs" / folder).glob("*.md")]
DOCUMENTS = [ROOT / "README.md", *sorted(PAGES)]
HISTORY = sorted((ROOT / "docs" / "history").glob("*.md"))  # read, and not run: its commands are of their time
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[a-z]+)(?:: (?P<value>.+?))? -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
LANGUAGES = {"python": {"file", "needs"}, "console": {"needs", "stable"}, "text": {"printed"}, "json": {"file"}}
TIMEOUT_S = 300  # of one command, on a busy machine; alone they take seconds

# Runs in the copy: each block under its own line numbers; what it printed goes to a file, by line.
DRIVER = """
import contextlib, io, json, sys
namespace, outputs = {"__name__": "__main__"}, {}
for line, code in json.load(open("blocks.json", encoding="utf-8")):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile("\\n" * line + code, sys.argv[1], "exec"), namespace)
    outputs[line] = printed.getvalue()
json.dump(outputs, open("outputs.json", "w", encoding="utf-8"))
"""


@dataclass(frozen=True)
class Block:
    """One fenced block: `line` is that of its opening fence; mark and value are of the comment above it."""

    language: str
    text: str
    line: int
    mark: str | None
    value: str | None


def blocks_of(document: Path) -> list[Block]:
    page = document.read_text(encoding="utf-8")
    return [
        Block(m["language"], m["text"], page.count("\n", 0, m.start("language")) + 1, m["mark"], m["value"])
        for m in FENCE.finditer(page)
    ]


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """An empty folder with the package in it, its data linked."""
    package = tmp_path / "src" / "forerun"
    shutil.copytree(ROOT / "src" / "forerun", package, ignore=shutil.ignore_patterns("__pycache__", "data"))
    (package / "data").symlink_to(ROOT / "src" / "forerun" / "data")
    return tmp_path


def run(command: list[str], folder: Path) -> str:
    """Stdout and stderr of a command that must succeed, run with the package in `folder`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("FORERUN_")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # the commands of a document share what the first one compiled
    env |= {"PYTHONPATH": str(folder / "src"), "NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def same_output(wanted: str, got: str) -> bool:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(wanted, got, flags)


def run_python(document: Path, blocks: list[Block], folder: Path) -> None:
    code = [(block.line, block.text) for block in blocks if block.language == "python" and block.mark is None]
    if not code:
        return
    (folder / "blocks.json").write_text(json.dumps(code), encoding="utf-8")
    run([sys.executable, "-c", DRIVER, name_of(document)], folder)
    outputs = json.loads((folder / "outputs.json").read_text(encoding="utf-8"))
    for before, block in itertools.pairwise(blocks):
        if block.mark == "printed":
            got = outputs[str(before.line)]
            assert same_output(block.text, got), f"{name_of(document)}:{block.line} prints\n{got}"


def run_console(document: Path, block: Block, folder: Path) -> None:
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        lines = part.splitlines(keepends=True)
        num_lines = 1
        while lines[num_lines - 1].endswith("\\\n"):
            num_lines += 1
        printed = run(["bash", "-c", "".join(lines[:num_lines])], folder)
        wanted = "".join(lines[num_lines:])
        if block.mark == "stable":
            assert same_output(wanted, printed), f"{name_of(document)}:{block.line} prints\n{printed}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_block_is_of_a_known_kind(document: Path) -> None:
    """Nothing slips past this file: each fence is found, has a language and, if marked, a mark that fits."""
    page = document.read_text(encoding="utf-8")
    blocks = blocks_of(document)
    assert len(re.findall(r"^```", page, re.M)) == 2 * len(blocks), "a fence without a language, or not closed"
    for block in blocks:
        assert block.language in LANGUAGES, f"{name_of(document)}:{block.line} {block.language!r}"
        assert block.mark is None or block.mark in LANGUAGES[block.language], f"{name_of(document)}:{block.line}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_examples_run(document: Path, copy: Path) -> None:
    blocks = blocks_of(document)
    for block in blocks:
        if block.mark == "file":
            assert block.value is not None
            (copy / block.value).write_text(block.text, encoding="utf-8")
    run_python(document, blocks, copy)
    for block in blocks:
        if block.language == "console" and block.mark != "needs":
            run_console(document, block, copy)


@pytest.mark.parametrize("document", [*DOCUMENTS, *HISTORY], ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    """Links within the project: the file is there, and so is the heading."""
    page = FENCE.sub("", document.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        goal = (document.parent / path) if path else document
        assert goal.exists(), f"{name_of(document)} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", goal.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{name_of(document)} links to {link}"


def test_no_number_is_left_open() -> None:
    """`@@` marks a number that is still to be measured."""
    assert not [name_of(document) for document in DOCUMENTS if "@@" in document.read_text(encoding="utf-8")]


FILE_NAME = re.compile(r"`((?:src/forerun/|tests/|docs/|[a-z_]+/)?[a-z_0-9/]+\.(?:py|md|toml|txt))`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_named_files_exist(document: Path) -> None:
    """A file that a document names is there: from the root, or within the package."""
    page = document.read_text(encoding="utf-8")
    written = {block.value for block in blocks_of(document) if block.mark == "file"}
    for name in FILE_NAME.findall(page):
        places = [ROOT / name, ROOT / "src" / "forerun" / name, document.parent / name]
        assert any(place.exists() for place in places) or name in written, f"{name_of(document)} names {name}"
