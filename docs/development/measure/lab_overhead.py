"""What a viewer of the lab costs: `python docs/development/measure/lab_overhead.py [target] [method]`.

The same generation is run unwatched and with a viewer, who reads in a process of its own, in turn. Printed are the
medians of the time from the request to its last token, and of the CPU time of the thread that steps the engine, where
the system tells it.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn

from forerun import LLM, SamplingParams
from forerun.lab.app import make_lab

PAIRS = 24
BODY = {"prompt": "def fib(n):\n", "max_tokens": 128, "temperature": 0, "ignore_eos": True, "spec_length": 4}
READER = """
import json, sys, httpx
for _ in sys.stdin:
    with httpx.stream("POST", sys.argv[1], json=json.loads(sys.argv[2]), timeout=None) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    print(json.loads(lines[-1].removeprefix("data: "))["seconds"], flush=True)
"""


def main() -> None:
    """Measure and print."""
    target, method = (*sys.argv[1:], *("shipped", "auto")[len(sys.argv) - 1 :])
    llm = LLM(target, draft=method, max_batch_size=2)
    server = uvicorn.Server(uvicorn.Config(make_lab(llm), port=0, log_level="error", lifespan="off"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/api/live"
    command = [sys.executable, "-c", READER, url, json.dumps(BODY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None

        def watched() -> float:
            print(file=reader.stdin, flush=True)
            return float(reader.stdout.readline())

        ways = {"unwatched": lambda: unwatched(llm), "watched": watched}
        wall: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(-1, PAIRS):  # the first pair warms up
            for way in sorted(ways, reverse=number % 2 == 0):
                begun_s = engine_cpu_s()
                took_s = ways[way]()
                if number >= 0:
                    wall[way].append(took_s)
                    cpu[way].append(engine_cpu_s() - begun_s)
        reader.stdin.close()
    print(f"{target}, {method}: {BODY['max_tokens']} tokens, medians of {PAIRS} generations")
    for name, times in (("wall", wall), ("CPU of the engine's thread", cpu)):
        alone, seen = (statistics.median(times[way]) for way in ways)
        if alone:
            print(f"{name}: {1000 * alone:.1f} ms unwatched, {1000 * seen:.1f} ms watched, {seen / alone:.3f} times")


def unwatched(llm: LLM) -> float:
    """Seconds from the request to its last token."""
    params: dict[str, Any] = {name: value for name, value in BODY.items() if name != "prompt"}
    salt = str(time.perf_counter())  # a viewer's request has one of its own, too
    prompt = llm.tokenizer.encode(str(BODY["prompt"]))
    (request,) = llm.engine.make(prompt, dataclasses.replace(SamplingParams(**params), cache_salt=salt))
    ended = threading.Event()
    request.hear = lambda heard: ended.set() if heard.seq.finish_reason is not None else None
    begun_s = time.perf_counter()
    llm.queue([request])
    ended.wait()
    return time.perf_counter() - begun_s


def engine_cpu_s() -> float:
    """CPU seconds of the engine's thread so far; 0 where the system does not say."""
    thread = next((one for one in threading.enumerate() if one.name == "forerun-engine"), None)
    file = Path(f"/proc/self/task/{thread.native_id if thread else 0}/schedstat")
    return int(file.read_text(encoding="utf-8").split()[0]) / 1e9 if file.exists() else 0.0


if __name__ == "__main__":
    main()
