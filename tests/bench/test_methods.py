"""`forerun bench methods`: whole runs on a tiny model, its prompts, and the numbers of known runs."""

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.test_latency import drafting_step
from forerun import registry
from forerun.bench import exhibits, methods
from forerun.bench.methods import PROMPTS, Way, compare, read_work, run
from forerun.bench.methods_results import AGAIN, PLAIN, cells_of, summaries_of
from forerun.bench.plans import MethodsPlan
from forerun.bench.results import Tally, Variant
from forerun.cli.bench import app
from forerun.config import EngineConfig
from forerun.drafters import Drafter
from forerun.engine.llm import LLM
from forerun.errors import BadOption, InternalError
from forerun.types import Budget, Coins, Draft, Sequence, StepReport
from refusals import refusal

KINDS = ["chat", "summary", "edit", "question", "list", "story"]


@pytest.fixture
def work_file(tmp_path: Path) -> Path:
    rows = [
        {"id": f"{kind}-{i}", "kind": kind, "messages": [{"role": "user", "content": f"{kind} {i} " * 3}]}
        for kind in ("chat", "edit")
        for i in (1, 2)
    ]
    file = tmp_path / "work.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def measured(tiny: Path, work_file: Path) -> Callable[..., dict[str, Any]]:
    """Runs a plan over the file of work, with options of the engine besides."""

    def measure(engine: dict[str, Any] | None = None, **plan: Any) -> dict[str, Any]:
        return run(EngineConfig(target=str(tiny), **engine or {}), MethodsPlan(prompt_file=work_file, **plan))

    return measure


def command(tiny: Path, work_file: Path, *options: str) -> list[str]:
    """The lines that `forerun bench methods` prints, of which the last one is its record."""
    arguments = ["methods", "--target", str(tiny), "--prompt-file", str(work_file), *options, "--json", "-"]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


# ------------------------------------------------------------------------------------------------------------ prompts


def test_the_shipped_prompts() -> None:
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert PROMPTS.stat().st_size < 100_000
    assert len({row["id"] for row in rows}) == len({json.dumps(row["messages"]) for row in rows}) == 48
    assert Counter(row["kind"] for row in rows) == dict.fromkeys(KINDS, 8)
    for row in rows:
        roles = [message["role"] for message in row["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        text = row["messages"][-1]["content"]
        if row["kind"] in ("summary", "question"):
            assert 300 <= len(text.split()) <= 600, row["id"]
        if row["kind"] == "edit":
            assert 20 <= text.split("```")[1].count("\n") - 1 <= 40, row["id"]


def test_prompts_are_taken_kind_by_kind_in_turn(work_file: Path) -> None:
    assert [prompt.kind for prompt in read_work(MethodsPlan(prompts_per_kind=2))] == KINDS * 2
    plan = MethodsPlan(kinds=("edit",), prompts_per_kind=9, prompt_file=work_file)
    assert [prompt.id for prompt in read_work(plan)] == ["edit-1", "edit-2"]
    with pytest.raises(BadOption, match=r"there is no kind of work 'edits'.*did you mean 'edit'"):
        read_work(MethodsPlan(kinds=("edits",), prompt_file=work_file))
    work_file.write_text('{"id": "a", "text": "b"}\n', encoding="utf-8")
    with pytest.raises(BadOption, match=r'is no file of work: every line must be JSON with "id", "kind", "messages"'):
        read_work(MethodsPlan(prompt_file=work_file))


# ---------------------------------------------------------------------------------------------------- the whole command


def test_the_command_measures_every_drafter_that_can_serve(tiny: Path, work_file: Path) -> None:
    *printed, last = command(tiny, work_file, "--prompts", "2", "--max-tokens", "12")
    assert all(len(line) <= 80 for line in printed)
    record = json.loads(last)
    names = set(registry.names("forerun.drafters"))
    served = {line["name"] for line in record["lines"]}
    assert served | set(record["left_out"]) == names | {AGAIN}
    assert not served & set(record["left_out"])
    assert {"none", "lookup"} <= served
    assert "needs a draft model" in record["left_out"]["model"]
    for name, why in record["left_out"].items():
        assert f"left out: {name}, for {why}"[:60] in "\n".join(printed)
    for name in served - {PLAIN, AGAIN}:  # in both tables of both temperatures
        assert sum(line.startswith(f"{name} ") for line in printed) == 4, name
    cells = {(line["temperature"], line["kind"], line["name"]) for line in record["lines"]}
    assert cells == {(t, kind, name) for t in (0.0, 1.0) for kind in ("chat", "edit") for name in served}
    assert sum(line.startswith(f"{AGAIN} ") for line in printed) == 2
    assert record["texts_compared"] == 2 * 4 * (len(served) - 2)
    text = " ".join(" ".join(printed).split())
    assert f"All {record['texts_compared']} compared texts of drafters are plain decoding's, token for token." in text
    assert "limit without speculation: " in text
    assert {"bench", "target", "plan", "prompts", "ceiling_tokens_per_s", "build", "summaries"} <= set(record)
    assert record["prompts"] == ["chat-1", "edit-1", "chat-2", "edit-2"]
    for line in record["lines"]:
        assert (line["num_runs"], line["num_tokens"]) == (2, 24)  # a model without turns goes on behind its end
        if line["name"] in (PLAIN, AGAIN):
            assert (line["tokens_per_pass"], line["alpha_hat"]) == (1, None)
            assert (line["speedup"] == 1) == (line["name"] == PLAIN)
        else:  # each token behind the first of a pass was drafted and accepted
            assert (line["tokens_per_pass"] > 1) == bool(line["alpha_hat"])


def test_a_draft_model_is_clocked_and_always_right(tiny: Path, measured: Any, capsys: Any) -> None:
    """The target drafts for itself: with K = 3 every pass but the last makes 4 tokens."""
    drafts = (str(tiny), "lookup:max_n=2")
    engine = {"spec_length": 3, "pacing": "fixed"}
    record = measured(engine, drafts=drafts, kinds=("chat",), temperatures=(0.0,), max_tokens=12)
    by_draft = {line["name"]: line for line in record["lines"]}
    assert list(by_draft) == [PLAIN, AGAIN, *drafts]
    own = by_draft[str(tiny)]
    assert own["alpha_hat"] == 1
    assert own["tokens_per_pass"] == pytest.approx(4)
    assert own["overhead_share"] >= 0
    assert own["draft_share"] > 0
    assert len(record["drafts"]) == 1
    assert capsys.readouterr().out.count("Temperature 0") == 2


def test_other_rules_are_not_compared(measured: Any, capsys: Any) -> None:
    record = measured(drafts=("lookup",), temperatures=(0.7,), acceptances=("ratio",), max_tokens=4)
    assert record["texts_compared"] == 0
    said = "At temperature 0.7 texts were not compared with acceptance ratio: each way draws its own."
    assert said in " ".join(capsys.readouterr().out.split())
    for rule, temperature in ((None, 0.0), (None, 1.0), ("match", 1.0), ("ratio", 0.0)):
        assert Way("", "lookup", "auto", rule).keeps_texts(temperature)


def test_policies_and_rules_are_compared_as_drafters_are(
    tiny: Path, tmp_path: Path, work_file: Path, measured: Any
) -> None:
    """Each way by what differs; a rule that cannot judge a drafter leaves that one way out."""
    sizes = ("--kind", "chat", "--prompts", "1", "--max-tokens", "4", "--temperature", "1")
    ways = ("--draft", "lookup", "--draft", "recycle", "--pacing", "auto,fixed", "--acceptance")
    record = json.loads(command(tiny, work_file, *sizes, *ways, "ratio,block")[-1])
    lookup = [("lookup", pacing, rule) for pacing in ("auto", "fixed") for rule in ("ratio", "block")]
    wanted = [*lookup, *(("recycle", pacing, "ratio") for pacing in ("auto", "fixed"))]
    assert [(way["draft"], way["pacing"], way["acceptance"]) for way in record["ways"]] == wanted
    names = [way["name"] for way in record["ways"]]
    assert names == [", ".join(way) for way in wanted]
    assert [line["name"] for line in record["lines"]] == [PLAIN, AGAIN, *names]
    assert "cannot judge the drafts" in record["left_out"]["recycle, block"]
    assert record["texts_compared"] == 0
    with pytest.raises(BadOption, match="cannot judge the drafts"):
        measured(drafts=("recycle",), acceptances=("block",))
    absent = EngineConfig(target=str(tmp_path / "absent"))
    for wrong in ({"pacings": ("autos",)}, {"acceptances": ("blocks",)}):  # refused before a model is read
        assert "did you mean" in refusal(BadOption, run, absent, MethodsPlan(**wrong))


def test_one_flag_may_name_several_specs() -> None:
    found = registry.parse_specs(["auto,svip:a=1,b=2,fixed", "auto", "x:of=(y:z=1,w=2)"])
    assert found == ["auto", "svip:a=1,b=2", "fixed", "x:of=(y:z=1,w=2)"]


# ------------------------------------------------------------------------------------------------------ loud failures


@dataclass(frozen=True)
class Options:
    """No options."""


class Failing(Drafter):
    """Drafts once, then raises."""

    draws = "point"

    def __init__(self) -> None:
        self.num_calls = 0

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        self.num_calls += 1
        if self.num_calls > 30:
            raise RuntimeError("no more")
        return Draft.empty(len(seqs))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = ModuleType("forerun.drafters.failing")
    module.Options = Options
    module.build = lambda options, target: Failing()
    found = registry.names
    monkeypatch.setattr(registry, "names", lambda room: [*found(room), "failing"])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("forerun.drafters.names", registry.names)
    return iter(())


@pytest.mark.drafter_fails
def test_a_drafter_that_fails_is_no_plain_decoding(failing: None, measured: Any) -> None:
    with pytest.raises(InternalError, match=r"the drafter 'failing' failed on .*: what it raised is logged above"):
        measured({"pacing": "fixed"}, drafts=("failing",), temperatures=(0.0,), max_tokens=12)


def test_a_changed_text_ends_the_measurement(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of lookup's third run is changed behind the engine's back."""
    original, num_runs = methods.run_once, 0

    def changed(llm: LLM, prompt: Any, params: Any, *rest: Any) -> list[int]:
        nonlocal num_runs
        ids = original(llm, prompt, params, *rest)
        num_runs += params.draft == "lookup"
        return [*ids[:3], ids[3] % 200 + 1, *ids[4:]] if num_runs == 3 and params.draft == "lookup" else ids

    monkeypatch.setattr(methods, "run_once", changed)
    with pytest.raises(InternalError, match="'lookup' changed the text of edit-1 at temperature 0: behind 3 equal"):
        measured(drafts=("lookup",), temperatures=(0.0,), max_tokens=8)


def test_a_text_that_is_only_shorter_is_another_one(tiny: Path) -> None:
    with LLM(str(tiny)) as llm:
        tokenizer = llm.tokenizer
    compare({"none": [5, 6, 7], "lookup": [5, 6, 7]}, "chat-1", 1.0, tokenizer)
    with pytest.raises(InternalError, match="chat-1 at temperature 1: behind 2 equal tokens it says ''"):
        compare({"none": [5, 6, 7], "lookup": [5, 6]}, "chat-1", 1.0, tokenizer)


# ------------------------------------------------------------------------------------------------------------ numbers


def tally(draft: str, seconds_per_token: list[float], num_accepted: int) -> Tally:
    """Steps of 1 s, of which 0.5 are the target's and 0.25 drafting, 0.2 of that in a model; 3 tokens are drafted."""
    num_emitted = num_accepted + 1
    if draft == "none":
        step = StepReport(num_decoding=1, num_emitted=num_emitted, num_committed=num_emitted, score_s=1.0)
    else:
        step = drafting_step(num_accepted, draft_s=0.25, score_s=0.5, commit_s=0.25)
    step.target_forward_s = 0.5
    return Tally(Variant(draft, 0), 0.0, seconds_per_token, [step] * 4, [0.0 if draft == "none" else 0.2] * 4)


def test_every_number_of_a_cell_and_a_summary() -> None:
    tallies = {
        (0.0, "chat", "none"): tally("none", [1.0, 1.0, 2.0], 0),
        (0.0, "chat", "lookup"): tally("lookup", [0.5, 1.0, 0.5], 1),
        (0.0, "edit", "none"): tally("none", [1.0, 1.0, 1.0], 0),
        (0.0, "edit", "lookup"): tally("lookup", [0.1, 0.125, 0.5], 2),
    }
    cells = cells_of(tallies)
    chat, edit = (cell for cell in cells if cell.name == "lookup")
    assert (chat.speedup, chat.speedups, chat.tokens_per_s) == (2.0, (2.0, 1.0, 4.0), 2.0)
    assert (edit.speedup, edit.speedups, edit.tokens_per_s) == (8.0, (10.0, 8.0, 2.0), 8.0)
    assert (chat.tokens_per_pass, edit.tokens_per_pass) == (2, 3)
    assert (chat.num_tokens, edit.num_tokens) == (8, 12)
    assert (chat.alpha_hat, edit.alpha_hat) == pytest.approx((1 / 3, 2 / 3))
    assert (chat.draft_share, chat.overhead_share) == pytest.approx((0.25, 0.3))
    lookup, plain = summaries_of(tallies, cells)
    assert (lookup.name, lookup.speedup, lookup.least_speedup, lookup.least_kind) == ("lookup", 4.0, 2.0, "chat")
    assert lookup.speedup_range == pytest.approx((8**0.5, 20**0.5)), "of the rounds: 2 * 10, 1 * 8, 4 * 2"
    assert (lookup.tokens_per_pass, lookup.alpha_hat, lookup.tokens_per_s) == pytest.approx((2.5, 0.5, 4.0))
    assert (plain.name, plain.speedup, plain.alpha_hat, plain.overhead_share) == ("none", 1.0, None, 0.5)


# ------------------------------------------------------------------------------------------------------------ picture


def test_a_picture_is_refused_before_a_model_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(target=str(tmp_path / "absent"))
    with pytest.raises(BadOption, match=r"a.pdf' is not possible: its name must end in .svg or .png"):
        run(config, MethodsPlan(picture=Path("a.pdf")))
    monkeypatch.setattr(exhibits.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadOption, match=r"\(matplotlib\): \S+ -m pip install 'matplotlib>="):
        run(config, MethodsPlan(picture=Path("a.svg")))


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the picture needs matplotlib")
def test_the_picture_is_drawn(measured: Any, tmp_path: Path) -> None:
    measured(drafts=("lookup",), max_tokens=4, picture=tmp_path / "drawn")
    drawn = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
    assert drawn.startswith("<?xml")
    for text in ("tiny, ", "speed-up over plain decoding", "temperature 1", "lookup", AGAIN, "edit", "memory at"):
        assert text in drawn
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
