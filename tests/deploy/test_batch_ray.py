"""`forerun batch --ray` on two nodes: kills under load, the same answers as in one process, nothing lost or doubled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve.running import START_S, wait_for

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")

from deploy.cluster import kill_one, two_nodes

pytestmark = pytest.mark.parity

NUM = 240


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Completions, drawn, greedy and in twos, and one that is refused."""
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    bodies: list[dict[str, Any]] = [
        {"prompt": f"def f{i}(x):\n", "max_tokens": 40, "temperature": i % 2, "n": 1 + i % 3 // 2} for i in range(NUM)
    ]
    bodies[7] = {"prompt": "x", "tools": 1}
    lines = (
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body})
        for i, body in enumerate(bodies)
    )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def batch(*arguments: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "forerun", "batch", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **env})


def finished(process: subprocess.Popen[str]) -> str:
    said = process.communicate(timeout=START_S)[1]
    assert process.returncode == 2, said  # one request is refused
    return said


def texts(path: Path) -> dict[str, Any]:
    """By custom_id what was answered, after checking that each has one whole line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line) for line in lines]
    assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(NUM))
    assert [a["custom_id"] for a in answers if a["response"]["status_code"] != 200] == ["7"]
    return {a["custom_id"]: [choice["text"] for choice in a["response"]["body"].get("choices", [])] for a in answers}


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_an_engine_a_node_and_the_run_itself_are_killed(requests: Path, tmp_path: Path) -> None:
    """A replica dies under load, then the run, then, in the run that goes on, a whole node: as if nothing had been."""
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    finished(batch(str(requests), str(here)))
    with two_nodes() as cluster:
        address = {"RAY_ADDRESS": cluster.address}
        node = next(iter(cluster.worker_nodes))
        first = batch(str(requests), str(there), "--ray", **address)
        wait_for(lambda: num_lines(there) > 10 or first.poll() is not None)
        killed = kill_one("ray::Engine", node)
        before = num_lines(there)
        wait_for(lambda: num_lines(there) > before + 60 or first.poll() is not None)
        assert first.poll() is None, "it was killed before it ended"
        first.kill()
        first.communicate()
        assert 70 < num_lines(there) < NUM

        second = batch(str(requests), str(there), "--ray", **address)
        before = num_lines(there)
        wait_for(lambda: num_lines(there) > before + 10 or second.poll() is not None)
        assert kill_one("ray::Engine", node) != killed, "the engine of the first run has ended with it"
        cluster.remove_node(node, allow_graceful=False)
        said = finished(second)
        assert f"{NUM} requests: {NUM - 1} answered, 1 refused" in said
        assert texts(there) == texts(here)


def test_a_model_that_is_not_there_is_said(requests: Path, tmp_path: Path) -> None:
    """An engine that cannot be made ends the run with what it says; a local cluster is made where there is none."""
    process = batch(
        str(requests), str(tmp_path / "out.jsonl"), "--ray", "--ray-cpus", "0.5", "--target", str(tmp_path / "none")
    )
    said = process.communicate(timeout=START_S)[1]
    assert process.returncode == 2
    assert str(tmp_path / "none") in said
    assert "Traceback" not in said
