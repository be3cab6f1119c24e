"""Each file of a target and of its draft model is opened once, and what it says is looked up once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from forerun import LLM
from openings import counted
from tiny import write_tiny

pytestmark = pytest.mark.once("about files, whatever the speculation")

SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"


def chatting(folder: Path, seed: int = 0) -> Path:
    """A model with a chat template, whose end token only tokenizer.json has an id for."""
    write_tiny(folder, seed=seed)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def test_each_small_file_of_a_target_is_opened_once(tmp_path: Path) -> None:
    target = chatting(tmp_path / "target")
    with counted(target) as seen:
        llm = LLM(target)
    assert llm.answers_texts
    del seen["target/model.safetensors"]
    assert seen == Counter(f"target/{name}" for name in (*SMALL, "chat_template.jinja"))
