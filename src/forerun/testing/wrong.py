"""Wrong versions of the package, m1 ... m19, each with the toy case that must detect the version.

A proof is worth something only if it can fail. `WRONG[name].switched_in()` changes the code that runs, in this process,
until the block ends. `WRONG[name].error()` is the error of the case. It must be above CAUGHT with the mutant, and below
EXACT without the mutant. The names m1 ... m19 never change. docs/exactness.md describes each version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from forerun import sampling
from forerun.drafters.shared import feeding, model_drafter
from forerun.engine import request as engine_request
from forerun.errors import BadOption
from forerun.kv.cache import BlockCache
from forerun.registry import unknown
from forerun.sampling import random as rng
from forerun.sampling.arithmetic import Row
from forerun.sampling.random import PhiloxCoins
from forerun.testing import engines
from forerun.testing.coins import Branching, Reused
from forerun.testing.engines import HORIZON, TARGET, Case, Wrap, as_they_are, resembling
from forerun.testing.mutants import MUTANTS, SECOND_DRAW
from forerun.testing.rules import Floats, RuleFunction
from forerun.theory.significance import g_test
from forerun.types import AcceptanceTest, Coins, Draft, Probs, SamplingParams, Sequence
from forerun.verify import Ruling, kseq, match, ratio

CAUGHT, EXACT = 1e-6, 1e-12
NUM_CACHE_TOKENS = 12  # of the request in `cache_errors`
NUM_ROUNDS = 2000  # with production coins, enough to find a total variation of 0.06
CHANCE = 1e-6  # a lower p-value does not come by chance; the seeds are fixed

Switch = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Wrong:
    """One wrong version of the package.

    case: the toy case in which the mutant shows. wrap: a function that changes the coins of the enumeration while the
    mutant is switched in. shows_in: where the error shows. "outputs" = in the outputs of the enumeration. "caches" = in
    cache rows, while outputs stay exact. "coins" = in draws with production coins, which the enumeration replaces.
    """

    name: str
    about: str
    switched_in: Switch
    case: Case
    wrap: Wrap = as_they_are
    shows_in: Literal["outputs", "caches", "coins"] = "outputs"

    def error(self, is_in: bool = True) -> float:
        """Return the error of the case, as `shows_in` measures it.

        "outputs" = the total variation from plain decoding. "caches" = the number of wrong cache rows. "coins" =
        `coin_error`. is_in: whether the caller has switched the mutant in. Only then does `wrap` change the coins.
        """
        if self.shows_in == "caches":
            return float(cache_errors(self.case))
        if self.shows_in == "coins":
            return coin_error()
        return engines.error(self.case, self.wrap if is_in else as_they_are)


def find(name: str) -> Wrong:
    """Return a wrong version by its name, such as m1. Raises BadOption for an unknown name."""
    if name not in WRONG:
        raise BadOption(unknown("mutant", name, WRONG))
    return WRONG[name]


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace the values of attributes until the block ends. changes: (owner, name, new value) for each attribute."""
    for owner, name, _ in changes:
        getattr(owner, name)  # a module may load an attribute only when it is first used
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


# ----------------------------------------------------------------------------------------------------------- the rules


def _rule(module: Any, number: str) -> Switch:
    """Return the switch for a mutant of a rule. With a mutant for chains, the right rule still judges trees."""
    mutant = next(m for m in (*MUTANTS, SECOND_DRAW) if m.name.split()[0] == number)

    def switch() -> AbstractContextManager[None]:
        right: RuleFunction = module.rule
        wrong = mutant.apply(right)
        if mutant.needs == "chain":
            wrong = _on_chains(wrong, right)
        return replaced((module, "rule", wrong))

    return switch


def _on_chains(wrong: RuleFunction, right: RuleFunction) -> RuleFunction:
    def rule(draft: Draft, b: int, rows: Seq[Probs], coins: Coins, *rest: Any) -> Ruling:
        chain = draft.only(b)
        is_chain = chain.parents == list(range(-1, len(chain.parents) - 1))
        return (wrong if is_chain else right)(draft, b, rows, coins, *rest)

    return rule


def _soft_greedy() -> AbstractContextManager[None]:
    """Judge greedy requests by softmax vectors although their tokens are argmaxes. Published code has this mistake."""
    right_probs, right_rule = sampling.probs, ratio.rule

    def probs(logits: Row, params: SamplingParams, history: Any = None, soft: bool = False) -> Probs:
        return right_probs(logits, params, history or sampling.History(), True)

    def rule(draft: Draft, b: int, rows: Seq[Probs], coins: Coins, *rest: Any) -> Ruling:
        if rows[0].soft is None:
            return right_rule(draft, b, rows, coins, *rest)
        path, tests = list[int](), list[AcceptanceTest]()
        for depth, node in enumerate(draft.nodes(b)):
            token = draft.tokens[node]
            p = rows[depth].soft
            q = draft.probs[node].soft or draft.probs[node]
            target_prob = 0.0 if p is None else p.at(token)
            draft_prob = q.at(token)
            is_accepted = coins.accept(target_prob / draft_prob if draft_prob > 0 else 0.0, depth)
            tests.append(AcceptanceTest(node, target_prob, draft_prob, is_accepted))
            if not is_accepted:
                break
            path.append(node)
        return path, coins.draw(rows[len(path)], len(path)), tests

    def never(*_: Any) -> bool:
        return False

    return replaced(
        (sampling, "probs", probs),
        (model_drafter, "probs", probs),
        (feeding, "takes_the_best", never),
        (engine_request, "takes_the_best", never),
        (ratio, "rule", _on_chains(rule, right_rule)),
    )


# ---------------------------------------------------------------------------------------------------- what is around it


def _noise_reused() -> AbstractContextManager[None]:
    """Leave the round number out of the counter of production coins, so that rounds reuse random numbers."""
    right = PhiloxCoins.__init__

    def without_round(self: PhiloxCoins, seed: int, position: int, round: int) -> None:
        right(self, seed, position, 0)

    return replaced((PhiloxCoins, "__init__", without_round))


def _reused(coins: Coins) -> Coins:
    return Reused(coins) if isinstance(coins, Branching) else coins


def _frozen_penalties() -> AbstractContextManager[None]:
    right = sampling.History.of
    return replaced((sampling.History, "of", staticmethod(lambda seq, drafted=(): right(seq))))


def _stale_draft_cache() -> AbstractContextManager[None]:
    """Record that the last drafted token was fed, although it was not. An old cache row is read in its place."""
    right = feeding.FedModel._forget_rejected

    def extend_upward(self: feeding.FedModel, seq: Sequence) -> None:
        fed, cache = self._fed[seq.id], self.runner.cache
        if fed.tokens and len(fed.tokens) == len(seq.tokens) - 2:
            cache.reserve(seq.id, 1)
            cache.keep({seq.id: [0]})
            fed.tokens.append(seq.tokens[-2])
        right(self, seq)

    return replaced((feeding.FedModel, "_forget_rejected", extend_upward))


def cache_errors(case: Case) -> int:
    """Count the cache rows of target and draft model that differ from the committed tokens, summed over all steps.

    A cache row of the toy model is an id and a position. So the committed tokens determine what each row must be. See
    docs/development/journey.md.
    """
    engine = engines.engine_for(case, lambda seq: PhiloxCoins(seq.seed, len(seq.tokens), seq.round))
    params = dataclasses.replace(case.params, seed=3, acceptance="ratio", max_tokens=NUM_CACHE_TOKENS)
    request = engine.add(case.prompt, params)
    drafter = engine.drafter.first
    errors = 0
    while request.seq.finish_reason is None:
        engine.step()
        for runner in filter(None, (engine.runner, drafter.runner)):
            if request.seq.finish_reason is None:
                errors += _wrong_rows(runner.cache, request.seq.id, request.seq.tokens)
    return errors


def _wrong_rows(cache: Any, slot: int, tokens: list[int]) -> int:
    """Count the wrong rows among the kept cache rows, without the last committed token's row."""
    assert isinstance(cache, BlockCache)
    held = min(cache.length(slot), len(tokens) - 1)
    ids, positions = (np.asarray(kept)[:, 0, 0] for kept in cache.pools[0].read(cache.rows(slot, 0, held)))
    return int(((ids != np.array(tokens[:held])) | (positions != np.arange(held))).sum())


def _purpose(name: str, other: str) -> Switch:
    """Return a switch that gives one purpose of random numbers, such as acceptance, the counter word of another one."""
    return lambda: replaced((rng, name, getattr(rng, other)))


def coin_error() -> float:
    """Return the total variation between the target's distribution and the tokens of `ratio` with production coins.

    Each round has its own seed and drafts two tokens. One count is of first tokens, another of tokens after an accepted
    first token. The larger total variation of these two counts is returned. A total variation counts as 0 if a G-test
    gives a p-value of CHANCE or more.
    """
    target, drafted = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.3, 0.4, 0.1, 0.2])
    p, q = (Probs(dense=probs.astype(np.float32)) for probs in (target, drafted))
    firsts, seconds = list[int](), list[int]()
    for seed in range(NUM_ROUNDS):
        coins = PhiloxCoins(seed, position=7, round=1)
        draft = Draft.chains([[coins.draft(q, depth) for depth in range(2)]], [[q, q]])
        path, token, _ = ratio.rule(draft, 0, [p, p, p], coins)
        emitted = [*(draft.tokens[node] for node in path), token]
        firsts.append(emitted[0])
        seconds += emitted[1:2]
    return max(_off(tokens, target) for tokens in (firsts, seconds))


def _off(tokens: Seq[int], probs: Floats) -> float:
    """Return the total variation between counts of tokens and `probs` [V], or 0 if the difference may be chance."""
    counts = np.bincount(tokens, minlength=len(probs))
    is_chance = g_test(counts, probs).p_value >= CHANCE
    return 0.0 if is_chance else float(np.abs(counts / counts.sum() - probs).sum() / 2)


# ------------------------------------------------------------------------------------------------------------- the list


def _case(rule: str = "ratio", drafter: str = "model", **options: Any) -> Case:
    return Case(drafter, SamplingParams(max_tokens=HORIZON, acceptance=rule, **options))


# The draft model draws from all ids, and the target's top-k forbids one of them.
WIDER = dataclasses.replace(_case(top_k=2), options={"draft_top_k": 0})
PERFECT = dataclasses.replace(_case(), near=resembling(TARGET, distance=0.0))  # so that full acceptance happens
# Where this draft model drafts one id too often, two ids are left to draw, which mutants of siblings need.
UNLIKE = resembling(TARGET, distance=4.0)
TREE = {"shape": "2"}
SIBLINGS = dataclasses.replace(_case(drafter="tree"), options={**TREE, "draws": "independent"}, near=UNLIKE)
DISTINCT = dataclasses.replace(SIBLINGS, options=TREE)
GREEDY = dataclasses.replace(_case(temperature=0.0), near=UNLIKE)
FORBIDDEN = dataclasses.replace(_case(drafter="random"), bad_words=((1, 2), (0, 1)))
PENALISED = dataclasses.replace(_case(presence_penalty=1.5), prompt=(0, 1, 0))

WRONG: Mapping[str, Wrong] = {
    wrong.name: wrong
    for wrong in (
        Wrong("m1", "a correction is drawn from the target, not from the residual", _rule(ratio, "m1"), WIDER),
        Wrong("m2", "a bonus is drawn from the draft's distribution", _rule(ratio, "m2"), WIDER),
        Wrong("m3", "a token is accepted only where p >= q", _rule(ratio, "m3"), WIDER),
        Wrong("m4", "the residual is not clamped at 0", _rule(ratio, "m4"), WIDER),
        Wrong("m5", "a mismatch is followed by a second draw", _rule(match, "m5"), _case("match")),
        Wrong("m6", "an unlikely drafted token is dropped", _rule(ratio, "m6"), WIDER),
        Wrong("m7", "equal siblings are merged", _rule(ratio, "m7"), SIBLINGS),
        Wrong("m8", "siblings without replacement keep the first q", _rule(ratio, "m8"), DISTINCT),
        Wrong("m9", "siblings are sorted by their probability", _rule(ratio, "m9"), SIBLINGS),
        Wrong("m10", "greedy is judged by softmax vectors", _soft_greedy, GREEDY),
        Wrong("m11", "the target's rows are shifted by one", _rule(ratio, "m11"), WIDER),
        Wrong("m12", "q is stated at another temperature than it was drawn at", _rule(ratio, "m12"), WIDER),
        Wrong(
            "m13",
            "block verification sees the noise of an earlier round again",
            _noise_reused,
            dataclasses.replace(_case("block"), gamma=3),
            _reused,
        ),
        Wrong(
            "m14",
            "K-SEQ with a ratio of 1",
            lambda: replaced((kseq, "ratio_of", lambda p, q, num: 1.0)),
            dataclasses.replace(SIBLINGS, params=dataclasses.replace(SIBLINGS.params, acceptance="kseq")),
        ),
        Wrong("m15", "a drafted bad word is dropped, and a bonus drawn", _rule(ratio, "m15"), FORBIDDEN),
        Wrong("m16", "penalties are frozen at the start of a round", _frozen_penalties, PENALISED),
        Wrong(
            "m17",
            "the draft's cache is stale after a fully accepted draft",
            _stale_draft_cache,
            PERFECT,
            shows_in="caches",
        ),
        Wrong(
            "m18",
            "a correction is drawn with the number that rejected the token",
            _purpose("PURPOSE_ACCEPT", "PURPOSE_NEXT"),
            WIDER,
            shows_in="coins",
        ),
        Wrong(
            "m19",
            "a token is accepted by the number that it was drafted with",
            _purpose("PURPOSE_DRAFT", "PURPOSE_ACCEPT"),
            WIDER,
            shows_in="coins",
        ),
    )
}
