"""Heads that `forerun train head --keep` keeps, and that ship: `auto` finds those of its target, and no others."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LLM, SamplingParams, native
from forerun.blocks import Plain, weight_shapes
from forerun.config import EngineConfig
from forerun.drafters import WITHOUT_MODEL
from forerun.drafters.shared import head_files, trained
from forerun.engine.opened import Opened
from forerun.errors import CapacityError
from forerun.models.opened import OpenedCheckpoint
from models.gguf_files import write_model
from tiny import write_tiny
from train.conftest import run_command
from train.written import write, writer_of

GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def cache(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a head that was trained for the target."""
    folder = tmp_path_factory.mktemp("cache")
    write(writer_of(target, ops="reference"), folder / "samples", 1500)
    train(target, folder, "eagle:draft_vocab=200,steps=2")
    return folder


@pytest.fixture(autouse=True)
def in_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(cache / "kept"))
    return iter(())


def train(target: Path, folder: Path, method: str) -> str:
    """Train a head for two steps and keep it; returns what the command said."""
    options = f"--samples {folder / 'samples'} --target {target} --out {folder / 'run'} --keep --quiet"
    sizes = "--max-steps 2 --tokens-per-step 128 --seq-len-tokens 64 --ops reference"
    shutil.rmtree(folder / "run", ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORERUN_CACHE_DIR", str(folder / "kept"))
        return run_command(f"head --method {method} {options} {sizes}")


def auto_of(target: Path, **options: Any) -> str:
    return Opened.of(EngineConfig(target=str(target), **options)).auto


def place_of(spec: str | None) -> Path:
    """The folder of the head in a spec."""
    return Path(str(spec).partition(":path=")[2].removesuffix(")"))


def test_auto_drafts_with_the_head_of_its_target(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = trained.find(OpenedCheckpoint.of(target))
    assert spec == f"mixed:of=({WITHOUT_MODEL})+(eagle:path={place_of(spec)})"
    weighing = f"eagle:path={place_of(spec)}"
    is_native = native.extension() is not None
    assert auto_of(target) == (weighing if is_native else spec), "it searches the text, too, and tells its confidence"
    for elsewhere in ({"ops": "reference"}, {"pacing": "fixed"}, {"spec_length": 3}):
        assert auto_of(target, **elsewhere) == spec, elsewhere
    with LLM(target) as drafting, LLM(target, draft="none") as plain:
        (out,), (wanted,) = drafting.generate("def f(", GREEDY), plain.generate("def f(", GREEDY)
    assert out.report.num_drafted > 0
    assert out.token_ids == wanted.token_ids
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    assert auto_of(target) == WITHOUT_MODEL


def test_it_is_found_for_the_same_model_in_any_place_and_number_of_bits(target: Path, tmp_path: Path) -> None:
    assert auto_of(shutil.copytree(target, tmp_path / "copy")) == auto_of(target) != WITHOUT_MODEL
    spec = Plain("llama", 258, 64, 2, 4, 2, 16, 96, 1e-5, 256).spec
    weights = {name: torch.rand(shape) for name, shape in weight_shapes(spec).items()}
    for bits in ("F32", "Q8_0", "Q4_0"):
        write_model(tmp_path / f"{bits}.gguf", spec, weights, lambda name, bits=bits: bits)  # type: ignore[misc]
    assert len({OpenedCheckpoint.of(tmp_path / f"{bits}.gguf").fingerprint for bits in ("F32", "Q8_0", "Q4_0")}) == 1
    weights["model.layers.0.input_layernorm.weight"][3] *= 2
    write_model(tmp_path / "other.gguf", spec, weights)
    other, own = (OpenedCheckpoint.of(tmp_path / name).fingerprint for name in ("other.gguf", "F32.gguf"))
    assert other != own


def test_it_is_not_found_for_another_model(target: Path, tmp_path: Path) -> None:
    assert auto_of(write_tiny(tmp_path / "other", seed=1)) != auto_of(target)  # norms of the two differ
    changed = shutil.copytree(target, tmp_path / "changed")
    weights = load_file(changed / "model.safetensors")
    norm = "model.layers.1.input_layernorm.weight"
    weights[norm] = weights[norm] * torch.linspace(1, 1.5, len(weights[norm]))
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    assert auto_of(changed) == WITHOUT_MODEL


@pytest.mark.skipif(native.extension() is None, reason="elsewhere the text is searched first")
def test_a_head_that_ships_is_found_for_its_target(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pip install ./heads` puts it into the environment. One that was kept comes first."""
    kept = place_of(auto_of(target))
    ships = shutil.copytree(kept, tmp_path / "site" / head_files.PACKAGE / "tiny")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert head_files.shipped_folders()["tiny"] == ships
    assert place_of(auto_of(target)) == kept
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache" / trained.ROOM).mkdir(parents=True)
    assert place_of(auto_of(target)) == ships
    assert auto_of(write_tiny(tmp_path / "other", seed=1)) == WITHOUT_MODEL
    assert LLM(target, draft="eagle:path=tiny").generate("def f(", GREEDY)[0].report.num_drafted > 0


def test_what_is_kept_last_counts(target: Path, cache: Path) -> None:
    before = auto_of(target)
    try:
        said = train(target, cache, "medusa:draft_vocab=200,heads=2")
        assert "+(medusa:path=" in auto_of(target)
        assert place_of(auto_of(target)) == place_of(before)
        assert "draft=auto uses it for model" in " ".join(said.split())
    finally:
        train(target, cache, "eagle:draft_vocab=200,steps=2")
    assert auto_of(target) == before
    assert [path.name for path in (cache / "kept" / trained.ROOM).iterdir()] == [place_of(before).name]


def test_a_broken_head_is_left_alone(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = place_of(auto_of(target))
    weights = (folder / "model.safetensors").read_bytes()
    try:
        (folder / "model.safetensors").write_bytes(weights[:100])
        assert auto_of(target) == WITHOUT_MODEL
        assert "was found for the target, and cannot draft for it" in caplog.text
        text = (folder / "config.json").read_text(encoding="utf-8")
        (folder / "config.json").write_text("{", encoding="utf-8")
        assert auto_of(target) == WITHOUT_MODEL
        (folder / "config.json").write_text(text, encoding="utf-8")
    finally:
        (folder / "model.safetensors").write_bytes(weights)
    assert "eagle:path=" in auto_of(target)


def test_a_folder_that_cannot_be_written_is_said(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(CapacityError, match=r"the head cannot be kept in .*: set FORERUN_CACHE_DIR"):
        trained.keep(OpenedCheckpoint.of(target), tmp_path)
