"""Every text survives encode and decode; indentation is cheap; the files are the standard ones."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies
from tokenizers import Tokenizer

from forerun.train.corpus import load_corpus
from forerun.train.tokenizer import END_OF_TEXT, load_tokenizer, save_tokenizer, train_tokenizer

SAMPLES = ["def f(x):\n    if x:\n        return  x\n\treturn\r\n", "naïve Ünïcode 漢字 🙂 e\u0301 \u200d\ufeff",
           "   \n\n \t \n", "\x00\x01\x7f\x80\xff", "1234567 0x_ff ...", ""]  # fmt: skip
CODE = ["def f(x):\n    if x:\n        return x\n    return None\n\n\n" * 20, "x = 1\ny = 2\n" * 20]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(CODE, 320)


@pytest.mark.parametrize("text", SAMPLES)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@settings(max_examples=40, deadline=None)
@given(text=strategies.text())
def test_round_trip_of_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    two_bytes = "".join(map(chr, range(0x100))) + "".join(map(chr, range(0x800, 0x10000, 97)))
    text = two_bytes.encode("utf-8", "surrogatepass").decode("utf-8", "ignore")
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_newline_and_indent_are_one_token(tokenizer: Tokenizer) -> None:
    assert "\n        " in [tokenizer.decode([i]) for i in tokenizer.encode("    if x:\n        return x").ids]


def test_special_token_ends_documents_and_is_never_added(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end == 0
    assert end not in tokenizer.encode("x = 1\n").ids
    assert tokenizer.encode(f"x{END_OF_TEXT}").ids[-1] == end


def test_saved_files_are_read_by_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path, 2048)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for text in SAMPLES:
        ids = tokenizer.encode(text).ids
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token == json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == END_OF_TEXT
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()


def test_training_is_deterministic(sources: Path) -> None:
    texts = [d.text for d in load_corpus(sources).train]
    assert train_tokenizer(texts, 300).to_str() == train_tokenizer(texts, 300).to_str()
