"""A search of the text has a price: where it finds nothing it takes a hundredth of the time, however short steps."""

from collections.abc import Callable

import pytest

from forerun.pacing.auto import PROBE_SHARE, AutoPacing, Options, build
from forerun.pacing.cost import Costs, Traits
from forerun.pacing.pass_time import PassTime
from forerun.pacing.searching import SHARE, Searching
from forerun.params import SamplingParams
from forerun.types import DraftStep, Sequence, SequenceStep, StepReport, Stop

STEP_S, LENGTH = 1.0, 4  # of a plain step; tokens of a guess


class Machine:
    """Requests of one drafter that searches, on a machine where a row more costs `row_s`.

    found(step): how many tokens of a guess are accepted, None = nothing is found.
    """

    def __init__(
        self,
        search_s: float,
        found: Callable[[int], int | None],
        num: int = 1,
        draft: str = "suffix",
        row_s: float = 0.02,
    ) -> None:
        traits = {"suffix": Traits(True, False, True), "model": Traits(True, True)}
        costs = Costs(PassTime((1, 33), (1.0, 1 + 32 * row_s), STEP_S), traits=traits)
        costs.drafts["model"] = PassTime((1, 33), (1.0, 2.0), 2.0)  # so slow that it never pays
        pacing = build(Options(), None, costs)
        assert isinstance(pacing, AutoPacing)
        self.pacing, self.search_s, self.found, self.row_s, self.draft = pacing, search_s, found, row_s, draft
        self.seqs = [Sequence(b, [1] * 9, 9, SamplingParams(temperature=0), 0, 10**6, draft=draft) for b in range(num)]
        self.searched: list[int] = []  # texts, by step
        self.tokens, self.seconds = [], []  # type: list[int], list[float]

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step(len(self.searched))

    def rate(self, first: int) -> float:
        """Tokens per second and request over those of plain decoding, from a step on."""
        return sum(self.tokens[first:]) * STEP_S / sum(self.seconds[first:]) / len(self.seqs)

    def _step(self, step: int) -> None:
        stops = self.pacing.stops(self.seqs, self.pacing.budget(self.seqs, [16] * len(self.seqs)))
        rounds = list[SequenceStep]()
        num_searched = num_nodes = 0
        for b, seq in enumerate(self.seqs):
            stop: Stop | None = stops.get(b)
            if stop is not None and self.draft == "model":
                assert stop.is_shut, "the model never pays"
                stop = stop.search
            drafted, accepted = 0, 0
            if stop is not None:
                num_searched += 1
                if (right := self.found(step)) is not None:
                    while drafted < LENGTH and stop.takes(0.97, drafted - 1):
                        drafted += 1
                    accepted = min(drafted, right)
            num_nodes += drafted
            seq.tokens += [1] * (accepted + 1)
            tested = min(drafted, accepted + 1)
            rounds.append(SequenceStep(seq.id, self.draft, drafted, tested, tuple(range(accepted)), accepted + 1))
        search_s = self.search_s * num_searched
        pass_s = STEP_S * (1 + self.row_s * (len(self.seqs) + num_nodes - 1))
        report = StepReport(num_decoding=len(self.seqs), num_rows=len(self.seqs) + num_nodes, sequences=rounds)
        report.draft_s, report.score_s = search_s, pass_s
        report.num_emitted = len(rounds) + sum(len(own.accepted_ranks) for own in rounds)
        if num_searched:
            step_of = DraftStep(search_s, 1, num_nodes, LENGTH, 0, num_found=num_nodes)
            step_of.search_s, step_of.num_searched = search_s, num_searched
            report.drafts = {self.draft: step_of}
        self.searched.append(num_searched)
        self.tokens.append(report.num_emitted)
        self.seconds.append((pass_s + search_s) / (1 + self.row_s * (len(self.seqs) - 1)))
        self.pacing.observe(report)


@pytest.mark.parametrize("draft", ["suffix", "model"])
@pytest.mark.parametrize("num", [1, 16])
def test_a_search_that_finds_nothing_takes_a_hundredth_of_the_time(draft: str, num: int) -> None:
    machine = Machine(0.1, lambda step: None, num, draft)
    machine.run(600)
    assert sum(machine.searched[:8]) > 0
    assert machine.rate(100) >= 1 - 1.5 * SHARE
    assert 0 < sum(machine.searched[300:]) < 1.5 * SHARE * 300 / 0.1 * (1 + 0.02 * num)


@pytest.mark.parametrize("draft", ["suffix", "model"])
def test_a_search_that_is_cheap_is_never_given_up(draft: str) -> None:
    """A tenth of a millisecond beside a pass of 40."""
    machine = Machine(0.0025, lambda step: None, draft=draft)
    machine.run(600)
    assert sum(machine.searched) > 0.95 * 600


@pytest.mark.parametrize("draft", ["suffix", "model"])
def test_a_text_that_begins_to_repeat_itself_is_found(draft: str) -> None:
    """By the probes, within 100 steps; and then the steps search."""
    machine = Machine(0.2, lambda step: None if step < 400 else LENGTH, draft=draft)
    machine.run(600)
    assert sum(machine.searched[300:400]) < 15
    assert machine.rate(500) > 3
    assert sum(machine.searched[500:]) > 90, "but for a few plain steps, to compare with"


def test_guesses_that_are_wrong_gain_nothing() -> None:
    machine = Machine(0.1, lambda step: 0)
    machine.run(400)
    assert machine.rate(100) > 0.96
    assert sum(machine.searched[200:]) < 40


def test_what_does_not_pay_is_decided_for_those_who_join_and_saved_up_for() -> None:
    """A request that joins others is never asked without a price; tokens that are written save up for a probe."""
    machine = Machine(0.1, lambda step: None, 4, "model")
    machine.run(300)
    spare = machine.pacing._stops.of("model").spare
    machine.run(300)
    assert machine.pacing._stops.of("model").spare - spare > 0.9 * PROBE_SHARE * 300 * 4
    prompt = [1] * 5000
    machine.seqs.append(Sequence(9, prompt, len(prompt), machine.seqs[0].params, 0, 10**6, draft="model"))
    machine.run(40)  # which asserts that a model that never pays is not asked
    assert machine.pacing._requests[9].is_decided


def test_a_drafter_without_requests_is_not_waited_for() -> None:
    machine = Machine(0.1, lambda step: None)
    machine.run(300)
    assert not machine.pacing._may_probe_search([])
    machine.pacing._searching["suffix"]._spared_s = 99.0
    assert machine.pacing._may_probe_search(list(machine.pacing._requests.values()))


def test_who_waits_longest_is_probed_first() -> None:
    searching = Searching(search_s=1.0)
    assert not searching.may_probe()
    for _ in range(2000):
        searching.observe_step(1.0, None, 0.0)
    assert searching.may_probe()
    assert searching.probes([3, 4, 5], 7) == {3, 4, 5}
    assert searching.probes([3, 4, 5, 6, 7, 8, 9], 8) == {6, 7, 8, 9, 3}
    assert searching.probes([3, 4, 5], 9) == set()
    assert not searching.may_probe()
    searching.forget(4)
    assert 4 not in searching._last
