"""The team of threads: no data race between passes, a thread that fails, threads that the system does not give.

Data races cannot be seen from Python, so csrc/pool.cpp and team.cpp are compiled here, with ThreadSanitizer if there is
one.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ops.native_cases import needs_native, runs_native

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)

# 200 threads in an address space for a dozen, because each thread needs a stack.
FEW_THREADS = """
import resource
import numpy as np
from forerun.errors import CapacityError
from forerun.host_tensor import HostTensor
from forerun.ops.cpu import CpuOps

random = np.random.default_rng(0)
weights, x = HostTensor.of(random.random((64, 64), np.float32)), random.random((4, 64), np.float32)
expected, ops = (CpuOps(num_threads=1), CpuOps())
expected, packed = expected.linear(x, expected.pack(weights)), ops.pack(weights)
limits = resource.getrlimit(resource.RLIMIT_AS)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), limits[1]))
for _ in range(3):
    try:
        ops.linear(x, packed)
    except CapacityError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_AS, limits)
print(np.array_equal(ops.linear(x, packed), expected))
"""


@dataclass(frozen=True)
class Driver:
    """team.cpp as a program."""

    path: Path
    finds_races: bool

    def run(self, what: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.path, what], capture_output=True, text=True, timeout=120, check=False)


def compile_driver(path: Path, *flags: str) -> bool:
    """Return whether the compiled program runs."""
    assert COMPILER is not None
    sources = [HERE / "team.cpp", CSRC / "pool.cpp", CSRC / "process.cpp"]
    command = [COMPILER, "-std=c++17", "-O1", "-g", "-pthread", *flags, *map(str, sources), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode == 0 and subprocess.run([path, "nothing"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    path = tmp_path_factory.mktemp("team") / "team"
    if COMPILER is None:
        pytest.skip("no C++ compiler here")
    if compile_driver(path, "-fsanitize=thread"):
        return Driver(path, finds_races=True)
    assert compile_driver(path)
    return Driver(path, finds_races=False)


def test_passes_alone_and_together_take_turns_without_a_data_race(driver: Driver) -> None:
    done = driver.run("turns")
    assert done.returncode == 0, done.stderr[:2000]
    assert int(done.stdout) == 4000 * 3 * 5
    if not driver.finds_races:
        pytest.skip(f"{COMPILER} has no ThreadSanitizer that runs here")


def test_a_thread_that_comes_late_holds_nothing_up(driver: Driver) -> None:
    """It comes when the tiles of all stages are done; a team that waits for its threads would wait for ever."""
    done = driver.run("late")
    assert (done.returncode, done.stderr[:2000]) == (0, "")
    assert int(done.stdout) == 2000 * 3 * 5


def test_an_exception_on_any_thread_ends_the_pass_and_the_next_one_runs(driver: Driver) -> None:
    done = driver.run("fail")
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr[:2000]


@needs_native
@runs_native
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the address space in use is read from /proc")
def test_threads_that_cannot_be_started_are_refused_and_may_be_had_later() -> None:
    env = {**os.environ, "FORERUN_NUM_THREADS": "200", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FEW_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    *said, works = done.stdout.splitlines()
    assert (len(said), works, done.stderr) == (3, "True", "")
    started = r"only (\d+) of 200 threads for the native kernels could be started \(.+\)"
    for line in said:
        found = re.fullmatch(rf"{started}: set FORERUN_NUM_THREADS to (\d+) or less", line)
        assert found, line
        assert 1 <= int(found[1]) == int(found[2]) < 200
