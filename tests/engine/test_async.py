"""Asynchronous streams and threads over one LLM: one batch, nothing lost, nothing left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from forerun import LLM, PromptTooLong, SamplingParams, StepReport
from forerun.engine.request import Chunk

PROMPTS = ["class Stack:\n    def __init__(self):\n", "import os\n", "def fib(n):\n    if n < 2:\n", "for i in range("]
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def params(max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=5, ignore_eos=True)


def within_time(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


async def collect(llm: LLM, prompt: str, max_tokens: int = 24) -> list[Chunk]:
    return [chunk async for chunk in llm.astream(prompt, params(max_tokens))]


def assert_idle(llm: LLM) -> None:
    """No request is left, and every block of both caches is free."""
    assert not llm.engine.scheduler.running
    assert not llm.engine.scheduler.waiting
    for cache in (llm.engine.runner.cache, llm.engine.drafter.runner.cache):  # type: ignore[attr-defined]
        cache.check_integrity()
        assert cache.free_tokens() == cache.num_blocks * cache.block_tokens


def test_an_asynchronous_stream_is_the_stream(llm: LLM) -> None:
    expected = list(llm.stream(PROMPTS[0], params()))
    found = within_time(collect(llm, PROMPTS[0]))
    assert [(c.text, c.token_ids, c.finish_reason) for c in found] == [
        (c.text, c.token_ids, c.finish_reason) for c in expected
    ]
    assert found[-1].output is not None
    assert_idle(llm)


def test_several_streams_share_one_batch_and_each_is_what_it_is_alone(llm: LLM) -> None:
    alone, steps = [], list[StepReport]()
    end = llm.listen(steps.append)
    alone = [llm.generate(prompt, params(24 + 3 * i))[0].token_ids for i, prompt in enumerate(PROMPTS)]
    steps_alone = len(steps)
    steps.clear()

    async def together() -> list[list[Chunk]]:
        return await asyncio.gather(*(collect(llm, prompt, 24 + 3 * i) for i, prompt in enumerate(PROMPTS)))

    found = within_time(together())
    end()
    assert [[t for c in chunks for t in c.token_ids] for chunks in found] == alone
    assert max(step.num_decoding for step in steps) > 1
    assert len(steps) < steps_alone
    assert_idle(llm)


def test_the_event_loop_is_free_while_a_step_runs(llm: LLM) -> None:
    """The step waits for a coroutine: on a blocked loop neither would ever go on."""
    coroutine_ran = threading.Event()
    waited = list[bool]()
    end = llm.listen(lambda report: waited.append(coroutine_ran.wait(TIMEOUT_S / 4)))

    async def both() -> None:
        stream = asyncio.create_task(collect(llm, PROMPTS[1]))
        await asyncio.sleep(0)
        coroutine_ran.set()
        await stream

    within_time(both())
    end()
    assert waited
    assert all(waited)


def test_leaving_a_stream_early_frees_what_it_holds(llm: LLM) -> None:
    async def leave() -> None:
        stream = llm.astream(PROMPTS[2], params(200))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    within_time(leave())
    assert_idle(llm)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_cancelled_task_frees_what_it_holds_and_disturbs_nobody(llm: LLM, num_steps: int) -> None:
    """num_steps: how long it ran; 0 = it is cancelled while its prompt is still being added."""
    expected = llm.generate(PROMPTS[0], params(40))[0].token_ids
    steps = list[StepReport]()
    end = llm.listen(steps.append)

    async def cancel() -> list[Chunk]:
        other = asyncio.create_task(collect(llm, PROMPTS[0], 40))
        task = asyncio.create_task(collect(llm, PROMPTS[2], 200))
        await asyncio.sleep(0)
        while len(steps) < num_steps:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await other

    found = within_time(cancel())
    end()
    assert [t for c in found for t in c.token_ids] == expected
    assert_idle(llm)


def test_errors_reach_the_one_who_asked(llm: LLM) -> None:
    async def ask() -> None:
        with pytest.raises(PromptTooLong, match="max_seq_len"):
            await collect(llm, "x " * 5000)

    within_time(ask())
    assert_idle(llm)


def test_threads_share_one_llm(llm: LLM) -> None:
    expected = [llm.generate(prompt, params())[0].token_ids for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(lambda prompt: llm.generate(prompt, params())[0].token_ids, PROMPTS))
    assert found == expected
    assert_idle(llm)
