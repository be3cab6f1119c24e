"""The same shapes as others compute them, on the same card and in the same run: torch in a graph, and transformers."""

# ruff: noqa: B023 (what is timed runs at once, inside of the loop that it stands in)

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import DEVICE, IS_REHEARSED, SHAPES, captured, seconds
from forerun.ops.torch import empty_weights
from forerun.ops.torch_parts import Projections

NUM_BEHIND = 16 if IS_REHEARSED else 512
NUM_TOKENS = 2 if IS_REHEARSED else 64


def torch_passes(out: dict[str, Any]) -> None:
    """The same shapes as a plain loop of torch's operators in a CUDA graph: one row behind 512 tokens, and 8."""
    found = out["torch_passes"] = {}
    for name, spec in SHAPES.items():
        weights = empty_weights(spec, torch.bfloat16, DEVICE)
        for weight in weights.values():
            weight.normal_(0.0, 0.02)
        a, mlp, h = spec.blocks[0].attention, spec.blocks[0].mlp, spec.hidden_size
        assert a is not None
        assert mlp is not None
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        layers = [
            [
                Projections.of(weights, [f"model.layers.{i}.{name}" for name in names]).joined
                or (weights[f"model.layers.{i}.{names[0]}.weight"], None)
                for names in (
                    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                    ["self_attn.o_proj"],
                    ["mlp.gate_proj", "mlp.up_proj"],
                    ["mlp.down_proj"],
                )
            ]
            for i in range(spec.num_layers)
        ]
        head = weights["model.embed_tokens.weight" if spec.tied else "lm_head.weight"]
        ones = torch.ones(h, device=DEVICE, dtype=torch.bfloat16)
        for rows in (1, 8):
            x0 = torch.randn(rows, h, device=DEVICE).bfloat16()
            keys, values = (
                torch.randn(1, a.kv_heads, NUM_BEHIND + rows, a.head_dim, device=DEVICE).bfloat16() for _ in range(2)
            )

            def run(x: Tensor = x0, keys: Tensor = keys, values: Tensor = values, rows: int = rows) -> Tensor:
                for qkv, o, up, down in layers:
                    y = F.linear(F.rms_norm(x, (h,), ones, 1e-5), qkv[0])
                    query = y[:, :q].view(1, rows, a.heads, a.head_dim).transpose(1, 2)
                    keys[0, :, -rows:] = y[:, q : q + kv].view(rows, a.kv_heads, a.head_dim).transpose(0, 1)
                    values[0, :, -rows:] = y[:, q + kv :].view(rows, a.kv_heads, a.head_dim).transpose(0, 1)
                    seen = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
                    x = x + F.linear(seen.transpose(1, 2).reshape(rows, q), o[0])
                    gate, inner = F.linear(F.rms_norm(x, (h,), ones, 1e-5), up[0]).chunk(2, -1)
                    x = x + F.linear(F.silu(gate) * inner, down[0])
                return F.linear(F.rms_norm(x, (h,), ones, 1e-5), head).argmax(-1)

            found[f"{name} {rows}"] = {"device_ms": seconds(captured(run)) * 1e3}
            print("torch", name, rows, found[f"{name} {rows}"], flush=True)
        torch.cuda.empty_cache()


def transformers_loops(out: dict[str, Any]) -> None:
    """Greedy tokens per second of transformers' generate at one row: as it comes, and with a static cache compiled."""
    from transformers import LlamaConfig, LlamaForCausalLM

    found = out["transformers"] = {}
    for name, spec in SHAPES.items():
        if not name.startswith("llama"):
            continue
        a, mlp = spec.blocks[0].attention, spec.blocks[0].mlp
        assert a is not None
        assert mlp is not None
        config = LlamaConfig(
            vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=mlp.size,
            num_hidden_layers=spec.num_layers, num_attention_heads=a.heads, num_key_value_heads=a.kv_heads,
            head_dim=a.head_dim, tie_word_embeddings=spec.tied, max_position_embeddings=1024,
        )  # fmt: skip
        with torch.device(DEVICE):
            torch.set_default_dtype(torch.bfloat16)
            model: Any = LlamaForCausalLM(config).eval()
            torch.set_default_dtype(torch.float32)
        prompt = torch.randint(0, spec.vocab_size, (1, NUM_BEHIND), device=DEVICE)
        for kind, options in (("eager", {}), ("static cache", {"cache_implementation": "static"})):
            try:
                took = list[float]()
                for _ in range(2 if kind == "eager" else 3):  # the first compiles
                    start = time.perf_counter()
                    new = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
                    seen = torch.ones_like(prompt)
                    made = model.generate(prompt, attention_mask=seen, pad_token_id=0, **new, **options)
                    assert made.shape[1] == prompt.shape[1] + NUM_TOKENS
                    took.append(time.perf_counter() - start)
                found[f"{name} {kind}"] = NUM_TOKENS / min(took[1:])
            except Exception as error:  # what a version cannot do says so, and the others run
                found[f"{name} {kind}"] = f"{type(error).__name__}: {error}"[:300]
            print("transformers", name, kind, found[f"{name} {kind}"], flush=True)
        del model
