"""Live generation for the page: what the running engine drafts, accepts and rejects, as a stream of events.

A viewer's request runs in the engine's batch like any other. While it runs, a listener with detail picks its rounds out
of the step reports; it ends with the request, and a viewer who leaves aborts it. With `race` the same prompt is decoded
plainly *behind* it, not beside it: two requests in one batch share each pass of the target, so that neither has a speed
of its own. The page replays both by their own clocks.

    begin   what was asked for, per lane ("draft", then "plain" with race)
    prompt  a part of the prompt was run
    round   one target pass: nodes, coins, verdict, tokens, seconds, and the counts so far
    end     the text, and the request's own report
    failed  why nothing more comes
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from forerun import verify
from forerun.drafters import Drafter
from forerun.engine.factory import is_shipped
from forerun.engine.llm import LLM
from forerun.engine.request import Request, RequestReport
from forerun.errors import BadOption, CapacityError, ForerunError, NotFound, shown
from forerun.lab.examples import CHATS, CODE
from forerun.registry import load, unknown
from forerun.text.detokenizer import Detokenizer
from forerun.text.tokenizer import token_text
from forerun.types import RoundDetail, SamplingParams, SequenceStep, StepReport, Toss

FIELDS = (
    "draft",
    "spec_length",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "acceptance",
    "max_tokens",
    "ignore_eos",
)  # of SamplingParams, in a body
OTHER_FIELDS = ("prompt", "messages", "race")
NONE = "none"
MOST_VIEWERS = 64
FRAME_S = 1 / 30  # between two deliveries: the engine is not interrupted for each round
PARTS = ("schedule", "draft", "score", "judge", "commit")  # of a step
COUNTS = ("num_steps", "num_drafted", "num_tested", "num_accepted", "num_emitted")
PER_POSITION = ("drafted_per_position", "accepted_per_position")
RATES = ("acceptance_rate", "alpha_hat", "mean_accepted_length")


def make_router(llm: LLM) -> APIRouter:
    """The routes of the widgets Live and Trace."""
    router, watched = APIRouter(), set[str]()

    @router.get("/live")
    def live() -> dict[str, Any]:
        """What can be chosen: the drafters that the engine was started with, the rules, and what they judge."""
        return choices(llm)

    @router.post("/live")
    async def generate(body: dict[str, Any]) -> StreamingResponse:
        """Generate; what cannot be honoured is refused before the first event."""
        wish = await asyncio.to_thread(read_body, llm, body)
        request = make_request(llm, wish)
        if len(watched) >= MOST_VIEWERS:
            raise CapacityError(f"{MOST_VIEWERS} viewers are watching, which is the most at once: come back later")
        return _Events(_counted(watched, events(llm, wish, request)), media_type="text/event-stream")

    return router


class _Events(StreamingResponse):
    """A stream that is closed when nobody reads it any more, not when its generator is collected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


async def _counted(watched: set[str], all_events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    viewer = secrets.token_hex(8)
    watched.add(viewer)
    try:
        async with aclosing(all_events):
            async for event in all_events:
                yield event
    finally:
        watched.remove(viewer)


# ------------------------------------------------------------------------------------------------- what can be chosen


def choices(llm: LLM) -> dict[str, Any]:
    """What the page offers; found by scanning."""
    rules = [verify.find(name) for name in verify.rules()]
    is_code = is_shipped(llm.checkpoint.folder)
    return {
        "model": llm.checkpoint.name,
        "precision": str(llm.checkpoint.model.precision),
        "max_seq_len": llm.engine.max_seq_len,
        "has_chat": _has_chat(llm),
        "is_chat_usual": _has_chat(llm) and not is_code,
        "examples": [dataclasses.asdict(example) for example in (CODE if is_code or not _has_chat(llm) else CHATS)],
        "drafters": [_described(name, drafter, rules) for name, drafter in llm.drafters.items()],
        "rules": [
            {"name": rule.name, "is_lossless": rule.is_lossless, "about": _first_sentence(rule.module)}
            for rule in rules
        ],
    }


def _described(name: str, drafter: Drafter, rules: Seq[verify.Rule]) -> dict[str, Any]:
    method = load("forerun.drafters", name.partition(":")[0], "drafter")
    judges = [rule.name for rule in rules if rule.judges(drafter.shape, drafter.draws)]
    return {"name": name, "shape": drafter.shape, "rules": judges, "about": _first_sentence(method)}


def _first_sentence(module: Any) -> str:
    return " ".join((module.__doc__ or "").split("\n\n")[0].split())


def _has_chat(llm: LLM) -> bool:
    try:
        return bool(llm.chat_template)
    except NotFound:
        return False


# -------------------------------------------------------------------------------------------------- what is asked for


@dataclass(frozen=True)
class Wish:
    """What a viewer asks for. race: whether it is to be decoded plainly, too."""

    prompt_ids: list[int]
    params: SamplingParams
    race: bool


def read_body(llm: LLM, body: Mapping[str, Any]) -> Wish:
    """What a body asks for. Raises UserError."""
    for name in body:
        if name not in (*FIELDS, *OTHER_FIELDS):
            raise BadOption(unknown("field", name, (*FIELDS, *OTHER_FIELDS)))
    if ("prompt" in body) == ("messages" in body):
        raise BadOption("a body has either a prompt, a text, or messages, a conversation: give one of them")
    race = body.get("race", False)
    if not isinstance(race, bool):
        raise BadOption(f"race={shown(race)} is not possible: it must be true or false")
    given = {name: value for name, value in body.items() if name in FIELDS}
    if isinstance(seed := given.get("seed"), str) and seed.isdecimal():
        given["seed"] = int(seed)  # a page cannot write an integer of 64 bits
    own: dict[str, Any] = {"max_tokens": 128, **given, "cache_salt": _new_salt()}
    return Wish(_prompt_ids(llm, body), dataclasses.replace(llm.default_params, **own), race)


def make_request(llm: LLM, wish: Wish) -> Request:
    """The request of a wish, not queued yet. Raises UserError."""
    return llm.engine.make(wish.prompt_ids, wish.params)[0]


def make_plain_request(llm: LLM, wish: Wish, first: Request) -> Request:
    """The same without a draft, as long as what the first one wrote, so that the times can be compared."""
    plainly: dict[str, Any] = {"draft": NONE, "spec_length": None, "acceptance": None, "seed": first.seq.seed}
    length: dict[str, Any] = {"max_tokens": first.seq.num_output_tokens, "ignore_eos": True}
    params = dataclasses.replace(wish.params, **plainly, **length, cache_salt=_new_salt())
    return llm.engine.make(wish.prompt_ids, params)[0]


def _new_salt() -> str:
    """With it nothing is found in a cache or in the memory of a drafter: what others wrote, or the lane before."""
    return secrets.token_hex(8)


def _prompt_ids(llm: LLM, body: Mapping[str, Any]) -> list[int]:
    if "messages" in body:
        messages = body["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise BadOption(f"messages={shown(messages)} is not possible: it must be a list of messages, not empty")
        return llm.apply_chat_template(messages)
    prompt = body["prompt"]
    if not isinstance(prompt, str) or not prompt:
        raise BadOption(f"prompt={shown(prompt)} is not possible: it must be a text, not empty")
    return llm.tokenizer.encode(prompt)


# ------------------------------------------------------------------------------------------------------------- events


def coins_of(detail: RoundDetail) -> dict[int, Toss]:
    """The coin of each node; none where a rule tosses for more than single nodes of a tree."""
    depths = depths_of(detail.parents)
    if depths == list(range(len(depths))):  # a chain
        return {toss.depth: toss for toss in detail.tosses}
    pairs = list(zip(detail.tests, detail.tosses, strict=False))
    is_one_each = len(detail.tests) == len(detail.tosses)
    fit = all(depths[t.node] == toss.depth and t.accepted == toss.is_accepted for t, toss in pairs)
    return {test.node: toss for test, toss in pairs} if is_one_each and fit else {}


def depths_of(parents: Seq[int]) -> list[int]:
    """How many nodes are above each node."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _origin_of_next(step: SequenceStep) -> str:
    """Of the token that the target adds, which a stop condition may cut off."""
    if not step.num_drafted:
        return "plain"
    return "bonus" if step.num_accepted == step.num_tested else "correction"


def _rounded(prob: float | None) -> float | None:
    return None if prob is None else float(f"{prob:.5g}")


async def events(llm: LLM, wish: Wish, request: Request) -> AsyncGenerator[bytes]:
    """The events of one lane, or of both. Closing it ends the request that runs."""
    try:
        async with aclosing(_Lane(llm, "draft", request).events()) as first:
            async for event in first:
                yield event
        if wish.race:
            plain = make_plain_request(llm, wish, request)
            async with aclosing(_Lane(llm, "plain", plain).events()) as second:
                async for event in second:
                    yield event
    except ForerunError as error:
        yield _event("failed", {"message": str(error)})


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


@dataclass(frozen=True)
class _Step:
    """What the engine's thread notes of a step that brought the request on."""

    at_s: float
    report: StepReport
    number: int | None  # the request's among the step's sequences; None while its prompt runs


class _Lane:
    """One request and who watches it. It belongs to an event loop."""

    def __init__(self, llm: LLM, name: str, request: Request) -> None:
        self._llm, self._name, self._request = llm, name, request
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._steps: deque[_Step] = deque()
        self._is_over, self._is_rung = False, False
        self._end_listening: Callable[[], None] = lambda: None
        self._begun_s = self._last_s = 0.0
        self._so_far = RequestReport()
        self._detokenizer = Detokenizer(llm.tokenizer, request.seq.tokens[: request.seq.num_prompt_tokens])
        self._num_tokens = 0
        self._text_of = functools.lru_cache(4096)(functools.partial(token_text, llm.tokenizer))

    async def events(self) -> AsyncGenerator[bytes]:
        """From the request's beginning to its end. Raises the error that ended it."""
        request = self._request
        request.hear = self._hear_request
        yield _event("begin", self._beginning())
        self._begun_s = time.perf_counter()
        self._end_listening = self._llm.listen(self._hear_step, detail=True)
        try:
            self._llm.queue([request])
            while not self._is_over or self._steps:
                await self._news.wait()
                self._news.clear()
                self._is_rung = False
                if made := [self._described(self._steps.popleft()) for _ in range(len(self._steps))]:
                    yield b"".join(made)
                if not self._is_over:
                    await asyncio.sleep(FRAME_S)
        finally:
            self._end_listening()
            self._llm.end([request])
        if request.error is not None:
            raise request.error
        yield _event("end", self._ending())

    # ------------------------------------------------------------------------------------------ the engine's thread

    def _hear_step(self, report: StepReport) -> None:
        own = self._request.seq.id
        number = next((i for i, step in enumerate(report.sequences) if step.sequence_id == own), None)
        runs_prompt = report.num_prefill_tokens > 0 and self._request.report.num_steps == 0
        if number is not None or (runs_prompt and self._request.report.scheduled_at_s is not None):
            self._steps.append(_Step(time.perf_counter(), report, number))
            self._ring()

    def _hear_request(self, request: Request) -> None:
        if request.seq.finish_reason is not None:
            self._is_over = True
            self._end_listening()  # here, too: a viewer who reads slowly needs no more than what was noted
            self._is_rung = False
            self._ring()

    def _ring(self) -> None:
        """Wake the event loop, unless it has been and has not come yet."""
        if not self._is_rung:
            self._is_rung = True
            self._loop.call_soon_threadsafe(self._news.set)

    # --------------------------------------------------------------------------------------------- the event loop's

    def _beginning(self) -> dict[str, Any]:
        seq = self._request.seq
        return {
            "lane": self._name,
            "draft": seq.draft,
            "acceptance": seq.acceptance,
            "is_lossless": self._request.report.is_lossless,
            "temperature": seq.params.temperature,
            "spec_length": seq.params.spec_length,
            "max_tokens": seq.params.max_tokens,
            "seed": str(seq.seed),  # JavaScript's numbers have 53 bits
            "num_prompt_tokens": seq.num_prompt_tokens,
        }

    def _described(self, step: _Step) -> bytes:
        report = step.report
        self._last_s = step.at_s - self._begun_s
        common = {
            "lane": self._name,
            "at_s": round(self._last_s, 6),
            "seconds": {name: round(getattr(report, f"{name}_s"), 7) for name in PARTS},
            "num_rows": report.num_rows,
            "num_others": report.num_decoding - (step.number is not None),
        }
        if step.number is None:
            return _event("prompt", {**common, "num_tokens": report.num_prefill_tokens})
        own, detail = report.sequences[step.number], report.rounds[step.number]
        self._count(own, detail)
        passes = report.drafts.get(own.draft)
        left = self._request.seq.tokens[detail.position - 1]
        tokens = self._tokens(own.num_committed)
        so_far = {name: getattr(self._so_far, name) for name in (*COUNTS, *PER_POSITION, *RATES)}
        return _event(
            "round",
            {
                **common,
                "number": self._so_far.num_steps,
                "granted": detail.granted,
                "draft_depth": passes.depth if passes is not None and own.num_drafted else 0,
                "nodes": self._nodes(detail, left),
                "num_accepted": own.num_accepted,
                "tokens": tokens,
                "next_origin": _origin_of_next(own),
                "next": self._text_of(detail.next_token, self._before_next(detail, left)),
                "so_far": so_far,
                "num_tokens": self._num_tokens,
                "tokens_per_s": self._num_tokens / self._last_s,
            },
        )

    def _count(self, own: SequenceStep, detail: RoundDetail) -> None:
        """As the engine counts for the request's own report, which is further on already."""
        depth = 1 + max(depths_of(detail.parents), default=-1)
        self._so_far.count(own.num_drafted, depth, own.num_accepted, own.num_tested)

    def _nodes(self, detail: RoundDetail, left: int) -> list[dict[str, Any]]:
        """Every drafted token: how likely, what it was tested with, and what became of it."""
        tests = {test.node: test for test in detail.tests}
        tosses, accepted = coins_of(detail), set(detail.accepted)
        made = []
        for node, (token, parent) in enumerate(zip(detail.tokens, detail.parents, strict=True)):
            before = left if parent < 0 else detail.tokens[parent]
            test, toss = tests.get(node), tosses.get(node)
            is_rejected = test is not None and not test.accepted
            made.append(
                {
                    "text": self._text_of(token, before),
                    "parent": parent,
                    "draft_prob": _rounded(detail.draft_probs[node]),
                    "target_prob": _rounded(detail.target_probs[node]),
                    "chance": None if toss is None else _rounded(toss.prob),
                    "coin": None if toss is None else _rounded(toss.coin),
                    "verdict": "accepted" if node in accepted else "rejected" if is_rejected else "untested",
                }
            )
        return made

    def _before_next(self, detail: RoundDetail, left: int) -> int:
        return detail.tokens[detail.accepted[-1]] if detail.accepted else left

    def _tokens(self, num: int) -> list[dict[str, Any]]:
        """The next committed tokens; their texts joined are the output's."""
        request, start = self._request, self._num_tokens
        self._num_tokens += num
        first = request.seq.num_prompt_tokens
        ids = request.seq.tokens[first + start : first + self._num_tokens]
        made = []
        for place, token in enumerate(ids, start):
            made.append({"id": token, "text": self._piece(place, token), "origin": request.seq.origins[place]})
        return made

    def _piece(self, place: int, token: int) -> str:
        """The text that became final with a token. One that ended the output, other than by its length, has none."""
        seq = self._request.seq
        if seq.finish_reason == "stop" and place == seq.num_output_tokens - 1:
            return ""
        return self._detokenizer.push([token]).text

    def _ending(self) -> dict[str, Any]:
        output = self._request.output()
        report = output.report
        return {
            "lane": self._name,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "rest": self._detokenizer.finish(),  # characters whose last bytes never came
            "report": {name: getattr(report, name) for name in (*COUNTS, *PER_POSITION, *RATES, "is_lossless")},
            "seconds": self._last_s,
            "tokens_per_s": len(output.token_ids) / self._last_s if self._last_s else None,
        }
