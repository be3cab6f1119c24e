"""The summary task: a docstring of an installed package without its first sentence, and that sentence.

The source is the signature and what the docstring says behind its first sentence, which whoever wrote the code meant
as the summary: it is the target. Whole folders of packages, and whole modules of the standard library, are held
out.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from forerun.train.corpus import list_sources, read_source, stdlib_folder

PREFIX = "summarize: "
SOURCE_CHARACTERS = 360
SIGNATURE_CHARACTERS = 100
MOST_CHARACTERS, LEAST_WORDS = 110, 3  # of a first sentence
SKIPPED = frozenset({"tests", "test", "_vendor", "testing", "__pycache__"})


def installed_sources() -> Iterator[tuple[str, Path]]:
    """Yield Python files, sorted, with what is held out as one: the module, or the folder of a package."""
    stdlib = stdlib_folder()
    for name in list_sources(stdlib):
        yield name.split("/")[0].removesuffix(".py"), stdlib / name
    site = Path(sysconfig.get_paths()["purelib"])
    for path in sorted(site.rglob("*.py")):
        parts = path.relative_to(site).parts
        if len(parts) > 1 and not SKIPPED & set(parts) and "forerun" not in parts[0]:
            yield "/".join(parts[:-1]), path


def summaries(path: Path) -> Iterator[tuple[str, str]]:
    """Yield source and target of every documented function and class of a file; nothing for one that is no Python."""
    text = read_source(path)
    if text is None or '"""' not in text:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in other people's texts
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = example(node)
            if found is not None:
                yield found


def example(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> tuple[str, str] | None:
    """Return source and target of a docstring; None where its first sentence is long or no text, or all."""
    said = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
    paragraph, _, below = said.partition("\n\n")
    first, _, more = " ".join(paragraph.split()).partition(". ")
    first = first.removesuffix(".") + "."
    rest = " ".join(f"{more} {below}".split())
    is_text = first[0].isalpha() and first.isascii() and len(first.split()) >= LEAST_WORDS
    if not is_text or len(rest) < 20 or len(first) > MOST_CHARACTERS or first.endswith(":."):
        return None
    source = f"{PREFIX}{signature(node)} {rest}"
    if len(source) > SOURCE_CHARACTERS:
        source = source[:SOURCE_CHARACTERS].rpartition(" ")[0]
    return source, first


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """Return the name, and the names of the arguments."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    args = node.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs) if arg.arg not in ("self", "cls")]
    whole = f"{node.name}({', '.join(names)})"
    return whole if len(whole) <= SIGNATURE_CHARACTERS else whole[:SIGNATURE_CHARACTERS].rpartition(",")[0] + ", ...)"
