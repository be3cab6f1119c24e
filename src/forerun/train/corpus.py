"""Reads the training text of the shipped pair: the source of the Python standard library, cut into three splits.

Whole modules are held out. Models learn from *train*. *validation* is for choosing recipes and reporting losses.
*bench* is only for the benchmark prompts. The list of files (sorted paths, relative to the standard library's folder)
depends only on the Python version, so that a run can be repeated elsewhere. Two corpora have the same
`Corpus.fingerprint` exactly if their data are equal. In other text, such as installed packages, whole folders are held
out.

The corpus leaves out tests, tables (encodings, entity lists, Unicode tables), documentation dumps, generated or
machine-dependent files, and installed packages. Such files hold data or repeated text, and no code to learn from.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import NotFound

SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "site-packages", "test", "tests", "idle_test", "pydoc_data", "encodings", "__phello__", "_bundled"}
)
SKIPPED_FILES = frozenset({"html/entities.py", "re/_casefix.py", "stringprep.py", "this.py", "antigravity.py"})
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")

# Ordinary, readable modules. A package counts as a whole ("json" holds out json/*.py).
VALIDATION_MODULES = frozenset(
    ["bisect", "calendar", "colorsys", "configparser", "copy", "fractions", "glob", "linecache", "queue", "textwrap"]
)
BENCH_MODULES = frozenset({"cmd", "contextlib", "csv", "fnmatch", "graphlib", "heapq", "json", "netrc", "pprint"}) | {
    *("sched", "shelve", "shlex", "statistics", "string", "timeit", "zipapp")
}
# For other text: the share of the text that each held-out split gets, and the largest share that one of its folders
# may have.
HELD_OUT_SHARE, MOST_OF_ONE = 0.01, 0.05


@dataclass(frozen=True)
class Document:
    """Holds one source file: its path, relative to the corpus folder, with forward slashes, and its normalised text."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Holds the documents of the three splits.

    Modules of the standard library are sorted by path within each split. Files of other text are sorted by hash
    instead, so that the beginning of a split is a sample of the whole split.
    """

    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    bench: tuple[Document, ...]

    def fingerprint(self) -> str:
        """Return the SHA-256 over split names, paths and texts. Two corpora with equal data have equal fingerprints."""
        digest = hashlib.sha256()
        for name in ("train", "validation", "bench"):
            for document in getattr(self, name):
                digest.update(f"{name}\0{document.path}\0{document.text}\0".encode())
        return digest.hexdigest()


def stdlib_folder() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def list_sources(folder: Path) -> list[str]:
    """Return the paths of the Python files below `folder` that belong to the corpus, sorted.

    The paths are relative to `folder`, with forward slashes.
    """
    relative = (path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return sorted(path for path in relative if is_wanted(path))


def is_wanted(path: str) -> bool:
    """Return whether the file at a relative path belongs to the corpus. The module's docstring lists the exclusions."""
    *folders, name = path.split("/")
    if SKIPPED_FOLDERS.intersection(folders) or path in SKIPPED_FILES or name.startswith("test_"):
        return False
    return not any(part.startswith(SKIPPED_PREFIXES) for part in path.split("/"))


def split_of(path: str) -> str:
    """Return the split of a relative path: "train", "validation" or "bench". A whole package is in one split."""
    module = path.split("/")[0].removesuffix(".py")
    if module in VALIDATION_MODULES:
        return "validation"
    return "bench" if module in BENCH_MODULES else "train"


def other_splits(sizes: Mapping[str, int]) -> dict[str, str]:
    """Return the split of each path, for text other than the standard library, where `split_of` holds out nothing.

    sizes: the number of characters, by path. All files of one folder are in the same split. A file outside folders
    counts as a folder of its own. Folders are held out in the order of their hashes, until each held-out split has the
    share HELD_OUT_SHARE of all characters. Folders with a share above MOST_OF_ONE are not held out.
    """
    groups: dict[str, list[str]] = {}
    for path in sizes:
        groups.setdefault(path.rpartition("/")[0] or path, []).append(path)
    whole = sum(sizes.values())
    splits = dict.fromkeys(sizes, "train")
    order = iter(sorted(groups, key=_hash))
    for split in ("validation", "bench"):
        held_out = 0
        while held_out < HELD_OUT_SHARE * whole and (group := next(order, None)) is not None:
            size = sum(sizes[path] for path in groups[group])
            if size <= MOST_OF_ONE * whole:
                splits |= dict.fromkeys(groups[group], split)
                held_out += size
    return splits


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def normalise(text: str) -> str:
    """Return the text with normalised white space, because invisible differences teach nothing and cost tokens.

    Line ends become \\n, and tabs become spaces up to the next multiple of 8 columns. White space at line ends is
    removed. At most two blank lines in a row are kept. The text ends with one newline.
    """
    lines = [line.expandtabs(8).rstrip() for line in text.replace("\r\n", "\n").replace("\f", "").split("\n")]
    kept: list[str] = []
    blanks = 0
    for line in lines:
        blanks = 0 if line else blanks + 1
        if blanks <= 2:
            kept.append(line)
    return "\n".join(kept).strip("\n") + "\n"


def read_source(path: Path) -> str | None:
    """Return the normalised text of one source file; None if the file cannot be decoded or has no text."""
    try:
        with tokenize.open(path) as file:
            text = normalise(file.read())
    except (SyntaxError, UnicodeDecodeError):
        return None
    return text if text.strip() else None


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read, normalise and split the Python files below `folder`. None = the standard library of the running Python.

    Raises NotFound where the folder has no Python file to train on.
    """
    root = folder or stdlib_folder()
    texts = {path: text for path in list_sources(root) if (text := read_source(root / path)) is not None}
    by_path = {path: split_of(path) for path in texts}
    if "validation" not in by_path.values():
        by_path = other_splits({path: len(texts[path]) for path in sorted(texts, key=_hash)})
    splits: dict[str, list[Document]] = {"train": [], "validation": [], "bench": []}
    for path, split in by_path.items():
        splits[split].append(Document(path, texts[path]))
    if not splits["train"]:
        raise NotFound(f"no Python sources to train on below {root}")
    return Corpus(*(tuple(splits[name]) for name in ("train", "validation", "bench")))


# ---------------------------------------------------------------------------------------------- benchmark prompts


@dataclass(frozen=True)
class Prompt:
    """Holds one held-out prompt.

    text: the prompt, which ends after a signature, a docstring or a statement. module: the path of the source file.
    """

    id: str
    module: str
    text: str


def bench_prompts(
    documents: tuple[Document, ...],
    count_tokens: Callable[[str], int],
    limit: int = 240,
    min_tokens: int = 40,
    max_tokens: int = 120,
    seed: int = 0,
) -> list[Prompt]:
    """Return at most `limit` prompts from held-out documents. The same `seed` gives the same prompts.

    A prompt consists of whole lines. Its last line ends a signature, a docstring or a statement of a body. A prompt has
    `min_tokens` to `max_tokens` tokens, as counted by `count_tokens`.
    """
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for document in documents:
        lines = document.text.split("\n")
        for name, last_line in natural_ends(document.text, rng):
            text = context_before(lines, last_line, count_tokens, rng.randint(min_tokens, max_tokens), max_tokens)
            if text is not None and count_tokens(text) >= min_tokens:
                prompts.append(Prompt(f"{document.path}:{last_line}:{name}", document.path, text))
    rng.shuffle(prompts)
    return sorted(prompts[:limit], key=lambda prompt: prompt.id)


def natural_ends(source: str, rng: random.Random) -> Iterator[tuple[str, int]]:
    """Yield, for each function or class, its name and the number (1-based) of a line after which a prompt can end.

    This is the last line of the signature, of the docstring, or of a statement in the first half of the body, chosen
    at random. Functions and classes whose body has fewer than three lines are left out. Nothing is yielded for a
    source that Python cannot parse.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in other people's texts
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first, last = node.body[0], node.end_lineno or node.lineno
        if last - first.lineno < 2:
            continue
        ends = [first.lineno - 1]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1:
            ends.append(first.end_lineno or first.lineno)
        ends += [s.end_lineno or s.lineno for s in node.body[: len(node.body) // 2]]
        yield node.name, rng.choice([end for end in ends if end >= node.lineno] or [node.lineno])


def context_before(
    lines: list[str], last_line: int, count_tokens: Callable[[str], int], wanted: int, most: int
) -> str | None:
    """Return whole lines up to `last_line` (1-based, included) with `wanted` to `most` tokens; None where no line fits.

    The text has fewer than `wanted` tokens if the file has no earlier line, or if one more line would exceed `most`.
    The text does not end with a newline, because the tokenizer joins a newline with the next indentation, which the
    model should choose.
    """
    first = last_line
    text = ""
    while first > 0:
        longer = "\n".join(lines[first - 1 : last_line]).strip("\n")
        num_tokens = count_tokens(longer)
        if num_tokens > most:
            break
        text, first = longer, first - 1
        if num_tokens >= wanted:
            break
    return text if text.strip() else None


def write_prompts(prompts: list[Prompt], path: Path) -> None:
    """Write prompts to a file, as one JSON object per line with the fields id, module and text."""
    rows = (json.dumps({"id": p.id, "module": p.module, "text": p.text}, ensure_ascii=False) for p in prompts)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
