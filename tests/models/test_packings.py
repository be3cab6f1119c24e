"""GPTQ, AWQ, FP8 and compressed-tensors: the weights of a file, exactly, and what is refused.

compressed-tensors is compared with its own package, FP8 with transformers, which makes numbers of its blocks. GPTQ and
AWQ files are packed here, word by word, as their formats are described, and compared with the weights that went in:
their packages need a GPU.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from forerun import LLM, SamplingParams, native
from forerun.blocks import weight_shapes
from forerun.errors import UnsupportedModel
from forerun.host_tensor import HostTensor
from forerun.models.loading import load_checkpoint
from forerun.models.opened import read_config, under_our_names
from forerun.models.source import open_source, safetensors
from forerun.models.weights import StoredWeights
from forerun.ops.cpu import CpuOps
from forerun.ops.cuda import packed as cuda_packed
from forerun.ops.cuda.packed import Packed
from forerun.ops.quantised import QuantisedMatrix
from forerun.ops.torch_tensors import tensor_of

RAW = {"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
       "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
       "tie_word_embeddings": False}  # fmt: skip
Quantise = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]  # name, shape -> its tensors, its weights


def write(folder: Path, config: dict[str, Any], quantise: Quantise) -> dict[str, Tensor]:
    """Write a checkpoint whose projections are quantised, and return all its weights."""
    generator = torch.Generator().manual_seed(3)
    tensors, weights = {}, {}
    for name, shape in weight_shapes(read_config(RAW)).items():
        weight = torch.randn(shape, generator=generator) * 0.2
        if "_proj" in name:
            parts, weights[name] = quantise(name.removesuffix(".weight"), weight)
            tensors.update(parts)
        else:
            tensors[name] = weights[name] = weight
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(RAW | {"quantization_config": config}))
    return weights


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Write one tensor of a checkpoint anew. None = it is left out."""
    others = {other: own for other, own in load_file(folder / "model.safetensors").items() if other != name}
    save_file(others | ({} if tensor is None else {name: tensor}), folder / "model.safetensors", {"format": "pt"})


def assert_loads(folder: Path, weights: dict[str, Tensor]) -> None:
    """Dense, and packed by the native operators and for CUDA where they can pack the scheme."""
    model = load_checkpoint(folder, dtype="float32").model
    source = open_source(folder)
    for name, weight in weights.items():
        assert torch.equal(model.weights[name], weight.float()), name
        scheme = source.tensors[name].scheme
        if native.extension() is not None and scheme is not None and CpuOps().packs_scheme(scheme):
            matrix = source.quantised(name)  # type: ignore[attr-defined]
            assert np.array_equal(CpuOps().pack(matrix).unpack().float32(), weight.float()), name
        taken = StoredWeights(source, "bfloat16", cuda_packed.packs)[name]
        if isinstance(taken, QuantisedMatrix):
            laid = Packed.of(taken, torch.device("cpu")).float()
            # Of 8 bits a zero point becomes a minimum, beside which the last bits are others.
            assert float((laid - weight.float()).abs().max()) <= 2.0**-20 * float(weight.abs().max()), name


def integers(shape: tuple[int, ...], most: int, seed: int) -> Tensor:
    return torch.randint(0, most + 1, shape, generator=torch.Generator().manual_seed(seed))


def words(codes: Tensor, bits: int = 4) -> Tensor:
    """Integers of so many bits [R, C] as int32 words along C, lowest first."""
    per_word = 32 // bits
    packed = np.zeros((len(codes), codes.shape[1] // per_word), np.uint64)
    for i in range(codes.shape[1]):
        packed[:, i // per_word] |= codes[:, i].numpy().astype(np.uint64) << np.uint64(bits * (i % per_word))
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


# ------------------------------------------------------------------------------------------------------------- GPTQ


def gptq(bits: int, group: int, is_v1: bool, is_permuted: bool = False) -> Quantise:
    """Words along the inputs for weights [I, O], along the outputs for zero points; version 1 stores them less 1.

    is_permuted: whether an input is of any group, as with desc_act.
    """

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_out, num_in = weight.shape
        size, most = group if group > 0 else num_in, (1 << bits) - 1
        groups = torch.arange(num_in) // size
        if is_permuted:
            groups = groups[torch.randperm(num_in, generator=torch.Generator().manual_seed(len(name)))]
        codes, zeros = integers((num_in, num_out), most, 1), integers((num_in // size, num_out), most, 2)
        zeros = zeros.clamp(min=1)
        scales = (torch.rand(num_in // size, num_out) + 0.1).half()
        dense = torch.stack([(codes[i] - zeros[g]) * scales[g].float() for i, g in enumerate(groups.tolist())])
        parts = {"qweight": words(codes.T, bits).T.contiguous(), "qzeros": words(zeros - int(is_v1), bits)}
        parts |= {"scales": scales, "g_idx": groups.int()}
        return {f"{name}.{part}": tensor for part, tensor in parts.items()}, dense.T.contiguous()

    return quantise


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 64, -1])
@pytest.mark.parametrize("version", [None, "gptq_v2"])
def test_gptq(tmp_path: Path, bits: int, group: int, version: str | None) -> None:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False}
    config |= {"checkpoint_format": version} if version else {}
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": bits}))  # what older tools leave beside it
    assert_loads(tmp_path, write(tmp_path, config, gptq(bits, group, is_v1=version is None)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("desc_act", [True, False])
def test_gptq_with_inputs_in_another_order(
    tmp_path: Path, bits: int, desc_act: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the setting says, the order in the file counts; such a matrix becomes numbers, with a line."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": desc_act}
    assert_loads(tmp_path, write(tmp_path, config, gptq(bits, 16, True, is_permuted=True)))
    assert (
        f"{tmp_path} has 14 matrices of {bits}-bit integers with inputs in another order (g_idx), which become numbers "
        "while they are loaded: quantization=int8 rounds them"
    ) in [record.getMessage() for record in caplog.records]
    assert_rounds(tmp_path)


def assert_rounds(folder: Path) -> None:
    """What becomes numbers may be rounded to 8 bits while it is read."""
    models = [load_checkpoint(folder, dtype="float32", quantization=q).model for q in (None, "int8:group=16")]
    dense, rounded = (model.weights["model.layers.0.mlp.down_proj.weight"] for model in models)  # type: ignore[attr-defined]
    assert 0 < float((dense - rounded).abs().max()) < float(dense.abs().max()) / 100


def test_inputs_in_order_stay_packed_whatever_the_setting_says(tmp_path: Path) -> None:
    assert_loads(tmp_path, write(tmp_path, GPTQ | {"desc_act": True}, gptq(4, 32, True)))
    assert open_source(tmp_path).tensors["model.layers.1.mlp.up_proj.weight"].scheme is not None


@pytest.mark.parametrize("wrong", [-1, 4])
def test_a_group_that_is_not_there_is_refused(tmp_path: Path, wrong: int) -> None:
    write(tmp_path, GPTQ | {"desc_act": True}, gptq(4, 32, True))
    order = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.down_proj.g_idx"]
    order[7] = wrong
    change(tmp_path, "model.layers.1.mlp.down_proj.g_idx", order)
    with pytest.raises(UnsupportedModel, match=r"matrix model.layers.1.mlp.down_proj .*its g_idx names groups that"):
        load_checkpoint(tmp_path)


# -------------------------------------------------------------------------------------------------------------- AWQ


def awq(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Words along the outputs; nibble i of a word belongs to output 0, 2, 4, 6, 1, 3, 5, 7."""
    num_out, num_in = weight.shape
    codes, zeros = integers((num_in, num_out), 15, 4), integers((num_in // 32, num_out), 15, 5)
    scales = (torch.rand(num_in // 32, num_out) + 0.1).half()

    def in_order(values: Tensor) -> Tensor:
        return words(values.view(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1))

    dense = (codes - zeros.repeat_interleave(32, 0)) * scales.float().repeat_interleave(32, 0)
    parts = {"qweight": in_order(codes), "qzeros": in_order(zeros), "scales": scales}
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}, dense.T.contiguous()


def test_awq(tmp_path: Path) -> None:
    assert_loads(tmp_path, write(tmp_path, AWQ, awq))


# ----------------------------------------------------------------------------------------------- compressed-tensors


def scheme(bits: int, symmetric: bool, group: int | None) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    weights |= {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    return {"targets": ["Linear"], "weights": weights}


def compressed(kind: str, group: dict[str, Any]) -> Quantise:
    """Compress with the package, and decompress with it."""
    package = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    assert package
    made, compressor = QuantizationScheme(**group), BaseCompressor.get_value_from_registry(kind)
    args = group["weights"]

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.reshape(len(weight), -1, args.get("group_size", weight.shape[1]))
        low, high = groups.amin(-1), groups.amax(-1)
        most = (1 << args["num_bits"]) - 1
        state = {"weight": weight, "weight_scale": (high - low) / most}
        if args["symmetric"]:
            state["weight_scale"] = groups.abs().amax(-1) / (448 if args["type"] == "float" else most // 2)
        else:
            zeros = torch.round(-low / state["weight_scale"]) - (1 << (args["num_bits"] - 1))
            state["weight_zero_point"] = zeros.clamp(-(1 << (args["num_bits"] - 1)), most // 2).to(torch.int8)
        stored = compressor.compress(state, made)
        dense = compressor.decompress(dict(stored), made)["weight"]
        return {f"{name}.{part}": tensor.contiguous() for part, tensor in stored.items()}, dense

    return quantise


@pytest.mark.parametrize(
    ("kind", "bits", "symmetric", "group"),
    [
        ("pack-quantized", 4, True, 32),
        ("pack-quantized", 4, False, 16),
        ("pack-quantized", 4, False, None),
        ("pack-quantized", 8, True, None),
        ("pack-quantized", 8, False, 64),
        ("int-quantized", 8, True, None),
        ("int-quantized", 8, False, 32),
        ("float-quantized", 8, True, None),
    ],
)
def test_compressed_tensors(tmp_path: Path, kind: str, bits: int, symmetric: bool, group: int | None) -> None:
    one = scheme(bits, symmetric, group)
    one["weights"]["type"] = "float" if kind == "float-quantized" else "int"
    config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": one}}
    assert_loads(tmp_path, write(tmp_path, config | {"quantization_status": "compressed"}, compressed(kind, one)))


@pytest.mark.parametrize("order", ["group", "dynamic", "none"])
def test_compressed_tensors_with_inputs_in_another_order(tmp_path: Path, order: str) -> None:
    """As versions of the package up to 0.13 wrote it: an input has the group that g_idx names, and -1 names none."""

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_out, num_in = weight.shape
        groups = torch.arange(num_in) // 16
        if order != "none":
            groups = groups[torch.randperm(num_in, generator=torch.Generator().manual_seed(num_in))]
        codes, zeros = integers((num_out, num_in), 15, 1), integers((num_out, num_in // 16), 15, 2)
        scales = torch.rand(num_out, num_in // 16) + 0.1
        dense = torch.stack([(codes[:, i] - zeros[:, g]) * scales[:, g] for i, g in enumerate(groups.tolist())], dim=1)
        parts = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        parts["weight_zero_point"] = words(zeros.T.contiguous()).T.contiguous()
        parts["weight_g_idx"] = groups.int() if order != "none" else torch.full((num_in,), -1, dtype=torch.int32)
        return {f"{name}.{part}": tensor for part, tensor in parts.items()}, dense

    one = scheme(4, False, 16)
    one["weights"]["actorder"] = "group" if order == "none" else order
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": one}}
    assert_loads(tmp_path, write(tmp_path, config, quantise))


# --------------------------------------------------------------------------------------------------------------- FP8


def fp8(block: tuple[int, int] | None, ending: str = "weight_scale_inv", by_row: bool = False) -> Quantise:
    """Blocks of so many rows and columns, rows, or a whole matrix; what rounds inputs lies beside it."""

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_out, num_in = weight.shape
        height, width = block or ((1, num_in) if by_row else (num_out, num_in))
        scales = torch.rand(-(-num_out // height), -(-num_in // width), generator=torch.Generator().manual_seed(9))
        stored = (weight * 100).to(torch.float8_e4m3fn)
        dense = stored.float() * scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[:num_out, :num_in]
        scales = scales if block or by_row else scales.reshape(())
        parts = {"weight": stored, ending: scales, "input_scale": torch.tensor(1.0)}
        return {f"{name}.{part}": tensor for part, tensor in parts.items()}, dense

    return quantise


FP8: dict[str, tuple[dict[str, Any], Quantise]] = {
    "blocks": ({"quant_method": "fp8", "weight_block_size": [32, 16]}, fp8((32, 16))),
    "blocks that end beyond": ({"quant_method": "fp8", "weight_block_size": [24, 48]}, fp8((24, 48))),
    "whole": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8(None, "weight_scale")),
    "rows": ({"quant_method": "fbgemm_fp8"}, fp8(None, "weight_scale", by_row=True)),
}


@pytest.mark.parametrize("case", FP8)
def test_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, caplog: pytest.LogCaptureFixture) -> None:
    """A few rows at a time."""
    monkeypatch.setattr(safetensors, "BLOCK_WEIGHTS", 700)
    assert_loads(tmp_path, write(tmp_path, *FP8[case]))
    assert "has 14 matrices of 8-bit floats, which become numbers while they are loaded: quantization" in caplog.text
    assert_rounds(tmp_path)


@pytest.mark.parametrize("case", FP8)
def test_fp8_is_packed_where_groups_divide_a_row(tmp_path: Path, case: str) -> None:
    """For operators that compute with it; 24 by 48 divide none, and a number that is none is refused there, too."""
    write(tmp_path, *FP8[case])
    name = "model.layers.1.mlp.down_proj.weight"

    def taken() -> HostTensor | QuantisedMatrix:
        return StoredWeights(open_source(tmp_path), "bfloat16", cuda_packed.packs)[name]

    found = taken()
    assert isinstance(found, HostTensor) == (case == "blocks that end beyond")
    if isinstance(found, QuantisedMatrix):
        assert Packed.of(found, torch.device("cpu")).kind == "fp8"
        change(tmp_path, name, torch.full(found.shape, torch.nan).to(torch.float8_e4m3fn))
        broken = taken()
        assert isinstance(broken, QuantisedMatrix)
        with pytest.raises(UnsupportedModel, match=f"{name} in .* holds NaN"):
            Packed.of(broken, torch.device("cpu"))


def test_fp8_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}
    weights = write(tmp_path, config, fp8((32, 16)))
    tensors, theirs = load_file(tmp_path / "model.safetensors"), Fp8Dequantize(None)
    for name in weights:
        if "_proj" in name:
            expected = theirs._dequantize_one(tensors[name], tensors[f"{name}_scale_inv"], torch.float32)
            assert torch.equal(weights[name], expected), name


BROKEN_FP8 = [
    ("weight_scale_inv", None, "it has no scales, or is no matrix"),
    ("weight_scale_inv", torch.ones(3, 3), r"its scales have shape \[3, 3\], which fits no matrix of \[32, 64\]"),
    ("weight_scale_inv", torch.ones(1, 4, dtype=torch.int32), "its scales have type I32"),
    ("weight_scale_inv", torch.full((1, 4), torch.nan), "scales that are no finite numbers"),
    ("weight", torch.ones(32, 64, 1).to(torch.float8_e4m3fn), "it has no scales, or is no matrix"),
    ("weight", torch.full((32, 64), torch.nan).to(torch.float8_e4m3fn), "NaN"),
    ("weight", torch.ones(32, 64).to(torch.float8_e5m2), "has type F8_E5M2"),
]


# ------------------------------------------------------------------------------------------------------------ MXFP4

GPT_OSS = {
    **RAW,
    "model_type": "gpt_oss",
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}
EXPERTS = "model.layers.0.mlp.experts."


def write_mxfp4(folder: Path, **changes: Tensor | None) -> dict[str, Tensor]:
    """Write a checkpoint of gpt-oss as it is published, random bytes in place of experts, and return its tensors.

    changes: of parts of the experts of layer 0, None = it is left out.
    """
    generator, found = torch.Generator().manual_seed(5), {}
    for name, shape in weight_shapes(read_config(GPT_OSS)).items():
        if ".experts." not in name:
            theirs = name.replace("mlp.gate", "mlp.router").replace("sinks.weight", "sinks")
            found[theirs] = torch.randn(shape, generator=generator).bfloat16()
    num, hidden, size = 3, RAW["hidden_size"], RAW["intermediate_size"]
    for i in range(RAW["num_hidden_layers"]):
        for part, num_out, num_in in (("gate_up", 2 * size, hidden), ("down", hidden, size)):
            own = f"model.layers.{i}.mlp.experts.{part}_proj_"
            shape = (num, num_out, num_in // 32)
            found[f"{own}blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            found[f"{own}scales"] = torch.randint(118, 126, shape, dtype=torch.uint8, generator=generator)
            found[f"{own}bias"] = torch.randn(num, num_out, generator=generator).bfloat16()
    for part, tensor in changes.items():
        found.pop(EXPERTS + part)
        found |= {} if tensor is None else {EXPERTS + part: tensor}
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(GPT_OSS))
    return found


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows at a time; the experts stay packed where that is possible, and have the same weights there."""
    monkeypatch.setattr(safetensors, "BLOCK_WEIGHTS", 5000)
    write_mxfp4(tmp_path)
    how = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=how).state_dict()
    weights = load_checkpoint(tmp_path, dtype="float32").model.weights
    for i in range(3):
        whole, down = (theirs[f"{EXPERTS}{part}_proj"][i].T for part in ("gate_up", "down"))
        for part, weight in {"gate": whole[::2], "up": whole[1::2], "down": down}.items():
            assert torch.equal(weights[f"{EXPERTS}{i}.{part}_proj.weight"], weight), part
        assert torch.equal(weights[f"{EXPERTS}{i}.up_proj.bias"], theirs[f"{EXPERTS}gate_up_proj_bias"][i][1::2])
    if native.extension() is None:
        return
    packed = load_checkpoint(tmp_path, ops=CpuOps()).model
    for i in range(3):
        name = f"{EXPERTS}{i}"
        assert {packed.matrices[f"{name}.{part}"].bits for part in ("gate_up", "down")} == {(4,)}
        for part in ("gate", "up", "down"):
            assert np.array_equal(packed.weight(f"{name}.{part}_proj.weight"), weights[f"{name}.{part}_proj.weight"])


@pytest.mark.skipif(native.extension() is None, reason="the native extension is not there")
def test_drafts_do_not_change_what_a_model_of_mxfp4_says(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    prompts = [[1 + seed, 2, 3, 4, 1 + seed, 2, 3] for seed in range(8)]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"ops": "native", "max_seq_len": 64, "pacing": "fixed"}
    llms = [LLM(str(tmp_path), draft=draft, **options) for draft in ("none", "lookup")]
    plain, drafted = (llm.generate(prompts, params) for llm in llms)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert sum(out.report.num_accepted for out in drafted) > 0


def test_names_of_experts_are_read_once(tmp_path: Path) -> None:
    """Each of the thousands of matrices of a mixture is looked up among them."""
    write_mxfp4(tmp_path)
    source = under_our_names(open_source(tmp_path), read_config(GPT_OSS))
    assert source.tensors is source.tensors
    assert source.tensors.keys() == weight_shapes(read_config(GPT_OSS)).keys()


NOT_A_NUMBER = torch.full((3, 64, 4), 255, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"down_proj_scales": None}, r"MXFP4 matrix .*down_proj_blocks.0 that is not read \(beside blocks a part is"),
        ({"down_proj_blocks": torch.zeros(3, 64, 4, 15, dtype=torch.uint8)}, "its blocks have 15 bytes"),
        ({"down_proj_scales": torch.zeros(3, 64, 3, dtype=torch.uint8)}, r"its scales has shape \[64, 3\] where"),
        ({"down_proj_scales": torch.ones(3, 64, 4)}, "its scales the type F32"),
        ({"down_proj_scales": NOT_A_NUMBER}, "scales that are no finite numbers"),
        ({"down_proj_blocks": None}, "down_proj_scales.0 in .* has type U8"),
    ],
)
def test_a_broken_mxfp4_file_is_refused(tmp_path: Path, changes: dict[str, Tensor | None], why: str) -> None:
    write_mxfp4(tmp_path, **changes)
    with pytest.raises(UnsupportedModel, match=why):
        load_checkpoint(tmp_path)


# -------------------------------------------------------------------------------------------------------- refusals

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
PACKED |= {"config_groups": {"group_0": scheme(4, True, 32)}}


def with_weights(**settings: Any) -> dict[str, Any]:
    group = scheme(4, True, 32)
    return PACKED | {"config_groups": {"group_0": group | {"weights": group["weights"] | settings}}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GPTQ | {"bits": 3}, "bits=3 in quantization_config"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (AWQ | {"version": "gemv"}, "version='gemv'"),
        (AWQ | {"zero_point": False}, "zero_point=False"),
        (PACKED | {"format": "float-quantized"}, "num_bits=4 in weights of group_0"),
        (PACKED | {"format": "marlin-24"}, "format='marlin-24'"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
        (PACKED | {"config_groups": {}}, "config_groups={}"),
        (with_weights(num_bits=3), "num_bits=3 in weights of group_0 of quantization_config"),
        (with_weights(actorder="input"), "actorder='input' in weights of group_0"),
        (with_weights(strategy="tensor"), "strategy='tensor'"),
        ({"quant_method": "modelopt"}, "quant_method='modelopt' in quantization_config"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size=\\[128\\] in quantization_config"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme='odd' in quantization_config"),
        ({"quant_method": ["gptq"]}, "quant_method=\\['gptq'\\]"),
    ],
)
def test_what_is_not_read_is_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"^config.json sets {said}.*: name the unquantised original, or one "):
        read_config(RAW | {"quantization_config": config})


BROKEN_GPTQ = [
    ("scales", None, "beside g_idx, qweight, .* a part is missing"),
    ("qzeros", None, "beside g_idx, qweight, .* a part is missing"),
    ("scales", torch.ones(2, 31).half(), r"its scales has shape \[2, 31\] where \[2, 32\] fits"),
    ("scales", torch.ones(0, 32).half(), "its qzeros has shape"),
    ("scales", torch.ones(2, 32, dtype=torch.int8), "its scales have type I8"),
    ("qzeros", torch.zeros(2, 5, dtype=torch.int32), r"its qzeros has shape \[2, 5\] where \[2, 4\] fits"),
    ("qweight", torch.zeros(8, dtype=torch.int32), "a part is missing, or has another shape|not enough"),
    ("scales", torch.full((2, 32), torch.inf).half(), "scales that are no finite numbers"),
]
BROKEN = [(FP8["blocks"], *case) for case in BROKEN_FP8] + [((GPTQ, gptq(4, 32, True)), *case) for case in BROKEN_GPTQ]


@pytest.mark.parametrize(("how", "part", "tensor", "why"), BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, how: Any, part: str, tensor: Tensor | None, why: str) -> None:
    write(tmp_path, *how)
    change(tmp_path, f"model.layers.0.self_attn.k_proj.{part}", tensor)
    with pytest.raises(UnsupportedModel, match=why):
        load_checkpoint(tmp_path)


def test_rows_come_as_they_are_stored(tmp_path: Path) -> None:
    """What a packed operator reads has the file's own integers and scales, in order."""
    weights = write(tmp_path, GPTQ, gptq(4, 32, True))
    source: Any = open_source(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    matrix = source.quantised(name)
    assert (matrix.shape, str(matrix.scheme), matrix.scheme.offset) == ((64, 128), "int4, group 32", "zero")
    (rows,) = matrix.blocks()
    assert rows.codes.max() == 15
    scales = load_file(tmp_path / "model.safetensors")[name.replace("weight", "scales")].T
    assert torch.equal(tensor_of(rows.scales), scales)
    assert np.array_equal(rows.dequantise(), weights[name])
