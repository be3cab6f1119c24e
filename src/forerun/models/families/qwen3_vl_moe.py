"""Qwen 3 VL with experts (Qwen3-VL-30B-A3B), which sees images and videos: only the text model is read.

The text model is a Qwen 3 with experts. Published files have one tensor for all experts, stored as inputs x outputs.
transformers 5 writes a tensor of the same name, but stores it as outputs x inputs.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.blocks import Spec
from forerun.models import configs
from forerun.models.configs import Raw, flag
from forerun.models.families import qwen3_moe
from forerun.models.families.qwen2_vl import TIED, sections_of, text_model
from forerun.models.families.qwen3_moe import NUM_TOO
from forerun.models.families.qwen3_vl import IMAGES, THETA, refuse_windows
from forerun.models.naming import EXPERTS, Fused, Names, nested

USUAL = {"num_key_value_heads": 16, "intermediate_size": 5632, "max_position_embeddings": 128000,
         "num_experts_per_tok": 4, "moe_intermediate_size": 1408}  # fmt: skip
NUM, NORMALISED = "num_experts", "norm_topk_prob"
BARE = {
    f"mlp.experts.{name}.{{}}": Fused(
        tuple(f"mlp.experts.{{}}.{part}_proj" for part in parts), transposed=True, either_way=True
    )
    for name, parts in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items()
}


def _with_experts(names: Names) -> Names:
    more = tuple(map(_with_experts, names.more))
    return replace(names, inner={**names.inner, **BARE}, bare=frozenset(BARE), more=more)


_NESTED = nested(EXPERTS.values(), beside=("visual",))
NAMES = _with_experts(replace(_NESTED, more=(*_NESTED.more, Names({}, "model.layers.{}.", {}))))
GGUF = replace(
    qwen3_moe.GGUF,
    architecture="qwen3vlmoe",
    more=lambda metadata, tensors: {**qwen3_moe.GGUF.more(metadata, tensors), **sections_of(metadata, tensors)},
    by_more=IMAGES,
)


def read(raw: Raw) -> Spec:
    """Read the text model's spec from config.json.

    Raises UnsupportedModel for entries that forerun cannot compute.
    """
    return text_model({**raw, TIED: flag(raw, TIED)}, USUAL, THETA, _read)


def _read(text: Raw) -> Spec:
    refuse_windows(text)
    configs.require(text.get(NORMALISED) in (None, True), text, NORMALISED, "true")  # always true
    says_num = any(text.get(key) is not None for key in (NUM, NUM_TOO))
    text = {**text, NORMALISED: True, **({} if says_num else {NUM: 60})}
    return replace(qwen3_moe.read(text), model_type="qwen3_moe")


write = qwen3_moe.write  # of the text model by itself
