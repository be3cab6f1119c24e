"""Recurrent layers in torch, row by row: however passes are cut, drafted and rejected, rows keep their bits."""

import random

import numpy as np
import pytest

from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, Runner
from support import VOCAB, random_hybrid

LENGTH = 90


def wrong(chance: random.Random) -> int:
    return chance.randrange(VOCAB)


def branched(chance: random.Random, path: list[int]) -> tuple[list[int], list[int], list[int]]:
    """A tree that holds a path among wrong siblings: its tokens, their parents, and where the path stands."""
    tokens = list[int]()
    parents = list[int]()
    rows = list[int]()
    last = -1
    for token in path:
        before, behind = ([wrong(chance)] * (chance.random() < 0.5) for _ in range(2))
        rows.append(len(tokens) + len(before))
        tokens += [*before, token, *behind]
        parents += [last] * (len(before) + 1 + len(behind))
        last = rows[-1]
    return tokens, parents, rows


@pytest.mark.parametrize("seed", range(6))
def test_rows_have_the_bits_of_one_pass(seed: int) -> None:
    chance = random.Random(seed)
    text = chance.choices(range(VOCAB), k=LENGTH)
    model = random_hybrid(1, row_by_row=True)
    runner = Runner(model, BlockCache.of(model, "paged", max_batch_size=4, max_seq_len=128))
    cache = runner.cache
    cache.open(0)
    whole = runner.forward([Run(0, text)]).logits[0]
    cache.open(1)
    at, seen = 0, set[str]()
    while at < len(text):
        num = min(chance.choice((1, 1, 2, 5, 17, 40)), len(text) - at)
        kind = chance.choice(("silent", "chain", "tree", "held"))
        part = text[at : at + num]
        if kind == "silent":
            runner.forward([Run(1, part, "none")])
            cache.keep({1: range(num)})
        elif kind == "chain":
            scores = runner.forward([Run(1, [*part, *(wrong(chance) for _ in range(3))])]).logits[0]
            assert np.array_equal(scores[:num], whole[at : at + num])
            cache.keep({1: range(num)})
        else:
            num = min(num, 5)
            part = part[:num]
            tokens, parents, rows = branched(chance, part)
            cut = chance.randrange(1, len(tokens)) if kind == "held" and len(tokens) > 1 else 0
            logits = np.empty((0, VOCAB), np.float32)
            if cut:
                logits = runner.forward([Run(1, tokens[:cut], "all", parents[:cut], pending=True)]).logits[0]
            logits = np.concatenate((logits, runner.forward([Run(1, tokens[cut:], "all", parents[cut:])]).logits[0]))
            assert np.array_equal(logits[rows], whole[at : at + num])
            cache.keep({1: rows})
        at += num
        seen.add(kind)
        cache.publish(1, text[:at])
        cache.check_integrity()
    assert len(seen) > 2
    cache.release(1)
    found = cache.open(1, text)  # the state before its last pass
    assert found > 0
    assert np.array_equal(runner.forward([Run(1, text[found:])]).logits[0], whole[found:])
