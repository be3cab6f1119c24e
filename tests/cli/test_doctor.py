"""`forerun doctor`: on this machine, with and without the extension, and what it advises where."""

import dataclasses
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import processes
from cli.conftest import said
from forerun import native
from forerun.bench.bandwidth import Bandwidth
from forerun.cli import doctor
from forerun.cli.doctor import Facts, Operators, Torch

SOURCE = Path(__file__).parents[2] / "src" / "forerun"
LABELS = ["forerun", "processor", "cores", "instruction sets", "operators", "torch", "memory", "bandwidth"]
SENTENCES = "what would make it faster"


def test_the_object_says_what_is_here(cli: Any) -> None:
    done = cli("doctor", "--json", FORERUN_NUM_THREADS="1", code=0)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["python"] == platform.python_version()
    assert found["processor"].endswith(f"({platform.machine()})")
    assert found["cores"]["num_allowed"] <= found["cores"]["num_logical"] == os.cpu_count()
    assert found["operators"]["available_isas"] == native.available_isas()
    assert found["operators"]["num_threads"] == 1
    gpu = found["torch"]["gpu"] is not None
    assert (found["torch"]["version"], gpu) == (torch.__version__, torch.cuda.is_available())
    if sys.platform == "linux":  # the files of a process are in /proc
        shipped = {path.name for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*")}
        assert shipped <= set(found["torch"]["openmp"])
    assert found["variables"]["FORERUN_NUM_THREADS"] == "1"
    speed = found["bandwidth"]["bytes_per_s"]
    assert 1e8 < speed < 1e13
    assert found["example"]["max_tokens_per_s"] == pytest.approx(speed / 2_471_628_800)
    if found["cores"]["num_usable"] > 1:
        assert any(sentence.startswith("FORERUN_NUM_THREADS=1 leaves ") for sentence in found["faster"])


def test_the_lines_fit_into_a_terminal_of_80_columns(process: Any) -> None:
    done = process("doctor", FORERUN_ISA="reference")
    assert (done.returncode, said(done.stderr)) == (0, "")
    table, _, advice = done.stdout.partition(f"\n{SENTENCES}\n")
    assert [line[:18].strip() for line in table.splitlines() if line[0] != " " and not line.startswith("GPU")] == LABELS
    assert all(len(line) <= 80 and line == line.rstrip() for line in done.stdout.splitlines())
    assert "dtype auto is float32" in table
    assert ("FORERUN_ISA=reference keeps" in advice) == (native.extension() is not None)


def test_an_instruction_set_that_cannot_be_had_is_refused_at_once(process: Any) -> None:
    done = process("doctor", FORERUN_ISA="avx9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: FORERUN_ISA='avx9' is not possible here")


def test_it_works_without_the_extension(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("data", "__pycache__", "*.so", "*.pyd")
    shutil.copytree(SOURCE, tmp_path / "forerun", ignore=ignored)
    env = {k: v for k, v in os.environ.items() if not k.startswith("FORERUN_")} | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "forerun", "doctor", "--json"]
    done = processes.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, said(done.stderr)) == (0, "")
    found = json.loads(done.stdout)
    assert found["operators"]["backend"] == "torch"
    assert found["operators"]["default_dtype"] == "float32"
    assert found["bandwidth"]["bytes_per_s"] > 1e8
    assert found["faster"][0].startswith("The extension was not built when forerun was installed: ")
    assert found["faster"][0].endswith("--no-deps --no-cache-dir . in the folder of forerun's sources.")


# ------------------------------------------------------------------------------------------------------------- advice

HEALTHY = Facts(
    version="1",
    python="3.11",
    processor="a processor",
    processor_isas=["avx2", "baseline"],
    cores=native.Cores(num_logical=8, num_allowed=8, num_physical=4, quota=None),
    load_average=0.5,
    operators=Operators("native", "avx2", ["avx2", "baseline", "reference"], None, 4, "bfloat16"),
    torch=Torch("2", 4, ["libgomp.so.1"]),
    available_bytes=1 << 34,
    huge_pages="madvise",
    bandwidth=Bandwidth(5e10, "a probe"),
    variables={},
)


def changed(part: str | None = None, **fields: Any) -> list[str]:
    """What is advised where some of the facts, or of one part of them, are others."""
    if part is not None:
        fields = {part: dataclasses.replace(getattr(HEALTHY, part), **fields)}
    return list(doctor.advice(dataclasses.replace(HEALTHY, **fields)))


def test_a_healthy_machine_gets_no_advice() -> None:
    assert changed() == []
    assert changed(load_average=None) == []
    assert changed(huge_pages=None) == []
    assert changed("cores", quota=6.0) == []


def test_a_card_says_who_computes_on_it() -> None:
    """A card that only torch can use says why, with what to do."""
    for problem, expected in (
        (None, "with own kernels (docs/use/gpu.md)"),
        ("needs Triton", "torch's operators alone, since ops='cuda' needs Triton"),
    ):
        card = doctor.Card("A card", "9.0", 80 * 10**9, 79 * 10**9, problem)
        facts = dataclasses.replace(HEALTHY, torch=dataclasses.replace(HEALTHY.torch, gpu=card))
        (line,) = [text for label, text in doctor._lines(facts) if label == "GPU"]
        assert line.startswith("A card, compute capability 9.0, 79.0 GB of 80.0 GB free; --device cuda computes on it")
        assert expected in line
        assert doctor.as_dict(facts)["torch"]["gpu"]["capability"] == "9.0"


CASES = {
    "stale": (("operators", {"problem": "the extension is old: run this"}), "The extension is old: run this."),
    "isa": (("operators", {"isa": "baseline"}), "FORERUN_ISA=baseline keeps the avx2 kernels from running: unset it."),
    "quota": (("cores", {"quota": 2.5}), "A control group grants the time of 2.5 of 4 cores: raise its CPU limit."),
    "affinity": (
        ("cores", {"num_allowed": 7}),
        "This process may run on 7 of 8 logical processors: widen its affinity (taskset, cpuset).",
    ),
    "load": ((None, {"load_average": 8.1}), "Other processes are busy (load average 8.1 on 8 logical processors)"),
    "pages": ((None, {"huge_pages": "never"}), "Transparent huge pages are off"),
    "openmp": (
        ("torch", {"openmp": ["libgomp.so.1", "libiomp5.so"]}),
        "2 OpenMP runtimes are loaded (libgomp.so.1, libiomp5.so)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_fault_has_one_sentence(case: str) -> None:
    (part, fields), sentence = CASES[case]
    (found,) = changed(part, **fields)
    assert found.startswith(sentence)
    assert found.endswith(".")


@pytest.mark.parametrize(
    ("variables", "num_threads", "sentences"),
    [
        (
            {"OMP_NUM_THREADS": "1"},
            1,
            ["OMP_NUM_THREADS=1 leaves 3 of 4 cores idle: unset it, or set FORERUN_NUM_THREADS=4."],
        ),
        ({"FORERUN_NUM_THREADS": "3"}, 3, ["FORERUN_NUM_THREADS=3 leaves 1 of 4 cores idle: unset it."]),
        ({"FORERUN_NUM_THREADS": "9"}, 9, ["FORERUN_NUM_THREADS=9 makes 9 threads share 4 cores: set it to 4."]),
        ({"FORERUN_NUM_THREADS": "4", "OMP_NUM_THREADS": "1"}, 4, []),
        ({"OMP_NUM_THREADS": "nonsense"}, 4, []),
    ],
)
def test_threads_that_a_variable_takes_or_adds(
    variables: dict[str, str], num_threads: int, sentences: list[str]
) -> None:
    operators = dataclasses.replace(HEALTHY.operators, num_threads=num_threads)
    assert changed(variables=variables, operators=operators) == sentences


def test_openmp_runtimes_are_told_by_file() -> None:
    maps = """\
7f00-7f01 r--p 00000000 08:01 10    /venv/torch/lib/libgomp.so.1
7f01-7f02 r-xp 00001000 08:01 10    /venv/torch/lib/libgomp.so.1
7f02-7f03 r--p 00000000 08:01 11    /venv/scikit_learn.libs/libgomp-a34b3233.so.1.0.0
7f03-7f04 r--p 00000000 08:01 12    /opt/a folder/libiomp5.so
7f04-7f05 r--p 00000000 08:01 13    /usr/lib/libompi_opal.so
7f05-7f06 rw-p 00000000 00:00 0
"""
    assert doctor.openmp_runtimes(maps) == ["libgomp-a34b3233.so.1.0.0", "libgomp.so.1", "libiomp5.so"]
