"""While requests decode, a prompt is read in pieces that stretch a step no more than was asked; texts stay the same."""

import dataclasses
import random
from typing import Any

import pytest

from engine.load import alone, at_work, engine_with, heard, run
from forerun import LLM
from forerun.config import EngineConfig
from forerun.engine.fair import FIRST_SHARE, FIRST_TOKENS, LEAST_SHARE, LEAST_TOKENS, RENEWED_AFTER, Allowance, Fair
from forerun.errors import BadOption
from forerun.types import SamplingParams, StepReport

USUAL_S = 0.010
DECODING = StepReport(num_decoding=2, score_s=USUAL_S)


def mixed(num_tokens: int, seconds: float, num_before: int = 0, num_decoding: int = 2) -> StepReport:
    keys = num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
    return StepReport(num_decoding=num_decoding, num_prefill_tokens=num_tokens, num_prefill_keys=keys, score_s=seconds)


def known(stretch: float | None, *reports: StepReport, max_itl_s: float | None = None) -> Fair:
    fair = Fair(stretch, max_itl_s)
    for report in reports:
        fair.observe(report)
    return fair


def allowed(fair: Fair, most: int, num_decoding: int, num_before: int = 0) -> int:
    """Tokens of one prompt, behind so many of its own, in a step in which so many requests decode."""
    fair.plan(num_decoding, is_reading=True)
    return fair.allowance(most).fitting(num_before)


def test_a_step_takes_so_many_times_as_long_as_usual() -> None:
    """A usual step takes 10 ms, a token of a prompt 0.2 ms: of the 20 ms that are allowed 80 % are 80 tokens."""
    fair = known(3.0, DECODING, mixed(50, 0.020))
    assert allowed(fair, 512, 2) == int(100 * FIRST_SHARE) == 80
    assert allowed(fair, 64, 2) == 64
    assert allowed(known(2.0, DECODING, mixed(50, 0.020)), 512, 2) == 40
    assert allowed(known(None, DECODING, mixed(50, 0.020)), 512, 2) == 512


def test_of_factor_and_milliseconds_the_smaller_holds() -> None:
    seen = DECODING, mixed(50, 0.020)
    assert allowed(known(3.0, *seen, max_itl_s=0.020), 512, 2) == 40
    assert allowed(known(3.0, *seen, max_itl_s=0.050), 512, 2) == 80
    assert allowed(known(None, *seen, max_itl_s=0.020), 512, 2) == 40
    assert allowed(known(None, *seen, max_itl_s=0.005), 512, 2) == LEAST_TOKENS, "a step is longer without any prompt"


def test_what_is_not_known_and_what_is_too_dear() -> None:
    assert allowed(known(3.0), 512, 2) == 0, "a step shows first how long it is without prompts"
    assert allowed(known(3.0, DECODING), 512, 2) == FIRST_TOKENS
    assert allowed(known(3.0, DECODING, mixed(4, 5.0)), 512, 2) == LEAST_TOKENS
    assert allowed(known(3.0, DECODING, mixed(50, 0.020)), 0, 2) == 0, "no row is left"
    assert allowed(known(3.0, DECODING, mixed(64, 0.001)), 512, 2) == 512, "a token that takes no time"


def test_the_latest_chunks_count_and_the_usual_step_is_a_median() -> None:
    fair = known(3.0, DECODING, DECODING, dataclasses.replace(DECODING, score_s=1.0), *[mixed(50, 0.020)] * 9)
    assert allowed(fair, 512, 2) == pytest.approx(100 * FIRST_SHARE, abs=1), "one step that was disturbed says nothing"
    fair.observe(mixed(50, 0.5))
    assert allowed(fair, 512, 2) > 65, "nor does one chunk"
    for _ in range(20):
        fair.observe(mixed(25, 0.028))  # the machine has become slower
    assert allowed(fair, 512, 2) == pytest.approx(FIRST_SHARE * 20 / 0.72, abs=1)


def test_how_long_a_step_usually_is_goes_by_how_many_decode_and_is_looked_at_again() -> None:
    """Otherwise eight streams would count as one whose prompts are dear, and prompts might never be read."""
    fair = known(3.0, DECODING, mixed(50, 0.020))
    assert allowed(fair, 512, 8) == 0
    fair.observe(StepReport(num_decoding=8, score_s=0.040))
    assert allowed(fair, 512, 8) == pytest.approx(400 * FIRST_SHARE, abs=2)
    for _ in range(RENEWED_AFTER - 1):
        assert allowed(fair, 512, 2) > 0
        fair.observe(mixed(50, 0.020))
    assert allowed(fair, 512, 2) == 0
    fair.observe(DECODING)
    assert allowed(fair, 512, 2) > 0


def test_a_token_takes_longer_behind_many_others() -> None:
    """What two texts showed serves a third that begins where neither is: the base and the slope are learned."""
    fair = known(3.0, DECODING)
    for _ in range(20):
        fair.observe(DECODING)
        for before in (0, 8_000):
            fair.observe(mixed(16, USUAL_S + 16 * (1e-3 + 5e-7 * (before + 8.5)), before))
    at = {before: allowed(fair, 512, 2, before) for before in (0, 4_000, 8_000, 16_000)}
    wanted = {before: fair._share * 2 * USUAL_S / (1e-3 + 5e-7 * before) for before in at}
    assert at == pytest.approx(wanted, rel=0.1, abs=1)


def test_a_chunk_that_is_long_itself_is_dearer_than_its_first_token() -> None:
    fair = known(300.0, DECODING)
    for _ in range(15):
        for before in (0, 4_000):
            fair.observe(mixed(64, USUAL_S + 64 * (1e-3 + 1e-6 * (before + 32.5)), before))
    num = allowed(fair, 10**9, 2)
    assert num * 1e-3 + num * num / 2 * 1e-6 == pytest.approx(299 * USUAL_S * fair._share, rel=0.05)


@pytest.mark.parametrize(("noise", "pauses"), [(0.02, 0.0), (0.1, 0.0), (0.05, 0.001)])
@pytest.mark.parametrize("num_tokens", [2_400, 16_000])
def test_the_promise_holds_for_99_of_100_steps_of_a_noisy_machine(num_tokens: int, noise: float, pauses: float) -> None:
    """A simulated machine, with the times of a 0.5 B model on two cores; steps and chunks are noisy, some pause."""
    chance = random.Random(7)
    fair = Fair(3.0)
    seconds = list[float]()
    usual_s = 0.013

    def noisy(s: float) -> float:
        return s * chance.lognormvariate(0, noise) * (3 if chance.random() < pauses else 1)

    def token_s(at: float) -> float:
        return 1.4e-3 + 5e-7 * at

    for _ in range(20):
        fair.observe(StepReport(num_decoding=2, score_s=noisy(usual_s)))
    for _ in range(3):  # texts, one behind the other
        done = 0
        while done < num_tokens:
            num, step_s = min(allowed(fair, 512, 2, done), num_tokens - done), noisy(usual_s)
            if num:
                step_s += noisy(num * token_s(done + num / 2) + 5e-7 * done)  # each pass reads all keys once
                fair.observe(mixed(num, step_s, done))
            else:
                fair.observe(dataclasses.replace(DECODING, score_s=step_s))
            seconds.append(step_s)
            done += num
    assert sum(step_s > 3 * usual_s for step_s in seconds) <= 0.01 * len(seconds)
    alone_s = 3 * sum(token_s(at) for at in range(num_tokens))
    assert sum(seconds) <= alone_s * 3.5, "and prompts are read all the same"


def test_pauses_that_no_chunk_has_made_do_not_make_chunks_smaller() -> None:
    fair = known(3.0, DECODING, *[mixed(50, 0.020)] * 9)
    before = fair._share
    for seconds in (0.500, 0.012, 0.012) * 50:
        fair.observe(mixed(10, seconds))
    assert fair._share >= before
    for _ in range(50):
        fair.observe(mixed(90, 0.031))
    assert fair._share == LEAST_SHARE


def test_steps_in_which_nothing_decodes_teach_nothing_of_those_beside_streams() -> None:
    fair = known(3.0, DECODING, mixed(50, 0.020), StepReport(num_prefill_tokens=512, score_s=9.0))
    assert allowed(fair, 512, 2) == 80


@pytest.mark.parametrize("value", [0.5, -1, "fast"])
@pytest.mark.parametrize("name", ["max_itl_ms", "prefill_stretch"])
def test_limits_are_checked_at_the_door(name: str, value: Any) -> None:
    with pytest.raises(BadOption, match=name):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("value", [0, None, "0"])
def test_zero_is_no_limit(value: Any) -> None:
    with LLM("shipped", draft="none", max_itl_ms=value, prefill_stretch=value) as llm:
        assert not llm.engine.scheduler.fair.seat.promises
    with LLM("shipped", draft="none", max_itl_ms=20) as llm:
        fair = llm.engine.scheduler.fair
        assert (fair.seat.stretch, fair.seat.max_itl_s) == (3.0, 0.02)


@pytest.mark.parametrize("options", [{"prefill_stretch": 3.0}, {"max_itl_s": 0.001}, {}])
def test_a_prompt_is_read_in_pieces_beside_others_and_the_texts_are_the_same(
    options: dict[str, Any], speculation: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler asks; what it is told here is that tokens are dear."""
    asked = list[int]()

    def allowance(self: Fair, most: int) -> Allowance:
        asked.append(self.seat.num_streams)
        return Allowance(min(most, 5) if self.seat.promises and self.seat.num_streams else most)

    monkeypatch.setattr(Fair, "allowance", allowance)
    wanted = [
        ([1, 2], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)),
        (list(range(3, 23)) * 3, SamplingParams(temperature=0.8, seed=4, max_tokens=9)),
    ]
    engine, chunks = engine_with(**options), list[tuple[int, int]]()
    first = engine.add(*wanted[0])
    engine.step()
    engine.listen(lambda step: chunks.append((step.num_prefill_tokens, step.num_prefill_keys)))
    assert run(engine, [first, engine.add(*wanted[1])]) == alone(wanted)
    assert [tokens for tokens, _ in chunks if tokens] == ([59] if not options else [5] * 11 + [4])
    assert sum(keys for _, keys in chunks) == 59 * 60 // 2, "a row sees all before it, and itself"
    assert [num_decoding for num_decoding in asked if num_decoding] == [1] * (12 if options else 1)


def test_a_chunk_is_the_smaller_the_more_of_its_prompt_is_read(speculation: object) -> None:
    """Keys are all that takes time here, 0.2 ms each: behind 50 others a token takes 10 ms, and two 20."""
    engine, chunks = engine_with(prefill_stretch=3.0), list[int]()
    fair = engine.scheduler.fair
    stream = engine.add([1, 2], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, draft="none"))
    at_work(engine, stream)
    engine.listen(lambda step: chunks.append(step.num_prefill_tokens))
    prompt = engine.add([i % 9 for i in range(60)], SamplingParams(temperature=0, max_tokens=1))
    while not prompt.report.num_steps:
        for _ in range(9):
            fair.observe(StepReport(num_decoding=1, score_s=USUAL_S))
            fair._own.observe(1, 10, 0.002)
            fair._own.observe(1, 40_000, 8.0)
        engine.step()
    read = [num for num in chunks if num]
    assert read[0] > 5
    assert max(read[-5:]) == 1
    run(engine, [stream, prompt])


def test_a_prompt_waits_for_a_step_that_shows_how_long_it_is_without() -> None:
    engine = engine_with(prefill_stretch=3.0)
    first = engine.add([1, 2], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    engine.step()
    steps = heard(engine)
    run(engine, [first, engine.add(list(range(3, 23)), SamplingParams(temperature=0, max_tokens=2))])
    assert steps[0].num_decoding == 1
    assert sum(step.num_prefill_tokens for step in steps) == 19
