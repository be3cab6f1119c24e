"""Defines the parts of an API: its routes, the form of its errors, and the paths that the server lacks.

Each API is one file of apis/. There are three kinds of route. A `Generate` answers with text that a model writes. A
`Count` computes its answers from texts, such as the number of tokens in a text. A `Look` answers with facts about the
server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from forerun.errors import ForerunError
from forerun.serve.bodies import Form, Given, Job, Refused, check, of_grammar, status_of
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
    """Makes the events of one streamed answer, as bytes."""

    def begin(self) -> bytes:
        """Return the events before the first token."""

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """Return the events for a chunk of the choice `index`; no bytes if the chunk adds nothing to the choice."""

    def end(self, outputs: Seq[RequestOutput]) -> bytes:
        """Return the events after the last token."""

    def fail(self, error: ForerunError) -> bytes:
        """Return an event that reports an error and ends the stream."""


class Reader(Protocol):
    """Reads the texts of request bodies for one model; see `texts.Texts`."""

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
    """The models of a server, as routes use them; see `service.Services`."""

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

    read: makes a Job from the fields of a body, the model's name in the answer, and default values for fields of
    SamplingParams. answer: makes the whole answer from the job, the outputs, the tokenizer, the answer's id in hex
    digits, and the time of its creation in seconds. stream: makes the Events from the job, the prompts, the tokenizer,
    the answer's id, and the time of its creation. media_type: the media type of a streamed answer. sign_of_life: the
    bytes that a stream sends while there is nothing else to send. is_kept: whether answers are kept, so that later
    requests may continue them. in_batches: whether `forerun batch` may use the route. reads_chats: whether every body
    has a conversation, which needs a chat template. also: other paths of the route.
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
        """Return the Job of a body. Raises Refused, naming the field at fault.

        model: the model's name in the answer. served_names: the names that bodies may give the model; () = any name.
        defaults: values for fields of SamplingParams. They take precedence over the API's defaults, and the body's
        values over both.
        """
        given = check(self.form, body, served_names, ignore_unsupported=ignore_unsupported)
        field = self.form.grammar_field(given.fields)
        try:
            return replace(self.read(given, model, defaults or {}), grammar_field=field)
        except Refused as error:
            raise of_grammar(error, field) from None


@dataclass(frozen=True)
class Count:
    """A route that computes its answers from texts. Such an answer is, for example, the token ids of a text.

    work: makes the answer from the model's Reader and the fields of a body. finish: completes the answer with facts
    that only the server's models give; None = the answer is complete. alternatives: names of fields; a body must have
    one of them. also: other paths of the route.
    """

    form: Form
    work: Callable[[Reader, Given], Counted]
    finish: Callable[[Models, dict[str, Any]], dict[str, Any]] | None = None
    alternatives: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Look:
    """A route whose answers are facts about the server. Its path may have parameters in braces.

    answer: makes the answer from the models, the digest of the request's API key, and the parameters of the path by
    name; may raise Refused. is_slow: whether `answer` runs in a thread, because it reads files or long kept answers.
    also: other paths of the route.
    """

    url: str
    answer: Callable[..., Any]
    method: str = "GET"
    is_slow: bool = False
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Api:
    """One API of the server: its routes and the form of its errors.

    error: makes the answer to a request that has failed. below: path prefixes. An error at a path with such a prefix
    gets this API's form, unless a route handles the error. is_lax: whether clients may send a body without declaring
    that the body is JSON. absent: path -> reason, for paths that other servers of this API have and this server lacks.
    A path that ends in a slash stands for all paths below it.
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
