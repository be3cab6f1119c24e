"""The memory plan of an engine with several draft models: what each takes, and the refusal that names them."""

from dataclasses import replace
from typing import Any

import pytest

from engine.memory_cases import BF16, F32, OPS, SMALL, bytes_by_name
from forerun.blocks import Spec, resized
from forerun.config import EngineConfig
from forerun.memory.plan import MemoryPlan, memory_plan

pytestmark = pytest.mark.once("no engine runs: plans alone")

SECOND = resized(SMALL, num_layers=2, num_kv_heads=2, ffn_size=512)
THIRD = resized(SMALL, num_layers=5)


def plan(draft: Spec | None = SMALL, available: int | None = None, ops: Any = "reference", **extra: Spec) -> MemoryPlan:
    spec = "lookup" if draft is None else "./d"
    options = EngineConfig(draft=spec, extra_drafts=";".join(extra), ops=ops, max_batch_size=4, max_seq_len=512)
    dtype = F32 if ops == "reference" else BF16
    return memory_plan(SMALL, draft, options, dtype=dtype, available_bytes=available, extra_drafts=extra)


@pytest.mark.parametrize("ops", OPS)
def test_a_second_draft_model_adds_what_it_takes_as_the_only_one(ops: str) -> None:
    """Weights, cache and buffers of its own; draft probabilities and activations belong to one model at a time."""
    one, two = (bytes_by_name(plan(ops=ops, **extra)) for extra in ({}, {"b": SECOND}))
    none, alone = (bytes_by_name(plan(draft, ops=ops)) for draft in (None, SECOND))
    own = {"extra draft weights": alone["draft weights"], "extra draft KV cache": alone["draft KV cache"]}
    if "pass buffers" in alone:  # of all models together
        own["pass buffers"] = alone["pass buffers"] - none.get("pass buffers", 0)
    assert {name: two[name] - one.get(name, 0) for name in two if two[name] != one.get(name, 0)} == own
    assert set(one) <= set(two)
    assert ("pass buffers" in own) == (ops == "native")


def test_each_has_lines_of_its_own_and_a_model_may_be_there_twice() -> None:
    parts = bytes_by_name(plan(b=SECOND, c=THIRD, d=SECOND))
    names = ("extra draft", "extra draft 2", "extra draft 3")
    weights, caches = ([parts[f"{name} {what}"] for name in names] for what in ("weights", "KV cache"))
    assert weights[0] == weights[2] != weights[1]
    assert caches[0] == caches[2] != caches[1]
    assert plan(b=SECOND, c=THIRD).extra_drafts == {"extra draft": "b", "extra draft 2": "c"}


def test_activations_are_those_of_the_largest_model() -> None:
    """Also where that is an extra draft model, whose logits are held while the target runs."""
    wide = resized(SECOND, hidden_size=2048, ffn_size=8192)
    parts, alone = bytes_by_name(plan(b=wide)), bytes_by_name(plan(wide))
    assert parts["activations"] == alone["activations"] > bytes_by_name(plan())["activations"]


def test_without_a_drafter_of_its_own_an_engine_plans_for_those_that_requests_may_choose() -> None:
    options = EngineConfig(draft="none", extra_drafts="./b", spec_length=3, max_batch_size=4, ops="reference")
    parts = bytes_by_name(memory_plan(SMALL, None, options, dtype=F32, extra_drafts={"./b": SECOND}))
    assert parts["draft probabilities"] == 4 * 3 * SMALL.vocab_size * 4
    assert parts["target probabilities"] == (4 * 4 * 4 + 48) * SMALL.vocab_size
    assert "draft weights" not in parts


def test_the_sentence_names_them_where_it_does_not_fit() -> None:
    alone = plan().total_bytes
    assert plan(available=alone).fits
    found = plan(available=alone, b=SECOND, c=THIRD)
    assert not found.fits
    assert " are " in found.verdict()
    own = sum(part.bytes for part in found.parts if part.name.startswith("extra draft"))
    assert found.verdict().endswith(
        f" Weights and KV cache of extra_drafts='b; c' are {own / 1e9:.3f} GB ({own / 2**30:.3f} GiB) of that."
    )
    tight = plan(available=plan().bytes_for("weights"), b=SECOND)
    assert tight.verdict().startswith("Nothing fits: the weights alone need ")
    assert "extra_drafts='b'" in tight.verdict()
    assert "extra_drafts" not in plan(available=10**6).verdict()
    for suggestion in found.suggestions:
        config = replace(EngineConfig(draft="./d", ops="reference", max_batch_size=4, max_seq_len=512), **suggestion)
        assert memory_plan(SMALL, SMALL, config, dtype=F32, extra_drafts={"b": SECOND, "c": THIRD}).total_bytes <= alone
