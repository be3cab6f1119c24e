"""The doors of the Python interface: signatures, types, a readable repr, and keywords in the wrong place."""

import dataclasses
import inspect
import typing
from pathlib import Path

import pytest

import forerun
from forerun import LLM, BadOption, EngineConfig, SamplingParams
from forerun.engine.options import LLMOptions
from refusals import refusal

pytestmark = pytest.mark.once("about names and types, not about drafts")

SOURCE = Path(__file__).parents[2] / "src"
ALIASES = {
    *("draft_model", "num_speculative_tokens", "speculative_config", "use_speculative_decoding"),
    *("batching_mode", "use_cuda_graphs"),
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("shipped", draft="none", max_seq_len=512)


# ---------------------------------------------------------------------------------------------------------- signatures


def test_the_typed_options_of_llm_are_those_of_its_configuration():
    """In the same order, and each takes what the configuration takes."""
    ours, config = typing.get_type_hints(LLMOptions), typing.get_type_hints(EngineConfig)
    fields = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "target"]
    assert list(ours) == [*fields, *(name for name in ours if name in ALIASES)]
    assert ours.keys() >= ALIASES
    for name in fields:
        takes = set(typing.get_args(ours[name]) or (ours[name],))
        assert takes >= set(typing.get_args(config[name]) or (config[name],)), name


def test_signatures_show_every_option_with_its_default():
    shown = inspect.signature(LLM).parameters
    assert list(shown) == ["target", *typing.get_type_hints(LLMOptions)]
    assert (shown["max_batch_size"].default, shown["draft"].default) == (8, "auto")
    assert shown["spec_length"].annotation == "int | None"
    fields = inspect.signature(SamplingParams).parameters
    assert list(fields) == [field.name for field in dataclasses.fields(SamplingParams)]
    assert fields["max_tokens"].default == 128
    assert list(inspect.signature(LLM.generate).parameters) == ["self", "prompts", "params", "raw"]
    assert forerun.EngineConfig is EngineConfig


def test_an_llm_says_what_it_is(llm):
    said = repr(llm)
    assert said.startswith("<LLM target: llama, ")
    assert "draft='none', up to 8 sequences of 512 tokens>" in said


# ------------------------------------------------------------------------------------------------- misplaced keywords


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"max_token": 3}, "there is no sampling parameter 'max_token' (did you mean 'max_tokens'?)"),
        ({"temprature": 1}, "(did you mean 'temperature'?)"),
        ({"nonsense": 1}, "there is no sampling parameter 'nonsense': it must be one of acceptance, bad_words, "),
    ],
)
def test_an_unknown_sampling_parameter_is_answered_with_the_nearest(named, words):
    assert words in refusal(BadOption, SamplingParams, **named)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"temperature": 0}, "takes no temperature: use SamplingParams(temperature=0), given as params"),
        ({"max_token": 3}, "takes no max_token: use SamplingParams(max_tokens=3), given as params"),
        ({"max_new_tokens": 3}, "takes no max_new_tokens: use SamplingParams(max_tokens=3), given as params"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size has no counterpart here"),
        ({"sampling_params": SamplingParams()}, "takes no sampling_params: it is called params here"),
        ({"prompt": "x"}, "there is no argument of LLM.generate called 'prompt' (did you mean 'prompts'?)"),
    ],
)
def test_a_sampling_parameter_given_to_generate_is_answered_with_its_place(llm, named, words):
    assert words in refusal(BadOption, llm.generate, "x", **named)


@pytest.mark.parametrize("method", ["stream", "astream", "submit"])
def test_the_other_doors_answer_alike(llm, method):
    with pytest.raises(BadOption, match=rf"LLM\.{method} takes no seed: use SamplingParams\(seed=1\)"):
        getattr(llm, method)("x", seed=1)


def test_chat_tells_sampling_parameters_from_variables_of_the_template(llm, tmp_path):
    hello = [{"role": "user", "content": "def f("}]
    with pytest.raises(BadOption, match=r"LLM\.chat takes no temperature: use SamplingParams\(temperature=0\), given"):
        llm.chat(hello, temperature=0)
    assert "chat template does not read 'enable_thinking'" in refusal(BadOption, llm.chat, hello, enable_thinking=False)
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ seed }}", encoding="utf-8")
    own = LLM(llm.checkpoint, draft="none", chat_template=template)
    (out,) = own.chat(hello, SamplingParams(max_tokens=1, temperature=0), seed="x")
    assert own.tokenizer.decode(out.prompt_ids) == "def f(x"
