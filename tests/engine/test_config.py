"""Options: aliases, precedence, and refusals that name the option, its value and what would work."""

import copy
import dataclasses
import os
import pickle
from types import SimpleNamespace

import numpy
import pytest

from forerun import drafters
from forerun.config import EngineConfig
from forerun.errors import BadOption, NotFound
from forerun.types import SamplingParams


def test_aliases_of_other_engines_mean_the_same():
    plain = EngineConfig.make(draft="lookup", spec_length=3)
    assert EngineConfig.make(draft_model="lookup", num_speculative_tokens=3) == plain
    assert EngineConfig.make(speculative_config={"method": "lookup", "num_speculative_tokens": 3}) == plain
    assert EngineConfig.make(use_speculative_decoding=False).draft == "none"
    assert EngineConfig.make(draft=None).draft == "auto"
    assert EngineConfig.make(draft_model=None, num_speculative_tokens=None, speculative_config=None) == EngineConfig()
    assert EngineConfig.make(use_speculative_decoding=None) == EngineConfig.make(use_speculative_decoding=True)
    assert EngineConfig.make(speculative_config={"method": "draft_model", "model": "./d"}).draft == "./d"
    assert EngineConfig.make(speculative_config={"method": "ngram"}).draft == "ngram"
    assert EngineConfig.make(spec_length=numpy.int64(3)).spec_length == 3
    assert EngineConfig.make(max_seq_len=None).max_seq_len is None


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
        ({"speculative_config": "lookup"}, "speculative_config='lookup' is not possible: it must be a dictionary"),
        ({"speculative_config": {"method": "lookup", "model": "x"}}, "drop one of them"),
        ({"use_speculative_decoding": "no"}, "use_speculative_decoding='no' is not possible"),
        ({"use_speculative_decoding": 0}, "use_speculative_decoding=0 is not possible"),
        ({"spec_length": None}, "spec_length=None is not possible"),
        ({"max_batch_size": True}, "max_batch_size=True is not possible"),
        ({"draft": 3}, "draft=3 is not possible"),
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


@pytest.fixture
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("FORERUN_"):
            monkeypatch.delenv(name)


def merged(tmp_path, toml, **flags):
    file = tmp_path / "forerun.toml"
    file.write_text(toml)
    return EngineConfig.from_sources(flags, str(file))


@pytest.mark.usefixtures("no_variables")
def test_aliases_are_resolved_within_their_source(tmp_path, monkeypatch):
    assert merged(tmp_path, "num_speculative_tokens = 3", spec_length=5).spec_length == 5
    assert merged(tmp_path, "spec_length = 3", num_speculative_tokens=5).spec_length == 5
    assert merged(tmp_path, "use_speculative_decoding = false").draft == "none"
    assert merged(tmp_path, "use_speculative_decoding = false", draft="lookup").draft == "lookup"
    with pytest.raises(BadOption, match="drop one of them"):
        merged(tmp_path, "num_speculative_tokens = 3\nspec_length = 4", spec_length=5)
    monkeypatch.setenv("FORERUN_NUM_SPECULATIVE_TOKENS", "4")
    monkeypatch.setenv("FORERUN_USE_SPECULATIVE_DECODING", "1")
    config = merged(tmp_path, "spec_length = 3\ndraft = 'none'")
    assert (config.spec_length, config.draft) == (4, "auto")
    assert merged(tmp_path, "draft = 'lookup'").draft == "lookup"
    assert merged(tmp_path, "", draft="none").draft == "none"
    monkeypatch.setenv("FORERUN_USE_SPECULATIVE_DECODING", "False")
    monkeypatch.setenv("FORERUN_DRAFT_MODEL", "lookup")
    with pytest.raises(BadOption, match="drop one of them"):
        merged(tmp_path, "")


@pytest.mark.usefixtures("no_variables")
def test_variables_name_options_or_the_config_file(tmp_path, monkeypatch):
    file = tmp_path / "forerun.toml"
    file.write_text("spec_length = 7\n")
    monkeypatch.setenv("FORERUN_CONFIG", str(file))
    assert EngineConfig.from_sources({}).spec_length == 7
    monkeypatch.setenv("FORERUN_SPEC_LENGHT", "7")
    with pytest.raises(BadOption, match=r"FORERUN_SPEC_LENGHT.*did you mean 'FORERUN_SPEC_LENGTH'"):
        EngineConfig.from_sources({})


@pytest.mark.usefixtures("no_variables")
def test_a_config_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(BadOption, match="cannot be read"):
        EngineConfig.from_sources({}, str(tmp_path))
    (tmp_path / "latin.toml").write_bytes(b"draft = '\xe9'")
    with pytest.raises(BadOption, match="is not valid TOML"):
        EngineConfig.from_sources({}, str(tmp_path / "latin.toml"))


def test_a_folder_with_a_colon_in_its_name_is_a_draft_model(tmp_path):
    (tmp_path / "m:1b").mkdir()
    model = SimpleNamespace(dtype="auto", device="cpu", ops=None)
    target = SimpleNamespace(model=model, tokenizer=None, loaded_draft=None, shipped_draft=None)
    with pytest.raises(NotFound, match="m:1b"):  # it was looked into, and it is empty
        drafters.make(str(tmp_path / "m:1b"), target)


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
        ("logit_bias", {"5": 1}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", [5]),
        ("max_tokens", "64"),
        ("max_tokens", 10.5),
        ("max_tokens", True),
        ("min_tokens", None),
        ("top_k", 5.5),
        ("seed", 1.5),
        ("logprobs", 2.5),
        ("logprobs", True),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", float("inf")),
        ("repetition_penalty", float("inf")),
        ("stop", ["a", 3]),
        ("stop", "\ud800"),
        ("bad_words", 3),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [-1]),
        ("ignore_eos", 1),
        ("acceptance", 3),
    ],
)
def test_sampling_parameters_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(BadOption) as error:
        SamplingParams(**{field: value})
    assert str(error.value).startswith(f"{field}=")


def test_sampling_parameters_become_plain_values():
    none = SamplingParams(stop=None, bad_words=None, stop_token_ids=None)
    assert none == SamplingParams()
    given = SamplingParams(
        max_tokens=numpy.int64(9),
        temperature=numpy.float32(0.5),
        stop="a",
        stop_token_ids=numpy.array([3, 4]),
        logit_bias={numpy.int32(3): 1},
    )
    assert (given.stop, given.stop_token_ids, given.logit_bias) == (("a",), (3, 4), {3: 1.0})
    assert (type(given.max_tokens), type(given.temperature), type(given.stop_token_ids[0])) == (int, float, int)


def test_a_name_of_another_engine_is_answered_with_ours():
    with pytest.raises(BadOption, match="max_new_tokens is max_tokens here"):
        SamplingParams(max_new_tokens=5)
    with pytest.raises(BadOption, match="num_beams has no counterpart here"):
        SamplingParams(temperature=0.5, num_beams=4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        SamplingParams(nonsense=1)
    params = SamplingParams(temperature=0.5, stop="x")
    for same in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert same == params
