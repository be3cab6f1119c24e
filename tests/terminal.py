"""The command in a terminal of a given width, as a process of its own."""

import os
import re
import sys

import pexpect

import processes

WAIT = r"\x1b\[\?25l.*?\x1b\[\?25h(\r?\x1b\[1A\x1b\[2K)*"  # what a spinner draws, where a machine is slow


def in_a_terminal(width: int, *arguments: str, kind: str = "xterm-256color") -> str:
    """What `forerun ...` writes into a terminal of so many columns and of this kind (TERM)."""
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    env["TERM"] = kind
    command = [sys.executable, "-m", "forerun", *arguments]
    child = processes.spawn(command, encoding="utf-8", timeout=90, env=env, dimensions=(50, width))
    child.expect(pexpect.EOF)
    child.close()
    return re.sub(WAIT, "", str(child.before).replace("\r\n", "\n"), flags=re.DOTALL)
