"""Models with recurrent layers in the engine: what they say is plain decoding's, whatever shares their states."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.load import alone, caches, check, engine_with, heard, mixed, run
from forerun import LLM, native
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.kv import states
from forerun.kv.cache import BlockCache
from forerun.kv.disk import Folder
from forerun.models.runner import Run, Runner
from forerun.ops.cpu.model import CpuModel
from forerun.ops.torch import TorchModel
from forerun.types import SamplingParams
from support import VOCAB, noisy_copy, on_native, random_hybrid
from tiny import write_tiny

ROOM = 512  # tokens of the KV cache: so few that requests are preempted


@cache
def hybrid() -> tuple[TorchModel | CpuModel, Any]:
    """A target and a draft model that both keep states, on operators whose rows depend on nothing but themselves."""
    model: TorchModel | CpuModel = random_hybrid(1, row_by_row=True)
    if native.isa() != "reference" and isinstance(model, TorchModel):
        model = on_native(model.config, model.weights, "bfloat16")
    return model, noisy_copy(model, 7)


def engine_of_hybrids(num_tokens: int = ROOM, **options: object) -> Engine:
    target, draft = hybrid()
    return engine_with(num_tokens, model=target, draft_model=draft, **options)


def live(engine: Engine, wanted: list[tuple[list[int], SamplingParams]], seed: int, aborts: float) -> list[Request]:
    """Add requests at random moments and abort some, until all are finished; the caches are sound after every step."""
    chance, waiting, requests = random.Random(seed), list(wanted), list[Request]()
    while waiting or any(request.seq.finish_reason is None for request in requests):
        while waiting and chance.random() < 0.4:
            requests.append(engine.add(*waiting.pop(0)))
        running = [request for request in requests if request.seq.finish_reason is None]
        if running and chance.random() < aborts:
            engine.abort(chance.choice(running))
        engine.step()
        check(engine)
    return requests


@pytest.mark.parametrize("num_requests", [60, pytest.param(300, marks=pytest.mark.parity)])
@pytest.mark.parametrize("on_disk", [False, True])
def test_texts_are_those_of_requests_alone(num_requests: int, on_disk: bool, tmp_path: Path) -> None:
    """Mixed batches with prefix hits, preemption, aborts and, where asked for, a folder."""
    wanted = mixed(5, num_requests, longest=40)
    folder = Folder(tmp_path / "kv", 1 << 30) if on_disk else None
    engine = engine_of_hybrids(folder=folder)
    requests = live(engine, wanted, seed=1, aborts=0.02)
    outputs = alone(wanted, model=hybrid()[0], draft_model=hybrid()[1])
    for request, text in zip(requests, outputs, strict=True):
        end = len(request.seq.output_ids) if request.seq.finish_reason == "abort" else None
        assert request.seq.output_ids == text[:end]
    assert any(request.seq.finish_reason == "abort" for request in requests)
    assert engine.scheduler.num_preemptions > 0
    assert engine.runner.cache.prefix_hit_tokens > 0
    assert sum(request.report.num_accepted for request in requests) > 0
    if folder is not None:
        folder.close()
        folder = Folder(tmp_path / "kv", 1 << 30)
        again = live(engine_of_hybrids(folder=folder), wanted, seed=2, aborts=0)
        assert [own.seq.output_ids for own in again] == outputs
        assert sum(request.report.num_disk_tokens for request in again) > 0
        folder.close()


def test_no_state_is_left() -> None:
    engine = engine_of_hybrids()
    live(engine, mixed(6, 1000, longest=20), seed=3, aborts=0.1)
    for own in caches(engine):
        assert not own.states._lines
        own.clear_prefixes()
        assert own.states.num_published == 0
        assert len(own.states._free) == own.states.num_states
        assert len(own.states._free_rows) == own.states.num_rows


def test_who_never_says_what_stays_may_still_run_long_texts() -> None:
    """As certificates and training do, which publish nothing: the rows of one sequence are enough."""
    model = hybrid()[0]
    text, logits = random.Random(4).choices(range(VOCAB), k=230), []
    for step in (1, 64, 230):
        cache = BlockCache.of(model, "contiguous", max_batch_size=1, max_seq_len=256)
        runner = Runner(model, cache)
        cache.open(0)
        for first in range(0, len(text), step):
            part = text[first : first + step]
            last = runner.forward([Run(0, part)]).logits[0][-1]
            cache.keep({0: range(len(part))})
            cache.check_integrity()
        logits.append(last)
    assert all(np.array_equal(logits[0], own) for own in logits)


@pytest.fixture(scope="module", params=["qwen3_5_text", "lfm2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A complete checkpoint of random weights, of a family with states."""
    return str(write_tiny(tmp_path_factory.mktemp("hybrid") / request.param, request.param, inner_scale=0.1))


PROMPTS = ["the state of a state", "the state of another one, and what comes behind it", "no"]
ASKED = {
    "greedy": SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    "several": SamplingParams(max_tokens=30, temperature=0.9, seed=1, n=3, ignore_eos=True),
    "beams": SamplingParams(max_tokens=60, temperature=0, num_beams=4, ignore_eos=True),
}


BY_ROW = {"ops": "reference_row_by_row", "dtype": "float32"}


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, BY_ROW], ids=["native", "int8", "reference"])
@pytest.mark.parametrize("asked", ASKED)
def test_drafts_change_no_answer(folder: str, asked: str, options: dict[str, str]) -> None:
    if "kv_cache_dtype" in options and native.isa() == "reference":
        pytest.skip(f"no native operators: {native.why_not()}")
    answers = []
    for draft in ("none", "lookup:min_n=1", f"model:path={folder}"):
        with LLM(folder, draft=draft, pacing="fixed", max_seq_len=128, **options) as llm:
            outs = llm.generate(PROMPTS, ASKED[asked], raw=True)
            llm.engine.runner.cache.check_integrity()
            answers.append([out.token_ids for out in outs])
    assert all(own == answers[0] for own in answers)


def test_another_process_begins_with_the_states_of_one(folder: str, tmp_path: Path) -> None:
    options = {"draft": "none", "max_seq_len": 128, "kv_disk": f"1GB:{tmp_path / 'kv'}"}
    with LLM(folder, **options) as llm:
        (first,) = llm.generate(PROMPTS[1], ASKED["greedy"], raw=True)
    with LLM(folder, **options) as llm:
        (again,) = llm.generate(PROMPTS[1], ASKED["greedy"], raw=True)
    assert again.token_ids == first.token_ids
    assert again.report.num_disk_tokens == len(PROMPTS[1]) // 16 * 16


# ------------------------------------------------------------------------------------------------------- second turns


def num_run(engine: Engine, prompt: list[int], **params: object) -> tuple[list[int], int]:
    """Ask, and return the answer and how many tokens of the prompt were run."""
    request = engine.add(prompt, SamplingParams(temperature=0, **{"max_tokens": 20, **params}))
    (output,) = run(engine, [request])
    return output, len(prompt) - request.report.num_cached_tokens


def some(seed: int, num: int) -> list[int]:
    return random.Random(seed).choices(range(4, VOCAB), k=num)


@pytest.mark.parametrize("drops_reasoning", [False, True])
def test_a_second_turn_runs_the_new_message_and_a_block(drops_reasoning: bool) -> None:
    """A template that drops old reasoning makes another text of the answer: only what stands before it is shared."""
    end = 3
    engine = engine_of_hybrids(1024, end_ids=frozenset({end}))
    first = [*some(1, 21), end, *some(2, 18), end]
    answer, num_first = num_run(engine, first, min_tokens=20)
    assert num_first == len(first)
    said = answer[10:] if drops_reasoning else answer
    second = [*first, *said, end, *some(3, 9), end]
    _, num_second = num_run(engine, second)
    new = len(second) - len(first) if drops_reasoning else len(second) - len(first) - len(answer)
    assert new <= num_second <= new + states.STATE_TOKENS
    # Another question behind the same beginning: behind the end of its first message a state stands, too.
    other = [*first[:22], *some(4, 12), end]
    _, num_other = num_run(engine, other)
    assert num_other <= len(other) - 22 + states.STATE_TOKENS


def test_a_rejection_runs_no_token_again() -> None:
    """Every row of a pass is the last committed token, a draft, or a token of the prompt that was never run."""
    engine = engine_of_hybrids(1024, spec_length=6, policy="fixed")
    reports = heard(engine)
    prompt = some(8, 50)
    answer, _ = num_run(engine, prompt, draft="model", max_tokens=40)
    assert sum(report.num_drafted - report.num_accepted for report in reports) > 20
    assert sum(report.num_rows - report.num_decoding - report.num_drafted for report in reports) == len(prompt) - 1
    assert len(answer) == 40
