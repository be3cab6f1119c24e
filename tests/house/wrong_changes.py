"""Makes wrong changes in a copy of the package, and says whether the tests that must show each do: `make parity`.

Each folder of the package has its changes in wrong_changes/FOLDER.toml. A change names the function that it is made in,
and a few words there, so that it outlives what happens elsewhere. Whoever rewrites such a function writes its wrong
changes anew for what stands there now; whoever shortens a test runs the changes that name its file. For the changes
whose words, places or files have a text in them, or for all:

    python tests/house/wrong_changes.py [TEXT ...]

What takes longest to import is imported once; each change is tried in a child of fork(2), which imports the package as
it is then.
"""

import ast
import itertools
import os
import resource
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "forerun"
LISTS = Path(__file__).with_suffix("")
FAILED = 1  # of pytest: tests ran, and some failed
MOST_CPU_S = 120  # of the tests of one change: one that makes them go on for ever is no good one


class Misplaced(Exception):
    """A change that cannot be made where it says."""


@dataclass(frozen=True)
class Change:
    """One wrong change.

    place: MODULE:FUNCTION, as in engine.scheduler:Scheduler.give_way, or a module alone. old: stands in it once, and is
    wrong as new. tests: files, or tests in them; at least one fails then.
    """

    about: str
    place: str
    old: str
    new: str
    tests: list[str]

    def path(self, package: Path = SOURCE) -> Path:
        """Return the file of a package that it is made in."""
        return package.joinpath(*self.place.partition(":")[0].split(".")).with_suffix(".py")

    def made(self, text: str) -> str:
        """Return the text of its file with the change. Raises Misplaced where it cannot be made."""
        try:
            begin, end = _span(text, self.place.partition(":")[2])
        except KeyError as error:
            raise Misplaced(f"{self.place}: there is no {error}") from None
        if (num := text.count(self.old, begin, end)) != 1:
            raise Misplaced(f"{self.place}: {self.old!r} stands there {num} times, and must once")
        wrong = text[:begin] + text[begin:end].replace(self.old, self.new) + text[end:]
        if wrong == text:
            raise Misplaced(f"{self.place}: nothing is changed")
        ast.parse(wrong)
        return wrong


def _span(text: str, name: str) -> tuple[int, int]:
    """Return where a function or class begins and ends in a text, by its qualified name; '' = all of it."""
    if not name:
        return 0, len(text)
    inside = _definitions(ast.parse(text))
    for part in name.split("."):
        node = {one.name: one for one in inside}[part]
        inside = _definitions(node)
    ends = [0, *itertools.accumulate(len(line) for line in text.splitlines(keepends=True))]
    first = min(one.lineno for one in (node, *node.decorator_list))
    return ends[first - 1], ends[node.end_lineno or first]


def _definitions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield what is defined inside of a node, and not deeper."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        else:
            yield from _definitions(child)


def changes() -> list[Change]:
    """Return all changes."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(LISTS.glob("*.toml"))]
    return [Change(**entry) for text in texts for entry in tomllib.loads(text)["change"]]


def outcome(change: Change, copy: Path) -> tuple[int, str]:
    """What pytest says of the tests with the change in place: its code, and the first test that failed."""
    path = change.path(copy / "src" / "forerun")
    right = path.read_text(encoding="utf-8")
    path.write_text(change.made(right), encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    with tempfile.TemporaryFile() as said:
        if (child := os.fork()) == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            os.environ["PYTHONPATH"] = str(copy / "src")
            sys.path.insert(0, str(copy / "src"))
            resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
            os._exit(pytest.main(["-x", "-n0", "-p", "no:cacheprovider", "--tb=line", *change.tests]))
        _, status = os.waitpid(child, 0)
        path.write_text(right, encoding="utf-8")
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), " ".join(lines[-1:]))
    return os.waitstatus_to_exitcode(status), failed


def main(texts: Seq[str]) -> int:
    """Try the changes that have one of these texts in them, one after the other. Returns how many no test has shown."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT / "tests"))
    for name in import_module("processes").PRELOADED:
        import_module(name)
    sys.path.pop(0)
    num_survived = 0
    chosen = [c for c in changes() if any(text in " ".join((c.about, c.place, *c.tests)) for text in texts or ("",))]
    with tempfile.TemporaryDirectory(prefix="forerun-wrong-") as folder:
        copy = Path(folder)
        for entry in ROOT.iterdir():
            if entry.name in ("src", "tests"):  # tests start processes with the package beside them
                shutil.copytree(entry, copy / entry.name)
            elif not entry.name.startswith("."):
                (copy / entry.name).symlink_to(entry)
        os.chdir(copy)
        for change in chosen:
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            code, said = outcome(change, copy)
            took_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
            num_survived += code != FAILED
            verdict = "shown" if code == FAILED else f"NOT SHOWN (pytest: {code})"
            print(verdict, f"{took_s:.0f} s", change.about, "|", said, flush=True)
    print(f"{len(chosen)} wrong changes, of which {num_survived} pass every test that should show them")
    return num_survived


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
