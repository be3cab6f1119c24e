"""The options of a server, besides the options of its engines. A field with a help text is a flag of `forerun serve`.

The checks, help() and the arguments of a replica in Ray follow from the fields, too. This module imports no web
framework.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import BadOption
from forerun.registry import check_range, flag_of, inherited, option, with_fields

METRICS_PREFIXES = ("forerun", "vllm")
MAX_PORT = 65535


class _Checked:
    """A base class of frozen dataclasses. Raises BadOption for a value outside of its field's range or choices."""

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):  # type: ignore[arg-type]  # each subclass is a dataclass
            value = getattr(self, one.name)
            check_range(value, one.metadata, f"{flag_of(one)}={value}")
            known = one.metadata.get("choices", (value,))
            if value not in known:
                raise BadOption(f"{flag_of(one)}={value!r} is not possible: it must be {_or(*known)}")


@with_fields
@dataclass(frozen=True)
class Limits(_Checked):
    """The limits of a server: the queue, the sizes of bodies and headers, and the longest waits."""

    # These wait in addition to the batch that runs.
    max_queue: int = option(256, "choices that wait at most; more get status 429", above=-1, range="at least 0")
    max_body_bytes: int = option(4 << 20, "of a request; larger ones get status 413", above=0, unit="bytes")
    # From the first byte of the body to the last of the answer's tokens.
    request_timeout_s: float = option(600.0, "for an answer; then status 504", above=0, unit="s")
    body_timeout_s: float = option(30.0, "for headers, and for a body; then status 408", above=0, unit="s")
    stall_timeout_s: float = option(60.0, "that a client may take nothing of its answer", above=0, unit="s")
    max_header_bytes: int = 64 << 10
    keep_alive_s: float = 15.0  # between two signs of life in a stream that has nothing to say


@with_fields
@dataclass(frozen=True)
class ServerOptions(_Checked):
    """The options of a server, besides its engine's options. Raises BadOption for a value that is not possible."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 = all of this machine")
    port: int = option(8000, "0 = one that is free", min=0, max=MAX_PORT)
    api_key: str | None = option(None, "what requests must bring", envvar="FORERUN_API_KEY", usual="nothing")
    allow_origins: tuple[str, ...] = option(
        (),
        "web page that may use this server, as SCHEME://HOST[:PORT], or * for any",
        flag="--allow-origin",
        usual="its own pages alone",
    )
    allow_hosts: tuple[str, ...] = option(
        (),
        "name by which this server may be called without a key, or * for any",
        flag="--allow-host",
        usual="addresses and the names of this machine",
    )
    served_names: tuple[str, ...] = option(
        (),
        "name that requests may give as their model, and answers have; the first is the answers'",
        flag="--served-model-name",
        usual="the target's",
    )
    ignore_unsupported: bool = option(
        False,
        "serve requests with fields that are not built (tools, reasoning, ...) without them; the header "
        "x-forerun-ignored of the answer lists them",
        usual="such requests are refused",
    )
    metrics_prefix: str = option("forerun", "of the names in /metrics: forerun or vllm", choices=METRICS_PREFIXES)
    log_format: str = option("text", "text or json, one line for each request", choices=("text", "json"))
    log_level: str = option("info", "debug, info, warning or error")
    log_texts: bool = option(False, "log what requests and answers say")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Most likely a variable of a shell that is not set: a server without a key would be open to everybody.
        for flag, names in (("--api-key", (self.api_key,)), ("--served-model-name", self.served_names)):
            if "" in names:
                raise BadOption(f"{flag}='' is not possible: it must not be empty; leave it out if you want none")
        if self.log_level.upper() not in logging.getLevelNamesMapping():
            raise BadOption(
                f"--log-level={self.log_level!r} is not possible: it must be {_or('debug', 'info', 'warning', 'error')}"
            )


@with_fields
@dataclass(frozen=True)
class LabOptions(ServerOptions):
    """The options of `forerun lab`, besides its engine's options. The command starts a server for the lab's page."""

    port: int = inherited(ServerOptions, "port", 8001)
    api_key: str | None = option(None, "what the page asks for", envvar="FORERUN_API_KEY", usual="nothing")


def _or(*names: Any) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"
