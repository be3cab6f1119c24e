"""LLM on the shipped pair: texts in, texts out, streams beside each other, stop strings inside rounds."""

import dataclasses
import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

from engine.load import greedy, run
from forerun import LLM, BadOption, CapacityError, SamplingParams
from forerun.drafters import Drafter, Target
from forerun.engine.opened import SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.models.loading import load_checkpoint
from forerun.types import Draft, Probs, Sequence
from refusals import refusal
from saved import save_checkpoint
from speculation import llm_options

PROMPT = "class Stack:\n    def __init__(self):\n"


@cache
def made(**options) -> LLM:
    return LLM("shipped", **options)


def llm(draft: str | None = None) -> LLM:
    """The shipped model, drafting as the mode of the test says where it does not say so itself."""
    return made(**({} if draft == "none" else llm_options()) | ({} if draft is None else {"draft": draft}))


@pytest.mark.once("about the draft model")
def test_the_shipped_draft_is_chosen_for_the_shipped_target():
    (out,) = llm().generate(PROMPT, greedy(40, spec_length=5))  # however busy the machine is
    assert out.report.num_drafted > 0
    assert out.report.alpha_hat > 0.3
    assert out.text == llm().tokenizer.decode(out.token_ids)


class LastTokenAgain(Drafter):
    """Guesses that each sequence repeats its last token."""

    draws = "point"

    def __init__(self, target: Target) -> None:
        self.num_ids = target.num_ids

    def propose(self, seqs, budget, coins):
        guesses = [[seq.tokens[-1]] * budget.num_tokens[b] for b, seq in enumerate(seqs)]
        return Draft.chains(guesses, [[Probs(point=token) for token in own] for own in guesses])


@pytest.mark.once("about a drafter")
def test_a_program_may_make_its_own_drafter():
    own = LLM("shipped", draft=LastTokenAgain, spec_length=2, pacing="fixed")
    assert own.engine.drafter.first.num_ids == own.tokenizer.num_ids
    assert "model" not in own.engine.drafter.members, "what drafts otherwise is not loaded beside it"
    (out,) = own.generate(PROMPT, greedy(40))
    assert out.report.num_drafted > 20
    assert own.engine.drafter.main == "own"
    assert out.token_ids == llm("none").generate(PROMPT, greedy(40))[0].token_ids
    (plain,) = own.generate(PROMPT, greedy(40, draft="none"))
    assert (plain.token_ids, plain.report.num_drafted) == (out.token_ids, 0)


@pytest.mark.once("about options")
def test_what_makes_no_drafter_is_refused():
    assert "draft='own'" in repr(LLM("shipped", draft_model=LastTokenAgain))
    with pytest.raises(BadOption, match="use_speculative_decoding says something else of drafts"):
        LLM("shipped", draft=LastTokenAgain, use_speculative_decoding=True)
    with pytest.raises(BadOption, match=r"draft made NoneType: it must make a forerun\.drafters\.Drafter"):
        LLM("shipped", draft=lambda target: None)
    with pytest.raises(BadOption, match="draft is a drafter already: give the function that makes it"):
        LLM("shipped", draft=Drafter())


def test_prompts_may_be_texts_ids_or_arrays_and_keep_their_order():
    ids = llm().tokenizer.encode(PROMPT)
    outs = llm().generate([PROMPT, ids, np.array(ids), "import"], greedy(8))
    assert outs[0].token_ids == outs[1].token_ids == outs[2].token_ids
    assert [out.prompt_ids for out in outs[:3]] == [ids] * 3
    assert llm().generate(np.array(ids), greedy(8))[0].token_ids == outs[0].token_ids
    assert "a prompt must be a text" in refusal(BadOption, llm().generate, [3.5], greedy(8))


def test_a_stream_is_the_text_in_pieces():
    (whole,) = llm().generate(PROMPT, greedy(30))
    chunks = list(llm().stream(PROMPT, greedy(30)))
    assert "".join(c.text for c in chunks) == whole.text
    assert [t for c in chunks for t in c.token_ids] == chunks[-1].output.token_ids == whole.token_ids
    assert chunks[-1].finish_reason == "length"


def test_streams_and_batches_beside_each_other_lose_nothing():
    """The steps of another caller may finish a request."""
    (whole,) = llm().generate(PROMPT, greedy(20))
    pieces = []
    for chunk in llm().stream(PROMPT, greedy(20)):
        pieces.append(chunk)
        if len(pieces) == 1:
            llm().generate("import os", greedy(60))
    assert [t for c in pieces for t in c.token_ids] == whole.token_ids
    first, second = llm().stream(PROMPT, greedy(20)), llm().stream(PROMPT, greedy(9))
    seen = ([], [])
    for _ in range(40):
        for stream, tokens in ((first, seen[0]), (second, seen[1])):
            tokens += next(stream, type("End", (), {"token_ids": []})).token_ids
    assert seen == (whole.token_ids, whole.token_ids[:9])


@pytest.mark.speculation("fixed", "auto")
@pytest.mark.parametrize("draft", ["none", "lookup", "auto"])
def test_a_stop_string_ends_the_output_inside_a_round(draft):
    (plain,) = llm("none").generate(PROMPT, greedy(40))
    for stop in {plain.text[i : i + 3] for i in range(0, 60, 7)}:
        (out,) = llm(draft).generate(PROMPT, greedy(40, stop=(stop,)))
        assert out.finish_reason == "stop"
        assert out.text == plain.text[: plain.text.index(stop)]
        assert out.token_ids == plain.token_ids[: len(out.token_ids)]
        assert stop in llm().tokenizer.decode(out.token_ids)
        assert stop not in llm().tokenizer.decode(out.token_ids[:-1])


@pytest.mark.parametrize("draft", ["none", "model"])
def test_the_text_ends_before_a_stop_id_however_it_is_read(draft, monkeypatch):
    """At the end, in pieces, or in the middle of a commit, as another thread may: the id that stops has no text."""
    engine = llm(draft)
    (whole,) = engine.generate(PROMPT, greedy(40))
    stop = next(t for t in whole.token_ids[9:] if engine.tokenizer.is_solid(t))
    ids = whole.token_ids[: whole.token_ids.index(stop) + 1]
    expected = engine.tokenizer.decode([*whole.prompt_ids, *ids[:-1]])[len(engine.tokenizer.decode(whole.prompt_ids)) :]
    params = greedy(40, stop_token_ids=(stop,))
    (out,) = engine.generate(PROMPT, params)
    assert (out.token_ids, out.text, out.finish_reason) == (ids, expected, "stop")
    assert "".join(chunk.text for chunk in engine.stream(PROMPT, params)) == expected
    request, read = engine.engine.add(engine.tokenizer.encode(PROMPT), params), list[str]()
    commit = Sequence.commit

    def commit_and_read(seq, token, origin):
        reason = commit(seq, token, origin)
        read.append(request.text)
        return reason

    monkeypatch.setattr(Sequence, "commit", commit_and_read)
    run(engine.engine, [request])
    assert request.text == expected
    assert len(read) == len(ids)
    assert all(expected.startswith(piece) for piece in read)


def test_readers_of_a_finished_request_all_get_its_text():
    engine = llm()
    (expected,) = engine.generate(PROMPT, greedy(60))
    request = engine.engine.add(engine.tokenizer.encode(PROMPT), greedy(60))
    run(engine.engine, [request])
    request._reader = request.detokenizer()
    push, inside, pushed = request._reader.push, threading.Event(), []

    def slow(ids):
        pushed.append(ids)
        inside.set()
        time.sleep(0.2)
        return push(ids)

    request._reader.push = slow
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(request.output)
        inside.wait()
        assert [pool.submit(request.output).result().text, first.result().text] == [expected.text] * 2
    assert pushed == [expected.token_ids]


def test_a_seed_is_drawn_and_gives_the_text_again():
    params = SamplingParams(max_tokens=24, temperature=1.0)
    (out,) = llm().generate(PROMPT, params)
    again = SamplingParams(max_tokens=24, temperature=1.0, seed=out.seed)
    assert llm("none").generate(PROMPT, again)[0].seed == out.seed
    (first,) = llm().generate(PROMPT, again)
    assert llm().generate(PROMPT, again)[0].token_ids == first.token_ids
    assert llm().generate(PROMPT, params)[0].seed != out.seed


@pytest.mark.once("about loading: nothing is decoded")
def test_a_loaded_model_is_not_silently_reinterpreted():
    checkpoint = load_checkpoint(SHIPPED_TARGET)
    assert LLM(checkpoint, dtype="float32").checkpoint is checkpoint
    for options in ({"dtype": "bfloat16"}, {"ops": "reference_row_by_row"}):
        assert "contradicts the loaded model" in refusal(BadOption, LLM, checkpoint, **options)


@pytest.mark.once("about the draft model")
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "logit_bias": {4095: 9.0}}])
def test_a_draft_model_need_not_know_every_id(tmp_path, sampling):
    """Half of the ids have no row in its matrices: it never drafts them, and stops drafting where one was committed."""
    small = load_checkpoint(SHIPPED_DRAFT).model
    config = dataclasses.replace(small.config, vocab_size=2048)
    weights = dict(small.weights)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:2048]
    save_checkpoint(tmp_path / "draft", config, weights, tokenizer_folder=SHIPPED_DRAFT)
    half, drafted = LLM("shipped", draft=str(tmp_path / "draft")), []
    half.listen(lambda report: drafted.extend(t for d in report.rounds for t in d.tokens), detail=True)
    params = SamplingParams(max_tokens=40, ignore_eos=True, spec_length=5, **sampling)
    prompts = [[id_ for id_ in half.tokenizer.encode(PROMPT) if id_ < 2048], [5, 4000, 6]]
    known, unknown = half.generate(prompts, params)
    assert drafted
    assert max(drafted) < 2048
    assert known.report.num_drafted > 0
    assert unknown.report.num_drafted == 0
    assert [known.token_ids, unknown.token_ids] == [out.token_ids for out in llm("none").generate(prompts, params)]


def test_without_a_limit_an_output_goes_as_far_as_the_cache():
    """A request without max_tokens gets as many tokens as there is room for."""
    small = LLM("shipped", **llm_options(), kv_cache_tokens=64)
    (out,) = small.generate([[5, 6, 7]], SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True))
    assert (len(out.token_ids), out.finish_reason) == (61, "length")
    with pytest.raises(CapacityError, match="the whole KV cache holds 64"):
        small.generate([[5] * 64], SamplingParams(max_tokens=None, temperature=0.0))


@pytest.mark.once("about the draft model")
def test_a_draft_model_may_end_at_other_ids(tmp_path):
    """A base model drafts for a chat model: the draft's end ids differ from the target's and are not used."""
    small = load_checkpoint(SHIPPED_DRAFT).model
    save_checkpoint(tmp_path / "draft", small.config, small.weights, end_ids=[7], tokenizer_folder=SHIPPED_DRAFT)
    (out,) = LLM("shipped", draft=str(tmp_path / "draft"), spec_length=5).generate(PROMPT, greedy(24))
    assert out.report.num_drafted > 0
    assert out.token_ids == llm("none").generate(PROMPT, greedy(24))[0].token_ids


@pytest.mark.once("about the draft model")
def test_ids_that_the_drafts_tokenizer_lacks_are_not_drafted(tmp_path):
    """Their rows are there, as padding is, and mean nothing."""
    small = load_checkpoint(SHIPPED_DRAFT).model
    (out,) = llm().generate(PROMPT, greedy(40))
    common = Counter(out.token_ids).most_common(1)[0][0]
    raw = json.loads((SHIPPED_DRAFT / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    (token,) = [text for text, id_ in vocab.items() if id_ == common]
    del vocab[token]
    raw["model"]["merges"] = [pair for pair in raw["model"]["merges"] if token not in ("".join(pair), *pair)]
    save_checkpoint(tmp_path / "draft", small.config, small.weights)
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps(raw))
    lacking, drafted = LLM("shipped", draft=str(tmp_path / "draft")), []
    lacking.listen(lambda report: drafted.extend(t for d in report.rounds for t in d.tokens), detail=True)
    assert lacking.generate(PROMPT, greedy(40))[0].token_ids == out.token_ids
    assert drafted
    assert common not in drafted
