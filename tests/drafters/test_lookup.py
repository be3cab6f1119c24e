"""Prompt lookup: what it finds, and how much of a text each of its calls reads."""

import random
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest

from drafters.toys import engine_with
from engine.load import run
from forerun.drafters import Seen
from forerun.drafters.lookup import LookupDrafter, Options, follower
from forerun.drafters.suffix import Options as SuffixOptions, SuffixDrafter
from forerun.types import Budget, Coins, Draft, SamplingParams, Sequence


def indexed(text: list[int], min_n: int, max_n: int) -> int | None:
    """What `follower` finds, by an index of all n-grams: each knows the token behind its last occurrence."""
    behind = {tuple(text[end - n : end]): end for end in range(1, len(text)) for n in range(1, min(max_n, end) + 1)}
    found = [behind.get(tuple(text[-n:])) for n in range(min_n, min(max_n, len(text)) + 1)]
    return next((end for end in reversed(found) if end is not None), None)


@pytest.mark.parametrize("num_ids", [1, 2, 5, 40])
def test_the_last_occurrence_of_the_longest_suffix(num_ids: int) -> None:
    random_ = random.Random(num_ids)
    results = []
    for _ in range(1500):
        text = [random_.randrange(num_ids) for _ in range(random_.randint(1, 30))]
        max_n = random_.choice((1, 2, 3, 5, 64))
        min_n = random_.randint(1, max_n)
        results.append(indexed(text, min_n, max_n))
        assert follower(np.array(text, dtype=np.intc), min_n, max_n) == results[-1], (text, min_n, max_n)
    assert len(set(results)) > 10
    assert None in results


class Watched(LookupDrafter):
    """Notes how many tokens of texts each call of observe and of propose reads."""

    def __init__(self) -> None:
        super().__init__(Options())
        self.num_read: dict[str, list[int]] = {"observe": [], "propose": []}

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        before = num_read(seqs)
        super().observe(seqs, seen)
        self.num_read["observe"].append(num_read(seqs) - before)

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        before = num_read(seqs)
        draft = super().propose(seqs, budget, coins)
        self.num_read["propose"].append(num_read(seqs) - before)
        return draft


class Text(list[int]):
    """Tokens that count how many of them are read."""

    num_read = 0

    def __getitem__(self, i: Any) -> Any:
        found = super().__getitem__(i)
        self.num_read += len(found) if isinstance(i, slice) else 1
        return found


def num_read(seqs: Seq[Sequence]) -> int:
    return sum(seq.tokens.num_read for seq in seqs if isinstance(seq.tokens, Text))


def test_a_long_prompt_is_read_while_the_target_reads_it() -> None:
    """Once, chunk by chunk, with the token behind each: no step has to read anything before it drafts."""
    drafter = Watched()
    engine = engine_with(drafter, 3, prefill_chunk_tokens=16)
    for chunks in ([17] + [16] * 5 + [3], [100]):  # the second time, 96 tokens are found in the cache
        request = engine.add([i % 9 for i in range(100)], SamplingParams(max_tokens=12, temperature=0.0))
        request.seq.tokens = Text(request.seq.tokens)
        run(engine, [request])
        assert request.report.num_drafted > 0
        assert drafter.num_read["observe"][: len(chunks)] == chunks
        assert set(drafter.num_read["propose"]) == {0}
        assert sum(map(sum, drafter.num_read.values())) <= len(request.seq.tokens)
        drafter.num_read = {"observe": [], "propose": []}


@pytest.mark.parametrize(
    ("source", "tokens", "guess"),
    [
        ([5, 6, 7, 8, 9], [0, 5, 6], [7, 8, 9]),  # up to the source's end, which nothing follows
        ([5, 6, 7, 8, 9], [0, 9], []),
        ([5, 6, 7, 8, 9], [0, 5, 6, 1, 2, 5, 6], [1, 2, 5, 6, 1, 2]),  # what was said last comes first
        ([5, 6], [0, 4], []),
    ],
)
def test_the_source_of_an_encoder_decoder_is_looked_through(
    source: list[int], tokens: list[int], guess: list[int]
) -> None:
    seq = Sequence(0, tokens, 1, SamplingParams(temperature=0), 0, 99, source_ids=tuple(source))
    for drafter in (LookupDrafter(Options()), SuffixDrafter(SuffixOptions(shape="path"))):
        found = drafter.propose([seq], Budget([6], 0), [])
        assert found.tokens == guess[: len(found.tokens)]
        assert bool(found.tokens) == bool(guess)
        assert seq.id in drafter._texts.by_id
        seq.tokens.append(3)
        drafter.propose([seq], Budget([6], 0), [])
        assert drafter._texts.by_id[0].ids.tolist() == [*source, -1, *seq.tokens]
        seq.tokens.pop()
