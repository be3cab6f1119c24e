"""Layers with a window give old blocks back: what is read afterwards is the same, and takes less memory."""

from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.kv import cache as kv_cache
from forerun.kv.cache import BlockCache
from forerun.models.loading import load_checkpoint
from forerun.models.runner import Run, Runner
from forerun.ops import make as make_ops
from models.test_parity import SIZES, WHOLE, Raw, assert_close, oracle_of, tokens_of
from support import needs_native

LONG: Raw = {"hidden_size": 96, "intermediate_size": 64, "max_position_embeddings": 768}
MISTRAL: Raw = {**SIZES, **LONG, "model_type": "mistral", "sliding_window": 20}
CASES: dict[str, Raw] = {"mistral": MISTRAL} | {
    case: WHOLE[case] | LONG | {"sliding_window": 20} for case in ("gemma2", "gemma3", "gpt_oss", "gemma4-small")
}


@needs_native
@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_a_cache_that_keeps_all(
    write_checkpoint: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: prompts in chunks, shared beginnings, greedy and seeded, with drafts and without."""
    monkeypatch.setattr(kv_cache, "FOUND_TOKENS", 0)
    monkeypatch.setattr(kv_cache, "WRITTEN_TOKENS", 96)
    folder = write_checkpoint(CASES[case])
    shared = tokens_of(260, 5)
    prompts = [shared[: 240 + seed] + tokens_of(30 + 9 * seed, seed) for seed in range(4)]
    params = [
        SamplingParams(max_tokens=150, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=50, temperature=1, seed=7, acceptance="match", ignore_eos=True),
    ]
    options: Raw = {"dtype": "bfloat16", "ops": "native", "max_seq_len": 512, "max_batch_size": 4}
    options |= {"prefill_chunk_tokens": 96, "pacing": "fixed"}
    texts = []
    own = f"model:path={folder},quantization=none"
    drafts = ("none", "lookup", "early_exit", "recycle", own)  # recycle's are trees
    for backend, draft in (("contiguous", "none"), *(("paged", draft) for draft in drafts)):
        llm = LLM(str(folder), draft=draft, kv_cache_backend=backend, **options)
        outs = [out for own in params for out in llm.generate(prompts, own)]
        texts.append([out.token_ids for out in outs])
        cache = llm.engine.runner.cache
        cache.check_integrity()
        if backend == "paged":  # what was given back is written again before other memory is
            (windowed,) = [kind for kind in cache.kinds if kind.window == 20]
            assert windowed._num_touched == windowed.touched_blocks == 4 * 18
            assert any(out.report.num_cached_tokens for out in outs)
        if draft.startswith("model"):  # a model that drafts for itself is always right: greedy, or by the same noise
            assert sum(out.report.num_accepted for out in outs) == sum(out.report.num_tested for out in outs) > 500
    assert texts[1:] == texts[:1] * len(drafts)


@pytest.mark.parametrize("ops", ["reference", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("case", CASES)
def test_logits_far_behind_a_window_are_those_of_transformers(write_checkpoint: Any, case: str, ops: str) -> None:
    folder = write_checkpoint(CASES[case])
    oracle, tokens = oracle_of(folder), tokens_of(500, 3)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    model = load_checkpoint(folder, ops=make_ops(ops, "cpu"), dtype="float32").model
    cache = BlockCache.of(model, "paged", max_batch_size=2, max_seq_len=512)
    runner, found = Runner(model, cache), []
    cache.open(0), cache.open(1)
    for start, end in ((0, 190), (190, 191), (191, 350), (350, 500)):
        cache.reserve(1, 40)  # of another sequence, which takes what was given back
        runner.forward([Run(1, tokens_of(40, start))])
        cache.keep({1: range(40)})
        cache.reserve(0, end - start)
        found.append(torch.from_numpy(runner.forward([Run(0, tokens[start:end])]).logits[0]))
        cache.keep({0: range(end - start)})
        cache.check_integrity()
    assert_close(torch.cat(found), expected)
    windowed = cache.kinds[-1]
    assert windowed.window == 20
    assert cache.length(0) == 500
    assert len(windowed._slots[0].live) == 500 // 16 + 1 - (350 - 19 - 128) // 16
