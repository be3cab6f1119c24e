"""Whole native decoders: the same bits as their operators one after the other; the LM head; embeddings.

`Composed` is csrc/model.cpp written down with single operators.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.blocks import Plain
from forerun.errors import InternalError
from forerun.ops.cpu import CpuOps
from forerun.ops.cpu.packed import PackedMatrix, run_numbers
from forerun.ops.passes import RanAhead
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch_rotations import TorchRotations
from forerun.sampling import filters_of, probs
from forerun.sampling.random import PhiloxCoins
from forerun.types import EDGES, Probs, RaggedBatch, SamplingParams, Stop
from ops.native_cases import (
    BFLOAT16,
    FLOAT32,
    INF,
    NAN,
    Session,
    make_config,
    make_decoder,
    needs_native,
    normal,
    ops_of,
    random_weights,
    same_bits,
    tokens_of,
)
from refusals import refusal
from tensors import load_model

pytestmark = needs_native

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tied": False, "head_dim": 8, "num_heads": 8, "num_kv_heads": 1},
    "qwen2": {"qkv_bias": True, "hidden_size": 51, "num_heads": 3, "num_kv_heads": 3},
    "qwen3": {"qk_norm": True, "head_dim": 64, "num_heads": 4},
    "mistral": {"windows": (5, 70), "head_dim": 32, "num_heads": 8},
    "every_bias": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "ffn_size": 31, "vocab_size": 5},
    "wide_heads": {"head_dim": 128, "num_heads": 2, "num_kv_heads": 1, "num_layers": 1},
    # 1 / sqrt(96) is one float32 where the root is rounded first, and another where it is not.
    "scale": {"head_dim": 96, "num_heads": 2, "num_kv_heads": 1, "num_layers": 1},
}
architectures = pytest.mark.parametrize("name", ARCHITECTURES)


@dataclass(frozen=True)
class Composed:
    """A decoder of single operators: rows are float32 between them."""

    ops: CpuOps
    config: Plain
    weights: Mapping[str, Tensor]

    def forward(self, batch: RaggedBatch, cache: Any) -> Tensor:
        """Final hidden states of one pass [T, H]; writes the cache."""
        rope = TorchRotations(self.config.rope, self.config.head_dim, torch.device("cpu"), FLOAT32)
        tokens, positions = batch.ids()
        rotation = rope.at(torch.tensor(positions), max(positions) + 1)
        x = self.weights["model.embed_tokens.weight"][tokens].float()
        for i in range(self.config.num_layers):
            at = f"model.layers.{i}."
            attended = self.attention(self.norm(x, at + "input_layernorm"), i, rotation, batch, cache)
            x = self.ops.add_linear(x, attended, self.packed(at + "self_attn.o"))
            gate_up = self.packed(at + "mlp.gate", at + "mlp.up", paired=True)
            normed = self.norm(x, at + "post_attention_layernorm")
            x = self.ops.add_gated(x, normed, gate_up, self.packed(at + "mlp.down"))
        return self.norm(x, "model.norm")

    def attention(self, x: Tensor, i: int, rotation: tuple[Tensor, Tensor], batch: RaggedBatch, cache: Any) -> Tensor:
        """Layer i's attention over normed rows x [T, H] -> [T, heads * head_dim], before the output projection."""
        c, at = self.config, f"model.layers.{i}.self_attn."
        qkv = self.ops.linear(x, self.packed(at + "q", at + "k", at + "v"))
        heads = qkv.view(len(x), c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if c.qk_norm:
            q, k = self.norm(q, at + "q_norm"), self.norm(k, at + "k_norm")
        q, k = self.ops.rope(q, *rotation), self.ops.rope(k, *rotation)
        view = cache.view(batch, cache.shape.kind_of(i))
        window = c.windows[i] if c.windows else None
        return self.ops.attention(q, k, v, pool=cache.pools[i], view=view, window=window).flatten(1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.ops.rms_norm(x, self.weights[name + ".weight"], self.config.norm_eps)

    def packed(self, *names: str, paired: bool = False) -> PackedMatrix:
        weights = [self.weights[name + "_proj.weight"] for name in names]
        biases = [self.weights[n + "_proj.bias"].float() for n in names if n + "_proj.bias" in self.weights]
        return self.ops.pack(weights, torch.cat(biases) if biases else None, paired=paired)


PASSES: list[tuple[dict[int, int], dict[int, list[int]]]] = [  # rows of each slot's run, and the trees among them
    ({0: 1}, {}),
    ({1: 20, 0: 3}, {}),
    ({1: 1, 2: 66, 0: 8}, {0: [-1, 0, 0, 1, 2, 1, 4, -1]}),
    ({2: 1, 0: 1, 1: 5}, {1: [-1, -1, 0, 1, 2]}),
    ({2: 17}, {}),
]


@architectures
@pytest.mark.parametrize("layout", [16, 0, 1], ids=["paged", "contiguous", "scattered"])
def test_a_pass_is_its_operators_one_after_the_other(isa: str, dtype: torch.dtype, name: str, layout: int) -> None:
    """Bit for bit: hidden states, logits, and what is in the cache, over passes of prompts, single rows and trees."""
    config = make_config(**ARCHITECTURES[name])
    weights = random_weights(config, dtype)
    model, ops = load_model(config, weights, ops_of(isa)), ops_of(isa)
    fused, single = (Session(model, layout, max_seq_len=128) for _ in range(2))
    head = weights["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
    for seed, (rows, trees) in enumerate(PASSES):
        runs = {slot: tokens_of(n, 10 * seed + slot, config.vocab_size) for slot, n in rows.items()}
        batch = single.batch(runs, trees)
        with torch.inference_mode():
            hidden = Composed(ops, Plain.of(config), weights).forward(batch, single.cache)
            expected = torch.cat((hidden, ops.linear(hidden, ops.pack(head))), dim=1)
        single.cache.keep({slot: range(len(run)) for slot, run in runs.items()})
        assert bool(expected.isfinite().all())
        assert same_bits(fused.run(runs, trees), expected)
        for slot in runs:
            assert same_bits(fused.written(slot), single.written(slot))


@architectures
def test_a_pass_is_close_to_the_reference(isa: str, dtype: torch.dtype, name: str) -> None:
    """In float64, of the same weights; bfloat16 rounds the inputs of each product on the way."""
    config = make_config(**ARCHITECTURES[name])
    weights = random_weights(config, dtype)
    native = Session(load_model(config, weights, ops_of(isa)))
    reference = Session(load_model(config, {n: w.double() for n, w in weights.items()}, ReferenceOps(row_by_row=True)))
    for seed, (rows, trees) in enumerate(PASSES):
        runs = {slot: tokens_of(n, 10 * seed + slot, config.vocab_size) for slot, n in rows.items()}
        expected, found = reference.run(runs, trees), native.run(runs, trees)
        assert float((found - expected).abs().max() / expected.abs().max()) < (1e-5 if dtype == FLOAT32 else 0.03)


# ------------------------------------------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_come_out_of_the_packed_matrix(isa: str, dtype: torch.dtype, tied: bool) -> None:
    """A decoder without layers is the final norm of a token's row, which a tied one gathers from its packed LM head."""
    for hidden_size, vocab_size in ((1, 3), (31, 33), (52, 77), (64, 32)):
        config = make_config(num_layers=0, hidden_size=hidden_size, vocab_size=vocab_size, tied=tied)
        weights = random_weights(config, dtype)
        hidden = Session(load_model(config, weights, ops_of(isa))).run({0: list(range(vocab_size))})[:, :hidden_size]
        rows = weights["model.embed_tokens.weight"].float()
        expected = ops_of(isa).rms_norm(rows, weights["model.norm.weight"], Plain.of(config).norm_eps)
        assert same_bits(hidden.contiguous(), expected)


# ------------------------------------------------------------------------------------------------------- the LM head


def make_head(weight: Tensor, isa: str, num_threads: int = 1) -> Any:
    """A decoder that is nothing but this LM head [V, H]."""
    config = make_config(num_layers=0, vocab_size=len(weight), hidden_size=weight.shape[1])
    norm = torch.ones(weight.shape[1], dtype=weight.dtype)
    weights = {"model.embed_tokens.weight": weight, "model.norm.weight": norm}
    return load_model(config, weights, ops_of(isa, num_threads))


def by_numpy(logits: Tensor, num_ids: int) -> list[int]:
    """The lowest id of the largest logit; a NaN is larger than everything."""
    return np.argmax(logits[:, :num_ids].numpy(), axis=1).tolist()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("vocab_size", [1, 3, 31, 32, 33, 65, 1000, 5003])
def test_argmax_is_the_argmax_of_the_logits(isa: str, dtype: torch.dtype, vocab_size: int, num_threads: int) -> None:
    weight = normal(1, vocab_size, 24).to(dtype)
    head = make_head(weight, isa, num_threads)
    for num_rows in (1, 2, 8, 14, 15, 16, 65):
        hidden = normal(num_rows, num_rows, 24)
        logits = head.logits(hidden)
        assert same_bits(logits, ops_of(isa).linear(hidden, ops_of(isa).pack(weight)))
        for num_ids in {1, 2, 17, vocab_size // 2 + 1, vocab_size - 1, vocab_size} & set(range(1, vocab_size + 1)):
            for rows in (list(range(num_rows)), list(range(num_rows))[::-2]):
                ids, values = head.best(hidden, rows, num_ids)
                assert ids == by_numpy(logits[rows], num_ids)
                assert same_bits(torch.tensor(values), logits[rows, ids])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_lowest_id_wins_a_tie(isa: str, dtype: torch.dtype, num_threads: int) -> None:
    """Equal rows of the matrix have equal logits; the copies are in one panel of 32, and in far-away ones.

    The matrix is so large that it is cut into tiles, which threads take in any order.
    """
    weight = normal(2, 6007, 80).to(dtype)
    weight[[3, 9, 40, 3000, 6006]] = weight[5999] = weight[17].clone()
    weight[100:4000:7] = weight[3999] = weight[100].clone()
    head = make_head(weight, isa, num_threads)
    hidden = torch.cat((weight[[3, 100]].float(), -weight[[3, 100]].float(), torch.zeros(1, 80), normal(3, 8, 80)))
    expected = by_numpy(head.logits(hidden), 6007)
    assert (expected[0], expected[1], expected[4]) == (3, 100, 0)
    for _ in range(5):
        assert head.best(hidden, list(range(len(hidden))), 6007)[0] == expected


@pytest.mark.parametrize("num_threads", [1, 3])
def test_argmax_of_infinities_and_nan(isa: str, dtype: torch.dtype, num_threads: int) -> None:
    """The first NaN before all, minus infinity everywhere is id 0, and rows know nothing of each other."""
    weight = normal(4, 2003, 40).to(dtype)
    hidden = normal(5, 7, 40)
    hidden[1, 7], hidden[3], hidden[5] = NAN, INF, 0.0
    for special, ids in ((NAN, [1500, 70]), (INF, [33, 1999]), (-INF, [0, 64])):
        changed = weight.clone()
        changed[ids, 11] = special
        for bad in (torch.zeros(40), torch.full((40,), -1.0)):
            rows = torch.cat((hidden, bad[None]))
            head = make_head(changed, isa, num_threads)
            (ids, values), logits = head.best(rows, list(range(len(rows))), 2003), head.logits(rows)
            assert ids == by_numpy(logits, 2003)
            assert same_bits(torch.tensor(values), logits.gather(1, torch.tensor(ids)[:, None])[:, 0])
    assert make_head(torch.full((70, 40), -INF, dtype=dtype), isa).best(torch.ones(2, 40), [0, 1], 70)[0] == [0, 0]


@pytest.mark.parametrize("layout", [16, 3, 0])
def test_running_ahead_is_feeding_the_likeliest_token_again_and_again(
    isa: str, dtype: torch.dtype, layout: int
) -> None:
    """Runs of one token and more, in one call against pass by pass: the same ids, and the same rows in the cache."""
    model, num_ids = make_decoder(make_config(), dtype, isa), 70
    at_once, by_hand = (Session(model, layout, max_seq_len=128) for _ in range(2))
    lengths = {0: 5, 1: 1, 2: 9}
    for session in (at_once, by_hand):
        session.run({slot: tokens_of(4 + 20 * slot, slot, 77) for slot in lengths})
    firsts = {0: [3], 1: [3, 5], 2: tokens_of(17, 9, 77)}
    found = {slot: list[int]() for slot in lengths}
    fed = dict(firsts)
    for depth in range(max(lengths.values())):
        going = [slot for slot, length in lengths.items() if length > depth]
        rows = by_hand.run({slot: fed[slot] for slot in going}).split([len(fed[slot]) for slot in going])
        for slot, own in zip(going, rows, strict=True):
            fed[slot] = [int(own[-1][52 : 52 + num_ids].argmax())]
            found[slot] += fed[slot]
    batch = at_once.batch(firsts, {})
    for slot, length in lengths.items():
        at_once.cache.reserve(slot, len(firsts[slot]) + length - 1)
    assert model.run_ahead(batch, list(lengths.values()), at_once.cache, num_ids).ids == list(found.values())
    assert len(set(found[2])) > 2
    at_once.cache.keep({slot: range(len(firsts[slot]) + length - 1) for slot, length in lengths.items()})
    assert same_bits(*(session.run({slot: [8] for slot in lengths}) for session in (at_once, by_hand)))


def test_running_ahead_tells_probabilities_and_stops_by_them(isa: str) -> None:
    """They are the softmax of the logits. A run ends behind the first token whose share makes the product too small."""
    model, num_ids = make_decoder(make_config(), BFLOAT16, isa), 70
    firsts = {0: [3], 1: [3, 5]}

    def ahead(*stops: Stop) -> RanAhead:
        session = Session(model, max_seq_len=128)
        session.run({slot: tokens_of(4 + 20 * slot, slot, 77) for slot in firsts})
        for slot, tokens in firsts.items():
            session.cache.reserve(slot, len(tokens) + 7)
        return model.run_ahead(session.batch(firsts, {}), [8, 8], session.cache, num_ids, stops=stops)

    seen = ahead(Stop.never(8), Stop.never(8))
    whole = seen.ids
    assert whole == ahead().ids
    assert all(len(set(confidences)) > 2 for confidences in seen.confidences)
    session = Session(model, max_seq_len=128)
    for slot, tokens in firsts.items():
        session.run({slot: tokens_of(4 + 20 * slot, slot, 77)})
        logits = session.run({slot: tokens + whole[slot]})[len(tokens) - 1 : -1, 52 : 52 + num_ids]
        expected = logits.softmax(-1).gather(1, torch.tensor(whole[slot])[:, None])[:, 0]
        assert torch.tensor(seen.confidences[slot]) == pytest.approx(expected, rel=1e-3)

    # Every token has a share of one half or of 0.9, by its probability.
    shares = [0.5] * 3 + [0.9] * (len(EDGES) - 2)
    stops = [Stop(shares, [0.4] * 8), Stop(shares, [0.0, 0.0, 2.0])]
    cut = ahead(*stops)
    for b, stop in enumerate(stops):
        by_hand = Stop(stop.shares, stop.worth)
        length = next(i for i, p in enumerate(seen.confidences[b], 1) if not by_hand.goes_on(p))
        assert cut.ids[b] == whole[b][:length]
        assert cut.confidences[b] == seen.confidences[b][:length]
    assert len(cut.ids[1]) == 2


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("num_listed", [0, 10])
def test_running_ahead_draws_with_the_bits_of_the_pipeline(isa: str, num_listed: int, is_told: bool) -> None:
    """Five runs, greedy and drawn, by both kinds of draws and every filter: ids, and distributions bit by bit."""
    model, num_ids = make_decoder(make_config(), BFLOAT16, isa), 70
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=0.6, top_k=9, top_p=0.9),
              SamplingParams(temperature=0), SamplingParams(temperature=2.0, min_p=0.05),
              SamplingParams(temperature=1.5, top_p=0.7)]  # fmt: skip
    coins = [PhiloxCoins(seed, 100 + slot, 5 * slot) for slot, seed in enumerate([3, 2**64 - 1, 0, 2**40, 77])]
    draws = [
        own.ahead((*filters_of(one, num_ids)[:-1], num_listed), slot % 2 == 0)
        for slot, (own, one) in enumerate(zip(coins, params, strict=True))
    ]
    stops = [Stop.never(8) for _ in params] if is_told else []
    session = Session(model, max_seq_len=128)
    session.run({slot: tokens_of(4 + 20 * slot, slot, 77) for slot in range(5)})
    for slot in range(5):
        session.cache.reserve(slot, 2 + 7)
    firsts = {slot: [3, slot] for slot in range(5)}
    ahead = model.run_ahead(session.batch(firsts, {}), [8] * 5, session.cache, num_ids, draws=draws, stops=stops)
    found = ahead.ids

    forms = set[str]()
    for slot, tokens in firsts.items():
        by_hand = Session(model, max_seq_len=128)
        by_hand.run({slot: tokens_of(4 + 20 * slot, slot, 77)})
        logits = by_hand.run({slot: tokens + found[slot]})[len(tokens) - 1 : -1, 52 : 52 + num_ids]
        for depth, (row, token, made) in enumerate(zip(logits, found[slot], ahead.probs[slot], strict=True)):
            expected = probs(row.contiguous(), params[slot])
            drawn = coins[slot].pick if slot % 2 == 0 else coins[slot].draft
            assert token == drawn(expected, depth)
            if made.ids is not None:
                dense = np.zeros(num_ids, np.float32)
                dense[made.ids] = made.listed
                made, forms = Probs(dense=dense), forms | {"listed"}
            if expected.dense is None:
                assert made.point == token == expected.point
            else:
                assert (made.weights == expected.dense).all()
            if is_told:
                chance = row.softmax(-1)[token] if made.point is not None else made.at(token)
                assert ahead.confidences[slot][depth] == pytest.approx(float(chance), rel=1e-3)
    assert ("listed" in forms) == (num_listed > 0)
    assert len({tuple(own) for own in found}) == 5


def test_running_ahead_stays_within_the_rows_that_were_reserved(isa: str) -> None:
    session = Session(make_decoder(make_config(), BFLOAT16, isa), max_seq_len=64)
    session.run({0: [1, 2]})
    batch = session.batch({0: [3]}, {})
    assert "reserve" in refusal(InternalError, session.model.run_ahead, batch, [40], session.cache, 77)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": [2]}, "length"),
        ({"lengths": [0, 1]}, "all that is wanted"),
        ({"lengths": [4, 1]}, "all that is wanted"),
        ({"counts": [0, 2]}, "all that is wanted"),
        ({"counts": [2, 1], "lengths": [2, 2]}, "run and a position"),
        ({"positions": [2]}, "run and a position"),
        ({"draws": 1}, "a draw, or none does"),
    ],
)
def test_running_ahead_refuses_what_does_not_fit_together(isa: str, changed: dict, message: str) -> None:
    """Two runs of one token, three rows for the first and two for the second: the binding itself looks."""
    session = Session(make_decoder(make_config(), BFLOAT16, isa), max_seq_len=64)
    session.run({0: [1, 2], 1: [1, 2]})
    batch, decoder = session.batch({0: [3], 1: [4]}, {}), session.model
    for slot in (0, 1):
        session.cache.reserve(slot, 3 - slot)
    fed = dataclasses.replace(batch, run_starts=[0, 3, 5])
    numbers = [run_numbers(fed, kind.tables(fed)) for kind in session.cache.kinds]
    pools = session.cache.pools.native
    rotations = session.model._turns(16)
    good: dict[str, Any] = {"tokens": [3, 4], "positions": [2, 2], "counts": [1, 1], "lengths": [3, 2]}
    given = good | changed
    draws = [session.model.ops.extension.Draw(1.0, 0, -INF, 1.0, 0, True, 3, 4, 5)] * given.pop("draws", 0)
    rest = rotations, numbers, pools, [0, 1], 70
    assert len(decoder._native.run_ahead(*good.values(), *rest)[0][0]) == 3
    assert message in refusal(ValueError, decoder._native.run_ahead, *given.values(), *rest, draws=draws)


def test_running_ahead_stops_at_logits_that_are_no_numbers(isa: str) -> None:
    weights = random_weights(make_config(), BFLOAT16)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], NAN)
    session = Session(load_model(make_config(), weights, ops_of(isa)), max_seq_len=64)
    session.run({0: [1, 2]})
    assert session.model.run_ahead(session.batch({0: [3]}, {}), [1], session.cache, 77) is None


def test_no_rows_and_no_tokens(isa: str) -> None:
    model = make_decoder(make_config(), BFLOAT16, isa)
    assert model.logits(torch.empty(0, 52)).shape == (0, 77)
    assert model.best(torch.empty(0, 52), [], 77) == ([], [])
    assert Session(model).run({}).shape == (0, 52 + 77)


def test_what_a_pass_reads_is_counted_with_its_padding(isa: str) -> None:
    """Panels of 32 outputs; two bfloat16 weights to a step. The tied embedding counts once."""
    model = make_decoder(make_config(num_layers=1), BFLOAT16, isa)
    panels = {"qkv": (7, 26), "o": (2, 60), "gate_up": (5, 26), "down": (2, 34), "head": (3, 26)}
    assert model.bytes_per_pass == sum(num * steps * 128 for num, steps in panels.values()) + 3 * 52 * 4
