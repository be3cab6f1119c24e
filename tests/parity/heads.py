"""Heads that learned for a minute: the shipped target accepts a fifth to a third of their first guesses.

Random ones are hardly ever right there, and what follows an accepted draft would not be compared.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.config import EngineConfig
from forerun.engine.opened import Opened
from forerun.train import head as training
from forerun.train.config import HeadConfig
from train.written import write, writer_of

METHODS = {
    "eagle": "draft_vocab=1024,steps=2",
    "medusa": "draft_vocab=1024,heads=3",
    "hydra": "draft_vocab=1024,heads=3",
    "dflash": "draft_vocab=1024,block=4,depth=1",
    "blockwise": "draft_vocab=1024,heads=3",
    "pass": "vectors=3",
}
SIZES: dict[str, Any] = {
    "steps": 12,
    "tokens_per_step": 512,
    "seq_len_tokens": 128,
    "warmup_steps": 2,
    "fit_tokens": 8192,
}


def learned(root: Path) -> dict[str, Mapping[str, Any]]:
    """By method, the options that name a head of the shipped target in this folder."""
    write(writer_of("shipped"), root / "samples", 6000)
    checkpoint = Opened.of(EngineConfig(target="shipped")).load()
    for method, options in METHODS.items():
        spec = f"{method}:{options}"
        config = HeadConfig(out=root / method, method=spec, samples=root / "samples", lr=1e-3, autocast="off", **SIZES)
        training.train(config, checkpoint, quiet=True)
    return {method: {"path": str(root / method / "head")} for method in METHODS}
