"""Pictures of docs/ are those of the code and of the results, and so are tables; every room has its paragraph."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
assert spec is not None
assert spec.loader is not None
pictures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pictures)


def test_the_picture_is_that_of_the_code() -> None:
    drawn = (ROOT / "docs" / "development" / "architecture.svg").read_text(encoding="utf-8")
    assert drawn == pictures.architecture(), "draw it again: python docs/pictures.py architecture"


def test_the_pair_has_one_set_of_numbers() -> None:
    results = pictures.read_pair()
    again = "write it again: python docs/pictures.py pair"
    assert (ROOT / "docs" / "pair.svg").read_text(encoding="utf-8") == pictures.pair_picture(results), again
    pages = pictures.pair_pages(results)
    assert {"README.md", "numbers.md", "which-draft.md"} <= {file.name for file in pages}
    for file, wanted in pages.items():
        assert file.read_text(encoding="utf-8") == wanted, f"{file.name}: {again}"
    for line in (line for run in results["runs"] for line in run["lines"]):
        for values in (line["whole"], line["behind"]):
            kinds = [value for kind, value in values.items() if kind != "all"]
            assert abs(geometric_mean(kinds) / values["all"] - 1) < 0.01, line["name"]


def test_every_room_is_described() -> None:
    page = (ROOT / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")
    rooms = [path.name for path in (ROOT / "src" / "forerun").iterdir() if (path / "__init__.py").exists()]
    assert not [room for room in rooms if f"**{room}**" not in page]


def test_no_circle_of_files() -> None:
    """Files import each other in one direction, also inside of a room; in functions and for type checkers, too."""
    graph = pictures.file_imports()
    assert "forerun.engine.llm" in graph["forerun"], "for type checkers alone"
    assert "forerun.ops.cuda.sampling_kernels" in graph["forerun.ops.cuda.sampling"], "as a string"
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*way, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
