"""What the measured exhibits share: models, and what was measured with them, each made when it is first asked for."""

import datetime
import platform
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks import paper_alpha
from benchmarks.paper_alpha import Found
from benchmarks.paper_plan import PaperPlan
from benchmarks.paper_tasks import NoPair, Places, Task, names_encoder, of_places
from forerun import native
from forerun.bench.widen import draft_options, load_beside, num_parameters
from forerun.config import EngineConfig
from forerun.engine.opened import Opened, is_shipped
from forerun.errors import BadOption
from forerun.models import named
from forerun.models.loading import Checkpoint


@dataclass(frozen=True)
class Pair:
    """A target with its draft models by their sizes in words, the smallest first.

    specs: what the draft models are called on a command line, by the same names. tasks: of an encoder-decoder.
    """

    target: Checkpoint
    drafts: Mapping[str, Checkpoint]
    specs: Mapping[str, str]
    tasks: Seq[Task] = ()


class Work:
    """The models of a plan, and what is measured with them. config: of the engine."""

    def __init__(self, plan: PaperPlan, config: EngineConfig) -> None:
        self.plan, self.config = plan, config

    def recipe(self, name: str, *options: str) -> str:
        """Return the command that measures an exhibit of the pair without an encoder."""
        return self.plan.recipe(name, self.config.target or named.PAIR, *options)

    def task_recipe(self, name: str, *options: str) -> str:
        """Return the command that measures an exhibit of the encoder-decoder pair."""
        return self.plan.recipe(name, self.config.target if self._has_encoder else None, "pair", "tasks", *options)

    @cached_property
    def machine(self) -> str:
        """The processor, and the day."""
        return f"{native.processor_name() or platform.machine()}, {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"

    # ---------------------------------------------------------------------------------------------- without an encoder

    @cached_property
    def pair(self) -> Pair:
        """The models without an encoder. Raises UserError for what cannot be measured, NoPair where there are none."""
        plan, target = self.plan, self.config.target or named.PAIR
        if not plan.drafts and not is_shipped(target):
            raise BadOption("a target of your own has no draft model that ships with it: name one with --draft")
        if self._has_encoder:
            raise NoPair(f"{target} is an encoder-decoder, which the exhibits measure whose names end in -t5")
        return self._loaded(target, plan.drafts or ("model",))

    @cached_property
    def alphas(self) -> Found:
        """The acceptances along texts of the pair."""
        pair, plan = self.pair, self.plan
        return paper_alpha.measure(pair.target, pair.drafts, plan.ngram, plan.num_tokens, plan.seed)

    # ------------------------------------------------------------------------------------------------ encoder-decoders

    @cached_property
    def task_pair(self) -> Pair:
        """The encoder-decoders. Raises UserError for what cannot be measured, NoPair where there are none."""
        places = self.places
        return replace(self._loaded(places.target, places.drafts), tasks=places.tasks)

    @cached_property
    def places(self) -> Places:
        """Where the encoder-decoders are. Raises as `task_pair`, before any weight is read."""
        return of_places(self.config, self.plan.pair, self.plan.drafts, self.plan.tasks)

    @cached_property
    def task_alphas(self) -> dict[str, Found]:
        """The acceptances along answers, by task."""
        pair, plan = self.task_pair, self.plan
        return {
            task.name: paper_alpha.measure(pair.target, pair.drafts, plan.ngram, plan.num_tokens, plan.seed, task)
            for task in pair.tasks
        }

    # ------------------------------------------------------------------------------------------------------------------

    @cached_property
    def _has_encoder(self) -> bool:
        return names_encoder(self.config)

    def _loaded(self, target: str, specs: Seq[str]) -> Pair:
        paths = {spec: draft_options(spec)[0] for spec in specs}  # refuses what is no draft model
        checkpoint = Opened.of(replace(self.config, target=target)).load()
        by_spec = {
            spec: load_beside(checkpoint.model, path, self.config.ignored_config_keys) for spec, path in paths.items()
        }
        drafts = paper_alpha.named_by_size(by_spec)
        called = {id(draft): spec for spec, draft in by_spec.items()}
        return Pair(checkpoint, drafts, {size: called[id(draft)] for size, draft in drafts.items()})


def described(target: Checkpoint) -> str:
    """Return a target's size and precision, and the threads that it runs on."""
    model = target.model
    return f"{num_parameters(model.config):,} parameters, {model.precision}, {model.ops.num_threads} threads"
