"""What the CUDA backend does on a card: parity, bits, bandwidth, the time of a pass, and of the engine's steps.

    python -m benchmarks.gpu FOLDER [PART ...]      writes FOLDER/gpu.json, and prints a short table

Each part runs by itself; one that fails says so and the others run. Without names, parts begin until nine minutes are
over, and those that are left are named. Times are medians, and every share of bandwidth is over what was measured in
the same run. Where there is no card, some parts are rehearsed on tiny shapes (gpu_timing.py).
"""

import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_compared import torch_passes, transformers_loops
from benchmarks.gpu_draws import draws
from benchmarks.gpu_timing import DEVICE, IS_REHEARSED, SHAPES, bandwidth, captured, seconds
from forerun import LLM, SamplingParams, blocks
from forerun.blocks import Spec
from forerun.config import Quantization
from forerun.host_tensor import HostTensor
from forerun.kv.cache import BlockCache
from forerun.models.opened import read_config
from forerun.models.runner import Run, Runner
from forerun.ops import cuda, load_model
from forerun.ops.cuda import operators
from forerun.ops.cuda.packed import Packed
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows
from forerun.ops.quantising import is_rounded, quantise, scheme_for, scheme_of
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import empty_weights
from forerun.ops.torch_tensors import tensor_of

_TILES: Any = operators.Tiles
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b, 12 of 48 layers": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "max_position_embeddings": 8192,
        "norm_topk_prob": True,
    },
    "gpt-oss-20b, 6 of 24 layers": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 6,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
        "num_local_experts": 32, "num_experts_per_tok": 4, "max_position_embeddings": 8192, "sliding_window": 128,
    },
}  # fmt: skip
ROWS = (1, 2) if IS_REHEARSED else (1, 2, 4, 8, 16, 32, 64)
NUM_WARM, NUM_TIMED = (0, 1) if IS_REHEARSED else (3, 20)
NUM_SEQUENCES, NUM_PROMPT = (2, 4) if IS_REHEARSED else (64, 128)
MATRICES = {
    "1b": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)],
    "8b": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
}


def _all(ops: cuda.CudaOps, x: Tensor, weights: list[Tensor]) -> list[operators.PartialSums]:
    return [ops.product(x, weight) for weight in weights]


def products(out: dict[str, Any]) -> None:
    """Parity with torch, and equal bits of a row whatever is beside it."""
    ops = cuda.CudaOps()
    found = out["products"] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for num_out, num_in in ((3072, 2048), (2048, 8192), (16384, 2048), (1000, 776)):
            w = torch.randn(num_out, num_in, device=DEVICE).to(dtype)
            x = torch.randn(100, num_in, device=DEVICE)
            whole = ops.linear(x, w)
            exact = x.to(dtype).double() @ w.double().T
            differ = _differ(ops, x, w, whole, (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 65, 100))
            error = float((whole.double() - exact).norm() / exact.norm())
            found.append({"dtype": str(dtype), "shape": (num_out, num_in), "error": error, "differ": differ})


def _differ(ops: cuda.CudaOps, x: Tensor, weight: Any, whole: Tensor, nums: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where so many of 100 rows, from one of them on, have other bits by themselves than in the whole product."""
    places = [(num, first) for num in nums for first in {0, 5, 100 - num} if first + num <= 100]
    parts = [(place, slice(place[1], sum(place))) for place in places]
    return [place for place, own in parts if not torch.equal(ops.linear(x[own], weight), whole[own])]


def tune(out: dict[str, Any]) -> None:
    """The time of products cut in several ways, each over many copies of the matrix."""
    ops = cuda.CudaOps()
    original = operators.Tiles.of
    found = out["tune"] = []
    for size, shapes in MATRICES.items():
        for num_out, num_in in shapes:
            num = max(1, -(-400_000_000 // (num_out * num_in * 2)))
            weights = [torch.randn(num_out, num_in, device=DEVICE, dtype=torch.bfloat16) for _ in range(num)]
            floor = weights[0].nbytes / out["bandwidth"]["best"]
            best = []
            for outs, ins, splits, warps, stages in variants(num_out, num_in):
                steps = -(-num_in // ins)
                tiles = operators.Tiles(outs, ins, splits, -(-steps // splits) * ins, warps, stages)
                _TILES.of = lambda *_, tiles=tiles: tiles
                try:
                    times = []
                    for rows in (1, 8):
                        x = torch.randn(rows, num_in, device=DEVICE).bfloat16()
                        times.append(seconds(captured(partial(_all, ops, x, weights)), 7) / num)
                except Exception as error:
                    found.append({"shape": (num_out, num_in), "tiles": repr(tiles), "error": repr(error)[:200]})
                    continue
                best.append((times[0], times[1], (outs, ins, splits, warps, stages)))
            best.sort(key=lambda t: t[0] + t[1])
            found.append({"size": size, "shape": (num_out, num_in), "floor_us": floor * 1e6,
                          "best": [(round(a * 1e6, 2), round(b * 1e6, 2), t) for a, b, t in best]})  # fmt: skip
            print("tune", num_out, num_in, "floor", round(floor * 1e6, 1), found[-1]["best"][:4], flush=True)
    _TILES.of = original


def wide(out: dict[str, Any]) -> None:
    """Products of 64 rows cut in several ways: their times, and whether a row has the bits that it has alone."""
    ops = cuda.CudaOps()
    cut = cuda.CudaOps.cut
    found = out["wide"] = []
    for num_out, num_in in MATRICES["1b"][:4] + MATRICES["8b"][2:4]:
        num = max(1, -(-300_000_000 // (num_out * num_in * 2)))
        weights = [torch.randn(num_out, num_in, device=DEVICE, dtype=torch.bfloat16) for _ in range(num)]
        x = torch.randn(64, num_in, device=DEVICE).bfloat16()
        cuda.CudaOps.cut = staticmethod(cut)  # type: ignore[method-assign]
        alone = torch.cat([ops.product(x[i : i + 1], weights[0]).sums for i in range(64)], 1)
        for own in ((16, 64), (64, 64)):
            cuda.CudaOps.cut = staticmethod(lambda num, outs, own=own: own)  # type: ignore[method-assign]
            try:
                same = torch.equal(ops.product(x, weights[0]).sums, alone)
                took = seconds(captured(partial(_all, ops, x, weights)), 7) / num
                found.append({"shape": (num_out, num_in), "cut": own, "same": same, "us": took * 1e6})
            except Exception as error:
                found.append({"shape": (num_out, num_in), "cut": own, "error": repr(error)[:200]})
            print("wide", found[-1], flush=True)
    cuda.CudaOps.cut = staticmethod(cut)  # type: ignore[method-assign]


def variants(num_out: int, num_in: int) -> list[tuple[int, int, int, int, int]]:
    """Ways to cut a matrix: outs, ins, splits, warps, stages."""
    found = []
    for outs, ins, warps, stages in (
        (16, 128, 4, 4), (16, 256, 4, 4), (32, 128, 4, 4), (32, 128, 4, 6), (32, 256, 4, 3),
        (64, 64, 4, 5), (64, 128, 4, 4), (64, 128, 8, 4), (128, 64, 4, 4),
    ):  # fmt: skip
        for splits in (1, 2, 4, 8):
            programs = -(-num_out // outs) * splits
            if num_in // ins // splits >= 2 and (200 <= programs <= 1600 or (num_out > 65536 and splits == 1)):
                found.append((outs, ins, splits, warps, stages))
    return found


def random_model(spec: Spec, dtype: torch.dtype = torch.bfloat16) -> Any:
    weights = empty_weights(spec, dtype, DEVICE)
    for name, weight in weights.items():
        weight.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.02)
    return load_model(spec, weights, cuda.make(), device="cuda")


def random_codes(spec: Spec, quantization: str) -> Any:
    """A model of random codes and scales."""
    wanted = Quantization.parse(quantization)
    weights: dict[str, Any] = {}
    for weight in blocks.weights(spec):
        if not is_rounded(weight):
            weights[weight.name] = torch.ones(weight.shape, dtype=torch.bfloat16, device=DEVICE)
            continue
        scheme = scheme_for(weight, wanted)
        num_out, num_in = weight.shape
        shape = num_out, num_in // scheme.group

        def rows(num_out: int = num_out, num_in: int = num_in, shape: Any = shape, scheme: Any = scheme) -> Any:
            codes = np.random.default_rng(0).integers(0, 1 << scheme.bits, (num_out, num_in), np.uint8)
            zeros = np.full(shape, 128 if scheme.bits == 8 else 7, np.uint8)
            scales = HostTensor.of(np.full(shape, 1e-3, np.float32)).to("bfloat16")
            yield QuantisedRows(scheme, codes, scales, zeros)

        weights[weight.name] = QuantisedMatrix(scheme, (num_out, num_in), rows)
    return load_model(spec, weights, cuda.make(), device="cuda")


def codes(out: dict[str, Any]) -> None:
    """Products of 4 and 8 bits: parity with what the codes stand for, and equal bits of a row."""
    ops = cuda.CudaOps()
    found = out["codes"] = []
    for bits, group in ((8, 128), (8, 32), (4, 128), (4, 32)):
        for num_out, num_in in ((3072, 2048), (2048, 8192), (1000, 384)):
            rows = quantise(torch.randn(num_out, num_in).numpy(), scheme_of(bits, group))
            matrix = Packed.of(QuantisedMatrix(rows.scheme, (num_out, num_in), partial(iter, [rows])), DEVICE)
            x = torch.randn(100, num_in, device=DEVICE)
            whole = ops.linear(x, matrix)
            exact = x.bfloat16().double() @ tensor_of(rows.dequantise(), DEVICE).double().T
            differ = _differ(ops, x, matrix, whole, (1, 2, 8, 16, 17, 33, 64, 65))
            error = float((whole.double() - exact).norm() / exact.norm())
            found.append({"bits": bits, "group": group, "shape": (num_out, num_in), "error": error, "differ": differ})
            print(found[-1], flush=True)


def pair(out: dict[str, Any]) -> None:
    """The shipped pair, its target widened: speculation over plain decoding, one request and 64 at once."""
    from forerun.bench.widen import load_widened, measured_target
    from forerun.config import EngineConfig
    from forerun.engine.opened import SHIPPED_DRAFT, SHIPPED_TARGET
    from forerun.text.terminal import make_console

    lines = (SHIPPED_TARGET.parent / "prompts.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"][:160] for line in lines[:64]]
    found = out["pair"] = {}
    config = EngineConfig(target=str(SHIPPED_TARGET), device="cuda", max_seq_len=512)
    for shape in ("llama-3.2-1b", "llama-3.2-3b"):
        checkpoint = load_widened(measured_target(config, shape), shape, make_console())
        for draft, more in (
            ("none", {}),
            (f"model:path={SHIPPED_DRAFT}", {"pacing": "fixed", "spec_length": 5}),
            (f"model:path={SHIPPED_DRAFT}", {"pacing": "fixed", "spec_length": 8}),
            (f"model:path={SHIPPED_DRAFT}", {"pacing": "auto"}),
        ):
            name = f"{shape} {draft.split(':')[0]} {more}"
            try:
                llm = LLM(checkpoint, draft=draft, device="cuda", max_batch_size=64, max_seq_len=512, **more)
                llm.measure_passes()
                own = found[name] = {}
                for kind, temperature in (("greedy", 0.0), ("T=1", 1.0)):
                    params = SamplingParams(max_tokens=96, temperature=temperature, ignore_eos=True)
                    for text in texts[:8]:
                        llm.generate([text], params)
                    start, num = time.perf_counter(), 0
                    for text in texts[:8]:
                        num += sum(len(output.token_ids) for output in llm.generate([text], params))
                    own[kind] = num / (time.perf_counter() - start)
                params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
                for _ in range(3):
                    llm.generate(texts, params)
                start = time.perf_counter()
                num = sum(len(output.token_ids) for output in llm.generate(texts, params))
                own["64 at once"] = num / (time.perf_counter() - start)
                print(name, own, flush=True)
            except Exception as error:
                found[name] = {"failed": "".join(traceback.format_exception(error))[-1500:]}
                print(name, "FAILED", found[name]["failed"][-900:], flush=True)
        torch.cuda.empty_cache()


def coded_passes(out: dict[str, Any]) -> None:
    """The same with weights of 8 and 4 bits."""
    for quantization in ("int8:group=128", "int4:group=128"):
        for name in ("llama-3.2-1b", "qwen3-8b"):
            _passes(out, f"{name} {quantization}", random_codes(SHAPES[name], quantization), (1, 4, 8, 16, 64))


def passes(out: dict[str, Any]) -> None:
    """The time of a pass of some rows behind 512 tokens, on the device and on the clock."""
    for name, spec in SHAPES.items():
        _passes(out, name, random_model(spec), ROWS)


def _passes(out: dict[str, Any], name: str, model: Any, rows_of: tuple[int, ...]) -> None:
    found = out.setdefault("passes", {})
    cache = BlockCache.of(model, "paged", max_batch_size=66, max_seq_len=1024)
    runner = Runner(model, cache)
    cache.open(0)
    behind = 8 if IS_REHEARSED else 512
    with torch.inference_mode():
        runner.forward([Run(0, list(range(behind)), "none")])
    cache.keep({0: range(behind)})
    num_bytes = model.bytes_per_pass
    for rows in rows_of:
        run = Run(0, list(range(rows)), "all", None, True)
        for _ in range(NUM_WARM):
            runner.forward([run])
        wall_s = _wall_s(runner, [run])
        graphs = [g for key, g in model._graphs.items() if key[0] == "best" and key[1] == rows]
        graphs += [g for key, g in model._graphs.items() if key[0] not in ("best", "ahead") and key[0].rows == rows]
        device = [seconds(g.replay) for g in graphs]
        found[f"{name} {rows}"] = {
            "device_ms": sum(device) * 1e3,
            "parts_ms": [d * 1e3 for d in device],
            "wall_ms": wall_s * 1e3,
            "outside_ms": (wall_s - sum(device)) * 1e3,
            "bytes": num_bytes,
            "share": num_bytes / sum(device) / out["bandwidth"]["best"] if device else None,
        }
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in found[f"{name} {rows}"].items()}
        print(name, rows, shown, flush=True)
    many(name, runner, cache, out)
    torch.cuda.empty_cache()


def _wall_s(runner: Runner, runs: list[Run]) -> float:
    """The median time of a pass on the clock."""
    walls = []
    for _ in range(NUM_TIMED):
        start = time.perf_counter()
        runner.forward(runs)
        walls.append(time.perf_counter() - start)
    return statistics.median(walls)


def many(name: str, runner: Runner, cache: BlockCache, out: dict[str, Any]) -> None:
    """A pass of 64 sequences of 128 tokens, each with one row."""
    for slot in range(1, NUM_SEQUENCES + 1):
        cache.open(slot)
        runner.forward([Run(slot, list(range(NUM_PROMPT)), "none")])
        cache.keep({slot: range(NUM_PROMPT)})
    runs = [Run(slot, [slot], "all", None, True) for slot in range(1, NUM_SEQUENCES + 1)]
    out["passes"][f"{name} 64 sequences"] = {"wall_ms": _wall_s(runner, runs) * 1e3}
    print(name, "64 sequences", out["passes"][f"{name} 64 sequences"], flush=True)


def parity(out: dict[str, Any]) -> None:
    """Logits of the shipped model against the torch backend on the same card, in float32."""
    from forerun.engine.opened import SHIPPED_TARGET
    from forerun.models.loading import load_checkpoint

    found = out["parity"] = {}
    texts = [list(range(3, 3 + n)) for n in (5, 40, 200)]
    for dtype in ("float32", "bfloat16"):
        rows = []
        for ops in (cuda.make(), ReferenceOps()):
            model = load_checkpoint(SHIPPED_TARGET, dtype=dtype, device="cuda", ops=ops).model
            cache = BlockCache.of(model, "paged", max_batch_size=4, max_seq_len=256)
            runner = Runner(model, cache)
            for slot in range(3):
                cache.open(slot)
            scores = runner.forward([Run(slot, text, "all") for slot, text in enumerate(texts)])
            rows.append(torch.from_numpy(np.concatenate(scores.logits)))
        found[dtype] = float((rows[0].double() - rows[1].double()).norm() / rows[1].double().norm())


def engine(out: dict[str, Any]) -> None:
    """Speculation against plain decoding, token by token, with every drafter that can be built without files."""
    from forerun import drafters
    from forerun.engine.opened import SHIPPED_TARGET
    from forerun.registry import names

    lines = (Path(drafters.__file__).parents[1] / "data" / "prompts.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"][:200] for line in lines[:100]]
    kinds = {
        "greedy": SamplingParams(max_tokens=48, temperature=0),
        "seeded": SamplingParams(max_tokens=32, temperature=1.0, seed=5),
    }
    found = out["engine"] = {}
    plain: dict[str, list[list[int]]] = {}
    limit = time.monotonic() + 240
    for draft in ["none", *(name for name in names(drafters.__name__) if name != "none")]:
        if time.monotonic() > limit:
            found[draft] = "no time was left"
            continue
        try:
            options: dict[str, Any] = {} if draft == "none" else {"pacing": "fixed"}
            llm = LLM(SHIPPED_TARGET, draft=draft, device="cuda", max_batch_size=16, max_seq_len=512, **options)
        except Exception as error:
            found[draft] = f"{type(error).__name__}: {error}"[:300]
            continue
        try:
            own = found[draft] = {"ops": llm.checkpoint.model.ops.name}
            for kind, params in kinds.items():
                start = time.perf_counter()
                ids = [o.token_ids for o in llm.generate(texts if kind == "greedy" else texts[:32], params)]
                own[f"{kind}_s"] = time.perf_counter() - start
                if draft == "none":
                    plain[kind] = ids
                    (one,) = llm.generate([texts[0]], params)
                    own[f"{kind}_alone_differs"] = one.token_ids != ids[0]
                else:
                    own[f"{kind}_differ"] = sum(a != b for a, b in zip(ids, plain[kind], strict=True))
            print(draft, own, flush=True)
        except Exception as error:
            found[draft] = {"failed": "".join(traceback.format_exception(error))[-1500:]}
            print(draft, "FAILED", repr(error)[:300], flush=True)


def experts(out: dict[str, Any]) -> None:
    """Passes of models with experts, of a quarter of the layers: Qwen3 30B-A3B and gpt-oss 20B."""
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    small |= {"head_dim": 16, "vocab_size": 300, "intermediate_size": 32, "moe_intermediate_size": 32}
    for name, config in EXPERTS.items():
        spec = read_config(
            config | ({key: value for key, value in small.items() if key in config} if IS_REHEARSED else {})
        )
        _passes(out, name, random_model(spec), (1, 2) if IS_REHEARSED else (1, 2, 8, 32, 64))


def tests(out: dict[str, Any]) -> None:
    """The tests of the kernels, on this card."""
    files = sorted(map(str, Path("tests/ops").glob("test_cuda*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(("src", "tests", os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    out["tests"] = {"rc": done.returncode, "said": done.stdout[-3000:] + done.stderr[-2000:]}
    print("tests", done.returncode, done.stdout[-1500:], flush=True)


SECONDS = 540  # within which parts begin that were not asked for by name
PARTS: dict[str, Callable[[dict[str, Any]], None]] = {
    part.__name__: part
    for part in (draws, pair, tests, passes, experts, coded_passes, engine, torch_passes, transformers_loops)
}
NAMED: dict[str, Callable[[dict[str, Any]], None]] = {
    part.__name__: part for part in (products, codes, parity, wide, tune)
}
REHEARSED = ("draws", "passes", "experts", "torch_passes", "transformers_loops")


def main(folder: str, *chosen: str) -> None:
    """Run the parts, all where none is named."""
    torch.manual_seed(0)
    began = time.monotonic()
    card = "none: a rehearsal on a CPU" if IS_REHEARSED else torch.cuda.get_device_name()
    out: dict[str, Any] = {"card": card, "torch": torch.__version__, "ops": cuda.make().build, "seconds": {}}
    with torch.inference_mode():
        out["bandwidth"] = bandwidth()
        torch.cuda.empty_cache()
        out["bandwidth"]["best"] = max(out["bandwidth"].values())
        print({k: round(v / 1e9) for k, v in out["bandwidth"].items()}, flush=True)
        for name in chosen or (REHEARSED if IS_REHEARSED else PARTS):
            if not chosen and time.monotonic() - began > SECONDS:
                out.setdefault("left", []).append(name)
                continue
            part = (PARTS | NAMED)[name]
            start = time.perf_counter()
            try:
                with torch.inference_mode(name not in ("engine", "pair")):
                    part(out)
            except Exception as error:
                out.setdefault("failed", {})[name] = "".join(traceback.format_exception(error))[-3000:]
                print(name, "FAILED", "".join(traceback.format_exception(error))[-1800:], flush=True)
            out["seconds"][name] = time.perf_counter() - start
            Path(folder, "gpu.json").write_text(json.dumps(out, indent=1, default=str))
    print(out["seconds"], out.get("products"), out.get("parity"), "left:", out.get("left"), flush=True)
    if out.get("failed"):
        sys.exit(f"failed: {', '.join(out['failed'])}")


if __name__ == "__main__":
    main(*sys.argv[1:])
