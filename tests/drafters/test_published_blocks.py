"""Hydra and DFlash as others publish them: what is drafted is what their descriptions say, and relatives are refused.

The forward passes here are written from the descriptions, with torch alone, over random weights under published keys.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.config import EngineConfig
from forerun.engine.opened import Opened
from forerun.errors import BadOption, UnsupportedModel
from forerun.models.runner import Run
from forerun.ops.torch import TorchModel
from refusals import refusal
from support import rounds_of as listened, runner_for
from tiny import write_tiny

PROMPT = [5, 9, 40, 8, 100, 3]
H, FFN, IDS, BLOCK, MASK = 32, 64, 257, 5, 256
HEADS, KV_HEADS, D, EPS, THETA = 4, 2, 16, 1e-6, 5e5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def target(folder: Path) -> TorchModel:
    return Opened.of(EngineConfig(target=str(folder), ops="reference", dtype="float32")).load().model


def rows_of(target: TorchModel, ids: list[int], layers: list[int]) -> tuple[Tensor, list[Tensor]]:
    """The rows of a text behind the final norm [n, H], and the residual stream behind some layers."""
    runner = runner_for(target)
    runner.taps = layers
    runner.cache.open(0)
    scores = runner.forward([Run(0, ids, "none")])
    return scores.hidden, [scores.taps[k] for k in layers]


def published(path: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return path


def rounds_of(folder: Path, draft: str, ops: str = "reference", **params: Any) -> tuple[list[int], list[Any]]:
    llm = LLM(str(folder), draft=draft, spec_length=8, ops=ops, dtype="float32", max_seq_len=128)
    rounds = listened(llm)
    out = llm.generate([PROMPT], SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **params}))[0]
    return [*PROMPT, *out.token_ids], [one for one in rounds if one.tokens]


# ------------------------------------------------------------------------------------------------------------- hydra


def hydra_weights(num_heads: int, num_blocks: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = {}
    for h in range(num_heads):
        at = f"hydra_mlp.{h}"
        sizes |= {f"{at}.0.{name}": (H, H * (h + 2)) for name in ("linear", "res_connection")}
        sizes |= {f"{at}.{j}.linear": (H, H) for j in range(1, num_blocks)} | {f"hydra_lm_head.{h}": (IDS, H)}
    weights = {f"{name}.weight": torch.randn(size, generator=generator) * 0.2 for name, size in sizes.items()}
    return weights | {f"{name}.bias": torch.randn(size[0], generator=generator) for name, size in sizes.items()}


HYDRA = {"hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True}


@pytest.mark.parametrize("ops", ["reference", "auto"])
def test_hydra_drafts_as_its_description_says(folder: Path, target: TorchModel, tmp_path: Path, ops: str) -> None:
    """Each node is the likeliest id, by rank among its siblings, of the head of its depth behind its own path."""
    w = hydra_weights(3, 2)
    path = published(tmp_path / "hydra", HYDRA, w)
    tokens, rounds = rounds_of(folder, f"hydra:path={path},shape=2x2x1", ops, temperature=0)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    num = 0
    for one in rounds:
        hidden = rows_of(target, tokens[: one.position - 1], [])[0][-1]
        ranks: dict[int, int] = {}
        for node, parent in enumerate(one.parents):
            ids, at = [tokens[one.position - 1]], parent
            while at >= 0:
                ids.insert(1, one.tokens[at])
                at = one.parents[at]
            h = len(ids) - 1
            x = torch.cat([hidden, *target.embed(ids)])
            x = linear(f"hydra_mlp.{h}.0.res_connection", x) + F.silu(linear(f"hydra_mlp.{h}.0.linear", x))
            x = x + F.silu(linear(f"hydra_mlp.{h}.1.linear", x))
            assert one.tokens[node] == linear(f"hydra_lm_head.{h}", x).argsort(descending=True)[ranks.get(parent, 0)]
            ranks[parent], num = ranks.get(parent, 0) + 1, num + 1
    assert num > 30


def test_heads_behind_what_was_drafted_differ(folder: Path, tmp_path: Path) -> None:
    """Two siblings have different children, which heads that do not see the path could not give them."""
    path = published(tmp_path / "hydra", HYDRA, hydra_weights(3, 2))
    _, rounds = rounds_of(folder, f"hydra:path={path},shape=2x1", temperature=0)
    children = [{p: t for p, t in zip(one.parents, one.tokens, strict=True) if p >= 0} for one in rounds]
    assert any(len(set(of.values())) == 2 for of in children)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hydra_head_arch": "prefix-mlp"}, "hydra_head_arch=mlp alone"),
        ({"grounded_heads": False}, "grounded_heads=True alone"),
        ({"hydra_num_heads": 4}, "has no tensor hydra_mlp.3"),
    ],
)
def test_other_heads_are_refused(folder: Path, tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = published(tmp_path / "hydra", {**HYDRA, **changed}, hydra_weights(3, 2))
    assert said in refusal(UnsupportedModel, LLM, str(folder), draft=f"hydra:path={path}", ops="reference")


# ------------------------------------------------------------------------------------------------------------ dflash


DFLASH: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "attention_bias": False,
                          "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": BLOCK,
                          "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]}, "dtype": "bfloat16",
                          "head_dim": D, "hidden_act": "silu", "hidden_size": H, "intermediate_size": FFN,
                          "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 128,
                          "max_window_layers": 2, "model_type": "qwen3", "num_attention_heads": HEADS,
                          "num_hidden_layers": 2, "num_key_value_heads": KV_HEADS, "num_target_layers": 2,
                          "rms_norm_eps": EPS, "rope_scaling": None, "rope_theta": THETA, "sliding_window": None,
                          "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": IDS}  # fmt: skip


def dflash_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    sizes: dict[str, tuple[int, ...]] = {"fc": (H, 2 * H), "hidden_norm": (H,), "norm": (H,)}
    for i in range(2):
        at = f"layers.{i}."
        sizes |= {f"{at}input_layernorm": (H,), f"{at}post_attention_layernorm": (H,)}
        sizes |= {f"{at}self_attn.q_proj": (HEADS * D, H), f"{at}self_attn.o_proj": (H, HEADS * D)}
        sizes |= {f"{at}self_attn.{name}_proj": (KV_HEADS * D, H) for name in "kv"}
        sizes |= {f"{at}self_attn.{name}_norm": (D,) for name in "qk"}
        sizes |= {f"{at}mlp.gate_proj": (FFN, H), f"{at}mlp.up_proj": (FFN, H), f"{at}mlp.down_proj": (H, FFN)}
    random = {name: torch.randn(size, generator=generator) * 0.3 for name, size in sizes.items()}
    return {f"{name}.weight": w + (1.0 if w.ndim == 1 else 0.0) for name, w in random.items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """x [n, heads, D] by rotary positions, as complex numbers of the halves."""
    angles = positions[:, None].float() / THETA ** (torch.arange(0, D, 2) / D)
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(()), angles)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def block_logits(target: TorchModel, w: dict[str, Tensor], text: list[int]) -> Tensor:
    """Logits [block - 1, ids] of the tokens behind a text, whose last token the target has not run."""
    context = norm(torch.cat(rows_of(target, text[:-1], [1, 2])[1], -1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = target.embed([text[-1], *[MASK] * (BLOCK - 1)])
    positions = torch.arange(len(text) - 1 + BLOCK)
    for i in range(2):
        own = {n.removeprefix(f"layers.{i}.").removesuffix(".weight"): t for n, t in w.items() if f"layers.{i}." in n}
        y = norm(x, own["input_layernorm"])
        both = torch.cat((context, y))
        read = {"q": y, "k": both, "v": both}
        projected = (rows @ own[f"self_attn.{name}_proj"].T for name, rows in read.items())
        q, k, v = (rows.unflatten(-1, (-1, D)) for rows in projected)
        q, k = (norm(rows, own[f"self_attn.{name}_norm"]) for name, rows in (("q", q), ("k", k)))
        q, k = turned(q, positions[-BLOCK:]), turned(k, positions)
        k, v = (rows.repeat_interleave(HEADS // KV_HEADS, 1) for rows in (k, v))
        weights = (torch.einsum("qhd,khd->hqk", q, k) / D**0.5).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ own["self_attn.o_proj"].T
        y = norm(x, own["post_attention_layernorm"])
        x = x + (F.silu(y @ own["mlp.gate_proj"].T) * (y @ own["mlp.up_proj"].T)) @ own["mlp.down_proj"].T
    return target.logits(norm(x, w["norm.weight"]))[1:]


@pytest.mark.parametrize("ops", ["reference", "auto"])
def test_dflash_drafts_as_its_description_says(folder: Path, target: TorchModel, tmp_path: Path, ops: str) -> None:
    """The likeliest ids of the rows of a whole block; at temperature 0.7 the probabilities that a rule is told."""
    w = dflash_weights()
    path = published(tmp_path / "dflash", DFLASH, w)
    tokens, rounds = rounds_of(folder, f"dflash:path={path}", ops, temperature=0)
    assert len(rounds) > 2
    assert len(rounds[0].tokens) == BLOCK - 1  # fewer at the end of the text
    for one in rounds:
        assert one.tokens == block_logits(target, w, tokens[: one.position]).argmax(-1).tolist()[: len(one.tokens)]
    tokens, rounds = rounds_of(folder, f"dflash:path={path}", ops, temperature=0.7, seed=3)
    for one in rounds:
        laws = (block_logits(target, w, tokens[: one.position]) / 0.7).softmax(-1)
        found = [float(law[token]) for law, token in zip(laws, one.tokens, strict=False)]
        assert one.draft_probs == pytest.approx(found, rel=1e-3)


@pytest.mark.parametrize("ops", ["reference", "auto"])
def test_a_tree_has_the_likeliest_paths_of_a_block(folder: Path, target: TorchModel, tmp_path: Path, ops: str) -> None:
    """Best first, and no other path is likelier than the last one."""
    w = dflash_weights()
    path = published(tmp_path / "dflash", DFLASH, w)
    tokens, rounds = rounds_of(folder, f"dflash:path={path},shape=tree", ops, temperature=0)
    plain, _ = rounds_of(folder, "none", ops, temperature=0)
    assert tokens == plain
    for one in rounds:
        laws = block_logits(target, w, tokens[: one.position]).softmax(-1).tolist()
        values = dict[tuple[int, ...], float]()
        for token, parent in zip(one.tokens, one.parents, strict=True):
            above = [*values][parent] if parent >= 0 else ()
            values[(*above, token)] = values.get(above, 1.0) * laws[len(above)][token]
        falling = list(values.values())
        assert falling == sorted(falling, reverse=True)
        assert set(likelier(laws, falling[-1] * (1 + 1e-4))) < set(values)
    assert any(one.parents.count(-1) > 1 and max(one.parents) >= 0 for one in rounds)


def likelier(laws: list[list[float]], least: float, path: tuple[int, ...] = (), value: float = 1.0) -> Iterator[Any]:
    """All paths with more than so much of the probability, token by token."""
    for token, share in enumerate(laws[len(path)] if len(path) < len(laws) else ()):
        if value * share > least:
            yield (*path, token)
            yield from likelier(laws, least, (*path, token), value * share)


@pytest.mark.parametrize("ops", ["reference", "auto"])
def test_rounded_weights_draft_nearly_the_same(folder: Path, target: TorchModel, tmp_path: Path, ops: str) -> None:
    w = dflash_weights()
    path = published(tmp_path / "dflash", DFLASH, w)
    tokens, rounds = rounds_of(folder, f"dflash:path={path},quantization=int8", ops, seed=3)
    for one in rounds:
        laws = block_logits(target, w, tokens[: one.position]).softmax(-1)
        found = [float(law[token]) for law, token in zip(laws, one.tokens, strict=False)]
        assert one.draft_probs == pytest.approx(found, rel=0.5, abs=0.02)
        assert one.draft_probs != found
    with pytest.raises(BadOption, match="groups of 64 do not divide the 32 inputs"):
        LLM(str(folder), draft=f"dflash:path={path},quantization=int8:group=64", ops=ops)


def test_a_text_beyond_the_positions_is_written_plainly(folder: Path, tmp_path: Path) -> None:
    path = published(tmp_path / "dflash", {**DFLASH, "max_position_embeddings": 16}, dflash_weights())
    tokens, rounds = rounds_of(folder, f"dflash:path={path}", temperature=0, max_tokens=60)
    plain, _ = rounds_of(folder, "none", temperature=0, max_tokens=60)
    assert tokens == plain
    assert rounds
    assert all(one.position - 1 + BLOCK <= 16 for one in rounds)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda c: c.update(architectures=["DSparkDraftModel"]), UnsupportedModel, "not DSpark or DFlash 2"),
        (lambda c: c.update(architectures=["DFlash2DraftModel"]), UnsupportedModel, "not DSpark or DFlash 2"),
        (lambda c: c.pop("dflash_config"), UnsupportedModel, "has no dflash_config"),
        (lambda c: c["dflash_config"].pop("target_layer_ids"), UnsupportedModel, "it must list layers"),
        (lambda c: c["dflash_config"].update(final_logit_softcapping=20.0), UnsupportedModel, "softcapping"),
        (lambda c: c["dflash_config"].update(mask_token_id=999), BadOption, "mask_token_id=999"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[0, 2]), BadOption, "behind 3 layers"),
        (lambda c: c.update(is_causal=True), UnsupportedModel, "whole blocks alone"),
        (lambda c: c.update(num_attention_heads=2), UnsupportedModel, "of shape"),
        (lambda c: c.update(hidden_size=64), BadOption, "the target has rows of 32"),
        (lambda c: c.update(use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 2),
         UnsupportedModel, "sliding window"),
    ],
    ids=[
        *("dspark", "dflash2", "no config", "no layers", "softcap", "mask", "layers", "causal", "heads", "width"),
        "window",
    ],
)  # fmt: skip
def test_other_models_are_refused(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], error: type[Exception], said: str
) -> None:
    config = json.loads(json.dumps(DFLASH))
    change(config)
    path = published(tmp_path / "dflash", config, dflash_weights())
    assert said in refusal(error, LLM, str(folder), draft=f"dflash:path={path}", ops="reference")


def test_a_markov_head_is_refused_by_its_tensor(folder: Path, tmp_path: Path) -> None:
    """A DSpark model whose config.json does not name it."""
    weights = dflash_weights() | {"markov_head.markov_w1.weight": torch.zeros(IDS, 4)}
    path = published(tmp_path / "dflash", DFLASH, weights)
    with pytest.raises(UnsupportedModel, match=r"holds the tensor 'markov_head\.markov_w1\.weight'"):
        LLM(str(folder), draft=f"dflash:path={path}", ops="reference")
