"""The summary task: the sentences of a docstring in another order, and the one of them that sums it up.

The source is the signature and sentences of an installed package's docstring, shuffled; the target is the one that its
author wrote first, as the summary. So the words of a summary are to be found in its source, as most are in the news
summaries of the paper (extractive fragments, Grusky et al. 2018). Whole folders of packages, and whole modules of the
standard library, are held out.
"""

import ast
import inspect
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from forerun.train.corpus import list_sources, read_source, stdlib_folder

PREFIX = "summarize: "
SOURCE_CHARACTERS = 300
SIGNATURE_CHARACTERS = 100
MOST_CHARACTERS, LEAST_WORDS = 110, 3  # of a first sentence
ORDERS = 3  # in which the sentences of one docstring are told
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
    """Yield sources and target of every documented function and class of a file; nothing for one that is no Python."""
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
            yield from told(node)


def told(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield sources and target of a docstring; none where its first sentence is long, no text, or all."""
    first, *rest = sentences(inspect.cleandoc(ast.get_docstring(node, clean=False) or "")) or [""]
    is_text = first[:1].isalpha() and first.isascii() and len(first.split()) >= LEAST_WORDS
    if not is_text or not rest or len(first) > MOST_CHARACTERS or first.endswith(":."):
        return
    begin = f"{PREFIX}{signature(node)}"
    kept = [first]
    for sentence in rest:
        left = SOURCE_CHARACTERS - len(" ".join([begin, *kept])) - 1
        cut = sentence if len(sentence) <= left else sentence[: left + 1].rpartition(" ")[0]
        if not cut:
            break
        kept.append(cut)
    if len(kept) == 1:
        return
    rng = random.Random(f"{begin} {first}")
    for order in dict.fromkeys(tuple(rng.sample(kept, len(kept))) for _ in range(ORDERS)):
        yield " ".join([begin, *order]), first


def sentences(docstring: str) -> list[str]:
    """Return the sentences, one line each, with their periods; a paragraph ends a sentence."""
    pieces = [piece for paragraph in docstring.split("\n\n") for piece in " ".join(paragraph.split()).split(". ")]
    return [piece.removesuffix(".") + "." for piece in pieces if piece.strip(". ")]


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """Return the name, and the names of the arguments."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    args = node.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs) if arg.arg not in ("self", "cls")]
    whole = f"{node.name}({', '.join(names)})"
    return whole if len(whole) <= SIGNATURE_CHARACTERS else whole[:SIGNATURE_CHARACTERS].rpartition(",")[0] + ", ...)"
