"""Catching up in small parts: how many tokens a step allows, and which requests get them."""

import pytest

from engine.load import DRAFT, MODEL, alone, engine_with, greedy, heard, run, runner_with
from forerun.drafters.shared.model_drafter import ModelDrafter
from forerun.engine.catchup import FIRST_TOKENS, LEAST_TOKENS, SHARE, CatchUp
from forerun.engine.engine import Engine
from forerun.engine.router import Router
from forerun.pacing.fixed import FixedPacing
from forerun.types import DraftStep, Sequence, StepReport

pytestmark = pytest.mark.once("about draft models")


class Late(FixedPacing):
    """Grants the same in every step, and lets no drafter read a prompt before its first round."""

    def prepares(self, seq: Sequence) -> bool:
        return False


def late_engine(catchup_tokens: int) -> Engine:
    router = Router({name: ModelDrafter(runner_with(DRAFT, 1024)) for name in "ab"})
    options = {"max_seq_len": 128, "prefill_chunk_tokens": 512, "catchup_tokens": catchup_tokens}
    return Engine(runner_with(MODEL, 1024), router, Late(3), **options)


def report(step_s: float, num_prefill: int = 0, **caught_up: tuple[int, float]) -> StepReport:
    """A step of one sequence that takes so long besides what drafters caught up: tokens and seconds by drafter."""
    drafts = {name: DraftStep(s, num_catchup_tokens=n, catchup_s=s) for name, (n, s) in caught_up.items()}
    draft_s = sum(s for _, s in caught_up.values())
    return StepReport(num_decoding=1, num_prefill_tokens=num_prefill, draft_s=draft_s, score_s=step_s, drafts=drafts)


# --------------------------------------------------------------------------------------------------------- allowance


def known(*reports: StepReport, most: int = 512) -> CatchUp:
    catchup = CatchUp(most)
    for each in reports:
        catchup.observe(each)
    return catchup


USUAL = report(0.25, a=(128, 0.25))  # catching up with 128 tokens takes as long as a step
AFFORDABLE = int(SHARE * 128)


def test_catching_up_takes_a_share_of_a_usual_step() -> None:
    catchup = known(USUAL, report(0.25), report(0.25))
    assert catchup.tokens("a") == AFFORDABLE
    assert catchup.tokens("a", num_used=20) == AFFORDABLE - 20
    assert known(USUAL, report(9.0), report(0.25)).tokens("a") == AFFORDABLE


def test_steps_that_read_prompts_are_not_usual_ones() -> None:
    assert known(USUAL, *[report(5.0, num_prefill=512)] * 9).tokens("a") == AFFORDABLE


def test_the_present_counts_and_not_what_was_long_ago() -> None:
    assert known(*[report(9.0, a=(1, 9.0))] * 9, *[USUAL] * 9).tokens("a") == AFFORDABLE


def test_the_dearest_of_the_drafters_that_are_asked_decides() -> None:
    catchup = known(report(0.25, a=(128, 0.25), b=(16, 0.0625)))
    assert [catchup.tokens(names) for names in (["a"], ["a", "b"], ["b", "none"])] == [AFFORDABLE, 48, 48]


def test_a_first_guess_a_least_and_a_most() -> None:
    assert known().tokens("a") == known(report(0.25)).tokens("a") == FIRST_TOKENS
    assert known(report(0.25, b=(128, 0.25))).tokens("a") == FIRST_TOKENS
    assert known(most=20).tokens("a") == 20
    assert known(report(0.001, a=(128, 0.25))).tokens("a") == LEAST_TOKENS
    assert known(report(0.001, a=(128, 0.25)), most=7).tokens("a") == 7
    slow = known(report(9.0, a=(128, 0.25)))
    assert [slow.tokens("a", num_used) for num_used in (0, 500, 512)] == [512, 12, 0]


# ------------------------------------------------------------------------------------------------------- in the engine


@pytest.mark.parametrize("names", ["aa", "ab"])
def test_drafters_share_what_a_step_allows(names: str) -> None:
    """Two prompts that no draft model has read when they decode, of one draft model or of one each."""
    engine = late_engine(catchup_tokens=16)
    reports = heard(engine)
    wanted = [([i] * 80, greedy(30, draft=name)) for i, name in enumerate(names)]
    outputs = run(engine, requests := [engine.add(*one) for one in wanted])
    caught_up = [sum(draft.num_catchup_tokens for draft in report.drafts.values()) for report in reports]
    assert max(caught_up) == 16
    assert sum(num == 16 for num in caught_up) >= 2 * 80 // 16
    assert all(request.report.num_drafted for request in requests)
    assert outputs == alone([(prompt, greedy(30, draft="none")) for prompt, _ in wanted])


def test_a_sequence_that_is_ready_does_not_wait_for_one_that_is_behind() -> None:
    engine = late_engine(catchup_tokens=16)
    reports = heard(engine)
    behind, ready = engine.add([1] * 90, greedy(20, draft="a")), engine.add([2, 3], greedy(20, draft="a"))
    run(engine, [behind, ready])
    steps = [step for report in reports for step in report.sequences]
    drafted = [[step.num_drafted for step in steps if step.sequence_id == one.seq.id] for one in (behind, ready)]
    assert drafted[0][:5] == [0] * 5
    assert min(drafted[1][:5]) > 0


def test_the_engine_paces_catching_up_by_what_it_takes() -> None:
    """As far as the reports allow it: never more than was affordable after the reports so far."""
    engine, own = late_engine(catchup_tokens=512), CatchUp(512)
    reports = heard(engine)

    def check(report: StepReport) -> None:
        assert sum(draft.num_catchup_tokens for draft in report.drafts.values()) <= own.tokens("a")
        own.observe(report)

    engine.listen(check)
    run(engine, [engine.add([i] * 90, greedy(30, draft="a")) for i in range(4)])
    numbers = [sum(draft.num_catchup_tokens for draft in report.drafts.values()) for report in reports]
    assert next(num for num in numbers if num) == FIRST_TOKENS
    assert sum(numbers) >= 4 * 90


def test_what_prompts_take_is_not_there_for_others_in_the_same_step() -> None:
    options = {"prefill_chunk_tokens": 40, "catchup_tokens": 48, "prefix_caching": False}
    engine = engine_with(policy="fixed", spec_length=3, **options)
    reports = heard(engine)
    first = engine.add([1] * 80, greedy(40, draft="model"))
    while first.seq.num_output_tokens < 2:
        engine.step()
    engine.drafter.end(first.seq)  # its drafter has to run everything anew
    engine.drafter.begin(first.seq)
    reports.clear()
    run(engine, [first, engine.add([2] * 81, greedy(5, draft="model"))])
    assert [report.drafts["model"].num_catchup_tokens for report in reports if report.num_prefill_tokens] == [48, 48]
