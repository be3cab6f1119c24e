"""The memory plan under native operators: packed weights to the byte, passes against what a process really holds."""

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import processes
from engine.memory_cases import BF16, ENVIRONMENT, F32, SMALL, bytes_by_name, needs_native, said_by_a_child
from forerun import native, ops as operators
from forerun.blocks import Spec, itemsize, resized, weight_shapes
from forerun.config import EngineConfig
from forerun.host_tensor import HostTensor
from forerun.memory.plan import memory_plan
from forerun.models.opened import read_config
from forerun.ops import load_model
from forerun.ops.cpu import CpuOps
from forerun.ops.cpu.memory import packed_bytes
from forerun.ops.cpu.model import CpuModel
from forerun.ops.memory import KERNEL_BYTES

pytestmark = [needs_native, pytest.mark.once("plans, and passes without an engine")]
HUGE_PAGE_BYTES = 2 << 20
ODD = {"vocab_size": 2011, "hidden_size": 99, "num_heads": 5, "num_kv_heads": 1, "head_dim": 18, "ffn_size": 131}
BIASED = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


def zeros(config: Spec, dtype: str) -> dict[str, HostTensor]:
    """Weights that are all zero, in memory that is written."""
    weights = {name: HostTensor.empty(shape, dtype) for name, shape in weight_shapes(config).items()}
    for weight in weights.values():
        weight.values[...] = 0
    return weights


def native_decoder(config: Spec, dtype: str) -> CpuModel:
    return cast(CpuModel, load_model(config, zeros(config, dtype), operators.make("native", "cpu")))


def planned_weights(config: Spec, dtype: str) -> int:
    """The bytes that the plan counts for the weights of a target."""
    plan = memory_plan(config, None, EngineConfig(draft="none", ops="native"), dtype=dtype)
    return bytes_by_name(plan)["target weights"]


# ------------------------------------------------------------------------------------------------ exact to the byte


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (16, 2), (17, 3), (32, 64), (33, 65), (257, 99)])
def test_a_packed_matrix_has_the_bytes_of_its_panels(num_out: int, num_in: int, paired: bool, dtype: str) -> None:
    parts = [HostTensor.empty((num_out, num_in), dtype)] * (2 if paired else 1)
    assert packed_bytes(num_out, num_in, dtype, paired=paired) == CpuOps().pack(parts, paired=paired).nbytes


@pytest.mark.parametrize("sizes", [{}, ODD, ODD | BIASED, {"tied": False}, {"qk_norm": True}])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_weights_are_what_a_decoder_packs(sizes: dict[str, Any], dtype: str) -> None:
    config = resized(SMALL, **sizes)
    planned, model = planned_weights(config, dtype), native_decoder(config, dtype)
    table = 0 if config.tied else config.vocab_size * config.hidden_size * itemsize(dtype)
    biases = [shape for name, shape in weight_shapes(config).items() if name.endswith("bias")]
    if not biases:
        assert planned == model.bytes_per_pass + table
    else:  # padded to whole panels, and not counted among what a pass reads
        plain = 4 * sum(shape[0] for shape in biases)
        assert plain < planned - model.bytes_per_pass - table <= plain + config.num_layers * 4 * 32 * 4


SIZES = {"vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 64}
HEADS = {f"{part}_{what}": 4 for part in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")}
T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "t5", **T5},
        {"model_type": "t5", **T5, "tie_word_embeddings": False},
        {"model_type": "bart", **SIZES, **HEADS},
        {"model_type": "marian", **SIZES, **HEADS},
    ],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_weights_of_an_encoder_decoder(raw: dict[str, Any], dtype: str) -> None:
    spec = read_config(raw)
    planned, model = planned_weights(spec, dtype), native_decoder(spec, dtype)
    tensors = [*model._vectors.values(), *model._tables.values()]
    made = sum(matrix.nbytes for matrix in model.matrices.values()) + sum(tensor.nbytes for tensor in tensors)
    biases = [shape[0] for name, shape in weight_shapes(spec).items() if name.endswith("_proj.bias")]
    assert 4 * sum(biases) <= planned - made <= 4 * (sum(biases) + 32 * len(biases))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_ends_of_pages(dtype: str) -> None:
    """A matrix of 2 MiB and more begins with a huge page and ends with a small one; others take what they need."""
    config = resized(SMALL, vocab_size=2000, num_layers=1, hidden_size=1048, ffn_size=1040)
    model = native_decoder(config, dtype)
    made = [matrix.nbytes for matrix in model.matrices.values()]
    assert any(n < HUGE_PAGE_BYTES for n in made)
    rounded = sum(-n % 4096 for n in made if n >= HUGE_PAGE_BYTES)
    others = [*model._vectors.values(), *model._tables.values()]
    assert planned_weights(config, dtype) == sum(made) + rounded + sum(tensor.nbytes for tensor in others)
    assert 0 < rounded < 4096 * len(made)


# ------------------------------------------------------------------------------------------------ passes, measured


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def peak_resident(run: Callable[[], object]) -> int:
    """The most that this process came to hold during `run`, beyond what it held before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again, and not be seen
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    run()
    return status("VmHWM") - before


PASSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "odd": (ODD, {"prefill_chunk_tokens": 900}),
    "narrow ffn": ({"ffn_size": 128, "num_heads": 16}, {}),
    "wide": ({"hidden_size": 1024, "ffn_size": 3000, "num_layers": 1}, {"prefill_chunk_tokens": 300}),
    "plain decoding": ({}, {"draft": "none"}),
    "inner layers": ({"hidden_size": 2048, "num_layers": 2}, {"prefill_chunk_tokens": 900}),
    "logits": ({"vocab_size": 60_000}, {"prefill_chunk_tokens": 6}),
}


MEASURED = """
import sys
from engine.memory_cases import one_pass
from engine.test_memory_native import *
name, dtype, num_taps = sys.argv[1], sys.argv[2], int(sys.argv[3])
sizes, more = PASSES[name]
config = resized(SMALL, **sizes)
options = EngineConfig(**{"draft": "lookup", "ops": "native", "max_batch_size": 4, "max_seq_len": 1024,
                          "prefill_chunk_tokens": 512} | more)
one_pass(config, options, dtype, num_taps)()  # what runs for the first time is not this pass's
widens = native.extension().widen_pairs(False)  # what threads prepare inputs in is theirs by now: see the test below
plan = memory_plan(config, None, options, dtype=dtype, num_taps=num_taps)
native.extension().widen_pairs(widens)
print(plan.bytes_of("pass buffers", "activations"))
print(peak_resident(one_pass(config, options, dtype, num_taps)))
"""


def numbers_of_a_child(source: str, *args: str, **environment: str) -> list[int]:
    """What this code prints in a process of its own: nothing there was given back, or prepared, by another test."""
    path = f"{Path(__file__).parents[1]}:{ENVIRONMENT['PYTHONPATH']}"
    said = said_by_a_child(source, *args, run=processes.run, PYTHONPATH=path, **environment)
    return [int(word) for word in said.split()]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    ("name", "dtype", "num_taps"),
    [(name, BF16, 0) for name in PASSES]
    + [pytest.param(name, F32, 0, marks=[] if name == "odd" else pytest.mark.parity) for name in PASSES]
    + [("inner layers", F32, 3)],  # 22 MB of them
)
def test_buffers_and_activations_bound_a_real_pass(name: str, dtype: str, num_taps: int) -> None:
    planned, measured = numbers_of_a_child(MEASURED, name, dtype, str(num_taps))
    said = f"{name} {dtype}: planned {planned / 1e6:.2f} MB, measured {measured / 1e6:.2f} MB, {measured / planned:.2f}"
    print(f"\n{said}")
    # What was given back stays advised to come in huge pages: two of them, at the ends, may be counted whole.
    # The plan has room for torch's kernels, which are not used, and buffers of passes whose few rows threads share.
    assert 0.7 * (planned - KERNEL_BYTES) <= measured <= planned + 2 * HUGE_PAGE_BYTES, said


PREPARED = """
import sys
from engine.memory_cases import one_pass, schemes_of
from engine.test_memory_native import *
options = EngineConfig(draft="lookup", ops="native", spec_length=3, max_batch_size=2, max_seq_len=4096,
                       prefill_chunk_tokens=2048, max_num_batched_tokens=4096)
config = resized(SMALL, ffn_size=3072, vocab_size=4000)
schemes = schemes_of(config, 8) if sys.argv[1] == "rounded" else {}
plan = memory_plan(config, None, options, dtype=BF16, schemes={"target": schemes})
widens = native.extension().widen_pairs(False)
unprepared = memory_plan(config, None, options, dtype=BF16)
native.extension().widen_pairs(widens)
one_pass(config, options, F32)()
print(*[found.bytes_of("pass buffers", "activations") for found in (plan, unprepared)])
print(peak_resident(one_pass(config, options, BF16, schemes=schemes)))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("how", ["rounded", "widened"])
def test_buffers_of_rows_that_each_thread_prepares(how: str) -> None:
    """Those of quantised products are of 4 bytes a number, and rounded to buffers that a thread keeps. On processors of
    Intel those of bfloat16 are widened.

    In a process of its own, whose threads have no such buffers yet.
    """
    planned, unprepared, measured = numbers_of_a_child(PREPARED, how, FORERUN_NUM_THREADS="2")
    print(f"\nplanned {planned / 1e6:.2f} MB, measured {measured / 1e6:.2f} MB, {measured / planned:.2f}")
    assert 0.7 * planned <= measured <= planned + 4 * HUGE_PAGE_BYTES  # more buffers than above are that large
    if how == "rounded" or (native.isa() == "avx512" and native.extension().widens_pairs()):
        assert measured > unprepared + 4 * HUGE_PAGE_BYTES


def test_rows_of_inner_layers_are_planned() -> None:
    options = EngineConfig(draft="lookup", ops="native", max_batch_size=4, max_seq_len=1024, prefill_chunk_tokens=512)
    three, none = (memory_plan(SMALL, None, options, dtype=F32, num_taps=num) for num in (3, 0))
    taps = three.bytes_of("activations") - none.bytes_of("activations")
    assert taps == 3 * (512 + 3 * (options.longest_draft + 1)) * SMALL.hidden_size * 4


def test_buffers_of_both_models_stay_and_nothing_comes_later() -> None:
    def buffers(draft: Spec | None, spec: str) -> int:
        options = EngineConfig(draft=spec, ops="native", max_batch_size=2, prefill_chunk_tokens=31)
        plan = memory_plan(SMALL, draft, options, dtype=BF16)
        assert plan.later == ()
        return plan.bytes_of("pass buffers")

    assert buffers(SMALL, "./d") > 1.9 * buffers(None, "lookup") > 0
    assert buffers(SMALL, "none") < buffers(None, "lookup")


# ------------------------------------------------------------------------------------------------ where there is none

REFUSED = """
import resource
from forerun import ops
from forerun.blocks import Plain, resized
from forerun.errors import CapacityError
from forerun.blocks import weight_shapes
from forerun.host_tensor import HostTensor
from forerun.ops import load_model

def empty(config):
    return {name: HostTensor.empty(shape, "float32") for name, shape in weight_shapes(config).items()}

config = Plain("llama", 1 << 18, 1 << 10, 1, 2, 2, 8, 64, 1e-5, 64, tied=True).spec
native = ops.make("native", "cpu")
load_model(resized(config, vocab_size=64), empty(resized(config, vocab_size=64)), native)
weights = empty(config)
size = next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), -1))
try:
    load_model(config, weights, native, consume=True)
except CapacityError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on addresses")
def test_a_matrix_that_no_memory_can_hold() -> None:
    """1.07 GB to pack, and addresses for a quarter of that: refused with its size, before anything is given back."""
    assert said_by_a_child(REFUSED) == (
        "there is no memory to pack a matrix of 1.07 GB for the native operators: choose a smaller model, or "
        "dtype='bfloat16'; forerun plan says what fits\n"
    )
