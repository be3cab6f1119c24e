"""Opens a target under a configuration, once, for everything that an engine must know before weights are read.

models/opened.py opens all files of targets and draft models except the weights. This module computes the facts that
only an engine needs: which drafter `auto` stands for, which device and dtype are used, and how texts are answered.
Drafters see an opened target through the interface drafters.Known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from forerun import drafters, ops, pacing
from forerun.blocks import Spec, reaching
from forerun.config import EngineConfig
from forerun.drafters.shared import companions, trained
from forerun.errors import BadOption, ForerunError, NotFound, UnsupportedModel, UserError
from forerun.kv.disk import Limit
from forerun.memory.plan import Room, room_of
from forerun.models import named, next_tokens
from forerun.models.families import run_by
from forerun.models.generation import check_together, sampling_fields, start_ids_of
from forerun.models.loading import Checkpoint, load_checkpoint, packed_schemes
from forerun.models.naming import says_next_tokens
from forerun.models.next_tokens import NextTokens
from forerun.models.opened import OpenedCheckpoint
from forerun.models.outline import Outline
from forerun.ops.operators import Operators
from forerun.ops.quantised import Scheme
from forerun.text.chat import ChatTemplate
from forerun.text.template_files import Source, find_sources
from forerun.text.tokenizer import Tokenizer, needed

LOG = logging.getLogger(__name__)
SHIPPED_TARGET, SHIPPED_DRAFT = named.DATA / "target", named.DATA / "draft"


def is_shipped(target: str | Path | None) -> bool:
    """Return whether `target` names the model that ships with the package."""
    known = named.find(target)
    return target is not None and (Path(target) if known is None else known.path()) == SHIPPED_TARGET


def auto_draft(target: str | Path | None, has_loaded_draft: bool = False) -> str:
    """Return the name of the drafter that `auto` stands for.

    This is drafters.BY_MODEL if the caller has loaded a draft model or the target is the shipped model. Otherwise it is
    the drafter that data/models.toml names for the target. If the file names no drafter, it is drafters.WITHOUT_MODEL,
    which searches the text.
    """
    if has_loaded_draft or is_shipped(target):
        return drafters.BY_MODEL
    known = named.of(target or named.DEFAULT)
    return (known and known.auto_for(target or named.DEFAULT)) or drafters.WITHOUT_MODEL


def torch_device(name: str) -> str:
    """Return the torch device for the option `device`: auto, cpu or cuda. Raises BadOption for cuda without a GPU.

    auto always means cpu, because forerun has been tested on only one model of CUDA card (docs/use/gpu.md).
    """
    if name != "cuda":
        return "cpu"
    ops.refuse_without_torch(name)
    import torch

    if not torch.cuda.is_available():
        raise BadOption("device='cuda' is not possible: torch sees no CUDA device; use device='cpu'")
    return "cuda"


@dataclass(frozen=True, eq=False)
class Opened:
    """Holds an opened target and its configuration. drafters.Known describes the properties that drafters read.

    files: the opened checkpoint of the target, without weights. has_loaded_draft: whether the caller has loaded a draft
    model; if so, `auto` stands for this model. config_only: whether only config.json was read; tokenizers are then not
    compared. beside: the target and other checkpoints opened so far, by real path or name (`named.place`). methods: the
    parsed drafter specs of the configuration, by spec. meant: the cached results of `resolve`, by spec.
    """

    config: EngineConfig
    files: OpenedCheckpoint
    has_loaded_draft: bool = False
    config_only: bool = False
    beside: dict[str, OpenedCheckpoint] = field(default_factory=dict, repr=False)
    methods: dict[str, tuple[str, Any]] = field(default_factory=dict, repr=False)
    meant: dict[str, tuple[str, Any]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, config: EngineConfig, has_loaded_draft: bool = False, *, config_only: bool = False) -> Opened:
        """Open the target that a configuration names, or the default model if the configuration names no target.

        Options that are impossible for every target raise UserError before a file is opened. Options that contradict
        the files raise UserError later. has_loaded_draft: whether the caller has loaded a draft model. config_only:
        whether to read only config.json.
        """
        target = config.target or named.default()
        methods = _refuse_options(config, auto_draft(target, has_loaded_draft))
        files = OpenedCheckpoint.of(target, config.ignored_config_keys, config_only=config_only).as_model()
        config = replace(config, target=target)
        methods.pop("auto", None)  # resolved later, because the target's files decide it, too
        return cls(config, files, has_loaded_draft, config_only, {named.place(target): files}, methods)

    @classmethod
    def of_loaded(cls, checkpoint: Checkpoint, config: EngineConfig, has_loaded_draft: bool = False) -> Opened:
        """Return the Opened of a target that the caller has loaded. The caller may have changed the loaded model.

        Raises UserError for impossible options.
        """
        files = checkpoint.opened.widened(checkpoint.model.config, checkpoint.tokenizer)
        methods = _refuse_options(config, auto_draft(files.asked, has_loaded_draft))
        methods.pop("auto", None)
        return cls(config, files, has_loaded_draft, methods=methods)

    def under(self, config: EngineConfig) -> Opened:
        """Return the same target under another configuration."""
        return replace(self, config=config)

    def widened(self, spec: Spec) -> Opened:
        """Return the target with its spec replaced by `spec`, for a model that is changed in memory after loading."""
        return replace(self, files=self.files.widened(spec))

    # ------------------------------------------------------------------------------------------------ what drafters ask

    @property
    def spec(self) -> Spec:
        """The target's spec, as config.json gives it."""
        return self.files.spec

    @property
    def num_layers(self) -> int:
        """The number of the target's layers."""
        return self.spec.num_layers

    @property
    def vocab_size(self) -> int:
        """The size of the target's vocabulary."""
        return self.spec.vocab_size

    @property
    def hidden_size(self) -> int:
        """The width of the target's hidden states."""
        return self.spec.hidden_size

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the target has no tokenizer, so that prompts and outputs are token ids."""
        return self.files.tokenizer

    @property
    def fingerprint(self) -> str | None:
        """The tokenizer's fingerprint, which files that hold token ids must name; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.fingerprint

    @property
    def end_ids(self) -> frozenset[int]:
        """The token ids that end an output."""
        return self.files.end_ids

    @cached_property
    def is_shipped(self) -> bool:
        """Whether the target is the model that ships with the package."""
        return is_shipped(self.files.path)

    @cached_property
    def auto(self) -> str:
        """The drafter that `auto` stands for.

        It is the first drafter in this list that exists: the draft model that the caller has loaded, a drafting head
        that was trained on this machine for the target, the draft model that ships with the target, the drafter that
        data/models.toml names for the target, the target's next-token block, a drafter in the target's folder, and
        last, a drafter that searches the text.
        """
        name = auto_draft(self.files.asked, self.has_loaded_draft)
        if not (self.has_loaded_draft or self.config_only):
            kept = trained.find(self.files, self._weighs_searches)
            if kept is not None and self._serves(kept):
                return kept
        if name != drafters.WITHOUT_MODEL or self.config_only:
            return name
        if self.next_tokens is not None:
            return "mtp"
        beside = companions.find(self.files)
        return name if beside is None or not self._serves(beside) else beside

    @property
    def _weighs_searches(self) -> bool:
        """Whether a drafter can weigh its model's guess against the guess of its search of the text.

        Native operators tell the model's confidence, and pacing=auto compares it.
        """
        is_native = self.config.device != "cuda" and ops.resolve(self.config.ops, "cpu", self.spec) == "native"
        return is_native and self.config.pacing_spec.startswith("auto")

    def _serves(self, spec: str) -> bool:
        """Return whether the drafter `spec` can draft for the target. If it cannot, log the reason."""
        try:
            layers = [layer for one in drafters.wanted(spec, self) for layer in one.needs.layers]
            if max(layers, default=0) > self.num_layers:
                raise BadOption(f"it reads rows behind {max(layers)} layers, and the target has {self.num_layers}")
        except ForerunError as error:
            LOG.warning("%s was found for the target, and cannot draft for it: %s", spec, error)
            return False
        return True

    @cached_property
    def next_tokens(self) -> NextTokens | None:
        """The block for multi-token prediction in the target's files; None where the files have no such block.

        The weights of a hub model are fetched only if config.json mentions such a block.
        """
        files = self.files.original or self.files
        if self.config_only or (files.is_of_hub and not says_next_tokens(files.raw)):
            return None
        files.fetch_weights()
        return next_tokens.find(files)

    @property
    def shipped_draft(self) -> str | None:
        """The folder of the draft model that ships with the target; None where no draft model ships with it."""
        return str(SHIPPED_DRAFT) if self.is_shipped else None

    @cached_property
    def is_packed(self) -> bool:
        """Whether some weights of the target stay in memory as the integers of a quantised file."""
        return any(self.packs(scheme) for scheme in self.outline.schemes.values())

    def resolve(self, spec: str) -> tuple[str, Any]:
        """Return the method and the Options that a drafter's spec stands for. Results are cached.

        The spec is resolved by drafters.resolve, with one addition. Some checkpoints are incomplete models that only
        one drafting method can run. The name of such a checkpoint stands for this method.
        """
        if spec not in self.meant:
            auto = self.auto if spec == "auto" else drafters.WITHOUT_MODEL
            method, options = self.methods.get(spec) or drafters.resolve(spec, auto)
            runs_it = run_by(self.open(options.path).raw) if method == drafters.BY_MODEL and options.path else None
            self.meant[spec] = (method, options) if runs_it is None else drafters.instead(runs_it, options)
        return self.meant[spec]

    def open(self, name: str) -> OpenedCheckpoint:
        """Return another opened checkpoint, such as a draft model. Each checkpoint is opened only once.

        Raises UserError as OpenedCheckpoint.of does.
        """
        place = named.place(name)
        if place not in self.beside:
            self.beside[place] = OpenedCheckpoint.of(
                name,
                self.config.ignored_config_keys,
                config_only=self.config_only,
                with_tokenizer=self.tokenizer is not None,
            )
        return self.beside[place]

    # ----------------------------------------------------------------------------------------------- how it will be run

    @property
    def device(self) -> str:
        """The device on which LLM will run the target: "cpu" or "cuda".

        For an engine that is only planned, the device may be "cuda" on a machine without CUDA.
        """
        return "cpu" if self.config.device == "auto" else self.config.device

    @cached_property
    def operators(self) -> Operators:
        """The operators that will compute the target. Raises UserError where they are not available."""
        return ops.make(self.config.ops, self.device, self.spec)

    @cached_property
    def dtype(self) -> str:
        """The dtype of the target's weights in memory. `auto` depends on the dtype that config.json names."""
        if self.config.dtype != "auto":
            return self.config.dtype
        return self.operators.auto_dtype(self.device, self.files.stored_dtype)

    @cached_property
    def packs(self) -> Callable[[Scheme], bool]:
        """A function that returns whether the matrices of a quantisation scheme stay in memory as integers."""
        return packed_schemes(self.operators, self.dtype)

    @cached_property
    def outline(self) -> Outline:
        """The sizes of the target's weights, for the memory plan."""
        return Outline.of(self.files, self.config.quantization)

    @cached_property
    def room(self) -> Room:
        """The largest number of tokens in one sequence, and in the whole KV cache.

        Raises BadOption if the configuration asks for more tokens than the model has positions.
        """
        return room_of(self.config, reaching(self.spec, self.config.max_seq_len))

    @property
    def max_seq_len(self) -> int:
        """The largest number of tokens in one sequence."""
        return self.room.max_seq_len

    @property
    def kv_cache_tokens(self) -> int | None:
        """The number of tokens in the whole KV cache; None = as many as a full batch of the longest sequences needs."""
        return self.room.kv_cache_tokens

    def load(self) -> Checkpoint:
        """Read the target's weights to its device and in its dtype, together with its tokenizer."""
        return load_checkpoint(
            self.files,
            dtype=self.config.dtype,
            device=torch_device(self.config.device),
            ops=self.operators,
            with_tokenizer=True,
            quantization=self.config.quantization,
            max_seq_len=self.config.max_seq_len,
        )

    # ---------------------------------------------------------------------------------------- how requests are answered

    @cached_property
    def start_ids(self) -> list[int]:
        """In an encoder-decoder, the token ids with which the decoder's text begins; [] for other models."""
        return [] if self.spec.encoder is None else start_ids_of(self.files.small, self.files.raw)

    @cached_property
    def _templates(self) -> Mapping[str, Source]:
        file = self.config.chat_template
        return find_sources(self.files.small, None if file is None else Path(file), self.files.name)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the configuration, or else of the target. Raises NotFound if neither has one."""
        return ChatTemplate.of(self.files.small, self._templates, is_own=self.config.chat_template is None)

    @cached_property
    def answers_texts(self) -> bool:
        """Whether a prompt that is a text is a message to answer; if False, the model continues the text.

        True if there is a chat template, except for the shipped model, whose template only joins the messages of a
        conversation.
        """
        if self.is_shipped:
            return False
        try:
            _ = self._templates
        except NotFound:
            return False
        return True

    @cached_property
    def usual_fields(self) -> Mapping[str, Any]:
        """The target's default sampling parameters, by name. Other parameters have the defaults of SamplingParams.

        The values come from the target's generation_config.json. If this file sets none of temperature, top_k, top_p
        and min_p, and the model answers texts, values of data/models.toml or named.USUAL are added. An unsupported
        value in the file is left out with a warning. With the option generation_config='model', an unsupported value
        raises UnsupportedModel. With 'none', there are no default parameters.
        """
        if self.config.generation_config == "none":
            return {}
        small, raw, left_out = self.files.small, self.files.raw, None
        if self.config.generation_config != "model":
            left_out = partial(LOG.warning, "%s; this value is left out")
        try:
            fields = sampling_fields(small, raw, left_out)
            check_together(fields, small)
        except UserError as error:
            if self.config.generation_config == "model":
                raise UnsupportedModel(str(error)) from error
            LOG.warning("%s; its sampling values are left out", error)
            fields = {}
        if fields.keys() & named.DRAWING or not self.answers_texts:
            return fields
        known = named.of(self.files.asked)
        return {**((known and known.sampling) or named.USUAL), **fields}

    def text_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, for callers with texts. Raises NotFound if the target has no tokenizer."""
        return needed(self.tokenizer, str(self.files.folder))


def disk_limit(config: EngineConfig) -> Limit | None:
    """Return the parsed option kv_disk, or None if kv_disk is not set.

    Raises BadOption for an invalid value, and if other options rule out kv_disk.
    """
    if config.kv_disk is None:
        return None
    if config.kv_cache_backend != "paged" or not config.prefix_caching:
        raise BadOption("kv_disk needs kv_cache_backend='paged' and prefix_caching: what is on disk are shared blocks")
    if config.device == "cuda":
        raise BadOption("kv_disk is built for CPUs alone: leave it out, or choose device='cpu'")
    return Limit.parse(config.kv_disk)


def _refuse_options(config: EngineConfig, auto: str) -> dict[str, tuple[str, Any]]:
    """Raise UserError for options that are impossible for every target. Return the parsed drafter specs, by spec.

    auto: the drafter that `auto` stands for.
    """
    ops.resolve(config.ops, "cuda" if config.device == "cuda" else "cpu")
    pacing.make(config.pacing_spec, config.spec_length)
    disk_limit(config)
    return {spec: drafters.resolve(spec, auto) for spec in (config.draft, *config.extra_draft_specs)}
