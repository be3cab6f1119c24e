"""Asynchronous streams and threads over one LLM: one batch, nothing lost, nothing left behind."""

import asyncio
import gc
import logging
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import SimpleQueue
from types import FrameType
from typing import Any, Self

import pytest

import processes
from engine.load import assert_empty, caches, wait_for
from forerun import LLM, BadOption, PromptTooLong, SamplingParams, StepReport, native, verify
from forerun.engine.loop import Loop
from forerun.engine.request import Chunk, Request
from forerun.errors import InternalError
from forerun.models.runner import NO_NUMBERS
from forerun.types import Budget, Draft
from refusals import refusal
from speculation import llm_options, mode

PROMPTS = ["class Stack:\n    def __init__(self):\n", "import os\n", "def fib(n):\n    if n < 2:\n", "for i in range("]
TIMEOUT_S = 120
needs_native = pytest.mark.skipif(native.isa() == "reference", reason="torch's threads are not there in a child")


@pytest.fixture(scope="module")
def shared(speculation: str | None) -> LLM:
    return LLM("shipped", **llm_options())


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The LLM of all tests, in which each of them must leave nothing behind."""
    yield shared
    assert_idle(shared)


def params(max_tokens: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=5, ignore_eos=True, **more)


def within_time(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


async def collect(llm: LLM, prompt: str, max_tokens: int = 24, **more: Any) -> list[Chunk]:
    return [chunk async for chunk in llm.astream(prompt, params(max_tokens, **more))]


def assert_idle(llm: LLM) -> None:
    """No request is left, and every block of both caches is free, once what was asked for is done."""
    llm._loop.call(lambda: None)
    assert not llm.engine.scheduler.running
    assert not llm.engine.scheduler.waiting
    assert_empty(*caches(llm.engine))


@pytest.mark.speculation("off", "fixed", "auto")
def test_an_asynchronous_stream_is_the_stream(llm: LLM) -> None:
    """The same text and tokens, and in the same pieces, unless the drafts are paced by how long steps take."""
    expected = list(llm.stream(PROMPTS[0], params()))
    found = within_time(collect(llm, PROMPTS[0]))
    assert "".join(c.text for c in found) == "".join(c.text for c in expected)
    assert [t for c in found for t in c.token_ids] == [t for c in expected for t in c.token_ids]
    if mode() != "auto":
        pieces = [[(c.text, c.token_ids, c.finish_reason) for c in chunks] for chunks in (found, expected)]
        assert pieces[0] == pieces[1]
    assert found[-1].finish_reason == expected[-1].finish_reason == "length"
    assert found[-1].output is not None


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


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_cancelled_task_frees_its_blocks_and_disturbs_no_request(llm: LLM, num_steps: int) -> None:
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


def test_errors_reach_the_one_who_asked(llm: LLM) -> None:
    assert "max_seq_len" in refusal(PromptTooLong, within_time, collect(llm, "x " * 5000))


def test_threads_share_one_llm(llm: LLM) -> None:
    expected = [llm.generate(prompt, params())[0].token_ids for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(lambda prompt: llm.generate(prompt, params())[0].token_ids, PROMPTS))
    assert found == expected


def test_a_stream_that_the_collector_closes_inside_a_step_hangs_no_thread(llm: LLM) -> None:
    """A generator in a cycle is closed wherever the collector happens to run, in the thread that steps, too."""
    expected = llm.generate(PROMPTS[0], params())[0].token_ids
    end = llm.listen(lambda report: gc.collect())
    gc.disable()
    gc.freeze()  # what is there already is not looked at in every step
    try:
        stream = llm.stream(PROMPTS[2], params(40))
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
        gc.unfreeze()
        gc.enable()
        end()
    assert found == [expected]


def test_an_asynchronous_stream_whose_loop_is_gone_ends_when_it_is_forgotten(llm: LLM) -> None:
    loop = asyncio.new_event_loop()
    stream = llm.astream(PROMPTS[2], params(200))
    loop.run_until_complete(anext(stream))
    loop.close()  # its asynchronous generators were not shut down
    del stream
    gc.collect()


def test_a_listener_cannot_call_the_engine_that_runs_it(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    end = llm.listen(lambda report: llm.generate(PROMPTS[1], params()))
    with caplog.at_level(logging.ERROR):
        llm.generate(PROMPTS[0], params())
    (record,) = caplog.records
    assert isinstance(record.exc_info[1], BadOption)
    assert "a listener runs inside a step and cannot call the engine" in str(record.exc_info[1])
    end()
    end()  # once more does no harm


def test_a_failing_listener_is_dropped_and_logged(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    heard, failures = list[StepReport](), list[StepReport]()
    ends = [llm.listen(lambda report: failures.append(report) or 1 // 0), llm.listen(heard.append)]
    with caplog.at_level(logging.ERROR):
        assert llm.generate(PROMPTS[0], params())[0].finish_reason == "length"
    assert len(failures) == 1
    assert len(heard) > 1  # those behind it hear every step
    assert [record.message for record in caplog.records] == ["a listener failed and is not called again"]
    for end in ends:
        end()


def test_a_listener_that_fails_before_it_is_known_how_to_end_it_is_dropped(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step runs as soon as the engine has it, before `listen` has returned."""
    real = llm.engine.listen
    texts = list[str]()
    failures = list[StepReport]()

    def listening(*given: Any, **named: Any) -> Any:
        end = real(*given, **named)
        texts.append(generated(llm))
        return end

    expected, num_before = generated(llm), len(llm.engine._listeners)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(llm.engine, "listen", listening)
        end = llm.listen(lambda report: failures.append(report) or 1 // 0)
    assert (texts, len(failures), len(llm.engine._listeners)) == ([expected], 1, num_before)
    assert [record.message for record in caplog.records] == ["a listener failed and is not called again"]
    end()


def test_what_would_end_a_thread_ends_no_other_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SystemExit of a listener, or of a step."""
    expected = llm.generate(PROMPTS[0], params())[0].token_ids
    ends = llm.listen(lambda report: sys.exit(1))
    assert generated(llm) == expected
    ends()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "forward", lambda runs: sys.exit(1))
        assert "the step failed: SystemExit" in refusal(InternalError, generated, llm)
    assert generated(llm) == expected


def generated(llm: LLM) -> list[int]:
    """What the LLM writes, within some seconds."""
    ended = SimpleQueue[Request]()
    (request,) = llm.submit(PROMPTS[0], params(), hear=lambda request: request.seq.finish_reason and ended.put(request))
    ended.get(timeout=TIMEOUT_S / 4)
    if request.error is not None:
        raise request.error
    return request.output().token_ids


def test_a_rule_that_fails_for_one_request_ends_that_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ratio = verify.find("ratio")
    wanted = [params(), params(acceptance="ratio", spec_length=2)]
    expected = llm.generate(PROMPTS[0], wanted[0])[0].token_ids
    monkeypatch.setattr(ratio.module, "rule", lambda *args: 1 // 0)
    requests = llm.submit([PROMPTS[0], "x = 1\n" * 9], wanted)
    assert llm.generate(PROMPTS[0], wanted[0])[0].token_ids == expected
    wait_for(lambda: all(request.seq.finish_reason is not None for request in requests))
    assert requests[0].output().token_ids == expected
    assert ("ZeroDivisionError" in str(requests[1].error)) == (mode() != "off")


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
    assert sentence in refusal(BadOption, call, llm)


def test_conversations_may_come_from_any_iterable(llm: LLM) -> None:
    turn = {"role": "user", "content": "x = 1"}
    one = llm.chat(iter([turn]), params(4))
    assert [out.token_ids for out in llm.chat(([turn], [turn]), params(4))] == [one[0].token_ids] * 2


def test_several_outputs_of_one_prompt_stream_mixed(llm: LLM) -> None:
    """Each output is what `generate` gives for it, whether its chunks are read in a thread or in an event loop."""
    expected = llm.generate(PROMPTS[0], params(n=3))
    for chunks in (list(llm.stream(PROMPTS[0], params(n=3))), within_time(collect(llm, PROMPTS[0], n=3))):
        for i, out in enumerate(expected):
            own = [chunk for chunk in chunks if chunk.index == i]
            assert "".join(chunk.text for chunk in own) == out.text
            assert [token for chunk in own for token in chunk.token_ids] == out.token_ids
            assert [chunk.finish_reason for chunk in own if chunk.finish_reason] == [out.finish_reason]
            assert own[-1].output.index == i


def test_requests_carry_their_times(llm: LLM) -> None:
    before = time.monotonic()
    for out in llm.generate(PROMPTS, params()):
        report = out.report
        times = [before, report.arrived_at_s, report.scheduled_at_s, report.first_token_at_s, report.last_token_at_s]
        assert times == sorted(times)
        assert report.last_token_at_s > report.first_token_at_s


def test_submitted_requests_tell_how_they_go_on_and_may_be_ended(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], params(40))[0]
    news = SimpleQueue[Request]()
    kept, dropped = llm.submit(PROMPTS[:2], [params(40), params(400)], hear=news.put)
    while kept.seq.finish_reason is None:
        news.get(timeout=TIMEOUT_S)
    llm.end([dropped, kept])
    while dropped.seq.finish_reason is None:
        news.get(timeout=TIMEOUT_S)
    assert (kept.output().token_ids, dropped.seq.finish_reason) == (expected.token_ids, "abort")


@pytest.mark.parametrize("num_presses", [1, 3])
def test_ctrl_c_leaves_the_requests_of_others_alone(llm: LLM, num_presses: int) -> None:
    """In the middle of a commit: a torn step would leave another request with a token and without its cache."""
    expected = llm.generate(PROMPTS[0], params(200))[0]
    other = llm.stream(PROMPTS[0], params(200))
    chunks = [next(other)]
    armed = threading.Event()  # one press a call: a signal that comes while one is pending is lost

    def press(report: StepReport) -> None:
        if report.num_decoding > 1 and armed.is_set():
            armed.clear()
            os.kill(os.getpid(), signal.SIGINT)

    end = llm.listen(press)
    for _ in range(num_presses):
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 -- the request before may be decoding still
            armed.set()
            llm.generate(PROMPTS[1], params(1000))
    end()
    chunks += list(other)
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert [t for chunk in chunks for t in chunk.token_ids] == expected.token_ids


def test_interrupts_at_random_moments_leave_nothing_behind(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[1], params(6))[0].token_ids
    interrupted = 0
    before = signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
    try:
        for i in range(100):
            try:
                end = time.monotonic() + TIMEOUT_S / 10
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + (i % 50) * 2e-4)
                while time.monotonic() < end:  # until it comes; a destructor, which Python runs on its own, swallows it
                    with closing(llm.stream(PROMPTS[0], params(6))) as chunks:
                        next(chunks)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted == 100
    assert llm.generate(PROMPTS[1], params(6))[0].token_ids == expected


class Interrupts:
    """Raises KeyboardInterrupt where Python would, if Ctrl-C came then: as a function begins, or behind a call of C.

    at: how many such places of this thread are passed before. num_left: what is left of them at the end.
    """

    def __init__(self, at: int) -> None:
        self.num_left = at

    def __enter__(self) -> Self:
        sys.setprofile(self._pass)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _pass(self, frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_return"):
            self.num_left -= 1
            if self.num_left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def num_at_once(loop: Loop) -> int:
    """How many commands a loop does at the same time, which should be one; it gives a second one some time to begin."""
    now, second, found = list[None](), threading.Event(), SimpleQueue[int]()

    def work() -> None:
        now.append(None)
        if len(now) > 1:
            second.set()
        second.wait(0.01)
        found.put(len(now))
        now.pop()

    for _ in range(2):
        loop._post(work)
    return max(found.get(timeout=TIMEOUT_S / 4) for _ in range(2))


@pytest.mark.once("no request runs")
@pytest.mark.parametrize("is_running", [True, False])
def test_one_thread_steps_wherever_an_interrupt_meets_a_call(is_running: bool) -> None:
    """Inside of threading, too: up to Python 3.12 is_alive() calls a running thread ended where Ctrl-C meets it."""
    engine, at = LLM("shipped", draft="none").engine, 0
    loop = Loop(engine)
    interrupted = True
    while interrupted:
        if not is_running:
            loop = Loop(engine)
        elif at == 0:
            loop.call(list)
        try:
            with Interrupts(at) as interrupts:
                loop.call(list)
        except (KeyboardInterrupt, RuntimeError):  # the latter of Python's Condition, which an interrupt unlocks twice
            pass
        interrupted, at = interrupts.num_left < 0, at + 1
        assert num_at_once(loop) == 1
        if not is_running:
            loop.close()
            assert not loop._stepping.locked()
    loop.close()
    assert at > 5


@pytest.mark.once("no request runs")
def test_a_call_is_not_lost_to_a_loop_that_is_closing() -> None:
    loop, closing_too, go_on = Loop(LLM("shipped", draft="none").engine), SimpleQueue[bool](), threading.Event()
    loop._post(lambda: go_on.wait(TIMEOUT_S))
    closer = threading.Thread(target=loop.close, daemon=True)
    closer.start()
    wait_for(lambda: not loop._commands.empty())
    loop._post(lambda: closing_too.put(True))
    go_on.set()
    assert closing_too.get(timeout=TIMEOUT_S / 4)
    closer.join(TIMEOUT_S / 4)
    assert not closer.is_alive()


def test_a_step_that_fails_ends_its_requests_with_the_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate(PROMPTS[0], params())[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "forward", lambda runs: 1 // 0)
        with pytest.raises(InternalError, match=r"prompt 1: the step failed: ZeroDivisionError"):
            llm.generate(PROMPTS[:2], params())
        assert "the step failed" in refusal(InternalError, within_time, collect(llm, PROMPTS[0]))
    assert_idle(llm)
    assert llm.generate(PROMPTS[0], params())[0].token_ids == expected


def test_a_request_that_cannot_be_admitted_ends_with_the_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails of what an admission opens: none waits for ever, and the cache is whole."""
    expected = llm.generate(PROMPTS[0], params())[0].token_ids
    cache, drafter = llm.engine.runner.cache, llm.engine.drafter
    for owner, name in ((cache, "open"), (drafter, "resumes_from"), (drafter, "begin")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *given: 1 // 0)
            assert "the step failed: ZeroDivisionError" in refusal(InternalError, within_time, collect(llm, PROMPTS[0]))
        assert_idle(llm)
    assert llm.generate(PROMPTS[0], params())[0].token_ids == expected


def in_a_child(work: Callable[[], str]) -> str:
    """What `work` says, or the error that it raises, in a child of fork."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    assert select.select([read], [], [], TIMEOUT_S)[0], "the child hangs"
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.wait()
    return said


@needs_native
def test_a_child_of_fork_goes_on_where_no_step_ran(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], params())[0].text
    wait_for(lambda: not llm._loop._is_busy)  # an answer is there a moment before its step has ended
    assert in_a_child(lambda: llm.generate(PROMPTS[0], params())[0].text) == expected
    assert llm.generate(PROMPTS[0], params())[0].text == expected


@needs_native
def test_a_child_of_fork_says_where_a_step_ran(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], params(100))
    first = next(stream)
    said = in_a_child(lambda: llm.generate(PROMPTS[1], params())[0].text)
    assert said.startswith("BadOption: this process was forked while its parent's engine was running requests")
    assert sum(len(chunk.token_ids) for chunk in (first, *stream)) == 100


@pytest.mark.once("an LLM of its own")
def test_an_llm_that_is_dropped_takes_its_thread_along() -> None:
    llm = LLM("shipped", **llm_options())
    llm.generate(PROMPTS[0], params(4))
    thread, engine = llm._loop._thread, weakref.ref(llm.engine)
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    gc.collect()
    assert engine() is None


@pytest.mark.once("an LLM of its own")
def test_a_program_that_ends_while_requests_run_ends_quietly() -> None:
    program = "from forerun import LLM; LLM('shipped', draft='lookup').submit('x = 1')"
    done = processes.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_row_of_no_numbers_ends_its_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is the largest logit that is asked for, or the whole row."""
    wanted = [SamplingParams(max_tokens=24, temperature=0, ignore_eos=True), params(24)]
    expected = [llm.generate(PROMPTS[0], param)[0].token_ids for param in wanted]
    for bad in wanted:
        requests = llm.engine.make(llm.tokenizer.encode(PROMPTS[2]), bad)
        broken, forward = requests[0].seq.id, llm.engine.runner.forward

        def spoiled(runs: Any, broken: int = broken, forward: Any = forward) -> Any:
            scores = forward(runs)
            for b, run in enumerate(runs):
                if run.slot == broken and run.logits != "none":
                    if scores.best[b]:
                        scores.best[b][:] = [NO_NUMBERS] * len(scores.best[b])
                    else:
                        scores.logits[b][:] = float("nan")
            return scores

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "forward", spoiled)
            llm._loop.add(requests)
            assert [llm.generate(PROMPTS[0], param)[0].token_ids for param in wanted] == expected
        llm._loop.call(lambda: None)
        assert requests[0].seq.finish_reason == "abort"
        assert isinstance(requests[0].error, InternalError)
        assert "logits that are no numbers" in str(requests[0].error)


@pytest.mark.parametrize("method", ["observe", "end"])
def test_each_caller_hears_of_the_end_where_a_step_fails_late(
    llm: LLM, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the commit that ends one of two requests, or while that one's place is given back."""
    wanted = [params(1), params(40)]
    expected, ended = llm.generate(PROMPTS[:2], wanted), SimpleQueue[Request]()
    right = getattr(llm.engine.pacing, method)

    def fail_once(given: Any) -> None:
        if method == "end" or given.num_committed:
            monkeypatch.undo()
            raise ZeroDivisionError
        right(given)

    monkeypatch.setattr(llm.engine.pacing, method, fail_once)
    requests = llm.submit(PROMPTS[:2], wanted, hear=lambda request: request.seq.finish_reason and ended.put(request))
    assert {ended.get(timeout=TIMEOUT_S / 4) for _ in requests} == set(requests)
    whole, cut = requests
    assert (whole.error, whole.output().token_ids) == (None, expected[0].token_ids)
    assert "the step failed: ZeroDivisionError" in str(cut.error)
    assert [out.token_ids for out in llm.generate(PROMPTS[:2], wanted)] == [out.token_ids for out in expected]


@pytest.mark.drafter_fails
@pytest.mark.speculation("fixed")
@pytest.mark.parametrize("method", ["begin", "propose", "observe", "catch_up", "end", "free_tokens"])
def test_a_drafter_that_fails_is_done_without(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [out.token_ids for out in LLM("shipped", draft="none").generate(PROMPTS, params())]
    llm = LLM("shipped", **llm_options())
    llm.generate(PROMPTS[0], params())
    monkeypatch.setattr(llm.engine.drafter.first, method, lambda *args: 1 // 0)
    with caplog.at_level(logging.ERROR):
        assert [out.token_ids for out in llm.generate(PROMPTS, params())] == expected
        assert [out.token_ids for out in llm.generate(PROMPTS, params())] == expected
    (record,) = caplog.records
    assert "failed and is not asked again: its requests are decoded plainly" in record.message
    assert_idle(llm)


@pytest.mark.speculation("fixed")
@pytest.mark.parametrize("method", ["begin", "propose", "observe", "catch_up"])
def test_a_drafter_that_does_not_suit_a_request_serves_the_next(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it refuses is decoded plainly, and nothing is kept of it."""
    llm = LLM("shipped", **llm_options())
    drafter = llm.engine.drafter.first
    (expected,) = llm.generate(PROMPTS[0], params())

    def refuse(*_: object) -> None:
        raise BadOption("not this one")

    with monkeypatch.context() as refusing, caplog.at_level(logging.WARNING):
        refusing.setattr(drafter, method, refuse)
        (refused,) = llm.generate(PROMPTS[0], params())
    assert refused.token_ids == expected.token_ids
    assert refused.report.num_drafted <= expected.report.num_drafted
    assert "is decoded plainly: the drafter 'model' does not suit it (not this one)" in caplog.text
    assert llm.engine.drafter.first is drafter
    assert llm.generate(PROMPTS[0], params())[0].report.num_drafted == expected.report.num_drafted > 0
    assert_idle(llm)


@pytest.mark.drafter_fails
@pytest.mark.speculation("fixed")
def test_a_drafter_that_takes_more_than_it_was_granted_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM("shipped", **llm_options())
    expected, propose = llm.generate(PROMPTS[0], params())[0].token_ids, llm.engine.drafter.first.propose

    def greedy(seqs: Any, budget: Budget, coins: Any) -> Draft:
        return propose(seqs, Budget([most + 1 for most in budget.num_tokens], budget.catchup_tokens), coins)

    monkeypatch.setattr(llm.engine.drafter.first, "propose", greedy)
    with caplog.at_level(logging.ERROR):
        assert llm.generate(PROMPTS[0], params())[0].token_ids == expected
    (record,) = caplog.records
    assert "drafted more nodes than" in str(record.exc_info[1])
    assert_idle(llm)
