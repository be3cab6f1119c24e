"""`benchmarks.peers_t5`: forerun one by one and at once, and transformers, on tiny T5s of random weights."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks.paper_tasks import NoPair, Task
from benchmarks.peers import PeersPlan, measure, run as run_peers
from benchmarks.peers_t5 import AnswersPlan, in_turns, run
from engine.test_encoder_decoders import write_t5
from forerun.bench.widen import describe
from forerun.config import EngineConfig
from forerun.errors import BadOption
from forerun.models.opened import spec_of
from refusals import refusal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose target has more layers in its decoder than in its encoder."""
    made = tmp_path_factory.mktemp("pair")
    for name, sizes in {"target": {"num_layers": 1}, "draft-a": {"num_layers": 1, "num_decoder_layers": 1}}.items():
        (made / name).mkdir()
        write_t5(made / name, 1, **sizes)
    for task in ("translation", "summary"):
        rows = [{"source": f"{task} {i} " + "x" * i} for i in range(6)]
        (made / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def test_every_engine_says_the_same(folder: Path, capsys: pytest.CaptureFixture[str], one_thread: None) -> None:
    plan = AnswersPlan(folder, spec_lengths=(3,), num_prompts=2, batch_size=2, max_tokens=10, num_repeats=2)
    record = json.loads(json.dumps(run(EngineConfig(max_seq_len=160), plan)))
    assert not record["left_out"]
    names = ["plain", "lookup K=3", "draft K=3", "no model K=auto", "draft K=auto"]
    wanted = [("forerun", name) for name in [*names, "plain once more"]]
    wanted += [("forerun, 2 at once", name) for name in names]
    wanted += [("transformers", name) for name in [*names[:3], "draft K=auto"]]
    assert [(line["engine"], line["configuration"]) for line in record["lines"]] == wanted
    for line in record["lines"]:
        assert line["num_runs"] == 4
        assert line["num_as_plain"] == 4
        assert not line["divergences"]
        assert line["tokens_per_s"] > 0
    names = ["translation 1", "summary 1"]
    assert record["prompts"] == names * 2
    assert record["new_tokens"][:2] == record["new_tokens"][2:]
    assert all(2 <= num <= 10 for num in record["new_tokens"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "t5, hidden 32, 1 encoder and 2 decoder layers, 257 ids" in printed
    assert "against the best of transformers" in printed


def test_groups_take_turns() -> None:
    """Each begins with another configuration; an engine that can has all of a group at once."""
    calls = []

    class OneByOne:
        name, about, idle_cpu_s, configurations = "forerun", "", 0.0, ["plain"]

        def generate(self, configuration: str, ids: list[int], max_tokens: int) -> Any:
            calls.append((self.name, ids, max_tokens))
            return ids[0]

    class AtOnce(OneByOne):
        name = "many"

        def together(self, configuration: str, group: Any) -> list[Any]:
            calls.append((self.name, *group))
            return [ids[0] for ids, _ in group]

    runs = measure([OneByOne(), AtOnce()], [[1], [2], [3]], [5, 6, 7], {}, group_size=2)
    assert runs == {("forerun", "plain"): [1, 2, 3], ("many", "plain"): [1, 2, 3]}
    first = [("forerun", [1], 5), ("forerun", [2], 6), ("many", ([1], 5), ([2], 6))]
    assert calls[2:] == [*first, ("many", ([3], 7)), ("forerun", [3], 7)], "behind the warm-up"


def test_prompts_are_of_each_task_in_turn() -> None:
    tasks = [Task("a", ["1", "2", "3", "4"], [""] * 4), Task("b", ["5", "6"], ["", ""])]
    assert in_turns(tasks, 9) == (["a 1", "b 1", "a 2"], ["1", "5", "2"])
    assert in_turns(tasks, 2) == (["a 1", "b 1"], ["1", "5"])


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "there is no encoder-decoder pair in" in refusal(NoPair, run, EngineConfig(), AnswersPlan(tmp_path))
    with pytest.raises(BadOption, match="--transformers-python nowhere is not possible: there is no such file"):
        run(EngineConfig(), AnswersPlan(folder, python=Path("nowhere")))
    with pytest.raises(BadOption, match="--task is missing: a target with an encoder is measured with"):
        run(EngineConfig.make(target=str(folder / "target"), draft=str(folder / "draft-a")), AnswersPlan())
    with pytest.raises(BadOption, match=r"is an encoder-decoder: `python -m benchmarks\.peers_t5` compares those"):
        run_peers(EngineConfig.make(target=str(folder / "target")), PeersPlan(shape="none", folder=tmp_path))


def test_layers_of_both_parts_are_described(folder: Path) -> None:
    assert describe(spec_of(folder / "draft-a")) == "t5, hidden 32, 1 encoder and 1 decoder layers, 257 ids"
