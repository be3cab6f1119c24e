"""Asynchronous streams and threads over one LLM: one batch, nothing lost, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine.load import caches
from forerun import LLM, BadOption, PromptTooLong, SamplingParams, StepReport
from forerun.engine.loop import SharedEngine
from forerun.engine.request import Chunk
from forerun.types import FinishReason, Origin, Sequence
from speculation import llm_options, mode

PROMPTS = ["class Stack:\n    def __init__(self):\n", "import os\n", "def fib(n):\n    if n < 2:\n", "for i in range("]
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def llm(speculation: str | None) -> LLM:
    return LLM(**llm_options())


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
    for cache in caches(llm.engine):
        cache.check_integrity()
        assert cache.free_tokens() == cache.num_blocks * cache.block_tokens


@pytest.mark.speculation("off", "fixed", "auto")
def test_an_asynchronous_stream_is_the_stream(llm: LLM) -> None:
    """The same text and tokens, and in the same pieces, unless the drafts are paced by how long steps take."""
    expected = list(llm.stream(PROMPTS[0], params()))
    found = within_time(collect(llm, PROMPTS[0]))
    assert "".join(c.text for c in found) == "".join(c.text for c in expected)
    assert [t for c in found for t in c.token_ids] == [t for c in expected for t in c.token_ids]
    if mode() != "auto":
        assert [(c.text, c.token_ids, c.finish_reason) for c in found] == [
            (c.text, c.token_ids, c.finish_reason) for c in expected
        ]
    assert found[-1].finish_reason == expected[-1].finish_reason == "length"
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


def test_a_stream_that_the_collector_closes_inside_a_step_hangs_nobody(llm: LLM) -> None:
    """A generator in a cycle is closed wherever the collector happens to run, in the thread that steps, too."""
    expected = llm.generate(PROMPTS[0], params())[0].token_ids
    end = llm.listen(lambda report: gc.collect())
    gc.disable()
    try:
        stream = llm.stream(PROMPTS[2], params(200))
        next(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        found: list[list[int]] = []
        work = lambda: found.append(llm.generate(PROMPTS[0], params())[0].token_ids)  # noqa: E731
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(TIMEOUT_S)
    finally:
        gc.enable()
        end()
    assert found == [expected]
    assert_idle(llm)


def test_an_asynchronous_stream_whose_loop_is_gone_ends_when_it_is_forgotten(llm: LLM) -> None:
    loop = asyncio.new_event_loop()
    stream = llm.astream(PROMPTS[2], params(200))
    loop.run_until_complete(anext(stream))
    loop.close()  # and nobody shut its asynchronous generators down
    del stream
    gc.collect()
    assert_idle(llm)


def test_a_listener_cannot_call_the_engine_that_runs_it(llm: LLM) -> None:
    end = llm.listen(lambda report: llm.generate(PROMPTS[1], params()))
    with pytest.raises(BadOption, match="a listener runs inside a step and cannot call the engine"):
        llm.generate(PROMPTS[0], params())
    end()
    end()  # once more does no harm
    assert_idle(llm)


def test_a_failing_listener_ends_its_own_callers_work_alone(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    heard = list[StepReport]()

    def fail(report: StepReport) -> None:
        raise ZeroDivisionError("a bug of the listener")

    ends = [llm.listen(fail), llm.listen(heard.append)]
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS[0], params())
    assert len(heard) == 1  # those behind it hear the step, too
    assert_idle(llm)
    with caplog.at_level(logging.ERROR):  # the worker steps for an asynchronous stream, and the listener is not its own
        assert within_time(collect(llm, PROMPTS[0]))[-1].finish_reason == "length"
    assert [record.message for record in caplog.records] == [
        "a listener failed in a step of another thread and is not called again"
    ]
    for end in ends:
        end()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda llm: llm.chat({"role": "user", "content": "x"}), "it must be a list of messages such as"),
        (lambda llm: llm.chat("hello"), "it must be a list of messages such as"),
        (lambda llm: llm.chat([]), "it must be a list of messages such as"),
        (lambda llm: llm.chat([[{"role": "user", "content": "x"}], [{}]]), "conversation 2: "),
        (lambda llm: llm.generate([{"role": "user", "content": "x"}]), "LLM.chat takes conversations"),
        (lambda llm: llm.generate("x", {"max_tokens": 3}), "it must be SamplingParams"),
        (lambda llm: llm.generate(["x", "y"], [SamplingParams()]), "1 SamplingParams for 2 prompts"),
        (lambda llm: next(llm.stream([])), "a stream takes one prompt and was given 0"),
        (lambda llm: next(llm.stream(["a", "b"])), "a stream takes one prompt and was given 2"),
        (lambda llm: within_time(anext(llm.astream(["a", "b"]))), "a stream takes one prompt and was given 2"),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, call: Any, sentence: str) -> None:
    with pytest.raises(BadOption) as caught:
        call(llm)
    assert sentence in str(caught.value)
    assert_idle(llm)


def test_conversations_may_come_from_any_iterable(llm: LLM) -> None:
    turn = {"role": "user", "content": "x = 1"}
    one = llm.chat(iter([turn]), params(4))
    several = llm.chat(([turn], [turn]), params(4))
    assert [out.token_ids for out in several] == [one[0].token_ids] * 2


def test_ctrl_c_waits_for_the_end_of_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torn in the middle of a commit, a step would leave another request with a token and without its cache."""
    expected = llm.generate(PROMPTS[0], params(40))[0]
    other = llm.stream(PROMPTS[0], params(40))
    chunks, times = [next(other)], list[int]()
    (request,) = llm.engine.scheduler.running
    commit = Sequence.commit

    def commit_and_press(seq: Sequence, token: int, origin: Origin) -> FinishReason | None:
        reason = commit(seq, token, origin)
        if seq is request.seq and not times:
            times.append(1)
            os.kill(os.getpid(), signal.SIGINT)  # the token is committed, and its row of the cache is not kept yet
        return reason

    monkeypatch.setattr(Sequence, "commit", commit_and_press)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[1], params(40))
    chunks += list(other)
    assert times == [1]
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert [t for chunk in chunks for t in chunk.token_ids] == expected.token_ids
    assert_idle(llm)


class StubEngine:
    """What SharedEngine calls, and no more."""

    def add_all(self, prompt: list[int], params: SamplingParams) -> list[object]:
        return [object()]

    def step(self) -> None:
        pass

    def abort(self, request: object) -> None:
        pass


@pytest.mark.once("no engine runs: the guard alone")
def test_interrupts_at_random_moments_leave_nothing_behind() -> None:
    """The guard alone, over an engine that does nothing: a lock that stays held would hang the next call."""
    shared = SharedEngine(StubEngine())  # type: ignore[arg-type]
    interrupted = 0
    before = signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
    try:
        for i in range(400):
            try:
                end = time.monotonic() + TIMEOUT_S / 10
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + (i % 40) * 5e-6)
                while time.monotonic() < end:  # until it comes
                    requests = shared.add([[1]], [SamplingParams()])
                    shared.step()
                    shared.end(requests)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            thread = threading.Thread(target=shared.step, daemon=True)
            thread.start()
            thread.join(TIMEOUT_S / 10)
            assert not thread.is_alive(), "the lock is held by nobody"
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted == 400


@pytest.mark.once("no engine runs: the guard alone")
def test_who_waits_and_gives_up_leaves_the_step_of_another_thread_alone() -> None:
    """Any signal's handler may raise in whoever waits for the lock, which is not his to release."""
    inside, go_on, ended = threading.Event(), threading.Event(), list[bool]()

    class Slow(StubEngine):
        def step(self) -> None:
            inside.set()
            go_on.wait(TIMEOUT_S / 10)
            inside.clear()

        def abort(self, request: object) -> None:
            ended.append(inside.is_set())

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError

    shared, errors = SharedEngine(Slow()), list[BaseException]()  # type: ignore[arg-type]

    def step() -> None:
        try:
            shared.step()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    assert inside.wait(TIMEOUT_S / 10)
    before, handler = signal.signal(signal.SIGALRM, give_up), signal.getsignal(signal.SIGINT)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(TimeoutError):
            shared.step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert signal.getsignal(signal.SIGINT) is handler
    shared.end([object()])  # type: ignore[list-item]
    assert ended == [], "the other thread is inside of its step"
    go_on.set()
    thread.join(TIMEOUT_S / 10)
    assert errors == []
    assert ended == [False]
