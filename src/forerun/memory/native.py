"""Memory of the native operators: packed weights to the byte, and an upper bound of the buffers of a pass.

The numbers follow csrc/matrix.cpp, which packs, csrc/decoder.cpp, whose buffers grow to the largest pass and stay, and
ops/cpu.py. No kernel is compiled while they run, so memory does not grow later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from forerun.memory.parts import (
    FLOAT_BYTES,
    KERNEL_BYTES,
    MemoryPart,
    Pass,
    matrix_shapes,
    rope_table_bytes,
    up_to,
)
from forerun.memory.reference import block_bytes, weight_bytes
from forerun.models.layers import DecoderConfig, parameter_shapes

PANEL = 32  # outputs side by side: csrc/kernels.h
WORD_BYTES = 4  # inputs of a step: one float32, or two bfloat16
HUGE_PAGE_BYTES = 2 << 20  # larger buffers take whole huge pages: csrc/decoder.cpp
GIVE_BACK_BYTES = 8 << 20  # bytes packed before source pages are given back: csrc/matrix.cpp
KEY_BLOCK, ATTENTION_ROWS = 64, 16  # keys and rows that attention takes at once
FEW_ROWS = 24  # up to so many rows, every thread has its own copy of a product's inputs


@dataclass(frozen=True)
class NativeSizes:
    """The sizes of the native operators. Weights and caches are float32 or bfloat16, and rows are float32."""

    dtype: torch.dtype
    max_seq_len: int
    num_threads: int

    @property
    def cache_dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.dtype

    def weights(self, models: Mapping[str, DecoderConfig]) -> list[MemoryPart]:
        """Return the parts of packed matrices with biases, float32 norms, and an untied embedding as it is stored.

        A further part is what is lost at the ends of huge pages.
        """
        parts, size, rounded = [], self.dtype.itemsize, 0
        for name, model in models.items():
            matrices = list(packed_matrix_bytes(model, self.dtype))
            table = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size * size
            num_bytes, plain = sum(matrices) + table + _vector_bytes(model), weight_bytes(model, self.dtype)
            how = f"{plain // size:,} weights x {size} bytes, packed: {(num_bytes - plain) / 1e6:+.2f} MB"
            parts.append(MemoryPart(f"{name} weights", num_bytes, how))
            rounded += sum(allocated_bytes(n) - n for n in matrices)
        ends = MemoryPart("page ends", rounded, "matrices of 2 MiB and more are allocated in huge pages")
        return [*parts, *([ends] if rounded else [])]

    def activations(self, passes: list[Pass]) -> list[MemoryPart]:
        """Return the buffers of every model, the results of the largest pass, and as much again in freed blocks."""
        kept = sum(self._buffer_bytes(run) for run in passes)
        rows = " and ".join(f"{run.num_rows:,} rows of the {run.name}" for run in passes)
        found = []
        for run in passes:
            hidden = (run.num_rows + run.num_logits) * run.model.hidden_size * FLOAT_BYTES
            logits = run.num_logits * run.model.vocab_size * FLOAT_BYTES
            how = f"{run.num_rows:,} hidden states of the {run.name}, {hidden / 1e6:,.1f} MB; {run.num_logits:,} rows "
            how += f"of logits, {logits / 1e6:,.1f} MB{run.taps_said}"
            num_bytes = KERNEL_BYTES + hidden + logits + run.tap_bytes + run.kept_bytes
            found.append(MemoryPart("activations", num_bytes, how))
        largest = max(found, key=lambda part: part.bytes)
        return [
            MemoryPart("pass buffers", kept, f"for {rows}, kept for the next pass"),
            largest,
            MemoryPart("freed blocks", largest.bytes, "kept by the allocator: as much as the activations"),
        ]

    def later(self, passes: list[Pass]) -> tuple[MemoryPart, ...]:
        """Return no parts: native memory does not grow later."""
        return ()

    def loading_bytes(self, model: DecoderConfig) -> int:
        """Two blocks of the files, or what is packed of a tensor before its source is given back.

        A tensor that is about to be packed takes what it will have when it is.
        """
        return max(2 * block_bytes(model), min(GIVE_BACK_BYTES, max(packed_matrix_bytes(model, self.dtype))))

    def _buffer_bytes(self, run: Pass) -> int:
        """Return the bytes of one decoder's buffers (Decoder::buffers, line by line) and of its rotary table."""
        c, num_rows = run.model, run.num_rows
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        head_dim, states = up_to(c.head_dim, 16), ATTENTION_ROWS * (c.num_heads // c.num_kv_heads)
        attention = KEY_BLOCK * 2 * head_dim + states * (2 * head_dim + 8) + ATTENTION_ROWS + 64
        words = (
            num_rows * c.hidden_size,
            num_rows * (q + 2 * kv),
            num_rows * max(self._steps(c.hidden_size), self._steps(q)),
            num_rows * self._steps(c.ffn_size),
            self.num_threads * up_to(c.hidden_size, 64),
            self.num_threads * up_to(min(num_rows, FEW_ROWS) * self._steps(c.hidden_size), 32),
            self.num_threads * up_to(attention, 64),
        )
        buffers = sum(allocated_bytes(num * WORD_BYTES) for num in words)
        return buffers + rope_table_bytes(c, self.max_seq_len, FLOAT_BYTES)

    def _steps(self, num_in: int) -> int:
        return _num_steps(num_in, self.dtype)


def packed_bytes(num_out: int, num_in: int, dtype: torch.dtype, *, paired: bool = False) -> int:
    """Return the bytes of a packed matrix, padding included; paired: two of `num_out` outputs each (gate and up)."""
    return _num_panels(num_out, paired) * _num_steps(num_in, dtype) * PANEL * WORD_BYTES


def packed_matrix_bytes(c: DecoderConfig, dtype: torch.dtype) -> Iterator[int]:
    """Yield the bytes of every packed matrix of a decoder, those of the LM head last."""
    for _ in range(c.num_layers):
        yield from (packed_bytes(num_out, num_in, dtype, paired=paired) for num_out, num_in, paired in _matrices(c))
    yield packed_bytes(c.vocab_size, c.hidden_size, dtype)


def allocated_bytes(num_bytes: int) -> int:
    """Return the bytes that the system allocates for a buffer: whole huge pages from the size of one huge page on."""
    return up_to(num_bytes, HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 64)


def _matrices(c: DecoderConfig) -> list[tuple[int, int, bool]]:
    """Return (outputs, inputs, paired) of a layer's matrices; for a pair, the outputs of one of the two."""
    qkv, o, gate_up, down = matrix_shapes(c)
    return [(*qkv, False), (*o, False), (gate_up[0] // 2, gate_up[1], True), (*down, False)]


def _vector_bytes(c: DecoderConfig) -> int:
    """Return the bytes of the norms, and of the biases padded to whole panels, all in float32."""
    shapes = parameter_shapes(c)
    num = sum(shape[0] for name, shape in shapes.items() if name.endswith("norm.weight"))
    has_bias = (c.qkv_bias, c.o_bias, c.mlp_bias, c.mlp_bias)
    panels = sum(
        _num_panels(num_out, paired)
        for (num_out, _, paired), biased in zip(_matrices(c), has_bias, strict=True)
        if biased
    )
    return (num + c.num_layers * panels * PANEL) * FLOAT_BYTES


def _num_panels(num_out: int, paired: bool) -> int:
    return -(-num_out // (PANEL // 2 if paired else PANEL))


def _num_steps(num_in: int, dtype: torch.dtype) -> int:
    return -(-num_in * dtype.itemsize // WORD_BYTES)
