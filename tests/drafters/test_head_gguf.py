"""Heads of EAGLE-3 and DFlash in GGUF files: they draft what the folders draft that they were made of."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from torch import Tensor

from drafters import published as they
from drafters.published import DRAFT_IDS, EAGLE_3, EPS, FFN, HEAD_DIM, HEADS, KV_HEADS, WIDTH
from drafters.test_published_blocks import DFLASH, dflash_weights, published
from drafters.toys import members_of
from forerun import LLM, BadOption, SamplingParams
from forerun.drafters.shared import head_gguf
from forerun.errors import UnsupportedModel, UserError
from models.conftest import random_weights
from models.gguf_files import byte_vocabulary, write_model, write_tensors
from support import rounds_of
from tiny import tiny_config, write_tiny

PROMPT = [5, 9, 40, 8, 100, 3] * 3
LAYERS = [2, 4, 5]  # whose input a head of EAGLE-3 reads
NAMES = {
    "hidden_norm": "attn_norm_2",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
VOCABULARY = {key: value[:257] if isinstance(value, list) else value for key, value in byte_vocabulary().items()}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("target") / "model", num_layers=8))


def rows(weight: Tensor, heads: int | None = None) -> np.ndarray[Any, Any]:
    """A tensor; of q and k of a llama the halves of each head in turn, as llama.cpp stores them."""
    numbers = weight.float().numpy()
    if heads is None:
        return numbers
    halves = numbers.reshape(heads, 2, len(numbers) // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(numbers.shape))


def eagle_weights() -> dict[str, Tensor]:
    return they.with_ids(they.random_weights(they.eagle_3_shapes()))


def write_eagle(
    path: Path,
    weights: Mapping[str, Tensor],
    kind: str = "F32",
    vocabulary: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """A head as llama.cpp's converter writes it. kind: of the matrix before the block."""
    tensors = dict[str, tuple[str, Any]]()
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if name == "d2t":
            tensors["d2t"] = "I64", DRAFT_IDS.numpy()
        elif module.startswith("midlayer."):
            inner = module.removeprefix("midlayer.")
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(inner)
            tensors[f"blk.0.{NAMES[inner]}.weight"] = "F32", rows(weight, heads)
        elif module in ("fc", "norm", "lm_head"):
            theirs = {"fc": "fc", "norm": "output_norm", "lm_head": "output"}[module]
            tensors[f"{theirs}.weight"] = "F32", rows(weight)
    if kind != "F32":
        tensors["fc.weight"] = kind, gguf.quants.quantize(tensors["fc.weight"][1], gguf.GGMLQuantizationType[kind])
    own = {"block_count": 1, "context_length": 256, "embedding_length": WIDTH, "feed_forward_length": FFN,
           "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
           "attention.value_length": HEAD_DIM, "attention.layer_norm_rms_epsilon": EPS, "rope.freq_base": 10000.0,
           "rope.dimension_count": HEAD_DIM, "vocab_size": 257, "target_layers": LAYERS, "target_hidden_size": WIDTH,
           **more}  # fmt: skip
    metadata = {f"eagle3.{key}": value for key, value in own.items()} | (vocabulary or VOCABULARY)
    write_tensors(path, tensors, metadata, "eagle3")
    return path


def write_dflash(path: Path, weights: Mapping[str, Tensor]) -> Path:
    outer = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
    tensors = dict[str, tuple[str, Any]]()
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module in outer:
            theirs = outer[module]
        else:
            _, number, inner = module.split(".", 2)
            theirs = f"blk.{number}.{NAMES[inner]}"
        tensors[f"{theirs}.weight"] = "F32", rows(weight)
    c = DFLASH
    own = {"block_count": 2, "context_length": c["max_position_embeddings"], "embedding_length": c["hidden_size"],
           "feed_forward_length": c["intermediate_size"], "attention.head_count": c["num_attention_heads"],
           "attention.head_count_kv": c["num_key_value_heads"], "attention.key_length": c["head_dim"],
           "attention.value_length": c["head_dim"], "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
           "rope.freq_base": c["rope_theta"], "block_size": c["block_size"],
           "target_layers": [layer + 1 for layer in c["dflash_config"]["target_layer_ids"]]}  # fmt: skip
    metadata = {f"dflash.{key}": value for key, value in own.items()} | VOCABULARY
    metadata["tokenizer.ggml.mask_token_id"] = c["dflash_config"]["mask_token_id"]
    write_tensors(path, tensors, metadata, "dflash")
    return path


def drafts_of(target: str, draft: str, **options: Any) -> list[list[int]]:
    """What is drafted for a text, round by round."""
    with LLM(target, draft=draft, pacing="fixed", spec_length=4, dtype="float32", max_seq_len=128, **options) as llm:
        rounds = rounds_of(llm)
        llm.generate([PROMPT], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    return [list(one.tokens) for one in rounds if one.tokens]


def test_a_file_of_eagle_drafts_as_its_folder(target: str, tmp_path: Path) -> None:
    weights = eagle_weights()
    folder = they.write(tmp_path / "folder", {**EAGLE_3, "eagle_aux_hidden_state_layer_ids": LAYERS}, weights)
    file = write_eagle(tmp_path / "head.gguf", weights)
    drafts = drafts_of(target, f"eagle:path={folder},search=none")
    assert len({*map(tuple, drafts)}) > 2
    assert drafts_of(target, f"eagle:path={file},search=none") == drafts
    other = write_eagle(tmp_path / "other.gguf", weights, target_layers=[1, 4, 5])
    assert drafts_of(target, f"eagle:path={other},search=none") != drafts
    rounded = write_eagle(tmp_path / "rounded.gguf", weights, "Q8_0")
    assert len(drafts_of(target, f"eagle:path={rounded},search=none")) > 2


def test_a_file_of_dflash_drafts_as_its_folder(target: str, tmp_path: Path) -> None:
    weights = dflash_weights()
    folder = published(tmp_path / "folder", DFLASH, weights)
    file = write_dflash(tmp_path / "head.gguf", weights)
    drafts = drafts_of(target, f"dflash:path={folder}")
    assert len({*map(tuple, drafts)}) > 2
    assert drafts_of(target, f"dflash:path={file}") == drafts


def test_it_is_unpacked_once_and_again_where_it_changes(tmp_path: Path) -> None:
    file = write_eagle(tmp_path / "head.gguf", eagle_weights())
    folder = Path(head_gguf.unpacked(str(file), "eagle"))
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert Path(head_gguf.unpacked(str(file), "eagle")) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    write_eagle(file, eagle_weights(), target_layers=[1, 2, 3])
    assert Path(head_gguf.unpacked(str(file), "eagle")) != folder
    assert not folder.exists()


def test_what_is_refused(target: str, tmp_path: Path) -> None:
    file = write_eagle(tmp_path / "head.gguf", eagle_weights())
    with pytest.raises(BadOption, match="which dflash does not read: name it as eagle:path=FILE"):
        LLM(target, draft=f"dflash:path={file}", max_seq_len=64)
    other = write_eagle(tmp_path / "other.gguf", eagle_weights(), target_hidden_size=48)
    with pytest.raises(BadOption, match="reads rows of 48, and the target has rows of 32: name a head of this target"):
        LLM(target, draft=f"eagle:path={other}", max_seq_len=64)
    for wrong in ({"target_layers": "many"}, {"target_layers": [float("nan")] * 3}, {"norm_before_fc": "yes"}):
        broken = write_eagle(tmp_path / "broken.gguf", eagle_weights(), **wrong)
        with pytest.raises(UserError):
            LLM(target, draft=f"eagle:path={broken}", max_seq_len=64)
    less = {name: weight for name, weight in eagle_weights().items() if "up_proj" not in name}
    short = write_eagle(tmp_path / "less.gguf", less)
    with pytest.raises(UnsupportedModel, match=r"has no tensor midlayer\.mlp\.up_proj\.weight"):
        LLM(target, draft=f"eagle:path={short}", max_seq_len=64)


def test_a_head_is_found_beside_a_target_in_a_file(tmp_path: Path) -> None:
    """By its name, and by how wide its target's rows are; what is named is taken first."""
    spec = replace(tiny_config("llama", num_layers=8), vocab_size=258)
    target = tmp_path / "some-model-Q8_0.gguf"
    write_model(target, spec, random_weights(spec))
    assert "eagle" not in members_of(target)
    write_eagle(tmp_path / "another-eagle3.gguf", eagle_weights(), target_hidden_size=48)
    assert "eagle" not in members_of(target)
    write_eagle(tmp_path / "some-model-eagle3.gguf", eagle_weights(), vocabulary=byte_vocabulary())
    with LLM(str(target), max_seq_len=64) as llm:
        assert type(llm.engine.drafter.first).__name__ == "EagleDrafter"
    assert "eagle" not in members_of(target, draft="suffix")
