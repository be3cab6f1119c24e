"""Which drafters an engine could be started with as well: the menu of `forerun lab`."""

from dataclasses import replace

import pytest

from forerun import LLM, BadOption, EngineConfig
from forerun.drafters import wanted
from forerun.engine import fitting
from forerun.engine.fitting import usable_drafts
from forerun.engine.opened import Opened
from forerun.models.toy import ToyModel
from forerun.registry import names
from forerun.testing.engines import target_for

pytestmark = pytest.mark.once("about what can be built, not about drafts")

CONFIG = EngineConfig(target="shipped", max_batch_size=2, max_seq_len=256)


def test_all_of_them_can_be_had() -> None:
    """Of the shipped model: an engine starts with all; each of the others is named already, or refused."""
    found = usable_drafts(Opened.of(CONFIG))
    assert set(LLM.from_config(replace(CONFIG, extra_drafts=";".join(found))).drafters) == {"model", *found}
    refused = set(names("forerun.drafters")) - {"model", *found}
    assert refused
    for method in refused:
        with pytest.raises(BadOption):
            LLM.from_config(replace(CONFIG, extra_drafts=method))


def test_without_memory_they_have_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = usable_drafts(Opened.of(CONFIG))
    monkeypatch.setattr(fitting, "available_bytes", lambda device: 1)
    left = usable_drafts(Opened.of(CONFIG))
    assert {"lookup", "suffix", "recycle"} <= set(left) < set(everything)
    known = target_for(ToyModel(100, seed=0)).opened
    assert not any(own.needs.has_model for method in left for own in wanted(method, known))
