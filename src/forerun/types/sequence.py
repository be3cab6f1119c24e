"""The committed tokens of a request, and the reason why its output ends."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from forerun.errors import InternalError
from forerun.params import SamplingParams
from forerun.types.hypotheses import Hypotheses

FinishReason = Literal["stop", "length", "abort"]
Origin = Literal["accepted", "correction", "bonus", "plain"]
BEAM = "beam"  # takes the place of a rule for a beam search


@dataclass
class TokenLogprob:
    """Log-probabilities of one position under the raw model distribution (before bias, penalties, temperature)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)  # the most likely ids, best first


class TokenCounts:
    """The distinct token ids of a sequence, and how often each occurs in the output; the penalties need these counts.

    `update` reads each token once, on the first call after the token was committed. So the penalties cost the same
    however long the sequence is. For a request without penalties `update` is never called.
    """

    __slots__ = ("_num_counted", "counts", "ids", "places")

    def __init__(self) -> None:
        self.ids = array("q")  # in the order of their first occurrence
        self.counts = array("q")  # by index in `ids`; 0 = the id is in the prompt only
        self.places: dict[int, int] = {}  # id -> its index in `ids` and `counts`
        self._num_counted = 0

    def update(self, tokens: Seq[int], num_prompt_tokens: int) -> None:
        """Count the tokens that were appended since the last call."""
        if self._num_counted == 0:
            self.ids = array("q", dict.fromkeys(tokens[:num_prompt_tokens]))
            self.counts = array("q", bytes(8 * len(self.ids)))
            self.places = {token: place for place, token in enumerate(self.ids)}
            self._num_counted = num_prompt_tokens
        for token in tokens[self._num_counted :]:
            place = self.places.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(0)
            self.counts[place] += 1
        self._num_counted = len(tokens)


def salt_of(source_ids: Seq[int], salt: str | None) -> str:
    """Return a salt made of a request's salt and its encoder input. Different inputs then share no cache rows."""
    return f"{salt or ''} {hashlib.sha256(array('q', source_ids).tobytes()).hexdigest()}"


class Constraint(Protocol):
    """A grammar's state along a sequence (forerun.sampling.grammar.GrammarState)."""

    @property
    def failure(self) -> Exception | None:
        """The error that ends the request, because the grammar can no longer be followed; None = no error."""

    @property
    def may_draft(self) -> bool:
        """Whether drafters may query the grammar, which takes time."""

    def allowed(self, committed: Seq[int], drafted: Seq[int] = ()) -> Any:
        """Return the ids that may follow these tokens. Raises BadOption for tokens that the grammar does not allow."""

    def is_over(self, committed: Seq[int], drafted: Seq[int] = ()) -> bool:
        """Return whether nothing can follow these tokens, because they are a whole text of the grammar."""

    def forced(self, committed: Seq[int], drafted: Seq[int] = ()) -> list[int]:
        """Return the tokens that must come next."""

    def behind(self, committed: Seq[int], sure: Seq[int]) -> Constraint:
        """Return this constraint with the forced tokens `sure` treated as committed, for a drafter."""


@dataclass(slots=True)
class Sequence:
    """The committed tokens of one request. Only `commit` appends tokens; drafted tokens are never among them.

    acceptance: the verification rule. Where the request names no rule, the rule is match if the request has a seed and
    a temperature above 0, else ratio.
    """

    id: int  # also the sequence's slot in the caches
    tokens: list[int]  # prompt, then committed tokens
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    max_len: int  # prompt + output tokens at most, by max_tokens and max_seq_len
    end_ids: frozenset[int] = frozenset()  # ids that end the output (end of sequence and stop ids)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    prediction_ids: tuple[int, ...] = ()  # the text that the request expects its output to resemble
    draft: str = "none"  # name of the drafter that serves the sequence
    round: int = 0  # decode steps so far; part of the random counter, so it survives preemption
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # By place in the prompt, where the request asks for them; None for the first token, which nothing precedes.
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    hypotheses: Hypotheses | None = None  # of a beam search; the tokens that all its beams begin with are committed
    source_ids: tuple[int, ...] = ()  # the encoder's input, for an encoder-decoder; `tokens` are the decoder's
    grammar: Constraint | None = None  # the grammar that the output must follow
    acceptance: str = field(init=False)
    counts: TokenCounts = field(init=False, default_factory=TokenCounts, repr=False, compare=False)

    def __post_init__(self) -> None:
        usual = "match" if self.params.seed is not None and not self.params.greedy else "ratio"
        self.acceptance = usual if self.params.acceptance is None else self.params.acceptance

    def commit(self, token: int, origin: Origin) -> FinishReason | None:
        """Append a verified token, and return why the output ends with this token; None where the output goes on.

        Stop strings are not looked at here, because they need the text.
        Raises InternalError on a finished sequence or beyond max_len.
        """
        if self.finish_reason is not None or len(self.tokens) >= self.max_len:
            raise InternalError(f"sequence {self.id} cannot take one more token")
        self.tokens.append(token)
        self.origins.append(origin)
        is_full = len(self.tokens) >= self.max_len
        if is_full and self.params.forced_eos_token_id is not None:
            return "length"  # this end token was forced: the model did not choose to stop
        if token in self.end_ids:
            return "stop"
        if self.grammar is not None and self.hypotheses is None and self.grammar.is_over(self.tokens):
            return "stop"
        return "length" if is_full else None

    def behind(self, sure: Seq[int]) -> Sequence:
        """Return the sequence with the forced tokens `sure` treated as committed, for a drafter to read."""
        grammar = None if self.grammar is None else self.grammar.behind(self.tokens, sure)
        return replace(self, tokens=[*self.tokens, *sure], grammar=grammar)

    @property
    def salt(self) -> str | None:
        """The salt of the cache rows: the request's salt, joined with a hash of the encoder's input if there is one."""
        return salt_of(self.source_ids, self.params.cache_salt) if self.source_ids else self.params.cache_salt

    @property
    def is_only_read(self) -> bool:
        """Whether the request asks for no output tokens after the prompt."""
        return self.max_len == self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        """The committed tokens after the prompt."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens
