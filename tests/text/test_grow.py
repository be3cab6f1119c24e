"""A grown tokenizer encodes and decodes as before and has a token for every id."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import models, pre_tokenizers

from forerun.engine.opened import SHIPPED_TARGET
from forerun.errors import UnsupportedModel
from forerun.models.named import DATA
from forerun.text.grow import grow
from forerun.text.tokenizer import Tokenizer
from refusals import refusal

NUM_IDS = 128_256
CONTENT = (SHIPPED_TARGET / "tokenizer.json").read_text(encoding="utf-8")


def read(content: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(content), Path("a tokenizer.json"))


@functools.cache
def old() -> Tokenizer:
    return read(CONTENT)


@functools.cache
def grown_content() -> str:
    return grow(CONTENT, NUM_IDS)


@functools.cache
def grown() -> Tokenizer:
    return read(grown_content())


def test_every_id_has_a_token_and_old_ids_keep_theirs() -> None:
    assert grown().num_ids == NUM_IDS
    assert grown().holes == frozenset()
    assert {i: grown().id_to_token[i] for i in range(old().num_ids)} == old().id_to_token
    assert grown().id_to_token[4096] == "<|unused_4096|>"
    assert grown().special_ids == old().special_ids


def test_held_out_prompts_are_encoded_and_decoded_as_before() -> None:
    for line in (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        ids = old().encode(json.loads(line)["text"])
        assert grown().encode(json.loads(line)["text"]) == ids
        assert grown().decode(ids) == old().decode(ids)


@given(st.text() | st.sampled_from(["<|unused_4096|>", "<|endoftext|>x", "<|unused_128255|> <|unused_5000|>"]))
@settings(max_examples=100, deadline=None)
def test_any_text_is_encoded_as_before(text: str) -> None:
    assert grown().encode(text) == old().encode(text)


def test_transformers_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text(grown_content(), encoding="utf-8")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
    assert len(theirs) == NUM_IDS
    assert theirs.encode(text) == old().encode(text)
    assert theirs.convert_ids_to_tokens(128_255) == "<|unused_128255|>"


def test_what_has_enough_ids_stays_as_it_is() -> None:
    assert grow(CONTENT, 4096) == CONTENT
    assert grow(CONTENT, 5000, first_id=5000) == CONTENT


def test_ids_below_the_first_stay_without_a_token() -> None:
    assert read(grow(CONTENT, 4200, first_id=4100)).holes == frozenset(range(4096, 4100))


def small(pre_tokenizer: Any = None, **options: Any) -> tokenizers.Tokenizer:
    """Three letters, one merge, and a special token behind them that the vocabulary does not have, as in Llama 3."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")], **options))
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.add_special_tokens(["<end>"])
    return backend


@pytest.mark.parametrize("options", [{}, {"ignore_merges": True}])
def test_added_tokens_keep_their_ids(options: dict[str, Any]) -> None:
    old = small(pre_tokenizers.Punctuation(), **options)
    grown = read(grow(old.to_str(), 50))
    assert grown.encode("abb<end>ba<|unused_7|>") == old.encode("abb<end>ba<|unused_7|>").ids == [2, 1, 3, 1, 0]
    assert grown.id_to_token[3] == "<end>"
    assert grown.id_to_token[4] == "<|unused_4|>"
    assert grown.special_ids == {3}


REFUSED = {
    "unigram": (tokenizers.Tokenizer(models.Unigram([("a", 0.0)])), "Unigram cannot be given more ids: it must be BPE"),
    "word piece": (tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a")), "of type WordPiece"),
    "word level": (tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "of type WordLevel"),
    "whole words": (small(ignore_merges=True), "would encode the text '<|unused_4|>'"),
}


@pytest.mark.parametrize(("backend", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_grow_is_refused(backend: tokenizers.Tokenizer, sentence: str) -> None:
    assert sentence in refusal(UnsupportedModel, grow, backend.to_str(), 50)


def test_names_that_are_taken_are_refused() -> None:
    backend = small()
    backend.add_tokens(["<|unused_9|>"])
    assert "would not keep theirs" in refusal(UnsupportedModel, grow, backend.to_str(), 50)
