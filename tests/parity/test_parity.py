"""The long comparison (`make parity`): 200 held-out prompts x 128 tokens, greedy and match, every drafter, fast ops.

The fast reference operators are not row-invariant, so a run with speculation may differ from plain decoding where two
tokens are nearly tied. Every difference must carry a tie certificate (docs/exactness.md): at the first divergence the
two tokens are the two best of an independent recomputation, and their scores are closer than tau = 2 x the largest
logit deviation measured between batch shapes. Anything else is a bug. The count is printed.
"""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
import torch

from forerun import LLM, SamplingParams, drafters, registry
from forerun.engine.factory import DATA
from forerun.models.runner import Run, Runner
from forerun.ops.reference import ReferenceOps
from forerun.sampling import probs
from forerun.sampling.random import gumbel
from parity.bitwise import Models
from parity.mixtures import needed, spec_of

NUM_PROMPTS, NUM_TOKENS, TEMPERATURE = 200, 128, 0.8
pytestmark = pytest.mark.parity


@cache
def prompts() -> list[str]:
    lines = (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines[:NUM_PROMPTS]]


def params(mode: str) -> list[SamplingParams]:
    temperature = 0.0 if mode == "greedy" else TEMPERATURE
    seeds = [None if mode == "greedy" else 1000 + i for i in range(NUM_PROMPTS)]
    return [SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=seed) for seed in seeds]


@cache
def run(draft: str, mode: str) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, output ids) of every prompt."""
    pair = Models.shipped("float32", ReferenceOps())
    llm = LLM(pair.target, draft=spec_of(draft, needed(pair, draft)), spec_length=5)
    outs = llm.generate(prompts(), params(mode))
    return [(out.prompt_ids, out.token_ids) for out in outs]


def last_logits(runner: Runner, ids: list[int], chunk: int) -> torch.Tensor:
    """Logits after the last token of `ids`, run through the cache in chunks of `chunk` rows."""
    runner.cache.open(-1)
    try:
        for start in range(0, len(ids), chunk):
            tokens = ids[start : start + chunk]
            scores = runner.forward([Run(-1, tokens, "last")])
            runner.cache.keep({-1: range(len(tokens))})
        return scores.logits[0][-1].double()
    finally:
        runner.cache.release(-1)


@cache
def tau() -> float:
    """2 x the largest logit deviation between one-row, six-row and whole-prompt passes over 20 sequences."""
    runner = LLM(draft="none", ops="reference", dtype="float32").engine.runner
    deviation = 0.0
    for prompt_ids, token_ids in run("none", "greedy")[:20]:
        ids = (prompt_ids + token_ids)[-200:]
        by_shape = [last_logits(runner, ids, chunk) for chunk in (1, 6, 512)]
        deviation = max(deviation, *((a - by_shape[0]).abs().max().item() for a in by_shape[1:]))
    return 2 * deviation


@cache
def oracle() -> Runner:
    return LLM(draft="none", ops="reference_row_by_row", dtype="float32").engine.runner


def gap_of_top_two(ids: list[int], sampling: SamplingParams) -> tuple[set[int], float]:
    """The two best ids of the next position and how far apart their scores are, by the row-by-row oracle."""
    logits = last_logits(oracle(), ids, 512)
    scores = logits.numpy()
    if not sampling.greedy:
        weights = probs(logits, sampling).dense
        assert weights is not None
        scores = np.log(weights.double().numpy()) + gumbel(sampling.seed, len(ids), np.arange(len(weights)))
    best = np.argsort(-scores, kind="stable")[:2]
    return {int(i) for i in best}, float(scores[best[0]] - scores[best[1]])


@pytest.mark.parametrize("mode", ["greedy", "match"])
@pytest.mark.parametrize("draft", [d for d in registry.names(drafters.__name__) if d != "none"])
def test_every_difference_from_plain_carries_a_tie_certificate(draft, mode, capsys):
    differences = []
    limit = tau() / (1.0 if mode == "greedy" else TEMPERATURE)
    for (prompt_ids, plain), (_, ours), sampling in zip(run("none", mode), run(draft, mode), params(mode), strict=True):
        if plain == ours:
            continue
        at = next(i for i, (a, b) in enumerate(zip(plain, ours, strict=False)) if a != b)
        pair, gap = gap_of_top_two(prompt_ids + plain[:at], sampling)
        assert pair == {plain[at], ours[at]}, "the two runs chose tokens that are not the best two"
        assert gap <= limit, f"score gap {gap} is no tie (tau {limit})"
        differences.append(gap)
    with capsys.disabled():
        total = sum(len(plain) for _, plain in run("none", mode))
        print(
            f"\n{draft}, {mode}: {NUM_PROMPTS - len(differences)} of {NUM_PROMPTS} outputs identical to plain ", end=""
        )
        print(f"({total} tokens); {len(differences)} near-ties, gaps {sorted(differences)} <= tau {limit:.2e}")
