"""On the native path torch moves numbers and computes none whose bits depend on torch.

Exponentials, cosines, sums, sorts and products of matrices are the kernels', numpy's or sampling/arithmetic.py's. What
is left of torch is in `EXACT`: whatever computes it gives the same bits. Engines of many kinds load and serve under a
mode that sees every operator that torch runs.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

import forerun
from ops.native_cases import needs_native
from parity import recording

PACKAGE = str(Path(forerun.__file__).parent)
EXACT = {
    "memory and shapes": "__getitem__ __len__ __setitem__ arange asarray cat clone contiguous copy_ cpu data_ptr "
    "detach device dim empty empty_like expand flatten full full_like is_contiguous new_empty numel numpy ones pad "
    "permute promote_types repeat_interleave reshape split_with_sizes squeeze stack tensor to tolist transpose unbind "
    "unflatten unsqueeze untyped_storage view zeros",
    "types, rounded to the nearest": "__bool__ __float__ __get__ __int__ bfloat16 double float int long",
    "choices": "embedding equal gather index_fill index_select isin masked_fill nonzero searchsorted where",
    "comparisons": "__eq__ abs all amax any clamp clamp_ ge gt isfinite lt max minimum neg",
    "whole numbers": "__and__ __floordiv__ __lshift__ __or__ __rlshift__ __rshift__ __xor__",
    "one rounding for each number": "add div mul round sub",
}
# Of which no bit goes on: a sum of no numbers is none, in whatever order.
DECIDES = {("sum", "models/weights.py _is_finite")}
CASES = {
    *(f"llama, float32, {name}" for name in (*recording.WITH_HEADS, "random", "tree drawn")),
    *("llama, bfloat16, self", "mistral, bfloat16, suffix tree", "sinks, float32, none", "proportional, float32, none"),
    *("t5, float32, model", "t5, bfloat16, int8 cache, none", "sines, float32, none", "beams"),
    *("rules of chains", "rules of trees", "lenience, greedy", "pacing, confidence", "pacing, svip"),
    *("8-bit floats, float32, suffix", "many types, bfloat16, suffix"),
}


class Watch(TorchFunctionMode):
    """Notes what is asked of torch and is not exact, and the function of the package that asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self._exact = set(" ".join(EXACT.values()).split())
        self.found = set[tuple[str, str]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.__name__
        is_whole = name == "sum" and isinstance(made, Tensor) and not made.is_floating_point()
        if name not in self._exact and not is_whole and (place := _place()) is not None:
            self.found.add((name, place))
        return made


def _place() -> str | None:
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    return frame and f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]} {frame.f_code.co_name}"


@needs_native
def test_torch_computes_nothing_whose_bits_depend_on_it(tmp_path: Path) -> None:
    folders, watch = recording.Folders(tmp_path), Watch()
    cases = [replace(case, num_tokens=8) for case in recording.cases() if case.name in CASES]
    assert {case.name for case in cases} == CASES
    with watch:
        for case in cases:
            recording.run(case, folders)
    assert watch.found - DECIDES == set()


@needs_native
def test_the_watch_sees_what_depends_on_torch(tmp_path: Path) -> None:
    """Negative control: the same engine on torch's operators."""
    case = recording.Case("", "llama", "none", {"dtype": "float32", "ops": "reference"}, 2)
    with Watch() as watch:
        recording.run(case, recording.Folders(tmp_path))
    assert {"silu", "linear"} <= {name for name, _ in watch.found}
