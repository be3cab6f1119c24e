"""Turns logits into probabilities, with one pipeline for plain decoding, verification and drafting.

Every row of every model goes through the steps in this order (docs/exactness.md). The filters follow Hugging Face's
logits warpers, with exact tie rules added:

    logit_bias -> repetition penalty -> presence, frequency penalty -> bad words, min_tokens, grammar
    -> greedy requests end here -> temperature -> top-k -> min-p -> top-p -> softmax

forced_eos_token_id is applied before all these steps: at the last position within the length limit, only this id is
possible.

Rows are processed one at a time, so that the result for a row cannot depend on how many rows a step has. The
arithmetic runs on the host, whatever device the logits come from. For float32 rows, `_argmax` and `_probs` exist twice:
in numpy, and as native code (csrc/sampling.cpp). Both return the same bits. Where the native code was built, it is
used.
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
    """Holds the tokens that precede the next token: prompt, committed output, and drafted tokens.

    A history refers to the sequence's lists without copying them, so it is no longer valid after the next commit.
    """

    committed: Seq[int] = ()  # prompt and output
    num_prompt_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    drafted: Seq[int] = ()
    kept: TokenCounts = field(default_factory=TokenCounts)  # counts of the committed tokens, kept from row to row
    max_len: int = 0  # prompt + output tokens at most; 0 = not known
    grammar: Constraint | None = None  # the grammar that the output must follow

    @staticmethod
    def of(seq: Sequence, drafted: Seq[int] = ()) -> History:
        """Return the history for the token that follows `seq` and `drafted`. No tokens are copied."""
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
        """All tokens of the history, in order: the committed tokens, then the drafted tokens."""
        return _Joined(self.committed, self.drafted) if self.drafted else self.committed

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens after the prompt, drafted tokens included."""
        return len(self.committed) + len(self.drafted) - self.num_prompt_tokens

    def forced(self, params: SamplingParams) -> int | None:
        """Return params.forced_eos_token_id if the next token is the last token that `max_len` allows.

        Returns None for earlier tokens, and if forced_eos_token_id is not set.
        """
        is_last = self.max_len - len(self.committed) - len(self.drafted) == 1
        return params.forced_eos_token_id if is_last else None

    def allowed(self) -> Allowed | None:
        """Return the token ids that the grammar allows next; None without a grammar.

        Raises BadOption where the grammar refuses the tokens of the history, or exceeds its limits.
        """
        allowed: Allowed | None = None
        if self.grammar is not None:
            allowed = self.grammar.allowed(self.committed, self.drafted)
        return allowed

    def counts(self) -> tuple[Ids, Ids]:
        """Return the distinct token ids, and how often each occurs after the prompt: two vectors [n], unsorted."""
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
    """Presents two token sequences as one. Copies nothing, because most requests never read their history."""

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
    """Return the distribution from which the next token is drawn.

    logits [V]: anything that numpy converts to an array; float32 and float64 keep their width. The logits are never
    modified. The result is a point mass for a greedy request (the lowest id on ties), and where only one id is
    possible because of forced_eos_token_id or a grammar. Otherwise it is a vector [V] in which each removed id has
    exactly 0. Where the filters keep few ids of a wide vocabulary (`most_listed`), it is a list of the ids with a
    probability above 0. soft: whether a point mass also gets the distribution at temperature 1 (Probs.soft).
    Raises BadOption where bias, bad words, min_tokens and grammar forbid all ids, or where a bias names an id outside
    0 .. V - 1. Raises InternalError where the model's logits hold NaN, or their maximum is infinite.
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
    """Return logits [V] as a contiguous array, float32 or wider. Such an array is returned without a copy."""
    row: Row = np.ascontiguousarray(logits)
    return row if row.itemsize >= 4 and row.dtype.kind == "f" else row.astype(np.float32)


def _no_probs(row: Row) -> Exception:
    if not np.isfinite(row.max()):  # max passes NaN on
        return InternalError(f"the model returned logits that are no numbers (their maximum is {row.max()})")
    return BadOption(
        "no token is left to draw: logit_bias, bad_words, min_tokens and the grammar forbid every id at this position"
    )


def _bias(row: Row, params: SamplingParams) -> Row:
    """Return the logits with params.logit_bias added. Raises BadOption if the bias names an id beyond the row."""
    if not params.logit_bias:
        return row
    beyond = [token for token in params.logit_bias if not 0 <= token < len(row)]
    if beyond:
        raise BadOption(f"logit_bias names id {beyond[0]}, but the vocabulary has the ids 0 to {len(row) - 1}")
    row = row.copy()
    row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), dtype=row.dtype)
    return row


def _penalize(row: Row, params: SamplingParams, history: History) -> Row:
    """Apply the repetition penalty to ids of prompt and output, and the other penalties only to ids of the output.

    The repetition penalty (Keskar et al. 2019) divides positive logits and multiplies all others, once per id, however
    often the id occurred. Adding a constant to all logits would change the effect of this penalty. So `row` must hold
    logits; only a beam search penalises log-probabilities (`likeliest`).
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
    """Return the row with -inf for each forbidden id.

    The forbidden ids are: ids that the grammar excludes, the last id of a bad word if the history ends with the word's
    other ids, and end ids before min_tokens.
    """
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
    """Return the only id that the grammar allows next; None if the grammar allows several ids.

    Also returns None without a grammar, and where other options (`_adjusts`) may forbid the id.
    """
    allowed = history.allowed()
    return None if allowed is None or _adjusts(params, history.bad_word_ids) else allowed.only


def _ends_with(tokens: Seq[int], ending: tuple[int, ...]) -> bool:
    n, length = len(ending), len(tokens)
    return n <= length and all(tokens[length - n + i] == ending[i] for i in range(n))


def takes_the_best(params: SamplingParams, bad_word_ids: Seq[Seq[int]] = ()) -> bool:
    """Return whether a request needs only the id of each row's largest logit, unless the history forces an id.

    If so, `probs` would return a point mass at this id, and no other logits are needed.
    """
    return params.greedy and only_filters(params, bad_word_ids)


def only_filters(params: SamplingParams, bad_word_ids: Seq[Seq[int]] = ()) -> bool:
    """Return whether a request's rows need nothing but the filters (`filters_of`), unless the history forces an id.

    Returns False where bias, penalties, bad words, min_tokens or a constraint may change a row, and where the request
    wants log-probabilities.
    """
    return params.logprobs is None and not params.is_held and not _adjusts(params, bad_word_ids)


def _adjusts(params: SamplingParams, bad_word_ids: Seq[Seq[int]]) -> bool:
    """Return whether bias, penalties, bad words or min_tokens may change a row."""
    penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return bool(penalties or params.logit_bias or bad_word_ids or params.min_tokens > 0)


# ------------------------------------------------------------------------------------------------------ the filters
#
# A filter takes the logits of the ids that are left (largest = 0, `ids` ascending) and says which of them stay. `ids`
# None means all V ids. The vocabulary is scanned, never sorted; only the ids that a filter left are sorted.

Filters = tuple[float, int, float, float, int]


def filters_of(params: SamplingParams, width: int) -> Filters:
    """Return the settings of the filters: (temperature, top_k, log of min_p, top_p, most_listed).

    width: the number of ids in a row. most_listed: the result of `most_listed`. The numpy code, the native code and the
    code for devices all take this tuple. A temperature of 0 stands for a point mass at the largest logit.
    """
    if params.greedy:
        return 0.0, 0, -math.inf, 1.0, 0
    log_min_p = float(arithmetic.log(params.min_p)) if params.min_p > 0 else -math.inf
    return min(params.temperature, _LARGEST), params.top_k, log_min_p, params.top_p, most_listed(width)


def most_listed(width: int) -> int:
    """Return the largest number of ids with which a distribution becomes a list instead of a vector.

    width: the number of ids in a row. Returns 0 for a narrow row, where a vector is as cheap as a list.
    """
    return width // 16 if width >= 4096 else 0


def _argmax(row: Row) -> int | None:
    """Return the lowest id with the largest logit; None where the largest logit is not finite."""
    best = int(row.argmax())
    return best if np.isfinite(row[best]) else None


def _probs(
    row: Row, temperature: float, top_k: int, log_min_p: float, top_p: float, most_listed: int
) -> tuple[Ids | None, Row] | None:
    """Apply temperature, filters and softmax. Returns (ids, probabilities); None where the largest logit is not finite.

    Where filters left at most `most_listed` ids, the ids with a probability above 0 are listed. Otherwise ids is None,
    and there is a probability for every id.
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
    """Return the sum of the weights in the weights' own dtype; softmax divides by this sum. The largest weight is 1."""
    if weights.dtype != np.float32:
        return weights.sum()
    unit = 2.0 ** (1 - arithmetic.tick_bits(width))
    return np.float32(float(arithmetic.ticks(weights, width, 1.0).sum()) * unit)


def _survivors(scaled: Row, top_k: int, log_min_p: float, top_p: float) -> Ids | None:
    """Return the ids that pass top-k, min-p and top-p, in ascending order; None = all."""
    ids: Ids | None = None
    if 0 < top_k < len(scaled):
        ids = _largest(scaled, top_k)
    if log_min_p > -math.inf:
        # Drops p < min_p * p_max, expressed in logits; the largest logit is 0.
        values = scaled if ids is None else scaled[ids]
        ids = _subset(ids, np.flatnonzero(values >= values.dtype.type(log_min_p)))
    if top_p < 1:
        ids = _subset(ids, _nucleus(scaled if ids is None else scaled[ids], top_p, len(scaled)))
    return ids


def _subset(ids: Ids | None, kept: Ids) -> Ids:
    return kept if ids is None else ids[kept]


def _largest(values: Row, k: int) -> Ids:
    """Return the indices of the k largest values, in ascending order.

    Where values are equal to the k-th largest value, the lowest indices are taken, so that there are exactly k.
    """
    if k == len(values):
        return np.arange(k)
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    return _above(values, threshold, k)


def _above(values: Row, threshold: Any, k: int) -> Ids:
    """Return the indices of the k largest values; the lowest indices on ties. threshold: the k-th largest value."""
    kept = np.flatnonzero(values >= threshold)
    if len(kept) == k:
        return kept
    tied = np.flatnonzero(values[kept] == threshold)
    return np.delete(kept, tied[k - len(kept) :])


def _nucleus(values: Row, top_p: float, width: int) -> Ids:
    """Return the indices of the largest logits, as few as have a softmax probability of top_p together (Holtzman 2020).

    values: logits, the largest 0; the softmax is over `values` alone. width: the number of ids in the row. Only logits
    above a threshold are sorted. The threshold is lowered until these logits have enough probability. So of 100,000
    logits of a peaked distribution, only a few dozen are sorted.
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
    # float64 only: the sum in sorted order may be a hair below the sum above, and then all candidates stay.
    return _largest(values, min(int(reached) + 1, len(candidates)))


def _countable(values: Row, width: int) -> npt.NDArray[Any]:
    """Return the weights e^logit of the logits `values`, in a form that can be summed.

    For float32 logits, the weights are integer ticks, whose sum does not depend on the order. For float64 logits, the
    weights are float64. width: the number of ids in the row.
    """
    weights = arithmetic.exp(values)
    return weights if weights.dtype != np.float32 else arithmetic.ticks(weights, width, 1.0)


def _goal(mass: npt.NDArray[Any], top_p: float) -> Any:
    """Return top_p times the sum of `mass`: the sum that the nucleus must reach. top_p must be below 1.

    If `mass` holds ticks, the result is rounded up to a whole number of ticks.
    """
    share = top_p * float(mass.sum())
    return share if mass.dtype != np.int64 else math.ceil(share)


# --------------------------------------------------------------------------------------------------------- reporting


def likeliest(
    logits: npt.ArrayLike, params: SamplingParams, history: History, num: int
) -> tuple[list[int], list[float]]:
    """Return the `num` token ids that a beam search scores highest, and their scores, best first, lowest id on ties.

    logits [V]. Scores are float64 log-probabilities. Bias, penalties and masks are applied to these log-probabilities
    instead of the logits, and the result is not normalised again, as in the beam search of transformers. Ids with score
    -inf are left out, so there may be fewer than `num` ids. An id forced by forced_eos_token_id has score 0.
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
    """Return natural log-probabilities of `token` and of the `num_top` likeliest ids under the raw distribution.

    logits [V]: the model's logits, before bias, penalties and temperature. On ties, the lowest id comes first.
    """
    row = row_of(logits)
    log_mass = _log_mass(row)
    ids = _largest(row, min(num_top, len(row))) if num_top else np.empty(0, dtype=np.int64)
    best = sorted(ids.tolist(), key=lambda i: (-row[i], i))
    return TokenLogprob(token, float(row[token]) - log_mass, [(i, float(row[i]) - log_mass) for i in best])


def _log_mass(row: Row) -> float:
    """Return the natural log of the sum of e^logit. Raises InternalError where the largest logit is not finite."""
    if not (whole := arithmetic.mass_of_logits(row)):
        raise _no_probs(row)
    return float(row.max()) + float(arithmetic.log(whole))
