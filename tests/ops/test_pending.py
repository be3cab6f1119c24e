"""Pending rows: a tree that grows level by level equals the tree in one pass, and each of its paths equals a chain.

Hidden states, logits, and the cache after a path is kept are compared. Native operators and reference operators in
row_by_row mode agree bit for bit; in fast mode they agree by value.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from forerun.errors import InternalError
from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, Runner, pack
from forerun.ops.reference import ReferenceOps, run_mask
from forerun.ops.rotary import Rotations
from forerun.ops.torch import TorchModel
from forerun.types import RaggedBatch, ancestor_words
from ops.native_cases import ISAS, Same, every_ops, make_config, make_decoder, path_to, random_weights, read, tokens_of
from refusals import refusal
from tensors import load_model

NEIGHBOUR = 7  # a slot
CONTEXT = tokens_of(61, 1)  # so that trees reach over the end of a block of 64 keys
VARIANTS = {"grouped": {}, "windows": {"windows": (9, 70)}}


@dataclass(frozen=True)
class Tree:
    """tokens and parents of nodes, parents before children; levels: the nodes of each depth."""

    tokens: list[int]
    parents: list[int]

    @classmethod
    def random(cls, num_nodes: int, seed: int) -> Tree:
        rng = random.Random(seed)
        # Close to the end: deep; anywhere: wide.
        reach = rng.choice((2, 5, num_nodes))
        return cls(tokens_of(num_nodes, seed), [rng.randint(max(-1, i - reach), i - 1) for i in range(num_nodes)])

    def path(self, node: int) -> list[int]:
        return path_to(node, self.parents)

    def levels(self) -> list[list[int]]:
        depths = [len(self.path(node)) - 1 for node in range(len(self.tokens))]
        return [[n for n, depth in enumerate(depths) if depth == d] for d in range(max(depths) + 1)]


class Bench:
    """A runner with a slot 0 that holds the context, and a neighbour that decodes beside it."""

    def __init__(self, model: TorchModel, context: Seq[int] = CONTEXT) -> None:
        cache = BlockCache.of(model, "paged", max_batch_size=4, max_seq_len=256)
        self.runner, self.cache = Runner(model, cache), cache
        for slot in (0, NEIGHBOUR):
            cache.open(slot)
        self.rows(Run(0, context))
        cache.keep({0: range(len(context))})

    def rows(self, run: Run, neighbour: Seq[int] = ()) -> Tensor:
        """Hidden states and logits of the run's rows, side by side. The neighbour's rows are kept."""
        scores = self.runner.forward([Run(NEIGHBOUR, neighbour, "last"), run] if neighbour else [run])
        self.cache.keep({NEIGHBOUR: range(len(neighbour))})
        hidden = scores.hidden[scores.rows[-1].start : scores.rows[-1].stop]
        return torch.cat((hidden, torch.from_numpy(scores.logits[-1]).to(hidden.dtype)), dim=1)

    def held(self) -> Tensor:
        """Keys and values of what slot 0 keeps."""
        rows = self.cache.rows(0, 0, self.cache.length(0))
        return torch.stack([torch.stack(read(pool, rows)) for pool in self.cache.pools])


def chain_rows(model: TorchModel, tokens: Seq[int]) -> tuple[Tensor, Tensor]:
    """The rows of these tokens behind the context, one pass for each, and what is held at the end."""
    bench, found = Bench(model), []
    for token in tokens:
        found.append(bench.rows(Run(0, [token])))
        bench.cache.keep({0: [0]})
    return torch.cat(found), bench.held()


def grow(bench: Bench, tree: Tree) -> tuple[Tensor, list[int]]:
    """Level by level; rows of the nodes in the tree's order, and where each node stands among the pending rows."""
    at, found = [-1] * len(tree.tokens), [torch.empty(0)] * len(tree.tokens)
    for depth, level in enumerate(tree.levels()):
        parents = [-1 if tree.parents[n] < 0 else at[tree.parents[n]] for n in level]
        run = Run(0, [tree.tokens[n] for n in level], parents=parents, pending=True)
        num_before = len(bench.cache.pending(0))
        for i, row in enumerate(bench.rows(run, tokens_of(1 + depth % 3, depth))):
            at[level[i]], found[level[i]] = num_before + i, row
        bench.cache.check_integrity()
    return torch.stack(found), at


@pytest.mark.parametrize("variant", VARIANTS)
@every_ops
def test_level_by_level_at_once_and_as_chains(ops: ReferenceOps, dtype: torch.dtype, same: Same, variant: str) -> None:
    config = make_config(**VARIANTS[variant])
    model = load_model(config, random_weights(config, dtype), ops)
    for seed, num_nodes in enumerate((2, 9, 24, 33)):
        tree = Tree.random(num_nodes, seed)
        at_once, grown = Bench(model), Bench(model)
        whole = at_once.rows(Run(0, tree.tokens, parents=tree.parents), tokens_of(5, 3))
        found, at = grow(grown, tree)
        assert same(found, whole)
        for node in {0, num_nodes // 2, num_nodes - 1}:
            path = tree.path(node)
            expected, _ = chain_rows(model, [tree.tokens[n] for n in path])
            assert same(whole[path], expected)
        kept = tree.path(num_nodes - 1)
        assert at_once.cache.keep({0: kept}) == grown.cache.keep({0: [at[n] for n in kept]})
        expected, held = chain_rows(model, [*(tree.tokens[n] for n in kept), 11])
        for bench in (at_once, grown):
            assert list(bench.cache.pending(0)) == []
            assert same(bench.rows(Run(0, [11])), expected[-1:])
            bench.cache.keep({0: [0]})
            assert same(bench.held(), held)


@every_ops
def test_pending_rows_and_the_run_are_kept_as_one(ops: ReferenceOps, dtype: torch.dtype, same: Same) -> None:
    """A chain is pending, a tree comes behind it, and the path goes through both; then a pending chain goes on."""
    model = load_model(make_config(), random_weights(make_config(), dtype), ops)
    bench = Bench(model)
    bench.rows(Run(0, [1, 2], pending=True))
    bench.rows(Run(0, [3], pending=True))  # behind 2
    bench.rows(Run(0, [4, 5, 6], parents=[1, 2, 3]))  # 4 and 5 behind 2 and 3, 6 behind 4
    bench.cache.keep({0: [0, 1, 3, 5]})
    expected, held = chain_rows(model, [1, 2, 4, 6])
    assert same(bench.held(), held)
    bench.rows(Run(0, [9], pending=True))
    bench.cache.truncate_to(0, len(CONTEXT) + 2)
    assert list(bench.cache.pending(0)) == []
    bench.rows(Run(0, [4], pending=True))
    assert same(bench.rows(Run(0, [6])), expected[-1:])
    bench.cache.keep({0: [0, 1]})
    assert same(bench.held(), held)


def test_a_tree_costs_the_other_runs_nothing() -> None:
    """The other runs of the pass have no parents, and a single row has no mask."""
    cache = BlockCache.create(make_config().cache_shape, "paged", max_batch_size=3, max_seq_len=64)
    runs = [Run(0, [1]), Run(1, [1, 2, 3], parents=[-1, 0, 0]), Run(2, [1, 2], parents=[-1, 0])]
    for run in runs:
        cache.open(run.slot)
        cache.reserve(run.slot, len(run.tokens))
    batch = pack(runs, cache)
    assert [batch.is_tree(b) for b in range(3)] == [False, True, False]
    assert batch.parents(1) == [-1, 0, 0]
    plan = ReferenceOps().plan(cache.view(batch))
    assert plan.mask(0, None) is None
    assert torch.equal(run_mask(plan, 2, None), torch.tensor([[0, -torch.inf], [0, 0]]))
    assert pack([runs[0], runs[2]], cache).ancestors == ()


@pytest.mark.parametrize("num_pending", [0, 3])
def test_a_word_says_what_a_row_sees(num_pending: int) -> None:
    """The rows that all see, and then one bit for each other row: 64 nodes behind the last committed token fit."""
    rng = random.Random(num_pending)
    for _ in range(20):
        parents = [-1, *(rng.randint(0, i - 1) for i in range(1, 65))]
        words = ancestor_words(parents)[num_pending:]
        positions = [word.bit_count() for word in words]
        batch = RaggedBatch([0] * len(words), positions, [0, len(words)], [0], [7], [num_pending], words)
        shared, own = batch.words(0)
        assert shared >= 1
        assert max(own) < 1 << 64
        for i, word in enumerate(own):
            path = path_to(num_pending + i, parents)
            assert [*range(shared), *(shared + j for j in range(64) if word >> j & 1)] == path
            assert batch.visible(0, i) == [*range(7), *(7 + j for j in path)]


def test_what_cannot_be_pending() -> None:
    cache = BlockCache.create(make_config().cache_shape, "paged", max_batch_size=1, max_seq_len=32)
    cache.open(0)
    cache.reserve(0, 16)
    cache.hold(0, [-1, 0])
    for parents in ([2], [0, 4], [-2]):
        assert "a parent comes first" in refusal(InternalError, cache.hold, 0, parents)
    assert "reserve them first" in refusal(InternalError, cache.hold, 0, range(1, 16))
    assert list(cache.pending(0)) == [-1, 0]


@pytest.mark.skipif(not ISAS, reason="the native decoder runs ahead")
def test_nothing_runs_ahead_of_a_pending_tree() -> None:
    """Of a pending chain it does."""
    bench = Bench(make_decoder(make_config(), torch.float32, ISAS[0]))
    bench.rows(Run(0, [1, 2], pending=True))
    expected = bench.runner.run_ahead([Run(0, [3])], [4])
    bench.cache.keep({0: [0, 1]})
    assert bench.runner.run_ahead([Run(0, [3])], [4]) == expected
    bench.rows(Run(0, [1, 2], parents=[-1, -1], pending=True))
    assert "pending tree" in refusal(InternalError, bench.runner.run_ahead, [Run(0, [3])], [4])


@every_ops
def test_positions_reach_as_far_as_pending_rows(ops: ReferenceOps, dtype: torch.dtype, same: Same) -> None:
    """Deep in a pending tree, a row's position lies beyond the rotations that its own run alone would need."""
    context, tree = tokens_of(Rotations.BLOCK - 6, 2), Tree(tokens_of(12, 3), [-1, -1, *range(1, 11)])
    model, longer = (load_model(make_config(), random_weights(make_config(), dtype), ops) for _ in range(2))
    bench, alone = Bench(model, context), Bench(longer, context)
    found, at = grow(bench, tree)
    assert at == list(range(12))
    assert same(found[1:], alone.rows(Run(0, tree.tokens[1:])))
