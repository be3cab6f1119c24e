"""The block in a target's own files that guesses further tokens: what it drafts is what transformers' block guesses."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpModel

from drafters.toys import check_drafts, drafts_of, members_of
from forerun import LLM, BadOption, SamplingParams, native
from forerun.blocks import weight_shapes
from forerun.drafters import mtp
from forerun.drafters.shared import model_files, short_vocab
from forerun.errors import UserError
from forerun.models import next_tokens
from forerun.models.opened import OpenedCheckpoint
from models.gguf_files import write_model
from tiny import byte_tokenizer

SIZES = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "max_position_embeddings": 256}  # fmt: skip
THEIRS = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
          "post_norm": "mtp.norm"}  # fmt: skip
IN_GGUF = {
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.fc": "nextn.eh_proj",
    "mtp.norm": "nextn.shared_head_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=20, temperature=0.7, seed=1, ignore_eos=True)
OPS = ["reference", *(["native"] if native.isa() != "reference" else [])]


@cache
def oracle() -> tuple[Any, Any]:
    """A model of transformers of random weights, and its block."""
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES)).eval()
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = ["full_attention"]
    block = MtpModel(model, 1).eval()
    for parameter in (*model.parameters(), *block.layers.parameters()):
        parameter.data.normal_(*((0, 0.3) if parameter.dim() > 1 else (0.3, 0.3)))
    return model, block


def block_weights() -> dict[str, torch.Tensor]:
    """The block's weights by their published names."""
    made = {}
    for name, weight in oracle()[1].layers.state_dict().items():
        module, _, ending = name.removeprefix("0.").rpartition(".")
        made[f"{THEIRS.get(module) or 'mtp.layers.0.' + module.removeprefix('mtp_block.')}.{ending}"] = weight.clone()
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and its block, as published."""
    path = tmp_path_factory.mktemp("mtp") / "folder"
    oracle()[0].save_pretrained(path)
    weights = {**load_file(path / "model.safetensors"), **block_weights()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1, "eos_token_id": 0}))
    byte_tokenizer("<|end|>").save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    """The same as llama.cpp's converter writes it: norms with 1 added, the block as the last one."""
    opened = OpenedCheckpoint.of(folder)
    names = weight_shapes(opened.spec)
    whole = {name: np.concatenate([b.float32() for b in opened.weights.blocks(name)]) for name in names}
    weights = {name: torch.from_numpy(numbers) for name, numbers in whole.items()}
    more = {}
    for name, weight in block_weights().items():
        module = name.removesuffix(".weight")
        theirs = IN_GGUF.get(module) or IN_GGUF[module.removeprefix("mtp.layers.0.")]
        more[f"blk.4.{theirs}.weight"] = weight.numpy() + (1.0 if "norm" in theirs else 0.0)
    path = folder.parent / "model.gguf"
    write_model(path, opened.spec, weights, more=more, qwen35__block_count=5, qwen35__nextn_predict_layers=1)
    assert any("nextn" in tensor.name for tensor in gguf.GGUFReader(path).tensors)
    return path


def guessed(tokens: list[int], num: int) -> list[int]:
    """What the block of transformers guesses behind these tokens, the last of which the model has not run."""
    model, block = oracle()
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        hidden = model.model(ids[:, :-1]).last_hidden_state
        inputs = ids[:, 1:]
        found = list[int]()
        for _ in range(num):
            positions, length = torch.arange(1, inputs.shape[1] + 1)[None], inputs.shape[1]
            embedded = model.get_input_embeddings()(inputs)
            mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
            out = block.layers[0](embedded, hidden, model.model.rotary_emb(embedded, positions), mask, positions, None)
            found.append(int(model.lm_head(out[:, -1]).argmax()))
            hidden, inputs = torch.cat((hidden, out[:, -1:]), 1), torch.cat((inputs, torch.tensor([found[-1:]])), 1)
    return found


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("form", ["folder", "file"])
def test_drafts_are_those_of_transformers(folder: Path, file: Path, form: str, ops: str) -> None:
    target = folder if form == "folder" else file
    assert check_drafts(target, "auto", mtp.MtpDrafter, guessed, GREEDY, ops) > 5, "auto is the block"


def test_what_is_no_such_block(folder: Path, tmp_path: Path) -> None:
    """Files without it, with a part of it, or with more: they are read as if there were none."""
    weights = load_file(folder / "model.safetensors")
    cases = {
        "none": lambda name: not name.startswith("mtp."),
        "part": lambda name: name != "mtp.layers.0.mlp.up_proj.weight",
    }
    for case, keeps in cases.items():
        path = tmp_path / case
        path.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (path / name).write_bytes((folder / name).read_bytes())
        save_file({name: weight for name, weight in weights.items() if keeps(name)}, path / "model.safetensors")
        assert next_tokens.find(OpenedCheckpoint.of(path)) is None
        with pytest.raises(BadOption, match="mtp needs a block that guesses further tokens in the target's own files"):
            LLM(str(path), draft="mtp", max_seq_len=64)
        assert "mtp" not in members_of(path)
    with pytest.raises(UserError, match="holds no block that guesses further tokens: leave it out"):
        LLM(str(folder), draft=f"mtp:path={tmp_path / 'none'}", max_seq_len=64)


def test_of_a_large_vocabulary_texts_say_how_much_is_drafted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "LARGE", 100)
    monkeypatch.setattr(short_vocab, "SIZES", (64, 128, 192, 256))
    widths = set[int]()
    with LLM(str(folder), draft="mtp:search=none", pacing="fixed", dtype="float32", max_seq_len=200) as llm:
        drafter = llm.engine.drafter.first
        assert isinstance(drafter, mtp.MtpDrafter)
        assert drafter.short is not None
        own_draft = drafter.own_draft

        def watched(*args: Any) -> Any:
            draft = own_draft(*args)
            widths.add(drafter.runner.width)
            assert all(token < drafter.runner.width for token in draft.tokens)
            return draft

        drafter.own_draft = watched  # type: ignore[method-assign]
        llm.generate([[5, 60, 3, 20] * 30], GREEDY)
        llm.generate([[205, 250, 203, 220] * 30], DRAWN)
    assert len(widths) > 1


def test_a_short_vocabulary_reads_the_first_rows_alone(folder: Path) -> None:
    options: dict[str, Any] = {"pacing": "fixed", "dtype": "float32", "max_seq_len": 200}
    with LLM(str(folder), draft="mtp:draft_vocab=64,search=none", **options) as llm:
        runner = llm.engine.drafter.first.runner
        assert runner is not None
        assert runner.width == 64
        seen = drafts_of(llm, mtp.MtpDrafter)
        llm.generate([[5, 80, 3, 200]], DRAWN)
        llm.generate([[5, 80, 3, 200]], GREEDY)
    drafts = [token for _, draft in seen for token in draft]
    assert drafts
    assert max(drafts) < 64
