"""`forerun prefill` and `forerun cache`: what one command read, the next finds; it is told of, and removed."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest

import processes
from cli.conftest import little_room

CHAT = "{% if tools %}{{ tools[0].name }} {% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEXT = "once upon a time " * 8
SYSTEM = "a careful answer in one sentence, and never a guess: what is not known is said to be unknown"


def test_the_beginning_of_conversations_is_read_once(cli: Any, ok: Any, tmp_path: Path, written: Any) -> None:
    kept = ("--kv-disk", f"1GB:{tmp_path / 'kv'}", "--chat-template", written(CHAT, "chat.jinja"))
    common = ("--target", "llama", "--draft", "none", *kept)
    first, again = (ok("prefill", written(SYSTEM, "system.txt"), *common) for _ in range(2))
    num = len("<system>" + SYSTEM + "<user>")
    whole = num // 16 * 16
    told = rf"{num} tokens in [\d.]+ s, 0 of them kept before; {whole} are kept, in whole blocks of 16\n"
    assert re.fullmatch(told, first)
    assert f", {whole} of them kept before" in again
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "who?"}]
    asked = written(json.dumps({"messages": messages, "max_tokens": 3}) + "\n", "asked.jsonl")
    done = cli("generate", "--prompt-file", asked, "--verbose", *common)
    assert f"{whole} prompt tokens from the cache, {whole} of them from disk" in " ".join(done.stderr.split())


@pytest.fixture
def read_once(tmp_path: Path, written: Any) -> tuple[str, ...]:
    """The command that reads a text and keeps it in a folder of the test."""
    file = written(TEXT, "text.txt")
    return ("prefill", "--raw", file, "--target", "llama", "--draft", "none", "--kv-disk", f"1GB:{tmp_path / 'kv'}")


def test_rows_that_have_no_room_are_not_said_to_be_kept(refused: Any, read_once: tuple[str, ...]) -> None:
    with little_room(1024):
        said = refused(*read_once, code=3)
    assert said.endswith("of them kept before; not all can be kept: make room, or name another folder with --kv-disk")


def test_what_is_kept_is_listed_verified_and_cleared(cli: Any, tmp_path: Path, read_once: tuple[str, ...]) -> None:
    folder = ("--folder", str(tmp_path / "kv"))
    cli(*read_once)
    listed = cli("cache", "list", *folder)
    assert re.fullmatch(r"[0-9a-f]{8}  [\d-]+ [\d:]+ +[\d.]+ GB +128 tokens  llama\n", listed.stdout)
    assert cli("cache", "verify", "--kv-disk", f"1GB:{tmp_path / 'kv'}").stdout == "8 blocks, 0 of them damaged\n"
    (rows,) = (tmp_path / "kv").glob("*/*.kv")
    rows.write_bytes(b"x" + rows.read_bytes()[1:])
    assert cli("cache", "verify", *folder, code=1).stdout == "8 blocks, 1 of them damaged\n"
    assert "nothing is kept of 'other'" in cli("cache", "clear", "other", *folder, code=2).stderr
    assert cli("cache", "list", *folder).stdout == listed.stdout
    assert "add --yes" in cli("cache", "clear", "llama", *folder, code=2).stderr
    assert cli("cache", "list", *folder).stdout == listed.stdout
    cli("cache", "clear", "llama", "--yes", *folder)
    assert cli("cache", "list", *folder).stdout == "Nothing is kept there yet.\n"
    assert (tmp_path / "kv" / "secret").exists()


def test_a_terminal_is_asked_before_anything_is_removed(
    checkpoints: Path, cli: Any, tmp_path: Path, read_once: tuple[str, ...]
) -> None:
    folder = ("--folder", str(tmp_path / "kv"))
    cli(*read_once)
    listed = cli("cache", "list", *folder).stdout
    command = [sys.executable, "-m", "forerun", "cache", "clear", *folder]
    for answer, left in (("n", listed), ("y", "Nothing is kept there yet.\n")):
        child = processes.spawn(command, env=dict(os.environ), timeout=90, cwd=checkpoints)
        child.expect_exact("[y/N]")
        child.sendline(answer)
        child.expect(pexpect.EOF)
        assert cli("cache", "list", *folder).stdout == left


def test_refusals(refused: Any, tmp_path: Path, written: Any) -> None:
    file = written("[]", "x.json")
    kept = ("--kv-disk", f"1GB:{tmp_path / 'kv'}", "--target", "llama", "--draft", "none")
    for arguments, why in (
        (("prefill", file, "--target", "llama"), "prefill needs --kv-disk"),
        (("prefill", str(tmp_path / "nowhere"), *kept), "cannot be read (No such file or directory): check its name"),
        (("prefill", file, *kept), "must hold an object"),
        (("cache", "clear", "--folder", str(tmp_path)), "is no folder of kv_disk"),
        (("cache", "list", "--folder", str(tmp_path), "--kv-disk", "1GB"), "both name the folder: drop one"),
        (("cache", "list", "--kv-disk", "lots"), "write 20GB"),
        (("generate", "x", "--target", "llama", "--kv-disk", "lots"), "write 20GB"),
    ):
        assert why in refused(*arguments)
