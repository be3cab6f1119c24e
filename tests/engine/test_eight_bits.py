"""Engines with a KV cache in 8 bits: speculation, shared beginnings, forks and disks give plain decoding's texts."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import methods
from forerun import LLM, SamplingParams
from forerun.blocks import CacheShape
from forerun.certify.pair import Plain
from forerun.cli.main import app
from forerun.drafters import Target
from forerun.engine.opened import SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.errors import BadOption
from forerun.ops import kept_dtype
from ops.native_cases import runs_native

pytestmark = runs_native

PROMPTS = ["def fibonacci(n):\n", "class Stack:\n    def __init__(self):\n", "import os\n\n\ndef read(path):\n"]
GREEDY = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=48, temperature=1, seed=7, acceptance="match", ignore_eos=True)


def make(**options: Any) -> LLM:
    return LLM(SHIPPED_TARGET, kv_cache_dtype="int8", max_seq_len=512, calibrate=False, **options)


def texts(llm: LLM, params: SamplingParams, prompts: list[str] = PROMPTS) -> list[list[int]]:
    return [list(output.token_ids) for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[list[int]]]:
    llm = make(draft="none", max_batch_size=1)
    assert llm.engine.runner.cache.dtype == "int8"  # type: ignore[attr-defined]
    return {"greedy": texts(llm, GREEDY), "match": texts(llm, SEEDED)}


@pytest.mark.parametrize("draft", ["lookup", "tree", "self", "auto"])
def test_drafts_change_no_token(plain: dict[str, list[list[int]]], draft: str) -> None:
    """Greedy and `match`, several requests at once, against plain decoding one by one with the same cache."""
    llm = make(draft=draft)
    assert texts(llm, GREEDY) == plain["greedy"]
    assert texts(llm, SEEDED) == plain["match"]


@pytest.mark.parametrize("method", ["eagle", "dflash"])
def test_trained_heads_keep_caches_of_their_own_type(
    plain: dict[str, list[list[int]]], tmp_path: Path, method: str
) -> None:
    """A head beside a target with such a cache: the same texts, and a plan that counts both."""
    plain_llm = LLM(SHIPPED_TARGET, draft="none")
    model = plain_llm.checkpoint.model
    target = Target.of(model, plain_llm.opened)
    spec = f"{method}:path={getattr(methods, f'random_{method}')(target, tmp_path)['path']}"
    llm = make(draft=spec)
    cache = llm.drafters[method].runner.cache if method == "eagle" else llm.drafters[method].cache
    assert cache.dtype == model.cache_dtype
    assert texts(llm, GREEDY) == plain["greedy"]
    assert texts(llm, SEEDED) == plain["match"]
    parts = planned("--kv-cache-dtype", "int8", "--max-seq-len", "512", "--draft", spec)
    assert sum(tensor.nbytes for tensor in cache.pools.tensors()) in parts.values()


def test_draft_models_have_such_a_cache_too() -> None:
    llm = make(draft=str(SHIPPED_DRAFT))
    caches = [r.cache for d in llm.engine.drafter.members.values() for r in d.runners]  # type: ignore[attr-defined]
    assert [cache.dtype for cache in caches] == ["int8"]


def test_shared_beginnings_and_forks(plain: dict[str, list[list[int]]]) -> None:
    """What an earlier request left is found, and samples of one prompt share it: texts are those of fresh caches."""
    long = "".join(PROMPTS) * 6
    fresh = texts(make(draft="none"), GREEDY, [long, long + "x = 1\n"])
    llm = make(draft="lookup")
    found = llm.generate([long], GREEDY)[0], llm.generate([long + "x = 1\n"], GREEDY)[0]
    assert [list(output.token_ids) for output in found] == fresh
    assert found[1].report.num_cached_tokens >= 64
    several = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=20, temperature=0, n=3, ignore_eos=True))
    assert [list(one.token_ids) for one in several] == [plain["greedy"][0][:20]] * 3


def test_what_is_kept_on_disk_comes_back(tmp_path: Path) -> None:
    """Behind a restart the same text, from the folder; an engine with another cache finds nothing there."""
    long, disk = "".join(PROMPTS) * 6, f"80MB:{tmp_path / 'kept'}"
    with make(draft="none", kv_disk=disk) as first:
        expected = texts(first, GREEDY, [long])
    with make(draft="none", kv_disk=disk) as second:
        output = second.generate([long], GREEDY)[0]
    assert [list(output.token_ids)] == expected
    assert output.report.num_disk_tokens >= 64
    with LLM(SHIPPED_TARGET, draft="none", max_seq_len=512, calibrate=False, kv_disk=disk) as other:
        assert other.generate([long], GREEDY)[0].report.num_disk_tokens == 0


def test_a_certificate_compares_with_the_same_cache() -> None:
    assert Plain(make(draft="lookup"))._runner.cache.dtype == "int8"  # type: ignore[attr-defined]


def planned(*options: str) -> dict[str, int]:
    found = CliRunner().invoke(app, ["plan", "--target", str(SHIPPED_TARGET), *options, "--json"])
    return {part["name"]: part["bytes"] for part in json.loads(found.stdout)["parts"]}


def test_the_plan_counts_its_bytes() -> None:
    options = ["--max-seq-len", "512", "--draft", str(SHIPPED_DRAFT)]
    parts, plain = planned("--kv-cache-dtype", "int8", *options), planned(*options)
    llm = make(draft=str(SHIPPED_DRAFT))
    pools = llm.engine.runner.cache.pools  # type: ignore[attr-defined]
    assert parts["target KV cache"] == sum(tensor.nbytes for tensor in pools.tensors())
    for name in ("target KV cache", "draft KV cache"):
        assert parts[name] < 0.6 * plain[name]


def test_operators_that_cannot_refuse_at_the_door() -> None:
    with pytest.raises(BadOption, match="kv_cache_dtype='int8' needs a CPU's native operators"):
        make(draft="none", ops="reference")
    with pytest.raises(BadOption, match="kv_cache_dtype='bfloat16' needs a CPU's native operators"):
        LLM(SHIPPED_TARGET, draft="none", ops="reference", dtype="float32", kv_cache_dtype="bfloat16")
    done = CliRunner().invoke(
        app, ["plan", "--target", str(SHIPPED_TARGET), "--ops", "reference", "--kv-cache-dtype", "int8"]
    )
    assert isinstance(done.exception, BadOption)
    with pytest.raises(BadOption, match="heads of up to 1,024 dimensions"):
        kept_dtype("int8", "native", CacheShape(2, 1, 2048), "bfloat16")
    assert kept_dtype("int8", "native", CacheShape(2, 1, 2048), "bfloat16", must=False) == "bfloat16"
    with pytest.raises(BadOption, match="auto, bfloat16, float32, int8"):
        LLM(SHIPPED_TARGET, kv_cache_dtype="int4")
    options = {"dtype": "float32", "kv_cache_dtype": "float32", "max_seq_len": 64}
    LLM(SHIPPED_TARGET, draft="none", ops="reference", **options).close()
