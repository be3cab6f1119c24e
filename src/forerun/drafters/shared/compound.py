"""The base of drafters that combine other drafters, their members. In a round, some of the members are asked to draft.

Every member follows every sequence, whichever member drafts for it, because the next round may ask another member. A
draft model that was not asked for some rounds lacks committed tokens, and runs these tokens when it is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence as Seq
from typing import TYPE_CHECKING

from forerun import drafters
from forerun.drafters import Drafter, Seen, Target
from forerun.errors import BadOption, shown
from forerun.registry import parse_list
from forerun.types import Budget, Coins, Draft, Probs, Sequence

if TYPE_CHECKING:
    from forerun.kv import KVCache
    from forerun.models.runner import Runner


class _Lanes:
    """The random numbers of one member. Its draws use lanes (see `Coins`) that no other member uses."""

    def __init__(self, coins: Coins, member: int, num_members: int) -> None:
        self.accept, self.draw, self.pick, self.picks = coins.accept, coins.draw, coins.pick, coins.picks
        self._coins, self._member, self._num_members = coins, member, num_members

    def draft(self, probs: Probs, depth: int, lane: int = 0) -> int:
        return self._coins.draft(probs, depth, lane * self._num_members + self._member)


class Compound(Drafter):
    """A drafter that combines its members. It reads all of the target's outputs that any member reads."""

    def __init__(self, members: Seq[Drafter]) -> None:
        self.members = list(members)
        self.hidden_layers = tuple(sorted({k for member in members for k in member.hidden_layers}))
        self.top_logits = max(member.top_logits for member in members)
        self.shape = "tree" if any(member.shape == "tree" for member in members) else "chain"
        self.draws = _draws(members)
        self.runner = next((member.runner for member in members if member.runner is not None), None)
        self.is_free = all(member.is_free for member in members)
        self.drafts_behind = all(member.drafts_behind for member in members)
        self.caught_up: dict[int, int] = {}

    @property
    def runners(self) -> Seq[Runner]:
        return [runner for member in self.members for runner in member.runners]

    def lend(self, cache: KVCache) -> None:
        for member in self.members:
            member.lend(cache)

    def begin(self, seq: Sequence) -> None:
        for member in self.members:
            member.begin(seq)

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        for member in self.members:
            member.observe(seqs, seen)

    def resumes_from(self, seq: Sequence, num_tokens: int) -> int:
        return min(member.resumes_from(seq, num_tokens) for member in self.members)

    def end(self, seq: Sequence) -> None:
        for member in self.members:
            member.end(seq)

    def free_tokens(self, without: Collection[int] = ()) -> int | None:
        by_member = [member.free_tokens(without) for member in self.members]
        return min([free for free in by_member if free is not None], default=None)

    def catch_up(self, seqs: Seq[Sequence], num_tokens: int) -> None:
        """Let the members catch up one after another, in order, until `num_tokens` tokens are used up."""
        self.start()
        for member in self.members:
            member.catch_up(seqs, num_tokens - sum(self.caught_up.values()))
            self.count(member)

    def start(self) -> None:
        """Reset the counts of tokens and seconds of catching up. Called before a round's members are asked."""
        self.caught_up, self.catchup_s = {}, 0.0

    def ask(
        self, member: Drafter, chosen: Seq[int], seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]
    ) -> list[Draft]:
        """Return a member's draft for each of the chosen sequences. chosen: the indices of these sequences in `seqs`.

        A member may make random draws and still draft nothing, so that another member is asked for the same sequence.
        Therefore each member has its own lanes of `Coins`. coins: for each sequence, its random numbers.
        """
        if not chosen:
            return []
        share = budget.only(chosen, budget.catchup_tokens - sum(self.caught_up.values()))
        lanes = [_Lanes(coins[b], self.members.index(member), len(self.members)) for b in chosen]
        draft = member.propose([seqs[b] for b in chosen], share, lanes)
        self.count(member)
        return [draft.only(i) for i in range(len(chosen))]

    def count(self, member: Drafter) -> None:
        """Add to this drafter's counts the tokens and seconds that a member has spent on catching up."""
        for sequence_id, num_tokens in member.caught_up.items():
            self.caught_up[sequence_id] = self.caught_up.get(sequence_id, 0) + num_tokens
        self.catchup_s += member.catchup_s


def _draws(members: Seq[Drafter]) -> str:
    """Return the value of `Drafter.draws` for a compound; "any" if its members draw siblings in different ways.

    A chain has no siblings, so a member that drafts chains fits every value but "point".
    """
    trees = {member.draws for member in members if member.shape == "tree"}
    if len(trees) == 1:
        (only,) = trees
        return only if only != "point" or all(member.draws == "point" for member in members) else "any"
    if trees:
        return "any"
    return "point" if all(member.draws == "point" for member in members) else "independent"


def specs(name: str, texts: str, least: int = 1) -> list[str]:
    """Split a text such as lookup+model into the specs of the members.

    name: the method that combines the members, for messages. Raises BadOption if there are fewer than `least` members,
    or if a member is unknown.
    """
    parsed = parse_list(texts)
    if len(parsed) < least:
        raise BadOption(f"{name}:of={shown(texts)} is not possible: name at least {least} drafters, as in lookup+model")
    for spec in parsed:
        drafters.resolve(spec)
    return parsed


def of_model(name: str, spec: str) -> None:
    """Raise BadOption unless `spec` names a draft model. name: the method that combines members, for the message."""
    method, _ = drafters.resolve(spec, drafters.BY_MODEL)
    if method != "model":
        raise BadOption(f"{name}:of={shown(spec)} is not possible: it must be a draft model, as in (model:path=FOLDER)")


def made(texts: Seq[str], target: Target) -> list[Drafter]:
    """Build the members from their specs."""
    return [drafters.make(text, target) for text in texts]
