"""The memory plan against what is really allocated: exact to the byte where it says so, else within a band."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.memory_cases import (
    BF16,
    F32,
    HAS_NATIVE,
    LLAMA_1B,
    LLAMA_3B,
    OPS,
    SMALL,
    asked_cases,
    bytes_by_name,
    one_pass,
    said_by_a_child,
    write_random,
)
from forerun.blocks import Block, Spec, resized
from forerun.config import EngineConfig
from forerun.drafters import Needs, lookup, model
from forerun.engine.fitting import Outlines
from forerun.engine.opened import Opened
from forerun.errors import BadOption
from forerun.kv.cache import BlockCache
from forerun.kv.pool import HostPools
from forerun.memory.machine import available_bytes
from forerun.memory.plan import Room, memory_plan, pool_tokens, room_of
from forerun.models.source import BLOCK_BYTES
from forerun.ops.memory import weight_bytes
from forerun.ops.torch import empty_weights
from forerun.ops.torch_pools import pools_on
from forerun.ops.torch_tensors import torch_dtype
from models.gguf_files import write_tiny_model
from models.gguf_vocabularies import smollm2
from refusals import refusal
from tiny import write_tiny

pytestmark = pytest.mark.once("plans, and processes that name their drafters")

# ------------------------------------------------------------------------------------------------ exact to the byte


@pytest.mark.parametrize("ops", OPS)
def test_llama_3b_with_1b_at_eight_times_4096_tokens(ops: str) -> None:
    """The published shapes: about 6.4 GB and 2.5 GB of weights, exactly 3.5 GiB and 1.0 GiB of keys and values."""
    options = EngineConfig(draft="./1b", ops=ops, spec_length=5)
    plan = memory_plan(LLAMA_3B, LLAMA_1B, options, dtype=BF16, available_bytes=16 * 10**9)
    parts = bytes_by_name(plan)
    wider = 2 if ops == "native" else 0  # bytes of each number of a norm
    assert parts["target weights"] == 2 * 3_212_749_824 + wider * (2 * 28 + 1) * 3072
    assert parts["draft weights"] == 2 * 1_235_814_400 + wider * (2 * 16 + 1) * 2048
    assert parts["target KV cache"] == 8 * 4096 * 114_688 == 7 * 2**29
    assert parts["draft KV cache"] == 8 * 4096 * 32_768 == 2**30
    assert parts["draft probabilities"] == 8 * 5 * 128_256 * 4
    assert plan.total_bytes == sum(parts.values())
    assert plan.fits
    assert plan.suggestions == ()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_weights_are_what_the_loader_allocates(tied: bool, dtype: str) -> None:
    config = resized(SMALL, tied=tied, qkv_bias=True, qk_norm=True)
    made = empty_weights(config, torch_dtype(dtype), "cpu")
    storages = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in made.values()}
    assert weight_bytes(config, dtype) == sum(storages.values())


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
@pytest.mark.parametrize("max_seq_len", [16, 100, 256])
@pytest.mark.parametrize("num_tokens", [None, 16, 257, 1000])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_pools_are_what_the_cache_allocates(backend: Any, max_seq_len: int, num_tokens: int | None, dtype: str) -> None:
    options = EngineConfig(
        draft="./d", max_batch_size=3, max_seq_len=max_seq_len, kv_cache_backend=backend, kv_cache_tokens=num_tokens
    )

    def real(config: Spec) -> int:
        sizes: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": max_seq_len, "num_tokens": num_tokens}
        caches = [
            BlockCache.create(config.cache_shape, backend, dtype=dtype, pools=pools, **sizes)
            for pools in (HostPools, pools_on("cpu"))
        ]
        (num_bytes,) = {sum(pool.nbytes for pool in cache.pools.tensors()) for cache in caches}
        return num_bytes

    draft = resized(SMALL, num_layers=1, num_kv_heads=2)
    if backend == "contiguous" and num_tokens is not None and num_tokens < max_seq_len:
        assert refusal(BadOption, memory_plan, SMALL, draft, options, dtype=dtype) == refusal(BadOption, real, SMALL)
        return
    parts = bytes_by_name(memory_plan(SMALL, draft, options, dtype=dtype))
    assert parts["target KV cache"] == real(SMALL)
    assert parts["draft KV cache"] == real(draft)


@pytest.mark.parametrize("chunk", [512, 20_000])
def test_long_chunks_of_prompts_are_counted_behind_windows(chunk: int) -> None:
    """Two prompts in chunks, of which one overtakes the other."""
    config = resized(SMALL, windows=(None, 100, 100), max_positions=32_768)
    options = EngineConfig(
        draft="none", max_batch_size=2, max_seq_len=32_768, prefill_chunk_tokens=chunk, max_num_batched_tokens=chunk
    )
    planned = bytes_by_name(memory_plan(config, None, options, dtype=F32))["target KV cache"]
    shape = config.cache_shape
    cache = BlockCache.create(shape, "paged", max_batch_size=2, max_seq_len=32_768)
    for slot in range(2):
        cache.open(slot)
        for _ in range(3):
            cache.reserve(slot, num := min(chunk, 30_000 - cache.length(slot)))
            cache.keep({slot: range(num)})
    assert shape.kinds == [None, 100]
    whole, behind = (2 * 32_768 * shape.bytes_per_token(F32, kind) for kind in range(2))
    assert cache.kinds[1]._num_touched * 16 * shape.bytes_per_token(F32, 1) <= planned - whole < behind


@pytest.mark.parametrize("ops", OPS)
def test_only_what_a_drafter_needs_is_counted(ops: str) -> None:
    def names(draft: Spec | None, spec: str, ops: str = ops, device: str = "cpu") -> set[str]:
        options = EngineConfig(draft=spec, ops=ops)
        return set(bytes_by_name(memory_plan(SMALL, draft, options, dtype=F32, device=device)))

    always = {"target weights", "target KV cache", "activations", "reserve"}
    always |= {"pass buffers"} if ops == "native" else set()
    assert names(None, "none") == names(None, "lookup") == always | {"target probabilities"}
    with_model = always | {"draft weights", "draft KV cache"}
    assert names(SMALL, "./d") == with_model | {"draft probabilities", "target probabilities"}
    on_cuda = {"target weights", "target KV cache", "draft weights", "draft KV cache", "activations", "reserve"}
    assert names(SMALL, "./d", "auto", "cuda") == on_cuda  # probabilities are on the host, and so are blocks of files


def test_plain_decoding_wants_one_row_per_sequence() -> None:
    def rows(draft: str) -> int:
        plan = memory_plan(SMALL, None, EngineConfig(draft=draft, max_batch_size=4, spec_length=3), dtype=F32)
        return bytes_by_name(plan)["target probabilities"] // SMALL.vocab_size

    assert (rows("none"), rows("lookup")) == (4 * 4 + 48, 4 * 4 * 4 + 48)


def test_loading_counts_where_running_takes_less() -> None:
    """Blocks of the files are gone before caches and activations come: the larger of the two is needed."""

    def plan(**sizes: Any) -> dict[str, int]:
        options = EngineConfig(draft="none", max_batch_size=1, max_seq_len=64, prefill_chunk_tokens=16, ops="reference")
        return bytes_by_name(memory_plan(resized(LLAMA_1B, **sizes), None, options, dtype=BF16))

    large = plan()
    rest = sum(large.values()) - large["target weights"] - large["loading"]
    assert large["loading"] + rest == 2 * BLOCK_BYTES
    assert "loading" not in plan(vocab_size=2**20)  # what sampling computes with takes more
    assert "loading" not in plan(vocab_size=2000, hidden_size=64, ffn_size=256)  # no block is as large as that


# ------------------------------------------------------------------------------------------------ activations, measured


def peak_bytes(run: Callable[[], object], trace: Path) -> int:
    """The most that torch's CPU allocator held at once during `run`, by its own events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    profile.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


ASKED = {"draft": "lookup", "ops": "reference", "max_batch_size": 4, "max_seq_len": 1024, "prefill_chunk_tokens": 512}
PASSES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "float32": ({}, {}, F32),
    "bfloat16": ({}, {}, BF16),
    "contiguous": ({}, {"kv_cache_backend": "contiguous"}, F32),
    "qk norm": ({"model_type": "qwen3", "qk_norm": True}, {}, F32),
    "windows": ({"windows": (100, 100, None)}, {}, F32),
    "narrow ffn": ({"ffn_size": 128, "num_heads": 16}, {}, F32),
    "wide and bfloat16": ({"hidden_size": 1024, "ffn_size": 256}, {}, BF16),
    "one layer": ({"num_layers": 1}, {}, F32),
    "plain decoding": ({}, {"draft": "none"}, F32),
    "logits": ({"vocab_size": 60_000}, {"prefill_chunk_tokens": 6}, F32),
    "logits in bfloat16": ({"vocab_size": 60_000}, {"prefill_chunk_tokens": 6}, BF16),
    "soft caps": ({"softcap": 30.0}, {}, F32),
    "soft caps in bfloat16": ({"softcap": 30.0}, {}, BF16),
    "row by row": ({}, {"ops": "reference_row_by_row", "prefill_chunk_tokens": 64}, F32),
}


def capped(block: Block, softcap: float | None) -> Block:
    """The block with a soft cap of its scores."""
    assert block.attention is not None
    return replace(block, attention=replace(block.attention, softcap=softcap))


@pytest.mark.parametrize("name", PASSES)
def test_activations_bound_a_real_pass(name: str, tmp_path: Path) -> None:
    sizes, more, dtype = PASSES[name]
    config = resized(SMALL, **{key: value for key, value in sizes.items() if key != "softcap"})
    config = replace(config, blocks=tuple(capped(block, sizes.get("softcap")) for block in config.blocks))
    options = EngineConfig(**{**ASKED, **more})
    planned = bytes_by_name(memory_plan(config, None, options, dtype=dtype))["activations"]
    measured = peak_bytes(one_pass(config, options, dtype), tmp_path / "trace.json")
    assert 0.6 * planned <= measured <= planned, f"planned {planned / 1e6:.2f} MB, measured {measured / 1e6:.2f} MB"


def test_rows_of_inner_layers_are_counted(tmp_path: Path) -> None:
    options = EngineConfig(**ASKED)
    planned = bytes_by_name(memory_plan(SMALL, None, options, dtype=F32, num_taps=3))["activations"]
    without = bytes_by_name(memory_plan(SMALL, None, options, dtype=F32))["activations"]
    assert planned - without == 3 * (512 + 3 * (options.longest_draft + 1)) * SMALL.hidden_size * 4
    three, none = (peak_bytes(one_pass(SMALL, options, F32, num), tmp_path / f"{num}.json") for num in (3, 0))
    assert three - none == pytest.approx(planned - without, abs=64), "bytes, and some of the lists around them"


def test_an_engine_counts_the_inner_layers_that_its_drafters_will_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_taps(draft: str, extra: str | None = None) -> int:
        return Outlines.of(Opened.of(EngineConfig(target="shipped", draft=draft, extra_drafts=extra))).num_taps

    monkeypatch.setattr(model, "needs", lambda options, target: Needs((0, target.num_layers)))
    monkeypatch.setattr(lookup, "needs", lambda options, target: Needs((0, 1)), raising=False)
    assert [num_taps(draft) for draft in ("none", "lookup", "model")] == [0, 2, 2]
    assert num_taps("model", "lookup") == 3


def test_scores_are_counted_where_torch_writes_them_out() -> None:
    """On an accelerator, grouped heads under a mask: float32 scores and their softmax, and expanded keys and values."""
    options = EngineConfig(draft="none", ops="reference", max_batch_size=1, max_seq_len=4096, prefill_chunk_tokens=512)
    host, device = (
        bytes_by_name(memory_plan(LLAMA_3B, None, options, dtype=BF16, device=name))["activations"]
        for name in ("cpu", "cuda")
    )
    assert device - host == 4 * 24 * (2 * 512 * 4096 + 2 * 4096 * 128)


def test_compiled_kernels_come_later_and_only_on_a_cpu() -> None:
    options = EngineConfig(draft="none", ops="reference", max_batch_size=2, prefill_chunk_tokens=31)

    def later(config: Spec, dtype: str, device: str = "cpu") -> int:
        return sum(part.bytes for part in memory_plan(config, None, options, dtype=dtype, device=device).later)

    each = 700_000
    assert later(SMALL, F32) == 0  # every matrix is below the size at which float32 goes to oneDNN
    assert later(resized(SMALL, vocab_size=8192), F32) == 2 * each  # the LM head, for one row and for two
    assert later(SMALL, BF16) == (4 * 32 + 2) * each
    assert later(SMALL, BF16, "cuda") == 0
    options = replace(options, prefill_chunk_tokens=100_000, max_batch_size=64)
    assert later(SMALL, BF16) == 1_700_000_000  # where it was seen to stop


# ---------------------------------------------------------------------------------------------------------- what fits


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
@pytest.mark.parametrize("gigabytes", [9.2, 9.6, 11, 13])
@pytest.mark.parametrize("ops", OPS)
def test_suggestions_fit_and_are_the_largest_that_do(backend: str, gigabytes: float, ops: str) -> None:
    options, available = EngineConfig(draft="./1b", kv_cache_backend=backend, ops=ops), int(gigabytes * 1e9)

    def total(**changed: Any) -> int:
        return memory_plan(LLAMA_3B, LLAMA_1B, replace(options, **changed), dtype=BF16).total_bytes

    plan = memory_plan(LLAMA_3B, LLAMA_1B, options, dtype=BF16, available_bytes=available)
    assert not plan.fits
    assert plan.suggestions
    steps = {"max_batch_size": 1, "max_seq_len": 16, "kv_cache_tokens": 16 if backend == "paged" else 4096}
    for suggestion in plan.suggestions:
        assert total(**suggestion) <= available
        name, value = list(suggestion.items())[-1]
        assert total(**{**suggestion, name: value + steps[name]}) > available
        assert f"{name}={value}" in plan.verdict()


def test_one_short_sequence_is_suggested_where_no_option_alone_helps() -> None:
    options = EngineConfig(draft="none", max_batch_size=1024, max_seq_len=131072, kv_cache_backend="contiguous")
    available = weight_bytes(LLAMA_1B, BF16) + 1000 * 10**6
    (found,) = memory_plan(LLAMA_1B, None, options, dtype=BF16, available_bytes=available).suggestions
    assert set(found) == {"max_batch_size", "max_seq_len"}
    fitting = memory_plan(LLAMA_1B, None, replace(options, **found), dtype=BF16, available_bytes=available)
    assert fitting.fits
    assert fitting.total_bytes > 0.9 * available


def test_where_nothing_fits_the_sentence_says_what_takes_the_room() -> None:
    options = EngineConfig(draft="./1b")
    plan = memory_plan(LLAMA_3B, LLAMA_1B, options, dtype=BF16, available_bytes=8 * 10**9)
    assert plan.suggestions == ()
    assert plan.verdict().startswith("Nothing fits: the weights alone need 8.90 GB (8.29 GiB)")
    weights = plan.bytes_of("target weights", "draft weights")
    tight = memory_plan(LLAMA_3B, LLAMA_1B, options, dtype=BF16, available_bytes=weights + 10**6)
    assert tight.suggestions == ()
    assert "no room" in tight.verdict()


def test_longest_sequence() -> None:
    def room(max_positions: int, **options: Any) -> Room:
        return room_of(EngineConfig(**options), resized(SMALL, max_positions=max_positions))

    assert room(2048) == (2048, 8 * 2048)
    assert room(131_072) == (32_768, 32_768), "one sequence may fill what eight shared"
    assert room(131_072, max_batch_size=1) == (32_768, 32_768)
    assert room(131_072, max_batch_size=32) == (131_072, 32 * 4096)
    assert room(131_072, kv_cache_tokens=8200) == (8192, 8208)
    assert room(131_072, kv_cache_tokens=64) == (4096, 64)
    assert room(131_072, kv_cache_backend="contiguous") == (4096, None)
    assert room(131_072, max_seq_len=100_000) == (100_000, None)
    with pytest.raises(BadOption, match=r"max_seq_len=3000 is not possible: the model has 2048 positions"):
        room(2048, max_seq_len=3000)
    assert pool_tokens("paged", max_batch_size=2, max_seq_len=17) == 64


# -------------------------------------------------------------------------------------------------------- the machine

MIB = 2**20
V2 = {"memory.max": str(800 * MIB), "memory.current": str(500 * MIB), "memory.stat": f"anon 1\ninactive_file {MIB}"}
V1 = {
    "memory.limit_in_bytes": str(800 * MIB),
    "memory.usage_in_bytes": str(500 * MIB),
    "memory.stat": f"inactive_file 0\ntotal_inactive_file {MIB}",
}
MACHINES: dict[str, tuple[str, dict[str, dict[str, str]], int]] = {
    "no limit": ("0::/a/b\n", {"": {}, "a/b": {"memory.max": "max", "memory.current": "5"}}, 1000),
    "version 2": ("0::/a/b\n", {"a/b": V2}, 301),
    "version 2, a group above": ("0::/a/b\n", {"a": V2, "a/b": {"memory.max": "max", "memory.current": "1"}}, 301),
    "version 2, path of the host": ("0::/docker/123\n", {"": V2}, 301),
    "version 1": ("4:cpu,memory:/a\n1:pids:/a\n", {"memory/a": V1}, 301),
    "more than there is": ("0::/a\n", {"a": {**V2, "memory.max": str(10**18)}}, 1000),
    "exhausted": ("0::/a\n", {"a": {**V2, "memory.max": str(MIB)}}, 0),
}


@pytest.mark.parametrize("name", MACHINES)
def test_available_memory_is_the_least_of_machine_and_control_groups(name: str, tmp_path: Path) -> None:
    groups, files, expected = MACHINES[name]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {1000 * 1024} kB\n")
    for folder, contents in files.items():
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for file, text in contents.items():
            (tmp_path / "sys/fs/cgroup" / folder / file).write_text(text + "\n")
    assert available_bytes("cpu", tmp_path) == expected * MIB


def test_a_machine_that_does_not_tell(tmp_path: Path) -> None:
    assert available_bytes("cpu", tmp_path) is None
    plan = memory_plan(SMALL, None, EngineConfig(draft="none"), dtype=F32)
    assert plan.fits
    assert plan.verdict().endswith("are needed.")


# --------------------------------------------------------------------------------------------------- a whole process

CHILD = """
import ctypes, gc, json, os, sys
from forerun import LLM, SamplingParams
from forerun.engine.fitting import Outlines
from forerun.models.opened import OpenedCheckpoint

def status(key):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

def trimmed():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")

def run(prompt_tokens, **options):
    llm = LLM(spec_length=4, max_batch_size=4, **{"target": "shipped", **options})
    prompts = [[1 + (7 * b + i * i) % 256 for i in range(prompt_tokens)] for b in range(4)]
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=1)
    outputs = llm.generate(prompts, params)
    return llm, min(output.report.num_drafted for output in outputs)

def measure(max_seq_len, small, **options):
    code = {name: options[name] for name in ("ops", "dtype")}
    _ = run(150, target=small, draft=small, **code)  # touches code that would count as memory of the model
    tokenizer = OpenedCheckpoint.of(options["target"]).tokenizer  # the engine's own, which the plan does not count
    before = trimmed()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    llm, num_drafted = run(max_seq_len - 40, max_seq_len=max_seq_len, prefill_chunk_tokens=256, **options)
    peak = status("VmHWM") - before
    assert llm.opened.tokenizer is tokenizer
    plan = Outlines.of(llm.opened).plan(None)
    later = sum(part.bytes for part in plan.later)
    return {"peak": peak, "planned": plan.total_bytes, "later": later, "num_drafted": num_drafted}

for case, options in json.loads(sys.argv[1]).items():  # each in a process of its own
    if os.fork() == 0:
        print(json.dumps([case, measure(**options)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, case
"""
PROCESSES: list[Any] = ["reference float32"]
if HAS_NATIVE:
    PROCESSES += ["native float32", "native int4", *(["smollm2"] if smollm2() else [])]
    PROCESSES += [pytest.param(case, marks=pytest.mark.parity) for case in ("native bfloat16", "native int8")]


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Measure every case that is asked for.

    148 MB of target and 18 MB of draft weights in float32, and SmolLM2's file of 4 bits. All but the embeddings are too
    small for compiled kernels.
    """
    root = tmp_path_factory.mktemp("processes")
    small = write_tiny(root / "small")
    shape = resized(SMALL, vocab_size=32_000, hidden_size=512, num_kv_heads=8, head_dim=64, ffn_size=992)
    target = write_random(root / "target", resized(shape, num_layers=8), small)
    draft_shape = resized(SMALL, vocab_size=32_000, hidden_size=128, num_layers=2, num_heads=4, ffn_size=384)
    draft = write_random(root / "draft", draft_shape, small)
    cases: dict[str, Any] = {}
    for case in asked_cases(request):
        ops, _, dtype = case.partition(" ")
        models = {"small": str(small), "target": str(target), "draft": str(draft)}
        cases[case] = {"ops": ops, "dtype": dtype, "max_seq_len": 512, **models}
        if dtype.startswith("int"):  # the draft in other bits than the target
            other = f"model:path={draft},quantization=int{12 - int(dtype[3])}"
            cases[case] |= {"dtype": "bfloat16", "quantization": dtype, "draft": other}
    if "smollm2" in cases:
        models = {"small": str(write_tiny_model(root / "tiny.gguf")), "target": "smollm2", "draft": "lookup"}
        cases["smollm2"] = {"ops": "native", "dtype": "auto", "max_seq_len": 160, **models}
    return dict(json.loads(line) for line in said_by_a_child(CHILD, json.dumps(cases)).splitlines())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("case", PROCESSES)
def test_a_process_stays_within_the_plan(processes: dict[str, dict[str, int]], case: str) -> None:
    """Long prompts into a full cache, then speculation with a full batch, on a CPU.

    The peak of the process lies between 0.8 of the plan and the plan with what it says comes later.
    """
    found = processes[case]
    print(f"\n{case}: {found}, {found['peak'] / found['planned']:.3f}")
    assert found["num_drafted"] > 0
    assert found["later"] < 0.1 * found["planned"]
    assert 0.8 * found["planned"] <= found["peak"] <= found["planned"] + found["later"], found
