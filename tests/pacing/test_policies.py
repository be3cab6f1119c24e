"""Policies that stop a draft early: what they read, where they stop, and what they write into the log."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from engine.load import run
from forerun import LLM, SamplingParams
from forerun.errors import BadOption
from forerun.pacing import make
from forerun.pacing.uncertainty import confidence, entropy_nats, normalized_entropy
from forerun.types import Probs, Sequence, SequenceStep, StepReport
from support import engine_for, random_decoder, rounds_of

POINT = Probs(point=1)
SURE, UNSURE = np.array([9.0, 0.0, 0.0, 0.0], np.float32), np.zeros(4, np.float32)


def sequence(request: int = 0, **params) -> Sequence:
    return Sequence(request, [1, 2, 3], 2, SamplingParams(**params), 0, 100)


def report(request: int, drafted: int, accepted: int) -> StepReport:
    return StepReport(sequences=[SequenceStep(request, "model", drafted, accepted + 1, tuple(range(accepted)))])


def test_entropy_is_of_the_logits_where_there_are_some():
    """At temperature 0 the drafter draws from a point mass; what the model thinks is in its logits."""
    assert entropy_nats(POINT, None) == 0
    assert entropy_nats(POINT, UNSURE) == pytest.approx(math.log(4))
    assert entropy_nats(Probs(dense=np.array([0.5, 0.5, 0.0], np.float32)), None) == pytest.approx(math.log(2))
    assert normalized_entropy(POINT, UNSURE) == pytest.approx(1)
    two_ids = np.array([0.0, 0.0, -math.inf], np.float32)
    assert normalized_entropy(POINT, two_ids) == pytest.approx(1), "of the possible ids"
    assert confidence(1, POINT, None) == 1
    assert confidence(0, POINT, UNSURE) == pytest.approx(0.25)


def test_confidence_stops_behind_an_unlikely_token_which_stays():
    policy = make("confidence:threshold=0.5", 6)
    assert policy.budget([sequence()], [9]) == [6]
    assert policy.go_on(sequence(), 3, POINT, UNSURE), "the token itself is drawn"
    assert not policy.go_behind(sequence(), 3, 0, POINT, UNSURE)
    assert policy.go_behind(sequence(), 3, 0, POINT, SURE)


def test_svip_and_adaedl_stop_before_a_token_of_high_entropy():
    for name in ("svip", "adaedl"):
        policy = make(name, None)
        assert policy.budget([sequence(), sequence(1, spec_length=3)], [99, 99]) == [16, 3]
        assert policy.go_on(sequence(), 0, POINT, SURE)
        assert not policy.go_on(sequence(), 0, POINT, np.zeros(50_000, np.float32))


def test_adaedl_moves_its_threshold_toward_the_goal():
    policy, seq = make("adaedl:threshold=0.4,goal=0.9", 4), sequence()
    policy.budget([seq], [4])
    policy.observe(report(0, 4, 1))
    assert policy.facts(seq) == {"threshold": pytest.approx(0.401), "accepted_share": pytest.approx(0.625)}
    for _ in range(20):
        policy.observe(report(0, 2, 2))  # shorter than granted, and all accepted: it may draft more
    assert policy.facts(seq)["threshold"] < 0.4
    before = policy.facts(seq)["threshold"]
    policy.observe(report(0, 4, 4))
    assert policy.facts(seq)["threshold"] == before, "the longest draft and a good share leave it as it is"
    policy.observe(report(0, 0, 0))
    assert policy.facts(seq)["threshold"] < before, "a threshold that stops every draft comes down"


def test_adaedl_keeps_its_threshold_between_0_and_1_where_nothing_is_drafted():
    """A drafter that finds nothing for long would leave a threshold far below 0, which takes as long to come back."""
    policy, seq = make("adaedl:threshold=0.4", 4), sequence()
    policy.budget([seq], [0])
    for _ in range(9):
        policy.observe(report(0, 0, 0))
    assert policy.facts(seq)["threshold"] == 0.4, "nothing was granted, so the threshold stopped nothing"
    policy.budget([seq], [4])
    for _ in range(900):
        policy.observe(report(0, 0, 0))
    assert policy.facts(seq)["threshold"] == 0


def test_heuristic_is_two_more_or_one_less_per_request():
    policy, one, other = make("heuristic", 3), sequence(0), sequence(1)
    policy.observe(report(0, 3, 3))
    policy.observe(report(1, 3, 2))
    assert policy.budget([one, other], [99, 99]) == [5, 2]
    for _ in range(9):
        policy.observe(report(0, 5, 5))
        policy.observe(report(1, 2, 0))
    assert policy.budget([one, other], [99, 99]) == [16, 1]
    policy.end(one)
    assert policy.budget([one], [99]) == [3], "a slot that is used again begins anew"


def test_entropy_maps_to_lengths_as_the_page_says():
    policy, seq = make("entropy:gamma_min=1,gamma_max=9,h_ref=0.5", None), sequence()
    lengths = []
    for share in (0.0, 0.125, 0.25, 0.5, 1.0):  # of a uniform distribution's entropy
        assert policy.go_on(seq, 0, POINT, logits_of_entropy(share))
        lengths.append(next(depth for depth in range(1, 20) if not policy.go_on(seq, depth, POINT, SURE)))
        facts = policy.facts(seq)
        assert facts["entropy_normalized"] == facts["entropy_smoothed"] == pytest.approx(share, abs=1e-6)
    assert lengths == [9, 7, 5, 1, 1]


def logits_of_entropy(share: float, num_ids: int = 16) -> np.ndarray:
    """Logits whose normalised entropy is `share`, by bisection over the largest one."""
    low, high = 0.0, 60.0
    for _ in range(80):
        middle = (low + high) / 2
        logits = np.zeros(num_ids)
        logits[0] = middle
        low, high = (middle, high) if normalized_entropy(POINT, logits) > share else (low, middle)
    return logits


def test_entropy_is_smoothed_and_calibrates_its_reference():
    policy, seq = make("entropy:gamma_max=9,ema_beta=0.5", None), sequence()
    policy.go_on(seq, 0, POINT, logits_of_entropy(0.2))
    policy.go_on(seq, 0, POINT, logits_of_entropy(0.1))
    assert policy.facts(seq)["entropy_smoothed"] == pytest.approx(0.15, abs=1e-6)
    policy = make("entropy:gamma_max=9", None)
    for _ in range(20):
        policy.go_on(seq, 0, POINT, logits_of_entropy(0.1))
    assert policy.facts(seq)["gamma"] == 1, "what is usual for this drafter counts as unsure, not ln V"


@pytest.mark.parametrize("spec", ["entropy:gamma_min=5,gamma_max=3", "entropy:gamma_min=5"])
def test_bounds_that_exclude_each_other_are_refused(spec):
    with pytest.raises(BadOption, match="gamma_min=5 is not possible"):
        make(spec, 4)


@pytest.mark.parametrize("spec", ["entropy", "confidence:threshold=0.9", "svip:threshold=0.5", "adaedl"])
def test_a_greedy_draft_model_is_asked_for_its_logits(spec):
    """Native or not, greedy drafts stop early only where the policy sees the logits and not the point mass."""
    engine = engine_for(random_decoder(1), "model")
    engine.pacing = engine.stepper.pacing = make(spec, 8)
    rounds = rounds_of(engine)
    run(engine, [engine.add([3, 1, 4, 1, 5], SamplingParams(max_tokens=60, temperature=0))])
    whole = [round_ for round_ in rounds if round_.granted == 8]
    assert whole
    assert any(len(round_.tokens) < 8 for round_ in whole)


@pytest.mark.parametrize("options", [{}, {"pacing": "utility"}], ids=["auto", "utility"])
def test_the_shipped_pair_drafts_and_says_the_same(options):
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    plain = LLM("shipped", draft="none").generate("def fib(n):", params)[0]
    fast = LLM("shipped", calibrate=False, **options).generate("def fib(n):", params)[0]
    assert fast.token_ids == plain.token_ids
    assert fast.report.num_accepted > 0


def test_the_log_has_a_line_for_each_round(tmp_path: Path):
    file = tmp_path / "log.jsonl"
    llm = LLM("shipped", pacing="entropy", spec_length=6, pacing_log=str(file))
    out = llm.generate("def fib(n):", SamplingParams(max_tokens=24, temperature=0))[0]
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == out.report.num_steps
    assert sum(line["spec_length_accepted"] for line in lines) == out.report.num_accepted
    assert all(
        line["spec_length_accepted"] <= line["spec_length_used"] <= line["spec_length_granted"] for line in lines
    )
    assert {"entropy_normalized", "entropy_smoothed", "position", "drafter"} <= lines[0].keys()
    plain = LLM("shipped", draft="none").generate("def fib(n):", SamplingParams(max_tokens=24, temperature=0))[0]
    assert out.token_ids == plain.token_ids


def test_a_log_on_a_full_disk_ends_in_one_sentence(caplog: pytest.LogCaptureFixture):
    with LLM("shipped", pacing_log="/dev/full") as llm, caplog.at_level("WARNING"):
        assert len(llm.generate("def fib(n):", SamplingParams(max_tokens=24, temperature=0))[0].token_ids) == 24
    assert [record.getMessage() for record in caplog.records] == [  # one, however many rounds followed
        "pacing_log='/dev/full' ends here (No space left on device): make room there, and start again"
    ]


def test_a_log_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path: Path):
    with pytest.raises(BadOption, match=r"pacing_log=.* cannot be written"):
        LLM("no-such-model", pacing_log=str(tmp_path / "none" / "log"))
