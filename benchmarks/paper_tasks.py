"""The tasks of an encoder-decoder pair, and where a pair is: a target, draft models, and a file of prompts per task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.errors import BadOption, NotFound, shown

if TYPE_CHECKING:
    from forerun.config import EngineConfig

# The folder of the pair that is trained here, as --pair takes it.
TRAINED = Path("build/t5pair")
HOW = (
    "docs/training.md says how the T5 pair is trained; name its folder with --pair, or a pair of your own with "
    "--target, --draft and --task"
)
# The tasks of the paper, by the names of ours.
PUBLISHED = {"translation": "EnDe", "summary": "CNNDM"}


class NoPair(NotFound):
    """There are no models of the kind that an exhibit needs."""


@dataclass(frozen=True)
class Task:
    """What the target answers. references: answers to the same sources, "" where there is none."""

    name: str
    sources: Seq[str]
    references: Seq[str]

    @property
    def published(self) -> str | None:
        """The paper's task that stands beside it."""
        return PUBLISHED.get(self.name)

    @property
    def measured(self) -> Seq[str]:
        """The sources that are answered: the first half."""
        return self.sources[: -(-len(self.sources) // 2)]

    @property
    def counted(self) -> list[str]:
        """The references in which tokens are counted: those of the other half."""
        return [text for text in self.references[len(self.measured) :] if text]


@dataclass(frozen=True)
class Places:
    """Where a pair is: its models as a command names them, and its tasks' files."""

    target: str
    drafts: tuple[str, ...]
    tasks: tuple[Task, ...]


def read_task(name: str, file: Path) -> Task:
    """Read JSON lines with a source and, if they have one, a reference as target. Raises NotFound, BadOption."""
    if not file.is_file():
        raise NotFound(f"there is no file {file}: --task takes NAME=FILE, such as translation=prompts.jsonl")
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        sources, references = [str(row["source"]) for row in rows], [str(row.get("target", "")) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadOption(
            f'{file} is no file of a task: every line must be JSON with "source", and may have "target"'
        ) from error
    if not sources:
        raise BadOption(f'{file} has no prompt: every line must be JSON with "source", and may have "target"')
    return Task(name, sources, references)


def read_tasks(named: Seq[str]) -> tuple[Task, ...]:
    """Read the files of NAME=FILE, those of the paper's tasks first. Raises NotFound, BadOption."""
    files: dict[str, Path] = {}
    for one in named:
        name, equals, file = one.partition("=")
        if not (name and equals and file):
            raise BadOption(f"--task {shown(one)} is not possible: write NAME=FILE, such as translation=prompts.jsonl")
        if name in files:
            raise BadOption(f"--task {name} is named twice: drop one, or give it another name")
        files[name] = Path(file)
    return _in_order({name: read_task(name, file) for name, file in files.items()})


def of_folder(folder: Path, tasks: Seq[str] = ()) -> Places:
    """Return the pair of a folder: target, draft-*, and a file NAME.jsonl for each task. Raises NoPair, BadOption.

    tasks: in place of the folder's own.
    """
    if not (folder / "target").is_dir():
        raise NoPair(f"there is no encoder-decoder pair in {folder}: {HOW}")
    drafts = sorted(str(path) for path in folder.glob("draft-*") if path.is_dir())
    if not drafts:
        raise BadOption(f"{folder} has no draft model: it must be a folder draft-NAME beside target")
    found = read_tasks(tasks) or _in_order({file.stem: read_task(file.stem, file) for file in folder.glob("*.jsonl")})
    if not found:
        raise BadOption(
            f"{folder} has no prompts: put NAME.jsonl for each task beside target, or name some with --task"
        )
    return Places(str(folder / "target"), tuple(drafts), found)


def of_places(config: EngineConfig, folder: Path | None, drafts: Seq[str], tasks: Seq[str]) -> Places:
    """Return the pair of a target that is named, if it has an encoder, or of a folder, None = the trained one.

    Raises UserError for what cannot be measured, NoPair where there is none.
    """
    if not names_encoder(config):
        return of_folder(folder or TRAINED, tasks)
    if folder is not None:
        raise BadOption(f"--pair contradicts --target {config.target}, an encoder-decoder: drop one")
    if not drafts or not tasks:
        missing = "--draft" if not drafts else "--task"
        raise BadOption(f"{missing} is missing: a target with an encoder is measured with draft models and tasks")
    return Places(str(config.target), tuple(drafts), read_tasks(tasks))


def names_encoder(config: EngineConfig) -> bool:
    """Whether the target that is named is an encoder-decoder. Raises UserError for one that is not there."""
    from forerun.engine.opened import Opened  # torch comes with it, and formulas need none

    return config.target is not None and Opened.of(config).spec.encoder is not None


def _in_order(tasks: Mapping[str, Task]) -> tuple[Task, ...]:
    known = [name for name in PUBLISHED if name in tasks]
    return tuple(tasks[name] for name in [*known, *sorted(tasks.keys() - PUBLISHED.keys())])
