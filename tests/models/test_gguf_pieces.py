"""A GGUF file in pieces is the model that it is as a whole, and pieces that do not belong together are refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from benchmarks.random_file import add_key, finish
from forerun import LLM, SamplingParams
from forerun.blocks import resized
from forerun.errors import NotFound, UnsupportedModel
from forerun.models.loading import load_checkpoint
from forerun.models.source import open_source
from models.gguf_files import split, write_random
from models.test_gguf import CONFIG, cache  # noqa: F401  (a fixture for every test)
from ops.native_cases import needs_native
from refusals import refusal


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_random(tmp_path / "a.gguf", CONFIG, lambda name: "Q8_0" if "mlp" in name else "F16")


@pytest.mark.parametrize("named", [0, 1, 2])
def test_pieces_are_the_whole_file(whole: Path, named: int) -> None:
    """By the path of any of them: every weight, the config and the small files."""
    pieces = split(whole, 8)
    assert [piece.name for piece in pieces] == [f"a-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    one, three = open_source(whole), open_source(pieces[named])
    assert dict(one.config) == dict(three.config)
    assert one.tensors.keys() == three.tensors.keys()
    assert {stored.file for stored in three.tensors.values()} == set(pieces)
    for name in one.tensors:
        for a, b in zip(one.blocks(name), three.blocks(name), strict=True):
            assert a.dtype == b.dtype
            assert np.array_equal(a.values, b.values)
    for file in ("tokenizer.json", "config.json", "generation_config.json"):
        assert (one.folder / file).read_bytes() == (three.folder / file).read_bytes()


@needs_native
def test_kernels_read_the_blocks_of_pieces_themselves(whole: Path) -> None:
    texts = []
    for path in (whole, split(whole, 5)[0]):
        with LLM(str(path), draft=None, ops="native") as llm:
            texts.append(llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=24))[0].token_ids)
    assert texts[0] == texts[1]


def test_a_file_that_was_joined_keeps_the_keys_of_pieces(tmp_path: Path) -> None:
    """As llama-gguf-split leaves them."""
    load_checkpoint(write_random(tmp_path / "a.gguf", resized(CONFIG, num_layers=1), split__count=0, split__no=0))


def rewritten(piece: Path, values: dict[str, Any]) -> None:
    """A piece without tensors that says something else."""
    writer = gguf.GGUFWriter(piece, "llama")
    for key, value in values.items():
        add_key(writer, key, value)
    finish(writer)


def numbers(count: Any = 3, number: Any = 1) -> dict[str, Any]:
    return {"split.count": count, "split.no": number}


Spoil = Callable[[list[Path]], object]
SPOILT: dict[str, tuple[Spoil, str]] = {
    "missing": (lambda p: p[1].unlink(), "a-00002-of-00003.gguf is not there, piece 2 of the 3 that a-00001-of-00003"),
    "first missing": (lambda p: p[0].unlink(), "a-00001-of-00003.gguf is not there, piece 1 of the 3 that a-00003-of"),
    "swapped": (lambda p: p[0].rename(p[1]), "a-00001-of-00003.gguf is not there, piece 1 of the 3"),
    "twice": (lambda p: shutil.copy(p[2], p[1]), "says that it is piece 3 of 3, which its name does not: fetch it"),
    "of others": (lambda p: rewritten(p[1], numbers(7)), "says that it is piece 2 of 7, which its name does not"),
    "whole": (lambda p: rewritten(p[1], {}), "says that it is piece 1 of 1, which its name does not"),
    "cut": (lambda p: p[1].write_bytes(p[1].read_bytes()[:-40]), "as where a download was cut short"),
    "empty": (lambda p: rewritten(p[1], numbers()), "says that the 3 pieces have 21 tensors, and they have 13: fetch"),
    "text": (lambda p: rewritten(p[1], numbers("3")), "sets split.count=b'3' and split.no=1, which must be numbers"),
    "huge": (lambda p: rewritten(p[1], numbers(3, 1 << 31)), "says that it is piece 2147483649 of 3, which its name"),
    "linked": (lambda p: (p[1].unlink(), p[1].symlink_to("gone")), "is a link to gone, which is not there"),
    "same tensors": (
        lambda p: p[1].write_bytes(p[0].read_bytes().replace(b"split.no", b"split.xx")),
        "says that it is piece 1 of 3, which its name does not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_pieces_that_do_not_belong_together_are_refused(whole: Path, case: str) -> None:
    spoil, words = SPOILT[case]
    pieces = split(whole, 8)
    spoil(pieces)
    first = next(piece for piece in (pieces[0], pieces[2]) if piece.exists())
    said = refusal((NotFound, UnsupportedModel), load_checkpoint, first, with_tokenizer=True)
    assert words in said
    assert "\n" not in said


def test_a_tensor_in_two_pieces_is_refused(whole: Path) -> None:
    pieces = split(whole, 8)
    first, second = ([t.name.encode() for t in gguf.GGUFReader(piece).tensors] for piece in pieces[:2])
    name, same = next((a, b) for a in first for b in second if len(a) == len(b))
    pieces[1].write_bytes(pieces[1].read_bytes().replace(same, name))
    with pytest.raises(UnsupportedModel, match=r"both have the tensor '.*': fetch all pieces again, from one place"):
        load_checkpoint(pieces[0])


def test_a_piece_with_another_name_is_refused(whole: Path) -> None:
    split(whole, 8)[1].rename(whole.with_name("b.gguf"))
    words = r"b\.gguf says that it is piece 2 of 3, and the others .* end with -00002-of-00003\.gguf: give it and them"
    with pytest.raises(UnsupportedModel, match=words):
        load_checkpoint(whole.with_name("b.gguf"))
