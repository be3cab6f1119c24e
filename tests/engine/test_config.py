"""Options: aliases, precedence, and refusals that name the option, its value and what would work."""

import pytest

from forerun.config import EngineConfig
from forerun.errors import BadOption, NotFound
from forerun.types import SamplingParams


def test_aliases_of_other_engines_mean_the_same():
    plain = EngineConfig.make(draft="lookup", spec_length=3)
    assert EngineConfig.make(draft_model="lookup", num_speculative_tokens=3) == plain
    assert EngineConfig.make(speculative_config={"method": "lookup", "num_speculative_tokens": 3}) == plain
    assert EngineConfig.make(use_speculative_decoding=False).draft == "none"
    assert EngineConfig.make(draft=None).draft == "auto"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spec_lenght": 3}, "did you mean 'spec_length'"),
        ({"spec_length": 0}, "spec_length=0 is not possible: it must be in 1 .. 64"),
        ({"spec_length": "many"}, "spec_length='many' is not possible: it must be of type int"),
        ({"dtype": "int4"}, "auto, bfloat16, float32"),
        ({"quantization": "int8"}, "quantization='int8' is not available yet"),
        ({"draft": "lookup", "draft_model": "x/y"}, "drop one of them"),
        ({"draft": "lookup", "use_speculative_decoding": False}, "drop one of them"),
        ({"draft": "none", "use_speculative_decoding": True}, "drop one of them"),
        ({"speculative_config": {"eagle": 1}}, "there is no option 'eagle'"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(BadOption) as error:
        EngineConfig.make(**options)
    assert words in str(error.value)


def test_flag_beats_variable_beats_file_beats_default(tmp_path, monkeypatch):
    file = tmp_path / "forerun.toml"
    file.write_text("spec_length = 7\nmax_batch_size = 2\n")
    assert EngineConfig.from_sources({}, str(file)).spec_length == 7
    monkeypatch.setenv("FORERUN_SPEC_LENGTH", "8")
    config = EngineConfig.from_sources({}, str(file))
    assert (config.spec_length, config.max_batch_size) == (8, 2)
    assert EngineConfig.from_sources({"spec_length": 9, "draft": None}, str(file)).spec_length == 9
    with pytest.raises(NotFound, match=r"missing\.toml"):
        EngineConfig.from_sources({}, "missing.toml")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", 1e-6),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 1000),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", 21),
        ("stop", ("",)),
        ("logit_bias", {0: float("inf")}),
    ],
)
def test_sampling_parameters_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(BadOption) as error:
        SamplingParams(**{field: value})
    assert field in str(error.value)
