"""The clients of `make clients`, which run at night, are all there: as functions, with versions, and on their page."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "tests" / "clients"
VERSIONS = tomllib.loads((PLACE / "versions.toml").read_text(encoding="utf-8"))
PINNED = re.compile(r"(?P<name>@?[\w./-]+?)(\[\w+\])?(==|@)(?P<version>\d[\w.]*)")
NODE = "node"  # what runs the others


def test_each_has_a_function_and_a_version() -> None:
    tree = ast.parse((PLACE / "clients.py").read_text(encoding="utf-8"))
    (table,) = [node for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CLIENTS"]
    assert isinstance(table.value, ast.Dict)
    names = [ast.literal_eval(key) for key in table.value.keys if key is not None]
    assert [*names, NODE] == list(VERSIONS)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for value in table.value.values:
        assert ast.get_docstring(functions[ast.unparse(value)]), "what it does is printed"


def test_their_page_has_the_versions_that_are_installed() -> None:
    page = (ROOT / "docs" / "use" / "clients.md").read_text(encoding="utf-8")
    for name, wanted in VERSIONS.items():
        assert set(wanted) <= {"pip", "npm"}
        for package in [one for packages in wanted.values() for one in packages]:
            found = PINNED.fullmatch(package)
            assert found, f"{package} of {name} has no exact version"
            if name != NODE and found["name"] != "zod":
                assert found["version"] in page, f"docs/use/clients.md has no {package}"


def test_one_that_is_not_known_is_refused() -> None:
    command = [sys.executable, str(PLACE / "run.py"), "nobody"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "nobody" in done.stderr, "lm-eval" in done.stderr) == (2, True, True)
