"""The nouns that every room shares. No arithmetic on models happens here, and nothing imports torch at run time.

Shape legend, used in every docstring of the package:

    B  sequences of one step         T  rows (new tokens) of one ragged batch      N  draft nodes of one step
    R  rows whose logits are wanted  V  vocabulary size (rows of the LM head)      H  hidden size
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex

from forerun.errors import BadOption, InternalError

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
Origin = Literal["accepted", "correction", "bonus", "plain"]


# ---------------------------------------------------------------------------------------------- what a user asks for


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Every field works with speculation, and none of them changes the output law.

    Raises BadOption, naming the field and its value, for anything that cannot be honoured.
    """

    max_tokens: int | None = 128  # tokens to generate at most; None = as far as max_seq_len goes
    min_tokens: int = 0  # end-of-sequence and stop ids cannot be drawn before this many tokens
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # keep the k most likely ids; 0 = all
    top_p: float = 1.0  # keep the shortest prefix of the sorted ids whose mass reaches top_p, in (0, 1]
    min_p: float = 0.0  # drop ids below min_p times the largest probability, in [0, 1]
    repetition_penalty: float = 1.0  # > 0; over prompt and output
    presence_penalty: float = 0.0  # in [-2, 2]; over the output
    frequency_penalty: float = 0.0  # in [-2, 2]; over the output
    logit_bias: Mapping[int, float] | None = None  # id -> added to its logit
    bad_words: tuple[str, ...] = ()  # texts that must not be completed
    stop: tuple[str, ...] = ()  # texts that end the output; they are cut from `text`
    stop_token_ids: tuple[int, ...] = ()  # ids that end the output
    ignore_eos: bool = False  # go on past the model's end-of-sequence ids
    seed: int | None = None  # 64 bit; None = one is drawn and reported
    logprobs: int | None = None  # per token: its log-probability and this many alternatives, 0 to 20
    acceptance: str | None = None  # a verification rule; None = match for a seed and temperature > 0, else ratio

    def __post_init__(self) -> None:
        for name, (convert, what) in _KINDS.items():
            value, optional = getattr(self, name), name == "max_tokens" or getattr(SamplingParams, name) is None
            if value is None and optional:
                continue
            try:
                object.__setattr__(self, name, convert(value))
            except (TypeError, ValueError, OverflowError):
                _require(False, name, value, f"{what}, or None" if optional else what)
        self._check()

    def _check(self) -> None:
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1, or None")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "at most max_tokens")
        # Below 1e-5 a temperature only amplifies rounding: use 0, which is exactly greedy.
        warm = self.temperature == 0 or 1e-5 <= self.temperature < math.inf
        _require(warm, "temperature", self.temperature, "0 (greedy) or a finite number of at least 1e-5")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (all ids) or at least 1")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        penalty = self.repetition_penalty
        _require(0 < penalty < math.inf, "repetition_penalty", penalty, "above 0 and finite")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "in [-2, 2]")
        _require(all(i >= 0 for i in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "ids of 0 or more")
        _require(all(self.stop), "stop", self.stop, "texts that are not empty")
        _require(all(self.bad_words), "bad_words", self.bad_words, "texts that are not empty")
        _require(self.seed is None or 0 <= self.seed < 2**64, "seed", self.seed, "in 0 .. 2**64 - 1")
        _require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", self.logprobs, "in 0 .. 20")
        for token, bias in (self.logit_bias or {}).items():
            ok = token >= 0 and not math.isnan(bias) and bias < math.inf
            _require(ok, "logit_bias", {token: bias}, "from ids >= 0 to numbers below infinity")

    @property
    def greedy(self) -> bool:
        """True where the next token is the argmax."""
        return self.temperature == 0


def _instance(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return value


def _integer(value: Any) -> int:
    return operator.index(_instance(value, SupportsIndex))


def _number(value: Any) -> float:
    return float(_instance(value, numbers.Real))


def _texts(value: Any) -> tuple[str, ...]:
    """None, one text, or several. A text that UTF-8 cannot hold (half a surrogate pair) is a ValueError."""
    texts = (value,) if isinstance(value, str) else tuple(_instance(() if value is None else value, Iterable))
    for text in texts:
        _instance(text, str).encode()
    return texts


def _biases(value: Any) -> dict[int, float]:
    return {_integer(token): _number(bias) for token, bias in _instance(value, Mapping).items()}


# What a field takes: how it becomes a plain Python value, and the words for whoever gave something else.
_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed", "logprobs"), (_integer, "an integer")),
    **dict.fromkeys(("temperature", "top_p", "min_p"), (_number, "a number")),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), (_number, "a number")),
    **dict.fromkeys(("stop", "bad_words"), (_texts, "a text or several, in valid UTF-8")),
    "stop_token_ids": (lambda ids: tuple(map(_integer, () if ids is None else ids)), "several integers"),
    "logit_bias": (_biases, "a mapping from integers to numbers"),
    "ignore_eos": (lambda value: _instance(value, bool), "True or False"),
    "acceptance": (lambda value: _instance(value, str), "a text"),
}


def _require(ok: bool, name: str, value: object, what: str) -> None:
    if not ok:
        raise BadOption(f"{name}={value!r} is not possible: it must be {what}")


# ------------------------------------------------------------------------------------------------- what is committed


@dataclass
class TokenLogprob:
    """Log-probabilities of one position under the raw model distribution (before bias, penalties, temperature)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)  # the most likely ids, best first


@dataclass
class Sequence:
    """One request's committed truth. It grows only through `commit`; drafted tokens never enter it."""

    id: int  # also the slot of its caches
    tokens: list[int]  # prompt, then committed tokens
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_len: int  # prompt + output tokens at most, by max_tokens and max_seq_len
    end_ids: frozenset[int] = frozenset()  # ids that end the output (end of sequence and stop ids)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    round: int = 0  # decode steps so far; part of the random counter, so it survives preemption
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)

    def commit(self, tokens: Seq[int]) -> None:
        """Append verified tokens. Raises InternalError on a finished sequence or beyond max_len."""
        if self.finish_reason is not None or len(self.tokens) + len(tokens) > self.max_len:
            raise InternalError(f"sequence {self.id} cannot take {len(tokens)} more tokens")
        self.tokens.extend(tokens)

    @property
    def output_ids(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def acceptance(self) -> str:
        """The verification rule of this request; design: match where a seed was given and temperature > 0."""
        if self.params.acceptance is not None:
            return self.params.acceptance
        return "match" if self.params.seed is not None and not self.params.greedy else "ratio"


# --------------------------------------------------------------------------------------------- probabilities, coins


@dataclass(frozen=True, slots=True)
class Probs:
    """One exact distribution over V ids: a dense vector, or a point mass that nobody spells out as a one-hot of V."""

    point: int | None = None  # the id that has probability 1
    dense: Tensor | None = None  # [V], float32 or wider

    def at(self, token: int) -> float:
        """Probability of `token`; ids beyond the vector have none."""
        if self.dense is None:
            return 1.0 if token == self.point else 0.0
        return float(self.dense[token]) if token < self.dense.shape[0] else 0.0


class Coins(Protocol):
    """Injected randomness of one sequence in one round (docs/exactness.md).

    `depth` counts from the first token of the round: the token decided has absolute index (committed tokens + depth).
    `lane` separates several coins at one depth.
    """

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        """True with probability min(1, prob); never for 0, always for 1."""

    def draw(self, probs: Probs, depth: int) -> int:
        """An id with the law `probs`: a correction or a bonus."""

    def draft(self, probs: Probs, depth: int) -> int:
        """An id with the law `probs`: a drafter's own draw."""

    def pick(self, probs: Probs, depth: int) -> int:
        """argmax of log probs + Gumbel noise of (seed, absolute index): shared by drafter, verifier, plain decoding."""


# ------------------------------------------------------------------------------------------------ the guess, the ruling


@dataclass(frozen=True)
class Draft:
    """The guess for the sequences of one step, flat.

    tokens [N], parents [N] (index of the parent node in the same flat numbering, -1 = hangs from the last committed
    token; parents come before children), node_starts [B+1], probs [N] (the law each token was drawn from).
    A chain is a tree whose parent is the node before. Zero nodes is legal: that is plain decoding.
    """

    tokens: list[int]
    parents: list[int]
    node_starts: list[int]
    probs: list[Probs]

    @staticmethod
    def empty(num_sequences: int) -> Draft:
        """No guesses for anybody."""
        return Draft([], [], [0] * (num_sequences + 1), [])

    @staticmethod
    def chains(tokens: Seq[Seq[int]], probs: Seq[Seq[Probs]]) -> Draft:
        """One chain per sequence: tokens[b][i] was drawn from probs[b][i] after tokens[b][:i]."""
        starts, parents = [0], []
        for chain in tokens:
            parents += [-1 if i == 0 else starts[-1] + i - 1 for i in range(len(chain))]
            starts.append(starts[-1] + len(chain))
        return Draft([t for c in tokens for t in c], parents, starts, [p for c in probs for p in c])

    @property
    def num_sequences(self) -> int:
        return len(self.node_starts) - 1

    def nodes(self, b: int) -> range:
        """The flat indices of sequence b's nodes."""
        return range(self.node_starts[b], self.node_starts[b + 1])

    def path(self, node: int) -> list[int]:
        """Flat indices from the root's child down to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


@dataclass
class Budget:
    """How far this step may draft. Made by the pacing policy, read by the drafter.

    num_tokens [B]: most draft nodes of each sequence. catchup_tokens: most committed tokens the drafter may run
    through its own model before drafting. go_on(b, depth, draft_probs): asked before each draw; it may look at
    the law, never at the drawn token (docs/exactness.md).
    """

    num_tokens: list[int]
    catchup_tokens: int
    go_on: Callable[[int, int, Probs], bool]


@dataclass(frozen=True)
class Trial:
    """One coin of a verdict, for whoever listens: node, its target and draft probability, and the outcome."""

    node: int
    target_prob: float
    draft_prob: float
    accepted: bool


@dataclass
class Verdict:
    """The ruling on a Draft. Lists over the B sequences; a step emits len(paths[b]) + 1 tokens."""

    paths: list[list[int]]  # accepted nodes, flat indices, root to tip
    next_tokens: list[int]  # correction after a rejection, bonus after none, plain where nothing was drafted
    trials: list[list[Trial]]  # every test at which the path stood, in order

    def emitted(self, draft: Draft, b: int) -> list[int]:
        """Accepted tokens, then the next token."""
        return [draft.tokens[n] for n in self.paths[b]] + [self.next_tokens[b]]


# ------------------------------------------------------------------------------------------------ one forward pass


@dataclass(frozen=True)
class RaggedBatch:
    """One forward pass: each sequence contributes a run of new tokens, and nothing is padded.

    tokens [T] and positions [T] (int64), run_starts [B+1], slots [B] (cache slot of each run), cached [B] (tokens of
    the slot that are in the cache already). parents [T]: row of the parent in this batch, -1 = the committed context;
    None = every row follows the row before it. logit_rows: rows of T whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    run_starts: list[int]
    slots: list[int]
    cached: list[int]
    parents: list[int] | None = None
    logit_rows: list[int] = field(default_factory=list)

    def run(self, b: int) -> range:
        """Rows of run b."""
        return range(self.run_starts[b], self.run_starts[b + 1])

    def ancestors(self, row: int, b: int) -> list[int]:
        """Rows of run b that `row` sees, itself included, in depth order."""
        start = self.run_starts[b]
        if self.parents is None:
            return list(range(start, row + 1))
        path = [row]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]


@dataclass(frozen=True)
class CacheView:
    """Where one ragged batch reads and writes; the same for all layers.

    write_rows [T]: physical row of each new token. read_rows[b] [cached + n]: physical rows of run b's keys, the kept
    ones in logical order, then the run's own.
    """

    batch: RaggedBatch
    write_rows: Tensor
    read_rows: list[Tensor]


# ---------------------------------------------------------------------------------------------------- what was done


@dataclass
class RoundDetail:
    """One sequence's round, for listeners that asked for detail. Probabilities are of the drafted tokens."""

    sequence_id: int
    position: int  # absolute index of the first token of this round
    tokens: list[int]  # drafted
    parents: list[int]  # within this round; -1 = the last committed token
    draft_probs: list[float]
    target_probs: list[float | None]  # None behind a rejection, where nobody looked
    trials: list[Trial]  # nodes counted within this round
    accepted: list[int]  # node indices within this round
    next_token: int
    granted: int  # the pacing policy's budget


@dataclass
class StepReport:
    """The numbers of one step; metrics, printers, benchmarks and pacing read this and nothing else."""

    num_prefill_tokens: int = 0
    num_decoding: int = 0  # sequences that emitted
    num_drafted: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    num_emitted: int = 0  # before stop conditions cut
    num_committed: int = 0  # after
    draft_s: float = 0.0
    score_s: float = 0.0
    judge_s: float = 0.0
    commit_s: float = 0.0
    target_forward_s: float = 0.0  # the part of score_s inside the model
    rounds: list[RoundDetail] = field(default_factory=list)  # only when a listener wants detail


Listener = Callable[[StepReport], Any]
