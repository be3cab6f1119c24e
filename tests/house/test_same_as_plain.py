"""House tests 2 and 3: with every drafter the tokens are plain decoding's, bit for bit, and the caches stay exact.

Run on the operators whose rows do not depend on how they were batched: the row-by-row reference, and the native ones.
"""

import dataclasses
import itertools
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from forerun import drafters, registry
from forerun.drafters.shared.model_drafter import ModelDrafter
from forerun.engine.engine import Engine
from forerun.params import Thinking
from forerun.types import SamplingParams
from support import VOCAB, drafter_for, engine_for, heard, needs_native, on_native, random_decoder

DRAFTERS = registry.names(drafters.__name__)
WITH_A_MODEL = [name for name in DRAFTERS if isinstance(drafter_for(name, random_decoder(1)), ModelDrafter)]
OPS = [
    "row_by_row",
    *(pytest.param(dtype, marks=needs_native, id=f"native {dtype}") for dtype in ("float32", "bfloat16")),
]
Outcome = list[tuple[list[int], list[tuple[int, float, list[tuple[int, float]]]]]]


def sampling(i: int) -> SamplingParams:
    """A different mixture of options for every request, greedy and match in turn."""
    temperature = (0.0, 0.7, 1.0, 1.3)[i % 4]
    return SamplingParams(
        max_tokens=(24, 1, 9, 17, 24)[i % 5],
        temperature=temperature,
        seed=100 + i if temperature else None,
        top_k=(0, 5, 20)[i % 3],
        top_p=(1.0, 0.9)[i % 2],
        min_p=(0.0, 0.05)[i % 2],
        repetition_penalty=(1.0, 1.2, 1.0, 1.2, 0.9)[i % 5],
        presence_penalty=(0.0, 0.3, 0.2)[i % 3],
        frequency_penalty=(0.1, 0.0)[i % 2],
        min_tokens=(0, 0, 5)[i % 3] if i % 5 != 1 else 0,
        stop_token_ids=(3, 40) if i % 2 else (),
        logit_bias={7: 1.5, 8: -float("inf")} if i % 4 == 2 else None,
        logprobs=2,
        grammar=Thinking((5,) if i % 2 else (), closing=11, most=i // 2) if i % 3 == 1 else None,
    )


def prompts() -> list[list[int]]:
    """Repeated twice each, so that lookup has something to find."""
    rng = random.Random(0)
    return [[rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 7, 19)))] * 2 for _ in range(20)]


def serve(engine, order: list[int] | None = None) -> Outcome:
    """Serve the prompts in one continuous batch, checking cache and invariant after every step."""
    order = order or list(range(len(prompts())))
    requests = {i: engine.add(prompts()[i], sampling(i)) for i in order}
    pool = engine.runner.cache
    while any(r.seq.finish_reason is None for r in requests.values()):
        engine.step()
        pool.check_integrity()
        for request in engine.scheduler.running:
            cached, committed = pool.length(request.seq.id), len(request.seq.tokens)
            prefilling = request.seq.num_output_tokens == 0
            assert cached == committed - 1 or (prefilling and cached < committed - 1)
    assert pool.free_tokens() == pool.num_blocks * pool.block_tokens, "a finished request kept blocks"
    seqs = [requests[i].seq for i in range(len(order))]
    return [(s.output_ids, [(lp.token_id, lp.logprob, lp.top) for lp in s.logprobs]) for s in seqs]


def engine_on(ops: str, draft: str = "none", **options) -> Engine:
    """An engine on the row-by-row reference, or on native operators with a target of the type `ops`."""
    model = random_decoder(1, row_by_row=True)
    if ops == "row_by_row":
        return engine_for(model, draft, **options)
    return engine_for(on_native(model.config, model.weights, ops), draft, **options)


@cache
def plain(ops: str) -> Outcome:
    """Each request alone, without a drafter, its prompt run in one piece."""
    return serve(engine_on(ops, max_batch_size=1))


COMBINATIONS = list(itertools.product((1, 4, 7), ("paged", "contiguous")))
ALWAYS = ("model", "lookup", "tree")  # the drafters that `make test` tests with every combination, natively in bfloat16


def is_short(ops: str, draft: str, combination: tuple[int, str]) -> bool:
    """Whether `make test` has it: of each other drafter one combination, another one for the next drafter.

    Of the row-by-row reference, where a pass takes longest, these drafters are enough.
    """
    place = (COMBINATIONS.index(combination) - DRAFTERS.index(draft)) % len(COMBINATIONS)
    if ops == "row_by_row":
        return draft in ALWAYS and place == 0
    return (draft in ALWAYS and ops == "native bfloat16") or place == (3 if ops == "native float32" else 0)


def cases() -> list[Any]:
    """Every (ops, draft, spec_length, backend), those of `make parity` marked."""
    made = []
    for ops, draft, pair in itertools.product(OPS, DRAFTERS, COMBINATIONS):
        marks, value, name = ([], ops, ops) if isinstance(ops, str) else (list(ops.marks), ops.values[0], str(ops.id))
        if not is_short(name, draft, pair):
            marks.append(pytest.mark.parity)
        made.append(pytest.param(value, draft, *pair, marks=marks, id=f"{name}-{draft}-{pair[0]}-{pair[1]}"))
    return made


@pytest.mark.parametrize(("ops", "draft", "spec_length", "backend"), cases())
def test_tokens_and_logprobs_equal_plain_bitwise(ops, draft, spec_length, backend):
    chunk = {1: 512, 4: 5, 7: 1}[spec_length]
    engine = engine_on(ops, draft, backend=backend, spec_length=spec_length, prefill_chunk_tokens=chunk)
    order = random.Random(spec_length).sample(range(len(prompts())), len(prompts()))
    assert serve(engine, order) == plain(ops)


def test_the_comparison_can_fail():
    """Negative control: another seed of the weights gives other tokens."""
    assert serve(engine_for(random_decoder(2, row_by_row=True))) != plain("row_by_row")


def test_the_draft_model_drafts_and_is_mostly_right():
    """Otherwise the comparison above would compare plain decoding with itself."""
    engine = engine_for(random_decoder(1), "model", spec_length=4)
    reports = heard(engine)
    serve(engine)
    drafted, tested, accepted = (
        sum(getattr(r, f"num_{n}") for r in reports) for n in ("drafted", "tested", "accepted")
    )
    assert drafted > 100
    assert 0.3 < accepted / tested < 1.0


@pytest.mark.parametrize("catchup_tokens", [1, 3, 512])
@pytest.mark.parametrize("draft", WITH_A_MODEL)
@pytest.mark.parametrize("ops", OPS)
def test_the_draft_cache_equals_one_rebuilt_from_the_committed_tokens(ops, draft, catchup_tokens):
    """Stale rows after a rejection or a full acceptance would only lower acceptance (mutant m17)."""
    engine = engine_on(ops, draft, catchup_tokens=catchup_tokens)
    request = engine.add(prompts()[4], SamplingParams(max_tokens=40, temperature=0.8, seed=5))
    drafter = engine.drafter.first
    lengths = set()
    while request.seq.finish_reason is None:
        engine.step()
        if request.seq.finish_reason is None:
            lengths.add(len(request.seq.tokens) - check_draft_cache(drafter, request.seq))
    if catchup_tokens == 512 and draft == "model":
        assert {1, 2} <= lengths, "both a rejection and a full acceptance must have happened"


def check_draft_cache(drafter, seq) -> int:
    """Committed rows of the draft's cache equal a rebuild; returns how many there are."""
    drafter._forget_rejected(seq)
    held = drafter.runner.cache.length(seq.id)
    assert held <= len(seq.tokens) - 1
    rebuilt = type(drafter)(drafter.runner, drafter.options)
    own = dataclasses.replace(seq.params, cache_salt="nothing shared")
    shadow = type(seq)(-1, list(seq.tokens), seq.num_prompt_tokens, own, seq.seed, seq.max_len)
    rebuilt.begin(shadow)
    if held:
        rebuilt._feed({0: (shadow, shadow.tokens[:held])})
    pool = drafter.runner.cache
    for layer in range(pool.shape.num_layers):
        for data in (pool.pools[layer].keys, pool.pools[layer].values):
            own, again = (data[pool.rows(slot, 0, held)] for slot in (seq.id, -1))
            assert own.equal(again) if isinstance(own, Tensor) else np.array_equal(own.values, again.values)
    rebuilt.end(shadow)
    return held
