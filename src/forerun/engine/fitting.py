"""From what was opened to what fits: what drafters need of a target, and whether this machine has the memory.

Two questions in the order of their price: do the small files allow it (`refuse_early`), is there memory for it
(`with_room`). What comes after them is in building.py.
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
    """A method of a configuration. label: what its model is called in `Outlines.models`; None = it has none."""

    label: str | None = None


@dataclass(frozen=True)
class Outlines:
    """The models that LLM would load and make, and what their drafters need, before any weight is read.

    drafts: every method, those of which others are made included.
    """

    opened: Opened
    drafts: tuple[OwnDraft, ...]

    @classmethod
    def of(cls, opened: Opened) -> Outlines:
        """Ask each drafter once what it needs. Raises UserError for what LLM refuses."""
        config, drafts = opened.config, list[OwnDraft]()
        for label, spec in ({"draft": config.draft} | {spec: spec for spec in config.extra_draft_specs}).items():
            number = 0
            for own in drafters.wanted(spec, opened):
                number += own.needs.has_model
                called = label if number == 1 else f"{label}, model {number}"
                drafts.append(OwnDraft(own.method, own.options, own.needs, called if own.needs.has_model else None))
        return cls(opened, tuple(drafts))

    @cached_property
    def models(self) -> Mapping[str, Outline]:
        """By name: "target", "draft", those of `extra_drafts`; the ones that are made of the target come last.

        Raises UserError for a draft model that LLM refuses, BadOption where a drafter needs one and none is named.
        """
        opened = self.opened
        found = {"target": opened.outline}
        for name, method, needs in self._with_models():
            if needs.loads is not None:
                path = needs.loads.path or opened.shipped_draft
                if path is None:
                    raise BadOption(drafters.needs_a_model(method))
                found[name] = Outline.of(opened.open(path).as_model(), needs.loads.quantization, opened.packs)
        for name, method, needs in self._with_models():
            if (made := needs.makes) is not None:
                if made.quantization is not None and self._has_no_more_bits(made.quantization):
                    raise BadOption(
                        f"the drafter {method!r} is not possible with quantization={made.quantization!r}: the target's "
                        "weights have no more bits already; round them to fewer, use a target of more bits, or "
                        "dtype='float32'"
                    )
                found[name] = opened.outline.made(made.quantization, made.layers, made.config)
        return found

    def _has_no_more_bits(self, quantization: str) -> bool:
        """Whether weights of the target will be in memory as integers that rounding would not make smaller."""
        opened = self.opened
        packed_bits = [scheme.bits for scheme in opened.outline.schemes.values() if opened.packs(scheme)]
        return bool(packed_bits) and min(packed_bits) <= Quantization.parse(quantization).bits

    @property
    def has_models(self) -> bool:
        """Whether a drafter runs a draft model."""
        return any(own.needs.has_model for own in self.drafts)

    @property
    def num_taps(self) -> int:
        """How many inner layers of the target show their rows to drafters, in each pass."""
        return len({layer for own in self.drafts for layer in own.needs.layers})

    @property
    def beside(self) -> Mapping[str, Beside]:
        """The weights of trained heads, by the names of their models, else by their methods."""
        found = dict[str, Beside]()
        for own in sorted(self.drafts, key=lambda own: own.label is None):
            if own.needs.weights is not None:
                name = own.label or own.method
                number = 1 + sum(other.partition(" ")[0] == name for other in found)
                found[name if number == 1 else f"{name} {number}"] = own.needs.weights
        return found

    def shared(self, models: Mapping[str, Outline]) -> Mapping[str, str]:
        """Those of these models whose weights another one has in memory: by the name of each, that of the other."""
        first, found = dict[Hashable, str](), dict[str, str]()
        for name, _, needs in self._with_models():
            weights: Hashable = None
            if needs.loads is not None:
                weights = needs.loads.weights(str(SHIPPED_DRAFT))
            elif needs.makes is not None and needs.makes.quantization is not None:
                weights = Quantization.parse(needs.makes.quantization)
            other = first.setdefault(weights, name) if weights else name
            if other != name and models[other].config == models[name].config:
                found[name] = other
        return found

    def _with_models(self) -> list[tuple[str, str, drafters.Needs]]:
        """Name of the model, method and needs of each drafter that has a model."""
        return [(own.label, own.method, own.needs) for own in self.drafts if own.label is not None]

    def plan(
        self, available: int | None, models: Mapping[str, Outline] | None = None, config: EngineConfig | None = None
    ) -> MemoryPlan:
        """Return the memory plan. available: bytes, None = unknown. models: None = those that were found.

        config: another one than the target was opened with.
        """
        opened, models = self.opened, self.models if models is None else models
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
        """Return the target and its plan: with 4,096 tokens a sequence where none are given and more do not fit."""
        plan, config = self.plan(available, models), self.opened.config
        if plan.fits or config.max_seq_len is not None:
            return self.opened, plan
        least = replace(config, max_seq_len=min(TOKENS_PER_SEQUENCE, self.opened.spec.max_positions))
        smaller = self.plan(available, models, least)
        return (self.opened.under(least), smaller) if smaller.fits else (self.opened, smaller)


# ------------------------------------------------------------------------------------------------------ what is refused


def refuse_early(opened: Opened) -> Outlines:
    """Raise UserError for whatever the small files of both models show; returns what they show beside that."""
    config, spec = opened.config, opened.spec
    device = torch_device(config.device)
    name = ops.resolve(config.ops, device, spec)
    pool_tokens(
        config.kv_cache_backend,
        max_batch_size=config.max_batch_size * spec.num_slots,
        max_seq_len=opened.room.max_seq_len,
        num_tokens=opened.room.kv_cache_tokens,
    )
    _ = opened.tokenizer  # a broken one is refused here
    if config.generation_config == "model":
        _ = opened.usual_fields
    if config.chat_template is not None:
        _ = opened.chat_template
    outlines = Outlines.of(opened)
    if config.kv_cache_dtype != "auto":
        ops.kept_dtype(config.kv_cache_dtype, name, spec.cache_shape, opened.dtype)
    return outlines


def planned(config: EngineConfig, widen: Callable[[Spec], Spec]) -> tuple[Outlines, str | None]:
    """Return what a memory plan is computed from, and why the tokens of a pair were not compared; None = they were.

    A plan needs config.json alone; where another file is missing, the drafters are not compared with the target. widen:
    makes the spec for which the plan is of the target's own.
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
    """The methods that requests could be offered beside those that a configuration names, with their usual options.

    They are those that the small files allow; and where memory does not hold all, those without a model of their own.
    """
    config = opened.config
    named_already = {opened.resolve(spec)[0] for spec in (config.draft, *config.extra_draft_specs)}
    has_model = dict[str, bool]()
    for method in names(drafters.__name__):
        try:
            alone = Outlines.of(opened.under(replace(config, draft=method, extra_drafts=None)))
            _ = alone.models  # those that it needs are there
        except UserError:
            continue
        if method not in named_already:
            has_model[method] = alone.has_models
    whole = replace(config, extra_drafts=";".join((*config.extra_draft_specs, *has_model)))
    fits = Outlines.of(opened.under(whole)).plan(available_bytes(opened.device)).fits
    return [method for method, its in has_model.items() if fits or not its]


# --------------------------------------------------------------------------------------------------------------- memory


def with_room(outlines: Outlines) -> Opened:
    """Return the target of an engine that this machine has memory for: with less context where none was asked.

    A draft model that the caller has loaded is not named by the configuration and not counted. Raises CapacityError,
    with numbers and with what would fit, where even that needs too much.
    """
    opened, plan = outlines.fitted(available_bytes(outlines.opened.device))
    if not plan.fits:
        raise CapacityError(f"there is no memory for this engine: {plan.verdict()}")
    return opened


def refuse_together(configs: Mapping[str, EngineConfig]) -> dict[str, Opened]:
    """Raise UserError for what `refuse_early` refuses of an engine, before any weight of another one is read.

    And CapacityError, with numbers, where this machine has no memory for all of them at once. configs: by the names of
    the engines. Returns their targets.
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
    for device, own in by_device.items():
        plan = plan_together(own, available_bytes(device))
        if not plan.fits:
            raise CapacityError(f"there is no memory for these {len(own)} engines together: {plan.verdict()}")
    return {name: one.opened for name, one in outlines.items()}


def plan_together(outlines: Mapping[str, Outlines], available: int | None) -> MemoryPlan:
    """The memory plan of several engines in one process, by their names. available: bytes, None = unknown."""

    def plans(**options: int) -> dict[str, MemoryPlan]:
        return {name: one.plan(None, config=_at_most(one, options)) for name, one in outlines.items()}

    return together(plans, available)


def _at_most(outlines: Outlines, options: Mapping[str, int]) -> EngineConfig:
    """The configuration of an engine with these options where they are less than its own."""
    config = outlines.opened.config
    own = {"max_seq_len": outlines.opened.max_seq_len, "max_batch_size": config.max_batch_size}
    least: dict[str, Any] = {name: min(value, own[name]) for name, value in options.items()}
    return replace(config, **least)
