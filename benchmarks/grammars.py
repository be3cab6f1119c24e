"""`benchmarks.grammars`: texts under grammars and beside them are plain decoding's, and what grammars take of a step.

Half of the prompts are questions whose answers are held to a schema of a tool, to an expression, to a choice or to
rules; the others have no grammar and run in the same batches. Half of each kind are greedy, the rest are sampled under
the rule `match`. All are answered without drafts, then with, and every text is compared, id by id.

Then schemas are answered one at a time, and every step's time in the grammar (masks, their use on rows, forced tokens,
ends) is compared with the whole step.

    python -m benchmarks.grammars --target TARGET.gguf --draft DRAFT.gguf
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer

import forerun.sampling.pipeline as pipeline
from benchmarks.start import start
from benchmarks.tool_questions import QUESTIONS, TOOLS
from forerun.bench.latency import heard
from forerun.bench.results import print_ceiling
from forerun.bench.tables import Column, table
from forerun.cli.bench import JsonFile, keep
from forerun.engine.llm import LLM
from forerun.sampling.grammar import GrammarState
from forerun.text.terminal import make_console
from forerun.types import SamplingParams

PLAIN = "none"
OTHERS: tuple[dict[str, Any], ...] = (
    {"regex": r"[A-Z][a-z ]{10,60}\. (Yes|No)\."},
    {"choice": ["yes, at once", "yes, but not today", "no", "not with the functions that are given"]},
    {"grammar": 'start: "1. " line ("\\n" /[2-9]/ ". " line)+\nline: /[^\\n]{5,60}/'},
)


@dataclass(frozen=True)
class Same:
    """How many texts of one kind are plain decoding's. accepted: of the drafted tokens."""

    kind: str
    num_texts: int
    num_same: int
    num_tokens: int
    accepted: float


@dataclass(frozen=True)
class Share:
    """What grammars take of the steps of one way to draft, in percent."""

    draft: str
    whitespace: str
    num_steps: int
    step_ms: float
    percent: float
    p99_percent: float
    most_percent: float


SAME = (
    Column("requests", "kind"),
    Column("texts", "num_texts"),
    Column("as plain", "num_same"),
    Column("tokens", "num_tokens"),
    Column("accepted", "accepted", "{:.2f}"),
)
SHARES = (
    Column("draft", "draft"),
    Column("blanks", "whitespace"),
    Column("steps", "num_steps"),
    Column("step\nms", "step_ms", "{:.1f}"),
    Column("grammar\n%", "percent", "{:.2f}"),
    Column("p99\n%", "p99_percent", "{:.1f}"),
    Column("most\n%", "most_percent", "{:.1f}"),
)


def schemas_of(number: int) -> tuple[dict[str, Any], ...]:
    """The parameters of the tools of one question."""
    return tuple(tool["function"]["parameters"] for tool in TOOLS[QUESTIONS[number].tools])


def mixed(num: int, max_tokens: int) -> tuple[list[str], list[SamplingParams], list[str]]:
    """Return prompts, their parameters, and of which kind each is."""
    prompts, params, kinds = list[str](), list[SamplingParams](), list[str]()
    for i in range(num):
        question = i // 4 % len(QUESTIONS)
        held, is_greedy = i % 2 == 0, i // 2 % 2 == 0
        own: dict[str, Any] = {}
        if held:
            schemas, turn = schemas_of(question), i // 4
            own = OTHERS[turn // 4 % len(OTHERS)] if turn % 4 == 3 else {"json_schema": schemas[turn % len(schemas)]}
        way: dict[str, Any] = {"temperature": 0.0} if is_greedy else {"temperature": 0.8, "acceptance": "match"}
        prompts.append(f"{QUESTIONS[question].text} (case {i})")
        params.append(SamplingParams(max_tokens=max_tokens, seed=i, **own, **way))
        kinds.append(f"{'under a grammar' if held else 'without one'}, {'greedy' if is_greedy else 'match'}")
    return prompts, params, kinds


def compare(llm: LLM, num: int, max_tokens: int) -> list[Same]:
    """Answer mixed batches with and without drafts. Returns a line for each kind."""
    prompts, params, kinds = mixed(num, max_tokens)
    plain = llm.generate(prompts, [replace(one, draft=PLAIN) for one in params])
    drafted = llm.generate(prompts, params)
    lines = []
    for kind in sorted(set(kinds)):
        own = [(a, b) for a, b, of in zip(plain, drafted, kinds, strict=True) if of == kind]
        lines.append(
            Same(
                kind,
                len(own),
                sum((a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason) for a, b in own),
                sum(len(b.token_ids) for _, b in own),
                sum(b.report.num_accepted for _, b in own) / max(1, sum(b.report.num_drafted for _, b in own)),
            )
        )
    return lines


@contextmanager
def counted() -> Iterator[list[float]]:
    """Yield a list whose only number is the seconds that grammars took until now."""
    seconds = [0.0]

    def timed(called: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return called(*given, **named)
            finally:
                seconds[0] += time.perf_counter() - began

        return call

    places = [(pipeline, "masked"), *((GrammarState, name) for name in ("allowed", "takes", "is_over", "forced"))]
    with ExitStack() as stack:
        for place, name in places:
            stack.enter_context(patch.object(place, name, timed(getattr(place, name))))
        yield seconds


def share(llm: LLM, draft: str | None, whitespace: str, num: int, max_tokens: int) -> Share:
    """Answer questions one at a time under the schema of a tool, and time the steps behind their prompts."""
    rows = list[tuple[float, float]]()
    with counted() as seconds:

        def hear(step: Any) -> None:
            if step.num_decoding and not step.num_prefill_tokens:
                rows.append((seconds[0], step.seconds))
            seconds[0] = 0.0

        with heard(llm, hear):
            for i in range(num):
                schema = {"anyOf": list(schemas_of(i % len(QUESTIONS)))}
                held: dict[str, Any] = {"json_schema": schema, "json_whitespace": whitespace}
                params = SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=i, draft=draft, **held)
                llm.generate(QUESTIONS[i % len(QUESTIONS)].text, params)
    taken, whole = np.array(rows).T
    each = 100 * taken / whole
    return Share(
        "default" if draft is None else draft,
        whitespace,
        len(rows),
        float(1000 * whole.mean()),
        float(100 * taken.sum() / whole.sum()),
        float(np.percentile(each, 99)),
        float(each.max()),
    )


def grammars(
    target: Annotated[str, typer.Option(help="checkpoint with a chat template")],
    draft: Annotated[str, typer.Option(help="draft model, or a drafter without one")] = "auto",
    num: Annotated[int, typer.Option(help="prompts that are compared", min=4)] = 300,
    num_timed: Annotated[int, typer.Option(help="questions that are timed, each way", min=1, max=len(QUESTIONS))] = 8,
    max_tokens: Annotated[int, typer.Option(help="of an answer at most", min=1)] = 64,
    json_file: JsonFile = None,
) -> None:
    """Compare texts in mixed batches with plain decoding's, and say what grammars take of a step."""
    console = make_console()
    with LLM(target, draft=draft) as llm:
        ceiling = print_ceiling(llm.checkpoint.model, console)
        same = compare(llm, num, max_tokens)
        console.print(table(same, SAME))
        ways = [(d, blanks) for blanks in ("free", "spaced") for d in (PLAIN, None)]
        shares = [share(llm, d, blanks, num_timed, max_tokens) for d, blanks in ways]
        console.print(table(shares, SHARES))
    record = {"bench": "grammars", "target": target, "draft": draft, "ceiling": asdict(ceiling)}
    keep(record | {"same": [asdict(one) for one in same], "shares": [asdict(one) for one in shares]}, json_file)


if __name__ == "__main__":
    start(grammars)
