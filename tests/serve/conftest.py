"""The command line of tests/cli, and the shipped pair; what runs an engine runs with speculation off and auto."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import checkpoints, cli as any_cli, process, refused, start as any_start, written
from forerun import LLM
from serve.running import Running, serving
from speculation import environment, llm_options, pytest_generate_tests, speculation

# Found here by their names.
__all__ = [
    "any_cli",
    "any_start",
    "checkpoints",
    "process",
    "pytest_generate_tests",
    "refused",
    "speculation",
    "written",
]


SHIPPED = {"FORERUN_TARGET": "shipped"}


@pytest.fixture
def cli(any_cli: Callable[..., Any]) -> Callable[..., Any]:
    """`forerun ...` in this process, on the shipped pair, with or without speculation, if not said otherwise."""
    return lambda *arguments, **env: any_cli(*arguments, **{**SHIPPED, **environment(), **env})


@pytest.fixture
def start(any_start: Callable[..., Any]) -> Callable[..., Any]:
    """The same as a process of its own, which `process` runs to its end."""
    return lambda *arguments, **env: any_start(*arguments, **{**SHIPPED, **environment(), **env})


@pytest.fixture(scope="module")
def llm(speculation: str | None) -> LLM:
    """The shipped target, with its shipped drafter or without."""
    return LLM("shipped", **llm_options())


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """`forerun serve` with the shipped pair, as a user starts it."""
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    """OpenAI's own client of the server that a module has."""
    import openai  # here, for it and the next take seconds to import, in every process that collects

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Running) -> Any:
    """Anthropic's own client of the server that a module has."""
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def plain() -> LLM:
    """The model that is served without speculation, in this process."""
    return LLM("shipped", draft="none")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes requests (custom_id, url, body) as the lines of a file and returns its path."""

    def make(*requests: tuple[str, str, dict[str, Any]]) -> Path:
        lines = [
            json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"
            for custom_id, url, body in requests
        ]
        path = tmp_path / "in.jsonl"
        path.write_text("".join(lines), encoding="utf-8")
        return path

    return make


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the answers of a batch are to be."""
    return tmp_path / "out.jsonl"


@pytest.fixture
def batch(cli: Callable[..., Any], out: Path) -> Callable[..., Any]:
    """Runs `forerun batch` on a file of requests, with these flags."""
    return lambda requests, *flags, **options: cli("batch", str(requests), str(out), *flags, **options)


@pytest.fixture
def answers(out: Path) -> Callable[[], dict[str, dict[str, Any]]]:
    """Reads the output: custom_id -> response, after checking that every line is whole and no id is there twice."""

    def read() -> dict[str, dict[str, Any]]:
        text = out.read_text(encoding="utf-8")
        assert text.endswith("\n")
        lines = [json.loads(line) for line in text.split("\n")[:-1]]
        assert all(set(line) == {"id", "custom_id", "response", "error"} and line["error"] is None for line in lines)
        assert len({line["id"] for line in lines}) == len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line["response"] for line in lines}

    return read
