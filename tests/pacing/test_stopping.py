"""Drafts that end by the drafter's own probabilities: what is learned of them, and how much it makes of a second."""

import random
from dataclasses import dataclass

import pytest

from forerun.pacing.auto import AutoPacing, Options, build
from forerun.pacing.cost import Costs, Traits
from forerun.pacing.pass_time import PassTime
from forerun.pacing.reading import Reading
from forerun.pacing.stopping import FIRST_SHARES, Counts, Stopping, promised
from forerun.types import EDGES, DraftStep, SamplingParams, Sequence, SequenceStep, StepReport, Stop

CONFIDENCES = (0.2, 0.4, 0.6, 0.8, 0.9, 0.97, 0.995)  # one between each two edges


def told(confidences: list[float]) -> Stop:
    """The stop behind a chain of tokens with these confidences."""
    stop = Stop.never(len(confidences))
    stop.confidences += confidences
    return stop


def test_a_stop_ends_where_the_product_is_too_small() -> None:
    stop = Stop((0.1,) * 3 + (0.5,) * (len(EDGES) - 2), [0.0, 0.4, 0.2, 0.2])
    assert stop.goes_on(0.9)
    assert stop.goes_on(0.9)
    assert not stop.goes_on(0.9)
    assert stop.confidences == [0.9, 0.9, 0.9]
    assert not Stop((0.1,) * 3 + (0.5,) * (len(EDGES) - 2), [0.0, 0.4]).goes_on(0.1)
    assert not Stop.never(0).goes_on(1.0)
    assert Stop.never(2).goes_on(0.0)


def test_a_tree_takes_nodes_while_their_paths_are_likely_enough() -> None:
    """The n-th node is worth its row where all nodes above it and itself are accepted often enough."""
    stop = Stop((0.5,) * (len(EDGES) + 1), [0.0, 0.3, 0.3, 0.2, 0.2])
    assert stop.takes(0.6, -1)
    assert stop.takes(0.2, -1), "its sibling, which is as likely by the counts"
    assert not stop.takes(0.9, 1)
    assert (stop.confidences, stop.parents) == ([0.6, 0.2], [-1, -1])
    assert stop.gain == pytest.approx(0.5 + 0.5 - 0.3)
    cheap = Stop((0.5,) * (len(EDGES) + 1), [0.0, 0.2, 0.2, 0.2])
    assert [cheap.takes(0.6, parent) for parent in (-1, 0, 1, 0)] == [True, True, False, True]
    assert cheap.parents == [-1, 0, 0]
    best = Stop((0.1,) + (0.5,) * len(EDGES), [0.0] * 4)
    assert all(best.takes(confidence, parent) for confidence, parent in ((0.6, -1), (0.6, 0), (0.2, -1)))
    assert best.survival == pytest.approx(0.25), "of the first token and its first child, and not of the last token"


def test_of_a_tree_what_stands_below_an_accepted_node_was_tested() -> None:
    counts = Counts(1e9)
    bins = [6, 3, 2, 1, 0]
    counts.add(bins, [-1, -1, 0, 1, 3], [1, 3])
    assert [round(number) for number in counts.tested] == [1, 1, 0, 1, 0, 0, 1]
    assert [round(number) for number in counts.accepted] == [0, 1, 0, 1, 0, 0, 0]
    assert [round(number) for number in counts.drafted] == [1, 1, 1, 1, 0, 0, 1]


def test_a_drafter_that_is_too_sure_of_itself_is_found_out() -> None:
    """Only what was tested counts: tokens behind a rejected one say nothing."""
    known, rng = Stopping(), random.Random(0)
    for _ in range(400):
        known.observe(1, told([0.995] * 4), range(next((i for i in range(4) if rng.random() > 0.5), 4)))
    shares, share = known.shares(1)
    assert shares[-1] == pytest.approx(0.5, abs=0.08)
    assert shares[0] == pytest.approx(FIRST_SHARES[0], abs=0.01)
    assert share == pytest.approx(shares[-1], abs=0.08)
    assert known.shares(2)[0][-1] == pytest.approx(0.5, abs=0.08)  # another request begins with the drafter's
    known.forget(1)
    assert known.shares(1) == known.shares(2)


@dataclass
class Texts:
    """Requests whose next tokens are hard or easy by turns, and a draft model that knows which.

    right: P(a guess is right) by how sure the drafter is of it. mix: how often it is so sure.
    """

    right: tuple[float, ...]
    mix: tuple[float, ...]
    pass_s: float
    slope: float = 0.05  # of the target's pass, per row
    num_sequences: int = 1

    def chain(self, rng: random.Random, stop: Stop | None, most: int) -> tuple[list[int], int]:
        """Return the drafted tokens, by how sure it is, and how many of them are right in a row."""
        bins = list[int]()
        while len(bins) < most:
            bins.append(rng.choices(range(len(CONFIDENCES)), self.mix)[0])
            if stop is not None and not stop.goes_on(CONFIDENCES[bins[-1]]):
                break
        return bins, next((i for i, at in enumerate(bins) if rng.random() > self.right[at]), len(bins))

    def rate(self, length: int | None, num_steps: int = 3000, seed: int = 0) -> float:
        """Tokens per pass of one row, with a fixed length or with `auto`."""
        rng, tokens, seconds = random.Random(seed), 0, 0.0
        target, traits = PassTime((1, 33), (1.0, 1 + 32 * self.slope), 1.0), Traits(tells_confidence=True)
        costs = Costs(target, traits={"model": traits})
        costs.drafts["model"] = PassTime((1, 2), (1.0, 1.05), self.pass_s)
        pacing = build(Options(), None, costs)
        seqs = [Sequence(b, [1], 1, SamplingParams(), 0, 10**6, draft="model") for b in range(self.num_sequences)]
        for _ in range(num_steps):
            granted = [length] * len(seqs) if length is not None else pacing.budget(seqs, [64] * len(seqs))
            stops = {} if length is not None else pacing.stops(seqs, granted)
            found = [self.chain(rng, stops.get(b), most) for b, most in enumerate(granted)]
            depth, num_nodes = max(len(bins) for bins, _ in found), sum(len(bins) for bins, _ in found)
            draft_s = sum(
                self.pass_s * (1 + 0.05 * (sum(len(bins) > d for bins, _ in found) - 1)) for d in range(depth)
            )
            report = StepReport(num_decoding=len(seqs), num_rows=len(seqs) + num_nodes, draft_s=draft_s)
            report.score_s = 1 + self.slope * (len(seqs) - 1 + num_nodes)
            report.num_emitted = sum(1 + num for _, num in found)
            report.drafts = {"model": DraftStep(draft_s, len(seqs), num_nodes, depth, depth)} if depth else {}
            for seq, (bins, num) in zip(seqs, found, strict=True):
                ranks = tuple(range(num))
                report.sequences.append(SequenceStep(seq.id, "model", len(bins), min(len(bins), num + 1), ranks))
            pacing.observe(report)
            tokens, seconds = tokens + report.num_emitted, seconds + report.seconds
        assert isinstance(pacing, AutoPacing)
        return tokens / seconds


WORLDS = {
    "a pair": Texts(CONFIDENCES, (2, 1, 1, 1, 1, 1, 6), 0.25),
    "a dear draft": Texts(CONFIDENCES, (2, 1, 1, 1, 1, 1, 6), 0.5),
    "a cheap draft": Texts(CONFIDENCES, (2, 1, 1, 1, 1, 1, 6), 0.05),
    "copies": Texts(CONFIDENCES, (0, 0, 0, 0, 0, 1, 30), 0.25),
    "rows that cost": Texts(CONFIDENCES, (2, 1, 1, 1, 1, 1, 6), 0.1, 0.3),
    "a drafter that knows nothing of itself": Texts((0.7,) * 7, (1,) * 7, 0.2),
    "four requests": Texts(CONFIDENCES, (2, 1, 1, 1, 1, 1, 6), 0.25, num_sequences=4),
}
ALIKE = ("a drafter that knows nothing of itself", "copies", "four requests")


@pytest.mark.parametrize("world", WORLDS)
def test_it_beats_every_fixed_length(world: str) -> None:
    """Learning included. By several percent where the drafter knows what it does not know, for one request."""
    texts = WORLDS[world]
    best = max(texts.rate(length) for length in (0, 1, 2, 3, 4, 6, 8, 12, 16))
    assert texts.rate(None) >= best * (0.97 if world in ALIKE else 1.02)


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_a_drafter_that_is_always_wrong_is_dropped(num_sequences: int) -> None:
    texts = Texts((0.02,) * 7, (1,) * 7, 0.5, num_sequences=num_sequences)
    assert texts.rate(None) >= 0.98 * texts.rate(0)


def searching(max_len: int, num_prompt: int, **params: object) -> tuple[AutoPacing, Sequence]:
    """The policy of one request whose drafter searches the text before it asks its model."""
    costs = Costs(PassTime((1, 33), (1.0, 2.6), 1.0), traits={"model": Traits(tells_confidence=True, searches=True)})
    costs.drafts["model"] = PassTime((1, 33), (1.0, 4.2), 0.2)  # 0.02 s for each token of a prompt
    pacing = build(Options(), None, costs)
    assert isinstance(pacing, AutoPacing)
    seq = Sequence(0, [1] * num_prompt, num_prompt, SamplingParams(**params), 0, max_len, draft="model")  # type: ignore[arg-type]
    return pacing, seq


def round_of(pacing: AutoPacing, seq: Sequence, num_drafted: int, num_accepted: int, passes: int) -> None:
    """One step in which so many tokens were drafted, by so many passes of the model."""
    seq.tokens += [1] * (num_accepted + 1)
    report = StepReport(num_decoding=1, num_rows=1 + num_drafted, score_s=1 + 0.05 * num_drafted, draft_s=0.2 * passes)
    report.num_emitted = num_accepted + 1
    report.drafts = {"model": DraftStep(0.2 * passes, 1, num_drafted, num_drafted, passes)}
    tested = min(num_drafted, num_accepted + 1)
    report.sequences = [SequenceStep(seq.id, "model", num_drafted, tested, tuple(range(num_accepted)))]
    pacing.observe(report)


def rounds_until_it_reads(max_len: int, num_prompt: int) -> int:
    """How many rounds, in which the search finds nothing, pass before the model may draft; 200 = it never does."""
    pacing, seq = searching(max_len, num_prompt)
    prepares = pacing.prepares(seq)
    for num in range(200):
        granted = pacing.budget([seq], [16])
        if granted[0] and not pacing.stops([seq], granted)[0].is_shut:
            assert prepares == (num == 0)
            return num
        round_of(pacing, seq, 0, 0, 0)
    return 200


def test_a_model_reads_a_prompt_when_rounds_without_it_have_lost_as_much() -> None:
    """Sooner where the rest is long, and at once, beside the target, where that costs little of what it promises.

    A text that ends before reading has paid is never read.
    """
    assert rounds_until_it_reads(5000, 5) == rounds_until_it_reads(5000, 200) == 0
    soon, late = rounds_until_it_reads(5000, 400), rounds_until_it_reads(460, 400)
    assert 0 < 2 * soon < late < 100
    assert rounds_until_it_reads(10**6, 2000) == rounds_until_it_reads(10**9, 2000)  # no answer is that long
    assert rounds_until_it_reads(10**6, 20000) == rounds_until_it_reads(405, 400) == 200


def test_what_the_search_finds_does_not_make_probes_of_a_bad_model_denser() -> None:
    pacing, seq = searching(10**6, 5)
    num_probes = 0
    for step in range(2000):
        stop = pacing.stops([seq], pacing.budget([seq], [16])).get(0)
        if stop is not None and not stop.is_shut:  # the model is asked, and wrong
            stop.confidences.append(0.995)
            num_probes += step > 500
            round_of(pacing, seq, 1, 0, 1)
        elif stop is not None and stop.search is not None:  # the search is right
            stop.search.confidences.append(0.995)
            round_of(pacing, seq, 1, 1, 0)
        else:
            round_of(pacing, seq, 0, 0, 0)
    assert num_probes < 15, num_probes


def test_probes_of_a_bad_model_read_few_prompts() -> None:
    """Reading costs at most 3 % of what requests write, however many begin; and the model is not forgotten for ever."""
    pacing, first = searching(10**6, 5)
    pacing._stops.of("model").observe(first.id, told([0.995] * 8 + [0.2] * 8), [])
    for _ in range(100):
        for confidence in CONFIDENCES:
            pacing._stops.of("model").observe(first.id, told([confidence]), [])
    num_read, price = 0, 400 * 0.02
    for number in range(1, 101):
        seq = Sequence(number, [1] * 400, 400, SamplingParams(), 0, 10**6, draft="model")
        for _ in range(50):
            stop = pacing.stops([seq], pacing.budget([seq], [16])).get(0)
            if stop is not None and not stop.is_shut:
                num_read += not stop.confidences and not pacing._requests[number].reading.is_read
                stop.confidences.append(0.995)
                round_of(pacing, seq, 1, 0, 1)
            else:
                round_of(pacing, seq, 0, 0, 0)
        pacing.end(seq)
    assert 5 <= num_read <= 0.03 * 100 * 50 / price + 1, num_read


def test_what_pays_is_promised_to_gain() -> None:
    """Else no later request would ever ask the model again."""
    rng = random.Random(1)
    for _ in range(200):
        worth = sorted(rng.random() for _ in range(5))
        stop = Stop(FIRST_SHARES, worth, rng.random())
        tokens, gain = promised(stop)
        assert (gain > 0) == stop.pays
        assert tokens == pytest.approx(1 + gain + sum(worth[: sum(stop.share**i >= w for i, w in enumerate(worth, 1))]))


def test_a_request_with_a_length_of_its_own_is_given_that() -> None:
    pacing, seq = searching(1000, 5, spec_length=3)
    for _ in range(20):
        granted = pacing.budget([seq], [16])
        assert granted == [3]
        assert not pacing.stops([seq], granted)
        round_of(pacing, seq, 3, 3, 3)
    assert not pacing._stops.known


def test_a_round_counts_once() -> None:
    """A step without room for drafts counts nothing of the step before it."""
    pacing, seq = searching(5000, 400)
    pacing.budget([seq], [16])
    round_of(pacing, seq, 0, 0, 0)
    request = pacing._requests[seq.id].reading
    owed = request.owed
    assert owed > 0
    for _ in range(3):
        assert pacing.budget([seq], [0]) == [0]
        round_of(pacing, seq, 0, 0, 0)
    assert request.owed == owed


def test_what_was_read_is_not_paid_again_and_what_the_search_gains_is_no_loss() -> None:
    pacing, seq = searching(5000, 400)
    for _ in range(3):  # the search finds what the model would have
        stop = pacing.stops([seq], pacing.budget([seq], [16]))[0]
        stop.search.confidences += [0.995] * 2
        round_of(pacing, seq, 2, 2, 0)
    request = pacing._requests[seq.id].reading
    assert request.owed == 0
    request.owed = 1000.0
    stop = pacing.stops([seq], pacing.budget([seq], [16]))[0]
    assert not stop.is_shut
    stop.confidences += [0.995] * 2
    round_of(pacing, seq, 2, 2, 2)
    request.owed = 0.0
    assert not pacing.stops([seq], pacing.budget([seq], [16]))[0].is_shut


def test_what_an_earlier_request_has_read_is_not_paid_again() -> None:
    """The price falls while the model reads, too, so that it does not stop in the middle."""

    def is_shut(num_unread: int | None) -> bool:
        pacing, seq = searching(5000, 2000)
        for _ in range(4):  # in which nothing is found
            stop = pacing.stops([seq], pacing.budget([seq], [16]))[0]
            assert stop.is_shut or num_unread is not None
            stop.num_unread = num_unread
            round_of(pacing, seq, 0, 0, 0)
        return pacing.stops([seq], pacing.budget([seq], [16]))[0].is_shut

    assert [is_shut(num) for num in (None, 5000, 50)] == [True, True, False]


def test_a_short_prompt_is_soon_read_for_a_long_answer() -> None:
    """At once where a text promises much; else when all of the price is lost, or the prompt is never read."""
    for owed, price, num_rounds, is_due in [
        (0.0, 10.0, 161, True),  # it promises 80 tokens, of which the search may find half: a quarter of 40.25
        (0.0, 10.0, 159, False),
        (2.5, 10.0, 150, False),  # 10 / 37.5 of the price
        (2.7, 10.0, 150, True),
        (2.6, 10.0, 50, False),
        (7.9, 10.0, 50, False),
        (8.1, 10.0, 50, True),
        (9.9, 10.0, 30, False),
        (10.1, 10.0, 30, True),
        (1000.0, 10.0, 19, False),
    ]:
        assert Reading(gain=0.5, owed=owed).is_due(price, num_rounds) == is_due
    assert Reading(is_read=True).is_due(10.0, 0)
    assert Reading().is_due(0.0, 10), "what costs nothing is read, even for nothing"


def test_a_search_that_finds_the_wrong_tokens_is_a_loss() -> None:
    """What its rows took is owed, too; what it finds pays for rounds in which it found nothing."""
    reading = Reading(gain=0.5)
    stop = Stop([1.0] * 7, [], is_shut=True, search=Stop([1.0] * 7, [0.1, 0.2, 0.3]))
    reading.observe(stop, 3, 0)
    assert reading.owed == pytest.approx(1.1)
    reading.observe(stop, 3, 1)
    assert reading.owed == pytest.approx(1.2)
    reading.observe(stop, 3, 3)
    assert reading.owed == 0.0
    assert not reading.is_read


def test_a_round_in_which_the_search_is_believed_anyway_counts_for_neither_side() -> None:
    """Right or wrong, it would have been the same with the model."""
    reading = Reading(gain=0.5, owed=1.0)
    search = Stop([1.0] * 7, [0.1, 0.2, 0.3], gain=0.6)
    for num_accepted in (0, 3):
        reading.observe(Stop([1.0] * 7, [], is_shut=True, search=search), 3, num_accepted)
        assert reading.owed == 1.0
