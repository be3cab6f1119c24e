"""What `auto` stands for: the shipped draft model, what a named model states, or what needs nothing."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from forerun import LLM
from forerun.drafters import BY_MODEL, WITHOUT_MODEL
from forerun.drafters.shared import artifacts, head_files
from forerun.engine.opened import SHIPPED_TARGET, auto_draft
from forerun.errors import BadOption
from forerun.models import named
from forerun.models.loading import load_checkpoint
from forerun.testing.engines import target_for
from methods import random_eagle
from tiny import write_tiny

pytestmark = pytest.mark.once("what auto is, whatever the speculation")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "target")


TINY = named.NamedModel("tiny-one", "random", "llama", 1, "bfloat16", "none", 1, "in these tests")


def name_it(monkeypatch: pytest.MonkeyPatch, **fields: str) -> None:
    """From here on `tiny-one` is the name of a model with these fields, which state what drafts for it."""
    monkeypatch.setattr(named, "named_models", lambda: {"tiny-one": replace(TINY, **fields)})


def test_without_more_it_is_the_shipped_draft_or_needs_nothing(folder: Path) -> None:
    assert auto_draft("shipped") == auto_draft(SHIPPED_TARGET) == BY_MODEL
    assert auto_draft(str(folder)) == auto_draft("org/name") == WITHOUT_MODEL


@pytest.mark.parametrize("by_name", [True, False])
def test_a_named_model_states_it(monkeypatch: pytest.MonkeyPatch, folder: Path, by_name: bool) -> None:
    """By its name and by its place; what a caller chooses comes first."""
    name_it(monkeypatch, folder=str(folder), auto="lookup:max_n=2")
    target = "tiny-one" if by_name else str(folder)
    assert LLM(target).engine.drafter.main == "lookup"
    assert LLM(target, draft="ngram").engine.drafter.main == "ngram"


def test_the_hub_knows_it_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    name_it(monkeypatch, hub="org/tiny-one", auto="lookup")
    assert auto_draft("org/tiny-one") == "lookup"
    assert auto_draft("org/tiny-two") == WITHOUT_MODEL


def test_the_hubs_weights_may_have_a_drafter_of_their_own(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A head pays beside weights of 16 bits, and may not beside a file of 4: docs/methods/eagle.md."""
    name_it(monkeypatch, folder=str(folder), hub="org/tiny", auto="ngram", hub_auto="lookup")
    assert auto_draft("tiny-one") == auto_draft(str(folder)) == "ngram"
    assert auto_draft("org/tiny") == "lookup"
    name_it(monkeypatch, hub="org/tiny", auto="ngram", hub_auto="lookup", wheel="no-such-wheel==1", file="no")
    assert auto_draft("tiny-one") == "lookup"


def head_of_another_width(target: Path, folder: Path) -> str:
    """A head whose small files fit the target, and whose rows do not."""
    loaded = load_checkpoint(target, with_tokenizer=True)
    tokenizer = loaded.text_tokenizer
    path = str(random_eagle(target_for(loaded.model, tokenizer), folder)["path"])
    config = {**head_files.read_config(path, "eagle"), "hidden_size": 2 * loaded.model.config.hidden_size}
    fingerprint = artifacts.fingerprint(tokenizer, tokenizer.num_ids)
    head_files.save(folder / "wide", "eagle", head_files.tensors(Path(path) / head_files.WEIGHTS), config, fingerprint)
    return f"eagle:path={folder / 'wide'}"


def test_what_cannot_serve_is_replaced_where_nobody_chose_it(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = head_of_another_width(folder, tmp_path / "heads")
    name_it(monkeypatch, folder=str(folder), auto=head)
    with caplog.at_level(logging.WARNING):
        assert LLM("tiny-one").generate([[5, 6, 7]])[0].report.draft == "suffix"
    assert "name a head of this target" in caplog.text
    with pytest.raises(BadOption, match="name a head of this target"):
        LLM("tiny-one", draft=head)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_loaded_target_is_what_it_was_opened_as(monkeypatch: pytest.MonkeyPatch, folder: Path, by_name: bool) -> None:
    """The caller names it when it is loaded; what the environment names is another target."""
    name_it(monkeypatch, folder=str(folder), auto="lookup")
    loaded = load_checkpoint("tiny-one" if by_name else folder)
    monkeypatch.setenv("FORERUN_TARGET", "shipped")
    assert LLM(loaded).opened.auto == "lookup"
    assert LLM(load_checkpoint(SHIPPED_TARGET, dtype="float32")).opened.auto == BY_MODEL
