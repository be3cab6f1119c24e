"""Describes bodies and errors for /openapi.json, with a schema for each field that is honoured or harmless."""

from __future__ import annotations

import re
from typing import Any

from forerun.registry import names as registered
from forerun.serve.apis import with_bodies
from forerun.serve.fields import ID, Schema, integer, or_null
from forerun.serve.routes import Count, Generate
from forerun.serve.service import Services


def body_of(route: Generate | Count) -> Schema:
    """Return the schema of a route's bodies."""
    fields = route.form.fields
    schema: Schema = {
        "type": "object",
        "properties": {name: field.described for name, field in sorted(fields.items())},
        "required": [name for name, field in fields.items() if field.is_required],
        "additionalProperties": False,
    }
    if isinstance(route, Count) and route.alternatives:
        schema["oneOf"] = [{"required": [name]} for name in route.alternatives]
        schema["properties"] |= {name: fields[name].schema for name in route.alternatives}
    return schema


def bodies(services: Services) -> dict[str, Schema]:
    """Return the schemas of all bodies by URL path, with this server's models, drafters and verification rules."""
    engines = [service.llm.engine for service in services.all]
    here: dict[str, Schema] = {
        "model": {"enum": list(services.names)},
        "draft": {"enum": sorted({name for engine in engines for name in engine.drafter.members})},
        "acceptance": {"enum": registered("forerun.verify")},
    }
    num_ids = min(engine.runner.num_ids for engine in engines)

    def fill(schema: Any) -> Any:
        if isinstance(schema, list):
            return [fill(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        if schema == ID:
            return integer(0, num_ids - 1)
        filled = {key: fill(value) for key, value in schema.items()}
        if isinstance(fields := filled.get("properties"), dict):
            fields |= {name: or_null(known) for name, known in here.items() if name in fields}
        return filled

    return {url: fill(body_of(route)) for url, route in with_bodies().items()}


# What may come instead of an answer; docs/serve.md says when.
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "the body cannot be honoured; the message names the field"},
    401: {"description": "the API key is missing or wrong"},
    403: {"description": "a web page of another origin, or a foreign host name"},
    404: {"description": "no such model"},
    408: {"description": "the body did not come in time"},
    413: {"description": "the body is too large"},
    415: {"description": "the body is not said to be JSON"},
    429: {"description": "all places are taken; Retry-After says when to come again"},
    500: {"description": "a fault of the server"},
    503: {"description": "the server shuts down"},
    504: {"description": "the answer took too long"},
}


def as_body(schema: Schema) -> dict[str, Any]:
    """Return a request body with this schema in the form that FastAPI takes (openapi_extra)."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers_of(route: Generate | Count) -> dict[int | str, dict[str, Any]]:
    """Return the possible answers of a route by status, in the form that FastAPI takes.

    A successful answer is JSON, or a stream in the media type of the route's API.
    """
    kinds = ["application/json"]
    if isinstance(route, Generate):
        kinds.append(route.media_type.partition(";")[0])
    return {200: {"description": "the answer", "content": {kind: {} for kind in kinds}}, **ERRORS}


def parameters_of(url: str) -> list[dict[str, Any]]:
    """Return the parameters of a path: its parts in braces, which are texts."""
    names = re.findall(r"\{(\w+)", url)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
