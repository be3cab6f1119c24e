"""How prompts share what a step may read of them: the shortest rest first, and the first in rank always goes on."""

import pytest

from engine.load import MODEL, alone, at_work, engine_with, heard, plain, run, take_steps
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.scheduler import OVERTAKING_TOKENS

pytestmark = pytest.mark.once("about prompts; each request is decoded plainly")


def read(engine: Engine, *requests: Request) -> list[int]:
    """How much of each one's prompt is in the cache."""
    return [engine.runner.cache.length(request.seq.id) for request in requests]


def steps(engine: Engine, num: int, *requests: Request) -> list[list[int]]:
    """What is read of each prompt, step by step."""
    made = []
    for _ in range(num):
        before = read(engine, *requests)
        engine.step()
        made.append([now - had for now, had in zip(read(engine, *requests), before, strict=True)])
    return made


def test_the_shortest_rest_goes_first_and_the_first_in_rank_is_owed_a_token_for_three() -> None:
    engine = engine_with(prefill_chunk_tokens=16)
    wanted = [([i] * length, plain()) for i, length in enumerate((110, 101, 61))]
    long, other, short = (engine.add(*one) for one in wanted)
    assert OVERTAKING_TOKENS == 3
    # 16 / 3 = 5.33 are owed then, and 5 are given; 0.33 + 11 / 3 = 4, and so on. Where the short one ends, 3 are left.
    assert steps(engine, 5, long, other, short) == [[0, 0, 16], [5, 0, 11], [4, 0, 12], [4, 0, 12], [4, 0, 9]]
    assert run(engine, [long, other, short]) == alone(wanted)


def test_nobody_starves_behind_newcomers_however_many_come() -> None:
    """One of 12 tokens comes with each step, all that a step may read."""
    engine, newcomers = engine_with(4096, prefill_chunk_tokens=12, max_batch_size=100), list[Request]()
    long = engine.add([1] * 61, plain())
    num_steps = 0
    while not long.report.num_steps:
        newcomers.append(engine.add([2 + num_steps % 9] * 12, plain(1)))
        engine.step()
        num_steps += 1
    assert num_steps == pytest.approx(60 / (12 / (1 + OVERTAKING_TOKENS)), abs=4)
    run(engine, [long, *newcomers])


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 7])
def test_both_go_on_however_little_a_step_may_read(budget: int) -> None:
    engine = engine_with(prefill_chunk_tokens=budget)
    long, short = engine.add([1] * 100, plain()), engine.add([2] * 30, plain())
    at_work(engine, short)
    assert 29 // OVERTAKING_TOKENS - 1 <= read(engine, long)[0] <= 29 // OVERTAKING_TOKENS + budget


def test_a_newcomer_is_not_held_up_by_what_is_read_beside_it() -> None:
    """A step might read 64 tokens, and nobody streams: it reads the newcomer's 11, for whose first token it is."""
    engine = engine_with(prefill_chunk_tokens=64)
    reports = heard(engine)
    long = engine.add([1] * 120, plain())
    engine.step()
    short = engine.add([2] * 12, plain(4))
    take_steps(engine, 2)
    assert [report.num_prefill_tokens for report in reports] == [64, 11, 119 - 64]
    assert (short.report.num_steps, reports[2].num_decoding) == (1, 1)
    run(engine, [long, short])


def test_priorities_still_rank() -> None:
    """A short prompt waits for a long one of a better priority, which it leaves what that cannot use."""
    engine = engine_with(prefill_chunk_tokens=16)
    short, long = engine.add([1] * 9, plain(priority=1)), engine.add([2] * 41, plain())
    assert steps(engine, 3, long, short) == [[16, 0], [16, 0], [8, 8]]
    run(engine, [short, long])


def test_of_a_prompt_whose_tokens_are_scored_a_step_reads_32_and_others_have_the_rest() -> None:
    engine = engine_with(prefill_chunk_tokens=64)
    scored, other = engine.add([1] * 81, plain(prompt_logprobs=0)), engine.add([2] * 101, plain())
    assert steps(engine, 3, scored, other) == [[32, 32], [32, 32], [16, 36]]
    assert len(scored.seq.prompt_logprobs) == 81
    assert None not in scored.seq.prompt_logprobs[1:]
    run(engine, [scored, other])


def test_one_that_has_all_that_it_may_have_is_owed_nothing() -> None:
    """Else what others read beside a scored prompt would let it stop newcomers for long."""
    engine = engine_with(4096, prefill_chunk_tokens=200, max_seq_len=500)
    scored, other = engine.add([1] * 180, plain(prompt_logprobs=0)), engine.add([2] * 450, plain())
    assert steps(engine, 2, scored, other) == [[32, 168], [32, 168]]
    engine.scheduler.prefill_chunk_tokens = 16
    newcomer = engine.add([3] * 17, plain(1))
    assert steps(engine, 1, scored, newcomer) == [[0, 16]]
    run(engine, [scored, other, newcomer])


def test_beams_and_streams_of_drafters_have_their_rows_beside_prompts() -> None:
    """A pass of 16 rows: three beams and a stream decode, and what is left is shared."""
    engine = engine_with(max_num_batched_tokens=16, prefill_chunk_tokens=16)
    search = engine.add_all([1] * 5, plain(20, num_beams=3))[0].searcher
    stream = engine.add([2] * 5, plain(20))
    while not (stream.report.num_steps and search.report.num_steps > 1):
        engine.step()
    reports = heard(engine)
    long, short = engine.add([3] * 60, plain()), engine.add([4] * 30, plain())
    assert steps(engine, 2, long, short) == [[0, 12], [4, 8]]
    assert [report.num_rows for report in reports] == [16, 16]
    run(engine, [search, stream, long, short])
    assert MODEL is engine.runner.model
