"""Conversions of the host's tensors are torch's, bit for bit, with the kernels and without them."""

import gc
import itertools

import numpy as np
import pytest
import torch

from forerun import blocks, host_tensor, native
from forerun.errors import InternalError
from forerun.host_tensor import HostTensor, address, dtype_name, empty
from refusals import refusal

needs_kernels = pytest.mark.skipif(native.isa() == "reference", reason="no native kernels here")
LIMITS = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, 65504, 65519.996, 65520, 6e-8, 2.9e-8, 448.0]
NORMAL = np.random.default_rng(0).standard_normal(200_000)
SIZES = 10.0 ** np.random.default_rng(1).integers(-45, 38, 200_000)
BITS = np.random.default_rng(2).integers(0, 1 << 32, 200_000, dtype=np.uint32)
WIDE = np.concatenate([LIMITS, NORMAL * SIZES, BITS.view(np.float32).astype(np.float64)])
TORCH = {name: getattr(torch, name) for name in host_tensor.FLOATS}


def held(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a torch tensor as numpy holds them."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name in ("bfloat16", "float8_e4m3fn"):
        tensor = tensor.view({2: torch.int16, 1: torch.uint8}[tensor.dtype.itemsize])
    return tensor.numpy().view(host_tensor.HELD_AS[name])


def given(name: str) -> torch.Tensor:
    """Numbers of a type; of the narrow ones every code."""
    if name == "float8_e4m3fn":
        return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    if name in ("bfloat16", "float16"):
        return torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(TORCH[name])
    with np.errstate(over="ignore"):
        return torch.from_numpy(WIDE.astype(host_tensor.HELD_AS[name]))


@pytest.mark.parametrize("how", [pytest.param("kernels", marks=needs_kernels), "numpy"])
@pytest.mark.parametrize(
    ("source", "target"), [(a, b) for a, b in itertools.product(TORCH, TORCH) if a != b and b != "float8_e4m3fn"]
)
def test_conversions_have_the_bits_of_torch(
    source: str, target: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "numpy":
        monkeypatch.setattr(native, "isa", lambda: "reference")
    numbers = given(source)
    found, wanted = HostTensor(held(numbers), source).to(target), numbers.float().to(TORCH[target])
    is_number = ~wanted.isnan().numpy()
    assert np.array_equal(found.values[is_number], held(wanted)[is_number])
    assert np.isnan(found.float32()[~is_number]).all(), "NaN stays NaN, with whatever bits"


@pytest.mark.parametrize("how", [pytest.param("kernels", marks=needs_kernels), "numpy"])
def test_conversions_keep_the_shape(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number that is no row of one, too; and rows that lie one beside the other."""
    if how == "numpy":
        monkeypatch.setattr(native, "isa", lambda: "reference")
    arrays = [np.ones(shape, np.float32) for shape in ((), (0, 3), (1,), (2, 3))]
    for source, target in itertools.product(TORCH, TORCH):
        if "float8_e4m3fn" not in (source, target):
            for array in (*arrays, arrays[-1].T):
                found = HostTensor.of(array).to(source).to(target).values
                assert isinstance(found, np.ndarray)
                assert found.shape == array.shape, (source, target)


@pytest.mark.parametrize("name", TORCH)
def test_numbers_that_are_not_finite_are_found(name: str) -> None:
    numbers = given(name)
    finite = numbers[numbers.float().isfinite()]
    assert not HostTensor(held(numbers), name).is_finite()
    assert HostTensor(held(finite), name).is_finite()


def test_memory_of_the_extension_lives_as_long_as_a_view_of_it() -> None:
    array = empty((3, 1 << 20), np.float32)
    assert address(array) % 64 == 0
    view = array[1:, 7]
    array[1:, 7] = 5.0
    del array
    gc.collect()
    assert view.tolist() == [5.0, 5.0]


def test_addresses_are_of_contiguous_arrays() -> None:
    assert "back to back" in refusal(InternalError, address, np.zeros((4, 4))[:, 1])
    assert address(None) == 0


def test_types_have_one_name() -> None:
    names = [dtype_name(t) for t in (torch.bfloat16, np.float32, np.dtype("int8"), "bfloat16", "torch.float32")]
    assert names == ["bfloat16", "float32", "int8", "bfloat16", "float32"]


def test_an_array_of_another_type_is_refused() -> None:
    assert "held as uint16" in refusal(InternalError, HostTensor, np.zeros(3, np.float32), "bfloat16")


def test_every_type_that_is_held_has_a_size() -> None:
    assert {name: held.itemsize for name, held in host_tensor.HELD_AS.items()} == blocks.ITEMSIZES
