"""Small random llamas, their outputs, and the shapes that they are widened to."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.blocks import Plain, Rope, Spec, resized, weight_shapes
from forerun.models import widening
from forerun.models.runner import Run
from forerun.models.widening import WideShape
from forerun.ops.torch import TorchModel
from forerun.ops.torch_tensors import HostWeights, tensor_of
from support import runner_for

SMALL = Plain(
    "llama", vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48,
    norm_eps=1e-5, max_positions=64, tied=True,
).spec  # fmt: skip
WIDE = WideShape(hidden_size=128, num_layers=3, num_heads=16, num_kv_heads=4, ffn_size=100)
PROMPT = [5, 17, 3, 88, 41, 2, 60]
TOLERANCE = 1e-4  # of float32 logits of size 5: sums of other lengths are rounded in another order

ROPES = {
    "default": Rope(),
    "linear": Rope(kind="linear", factor=4.0),
    # Positions so few that the frequencies fall into all three bands: kept, blended, divided.
    "llama3": Rope(500.0, "llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32),
}
# Query and key-value heads, trained and wide: 4 -> 3 needs each key-value head twice, 4 -> 1 four times.
GROUPS = {"4 to 3": (8, 2, 12, 4), "3 to 4": (6, 2, 16, 4), "equal": (4, 2, 8, 4), "4 to 1": (8, 2, 9, 9)}
WIDE_VOCAB = 301


def case(
    factor: int = 1, group: str = "equal", rope: str = "default", *, tied: bool = True, grown: bool = False, **more: Any
) -> tuple[Spec, WideShape]:
    """A small model and a shape for it; residual width 32 -> 96, whose norms need a factor that is not exact."""
    heads, kv_heads, wide_heads, wide_kv_heads = GROUPS[group]
    config = resized(SMALL, num_heads=heads, num_kv_heads=kv_heads, rope=ROPES[rope], tied=tied, **more)
    vocab = WIDE_VOCAB if grown else None
    return config, WideShape(96, 3, wide_heads, wide_kv_heads, 100, Plain.of(config).head_dim * factor, vocab)


def random_weights(config: Spec, seed: int = 0) -> dict[str, Tensor]:
    """Weights large enough that logits differ clearly, norms away from 1."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in weight_shapes(config).items():
        made[name] = torch.randn(shape, generator=generator) * (0.3 if len(shape) == 2 else 0.2)
        if name.endswith("norm.weight"):
            made[name] += 1
    return made


def widen(config: Spec, weights: Mapping[str, Tensor], shape: WideShape) -> tuple[Spec, dict[str, Tensor]]:
    """Widen weights that are torch's, see models.widening."""
    wide, made = widening.widen(config, HostWeights(weights), shape)
    return wide, {name: tensor_of(weight) for name, weight in made.items()}


def run_greedy(config: Spec, weights: dict[str, Tensor], steps: int) -> tuple[list[int], Tensor]:
    """Greedy tokens after PROMPT and the logits [prompt + steps - 1, V] behind them."""
    runner = runner_for(TorchModel(config, weights), max_seq_len=64)
    runner.cache.open(0)
    tokens, rows, new = [], [], PROMPT
    for _ in range(steps):
        logits = torch.from_numpy(runner.forward([Run(0, new)]).logits[0])
        runner.cache.keep({0: range(len(new))})
        rows.append(logits)
        tokens.append(int(logits[-1].argmax()))
        new = tokens[-1:]
    return tokens, torch.cat(rows)


def difference(narrow: Tensor, wide: Tensor) -> float:
    """Largest difference of logits [T, V] over the old ids, apart from what all ids of a row share."""
    away = wide[:, : narrow.shape[1]] - narrow
    return float((away - away.mean(-1, keepdim=True)).abs().max())
