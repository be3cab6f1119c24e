"""Lossy rules through the engine: the rows that they read, what the report says, and that others are unchanged."""

import pytest

from engine.load import MODEL, run, runner_with
from forerun.drafters import Drafter
from forerun.engine.engine import Engine
from forerun.engine.router import Router
from forerun.pacing import make
from forerun.types import Draft, Probs, SamplingParams

pytestmark = pytest.mark.once("it asks for its own drafter")


class Guess(Drafter):
    """Drafts the same token over and over."""

    draws = "point"

    def propose(self, seqs, budget, coins):
        tokens = [[5] * num for num in budget.num_tokens]
        return Draft.chains(tokens, [[Probs.of_point(5)] * len(chain) for chain in tokens])


def text_and_report(acceptance: str, **options):
    engine = Engine(runner_with(MODEL, 400), Router({"guess": Guess()}), make("fixed", 3))
    run(engine, [request := engine.add([1, 2, 3], SamplingParams(max_tokens=24, acceptance=acceptance, **options))])
    assert request.error is None
    return request.seq.output_ids, request.report


def test_lenience_of_greedy_requests_reads_soft_rows():
    """The drafted token is never the argmax, so ratio keeps none, and the least lenient rule is plain decoding."""
    plain, exact = text_and_report("ratio", temperature=0)
    assert 5 not in plain
    assert (exact.num_accepted, exact.is_lossless, exact.tv_price) == (0, True, None)
    least, report = text_and_report("lenience:l=1", temperature=0)
    assert (least, report.tv_price, report.is_lossless) == (plain, 0.0, False)
    most, report = text_and_report("lenience:l=1e-6", temperature=0)
    assert most.count(5) > len(most) / 2
    assert report.acceptance == "lenience:l=1e-6"
    assert report.num_accepted == report.num_tested
    assert 0.5 < report.tv_price < 1, "the share of tokens that are not the argmax: 5 soon is"
    soft, _ = text_and_report("lenience:l=1e-6", temperature=0, top_k=1)
    assert soft == plain, "filters of the request hold at temperature 1, too"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_typical_acceptance_measures_no_price(temperature):
    tokens, report = text_and_report("typical", temperature=temperature, seed=3)
    assert (report.acceptance, report.is_lossless, report.tv_price) == ("typical", False, None)
    if temperature == 0:
        assert tokens == text_and_report("ratio", temperature=0)[0]


def test_the_price_is_the_mean_over_tested_tokens():
    _, report = text_and_report("lenience:l=0.2", seed=3)
    assert len(report.prices) == report.num_tested > 0
    assert report.tv_price == sum(report.prices) / len(report.prices) > 0
    assert text_and_report("block", seed=3)[1].prices == []
