"""`benchmarks.throughput`: many requests at once, decoded plainly, with fixed draft lengths and with pacing=auto.

A run keeps so many requests going: where one ends, the next begins, and when there is none left the run is over. What
is still going then is cut off: a batch that empties would be another, smaller concurrency. Lengths differ, so that
requests do not end together. Prompts are part of the run, as they are of a server's day, and so is what the drafter
takes for them.

In every repeat and at every concurrency the variants do the same work side by side: the one that is furthest behind
steps next, for a twentieth of a second, because a shared machine is faster in one second than in the next. The engine
of a variant lives through the whole benchmark, as a server's does, and so does what its pacing has learned. Beside the
real drafter stands one that is always wrong and takes no time: with it, auto has to cost nothing. And beside the plain
engine stands its double: how far the two are apart is the noise of the run, below which no ratio says anything.
throughput_results.py makes numbers of it.
"""

import itertools
import time
from collections.abc import Iterator, Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks import throughput_results as results
from benchmarks.start import measuring, start
from forerun import drafters
from forerun.bench import latency
from forerun.bench.plans import Plan, prompt_file, repeats, shape
from forerun.bench.results import print_ceiling, record_of
from forerun.bench.tables import table
from forerun.bench.widen import load_widened, measured_target
from forerun.cli import flags
from forerun.config import EngineConfig
from forerun.drafters import Drafter
from forerun.engine.llm import LLM
from forerun.engine.request import Request
from forerun.errors import BadOption, shown
from forerun.kv.cache import PAGED_BLOCK_TOKENS
from forerun.memory.machine import spare_what_is_loaded
from forerun.models.loading import Checkpoint
from forerun.models.runner import Run, Runner
from forerun.pacing import Pacing
from forerun.registry import option
from forerun.text.terminal import make_console
from forerun.types import Budget, Coins, Draft, Probs, SamplingParams, Sequence, StepReport

PROBE_SLOT = -1  # of the cache, for a pass before any request
SLICE_S = 0.05  # that one variant steps before another one does
LENGTHS = (1.0, 0.5, 1.5, 0.75, 1.25)  # of one request after the other, over max_tokens


@dataclass(frozen=True)
class ThroughputPlan(Plan):
    """What to measure. Raises BadOption for what leaves nothing to compare."""

    shape: str = shape()
    concurrencies: tuple[int, ...] = option((1, 2, 4, 8, 16, 32), "requests at once", flag="--concurrency", min=1)
    spec_lengths: tuple[int, ...] = option(
        (1, 3, 5, 8), "fixed draft length to compare with", flag="--spec-length", min=1
    )
    max_tokens: int = option(48, "tokens per request, on average", min=2)
    num_repeats: int = repeats(3, "times everything is run, each time on other prompts", least=2)
    num_waves: int = option(3, "requests of a run, over those at once", flag="--waves", min=1)
    temperature: float = option(0.0, "0 = greedy")
    prompt_file: Path | None = prompt_file()
    wrong_drafter: bool = option(True, "measure auto with a drafter that is always wrong, too")
    seed: int = option(1, "of the sampled runs; each prompt adds its index")

    def __post_init__(self) -> None:
        if self.num_repeats < 2:
            raise BadOption(
                f"--repeats {self.num_repeats} is not possible: the best fixed length of a repeat is chosen on the "
                "others, so there must be 2"
            )
        for name, flag in (("concurrencies", "--concurrency"), ("spec_lengths", "--spec-length")):
            values = getattr(self, name)
            if not values or min(values) < 1 or len(set(values)) < len(values):
                said = " ".join(map(str, values)) or "nothing"
                raise BadOption(f"{flag} {said} is not possible: each must be at least 1, and none twice")
        super().__post_init__()


def run(config: EngineConfig, plan: ThroughputPlan) -> dict[str, Any]:
    """Measure, print tables, and return all of it for JSON. Raises UserError for what cannot be measured.

    Batch size, lengths and caches of the engines are what the plan needs, whatever the configuration says.
    """
    _refuse(config)
    texts = _read_prompts(plan)
    console = make_console()
    checkpoint = load_widened(measured_target(config, plan.shape), plan.shape, console)
    prompts = [checkpoint.text_tokenizer.encode(text) for text in texts]
    llms = _build(checkpoint, config, plan, prompts)
    spare_what_is_loaded()
    ceiling = print_ceiling(checkpoint.model, console)
    _warm_up(llms, prompts)
    with latency.progress_bar() as progress:
        runs = _measure(llms, prompts, plan, progress)
    lines = results.lines_of(runs, plan.spec_lengths)
    bars = results.bars_of(lines)
    drafts = latency.draft_models(llm.engine.drafter.first for llm in llms.values())
    for part in (table(lines, results.RATES), "", table(lines, results.COSTS), results.NOTES):
        console.print(part)
    results.print_bars(bars, console)
    _print_hits(runs, console)
    return {
        "bench": "throughput",
        "target": checkpoint.name,
        "widened": plan.shape != "none",
        "plan": plan.record(),
        "draft": config.draft,
        **record_of([], checkpoint.model, drafts, ceiling),
        "lines": [asdict(line) for line in lines],
        "bars": {name: asdict(bar) for name, bar in bars.items()},
        "runs": [{**asdict(counts), "tokens_per_s": counts.tokens_per_s} for counts in runs],
    }


def _refuse(config: EngineConfig) -> None:
    """Raise BadOption, before anything is loaded, for a drafter or a pacing policy that leaves nothing to compare."""
    if drafters.resolve(config.draft)[0] == "none":
        raise BadOption(f"draft={shown(config.draft)} leaves nothing to compare with plain decoding: name a drafter")
    if not config.pacing_spec.startswith("auto") and config.pacing is not None:
        raise BadOption(
            f"pacing={shown(config.pacing)} is not what is measured here: leave it out, or name auto's options"
        )


def _read_prompts(plan: ThroughputPlan) -> list[str]:
    """Different ones for every repeat where there are enough. Raises as `latency.read_prompts`, and BadOption."""
    most = max(plan.concurrencies)
    found = latency.read_prompts(most * plan.num_waves * plan.num_repeats, plan.prompt_file)
    if len(found) < most:
        raise BadOption(
            f"--concurrency {most} needs as many prompts, and the prompt file has {len(found)}: lower it, or name a "
            "longer --prompt-file"
        )
    return [text for _, text in found]


# ---------------------------------------------------------------------------------------------------------- engines


class AlwaysWrong(Drafter):
    """Proposes one id again and again, as far as it may: one that the target never emits. Takes no time for it."""

    def __init__(self, token: int) -> None:
        self._token, self._law = token, Probs(point=token)

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        sizes = [self._size(b, budget) for b in range(len(seqs))]
        return Draft.chains([[self._token] * size for size in sizes], [[self._law] * size for size in sizes])

    def _size(self, b: int, budget: Budget) -> int:
        most = budget.num_tokens[b]
        return next((depth for depth in range(most) if not budget.go_on(b, depth, self._law)), most)


def never_emitted(runner: Runner, prompt: Seq[int]) -> int:
    """The id that is furthest from being the likeliest one at any place of a prompt."""
    runner.cache.open(PROBE_SLOT, prompt)
    try:
        (logits,) = runner.forward([Run(PROBE_SLOT, prompt)]).logits
    finally:
        runner.cache.release(PROBE_SLOT)
    behind = logits - logits.max(axis=1, keepdims=True)
    return int(behind.max(axis=0).argmin())


def _build(
    checkpoint: Checkpoint, config: EngineConfig, plan: ThroughputPlan, prompts: Seq[Seq[int]]
) -> dict[str, LLM]:
    """One engine per variant over the same weights, each with room for the largest batch and no more."""
    longest = max(map(len, prompts)) + round(max(LENGTHS) * plan.max_tokens)
    most = max(plan.concurrencies)
    # A request is admitted only with a block to spare for all that may grow.
    blocks = -(-longest // PAGED_BLOCK_TOKENS) + 1
    options: dict[str, Any] = {
        **config.options(),
        "max_batch_size": most,
        "max_seq_len": min(longest, checkpoint.model.config.max_positions),
        "kv_cache_tokens": most * blocks * PAGED_BLOCK_TOKENS if config.kv_cache_backend == "paged" else None,
        "prefix_caching": False,  # the same prompts come again
    }
    draft = latency.loaded_once(config.draft, checkpoint, config.ignored_config_keys)
    auto = {"pacing": config.pacing or "auto", "spec_length": config.spec_length}
    wanted: dict[str, dict[str, Any]] = {results.PLAIN: {"draft": "none", "pacing": "fixed", "spec_length": None}}
    wanted[results.AGAIN] = wanted[results.PLAIN]
    for length in plan.spec_lengths:
        wanted[results.fixed_name(length)] = {"draft": draft, "pacing": "fixed", "spec_length": length}
    wanted[results.AUTO] = {"draft": draft, **auto}
    if plan.wrong_drafter:
        wanted[results.WRONG] = {"draft": "lookup", **auto}
    llms = {name: LLM(checkpoint, **{**options, **own}) for name, own in wanted.items()}
    if plan.wrong_drafter:
        engine = llms[results.WRONG].engine
        engine.drafter.members[engine.drafter.main] = AlwaysWrong(never_emitted(engine.runner, prompts[0]))
    return llms


def _warm_up(llms: dict[str, LLM], prompts: Seq[list[int]]) -> None:
    """First runs pay for page faults and for kernels being chosen; that is no part of any variant."""
    for llm in llms.values():
        llm.measure_passes()
        llm.generate(prompts[0], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))


# ------------------------------------------------------------------------------------------------------------- runs


class _Grants:
    """Tokens that a pacing policy granted in the last step, over all sequences."""

    def __init__(self, pacing: Pacing) -> None:
        self._budget, self.last = pacing.budget, 0
        pacing.budget = self  # type: ignore[method-assign]

    def __call__(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[int]:
        granted = self._budget(seqs, limits)
        self.last = sum([min(pair) for pair in zip(granted, limits, strict=True)]) if any(granted) else 0
        return granted


class _Meter:
    """Hears the steps of one engine and counts them, each from the end of the step before."""

    def __init__(self, variant: str, llm: LLM) -> None:
        self.variant, self.llm = variant, llm
        runner = llm.engine.drafter.first.runner
        self._clock = None if runner is None else latency.ForwardClock(runner)
        self._grants = None if variant in (results.PLAIN, results.AGAIN) else _Grants(llm.engine.pacing)
        self.counts = results.Counts(variant, 0, 0)
        self._going: list[Request] = []
        self._waiting: Iterator[tuple[Seq[int], SamplingParams]] = iter(())
        self._last = 0.0

    def begin(self, wanted: Seq[tuple[Seq[int], SamplingParams]], concurrency: int, repeat: int) -> None:
        """Get ready to keep `concurrency` of the wanted requests going."""
        self.counts = results.Counts(self.variant, concurrency, repeat)
        self._waiting, self._going = iter(wanted), list[Request]()

    def advance(self) -> bool:
        """Step for a slice of time, and count; False when fewer are going than there should be, and cut these off."""
        if self._clock is not None:
            self._clock.take()
        self._last = began = time.perf_counter()
        with latency.heard(self.llm.engine, self._note):
            while self._last - began < SLICE_S:
                if not self._fill():
                    for request in self._going:
                        self.llm.engine.abort(request)
                    return False
                self.llm.engine.step()
        return True

    def _fill(self) -> bool:
        """Let the next requests begin where others have ended; False where there are not enough."""
        scheduler = self.llm.engine.scheduler
        if len(scheduler.running) + len(scheduler.waiting) == self.counts.concurrency:
            return True  # as at most steps, which are not to pay for a look at every request
        self._going = [request for request in self._going if request.seq.finish_reason is None]
        for prompt, params in itertools.islice(self._waiting, self.counts.concurrency - len(self._going)):
            self._going.append(self.llm.engine.add(prompt, params))
        return len(self._going) == self.counts.concurrency

    def _note(self, report: StepReport) -> None:
        now = time.perf_counter()
        draft_s = 0.0 if self._clock is None else self._clock.take()
        seconds, self._last = now - self._last, now
        counts = self.counts
        counts.num_steps += 1
        counts.num_sequence_steps += report.num_decoding
        counts.num_committed += report.num_committed
        counts.num_granted += 0 if self._grants is None else self._grants.last
        counts.num_drafted += report.num_drafted
        counts.num_accepted += report.num_accepted
        counts.seconds += seconds
        counts.forward_s += report.target_forward_s + draft_s


def _measure(
    llms: dict[str, LLM], prompts: Seq[Seq[int]], plan: ThroughputPlan, progress: Progress
) -> list[results.Counts]:
    meters = [_Meter(name, llm) for name, llm in llms.items()]
    task = progress.add_task("measuring", total=plan.num_repeats * len(plan.concurrencies) * len(meters))
    runs = []
    for repeat, concurrency, first in _turns(plan):
        begin = repeat * max(plan.concurrencies) * plan.num_waves
        wanted = [_wanted(prompts, begin + i, plan) for i in range(concurrency * plan.num_waves)]
        behind = latency.rotated(meters, first)
        for meter in behind:
            meter.begin(wanted, concurrency, repeat)
        while behind:
            meter = min(behind, key=lambda meter: meter.counts.num_committed)
            progress.update(task, description=f"{concurrency} at once: {meter.variant}")
            if not meter.advance():
                behind.remove(meter)
                runs.append(meter.counts)
                progress.advance(task)
    return runs


def _wanted(prompts: Seq[Seq[int]], i: int, plan: ThroughputPlan) -> tuple[Seq[int], SamplingParams]:
    """The i-th request of all."""
    max_tokens = round(LENGTHS[i % len(LENGTHS)] * plan.max_tokens)
    i %= len(prompts)
    params = SamplingParams(max_tokens=max_tokens, temperature=plan.temperature, seed=plan.seed + i, ignore_eos=True)
    return prompts[i], params


def _turns(plan: ThroughputPlan) -> Iterator[tuple[int, int, int]]:
    """(repeat, concurrency, which variant goes first), another one each time."""
    pairs = itertools.product(range(plan.num_repeats), plan.concurrencies)
    return ((repeat, concurrency, turn) for turn, (repeat, concurrency) in enumerate(pairs))


def _print_hits(runs: Seq[results.Counts], console: Console) -> None:
    """Say so where the drafter that is to be always wrong was right."""
    hits = sum(counts.num_accepted for counts in runs if counts.variant == results.WRONG)
    if hits:
        console.print(f"the drafter that is to be always wrong was right {hits} times")


command = measuring(
    run,
    ThroughputPlan,
    flags.engine("target", "ignore_config_keys", "draft", *flags.MODEL),
    "Compare plain decoding, fixed draft lengths and pacing=auto with many requests at once, in tokens per second.",
)


if __name__ == "__main__":
    start(command)
