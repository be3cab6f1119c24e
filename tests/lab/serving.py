"""The lab around an engine of this process, behind a real socket, and a reader of its streams."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from forerun import LLM
from forerun.lab.app import make_lab
from serve.running import wait_for

Event = tuple[str, dict[str, Any]]


@contextmanager
def serving_lab(llm: LLM) -> Iterator[str]:
    """The URL of the page."""
    app = FastAPI()
    app.mount("/lab", make_lab(llm))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/lab/"
    finally:
        server.should_exit = True
        thread.join()


def watch(url: str, **body: Any) -> list[Event]:
    """All events of one generation, by their names."""
    with httpx.stream("POST", f"{url}api/live", json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        return list(read(response))


def read(response: httpx.Response) -> Iterator[Event]:
    """The events of a stream, as they come."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def of(events: list[Event], name: str, lane: str = "draft") -> list[dict[str, Any]]:
    """The data of the events of one name in one lane."""
    return [data for found, data in events if found == name and data["lane"] == lane]
