"""The policy `utility`: on which length it settles, how rarely it tests what does not pay, and what counts as cost."""

from collections.abc import Callable

import pytest

from forerun import SamplingParams
from forerun.pacing import Pacing, make
from forerun.pacing.cost import Costs
from forerun.pacing.mixing import Mixture
from forerun.pacing.pass_time import WIDTHS, PassTime
from forerun.types import DraftStep, Sequence, SequenceStep, StepReport
from pacing.simulator import CPU, Machine, World, oracle

ROW_S = 0.01  # seconds of a pass of one row
TEST_ROUNDS, SET_ROUNDS = 4, 16
Accepts = Callable[[int, int], int]  # (round, drafted tokens) -> accepted ones


def policy(spec: str = "utility", row: float = 0.1, longest: int | None = None, **costs: object) -> Pacing:
    """A policy where each further row takes `row` times what the first one takes."""
    return make(spec, longest, Costs(PassTime((1, 2), (1.0, 1 + row), ROW_S), **costs))


def sequence(request: int = 0, **params: object) -> Sequence:
    return Sequence(request, [1, 2, 3], 2, SamplingParams(**params), 0, 10**6, draft="model")


def report(
    drafted: list[int], accepted: list[int], row: float = 0.1, draft_s: float = 0.0, **told: float
) -> StepReport:
    """A step of requests 0, 1 ..., which takes as long as the policy expects."""
    num, pairs = len(drafted), zip(drafted, accepted, strict=True)
    rounds = [SequenceStep(b, "model", k, k, tuple(range(n))) for b, (k, n) in enumerate(pairs)]
    step = StepReport(num_decoding=num, num_rows=num + sum(drafted), num_emitted=num + sum(accepted), sequences=rounds)
    step.score_s = ROW_S * (1 + row * (step.num_rows - 1))
    step.draft_s = draft_s
    step.drafts["model"] = DraftStep(draft_s, sum(k > 0 for k in drafted), sum(drafted))
    vars(step).update(told)
    return step


def lengths(
    pacing: Pacing,
    accepts: Accepts,
    num_rounds: int,
    draft_row_s: float = 0.0,
    row: float = 0.1,
    finds: Callable[[int], bool] = lambda step: True,
) -> list[int]:
    """What one request is granted in each round."""
    seq, granted = sequence(), list[int]()
    for step in range(num_rounds):
        granted += pacing.budget([seq], [64])
        drafted = granted[-1] if finds(step) else 0
        pacing.observe(report([drafted], [accepts(step, drafted)], row, draft_row_s * drafted))
    return granted


def trials(granted: list[int], num: int) -> list[int]:
    """The lengths of the first trials, each of which must take all its rounds."""
    found = granted[: num * TEST_ROUNDS : TEST_ROUNDS]
    assert granted[: num * TEST_ROUNDS] == [length for length in found for _ in range(TEST_ROUNDS)]
    return found


def at_most(num: int) -> Accepts:
    return lambda step, drafted: min(num, drafted)


@pytest.mark.parametrize(
    ("num_right", "tried", "best"),
    [
        # Utilities of 3, 4, 6 where a row takes a tenth of a pass: 4 / 1.3, 5 / 1.4, 5 / 1.6.
        (4, [3, 4, 6], 4),
        # 3: 4 / 1.3, 4: 5 / 1.4, 6: 7 / 1.6, 8: 9 / 1.8; four trials, then the best of them.
        (99, [3, 4, 6, 8], 8),
        # 3: 2 / 1.3, 4: 2 / 1.4, 2: 2 / 1.2, 1: 2 / 1.1.
        (1, [3, 4, 2, 1], 1),
        # 3: 1 / 1.3, 2: 1 / 1.2, 1: 1 / 1.1; where nothing pays no longer draft is tried.
        (0, [3, 2, 1], 0),
    ],
)
def test_a_test_phase_climbs_to_the_best_length(num_right, tried, best):
    granted = lengths(policy(), at_most(num_right), (len(tried) + 1) * TEST_ROUNDS + SET_ROUNDS)
    assert trials(granted, len(tried)) == tried
    assert granted[len(tried) * TEST_ROUNDS :][:SET_ROUNDS] == [best] * SET_ROUNDS
    assert granted[len(tried) * TEST_ROUNDS + SET_ROUNDS] == (best or 1), (
        "the next one begins with the best of the last"
    )


def test_it_climbs_on_in_the_next_test_phase():
    assert lengths(policy(), at_most(99), 3 * (4 * TEST_ROUNDS + SET_ROUNDS))[-1] == 16
    assert max(lengths(policy(longest=5), at_most(99), 99)) == 5


def test_the_best_of_a_table_with_acceptance_by_rank():
    """Three rounds of four accept two tokens, and one accepts six.

    So four rounds with 2, 3, 4 and 6 make 12, 13, 14 and 16 tokens. Where a row takes 0.12 passes their utilities are
    12 / 4.96, 13 / 5.44 and 14 / 5.92; where it takes 0.05 they are 13 / 4.6, 14 / 4.8, 16 / 5.2, and 16 / 5.6 with 8.
    """

    def accepts(step: int, drafted: int) -> int:
        return min(6 if step % 4 == 0 else 2, drafted)

    assert lengths(policy(row=0.12), accepts, 40, row=0.12)[20] == 2
    assert lengths(policy(row=0.05), accepts, 40, row=0.05)[20] == 6


def test_a_drafter_that_takes_more_than_it_brings_drafts_nothing():
    """All is accepted, and the drafter takes as long for a token as the target: 4 tokens in 1.3 + 3 passes."""
    assert lengths(policy(), at_most(99), 60, draft_row_s=ROW_S)[12:28] == [0] * SET_ROUNDS
    assert lengths(policy(), at_most(99), 60, draft_row_s=ROW_S / 10)[30] > 4


def test_what_a_drafter_catches_up_on_is_no_cost_of_a_length():
    seq, pacing = sequence(), policy()
    for _ in range(TEST_ROUNDS):
        (granted,) = pacing.budget([seq], [64])
        step = report([granted], [granted])
        step.drafts["model"] = DraftStep(seconds=1.0, num_sequences=1, num_nodes=granted, catchup_s=1.0)
        pacing.observe(step)
    assert pacing.facts(seq)["utility"] == pytest.approx(4 / 1.3)


def test_tests_become_rare_where_nothing_pays():
    """At most 4 % of the first thousand rounds, and 1 % of those behind them."""
    granted = lengths(policy(), at_most(0), 6000)
    assert sum(length > 0 for length in granted[:1000]) <= 40
    assert sum(length > 0 for length in granted[1000:]) <= 50
    assert set(granted[12:]) == {0, 1}, "later trials are of one token"
    tests = [step for step in range(1, 6000) if granted[step] and not granted[step - 1]]
    pauses = [later - earlier - TEST_ROUNDS for earlier, later in zip([8, *tests], tests, strict=False)]
    assert pauses == [SET_ROUNDS * 2**i for i in (0, 1, 2, 3, 4, *[5] * (len(pauses) - 5))]
    assert len(pauses) > 10


@pytest.mark.parametrize("returns_at", [40, 300, 2000])
def test_acceptance_that_returns_is_found_within_the_pause(returns_at):
    granted = lengths(policy(), lambda step, drafted: 0 if step < returns_at else drafted, returns_at + 700)
    longest = SET_ROUNDS * 2**5
    assert any(granted[returns_at : returns_at + longest + TEST_ROUNDS])
    behind = granted[returns_at + longest + 5 * TEST_ROUNDS :]
    assert min(behind) > 0
    assert behind[-1] >= 8


def test_pauses_are_short_again_behind_a_phase_that_paid():
    """Wrong for 300 rounds, right for 600, wrong for good: the first pause then is as long as the first of all."""
    granted = lengths(policy(), lambda step, drafted: drafted if 300 <= step < 900 else 0, 1000)
    first = next(step for step in range(900, 1000) if not granted[step])
    assert granted[first : first + SET_ROUNDS + 1] == [0] * SET_ROUNDS + [granted[first + SET_ROUNDS]]
    assert granted[first + SET_ROUNDS] > 0


def test_rounds_that_found_nothing_are_no_rounds_of_a_trial():
    """A search that finds something in one of eight rounds, which is right then, goes on."""
    granted = lengths(policy(), lambda step, drafted: drafted, 8 * 12, finds=lambda step: step % 8 == 7)
    assert granted == [3] * 32 + [4] * 32 + [6] * 32


def test_phases_are_as_long_as_the_options_say():
    granted = lengths(policy("utility:test_rounds=2,set_rounds=5"), at_most(4), 30)
    assert granted[:20] == [3, 3, 4, 4, 6, 6, *[4] * 5, 4, 4, 6, 6, 3, 3, 4, 4, 4]


def test_requests_have_phases_of_their_own():
    pacing, seqs = policy(row=0.01), [sequence(0), sequence(1)]
    for _ in range(40):
        granted = pacing.budget(seqs, [64, 64])
        pacing.observe(report(granted, [granted[0], 0], row=0.01))
    assert granted[0] >= 4
    assert granted[1] == 0
    pacing.end(seqs[1])
    assert pacing.budget(seqs, [64, 64])[1] == 3, "a number that is used again begins anew"


def test_a_draft_pays_by_the_tokens_of_the_whole_pass():
    """Of eight requests on a machine that is bound by arithmetic: two more tokens for three more rows of eleven.

    By its own tokens a request would gain, 3 for 11 / 8 of the time; the pass has 10 tokens for 8.
    """
    pacing = policy(row=1.0)
    seqs = [sequence(b, **({} if b == 0 else {"spec_length": 1})) for b in range(8)]
    for _ in range(TEST_ROUNDS):
        assert pacing.budget(seqs, [64] * 8) == [3] + [1] * 7
        pacing.observe(report([3] + [0] * 7, [2] + [0] * 7, row=1.0))
    assert pacing.facts(seqs[0])["utility"] == pytest.approx(10 / 8 * 8 / 11)


def test_experts_that_a_pass_chose_are_part_of_its_time():
    """Rows that choose other experts each, where each takes time, do not pay; rows that share them do."""

    def utility(num_experts: float) -> float:
        mixture = Mixture(64.0, (1, 2, 4), (2, 2, 2), (2, 4, 8), (0.0, 1.0, 3.0))
        pacing, seq = make("utility", None, Costs(PassTime((1, 4), (1.0, 1.0), ROW_S, mixture=mixture))), sequence()
        for _ in range(TEST_ROUNDS):
            (granted,) = pacing.budget([seq], [64])
            pacing.observe(report([granted], [1], num_experts=num_experts))
        return pacing.facts(seq)["utility"]

    assert utility(2) == pytest.approx(2 / 1)
    assert utility(8) == pytest.approx(2 / 4)


def test_a_step_that_reads_a_prompt_says_nothing():
    pacing, seq = policy(), sequence()
    for _ in range(99):
        assert pacing.budget([seq], [64]) == [3]
        pacing.observe(report([3], [0], num_prefill_tokens=100))


def test_a_length_that_a_request_names_is_kept():
    pacing, seq = policy(), sequence(spec_length=7)
    for _ in range(40):
        assert pacing.budget([seq], [64]) == [7]
        pacing.observe(report([7], [0]))
    assert pacing.facts(seq) == {}


@pytest.mark.parametrize(
    ("num", "alpha", "least"),
    [(1, 0.9, 0.85), (1, 0.8, 0.8), (1, 0.6, 0.85), (1, 0.0, 0.98), (4, 0.0, 0.98), (4, 0.9, 0.5)],
)
def test_with_noise_it_comes_near_the_best_fixed_length(num, alpha, least):
    """Four rounds tell lengths apart only roughly; of several requests each climbs while the others move (the page)."""
    world = World(lambda step, b: alpha, num, Machine(CPU, pass_s=0.002), seed=1)
    costs = Costs(PassTime(WIDTHS, [CPU(width) for width in WIDTHS]))
    assert world.run(make("utility", None, costs), 1500).rate() >= least * oracle(world, 0, 1500)
