"""The GPU benchmark is rehearsed where there is no card, so that a session on one does not find its mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ops.test_cuda import needs_triton

ROOT = Path(__file__).parents[2]


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here: run the benchmark itself")
def test_a_rehearsal_runs_and_draws_what_the_host_draws(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", str(tmp_path)]
    command += ["draws", "experts", "torch_passes"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert told["card"] == "none: a rehearsal on a CPU"
    rows = [own for own in told["draws"].values() if isinstance(own, dict)]
    assert len(rows) == 8
    assert not any(own["differ"] for own in rows)
    assert {"gpt-oss-20b, 6 of 24 layers 1", "llama-3.2-1b 8"} <= {*told["passes"], *told["torch_passes"]}
