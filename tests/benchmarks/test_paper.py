"""`benchmarks.paper`: every printed number from its formula, and what is measured, on tiny models by enumeration."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import paper, paper_alpha, paper_formulas
from benchmarks.paper_alpha import SETTINGS, Acceptances, Text, _model_logits, _table_logits, texts
from benchmarks.paper_exhibits import table_2
from benchmarks.paper_plan import PaperPlan
from benchmarks.paper_work import Work
from forerun.bench import exhibits
from forerun.bench.latency import Measured
from forerun.bench.results import Line
from forerun.bench.tables import Column
from forerun.config import EngineConfig
from forerun.drafters.shared.tables import FittedTable
from forerun.engine.llm import LLM
from forerun.engine.opened import SHIPPED_DRAFT, Opened
from forerun.errors import BadOption, NotFound
from forerun.models.loading import load_checkpoint
from forerun.text.terminal import make_console
from forerun.theory import formulas
from forerun.theory.published import TABLE_1, TABLE_4
from refusals import refusal


def exhibits_of(file, work):
    """Return what a file of benchmarks/paper_exhibits makes."""
    return list(importlib.import_module(f"benchmarks.paper_exhibits.{file}").make(work))


def test_every_number_of_table_1():
    for row in TABLE_1:
        operations = formulas.operations_factor(row.alpha, row.gamma, 0.0)
        assert f"{operations:.2f}" == f"{row.operations:.2f}"
        assert f"{formulas.speedup(row.alpha, row.gamma, 0.0):.2f}" == f"{row.speed:.2f}"
    assert all(row[-1] == "yes" for row in paper_formulas.table_1().rows)


def test_table_4_follows_from_its_inputs_but_in_three_cells():
    table = paper_formulas.table_4()
    verdicts = {(row[0], row[1], row[2]): row[-1] for row in table.rows}
    others = {key for key, verdict in verdicts.items() if verdict != "yes"}
    assert others == {("EnDe", "T5-base", 1), ("EnDe", "T5-large", 1), ("CNNDM", "T5-large", 1)}
    assert {verdicts[key] for key in others} == {"in the interval"}
    for row, published in zip(table.rows, TABLE_4, strict=True):
        low, high = row[7]
        assert low < row[6] < high
        assert low <= published.expected + 0.05, "rounding explains the printed digit"
        assert high >= published.expected - 0.05, "rounding explains the printed digit"


def test_the_interval_is_that_of_all_rounded_inputs():
    low, high = paper_formulas.interval(0.68, 5, 0.04, 0.01, 0.01)
    draws = np.random.default_rng(0).uniform([0.675, 0.035], [0.685, 0.045], (2000, 2))
    values = [formulas.speedup(alpha, 5, c) for alpha, c in draws]
    assert low <= min(values)
    assert max(values) <= high
    assert (min(values), max(values)) == pytest.approx((low, high), abs=0.01)


def test_appendix_a5():
    """T=0 to the digit at gamma = 8; T=1 is above what any gamma allows, by 4 to 7 percent."""
    for row in paper_formulas.lenience().rows:
        temperature, value, published, verdict = row[0], row[4], row[6], row[7]
        if temperature == 0:
            assert f"{value:.1f}" == f"{published:.1f}"
            assert verdict == "yes"
        else:
            assert 1.035 < published / value < 1.075
            assert "interval" not in verdict


def test_figures_are_the_formulas():
    for row in paper_formulas.figure_2().rows:
        assert row[1:-1] == tuple(formulas.expected_tokens(row[0], g) for g in paper_formulas.GAMMAS)
    for row in paper_formulas.figure_3().rows:
        best = [int(np.argmax([formulas.speedup(row[0], g, c) for g in range(60)])) for c in paper_formulas.COSTS]
        assert list(row[1:]) == best
    speeds, operations = paper_formulas.figure_4().picture.panels
    at = paper_formulas.ALPHAS.index(0.9)
    assert speeds.curves[-1].ys[at] == pytest.approx(6.86, abs=5e-3), "table 1 is on the curves of figure 4"
    assert operations.curves[-1].ys[at] == pytest.approx(1.60, abs=5e-3)


def test_the_trace_adds_up():
    figure = paper_formulas.figure_5()
    for (name, bars), row in zip(figure.picture.rows, figure.rows, strict=True):
        ends = [bar.start + bar.length for bar in bars]
        assert [bar.start for bar in bars[1:]] == pytest.approx(ends[:-1]), f"{name}: passes follow each other"
        assert sum(bar.kind == "target" for bar in bars) == row[1]
        assert sum(bar.kind == "draft" for bar in bars) == row[2]
        assert ends[-1] == pytest.approx(row[3])
    assert figure.rows[-1][1] == paper_formulas.TRACE_TOKENS, "plain decoding has a pass for each token"


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_a_terminal(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for make in paper_formulas.EXHIBITS.values():
        exhibits.print_exhibit(make(), make_console())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines), "a cell was cut"


def test_records_keep_every_column():
    for make in paper_formulas.EXHIBITS.values():
        one = make()
        assert all(len(row) == len(one.columns) for row in exhibits.record_of(one)["rows"])
    (first, *_) = exhibits.record_of(paper_formulas.table_1())["rows"]
    assert (first["operations published"], first["speed published"]) == (1.53, 1.96)


def test_cells_are_written_once():
    tokens = exhibits.Tokens((exhibits.Token("a", "accepted"), exhibits.Token("b", "rejected")))
    assert exhibits.written(tokens, Column("")) == "a[-b-]"
    assert exhibits.written((1.0, 2.0), Column("", form="{:.1f}")) == "1.0-2.0"
    assert exhibits.written(None, Column("", form="{:.1f}")) == "-"


def test_recipes_name_what_was_measured():
    plan = PaperPlan(drafts=("a b",), ngram=Path("n"), num_tokens=512, spec_lengths=(2,), seed=3)
    said = "--measure --target t --draft 'a b' --tokens 512 --ngram n --spec-length 2 --seed 3"
    recipe = plan.recipe("independence", "t", "num_tokens", "ngram", "spec_lengths")
    assert recipe == f"python -m benchmarks.paper independence {said}"


def test_what_is_refused(tmp_path):
    with pytest.raises(BadOption, match=r"no table or figure 'table-9'.*table-4"):
        paper.run(PaperPlan(names=("table-9",)), None)
    assert "table-3 is measured: add --measure" in refusal(BadOption, paper.run, PaperPlan(names=("table-3",)), None)
    assert "forerun train ngram" in refusal(NotFound, paper.run, PaperPlan(ngram=tmp_path / "none"), None)
    with pytest.raises(BadOption, match="name one with --draft"):
        paper.run(PaperPlan(names=("table-3",)), EngineConfig.make(target="elsewhere"))
    if "matplotlib" not in sys.modules and not exhibits.can_draw():
        with pytest.raises(BadOption, match=r"pip install '\.\[plots\]'"):
            paper.run(PaperPlan(names=("table-1",), out=tmp_path), None)


def test_formulas_need_no_torch():
    code = "import sys; from benchmarks import paper, start\ntry: start.start(paper.command, ['table-1'])\n"
    code += "except SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_files(tmp_path):
    pytest.importorskip("matplotlib")
    made = paper.run(PaperPlan(names=("table-4", "figure-5"), out=tmp_path), None)
    assert [one.name for one in made] == ["table-4", "figure-5"]
    for name in ("table-4", "figure-5"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert record["exhibit"] == name
        assert record["recipe"] == f"python -m benchmarks.paper {name}"
    rows = json.loads((tmp_path / "table-4.json").read_text())["rows"]
    assert rows[0]["EXP"] == 3.2
    assert rows[0]["by rounding"] == pytest.approx(paper_formulas.table_4().rows[0][7])


# ------------------------------------------------------------------------------------------------------------ measured


@pytest.fixture(scope="module")
def measured():
    """Every measured table on the shipped pair, from few tokens, with tables counted from the prompts."""
    target = Opened.of(EngineConfig.make(target="shipped")).load()
    draft = load_checkpoint(SHIPPED_DRAFT, dtype=target.model.weight_dtype, ops=target.model.ops, with_tokenizer=True)
    drafts = paper_alpha.named_by_size({"model": draft})
    return paper_alpha.measure(target, drafts, None, 300, seed=1), target, draft


def test_alpha_is_the_mean_of_the_overlaps(measured):
    """Two estimates of alpha on the same texts, E[sum min(p, q)] and E[min(1, q(x) / p(x))], agree."""
    found, _, _ = measured
    for setting in ("T=0", "T=1", "T=1, top-k 40"):
        one = found.acceptances[setting, "1.9 M"]
        assert 0.5 < one.alpha < 1
        ratios, overlaps = np.concatenate(one.ratio), np.concatenate(one.overlap)
        assert len(ratios) >= 300
        error = np.std(ratios - overlaps, ddof=1) / len(ratios) ** 0.5
        assert ratios.mean() == pytest.approx(overlaps.mean(), abs=4 * error + 1e-6)
    assert set(np.unique(np.concatenate(found.acceptances["T=0", "1.9 M"].overlap))) <= {0.0, 1.0}


def test_lenience_raises_alpha(measured):
    found, _, _ = measured
    for setting in ("T=0", "T=1"):
        alphas = found.acceptances[setting, "1.9 M"].alphas_by_lenience
        assert alphas == sorted(alphas)
        assert alphas[0] == pytest.approx(found.acceptances[setting, "1.9 M"].alpha, abs=1e-6), "l = 1 is exact"


def test_the_logits_are_those_that_the_engine_draws_from(measured):
    """A greedy text has the largest logit at every position."""
    _, target, _ = measured
    for text in texts(LLM(target, draft="none"), SETTINGS["T=0"], 64, 1):
        assert _model_logits(target, len(text.ids))(text).argmax(-1).tolist() == text.own


def test_measured_exhibits(measured, capsys, monkeypatch):
    found, target, draft = measured
    work = Work(PaperPlan(spec_lengths=(3, 5)), EngineConfig())
    work.alphas = found
    made = [one for name in ("table_3", "table_5", "independence") for one in exhibits_of(name, work)]
    figure_1 = importlib.import_module("benchmarks.paper_exhibits.figure_1")
    made.append(figure_1.figure_1(target, draft, 1, "again"))
    for one in made:
        assert len({len(row) for row in one.rows} | {len(one.columns)}) == 1
        json.dumps(exhibits.record_of(one))
        exhibits.print_exhibit(one, make_console())
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    table, figure = made[0], made[3]
    assert [row[4] for row in table.rows] == [0.88, 0.89, None]
    kinds = [token.kind for row in figure.rows for token in row[2].tokens]
    assert sum(kind not in ("rejected", "untested") for kind in kinds) == figure_1.FIGURE_TOKENS
    passes = [sum(token.kind == "accepted" for token in row[2].tokens) for row in figure.rows]
    assert [row[1].split("/")[0] for row in figure.rows[:-1]] == [str(num) for num in passes[:-1]]


def test_rounds_along_a_text_count_dependence():
    """Products along the text, not powers of alpha: runs of three accepted, then three rejected."""
    text = np.array([1.0, 1, 1, 0, 0, 0] * 50)
    one = Acceptances([text, text], [text, text])
    assert one.alpha == 0.5
    assert one.correlation() > 0.3
    starts = [1 + sum(np.prod(text[s : s + i]) for i in (1, 2)) for s in range(len(text) - 1)]
    assert one.tokens(2).mean == pytest.approx(np.mean(starts))
    assert one.tokens(2).mean > formulas.expected_tokens(0.5, 2)


def line(draft, spec_length, temperature, speedup, expected):
    speed = {"tokens_per_s": 10 * speedup, "speedup": speedup, "speedup_range": (speedup - 0.1, speedup + 0.1)}
    costs = {"c": 0.01, "v": 1.1, "overhead_share": 0.02}
    theory = {"theorem_3_8": formulas.speedup(0.8, spec_length, 0.01), "expected": expected}
    tokens = formulas.expected_tokens(0.8, spec_length) * 0.9
    accepted = {"tokens_per_step": tokens, "alpha_hat": 0.8, "acceptance_rate": 0.5}
    return Line(draft, spec_length, temperature, **speed, **accepted, **costs, **theory)


def test_tables_of_speeds(capsys):
    speeds = {("a", 3, 0.0): 2.0, ("a", 5, 0.0): 2.5, ("b", 3, 0.0): 1.5, ("a", 3, 1.0): 1.8, ("b", 3, 1.0): 1.2}
    lines = [line("none", 0, 0.0, 1.0, None), *(line(*key, speed, 1.25 * speed) for key, speed in speeds.items())]
    found = Measured(lines, None, [], None)
    table = table_2.table_2(found, {"a": "0.3 M", "b": "1.9 M"}, "On paper.", "again")
    best = [("0.3 M", 0, 5, 2.5), ("1.9 M", 0, 3, 1.5), ("0.3 M", 1, 3, 1.8), ("1.9 M", 1, 3, 1.2)]
    assert [(*row[:3], row[5]) for row in table.rows] == best
    assert [row[-1] for row in table.rows] == [3.4, 2.8, 2.6, 2.4], "published, EnDe, by the order of sizes"
    all_lengths = table_2.table_4_measured(found, {"a": "0.3 M", "b": "1.9 M"}, "On paper.", "again")
    assert len(all_lengths.rows) == 5
    for one in (table, all_lengths):
        exhibits.print_exhibit(one, make_console())
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    assert exhibits.record_of(table)["rows"][0]["published alpha"] == 0.75
    assert exhibits.record_of(all_lengths)["rows"][0]["measured"] == 2.0
    for row in all_lengths.rows:
        assert row[6] == pytest.approx(-0.1), "tokens over equation (1)"
        assert row[-1] == pytest.approx(-0.2), "measured over what costs let expect"


def test_tables_as_guessers(tmp_path):
    arrays = {"counts": [1, 3, 0], "starts": [0, 0, 2, 2], "followers": [0, 1], "follower_counts": [2, 1]}
    table = FittedTable({name: np.array(numbers) for name, numbers in arrays.items()})
    for row in _table_logits(table, 1, 3)(Text([1, 1, 0], 1)).softmax(-1):
        assert row.tolist() == pytest.approx([0.25, 0.75, 0.0])
    (row,) = _table_logits(table, 2, 3)(Text([0, 1, 1], 2)).softmax(-1)
    assert row.tolist() == pytest.approx([2.25 / 4, 1.75 / 4, 0.0])  # counts 2 and 1, and one occurrence of .25, .75
    assert torch.isneginf(_table_logits(table, 1, 3)(Text([0, 0], 1))[0, 2])
