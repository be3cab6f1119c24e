"""Beam search: one search step, and the pool of finished texts. Pure functions of scores; no model, no cache, no clock.

A step is a deterministic function of the beams (the texts that are not finished), their scores and the scores of their
next tokens. So steps can be replayed over texts that were guessed and scored together (docs/methods/beam.md). The rules
follow transformers' generate() with num_beams, down to the length by which a score is divided. Ties, which transformers
leaves to a library, go to the better beam and then to the lower token id. Beam search is no rule of
SamplingParams.acceptance: num_beams makes a request a beam search.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Collection, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.errors import BadOption
from forerun.types import Hypotheses, Next

Ends = Callable[[Seq[int]], bool]
# (beam, num) -> the beam's `num` best next tokens, best first, and their scores.
Nexts = Callable[[int, int], tuple[Seq[int], Seq[float]]]


class Candidate(NamedTuple):
    """A beam with one more token. score: the sum of the log-probabilities of the beam's tokens and of `token`."""

    score: float
    beam: int
    token: int


@dataclass(frozen=True)
class Rules:
    """The options of a search. most_tokens: the length at which a beam ends, whatever its last token is."""

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    most_tokens: int = 2**31


def best_first(scores: Seq[float], nexts: Nexts, num: int) -> Iterator[Candidate]:
    """Yield all candidates in the order of score descending, then beam ascending, then token ascending.

    scores: the score of each beam. num: the number of next tokens that are requested from each beam at first. If more
    tokens are needed, the number is doubled each time.
    """

    def of_beam(beam: int, score: float) -> Iterator[tuple[float, int, int]]:
        wanted, done = num, 0
        while True:
            tokens, logprobs = nexts(beam, wanted)
            for token, logprob in list(zip(tokens, logprobs, strict=True))[done:]:
                yield -(score + logprob), beam, token
            if len(tokens) < wanted:
                return
            wanted, done = 2 * wanted, wanted

    for minus_score, beam, token in heapq.merge(*(of_beam(beam, score) for beam, score in enumerate(scores))):
        yield Candidate(-minus_score, beam, token)


def step(
    scores: Seq[float], nexts: Nexts, width: int, ends: Callable[[int, int], bool], num: int, is_last: bool = False
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the `width` best candidates that go on, and the candidates that end.

    A candidate that ends is returned only if it is among the `width` best of all candidates. Both lists are best first.
    Fewer candidates are returned if masks leave fewer tokens. ends(beam, token): whether a beam ends with that token.
    is_last: whether every candidate ends in this step. num: as in `best_first`.
    """
    live, ended = list[Candidate](), list[Candidate]()
    for rank, candidate in enumerate(best_first(scores, nexts, num)):
        if is_last or ends(candidate.beam, candidate.token):
            if rank < width:
                ended.append(candidate)
        else:
            live.append(candidate)
        if len(live) == width or (is_last and rank == width - 1):
            break
    return live, ended


class Finished(NamedTuple):
    """A finished text, up to its last node. score: its sum of log-probabilities. penalised: score / length^penalty."""

    penalised: float
    score: float
    node: int


@dataclass
class Pool:
    """The best finished texts, at most num_beams, best first. Of equal scores, the first to finish is better."""

    rules: Rules
    texts: list[Finished] = field(default_factory=list)

    def add(self, ended: Seq[tuple[float, int]], length: int) -> None:
        """Add finished texts of `length` tokens. ended: the (score, node) of each text, best first."""
        share = float(length) ** self.rules.length_penalty
        texts = [*self.texts, *(Finished(score / share, score, node) for score, node in ended)]
        self.texts = sorted(texts, key=lambda text: -text.penalised)[: self.rules.num_beams]

    def is_final(self, best: float | None, length: int) -> bool:
        """Return whether the search ends.

        length: the number of tokens of each beam. best: the score of the best beam; None = there are no beams.

        A search with beams goes on until the pool of finished texts is full. With early_stopping True, the search ends
        then. Otherwise the search ends when the best beam's penalised score is no better than the worst in the pool.
        The penalised score is computed for the beam's present length or, with early_stopping "never" and a penalty that
        favours length, for the longest possible length.
        """
        if best is None:
            return True
        if len(self.texts) < self.rules.num_beams:
            return False
        if self.rules.early_stopping is True:
            return True
        is_patient = self.rules.early_stopping == "never" and self.rules.length_penalty > 0
        hoped = self.rules.most_tokens if is_patient else length
        share: float = float(hoped) ** self.rules.length_penalty
        return best / share <= self.texts[-1].penalised


class Search:
    """One beam search: its beams and their scores, the pool, and the number of tokens so far.

    tips: the last node of each beam in the tree, best first; every tip is `length` tokens after the prompt. scores: the
    score of each beam, a float64 sum of log-probabilities in the order of the tokens. ends(tokens): whether an output
    that consists of these tokens ends with the last of them.
    """

    def __init__(self, rules: Rules, tree: Hypotheses, end_ids: Collection[int], ends: Ends | None = None) -> None:
        self.rules, self.tree, self.end_ids = rules, tree, end_ids
        self.tips = [-1]
        self.scores = [0.0]
        self.length = 0
        self.is_over = False
        self.pool = Pool(rules)
        self._ends = ends

    def replayed(self, scored: Callable[[int], Next | None]) -> tuple[Search, int]:
        """Take steps while the next tokens of all beams are known. Returns the new search and the number of steps.

        scored(node): the next tokens after a node of the tree; None where they are not known. Each step is the same as
        in a search without drafts, because the next tokens of all beams are known. This search stays unchanged, except
        that its tree gets nodes.
        """
        after, num_steps = copy.copy(self), 0
        after.pool = Pool(self.rules, self.pool.texts)
        while not after.is_over:
            nexts = [scored(tip) for tip in after.tips]
            if any(known is None for known in nexts):
                break
            after._step([known for known in nexts if known is not None])
            num_steps += 1
        return after, num_steps

    def _step(self, nexts: Seq[Next]) -> None:
        tree, tips, width = self.tree, self.tips, self.rules.num_beams
        self.length += 1
        live, ended = step(
            self.scores,
            lambda beam, num: nexts[beam](num),
            width,
            lambda beam, token: self.ends_with(tips[beam], token),
            width + len(self.end_ids),
            is_last=self.length >= self.rules.most_tokens,
        )
        if not live and not ended and not self.pool.texts:
            raise BadOption("no token is left to a beam: logit_bias, bad_words and min_tokens forbid every id")
        self.pool.add(
            [(candidate.score, tree.add(tips[candidate.beam], candidate.token)) for candidate in ended], self.length
        )
        self.tips = [tree.add(tips[candidate.beam], candidate.token) for candidate in live]
        self.scores = [candidate.score for candidate in live]
        self.is_over = self.pool.is_final(self.scores[0] if live else None, self.length)

    def ends_with(self, node: int, token: int) -> bool:
        """Return whether the text down to a node ends when this token follows."""
        if token in self.end_ids:
            return True
        return self._ends is not None and self._ends([*self.tree.text(node), token])

    def guessed(self, level: Seq[int], scores: Seq[float], nexts: Seq[Next | None], width: int) -> list[Candidate]:
        """Return the drafter's `width` best guesses of tokens after the nodes of a level.

        The guesses are one step of a beam search with the drafter's own scores. scores: the drafter's score of each
        node. nexts: the drafter's next tokens after each node; None = unknown, so that the node gets no guess. End ids
        are not guessed, because nothing follows them.
        """
        known = [(beam, following) for beam, following in enumerate(nexts) if following is not None]
        live, _ = step(
            [scores[beam] for beam, _ in known],
            lambda i, num: known[i][1](num),
            width,
            lambda _, token: token in self.end_ids,
            width + len(self.end_ids),
        )
        return [guess._replace(beam=known[guess.beam][0]) for guess in live]

    def shared(self) -> int:
        """Return the last node that all beams have in common."""
        first, *others = (self.tree.path(tip, self.tree.base) for tip in self.tips)
        num = len(first)
        for path in others:
            num = next((i for i, pair in enumerate(zip(first[:num], path, strict=False)) if pair[0] != pair[1]), num)
        return first[num - 1] if num else self.tree.base
