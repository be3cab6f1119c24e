"""`benchmarks.paper` on encoder-decoder pairs: tasks, tables and refusals, on tiny T5s of random weights."""

import importlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import refusals
from benchmarks import paper, paper_alpha
from benchmarks.paper_exhibits import beams_t5, table_2_t5
from benchmarks.paper_plan import MEASURED, ROOM, PaperPlan
from benchmarks.paper_tasks import NoPair, Task, read_task
from benchmarks.paper_work import Work
from engine.test_encoder_decoders import write_t5
from forerun.bench import exhibits
from forerun.bench.latency import PLAIN
from forerun.bench.results import Tally, Variant
from forerun.config import EngineConfig
from forerun.drafters.shared.tables import FittedTable
from forerun.engine.llm import LLM
from forerun.errors import BadOption, NotFound
from forerun.text.terminal import make_console
from forerun.theory import formulas
from forerun.types import StepReport
from tiny import write_tiny

WORDS = ("one", "two", "red", "ten")


def write_prompts(file: Path, num: int) -> Path:
    words = random.Random(num)
    sources = [" ".join(words.choice(WORDS) for _ in range(words.randrange(2, 7))) for _ in range(num)]
    file.write_text("".join(json.dumps({"source": one, "target": one[::-1]}) + "\n" for one in sources))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as --pair takes it, with three draft models and two tasks."""
    made = tmp_path_factory.mktemp("pair")
    smaller = {"draft-a": {"num_layers": 1, "num_decoder_layers": 1}, "draft-b": {"num_decoder_layers": 1}}
    for name in ("target", "draft-a", "draft-b", "draft-c"):
        (made / name).mkdir()
        write_t5(made / name, 1, **smaller.get(name, {}))
    for task in ("summary", "translation", "other"):
        write_prompts(made / f"{task}.jsonl", 8)
    return made


@pytest.fixture(scope="module")
def work(folder: Path) -> Work:
    """The pair's, with few tokens."""
    plan = PaperPlan(pair=folder, num_tokens=256, num_prompts=2, max_tokens=8, num_repeats=2)
    return Work(plan, EngineConfig(max_seq_len=160))


def made(file: str, work: Work) -> list[exhibits.Exhibit]:
    return list(importlib.import_module(f"{ROOM}.{file}").make(work))


def test_an_exhibit_is_a_file() -> None:
    files = {file.stem for file in Path(str(importlib.import_module(ROOM).__path__[0])).glob("[a-z]*.py")}
    assert set(MEASURED.values()) == files
    assert {"table-2", "table-2-t5", "table-3-t5", "table-5-t5", "beams-t5", "independence-t5"} <= MEASURED.keys()


def test_tasks_have_two_halves_and_the_papers_come_first(work: Work) -> None:
    assert [task.name for task in work.task_pair.tasks] == ["translation", "summary", "other"]
    assert [task.published for task in work.task_pair.tasks] == ["EnDe", "CNNDM", None]
    task = Task("x", ["a", "b", "c"], ["A", "B", "C"])
    assert (list(task.measured), task.counted) == (["a", "b"], ["C"])


def test_answers_are_measured_as_the_engine_writes_them(work: Work) -> None:
    """A greedy answer has the largest logit at every position, given its own source, and ends where it ends."""
    target, task = work.task_pair.target, work.task_pair.tasks[0]
    llm = LLM(target, draft="none", max_seq_len=160)
    texts = paper_alpha.texts(llm, paper_alpha.SETTINGS["T=0"], 10_000, 1, task)
    assert len(texts) == len(task.measured) == 4  # a second time they would be the same
    logits = paper_alpha._model_logits(target, max(max(len(one.ids), len(one.source)) for one in texts))
    for text, source in zip(texts, task.measured, strict=True):
        assert text.source == tuple(llm.tokenizer.encode(source))
        assert text.ids[: text.first] == list(llm.engine.start_ids)
        assert logits(text).argmax(-1).tolist() == text.own
        assert not target.end_ids & set(text.own[:-1])
    more = paper_alpha.texts(llm, paper_alpha.SETTINGS["T=1"], 600, 1, task)
    assert sum(len(one.own) for one in more) >= 600
    assert len({tuple(one.ids) for one in more}) == len(more)


def test_unigram_and_bigram_are_counted_in_references(work: Work) -> None:
    target = work.task_pair.target
    table = paper_alpha.counted(["ab", "ac"], target, [3])
    assert isinstance(table, FittedTable)
    a, b, c = (target.text_tokenizer.encode(one)[0] for one in "abc")
    assert table.best(None) == min(0, a, 3)  # the end, a and the start are twice in there
    assert table.behind(3)[0].tolist() == [a]
    assert table.behind(a)[0].tolist() == sorted([b, c])
    assert table.behind(b)[0].tolist() == [0]


def test_alphas_by_task(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    """Five guessers, three settings, for each task its own; the draft that is the target has alpha 1."""
    tables = made("table_3_t5", work)
    assert [one.name for one in tables] == [f"table-3-t5-{task}" for task in ("translation", "summary", "other")]
    sizes = list(work.task_pair.drafts)
    for table, theirs in zip(tables, ((0.08, 0.75, 0.62), (0.13, 0.65, 0.53), None), strict=True):
        assert list(dict.fromkeys(row[0] for row in table.rows)) == ["unigram", "bigram", *sizes]
        assert len(table.rows) == 15
        assert all(row[2] > 1 - 1e-6 for row in table.rows if row[0] == sizes[-1])
        published = [row[4] for row in table.rows if len(row) > 4]
        if theirs is not None:
            assert (published[0], published[6], published[7]) == theirs
        else:
            assert not published
    first, second, _ = made("table_5_t5", work)
    assert (len(first.columns), len(second.columns)) == (11, 7)  # the paper has the translation alone
    assert [row[:3] for row in second.rows][2] == (sizes[0], "T=1", tables[1].rows[7][2])
    for one in (*tables, first, second, *made("independence_t5", work)):
        assert all(len(row) == len(one.columns) for row in one.rows)
        exhibits.print_exhibit(one, make_console())
        json.dumps(exhibits.record_of(one))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "nan" not in printed


def step(**given: Any) -> StepReport:
    return StepReport(num_decoding=1, **given)


def test_the_prediction_is_that_of_the_formula() -> None:
    """alpha = 2/3, K = 3, c = .2, v = 1.2, o = .2: A = 65/27, over 2 and, by Theorem 3.8, over 1.6."""
    plain = Tally(PLAIN, 0.0, [0.4, 0.6], [step()] * 4, [], [2, 2], [0.5, 0.5], [2, 2])
    drafting = step(num_drafted=3, num_tested=3, num_accepted=2, draft_s=0.3, target_forward_s=0.6)
    drafted = Tally(Variant("a", 3), 0.0, [0.25, 0.5], [drafting] * 4, [], [8, 4], [1.0, 1.0], [2, 2])
    (row,) = table_2_t5.rows_of({(0.0, PLAIN): plain, (0.0, drafted.variant): drafted}, num_prompts=2)
    (found,) = row.predicted
    assert row.alpha == pytest.approx(2 / 3)
    assert (found.c, found.v, found.o) == pytest.approx((0.2, 1.2, 0.2))  # 0.3 / 3, 0.6 and 1 - 0.9, over 0.5 s
    assert found.expected == pytest.approx(65 / 27 / 2)
    assert found.theorem_3_8 == pytest.approx(65 / 27 / 1.6)
    assert row.speed.values == pytest.approx((0.5 / (4 / 12),))
    assert row.whole.values == pytest.approx(((2 + 1) / 4 / ((4 + 2) / 12),))
    assert row.deviation("expected") == pytest.approx(65 / 54 / 1.5 - 1)
    speeds = [formulas.speedup_of_length(2 / 3, 3, 0.2, n, 1.2, 0.2, knows_end=False) for n in (8, 4)]
    assert found.of_lengths == pytest.approx(12 / (8 / speeds[0] + 4 / speeds[1]))
    assert found.of_lengths < found.expected
    single = table_2_t5.row_of(drafted, plain, 1)
    assert single.speed.values == pytest.approx((0.4 / 0.25, 0.6 / 0.5))
    ratios = [one.expected / speed for one, speed in zip(single.predicted, single.speed.values, strict=True)]
    assert single.deviation("expected") == pytest.approx(sum(ratios) / 2 - 1)
    assert single.predicted[0].c == pytest.approx(0.1 / 0.4)  # over the plain steps of the same repeat
    drafted.steps[0] = step(num_drafted=1, num_tested=1)
    drafted.steps[1] = drafted.steps[0]
    assert table_2_t5.row_of(drafted, plain, 2).predicted == ()  # half of the drafts are shorter


def test_rows_stand_beside_the_papers_of_the_same_length() -> None:
    task = Task("translation", ["a"], [""])
    plain = Tally(PLAIN, 0.0, [0.5], [step()] * 2, [], [2], [0.0], [2])
    tallies = {(0.0, PLAIN): plain, (0.0, table_2_t5.AGAIN): replace(plain, variant=table_2_t5.AGAIN)}
    for spec_length in (3, 7):
        for draft in ("big", "small"):
            done = step(num_drafted=spec_length, num_tested=1, draft_s=0.1, target_forward_s=0.5)
            variant = Variant(draft, spec_length)
            tallies[0.0, variant] = Tally(variant, 0.0, [0.6], [done] * 2, [], [2], [0.0], [2])
    table = table_2_t5.table_2(table_2_t5.rows_of(tallies, 1), task, {"small": "1 k", "big": "2 k"}, "", "again")
    published = {(row[0], row[2]): row[-2:] for row in table.rows}
    assert list(published) == [("1 k", 3), ("1 k", 7), ("2 k", 3), ("2 k", 7), ("plain", None)]
    assert list(published.values()) == [(None, None), (0.75, 3.4), (None, None), (0.8, 2.8), (None, None)]
    assert table.rows[-1][9] == 1.0
    assert "with costs: 4 of 4 are within 15%" in table.note


def test_speeds_of_every_draft_and_length(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    for table in made("table_2_t5", work):
        rows = [(row[0], row[1], row[2]) for row in table.rows]
        drafts = [(size, k) for size in work.task_pair.drafts for k in (3, 5, 7)]
        assert rows == [(size, t, k) for t in ("0", "1") for size, k in [*drafts, ("plain", None)]]
        assert table.rows[8][3] == 1.0  # the target drafts for itself
        exhibits.print_exhibit(table, make_console())
        recipe = f"table-2-t5 --measure --pair {work.plan.pair} --prompts 2 --max-tokens 8 --repeats 2 --spec-length 3"
        assert recipe in table.recipe
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines() if not line.startswith("Again")) <= 80
    assert "…" not in printed


def test_beams_say_what_plain_beams_say(work: Work) -> None:
    for table in made("beams_t5", work):
        assert len(table.rows) == 3 * len(beams_t5.WIDTHS)
        assert {row[-1] for row in table.rows} == {"4/4"}
        most = {row[1:4]: row[4] for row in table.rows if row[0] == list(work.task_pair.drafts)[-1]}
        assert all(most[widths] > 1 for widths in beams_t5.WIDTHS)  # the target drafts for itself
        json.dumps(exhibits.record_of(table))


# --------------------------------------------------------------------------------------------------- what is refused


def refusal(plan: PaperPlan, target: Path | None = None) -> str:
    config = EngineConfig() if target is None else EngineConfig.make(target=str(target))
    return refusals.refusal((BadOption, NotFound), paper.run, plan, config)


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    only = {"names": ("table-2-t5",)}
    tiny = write_tiny(tmp_path / "tiny")
    said = refusal(PaperPlan(**only, pair=tmp_path))
    assert said.startswith(f"there is no encoder-decoder pair in {tmp_path}: docs/training.md says how the T5 pair")
    own = {"drafts": (str(folder / "draft-a"),), "tasks": (f"x={folder / 'other.jsonl'}",)}
    assert "--pair contradicts --target" in refusal(PaperPlan(**only, **own, pair=folder), folder / "target")
    assert "--task is missing" in refusal(PaperPlan(**only, drafts=own["drafts"]), folder / "target")
    assert "--draft is missing" in refusal(PaperPlan(**only, tasks=own["tasks"]), folder / "target")
    assert "write NAME=FILE" in refusal(PaperPlan(**only, pair=folder, tasks=("translation",)))
    assert "--task x is named twice" in refusal(PaperPlan(**only, pair=folder, tasks=own["tasks"] * 2))
    assert "there is no file nowhere" in refusal(PaperPlan(**only, pair=folder, tasks=("x=nowhere",)))
    said = refusal(PaperPlan(names=("table-3",), drafts=own["drafts"]), folder / "target")
    assert "is an encoder-decoder, which the exhibits measure whose names end in -t5" in said
    (tmp_path / "target").mkdir()
    assert f"{tmp_path} has no draft model" in refusal(PaperPlan(**only, pair=tmp_path))
    (tmp_path / "draft-a").mkdir()
    assert f"{tmp_path} has no prompts" in refusal(PaperPlan(**only, pair=tmp_path))
    assert "there is no encoder-decoder pair" in refusal(PaperPlan(**only, drafts=own["drafts"]), tiny)


@pytest.mark.parametrize("line", ['{"target": "x"}', "[]", "{", ""])
def test_files_of_no_task(tmp_path: Path, line: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(line)
    with pytest.raises(BadOption, match='every line must be JSON with "source"'):
        read_task("x", file)


def test_what_has_no_models_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no exhibit is named; one that is named is refused."""
    monkeypatch.setattr(paper, "MEASURED", {"beams-t5": "beams_t5"})
    assert all(not one.name.endswith("-t5") for one in paper.run(PaperPlan(pair=tmp_path), EngineConfig()))
    assert "beams-t5 is left out: there is no encoder-decoder pair in" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(NoPair):
        paper.run(PaperPlan(names=("beams-t5",), pair=tmp_path), EngineConfig())


def test_a_pair_of_ones_own(folder: Path) -> None:
    """By target, draft model and file of a task."""
    drafts, tasks = (str(folder / "draft-a"),), (f"mine={folder / 'other.jsonl'}",)
    plan = PaperPlan(names=("table-3-t5",), drafts=drafts, tasks=tasks, num_tokens=256)
    (table,) = paper.run(plan, EngineConfig.make(target=str(folder / "target"), max_seq_len=160))
    assert table.name == "table-3-t5-mine"
    words = ["--target", str(folder / "target"), "--draft", drafts[0], "--task", tasks[0], "--tokens", "256"]
    assert table.recipe.split() == ["python", "-m", "benchmarks.paper", "table-3-t5", "--measure", *words]
