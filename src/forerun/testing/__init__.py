"""Proofs for verification rules. A proof enumerates all outcomes of a rule's coins, and must refuse wrong rules.

The next lines prove a rule `rule(draft, b, target_probs, coins) -> (path, next token, acceptance tests)`:

    target, near = tables(3, seed=1), tables(3, seed=2)
    said = emitted(rule, target, drawn_tree((-1, -1, 0), near, "independent"), horizon=3)
    assert total_variation(said, plain(target, horizon=3)) < 1e-12

`emitted` runs rule and drafter through all outcomes of their coins (exact enumeration, docs/exactness.md), and
continues each output with the target up to the horizon. A rule is exact if one round of the rule, continued by the
target, has the distribution of the target alone, because rounds compose. `MUTANTS` are small changes of a right rule,
or of its input. A proof must refuse them.

`forerun.testing.engines` proves a whole engine on a toy model in this way. `forerun.testing.wrong` switches the mutants
m1 ... m19 into the code of the package. The tests and `forerun certify` use both modules.
"""

from forerun.testing.coins import Branching, enumerate_outcomes
from forerun.testing.mutants import MUTANTS, ONE_COIN, SECOND_DRAW, Mutant
from forerun.testing.rules import (
    Floats,
    Outputs,
    RuleFunction,
    Table,
    dense,
    drawn_tree,
    emitted,
    plain,
    tables,
    total_variation,
)

__all__ = [
    "MUTANTS",
    "ONE_COIN",
    "SECOND_DRAW",
    "Branching",
    "Floats",
    "Mutant",
    "Outputs",
    "RuleFunction",
    "Table",
    "dense",
    "drawn_tree",
    "emitted",
    "enumerate_outcomes",
    "plain",
    "tables",
    "total_variation",
]
