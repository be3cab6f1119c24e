"""Makes wrong changes in a copy of the package, and says whether the tests that must show each do: `make parity`.

The list is wrong_changes.toml. By itself, for the changes whose words or files have a text in them, or for all:

    python tests/house/wrong_changes.py [TEXT ...]

What takes longest to import is imported once; each change is tried in a child of fork(2), which imports the package as
it is then.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "forerun"
LIST = Path(__file__).with_suffix(".toml")
FAILED = 1  # of pytest: tests ran, and some failed
MOST_CPU_S = 120  # of the tests of one change: one that makes them go on for ever is no good one


@dataclass(frozen=True)
class Change:
    """One wrong change: what it does, the text that it replaces, and the files of which a test fails then."""

    about: str
    old: str
    new: str
    tests: list[str]

    def places(self, source: Path = SOURCE) -> list[Path]:
        """Every place of the old text in a package: its file, once for each time that it is there."""
        texts = {path: path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
        return [path for path, text in texts.items() for _ in range(text.count(self.old))]


def changes() -> list[Change]:
    """The list."""
    return [Change(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["change"]]


def outcome(change: Change, copy: Path) -> tuple[int, str]:
    """What pytest says of the tests with the change in place: its code, and the first test that failed."""
    (path,) = change.places(copy / "src" / "forerun")
    right = path.read_text(encoding="utf-8")
    path.write_text(right.replace(change.old, change.new), encoding="utf-8")
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
    chosen = [c for c in changes() if not texts or any(text in " ".join((c.about, *c.tests)) for text in texts)]
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
