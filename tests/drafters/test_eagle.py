"""The drafter eagle at work: a greedy draft that is made in one call is the one that is made step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.pacing.fixed import FixedPacing
from forerun.types import RoundDetail
from methods import random_head


class Asked(FixedPacing):
    """May end a draft behind each token, so that they are drafted one by one."""

    def go_on(self, *given: Any) -> bool:
        return True


@pytest.mark.once("compares two ways of drafting")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_made_at_once_is_the_one_that_is_made_step_by_step(dtype: str, tmp_path: Path) -> None:
    """Requests of different lengths beside one that draws, whose drafts are made step by step in both."""
    spec = f"eagle:path={random_head(LLM('shipped', dtype=dtype, draft='none'), tmp_path)}"
    outputs, rounds, calls = list[Any](), list[list[RoundDetail]](), list[int]()
    for policy in (FixedPacing, Asked):
        llm, found = LLM("shipped", draft=spec, pacing="fixed", dtype=dtype, max_seq_len=128), list[RoundDetail]()
        engine = llm.engine
        engine.stepper.pacing = engine.pacing = policy(3)
        runner: Any = engine.drafter.members["eagle"].runner
        at_once, num = runner.run_ahead, [0]

        def counted(*given: Any, at_once: Any = at_once, num: list[int] = num) -> Any:
            num[0] += 1
            return at_once(*given)

        runner.run_ahead = counted
        llm.listen(lambda report, found=found: found.extend(report.rounds), detail=True)  # type: ignore[misc]
        lengths = [SamplingParams(max_tokens=n, temperature=0, spec_length=k) for n, k in ((9, 3), (24, 1), (17, 2))]
        outputs.append([o.token_ids for o in llm.generate(["def f(", "class A:", "import os"], lengths)])
        drawn = SamplingParams(max_tokens=12, seed=3, temperature=0.9)
        outputs[-1] += [o.token_ids for o in llm.generate(["def f(", "for"], [lengths[0], drawn])]
        runner.cache.check_integrity()
        rounds.append(found)
        calls.append(num[0])
    assert outputs[0] == outputs[1]
    assert rounds[0] == rounds[1]
    assert any(detail.tokens for detail in rounds[0])
    assert calls[1] == 0
    assert calls[0] > 5 or not LLM("shipped", dtype=dtype, draft="none").engine.runner.model.ops.packs
