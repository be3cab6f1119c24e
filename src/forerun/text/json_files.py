"""Reads the JSON files of a checkpoint folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from forerun.errors import UnsupportedModel
from forerun.text.files import unreadable


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
