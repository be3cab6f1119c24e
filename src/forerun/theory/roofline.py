"""The seconds that a decoder's forward pass takes on a machine, from the bytes it moves and the operations it does.

By the roofline model (Williams, Waterman, Patterson 2009) a kernel takes the longer of two times: bytes / bandwidth,
and operations / peak. Matrix products and attention are counted separately. A large batch makes the products
compute-bound, while each sequence still reads its own cache. Norms, activations, sampling, launches and the rows of the
embedding table are not counted, so a measured pass is never faster. `forerun.memory` counts the bytes that an engine
allocates.

A pass of a mixture of experts reads every expert that at least one row has chosen. So a further row adds no reads only
if it chooses experts that other rows have chosen too (`formulas.distinct_experts`).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.blocks import Experts, Mlp, Plain, Spec, block_weights
from forerun.theory.formulas import distinct_experts


def _llama(*sizes: int) -> Spec:
    """Return the spec of a Llama decoder.

    sizes: vocabulary size, hidden size, number of layers, query heads, key-value heads, head size, feed-forward size.
    """
    vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, ffn_size = sizes
    heads = (num_heads, num_kv_heads, head_dim)
    return Plain("llama", vocab_size, hidden_size, num_layers, *heads, ffn_size, 1e-5, 131072).spec


def _with_experts(spec: Spec, num: int, chosen: int) -> Spec:
    """Return the decoder with each feed-forward part replaced by `num` experts.

    Each expert is as large as the feed-forward part that it replaces. chosen: the number of experts that a row uses.
    """
    blocks = [(b, b.mlp or Mlp(0)) for b in spec.blocks]
    return replace(spec, blocks=tuple(replace(b, mlp=None, experts=Experts(num, chosen, mlp)) for b, mlp in blocks))


def _seeing(spec: Spec, windows: tuple[int | None, ...]) -> Spec:
    """Return the decoder with these attention windows, which repeat over the layers. None = no window in a layer."""
    reach = [windows[i % len(windows)] for i in range(spec.num_layers)]
    seen = [(b, b.attention and replace(b.attention, window=w)) for b, w in zip(spec.blocks, reach, strict=True)]
    return replace(spec, blocks=tuple(replace(b, attention=a) for b, a in seen))


SHAPES = {
    "smollm2-135m": _llama(49152, 576, 30, 9, 3, 64, 1536),
    "llama-3.2-1b": _llama(128256, 2048, 16, 32, 8, 64, 8192),
    "llama-3.2-3b": _llama(128256, 3072, 28, 24, 8, 128, 8192),
    "llama-3.1-8b": _llama(128256, 4096, 32, 32, 8, 128, 14336),
    "llama-3.1-70b": _llama(128256, 8192, 80, 64, 8, 128, 28672),
    "qwen3-30b-a3b": _with_experts(_llama(151936, 2048, 48, 32, 4, 128, 768), 128, 8),
    "gpt-oss-20b": _seeing(_with_experts(_llama(201088, 2880, 24, 64, 8, 64, 2880), 32, 4), (128, None)),
}


class Machine(NamedTuple):
    """The peak rates of a machine: bytes read and operations done per second. A multiply-add is two operations."""

    bytes_per_s: float
    operations_per_s: float


# H100 SXM, A100 SXM 80 GB, GeForce RTX 4090: the vendor's data sheets, bfloat16 without sparsity. The CPU: two AVX-512
# cores with BF16, as `python -m benchmarks.kernels` measures them.
MACHINES = {
    "h100": Machine(3.35e12, 989.4e12),
    "a100": Machine(2.039e12, 312e12),
    "rtx-4090": Machine(1.008e12, 165.2e12),
    "cpu-2-cores": Machine(46e9, 0.4e12),
}


class Precision(NamedTuple):
    """The bytes that one weight takes, scales included, and the bytes that one number in the KV cache takes."""

    weight_bytes: float = 2.0
    cache_bytes: float = 2.0


BF16 = Precision()


@dataclass(frozen=True)
class Step:
    """One forward pass over `batch` sequences, each with `rows` new tokens after `context` cached tokens.

    overlap: how far the rows choose the same experts, from 0 (independent rows) to 1 (all rows choose the same
    experts).
    """

    rows: int = 1
    batch: int = 1
    context: int = 0
    overlap: float = 0.0


class Work(NamedTuple):
    """The bytes that a computation moves, and the operations that it does."""

    bytes: float
    operations: float

    def seconds(self, machine: Machine) -> float:
        """Return the longer of two times, in seconds: to move the bytes, and to do the operations."""
        return max(self.bytes / machine.bytes_per_s, self.operations / machine.operations_per_s)


class PassWork(NamedTuple):
    """The work of a pass in two parts, matrix products and attention, which run one after the other."""

    products: Work
    attention: Work

    @property
    def total(self) -> Work:
        """The sum of the work of both parts."""
        return Work(self.products.bytes + self.attention.bytes, self.products.operations + self.attention.operations)

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of the pass: the sum of the seconds of both parts."""
        return self.products.seconds(machine) + self.attention.seconds(machine)


@functools.cache
def _layer_weights(spec: Spec) -> tuple[int, Counter[tuple[int, int]]]:
    """Count the weights in the matrices of all layers.

    Returns the number of weights that every row uses, and the number of weights in experts. The latter is counted for
    each pair (number of experts in a layer, number of experts that a row chooses).
    """
    dense, experts = 0, Counter[tuple[int, int]]()
    for block, times in Counter(spec.blocks).items():
        for weight in block_weights(block, spec.hidden_size, ""):
            size = math.prod(weight.shape) * times
            if weight.role == "experts" and block.experts is not None:
                experts[block.experts.num, block.experts.chosen] += size
            elif weight.role == "matrix":
                dense += size
    return dense, experts


def weights_read(spec: Spec, num_rows: int = 1, overlap: float = 0.0) -> float:
    """Return how many weights a pass over `num_rows` rows reads: the layers' matrices, chosen experts, and the LM head.

    overlap: see Step. For one row, this is also the number of weights that the row is multiplied by.
    """
    dense, experts = _layer_weights(spec)
    chosen = sum(
        size * float(distinct_experts(num, chosen, num_rows, overlap)) / num for (num, chosen), size in experts.items()
    )
    return dense + chosen + spec.vocab_size * spec.hidden_size


def expert_part(spec: Spec) -> float:
    """Return the experts' share of the weights that a pass over one row reads, from 0 to 1."""
    dense, _ = _layer_weights(spec)
    return 1 - (dense + spec.vocab_size * spec.hidden_size) / weights_read(spec)


def cache_elements(spec: Spec) -> int:
    """Return how many numbers the KV cache stores for one token: the keys and values of all layers that store any."""
    with_keys = [a for block in spec.blocks if (a := block.attention) is not None and a.shares_kv_of is None]
    return sum(2 * a.kv_heads * a.head_dim for a in with_keys)


def _operations_per_key(spec: Spec) -> int:
    """Return the operations that a row needs for each key that it attends to, summed over all layers.

    The operations compute the score of the key, and add the weighted value.
    """
    return sum(4 * a.heads * a.head_dim for block in spec.blocks if (a := block.attention) is not None)


def pass_work(spec: Spec, step: Step, precision: Precision = BF16) -> PassWork:
    """Return the work of a pass that computes the logits of every row, as verification does.

    A row attends to the context, to the rows before it and to itself, but no further than the layer's window. Raises
    ValueError for a step without rows or sequences, or with a negative context.
    """
    if not (step.rows >= 1 and step.batch >= 1 and step.context >= 0):
        raise ValueError(f"{step}: rows and batch are at least 1, context at least 0")
    num_rows = step.rows * step.batch
    num_read, num_used = weights_read(spec, num_rows, step.overlap), weights_read(spec)
    moved = operations = 0.0
    for a, times in Counter(block.attention for block in spec.blocks if block.attention is not None).items():
        reach = math.inf if a.window is None else a.window
        seen = min(step.context + (step.rows + 1) / 2, reach)  # keys of a row, on average
        # The old keys are read; new ones are written and read.
        moved += times * step.batch * (min(step.context, reach) + 2 * step.rows) * 2 * a.kv_heads * a.head_dim
        operations += times * num_rows * seen * 4 * a.heads * a.head_dim
    return PassWork(
        Work(num_read * precision.weight_bytes, 2.0 * num_used * num_rows),
        Work(moved * precision.cache_bytes, operations),
    )


def pass_seconds(spec: Spec, step: Step, machine: Machine, precision: Precision = BF16) -> float:
    """Return the least time in seconds that a pass can take on a machine."""
    return pass_work(spec, step, precision).seconds(machine)


def verify_ratios(
    spec: Spec, step: Step, machine: Machine, max_gamma: int, precision: Precision = BF16
) -> npt.NDArray[np.float64]:
    """Return v(gamma) for gamma = 0 .. max_gamma, [max_gamma + 1].

    v(gamma) = seconds of a pass over gamma + 1 rows of each sequence / seconds of a pass over one row of each sequence.
    """
    passes = [pass_seconds(spec, replace(step, rows=gamma + 1), machine, precision) for gamma in range(max_gamma + 1)]
    return np.array(passes) / passes[0]


def cost_ratio(
    draft: Spec,
    target: Spec,
    step: Step,
    machine: Machine,
    draft_precision: Precision = BF16,
    target_precision: Precision = BF16,
) -> float:
    """Return c = seconds of the draft model's pass / seconds of the target's pass.

    Both passes run one row of each sequence of `step`.
    """
    one = replace(step, rows=1)
    return pass_seconds(draft, one, machine, draft_precision) / pass_seconds(target, one, machine, target_precision)


def ridge_rows(machine: Machine, precision: Precision = BF16) -> float:
    """Return the number of rows at which the arithmetic of matrix products takes as long as reading the weights.

    The number is F / B x bytes / 2. F and B are the operations and the bytes that the machine does per second, and
    `bytes` is the size of a weight. Up to this number of rows (batch x (gamma + 1)) a further row costs nothing, except
    for experts that no other row chooses.
    """
    return machine.operations_per_s / machine.bytes_per_s * precision.weight_bytes / 2


def encoder_operations(spec: Spec, num_tokens: int) -> float:
    """Return the operations of an encoder of this size over `num_tokens` tokens that all attend to each other.

    A round over gamma + 1 rows after a context does at most as many operations as one run of the encoder over context
    and rows (section 3.4 of Leviathan et al. 2023). The reasons: in the round, fewer rows go through the matrices, and
    no row attends to later rows.
    """
    return 2.0 * weights_read(spec) * num_tokens + float(num_tokens) ** 2 * _operations_per_key(spec)
