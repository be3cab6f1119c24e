"""Logits -> probs: one pipeline for plain decoding, verification and drafting.

The order is a convention that every row of every model shares (docs/exactness.md; the reference for the filters is
Hugging Face's set of logits warpers, with exact tie rules added):

    logit_bias -> repetition penalty -> presence, frequency penalty -> bad words, min_tokens, grammar
    -> greedy leaves here -> temperature -> top-k -> min-p -> top-p -> softmax

Before all of it comes forced_eos_token_id, which leaves one id at the last place of an output that is cut.

One row at a time on purpose: the numbers of a row then cannot depend on how many rows a step has. The arithmetic runs
on the host, whatever device the logits come from. What is done to float32 rows is written twice: `_argmax` and `_probs`
in numpy, and a native implementation of both (csrc/sampling.cpp), which returns the same bits and is taken where it was
built.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from forerun.errors import BadOption, InternalError
from forerun.sampling import arithmetic
from forerun.sampling.grammar import Allowed, masked
from forerun.types import Constraint, Probs, SamplingParams, Sequence, TokenCounts, TokenLogprob

Row = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.int64]

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class History:
    """The tokens before the one being decided: prompt, committed output, and drafted tokens.

    It is a view of the sequence at this moment; it is worthless after the next commit.
    """

    committed: Seq[int] = ()  # prompt and output
    num_prompt_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    drafted: Seq[int] = ()
    kept: TokenCounts = field(default_factory=TokenCounts)  # of the committed tokens, from one row to the next
    max_len: int = 0  # of prompt and output at most; 0 = not known
    grammar: Constraint | None = None  # what the output is held to

    @staticmethod
    def of(seq: Sequence, drafted: Seq[int] = ()) -> History:
        """Return the history of the token after `seq` and `drafted`. Copies nothing, however long the sequence is."""
        return History(
            seq.tokens,
            seq.num_prompt_tokens,
            seq.end_ids,
            seq.bad_word_ids,
            drafted,
            seq.counts,
            seq.max_len,
            seq.grammar,
        )

    @property
    def tokens(self) -> Seq[int]:
        """All tokens, in order."""
        return _Joined(self.committed, self.drafted) if self.drafted else self.committed

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt, drafted ones included."""
        return len(self.committed) + len(self.drafted) - self.num_prompt_tokens

    def forced(self, params: SamplingParams) -> int | None:
        """Return the only id that may come next: at the last place of an output that must end with one."""
        is_last = self.max_len - len(self.committed) - len(self.drafted) == 1
        return params.forced_eos_token_id if is_last else None

    def allowed(self) -> Allowed | None:
        """Return the ids that the grammar allows next; None without one. Raises BadOption for a wrong text."""
        allowed: Allowed | None = None
        if self.grammar is not None:
            allowed = self.grammar.allowed(self.committed, self.drafted)
        return allowed

    def counts(self) -> tuple[Ids, Ids]:
        """Return the distinct ids of all tokens, and their counts behind the prompt: two vectors [n], in no order."""
        kept, new = self.kept, dict[int, int]()
        kept.update(self.committed, self.num_prompt_tokens)
        counts = np.array(kept.counts)
        for token in self.drafted:
            if (place := kept.places.get(token)) is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts[place] += 1
        ids = np.array(kept.ids)
        return (np.append(ids, list(new)), np.append(counts, list(new.values()))) if new else (ids, counts)


class _Joined(Seq[int]):
    """Two sequences read as one, without a copy: most requests never look at their history."""

    def __init__(self, head: Seq[int], tail: Seq[int]) -> None:
        self._head, self._tail = head, tail

    def __len__(self) -> int:
        return len(self._head) + len(self._tail)

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


def probs(logits: npt.ArrayLike, params: SamplingParams, history: History = History(), soft: bool = False) -> Probs:
    """Return the distribution that the next token is drawn from.

    logits [V]: what numpy takes for an array of float32 or float64, whose width is kept; never modified. Greedy gives a
    point mass, lowest id on ties; otherwise a vector [V] with exact zeros for every id that was removed, or a list of
    the ids with a probability above 0 where filters left few of many. soft: whether a greedy point gets the
    distribution at temperature 1 as well (Probs.soft).
    Raises BadOption where bias, bad words and min_tokens leave no id, or where a bias names an id beyond V;
    InternalError where the model's own logits are no numbers.
    """
    if (forced := history.forced(params)) is not None:
        return Probs(point=forced, soft=Probs.of_point(forced) if soft else None)
    row = row_of(logits)
    if (only := _only(params, history)) is not None and only < len(row):
        return Probs(point=only, soft=Probs.of_point(only) if soft else None)
    adjusted = _mask(_penalize(_bias(row, params), params, history), params, history)
    native = arithmetic.native_sampler() if adjusted.dtype == np.float32 else None
    if params.greedy:
        best: int | None = _argmax(adjusted) if native is None else native.argmax(adjusted)
        if best is None:
            raise _no_probs(row)
        at_one = probs(row, dataclasses.replace(params, temperature=1.0), history) if soft else None
        return Probs(point=best, soft=at_one)
    filters = filters_of(params, len(adjusted))
    result: tuple[Ids | None, Row] | None = (_probs if native is None else native.probs)(adjusted, *filters)
    if result is None:
        raise _no_probs(row)
    ids, values = result
    return Probs(dense=values) if ids is None else Probs(ids=ids, listed=values)


def row_of(logits: npt.ArrayLike) -> Row:
    """Return logits [V] as an array without gaps, float32 or wider, of the same memory where it is one already."""
    row: Row = np.ascontiguousarray(logits)
    return row if row.itemsize >= 4 and row.dtype.kind == "f" else row.astype(np.float32)


def _no_probs(row: Row) -> Exception:
    if not np.isfinite(row.max()):  # max passes NaN on
        return InternalError(f"the model returned logits that are no numbers (their maximum is {row.max()})")
    return BadOption(
        "no token is left to draw: logit_bias, bad_words, min_tokens and the grammar forbid every id at this position"
    )


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
    """Apply repetition penalty over prompt and output (Keskar et al. 2019), presence and frequency over the output.

    Repetition divides positive logits and multiplies the others, once per id however often it occurred. It is not
    invariant to a shift of the logits, so these must be logits and never log-probabilities.
    """
    presence, frequency = params.presence_penalty, params.frequency_penalty
    if params.repetition_penalty == 1 and presence == 0 and frequency == 0:
        return row
    row = row.copy()
    ids, counts = history.counts()
    if (beyond := ids >= len(row)).any():  # a draft model may have fewer ids than its target
        ids, counts = ids[~beyond], counts[~beyond]
    if params.repetition_penalty != 1:
        values = row[ids]
        row[ids] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if presence != 0 or frequency != 0:
        spoken = counts > 0
        row[ids[spoken]] -= (presence + frequency * counts[spoken]).astype(row.dtype)
    return row


def _mask(row: Row, params: SamplingParams, history: History) -> Row:
    """Forbid ids by the grammar, the last id of a bad word whose beginning is there, and ends before min_tokens."""
    if (allowed := history.allowed()) is not None:
        row = masked(row, allowed)
    banned = {word[-1] for word in history.bad_word_ids if _ends_with(history.tokens, word[:-1])}
    if params.min_tokens > 0 and history.num_output_tokens < params.min_tokens:
        banned |= history.end_ids
    banned = {token for token in banned if token < len(row)}
    if not banned:
        return row
    row = row.copy()
    row[list(banned)] = -np.inf
    return row


def _only(params: SamplingParams, history: History) -> int | None:
    """Return the only id that the grammar allows next, where nothing else may forbid it; None where there are more."""
    allowed = history.allowed()
    return None if allowed is None or _adjusts(params, history.bad_word_ids) else allowed.only


def _ends_with(tokens: Seq[int], ending: tuple[int, ...]) -> bool:
    n, length = len(ending), len(tokens)
    return n <= length and all(tokens[length - n + i] == ending[i] for i in range(n))


def takes_the_best(params: SamplingParams, bad_word_ids: Seq[Seq[int]] = ()) -> bool:
    """Return whether every row's distribution is a point at its largest logit, where the history forces none.

    Then the other logits are not needed: `probs` would look at them and return that point.
    """
    return params.greedy and only_filters(params, bad_word_ids)


def only_filters(params: SamplingParams, bad_word_ids: Seq[Seq[int]] = ()) -> bool:
    """Return whether each row's distribution follows from its logits and `filters_of`, if the history forces none."""
    return params.logprobs is None and not params.is_held and not _adjusts(params, bad_word_ids)


def _adjusts(params: SamplingParams, bad_word_ids: Seq[Seq[int]]) -> bool:
    """Return whether bias, penalties, bad words or min_tokens may change a row."""
    penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return bool(penalties or params.logit_bias or bad_word_ids or params.min_tokens > 0)


# ------------------------------------------------------------------------------------------------------ the filters
#
# A filter takes the logits of the ids that are still in (largest = 0, `ids` ascending) and says which stay. None as
# ids means all V: the vocabulary is scanned, never sorted; what is sorted is what a filter left.

Filters = tuple[float, int, float, float, int]


def filters_of(params: SamplingParams, width: int) -> Filters:
    """Return (temperature, top_k, log of min_p, top_p, the most ids that are listed), as all implementations take them.

    width: ids of a row. A temperature of 0 stands for a point at the largest logit.
    """
    if params.greedy:
        return 0.0, 0, -math.inf, 1.0, 0
    log_min_p = float(arithmetic.log(params.min_p)) if params.min_p > 0 else -math.inf
    return min(params.temperature, _LARGEST), params.top_k, log_min_p, params.top_p, most_listed(width)


def most_listed(width: int) -> int:
    """Return how many ids a distribution may have to be kept as a list: a narrow row is as cheap dense."""
    return width // 16 if width >= 4096 else 0


def _argmax(row: Row) -> int | None:
    """Return the lowest id of the largest logit; None where the largest is no number."""
    best = int(row.argmax())
    return best if np.isfinite(row[best]) else None


def _probs(
    row: Row, temperature: float, top_k: int, log_min_p: float, top_p: float, most_listed: int
) -> tuple[Ids | None, Row] | None:
    """Apply temperature, filters and softmax: (ids, probabilities), ids None = all; None where logits are no numbers.

    Ids are listed where a filter left at most `most_listed`; ids of probability 0 are left out then.
    """
    top = row.max()
    if not np.isfinite(top):
        return None
    # Subtracting the maximum before dividing keeps every temperature from overflowing.
    scaled = (row - top) / row.dtype.type(temperature)
    ids = _survivors(scaled, top_k, log_min_p, top_p)
    weights = arithmetic.exp(scaled if ids is None else scaled[ids])
    values = weights / _mass(weights, len(row))
    if ids is None:
        return None, values
    if len(ids) <= most_listed:
        possible = weights > 0
        return ids[possible], values[possible]
    dense = np.zeros_like(scaled)
    dense[ids] = values
    return None, dense


def _mass(weights: Row, width: int) -> Any:
    """Return the sum of the weights, by which they are divided, in their own type; the largest weight is 1."""
    if weights.dtype != np.float32:
        return weights.sum()
    unit = 2.0 ** (1 - arithmetic.tick_bits(width))
    return np.float32(float(arithmetic.ticks(weights, width, 1.0).sum()) * unit)


def _survivors(scaled: Row, top_k: int, log_min_p: float, top_p: float) -> Ids | None:
    """Return the ids that pass top-k, min-p and top-p, ascending; None = all."""
    ids: Ids | None = None
    if 0 < top_k < len(scaled):
        ids = _largest(scaled, top_k)
    if log_min_p > -math.inf:
        # p < min_p * p_max, said in logits; the largest logit is 0.
        values = scaled if ids is None else scaled[ids]
        ids = _subset(ids, np.flatnonzero(values >= values.dtype.type(log_min_p)))
    if top_p < 1:
        ids = _subset(ids, _nucleus(scaled if ids is None else scaled[ids], top_p, len(scaled)))
    return ids


def _subset(ids: Ids | None, kept: Ids) -> Ids:
    return kept if ids is None else ids[kept]


def _largest(values: Row, k: int) -> Ids:
    """Return the indices of exactly the k largest values, ascending; of ties at the k-th the lowest indices."""
    if k == len(values):
        return np.arange(k)
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    return _above(values, threshold, k)


def _above(values: Row, threshold: Any, k: int) -> Ids:
    """Return the indices of the k largest values, given the k-th largest value."""
    kept = np.flatnonzero(values >= threshold)
    if len(kept) == k:
        return kept
    tied = np.flatnonzero(values[kept] == threshold)
    return np.delete(kept, tied[k - len(kept) :])


def _nucleus(values: Row, top_p: float, width: int) -> Ids:
    """Return the indices of the shortest sorted prefix whose mass reaches top_p, its last id included (Holtzman 2020).

    Mass is relative to the ids given. Candidates are taken by growing thresholds until they hold enough of it, so a
    peaked row sorts a few dozen values of 100,000.
    """
    mass = _countable(values, width)
    goal = _goal(mass, top_p)
    candidates = values
    for depth in (4.0, 8.0, 16.0, math.inf):
        chosen = values >= -depth
        if np.compress(chosen, mass).sum() >= goal:
            candidates = np.compress(chosen, values)
            break
    best_first = np.ascontiguousarray(np.sort(candidates)[::-1])
    reached = np.searchsorted(_countable(best_first, width).cumsum(), goal)
    # float64 only: the sum in sorted order may stay a hair below the one above, and then all candidates stay.
    return _largest(values, min(int(reached) + 1, len(candidates)))


def _countable(values: Row, width: int) -> npt.NDArray[Any]:
    """Return the summands of ids with these logits: ticks, whose sum has no order; of a float64 row the weights."""
    weights = arithmetic.exp(values)
    return weights if weights.dtype != np.float32 else arithmetic.ticks(weights, width, 1.0)


def _goal(mass: npt.NDArray[Any], top_p: float) -> Any:
    """Return the share top_p < 1 of the mass; of ticks a whole number, which rounding never lifts above their sum."""
    share = top_p * float(mass.sum())
    return share if mass.dtype != np.int64 else math.ceil(share)


# --------------------------------------------------------------------------------------------------------- reporting


def likeliest(
    logits: npt.ArrayLike, params: SamplingParams, history: History, num: int
) -> tuple[list[int], list[float]]:
    """Return the `num` ids that a beam search scores highest, and their scores, best first, lowest id on ties.

    logits [V]. Scores are log-probabilities, float64, to which bias, penalties and masks are applied as they are to
    logits elsewhere, with no normalisation behind them: so do the beams of transformers. Ids of score -inf are left
    out, so that there may be fewer.
    """
    if (forced := history.forced(params)) is not None:
        return [forced], [0.0]
    row = row_of(logits)
    log_mass = _log_mass(row)
    if history.grammar is not None or _adjusts(params, history.bad_word_ids):
        scores: Row = row.astype(np.float64) - log_mass
        scores = _mask(_penalize(_bias(scores, params), params, history), params, history)
        ids = _largest(scores, min(num, len(row)))
        values = scores[ids]
    else:
        ids = _largest(row, min(num, len(row)))
        values = row[ids].astype(np.float64) - log_mass
    order = np.argsort(-values, kind="stable")
    order = order[values[order] > -np.inf]
    return ids[order].tolist(), values[order].tolist()


def logprobs_of(logits: npt.ArrayLike, token: int, num_top: int) -> TokenLogprob:
    """Return natural log-probabilities of `token` and the `num_top` likeliest ids, by the raw model distribution.

    logits [V] before bias, penalties and temperature. Ties are listed by lowest id.
    """
    row = row_of(logits)
    log_mass = _log_mass(row)
    ids = _largest(row, min(num_top, len(row))) if num_top else np.empty(0, dtype=np.int64)
    best = sorted(ids.tolist(), key=lambda i: (-row[i], i))
    return TokenLogprob(token, float(row[token]) - log_mass, [(i, float(row[i]) - log_mass) for i in best])


def _log_mass(row: Row) -> float:
    """Return the natural log of the sum of e^logit. Raises InternalError where the logits are no numbers."""
    if not (whole := arithmetic.mass_of_logits(row)):
        raise _no_probs(row)
    return float(row.max()) + float(arithmetic.log(whole))
