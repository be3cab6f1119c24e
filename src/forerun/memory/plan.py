"""Plans the memory that a configuration needs, from sizes alone, before any weight is read.

Weights and KV pools are exact to the byte. For the memory that a step allocates (activations, probability rows), the
plan has upper bounds that follow the allocating code. The bounds in this file follow drafters/shared/feeding.py and
engine/step.py; the bounds of each backend are in a separate file (ops/cpu/memory.py, ops/torch_memory.py). The plan
does not count the interpreter, torch (if it is imported), tokenizers, and the context of an accelerator.

Units: GB = 10^9 bytes, GiB = 2^30 bytes. Weights are usually quoted in GB and KV pools in GiB, often both under the
name GB: 8 x 4096 tokens of 114,688 bytes are 3.5 GiB and 3.76 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from forerun import ops
from forerun.blocks import Spec
from forerun.config import EngineConfig
from forerun.errors import BadOption
from forerun.kv.cache import PAGED_BLOCK_TOKENS, CacheShape, shape_of, state_room, written_blocks
from forerun.ops.memory import PROB_BYTES, Beside, MemoryPart, Pass, Schemes, Sizes, Wanted
from forerun.types import ROUND_TOKENS

TOKENS_PER_SEQUENCE = 4096  # for each sequence of a batch, in a cache whose size is not given
SEQUENCES = 8  # such a cache has room for at least so many sequences, even in a smaller batch; one may fill it
SAMPLING_BYTES = 48  # per id, for one row at a time: arrays of sampling and of the Gumbel noise, mostly float64
EXTRA_DRAFT = "extra draft"
_MOST_BATCH = EngineConfig.__dataclass_fields__["max_batch_size"].metadata["max"]
MIN_SEQ_LEN = PAGED_BLOCK_TOKENS  # tokens; no suggestion goes below it


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a configuration needs, and options that would make it fit.

    parts: the memory by purpose. available_bytes: None = unknown. suggestions: sets of options; the plan would fit with
    any one set, if every other option is unchanged. `suggestions` is empty if the plan fits, or if no set of options
    would make it fit. later: extra memory that a process takes only after it has run for a long time, and that the
    total does not include. extra_drafts: maps each extra draft model's label to the model's name in the configuration;
    the names of this model's parts begin with the label.
    """

    parts: tuple[MemoryPart, ...]
    available_bytes: int | None = None
    suggestions: tuple[Mapping[str, int], ...] = ()
    later: tuple[MemoryPart, ...] = ()
    extra_drafts: Mapping[str, str] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """The bytes of all parts together."""
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        """Whether the total is within the available bytes; True where the available bytes are unknown."""
        return self.available_bytes is None or self.total_bytes <= self.available_bytes

    def bytes_of(self, *names: str) -> int:
        """Return the bytes of the parts with these names; 0 for a name that no part has."""
        return sum(part.bytes for part in self.parts if part.name in names)

    def bytes_for(self, what: str) -> int:
        """Return the bytes that all models together need for their weights, or for their KV caches.

        what: "weights" or "KV cache".
        """
        return sum(part.bytes for part in self.parts if part.name.endswith(what))

    def verdict(self) -> str:
        """Return a text that says whether the plan fits; if not, also which options to change, if any would help."""
        need = gigabytes(self.total_bytes)
        if self.available_bytes is None:
            return f"{need} are needed."
        have = gigabytes(self.available_bytes)
        if self.fits:
            return f"It fits: {need} of {have}, {gigabytes(self.available_bytes - self.total_bytes)} to spare."
        if self.suggestions:
            ways = [" and ".join(f"{k}={v}" for k, v in options.items()) for options in self.suggestions]
            fitting = f"It would fit with {' or '.join(ways)}.{self._extra()}"
            return f"It does not fit: {need} are needed of {have}. {fitting}"
        weights = self.bytes_for("weights")
        if weights > self.available_bytes:
            alone = f"the weights alone need {gigabytes(weights)}"
            return f"Nothing fits: {alone}, and {have} are available.{self._extra()}"
        rest = self.total_bytes - weights - self.bytes_for("KV cache")
        return (
            f"Nothing fits: beside {gigabytes(weights)} of weights there is no room in {have} for one short sequence "
            f"and its activations, {gigabytes(rest)} as configured; lower prefill_chunk_tokens.{self._extra()}"
        )

    def _extra(self) -> str:
        """Return a sentence with the memory of the extra draft models; "" where there are no such models."""
        if not self.extra_drafts:
            return ""
        num_bytes = sum(part.bytes for part in self.parts if part.name.startswith(EXTRA_DRAFT))
        named = "; ".join(self.extra_drafts.values())
        return f" Weights and KV cache of extra_drafts={named!r} are {gigabytes(num_bytes)} of that."


def gigabytes(num_bytes: int) -> str:
    """Write bytes as '3.76 GB (3.50 GiB)', with three decimals below 0.1 GB."""
    places = 3 if num_bytes < 10**8 else 2
    return f"{num_bytes / 1e9:.{places}f} GB ({num_bytes / 2**30:.{places}f} GiB)"


def memory_plan(
    target: Spec,
    draft: Spec | None,
    config: EngineConfig,
    *,
    dtype: str,
    device: str = "cpu",
    available_bytes: int | None = None,
    extra_drafts: Mapping[str, Spec] | None = None,
    schemes: Mapping[str, Schemes] | None = None,
    num_taps: int = 0,
    made_of_target: Collection[str] = (),
    shared: Mapping[str, str] | None = None,
    beside: Mapping[str, Beside] | None = None,
) -> MemoryPlan:
    """Plan the memory of a target and its draft model (None = a drafter without a model) under the engine's options.

    extra_drafts: the draft models of the extra drafters, by their names in the configuration. dtype: the dtype of all
    models' weights; the operators decide the dtypes of caches and activations. device: "cpu" or "cuda"; on "cuda" the
    plan counts the device's memory and leaves out the probability rows, which lie on the host. schemes: the quantised
    matrices of each model, by model name: "target", "draft" or the name of an extra draft model. num_taps: the number
    of the target's inner layers whose hidden states drafters read. made_of_target: the names of the draft models that
    are made of the target. They use the target's weights as they are, or rounded to the draft model's schemes. shared:
    maps a draft model to the earlier draft model whose weights it uses. beside: the weights of trained heads, by the
    name of the draft model whose cache a head uses, or by the name of the head. Raises BadOption as the engine would
    for ops, max_seq_len and kv_cache_tokens.
    """
    extra = extra_drafts or {}
    labels = [EXTRA_DRAFT if number == 1 else f"{EXTRA_DRAFT} {number}" for number in range(1, len(extra) + 1)]
    drafts = ({} if draft is None else {"draft": draft}) | dict(zip(labels, extra.values(), strict=True))
    names = dict(zip(labels, extra, strict=True))
    by_label = {label: (schemes or {}).get(names.get(label, label), {}) for label in ("target", *drafts)}
    derived = frozenset(label for label in drafts if names.get(label, label) in made_of_target)
    label_of = {name: label for label, name in names.items()}
    earlier = {label_of.get(name, name): label_of.get(other, other) for name, other in (shared or {}).items()}
    heads = {label_of.get(name, name): weights for name, weights in (beside or {}).items()}
    needs = _Needs(target, drafts, config, dtype, device, by_label, num_taps, derived, earlier, heads)
    plan = MemoryPlan(needs.parts(), available_bytes, later=needs.later(), extra_drafts=names)
    return plan if plan.fits else replace(plan, suggestions=tuple(_suggestions(needs, available_bytes or 0)))


def together(plans: Callable[..., Mapping[str, MemoryPlan]], available_bytes: int | None) -> MemoryPlan:
    """Plan several engines that run at once in one process. The engines are loaded one after the other.

    plans(): returns each engine's plan, by the engine's name. plans(max_batch_size=...) and plans(max_seq_len=...)
    return the plans with that option as an upper limit for every engine. Each suggestion of the result is one option
    for all engines.
    """

    def needed(**options: int) -> int:
        return sum(plan.total_bytes for plan in plans(**options).values())

    def fits(**options: int) -> bool:
        try:
            return needed(**options) <= (available_bytes or 0)
        except BadOption:
            return False

    separate = plans()
    parts = tuple(replace(part, name=f"{name}: {part.name}") for name, plan in separate.items() for part in plan.parts)
    plan = MemoryPlan(parts, available_bytes)
    if plan.fits:
        return plan
    batch = _largest(_MOST_BATCH, 1, lambda n: fits(max_batch_size=n))
    length = _largest(TOKENS_PER_SEQUENCE, MIN_SEQ_LEN, lambda n: fits(max_seq_len=n))
    limits = {"max_batch_size": batch, "max_seq_len": length}
    return replace(plan, suggestions=tuple({name: n} for name, n in limits.items() if n is not None))


class Room(NamedTuple):
    """The largest number of tokens in one sequence, and in the whole KV cache.

    kv_cache_tokens: None = as many as a whole batch of the longest sequences needs.
    """

    max_seq_len: int
    kv_cache_tokens: int | None


def room_of(config: EngineConfig, spec: Spec) -> Room:
    """Return the context length and the number of tokens in the KV cache: as configured, else by default.

    By default the cache holds 4,096 tokens for each sequence of a batch, and at least 32,768 tokens in all, or fewer if
    the model has fewer positions. One sequence may fill the whole cache, up to the model's positions. In a contiguous
    cache, each sequence may fill an equal share.

    Raises BadOption where max_seq_len is more than the model's positions.
    """
    wanted, tokens, max_positions = config.max_seq_len, config.kv_cache_tokens, spec.max_positions
    if wanted is not None:
        if wanted > max_positions:
            raise BadOption(f"max_seq_len={wanted} is not possible: the model has {max_positions} positions")
        return Room(wanted, tokens)
    share = min(max_positions, TOKENS_PER_SEQUENCE)
    if config.kv_cache_backend == "contiguous":
        return Room(share, tokens)
    if tokens is None:
        tokens = max(config.max_batch_size * share, min(max_positions, SEQUENCES * share)) * spec.num_slots
    whole = tokens // spec.num_slots // PAGED_BLOCK_TOKENS * PAGED_BLOCK_TOKENS
    return Room(min(max_positions, max(share, whole)), -(-tokens // PAGED_BLOCK_TOKENS) * PAGED_BLOCK_TOKENS)


def pool_tokens(backend: str, *, max_batch_size: int, max_seq_len: int, num_tokens: int | None = None) -> int:
    """Return the number of rows (one per token) that BlockCache.create allocates in a layer's pool, in whole blocks.

    Raises BadOption where `num_tokens` is less than one block.
    """
    block = PAGED_BLOCK_TOKENS if backend == "paged" else max_seq_len
    num_blocks = max_batch_size * -(-max_seq_len // block) if num_tokens is None else num_tokens // block
    if num_blocks < 1:
        raise BadOption(
            f"kv_cache_tokens={num_tokens} is less than one block of {block} tokens: raise it, or lower max_seq_len"
        )
    return num_blocks * block


# ---------------------------------------------------------------------------------------------------- what a step needs


@dataclass(frozen=True)
class _Needs:
    """The models and options that determine a plan, and the methods that compute the plan's parts from them."""

    target: Spec
    drafts: Mapping[str, Spec]
    config: EngineConfig
    dtype: str
    device: str
    schemes: Mapping[str, Schemes]
    num_taps: int
    made: frozenset[str]  # drafts that reuse the target's weights, as they are or rounded
    shared: Mapping[str, str]  # draft -> the earlier draft whose model it runs, each with its own cache
    beside: Mapping[str, Beside]  # weights of trained heads

    @property
    def max_seq_len(self) -> int:
        return room_of(self.config, self.target).max_seq_len

    @property
    def spec_length(self) -> int:
        """The length of a request's longest draft; 0 where neither the drafter nor an extra drafter can draft."""
        idle = self.config.draft == "none" and not any(name.startswith(EXTRA_DRAFT) for name in self.drafts)
        return 0 if idle else self.config.longest_draft

    @property
    def num_pool_tokens(self) -> int:
        return pool_tokens(
            self.config.kv_cache_backend,
            max_batch_size=self.config.max_batch_size * self.target.num_slots,
            max_seq_len=self.max_seq_len,
            num_tokens=room_of(self.config, self.target).kv_cache_tokens,
        )

    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts())

    @property
    def models(self) -> Mapping[str, Spec]:
        return {"target": self.target, **self.drafts}

    def parts(self) -> tuple[MemoryPart, ...]:
        loaded = {
            name: model
            for name, model in self.models.items()
            if name not in self.shared and (name not in self.made or self.schemes[name])
        }
        pools = [part for name, model in self.models.items() for part in self._pools(name, model.cache_shape)]
        passes = self._passes()
        activations = [
            part for backend in self.backends for part in self.sizes[backend].activations(self._of(backend, passes))
        ]
        running = [*self._weights(loaded, self.beside), *pools, *activations, *self._probabilities()]
        return (*running, *self._loading(loaded, running))

    def later(self) -> tuple[MemoryPart, ...]:
        passes = self._passes()
        return tuple(part for backend in self.backends for part in self.sizes[backend].later(self._of(backend, passes)))

    @cached_property
    def backend_of(self) -> Mapping[str, str]:
        """The backend that will run each model, by model name. Raises BadOption where no backend can run a model."""
        option = self.config.ops
        target = ops.resolve(self.config.ops, self.device, self.target)
        backends = {"target": target} | dict.fromkeys(self.made, target)
        for name, model in self.drafts.items():
            if name not in backends:
                backends[name] = ops.beside(option, target, self.device, self.target, model)
        return backends

    @cached_property
    def backends(self) -> Seq[str]:
        """The backends of all models that have a pass in `_passes`, without repetition, the target's backend first."""
        return list(dict.fromkeys(self.backend_of[run.name] for run in self._passes()))

    @cached_property
    def sizes(self) -> Mapping[str, Sizes]:
        """Maps each backend to the object that computes how many bytes the backend's operators take."""
        rounded = frozenset(name for name in self.made if self.schemes[name])
        in_place = self.config.kv_cache_backend == "contiguous"
        wanted = Wanted(self.dtype, self.device, self.max_seq_len, in_place, self.schemes, rounded)
        return {backend: ops.backend(backend).sizes(wanted) for backend in dict.fromkeys(self.backend_of.values())}

    def _of(self, backend: str, passes: Seq[Pass]) -> list[Pass]:
        return [run for run in passes if self.backend_of[run.name] == backend]

    def _weights(
        self, models: Mapping[str, Spec], beside: Mapping[str, Beside] = MappingProxyType({})
    ) -> list[MemoryPart]:
        """Return the parts of the plan for the weights of `models`.

        beside: the weights of trained heads, which are counted with the target's backend.
        """
        parts = list[MemoryPart]()
        for backend, sizes in self.sizes.items():
            run_here = {name: model for name, model in models.items() if self.backend_of[name] == backend}
            parts += sizes.weights(run_here, beside if backend == self.backend_of["target"] else {}) if run_here else []
        return parts

    def _passes(self) -> list[Pass]:
        """Return the largest pass of each model. The passes run one after another."""
        drafts = self.drafts if self.spec_length else {}
        with_weights = {name: model for name, model in drafts.items() if name not in self.shared}
        return [self._target_pass(), *(self._draft_pass(name, model) for name, model in with_weights.items())]

    def _loading(self, models: Mapping[str, Spec], running: list[MemoryPart]) -> list[MemoryPart]:
        """Return, as a part of the plan, the extra memory for loading `models` one by one.

        This is the memory beyond `running`, the parts for running the models. Returns [] if there is none.
        """
        loaded: dict[str, Spec] = {}
        peak = 0
        for name, model in models.items():
            loaded[name] = model
            held = sum(part.bytes for part in self._weights(loaded))
            peak = max(peak, held + self.sizes[self.backend_of[name]].loading_bytes(model))
        more = peak - sum(part.bytes for part in running)
        return [MemoryPart("loading", more, "blocks of files, beyond what is needed later")] if more > 0 else []

    def _cache_dtype_of(self, name: str) -> str:
        own = self.backend_of[name]
        dtype = self.sizes[own].cache_dtype_of(name)
        if name in self.beside:
            return dtype
        shape = self.models[name].cache_shape
        return ops.kept_dtype(self.config.kv_cache_dtype, own, shape, dtype, must=name == "target")

    def _pools(self, name: str, shape: CacheShape) -> list[MemoryPart]:
        """Return a model's cache as parts of the plan: rows of keys and values, and any states of recurrent layers."""
        room = state_room(shape, self.config.max_batch_size * self.target.num_slots)
        if room is None:
            return [self._pool(name, shape)]
        dtype = self._cache_dtype_of(name)
        each, row = shape.state_bytes(dtype), shape.input_bytes(dtype)
        how = f"{room.num_states} x {each:,} bytes, and inputs of {room.num_rows:,} tokens x {row:,} bytes"
        return [
            self._pool(name, shape),
            MemoryPart(f"{name} recurrent states", room.num_states * each + room.num_rows * row, how),
        ]

    def _pool(self, name: str, shape: CacheShape) -> MemoryPart:
        tokens = self.num_pool_tokens
        dtype = self._cache_dtype_of(name)
        batch = self.config.max_batch_size
        per_sequence = tokens // self.config.max_batch_size
        if name in self.beside:
            shape = replace(shape, windows=None)  # a head keeps all rows
        shape = shape_of(shape, self.config.kv_cache_backend, self.max_seq_len, self.device)
        largest = self._target_pass() if name == "target" else self._draft_pass(name, self.drafts[name])
        num_bytes, counted = 0, list[str]()
        for kind, window in enumerate(shape.kinds):
            block = PAGED_BLOCK_TOKENS
            each = shape.bytes_per_token(dtype, kind)
            held = (
                tokens
                if window is None
                else block
                * written_blocks(window, block, tokens // block, batch * self.target.num_slots, largest.num_rows)
            )
            num_bytes += held * each
            is_whole = held == tokens and self.config.kv_cache_tokens is None and per_sequence >= self.max_seq_len
            counted.append(f"{batch} x {per_sequence:,}" if is_whole else f"{held:,}")
            counted[-1] += f" tokens x {each:,} bytes" + (f" (window of {window:,})" if window else "")
        return MemoryPart(f"{name} KV cache", num_bytes, " + ".join(counted))

    def _target_pass(self) -> Pass:
        """Return the target's largest pass.

        The pass either runs prompt chunks of some requests and verifies the drafts of all other requests, or verifies
        the drafts of the whole batch.
        """
        batch, length, pool = self.config.max_batch_size, self.max_seq_len, self.num_pool_tokens
        verified = self.spec_length + 1
        prompt = min(self.config.prefill_chunk_tokens, batch * length, pool)
        num_rows = max(prompt + (batch - 1) * verified, batch * verified)
        num_rows = min(num_rows, self.config.max_num_batched_tokens)
        return Pass(
            "target",
            self.target,
            num_rows=num_rows,
            longest_run=max(min(prompt, length), verified),
            num_masked=num_rows if verified > 1 else prompt,
            context=min(length, pool),
            num_read=min(batch * length, pool),
            num_logits=min(batch * verified, self.config.max_num_batched_tokens),
            num_taps=self.num_taps,
        )

    def _draft_pass(self, name: str, draft: Spec) -> Pass:
        """Return a draft model's largest pass, which runs the committed tokens that are missing in the model's cache.

        The missing tokens are prompt tokens, up to the catch-up budget, and, for each sequence, up to ROUND_TOKENS
        tokens of the last round.
        """
        batch, length, pool = self.config.max_batch_size, self.max_seq_len, self.num_pool_tokens
        num_rows = min(self.config.draft_catchup_tokens + batch * ROUND_TOKENS, batch * length, pool)
        longest = min(num_rows, length)
        context, num_read = min(length, pool), min(batch * length, pool)
        return Pass(name, draft, num_rows, longest, num_rows, context, num_read, batch)

    def _probabilities(self) -> list[MemoryPart]:
        """Return the memory of one step's dense probability rows, which requests with temperature > 0 need.

        Greedy requests and drafters without a model have one-point distributions, which take no memory. Each sequence
        has one drafter at a time, so several draft models together have no more rows than a single draft model.
        """
        if self.device != "cpu":
            return []
        batch, num_ids = self.config.max_batch_size, self.target.vocab_size
        # A draft's tokens and the one behind them are rows of a pass, which has room for so many.
        num_rows = min(batch * (self.spec_length + 1), self.config.max_num_batched_tokens)
        target = MemoryPart(
            "target probabilities",
            (num_rows * PROB_BYTES + SAMPLING_BYTES) * num_ids,
            f"{num_rows:,} rows of {num_ids:,} x {PROB_BYTES} bytes; one row, while a token is drawn from it, "
            f"{SAMPLING_BYTES} bytes more for each of these",
        )
        num_drafted = num_rows - batch
        if not self.drafts or not num_drafted:
            return [target]
        how = f"{num_drafted:,} rows of {num_ids:,} x {PROB_BYTES} bytes"
        return [MemoryPart("draft probabilities", num_drafted * num_ids * PROB_BYTES, how), target]


# ---------------------------------------------------------------------------------------------------------- what fits


def _suggestions(needs: _Needs, available: int) -> list[dict[str, int]]:
    """Return, for each option, the largest value with which the plan fits if the other options are unchanged.

    If no single option helps, return max_batch_size=1 with the largest max_seq_len that fits; [] if no length fits.
    """

    def fits(**options: Any) -> bool:
        try:
            return replace(needs, config=replace(needs.config, **options)).total_bytes() <= available
        except BadOption:
            return False

    block = PAGED_BLOCK_TOKENS if needs.config.kv_cache_backend == "paged" else needs.max_seq_len
    batch = _largest(needs.config.max_batch_size, 1, lambda n: fits(max_batch_size=n))
    length = _largest(needs.max_seq_len, MIN_SEQ_LEN, lambda n: fits(max_seq_len=n))
    tokens = _largest(needs.num_pool_tokens, block, lambda n: fits(kv_cache_tokens=n))
    largest = {"max_batch_size": batch, "max_seq_len": length, "kv_cache_tokens": tokens}
    alone = [{name: value} for name, value in largest.items() if value is not None]
    if alone:
        return alone
    length = _largest(needs.max_seq_len, MIN_SEQ_LEN, lambda n: fits(max_batch_size=1, max_seq_len=n))
    return [] if length is None else [{"max_batch_size": 1, "max_seq_len": length}]


def _largest(high: int, step: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest multiple of `step` up to `high` that fits, by bisection; None where not even `step` fits."""
    low, high = 0, high // step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
    return low * step or None
