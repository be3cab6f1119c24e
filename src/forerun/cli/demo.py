"""`forerun demo` lets a model write the same texts once plainly and once with speculation, and compares the times.

A chat model edits a text, and answers a question. Drafts from the text itself make the edit much faster, and the answer
only a little. The model that ships with the package writes code. It is widened to a size at which most of the time goes
into reading its weights. With --pair, the target and the draft are two published models, which write texts of four
kinds of work.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean

from rich.console import Console
from rich.table import Table

from forerun.bench.methods import read_work
from forerun.bench.other_programs import ProcessorTimes
from forerun.bench.plans import MethodsPlan
from forerun.bench.widen import PROMPTS, load_widened, measured_target
from forerun.cli.show import LiveText, watched
from forerun.cli.waiting import Answering
from forerun.cli.words import percent
from forerun.config import EngineConfig
from forerun.engine.llm import LLM
from forerun.engine.opened import Opened, is_shipped
from forerun.engine.request import RequestOutput
from forerun.errors import NotFound, UserError, program
from forerun.models.hub import locate
from forerun.models.hub_errors import is_unreachable
from forerun.models.named import find, named_models, there
from forerun.text.detokenizer import num_common
from forerun.text.terminal import has_colour, make_console
from forerun.text.waiting import Waiting
from forerun.types import SamplingParams, StepReport

WARM_UP_TOKENS = 4
FALLBACK_PROMPT = 'class Stack:\n    """A last-in first-out container."""\n\n    def __init__(self):\n'


@dataclass(frozen=True)
class Scene:
    """A prompt that the model answers twice: once with plain decoding, and once with speculation.

    asked: the prompt, as it is shown. is_chat: whether `asked` is a chat message; if not, the model continues it.
    """

    title: str
    asked: str
    is_chat: bool


QUESTION = Scene("a question, whose answer repeats little", "What is a prime number?", True)
EDIT = Scene(
    "an edit, whose text is known for the most part",
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


PAIR = ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b")  # target and draft, names of data/models.toml
PAIR_TYPE = "q4_k_m"
PAIR_FOLDER = "FORERUN_PAIR"  # the variable that names the folder of the files
PAIR_KINDS = {  # kinds of data/work.jsonl; the kind for which drafting pays most comes first
    "edit": "an edit of code, whose text is known for the most part",
    "question": "a question about a text, whose words return",
    "chat": "ordinary chat, which repeats little",
    "story": "a story, which repeats nothing",
}
SHOWN_CHARACTERS = 400  # of a long prompt, half of them from its end


@dataclass(frozen=True)
class Outcome:
    """The output of one answer, and the seconds from the prompt to the last token."""

    seconds: float
    output: RequestOutput

    @property
    def tokens_per_s(self) -> float:
        return len(self.output.token_ids) / self.seconds

    @property
    def behind_first_per_s(self) -> float | None:
        """The tokens per second after the first token, so without the prompt's time. None without a second token."""
        report = self.output.report
        if report.first_token_at_s is None or report.last_token_at_s is None:
            return None
        seconds = report.last_token_at_s - report.first_token_at_s
        return (len(self.output.token_ids) - 1) / seconds if seconds > 0 else None


def run(
    config: EngineConfig, params: SamplingParams, shape: str | None, prompt: str | None, *, is_pair: bool = False
) -> None:
    """Write the answer to each scene's prompt to standard output, once with plain decoding and once with speculation.

    Prints how long each answer took. shape: the shape that the target is widened to; none = not widened, None = the
    default. prompt: the only prompt; None = the demo's prompts. is_pair: whether to use prompts of four kinds of work,
    and the models of PAIR where `config` names no target. Raises UserError.
    """
    console = make_console()
    if is_pair:
        config = of_pair(config)
    shape = shape or ("demo" if is_shipped(config.target) else "none")
    opened = measured_target(config, shape)
    config = opened.config
    scenes = _work(opened) if is_pair and prompt is None else _scenes(opened, prompt)
    if (shown := find(config.target)) is not None:
        console.print(f"{shown.name}: {shown.about}", style="bold")
    checkpoint = load_widened(opened, shape, console)
    options = {**config.options(), "prefix_caching": False}  # the warm-up must not shorten the shown runs
    drafts = ("none", "auto" if config.draft == "none" else config.draft)
    with Waiting("loading the drafter"):
        plain, fast = (LLM(checkpoint, **{**options, "draft": draft}) for draft in drafts)
    if is_pair:
        console.print(f"draft: {Path(fast.config.draft).name if there(fast.config.draft) else fast.config.draft}")
    with Waiting("warming up"):
        for llm in (plain, fast):
            _warm_up(llm, _encoded(llm, scenes[0]), params)
    shown_outcomes, begun = [], ProcessorTimes.now()
    for number, scene in enumerate(scenes, 1):
        head = f"{number}. {scene.title}" if len(scenes) > 1 else scene.title
        console.print(f"\n=== {head} ===\n", style="bold")
        if scene.is_chat:
            console.print(_shortened(scene.asked), style="dim", markup=False, highlight=False)
        outcomes = []
        for llm, title in ((plain, "plain decoding"), (fast, "with speculation")):
            ids = _encoded(llm, scene)
            console.print(f"\n--- {title} ---", style="bold")
            outcomes.append(_live(llm, ids, params, console, "" if scene.is_chat else scene.asked))
        if number == 1 and has_colour(console):
            console.print("green: drafted and accepted; blue: the target's own correction or bonus", style="dim")
        console.print()
        console.print(_table(*outcomes))
        console.print(verdict(outcomes[0].output, outcomes[1].output, params, plain))
        shown_outcomes.append(outcomes)
    if is_pair and len(scenes) > 1:
        console.print("\n=== All of them ===\n", style="bold")
        console.print(_summary(scenes, shown_outcomes))
    ended = ProcessorTimes.now()
    if begun is not None and ended is not None and (remark := ended.remark_since(begun)) is not None:
        console.print(f"\n{remark}")
    _your_own_model(console, is_pair)


def of_pair(config: EngineConfig) -> EngineConfig:
    """Return the configuration. If it names no target, make the models of PAIR its target and its draft model.

    A draft model that the configuration names stays. The models' files come from the folder that FORERUN_PAIR names.
    Without such a folder they come from the hub's cache, or are fetched. Raises UserError where a file cannot be had;
    the error says how to get it.
    """
    if config.target is not None:
        return config
    folder = os.environ.get(PAIR_FOLDER) or None
    config = replace(config, target=_place(PAIR[0], folder))
    return config if config.draft != "auto" else replace(config, draft=_place(PAIR[1], folder))


def _place(name: str, folder: str | None) -> str:
    if folder is not None:
        places = sorted(Path(folder).expanduser().glob("*.gguf"))
        matches = [place for place in places if place.name.lower().startswith(name)]
        if not matches:
            raise NotFound(f"{PAIR_FOLDER}={folder} is no folder with a file {name}*.gguf: {_how_to_get_pair()}")
        return str(min(matches, key=lambda place: PAIR_TYPE not in place.name.lower()))
    try:
        return str(locate(name))
    except UserError as error:
        if error.__cause__ is None or not is_unreachable(error.__cause__):
            raise
        raise NotFound(f"the pair is not here, and the hub cannot be asked: {_how_to_get_pair()}") from error


def _how_to_get_pair() -> str:
    commands = [
        f"`{program('hf')} download {named_models()[name].repository} --include '*{PAIR_TYPE}.gguf' --local-dir pair` "
        f"({named_models()[name].num_bytes / 1e9:.1f} GB)"
        for name in PAIR
    ]
    return (
        f"where there is a network, {' and '.join(commands)} bring it, and {PAIR_FOLDER}=pair names that folder; or "
        "name two files with --target and --draft"
    )


def _work(opened: Opened) -> list[Scene]:
    """Return a scene for each kind of PAIR_KINDS. Its prompt is the first prompt of the kind with a single message.

    Raises NotFound for a model that does not chat.
    """
    _ = opened.chat_template
    prompts = read_work(
        MethodsPlan(kinds=tuple(PAIR_KINDS), prompts_per_kind=8)
    )  # more than one of each kind: some have several messages
    single = {prompt.kind: prompt for prompt in reversed(prompts) if len(prompt.messages) == 1}
    return [Scene(title, single[kind].messages[0]["content"], is_chat=True) for kind, title in PAIR_KINDS.items()]


def _scenes(opened: Opened, prompt: str | None) -> list[Scene]:
    """Return the scenes to show: a scene of the user's prompt alone, if there is one.

    Otherwise a chat model gets an edit and a question, and any other model a piece of code.
    """
    is_chat = not opened.is_shipped
    try:
        if is_chat:
            _ = opened.chat_template
    except NotFound:
        is_chat = False
    if prompt is not None:
        return [Scene("your prompt", prompt, is_chat)]
    return [EDIT, QUESTION] if is_chat else [Scene("a piece of code", default_prompt(), is_chat=False)]


def _shortened(text: str) -> str:
    """Return a prompt as it is shown. A long prompt is cut to its first and last lines, or words."""
    if len(text) <= 2 * SHOWN_CHARACTERS:
        return text
    beginning, end = text[: SHOWN_CHARACTERS // 2], text[-SHOWN_CHARACTERS // 2 :]
    between = "\n" if "\n" in beginning and "\n" in end else " "
    return between.join((beginning.rpartition(between)[0], "[...]", end.partition(between)[2]))


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
    """Return a line that says whether both texts are identical, and for which mode, weights, device and build."""
    model = llm.checkpoint.model
    rule = "greedy" if params.greedy else f"{params.acceptance or 'match'}, temperature {params.temperature}"
    mode = f"{rule}; {model.precision} on {model.device}; {model.ops.build}"
    if plain.token_ids == fast.token_ids:
        return f"identical: yes, all {len(plain.token_ids)} tokens ({mode})"
    at = num_common(plain.token_ids, fast.token_ids)
    near_tie = "not certified here as a near tie, which is what `make parity` does"
    why = "ratio draws other coins" if not params.greedy and params.acceptance == "ratio" else near_tie
    return (
        f"identical: no, token {at + 1} of {len(plain.token_ids)} differs first: {why}, see docs/exactness.md ({mode})"
    )


def _warm_up(llm: LLM, ids: Seq[int], params: SamplingParams) -> None:
    """Run the prompt once before times are measured, because page faults and choosing kernels slow down a first run."""
    warm_up = SamplingParams(
        max_tokens=WARM_UP_TOKENS, temperature=params.temperature, seed=0, cache_salt="warm-up"
    )  # a salt, so that no drafter learns from it
    llm.generate(list(ids), warm_up)
    llm.measure_passes()  # else it would do so while the other one runs


def _live(llm: LLM, ids: Seq[int], params: SamplingParams, console: Console, beginning: str) -> Outcome:
    live = LiveText(llm.tokenizer, console, ids)
    live.write(beginning, "dim")
    start, output = time.perf_counter(), None
    reading = Answering(llm, len(ids)) if not beginning else nullcontext()

    def show(report: StepReport) -> None:
        if report.num_committed and isinstance(reading, Answering):
            reading.end()
        live(report)

    try:
        with reading:
            for chunk in watched(llm, ids, params, show):
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


def _summary(scenes: Seq[Scene], outcomes: Seq[Seq[Outcome]]) -> Table:
    """Return a table with a line for each scene, and the geometric means of the speed-ups."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("text", "plain", "speculative", "speed-up", "behind the first token"):
        table.add_column(name, justify="left" if name == "text" else "right")
    gained: list[tuple[float, float | None]] = []
    for scene, (plain, fast) in zip(scenes, outcomes, strict=True):
        before, after = plain.behind_first_per_s, fast.behind_first_per_s
        gained.append((fast.tokens_per_s / plain.tokens_per_s, after / before if before and after else None))
        seconds = (f"{outcome.seconds:.2f} s" for outcome in (plain, fast))
        table.add_row(scene.title.partition(",")[0], *seconds, *map(_times, gained[-1]))
    behind = [one for _, one in gained if one is not None]
    table.add_section()
    whole = geometric_mean(one for one, _ in gained)
    table.add_row("geometric mean", "", "", _times(whole), _times(geometric_mean(behind) if behind else None))
    return table


def _times(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.2f}x"


def _your_own_model(console: Console, is_pair: bool) -> None:
    forerun = program("forerun")
    if not is_pair:
        size = sum(named_models()[name].num_bytes for name in PAIR) / 1e9
        console.print(f"\nWith two models that people use, of 1.5 B and 0.5 B ({size:.1f} GB):", style="bold")
        console.print(f"  {forerun} demo --pair")
    console.print("\nWith a model of your own (a folder, a GGUF file, or org/name of the hub):", style="bold")
    console.print(
        f"  {forerun} chat ./model.gguf\n"
        f'  {forerun} generate --target ./model --draft ./small-model --rounds "def fib(n):"\n'
        f"  {forerun} bench latency --target ./model --draft ./small-model",
        soft_wrap=True,  # so that a command can be copied as one line
    )
