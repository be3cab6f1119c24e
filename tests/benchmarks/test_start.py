"""Every benchmark has a command, and the old name of each says where it is now."""

import importlib
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from forerun.cli.bench import app
from forerun.cli.main import main

FILES = sorted(Path(benchmarks.__path__[0]).glob("*.py"))
NAMES = [file.stem for file in FILES if "\n    start(command)\n" in file.read_text(encoding="utf-8")]
RENAMED = {"paper": "paper", "tune_grid": "bench tune"}
OLD = {RENAMED.get(name, f"bench {name}"): name for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_each_benchmark_has_help(name: str, bench: Any) -> None:
    done = bench(name, "--help")
    assert done.exit_code == 0
    assert done.stdout.startswith(f"Usage: python -m benchmarks.{name} ")
    assert importlib.import_module(f"benchmarks.{name}").command.__doc__.splitlines()[0][:40] in done.stdout


@pytest.mark.parametrize("old", OLD)
def test_an_old_name_says_where_the_benchmark_is(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--help"], ["--target", "x"]):
        with pytest.raises(SystemExit) as end:
            main([*old.split(), *more])
        printed = capsys.readouterr()
        assert (end.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
        assert f"forerun {old} is a developer's benchmark" in printed.err
        assert f"python -m benchmarks.{OLD[old]} runs it" in printed.err


def test_what_stays_in_the_package_answers_a_user() -> None:
    kept = [command.callback.__name__ for command in app.registered_commands if command.callback]
    assert kept == ["latency", "methods", "suite", "widen", "report"]
