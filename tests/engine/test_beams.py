"""Beam search with and without drafts against target-only beam search, written here a second time on tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from engine.load import check, run
from forerun import BadOption, SamplingParams
from forerun.drafters import Drafter
from forerun.drafters.lookup import LookupDrafter, Options
from forerun.drafters.model import ModelDrafter
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.router import Router
from forerun.kv.cache import BlockCache
from forerun.models.runner import Runner
from forerun.models.toy import ToyModel, ToyTable
from forerun.pacing.fixed import FixedPacing

pytestmark = pytest.mark.once("beam searches choose their drafters and levels themselves")

V, LENGTH, END = 5, 6, 0


class Reversed(ToyModel):
    """The adversarial draft model: it ranks tokens as the target does, from the last to the first."""

    def _make(self, context: tuple[int, ...]) -> torch.Tensor:
        assert self.near is not None
        logits = self.near.logits_after(context)
        return torch.where(logits.isinf(), logits, -logits)


def target(seed: int, **table: Any) -> ToyModel:
    return ToyModel(V, seed, ToyTable(**table))


def drafts_of(model: ToyModel) -> dict[str, ToyModel]:
    """A good, a bad and an adversarial draft model."""
    return {
        "good": ToyModel(V, 50, ToyTable(distance=0.3), near=model),
        "bad": ToyModel(V, 51),
        "reversed": Reversed(V, 52, near=model),
    }


def runner_of(model: ToyModel, num_tokens: int | None, backend: str = "paged") -> Runner:
    cache = BlockCache.create(
        model.config.cache_shape,
        backend,  # type: ignore[arg-type]
        max_batch_size=24,
        max_seq_len=64,
        num_tokens=num_tokens,
        dtype=model.cache_dtype,
    )
    return Runner(model, cache)


def engine_of(model: ToyModel, num_tokens: int | None = None, backend: str = "paged", **options: Any) -> Engine:
    drafters: dict[str, Drafter] = {
        name: ModelDrafter(runner_of(draft, num_tokens, backend)) for name, draft in drafts_of(model).items()
    }
    router = Router({**drafters, "lookup": LookupDrafter(Options())})
    options = {"end_ids": frozenset([END]), "max_seq_len": 64, "max_batch_size": 24, **options}
    return Engine(runner_of(model, num_tokens, backend), router, FixedPacing(2), **options)


# ------------------------------------------------------------------------------------------------ the search once more


class Found(NamedTuple):
    penalised: float
    score: float
    tokens: tuple[int, ...]


def searched(model: ToyModel, prompt: Seq[int], params: SamplingParams, end: int | None = END) -> list[Found]:
    """All texts of the pool of a beam search by the target alone, best first: every candidate is made and sorted."""
    width, most, penalty = params.num_beams, params.max_tokens or 0, params.length_penalty
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[Found] = []
    for length in range(1, most + 1):
        candidates = []
        for place, (score, tokens) in enumerate(live):
            row = model.logits_after([*prompt, *tokens]).numpy()
            top = row.max()
            log_mass = float(top) + math.log(float(np.exp(row - top).sum()))
            for token in range(V):
                if row[token] > -np.inf and not (token == end and length <= params.min_tokens):
                    candidates.append((-(score + (float(row[token]) - log_mass)), place, token, tokens))
        candidates.sort()
        is_end = [c[2] == end or length == most for c in candidates]
        ended = [(-c[0], (*c[3], c[2])) for c, over in list(zip(candidates, is_end, strict=True))[:width] if over]
        pool += [Found(score / length**penalty, score, tokens) for score, tokens in ended]
        pool = sorted(pool, key=lambda found: -found.penalised)[:width]
        live = [(-c[0], (*c[3], c[2])) for c, over in zip(candidates, is_end, strict=True) if not over][:width]
        if not live:
            break
        if len(pool) == width:
            reach = most if params.early_stopping == "never" and penalty > 0 else length
            if params.early_stopping is True or live[0][0] / reach**penalty <= pool[-1].penalised:
                break
    return pool


def search(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": LENGTH, "num_beams": 3, **given})


def assert_found(outputs: Seq[Request], expected: Seq[Found]) -> None:
    """Tokens, order and scores of the outputs are those of the search, to the last bit."""
    for request, found in zip(outputs, [*expected, *[None] * len(outputs)], strict=False):
        output = request.output()
        if found is None:
            assert (output.finish_reason, output.token_ids, output.score) == ("abort", [], None)
        else:
            assert tuple(output.token_ids) == found.tokens
            assert (output.score, output.cumulative_logprob) == (found.penalised, found.score)
            assert output.finish_reason == ("stop" if found.tokens[-1] == END else "length")
            assert len(request.seq.origins) == len(found.tokens)


PENALTIES, STOPPINGS = (0.0, 0.7, 1.0, 2.0), (True, False, "never")


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """1,080 of them: (drafter, options of the search)."""
    for draft, width, levels in itertools.product(("good", "bad", "reversed"), (1, 2, 3), (1, 3)):
        for wide, penalty, stopping in itertools.product(range(width, 3 * width + 1), PENALTIES, STOPPINGS):
            yield (
                draft,
                {
                    "draft": draft,
                    "num_beams": width,
                    "draft_beams": wide,
                    "spec_length": levels,
                    "length_penalty": penalty,
                    "early_stopping": stopping,
                    "n": width,
                },
            )


TABLES = {
    "plain": {},
    "ties": {"tie_step": 0.5},
    "excluded": {"zero_share": 0.3},
    "peaked": {"scale": 3.0},
}


def test_1080_configurations_find_what_the_target_alone_finds() -> None:
    """In one batch of many searches each; the adversarial drafter is worst, and no search takes less than a step."""
    steps: dict[str, list[int]] = {"good": [0, 0], "bad": [0, 0], "reversed": [0, 0]}
    wanted = list(configurations())
    assert len(wanted) == 1080
    for number, (table, part) in enumerate(zip(TABLES.values(), np.array_split(np.arange(1080), 4), strict=True)):
        model = target(number, **table)
        engine = engine_of(model)
        free = engine.scheduler.free_kv_tokens
        added = []
        for i in part:
            _, given = wanted[int(i)]
            prompt = [1 + int(i) % 4, int(i) % 5, 2]
            added.append((prompt, search(**given), engine.add_all(prompt, search(**given))))
        while any(request.seq.finish_reason is None for _, _, outputs in added for request in outputs):
            engine.step()
        check(engine)
        for prompt, params, outputs in added:
            assert_found(outputs, searched(model, prompt, params))
            report = outputs[0].report
            assert report.num_emitted >= report.num_steps, "a step in every pass"
            count = steps[params.draft or ""]
            count[0] += report.num_emitted
            count[1] += report.num_steps
        assert engine.scheduler.free_kv_tokens == free
    means = {draft: emitted / passes for draft, (emitted, passes) in steps.items()}
    assert means["good"] > means["bad"] > means["reversed"] > 1, means
