"""Checkpoint folders: shards, ties, types, end ids, and everything refused at the door."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModel, AutoModelForCausalLM

from forerun import native, ops as operators
from forerun.blocks import weight_shapes
from forerun.errors import BadOption, NotFound, UnsupportedModel, UserError
from forerun.models.loading import load_checkpoint
from forerun.models.opened import read_config
from refusals import refusal
from saved import save_checkpoint

Raw = dict[str, Any]
TOGETHER = "weights and config.json must be of one model, so fetch both again from one place"
OPS = ["reference"] + (["native"] if native.isa() != "reference" else [])


def test_round_trip_in_shards_and_through_transformers(tmp_path: Path, llama_raw: Raw, weights_of: Any) -> None:
    config, weights = read_config(llama_raw), weights_of(llama_raw)
    folder = tmp_path / "written"
    save_checkpoint(folder, config, weights, torch.float32, end_ids={3, 5}, shard_bytes=20_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    loaded = load_checkpoint(folder)
    assert loaded.model.config == config
    assert loaded.end_ids == {3, 5}
    assert loaded.name == "written"
    assert all(torch.equal(loaded.model.weights[name], weight) for name, weight in weights.items())
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert all(torch.equal(oracle[name], weight) for name, weight in weights.items())
    # A smaller write leaves no stale shard, and a loaded model (whose weights share storage) can be written again.
    save_checkpoint(folder, config, loaded.model.weights)
    assert [f.name for f in folder.glob("*.safetensors*")] == ["model.safetensors"]
    assert load_file(folder / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_dtype(write_checkpoint: Any, llama_raw: Raw, weights_of: Any) -> None:
    folder = write_checkpoint(llama_raw, {k: w.bfloat16() for k, w in weights_of(llama_raw).items()})
    assert load_checkpoint(folder).model.weight_dtype == "float32"
    assert load_checkpoint(folder, dtype="bfloat16").model.weight_dtype == "bfloat16"
    assert load_checkpoint(folder, dtype=torch.float64).model.weight_dtype == "float64"
    with pytest.raises(BadOption, match=r"dtype='int8'.*'bfloat16'"):
        load_checkpoint(folder, dtype="int8")


def test_ties(write_checkpoint: Any, llama_raw: Raw, weights_of: Any) -> None:
    tied = llama_raw | {"tie_word_embeddings": True}
    weights = weights_of(tied)
    embedding = weights["model.embed_tokens.weight"]
    assert "lm_head.weight" not in load_checkpoint(write_checkpoint(tied, weights)).model.weights
    both = weights | {"lm_head.weight": embedding.clone()}
    assert "lm_head.weight" not in load_checkpoint(write_checkpoint(tied, both)).model.weights
    with pytest.raises(UnsupportedModel, match=r"tie_word_embeddings=True and holds a different lm_head\.weight"):
        load_checkpoint(write_checkpoint(tied, weights | {"lm_head.weight": embedding + 1}))
    by_five = tied | {"transformers_version": "5.23.0"}
    five = load_checkpoint(write_checkpoint(by_five, weights | {"lm_head.weight": embedding + 1})).model
    assert torch.equal(five.weights["lm_head.weight"], embedding + 1)
    assert load_checkpoint(write_checkpoint(by_five, both)).model.config.tied
    with pytest.raises(UnsupportedModel, match=r"no tensor lm_head\.weight.*tie_word_embeddings to true"):
        load_checkpoint(write_checkpoint(llama_raw, weights))


def test_a_base_model_as_automodel_saves_it(
    tmp_path: Path, write_checkpoint: Any, llama_raw: Raw, weights_of: Any
) -> None:
    """Its names lack the prefix of a whole model, and it has no LM head: one that is tied is whole all the same."""
    raw = llama_raw | {"tie_word_embeddings": True}
    whole = write_checkpoint(raw, weights_of(raw))
    AutoModel.from_pretrained(whole, dtype=torch.float32).save_pretrained(tmp_path / "base")
    assert "embed_tokens.weight" in load_file(tmp_path / "base" / "model.safetensors")
    wanted, found = load_checkpoint(whole).model.weights, load_checkpoint(tmp_path / "base").model.weights
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    config = tmp_path / "base" / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    with pytest.raises(UnsupportedModel, match=r"no tensor lm_head\.weight, .* save the model again with AutoModelFor"):
        load_checkpoint(tmp_path / "base")


def test_tensors_that_do_not_fit(write_checkpoint: Any, llama_raw: Raw, weights_of: Any) -> None:
    weights = weights_of(llama_raw)
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    load_checkpoint(write_checkpoint(llama_raw, weights | buffers))
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(UnsupportedModel, match=rf"holds the tensor {name}_scale, .* does not ask for: {TOGETHER}"):
        load_checkpoint(write_checkpoint(llama_raw, weights | {name + "_scale": torch.ones(1)}))
    with pytest.raises(UnsupportedModel, match=rf"{name} of shape \[24, 59\].*asks for \[24, 60\]: {TOGETHER}"):
        load_checkpoint(write_checkpoint(llama_raw, weights | {name: torch.ones(24, 59)}))
    with pytest.raises(UnsupportedModel, match=rf"{name} in .* type I8, which means quantised weights"):
        load_checkpoint(write_checkpoint(llama_raw, weights | {name: torch.ones(24, 60, dtype=torch.int8)}))
    missing = {k: w for k, w in weights.items() if k != name}
    with pytest.raises(UnsupportedModel, match=f"no tensor {name}, which its config.json asks for: {TOGETHER}"):
        load_checkpoint(write_checkpoint(llama_raw, missing))
    more_layers = llama_raw | {"num_hidden_layers": llama_raw["num_hidden_layers"] + 1}
    with pytest.raises(UnsupportedModel, match=rf"input_layernorm\.weight \(and 8 more\), which .*: {TOGETHER}"):
        load_checkpoint(write_checkpoint(more_layers, weights))


def test_end_ids_are_the_union(write_checkpoint: Any, llama_raw: Raw) -> None:
    tokenizer: Raw = {"model": {"type": "BPE", "vocab": {"a": 0, "<end>": 9}, "merges": []}, "added_tokens": []}
    folder = write_checkpoint(
        llama_raw | {"eos_token_id": 2},
        generation_config={"eos_token_id": [5, 6]},
        tokenizer_config={"eos_token": {"content": "<end>"}},
        tokenizer=tokenizer,
    )
    assert load_checkpoint(folder).end_ids == {2, 5, 6, 9}
    backend = Tokenizer(BPE(vocab={"a": 0}, merges=[]))
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    assert load_checkpoint(folder).end_ids == {2, 5, 6, 1}
    decoder = {"eos_token": "<end>", "added_tokens_decoder": {"12": {"content": "<end>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(decoder))
    assert load_checkpoint(folder).end_ids == {2, 5, 6, 12}


def test_folders_that_are_not_checkpoints(tmp_path: Path, llama_raw: Raw, write_checkpoint: Any) -> None:
    with pytest.raises(NotFound, match=r"there is no folder .*nowhere: name a model of"):
        load_checkpoint(tmp_path / "nowhere")
    assert "no config.json" in refusal(NotFound, load_checkpoint, tmp_path)
    write_checkpoint(llama_raw)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert "not a readable safetensors file" in refusal(UnsupportedModel, load_checkpoint, tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in refusal(UnsupportedModel, load_checkpoint, tmp_path)


def test_shards_that_are_missing(tmp_path: Path, llama_raw: Raw, weights_of: Any) -> None:
    save_checkpoint(tmp_path, read_config(llama_raw), weights_of(llama_raw), shard_bytes=20_000)
    (tmp_path / "model-00002-of-00003.safetensors").unlink(missing_ok=True)
    next(iter(sorted(tmp_path.glob("model-*-of-*.safetensors")))).unlink()
    assert "fetch the whole checkpoint" in refusal(NotFound, load_checkpoint, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../outside.safetensors"}}))
    save_file({"x": torch.ones(1)}, tmp_path.parent / "outside.safetensors")
    assert "fetch the whole checkpoint" in refusal(NotFound, load_checkpoint, tmp_path)


def test_an_index_that_is_no_index(tmp_path: Path, llama_raw: Raw) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_raw))
    index = tmp_path / "model.safetensors.index.json"
    for places in ({}, [], None, {"x": 3}):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises((NotFound, UnsupportedModel), match=r"index\.json names (no file of weights|3)"):
            load_checkpoint(tmp_path)
    for name in ("..", "", ".", "a/..", "a\0b", "\x1b[2J", "\u202e"):
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(NotFound, match=rf"index\.json names {re.escape(repr(name))}, which is no file beside it"):
            load_checkpoint(tmp_path)
    (tmp_path / "folder.safetensors").mkdir()
    index.write_text(json.dumps({"weight_map": {"x": "folder.safetensors"}}))
    with pytest.raises(NotFound, match=r"names folder\.safetensors, which is not in .*: fetch the whole checkpoint"):
        load_checkpoint(tmp_path)


def test_tensors_larger_than_a_block(
    write_checkpoint: Any, llama_raw: Raw, weights_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of two rows, of less than one row, and rows that no block divides."""
    tied = llama_raw | {"tie_word_embeddings": True}
    weights = weights_of(tied)
    embedding = weights["model.embed_tokens.weight"]
    folder = write_checkpoint(tied, weights | {"lm_head.weight": embedding.clone()})
    for block_bytes in (480, 100, 1000):
        monkeypatch.setattr("forerun.models.source.safetensors.BLOCK_BYTES", block_bytes)
        loaded = load_checkpoint(folder).model.weights
        assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    head = embedding.clone()
    head[-1, -1] += 1  # in the last block
    write_checkpoint(tied, weights | {"lm_head.weight": head})
    assert "holds a different lm_head.weight" in refusal(UnsupportedModel, load_checkpoint, folder)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize(
    ("value", "dtype", "found"),
    [
        (math.nan, "bfloat16", "holds NaN"),
        (-math.inf, "float32", "holds infinite numbers"),
        (3.4e38, "bfloat16", r"holds numbers up to 3\.4e\+38, which are beyond bfloat16"),
    ],
)
def test_weights_that_are_no_numbers(
    tmp_path: Path, llama_raw: Raw, weights_of: Any, ops: str, value: float, dtype: str, found: str
) -> None:
    """In a matrix, a norm and the embedding, of a checkpoint in shards; in the last block of rows."""
    for bad in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"):
        weights = weights_of(llama_raw)
        weights[bad].view(-1)[-1] = value
        save_checkpoint(tmp_path, read_config(llama_raw), weights, torch.float32, shard_bytes=20_000)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        with pytest.raises(UserError, match=rf"^{bad} in {tmp_path / index[bad]} {found}") as refused:
            load_checkpoint(tmp_path, dtype=dtype, ops=operators.make(ops, "cpu"))
        assert refused.value.exit_code == 2


def test_large_weights_whose_sum_is_no_number(write_checkpoint: Any, llama_raw: Raw, weights_of: Any) -> None:
    weights = weights_of(llama_raw)
    weights["model.layers.1.mlp.up_proj.weight"].fill_(1e38)
    loaded = load_checkpoint(write_checkpoint(llama_raw, weights)).model.weights
    assert float(loaded["model.layers.1.mlp.up_proj.weight"].sum()) == math.inf


def test_saving_refuses_what_does_not_fit(tmp_path: Path, llama_raw: Raw, weights_of: Any) -> None:
    config = read_config(llama_raw)
    weights = weights_of(llama_raw)
    del weights["model.norm.weight"]
    assert "no tensor model.norm.weight" in refusal(UnsupportedModel, save_checkpoint, tmp_path, config, weights)
    assert set(weight_shapes(config)) - set(weights) == {"model.norm.weight"}
