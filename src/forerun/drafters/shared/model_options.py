"""The options of drafters with a model: which model is loaded, and how tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from forerun.config import AUTO, Quantization
from forerun.errors import BadOption, shown

TEMPERATURE = {"help": "temperature of the draws; none = the request's", "min": 0.0, "max": 100.0}

TOP_K = {"help": "top-k of the draws, 0 = all; none = the request's", "min": 0}

PATH = {"help": "folder, GGUF file, name or hub id of the draft model; none = the shipped one"}

QUANTIZATION = {
    "help": "int8 or int4[:group=N]: its weights are rounded while they are loaded, with :again also those that its "
    "file has rounded already; auto = int4:again of a large model on operators that compute with it; none = as stored"
}

VOCAB = {
    "help": "ids that are drafted, the first ones of the tokenizer: no other rows of the LM head are read; auto = as "
    "many as pay in the text, where the vocabulary is large; none = all"
}


class Draws(Protocol):
    """The options for drawing tokens, common to drafters with a model."""

    @property
    def draft_temperature(self) -> float | None: ...
    @property
    def draft_top_k(self) -> int | None: ...
    @property
    def draft_vocab(self) -> str: ...


class Loads(Protocol):
    """The options for loading a model, common to drafters with a checkpoint."""

    @property
    def path(self) -> str | None: ...
    @property
    def quantization(self) -> str: ...


@dataclass(frozen=True)
class UsualDraws:
    """The default options for drawing tokens: the request's own sampling parameters are used."""

    draft_temperature: float | None = None
    draft_top_k: int | None = None
    draft_vocab: str = AUTO


USUAL = UsualDraws()


def head_rows(method: str, draft_vocab: str) -> int | None:
    """Return the largest number of ids that the option `draft_vocab` lets a model draft; None = no fixed limit.

    Raises BadOption for any value but auto, none, and a number of at least 1.
    """
    if draft_vocab in ("none", AUTO):
        return None
    if not draft_vocab.isdecimal() or int(draft_vocab) < 1:
        raise BadOption(
            f"{method}:draft_vocab={shown(draft_vocab)} is not possible: it must be auto, none or at least 1"
        )
    return int(draft_vocab)


def check_temperature(method: str, value: float | None) -> None:
    """Raise BadOption for a temperature above 0 and below 1e-5, the least that the sampling pipeline accepts."""
    if value is not None and 0 < value < 1e-5:
        raise BadOption(f"{method}:draft_temperature={value} must be 0 (greedy) or at least 1e-5")


def rounding(quantization: str) -> str | None:
    """Return the format to which a draft model's weights are rounded on loading; None = no rounding.

    The value auto is returned as it is. Raises BadOption for an unknown format.
    """
    if quantization not in ("none", AUTO):
        Quantization.parse(quantization)
    return None if quantization == "none" else quantization
