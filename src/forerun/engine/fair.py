"""Limits the number of prompt tokens in a step, so that streams keep their time limit and new requests start soon.

A chunk of 512 prompt tokens on a CPU takes as long as dozens of decoding steps. Every stream would wait for the chunk:
the engine's own streams, and also the streams of other engines on the same device, because these engines get the next
turn only after the step (turns.py). The time of a prompt token and the time of a usual step are learned from the
reports of steps. This module reads no clock.

The time of a prompt token grows with the number of keys that the token attends to: seconds = base + slope * keys. This
line is fitted to the last hundreds of chunks by weighted least squares. The median ratio of the last few chunks to the
line corrects the line. The time limit applies to the 99th percentile and not to the mean, so chunks are planned for
only a share of the allowed time. A step that was too long lowers the share by 10 %. A step within the limit raises the
share by 0.05 %. Both effects cancel if one step in 200 is too long.

The time of a step without prompts depends on the number of requests that decode. If this time is not known, or was
last measured too long ago, the next step runs no prompts.

Even if no request decodes, a new request may come at any moment, and its first token waits for the running chunk. So a
step may take only as long as a few of the shortest decoding steps. Larger chunks would hardly be faster per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from math import sqrt
from statistics import median
from typing import NamedTuple

from forerun.engine.turns import Seat, Turns
from forerun.types import StepReport

LEAST_TOKENS = 1  # per step, however long they take: else a prompt might never be read
FIRST_TOKENS = 16  # while nothing is known
RENEWED_AFTER = 32  # steps with prompts after which the usual step is measured again
FIRST_SHARE, LEAST_SHARE = 0.8, 0.5  # of the seconds that a chunk may add
LEAST_STEPS = 1.5  # the least time of a step that decodes nothing, in usual steps: one token takes as long as a few
QUIET_STEPS, QUIET_S = 8, 0.050  # time of a step while nobody streams: so many usual steps, or the seconds if longer
_MISSED, _SHARE_MISSED = 0.1, 0.005  # how much a too long step lowers the share; the fraction of steps that may be so
_NUM_STEPS = 9  # the usual step is the median of so many
_NUM_CHUNKS = 9  # the median of so many chunks corrects the expectation
_KEPT = 0.995  # the weight of earlier chunks is multiplied by this at each chunk
_NEAR_KEYS = 256.0  # chunks whose numbers of keys differ by less than this say little about the slope


class _Limit(NamedTuple):
    """Holds the time limit of a step, in seconds.

    usual_s: the usual time of a step with the same number of decoding requests and without prompts; 0 if no request
    decodes. known: the record that predicts the time of the step's chunks.
    """

    seconds: float
    usual_s: float
    known: Chunks


class Allowance:
    """Holds the number of tokens, and the number of seconds, that the prompts of a step may still use.

    known: the record that predicts the seconds of a chunk; None = the time is not limited.
    """

    def __init__(self, num_tokens: int, seconds: float = 0.0, known: Chunks | None = None) -> None:
        self._num_tokens, self._seconds, self._known = num_tokens, seconds, known
        self._least = LEAST_TOKENS

    def fitting(self, num_before: int) -> int:
        """Return how many tokens of a prompt this step may still run.

        num_before: the number of the prompt's tokens that are already in the cache.
        """
        if self._known is None:
            return self._num_tokens
        return min(self._num_tokens, max(self._least, self._known.fitting(self._seconds, num_before)))

    def take(self, num_tokens: int, num_before: int) -> None:
        """Subtract `num_tokens` tokens of a prompt, and the seconds that they are expected to take.

        num_before: the number of earlier tokens of the prompt, to which these tokens attend.
        """
        self._num_tokens -= num_tokens
        if num_tokens and self._known is not None:
            keys = num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
            self._seconds -= self._known.expected_s(num_tokens, keys)
            self._least = 0


class Fair:
    """Computes the allowance of prompt tokens for each step of an engine.

    stretch: the time limit of a step with prompts, as a multiple of the time of a step without prompts; None = no such
    limit. max_itl_s: the time limit in seconds; None = no such limit. If both are given, the smaller limit applies.
    turns: the turns of the engines on the device; None = there are no other engines.
    """

    def __init__(
        self, stretch: float | None = None, max_itl_s: float | None = None, turns: Turns | None = None
    ) -> None:
        self._turns = turns or Turns()
        self.seat = self._turns.join(Seat(stretch, max_itl_s))
        self._usual = dict[int, _Usual]()  # by number of decoding requests
        # Chunks in steps that decode, in steps that decode nothing while another engine does, and while no engine does.
        self._own, self._apart, self._quiet = Chunks(), Chunks(), Chunks()
        self._share = FIRST_SHARE

    def turn(self) -> AbstractContextManager[None]:
        """Return a context manager that waits for the engine's turn on entry, and ends the turn on exit."""
        return self._turns.turn(self.seat)

    def plan(self, num_decoding: int, *, is_reading: bool) -> None:
        """Record facts about the next step in the engine's Seat, the record that other engines read.

        num_decoding: how many requests decode. is_reading: whether there are prompts to run.
        """
        usual = self._usual.get(num_decoding)
        self.seat.num_streams, self.seat.is_reading = num_decoding, is_reading
        self.seat.usual_s = None if usual is None else usual.seconds

    def left(self, num_running: int) -> None:
        """Update the engine's Seat (turns.py) after a request has left the batch.

        num_running: how many requests still run.
        """
        self.seat.num_streams = min(self.seat.num_streams, num_running)
        self.seat.is_reading &= num_running > 0

    def allowance(self, most: int) -> Allowance:
        """Return the allowance for the prompts of the planned step: at most `most` tokens.

        The allowance is 0 tokens if the time of a step without prompts has to be measured first.
        """
        num_decoding = self.seat.num_streams
        others = self._turns.beside(self.seat)
        limit = self._limit(num_decoding, others)
        if limit is None:
            return Allowance(most)
        usual = self._usual.get(num_decoding)
        if num_decoding and (usual is None or usual.num_chunks >= RENEWED_AFTER):
            return Allowance(0)
        if not limit.known.is_known or any(seat.num_streams and seat.usual_s is None for seat in others):
            return Allowance(min(most, FIRST_TOKENS))
        share = 1.0 if limit.known is self._quiet else self._share
        return Allowance(most, share * (limit.seconds - limit.usual_s), limit.known)

    def _limit(self, num_decoding: int, others: Seq[Seat]) -> _Limit | None:
        """Return the time limit of a step with `num_decoding` decoding requests; None = there is no limit.

        others: the records (turns.Seat) of the other engines on the device, with the number of their decoding requests,
        the usual time of their steps, and their time limits.
        """
        usual = self._usual.get(num_decoding)
        num_reading = 1 + sum(seat.is_reading for seat in others)
        usual_s, known = (0.0, self._apart) if usual is None else (usual.seconds, self._own)
        least_s = self._usual[min(self._usual)].least_s if self._usual else 0.0
        streams = [*(seat for seat in others if seat.num_streams), *([self.seat] if num_decoding else ())]
        if promised := [seat for seat in streams if seat.promises]:
            # In a round, each engine that streams has one step, and each engine that reads prompts lengthens its step.
            round_s = usual_s + sum([seat.usual_s or 0.0 for seat in others if seat.num_streams])
            seconds = usual_s + (min([seat.limit_s(round_s) for seat in promised]) - round_s) / num_reading
        elif num_decoding or not self.seat.promises or not self._usual:
            return None
        else:
            seconds = max(QUIET_STEPS * least_s, QUIET_S) / num_reading
            known = self._quiet
        return _Limit(seconds if num_decoding else max(seconds, LEAST_STEPS * least_s), usual_s, known)

    def observe(self, report: StepReport) -> None:
        """Update the usual time of a step, the predicted time of chunks, and the share, from the last step's report."""
        num_decoding = report.num_decoding
        others = self._turns.beside(self.seat)
        usual = self._usual.get(num_decoding)
        if not report.num_prefill_tokens:
            is_mixed = not self._turns.is_exclusive and any(seat.is_reading for seat in others)
            if num_decoding and not (usual is not None and is_mixed):
                usual = self._usual.setdefault(num_decoding, _Usual())
                usual.observe(report.seconds - sum(draft.catchup_s for draft in report.drafts.values()))
            return
        if usual is not None:
            usual.num_chunks += 1
        elif num_decoding:
            return
        limit = self._limit(num_decoding, others)
        if limit is not None and limit.known is not self._quiet:
            self._judge(report, limit)
        quiet = self._apart if any(seat.num_streams for seat in others) else self._quiet
        known, usual_s = (quiet, 0.0) if usual is None else (self._own, usual.seconds)
        known.observe(report.num_prefill_tokens, report.num_prefill_keys, max(0.0, report.seconds - usual_s))

    def _judge(self, report: StepReport, limit: _Limit) -> None:
        """Adapt the share of the allowed time for which chunks are planned.

        The share is lowered after a step that was too long because of its chunk. The share is raised after a step
        within `limit`. Nothing changes after a step that would have been too long even without its chunk.
        """
        expected_s = limit.known.expected_s(report.num_prefill_tokens, report.num_prefill_keys)
        share = self._share
        if report.seconds <= limit.seconds:
            share *= 1 + _MISSED * _SHARE_MISSED
        elif limit.known.is_known and report.seconds - expected_s <= limit.seconds:
            share *= 1 - _MISSED
        self._share = min(1.0, max(LEAST_SHARE, share))


class _Usual:
    """Holds the median time `seconds` of the last steps without prompts, for one number of decoding requests.

    num_chunks: the number of steps with prompts since the last step without prompts. least_s: the shortest median so
    far. least_s sets the time limit of steps in which no request decodes. The current median would be a worse limit: it
    may contain long drafts, which make a step several times as long and do not help a new request.
    """

    def __init__(self) -> None:
        self._steps_s = deque[float](maxlen=_NUM_STEPS)
        self.seconds, self.least_s, self.num_chunks = 0.0, 0.0, 0

    def observe(self, seconds: float) -> None:
        self._steps_s.append(seconds)
        self.seconds, self.num_chunks = median(self._steps_s), 0
        is_whole = len(self._steps_s) == _NUM_STEPS
        self.least_s = min(self.least_s, self.seconds) if is_whole else self.seconds


class Chunks:
    """Predicts the time of prompt chunks with a line fitted to all chunks.

    The line is multiplied by the median ratio of the last few chunks' times to the line.
    """

    def __init__(self) -> None:
        self._last = deque[tuple[int, int, float]](maxlen=_NUM_CHUNKS)  # tokens, keys that they attended to, seconds
        self._weight = self._keys = self._token_s = self._squares = self._products = 0.0  # decayed means, and moments
        self._base, self._slope, self._level = 0.0, 0.0, 1.0

    def observe(self, num_tokens: int, num_keys: int, seconds: float) -> None:
        """Add the prompt chunks of a step to the fit.

        num_keys: the number of keys that the `num_tokens` tokens attended to, in total. seconds: the time they took.
        """
        self._last.append((num_tokens, num_keys, seconds))
        if len(self._last) == _NUM_CHUNKS:
            seconds = min(
                seconds, 3 * self.expected_s(num_tokens, num_keys)
            )  # so that a pause of the machine does not bend the line
        self._learn(float(num_tokens), num_keys / num_tokens, seconds / num_tokens)
        factors = [s / max(self._line(n, keys), 1e-9) for n, keys, s in self._last]
        self._level = median(factors)

    def _learn(self, weight: float, keys: float, token_s: float) -> None:
        """Update the weighted means and moments (Welford's method, West 1979), and compute the line from them.

        weight: the number of tokens. keys: the mean number of keys per token. token_s: the mean seconds per token.
        """
        before = _KEPT * self._weight
        self._weight = before + weight
        away, part = keys - self._keys, weight / self._weight
        away_s = token_s - self._token_s
        self._keys += part * away
        self._token_s += part * away_s
        self._squares = _KEPT * self._squares + before * part * away * away
        self._products = _KEPT * self._products + before * part * away * away_s
        near = self._weight * _NEAR_KEYS * _NEAR_KEYS
        most = self._token_s / max(self._keys, 1.0)  # keeps the line above 0 at 0 keys
        self._slope = min(most, max(0.0, self._products / (self._squares + near)))
        self._base = self._token_s - self._slope * self._keys

    def _line(self, num_tokens: float, num_keys: float) -> float:
        return self._base * num_tokens + self._slope * num_keys

    @property
    def is_known(self) -> bool:
        """Whether the time of at least one chunk is known."""
        return self._weight > 0

    def expected_s(self, num_tokens: int, num_keys: int) -> float:
        """Return the expected seconds of a chunk; 0 if no chunk has been observed.

        num_keys: the number of keys that the `num_tokens` tokens attend to, in total.
        """
        return self._level * self._line(num_tokens, num_keys)

    def fitting(self, seconds: float, num_before: int) -> int:
        """Return how many prompt tokens are expected to take `seconds`, after `num_before` tokens in the cache."""
        linear, square = self._base + self._slope * num_before, self._slope / 2
        budget = max(0.0, seconds) / max(self._level, 1e-9)
        # linear * n + square * n * n = budget, in the form that does not lose digits where square is tiny
        return int(2 * budget / max(linear + sqrt(linear * linear + 4 * square * budget), 1e-9))
