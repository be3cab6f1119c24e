"""Memory of the CUDA backend: weights to the byte, an upper bound of a pass's memory, and the memory of graphs.

The bound follows the code that allocates: ops/cuda/operators.py, model.py and sampling.py. The bound was derived, not
measured on a card.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from forerun.blocks import Spec, itemsize, products, weights
from forerun.host_tensor import HostTensor
from forerun.ops.cuda.operators import PARTS_BYTES, SPLIT_KEYS, Tiles
from forerun.ops.cuda.packed import TILE, Packed, packs
from forerun.ops.cuda.rows import GRAPH_ROWS
from forerun.ops.memory import FLOAT_BYTES, Beside, MemoryPart, Pass, Schemes, Widths, matrix_shapes, rope_table_bytes
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows, Scheme
from forerun.ops.torch_memory import ReferenceSizes


@dataclass(frozen=True)
class CudaSizes(ReferenceSizes):
    """The memory that the CUDA backend takes. schemes: by model name, the schemes of the model's quantised matrices."""

    schemes: Mapping[str, Schemes] = field(default_factory=dict)

    def weights(
        self, models: Mapping[str, Spec], beside: Mapping[str, Beside] = MappingProxyType({})
    ) -> list[MemoryPart]:
        """Return one MemoryPart for each model, then one for each draft head.

        Packed matrices of a model count with their packed bytes, and all its other weights count in `dtype`.
        """
        parts = []
        for name, model in models.items():
            num_bytes = sum(self._product_bytes(model, self.schemes.get(name, {})))
            num = model.num_weights
            how = f"{num:,} weights, scales and all {8 * num_bytes / num:.2f} bits each"
            parts.append(MemoryPart(f"{name} weights", num_bytes, how))
        return [*parts, *super().weights({}, beside)]

    def activations(self, passes: list[Pass]) -> list[MemoryPart]:
        """Return the memory of the largest pass, and the memory that the graphs of all models keep."""
        parts = []
        for run in passes:
            rows = self._row_bytes(run, run.num_rows)
            logits = self._logit_bytes(run.model, run.num_logits)
            tables = rope_table_bytes(run.model, self.max_seq_len, FLOAT_BYTES)
            how = f"{run.num_rows:,} rows of the {run.name}, {rows / 1e6:,.1f} MB; {run.num_logits:,} rows of logits "
            how += f"and their probabilities, {logits / 1e6:,.1f} MB{run.taps_said}"
            parts.append(MemoryPart("activations", rows + logits + tables + run.tap_bytes + run.kept_bytes, how))
        graphs = sum(self._graph_bytes(run) for run in passes)
        how = f"static rows of passes of {', '.join(map(str, GRAPH_ROWS))} rows, and of what they draw"
        return [max(parts, key=lambda part: part.bytes), MemoryPart("graphs", graphs, how)]

    def later(self, passes: list[Pass]) -> tuple[MemoryPart, ...]:
        """Return no parts: the memory of graphs is counted from the start."""
        return ()

    def _product_bytes(self, model: Spec, schemes: Schemes) -> Iterator[int]:
        """Yield the bytes of each product, then the bytes of all weights that belong to no product.

        A product is packed if its matrices share a scheme that can be packed. Otherwise it is dense, in `dtype`.
        """
        known = weights(model)
        grouped = set[str]()
        for group in products(known).values():
            group_schemes = [schemes.get(weight.name) for weight in group]
            grouped.update(weight.name for weight in group)
            first = group_schemes[0]
            num_out = sum(weight.shape[0] for weight in group)
            num_in = group[0].shape[-1]
            if first is None or len(set(group_schemes)) > 1 or not packs(first) or len(group[0].shape) != 2:
                yield sum(math.prod(weight.shape) for weight in group) * itemsize(self.dtype)
            else:
                yield -(-num_out // TILE) * tile_bytes(first, num_in)
        yield sum(math.prod(weight.shape) for weight in known if weight.name not in grouped) * itemsize(self.dtype)

    def _row_bytes(self, run: Pass, num_rows: int) -> int:
        """Return the bytes of the rows that one layer computes in the pass `run`, if the pass has `num_rows` new rows.

        The rows are the residual stream and its norm, the partial sums of the widest product, queries and outputs of
        attention, partial results of attention, and the inner rows of the feed-forward part.
        """
        widths, hidden = Widths.of(run.model), run.model.hidden_size
        widest = max(splits * num_out for num_out, splits in self._parts_of(run.model))
        heads = widths.q * (FLOAT_BYTES + itemsize(self.dtype))
        splits = -(-run.context // SPLIT_KEYS)
        parts = min(PARTS_BYTES, num_rows * widths.heads * splits * (widths.head_dim + 2) * FLOAT_BYTES)
        inner = widths.ffn * itemsize(self.dtype)
        return num_rows * (3 * hidden * FLOAT_BYTES + 2 * widest * FLOAT_BYTES + heads + inner) + parts

    def _parts_of(self, model: Spec) -> Iterator[tuple[int, int]]:
        """Yield the number of outputs of each product, and the number of parts into which its inputs are cut."""
        for num_out, num_in in matrix_shapes(model):
            yield num_out, Tiles.of(num_out, num_in, itemsize(self.dtype)).splits
        # A row is multiplied by all experts that it chooses at once.
        for e in {block.experts for block in model.blocks if block.experts is not None}:
            inner = e.mlp.size * (2 if e.mlp.gated else 1)
            hidden = model.hidden_size
            for num_out, num_in in ((inner, hidden), (hidden, e.mlp.size)):
                yield e.chosen * num_out, Tiles.of(num_out, num_in, itemsize(self.dtype), e.chosen).splits

    def _logit_bytes(self, model: Spec, num_rows: int) -> int:
        """Return the float32 bytes of logits, of their probabilities, and of the partial sums of logits."""
        return 3 * num_rows * model.vocab_size * FLOAT_BYTES

    def _graph_bytes(self, run: Pass) -> int:
        """Return the bytes that a model's graphs keep. run: the model's largest pass.

        Graphs keep static rows and probabilities for each number of rows in GRAPH_ROWS, and the memory of one pass with
        the largest of these numbers.
        """
        num = sum(GRAPH_ROWS)
        static = num * (2 * run.model.hidden_size + run.model.vocab_size) * FLOAT_BYTES
        return static + self._row_bytes(run, GRAPH_ROWS[-1]) + self._logit_bytes(run.model, GRAPH_ROWS[-1])


@cache
def tile_bytes(scheme: Scheme, num_in: int) -> int:
    """Return the bytes of a tile of packed outputs, found by packing one tile."""
    groups = num_in // scheme.group
    supers = num_in // scheme.super_group if scheme.super_group else 0
    is_zero = scheme.offset == "zero"

    def codes(columns: int) -> npt.NDArray[np.uint8]:
        return np.full((TILE, columns), scheme.zero or 0, np.uint8)

    def none(columns: int, dtype: str) -> HostTensor:
        return HostTensor.of(codes(columns)).to(dtype)

    rows = QuantisedRows(
        scheme,
        codes(num_in),
        none(groups, "int8" if supers else scheme.scale_dtype),
        codes(groups) if is_zero else None,
        None if is_zero else none(groups, "uint8" if supers else scheme.scale_dtype),
        none(supers, scheme.scale_dtype) if supers else None,
        none(supers, scheme.scale_dtype) if supers and not is_zero else None,
    )
    return Packed.of(QuantisedMatrix(scheme, (TILE, num_in), lambda: iter([rows])), torch.device("cpu")).nbytes
