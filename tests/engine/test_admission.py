"""Which requests are admitted, wait, or are preempted, in caches that are just too small for them."""

import random

import pytest

from engine.load import MODEL, alone, at_work, caches, check, engine_with, greedy, run, runner_with, take_steps
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.types import SamplingParams
from support import VOCAB, rounds_of


def waits_for(engine: Engine, waiting: Request, running: Request) -> None:
    """Step until `running` has finished, and then `waiting`, which has not begun before; neither is preempted."""
    while running.seq.finish_reason is None:
        assert waiting in engine.scheduler.waiting
        engine.step()
        check(engine)
    run(engine, [waiting])
    assert engine.scheduler.num_preemptions == 0


# ------------------------------------------------------------------------------------------------- by what is free


def test_a_prompt_without_room_waits() -> None:
    engine = engine_with(128)
    first, second = engine.add([1] * 60, greedy(30)), engine.add([2] * 90, greedy(20))
    engine.step()
    waits_for(engine, second, first)


def test_a_request_that_would_soon_be_preempted_is_not_admitted() -> None:
    """The running one has filled two of four blocks and will need the others; a prompt of two would fit for now."""
    engine = engine_with(64, prefix_caching=False)
    first, second = engine.add([1] * 30, greedy(30)), engine.add([2] * 30, greedy(2))
    engine.step()
    waits_for(engine, second, first)


def test_a_prompt_that_is_still_being_read_keeps_its_room() -> None:
    """It has one block by now; the four that it will need are not given to another request."""
    engine = engine_with(128, prefill_chunk_tokens=8, prefix_caching=False)
    first = engine.add([1] * 70, greedy(10))
    engine.step()
    waits_for(engine, engine.add([2] * 60, greedy(4)), first)


@pytest.mark.once("about plain decoding")
@pytest.mark.parametrize(("num_tokens", "chunk", "seed"), [(80, 3, 0), (96, 2, 1), (112, 1, 6), (112, 1, 10)])
def test_small_chunks_in_little_memory_never_take_the_block_that_a_decoding_request_needs(
    num_tokens: int, chunk: int, seed: int
) -> None:
    """A pass that reserves more than there is would fail; and no request waits for ever."""
    random_ = random.Random(seed)
    engine = engine_with(num_tokens, prefill_chunk_tokens=chunk, prefix_caching=False)
    lengths = [random_.choice((2, 3, 30, 45)) for _ in range(10)]
    wanted = [([random_.randrange(VOCAB)] * length, greedy(80 - length, draft="none")) for length in lengths]
    requests: list[Request] = []
    while len(requests) < len(wanted) or any(request.seq.finish_reason is None for request in requests):
        if len(requests) < len(wanted) and random_.random() < 0.2:
            requests.append(engine.add(*wanted[len(requests)]))
        engine.step()
        check(engine)
    assert [request.seq.output_ids for request in requests] == alone(wanted)


def test_prompts_that_block_each_other_do_not_wait_for_ever() -> None:
    """One has read a part, the other found a part, and what is free shrinks to nothing: the later one goes."""
    engine = engine_with(192, prefill_chunk_tokens=16)
    run(engine, [engine.add([2] * 50, greedy(3))])
    wanted = [([1] * 60, greedy(3)), ([2] * 90, greedy(3))]
    first, second = (engine.add(*one) for one in wanted)
    take_steps(engine, 2)
    assert [engine.runner.cache.length(r.seq.id) for r in engine.scheduler.running] == [5, 48 + 16 + 11]
    cache = engine.runner.cache
    cache.open(-1)
    cache.reserve(-1, cache.free_tokens())
    take_steps(engine, 20)
    assert first.seq.finish_reason is not None
    cache.release(-1)
    assert run(engine, [first, second]) == alone(wanted)


def test_a_prompt_that_is_only_read_needs_no_room_behind_it() -> None:
    """Of 128 tokens one has 64 and the other 64 but one; a token more of either would need a block more."""
    engine = engine_with(128, prefill_chunk_tokens=8, prefix_caching=False)
    requests = [engine.add([number] * 65, greedy(0)) for number in (1, 2)]
    engine.step()
    assert engine.scheduler.running == requests
    for _ in range(20):
        engine.step()
        check(engine)
    assert [request.seq.finish_reason for request in requests] == ["length"] * 2
    assert engine.scheduler.num_preemptions == 0


def test_a_prompt_that_is_read_drives_nobody_out() -> None:
    """It ends with its step, whatever room there is: the last token of the cached one needs no row."""
    engine = engine_with(64, prefill_chunk_tokens=16)
    run(engine, [engine.add([1] * 49, greedy(0))])
    first, second = engine.add([1] * 49, greedy(0)), engine.add([1] * 49, greedy(3))
    take_steps(engine, 8)
    assert (first.seq.finish_reason, second.seq.finish_reason) == ("length", "length")
    assert engine.scheduler.num_preemptions == 0


# --------------------------------------------------------------------------------------------------------- by rank


def test_priorities_order_the_queue() -> None:
    """No request is preempted: a place becomes free, and the best of the waiting requests takes it."""
    engine = engine_with(max_batch_size=1)
    first = engine.add([9], greedy(30, priority=-5))
    engine.step()
    requests = [engine.add([i + 1], greedy(3, priority=priority)) for i, priority in enumerate((2, 1, 0, 1, -1))]
    order: list[Request] = []
    while len(order) < 6:
        order += engine.step()
    assert order == [first, *(requests[i] for i in (4, 2, 1, 3, 0))]
    assert engine.scheduler.num_preemptions == 0


def test_the_worst_priority_has_to_go_even_if_it_came_first() -> None:
    engine = engine_with(96, prefix_caching=False)
    worse, better = engine.add([1] * 20, greedy(50, priority=1)), engine.add([2] * 20, greedy(50))
    assert run(engine, [worse, better]) == alone([([1] * 20, greedy(50)), ([2] * 20, greedy(50))])
    assert worse.report.num_preemptions > 0
    assert better.report.num_preemptions == 0


def test_an_urgent_request_takes_the_place_of_the_worst_one_alone() -> None:
    engine = engine_with(max_batch_size=2)
    good, bad = engine.add([1], greedy(20)), engine.add([2], greedy(20, priority=1))
    take_steps(engine, 2)
    urgent = engine.add([3], greedy(20, priority=-1))
    engine.step()
    assert engine.scheduler.running == [urgent, good]
    assert engine.scheduler.waiting == [bad]
    run(engine, [good, bad, urgent])
    assert [r.report.num_preemptions for r in (good, bad, urgent)] == [0, 1, 0]


def test_no_more_have_to_go_than_an_urgent_request_needs() -> None:
    """The last in rank had most of its prompt to come: what was promised to it is free again when it has gone."""
    engine = engine_with(208, max_batch_size=3, prefill_chunk_tokens=16, prefix_caching=False)
    running = [engine.add([i + 1] * 20, greedy(20, draft="none")) for i in range(2)]
    at_work(engine, *running)
    last = engine.add([3] * 100, greedy(5))
    engine.step()
    assert last in engine.scheduler.running
    engine.add([4] * 20, greedy(5, priority=-1))
    engine.step()
    assert [r.report.num_preemptions for r in (*running, last)] == [0, 0, 1]


def test_a_preempted_request_goes_back_to_its_rank() -> None:
    engine = engine_with(max_batch_size=1)
    late = engine.add([1, 2], greedy(20, priority=1))
    take_steps(engine, 2)
    others = [engine.add([3, 4], greedy(5, priority=-1)), engine.add([5, 6], greedy(5))]
    order: list[Request] = []
    while len(order) < 3:
        order += engine.step()
        check(engine)
    assert order == [*others, late]
    assert [r.report.num_preemptions for r in (late, *others)] == [1, 0, 0]


def test_prompts_are_read_first_come_first_served() -> None:
    engine = engine_with(prefill_chunk_tokens=16)
    first, second = engine.add([1] * 64, greedy(2)), engine.add([2] * 64, greedy(2))
    while not first.report.num_steps:
        assert engine.runner.cache.length(second.seq.id) <= 16
        engine.step()


# ------------------------------------------------------------------------------------------------- shared prompts


def test_an_output_that_waits_for_its_prompt_holds_no_request_up() -> None:
    engine = engine_with(prefill_chunk_tokens=16)
    leader, follower = engine.add_all([i % 9 for i in range(60)], greedy(4, n=2))
    other = engine.add([1, 2], greedy(4))
    engine.step()
    assert engine.scheduler.running == [leader, other]
    assert engine.scheduler.waiting == [follower]
    run(engine, [leader, follower, other])
    assert follower.report.num_cached_tokens == 48


@pytest.mark.parametrize("end", ["abort", "error"])
def test_outputs_of_a_prompt_whose_first_one_ended_early_go_on(end: str) -> None:
    engine = engine_with(prefill_chunk_tokens=16)
    leader, *others = engine.add_all([i % 9 for i in range(60)], greedy(4, n=3))
    engine.step()
    if end == "abort":
        engine.abort(leader)
    else:
        leader.seq.bad_word_ids = tuple((i,) for i in range(VOCAB))
    run(engine, [leader, *others])
    assert leader.seq.finish_reason == "abort"
    assert [len(request.seq.output_ids) for request in others] == [4, 4]


def test_what_a_request_left_when_it_was_stopped_in_its_prompt_is_found() -> None:
    engine = engine_with(prefill_chunk_tokens=16)
    prompt = [i % 9 for i in range(60)]
    first = engine.add(prompt, greedy(4))
    take_steps(engine, 2)
    engine.abort(first)
    run(engine, [again := engine.add(prompt, greedy(4))])
    assert again.report.num_cached_tokens == 32


def test_what_is_found_when_a_request_comes_back_is_not_counted_as_its_prompt() -> None:
    engine = engine_with(160, max_batch_size=1)
    late = engine.add([i % 7 for i in range(40)], greedy(20, priority=1))
    while late.seq.num_output_tokens < 4:
        engine.step()
    run(engine, [late, engine.add([1, 2], greedy(2))])
    assert late.report.num_preemptions == 1
    assert engine.runner.cache.prefix_hit_tokens > 0
    assert late.report.num_cached_tokens == 0


def test_the_cache_of_the_draft_model_shares_by_the_same_rules() -> None:
    """What it finds under a salt, without one, under another, and with sharing switched off."""
    engine, prompt = engine_with(policy="fixed"), list(range(40))
    cache = engine.drafter.members["model"].runner.cache  # type: ignore[attr-defined]
    hits = []
    for salt in ("a", "b", "a", None, None):
        before = cache.prefix_hit_tokens
        run(engine, [engine.add(prompt, greedy(4, cache_salt=salt, draft="model"))])
        hits.append(cache.prefix_hit_tokens - before)
    assert hits == [0, 0, 32, 0, 32]
    engine = engine_with(policy="fixed", prefix_caching=False)
    for _ in range(2):
        run(engine, [engine.add(prompt, greedy(4, draft="model"))])
    assert [c.prefix_hit_tokens for c in caches(engine)] == [0, 0]


@pytest.mark.once("about drafts of a fixed length")
def test_drafted_tokens_are_never_published() -> None:
    """Whatever was drafted and rejected is found in neither cache behind the tokens that were committed."""
    engine = engine_with(spec_length=20)
    rounds = rounds_of(engine)
    requests = [engine.add([i, i + 1, i + 2], SamplingParams(max_tokens=100, seed=i)) for i in range(4)]
    run(engine, requests)
    tokens = {request.seq.id: request.seq.tokens for request in requests}
    num_longer = 0
    for r in rounds:
        committed = tokens[r.sequence_id]
        drafted = [*committed[: r.position], *r.tokens, 0]
        same = next((i for i, (a, b) in enumerate(zip(drafted, committed, strict=False)) if a != b), len(committed))
        num_longer += len(drafted) // 16 > same // 16
        for cache in caches(engine):
            assert cache.open(-1, drafted) <= same
            cache.release(-1)
    assert num_longer > 10, "no draft went on into another block, so nothing was tested"


def test_a_full_cache_takes_a_request_as_long_as_itself() -> None:
    """The last block is used up to its last token, drafts or not."""
    engine = engine_with(48, prefix_caching=False)
    (output,) = run(engine, [engine.add([1, 2, 3], greedy(45))])
    assert [output] == alone([([1, 2, 3], greedy(45))])
    assert runner_with(MODEL, 48).cache.num_blocks == 3
