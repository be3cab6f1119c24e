"""`forerun bench report`: the --json records of benchmarks, as one HTML page that needs no other file.

Every record gets its facts, a plot of its main numbers (inline SVG, by matplotlib), its table, and the record itself.
VIEWS selects the numbers to plot for each benchmark. A record of a benchmark that VIEWS does not list has no plot. The
tables and figures of `python -m benchmarks.paper --out` are records, too, and keep their own pictures.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from forerun.bench.exhibits import (
    Bar,
    Coloured,
    Curve,
    Exhibit,
    Panel,
    Plot,
    Timeline,
    Token,
    Tokens,
    check_can_draw,
    draw,
    save,
)
from forerun.errors import BadOption, NotFound, shown
from forerun.output_file import write_whole

Record = Mapping[str, Any]


@dataclass(frozen=True)
class View:
    """Selects the numbers of a benchmark's record that are plotted.

    rows: the field of the record with the list of rows. labels: the fields that name a row. values: the fields to
    plot, each as dots in its own panel. x: the field of the x axis. Where `x` is given, there is one panel with curves
    instead: one curve for each name and each field of `values`. The range of FIELD is in the field FIELD_range.
    """

    labels: tuple[str, ...]
    values: tuple[str, ...]
    x: str | None = None
    rows: str = "lines"


VIEWS = {
    "latency": View(("draft", "spec_length", "temperature"), ("speedup", "tokens_per_s")),
    "methods": View(("name", "temperature"), ("speedup", "tokens_per_pass"), rows="summaries"),
    "suite": View(("name", "temperature"), ("speedup", "tokens_per_pass"), rows="summaries"),
    "tune": View(("draft", "length"), ("measured", "tokens_per_pass"), rows="contenders"),
    "throughput": View((), ("plain_tokens_per_s", "fixed_tokens_per_s", "auto_tokens_per_s"), "concurrency"),
    "serving": View(("server", "load"), ("tokens_per_s", "ttft_s.p50")),
    "serving overhead": View(("way",), ("tokens_per_s", "share"), rows="overheads"),
    "kernels": View(("operator",), ("ratio",), "num_rows"),
    "quality": View(("variant",), ("perplexity", "drafter_alpha")),
    "gaps": View(("variant",), ("cold_s", "behind_median_s")),
    "peers": View(("engine", "configuration"), ("tokens_per_s",)),
    "peer forwards": View(("engine", "context"), ("seconds",), "num_rows"),
}
# Facts about models and machine, where a record has them.
FACTS = (
    *("target", "shape", "widened", "num_parameters", "precision", "dtype", "device", "machine", "build"),
    *("num_threads", "torch", "bandwidth_bytes_per_s", "ceiling_tokens_per_s", "recipe", "note"),
)
MOST_CURVES = 6  # of one panel: with more, colours would repeat

STYLE = """
:root { color-scheme: light dark; --line: #8886; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } section { margin: 3rem 0; }
.plot { background: #fff; border-radius: 8px; overflow-x: auto; padding: .5rem; }
.plot svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .875rem; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; font-size: .875rem; } dd { margin: 0; }
pre { font-size: .75rem; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def run(files: Seq[Path], out: Path) -> int:
    """Write the page `out` with the records of `files`, and return how many records it has.

    Raises NotFound for a missing file. Raises BadOption for a file without records, and if matplotlib is not installed.
    """
    check_can_draw()
    records = [(f"{file.name}, record {i}", record) for file in files for i, record in enumerate(read(file), 1)]
    write_whole(out, page_of(records))
    return len(records)


def read(file: Path) -> list[Record]:
    """Return the records of a file. The file holds one JSON object, or one JSON object per line.

    Raises NotFound if there is no file, and BadOption if the file holds no records.
    """
    if not file.is_file():
        raise NotFound(f"there is no file {shown(str(file))}: name what a benchmark wrote with --json")
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        records = [json.loads(text)]
    except ValueError:
        try:
            records = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise BadOption(
                f"{shown(str(file))} is no JSON ({error}): name what a benchmark wrote with --json"
            ) from None
    if not records or not all(isinstance(record, dict) for record in records):
        raise BadOption(f"{shown(str(file))} holds no record: name what a benchmark wrote with --json")
    return records


# --------------------------------------------------------------------------------------------------------------- html


def page_of(records: Seq[tuple[str, Record]]) -> str:
    """Return the HTML page of these records. records: for each record the name of its source, and the record."""
    titles = [_title(record) for _, record in records]
    entries = "".join(f'<li><a href="#r{i}">{escape(title)}</a></li>' for i, title in enumerate(titles))
    sections = "".join(
        _section(i, title, source, record)
        for i, (title, (source, record)) in enumerate(zip(titles, records, strict=True))
    )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return (
        f'<!doctype html><html lang="en"><head>{head}<title>forerun: benchmarks</title><style>{STYLE}</style></head>'
        f"<body><h1>forerun: benchmarks</h1><ol>{entries}</ol>{sections}</body></html>\n"
    )


def _title(record: Record) -> str:
    if "exhibit" in record:
        return str(record.get("title", record["exhibit"]))
    about = record.get("target") or record.get("shape") or ""
    return f"{record.get('bench', 'unknown benchmark')}{f': {about}' if about else ''}"


def _section(number: int, title: str, source: str, record: Record) -> str:
    """Return the HTML of one record: facts, plot, table, and the whole record as JSON.

    number: the number in the section's id, to which the page's links point. source: the file's name.
    """
    facts = {"file": source} | {key: record[key] for key in FACTS if record.get(key) not in (None, "")}
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(_number(value))}</dd>" for key, value in facts.items())
    picture = picture_of(record)
    plot = f'<div class="plot" role="img" aria-label="{escape(title)}">{svg_of(picture)}</div>' if picture else ""
    raw = escape(json.dumps(record, indent=1, ensure_ascii=False))
    return (
        f'<section id="r{number}"><h2>{escape(title)}</h2><dl>{listed}</dl>{plot}'
        f'<div class="wide">{table_of(rows_of(record))}</div>'
        f"<details><summary>the record</summary><pre>{raw}</pre></details></section>"
    )


def rows_of(record: Record) -> list[dict[str, Any]]:
    """Return the table rows of a record. Fields that name a row come first, and nested fields become object.field."""
    view = VIEWS.get(str(record.get("bench")))
    key = view.rows if view else "lines"
    if "exhibit" in record:
        key = "rows"
    rows = [dict(_flat(row)) for row in (record.get(key) or []) if isinstance(row, dict)]
    names = (*view.labels, *((view.x,) if view.x else ())) if view else ()
    return [{**{name: row[name] for name in names if name in row}, **row} for row in rows]


def _flat(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def table_of(rows: Seq[Mapping[str, Any]]) -> str:
    """Return rows as an HTML table. A column that holds lists is left out, unless the lists are pairs of numbers."""
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if not any(isinstance(row.get(name), list) and not _is_short(row[name]) for row in rows)
    ]
    if not names:
        return ""
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(_number(row.get(n)))}</td>" for n in names) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _is_short(value: list[Any]) -> bool:
    return len(value) == 2 and all(isinstance(one, int | float) for one in value)


def _number(value: Any) -> str:
    """Return a value as text for people: numbers with four digits, intervals with a dash."""
    if isinstance(value, list):
        return " - ".join(map(_number, value))
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------------------ pictures


def svg_of(picture: Plot | Timeline | Coloured) -> str:
    """Return a picture as inline SVG. The ids of groups are removed, because each picture of the page has equal ids."""
    file = io.StringIO()
    save(draw(Exhibit("", "", (), (), picture, "", "")), file, ".svg")
    svg = file.getvalue()
    return re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])


def picture_of(record: Record) -> Plot | Timeline | Coloured | None:
    """Return the picture of a record; None where VIEWS selects nothing in the record."""
    if "exhibit" in record:
        return _kept(record.get("picture") or {})
    view = VIEWS.get(str(record.get("bench")))
    rows = rows_of(record)
    if view is None or not rows:
        return None
    if view.x is not None:
        curves = list(_curves(view, rows, view.x))
        return Plot([Panel("", view.x.replace("_", " "), _said(view), curves)]) if curves else None
    names = [_name(row, view.labels) for row in rows]
    panels = [
        Panel(field.replace("_", " "), "", "", [_dots(field, rows)], names if i == 0 else [""] * len(names))
        for i, field in enumerate(view.values)
        if any(isinstance(row.get(field), int | float) for row in rows)
    ]
    return Plot(panels) if panels else None


def _said(view: View) -> str:
    return view.values[0].replace("_", " ") if view.labels else "tokens per s"


def _curves(view: View, rows: Seq[Mapping[str, Any]], x: str) -> Iterator[Curve]:
    """Yield the curves of a panel. Rows with the same name make one curve for each field of the view's `values`."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_name(row, view.labels), []).append(row)
    for name, group in list(groups.items())[:MOST_CURVES]:
        for field in view.values:
            known = [row for row in group if isinstance(row.get(field), int | float)]
            label = name or field.replace("_", " ")
            yield Curve(label, [float(row[x]) for row in known], [float(row[field]) for row in known])


def _name(row: Mapping[str, Any], labels: Seq[str]) -> str:
    """Return the name of a row, made of its label fields: texts as they are, and numbers after their labels."""
    known = {label: row[label] for label in labels if row.get(label) is not None}
    said = (
        value if isinstance(value, str) else f"{label.replace('_', ' ')} {value:g}" for label, value in known.items()
    )
    return ", ".join(said)


def _dots(field: str, rows: Seq[Mapping[str, Any]]) -> Curve:
    known = [(y, row) for y, row in enumerate(rows) if isinstance(row.get(field), int | float)]
    beside = [row.get(f"{field}_range") for _, row in known]
    spans = [(float(one[0]), float(one[1])) if isinstance(one, list) and _is_short(one) else None for one in beside]
    return Curve(field, [float(row[field]) for _, row in known], [float(y) for y, _ in known], "dots", spans)


def _kept(picture: Mapping[str, Any]) -> Plot | Timeline | Coloured | None:
    """Return the picture that an exhibit's record holds; None if the record has no picture."""
    if "panels" in picture:
        return Plot(
            [Panel(**{**panel, "curves": [Curve(**c) for c in panel["curves"]]}) for panel in picture["panels"]]
        )
    if "rows" in picture:
        return Timeline([(name, [Bar(*bar) for bar in bars]) for name, bars in picture["rows"]], picture["unit"])
    if "lines" in picture:
        return Coloured([Tokens(tuple(Token(*token) for token in line)) for line in picture["lines"]])
    return None
