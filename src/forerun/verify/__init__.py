"""Verification rules decide which drafted tokens are kept. Each rule is one file, found by scanning this folder.

A request selects a rule with SamplingParams.acceptance=`name`, or `name:option=value` to set options. The file
`<name>.py` defines:

    Options          a frozen dataclass; each field with its meaning and range in `metadata`
    LOSSLESS         whether the output has exactly the target's distribution
    SHAPES           the shapes of drafts that the rule can judge: "chain", "tree"
    DRAWS            the ways in which siblings of such drafts may be drawn (forerun.drafters.Drafter)
    NEEDS_ALL_ROWS   whether the rule reads the target's distribution after tokens that it may still reject
    READS_SOFT_ROWS  optional, True: rows of greedy requests have the distribution at temperature 1, too (Probs.soft)
    rule             judges one sequence: rule(draft, b, target_probs, coins, options) -> Ruling

A rule is pure: it sees distributions, tokens and coins, and no model, cache or clock. A *row* here is the target's
distribution after one token, and callers compute each row when the rule reads it. Unless it needs all rows, a rule
reads only the row after the last committed token and the rows after accepted nodes. No rule reads the row after a token
of probability 0, because masks may allow no token there.

If no distribution can be computed for a row, the row is a point mass at an id below 0, which no drafter proposes. So
rules stay exact, and need no special case for such a row. If a round ends at such a row, `ruling` makes the last
accepted token the next token. If the output goes on after that token, the next round fails as plain decoding would.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from forerun.errors import BadOption, shown
from forerun.registry import load, make_options, names, parse_spec
from forerun.types import AcceptanceTest, Coins, Draft, Probs, Verdict

# The ruling on one sequence: accepted nodes, next token, acceptance tests.
Ruling = tuple[list[int], int, list[AcceptanceTest]]


@dataclass(frozen=True)
class Rule:
    """A rule with its options, as `find` returns it."""

    name: str
    module: ModuleType
    options: Any

    @property
    def is_lossless(self) -> bool:
        """Whether the output has exactly the target's distribution."""
        return bool(self.module.LOSSLESS)

    @property
    def reads_soft_rows(self) -> bool:
        """Whether rows of greedy requests need the distribution at temperature 1, too."""
        return bool(getattr(self.module, "READS_SOFT_ROWS", False))

    def judges(self, shape: str, draws: str) -> bool:
        """Return whether the rule can judge drafts of this shape with siblings that are drawn in the way `draws`."""
        return shape in self.module.SHAPES and draws in self.module.DRAWS

    def check(self, draft: str, shape: str, draws: str) -> None:
        """Raise BadOption if this rule cannot judge a drafter. draft: its name. shape, draws: as in `judges`."""
        if not self.judges(shape, draws):
            others = [find(name) for name in rules()]
            fitting = [f"acceptance={rule.name!r}" for rule in others if rule.is_lossless and rule.judges(shape, draws)]
            raise BadOption(
                f"acceptance={shown(self.name)} cannot judge the drafts of {shown(draft)} ({shape}, {draws}): "
                f"use {' or '.join([*fitting, 'another drafter'])}"
            )

    def rule(self, draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins) -> Ruling:
        """Judge sequence b. The arguments and the result are as in the function `ruling`."""
        ruling: Ruling = self.module.rule(draft, b, target_probs, coins, self.options)
        return ruling


def rules() -> tuple[str, ...]:
    """Return the names of all rules, sorted."""
    return names(__name__)


@functools.lru_cache(64)  # requests say what rule they want, and options have any number of values
def find(spec: str) -> Rule:
    """Return the rule of `name[:option=value,...]`. Raises BadOption for an unknown rule or a wrong option."""
    name, options = parse_spec(spec)
    module = load(__name__, name, "acceptance rule")
    return Rule(name, module, make_options(module.Options, options, name))


def ruling(draft: Draft, b: int, target_probs: Seq[Probs], coins: Coins, spec: str) -> Ruling:
    """Judge sequence b of a draft by the rule that `spec` names.

    Returns (accepted nodes, next token, acceptance tests). target_probs[0] is the distribution after the last committed
    token. target_probs[1 + i] is the distribution after node i of the sequence (i counted within the sequence). The
    next token of a sequence without nodes is drawn with the noise of the rule `match`, whatever rule is named, so that
    plain decoding with a seed gives the same text under each rule.
    Raises BadOption for an unknown rule, and any error that the rule or a row of target_probs raises.
    """
    rule = find(spec)
    if draft.node_starts[b] < draft.node_starts[b + 1]:
        return _ended(draft, rule.rule(draft, b, target_probs, coins))
    row = target_probs[0]
    return [], coins.pick(row, 0) if row.point is None else row.point, []  # a point is no draw


def _ended(draft: Draft, ruling: Ruling) -> Ruling:
    """Return the ruling. If its next token is missing (below 0), the last accepted token becomes the next token."""
    path, next_token, tests = ruling
    return (path[:-1], draft.tokens[path[-1]], tests) if next_token < 0 and path else ruling


def collected(rulings: Seq[Ruling]) -> Verdict:
    """Combine the rulings on all sequences into one Verdict."""
    return Verdict(
        [path for path, _, _ in rulings], [token for _, token, _ in rulings], [tests for _, _, tests in rulings]
    )


def children_of(draft: Draft, b: int, nodes: Seq[int]) -> list[int]:
    """Return the nodes of sequence b whose parent is any of `nodes` (-1 = the last committed token), in draft order."""
    return [node for node in draft.nodes(b) if draft.parents[node] in nodes]


def equal_siblings(draft: Draft, siblings: Seq[int], node: int) -> list[int]:
    """Return `node` and its siblings with the same token. The children of all these nodes continue the path."""
    return [n for n in siblings if draft.tokens[n] == draft.tokens[node]]
