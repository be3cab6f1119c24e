"""llama.cpp by its own `llama-server`: one is started for each run, asked once over HTTP, and ended.

What it drafts with is chosen when it starts, so each configuration is a server of its own. It is started and warmed
before the clock runs, and lives for one answer: it holds nothing of other prompts, and no processor while others run.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
START_LIMIT_S = 300.0
ANSWER_LIMIT_S = 600.0
END_LIMIT_S = 10.0
SEARCHES = "ngram-"  # how the types of speculation begin that need no model
DRAFTS = "draft-simple"  # a draft model; the other types that begin with "draft-" are heads, of which there is none


class LlamaServerPeer:
    """A llama-server of the user's with every type of speculation that runs on a pair of GGUF files.

    Lengths are searched for the draft model and for its simplest search, which is what others call prompt lookup; both,
    and the other searches, are run with the server's own lengths, too.
    """

    def __init__(self, question: Json) -> None:
        self._program, self._draft, self._max_n = question["server"], question["draft"], question["lookup_max_n"]
        said = self._run("--help")
        if (offered := re.search(r"--spec-type\s+(\S+)", said)) is None:
            raise RuntimeError(f"{self._program} has no --spec-type: build a newer one")
        types = [name for name in offered[1].split(",") if name != "none"]
        self._usual = ["--model", question["target"], "--parallel", "1", "--ctx-size", str(question["num_positions"])]
        self._usual += ["--threads", str(question["num_threads"]), "--host", "127.0.0.1"]
        self._usual += ["--cache-ram", "0"] if "--cache-ram" in said else []  # else it keeps a copy of each prompt
        self.settings: dict[str, tuple[str, int | None]] = {"plain": ("plain", None)}
        lengths = question["spec_lengths"]
        if "ngram-simple" in types:
            self.settings |= {f"lookup K={k}": ("lookup", k) for k in lengths}
        if DRAFTS in types and self._draft:
            self.settings |= {"draft": ("draft", None), **{f"draft K={k}": ("draft", k) for k in lengths}}
        self.settings |= {name: (name, None) for name in types if name.startswith(SEARCHES)}
        heads = [name for name in types if not name.startswith(SEARCHES) and name != DRAFTS]
        version = re.search(r"version: .*", self._run("--version"))
        self.about = f"llama-server{f' {version[0]}' if version else ''}, {question['num_threads']} threads" + (
            f"; {', '.join(heads)} are left out, because they need heads" if heads else ""
        )

    def _run(self, flag: str) -> str:
        done = subprocess.run([self._program, flag], capture_output=True, text=True, check=True, timeout=START_LIMIT_S)
        return done.stdout + done.stderr

    def _flags(self, method: str, spec_length: int | None) -> list[str]:
        if method == "plain":
            return []
        if method == "draft":
            length = [] if spec_length is None else ["--spec-draft-n-max", str(spec_length)]
            return ["--spec-type", DRAFTS, "--model-draft", self._draft, *length]
        if method == "lookup":
            sizes = ["--spec-ngram-simple-size-n", str(self._max_n), "--spec-ngram-simple-size-m", str(spec_length)]
            return ["--spec-type", "ngram-simple", *sizes]
        return ["--spec-type", method]

    @contextlib.contextmanager
    def ready(self, method: str, spec_length: int | None) -> Iterator[None]:
        """Start a server on a free port, wait until it answers, and end it behind the block."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [self._program, *self._usual, "--port", str(self._port), *self._flags(method, spec_length)]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                self._wait(process, log)
                self._ask([0], 1)
                yield
            finally:
                process.terminate()
                try:
                    process.wait(END_LIMIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _wait(self, process: subprocess.Popen[bytes], log: Any) -> None:
        end = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end:
            if process.poll() is not None:
                log.seek(0)
                words = [line.strip() for line in log if line.strip()] or ["nothing"]
                errors = [line for line in words if "error" in line.lower()]
                raise RuntimeError(f"llama-server ended with exit code {process.returncode}: {(errors or words)[-1]}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._http("GET", "/health", None)[0] == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"llama-server was not ready within {START_LIMIT_S:.0f} s")

    def _http(self, verb: str, path: str, body: Json | None) -> tuple[int, Json]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_LIMIT_S)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(verb, path, sent, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def _ask(self, ids: list[int], max_tokens: int) -> Json:
        asked = {"prompt": ids, "n_predict": max_tokens, "temperature": 0, "ignore_eos": True}
        status, reply = self._http("POST", "/completion", {**asked, "cache_prompt": False, "return_tokens": True})
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {reply}")
        return reply

    def generate(self, method: str, spec_length: int | None, ids: list[int], max_tokens: int) -> Any:
        """Continue one prompt, which is given as ids. The server itself says how long it read the prompt."""
        reply = self._ask(ids, max_tokens)
        return reply["tokens"], reply["timings"]["prompt_ms"] / 1e3, 1
