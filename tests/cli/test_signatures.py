"""A field of a dataclass is an option of each command that names the dataclass: its flag, its range, its default."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from forerun.bench.plans import Plan
from forerun.cli.help import App
from forerun.cli.main import app
from forerun.cli.signatures import Fields, Given
from forerun.config import EngineConfig
from forerun.errors import BadOption
from forerun.registry import REQUIRED, check_fields, flag_of, inherited, option
from forerun.types import SamplingParams


@dataclass(frozen=True)
class Small(Plan):
    sizes: tuple[int, ...] = option((1, 2), "sizes", flag="--size", min=1)
    share: float = option(0.5, "a share", above=0, max=1)
    is_warm: bool = option(True, "whether it is warm")
    only: bool = option(False, "nothing else")
    out: Path | None = option(None, "a file", is_written=True, usual="none")
    kept: str = "no option"


def given_to(fields: Fields, *arguments: str) -> Given:
    """What a command with these fields gets."""
    got: list[Given] = []
    small = App("")

    def command(plan: Given, name: str | None = None) -> None:
        got.append({**plan, "name": name})

    name = Annotated[str | None, typer.Argument(show_default=False)]
    command.__annotations__ = {"plan": Annotated[Given, fields], "name": name}
    small.command()(command)
    done = CliRunner().invoke(small, [*arguments], catch_exceptions=True)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return got[0] if got else {"printed": done.output}


def test_a_plan_gets_what_was_given_and_its_own_defaults() -> None:
    fields = Fields(Small, is_plan=True)
    assert given_to(fields, "x") == {"share": 0.5, "is_warm": True, "only": False, "name": "x"}
    found = given_to(fields, "--size", "3", "--size", "4", "--no-is-warm", "--only", "--share", "1")
    assert found == {"sizes": (3, 4), "share": 1.0, "is_warm": False, "only": True, "name": None}
    printed = " ".join(given_to(fields, "--help")["printed"].split())
    assert "sizes; may be repeated [default: 1 and 2] [x>=1]" in printed
    assert "[default: 0.5" in printed
    assert "no option" not in printed


@dataclass(frozen=True, kw_only=True)
class Base:
    size: int = option(3, "how large it is", flag="--how-large", min=1)
    kind: Literal["dry", "wet"] = option("dry", "dry or wet", choices=("dry", "wet"))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Large(Base):
    out: Path = option(REQUIRED, "where it goes")
    words: tuple[str, ...] = option(REQUIRED, "what is said of it", flag="--word")
    size: int = inherited(Base, "size", 30)
    kind: Literal["dry", "wet"] = inherited(Base, "kind", "wet", help="wet, or dry")


def test_an_inherited_option_has_all_but_what_is_said_again() -> None:
    fields = Fields(Large, is_plan=True)
    needed = ("--out", "there", "--word", "a", "--word", "b")
    given = {"size": 30, "kind": "wet", "out": Path("there"), "words": ("a", "b"), "name": None}
    assert given_to(fields, *needed) == given
    assert given_to(fields, *needed, "--how-large", "2", "--kind", "dry") == {**given, "size": 2, "kind": "dry"}
    printed = " ".join(given_to(fields, "--help")["printed"].split())
    assert "how large it is [default: 30; x>=1]" in printed
    assert "wet, or dry [default: wet]" in printed
    assert "where it goes [required]" in printed
    assert "what is said of it; may be repeated [required]" in printed
    assert (Base().kind, Base().size) == ("dry", 3)
    with pytest.raises(BadOption, match=r"^--how-large 0 is not possible: it must be at least 1$"):
        Large(out=Path(), words=(), size=0)
    with pytest.raises(BadOption, match=r"^--kind 'hot' is not possible: it must be one of dry, wet$"):
        Base(kind="hot")


@pytest.mark.parametrize("lacking", ["--out", "--word"])
def test_a_required_option_must_be_given(lacking: str) -> None:
    given = {"--out": "there", "--word": "a"}
    del given[lacking]
    with pytest.raises(AssertionError, match=f"Missing option '{lacking}'"):
        given_to(Fields(Large, is_plan=True), *(word for pair in given.items() for word in pair))


def test_where_other_sources_count_an_option_that_is_not_given_is_none() -> None:
    fields = Fields(Small, ("share", "only"), usual={"share": 0.25})
    assert given_to(fields) == {"share": None, "only": None, "name": None}
    assert "a share [default: 0.25]" in given_to(fields, "--help")["printed"]


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"--out .* cannot be written"):
        given_to(Fields(Small, is_plan=True), "--out", str(tmp_path / "no" / "file"))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"sizes": (1, 0)}, "--size 0 is not possible: it must be at least 1"),
        ({"share": 0.0}, r"--share 0 is not possible: it must be in \(0, 1\]"),
        ({"share": 1.5}, r"--share 1.5 is not possible: it must be in \(0, 1\]"),
    ],
)
def test_a_plan_is_inside_the_ranges_of_its_fields(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadOption, match=f"^{sentence}$"):
        Small(**given)


def test_every_option_of_the_engine_and_of_a_request_is_one_of_generate() -> None:
    top = typer.main.get_command(app)
    commands = {name: {param.name for param in top.commands[name].params} for name in ("generate", "serve", "batch")}  # type: ignore[attr-defined]
    engine = set(EngineConfig.__dataclass_fields__)
    for name, params in commands.items():
        assert engine <= params, f"{name} lacks {engine - params}"
    assert set(SamplingParams.__dataclass_fields__) <= commands["generate"]


@pytest.mark.parametrize(
    ("kind", "command"),
    [("everyday", "chat"), ("everyday", "lab"), ("measured", "bench latency"), ("measured", "demo")],
)
def test_options_are_flags_of_every_command_of_their_kind(cli: Any, kind: str, command: str) -> None:
    page = cli(*command.split(), "--help").stdout
    for field in EngineConfig.__dataclass_fields__.values():
        if field.metadata.get(kind):
            assert re.search(rf"^  {flag_of(field)}\b", page, re.MULTILINE), field.name
