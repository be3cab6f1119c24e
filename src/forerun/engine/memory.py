"""What a configuration needs in memory, before anything is loaded: arithmetic on sizes, no weights, no files.

Weights and KV pools are exact to the byte. What a step computes with ("activations", probability rows) is an upper
bound, read off the code that allocates it: models/layers.py, ops/reference.py, kv/cache.py, drafters/model.py,
engine/step.py. Not counted: the interpreter, torch itself, tokenizers, and on an accelerator its context. On a CPU
oneDNN compiles a kernel for every matrix and number of rows and keeps it: that comes with time (`MemoryPlan.later`).

Units: GB = 10^9 bytes, GiB = 2^30 bytes. Sizes of weights are usually quoted in GB and sizes of KV pools in GiB, often
both under the name GB: 8 x 4096 tokens of 114,688 bytes are 3.5 GiB and 3.76 GB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.config import EngineConfig
from forerun.errors import BadOption
from forerun.kv.cache import PAGED_BLOCK_TOKENS, CacheShape
from forerun.models.layers import DecoderConfig, Rope, parameter_shapes
from forerun.ops.reference import ONEDNN_MIN_WEIGHTS

DEFAULT_MAX_SEQ_LEN = 4096  # tokens; a model's own limit may be far beyond what its cache should take unasked
PROB_BYTES = torch.float32.itemsize  # logits and laws are float32, see Decoder.logits and sampling.probs
SAMPLING_BYTES = 48  # per id, for one row at a time: what sampling and the Gumbel noise compute with, mostly float64
KERNEL_BYTES = 1 << 20  # what torch's kernels work in; attention on a CPU was measured at 0.2 MB per thread
COMPILED_BYTES = 650_000  # of one kernel that oneDNN compiled, measured: 0.58 to 0.64 MB in float32 and bfloat16
COMPILED_MAX_BYTES = 1_700_000_000  # of all, measured: 1.0 GB for 2,000, 1.68 GB for 8,000 and for 12,000 kernels
MIN_SEQ_LEN = PAGED_BLOCK_TOKENS  # tokens; no suggestion goes below it


@dataclass(frozen=True)
class MemoryPart:
    """One line of a plan. how: the multiplication behind `bytes`, in words."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True)
class MemoryPlan:
    """What a configuration needs, and where it does not fit, what would.

    available_bytes: None = nobody said. suggestions: each is a set of options that together make it fit, every other
    option as it was; empty where it fits, and where nothing does. later: what a process that runs for long comes to
    hold on top, which is not in the total.
    """

    parts: tuple[MemoryPart, ...]
    available_bytes: int | None = None
    suggestions: tuple[Mapping[str, int], ...] = ()
    later: tuple[MemoryPart, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        """True where the total is within what is available, or where nobody said what is."""
        return self.available_bytes is None or self.total_bytes <= self.available_bytes

    def bytes_of(self, *names: str) -> int:
        """Bytes of the parts with these names; a part that is not there has none."""
        return sum(part.bytes for part in self.parts if part.name in names)

    def verdict(self) -> str:
        """One sentence: whether it fits, with numbers, and what to change if not."""
        need = gigabytes(self.total_bytes)
        if self.available_bytes is None:
            return f"{need} are needed."
        have = gigabytes(self.available_bytes)
        if self.fits:
            return f"It fits: {need} of {have}, {gigabytes(self.available_bytes - self.total_bytes)} to spare."
        if self.suggestions:
            ways = [" and ".join(f"{k}={v}" for k, v in options.items()) for options in self.suggestions]
            return f"It does not fit: {need} are needed of {have}. It would fit with {' or '.join(ways)}."
        weights = self.bytes_of("target weights", "draft weights")
        if weights > self.available_bytes:
            return f"Nothing fits: the weights alone need {gigabytes(weights)}, and {have} are available."
        rest = self.total_bytes - weights - self.bytes_of("target KV cache", "draft KV cache")
        return (
            f"Nothing fits: beside {gigabytes(weights)} of weights there is no room in {have} for one short sequence "
            f"and its activations, {gigabytes(rest)} as configured; lower prefill_chunk_tokens."
        )


def gigabytes(num_bytes: int) -> str:
    """'3.76 GB (3.50 GiB)'; three decimals below a tenth."""
    places = 3 if num_bytes < 10**8 else 2
    return f"{num_bytes / 1e9:.{places}f} GB ({num_bytes / 2**30:.{places}f} GiB)"


def memory_plan(
    target: DecoderConfig,
    draft: DecoderConfig | None,
    config: EngineConfig,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    available_bytes: int | None = None,
) -> MemoryPlan:
    """The plan for a target and its draft model (None = a drafter without a model) under the engine's options.

    dtype: of weights and caches, of both models. device: "cpu" or "cuda"; on "cuda" the plan is of its memory, and the
    probability rows are left out, because they lie on the host. Raises BadOption as the engine itself would for
    max_seq_len and kv_cache_tokens.
    """
    needs = _Needs(target, draft, config, dtype, device)
    parts = needs.parts()
    plan = MemoryPlan(parts, available_bytes, later=needs.later())
    return plan if plan.fits else replace(plan, suggestions=tuple(_suggestions(needs, available_bytes or 0)))


def resolve_max_seq_len(wanted: int | None, max_positions: int) -> int:
    """Tokens of the longest sequence: as wanted, else the model's positions, at most DEFAULT_MAX_SEQ_LEN.

    Raises BadOption where more is wanted than the model has positions.
    """
    if wanted is None:
        return min(max_positions, DEFAULT_MAX_SEQ_LEN)
    if wanted > max_positions:
        raise BadOption(f"max_seq_len={wanted} is not possible: the model has {max_positions} positions")
    return wanted


def weight_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights; a tied LM head is its embedding and counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values()) * dtype.itemsize


def pool_tokens(backend: str, *, max_batch_size: int, max_seq_len: int, num_tokens: int | None = None) -> int:
    """Rows of the pool that KVCache.create allocates: whole blocks. Raises BadOption where there is not even one."""
    block = PAGED_BLOCK_TOKENS if backend == "paged" else max_seq_len
    num_blocks = max_batch_size * -(-max_seq_len // block) if num_tokens is None else num_tokens // block
    if num_blocks < 1:
        raise BadOption(
            f"kv_cache_tokens={num_tokens} is less than one block of {block} tokens: raise it, or lower max_seq_len"
        )
    return num_blocks * block


# ---------------------------------------------------------------------------------------------------- what a step needs


@dataclass(frozen=True)
class _Pass:
    """The largest forward pass of a model.

    num_rows: new tokens. longest_run: of one sequence. num_masked: rows in runs of more than one token, which need a
    mask. context: cached and new tokens that one row may see. num_read: the same over all runs. num_logits: rows whose
    logits are wanted.
    """

    num_rows: int
    longest_run: int
    num_masked: int
    context: int
    num_read: int
    num_logits: int


@dataclass(frozen=True)
class _Needs:
    """Everything that decides the sizes."""

    target: DecoderConfig
    draft: DecoderConfig | None
    config: EngineConfig
    dtype: torch.dtype
    device: str

    @property
    def max_seq_len(self) -> int:
        return resolve_max_seq_len(self.config.max_seq_len, self.target.max_positions)

    @property
    def spec_length(self) -> int:
        return 0 if self.config.draft == "none" else self.config.spec_length

    @property
    def num_pool_tokens(self) -> int:
        return pool_tokens(
            self.config.kv_cache_backend,
            max_batch_size=self.config.max_batch_size,
            max_seq_len=self.max_seq_len,
            num_tokens=self.config.kv_cache_tokens,
        )

    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts())

    def parts(self) -> tuple[MemoryPart, ...]:
        models = [("target", self.target)] + ([("draft", self.draft)] if self.draft is not None else [])
        weights = [self._weights(name, model) for name, model in models]
        pools = [self._pool(name, model.cache_shape) for name, model in models]
        activations = self._activations()
        # Blocks that were freed and are too small for what comes next: the allocator keeps them.
        kept = MemoryPart("freed blocks", activations.bytes, "kept by the allocator: as much as the activations")
        return (*weights, *pools, activations, kept, *self._probabilities())

    def later(self) -> tuple[MemoryPart, ...]:
        """Kernels of oneDNN, one for each matrix and number of rows that ever occurred; none on an accelerator."""
        count = 0
        for model, run in self._passes().values():
            matrices = [shape for shape in _layer_matrices(model) if self._is_compiled(shape)]
            head = self._is_compiled((model.vocab_size, model.hidden_size))
            count += len(set(matrices)) * run.num_rows + head * run.num_logits
        if count == 0 or self.device != "cpu":
            return ()
        how = f"one for each matrix and number of rows that occurs, {count:,} at most"
        return (MemoryPart("compiled kernels", min(count * COMPILED_BYTES, COMPILED_MAX_BYTES), how),)

    def _is_compiled(self, shape: tuple[int, int]) -> bool:
        return self.dtype != torch.float32 or math.prod(shape) >= ONEDNN_MIN_WEIGHTS

    def _passes(self) -> dict[str, tuple[DecoderConfig, _Pass]]:
        """The largest pass of each model; they follow each other."""
        passes = {"target": (self.target, self._target_pass())}
        if self.draft is not None and self.spec_length:
            passes["draft"] = (self.draft, self._draft_pass())
        return passes

    def _weights(self, name: str, model: DecoderConfig) -> MemoryPart:
        num_bytes, size = weight_bytes(model, self.dtype), self.dtype.itemsize
        return MemoryPart(f"{name} weights", num_bytes, f"{num_bytes // size:,} weights x {size} bytes")

    def _pool(self, name: str, shape: CacheShape) -> MemoryPart:
        tokens, each = self.num_pool_tokens, shape.bytes_per_token(self.dtype)
        batch, per_sequence = self.config.max_batch_size, tokens // self.config.max_batch_size
        counted = f"{batch} x {per_sequence:,}" if self.config.kv_cache_tokens is None else f"{tokens:,}"
        return MemoryPart(f"{name} KV cache", tokens * each, f"{counted} tokens x {each:,} bytes")

    def _activations(self) -> MemoryPart:
        """The larger of the target's pass and the draft model's."""
        found = []
        for name, (model, run) in self._passes().items():
            layers, attention, logits = self._pass_bytes(model, run)
            # A drafter holds the last logits while the next pass runs.
            kept = run.num_logits * model.vocab_size * PROB_BYTES if name == "draft" else 0
            how = f"{run.num_rows:,} rows of the {name}: layers {layers / 1e6:,.1f} MB, attention "
            how += f"{attention / 1e6:,.1f} MB; or {run.num_logits:,} rows of logits, {logits / 1e6:,.1f} MB"
            found.append(MemoryPart("activations", KERNEL_BYTES + max(layers + attention, logits) + kept, how))
        return max(found, key=lambda part: part.bytes)

    def _target_pass(self) -> _Pass:
        """Prompt chunks beside everybody else's verification, or verification of the whole batch."""
        batch, length, pool = self.config.max_batch_size, self.max_seq_len, self.num_pool_tokens
        verified = self.spec_length + 1
        prompt = min(self.config.prefill_chunk_tokens, batch * length, pool)
        num_rows = max(prompt + (batch - 1) * verified, batch * verified)
        return _Pass(
            num_rows=num_rows,
            longest_run=max(min(prompt, length), verified),
            num_masked=num_rows if verified > 1 else prompt,
            context=min(length, pool),
            num_read=min(batch * length, pool),
            num_logits=batch * verified,
        )

    def _draft_pass(self) -> _Pass:
        """Committed tokens that its cache lacks: whole prompts, within the budget; then one row per sequence."""
        batch, length, pool = self.config.max_batch_size, self.max_seq_len, self.num_pool_tokens
        num_rows = max(min(self.config.draft_catchup_tokens, batch * length, pool), batch)
        longest = min(num_rows, length)
        return _Pass(num_rows, longest, num_rows, min(length, pool), min(batch * length, pool), batch)

    def _pass_bytes(self, model: DecoderConfig, run: _Pass) -> tuple[int, int, int]:
        """Peaks of one pass in bytes: a layer, what its attention adds, and, after the layers, the logits."""
        layers = _layer_bytes(model, run, self.dtype, self._row_by_row)
        attention = self._attention_bytes(model, run)
        size, copies = self.dtype.itemsize, 2 if self._row_by_row else 1
        widened = 0 if size == PROB_BYTES else PROB_BYTES
        logits = run.num_logits * model.vocab_size * (copies * size + widened)
        return layers, attention, logits + (run.num_rows + run.num_logits) * model.hidden_size * size

    def _attention_bytes(self, model: DecoderConfig, run: _Pass) -> int:
        """Masks of all runs, which the pass keeps; keys and values gathered for one run; and what reads them."""
        size, windows = self.dtype.itemsize, set(model.windows) or {None}
        masked, longest = (0, 0) if self._row_by_row else (run.num_masked, run.longest_run)
        masks = len(windows) * masked * run.context * 4
        square = longest * run.context  # of the mask being made or converted: the run with the most rows
        building = square * (4 if windows == {None} else 12)
        converting = 0 if size == 4 else square * size
        cached = 2 * run.context * model.num_kv_heads * model.head_dim
        # Rows that follow each other are read in place on a CPU; a paged sequence may lie anywhere.
        copies = 0 if self.device == "cpu" and self.config.kv_cache_backend == "contiguous" else 1
        gathered = (copies + self._row_by_row) * cached * size
        reading = run.num_read * 8 + _rope_bytes(model, run, self.max_seq_len, size)
        return masks + reading + max(building, converting + gathered + self._sdpa_bytes(model, run))

    def _sdpa_bytes(self, model: DecoderConfig, run: _Pass) -> int:
        """Scores, where torch writes them out: not on a CPU, where it attends in tiles. Elsewhere grouped heads under a

        mask leave only the plain formula, in float32: keys and values of every query head, scores, and their softmax.
        """
        if self.device == "cpu":
            return 0
        expanded = 2 * model.num_heads * run.context * model.head_dim
        return 4 * (expanded + 2 * model.num_heads * run.longest_run * run.context)

    def _probabilities(self) -> list[MemoryPart]:
        """Dense laws of one step, at temperature > 0; greedy laws and those of model-less drafters are point masses."""
        if self.device != "cpu":
            return []
        batch, verified, num_ids = self.config.max_batch_size, self.spec_length + 1, self.target.vocab_size
        target = MemoryPart(
            "target probabilities",
            (batch * verified * PROB_BYTES + SAMPLING_BYTES) * num_ids,
            f"{batch} x {verified} rows of {num_ids:,} x {PROB_BYTES} bytes, {SAMPLING_BYTES} more for one",
        )
        if self.draft is None or not self.spec_length:
            return [target]
        num_bytes = batch * self.spec_length * num_ids * PROB_BYTES
        how = f"{batch} x {self.spec_length} rows of {num_ids:,} x {PROB_BYTES} bytes"
        return [MemoryPart("draft probabilities", num_bytes, how), target]

    @property
    def _row_by_row(self) -> bool:
        return self.config.ops == "reference_row_by_row"


def _layer_bytes(c: DecoderConfig, run: _Pass, dtype: torch.dtype, row_by_row: bool) -> int:
    """Most bytes that are alive inside one layer, without what attention reads (Decoder.forward, line by line).

    The gate and up projections of the layer before live until those of this layer replace them.
    """
    size, h, f = dtype.itemsize, c.hidden_size, c.ffn_size
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    held = 2 * f if c.num_layers > 1 else 0
    norm = 2 * h if size == 4 else 2 * h + 8 * h // size  # narrow types are normed in float32
    rope = max(3 * q, q + 3 * kv, 3 * q + kv) + (q + kv if c.qk_norm else 0)
    twice = 1 if row_by_row else 0  # rows computed alone are put together: the result exists twice
    stages = (
        h + held + norm,
        2 * h + held + (q + 2 * kv) * (1 + twice),
        2 * h + held + q + 2 * kv + rope + twice * q,
        2 * h + held + 2 * f * (1 + twice),
        h + 2 * f + 2 * f + twice * f,
        h + 3 * f + (2 + twice) * h,
    )
    return run.num_rows * max(stages) * size


def _layer_matrices(c: DecoderConfig) -> list[tuple[int, int]]:
    """The matrices of a layer as they are multiplied, projections of one input joined."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    h, f = c.hidden_size, c.ffn_size
    return [(q + 2 * kv, h), (h, q), (2 * f, h), (h, f)]


def _rope_bytes(c: DecoderConfig, run: _Pass, max_seq_len: int, size: int) -> int:
    """The table of cos and sin, which exists twice while it grows, and the rows taken from it."""
    table = -(-max_seq_len // Rope.BLOCK) * Rope.BLOCK
    return (2 * table + run.num_rows) * 2 * c.head_dim * size


# ---------------------------------------------------------------------------------------------------------- what fits


def _suggestions(needs: _Needs, available: int) -> list[dict[str, int]]:
    """The largest value of each option that makes it fit alone; else one sequence of the largest length."""

    def fits(**options: Any) -> bool:
        try:
            return replace(needs, config=replace(needs.config, **options)).total_bytes() <= available
        except BadOption:
            return False

    block = PAGED_BLOCK_TOKENS if needs.config.kv_cache_backend == "paged" else needs.max_seq_len
    batch = _largest(needs.config.max_batch_size, 1, lambda n: fits(max_batch_size=n))
    length = _largest(needs.max_seq_len, MIN_SEQ_LEN, lambda n: fits(max_seq_len=n))
    tokens = _largest(needs.num_pool_tokens, block, lambda n: fits(kv_cache_tokens=n))
    found = {"max_batch_size": batch, "max_seq_len": length, "kv_cache_tokens": tokens}
    alone = [{name: value} for name, value in found.items() if value is not None]
    if alone:
        return alone
    length = _largest(needs.max_seq_len, MIN_SEQ_LEN, lambda n: fits(max_batch_size=1, max_seq_len=n))
    return [] if length is None else [{"max_batch_size": 1, "max_seq_len": length}]


def _largest(high: int, step: int, fits: Callable[[int], bool]) -> int | None:
    """The largest multiple of `step` up to `high` that fits, by bisection; None where not even `step` does."""
    low, high = 0, high // step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
    return low * step or None
