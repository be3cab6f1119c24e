"""Options: aliases, precedence, and refusals that name the option, its value and what would work."""

import copy
import dataclasses
import os
import pickle
import re

import numpy
import pytest
import torch

from forerun import drafters, registry
from forerun.config import EngineConfig
from forerun.engine.opened import Opened, torch_device
from forerun.errors import BadOption, NotFound
from forerun.models.opened import OpenedCheckpoint
from forerun.models.toy import ToyModel
from forerun.registry import by_value, peer_values
from forerun.testing.engines import target_for
from forerun.types import SamplingParams
from refusals import refusal

pytestmark = pytest.mark.once("no engine runs: options alone")


def test_aliases_of_other_engines_mean_the_same():
    plain = EngineConfig.make(draft="lookup", spec_length=3)
    assert EngineConfig.make(draft_model="lookup", num_speculative_tokens=3) == plain
    assert EngineConfig.make(speculative_config={"method": "lookup", "num_speculative_tokens": 3}) == plain
    assert EngineConfig.make(use_speculative_decoding=False).draft == "none"
    assert EngineConfig.make(draft=None).draft == "auto"
    assert EngineConfig.make(draft_model=None, num_speculative_tokens=None, speculative_config=None) == EngineConfig()
    assert EngineConfig.make(use_speculative_decoding=None) == EngineConfig()
    assert EngineConfig.make(batching_mode="continuous", use_cuda_graphs=False) == EngineConfig()
    assert EngineConfig.make(use_speculative_decoding=True, draft="auto") == EngineConfig()
    assert EngineConfig.make(speculative_config={"method": "draft_model", "model": "./d"}).draft == "./d"
    assert EngineConfig.make(speculative_config={"method": "eagle3", "model": "./h"}).draft == "eagle:path=./h"
    assert EngineConfig.make(speculative_config={"method": "medusa", "model": "./h"}).draft == "medusa:path=./h"
    assert EngineConfig.make(spec_length=numpy.int64(3)).spec_length == 3
    assert EngineConfig.make(max_seq_len=None).max_seq_len is None


@pytest.mark.parametrize(
    ("given", "draft", "lengths"),
    [
        ({"method": "ngram"}, "lookup", (3, 1)),
        ({"model": "ngram"}, "lookup", (3, 1)),
        ({"model": "[ngram]", "method": "ngram"}, "lookup", (3, 1)),
        ({"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}, "lookup:max_n=4,min_n=2", (4, 2)),
        ({"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": None}, "lookup:max_n=4", (4, 1)),
        ({"method": "ngram", "prompt_lookup_min": 5}, "lookup:max_n=5,min_n=5", (5, 5)),
        ({"method": "lookup", "prompt_lookup_max": 6}, "lookup:max_n=6", (6, 1)),
    ],
)
def test_ngrams_of_speculative_config_are_lookup(given, draft, lengths):
    config = EngineConfig.make(speculative_config={**given, "num_speculative_tokens": 3})
    assert config == EngineConfig.make(draft=draft, spec_length=3)
    name, options = drafters.resolve(config.draft, drafters.BY_MODEL)
    assert (name, options.max_n, options.min_n) == ("lookup", *lengths)


def test_suffix_decoding_of_speculative_config_is_suffix():
    given = {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_min_token_prob": 0.2}
    assert EngineConfig.make(speculative_config={"method": "suffix"}) == EngineConfig.make(draft="suffix")
    config = EngineConfig.make(speculative_config={**given, "suffix_decoding_max_cached_requests": 7})
    _, options = drafters.resolve(config.draft, drafters.BY_MODEL)
    assert (options.max_spec_factor, options.min_token_prob, options.max_cached_requests) == (2.0, 0.2, 7)
    with pytest.raises(BadOption, match='draft="suffix:max_match=N"'):
        EngineConfig.make(speculative_config={**given, "suffix_decoding_max_tree_depth": 24})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("[ngram]", "what looks up n-grams is lookup here, with options as in lookup:max_n=3"),
        ("ngram-simple:max_n=4", "what looks up n-grams is lookup here"),
        ("PROMPT_LOOKUP", "is lookup here"),
        ("16", "llama.cpp's number of tokens is spec_length here (--spec-length 16)"),
        ("draft_model", "name the draft model itself, by its folder or hub id"),
        ("pard", "there is no such drafter yet, and forerun drafters lists those there are"),
        ("mlp_speculator", "there is no such drafter yet, and forerun drafters lists those there are"),
        *[(name, "is mtp here, and auto where there is one") for name in ("qwen3_next_mtp", "draft-nextn")],
        *[(name, "write dflash:path=FOLDER") for name in ("DFLASH", "draft-dflash", "Hydra")],
        *[(name, "write eagle:path=FOLDER") for name in ("eagle3", "EAGLE", "MEDUSA", "draft-eagle3")],
    ],
)
def test_a_drafter_of_another_engine_is_answered(spec, words):
    said = refusal(BadOption, drafters.resolve, spec)
    name = spec.partition(":")[0]
    assert said.startswith(f"draft={name!r} is not possible: ")
    assert words in said


def test_a_folder_may_have_the_name_of_such_a_drafter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("[ngram]", "16"):
        (tmp_path / name).mkdir()
        assert drafters.resolve(name)[1].path == name


def test_no_value_that_works_here_is_answered_as_a_peers():
    works = {
        "draft": ["auto", "elsewhere", *registry.names("forerun.drafters")],
        "dtype": ["auto", "float32", "bfloat16"],
        "generation_config": ["auto", "model", "none"],
        "quantization": ["int8", "int4", "int4:group=128"],
    }
    assert set(works) == {option for option, _, _ in peer_values()}
    assert [value for option, values in works.items() for value in values if by_value(option, value)] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spec_lenght": 3}, "did you mean 'spec_length'"),
        ({"spec_length": 0}, "spec_length=0 is not possible: it must be in 1 .. 64"),
        ({"spec_length": "many"}, "spec_length='many' is not possible: it must be a whole number"),
        ({"dtype": "int4"}, "auto, bfloat16, float32"),
        ({"dtype": "bf16"}, "dtype='bf16' is not possible: write bfloat16"),
        ({"dtype": "fp32"}, "dtype='fp32' is not possible: write float32"),
        ({"dtype": "float16"}, "dtype='float16' is not possible: weights stored in float16 are read and computed in"),
        ({"dtype": "half"}, "dtype='half' is not possible: weights stored in float16 are read and computed in"),
        ({"generation_config": "vllm"}, "generation_config='vllm' is not possible: vLLM's vllm is none here"),
        ({"generation_config": "./folder"}, "generation_config='./folder' is not possible"),
        ({"speculative_config": {"method": "pard", "model": "x"}}, "draft='pard' is not possible: there is no such"),
        ({"speculative_config": {"model": "x", "prompt_lookup_max": 4}}, 'prompt_lookup_max is draft="lookup:max_n=N"'),
        ({"speculative_config": {"method": "ngram", "model": "x"}}, "drop one of them"),
        ({"quantization": "int2"}, "quantization='int2' is not possible: write int8 or int4"),
        ({"quantization": "awq_marlin"}, "quantization='awq_marlin' is not possible: such files are known by what"),
        ({"draft": "lookup", "draft_model": "x/y"}, "drop one of them"),
        ({"draft": "lookup", "use_speculative_decoding": False}, "drop one of them"),
        ({"draft": "none", "use_speculative_decoding": True}, "drop one of them"),
        ({"speculative_config": {"eagle": 1}}, "there is no option 'eagle'"),
        ({"speculative_config": "lookup"}, "speculative_config='lookup' is not possible: it must be a dictionary"),
        ({"speculative_config": {"method": "lookup", "model": "x"}}, "drop one of them"),
        ({"use_speculative_decoding": True}, "use_speculative_decoding=True needs a draft: name one"),
        ({"use_speculative_decoding": "no"}, "use_speculative_decoding='no' is not possible"),
        ({"use_speculative_decoding": 0}, "use_speculative_decoding=0 is not possible"),
        ({"max_batch_size": True}, "max_batch_size=True is not possible"),
        (
            {"max_num_batched_tokens": 7},
            "max_num_batched_tokens=7 is not possible: it must be at least max_batch_size=8",
        ),
        ({"draft": 3}, "draft=3 is not possible"),
        (
            {"temperature": 0},
            "temperature=0 is no option of the engine: give it with each request: in SamplingParams, by --temperature,",
        ),
    ],
)
def test_refusals(options, words):
    assert words in refusal(BadOption, EngineConfig.make, **options)


def merged(tmp_path, toml, **flags):
    file = tmp_path / "forerun.toml"
    file.write_text(toml)
    return EngineConfig.from_sources(flags, str(file))


def test_flag_beats_variable_beats_file_beats_default(tmp_path, monkeypatch):
    toml = "spec_length = 7\nmax_batch_size = 2\n"
    assert merged(tmp_path, toml).spec_length == 7
    monkeypatch.setenv("FORERUN_SPEC_LENGTH", "8")
    config = merged(tmp_path, toml)
    assert (config.spec_length, config.max_batch_size) == (8, 2)
    assert merged(tmp_path, toml, spec_length=9, draft=None).spec_length == 9
    assert "missing.toml" in refusal(NotFound, EngineConfig.from_sources, {}, "missing.toml")


@pytest.fixture
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("FORERUN_"):
            monkeypatch.delenv(name)


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
    assert "needs a draft" in refusal(BadOption, merged, tmp_path, "spec_length = 3\ndraft = 'none'")
    config = merged(tmp_path, "spec_length = 3\ndraft = 'none'", draft="auto")
    assert (config.spec_length, config.draft) == (4, "auto")
    assert merged(tmp_path, "draft = 'lookup'").draft == "lookup"
    assert merged(tmp_path, "", draft="none").draft == "none"
    monkeypatch.setenv("FORERUN_USE_SPECULATIVE_DECODING", "False")
    monkeypatch.setenv("FORERUN_DRAFT_MODEL", "lookup")
    assert "drop one of them" in refusal(BadOption, merged, tmp_path, "")


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
def test_errors_name_the_source_of_a_wrong_option(tmp_path, monkeypatch):
    wrong = 'spec_length = "x"\n'
    said = refusal(BadOption, merged, tmp_path, wrong)
    assert re.fullmatch(r"the config file .*toml': spec_length='x' is not possible: it must be a whole number", said)
    assert merged(tmp_path, wrong, spec_length=5).spec_length == 5, "a flag stands in its place"
    assert refusal(BadOption, merged, tmp_path, wrong, spec_length=99).startswith("spec_length=99 is not possible")
    assert "toml': num_speculative_tokens='x' is" in refusal(BadOption, merged, tmp_path, 'num_speculative_tokens="x"')
    said = refusal(BadOption, merged, tmp_path, "max_tokens = 5")
    way_out = "give it with each request: in SamplingParams, by --max-tokens, or as max_tokens in a body"
    assert said.endswith(f"toml': max_tokens=5 is no option of the engine: {way_out}")
    file = tmp_path / "models.toml"
    for text, place in (
        (f'[models.a]\ntarget = "x"\n{wrong}', r"\[models.a\]: "),
        (f'{wrong}[models.a]\ntarget="x"', ""),
    ):
        file.write_text(text)
        said = refusal(BadOption, EngineConfig.several, [], {}, str(file))
        assert re.match(rf"the config file .*models.toml': {place}spec_length='x' is not possible", said)
    file.write_text('[models.a]\ntarget = "x"\nuse_speculative_decoding = true\n')
    assert "models.toml': [models.a]: use_" in refusal(BadOption, EngineConfig.several, [], {}, str(file))
    for variable in ("SPEC_LENGTH", "NUM_SPECULATIVE_TOKENS", "QUANTIZATION"):
        with monkeypatch.context() as patch:
            patch.setenv(f"FORERUN_{variable}", "y")
            assert refusal(BadOption, merged, tmp_path, "").startswith(f"FORERUN_{variable}='y' is not possible")
    monkeypatch.setenv("FORERUN_MAX_TOKENS", "y")
    assert refusal(BadOption, EngineConfig.from_sources, {}) == f"there is no FORERUN_MAX_TOKENS: {way_out}"


@pytest.mark.usefixtures("no_variables")
def test_a_config_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    assert "cannot be read" in refusal(BadOption, EngineConfig.from_sources, {}, str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long.toml").write_text("#" * 1_000_001)
    for file in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path / "long.toml")):
        with pytest.raises(BadOption, match=r"^the config file .* \(it (is no file|has more than 1 MB)\)"):
            EngineConfig.from_sources({}, file)
        monkeypatch.setenv("FORERUN_CONFIG", file)
        with pytest.raises(BadOption, match=r"is no file|more than 1 MB"):
            EngineConfig.from_sources({})
    (tmp_path / "latin.toml").write_bytes(b"draft = '\xe9'")
    assert "is not valid TOML" in refusal(BadOption, EngineConfig.from_sources, {}, str(tmp_path / "latin.toml"))
    for text, why in {
        '{"draft":': "is not valid JSON",
        '["draft"]': "holds no options",
        "[" * 10_000: "not valid",
    }.items():
        (tmp_path / "forerun.json").write_text(text)
        assert why in refusal(BadOption, EngineConfig.from_sources, {}, str(tmp_path / "forerun.json"))


@pytest.mark.usefixtures("no_variables")
def test_a_config_file_may_be_json(tmp_path):
    file = tmp_path / "forerun.json"
    file.write_text('{"draft": "suffix:shape=tree", "spec_length": 7, "prefix_caching": false}')
    config = EngineConfig.from_sources({"spec_length": 3}, str(file))
    assert config == EngineConfig(draft="suffix:shape=tree", spec_length=3, prefix_caching=False)


def test_keys_to_ignore_are_a_text_or_a_list():
    for given in ("made_by, made_in", ["made_by", "made_in"], ("made_in", "made_by")):
        assert EngineConfig.make(ignore_config_keys=given).ignored_config_keys == {"made_by", "made_in"}
    assert EngineConfig().ignored_config_keys == frozenset()
    for given in (5, [5], {"made_by": 1}):
        with pytest.raises(BadOption, match=r"ignore_config_keys=.* is not possible: it must be a text"):
            EngineConfig.make(ignore_config_keys=given)


def test_a_folder_with_a_colon_in_its_name_is_a_draft_model(tmp_path):
    (tmp_path / "m:1b").mkdir()
    # It was looked into, and it is empty.
    assert "m:1b" in refusal(NotFound, drafters.make, str(tmp_path / "m:1b"), target_for(ToyModel(4, seed=0)))


WRONG = {
    "n": [0],
    "spec_length": [0, 65],
    "priority": [0.5, "high"],
    "cache_salt": [3],
    "draft": [3],
    "temperature": [-1.0, 1e-6, float("nan"), float("inf"), "1", True],
    "top_k": [-1, 5.5],
    "top_p": [0.0, 1.5],
    "min_p": [-0.1],
    "repetition_penalty": [0.0, float("inf")],
    "presence_penalty": [3.0],
    "frequency_penalty": [-3.0],
    "max_tokens": [-1, "64", 10.5, True],
    "min_tokens": [-1, 1000, None],
    "seed": [-1, 2**64, 1.5],
    "logprobs": [21, 2.5, True],
    "stop": [("",), ["a", 3], "\ud800"],
    "bad_words": [3],
    "stop_token_ids": [5, "5", [True], [-1]],
    "logit_bias": [{0: float("inf")}, {"5": 1}, {5: "1"}, [5]],
    "ignore_eos": [1],
    "acceptance": [3],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]])
def test_sampling_parameters_out_of_range_are_refused_by_name(field, value):
    assert refusal(BadOption, SamplingParams, **{field: value}).startswith(f"{field}=")


def test_sampling_parameters_become_plain_values():
    assert SamplingParams(stop=None, bad_words=None, stop_token_ids=None) == SamplingParams()
    given = SamplingParams(
        max_tokens=numpy.int64(9),
        temperature=numpy.float32(0.5),
        stop="a",
        stop_token_ids=numpy.array([3, 4]),
        logit_bias={numpy.int32(3): 1},
    )
    assert (given.stop, given.stop_token_ids, given.logit_bias) == (("a",), (3, 4), {3: 1.0})
    assert (type(given.max_tokens), type(given.temperature), type(given.stop_token_ids[0])) == (int, float, int)


def test_what_is_off_here_cannot_be_switched_on():
    for name, value in (("use_cuda_graphs", True), ("batching_mode", "static")):
        assert f"{name}={value!r} is not possible" in refusal(ValueError, EngineConfig.make, **{name: value})


def test_the_device_is_the_processor_unless_another_is_named(monkeypatch):
    """Models have not been run on CUDA devices yet, so that none is chosen for anybody."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    auto, cuda = (Opened(EngineConfig(device=name), OpenedCheckpoint.in_memory(None)) for name in ("auto", "cuda"))
    assert torch_device("auto") == auto.device == "cpu"
    assert torch_device("cuda") == cuda.device == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no CUDA device" in refusal(BadOption, torch_device, "cuda")


def test_torch_is_advised_only_where_a_card_could_use_it(monkeypatch):
    """It takes gigabytes, and would then say that there is no card."""
    monkeypatch.setattr("forerun.native.torch_version", lambda: None)
    for has_card, advice in ((False, "not here; use device='cpu'"), (True, "a CUDA device needs torch")):
        monkeypatch.setattr("forerun.ops.has_card", lambda has_card=has_card: has_card)
        assert advice in refusal(BadOption, torch_device, "cuda")


def test_a_name_of_another_engine_is_answered_with_ours():
    assert "max_new_tokens is max_tokens here" in refusal(BadOption, SamplingParams, max_new_tokens=5)
    with pytest.raises(BadOption, match="num_beam_groups has no counterpart here"):
        SamplingParams(temperature=0.5, num_beam_groups=4)
    assert "there is no sampling parameter 'nonsense'" in refusal(BadOption, SamplingParams, nonsense=1)
    params = SamplingParams(temperature=0.5, stop="x")
    for same in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert same == params


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_batchsize": 3}, "there is no option 'max_batchsize' (did you mean 'max_batch_size'?)"),
        ({"max_batch_size": -3}, "max_batch_size=-3 is not possible: it must be in 1 .. 1024"),
        ({"max_batch_size": "many"}, "max_batch_size='many' is not possible: it must be a whole number"),
        ({"draft": None}, "draft=None is not possible: it must be a text"),
    ],
)
def test_a_configuration_of_its_own_is_checked_as_one_of_llm(options, words):
    assert words in refusal(BadOption, EngineConfig, **options)
    assert EngineConfig(ignore_config_keys=["a", "b"]).ignored_config_keys == {"a", "b"}
