"""What the loops of the CUDA backend's products of codes cost in instructions: no card is needed, nothing is timed.

    python -m benchmarks.gpu_code [CAPABILITY] [KIND ...]      prints a table; a capability is 80, 89 or 90

Triton compiles the kernels with the constants that `CudaOps` gives them, for a card that is not there, and its own
disassembler shows the instructions. Of the loop over K those of one thread are counted, for each weight that the thread
takes apart and multiplies, by class; also registers, spills, shared memory, and conversions between layouts in it.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.ops import cuda
from forerun.ops.cuda import operators
from forerun.ops.cuda.packed import STEP, TILE, Packed

CLASSES = {
    "matrix": r"HMMA|HGMMA|WARPGROUP",
    "bits": r"LOP3|SHF|PRMT|SGXT|IMAD\.U32|IMAD\.SHL",
    "pairs": r"HFMA2|HADD2|HMUL2",
    "floats": r"FFMA|FMUL|FADD",
    "converts": r"F2F|I2F|F2I|I2IP",
    "shared": r"LDS|STS|LDSM|STSM|SHFL",
    "global": r"LDG|STG|CCTL",
    "waits": r"BAR|DEPBAR|SYNC|FENCE|MEMBAR",
}
NUM_OUT, NUM_IN = 4096, 4096  # the loop is the same for all matrices
KINDS: dict[str, tuple[str, int, str]] = {
    "int4, groups of 128": ("int4", 128, "zeros"),
    "int4, groups of 32": ("int4", 32, "zeros"),
    "Q4_0": ("int4", 32, ""),
    "Q4_1": ("int4", 32, "minimums"),
    "Q4_K": ("int4", 32, "factors"),
    "Q6_K": ("int8", 16, "factor"),
    "int8, groups of 128": ("int8", 128, ""),
    "int8, groups of 32": ("int8", 32, ""),
    "fp8": ("fp8", 128, ""),
}


class Card:
    """A driver of a card that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        """Return what is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Return the first device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return no stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return where Triton's own tensors would be."""
        return torch.device("cpu")


class Compiled:
    """The kernels of a module, which are compiled in place of being launched.

    compiled: by name and PTX, each kernel whose name begins with a text of `wanted`.
    """

    def __init__(self, module: Any, wanted: tuple[str, ...]) -> None:
        self._module = module
        self._wanted = wanted
        self.compiled = dict[tuple[str, str], Any]()

    def __getattr__(self, name: str) -> Any:
        outer, kernel = self, getattr(self._module, name)
        full_name = f"{self._module.__name__.rpartition('.')[2]}.{name}"

        class Launches:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                def run(*args: Any, launch_pdl: bool = False, **constants: Any) -> None:
                    if name.startswith(outer._wanted):
                        compiled = kernel.warmup(*args, grid=grid, **constants)
                        outer.compiled[full_name, compiled.asm["ptx"]] = compiled

                return run

        return Launches()


def operators_for(capability: int, wanted: tuple[str, ...] = ("",)) -> cuda.CudaOps:
    """Return operators that compile for a card, which need not be there, what they would launch on it."""
    from triton.runtime import driver

    driver.set_active(Card(capability))
    ops = cuda.CudaOps()
    ops.early = capability >= 90
    ops.launch |= {"EARLY": ops.early}
    ops.kernels = Compiled(ops.kernels, wanted)
    return ops


def matrix(kind: str, group: int, more: str) -> Packed:
    """A matrix without memory."""

    def numbers(span: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(NUM_OUT // TILE, NUM_IN // span, TILE, dtype=dtype, device="meta")

    codes = torch.empty(
        NUM_OUT // TILE, NUM_IN // (64 if kind == "int4" else 32), 4, 8, 4, 4, dtype=torch.int32, device="meta"
    )
    parts: dict[str, Any] = {"scales": numbers(group, torch.bfloat16), "zero": 8}
    if more == "zeros":
        parts["zeros"] = numbers(group, torch.uint8)
    if more == "minimums":
        parts |= {name: numbers(group, torch.float16) for name in ("scales", "minimums")}
    if more.startswith("factor"):
        parts |= {"scales": numbers(group, torch.int8), "supers": numbers(256, torch.float16), "super_group": 256}
    if more == "factors":
        parts |= {"minimums": numbers(group, torch.uint8), "super_minimums": numbers(256, torch.float16)}
    return Packed(kind, NUM_OUT, NUM_IN, group, codes, **parts)


def disassembler() -> Path:
    """Return where Triton has its disassembler."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def shown(kernel: Any, what: str) -> str:
    """Return what the disassembler says of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [str(disassembler()), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(kernel: Any) -> tuple[int, int]:
    """Return the registers of a thread of a kernel, and the bytes of its stack."""
    usage = shown(kernel, "-res-usage")
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert numbers is not None, usage
    return int(numbers[1]), int(numbers[2])


def instructions(kernel: Any) -> list[tuple[int, str, str]]:
    """The instructions of a kernel: where, which and with what."""
    pattern = r"^\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*?);"
    lines = re.findall(pattern, shown(kernel, "-sass"), re.MULTILINE)
    return [(int(at, 16), name, rest) for at, name, rest in lines]


def loop(found: list[tuple[int, str, str]]) -> list[str]:
    """The names of the instructions of the loop that multiplies matrices."""
    loops = []
    for end, name, rest in found:
        target = re.search(r"0x([0-9a-f]+)", rest)
        if name.startswith("BRA") and target is not None and (start := int(target[1], 16)) < end:
            own = [name for at, name, _ in found if start <= at <= end]
            if any(re.match("HMMA|HGMMA", name) for name in own):
                loops.append(own)
    return max(loops, key=len)


def counts(capability: int, *chosen: str) -> Iterator[dict[str, Any]]:
    """Count what each kind of codes costs, with tiles of 16, 32 and 64 rows."""
    ops = operators_for(capability)
    for name, (kind, group, more) in KINDS.items():
        if chosen and name not in chosen:
            continue
        weight = matrix(kind, group, more)
        for rows in operators.ROWS:
            ops.product(torch.empty(rows, NUM_IN, dtype=torch.bfloat16, device="meta"), weight)
            _, kernel = ops.kernels.compiled.popitem()
            found = instructions(kernel)
            own = loop(found)
            per_weight = STEP * TILE / (32 * kernel.metadata.num_warps)
            classes = Counter(
                next((label for label, pattern in CLASSES.items() if re.match(pattern, name)), "other") for name in own
            )
            yield {
                "kind": name,
                "rows": rows,
                "all": round(len(own) / per_weight, 2),
                **{label: round(classes[label] / per_weight, 2) for label in (*CLASSES, "other")},
                "registers": resources(kernel)[0],
                "spilled": sum(name.startswith(("LDL", "STL")) for _, name, _ in found),
                "shared KB": kernel.metadata.shared // 1024,
                "conversions": kernel.asm["ttgir"].split("scf.for")[-1].split("scf.yield")[0].count("convert_layout"),
            }


def main(capability: str = "90", *chosen: str) -> None:
    """Print the table."""
    for i, found in enumerate(counts(int(capability), *chosen)):
        if i == 0:
            print(" | ".join(found))
        print(" | ".join(map(str, found.values())), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
