"""The rounds of one watched request as server-sent events, while the engine keeps running.

The engine's thread only notes the reports of the request's steps. Once per frame, the event loop turns the noted
reports into events. After each event it lets other threads run, because computing threads must not wait long for the
writing of JSON. When the request ends, its listener is removed. Closing the stream ends the request.

begin   the request's parameters
prompt  a part of the prompt was run
round   one target pass: drafted nodes, coins, verdict, tokens, seconds
counts  the counts so far, once per frame
end     the text, and the request's own report
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from forerun.engine.llm import LLM
from forerun.engine.request import Request, RequestReport
from forerun.text.detokenizer import Detokenizer
from forerun.text.tokenizer import Tokenizer, token_text
from forerun.types import RoundDetail, SequenceStep, StepReport, Toss

FRAME_S = 1 / 30
COUNTS = ("num_steps", "num_drafted", "num_tested", "num_accepted", "num_emitted")
PER_POSITION = ("drafted_per_position", "accepted_per_position")
RATES = ("acceptance_rate", "alpha_hat", "mean_accepted_length")
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event as bytes. data: the JSON object of the event."""
    return f"event: {name}\ndata: {_ENCODER.encode(data)}\n\n".encode()


def coins_of(detail: RoundDetail) -> dict[int, Toss]:
    """Return the coin toss of each tested node; {} if the rule's coins do not belong to single nodes of the tree."""
    depths = depths_of(detail.parents)
    if depths == list(range(len(depths))):  # a chain
        return {toss.depth: toss for toss in detail.tosses}
    pairs = list(zip(detail.tests, detail.tosses, strict=False))
    is_one_each = len(detail.tests) == len(detail.tosses)
    fit = all(depths[t.node] == toss.depth and t.accepted == toss.is_accepted for t, toss in pairs)
    return {test.node: toss for test, toss in pairs} if is_one_each and fit else {}


def depths_of(parents: Seq[int]) -> list[int]:
    """Return the depth of each node: the number of its ancestors. parents: the parent of each node; -1 = none."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


@dataclass(frozen=True)
class _Step:
    """An engine step that ran tokens of the request.

    at_s: when the report came, in seconds of time.perf_counter. number: the request's index among the sequences of the
    report; None = the step only ran a part of the prompt.
    """

    at_s: float
    report: StepReport
    number: int | None


class Watch:
    """The events of one request. lane: the name of the request's lane on the page. request: a request not queued yet.

    A Watch belongs to the event loop in which it is created.
    """

    def __init__(self, llm: LLM, lane: str, request: Request) -> None:
        self._llm, self._lane, self._request = llm, lane, request
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._steps: deque[_Step] = deque()
        self._is_over, self._is_rung = False, False
        self._end_listening: Callable[[], None] = lambda: None
        self._begun_s = self._prompt_s = self._last_s = 0.0  # the last two count from the first
        self._so_far = RequestReport()
        self._num_tokens = 0
        self._num_others = 0
        self._detokenizer = Detokenizer(llm.tokenizer, request.seq.tokens[: request.seq.num_prompt_tokens])

    async def events(self) -> AsyncGenerator[bytes]:
        """Queue the request, and yield its events until it ends. Raises the error that ended the request."""
        request = self._request
        request.hear = self._hear_request
        yield event("begin", self._beginning())
        self._begun_s = time.perf_counter()
        self._end_listening = self._llm.listen(self._hear_step, detail=True)
        try:
            self._llm.queue([request])
            while not self._is_over or self._steps:
                await self._news.wait()
                self._news.clear()
                self._is_rung = False
                if frame := self._frame():
                    yield frame
                if not self._is_over:
                    await asyncio.sleep(FRAME_S)
        finally:
            self._end_listening()
            self._llm.end([request])
        if request.error is not None:
            raise request.error
        yield event("end", self._ending())

    # ------------------------------------------------------------------------------------------ the engine's thread

    def _hear_step(self, report: StepReport) -> None:
        request = self._request
        number = next((i for i, step in enumerate(report.sequences) if step.sequence_id == request.seq.id), None)
        if number is None and not (
            report.num_prefill_tokens and not request.report.num_steps and request.report.scheduled_at_s is not None
        ):
            return
        self._steps.append(_Step(time.perf_counter(), report, number))
        self._ring()

    def _hear_request(self, request: Request) -> None:
        if request.seq.finish_reason is not None:
            self._is_over = True
            self._end_listening()  # here, too: a slow viewer needs no later steps
            self._is_rung = False
            self._ring()

    def _ring(self) -> None:
        """Wake the event loop, unless a wake-up is pending."""
        if not self._is_rung:
            self._is_rung = True
            self._loop.call_soon_threadsafe(self._news.set)

    # --------------------------------------------------------------------------------------------- the event loop's

    def _frame(self) -> bytes:
        """Return the events since the last frame; b"" if there are none."""
        events = []
        for _ in range(
            len(self._steps)
        ):  # leave out steps that come meanwhile, or a busy machine would see no frame end
            step = self._steps.popleft()
            events.append(self._prompt_part(step) if step.number is None else self._round(step, step.number))
            time.sleep(0)
        if self._num_tokens and events:
            events.append(event("counts", self._counts()))
        return b"".join(events)

    def _beginning(self) -> dict[str, Any]:
        seq = self._request.seq
        return {
            "lane": self._lane,
            "draft": seq.draft,
            "acceptance": seq.acceptance,
            "is_lossless": self._request.report.is_lossless,
            "temperature": seq.params.temperature,
            "spec_length": seq.params.spec_length,
            "max_tokens": seq.params.max_tokens,
            "seed": str(seq.seed),  # JavaScript's numbers have 53 bits
            "num_prompt_tokens": seq.num_prompt_tokens,
        }

    def _common(self, step: _Step) -> dict[str, Any]:
        report = step.report
        self._last_s = step.at_s - self._begun_s
        self._num_others = max(self._num_others, report.num_decoding - (step.number is not None))
        return {
            "lane": self._lane,
            "at_s": self._last_s,
            "seconds": {
                "schedule": report.schedule_s,
                "draft": report.draft_s,
                "score": report.score_s,
                "judge": report.judge_s,
                "commit": report.commit_s,
            },
        }

    def _prompt_part(self, step: _Step) -> bytes:
        data = {**self._common(step), "num_tokens": step.report.num_prefill_tokens}
        self._prompt_s = self._last_s
        return event("prompt", data)

    def _round(self, step: _Step, number: int) -> bytes:
        counted, detail = step.report.sequences[number], step.report.rounds[number]
        depth = 1 + max(depths_of(detail.parents), default=-1)
        num_rows = 1 + counted.num_drafted  # the request's report is already further on
        self._so_far.count(counted.num_drafted, depth, counted.num_accepted, counted.num_tested, num_rows)
        passes = step.report.drafts.get(counted.draft)
        left = self._request.seq.tokens[detail.position - 1]
        tip = detail.tokens[detail.accepted[-1]] if detail.accepted else left
        return event(
            "round",
            {
                **self._common(step),
                "number": self._so_far.num_steps,
                "granted": detail.granted,
                "draft_depth": passes.depth if passes is not None and counted.num_drafted else 0,
                "nodes": self._nodes(detail, left) if detail.tokens else [],
                "num_accepted": counted.num_accepted,
                "tokens": self._tokens(counted.num_committed),
                "next": _text_of(self._llm.tokenizer, detail.next_token, tip),
                "next_origin": _origin_of_next(counted),
            },
        )

    def _nodes(self, detail: RoundDetail, left: int) -> list[dict[str, Any]]:
        """Return every drafted token with its probabilities, coin and verdict. left: the token before the draft."""
        tests = {test.node: test.accepted for test in detail.tests}
        tosses, accepted = coins_of(detail), set(detail.accepted)
        nodes = []
        for node, (token, parent) in enumerate(zip(detail.tokens, detail.parents, strict=True)):
            toss = tosses.get(node)
            is_rejected = not tests.get(node, True)
            nodes.append(
                {
                    "text": _text_of(self._llm.tokenizer, token, left if parent < 0 else detail.tokens[parent]),
                    "parent": parent,
                    "draft_prob": _rounded(detail.draft_probs[node]),
                    "target_prob": _rounded(detail.target_probs[node]),
                    "chance": None if toss is None else _rounded(toss.prob),
                    "coin": None if toss is None else toss.coin,
                    "verdict": "accepted" if node in accepted else "rejected" if is_rejected else "untested",
                }
            )
        return nodes

    def _tokens(self, num: int) -> list[dict[str, Any]]:
        """Return the next `num` committed tokens with their texts.

        Together the texts are the output's text, except for an incomplete character at its end.
        """
        seq, start = self._request.seq, self._num_tokens
        self._num_tokens += num
        tokens = []
        for place in range(start, start + num):
            token = seq.tokens[seq.num_prompt_tokens + place]
            # A token that stops the output has no text.
            is_end = seq.finish_reason == "stop" and place == seq.num_output_tokens - 1
            text = "" if is_end else self._detokenizer.push([token]).text
            tokens.append({"id": token, "text": text, "origin": seq.origins[place]})
        return tokens

    def _counts(self) -> dict[str, Any]:
        return {
            "lane": self._lane,
            "so_far": {name: getattr(self._so_far, name) for name in (*COUNTS, *PER_POSITION, *RATES)},
            "tokens_per_s": self._num_tokens / self._last_s,
            "num_others": self._num_others,
        }

    def _ending(self) -> dict[str, Any]:
        output = self._request.output()
        num, report = len(output.token_ids), output.report
        return {
            "lane": self._lane,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "rest": self._detokenizer.finish(),  # a character whose last bytes never came
            "report": {name: getattr(report, name) for name in (*COUNTS, *PER_POSITION, *RATES, "is_lossless")},
            "seconds": self._last_s,
            "prompt_s": self._prompt_s,
            "tokens_per_s": num / self._last_s if num else None,
            "num_others": self._num_others,
        }


@functools.lru_cache(1 << 16)
def _text_of(tokenizer: Tokenizer, token: int, left: int) -> str:
    """Return the text of a token that follows the token `left`. Texts are cached, because most pairs recur."""
    return token_text(tokenizer, token, left)


def _origin_of_next(step: SequenceStep) -> str:
    """Return the origin of the token that the target adds at the end of a round: plain, bonus or correction.

    A stop condition may cut that token off.
    """
    if not step.num_drafted:
        return "plain"
    return "bonus" if step.num_accepted == step.num_tested else "correction"


def _rounded(prob: float | None) -> float | None:
    """Round a probability to six decimal places. Probabilities up to 0.001 are rounded to five significant digits."""
    if prob is None or prob in (0.0, 1.0):
        return prob
    return round(prob, 6) if prob > 1e-3 else float(f"{prob:.5g}")
