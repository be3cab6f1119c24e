"""Reads the chat templates in a checkpoint folder, and the special tokens that templates write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import NotFound, UnsupportedModel
from forerun.text.files import unreadable
from forerun.text.limits import MAX_TEMPLATE_BYTES
from forerun.text.small_files import SmallFiles

DEFAULT = "default"
FILE = "chat_template.jinja"
MORE = "additional_chat_templates"  # a folder; its files are templates with names
CONFIG = "tokenizer_config.json"
ANOTHER = "name another template with --chat-template FILE (chat_template= in Python)"


@dataclass(frozen=True)
class Source:
    """The text of one template. where: its origin, for messages."""

    text: str
    where: str


def find_sources(small: SmallFiles, file: Path | None, model: str | None = None) -> dict[str, Source]:
    """Return the templates by name, from the first source that has any; precedence is as in transformers.

    The sources are, in this order: `file`, if given; chat_template.jinja together with
    additional_chat_templates/NAME.jinja; `chat_template` of tokenizer_config.json, which is one text or a list of
    {"name", "template"}. A template without a name is called "default". Raises NotFound if there is no template. model:
    the name by which the user knows the model, for the error's message; None = the folder.
    """
    if file is not None:
        if not file.is_file():
            what = f"{file} is a folder" if file.is_dir() else f"there is no file {file}"
            raise NotFound(f"{what}: name a chat template, a text in the Jinja language")
        return {DEFAULT: small.once(file, _read)}
    folder = small.folder
    if folder is None or not folder.is_dir():
        raise NotFound(f"there is no folder {folder}: name a checkpoint folder")
    sources = {DEFAULT: small.once(folder / FILE, _read)} if (folder / FILE).is_file() else {}
    sources |= {path.stem: small.once(path, _read) for path in sorted((folder / MORE).glob("*.jinja"))}
    sources = sources or _from_config(small.json(CONFIG), folder / CONFIG)
    if not sources:
        raise NotFound(
            f"{model or folder} has no chat template, as is usual for a base model: use generate, which needs none, or "
            "name a template with --chat-template FILE (chat_template= in Python)"
        )
    num_bytes = sum(len(source.text.encode(errors="replace")) for source in sources.values())
    _check_size(num_bytes, f"the chat templates in {folder}")
    return sources


def special_tokens(small: SmallFiles) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and so on, by these names. Tokens that are null are left out.

    The tokens are all entries of tokenizer_config.json whose names end in _token, and its extra_special_tokens. In old
    checkpoints, which have no added_tokens_decoder, special_tokens_map.json takes precedence, as in transformers.
    """
    config = small.json(CONFIG)
    if "added_tokens_decoder" not in config:
        config = {**config, **small.json("special_tokens_map.json")}
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _from_config(config: Mapping[str, Any], path: Path) -> dict[str, Source]:
    value = config.get("chat_template")
    where = f"chat_template in {path}"
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: _not_empty(Source(value, where))}
    if not isinstance(value, list) or not all(_is_named(item) for item in value):
        raise UnsupportedModel(f"{where} must be a text, or a list of mappings with the texts name and template")
    return {item["name"]: Source(item["template"], f"{item['name']!r} of {where}") for item in value}


def _is_named(item: object) -> bool:
    return isinstance(item, Mapping) and all(isinstance(item.get(key), str) for key in ("name", "template"))


def _read(path: Path) -> Source:
    try:
        _check_size(path.stat().st_size, str(path))
        return _not_empty(Source(path.read_text(encoding="utf-8"), str(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, "a UTF-8 text") from error


def _not_empty(source: Source) -> Source:
    if not source.text.strip():
        raise UnsupportedModel(f"{source.where} is empty: fetch it again, or {ANOTHER}")
    return source


def _check_size(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_TEMPLATE_BYTES:
        raise UnsupportedModel(
            f"{where}: {num_bytes:,} bytes are more than the {MAX_TEMPLATE_BYTES:,} that chat templates of a model may "
            f"have, so {ANOTHER}"
        )
