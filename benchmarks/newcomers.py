"""`benchmarks.newcomers` measures who waits while a long prompt is read: newcomers of its model, and another's stream.

Two models are in one process, each with its engine and thread, as in `forerun serve`. A newcomer's step is the median
gap of a stream of its model that has the machine to itself. The other stream's step is the median of its own nine steps
around a gap: where a draft is long so is the step, and its text may come to repeat itself. In each repeat

* the long prompt is read alone, by an engine with the options that were given and by one that reads whole chunks
  (`prefill_stretch=0`), which take turns to be first: what the first loses is what newcomers cost where none comes;
* it is read while short prompts come, one behind the other, at any moment of its steps: the time to their first tokens;
* it is read while the other model streams: the gaps of that.

All prompts are pieces of one text, and none is in the prefix cache.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gaps import Prompts
from benchmarks.start import measuring, start
from forerun.bench import latency
from forerun.bench.plans import Plan, prompt_file, repeats
from forerun.bench.results import print_ceiling
from forerun.bench.tables import Column, Ratio, milliseconds, table
from forerun.cli import flags
from forerun.config import EngineConfig
from forerun.engine.llm import LLM
from forerun.engine.request import Request
from forerun.errors import BadOption
from forerun.registry import option
from forerun.text.terminal import make_console
from forerun.types import SamplingParams, StepReport

STREAM_PROMPT_TOKENS = 64
ALONE_STEPS = 60  # of a stream that has the machine to itself
SPARE_TOKENS = 8192  # of the KV cache, beside two long prompts
PAUSE_STEPS = 20  # between two newcomers, at most
STEPS_AROUND = 4  # a gap, on either side, whose median is the stream's step there


@dataclass(frozen=True)
class NewcomersPlan(Plan):
    """The options of the benchmark."""

    beside: str = option("shipped", "the other model of the process, which streams")
    long_prompt_tokens: int = option(6000, "of the prompt that is read meanwhile", min=2)
    short_prompt_tokens: int = option(12, "of each newcomer's prompt", min=2)
    num_repeats: int = repeats(3, "times everything is run, each time on other prompts")
    prompt_file: Path | None = prompt_file('"id" and "text", joined')


@dataclass(frozen=True)
class Run:
    """One repeat, in seconds.

    step_s: of the model that reads; first_tokens_s: of newcomers. other_step_s: of the other model's stream while the
    prompt is read; gap_steps: between its steps, see `gap_steps`. long_s: to the long prompt's first token alone,
    whole_s: the same in whole chunks, beside_newcomers_s and beside_stream_s: while others come, and while the other
    model streams.
    """

    step_s: float
    other_step_s: float
    long_s: float
    whole_s: float
    beside_newcomers_s: float
    beside_stream_s: float
    first_tokens_s: list[float]
    gap_steps: list[float]


@dataclass(frozen=True)
class Line:
    """What the repeats showed. Ratios are within one repeat, of first tokens and gaps those of all repeats."""

    step_s: float
    other_step_s: float
    newcomer_steps: float  # to a newcomer's first token, at the median
    newcomer_most_steps: float
    gap_p99_steps: float
    gap_most_steps: float  # of the other model
    long_s: float
    long_over_whole: Ratio
    beside_newcomers_over_alone: Ratio
    beside_stream_over_alone: Ratio


def line_of(runs: Seq[Run]) -> Line:
    """Return the numbers of all repeats. Raises BadOption where the long prompt was read before a newcomer's token."""
    newcomers = [seconds / run.step_s for run in runs for seconds in run.first_tokens_s]
    if not newcomers:
        raise BadOption("the long prompt was read before a newcomer had a token: give a larger --long-prompt-tokens")
    gaps = sorted(steps for run in runs for steps in run.gap_steps)
    return Line(
        step_s=median(run.step_s for run in runs),
        other_step_s=median(run.other_step_s for run in runs),
        newcomer_steps=median(newcomers),
        newcomer_most_steps=max(newcomers),
        gap_p99_steps=gaps[-1 - len(gaps) // 100],
        gap_most_steps=gaps[-1],
        long_s=median(run.long_s for run in runs),
        long_over_whole=Ratio.of([run.long_s / run.whole_s for run in runs]),
        beside_newcomers_over_alone=Ratio.of([run.beside_newcomers_s / run.long_s for run in runs]),
        beside_stream_over_alone=Ratio.of([run.beside_stream_s / run.long_s for run in runs]),
    )


WAITING = (
    Column("step\nms", "step_s", milliseconds),
    Column("newcomer\nsteps", "newcomer_steps", "{:.1f}"),
    Column("\nmost", "newcomer_most_steps", "{:.1f}"),
    Column("other's\nstep ms", "other_step_s", milliseconds),
    Column("gap, p99\nsteps", "gap_p99_steps", "{:.2f}"),
    Column("\nmost", "gap_most_steps", "{:.2f}"),
)
LONG = (
    Column("long\ns", "long_s", "{:.2f}"),
    Column("over whole\nchunks", "long_over_whole.median", "{:.3f}"),
    Column("(range)", "long_over_whole.range", "{:.3f}"),
    Column("beside\nnewcomers", "beside_newcomers_over_alone.median", "{:.2f}"),
    Column("beside the\nstream", "beside_stream_over_alone.median", "{:.2f}"),
)
NOTES = """\
newcomer: from asking to the first token of a short prompt while the long one is read, in steps of a stream of that \
model alone, at the median and the most of all. gap: between two steps of a stream of the other model meanwhile, in \
the median of its nine steps around. long: to the long prompt's first token alone; over whole chunks: over the same \
with prefill_stretch=0; beside newcomers, beside the stream: over the same alone."""


# ------------------------------------------------------------------------------------------------------------- runs


class _Heard:
    """When the tokens of a request came, as its engine's thread told."""

    def __init__(self) -> None:
        self.times_s, self._came = list[float](), threading.Condition()

    def hear(self, request: Request) -> None:
        """Take note of a step that brought the request on."""
        with self._came:
            if request.seq.num_output_tokens:
                self.times_s.append(time.perf_counter())
            self._came.notify_all()

    def wait(self, num: int) -> None:
        """Wait until so many steps brought tokens."""
        with self._came:
            self._came.wait_for(lambda: len(self.times_s) >= num)

    def gaps_s(self) -> list[float]:
        """Return the seconds between two of them each."""
        return [b - a for a, b in itertools.pairwise(self.times_s)]


class _Bench:
    """Asks engines, each time under another salt."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts, self._num = prompts, 0

    def ask(self, llm: LLM, num_tokens: int, max_tokens: int | None) -> tuple[Request, _Heard]:
        """Submit a prompt of so many tokens."""
        self._num += 1
        heard = _Heard()
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, cache_salt=f"{self._num}")
        (request,) = llm.submit([self._prompts.take(num_tokens)], params, hear=heard.hear)
        return request, heard

    def first_token_s(self, llm: LLM, num_tokens: int) -> float:
        """Return the seconds to the first token of a prompt."""
        return self.while_read(llm, num_tokens, lambda is_read: None)

    @contextmanager
    def streaming(self, llm: LLM, max_tokens: int | None = None) -> Iterator[_Heard]:
        """Let a request stream, as long as its context is at most, and end it."""
        request, heard = self.ask(llm, STREAM_PROMPT_TOKENS, max_tokens)
        try:
            heard.wait(1)
            yield heard
        finally:
            llm.end([request])

    def step_s(self, llm: LLM) -> float:
        """Return the median gap of a stream that has the machine to itself."""
        with self.streaming(llm) as heard:  # several tokens may come in one step
            heard.wait(ALONE_STEPS)
            return median(heard.gaps_s())

    def while_read(self, llm: LLM, num_tokens: int, work: Callable[[Callable[[], bool]], None]) -> float:
        """Do `work(is_read)` while a long prompt is read, and return the seconds to that one's first token."""
        began = time.perf_counter()
        _, heard = self.ask(llm, num_tokens, 1)
        work(lambda: bool(heard.times_s))
        heard.wait(1)
        return heard.times_s[0] - began


def gap_steps(ends_s: Seq[float], steps_s: Seq[float]) -> list[float]:
    """Return the gaps between a stream's steps, each in the median of its steps around it. ends_s: when each ended."""
    found = []
    for i, (before_s, end_s) in enumerate(itertools.pairwise(ends_s), 1):
        found.append((end_s - before_s) / median(steps_s[max(0, i - STEPS_AROUND) : i + STEPS_AROUND + 1]))
    return found


def _repeat(bench: _Bench, reading: LLM, whole: LLM, other: LLM, plan: NewcomersPlan, number: int) -> Run:
    long, chance = plan.long_prompt_tokens, random.Random(number)
    step_s = bench.step_s(reading)
    alone = {
        id(llm): bench.first_token_s(llm, long) for llm in ((reading, whole) if number % 2 == 0 else (whole, reading))
    }
    first_tokens_s = list[float]()

    def newcomers(is_read: Callable[[], bool]) -> None:
        while not is_read():
            time.sleep(chance.uniform(0.5, 1) * PAUSE_STEPS * step_s)
            seconds = bench.first_token_s(reading, plan.short_prompt_tokens)
            if not is_read():
                first_tokens_s.append(seconds)

    beside_newcomers_s = bench.while_read(reading, long, newcomers)
    ends_s, steps_s = list[float](), list[float]()

    def keep_step(report: StepReport) -> None:
        ends_s.append(time.perf_counter())
        steps_s.append(report.seconds)

    with bench.streaming(other) as heard:
        heard.wait(ALONE_STEPS)
        with latency.heard(other, keep_step):
            beside_stream_s = bench.first_token_s(reading, long)
    return Run(
        step_s=step_s,
        other_step_s=median(steps_s),
        long_s=alone[id(reading)],
        whole_s=alone[id(whole)],
        beside_newcomers_s=beside_newcomers_s,
        beside_stream_s=beside_stream_s,
        first_tokens_s=first_tokens_s,
        gap_steps=gap_steps(ends_s, steps_s),
    )


def run(config: EngineConfig, plan: NewcomersPlan) -> dict[str, Any]:
    """Measure, print tables, and return all of it for JSON. Raises UserError for what cannot be measured."""
    console, runs = make_console(), list[Run]()
    num_kept = 2 * plan.long_prompt_tokens + SPARE_TOKENS
    options: dict[str, Any] = {**config.options(), "max_batch_size": 4, "kv_cache_tokens": num_kept}
    with ExitStack() as open_llms:
        reading = open_llms.enter_context(LLM.from_config(EngineConfig(**{"target": config.target, **options})))
        whole = open_llms.enter_context(LLM(reading.checkpoint, **{**options, "prefill_stretch": 0, "max_itl_ms": 0}))
        other = open_llms.enter_context(LLM.from_config(EngineConfig(**{"target": plan.beside, **options})))
        ceiling = print_ceiling(reading.checkpoint.model, console)
        texts = "".join(text for _, text in latency.read_prompts(1_000_000, plan.prompt_file))
        bench = _Bench(Prompts(reading.tokenizer.encode(texts)))
        for llm in (reading, whole, other):  # a first run pays for page faults and for choosing kernels
            bench.step_s(llm)
            bench.first_token_s(llm, min(512, plan.long_prompt_tokens))
            llm.measure_passes()
        with latency.progress_bar() as progress:
            for number in progress.track(range(plan.num_repeats), description="measuring"):
                runs.append(_repeat(bench, reading, whole, other, plan, number))
        target = reading.checkpoint.name
    line = line_of(runs)
    for part in (table([line], WAITING), "", table([line], LONG), NOTES):
        console.print(part)
    return {
        "bench": "newcomers",
        "target": target,
        "plan": plan.record(),
        "ceiling": asdict(ceiling),
        "line": asdict(line),
        "runs": [asdict(each) for each in runs],
    }


command = measuring(
    run,
    NewcomersPlan,
    flags.engine("target", "draft", "prefill_chunk_tokens", "prefill_stretch", "max_itl_ms", *flags.MODEL),
    "Measure how long newcomers, and streams of another model, wait for a long prompt that is read.",
)


if __name__ == "__main__":
    start(command)
