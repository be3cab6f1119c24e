"""Examples of tasks with a source and a target, made without downloads: what an encoder-decoder learns and is tried on.

A task is one file of this folder. Sources that are equal are in one split, so that nothing held out was learned.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from forerun.errors import BadOption, NotFound, pip, shown
from forerun.text.files import unreadable

Task = Literal["translation", "summary"]
Split = Literal["train", "validation", "bench"]
SPLITS: tuple[Split, ...] = get_args(Split)
HELD_OUT_PERCENT = {"validation": 1.5, "bench": 1.5}


@dataclass(frozen=True)
class Example:
    """One source and its target. also: other targets that are right."""

    task: str
    source: str
    target: str
    also: tuple[str, ...] = ()


def split_of(text: str) -> Split:
    """Return the split of a text, which depends on it alone."""
    share = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64
    for split in SPLITS[1:]:
        if share < HELD_OUT_PERCENT[split] / 100:
            return split
        share -= HELD_OUT_PERCENT[split] / 100
    return "train"


def translations(num: int, seed: int) -> Iterator[tuple[Split, Example]]:
    """Yield `num` translations; of those that are held out, with all right answers. Raises BadOption."""
    try:
        from benchmarks.t5.examples.choices import Drawn
        from benchmarks.t5.examples.translation import PREFIX, draw_sentence
    except ImportError as error:
        raise BadOption(f"the task translation writes numbers in words: {pip('install num2words')}") from error

    rng = random.Random(seed)
    for _ in range(num):
        sentence = draw_sentence(rng)
        source = PREFIX + sentence.english
        target = sentence.german(Drawn(rng))
        split = split_of(source)
        also = [] if split == "train" else [text for text in sentence.answers() if text != target]
        yield split, Example("translation", source, target, tuple(also))


def summaries(
    num: int, seed: int, sources: Iterable[tuple[str, Path]] | None = None
) -> Iterator[tuple[Split, Example]]:
    """Yield at most `num` summaries, in a random order, no source twice.

    sources: Python files, with what is held out as one; None = those of installed packages.
    """
    from benchmarks.t5.examples.summary import installed_sources, summaries as of_file

    found: dict[str, tuple[Split, Example]] = {}
    learned = set[str]()
    for group, path in installed_sources() if sources is None else sources:
        split = split_of(group)
        for source, target in of_file(path):
            if split == "train":
                learned |= {source, target}
            if source not in found or split == "train":
                found[source] = split, Example("summary", source, target)
    rows = [
        (split, example)
        for split, example in found.values()
        if split == "train" or not learned & {example.source, example.target}
    ]
    random.Random(seed).shuffle(rows)
    yield from rows[:num]


MAKERS = {"translation": translations, "summary": summaries}


def write(task: str, out: Path, num: int, seed: int) -> dict[str, int]:
    """Write train.jsonl, validation.jsonl and bench.jsonl. Returns how many examples each has. Raises BadOption."""
    if task not in MAKERS:
        raise BadOption(f"task {shown(task)} is unknown: it must be {' or '.join(MAKERS)}")
    if num < 1:
        raise BadOption(f"{num} examples are none: give --num-examples of at least 1")
    out.mkdir(parents=True, exist_ok=True)
    counts: dict[str, int] = dict.fromkeys(SPLITS, 0)
    files = {split: (out / f"{split}.jsonl").open("w", encoding="utf-8") for split in SPLITS}
    try:
        for split, example in MAKERS[task](num, seed):
            record = {key: value for key, value in asdict(example).items() if value != ()}
            files[split].write(json.dumps(record, ensure_ascii=False) + "\n")
            counts[split] += 1
    finally:
        for file in files.values():
            file.close()
    return counts


def read(folder: Path, split: Split) -> list[Example]:
    """Read the examples of a split. Raises NotFound where there are none, UnsupportedModel for another file."""
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        raise NotFound(f"there is no {shown(str(path))}: `python -m benchmarks.t5 examples` makes it")
    try:
        lines: Seq[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [Example(**{**line, "also": tuple(line.get("also", ()))}) for line in lines]
    except (ValueError, TypeError, AttributeError) as error:
        raise unreadable(path, error, "examples of `python -m benchmarks.t5 examples`") from error
