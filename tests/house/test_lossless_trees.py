"""House test 1 for trees: drafts of random shape through the whole engine, by exact enumeration."""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence as Seq

import pytest

from forerun import pacing, verify
from forerun.drafters import Drafter
from forerun.engine.engine import Engine
from forerun.testing import Branching, drawn_tree, enumerate_outcomes, tables
from forerun.testing.engines import (
    HORIZON,
    PROMPT,
    SPACE_TOKENS,
    TARGET,
    V,
    is_whole,
    letters,
    runner_for,
    second_pipeline,
    total_variation,
)
from forerun.types import Budget, Coins, Draft, RoundDetail, SamplingParams, Sequence
from support import rounds_of

EXACT = 1e-12
NUM_NODES = 4
SAMPLING = {
    "plain": SamplingParams(max_tokens=2 * HORIZON),
    "filters": SamplingParams(max_tokens=2 * HORIZON, temperature=0.7, top_k=2),
    "penalties": SamplingParams(max_tokens=2 * HORIZON, repetition_penalty=1.6, frequency_penalty=0.5),
    "grammar": SamplingParams(max_tokens=2 * HORIZON, choice=("ab", "abc", "acba", "bb", "ba", "cacc", "caba")),
    "greedy": SamplingParams(max_tokens=2 * HORIZON, temperature=0.0),
}


class RandomTrees(Drafter):
    """Draws a tree of another random shape in each round, from a table of its own."""

    shape = "tree"

    def __init__(self, seed: int, draws: str) -> None:
        self.draws, self._seed, self._table = draws, seed, tables(V, seed)

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        (seq,) = seqs
        rng = random.Random(f"{self._seed} {seq.tokens}")
        parents = [rng.randrange(-1, node) for node in range(NUM_NODES)]
        draft = drawn_tree(parents, lambda path: self._table((seq.tokens[-1], *path)), self.draws)(coins[0])
        kept = min(len(draft.tokens), budget.num_tokens[0])
        return Draft(draft.tokens[:kept], draft.parents[:kept], [0, kept], draft.probs[:kept])


def check_first_round(make: Callable[[], Drafter], params: SamplingParams) -> list[RoundDetail]:
    """Assert that HORIZON tokens have the target's law where one round of the engine says the first of them.

    The target's own distribution says the others. Returns the rounds of all outcomes.
    """
    rounds: list[RoundDetail] = []

    def run(way: Branching) -> tuple[int, ...]:
        coins, tokenizer = (lambda seq: way.at(len(seq.tokens))), letters(V, frozenset())
        policy, sizes = pacing.make("fixed", NUM_NODES), {"max_seq_len": SPACE_TOKENS, "max_batch_size": 1}
        engine = Engine(runner_for(TARGET), make(), policy, coins=coins, tokenizer=tokenizer, **sizes)
        own = rounds_of(engine)
        request = engine.add(PROMPT, params)
        while not own and request.error is None:
            engine.step()
        assert request.error is None
        rounds.extend(own)
        return tuple(request.seq.output_ids)

    said: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, output in enumerate_outcomes(run):
        for rest, share in continued(output, params):
            said[rest] += weight * share
    assert sum(said.values()) == pytest.approx(1, abs=EXACT)
    assert total_variation(said, dict(continued((), params))) < EXACT
    return rounds


def has_siblings(rounds: Seq[RoundDetail]) -> bool:
    """Whether a draft had several tokens behind the same one."""
    return any(len(set(detail.parents)) < len(detail.parents) for detail in rounds)


def continued(output: tuple[int, ...], params: SamplingParams) -> Iterator[tuple[tuple[int, ...], float]]:
    """The outputs of HORIZON tokens that begin so, and their probabilities, by the target alone."""
    if len(output) >= HORIZON or is_whole(params, output):
        yield output[:HORIZON], 1.0
        return
    logits = TARGET.logits_after([*PROMPT, *output]).tolist()
    for token, share in enumerate(second_pipeline(logits, params, PROMPT, output, ())):
        if share > 0:
            for rest, weight in continued((*output, token), params):
                yield rest, share * weight


def judges(rule: str, draws: str) -> bool:
    """Whether the rule is lossless and can judge trees with such siblings."""
    module = verify.find(rule).module
    return module.LOSSLESS and "tree" in module.SHAPES and draws in module.DRAWS


DRAWS = ("point", "independent", "distinct")
PAIRS = [(rule, draws) for rule in verify.rules() for draws in DRAWS if judges(rule, draws)]
CASES = [
    (sampling, *pair)
    if pair[0] in ("ratio", "match") or sampling in ("plain", "greedy")
    else pytest.param(sampling, *pair, marks=pytest.mark.parity)
    for sampling in SAMPLING
    for pair in PAIRS
]


@pytest.mark.parametrize(("sampling", "rule", "draws"), CASES)
def test_trees_of_random_shape_say_what_the_target_says(sampling: str, rule: str, draws: str) -> None:
    params = dataclasses.replace(SAMPLING[sampling], acceptance=rule)
    drafter = RandomTrees(0, draws)  # shapes differ by round
    assert has_siblings(check_first_round(lambda: drafter, params))
