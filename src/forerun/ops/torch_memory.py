"""Memory of the reference operators: weights to the byte, and an upper bound of the memory of a pass.

The bound follows the code that allocates: ops/torch.py, ops/reference.py, ops/torch_pools.py. On a CPU, oneDNN compiles
and keeps one kernel for each matrix and each number of rows. So memory grows while a process runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from forerun.blocks import Spec, itemsize
from forerun.ops.memory import (
    FLOAT_BYTES,
    KERNEL_BYTES,
    PROB_BYTES,
    Beside,
    MemoryPart,
    Pass,
    Widths,
    block_bytes,
    matrix_shapes,
    rope_table_bytes,
    weight_bytes,
)
from forerun.ops.reference import ONEDNN_MIN_WEIGHTS

COMPILED_BYTES = 700_000  # of one kernel that oneDNN compiles, measured: 0.58 to 0.68 MB in float32 and bfloat16
COMPILED_MAX_BYTES = 1_700_000_000  # of all, measured: 1.0 GB for 2,000, 1.68 GB for 8,000 and for 12,000 kernels


@dataclass(frozen=True)
class ReferenceSizes:
    """The memory that the reference operators take. Weights, rows and caches have one dtype.

    in_place: whether consecutive rows of the cache are read without a copy.
    """

    dtype: str
    device: str
    max_seq_len: int
    in_place: bool
    row_by_row: bool

    def cache_dtype_of(self, name: str) -> str:
        """Return the dtype of the weights, which every cache shares."""
        return self.dtype

    def weights(
        self, models: Mapping[str, Spec], beside: Mapping[str, Beside] = MappingProxyType({})
    ) -> list[MemoryPart]:
        """Return one MemoryPart for each model, then one for each draft head.

        Every weight counts once; a tied LM head is the embedding. Rounded matrices of draft heads are kept dequantised.
        """
        size = itemsize(self.dtype)
        taken = {name: weight_bytes(model, self.dtype) for name, model in models.items()}
        parts = [MemoryPart(f"{name} weights", n, f"{n // size:,} weights x {size} bytes") for name, n in taken.items()]
        for name, head in beside.items():
            num = head.num_weights - head.num_floats
            floats = head.num_floats
            how = f"{num:,} weights x {size} bytes, {floats:,} x {FLOAT_BYTES} bytes"
            parts.append(MemoryPart(f"{name} weights", num * size + floats * FLOAT_BYTES, how))
        return parts

    def activations(self, passes: list[Pass]) -> list[MemoryPart]:
        """Return the memory of the largest pass, and a reserve of the same size."""
        parts = []
        for run in passes:
            layers, attention, logits = self._pass_bytes(run)
            how = f"{run.num_rows:,} rows of the {run.name}: layers {layers / 1e6:,.1f} MB, attention "
            how += f"{attention / 1e6:,.1f} MB; or {run.num_logits:,} rows of logits, {logits / 1e6:,.1f} MB"
            how += run.taps_said
            num_bytes = KERNEL_BYTES + max(layers, attention, logits) + run.tap_bytes + run.kept_bytes
            parts.append(MemoryPart("activations", num_bytes, how))
        largest = max(parts, key=lambda part: part.bytes)
        # The allocator keeps freed blocks that are too small for the next request.
        return [
            largest,
            MemoryPart("reserve", largest.bytes, "freed memory that the allocator keeps: as much as the activations"),
        ]

    def later(self, passes: list[Pass]) -> tuple[MemoryPart, ...]:
        """Return the memory of the kernels that oneDNN compiles on a CPU. There are none on an accelerator.

        oneDNN keeps one kernel for each matrix and each number of rows that can occur.
        """
        count = 0
        for run in passes:
            matrices = [shape for shape in matrix_shapes(run.model) if self._is_compiled(shape)]
            head = self._is_compiled((run.model.vocab_size, run.model.hidden_size))
            count += len(matrices) * run.num_rows + head * run.num_logits
        if count == 0 or self.device != "cpu":
            return ()
        how = f"one for each matrix and number of rows that occurs, {count:,} at most"
        return (MemoryPart("compiled kernels", min(count * COMPILED_BYTES, COMPILED_MAX_BYTES), how),)

    def loading_bytes(self, model: Spec) -> int:
        """Return the bytes of two blocks of a file; 0 on an accelerator, because files are read on the host."""
        return 2 * block_bytes(model) if self.device == "cpu" else 0

    def _is_compiled(self, shape: tuple[int, int]) -> bool:
        return self.dtype != "float32" or math.prod(shape) >= ONEDNN_MIN_WEIGHTS

    def _pass_bytes(self, run: Pass) -> tuple[int, int, int]:
        """Return three peaks of a pass in bytes: outside of attention, within attention, and for the final logits."""
        size = itemsize(self.dtype)
        copies = 2 if self.row_by_row else 1
        widened = 0 if size == PROB_BYTES else PROB_BYTES
        logits = run.num_logits * run.model.vocab_size * (copies * size + widened)
        hidden = (run.num_rows + run.num_logits) * run.model.hidden_size * size
        outside, within = self._layer_bytes(run)
        held, working = self._attention_bytes(run)
        return outside + held, within + held + working, logits + hidden

    def _layer_bytes(self, run: Pass) -> tuple[int, int]:
        """Return two peaks in bytes inside one layer: outside of attention, and while attention works.

        The first number follows TorchBlock.run line by line. The layer's input stays in memory until the layer is done.
        """
        c, size = Widths.of(run.model), itemsize(self.dtype)
        h, f, q, kv = run.model.hidden_size, c.ffn, c.q, c.kv
        norm = 2 * h if size == 4 else 2 * h + 8 * h // size  # narrow types are normed in float32
        rope = max(3 * q, q + 3 * kv, 3 * q + kv) + (q + kv if c.has_head_norm else 0)
        twice = 1 if self.row_by_row else 0  # rows computed alone are joined: the result exists twice
        stages = (
            h + norm,
            2 * h + (q + 2 * kv) * (1 + twice),
            3 * h + 2 * f * (1 + twice),
            2 * h + 2 * f + 2 * f + twice * f,
            2 * h + 3 * f + (2 + twice) * h,
        )
        return run.num_rows * max(stages) * size, run.num_rows * (h + q + 2 * kv + rope + twice * q) * size

    def _attention_bytes(self, run: Pass) -> tuple[int, int]:
        """Return the bytes that attention keeps during a pass, and its working bytes for the largest run of new tokens.

        Masks, indices of cache rows, and rotations are kept during a pass.
        """
        model, size = run.model, itemsize(self.dtype)
        windows = {block.attention.window for block in model.blocks if block.attention is not None}
        masked, longest = (0, 0) if self.row_by_row else (run.num_masked, run.longest_run)
        masks = len(windows) * masked * run.context * 4
        square = longest * run.context  # numbers of the largest run's mask, while it is made or converted
        building = square * (4 if windows == {None} else 12)
        converting = 0 if size == 4 else square * size
        widths = Widths.of(model)
        cached = 2 * run.context * widths.kv
        # Rows that follow each other are read in place on a CPU; a paged sequence may lie anywhere.
        copies = 0 if self.device == "cpu" and self.in_place else 1
        gathered = (copies + self.row_by_row) * cached * size
        rotations = rope_table_bytes(model, self.max_seq_len, size) + run.num_rows * 2 * widths.head_dim * size
        reading = run.num_read * 8 + rotations
        scored = self._scored_bytes(run) if _has_scores(model) else 0
        return masks + reading, max(building, converting + gathered + max(scored, self._sdpa_bytes(run)))

    def _scored_bytes(self, run: Pass) -> int:
        """Return the working bytes of attention with soft caps, sinks or position biases.

        The sum follows the function `_scored`. The keys of each query head are float32, and so are three copies of the
        scores: the product, an intermediate step of the soft cap, and the result. Distances from rows back to keys are
        int64.
        """
        widths = Widths.of(run.model)
        rows = 1 if self.row_by_row else run.longest_run
        scores, distances = 3 * widths.heads * rows * run.context, 8 * rows * run.context
        return FLOAT_BYTES * (run.context * (widths.q + widths.kv) + rows * widths.q + scores) + distances

    def _sdpa_bytes(self, run: Pass) -> int:
        """Return the bytes that torch's attention allocates; 0 on a CPU, where it works in tiles.

        On other devices, torch uses the plain formula in float32 for grouped heads under a mask. It then writes out the
        keys and values of every query head, the scores, and their softmax.
        """
        if self.device == "cpu":
            return 0
        widths = Widths.of(run.model)
        expanded = 2 * run.context * widths.q
        return 4 * (expanded + 2 * widths.heads * run.longest_run * run.context)


def _has_scores(spec: Spec) -> bool:
    """Tell whether some attention writes its scores to memory. Soft caps, sinks and position biases require this."""
    attentions = [block.attention for block in spec.blocks if block.attention is not None]
    return any(a.softcap is not None or a.sinks or a.bias is not None for a in attentions)
