"""Many requests in little memory: budgets, priorities, preemption, drafts that give way, shared prompts, aborts."""

import random
from dataclasses import replace

import pytest

from engine.load import MODEL, alone, assert_empty, at_work, caches, check, engine_with, greedy, heard, mixed, run
from forerun.errors import BadOption
from forerun.types import SamplingParams

GREEDY = greedy(40)


@pytest.mark.speculation("off", "fixed", "auto")
def test_mixed_requests_in_little_memory_write_what_each_writes_alone() -> None:
    wanted = mixed(1, 24)
    engine = engine_with(160, prefill_chunk_tokens=16)
    outputs = run(engine, requests := [engine.add(*one) for one in wanted])
    assert engine.scheduler.num_preemptions > 0
    assert sum(request.report.num_cached_tokens for request in requests) > 0
    assert sum(request.report.num_accepted for request in requests) > 0
    assert outputs == alone(wanted)
    for request, (_, params) in zip(requests, wanted, strict=True):
        assert (request.report.num_drafted == 0) >= (params.draft == "none")


def test_a_preempted_request_goes_on_where_it_was() -> None:
    engine = engine_with(96, max_batch_size=2)
    first, second = engine.add([1] * 20, GREEDY), engine.add([2] * 20, GREEDY)
    while not engine.scheduler.num_preemptions:
        engine.step()
    had = list(second.seq.tokens)
    assert second in engine.scheduler.waiting
    assert first in engine.scheduler.running
    assert all(cache.length(second.seq.id) == 0 for cache in caches(engine))
    assert run(engine, [first, second]) == alone([([1] * 20, GREEDY), ([2] * 20, GREEDY)])
    assert second.seq.tokens[: len(had)] == had
    assert second.report.num_preemptions == 1


@pytest.mark.once("about drafts of a fixed length")
def test_who_wants_no_drafter_is_granted_nothing() -> None:
    engine = engine_with(spec_length=4, policy="fixed")
    requests = [engine.add([i] * 10, replace(GREEDY, draft=draft)) for i, draft in enumerate(("none", None, "none"))]
    at_work(engine, *requests)
    assert [limit > 0 for limit in engine.scheduler.plan().draft_limits] == [False, True, False]


@pytest.mark.once("about drafts of a fixed length")
def test_what_a_rejected_draft_held_is_free_before_the_next_plan() -> None:
    """Drafts of 24 tokens reach into further blocks: behind a step the draft's cache holds committed tokens alone."""
    engine = engine_with(spec_length=24, policy="fixed", prefix_caching=False)
    request, rejected = engine.add([1] * 10, GREEDY), 0
    drafter = engine.drafter.first
    while request.seq.finish_reason is None:
        had = request.report.num_drafted - request.report.num_accepted
        engine.step()
        rejected += request.report.num_drafted - request.report.num_accepted - had > 16
        if request.seq.finish_reason is None:
            kept = min(drafter.runner.cache.length(request.seq.id), len(request.seq.tokens) - 1)
            assert drafter.free_tokens() == 1024 - 16 * -(-kept // 16)
    assert rejected > 0


@pytest.mark.once("about drafts of a fixed length")
@pytest.mark.parametrize("tokens", [64, 80, 96, 128])
def test_drafts_preempt_no_request(tokens: int) -> None:
    """A request is preempted only where the running ones have no room for one token each, drafts or not."""
    wanted = [([i] * 10, greedy(30)) for i in range(5)]
    engine = engine_with(tokens, spec_length=9, prefix_caching=False)
    requests = [engine.add(*one) for one in wanted]
    scheduler, cache, times = engine.scheduler, engine.runner.cache, 0
    while any(request.seq.finish_reason is None for request in requests):
        needed = sum(cache.missing_blocks(r.seq.id, 1) for r in scheduler.running if r.report.num_steps)
        free = scheduler.free_kv_tokens // cache.block_tokens
        engine.step()
        check(engine)
        assert scheduler.num_preemptions == times or needed > free
        times = scheduler.num_preemptions
    assert [request.seq.output_ids for request in requests] == alone(wanted)
    assert times > 0
    assert sum(request.report.num_accepted for request in requests) > 0


def test_a_pass_has_no_more_rows_than_the_budget() -> None:
    engine = engine_with(max_num_batched_tokens=16, prefill_chunk_tokens=12, spec_length=9)
    reports = heard(engine)
    run(engine, [engine.add(*one) for one in mixed(2, 12)])
    assert max(report.num_rows for report in reports) == 16
    assert max(report.num_prefill_tokens for report in reports) == 12
    for report in reports:
        assert report.num_rows == report.num_prefill_tokens + report.num_decoding + report.num_drafted


def test_no_place_is_taken_that_does_not_suffice() -> None:
    """10 blocks: 4 of an equal, 2 each of two worse ones; without these a prompt of 7 blocks would still not fit."""
    engine = engine_with(160, prefix_caching=False)
    equal = engine.add([1] * 40, greedy(24))
    worse = [engine.add([i] * 10, greedy(20, priority=1)) for i in (2, 3)]
    at_work(engine, equal, *worse)
    late = engine.add([4] * 100, greedy(2))
    while equal.seq.finish_reason is None:
        engine.step()
        assert equal.seq.finish_reason or late in engine.scheduler.waiting
        assert engine.scheduler.num_preemptions == 0
    outputs = run(engine, [late, *worse])
    assert outputs == alone([(r.seq.tokens[: r.seq.num_prompt_tokens], r.seq.params) for r in (late, *worse)])


def test_no_more_places_are_taken_than_needed() -> None:
    """11 blocks, 3 each of three worse ones: a prompt of 3 blocks needs the place of the last alone."""
    engine = engine_with(176, prefix_caching=False)
    worse = [engine.add([i] * 40, greedy(8, priority=1)) for i in range(3)]
    engine.step()
    urgent = engine.add([4] * 40, greedy(4))
    engine.step()
    assert urgent in engine.scheduler.running
    assert [request.report.num_preemptions for request in worse] == [0, 0, 1]
    run(engine, [urgent, *worse])


def test_what_running_requests_share_is_not_freed_by_one_of_them() -> None:
    """11 blocks: 4 that an equal and a worse one share, one more of each: without the worse one 6 are free, not 10."""
    engine = engine_with(176, prefill_chunk_tokens=128)
    prompt = [i % 7 for i in range(65)]
    equal = engine.add(prompt, greedy(15))
    engine.step()
    worse = engine.add(prompt, greedy(15, priority=1))
    at_work(engine, worse)
    assert worse.report.num_cached_tokens == 64
    late = engine.add([4] * 105, greedy(2))
    assert equal.seq.finish_reason is None
    while equal.seq.finish_reason is None and worse.seq.finish_reason is None:
        assert engine.scheduler.num_preemptions == 0
        engine.step()
    run(engine, [equal, worse, late])


def test_the_cache_of_a_drafter_counts_for_admission() -> None:
    engine = engine_with(256)
    assert engine.scheduler.free_kv_tokens == 256
    runner = engine.drafter.members["model"].runner  # type: ignore[attr-defined]
    runner.cache.open(-1)
    runner.cache.reserve(-1, 200)
    assert engine.scheduler.free_kv_tokens == 48
    waiting = engine.add([1] * 60, GREEDY)
    running = engine.add([2] * 10, GREEDY)
    engine.step()
    assert waiting in engine.scheduler.running  # alone it must run, because no other request could make room
    assert running in engine.scheduler.waiting
    runner.cache.release(-1)
    run(engine, [waiting, running])


# ------------------------------------------------------------------------------------------------- shared prompts


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33, 47, 64])
def test_a_repeated_prompt_is_found_up_to_its_last_token(length: int) -> None:
    engine = engine_with()
    prompt = [i % 7 for i in range(length)]
    outputs, cached = [], []
    for _ in range(3):
        outputs += run(engine, [request := engine.add(prompt, GREEDY)])
        cached.append(request.report.num_cached_tokens)
    assert cached == [0, *[(length - 1) // 16 * 16] * 2]
    assert outputs == alone([(prompt, GREEDY)]) * 3


def test_nothing_is_shared_between_salts_or_with_sharing_switched_off() -> None:
    engine, prompt = engine_with(), list(range(40))
    for salt, found in ((None, 0), ("a", 0), ("a", 32), ("b", 0), (None, 32)):
        run(engine, [request := engine.add(prompt, greedy(4, cache_salt=salt))])
        assert request.report.num_cached_tokens == found
    for options in ({"prefix_caching": False}, {"backend": "contiguous"}):
        engine = engine_with(**options)
        for _ in range(2):
            run(engine, [request := engine.add(prompt, GREEDY)])
            assert request.report.num_cached_tokens == 0


def test_an_answer_is_found_when_the_conversation_goes_on() -> None:
    engine = engine_with()
    (answer,) = run(engine, [engine.add(list(range(20)), GREEDY)])
    longer = [*range(20), *answer, 5, 6]
    outputs = run(engine, [request := engine.add(longer, GREEDY)])
    assert request.report.num_cached_tokens == (20 + len(answer) - 1) // 16 * 16
    assert outputs == alone([(longer, GREEDY)])


def test_several_outputs_of_one_prompt_have_seeds_of_their_own_and_share_its_cache() -> None:
    engine, prompt = engine_with(), list(range(40))
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=3)
    outputs = run(engine, requests := engine.add_all(prompt, params))
    assert [request.index for request in requests] == [0, 1, 2]
    assert [request.report.num_cached_tokens for request in requests] == [0, 32, 32]
    seeds = [request.seq.seed for request in requests]
    assert seeds[0] == 5
    assert len(set(seeds)) == len(set(map(tuple, outputs))) == 3
    assert outputs == alone([(prompt, SamplingParams(max_tokens=12, temperature=1.0, seed=seed)) for seed in seeds])
    with pytest.raises(BadOption, match="n=3"):
        engine.add(prompt, params)


# ----------------------------------------------------------------------------------------------- choices of a request


@pytest.mark.once("about the choice of a drafter")
def test_a_request_may_choose_only_what_the_engine_has() -> None:
    engine = engine_with()
    with pytest.raises(BadOption, match=r"'hydrant'.*of auto, lookup, model, none$"):  # no engine starts with that
        engine.add([1], SamplingParams(max_tokens=9, draft="hydrant"))
    with pytest.raises(BadOption, match=r"'suffix'.*lookup, model, none; .*extra_drafts='suffix'"):
        engine.add([1], SamplingParams(max_tokens=9, draft="suffix"))
    for wanted, given in ((None, "model"), ("auto", "model"), ("lookup", "lookup"), ("none", "none")):
        assert engine.add([1], SamplingParams(max_tokens=9, draft=wanted)).seq.draft == given


@pytest.mark.once("about drafts of fixed lengths")
def test_methods_and_lengths_stand_side_by_side_in_one_pass() -> None:
    engine = engine_with(spec_length=4)
    reports = heard(engine)
    for draft, length in [("none", None), ("lookup", 3), ("model", None), ("model", 2)]:
        engine.add([1, 2, 3, 1, 2, 3, 1, 2], greedy(30, draft=draft, spec_length=length))
    engine.step()
    engine.step()
    drafted = {(s.draft, s.num_drafted) for s in reports[-1].sequences}
    assert drafted == {("none", 0), ("lookup", 3), ("model", 4), ("model", 2)}
    assert set(reports[-1].drafts) == {"lookup", "model"}
    assert reports[-1].drafts["model"].depth == 4
    assert reports[-1].drafts["model"].num_nodes == 6


@pytest.mark.once("about drafts of a fixed length")
def test_a_request_that_is_nearly_full_decodes_plainly_beside_others() -> None:
    engine = engine_with(spec_length=9)
    reports = heard(engine)
    engine.add([1] * 126, greedy(2))
    engine.add([2] * 5, GREEDY)
    while not any(len(report.sequences) == 2 for report in reports):
        engine.step()
    both = next(report for report in reports if len(report.sequences) == 2)
    assert [s.num_drafted for s in both.sequences] in ([1, 9], [0, 9])


@pytest.mark.once("about the draft model")
@pytest.mark.parametrize("catchup_tokens", [16, 512])
def test_the_draft_model_runs_a_long_prompt_beside_the_target(catchup_tokens: int) -> None:
    """As many tokens as the target, not ahead of it: its steps would be the longer for it."""
    engine = engine_with(prefill_chunk_tokens=16, catchup_tokens=catchup_tokens)
    reports = heard(engine)
    run(engine, [request := engine.add([i % 9 for i in range(100)], greedy(9))])
    prefill = [report for report in reports if report.num_prefill_tokens]
    assert [report.drafts["model"].num_catchup_tokens for report in prefill] == [16] * 6 + [3]
    decoding = [report for report in reports if report.num_decoding]
    assert decoding[0].num_drafted > 0
    assert [report.drafts["model"].num_catchup_tokens for report in decoding if report.drafts] == [0] * len(decoding)
    assert request.report.draft_prefill_s > 0


# ------------------------------------------------------------------------------------------------------------- load


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.parity) for seed in (1, 2))])
def test_random_arrivals_and_aborts_lose_no_block_and_answer_each_request_once(seed: int) -> None:
    random_ = random.Random(seed)
    engine = engine_with(random_.choice((128, 192)), prefill_chunk_tokens=random_.choice((5, 64)))
    wanted = mixed(seed, 150, longest=20)
    requests, finished = [], []
    while len(finished) < len(wanted):
        if len(requests) < len(wanted) and random_.random() < 0.6:
            requests.append(engine.add(*wanted[len(requests)]))
        if requests and random_.random() < 0.15 and (victim := random_.choice(requests)).seq.finish_reason is None:
            engine.abort(victim)
            finished.append(victim)
        finished += engine.step()
        check(engine)
    assert sorted(r.seq.id for r in finished) == sorted(r.seq.id for r in requests)
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    for cache in caches(engine):
        assert_empty(cache)
        cache.clear_prefixes()
        cache.check_integrity()
    assert MODEL is engine.runner.model
