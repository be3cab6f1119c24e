"""The APIs of the server, one in each module of this folder. A scan finds each module and its `API` (routes.py)."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from forerun.serve.routes import Api, Count, Errors, Generate, plain_error


def apis() -> Mapping[str, Api]:
    """Return a mapping from the name of each module in this folder to the module's API."""
    return _imported(tuple(__path__))


@cache
def _imported(folders: tuple[str, ...]) -> Mapping[str, Api]:
    names = sorted(one.name for one in pkgutil.iter_modules(folders) if not one.name.startswith("_"))
    return {name: importlib.import_module(f"{__name__}.{name}").API for name in names}


def with_bodies() -> Mapping[str, Generate | Count]:
    """Return a mapping from URL path to route, for all routes that read a request body."""
    return _with_bodies(tuple(__path__))


@cache
def _with_bodies(folders: tuple[str, ...]) -> Mapping[str, Generate | Count]:
    routes = [route for api in _imported(folders).values() for route in api.routes]
    return {
        url: route for route in routes if isinstance(route, Generate | Count) for url in (route.form.url, *route.also)
    }


def generating() -> Mapping[str, Generate]:
    """Return a mapping from URL path to route, for all routes whose answers a model writes."""
    return {url: route for url, route in with_bodies().items() if isinstance(route, Generate)}


def batched() -> Mapping[str, Generate]:
    """Return a mapping from URL path to route, for all routes that `forerun batch` may use."""
    return {url: route for url, route in generating().items() if route.in_batches and url not in route.also}


def api_of(path: str) -> Api | None:
    """Return the API that is responsible for errors at a URL path; None if no API is.

    The responsible API has the longest prefix of `path` in its `Api.below`.
    """
    beginnings = [(below, api) for api in apis().values() for below in api.below if f"{path}/".startswith(f"{below}/")]
    return max(beginnings, key=lambda one: len(one[0]))[1] if beginnings else None


def errors_of(path: str) -> Errors:
    """Return the function that writes the error responses of the API at a URL path.

    The function is for errors that no route handles, for example for an unknown path.
    """
    api = api_of(path)
    return plain_error if api is None else api.error


def refusal(path: str) -> str | None:
    """Return the reason why the server lacks a path that other servers have (`Api.absent`); None for any other path."""
    absent = {known: why for api in apis().values() for known, why in api.absent.items()}
    beginnings = (f"{path[:end]}/" for end in range(len(path)) if path[end] == "/")
    return next((absent[one] for one in (path, *beginnings) if one in absent), None)
