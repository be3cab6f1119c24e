"""The CUDA backend's kernels compile for cards that are not there, and fit them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.cuda_compiling import SHARED_BYTES
from ops.test_cuda import needs_triton

KERNELS = {
    *(f"kernels.{name}" for name in (
        "product", "product_of_codes", "summed", "added", "heads_of", "attended", "parts_joined", "activated",
        "written", "largest_in_parts", "largest_of_parts", "advanced",
    )),
    *(f"expert_kernels.{name}" for name in (
        "routed", "grouped", "product_of_experts", "product_of_experts_codes", "experts_added",
    )),
    *(f"sampling_kernels.{name}" for name in (
        "searched", "counted", "cut_by_number", "cut_by_mass", "goal_of_mass", "weighed", "drawn_in_parts", "drawn",
    )),
}  # fmt: skip
TESTS = Path(__file__).parents[1]


@needs_triton
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_kernels_compile_for_a_card_and_fit_it(capability: int, tmp_path: Path) -> None:
    """A kernel that asks for more shared memory than a program may have fails on the card alone."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join((str(TESTS), env.get("PYTHONPATH", ""))), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", "ops.cuda_compiling", str(capability)]
    done = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert not KERNELS - set(told)
    for name, kinds in told.items():
        for kind in kinds:
            assert kind["shared"] <= SHARED_BYTES[capability], (name, kind)
            if name.startswith("sampling_kernels."):
                assert kind["fused"] == 0, (name, kind)  # the host rounds twice there
                assert kind.get("stack", 0) == 0, (name, kind)
