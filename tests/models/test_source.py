"""Another file format is one file: here an archive, written beside the tests, that holds everything a model needs."""

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from forerun import LLM, SamplingParams
from forerun.errors import NotFound, UnsupportedModel
from forerun.models import source
from forerun.models.source import open_source
from refusals import refusal
from tiny import write_tiny

FORMAT = """
import json, tempfile, zipfile
from functools import cached_property
from pathlib import Path
import numpy as np
from forerun.host_tensor import HostTensor
from forerun.models.source import Stored
from forerun.text.json_files import read_json

def recognises(path):
    return path.suffix == ".archive"

class Archive:
    names = None

    def __init__(self, path):
        self.path, self._small = path, tempfile.TemporaryDirectory(prefix="archive-")
        self.folder = Path(self._small.name)
        with zipfile.ZipFile(path) as file:
            for name in file.namelist():
                if name.endswith(".json"):
                    file.extract(name, self.folder)
        self.config = read_json(self.folder / "config.json")

    @cached_property
    def tensors(self):
        shapes = read_json(self.folder / "shapes.json")
        return {name: Stored(self.path, tuple(shape), "float32") for name, shape in shapes.items()}

    def check(self, with_tokenizer):
        pass

    def close(self):
        pass

    def blocks(self, name):
        with zipfile.ZipFile(self.path) as file:
            yield HostTensor.of(np.frombuffer(file.read(name), np.float32).reshape(self.tensors[name].shape))

open_source = Archive
"""


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The format is found where the others are."""
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats" / "archive.py").write_text(FORMAT, encoding="utf-8")
    monkeypatch.setattr(source, "__path__", [*source.__path__, str(tmp_path / "formats")])
    yield
    sys.modules.pop("forerun.models.source.archive", None)


@pytest.mark.usefixtures("archives")
@pytest.mark.parametrize("ops", ["auto", "reference"])
def test_a_format_is_one_file(tmp_path: Path, ops: str) -> None:
    folder = write_tiny(tmp_path / "tiny")
    archive = tmp_path / "tiny.archive"
    weights = load_file(folder / "model.safetensors")
    with zipfile.ZipFile(archive, "w") as file:
        for path in folder.glob("*.json"):
            file.write(path, path.name)
        file.writestr("shapes.json", json.dumps({name: list(weight.shape) for name, weight in weights.items()}))
        for name, weight in weights.items():
            file.writestr(name, weight.float().numpy().tobytes())
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    made = [LLM(path, draft="none", ops=ops, dtype="bfloat16") for path in (folder, archive)]
    first, second = ([out.token_ids for out in llm.generate(["abc"], params)] for llm in made)
    assert first == second
    assert made[1].checkpoint.name == "tiny.archive"
    found = {name: stored.dtype for name, stored in open_source(archive).tensors.items()}
    assert found == dict.fromkeys(weights, "float32")


def test_a_path_that_no_format_recognises(tmp_path: Path) -> None:
    (tmp_path / "tiny.archive").write_bytes(b"")
    assert "tiny.archive is a file that holds no model" in refusal(NotFound, open_source, tmp_path / "tiny.archive")
    assert "there is no config.json in" in refusal(NotFound, open_source, tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"only: name one such file, as .*model\.gguf"):
        open_source(tmp_path)
