"""A search of the text that comes before the draft model, for all drafters with a model.

A search costs little. Its guess is drafted if it is expected to bring more accepted tokens than the model's guess
(`Stop.search`). The choice is made before any token is drawn, so drafts stay exact (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun import drafters
from forerun.drafters import Drafter, Target
from forerun.errors import BadOption, shown
from forerun.registry import unwrapped
from forerun.types import Budget, Coins, Draft, Sequence

SEARCH = {
    "help": "drafter without a model that searches the text first, and is believed where that promises more than the "
    "model; with pacing=auto; none = the model alone"
}


class SearchingDrafter(Drafter):
    """A drafter that runs its model only if a search of the text finds no better guess.

    A subclass defines `own_draft` and `num_unread`. search: the drafter that searches the text; None = no search.
    """

    search: Drafter | None = None

    def search_by(self, spec: str, method: str, target: Target) -> None:
        """Make the drafter of `spec` search the text first. Does nothing if `tells_confidence` is False.

        spec: "none" = no search. method: this drafter's method, for messages. Raises BadOption for a drafter whose
        guesses cannot be compared with the model's.
        """
        if spec == "none" or not self.tells_confidence:
            return
        name, _ = target.opened.resolve(unwrapped(spec))
        self.search = None if drafters.has_needs(name) else drafters.make(unwrapped(spec), target)
        self.searches = True
        if self.search is None or not (self.search.tells_confidence and self.search.is_free):
            raise BadOption(f"{method}:search={shown(spec)} is not possible: it must be suffix")

    def begin(self, seq: Sequence) -> None:
        if self.search is not None:
            self.search.begin(seq)

    def end(self, seq: Sequence) -> None:
        if self.search is not None:
            self.search.end(seq)

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        guesses = self._search(seqs, budget, coins)
        draft = self.own_draft(seqs, budget, coins)
        self.num_passes = max(map(draft.num_own, range(len(seqs))), default=0)
        self.num_found = sum(len(guess.tokens) for guess in guesses.values())
        return Draft.joined([guesses.get(b, draft.only(b)) for b in range(len(seqs))]) if guesses else draft

    def own_draft(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        """Return the draft of the model alone, as `propose` would without a search. coins: as for `propose`."""
        raise NotImplementedError

    def num_unread(self, seq: Sequence) -> int:
        """Return how many committed tokens the model has not run."""
        raise NotImplementedError

    def _search(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> dict[int, Draft]:
        """Search the texts. Returns, by sequence, the guesses that are expected to be better than the model's guess.

        A guess is better if it is expected to bring more accepted tokens. The budget of the returned sequences becomes
        0, so that the model drafts nothing for them.
        """
        guesses = dict[int, Draft]()
        begun, self.search_s, self.num_searched = self.clock(), 0.0, 0
        for b, stop in budget.stops.items():
            if self.search is not None and stop.search is not None and budget.num_tokens[b] > 0:
                stop.num_unread = self.num_unread(seqs[b])
                share = Budget([budget.num_tokens[b]], 0, stops={0: stop.search}, limits=budget.limits[b : b + 1])
                draft = self.search.propose([seqs[b]], share, [coins[b]])
                self.num_searched += 1
                if draft.tokens and stop.search.gain >= stop.bar:
                    guesses[b] = draft
            if b in guesses or stop.is_shut:
                budget.num_tokens[b] = 0
        if self.num_searched:
            self.search_s = self.clock() - begun
        return guesses
