"""Computes the distribution of the next token from logits, and the random numbers with which a token is drawn.

The names of this package are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.sampling.pipeline import (
        Filters as Filters,
        History as History,
        filters_of as filters_of,
        likeliest as likeliest,
        logprobs_of as logprobs_of,
        only_filters as only_filters,
        probs as probs,
        takes_the_best as takes_the_best,
    )

_NAMES = {"Filters", "History", "filters_of", "likeliest", "logprobs_of", "only_filters", "probs", "takes_the_best"}


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'forerun.sampling' has no attribute {name!r}")
    from forerun.sampling import pipeline

    globals()[name] = value = getattr(pipeline, name)
    return value
