"""Load at length: two hundred mixed requests on the shipped pair, ten thousand with aborts in little memory."""

import gc
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.load import caches, check, engine_with, mixed, run
from forerun import LLM, SamplingParams
from forerun.engine.opened import SHIPPED_TARGET
from ops.native_cases import needs_native
from parity.mixtures import resident_bytes
from support import random_decoder

pytestmark = pytest.mark.parity

NUM_MIXED, NUM_MANY = 200, 10_000
TEXTS = [json.loads(line)["text"] for line in (SHIPPED_TARGET.parent / "prompts.jsonl").open(encoding="utf-8")]


def shipped_requests(llm: LLM) -> list[tuple[list[int], SamplingParams]]:
    """Held-out prompts, some of which begin with the same long text; greedy and seeded, every drafter and length."""
    random_ = random.Random(7)
    heads = [[], *(llm.tokenizer.encode("".join(TEXTS[i : i + 6]))[:400] for i in (0, 6))]
    made = []
    for i in range(NUM_MIXED):
        ids = llm.tokenizer.encode(TEXTS[i % len(TEXTS)])[-random_.randint(10, 120) :]
        params: dict[str, Any] = {
            "max_tokens": random_.randint(8, 96),
            "temperature": random_.choice((0.0, 0.8, 1.0)),
            "top_p": random_.choice((1.0, 0.9)),
            "repetition_penalty": random_.choice((1.0, 1.0, 1.1)),
            "seed": i,
            "draft": random_.choice((None, "none", "lookup", "model")),
            "spec_length": random_.choice((None, None, 1, 4, 11)),
            "priority": random_.choice((0, 0, 1)),
        }
        made.append((random_.choice(heads) + ids, SamplingParams(**params)))
    return made


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_hundred_mixed_requests_write_what_each_writes_alone(dtype: str, say: Callable[[str], None]) -> None:
    options: dict[str, Any] = {"dtype": dtype, "max_seq_len": 1024}
    llm = LLM("shipped", max_batch_size=24, kv_cache_tokens=4096, prefill_chunk_tokens=96, **options)
    wanted = shipped_requests(llm)
    requests = [llm.engine.add(ids, params) for ids, params in wanted]
    outputs = run(llm.engine, requests)
    plain = LLM("shipped", draft="none", max_batch_size=1, prefix_caching=False, **options)
    different = 0
    for output, (ids, params) in zip(outputs, wanted, strict=True):
        alone = SamplingParams(**{**vars(params), "draft": None, "spec_length": None})
        different += plain.generate([ids], alone)[0].token_ids != output
    reports = [request.report for request in requests]
    totals = {name: sum(getattr(r, name) for r in reports) for name in ("num_preemptions", "num_cached_tokens")}
    accepted, drafted = sum(r.num_accepted for r in reports), sum(r.num_drafted for r in reports)
    say(f"\n{dtype}: {different} of {NUM_MIXED} differ; {accepted} of {drafted} accepted, {totals}")
    assert different == 0
    assert all(total > 0 for total in totals.values())


def test_ten_thousand_requests_with_aborts_lose_nothing(say: Callable[[str], None]) -> None:
    """No block leaks, every request is answered once, and memory does not grow."""
    random_ = random.Random(3)
    model = random_decoder(3, layers=1, hidden=16)  # on torch's fast operators
    engine = engine_with(256, policy="auto", model=model, prefill_chunk_tokens=40, max_batch_size=12)
    wanted, alive, answers = mixed(5, 500, longest=16), [], 0
    begun = aborted = 0
    resident: list[int] = []
    while begun < NUM_MANY or alive:
        while begun < NUM_MANY and len(alive) < 30:
            alive.append(engine.add(*wanted[begun % len(wanted)]))
            begun += 1
        if random_.random() < 0.05:
            victim = random_.choice(alive)
            engine.abort(victim)
            alive.remove(victim)
            answers, aborted = answers + 1, aborted + 1
        for request in engine.step():
            alive.remove(request)
            answers += 1
        check(engine)
        if begun % 1000 == 0 and len(resident) < begun // 1000:
            gc.collect()
            resident.append(resident_bytes())
    assert answers == NUM_MANY
    for cache in caches(engine):
        assert cache.free_tokens() == cache.num_blocks * cache.block_tokens
    times = engine.scheduler.num_preemptions
    megabytes = [round(b / 1e6) for b in resident]
    say(f"\n{NUM_MANY} requests, {aborted} aborted, {times} preemptions; resident MB {megabytes}")
    assert resident[-1] < resident[1] * 1.02 + 2e6
