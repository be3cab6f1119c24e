"""What `benchmarks.paper --measure` measures, and with which models."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Iterator
from dataclasses import replace

from benchmarks import paper_alpha, paper_speed
from benchmarks.paper_plan import MEASURED, PaperPlan
from forerun import native
from forerun.bench import latency
from forerun.bench.exhibits import Exhibit
from forerun.bench.plans import LatencyPlan
from forerun.bench.widen import draft_options, num_parameters
from forerun.config import EngineConfig
from forerun.engine.factory import is_shipped, load_target
from forerun.errors import BadOption
from forerun.models import named
from forerun.models.loading import Checkpoint, load_checkpoint
from forerun.text.terminal import make_console


def exhibits(plan: PaperPlan, config: EngineConfig) -> Iterator[Exhibit]:
    """Measure and yield what the plan wants of MEASURED. Raises UserError for what cannot be measured."""
    config = replace(config, target=config.target or named.PAIR)
    if not plan.drafts and not is_shipped(config.target):
        raise BadOption("a target of your own has no draft model that ships with it: name one with --draft")
    specs = plan.drafts or ("model",)
    paths = {spec: draft_options(spec)[0] for spec in specs}  # refuses what is no draft model
    target = load_target(config)
    drafts = {spec: _load(path, target, config) for spec, path in paths.items()}
    specs = tuple(sorted(specs, key=lambda spec: num_parameters(drafts[spec].model.config)))
    if any(map(plan.wants, ("table-3", "table-5", "independence"))):
        found = paper_alpha.measure(target, list(drafts.values()), plan.ngram, plan.num_tokens, plan.seed)
        if plan.wants("table-3"):
            yield paper_alpha.table_3(found, recipe(plan, config.target, "table-3"))
        if plan.wants("table-5"):
            yield paper_alpha.table_5(found, recipe(plan, config.target, "table-5"))
        if plan.wants("independence"):
            yield paper_alpha.independence(found, plan.spec_lengths, recipe(plan, config.target, "independence"))
    if plan.wants("figure-1"):
        nearest = min(drafts.values(), key=lambda draft: abs(num_parameters(draft.model.config) - 1.9e6))
        yield paper_speed.figure_1(target, nearest, plan.seed, recipe(plan, config.target, "figure-1"))
    if plan.wants("table-2"):
        yield from _speeds(plan, config, specs, drafts)


def _load(path: str, target: Checkpoint, config: EngineConfig) -> Checkpoint:
    return load_checkpoint(
        path,
        dtype=target.model.weight_dtype,
        device=target.model.device,
        ops=target.model.ops,
        with_tokenizer=True,
        ignore_config_keys=config.ignored_config_keys,
    )


def _speeds(
    plan: PaperPlan, config: EngineConfig, specs: tuple[str, ...], drafts: dict[str, Checkpoint]
) -> Iterator[Exhibit]:
    """Measure the speeds of all draft models, and yield the two tables of them."""
    measured = LatencyPlan(
        drafts=specs,
        shape=plan.shape,
        spec_lengths=plan.spec_lengths,
        num_prompts=plan.num_prompts,
        max_tokens=plan.max_tokens,
        num_repeats=plan.num_repeats,
        seed=plan.seed,
    )
    found = latency.measured(replace(config, draft="none"), measured, make_console())
    sizes = {spec: paper_alpha.size_name(num_parameters(drafts[spec].model.config)) for spec in specs}
    model, processor = found.target.model, native.processor_name() or platform.machine()
    widened = "" if plan.shape == "none" else f", a small model widened to the shape {plan.shape}"
    about = (
        f"Target: {num_parameters(model.config):,} parameters{widened}, {model.precision}, on {processor}, "
        f"{model.ops.num_threads} threads, {found.ceiling.bytes_per_s / 1e9:.0f} GB/s; {plan.num_prompts} held-out "
        f"prompts of {plan.max_tokens} tokens."
    )
    yield paper_speed.table_2(found, sizes, about, recipe(plan, config.target, "table-2"))
    yield paper_speed.table_4_measured(found, sizes, about, recipe(plan, config.target, "table-2"))


def recipe(plan: PaperPlan, target: str | None, name: str) -> str:
    """Return the command that measures this exhibit alone."""
    assert name in MEASURED
    words = ["python", "-m", "benchmarks.paper", name, "--measure"]
    words += ["--target", str(target)] if target is not None else []
    words += [word for draft in plan.drafts for word in ("--draft", draft)]
    if name == "table-2":
        words += ["--shape", plan.shape, "--prompts", str(plan.num_prompts), "--max-tokens", str(plan.max_tokens)]
        words += ["--repeats", str(plan.num_repeats)]
    elif name != "figure-1":
        words += ["--tokens", str(plan.num_tokens)]
        words += ["--ngram", str(plan.ngram)] if plan.ngram is not None else []
    if name in ("table-2", "independence"):
        words += [word for length in plan.spec_lengths for word in ("--spec-length", str(length))]
    words += ["--seed", str(plan.seed)] if plan.seed != 1 else []
    return shlex.join(words)
