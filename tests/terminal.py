"""The command in a terminal of a given width, as a process of its own."""

import os
import sys

import pexpect

import processes


def in_a_terminal(width: int, *arguments: str, kind: str = "xterm-256color") -> str:
    """What `forerun ...` writes into a terminal of so many columns and of this kind (TERM)."""
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    env["TERM"] = kind
    command = [sys.executable, "-m", "forerun", *arguments]
    child = processes.spawn(command, encoding="utf-8", timeout=90, env=env, dimensions=(50, width))
    child.expect(pexpect.EOF)
    child.close()
    return str(child.before).replace("\r\n", "\n")
