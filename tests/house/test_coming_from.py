"""docs/coming-from.md and src/forerun/data/peers.json say the same, and what they name exists."""

import ast
import dataclasses
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

import forerun
from forerun import registry, registry as peers
from forerun.cli.main import app, main
from forerun.config import EngineConfig
from forerun.registry import PeerOption
from forerun.types import SamplingParams
from house.site import pages

PAGE = Path(__file__).parents[2] / peers.DOCUMENT
ROOT: Any = typer.main.get_command(app)
PEERS = pages.peers()
ALIASES = {
    *("draft_model", "num_speculative_tokens", "speculative_config", "use_speculative_decoding"),
    *("batching_mode", "use_cuda_graphs"),
}
ANNOUNCED = {"forerun plan"}  # may be missing still


def section(peer: str) -> str:
    """The text below the heading of a peer."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(peer.removeprefix('the '))}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"{PAGE.name} has no section on {peer}"
    return found[1]


# ---------------------------------------------------------------------------------------------------------- the table


def test_there_is_enough_of_it() -> None:
    assert len(peers.peer_options()) >= 60
    assert len(PEERS) == len(set(PEERS)) == 6


def test_no_peer_has_a_spelling_twice() -> None:
    for peer in PEERS:
        names = [peers.normal(spelling) for row in peers.peer_options() if row.peer == peer for spelling in row.theirs]
        assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]


@pytest.mark.parametrize("row", peers.peer_options(), ids=lambda row: f"{row.peer} {row.theirs[0]}")
def test_a_row_can_stand_in_a_sentence(row: PeerOption) -> None:
    assert row.ours or row.note, "what is not here says what to do instead"
    assert not re.search(r"[|\n]|: |\.$", row.note), "it stands behind a colon and before a semicolon"
    assert row.note == row.note.strip()
    assert all(re.fullmatch(r"-{0,2}\w[\w-]*", spelling) for spelling in row.theirs)
    for command in re.findall(r"forerun \w+", row.note):
        assert exists(command) or command in ANNOUNCED, command


def exists(entry: str) -> bool:
    """Whether a name of ours is there; a draft's method and its options included."""
    name, _, value = entry.partition("=")
    if entry.startswith("forerun "):
        return entry in pages.COMMANDS
    if entry.startswith("LLM."):
        return hasattr(forerun.LLM, name.removeprefix("LLM."))
    if name == "draft" and value.partition(":")[0] in registry.names("forerun.drafters"):
        method, options = registry.parse_spec(value)
        module = importlib.import_module(f"forerun.drafters.{method}")
        return options.keys() <= module.Options.__dataclass_fields__.keys()
    if name == "acceptance" and value:
        return value in importlib.import_module("forerun.verify").rules()
    if name in EngineConfig.__dataclass_fields__ and value and "/" not in value:
        return bool(EngineConfig.make(**{name: value}))
    is_field = any(name in fields for fields in pages.FIELDS.values())
    return is_field or any(name in names or f"{name}s" in names for names in pages.FLAGS.values())


@pytest.mark.parametrize(
    "row", [row for row in peers.peer_options() if row.ours], ids=lambda row: f"{row.peer} {row.theirs[0]}"
)
def test_what_a_row_offers_exists(row: PeerOption) -> None:
    for entry in row.ours:
        assert exists(entry) or entry in ANNOUNCED, entry


# -------------------------------------------------------------------------------------------------------- the document


@pytest.mark.parametrize("peer", PEERS)
def test_the_document_has_the_table(peer: str) -> None:
    """In the section of the peer; `make pages` writes it."""
    assert [line for line in section(peer).splitlines() if line.startswith("|")] == pages.peer_table(peer).splitlines()


def test_the_document_has_no_other_table() -> None:
    num_lines = sum(len(pages.peer_table(peer).splitlines()) for peer in PEERS)
    assert sum(line.startswith("|") for line in PAGE.read_text(encoding="utf-8").splitlines()) == num_lines


@pytest.mark.parametrize("peer", PEERS)
def test_what_has_the_same_name_exists(peer: str) -> None:
    """The paragraph "Same name here" lists flags and keywords of ours that no row needs to translate."""
    (paragraph,) = re.findall(r"^Same name here: (.*?)\n\n", section(peer), re.M | re.S)
    names = re.findall(r"`([^`]+)`", paragraph)
    assert names
    ours = ALIASES.union(*pages.FIELDS.values(), *(flags.values() for flags in pages.FLAGS.values()))
    theirs = {spelling for row in peers.peer_options() if row.peer == peer for spelling in row.theirs}
    for name in names:
        assert name in ours or name in {"prompt", "messages"}, name
        assert name not in theirs, f"{name} is in the table, too"


def test_the_commands_of_the_examples_are_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each `$ forerun ...` has options that exist, and is not run; where an error stands below it, it is that error."""
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    examples = re.findall(r"^\$ forerun (.*)\n(error: .*)?", text, re.M)
    assert len(examples) >= 4
    assert any(error for _, error in examples)
    for line, error in examples:
        command, *words = shlex.split(line)
        if error:
            with pytest.raises(SystemExit, match="2"):
                main([command, *words])
            assert capsys.readouterr().err == f"{error}\n"
        else:
            ROOT.commands[command].make_context(command, words)


def test_the_keywords_of_the_examples_exist() -> None:
    """Each LLM(...) and SamplingParams(...) that stands beside an import of ours."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    calls = [
        node
        for block in blocks
        if "from forerun import" in block
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert {call.func.id for call in calls if isinstance(call.func, ast.Name)} >= {"LLM", "SamplingParams"}
    for call in calls:
        assert isinstance(call.func, ast.Name)
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
        if call.func.id == "LLM":
            EngineConfig.make(**given)
        if call.func.id == "SamplingParams":
            assert dataclasses.replace(SamplingParams(), **given)
