"""Our reading of safetensors files against the library's: the same tensors, and what it refuses is refused."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from forerun.errors import UnsupportedModel, UserError
from forerun.host_tensor import Floats
from forerun.models.open_file import OpenFile
from forerun.models.safetensors_file import read_header
from forerun.models.source.safetensors import SafetensorsFolder

TENSORS = {"a.weight": torch.randn(7, 5), "b.weight": torch.randn(3, 4).bfloat16(), "empty": torch.zeros(0, 4),
           "one": torch.randn(1).half()}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def refused_by_the_library(file: Path) -> bool:
    try:
        with safe_open(file, framework="pt") as opened:
            return not opened.keys()
    except (SafetensorError, OSError):
        return True


def read(folder: Path) -> dict[str, Floats]:
    source = SafetensorsFolder(folder)
    try:
        return {
            name: np.concatenate(
                [np.empty(0, np.float32), *(own.float32().ravel() for own in source.blocks(name))]
            ).reshape(stored.shape)
            for name, stored in source.tensors.items()
        }
    finally:
        source.close()


def test_the_same_tensors(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    found = read(folder)
    assert found.keys() == whole.keys()
    assert all(np.array_equal(found[name], whole[name].float().numpy()) for name in whole)


def test_what_the_library_refuses_is_refused(folder: Path) -> None:
    """Any bit of the length and of the header turned, and the file cut anywhere."""
    file = folder / "model.safetensors"
    right, rng = file.read_bytes(), random.Random(0)
    end = 8 + int.from_bytes(right[:8], "little")
    changed = [right[:num] for num in rng.sample(range(len(right)), 40)]
    for _ in range(400):
        at, bit = rng.randrange(end), 1 << rng.randrange(8)
        changed.append(right[:at] + bytes([right[at] ^ bit]) + right[at + 1 :])
    refused = 0
    for data in (*changed, right + b"\0", b""):
        file.write_bytes(data)
        if refused_by_the_library(file):
            refused += 1
            with pytest.raises(UserError):
                read(folder)
    assert refused > 300


def at_the_beginning(right: bytes, name: str) -> bytes:
    """The file with one tensor where another one begins: it is no shorter for that."""
    end = 8 + int.from_bytes(right[:8], "little")
    header = json.loads(right[8:end])
    first, last = header[name]["data_offsets"]
    assert first > 0
    header[name]["data_offsets"] = [0, last - first]
    data = json.dumps(header).encode()
    return len(data).to_bytes(8, "little") + data + right[end:]


def test_the_reason_is_said(folder: Path) -> None:
    file = folder / "model.safetensors"
    right = file.read_bytes()
    for data, why in (
        (right[:-4], "as where a download was cut short"),
        (right[:20], "it ends within its header"),
        (at_the_beginning(right, "b.weight"), "does not begin where the tensor before it ends"),
        (right.replace(b"[7,5]", b"[7,6]"), r"a tensor of shape \[7, 6\] and type F32 has 140 bytes"),
    ):
        file.write_bytes(data)
        with pytest.raises(UnsupportedModel, match=rf"is not a readable safetensors file \(.*{why}"):
            read(folder)


def test_a_type_that_is_not_read_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    """As the library does, which lists it; a tensor that nobody wants may have any type."""
    file = tmp_path / "odd.safetensors"
    save_file({"odd": torch.zeros(2).to(torch.float8_e5m2), "even": torch.ones(3)}, file)
    entries = read_header(OpenFile(file))
    assert entries["even"].whole().float32().tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(UnsupportedModel, match="type F8_E5M2, which is not read here"):
        entries["odd"].whole()
