"""What `benchmarks.paper` is asked to make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.bench.plans import SHAPE_NAMES, Plan, repeats, shape
from forerun.registry import option

MEASURED = ("table-2", "table-3", "table-5", "independence", "figure-1")


@dataclass(frozen=True)
class PaperPlan(Plan):
    """What to make. names: of EXHIBITS and MEASURED, () = all."""

    names: tuple[str, ...] = ()
    out: Path | None = option(None, "folder for text, SVG, PNG and JSON of each; needs matplotlib")
    drafts: tuple[str, ...] = option((), "draft model to measure", flag="--draft", usual="the shipped one")
    ngram: Path | None = option(None, "file of `forerun train ngram` for unigram and bigram", usual="without")
    num_tokens: int = option(10_240, "that the target writes for tables 3 and 5", flag="--tokens", min=256)
    shape: str = shape("demo", f"to which the target of table 2 is widened: {SHAPE_NAMES}, or none")
    spec_lengths: tuple[int, ...] = option((3, 5, 7), "lengths of table 2", flag="--spec-length", min=1)
    num_prompts: int = option(5, "of table 2", flag="--prompts", min=1)
    max_tokens: int = option(64, "tokens per prompt of table 2", min=2)
    num_repeats: int = repeats(1, "times table 2 runs every prompt")
    seed: int = option(1, "of what is sampled")

    def wants(self, name: str) -> bool:
        """Whether an exhibit is to be made."""
        return not self.names or name in self.names
