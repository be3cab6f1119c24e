"""`forerun bench report`: records of every kind become one page that needs nothing else."""

import json
from html.parser import HTMLParser

import pytest

from benchmarks import paper_formulas
from forerun.bench import report
from forerun.bench.exhibits import record_of
from forerun.errors import BadOption, NotFound
from refusals import refusal

LATENCY = {
    "bench": "latency",
    "target": "a <b> & c",
    "build": "native",
    "lines": [
        {"draft": "none", "spec_length": 0, "temperature": 0.0, "speedup": 1.0, "speedup_range": [1.0, 1.0]},
        {"draft": "model", "spec_length": 5, "temperature": 0.0, "speedup": 2.5, "speedup_range": [2.0, 3.0]},
    ],
}
RATIO = {"values": [1, 1.1, 1.2], "median": 1.1, "range": [1, 1.2]}
THROUGHPUT = {
    "bench": "throughput",
    "lines": [
        {"concurrency": 1, "plain_tokens_per_s": 10, "fixed_tokens_per_s": 20.5, "auto_over_max": RATIO},
        {"concurrency": 4, "plain_tokens_per_s": 30, "fixed_tokens_per_s": 40.5, "auto_over_max": None},
    ],
}
UNKNOWN = {"bench": "tea", "lines": [{"leaves": 3}]}


class Page(HTMLParser):
    """What a test wants of a page: tags, texts, and whatever it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]
        self.ids += [v for k, v in attrs if k == "id" and tag in ("g", "section")]

    def handle_data(self, data):
        self.texts.append(data.strip())


def write(tmp_path, *records):
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_a_page_of_all_kinds(tmp_path):
    pytest.importorskip("matplotlib")
    pictures = [json.loads(json.dumps(record_of(make()))) for make in paper_formulas.EXHIBITS.values()]
    file = write(tmp_path, LATENCY, THROUGHPUT, UNKNOWN, *pictures)
    assert report.run([file], tmp_path / "out.html") == 3 + len(pictures)
    page = Page((tmp_path / "out.html").read_text())
    assert page.fetched == [], "it needs nothing else"
    assert page.tags.count("svg") == 2 + len(pictures)
    assert len(set(page.ids)) == len(page.ids) == 3 + len(pictures)
    for text in ("latency: a <b> & c", "2 - 3", "model", "1.1", "tea", "leaves"):
        assert text in page.texts, "escaped, and shown"
    assert "b" not in page.tags


def test_plots_hold_the_numbers():
    (panel,) = report.picture_of(LATENCY).panels
    assert panel.curves[0].xs == [1.0, 2.5]
    assert panel.curves[0].spans[1] == (2.0, 3.0)
    assert panel.names[1] == "model, spec length 5, temperature 0"
    curves = report.picture_of(THROUGHPUT).panels[0].curves
    assert [(curve.label, curve.xs, curve.ys) for curve in curves][1] == ("fixed tokens per s", [1, 4], [20.5, 40.5])
    assert report.picture_of(UNKNOWN) is None


def test_tables_begin_with_what_names_a_row():
    turned = {**LATENCY, "lines": [dict(reversed(row.items())) for row in LATENCY["lines"]]}
    assert list(report.rows_of(turned)[0])[:3] == ["draft", "spec_length", "temperature"]
    assert next(iter(report.rows_of(THROUGHPUT)[0])) == "concurrency"
    assert report.rows_of(THROUGHPUT)[0]["auto_over_max.median"] == 1.1


def test_every_picture_comes_back_from_its_record():
    for make in paper_formulas.EXHIBITS.values():
        record = json.loads(json.dumps(record_of(make())))
        assert type(report.picture_of(record)) is type(make().picture)
        assert json.loads(json.dumps(record_of(make())))["picture"] == record["picture"]


def test_what_is_no_record(tmp_path):
    assert "no file" in refusal(NotFound, report.read, tmp_path / "nothing")
    for text in ("no JSON\n", "", "[1]\n", "1\n2\n"):
        (tmp_path / "bad").write_text(text)
        assert "--json" in refusal(BadOption, report.read, tmp_path / "bad")
    assert report.read(write(tmp_path, LATENCY, UNKNOWN)) == [LATENCY, UNKNOWN]
