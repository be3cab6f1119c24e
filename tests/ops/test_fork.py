"""A forked child computes the same bits as its parent, whatever the parent's threads do meanwhile (forking.py)."""

import os
import sys
from pathlib import Path

import pytest

import processes
from ops.native_cases import needs_native, runs_native

TESTS = Path(__file__).parents[1]
TWO_THREADS = {"FORERUN_NUM_THREADS": "2", "OMP_NUM_THREADS": "1"}


@needs_native
@runs_native
@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.parametrize("what", ["idle", "busy", "llm"])
def test_a_forked_child_computes_the_same_and_ends(what: str) -> None:
    env = {**os.environ, **TWO_THREADS, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent / 'src'}"}
    command = [sys.executable, "-m", "ops.forking", what]
    done = processes.run(command, capture_output=True, text=True, timeout=120, cwd=TESTS, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
