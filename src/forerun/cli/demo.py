"""`forerun demo` writes code with the shipped model, once plainly and once with speculation.

Both texts are the same, and a table shows how long each took. The model is widened to a size at which most of the time
goes into reading its weights.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from forerun.bench.widen import (
    PROMPTS,
    load_widened,
)
from forerun.cli.show import LiveText, watched
from forerun.config import EngineConfig
from forerun.engine.llm import LLM
from forerun.engine.request import RequestOutput
from forerun.text.terminal import has_colour, make_console
from forerun.types import SamplingParams

WARM_UP_TOKENS = 4
FALLBACK_PROMPT = 'class Stack:\n    """A last-in first-out container."""\n\n    def __init__(self):\n'


@dataclass(frozen=True)
class Outcome:
    """The result of one run, with the seconds from the prompt to the last token."""

    seconds: float
    output: RequestOutput

    @property
    def tokens_per_s(self) -> float:
        return len(self.output.token_ids) / self.seconds


def run(config: EngineConfig, params: SamplingParams, shape: str, prompt: str | None) -> None:
    """Show both runs and the table on standard output. Raises UserError."""
    console = make_console()
    checkpoint = load_widened(config, shape, console)
    prompt = prompt if prompt is not None else default_prompt()
    options = {**config.options(), "prefix_caching": False}  # the warm-up must not shorten what is shown
    llms = {draft: LLM(checkpoint, **{**options, "draft": draft}) for draft in ("none", _draft(config))}
    outcomes = []
    for llm, title in zip(llms.values(), ("plain decoding", "with speculation"), strict=True):
        _warm_up(llm, prompt, params)
        console.print(f"\n--- {title} ---", style="bold")
        outcomes.append(_live(llm, prompt, params, console))
    plain, fast = outcomes
    if has_colour(console):
        legend = "green: drafted and accepted; blue: the target's own correction or bonus"
        console.print(legend, style="dim")
    console.print()
    console.print(_table(plain, fast))
    console.print(verdict(plain.output, fast.output, params, llms["none"]))
    _your_own_model(console)


def default_prompt() -> str:
    """Return the first held-out prompt, which the shipped models have never seen."""
    if not PROMPTS.is_file():
        return FALLBACK_PROMPT
    return str(json.loads(PROMPTS.read_text(encoding="utf-8").splitlines()[0])["text"])


def verdict(plain: RequestOutput, fast: RequestOutput, params: SamplingParams, llm: LLM) -> str:
    """Say whether both texts are identical, and for which mode, type, device and build that holds."""
    model = llm.checkpoint.model
    rule = "greedy" if params.greedy else f"{params.acceptance or 'match'}, temperature {params.temperature}"
    dtype = str(model.weight_dtype).removeprefix("torch.")
    mode = f"{rule}; {dtype} on {model.device}; {model.ops.build}"
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


def _warm_up(llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Run the prompt once before the clock starts, because a first run pays for page faults and choosing kernels."""
    llm.generate(prompt, SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=params.temperature, seed=0))


def _live(llm: LLM, prompt: str, params: SamplingParams, console: Console) -> Outcome:
    ids = llm.tokenizer.encode(prompt)
    live = LiveText(llm.tokenizer, console, ids)
    live.write(prompt, "dim")
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
    for name in ("", "tokens", "seconds", "tokens/s", "speed-up", "acceptance", "tokens/run"):
        table.add_column(name, justify="left" if name == "" else "right")
    for name, outcome in (("plain", plain), ("speculative", fast)):
        report = outcome.output.report
        table.add_row(
            name,
            str(len(outcome.output.token_ids)),
            f"{outcome.seconds:.2f}",
            f"{outcome.tokens_per_s:.1f}",
            f"{outcome.tokens_per_s / plain.tokens_per_s:.2f}x",
            "-" if report.acceptance_rate is None else f"{report.acceptance_rate:.0%}",
            "-" if report.mean_accepted_length is None else f"{report.mean_accepted_length:.2f}",
        )
    return table


def _your_own_model(console: Console) -> None:
    console.print(
        "\nWith a model of your own (a folder with config.json, *.safetensors, tokenizer.json):", style="bold"
    )
    console.print('  forerun generate --target ./model --draft lookup "def fib(n):"')
    console.print('  forerun generate --target ./model --draft ./small-model --rounds "def fib(n):"')
    console.print("  forerun bench latency --target ./model --draft ./small-model")
