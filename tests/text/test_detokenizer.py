"""The incremental detokenizer against decoding everything at once, on tokenizers of both kinds."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers, trainers

from forerun.errors import NotFound, UnsupportedModel, VocabularyMismatch
from forerun.text import Detokenizer, PushResult, Tokenizer, compare
from refusals import refusal

TEXTS = [
    "def fib(n):\n    return n if n < 2 else fib(n - 1)",
    "héllo wörld, naïve café €5",
    "日本語 😀 text",
    "the end.",
] * 4


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens([AddedToken("<added>", special=False)])
    return Tokenizer(backend, Path("byte_level"))


def metaspace() -> Tokenizer:
    """As Llama 2's: byte fallback, leading space dropped at the beginning of a text only."""
    words = ["▁", "▁the", "▁▁end", "hello", "é", ".", "▁\ufffd", "e", "n", "d"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    vocab |= {word: 259 + i for i, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, Path("metaspace"))


def metaspace_decoder() -> Tokenizer:
    """The other spelling: a Metaspace decoder instead of Replace and Strip."""
    backend = Backend(models.BPE(vocab={"▁a": 0, "▁": 1, "b": 2, "▁▁": 3, "é": 4, "<s>": 5}, merges=[]))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, Path("metaspace_decoder"))


BYTE_LEVEL = byte_level()
METASPACE = metaspace()
TOKENIZERS = {"byte_level": BYTE_LEVEL, "metaspace": METASPACE, "metaspace_decoder": metaspace_decoder()}


def is_utf8(run: list[int]) -> bool:
    """True for the ids of metaspace() that are byte tokens and together whole characters."""
    try:
        return bool(bytes(i - 3 for i in run).decode())
    except UnicodeDecodeError:
        return False


def decode_all(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Decoding everything at once by the library, each run of byte tokens cut behind its longest whole beginning."""
    if tokenizer is not METASPACE:
        return tokenizer.decode(ids)
    names: list[str] = []
    for is_run, group in itertools.groupby(filter(tokenizer.id_to_token.get, ids), lambda i: 3 <= i < 259):
        run = list(group)
        whole = next((n for n in range(len(run), 0, -1) if is_run and is_utf8(run[:n])), 0)
        texts = [tokenizer.id_to_token[i] for i in run]
        names += [*texts[:whole], "", *texts[whole:]] if 0 < whole < len(run) else texts
    return str(tokenizer._backend.decoder.decode(names))


def whole_text(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The definition: what decoding everything at once has beyond decoding the prompt."""
    prompt = [i for i in prompt if i not in tokenizer.special_ids]
    ids = [i for i in ids if i not in tokenizer.special_ids]
    before, full = decode_all(tokenizer, prompt), decode_all(tokenizer, prompt + ids)
    return full[next((i for i, (a, b) in enumerate(zip(before, full, strict=False)) if a != b), len(before)) :]


def rounds(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """The ids in rounds of the given sizes, repeated."""
    out, at, i = [], 0, 0
    while at < len(ids):
        size = cuts[i % len(cuts)]
        out.append(ids[at : at + size])
        at, i = at + size, i + 1
    return out


def case(name: str) -> st.SearchStrategy[tuple[list[int], list[int], list[int]]]:
    tokenizer = TOKENIZERS[name]
    word = st.sampled_from(["é", "€", "😀", "the end", " ", "日"]).map(lambda t: tokenizer.encode(t, False))
    some = st.integers(0, tokenizer.num_ids + 1).map(lambda i: [i])
    ids = st.lists(st.one_of(word, some), max_size=12).map(lambda parts: [i for part in parts for i in part])
    return st.tuples(ids, ids, cut_sizes)


cut_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_deltas_joined_are_the_whole_text(name: str, data: st.DataObject) -> None:
    prompt, ids, cuts = data.draw(case(name))
    tokenizer = TOKENIZERS[name]
    detokenizer = Detokenizer(tokenizer, prompt)
    deltas = [detokenizer.push(part).text for part in rounds(ids, cuts)]
    assert "".join(deltas) + detokenizer.finish() == whole_text(tokenizer, prompt, ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_stop_strings_do_not_depend_on_rounds(name: str, data: st.DataObject) -> None:
    prompt, ids, cuts = data.draw(case(name))
    tokenizer = TOKENIZERS[name]
    text = whole_text(tokenizer, prompt, ids)
    ends = st.integers(0, max(len(text) - 1, 0))
    spans = data.draw(st.lists(st.tuples(ends, st.integers(1, 4)), max_size=3))
    stops = tuple(text[start : start + length] for start, length in spans if text[start : start + length])
    detokenizer = Detokenizer(tokenizer, prompt, stops)
    out, kept = "", 0
    for part in rounds(ids, cuts):
        result = detokenizer.push(part)
        out += result.text
        kept += len(part) if result.stopped_at is None else result.stopped_at + 1
        if result.stop is not None:
            break
    out += detokenizer.finish()
    occurrences = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert out == (text[: min(occurrences)[1]] if occurrences else text)
    assert (detokenizer.stop is not None) == bool(occurrences)
    if occurrences and kept < len(ids):  # no token too few
        assert any(stop in whole_text(tokenizer, prompt, ids[:kept]) for stop in stops)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_stop_string_that_ends_in_the_first_tokens_stops_nothing(name: str, data: st.DataObject) -> None:
    """Whatever the rounds; one that begins there and ends behind them does."""
    prompt, ids, cuts = data.draw(case(name))
    tokenizer, num_free = TOKENIZERS[name], data.draw(st.integers(0, 6))
    text = whole_text(tokenizer, prompt, ids)
    start = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stop = text[start : start + data.draw(st.integers(1, 4))]
    one = Detokenizer(tokenizer, prompt, num_free=num_free)  # what is certain of the text behind each token
    certain = [0]
    for token in ids:
        certain.append(certain[-1] + len(one.push([token]).text))
    free = certain[num_free] if num_free <= len(ids) else len(text)
    ends = [i + len(stop) for i in range(len(text)) if stop and text.startswith(stop, i)]
    expected = min((end for end in ends if end > free), default=None)
    detokenizer = Detokenizer(tokenizer, prompt, (stop,) if stop else (), num_free=num_free)
    out = ""
    for part in rounds(ids, cuts):
        out += detokenizer.push(part).text
    out += detokenizer.finish()
    assert out == (text if expected is None else text[: expected - len(stop)])


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("\n aé€😀日the"), max_size=12), cuts=cut_sizes, data=st.data())
def test_byte_tokens_of_a_text_are_what_the_library_decodes(text: str, cuts: list[int], data: st.DataObject) -> None:
    """And each whole character is released with its last byte."""
    prompt = data.draw(st.sampled_from([[1, 262], [1, 260], [262, *as_bytes("é")], [262, 13]]))
    ids = [i for c in text for i in data.draw(st.sampled_from([as_bytes(c), METASPACE.encode(c, False)[1:] or [263]]))]
    detokenizer = Detokenizer(METASPACE, prompt)
    released = ""
    num_read = 0
    for part in rounds(ids, cuts):
        released += detokenizer.push(part).text
        num_read += len(part)
        so_far = METASPACE.decode(prompt + ids[:num_read])
        if "\ufffd" not in so_far:
            assert METASPACE.decode(prompt) + released == so_far
    assert METASPACE.decode(prompt) + released + detokenizer.finish() == METASPACE.decode(prompt + ids)


def as_bytes(text: str) -> list[int]:
    """The byte tokens of metaspace() for a text."""
    return [3 + byte for byte in text.encode()]


def test_a_character_over_two_rounds_appears_whole() -> None:
    detokenizer = Detokenizer(METASPACE, [1, 260])
    assert [detokenizer.push([i]).text for i in as_bytes("€")] == ["", "", "€"]
    assert detokenizer.push([264]).text == "."
    assert detokenizer.finish() == ""


def test_a_stop_text_inside_of_a_run_of_byte_tokens() -> None:
    ids = [260, *as_bytes("\n\né\n"), 262]
    assert Detokenizer(METASPACE, [1, 262], ("\n",)).push(ids) == PushResult(" the", "\n", 1)
    assert Detokenizer(METASPACE, [1, 262], ("é\n",)).push(ids) == PushResult(" the\n\n", "é\n", 5)


def test_characters_before_a_bad_byte_stay() -> None:
    """They were released, or could have been; from the bad byte on the run is the library's U+FFFD for each byte."""
    for rest, text in (([0xFF, 0x0A], "\ufffd\ufffd"), ([0xE2, 0x82], "\ufffd\ufffd"), ([0xE2, 0x41], "\ufffd\ufffd")):
        detokenizer = Detokenizer(METASPACE, [1, 262])
        assert detokenizer.push(as_bytes("\n")).text == "\n"
        later = detokenizer.push([3 + byte for byte in rest]).text
        assert later + detokenizer.push([262]).text == text + "hello"


def test_a_stop_text_that_the_end_completes() -> None:
    detokenizer = Detokenizer(METASPACE, [1, 262], ("\ufffd",))
    assert detokenizer.push([260, *as_bytes("€")[:2]]) == PushResult(" the")
    assert (detokenizer.stop, detokenizer.finish(), detokenizer.stop) == (None, "", "\ufffd")


def test_leading_space_of_a_continuation_survives() -> None:
    assert Detokenizer(METASPACE, [1, 262]).push([260]).text == " the"
    assert Detokenizer(METASPACE, []).push([260]).text == "the"


def test_the_completing_token_is_named_and_later_ones_are_not_read() -> None:
    ids = [BYTE_LEVEL.encode(c)[0] for c in "abcXYZdef"]
    detokenizer = Detokenizer(BYTE_LEVEL, [], ("XYZ",))
    assert detokenizer.push(ids[:4]).text == "abc"  # X is held back
    result = detokenizer.push(ids[4:])
    assert (result.text, result.stop, result.stopped_at) == ("", "XYZ", 1)
    assert detokenizer.push(ids).text == detokenizer.finish() == ""


def test_held_back_text_comes_at_the_end() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, [], ("END",))
    assert detokenizer.push(BYTE_LEVEL.encode("the EN")).text == "the "
    assert detokenizer.finish() == "EN"


def test_vocabulary_facts() -> None:
    assert BYTE_LEVEL.id_to_token[BYTE_LEVEL.num_ids - 1] == "<added>"
    assert BYTE_LEVEL.special_ids == {0}
    assert BYTE_LEVEL.holes == frozenset()
    assert len(METASPACE.byte_ids) == 256


def test_holes_are_ids_without_a_token() -> None:
    tokenizer = Tokenizer(Backend(models.WordLevel(vocab={"a": 0, "b": 3}, unk_token="a")), Path("holes"))
    assert (tokenizer.num_ids, tokenizer.holes) == (4, {1, 2})


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel(vocab={"a": 0, "<s>": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "removed")
    backend.enable_truncation(2)
    backend.enable_padding(length=7)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("a a a a") == [0, 0, 0, 0]


def test_compare_names_the_first_differing_id() -> None:
    compare(METASPACE, metaspace(), "./theirs")
    sentence = r"at id 0: the target has '<unk>', the draft ./theirs has '<\|end\|>'"
    with pytest.raises(VocabularyMismatch, match=sentence):
        compare(METASPACE, BYTE_LEVEL, "./theirs")
    short = Tokenizer(Backend(models.WordLevel(vocab={"a": 0}, unk_token="a")), Path("short"))
    long = Tokenizer(Backend(models.WordLevel(vocab={"a": 0, "b": 1}, unk_token="a")), Path("long"))
    other = Tokenizer(Backend(models.WordLevel(vocab={"b": 1}, unk_token="b")), Path("other"))
    for pair in ((short, long), (long, short), (other, long)):  # what only one of them knows is no contradiction
        compare(*pair, "./theirs")
    with pytest.raises(VocabularyMismatch, match=r"at id 0: .*has 'a', the draft ./theirs has no token"):
        compare(short, other, "./theirs")


def test_missing_and_broken_files(tmp_path: Path) -> None:
    assert "no tokenizer.json" in refusal(NotFound, Tokenizer.load, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "is not a file of the tokenizers library" in refusal(UnsupportedModel, Tokenizer.load, tmp_path)
