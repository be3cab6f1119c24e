"""What an API is to the server: its routes, how its errors look, and what it does not do. Each is one file of apis/.

A route is one of three kinds. `Generate` answers with what a model writes, `Count` with what follows from texts alone,
`Look` with what the server knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from forerun.errors import ForerunError
from forerun.serve.bodies import Form, Given, Job, check, status_of
from forerun.serve.events import KEEP_ALIVE

if TYPE_CHECKING:
    from forerun.engine.request import Chunk, RequestOutput
    from forerun.serve.kept import Kept
    from forerun.serve.served import Served
    from forerun.text.chat import ChatTemplate
    from forerun.text.tokenizer import Tokenizer

EVENTS = "text/event-stream; charset=utf-8"
Counted: TypeAlias = tuple[dict[str, Any], tuple[str, ...]]  # an answer, and the fields that were ignored
# The status and the body of an error's answer. The second argument is the request's id.
Errors: TypeAlias = Callable[[ForerunError, str], tuple[int, dict[str, Any]]]


class Events(Protocol):
    """The events of a streamed answer, as bytes."""

    def begin(self) -> bytes:
        """Return what comes before the first token."""

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """Return what a chunk adds to a choice; nothing where its text is held back."""

    def end(self, outputs: Seq[RequestOutput]) -> bytes:
        """Return what follows the last token."""

    def fail(self, error: ForerunError) -> bytes:
        """Return an event that ends the stream with an error."""


class Reader(Protocol):
    """Reads texts for a model; see `texts.Texts`."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def template(self) -> ChatTemplate: ...
    def templated(self, job: Job) -> Job: ...
    def encode(self, job: Job) -> list[list[int]]: ...
    def rendered(self, job: Job) -> str: ...
    def check_text(self, text: str) -> None: ...
    def literal_ids(self, text: str, add_special: bool) -> list[int]: ...


class Models(Protocol):
    """What a server knows of its models; see `service.Services`."""

    @property
    def all(self) -> Seq[Served]: ...
    @property
    def first(self) -> Served: ...
    @property
    def names(self) -> Seq[str]: ...
    @property
    def started_s(self) -> int: ...
    @property
    def kept(self) -> Kept: ...
    def of(self, name: str) -> Served: ...


@dataclass(frozen=True)
class Generate:
    """A route whose answers a model writes.

    read: makes a Job of (the fields of a body, the model's name in the answer, defaults of SamplingParams). answer:
    makes the whole answer of (job, outputs, tokenizer, its id in hex digits, the second of its creation). stream: makes
    the Events of (job, prompts, tokenizer, id, second). media_type: of a stream. sign_of_life: sent in a stream that
    has nothing to say. is_kept: answers are kept, and others may go on from them. in_batches: `forerun batch` asks it.
    reads_chats: every body has a conversation, which wants a chat template. also: its other paths.
    """

    form: Form
    read: Callable[[Given, str, Mapping[str, Any]], Job]
    answer: Callable[[Job, Seq[RequestOutput], Tokenizer, str, int], dict[str, Any]]
    stream: Callable[[Job, Seq[Seq[int]], Tokenizer, str, int], Events]
    media_type: str = EVENTS
    sign_of_life: bytes = KEEP_ALIVE
    is_kept: bool = False
    in_batches: bool = False
    reads_chats: bool = False
    also: tuple[str, ...] = ()

    def job(
        self,
        body: object,
        model: str,
        defaults: Mapping[str, Any] | None = None,
        served_names: Seq[str] = (),
        *,
        ignore_unsupported: bool = False,
    ) -> Job:
        """Return what a body asks for.

        model: as the answer names it. served_names: what bodies may call it; none = whatever they like. defaults:
        fields of SamplingParams that override the API's defaults and are overridden by the body. Raises Refused, naming
        the field.
        """
        given = check(self.form, body, served_names, ignore_unsupported=ignore_unsupported)
        return self.read(given, model, defaults or {})


@dataclass(frozen=True)
class Count:
    """A route whose answers follow from texts: ids of a text, a text of ids, their number.

    work: makes the answer of (the model's texts, the fields of a body). finish: adds what the server alone knows.
    alternatives: a body must have one of these fields.
    """

    form: Form
    work: Callable[[Reader, Given], Counted]
    finish: Callable[[Models, dict[str, Any]], dict[str, Any]] | None = None
    alternatives: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Look:
    """A route whose answers say what the server knows; its path may have parts in braces.

    answer: makes it of (the models, the owner of the request, the parts of the path by name). Raises Refused. is_slow:
    it reads files, or long answers that were kept, and so runs in a thread. also: its other paths.
    """

    url: str
    answer: Callable[..., Any]
    method: str = "GET"
    is_slow: bool = False
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Api:
    """One API. error: how its errors look.

    below: path prefixes where this API shapes the errors that no route raised. is_lax: its clients need not say that a
    body is JSON. absent: {path: reason} for what other servers of this API have and this one lacks; a path that ends in
    a slash stands for all below it.
    """

    routes: tuple[Generate | Count | Look, ...]
    error: Errors
    below: tuple[str, ...] = ()
    is_lax: bool = False
    absent: Mapping[str, str] = field(default_factory=dict)


def plain_error(error: ForerunError, request_id: str = "") -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error in the form of OpenAI's API, which most clients read."""
    status, code, param = status_of(error)
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return status, {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
