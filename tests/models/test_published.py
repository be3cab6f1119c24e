"""config.json as published, and as the newest and the oldest transformers write it: each is read, and means one model.

published.json has the files, by name; another one is another entry. Those of transformers are made here.
"""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from forerun.blocks import Spec, difference
from forerun.errors import UnsupportedModel
from forerun.models.configs import INERT_KEYS
from forerun.models.families import model_types, run_by
from forerun.models.opened import read_config

Raw = dict[str, Any]
PUBLISHED: dict[str, Raw] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
# Older versions of transformers do not have them.
ONLY_NEW = {
    *("gemma4_assistant", "gemma4_unified_assistant"),
    *("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "ministral3"),
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
}
FLAT = {"qwen2_vl", "qwen2_5_vl"}  # whose keys of the text model they write beside the others
PARTS = ("text_config", "encoder", "decoder")  # of which a file holds a config.json each


def saved(model_type: str, raw: Raw) -> Raw:
    """config.json as transformers writes it that has read another one."""
    found: Raw = json.loads(CONFIG_MAPPING[model_type].from_dict(deepcopy(raw)).to_json_string())
    return found


def before(raw: Mapping[str, Any]) -> Raw:
    """The same as the oldest transformers that is supported wrote it."""
    old = {{"dtype": "torch_dtype"}.get(key, key): value for key, value in raw.items() if key != "rope_parameters"}
    old |= {part: before(raw[part]) for part in PARTS if isinstance(raw.get(part), dict)}
    if raw["model_type"] in FLAT:
        old = {**old.pop("text_config"), **old}
    if (turned := raw.get("rope_parameters")) is None or raw["model_type"] in ONLY_NEW:
        return old | ({} if turned is None else {"rope_parameters": turned})
    if "sliding_attention" in turned:
        old["rope_local_base_freq"], turned = turned["sliding_attention"]["rope_theta"], turned["full_attention"]
    theta, part = "rope_theta", "partial_rotary_factor"
    scaling = {key: value for key, value in turned.items() if key not in (theta, part)}
    is_neox = raw["model_type"] == "gpt_neox"
    old["rotary_emb_base" if is_neox else theta] = turned[theta]
    if part in turned:
        old["rotary_pct" if is_neox else part] = turned[part]
    is_plain = scaling.get("rope_type") == "default" and "mrope_section" not in scaling
    return {**old, "rope_scaling": None if is_plain else scaling}


def assert_same(spec: Spec, raw: Raw) -> None:
    other = read_config(raw)
    if raw["model_type"] in ("t5", "mistral3"):  # transformers 5 says that each head is tied, and goes by the tensors
        other = replace(other, tied=spec.tied)
    assert other == spec, difference(spec, other)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files(name: str) -> None:
    raw = PUBLISHED[name]
    spec, again = read_config(raw), saved(raw["model_type"], raw)
    assert_same(spec, again)
    assert_same(spec, before(again))


@pytest.mark.parametrize("model_type", [name for name in model_types() if run_by({"model_type": name}) is None])
def test_files_of_transformers(model_type: str) -> None:
    """What it makes of nothing, as of models; and what a file leaves out is what it has then, or is asked for."""
    new = saved(model_type, {})
    spec = read_config(new)
    for raw in (before(new), CONFIG_MAPPING[model_type]().to_dict()):
        assert_same(spec, raw)
    for raw, key in shortened(new):
        try:
            found = read_config(raw)
        except UnsupportedModel as error:
            if f"config.json has {key}=None" not in str(error):
                raise
        else:
            assert_same(found, saved(model_type, raw))


def shortened(raw: Raw) -> Iterator[tuple[Raw, str]]:
    """The same without one key that says something, here or in a part."""
    for key, value in raw.items():
        if isinstance(value, dict) and key in PARTS:
            yield from (({**raw, key: part}, left_out) for part, left_out in shortened(value))
        elif key not in INERT_KEYS | {"model_type"} and value is not None:
            yield {name: own for name, own in raw.items() if name != key}, key


def test_each_family_has_a_published_file() -> None:
    # Which are published inside of others.
    text = {"gemma4_text": "gemma4", "gemma4_unified_text": "gemma4_unified", "ministral3": "mistral3",
            "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}  # fmt: skip
    assert {text.get(name, name) for name in model_types()} == {raw["model_type"] for raw in PUBLISHED.values()}
