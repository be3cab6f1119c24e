"""`forerun tune`: which drafter, how far, and whether at all, for these prompts with this model on this machine.

1. Each drafter runs the prompts once with the longest drafts, in turns with plain decoding: that shows which of its
   guesses are right, and what drafting takes.
2. The time of passes by their rows is measured (as in pacing/cost.py, and finer), and every length of every drafter is
   predicted from both (tune_prediction.py).
3. Those that promise most, some of them with `pacing=auto`, and plain decoding run in turns until the time is over.
   What their passes took makes the predictions better: a length that then promises more than all that were measured
   is measured, too. The fastest is chosen; plain decoding, where nothing was faster by PLAIN_MARGIN.

One engine holds all drafters over the same target, so that the ways differ in nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from forerun import drafters, pacing
from forerun.bench.latency import Plan as LatencyPlan, progress_bar, read_prompts, run_together
from forerun.bench.methods import MethodsPlan, chats, read_work
from forerun.bench.methods_picture import check_picture
from forerun.bench.results import Tally, Variant
from forerun.bench.tune_picture import draw
from forerun.bench.tune_prediction import LONGEST, Passes, Prediction, Predictor, Turn, alphas, full_steps, per_token_s
from forerun.bench.tune_results import (
    PLAIN,
    Contender,
    Found,
    Way,
    chosen_of,
    config_of,
    measured_of,
    print_found,
    write_config,
)
from forerun.bench.widen import load_widened
from forerun.config import EngineConfig
from forerun.drafters import Drafter
from forerun.engine.factory import is_shipped, outlines, refuse_early
from forerun.engine.llm import LLM
from forerun.errors import BadOption, InternalError, UserError, shown
from forerun.memory.machine import spare_what_is_loaded
from forerun.models.loading import Checkpoint
from forerun.pacing import Pacing
from forerun.pacing.cost import PassTime, calibrated
from forerun.text.terminal import make_console
from forerun.types import SamplingParams

# Drafters that need no file, from the best on six kinds of work down (docs/when-it-pays.md).
USUAL = ("suffix:shape=tree", "suffix", "lookup", "ngram", "prediction", "recycle", "lookahead", "self")
SHIPPED = ("model", "tree", "suffix:shape=tree", "suffix", "lookup", "ngram", "recycle")
PROMPTS_PER_KIND = 2
GROUP_REQUESTS = 4  # prompts that are run one behind the other in each place of a batch, where several run at once
WARM_UP_TOKENS = 8
PROBE_SHARE = 0.35  # of the time, for step 1
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17)  # rows of the passes of step 2, for each request
CALIBRATION_SHARE, LEAST_CALIBRATION_S = 0.05, 0.5  # of the time, for step 2
FEWEST_ROUNDS = 2  # of step 3, whatever the time
MOST_ROUNDS = 15
PLAIN_EVERY = 8  # ways of a turn: behind so many plain decoding runs once more
SEARCH_ROUNDS = 4  # of these, behind which further lengths may come in
NUM_FIXED, NUM_AUTO = 4, 2  # ways that are measured, with fixed lengths and with auto
HOPELESS = 0.85  # predicted speed-up below which a fixed length is not measured
CLOSE = 0.97  # of the best prediction: another length of the same drafter is measured, too
OUT = 0.9  # of the best measurement: what is slower after FEWEST_ROUNDS is measured no more

Prompt = str | list[int] | list[dict[str, Any]]  # a text, ids, or a conversation
Request = tuple[Prompt, SamplingParams]


@dataclass(frozen=True)
class TunePlan:
    """What is measured, and for how long.

    requests: () = the project's own prompts. drafts: considered beside those that need no file. only: no others are.
    concurrency: requests at once. minutes: of measuring, about. max_tokens: of an output. shape: a preset of widen.
    out: the config file. picture: .png or .svg.
    """

    requests: Seq[Request] = ()
    drafts: tuple[str, ...] = ()
    only: bool = False
    temperature: float = 0.0
    concurrency: int = 1
    minutes: float = 5.0
    max_tokens: int = 64
    seed: int = 1
    shape: str = "none"
    out: Path | None = None
    picture: Path | None = None


def run(config: EngineConfig, plan: TunePlan) -> dict[str, Any]:
    """Measure, print what was found, write the config file, and return all of it for JSON.

    Raises UserError for what cannot be measured, InternalError where a drafter fails.
    """
    console = make_console()
    check_picture(plan.picture)
    candidates = candidates_of(config, plan)
    checkpoint = load_widened(config, plan.shape, console)
    bench = Bench.of(checkpoint, config, plan, candidates, console)
    found = tuned(bench, console)
    print_found(found, console)
    if plan.picture is not None:
        draw(found, plan.picture, "shipped model" if is_shipped(checkpoint.folder) else checkpoint.name)
        console.print(f"{plan.picture}: speed-up by draft length, predicted and measured")
    options = config_of(found.chosen, config, plan.concurrency)
    if plan.out is not None:
        write_config(plan.out, options, found)
    print_use(options, plan.out, console)
    return {
        "bench": "tune",
        "target": checkpoint.name,
        "build": checkpoint.model.ops.build,
        "precision": checkpoint.model.precision,
        "num_prompts": found.num_prompts,
        "config": options,
        **found.as_dict(),
    }


def print_use(options: Mapping[str, Any], out: Path | None, console: Console) -> None:
    """Say how the options are used."""
    if out is None:
        console.print(f"Options: {', '.join(f'{k}={v}' for k, v in options.items())}; --out FILE writes a config file.")
    else:
        console.print(f'Written to {out}: forerun generate --config {out} "..." uses it, as every command does.')


# ---------------------------------------------------------------------------------------------------------- candidates


def candidates_of(config: EngineConfig, plan: TunePlan) -> list[str]:
    """The specs of the drafters that are considered. Raises UserError for one that was named and cannot serve."""
    if plan.only and not plan.drafts:
        raise BadOption("--only leaves no drafter to consider: name some with --draft")
    given = list[str]()
    for spec in plan.drafts:
        method, options = drafters.resolve(spec, is_shipped(config.target))
        refuse_early(replace(config, draft=spec, extra_drafts=None))
        given.append(spec)
        if method == "model" and options.path is not None and options == type(options)(path=options.path):
            given.append(f"tree:of=(model:path={options.path})")
    usual = () if plan.only else SHIPPED if is_shipped(config.target) else USUAL
    found = dict.fromkeys(spec for spec in given if spec != PLAIN)
    refuse_early(replace(config, draft=PLAIN, extra_drafts=None))
    for spec in usual:
        try:
            alone = replace(config, draft=spec, extra_drafts=None)
            refuse_early(alone)
            outlines(alone)
        except UserError:
            continue
        found[spec] = None
    if not found:
        raise BadOption("no drafter is left to compare with plain decoding: name one with --draft")
    return list(found)


@dataclass
class Bench:
    """One engine with all candidates, and the prompts in groups, which all ways run in turns."""

    llm: LLM
    plan: TunePlan
    candidates: list[str]
    groups: list[list[tuple[list[int], SamplingParams]]]
    policies: dict[str, Pacing] = field(default_factory=dict)  # of auto, by drafter; they learn from run to run
    built: dict[str, Drafter] = field(default_factory=dict)
    num_runs: int = 0

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, config: EngineConfig, plan: TunePlan, candidates: Seq[str], console: Console
    ) -> Bench:
        """Build the engine. Drafters whose drafts the rule cannot judge are left out, or refused where they were named.

        A prompt's second run would find the first one's cache, so that prefixes are not shared.
        """
        llm = LLM(
            checkpoint,
            **{
                **config.options(),
                "draft": PLAIN,
                "extra_drafts": ";".join(candidates),
                "pacing": "fixed",
                "spec_length": LONGEST,
                "prefix_caching": False,
                "max_batch_size": plan.concurrency,
            },
        )
        spare_what_is_loaded()
        prompts = encoded(llm, config, plan)
        size = plan.concurrency * (1 if plan.concurrency == 1 else GROUP_REQUESTS)
        groups = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        bench = cls(llm, plan, [], groups)
        for spec in candidates:
            try:
                for ids, params in prompts:
                    llm.engine.make(ids, bench.params(params, Way(spec, LONGEST), "", 0))
                bench.candidates.append(spec)
            except UserError as error:
                if spec in plan.drafts:
                    raise
                console.print(f"left out: {spec}, for {error}")
        bench.built = {spec: bench.serving(spec) for spec in bench.candidates}
        return bench

    def serving(self, spec: str) -> Drafter:
        """The drafter that serves those who ask for a spec."""
        router = self.llm.engine.drafter
        return router.members[router.chosen(spec)]

    def params(self, own: SamplingParams, way: Way, salt: str, number: int) -> SamplingParams:
        """How one prompt is run. salt: runs of the same one may learn from each other."""
        rule = own.acceptance or ("ratio" if own.temperature > 0 else None)
        return replace(
            own,
            draft=way.draft,
            spec_length=way.spec_length or None,
            cache_salt=salt,
            seed=self.plan.seed + number,
            acceptance=rule,
        )

    def once(self, way: Way, group: int, salt: str, tally: Tally, *, detail: bool = False) -> None:
        """Run one group of prompts one way. Raises InternalError where the drafter fails."""
        engine = self.llm.engine
        if way.spec_length is None:
            if way.draft not in self.policies:
                self.policies[way.draft] = pacing.make("auto", None, engine.costs)
            engine.use_pacing(self.policies[way.draft])
        else:
            engine.use_pacing(pacing.make("fixed", LONGEST))
        ids = [ids for ids, _ in self.groups[group]]
        first = sum(map(len, self.groups[:group]))
        params = [self.params(own, way, salt, first + i) for i, (_, own) in enumerate(self.groups[group])]
        run_together(self.llm, ids, params, tally, detail=detail)
        if way.draft != PLAIN and self.serving(way.draft) is not self.built[way.draft]:
            raise InternalError(f"the drafter {shown(way.draft)} failed: what it raised is logged above")

    def warm_up(self, way: Way) -> None:
        """Run a few tokens of the first group one way; auto measures the times of passes then."""
        kept, self.groups = self.groups, [[(ids, _short(own)) for ids, own in self.groups[0]]]
        self.once(way, 0, "warm-up", Tally(Variant(way.draft, 0), 0.0))
        self.groups = kept

    def pass_times(self) -> PassTime:
        """Measure what passes of the target take by their rows, finely: kernels take rows by the few."""
        engine, size = self.llm.engine, self.plan.concurrency
        if not self.llm.config.calibrate:
            return engine.costs.target
        widths = sorted({1, *(size * width for width in WIDTHS)})
        limit_s = max(LEAST_CALIBRATION_S, 60 * self.plan.minutes * CALIBRATION_SHARE)
        return calibrated(engine.runner.try_pass, widths=widths, least_limit_s=limit_s)

    def runs_model(self, spec: str) -> bool:
        """Whether a drafter runs a model of its own, or one of those that it is made of does."""
        methods = drafters.methods(spec, is_shipped(self.llm.checkpoint.folder))
        return any(drafters.has_a_model(method) for method, _ in methods)


def _short(params: SamplingParams) -> SamplingParams:
    return replace(params, max_tokens=min(params.max_tokens or WARM_UP_TOKENS, WARM_UP_TOKENS))


def encoded(llm: LLM, config: EngineConfig, plan: TunePlan) -> list[tuple[list[int], SamplingParams]]:
    """The prompts as ids, and how each is continued. Raises UserError with the number of one that cannot be run.

    A text is a message where the model has a chat template, as in `forerun generate`; the shipped model continues it.
    """
    goes_on = not chats(llm)  # a model that does not know turns may end at once, which measures nothing
    default = SamplingParams(max_tokens=plan.max_tokens, temperature=plan.temperature, ignore_eos=goes_on)
    requests = plan.requests or [(prompt, default) for prompt in _own_prompts(config)]
    found = []
    for number, (prompt, own) in enumerate(requests, 1):
        params = replace(own, max_tokens=min(own.max_tokens or plan.max_tokens, plan.max_tokens))
        try:
            ids = _ids(llm, prompt)
            llm.engine.make(ids, params)
        except UserError as error:
            raise type(error)(f"prompt {number}: {error}") from error
        found.append((ids, params))
    return found


def _own_prompts(config: EngineConfig) -> list[Prompt]:
    if is_shipped(config.target):  # which continues code, and knows no other work
        return [text for _, text in read_prompts(LatencyPlan(num_prompts=12))]
    return [prompt.messages for prompt in read_work(MethodsPlan(prompts_per_kind=PROMPTS_PER_KIND))]


def _ids(llm: LLM, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        if is_shipped(llm.checkpoint.folder) or not chats(llm):
            return llm.tokenizer.encode(prompt)
        return llm.apply_chat_template([{"role": "user", "content": prompt}])
    if prompt and isinstance(prompt[0], dict):
        messages: Any = prompt
        if chats(llm):
            return llm.apply_chat_template(messages)
        return llm.tokenizer.encode("\n\n".join(str(message["content"]) for message in messages) + "\n\n")
    return list(prompt)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ measuring


def tuned(bench: Bench, console: Console) -> Found:
    """Run the three steps."""
    plan, begun = bench.plan, time.monotonic()
    drawn = "greedy" if plan.temperature == 0 else f"temperature {plan.temperature:g}"
    at_once = "one request" if plan.concurrency == 1 else f"{plan.concurrency} requests"
    num_prompts = sum(map(len, bench.groups))
    console.print(
        f"{num_prompts} prompt{'s' * (num_prompts != 1)}, at most {plan.max_tokens} tokens, {drawn}, {at_once} at a "
        f"time, about {plan.minutes:g} minutes: {len(bench.candidates)} drafters in turns with plain decoding"
    )
    with progress_bar() as progress:
        turns = _probe(bench, begun + 60 * plan.minutes * PROBE_SHARE, progress)
        progress.add_task("what passes take", total=None)
        curve = bench.pass_times()
        passes = Passes(lambda rows: float(curve.ratio(rows)), _together(turns))
        for turn in (turn for own in turns.values() for turn in own):
            passes.add(turn.plain.steps, turn.drafted.steps)
        predictors = {spec: Predictor(own, passes, bench.runs_model(spec)) for spec, own in turns.items()}
        contenders = _race(bench, predictors, passes, begun + 60 * plan.minutes, progress)
    return Found(
        predictions={spec: predictor.all() for spec, predictor in predictors.items()},
        contenders=contenders,
        chosen=chosen_of(contenders),
        alphas={spec: alphas([text for turn in own for text in turn.texts]) for spec, own in turns.items()},
        alpha_hats={spec: _alpha_hat(own) for spec, own in turns.items()},
        pass_s=curve.one_row_s,
        curve={int(rows): float(ratio) for rows, ratio in zip(curve.widths, curve.ratios, strict=True)},
        v={int(rows): passes.v(rows) for rows in curve.widths if rows >= plan.concurrency},
        num_prompts=sum(len(group) for group in bench.groups),
        seconds=time.monotonic() - begun,
    )


def _probe(bench: Bench, until: float, progress: Progress) -> dict[str, list[Turn]]:
    """Step 1. Groups for which there is no time left are not measured at all."""
    ways = [Way(PLAIN, 0), *(Way(spec, LONGEST) for spec in bench.candidates)]
    task = progress.add_task("what is guessed right", total=len(ways) * (len(bench.groups) + 1))
    for way in ways:
        bench.warm_up(way)
        progress.advance(task)
    turns: dict[str, list[Turn]] = {spec: [] for spec in bench.candidates}
    for group in range(len(bench.groups)):
        if group and time.monotonic() > until:
            bench.groups = bench.groups[:group]
            break
        tallies = dict[str, Tally]()
        for way in _rotated(ways, group):
            progress.update(task, description=f"what is guessed right: {way.draft}")
            tallies[way.draft] = Tally(Variant(way.draft, 0), bench.plan.temperature)
            bench.once(way, group, "probe", tallies[way.draft], detail=way.draft != PLAIN)
            progress.advance(task)
        for spec in bench.candidates:
            turns[spec].append(Turn(tallies[PLAIN], tallies[spec]))
    progress.remove_task(task)
    return turns


def contenders_of(predictions: Mapping[str, Seq[Prediction]]) -> list[Way]:
    """The ways that are measured: plain decoding, the fixed lengths that promise most, and auto with their drafters.

    Each drafter's best length, then the length of the best drafter that is farthest from its best and as good. A
    drafter that was never right is not measured.
    """
    is_right = {spec for spec, own in predictions.items() if any(one.tokens_per_pass > 1 for one in own)}
    best = {spec: max(predictions[spec], key=lambda one: one.speedup) for spec in predictions if spec in is_right}
    order = sorted(best, key=lambda spec: -best[spec].speedup)
    fixed = [Way(spec, best[spec].spec_length) for spec in order if best[spec].speedup > HOPELESS][: NUM_FIXED - 1]
    for first in order[:1]:
        close = [one.spec_length for one in predictions[first] if one.speedup > CLOSE * best[first].speedup]
        other = max(close, key=lambda length: (abs(length - best[first].spec_length), -length))
        fixed += [Way(first, other)] if fixed and other != best[first].spec_length else []
    return [Way(PLAIN, 0), *fixed, *(Way(spec, None) for spec in order[:NUM_AUTO])]


def _alpha_hat(turns: Seq[Turn]) -> float | None:
    tested, accepted = (sum(turn.drafted.total(name) for turn in turns) for name in ("num_tested", "num_accepted"))
    return accepted / tested if tested else None


def prediction_of(way: Way, predictions: Mapping[str, Seq[Prediction]]) -> Prediction | None:
    """Return what was predicted of a way; None of plain decoding and of auto."""
    if way.spec_length is None or way.draft == PLAIN:
        return None
    return next(one for one in predictions[way.draft] if one.spec_length == way.spec_length)


def _race(
    bench: Bench, predictors: Mapping[str, Predictor], passes: Passes, until: float, progress: Progress
) -> list[Contender]:
    """Step 3: whole rounds in turns, as long as another one fits into the time."""
    predictions = {spec: predictor.all() for spec, predictor in predictors.items()}
    contenders = [Contender(way, prediction_of(way, predictions)) for way in contenders_of(predictions)]
    task = progress.add_task("measuring", total=FEWEST_ROUNDS * len(contenders) * len(bench.groups))
    for contender in contenders:
        if contender.way.spec_length is None:
            bench.warm_up(contender.way)
    for number in range(MOST_ROUNDS):
        begun = time.monotonic()
        one_round(bench, contenders, number, progress, task, passes)
        now = time.monotonic()
        for one in contenders:
            one.measured = measured_of(one.seconds, contenders[0].seconds)
        is_late = now + (now - begun) > until
        if is_late and all(one.is_out or one.measured.num_rounds >= FEWEST_ROUNDS for one in contenders):
            break
        drop_slow(contenders)
        if number == 0 or (number < SEARCH_ROUNDS and not is_late):
            predictions = {spec: predictor.all() for spec, predictor in predictors.items()}
            contenders += [Contender(way, prediction_of(way, predictions)) for way in further(contenders, predictions)]
        left = max(1, min(MOST_ROUNDS - number - 1, int((until - now) / (now - begun))))
        total = left * len(bench.groups) * sum(not one.is_out for one in contenders)
        progress.update(task, completed=0, total=total)
    progress.remove_task(task)
    return contenders


def further(contenders: Seq[Contender], predictions: Mapping[str, Seq[Prediction]]) -> list[Way]:
    """Return a length that promises more than all that were measured, if there is one.

    Predictions of a drafter are corrected by how much faster it was, at the lengths that were measured, than is
    predicted of these now.
    """
    known = {one.way for one in contenders}
    best = max(one.measured.speedup for one in contenders)
    found = list[tuple[float, Way]]()
    for spec, own in predictions.items():
        fixed = [one for one in contenders if one.way.draft == spec and one.way.spec_length]
        if fixed:
            now = [prediction_of(one.way, predictions) for one in fixed]
            errors = [one.measured.speedup / guess.speedup for one, guess in zip(fixed, now, strict=True) if guess]
            ways = [(one.speedup * median(errors), Way(spec, one.spec_length)) for one in own]
            found += [(speedup, way) for speedup, way in ways if speedup > best and way not in known]
    return [max(found, key=lambda pair: pair[0])[1]] if found else []


def one_round(
    bench: Bench,
    contenders: Seq[Contender],
    number: int,
    progress: Progress,
    task: TaskID,
    passes: Passes | None = None,
) -> None:
    """Run all prompts with each contender that is not out, in turns. passes: learns what they took."""
    plain, running = contenders[0], [one for one in contenders if not one.is_out]
    for group in range(len(bench.groups)):
        order = _rotated(running, number + group)
        for place in reversed(range(PLAIN_EVERY, len(order), PLAIN_EVERY)):
            order.insert(place, plain)  # all speed-ups hang on it, and the machine drifts
        tallies: dict[Way, list[Tally]] = {one.way: [] for one in running}
        for one in order:
            progress.update(task, description=f"measuring: {one.way}")
            tally = Tally(Variant(one.way.draft, 0), bench.plan.temperature)
            bench.once(one.way, group, f"round {number} of {one.way}", tally)
            tallies[one.way].append(tally)
            one.tally.steps += tally.steps
            progress.advance(task)
        plain_steps = [step for tally in tallies[plain.way] for step in tally.steps]
        for one in running:
            one.seconds.setdefault(group, {})[number] = median(per_token_s(t.steps) for t in tallies[one.way])
            if passes is not None and one is not plain:
                passes.add(plain_steps, tallies[one.way][0].steps)


def _together(turns: Mapping[str, Seq[Turn]]) -> float:
    """Return how many requests ran at once."""
    return fmean(step.num_decoding for own in turns.values() for t in own for step in full_steps(t.plain.steps))


def drop_slow(contenders: Seq[Contender]) -> None:
    """Take those out of the race that are far behind, once they had their rounds."""
    running = [one for one in contenders if not one.is_out]
    best = max(one.measured.speedup for one in running)
    for one in running:
        is_plain = one is contenders[0]
        if not is_plain and one.measured.num_rounds >= FEWEST_ROUNDS and one.measured.speedup < OUT * best:
            one.is_out = True


def _rotated(ways: Seq[Any], number: int) -> list[Any]:
    first = number % len(ways)
    return [*ways[first:], *ways[:first]]
