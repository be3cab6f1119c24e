"""How PaSS shares a budget between drafted tokens and look-ahead vectors, and where the vectors stand."""

import importlib
import itertools
from collections.abc import Iterator

import pytest
import torch

from drafters.requests import seen_of
from drafters.toys import V, crowded, engine_with
from engine.load import MODEL, run, runner_with
from forerun.models.runner import NO_NUMBERS, Run
from forerun.sampling.random import PhiloxCoins
from forerun.types import Budget, SamplingParams, Sequence
from support import rounds_of

COINS = [PhiloxCoins(0, 0, 0)]
passing = importlib.import_module("forerun.drafters.pass")


def worth(counts: tuple[int, ...]) -> float:
    """Tokens that this round and the next may accept: drafted nodes, and chains behind each number of accepted ones."""
    reach = [1.0]
    for i in range(12):
        reach.append(reach[-1] * passing.RATES[min(i, len(passing.RATES) - 1)])
    n = len(counts) - 1
    ends = [reach[a] - (reach[a + 1] if a < n else 0) for a in range(n + 1)]
    return sum(reach[1 : n + 1]) + sum(p * sum(reach[1 : c + 1]) for p, c in zip(ends, counts, strict=True))


def shares(budget: int, num_known: int, depth: int) -> Iterator[tuple[int, ...]]:
    """Every way to share a budget: lengths of the chains behind 0, 1, .. drafted tokens."""
    for n in range(min(budget, num_known) + 1):
        for counts in itertools.product(range(depth + 1), repeat=n + 1):
            if n + sum(counts) <= budget:
                yield counts


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5, 7])
def test_no_other_share_gives_more(budget: int) -> None:
    for num_known, depth in ((0, 3), (1, 2), (3, 3)):
        n = passing.num_nodes(num_known, budget, depth)
        counts, value = passing.chain_lengths(n, budget - n, depth)
        assert counts in set(shares(budget, num_known, depth))
        assert value == pytest.approx(worth(counts))
        assert value == pytest.approx(max(map(worth, shares(budget, num_known, depth))))


def test_a_draft_is_what_the_target_computes_behind_the_vectors() -> None:
    """As in the paper: a pass of its own over the text, and the vectors in place of the last token and what follows."""
    vectors = torch.randn(3, MODEL.config.hidden_size, generator=torch.Generator().manual_seed(0))
    engine = engine_with(passing.PassDrafter(vectors), 9, max_seq_len=64)
    rounds = rounds_of(engine)
    params = SamplingParams(max_tokens=24, temperature=0)
    requests = [engine.add(prompt, params) for prompt in ([1, 2, 3, 4, 1, 2], [4, 3])]
    texts = {request.seq.id: request.seq.tokens for request in requests}
    run(engine, requests)
    runner, lengths = runner_with(MODEL, 400), set()
    for one in rounds:
        known = texts[one.sequence_id][: one.position - 1]
        num = len(one.tokens)
        if num:
            tokens = [*known, *[0] * num]
            rows = {len(known) + j: vectors[j] for j in range(num)}
            runner.cache.open(one.sequence_id)
            logits = runner.forward([Run(one.sequence_id, tokens, vectors=rows)]).logits[0]
            assert logits[len(known) :].argmax(-1).tolist() == one.tokens
            runner.cache.release(one.sequence_id)
            lengths.add((num, len(one.accepted)))
    assert {num for num, _ in lengths} == {1, 2, 3}
    assert {num for _, num in lengths} > {0}, "a chain behind an accepted token was used, too"


def test_preempted_and_aborted_requests_leave_nothing() -> None:
    made = passing.PassDrafter(torch.eye(3, V))
    assert crowded(made) > 0
    assert not made._texts


def test_logits_that_are_no_numbers_are_not_drafted() -> None:
    made = passing.PassDrafter(torch.eye(2))
    for spoiled in (False, True):
        seq = Sequence(0, [5, 2, 7], 3, SamplingParams(), 0, 100)
        made.begin(seq)
        tokens = [seq.tokens[-1], *made.propose([seq], Budget([2], 0), COINS).extra[0].tokens]
        made.observe([seq], [seen_of(Run(0, tokens), best=[4, NO_NUMBERS if spoiled else 1, 1], start=2)])
        seq.tokens.append(4)
        assert len(made.propose([seq], Budget([6], 0), COINS).tokens) == 2 * (not spoiled)
