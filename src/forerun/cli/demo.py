"""`forerun demo` lets a model write the same texts once plainly and once with speculation, and compares the times.

A chat model edits a text, where drafts from the text itself pay, and answers a question, where they pay little. The
model that ships with the package writes code; it is widened to a size at which most of the time goes into reading its
weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from forerun.bench.widen import PROMPTS, load_widened, measured_target
from forerun.cli.show import LiveText, watched
from forerun.cli.words import percent
from forerun.config import EngineConfig
from forerun.engine.factory import is_shipped, refuse_without_template
from forerun.engine.llm import LLM
from forerun.engine.request import RequestOutput
from forerun.errors import NotFound
from forerun.models.named import find
from forerun.text.terminal import has_colour, make_console
from forerun.types import SamplingParams

WARM_UP_TOKENS = 4
FALLBACK_PROMPT = 'class Stack:\n    """A last-in first-out container."""\n\n    def __init__(self):\n'


@dataclass(frozen=True)
class Scene:
    """One text that is written twice. asked: what the reader sees of the prompt. is_chat: whether it is a message."""

    title: str
    asked: str
    is_chat: bool


QUESTION = Scene("a question, whose answer repeats little: drafting pays little", "What is a prime number?", True)
EDIT = Scene(
    "an edit, whose text is known for the most part: here drafting pays",
    '''\
Rename this class to Pile:

```python
class Stack:
    """A last-in first-out container."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def peek(self):
        return self.items[-1]

    def __len__(self):
        return len(self.items)
```''',
    is_chat=True,
)


@dataclass(frozen=True)
class Outcome:
    """The result of one run, with the seconds from the prompt to the last token."""

    seconds: float
    output: RequestOutput

    @property
    def tokens_per_s(self) -> float:
        return len(self.output.token_ids) / self.seconds


def run(config: EngineConfig, params: SamplingParams, shape: str | None, prompt: str | None) -> None:
    """Show each scene twice on standard output, and what each took. Raises UserError."""
    console = make_console()
    shape = shape or ("demo" if is_shipped(config.target) else "none")
    config = measured_target(config, shape)
    scenes = _scenes(config, prompt)
    if (shown := find(config.target)) is not None:
        console.print(f"{shown.name}: {shown.about}", style="bold")
    checkpoint = load_widened(config, shape, console)
    options = {**config.options(), "prefix_caching": False}  # the warm-up must not shorten what is shown
    plain, fast = (LLM(checkpoint, **{**options, "draft": draft}) for draft in ("none", _draft(config)))
    for number, scene in enumerate(scenes, 1):
        head = f"{number}. {scene.title}" if len(scenes) > 1 else scene.title
        console.print(f"\n=== {head} ===\n", style="bold")
        if scene.is_chat:
            console.print(scene.asked, style="dim")
        outcomes = []
        for llm, title in ((plain, "plain decoding"), (fast, "with speculation")):
            ids = _encoded(llm, scene)
            _warm_up(llm, ids, params)
            console.print(f"\n--- {title} ---", style="bold")
            outcomes.append(_live(llm, ids, params, console, "" if scene.is_chat else scene.asked))
        if number == 1 and has_colour(console):
            console.print("green: drafted and accepted; blue: the target's own correction or bonus", style="dim")
        console.print()
        console.print(_table(*outcomes))
        console.print(verdict(outcomes[0].output, outcomes[1].output, params, plain))
    _your_own_model(console)


def _scenes(config: EngineConfig, prompt: str | None) -> list[Scene]:
    """What is shown: of a chat model an edit and a question, of others a text that they continue, or the user's own."""
    is_chat = not is_shipped(config.target)
    try:
        if is_chat:
            refuse_without_template(config)
    except NotFound:
        is_chat = False
    if prompt is not None:
        return [Scene("your prompt", prompt, is_chat)]
    return [EDIT, QUESTION] if is_chat else [Scene("a piece of code", default_prompt(), is_chat=False)]


def _encoded(llm: LLM, scene: Scene) -> list[int]:
    if not scene.is_chat:
        return llm.tokenizer.encode(scene.asked)
    return llm.apply_chat_template([{"role": "user", "content": scene.asked}])


def default_prompt() -> str:
    """Return the first held-out prompt, which the shipped models have never seen."""
    if not PROMPTS.is_file():
        return FALLBACK_PROMPT
    return str(json.loads(PROMPTS.read_text(encoding="utf-8").splitlines()[0])["text"])


def verdict(plain: RequestOutput, fast: RequestOutput, params: SamplingParams, llm: LLM) -> str:
    """Say whether both texts are identical, and for which mode, weights, device and build that holds."""
    model = llm.checkpoint.model
    rule = "greedy" if params.greedy else f"{params.acceptance or 'match'}, temperature {params.temperature}"
    mode = f"{rule}; {model.precision} on {model.device}; {model.ops.build}"
    if plain.token_ids == fast.token_ids:
        return f"identical: yes, all {len(plain.token_ids)} tokens ({mode})"
    pairs = zip(plain.token_ids, fast.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain.token_ids), len(fast.token_ids)))
    near_tie = "not certified here as a near tie, which is what `make parity` does"
    why = "ratio draws other coins" if not params.greedy and params.acceptance == "ratio" else near_tie
    return (
        f"identical: no, token {at + 1} of {len(plain.token_ids)} differs first: {why}, see docs/exactness.md ({mode})"
    )


def _draft(config: EngineConfig) -> str:
    return "auto" if config.draft == "none" else config.draft


def _warm_up(llm: LLM, ids: Seq[int], params: SamplingParams) -> None:
    """Run the prompt once before the clock starts, because a first run pays for page faults and choosing kernels."""
    llm.generate(list(ids), SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=params.temperature, seed=0))


def _live(llm: LLM, ids: Seq[int], params: SamplingParams, console: Console, beginning: str) -> Outcome:
    live = LiveText(llm.tokenizer, console, ids)
    live.write(beginning, "dim")
    start, output = time.perf_counter(), None
    try:
        for chunk in watched(llm, ids, params, live):
            output = chunk.output or output
        seconds = time.perf_counter() - start
    finally:
        live.finish()
    assert output is not None
    return Outcome(seconds, output)


def _table(plain: Outcome, fast: Outcome) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "tokens", "seconds", "tokens/s", "speed-up", "acceptance rate", "tokens/pass"):
        table.add_column(name, justify="left" if name == "" else "right")
    for name, outcome in (("plain", plain), ("speculative", fast)):
        report = outcome.output.report
        table.add_row(
            name,
            str(len(outcome.output.token_ids)),
            f"{outcome.seconds:.2f}",
            f"{outcome.tokens_per_s:.1f}",
            f"{outcome.tokens_per_s / plain.tokens_per_s:.2f}x",
            "-" if report.acceptance_rate is None else percent(report.acceptance_rate),
            "-" if report.mean_accepted_length is None else f"{report.mean_accepted_length:.2f}",
        )
    return table


def _your_own_model(console: Console) -> None:
    console.print("\nWith a model of your own (a folder, a GGUF file, or org/name of the hub):", style="bold")
    console.print("  forerun chat ./model.gguf")
    console.print('  forerun generate --target ./model --draft ./small-model --rounds "def fib(n):"')
    console.print("  forerun bench latency --target ./model --draft ./small-model")
