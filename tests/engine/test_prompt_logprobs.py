"""Log-probabilities of a prompt's tokens: those that the model gives them, however the prompt is run."""

import math

import pytest

from forerun import LLM, SamplingParams
from forerun.errors import BadOption
from speculation import llm_options

PROMPT = "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n" * 2


@pytest.fixture(scope="module")
def llm(speculation: str | None) -> LLM:
    return LLM("shipped", **llm_options())


def test_they_are_those_of_an_output_with_the_same_tokens(llm: LLM) -> None:
    """Each token is forced in turn, and has the log-probability and the alternatives that it has in the prompt."""
    ids = llm.tokenizer.encode(PROMPT)
    (out,) = llm.generate([ids], SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=3, logprobs=3))
    places = out.prompt_logprobs
    assert (len(places), places[0]) == (len(ids), None)
    assert [place.token_id for place in places[1:] if place is not None] == ids[1:]
    assert len(ids) > 40  # more than are run in one step
    for i in (1, 2, 31, 32, 33, len(ids) - 1):
        (one,) = llm.generate([ids[:i]], SamplingParams(max_tokens=1, temperature=0, logprobs=3))
        assert places[i].top == one.logprobs[0].top, i
        assert all(logprob <= 0 and not math.isnan(logprob) for _, logprob in places[i].top)


def test_what_is_in_the_cache_and_what_runs_beside_it_change_nothing(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0)
    (first,) = llm.generate(PROMPT, params)
    other_params = SamplingParams(max_tokens=8, temperature=0)
    again, plain, other = llm.generate([PROMPT, PROMPT, "class A:"], [params, other_params, params])
    assert again.prompt_logprobs == first.prompt_logprobs
    assert again.token_ids == plain.token_ids == first.token_ids
    assert plain.prompt_logprobs is None
    assert len(other.prompt_logprobs or ()) == len(other.prompt_ids)
    assert again.report.num_cached_tokens == 0


def test_every_output_of_a_prompt_has_them(llm: LLM) -> None:
    outs = llm.generate("def f(", SamplingParams(max_tokens=2, seed=1, n=3, prompt_logprobs=1))
    assert [out.prompt_logprobs for out in outs] == [outs[0].prompt_logprobs] * 3
    assert None not in (outs[0].prompt_logprobs or [None])[1:]
    (short,) = llm.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert short.prompt_logprobs == [None]


def test_they_are_not_for_beams() -> None:
    with pytest.raises(BadOption, match="prompt_logprobs"):
        SamplingParams(num_beams=2, temperature=0, prompt_logprobs=1)
