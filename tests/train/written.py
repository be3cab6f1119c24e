"""Writers of small samples, for tests of sampling and of what learns from samples."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from forerun import LLM
from forerun.train.writing import Lengths, Shares, Writer

TEXTS = ["The river rose in the night.\n" * 8, "def area(width, height):\n    return width * height\n" * 8]


def writer_of(target: Path | str | None, texts: Seq[str] = TEXTS, seed: int = 0, **options: Any) -> Writer:
    """A writer of continuations alone: small models have no chat template."""
    llm = LLM(target, draft="none", max_batch_size=4, max_seq_len=256, calibrate=False, **options)
    return Writer(llm, texts, seed=seed, shares=Shares(0, 0, 1), lengths=Lengths((4, 8), 8, 20))
