"""Which drafted tokens are kept: one rule per file, found by scanning this folder.

A file holds `NAME` (the value of SamplingParams.acceptance), `rule` (one sequence) and `verify` (a whole draft). A rule
is pure: it sees laws, tokens and coins, and no model, cache or clock. Every law may be asked for late, and a law behind
a rejection must not be asked for: callers compute them on demand.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Sequence as Seq
from types import ModuleType

from forerun.errors import BadOption, InternalError
from forerun.types import Coins, Draft, Probs, Trial, Verdict

Ruling = tuple[list[int], int, list[Trial]]  # on one sequence: path, next token, trials


@functools.cache
def _modules() -> dict[str, ModuleType]:
    """NAME -> module of every rule file."""
    files = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in sorted(files)]
    return {module.NAME: module for module in modules}


def rules() -> list[str]:
    """The names of all rules, sorted."""
    return sorted(_modules())


def find(name: str) -> ModuleType:
    """The module of a rule. Raises BadOption with the names that exist."""
    module = _modules().get(name)
    if module is None:
        raise BadOption(f"there is no acceptance rule {name!r}: it must be one of {', '.join(rules())}")
    return module


def judge(draft: Draft, target_probs: Seq[Seq[Probs]], coins: Seq[Coins], rules: Seq[str]) -> Verdict:
    """Rule on every sequence by its own rule.

    target_probs[b][0] is the law after the last committed token, target_probs[b][1 + i] the law after node i of
    sequence b (i counted within the sequence). rules [B] are names. A sequence without nodes is decided by the match
    noise whatever its rule, so that plain decoding with a seed is one text. Raises BadOption for an unknown rule.
    """
    if len(coins) != len(rules):
        raise InternalError(f"{len(rules)} sequences are to be judged with the coins of {len(coins)}")
    starts, modules = draft.node_starts, {name: find(name) for name in set(rules)}
    rulings: list[Ruling] = []
    for b, (laws, name) in enumerate(zip(target_probs, rules, strict=True)):
        if starts[b] < starts[b + 1]:
            rulings.append(modules[name].rule(draft, b, laws, coins[b]))
        else:
            law = laws[0]
            rulings.append(([], coins[b].pick(law, 0) if law.point is None else law.point, []))  # a point needs no coin
    return collected(rulings)


def collected(rulings: Seq[Ruling]) -> Verdict:
    """The rulings on all sequences as one verdict."""
    return Verdict(
        [path for path, _, _ in rulings], [token for _, token, _ in rulings], [tests for _, _, tests in rulings]
    )


def chain_nodes(draft: Draft, b: int, rule: str) -> range:
    """The nodes of sequence b, which must be a chain. Raises BadOption for a tree."""
    nodes = draft.nodes(b)
    if any(draft.parents[n] != (n - 1 if n > nodes.start else -1) for n in nodes):
        raise BadOption(f"the acceptance rule {rule!r} judges chains and this draft is a tree: use a drafter of chains")
    return nodes
