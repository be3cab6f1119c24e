"""`forerun batch --ray`: runs a batch with an engine on each node of a Ray cluster, and writes one output file.

Only the process of the command reads the input and writes the output. It keeps a fixed number of requests (the window)
at each engine, and sends the engine another request as soon as an answer arrives. If an engine dies, its requests are
given to other engines, with the same seeds. A request is never at two engines at once, so it gets one line of output.

The engines are Ray actors. Ray Data is not used, because it works on blocks of rows: all answers of a block would
arrive together, once the last answer of the block is complete, and after a failure a whole block would be repeated.
Here each answer is on the disk as soon as it is complete, and no answered request is repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError

from forerun.config import EngineConfig
from forerun.engine.request import Request
from forerun.errors import BadOption, CapacityError
from forerun.serve.answers import AnswerFile
from forerun.serve.batch import WINDOW_BATCHES, Numbers, Run, Running, load
from forerun.serve.requests import BatchRequest
from forerun.text.terminal import note

MOST_DEATHS = 3  # per engine, without an answer between them
NOTE_S = 30.0  # without an engine, until a line says so


class Engine:
    """A Ray actor with one engine. It answers all requests that it has at the same time."""

    def __init__(self, config: EngineConfig, served_names: Seq[str]) -> None:
        self._requests = load(config, served_names)

    async def answer(self, request: BatchRequest) -> dict[str, Any]:
        """Answer a request, and return the object for its output line."""
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()

        def hear(one: Request) -> None:
            if one.seq.finish_reason is not None:
                loop.call_soon_threadsafe(is_over.set)

        started = await asyncio.to_thread(self._requests.start, request, hear)
        if not isinstance(started, Running):
            return started
        while not started.is_over:
            await is_over.wait()
            is_over.clear()
        return await asyncio.to_thread(self._requests.answer, started)


@dataclass(eq=False)
class _Member:
    """An engine of a pool. num_asked: the number of requests that the engine is answering."""

    engine: Any
    num_asked: int = 0


class Pool:
    """Runs `num` engines on a cluster, each with at most `window` requests at a time. A dead engine is replaced.

    make(): starts an engine, and returns its actor. numbers: counts the tokens of all answers.
    """

    def __init__(self, make: Callable[[], Any], num: int, window: int, numbers: Numbers) -> None:
        self._make, self._num, self._window, self._numbers = make, num, window, numbers
        self._starting: dict[Any, _Member] = {}  # by the reference that is ready when the engine is
        self._ready: list[_Member] = []
        self._asked: dict[
            Any, tuple[_Member, BatchRequest]
        ] = {}  # by the reference to an answer: who was asked, and what
        self._again: deque[BatchRequest] = deque()
        self._num_deaths = 0  # since the last answer
        for _ in range(num):
            self._start()

    def run(self, requests: Iterator[BatchRequest], answers: AnswerFile, on_step: Callable[[], None]) -> None:
        """Answer all requests; see `Runner.run` in forerun.serve.batch.

        Raises CapacityError if too many engines die one after another without an answer from any engine.
        """
        try:
            waited_s = 0.0
            while True:
                self._fill(requests)
                if not self._asked and self._ready:
                    return
                if ready := self._wait(NOTE_S):
                    self._welcome(ready)
                    answers.append(self._land(ready))
                    on_step()
                elif not self._ready and waited_s < NOTE_S:
                    waited_s = NOTE_S
                    note("no engine is ready yet: it loads the model, or the cluster has no room for it (`ray status`)")
        except KeyboardInterrupt:
            answers.append(self._land(self._wait(0)))
            raise

    def close(self) -> None:
        """Kill all engines, ready or not."""
        for member in (*self._ready, *self._starting.values()):
            ray.kill(member.engine)

    def _start(self) -> None:
        member = _Member(self._make())
        self._starting[member.engine.__ray_ready__.remote()] = member

    def _wait(self, at_most_s: float) -> list[Any]:
        """Wait at most at_most_s seconds until a reference is ready, and return all references that are ready."""
        ready, left = ray.wait([*self._starting, *self._asked], timeout=at_most_s)
        more = ray.wait(left, num_returns=len(left), timeout=0)[0] if ready and left else []
        return [*ready, *more]

    def _welcome(self, references: Seq[Any]) -> None:
        """Add each engine that has loaded the model to the ready engines.

        references: the references that are ready. Raises BadOption for an engine that cannot load the model.
        """
        for reference in references:
            if (member := self._starting.pop(reference, None)) is None:
                continue
            try:
                ray.get(reference)
                self._ready.append(member)
                self._numbers.started_s = self._numbers.started_s if self._numbers.num_tokens else time.perf_counter()
            except RayActorError as error:
                if error.actor_init_failed:
                    raise BadOption(f"an engine could not be made on the cluster: {error}") from error
                self._mourn()

    def _fill(self, requests: Iterator[BatchRequest]) -> None:
        """Give requests to the least busy engines until all windows are full or no request is left."""
        while self._ready and (member := min(self._ready, key=lambda m: m.num_asked)).num_asked < self._window:
            request = self._again.popleft() if self._again else next(requests, None)
            if request is None:
                return
            self._asked[member.engine.answer.remote(request)] = member, request
            member.num_asked += 1

    def _land(self, references: Seq[Any]) -> list[dict[str, Any]]:
        """Return the answers among the ready references. Requests of a dead engine are queued for other engines."""
        landed = []
        for reference in references:
            if reference not in self._asked:
                continue
            member, request = self._asked.pop(reference)
            member.num_asked -= 1
            try:
                answer = ray.get(reference)
            except RayActorError:
                self._again.append(request)
                if member in self._ready:
                    self._ready.remove(member)
                    with suppress(RayActorError):
                        ray.kill(member.engine)
                    self._mourn()
                continue
            landed.append(answer)
            self._num_deaths = 0
            self._numbers.num_tokens += answer["response"]["body"].get("usage", {}).get("completion_tokens", 0)
        return landed

    def _mourn(self) -> None:
        """Start a new engine in place of a dead engine.

        Raises CapacityError if too many engines have died since the last answer.
        """
        self._num_deaths += 1
        if self._num_deaths > MOST_DEATHS * self._num:
            raise CapacityError(
                f"{self._num_deaths} engines died one after the other and none has answered anything: Ray's logs say "
                "why; the same command goes on from here"
            )
        self._start()


def on_ray(num_engines: int | None, num_cpus: float | None, num_gpus: float) -> Any:
    """Return the Place that runs a batch on a Ray cluster (see `Place` in forerun.serve.batch).

    The Place uses the cluster at RAY_ADDRESS, or else a cluster that runs on this machine. If there is no such cluster,
    it starts a cluster that consists of this machine. num_engines: the number of engines; None = the number of nodes
    with CPUs. num_cpus: the cores of each engine; None = the cores of the smallest node. num_gpus: the GPUs of each
    engine.
    """

    @contextmanager
    def place(config: EngineConfig, served_names: Seq[str], numbers: Numbers) -> Iterator[Run]:
        was_here = ray.is_initialized()
        if not was_here:
            ray.init(logging_level=logging.WARNING, log_to_driver=False)
        try:
            cores = [cpus for node in ray.nodes() if node["Alive"] and (cpus := node["Resources"].get("CPU", 0.0)) > 0]
            if not cores:
                raise BadOption("the Ray cluster has no node with CPUs: add one")
            window = WINDOW_BATCHES * config.max_batch_size
            actor = ray.remote(
                num_cpus=min(cores) if num_cpus is None else num_cpus,
                num_gpus=num_gpus,
                max_concurrency=window,
                scheduling_strategy="SPREAD",
            )(Engine)
            pool = Pool(lambda: actor.remote(config, tuple(served_names)), num_engines or len(cores), window, numbers)
            try:
                yield pool.run
            finally:
                pool.close()
        finally:
            if not was_here:
                ray.shutdown()

    return place
