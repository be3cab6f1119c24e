"""The APIs of the server, a file each: the server finds files with an `API` (see routes.py), and knows none by name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from forerun.serve.routes import Api, Count, Generate


def apis() -> dict[str, Api]:
    """Return every API by the name of its file."""
    names = sorted(one.name for one in pkgutil.iter_modules(__path__) if not one.name.startswith("_"))
    return _imported(tuple(names))


@cache
def _imported(names: tuple[str, ...]) -> dict[str, Api]:
    return {name: importlib.import_module(f"{__name__}.{name}").API for name in names}


def routes() -> dict[str, Generate | Count]:
    """Return the routes that read bodies, by their paths."""
    return {
        url: route
        for api in apis().values()
        for route in api.routes
        if isinstance(route, Generate | Count)
        for url in (route.form.url, *route.also)
    }


def written() -> dict[str, Generate]:
    """Return the routes whose answers a model writes, by their paths."""
    return {url: route for url, route in routes().items() if isinstance(route, Generate)}


def batched() -> dict[str, Generate]:
    """Return the routes that `forerun batch` asks, by their paths."""
    return {url: route for url, route in written().items() if route.in_batches and url not in route.also}


def of_path(path: str) -> Api:
    """Return the API that shapes errors on this path: the one with the longest matching prefix."""
    beginnings = [(below, api) for api in apis().values() for below in api.below]
    _, api = max(((below, api) for below, api in beginnings if _is_below(path, below)), key=lambda one: len(one[0]))
    return api


def _is_below(path: str, beginning: str) -> bool:
    return path == beginning or path.startswith(beginning if beginning.endswith("/") else f"{beginning}/")


def refusal(path: str) -> str | None:
    """Return the reason why a known path is absent; None for any other path."""
    absent = {known: why for api in apis().values() for known, why in api.absent.items()}
    beginnings = (f"{path[:end]}/" for end in range(len(path)) if path[end] == "/")
    return next((absent[one] for one in (path, *beginnings) if one in absent), None)
