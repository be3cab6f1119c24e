"""Which rows a rule reads: what its file declares, since callers compute a row when it is read."""

import pytest

from forerun import verify
from forerun.sampling.random import PhiloxCoins
from forerun.testing import dense, drawn_tree, tables
from forerun.types import Probs

CHAIN, TREE = (-1, 0, 1, 2), (-1, -1, 0, 0, 1)


class Rows(list[Probs]):
    """Rows that note which of them were read."""

    def __init__(self, rows: list[Probs]) -> None:
        super().__init__(rows)
        self.read: set[int] = set()

    def __getitem__(self, row):  # type: ignore[no-untyped-def]
        self.read.add(row)
        return super().__getitem__(row)


@pytest.mark.parametrize("name", verify.rules())
def test_a_rule_reads_the_rows_that_it_declares(name: str) -> None:
    """A rule that does not need all rows reads those of the root and of accepted nodes; one that does reads others."""
    module = verify.find(name).module
    target, near = tables(3, 1), tables(3, 2)
    others = set[int]()
    for seed in range(40):
        coins = PhiloxCoins(seed, 5, 0)
        draft = drawn_tree(TREE if "tree" in module.SHAPES and seed % 2 else CHAIN, near, "independent")(coins)
        contexts = [(), *(tuple(draft.tokens[i] for i in draft.path(n)) for n in draft.nodes(0))]
        rows = Rows([dense(target(context)) for context in contexts])
        path, _, _ = module.rule(draft, 0, rows, coins, module.Options())
        others |= rows.read - {0, *(node + 1 for node in path)}
    assert bool(others) == module.NEEDS_ALL_ROWS
