"""The memory plan counts the weights of trained heads, from the headers of their files, as they are in memory."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.memory_cases import SMALL, bytes_by_name, needs_native, write_random
from forerun import LLM
from forerun.blocks import resized
from forerun.config import EngineConfig
from forerun.drafters import hydra
from forerun.drafters.shared import artifacts, dflash_model, eagle_model, head_files
from forerun.engine.fitting import Outlines
from forerun.engine.opened import Opened
from forerun.host_tensor import HostTensor
from forerun.kv.cache import BlockCache
from forerun.models.loading import load_checkpoint
from forerun.models.saving import config_to_dict, write_json
from forerun.ops.cpu.packed import PackedMatrix
from forerun.ops.rotary import Rotations
from forerun.ops.torch_tensors import host_of
from tiny import byte_tokenizer

pytestmark = pytest.mark.once("nothing is drafted: sizes alone")

NUM_DRAFTED = 224
TARGET = resized(SMALL, vocab_size=257, max_positions=512)
WIDTH = TARGET.hidden_size
LAYER = resized(TARGET, vocab_size=NUM_DRAFTED, num_layers=1, num_kv_heads=2)  # other sizes than the target's
Shapes = Mapping[str, tuple[int, ...]]


def blocks(name: str, num_heads: int, num_blocks: int) -> Shapes:
    places = [(head, i) for head in range(num_heads) for i in range(num_blocks)]
    weights = {name.format(*place) + "weight": (WIDTH, WIDTH) for place in places}
    return weights | {name.format(*place) + "bias": (WIDTH,) for place in places}


def own_heads() -> dict[str, tuple[Mapping[str, Any], Shapes]]:
    """By method: config.json and shapes, as `forerun train head` writes them."""
    eagle = eagle_model.EagleConfig(LAYER, (0, 1, 3))
    decoder = resized(LAYER, model_type="qwen3", qk_norm=True, num_layers=2, tied=False)
    dflash = dflash_model.DFlashConfig(decoder, (1, 3), 4, 256, NUM_DRAFTED)
    ids = {"draft_vocab_size": NUM_DRAFTED}
    return {
        "eagle": (eagle.to_json(), {**eagle_model.input_shapes(eagle), **eagle_model.layer_shapes(eagle)}),
        "dflash": (dflash.to_json(3), {n: s for n, s in dflash_model.shapes(dflash).items() if n != "d2t"}),
        "medusa": ({"medusa_num_heads": 3, "medusa_num_layers": 2, **ids}, blocks("{}.{}.linear.", 3, 2)),
        "hydra": ({"hydra_num_heads": 3, "hydra_num_layers": 2, **ids}, hydra.shapes(3, 2, WIDTH)),
        "blockwise": ({"num_heads": 2, "intermediate_size": 512, **ids}, head_files.feed_forward_shapes(2, 512, WIDTH)),
        "pass": ({"num_look_ahead": 4}, {"look_ahead": (4, WIDTH)}),
    }


def published_heads() -> dict[str, tuple[str, Mapping[str, Any], Shapes]]:
    """By name: method, config.json and shapes, as others write them."""
    layer = eagle_model.EagleConfig(replace(LAYER, vocab_size=257), ())
    eagle = {n.removeprefix("model."): s for n, s in eagle_model.layer_shapes(layer).items()}
    eagle = {n: s for n, s in eagle.items() if n not in ("norm.weight", "layers.0.input_layernorm.weight")}
    eagle |= {"fc.weight": (WIDTH, 2 * WIDTH), "embed_tokens.weight": (257, WIDTH)}
    lm_heads = {f"{head}.1.weight": (257, WIDTH) for head in range(2)}
    return {
        "EAGLE-1": ("eagle", config_to_dict(layer.decoder), eagle),
        "Medusa v2": ("medusa", {"medusa_num_heads": 2}, {**blocks("{}.{}.linear.", 2, 1), **lm_heads}),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, "model", and heads of random weights for it, called as above."""
    root = tmp_path_factory.mktemp("heads")
    (root / "tokenizer").mkdir()
    byte_tokenizer("<|end|>").save(str(root / "tokenizer" / "tokenizer.json"))
    target = load_checkpoint(write_random(root / "model", TARGET, root / "tokenizer"), with_tokenizer=True)
    fingerprint = artifacts.fingerprint(target.tokenizer, 257)
    for method, (config, shapes) in own_heads().items():
        weights = {name: host_of(weight) for name, weight in random_weights(shapes).items()}
        weights[head_files.PROBE] = head_files.probe(target.model, 257)
        if method != "pass":
            weights["d2t"] = HostTensor.of(np.zeros(NUM_DRAFTED, np.int64))
        head_files.save(root / method, method, weights, config, fingerprint)
    for name, (_, config, shapes) in published_heads().items():
        (root / name).mkdir()
        write_json(root / name / "config.json", config)
        save_file(random_weights(shapes), root / name / "model.safetensors")
    return root


def random_weights(shapes: Shapes) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: (torch.randn(shape, generator=generator) * 0.05).bfloat16() for name, shape in shapes.items()}


def held(value: Any, seen: dict[int, Any]) -> Iterator[int]:
    """The bytes of packed matrices and tensors that an object holds, but for caches and tables of positions.

    seen: what was met already, by its address; it is kept alive, so that no other object gets that address.
    """
    if id(value) in seen or isinstance(value, str | bytes | int | float | type | BlockCache | Rotations):
        return
    seen[id(value)] = value
    if isinstance(value, PackedMatrix):
        yield value.nbytes
    elif isinstance(value, Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = value
            yield storage.nbytes()
    elif isinstance(value, HostTensor):
        yield from held(value.values, seen)
    elif isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        yield from held(value.base, seen)
    elif isinstance(value, np.ndarray):
        yield value.nbytes
    elif isinstance(value, FunctionType):  # what multiplies by a matrix holds it
        yield from (num for cell in value.__closure__ or () for num in held(cell.cell_contents, seen))
    elif isinstance(value, partial):
        yield from (num for item in (*value.args, *value.keywords.values()) for num in held(item, seen))
    elif isinstance(value, Mapping):
        yield from (num for item in list(value.values()) for num in held(item, seen))
    elif isinstance(value, list | tuple | set):
        yield from (num for item in value for num in held(item, seen))
    elif type(value).__module__.startswith("forerun."):
        yield from (num for item in getattr(value, "__dict__", {}).values() for num in held(item, seen))


def real_bytes(llm: LLM) -> int:
    """What the drafter of an engine holds, less what is its target's."""
    seen = dict[int, Any]()
    assert sum(held(llm.checkpoint.model, seen)) > 10**6
    return sum(held(llm.engine.drafter.first, seen))


def planned(config: EngineConfig) -> dict[str, int]:
    return bytes_by_name(Outlines.of(Opened.of(config)).plan(None))


def weights_of(parts: Mapping[str, int], method: str) -> int:
    """Of the only head: under its own name where it has no cache."""
    return parts[f"{'draft' if method in ('eagle', 'dflash') else method} weights"]


CASES = [(method, method, {}) for method in own_heads()]
CASES += [(method, method, {"quantization": bits}) for method in ("eagle", "dflash") for bits in ("int8", "int4")]
CASES += [(name, method, {}) for name, (method, *_) in published_heads().items()]
CASES += [("EAGLE-1", "eagle", {"quantization": "int8"})]


@pytest.mark.parametrize(
    ("ops", "dtype"),
    [
        pytest.param("native", "bfloat16", marks=needs_native),
        pytest.param("native", "float32", marks=needs_native),
        ("reference", "float32"),
    ],
)
@pytest.mark.parametrize(("name", "method", "options"), CASES, ids=str)
def test_the_plan_is_what_a_head_takes(
    folder: Path, name: str, method: str, options: Mapping[str, str], ops: str, dtype: str
) -> None:
    spec = f"{method}:path={folder / name}" + "".join(f",{key}={value}" for key, value in options.items())
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64, "dtype": dtype, "ops": ops}
    llm = LLM(str(folder / "model"), draft=spec, **sizes)
    real, parts = real_bytes(llm), planned(llm.config)
    assert weights_of(parts, method) == pytest.approx(real, rel=0.01, abs=0)
    assert real > (3000 if method == "pass" else 200_000)
    if method in ("eagle", "dflash"):
        drafter: Any = llm.engine.drafter.first
        cache = drafter.cache if method == "dflash" else drafter.runner.cache
        assert parts["draft KV cache"] == sum(pool.nbytes for pool in cache.pools.tensors())
    else:
        assert "draft KV cache" not in parts


@needs_native
@pytest.mark.parametrize("method", ["eagle", "dflash"])
def test_beside_a_target_of_few_bits_a_head_is_counted_as_it_is_rounded(folder: Path, method: str) -> None:
    draft = f"{method}:path={folder / method}"
    config = EngineConfig(target=str(folder / "model"), draft=draft)
    dense = weights_of(planned(replace(config, draft=f"{draft},quantization=none")), method)
    rounded = weights_of(planned(replace(config, quantization="int8")), method)
    assert rounded < 0.6 * dense
    # A trained head of eagle is rounded beside any target.
    assert weights_of(planned(config), method) == (rounded if method == "eagle" else dense)
    llm = LLM(str(folder / "model"), draft=draft, quantization="int8", max_seq_len=64)
    assert rounded == pytest.approx(real_bytes(llm), rel=0.01, abs=0)


def test_every_head_of_a_configuration_has_a_line(folder: Path) -> None:
    extra = (
        f"medusa:path={folder / 'medusa'}",
        f"medusa:path={folder / 'medusa'},shape=1x1",
        f"eagle:path={folder / 'eagle'}",
    )
    config = EngineConfig(target=str(folder / "model"), draft="lookup", extra_drafts=";".join(extra))
    parts = planned(config)
    assert parts["medusa weights"] == parts["medusa 2 weights"] > 0
    assert parts["extra draft weights"] > 0
    without = planned(replace(config, extra_drafts=extra[0]))
    assert "extra draft weights" not in without
    assert without["medusa weights"] == parts["medusa weights"]
