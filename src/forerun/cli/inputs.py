"""The prompts of a command, from its arguments, a file, or standard input."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence as Seq
from pathlib import Path

from forerun.cli import flags
from forerun.errors import BadOption, shown
from forerun.models.named import find
from forerun.types import SamplingParams


def read_requests(prompts: Seq[str], file: Path | None, params: SamplingParams) -> list[flags.Request]:
    """Return a request for each prompt: first the prompts of the arguments, then the prompts of the file.

    Texts are not changed. `-` stands for standard input, which is also read if no other prompt is given. A file that
    ends in .jsonl has one request per line, with `params` as defaults. Raises BadOption where there is no prompt, or
    where a text is not UTF-8. Raises NotFound for a file that cannot be read.
    """
    requests: list[flags.Request] = [(_read_stdin() if text == "-" else text, params) for text in prompts]
    if file is not None:
        requests += read_prompt_file(file, params)
    if not requests and file is None and not sys.stdin.isatty():
        requests = [(_read_stdin(), params)]
    if not any(prompt for prompt, _ in requests) and file is not None:
        raise BadOption(f"the prompt file {str(file)!r} is empty: write a text into it, or name another")
    if not any(prompt for prompt, _ in requests):
        raise BadOption(
            'there is no prompt: write it as an argument ("def fib(n):"), name --prompt-file, or pipe it in'
        )
    return requests


def read_prompt_file(file: Path, params: SamplingParams, ignored: Seq[str] = ()) -> list[flags.Request]:
    """Return the requests of a file; see `read_requests`. ignored: the names of fields to skip in each line."""
    text = flags.read_file(file, "prompt file")
    return flags.requests(text, params, ignored) if file.suffix == ".jsonl" else [(text, params)]


def refuse_a_model(prompts: Seq[str]) -> None:
    """Raise BadOption if the first prompt names a model: unlike chat and serve, generate takes texts as arguments."""
    first = prompts[0]
    is_like_an_id = len(prompts) > 1 and re.fullmatch(r"[\w-]+/[\w.-]+(?:[@:][\w.-]+)?", first) is not None
    if find(first) is not None or is_like_an_id or _is_checkpoint(first):
        raise BadOption(
            f"{shown(first)} is a model, and generate takes texts: write --target {first}, and the text in quotes"
        )


def refuse_a_message(target: str | None) -> None:
    """Raise BadOption if `target` has several words: it is probably a message, but `forerun chat` takes a model."""
    if target is not None and len(target.split()) > 1 and not Path(target[:200]).exists():
        raise BadOption(
            f"{shown(target)} is no model: forerun chat takes one, and messages when it asks; forerun generate answers "
            "a text"
        )


def _is_checkpoint(text: str) -> bool:
    try:
        path = Path(text).expanduser()
        return path.suffix.lower() == ".gguf" or (path / "config.json").is_file()
    except (OSError, RuntimeError, ValueError):  # no name of a file
        return False


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise BadOption("standard input is not UTF-8 text: convert it first") from None
