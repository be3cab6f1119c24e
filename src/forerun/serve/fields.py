"""Defines fields of request bodies: the permitted values, as JSON Schema, and whether a field is honoured or ignored.

Every API builds its fields with these functions. The checks of bodies, the OpenAPI document and the documented list of
harmless fields follow from the fields. The schema of a Field describes the values that are honoured. Every other value
is refused before the API reads the body. Only fields with is_read are checked by the API's own reader instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeAlias

from forerun import params
from forerun.params import Kind, SamplingParams
from forerun.text.tools import MOST_THINKING_TOKENS

Schema: TypeAlias = dict[str, Any]

# Limits that keep a request from holding up others: most of these lists are searched at every step.
MOST_ENTRIES = {"bad_words": 1024, "stop": 64, "stop_token_ids": 1024, "choice": 1024, "logit_bias": 4096}
SHORT_TEXTS = ("bad_words", "stop", "cache_salt", "draft", "acceptance")
MOST_TEXT_CHARS, MOST_TEXTS_CHARS = 1024, 1 << 16  # of one text of a field, and of all its texts
MAX_CHOICES = 128  # per prompt, as in the API of OpenAI
MOST = 2**31 - 1  # of a whole number, where its field says nothing
SPECULATION = ("draft", "spec_length", "acceptance")  # in the object `speculation`, beside `report`
# Fields of SamplingParams that every API honours under these names.
PARAMS = frozenset(SamplingParams.__dataclass_fields__) - {"logprobs", "prompt_logprobs", "n", "max_tokens", "stop"}


@dataclass(frozen=True)
class Field:
    """One field of a body. A field without a schema is never honoured.

    neutral: the permitted values, all without an effect. inert: whether every value is accepted, because no
    answer depends on the field. why: the reason for `neutral` or `inert`; for a required field, the message to a client
    that leaves out the field. is_noted: whether the field is ignored, and listed as ignored in the answer. is_read:
    whether the API's own reader checks the field.
    """

    schema: Schema | None = None
    is_required: bool = False
    neutral: Seq[Any] | None = None
    inert: bool = False
    is_noted: bool = False
    is_read: bool = False
    why: str = ""

    @property
    def described(self) -> Schema:
        """The field's schema in the OpenAPI document. An optional field may also be null, which counts as absent."""
        if self.is_noted:
            return {"description": "served without it; the header x-forerun-ignored of the answer says so"}
        if self.inert:
            return {"description": f"accepted, without effect: {self.why}"}
        if self.neutral is not None:
            return {"enum": [*self.neutral, None], "description": f"no other value: {self.why}"}
        assert self.schema is not None
        return self.schema if self.is_required else or_null(self.schema)


Fields: TypeAlias = Mapping[str, Field]


def required(schema: Schema, why: str = "this API wants it", *, is_read: bool = False) -> Field:
    """Return a field that a body must have. why: the message to a client that leaves the field out."""
    return Field(schema, is_required=True, is_read=is_read, why=why)


def neutral(values: Seq[Any], why: str) -> Field:
    """Return a field that permits only values that have no effect. why: the reason to refuse all other values."""
    return Field(neutral=values, why=why)


def inert(why: str, *names: str) -> dict[str, Field]:
    """Return fields that may have any value: name -> Field. why: the reason why no answer depends on the fields."""
    return dict.fromkeys(names, Field(inert=True, why=why))


def noted(*names: str) -> dict[str, Field]:
    """Return fields that are ignored: name -> Field. The answer to a body with such a field lists it as ignored."""
    return dict.fromkeys(names, Field(is_noted=True))


def honoured(**schemas: Schema) -> dict[str, Field]:
    """Return fields that are honoured: name -> Field. Values that a field's schema does not permit are refused."""
    return {name: Field(schema) for name, schema in schemas.items()}


def by_reader(**schemas: Schema) -> dict[str, Field]:
    """Return honoured fields that the API's own reader checks: name -> Field.

    The schemas only describe the fields in the OpenAPI document. The reader may permit more values than a schema, and
    its error messages say more.
    """
    return {name: Field(schema, is_read=True) for name, schema in schemas.items()}


# ----------------------------------------------------------------------------------------------------------- schemas


def number(least: float, most: float) -> Schema:
    """Return the schema of a number in a range."""
    return {"type": "number", "minimum": least, "maximum": most}


def integer(least: int, most: int = MOST) -> Schema:
    """Return the schema of a whole number in a range."""
    return {"type": "integer", "minimum": least, "maximum": most}


def array(of: Schema, least: int = 0) -> Schema:
    """Return the schema of a list with at least `least` entries."""
    return {"type": "array", "items": of, "minItems": least}


def either(*schemas: Schema) -> Schema:
    """Return the schema of values that fulfil at least one of these schemas."""
    return {"anyOf": [way for schema in schemas for way in schema.get("anyOf", (schema,))]}


def one_of(*values: Any) -> Schema:
    """Return the schema that permits only these values."""
    return {"enum": list(values)}


def structure(required: tuple[str, ...] = (), **fields: Schema) -> Schema:
    """Return the schema of an object with these fields and no other."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def or_null(schema: Schema) -> Schema:
    """Return a schema that also permits null."""
    return either(schema, {"type": "null"})


def limited(name: str, schema: Schema) -> Schema:
    """Return a schema with the limits that MOST_ENTRIES and SHORT_TEXTS set for the field `name`."""
    if "anyOf" in schema:
        return either(*(limited(name, one) for one in schema["anyOf"]))
    kind, most = schema.get("type"), MOST_ENTRIES.get(name)
    if kind == "array":
        schema = {**schema, "items": limited(name, schema["items"])} | ({"maxItems": most} if most else {})
    if kind == "object" and most:
        schema = {**schema, "maxProperties": most}
    if kind == "string" and name in SHORT_TEXTS:
        schema = {**schema, "maxLength": MOST_TEXT_CHARS}
    return schema


TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
NAME: Schema = {"type": "string", "minLength": 1}
ID = integer(0)  # openapi.py adds the upper end, which depends on the model
IDS = array(ID, 1)
STOPS = either(NAME, array(NAME))
CONTENT = either(TEXT, array(structure(("type", "text"), type=one_of("text"), text=TEXT), 1))
PREDICTION = structure(("type", "content"), type=one_of("content"), content=CONTENT)
FUNCTION: Schema = {
    "type": "object",
    "properties": {"name": NAME, "description": TEXT, "parameters": OBJECT, "strict": FLAG},
    "required": ["name"],
}
TOOLS = array(structure(("type", "function"), type=one_of("function"), function=FUNCTION))
EFFORT = one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")
THINKING_TOKENS = integer(0, MOST_THINKING_TOKENS)

# Kind of a value of SamplingParams -> its JSON type. Numbers get the field's range.
_TYPES: dict[Kind, Schema] = {
    params.INTEGER: {"type": "integer"},
    params.SEED: {"type": "integer"},
    params.NUMBER: {"type": "number"},
    params.FLAG: FLAG,
    params.STOPPING: either(FLAG, one_of("never")),
    params.TEXT: TEXT,
    params.UTF8: TEXT,
    params.RULES: TEXT,
    params.SCHEMA: either(OBJECT, FLAG, TEXT),
    params.TEXTS: STOPS,
    params.IDS: array(ID),
    params.TEXT_OR_IDS: either(PREDICTION, TEXT, IDS),
    params.BIASES: {
        "type": "object",
        "additionalProperties": number(-100, 100),
        "propertyNames": {"pattern": "^[0-9]{1,5}$"},
    },
}
# Ranges that are narrower in the server than in the engine.
_LESS: dict[str, Schema] = {
    "max_tokens": {"maximum": MOST},
    "temperature": {"maximum": 2},
    "n": {"maximum": MAX_CHOICES},
    "seed": {"maximum": 2**63 - 1},
}


def _of_param(field: dataclasses.Field[Any]) -> Schema:
    """Return the schema of a field of SamplingParams."""
    about = field.metadata
    schema = dict(_TYPES[about["kind"]])
    if schema.get("type") in ("integer", "number"):
        bounds = {"min": "minimum", "above": "exclusiveMinimum", "max": "maximum"}
        schema |= {key: about[name] for name, key in bounds.items() if name in about}
        if schema["type"] == "integer":
            schema = {"minimum": -MOST - 1, "maximum": MOST, **schema}
    schema |= _LESS.get(field.name, {})
    schema = either(*(one_of(value) for value in about["also"]), schema) if "also" in about else schema
    return limited(field.name, schema)


# Fields of SamplingParams, as every API may call them.
OF_PARAMS: dict[str, Schema] = {name: _of_param(field) for name, field in SamplingParams.__dataclass_fields__.items()}
# Fields of every body whose answer a model writes.
SHARED: Fields = {
    **by_reader(**{name: OF_PARAMS[name] for name in sorted(PARAMS)}),
    **honoured(speculation=structure((), report=FLAG, **{name: OF_PARAMS[name] for name in SPECULATION})),
}
# Fields that clients send to any API, of any route, and that change no answer. An API may honour them all the same.
EVERYWHERE: Fields = {
    **inert("it says whom a request is for", "user", "safety_identifier"),
    **inert("it is the client's own", "metadata", "client_metadata"),
    **inert("completions are not kept, and no route would list them", "store"),
    **inert("there is one tier", "service_tier"),
    **inert("the cache is by the prompt itself", "prompt_cache_key", "prompt_cache_retention"),
    **inert("an answer is the same wherever its prompt is found", "id_slot"),
    **inert("grammars are compiled by one library", "guided_decoding_backend"),
    **noted("stream_options", "timings_per_token", "return_progress"),  # the numbers are in the answer, or in its end
}
