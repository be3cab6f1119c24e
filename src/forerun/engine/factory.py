"""From a configuration to an engine: what is refused before weights are read, the models, caches, drafters and policy.

Three questions in the order of their price: do the small files allow it (`refuse_early`), is there memory for it
(`with_room`), and only then `load_target` and `build`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch

from forerun import __version__, drafters, native, ops, pacing
from forerun.blocks import Spec
from forerun.config import EngineConfig, Quantization
from forerun.engine import router
from forerun.engine.engine import Engine
from forerun.errors import BadOption, CapacityError, NotFound, UnsupportedModel, UserError
from forerun.kv.cache import BlockCache
from forerun.kv.disk import Folder, Limit, weights_digest
from forerun.kv.keeping import Keeper
from forerun.memory.machine import available_bytes
from forerun.memory.plan import TOKENS_PER_SEQUENCE, MemoryPlan, Room, memory_plan, pool_tokens, room_of, together
from forerun.models import named
from forerun.models.generation import sampling_defaults, sampling_fields, start_ids_of
from forerun.models.loading import (
    DTYPES,
    Checkpoint,
    load_checkpoint,
    packed_schemes,
    read_raw_config,
    small_files,
)
from forerun.models.opened import OpenedCheckpoint, read_config
from forerun.models.outline import Beside, Outline
from forerun.models.runner import Runner
from forerun.ops.quantised import Scheme
from forerun.ops.reference import ReferenceOps
from forerun.pacing.cost import Costs, Traits, usual
from forerun.registry import names
from forerun.text.chat import ChatTemplate
from forerun.text.small_files import SmallFiles
from forerun.text.template_files import find_sources
from forerun.text.tokenizer import Tokenizer, without_text
from forerun.text.unwritten import unwritten_ids
from forerun.types import SamplingParams

LOG = logging.getLogger(__name__)
DATA = named.DATA
SHIPPED_TARGET, SHIPPED_DRAFT = DATA / "target", DATA / "draft"


# ------------------------------------------------------------------------------------------- where nothing is said


def target_of(config: EngineConfig) -> str:
    """The target that a configuration names, else the default model. Raises NotFound where that is not here."""
    return config.target or named.default()


def is_shipped(target: str | Path | None) -> bool:
    """Whether a target is the model that ships with the package."""
    known = named.find(target)
    return target is not None and (Path(target) if known is None else known.path()) == SHIPPED_TARGET


def auto_draft(target: str | Path | None, has_loaded_draft: bool = False) -> str:
    """The drafter that `auto` stands for: a draft model, if the caller has loaded one or the shipped target is run.

    Else what data/models.toml names for the target, else the search that needs nothing.
    """
    if has_loaded_draft or is_shipped(target):
        return drafters.BY_MODEL
    known = named.of(target or named.DEFAULT)
    return (known and known.auto_for(target or named.DEFAULT)) or drafters.WITHOUT_MODEL


def auto_of(checkpoint: Checkpoint, config: EngineConfig, has_loaded_draft: bool = False) -> str:
    """The drafter that `auto` stands for, of a loaded target: by its name in the configuration, else by its folder."""
    is_named = config.target is not None and not is_shipped(checkpoint.folder)
    return auto_draft(config.target if is_named else checkpoint.folder, has_loaded_draft)


def answers_texts(folder: Path, config: EngineConfig) -> bool:
    """Whether a text is a message that a target answers, as it is where there is a chat template; else it is continued.

    The template of the shipped model only joins the turns of a conversation to one text. folder: of the target's files.
    """
    if is_shipped(folder):
        return False
    try:
        find_sources(SmallFiles(folder), None if config.chat_template is None else Path(config.chat_template))
    except NotFound:
        return False
    return True


def usual_fields(config: EngineConfig, folder: Path | None = None) -> dict[str, Any]:
    """The sampling parameters of a target where a request says nothing of them; others have SamplingParams' defaults.

    The first of these that there is: its generation_config.json, what data/models.toml has under its name, and of a
    target that answers texts named.USUAL. folder: of the target's files, where they are known.
    """
    if config.generation_config == "none":
        return {}
    known = named.of(config.target if folder else target_of(config))
    folder = folder or target_files(config)
    own = dict[str, Any]()
    try:
        small = SmallFiles(folder)
        own = sampling_fields(small, small.json("config.json"))
        SamplingParams(**own)
    except UserError as error:
        if config.generation_config == "model":
            raise UnsupportedModel(str(error)) from error
        LOG.warning("%s; its sampling values are left out", error)
        own = {}
    if own.keys() & named.DRAWING or not answers_texts(folder, config):
        return own
    return {**((known and known.sampling) or named.USUAL), **own}


# ------------------------------------------------------------------------------------------------------ the target


def load_target(config: EngineConfig, *, with_tokenizer: bool = True) -> Checkpoint:
    """The target that a configuration names, on its device and in its type."""
    return load_checkpoint(
        target_of(config),
        dtype=config.dtype,
        device=torch_device(config.device),
        ops=partial(make_ops, config),
        with_tokenizer=with_tokenizer,
        ignore_config_keys=config.ignored_config_keys,
        quantization=config.quantization,
        max_seq_len=config.max_seq_len,
    )


def load_unpacked(config: EngineConfig) -> Checkpoint:
    """Load the target with weights that can be read, for a caller that makes another model of them.

    They have the type that `load_target` gives them. They are not quantised: the other model will be.
    """
    own = make_ops(config, read_config(read_raw_config(target_files(config), config.ignored_config_keys)))
    if not own.packs:
        return load_target(replace(config, quantization=None))
    dtype = own.auto_dtype("cpu", torch.float32) if config.dtype == "auto" else config.dtype
    return load_checkpoint(
        target_of(config),
        dtype=dtype,
        with_tokenizer=True,
        ignore_config_keys=config.ignored_config_keys,
        max_seq_len=config.max_seq_len,
    )


def make_ops(config: EngineConfig, spec: Spec) -> ReferenceOps:
    """The operators that a configuration names, for a model. Raises UserError where they cannot be had."""
    return ops.make(config.ops, torch_device(config.device).type, spec)


def refuse_early(config: EngineConfig, has_loaded_draft: bool = False) -> Outlines:
    """Raise UserError for whatever the small files of both models show; returns what they show beside that.

    has_loaded_draft: whether the caller has loaded the draft model, which is then what `auto` is.
    """
    ops.resolve(config.ops, torch_device(config.device).type)
    pacing.make(config.pacing_spec, config.spec_length)
    _disk_limit(config)
    auto = auto_draft(config.target, has_loaded_draft)
    for draft in (config.draft, *config.extra_draft_specs):
        drafters.resolve(draft, auto)
    folder = target_files(config)
    spec = read_config(read_raw_config(folder, config.ignored_config_keys))
    name = ops.resolve(config.ops, torch_device(config.device).type, spec)
    room = room_of(config, spec)
    pool_tokens(
        config.kv_cache_backend,
        max_batch_size=config.max_batch_size * spec.num_slots,
        max_seq_len=room.max_seq_len,
        num_tokens=room.kv_cache_tokens,
    )
    tokenizer = Tokenizer.find(folder)
    if config.generation_config == "model":
        small = SmallFiles(folder)
        sampling_defaults(small, small.json("config.json"))
    if config.chat_template is not None:
        ChatTemplate.load(folder, config.chat_template)
    found = Outlines.of(config, tokenizer=tokenizer, auto=auto)
    if config.kv_cache_dtype != "auto":
        own = dtype_of(config, torch_device(config.device).type, found.target)
        ops.kept_dtype(config.kv_cache_dtype, name, spec.cache_shape, own)
    return found


def refuse_drafters(found: Outlines) -> str | None:
    """Raise UserError for drafters that do not suit the target, as its small files and those of draft models show.

    Where such a file is missing, of which a plan needs config.json alone, returns why nothing was compared.
    """
    try:
        Outlines.of(found.config, found.target, tokenizer=Tokenizer.find(target_files(found.config)))
    except NotFound as error:
        return str(error) if any(own.needs.has_model for own in found.drafts) else None
    return None


def usable_drafts(config: EngineConfig) -> list[str]:
    """The methods that requests could be offered beside those that a configuration names, with their usual options.

    They are those that the small files allow; and where memory does not hold all, those without a model of their own.
    """
    auto = auto_draft(config.target)
    named_already = {drafters.resolve(spec, auto)[0] for spec in (config.draft, *config.extra_draft_specs)}
    tokenizer, found = Tokenizer.find(target_files(config)), dict[str, bool]()
    for method in names(drafters.__name__):
        try:
            alone = Outlines.of(replace(config, draft=method, extra_drafts=None), tokenizer=tokenizer)
            _ = alone.models  # those that it needs are there
        except UserError:
            continue
        if method not in named_already:
            found[method] = any(own.needs.has_model for own in alone.drafts)
    whole = replace(config, extra_drafts=";".join((*config.extra_draft_specs, *found)))
    device = device_of(config)
    fits = plan_of(whole, Outlines.of(whole), device, available_bytes(device)).fits
    return [method for method, has_model in found.items() if fits or not has_model]


def target_files(config: EngineConfig) -> Path:
    """The target's folder, without its weights; see `small_files`."""
    return small_files(target_of(config), config.ignored_config_keys)


def refuse_without_template(config: EngineConfig) -> None:
    """Raise NotFound where the target has no chat template and none is named, before any weight is fetched."""
    ChatTemplate.load(target_files(config), config.chat_template)


def refuse_without_text(config: EngineConfig) -> None:
    """Raise NotFound where the target knows ids alone, before any weight is fetched: for callers that have texts."""
    folder = target_files(config)
    if not Tokenizer.is_in(folder):
        raise without_text(str(folder))


def torch_device(name: str) -> torch.device:
    """The device of a name: auto, cpu or cuda. Raises BadOption for cuda where torch sees none.

    auto is cpu, also where there is a CUDA device, until more cards than one were tried (docs/gpu.md).
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise BadOption("device='cuda' is not possible: torch sees no CUDA device; use device='cpu'")
    return torch.device("cuda" if name == "cuda" else "cpu")


# -------------------------------------------------------------------------------------------------------------- memory


def with_room(found: Outlines) -> EngineConfig:
    """Return the configuration of an engine that this machine has memory for: with less context where none was asked.

    A draft model that the caller has loaded is not named by the configuration and not counted. Raises CapacityError,
    with numbers and with what would fit, where even that needs too much.
    """
    device = device_of(found.config)
    config, plan = fitted(found.config, found, device, available_bytes(device))
    if not plan.fits:
        raise CapacityError(f"there is no memory for this engine: {plan.verdict()}")
    return config


def fitted(
    config: EngineConfig,
    found: Outlines,
    device: str,
    available: int | None,
    models: Mapping[str, Outline] | None = None,
) -> tuple[EngineConfig, MemoryPlan]:
    """Return a configuration and its memory plan: 4,096 tokens a sequence where none are given and more do not fit.

    available: bytes, None = unknown. models: None = those that were found.
    """
    plan = plan_of(config, found, device, available, models)
    if plan.fits or config.max_seq_len is not None:
        return config, plan
    target = found.target.config if models is None else models["target"].config
    least = replace(config, max_seq_len=min(TOKENS_PER_SEQUENCE, target.max_positions))
    smaller = plan_of(least, found, device, available, models)
    return (least, smaller) if smaller.fits else (config, smaller)


def refuse_together(configs: Mapping[str, EngineConfig]) -> None:
    """Raise UserError for what `refuse_early` refuses of an engine, before any weight of another one is read.

    And CapacityError, with numbers, where this machine has no memory for all of them at once. configs: by the names of
    the engines.
    """
    found = dict[str, Outlines]()
    for name, config in configs.items():
        try:
            found[name] = refuse_early(config)
        except UserError as error:
            raise type(error)(f"{name}: {error}") from error
    by_device = dict[str, dict[str, Outlines]]()
    for name, outlines in found.items():
        by_device.setdefault(device_of(outlines.config), {})[name] = outlines
    for device, own in by_device.items():
        plan = plan_together(own, device, available_bytes(device))
        if not plan.fits:
            raise CapacityError(f"there is no memory for these {len(own)} engines together: {plan.verdict()}")


def plan_together(found: Mapping[str, Outlines], device: str, available: int | None) -> MemoryPlan:
    """The memory plan of several engines in one process, by their names. available: bytes, None = unknown."""

    def plans(**options: int) -> dict[str, MemoryPlan]:
        return {name: plan_of(_at_most(one, options), one, device, None) for name, one in found.items()}

    return together(plans, available)


def _at_most(found: Outlines, options: Mapping[str, int]) -> EngineConfig:
    """The configuration of an engine with these options where they are less than its own."""
    config = found.config
    own = {
        "max_seq_len": room_of(config, found.target.config).max_seq_len,
        "max_batch_size": config.max_batch_size,
    }
    least: dict[str, Any] = {name: min(value, own[name]) for name, value in options.items()}
    return replace(config, **least)


@dataclass(frozen=True)
class OwnDraft(drafters.Wanted):
    """A method of a configuration. label: what its model is called in `Outlines.models`; None = it has none."""

    label: str | None = None


@dataclass(frozen=True)
class Outlines:
    """The models that LLM would load and make, and what their drafters need, before any weight is read.

    drafts: every method, those of which others are made included. tokenizer: the target's, where it was read.
    """

    config: EngineConfig
    target: Outline
    drafts: tuple[OwnDraft, ...]
    tokenizer: Tokenizer | None = None

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        target: Outline | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        auto: str | None = None,
    ) -> Outlines:
        """Read the outline of the target, and ask each drafter once what it needs.

        target: None = what the configuration names. tokenizer: what drafters compare their files with; None = they do
        not. auto: what `auto` stands for; None = what the target says. Raises UserError for what LLM refuses.
        """
        if target is None:
            opened = OpenedCheckpoint.of(target_of(config), config.ignored_config_keys, config_only=True)
            target = Outline.of(opened, config.quantization)
        shape = target.config
        known = drafters.Known(
            shape.num_layers,
            shape.vocab_size,
            shape.hidden_size,
            is_packed=_are_packed(target, config),
            tokenizer=tokenizer,
            ignore_config_keys=config.ignored_config_keys,
        )
        drafts = list[OwnDraft]()
        for label, spec in ({"draft": config.draft} | {spec: spec for spec in config.extra_draft_specs}).items():
            number = 0
            for own in drafters.wanted(spec, known, auto or auto_draft(config.target)):
                number += own.needs.has_model
                called = label if number == 1 else f"{label}, model {number}"
                drafts.append(OwnDraft(own.method, own.options, own.needs, called if own.needs.has_model else None))
        return cls(config, target, tuple(drafts), tokenizer)

    @cached_property
    def models(self) -> Mapping[str, Outline]:
        """By name: "target", "draft", those of `extra_drafts`; the ones that are made of the target come last.

        Raises UserError for a draft model that LLM refuses, BadOption where a drafter needs one and none is named.
        """
        found = {"target": self.target}
        for name, method, needs in self._with_models():
            if needs.loads is not None:
                path = self._path_of(needs.loads, method)
                config = self.config
                opened = OpenedCheckpoint.of(path, config.ignored_config_keys, config_only=True)
                found[name] = Outline.of(opened, needs.loads.quantization, self._packs)
        for name, method, needs in self._with_models():
            if (made := needs.makes) is not None:
                if made.quantization is not None and _are_packed(self.target, self.config):
                    raise BadOption(
                        f"the drafter {method!r} is not possible: the target's weights are quantised already; use an "
                        "unquantised target, or dtype='float32'"
                    )
                found[name] = self.target.made(made.quantization, made.num_layers, made.config)
        return found

    @cached_property
    def _packs(self) -> Callable[[Scheme], bool]:
        return _packs(self.target, self.config)

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

    def _path_of(self, own: drafters.OwnCheckpoint, method: str) -> str:
        path = own.path or (str(SHIPPED_DRAFT) if is_shipped(self.config.target) else None)
        if path is None:
            raise BadOption(drafters.needs_a_model(method))
        return path


def _are_packed(target: Outline, config: EngineConfig) -> bool:
    """Whether the target's weights will be in memory as the integers of its files."""
    return any(map(_packs(target, config), target.schemes.values()))


def _packs(target: Outline, config: EngineConfig) -> Callable[[Scheme], bool]:
    """Which quantised matrices will be in memory as the integers of their files."""
    device = device_of(config)
    return packed_schemes(ops.make(config.ops, device, target.config), dtype_of(config, device, target))


def plan_of(
    config: EngineConfig,
    found: Outlines,
    device: str,
    available: int | None,
    models: Mapping[str, Outline] | None = None,
) -> MemoryPlan:
    """The memory plan of a configuration. available: bytes, None = unknown. models: None = those that were found."""
    models = found.models if models is None else models
    draft = models.get("draft")
    return memory_plan(
        models["target"].config,
        None if draft is None else draft.config,
        config,
        extra_drafts={name: model.config for name, model in models.items() if name not in ("target", "draft")},
        schemes={name: model.schemes for name, model in models.items()},
        dtype=dtype_of(config, device, models["target"]),
        device=device,
        available_bytes=available,
        num_taps=found.num_taps,
        made_of_target=[name for name, model in models.items() if model.is_made],
        shared=found.shared(models),
        beside=found.beside,
    )


def device_of(config: EngineConfig) -> str:
    """As LLM chooses; "cuda" may be planned for where there is none."""
    return "cpu" if config.device == "auto" else config.device


def dtype_of(config: EngineConfig, device: str, target: Outline) -> torch.dtype:
    """As the operators choose that LLM would take, with what config.json says in place of the stored weights."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    named = getattr(torch, str(target.raw.get("dtype") or target.raw.get("torch_dtype")), None)
    stored = named if isinstance(named, torch.dtype) else torch.float32
    return ops.make(config.ops, device, target.config).auto_dtype(device, stored)


# ---------------------------------------------------------------------------------------------------------- the engine


def build(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, config: EngineConfig, draft: Checkpoint | None
) -> Engine:
    """The engine of a loaded target; `draft` is a draft model that the caller has loaded. Raises UserError.

    tokenizer: None where ids are all there is, which are then all of the model's.
    """
    model = checkpoint.model
    room = room_of(config, model.config)
    target = _drafters_target(checkpoint, tokenizer, config, draft, room)
    cache = BlockCache.create(
        model.config.cache_shape,
        target.kv_cache_backend,
        max_batch_size=config.max_batch_size * model.config.num_slots,
        max_seq_len=room.max_seq_len,
        num_tokens=room.kv_cache_tokens,
        dtype=ops.kv_dtype(config.kv_cache_dtype, model),
        device=model.device,
        prefix_caching=config.prefix_caching,
    )
    runner = Runner(model, cache, target.num_ids, list(target.holes))
    limit = _disk_limit(config)
    folder = None if limit is None else Folder(limit.path, limit.num_bytes)
    start_ids = () if model.config.encoder is None else start_ids_of(SmallFiles(checkpoint.folder), checkpoint.config)
    members = router.make([config.draft, *config.extra_draft_specs], target)
    members.unwritten = _unwritten_ids(checkpoint, tokenizer, config)
    traits = {name: Traits(own.tells_confidence, own.searches, own.is_free) for name, own in members.members.items()}
    if folder is not None:
        name = Path(config.target or "").name
        _keep_on_disk(runner, folder, name)
        for own in [own for drafter in members.members.values() for own in drafter.runners]:
            _keep_on_disk(own, folder, f"a draft model of {name}")
    costs = Costs(usual(runner), traits=traits)
    if config.calibrate:
        models = {name: drafter.runners for name, drafter in members.members.items() if drafter.runners}
        costs.runners = {"": [runner], **models}
    return Engine(
        runner,
        members,
        pacing.make(config.pacing_spec, config.spec_length, costs),
        tokenizer=tokenizer,
        end_ids=checkpoint.end_ids,
        max_seq_len=room.max_seq_len,
        max_batch_size=config.max_batch_size,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        catchup_tokens=config.draft_catchup_tokens,
        prefill_stretch=config.prefill_stretch or None,
        max_itl_s=config.max_itl_ms / 1e3 if config.max_itl_ms else None,
        costs=costs,
        start_ids=start_ids,
        folder=folder,
    )


def _disk_limit(config: EngineConfig) -> Limit | None:
    """What kv_disk says, None where it says nothing. Raises BadOption where nothing could be kept on disk."""
    if config.kv_disk is None:
        return None
    if config.kv_cache_backend != "paged" or not config.prefix_caching:
        raise BadOption("kv_disk needs kv_cache_backend='paged' and prefix_caching: what is on disk are shared blocks")
    if torch_device(config.device).type != "cpu":
        raise BadOption("kv_disk is built for CPUs alone: leave it out, or choose device='cpu'")
    return Limit.parse(config.kv_disk)


def _keep_on_disk(runner: Runner, folder: Folder, name: str) -> None:
    """Let a model's cache use the folder, under a name for all that decides the bits of its rows."""
    cache, model = runner.cache, cast(Any, runner.model)
    if not isinstance(cache, BlockCache) or cache.keeper is not None or not hasattr(model, "stored"):
        return
    about = (
        __version__,
        torch.__version__,
        None if (built := native.extension()) is None else (native.isa(), built.source_hash),
        type(model).__name__,
        type(model.ops).__name__,
        model.precision,
        repr(model.config),
        repr(cache.shape),
        str(cache.dtype),
        runner.layers,
        weights_digest(model.stored()),
    )
    sizes = [cache.pools.record_bytes(kind) for kind in range(len(cache.kinds))]
    cache.keep_on_disk(Keeper(cache.pools, folder.shelf(about, sizes, name)))


def _unwritten_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None, config: EngineConfig) -> frozenset[int]:
    """The ids that the chat template alone writes. A template that cannot be read is refused where it is asked for."""
    if tokenizer is None:
        return frozenset()
    try:
        template = ChatTemplate.load(checkpoint.folder, config.chat_template)
    except UserError:
        return frozenset()
    return unwritten_ids(template, tokenizer, checkpoint.end_ids)


def _drafters_target(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    draft: Checkpoint | None,
    room: Room,
) -> drafters.Target:
    """What the drafters may know."""
    model = checkpoint.model
    return drafters.Target(
        model=model,
        tokenizer=tokenizer,
        end_ids=checkpoint.end_ids,
        num_ids=model.config.vocab_size if tokenizer is None else min(tokenizer.num_ids, model.config.vocab_size),
        holes=() if tokenizer is None else tuple(sorted(tokenizer.holes)),
        max_batch_size=config.max_batch_size,
        max_seq_len=room.max_seq_len,
        kv_cache_backend=config.kv_cache_backend,  # type: ignore[arg-type]
        kv_cache_dtype=config.kv_cache_dtype,
        kv_cache_tokens=room.kv_cache_tokens,
        prefix_caching=config.prefix_caching,
        auto=auto_of(checkpoint, config, has_loaded_draft=draft is not None),
        shipped_draft=str(SHIPPED_DRAFT) if is_shipped(checkpoint.folder) else None,
        ops=config.ops,
        loaded_draft=draft,
        ignore_config_keys=config.ignored_config_keys,
    )
