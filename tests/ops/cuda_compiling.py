"""Compile the CUDA backend's kernels for a card that need not be there, and say what each of them takes, as JSON.

    python -m ops.cuda_compiling CAPABILITY [NAME ...]      such as 80, 90 or 120, and beginnings of kernels' names

The kernels are those that the backend launches: its own code runs, with a launch that compiles in place of running.
Of each: num_warps, registers of a thread, stack bytes (registers that did not fit), shared bytes of a program, and how
many multiplications are fused with additions. Triton compiles for the cards that its version knows.
"""

import json
import re
import sys
from typing import Any

import torch

from benchmarks.gpu_code import Compiled, disassembler, operators_for, resources
from forerun.blocks import Buckets, Experts, Mlp
from forerun.config import Quantization

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def what_it_takes(kernel: Any) -> dict[str, Any]:
    """What a compiled kernel takes."""
    fused = len(re.findall(r"\bfma\b", kernel.asm["ptx"]))
    numbers = {"num_warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared, "fused": fused}
    if disassembler().exists():
        numbers |= zip(("registers", "stack"), resources(kernel), strict=True)
    return numbers


def launch_all(capability: int, wanted: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    """Return the kernels that a pass of some models launches, on cards that begin kernels early or not."""
    from forerun.ops.cuda import sampling as cuda_sampling, sampling_kernels as cuda_sampling_kernels
    from forerun.ops.cuda.packed import Packed
    from forerun.ops.quantised import QuantisedMatrix
    from forerun.ops.quantising import quantise, scheme_of
    from ops.native_blocks import mixture, random_weights, spec_of
    from ops.test_cuda import FOUND, Text

    MIXTURE = spec_of([mixture(Experts(8, 2, Mlp(512), Mlp(256), True))], hidden_size=512)  # noqa: N806
    operators = operators_for(capability, wanted)
    operators.shared_bytes = SHARED_BYTES[capability]
    operators.expert_kernels = Compiled(operators.expert_kernels, wanted)
    for num_out, num_in, dtype, numbers_of_rows in (
        (2048, 2048, torch.bfloat16, (1, 17, 64)),
        (128256, 2048, torch.bfloat16, (1,)),
        (1000, 776, torch.bfloat16, (64,)),
        (2048, 2048, torch.float16, (64,)),
        (2048, 2048, torch.float32, (64,)),  # what takes most memory
    ):
        for rows in numbers_of_rows:
            operators.linear(torch.zeros(rows, num_in), torch.empty(num_out, num_in, dtype=dtype))
    for bits, group, rows in ((8, 128, 1), (8, 128, 17), (4, 128, 1), (4, 32, 17)):
        rows_of_codes = quantise(torch.zeros(64, 512), scheme_of(bits, group))
        matrix = Packed.of(
            QuantisedMatrix(rows_of_codes.scheme, (64, 512), lambda own=rows_of_codes: iter([own])), torch.device("cpu")
        )
        operators.linear(torch.zeros(rows, 512), matrix)
    for name in ("sums", "gpt_oss, experts", "large heads", "mixture"):
        spec = MIXTURE if name == "mixture" else FOUND[name]
        weights = {n: w.bfloat16() for n, w in random_weights(spec, torch.float32, 0).items()}
        text = Text(spec, weights, operators)
        text.run({0: list(range(20)), 1: [3]})
        text.run({1: [3]})
    rounded = Text(MIXTURE, weights, operators)
    for quantization in ("int8:group=32", "int4:group=32"):
        rounded.model = text.model.rounded(Quantization.parse(quantization))
        rounded.run({0: list(range(20)), 1: [3]})
    model: Any = text.model  # nothing is computed: ids are whatever the memory holds
    model.run_ahead(text.batch({0: [1]}, {}, more=3), [3], text.cache, 61)
    attend_widely(operators)
    draws = Compiled(cuda_sampling_kernels, wanted)
    sampler = cuda_sampling.Sampler(operators.largest_in_parts, draws)
    sampler.draw(
        torch.zeros(2, 128256),
        torch.zeros(len(cuda_sampling.Field), 2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int32),
        cuda_sampling.Cuts(True, True),
    )
    operators.largest(torch.zeros(2, 128256))
    return operators.kernels.compiled | operators.expert_kernels.compiled | draws.compiled


def attend_widely(operators: Any) -> None:
    """Attend with the largest heads, and over all of a run with biases, windows, or both."""
    from forerun.ops.cuda.rows import rows_of_themselves
    from forerun.ops.reference import PLAIN, Scoring
    from forerun.ops.torch_pools import TorchPool
    from forerun.types import RaggedBatch

    rows = rows_of_themselves(RaggedBatch([1] * 200, list(range(200)), [0, 200], [0], [0]), torch.device("cpu"))
    biased = Scoring(1.0, buckets=Buckets(32, 128, both_ways=True), table=torch.zeros(32, 2), sees_all=True)
    for dim, dtype, window, scoring in (
        (512, torch.bfloat16, None, PLAIN),
        (256, torch.float32, None, PLAIN),
        (64, torch.bfloat16, None, biased),
        (64, torch.bfloat16, 40, biased),
    ):
        pool = TorchPool(*torch.zeros(2, 200, 1, dim, dtype=dtype))
        operators.attend(torch.zeros(200, 2, dim), pool, rows, window, scoring, torch.float32)


def main(capability: str, *wanted: str) -> None:
    """Print what the kernels take."""
    told: dict[str, list[Any]] = {}
    for (name, _), kernel in launch_all(int(capability), wanted or ("",)).items():
        told.setdefault(name, []).append(what_it_takes(kernel))
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
