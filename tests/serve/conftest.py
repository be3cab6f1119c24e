"""The command line of tests/cli, and the shipped pair, loaded once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import checkpoints, cli, process, start
from forerun import LLM

__all__ = ["checkpoints", "cli", "process", "start"]  # fixtures, found here by their names


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The shipped target with its shipped drafter."""
    return LLM()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes requests (custom_id, url, body) as the lines of a file and returns its path."""

    def make(*requests: tuple[str, str, dict[str, Any]], name: str = "in.jsonl") -> Path:
        lines = [
            json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"
            for custom_id, url, body in requests
        ]
        path = tmp_path / name
        path.write_text("".join(lines), encoding="utf-8")
        return path

    return make


@pytest.fixture
def answers_in() -> Callable[[Path], dict[str, dict[str, Any]]]:
    """Reads an output: custom_id -> response, after checking that every line is whole and no id is there twice."""

    def read(path: Path) -> dict[str, dict[str, Any]]:
        text = path.read_text(encoding="utf-8")
        assert text.endswith("\n")
        lines = [json.loads(line) for line in text.split("\n")[:-1]]
        assert all(set(line) == {"id", "custom_id", "response", "error"} and line["error"] is None for line in lines)
        assert len({line["id"] for line in lines}) == len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line["response"] for line in lines}

    return read
