"""The drafter eagle at work: a greedy draft that is made in one call is the one that is made step by step."""

import dataclasses
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, BadOption, SamplingParams
from forerun.models.runner import Run
from forerun.pacing.fixed import FixedPacing
from forerun.types import EDGES, RoundDetail, Sequence, Stop
from methods import random_head
from refusals import refusal
from support import heard, needs_native, rounds_of


class Stopped(FixedPacing):
    """May end a draft by the head's own probabilities: behind any token, or only behind unlikely ones."""

    seen: list[Stop]

    def __init__(self, spec_length: int, least: float | None) -> None:
        super().__init__(spec_length)
        self.least, self.seen = least, []

    def stops(self, seqs: Seq[Sequence], granted: Seq[int]) -> Mapping[int, Stop]:
        if self.least is None:
            return {}
        # A random head is sure of nothing: its likeliest tokens have 0.01 to 0.6.
        made = {b: Stop([0.5, 0.7, 0.8, *[0.9] * (len(EDGES) - 2)], [self.least] * 9) for b in range(len(seqs))}
        self.seen += made.values()
        return made


class Asked(Stopped):
    """Is asked behind each token, so that they are drafted one by one."""

    def go_on(self, *given: Any) -> bool:
        return True


@pytest.mark.parametrize("least", [None, 0.3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_made_at_once_is_the_one_that_is_made_step_by_step(
    dtype: str, least: float | None, tmp_path: Path
) -> None:
    """Requests of different lengths beside one that draws, whose drafts are made step by step in both."""
    spec = f"eagle:path={random_head(LLM('shipped', dtype=dtype, draft='none'), tmp_path)}"
    outputs, rounds, calls = list[Any](), list[list[RoundDetail]](), list[int]()
    policies = [Stopped(3, least), Asked(3, least)]
    for policy in policies:
        # Without a limit that goes by seconds, prompts are read in the same steps.
        llm = LLM("shipped", draft=spec, pacing="fixed", dtype=dtype, max_seq_len=128, prefill_stretch=0)
        rounds.append(rounds_of(llm))
        engine = llm.engine
        engine.stepper.pacing = engine.pacing = policy
        runner: Any = engine.drafter.members["eagle"].runner
        at_once, num = runner.run_ahead, [0]

        def counted(*given: Any, at_once: Any = at_once, num: list[int] = num) -> Any:
            num[0] += 1
            return at_once(*given)

        runner.run_ahead = counted
        lengths = [SamplingParams(max_tokens=n, temperature=0, spec_length=k) for n, k in ((9, 3), (24, 1), (17, 2))]
        outputs.append([o.token_ids for o in llm.generate(["def f(", "class A:", "import os"], lengths)])
        drawn = SamplingParams(max_tokens=12, seed=3, temperature=0.9)
        outputs[-1] += [o.token_ids for o in llm.generate(["def f(", "for"], [lengths[0], drawn])]
        runner.cache.check_integrity()
        calls.append(num[0])
    assert outputs[0] == outputs[1]
    assert rounds[0] == rounds[1]
    assert any(detail.tokens for detail in rounds[0])
    at_once, one_by_one = ([stop.confidences for stop in policy.seen if stop.confidences] for policy in policies)
    assert len(at_once) == len(one_by_one)
    for own, expected in zip(at_once, one_by_one, strict=True):
        assert own == pytest.approx(expected, rel=1e-3)
    assert calls[1] == 0
    assert calls[0] > 5 or not LLM("shipped", dtype=dtype, draft="none").engine.runner.finds_best


class Searching(FixedPacing):
    """Lets a drafter search the text first."""

    def stops(self, seqs: Seq[Sequence], granted: Seq[int]) -> Mapping[int, Stop]:
        shares = [0.2, 0.2, 0.4, *[0.9] * (len(EDGES) - 2)]
        return {b: dataclasses.replace(Stop.never(3), search=Stop(shares, [0.3] * 3)) for b in range(len(seqs))}


@needs_native
def test_the_text_is_searched_before_the_head_is_run(tmp_path: Path) -> None:
    """The head goes on where a search has found nothing, with what the target has computed meanwhile."""
    spec = f"eagle:path={random_head(LLM('shipped', draft='none'), tmp_path)}"
    llm = LLM("shipped", draft=spec, pacing="fixed", max_seq_len=512)
    drafter = llm.drafters["eagle"]
    assert drafter.tells_confidence
    assert drafter.searches
    llm.engine.stepper.pacing = llm.engine.pacing = Searching(3)
    steps = heard(llm)
    params = SamplingParams(max_tokens=64, temperature=0)
    prompts = ["def add(a, b):\n    return a + b\n\n\n" * 3, "class Stack:\n"]
    drafted = [output.token_ids for output in llm.generate(prompts, params)]
    own = [report.drafts["eagle"] for report in steps if "eagle" in report.drafts]
    llm.engine.stepper.pacing = llm.engine.pacing = FixedPacing(0)
    assert drafted == [output.token_ids for output in llm.generate(prompts, dataclasses.replace(params, draft="none"))]
    assert any(step.num_nodes and not step.passes for step in own)
    assert any(step.passes for step in own)
    drafter.runner.cache.check_integrity()
    assert "eagle:search" in refusal(BadOption, LLM, "shipped", draft=f"{spec},search=lookup", max_seq_len=64)


@needs_native
def test_rows_of_layers_must_be_those_that_a_head_joins(tmp_path: Path) -> None:
    llm = LLM("shipped", draft=f"eagle:path={random_head(LLM('shipped', draft='none'), tmp_path)}", max_seq_len=64)
    runner: Any = llm.drafters["eagle"].runner
    width = runner.model.config.hidden_size
    runner.cache.open(5)
    runs = [Run(5, [3, 4], "last", best_only=True)]
    rows = [torch.full((2, width), value) for value in (0.5, 1e9)]  # the second is cut to what a head reads
    assert len(runner.run_ahead(runs, [2], (), rows).ids[0]) == 2
    for wrong in (rows[:1], [*rows, rows[0]]):
        assert "as many layers" in refusal(ValueError, runner.run_ahead, runs, [2], (), wrong)
    with pytest.raises(IndexError, match="no token"):
        runner.run_ahead([Run(5, [3, 10**6], "last", best_only=True)], [2], (), rows)
