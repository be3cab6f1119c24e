"""The routes of a server: a FastAPI application around its Services.

The event loop does HTTP alone. Errors have the form of the API whose route they are met on. Every answer has the
request's id in the header x-request-id, and in request-id, where the client of Anthropic looks for it.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.errors import ForerunError, InternalError, UserError, shown
from forerun.serve import llama_server, messages, ollama, openai, openapi, responses
from forerun.serve.absent import refusal
from forerun.serve.answering import RECORD, Answer, Api, ClientGone, ignored_header, key_of, read_body
from forerun.serve.bodies import Refused, meant, named, told
from forerun.serve.events import as_json
from forerun.serve.metrics import CONTENT_TYPE, Metrics
from forerun.serve.origins import Origins
from forerun.serve.service import Service, Services
from forerun.serve.texts import COUNTERS, TOKENIZER_INFO
from forerun.serve.tracing import span
from forerun.text.small_files import SmallFiles
from forerun.text.template_files import special_tokens
from forerun.version import __version__

LOG = logging.getLogger("forerun.serve.requests")
OPEN_PATHS = ("/", "/health", "/ready", "/metrics", "/openapi.json")  # without an API key: they say nothing of requests
# Of a body that a page's API gets, at most; more where the context is longer. Pages read theirs in this process, and
# what parses JSON or cuts words into tokens holds up the step: so it is about what fits, and not --max-body-bytes.
MOST_PAGE_BYTES, PAGE_BYTES_PER_TOKEN = 32 << 10, 8
HERE = """forerun is running.
It speaks the APIs of OpenAI and Anthropic below /v1, and Ollama's below /api: /v1/models lists what is served,
/openapi.json every route.
"""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def _plain_error(error: ForerunError, _: str) -> tuple[int, dict[str, Any]]:
    return openai.error_answer(error)


APIS = {
    **{
        url: Api(
            openai.FORMS[url],
            lambda job, *given, **named: openai.answer_body(job, *given, **named, with_report=job.report),
            openai.Stream,
            _plain_error,
        )
        for url in openai.URLS
    },
    responses.RESPONSES: Api(responses.FORM, responses.answer_body, responses.Stream, _plain_error),
    messages.MESSAGES: Api(messages.FORM, messages.answer_body, messages.Stream, messages.error_answer),
    llama_server.COMPLETION: Api(
        llama_server.FORM, llama_server.answer_body, llama_server.Stream, llama_server.error_answer
    ),
    **{
        url: Api(ollama.FORMS[url], ollama.answer_body, ollama.Stream, ollama.error_answer, ollama.LINES, b"")
        for url in (ollama.CHAT, ollama.GENERATE)
    },
}


def make_app(
    services: Services,
    *,
    api_key: str | None = None,
    pages: Mapping[str, ASGIApp] | None = None,
    origins: Origins | None = None,
) -> FastAPI:
    """The application. api_key: what requests must bring, but for OPEN_PATHS and pages; None = nothing.

    pages: path -> an application of its own; what lies below /api in it needs the key, too. origins: of the web pages
    that may use it; None = its own alone, by whatever name it is called.
    """
    origins = origins or Origins()
    app = FastAPI(title="forerun", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Door, services=services, api_key=api_key, pages=tuple(pages or ()), origins=origins)
    app.add_exception_handler(HTTPException, _http_error)
    bodies = {url: openapi.as_body(schema) for url, schema in openapi.bodies(services).items()}
    for url, api in APIS.items():
        app.post(url, openapi_extra=bodies[url], responses=openapi.ERRORS)(_answering(services, api))
    _add_kept(app, services)
    _add_counting(app, services, bodies)
    _add_models(app, services)
    _add_ollama(app, services)
    _add_llama_server(app, services)
    _add_tokenizer(app, services)
    _add_state(app, services, origins)
    for path, page in (pages or {}).items():
        app.mount(path, page)
    return app


def _answering(services: Services, api: Api) -> Callable[[], Any]:
    async def answer() -> Response:
        return Answer(services, api)

    answer.__name__ = api.form.url.strip("/").replace("/", "_")
    return answer


def _add_kept(app: FastAPI, services: Services) -> None:
    """Routes of responses that were given before."""

    def answered(what: Callable[[str, str], dict[str, Any]], request: Request, response_id: str) -> JSONResponse:
        try:
            return JSONResponse(what(key_of(request.headers), response_id))
        except Refused as error:
            status, body = openai.error_answer(error)
            return JSONResponse(body, status)

    def deleted(key: str, response_id: str) -> dict[str, Any]:
        services.kept.delete(key, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.get(f"{responses.RESPONSES}/{{response_id}}", responses=openapi.ERRORS)
    async def response(request: Request, response_id: str) -> JSONResponse:
        return answered(services.kept.get, request, response_id)

    @app.delete(f"{responses.RESPONSES}/{{response_id}}", responses=openapi.ERRORS)
    async def forget(request: Request, response_id: str) -> JSONResponse:
        return answered(deleted, request, response_id)


def _add_counting(app: FastAPI, services: Services, bodies: dict[str, Any]) -> None:
    """Routes that need no engine: texts to ids, ids to texts."""
    for url in COUNTERS:
        app.post(url, openapi_extra=bodies[url], responses=openapi.ERRORS)(_counting(services, url))


def _counting(services: Services, url: str) -> Callable[[Request], Any]:
    async def count(request: Request) -> Response:
        headers: dict[str, str] = {}
        try:
            body = await read_body(request.headers, request.receive, services)
            with services.gate.enter():
                made, ignored = await services.read(url, body)
            if url == ollama.SHOW:
                made = as_json(ollama.show(services.of(json.loads(made)["model"]), services.started_s))
            if ignored:
                headers["x-forerun-ignored"] = ignored_header(ignored)
            return Response(made, 200, headers, "application/json")
        except ClientGone:
            return Response(status_code=400)
        except ForerunError as error:
            status, answer = _error_answer(url, error, request.scope[RECORD]["request_id"])
            if getattr(error, "retry_after_s", None) is not None:
                headers["retry-after"] = str(error.retry_after_s)  # type: ignore[attr-defined]
            return Response(as_json(answer), status, headers, "application/json")

    count.__name__ = url.strip("/").replace("/", "_")
    return count


def _add_models(app: FastAPI, services: Services) -> None:
    def described(name: str) -> dict[str, Any]:
        """In the form of OpenAI, and with what the client of Anthropic looks for."""
        service = services.of(name)
        return {
            "id": name,
            "object": "model",
            "created": services.started_s,
            "owned_by": "forerun",
            "root": service.name,
            "parent": None,
            "max_model_len": service.llm.engine.max_seq_len,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(services.started_s, UTC).isoformat(),
        }

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        names = told(services.names)
        data = [described(name) for name in names]
        more = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": data, **more})

    @app.get("/v1/models/{name:path}", responses=openapi.ERRORS)
    async def model(name: str) -> JSONResponse:
        if (own := meant(name, services.names)) in services.names:
            return JSONResponse(described(own))
        message = f"model={shown(name)} is not here: it must be {named(services.names)}"
        status, body = openai.error_answer(Refused(message, "model", code="model_not_found", status=404))
        return JSONResponse(body, status)


def _add_ollama(app: FastAPI, services: Services) -> None:
    """What Ollama's clients ask before they send anything."""

    @app.get(ollama.TAGS)
    async def tags() -> JSONResponse:
        return JSONResponse(ollama.tags(services.all, services.started_s))

    @app.get(ollama.RUNNING)
    async def running() -> JSONResponse:
        return JSONResponse(ollama.running(services.all))

    @app.get(ollama.VERSION)
    async def version() -> JSONResponse:
        return JSONResponse(ollama.version(__version__))


def _add_llama_server(app: FastAPI, services: Services) -> None:
    """What its web page and health checks ask; of the first model."""
    template = _template_of(services.first)

    @app.get(llama_server.PROPS)
    async def props() -> JSONResponse:
        return JSONResponse(llama_server.props(services.first, template))

    @app.get(llama_server.SLOTS)
    async def slots() -> JSONResponse:
        return JSONResponse(llama_server.slots(services.first))


def _template_of(service: Service) -> str:
    """The text of a model's chat templates; '' where it has none, or none that can be read: who chats is told."""
    try:
        return service.llm.chat_template.text
    except UserError:
        return ""


def _add_tokenizer(app: FastAPI, services: Services) -> None:
    """What clients need that cut texts into tokens by /tokenize, as vLLM names it; of the first model."""
    llm = services.first.llm
    ends = [llm.tokenizer.id_to_token[end] for end in sorted(llm.engine.end_ids) if end in llm.tokenizer.id_to_token]
    named = {"bos_token": None, "eos_token": ends[0] if ends else None, "pad_token": None}
    named |= special_tokens(SmallFiles(llm.checkpoint.folder))
    info = {**named, "model_max_length": llm.engine.max_seq_len, "chat_template": _template_of(services.first) or None}

    @app.get(TOKENIZER_INFO)
    async def tokenizer_info() -> JSONResponse:
        return JSONResponse(info)


def _add_state(app: FastAPI, services: Services, origins: Origins) -> None:
    @app.get("/")
    async def root() -> Response:
        """What a browser shows, and what clients look at to see whether a server is here."""
        return Response(HERE, media_type="text/plain; charset=utf-8")

    @app.get("/health", responses=openapi.ERRORS)
    async def health(request: Request) -> JSONResponse:
        """Whether the engine is sound; what is not should be restarted."""
        if (failure := services.failure) is not None:
            why = {"message": str(failure)} if origins.knows(dict(request.scope["headers"])) else {}
            return JSONResponse({"status": "failed", **why}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/ready", responses=openapi.ERRORS)
    async def ready(request: Request) -> JSONResponse:
        """Whether requests should be sent here: not while the server shuts down, nor when its engine has failed."""
        if services.gate.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        return await health(request)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await services.in_thread(services.metrics.text), media_type=CONTENT_TYPE)


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette raises: no such route, no such method."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    hint = {404: _no_route(path, request.app), 405: f"{path} wants another method: /openapi.json lists the routes"}
    refused = Refused(hint.get(error.status_code, str(error.detail)), status=error.status_code)
    status, body = _error_answer(request.url.path, refused, request.scope[RECORD]["request_id"])
    return JSONResponse(body, status, dict(error.headers or {}))


def _no_route(path: str, app: FastAPI) -> str:
    known = {route.path for route in app.routes if isinstance(route, Route)}
    if (why := refusal(path)) is not None:
        return f"there is no {path}: {why}"
    if f"/v1{path}" in known:
        return f"there is no {path}, but /v1{path}: end the address that the client is given with /v1"
    if path.startswith("/v1/v1/"):
        return f"there is no {path}: the client adds /v1 itself, so leave it out of the address that it is given"
    return f"there is no {path}: /openapi.json lists the routes"


def _error_answer(path: str, error: ForerunError, request_id: str) -> tuple[int, dict[str, Any]]:
    """The status of an error that no route has met itself, and its body in the form of the API that has the path."""
    if path.startswith(ollama.BEGINNING):
        return ollama.error_answer(error)
    is_messages = path == messages.MESSAGES or path.startswith(f"{messages.MESSAGES}/")
    return (messages.error_answer if is_messages else _plain_error)(error, request_id)


def _again(body: bytes, receive: Receive) -> Receive:
    """What gives an application a body that was read already, and then what comes behind it."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Message:
        return first.pop() if first else await receive()

    return receiving


class Door:
    """Before every route: the request's id, the API key, and what the log says of the request when it is over."""

    def __init__(
        self, app: ASGIApp, services: Services, api_key: str | None, pages: tuple[str, ...], origins: Origins
    ) -> None:
        self._app, self._services, self._pages, self._origins = app, services, pages, origins
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Any request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, scope = scope["method"], self._usual(scope)
        headers = dict(scope["headers"])
        request_id = self._request_id(headers)
        record: dict[str, Any] = {"request_id": request_id}
        scope[RECORD] = record
        started_s, status, has_begun = time.monotonic(), 0, False

        async def sending(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
                own = [(b"x-request-id", request_id.encode()), (b"request-id", request_id.encode())]
                own += self._origins.answer_headers(headers)
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        with span(scope["path"], record, headers):
            try:
                if (allowed := self._check(scope, headers)) is not None:
                    await Response(status_code=204, headers=allowed)(scope, receive, sending)
                elif not self._asks_page(scope["path"]):
                    await self._app(scope, receive, sending)
                else:
                    body = await read_body(Headers(scope=scope), receive, self._services)
                    with self._services.gate.enter():
                        await self._app(scope, _again(body, receive), sending)
            except ClientGone:
                record["reason"] = "disconnect"
            except Refused as error:
                code, answer = _error_answer(scope["path"], error, request_id)
                more = {"www-authenticate": "Bearer"} if code == 401 else {}
                if error.retry_after_s is not None:
                    more["retry-after"] = str(error.retry_after_s)
                await JSONResponse(answer, code, more)(scope, receive, sending)
            except Exception as error:
                LOG.exception("request %s failed", request_id)
                record["error"] = repr(error)[:200]
                if not has_begun:
                    failed = InternalError(f"the request {request_id} failed; the log says why")
                    code, answer = _error_answer(scope["path"], failed, request_id)
                    await JSONResponse(answer, code)(scope, receive, sending)
            finally:
                route = getattr(scope.get("route"), "path", "other")
                self._metrics_of(record).answered(route, status)
                record |= {"method": method, "path": scope["path"], "status": status}
                record["seconds"] = round(time.monotonic() - started_s, 4)
                LOG.log(logging.DEBUG if route in OPEN_PATHS else logging.INFO, "%s", dict(record))

    def _usual(self, scope: Scope) -> Scope:
        """A request as routes know it: HEAD is a GET whose body is not sent, and a slash at the end says nothing."""
        path, method = scope["path"], scope["method"]
        if not any(path.startswith(f"{page}/") for page in self._pages):
            path = path.rstrip("/") or "/"
        return {**scope, "path": path, "method": "GET" if method == "HEAD" else method}

    def _metrics_of(self, record: Mapping[str, Any]) -> Metrics:
        """Of the model that answered; what none has answered counts under the first."""
        name = record.get("model")
        return self._services.metrics if name is None else self._services.of(name).metrics

    def _request_id(self, headers: dict[bytes, bytes]) -> str:
        """The client's own, if it is one that a log can hold, else a new one."""
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        return given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> dict[str, str] | None:
        """Raise Refused for a request that does not come in. Nothing of its body is read before.

        Returns the headers of the answer to a browser that asks whether a page may send a request, which it does
        without the key; None for any other request.
        """
        most = self._services.limits.max_header_bytes
        if sum(len(name) + len(value) for name, value in scope["headers"]) > most:
            raise Refused(f"the headers have more than {most:,} bytes: send fewer", status=431)
        allowed = self._origins.preflight(scope["method"], headers)
        if allowed is None and not self._is_known(scope["path"], headers):
            message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise Refused(message, code="invalid_api_key", status=401)
        self._origins.check(scope["method"], scope["path"], headers)
        if self._asks_page(scope["path"]):
            self._check_page(scope, headers)
        return None if allowed is None else {name.decode(): value.decode("latin-1") for name, value in allowed}

    def _asks_page(self, path: str) -> bool:
        return any(path.startswith(f"{page}/api/") for page in self._pages)

    def _check_page(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Routes of the server read bodies and take places themselves; pages know neither limits nor gate."""
        length, limits = headers.get(b"content-length", b""), self._services.limits
        by_context = max(MOST_PAGE_BYTES, PAGE_BYTES_PER_TOKEN * self._services.first.llm.engine.max_seq_len)
        most = min(by_context, limits.max_body_bytes)
        if scope["method"] == "POST" and not length.isdigit():
            raise Refused("the length of the body is missing: send content-length", status=411)
        if length and int(length) > most:
            option = "--max-body-bytes" if most < by_context else "--max-seq-len"
            message = f"the page takes {most:,} bytes at once, and this has {int(length):,}: shorten it, send a prompt "
            raise Refused(f"{message}to /v1/completions, or raise {option}", code="body_too_large", status=413)

    def _is_known(self, path: str, headers: dict[bytes, bytes]) -> bool:
        """Whether the request brings the key, compared in a time that says nothing of it."""
        if self._api_key is None or path in OPEN_PATHS or self._is_page(path):
            return True
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        bearer = token.strip() if kind.lower() == b"bearer" else b""
        given = [bearer, headers.get(b"x-api-key", b"")]
        return sum(hmac.compare_digest(one, self._api_key) for one in given) > 0

    def _is_page(self, path: str) -> bool:
        """Whether a path is a file of a page, or leads to one."""
        page = next((page for page in self._pages if path == page or path.startswith(f"{page}/")), None)
        return page is not None and not path.startswith(f"{page}/api/")
