"""Rounds of the real verification rules on two small distributions. A viewer of the page can count the outcomes.

At position t of a chain, the ids of both distributions are rotated by t. So every position has the same acceptance
probability, and the counts show whether a rule reads the wrong row of the target. A round uses the engine's own parts:
a Draft, the target's rows, production coins, and a rule of forerun.verify. A setting may instead name a wrong rule,
which forerun.testing makes from a right rule.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from pydantic import Field

from forerun import testing, verify
from forerun.engine.llm import LLM
from forerun.errors import BadOption, CapacityError, ForerunError, shown
from forerun.registry import about
from forerun.sampling.random import PhiloxCoins
from forerun.theory import formulas, joint, lenience
from forerun.types import Coins, Draft, Probs

Floats = npt.NDArray[np.float64]
Weights = Annotated[list[float], Field(min_length=2, max_length=16)]
MUTANTS = {mutant.name: mutant for mutant in (*testing.MUTANTS, testing.SECOND_DRAW)}
MOST_ROUNDS = 1000  # of one request: less than a second
MOST_DRAFTED = 8
MOST_WAIT_S, MOST_WAITING = 20.0, 8  # a waiting request holds a thread of the server
MOST_ENUMERATED = 3  # siblings for which all outcomes are enumerated
SHAPES = {"chain": "independent", "independent": "independent", "distinct": "distinct"}  # -> how siblings are drawn
_TURN = threading.Lock()  # one request at a time: the engine needs the interpreter, too
_PLACES = threading.BoundedSemaphore(MOST_WAITING + 1)  # the waiting requests and the running one


@dataclass
class Setting:
    """A rule, the kind of draft that it judges, and both distributions. target, draft: the weights of V words.

    rule: as in SamplingParams.acceptance. mutant: the name in MUTANTS of a change that makes the rule wrong; None = the
    right rule. shape: "chain" for a chain of `size` tokens. Any other shape is a way to draw `size` siblings at the
    first position.
    """

    target: Weights
    draft: Weights
    rule: str = "ratio"
    mutant: str | None = None
    shape: str = "chain"
    size: Annotated[int, Field(ge=1, le=MOST_DRAFTED)] = 4


@dataclass
class Rounds(Setting):
    """A setting, and the rounds to run. The coins of a round depend only on the seed and on the round's number."""

    first_round: Annotated[int, Field(ge=0, le=10**9)] = 0
    num_rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)] = 250
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0


def make_router(llm: LLM | None = None) -> APIRouter:
    """Return the routes of the widget Unbiasedness."""
    router = APIRouter()

    @router.get("/rules")
    def rules() -> dict[str, Any]:
        """Return all verification rules, and the mutants, which make a rule wrong."""
        described = [_described(verify.find(name)) for name in verify.rules()]
        return {"rules": described, "mutants": [{"name": m.name, "needs": m.needs} for m in MUTANTS.values()]}

    @router.post("/rounds")
    def rounds(body: Rounds) -> dict[str, Any]:
        """Run rounds and return their counts. The page adds the counts of several requests."""
        with _turn():
            return counted(body)

    @router.post("/expected")
    def expected(body: Setting) -> dict[str, Any]:
        """Return the mean number of accepted tokens, the output's distance from the target, and `is_lossless`."""
        with _turn():
            return {
                "mean_accepted": expected_accepted(dataclasses.replace(body, mutant=None)),
                "exact_tv": exact_tv(body),
                "is_lossless": _checked(body).is_lossless,
            }

    return router


@contextmanager
def _turn() -> Iterator[None]:
    """Wait until earlier requests have ended, then run the block.

    Raises CapacityError if too many requests are waiting, or if the wait takes too long.
    """
    if not _PLACES.acquire(blocking=False):
        raise CapacityError(f"{MOST_WAITING} requests for rounds wait: try again when they are over")
    try:
        if not _TURN.acquire(timeout=MOST_WAIT_S):
            raise CapacityError(f"rounds of others have run for {MOST_WAIT_S:.0f} s: try again when they are over")
        try:
            yield
        finally:
            _TURN.release()
    finally:
        _PLACES.release()


def _described(rule: verify.Rule) -> dict[str, Any]:
    hints = typing.get_type_hints(rule.module.Options)
    options = [
        {"name": f.name, "default": f.default, "is_integer": hints[f.name] is int, **f.metadata}
        for f in dataclasses.fields(rule.module.Options)
    ]
    shapes = [shape for shape, draws in SHAPES.items() if rule.judges("chain" if shape == "chain" else "tree", draws)]
    said = about(rule.module)
    return {"name": rule.name, "is_lossless": rule.is_lossless, "shapes": shapes, "about": said, "options": options}


# ------------------------------------------------------------------------------------------------------------- rounds


def counted(body: Rounds) -> dict[str, Any]:
    """Run the rounds and return their counts. Raises BadOption for an impossible setting.

    words [positions][V]: how often each word was emitted at each position, with the ids of position t rotated back by
    t. accepted: how many rounds accepted 0, 1, ... tokens.
    """
    rule = _judge(body)
    target = _table(body.target)
    draw = _drafter(body)
    depth = body.size if body.shape == "chain" else 1
    rows = [testing.dense(target((0,) * d)) for d in range(depth + 1)]
    words = np.zeros((depth + 1, len(body.target)), dtype=np.int64)
    accepted = np.zeros(depth + 1, dtype=np.int64)
    num_words = len(body.target)
    for number in range(body.first_round, body.first_round + body.num_rounds):
        # The noise of `match` depends on the position alone, so each round uses positions of its own.
        coins = PhiloxCoins(body.seed, number * (MOST_DRAFTED + 1), number)
        path, tokens = _round(rule, draw, rows, coins)
        accepted[path] += 1
        for position, token in enumerate(tokens):
            words[position, (token - position) % num_words] += 1
    return {"words": words.tolist(), "accepted": accepted.tolist(), "num_rounds": body.num_rounds}


def _round(
    rule: testing.RuleFunction, draw: Callable[[Coins], Draft], rows: list[Probs], coins: Coins
) -> tuple[int, list[int]]:
    """Run one round. Returns the number of accepted drafted tokens, and the tokens that the round emits."""
    draft = draw(coins)
    depths = [0, *(len(draft.path(node)) for node in draft.nodes(0))]
    try:
        path, token, _ = rule(draft, 0, [rows[depth] for depth in depths], coins)
    except ForerunError:
        raise
    except Exception as error:  # not every rule can be made wrong in this way
        raise BadOption(f"this wrong rule cannot be made of that one ({error!r:.100}): choose another rule") from error
    return len(path), [*(draft.tokens[node] for node in path), token]


class _SharedNoise:
    """Coins for a drafter that draws with the target's noise, as drafters do for requests with the rule `match`."""

    def __init__(self, coins: Coins) -> None:
        self._coins = coins

    def draft(self, probs: Probs, depth: int, lane: int = 0) -> int:
        """Return the id that the noise of this position picks from `probs`."""
        return self._coins.pick(probs, depth)


def _table(weights: list[float]) -> testing.Table:
    """Return a function that maps the preceding tokens to a distribution. Only the number of tokens matters."""
    probs = _probs(weights)

    def table(tokens: tuple[int, ...]) -> Floats:
        return np.roll(probs, len(tokens))

    return table


def _probs(weights: list[float]) -> Floats:
    probs = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(probs).all() and (probs >= 0).all() and probs.sum() > 0):
        raise BadOption(f"{shown(weights)} are no weights: they must be numbers of at least 0, not all of them 0")
    return np.asarray(probs / probs.sum())


def _drafter(body: Setting) -> Callable[[Coins], Draft]:
    parents = list(range(-1, body.size - 1)) if body.shape == "chain" else [-1] * body.size
    draw = testing.drawn_tree(parents, _table(body.draft), SHAPES[body.shape])
    if verify.find(body.rule).name == "match" and body.shape == "chain":
        return lambda coins: draw(_SharedNoise(coins))  # type: ignore[arg-type]  # a drafter asks for nothing else
    return draw


def _checked(body: Setting) -> verify.Rule:
    """Return the rule of a setting. Raises BadOption for an impossible setting."""
    if body.shape not in SHAPES:
        raise BadOption(f"shape={shown(body.shape)} must be one of {', '.join(SHAPES)}")
    if len(body.target) != len(body.draft):
        raise BadOption(f"{len(body.target)} target and {len(body.draft)} draft weights: both must have one per word")
    rule = verify.find(body.rule)
    rule.check(body.shape, "chain" if body.shape == "chain" else "tree", SHAPES[body.shape])
    return rule


def _judge(body: Setting) -> testing.RuleFunction:
    """Return the rule of a setting, made wrong by the setting's mutant if there is one. Raises BadOption."""
    rule = _checked(body)
    if body.mutant is None:
        return rule.rule
    mutant = MUTANTS.get(body.mutant)
    if mutant is None:
        raise BadOption(f"mutant={shown(body.mutant)} is not here: it must be one of {', '.join(MUTANTS)}")
    if mutant.needs not in (body.shape, rule.name):
        raise BadOption(f"the mutant {mutant.name!r} needs {mutant.needs}: choose that shape, or that rule")
    return mutant.apply(rule.rule)


# ------------------------------------------------------------------------------------------------------------- theory


def expected_accepted(body: Setting) -> float | None:
    """Return the mean number of tokens that a round accepts; None if there are too many outcomes to compute it.

    The mean is computed by a formula if there is one, otherwise by enumerating all outcomes of one position.
    """
    rule = _checked(body)
    p = _probs(body.target)
    q = _probs(body.draft)
    if body.shape != "chain":
        if body.shape == "independent" and rule.name in ("ratio", "kseq"):
            by = formulas.recursive_acceptance if rule.name == "ratio" else formulas.kseq_acceptance
            return by(p, q, body.size)
        return _enumerated_acceptance(*_key(body), body.shape, body.size) if body.size <= MOST_ENUMERATED else None
    if rule.name in ("block", "traversal"):
        try:
            return joint.block_tokens(p, q, body.size) - 1
        except ValueError:  # too many chains to count
            return None
    if rule.name in ("ratio", "kseq"):
        alpha = formulas.acceptance(p, q)
    elif rule.name == "match":
        alpha = formulas.match_acceptance(p, q)
    elif rule.name == "lenience":
        alpha = lenience.lenient_acceptance(p, q, rule.options.l)
    else:
        alpha = _enumerated_acceptance(*_key(body), "chain", 1)
    return formulas.expected_accepted(min(1.0, alpha), body.size)


def _key(body: Setting) -> tuple[str, tuple[float, ...], tuple[float, ...]]:
    return body.rule, tuple(body.target), tuple(body.draft)


class _WithoutDraws:
    """Coins that enumerate all ways to accept and reject, but not the outcomes of the final draw.

    They are for callers that need only the number of accepted tokens.
    """

    def __init__(self, coins: Coins) -> None:
        self.accept, self.draft, self.pick, self.picks = coins.accept, coins.draft, coins.pick, coins.picks

    def draw(self, probs: Probs, depth: int) -> int:
        """Return the likeliest id of `probs`."""
        return int(probs.weights.argmax()) if probs.point is None else probs.point


@functools.lru_cache(64)
def _enumerated_acceptance(
    rule: str, target: tuple[float, ...], draft: tuple[float, ...], shape: str, size: int
) -> float:
    """Return the mean number of tokens accepted at one position, computed by enumerating all outcomes."""
    body = Setting(list(target), list(draft), rule, None, shape, size)
    judge = _judge(body)
    draw = _drafter(body)
    table = _table(body.target)
    rows = [testing.dense(table((0,) * d)) for d in range(2)]
    outcomes = testing.enumerate_outcomes(lambda coins: _round(judge, draw, rows, _WithoutDraws(coins))[0])
    return sum(weight * num for weight, num in outcomes)


def exact_tv(body: Setting) -> float | None:
    """Return the total variation distance between the target's tokens and the tokens of rounds, by enumeration.

    For a chain, one token is drafted, and the distributions are over the first two output tokens. For siblings, they
    are over the first output token. Returns None for the rule `match`, and if there are too many outcomes.
    """
    if verify.find(body.rule).name == "match" or (body.shape != "chain" and body.size > MOST_ENUMERATED):
        return None
    return _exact_tv(*_key(body), body.mutant, body.shape, 1 if body.shape == "chain" else body.size)


@functools.lru_cache(64)
def _exact_tv(
    rule: str, target: tuple[float, ...], draft: tuple[float, ...], mutant: str | None, shape: str, size: int
) -> float:
    body = Setting(list(target), list(draft), rule, mutant, shape, size)
    horizon = 2 if shape == "chain" else 1
    table = _table(body.target)
    try:
        said = testing.emitted(_judge(body), table, _drafter(body), horizon)
    except ForerunError:
        raise
    except Exception as error:
        raise BadOption(f"this wrong rule cannot be made of that one ({error!r:.100}): choose another rule") from error
    return testing.total_variation(said, testing.plain(table, horizon))
