"""Heads as others publish them: files of random weights, and what they compute, written from the formats' descriptions.

Everything here is plain torch in float64 and shares no code with the package. A head's row i pairs what the target has
computed for token i with token i+1, and states the distribution of token i+2.
"""

import json
from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

NUM_VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN = 257, 32, 4, 2, 8, 48  # of tests/tiny.py
DRAFT_IDS = torch.arange(0, NUM_VOCAB, 2)  # of heads with a vocabulary of their own
EPS = 1e-6
Weights = Mapping[str, Tensor]


# -------------------------------------------------------------------------------------------------------------- files

DECODER: dict[str, Any] = {"model_type": "llama", "hidden_act": "silu", "hidden_size": WIDTH, "intermediate_size": FFN,
                           "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1,
                           "max_position_embeddings": 256, "rms_norm_eps": EPS, "vocab_size": NUM_VOCAB,
                           "tie_word_embeddings": False, "torch_dtype": "float16", "pad_token_id": 0,
                           "initializer_range": 0.02, "use_cache": True}  # fmt: skip
EAGLE_3 = {**DECODER, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": len(DRAFT_IDS)}


def speculators(layer: Mapping[str, Any] | None = None, **own: Any) -> dict[str, Any]:
    """A config.json of speculators."""
    verifier = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    how = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}], "verifier": verifier}
    return {"architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
            "draft_vocab_size": len(DRAFT_IDS), "has_no_defaults_at_init": False, "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0", "target_hidden_size": None, "torch_dtype": "bfloat16",
            "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", **how},
            "transformer_layer_config": {**DECODER, **(layer or {})}, **own}  # fmt: skip


def decoder_layer(at: str, inputs: int = WIDTH, width: int = WIDTH) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama layer without its norms. inputs: of q, k and v."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    names = {"q_proj": (q, inputs), "k_proj": (kv, inputs), "v_proj": (kv, inputs), "o_proj": (width, q)}
    mlp = {"gate_proj": (FFN, width), "up_proj": (FFN, width), "down_proj": (width, FFN)}
    return {
        **{f"{at}self_attn.{name}.weight": shape for name, shape in names.items()},
        **{f"{at}mlp.{name}.weight": shape for name, shape in mlp.items()},
        f"{at}post_attention_layernorm.weight": (width,),
    }


def eagle_1_shapes() -> dict[str, tuple[int, ...]]:
    return {"fc.weight": (WIDTH, 2 * WIDTH), **decoder_layer("layers.0.")}


def eagle_3_shapes(at: str = "midlayer.", *, num_layers: int = 3, width: int = WIDTH) -> dict[str, tuple[int, ...]]:
    norms = [f"{at}input_layernorm.weight", f"{at}hidden_norm.weight", "norm.weight"]
    return {"fc.weight": (width, num_layers * WIDTH), **decoder_layer(at, 2 * width, width),
            **dict.fromkeys(norms, (width,)), "lm_head.weight": (len(DRAFT_IDS), width)}  # fmt: skip


def medusa_shapes(block: str, lm_head: str, num_heads: int, num_blocks: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for i in range(num_blocks):
            shapes |= {block.format(head, i) + "weight": (WIDTH, WIDTH), block.format(head, i) + "bias": (WIDTH,)}
        shapes[lm_head.format(head, num_blocks)] = (NUM_VOCAB, WIDTH)
    return shapes


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 5) -> dict[str, Tensor]:
    """Norms about 1, all others about 0."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) * 0.25 for name, shape in sorted(shapes.items())}
    return {name: weight + ("norm" in name) for name, weight in made.items()}


def with_ids(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With the two tables of EAGLE-3: offsets of its own ids, and which of the target's those are."""
    known = torch.zeros(NUM_VOCAB, dtype=torch.bool)
    known[DRAFT_IDS] = True
    return {**weights, "d2t": DRAFT_IDS - torch.arange(len(DRAFT_IDS)), "t2d": known}


def write(folder: Path, config: Mapping[str, Any], weights: Weights, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / name)
    return folder


# ------------------------------------------------------------------------------------------------ what they compute


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def projections(at: str) -> list[str]:
    return [f"{at}self_attn.{part}_proj" for part in "qkv"]


def attend(w: Weights, at: str, read: Tensor) -> Tensor:
    """Causal attention of rows [n, *] at positions 0 to n - 1."""
    num = len(read)
    rows = (F.linear(read, w[f"{name}.weight"], w.get(f"{name}.bias")) for name in projections(at))
    q, k, v = (row.view(num, -1, HEAD_DIM) for row in rows)
    if f"{at}self_attn.q_norm.weight" in w:
        q, k = norm(q, w[f"{at}self_attn.q_norm.weight"]), norm(k, w[f"{at}self_attn.k_norm.weight"])
    angles = torch.outer(torch.arange(num).double(), 10000.0 ** -(torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    q, k = turned(q), turned(k).repeat_interleave(HEADS // KV_HEADS, 1)
    v = v.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / HEAD_DIM**0.5
    scores = scores.masked_fill(torch.ones(num, num, dtype=torch.bool).triu(1), -torch.inf)
    return F.linear(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1), w[f"{at}self_attn.o_proj.weight"])


def feed_forward(w: Weights, at: str, x: Tensor) -> Tensor:
    y = norm(x, w[f"{at}post_attention_layernorm.weight"])
    gate, up = F.linear(y, w[f"{at}mlp.gate_proj.weight"]), F.linear(y, w[f"{at}mlp.up_proj.weight"])
    return F.linear(F.silu(gate) * up, w[f"{at}mlp.down_proj.weight"])


class Target:
    """A tiny Llama: inputs[j] and outputs[j] of each layer, and what comes behind the final norm."""

    def __init__(self, folder: Path) -> None:
        self.w = {name: weight.double() for name, weight in load_file(folder / "model.safetensors").items()}
        self.embeddings = self.head = self.w["model.embed_tokens.weight"]

    def run(self, ids: Seq[int]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        x, inputs, outputs, i = self.embeddings[list(ids)], [], [], 0
        while f"model.layers.{i}.input_layernorm.weight" in self.w:
            at = f"model.layers.{i}."
            inputs.append(x)
            x = x + attend(self.w, at, norm(x, self.w[f"{at}input_layernorm.weight"]))
            x = x + feed_forward(self.w, at, x)
            outputs.append(x)
            i += 1
        return inputs, outputs, norm(x, self.w["model.norm.weight"])


# (rows of features [n, H], tokens of the rows) -> logits over all ids of the last row, features of the next step.
Step = Callable[[Tensor, Seq[int]], tuple[Tensor, Tensor]]


def eagle_1(w: Weights, target: Target) -> Step:
    def step(features: Tensor, tokens: Seq[int]) -> tuple[Tensor, Tensor]:
        embedded = w.get("embed_tokens.weight", target.embeddings)[list(tokens)]
        x = F.linear(torch.cat((embedded, features), -1), w["fc.weight"], w.get("fc.bias"))
        x = x + attend(w, "layers.0.", x)
        x = x + feed_forward(w, "layers.0.", x)
        return F.linear(x[-1], w.get("lm_head.weight", target.head)), x[-1]

    return step


def eagle_3_features(w: Weights, rows: Seq[Tensor]) -> Tensor:
    if "fc_norm.0.weight" in w:
        rows = [norm(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(rows)]
    joined = torch.cat(list(rows), -1)
    return F.linear(norm(joined, w["input_norm.weight"]) if "input_norm.weight" in w else joined, w["fc.weight"])


def eagle_3(
    w: Weights, target: Target, at: str = "midlayer.", *, before_residual: bool = False, norm_output: bool = False
) -> Step:
    def step(features: Tensor, tokens: Seq[int]) -> tuple[Tensor, Tensor]:
        embedded = w.get("embed_tokens.weight", target.embeddings)[list(tokens)]
        normed = norm(features, w[f"{at}hidden_norm.weight"])
        read = torch.cat((norm(embedded, w[f"{at}input_layernorm.weight"]), normed), -1)
        x = (normed if before_residual else features) + attend(w, at, read)
        x = x + feed_forward(w, at, x)
        if "layers.1.input_layernorm.weight" in w:
            x = x + attend(w, "layers.1.", norm(x, w["layers.1.input_layernorm.weight"]))
            x = x + feed_forward(w, "layers.1.", x)
        out = norm(x, w["norm.weight"])[-1]
        own = torch.arange(len(w["d2t"])) + w["d2t"].long() if "d2t" in w else torch.arange(NUM_VOCAB)
        logits = torch.full((NUM_VOCAB,), -torch.inf, dtype=torch.float64)
        logits[own] = F.linear(out, w.get("lm_head.weight", target.head[own]))
        return logits, out if norm_output else x[-1]

    return step


def chain(step: Step, features: Tensor, text: Seq[int], drafted: Seq[int]) -> list[Tensor]:
    """The distributions of a draft's tokens behind `text`, given its earlier ones. features: of text[:-1]."""
    rows, tokens, found = features, list(text[1:]), []
    for token in drafted:
        logits, fed_back = step(rows, tokens)
        found.append(logits.softmax(-1))
        rows, tokens = torch.cat((rows, fed_back[None])), [*tokens, token]
    return found


def medusa(w: Weights, block: str, lm_head: str, num_heads: int, num_blocks: int, hidden: Tensor) -> list[Tensor]:
    """hidden [H] -> the logits of each head."""
    found = []
    for head in range(num_heads):
        x = hidden
        for i in range(num_blocks):
            at = block.format(head, i)
            x = x + F.silu(F.linear(x, w[at + "weight"], w.get(at + "bias")))
        found.append(F.linear(x, w[lm_head.format(head, num_blocks)]))
    return found


def doubled(weights: Weights) -> dict[str, Tensor]:
    """In float64, integers as they are."""
    return {n: w.double() if w.is_floating_point() else w for n, w in weights.items()}
