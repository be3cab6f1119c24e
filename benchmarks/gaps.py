"""`benchmarks.gaps` measures the time to a first token, and the gaps between tokens while a long prompt is read.

A run has two parts. First a prompt is read, and then the same one again, which is in the prefix cache: both give the
seconds to the first token. Then a stream decodes alone, another request with a long prompt arrives, and after that
prompt has been read both decode. A gap is the time between two steps in which one request emits. After the long
prompt's first token drafters may still have to catch up with it. In the variant `late` they do all of that then, which
is the worst case.

Variants take turns within each repeat, on the same prompts. Their engines, and what their pacing has learned, last for
the whole benchmark. A model with too few positions for the prompt gets more of them in memory: its text means nothing
there, but its passes take as long as with real positions. gaps_results.py computes the numbers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from benchmarks.gaps_results import FIRST_TOKENS, GAPS, NOTES, Gaps, Run, lines_of, print_summary
from benchmarks.start import measuring, start
from benchmarks.throughput_results import AUTO, PLAIN, fixed_name
from forerun import drafters
from forerun.bench import latency
from forerun.bench.plans import Plan, prompt_file, repeats, shape
from forerun.bench.results import print_ceiling, record_of
from forerun.bench.tables import table
from forerun.bench.widen import load_widened, measured_target, with_positions
from forerun.cli import flags
from forerun.config import AUTO_SPEC_LENGTH, DEFAULT_SPEC_LENGTH, EngineConfig
from forerun.engine.llm import LLM
from forerun.engine.request import Request
from forerun.errors import BadOption, shown
from forerun.kv.cache import PAGED_BLOCK_TOKENS
from forerun.memory.machine import spare_what_is_loaded
from forerun.models.loading import Checkpoint
from forerun.registry import option
from forerun.text.terminal import make_console
from forerun.types import SamplingParams, StepReport

STREAM_PROMPT_TOKENS = 64
ALONE_STEPS = 40  # of the stream, before the long prompt comes in
WARM_UP_TOKENS = 32
LEAST_CHUNK_TOKENS = 2  # of the long prompt in a step, on average, where streams are not to wait for whole ones
SPARE_BLOCKS = 2  # for each request: the scheduler admits a request only with a spare block for each one that may grow


@dataclass(frozen=True)
class GapsPlan(Plan):
    """The options of the benchmark."""

    shape: str = shape()
    spec_length: int = option(DEFAULT_SPEC_LENGTH, "fixed draft length beside plain decoding and auto", min=1)
    prompt_tokens: int = option(2000, "of the prompt that is read twice", min=2)
    long_prompt_tokens: int = option(4000, "of the prompt that comes in beside a stream", min=2)
    num_streams: int = option(1, "that decode meanwhile", flag="--streams", min=1)
    num_steps: int = option(
        100, "behind the first token of that, of which the gaps are measured", flag="--steps", min=2
    )
    num_repeats: int = repeats(3, "times everything is run, each time on other prompts")
    prompt_file: Path | None = prompt_file('"id" and "text", joined')

    @property
    def tokens_per_step(self) -> int:
        """The most tokens that one request emits in a step."""
        return max(self.spec_length, AUTO_SPEC_LENGTH) + 1


def run(config: EngineConfig, plan: GapsPlan) -> dict[str, Any]:
    """Measure, print tables, and return all of it for JSON. Raises UserError for what cannot be measured.

    The plan decides batch size, lengths and caches of the engines; those of the configuration are replaced.
    """
    _refuse(config)
    texts = [text for _, text in latency.read_prompts(1_000_000, plan.prompt_file)]
    console = make_console()
    sizes = _Sizes.of(config, plan)
    checkpoint = load_widened(measured_target(config, plan.shape), plan.shape, console)
    checkpoint = _with_positions(checkpoint, sizes.max_seq_len, console)
    llms = _build(checkpoint, config, plan, sizes, console)
    spare_what_is_loaded()
    prompts = Prompts([i for text in texts for i in checkpoint.text_tokenizer.encode(text)])
    ceiling = print_ceiling(checkpoint.model, console)
    for llm in llms.values():  # a first run pays for page faults and for choosing kernels
        llm.generate([prompts.take(config.prefill_chunk_tokens)], sizes.params(WARM_UP_TOKENS, "warm-up"))
    with latency.progress_bar() as progress:
        runs = _measure(llms, prompts, plan, sizes, progress)
    lines = lines_of(runs)
    for part in (table(lines, FIRST_TOKENS), "", table(lines, GAPS), NOTES):
        console.print(part)
    print_summary(lines, PLAIN, console)
    drafts = latency.draft_models(llm.engine.drafter.first for llm in llms.values())
    return {
        "bench": "gaps",
        "target": checkpoint.name,
        "widened": plan.shape != "none",
        "plan": plan.record(),
        "max_positions": checkpoint.model.config.max_positions,
        "draft": config.draft,
        "draft_catchup_tokens": config.draft_catchup_tokens,
        "prefill_chunk_tokens": config.prefill_chunk_tokens,
        "prefill_stretch": config.prefill_stretch,
        "max_itl_ms": config.max_itl_ms,
        **record_of([], checkpoint.model, drafts, ceiling),
        "lines": [asdict(line) for line in lines],
        "runs": [asdict(run) for run in runs],
    }


def _refuse(config: EngineConfig) -> None:
    """Raise BadOption for a pacing policy that the benchmark has no variant for, before any loading."""
    if config.pacing is not None and not config.pacing_spec.startswith(AUTO):
        raise BadOption(f"pacing={shown(config.pacing)} is not possible here: leave it out, or name auto's options")


# ---------------------------------------------------------------------------------------------------------- engines


@dataclass(frozen=True)
class _Sizes:
    """The tokens that requests may emit and the longest sequence, so that no request finishes before a run is over."""

    stream_tokens: int
    long_tokens: int
    max_seq_len: int
    kv_cache_tokens: int | None

    @classmethod
    def of(cls, config: EngineConfig, plan: GapsPlan) -> _Sizes:
        chunk = max(1, min(config.prefill_chunk_tokens, config.max_num_batched_tokens - 1 - plan.num_streams))
        if config.prefill_stretch or config.max_itl_ms:
            chunk = min(chunk, LEAST_CHUNK_TOKENS)
        num_reading = -(-plan.long_prompt_tokens // chunk) + 2
        per_step = 1 if _is_plain(config) else plan.tokens_per_step
        stream = (ALONE_STEPS + num_reading + plan.num_steps + 1) * per_step
        longer = (plan.num_steps + 2) * per_step
        both = (STREAM_PROMPT_TOKENS + stream, plan.long_prompt_tokens + longer)
        single = plan.prompt_tokens + plan.tokens_per_step, config.prefill_chunk_tokens + WARM_UP_TOKENS
        blocks = -(-max(plan.num_streams * both[0] + both[1], *single) // PAGED_BLOCK_TOKENS)
        blocks += (1 + plan.num_streams) * SPARE_BLOCKS
        pool = blocks * PAGED_BLOCK_TOKENS if config.kv_cache_backend == "paged" else None
        return cls(stream, longer, max(*both, *single), pool)

    def params(self, max_tokens: int, salt: str) -> SamplingParams:
        """Return greedy parameters that ignore the end of sequence. salt: requests with the same one share prompts."""
        return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, cache_salt=salt)


def _is_plain(config: EngineConfig) -> bool:
    """Whether nothing is compared with plain decoding."""
    return drafters.resolve(config.draft)[0] == "none"


def _with_positions(checkpoint: Checkpoint, num: int, console: Console) -> Checkpoint:
    """Return the checkpoint with at least `num` positions, and print a line where its own are fewer."""
    own = checkpoint.model.config.max_positions
    if own >= num:
        return checkpoint
    console.print(
        f"positions of {checkpoint.name}: {num:,} instead of {own:,}, in memory, for the prompt's length; what it says "
        "beyond its own means nothing"
    )
    return with_positions(checkpoint, num)


def _build(
    checkpoint: Checkpoint, config: EngineConfig, plan: GapsPlan, sizes: _Sizes, console: Console
) -> dict[str, LLM]:
    """Build one engine per variant over the same weights; `late` only for a draft model, which can be behind.

    Where draft is "none", plain decoding is the only one.
    """
    options: dict[str, Any] = {
        **config.options(),
        "max_batch_size": 1 + plan.num_streams,
        "max_num_batched_tokens": max(1 + plan.num_streams, config.max_num_batched_tokens),
        "max_seq_len": sizes.max_seq_len,
        "kv_cache_tokens": sizes.kv_cache_tokens,
    }
    plain: dict[str, Any] = {"draft": "none", "pacing": "fixed", "spec_length": None}
    if _is_plain(config):
        return {PLAIN: LLM(checkpoint, **{**options, **plain})}
    draft = latency.loaded_once(config.draft, checkpoint, config.ignored_config_keys)
    if isinstance(draft, Checkpoint):
        draft = _with_positions(draft, sizes.max_seq_len, console)
    fixed: dict[str, Any] = {"draft": draft, "pacing": "fixed", "spec_length": plan.spec_length}
    name = fixed_name(plan.spec_length)
    wanted: dict[str, dict[str, Any]] = {
        PLAIN: plain,
        name: fixed,
        f"{name}, late": fixed,
        AUTO: {"draft": draft, "pacing": config.pacing or AUTO, "spec_length": config.spec_length},
    }
    llms = {variant: LLM(checkpoint, **{**options, **own}) for variant, own in wanted.items()}
    for llm in llms.values():
        llm.measure_passes()
    late = llms[f"{name}, late"].engine
    late.pacing.prepares = lambda seq: False  # type: ignore[method-assign]
    if late.drafter.first.runner is None:
        del llms[f"{name}, late"]
    return llms


# ------------------------------------------------------------------------------------------------------------- runs


class Prompts:
    """Pieces of one long text, which starts again where it ends."""

    def __init__(self, ids: Seq[int]) -> None:
        self._ids = itertools.cycle(ids)

    def take(self, num_tokens: int) -> list[int]:
        """Return the next tokens of the text."""
        return list(itertools.islice(self._ids, num_tokens))


class _Gap(NamedTuple):
    """The seconds before a step in which a request emitted, and the tokens that draft models caught up in that step."""

    seconds: float
    num_caught_up: int


class _Clock:
    """Runs the steps of an engine and notes the gaps of its requests."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._last: dict[Request, float] = {}  # the time at which each request emitted last
        self._num_caught_up = 0
        self.requests: list[Request] = []

    def submit(self, prompt: list[int], params: SamplingParams) -> Request:
        """Submit one more request."""
        request = self._llm.engine.add(prompt, params)
        self.requests.append(request)
        return request

    def until(self, is_done: Callable[[], bool]) -> list[_Gap]:
        """Run steps until is_done(), and return the gaps that end in these steps."""
        gaps = list[_Gap]()
        with latency.heard(self._llm.engine, self._hear):
            while not is_done():
                gaps += self._step()
        return gaps

    def _hear(self, report: StepReport) -> None:
        self._num_caught_up = sum(draft.num_catchup_tokens for draft in report.drafts.values())

    def _step(self) -> Iterator[_Gap]:
        had = [request.seq.num_output_tokens for request in self.requests]
        self._llm.engine.step()
        now = time.perf_counter()
        for request, num in zip(self.requests, had, strict=True):
            if request.seq.num_output_tokens > num:
                if request in self._last:
                    yield _Gap(now - self._last[request], self._num_caught_up)
                self._last[request] = now


def _measure(llms: dict[str, LLM], prompts: Prompts, plan: GapsPlan, sizes: _Sizes, progress: Progress) -> list[Run]:
    task = progress.add_task("measuring", total=plan.num_repeats * len(llms))
    runs = []
    for repeat in range(plan.num_repeats):
        prompt, stream, longer = map(prompts.take, (plan.prompt_tokens, STREAM_PROMPT_TOKENS, plan.long_prompt_tokens))
        for variant in latency.rotated(list(llms), repeat):
            progress.update(task, description=variant)
            llm = llms[variant]
            params = sizes.params(plan.tokens_per_step, f"{repeat}")
            first, again = _first_token(llm, prompt, params), _first_token(llm, prompt, params)
            around = _around_a_long_prompt(llm, stream, longer, repeat, plan, sizes)
            runs.append(Run(variant, repeat, *first, *again, **around))
            progress.advance(task)
    return runs


def _first_token(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[float, int]:
    """Return the seconds to a prompt's first token, and the tokens of the prompt that the prefix cache had."""
    start, clock = time.perf_counter(), _Clock(llm)
    request = clock.submit(prompt, params)
    clock.until(lambda: request.seq.num_output_tokens > 0)
    seconds = time.perf_counter() - start
    llm.engine.abort(request)
    return seconds, request.report.num_cached_tokens


def _around_a_long_prompt(
    llm: LLM, prompt: list[int], long_prompt: list[int], repeat: int, plan: GapsPlan, sizes: _Sizes
) -> dict[str, Any]:
    """Measure streams and a long prompt that arrives beside them; returns these fields of a run."""
    salt, clock = f"{repeat}, long", _Clock(llm)
    streams = [clock.submit(prompt, sizes.params(sizes.stream_tokens, salt)) for _ in range(plan.num_streams)]
    clock.until(lambda: all(stream.report.num_steps for stream in streams))
    first = streams[0].report.num_steps
    alone = clock.until(lambda: streams[0].report.num_steps >= first + ALONE_STEPS)
    start = time.perf_counter()
    longer = clock.submit(long_prompt, sizes.params(sizes.long_tokens, salt))
    reading = clock.until(lambda: longer.report.num_steps > 0)
    long_prompt_s = time.perf_counter() - start
    behind = clock.until(lambda: longer.report.num_steps > plan.num_steps)
    for request in clock.requests:
        llm.engine.abort(request)
    catching_up = [gap for gap in behind if gap.num_caught_up]
    return {
        "alone": _numbers(alone),
        "reading": _numbers(reading),
        "behind": _numbers(behind),
        "catching_up": _numbers(catching_up) if catching_up else None,
        "most_caught_up": max(gap.num_caught_up for gap in behind),
        "long_prompt_s": long_prompt_s,
        "draft_prefill_s": longer.report.draft_prefill_s,
    }


def _numbers(gaps: Seq[_Gap]) -> Gaps:
    return Gaps.of([gap.seconds for gap in gaps])


READING = ("prefill_chunk_tokens", "prefill_stretch", "max_itl_ms")  # options of how a prompt is read


command = measuring(
    run,
    GapsPlan,
    flags.engine("target", "ignore_config_keys", "draft", *READING, "draft_catchup_tokens", *flags.MODEL),
    "Measure the time to the first token, cold and cached, and the gaps between tokens while a long prompt is read.",
)


if __name__ == "__main__":
    start(command)
