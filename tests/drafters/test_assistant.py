"""Assistants of Gemma 4, which read their target's keys and values: they draft what those of transformers guess."""

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DynamicCache,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

import processes
from drafters.toys import check_drafts, drafts_of, members_of
from forerun import LLM, BadOption, SamplingParams, drafters, native
from forerun.config import EngineConfig, Quantization
from forerun.drafters.assistant import AssistantDrafter
from forerun.drafters.shared import model_files, short_vocab
from forerun.engine.opened import Opened
from forerun.errors import UserError
from forerun.models.loading import load_checkpoint
from forerun.models.opened import OpenedCheckpoint
from forerun.models.saving_quantised import quantise_checkpoint
from models.gguf_files import byte_vocabulary, write_tensors
from tiny import byte_tokenizer

LOCAL, FULL = "sliding_attention", "full_attention"
WINDOW = 12
SIZES = {"vocab_size": 260, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
         "sliding_window": WINDOW, "max_position_embeddings": 256, "rms_norm_eps": 2.0**-20}  # fmt: skip
TARGET = {**SIZES, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
          "layer_types": [LOCAL, LOCAL, FULL] * 2, "hidden_size_per_layer_input": 12,
          "vocab_size_per_layer_input": 260}  # fmt: skip
OWN = {**SIZES, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
       "layer_types": [LOCAL, LOCAL, LOCAL, FULL], "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
       "num_kv_shared_layers": 4}  # fmt: skip
OUTPUT = "model.layers.0.self_attn.o_proj.weight"
LAYERS = {LOCAL: 3, FULL: 2}  # of the target, the last ones that keep keys
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
OPS = ["reference", *(["native"] if native.isa() != "reference" else [])]


@pytest.fixture(scope="module", autouse=True)
def _all_may_be_shared() -> Iterator[None]:
    """Let transformers 5.23 make a model all of whose layers read keys of others, which its own check refuses."""
    usual = Gemma4TextConfig.kv_sharing_modes

    def modes(config: Gemma4TextConfig) -> list[str | None]:
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        found: list[str | None] = usual.fget(config)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))
        yield


@cache
def oracle(is_ordered: bool) -> tuple[Any, Any]:
    """A target of transformers of random weights, and its assistant."""
    target = Gemma4ForCausalLM(Gemma4TextConfig(**TARGET)).eval()
    text = Gemma4TextConfig(**OWN)
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=60, use_ordered_embeddings=is_ordered,
                                   num_centroids=20, centroid_intermediate_top_k=4)  # fmt: skip
    own = Gemma4AssistantForCausalLM(config).eval()
    torch.manual_seed(0)
    for parameter in (*target.parameters(), *own.parameters()):
        parameter.data.normal_(*((0, 0.3) if parameter.dim() > 1 else (0.5, 0.3)))
    if is_ordered:
        own.masked_embedding.token_ordering.copy_(torch.randperm(260))
    return target, own


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and beside it both kinds of assistants, by what they are called."""
    made, root = {}, tmp_path_factory.mktemp("assistants")
    for name, model in (("target", oracle(False)[0]), ("whole", oracle(False)[1]), ("ordered", oracle(True)[1])):
        made[name] = root / name
        model.save_pretrained(made[name])
        config = json.loads((made[name] / "config.json").read_text(encoding="utf-8"))
        (made[name] / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
        byte_tokenizer("<|end|>").save(str(made[name] / "tokenizer.json"))
    return made


def guessed(tokens: list[int], num: int, is_ordered: bool) -> list[int]:
    """What the assistant of transformers guesses behind these tokens, the last of which the target has not run."""
    target, own = oracle(is_ordered)
    with torch.inference_mode():
        kept = DynamicCache()
        out = target.model(torch.tensor([tokens[:-1]]), past_key_values=kept, use_cache=True)
        states = {kind: (kept.layers[i].keys, kept.layers[i].values) for kind, i in LAYERS.items()}
        seen = WINDOW - 1  # the last place of the window is that of the row itself
        states[LOCAL] = tuple(part[:, :, -seen:] for part in states[LOCAL])
        row = out.last_hidden_state[:, -1:]
        found = list[int]()
        at = torch.tensor([[len(tokens) - 1]])
        for _ in range(num):
            embedded = target.get_input_embeddings()(torch.tensor([[(tokens + found)[-1]]]))
            made = own(inputs_embeds=torch.cat((embedded, row), -1), position_ids=at, shared_kv_states=states)
            row = made.last_hidden_state
            found.append(int(made.logits[0, -1, :257].argmax()))  # the tokenizer has no more ids
    return found


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("kind", ["whole", "ordered"])
def test_drafts_are_those_of_transformers(folders: dict[str, Path], kind: str, ops: str) -> None:
    guess = partial(guessed, is_ordered=kind == "ordered")
    assert check_drafts(folders["target"], f"assistant:path={folders[kind]}", AssistantDrafter, guess, GREEDY, ops) > 20


IN_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "pre_projection": "nextn.pre_projection",
    "post_projection": "nextn.post_projection",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


@pytest.fixture(scope="module")
def file(folders: dict[str, Path]) -> Path:
    """The assistant as llama.cpp's converter writes it, with the tokenizer of its target."""
    tensors = dict[str, tuple[str, Any]]()
    for name, weight in oracle(False)[1].state_dict().items():
        module, _, ending = name.rpartition(".")
        if name == "lm_head.weight":
            continue
        if module.startswith("model.layers."):
            _, _, number, inner = name.split(".", 3)
            theirs = "layer_output_scale" if inner == "layer_scalar" else IN_GGUF[inner.removesuffix(".weight")]
            tensors[f"blk.{number}.{theirs}.weight"] = ("F32", weight.numpy())
        else:
            tensors[f"{IN_GGUF[module]}.{ending}"] = ("F32", weight.numpy())
    tensors["rope_freqs.weight"] = "F32", np.array([1.0] * 4 + [1e30] * 12, np.float32)
    own = {"block_count": 4, "nextn_predict_layers": 4, "context_length": 256, "embedding_length": 32,
           "embedding_length_out": 60, "feed_forward_length": 64, "attention.head_count": 2,
           "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32,
           "attention.key_length_swa": 16, "attention.value_length_swa": 16, "attention.sliding_window": 12,
           "attention.sliding_window_pattern": [True, True, True, False], "attention.shared_kv_layers": 4,
           "attention.layer_norm_rms_epsilon": 2.0**-20, "embedding_length_per_layer_input": 0,
           "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "rope.dimension_count": 32,
           "rope.dimension_count_swa": 16}  # fmt: skip
    metadata = {f"gemma4-assistant.{key}": value for key, value in own.items()} | byte_vocabulary()
    path = folders["target"].parent / "target-assistant.gguf"
    write_tensors(path, tensors, metadata, "gemma4-assistant")
    assert len(gguf.GGUFReader(path).tensors) == len(tensors)
    return path


def test_a_file_is_the_folder_that_it_was_made_of(folders: dict[str, Path], file: Path) -> None:
    spec, other = OpenedCheckpoint.of(folders["whole"]).spec, OpenedCheckpoint.of(file, with_tokenizer=False).spec
    assert spec == other
    prompt, drafts = random.Random(4).choices(range(1, 257), k=30), list[list[Any]]()
    for path in (folders["whole"], file):
        options: dict[str, Any] = {"dtype": "float32", "max_seq_len": 200, "pacing": "fixed", "spec_length": 3}
        with LLM(str(folders["target"]), draft=str(path), **options) as llm:
            seen = drafts_of(llm, AssistantDrafter)
            llm.generate([prompt], GREEDY)
        drafts.append([draft for _, draft in seen])
    assert drafts[0] == drafts[1]
    assert any(drafts[0])


def test_it_is_found_beside_its_target(
    folders: dict[str, Path], file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the name of its folder; one that does not fit or is broken is not taken, nor one of another name."""
    target = tmp_path / "some-it"
    target.symlink_to(folders["target"])
    assert "assistant" not in members_of(target)
    beside = folders["target"].with_name("target-assistant")
    beside.symlink_to(folders["ordered"])
    try:
        with LLM(str(folders["target"]), max_seq_len=64) as llm:
            drafter = llm.engine.drafter.first
            assert isinstance(drafter, AssistantDrafter)
            assert drafter.ordered is not None
        with LLM(load_checkpoint(folders["target"], with_tokenizer=True), max_seq_len=64) as llm:
            assert isinstance(llm.engine.drafter.first, AssistantDrafter)
        assert "assistant" not in members_of(folders["target"], draft="suffix")
        config = json.loads((folders["ordered"] / "config.json").read_text(encoding="utf-8"))
        beside.unlink()
        shutil.copytree(folders["ordered"], beside)
        (beside / "model.safetensors").write_bytes((beside / "model.safetensors").read_bytes()[:5000])
        with caplog.at_level("WARNING"):
            assert "assistant" not in members_of(folders["target"])
        assert "was found for the target, and cannot draft for it" in caplog.text
        shutil.rmtree(beside)
        beside.mkdir()
        (beside / "config.json").write_text(json.dumps({**config, "backbone_hidden_size": 61}))
        caplog.clear()
        with caplog.at_level("WARNING"):
            assert "assistant" not in members_of(folders["target"])
        assert "was found" not in caplog.text
    finally:
        if beside.is_symlink():
            beside.unlink()
        else:
            shutil.rmtree(beside)


def test_of_the_hub_what_is_in_its_cache_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    """Also beside a revision of the target. Nothing is asked of the hub."""
    for name, kind, ref in (("it", "target", "v1"), ("it-assistant", "ordered", "main")):
        cached = tmp_path / "hub" / f"models--org--{name}"
        shutil.copytree(folders[kind], cached / "snapshots" / ("a" * 40))
        (cached / "refs").mkdir()
        (cached / "refs" / ref).write_text("a" * 40)
    code = "from forerun import LLM\nprint(*LLM('org/it@v1', max_seq_len=64).engine.drafter.members)"
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    ran = processes.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120)
    assert "assistant" in ran.stdout.split(), ran.stdout


def test_an_ordered_head_is_counted_as_it_is_kept(tmp_path: Path) -> None:
    """Its rows are never rounded, the other matrices are."""
    target = Gemma4ForCausalLM(Gemma4TextConfig(**{**TARGET, "hidden_size": 64}))
    config = Gemma4AssistantConfig(text_config=Gemma4TextConfig(**OWN), backbone_hidden_size=64, num_centroids=20,
                                   use_ordered_embeddings=True, centroid_intermediate_top_k=4)  # fmt: skip
    for name, model in (("target", target), ("own", Gemma4AssistantForCausalLM(config))):
        model.save_pretrained(tmp_path / name)
        byte_tokenizer("<|end|>").save(str(tmp_path / name / "tokenizer.json"))
    opened = Opened.of(EngineConfig(target=str(tmp_path / "target")))
    for vocab, num_whole in (("auto", 1), ("none", 0)):
        spec = f"assistant:path={tmp_path / 'own'},quantization=int8:group=16,draft_vocab={vocab}"
        (one,) = drafters.wanted(spec, opened)
        assert one.needs.weights is not None
        assert [shape for shape, scheme in one.needs.weights.matrices if scheme is None] == [(260, 32)] * num_whole


def test_what_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    target, own = str(folders["target"]), folders["ordered"]
    with pytest.raises(BadOption, match=r"is no model by itself, but drafts for one: name its target, and it as the"):
        LLM(str(own), max_seq_len=64)
    for load in (load_checkpoint, lambda path: quantise_checkpoint(path, tmp_path / "int8", Quantization(8, 16))):
        with pytest.raises(BadOption, match="is no model by itself, but drafts for one"):
            load(own)
    specs = {
        f"translated:path={own}": "is no model by itself, but drafts for one",
        "assistant": "assistant needs the checkpoint that was published for its target",
        f"assistant:path={target}": "is no assistant: name it as draft=",
        f"model:path={own},draft_top_k=3": "option of 'assistant' called 'draft_top_k'",
    }
    for search in ("tree", "mtp", "lookup"):
        said = f"assistant:search='{search}' is not possible: it must be suffix"
        specs[f"assistant:path={own},search={search}"] = said
    for method in ("tree", "cascade"):
        specs[f"{method}:of=(model:path={own})"] = f"{method}:of=.* is not possible: it is no draft model"
    for spec, said in specs.items():
        with pytest.raises(BadOption, match=said):
            LLM(target, draft=spec, max_seq_len=64)
    config = json.loads((own / "config.json").read_text(encoding="utf-8"))
    weights = load_file(own / "model.safetensors")
    order = "masked_embedding.token_ordering"
    text = config["text_config"]
    less = {name: weight for name, weight in weights.items() if name != OUTPUT}
    cases: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]] = {
        "width": ({"backbone_hidden_size": 61}, {}, "belongs to a target with rows of 61 and 260 ids"),
        "heads": ({"text_config": {**text, "num_key_value_heads": 1}}, {},
                  "reads keys of 1 heads of 16, which no such"),
        "order": ({}, {order: weights[order] * 0}, "has another order of its LM head than of each id once"),
        "shared": ({"text_config": {**text, "num_kv_shared_layers": 2}}, {}, "must be all 4 layers"),
        "groups": ({"num_centroids": 21}, {}, "num_centroids=21.*must be a divisor of the ids"),
        "shape": ({}, {OUTPUT: weights[OUTPUT][:, :29].clone()}, r"of shape \[32, 29\], and its config.json asks for"),
    }  # fmt: skip
    for name, (keys, tensors, message) in cases.items():
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**config, **keys}))
        (path / "tokenizer.json").write_bytes((own / "tokenizer.json").read_bytes())
        save_file({**weights, **tensors}, path / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=message):
            LLM(target, draft=str(path), max_seq_len=64)
    save_file(less, tmp_path / "shape" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"has no tensor model\.layers\.0\.self_attn\.o_proj\.weight"):
        LLM(target, draft=str(tmp_path / "shape"), max_seq_len=64)


@pytest.mark.parametrize("kind", ["whole", "ordered"])
@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_texts_are_the_targets_own(folders: dict[str, Path], kind: str, cache: str) -> None:
    """Greedy and drawn, many at once, shared beginnings, preemption, several texts of one prompt, rejections.

    A prompt of one token has no row before its last.
    """
    if native.isa() == "reference" and cache == "int8":
        pytest.skip("bytes are for native operators")
    rng = random.Random(7)
    shared = rng.choices(range(1, 257), k=40)
    prompts = [shared[: rng.randrange(5, 40)] + rng.choices(range(1, 257), k=rng.randrange(1, 30)) for _ in range(23)]
    prompts.insert(7, [shared[0]])
    params = [
        SamplingParams(max_tokens=rng.randrange(5, 40), temperature=rng.choice([0, 0, 0.8]), seed=i, ignore_eos=True,
                       n=rng.choice([1, 1, 2]), acceptance="match")
        for i in range(len(prompts))
    ]  # fmt: skip
    options: dict[str, Any] = {"max_seq_len": 128, "max_batch_size": 6, "kv_cache_tokens": 384, "kv_cache_dtype": cache}
    texts = []
    for draft in ("none", f"assistant:path={folders[kind]},search=none"):
        with LLM(str(folders["target"]), draft=draft, pacing="fixed", spec_length=4, **options) as llm:
            texts.append([out.token_ids for out in llm.generate(prompts, params)])
            llm.engine.runner.cache.check_integrity()
            drafter = llm.engine.drafter.first
            assert not isinstance(drafter, AssistantDrafter) or drafter.num_held == 0
    assert texts[0] == texts[1]


def test_a_short_vocabulary(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large one the first ids are drafted, as many as texts use; a number is taken as it is said."""
    monkeypatch.setattr(model_files, "LARGE", 100)
    monkeypatch.setattr(short_vocab, "SIZES", (64, 128, 192, 256))
    for vocab, width in (("auto", None), ("64", 64)):
        draft = f"assistant:path={folders['whole']},draft_vocab={vocab},search=none"
        with LLM(str(folders["target"]), draft=draft, pacing="fixed", max_seq_len=128) as llm:
            seen = drafts_of(llm, AssistantDrafter)
            drafter = llm.engine.drafter.first
            llm.generate([[5, 60, 3, 20] * 20], SamplingParams(max_tokens=30, temperature=0.7, seed=1, ignore_eos=True))
            assert isinstance(drafter, AssistantDrafter)
            assert any(draft for _, draft in seen)
            assert drafter.width == width or (width is None and drafter.short is not None)
            assert all(token < drafter.width for _, draft in seen[-1:] for token in draft)
