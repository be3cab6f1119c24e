"""How many tokens of prompts a step runs while other requests decode, so that no stream waits longer than was promised.

A chunk of 512 tokens on a CPU takes as long as dozens of decoding steps, and every stream would wait for it. What a
token of a prompt takes, and how long a step usually is, are learned from the reports of steps; no clock is read here.

A token takes the longer the more keys stand before it: seconds = base + slope * keys, by weighted least squares over
the last hundreds of chunks. What the last few of them took over that, at the median, corrects it. The promise is one on
the 99th percentile and not on the mean, so a share of what is allowed is aimed at: a step that was too long makes the
share smaller by a tenth, and each that was not makes it so much larger that of 200 steps one is too long in the end.

How long a step without prompts is depends on how many requests decode. Where that is not known, or was seen too long
ago, a step runs without prompts.
"""

from __future__ import annotations

from collections import deque
from math import sqrt
from statistics import median

from forerun.types import StepReport

LEAST_TOKENS = 1  # per step, however long they take: else a prompt might never be read
FIRST_TOKENS = 16  # while nothing is known
RENEWED_AFTER = 32  # steps with prompts, behind which the usual step is looked at again
FIRST_SHARE, LEAST_SHARE = 0.8, 0.5  # of the seconds that a chunk may add
_MISSED, _SHARE_MISSED = 0.1, 0.005  # what a step that was too long takes off; how many may be
_NUM_STEPS = 9  # whose median is the usual one
_NUM_CHUNKS = 9  # whose median corrects what is expected
_KEPT = 0.995  # of the weight of each earlier chunk
_NEAR_KEYS = 256.0  # positions nearer to each other than this say little of the slope


class Fair:
    """The allowance of each step.

    stretch: of a step with prompts over one without; max_itl_s: its seconds. None = there is no such limit; of two the
    smaller holds.
    """

    def __init__(self, stretch: float | None, max_itl_s: float | None = None) -> None:
        self.stretch, self.max_itl_s = stretch, max_itl_s
        self._usual = dict[int, _Usual]()  # by how many decode
        self._chunks = _Chunks()
        self._share = FIRST_SHARE

    @property
    def is_off(self) -> bool:
        """Whether prompts are read as if nobody waited."""
        return self.stretch is None and self.max_itl_s is None

    def tokens(self, most: int, num_decoding: int, num_before: int = 0) -> int:
        """Tokens of prompts for a step in which so many requests decode, at most `most`.

        num_before: tokens before the chunk in its own text. 0 = the step is to show how long it is without prompts.
        """
        if self.is_off:
            return most
        usual = self._usual.get(num_decoding)
        if usual is None or usual.num_chunks >= RENEWED_AFTER:
            return 0
        own = self._chunks.fitting(self._share * (self._allowed_s(usual) - usual.seconds), num_before)
        return min(most, FIRST_TOKENS if own is None else max(LEAST_TOKENS, own))

    def _allowed_s(self, usual: _Usual) -> float:
        limits = [] if self.max_itl_s is None else [self.max_itl_s]
        return min(limits if self.stretch is None else [*limits, self.stretch * usual.seconds])

    def observe(self, report: StepReport) -> None:
        """The numbers of the step that was just done."""
        if not report.num_decoding or self.is_off:
            return
        caught_up_s = sum(draft.catchup_s for draft in report.drafts.values())
        usual = self._usual.get(report.num_decoding)
        if not report.num_prefill_tokens:
            if usual is None:
                usual = self._usual[report.num_decoding] = _Usual()
            usual.observe(report.seconds - caught_up_s)
        elif usual is not None:
            usual.num_chunks += 1
            self._judge(report, self._allowed_s(usual))
            more_s = max(0.0, report.seconds - usual.seconds)
            self._chunks.observe(report.num_prefill_tokens, report.num_prefill_keys, more_s)

    def _judge(self, report: StepReport, allowed_s: float) -> None:
        """Aim lower behind a step that was too long, unless it would have been without its chunk, too."""
        expected_s = self._chunks.expected_s(report.num_prefill_tokens, report.num_prefill_keys)
        if report.seconds <= allowed_s:
            share = self._share * (1 + _MISSED * _SHARE_MISSED)
        elif expected_s is not None and report.seconds - expected_s <= allowed_s:
            share = self._share * (1 - _MISSED)
        else:
            return
        self._share = min(1.0, max(LEAST_SHARE, share))


class _Usual:
    """How long steps without prompts are, at the median. num_chunks: steps with prompts since the last of them."""

    def __init__(self) -> None:
        self._steps_s = deque[float](maxlen=_NUM_STEPS)
        self.seconds, self.num_chunks = 0.0, 0

    def observe(self, seconds: float) -> None:
        self._steps_s.append(seconds)
        self.seconds, self.num_chunks = median(self._steps_s), 0


class _Chunks:
    """What chunks took: a line through all of them, and how far the last ones are from it."""

    def __init__(self) -> None:
        self._last = deque[tuple[int, int, float]](maxlen=_NUM_CHUNKS)  # tokens, keys that their rows saw, seconds
        self._weight = self._keys = self._token_s = self._squares = self._products = 0.0  # decayed means, and moments
        self._base, self._slope, self._level = 0.0, 0.0, 1.0

    def observe(self, num_tokens: int, num_keys: int, seconds: float) -> None:
        self._last.append((num_tokens, num_keys, seconds))
        expected_s = self.expected_s(num_tokens, num_keys)
        if expected_s is not None and len(self._last) == _NUM_CHUNKS:
            seconds = min(seconds, 3 * expected_s)  # one pause of the machine is not to bend the line
        self._learn(float(num_tokens), num_keys / num_tokens, seconds / num_tokens)
        factors = [s / max(self._line(n, keys), 1e-9) for n, keys, s in self._last]
        self._level = median(factors)

    def _learn(self, weight: float, keys: float, token_s: float) -> None:
        """Welford's update of weighted means and moments (West 1979), and from them the line."""
        before = _KEPT * self._weight
        self._weight = before + weight
        away, part = keys - self._keys, weight / self._weight
        away_s = token_s - self._token_s
        self._keys += part * away
        self._token_s += part * away_s
        self._squares = _KEPT * self._squares + before * part * away * away
        self._products = _KEPT * self._products + before * part * away * away_s
        near = self._weight * _NEAR_KEYS * _NEAR_KEYS
        most = self._token_s / max(self._keys, 1.0)  # a line that is not below 0 where there are no keys
        self._slope = min(most, max(0.0, self._products / (self._squares + near)))
        self._base = self._token_s - self._slope * self._keys

    def _line(self, num_tokens: float, num_keys: float) -> float:
        return self._base * num_tokens + self._slope * num_keys

    def expected_s(self, num_tokens: int, num_keys: int) -> float | None:
        """Seconds of a chunk; None while none was seen."""
        return self._level * self._line(num_tokens, num_keys) if self._weight else None

    def fitting(self, seconds: float, num_before: int) -> int | None:
        """Tokens behind so many others that are expected to take so long; None while no chunk was seen."""
        if not self._weight:
            return None
        linear, square = self._base + self._slope * num_before, self._slope / 2
        budget = max(0.0, seconds) / max(self._level, 1e-9)
        # linear * n + square * n * n = budget, in the form that does not lose digits where square is tiny
        return int(2 * budget / max(linear + sqrt(linear * linear + 4 * square * budget), 1e-9))
