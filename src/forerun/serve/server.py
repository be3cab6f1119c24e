"""Runs `forerun serve`: one process that serves an engine for each model over HTTP, from the start to the exit code.

On SIGTERM or Ctrl-C, the server finishes every accepted request, and answers new requests with status 503. A second
signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import logging
import math
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.config import EngineConfig
from forerun.engine.fitting import refuse_together
from forerun.engine.llm import LLM
from forerun.engine.opened import Opened
from forerun.errors import BadOption, UserError, shown
from forerun.memory.machine import spare_what_is_loaded
from forerun.models.named import default
from forerun.sampling.grammar import vocabulary
from forerun.serve.app import make_app
from forerun.serve.bodies import model_names
from forerun.serve.metrics import Families, Metrics
from forerun.serve.options import ServerOptions
from forerun.serve.origins import ANY, Origins, is_local
from forerun.serve.service import Service, Services
from forerun.serve.turns import MOST_AT_ONCE, new_loop
from forerun.text.terminal import note, visible

LOG = logging.getLogger(__name__)
WARM_UP_TOKENS = 8
SWITCH_S = 0.0005  # that the engine's thread waits for another Python thread; Python's default is ten times as long
KEEP_ALIVE_S = 75  # an idle connection: longer than usual proxies keep theirs
STALL_MARGIN_S = 1.0  # so that a route's own limit comes first: it says why the answer ends
BACKLOG = 2048  # connections that the system keeps until they are taken
MOST_LOG_LINES = 10_000  # that wait to be written
Pages = Mapping[str, Callable[[LLM], ASGIApp]]  # path, such as /lab -> what makes the application there
_WAYS_OUT = {  # of errors of the system
    errno.EADDRINUSE: "end what uses it, or name another --port",
    errno.EADDRNOTAVAIL: "name an address of this machine as --host; 0.0.0.0 stands for all of them",
    errno.EACCES: "name a --port of 1024 or more",
}
_IN_A_FILE = "write them into a file, each below [models.NAME], and give it with --config"
Named = tuple[str, EngineConfig]  # a model with the name that a config file gives it


def run(
    configs: Seq[EngineConfig | Named],
    options: ServerOptions,
    pages: Pages | None = None,
    opening: Callable[[EngineConfig], Opened] = Opened.of,
    loading: Callable[[Opened], AbstractContextManager[object]] = nullcontext,
) -> int:
    """Serve until a signal comes. Returns the exit code. Raises UserError, for example if the address is not available.

    pages: path -> function that makes a further application around the engine of the first model. If there is an API
    key, paths of such an application below /api need the key. Its other paths are open. opening: opens a model.
    loading: returns a display that is shown while a model is loaded.
    """
    check(options)
    models = named(configs, options)
    with bound(options.host, options.port) as listening, _logging(options):
        if not is_local(options.host) and options.api_key is None:
            note(
                f"warning: {options.host} can be reached from other machines and there is no API key: anyone there may "
                "use this server; give --api-key, or FORERUN_API_KEY"
            )
        opened = refuse_together({names[0]: config for names, config in models}) if len(models) > 1 else {}
        llms = list[tuple[Seq[str], LLM]]()
        for names, config in models:
            target = opened.get(names[0]) or opening(config)
            with loading(target):
                llms.append((names, loaded(target)))
        sys.setswitchinterval(SWITCH_S)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(_serve(llms, options, listening, pages or {}))


def named(configs: Seq[EngineConfig | Named], options: ServerOptions) -> list[tuple[tuple[str, ...], EngineConfig]]:
    """Return the names and the configuration of each model. Answers have the first of a model's names.

    Raises BadOption if two models have the same first name, or if options.served_names is set for several models.
    """
    if options.served_names and len(configs) > 1:
        raise BadOption(
            f"--served-model-name {shown(options.served_names[0])} is not possible with {len(configs)} models: "
            f"{_IN_A_FILE}"
        )
    models = list[tuple[tuple[str, ...], EngineConfig]]()
    for given in configs:
        name, config = given if isinstance(given, tuple) else (None, given)
        names = options.served_names or (model_names(config.target or default()) if name is None else (name,))
        models.append((names, config))
    count = Counter(names[0] for names, _ in models)
    for name, times in count.items():
        if times > 1:
            raise BadOption(f"{times} models are called {shown(name)}: {_IN_A_FILE}")
    return models


def check(options: ServerOptions) -> None:
    """Raise BadOption for an --allow-origin that is no origin, and for an --allow-host that is no host name."""
    origins_of(options)


def origins_of(options: ServerOptions) -> Origins:
    """Return the web pages that may use the server, and the host names by which it may be called.

    With an API key, every host name is accepted.
    """
    origins = Origins.parse(options.allow_origins, options.allow_hosts, only_local=is_local(options.host))
    if options.api_key is not None:
        return dataclasses.replace(origins, hosts=frozenset((ANY,)))
    return dataclasses.replace(origins, hosts=origins.hosts | {options.host.lower()})


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that reserves the address while models are loaded.

    The socket does not accept connections yet. Raises BadOption if the address is not available.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadOption(
            f"--host {host} --port {port} is no address ({error.strerror or error}): name another"
        ) from None
    with listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
        except OSError as error:
            way_out = _WAYS_OUT.get(error.errno or 0, "name another --host or --port")
            raise BadOption(f"{host}:{port} cannot be served ({error.strerror}): {way_out}") from None
        yield listening


def loaded(opened: Opened) -> LLM:
    """Load a model and warm it up, so that the first request need not wait for measurements or compilation."""
    from forerun.types import SamplingParams

    tokenizer = opened.text_tokenizer()  # the APIs answer with texts
    llm = LLM.from_opened(opened)
    with suppress(BadOption):  # a tokenizer that grammars cannot use
        vocabulary(tokenizer)  # takes a second, for which no stream has to wait later
    with suppress(UserError):  # whoever chats is told that there is none
        _ = llm.chat_template
    spare_what_is_loaded()
    llm.generate([[llm.engine.runner.num_ids // 2] * 4], SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0))
    llm.measure_passes()
    return llm


def make_services(llms: Seq[tuple[Seq[str], LLM]], options: ServerOptions) -> Services:
    """Return the Services for the models. Call this in the event loop in which the Services will run."""
    families = Families(options.metrics_prefix)
    services = [
        Service(
            llm,
            names,
            defaults=llm.usual_fields,
            max_queue=options.limits.max_queue,
            ignore_unsupported=options.ignore_unsupported,
            metrics=Metrics(llm, names[0], families),
        )
        for names, llm in llms
    ]
    return Services(services, limits=options.limits, logs_texts=options.log_texts)


async def _serve(
    llms: Seq[tuple[Seq[str], LLM]], options: ServerOptions, listening: socket.socket, pages: Pages
) -> int:
    services = make_services(llms, options)
    first = services.first.llm
    server = _Server(_uvicorn_config(services, options, {path: make(first) for path, make in pages.items()}))
    beside = [asyncio.create_task(_end_on_signals(services, server)), asyncio.create_task(services.watch_delay())]
    try:
        serving = asyncio.create_task(server.serve([listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if server.started:
            listening.listen(BACKLOG)
            spare_what_is_loaded()  # the routes and their readers of bodies, too
            _say_where(services, listening, pages)
        await serving
    finally:
        for task in beside:
            task.cancel()
        services.close()
    return 0


def _say_where(services: Services, listening: socket.socket, pages: Pages) -> None:
    host, port = listening.getsockname()[:2]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    for service in services.all:
        config = service.llm.config
        note(
            f"{visible(service.name)} ({service.llm.checkpoint.model.precision}, draft {config.draft}, up to "
            f"{config.max_batch_size} requests at once, of up to {service.llm.engine.max_seq_len:,} tokens) is served "
            f"on http://{where}"
        )
    whose = f" of {visible(services.first.name)}" if len(services.all) > 1 else ""
    for path in pages:
        note(f"{path.strip('/')}{whose}: http://{where}{path}/")


def _uvicorn_config(services: Services, options: ServerOptions, pages: Mapping[str, ASGIApp]) -> uvicorn.Config:
    class Protocol(PatientProtocol):
        headers_s = options.limits.body_timeout_s
        stall_s = options.limits.stall_timeout_s + STALL_MARGIN_S

    return uvicorn.Config(
        make_app(services, api_key=options.api_key, pages=pages, origins=origins_of(options)),
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=MOST_AT_ONCE,  # asyncio also accepts as many connections in one go
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=options.limits.max_header_bytes,
        # After the last answer: connections whose clients take nothing must not keep the server from its end.
        timeout_graceful_shutdown=math.ceil(options.limits.stall_timeout_s + STALL_MARGIN_S),
    )


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP protocol with time limits, for headers that do not end and for clients that read no bytes.

    headers_s: the most seconds that a request's headers may take, from the beginning of the connection or from the
    headers' first byte. stall_s: the most seconds during which a client may read no bytes. Then the connection is
    aborted, because closing it normally would wait until the client reads the unsent bytes.
    """

    headers_s: float
    stall_s: float
    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the time limit for the first request's headers."""
        super().connection_made(transport)
        self._late = self.loop.call_later(self.headers_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Start or stop the time limit for headers, after bytes of a request have arrived."""
        super().data_received(data)
        self._watch_headers()

    def on_response_complete(self) -> None:
        """Start the time limit for the next request's headers, if they began to arrive during the last answer."""
        super().on_response_complete()
        self._watch_headers()

    def _watch_headers(self) -> None:
        has_begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if has_begun and self._late is None:
            self._late = self.loop.call_later(self.headers_s, self.transport.abort)
        elif not has_begun and self._late is not None:
            self._late.cancel()
            self._late = None

    def pause_writing(self) -> None:
        """Start to watch whether the client reads, because too many bytes wait to be sent."""
        super().pause_writing()
        self._watch_reader()

    def _watch_reader(self, before: float = math.inf) -> None:
        """Abort the connection if the client has read no bytes since the last call; otherwise repeat after stall_s.

        before: the number of bytes that waited to be sent at the last call.
        """
        waiting = self.transport.get_write_buffer_size()
        if waiting < before:
            self._stalled = self.loop.call_later(self.stall_s, self._watch_reader, waiting)
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        """Stop watching whether the client reads, because it has read nearly all bytes."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        super().connection_lost(exc)
        for timer in (self._late, self._stalled):
            if timer is not None:
                timer.cancel()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Run the block without uvicorn's signal handlers."""
        yield


def _draining(num_choices: int) -> str:
    """Return the log message for a server that begins to shut down. num_choices: how many choices still run or wait."""
    if num_choices == 0:
        return "shutting down"
    what = "1 choice is" if num_choices == 1 else f"{num_choices:,} choices are"
    return f"shutting down: {what} still to be made, and new requests get 503; a second Ctrl-C ends at once"


async def _end_on_signals(services: Services, server: uvicorn.Server) -> None:
    """Wait for signals. After the first signal, new requests get status 503, and accepted requests are still answered.

    After the second signal, the server ends at once.
    """
    loop = asyncio.get_running_loop()
    signals = asyncio.Queue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    await signals.get()
    services.gate.is_draining = True
    LOG.info("%s", _draining(services.gate.num_taken))
    again, empty = asyncio.create_task(signals.get()), asyncio.create_task(services.gate.is_empty.wait())
    await asyncio.wait((again, empty), return_when=asyncio.FIRST_COMPLETED)
    if not empty.done():
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it calls each ended answer an exception
        LOG.warning("ended by a second signal; number of choices that were not made: %d", services.gate.num_taken)
        server.force_exit = True
    server.should_exit = True
    await again  # a second signal counts while connections end, too
    server.force_exit = True


# ---------------------------------------------------------------------------------------------------------- logging


@contextmanager
def _logging(options: ServerOptions) -> Iterator[None]:
    """Log to standard error from a separate thread, so that a slow reader of the log delays no request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if options.log_format == "json" else _Text())
    records: Queue[Any] = Queue(MOST_LOG_LINES)
    listener = QueueListener(records, handler)
    root, sending = logging.getLogger(), _Queue(records)
    level = logging.getLevelNamesMapping()[options.log_level.upper()]
    root.addHandler(sending)
    quiet = logging.WARNING if level == logging.INFO else level
    levels = {
        root: level,
        **dict.fromkeys(map(logging.getLogger, ("uvicorn.error", "asyncio")), max(level, logging.WARNING)),
        # A request has one line, the server's. The times of passes are nothing that anybody must act on.
        **dict.fromkeys(map(logging.getLogger, ("forerun.engine.engine", "forerun.pacing")), quiet),
    }
    before = {logger: logger.level for logger in levels}
    for logger, own_level in levels.items():
        logger.setLevel(own_level)
    listener.start()
    try:
        yield
    finally:
        listener.stop()
        root.removeHandler(sending)
        for logger, usual in before.items():
            logger.setLevel(usual)


class _Queue(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        """Add a record to the queue. If the queue is full, drop the record, so that logging never waits."""
        with suppress(Full):
            self.queue.put_nowait(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the record unchanged, because the formatter needs the record's arguments."""
        return record


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as one JSON object in one line."""
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if isinstance(record.args, dict):
            entry |= {"event": "request", **record.args}
        else:
            entry["message"] = record.getMessage()
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as one line for people, with the traceback of an exception below the line."""
        if isinstance(record.args, dict):
            said = " ".join(f"{name}={value}" for name, value in record.args.items())
        else:
            said = record.getMessage()
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.levelname.lower()} {visible(said)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
