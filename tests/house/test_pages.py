"""What documents say of the code is what the code says, and a method is a file and a page, of any form."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from forerun import verify
from forerun.registry import names
from house.site import pages
from serve.test_apis import TOY

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ROOMS = ("drafters", "verify", "pacing")
MOST_ON_TOP = 12  # pages of docs/ that stand in no folder
NAME = "followers"  # of the drafter that is added
WRITTEN = {"README.md", "docs/drafters.md", "docs/methods/README.md"}  # by `make pages`, behind a new drafter
COPIED = ("src", "tests", "docs", "examples", "benchmarks", "heads", "csrc", "deploy", ".ci", ".github")
# Of each file of house tests those that a drafter or its page could break.
CONCERNED = {
    "test_pages.py": "not test_a_drafter_is_two_files and not test_an_api_is_one_file",
    "test_site.py": "",
    "test_house.py": "not (test_import_is_light or test_help_imports)",
    "test_docs.py": f"(README or {NAME}) and not test_examples_run",
    "test_lossless.py": NAME,
}
TIMEOUT_S = 900


def test_pages_say_what_the_code_says() -> None:
    wrong = [
        file.relative_to(ROOT).as_posix()
        for file, text in pages.texts().items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    ]
    assert not wrong, f"run make pages: {', '.join(wrong)}"


def test_each_method_has_a_page() -> None:
    """Names are unique over the rooms, for a page is found by its name."""
    methods = [name for room in ROOMS for name in names(f"forerun.{room}")]
    written = sorted(path.stem for path in (DOCS / "methods").glob("*.md") if path.stem != "README")
    assert written == sorted([*methods, pages.SEARCH]), "a method is described in docs/methods/NAME.md"


@pytest.mark.parametrize("rule", [name for name in verify.rules() if not verify.find(name).is_lossless])
def test_a_page_warns_of_a_lossy_rule(rule: str) -> None:
    """A reader who takes it has seen that the output is another one."""
    page = (DOCS / "methods" / f"{rule}.md").read_text(encoding="utf-8")
    assert "**Lossy: the output does not have the target's distribution" in page.partition("\n## ")[0]


def test_the_first_level_is_short() -> None:
    assert len(list(DOCS.glob("*.md"))) <= MOST_ON_TOP, "a page belongs below use/, study/ or development/"


def test_a_part_stands_in_a_line_or_around_lines() -> None:
    known = {"a": lambda: "1", "b": lambda: "2"}
    page = "x <!-- begin: a -->7<!-- end -->, <!-- begin: b --><!-- end --> y\n\n<!-- begin: a -->\n<!-- end -->\n"
    wanted = (
        "x <!-- begin: a -->1<!-- end -->, <!-- begin: b -->2<!-- end --> y\n\n<!-- begin: a -->\n\n1\n\n<!-- end -->\n"
    )
    assert pages.with_parts(page, known, "") == wanted
    assert pages.with_parts(wanted, known, "") == wanted
    with pytest.raises(ValueError, match=r"page\.md: nothing is known as 'c'; it must be one of a, b"):
        pages.with_parts("<!-- begin: c --><!-- end -->", known, "page.md")


def test_a_sentence_ends_where_it_ends() -> None:
    module = type("M", (), {"__doc__": "A rule (Leviathan et al. 2023; a | b):\nit judges. It is fast.\n\nMore."})
    assert pages.first_sentence(module) == r"A rule (Leviathan et al. 2023; a \| b): it judges."


# ------------------------------------------------------------------------------- a drafter is two files, an API is one


@pytest.fixture
def copy() -> Iterator[Path]:
    """A copy of what the house tests read, where everything is staged."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        for file in [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]:
            shutil.copy(file, folder / file.name)
        git(folder, "init", "-q")
        git(folder, "config", "core.compression", "0")
        git(folder, "add", "-A")
        yield folder


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def run_in(folder: Path, *words: str) -> None:
    env = {**os.environ, "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout[-8000:]}{done.stderr[-2000:]}"


@pytest.mark.skipif(shutil.which("git") is None, reason="what changed is told by git")
def test_a_drafter_is_two_files(copy: Path) -> None:
    """A module, and a page with headings of its own: `make pages` does the rest, and the house tests pass."""
    example = (copy / "examples" / "add_drafter.py").read_text(encoding="utf-8")
    code = example.split('"""', 2)[2].partition("def main()")[0].strip() + "\n"
    module, page = f"src/forerun/drafters/{NAME}.py", f"docs/methods/{NAME}.md"
    (copy / module).write_text(f'"""Draw from what followed the last token in the text."""\n\n{code}', encoding="utf-8")
    (copy / page).write_text("# Followers\n\nIt counts pairs.\n\n## As one likes\n\nAnd draws.\n", encoding="utf-8")
    run_in(copy, "docs/site/pages.py")
    assert set(git(copy, "diff", "--name-only").split()) == WRITTEN
    assert set(git(copy, "ls-files", "--others", "--exclude-standard").split()) == {module, page}
    text = (copy / page).read_text(encoding="utf-8")
    assert text.startswith("# Followers\n\nIt counts pairs.\n\n## As one likes\n\nAnd draws.\n\n<!-- begin: options of")
    assert "| `min_count` | 1 to 1000 | 1 | occurrences before a pair is used |" in text
    git(copy, "add", "-A")
    expression = " or ".join(f"({file} and ({tests}))" if tests else file for file, tests in CONCERNED.items())
    files = [f"tests/house/{file}" for file in CONCERNED]
    run_in(copy, "-m", "pytest", "-p", "no:cacheprovider", *files, "-k", expression)
    assert not git(copy, "diff", "--name-only")


@pytest.mark.skipif(shutil.which("git") is None, reason="what changed is told by git")
def test_an_api_is_one_file(copy: Path) -> None:
    """`make pages` writes its routes, and the tests of all fields know it."""
    module = "src/forerun/serve/apis/toy.py"
    (copy / module).write_text(f"{TOY.strip()}\n", encoding="utf-8")
    run_in(copy, "docs/site/pages.py")
    assert git(copy, "diff", "--name-only").split() == ["docs/serve.md"]
    assert git(copy, "ls-files", "--others", "--exclude-standard").split() == [module]
    tests = ["tests/house/test_pages.py::test_pages_say_what_the_code_says", "tests/serve/test_without_effect.py"]
    run_in(copy, "-m", "pytest", "-p", "no:cacheprovider", *tests)
