"""Requests in a continuous batch: admission, chunks, stop conditions, reports, aborts, and errors at the door."""

import dataclasses

import pytest

from engine.load import assert_empty, heard, interrupt, take_steps
from forerun.errors import BadOption, CapacityError, PromptTooLong
from forerun.types import SamplingParams, Sequence
from forerun.verify import ratio
from refusals import refusal
from support import VOCAB, engine_for, random_decoder, rounds_of

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


def with_each_draft(test):
    """Run a test with each of three drafters, with fixed lengths and with auto."""
    return pytest.mark.speculation("fixed", "auto")(pytest.mark.parametrize("draft", ["none", "model", "lookup"])(test))


def serve(engine, *requests):
    while any(r.seq.finish_reason is None for r in requests):
        engine.step()
    return [r.seq.output_ids for r in requests]


def test_waiting_requests_join_at_step_boundaries_first_come_first_served():
    engine = engine_for(random_decoder(1), max_batch_size=2)
    params = [SamplingParams(max_tokens=n, temperature=0.0) for n in (3, 9, 2, 2)]
    requests = [engine.add([i, i + 1], own) for i, own in enumerate(params)]
    started, finished = [], []
    while len(finished) < 4:
        finished += engine.step()
        started += [r for r in (*finished, *engine.scheduler.running) if r not in started]
        assert len(engine.scheduler.running) <= 2
    assert started == requests
    assert finished.index(requests[0]) < finished.index(requests[1])


def test_a_prompt_is_run_in_chunks_beside_decoding_requests():
    engine = engine_for(random_decoder(1), prefill_chunk_tokens=8)
    first = engine.add([1, 2], GREEDY)
    engine.step()
    reports = heard(engine)
    second = engine.add(list(range(30)), GREEDY)
    take_steps(engine, 2)
    assert [r.num_prefill_tokens for r in reports] == [8, 8]
    assert first.seq.num_output_tokens >= 2
    assert second.seq.num_output_tokens == 0
    serve(engine, first, second)
    assert sum(r.num_prefill_tokens for r in reports) == 29


@pytest.mark.once("no engine runs")
def test_a_request_that_ignores_the_models_end_ids_has_its_own():
    engine = engine_for(random_decoder(1), end_ids=frozenset({3}))
    own = {"stop_token_ids": [5]}
    assert engine.add([1], SamplingParams(**own)).seq.end_ids == {3, 5}
    assert engine.add([1], SamplingParams(ignore_eos=True, **own)).seq.end_ids == {5}


@pytest.mark.once("no engine runs")
def test_an_end_id_at_the_longest_length_is_an_end():
    seqs = [Sequence(0, [1], 1, SamplingParams(), 0, 2, frozenset({5})) for _ in range(2)]
    assert [seq.commit(token, "plain") for seq, token in zip(seqs, (5, 6), strict=True)] == ["stop", "length"]


@pytest.mark.once("about the first draft, which has a fixed length")
def test_prefill_stops_one_short_so_that_the_first_decode_step_speculates():
    engine = engine_for(random_decoder(1), "model")
    reports = heard(engine)
    engine.add([3, 4, 5], GREEDY)
    take_steps(engine, 2)
    assert (reports[0].num_prefill_tokens, reports[0].num_decoding) == (2, 0)
    assert reports[1].num_drafted == 4


@with_each_draft
def test_max_tokens_is_exact_and_never_overdrafted(draft):
    engine = engine_for(random_decoder(1), draft, spec_length=8)
    for n in range(1, 12):
        (ids,) = serve(engine, request := engine.add([1, 2, 1, 2], SamplingParams(max_tokens=n, temperature=0.0)))
        assert len(ids) == n
        assert request.seq.finish_reason == "length"


@with_each_draft
def test_an_end_id_inside_a_round_cuts_the_rest_and_is_kept_in_the_ids(draft):
    (plain,) = serve(engine := engine_for(random_decoder(1)), engine.add([5, 6], GREEDY))
    for end in sorted(set(plain)):
        engine = engine_for(random_decoder(1), draft, end_ids=frozenset([end]))
        (ids,) = serve(engine, request := engine.add([5, 6], GREEDY))
        assert ids == plain[: plain.index(end) + 1]
        assert request.seq.finish_reason == "stop"
        ignored = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        assert serve(engine, engine.add([5, 6], ignored)) == [plain]


@with_each_draft
def test_min_tokens_keeps_end_ids_out_of_the_first_tokens(draft):
    (plain,) = serve(engine := engine_for(random_decoder(1)), engine.add([5, 6], GREEDY))
    params = SamplingParams(max_tokens=20, min_tokens=7, temperature=0.0, stop_token_ids=(plain[0],))
    engine = engine_for(random_decoder(1), draft)
    (ids,) = serve(engine, engine.add([5, 6], params))
    assert plain[0] not in ids[:7]


@pytest.mark.speculation("fixed", "auto")
def test_the_report_adds_up():
    engine = engine_for(random_decoder(1), "model", spec_length=4)
    rounds = rounds_of(engine)
    (ids,) = serve(engine, request := engine.add([1, 2, 3], SamplingParams(max_tokens=60, temperature=0.7, seed=3)))
    report = request.report
    assert report.num_steps == len(rounds)
    assert report.num_drafted == sum(len(r.tokens) for r in rounds)
    assert report.num_accepted == sum(len(r.accepted) for r in rounds)
    assert report.num_tested == sum(len(r.tests) for r in rounds)
    assert report.num_emitted == report.num_accepted + report.num_steps
    assert report.mean_accepted_length == report.num_emitted / report.num_steps
    assert report.acceptance_rate == report.num_accepted / report.num_drafted
    assert report.alpha_hat == report.num_accepted / report.num_tested
    assert len(report.origins) == len(ids) == 60
    firsts = [r for r in rounds if r.tokens]
    assert report.acceptance_per_position[0] == sum(0 in r.accepted for r in firsts) / len(firsts)
    for r in rounds:
        assert len(r.draft_probs) == len(r.target_probs) == len(r.tokens) <= r.granted
        assert all(0 < p <= 1 for p in r.draft_probs)


@pytest.mark.once("about plain decoding")
def test_plain_decoding_reports_no_acceptance():
    serve(engine := engine_for(random_decoder(1)), request := engine.add([1], GREEDY))
    assert request.report.alpha_hat is None
    assert request.report.acceptance_rate is None
    assert request.report.mean_accepted_length == 1.0
    assert set(request.report.origins) == {"plain"}


def test_without_listeners_no_detail_is_made():
    engine = engine_for(random_decoder(1))
    reports = []
    end = engine.listen(reports.append)
    serve(engine, engine.add([1, 2], GREEDY))
    assert reports
    assert all(not r.rounds for r in reports)
    end()
    serve(engine, engine.add([1, 2], SamplingParams(max_tokens=2, temperature=0.0)))
    assert sum(r.num_committed for r in reports) == 20


@with_each_draft
def test_aborting_at_any_time_leaks_no_block(draft):
    engine = engine_for(random_decoder(1), draft, max_batch_size=2)
    caches = [engine.runner.cache] + ([engine.drafter.first.runner.cache] if draft == "model" else [])
    for victim in [engine.add([i] * 20, GREEDY) for i in range(4)]:
        engine.step()
        engine.abort(victim)
        engine.abort(victim)
        assert victim.seq.finish_reason == "abort"
        for pool in caches:
            pool.check_integrity()
    assert_empty(*caches)


def test_a_pool_too_small_for_all_requests_makes_some_wait_and_loses_none():
    alone = serve(engine := engine_for(random_decoder(1)), engine.add([1, 2], GREEDY))
    engine = engine_for(random_decoder(1))
    spare = engine.runner.cache
    spare.open(999)
    spare.reserve(999, spare.free_tokens() - 48)
    spare.num_blocks, blocks = 3, spare.num_blocks
    assert serve(engine, *[engine.add([1, 2], GREEDY) for _ in range(5)]) == alone * 5
    spare.num_blocks = blocks


@pytest.mark.parametrize(
    ("ids", "params", "error", "words"),
    [
        ([], {}, BadOption, "no tokens"),
        ([VOCAB], {}, BadOption, f"the id {VOCAB}, but the model's ids are 0 .. {VOCAB - 1}"),
        ([1], {"stop_token_ids": (99,)}, BadOption, "stop_token_ids holds the id 99"),
        ([1], {"logit_bias": {77: 1.0}}, BadOption, "logit_bias holds the id 77"),
        ([1], {"acceptance": "usual"}, BadOption, "there is no acceptance rule 'usual'"),
        ([1], {"stop": ("x",)}, BadOption, "use stop_token_ids"),
        ([1] * 300, {"max_tokens": None}, PromptTooLong, "300 tokens and max_seq_len is 256, so there is no room"),
        ([1] * 200, {"max_tokens": 57}, PromptTooLong, "200 tokens and max_tokens=57, but max_seq_len is 256"),
        ([1] * 256, {"max_tokens": None}, PromptTooLong, "256 tokens"),
    ],
)
def test_requests_that_cannot_be_honoured_are_refused_at_the_door(ids, params, error, words):
    engine = engine_for(random_decoder(1))
    assert words in refusal(error, engine.add, ids, SamplingParams(**params))
    assert not engine.scheduler.waiting


def test_a_request_larger_than_the_whole_cache_is_refused():
    engine = engine_for(random_decoder(1))
    engine.runner.cache.num_blocks = 2
    assert "kv_cache_tokens" in refusal(CapacityError, engine.add, [1] * 20, SamplingParams(max_tokens=50))


def test_max_tokens_none_goes_as_far_as_the_context():
    (ids,) = serve(engine := engine_for(random_decoder(1)), engine.add([1, 2], SamplingParams(None, temperature=0.0)))
    assert len(ids) == 254


@pytest.mark.once("about drafts of a fixed length")
def test_the_draft_model_stops_at_its_own_last_position():
    """Sequences beyond the draft model's positions go on, plainly."""
    engine = engine_for(random_decoder(1), "model")
    alone = serve(plain := engine_for(random_decoder(1)), plain.add([1, 2], SamplingParams(60, temperature=0.0)))
    model = engine.drafter.first.runner.model
    model.config = type(model.config)(**{**model.config.__dict__, "max_positions": 30})
    rounds = rounds_of(engine)
    assert serve(engine, engine.add([1, 2], SamplingParams(60, temperature=0.0))) == alone
    for r in rounds:
        assert r.position + len(r.tokens) - 1 <= 30 if r.tokens else r.position + 1 > 29


@with_each_draft
def test_a_request_that_may_emit_nothing_fails_alone(draft):
    (alone,) = serve(engine := engine_for(random_decoder(1)), engine.add([1, 2], GREEDY))
    engine = engine_for(random_decoder(1), draft)
    good = engine.add([1, 2], GREEDY)
    bad = engine.add([1, 2], SamplingParams(max_tokens=5, logit_bias={i: -float("inf") for i in range(VOCAB)}))
    assert serve(engine, good, bad)[0] == alone
    assert bad.seq.finish_reason == "abort"
    assert "no token is left" in str(bad.error)
    assert not engine.scheduler.running


@pytest.mark.once("about one rule and one draft")
def test_a_rule_that_raises_fails_its_own_request(monkeypatch):
    right = ratio.rule

    def rule(draft, b, rows, coins, options):
        return right(draft, b, rows, coins) if coins._seed == 1 else 1 // 0

    (alone,) = serve(engine := engine_for(random_decoder(1), "model"), engine.add([1, 2], GREEDY))
    monkeypatch.setattr(ratio, "rule", rule)
    engine = engine_for(random_decoder(1), "model")
    bad, good = (engine.add([1, 2], dataclasses.replace(GREEDY, seed=seed)) for seed in (2, 1))
    assert serve(engine, bad, good)[1] == alone
    assert (bad.seq.finish_reason, good.error) == ("abort", None)
    assert "ZeroDivisionError" in str(bad.error)


@pytest.mark.speculation("fixed", "auto")
def test_watching_changes_nothing_where_masks_leave_no_token():
    """A listener with detail must not compute distributions that the rules did not read."""
    outcomes = []
    for watch in (False, True):
        engine = engine_for(random_decoder(1), "lookup")
        if watch:
            engine.listen(lambda report: None, detail=True)
        # After 5 nothing may follow 5 5: every id is a bad word there.
        request = engine.add([5, 5, 5, 5], SamplingParams(max_tokens=6, temperature=1.0, seed=1))
        request.seq.bad_word_ids = tuple((5, 5, 5, i) for i in range(VOCAB))
        other = engine.add([1, 2], GREEDY)
        serve(engine, request, other)
        outcomes.append((request.seq.output_ids, request.seq.finish_reason, other.seq.output_ids))
    assert outcomes[0] == outcomes[1]


def test_an_exception_inside_a_step_leaves_a_usable_engine():
    (alone,) = serve(engine := engine_for(random_decoder(1)), engine.add([1, 2], GREEDY))
    engine = engine_for(random_decoder(1))
    requests = [engine.add([i, 3], GREEDY) for i in range(3)]
    interrupt(engine, requests, requests[1])
    for request in requests:
        engine.abort(request)
    assert not engine.scheduler.running
    engine.runner.cache.check_integrity()
    assert serve(engine, engine.add([1, 2], GREEDY)) == [alone]
