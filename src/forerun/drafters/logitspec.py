"""LogitSpec: look up continuations of the likeliest tokens by the target's last logits (Liu et al. 2025).

A search in the text finds nothing if the text's last tokens have not occurred before. But the logits from which the
last token was chosen also help to guess the next token, because a token that was nearly chosen often comes next (arXiv
2507.01449, section 3). So the likeliest ids of these logits, without the chosen id, are candidates for the next token.
If the target has run the last token's id before, perhaps in a rejected guess, there are further candidates: the ids
that were likeliest after the most recent occurrence. They come first. This is Token Recycling (Luo et al. 2024, arXiv
2408.08696).

A draft is one tree. The longest end of the text that occurred before is found, and the tokens that followed it are the
first nodes. Then the candidates are added in order, until the budget is used up. If a candidate once followed an
earlier occurrence of the text's end, the tokens that came next there are added after it. So one search, for the earlier
occurrences of the text's end, serves all candidates.

Every node is a point mass. It depends on committed tokens and on logits of earlier passes, and on no random draw of
this round. So each rule for such trees keeps the target's distribution (docs/methods/logitspec.md).
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass

import numpy as np

from forerun.drafters import Drafter, Seen, Target
from forerun.drafters.recycle import Matrix
from forerun.drafters.shared.chains import TextDrafter, Tokens
from forerun.drafters.shared.continuations import Guess, Level, grow, levels
from forerun.registry import option
from forerun.types import Budget, Coins, Draft, Sequence

# The values of a search in the text are the defaults of suffix decoding.
MAX_MATCH, SPEC_FACTOR, MIN_PROB, NUM_OCCURRENCES = 64, 4, 0.1, 64
MAX_ROWS = 16384  # tokens whose likeliest followers are kept; the longest unseen go first


@dataclass(frozen=True)
class Options:
    """The options: the number of candidates, and how many tokens are drafted after each candidate."""

    top: int = option(16, "candidates from the logits behind the token before the last", min=1, max=64)
    recycled: int = option(8, "candidates before these, by an earlier row of the last token; 0 = none", min=0, max=64)
    num_behind: int = option(3, "tokens drafted behind a candidate that the text went on with", min=0, max=64)
    unseen: bool = option(True, "draft candidates, too, that the text never went on with, each alone")


class Likely:
    """The target's likeliest next ids in one sequence: at the end of its text, and after each token that was run."""

    def __init__(self) -> None:
        self.rivals: Seq[int] = ()  # for the token with index `place`, best first; the chosen one may be among them
        self.place = -1
        self.behind = Matrix(MAX_ROWS)  # token -> the ids that were likeliest after it

    def read(self, seen: Seen, ids: Seq[Seq[int]], num_behind: int) -> None:
        """Learn from a target pass.

        ids: the likeliest ids at each scored row, best first. num_behind: how many of these ids to store as likely
        successors of the row's input token.
        """
        self.rivals = ids[seen.kept[-1] - seen.scored.start]
        self.place = seen.start + len(seen.kept)
        if num_behind:
            for token, row in seen.rows.items():
                self.behind.put(token, ids[row][:num_behind])

    def candidates(self, seq: Sequence) -> list[int]:
        """Return the candidates for the next token of a sequence, the most promising id first."""
        chosen = seq.tokens[-1]
        recycled = self.behind.rows.get(seq.tokens[-1], ())
        # After forced tokens, which are not committed yet, the logits that chose the last token are unknown.
        rivals = self.rivals if self.place == len(seq.tokens) - 1 else ()
        return list(dict.fromkeys((*recycled, *(token for token in rivals if token != chosen))))


class LogitSpecDrafter(TextDrafter[Tokens]):
    """Drafts trees of point masses from each sequence's tokens and the target's likeliest ids."""

    shape = "tree"

    def __init__(self, options: Options) -> None:
        super().__init__(Tokens, is_fast=True)
        self.options = options
        self.top_logits = max(options.top + 1, options.recycled)  # one of a row's ids is the chosen token
        self._likely = defaultdict[int, Likely](Likely)  # by sequence

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        guesses = [self._guess(seq, budget.num_tokens[b]) for b, seq in enumerate(seqs)]
        return Draft.joined([guess.draft(seqs[b], b, budget) for b, guess in enumerate(guesses)])

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        super().observe(seqs, seen)
        for seq, view in zip(seqs, seen, strict=True):
            ids = view.top(self.top_logits)[0].tolist()
            if ids:  # a prompt chunk has none
                self._likely[seq.id].read(view, ids, self.options.recycled)

    def end(self, seq: Sequence) -> None:
        super().end(seq)
        self._likely.pop(seq.id, None)

    def _guess(self, seq: Sequence, most: int) -> Guess:
        if not most:
            return Guess()
        o, text = self.options, self._texts.whole(seq).ids
        # The text's last token is left out of the search, because nothing has followed it yet.
        occurrences = levels(np.frombuffer(text, np.intc)[:-1], text[-MAX_MATCH:])
        guess = Guess()
        if occurrences:
            limit = min(most, SPEC_FACTOR * occurrences[-1].length)
            rows = [text[end : end + limit] for end in occurrences[-1].ends(NUM_OCCURRENCES)]
            guess = grow(rows, limit, is_tree=True, min_prob=MIN_PROB, end_ids=seq.end_ids)
        nodes = {key: node for node, key in enumerate(zip(guess.parents, guess.tokens, strict=True))}
        places = followers(text, occurrences)
        for token in self._likely[seq.id].candidates(seq):
            if token in places:
                rows = [text[place : place + 1 + o.num_behind] for place in places[token]]
                add(guess, nodes, grow(rows, 1 + o.num_behind, is_tree=False, end_ids=seq.end_ids), most)
            elif o.unseen:
                add(guess, nodes, grow([[token]], 1, is_tree=False), most)
        return guess


def followers(text: array[int], occurrences: Seq[Level]) -> Mapping[int, Seq[int]]:
    """Return the tokens that followed earlier occurrences of the text's end, each with its indices in the text.

    The latest index comes first. If a token followed several suffixes of the text, only the indices after the longest
    of these suffixes are returned. occurrences: the occurrences of each suffix, the shortest suffix first.
    """
    places: dict[int, list[int]] = {}
    for level in occurrences:
        behind = defaultdict[int, list[int]](list)
        for end in level.ends(NUM_OCCURRENCES):
            behind[text[end]].append(end)
        places |= behind
    return places


def add(guess: Guess, nodes: dict[tuple[int, int], int], chain: Guess, most: int) -> None:
    """Add a chain to a tree of at most `most` nodes. The chain branches off where it differs from existing paths.

    nodes: maps (parent, token) to the node of the tree.
    """
    parent = -1
    for token, prob in zip(chain.tokens, chain.probs, strict=True):
        if (parent, token) not in nodes:
            if len(guess.tokens) == most:
                return
            nodes[parent, token] = len(guess.tokens)
            guess.tokens.append(token)
            guess.parents.append(parent)
            guess.probs.append(prob)
        parent = nodes[parent, token]


def build(options: Options, target: Target) -> Drafter:
    """Return a drafter that needs no model."""
    return LogitSpecDrafter(options)
