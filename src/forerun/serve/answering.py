"""Answers requests for generated text, from reading the body to sending the answer.

The body becomes a Job, the Job becomes engine requests, and their outputs become the answer. The answer is sent whole
or as a stream of events. All APIs share this code. Where the APIs differ, the code calls functions of the route's
`Generate` (routes.py). The code runs in the event loop, but the event loop itself makes only short pieces of text.
Longer work runs in the threads and processes of `Services`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence as Seq
from contextlib import asynccontextmanager, contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forerun.errors import BadOption, ForerunError, InternalError
from forerun.serve.bodies import Job, Refused, status_of
from forerun.serve.events import as_json, in_slices
from forerun.serve.generation import Generation
from forerun.serve.kept import names_kept
from forerun.serve.limits import Patience, Place
from forerun.serve.routes import Errors, Events, Generate
from forerun.serve.service import Services

if TYPE_CHECKING:
    from forerun.engine.request import RequestOutput

T = TypeVar("T")
LOG = logging.getLogger(__name__)
RECORD = "forerun.record"  # in the scope of a request: its entry in the log
IGNORED = "x-forerun-ignored"  # header of an answer: the fields of the request that were ignored
MOST_DRAINED_BYTES = 64 << 20  # read and thrown away of a body that is too large, so that the client reads the answer
MOST_HEADER_CHARS = 1000
MOST_IN_LOOP_TOKENS = 16  # in a piece that the event loop makes itself, in microseconds; a thread would take 50 or more


class Answer(Response):
    """The Starlette response to one request for generated text. The answer is generated when the response is called."""

    def __init__(self, services: Services, route: Generate, error: Errors) -> None:
        super().__init__()
        self._services, self._route, self._error = services, route, error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, generate the answer and send the answer.

        A ForerunError becomes an error response. If the client has gone, no further bytes are sent.
        """
        exchange = Exchange(self._services, self._route, self._error, scope, receive, send)
        try:
            await exchange.run()
        except ForerunError as error:
            await exchange.refuse(error)
        except ClientGone:
            scope[RECORD].setdefault("reason", "disconnect")
        finally:
            exchange.close()


class ClientGone(Exception):
    """The error for a client that has disconnected, or that has stopped reading the answer."""


class Exchange:
    """Handles one request for generated text, from the arrival of its body to the last byte of the answer."""

    def __init__(
        self, services: Services, route: Generate, error: Errors, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._services, self._route, self._error = services, route, error
        self._receive, self._send = receive, send
        self._service = services.first  # until the body names another one
        self._record: dict[str, Any] = scope[RECORD]
        self._headers = Request(scope).headers
        self._key = key_of(self._headers)
        self._ends_s = time.monotonic() + services.limits.request_timeout_s
        self._patience = Patience()
        self._wrote_s = time.monotonic()  # when something was last sent
        self._is_sent = False  # the last byte is on its way: the client may go now

    async def run(self) -> None:
        """Read the body, generate the answer and send the answer.

        Raises ClientGone if the client has gone. Raises ForerunError only before the first byte of the answer is sent.
        """
        services = self._services
        body = await read_body(self._headers, self._receive, services)
        if self._route.is_kept and names_kept(body):
            body = await self._guarded(services.kept.extend, self._key, body)
        with services.gate.enter() as place:
            async with self._until_gone():
                if services.logs_texts:
                    self._record["body"] = body.decode(errors="replace")
                job, prompts = await self._read(body)
                del body
                self._service, self._record["model"] = services.of(job.model), job.model
                with self._service.gate.enter() as model_place:
                    await self._answer(job, prompts, place, model_place)

    async def _answer(self, job: Job, prompts: Seq[Seq[int]], *places: Place) -> None:
        """Generate the answer to a job and send the answer.

        prompts: the token ids of each prompt. places: the request's places in the Gate of the server and of the model.
        """
        service = self._service
        try:
            with self._guarding():
                await self._services.compile(service, job.params)
        except BadOption as error:
            raise job.refusal(error) from None
        job, requests = await self._guarded(service.make, job, prompts)
        for place in reversed(places):
            place.grow(len(requests))
        self._record |= {"prompt_tokens": sum(map(len, prompts)), "stream": job.stream}
        generation = service.start(job, requests)
        try:
            await (self._stream if job.stream else self._whole)(job, prompts, generation)
        finally:
            reports = {id(request.report): request.report for request in requests}.values()  # a beam search has one
            self._record |= {
                "completion_tokens": sum(request.seq.num_output_tokens for request in requests),
                "steps": sum(report.num_steps for report in reports),
                "drafted": sum(report.num_drafted for report in reports),
                "accepted": sum(report.num_accepted for report in reports),
            }
            service.end(generation)

    def close(self) -> None:
        """Stop the timer that limits how long this request waits."""
        self._patience.close()

    async def refuse(self, error: ForerunError) -> None:
        """Send an error as the response to the request, and record the error in the request's log entry."""
        status, body = self._error(error, self._record["request_id"])
        self._record["error"] = str(error) if status >= 500 else status_of(error)[1] or type(error).__name__
        await self._respond(status, as_json(body), retry_after_s=getattr(error, "retry_after_s", None))

    async def _whole(self, job: Job, prompts: Seq[Seq[int]], generation: Generation) -> None:
        while not generation.is_over:
            await self._wait(generation)
        if generation.failure is not None:
            raise job.refusal(generation.failure)
        body = await self._guarded(self._body, job, generation)
        await self._respond(200, body, job)

    def _body(self, job: Job, generation: Generation) -> bytes:
        outputs = self._outputs(generation)
        tokenizer = self._service.llm.tokenizer
        answer = self._route.answer(job, outputs, tokenizer, secrets.token_hex(12), int(time.time()))
        if job.items is not None:
            self._services.kept.put(self._key, answer, job.items)
        return in_slices(answer)

    async def _stream(self, job: Job, prompts: Seq[Seq[int]], generation: Generation) -> None:
        events = self._route.stream(job, prompts, self._service.llm.tokenizer, secrets.token_hex(12), int(time.time()))
        headers = {"content-type": self._route.media_type, "cache-control": "no-cache"}
        await self._start(200, headers, job)
        try:
            # The fields that the answer repeats may be long.
            await self._write(await self._guarded(events.begin, in_loop=not job.given))
            is_over = not generation.requests  # a generation that has ended already still has all its text to send
            while not is_over:
                try:
                    silent_s = time.monotonic() - self._wrote_s  # chunks of a prompt wake this task, too
                    await self._wait(generation, max(0.0, self._services.limits.keep_alive_s - silent_s))
                except TimeoutError:
                    await self._write(self._route.sign_of_life)
                    self._wrote_s = time.monotonic()  # also where there is none
                    continue
                is_over = generation.is_over
                is_short = generation.num_new_tokens() <= MOST_IN_LOOP_TOKENS
                await self._write(await self._guarded(self._pieces, events, generation, in_loop=is_short))
            await self._write(await self._guarded(self._end, job, events, generation))
        except ForerunError as failure:
            error = job.refusal(failure)
            self._record["error"] = str(error)
            await self._write(events.fail(error))
        await self._write(b"", more=False)

    def _pieces(self, events: Events, generation: Generation) -> bytes:
        return b"".join(events.piece(index, chunk) for index, chunk in generation.chunks())

    def _end(self, job: Job, events: Events, generation: Generation) -> bytes:
        last = events.end(self._outputs(generation))
        response = getattr(events, "response", None)
        if job.items is not None and response is not None:
            self._services.kept.put(self._key, response, job.items)
        return last

    def _outputs(self, generation: Generation) -> list[RequestOutput]:
        outputs = generation.outputs()
        self._record["finish_reason"] = outputs[0].finish_reason if outputs else None
        if self._services.logs_texts:
            self._record["texts"] = [output.text for output in outputs]
        return outputs

    async def _wait(self, generation: Generation, at_most_s: float = inf) -> None:
        """Wait until the engine reports progress of the generation, such as new tokens or the end.

        Raises TimeoutError after at_most_s seconds. Raises Refused when the whole request has taken longer than
        request_timeout_s.
        """
        left_s = self._ends_s - time.monotonic()
        try:
            await self._patience.wait(generation.has_news.wait(), min(left_s, at_most_s))
        except TimeoutError:
            if time.monotonic() < self._ends_s:
                raise
            limit_s = self._services.limits.request_timeout_s
            message = f"the request took more than {limit_s:g} s: ask for fewer tokens, or raise --request-timeout-s"
            raise Refused(message, code="timeout", status=504) from None
        generation.has_news.clear()

    async def _guarded(self, work: Callable[..., T], *given: Any, in_loop: bool = False) -> T:
        """Call `work`, a function that handles texts, with the arguments `given`, and return the result.

        in_loop: whether to call `work` in the event loop rather than in a thread. Any exception that is not a
        ForerunError is raised as an InternalError, so that only this request fails.
        """
        with self._guarding():
            return work(*given) if in_loop else await self._services.in_thread(work, *given)

    async def _read(self, body: bytes) -> tuple[Job, list[list[int]]]:
        """Read a request body. Return its Job, and the token ids of the Job's prompts. Raises ForerunError."""
        with self._guarding():
            read: tuple[Job, list[list[int]]] = await self._services.read(self._route.form.url, body)
            return read

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        try:
            yield
        except (ForerunError, asyncio.CancelledError):
            raise
        except BaseException as error:  # a panic of a tokenizer's Rust code is no Exception
            LOG.exception("request %s: its text could not be made", self._record["request_id"])
            raise InternalError(f"the text of the request or its answer could not be made: {error!r:.200}") from error

    @asynccontextmanager
    async def _until_gone(self) -> AsyncIterator[None]:
        """Run the `with` block. If the client disconnects meanwhile, cancel the block and raise ClientGone."""
        work = asyncio.current_task()
        assert work is not None
        is_gone = False

        async def watch() -> None:
            nonlocal is_gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self._is_sent:
                is_gone = True
                work.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if not is_gone:
                raise
            work.uncancel()
            raise ClientGone from None
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    # --------------------------------------------------------------------------------------------------------- sending

    async def _respond(
        self, status: int, body: bytes, job: Job | None = None, retry_after_s: int | None = None
    ) -> None:
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        if retry_after_s is not None:
            headers["retry-after"] = str(retry_after_s)
        await self._start(status, headers, job)
        await self._write(body, more=False)

    async def _start(self, status: int, headers: dict[str, str], job: Job | None) -> None:
        if job is not None and job.ignored:
            headers[IGNORED] = ignored_header(job.ignored)
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._within(self._send({"type": "http.response.start", "status": status, "headers": raw}))

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        self._is_sent |= not more
        if data or not more:
            await self._within(self._send({"type": "http.response.body", "body": data, "more_body": more}))
            self._wrote_s = time.monotonic()

    async def _within(self, sending: Awaitable[None]) -> None:
        """Wait until `sending` has sent a message. Raises ClientGone if sending takes more than stall_timeout_s."""
        try:
            await self._patience.wait(sending, self._services.limits.stall_timeout_s)
        except TimeoutError:
            self._record["reason"] = "stalled"
            raise ClientGone from None


def key_of(headers: Any) -> str:
    """Return the SHA-256 digest of the API key in a request's headers, in hex digits; '' if the headers have no key."""
    given = headers.get("authorization", "").partition(" ")[2].strip() or headers.get("x-api-key", "")
    return hashlib.sha256(given.encode()).hexdigest() if given else ""


async def read_body(headers: Any, receive: Receive, services: Services) -> bytes:
    """Return the body of a request.

    Raises Refused if the server takes no more requests at the moment, if the body is too large, or if the body takes
    too long to arrive. Raises ClientGone if the client disconnects before the body ends.
    """
    services.gate.look()
    limits = services.limits
    most = limits.max_body_bytes
    too_large = Refused(
        f"the body has more than {most:,} bytes, which is this server's limit: make it shorter, or raise "
        "--max-body-bytes",
        code="body_too_large",
        status=413,
    )
    length = headers.get("content-length", "")
    is_too_large = length.isdigit() and int(length) > most
    parts, num_bytes, more = list[bytes](), 0, True
    async with services.arriving.body(limits.body_timeout_s) as came:
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part, more = message.get("body", b""), message.get("more_body", False)
            num_bytes += len(part)
            if num_bytes > most:
                is_too_large, parts = True, []
                if num_bytes > MOST_DRAINED_BYTES:
                    break
            elif not is_too_large:
                parts.append(part)
                came(len(part))
    if is_too_large:
        raise too_large
    return b"".join(parts)


def ignored_header(names: Seq[str]) -> str:
    """Return the value of the header x-forerun-ignored: the names of ignored fields, separated by commas.

    A name with characters other than printable ASCII is escaped. The value has at most MOST_HEADER_CHARS characters.
    """
    safe = (name if name.isascii() and name.isprintable() else ascii(name) for name in names)
    return ", ".join(shown_name for shown_name in safe)[:MOST_HEADER_CHARS]
