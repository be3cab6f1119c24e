"""Requests in the engine, with their sequences, texts, reports and outputs."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from forerun import verify
from forerun.errors import ForerunError
from forerun.registry import REQUIRED, option, with_fields
from forerun.sampling import logprobs_of, only_filters, takes_the_best
from forerun.text.answer_form import AnswerForm
from forerun.text.detokenizer import Detokenizer
from forerun.text.parts import AnswerParts, Part, ToolCall
from forerun.text.reading import PartsReader
from forerun.text.tokenizer import Tokenizer
from forerun.types import (
    Coins,
    Draft,
    FinishReason,
    Origin,
    Probs,
    RoundDetail,
    Sequence,
    SequenceStep,
    TokenLogprob,
    Toss,
    Verdict,
)

if TYPE_CHECKING:
    from forerun.kv import Held
    from forerun.models.runner import Run, Scores
    from forerun.sampling.largest import Rows
    from forerun.verify import Ruling


@dataclass(slots=True)
class RequestReport:
    """Holds counts and times of speculation for one request. Tokens are counted before stop conditions cut the output.

    The outputs of a beam search share one report. In this report, emitted tokens are the steps of the search, and
    accepted and tested tokens are levels of its drafts. So the mean accepted length is the number of steps per pass.
    docs/exactness.md defines the counts. A rate is None if its denominator is 0.
    """

    draft: str = ""  # name of the drafter that served it
    acceptance: str = ""  # the verification rule, with its options
    is_lossless: bool = True  # whether the rule keeps exactly the target's distribution
    num_steps: int = 0  # target passes that emitted for this request
    num_rows: int = 0  # of these passes: for the last token, or for each beam's last token, and for the draft
    num_drafted: int = 0
    num_tested: int = 0  # positions of the path at which drafted tokens were tested; siblings count once
    num_accepted: int = 0
    num_emitted: int = 0  # accepted tokens plus one correction, bonus or plain token per step
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)  # one per output token
    rounds: list[tuple[int, int]] = field(default_factory=list)  # per step: tokens drafted, and accepted
    prices: list[float] = field(default_factory=list)  # of a lossy rule: AcceptanceTest.price of each test
    draft_prefill_s: float = 0.0  # its share of the draft model's time for catching up
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_disk_tokens: int = 0  # of these, fetched from disk for this request
    num_preemptions: int = 0
    arrived_at_s: float = 0.0  # by time.monotonic, like the times below; these are None until they happen
    scheduled_at_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    read_at_s: float | None = None  # when the prompt was read to its end, where no output is wanted (max_tokens=0)

    @property
    def ended_at_s(self) -> float | None:
        """The time at which the last token was committed; None before the first token.

        For a request that asks for no output tokens: the time at which the prompt was run to its end.
        """
        return self.last_token_at_s if self.read_at_s is None else self.read_at_s

    @property
    def acceptance_rates(self) -> list[float]:
        """For each round with a draft, the share of drafted tokens that were accepted."""
        return [accepted / drafted for drafted, accepted in self.rounds if drafted]

    @property
    def acceptance_rate(self) -> float | None:
        """The share of drafted tokens that were accepted; None if no token was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """The mean number of tokens that a target pass emits, the correction, bonus or plain token included."""
        return self.num_emitted / self.num_steps if self.num_steps else None

    @property
    def rows_per_pass(self) -> float | None:
        """The mean number of the request's rows in a target pass.

        In a beam search, a pass has at most num_beams + draft_beams * levels rows.
        """
        return self.num_rows / self.num_steps if self.num_steps else None

    @property
    def alpha_hat(self) -> float | None:
        """The share of tested tokens that were accepted, an estimate of alpha in docs/exactness.md; None if no test."""
        return self.num_accepted / self.num_tested if self.num_tested else None

    @property
    def tv_price(self) -> float | None:
        """The mean total variation between the target's and the output's distribution, over all tests.

        None unless the verification rule is lossy and computes this value.
        """
        return sum(self.prices) / len(self.prices) if self.prices else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """For each position in a draft, the acceptance rate over the rounds that drafted a token at this position.

        In a tree, the position is the depth. At most one token is accepted at each depth.
        """
        return [a / d for a, d in zip(self.accepted_per_position, self.drafted_per_position, strict=True)]

    def sentence(self) -> str:
        """Return a summary of the counts in one line, for the log."""
        said = f"{self.num_emitted} tokens in {self.num_steps} steps"
        if self.alpha_hat is None:
            return f"{said}; nothing was drafted"
        counted = f"{self.num_accepted} of {self.num_tested} tested tokens"
        return f"{said}; alpha-hat {self.alpha_hat:.2f} ({counted}), acceptance rate {self.acceptance_rate:.2f}"

    def count(
        self,
        num_drafted: int,
        depth: int,
        num_accepted: int,
        num_tested: int,
        num_rows: int,
        num_emitted: int | None = None,
    ) -> None:
        """Add the counts of one round.

        num_drafted: the number of nodes in the draft. depth: the number of nodes on the draft's longest path.
        num_accepted: the number of accepted nodes. num_tested: the number of positions at which at least one node was
        tested, so num_accepted, or one more if the last test was a rejection. num_rows: the number of rows of this
        request in the target's pass. num_emitted: the number of emitted tokens; None = num_accepted + 1.
        """
        self.num_steps += 1
        self.num_rows += num_rows
        self.num_emitted += num_accepted + 1 if num_emitted is None else num_emitted
        self.rounds.append((num_drafted, num_accepted))
        if not num_drafted:
            return
        self.num_drafted += num_drafted
        self.num_tested += num_tested
        self.num_accepted += num_accepted
        for counts, length in ((self.drafted_per_position, depth), (self.accepted_per_position, num_accepted)):
            counts.extend([0] * (depth - len(counts)))
            for i in range(length):
                counts[i] += 1


@with_fields
@dataclass
class RequestOutput:
    """Holds one output of one prompt, for the user."""

    prompt_ids: list[int] = option(REQUIRED, "ids of the prompt")
    text: str = option(REQUIRED, "what was written, without a stop text; empty where the model has no tokenizer")
    token_ids: list[int] = option(REQUIRED, "ids of the output, with the one that ended it")
    finish_reason: FinishReason | None = option(REQUIRED, "stop, length or abort; None while it goes on")
    logprobs: list[TokenLogprob] | None = option(
        REQUIRED, "of each output token, where SamplingParams.logprobs asked for them"
    )
    seed: int = option(REQUIRED, "the one that was given, else drawn: with it the same text comes again")
    report: RequestReport = option(REQUIRED, "what speculation did: passes, drafted and accepted tokens, times")
    index: int = option(0, "among the outputs of one prompt, where SamplingParams.n asked for several")
    stop_text: str | None = option(None, "of SamplingParams.stop, the one that ended it")
    score: float | None = option(
        None, "of a beam search: cumulative_logprob / length^length_penalty; outputs are in its order"
    )
    cumulative_logprob: float | None = option(None, "of a beam search: the sum of the log-probabilities of token_ids")
    answer_parts: AnswerParts | None = option(
        None, "of a chat: the same in its parts, where the model has marks for them"
    )

    prompt_logprobs: list[TokenLogprob | None] | None = option(
        None, "of the prompt's tokens, where SamplingParams.prompt_logprobs asked for them; first None"
    )

    @property
    def content(self) -> str:
        """The text for the user, without reasoning and tool calls."""
        return self.text if self.answer_parts is None else self.answer_parts.text

    @property
    def reasoning(self) -> str:
        """The reasoning before the answer; '' if the model has no marks for reasoning."""
        return "" if self.answer_parts is None else self.answer_parts.reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of the conversation's tools, each with its name and arguments (a JSON text)."""
        return [] if self.answer_parts is None else self.answer_parts.calls

    @property
    def num_broken_calls(self) -> int:
        """The number of tool calls that were left out because they are incomplete."""
        return 0 if self.answer_parts is None else self.answer_parts.num_broken_calls

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of role "assistant", to append to the conversation."""
        return {"role": "assistant", "content": self.text} if self.answer_parts is None else self.answer_parts.message()


@with_fields
@dataclass
class Chunk:
    """Holds a piece of a streamed output."""

    text: str = option(REQUIRED, "text that can no longer change, behind that of the last piece")
    token_ids: list[int] = option(REQUIRED, "ids that were committed since the last piece")
    finish_reason: FinishReason | None = option(None, "why the output ended; None before its last piece")
    output: RequestOutput | None = option(None, "the whole output, with the last piece")
    index: int = option(0, "of the output, where SamplingParams.n asked for several")
    logprobs: list[TokenLogprob] | None = option(None, "of these tokens, where SamplingParams.logprobs asked for them")
    parts: list[Part] | None = option(
        None, "what these tokens add to text, reasoning and calls, where they are told apart"
    )
    said: Seq[int] = option(
        (), "places in the output of the tokens that make the text of these parts, where logprobs are asked for"
    )


@dataclass(frozen=True)
class Mark:
    """Records the progress of a request after a step.

    num_tokens: the number of output tokens. num_readable: the number of output tokens that are not end tokens.
    """

    num_tokens: int
    num_readable: int
    finish_reason: FinishReason | None


def unheard(request: Request) -> None:
    """Do nothing. This function is the default of `Request.hear`."""


class Committed(NamedTuple):
    """Holds the result of one step for one request.

    step: the counts for the report. kept: the rows of the request's run to keep in the cache, because their tokens are
    committed. The row of the last committed token is not among them. num_emitted: the number of emitted tokens, before
    stop conditions cut the output. held: the rows of a beam search that stay pending in the cache.
    """

    step: SequenceStep
    kept: Seq[int]
    num_emitted: int
    held: Held | None = None


class Request:
    """Represents a request: a sequence with its text, report and output.

    hear(request): called by the thread that steps, after each step that advanced the request and when the request ends.

    A step calls `run`, `judge` and `commit` in this order. Their argument `draft` covers all sequences of the step, and
    this request is sequence b of the draft. A SampledRequest decodes one text. A SearchRequest runs the beams of a beam
    search. A plain Request is one output of a beam search, and is never run.
    """

    hear: Callable[[Request], None] = staticmethod(unheard)
    num_rows = 1  # rows of its next decoding pass without a draft
    num_unrun = 1  # tokens at the end of its prompt and output, or of its beams, that a pass has still to run
    num_places = 1  # places that it takes in a batch
    is_paced = True  # whether the pacing policy grants it nodes

    def __init__(
        self,
        seq: Sequence,
        tokenizer: Tokenizer | None,
        *,
        index: int = 0,
        leader: Request | None = None,
        outputs: Seq[Request] = (),
    ) -> None:
        self.seq, self.index = seq, index
        self._leader = leader  # the first of several outputs for one prompt
        self.searcher: Request | None = None  # the request whose beam search finds this output
        rule = verify.find(seq.acceptance)
        self.takes_the_best = takes_the_best(seq.params, seq.bad_word_ids) and not rule.reads_soft_rows
        self.only_filters = only_filters(seq.params, seq.bad_word_ids) and not seq.params.greedy
        self.report = RequestReport(
            draft=seq.draft,
            acceptance=seq.acceptance,
            is_lossless=rule.is_lossless,
            origins=seq.origins,
            arrived_at_s=time.monotonic(),
        )
        self.answer_form: AnswerForm | None = None  # splits its text into parts, where that is wanted
        self._answer_parts: AnswerParts | None = None
        self.error: ForerunError | None = None  # why it was aborted, if not by the user
        self._tokenizer = tokenizer
        self._reader: Detokenizer | None = None
        self._stops_at_texts = bool(seq.params.stop)
        self._text, self._num_readable = "", 0  # output tokens that have a text: all but an end token
        self._num_read, self._is_read = 0, False  # tokens in _text, and whether _text is the whole text
        self.score: float | None = None
        self.cumulative_logprob: float | None = None
        self.outputs = outputs  # the outputs that its beam search fills
        self.is_sought = False  # whether its rows were looked up on disk
        self.num_fetching, self.num_fetched = 0, 0  # caches that still wait for rows from disk, and tokens that arrived
        self._reading = threading.RLock()  # the text may be asked for while the engine's thread commits

    def run(self, draft: Draft, b: int, best_only: bool, coins: Coins | None = None) -> Run:
        """Return the Run of the request in the next pass: the last committed token, then the draft.

        best_only: whether the pass can return the likeliest token of each row instead of logits. The Run asks for this
        if the request needs no logits. coins: the random numbers of this round, with which the device may draw tokens;
        None = the device must not draw.
        """
        raise NotImplementedError

    def judge(self, draft: Draft, b: int, scores: Scores, coins: Coins) -> Ruling:
        """Decide which drafted tokens are accepted, and which token follows. No token is committed.

        scores: the results of the pass, in which run b belongs to this request. coins: the random numbers of this
        round, with which the verification rule decides.
        """
        raise NotImplementedError

    def commit(self, draft: Draft, b: int, scores: Scores, verdict: Verdict) -> Committed:
        """Count the round in the report, and append the tokens that `verdict` has decided for sequence b."""
        raise NotImplementedError

    def judged_rows(self) -> Seq[Probs | None]:
        """Return the target's distributions that the last ruling has read; None for each that it has not read.

        Item 0 is the distribution after the last committed token. Item 1 + i is the distribution after node i of the
        request's draft.
        """
        return ()

    def next_token(self, verdict: Verdict, b: int) -> int:
        """Return the token that follows the accepted nodes of sequence b, for the details that listeners get."""
        return verdict.next_tokens[b]

    def detail(
        self, draft: Draft, b: int, verdict: Verdict, granted: int, tosses: Seq[Toss], pacing: Mapping[str, float]
    ) -> RoundDetail:
        """Return the details of a round that is judged but not yet committed.

        The details number the nodes of this sequence from 0. granted: the number of nodes that the pacing policy
        granted. tosses: the random decisions of the verification rule in this round, each with its probability and its
        random number. pacing: facts of the pacing policy.
        """
        nodes, known = draft.nodes(b), self.judged_rows()
        parents = [p - nodes.start if p >= 0 else -1 for p in draft.parents[nodes.start : nodes.stop]]
        judging = [known[parent + 1] if known else None for parent in parents]
        return RoundDetail(
            sequence_id=self.seq.id,
            position=len(self.seq.tokens),
            tokens=[draft.tokens[n] for n in nodes],
            parents=parents,
            draft_probs=[draft.probs[n].at(draft.tokens[n]) for n in nodes],
            target_probs=[None if p is None else p.at(draft.tokens[n]) for n, p in zip(nodes, judging, strict=True)],
            tests=[dataclasses.replace(test, node=test.node - nodes.start) for test in verdict.tests[b]],
            accepted=[n - nodes.start for n in verdict.paths[b]],
            next_token=self.next_token(verdict, b),
            granted=granted,
            tosses=tosses,
            pacing=pacing,
        )

    def append(self, tokens: Seq[int], origins: Seq[Origin], logprobs: Seq[TokenLogprob] = ()) -> int:
        """Append tokens up to the first token that ends the output, and discard later tokens.

        Stop conditions are checked after each token. Returns the number of appended tokens.
        """
        seq = self.seq
        for i, token in enumerate(tokens):
            reason = seq.commit(token, origins[i])
            if logprobs:
                seq.logprobs.append(logprobs[i])
            if token not in seq.end_ids:  # that token is kept in token_ids and never appears in the text
                self._num_readable += 1
                if self._stops_at_texts and self._has_stop_text():
                    reason = "stop"
            if reason is not None:
                seq.finish_reason = reason
                if self._stops_at_texts:
                    self._read()
                return i + 1
        return len(tokens)

    def abort(self) -> None:
        """End the request with the finish reason "abort". The request keeps its committed tokens.

        The unfinished outputs of a beam search end, too.
        """
        self.seq.finish_reason = "abort"
        for output in self.outputs:
            if output.seq.finish_reason is None:
                output.error = self.error
                output.abort()

    def restart(self) -> None:
        """Update the request after its cache rows were released. Only a beam search has to be updated."""

    def detokenizer(self) -> Detokenizer | None:
        """Return a new reader of the output's text; None without a tokenizer."""
        seq = self.seq
        prompt = seq.tokens[: seq.num_prompt_tokens]
        if self._tokenizer is None:
            return None
        return Detokenizer(self._tokenizer, prompt, seq.params.stop, num_free=seq.params.min_tokens)

    def parts_reader(self) -> PartsReader | None:
        """Return a new reader of the output's parts; None where the text is not split into parts."""
        seq = self.seq
        if self.answer_form is None or self._tokenizer is None:
            return None
        prompt = seq.tokens[: seq.num_prompt_tokens]
        traces = seq.params.logprobs is not None
        return PartsReader(
            self.answer_form, self._tokenizer, prompt, seq.params.stop, seq.params.min_tokens, traces=traces
        )

    @property
    def answer_parts(self) -> AnswerParts | None:
        """The output so far, split into its parts; None where the text is not split into parts."""
        with self._reading:
            if self._answer_parts is None and (reader := self.parts_reader()) is not None:
                first = self.seq.num_prompt_tokens
                reader.push(self.seq.tokens[first : first + self._num_readable])
                reader.finish(is_cut=self.seq.finish_reason != "stop")
                if self.seq.finish_reason is None:
                    return reader.answer_parts
                self._answer_parts = reader.answer_parts
            return self._answer_parts

    def keep(self, answer_parts: AnswerParts) -> None:
        """Store the parts that a stream has read, so that the stream and the whole output have the same objects."""
        with self._reading:
            self._answer_parts = self._answer_parts or answer_parts

    @property
    def text(self) -> str:
        """The output's text that can no longer change; the whole text if the request has ended. Decoded when read."""
        self._read()
        return self._text

    def _read(self) -> None:
        with self._reading:
            if self._reader is None:  # made once a text is asked for, so that decoding takes no time between passes
                self._reader = self.detokenizer()
            if self._is_read or self._reader is None:
                return
            is_whole = self.seq.finish_reason is not None
            start = self._num_read
            end = self._num_readable
            first = self.seq.num_prompt_tokens
            self._text += self._reader.push(self.seq.tokens[first + start : first + end]).text
            self._num_read = end
            if is_whole:
                self._text += self._reader.finish()
                self._is_read = True
                if self.seq.finish_reason == "length" and self._reader.stop is not None:
                    self.seq.finish_reason = "stop"  # a stop text was in the text that was held back until the end

    @property
    def waits(self) -> bool:
        """Whether the request cannot be admitted yet.

        It may wait for cache rows from disk, or for the first request with the same prompt to run this prompt.
        """
        leader = self._leader
        if self.num_fetching:
            return True
        return leader is not None and leader.seq.finish_reason is None and leader.report.num_steps == 0

    @property
    def scores_prompt(self) -> bool:
        """Whether the request asks for log-probabilities of prompt tokens and some are not computed yet."""
        return self._leader is None and None in self.seq.prompt_logprobs[1:]

    def score_prompt(self, start: int, logits: Rows) -> None:
        """Store the log-probabilities of the prompt tokens from index `start` + 1 on.

        logits [n, V]: the logits after the tokens from index `start` on. Row i scores the token with index
        `start` + 1 + i.
        """
        seq, most = self.seq, self.seq.params.prompt_logprobs
        assert most is not None
        for place, row in enumerate(logits, start + 1):
            if place < seq.num_prompt_tokens:  # further rows are output tokens, of a request that was preempted
                seq.prompt_logprobs[place] = logprobs_of(row, seq.tokens[place], most)

    def mark(self) -> Mark:
        """Return the current progress of the request as a Mark."""
        return Mark(self.seq.num_output_tokens, self._num_readable, self.seq.finish_reason)

    def output(self) -> RequestOutput:
        """Return the output of the request so far; the whole output if the request has ended."""
        seq = self.seq
        logprobs = seq.logprobs if seq.params.logprobs is not None else None
        prompt = list(seq.source_ids) or seq.tokens[: seq.num_prompt_tokens]
        return RequestOutput(
            prompt,
            self.text,
            seq.output_ids,
            seq.finish_reason,
            logprobs,
            seq.seed,
            self.report,
            self.index,
            None if self._reader is None else self._reader.stop,
            self.score,
            self.cumulative_logprob,
            self.answer_parts,
            (self._leader or self).seq.prompt_logprobs or None,
        )

    def _has_stop_text(self) -> bool:
        self._read()
        return self._reader is not None and self._reader.stop is not None


class Reader:
    """Makes the chunks of one request from its marks. Each step that advances the request gives one mark.

    A Reader runs in the thread that reads the chunks. So the thread that steps need not decode text for the chunks.
    """

    def __init__(self, request: Request) -> None:
        self._request, self._detokenizer = request, request.detokenizer()
        self._parts = request.parts_reader()
        self._last = Mark(0, 0, None)

    def chunk(self, mark: Mark) -> Chunk:
        """Return the chunk of output between the mark of the previous call and `mark`.

        If `mark` is the last mark of a request that an error ended, raises this error.
        """
        request = self._request
        seq = self._request.seq
        last = self._last
        text = ""
        self._last, first = mark, seq.num_prompt_tokens
        if mark.finish_reason is not None and request.error is not None:
            raise request.error
        readable = seq.tokens[first + last.num_readable : first + mark.num_readable]
        parts = None
        if self._detokenizer is not None:
            text = self._detokenizer.push(readable).text
            text += self._detokenizer.finish() if mark.finish_reason is not None else ""
        said: Seq[int] = ()
        if self._parts is not None:
            num_said = len(self._parts.answer_parts.said)
            parts = self._parts.push(readable)
            if mark.finish_reason is not None:
                parts += self._parts.finish(is_cut=mark.finish_reason != "stop")
                request.keep(self._parts.answer_parts)
            said = self._parts.answer_parts.said[num_said:] if seq.params.logprobs is not None else ()
        ids = seq.tokens[first + last.num_tokens : first + mark.num_tokens]
        output = request.output() if mark.finish_reason is not None else None
        wants_logprobs = seq.params.logprobs is not None
        logprobs = seq.logprobs[last.num_tokens : mark.num_tokens] if wants_logprobs else None
        return Chunk(text, ids, mark.finish_reason, output, request.index, logprobs, parts, said)
