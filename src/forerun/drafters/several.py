"""Several drafters feed one tree: each drafts a chain, and the chains are siblings at the root (SpecInfer, Miao et al.
2023, arXiv 2305.09781).

Each token comes with the distribution from which its member drew the token. The chains are tested in the order of the
option `of`. That order is fixed without looking at tokens, so recursive rejection is exact. If two chains begin with
the same tokens, the rule goes on with both chains.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.drafters import Drafter, Known, Needs, Target
from forerun.drafters.shared.compound import Compound, made, specs
from forerun.errors import BadOption, shown
from forerun.registry import option
from forerun.types import Budget, Coins, Draft, Sequence


@dataclass(frozen=True)
class Options:
    """The options: the member drafters, in the order in which their chains are tested."""

    of: str = option("lookup+model", "specs of drafters with + between, as in model+(model:path=FOLDER)")

    def __post_init__(self) -> None:
        specs("several", self.of, least=2)


class SeveralDrafter(Compound):
    """Asks all members for chains. The members share the nodes that the budget grants.

    If a member has no guess, the members after it may use its share.
    """

    def __init__(self, members: Seq[Drafter]) -> None:
        super().__init__(members)
        self.shape = "tree"
        self.draws = "point" if self.draws == "point" else "any"

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        self.start()
        budget.limits = []  # forced tokens within a chain would take nodes from the other chains
        left = list(budget.num_tokens)
        chains = [list[Draft]() for _ in seqs]
        for i, member in enumerate(self.members):
            num_left = len(self.members) - i
            budget.num_tokens = [-(-nodes // num_left) for nodes in left]  # a share, rounded up
            asked = [b for b, share in enumerate(budget.num_tokens) if share > 0]
            for b, chain in zip(asked, self.ask(member, asked, seqs, budget, coins), strict=True):
                if chain.tokens:  # known before a token is drawn; a chain's length changes no other member's share
                    chains[b].append(chain)
                    left[b] -= budget.num_tokens[b]
        return Draft.joined([_side_by_side(own_chains) for own_chains in chains])


def _side_by_side(chains: Seq[Draft]) -> Draft:
    """Return one sequence's chains as a tree, with nodes in order of depth. So a shortened draft keeps low depths."""
    tree = Draft([], [], [0, 0], [])
    tips = [-1] * len(chains)
    for depth in range(max((len(chain.tokens) for chain in chains), default=0)):
        for i, chain in enumerate(chains):
            if depth < len(chain.tokens):
                tree.parents.append(tips[i])
                tips[i] = len(tree.tokens)
                tree.tokens.append(chain.tokens[depth])
                tree.probs.append(chain.probs[depth])
    tree.node_starts[1] = len(tree.tokens)
    return tree


def needs(options: Options, target: Known) -> Needs:
    """Return the needs: the specs of the members."""
    return Needs(parts=tuple(specs("several", options.of, least=2)))


def build(options: Options, target: Target) -> Drafter:
    """Build all members. A member with a draft model loads the model.

    Raises BadOption for a member that drafts trees.
    """
    members = made(specs("several", options.of), target)
    for member, spec in zip(members, specs("several", options.of), strict=True):
        if member.shape != "chain":
            raise BadOption(f"several:of has {shown(spec)}, which drafts trees: name drafters of chains")
    return SeveralDrafter(members)
