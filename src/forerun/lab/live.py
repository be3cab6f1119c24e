"""Live generation for the page: a viewer's choices, and the drafted, accepted and rejected tokens of a running engine.

A viewer's request runs in the engine's batch like any other request, and watching.py reports on it. With `race`, the
engine decodes the same prompt once more, plainly, *after* that request. If both ran in one batch, they would share each
pass of the target, and neither would show its own speed. The page replays both at the speeds that they had.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from forerun import verify
from forerun.drafters import Drafter
from forerun.engine.llm import LLM
from forerun.engine.request import Request
from forerun.errors import BadOption, CapacityError, ForerunError, NotFound, shown
from forerun.lab.examples import CHATS, CODE
from forerun.lab.watching import Watch, event
from forerun.registry import about, load, unknown
from forerun.types import SamplingParams

FIELDS = ("draft", "spec_length", "temperature", "top_k", "top_p", "seed", "acceptance", "max_tokens", "ignore_eos")
OTHER_FIELDS = ("prompt", "messages", "race")  # fields of a body that are not fields of SamplingParams
NONE = "none"
MOST_VIEWERS = 64


def make_router(llm: LLM) -> APIRouter:
    """Return the routes of the widgets Live and Trace."""
    router, watched = APIRouter(), set[str]()

    @router.get("/live")
    def live() -> dict[str, Any]:
        """Return the choices of a viewer: the drafters of the engine, and the rules that judge their drafts."""
        return choices(llm)

    @router.post("/live")
    async def generate(body: dict[str, Any]) -> StreamingResponse:
        """Generate a text, and stream its events. An invalid body is refused before the first event."""
        wish = await asyncio.to_thread(read_body, llm, body)
        request = make_request(llm, wish)
        if len(watched) >= MOST_VIEWERS:
            raise CapacityError(f"{MOST_VIEWERS} viewers are watching, which is the most at once: come back later")
        return _Events(_counted(watched, events(llm, wish, request)), media_type="text/event-stream")

    return router


class _Events(StreamingResponse):
    """A stream that closes its generator as soon as the reader has gone, without waiting for garbage collection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


async def _counted(watched: set[str], all_events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    viewer = secrets.token_hex(8)
    watched.add(viewer)
    try:
        async with aclosing(all_events):
            async for one in all_events:
                yield one
    finally:
        watched.remove(viewer)


async def events(llm: LLM, wish: Wish, request: Request) -> AsyncGenerator[bytes]:
    """Yield the events of the request (lane "draft"). In a race, plain decoding runs afterwards, in the lane "plain".

    Closing the generator ends the running request. If a request fails, the last event is "failed", with the error
    message.
    """
    try:
        async with aclosing(Watch(llm, "draft", request).events()) as first:
            async for one in first:
                yield one
        if wish.race:
            plain = make_plain_request(llm, wish, request)
            async with aclosing(Watch(llm, "plain", plain).events()) as second:
                async for one in second:
                    yield one
    except ForerunError as error:
        yield event("failed", {"message": str(error)})


# ------------------------------------------------------------------------------------------------- what can be chosen


def choices(llm: LLM) -> dict[str, Any]:
    """Return the choices on the page: the model, examples, the engine's drafters, and all verification rules."""
    rules = [verify.find(name) for name in verify.rules()]
    is_code, has_chat = llm.opened.is_shipped, _has_chat(llm)
    return {
        "model": llm.checkpoint.name,
        "precision": str(llm.checkpoint.model.precision),
        "max_seq_len": llm.engine.max_seq_len,
        "has_chat": has_chat,
        "is_chat_usual": has_chat and not is_code,
        "examples": [dataclasses.asdict(example) for example in (CODE if is_code or not has_chat else CHATS)],
        "drafters": [_described(name, drafter, rules) for name, drafter in llm.drafters.items()],
        "rules": [{"name": rule.name, "is_lossless": rule.is_lossless, "about": about(rule.module)} for rule in rules],
    }


def _described(name: str, drafter: Drafter, rules: Seq[verify.Rule]) -> dict[str, Any]:
    method = load("forerun.drafters", name.partition(":")[0], "drafter")
    judges = [rule.name for rule in rules if rule.judges(drafter.shape, drafter.draws)]
    return {"name": name, "shape": drafter.shape, "rules": judges, "about": about(method)}


def _has_chat(llm: LLM) -> bool:
    try:
        return bool(llm.chat_template)
    except NotFound:
        return False


# -------------------------------------------------------------------------------------------------- what is asked for


@dataclass(frozen=True)
class Wish:
    """The request of a viewer. race: whether to decode the prompt plainly as well."""

    prompt_ids: list[int]
    params: SamplingParams
    race: bool


def read_body(llm: LLM, body: Mapping[str, Any]) -> Wish:
    """Return the Wish in the JSON body of a viewer's request. Raises UserError for an invalid body."""
    for name in body:
        if name not in (*FIELDS, *OTHER_FIELDS):
            raise BadOption(unknown("field", name, (*FIELDS, *OTHER_FIELDS)))
    if ("prompt" in body) == ("messages" in body):
        raise BadOption("a body has either a prompt, a text, or messages, a conversation: give one of them")
    race = body.get("race", False)
    if not isinstance(race, bool):
        raise BadOption(f"race={shown(race)} is not possible: it must be true or false")
    given = {name: value for name, value in body.items() if name in FIELDS}
    if isinstance(seed := given.get("seed"), str) and seed.isdecimal() and len(seed) <= 20:
        given["seed"] = int(seed)  # a page cannot write an integer of 64 bits
    chosen: dict[str, Any] = {"max_tokens": 128, **given, "cache_salt": _new_salt()}
    params = dataclasses.replace(llm.default_params, **chosen)
    if params.searches:
        raise BadOption(f"num_beams={params.num_beams} is not possible here: the page shows one text as it grows")
    return Wish(_prompt_ids(llm, body), params, race)


def make_request(llm: LLM, wish: Wish) -> Request:
    """Make an engine request for a wish, without queueing it. Raises UserError."""
    return llm.engine.make(wish.prompt_ids, wish.params)[0]


def make_plain_request(llm: LLM, wish: Wish, first: Request) -> Request:
    """Make an engine request that decodes a wish's prompt plainly, without queueing it.

    It generates as many tokens as `first`, so that the times of both can be compared.
    """
    plainly: dict[str, Any] = {"draft": NONE, "spec_length": None, "acceptance": None, "seed": first.seq.seed}
    length: dict[str, Any] = {"max_tokens": first.seq.num_output_tokens, "ignore_eos": True}
    params = dataclasses.replace(wish.params, **plainly, **length, cache_salt=_new_salt())
    return llm.engine.make(wish.prompt_ids, params)[0]


def _new_salt() -> str:
    """Return a new salt for one request, which then shares nothing with other requests, not even in a race.

    The salt separates requests in the cache, and in drafters that remember texts.
    """
    return secrets.token_hex(8)


def _prompt_ids(llm: LLM, body: Mapping[str, Any]) -> list[int]:
    if "messages" in body:
        messages = body["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise BadOption(f"messages={shown(messages)} is not possible: it must be a list of messages, not empty")
        last = messages[-1].get("content")
        if isinstance(last, str) and not last.strip():
            raise BadOption("the message is empty: write one, or choose an example")
        return llm.apply_chat_template(messages)
    prompt = body["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadOption(f"prompt={shown(prompt)} is not possible: it must be a text, not empty")
    return llm.tokenizer.encode(prompt)
