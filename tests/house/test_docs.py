"""README.md, CONTRIBUTING.md and docs/ are executed. An HTML comment on the line above a fenced block says how:

    <!-- file: PATH -->      the block is a file; it is written to PATH before anything runs
    <!-- needs: REASON -->   the block is not run, because of what it needs; its commands must exist all the same
    <!-- printed -->         (```text) what the ```python block before it prints
    <!-- stable -->          (```console) what stands below each `$ ` line is compared with what the command prints

Every other ```python block is run, in order, with one namespace per document. Every other ```console block is run after
them, line by line: `forerun ...` in this process, so that torch is loaded once, and everything else by a shell. All of
it happens in an empty folder. In compared output `...` stands for anything.
"""

import contextlib
import doctest
import gc
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from forerun.cli.help import MODEL_ARGUMENTS, TARGET
from forerun.cli.main import app, main

ROOT = Path(__file__).parents[2]
HISTORY = sorted((ROOT / "docs/development/history").glob("*.md"))  # read, not run: its commands are of their time
PAGES = sorted(set((ROOT / "docs").rglob("*.md")) - set(HISTORY))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[a-z]+)(?:: (?P<value>[^\n]+?))? -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
LANGUAGES = {
    "python": {"file", "needs"},
    "console": {"needs", "stable"},
    "text": {"printed"},
    "json": {"file"},
    "toml": {"file"},
}
TIMEOUT_S = 300  # of one command of a shell, on a busy machine; alone they take seconds
SHELL = re.compile(r"[|&;<>$`]|\bcat\b")


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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, with the variables of a plain terminal of 100 columns."""
    for name in [name for name in os.environ if name.startswith("FORERUN_")]:
        monkeypatch.delenv(name)
    for name, value in {"NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")  # the second has the benchmarks
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_this_process(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """What `forerun ...` prints, stdout before stderr. It must succeed."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(gc, "freeze", lambda: None)  # this process has other tests to run
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = "".join(capfd.readouterr())
    assert not ended.value.code, f"forerun {arguments} ended with {ended.value.code}:\n{printed}"
    return printed


def in_a_shell(command: str) -> str:
    """What a command prints that must succeed."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(["bash", "-c", command], **streams, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def same_output(wanted: str, got: str) -> bool:
    return doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def run_python(document: Path, blocks: list[Block]) -> None:
    """Run each block under its own line numbers, and compare what it prints with the block that says so."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed: dict[int, str] = {}
    for block in blocks:
        if block.language != "python" or block.mark is not None:
            continue
        code = compile("\n" * block.line + block.text, name_of(document), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(code, namespace)
        printed[block.line] = said.getvalue()
    for before, block in itertools.pairwise(blocks):
        if block.mark == "printed":
            got = printed[before.line]
            assert same_output(block.text, got), f"{name_of(document)}:{block.line} prints\n{got}"


def commands_of(block: Block) -> Iterator[tuple[str, str]]:
    """Each command, with what stands below it."""
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        lines = part.splitlines(keepends=True)
        num_lines = 1
        while lines[num_lines - 1].endswith("\\\n"):
            num_lines += 1
        yield "".join(lines[:num_lines]), "".join(lines[num_lines:])


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_block_is_of_a_known_kind(document: Path) -> None:
    """Nothing slips past this file: each fence is found, has a language and, if marked, a mark that fits."""
    page = document.read_text(encoding="utf-8")
    blocks = blocks_of(document)
    assert len(re.findall(r"^```", page, re.M)) == 2 * len(blocks), "a fence without a language, or not closed"
    for block in blocks:
        assert block.language in LANGUAGES, f"{name_of(document)}:{block.line} {block.language!r}"
        assert block.mark is None or block.mark in LANGUAGES[block.language], f"{name_of(document)}:{block.line}"


def runs(document: Path) -> bool:
    return any(block.mark != "needs" and block.language in {"python", "console"} for block in blocks_of(document))


@pytest.mark.parametrize("document", list(filter(runs, DOCUMENTS)), ids=name_of)
def test_examples_run(
    document: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    blocks = blocks_of(document)
    for block in blocks:
        if block.mark == "file":
            assert block.value is not None
            (folder / block.value).write_text(block.text, encoding="utf-8")
    run_python(document, blocks)
    for block in blocks:
        if block.language != "console" or block.mark == "needs":
            continue
        for command, wanted in commands_of(block):
            if command.startswith("forerun ") and not SHELL.search(re.sub(r"'[^']*'|\"[^\"]*\"", "", command)):
                printed = in_this_process(shlex.split(command.replace("\\\n", " "))[1:], monkeypatch, capfd)
            else:
                printed = in_a_shell(command)
            if block.mark == "stable":
                assert same_output(wanted, printed), f"{name_of(document)}:{block.line} prints\n{printed}"


# ------------------------------------------------------------------------------------------------- what is only named

COMMAND_LINE: Any = typer.main.get_command(app)
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def words_of(command: str) -> list[str]:
    """The words of the first command of a line, without variables before it and redirections behind it."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return list(itertools.takewhile(lambda word: word not in {"|", "||", "&&", "&", ">", ";"}, words))


def fault_of(words: list[str]) -> str | None:
    """What is wrong with a command of ours as a document writes it; None for a good one, and for one of others."""
    match words:
        case ["make", target, *_] if target not in TARGETS and "=" not in target:
            return f"no target {target} in the Makefile"
        case ["python", "-m", module, *_] if module.partition(".")[0] in {"benchmarks", "forerun"}:
            if module.endswith(".NAME"):
                return None
            path = module.replace(".", "/")
            places = [ROOT / path, ROOT / "src" / path]
            found = any(place.with_suffix(".py").exists() or (place / "__main__.py").exists() for place in places)
            return None if found else f"no module {module}"
        case ["python", path, *_] if path.startswith(("docs/", "examples/", "tests/")) and not (ROOT / path).exists():
            return f"no file {path}"
        case ["forerun", *rest]:
            return _fault_of_ours(rest)
    return None


def _fault_of_ours(words: list[str]) -> str | None:
    command = COMMAND_LINE
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]
        words = words[1:]
    if getattr(command, "commands", None) and words and not words[0].startswith("-"):
        return f"no command {words[0]}"
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {TARGET} if not MODEL_ARGUMENTS.isdisjoint(parameter.name for parameter in command.params) else set()
    for word in words:
        if word == "--":
            return None
        flag = word.partition("=")[0]
        if re.match(r"--[a-z]", word) and flag not in {*known, "--help"}:
            return f"no option {flag}"
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_exist(document: Path) -> None:
    """Whether or not a command is run here: its name, and each of its options; also of one within a sentence."""
    faults = []
    for block in blocks_of(document):
        if block.language == "console" and not re.search(r"^error: ", block.text, re.M):
            faults += [(block.line, command, fault_of(words_of(command))) for command, _ in commands_of(block)]
    page = FENCE.sub("", document.read_text(encoding="utf-8"))
    for span in re.findall(r"`((?:[A-Z_]+=\S+ )*(?:forerun|make|python) [^`]+)`", page):
        faults.append((0, span, fault_of(words_of(" ".join(span.split())))))
    wrong = [f"{name_of(document)}:{line} {command!r}: {fault}" for line, command, fault in faults if fault]
    assert not wrong, "\n".join(wrong)


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
