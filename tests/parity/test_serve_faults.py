"""Thousands of requests against one server, many of them broken: nothing leaks, nothing fails but what should."""

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.running import CODE, Running, serving, wait_for

pytestmark = pytest.mark.parity
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
JSON = {"content-type": "application/json"}
NUM_REQUESTS = int(os.environ.get("FORERUN_TEST_REQUESTS", "10000"))
NUM_CLIENTS = 20
OPTIONS = ["--max-batch-size", "8", "--max-queue", "24", "--max-body-bytes", "50000", "--log-level", "warning"]
OPTIONS += ["--body-timeout-s", "2", "--stall-timeout-s", "2", "--request-timeout-s", "60"]


class Client:
    """Sends requests of random kinds and counts the statuses of their answers."""

    def __init__(self, server: Running, seed: int) -> None:
        self.random = random.Random(seed)
        self.server = server
        self.codes = Counter[tuple[str, int]]()
        self.host, self.port = "127.0.0.1", int(server.url.rsplit(":", 1)[1])
        self.http = httpx.AsyncClient(base_url=server.url, timeout=120)

    async def one(self) -> None:
        kinds = {self.whole: 4, self.streamed: 4, self.leaves: 3, self.malformed: 2, self.oversized: 1}
        kinds |= {self.half_a_body: 1, self.slow: 1}
        kind = self.random.choices(list(kinds), list(kinds.values()))[0]
        with contextlib.suppress(httpx.TransportError, OSError):
            await kind()

    def asked(self) -> tuple[str, dict[str, Any]]:
        num = self.random.choice((1, 4, 16, 64))
        prompt = CODE * self.random.choice((1, 1, 2, 20)) + str(self.random.randrange(50))
        hello = [{"role": "user", "content": prompt}]
        more: dict[str, Any] = self.random.choice(
            ({}, {"temperature": 0}, {"stop": ["\n\n"]}, {"draft": "none"}, {"top_k": 5, "seed": 3}, {"spec_length": 4})
        )
        return self.random.choice(
            (
                ("/v1/completions", {"prompt": prompt, "max_tokens": num, "n": self.random.choice((1, 1, 3)), **more}),
                ("/v1/completions", {"prompt": [prompt, "x"], "max_tokens": num, "logprobs": 2, **more}),
                ("/v1/chat/completions", {"messages": hello, "max_tokens": num, **more}),
                ("/v1/responses", {"input": prompt, "max_output_tokens": num, **more}),
                ("/v1/messages", {"messages": hello, "max_tokens": num}),
                ("/tokenize", {"prompt": prompt}),
            )
        )

    def saw(self, kind: str, answer: httpx.Response) -> None:
        self.codes[kind, answer.status_code] += 1
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1

    async def whole(self) -> None:
        url, body = self.asked()
        self.saw("whole", await self.http.post(url, json=body))

    async def streamed(self) -> None:
        url, body = self.asked()
        answer = await self.http.post(url, json=body | ({} if url == "/tokenize" else {"stream": True}))
        self.saw("streamed", answer)
        assert "server_error" not in answer.text
        assert "api_error" not in answer.text

    async def leaves(self) -> None:
        """Behind the first piece, or after a moment."""
        url, body = self.asked()
        body |= {} if url == "/tokenize" else {"stream": self.random.random() < 0.5}
        body |= {name: 500 for name in ("max_tokens", "max_output_tokens") if name in body}
        async with asyncio.timeout(self.random.random() * 0.1):
            async with self.http.stream("POST", url, json=body) as answer:
                self.saw("leaves", answer)
                async for _ in answer.aiter_raw():
                    break

    async def malformed(self) -> None:
        url, body = self.asked()
        wrong: list[bytes] = [
            b"{",
            b"\xff",
            b"[]",
            b'{"prompt": 1e999}',
            b"[" * 20_000,
            b'{"messages": [{"role": {}}]}',
        ]
        self.saw("malformed", await self.http.post(url, content=self.random.choice(wrong), headers=JSON))
        name = self.random.choice(list(body))
        value = self.random.choice((-1, 1e9, {}, [], [[]], "\ud800", {"a": [None]}, 2**70))
        self.saw("malformed", await self.http.post(url, content=json.dumps({**body, name: value}), headers=JSON))

    async def oversized(self) -> None:
        answer = await self.http.post("/v1/completions", json={"prompt": "x" * self.random.choice((60_000, 2_000_000))})
        self.saw("oversized", answer)
        assert answer.status_code in (413, 429)

    async def half_a_body(self) -> None:
        _, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(HEAD + b'Content-Length: 90\r\n\r\n{"prompt": ')
        await writer.drain()
        await asyncio.sleep(self.random.random() * 0.05)
        writer.close()

    async def slow(self) -> None:
        """Reads a little now and then, and goes before the end as often as not."""
        body = b'{"prompt": "def f(", "max_tokens": 400, "logprobs": 5, "stream": true, "ignore_eos": true}'
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1024)
        writer.write(HEAD + b"Connection: close\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        for _ in range(self.random.randrange(20)):
            if not await reader.read(512):
                break
            await asyncio.sleep(0.02)
        writer.close()


async def _run(server: Running, num: int, seed: int) -> Counter[tuple[str, int]]:
    clients = [Client(server, seed + i) for i in range(NUM_CLIENTS)]

    async def keep_asking(client: Client) -> None:
        for _ in range(num // NUM_CLIENTS + 1):
            with contextlib.suppress(TimeoutError):
                await client.one()
        await client.http.aclose()

    await asyncio.gather(*map(keep_asking, clients))
    return sum((client.codes for client in clients), Counter())


# An event loop that does nothing, in a process of its own beside the run: what the machine alone makes late.
IDLE = """
import asyncio, signal
async def main():
    loop, late, end = asyncio.get_running_loop(), [], asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, end.set)
    while not end.is_set():
        due = loop.time() + 0.05
        await asyncio.sleep(0.05)
        late.append(loop.time() - due)
    print(sorted(late)[int(0.999 * len(late))])
asyncio.run(main())
"""


def _delay_s(server: Running, share: float = 0.999) -> float:
    """The bucket below which this share of the event loop's delays is."""
    text = server.http.get("/metrics").text
    found = re.findall(r'forerun:event_loop_delay_seconds_bucket\{le="(\S+?)",.*\} (\S+)', text)
    counts = [(float(bound), float(count)) for bound, count in found]
    return next(bound for bound, count in counts if count >= share * counts[-1][1])


def _rss_bytes(server: Running) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def test_a_server_survives_its_clients() -> None:
    """What it prints is for a person: delays and memory depend on the machine."""
    with serving(*OPTIONS) as server:
        asyncio.run(_run(server, NUM_REQUESTS // 5, 0))
        wait_for(server.is_idle)
        warm = _rss_bytes(server)
        idle = subprocess.Popen([sys.executable, "-c", IDLE], stdout=subprocess.PIPE, text=True)
        codes = asyncio.run(_run(server, NUM_REQUESTS - NUM_REQUESTS // 5, 1000))
        idle.terminate()
        wait_for(server.is_idle)
        grown = _rss_bytes(server) / warm - 1
        print(f"\n{dict(codes)}; memory {warm / 1e6:.0f} MB, then {grown:+.1%}")
        idle_s = float(idle.communicate()[0])
        print(f"p99.9 delay: at most {_delay_s(server) * 1e3:.0f} ms; of the idle loop {idle_s * 1e3:.0f} ms")
        assert {status for _, status in codes} <= {200, 400, 413, 429}, codes
        assert {status for kind, status in codes if kind in ("whole", "streamed")} <= {200, 429}, codes
        assert grown < 0.1, "memory grows with the number of requests"
        assert server.http.get("/ready").status_code == 200
        assert "Traceback" not in server.log, server.log
        assert server.terminate() == 0
