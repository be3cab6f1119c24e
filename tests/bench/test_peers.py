"""`forerun bench peers`: a real peer in a process of its own, what becomes of absent and dead ones, and the numbers."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import signal
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.bench import peers, widen
from forerun.bench.peer_process import WORKER, Outcome, PeerError, PeerProcess, Question
from forerun.bench.peer_results import Divergence, best_of, lines_of
from forerun.bench.peers import PeersPlan, measure, open_own, run, widened
from forerun.config import EngineConfig
from forerun.engine.opening import SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.errors import BadOption
from forerun.models.widening import WideShape
from tiny import write_tiny

NEAR_TIE = 0.25  # of logits around 15 in bfloat16, whose steps are 1/16 there


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment without any package."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def question(work: Path) -> Question:
    return Question(SHIPPED_TARGET, SHIPPED_DRAFT, work, num_threads=1, spec_lengths=(3,), lookup_max_n=3)


# ------------------------------------------------------------------------------------------------- the whole command


def test_the_command_without_peers(
    bare_python: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every peer that is absent is named with the commands that would bring it; what is left is measured."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    plan = PeersPlan(
        shape="none",
        folder=tmp_path,
        spec_lengths=(2, 3),
        num_prompts=2,
        max_tokens=8,
        num_repeats=2,
        pythons={"transformers": bare_python, "openvino": bare_python},
    )
    run(EngineConfig(), plan)
    printed = capsys.readouterr().out.splitlines()
    heads = ("target: 20,191,744 parameters", "ceiling: ", "engine ")
    starts = [next(i for i, line in enumerate(printed) if line.startswith(head)) for head in heads]
    assert starts == sorted(starts)
    record = json.loads(printed[-1])
    for name, module in (("transformers", "torch"), ("openvino", "openvino_genai")):
        assert f"{name} is left out: " in "\n".join(printed)
        sentence = record["left_out"][name]
        assert f"has no {module}; make an environment with `python3 -m venv peer-{name} && " in sentence
        assert f"peer-{name}/bin/pip install torch==" in sentence
        assert sentence.endswith(f"add --{name}-python peer-{name}/bin/python")
    names = ["plain", "lookup K=2", "lookup K=3", "draft K=2", "draft K=3"]
    assert [(line["engine"], line["configuration"]) for line in record["lines"]] == [("forerun", n) for n in names]
    assert all(line["num_runs"] == 4 and line["tokens_per_s"] > 0 for line in record["lines"])
    assert [1.0, 1.0] in [line["ratio_range"] for line in record["lines"]]  # the best one over itself


# ------------------------------------------------------------------------------------------------------- a real peer


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerProcess]:
    """transformers on the shipped pair."""
    process = PeerProcess("transformers", Path(sys.executable), question(tmp_path_factory.mktemp("work")))
    yield process
    process.close()


def test_a_peer_takes_turns_fails_goes_on_and_dies(peer: PeerProcess, tmp_path: Path) -> None:
    """In one test, in this order: the last step ends the process."""
    own, _ = open_own(EngineConfig(dtype="bfloat16"), PeersPlan(shape="none", spec_lengths=(3,)), tmp_path, 1)
    prompts = [own.encode("def fib(n):\n    if n"), own.encode("class Stack:\n    def __init__(self")]
    left_out: dict[str, str] = {}
    runs = measure([own, peer], prompts, 8, left_out)
    configurations = ["plain", "lookup K=3", "draft K=3"]
    assert own.configurations == configurations
    assert peer.configurations == [*configurations, "draft K=auto"]
    assert [len(outcomes) for outcomes in runs.values()] == [2] * 7
    assert not left_out
    for line in lines_of(runs, lambda i, position: own.top2_gap(prompts[i], position)):
        assert all(d.top2_gap < NEAR_TIE and d.is_second for d in line.divergences), line
    for outcome in runs["transformers", "draft K=3"]:
        assert 0 < outcome.first_s < outcome.seconds
        assert 1 <= outcome.num_first <= 4
    # A thread that spins takes as long as the others run.
    busy_s = sum(outcome.seconds for outcomes in runs.values() for outcome in outcomes)
    assert own.idle_cpu_s + peer.idle_cpu_s < busy_s / 2

    with pytest.raises(PeerError, match="IndexError: "):
        peer.generate("plain", [100_000], 4)
    assert peer.generate("plain", prompts[0], 8).tokens == runs["transformers", "plain"][0].tokens

    os.kill(peer._process.pid, signal.SIGKILL)
    runs = measure([own, peer], prompts, 4, left_out)
    assert {variant: len(outcomes) for variant, outcomes in runs.items()} == {("forerun", n): 2 for n in configurations}
    assert set(left_out) == {f"transformers, {name}" for name in peer.configurations}
    assert all(why.startswith("its process ended with exit code -9") for why in left_out.values())


def test_a_peer_that_cannot_load_says_why(bare_python: Path, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"has no torch; make an environment with .*--transformers-python"):
        PeerProcess("transformers", bare_python, question(tmp_path))
    with pytest.raises(PeerError, match="its process ended with exit code 1"):  # an interpreter that is none
        PeerProcess("transformers", Path("/bin/false"), question(tmp_path))


def test_workers_import_nothing_of_forerun() -> None:
    """They run where forerun is not installed."""
    for node in ast.walk(ast.parse(WORKER.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        assert all(name == "__future__" or name.split(".")[0] in sys.stdlib_module_names for name in names), names


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "plan", "sentence"),
    [
        ({"dtype": "float32"}, PeersPlan(), "dtype='float32' is not possible: engines are compared in bfloat16"),
        ({"draft": "lookup"}, PeersPlan(shape="none"), "draft='lookup' is no model"),
        ({}, PeersPlan(pythons={"openvino": Path("nowhere")}), "--openvino-python nowhere is not possible"),
        ({}, PeersPlan(shape="llama-9"), "llama-9"),
    ],
)
def test_refusals(options: dict[str, Any], plan: PeersPlan, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=sentence):
        run(EngineConfig(**options), dataclasses.replace(plan, folder=tmp_path))


def test_the_widened_model_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(widen.SHAPES, "small", WideShape(64, 3, 8, 4, 96, head_dim=8))
    source = write_tiny(tmp_path / "source")
    folder = widened(source, "small", tmp_path / "work")
    assert folder == tmp_path / "work" / "small"
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert widened(source, "small", tmp_path / "work") == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["small"]
    monkeypatch.setitem(widen.SHAPES, "small", WideShape(64, 4, 8, 4, 96, head_dim=8))
    with pytest.raises(BadOption, match="is not source widened to small: name another --folder, or delete it"):
        widened(source, "small", tmp_path / "work")


def test_threads_are_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("FORERUN_NUM_THREADS", "2")
    try:
        assert peers.set_num_threads(None) == torch.get_num_threads() == 2
        assert peers.set_num_threads(1) == torch.get_num_threads() == 1
        assert os.environ["FORERUN_NUM_THREADS"] == "1"
    finally:
        torch.set_num_threads(before)


# ----------------------------------------------------------------------------------------------------------- numbers


def test_every_number_of_a_line() -> None:
    """Two runs of four tokens; a decode rate is of the tokens behind the first ones."""
    plain = [Outcome([1, 2, 3, 4], 4.0, 1.0, 1), Outcome([5, 6, 7, 8], 2.0, 1.0, 1)]
    draft = [Outcome([1, 2, 3, 4], 2.0, 1.0, 2), Outcome([5, 6, 7, 8], 1.0, 0.5, 3)]
    other = [Outcome([1, 2, 3, 4], 8.0, 2.0, 1), Outcome([5, 6, 9, 9], 3.0, 3.0, 4)]
    runs = {("forerun", "plain"): plain, ("forerun", "draft K=5"): draft, ("peer", "plain"): other}
    asked = []

    def gap(index: int, position: int) -> tuple[float, int]:
        asked.append((index, position))
        return 0.125, 9

    assert best_of(runs, "forerun") == ("forerun", "draft K=5")
    slow, fast, theirs = lines_of(runs, gap)
    assert (slow.tokens_per_s, slow.ratio, slow.ratio_range) == (1.5, 2.0, (2.0, 2.0))
    assert slow.decode_tokens_per_s == 2.0  # of 3 / 3 s and 3 / 1 s
    assert (fast.ratio, fast.decode_ratio, fast.divergences) == (1.0, 1.0, ())
    assert theirs.ratio == pytest.approx((8 / 2 + 3 / 1) / 2)
    assert theirs.ratio_range == pytest.approx((3.0, 4.0))
    assert theirs.decode_tokens_per_s == pytest.approx(0.5)  # all tokens of the second run came at once
    assert theirs.decode_ratio == pytest.approx(2.0 / 0.5)
    assert theirs.divergences == (Divergence(1, 2, 7, 9, 0.125, True),)
    assert asked == [(1, 2)]
