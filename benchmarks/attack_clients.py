"""What `benchmarks.attacks` sends: many connections, large bodies, bodies that do not end, answers that nobody reads.

An attack is a coroutine that goes on until it is cancelled, and counts how it was answered. It writes HTTP itself, for
a client of a library takes longer for a request than the server does.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

NUM_SLOW, NUM_UNREAD, NUM_NEW, NUM_LARGE = 900, 200, 900, 4
LARGE_BYTES = (4 << 20) - 4096  # nearly as much as a server takes of a body
TRICKLE_S = 0.5  # between two bytes of a slow body
PAUSE_S, FOR_EVER_S = 1.0, 1e9  # between two floods of new connections; of a stream that is not read
NICE = 5  # of the process of an attack: where all cores are busy it is not the clients that hold up a stream
COMPLETION = "/v1/completions"
Answers = Counter[str]
Attack = Callable[[str, int, Answers], Awaitable[None]]  # host, port, and what counts the answers


def _head(path: str, num_bytes: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {num_bytes}", "", ""]).encode()


def _post(path: str, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return _head(path, len(data)) + data


@asynccontextmanager
async def _connected(host: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is closed in the end. Where the server cuts it, or takes none, what is done in it is over."""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            yield reader, writer
        except OSError:
            pass
        finally:
            writer.close()


async def _status(reader: asyncio.StreamReader) -> str:
    """The status of an answer; what else comes is not read."""
    words = (await reader.readline()).split()
    return words[1].decode() if len(words) > 1 else "cut"


async def large(path: str, body: Mapping[str, Any], host: str, port: int, answers: Answers) -> None:
    """Several large bodies at once, each answer read to its end, again and again."""
    request = _post(path, body).replace(b"Host:", b"Connection: close\r\nHost:", 1)

    async def one() -> None:
        while True:
            async with _connected(host, port) as (reader, writer):
                writer.write(request)
                answers[await _status(reader)] += 1
                await reader.read(-1)

    await asyncio.gather(*(one() for _ in range(NUM_LARGE)))


async def slow_bodies(host: str, port: int, answers: Answers) -> None:
    """Many bodies at once, of which a byte comes now and then. One that is refused begins anew."""

    async def one() -> None:
        while True:
            async with _connected(host, port) as (reader, writer):
                writer.write(_head(COMPLETION, LARGE_BYTES))
                status = asyncio.create_task(_status(reader))
                while not status.done():
                    writer.write(b" ")
                    await asyncio.wait((status,), timeout=TRICKLE_S)
                answers[await status] += 1

    await asyncio.gather(*(one() for _ in range(NUM_SLOW)))


async def unread_streams(host: str, port: int, answers: Answers) -> None:
    """Many streams of which nothing but the first line is read. One that is refused asks again."""
    request = _post(COMPLETION, {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True})

    async def one() -> None:
        while True:
            async with _connected(host, port) as (reader, writer):
                writer.write(request)
                status = await _status(reader)
                answers[status] += 1
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(PAUSE_S if status != "200" else FOR_EVER_S)

    await asyncio.gather(*(one() for _ in range(NUM_UNREAD)))


async def new_connections(host: str, port: int, answers: Answers) -> None:
    """Many requests at once, each on a connection of its own, again and again."""
    request = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"

    async def one() -> None:
        async with _connected(host, port) as (reader, writer):
            writer.write(request)
            answers[await _status(reader)] += 1

    while True:
        await asyncio.gather(*(one() for _ in range(NUM_NEW)))
        await asyncio.sleep(PAUSE_S)


ATTACKS: Mapping[str, Attack] = {
    "ids of 4 MB to a text": partial(large, "/detokenize", {"tokens": [7] * (LARGE_BYTES // 3)}),
    "a text of 4 MB to ids": partial(large, "/tokenize", {"prompt": "a b " * (LARGE_BYTES // 4)}),
    "a conversation of 4 MB": partial(
        large, "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a b " * (LARGE_BYTES // 4)}]}
    ),
    "prompts of 4 MB of ids": partial(large, COMPLETION, {"prompt": [[7] * 6000] * 200, "max_tokens": 1}),
    f"{NUM_SLOW} slow bodies": slow_bodies,
    f"{NUM_UNREAD} unread streams": unread_streams,
    f"{NUM_NEW} new connections": new_connections,
}


@contextmanager
def attacked(url: str, name: str) -> Iterator[Answers]:
    """An attack by a process of its own until the block is left. Gives how it was answered, when it is over."""
    command = [sys.executable, "-m", __spec__.name, url, name]
    answers = Answers()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        try:
            yield answers
        finally:
            process.stdin.close()
            answers.update(json.loads(process.stdout.read()))


async def _attack(url: str, name: str) -> None:
    """Go on until standard input ends, and then write how it was answered."""
    os.nice(NICE)
    answers, where = Answers(), urlsplit(url)
    attack = asyncio.ensure_future(ATTACKS[name](str(where.hostname), where.port or 80, answers))
    print("begun", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    attack.cancel()
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    asyncio.run(_attack(*sys.argv[1:]))
