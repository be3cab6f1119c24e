"""What the CUDA backend does on a card: parity, bits, bandwidth, the time of a pass, and of the engine's steps.

    python -m benchmarks.gpu FOLDER [PART ...]      writes FOLDER/gpu.json, and prints a short table

Each part runs by itself; one that fails says so and the others run. Times are medians, and every share of bandwidth is
over what was measured in the same run.
"""

# ruff: noqa: B023, PERF401 (what is timed runs at once, inside of the loop that it stands in)

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun import LLM, SamplingParams, blocks
from forerun.blocks import Plain, Rope, Spec
from forerun.config import Quantization
from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, Runner
from forerun.ops import cuda, load_model
from forerun.ops.cuda_packed import Packed
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows
from forerun.ops.quantising import is_rounded, quantise, scheme_for, scheme_of
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import Projections, empty_weights

DEVICE = torch.device("cuda")
_EVENT: Any = torch.cuda.Event
_STREAM: Any = torch.cuda.Stream
_TILES: Any = cuda.Tiles
LLAMA = {"rope": Rope(500000.0), "norm_eps": 1e-5, "max_positions": 8192, "tied": True}
SHAPES: dict[str, Spec] = {
    "llama-3.2-1b": Plain("llama", 128256, 2048, 16, 32, 8, 64, 8192, **LLAMA).spec,  # type: ignore[arg-type]
    "llama-3.2-3b": Plain("llama", 128256, 3072, 28, 24, 8, 128, 8192, **LLAMA).spec,  # type: ignore[arg-type]
    "qwen3-8b": Plain("qwen3", 151936, 4096, 36, 32, 8, 128, 12288, 1e-6, 8192, Rope(1e6), qk_norm=True).spec,
}
ROWS = (1, 2, 4, 8, 16, 32, 64)
MATRICES = {
    "1b": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)],
    "8b": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
}


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """The median time of a run on the device."""
    for _ in range(3):
        run()
    found = list[float]()
    for _ in range(repeats):
        start, end = (_EVENT(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


def _all(ops: cuda.CudaOps, x: Tensor, weights: list[Tensor]) -> list[cuda.Parts]:
    return [ops.product(x, weight) for weight in weights]


def _one(rows: QuantisedRows) -> Iterator[QuantisedRows]:
    yield rows


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """The same as a graph."""
    stream = _STREAM()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def torch_passes(out: dict[str, Any]) -> None:
    """The same shapes as a plain loop of torch's operators in a CUDA graph: one row behind 512 tokens, and 8."""
    found = out["torch_passes"] = {}
    for name, spec in SHAPES.items():
        weights = empty_weights(spec, torch.bfloat16, DEVICE)
        for weight in weights.values():
            weight.normal_(0.0, 0.02)
        a, mlp, h = spec.blocks[0].attention, spec.blocks[0].mlp, spec.hidden_size
        assert a is not None
        assert mlp is not None
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        layers = [
            [
                Projections.of(weights, [f"model.layers.{i}.{name}" for name in names]).joined
                or (weights[f"model.layers.{i}.{names[0]}.weight"], None)
                for names in (
                    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                    ["self_attn.o_proj"],
                    ["mlp.gate_proj", "mlp.up_proj"],
                    ["mlp.down_proj"],
                )
            ]
            for i in range(spec.num_layers)
        ]
        head = weights["model.embed_tokens.weight" if spec.tied else "lm_head.weight"]
        ones = torch.ones(h, device=DEVICE, dtype=torch.bfloat16)
        for rows in (1, 8):
            x0 = torch.randn(rows, h, device=DEVICE).bfloat16()
            keys, values = (
                torch.randn(1, a.kv_heads, 512 + rows, a.head_dim, device=DEVICE).bfloat16() for _ in range(2)
            )

            def run(x: Tensor = x0, keys: Tensor = keys, values: Tensor = values, rows: int = rows) -> Tensor:
                for qkv, o, up, down in layers:
                    y = F.linear(F.rms_norm(x, (h,), ones, 1e-5), qkv[0])
                    query = y[:, :q].view(1, rows, a.heads, a.head_dim).transpose(1, 2)
                    keys[0, :, 512:] = y[:, q : q + kv].view(rows, a.kv_heads, a.head_dim).transpose(0, 1)
                    values[0, :, 512:] = y[:, q + kv :].view(rows, a.kv_heads, a.head_dim).transpose(0, 1)
                    seen = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
                    x = x + F.linear(seen.transpose(1, 2).reshape(rows, q), o[0])
                    gate, inner = F.linear(F.rms_norm(x, (h,), ones, 1e-5), up[0]).chunk(2, -1)
                    x = x + F.linear(F.silu(gate) * inner, down[0])
                return F.linear(F.rms_norm(x, (h,), ones, 1e-5), head).argmax(-1)

            found[f"{name} {rows}"] = {"device_ms": seconds(captured(run)) * 1e3}
            print("torch", name, rows, found[f"{name} {rows}"], flush=True)
        torch.cuda.empty_cache()


def bandwidth() -> dict[str, float]:
    """Bytes per second of a copy, bytes read and written, and of reading, over 4 GB."""
    a = torch.empty(1 << 30, dtype=torch.float32, device=DEVICE).fill_(0.5)
    b = torch.empty_like(a)
    matrix, x = a.view(-1, 8192), torch.ones(8192, device=DEVICE)
    return {
        "copy": 2 * a.nbytes / seconds(lambda: b.copy_(a), 10),
        "read": a.nbytes / seconds(matrix.sum, 10),
        "matrix_vector": a.nbytes / seconds(lambda: torch.mv(matrix, x), 10),
    }


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
            differ = []
            for num in (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 65, 100):
                for first in {0, 5, 100 - num}:
                    if first + num <= 100 and not torch.equal(
                        ops.linear(x[first : first + num], w), whole[first : first + num]
                    ):
                        differ.append((num, first))
            error = float((whole.double() - exact).norm() / exact.norm())
            found.append({"dtype": str(dtype), "shape": (num_out, num_in), "error": error, "differ": differ})


def tune(out: dict[str, Any]) -> None:
    """The time of products cut in several ways, each over many copies of the matrix."""
    ops = cuda.CudaOps()
    original = cuda.Tiles.of
    found = out["tune"] = []
    for size, shapes in MATRICES.items():
        for num_out, num_in in shapes:
            num = max(1, -(-400_000_000 // (num_out * num_in * 2)))
            weights = [torch.randn(num_out, num_in, device=DEVICE, dtype=torch.bfloat16) for _ in range(num)]
            floor = weights[0].nbytes / out["bandwidth"]["best"]
            best = []
            for outs, ins, splits, warps, stages in variants(num_out, num_in):
                steps = -(-num_in // ins)
                tiles = cuda.Tiles(outs, ins, splits, -(-steps // splits) * ins, warps, stages)
                _TILES.of = lambda *_, tiles=tiles: tiles
                try:
                    times = []
                    for rows in (1, 8):
                        x = torch.randn(rows, num_in, device=DEVICE).bfloat16()
                        replay = captured(partial(_all, ops, x, weights))
                        times.append(seconds(replay, 7) / num)
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
    return load_model(spec, weights, cuda.make())


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
            codes = torch.randint(0, 1 << scheme.bits, (num_out, num_in), dtype=torch.uint8, device=DEVICE)
            zeros = torch.full(shape, 128 if scheme.bits == 8 else 7, dtype=torch.uint8, device=DEVICE)
            yield QuantisedRows(scheme, codes, torch.full(shape, 1e-3, dtype=torch.bfloat16, device=DEVICE), zeros)

        weights[weight.name] = QuantisedMatrix(scheme, (num_out, num_in), rows)
    return load_model(spec, weights, cuda.make())


def codes(out: dict[str, Any]) -> None:
    """Products of 4 and 8 bits: parity with what the codes stand for, and equal bits of a row."""
    ops = cuda.CudaOps()
    found = out["codes"] = []
    for bits, group in ((8, 128), (8, 32), (4, 128), (4, 32)):
        for num_out, num_in in ((3072, 2048), (2048, 8192), (1000, 384)):
            rows = quantise(torch.randn(num_out, num_in, device=DEVICE), scheme_of(bits, group))
            matrix = Packed.of(QuantisedMatrix(rows.scheme, (num_out, num_in), partial(_one, rows)), DEVICE)
            x = torch.randn(100, num_in, device=DEVICE)
            whole = ops.linear(x, matrix)
            exact = x.bfloat16().double() @ rows.dequantise().bfloat16().double().T
            differ = []
            for num in (1, 2, 8, 16, 17, 33, 64, 65):
                for first in {0, 5, 100 - num}:
                    own = ops.linear(x[first : first + num], matrix)
                    if first + num <= 100 and not torch.equal(own, whole[first : first + num]):
                        differ.append((num, first))
            error = float((whole.double() - exact).norm() / exact.norm())
            found.append({"bits": bits, "group": group, "shape": (num_out, num_in), "error": error, "differ": differ})
            print(found[-1], flush=True)


def pair(out: dict[str, Any]) -> None:
    """The shipped pair, its target widened: speculation over plain decoding, one request and 64 at once."""
    from forerun.bench.widen import load_widened
    from forerun.config import EngineConfig
    from forerun.engine.factory import SHIPPED_DRAFT, SHIPPED_TARGET
    from forerun.text.terminal import make_console

    lines = (SHIPPED_TARGET.parent / "prompts.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"][:160] for line in lines[:64]]
    found = out["pair"] = {}
    config = EngineConfig(target=str(SHIPPED_TARGET), device="cuda", max_seq_len=512)
    for shape in ("llama-3.2-1b", "llama-3.2-3b"):
        checkpoint = load_widened(config, shape, make_console())
        for draft, more in (
            ("none", {}),
            (f"model:path={SHIPPED_DRAFT}", {"pacing": "fixed", "spec_length": 5}),
            (f"model:path={SHIPPED_DRAFT}", {"pacing": "fixed", "spec_length": 8}),
            (f"model:path={SHIPPED_DRAFT}", {"pacing": "auto"}),
        ):
            name = f"{shape} {draft.split(':')[0]} {more}"
            try:
                llm = LLM(checkpoint, draft=draft, device="cuda", max_batch_size=64, max_seq_len=512, **more)
                own = found[name] = {}
                for kind, temperature in (("greedy", 0.0), ("T=1", 1.0)):
                    params = SamplingParams(max_tokens=96, temperature=temperature, ignore_eos=True)
                    for text in texts[:8]:
                        llm.generate([text], params)
                    start, num = time.perf_counter(), 0
                    for text in texts[:8]:
                        num += sum(len(o.token_ids) for o in _outputs(llm.generate([text], params)))
                    own[kind] = num / (time.perf_counter() - start)
                params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
                for _ in range(3):
                    llm.generate(texts, params)
                start = time.perf_counter()
                num = sum(len(o.token_ids) for o in _outputs(llm.generate(texts, params)))
                own["64 at once"] = num / (time.perf_counter() - start)
                print(name, own, flush=True)
            except Exception as error:
                found[name] = {"failed": "".join(traceback.format_exception(error))[-1500:]}
                print(name, "FAILED", found[name]["failed"][-900:], flush=True)
        torch.cuda.empty_cache()


def _outputs(results: Any) -> list[Any]:
    return [own for result in results for own in (result.outputs if hasattr(result, "outputs") else [result])]


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
    spec = model.config
    cache = BlockCache.create(
        spec.cache_shape, "paged", max_batch_size=66, max_seq_len=1024, dtype=model.cache_dtype, device=DEVICE
    )
    runner = Runner(model, cache)
    cache.open(0)
    with torch.inference_mode():
        runner.forward([Run(0, list(range(512)), "none")])
    cache.keep({0: range(512)})
    num_bytes = model.bytes_per_pass
    for rows in rows_of:
        run = Run(0, list(range(rows)), "all", None, True)
        for _ in range(3):
            runner.forward([run])
        walls = []
        for _ in range(20):
            start = time.perf_counter()
            runner.forward([run])
            walls.append(time.perf_counter() - start)
        graphs = [g for key, g in model._graphs.items() if key[0] == "best" and key[1] == rows]
        graphs += [g for key, g in model._graphs.items() if key[0] not in ("best", "ahead") and key[0].rows == rows]
        device = [seconds(g.replay) for g in graphs]
        found[f"{name} {rows}"] = {
            "device_ms": sum(device) * 1e3,
            "parts_ms": [d * 1e3 for d in device],
            "wall_ms": statistics.median(walls) * 1e3,
            "outside_ms": (statistics.median(walls) - sum(device)) * 1e3,
            "bytes": num_bytes,
            "share": num_bytes / sum(device) / out["bandwidth"]["best"],
        }
        print(
            name,
            rows,
            {k: round(v, 3) if isinstance(v, float) else v for k, v in found[f"{name} {rows}"].items()},
            flush=True,
        )
    many(name, runner, cache, out)
    torch.cuda.empty_cache()


def many(name: str, runner: Runner, cache: BlockCache, out: dict[str, Any]) -> None:
    """A pass of 64 sequences of 128 tokens, each with one row."""
    for slot in range(1, 65):
        cache.open(slot)
        runner.forward([Run(slot, list(range(128)), "none")])
        cache.keep({slot: range(128)})
    runs = [Run(slot, [slot], "all", None, True) for slot in range(1, 65)]
    walls = []
    for _ in range(15):
        start = time.perf_counter()
        runner.forward(runs)
        walls.append(time.perf_counter() - start)
    out["passes"][f"{name} 64 sequences"] = {"wall_ms": statistics.median(walls) * 1e3}
    print(name, "64 sequences", out["passes"][f"{name} 64 sequences"], flush=True)


def parity(out: dict[str, Any]) -> None:
    """Logits of the shipped model against the torch backend on the same card, in float32."""
    from forerun.engine.factory import SHIPPED_TARGET
    from forerun.models.loading import load_checkpoint

    found = out["parity"] = {}
    texts = [list(range(3, 3 + n)) for n in (5, 40, 200)]
    for dtype in ("float32", "bfloat16"):
        rows = []
        for ops in (cuda.make(), ReferenceOps()):
            model = load_checkpoint(SHIPPED_TARGET, dtype=dtype, device="cuda", ops=ops).model
            cache = BlockCache.create(
                model.config.cache_shape, "paged", max_batch_size=4, max_seq_len=256, dtype=model.cache_dtype,
                device=DEVICE,
            )  # fmt: skip
            runner = Runner(model, cache)
            for slot in range(3):
                cache.open(slot)
            scores = runner.forward([Run(slot, text, "all") for slot, text in enumerate(texts)])
            rows.append(torch.cat(scores.logits))
        found[dtype] = float((rows[0].double() - rows[1].double()).norm() / rows[1].double().norm())


def engine(out: dict[str, Any]) -> None:
    """Speculation against plain decoding, token by token, with every drafter that can be built without files."""
    from forerun import drafters
    from forerun.engine.factory import SHIPPED_TARGET
    from forerun.registry import names

    lines = (Path(drafters.__file__).parents[1] / "data" / "prompts.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"][:200] for line in lines[:100]]
    kinds = {
        "greedy": SamplingParams(max_tokens=48, temperature=0),
        "seeded": SamplingParams(max_tokens=32, temperature=1.0, seed=5),
    }
    found = out["engine"] = {}
    plain: dict[str, list[list[int]]] = {}
    ones: dict[str, list[int]] = {}
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
                results = llm.generate(texts if kind == "greedy" else texts[:32], params)
                ids = [list(r.outputs[0].token_ids) if hasattr(r, "outputs") else list(r.token_ids) for r in results]
                own[f"{kind}_s"] = time.perf_counter() - start
                if draft == "none":
                    plain[kind] = ids
                    one = llm.generate([texts[0]], params)[0]
                    ones[kind] = list(one.outputs[0].token_ids) if hasattr(one, "outputs") else list(one.token_ids)
                    own[f"{kind}_alone_differs"] = ones[kind] != ids[0]
                else:
                    own[f"{kind}_differ"] = sum(a != b for a, b in zip(ids, plain[kind], strict=True))
            print(draft, own, flush=True)
        except Exception as error:
            found[draft] = {"failed": "".join(traceback.format_exception(error))[-1500:]}
            print(draft, "FAILED", repr(error)[:300], flush=True)


PARTS: dict[str, Callable[[dict[str, Any]], None]] = {
    part.__name__: part
    for part in (products, codes, parity, passes, coded_passes, torch_passes, pair, engine, wide, tune)
}


def main(folder: str, *chosen: str) -> None:
    """Run the parts, all where none is named."""
    torch.manual_seed(0)
    out: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "seconds": {}}
    with torch.inference_mode():
        out["bandwidth"] = bandwidth()
        torch.cuda.empty_cache()
        out["bandwidth"]["best"] = max(out["bandwidth"].values())
        print({k: round(v / 1e9) for k, v in out["bandwidth"].items()}, flush=True)
        for name in chosen or PARTS:
            start = time.perf_counter()
            try:
                if name in ("engine", "pair"):
                    with torch.inference_mode(False):
                        PARTS[name](out)
                else:
                    PARTS[name](out)
            except Exception as error:
                out.setdefault("failed", {})[name] = "".join(traceback.format_exception(error))[-3000:]
                print(name, "FAILED", "".join(traceback.format_exception(error))[-1800:], flush=True)
            out["seconds"][name] = time.perf_counter() - start
            Path(folder, "gpu.json").write_text(json.dumps(out, indent=1, default=str))
    print(out["seconds"], out.get("products"), out.get("parity"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
