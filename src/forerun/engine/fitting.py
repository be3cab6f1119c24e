"""Checks before an engine is built: whether the drafters fit the target, and whether this machine has enough memory.

The cheaper check comes first. `refuse_early` checks the options against config.json, the tokenizer and all other files
except the weights. `with_room` checks that there is enough memory. Then building.py builds the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from forerun import drafters, ops
from forerun.blocks import Spec
from forerun.config import EngineConfig, Quantization
from forerun.engine.opened import SHIPPED_DRAFT, Opened, torch_device
from forerun.errors import BadOption, CapacityError, NotFound, UserError
from forerun.memory.machine import available_bytes
from forerun.memory.plan import TOKENS_PER_SEQUENCE, MemoryPlan, memory_plan, pool_tokens, together
from forerun.models.outline import Beside, Outline
from forerun.registry import names


@dataclass(frozen=True)
class OwnDraft(drafters.Wanted):
    """Describes a drafting method that a configuration names, or a part of a combined method.

    label: the name of the method's draft model in `Outlines.models`; None = the method has no draft model.
    """

    label: str | None = None


@dataclass(frozen=True)
class Outlines:
    """Describes the models that LLM would load or make, and the needs of the drafters, without reading weights.

    opened: the target. drafts: every drafting method, including the parts of combined methods.
    """

    opened: Opened
    drafts: tuple[OwnDraft, ...]

    @classmethod
    def of(cls, opened: Opened) -> Outlines:
        """Return the Outlines of a target and of the drafters that its configuration names.

        Raises UserError for a configuration that LLM refuses.
        """
        config, drafts = opened.config, list[OwnDraft]()
        for label, spec in ({"draft": config.draft} | {spec: spec for spec in config.extra_draft_specs}).items():
            number = 0
            for wanted in drafters.wanted(spec, opened):
                number += wanted.needs.has_model
                called = label if number == 1 else f"{label}, model {number}"
                drafts.append(
                    OwnDraft(wanted.method, wanted.options, wanted.needs, called if wanted.needs.has_model else None)
                )
        return cls(opened, tuple(drafts))

    @cached_property
    def models(self) -> Mapping[str, Outline]:
        """The outlines of all models, by name: "target", "draft", then the extra drafts.

        Models that are made of the target's weights come last. Raises UserError for a draft model that LLM refuses, and
        BadOption for a drafter that lacks its draft model.
        """
        opened = self.opened
        outlines = {"target": opened.outline}
        for name, method, needs in self._with_models():
            if needs.loads is not None:
                path = needs.loads.path or opened.shipped_draft
                if path is None:
                    raise BadOption(drafters.needs_a_model(method))
                outlines[name] = Outline.of(opened.open(path).as_model(), needs.loads.quantization, opened.packs)
        for name, method, needs in self._with_models():
            if (copy := needs.makes) is not None:
                if copy.quantization is not None and self._has_no_more_bits(copy.quantization):
                    raise BadOption(
                        f"the drafter {method!r} is not possible with quantization={copy.quantization!r}: the target's "
                        "weights have no more bits already; round them to fewer, use a target of more bits, or "
                        "dtype='float32'"
                    )
                outlines[name] = opened.outline.made(copy.quantization, copy.layers, copy.config)
        return outlines

    def _has_no_more_bits(self, quantization: str) -> bool:
        """Return whether some of the target's weights stay in memory as integers with no more bits than `quantization`.

        quantization: a spec that Quantization.parse reads.
        """
        opened = self.opened
        packed_bits = [scheme.bits for scheme in opened.outline.schemes.values() if opened.packs(scheme)]
        return bool(packed_bits) and min(packed_bits) <= Quantization.parse(quantization).bits

    @property
    def has_models(self) -> bool:
        """Whether at least one drafter runs a draft model."""
        return any(draft.needs.has_model for draft in self.drafts)

    @property
    def num_taps(self) -> int:
        """The number of different inner layers of the target whose hidden states drafters read in each pass."""
        return len({layer for draft in self.drafts for layer in draft.needs.layers})

    @property
    def beside(self) -> Mapping[str, Beside]:
        """The weights that drafters keep besides a draft model, such as trained drafting heads, by name.

        The name is the label of the drafter's model, or the drafting method if there is no model. If several entries
        would have equal names, each entry after the first gets a number.
        """
        weights = dict[str, Beside]()
        for draft in sorted(self.drafts, key=lambda draft: draft.label is None):
            if draft.needs.weights is not None:
                name = draft.label or draft.method
                number = 1 + sum(other.partition(" ")[0] == name for other in weights)
                weights[name if number == 1 else f"{name} {number}"] = draft.needs.weights
        return weights

    def shared(self, models: Mapping[str, Outline]) -> Mapping[str, str]:
        """Map the name of a model to the name of the earlier model that already holds the same weights."""
        first, holders = dict[Hashable, str](), dict[str, str]()
        for name, _, needs in self._with_models():
            weights: Hashable = None
            if needs.loads is not None:
                weights = needs.loads.weights(str(SHIPPED_DRAFT))
            elif needs.makes is not None and needs.makes.quantization is not None:
                weights = Quantization.parse(needs.makes.quantization)
            other = first.setdefault(weights, name) if weights else name
            if other != name and models[other].config == models[name].config:
                holders[name] = other
        return holders

    def _with_models(self) -> list[tuple[str, str, drafters.Needs]]:
        """Return the model's name, the method and the needs of each drafting method that has a draft model."""
        return [(draft.label, draft.method, draft.needs) for draft in self.drafts if draft.label is not None]

    def plan(
        self, available: int | None, models: Mapping[str, Outline] | None = None, config: EngineConfig | None = None
    ) -> MemoryPlan:
        """Return the memory plan of the engine.

        available: the available bytes; None = unknown. models: the models to plan; None = `self.models`. config: the
        configuration to plan; None = the configuration with which the target was opened.
        """
        opened = self.opened
        models = self.models if models is None else models
        draft = models.get("draft")
        return memory_plan(
            models["target"].config,
            None if draft is None else draft.config,
            opened.config if config is None else config,
            extra_drafts={name: model.config for name, model in models.items() if name not in ("target", "draft")},
            schemes={name: model.schemes for name, model in models.items()},
            dtype=opened.dtype,
            device=opened.device,
            available_bytes=available,
            num_taps=self.num_taps,
            made_of_target=[name for name, model in models.items() if model.is_made],
            shared=self.shared(models),
            beside=self.beside,
        )

    def fitted(self, available: int | None, models: Mapping[str, Outline] | None = None) -> tuple[Opened, MemoryPlan]:
        """Return the target and the memory plan of the engine.

        If max_seq_len is None and the default context does not fit, sequences of at most 4,096 tokens are planned
        instead. If they fit, the returned target is opened under the shorter max_seq_len. available: the available
        bytes; None = unknown. models: the models to plan; None = `self.models`.
        """
        plan = self.plan(available, models)
        config = self.opened.config
        if plan.fits or config.max_seq_len is not None:
            return self.opened, plan
        least = replace(config, max_seq_len=min(TOKENS_PER_SEQUENCE, self.opened.spec.max_positions))
        smaller = self.plan(available, models, least)
        return (self.opened.under(least), smaller) if smaller.fits else (self.opened, smaller)


# ------------------------------------------------------------------------------------------------------ what is refused


def refuse_early(opened: Opened) -> Outlines:
    """Check an engine's options against config.json, the tokenizer and all other files except the weights.

    Returns the outlines of the target and of the draft models. Raises UserError for an engine that is not possible.
    """
    config, spec = opened.config, opened.spec
    name = ops.resolve(config.ops, torch_device(config.device), spec)
    pool_tokens(
        config.kv_cache_backend,
        max_batch_size=config.max_batch_size * spec.num_slots,
        max_seq_len=opened.room.max_seq_len,
        num_tokens=opened.room.kv_cache_tokens,
    )
    _ = opened.tokenizer  # refuses a broken tokenizer here
    if config.generation_config == "model":
        _ = opened.usual_fields
    if config.chat_template is not None:
        _ = opened.chat_template
    outlines = Outlines.of(opened)
    if config.kv_cache_dtype != "auto":
        ops.kept_dtype(config.kv_cache_dtype, name, spec.cache_shape, opened.dtype)
    return outlines


def planned(config: EngineConfig, widen: Callable[[Spec], Spec]) -> tuple[Outlines, str | None]:
    """Return the outlines for a memory plan, and the reason if vocabularies were not compared.

    A plan needs only config.json. If another file is missing, the vocabularies of draft models are not compared with
    the target's vocabulary, and the reason names the missing file. The reason is None if the vocabularies were
    compared, or if there are no draft models. widen: maps the target's spec to the spec to plan.
    """

    def outlined(config_only: bool = False) -> Outlines:
        opened = Opened.of(config, config_only=config_only)
        wide = widen(opened.spec)
        return Outlines.of(opened if wide is opened.spec else opened.widened(wide))

    try:
        outlines = outlined()
        _ = outlines.models
        return outlines, None
    except NotFound as error:
        outlines = outlined(config_only=True)
        return outlines, str(error) if outlines.has_models else None


def usable_drafts(opened: Opened) -> list[str]:
    """Return the drafting methods that the engine could offer to requests besides the methods of its configuration.

    The methods have their default options. Methods are left out if the files of the target or of the draft models rule
    them out. If the memory is too small for the models of all these methods together, methods with a model are left
    out.
    """
    config = opened.config
    named_already = {opened.resolve(spec)[0] for spec in (config.draft, *config.extra_draft_specs)}
    has_model = dict[str, bool]()
    for method in names(drafters.__name__):
        try:
            alone = Outlines.of(opened.under(replace(config, draft=method, extra_drafts=None)))
            _ = alone.models  # raises where a model that it needs is missing
        except UserError:
            continue
        if method not in named_already:
            has_model[method] = alone.has_models
    whole = replace(config, extra_drafts=";".join((*config.extra_draft_specs, *has_model)))
    fits = Outlines.of(opened.under(whole)).plan(available_bytes(opened.device)).fits
    return [method for method, its in has_model.items() if fits or not its]


# --------------------------------------------------------------------------------------------------------------- memory


def with_room(outlines: Outlines) -> Opened:
    """Check that an engine fits into this machine's memory, and return its target.

    If max_seq_len is None, the context may be shortened to fit. A draft model that the caller has loaded is not in the
    configuration, so its memory is not counted. Raises CapacityError if even the shortened context needs too much
    memory. The message says how much memory is needed and available, and which options would fit.
    """
    opened, plan = outlines.fitted(available_bytes(outlines.opened.device))
    if not plan.fits:
        raise CapacityError(f"there is no memory for this engine: {plan.verdict()}")
    return opened


def refuse_together(configs: Mapping[str, EngineConfig]) -> dict[str, Opened]:
    """Check several engines with `refuse_early`, and check that all fit into memory together. Reads no weights.

    configs: the engines' configurations, by name. Returns the engines' targets, by name. Raises UserError for an engine
    that is not possible. Raises CapacityError if this machine has not enough memory for all engines at once.
    """
    outlines = dict[str, Outlines]()
    for name, config in configs.items():
        try:
            outlines[name] = refuse_early(Opened.of(config))
        except UserError as error:
            raise type(error)(f"{name}: {error}") from error
    by_device = dict[str, dict[str, Outlines]]()
    for name, one in outlines.items():
        by_device.setdefault(one.opened.device, {})[name] = one
    for device, engines in by_device.items():
        plan = plan_together(engines, available_bytes(device))
        if not plan.fits:
            raise CapacityError(f"there is no memory for these {len(engines)} engines together: {plan.verdict()}")
    return {name: one.opened for name, one in outlines.items()}


def plan_together(outlines: Mapping[str, Outlines], available: int | None) -> MemoryPlan:
    """Return the memory plan of several engines in one process.

    outlines: the engines, by name. available: the available bytes; None = unknown.
    """

    def plans(**options: int) -> dict[str, MemoryPlan]:
        return {name: one.plan(None, config=_at_most(one, options)) for name, one in outlines.items()}

    return together(plans, available)


def _at_most(outlines: Outlines, options: Mapping[str, int]) -> EngineConfig:
    """Return an engine's configuration with values no larger than the values of `options`.

    options: max_seq_len, max_batch_size or both.
    """
    config = outlines.opened.config
    current = {"max_seq_len": outlines.opened.max_seq_len, "max_batch_size": config.max_batch_size}
    least: dict[str, Any] = {name: min(value, current[name]) for name, value in options.items()}
    return replace(config, **least)
