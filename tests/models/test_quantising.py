"""Weights rounded while they are loaded, and checkpoints that keep them: how far they are off, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.quality import QualityPlan, measure, text_ids
from forerun import LLM, SamplingParams, ops
from forerun.blocks import Plain, resized
from forerun.cli.main import main
from forerun.config import EngineConfig, Quantization
from forerun.engine.opened import SHIPPED_DRAFT, SHIPPED_TARGET
from forerun.errors import BadOption
from forerun.host_tensor import Floats, HostTensor
from forerun.models.loading import load_checkpoint
from forerun.ops.quantising import quantise, scheme_of
from models.conftest import random_weights
from saved import save_checkpoint
from tiny import write_tiny

ENDS = ("model.embed_tokens.weight", "lm_head.weight")
CONFIG = Plain("llama", 96, 64, 2, 4, 2, 16, 128, 1e-5, 128).spec


def write(folder: Path, *, tied: bool = False) -> Path:
    """A random checkpoint whose rows 64 divides."""
    config = resized(CONFIG, tied=tied)
    save_checkpoint(folder, config, random_weights(config, 1), torch.bfloat16)
    return folder


def command(*words: object) -> int:
    """Run the command line; returns its exit code."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return int(str(end.value.code))


# -------------------------------------------------------------------------------------------------------- rounding


def random_rows(seed: int = 0) -> Floats:
    return torch.randn(40, 128, generator=torch.Generator().manual_seed(seed)).numpy()


def test_eight_bits_are_off_by_half_a_step_at_most() -> None:
    rows = random_rows()
    rows[3, 32:64] = 0
    rows[4, 5] = 1000.0  # spoils its own group alone
    found = quantise(rows, scheme_of(8, 32))
    # A scale that was rounded down in bfloat16 clips the largest weight of a group by up to 127 / 256 of a step more.
    assert (np.abs(found.dequantise() - rows) <= found.scales.float32().repeat(32, 1) * 1.001).all()
    assert not found.dequantise()[3, 32:64].any()
    assert np.abs(found.dequantise()[4, 32:] - rows[4, 32:]).max() < 0.02
    assert (found.zeros == 128).all()


def test_four_bits_use_their_range() -> None:
    """One-sided groups have a zero point at an end, and the search never does worse than the whole range."""
    rows = random_rows()
    rows[1] = np.abs(rows[1])
    rows[2] = -np.abs(rows[2])
    rows[3, 32:64] = 0
    found = quantise(rows, scheme_of(4, 32))
    assert (found.zeros[1] == 0).all()
    assert (found.zeros[2] == 15).all()
    assert not found.dequantise()[3, 32:64].any()
    groups = rows.reshape(40, 4, 32)
    low, high = np.minimum(groups.min(-1, keepdims=True), 0), np.maximum(groups.max(-1, keepdims=True), 0)
    step = HostTensor.of(np.maximum((high - low) / np.float32(15), 1e-9)).to("bfloat16").float32()
    zero = np.rint(-low / step)
    whole = (np.rint(groups / step + zero).clip(0, 15) - zero) * step
    errors, plain = (np.square(x.reshape(40, 4, 32) - groups).sum(-1) for x in (found.dequantise(), whole))
    assert (errors <= plain * 1.01).all()
    assert errors.sum() < 0.95 * plain.sum()


# --------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(("text", "bits"), [("int8", 8), ("int4", 4), ("int4:group=64", 4), ("int8:group=16", 8)])
def test_matrices_are_rounded_and_the_rest_is_not(tmp_path: Path, text: str, bits: int) -> None:
    dense = load_checkpoint(write(tmp_path / "dense"), dtype="float32").model.weights
    loaded = load_checkpoint(tmp_path / "dense", dtype="float32", quantization=text)
    assert loaded.quantization == text
    group = Quantization.parse(text).group
    for name, weight in loaded.model.weights.items():
        if weight.ndim == 1:
            assert torch.equal(weight, dense[name]), name
            continue
        scheme = scheme_of(8 if name in ENDS else bits, group)
        assert np.array_equal(weight, quantise(dense[name].numpy(), scheme).dequantise()), name


@pytest.mark.parametrize("text", ["int8:group=16", "int4:group=32"])
def test_experts_are_rounded_and_their_router_is_not(tmp_path: Path, text: str) -> None:
    """While they are loaded, and of a model in memory."""
    folder = write_tiny(tmp_path / "moe", "qwen3_moe")
    prompts = [[5, 80, 3], list(range(40, 60))]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    with LLM(str(folder), draft="none", quantization=text) as llm:
        texts = [out.token_ids for out in llm.generate(prompts, params)]
        model = llm.engine.runner.model
    name = "model.layers.1.mlp.gate.weight"
    stored = load_checkpoint(folder, dtype="float32").model.weight(name)  # type: ignore[attr-defined]
    assert np.array_equal(model.weight(name), HostTensor.of(stored).to("bfloat16").float32())  # type: ignore[attr-defined]
    expert = name.replace("gate.weight", "experts.3.up_proj.weight")
    assert len(np.unique(model.weight(expert)[0, :16])) <= 16  # type: ignore[attr-defined]
    dense = LLM(str(folder), draft="none", dtype="bfloat16").engine.runner.model
    if hasattr(dense, "rounded"):
        again = dense.rounded(Quantization.parse(text))
        assert np.array_equal(again.weight(name), model.weight(name))  # type: ignore[attr-defined]
        assert len(np.unique(again.weight(expert)[0, :16])) <= 16
    with LLM(str(folder), draft="suffix", quantization=text, spec_length=4) as llm:
        assert [out.token_ids for out in llm.generate(prompts, params)] == texts


def test_target_and_draft_are_rounded_independently() -> None:
    """The draft's own option; a text stays the plain decoder's, whichever of the two is rounded."""
    params = SamplingParams(max_tokens=12, temperature=0)
    options = {"ops": "reference_row_by_row", "dtype": "float32", "spec_length": 3}
    texts = {}
    for target in (None, "int4"):
        for draft in ("none", f"model:path={SHIPPED_DRAFT},quantization=int8", f"model:path={SHIPPED_DRAFT}"):
            llm = LLM(str(SHIPPED_DRAFT), draft=draft, quantization=target, **options)
            outs = llm.generate(["def fib(n):\n    if n", "import os\n", "class Shape:", '"""Read the'], params)
            texts[target, draft] = [out.token_ids for out in outs]
    plain, rounded = ([texts[given] for given in texts if given[0] == target] for target in (None, "int4"))
    assert plain[0] == plain[1] == plain[2]
    assert rounded[0] == rounded[1] == rounded[2]
    assert plain[0] != rounded[0]
    draft = load_checkpoint(SHIPPED_DRAFT, dtype="float32", with_tokenizer=True)
    with pytest.raises(BadOption, match=r"quantization='int8' contradicts the loaded model \(None\)"):
        LLM(load_checkpoint(SHIPPED_TARGET, with_tokenizer=True), quantization="int8")
    assert draft.quantization is None


@pytest.mark.parametrize("text", ["int3", "int4:32", "int4:group=48", "int4:group=16", "INT8", "int8:group=0", "", "4"])
def test_other_words_are_refused(text: str) -> None:
    for make in (lambda: EngineConfig(quantization=text), lambda: LLM("shipped", draft=f"model:quantization={text}")):
        with pytest.raises(BadOption, match=r"quantization='.*' is not possible: write int8 or int4, or one with a g"):
            make()


def test_a_group_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "64")
    said = r"'int4:group=128' is not possible: groups of 128 do not divide the 64 inputs of .*; 32 and 64 do"
    with pytest.raises(BadOption, match=said):
        load_checkpoint(tmp_path / "64", quantization="int4:group=128")
    with pytest.raises(BadOption, match=r"'int4:group=32' is not possible: .* do not divide the 48 inputs .*no group"):
        load_checkpoint(write_tiny(tmp_path / "tiny"), quantization="int4")
    said = r"'int8:group=32' is not possible: .* the 48 inputs of .*_proj.weight; 16 does"
    with pytest.raises(BadOption, match=said):
        load_checkpoint(tmp_path / "tiny", quantization="int8")


# --------------------------------------------------------------------------------------------------------- quality

# Norms and the matrices that read them.
READS = {
    "input_layernorm.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "post_attention_layernorm.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}
OUTLIERS = (7, 100, 201)  # channels of the shipped target's 512


def planted(folder: Path, size: int) -> Path:
    """The shipped target in float32, with channels so many times as large as their neighbours: the same function.

    Its norms make them, and its matrices undo them.
    """
    model = load_checkpoint(SHIPPED_TARGET, dtype="float32").model
    weights, channels = dict(model.weights), list(OUTLIERS)
    for i in range(model.config.num_layers):
        for norm, names in READS.items():
            layer = f"model.layers.{i}."
            weights[layer + norm] = weights[layer + norm].clone()
            weights[layer + norm][channels] *= size
            for name in names:
                weights[layer + name] = weights[layer + name].clone()
                weights[layer + name][:, channels] /= size
    save_checkpoint(folder, model.config, weights, torch.float32, tokenizer_folder=SHIPPED_TARGET)
    return folder


@pytest.mark.parametrize("outliers", [pytest.param(False, marks=pytest.mark.parity), True])
def test_few_bits_cost_little(tmp_path: Path, outliers: bool) -> None:
    """Perplexity on held-out code: the bars of the shipped pair, with and without outliers; logits are bounded, too."""
    folder = planted(tmp_path / "planted", 100 if outliers else 1)
    given = load_checkpoint(SHIPPED_TARGET, with_tokenizer=True)
    loaded = {
        name: load_checkpoint(folder, dtype="bfloat16", ops=ops.make("auto", "cpu"), quantization=quantization)
        for name, quantization in (("bfloat16", None), ("int8", "int8"), ("int4", "int4"))
    }
    ids = text_ids(given, EngineConfig(target="shipped"), QualityPlan(num_tokens=1536))
    windows = [ids[first : first + 512] for first in range(0, len(ids), 512)]
    base, *lines = measure(loaded, windows, QualityPlan(num_prompts=0))
    assert (base.variant, base.over_base, base.logit_error, base.same_best) == ("bfloat16", 0.0, 0.0, 1.0)
    errors = (0.06, 0.08) if outliers else (0.02, 0.06)
    for line, most, error in zip(lines, (0.005, 0.04), errors, strict=True):
        assert line.over_base < most, line
        assert line.logit_error < error, line
        assert 1 - 2 * error < line.drafter_alpha < 1, line


# ---------------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize(("text", "tied"), [("int4", True), ("int8", False), ("int4:group=64", False)])
def test_a_saved_checkpoint_is_what_was_loaded(
    tmp_path: Path, text: str, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit the weights of a checkpoint that is rounded at load; and transformers reads the same."""
    source = write(tmp_path / "dense", tied=tied)
    assert command("quantize", source, tmp_path / "saved", "--quantization", text) == 0
    assert f"saved: {Quantization.parse(text)}, 0." in capsys.readouterr().out
    saved = load_checkpoint(tmp_path / "saved", dtype="float32").model
    rounded = load_checkpoint(source, dtype="float32", quantization=text).model.weights
    assert saved.weights.keys() == rounded.keys()
    for name, weight in rounded.items():
        assert torch.equal(saved.weights[name], weight), name

    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    said = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    schemes = list(QuantizationConfig(**said).config_groups.values())
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    for name in (name for name, weight in rounded.items() if weight.ndim == 2):
        prefix = name.removesuffix("weight")
        parts = {part.removeprefix(prefix): tensor for part, tensor in stored.items() if part.startswith(prefix)}
        parts["weight_scale"] = parts["weight_scale"].float()  # its products have the type of the scales
        scheme = schemes[-1 if name in ENDS else 0]
        assert torch.equal(compressor.decompress(parts, scheme)["weight"], rounded[name]), name


def test_transformers_reads_eight_bits(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    assert command("quantize", write(tmp_path / "dense", tied=True), tmp_path / "saved", "--quantization", "int8") == 0
    ours = load_checkpoint(tmp_path / "saved", dtype="float32").model.weights
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    ).state_dict()
    for name, weight in ours.items():
        assert torch.equal(theirs[name], weight.bfloat16().float()), name  # its products have the type of the scales


def test_what_cannot_be_saved_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "dense")
    assert command("quantize", source, tmp_path / "saved", "--quantization", "int8") == 0
    for arguments, said in (
        ([str(source), str(tmp_path / "saved")], "exists and is not empty: name a new one"),
        ([str(tmp_path / "saved"), str(tmp_path / "twice")], "is quantised already (lm_head.weight: int8, group 32)"),
        ([str(source), str(tmp_path / "new"), "--quantization", "int4:group=128"], "groups of 128 do not divide"),
        ([str(source), str(tmp_path / "new"), "--quantization", "fp8"], "--quantization 'fp8' is not possible"),
    ):
        capsys.readouterr()
        assert command("quantize", *arguments) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadOption, match=r"up_proj.weight in .* holds numbers that are not finite"):
        load_checkpoint(source, quantization="int4")


def test_the_folder_says_what_it_holds(tmp_path: Path) -> None:
    """config.json has the settings that other engines read; the small files are copied."""
    saved = tmp_path / "saved"
    assert command("quantize", write_tiny(tmp_path / "tiny"), saved, "--quantization", "int8:group=16") == 0
    said = json.loads((saved / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["format"]) == ("compressed-tensors", "pack-quantized")
    weights = [group["weights"] for group in said["config_groups"].values()]
    assert [(w["num_bits"], w["group_size"], w["symmetric"]) for w in weights] == [(8, 16, True)]
    assert (saved / "tokenizer.json").exists()
    llm = LLM(str(saved), draft="none")
    assert len(llm.generate(["ab"], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_t5_is_saved_under_its_published_names(tmp_path: Path) -> None:
    """What is read again is what rounding made; transformers reads it, too. Biases by distance are not rounded."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 2}
    own = transformers.T5Config(
        **sizes, num_heads=2, decoder_start_token_id=0, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    )
    module = transformers.T5ForConditionalGeneration(own).eval()
    module.save_pretrained(tmp_path / "dense")
    rounded = load_checkpoint(tmp_path / "dense", dtype="float32", quantization="int8").model.weights
    assert command("quantize", tmp_path / "dense", tmp_path / "saved", "--quantization", "int8") == 0
    again = load_checkpoint(tmp_path / "saved", dtype="float32").model.weights
    assert rounded.keys() == again.keys()
    assert all(torch.equal(again[name], weight) for name, weight in rounded.items())
    dense = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = type(module).from_pretrained(tmp_path / "saved", dtype=torch.float32, quantization_config=dense)
    source, text = torch.tensor([[5, 6, 7, 1]]), torch.tensor([[0, 8, 9]])
    with torch.no_grad():
        found = theirs(input_ids=source, decoder_input_ids=text).logits
        exact = module(input_ids=source, decoder_input_ids=text).logits
    assert not torch.equal(found, exact)
    assert torch.allclose(found, exact, atol=0.05 * float(exact.abs().max()))
