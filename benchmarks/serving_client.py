"""The client of `benchmarks.serving`: streamed requests over HTTP, at fixed concurrency or as a Poisson process.

It notes when bytes came and reads them when the run is over, so that it takes little of the machine from the server:
the general client that it had before took more time per token than the server.
What it sends is the API of OpenAI.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import h11
import httpx

from forerun.errors import BadOption, NotFound, shown

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MOST_SHOWN = 200  # characters of a server's error
NOT_FOR_CHATS = (400, 404, 405, 422, 500, 501)  # what servers answer where the model has no chat template


@dataclass(frozen=True)
class Load:
    """How requests come: so many at once, or `rate` of them per second with exponential gaps (a Poisson process)."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True)
class Server:
    """A server that answers. name: in tables. url: of its root. model: what requests call it.

    is_salted: whether it knows `cache_salt`, which keeps a request from finding an earlier one's prompt in the cache.
    about: its command line, and pid: its process, where it was started here.
    """

    name: str
    url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    is_salted: bool = False
    about: str = ""
    pid: int | None = None


@dataclass
class Answered:
    """One request. Times are in seconds since the run began.

    index: of its body. due_s: when it should have been sent: by its Poisson process, else when a place was free.
    arrivals_s: of pieces with text. num_tokens: as the server counts them, else the pieces. status: of HTTP; 0 where no
    answer began. error: why it counts as failed.
    """

    index: int
    due_s: float
    sent_s: float
    ended_s: float = 0.0
    status: int = 0
    error: str | None = None
    arrivals_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int | None = None
    text: str = ""
    reads: list[tuple[float, bytes]] = field(default_factory=list, repr=False)  # until they are read

    @property
    def ttft_s(self) -> float:
        """Until the first text, or the end where there was none."""
        return (self.arrivals_s[0] if self.arrivals_s else self.ended_s) - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Between two pieces, which hold one token each, or several where drafts were accepted."""
        return [b - a for a, b in pairwise(self.arrivals_s)]

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token behind the first; None where there is none."""
        if len(self.arrivals_s) < 2 or self.num_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_tokens - 1)


@dataclass(frozen=True)
class Run:
    """One load on one server. cpu_s: what this process took of the machine meanwhile."""

    server: str
    load: Load
    repeat: int
    seconds: float
    cpu_s: float
    answers: tuple[Answered, ...]

    @property
    def num_tokens(self) -> int:
        return sum(a.num_tokens for a in self.answers if a.error is None)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def due_times_s(rate: float, num_requests: int, seed: int) -> list[float]:
    """When the requests of a Poisson process come; the first one at once. The same seed, the same times."""
    draws = random.Random(seed)
    times = [0.0]
    while len(times) < num_requests:
        times.append(times[-1] + draws.expovariate(rate))
    return times


async def run_load(
    server: Server, path: str, bodies: Seq[Mapping[str, Any]], load: Load, *, timeout_s: float, seed: int, repeat: int
) -> Run:
    """Send all bodies to one server and wait for the last answer."""
    door = Door.to(server, path)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    if load.rate is None:
        assert load.concurrency is not None
        waiting = enumerate(bodies)
        lanes = [_one_after_another(door, waiting, began_s, timeout_s) for _ in range(load.concurrency)]
        answers = [answer for lane in await asyncio.gather(*lanes) for answer in lane]
    else:
        pairs = zip(enumerate(bodies), due_times_s(load.rate, len(bodies), seed), strict=True)
        sent = [_at(door, numbered, began_s, due_s, timeout_s) for numbered, due_s in pairs]
        answers = list(await asyncio.gather(*sent))
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    for answer in answers:
        read_answer(answer)
    answers.sort(key=lambda answer: answer.index)
    return Run(server.name, load, repeat, seconds, cpu_s, tuple(answers))


Numbered = tuple[int, Mapping[str, Any]]  # a body and its index


async def _one_after_another(
    door: Door, waiting: Iterator[Numbered], began_s: float, timeout_s: float
) -> list[Answered]:
    return [await send(door, body, began_s, time.perf_counter() - began_s, timeout_s) for body in waiting]


async def _at(door: Door, body: Numbered, began_s: float, due_s: float, timeout_s: float) -> Answered:
    await asyncio.sleep(began_s + due_s - time.perf_counter())
    return await send(door, body, began_s, due_s, timeout_s)


@dataclass(frozen=True)
class Door:
    """Where requests go: the beginning of each request's bytes, up to the length of its body."""

    host: str
    port: int
    is_tls: bool
    head: bytes

    @classmethod
    def to(cls, server: Server, path: str) -> Door:
        """The door of a path of a server, with its headers."""
        url = httpx.URL(server.url)
        headers = {
            "host": url.netloc.decode(),
            "accept-encoding": "identity",
            "content-type": "application/json",
            "connection": "close",  # the end of the connection is the end of the answer
            **server.headers,
        }
        lines = [f"POST {url.path.rstrip('/')}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        is_tls = url.scheme == "https"
        return cls(url.host, url.port or (443 if is_tls else 80), is_tls, "\r\n".join(lines).encode())


class _Bytes(asyncio.Protocol):
    """Notes when bytes come. `ended` is done when the server has closed the connection."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.reads: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.perf_counter() - self.began_s, data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error) if error else self.ended.set_result(None)


async def send(door: Door, numbered: Numbered, began_s: float, due_s: float, timeout_s: float) -> Answered:
    """Send one request, wait for its end, and note when bytes came. Whatever goes wrong is in the answer's error.

    Nothing is read while others wait: a client that parses takes as much of the machine as the server that it measures.
    """
    index, body = numbered
    answer = Answered(index, due_s, time.perf_counter() - began_s)
    data = json.dumps(body).encode()
    loop, transport = asyncio.get_running_loop(), None
    try:
        async with asyncio.timeout(timeout_s):
            transport, bytes_ = await loop.create_connection(
                lambda: _Bytes(began_s), door.host, door.port, ssl=door.is_tls or None
            )
            answer.reads = bytes_.reads
            transport.write(b"%s\r\ncontent-length: %d\r\n\r\n%s" % (door.head, len(data), data))
            await bytes_.ended
    except TimeoutError:
        answer.error = f"no end within {timeout_s:g} s"
    except OSError as error:
        answer.error = f"{type(error).__name__}: {error!s:.{MOST_SHOWN}}"
    finally:
        if transport is not None:
            transport.abort()
    answer.ended_s = time.perf_counter() - began_s
    return answer


def read_answer(answer: Answered) -> None:
    """Take all from the bytes of an answer: its status, and the events of its stream or what the server said."""
    parser, pieces = h11.Connection(h11.CLIENT), list[tuple[float, bytes]]()
    parser.send(h11.Request(method="POST", target="/", headers=[("host", "any"), ("connection", "close")]))
    parser.send(h11.EndOfMessage())
    try:
        for at_s, data in (*answer.reads, (answer.ended_s, b"")):  # no bytes: the connection was closed
            parser.receive_data(data)
            while not isinstance(event := parser.next_event(), h11.NEED_DATA | h11.PAUSED):
                if isinstance(event, h11.Response):
                    answer.status = event.status_code
                elif isinstance(event, h11.Data):
                    pieces.append((at_s, bytes(event.data)))
                elif isinstance(event, h11.ConnectionClosed):
                    break
    except h11.RemoteProtocolError as error:
        answer.error = answer.error or f"{type(error).__name__}: {error!s:.{MOST_SHOWN}}"
    answer.reads = []
    if answer.error is None and answer.status != 200:
        said = b"".join(data for _, data in pieces).decode(errors="replace")
        answer.error = f"status {answer.status}: {said:.{MOST_SHOWN}}"
    elif answer.error is None:
        read_stream(answer, pieces)


def read_stream(answer: Answered, reads: Seq[tuple[float, bytes]]) -> None:
    """Take texts, times and token counts from server-sent events, read in pieces that may end anywhere."""
    left, is_done, pieces = b"", False, 0
    for at_s, data in reads:
        *whole, left = (left + data).replace(b"\r\n", b"\n").split(b"\n\n")
        has_text = False
        for raw in whole:
            event = b"".join(line[5:].strip() for line in raw.split(b"\n") if line.startswith(b"data:"))
            if event == b"[DONE]":
                is_done = True
            elif event:
                text = _take(answer, event)
                has_text |= bool(text)
                pieces += bool(text)
        if has_text:
            answer.arrivals_s.append(at_s)
    answer.num_tokens = answer.num_tokens or pieces
    if answer.error is None and not is_done:
        answer.error = "the stream broke off: there was no [DONE]"


def _take(answer: Answered, event: bytes) -> str:
    """The text of one event; usage and errors go into the answer."""
    try:
        made = json.loads(event)
        if "error" in made:
            answer.error = f"{made['error']!s:.{MOST_SHOWN}}"
            return ""
        if usage := made.get("usage"):
            answer.num_tokens = usage["completion_tokens"]
            answer.num_prompt_tokens = usage.get("prompt_tokens")
        text = "".join(_text_of(choice) for choice in made.get("choices") or ())
    except (ValueError, KeyError, TypeError, AttributeError):
        answer.error = f"an event could not be read: {event.decode(errors='replace'):.{MOST_SHOWN}}"
        return ""
    answer.text += text
    return text


def _text_of(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    return str((choice.get("text") if delta is None else delta.get("content")) or "")


# ----------------------------------------------------------------------------------------------------- what is there


def find_model(url: str, headers: Mapping[str, str]) -> str:
    """The first model that a server lists. Raises NotFound where no server answers, BadOption where none is listed."""
    try:
        answer = httpx.get(f"{url}/v1/models", headers=dict(headers), timeout=30, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NotFound(f"no server answers at {shown(url)} ({error}): start one, or mend --url") from None
    if answer.status_code in (401, 403):
        raise BadOption(f"{shown(url)} wants an API key (status {answer.status_code}): give --api-key")
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise BadOption(f"{shown(url)}/v1/models lists no model: name one with --served-model-name") from None


def knows_chats(server: Server, timeout_s: float) -> bool:
    """Whether a server's model answers conversations. Raises BadOption for an answer that is neither yes nor no."""
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    headers = dict(server.headers)
    try:
        answer = httpx.post(f"{server.url}{CHAT}", json=body, headers=headers, timeout=timeout_s, trust_env=False)
    except httpx.HTTPError as error:
        raise NotFound(f"{server.name} at {server.url} does not answer ({error}): start it again") from None
    if answer.status_code == 200:
        return True
    if answer.status_code in NOT_FOR_CHATS:
        return False
    raise BadOption(
        f"{server.name} refuses a request (status {answer.status_code}: {answer.text[:MOST_SHOWN]}): give --api-key, "
        "--served-model-name, or wait until it is free"
    )
