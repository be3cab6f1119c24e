"""`forerun bench latency`: the numbers that are made of measurements, on measurements whose numbers are known."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from forerun import registry
from forerun.bench import latency
from forerun.bench.latency import WORKLOADS, EncoderClock, ForwardClock, planned, run_once
from forerun.bench.plans import LatencyPlan
from forerun.bench.results import Tally, Variant, line_of, plain_pass_s_of
from forerun.config import EngineConfig
from forerun.engine.llm import LLM
from forerun.engine.opened import Opened
from forerun.errors import BadOption, InternalError
from forerun.theory import formulas
from forerun.types import SamplingParams, StepReport
from refusals import refusal

PLAIN, MODEL = Variant("none", 0), Variant("model", 3)


def plain_tally(temperature: float, pass_s: float) -> Tally:
    """Two runs at 0.5 and 1 s per token; a pass takes `pass_s`, and a hundredth of a second is spent elsewhere."""
    step = StepReport(num_decoding=1, num_emitted=1, score_s=pass_s + 0.01, target_forward_s=pass_s)
    return Tally(PLAIN, temperature, [0.5, 1.0], [step] * 4, [0.0] * 4)


def drafting_step(num_accepted: int, **seconds: float) -> StepReport:
    """A step of one request, whose drafter made 3 tokens."""
    counts = {"num_accepted": num_accepted, "num_emitted": num_accepted + 1, "num_committed": num_accepted + 1}
    return StepReport(num_decoding=1, num_drafted=3, num_tested=3, **counts, **seconds)  # type: ignore[arg-type]


def model_tally() -> Tally:
    """Per step: 0.3 s of drafting (0.24 in forwards), 0.6 of verifying, 0.05 + 0.02 + 0.03 around it."""
    step = drafting_step(2, draft_s=0.3, score_s=0.65, target_forward_s=0.6, judge_s=0.02, commit_s=0.03)
    return Tally(MODEL, 0.0, [0.25, 0.4], [step] * 4, [0.24] * 4)


def tallied(llms: dict[Variant, LLM], texts: list[str], plan: LatencyPlan) -> Any:
    with latency.progress_bar() as progress:
        return latency.tallied(llms, [(f"prompt {i}", text) for i, text in enumerate(texts)], plan, progress)


def test_every_number_of_a_line() -> None:
    line = line_of(model_tally(), plain_tally(0.0, 0.4), plain_pass_s=0.5)
    assert line.speedup == pytest.approx((0.5 / 0.25 + 1.0 / 0.4) / 2)
    assert line.speedup_range == pytest.approx((2.0, 2.5))
    assert line.tokens_per_s == pytest.approx(1 / 0.325)
    assert line.tokens_per_step == 3
    assert line.alpha_hat == line.acceptance_rate == pytest.approx(2 / 3)
    assert line.c == pytest.approx(0.1 / 0.5)  # the drafter's sampling is part of what a drafted token costs
    assert line.v == pytest.approx(0.6 / 0.5)
    assert line.overhead_share == pytest.approx((1.0 - 0.6 - 0.24) / 1.0)  # outside of both models' forwards
    assert line.theorem_3_8 == pytest.approx(formulas.speedup(2 / 3, 3, 0.2))
    # Everything is counted once: 3 c + v + o are the seconds of a step, 1.0, over those of a plain pass.
    assert line.expected == pytest.approx(formulas.expected_tokens(2 / 3, 3) / (1.0 / 0.5))


def test_the_plain_pass_is_that_of_all_temperatures() -> None:
    assert plain_pass_s_of([plain_tally(0.0, 0.4), plain_tally(1.0, 0.6), model_tally()]) == pytest.approx(0.5)


def test_plain_decoding_is_its_own_measure_and_short_drafts_have_no_prediction() -> None:
    plain = plain_tally(0.0, 0.4)
    line = line_of(plain, plain, 0.4)
    assert (line.speedup, line.v, line.c, line.alpha_hat, line.expected) == (1.0, 1.0, None, None, None)
    short = model_tally()
    short.steps[:2] = [StepReport(num_decoding=1, num_drafted=1, num_tested=1, num_emitted=1, score_s=0.1)] * 2
    assert line_of(short, plain, 0.4).expected is None


def test_a_step_is_charged_with_its_own_forwards_only(tiny: Path) -> None:
    """The draft model reads the prompt in 25 steps before the first token; none of that is part of a decoding step."""
    llm = LLM(str(tiny), draft=str(tiny), spec_length=3, pacing="fixed", prefill_chunk_tokens=8, prefix_caching=False)
    reports, tally = list[StepReport](), Tally(MODEL, 0.0)
    llm.listen(reports.append)
    runner = llm.engine.drafter.first.runner
    assert runner is not None
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    run_once(llm, "a" * 200, params, tally, ForwardClock(runner))
    assert sum(step.num_catchup_tokens for report in reports[:25] for step in report.drafts.values()) == 199
    assert tally.steps == reports[25:]
    assert sum(step.num_committed for step in tally.steps) == 8
    for step, draft_forward_s in zip(tally.steps, tally.draft_forward_s, strict=True):
        assert (draft_forward_s > 0) == (step.num_drafted > 0)
        assert draft_forward_s <= step.draft_s
    assert line_of(tally, tally, plain_pass_s=1.0).overhead_share > 0


def test_encoders_are_counted_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that passes within encoders alone, an answer takes no time, and their seconds are all there is."""
    pytest.importorskip("transformers")
    from engine.test_encoder_decoders import write_t5

    now = [0.0]
    monkeypatch.setattr(latency, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    write_t5(tmp_path, 1)
    with LLM(tmp_path, draft=f"model:path={tmp_path}", spec_length=2, max_seq_len=64, prefix_caching=False) as llm:
        draft_runner = llm.engine.drafter.first.runner
        assert draft_runner is not None
        for runner, seconds in ((llm.engine.runner, 3.0), (draft_runner, 0.5)):
            model: Any = runner.model
            begin = model.begin

            def slow(sources: Any, cache: Any, begin: Any = begin, seconds: float = seconds) -> None:
                now[0] += seconds
                begin(sources, cache)

            monkeypatch.setattr(model, "begin", slow)
        tally, params = Tally(MODEL, 0.0), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        run_once(llm, [7, 8, 9], params, tally, ForwardClock(draft_runner), EncoderClock(llm))
    assert (tally.encoder_s, tally.num_tokens, tally.seconds_per_token) == ([3.5], [6], [0.0])


def test_answers_end_where_the_model_ends_them(tiny: Path) -> None:
    """Only with until_end; all tallies have the runs of all prompts in their order, twice."""
    ends = {}
    for until_end in (False, True):
        plan = LatencyPlan(num_repeats=2, max_tokens=200, temperatures=(1.0,), until_end=until_end)
        llm = LLM(str(tiny), draft="none", prefix_caching=False)
        made = tallied({PLAIN: llm, MODEL: llm}, ["abc", "x" * 9], plan)
        assert [key for key, _ in made.items()] == [(1.0, PLAIN), (1.0, MODEL)]
        assert made[1.0, PLAIN].num_tokens == made[1.0, MODEL].num_tokens
        ends[until_end] = made[1.0, PLAIN].num_tokens
    assert ends[False] == [200] * 4
    assert min(ends[True]) < 200


def test_drafts_are_timed_and_one_that_fails_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 1 as at 0: chains are drawn in one call of the runner."""
    plan = LatencyPlan(num_repeats=1, max_tokens=12, temperatures=(0.0, 1.0))
    with LLM("shipped", draft="model", pacing="fixed", spec_length=3, max_seq_len=64) as llm:
        made = tallied({MODEL: llm}, ["def f("], plan)
        assert all(step.num_drafted and step.draft_s for tally in made.values() for step in tally.steps[:2])
        runner = llm.engine.drafter.first.runner
        monkeypatch.setattr(runner, "run_ahead", lambda *given, **more: 1 // 0)
        monkeypatch.setattr(runner, "forward", lambda *given, **more: 1 // 0)
        assert "ZeroDivisionError" in refusal(InternalError, tallied, {MODEL: llm}, ["def f("], plan)


def test_drafters_that_a_model_cannot_have_are_left_out_and_named(tiny: Path) -> None:
    console, config = Console(file=(printed := io.StringIO()), width=200), EngineConfig(target=str(tiny))
    llms = latency.engines(Opened.of(config).load(), config, LatencyPlan(), console)
    left_out = re.findall("^left out: (.+), for .+:", printed.getvalue(), re.MULTILINE)
    assert {"eagle", "model"} <= set(left_out)
    assert sorted([*left_out, *(variant.draft for variant in llms)]) == sorted(registry.names("forerun.drafters"))


def test_each_prompt_begins_with_another_variant(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list[tuple[str, Variant]]()
    monkeypatch.setattr(latency, "run_once", lambda llm, prompt, _, tally, *more: runs.append((prompt, tally.variant)))
    plan, third = LatencyPlan(num_repeats=2, temperatures=(0.0,)), Variant("third", 1)
    tallied(dict.fromkeys((PLAIN, MODEL, third), LLM(str(tiny), draft="none")), ["x", "y"], plan)
    assert [prompt for prompt, _ in runs] == ["x"] * 3 + ["y"] * 3 + ["x"] * 3 + ["y"] * 3
    orders = [[variant for _, variant in runs[i : i + 3]] for i in range(0, 12, 3)]
    begun = [[PLAIN, MODEL, third], [MODEL, third, PLAIN], [third, PLAIN, MODEL]]
    assert orders == [begun[0], begun[1], begun[1], begun[2]]


def test_a_workload_is_a_plan_that_says_which_models() -> None:
    plan, engine = planned("w1", {"num_prompts": 2})
    assert plan == LatencyPlan(num_prompts=2, **WORKLOADS["w1"][0])
    assert (plan.shape, plan.draft_shape) == ("llama-3.2-3b", "llama-3.2-1b")
    assert engine == {"dtype": "bfloat16"}
    assert planned("w1", {"spec_lengths": (2,)})[0].spec_lengths == (2,)
    assert planned(None, {"shape": "demo"}) == (LatencyPlan(shape="demo"), {})


@pytest.mark.parametrize(
    ("workload", "wanted", "sentence"),
    [
        ("w2", {}, "there is no workload 'w2': it must be one of w1"),
        ("w1", {"shape": "demo"}, "--workload w1 contradicts --shape: drop one"),
        ("w1", {"draft_shape": "demo"}, "--workload w1 contradicts --draft-shape: drop one"),
    ],
)
def test_contradictory_plans_are_refused(workload: str | None, wanted: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(BadOption, planned, workload, wanted)
