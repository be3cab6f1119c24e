"""Every key of config.json against transformers: what changes its function changes ours as much, or is refused."""

import json
import zlib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from forerun.errors import UnsupportedModel
from forerun.models.configs import CAUSAL, INERT_KEYS, NEUTRAL, SHARED_KEYS
from forerun.models.loading import load_checkpoint
from forerun.models.opened import read_config
from forerun.models.runner import Run
from models.test_encoder_decoders import BART, GEMMA_2, IDS, T5, reading
from models.test_parity import SEEING, WHOLE, logits_of, tokens_of
from support import runner_for

pytestmark = pytest.mark.parity
Raw = dict[str, Any]
PLAIN: Raw = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
              "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256,
              "rms_norm_eps": 1e-5}  # fmt: skip
BASES: dict[str, Raw] = {
    **{name: {**PLAIN, "model_type": name} for name in ("llama", "mistral", "qwen2", "qwen3")},
    **{raw["model_type"]: raw for raw in reversed(WHOLE.values())},
    **{name: raw for name, raw in SEEING.items() if name.startswith("qwen")},
    "t5": {**T5, "model_type": "t5", "decoder_start_token_id": 0, "pad_token_id": 0},
    "bart": {**BART, **IDS, "model_type": "bart"},
    "marian": {**BART, **IDS, "model_type": "marian"},
    "t5gemma": {"model_type": "t5gemma", "vocab_size": 97, "encoder": GEMMA_2, "decoder": GEMMA_2},
}
# Of no model's function: what classes are called, labels, types, and what a cache is.
APART = {"model_type", "architectures", "dtype", "torch_dtype", "id2label", "label2id", "problem_type",
         "cache_implementation", "auto_map", "transformers_version"}  # fmt: skip
KNOWN = SHARED_KEYS | INERT_KEYS | CAUSAL | {key for key in NEUTRAL if "." not in key}
ROPES: list[Raw] = [
    {"rope_theta": 333.0, "rope_type": "default"},
    {"rope_theta": 333.0, "rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_theta": 333.0, "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_theta": 333.0, "rope_type": "default"}},
]
KINDS = ("sliding_attention", "full_attention")
PARTS = ("encoder", "decoder", "text_config")


def others(key: str, value: object, num_layers: int) -> list[Any]:
    """Values that another file may have under a key. value: that of transformers, or of this file."""
    if key in ("rope_parameters", "rope_scaling"):
        return ROPES
    if key == "layer_types":
        return [[kind] * num_layers for kind in KINDS]
    if key.endswith(("_act", "_activation", "activation_function", "_act_fn")):
        return ["relu", "gelu", "silu", "gelu_pytorch_tanh"]
    if isinstance(value, bool) or value is None:
        return [True, False, *([] if isinstance(value, bool) else [2, 0.5])]
    return [value * 2, None] if isinstance(value, int | float) else []


def by_transformers(raw: Raw) -> tuple[Any, Tensor]:
    """A module whose weights depend on their names alone, and the logits of a text of 40 tokens."""
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(deepcopy(raw))
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    auto = AutoModelForImageTextToText if raw["model_type"] in SEEING else auto
    module = auto.from_config(config, attn_implementation="eager").eval()
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weight.data = torch.randn(weight.shape, generator=generator) * 0.15 + ("norm" in name)
    ids = torch.tensor([tokens_of(40, 1)])
    decoder = {"decoder_input_ids": ids[:, :20]} if config.is_encoder_decoder else {}
    with torch.inference_mode():
        return module, module(input_ids=ids, **decoder).logits[0]


def ours_of(raw: Raw, module: Any, folder: Path) -> Tensor:
    """The same of ours, from what the module is saved as."""
    module.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    model = load_checkpoint(folder, dtype="float32").model
    tokens = tokens_of(40, 1)
    runner = runner_for(model, max_seq_len=64)
    if runner.sources is None:
        return logits_of(model, tokens)
    return torch.from_numpy(reading(runner, {0: tokens}).forward([Run(0, tokens[:20])]).logits[0])


def changed(raw: Raw) -> Iterator[tuple[Raw, str]]:
    """A config.json with another value of one key, in the whole or in a part of it."""
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(deepcopy(raw)).to_dict()
    for part in (*(part for part in PARTS if part in raw), None):
        own, usual = (raw, config) if part is None else (raw[part], config[part])
        for key in sorted({*KNOWN, *own, *usual} - APART - {*PARTS}):
            for value in others(key, own.get(key, usual.get(key)), own.get("num_hidden_layers", 2)):
                new = {**own, key: value}
                if new != own:
                    yield new if part is None else {**raw, part: new}, f"{key}={value!r}"


@pytest.mark.parametrize("case", BASES)
def test_every_key(tmp_path: Path, case: str) -> None:
    base = BASES[case]
    plain, spec = by_transformers(base)[1], read_config(base)
    # Sums over all tokens before: steps and chunks of transformers differ from each other by as much.
    tolerance = 3e-4 if any(block.recurrence is not None for block in spec.blocks) else 1e-4
    wrong = []
    for raw, what in changed(base):
        try:
            found = read_config(raw)
        except UnsupportedModel:
            continue
        try:
            module, expected = by_transformers(raw)
        except Exception:
            continue  # that is no model for transformers
        if found == spec and torch.equal(expected, plain):
            continue
        try:
            ours = ours_of(raw, module, tmp_path)
        except UnsupportedModel:  # such as num_hidden_layers=False, by which GPT-2 has no layer
            continue
        most = tolerance * float(expected.abs().max())
        if ours.shape != expected.shape or float((ours - expected).abs().max()) > most:
            wrong.append(what)
    assert not wrong
