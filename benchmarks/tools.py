"""`benchmarks.tools`: 40 questions for tools, answered by calls that a grammar keeps valid, with and without drafts.

Each question is answered in several ways, in turns: by the masked plain decoder, with what the grammar forces alone,
with the draft model or lookup alone, and with both together. All of them say the same text, which is checked. Each way
has an engine of its own, which has seen its own answers alone. Prompts are in the cache before anything is timed, so
the times are those of the answers.

    python -m benchmarks.tools --target TARGET.gguf --draft DRAFT.gguf
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import jsonschema
import typer
from rich.console import Console

from benchmarks.start import start
from benchmarks.tool_questions import QUESTIONS, TOOLS, Question
from forerun.bench.latency import heard, rotated
from forerun.bench.results import print_ceiling
from forerun.bench.tables import Column, Ratio, table
from forerun.cli.bench import JsonFile, keep
from forerun.engine.llm import LLM
from forerun.text.terminal import make_console
from forerun.types import FORCED, SamplingParams

PLAIN = "none"


@dataclass(frozen=True)
class Answer:
    """One question answered in one way. function: the one that is called; None where the call is not valid."""

    question: int
    way: str
    seconds: float
    num_tokens: int
    num_steps: int
    function: str | None
    text: str


@dataclass(frozen=True)
class Line:
    """One way to answer. over_plain: of tokens per second; right: calls of the function that answers the question."""

    way: str
    tokens_per_s: float
    over_plain: Ratio
    tokens_per_step: float
    num_valid: int
    num_right: int
    num_same: int


COLUMNS = (
    Column("way", "way"),
    Column("tokens/s", "tokens_per_s", "{:.1f}"),
    Column("over plain\nmedian", "over_plain.median", "{:.2f}"),
    Column("\nrange", "over_plain.range", "{:.2f}"),
    Column("tokens\n/step", "tokens_per_step", "{:.2f}"),
    Column("valid", "num_valid"),
    Column("right\nfunction", "num_right"),
    Column("as plain", "num_same"),
)


def answer(llm: LLM, number: int, question: Question, way: str, max_tokens: int) -> Answer:
    """Ask, and look at what was called."""
    tools = TOOLS[question.tools]
    messages = [{"role": "user", "content": question.text}]
    params = SamplingParams(max_tokens=max_tokens, temperature=0, draft=None if way == "both" else way)
    steps = 0

    def count(_: Any) -> None:
        nonlocal steps
        steps += 1

    with heard(llm, count):
        began = time.perf_counter()
        (out,) = llm.chat(messages, params, tools=tools, tool_choice="required", parallel_tool_calls=False)
        seconds = time.perf_counter() - began
    function = None
    if len(out.tool_calls) == 1:
        name, arguments = out.tool_calls[0].name, out.tool_calls[0].arguments
        (schema,) = [tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == name]
        if jsonschema.Draft202012Validator(schema).is_valid(json.loads(arguments)):
            function = name
    return Answer(number, way, seconds, len(out.token_ids), steps, function, out.text)


def line_of(way: str, answers: Mapping[tuple[int, str], Answer], num: int) -> Line:
    """Return what all answers of one way say together."""
    own = [answers[i, way] for i in range(num)]
    plain = [answers[i, PLAIN] for i in range(num)]
    ratios = [p.seconds / a.seconds * a.num_tokens / p.num_tokens for a, p in zip(own, plain, strict=True)]
    num_tokens = sum(a.num_tokens for a in own)
    return Line(
        way,
        num_tokens / sum(a.seconds for a in own),
        Ratio.of(ratios),
        num_tokens / sum(a.num_steps for a in own),
        sum(a.function is not None for a in own),
        sum(a.function == QUESTIONS[i].function for i, a in enumerate(own)),
        sum(a.text == p.text for a, p in zip(own, plain, strict=True)),
    )


def tools(
    target: Annotated[str, typer.Option(help="checkpoint whose chat template knows tools")],
    draft: Annotated[str | None, typer.Option(help="draft model; none = lookup", show_default=False)] = None,
    num: Annotated[int, typer.Option(help="questions", min=1, max=len(QUESTIONS))] = len(QUESTIONS),
    max_tokens: Annotated[int, typer.Option(help="of an answer at most", min=16)] = 200,
    json_file: JsonFile = None,
) -> None:
    """Answer questions by valid calls of tools, and compare ways to draft for them."""
    console: Console = make_console()
    drafter = "lookup" if draft is None else "model"
    drafts = {PLAIN: PLAIN, FORCED: FORCED, drafter: draft or drafter, "both": draft or drafter}
    llms = {way: LLM(target, draft=own, max_seq_len=4096, max_batch_size=1) for way, own in drafts.items()}
    for llm in llms.values():
        llm.measure_passes()
    del llms[drafter].engine.drafter.members[FORCED]  # else it goes before, by default
    ways = tuple(llms)
    ceiling = print_ceiling(llms[PLAIN].checkpoint.model, console)
    answers: dict[tuple[int, str], Answer] = {}
    for i, question in enumerate(QUESTIONS[:num]):
        for way in ways:  # prompts into the caches
            answer(llms[way], i, question, way, 1)
        for way in rotated(ways, i):
            answers[i, way] = answer(llms[way], i, question, way, max_tokens)
    lines = [line_of(way, answers, num) for way in ways]
    console.print(table(lines, COLUMNS))
    both, alone = (next(line for line in lines if line.way == way) for way in ("both", drafter))
    console.print(f"both over {drafter} alone: {both.tokens_per_s / alone.tokens_per_s:.2f} in tokens/s")
    record = {"bench": "tools", "target": target, "draft": draft, "ceiling": asdict(ceiling)}
    keep(
        record | {"lines": [asdict(line) for line in lines], "answers": [asdict(a) for a in answers.values()]},
        json_file,
    )


if __name__ == "__main__":
    start(tools)
