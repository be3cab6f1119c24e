"""What /openapi.json says of bodies and errors: a schema for each field that is honoured, or accepted as harmless.

What is checked is checked when a body is read; a test holds these schemas to the fields that are known there.
"""

from __future__ import annotations

from dataclasses import Field
from typing import Any

from forerun import params
from forerun.params import Kind, SamplingParams
from forerun.registry import names as registered
from forerun.serve import llama_server, messages, ollama, openai, responses
from forerun.serve.bodies import (
    MAX_CHOICES,
    MOST_ENTRIES,
    MOST_TEXT_CHARS,
    PARAMS,
    SHORT_TEXTS,
    SPECULATION,
    Form,
)
from forerun.serve.formats import GUIDED
from forerun.serve.service import Services
from forerun.serve.texts import OF_CHATS
from forerun.serve.tools import EFFORTS
from forerun.text.chat import ROLES as _ROLES
from forerun.text.tools import MOST_THINKING_TOKENS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}


def _number(least: float, most: float) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most}


def _integer(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _list(of: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": of, "minItems": least}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _object(required: tuple[str, ...] = (), **fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def _or_null(schema: Schema) -> Schema:
    return _either(schema, {"type": "null"})


_ID = _integer(0, 2**31 - 1)  # which ids there are depends on the model: `bodies` says
_IDS = _list(_ID, 1)
_STOPS = _either({"type": "string", "minLength": 1}, _list({"type": "string", "minLength": 1}))
_PARTS = _list(_object(("type", "text"), type={"const": "text"}, text=_TEXT), 1)
_CONTENT = _either(_TEXT, _PARTS)
_CONTENT_OF_INPUT = _either(
    _TEXT, _list(_object(("type", "text"), type={"enum": ["input_text", "output_text", "text"]}, text=_TEXT), 1)
)
_PREDICTION = _object(("type", "content"), type={"const": "content"}, content=_CONTENT)

_NAME: Schema = {"type": "string", "minLength": 1}
_FUNCTION: Schema = {
    "type": "object",
    "properties": {"name": _NAME, "description": _TEXT, "parameters": _OBJECT, "strict": _FLAG},
    "required": ["name"],
}
_TOOLS = _list(_object(("type", "function"), type={"const": "function"}, function=_FUNCTION))
_CHOICE = _either(
    {"enum": ["none", "auto", "required"]},
    _object(("type", "function"), type={"const": "function"}, function=_object(("name",), name=_NAME)),
)
_CALL = _object(
    ("id", "type", "function"),
    id=_TEXT,
    type={"const": "function"},
    function=_object(("name", "arguments"), name=_NAME, arguments=_TEXT),
)
_EFFORT: Schema = {"enum": list(EFFORTS)}
_MOST = 2**31 - 1  # of a whole number, where its field says nothing

# Of each kind of value of SamplingParams: its type in JSON. Those of numbers get the field's range.
_TYPES: dict[Kind, Schema] = {
    params.INTEGER: {"type": "integer"},
    params.SEED: {"type": "integer"},
    params.NUMBER: {"type": "number"},
    params.FLAG: _FLAG,
    params.STOPPING: _either(_FLAG, {"const": "never"}),
    params.TEXT: _TEXT,
    params.UTF8: _TEXT,
    params.RULES: _TEXT,
    params.SCHEMA: _either(_OBJECT, _FLAG, _TEXT),
    params.TEXTS: _STOPS,
    params.IDS: _list(_ID),
    params.TEXT_OR_IDS: _either(_PREDICTION, _TEXT, _IDS),
    params.BIASES: {
        "type": "object",
        "additionalProperties": _number(-100, 100),
        "propertyNames": {"pattern": "^[0-9]{1,5}$"},
    },
}
# What the server allows, or promises, less of than the engine.
_LESS: dict[str, Schema] = {
    "max_tokens": {"maximum": _MOST},
    "temperature": {"maximum": 2},
    "n": {"maximum": MAX_CHOICES},
    "seed": {"maximum": 2**63 - 1},
}


def _of_field(field: Field[Any]) -> Schema:
    """The schema of a field of SamplingParams."""
    about = field.metadata
    schema = dict(_TYPES[about["kind"]])
    if schema.get("type") in ("integer", "number"):
        bounds = {"min": "minimum", "above": "exclusiveMinimum", "max": "maximum"}
        schema |= {key: about[name] for name, key in bounds.items() if name in about}
        if schema["type"] == "integer":
            schema = {"minimum": -_MOST - 1, "maximum": _MOST, **schema}
    schema |= _LESS.get(field.name, {})
    schema = _either(*({"const": value} for value in about["also"]), schema) if "also" in about else schema
    return _limited(field.name, schema)


def _limited(name: str, schema: Schema) -> Schema:
    """With the limits that the server sets to what a field holds."""
    if "anyOf" in schema:
        return _either(*(_limited(name, one) for one in schema["anyOf"]))
    kind, most = schema.get("type"), MOST_ENTRIES.get(name)
    if kind == "array":
        schema = {**schema, "items": _limited(name, schema["items"])} | ({"maxItems": most} if most else {})
    if kind == "object" and most:
        schema = {**schema, "maxProperties": most}
    if kind == "string" and name in SHORT_TEXTS:
        schema = {**schema, "maxLength": MOST_TEXT_CHARS}
    return schema


_FIELDS = {name: _of_field(field) for name, field in SamplingParams.__dataclass_fields__.items()}
_MOST_TOKENS = _FIELDS["max_tokens"]
# Fields of SamplingParams, and what goes by the same name in every API.
_SHARED: dict[str, Schema] = {
    **_FIELDS,
    "model": _TEXT,
    "speculation": _object((), report=_FLAG, **{name: _FIELDS[name] for name in SPECULATION}),
    "stream": _FLAG,
    "chat_template_kwargs": _OBJECT,
    "top_logprobs": _FIELDS["logprobs"],
}
_FORMATS: dict[str, Schema] = {
    "response_format": _either(
        _object(("type",), type={"enum": ["text", "json_object"]}),
        _object(
            ("type", "json_schema"),
            type={"const": "json_schema"},
            json_schema=_object(("schema",), name=_TEXT, description=_TEXT, strict=_FLAG, schema=_OBJECT),
        ),
    ),
    "structured_outputs": _object(
        json=_either(_OBJECT, _TEXT),
        json_object=_FLAG,
        regex=_TEXT,
        choice=_list(_NAME, 1),
        grammar=_TEXT,
        disable_any_whitespace=_FLAG,
    ),
    **{name: _FIELDS[ours] for name, ours in GUIDED.items()},
}
_OPTIONS_OF_OLLAMA: dict[str, Schema] = {
    **{name: _FIELDS[ours] for name, ours in ollama.OPTIONS.items()},
    "num_predict": _either({"enum": [-1, -2]}, _MOST_TOKENS),
    "num_ctx": _integer(1, _MOST),
    "stop": _limited("stop", _either(_NAME, _list(_NAME))),
}
_OF_OLLAMA: dict[str, Schema] = {
    "options": {"type": "object", "properties": _OPTIONS_OF_OLLAMA, "additionalProperties": False},
    "format": _either({"enum": ["", "json"]}, _OBJECT),
    "think": _either(_FLAG, _EFFORT),
}
_OWN: dict[str, dict[str, Schema]] = {
    openai.CHAT: {
        "messages": _list(
            _object(
                ("role", "content"),
                role={"enum": list(_ROLES)},
                content=_CONTENT,
                tool_calls=_list(_CALL),
                tool_call_id=_TEXT,
                reasoning_content=_TEXT,
            ),
            1,
        ),
        "tools": _TOOLS,
        "tool_choice": _CHOICE,
        "parallel_tool_calls": _FLAG,
        "reasoning_effort": _EFFORT,
        "max_thinking_tokens": _integer(0, MOST_THINKING_TOKENS),
        "continue_final_message": _FLAG,
        "add_generation_prompt": _FLAG,
        "max_completion_tokens": _MOST_TOKENS,
        "logprobs": _FLAG,
        "stream_options": _object(include_usage=_FLAG, continuous_usage_stats=_FLAG),
        "return_token_ids": _FLAG,
        **_FORMATS,
    },
    openai.COMPLETIONS: {
        **_FORMATS,
        "prompt": _either(_TEXT, _IDS, _list(_TEXT, 1), _list(_IDS, 1)),
        "suffix": _TEXT,
        "max_completion_tokens": _MOST_TOKENS,
        "logprobs": _FIELDS["logprobs"],
        "stream_options": _object(include_usage=_FLAG, continuous_usage_stats=_FLAG),
        "best_of": _FIELDS["n"],
        "echo": _FLAG,
        "return_token_ids": _FLAG,
    },
    responses.RESPONSES: {
        "input": _either(
            _TEXT,
            _list(
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "message"},
                        "role": {"enum": ["user", "assistant", "system", "developer"]},
                        "content": _CONTENT_OF_INPUT,
                    },
                    "required": ["role", "content"],
                },
                1,
            ),
        ),
        "instructions": _TEXT,
        "tools": _list({**_FUNCTION, "properties": {"type": {"const": "function"}, **_FUNCTION["properties"]}}),
        "tool_choice": _either(
            {"enum": ["none", "auto", "required"]},
            _object(("type", "name"), type={"const": "function"}, name=_NAME),
        ),
        "parallel_tool_calls": _FLAG,
        "max_tool_calls": _integer(1, _MOST),
        "reasoning": _object(effort=_or_null(_EFFORT), summary=_or_null(_TEXT), generate_summary=_or_null(_TEXT)),
        "max_thinking_tokens": _integer(0, MOST_THINKING_TOKENS),
        "text": _object(format=_or_null(_OBJECT), verbosity=_or_null(_TEXT)),
        "previous_response_id": _TEXT,
        "store": _FLAG,
        "max_output_tokens": _MOST_TOKENS,
        "include": _list({"enum": [responses.LOGPROBS, *responses.EMPTY]}),
    },
    messages.MESSAGES: {
        "messages": _list(
            _object(("role", "content"), role={"enum": ["user", "assistant", "system"]}, content=_CONTENT), 1
        ),
        "system": _CONTENT,
        "tools": _list(_object(("name", "input_schema"), name=_NAME, description=_TEXT, input_schema=_OBJECT)),
        "tool_choice": _object(("type",), type={"enum": ["auto", "any", "none"]}, disable_parallel_tool_use=_FLAG),
        "thinking": _object(("type",), type={"enum": ["enabled", "disabled", "adaptive"]}, budget_tokens=_MOST_TOKENS),
        "output_config": _object(effort=_or_null(_EFFORT), format=_or_null(_OBJECT)),
        "context_management": _OBJECT,
        "stop_sequences": _limited("stop", _list({"type": "string", "minLength": 1})),
    },
    ollama.CHAT: {
        **_OF_OLLAMA,
        "messages": _list(
            _object(
                ("role", "content"),
                role={"enum": ["system", "user", "assistant", "tool"]},
                content=_TEXT,
                thinking=_TEXT,
                tool_name=_TEXT,
                tool_calls=_list(_object(("function",), function=_object(("name",), name=_NAME, arguments=_OBJECT))),
            )
        ),
        "tools": _TOOLS,
    },
    llama_server.COMPLETION: {
        "prompt": _either(_TEXT, _IDS),
        "n_predict": _either({"const": -1}, _MOST_TOKENS),
        "stop": _limited("stop", _STOPS),
        "repeat_penalty": _FIELDS["repetition_penalty"],
        "penalize_nl": _FLAG,
        "response_fields": _list(_TEXT),
    },
    ollama.GENERATE: {**_OF_OLLAMA, "prompt": _TEXT, "suffix": _TEXT, "system": _TEXT, "raw": _FLAG},
}
_REQUIRED = {
    openai.CHAT: ["messages"],
    openai.COMPLETIONS: ["prompt"],
    responses.RESPONSES: ["input"],
    messages.MESSAGES: ["messages", "max_tokens"],
    llama_server.COMPLETION: ["prompt"],
    ollama.CHAT: [],
    ollama.GENERATE: [],
}
_FORMS: dict[str, Form] = {
    **openai.FORMS,
    responses.RESPONSES: responses.FORM,
    messages.MESSAGES: messages.FORM,
    llama_server.COMPLETION: llama_server.FORM,
    **{url: ollama.FORMS[url] for url in (ollama.CHAT, ollama.GENERATE)},
}


def _noted() -> Schema:
    return {"description": "served without it; the header x-forerun-ignored of the answer says so"}


def _schema(form: Form) -> Schema:
    own = {**_SHARED, **_OWN[form.url]}
    fields = {name: _or_null(own[name]) for name in sorted({*PARAMS, "speculation", *form.own})}
    for name in sorted(form.inert):
        fields[name] = {"description": f"accepted, without effect: {form.inert[name]}"}
    for name in sorted(form.noted):
        fields[name] = _noted()
    for name, (allowed, why) in form.neutral.items():
        values = [None] if callable(allowed) else [*allowed, None]
        fields[name] = {"enum": values, "description": f"no other value: {why}"}
    for name in _REQUIRED[form.url]:
        fields[name] = own[name]
    return {
        "type": "object",
        "properties": fields,
        "required": _REQUIRED[form.url],
        "additionalProperties": False,
    }


def _bodies() -> dict[str, Schema]:
    made = {url: _schema(form) for url, form in _FORMS.items()}
    counted = {**_schema(messages.FORM), "required": ["messages"]}
    chat = made[openai.CHAT]["properties"]
    tokenize: Schema = {
        "type": "object",
        "properties": {
            "model": _TEXT,
            "prompt": _TEXT,
            **{name: chat[name] for name in OF_CHATS},
            "add_special_tokens": _FLAG,
            "return_token_strs": _FLAG,
            "content": _TEXT,
            "add_special": _FLAG,
            "with_pieces": _FLAG,
            "parse_special": _FLAG,
        },
        "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}, {"required": ["content"]}],
        "additionalProperties": False,
    }
    detokenize = _object(("tokens",), model=_TEXT, tokens=_list(_ID))
    return {
        **made,
        messages.COUNT_TOKENS: counted,
        "/tokenize": tokenize,
        "/detokenize": detokenize,
        ollama.SHOW: _object(
            ("model",), model=_TEXT, **{name: _noted() for name in sorted(ollama.FORMS[ollama.SHOW].noted)}
        ),
    }


BODIES = _bodies()


def bodies(services: Services) -> dict[str, Schema]:
    """The schemas of all bodies, with what this server's models, drafters and rules are."""
    engines = [own.llm.engine for own in services.all]
    here: dict[str, Schema] = {
        "model": {"enum": list(services.names)},
        "draft": {"enum": sorted({name for engine in engines for name in engine.drafter.members})},
        "acceptance": {"enum": registered("forerun.verify")},
    }
    num_ids = min(engine.runner.num_ids for engine in engines)

    def told(schema: Any) -> Any:
        if isinstance(schema, list):
            return [told(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        if schema == _ID:
            return _integer(0, num_ids - 1)
        made = {key: told(value) for key, value in schema.items()}
        if isinstance(fields := made.get("properties"), dict):
            fields |= {name: _or_null(own) for name, own in here.items() if name in fields}
        return made

    return {url: told(schema) for url, schema in BODIES.items()}


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
    """What FastAPI is told of a route's body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
