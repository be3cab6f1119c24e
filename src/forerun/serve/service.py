"""What all routes share: the engine, who is let in, and the threads that make ids of texts and texts of ids."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from forerun.engine.llm import LLM
from forerun.errors import CapacityError, ForerunError, InternalError, PromptTooLong
from forerun.serve.aside import LONG_BYTES, Aside
from forerun.serve.bodies import Job, Refused
from forerun.serve.generation import Generation, News
from forerun.serve.kept import Kept
from forerun.serve.limits import Arriving, Gate
from forerun.serve.metrics import Metrics
from forerun.serve.options import Limits
from forerun.serve.texts import TextOptions, Texts

T = TypeVar("T")
LOG = logging.getLogger(__name__)
_TICK_S = 0.05  # between two measurements of the event loop's delay
MOST_ARRIVING = 16  # the longest bodies that are kept while they are not whole; shorter ones are as many more
NUM_THREADS = 4  # that make texts; they share one interpreter with the engine's thread


class Service:
    """One engine behind HTTP. It belongs to the event loop that it is made in.

    names: what requests may call the model, the answers' name first. defaults: fields of SamplingParams below what the
    bodies say. ignore_unsupported: requests with fields that are not honoured are served without them.
    logs_texts: whether the log has what requests and answers say.
    """

    def __init__(
        self,
        llm: LLM,
        names: Seq[str],
        *,
        defaults: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        ignore_unsupported: bool = False,
        logs_texts: bool = False,
        metrics: Metrics | None = None,
    ) -> None:
        self.llm, self.names, self.name = llm, tuple(names), names[0]
        self.defaults, self.limits, self.ignore_unsupported = defaults or {}, limits or Limits(), ignore_unsupported
        self.logs_texts = logs_texts
        self.started_s, self.kept = int(time.time()), Kept()
        batch = llm.config.max_batch_size
        self.gate = Gate(batch + self.limits.max_queue, batch)
        self.arriving = Arriving(MOST_ARRIVING * self.limits.max_body_bytes)
        options = TextOptions(
            llm.tokenizer.folder,
            self.names,
            llm.engine.max_seq_len,
            self.gate.capacity,
            self.defaults,
            ignore_unsupported,
            llm.config.chat_template,
        )
        self.texts, self.aside = Texts(options, llm.tokenizer, lambda: llm.chat_template), Aside(options)
        self.metrics = metrics or Metrics(llm, self.name)
        self.failure: ForerunError | None = None  # of the engine, once
        self._news = News(self.look_for_failure)
        self._end_news = llm.call_behind(self._news.ring)
        self._going: set[Generation] = set()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="forerun-text")

    async def in_thread(self, work: Callable[..., T], *given: Any) -> T:
        """Do work on texts outside of the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *given)

    async def read(self, url: str, body: bytes) -> Any:
        """What `Texts.work` makes of a body, or raises: in a thread, or a process where it is long."""
        if len(body) > LONG_BYTES:
            return await asyncio.wrap_future(self.aside.work(url, body))
        return await self.in_thread(self.texts.work, url, body)

    def make(self, job: Job, prompts: Seq[Seq[int]]) -> tuple[Job, list[Any]]:
        """The requests of a job, not queued yet, and the job as it is served. Not in the event loop. Raises UserError.

        A limit of tokens beyond the context is lowered to it, as agents send large ones; min_tokens goes with it.
        """
        try:
            made = [request for prompt in prompts for request in self.llm.engine.make(prompt, job.params)]
            for request in made:
                request.speaking = job.speaking
            return job, made
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
        """Queue the requests of a job. Raises the engine's failure, if it has failed."""
        if self.failure is not None:
            raise self.failure
        generation = Generation(self._news, requests, is_streamed=job.stream)
        self._going.add(generation)
        self.llm.queue(requests)
        return generation

    def end(self, generation: Generation) -> None:
        """Forget requests; those that are not over are ended, and what they hold is freed."""
        self._going.discard(generation)
        self.llm.end(generation.requests)
        self.metrics.ended(generation.requests, is_failed=generation.error is not None)

    async def watch_delay(self) -> None:
        """Measure how late the event loop is, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.metrics.delayed(max(0.0, loop.time() - due_s))

    def close(self) -> None:
        """Let the threads end."""
        self.metrics.close()
        self._end_news()
        self.aside.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def look_for_failure(self) -> None:
        """An engine whose step has failed as a whole is not trusted any more: all that live fail, none are taken."""
        if self.failure is None and (cause := self.llm.failure) is not None:
            self.failure = InternalError(
                f"the engine has failed and takes no more requests: restart it ({cause!r:.200})"
            )
            LOG.error("the engine has failed: every live request ends with status 500, and /ready says so")
            for generation in self._going:
                generation.fail(self.failure)
