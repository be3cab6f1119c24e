"""Tie certificates: a tie is one, anything else is none."""

import numpy as np
import pytest

from forerun.certify.ties import best_two, last_logits, measured_tau, why_no_tie
from forerun.engine.llm import LLM
from forerun.models.runner import Runner
from forerun.types import SamplingParams
from tiny import write_tiny

PROMPT = [5, 9, 5, 9, 200, 17, 3]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = write_tiny(tmp_path_factory.mktemp("models") / "target")
    return LLM(folder, draft="none", ops="reference", dtype="float32").engine.runner


def test_tau_is_small_and_that_of_passes_of_other_heights(runner: Runner) -> None:
    tau = measured_tau(runner, [PROMPT * 5, PROMPT * 9])
    assert 0 < tau < 1e-3
    assert np.abs(last_logits(runner, PROMPT, 1) - last_logits(runner, PROMPT, 512)).max() < tau


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 4}, {"seed": 4, "top_p": 0.9}])
def test_only_the_best_two_and_only_where_they_are_close(runner: Runner, options: dict[str, float]) -> None:
    params = SamplingParams(**options)
    best, gap = best_two(runner, PROMPT, len(PROMPT), params)
    first, second = best
    wrong = next(i for i in range(257) if i not in best)
    assert gap > 0
    assert why_no_tie(runner, PROMPT, [first], [second], params, tau=1.01 * gap) is None
    assert "apart (tau" in str(why_no_tie(runner, PROMPT, [first], [second], params, tau=0.99 * gap))
    assert "not the two best" in str(why_no_tie(runner, PROMPT, [first], [wrong], params, tau=1e9))


def test_penalties_count(runner: Runner) -> None:
    """The best of a sampled request without them is one that a strong penalty forbids."""
    free, _ = best_two(runner, PROMPT, len(PROMPT), SamplingParams(seed=1, temperature=0.01))
    said = [*PROMPT, *free]
    strict = SamplingParams(seed=1, temperature=0.01, repetition_penalty=100.0)
    assert best_two(runner, said, len(PROMPT), strict)[0].isdisjoint(free)
