"""Positions as numbers: exact to the last bit of float32, the same for ever, and one table for all operators."""

import hashlib
import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.t5.modeling_t5 import T5Attention

from forerun.blocks import Buckets, Plain, Rope, weight_shapes
from forerun.ops.reference import ReferenceOps, bucket_of
from forerun.ops.rotary import attention_factor, buckets_of_distances, inverse_frequencies, rotations, sinusoids
from forerun.ops.torch_rotations import TorchRotations
from forerun.sampling import arithmetic
from ops.native_cases import needs_native
from tensors import TensorOps, load_model
from tiny import numbers

LONG = tuple(1.0 + i / 4 for i in range(32))
# By name: rope, size of heads, and a digest of its first thousand positions.
KINDS: dict[str, tuple[Rope, int, str]] = {
    "default": (Rope(10000.0), 64, "568a1cd1e7fa"),
    "default, large": (Rope(1e6), 128, "b20a02bf78e7"),
    "part of a head": (Rope(10000.0, dims=24), 80, "a69d7d1b0e1f"),
    "linear": (Rope(10000.0, "linear", 4.0), 64, "ffe92a6edd20"),
    "llama3": (Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 256), 64, "f3b3a443952b"),
    "yarn": (Rope(1e6, "yarn", 4.0, original_max_positions=256), 64, "c30ec5bc1bd4"),
    "yarn, mscale": (Rope(1e4, "yarn", 8.0, original_max_positions=64, truncate=False, mscale=0.7), 64, "bd91a9ebc60b"),
    "longrope": (Rope(1e4, "longrope", 4.0, original_max_positions=64, short_factor=LONG, long_factor=LONG[::-1],
                 far=True), 64, "2013ac758867"),
    "proportional": (Rope(1e6, "proportional", 8.0, dims=32), 64, "b7a8e91f98b8"),
}  # fmt: skip


def digest(table: np.ndarray) -> str:  # type: ignore[type-arg]
    return hashlib.blake2b(table.tobytes(), digest_size=6).hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_the_same_for_ever(kind: str) -> None:
    rope, head_dim, known = KINDS[kind]
    table = rotations(inverse_frequencies(rope, head_dim), attention_factor(rope), range(1000))
    assert table.dtype == np.float32
    assert digest(table) == known


def test_sine_and_cosine_are_those_of_the_c_library_once_they_are_float32() -> None:
    """Over all multiples of an eighth of a turn, which are the hard ones, and up to the last position of float32."""
    steps = np.arange(-2000, 2000) * (math.pi / 4)
    spread = np.concatenate([numbers(i, 4000).astype(np.float64) * size for i, size in enumerate((1.0, 1e3, 4e6))])
    near = steps.astype(np.float32).astype(np.float64)
    for angles in (steps, near, spread, np.array([0.0, 2.0**24, -(2.0**24)])):
        for found, exact in zip(arithmetic.sine_cosine(angles), (math.sin, math.cos), strict=True):
            wanted = np.array([exact(angle) for angle in angles.tolist()])
            assert (np.abs(found - wanted) <= 2 * np.spacing(np.abs(wanted)) + 1e-30).all()
            assert (found.astype(np.float32) == wanted.astype(np.float32)).all()


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "longrope"])
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    """But for the last bits: torch's power leaves one open, and the same blends are written in another order."""
    rope, head_dim, _ = KINDS[kind]
    scaling = {"rope_type": kind, "factor": rope.factor, "rope_theta": rope.theta}
    if kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if kind == "longrope":
        scaling |= {"short_factor": list(LONG), "long_factor": list(LONG[::-1])}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    config = LlamaConfig(head_dim=head_dim, num_attention_heads=1, max_position_embeddings=512, rope_parameters=scaling)
    wanted, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=1000)
    np.testing.assert_array_max_ulp(inverse_frequencies(rope, head_dim), wanted.numpy(), maxulp=4)
    assert attention_factor(rope) == pytest.approx(factor)


def test_sinusoids_are_sines_and_cosines_of_float64() -> None:
    for num, width in ((40, 16), (33, 9)):
        angles = np.arange(num)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
        wanted = np.concatenate((np.sin(angles), np.cos(angles)[:, : width // 2]), 1).astype(np.float32)
        np.testing.assert_array_max_ulp(sinusoids(num, width), wanted, maxulp=1)


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("num", "most"), [(32, 128), (8, 20), (64, 800), (12, 100)])
def test_buckets_are_those_of_transformers(num: int, most: int, both_ways: bool) -> None:
    distances = torch.arange(-most - 70, most + 71)
    wanted = T5Attention._relative_position_bucket(-distances, both_ways, num, most)
    assert torch.equal(bucket_of(distances, Buckets(num, most, both_ways)), wanted)
    assert buckets_of_distances(Buckets(num, most, both_ways)).shape == (2 * most + 1,)


@needs_native
def test_native_passes_and_torch_read_the_same_table() -> None:
    """However it has grown; torch has it in its own type."""
    spec = Plain("llama", 64, 32, 1, 4, 2, 8, 32, 1e-5, 2048).spec
    weights = {n: torch.from_numpy(numbers(i, *s)) for i, (n, s) in enumerate(weight_shapes(spec).items())}
    native, plain = load_model(spec, weights, TensorOps()), load_model(spec, weights, ReferenceOps())
    attention = spec.blocks[0].attention
    wanted = rotations(inverse_frequencies(attention.rope, attention.head_dim), 1.0, range(768))
    for end in (1, 257, 700):
        tables = [native._rotations[0].table(end), *(rotation.table(end) for rotation in plain._rotations.values())]
        for table in tables:
            assert len(table) >= end
            assert (np.asarray(table)[:, :, 0] == wanted[: len(table)]).all()
    rounded = TorchRotations(attention.rope, attention.head_dim, torch.device("cpu"), torch.bfloat16).table(700)
    assert torch.equal(rounded[:, :, 0], torch.from_numpy(wanted).bfloat16())
