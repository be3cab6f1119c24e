"""Every room has its paragraph, and imports have no circle; the numbers of the pair are consistent."""

from pathlib import Path
from statistics import geometric_mean

from house.site import pictures

ROOT = Path(__file__).parents[2]


def test_the_pair_has_one_set_of_numbers() -> None:
    """Each mean over the kinds is theirs; `make pages` writes the numbers where a page names one."""
    for line in (line for run in pictures.read_pair()["runs"] for line in run["lines"]):
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
