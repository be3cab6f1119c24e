"""Beam searches of the shipped pair, by an LLM and by its server's engine: texts, drafts, stop texts, refusals."""

import asyncio
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from forerun import LLM, BadOption, RequestOutput, SamplingParams
from forerun.text.detokenizer import Detokenizer
from forerun.text.tokenizer import Tokenizer
from refusals import refusal
from support import heard

pytestmark = pytest.mark.once("beam searches choose their drafters and levels themselves")
PROMPTS = ["def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return", "import os\nimport", "class Stack:\n"]
OTHERS = [SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(temperature=0.8, seed=4, max_tokens=24)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("shipped", draft="model", extra_drafts="self", max_seq_len=256)


def search(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "num_beams": 4, "n": 2, "max_tokens": 24, **given})


def said(outputs: list[RequestOutput]) -> list[tuple[list[int], str, float | None]]:
    return [(output.token_ids, output.text, output.score) for output in outputs]


def test_drafts_change_no_bit_of_a_text_or_a_score(llm: LLM) -> None:
    """Beside other requests, whose texts stay what they are alone."""
    plain = said(llm.generate(PROMPTS, search(draft="none")))
    alone = said(llm.generate(PROMPTS[:2], OTHERS))
    for draft, levels in (("model", 2), ("model", None), ("self", 3), ("lookup", 1)):
        params = search(draft=draft, draft_beams=6, spec_length=levels)
        outputs = llm.generate([*PROMPTS, *PROMPTS[:2]], [*[params] * 3, *OTHERS])
        assert said(outputs) == [*plain, *alone]
        assert outputs[0].score >= outputs[1].score
    report = llm.generate(PROMPTS[0], search(draft="model", draft_beams=8, spec_length=2))[0].report
    assert report.mean_accepted_length > 1.2
    assert 4 < report.rows_per_pass <= 4 + 8 * 2
    llm.engine.runner.cache.check_integrity()


def test_the_score_of_a_text_is_the_sum_of_its_log_probabilities(llm: LLM) -> None:
    (best,) = llm.generate(PROMPTS[1], search(n=1, length_penalty=0.5))
    params, total = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20), 0.0
    for i, token in enumerate(best.token_ids):
        (position,) = llm.generate(best.prompt_ids + best.token_ids[:i], params)[0].logprobs or []
        total += dict(position.top)[token]
    assert best.cumulative_logprob == pytest.approx(total, abs=1e-4)
    assert best.score == pytest.approx(total / len(best.token_ids) ** 0.5, abs=1e-4)


def test_a_stop_text_ends_beams_and_is_cut(llm: LLM) -> None:
    for draft in ("none", "model"):
        outputs = llm.generate(PROMPTS[0], search(n=4, stop=["\n"], max_tokens=40, draft=draft))
        assert all("\n" not in output.text for output in outputs)
        assert {output.finish_reason for output in outputs} <= {"stop", "length"}
        assert sum(output.stop_text == "\n" for output in outputs) > 1
        if draft == "none":
            plain = said(outputs)
        assert said(outputs) == plain


def test_a_stop_text_is_looked_for_at_the_end_of_a_text_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every length it is found as by reading all of it, whatever characters tokens are parts of."""
    ids = llm.tokenizer.encode("def é(日本, x):\n    return '€€' + x  # 日本 END of it\n" * 6, add_special_tokens=False)
    read, real = list[int](), Tokenizer.decode_so_far

    def decode_so_far(self: Tokenizer, window: Seq[int]) -> tuple[str, int]:
        read.append(len(window))
        return real(self, window)

    for stop in ("本", "€'", "END of", "\n    return '€€' + x", ":", "nowhere in it"):
        [output, _] = llm.engine.make(ids[:3], search(stop=[stop]))
        for length in range(1, len(ids)):
            whole = Detokenizer(llm.tokenizer, ids[:3], [stop])
            whole.push(ids[3 : 3 + length])
            assert output.searcher._ends(ids[3 : 3 + length]) == (whole.stop is not None), (stop, length)
            if whole.stop is not None:
                break
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "decode_so_far", decode_so_far)
        assert not output.searcher._ends(ids[3:])
    assert sum(read) < 150 < len(ids)


def test_a_bad_word_is_in_no_beam(llm: LLM) -> None:
    usual, *_ = llm.generate(PROMPTS[0], search(draft="none"))
    word = next(word for word in usual.text.split() if word.isidentifier())
    for draft in ("none", "model"):
        outputs = llm.generate(PROMPTS[0], search(bad_words=word, draft=draft))
        assert all(word not in output.text.split() for output in outputs)
        if draft == "none":
            plain = said(outputs)
        assert said(outputs) == plain


def test_beams_are_not_streamed(llm: LLM) -> None:
    async def stream() -> None:
        async for _ in llm.astream(PROMPTS[0], search()):
            pass

    sentence = "num_beams=4 cannot be streamed, as its texts are known at the end: use generate"
    assert sentence in refusal(BadOption, list, llm.stream(PROMPTS[0], search()))
    assert "num_beams=4 cannot be streamed" in refusal(BadOption, asyncio.run, stream())


def test_a_listener_sees_steps_levels_and_trees(llm: LLM) -> None:
    reports = heard(llm, detail=True)
    (best,) = llm.generate(PROMPTS[2], search(n=1, draft="model", spec_length=2))
    rounds = [detail for report in reports for detail in report.rounds]
    decoding = [report for report in reports if report.num_decoding]
    assert sum(report.num_emitted for report in decoding) == best.report.num_emitted
    assert sum(report.num_drafted for report in decoding) == best.report.num_drafted > 0
    assert sum(report.num_accepted for report in decoding) == best.report.num_accepted
    assert sum(report.num_rows for report in decoding) == best.report.num_rows
    assert len(rounds) == best.report.num_steps
    assert any(detail.parents.count(-1) > 1 for detail in rounds), "the beams differ behind the committed tokens"
