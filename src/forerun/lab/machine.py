"""Measurements for the widget Landscape: how long passes take on this machine, and the speed-up of one drafter."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from forerun.engine.llm import LLM
from forerun.engine.request import RequestOutput
from forerun.errors import CapacityError
from forerun.theory import roofline
from forerun.theory.published import TABLE_4
from forerun.types import SamplingParams

NUM_RUNS = 3  # each way, in turn; the fastest counts, because disturbances only slow a run down
_TURN = threading.Lock()


@dataclass
class Measuring:
    """A request to generate a text twice: plainly, and with a drafter that drafts `spec_length` tokens per round.

    draft: a drafter of the engine; None = the engine's own choice.
    """

    prompt: Annotated[str, Field(min_length=1, max_length=4000)] = "def fibonacci(n):\n"
    draft: str | None = None
    spec_length: Annotated[int, Field(ge=1, le=64)] = 5
    max_tokens: Annotated[int, Field(ge=16, le=256)] = 96


def make_router(llm: LLM) -> APIRouter:
    """Return the routes of the widget Landscape."""
    router = APIRouter()

    @router.get("/machine")
    def machine() -> dict[str, Any]:
        """Return the duration of passes by number of rows, the drafters, and published results for comparison."""
        is_pair = llm.opened.is_shipped
        return {
            "model": "the shipped model" if is_pair else llm.checkpoint.name,
            "precision": llm.checkpoint.model.precision,
            "drafters": list(llm.drafters),
            "passes": passes(llm),
            "published": [point._asdict() for point in TABLE_4],
            "shapes": list(roofline.SHAPES),
            "mixtures": [name for name, shape in roofline.SHAPES.items() if shape.has_experts],
            "machines": list(roofline.MACHINES),
        }

    @router.post("/measure")
    def measure(body: Measuring) -> dict[str, Any]:
        """Measure alpha, K and the speed-up of one drafter, with greedy decoding.

        Plain decoding and drafting run in turn, NUM_RUNS times each. K is the number of drafted tokens per round.
        """
        if not _TURN.acquire(blocking=False):
            raise CapacityError("another measurement is running: try again when it is over")
        try:
            return measured(llm, body)
        finally:
            _TURN.release()

    return router


def passes(llm: LLM) -> dict[str, Any]:
    """Return the target's curve t(rows) / t(1), and each drafter's cost ratio c (None if it was not timed)."""
    times = llm.pass_times()
    target = times.pop("")
    return {
        "rows": list(target.widths),
        "ratios": target.ratio(target.widths).tolist(),
        "one_row_s": target.one_row_s,
        "c": {name: _cost(time.one_row_s, target.one_row_s) for name, time in times.items()},
    }


def _cost(draft_s: float | None, target_s: float | None) -> float | None:
    return draft_s / target_s if draft_s is not None and target_s else None


def measured(llm: LLM, body: Measuring) -> dict[str, Any]:
    """Generate with and without drafts; return alpha, K and the speed-up. c is None if the drafter was not timed."""
    common: dict[str, Any] = {"max_tokens": body.max_tokens, "temperature": 0, "ignore_eos": True}
    plain = SamplingParams(**common, draft="none")
    drafting = SamplingParams(**common, draft=body.draft, spec_length=body.spec_length)
    runs = [[llm.generate(body.prompt, params)[0] for params in (plain, drafting)] for _ in range(NUM_RUNS)]
    rates = [max(_tokens_per_s(run[i]) for run in runs) for i in range(2)]
    output = runs[-1][1]
    report = output.report
    timed = passes(llm)
    return {
        "alpha": report.alpha_hat,
        "k": body.spec_length,
        "tokens_per_round": report.mean_accepted_length,
        "speedup": rates[1] / rates[0],
        "plain_tokens_per_s": rates[0],
        "tokens_per_s": rates[1],
        "draft": report.draft,
        "c": timed["c"].get(report.draft),
        "is_same": output.token_ids == runs[-1][0].token_ids,
        "num_tokens": len(output.token_ids),
    }


def _tokens_per_s(output: RequestOutput) -> float:
    """Return the tokens per second after the first step, so that the time of the prompt is not counted."""
    report = output.report
    first_s, last_s = report.first_token_at_s, report.last_token_at_s
    assert first_s is not None
    assert last_s is not None
    num_first = 1 + (report.rounds[0][1] if report.rounds else 0)
    return (len(output.token_ids) - num_first) / max(last_s - first_s, 1e-9)
