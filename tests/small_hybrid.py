"""Shapes of hybrids as `benchmarks.random_file` writes them, with small sizes."""

from dataclasses import replace

from benchmarks.random_file import SHAPES, Hybrid

SIZES = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256, "key_heads": 2, "value_heads": 8,
         "state_dim": 32}  # fmt: skip
SIZES_OF_EXPERTS = {"experts": 16, "chosen": 4, "shared": 256}


def small_hybrid(name: str) -> Hybrid:
    """Return the shape of a model of Qwen 3.5, by its name there."""
    shape = SHAPES[name]
    return replace(shape, **SIZES, **(SIZES_OF_EXPERTS if shape.experts else {}))
