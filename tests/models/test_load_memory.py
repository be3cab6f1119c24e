"""How much memory loading takes, measured by the kernel in a process of its own: hardly more than the model itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forerun.models.layers import DecoderConfig, parameter_shapes
from forerun.models.saving import save_checkpoint
from forerun.models.weights import BLOCK_BYTES

SOURCE = Path(__file__).parents[2] / "src"
MAX_RATIO = 1.25
SLACK_BYTES = 24 << 20  # what no size of the model changes: pages of the allocator, code that is run for the first time

# Of few layers and with a large vocabulary, so that one tensor and one layer are large shares of the whole.
SIZES = {"vocab_size": 40_000, "hidden_size": 1024, "num_layers": 4, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64}
LAYOUTS = {
    "tied, in one file that holds the head too": (True, 1 << 40),
    "untied, in shards": (False, 64 << 20),
}

CHILD = """
import json, sys
from forerun.models.loading import load_checkpoint

def status():
    lines = [line.split(":") for line in open("/proc/self/status")]
    return {key: 1024 * int(value.split()[0]) for key, value in lines if key.startswith(("Vm", "Rss"))}

folder, small, dtype = sys.argv[1:]
load_checkpoint(small, dtype=dtype)
before = status()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak counts from here
model = load_checkpoint(folder, dtype=dtype).model
peak = status()["VmHWM"]
total = sum(float(weight.sum()) for weight in model.weights.values())  # touches every weight
after = status()
storages = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in model.weights.values()}
print(json.dumps({
    "weights": sum(w.numel() * w.element_size() for w in model.weights.values()),
    "storages": sum(storages.values()),
    "peak": peak - before["VmRSS"],
    "held": after["VmRSS"] - before["VmRSS"],
    "held_of_files": after["RssFile"] - before["RssFile"],
    "one_head": model._head.data_ptr() == model._embedding.data_ptr(),
    "dtype": str(model.dtype),
}))
"""


def random_checkpoint(folder: Path, sizes: dict[str, int], *, tied: bool, shard_bytes: int) -> Path:
    """Some 300 MB of bfloat16 in files; a tied head is stored beside the embedding.

    The weights repeat a block of random numbers: drawing them all would take longer than all the rest.
    """
    config = DecoderConfig("llama", **sizes, ffn_size=6144, norm_eps=1e-5, max_positions=64, tie_embeddings=tied)
    block = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = {}
    for name, shape in parameter_shapes(config).items():
        num = torch.Size(shape).numel()
        weights[name] = block.repeat(num // len(block) + 1)[:num].view(shape)
    save_checkpoint(folder, config, weights, shard_bytes=shard_bytes)
    if tied:
        head = weights["model.embed_tokens.weight"].clone()
        save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sized")
    made = {
        name: random_checkpoint(root / name, SIZES, tied=tied, shard_bytes=shard)
        for name, (tied, shard) in LAYOUTS.items()
    }
    tiny = SIZES | {"vocab_size": 64, "num_layers": 1}
    return made | {"tiny": random_checkpoint(root / "tiny", tiny, tied=True, shard_bytes=1 << 40)}


def load_in_child(folder: Path, small: Path, dtype: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(small), dtype],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_peak_is_the_model_itself(folders: dict[str, Path], layout: str, dtype: str) -> None:
    seen = load_in_child(folders[layout], folders["tiny"], dtype)
    size = seen["weights"]
    print(f"\n{layout}, {dtype}: {size / 1e6:.0f} MB, peak {seen['peak'] / size:.3f}, held {seen['held'] / size:.3f}")
    assert seen["dtype"] == f"torch.{dtype}"
    assert size > 150e6
    assert seen["peak"] <= MAX_RATIO * size + SLACK_BYTES
    assert seen["peak"] <= size + 2 * BLOCK_BYTES  # two blocks of the files, however large a tensor is
    # Nothing is held twice, nor as pages of the files, and what is counted here is really there.
    assert seen["storages"] == size
    assert size - SLACK_BYTES <= seen["held"] <= size + SLACK_BYTES
    assert seen["held_of_files"] <= SLACK_BYTES
    assert seen["one_head"] == layout.startswith("tied")
