"""Reads the JSON files of a checkpoint folder, and files of JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from forerun.errors import BadOption, UnsupportedModel, shown
from forerun.text.files import read_text_file, unreadable


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises NotFound for an unreadable file, and UnsupportedModel for any other content.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error, "valid JSON") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object: fetch it again")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is no such file. Raises the errors of `read_json`."""
    return read_json(path) if os.path.lexists(path) else {}


def read_json_lines(path: Path, what: str, wanted: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the number and the object of each line of a file of JSON lines. Blank lines are left out.

    what: the word for the file in errors. wanted: what to do about a wrong line, for the end of the error. Raises
    NotFound for an unreadable file, and BadOption for text that is not UTF-8 and for a line that is no JSON object.
    """
    rows = []
    for number, line in enumerate(read_text_file(path, what).split("\n"), 1):  # JSON may contain other line separators
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise wrong_line(number, path, f"is not JSON ({getattr(error, 'msg', error)})", wanted) from error
            if not isinstance(row, dict):
                raise wrong_line(number, path, "is no JSON object", wanted)
            rows.append((number, row))
    return rows


def wrong_line(number: int, path: Path, problem: str, wanted: str) -> BadOption:
    """Return the error for a line of a file, such as `line 3 of 'a.jsonl' is no JSON object: write ...`."""
    return BadOption(f"line {number} of {shown(str(path))} {problem}: {wanted}")
