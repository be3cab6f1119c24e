"""Listeners, pacing and drafters get numbers that agree with what the step did."""

import itertools
import time
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from engine.load import DRAFT, MODEL, alone, engine_with, greedy, heard, interrupt, mixed, run, runner_with, take_steps
from forerun.drafters.shared.model_drafter import ModelDrafter
from forerun.engine.engine import Engine
from forerun.engine.llm import LLM
from forerun.engine.router import Router
from forerun.models.runner import Runner
from forerun.pacing import Pacing, make
from forerun.pacing.fixed import FixedPacing
from forerun.types import Draft, Probs, RoundDetail, SamplingParams, Sequence, StepReport
from support import rounds_of


class Told(Pacing):
    """A policy that grants given lengths and records what it is asked and told."""

    def __init__(self, granted: int, *, prepares: bool = True) -> None:
        self.granted, self.wants_prompts = granted, prepares
        self.asked: list[tuple[list[int], list[int]]] = []  # ids, limits
        self.depths: list[tuple[int, int]] = []  # id, depth
        self.most: dict[int, int] = {}  # by id: where go_on ends a draft
        self.heard: list[StepReport] = []
        self.ended: list[int] = []

    def budget(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[int]:
        self.asked.append(([seq.id for seq in seqs], [*limits]))
        return [self.granted] * len(seqs)

    def go_on(self, seq: Sequence, depth: int, draft_probs: Probs, logits: object = None) -> bool:
        self.depths.append((seq.id, depth))
        return depth < self.most.get(seq.id, 99)

    def prepares(self, seq: Sequence) -> bool:
        return self.wants_prompts

    def observe(self, report: StepReport) -> None:
        self.heard.append(report)

    def end(self, seq: Sequence) -> None:
        self.ended.append(seq.id)


# ---------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.speculation("off", "fixed", "auto")
def test_reports_of_steps_add_up() -> None:
    """Of a mixed batch in little memory: to the sequences, the rounds, the drafters, and the requests."""
    engine = engine_with(192, prefill_chunk_tokens=16, catchup_tokens=24)
    reports = heard(engine, detail=True)
    outputs = run(engine, requests := [engine.add(*one) for one in mixed(5, 16)])
    for report in reports:
        assert report.num_decoding == len(report.sequences) == len(report.rounds)
        for name in ("drafted", "tested", "accepted"):
            assert getattr(report, f"num_{name}") == sum(getattr(s, f"num_{name}") for s in report.sequences)
        for s, r in zip(report.sequences, report.rounds, strict=True):
            assert (s.num_drafted, s.num_tested, s.num_accepted) == (len(r.tokens), len(r.tests), len(r.accepted))
        assert report.num_context_tokens == sum(r.position - 1 for r in report.rounds)
        assert report.num_emitted == report.num_accepted + report.num_decoding
        for name, draft in report.drafts.items():
            own = [s.num_drafted for s in report.sequences if s.draft == name]
            assert (draft.num_nodes, draft.depth) == (sum(own), max(own, default=0))
            assert draft.num_sequences == sum(num > 0 for num in own)
            assert 0 <= draft.catchup_s <= draft.seconds
            assert (draft.catchup_s > 0) == (draft.num_catchup_tokens > 0)
            granted = [r.granted for s, r in zip(report.sequences, report.rounds, strict=True) if s.draft == name]
            assert any(granted) or draft.num_catchup_tokens, "a drafter was asked for no sequence"
    assert sum(report.num_committed for report in reports) == sum(map(len, outputs))
    assert sum(report.num_emitted for report in reports) == sum(r.report.num_emitted for r in requests)
    prefill_s = sum(draft.catchup_s for report in reports for draft in report.drafts.values())
    assert sum(r.report.draft_prefill_s for r in requests) == pytest.approx(prefill_s)
    assert prefill_s > 0


def test_the_seconds_of_a_step_are_those_of_the_engine() -> None:
    """A policy that takes 4 ms and a listener that takes 6: both are counted, and all parts are within the whole."""

    class Slow(Told):
        def budget(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[int]:
            time.sleep(0.004)
            return super().budget(seqs, limits)

    pacing = Slow(2)
    engine = Engine(runner_with(MODEL, 400), Router({"model": ModelDrafter(runner_with(DRAFT, 400))}), pacing)
    engine.listen(lambda _: time.sleep(0.006))
    begun = time.perf_counter()
    run(engine, [engine.add([1, 2, 3], greedy(12)) for _ in range(2)])
    whole_s = time.perf_counter() - begun
    for report in pacing.heard:
        assert report.draft_s >= 0.004 + sum(draft.seconds for draft in report.drafts.values())
    assert min(report.schedule_s for report in pacing.heard[1:]) >= 0.006
    parts = [r.schedule_s + r.draft_s + r.score_s + r.judge_s + r.commit_s for r in pacing.heard]
    assert 0.01 * len(parts) - 0.006 <= sum(parts) <= whole_s


@pytest.mark.speculation("fixed", "auto")
def test_a_request_report_is_made_of_its_rounds() -> None:
    engine = engine_with(spec_length=6, policy="fixed")
    rounds = rounds_of(engine)
    run(engine, [request := engine.add([1, 2, 3], greedy(60, draft="model"))])
    report = request.report
    assert report.rounds == [(len(r.tokens), len(r.accepted)) for r in rounds]
    assert report.acceptance_rates == [len(r.accepted) / len(r.tokens) for r in rounds if r.tokens]
    assert report.acceptance_rate == sum(len(r.accepted) for r in rounds) / sum(len(r.tokens) for r in rounds)
    longest = max(len(r.tokens) for r in rounds)
    assert report.drafted_per_position == [sum(len(r.tokens) > i for r in rounds) for i in range(longest)]
    assert report.accepted_per_position == [sum(len(r.accepted) > i for r in rounds) for i in range(longest)]
    last = {True: "bonus", False: "correction"}
    expected = []
    for r in rounds:
        expected += ["accepted"] * len(r.accepted)
        expected.append(last[len(r.accepted) == len(r.tokens)] if r.tokens else "plain")
    assert report.origins == expected
    assert {"bonus", "correction"} <= set(expected)


@pytest.mark.once("about drafts of a fixed length")
def test_a_round_that_a_stop_id_cuts_counts_what_it_emitted_and_what_was_committed() -> None:
    (plain,) = alone([([5, 6], greedy(30))])
    cut = 0
    for end in set(plain):
        engine = engine_with(spec_length=8)
        reports = heard(engine)
        (output,) = run(engine, [request := engine.add([5, 6], greedy(30, stop_token_ids=(end,)))])
        assert sum(report.num_committed for report in reports) == len(output)
        emitted = sum(report.num_emitted for report in reports)
        assert emitted == request.report.num_emitted >= len(output)
        cut += emitted > len(output)
    assert cut > 0


def test_the_step_after_an_interrupted_one_reports_itself_alone() -> None:
    """What finished in the interrupted step is over; the others go on, and the drafter is not counted twice."""
    engine = engine_with(policy="fixed")
    requests = [engine.add([i, 3], greedy(1 if i == 0 else 20, draft="model")) for i in range(3)]
    interrupt(engine, requests, requests[1])
    assert requests[0].seq.finish_reason == "length"
    reports = heard(engine)
    engine.step()
    assert requests[0] not in engine.scheduler.running
    assert reports[0].drafts["model"].num_nodes == reports[0].num_drafted > 0
    assert run(engine, requests) == alone([(r.seq.tokens[:2], greedy(r.seq.max_len - 2)) for r in requests])


# ----------------------------------------------------------------------------------------------------------- pacing


@pytest.mark.once("about what a pacing policy hears")
def test_a_policy_hears_every_step_and_every_end() -> None:
    policy = Told(3)
    engine = engine_with(policy=policy, max_batch_size=3)
    reports = heard(engine)
    requests = [engine.add([i], greedy(9)) for i in range(5)]
    engine.step()
    engine.abort(requests[1])
    run(engine, requests)
    assert policy.heard == reports
    assert sorted(policy.ended) == [request.seq.id for request in requests]


@pytest.mark.once("about what a pacing policy grants")
def test_whatever_a_policy_grants_stays_within_the_limits_of_the_step() -> None:
    for granted in (1000, -1):
        policy = Told(granted)
        engine = engine_with(112, policy=policy, max_num_batched_tokens=24, prefill_chunk_tokens=8)
        reports = heard(engine)
        wanted = [([i] * 10, greedy(40)) for i in range(4)]
        assert run(engine, [engine.add(*one) for one in wanted]) == alone(wanted)
        assert max(report.num_rows for report in reports) <= 24
        assert (sum(report.num_drafted for report in reports) > 0) == (granted > 0)
        assert all(0 <= limit <= 64 for _, limits in policy.asked for limit in limits)


class Asked(FixedPacing):
    """As fixed, but it is asked before each draw, so that no draft is made at once."""

    def go_on(self, seq: Sequence, depth: int, draft_probs: Probs, logits: object = None) -> bool:
        return True


@pytest.mark.once("compares two ways of drafting")
def test_a_draft_made_at_once_is_the_one_that_is_made_token_by_token() -> None:
    """Requests whose drafts end at different depths: greedy ones, such that draw, one with a penalty; shipped pair."""
    rounds, calls_of, lengths = list[list[RoundDetail]](), list[list[int]](), list[list[list[int]]]()
    reports = list[list[StepReport]]()
    for policy in (FixedPacing, Asked):
        # Without a limit that goes by seconds, prompts are read in the same steps.
        llm = LLM("shipped", pacing="fixed", max_seq_len=256, prefill_stretch=0)
        engine, calls, held = llm.engine, list[int](), list[list[int]]()
        runner: Runner = engine.drafter.first.runner  # type: ignore[attr-defined]
        at_once = runner.run_ahead

        def counted(*to: Any, at_once: Any = at_once, calls: list[int] = calls, **more: Any) -> list[list[int]]:
            calls.append(len(more["draws"]))
            return at_once(*to, **more)  # type: ignore[no-any-return]

        runner.run_ahead = counted  # type: ignore[method-assign]
        engine.stepper.pacing = engine.pacing = policy(6)
        rounds.append(rounds_of(llm))
        reports.append(heard(llm))
        observe, cache = engine.drafter.observe, runner.cache

        def watch(
            seqs: Seq[Sequence], *rest: Any, observe: Any = observe, cache: Any = cache, held: Any = held
        ) -> None:
            held.append([cache.length(seq.id) for seq in seqs])
            observe(seqs, *rest)

        engine.drafter.observe = watch  # type: ignore[method-assign]
        llm.generate(["def f(", "class A:", "import os"], [greedy(9), greedy(40, spec_length=2), greedy(23)])
        llm.generate(["def f(", "for"], [greedy(12), SamplingParams(max_tokens=12, seed=3)])
        llm.generate(
            ["def f(", "for", "import", "class B:", "if", "return"],
            [
                SamplingParams(max_tokens=20, seed=3),
                SamplingParams(max_tokens=30, seed=4, acceptance="ratio", temperature=0.7),
                SamplingParams(max_tokens=30, seed=5, top_p=0.9, top_k=40),
                SamplingParams(max_tokens=30, seed=6, acceptance="ratio", min_p=0.02, top_k=500),
                greedy(25, spec_length=3),
                SamplingParams(max_tokens=30, seed=2**63 + 5, temperature=3.0, spec_length=4),
            ],
        )
        llm.generate(["def f(", "for"], [greedy(12), SamplingParams(max_tokens=12, seed=3, presence_penalty=0.5)])
        runner.cache.check_integrity()
        calls_of.append(calls)
        lengths.append(held)
    assert rounds[0] == rounds[1]
    assert lengths[0] == lengths[1], "rows of the draft model's cache, with what was rejected still in it"
    assert calls_of[1] == []
    assert set(calls_of[0]) >= {0, 2, 6} or not runner.draws_ahead
    assert {len(own.tokens) for own in rounds[0]} >= {0, 2, 6}
    drafts = [
        own for report in itertools.chain(*reports) if not report.num_prefill_tokens for own in report.drafts.values()
    ]
    assert len(drafts) > 20
    assert not any(own.num_catchup_tokens for own in drafts), "what a round leaves to be fed is no pass of its own"


@pytest.mark.once("about the operators' shortest way")
def test_an_end_is_forced_where_the_largest_logit_is_found_alone() -> None:
    with LLM("shipped", draft="none", extra_drafts="suffix;model", max_seq_len=64) as llm:
        alone = llm.generate("for i in range(3", greedy(20, ignore_eos=True))[0].token_ids
        assert 5 not in alone
        for draft, length in itertools.product(("none", "suffix", "model"), (1, 2, 11, 12, 13, 20)):
            fields = {"draft": draft, "spec_length": 5, "forced_eos_token_id": 5}
            (out,) = llm.generate("for i in range(3", greedy(length, ignore_eos=True, **fields))
            assert (out.token_ids, out.finish_reason) == ([*alone[: length - 1], 5], "length")


@pytest.mark.once("about threads")
def test_a_step_on_native_operators_keeps_torch_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLM("shipped", draft="none", max_seq_len=64).engine
    seen = list[int]()
    forward = engine.runner.forward
    monkeypatch.setattr(engine.runner, "forward", lambda runs: seen.append(torch.get_num_threads()) or forward(runs))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(engine, [engine.add([1, 2, 3], greedy(3))])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1 if hasattr(engine.runner.model, "best") else 2}


@pytest.mark.once("about one report")
def test_whatever_a_draft_takes_is_in_some_drafters_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, joined = engine_with(policy=Told(3)), Draft.joined
    monkeypatch.setattr(Draft, "joined", staticmethod(lambda drafts: time.sleep(0.02) or joined(drafts)))
    reports = heard(engine)
    plain = engine.add([1, 2], greedy(4, draft="none"))  # whom the drafter does not serve
    run(engine, [engine.add([1, 2, 3, 1, 2, 3], greedy(4, draft="lookup")), plain])
    drafted = [report for report in reports if report.drafts]
    assert drafted
    assert all(sum(step.seconds for step in report.drafts.values()) >= 0.02 for report in drafted)


@pytest.mark.once("about reports")
@pytest.mark.parametrize("num_others", [0, 1])
def test_what_a_drafter_did_is_reported_whether_or_not_it_serves_all_requests(
    num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(policy=Told(3))
    lookup = engine.drafter.members["lookup"]
    propose = lookup.propose
    monkeypatch.setattr(lookup, "propose", lambda *given: time.sleep(0.02) or propose(*given))
    reports = heard(engine)
    others = [engine.add([1, 2], greedy(9, draft="none")) for _ in range(num_others)]
    run(engine, [*(engine.add([1, 2, 3, 1, 2, 3], greedy(8 + i, draft="lookup")) for i in range(2)), *others])
    drafted = [report for report in reports if report.drafts]
    assert len(drafted) > 2
    for report in drafted:
        (step,) = report.drafts.values()
        sizes = [own.num_drafted for own in report.sequences if own.draft == "lookup"]
        assert (step.num_nodes, step.depth) == (sum(sizes), max(sizes))
        assert step.num_sequences == sum(size > 0 for size in sizes)
        assert step.seconds >= 0.02


@pytest.mark.once("about randomness")
@pytest.mark.parametrize("granted", [0, 3])
def test_coins_are_made_once_for_each_round_of_a_sequence(granted: int) -> None:
    engine, made = engine_with(policy=Told(granted)), list[tuple[int, int]]()
    coins = engine.stepper.coins
    engine.stepper.coins = lambda seq: made.append((seq.id, seq.round)) or coins(seq)  # type: ignore[func-returns-value]
    likely, drawn = engine.add([1, 2, 3], greedy(9, draft="none")), engine.add([1, 2], SamplingParams(max_tokens=9))
    run(engine, [likely, drawn])
    for seq in (likely.seq, drawn.seq):
        assert [rounds for number, rounds in made if number == seq.id] == list(range(seq.round))


@pytest.mark.once("about what a pacing policy is asked")
def test_each_draw_is_asked_for_with_its_own_sequence() -> None:
    """Drafters that serve some of the batch number its sequences anew; the policy does not."""
    policy = Told(6)
    engine = engine_with(policy=policy)
    choices = ("lookup", "model", "lookup", "none", "model")
    requests = [engine.add([1, 2, 3, 1, 2, 3, 1, 2], greedy(40, draft=draft)) for draft in choices]
    policy.most = {request.seq.id: number for number, request in enumerate(requests)}
    take_steps(engine, 2)
    drafted = {s.sequence_id: s.num_drafted for s in policy.heard[-1].sequences}
    assert [drafted[request.seq.id] for request in requests] == [0, 1, 2, 0, 4]
    assert {id_ for id_, _ in policy.depths} == {r.seq.id for r in requests if r.seq.draft != "none"}


# --------------------------------------------------------------------------------------------------- draft models


@pytest.mark.once("about draft models")
@pytest.mark.parametrize("names", ["aa", "ab"])
def test_draft_models_together_keep_to_the_budget_of_a_step(names: str) -> None:
    """Two long prompts, of one draft model or of one each: 16 tokens per step, and no more than the target reads."""
    router = Router({name: ModelDrafter(runner_with(DRAFT, 1024)) for name in "ab"})
    options = {"max_seq_len": 128, "prefill_chunk_tokens": 64, "catchup_tokens": 16}
    engine = Engine(runner_with(MODEL, 1024), router, make("fixed", 3), **options)
    reports = heard(engine)
    run(engine, [engine.add([i] * 90, greedy(8, draft=name)) for i, name in enumerate(names)])
    reading = [report for report in reports if report.num_prefill_tokens and not report.num_decoding]
    caught_up = [sum(draft.num_catchup_tokens for draft in report.drafts.values()) for report in reading]
    assert caught_up == [16] * len(reading)
    assert len(reading) > 1


@pytest.mark.once("about draft models")
@pytest.mark.parametrize("sizes", [(512, 64, 256), (64, 512, 256), (512, 256, 64)])
def test_the_smallest_of_several_caches_decides_who_is_let_in(sizes: tuple[int, ...]) -> None:
    target, *drafts = sizes
    router = Router({name: ModelDrafter(runner_with(DRAFT, size)) for name, size in zip("ab", drafts, strict=True)})
    assert Engine(runner_with(MODEL, target), router, make("fixed", 3), max_seq_len=128).scheduler.free_kv_tokens == 64
    assert Router({}).free_tokens() is None


@pytest.mark.once("about the draft model")
def test_a_draft_model_holds_what_was_committed_and_nothing_that_was_rejected() -> None:
    """An exact copy of the target is never rejected by a greedy request, however often others were."""
    router = Router({"copy": ModelDrafter(runner_with(MODEL, 1024)), "noisy": ModelDrafter(runner_with(DRAFT, 1024))})
    engine = Engine(runner_with(MODEL, 1024), router, make("fixed", 5), max_seq_len=128)
    sampled = SamplingParams(max_tokens=60, temperature=1.0, seed=2, draft="copy", acceptance="ratio")
    requests = [engine.add([1, 2, 3], greedy(60, draft="copy")), engine.add([4, 5], sampled)]
    run(engine, requests)
    assert [request.report.alpha_hat for request in requests] == [1.0, 1.0]  # p = q in every test, so a ratio of 1
    noisy = engine.add([1, 2, 3], greedy(60, draft="noisy"))
    rounds = rounds_of(engine)
    run(engine, [noisy])
    assert 0 < noisy.report.num_accepted < noisy.report.num_drafted
    # In every round the draft model guesses first what it says after the committed tokens.
    for tokens, drafted in [(noisy.seq.tokens[: r.position], r.tokens[0]) for r in rounds if r.tokens]:
        engine = Engine(runner_with(DRAFT, 256), Router({}), make("fixed", 1), max_seq_len=128)
        assert run(engine, [engine.add(tokens, greedy(1))]) == [[drafted]]
