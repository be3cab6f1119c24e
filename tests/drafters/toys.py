"""Small engines on a toy whose next token depends on the last one alone, for tests of drafters."""

from __future__ import annotations

import numpy as np

from engine.load import run
from forerun.drafters import Drafter
from forerun.engine.engine import Engine
from forerun.engine.router import Router
from forerun.kv.cache import BlockCache
from forerun.models.runner import Runner
from forerun.models.toy import ToyModel, ToyTable
from forerun.pacing.fixed import FixedPacing
from forerun.types import SamplingParams, StepReport

V, SPACE_TOKENS = 24, 64
TOY = ToyModel(V, 4, ToyTable(order=1))


def likeliest(token: int, num: int = 1) -> list[int]:
    """The toy's likeliest tokens behind `token`, best first."""
    return np.argsort(-TOY.logits_after([token]), kind="stable")[:num].tolist()


def engine_of(drafter: Drafter, spec_length: int, num_tokens: int | None = None) -> Engine:
    """An engine on the toy. num_tokens: of its cache."""
    cache = BlockCache.create(
        TOY.config.cache_shape,
        "paged",
        max_batch_size=3,
        max_seq_len=SPACE_TOKENS,
        dtype=TOY.cache_dtype,
        num_tokens=num_tokens,
    )
    return Engine(
        Runner(TOY, cache),
        Router({"own": drafter}),
        FixedPacing(spec_length),
        max_seq_len=SPACE_TOKENS,
        max_batch_size=3,
    )


def spoken(engine: Engine, prompt: list[int], max_tokens: int = 20, **params: object) -> list[StepReport]:
    """The reports of the steps that decode one greedy request, which says what the toy says."""
    reports: list[StepReport] = []
    end = engine.listen(reports.append)
    wanted = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **params})  # type: ignore[arg-type]
    (output,) = run(engine, [engine.add(prompt, wanted)])
    end()
    text = [*prompt[-1:], *output]
    assert text[1:] == [likeliest(token)[0] for token in text[:-1]]
    return [report for report in reports if report.num_decoding]


def crowded(drafter: Drafter, spec_length: int = 5) -> int:
    """Serve more requests than the cache has room for, abort one, and return how many were preempted."""
    engine = engine_of(drafter, spec_length, num_tokens=64)
    wanted = SamplingParams(max_tokens=42, temperature=0.0)
    requests = [engine.add([i, 3, i, 3], wanted) for i in range(5)]
    for _ in range(6):
        engine.step()
    engine.abort(requests[0])
    run(engine, requests)
    return engine.scheduler.num_preemptions
