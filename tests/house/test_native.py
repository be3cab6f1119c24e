"""The native extension exists, matches its sources and its stub; kernels are chosen; builds without it work.

Every new process gets a copy of the package in front of its path, where something is to be missing.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from forerun import native
from forerun.errors import BadOption
from refusals import refusal

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "forerun"
NEEDS_EXTENSION = pytest.mark.skipif(
    native.extension() is None and os.environ.get("FORERUN_REQUIRE_NATIVE") != "1", reason=str(native.why_not())
)


def run(code: str, *arguments: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own, without variables of ours but those given."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FORERUN_", "OMP_", "PYTHONPATH"))}
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    command = [sys.executable, "-c", code, *arguments]
    where = {"cwd": path, "env": {**kept, "PYTHONPATH": str(path or SOURCE.parent), **env}}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **where)


def printed(code: str, path: Path | None = None, **env: str) -> str:
    done = run(code, path=path, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------------------ the extension


@NEEDS_EXTENSION
def test_the_extension_is_there_and_made_of_these_sources() -> None:
    assert native.why_not() is None, native.why_not()


@NEEDS_EXTENSION
def test_its_stub_says_what_it_has(tmp_path: Path) -> None:
    pytest.importorskip("nanobind", reason="nanobind writes the stub")
    stub = tmp_path / "_native.pyi"
    for command in (["nanobind.stubgen", "-q", "-m", "forerun._native", "-o"], ["ruff", "format", "-q"]):
        subprocess.run([sys.executable, "-m", *command, str(stub)], check=True, cwd=ROOT)
    assert stub.read_text(encoding="utf-8") == (SOURCE / "_native.pyi").read_text(encoding="utf-8"), "run make native"


def test_the_hash_of_the_sources_sees_names_and_contents(tmp_path: Path) -> None:
    folder = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", folder)
    original = native.source_hash(folder)
    assert original == native.source_hash(ROOT / "csrc")
    (folder / "notes.txt").write_text("no source", encoding="utf-8")
    assert native.source_hash(folder) == original
    (folder / "cpu.h").rename(folder / "gpu.h")
    renamed = native.source_hash(folder)
    with (folder / "isa" / "baseline.cpp").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert len({original, renamed, native.source_hash(folder)}) == 3


@NEEDS_EXTENSION
def test_the_extension_says_which_instruction_sets_it_has() -> None:
    known, names = native.known_isas(), native.processor_isas()
    assert list(known)[-1] == names[-1], "portable kernels run everywhere"
    assert list(known.values())[-1] == ""
    assert [name for name in known if name in names] == names, "best first"
    if platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists():
        return
    assert sorted(known) == sorted(path.stem for path in (ROOT / "csrc" / "isa").glob("*.cpp"))
    flags = re.findall(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)[0]
    has = set(flags.replace("_", "").split())
    for name, needs in known.items():
        assert (name in names) == (set(needs.split()) <= has)


@NEEDS_EXTENSION
def test_the_bandwidth_probe_reads_in_several_ways() -> None:
    probe = native.extension().BandwidthProbe(num_bytes=(9 << 20) + 5, num_threads=2)
    assert probe.num_bytes == 8 << 20
    readings = probe.read(num_repeats=3)
    assert len(dict(readings)) == len(readings) >= 4
    assert all(len(values) == 3 and min(values) > 0 for _, values in readings)
    assert "4 MiB" in refusal(ValueError, native.extension().BandwidthProbe, 1, 1)


# ---------------------------------------------------------------------------------------------------- instruction sets

ISA = "from forerun import native; print(native.isa())"


@pytest.mark.parametrize("isa", [*native.known_isas(), "reference"])
def test_forerun_isa_chooses(isa: str) -> None:
    done = run(ISA, FORERUN_ISA=isa)
    if isa in native.available_isas():
        assert (done.stdout, done.stderr) == (f"{isa}\n", "")
    else:
        assert f"FORERUN_ISA={isa!r} is not possible here" in done.stderr


@NEEDS_EXTENSION
def test_where_portable_kernels_alone_were_compiled_torch_computes() -> None:
    code = "from forerun import native; native.known_isas = lambda: {'baseline': ''}; print(native.isa())"
    assert printed(code) == "reference"
    assert printed(code, FORERUN_ISA="baseline") == "baseline"


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_ISA", "avx9")
    native.isa.cache_clear()
    try:
        with pytest.raises(BadOption, match=r"FORERUN_ISA='avx9' is not possible here: it must be one of .*reference"):
            native.isa()
    finally:
        monkeypatch.undo()
        native.isa.cache_clear()


def test_the_best_is_the_default_and_variables_of_ours_are_no_engine_options() -> None:
    assert printed(ISA) == native.available_isas()[0]
    code = "from forerun.config import EngineConfig; print(EngineConfig.from_sources({}).max_batch_size)"
    assert printed(code, **dict.fromkeys(native.VARIABLES, "1")) == "8"
    assert "did you mean 'FORERUN_NUM_THREADS'?" in run(code, FORERUN_NUM_THREAD="2").stderr


# ------------------------------------------------------------------------------------------------------------- threads


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


LIMITS = {"outer/cpu.max": "150000 100000\n", "outer/inner/cpu.max": "max 100000\n"}
OUTER = {"proc/self/cgroup": "0::/outer/inner\n", **{f"sys/fs/cgroup/{name}": text for name, text in LIMITS.items()}}
VERSION_1 = {"proc/self/cgroup": "4:cpuset:/a\n2:cpu,cpuacct:/a\n0::/\n"}
for group, quota_us in {"cpu": "-1", "cpu/a": "300000"}.items():
    VERSION_1[f"sys/fs/cgroup/{group}/cpu.cfs_quota_us"] = f"{quota_us}\n"
    VERSION_1[f"sys/fs/cgroup/{group}/cpu.cfs_period_us"] = "100000\n"
QUOTAS = {
    "version 2, the outer group decides": (OUTER, 1.5),
    "version 2 in a container": ({"proc/self/cgroup": "0::/x\n", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
    "version 1": (VERSION_1, 3.0),
    "none": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
    "no such files": ({}, None),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_the_quota_of_the_control_groups(tmp_path: Path, case: str) -> None:
    files, quota = QUOTAS[case]
    assert native.cores(write(tmp_path, files)).quota == quota


def test_siblings_on_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)
    }
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 4, 5}, raising=False)
    found = native.cores(write(tmp_path, topology))
    assert (found.num_allowed, found.num_physical, found.num_usable) == (5, 3, 3)
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000"})
    assert native.cores(tmp_path).num_usable == 2
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "10000 100000"})
    assert native.cores(tmp_path).num_usable == 1


def test_variables_decide_on_threads_before_cores_do(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = native.cores().num_usable
    asked = [("3", "7", 3), (None, "7", 7), (None, "5,2", 5), (None, "many", usable), (None, None, usable)]
    for ours, theirs, num_threads in asked:
        for name, value in (("FORERUN_NUM_THREADS", ours), ("OMP_NUM_THREADS", theirs)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        assert native.num_threads() == num_threads
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for wrong in ("0", "-1", "two", "", "99999", "1000"):
        monkeypatch.setenv("FORERUN_NUM_THREADS", wrong)
        with pytest.raises(BadOption, match=r"FORERUN_NUM_THREADS='.*' is not possible: it must be in 1 \.\. 256 on "):
            native.num_threads()


# ------------------------------------------------------------------------------------------------ without an extension

WHY_NOT = "from forerun import native; print(native.extension(), native.isa(), native.why_not(), sep='; ')"


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with what the package needs to be imported, and no extension."""
    shutil.copytree(SOURCE, tmp_path / "forerun", ignore=shutil.ignore_patterns("data", "__pycache__", "*.so", "*.pyd"))
    return tmp_path


def as_checkout(bare: Path) -> Path:
    """The same with the sources of the extension where a checkout has them; the new place of the package."""
    source = bare / "checkout" / "src"
    shutil.copytree(ROOT / "csrc", source.parent / "csrc")
    source.mkdir()
    (bare / "forerun").rename(source / "forerun")
    return source


def test_a_package_without_the_extension_says_how_to_get_it(bare: Path) -> None:
    said = printed(WHY_NOT, path=bare)
    assert said.startswith("None; reference; the extension was not built when forerun was installed: ")
    assert said.endswith("--no-deps --no-cache-dir . in the folder of forerun's sources")
    assert "install a C++ compiler (g++)" in printed(WHY_NOT, path=bare, PATH="/nowhere")
    refused = run(ISA, path=bare, FORERUN_ISA="avx2").stderr
    assert "FORERUN_ISA='avx2' is not possible here (the extension was not built" in refused


def test_a_checkout_names_its_own_command(bare: Path) -> None:
    assert printed(WHY_NOT, path=as_checkout(bare)).endswith("-m pip install -e . in the checkout")


def test_an_extension_for_another_python_is_named(bare: Path) -> None:
    (bare / "forerun" / "_native.cpython-39-x86_64-linux-gnu.so").write_bytes(b"")
    said = printed(WHY_NOT, path=bare)
    assert "the extension was built for another Python (_native.cpython-39-x86_64-linux-gnu.so) than this one" in said


def test_an_extension_that_cannot_be_loaded_is_no_extension(bare: Path) -> None:
    (bare / "forerun" / f"_native{native.EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    assert printed(WHY_NOT, path=bare).startswith("None; reference; the extension cannot be loaded (")


@NEEDS_EXTENSION
def test_a_stale_extension_is_noticed(bare: Path) -> None:
    source = as_checkout(bare)
    shutil.copy(native.extension().__file__, source / "forerun")
    assert printed(WHY_NOT, path=source).endswith("; None")
    write(source.parent, {"csrc/new.h": "// newer\n"})
    said = printed(WHY_NOT, path=source)
    assert "the extension was built from other C++ sources than those in csrc: run " in said


# ----------------------------------------------------------------------------------------------------------- packaging

BUILD = "import sys; from scikit_build_core import build; print(build.build_{}(sys.argv[1]))"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as it is packaged, with small files in the place of the models' weights."""
    pytest.importorskip("scikit_build_core", reason="it builds the packages")
    root = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, root)
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for folder in ("csrc", "src"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for path in SOURCE.rglob("*.safetensors"):
        (root / path.relative_to(ROOT)).write_bytes(b"weights")
    return root


def build(kind: str, project: Path, out: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a hook of the build backend, with a C++ compiler that always fails."""
    return run(BUILD.format(kind), str(out), path=project, CXX=str(shutil.which("false")), **env)


def package_files() -> set[str]:
    """What of src/ belongs into every package."""
    found = (p for p in SOURCE.rglob("*") if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".so")
    return {path.relative_to(SOURCE.parent).as_posix() for path in found}


def test_a_wheel_without_a_compiler_is_the_package_without_the_extension(project: Path, tmp_path: Path) -> None:
    """For those who ask for that: torch computes then."""
    done = build("wheel", project, tmp_path, FORERUN_REQUIRE_NATIVE="0")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in files if name.startswith("forerun/")} == package_files()
    assert any(name.endswith("licenses/LICENSE") for name in files)


def test_an_editable_install_without_a_compiler_is_one_folder_on_the_path(project: Path, tmp_path: Path) -> None:
    done = build("editable", project, tmp_path, FORERUN_REQUIRE_NATIVE="0")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (path_file,) = (name for name in archive.namelist() if name.endswith(".pth"))
        assert str(project / "src") in archive.read(path_file).decode().splitlines()
        (hook,) = (name for name in archive.namelist() if name.endswith(".py"))
        assert "\ninstall({}, {}, {}, []," in archive.read(hook).decode()  # it knows no module, so it redirects none


@pytest.mark.parametrize("variables", [{}, {"FORERUN_REQUIRE_NATIVE": "1"}], ids=["by itself", "asked for"])
def test_without_a_compiler_it_says_what_to_install(
    project: Path, tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORERUN_REQUIRE_NATIVE", raising=False)
    done = build("wheel", project, tmp_path, **variables)
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "apt-get install g++ python3-dev" in said
    assert "FORERUN_REQUIRE_NATIVE=0 installs forerun without kernels" in said
    assert not list(tmp_path.glob("*.whl"))


def test_the_source_package_holds_the_kernels(project: Path, tmp_path: Path) -> None:
    done = build("sdist", project, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    csrc = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert csrc | {f"src/{name}" for name in package_files()} <= names
    assert not [name for name in names if name.endswith(".so") or name.startswith("build/")]


@NEEDS_EXTENSION
def test_the_model_says_what_its_methods_do() -> None:
    model = native.extension().Model
    methods = [name for name in dir(model) if not name.startswith("_") and callable(getattr(model, name))]
    assert methods == ["argmax", "features", "forward", "logits", "norm", "remember", "run_ahead"]
    for name in methods:
        signature, _, text = getattr(model, name).__doc__.partition("\n\n")
        assert "arg0" not in signature
        assert text
