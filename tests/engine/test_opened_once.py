"""Each file of a target and of its draft model is opened once, and what it says is looked up once."""

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from forerun import LLM, drafters
from forerun.models.families import llama
from forerun.text import tokenizer
from models.conftest import random_weights
from models.gguf_files import split, write_model
from openings import counted
from tiny import tiny_config, write_tiny

pytestmark = pytest.mark.once("about files, whatever the speculation")

SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def chatting(folder: Path, seed: int = 0) -> Path:
    """A model with a chat template, whose end token only tokenizer.json has an id for."""
    write_tiny(folder, seed=seed)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def in_a_cache(folder: Path, cache: Path, name: str) -> Path:
    """Lay a model out as huggingface_hub's cache has it, and return its blobs."""
    place = cache / f"models--{name.replace('/', '--')}"
    snapshot, blobs = place / "snapshots" / COMMIT, place / "blobs"
    for made in (snapshot, blobs, place / "refs"):
        made.mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    for file in folder.iterdir():
        shutil.copyfile(file, blobs / f"blob of {file.name}")
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"blob of {file.name}", snapshot))
    return blobs


def calls(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[Any]:
    """From here on, the first argument of every call of a function of the package."""
    seen, real = list[Any](), getattr(place, name)

    def counting(first: Any, *more: Any, **named: Any) -> Any:
        seen.append(first)
        return real(first, *more, **named)

    monkeypatch.setattr(place, name, counting)
    return seen


def test_each_file_of_a_pair_is_opened_once(tmp_path: Path) -> None:
    target, draft = chatting(tmp_path / "target"), chatting(tmp_path / "draft", seed=1)
    with counted(target, draft) as seen:
        llm = LLM(target, draft=str(draft), extra_drafts=f"tree:of=(model:path={draft});lookup")
    assert llm.answers_texts
    whole = [f"target/{name}" for name in (*SMALL, "chat_template.jinja", "model.safetensors")]
    assert seen == Counter(whole + [f"draft/{name}" for name in (*SMALL, "model.safetensors")])


def test_what_they_say_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = chatting(tmp_path / "target"), chatting(tmp_path / "draft", seed=1)
    read, resolved = calls(monkeypatch, llama, "read"), calls(monkeypatch, drafters, "resolve")
    tokenizers = calls(monkeypatch, tokenizer, "_loaded")
    LLM(target, draft=str(draft), extra_drafts="suffix:shape=tree")
    assert len(read) == 2
    assert Counter(resolved) == Counter((str(draft), "suffix:shape=tree", "lookup", "prediction", "forced"))
    assert len(tokenizers) == 2


def test_a_model_of_the_hub_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, from the cache."""
    blobs = in_a_cache(chatting(tmp_path / "target"), tmp_path / "hub", "org/target")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with counted(blobs) as seen:
        llm = LLM("org/target", draft="none")
    assert (llm.checkpoint.name, llm.checkpoint.folder.name) == ("org/target", COMMIT)
    assert seen == Counter(f"blobs/blob of {name}" for name in (*SMALL, "chat_template.jinja", "model.safetensors"))


@pytest.mark.parametrize("ops", ["auto", "reference"])
def test_each_piece_of_a_gguf_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ops: str) -> None:
    """Beside a draft model that is a whole file; the first time, when its small files are written, and later."""
    config = replace(tiny_config("llama"), vocab_size=258)
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        write_model(tmp_path / name / "a.gguf", config, random_weights(config))
    pieces = split(tmp_path / "target" / "a.gguf", 8)
    read = calls(monkeypatch, llama, "read")
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    for _ in range(2):
        with counted(tmp_path / "target", tmp_path / "draft", tmp_path / "cache") as seen:
            LLM(pieces[1], draft=str(tmp_path / "draft" / "a.gguf"), ops=ops)
        weights = {name: num for name, num in seen.items() if name.endswith(".gguf")}
        assert weights == dict.fromkeys(["draft/a.gguf", *(f"target/{piece.name}" for piece in pieces)], 1)
    assert {num for name, num in seen.items() if name.startswith("cache")} == {1}
    assert len(read) == 4
