"""The engine runs a continuous batch of requests with one target model, one drafter and one pacing policy.

The engine takes loaded models and token ids. The LLM (engine/llm.py) loads checkpoints and encodes texts.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

from forerun import verify
from forerun.drafters import Drafter
from forerun.engine.beams import SearchRequest
from forerun.engine.catchup import CatchUp
from forerun.engine.fair import Fair
from forerun.engine.request import Request, unheard
from forerun.engine.router import NONE, Router
from forerun.engine.sampled import SampledRequest
from forerun.engine.scheduler import Plan, Scheduler
from forerun.engine.step import RequestFailed, Stepper
from forerun.engine.turns import Turns, turns_on
from forerun.errors import BadOption, CapacityError, ForerunError, InternalError, PromptTooLong, shown
from forerun.kv.disk import Folder
from forerun.models.runner import Runner
from forerun.pacing import Pacing
from forerun.pacing.cost import Costs
from forerun.pacing.measuring import Pause
from forerun.sampling.grammar import Grammar, vocabulary
from forerun.sampling.random import PhiloxCoins, derived_seed
from forerun.sampling.thinking import Limited
from forerun.text.tokenizer import Tokenizer
from forerun.types import Coins, Hypotheses, Listener, SamplingParams, Sequence, StepReport

LOG = logging.getLogger(__name__)
# A request's bad words and prediction, as ids, and its grammar.
_Texts = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], Grammar | Limited | None]


def philox_coins(seq: Sequence) -> Coins:
    """Return the random numbers (coins) of a sequence's next round.

    The coins depend only on the request's seed, the position and the round.
    """
    return PhiloxCoins(seq.seed, len(seq.tokens), seq.round)


@dataclass(frozen=True, eq=False)
class _Entry:
    """Holds a listener. detail: whether the listener wants `StepReport.rounds`, the details of each round."""

    listener: Listener
    detail: bool


class Engine:
    """Runs requests on loaded models. Call `add` for each request, then `step` until the requests are finished.

    The engine is not thread-safe: only one thread may call `step`. start_ids: in an encoder-decoder, the token ids with
    which the decoder's text begins; the prompt is then the encoder's input. turns: decides which of several engines may
    step; None = shared with all engines of this process on the model's device.
    """

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        pacing: Pacing,
        *,
        tokenizer: Tokenizer | None = None,
        end_ids: frozenset[int] = frozenset(),
        max_seq_len: int = 4096,
        max_batch_size: int = 8,
        prefill_chunk_tokens: int = 512,
        max_num_batched_tokens: int = 1024,
        catchup_tokens: int = 512,
        prefill_stretch: float | None = None,
        max_itl_s: float | None = None,
        coins: Callable[[Sequence], Coins] = philox_coins,
        costs: Costs | None = None,
        start_ids: Seq[int] = (),
        folder: Folder | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.start_ids, self.folder = start_ids, folder
        self.tokenizer, self.end_ids, self.max_seq_len = tokenizer, end_ids, max_seq_len
        self.runner = runner
        self.pacing = pacing
        self.costs = costs or Costs()
        self.drafter = drafter if isinstance(drafter, Router) else Router({"drafter": drafter})
        self.drafter.check_layers(runner.model.config.cache_shape.num_layers)
        self.drafter.lend(runner.cache)
        runner.taps = self.drafter.hidden_layers
        self.stepper = Stepper(runner, self.drafter, pacing, coins, CatchUp(catchup_tokens))
        self.scheduler = Scheduler(
            runner.cache,
            self.drafter,
            max_batch_size=max_batch_size,
            prefill_chunk_tokens=prefill_chunk_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            sources=runner.sources,
            fair=Fair(prefill_stretch, max_itl_s, turns or turns_on(str(runner.model.device))),
            message_end_ids=end_ids,
        )
        self._listeners: list[_Entry] = []
        self._ids = itertools.count()
        self._has_drafted = False
        self._behind_s = 0.0  # seconds of the last step after its report

    def use_pacing(self, pacing: Pacing) -> None:
        """Replace the pacing policy.

        Raises InternalError while requests wait or run, because the new policy has no records of these requests.
        """
        if self.scheduler.waiting or self.scheduler.running:
            raise InternalError("another pacing policy can be taken between requests only")
        self.pacing = self.stepper.pacing = pacing

    def listen(self, listener: Listener, *, detail: bool = False) -> Callable[[], None]:
        """Call `listener` with every StepReport. Returns a function that ends these calls.

        detail: whether the reports contain `rounds`, with the drafted tokens, probabilities and tests of each round. An
        error in a listener is raised again at the end of `step`.
        """
        entry = _Entry(listener, detail)
        self._listeners.append(entry)

        def end() -> None:
            self._listeners = [kept for kept in self._listeners if kept is not entry]

        return end

    def add(self, prompt_ids: Seq[int], params: SamplingParams) -> Request:
        """Queue one prompt for one output. Raises UserError or CapacityError if the request is impossible."""
        if params.n != 1:
            raise BadOption(f"n={params.n} is not possible here: add_all returns several requests")
        return self.add_all(prompt_ids, params)[0]

    def add_all(self, prompt_ids: Seq[int], params: SamplingParams) -> list[Request]:
        """Queue one prompt for params.n outputs. Raises UserError or CapacityError if the request is impossible."""
        requests = self.make(prompt_ids, params)
        self.queue(requests)
        return requests

    def make(self, prompt_ids: Seq[int], params: SamplingParams) -> list[Request]:
        """Make the params.n requests of one prompt, without queuing them (`queue`). Any thread may call this method.

        Raises UserError or CapacityError if the request is impossible.
        """
        seed = secrets.randbits(64) if params.seed is None else params.seed
        # These are encoded once, however many outputs there are.
        texts = self._bad_word_ids(params), self._prediction_ids(params), self._grammar(params)
        requests: list[Request] = []
        if params.searches:
            return self._searched(prompt_ids, params, seed, texts)
        for index in range(params.n):
            seq = self._sequence(prompt_ids, params, derived_seed(seed, index), texts)
            if not requests:
                self._check(seq)
            requests.append(SampledRequest(seq, self.tokenizer, index=index, leader=requests[0] if requests else None))
        return requests

    def _searched(self, prompt_ids: Seq[int], params: SamplingParams, seed: int, texts: _Texts) -> list[Request]:
        """Return the requests for the params.n outputs of a beam search.

        The `searcher` of each of these requests is the request that runs the search. seed: the seed of the request.
        texts: the bad words and the prediction as token ids, and the grammar.
        """
        seq, *others = (self._sequence(prompt_ids, params, seed, texts) for _ in range(1 + params.n))
        seq.hypotheses = Hypotheses()
        self._check(seq)
        outputs = [Request(other, self.tokenizer, index=index) for index, other in enumerate(others)]
        SearchRequest(seq, self.tokenizer, outputs)
        return outputs

    def queue(self, requests: Seq[Request]) -> None:
        """Queue requests that `make` returned. The next step may run them."""
        for request in dict.fromkeys(request.searcher or request for request in requests):
            if request.seq.finish_reason is None:
                self.scheduler.add(request)
                self._has_drafted = self._has_drafted or request.seq.draft != NONE

    def rest(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Let the pacing policy measure pass times on this machine.

        Does nothing while a request runs or waits, and before the first request that uses a drafter. The measurement
        ends as soon as goes_on() is False. Each measured pass waits for this engine's turn on the device.
        """
        if self._has_drafted and not self.scheduler.running and not self.scheduler.waiting:
            self.pacing.measure(Pause(goes_on, self.scheduler.fair.turn))

    def _sequence(self, prompt_ids: Seq[int], params: SamplingParams, seed: int, texts: _Texts) -> Sequence:
        bad_word_ids, prediction_ids, grammar = texts
        ids, source_ids = list(prompt_ids), tuple[int, ...]()
        if self.start_ids:
            ids = [*self.start_ids, *self._decoder_prompt_ids(params)]
            source_ids = tuple(prompt_ids)
        wants_scores = params.prompt_logprobs is not None
        if wants_scores and source_ids:
            raise BadOption(
                f"prompt_logprobs={params.prompt_logprobs} is not possible: the prompt of an encoder-decoder is a "
                "source, which has no probability"
            )
        seq = Sequence(
            id=next(self._ids),
            tokens=ids,
            num_prompt_tokens=len(ids),
            params=params,
            seed=seed,
            max_len=self._max_len(ids, params),
            end_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids),
            bad_word_ids=bad_word_ids,
            prediction_ids=prediction_ids,
            source_ids=source_ids,
            prompt_logprobs=[None] * len(ids) if wants_scores else [],
        )
        if grammar is not None:
            seq.grammar = grammar.start(seq.end_ids, seq.num_prompt_tokens)
        seq.draft = self.drafter.chosen(params.draft, bool(prediction_ids), seq.acceptance, params.searches)
        return seq

    def step(self) -> list[Request]:
        """Run one step of the continuous batch. Returns the requests that ended in this step.

        A request that cannot go on is aborted, and its `error` is set. The other requests go on. Some steps run no
        pass: they only wait for rows from disk, or only make room in the cache.
        """
        for request in [r for r in self.scheduler.running if r.seq.finish_reason is not None]:
            self._finish(request)  # left over from a step that was interrupted
        try:
            with self.scheduler.fair.turn():
                begun = time.perf_counter()
                plan = self.scheduler.plan()
                report = None if plan.is_empty else self._run(plan, begun)
        except RequestFailed as failure:
            request = next(r for r in plan.decode if r.seq is failure.seq)
            self._fail(request, failure.error)
            return [request]
        except CapacityError:
            if not self.scheduler.recover():
                raise
            return []
        if report is None:
            read = self._finish_all(self._read())
            if not read:
                self.scheduler.await_rows()
            for request in read:
                self._tell_of(request)
            return read
        reported = time.perf_counter()
        try:
            return self._conclude(plan, report)
        finally:
            self._behind_s = time.perf_counter() - reported

    def _run(self, plan: Plan, begun: float) -> StepReport:
        self.stepper.wants_detail = any(entry.detail for entry in self._listeners)
        return self.stepper.step(plan, self._behind_s + time.perf_counter() - begun)

    def _conclude(self, plan: Plan, report: StepReport) -> list[Request]:
        """Finish requests, and report the step to the requests and the listeners."""
        now_s = time.monotonic()
        self.scheduler.fair.observe(report)
        for request in plan.decode:
            times = request.report
            times.first_token_at_s = times.first_token_at_s or now_s
            times.last_token_at_s = now_s
        read = self._read()
        finished = self._finish_all([*(r for r in plan.decode if r.seq.finish_reason is not None), *read])
        try:
            self._tell(report)
        finally:
            for request in dict.fromkeys((*plan.decode, *(request for request, _ in plan.prefill), *read)):
                self._tell_of(request)
        return finished

    def _read(self) -> list[Request]:
        """End and return the requests that ask for no output tokens and whose prompts have been run to the end."""
        cache = self.runner.cache
        read = [
            request
            for request in self.scheduler.running
            if request.seq.is_only_read and cache.length(request.seq.id) == len(request.seq.tokens) - 1
        ]
        for request in read:
            request.seq.finish_reason, request.report.read_at_s = "length", time.monotonic()
        return read

    def _finish_all(self, ended: list[Request]) -> list[Request]:
        for request in ended:
            if LOG.isEnabledFor(logging.INFO):
                LOG.info("request %d (%s): %s", request.seq.id, request.seq.finish_reason, request.report.sentence())
            self._finish(request)
        return ended

    def abort(self, request: Request) -> None:
        """End a request at once and free its cache rows. The request keeps its committed tokens.

        Does nothing for a request that has ended.
        """
        if request.seq.finish_reason is None:
            request.abort()
            self._finish_and_tell(request)
            searcher = request.searcher
            if searcher is not None and all(output.seq.finish_reason is not None for output in searcher.outputs):
                self.abort(searcher)  # nobody waits for it any more

    def recover(self, requests: Seq[Request], error: BaseException) -> None:
        """Restore the engine after a step that raised `error`: end the running requests with this error.

        If no request was running, the waiting requests are ended instead. requests: the requests that were unfinished
        before the step. A request whose last token was committed in the step ends normally. All requests that ended are
        notified.
        """
        ran = self.scheduler.running[:] or self.scheduler.waiting[:]
        for request in dict.fromkeys([*ran, *(r for r in requests if r.seq.finish_reason is not None)]):
            try:
                if request.seq.finish_reason is None:
                    self._fail(request, error)
                else:
                    self._finish_and_tell(request)
            except Exception:
                LOG.exception("request %d could not give back what it held", request.seq.id)

    def _fail(self, request: Request, error: BaseException) -> None:
        request.error = error if isinstance(error, ForerunError) else InternalError(f"the step failed: {error!r:.200}")
        self.abort(request)

    def _finish_and_tell(self, request: Request) -> None:
        try:
            self._finish(request)
        finally:
            self._tell_of(request)

    def _tell_of(self, request: Request) -> None:
        """Call a request's `hear`. If the request has ended, this is the last call.

        If `hear` raises an error, the request is ended. If the request ran a beam search and has ended, `hear` of each
        of its outputs is called, too.
        """
        hear = request.hear
        if request.seq.finish_reason is not None:
            request.hear = unheard
        try:
            hear(request)
        except Exception as error:
            LOG.warning("request %d is ended: it could not be told how it goes on (%s)", request.seq.id, error)
            request.hear = unheard
            self.abort(request)
        if request.seq.finish_reason is not None:
            for output in request.outputs:
                self._tell_of(output)

    def _finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        self.pacing.end(request.seq)

    def _tell(self, report: StepReport) -> None:
        """Call every listener with the report. Afterwards raise the first error that a listener raised, if any."""
        errors = []
        for entry in self._listeners:
            try:
                entry.listener(report)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _max_len(self, ids: list[int], params: SamplingParams) -> int:
        if not ids:
            raise BadOption("the prompt has no tokens: give at least one")
        cache = self.runner.cache
        room = min(self.max_seq_len, cache.num_blocks * cache.block_tokens)
        max_len = max(room, len(ids) + 1) if params.max_tokens is None else len(ids) + params.max_tokens
        can_grow = self.max_seq_len < self.runner.model.config.max_positions
        begins = f"the answer begins with {len(ids)}" if self.start_ids else f"the prompt has {len(ids)}"
        if len(ids) >= self.max_seq_len and params.max_tokens != 0:
            raise PromptTooLong(
                f"{begins} tokens and max_seq_len is {self.max_seq_len}, so there is no room for an "
                f"answer: shorten the prompt, such as a conversation's beginning{', or raise max_seq_len' * can_grow}"
            )
        if max_len > self.max_seq_len:
            raise PromptTooLong(
                f"{begins} tokens and max_tokens={params.max_tokens}, but max_seq_len is "
                f"{self.max_seq_len}: shorten the prompt or lower max_tokens{', or raise max_seq_len' * can_grow}"
            )
        return max_len

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of the bad words. Each word is encoded twice: as it is, and with a space in front."""
        if params.bad_words and self.tokenizer is None:
            raise BadOption("bad_words needs a tokenizer: this engine has none")
        variants: set[tuple[int, ...]] = set()
        for word in params.bad_words:
            assert self.tokenizer is not None
            for text in (word, " " + word.lstrip()):
                variants.add(tuple(self.tokenizer.encode(text, add_special_tokens=False)))
        return tuple(sorted(v for v in variants if v))

    def _grammar(self, params: SamplingParams) -> Grammar | Limited | None:
        """Return the constraint of a request: its compiled grammar, or None where the request sets no constraint.

        If the request limits its reasoning, the result is a Limited, which also counts the reasoning tokens. Raises
        BadOption for an impossible grammar.
        """
        grammar = None
        if params.constraint is not None:
            if self.tokenizer is None:
                raise BadOption("a grammar needs a tokenizer: this engine has none; leave it out")
            grammar = vocabulary(self.tokenizer).compiled(params)
        if params.thinking is None:
            return grammar
        return Limited(params.thinking, grammar, self.runner.model.config.vocab_size)

    def _prediction_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return params.prediction as token ids, without special tokens, because it is a guess of the output."""
        given = params.prediction or ()
        if not isinstance(given, str):
            return tuple(given)
        if self.tokenizer is None:
            raise BadOption("a text as prediction needs a tokenizer: this engine has none; give its token ids")
        return tuple(self.tokenizer.encode(given, add_special_tokens=False))

    def _decoder_prompt_ids(self, params: SamplingParams) -> Seq[int]:
        """Return params.decoder_prompt as token ids, without special tokens. In the decoder, they follow start_ids."""
        given = params.decoder_prompt or ()
        if not isinstance(given, str):
            return given
        if self.tokenizer is None:
            raise BadOption("a text as decoder_prompt needs a tokenizer: this engine has none; give its token ids")
        return self.tokenizer.encode(given, add_special_tokens=False)

    def _check_source(self, seq: Sequence) -> None:
        """Raise UserError for an encoder input that is empty or too long, and for max_tokens=0.

        If the model has no encoder, raise BadOption for a request with decoder_prompt.
        """
        encoder = self.runner.model.config.encoder
        if encoder is None:
            if seq.params.decoder_prompt is not None:
                raise BadOption("decoder_prompt is for encoder-decoders, and this model has no encoder: leave it out")
            return
        if seq.is_only_read:
            raise BadOption(
                "max_tokens=0 is not possible here: an encoder-decoder reads its prompt for the first token of the "
                "output; ask for at least 1"
            )
        most = min(encoder.max_positions, self.max_seq_len)
        if not seq.source_ids:
            raise BadOption("the prompt has no tokens: give at least one")
        if len(seq.source_ids) > most:
            raise PromptTooLong(
                f"the prompt has {len(seq.source_ids)} tokens and the encoder reads at most {most}: shorten it"
                + (", or raise max_seq_len" if most == self.max_seq_len < encoder.max_positions else "")
            )

    def _check(self, seq: Sequence) -> None:
        self._check_source(seq)
        known, params = range(self.runner.num_ids), seq.params
        forced = params.forced_eos_token_id
        named = {
            "the prompt": seq.source_ids or seq.tokens,
            "decoder_prompt": seq.tokens if seq.source_ids else (),
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias or (),
            "forced_eos_token_id": () if forced is None else (forced,),
            "prediction": seq.prediction_ids,
        }
        for name, ids in named.items():
            if not all(map(known.__contains__, ids)):
                wrong = next(i for i in ids if i not in known)
                raise BadOption(f"{name} holds the id {wrong}, but the model's ids are 0 .. {known[-1]}")
        drafter = self.drafter.of(seq)
        if seq.hypotheses is not None:
            self._check_search(seq, drafter)
        elif not drafter.also_chains:
            verify.find(seq.acceptance).check(seq.draft, drafter.shape, drafter.draws)
        if params.stop and self.tokenizer is None:
            raise BadOption("stop texts need a tokenizer: this engine has none; use stop_token_ids")
        if self.scheduler.blocks_for(seq) > self.runner.cache.num_blocks:
            cache = self.runner.cache
            raise CapacityError(
                f"the request may grow to {self.scheduler.most_tokens(seq)} tokens and the whole KV cache holds "
                f"{cache.num_blocks * cache.block_tokens}: raise kv_cache_tokens or lower max_tokens"
            )

    def _check_search(self, seq: Sequence, drafter: Drafter) -> None:
        """Raise BadOption if the drafter cannot draft for a beam search, or if the beams do not fit into a pass."""
        width, most = seq.params.num_beams, self.scheduler.max_num_batched_tokens
        if seq.draft != NONE and not drafter.branches:
            known = [shown(name) for name, member in self.drafter.members.items() if member.branches or name == NONE]
            raise BadOption(
                f"draft={shown(seq.draft)} cannot draft for the beams of num_beams={width}: "
                f"ask for draft={' or '.join(known)}"
            )
        if width > most:
            raise BadOption(
                f"num_beams={width} is more than max_num_batched_tokens={most}, the rows of a pass: raise it, or "
                "search with fewer beams"
            )
