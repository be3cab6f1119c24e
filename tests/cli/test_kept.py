"""`forerun prefill` and `forerun cache`: what one command read, the next finds; it is told of, and removed."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pexpect

import processes
from cli.conftest import little_room

TEMPLATE = (
    "{% if tools %}{{ tools[0].name }} {% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SYSTEM = "a careful answer in one sentence, and never a guess: what is not known is said to be unknown"


def test_the_beginning_of_conversations_is_read_once(cli: Any, ok: Any, tmp_path: Path) -> None:
    kept = f"1GB:{tmp_path / 'kv'}"
    file = tmp_path / "system.txt"
    template = tmp_path / "chat.jinja"
    file.write_text(SYSTEM)
    template.write_text(TEMPLATE)
    common = ("--target", "llama", "--draft", "none", "--kv-disk", kept, "--chat-template", str(template))
    first, again = (ok("prefill", str(file), *common) for _ in range(2))
    num = len("<system>" + SYSTEM + "<user>")
    whole = num // 16 * 16
    assert re.fullmatch(
        rf"{num} tokens in [\d.]+ s, 0 of them kept before; {whole} are kept, in whole blocks of 16\n", first
    )
    assert f", {whole} of them kept before" in again
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "who?"}]
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": messages, "max_tokens": 3}) + "\n")
    done = cli("generate", "--prompt-file", str(tmp_path / "asked.jsonl"), "--verbose", *common)
    assert f"{whole} prompt tokens from the cache, {whole} of them from disk" in " ".join(done.stderr.split())


def test_rows_that_have_no_room_are_not_said_to_be_kept(refused: Any, tmp_path: Path) -> None:
    (file := tmp_path / "text.txt").write_text("once upon a time " * 8)
    common = ("--raw", str(file), "--target", "llama", "--draft", "none", "--kv-disk", f"1GB:{tmp_path / 'kv'}")
    with little_room(1024):
        said = refused("prefill", *common, code=3)
    assert said.endswith("of them kept before; not all can be kept: make room, or name another folder with --kv-disk")


def test_what_is_kept_is_listed_verified_and_cleared(cli: Any, tmp_path: Path) -> None:
    folder = ("--folder", str(tmp_path / "kv"))
    file = tmp_path / "text.txt"
    file.write_text("once upon a time " * 8)
    cli("prefill", "--raw", str(file), "--target", "llama", "--draft", "none", "--kv-disk", f"1GB:{tmp_path / 'kv'}")
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


def test_a_terminal_is_asked_before_anything_is_removed(checkpoints: Path, cli: Any, tmp_path: Path) -> None:
    file, folder = tmp_path / "text.txt", tmp_path / "kv"
    file.write_text("once upon a time " * 8)
    cli("prefill", "--raw", str(file), "--target", "llama", "--draft", "none", "--kv-disk", f"1GB:{folder}")
    listed = cli("cache", "list", "--folder", str(folder)).stdout
    command = [sys.executable, "-m", "forerun", "cache", "clear", "--folder", str(folder)]
    for answer, left in (("n", listed), ("y", "Nothing is kept there yet.\n")):
        child = processes.spawn(command, env=dict(os.environ), timeout=90, cwd=checkpoints)
        child.expect_exact("[y/N]")
        child.sendline(answer)
        child.expect(pexpect.EOF)
        assert cli("cache", "list", "--folder", str(folder)).stdout == left


def test_refusals(refused: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text("[]")
    kept = ("--kv-disk", f"1GB:{tmp_path / 'kv'}", "--target", "llama", "--draft", "none")
    for arguments, why in (
        (("prefill", str(file), "--target", "llama"), "prefill needs --kv-disk"),
        (("prefill", str(tmp_path / "nowhere"), *kept), "cannot be read (No such file or directory): check its name"),
        (("prefill", str(file), *kept), "must hold an object"),
        (("cache", "clear", "--folder", str(tmp_path)), "is no folder of kv_disk"),
        (("cache", "list", "--folder", str(tmp_path), "--kv-disk", "1GB"), "both name the folder: drop one"),
        (("cache", "list", "--kv-disk", "lots"), "write 20GB"),
        (("generate", "x", "--target", "llama", "--kv-disk", "lots"), "write 20GB"),
    ):
        assert why in refused(*arguments)
