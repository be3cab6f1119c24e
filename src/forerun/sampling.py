"""Logits -> probs: one pipeline for plain decoding, verification and drafting.

The order is a convention that every row of every model shares (docs/exactness.md; the reference for the filters is
Hugging Face's set of logits warpers, with exact tie rules added):

    logit_bias -> repetition penalty -> presence, frequency penalty -> bad words, min_tokens
    -> greedy leaves here -> temperature -> top-k -> min-p -> top-p -> softmax

One row at a time on purpose: the numbers of a row then cannot depend on how many rows a step has. The arithmetic is
numpy's, on the host, whatever device the logits come from: its selection and exp are several times faster on one
core than torch's, and one text decides for CPU and GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.errors import BadOption, InternalError
from forerun.types import Probs, SamplingParams, Sequence, TokenLogprob

Row = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class History:
    """The tokens before the one being decided: prompt, committed output, and what was drafted on the way to it.

    It is a view of the sequence at this moment; it is worthless after the next commit.
    """

    tokens: Seq[int] = ()
    num_prompt_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(seq: Sequence, drafted: Seq[int] = ()) -> History:
        """What the token after `seq` and `drafted` sees. Copies nothing, however long the sequence is."""
        tokens = _Joined(seq.tokens, drafted) if drafted else seq.tokens
        return History(tokens, seq.num_prompt_tokens, seq.end_ids, seq.bad_word_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt, drafted ones included."""
        return len(self.tokens) - self.num_prompt_tokens


class _Joined(Seq[int]):
    """Two sequences read as one, without a copy: most requests never look at their history."""

    def __init__(self, head: Seq[int], tail: Seq[int]) -> None:
        self._head, self._tail = head, tail

    def __len__(self) -> int:
        return len(self._head) + len(self._tail)

    def __iter__(self) -> Iterator[int]:
        yield from self._head
        yield from self._tail

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Seq[int]: ...
    def __getitem__(self, index: int | slice) -> int | Seq[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = index + len(self) if index < 0 else index
        return self._head[i] if i < len(self._head) else self._tail[i - len(self._head)]


# ---------------------------------------------------------------------------------------------------- the pipeline


def probs(logits: Tensor, params: SamplingParams, history: History = History()) -> Probs:
    """The law that the next token is drawn from.

    logits [V], float32 or float64 (its width is kept), never modified. Greedy gives a point mass, lowest id on ties;
    otherwise dense [V] on the host with exact zeros for every id that was removed.
    Raises BadOption where bias, bad words and min_tokens leave no id, or where a bias names an id beyond V;
    InternalError where the model's own logits are no numbers.
    """
    row = _host(logits)
    adjusted = _mask(_penalize(_bias(row, params), params, history), params, history)
    top = adjusted.max()
    if not np.isfinite(top):
        raise _no_law(row)
    if params.greedy:
        return Probs(point=int(adjusted.argmax()))
    # Subtracting the maximum before dividing keeps every temperature from overflowing.
    scaled = (adjusted - top) / adjusted.dtype.type(params.temperature)
    return Probs(dense=torch.from_numpy(_softmax(scaled, _survivors(scaled, params))))


def _host(logits: Tensor) -> Row:
    """The row as numpy, shared where it is on the host already; bfloat16 and float16 are widened."""
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    row: Row = np.ascontiguousarray(wide.detach().cpu().numpy())
    return row


def _no_law(row: Row) -> Exception:
    if not np.isfinite(row.max()):  # max passes NaN on
        return InternalError(f"the model returned logits that are no numbers (their maximum is {row.max()})")
    return BadOption("no token is left to draw: logit_bias, bad_words and min_tokens forbid every id at this position")


def _bias(row: Row, params: SamplingParams) -> Row:
    """Add params.logit_bias."""
    if not params.logit_bias:
        return row
    beyond = [token for token in params.logit_bias if not 0 <= token < len(row)]
    if beyond:
        raise BadOption(f"logit_bias names id {beyond[0]}, but the vocabulary has the ids 0 to {len(row) - 1}")
    row = row.copy()
    row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), dtype=row.dtype)
    return row


def _penalize(row: Row, params: SamplingParams, history: History) -> Row:
    """Repetition penalty over prompt and output (Keskar et al. 2019), presence and frequency over the output.

    Repetition divides positive logits and multiplies the others, once per id however often it occurred. It is not
    invariant to a shift of the logits, so these must be logits and never log-probabilities.
    """
    presence, frequency = params.presence_penalty, params.frequency_penalty
    if params.repetition_penalty == 1 and presence == 0 and frequency == 0:
        return row
    row, width = row.copy(), len(row)
    tokens = np.fromiter(history.tokens, dtype=np.int64, count=len(history.tokens))
    if params.repetition_penalty != 1:
        seen, _ = _count(tokens, width)
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if presence != 0 or frequency != 0:
        seen, counts = _count(tokens[history.num_prompt_tokens :], width)
        row[seen] -= (presence + frequency * counts).astype(row.dtype)
    return row


def _count(tokens: Ids, width: int) -> tuple[Ids, Ids]:
    """Distinct ids below `width` and how often each occurs."""
    ids, counts = np.unique(tokens[tokens < width], return_counts=True)
    return ids, counts


def _mask(row: Row, params: SamplingParams, history: History) -> Row:
    """Forbid the last id of a bad word whose beginning stands there, and end ids before min_tokens."""
    banned = {word[-1] for word in history.bad_word_ids if _ends_with(history.tokens, word[:-1])}
    if params.min_tokens > 0 and history.num_output_tokens < params.min_tokens:
        banned |= history.end_ids
    banned = {token for token in banned if token < len(row)}
    if not banned:
        return row
    row = row.copy()
    row[list(banned)] = -np.inf
    return row


def _ends_with(tokens: Seq[int], ending: tuple[int, ...]) -> bool:
    n, length = len(ending), len(tokens)
    return n <= length and all(tokens[length - n + i] == ending[i] for i in range(n))


# ------------------------------------------------------------------------------------------------------ the filters
#
# A filter takes the logits of the ids that are still in (largest = 0, `ids` ascending) and says which stay. None as
# ids means all V: the vocabulary is scanned, never sorted; what is sorted is what a filter left.


def _survivors(scaled: Row, params: SamplingParams) -> Ids | None:
    """Ids that pass top-k, min-p and top-p, ascending; None = all."""
    ids: Ids | None = None
    if 0 < params.top_k < len(scaled):
        ids = _largest(scaled, params.top_k)
    if params.min_p > 0:
        # p < min_p * p_max, said in logits; the largest logit is 0.
        values = scaled if ids is None else scaled[ids]
        ids = _subset(ids, np.flatnonzero(values >= math.log(params.min_p)))
    if params.top_p < 1:
        ids = _subset(ids, _nucleus(scaled if ids is None else scaled[ids], params.top_p))
    return ids


def _subset(ids: Ids | None, kept: Ids) -> Ids:
    return kept if ids is None else ids[kept]


def _largest(values: Row, k: int) -> Ids:
    """Indices of exactly the k largest values, ascending; ties at the k-th value are filled by lowest index."""
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    return _above(values, threshold, k)


def _above(values: Row, threshold: Any, k: int) -> Ids:
    """The k indices of largest value, given the k-th largest value."""
    kept = np.flatnonzero(values >= threshold)
    if len(kept) == k:
        return kept
    tied = np.flatnonzero(values[kept] == threshold)
    return np.delete(kept, tied[k - len(kept) :])


def _nucleus(values: Row, top_p: float) -> Ids:
    """Indices of the shortest prefix of the sorted ids whose mass reaches top_p, the crossing one kept (Holtzman 2020).

    Mass is relative to the ids given, summed in float64. Candidates are taken by growing thresholds until they hold
    enough mass, so a peaked row sorts a few dozen values of 100,000.
    """
    weights = np.exp(values)
    goal = top_p * weights.sum(dtype=np.float64)
    candidates = weights
    for depth in (4.0, 8.0, 16.0, math.inf):
        candidates = np.compress(values >= -depth, weights)
        if candidates.sum(dtype=np.float64) >= goal:
            break
    mass = np.ascontiguousarray(np.sort(candidates)[::-1]).cumsum(dtype=np.float64)
    # The sum in sorted order may stay a hair below the one above: then all candidates stay.
    count = min(int(np.searchsorted(mass, goal)) + 1, len(mass))
    return _largest(values, count)


def _softmax(scaled: Row, ids: Ids | None) -> Row:
    """Probabilities [V] over the surviving ids; exact zeros elsewhere."""
    if ids is None:
        weights = np.exp(scaled)
        return np.asarray(weights / weights.sum())
    dense = np.zeros_like(scaled)
    weights = np.exp(scaled[ids])
    dense[ids] = weights / weights.sum()
    return dense


# --------------------------------------------------------------------------------------------------------- reporting


def logprobs_of(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Log-probability of `token` and of the `num_top` likeliest ids under the raw model distribution, natural log.

    logits [V] before bias, penalties and temperature. Ties are listed by lowest id.
    """
    row = _host(logits)
    top = row.max()
    if not np.isfinite(top):
        raise _no_law(row)
    log_mass = float(top) + math.log(float(np.exp(row - top).sum(dtype=np.float64)))
    ids = _largest(row, min(num_top, len(row))) if num_top else np.empty(0, dtype=np.int64)
    best = sorted(ids.tolist(), key=lambda i: (-row[i], i))
    return TokenLogprob(token, float(row[token]) - log_mass, [(i, float(row[i]) - log_mass) for i in best])
