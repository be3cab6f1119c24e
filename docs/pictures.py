"""Draws the pictures of the documentation: `python docs/pictures.py architecture` and `python docs/pictures.py demo`.

architecture.svg has the layers of pyproject.toml, with an arrow for each room that imports another, from the code; a
test compares it with the code. demo.svg is a real run of `forerun demo` with SmolLM2, as the terminal showed it.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "forerun"
HIDDEN = {"__main__", "errors", "types", "params", "native", "registry", "config"}  # which every room uses
WIDTH, ROW, BOX, HEIGHT = 920, 92, 118, 40


def layers() -> list[list[str]]:
    """Return the rooms by layer, the highest first, as import-linter enforces them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(c for c in project["tool"]["importlinter"]["contracts"] if c["id"] == "rooms")
    rows = [[room.strip() for room in layer.split("|")] for layer in contract["layers"]]
    return [kept for row in rows if (kept := [room for room in row if room not in HIDDEN])]


def file_imports() -> dict[str, set[str]]:
    """Return, by file, the files of the package that it imports, in functions too, but not for type checkers alone."""
    files = {path: ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in SOURCE.rglob("*.py")}
    names = {name.removesuffix(".__init__") for name in files.values()}
    found: dict[str, set[str]] = {}
    for path, file in files.items():
        tree, own = ast.parse(path.read_text(encoding="utf-8")), file.removesuffix(".__init__")
        for_checkers = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        skipped = {id(inner) for node in for_checkers for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in skipped and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    module = full if full in names else node.module
                    if module in names and module != own:
                        found.setdefault(own, set()).add(module)
    return found


def imports() -> set[tuple[str, str]]:
    """Return (room, room that it imports) of all imports between rooms."""
    pairs: set[tuple[str, str]] = set()
    for file, others in file_imports().items():
        pairs |= {(file.split(".")[1], other.split(".")[1]) for other in others if "." in file and "." in other}
    return {(a, b) for a, b in pairs if a != b and (SOURCE / b).is_dir() and a not in HIDDEN}


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


def demo() -> str:
    """Draw the SVG of a real run, without the class that is edited, its plain edit, and the advice at the end."""
    from rich.console import Console
    from rich.text import Text

    from forerun.models.named import named_models

    command = [sys.executable, "-m", "forerun", "demo"]
    env = {**os.environ, "TERM": "xterm-256color", "FORCE_COLOR": "1", "COLUMNS": "88"}
    if not named_models()["smollm2"].is_here():
        raise SystemExit(f"the picture shows SmolLM2: {named_models()['smollm2'].how_to_get}")
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    console = Console(record=True, width=88, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    shown = Text.from_ansi("$ make demo\n" + done.stdout.split("With a model of your own")[0].rstrip()).split("\n")
    begin = next(i for i, line in enumerate(shown) if line.plain.startswith("=== 1."))
    end = next(i for i, line in enumerate(shown) if i > begin and line.plain.startswith("--- with speculation"))
    console.print(Text("\n").join([*shown[: begin + 3], Text("...", "dim"), *shown[end:]]))
    return console.export_svg(title="forerun demo")


if __name__ == "__main__":
    picture = sys.argv[1]
    (ROOT / "docs" / f"{picture}.svg").write_text(
        {"architecture": architecture, "demo": demo}[picture](), encoding="utf-8"
    )
