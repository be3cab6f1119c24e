"""What `forerun paper` is asked to make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MEASURED = ("table-2", "table-3", "table-5", "independence", "figure-1")


@dataclass(frozen=True)
class PaperPlan:
    """What to make.

    names: of EXHIBITS and MEASURED, () = all. out: folder for files, None = text alone. drafts: draft models, () = the
    shipped one. ngram: a file of `forerun train ngram`, None = no unigram and bigram. num_tokens: that the target
    writes for tables 3 and 5. shape, spec_lengths, num_prompts, max_tokens, num_repeats: of table 2, see latency.Plan.
    """

    names: tuple[str, ...] = ()
    out: Path | None = None
    drafts: tuple[str, ...] = ()
    ngram: Path | None = None
    num_tokens: int = 10_240
    shape: str = "demo"
    spec_lengths: tuple[int, ...] = (3, 5, 7)
    num_prompts: int = 5
    max_tokens: int = 64
    num_repeats: int = 1
    seed: int = 1

    def wants(self, name: str) -> bool:
        """Whether an exhibit is to be made."""
        return not self.names or name in self.names
