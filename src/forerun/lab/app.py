"""The lab as a web application: the page's files, and the JSON that its widgets ask for.

A server mounts the lab under /lab. The lab uses an engine's public methods and StepReports, and nothing of the server.
The page's files reveal nothing about requests, but the paths below /api do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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
    """Answer errors with {"error": {"message": ...}}, and bodies that cannot be understood with status 400."""
    app.add_exception_handler(ForerunError, _refused)
    app.add_exception_handler(HTTPException, _not_there)
    app.add_exception_handler(RequestValidationError, _not_understood)


async def _with_headers(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await answer(request)
    response.headers.update(HEADERS)
    return response


async def _refused(request: Request, error: Exception) -> JSONResponse:
    status = 503 if isinstance(error, CapacityError) else 500
    if isinstance(error, UserError):
        status = 400
    return JSONResponse({"error": {"message": str(error)}}, status)


async def _not_there(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    message = f"there is no {path}" if error.status_code == 404 else f"{path}: {error.detail}"
    return JSONResponse({"error": {"message": message}}, error.status_code)


async def _not_understood(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return JSONResponse({"error": {"message": f"{where or 'the body'}: {first['msg']}"}}, 400)
