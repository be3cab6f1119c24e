"""STAND: draw guesses from the logits that the target computed earlier after the same tokens (Song et al. 2025).

A table keeps the largest logits after each context of 1 to `max_context` tokens, averaged over the context's
occurrences (arXiv 2506.04708, the logit-based n-gram module). Every row that the target scores is an occurrence,
rejected guesses included. A guess uses the longest known context. The context's logits go through the request's own
sampling pipeline, as the target's logits do, and the guess is *drawn* from the resulting distribution q. So the guess
is accepted with probability sum_x min(p(x), q(x)), which is 1 for p = q. A point mass at the likeliest token would be
accepted with probability max_x p(x). Siblings are drawn without replacement, each from the distribution without the
earlier siblings, which gives the order of Gumbel top-k. Under `match` acceptance, the target picks tokens by the noise
of their positions, and the siblings are picked by the same noise.

Exactness. Every token is drawn from the distribution that the draft gives for it. That distribution depends on earlier
rounds and on tokens that were drawn before. So by the rule's theorem the tokens of a round have the target's
distribution *given all that the drafter has seen*: committed tokens, rejected draws, and the table made of both. The
random numbers of a round are new. Hence the distribution of the next tokens given the text is the target's, too,
whichever draws were rejected. The shape of a tree is fixed by counts. A node after which no context is known gets no
children. This is decided after the node was drawn.

An average covers the ids that the table has for a context, and the ids of the new occurrence. An id that is missing
from one of the two lists had at most the least logit of that list, and is averaged as if it had that logit. A prompt is
run without logits. So a context in the prompt guesses the token that followed it last, until the target has computed
logits after that context.

The drafter runs no model, but it is not `is_free`. Guesses of free drafters may be dropped after a look at their
tokens, and that would not be exact for drawn tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.drafters import Drafter, Seen, Target
from forerun.drafters.shared.by_salt import BySalt
from forerun.drafters.shared.chains import READ_TOKENS
from forerun.drafters.shared.continuations import check_shape
from forerun.drafters.shared.siblings import children_of, kind_of
from forerun.errors import BadOption
from forerun.models.runner import float_type
from forerun.registry import option
from forerun.sampling import History, only_filters, probs
from forerun.sampling.largest import Ids, Rows
from forerun.theory.trees import best_first
from forerun.types import Budget, Coins, Draft, Probs, SamplingParams, Sequence

# P(the sibling with this number in the order of draws is accepted), given that its parent is. Measured; see
# docs/methods/stand.md.
SHARES = (0.53, 0.11, 0.045, 0.04, 0.02, 0.01)
MAX_NODES = 64  # most nodes of a draft
PART = 256  # contexts that are learned together, at most the size of the smallest table

Gram = tuple[int, ...]


@dataclass(frozen=True)
class Options:
    """The options: the contents of a table, and the shape of the drafts."""

    shape: str = option("tree", "tree, or path: one token behind another")
    max_context: int = option(4, "longest context, in tokens", min=1, max=8)
    top: int = option(8, "logits kept behind a context, the largest", min=1, max=64)
    shared: bool = option(False, "one table for all requests of a cache_salt; false = one per request")
    from_prompt: bool = option(True, "begin with what followed the contexts of the prompt")
    max_contexts: int = option(
        32768, "contexts of a table, about 250 bytes each with top=8; the longest unseen go first", min=PART, max=10**7
    )

    def __post_init__(self) -> None:
        check_shape("stand", self.shape)


class Table:
    """Stores at most `max_contexts` contexts, each with `width` ids and the mean logits of these ids after the context.

    For a context of the prompt without computed logits, only one id is stored, with a count of 0.
    """

    def __init__(self, max_contexts: int, width: int, dtype: npt.DTypeLike) -> None:
        self._max_contexts = max_contexts
        self._places: OrderedDict[Gram, int] = OrderedDict()  # the context that was seen last comes last
        self._ids = np.zeros((PART, width), np.int32)
        self._means = np.zeros((PART, width), dtype)
        self._counts = np.zeros(PART, np.int32)

    def __len__(self) -> int:
        return len(self._places)

    def find(self, context: Seq[int], longest: int) -> tuple[Ids, Rows] | None:
        """Look up the longest known suffix of a context, and return its ids, ascending, and their mean logits.

        Returns None if no suffix is known. For a suffix without computed logits, one id with mean 0 is returned.
        longest: the largest number of tokens in a suffix.
        """
        for length in range(min(longest, len(context)), 0, -1):
            place = self._places.get(tuple(context[-length:]))
            if place is not None:
                width = self._ids.shape[1] if self._counts[place] else 1
                ids = self._ids[place, :width].astype(np.int64)
                order = ids.argsort()
                return ids[order], self._means[place, :width][order]
        return None

    def learn(self, contexts: Seq[Gram], ids: Ids, logits: Rows) -> None:
        """Update the mean logits of each context [n] with the logits after one more occurrence of the context.

        ids, logits [n, width]: the largest logits after that occurrence, and their ids.
        """
        # A part is small enough that none of its contexts is forgotten before it is learned.
        for start in range(0, len(contexts), PART):
            part = slice(start, start + PART)
            places = np.array([self._place(context) for context in contexts[part]])
            part_ids, part_logits = ids[part], logits[part]
            left = np.arange(len(places))
            while len(left):  # a context that occurs twice in a pass is averaged twice
                once = left[np.unique(places[left], return_index=True)[1]]
                self._average(places[once], part_ids[once], part_logits[once])
                left = np.setdiff1d(left, once, assume_unique=True) if len(once) < len(left) else left[:0]

    def guess(self, contexts: Seq[Gram], tokens: Seq[int]) -> None:
        """Store the token that followed each context, for contexts without computed logits.

        If several tokens followed one context, the last one is stored.
        """
        places = np.array([self._place(context) for context in contexts], np.intp)
        is_guess = self._counts[places] == 0
        self._ids[places[is_guess], 0] = np.asarray(tokens, np.int32)[is_guess]

    def _place(self, context: Gram) -> int:
        """Return the row index of a context. A new context gets a new row.

        In a full table, a new context gets the row of the context that was not seen for the longest time.
        """
        place = self._places.get(context)
        if place is not None:
            self._places.move_to_end(context)
            return place
        if len(self._places) < self._max_contexts:
            place = len(self._places)
            if place == len(self._counts):
                self._grow(min(2 * place, self._max_contexts))
        else:
            _, place = self._places.popitem(last=False)
        self._places[context] = place
        self._counts[place] = 0
        self._means[place] = 0
        return place

    def _grow(self, num_rows: int) -> None:
        self._ids, self._means, self._counts = (
            np.concatenate((rows, np.zeros((num_rows - len(rows), *rows.shape[1:]), rows.dtype)))
            for rows in (self._ids, self._means, self._counts)
        )

    def _average(self, places: npt.NDArray[Any], ids: Ids, logits: Rows) -> None:
        """Average the logits of one more occurrence into each row `places` of the table. No row may be listed twice."""
        counts, known_ids, means = self._counts[places, None], self._ids[places], self._means[places]
        is_same = known_ids[:, :, None] == ids[:, None, :]
        again = np.take_along_axis(logits, is_same.argmax(2), 1)  # the new logit of a known id
        again = np.where(is_same.any(2), again, logits.min(1, keepdims=True))
        least = means.min(1, keepdims=True)  # the most that a new id can have had before
        old = means + (again - means) / (counts + 1)
        new = np.where(is_same.any(1), -np.inf, least + (logits - least) / (counts + 1))
        all_ids, all_means = np.concatenate((known_ids, ids), 1), np.concatenate((old, new), 1)
        best = np.argsort(-all_means, axis=1, kind="stable")[:, : ids.shape[1]]
        is_first = counts == 0
        self._ids[places] = np.where(is_first, ids, np.take_along_axis(all_ids, best, 1))
        self._means[places] = np.where(is_first, logits, np.take_along_axis(all_means, best, 1))
        self._counts[places] += 1


def _ends(tokens: Seq[int]) -> list[Gram]:
    """Return all suffixes of `tokens`, the longest first."""
    return [tuple(tokens[start:]) for start in range(len(tokens))]


@dataclass
class _Request:
    """The state of one request.

    params: the sampling parameters for the table's logits. For a greedy request they have temperature 1 and no filters,
    because its tokens are drafted by rank. only_filters: whether sampling needs only the table's logits, and no logits
    of the whole vocabulary. num_read: the number of prompt tokens that are in the table.
    """

    params: SamplingParams
    only_filters: bool
    num_read: int = 0


class StandDrafter(Drafter):
    """A drafter that keeps a table of logits after contexts, and draws chains or trees from it.

    There is one table for each request, or one for each cache salt.
    """

    def __init__(self, options: Options, vocab_size: int, dtype: npt.DTypeLike) -> None:
        self.options, self._vocab_size, self._dtype = options, vocab_size, dtype
        is_tree = options.shape == "tree" and min(options.top, vocab_size) > 1
        self.shape, self.draws = ("tree", "distinct") if is_tree else ("chain", "independent")
        self.tells_confidence = not is_tree
        self.top_logits = min(options.top, vocab_size)
        self._order = best_first(SHARES[: options.top if is_tree else 1], MAX_NODES)
        self._tables = BySalt(
            lambda: Table(options.max_contexts, self.top_logits, dtype),
            len,
            options.max_contexts,
            is_shared=options.shared,
        )
        self._requests: dict[int, _Request] = {}

    def begin(self, seq: Sequence) -> None:
        params = dataclasses.replace(seq.params, logprobs=None)
        if params.greedy:
            params = dataclasses.replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        is_plain = only_filters(params, seq.bad_word_ids) and params.forced_eos_token_id is None
        self._requests[seq.id] = _Request(params, is_plain)
        table = self._tables.begin(seq)
        if self.options.from_prompt:
            source = seq.source_ids[-READ_TOKENS:]
            self._read(table, source, range(len(source) - 1))

    def end(self, seq: Sequence) -> None:
        self._requests.pop(seq.id, None)
        self._tables.end(seq)

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        return Draft.joined([self._tree(seq, b, budget, coins[b]) for b, seq in enumerate(seqs)])

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        for seq, view in zip(seqs, seen, strict=True):
            table, (ids, logits) = self._tables.of(seq), view.top(self.top_logits)
            if len(ids):
                self._learn(table, seq, view, ids, logits)
            elif self.options.from_prompt:
                request = self._requests[seq.id]
                stop = view.start + len(view.kept)
                self._read(table, seq.tokens, range(max(request.num_read, stop - READ_TOKENS), stop))
                request.num_read = stop

    def _read(self, table: Table, tokens: Seq[int], ends: range) -> None:
        """Store in the table the token that follows each context. ends: the indices of the contexts' last tokens."""
        contexts, followers = list[Gram](), list[int]()
        for end in ends:
            known = _ends(tokens[max(0, end + 1 - self.options.max_context) : end + 1])
            contexts += known
            followers += [tokens[end + 1]] * len(known)
        table.guess(contexts, followers)

    def _learn(self, table: Table, seq: Sequence, seen: Seen, ids: Ids, logits: Rows) -> None:
        """Add the target's logits at each row to the table. A row's context is the last tokens on the path to it."""
        run, longest = seen.scores.runs[seen.run], self.options.max_context
        before = {-1: seq.tokens[max(0, seen.start + 1 - longest) : seen.start]}  # by row: the last tokens up to it
        contexts, rows = list[Gram](), list[int]()
        is_number = np.isfinite(logits.sum(1)).tolist()
        for row, (token, parent) in enumerate(zip(run.tokens, run.behind(0), strict=True)):
            if parent in before and not (run.vectors and row in run.vectors):  # the row read a token, and no vector
                before[row] = [*before[parent], token][-longest:]
                if is_number[row]:
                    contexts += _ends(before[row])
                    rows += [row] * len(before[row])
        table.learn(contexts, ids[rows], logits[rows])

    def _tree(self, seq: Sequence, b: int, budget: Budget, coins: Coins) -> Draft:
        shape = self._order[: budget.num_tokens[b]]
        stop = budget.stops.get(b)
        num_children = Counter(node.parent for node in shape)
        places, paths = {-1: -1}, {-1: list[int]()}  # by node of the shape: node of the draft, tokens down to it
        siblings: dict[int, list[tuple[int, Probs, float]]] = {}  # by node of the shape: its children
        lanes: Counter[int] = Counter()  # by depth: coins that were used
        tokens, parents, drawn_from = list[int](), list[int](), list[Probs]()
        for i, (parent, rank, depth, _) in enumerate(shape):
            if parent not in paths:
                continue
            if rank == 0:
                num = num_children[parent]
                siblings[parent] = list(self._children(seq, b, paths[parent], num, budget, coins, lanes[depth]))
                lanes[depth] += num
            if rank >= len(siblings[parent]):
                continue
            token, stated, confidence = siblings[parent][rank]
            places[i] = len(tokens)
            tokens.append(token)
            parents.append(places[parent])
            drawn_from.append(stated)
            goes_on = stop is None or stop.goes_on(confidence)
            if goes_on and token not in seq.end_ids:  # decided after the token was drawn, which stays
                paths[i] = [*paths[parent], token]
        return Draft(tokens, parents, [0, len(tokens)], drawn_from)

    def _children(
        self, seq: Sequence, b: int, path: Seq[int], num: int, budget: Budget, coins: Coins, lane: int
    ) -> Iterator[tuple[int, Probs, float]]:
        """Yield at most `num` tokens after a path, each with its distribution and confidence (see `children_of`)."""
        depth, expected = len(path), self.expected(seq, path)
        if expected is not None and budget.go_on(b, depth, expected):
            # A greedy request takes the likeliest ids of the kept logits, at temperature 1.
            kind = "point" if seq.params.greedy else kind_of(self.draws, seq.params, seq)
            yield from children_of(expected, kind, num, depth, coins, lane)

    def expected(self, seq: Sequence, path: Seq[int]) -> Probs | None:
        """Return the distribution of the token after a path: the table's logits after the request's sampling pipeline.

        Returns None if no context is known, or if masks leave none of the table's ids. Filters need only the table's
        logits. Bias, penalties and masks apply to given ids, so they need a row of logits for the whole vocabulary.
        """
        longest, request = self.options.max_context, self._requests[seq.id]
        kept = self._tables.of(seq).find([*seq.tokens[-longest:], *path], longest)
        if kept is None:
            return None
        ids, logits = kept
        if request.only_filters and len(ids) == 1:
            return Probs.of_point(int(ids[0]))
        if request.only_filters:
            return Probs(ids=ids, listed=probs(logits, request.params).weights)
        row = np.full(self._vocab_size, -np.inf, self._dtype)
        row[ids] = logits
        try:
            return probs(row, request.params, History.of(seq, path))
        except BadOption:
            return None


def build(options: Options, target: Target) -> Drafter:
    """Return a drafter that needs no model."""
    return StandDrafter(options, target.num_ids, float_type(target.model))
