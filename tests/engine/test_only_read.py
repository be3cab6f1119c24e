"""max_tokens=0: a prompt is read and scored, nothing is generated, and it may fill the context."""

import pytest

from forerun import LLM, BadOption, SamplingParams
from forerun.errors import PromptTooLong
from refusals import refusal
from speculation import llm_options

CONTEXT = 64


@pytest.fixture(scope="module")
def llm(speculation: str | None) -> LLM:
    return LLM("shipped", max_seq_len=CONTEXT, max_batch_size=2, prefill_chunk_tokens=16, **llm_options())


def prompt(llm: LLM, num_tokens: int) -> list[int]:
    return (llm.tokenizer.encode("def area(width, height):\n    return width * height\n") * 8)[:num_tokens]


def test_a_prompt_that_fills_the_context_is_scored(llm: LLM) -> None:
    scored, ids = SamplingParams(max_tokens=0, prompt_logprobs=2), prompt(llm, CONTEXT)
    (whole,) = llm.generate([ids], scored)
    assert (whole.token_ids, whole.text, whole.finish_reason) == ([], "", "length")
    (wanted,) = llm.generate([ids[:-1]], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2))
    assert whole.prompt_logprobs[:-1] == wanted.prompt_logprobs
    assert whole.prompt_logprobs[-1].token_id == ids[-1]
    assert len(wanted.token_ids) == 1
    assert "no room for an answer" in refusal(PromptTooLong, llm.generate, [ids], SamplingParams(max_tokens=1))
    assert "max_seq_len is 64" in refusal(PromptTooLong, llm.generate, [[*ids, 1]], scored)


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 24])
def test_it_ends_beside_others_and_frees_what_it_held(llm: LLM, num_tokens: int) -> None:
    ids, greedy = prompt(llm, num_tokens), SamplingParams(max_tokens=12, temperature=0)
    alone = llm.generate([prompt(llm, 20)], greedy)[0].token_ids
    read = SamplingParams(max_tokens=0)
    for _ in range(2):  # the second time all of it is in the cache
        outputs = llm.generate([ids, prompt(llm, 20), ids], [read, greedy, read])
        assert [output.token_ids for output in outputs] == [[], alone, []]
        assert [output.finish_reason for output in outputs] == ["length"] * 3
    assert not llm.engine.scheduler.running
    assert not llm.engine.scheduler.waiting
    llm.engine.runner.cache.check_integrity()
    assert llm.generate([[*ids, *ids]], greedy)[0].report.num_cached_tokens >= num_tokens // 16 * 16 - 16


def test_it_has_an_end_and_a_line_in_the_log(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "forerun.engine.engine"):
        (output,) = llm.generate([prompt(llm, 20)], SamplingParams(max_tokens=0))
    report = output.report
    assert (report.first_token_at_s, report.last_token_at_s, report.ended_at_s) == (None, None, report.read_at_s)
    assert report.read_at_s > report.scheduled_at_s
    assert [one.message.split(": ")[1] for one in caplog.records] == ["0 tokens in 0 steps; nothing was drafted"]


def test_listeners_hear_of_a_step_whose_requests_have_ended(llm: LLM) -> None:
    """As of requests that generate: what a listener asks of the engine holds none that has ended."""
    running = list[int]()
    end = llm.engine.listen(lambda report: running.append(len(llm.engine.scheduler.running)))
    llm.generate([prompt(llm, 12)], SamplingParams(max_tokens=0, cache_salt="another"))
    end()
    assert running == [0]


def test_several_outputs_of_one_prompt_and_streams(llm: LLM) -> None:
    assert [output.text for output in llm.generate(["def f("], SamplingParams(max_tokens=0, n=2), raw=True)] == ["", ""]
    chunks = list(llm.stream("def f(", SamplingParams(max_tokens=0), raw=True))
    assert [chunk.finish_reason for chunk in chunks] == ["length"]


@pytest.mark.once("refused before anything runs")
def test_a_search_for_nothing_is_refused() -> None:
    assert "nothing to search for" in refusal(BadOption, SamplingParams, max_tokens=0, num_beams=2, temperature=0)
    assert "min_tokens=1 is not possible" in refusal(BadOption, SamplingParams, max_tokens=0, min_tokens=1)
