"""Converts fields of bodies that fix the form of the answer (OpenAI's and vLLM's) to fields of SamplingParams.

response_format      {"type": "text" | "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}
structured_outputs   {"json": ..., "regex": ..., "choice": ..., "grammar": ..., "json_object": true}
guided_json, guided_regex, guided_choice, guided_grammar
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import shown
from forerun.params import CONSTRAINTS
from forerun.serve.fields import (
    FLAG,
    NAME,
    OBJECT,
    OF_PARAMS,
    TEXT,
    Fields,
    array,
    by_reader,
    either,
    one_of,
    structure,
)
from forerun.serve.refused import Refused

# Field of vLLM -> field of SamplingParams.
GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
RESPONSE_FORMAT = "response_format"
GRAMMARS = (*GUIDED, "structured_outputs", RESPONSE_FORMAT)  # the fields that may hold a grammar or a schema
FIELDS: Fields = by_reader(
    response_format=either(
        structure(("type",), type=one_of("text", "json_object")),
        structure(
            ("type", "json_schema"),
            type=one_of("json_schema"),
            json_schema=structure(("schema",), name=TEXT, description=TEXT, strict=FLAG, schema=OBJECT),
        ),
    ),
    structured_outputs=structure(
        json=either(OBJECT, TEXT),
        json_object=FLAG,
        regex=TEXT,
        choice=array(NAME, 1),
        grammar=TEXT,
        disable_any_whitespace=FLAG,
    ),
    **{name: OF_PARAMS[ours] for name, ours in GUIDED.items()},
)
_OUTPUTS = {"json": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice"}
_OUTPUTS |= {"grammar": "grammar", "disable_any_whitespace": "json_whitespace"}


def params_of_format(given: Mapping[str, Any], response_format: str = RESPONSE_FORMAT) -> dict[str, Any]:
    """Return the fields of SamplingParams for the output format (such as a JSON schema) that a body asks for.

    given: the fields of the body. response_format: the field of `given` that this API has in place of the field
    response_format of OpenAI's chat completions. The fields guided_* are only checked for conflicts; `params_of`
    converts them. Raises Refused, which names the invalid or conflicting field.
    """
    fields, said = dict[str, Any](), dict[str, str]()  # fields of SamplingParams, and the body's field for each
    parts = {
        response_format: _of_response_format(response_format, given.get(response_format)),
        "structured_outputs": _of_structured_outputs(given.get("structured_outputs")),
        **{name: {ours: given[name]} for name, ours in GUIDED.items() if given.get(name) is not None},
    }
    for name, part in parts.items():
        for ours, value in part.items():
            clash = next((other for other in CONSTRAINTS if other in said or other in given), None)
            if ours in CONSTRAINTS and clash is not None:
                message = f"{said.get(clash, clash)} and {name} are two grammars for one answer: drop one of them"
                raise Refused(message, name)
            said[ours] = name
            fields |= {} if name in GUIDED else {ours: value}  # the body keeps a guided_ field, and refusals name it
    return fields


def _of_response_format(name: str, asked: Any) -> dict[str, Any]:
    if asked is None:
        return {}
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if kind == "text" and all(value is None for name, value in asked.items() if name != "type"):
        return {}
    if kind == "json_object":  # llama.cpp's server takes a schema here
        return {"json_object": True} if asked.get("schema") is None else {"json_schema": asked["schema"]}
    if kind == "json_schema":
        schema = asked.get("json_schema")
        schema = schema.get("schema") if isinstance(schema, Mapping) else asked.get("schema")
        if isinstance(schema, Mapping | bool):
            return {"json_schema": schema}
    schema = '"json_schema": {"schema": {...}}' if name == RESPONSE_FORMAT else '"schema": {...}'
    form = f'{{"type": "text"}}, {{"type": "json_object"}} or {{"type": "json_schema", {schema}}}'
    raise Refused(f"{name}={shown(asked)} is not possible: it must be {form}", name)


def _of_structured_outputs(asked: Any) -> dict[str, Any]:
    if asked is None:
        return {}
    if not isinstance(asked, Mapping):
        message = f'structured_outputs={shown(asked)} is not possible: it must be an object such as {{"regex": "a+"}}'
        raise Refused(message, "structured_outputs")
    fields = {}
    for name, value in asked.items():
        if value is None or value is False:
            continue
        if name not in _OUTPUTS:
            message = f"structured_outputs.{name} is not possible: it must be {', '.join(_OUTPUTS)}; leave it out"
            raise Refused(message, "structured_outputs", code="unsupported_parameter")
        fields[_OUTPUTS[name]] = "compact" if name == "disable_any_whitespace" else value
    if sum(name in CONSTRAINTS for name in fields) > 1:
        raise Refused("structured_outputs has two grammars for one answer: drop one of them", "structured_outputs")
    return fields
