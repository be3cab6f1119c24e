"""`benchmarks.quality` measures what fewer bits cost: perplexity, and how often drafts are accepted.

Every variant of one checkpoint reads the same text, in windows that begin with an empty cache. As a drafter for the
base variant, a variant is accepted with probability sum(min(p, q)) at temperature 1 (book 1.2), and when both have the
same likeliest id at temperature 0: both are means over all positions of the text. Lookup's alpha-hat is counted on
greedy continuations of the windows' beginnings.

The text is the documentation that every Python brings along (pydoc_data.topics), the held-out code for the shipped
target, or a file.
"""

import math
import sys
import tempfile
from collections.abc import Callable, Sequence as Seq
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.peers import say
from benchmarks.start import measuring, start
from forerun import ops
from forerun.bench import latency
from forerun.bench.plans import Plan
from forerun.bench.tables import Column, table
from forerun.bench.widen import describe, num_parameters
from forerun.cli import flags
from forerun.config import HOW_QUANTISED, EngineConfig, Quantization
from forerun.engine.llm import LLM
from forerun.engine.opened import Opened, is_shipped
from forerun.errors import BadOption, NotFound, shown
from forerun.kv.cache import BlockCache
from forerun.models import named
from forerun.models.hub import locate
from forerun.models.loading import DTYPES, Checkpoint, load_checkpoint
from forerun.models.runner import Run, Runner
from forerun.models.saving import save_checkpoint
from forerun.models.source import open_source
from forerun.ops.torch_tensors import HostWeights
from forerun.registry import option
from forerun.text.terminal import make_console
from forerun.types import SamplingParams

NUM_PROMPTS = 240  # of held-out code, all there are
AS_IT_IS = "file"  # the variant that computes with the checkpoint's own quantised weights
BASE = "bfloat16"
VARIANTS = ("float32", BASE, "int8", "int4")
EIGHT_BIT_CACHE = "+kv_int8"  # behind the name of a variant: the same with keys and values in 8 bits


@dataclass(frozen=True)
class QualityPlan(Plan):
    """The options of the benchmark."""

    variants: tuple[str, ...] = option(
        (),
        "float32, bfloat16, int8, int4[:group=N], or file: a quantised checkpoint as it is; each also with "
        "+kv_int8 behind it, for a KV cache in 8 bits",
        flag="--variant",
        usual="all that are possible",
    )
    num_tokens: int = option(20_000, "of the text", flag="--tokens", min=16)
    window_tokens: int = option(512, "tokens that are read with one cache", flag="--window", min=8)
    num_prompts: int = option(8, "texts that lookup continues, 0 = none", flag="--prompts", min=0)
    max_tokens: int = option(64, "tokens of each", min=2)
    text_file: Path | None = option(
        None, "file with the text", usual="Python's documentation; held-out code for the shipped target"
    )


@dataclass(frozen=True)
class QualityLine:
    """One row of the table and of the JSON. over_base: perplexity / the base's - 1. weights_mb: of one pass."""

    variant: str
    perplexity: float
    over_base: float
    drafter_alpha: float
    same_best: float
    logit_error: float  # root mean square over that of the base's logits, both without their means
    lookup_alpha_hat: float | None
    weights_mb: float


def run(config: EngineConfig, plan: QualityPlan) -> dict[str, Any]:
    """Measure, print tables, and return all of it for JSON. Raises UserError for what cannot be measured."""
    console = make_console()
    config = replace(config, target=config.target or named.PAIR)
    if config.quantization is not None or config.dtype != "auto":
        raise BadOption("dtype and quantization are what this compares: name --variant instead")
    _check(plan)
    with ExitStack() as stack:
        say("loading ...")
        given, folder = Opened.of(config).load(), locate(config.target or named.PAIR)
        is_quantised = any(stored.scheme is not None for stored in open_source(folder).tensors.values())
        if AS_IT_IS in map(_weights_of, plan.variants) and not is_quantised:
            raise BadOption(f"--variant {AS_IT_IS} is not possible: {folder} is not quantised; name another variant")
        if is_quantised:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forerun-quality-")))
            _write_dense(config, given, folder)
        names = plan.variants or (*VARIANTS, *([AS_IT_IS] if is_quantised else []))
        names = tuple(dict.fromkeys((BASE, *names)))
        weights = dict.fromkeys(map(_weights_of, names))
        made = {name: given if name == AS_IT_IS else _load(folder, name, given) for name in weights}
        loaded = {name: made[_weights_of(name)] for name in names}
        ids = text_ids(given, config, plan)
        window = min(plan.window_tokens, given.model.config.max_positions)
        windows = [ids[first : first + window] for first in range(0, len(ids) - 1, window)]
        lines = measure(loaded, windows, plan)
    console.print(table(lines, TABLE))
    text = f"{len(ids):,} tokens of {about_text(config, plan)} in windows of {max(map(len, windows))}"
    _print_notes(text, min(plan.num_prompts, len(windows)), plan, is_quantised, console)
    return {
        "bench": "quality",
        "target": given.name,
        "shape": describe(given.model.config),
        "num_parameters": num_parameters(given.model.config),
        "build": given.model.ops.build,
        "torch": torch.__version__,
        "plan": plan.record("text_file"),
        "text": about_text(config, plan),
        "num_tokens": len(ids),
        "lines": [asdict(line) for line in lines],
    }


def _check(plan: QualityPlan) -> None:
    """Raise BadOption or NotFound for what is not possible, before anything is loaded."""
    for name in map(_weights_of, plan.variants):
        if name not in (*DTYPES, AS_IT_IS):
            try:
                Quantization.parse(name)
            except BadOption as error:
                raise BadOption(
                    f"--variant {shown(name)} is not possible: it must be {', '.join(DTYPES)}, {AS_IT_IS} for a "
                    f"quantised checkpoint as it is, or {HOW_QUANTISED.removeprefix('write ')}"
                ) from error
    if plan.text_file is not None and not plan.text_file.is_file():
        raise NotFound(f"--text-file {plan.text_file} is no file: name one with text")


def _weights_of(variant: str) -> str:
    return variant.removesuffix(EIGHT_BIT_CACHE)


def about_text(config: EngineConfig, plan: QualityPlan) -> str:
    """Name the text."""
    if plan.text_file is not None:
        return str(plan.text_file)
    if is_shipped(config.target):
        return "the held-out prompts"
    return f"pydoc_data.topics of Python {sys.version.split()[0]}"


def text_ids(checkpoint: Checkpoint, config: EngineConfig, plan: QualityPlan) -> list[int]:
    """Return the first ids of the text. Raises BadOption for fewer than two."""
    if plan.text_file is None and is_shipped(config.target):
        text = "\n".join(text for _, text in latency.read_prompts(NUM_PROMPTS))
    elif plan.text_file is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
    else:
        text = plan.text_file.read_text(encoding="utf-8", errors="replace")
    text = text[: 16 * plan.num_tokens]  # far more than enough
    ids = checkpoint.text_tokenizer.encode(text)[: plan.num_tokens]
    if len(ids) < 2:
        raise BadOption(f"the text has {len(ids)} tokens, and two are the least: name a longer one, or more tokens")
    return ids


def _write_dense(config: EngineConfig, given: Checkpoint, folder: Path) -> None:
    """Write what the file's quantised weights stand for, in float32, so that it can be rounded in other ways."""
    dense = Opened.of(replace(config, dtype="float32", ops="reference")).load()
    save_checkpoint(folder, dense.model.config, HostWeights(dense.tensors), "float32", end_ids=given.end_ids)


def _load(folder: Path, name: str, given: Checkpoint) -> Checkpoint:
    """Load one variant."""
    quantization = None if name in DTYPES else str(Quantization.parse(name))
    dtype = name if name in DTYPES else BASE
    checkpoint = load_checkpoint(folder, dtype=dtype, ops=given.model.ops, quantization=quantization)
    return replace(checkpoint, tokenizer=given.tokenizer)


# ---------------------------------------------------------------------------------------------------------- measuring


@dataclass
class Sums:
    """What is added up over the positions of the text."""

    nll: float = 0.0
    overlap: float = 0.0
    same: int = 0
    error: float = 0.0
    size: float = 0.0
    num: int = 0


def measure(loaded: dict[str, Checkpoint], windows: Seq[Seq[int]], plan: QualityPlan) -> list[QualityLine]:
    """Read every window with every variant, and return a row for each; the base is among them."""
    longest = max(map(len, windows))
    runners = {
        name: _runner(checkpoint, longest, eight_bits=name.endswith(EIGHT_BIT_CACHE))
        for name, checkpoint in loaded.items()
    }
    sums = {name: Sums() for name in loaded}
    for i, window in enumerate(windows):
        say(f"window {i + 1} of {len(windows)} ...")
        next_ids = torch.tensor(window[1:])
        base = _logits(runners[BASE], window)
        base_probs = base.softmax(-1)
        base_centred = base - base.mean(-1, keepdim=True)
        for name, runner in runners.items():
            logits = base if name == BASE else _logits(runner, window)
            logprobs = logits.log_softmax(-1)
            one = sums[name]
            one.nll -= float(logprobs.gather(1, next_ids[:, None]).double().sum())
            one.overlap += float(torch.minimum(logprobs.exp(), base_probs).sum(-1).double().sum())
            one.same += int((logits.argmax(-1) == base.argmax(-1)).sum())
            one.error += float((logits - logits.mean(-1, keepdim=True) - base_centred).square().mean(-1).double().sum())
            one.size += float(base_centred.square().mean(-1).double().sum())
            one.num += len(next_ids)
    prompts = [list(window[: len(window) // 2]) for window in windows[: plan.num_prompts]]
    base_perplexity = math.exp(sums[BASE].nll / sums[BASE].num)
    lines = []
    for name, one in sums.items():
        perplexity = math.exp(one.nll / one.num)
        say(f"lookup, {name} ...")
        lines.append(
            QualityLine(
                name,
                perplexity,
                perplexity / base_perplexity - 1,
                one.overlap / one.num,
                one.same / one.num,
                math.sqrt(one.error / one.size),
                _lookup_alpha_hat(loaded[name], prompts, plan.max_tokens),
                loaded[name].model.bytes_per_pass / 1e6,
            )
        )
    return lines


def _runner(checkpoint: Checkpoint, num_tokens: int, *, eight_bits: bool) -> Runner:
    model = checkpoint.model
    dtype = ops.kv_dtype("int8" if eight_bits else "auto", model)
    cache = BlockCache.of(model, "contiguous", max_batch_size=1, max_seq_len=num_tokens, dtype=dtype)
    cache.open(0)
    return Runner(model, cache)


def _logits(runner: Runner, ids: Seq[int]) -> torch.Tensor:
    """Return float32 logits [len(ids) - 1, V] of the tokens behind the first."""
    runner.cache.truncate_to(0, 0)
    logits = torch.from_numpy(runner.forward([Run(0, list(ids[:-1]))]).logits[0])
    runner.cache.keep({0: range(len(ids) - 1)})
    return logits


def _lookup_alpha_hat(checkpoint: Checkpoint, prompts: Seq[list[int]], max_tokens: int) -> float | None:
    """Return accepted / tested tokens of lookup, greedily; None where nothing was tested."""
    llm = LLM(checkpoint, draft="lookup", spec_length=5, max_batch_size=1)
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    reports = [output.report for output in (llm.generate(prompts, params) if prompts else [])]
    num_tested = sum(report.num_tested for report in reports)
    return sum(report.num_accepted for report in reports) / num_tested if num_tested else None


# ------------------------------------------------------------------------------------------------------------- output


def _percent(form: str) -> Callable[[float], str]:
    return lambda share: f"{100 * share:{form}} %"


TABLE = (
    Column("weights", "variant"),
    Column("perplexity", "perplexity", "{:.4f}"),
    Column("over\nbfloat16", "over_base", _percent("+.2f")),
    Column("drafter's\nalpha", "drafter_alpha", "{:.3f}"),
    Column("same\nbest id", "same_best", _percent(".1f")),
    Column("logit\nerror", "logit_error", _percent(".2f")),
    Column("lookup's\nalpha", "lookup_alpha_hat", "{:.3f}"),
    Column("MB", "weights_mb", "{:.0f}"),
)


def _print_notes(text: str, num_texts: int, plan: QualityPlan, is_quantised: bool, console: Console) -> None:
    console.print(
        f"{text}; drafter's alpha: as a draft for the bfloat16 model, "
        "at temperature 1; same best id: at temperature 0; logit error: root mean square over that of its logits; "
        f"lookup's alpha: accepted over tested, greedy, {num_texts} texts of {plan.max_tokens} tokens; "
        "MB: that a pass reads"
        + ("; float32, bfloat16, int8 and int4 are made of what the file's weights stand for" if is_quantised else "")
    )


command = measuring(
    run,
    QualityPlan,
    flags.engine("target", "ignore_config_keys", "ops", "config"),
    "Measure what fewer bits cost: perplexity, and how often drafts are accepted.",
)


if __name__ == "__main__":
    start(command)
