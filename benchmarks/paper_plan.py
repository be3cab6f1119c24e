"""What `benchmarks.paper` is asked to make."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from forerun.bench.plans import SHAPE_NAMES, Plan, shape
from forerun.registry import flag_of, option, stated

ROOM = "benchmarks.paper_exhibits"
MEASURED = {name: file for file, name in stated(ROOM, "NAME").items()}  # what is measured -> the file that does it


@dataclass(frozen=True)
class PaperPlan(Plan):
    """What to make. names: of what follows from formulas and of MEASURED, () = all."""

    names: tuple[str, ...] = ()
    out: Path | None = option(None, "folder for text, SVG, PNG and JSON of each; needs matplotlib")
    drafts: tuple[str, ...] = option((), "draft model to measure", flag="--draft", usual="the shipped one")
    ngram: Path | None = option(
        None,
        "file of `forerun train ngram` for unigram and bigram",
        usual="without; of tasks, counted in references that are not measured",
    )
    num_tokens: int = option(10_240, "that the target writes for tables 3 and 5", flag="--tokens", min=256)
    shape: str = shape("demo", f"to which the target of table 2 is widened: {SHAPE_NAMES}, or none")
    spec_lengths: tuple[int, ...] = option((3, 5, 7), "lengths of table 2", flag="--spec-length", min=1)
    num_prompts: int | None = option(None, "of table 2", flag="--prompts", min=1, usual="5, of each task 24")
    max_tokens: int = option(64, "tokens per prompt of table 2, of tasks at most", min=2)
    num_repeats: int | None = option(
        None, "times table 2 runs every prompt", flag="--repeats", min=1, usual="1, of tasks 3"
    )
    seed: int = option(1, "of what is sampled")
    pair: Path | None = option(
        None,
        "folder of an encoder-decoder pair for the exhibits that end in -t5: target, draft-NAME, and NAME.jsonl for "
        "each task",
        usual="build/t5pair",
    )
    tasks: tuple[str, ...] = option(
        (),
        "NAME=FILE with prompts for an encoder-decoder, JSON lines with source and, if there is a reference, target; "
        "translation and summary stand beside the paper's EnDe and CNNDM",
        flag="--task",
        usual="those of --pair",
    )

    def wants(self, name: str) -> bool:
        """Whether an exhibit is to be made."""
        return not self.names or name in self.names

    def words(self, *names: str) -> Iterator[str]:
        """Yield the flags and values of some options; those without a value are left out."""
        known = {field.name: field for field in fields(self)}
        for name in names:
            value: Any = getattr(self, name)
            for one in value if isinstance(value, tuple) else () if value is None else (value,):
                yield from (flag_of(known[name]), str(one))

    def recipe(self, name: str, target: str | None, *options: str) -> str:
        """Return the command that measures an exhibit alone. options: that it has, too."""
        words = ["python", "-m", "benchmarks.paper", name, "--measure"]
        words += ["--target", target] if target is not None else []
        seed = ("seed",) if self.seed != 1 else ()
        return shlex.join([*words, *self.words("drafts", *options, *seed)])
