"""What tests of every method must know of some: options without which a drafter cannot be built, and variants.

A drafter that needs nothing has no entry here, and is tested with its defaults.
"""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun import LLM
from forerun.blocks import Plain
from forerun.drafters import Target, hydra
from forerun.drafters.shared import artifacts, dflash_model, eagle_model, head_files
from forerun.host_tensor import HostTensor
from forerun.models import safetensors_file
from forerun.models.named import DATA
from forerun.train import datastore
from tiny import numbers


def small_datastore(target: Target, folder: Path) -> Mapping[str, Any]:
    """A datastore of some of the held-out texts; of random ones where a target has no tokenizer."""
    if target.tokenizer is None:
        rng = random.Random(0)
        texts = [[rng.randrange(target.num_ids) for _ in range(12)] for _ in range(40)]
    else:
        lines = (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [target.tokenizer.encode(json.loads(line)["text"]) for line in lines[:60]]
    fingerprint = artifacts.fingerprint(target.tokenizer, target.num_ids)
    datastore.save(datastore.joined(texts, target.num_ids), folder / "datastore", fingerprint)
    return {"path": str(folder / "datastore")}


def random_eagle(target: Target, folder: Path, every: int = 1) -> Mapping[str, Any]:
    """A head of random weights that reads all layers of a target, and drafts its ids 0, `every`, 2 x `every` ..."""
    width, num_ids = target.model.config.hidden_size, target.num_ids
    positions = target.model.config.max_positions
    num_own = (num_ids - 1) // every + 1
    decoder = Plain("llama", num_own, width, 1, 2, 1, 4, 8, 1e-5, positions, tied=True).spec
    config = eagle_model.EagleConfig(decoder, (0, _num_layers(target)))
    weights = _random({**eagle_model.input_shapes(config), **eagle_model.layer_shapes(config)}, width)
    return _saved(target, folder, "eagle", weights, config.to_json(), offsets=np.arange(num_own) * (every - 1))


def random_head(llm: LLM, folder: Path, every: int = 3) -> str:
    """The folder of a random eagle head for the target of an engine; see random_eagle."""
    return str(random_eagle(Target.of(llm.checkpoint.model, llm.opened), folder, every)["path"])


def random_medusa(target: Target, folder: Path) -> Mapping[str, Any]:
    """Two heads of random weights."""
    width = target.model.config.hidden_size
    shapes = {f"{head}.0.linear.{part}": (width, width)[: 1 + (part == "weight")] for head in (0, 1) for part in PARTS}
    sizes = {"medusa_num_heads": 2, "medusa_num_layers": 1, "draft_vocab_size": target.num_ids}
    return _saved(target, folder, "medusa", _random(shapes, width), sizes)


def random_hydra(target: Target, folder: Path) -> Mapping[str, Any]:
    """Two heads of random weights, the second of which reads two tokens."""
    width = target.model.config.hidden_size
    sizes = {"hydra_num_heads": 2, "hydra_num_layers": 2, "draft_vocab_size": target.num_ids}
    return _saved(target, folder, "hydra", _random(hydra.shapes(2, 2, width), width), sizes)


def random_dflash(target: Target, folder: Path) -> Mapping[str, Any]:
    """Two layers of random weights that guess three tokens."""
    width, num_ids = target.model.config.hidden_size, target.num_ids
    decoder = Plain("qwen3", num_ids, width, 2, 2, 1, 4, 8, 1e-5, target.model.config.max_positions, qk_norm=True).spec
    config = dflash_model.DFlashConfig(decoder, (1, _num_layers(target)), 4, num_ids - 1, num_ids)
    weights = _random(dflash_model.shapes(config), width)
    return _saved(target, folder, "dflash", weights, config.to_json(_num_layers(target)))


def random_blockwise(target: Target, folder: Path) -> Mapping[str, Any]:
    """A layer of random weights with two outputs."""
    width = target.model.config.hidden_size
    sizes = {"num_heads": 2, "intermediate_size": 4, "draft_vocab_size": target.num_ids}
    return _saved(target, folder, "blockwise", _random(head_files.feed_forward_shapes(2, 4, width), width), sizes)


def random_pass(target: Target, folder: Path) -> Mapping[str, Any]:
    """Two look-ahead vectors, of random numbers."""
    width = target.model.config.hidden_size
    weights = _random({"look_ahead": (2, width)}, 1)
    return _saved(target, folder, "pass", weights, {"num_look_ahead": 2, "hidden_size": width}, has_ids=False)


def random_mtp(target: Target, folder: Path) -> Mapping[str, Any]:
    """A block of random weights beside a model of the target's width, of which nothing else is stored."""
    config, width = target.model.config, target.model.config.hidden_size
    sizes = {"vocab_size": config.vocab_size, "hidden_size": width, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "layer_types": ["full_attention"]}
    raw = {"model_type": "qwen3_5_text", **sizes, **heads, "max_position_embeddings": config.max_positions,
           "partial_rotary_factor": 0.5}  # fmt: skip
    block = {"self_attn.q_proj": (16, width), "self_attn.k_proj": (4, width), "self_attn.v_proj": (4, width),
             "self_attn.o_proj": (width, 8), "self_attn.q_norm": (4,), "self_attn.k_norm": (4,),
             "mlp.gate_proj": (8, width), "mlp.up_proj": (8, width), "mlp.down_proj": (width, 8),
             "input_layernorm": (width,), "post_attention_layernorm": (width,)}  # fmt: skip
    shapes = {f"mtp.layers.0.{name}.weight": shape for name, shape in block.items()}
    outer = {"fc": (width, 2 * width), "pre_fc_norm_embedding": (width,), "pre_fc_norm_hidden": (width,),
             "norm": (width,)}  # fmt: skip
    shapes |= {f"mtp.{name}.weight": shape for name, shape in outer.items()}
    return _written(folder / "mtp", raw, _random(shapes, width))


def random_assistant(target: Target, folder: Path) -> Mapping[str, Any]:
    """Two blocks of random weights that read the keys of the target's last layer."""
    config, width = target.model.config, target.model.config.hidden_size
    kv_heads, head_dim = config.cache_shape.size_of(config.cache_shape.num_layers - 1)
    own, heads = 8, 2 * kv_heads
    text = {"model_type": "gemma4_text", "vocab_size": config.vocab_size, "hidden_size": own, "intermediate_size": 8,
            "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": head_dim, "global_head_dim": head_dim, "layer_types": ["full_attention"] * 2,
            "hidden_size_per_layer_input": 0, "max_position_embeddings": config.max_positions,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}  # fmt: skip
    raw = {"model_type": "gemma4_assistant", "backbone_hidden_size": width, "text_config": text}
    block = {"self_attn.q_proj": (heads * head_dim, own), "self_attn.o_proj": (own, heads * head_dim),
             "self_attn.q_norm": (head_dim,), "mlp.gate_proj": (8, own), "mlp.up_proj": (8, own),
             "mlp.down_proj": (own, 8), "input_layernorm": (own,), "post_attention_layernorm": (own,),
             "pre_feedforward_layernorm": (own,), "post_feedforward_layernorm": (own,)}  # fmt: skip
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in (0, 1) for name, shape in block.items()}
    shapes |= {f"model.layers.{i}.layer_scalar": (1,) for i in (0, 1)}
    shapes |= {"model.embed_tokens.weight": (config.vocab_size, own), "model.norm.weight": (own,),
               "pre_projection.weight": (own, 2 * width), "post_projection.weight": (width, own)}  # fmt: skip
    return _written(folder / "assistant", raw, _random(shapes, own))


PARTS = ("weight", "bias")


def _random(shapes: Mapping[str, tuple[int, ...]], width: int) -> dict[str, HostTensor]:
    drawn = {name: numbers(40 + seed, *shape) for seed, (name, shape) in enumerate(shapes.items())}
    return {name: HostTensor.of(weight / np.float32(width**0.5)) for name, weight in drawn.items()}


def _written(folder: Path, raw: Mapping[str, Any], weights: Mapping[str, HostTensor]) -> Mapping[str, Any]:
    """Write a checkpoint as others publish it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    safetensors_file.write(folder / "model.safetensors", weights, {"format": "pt"})
    return {"path": str(folder)}


def _saved(
    target: Target,
    folder: Path,
    method: str,
    weights: Mapping[str, HostTensor],
    config: Mapping[str, Any],
    *,
    has_ids: bool = True,
    offsets: npt.NDArray[np.int64] | None = None,
) -> Mapping[str, Any]:
    """Write a head. offsets [own ids]: the target's id of each own one, less the own one; None = it has all of them."""
    offsets = np.zeros(target.num_ids, np.int64) if offsets is None else offsets
    whole = {**weights, **({"d2t": HostTensor.of(offsets)} if has_ids else {})}
    whole[head_files.PROBE] = head_files.probe(target.model, target.num_ids)
    head_files.save(folder / method, method, whole, config, artifacts.fingerprint(target.tokenizer, target.num_ids))
    return {"path": str(folder / method)}


# By drafter: (target, an empty folder) -> the options that it cannot do without, such as a file fitted for the target.
NEEDS: dict[str, Callable[[Target, Path], Mapping[str, Any]]] = {
    "assistant": random_assistant,
    "blockwise": random_blockwise,
    "datastore": small_datastore,
    "dflash": random_dflash,
    "eagle": random_eagle,
    "hydra": random_hydra,
    "medusa": random_medusa,
    "mtp": random_mtp,
    "pass": random_pass,
    # The toy's only layer is the whole target, which a draft temperature makes wrong sometimes.
    "early_exit": lambda target, _: {"draft_temperature": 0.5} if _num_layers(target) == 1 else {},
    # Small decoders have rows of 48 weights, and the toy rounds its logits.
    "self": lambda target, _: {} if _num_layers(target) == 1 else {"quantization": "int8:group=16"},
}

# By drafter: options worth runs of their own in the proof by enumeration, beside the defaults.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "model": [{"draft_temperature": 0.0}, {"draft_temperature": 0.4, "draft_top_k": 2}, {"draft_top_k": 1},
              {"draft_vocab": "2"}],
    "lookup": [{"max_n": 2, "min_n": 2}],
    "suffix": [{"shape": "tree", "max_spec_factor": 4.0}, {"max_cached_tokens": 0, "min_token_prob": 0.0}],
    "datastore": [{"shape": "tree"}, {"max_match": 1, "num_continuations": 4}],
    "recycle": [{"shape": "path"}, {"top": 2, "shared": True, "from_prompt": False, "max_rows": 2}],
    "logitspec": [{"top": 1, "recycled": 0, "num_behind": 0}, {"unseen": False}],
    "stand": [{"shape": "path"}, {"top": 2, "max_context": 2, "shared": True, "from_prompt": False}],
    "lookahead": [{"guesses": 1}, {"window": 2, "ngram": 2, "guesses": 3}],
    "unigram": [{"draws": "sampled"}],
    "bigram": [{"draws": "sampled"}, {"draws": "sampled", "k": 0.0}],
    "ngram": [{"max_n": 3, "filler_top_k": 2, "max_ngrams": 16}, {"max_n": 2}],
    "prediction": [{"resync_n": 1}],
    "mixed": [{"of": "(lookup:min_n=2)+(cascade:of=(model:draft_temperature=0.5))"}],
    "switch": [{"of": "lookup+(model:draft_temperature=0.5)+cascade", "hysteresis": 0}],
    "several": [{"of": "model+(model:draft_temperature=0.5)"}],
    "tree": [{"shape": "2"}, {"shape": "2", "draws": "independent"}, {"shape": "2", "draws": "point"},
             {"shape": "best_first", "draws": "point", "top_k": 2, "depth": 1},
             {"shape": "3", "of": "(model:draft_temperature=0.4,draft_top_k=2)"}],
    "cascade": [{"of": "(model:draft_temperature=0.4,draft_top_k=2)", "inner": "mixed", "inner_length": 2},
                {"inner": "(cascade:of=(model:draft_temperature=0.5))"}],
    "medusa": [{"shape": "2x1"}, {"shape": "1x1"}],
    "hydra": [{"shape": "1x1"}],
    "dflash": [{"shape": "tree"}, {"shape": "tree", "draws": "point"}],
    "early_exit": [{"draft_temperature": 0.0}, {"draft_temperature": None, "draft_top_k": 2}],
    "self": [{"quantization": "int8", "draft_temperature": 0.6}],
}  # fmt: skip


def _num_layers(target: Target) -> int:
    return target.model.config.cache_shape.num_layers
