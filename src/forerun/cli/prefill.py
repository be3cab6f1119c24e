"""`forerun prefill` reads the common beginning of conversations once.

--kv-disk keeps the KV cache of this beginning, and every conversation that begins with it uses that cache.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import flags
from forerun.cli.signatures import Given
from forerun.errors import BadOption, CapacityError

FILE_HELP = (
    "a system prompt as a text, or in a .json file what every conversation begins with: messages, and tools, as in the "
    "body of a chat completion"
)
RAW_HELP = "the file is the beginning of texts that are continued, not of conversations"


def prefill(
    engine: Annotated[Given, flags.engine(leave_out=("target",))],
    file: Annotated[Path, typer.Argument(help=FILE_HELP, show_default=False)],
    target: flags.TargetArgument = None,
    raw: Annotated[bool, typer.Option("--raw", help=RAW_HELP)] = False,
) -> None:
    """Read a system prompt, tools or the beginning of a text, and store its KV cache with --kv-disk for later use."""
    config = flags.engine_config({**engine, "target": target})
    if config.kv_disk is None:
        raise BadOption("prefill needs --kv-disk: without it nothing is left when the command ends")
    text = flags.read_file(file, "file")
    from forerun.cli import waiting
    from forerun.engine.llm import LLM
    from forerun.types import SamplingParams

    opened = waiting.opened(config)
    with waiting.loading(opened):
        llm = LLM.from_opened(opened)
    with llm:
        ids = llm.tokenizer.encode(text) if raw else _beginning(llm, file, text)
        with waiting.Answering(llm, len(ids), writes=False):
            (out,) = llm.generate([ids], SamplingParams(max_tokens=1, temperature=0))
        cache = llm.engine.runner.cache
    # Rows are written until the engine is closed, and then it is known whether there was room.
    report = out.report
    assert report.first_token_at_s is not None
    seconds = report.first_token_at_s - report.arrived_at_s
    read = f"{len(ids):,} tokens in {seconds:.2f} s, {report.num_cached_tokens:,} of them kept before"
    if (keeper := getattr(cache, "keeper", None)) is not None and not keeper.folder.is_writable:
        raise CapacityError(f"{read}; not all can be kept: make room, or name another folder with --kv-disk")
    num_kept = len(ids) // cache.block_tokens * cache.block_tokens
    blocks = f", in whole blocks of {cache.block_tokens}" if num_kept < len(ids) else ""
    typer.echo(f"{read}; {num_kept:,} are kept{blocks}")


def _beginning(llm: Any, file: Path, text: str) -> list[int]:
    """Return the token ids that begin every conversation with the messages and tools of the file.

    text: the contents of `file`: a system prompt, or for .json an object with messages and tools.
    """
    body: dict[str, Any] = {"messages": [{"role": "system", "content": text}]}
    if file.suffix == ".json":
        try:
            body = json.loads(text)
        except ValueError as error:
            raise BadOption(f"{str(file)!r} is no JSON: {error}") from None
        if not isinstance(body, dict) or not isinstance(body.get("messages", []), list):
            raise BadOption(f'{str(file)!r} must hold an object: {{"messages": [...], "tools": [...]}}')
    messages, tools = body.get("messages", []), body.get("tools")
    given = {} if tools is None else {"tools": tools}
    two = [
        llm.apply_chat_template([*messages, {"role": "user", "content": question}], **given)
        for question in ("a", "Zum")
    ]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*two, strict=False))
    return [first for first, _ in same]
