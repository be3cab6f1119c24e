"""`forerun bench methods`: plain decoding and ways of drafting on six kinds of work, one request at a time.

A way is a drafter with a pacing policy and a verification rule. Each policy has one engine, with all drafters over the
same target, and a request chooses its drafter. The ways take turns on every prompt, in an order that rotates, because a
shared machine is faster in one minute than in the next. A speed-up compares a run with the run of plain decoding in the
same turn. Where a rule must keep the text of plain decoding, the two texts are compared. methods_results.py computes
the speed-ups.
"""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from forerun import drafters, native, pacing, registry, verify
from forerun.bench.exhibits import check_picture
from forerun.bench.latency import ForwardClock, draft_models, progress_bar, rotated, run_once
from forerun.bench.methods_picture import draw
from forerun.bench.methods_results import AGAIN, PLAIN, cells_of, print_methods, summaries_of
from forerun.bench.plans import MethodsPlan, SuitePlan, Way
from forerun.bench.results import Ceiling, Tally, Variant, print_ceiling, record_of
from forerun.bench.widen import load_widened, measured_target
from forerun.config import EngineConfig
from forerun.drafters import Drafter
from forerun.engine.llm import LLM
from forerun.engine.opened import is_shipped
from forerun.engine.prompts import Message
from forerun.errors import BadOption, InternalError, NotFound, UserError, shown
from forerun.memory.machine import spare_what_is_loaded
from forerun.models import named
from forerun.models.loading import Checkpoint
from forerun.ops.operators import Operators
from forerun.text.detokenizer import num_common
from forerun.text.terminal import make_console
from forerun.text.tokenizer import Tokenizer
from forerun.types import SamplingParams

PROMPTS = named.DATA / "work.jsonl"
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class WorkPrompt:
    """One prompt of one kind of work, as a conversation."""

    id: str
    kind: str
    messages: list[dict[str, str]]


@dataclass(frozen=True)
class Turn:
    """One prompt at one temperature, which plain decoding and all ways run one after another."""

    number: int
    repeat: int
    prompt: WorkPrompt
    temperature: float


def run(config: EngineConfig, plan: MethodsPlan) -> dict[str, Any]:
    """Measure, print tables, and return the results for JSON.

    Raises UserError where the measurement is impossible, and InternalError where a drafter fails or changes a text.
    """
    console = make_console()
    check_picture(plan.picture)
    prompts = read_work(plan)
    for temperature in plan.temperatures:  # impossible parameters are refused before a model is read
        plan.params(temperature, None, "")
    for draft in plan.drafts:
        drafters.resolve(draft)
    for acceptance in plan.acceptances:
        verify.find(acceptance)
    for spec in plan.pacings:
        pacing.make(spec, config.spec_length)
    checkpoint = load_widened(measured_target(config, plan.shape), plan.shape, console)
    llms, ways, left_out = _build(checkpoint, config, plan, console)
    spare_what_is_loaded()
    ceiling = print_ceiling(checkpoint.model, console)
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    temperatures = " and ".join(f"{t:g}" for t in plan.temperatures)
    sizes = f"{counted(len(prompts), 'prompt')} ({', '.join(kinds)}), at most {plan.max_tokens} tokens"
    alike = same(ways)
    console.print(
        f"{sizes}, at temperature {temperatures}{alike}: plain decoding and {counted(len(ways), 'way')} of drafting in "
        "turns, one request at a time"
    )
    with progress_bar() as progress:
        tallies, num_compared = _measure(llms, ways, prompts, plan, progress)
    cells = cells_of(tallies)
    summaries = summaries_of(tallies, cells)
    print_methods(cells, summaries, kinds, " and ".join(_compared(plan)), ceiling, console)
    print_compared(num_compared, ways, plan, checkpoint.model.ops, console)
    if plan.picture is not None:
        about = f"{sizes}, {counted(plan.num_repeats, 'run')} of each{alike}."
        draw(cells, summaries, kinds, plan.picture, title_of(checkpoint, plan.shape, ceiling), about)
    return {
        "bench": "methods",
        "target": checkpoint.name,
        "widened": plan.shape != "none",
        "plan": plan.record(),
        "ways": [asdict(way) for way in ways],
        "spec_length": config.spec_length,
        "prompts": [prompt.id for prompt in prompts],
        "left_out": left_out,
        "texts_compared": num_compared,
        **record_of([], checkpoint.model, draft_models(llms[ways[0].pacing].engine.drafter.members.values()), ceiling),
        "lines": [asdict(cell) for cell in cells],
        "summaries": [asdict(summary) for summary in summaries],
    }


def read_work(plan: MethodsPlan) -> list[WorkPrompt]:
    """Return the first prompts of each kind of work, one prompt of each kind in turn.

    Raises NotFound for a missing file, and BadOption for a file without such prompts and for an unknown kind.
    """
    file = plan.prompt_file or PROMPTS
    if not file.is_file():
        raise NotFound(f"there is no prompt file {file}: name one with --prompt-file")
    by_kind: dict[str, list[WorkPrompt]] = {}
    try:
        for line in file.read_text(encoding="utf-8").split("\n"):
            if line.strip():
                prompt = WorkPrompt(**json.loads(line))
                by_kind.setdefault(prompt.kind, []).append(prompt)
    except (ValueError, TypeError) as error:
        raise BadOption(f'{file} is no file of work: every line must be JSON with "id", "kind", "messages"') from error
    for kind in plan.kinds:
        if kind not in by_kind:
            raise BadOption(registry.unknown("kind of work", kind, by_kind))
    kinds = [kind for kind in by_kind if not plan.kinds or kind in plan.kinds]
    prompts = [by_kind[kind][i] for i in range(plan.prompts_per_kind) for kind in kinds if i < len(by_kind[kind])]
    if not prompts:
        raise BadOption(f"{file} holds no prompt: every line must be JSON with id, kind and messages")
    return prompts


# ----------------------------------------------------------------------------------------------------------- engine


def _build(
    checkpoint: Checkpoint, config: EngineConfig, plan: MethodsPlan, console: Console
) -> tuple[dict[str, LLM], list[Way], dict[str, str]]:
    """Build an engine for each pacing policy, with all drafters that are possible for this target.

    Returns the engines by policy, the ways to measure, and the reason why a drafter is left out, by drafter. Raises
    UserError where a drafter that the user named is impossible under every rule.
    """
    # With prefix caching, a prompt's second run would find the first run's cache, and a drafter would learn nothing
    # from the part that is not run.
    options = {**config.options(), "extra_drafts": None, "prefix_caching": False, "max_batch_size": 1}
    pacings, acceptances = plan.pacings or (config.pacing_spec,), plan.acceptances or (None,)
    ways, left_out = list[Way](), dict[str, str]()
    drafts = plan.drafts or tuple(name for name in registry.names("forerun.drafters") if name != PLAIN)
    for draft in dict.fromkeys(drafts):
        if draft == PLAIN:
            continue
        errors, fitting = dict[str, UserError](), list[str | None]()
        try:
            llm = LLM(checkpoint, **{**options, "draft": draft})
        except UserError as error:
            errors[draft] = error
        for acceptance in () if errors else acceptances:
            try:
                for temperature in plan.temperatures:  # checks the request and runs nothing
                    llm.engine.make([0], plan.params(temperature, Way("", "auto", "", acceptance), ""))
                fitting.append(acceptance)
            except UserError as error:
                errors[draft if len(acceptances) == 1 else f"{draft}, {acceptance}"] = error
        if plan.drafts and not fitting:
            raise next(iter(errors.values()))
        for name, why in errors.items():
            left_out[name] = str(why)
            console.print(f"left out: {name}, for {why}")
        ways += [Way("", draft, spec, acceptance) for spec in pacings for acceptance in fitting]
    if not ways:
        raise BadOption("no drafter is left to compare with plain decoding: name one with --draft")
    specs = ";".join(dict.fromkeys(way.draft for way in ways))
    llms = {
        spec: LLM(checkpoint, **{**options, "pacing": spec, "draft": PLAIN, "extra_drafts": specs}) for spec in pacings
    }
    for llm in llms.values():
        llm.measure_passes()
    return llms, named_ways(ways, plan), left_out


_FIELDS = {"draft": "draft", "pacing": "pacing", "acceptance": "rule"}  # the fields of a way, and their names in tables


def named_ways(ways: Seq[Way], plan: MethodsPlan | SuitePlan) -> list[Way]:
    """Return the ways, each named by the fields in which they differ."""
    fields = [name for name, what in _FIELDS.items() if what in _compared(plan)]
    return [replace(way, name=", ".join(str(getattr(way, name)) for name in fields)) for way in ways]


def _compared(plan: MethodsPlan | SuitePlan) -> list[str]:
    """Return the options that the names of ways show: all options with several values, or else only the drafter."""
    several = {"draft": plan.drafts, "pacing": plan.pacings, "rule": plan.acceptances}
    names = [name for name, values in several.items() if len(values) > 1 or (name == "draft" and not values)]
    return names or ["draft"]


def same(ways: Seq[Way]) -> str:
    """Return a text with the options that are the same in all ways, such as ", draft suffix, rule match"."""
    values = {what: {getattr(way, name) for way in ways} for name, what in _FIELDS.items()}
    return "".join(f", {what} {value}" for what, (value, *others) in values.items() if value is not None and not others)


def title_of(checkpoint: Checkpoint, shape: str, ceiling: Ceiling) -> str:
    """Return a picture's title in two lines: the model and the machine."""
    model = checkpoint.model
    widened = "" if shape == "none" else f" widened to {shape}"
    name = "shipped model" if is_shipped(checkpoint.opened.path) else checkpoint.name
    processor = native.processor_name() or platform.machine()
    threads = counted(model.ops.num_threads, "thread")
    return (
        f"{name}{widened}, {model.precision}: speed-up over plain decoding\n{processor}, {threads}, memory at "
        f"{ceiling.bytes_per_s / 1e9:.0f} GB/s, {model.ops.build}"
    )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as 1 prompt or 2 prompts."""
    return f"{number} {noun}{'s' * (number != 1)}"


def chats(llm: LLM) -> bool:
    """Return whether the model has a chat template."""
    try:
        return bool(llm.chat_template.names)
    except NotFound:
        return False


def conversation_ids(llm: LLM, messages: Seq[Message], tools: Seq[Mapping[str, Any]] = ()) -> list[int]:
    """Return a conversation's token ids, by the model's chat template. Without a template, its texts are joined."""
    if chats(llm):
        return llm.apply_chat_template(messages, tools=list(tools) or None)
    return llm.tokenizer.encode("\n\n".join(str(message["content"]) for message in messages) + "\n\n")


# ------------------------------------------------------------------------------------------------------ measurement

Tallies = dict[tuple[float, str, str], Tally]  # by temperature, kind and way


def _measure(
    llms: Mapping[str, LLM], ways: Seq[Way], prompts: Seq[WorkPrompt], plan: MethodsPlan, progress: Progress
) -> tuple[Tallies, int]:
    """Run every way on every prompt. Return the tallies, and the number of texts compared with plain decoding."""
    first_pacing, llm = next(iter(llms.items()))
    plain = [Way(name, PLAIN, first_pacing) for name in (PLAIN, AGAIN)]  # the same under every policy and rule
    every = [*plain, *ways]
    ids = {prompt.id: conversation_ids(llm, prompt.messages) for prompt in prompts}
    for prompt_ids in ids.values():  # a prompt that is too long is refused
        llm.engine.make(prompt_ids, plan.params(plan.temperatures[0], plain[0], ""))
    goes_on = not chats(llm)  # a model that does not know turns may end at once, which measures nothing
    built = {way: _serving(llms[way.pacing], way) for way in every}
    clocks = {id(drafter): _clock(llms[way.pacing], drafter) for way, drafter in built.items()}
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    places = itertools.product(plan.temperatures, kinds, every)
    tallies = {(t, kind, way.name): Tally(Variant(way.name, 0), t) for t, kind, way in places}
    turns = list(_turns(prompts, plan))
    task = progress.add_task("warming up", total=len(every) * (len(turns) + 1))
    num_compared = 0

    def once(way: Way, turn: Turn, params: SamplingParams, tally: Tally) -> list[int]:
        way_llm = llms[way.pacing]
        token_ids = run_once(way_llm, ids[turn.prompt.id], params, tally, clocks[id(built[way])])
        if _serving(way_llm, way) is not built[way]:
            raise InternalError(
                f"the drafter {shown(way.draft)} failed on {turn.prompt.id}: what it raised is logged above"
            )
        progress.advance(task)
        return token_ids

    warm_up = replace(plan, max_tokens=min(plan.max_tokens, WARM_UP_TOKENS))
    for way in every:
        params = warm_up.params(turns[0].temperature, way, "warm-up")
        once(way, turns[0], params, Tally(Variant(way.name, 0), turns[0].temperature))
    for turn in turns:
        t, texts = turn.temperature, dict[str, list[int]]()
        for way in rotated(every, turn.number):
            progress.update(task, description=f"T={t:g} {turn.prompt.id} {way.name}")
            # Repeats, temperatures and rules may give the same text, so each has its own salt: a drafter that learned
            # from another run would know the answer.
            salt = f"repeat {turn.repeat} at {t:g} by {way.acceptance}"
            params = plan.params(t, way, salt, turn.number, goes_on)
            text = once(way, turn, params, tallies[t, turn.prompt.kind, way.name])
            if way.keeps_texts(t):
                texts[way.name] = text
        if llm.checkpoint.model.ops.row_invariant:
            compare(texts, turn.prompt.id, t, llm.tokenizer)
            num_compared += len(texts) - len(plain)
    return tallies, num_compared


def _serving(llm: LLM, way: Way) -> Drafter:
    router = llm.engine.drafter
    return router.members[router.chosen(way.draft)]


def _turns(prompts: Seq[WorkPrompt], plan: MethodsPlan) -> Iterator[Turn]:
    number = 0
    for repeat in range(plan.num_repeats):
        for prompt in prompts:
            for temperature in plan.temperatures:
                yield Turn(number, repeat, prompt, temperature)
                number += 1


def _clock(llm: LLM, drafter: Drafter) -> ForwardClock | None:
    runner = drafter.runner
    return None if runner is None or runner is llm.engine.runner else ForwardClock(runner)


def compare(texts: Mapping[str, list[int]], name: str, temperature: float, tokenizer: Tokenizer) -> None:
    """Raise InternalError for the first way that wrote another text than plain decoding.

    The message shows where the two texts differ. texts: the token ids of each way, by the way's name. name: the
    prompt's name.
    """
    plain = texts[PLAIN]
    for spec, text in texts.items():
        if text != plain:
            num_equal = num_common(plain, text)
            said, wanted = (tokenizer.decode(ids[num_equal : num_equal + 8]) for ids in (text, plain))
            raise InternalError(
                f"{shown(spec)} changed the text of {name} at temperature {temperature:g}: behind "
                f"{num_equal} equal tokens it says {shown(said)}, and plain decoding {shown(wanted)}"
            )


def print_compared(
    num_compared: int, ways: Seq[Way], plan: MethodsPlan | SuitePlan, ops: Operators, console: Console
) -> None:
    """Print how many texts were compared with plain decoding's texts, and why other texts were not compared."""
    if num_compared:
        console.print(f"All {num_compared} compared texts of drafters are plain decoding's, token for token.")
    if not ops.row_invariant:
        console.print(
            f"Texts were not compared: with {ops.name} operators a row's bits depend on the rows beside it, so that a "
            "near tie may fall otherwise; --ops native has no such differences."
        )
        return
    for t in plan.temperatures:
        loose = dict.fromkeys(way.acceptance for way in ways if not way.keeps_texts(t))
        if loose:
            console.print(
                f"At temperature {t:g} texts were not compared with acceptance {' and '.join(map(str, loose))}: each "
                "way draws its own."
            )
