"""Builds the FastAPI application of a server from the Services.

The event loop does only HTTP. An error has the form of the API whose route has raised it. Every answer has the
request's id in the header x-request-id. The header request-id repeats the id for Anthropic's client.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.errors import ForerunError, InternalError, echoing_json
from forerun.serve import openapi
from forerun.serve.answering import IGNORED, RECORD, Answer, ClientGone, ignored_header, key_of, read_body
from forerun.serve.apis import api_of, apis, errors_of, refusal
from forerun.serve.bodies import Refused
from forerun.serve.events import as_json
from forerun.serve.metrics import CONTENT_TYPE, Metrics
from forerun.serve.origins import Origins
from forerun.serve.routes import Count, Errors, Generate, Look
from forerun.serve.service import Services
from forerun.serve.tracing import span
from forerun.version import __version__

LOG = logging.getLogger("forerun.serve.requests")
OPEN_PATHS = ("/", "/health", "/ready", "/metrics", "/openapi.json")  # without an API key: they say nothing of requests
# The largest body of a page's API; larger where the context is longer. Pages read bodies in this process, and parsing
# JSON or tokenizing holds up the step: so the limit is about what fits into the context, and not --max-body-bytes.
MOST_PAGE_BYTES, PAGE_BYTES_PER_TOKEN = 32 << 10, 8
HERE = """forerun is running.
It speaks the APIs of OpenAI and Anthropic below /v1, and Ollama's below /api: /v1/models lists what is served,
/openapi.json every route.
"""
_ABSOLUTE = re.compile(r"https?://[^/]*")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def make_app(
    services: Services,
    *,
    api_key: str | None = None,
    pages: Mapping[str, ASGIApp] | None = None,
    origins: Origins | None = None,
) -> FastAPI:
    """Return the FastAPI application of a server.

    api_key: the key that requests must bring, except requests for OPEN_PATHS and for the files of pages; None = no key.
    pages: path -> a separate application (a page). Requests for a page's paths below /api need the key, too. origins:
    the web pages that may use the server; None = only the server's own pages, under any host name.
    """
    origins = origins or Origins()
    app = FastAPI(title="forerun", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Door, services=services, api_key=api_key, pages=tuple(pages or ()), origins=origins)
    app.add_exception_handler(HTTPException, _http_error)
    schemas = openapi.bodies(services)
    for api in apis().values():
        for route in api.routes:
            _add(app, services, route, api.error, schemas)
    _add_state(app, services, origins)
    for path, page in (pages or {}).items():
        app.mount(path, page)
    return app


def _add(
    app: FastAPI, services: Services, route: Generate | Count | Look, errors: Errors, schemas: dict[str, Any]
) -> None:
    if isinstance(route, Look):
        look = _looking(services, route, errors)
        for url in (route.url, *route.also):
            extra = {"parameters": openapi.parameters_of(url)}
            name = f"{route.method.lower()}_{_name(url)}"
            app.api_route(url, methods=[route.method], name=name, openapi_extra=extra, responses=openapi.ERRORS)(look)
        return
    make = _answering(services, route, errors) if isinstance(route, Generate) else _counting(services, route, errors)
    extra = openapi.as_body(schemas[route.form.url])
    for url in (route.form.url, *route.also):
        app.post(url, openapi_extra=extra, name=_name(url), responses=openapi.answers_of(route))(make)


def _name(url: str) -> str:
    return re.sub(r"\W+", "_", url).strip("_")


def _answering(services: Services, route: Generate, errors: Errors) -> Callable[[], Any]:
    async def answer() -> Response:
        return Answer(services, route, errors)

    return answer


def _looking(services: Services, route: Look, errors: Errors) -> Callable[[Request], Any]:
    async def look(request: Request) -> Response:
        answer = partial(route.answer, services, key_of(request.headers), **request.path_params)
        try:
            content = await services.in_thread(answer) if route.is_slow else answer()
            return Response(as_json(content), media_type="application/json")
        except ForerunError as failure:
            return _refusing(errors, failure, request.scope[RECORD]["request_id"])

    return look


def _counting(services: Services, route: Count, errors: Errors) -> Callable[[Request], Any]:
    async def count(request: Request) -> Response:
        try:
            body = await read_body(request.headers, request.receive, services)
            with services.gate.enter():
                answer, ignored = await services.read(route.form.url, body)
            if route.finish is not None:
                answer = as_json(await services.in_thread(route.finish, services, json.loads(answer)))
            headers = {IGNORED: ignored_header(ignored)} if ignored else {}
            return Response(answer, 200, headers, "application/json")
        except ClientGone:
            return Response(status_code=400)
        except ForerunError as failure:
            return _refusing(errors, failure, request.scope[RECORD]["request_id"])

    return count


def _refusing(
    errors: Errors, failure: ForerunError, request_id: str, headers: Mapping[str, str] = MappingProxyType({})
) -> Response:
    """Return the response that reports the error `failure`, with the headers that HTTP requires for its status.

    errors: makes the status and the body in the form of an API. headers: further headers of the response.
    """
    status, body = errors(failure, request_id)
    more = {"www-authenticate": "Bearer"} if status == 401 else {}
    if (wait_s := getattr(failure, "retry_after_s", None)) is not None:
        more["retry-after"] = str(wait_s)
    return Response(as_json(body), status, {**headers, **more}, "application/json")


def _add_state(app: FastAPI, services: Services, origins: Origins) -> None:
    @app.get("/", response_class=PlainTextResponse)
    async def root() -> Response:
        """Return a short text that shows people and clients that the server is running."""
        return Response(HERE, media_type="text/plain; charset=utf-8")

    @app.get("/health", responses=openapi.ERRORS)
    async def health(request: Request) -> JSONResponse:
        """Return status 200 while all engines work. Return 503 once an engine has failed: restart the server then."""
        if (failure := services.failure) is not None:
            why = {"message": str(failure)} if origins.knows(dict(request.scope["headers"])) else {}
            return JSONResponse({"status": "failed", **why}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/ready", responses=openapi.ERRORS)
    async def ready(request: Request) -> JSONResponse:
        """Return status 200 while the server takes requests, and 503 during shutdown or after an engine has failed."""
        if services.gate.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        return await health(request)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(await services.in_thread(services.metrics.text), media_type=CONTENT_TYPE)


async def _http_error(request: Request, error: Exception) -> Response:
    """Return the response to an HTTPException from Starlette, for example for an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    takes = (error.headers or {}).get("Allow", "another method")
    hint = {404: _no_route(path, request.app), 405: f"{path} takes {takes}: /openapi.json lists the routes"}
    refused = Refused(hint.get(error.status_code, str(error.detail)), status=error.status_code)
    return _refusing(errors_of(path), refused, request.scope[RECORD]["request_id"], error.headers or {})


def _no_route(path: str, app: FastAPI) -> str:
    known = {route.path for route in app.routes if isinstance(route, Route)}
    if (why := refusal(path)) is not None:
        return f"there is no {path}: {why}"
    if f"/v1{path}" in known:
        return f"there is no {path}, but /v1{path}: end the address that the client is given with /v1"
    if path.startswith("/v1/v1/"):
        return f"there is no {path}: the client adds /v1 itself, so leave it out of the address that it is given"
    return f"there is no {path}: /openapi.json lists the routes"


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a Receive that first gives `body`, which was already read, and then the messages of `receive`."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Message:
        return first.pop() if first else await receive()

    return receiving


class Door:
    """The middleware in front of all routes. Gives each request an id, checks the API key, and logs ended requests."""

    def __init__(
        self, app: ASGIApp, services: Services, api_key: str | None, pages: tuple[str, ...], origins: Origins
    ) -> None:
        self._app, self._services, self._pages, self._origins = app, services, pages, origins
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, pass it on to the application, and log the result."""
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
                added = [(b"x-request-id", request_id.encode()), (b"request-id", request_id.encode())]
                added += self._origins.answer_headers(headers)
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        with span(scope["path"], record, headers), echoing_json():
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
                await _refusing(errors_of(scope["path"]), error, request_id)(scope, receive, sending)
            except Exception as error:
                LOG.exception("request %s failed", request_id)
                record["error"] = repr(error)[:200]
                if not has_begun:
                    failed = InternalError(f"the request {request_id} failed; the log says why")
                    await _refusing(errors_of(scope["path"]), failed, request_id)(scope, receive, sending)
            finally:
                route = getattr(scope.get("route"), "path", "other")
                self._metrics_of(record).answered(route, status)
                record |= {"method": method, "path": scope["path"], "status": status}
                record["seconds"] = round(time.monotonic() - started_s, 4)
                LOG.log(logging.DEBUG if route in OPEN_PATHS else logging.INFO, "%s", dict(record))

    def _usual(self, scope: Scope) -> Scope:
        """Return a request's scope with method and path in the form that the routes expect.

        HEAD becomes GET. An absolute URL becomes its path. A slash at the end of the path is dropped, except in pages.
        """
        path, method = scope["path"], scope["method"]
        if (absolute := _ABSOLUTE.match(path)) is not None:  # as proxies and some clients write it
            path = path[absolute.end() :] or "/"
        if not any(path.startswith(f"{page}/") for page in self._pages):
            path = path.rstrip("/") or "/"
        return {**scope, "path": path, "method": "GET" if method == "HEAD" else method}

    def _metrics_of(self, record: Mapping[str, Any]) -> Metrics:
        """Return the metrics of the model that has answered the request. record: the request's log entry.

        If no model has answered, return the first model's metrics.
        """
        name = record.get("model")
        return self._services.metrics if name is None else self._services.of(name).metrics

    def _request_id(self, headers: dict[bytes, bytes]) -> str:
        """Return the request id in the client's headers if it is safe to log; otherwise a new random id."""
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        return given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> dict[str, str] | None:
        """Raise Refused for a request that is not permitted. This check comes before the body is read.

        Returns the headers of the answer to a browser's preflight request; None for any other request. A preflight
        request needs no API key.
        """
        most = self._services.limits.max_header_bytes
        if sum(len(name) + len(value) for name, value in scope["headers"]) > most:
            raise Refused(f"the headers have more than {most:,} bytes: send fewer", status=431)
        allowed = self._origins.preflight(scope["method"], headers)
        if allowed is None and not self._is_known(scope["path"], headers):
            message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise Refused(message, code="invalid_api_key", status=401)
        api = api_of(scope["path"])
        self._origins.check(scope["method"], scope["path"], headers, is_lax=api is not None and api.is_lax)
        if self._asks_page(scope["path"]):
            self._check_page(scope, headers)
        return None if allowed is None else {name.decode(): value.decode("latin-1") for name, value in allowed}

    def _asks_page(self, path: str) -> bool:
        return any(path.startswith(f"{page}/api/") for page in self._pages)

    def _check_page(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raise Refused for a request to a page if its body is too large or has no content-length.

        Pages do not check the size of bodies themselves.
        """
        length = headers.get(b"content-length", b"")
        limits = self._services.limits
        by_context = max(MOST_PAGE_BYTES, PAGE_BYTES_PER_TOKEN * self._services.first.llm.engine.max_seq_len)
        most = min(by_context, limits.max_body_bytes)
        if scope["method"] == "POST" and not length.isdigit():
            raise Refused("the length of the body is missing: send content-length", status=411)
        if length and int(length) > most:
            option = "--max-body-bytes" if most < by_context else "--max-seq-len"
            message = f"the page takes {most:,} bytes at once, and this has {int(length):,}: shorten it, send a prompt "
            raise Refused(f"{message}to /v1/completions, or raise {option}", code="body_too_large", status=413)

    def _is_known(self, path: str, headers: dict[bytes, bytes]) -> bool:
        """Return whether a request brings the API key or needs no key.

        The duration of the check reveals nothing about the key.
        """
        if self._api_key is None or path in OPEN_PATHS or self._is_page(path):
            return True
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        bearer = token.strip() if kind.lower() == b"bearer" else b""
        given = [bearer, headers.get(b"x-api-key", b"")]
        return sum(hmac.compare_digest(one, self._api_key) for one in given) > 0

    def _is_page(self, path: str) -> bool:
        """Return whether a path leads to the files of a page, and not to its API."""
        page = next((page for page in self._pages if path == page or path.startswith(f"{page}/")), None)
        return page is not None and not path.startswith(f"{page}/api/")
