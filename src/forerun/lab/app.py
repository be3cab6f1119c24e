"""The lab as a web application: the page's files, and the JSON that the page's widgets request.

A server mounts the lab under /lab. The lab uses an engine's public methods and StepReports, and no code of the server.
The page's files reveal nothing about requests, but the paths below /api do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from forerun.engine.llm import LLM
from forerun.errors import CapacityError, ForerunError, UserError
from forerun.lab import live, machine, theory_api, unbiased

STATIC = Path(__file__).parent / "static"
# The page loads nothing from elsewhere, and no other page may show it in a frame.
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def make_lab(llm: LLM) -> FastAPI:
    """Return the application of the lab around one engine."""
    app = FastAPI(title="forerun lab", openapi_url=None, docs_url=None, redoc_url=None)
    add_error_answers(app)
    app.middleware("http")(_with_headers)
    for part in (theory_api, unbiased, machine, live):
        app.include_router(part.make_router(llm), prefix="/api")
    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


def add_error_answers(app: FastAPI) -> None:
    """Make an application answer errors with the JSON of `_answer`. An invalid request body gets status 400."""
    app.add_exception_handler(ForerunError, _refused)
    app.add_exception_handler(HTTPException, _not_there)
    app.add_exception_handler(RequestValidationError, _not_understood)


async def _with_headers(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await answer(request)
    response.headers.update(HEADERS)
    return response


def _answer(
    message: str, status: int, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return the response to a failed request, in the error format of OpenAI's API, which the server uses, too."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": None}}, status, headers)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    status = 503 if isinstance(error, CapacityError) else 500
    return _answer(str(error), 400 if isinstance(error, UserError) else status)


async def _not_there(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    takes = (error.headers or {}).get("Allow", "another method")
    message = {404: f"there is no {path}", 405: f"{path} takes {takes}"}.get(error.status_code, str(error.detail))
    return _answer(message, error.status_code, headers=error.headers)


async def _not_understood(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return _answer(f"{where or 'the body'}: {first['msg']}", 400, where or None)
