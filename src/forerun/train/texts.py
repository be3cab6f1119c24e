"""Reads texts to learn from: given files, files in given folders, the standard library, or installed packages."""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Callable, Iterator, Sequence as Seq
from pathlib import Path
from pydoc_data import topics
from typing import Any

from forerun.config import EngineConfig
from forerun.drafters.shared import artifacts
from forerun.engine.opened import Opened
from forerun.errors import BadOption, NotFound, shown
from forerun.train.corpus import load_corpus
from forerun.train.tokenizer import load_tokenizer


def files_of(paths: Seq[Path]) -> list[Path]:
    """Return the files in `paths`, and all files below the folders in `paths`, sorted within each folder.

    Hidden files below folders are left out. Raises NotFound for a path that does not exist, and for a folder without a
    file.
    """
    files: list[Path] = []
    for path in paths:
        inside = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        if path.is_dir():
            inside = [f for f in inside if not any(part.startswith(".") for part in f.relative_to(path).parts)]
        if not inside:
            raise NotFound(f"there is no text at {shown(str(path))}: name a file, or a folder with files in it")
        files += inside
    return list(dict.fromkeys(files))


def read_texts(paths: Seq[Path], max_bytes: int) -> Iterator[str]:
    """Yield the texts of the files that `files_of` returns.

    If `paths` is empty, the training modules of the standard library are yielded instead (corpus.py).
    Reading ends after `max_bytes` bytes of files, even inside a text. A file that is not UTF-8 text, such as a picture,
    is left out if it was found below a folder. Raises BadOption if such a file is in `paths` itself, and NotFound for a
    file that cannot be read.
    """
    if not paths:
        for document in load_corpus().train:
            yield document.text
        return
    for file in files_of(paths):
        if max_bytes <= 0:
            return
        try:
            with file.open("rb") as opened:
                data = opened.read(max_bytes + 1)
        except OSError as error:
            raise NotFound(f"the file {shown(str(file))} cannot be read ({error.strerror}): leave it out") from error
        text = _decoded(data[:max_bytes], is_cut=len(data) > max_bytes)
        max_bytes -= len(data)
        if text is not None:
            yield text
        elif file in paths:
            raise BadOption(f"the file {shown(str(file))} is not UTF-8 text: convert it first")


def refuse_out(out: Path) -> None:
    """Raise BadOption if `out` cannot be a file."""
    if out.is_dir() or not out.parent.exists():
        raise BadOption(f"out={str(out)!r} is not possible: it must be a file in a folder that exists")


def encoded_texts(target: str | None, paths: Seq[Path], max_bytes: int) -> tuple[Iterator[list[int]], int, str]:
    """Return the token ids of each of `read_texts`, how many ids the target has, and its tokenizer's fingerprint.

    target: as for LLM; None = the default target. Raises UserError for a wrong target, before any text is read.
    """
    opened = Opened.of(EngineConfig.make(**({} if target is None else {"target": target})))
    tokenizer = opened.text_tokenizer()
    num_ids = min(tokenizer.num_ids, opened.vocab_size)
    ids = (tokenizer.encode(text, add_special_tokens=False) for text in read_texts(paths, max_bytes))
    return ids, num_ids, artifacts.fingerprint(tokenizer, num_ids)


def counting(tokenizer: str) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text.

    tokenizer: a tokenizer.json, a folder with one, or a target as for LLM. Raises UserError for anything else.
    """
    path = Path(tokenizer).expanduser()
    if (path.is_file() and path.suffix == ".json") or (path / "tokenizer.json").is_file():
        encode = load_tokenizer(path).encode
        return lambda text: len(encode(text).ids)
    words = Opened.of(EngineConfig(target=tokenizer)).text_tokenizer()
    return lambda text: len(words.encode(text))


def packaged_texts(code_bytes: int = 2 * 10**6) -> list[str]:
    """Return installed texts: descriptions of packages, Python's help topics, and modules of the standard library.

    The texts and their order depend only on the installed packages and Python. code_bytes: the approximate length of
    all modules together, in characters.
    """
    described: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        metadata: Any = distribution.metadata  # an email Message; the declared protocol hides that
        name, text = metadata["Name"], metadata.get_payload()
        if name and isinstance(text, str) and len(text) > 200:
            described[name.lower()] = text
    modules = [document.text for document in load_corpus().train]
    random.Random(0).shuffle(modules)
    num = 0
    while num < len(modules) and code_bytes > 0:
        code_bytes -= len(modules[num])
        num += 1
    helped = [text for _, text in sorted(topics.topics.items())]
    return [*(text for _, text in sorted(described.items())), *helped, *modules[:num]]


def _decoded(data: bytes, is_cut: bool) -> str | None:
    """Return the text of UTF-8 bytes; None for other bytes. is_cut: whether the bytes may end inside a character."""
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        is_end = is_cut and error.reason == "unexpected end of data"
        return data[: error.start].decode("utf-8") if is_end else None
