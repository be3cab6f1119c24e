"""`forerun bench methods`: plain decoding and every drafter on six kinds of work, one request at a time.

One engine holds all drafters over the same weights, and a request chooses its own. They take turns on every prompt, in
an order that rotates, because a shared machine is faster in one minute than in the next; a speed-up is the ratio to
plain decoding's run of the same turn. Every text is compared with plain decoding's. methods_results.py makes numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from forerun import registry, verify
from forerun.bench.latency import ForwardClock, progress_bar, run_once
from forerun.bench.methods_picture import check_picture, draw
from forerun.bench.methods_results import AGAIN, PLAIN, cells_of, print_methods, summaries_of
from forerun.bench.results import Tally, Variant, print_ceiling, record_of
from forerun.bench.widen import load_widened
from forerun.config import EngineConfig
from forerun.drafters import Drafter
from forerun.engine.llm import LLM
from forerun.errors import BadOption, InternalError, NotFound, UserError, shown
from forerun.memory.machine import spare_what_is_loaded
from forerun.models import named
from forerun.models.layers import Decoder
from forerun.models.loading import Checkpoint
from forerun.text.terminal import make_console
from forerun.types import SamplingParams

PROMPTS = named.DATA / "work.jsonl"
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class MethodsPlan:
    """What to measure.

    drafts: () = every drafter that needs no file. kinds: () = all that the prompt file has. shape: a preset of widen,
    or "none". acceptance: None = the engine's own choice: match at temperature > 0, for every run has a seed.
    """

    drafts: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    shape: str = "none"
    temperatures: tuple[float, ...] = (0.0, 1.0)
    acceptance: str | None = None
    prompts_per_kind: int = 2
    max_tokens: int = 64
    num_repeats: int = 1
    prompt_file: Path | None = None
    picture: Path | None = None
    seed: int = 1

    def params(
        self, temperature: float, draft: str | None, salt: str, turn: int = 0, ignore_eos: bool = False
    ) -> SamplingParams:
        """Return how one run is decoded. salt: runs of the same one may learn from each other."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=temperature,
            seed=self.seed + turn,
            acceptance=self.acceptance,
            draft=draft,
            cache_salt=salt,
            ignore_eos=ignore_eos,
        )

    def texts_must_be_equal(self, temperature: float) -> bool:
        """Whether a draft may change no token. Rules other than match keep the distribution, and draw other texts."""
        rule = verify.find(self.acceptance or ("match" if temperature > 0 else "ratio"))
        return rule.is_lossless and (temperature == 0 or rule.name == "match")


@dataclass(frozen=True)
class WorkPrompt:
    """One prompt of one kind of work, as a conversation."""

    id: str
    kind: str
    messages: list[dict[str, str]]


@dataclass(frozen=True)
class Turn:
    """One prompt at one temperature, which plain decoding and all drafters run one after another."""

    number: int
    repeat: int
    prompt: WorkPrompt
    temperature: float


def run(config: EngineConfig, plan: MethodsPlan) -> dict[str, Any]:
    """Measure, print tables, and return all of it for JSON.

    Raises UserError for what cannot be measured, and InternalError where a drafter fails or changes a text.
    """
    console = make_console()
    check_picture(plan.picture)
    prompts = read_work(plan)
    for temperature in plan.temperatures:
        plan.params(temperature, None, "")  # refuses what cannot be honoured before a model is read
        plan.texts_must_be_equal(temperature)
    checkpoint = load_widened(config, plan.shape, console)
    llm, specs, left_out = _build(checkpoint, config, plan, console)
    spare_what_is_loaded()
    ceiling = print_ceiling(checkpoint.model, console)
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    temperatures = " and ".join(f"{t:g}" for t in plan.temperatures)
    console.print(
        f"{len(prompts)} prompt{'s' * (len(prompts) != 1)} ({', '.join(kinds)}), at most {plan.max_tokens} tokens, "
        f"at temperature {temperatures}, pacing {config.pacing_spec}: plain decoding and {len(specs)} "
        f"drafter{'s' * (len(specs) != 1)} in turns, one request at a time"
    )
    with progress_bar() as progress:
        tallies, num_compared = _measure(llm, specs, prompts, plan, progress)
    cells = cells_of(tallies)
    summaries = summaries_of(tallies, cells)
    print_methods(cells, summaries, kinds, ceiling, console)
    print_compared(num_compared, plan, llm, console)
    if plan.picture is not None:
        draw(cells, summaries, kinds, plan.picture, checkpoint.name)
    paths = {
        name: str(path) if path else None
        for name, path in (("prompt_file", plan.prompt_file), ("picture", plan.picture))
    }
    return {
        "bench": "methods",
        "target": checkpoint.name,
        "widened": plan.shape != "none",
        "plan": {**asdict(plan), **paths},
        "pacing": config.pacing_spec,
        "spec_length": config.spec_length,
        "prompts": [prompt.id for prompt in prompts],
        "left_out": left_out,
        "texts_compared": num_compared,
        **record_of([], checkpoint.model, _draft_models(llm), ceiling),
        "lines": [asdict(cell) for cell in cells],
        "summaries": [asdict(summary) for summary in summaries],
    }


def read_work(plan: MethodsPlan) -> list[WorkPrompt]:
    """The first prompts of each kind, the kinds in turn. Raises NotFound, BadOption."""
    file = plan.prompt_file or PROMPTS
    if not file.is_file():
        raise NotFound(f"there is no prompt file {file}: name one with --prompt-file")
    by_kind: dict[str, list[WorkPrompt]] = {}
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.strip():
                prompt = WorkPrompt(**json.loads(line))
                by_kind.setdefault(prompt.kind, []).append(prompt)
    except (ValueError, TypeError) as error:
        raise BadOption(f'{file} is no file of work: every line must be JSON with "id", "kind", "messages"') from error
    for kind in plan.kinds:
        if kind not in by_kind:
            raise BadOption(registry.unknown("kind of work", kind, by_kind))
    kinds = [kind for kind in by_kind if not plan.kinds or kind in plan.kinds]
    found = [by_kind[kind][i] for i in range(plan.prompts_per_kind) for kind in kinds if i < len(by_kind[kind])]
    if not found:
        raise BadOption(f"{file} holds no prompt: every line must be JSON with id, kind and messages")
    return found


# ----------------------------------------------------------------------------------------------------------- engine


def _build(
    checkpoint: Checkpoint, config: EngineConfig, plan: MethodsPlan, console: Console
) -> tuple[LLM, list[str], dict[str, str]]:
    """One engine with all drafters that can serve; their specs; and of the others why they cannot."""
    # A prompt's second run would find the first one's cache, and a prompt that is not run teaches its drafter nothing.
    options = {**config.options(), "extra_drafts": None, "prefix_caching": False, "max_batch_size": 1}
    specs, left_out = list[str](), dict[str, str]()
    for spec in plan.drafts or [name for name in registry.names("forerun.drafters") if name != PLAIN]:
        try:
            _try(LLM(checkpoint, **{**options, "draft": spec}), plan)
            specs.append(spec)
        except UserError as error:
            if plan.drafts:
                raise
            left_out[spec] = str(error)
            console.print(f"left out: {spec}, for {error}")
    specs = list(dict.fromkeys(spec for spec in specs if spec != PLAIN))
    if not specs:
        raise BadOption("no drafter is left to compare with plain decoding: name one with --draft")
    return LLM(checkpoint, **{**options, "draft": PLAIN, "extra_drafts": ";".join(specs)}), specs, left_out


def _try(llm: LLM, plan: MethodsPlan) -> None:
    """Raise BadOption where no rule of the plan can judge what the drafter drafts. Nothing runs."""
    for temperature in plan.temperatures:
        llm.engine.make([0], plan.params(temperature, None, ""))


def _draft_models(llm: LLM) -> list[Decoder]:
    """Every model of a drafter once."""
    runners = [member.runner for member in llm.engine.drafter.members.values()]
    models = {id(runner.model): runner.model for runner in runners if runner is not None}
    return list(models.values())  # type: ignore[arg-type]  # the models of this benchmark are decoders


def _chats(llm: LLM) -> bool:
    """Whether the model has a chat template."""
    try:
        return bool(llm.chat_template.names)
    except NotFound:
        return False


def _ids(llm: LLM, prompt: WorkPrompt) -> list[int]:
    """The prompt as the model's chat template writes it; joined where the model has none."""
    if _chats(llm):
        return llm.apply_chat_template(prompt.messages)
    return llm.tokenizer.encode("\n\n".join(message["content"] for message in prompt.messages) + "\n\n")


# ------------------------------------------------------------------------------------------------------ measurement

Tallies = dict[tuple[float, str, str], Tally]  # by temperature, kind and spec


def _measure(
    llm: LLM, specs: Seq[str], prompts: Seq[WorkPrompt], plan: MethodsPlan, progress: Progress
) -> tuple[Tallies, int]:
    """Run everything; returns the runs, and how many texts were compared with plain decoding's."""
    variants, ids = [PLAIN, AGAIN, *specs], {prompt.id: _ids(llm, prompt) for prompt in prompts}
    for prompt_ids in ids.values():
        llm.engine.make(prompt_ids, plan.params(plan.temperatures[0], PLAIN, ""))  # refuses one that is too long
    goes_on = not _chats(llm)  # a model that does not know turns may end at once, which measures nothing
    built = {spec: _serving(llm, spec) for spec in variants}
    clocks = {spec: _clock(llm, drafter) for spec, drafter in built.items()}
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    tallies = {(t, k, spec): Tally(Variant(spec, 0), t) for t in plan.temperatures for k in kinds for spec in variants}
    turns = list(_turns(prompts, plan))
    task, num_compared = progress.add_task("warming up", total=len(variants) * (len(turns) + 1)), 0

    def once(spec: str, turn: Turn, params: SamplingParams, tally: Tally) -> list[int]:
        token_ids = run_once(llm, ids[turn.prompt.id], params, tally, clocks[spec])
        if _serving(llm, spec) is not built[spec]:
            raise InternalError(f"the drafter {shown(spec)} failed on {turn.prompt.id}: what it raised is logged above")
        progress.advance(task)
        return token_ids

    warm_up = replace(plan, max_tokens=min(plan.max_tokens, WARM_UP_TOKENS))
    for spec in variants:  # also calibrates the pacing policy
        params = warm_up.params(turns[0].temperature, _draft(spec), "warm-up")
        once(spec, turns[0], params, Tally(Variant(spec, 0), turns[0].temperature))
    for turn in turns:
        t, texts = turn.temperature, dict[str, list[int]]()
        first = turn.number % len(variants)
        for spec in [*variants[first:], *variants[:first]]:
            progress.update(task, description=f"T={t:g} {turn.prompt.id} {spec}")
            # Repeats and temperatures have the same texts: what a drafter learned there would be the answer.
            params = plan.params(t, _draft(spec), f"repeat {turn.repeat} at {t:g}", turn.number, goes_on)
            texts[spec] = once(spec, turn, params, tallies[t, turn.prompt.kind, spec])
        if plan.texts_must_be_equal(t) and llm.checkpoint.model.ops.row_invariant:
            compare(texts, turn, llm)
            num_compared += len(specs)
    return tallies, num_compared


def _draft(variant: str) -> str:
    """The drafter of a variant: plain decoding is measured twice."""
    return PLAIN if variant == AGAIN else variant


def _serving(llm: LLM, variant: str) -> Drafter:
    router = llm.engine.drafter
    return router.members[router.chosen(_draft(variant))]


def _turns(prompts: Seq[WorkPrompt], plan: MethodsPlan) -> Iterator[Turn]:
    number = 0
    for repeat in range(plan.num_repeats):
        for prompt in prompts:
            for temperature in plan.temperatures:
                yield Turn(number, repeat, prompt, temperature)
                number += 1


def _clock(llm: LLM, drafter: Drafter) -> ForwardClock | None:
    own = drafter.runner
    return None if own is None or own is llm.engine.runner else ForwardClock(own)


def compare(texts: Mapping[str, list[int]], turn: Turn, llm: LLM) -> None:
    """Raise InternalError for the first drafter whose text is not plain decoding's, with both around the difference."""
    plain = texts[PLAIN]
    for spec, text in texts.items():
        if text != plain:
            same = next(
                (i for i, (a, b) in enumerate(zip(plain, text, strict=False)) if a != b), min(len(plain), len(text))
            )
            said, wanted = (llm.tokenizer.decode(ids[same : same + 8]) for ids in (text, plain))
            raise InternalError(
                f"{shown(spec)} changed the text of {turn.prompt.id} at temperature {turn.temperature:g}: behind "
                f"{same} equal tokens it says {shown(said)}, and plain decoding {shown(wanted)}"
            )


def print_compared(num_compared: int, plan: MethodsPlan, llm: LLM, console: Console) -> None:
    """Say how many texts were compared, or why none was."""
    loose = [t for t in plan.temperatures if not plan.texts_must_be_equal(t)]
    if num_compared:
        console.print(f"All {num_compared} compared texts of drafters are plain decoding's, token for token.")
    if not llm.checkpoint.model.ops.row_invariant:
        console.print(
            f"Texts were not compared: with {llm.checkpoint.model.ops.name} operators a row's bits depend on the rows "
            "beside it, so that a near tie may fall otherwise; --ops native has no such differences."
        )
    elif loose:
        console.print(
            f"At temperature {' and '.join(f'{t:g}' for t in loose)} texts were not compared: with acceptance "
            f"{plan.acceptance} each drafter draws its own."
        )
