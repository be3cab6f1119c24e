"""Fields of blocks that torch computes, each against a few lines of its own in float64.

The rows of a text all at once, each alone behind the others, and as a path of a tree beside another path.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.blocks import Attention, Block, Buckets, Mlp, Norm, Rope, Spec, weight_shapes
from forerun.errors import UnsupportedModel
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import TorchModel
from ops.native_cases import Session, one_by_one
from refusals import refusal

HIDDEN, HEADS, KV, DIM, EPS, THETA = 12, 4, 2, 6, 1e-5, 100.0
TEXT = torch.randint(31, (14,), generator=torch.Generator().manual_seed(1)).tolist()
NORM = Norm(eps=EPS)
PLAIN = Attention(HEADS, KV, DIM, rope=Rope(THETA))
BLOCK = Block(NORM, PLAIN, pre_mlp=NORM, mlp=Mlp(10))
SHORT, LONG = (1.0, 1.5, 2.0), (3.0, 4.0, 7.0)
BUCKETS = Buckets(6, 9)


def spec_of(*blocks: Block) -> Spec:
    return Spec("test", 31, HIDDEN, 64, blocks, NORM, tied=True)


def with_attention(**changes: Any) -> Block:
    return replace(BLOCK, attention=replace(PLAIN, **changes))


def yarn(**changes: Any) -> Rope:
    return Rope(THETA, "yarn", 4.0, original_max_positions=8, **changes)


LONGROPE = Rope(THETA, "longrope", 8.0, original_max_positions=8, short_factor=SHORT, long_factor=LONG)
SPECS = {
    "plain": spec_of(BLOCK, BLOCK),
    "yarn": spec_of(with_attention(rope=yarn()), BLOCK),
    "yarn, mscale": spec_of(with_attention(rope=yarn(beta_fast=2.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=1.3))),
    "yarn, whole numbers": spec_of(with_attention(rope=yarn(beta_fast=0.9, beta_slow=0.2, truncate=False))),
    "longrope": spec_of(with_attention(rope=LONGROPE)),
    "longrope, far": spec_of(with_attention(rope=replace(LONGROPE, far=True))),
    "sinks": spec_of(with_attention(sinks=True), with_attention(sinks=True, window=4)),
    "gate": spec_of(with_attention(gate=True)),
    "buckets": spec_of(with_attention(bias=BUCKETS, rope=None, scale=1.0), with_attention(bias=0, rope=None)),
    "parallel": spec_of(replace(BLOCK, parallel=True), replace(BLOCK, parallel=True)),
    "shares_kv_of": spec_of(BLOCK, with_attention(shares_kv_of=0, window=5), BLOCK, with_attention(shares_kv_of=2)),
}


def weights_of(spec: Spec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {n: torch.randn(s, generator=generator).double() * 0.5 for n, s in weight_shapes(spec).items()}


# --------------------------------------------------------------------------------------------- the formulas, once more


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def angles_of(rope: Rope, position: int) -> tuple[list[float], float]:
    """The angle of each pair at a position, and what cos and sin are multiplied by."""
    plain = [THETA ** (-2 * i / DIM) for i in range(DIM // 2)]
    if rope.kind == "default":
        return [position * f for f in plain], 1.0
    if rope.kind == "longrope":
        factors = LONG if rope.far else SHORT
        return [position * f / by for f, by in zip(plain, factors, strict=True)], math.sqrt(2)  # 1 + log 8 / log 8

    def pair(turns: float) -> float:  # which makes so many turns within 8 positions
        return DIM * math.log(8 / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    low, high = (math.floor(first), math.ceil(last)) if rope.truncate else (first, last)
    low, high = max(low, 0), min(high, DIM - 1)
    found = []
    for i, f in enumerate(plain):
        slowed = min(max((i - low) / max(high - low, 0.001), 0), 1)
        found.append(position * (f / 4 * slowed + f * (1 - slowed)))
    magnitude = lambda m: 0.1 * m * math.log(4) + 1  # noqa: E731
    return found, magnitude(rope.mscale) / magnitude(rope.mscale_all_dim) if rope.mscale else magnitude(1)


def turned(x: Tensor, rope: Rope | None) -> Tensor:
    """x [n, heads, D] of the positions 0 to n - 1."""
    if rope is None:
        return x
    rows = []
    for position, row in enumerate(x):
        angles, factor = angles_of(rope, position)
        cos, sin = torch.tensor(angles).double().cos() * factor, torch.tensor(angles).double().sin() * factor
        a, b = row[:, : DIM // 2], row[:, DIM // 2 :]
        rows.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    return torch.stack(rows)


def bucket(distance: int) -> int:
    """The first 3 of 6 buckets have one distance each, the others grow geometrically up to a distance of 9."""
    return distance if distance < 3 else min(3 + int(math.log(distance / 3) / math.log(9 / 3) * 3), 5)


def formula(spec: Spec, w: dict[str, Tensor]) -> Tensor:
    """Logits behind each row of the text [n, V], one row and one head after the other."""
    x, n, kept = w["model.embed_tokens.weight"][TEXT], len(TEXT), {}
    for i, block in enumerate(spec.blocks):
        a, at = block.attention, f"model.layers.{i}."
        part = {name.removeprefix(at): weight for name, weight in w.items() if name.startswith(at)}
        y = normed(x, part["input_layernorm.weight"])
        q = turned((y @ part["self_attn.q_proj.weight"].T).view(n, HEADS, DIM), a.rope)
        if a.shares_kv_of is None:
            k = turned((y @ part["self_attn.k_proj.weight"].T).view(n, KV, DIM), a.rope)
            kept[i] = k, (y @ part["self_attn.v_proj.weight"].T).view(n, KV, DIM)
        k, v = kept[i if a.shares_kv_of is None else a.shares_kv_of]
        out = torch.zeros(n, HEADS, DIM).double()
        for row in range(n):
            first = 0 if a.window is None else max(0, row - a.window + 1)
            for head in range(HEADS):
                group = head // (HEADS // KV)
                scores = k[first : row + 1, group] @ q[row, head] * (a.scale or DIM**-0.5)
                if a.bias is not None:
                    table = w["model.layers.0.self_attn.relative_attention_bias.weight"]
                    scores = scores + torch.stack([table[bucket(row - j), head] for j in range(first, row + 1)])
                shares = scores.exp()
                rest = part["self_attn.sinks.weight"][head].exp() if a.sinks else 0.0
                out[row, head] = (shares / (shares.sum() + rest)) @ v[first : row + 1, group]
        flat = out.reshape(n, -1)
        if a.gate:
            flat = flat / (1 + (-(y @ part["self_attn.gate_proj.weight"].T)).exp())
        before, x = x, x + flat @ part["self_attn.o_proj.weight"].T
        y = normed(before if block.parallel else x, part["post_attention_layernorm.weight"])
        gate, up = y @ part["mlp.gate_proj.weight"].T, y @ part["mlp.up_proj.weight"].T
        x = x + (gate / (1 + (-gate).exp()) * up) @ part["mlp.down_proj.weight"].T
    return normed(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T


# ------------------------------------------------------------------------------------------------------ in three ways


def at_once(session: Session) -> Tensor:
    return session.run({0: TEXT})


def alone(session: Session) -> Tensor:
    return one_by_one(session, TEXT)


def in_a_tree(session: Session) -> Tensor:
    """The last rows are the second, fourth ... of a tree; the others are a path of other tokens beside it."""
    begun, own = session.run({0: TEXT[:6]}), TEXT[6:]
    tokens = [token for t in own for token in ((t + 1) % 31, t)]
    return torch.cat((begun, session.run({0: tokens}, {0: [max(i - 2, -1) for i in range(len(tokens))]})[1::2]))


@pytest.mark.parametrize("row_by_row", [False, True])
@pytest.mark.parametrize("way", [at_once, alone, in_a_tree])
@pytest.mark.parametrize("name", SPECS)
def test_rows_are_those_of_the_formula(name: str, way: Callable[[Session], Tensor], row_by_row: bool) -> None:
    spec = SPECS[name]
    model = TorchModel(spec, weights_of(spec), ReferenceOps(row_by_row=row_by_row))
    expected = formula(spec, weights_of(spec))
    found = way(Session(model, max_seq_len=64))[:, HIDDEN:]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), "angles and scores are float32"


@pytest.mark.parametrize("field", ["window", "softcap", "reads"])
def test_none_is_not_said_by_zero(field: str) -> None:
    """Backends that read a number where there may be none would each make something else of it."""
    with pytest.raises(UnsupportedModel, match=rf"{field}=0 is not possible: it must be above 0; None says"):
        with_attention(**{field: 0})
    assert "dims=0" in refusal(UnsupportedModel, Rope, dims=0)
    assert "logit_softcap=0.0" in refusal(UnsupportedModel, replace, SPECS["plain"], logit_softcap=0.0)
