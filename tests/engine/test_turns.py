"""Engines of one process take turns, and a prompt of one is cut by what the streams of another can bear."""

import os
import random
import signal
import threading

import pytest

from engine.load import alone, engine_with, plain, run, wait_for
from forerun.engine.engine import Engine
from forerun.engine.fair import FIRST_TOKENS, LEAST_STEPS, LEAST_TOKENS, QUIET_S, QUIET_STEPS, Fair
from forerun.engine.turns import LAST_TURNS, Seat, Turns, turns_on
from forerun.types import StepReport

pytestmark = pytest.mark.once("about time, which no drafter changes")

# Seconds of a step of the engine that streams, of one of the engine that reads, and of each of its tokens.
STREAM_S, READER_S, TOKEN_S = 0.040, 0.010, 0.001


def decoded(seconds: float, num: int = 1) -> StepReport:
    return StepReport(num_decoding=num, score_s=seconds)


def chunk(num_tokens: int, num_before: int = 0, *, token_s: float = TOKEN_S, pass_s: float = 0.0) -> StepReport:
    """A step in which nothing decodes."""
    keys = num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
    return StepReport(num_prefill_tokens=num_tokens, num_prefill_keys=keys, score_s=pass_s + num_tokens * token_s)


def step(fair: Fair, num_decoding: int, report: StepReport, *, is_reading: bool = False) -> None:
    """Let an engine have a turn."""
    with fair.turn():
        fair.plan(num_decoding, is_reading=is_reading)
        fair.observe(report)


def allowed(fair: Fair, num_before: int = 0, most: int = 512) -> int:
    """Tokens of a prompt of an engine in which nothing decodes."""
    with fair.turn():
        fair.plan(0, is_reading=True)
        return fair.allowance(most).fitting(num_before)


def two(stretch: float | None = 3.0, max_itl_s: float | None = None) -> tuple[Fair, Fair]:
    """One that streams, with what it promises, and one that knows what its own steps and tokens take."""
    turns = Turns()
    stream, reader = Fair(stretch, max_itl_s, turns), Fair(3.0, None, turns)
    step(reader, 1, decoded(READER_S))
    step(stream, 1, decoded(STREAM_S))
    for _ in range(9):
        step(reader, 0, chunk(10), is_reading=True)
        step(stream, 1, decoded(STREAM_S))
    return stream, reader


# ------------------------------------------------------------------------------------------- what streams can bear


def test_a_prompt_is_cut_by_what_the_streams_of_another_engine_can_bear() -> None:
    """Steps of 40 ms may take 120: of the 80 that are left, 80 % are aimed at, and a token takes 1."""
    for stretch, max_itl_s, wanted in ((3.0, None, 64), (2.0, None, 32), (3.0, 0.060, 16), (None, 0.060, 16)):
        _stream, reader = two(stretch, max_itl_s)
        assert allowed(reader) == pytest.approx(wanted, abs=1)


def test_engines_that_read_share_what_streams_can_bear() -> None:
    stream, reader = two()
    third = Fair(3.0, None, stream._turns)
    step(third, 0, chunk(10), is_reading=True)
    assert allowed(reader) == pytest.approx(32, abs=1)


def test_engines_that_stream_have_a_step_each_in_a_round() -> None:
    """Gaps of 40 + 20 ms may be 180: 120 are left for the prompt."""
    stream, reader = two()
    other = Fair(3.0, None, stream._turns)
    with other.turn():
        other.plan(1, is_reading=False)
    assert allowed(reader) == FIRST_TOKENS, "how long the steps of one are is not known yet"
    step(other, 1, decoded(0.020))
    step(other, 1, decoded(0.020))
    assert allowed(reader) == pytest.approx(96, abs=1)


def test_where_nobody_streams_a_step_takes_as_long_as_a_few() -> None:
    """For a newcomer waits for it; where those are short, as long as nobody notices."""
    stream, reader = two()
    step(stream, 0, chunk(5))
    assert allowed(reader) == FIRST_TOKENS, "passes of another size"
    step(reader, 0, chunk(100), is_reading=True)
    assert allowed(reader) == pytest.approx(1e3 * max(QUIET_STEPS * READER_S, QUIET_S), abs=1)
    quick = Fair(3.0)
    step(quick, 1, decoded(0.001))
    step(quick, 0, chunk(100))
    assert allowed(quick) == pytest.approx(1e3 * QUIET_S, abs=1)
    for unknown in (Fair(3.0), Fair(None)):
        step(unknown, 0, chunk(100))
        assert allowed(unknown) == 512, "how long a step is, or nothing was promised"


def test_a_newcomer_does_not_wait_for_as_long_as_long_drafts_take() -> None:
    """Of a text that repeats itself a step has a dozen rows and more: ten times as long as those before."""
    fair = Fair(3.0)
    for seconds in (READER_S, 10 * READER_S):
        for _ in range(20):
            step(fair, 1, decoded(seconds))
    step(fair, 0, chunk(100))
    assert allowed(fair) == pytest.approx(1e3 * max(QUIET_STEPS * READER_S, QUIET_S), abs=1)


def test_who_promised_nothing_keeps_to_what_others_did() -> None:
    stream, _ = two()
    other = Fair(None, None, stream._turns)
    assert allowed(other) == FIRST_TOKENS
    for _ in range(9):
        step(other, 0, chunk(10), is_reading=True)
        step(stream, 1, decoded(STREAM_S))
    assert allowed(other) == pytest.approx(64, abs=1)
    step(stream, 0, chunk(5))
    assert allowed(other) == 512


def test_a_large_model_reads_a_few_tokens_in_the_pass_that_it_makes_anyway() -> None:
    """Its pass takes longer than the stream of a small one allows: one token would not make it much shorter."""
    stream, reader = two()
    for _ in range(9):
        step(reader, 1, decoded(5 * STREAM_S))
    step(stream, 1, decoded(STREAM_S))
    assert allowed(reader) == pytest.approx(0.8 * LEAST_STEPS * 5 * STREAM_S / TOKEN_S, abs=1)
    for _ in range(9):
        step(stream, 1, decoded(STREAM_S))
        step(reader, 0, chunk(1, token_s=9.0), is_reading=True)
    assert allowed(reader) == LEAST_TOKENS


def test_an_engine_that_steps_no_more_is_not_waited_for() -> None:
    """Its thread has ended, or a listener keeps it: nobody knows when it goes on."""
    stream, reader = two()
    for _ in range(LAST_TURNS - 1):
        assert allowed(reader) == pytest.approx(64, abs=1)
    assert allowed(reader) == FIRST_TOKENS, "those of a step in which nobody streams"
    step(stream, 1, decoded(STREAM_S))
    assert allowed(reader) == pytest.approx(64, abs=1)


def test_an_engine_that_is_gone_leaves_no_seat() -> None:
    stream, reader = two()
    turns = stream._turns
    assert len(turns.beside(reader.seat)) == 1
    del stream
    assert turns.beside(reader.seat) == []


@pytest.mark.parametrize(("noise", "pauses"), [(0.02, 0.0), (0.1, 0.0), (0.05, 0.001)])
def test_the_promise_holds_for_99_of_100_gaps_beside_another_engine(noise: float, pauses: float) -> None:
    """A simulated machine: a 1.5 B model streams, a 0.5 B model reads 6,000 tokens; they take turns."""
    chance, turns = random.Random(7), Turns()
    stream, reader = Fair(3.0, None, turns), Fair(3.0, None, turns)

    def noisy(s: float) -> float:
        return s * chance.lognormvariate(0, noise) * (3 if chance.random() < pauses else 1)

    step(reader, 1, decoded(0.013))
    gaps, done = list[float](), 0
    for _ in range(20):
        step(stream, 1, decoded(noisy(0.033)))
    while done < 6_000:
        num = min(allowed(reader, done), 6_000 - done)
        took_s = noisy(0.009 + num * (1.4e-3 + 5e-7 * (done + num / 2)) + 5e-7 * done)
        reader.observe(chunk(num, done, token_s=took_s / num))
        done += num
        own_s = noisy(0.033)
        step(stream, 1, decoded(own_s))
        gaps.append(took_s + own_s)
    assert sum(gap > 3 * 0.033 for gap in gaps) <= 0.01 * len(gaps)
    assert sum(gaps) < 2.5 * sum(1.4e-3 + 5e-7 * at for at in range(6_000))


# ----------------------------------------------------------------------------------------------------- whole engines


def test_a_stream_of_one_engine_cuts_the_prompt_of_another_and_the_texts_are_the_same() -> None:
    turns = Turns()
    streams, reads = (engine_with(turns=turns, prefill_stretch=3.0) for _ in range(2))
    teach(reads.scheduler.fair, streams.scheduler.fair)
    chunks = list[int]()
    reads.listen(lambda report: chunks.append(report.num_prefill_tokens))
    stream = streams.add([1, 2], plain(60))
    prompt = [i % 9 for i in range(100)]
    streams.step()
    streams.step()
    teach(reads.scheduler.fair, streams.scheduler.fair)
    reader = reads.add(prompt, plain(3))
    while reader.seq.finish_reason is None:
        reads.step()
        streams.step()
        teach(reads.scheduler.fair, streams.scheduler.fair)
    assert max(chunks) == pytest.approx(0.8 * 2 * STREAM_S / (2 * TOKEN_S), abs=1)
    streams.abort(stream)
    run(reads, [reads.add(prompt[::-1], plain(3))])
    assert max(chunks) == 99, "nobody streams any more"
    assert [reader.seq.output_ids] == alone([(prompt, plain(3))])


def teach(reader: Fair, stream: Fair) -> None:
    """Let engines of a few thousand weights count as those of the simulated machine."""
    for _ in range(9):
        stream.observe(decoded(STREAM_S))
        reader.observe(decoded(READER_S))
        reader._apart.observe(20, 210, 20 * 2 * TOKEN_S)
        reader._quiet.observe(99, 4950, 20 * TOKEN_S)


# ------------------------------------------------------------------------------------------------------------- turns


def test_who_asked_first_has_the_next_turn() -> None:
    """And nobody has two in a row while others wait, which a lock of the system may give."""
    turns, had, threads = Turns(), list[int](), list[threading.Thread]()

    def one(number: int, times: int) -> None:
        seat = turns.join(Seat(None, None))
        for _ in range(times):
            with turns.turn(seat):
                had.append(number)

    with turns.turn(turns.join(Seat(None, None))):
        for number in range(4):
            threads.append(threading.Thread(target=one, args=(number, 1)))
            threads[-1].start()
            wait_for(lambda number=number: len(turns._waiting) == number + 1)  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert had == [0, 1, 2, 3]


def test_whoever_gives_up_waiting_keeps_nobody_from_the_next_turn() -> None:
    turns = Turns()
    seat = turns.join(Seat(None, None))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        holds, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            with turns.turn(seat):
                holds.set()
                may_end.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        holds.wait()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt), turns.turn(seat):
            raise AssertionError("another has the turn")
        assert not turns._waiting
        may_end.set()
        thread.join()
        with turns.turn(seat):
            pass
    finally:
        signal.signal(signal.SIGALRM, before)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_child_of_fork_has_turns_whoever_had_one_in_its_parent() -> None:
    turns = turns_on("cpu")
    seat = turns.join(Seat(None, None))
    with turns.turn(seat):
        if (child := os.fork()) == 0:
            signal.alarm(10)
            with turns.turn(seat):
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_on_a_gpu_nobody_waits_for_a_turn() -> None:
    assert turns_on("cpu") is turns_on("cpu")
    turns = turns_on("cuda")
    one, other = (turns.join(Seat(None, None)) for _ in range(2))
    with turns.turn(one), turns.turn(other):
        assert turns.beside(one) == [other]


def test_listeners_hear_outside_of_the_turn() -> None:
    """One of them may wait for another engine."""
    turns = Turns()
    engine, other = (engine_with(turns=turns) for _ in range(2))
    heard = list[Engine]()

    def hear(report: StepReport) -> None:
        run(other, [other.add([1, 2], plain(2))])
        heard.append(engine)

    engine.listen(hear)
    run(engine, [engine.add([3, 4], plain(2))])
    assert len(heard) > 1
