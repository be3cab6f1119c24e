"""Rules of the package that no tool knows: what may import what, files that go together, and what protects users.

Style, docstrings, prints and what is left to do are ruff's, and the import order of the rooms is import-linter's: both
are set in pyproject.toml.
"""

import ast
import dataclasses
import functools
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from forerun import errors, registry
from forerun.errors import pip, program

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "forerun"
FILES = sorted(SOURCE.rglob("*.py"))
TEXTS = [
    path
    for folder in ("src", "tests", "docs", "examples", ".ci", ".github")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".md", ".toml", ".json", ".yml", ""}
    and path.is_file()
    and "__pycache__" not in path.parts
] + [path for path in sorted(ROOT.iterdir()) if path.suffix in {".md", ".toml", ".txt", ".yml", ".yaml"}]
TEXTS += [ROOT / name for name in ("Makefile", ".gitignore")]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The syntax tree of every file of the package."""
    return {path: parse(path) for path in FILES}


# ------------------------------------------------------------------------------------------------------- docstrings


def base_names(node: ast.ClassDef) -> list[str]:
    """The names of a class's bases; of a generic one without what stands in its brackets."""
    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return [base.id for base in bases if isinstance(base, ast.Name)]


def needs_none(node: Function) -> bool:
    """A Protocol's `...`, and a property of one line, which its name describes."""
    last = node.body[-1]
    is_stub = isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant) and last.value.value is ...
    is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
    return is_stub or (is_property and len(node.body) == 1)


def test_every_public_method_has_a_docstring() -> None:
    """Its own, or that of the method which it overrides; ruff sees no bases, so of methods it asks for none."""
    nodes = [
        (path, node) for path, tree in trees().items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    classes = {node.name: node for _, node in nodes}

    def documented(name: str) -> set[str]:
        if (node := classes.get(name)) is None:
            return set()
        own = {item.name for item in node.body if isinstance(item, Function) and ast.get_docstring(item)}
        return own.union(*map(documented, base_names(node)))

    missing = []
    for path, node in nodes:
        inherited = set().union(*map(documented, base_names(node)))
        missing += [
            f"{relative(path)}:{item.lineno} {node.name}.{item.name}"
            for item in node.body
            if isinstance(item, Function) and not node.name.startswith("_") and not item.name.startswith("_")
            if not (ast.get_docstring(item) or item.name in inherited or needs_none(item))
        ]
    assert not missing, "\n".join(["no docstring:", *missing])


# --------------------------------------------------------------------------------------------------- paths, packages

OF_A_MACHINE = re.compile(r"(?<![\w.])/(?:home|Users|root|work|mnt)/[\w.]+|[A-Z]:\\\\?Users")


def test_no_path_of_a_developers_machine() -> None:
    found = []
    for path in TEXTS:
        of_the_pair = SOURCE / "data" in path.parents  # holds words of the standard library, as tokens
        if path == Path(__file__) or (of_the_pair and path.name == "tokenizer.json"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{relative(path)}:{number} {match[0]}" for match in OF_A_MACHINE.finditer(line)]
    assert not found, "\n".join(found)


def test_no_text_asks_for_a_package_that_is_on_no_index() -> None:
    """Anyone could take the name of this package there, so extras are installed from the checkout."""
    texts = {path: path.read_text(encoding="utf-8") for path in TEXTS if path != Path(__file__)}
    found = [relative(path) for path, text in texts.items() if re.search(r"pip install [^\n]*forerun\[", text)]
    assert not found, found


CARD = {"README.md", "sources.txt"}  # of the shipped pair: what it was trained on, and how


def test_data_that_ships_is_asked_for() -> None:
    """Each file of the data folder is one that the package reads; what only a test or benchmark needs is there."""
    files = {path.name for path in (SOURCE / "data").iterdir() if path.is_file()} - CARD
    texts = [
        node.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
    ]
    assert files, "prompts, models that have a name, and options of others"
    assert not [name for name in files if not any(text.rpartition("/")[2] == name for text in texts)]


# ------------------------------------------------------------------------------------------------- imports and start


def fresh_python(code: str) -> str:
    """Run `code` in a new interpreter and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = ("numpy", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "jinja2")
WHAT_IS_LOADED = f"; print([name for name in {HEAVY} if name in __import__('sys').modules])"


@pytest.mark.parametrize("module", ["forerun", "forerun.types", "forerun.errors", "forerun.config", "forerun.cli.main"])
def test_import_is_light(module: str) -> None:
    """torch takes seconds to import: only what computes does it."""
    assert fresh_python(f"import {module}{WHAT_IS_LOADED}").strip() == "[]"


HELP = """
import sys
from forerun.cli.main import main
sys.argv = ["forerun", *{args}]
try:
    main()
except SystemExit:
    pass
"""


@pytest.mark.parametrize("command", ["", "generate", "demo", "bench", "bench latency", "bench widen", "train", "batch"])
def test_help_imports_nothing_heavy(command: str) -> None:
    help_ = HELP.format(args=[*command.split(), "--help"])
    printed = fresh_python(help_ + WHAT_IS_LOADED.removeprefix("; ")).splitlines()
    assert printed[-1] == "[]"
    assert any("Usage" in line for line in printed)


# ------------------------------------------------------------------------------------------------ methods are files


# Room -> argument names of `build`.
METHOD_ROOMS = {"drafters": ["options", "target"], "pacing": ["options", "spec_length", "costs"]}
METHODS = [(room, name) for room in METHOD_ROOMS for name in registry.names(f"forerun.{room}")]


@pytest.mark.parametrize(("room", "name"), METHODS)
def test_a_method_is_one_file(room: str, name: str) -> None:
    """Options: a frozen dataclass whose every field has help, and its unit or meaning in it. build: two arguments."""
    module = importlib.import_module(f"forerun.{room}.{name}")
    options = module.Options
    assert dataclasses.is_dataclass(options)
    assert options.__dataclass_params__.frozen
    for field in dataclasses.fields(options):
        assert field.metadata.get("help"), f"{name}:{field.name} has no help"
        assert field.metadata.keys() <= {"help", "min", "max"}
        assert field.default is not dataclasses.MISSING, f"{name}:{field.name} has no default"
    assert list(module.build.__annotations__)[:-1] == METHOD_ROOMS[room]


def test_no_other_file_names_a_method() -> None:
    """No module outside of a room imports its methods by name, except engine and bench defaults."""
    methods = {f"forerun.{room}.{name}": SOURCE / room for room, name in METHODS}
    importers = [
        f"{relative(path)} imports {node.module}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and path.parent != methods.get(node.module or "", path.parent)
    ]
    assert not importers, importers


@pytest.mark.parametrize("name", registry.names("forerun.verify"))
def test_a_verification_rule_is_one_file(name: str) -> None:
    """What it declares, and `rule`, which judges one sequence."""
    module = importlib.import_module(f"forerun.verify.{name}")
    assert module.Options.__dataclass_params__.frozen
    assert isinstance(module.LOSSLESS, bool)
    assert isinstance(module.NEEDS_ALL_ROWS, bool)
    assert set(module.SHAPES) <= {"chain", "tree"}
    assert set(module.DRAWS) <= {"point", "independent", "distinct", "any"}
    assert list(module.rule.__annotations__)[:-1] == ["draft", "b", "target_probs", "coins", "options"]


# --------------------------------------------------------------------------------------------------- the public door


def error_names() -> set[str]:
    """The names of all errors of the package."""
    return {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}


def test_the_public_names_exist_and_are_documented() -> None:
    forerun = importlib.import_module("forerun")
    assert {"LLM", "SamplingParams", "ForerunError"} <= set(forerun.__all__)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    docs = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for name in forerun.__all__:
        if name.startswith("__"):
            continue
        value = getattr(forerun, name)
        assert value.__doc__, f"forerun.{name} has no docstring"
        assert name in docs, f"forerun.{name} is not mentioned in README or docs"
    assert error_names() <= set(forerun.__all__)


def test_the_error_tree_is_drawn_completely() -> None:
    """errors.py and docs/use/errors.md name every error."""
    page = (ROOT / "docs" / "use" / "errors.md").read_text(encoding="utf-8")
    for name in error_names():
        assert name in (errors.__doc__ or ""), name
        assert name in page, name


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Lm"):
        _ = importlib.import_module("forerun").Lm


def test_what_installs_names_the_interpreter_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands that a message gives are errors.pip, for a bare pip may be another environment's."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pip("install x") == f"{shlex.quote(sys.executable)} -m pip install x"
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert pip("install x") == "python -m pip install x"
    found = [relative(path) for path in SOURCE.rglob("*.py") if re.search(r"\bpip install ", path.read_text("utf-8"))]
    assert not found, found


def test_a_program_is_named_as_a_shell_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "our env" / "bin"
    folder.mkdir(parents=True)
    (folder / "hf").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program("hf") == f"'{folder / 'hf'}'"
    assert program("forerun") == "forerun"  # it is not there
    for here, named in ((tmp_path, "'our env/bin/hf'"), (folder, f"'{folder / 'hf'}'")):
        monkeypatch.chdir(here)
        assert program("hf") == named
    monkeypatch.setenv("PATH", str(folder))
    assert program("hf") == "hf"
