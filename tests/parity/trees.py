"""Trees of random shape in batches with other runs, against plain decoding of each of their paths, bit for bit.

Every tree is written in one to four passes, the nodes of the earlier ones pending, beside a chain whose rows are kept
and a second tree that is forgotten. Then a path of it is kept, and one more token is run behind it.
"""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch

from forerun.kv.cache import BlockCache
from forerun.models.loading import Checkpoint
from forerun.models.runner import Run, Runner, Scores
from parity.bitwise import bits, cached, feed, held_out

MAX_SEQ_LEN = 512
TREE, CHAIN, OTHER = 0, 1, 2  # slots


@dataclass
class TreeComparison:
    """The result; a row is a hidden state and its logits, or the keys and values of a kept token."""

    num_trees: int = 0
    num_grown: int = 0  # in more than one pass
    num_rows: int = 0
    num_other_rows: int = 0

    def __str__(self) -> str:
        num_equal = self.num_rows - self.num_other_rows
        return (
            f"{self.num_trees} trees, {self.num_grown} in more than one pass: {num_equal} of {self.num_rows} rows in "
            f"every bit; {self.num_other_rows} mismatches"
        )

    def add(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Rows [R, ...] and what they must be."""
        assert found.shape == expected.shape
        self.num_rows += len(found)
        self.num_other_rows += int((found != expected).flatten(1).any(1).sum())


def random_parents(rng: random.Random, num_nodes: int) -> list[int]:
    """Deep, bushy or wide; several roots now and then."""
    reach = rng.choice((1, 2, 5, num_nodes))
    return [rng.randint(max(-1, i - reach), i - 1) if i else -1 for i in range(num_nodes)]


def compare_trees(checkpoint: Checkpoint, num_trees: int, seed: int, max_nodes: int = 32) -> TreeComparison:
    """`num_trees` trees of 2 to `max_nodes` nodes behind contexts of 1 to 200 tokens."""
    rng, found = random.Random(seed), TreeComparison()
    for _ in range(num_trees):
        context = rng.choice(held_out())[: rng.choice((rng.randint(1, 20), rng.randint(50, 70), rng.randint(1, 200)))]
        parents = random_parents(rng, rng.randint(2, max_nodes))
        tokens = rng.choices(range(checkpoint.model.config.vocab_size), k=len(parents))
        _compare_one(found, checkpoint, Tree(context, tokens, parents), rng)
    return found


class Tree(NamedTuple):
    """Tokens, the parent of each, and what they are behind."""

    context: list[int]
    tokens: list[int]
    parents: list[int]


def _compare_one(found: TreeComparison, checkpoint: Checkpoint, tree: Tree, rng: random.Random) -> None:
    context, tokens, parents = tree
    rows, runner = _in_batches(found, checkpoint, tree, rng)
    plain, expected = _runner(checkpoint, "contiguous"), dict[int, torch.Tensor]()
    feed(plain, TREE, context, 64)
    paths = {-1: list[int]()}
    for node, parent in enumerate(parents):
        paths[node] = [*paths[parent], node]
    for node in sorted(paths, key=paths.__getitem__)[1:]:  # each behind its parent, which stays in the cache
        plain.cache.truncate_to(TREE, len(context) + len(paths[node]) - 1)
        expected[node] = _row(plain.forward([Run(TREE, [tokens[node]])]), 0)
        plain.cache.keep({TREE: [0]})
    found.add(*(torch.cat([own[node] for node in range(len(tokens))]) for own in (rows, expected)))
    found.num_trees += 1

    path, stop = paths[rng.randrange(len(tokens))], len(context)
    runner.cache.keep({TREE: path})
    plain.cache.truncate_to(TREE, stop)
    for node in path:
        feed(plain, TREE, [tokens[node]], 1)
    found.add(*(cached(r, TREE, stop, stop + len(path)).transpose(0, 2) for r in (runner, plain)))
    found.add(*(_row(r.forward([Run(TREE, [tokens[0]])]), 0) for r in (runner, plain)))


def _in_batches(
    found: TreeComparison, checkpoint: Checkpoint, tree: Tree, rng: random.Random
) -> tuple[dict[int, torch.Tensor], Runner]:
    """The row of each node; the whole tree is pending in slot TREE at the end."""
    context, tokens, parents = tree
    runner = _runner(checkpoint, "paged")
    feed(runner, TREE, context, rng.choice((7, 64, 200)))
    cuts = sorted(rng.sample(range(1, len(tokens)), k=min(rng.randint(0, 3), len(tokens) - 1)))
    found.num_grown += bool(cuts)
    rows = {}
    for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        other = random_parents(rng, rng.randint(2, 8))
        runs = [
            Run(TREE, tokens[start:stop], parents=parents[start:stop], pending=True),
            Run(CHAIN, rng.choices(tokens, k=rng.randint(1, 9)), "last"),
            Run(OTHER, rng.choices(tokens, k=len(other)), parents=other),
        ]
        rng.shuffle(runs)
        scores, b = runner.forward(runs), [run.slot for run in runs].index(TREE)
        rows |= {start + i: _row(scores, b, i) for i in range(stop - start)}
        runner.cache.keep({run.slot: range(len(run.tokens)) for run in runs if run.slot == CHAIN})
        runner.cache.check_integrity()
    return rows, runner


def _runner(checkpoint: Checkpoint, backend: str) -> Runner:
    model = checkpoint.model
    sizes = {"max_batch_size": 3, "max_seq_len": MAX_SEQ_LEN, "dtype": model.cache_dtype}
    pools = BlockCache.of(model, backend, **sizes)  # type: ignore[arg-type]
    for slot in (TREE, CHAIN, OTHER):
        pools.open(slot)
    return Runner(model, pools)


def _row(scores: Scores, b: int, i: int = 0) -> torch.Tensor:
    """Bits of the hidden state and the logits of row i of run b, [1, H + V]."""
    at = scores.rows[b][i]
    return torch.cat((bits(scores.hidden[at : at + 1]), bits(scores.logits[b][i : i + 1])), dim=1)
