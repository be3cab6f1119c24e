"""Draws pictures of the documentation, and makes the tables of the pair; docs/site/pages.py writes both.

architecture.svg has the layers of pyproject.toml, with an arrow for each room that imports another, from the code.
pair.svg, the tables of the pair and the numbers that link to it are what docs/pictures/pair.json says, so a new
measurement goes there and nowhere else. demo.svg is a real run of `forerun demo --pair`, as the terminal showed it, and
alone is drawn by hand: `python docs/site/pictures.py [RECORDED_RUN]`; FORERUN_PAIR may name the folder of the files.

pair.json: of each run the machine, the commit, the day, what ran, and lines. A line has how many times as many tokens
per second it made as plain decoding, by kind of work and over all: of the whole request, and of what follows the first
token (`behind`). is_shown: in README and in the picture, too. note: what the line does not share with its run.

A number in a text is a link with a title: `[1.37 (1.74)](numbers.md#a-real-pair "pair: draft, all")` is of the line
`draft` of the first run; `whole` behind the kind is the whole request alone, and `least` in its place the least kind.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "forerun"
HIDDEN = {
    "__main__",
    "errors",
    "types",
    "params",
    "native",
    "registry",
    "config",
    "version",
    "output_file",
}  # which every room uses
READS_NAMES = ("option", "stated", "names", "registry.names")  # of a room's files, none of which they import
WIDTH, ROW, BOX, HEIGHT = 920, 92, 118, 40
COLUMNS = 88  # of the terminal that is shown


def layers() -> list[list[str]]:
    """Return the rooms by layer, the highest first, as import-linter enforces them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(c for c in project["tool"]["importlinter"]["contracts"] if c["id"] == "rooms")
    rows = [[room.strip() for room in layer.split("|")] for layer in contract["layers"]]
    return [kept for row in rows if (kept := [room for room in row if room not in HIDDEN])]


def file_imports() -> dict[str, set[str]]:
    """Return, by file, the files of the package that it imports: in functions, for type checkers alone, and as strings.

    A string that names a file counts as an import, unless it is given to what only reads a room's names (READS_NAMES).
    """
    files = {path: ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in SOURCE.rglob("*.py")}
    names = {name.removesuffix(".__init__") for name in files.values()}
    found: dict[str, set[str]] = {}
    for path, file in files.items():
        tree, own = ast.parse(path.read_text(encoding="utf-8")), file.removesuffix(".__init__")
        nodes = list(ast.walk(tree))
        for_names = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) in READS_NAMES]
        skipped = {id(inner) for node in for_names for inner in ast.walk(node)}
        for node in nodes:
            imported = list[str]()
            if isinstance(node, ast.ImportFrom) and node.module:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                imported = [name if name in names else node.module for name in full]
            elif isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
                imported = [node.value] if "." in node.value else []
            found.setdefault(own, set()).update({name for name in imported if name in names} - {own})
    return found


def imports() -> set[tuple[str, str]]:
    """Return (room, room that it imports) of all imports between rooms."""
    pairs: set[tuple[str, str]] = set()
    for file, others in file_imports().items():
        pairs |= {(file.split(".")[1], other.split(".")[1]) for other in others if "." in file and "." in other}
    return {(a, b) for a, b in pairs if a != b and (SOURCE / b).is_dir() and not {a, b} & HIDDEN}


def architecture() -> str:
    """Draw the SVG with one row for each layer, and arrows from a room to those that it imports."""
    rows = layers()
    places = {
        room: (WIDTH * (i + 1) / (len(row) + 1), 40 + y * ROW)
        for y, row in enumerate(rows)
        for i, room in enumerate(row)
    }
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {len(rows) * ROW + 40}" '
        'font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#8a94a6"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for a, b in sorted(imports()):
        if a in places and b in places:
            (x, y), (to_x, to_y) = places[a], places[b]
            bottom, top = y + HEIGHT / 2, to_y - HEIGHT / 2
            lines.append(
                f'<path d="M{x:.0f} {bottom:.0f} C{x:.0f} {bottom + 30:.0f} '
                f'{to_x:.0f} {top - 30:.0f} {to_x:.0f} {top:.0f}" fill="none" stroke="#b8c0cc" marker-end="url(#tip)"/>'
            )
    for room, (x, y) in places.items():
        lines.append(
            f'<rect x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" height="{HEIGHT}" rx="8" '
            f'fill="#eef3fb" stroke="#4a6fa5"/><text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" '
            f'font-size="15">{room}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def read_pair() -> dict[str, Any]:
    """Return what docs/pictures/pair.json says."""
    found: dict[str, Any] = json.loads((ROOT / "docs" / "pictures" / "pair.json").read_text(encoding="utf-8"))
    return found


KINDS = {  # of work, as readers know them, from where drafting pays most
    "edit": "edits of code",
    "summary": "summaries",
    "question": "questions about a text",
    "list": "lists and tables",
    "chat": "chat",
    "story": "stories",
    "all": "all (geometric mean)",
}
COLOURS = ("#0f766e", "#b45309")  # of the lines that are shown
LEFT, RIGHT, BAR, GAP, TOP = 190, 60, 13, 16, 62  # of the picture, in pixels


NUMBER = re.compile(
    r'\[[^\]]*\](?P<rest>\([^)\s]*#a-real-pair "pair: (?P<id>[^,"]+), (?P<kind>\w+)(?P<whole>, whole)?"\))'
)


def with_numbers(page: str, results: dict[str, Any]) -> str:
    """Return a page with what pair.json says in the links that are numbers."""
    lines = {line["id"]: line for line in results["runs"][0]["lines"]}

    def written(found: re.Match[str]) -> str:
        line, kind = lines[found["id"]], found["kind"]
        if kind == "least":
            kind = min(KINDS, key=line["whole"].__getitem__)
            return f"[{line['whole'][kind]:.2f} ({KINDS[kind]})]{found['rest']}"
        behind = "" if found["whole"] else f" ({line['behind'][kind]:.2f})"
        return f"[{line['whole'][kind]:.2f}{behind}]{found['rest']}"

    return NUMBER.sub(written, page)


def pair_picture(results: dict[str, Any]) -> str:
    """Draw one panel for each run. Solid bars: the whole request; pale ones: what follows the first token."""
    most = max(v for run in results["runs"] for line in shown(run) for v in line["behind"].values())
    scale = (WIDTH - LEFT - RIGHT) / most
    lines, y = [], 0.0
    for run in results["runs"]:
        bars = shown(run)
        lines += _text(12, y + 22, f"{results['target']}, {run['machine']}", 'font-size="16" font-weight="bold"')
        for i, line in enumerate(bars):
            x = 12 + 300 * i
            lines.append(f'<rect x="{x}" y="{y + 36:.0f}" width="12" height="12" fill="{COLOURS[i]}"/>')
            lines += _text(x + 18, y + 47, line["name"], 'font-size="13"')
        top = y + TOP
        height = len(KINDS) * (len(bars) * (BAR + 2) + GAP)
        at_one = LEFT + scale
        lines.append(f'<path d="M{at_one:.1f} {top:.0f} V{top + height:.0f}" stroke="#6b7280" stroke-dasharray="4 3"/>')
        lines += _text(at_one, top + height + 14, "1 = plain decoding", 'font-size="12" text-anchor="middle"')
        y = top
        for kind, name in KINDS.items():
            weight = ' font-weight="bold"' if kind == "all" else ""
            lines += _text(
                LEFT - 10, y + len(bars) * (BAR + 2) / 2 + 5, name, f'font-size="14" text-anchor="end"{weight}'
            )
            for i, line in enumerate(bars):
                whole, behind = line["whole"][kind], line["behind"][kind]
                for value, opacity in ((max(whole, behind), 0.3), (whole, 1)):
                    lines.append(
                        f'<rect x="{LEFT}" y="{y:.0f}" width="{value * scale:.1f}" height="{BAR}" '
                        f'fill="{COLOURS[i]}" fill-opacity="{opacity}"/>'
                    )
                inside = 'font-size="11" text-anchor="end" fill="#ffffff"'
                lines += _text(LEFT + whole * scale - 4, y + BAR - 2.5, f"{whole:.2f}", inside)
                lines += _text(LEFT + max(whole, behind) * scale + 5, y + BAR - 2.5, f"{behind:.2f}", 'font-size="11"')
                y += BAR + 2
            y += GAP
        y += 24
    lines += _text(
        12,
        y + 8,
        "Times plain decoding's tokens per second; the texts are the same. Solid: the whole request. Pale: behind its "
        "first token.",
        'font-size="13"',
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 24:.0f}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *lines, "</svg>", ""])


def _text(x: float, y: float, text: str, more: str) -> list[str]:
    return [f'<text x="{x:.1f}" y="{y:.1f}" {more}>{text}</text>']


def shown(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of a run that README and the picture have."""
    return [line for line in run["lines"] if line.get("is_shown")]


def pair_tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables of a page by its name."""
    runs = results["runs"]
    columns = [(run, line) for run in runs for line in shown(run)]
    heads = [line["name"] + (f", {run['machine']}" if len(runs) > 1 else "") for run, line in columns]
    rows = [
        [KINDS[kind], *(f"{line['whole'][kind]:.2f} ({line['behind'][kind]:.2f})" for _, line in columns)]
        for kind in KINDS
    ]
    return {
        "README.md": _table(["work", *heads], rows),
        "numbers.md": _numbers(runs),
    }


def _numbers(runs: list[dict[str, Any]]) -> str:
    """Return a paragraph and a table for each run, with all of its lines."""
    parts = []
    for run in runs:
        rows = [
            [line["name"], *(f"{line['whole'][kind]:.2f} ({line['behind'][kind]:.2f})" for kind in KINDS)]
            for line in run["lines"]
        ]
        notes = [f"The line *{line['name']}* is {line['note']}." for line in run["lines"] if "note" in line]
        said = (
            f"On {run['machine']}: {run['prompts_per_kind']} prompts of each kind, at most {run['max_tokens']} tokens, "
            f"{run['rounds']} round{'s' * (run['rounds'] != 1)}; plain decoding makes {run['plain_tokens_per_s']} "
            f"tokens/s. "
            f"Commit {run['commit']}, {run['day']}. {' '.join(notes)}"
        )
        parts.append(f"{said.strip()}\n\n{_table(['', *KINDS], rows)}")
    return "\n\n".join(parts)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def demo() -> str:
    """Draw the SVG of a real run: of its first text how it came with speculation, and the table of all."""
    from rich.console import Console
    from rich.text import Text

    command = "forerun demo --pair --max-tokens 96"
    if len(sys.argv) > 1:  # such a run was recorded, as below
        printed = Path(sys.argv[1]).read_text(encoding="utf-8")
    else:
        env = {**os.environ, "TERM": "xterm-256color", "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
        words = [sys.executable, "-m", *command.split()]
        printed = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout
    lines = list(Text.from_ansi(f"$ {command}\n" + printed.split("With a model of your own")[0].rstrip()).split("\n"))

    def place(beginning: str, after: int = 0) -> int:
        return next(i for i, line in enumerate(lines) if i >= after and line.plain.startswith(beginning))

    first, fast, second, every = place("=== 1."), place("--- with"), place("=== 2."), place("=== All")
    dots = Text("...", "dim")
    kept = [*lines[: place("```", first)], dots, Text(), *lines[fast:second], dots, Text(), *lines[every:]]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(Text("\n").join(kept))
        return console.export_svg(title="forerun demo --pair")


if __name__ == "__main__":
    (ROOT / "docs" / "pictures" / "demo.svg").write_text(demo(), encoding="utf-8")
