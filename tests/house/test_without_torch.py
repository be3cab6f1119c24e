"""Where torch is not installed everything runs that needs none, and what needs it says so in one sentence.

This file is also a program: a new process, which is told that there is no torch, does all of it and prints what came.
"""

import contextlib
import importlib
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
from importlib import metadata
from types import ModuleType
from typing import Any, cast

import pytest

import forerun
from forerun import LLM, SamplingParams, native
from forerun.bench import bandwidth
from forerun.errors import CPU_BUILDS, BadOption, has_card, pip_for
from forerun.ops.cpu import CpuOps
from forerun.text import waiting

NEEDS_KERNELS = pytest.mark.skipif(native.isa() == "reference", reason="without torch the kernels compute")
# What computes with torch, or reads what it has written.
OPERATORS = ("ops.torch", "ops.cuda", "ops.reference", "ops.row_by_row")
MAY_NEED_TORCH = (*OPERATORS, "train.", "functional", "drafters.shared.converting", "models.toy_heads")
GENERATE = ["generate", "class A:", "--target", "shipped", "--max-tokens", "8", "--json"]
RUN = {"generate": GENERATE, "plan": ["plan", "--target", "shipped", "--json"], "doctor": ["doctor", "--json"]}
LISTED = ["train", "heads"]
TRAIN = ["train", "head", "--method", "medusa", "--target", "shipped", "--samples", "own.ids", "--out", "head"]
REFUSED = {
    "train": (TRAIN, "torch"),
    "convert-head": (["convert-head", "head", "converted"], "torch"),
    "a CUDA device": ([*GENERATE, "--device", "cuda"], "cuda"),
    "reference operators": ([*GENERATE, "--ops", "reference"], "torch"),
    "reference operators, row by row": ([*GENERATE, "--ops", "reference_row_by_row"], "torch"),
}


# ------------------------------------------------------------------------------------------- in a process without torch


def hide_torch() -> None:
    """Make `import torch` fail, and its version unknown, as where it is not installed."""
    version = metadata.version

    def known_version(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    sys.modules["torch"] = None  # type: ignore[assignment]  # the import system's own way to say that there is none
    metadata.version = known_version


def import_all() -> dict[str, str | None]:
    """Import every module of the package. Returns the library that is missing for each that cannot be imported."""
    missing: dict[str, str | None] = {}
    for module in pkgutil.walk_packages(forerun.__path__, "forerun.", onerror=lambda _: None):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing[module.name] = error.name
        except BadOption as error:
            missing[module.name] = str(error)
    return missing


def greedy_ids() -> list[int]:
    """Return what the shipped model writes, with its own draft model."""
    (out,) = LLM("shipped").generate("class A:", SamplingParams(max_tokens=24, temperature=0))
    return out.token_ids


def run(arguments: list[str]) -> tuple[int, str, str]:
    """Run a command in this process. Returns its exit code, and what it wrote to both streams."""
    from forerun.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(arguments)
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("a command ends its process")


def answer() -> dict[str, Any]:
    """Do everything without torch, and return what came of it."""
    hide_torch()
    waiting.SILENT_S = 1e6  # no line of a wait, however busy the machine is
    has_kernels = native.isa() != "reference"
    return {
        "missing": import_all(),
        "ids": greedy_ids() if has_kernels else None,
        "run": {name: run(arguments) for name, arguments in RUN.items() if has_kernels},
        "listed": run(LISTED),
        "refused": {name: run(arguments) for name, (arguments, _) in REFUSED.items()},
        "loaded": [name for name, module in sys.modules.items() if name.partition(".")[0] == "torch" and module],
    }


# ------------------------------------------------------------------------------------------------- where torch may be


def python(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False, **more
    )


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the process without torch has to say."""
    folder = tmp_path_factory.mktemp("without")
    done = python(__file__, cwd=folder, env=os.environ | {"FORERUN_CACHE_DIR": str(folder)})
    assert done.returncode == 0, done.stderr
    answered: dict[str, Any] = json.loads(done.stdout)
    return answered


def test_modules_are_imported_without_torch(without: dict[str, Any]) -> None:
    """Some want other libraries that are extras."""
    halted = [name for name, missing in without["missing"].items() if "torch" in str(missing)]
    assert [name for name in halted if not name.removeprefix("forerun.").startswith(MAY_NEED_TORCH)] == []
    assert "forerun.ops.torch" in halted  # so it was hidden
    assert without["loaded"] == []


@NEEDS_KERNELS
def test_ids_are_those_that_come_with_torch(without: dict[str, Any]) -> None:
    assert without["ids"] == greedy_ids()


@NEEDS_KERNELS
@pytest.mark.parametrize("name", RUN)
def test_a_command_runs(without: dict[str, Any], name: str) -> None:
    code, out, err = without["run"][name]
    assert code == 0, err
    assert json.loads(out)


def test_heads_that_can_be_trained_are_listed(without: dict[str, Any]) -> None:
    code, out, err = without["listed"]
    assert code == 0, err
    assert {"eagle", "medusa"} < {line.split()[0] for line in out.splitlines() if line[:1].strip()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_torch_says_in_one_sentence_how_to_get_it(without: dict[str, Any], name: str) -> None:
    code, out, err = without["refused"][name]
    assert (code, out, err.count("\n")) == (2, "", 1)
    if name == "a CUDA device" and not has_card():
        assert err.endswith("it needs an NVIDIA card, which is not here; use --device 'cpu'\n")
        return
    assert err.endswith(f"{pip_for(REFUSED[name][1])}\n")
    assert "install 'torch>=" in err


def test_functional_says_how_to_get_what_it_needs(without: dict[str, Any]) -> None:
    assert without["missing"]["forerun.functional"].endswith(pip_for("hf"))
    assert re.search(r"install 'torch>=\S+' 'transformers>=", pip_for("hf"))


def test_torch_comes_from_builds_for_the_cpu_where_there_is_no_card() -> None:
    """They are gigabytes smaller. Those of the extra `cuda` are for a card, wherever it is."""
    assert (CPU_BUILDS in pip_for("torch")) == (CPU_BUILDS in pip_for("hf")) == (not has_card())
    assert CPU_BUILDS not in pip_for("cuda")


def test_a_step_does_not_wait_for_a_torch_that_another_thread_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is among the modules long before it has its functions."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    with CpuOps.alone(cast(CpuOps, None)):
        pass


def test_the_speed_of_memory_is_measured_where_nothing_else_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "extension", lambda: None)
    monkeypatch.setattr(native, "torch_version", lambda: None)
    assert bandwidth.Probes("cpu").read().bytes_per_s > 1e6


def test_portable_kernels_compute_where_there_is_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORERUN_ISA", raising=False)
    monkeypatch.setattr(native, "known_isas", lambda: {"baseline": ""})
    monkeypatch.setattr(native, "available_isas", lambda: ["baseline", "reference"])
    monkeypatch.setattr(native, "why_not", lambda: None)
    for version, isa in ((None, "baseline"), ("2.13.0", "reference")):
        monkeypatch.setattr(native, "torch_version", lambda version=version: version)
        assert native.isa.__wrapped__() == isa
    assert native.why_reference().endswith("FORERUN_ISA=baseline switches on")


WITH_TORCH = """
import sys
from forerun import errors
errors.has_card = bool  # there is none
from forerun.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    print("torch" in sys.modules)
"""


@NEEDS_KERNELS
def test_a_text_on_a_cpu_does_not_wait_for_torch() -> None:
    arguments = [argument for argument in GENERATE if argument != "--json"]  # with a line about what computes
    done = python("-c", WITH_TORCH, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False\n"), done.stdout
    assert "native operators" in done.stderr


if __name__ == "__main__":
    print(json.dumps(answer()))
