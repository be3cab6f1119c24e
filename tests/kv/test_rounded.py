"""Keys and values in 8 bits: what is stored, against what it stands for, and the kernels against the same in numpy."""

import numpy as np
import pytest

from forerun.blocks import KEY_GROUP, REFINED, VALUE_GROUP, CacheShape
from forerun.host_tensor import Floats
from forerun.kv.cache import BlockCache
from forerun.kv.rounded import plain_keys, plain_values, rounded_keys, rounded_values

DIMS = (2, 16, 32, 48, 64, 80, 128, 256)


def numbers(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("dim", DIMS)
def test_what_is_stored_is_within_half_a_step(dim: int) -> None:
    """Each number differs by half of its group's scale, and at the top by what the scale itself is rounded."""
    x = numbers(50, 3, dim) * np.float32(7)
    for group, plain in (
        (KEY_GROUP, plain_keys(rounded_keys(x, refined=False), dim, refined=False)),
        (VALUE_GROUP, plain_values(rounded_values(x), dim)),
    ):
        for first in range(0, dim, group):
            own = x[..., first : first + group]
            step = np.abs(own).max(-1, keepdims=True) / 127
            differences = np.abs(plain[..., first : first + group] - own)
            assert (differences <= 1.01 * step).all()
            assert (differences <= 0.503 * step).mean() > 0.95


def test_second_codes_keep_what_large_dimensions_lose() -> None:
    """Where one dimension is a hundred times as large, the first ones are known as well as in bfloat16."""
    x = numbers(200, 2, 64)
    x[..., 0] += 150
    once = plain_keys(rounded_keys(x, refined=False), 64, refined=False)
    twice = plain_keys(rounded_keys(x, refined=True), 64, refined=True)
    assert np.abs(once - x)[..., :REFINED].mean() > 0.2
    assert np.abs(twice - x)[..., :REFINED].max() < 0.006
    assert np.array_equal((twice - x)[..., REFINED:], (once - x)[..., REFINED:])


def test_a_row_depends_on_itself_alone() -> None:
    x = numbers(40, 2, 64)
    whole = rounded_keys(x, refined=True), rounded_values(x)
    for i in range(40):
        assert np.array_equal(rounded_keys(x[i : i + 1], refined=True)[0], whole[0][i])
        assert np.array_equal(rounded_values(x[i : i + 1])[0], whole[1][i])


def test_zeros_stay_zeros_and_faults_stay_faults() -> None:
    """A group with a number that is not finite stands for NaN, its neighbours for what they are."""
    x = numbers(4, 1, 64)
    x[0] = 0
    x[1, 0, 40] = np.inf
    x[2, 0, 3] = np.nan
    keys = plain_keys(rounded_keys(x, refined=False), 64, refined=False)
    assert (keys[0] == 0).all()
    assert np.isnan(keys[1, 0, 32:]).all()
    assert np.isfinite(keys[1, 0, :32]).all()
    assert np.isnan(keys[2, 0, :32]).all()
    assert np.isnan(plain_values(rounded_values(x), 64)[1:3]).all()


@pytest.mark.parametrize(
    ("dim", "refined"), [*((dim, False) for dim in DIMS), *((dim, True) for dim in DIMS if dim % KEY_GROUP == 0)]
)
def test_widths_are_those_of_the_shape(dim: int, refined: bool) -> None:
    shape = CacheShape(1, 3, dim, refined_keys=refined)
    x = numbers(5, 3, dim)
    stored = rounded_keys(x, refined=refined), rounded_values(x)
    assert tuple(part.shape[-1] for part in stored) == shape.widths_of(0, "int8")
    assert shape.bytes_per_token("int8") == sum(part[0].nbytes for part in stored)
    assert shape.widths_of(0, "bfloat16") == (dim, dim)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_copied_rows_are_the_same_bytes(dtype: str, native: bool) -> None:
    """Keys and values of different widths, by the native operators and by numpy."""
    shape = CacheShape(2, 3, 64, refined_keys=True)
    cache = BlockCache.create(shape, "paged", max_batch_size=1, max_seq_len=32, dtype=dtype)
    if not native:
        cache.pools._moved = [None]
    for seed, pool in enumerate(cache.pools):
        pool.write(slice(0, 32), numbers(32, 3, 64, seed=seed), numbers(32, 3, 64, seed=9 + seed))
    before = [tensor.values.copy() for tensor in cache.pools.tensors()]
    cache.pools.copy([3, 31, 8], [10, 11, 12])
    for kept, old in zip(cache.pools.tensors(), before, strict=True):
        tensor = kept.values
        assert np.array_equal(tensor[[10, 11, 12]], old[[3, 31, 8]])
        assert np.array_equal(tensor[:10], old[:10])
        assert np.array_equal(tensor[13:], old[13:])
