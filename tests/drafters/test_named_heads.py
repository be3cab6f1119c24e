"""Heads are named as models are: by a folder, by a name of those that ship here, or by a hub id."""

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.drafters.shared import head_files
from forerun.errors import BadOption, NotFound, UnsupportedModel
from forerun.models.loading import load_checkpoint
from forerun.testing.engines import target_for
from methods import NEEDS
from models.hubserver import Client, HubServer, contents, serve
from tiny import write_tiny

METHODS = ("eagle", "medusa", "hydra", "dflash", "blockwise", "pass")
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random head of each method, called as the method."""
    folder = tmp_path_factory.mktemp("site") / head_files.PACKAGE
    folder.mkdir()
    found = load_checkpoint(target, with_tokenizer=True)
    known = target_for(found.model, found.tokenizer, found.end_ids)
    for method in METHODS:
        NEEDS[method](known, folder)
    return folder


@pytest.fixture
def shipped(heads: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(heads.parent)
    return heads


@pytest.mark.parametrize("method", METHODS)
def test_a_head_that_ships_is_found_by_its_name(target: Path, shipped: Path, method: str) -> None:
    """The folders of this test are called as the methods, so that each is found by `method:path=method`."""
    llm = LLM(str(target), draft=f"{method}:path={method}", spec_length=3, pacing="fixed", max_seq_len=64)
    (out,) = llm.generate([[5, 9, 40, 8]], GREEDY)
    assert out.report.num_drafted > 5
    other = METHODS[METHODS.index(method) - 1]
    with pytest.raises(BadOption, match=rf"is a head of '{other}' and not of {method}"):
        LLM(str(target), draft=f"{method}:path={other}")


def test_a_folder_of_that_name_comes_first_and_an_unknown_name_is_answered(
    target: Path, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert head_files.located("medusa", "medusa") == str(shipped / "medusa")
    with pytest.raises(NotFound, match=r"^there is no head 'medsa' \(did you mean medusa\?\): .*, eagle, .*\)$"):
        LLM(str(target), draft="medusa:path=medsa")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "medusa").mkdir()
    with pytest.raises(NotFound, match=r"^'medusa' is no folder with config.json"):
        LLM(str(target), draft="medusa:path=medusa")
    shutil.copytree(shipped / "medusa", tmp_path / "medusa", dirs_exist_ok=True)
    assert head_files.located("medusa", "medusa") == "medusa"


@pytest.mark.parametrize("method", METHODS)
def test_without_a_name_it_says_what_to_do(target: Path, method: str) -> None:
    with pytest.raises(BadOption, match=rf"^{method} needs a head .*train drafter --method {method} .* or hub id$"):
        LLM(str(target), draft=method)


def test_what_of_a_repository_is_a_head() -> None:
    """Names of files alone decide, before anything is fetched."""

    def wanted(*names: str) -> list[str]:
        return head_files._wanted("eagle", names, "org/head")

    assert wanted("README.md", "config.json", "model.safetensors", "pytorch_model.bin") == ["model.safetensors"]
    assert wanted("config.json", "model.safetensors", "medusa_lm_head.safetensors") == ["medusa_lm_head.safetensors"]
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert wanted("config.json", *reversed(shards)) == shards
    with pytest.raises(UnsupportedModel, match=r"in medusa_lm_head.pt only, which is a pickle .*convert-head FOLDER"):
        wanted("config.json", "medusa_lm_head.pt")
    with pytest.raises(NotFound, match=r"org/head holds no config.json, and is no head: name a folder"):
        wanted("model.safetensors")
    with pytest.raises(NotFound, match=r"org/head holds no model.safetensors"):
        wanted("config.json", "README.md")


# --------------------------------------------------------------------------------------------------------- of the hub


@pytest.fixture
def hub() -> Iterator[HubServer]:
    yield from serve()


def test_a_head_of_the_hub(hub: HubServer, target: Path, heads: Path, tmp_path: Path) -> None:
    """Two processes, the second without a network; the texts are those of the same head in a folder."""
    client = Client(hub, tmp_path)
    files = contents(heads / "hydra")
    hub.publish("org/hydra", files | {"README.md": b"a", "optimizer.pt": b"b"})
    hub.publish("org/pickle", {"config.json": files["config.json"], "pytorch_model.bin": pickle.dumps({})})
    hub.publish("org/model", target)

    def generate(head: str) -> list[str]:
        return ["generate", "ab ab", f"--target={target}", f"--draft={head}", "--max-tokens=6", "--temperature=0"]

    named = (heads / "hydra", "org/hydra", "org/pickle", "org/no", "org/model")
    folder, found, pickled, none, other = client.foreruns(*(generate(f"hydra:path={name}") for name in named))
    assert (found["code"], found["out"]) == (0, folder["out"])
    assert sorted(name for name in hub.fetched() if name != "tokenizer.json") == [
        *["config.json"] * 2,  # of org/hydra and of org/model, which is refused by what it says
        *["model.safetensors"] * 2,
    ]
    assert pickled["code"] == none["code"] == other["code"] == 2
    assert "org/pickle has weights in pytorch_model.bin only, which is a pickle" in pickled["err"]
    assert "`hf download org/pickle --local-dir FOLDER`" in pickled["err"]
    assert "there is no model org/no on " in none["err"]
    assert "is no head that hydra reads" in other["err"]
    assert all(said["err"].count("\n") == 1 for said in (pickled, none, other))
    hub.stop()
    (again,) = client.foreruns(generate("hydra:path=org/hydra@main"))
    assert (again["code"], again["out"]) == (0, folder["out"])
