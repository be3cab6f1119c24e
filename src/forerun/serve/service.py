"""The models of a server, as its routes see them.

A Service is one model. Each Service has its own engine and gate, and may fail alone. A Services object has all models
of a server. The models share the limit on arriving bodies, and the threads that convert between texts and token ids.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from forerun.engine.llm import LLM
from forerun.errors import BadOption, CapacityError, ForerunError, InternalError, PromptTooLong
from forerun.sampling.grammar import is_short, vocabulary
from forerun.serve.aside import LONG_BYTES, Aside
from forerun.serve.bodies import Job, Refused
from forerun.serve.generation import Generation, News
from forerun.serve.kept import Kept
from forerun.serve.limits import Arriving, Gate
from forerun.serve.metrics import Metrics
from forerun.serve.options import Limits
from forerun.serve.texts import Library, OnlyAside, TextOptions, Texts
from forerun.types import SamplingParams

T = TypeVar("T")
LOG = logging.getLogger(__name__)
_TICK_S = 0.05  # between two measurements of the event loop's delay
MOST_ARRIVING = 1024  # bodies that are not whole; more where there are more places
MOST_LONG = 16  # arriving bodies of the largest permitted size
NUM_THREADS = 4  # that convert texts; they share one interpreter with the engine's thread


class Service:
    """One model of a server, with its engine. A Service belongs to the event loop in which it is made.

    names: the names that requests may give the model; answers have the first name. defaults: values for the fields of
    SamplingParams that a body leaves out. max_queue: the most choices that may wait. ignore_unsupported: whether
    requests with unsupported fields are served without these fields.
    """

    def __init__(
        self,
        llm: LLM,
        names: Seq[str],
        *,
        defaults: Mapping[str, Any] | None = None,
        max_queue: int = Limits.max_queue,
        ignore_unsupported: bool = False,
        metrics: Metrics | None = None,
    ) -> None:
        self.llm, self.names, self.name = llm, tuple(names), names[0]
        self.defaults = defaults or {}
        self.ignore_unsupported = ignore_unsupported
        batch = llm.config.max_batch_size
        self.gate = Gate(batch + max_queue, batch)
        self.metrics = metrics or Metrics(llm, self.name)
        self.failure: ForerunError | None = None  # of the engine, once it has failed
        self._news = News(self.look_for_failure)
        self._end_news = llm.call_behind(self._news.ring)
        self._going: set[Generation] = set()

    def text_options(self, others: Seq[str] = ()) -> TextOptions:
        """Return the facts about this model that are needed to read the bodies of HTTP requests to it.

        others: the names of the server's other models.
        """
        return TextOptions(
            self.llm.tokenizer.folder,
            self.names,
            self.llm.engine.max_seq_len,
            self.gate.capacity,
            self.defaults,
            self.ignore_unsupported,
            self.llm.config.chat_template,
            tuple(others),
        )

    def make(self, job: Job, prompts: Seq[Seq[int]]) -> tuple[Job, list[Any]]:
        """Return the job, possibly with changes, and its engine requests, which are not queued yet. Raises UserError.

        Do not call this in the event loop. Many agents send a max_tokens that is too large. So if the prompt and
        max_tokens together exceed the context, max_tokens and min_tokens are removed, and the job lists them as
        ignored. The answer may then fill the context.
        """
        try:
            requests = [request for prompt in prompts for request in self.llm.engine.make(prompt, job.params)]
            for request in requests:
                request.answer_form = job.answer_form
            return job, requests
        except PromptTooLong:
            if job.params.max_tokens is None:
                raise
            params = dataclasses.replace(job.params, max_tokens=None, min_tokens=0)
            fields = ("max_tokens", "min_tokens") if job.params.min_tokens else ("max_tokens",)
            clipped = dataclasses.replace(job, params=params, ignored=(*job.ignored, *fields))
            return self.make(clipped, prompts)
        except CapacityError as error:  # it never fits: another moment would not help
            raise Refused(str(error), code="capacity") from None

    def start(self, job: Job, requests: Seq[Any]) -> Generation:
        """Queue the engine requests of a job, and return their Generation. Raises the engine's failure, if any."""
        if self.failure is not None:
            raise self.failure
        generation = Generation(self._news, requests, is_streamed=job.stream)
        self._going.add(generation)
        self.llm.queue(requests)
        return generation

    def end(self, generation: Generation) -> None:
        """Forget a generation. End its requests that still run, and free their memory."""
        self._going.discard(generation)
        self.llm.end(generation.requests)
        self.metrics.ended(generation.requests, is_failed=generation.error is not None)

    def close(self) -> None:
        """Stop listening to the engine."""
        self.metrics.close()
        self._end_news()

    def look_for_failure(self) -> None:
        """If a step of the engine has failed as a whole, fail all live requests and accept no new requests."""
        if self.failure is None and (cause := self.llm.failure) is not None:
            self.failure = InternalError(
                f"the engine has failed and takes no more requests: restart it ({cause!r:.200})"
            )
            LOG.error("the engine has failed: every live request ends with status 500, and /ready says so")
            for generation in self._going:
                generation.fail(self.failure)


class Services:
    """The models of one server, by the names that requests give them.

    The first model serves requests that name no model. No two models share a name. logs_texts: whether the log has the
    texts of requests and answers.
    """

    def __init__(self, services: Seq[Service], *, limits: Limits | None = None, logs_texts: bool = False) -> None:
        self.all = tuple(services)
        self.first = services[0]
        self.names = [name for service in services for name in service.names]
        self._by_name = {name: service for service in services for name in service.names}
        self.limits, self.logs_texts = limits or Limits(), logs_texts
        self.started_s, self.kept = int(time.time()), Kept()
        # A request enters here before its model is known, and then at its model's gate: a busy model keeps nobody out
        # of the others.
        self.gate = Gate(
            sum(service.gate.capacity for service in services), sum(service.gate.batch for service in services)
        )
        most = max(MOST_ARRIVING, self.gate.capacity)
        self.arriving = Arriving(most, MOST_LONG * self.limits.max_body_bytes)
        options = [
            service.text_options([name for name in self.names if name not in service.names]) for service in services
        ]
        self._library = Library([_texts(service.llm, one) for service, one in zip(services, options, strict=True)])
        self.aside, self.trial = Aside(options), Aside(options)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="forerun-text")
        # Each pool compiles one grammar at a time: one pool for short grammars, one for grammars that were tried.
        self._short, self._tried = (ThreadPoolExecutor(1, f"forerun-{kind}-grammar") for kind in ("short", "tried"))

    def of(self, name: str) -> Service:
        """Return the model with this name, which must be one of `names`."""
        return self._by_name[name]

    @property
    def metrics(self) -> Metrics:
        """The first model's metrics. They also count events that belong to no model. Their text covers all models."""
        return self.first.metrics

    @property
    def failure(self) -> ForerunError | None:
        """The failure of an engine; None if no engine has failed.

        Every engine is checked anew, so that a failure during a request from a page is found, too.
        """
        for service in self.all:
            service.look_for_failure()
        return next((service.failure for service in self.all if service.failure is not None), None)

    async def in_thread(self, work: Callable[..., T], *given: Any) -> T:
        """Call `work`, a function that handles texts, in a thread with the arguments `given`, and return the result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *given)

    async def read(self, url: str, body: bytes) -> Any:
        """Return the result of `Library.work` for a body. url: the path of the body's route.

        A thread reads the body. But a separate process reads long bodies, and bodies that a thread must not read
        (OnlyAside).
        """
        if len(body) <= LONG_BYTES:
            with suppress(OnlyAside):
                return await self.in_thread(self._library.work, url, body)
        return await asyncio.wrap_future(self.aside.work(url, body))

    async def compile(self, service: Service, params: SamplingParams) -> None:
        """Compile the grammar of a request, so that `Service.make` finds the compiled grammar. Raises BadOption.

        Separate threads compile grammars, so that no other request waits. A grammar that might take long is first tried
        in a process that can be ended.
        """
        if (key := params.constraint) is None or service.llm.tokenizer is None:
            return
        known = await self.in_thread(vocabulary, service.llm.tokenizer)
        if known.has(key):
            return
        self.trial.begin()
        pool, num_bytes = self._short, 0
        if not is_short(key):
            pool = self._tried
            try:
                num_bytes = await asyncio.wrap_future(self.trial.attempt(service.name, key))
            except BadOption as refusal:
                known.refuse(key, refusal)
                raise
        await asyncio.get_running_loop().run_in_executor(pool, known.compiled, params, num_bytes)

    async def watch_delay(self) -> None:
        """Measure the delay of the event loop every _TICK_S seconds, until this task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.metrics.delayed(max(0.0, loop.time() - due_s))

    def close(self) -> None:
        """Stop listening to the engines, and end the processes and the threads."""
        for service in self.all:
            service.close()
        for process in (self.aside, self.trial):
            process.close()
        for pool in (self._pool, self._short, self._tried):
            pool.shutdown(wait=False, cancel_futures=True)


def _texts(llm: LLM, options: TextOptions) -> Texts:
    return Texts(options, llm.tokenizer, lambda: llm.chat_template)
