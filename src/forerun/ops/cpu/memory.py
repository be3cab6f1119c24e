"""Memory of the native operators: packed weights to the byte, and an upper bound of the buffers of a pass.

The extension computes the bytes of a packed matrix, of an allocated buffer, and of all buffers of a pass. Pass buffers
grow to the size that the largest pass needs, and never shrink. No kernel is compiled at run time, so memory does not
grow later.

If all other weights are bfloat16, quantised matrices are packed in quantised form. If the other weights are float32,
quantised matrices are dequantised. The bytes of packed quantised matrices follow from their schemes, with one
exception: if a file's 16-bit scales do not fit into float16, each scale and minimum takes 2 bytes more. The header of a
file does not say whether its scales fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from types import MappingProxyType

from forerun import native
from forerun.blocks import (
    EMBEDDING,
    LAYER_EMBEDDING,
    LAYER_PRODUCTS,
    Buckets,
    Spec,
    itemsize,
    products,
    recurrence_name,
    weights,
)
from forerun.ops.cpu.packed import Format, distances_of, packs, section_numbers, sections_of
from forerun.ops.memory import (
    FLOAT_BYTES,
    KERNEL_BYTES,
    Beside,
    MemoryPart,
    Pass,
    Schemes,
    block_bytes,
    rope_table_bytes,
    weight_bytes,
)
from forerun.ops.quantised import QuantisedMatrix, Scheme


@dataclass(frozen=True)
class NativeSizes:
    """The memory that the native operators take. Weights and caches are float32 or bfloat16, and rows are float32.

    schemes: by model name, the schemes of the model's quantised matrices. rounded: the names of draft models whose
    matrices are quantised copies of the target's matrices, computed in memory. The quantised matrices of these models
    are packed in quantised form, whatever `dtype` is.
    """

    dtype: str
    max_seq_len: int
    num_threads: int
    schemes: Mapping[str, Schemes] = field(default_factory=dict)
    rounded: frozenset[str] = frozenset()

    def cache_dtype_of(self, name: str) -> str:
        """Return the dtype of a model's weights and cache: bfloat16 if its matrices are kept in rounded form."""
        return "bfloat16" if name in self.rounded else self.dtype

    def weights(
        self, models: Mapping[str, Spec], beside: Mapping[str, Beside] = MappingProxyType({})
    ) -> list[MemoryPart]:
        """Return one MemoryPart for each model, then one for each draft head.

        The part of a model covers its packed matrices with their biases, its float32 norms, and an untied embedding,
        which is packed only if it is quantised. `allocated_bytes` rounds up the bytes of each packed matrix.
        """
        parts = []
        for name, model in models.items():
            schemes = self._packed_schemes(name)
            size = itemsize(self.cache_dtype_of(name))
            matrices = list(map(allocated_bytes, packed_matrix_bytes(model, self.dtype, schemes)))
            table = sum(_looked_up(model, schemes)) * size
            num_bytes = sum(matrices) + table + _vector_bytes(model)
            plain = weight_bytes(model, self.cache_dtype_of(name))
            num = plain // size
            how = f"{num:,} weights x {size} bytes, packed: {(num_bytes - plain) / 1e6:+.2f} MB"
            if schemes:
                how = f"{num:,} weights, scales and all {8 * num_bytes / num:.2f} bits each"
            parts.append(MemoryPart(f"{name} weights", num_bytes, how))
        for name, head in beside.items():
            matrices = [
                packed_bytes(*shape, self.dtype) if scheme is None else quantised_bytes([_of(shape, scheme)])
                for shape, scheme in head.matrices
            ]
            others = head.num_looked_up * itemsize(self.dtype) + head.num_floats * FLOAT_BYTES
            num_bytes = sum(map(allocated_bytes, matrices)) + others
            num = head.num_weights
            how = f"{num:,} weights, packed: {8 * num_bytes / max(1, num):.2f} bits each"
            parts.append(MemoryPart(f"{name} weights", num_bytes, how))
        return parts

    def activations(self, passes: list[Pass]) -> list[MemoryPart]:
        """Return three parts: the buffers of all models, the largest results of a pass, and freed memory that is kept.

        The results are hidden states and logits. passes: the largest pass of each model.
        """
        kept = sum(self._buffer_bytes(run) for run in passes)
        rows = " and ".join(f"{run.num_rows:,} rows of the {run.name}" for run in passes)
        parts = []
        for run in passes:
            hidden = (run.num_rows + run.num_logits) * run.model.hidden_size * FLOAT_BYTES
            logits = run.num_logits * run.model.vocab_size * FLOAT_BYTES
            how = f"{run.num_rows:,} hidden states of the {run.name}, {hidden / 1e6:,.1f} MB; {run.num_logits:,} rows "
            how += f"of logits, {logits / 1e6:,.1f} MB{run.taps_said}"
            num_bytes = KERNEL_BYTES + hidden + logits + run.tap_bytes + run.kept_bytes
            parts.append(MemoryPart("activations", num_bytes, how))
        largest = max(parts, key=lambda part: part.bytes)
        # glibc gives the end of its heap back only where this end is larger than twice the largest freed block.
        freed = largest.bytes + 2 * max(run.num_logits * run.model.vocab_size for run in passes) * FLOAT_BYTES
        return [
            MemoryPart("pass buffers", kept, f"for {rows}, kept for the next pass"),
            largest,
            MemoryPart("reserve", freed, "freed memory that the allocator keeps: activations, and logits twice"),
        ]

    def later(self, passes: list[Pass]) -> tuple[MemoryPart, ...]:
        """Return no parts: native memory does not grow later."""
        return ()

    def loading_bytes(self, model: Spec) -> int:
        """Return the larger of two sizes in bytes: file blocks, or the part of a tensor that is in memory twice.

        Two blocks of a file are in memory at once. If quantised matrices are packed, the two blocks count as four,
        because a block that is unpacked or rounded takes several times its bytes. While a tensor is packed, at most
        GIVE_BACK_BYTES of the tensor are in memory twice, because the memory of the source tensor is freed piece by
        piece.
        """
        num_blocks = 4 if any(map(self._packed_schemes, self.schemes)) else 2
        packed = max(packed_matrix_bytes(model, self.dtype))
        return max(num_blocks * block_bytes(model), min(int(native.extension().GIVE_BACK_BYTES), packed))

    def _packed_schemes(self, name: str) -> Schemes:
        """Return the schemes of this model's matrices that are packed in quantised form, without dequantisation."""
        if self.cache_dtype_of(name) != "bfloat16":
            return {}
        return {weight: scheme for weight, scheme in self.schemes.get(name, {}).items() if packs(scheme)}

    def _buffer_bytes(self, run: Pass) -> int:
        """Return the bytes of the buffers and rotation tables of one model, its encoder included.

        run: the model's largest pass.
        """
        encoder = run.model.encoder
        num_bytes = self._bytes_of(run, run.model, run.num_rows)
        if encoder is None:
            return num_bytes
        rows, shape = max(run.num_rows, run.context), encoder.cache_shape  # at least one source, whatever its length
        kept = 2 * shape.num_kv_heads * shape.head_dim
        num_made = encoder.hidden_size + 2 * kept  # keys and values as the kernels return them, and as they are written
        return num_bytes + self._bytes_of(run, encoder, rows) + rows * (kept + num_made) * FLOAT_BYTES

    def _bytes_of(self, run: Pass, model: Spec, num_rows: int) -> int:
        """Return the bytes of the buffers and rotation tables of a decoder or an encoder.

        run: the pass. model: the decoder or the encoder. num_rows: the number of rows that `model` runs.
        """
        buffers = native.extension().pass_bytes(
            native.isa(),
            model,
            self.cache_dtype_of(run.name) == "bfloat16",
            bool(self._packed_schemes(run.name)),
            num_rows,
            run.context,
            self.num_threads,
        )
        return int(buffers) + rope_table_bytes(model, self.max_seq_len, FLOAT_BYTES)


def _looked_up(model: Spec, schemes: Schemes) -> Iterator[int]:
    """Yield the number of weights of each lookup table that stays unpacked.

    Such tables are position embeddings, and dense embeddings that are not tied to the LM head.
    """
    if not model.tied and EMBEDDING not in schemes:
        yield model.vocab_size * model.hidden_size
    if model.layer_input is not None and LAYER_EMBEDDING not in schemes:
        yield model.vocab_size * model.num_layers * model.layer_input.size
    for spec in (model, *([] if model.encoder is None else [model.encoder])):
        if spec.positions is not None:
            yield (spec.positions.num + spec.positions.offset) * spec.hidden_size


def packed_bytes(num_out: int, num_in: int, dtype: str, *, paired: bool = False) -> int:
    """Return the bytes of a packed dense matrix, padding included.

    paired: whether the matrix joins the gate and up matrices of a feed-forward part, with `num_out` outputs each.
    """
    return int(native.extension().packed_bytes(num_out * (1 + paired), num_in, dtype == "bfloat16", paired))


def quantised_bytes(parts: Seq[QuantisedMatrix], *, paired: bool = False) -> int:
    """Return the bytes of these parts packed as one matrix, padding included.

    paired: whether the parts are the gate and up matrices of a feed-forward part.
    """
    sections = sections_of(list(parts), paired)
    formats = [Format.of([part.scheme for part in section]) for section in sections]
    numbers = section_numbers(sections, formats)
    return int(native.extension().quantised_bytes(numbers, parts[0].shape[1], paired))


def packed_matrix_bytes(c: Spec, dtype: str, schemes: Schemes | None = None) -> Iterator[int]:
    """Yield the bytes of every packed matrix of a decoder. The LM head and a quantised embedding come last.

    schemes: by weight name, the schemes of the matrices that are packed in quantised form.
    """
    schemes, groups = schemes or {}, products(weights(c))
    embedding = groups.pop("embedding")
    if LAYER_EMBEDDING not in schemes:
        groups.pop(LAYER_PRODUCTS[0], None)
    groups["head"] = groups.pop("head", embedding)  # comes last; the head of a tied model is the embedding
    if not c.tied and EMBEDDING in schemes:
        groups["embedding"] = embedding
    for name, group in groups.items():
        paired = name.endswith(".gate_up") and len(group) == 2
        shapes = [(weight.shape[0], weight.shape[1]) for weight in group]
        if all(weight.name in schemes for weight in group):
            parts = [_of(shape, schemes[weight.name]) for shape, weight in zip(shapes, group, strict=True)]
            yield quantised_bytes(parts, paired=paired)
        else:
            num_out = sum(shape[0] for shape in shapes) // (1 + paired)
            yield packed_bytes(num_out, shapes[0][1], dtype, paired=paired)


def _of(shape: tuple[int, int], scheme: Scheme) -> QuantisedMatrix:
    """Return a quantised matrix of this shape and scheme that has no rows to read."""
    return QuantisedMatrix(scheme, shape, lambda: iter(()))


def allocated_bytes(num_bytes: int) -> int:
    """Return the bytes that the system allocates for a buffer of this size.

    A buffer at least as large as a huge page is rounded up to whole pages of the usual size, a smaller one to 64 bytes.
    """
    return int(native.extension().allocated_bytes(num_bytes))


def _vector_bytes(c: Spec) -> int:
    """Return the float32 bytes of all vectors, such as norms and biases. Biases are padded to whole panels.

    Some vectors are also kept in a second form: norms with their offset added, biases of relative positions in the
    order of distances, and weights of convolutions in the order of inputs.
    """
    all_weights, panel = weights(c), native.extension().PANEL
    recurrences = [block.recurrence for block in c.blocks if block.recurrence is not None]
    parts = tuple({f".{recurrence_name(r)}" for r in recurrences})
    vectors = [weight for weight in all_weights if weight.role == "vector" and not weight.product]
    norms = [math.prod(w.shape) for w in vectors if not any(part in w.name for part in parts)]
    num = sum(norms) * (2 if c.final_norm is not None and c.final_norm.offset else 1)
    num += sum(math.prod(w.shape) for w in vectors) - sum(norms)
    num += sum(r.width(c.hidden_size) * r.conv + r.value_heads * (r.decay == "log") for r in recurrences)
    num += max((r.width(c.hidden_size) for r in recurrences), default=0)  # zeros: the inputs before token 0
    biased = {weight.product for weight in all_weights if weight.name.endswith(".bias") and weight.product}
    for name, group in products(all_weights).items():
        if name in biased:
            # A panel of a paired product holds half a panel of each matrix.
            num += panel * -(-sum(weight.shape[0] for weight in group) // panel)
    for block in (*c.blocks, *(() if c.encoder is None else c.encoder.blocks)):
        if block.attention is not None and isinstance(block.attention.bias, Buckets):
            num += block.attention.heads * (block.attention.bias.num + len(distances_of(block.attention.bias)))
    return num * FLOAT_BYTES
