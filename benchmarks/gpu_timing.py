"""How the GPU benchmarks time a device, and the shapes that they time.

Where torch sees no CUDA device they are rehearsed: the same code runs on the CPU under Triton's interpreter, on tiny
shapes, and its times mean nothing.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from forerun.blocks import Plain, Rope, Spec

IS_REHEARSED = not torch.cuda.is_available()
if IS_REHEARSED:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
DEVICE = torch.device("cpu" if IS_REHEARSED else "cuda")
_EVENT: Any = torch.cuda.Event
_STREAM: Any = torch.cuda.Stream
LLAMA = {"rope": Rope(500000.0), "norm_eps": 1e-5, "max_positions": 8192, "tied": True}
_SHAPES: dict[str, Spec] = {
    "llama-3.2-1b": Plain("llama", 128256, 2048, 16, 32, 8, 64, 8192, **LLAMA).spec,  # type: ignore[arg-type]
    "llama-3.2-3b": Plain("llama", 128256, 3072, 28, 24, 8, 128, 8192, **LLAMA).spec,  # type: ignore[arg-type]
    "qwen3-8b": Plain("qwen3", 151936, 4096, 36, 32, 8, 128, 12288, 1e-6, 8192, Rope(1e6), qk_norm=True).spec,
}
_TINY = {name: Plain("llama", 300, 32, 1, 2, 1, 16, 64, 1e-5, 1024, tied=True).spec for name in _SHAPES}
SHAPES = _TINY if IS_REHEARSED else _SHAPES


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """The median time of a run on the device."""
    if IS_REHEARSED:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
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


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """The same as a graph."""
    if IS_REHEARSED:
        return lambda: (run(), None)[1]
    stream = _STREAM()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def bandwidth() -> dict[str, float]:
    """Bytes per second of a copy, bytes read and written, and of reading, over 4 GB."""
    a = torch.empty(1 << (20 if IS_REHEARSED else 30), dtype=torch.float32, device=DEVICE).fill_(0.5)
    b = torch.empty_like(a)
    matrix, x = a.view(-1, 8192), torch.ones(8192, device=DEVICE)
    return {
        "copy": 2 * a.nbytes / seconds(lambda: b.copy_(a), 10),
        "read": a.nbytes / seconds(matrix.sum, 10),
        "matrix_vector": a.nbytes / seconds(lambda: torch.mv(matrix, x), 10),
    }
