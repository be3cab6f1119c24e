"""Broken and hostile GGUF files: each is refused in one sentence, at once and without memory for what it claims."""

import random
import resource
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest

from forerun import native
from forerun.blocks import Rope, resized
from forerun.errors import UserError
from forerun.models.loading import load_checkpoint
from forerun.ops.cpu import CpuOps
from forerun.ops.reference import ReferenceOps
from models.gguf_files import ARCHITECTURES, MIXED, split, write_random
from models.test_gguf import CONFIG, OTHERS as FAMILIES, cache  # noqa: F401  (a fixture for every test)

HUGE = (1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
MOST_BYTES, MOST_S = 300 << 20, 5.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    config = resized(CONFIG, num_layers=1, head_dim=64, rope=Rope(500000.0, "llama3", 32.0, 1.0, 4.0, 8192))
    return write_random(path, config, lambda name: "Q8_0" if "mlp" in name else "F16")


def refused(path: Path, dtype: str = "float32", ops: ReferenceOps | None = None) -> str | None:
    """The sentence of the refusal, None where the file is read. Raises for every other error, and for waste."""
    before_s = time.process_time()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        load_checkpoint(path, dtype=dtype, ops=ops, with_tokenizer=True)
    except UserError as error:
        return str(error)
    finally:
        assert time.process_time() - before_s < MOST_S
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024 < MOST_BYTES
    return None


def is_refused(path: Path, what: object, *how: Any) -> bool:
    """Whether it is refused, and then in a good sentence."""
    sentence = refused(path, *how)
    if sentence is not None:
        check_sentence(sentence, what)
    return sentence is not None


def check_sentence(sentence: str | None, what: object) -> None:
    assert sentence is not None, what
    assert len(sentence.splitlines()) == 1, sentence
    assert ": " in sentence, sentence  # what would help
    assert len(sentence) < 600


def numbers(path: Path) -> Iterator[tuple[int, str, str]]:
    """Where the header has a count, length, type, dimension or offset: its place, its format, what it is."""
    reader = gguf.GGUFReader(path)
    yield 4, "I", "version"
    yield 8, "Q", "tensors"
    yield 16, "Q", "keys"
    for field in reader.fields.values():
        if field.name.startswith("GGUF."):
            continue
        at = field.offset
        for i, part in enumerate(field.parts):
            is_value = i in field.data and field.types[0] != gguf.GGUFValueType.STRING
            if part.dtype.kind == "u" and part.nbytes in (4, 8) and i < 20 and not is_value:
                yield at, "I" if part.nbytes == 4 else "Q", f"{field.name} part {i}"
            at += part.nbytes
    for tensor in reader.tensors:
        at = tensor.field.offset
        for i, part in enumerate(tensor.field.parts):
            if i != 1:
                for j in range(part.size):
                    yield at + j * part.itemsize, "I" if part.itemsize == 4 else "Q", f"{tensor.name} part {i}"
            at += part.nbytes


def test_200_files_with_one_wrong_number(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    chance = random.Random(5)
    path = tmp_path / "broken.gguf"
    places = list(numbers(whole))
    assert len(places) > 100
    for i in range(200):
        at, kind, what = places[i % len(places)] if i < len(places) else chance.choice(places)
        (old,) = struct.unpack_from("<" + kind, data, at)
        # The next type of a value may be of the same size, so only counts, lengths and places are off by a little.
        new = chance.choice([*HUGE, old + 1, old + 3] if kind == "Q" else HUGE[:2])
        broken = bytearray(data)
        struct.pack_into("<" + kind, broken, at, new)
        path.write_bytes(broken)
        check_sentence(refused(path), (what, old, new))


def test_300_broken_pieces(whole: Path, tmp_path: Path) -> None:
    """A wrong number, key or end in one of three pieces, whichever of them is opened."""
    pieces = split(shutil.copy(whole, tmp_path / "a.gguf"), 5)
    good = [piece.read_bytes() for piece in pieces]
    chance = random.Random(17)
    assert refused(pieces[0]) is None
    places = [list(numbers(piece)) for piece in pieces]
    own = [  # where a piece says which one it is
        (at, form, key)
        for data in good
        for key, form in ((b"split.no", "H"), (b"split.count", "H"), (b"split.tensors.count", "i"))
        for at in (data.index(key) + len(key) + 4,)
    ]
    assert sum(map(len, places)) > 150
    for i in range(300):
        which = i % len(pieces)
        broken = bytearray(good[which])
        if i % 3 == 0:
            at, form, what = own[3 * which + i // 3 % 3]
            new = chance.choice((0, 1, 7, (1 << 15) - 1))
            new = new if new != struct.unpack_from("<" + form, broken, at)[0] else 9
            struct.pack_into("<" + form, broken, at, new)
        elif i % 3 == 1:
            at, form, what = chance.choice(places[which])
            struct.pack_into("<" + form, broken, at, chance.choice(HUGE if form == "Q" else HUGE[:2]))
        else:
            what = f"cut at {(end := chance.randrange(len(broken) - 32))}"
            del broken[end:]
        pieces[which].write_bytes(broken)
        sentence = refused(chance.choice(pieces))
        if what != b"split.tensors.count" or which == 0:  # which the first piece says for all
            check_sentence(sentence, (pieces[which].name, what))
        pieces[which].write_bytes(good[which])


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe"])
def test_numbers_of_families_with_states(tmp_path: Path, case: str) -> None:
    """Each count, length, dimension and value of the architecture in turn: it is understood, or refused."""
    path, config = tmp_path / "broken.gguf", FAMILIES[case]
    write_random(path, config)
    good, chance, num_refused = path.read_bytes(), random.Random(3), 0
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    values = [(sum(part.nbytes for part in field.parts[:i]) + field.offset, "I", field.name)
              for field in gguf.GGUFReader(path).fields.values() if field.name.startswith(f"{arch}.")
              for i in field.data if field.parts[i].nbytes == 4 * field.parts[i].size == 4]  # fmt: skip
    assert len(values) > 10
    places = [place for place in numbers(path) if place[2].startswith((f"{arch}.", "blk."))]
    for at, kind, what in [*values * 3, *chance.sample(places, 60)]:
        broken = bytearray(good)
        new = chance.choice([0, 1, 7, 513, *HUGE[:2]]) if kind == "I" else chance.choice(HUGE)
        struct.pack_into("<" + kind, broken, at, new)
        path.write_bytes(broken)
        num_refused += is_refused(path, (what, new))
    assert num_refused > 50


def test_files_that_end_too_early(whole: Path, tmp_path: Path) -> None:
    data, path = whole.read_bytes(), tmp_path / "short.gguf"
    for end in [*range(40), *(len(data) * i // 40 for i in range(40)), len(data) - 33]:
        path.write_bytes(data[:end])
        check_sentence(refused(path), end)
    needed = f"has {end:,} bytes and its tensors need {len(data):,}, as where a download was cut short"
    assert needed in str(refused(path))


def test_bytes_changed_at_random(whole: Path, tmp_path: Path) -> None:
    """Where a weight or a name of no meaning is changed the file is still one; nothing else may happen."""
    data = whole.read_bytes()
    chance = random.Random(11)
    path = tmp_path / "changed.gguf"
    header = gguf.GGUFReader(whole).data_offset
    num_refused = 0
    for _ in range(120):
        broken = bytearray(data)
        for _ in range(chance.choice((1, 4, 64))):
            broken[chance.randrange(header)] = chance.randrange(256)
        path.write_bytes(broken)
        num_refused += is_refused(path, path)
    assert num_refused > 50


@pytest.mark.skipif(native.isa() == "reference", reason="torch computes here")
def test_300_broken_files_of_types_with_tables(tmp_path: Path) -> None:
    """Bytes of headers and of blocks, types that change places, files cut short: read or refused in a sentence."""
    config = resized(CONFIG, num_layers=1, hidden_size=256, ffn_size=256, head_dim=16)
    whole = tmp_path / "whole.gguf"
    path = tmp_path / "broken.gguf"
    chance = random.Random(7)
    write_random(whole, config, lambda name: MIXED.get(name.split(".")[-2], "Q4_0"))
    data, reader = whole.read_bytes(), gguf.GGUFReader(whole)
    types = [tensor.field.offset + sum(p.nbytes for p in tensor.field.parts[:-2]) for tensor in reader.tensors]
    kinds = [int(gguf.GGMLQuantizationType[kind]) for kind in (*MIXED.values(), "Q8_K", "IQ2_XS")]
    num_refused = 0
    for i in range(300):
        broken = bytearray(data)
        if i % 3 == 0:
            struct.pack_into("<I", broken, chance.choice(types), chance.choice(kinds))
        elif i % 3 == 1:
            for _ in range(chance.choice((1, 16, 256))):
                broken[chance.randrange(reader.data_offset, len(data))] = chance.choice((0, 0x7F, 0xFC, 0xFF))
        else:
            for _ in range(chance.choice((1, 4))):
                broken[chance.randrange(reader.data_offset)] = chance.randrange(256)
            broken = broken[: chance.choice((len(data), len(data), chance.randrange(len(data))))]
        path.write_bytes(broken)
        num_refused += is_refused(path, i, "bfloat16", CpuOps())
    assert 150 < num_refused < 290


OTHERS = {
    "empty": (b"", "is empty: fetch it again"),
    "text": (b"GGML" * 10, "does not begin as a GGUF file does"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n", "run git lfs pull"),
    "page": (b"<!DOCTYPE html><html></html>" * 9, "is a web page and not the file"),
    "version": (b"GGUF\x01\0\0\0" + bytes(64), "of version 1, and forerun reads 2 and 3"),
    "big-endian": (b"GGUF\0\0\0\x03" + bytes(64), "is a big-endian GGUF file"),
    "zeros": (b"GGUF\x03\0\0\0" + bytes(64), "sets no UTF-8 text as general.architecture"),
    "keys": (
        b"GGUF\x03\0\0\0" + struct.pack("<QQ", 0, 1 << 60) + bytes(64),
        "claims to have 1,152,921,504,606,846,976 keys",
    ),
}


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


ARRAY = struct.Struct("<IQ")
HOSTILE = {
    "arrays in arrays": (entry(b"a", 9, ARRAY.pack(9, 1) * 10_000 + bytes(64)), "has items of type 9"),
    "a key twice": (entry(b"a", 8, text(b"")) * 2, "has the key 'a' twice"),
    "a name that is no text": (entry(b"\xff\xfe", 8, text(b"")) * 2, "is not one of printable ASCII characters"),
    "more items than bytes": (entry(b"a", 9, ARRAY.pack(8, 1 << 20)) + bytes(64), "claims to have 1,048,576 items"),
    "no such alignment": (entry(b"general.alignment", 4, struct.pack("<I", 0)) + entry(b"a", 8, text(b"")),
                          "sets general.alignment=0, which is no such power of two"),
    "an unknown type": (entry(b"a", 77, bytes(64)) * 2, "to a value of the unknown type 77"),
    "an architecture that is no text": (entry(b"general.architecture", 8, text(b"\xff")) + entry(b"a", 8, text(b"")),
                                        "sets no UTF-8 text as general.architecture"),
}  # fmt: skip


OTHERS |= {case: (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + body, words) for case, (body, words) in HOSTILE.items()}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_no_gguf_file(tmp_path: Path, case: str) -> None:
    data, words = OTHERS[case]
    (tmp_path / "a.gguf").write_bytes(data)
    sentence = refused(tmp_path / "a.gguf")
    check_sentence(sentence, case)
    assert words in str(sentence)


def test_tensors_in_one_place_and_names_that_come_twice(whole: Path, tmp_path: Path) -> None:
    data, tensors = whole.read_bytes(), gguf.GGUFReader(whole).tensors
    first, second = (sum(p.nbytes for p in t.field.parts[:-1]) + t.field.offset for t in tensors[:2])
    broken = bytearray(data)
    broken[second : second + 8] = broken[first : first + 8]
    (tmp_path / "a.gguf").write_bytes(broken)
    assert "in the same place: fetch it again" in str(refused(tmp_path / "a.gguf")).replace(")", "")
    (tmp_path / "b.gguf").write_bytes(data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"))
    assert "has the tensor 'blk.0.attn_k.weight' twice" in str(refused(tmp_path / "b.gguf"))


def test_a_file_that_may_not_be_read(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").symlink_to("/proc/self/mem")
    check_sentence(refused(tmp_path / "a.gguf"), "memory")
