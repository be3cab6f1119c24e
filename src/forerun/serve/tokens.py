"""Routes that turn texts into ids and back, and count them. No engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forerun.errors import shown
from forerun.serve import messages, openai
from forerun.serve.bodies import Form, Job, Refused, check, flag
from forerun.serve.service import Service
from forerun.types import SamplingParams

Parse = Callable[[bytes], Any]
TOKENIZE = Form("/tokenize", {"model", "prompt", "messages", "add_special_tokens", "return_token_strs"}, set(), {})
DETOKENIZE = Form("/detokenize", {"model", "tokens"}, set(), {})


def count(service: Service, parse: Parse, body: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The tokens of a conversation in the form of /v1/messages, and the fields that were ignored. Raises UserError."""
    job = messages.read_count(
        _flat(parse, body), service.name, service.names, ignore_unsupported=service.ignore_unsupported
    )
    return {"input_tokens": len(service.encode(job)[0])}, job.ignored


def tokenize(service: Service, parse: Parse, body: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The ids of {"prompt": a text} or {"messages": a conversation}, as the server itself would make them."""
    given = _given(service, TOKENIZE, parse, body)
    if ("prompt" in given) == ("messages" in given):
        raise Refused("the body must have a prompt or messages: give one of them", "prompt")
    if "messages" in given:
        read = openai.read_body(openai.CHAT, {"messages": given["messages"]}, service.name)
        ids = service.encode(Job(openai.CHAT, service.name, SamplingParams(), messages=read.messages))[0]
    else:
        if not isinstance(given["prompt"], str):
            raise Refused(f"prompt={shown(given['prompt'])} is not possible: it must be a text", "prompt")
        service.check_size(Job(TOKENIZE.url, service.name, SamplingParams(), prompts=(given["prompt"],)))
        ids = service.llm.tokenizer.encode(given["prompt"], flag(given, "add_special_tokens", True))
    made = {"tokens": ids, "count": len(ids), "max_model_len": service.llm.engine.max_seq_len}
    if flag(given, "return_token_strs"):
        made["token_strs"] = [service.llm.tokenizer.id_to_token.get(i, "") for i in ids]
    return made, ()


def detokenize(service: Service, parse: Parse, body: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The text of {"tokens": ids}."""
    ids, num_ids = _given(service, DETOKENIZE, parse, body).get("tokens"), service.llm.tokenizer.num_ids
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < num_ids for token in ids):
        message = f"tokens={shown(ids)} is not possible: it must be a list of ids in 0 .. {num_ids - 1}"
        raise Refused(message, "tokens")
    return {"prompt": service.llm.tokenizer.decode(ids)}, ()


def _given(service: Service, form: Form, parse: Parse, body: bytes) -> dict[str, Any]:
    given = check(form, _flat(parse, body), service.names).fields
    if extra := sorted(given.keys() - form.own):
        raise Refused(f"{extra[0]} is no field of {form.url}", extra[0], code="unknown_parameter")
    return given


def _flat(parse: Parse, body: bytes) -> Any:
    try:
        return parse(body)
    except RecursionError:
        raise Refused("the body is nested too deeply to be read: make it flatter") from None
