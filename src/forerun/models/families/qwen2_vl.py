"""Qwen 2 VL, which sees images and videos: only the text model is read; it is a Qwen 2.

Each token has three positions, and each of the three positions rotates a separate section of a head (mrope). In a text,
the three positions of a token are equal, so the result is the same as with usual rotary positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from forerun.blocks import Spec, difference
from forerun.errors import UnsupportedModel
from forerun.models import configs
from forerun.models.configs import Filled, Raw, flag
from forerun.models.families import qwen2
from forerun.models.naming import Gguf, Metadata, nested

NAMES = nested(beside=("visual",))
SEEN = {"vision_config", *(f"{token}_token_id" for token in ("image", "video", "vision", "vision_start", "vision_end"))}
SECTIONS, INTERLEAVED, TIED = "mrope_section", "mrope_interleaved", "tie_word_embeddings"
ROPES, KINDS = ("rope_parameters", "rope_scaling"), ("rope_type", "type")
USUAL = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "max_window_layers": 80}
THETA = 1e6


def sections_of(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    """Return the entries of config.json for mrope's sections, the sliding window and the activation of a GGUF file."""
    return {**qwen2.window_of(metadata), SECTIONS: metadata.get("rope.dimension_sections")}


GGUF = Gguf("qwen2vl", more=sections_of, by_more=frozenset({"rope.dimension_sections"}))


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json.

    Raises UnsupportedModel for entries that forerun cannot compute.
    """
    part = raw.get("text_config")
    is_tied = flag(raw, TIED) or (isinstance(part, Mapping) and flag(part, TIED))  # as in transformers 5
    return text_model({**raw, TIED: is_tied}, USUAL, THETA, _read)


def _read(text: Raw) -> Spec:
    heads, _, head_dim = configs.head_sizes(Filled(text, {}))
    configs.require(heads * head_dim == text["hidden_size"], text, "head_dim", "hidden_size / num_attention_heads")
    return replace(qwen2.read(text), model_type="qwen2")


write = qwen2.write  # of the text model by itself


def text_model(raw: Raw, usual: Raw, theta: float, read_text: Callable[[Raw], Spec]) -> Spec:
    """Return the spec of the text model, from text_config, or from the other keys of config.json (as in old files).

    usual, theta: the values of missing keys. read_text: a function that reads the text model's keys into a spec. Raises
    UnsupportedModel where both places describe a text model and the two models differ.
    """
    kind = f"{raw.get('model_type')}_text"
    beside = {key: value for key, value in raw.items() if key not in {*SEEN, "text_config", "model_type", TIED}}
    in_part = raw if raw.get("text_config") is not None else {**raw, "text_config": beside}
    text = configs.text_part(in_part, {"model_type": kind, **usual})
    text = {key: value for key, value in text.items() if key not in SEEN}
    configs.require(text["model_type"] == kind, text, "model_type", f"{kind!r} in text_config")
    spec = read_text(_plainly_turned(text, theta))
    if in_part is raw and beside:
        said = {key: value for key, value in beside.items() if value is not None}
        other = read_text(_plainly_turned({**text, **said}, theta))
        if other != spec:
            raise UnsupportedModel(
                f"config.json describes another text model beside text_config than in it: {difference(spec, other)}: "
                "take out what stands beside it"
            )
    return spec


def _plainly_turned(text: Raw, theta: float) -> Raw:
    """Return the text model's config without mrope's keys, so that rotary positions are plain.

    Raises UnsupportedModel where the sizes of mrope's sections are impossible. theta: the value of a missing theta.
    """
    half = configs.head_sizes(Filled(text, {}))[2] // 2
    ropes = {key: part for key in ROPES if isinstance(part := text.get(key), Mapping)}
    for part in (text, *ropes.values()):
        _check_sections(part, half)
    plain = {key: {k: _kind(k, v) for k, v in part.items() if k not in (SECTIONS, INTERLEAVED)}
             for key, part in ropes.items()}  # fmt: skip
    says_theta = any(part.get("rope_theta") is not None for part in (text, *ropes.values()))
    others = {key: value for key, value in text.items() if key != SECTIONS}
    return {**others, **plain, **({} if says_theta else {"rope_theta": theta})}


def _check_sections(part: Raw, half: int) -> None:
    flag(part, INTERLEAVED)
    sections = part.get(SECTIONS)
    is_list = isinstance(sections, list) and all(type(size) is int and size >= 0 for size in sections)
    fits = sections is None or (is_list and len(sections) in (3, 4) and sum(sections) == half)  # 4 in GGUF files
    configs.require(fits, part, SECTIONS, f"three sizes that add to {half}, the pairs of a head")


def _kind(key: str, value: Any) -> Any:
    return "default" if key in KINDS and value == "mrope" else value
