"""The long comparison (`make parity`): 200 held-out prompts x 128 tokens, greedy and match, every drafter, fast ops.

The fast reference operators are not row-invariant, so a run with speculation may differ from plain decoding where two
tokens are nearly tied. Every difference must carry a tie certificate (docs/exactness.md): at the first divergence the
two tokens are the two best of an independent recomputation, and their scores are closer than tau = 2 x the largest
logit deviation measured between batch shapes. Anything else is a bug. The count is printed.
"""

from functools import cache

import pytest

from forerun import LLM, SamplingParams, drafters, registry
from forerun.certify.ties import best_two, measured_tau
from forerun.models.runner import Runner
from forerun.ops.reference import ReferenceOps
from parity.bitwise import Models, held_out_texts
from parity.mixtures import needed, spec_of

NUM_PROMPTS, NUM_TOKENS, TEMPERATURE = 200, 128, 0.8
pytestmark = pytest.mark.parity


def params(mode: str) -> list[SamplingParams]:
    temperature = 0.0 if mode == "greedy" else TEMPERATURE
    seeds = [None if mode == "greedy" else 1000 + i for i in range(NUM_PROMPTS)]
    return [SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=seed) for seed in seeds]


@cache
def run(draft: str, mode: str) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, output ids) of every prompt."""
    pair = Models.shipped("float32", ReferenceOps())
    llm = LLM(pair.target, draft=spec_of(draft, needed(pair, draft)), spec_length=5)
    return [(out.prompt_ids, out.token_ids) for out in llm.generate(held_out_texts(NUM_PROMPTS), params(mode))]


@cache
def tau() -> float:
    """2 x the largest logit deviation between one-row, six-row and whole-prompt passes over 20 sequences."""
    runner = LLM("shipped", draft="none", ops="reference", dtype="float32").engine.runner
    texts = [(prompt_ids + token_ids)[-200:] for prompt_ids, token_ids in run("none", "greedy")[:20]]
    return measured_tau(runner, texts)


@cache
def oracle() -> Runner:
    return LLM("shipped", draft="none", ops="reference_row_by_row", dtype="float32").engine.runner


@pytest.mark.parametrize("mode", ["greedy", "match"])
@pytest.mark.parametrize("draft", [d for d in registry.names(drafters.__name__) if d != "none"])
def test_every_difference_from_plain_carries_a_tie_certificate(draft, mode, say):
    differences = []
    limit = tau() / (1.0 if mode == "greedy" else TEMPERATURE)
    for (prompt_ids, plain), (_, ours), sampling in zip(run("none", mode), run(draft, mode), params(mode), strict=True):
        if plain == ours:
            continue
        at = next(i for i, (a, b) in enumerate(zip(plain, ours, strict=False)) if a != b)
        pair, gap = best_two(oracle(), prompt_ids + plain[:at], len(prompt_ids), sampling)
        assert pair == {plain[at], ours[at]}, "the two runs chose tokens that are not the best two"
        assert gap <= limit, f"score gap {gap} is no tie (tau {limit})"
        differences.append(gap)
    total = sum(len(plain) for _, plain in run("none", mode))
    say(
        f"\n{draft}, {mode}: {NUM_PROMPTS - len(differences)} of {NUM_PROMPTS} outputs identical to plain "
        f"({total} tokens); {len(differences)} near-ties, gaps {sorted(differences)} <= tau {limit:.2e}"
    )
