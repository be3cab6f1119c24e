"""The engine of `forerun tune`. It has all drafters over one target, so that measurements differ only in drafting."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from rich.console import Console

from forerun import pacing
from forerun.bench.latency import read_prompts, run_together
from forerun.bench.methods import chats, conversation_ids, read_work
from forerun.bench.plans import MethodsPlan, Prompt, TunePlan
from forerun.bench.results import Tally, Variant
from forerun.bench.tune_prediction import LONGEST
from forerun.bench.tune_results import PLAIN, Way
from forerun.config import EngineConfig
from forerun.drafters import Drafter
from forerun.engine.fitting import Outlines, refuse_early
from forerun.engine.llm import LLM
from forerun.engine.opened import Opened, is_shipped
from forerun.errors import BadOption, InternalError, UserError, shown
from forerun.memory.machine import spare_what_is_loaded
from forerun.models.loading import Checkpoint
from forerun.pacing import Pacing
from forerun.pacing.measuring import measured
from forerun.pacing.pass_time import PassTime
from forerun.types import SamplingParams

# Drafters that need no file, the best on six kinds of work first (docs/which-draft.md).
USUAL = ("suffix:shape=tree", "suffix", "lookup", "ngram", "prediction", "recycle", "lookahead", "self")
SHIPPED = ("model", "tree", "suffix:shape=tree", "suffix", "lookup", "ngram", "recycle")
PROMPTS_PER_KIND = 2
GROUP_REQUESTS = 4  # where several requests run at once, a group has this many prompts for each place of the batch
WARM_UP_TOKENS = 8
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 17)  # rows for each request, of the passes that are measured
CALIBRATION_SHARE, LEAST_CALIBRATION_S = 0.05, 0.5  # the share of the time for these passes, and their least seconds


def candidates_of(opened: Opened, plan: TunePlan) -> list[str]:
    """Return the specs of the drafters to consider. Raises UserError if a drafter that the plan names is impossible."""
    if plan.only and not plan.drafts:
        raise BadOption("--only leaves no drafter to consider: name some with --draft")

    def alone(spec: str) -> Outlines:
        return refuse_early(opened.under(replace(opened.config, draft=spec, extra_drafts=None)))

    given = list[str]()
    for spec in plan.drafts:
        method, options = opened.resolve(spec)
        alone(spec)
        given.append(spec)
        if method == "model" and options.path is not None and options == type(options)(path=options.path):
            given.append(f"tree:of=(model:path={options.path})")
    usual = () if plan.only else SHIPPED if opened.is_shipped else USUAL
    specs = dict.fromkeys(spec for spec in given if spec != PLAIN)
    alone(PLAIN)
    for spec in usual:
        try:
            _ = alone(spec).models
        except UserError:
            continue
        specs[spec] = None
    if not specs:
        raise BadOption("no drafter is left to compare with plain decoding: name one with --draft")
    return list(specs)


@dataclass
class TuningEngine:
    """One engine with all candidate drafters, and the prompts in groups.

    A way to draft is a drafter with a draft length (tune_results.Way). All ways run a group of prompts one after
    another, before the next group. candidates: the specs of the drafters. groups: each prompt's ids and parameters.
    """

    llm: LLM
    plan: TunePlan
    candidates: list[str]
    groups: list[list[tuple[list[int], SamplingParams]]]
    policies: dict[str, Pacing] = field(default_factory=dict)  # auto's policies by drafter, which learn from run to run
    built: dict[str, Drafter] = field(default_factory=dict)

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, config: EngineConfig, plan: TunePlan, candidates: Seq[str], console: Console
    ) -> TuningEngine:
        """Build the engine. Drafters that the acceptance rule cannot judge are left out.

        Raises UserError where the user named such a drafter. Prefix caching is off, because a prompt's second run
        would find the KV cache of its first run.
        """
        options = {**config.options(), "prefix_caching": False, "max_batch_size": plan.concurrency}
        drafting = {"draft": PLAIN, "extra_drafts": ";".join(candidates), "pacing": "fixed", "spec_length": LONGEST}
        llm = LLM(checkpoint, **{**options, **drafting})
        spare_what_is_loaded()
        prompts = encoded(llm, config, plan)
        size = plan.concurrency * (1 if plan.concurrency == 1 else GROUP_REQUESTS)
        bench = cls(llm, plan, [], [prompts[i : i + size] for i in range(0, len(prompts), size)])
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
        """Return the drafter that the engine uses now for requests with draft=spec."""
        router = self.llm.engine.drafter
        return router.members[router.chosen(spec)]

    def params(self, prompt_params: SamplingParams, way: Way, salt: str, number: int) -> SamplingParams:
        """Return the parameters of one run of a prompt.

        prompt_params: the parameters that the prompt came with. salt: a drafter learns only from other runs with the
        same salt. number: the prompt's number, which is added to the seed.
        """
        rule = prompt_params.acceptance or ("ratio" if prompt_params.temperature > 0 else None)
        return replace(
            prompt_params,
            draft=way.draft,
            spec_length=way.spec_length or None,
            cache_salt=salt,
            seed=self.plan.seed + number,
            acceptance=rule,
        )

    def once(self, way: Way, group: int, salt: str, tally: Tally, *, detail: bool = False) -> None:
        """Run one group of prompts with the drafter and draft length of `way`, and add the measurements to `tally`.

        group: the index of the group. salt: a drafter learns only from other runs with the same salt. detail: whether
        the reports of steps contain `rounds` (drafts and accepted tokens). Raises InternalError where the drafter
        fails.
        """
        engine = self.llm.engine
        if way.spec_length is None:
            if way.draft not in self.policies:
                self.policies[way.draft] = pacing.make("auto", None, engine.costs)
            engine.use_pacing(self.policies[way.draft])
        else:
            engine.use_pacing(pacing.make("fixed", LONGEST))
        ids = [ids for ids, _ in self.groups[group]]
        first = sum(map(len, self.groups[:group]))
        params = [self.params(asked, way, salt, first + i) for i, (_, asked) in enumerate(self.groups[group])]
        run_together(self.llm, ids, params, tally, detail=detail)
        if way.draft != PLAIN and self.serving(way.draft) is not self.built[way.draft]:
            raise InternalError(f"the drafter {shown(way.draft)} failed: what it raised is logged above")

    def warm_up(self, way: Way) -> None:
        """Write a few tokens for the first group of prompts, with the drafter and draft length of `way`.

        Then measure the pass times that the pacing policy needs.
        """
        kept = self.groups
        self.groups = [[(ids, _short(params)) for ids, params in self.groups[0]]]
        self.once(way, 0, "warm-up", Tally(Variant(way.draft, 0), 0.0))
        self.llm.measure_passes()
        self.groups = kept

    def pass_times(self) -> PassTime:
        """Measure the time of the target's passes by their number of rows.

        The measured numbers of rows are close together: kernels compute a few rows at a time, so the time rises in
        steps. If the option calibrate is off, return the engine's curve instead.
        """
        engine, size = self.llm.engine, self.plan.concurrency
        if not self.llm.config.calibrate:
            return engine.costs.target
        widths = sorted({1, *(size * width for width in WIDTHS)})
        limit_s = max(LEAST_CALIBRATION_S, 60 * self.plan.minutes * CALIBRATION_SHARE)
        return measured(engine.runner, widths=widths, least_limit_s=limit_s)

    def runs_model(self, spec: str) -> bool:
        """Return whether a drafter, or a drafter inside of it, runs a draft model."""
        opened = self.llm.opened
        return Outlines.of(opened.under(replace(opened.config, draft=spec, extra_drafts=None))).has_models


def _short(params: SamplingParams) -> SamplingParams:
    most = WARM_UP_TOKENS if params.max_tokens is None else min(params.max_tokens, WARM_UP_TOKENS)
    return replace(params, max_tokens=most)


def encoded(llm: LLM, config: EngineConfig, plan: TunePlan) -> list[tuple[list[int], SamplingParams]]:
    """Return the token ids of each prompt, with its parameters.

    A text becomes a user message where the model has a chat template, as in `forerun generate`. Two kinds of models
    continue the text instead: the shipped model, and any model without a template. Raises UserError for an impossible
    prompt; the message gives the prompt's number.
    """
    goes_on = not chats(llm)  # a model that does not know turns may end at once, which measures nothing
    default = SamplingParams(max_tokens=plan.max_tokens, temperature=plan.temperature, ignore_eos=goes_on)
    requests = plan.requests or [(prompt, default) for prompt in _own_prompts(config)]
    prompts = []
    for number, (prompt, asked) in enumerate(requests, 1):
        most = plan.max_tokens if asked.max_tokens is None else min(asked.max_tokens, plan.max_tokens)
        params = replace(asked, max_tokens=most)
        try:
            if most == 0:
                raise BadOption("max_tokens=0 is not possible: nothing would be written that could be timed")
            ids = _ids(llm, prompt)
            llm.engine.make(ids, params)
        except UserError as error:
            raise type(error)(f"prompt {number}: {error}") from error
        prompts.append((ids, params))
    return prompts


def _own_prompts(config: EngineConfig) -> list[Prompt]:
    if is_shipped(config.target):  # which continues code, and knows no other work
        return [text for _, text in read_prompts(12)]
    return [prompt.messages for prompt in read_work(MethodsPlan(prompts_per_kind=PROMPTS_PER_KIND))]


def _ids(llm: LLM, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        if llm.opened.is_shipped or not chats(llm):
            return llm.tokenizer.encode(prompt)
        return llm.apply_chat_template([{"role": "user", "content": prompt}])
    if prompt and isinstance(prompt[0], dict):
        return conversation_ids(llm, prompt)
    return list(prompt)  # type: ignore[arg-type]
