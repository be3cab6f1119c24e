"""Gemma 4's assistants (google/gemma-4-E2B-it-assistant and others): draft models without keys and values.

The blocks of an assistant are built like Gemma 4's blocks, but each block reads the keys and values of the target's
last layer of the same kind. The input of the first block is made from the embedding and the hidden state of the
target's last token. The output of the last block is projected to the target's hidden size. An assistant cannot run as a
model by itself; the drafter `assistant` runs it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from forerun.blocks import Block, Features, Spec
from forerun.errors import UnsupportedModel
from forerun.models import configs
from forerun.models.configs import Raw, flag, size
from forerun.models.families import gemma4_text
from forerun.models.naming import Metadata, Names

RUN_BY = "assistant"  # the drafter that runs such checkpoints, which are no models by themselves
WIDTH, ORDERED, GROUPS, TAKEN = (
    "backbone_hidden_size",
    "use_ordered_embeddings",
    "num_centroids",
    "centroid_intermediate_top_k",
)
KEYS = {"model_type", "text_config", "tie_word_embeddings", "torch_dtype", "dtype", "boi_token_id", "eoi_token_id",
        "image_token_id", "audio_token_id", "boa_token_id", "eoa_token_index", "video_token_id", "eoa_token_id",
        WIDTH, ORDERED, GROUPS, TAKEN}  # fmt: skip
USUAL = {WIDTH: 1536, ORDERED: False, GROUPS: 2048, TAKEN: 32}
TEXTS = ("gemma4_text", "gemma4_unified_text")
HEADS = "masked_embedding."  # tensors that choose promising rows of the LM head
OUTER_NAMES = {"model.embed_tokens": "lm_head", "lm_head": "lm_head", "model.norm": "model.norm",
               "pre_projection": "fc", "post_projection": "output"}  # fmt: skip
NAMES = Names(
    OUTER_NAMES, "model.layers.{}.", gemma4_text.NAMES.inner, bare=frozenset({"layer_scalar"}), beside=(HEADS,)
)


def _more(metadata: Metadata, tensors: Collection[str]) -> dict[str, Any]:
    """Return further entries of config.json: Gemma 4's entries, and the target's hidden size.

    The entries say that all layers read the keys and values of other layers.
    """
    width, num, heads = (metadata.get(k) for k in ("embedding_length_out", "block_count", "attention.head_count_kv"))
    if type(width) is not int or type(num) is not int or not 0 < num <= len(tensors):
        raise UnsupportedModel(
            "a GGUF file of gemma4-assistant does not say how wide its target's rows are (embedding_length_out), or "
            "how many blocks it has: fetch it again"
        )
    by_layer = heads if isinstance(heads, list) else [heads] * num
    kept = {**metadata, "attention.head_count_kv": by_layer, "attention.shared_kv_layers": 0}
    return {**gemma4_text.GGUF.more(kept, tensors), "attention_k_eq_v": False, gemma4_text.SHARES: num, WIDTH: width}


GGUF = replace(
    gemma4_text.GGUF,
    architecture="gemma4-assistant",
    more=_more,
    by_more=gemma4_text.GGUF.by_more | {"embedding_length_out", "nextn_predict_layers"},
    names=replace(
        gemma4_text.GGUF.names,
        outer={"token_embd": "lm_head", "output_norm": "model.norm", "nextn.pre_projection": "fc",
               "nextn.post_projection": "output"},
        beside=("masked_embd_",),
    ),
)  # fmt: skip


def read(raw: Raw) -> Spec:
    """Read config.json into a spec whose blocks read the KV cache of the target.

    Raises UnsupportedModel for entries that forerun cannot compute.
    """
    if "text_config" in raw:
        configs.refuse_unknown(raw, KEYS)
        text = configs.text_part(raw, {"model_type": TEXTS[0], "tie_word_embeddings": True})
    else:  # from a GGUF file, which has no such part
        text = {key: value for key, value in raw.items() if key != WIDTH} | {"model_type": TEXTS[0]}
    c = {**USUAL, **{key: value for key, value in raw.items() if value is not None}}
    configs.require(text["model_type"] in TEXTS, text, "model_type", f"one of {list(TEXTS)} in text_config")
    num, shared = text.get("num_hidden_layers"), text.get(gemma4_text.SHARES)
    configs.require(shared in (None, 0, num), text, gemma4_text.SHARES, f"all {num} layers")
    spec = gemma4_text.read({**text, gemma4_text.SHARES: 0, gemma4_text.INPUT: text.get(gemma4_text.INPUT) or 0})
    if spec.layer_input is not None or any(block.experts is not None for block in spec.blocks):
        raise UnsupportedModel("text_config has experts or inputs of each layer, which no assistant has")
    configs.require(not flag(c, ORDERED) or spec.vocab_size % size(c, GROUPS) == 0, c, GROUPS, "a divisor of the ids")
    configs.require(size(c, TAKEN) <= size(c, GROUPS), c, TAKEN, f"at most {GROUPS}")
    features = Features(spec.vocab_size, size(c, WIDTH), num=2, joined=True, input="features", feeds="projected")
    blocks = tuple(_reader(block, i) for i, block in enumerate(spec.blocks))
    return replace(spec, model_type="gemma4_assistant", blocks=blocks, features=features, tied=False, embed_scale=1.0,
                   logit_softcap=None)  # fmt: skip


def _reader(block: Block, index: int) -> Block:
    """Return a block of Gemma 4, changed so that it reads the KV cache of the target. index: the index of the block."""
    assert block.attention is not None
    reads = replace(block.attention, shares_kv_of=index, k_norm=None, v_norm=None, k_is_v=False)
    return replace(block, attention=reads)


def write(spec: Spec) -> Raw:
    """Return the config.json of a spec."""
    assert spec.features is not None
    text = {**gemma4_text.write(spec), "model_type": TEXTS[0], "tie_word_embeddings": True}
    text |= {gemma4_text.SHARES: spec.num_layers, "use_double_wide_mlp": False, "vocab_size_per_layer_input": 0}
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": spec.model_type,
        "text_config": text,
        "tie_word_embeddings": True,
        WIDTH: spec.features.size,
    }
