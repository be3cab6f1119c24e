"""Row invariance of whole native decoders: any pass gives the bits of plain decoding, one token at a time, alone.

Hidden states, logits and what is written to the cache, whatever the chunks of a prompt, the neighbours, the trees, the
threads and the layout of the cache.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.ops.torch import TorchModel
from ops.native_cases import (
    FLOAT32,
    ISAS,
    NAN,
    RunShape,
    Session,
    make_config,
    needs_native,
    one_by_one,
    ops_of,
    random_weights,
    same_bits,
    seeded,
    tokens_of,
)
from tensors import load_model

pytestmark = needs_native
# Of long passes `make test` leaves the slowest kernels to `make parity`.
slowest = pytest.param("baseline", marks=pytest.mark.parity if len(ISAS) > 1 else ())
every_fast_isa = pytest.mark.parametrize("isa", [slowest if isa == "baseline" else isa for isa in ISAS])

NUM_TOKENS = 530
NAN_TOKEN, HUGE_TOKEN = 75, 76  # whose embeddings are not numbers, or huge: never among the tokens that are compared
TEXT = tokens_of(NUM_TOKENS, 1, NAN_TOKEN)
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {"tied": False},
    "windows": {"tied": False, "windows": (70, 9), "head_dim": 8, "num_heads": 4, "num_kv_heads": 4},
    "qk_norm": {"tied": False, "qk_norm": True, "qkv_bias": True, "mlp_bias": True, "hidden_size": 33},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@cache
def decoder(variant: str, dtype: torch.dtype, isa: str, num_threads: int = 1) -> TorchModel:
    config = make_config(**VARIANTS[variant])
    weights = random_weights(config, dtype)
    weights["model.embed_tokens.weight"][NAN_TOKEN, ::5] = NAN
    weights["model.embed_tokens.weight"][HUGE_TOKEN] *= 1e38
    return load_model(config, weights, ops_of(isa, num_threads))


@cache
def plain(variant: str, dtype: torch.dtype, isa: str) -> tuple[Tensor, Tensor]:
    """Rows [tokens, H + V] of TEXT decoded plainly with one thread, and its keys and values."""
    session = Session(decoder(variant, dtype, isa), 0)
    rows = one_by_one(session, TEXT)
    assert bool(rows.isfinite().all())
    return rows, session.written(0)


def chunks_of(seed: int, num: int, largest: int) -> list[int]:
    """Sizes that sum to num, each 1 .. largest; half of them small."""
    generator, sizes = seeded(seed), []
    while sum(sizes) < num:
        top = largest if torch.rand((), generator=generator) < 0.5 else min(largest, 17)
        sizes.append(min(int(torch.randint(1, top + 1, (), generator=generator)), num - sum(sizes)))
    return sizes


@every_variant
def test_chunks_neighbours_layouts_and_threads(isa: str, dtype: torch.dtype, variant: str) -> None:
    """A text cut at random into chunks of 1 to 512, with up to three other sequences in the pass, one of them wild."""
    rows, written = plain(variant, dtype, isa)
    for seed, (layout, largest) in enumerate(((16, 512), (0, 64), (1, 300), (7, 16))):
        session = Session(decoder(variant, dtype, isa, 1 + seed % 3), layout, seed=seed)
        at = 0
        for step, size in enumerate(chunks_of(seed, NUM_TOKENS, largest)):
            runs = {0: TEXT[at : at + size], 1: [NAN_TOKEN, HUGE_TOKEN] * (step % 3), 2: tokens_of(step % 4, step)}
            present = {slot: run for slot, run in runs.items() if run and session.cache.length(slot) < 600}
            order = sorted(present, key=lambda slot, shift=step + seed: (slot + shift) % 3)
            found = session.run({slot: present[slot] for slot in order})
            first = sum(len(present[slot]) for slot in order[: order.index(0)])
            assert same_bits(found[first : first + size], rows[at : at + size]), (seed, at, size)
            at += size
        assert same_bits(session.written(0), written)


@every_variant
def test_tree_rows_are_chain_rows(isa: str, dtype: torch.dtype, variant: str) -> None:
    """Random trees behind contexts that end anywhere in a block, kept along a random path, beside other runs."""
    generator = seeded(3)
    for cached in (0, 5, 62, 63, 64, 120, 129, 200):
        num = int(torch.randint(2, 25, (), generator=generator))
        parents = [int(torch.randint(-1, max(i, 1), (), generator=generator)) if i else -1 for i in range(num)]
        tree, tokens = RunShape(cached, tuple(parents)), tokens_of(num, cached, NAN_TOKEN)
        session = Session(decoder(variant, dtype, isa, 1 + cached % 3), (16, 1, 0)[cached % 3], seed=cached)
        if cached:
            session.run({0: TEXT[:cached], 1: tokens_of(3, 4)})
        wild = {1: [NAN_TOKEN, 3, HUGE_TOKEN, 4]}
        found = session.run({**wild, 0: tokens}, {0: parents, 1: [-1, 0, 0, 1]}, kept={0: tree.path(num - 1)})[4:]
        alone = Session(decoder(variant, dtype, isa), 0)
        if cached:
            alone.run({0: TEXT[:cached]})
        for node in range(num):
            expected = one_by_one(alone, [tokens[i] for i in tree.path(node)])
            assert same_bits(found[node : node + 1], expected[-1:]), (cached, parents, node)
            if node < num - 1:
                alone.cache.truncate_to(0, cached)
        # The kept path is the chain in the cache, too: what follows is computed from it.
        assert same_bits(session.written(0), alone.written(0))
        assert same_bits(session.run({0: [11]}), alone.run({0: [11]}))


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_share_large_passes(isa: str, dtype: torch.dtype, num_threads: int) -> None:
    """Large enough that no part of the pass is left to one thread alone; repeated, for threads race."""
    config = make_config(hidden_size=512, ffn_size=700, num_layers=1, vocab_size=3000)
    one, many = (load_model(config, random_weights(config, dtype), ops_of(isa, n)) for n in (1, num_threads))
    text = tokens_of(50, 2)
    expected = Session(one).run({0: text})
    for seed in range(2):
        assert same_bits(Session(many, seed=seed).run({0: text}), expected)
        assert same_bits(one_by_one(Session(many, 0), text[:10]), expected[:10])


RANGE = 256  # positions whose keys are one item of work, where threads share a sequence
LONG = tokens_of(2 * RANGE + 30, 6)
LONG_VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "grouped": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "windows": {"windows": (RANGE - 1, RANGE + 44)},
}


@cache
def long_decoder(variant: str, dtype: torch.dtype, isa: str, num_threads: int) -> TorchModel:
    """Large enough that a pass of one row is not left to one thread alone."""
    config = make_config(**{"hidden_size": 512, "ffn_size": 700, "num_layers": 2, **LONG_VARIANTS[variant]})
    return load_model(config, random_weights(config, dtype), ops_of(isa, num_threads))


@cache
def long_rows(variant: str, dtype: torch.dtype, isa: str) -> Tensor:
    """Rows of LONG as a single thread decodes them, one token at a time."""
    return one_by_one(Session(long_decoder(variant, dtype, isa, 1), 0), LONG)


@every_fast_isa
@pytest.mark.parametrize("variant", LONG_VARIANTS)
def test_threads_that_share_a_sequence_by_ranges_of_its_keys(isa: str, dtype: torch.dtype, variant: str) -> None:
    """One row and up to 17 of them, behind contexts that end near the end of a range, with 2 to 4 threads."""
    expected = long_rows(variant, dtype, isa)
    for step, cached in enumerate((RANGE - 16, RANGE - 1, RANGE, RANGE + 1, 2 * RANGE - 3, 2 * RANGE)):
        session = Session(long_decoder(variant, dtype, isa, 2 + step % 3), (16, 1, 7)[step // 2], seed=step)
        session.run({0: LONG[:cached]})
        for num in (1, (8, 16, 17)[step % 3], 1):
            at = session.cache.length(0)
            assert same_bits(session.run({0: LONG[at : at + num]}), expected[at : at + num]), (cached, at, num)


@every_fast_isa
@pytest.mark.parametrize("variant", LONG_VARIANTS)
def test_trees_across_the_end_of_a_range(isa: str, dtype: torch.dtype, variant: str) -> None:
    """Nodes of one depth lie in different rows of the cache, and only the longer branches enter the next range."""
    parents = [-1, 0, 1, 2, 1, 4, 5, 6, -1, 8, 3, 10, 7, 12]
    tokens = tokens_of(len(parents), 8)
    for step, cached in enumerate((RANGE - 4, RANGE - 1, RANGE, 2 * RANGE - 6)):
        session = Session(long_decoder(variant, dtype, isa, 1 + step), (16, 0)[step % 2], seed=step)
        session.run({0: LONG[:cached]})
        found = session.run({0: tokens, 1: [5, 6, 7]}, {0: parents, 1: [-1, 0, 0]})
        alone = Session(long_decoder(variant, dtype, isa, 1), 0)
        alone.run({0: LONG[:cached]})
        tree = RunShape(cached, tuple(parents))
        for node in (3, 9, 11, 13):
            expected = one_by_one(alone, [tokens[i] for i in tree.path(node)])
            assert same_bits(found[node : node + 1], expected[-1:]), (cached, node)
            alone.cache.truncate_to(0, cached)


def test_the_fast_reference_fails_the_same_test() -> None:
    """The same decoder in torch's fast float32 operators: chunks differ from single tokens in some bit."""
    config = make_config(hidden_size=1024, num_layers=1)
    model = TorchModel(config, random_weights(config, FLOAT32))
    chunk, alone = Session(model, 0).run({0: TEXT[:40]}), one_by_one(Session(model, 0), TEXT[:40])
    assert not same_bits(chunk, alone)
    assert float((chunk - alone).abs().max()) < 1e-3  # a rounding, and no mistake
