"""Logits processors: objects that draw tokens from logits. Library users may write their own processors.

A processor has `_process` (change the logits), a temperature, and `sample` (draw from probabilities). The processors
here are the engine's own pipeline (forerun/sampling) under other names. A user's subclass decides the distribution by
itself, and both drafter and verifier use this distribution.

The interface follows a published toolkit for speculative decoding, with its errors mended. The greedy processor returns
the point mass at the largest logit. (With softmax probabilities and a later argmax, verification would not keep the
output greedy.) Temperature comes before top-p. Top-k keeps exactly k ids, the lowest ids among equal logits. No logits
are changed in place.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun import sampling
from forerun.errors import BadOption, shown
from forerun.types import Coins, Probs, SamplingParams
from forerun.verify.arithmetic import aligned, normalised


class LogitsProcessor(abc.ABC):
    """A map from logits to the distribution of the next token, and a draw from that distribution.

    A subclass with its own `_process` inherits one of the two `sample` methods below. A subclass may also have its own
    `sample`. Then every emitted token is the token that `sample` returns for the target's distribution, and a drafted
    token is accepted where it equals that token (the rule `match`). This is exact for any `sample`, but accepts fewer
    tokens than `ratio`.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature
        SamplingParams(**self.sampling_params())  # raises BadOption

    def __call__(self, logits: Tensor) -> Tensor:
        """Map logits [..., V] to probabilities [..., V]."""
        return torch.softmax(self._process(logits) / self.temperature, dim=-1)

    def sampling_params(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that do what this processor does, apart from `_process`."""
        temperature = getattr(self, "temperature", None)
        if not temperature:
            raise BadOption(
                f"a {type(self).__name__} has the temperature {temperature}: give super().__init__ one above 0; a "
                "GreedyProcessor takes the largest logit"
            )
        return {"temperature": temperature}

    @abc.abstractmethod
    def _process(self, logits: Tensor) -> Tensor:
        """Return changed logits [..., V]; -inf excludes an id. The argument itself must not be changed."""

    @abc.abstractmethod
    def sample(self, probs: Tensor) -> Tensor:
        """Draw ids [..., 1] from probabilities [..., V]."""


class GreedyProcessor(LogitsProcessor):
    """The most probable token; of equally probable tokens, the lowest id. The temperature changes nothing."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Map logits [..., V] to one-hot vectors [..., V]."""
        return _rows(self._process(logits), {"temperature": 0.0})

    def _process(self, logits: Tensor) -> Tensor:
        return logits

    def sample(self, probs: Tensor) -> Tensor:
        """Return the id of the largest probability, [..., 1]."""
        return probs.argmax(dim=-1, keepdim=True)


class MultinomialProcessor(LogitsProcessor):
    """A draw from softmax(logits / temperature)."""

    def _process(self, logits: Tensor) -> Tensor:
        params = self.sampling_params()
        if params.keys() == {"temperature"}:
            return logits
        return logits.masked_fill(_rows(logits, params) == 0, -torch.inf)

    def sample(self, probs: Tensor) -> Tensor:
        """Draw ids [..., 1], with torch's global generator."""
        return torch.multinomial(probs.reshape(-1, probs.shape[-1]), 1).reshape(*probs.shape[:-1], 1)


class TopKProcessor(MultinomialProcessor):
    """A draw from the top_k most likely ids."""

    def __init__(self, temperature: float, top_k: int) -> None:
        self.top_k = top_k
        super().__init__(temperature)

    def sampling_params(self) -> dict[str, Any]:
        """Return temperature and top_k."""
        return {**super().sampling_params(), "top_k": self.top_k}


class NucleusProcessor(MultinomialProcessor):
    """A draw from the nucleus at this temperature: the most likely ids that together just reach probability top_p."""

    def __init__(self, temperature: float, top_p: float) -> None:
        self.top_p = top_p
        super().__init__(temperature)

    def sampling_params(self) -> dict[str, Any]:
        """Return temperature and top_p."""
        return {**super().sampling_params(), "top_p": self.top_p}


class TopKNucleusProcessor(MultinomialProcessor):
    """A draw from the nucleus (top_p) of the top_k most likely ids."""

    def __init__(self, temperature: float, top_k: int, top_p: float) -> None:
        self.top_k, self.top_p = top_k, top_p
        super().__init__(temperature)

    def sampling_params(self) -> dict[str, Any]:
        """Return temperature, top_k and top_p."""
        return {**super().sampling_params(), "top_k": self.top_k, "top_p": self.top_p}


def max_fn(x: Tensor) -> Tensor:
    """Return norm(max(0, x)) over the last dimension [..., V]. With x = p - q it is the distribution of a correction.

    Raises BadOption for a row without a positive entry, which cannot be normalised.
    """
    flat = wide(x.detach().cpu()).reshape(-1, x.shape[-1]).numpy()
    rows = [normalised(Probs(dense=row), row.copy()) for row in flat]
    if not all(mass > 0 for _, mass in rows):
        raise BadOption("max_fn has nothing to normalise: no entry is above 0; where p equals q, draw from p itself")
    result = torch.from_numpy(np.stack([probs.weights for probs, _ in rows])).reshape(x.shape).to(x.device)
    return result.to(x.dtype) if x.is_floating_point() else result


def _rows(logits: Tensor, given: dict[str, Any]) -> Tensor:
    """Return the pipeline's probabilities of logits [..., V], row by row."""
    rows = wide(logits.detach()).cpu()
    params = SamplingParams(**given)
    dense = [spelled_out(sampling.probs(row, params), rows.shape[-1]) for row in rows.reshape(-1, rows.shape[-1])]
    return torch.stack(dense).reshape(logits.shape).to(logits.device, rows.dtype)


def wide(logits: Tensor) -> Tensor:
    """Return logits in a dtype that numpy has: float32 in place of bfloat16 and float16."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def spelled_out(probs: Probs, num_ids: int) -> Tensor:
    """Return a distribution in any form as a vector [num_ids], float32 or wider."""
    dtype = np.float32 if probs.point is not None else probs.weights.dtype
    return torch.from_numpy(aligned(probs, Probs(dense=np.zeros(num_ids, dtype))).copy())


# ------------------------------------------------------------------------------------------------ as the engine has it


@dataclass(frozen=True)
class Draws:
    """A processor as the engine applies it.

    params: fields of SamplingParams. process: logits of one row [1, V] -> changed logits; None = the engine's sampling
    pipeline makes all changes. sample: probabilities [1, V] -> an id; None = the engine draws.
    """

    params: dict[str, Any]
    process: Callable[[Tensor], Tensor] | None = None
    sample: Callable[[Tensor], Tensor] | None = None

    @staticmethod
    def of(processor: LogitsProcessor) -> Draws:
        """Make Draws of a processor, by the methods that its class overrides. Raises BadOption for any other object."""
        if not isinstance(processor, LogitsProcessor):
            raise BadOption(
                f"logits_processor={shown(processor)} is no LogitsProcessor: make an instance of GreedyProcessor, "
                "MultinomialProcessor, TopKProcessor, NucleusProcessor, TopKNucleusProcessor or of a class of your own"
            )
        kind = type(processor)
        has_own_call = kind.__call__ not in (LogitsProcessor.__call__, GreedyProcessor.__call__)
        has_own_process = kind._process not in (GreedyProcessor._process, MultinomialProcessor._process)
        has_own_sample = kind.sample not in (GreedyProcessor.sample, MultinomialProcessor.sample)
        is_greedy = kind.sample is GreedyProcessor.sample
        params = processor.sampling_params()
        process: Callable[[Tensor], Tensor] | None = None
        if has_own_call:
            params, process = {"temperature": 1.0}, lambda row: processor(row).log()
        elif has_own_process:
            params = {"temperature": processor.temperature}
            process = processor._process
        if is_greedy:
            params = {"temperature": 0.0}
        return Draws(params, process, processor.sample if has_own_sample else None)

    def logits(self, logits: Tensor) -> Tensor:
        """Change logits [R, V], each row by itself. Raises BadOption where the shape changes."""
        if self.process is None or not len(logits):
            return logits
        rows = [self.process(row[None].clone()) for row in logits]
        if any(row.shape != (1, logits.shape[1]) for row in rows):
            raise BadOption(
                f"the processor made logits of the shape {tuple(rows[0].shape)} from {(1, logits.shape[1])}: it must "
                "keep the shape, and exclude ids with -inf"
            )
        return torch.cat(rows)


class SampledCoins:
    """Coins that pick tokens by a processor's own `sample`. All other decisions come from the wrapped coins."""

    def __init__(self, coins: Coins, sample: Callable[[Tensor], Tensor], num_ids: int) -> None:
        self.accept, self.draw, self.draft, self.picks = coins.accept, coins.draw, coins.draft, coins.picks
        self._sample, self._num_ids = sample, num_ids

    def pick(self, probs: Probs, depth: int) -> int:
        """Return the id that `sample` draws. Raises BadOption for several ids, and for an id of probability 0."""
        drawn = self._sample(spelled_out(probs, self._num_ids)[None])
        token = int(drawn) if not isinstance(drawn, Tensor) or drawn.numel() == 1 else -1
        if not (0 <= token < self._num_ids and probs.at(token) > 0):
            raise BadOption(
                f"the processor's sample returned {shown(drawn)}: it must return one id that has a probability above 0"
            )
        return token
