"""Lookahead decoding: the target guesses, by Jacobi iteration beside the text (Fu et al. 2024, arXiv 2402.02057).

A window of guessed tokens, with W columns and N - 1 levels, follows the last committed token. Each pass scores the
window as extra rows. The likeliest token after the deepest level of a column extends that column to an n-gram of N
tokens. The n-gram is stored in a pool under its first token. Then the column drops its first token and gets the new
token at its end. Column 0 begins with the last committed token. Level 0 is a chain over all columns. The parent of a
token on a deeper level is the token of the same column one level above. So the token at level l of column j follows the
tokens of level 0 up to column j, and then the tokens of levels 1 to l - 1 of column j.

A draft has the pool's continuations of the last committed token, merged into a tree of point masses. The window uses
the target's likeliest tokens at any temperature, and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.drafters import Drafter, Seen, Target
from forerun.drafters.shared.chains import READ_TOKENS
from forerun.registry import option
from forerun.types import Budget, Coins, Draft, Extra, Probs, Sequence


@dataclass(frozen=True)
class Options:
    """The options: the sizes of the window and of the pool."""

    window: int = option(2, "columns of the window (W)", min=1, max=32)
    ngram: int = option(4, "tokens of an n-gram (N)", min=2, max=16)
    guesses: int = option(2, "continuations kept and verified of one token (G)", min=1, max=32)
    from_text: bool = option(True, "the pool takes the n-grams of prompt and output, too")


class Pool:
    """Stores the latest continuations of each token, newest first, at most `guesses` for each token."""

    def __init__(self, guesses: int) -> None:
        self.ngrams: dict[int, list[tuple[int, ...]]] = {}
        self._guesses = guesses

    def put(self, first: int, rest: tuple[int, ...]) -> None:
        """Store `rest` as the newest continuation of `first`. Of more than `guesses`, the oldest is dropped."""
        known = self.ngrams.setdefault(first, [])
        if rest in known:
            known.remove(rest)
        elif len(known) == self._guesses:
            known.pop()
        known.insert(0, rest)


class Window:
    """The columns of guessed tokens of one request.

    columns [W][N - 1]: the tokens of each column, level 0 first. The first tokens of a column are taken from the text.
    ages [W]: how many guesses of the target were added to each column since the request began.
    """

    def __init__(self, columns: list[list[int]]) -> None:
        self.columns, self.ages = columns, [0] * len(columns)

    @staticmethod
    def spread(text: Seq[int], width: int, levels: int) -> Window:
        """Return a window filled with tokens of the text at even distances. width: W. levels: N - 1."""
        num = width * levels
        tokens = [text[i * len(text) // num] for i in range(num)]
        return Window([tokens[start : start + levels] for start in range(0, num, levels)])

    def rows(self, width: int, num_nodes: int) -> tuple[Extra, list[int]]:
        """Return the first `width` columns as extra rows after `num_nodes` draft nodes, and each column's last row.

        Level 0 of column 0 is the last committed token, which needs no extra row. A column's last row is an index among
        the sequence's rows of the pass: row 0 is the last committed token, then come the draft nodes and the extra
        rows.
        """
        tokens, parents = list[int](), list[int]()
        above = [-1] * width
        for level in range(len(self.columns[0])):
            for j in range(width):
                if level == j == 0:
                    continue
                tokens.append(self.columns[j][level])
                parents.append(above[j - 1] if level == 0 else above[j])
                above[j] = num_nodes + len(tokens) - 1
        return Extra(tokens, parents), [index + 1 for index in above]

    def advance(self, likeliest: Seq[int]) -> list[tuple[int, ...]]:
        """Move the first columns on by one token each. Returns the n-grams that the target has guessed.

        likeliest: the token to add to each column. An n-gram is returned only if the target has guessed all of its
        tokens; its first token need not be a guess.
        """
        ngrams = []
        for j, token in enumerate(likeliest):
            column = self.columns[j]
            if self.ages[j] >= len(column) - 1:  # level 0 need not be a guess: it only leads to the other tokens
                ngrams.append((*column, token))
            self.columns[j] = [*column[1:], token]
            self.ages[j] += 1
        return ngrams


@dataclass
class _State:
    """The state of one request.

    ends: for each column, the row of its last level in the pass that verifies the last draft. asked: the input tokens
    of all the sequence's rows in that pass. Both lists are empty if the last draft had no window.
    """

    window: Window
    pool: Pool
    num_read: int = 0  # tokens of the text whose n-grams are in the pool
    ends: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)


class LookaheadDrafter(Drafter):
    """A drafter with a window and a pool for each request."""

    drafts_behind = False  # the window stands right after the last committed token
    draws = "point"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.shape = "tree" if options.guesses > 1 else "chain"
        self._states: dict[int, _State] = {}

    def begin(self, seq: Sequence) -> None:
        source, num = seq.source_ids[-READ_TOKENS:], self.options.ngram
        window = Window.spread(source or seq.tokens, self.options.window, num - 1)
        state = self._states[seq.id] = _State(window, Pool(self.options.guesses))
        for i in range(len(source) - num + 1 if self.options.from_text else 0):
            state.pool.put(source[i], source[i + 1 : i + num])

    def end(self, seq: Sequence) -> None:
        self._states.pop(seq.id, None)

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        return Draft.joined([self._draft(seq, b, budget) for b, seq in enumerate(seqs)])

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        for seq, view in zip(seqs, seen, strict=True):
            state, asked = self._states[seq.id], self._states[seq.id].asked
            if asked and list(view.tokens) == asked:  # otherwise the draft of another member of a Compound was scored
                likeliest = [view.best[end] for end in state.ends]
                if min(likeliest) >= 0:
                    for first, *rest in state.window.advance(likeliest):
                        state.pool.put(first, tuple(rest))
            state.ends, state.asked = [], []
            if self.options.from_text:
                self._read(seq, state, view.start + len(view.kept) + 1)

    def _read(self, seq: Sequence, state: _State, stop: int) -> None:
        """Add the n-grams of the first `stop` tokens to the pool, except those that were added before."""
        num = self.options.ngram
        for i in range(state.num_read, stop - num + 1):
            state.pool.put(seq.tokens[i], tuple(seq.tokens[i + 1 : i + num]))
            state.num_read = i + 1

    def _draft(self, seq: Sequence, b: int, budget: Budget) -> Draft:
        """Draft guesses from the pool, and add the window as extra rows.

        The guesses leave room for as many whole columns of the window as fit into half of the budget.
        """
        state, most = self._states[seq.id], budget.num_tokens[b]
        draft = self._guesses(seq, b, budget, most - self._num_rows(self._width(most // 2)))
        width = self._width(most - len(draft.tokens))
        state.ends, state.asked = [], []
        if not width:
            return draft
        state.window.columns[0][0] = seq.tokens[-1]
        rows, state.ends = state.window.rows(width, len(draft.tokens))
        state.asked = [seq.tokens[-1], *draft.tokens, *rows.tokens]
        return Draft(draft.tokens, draft.parents, draft.node_starts, draft.probs, {0: rows} if rows.tokens else {})

    def _num_rows(self, width: int) -> int:
        """Return how many extra rows `width` columns need."""
        return max(0, width * (self.options.ngram - 1) - 1)

    def _width(self, num_rows: int) -> int:
        """Return how many columns fit into `num_rows` extra rows."""
        return min(self.options.window, (num_rows + 1) // (self.options.ngram - 1))

    def _guesses(self, seq: Sequence, b: int, budget: Budget, most: int) -> Draft:
        """Merge the pool's continuations of the last committed token into a tree of at most `most` nodes."""
        children: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        tokens, parents = list[int](), list[int]()
        for rest in self._states[seq.id].pool.ngrams.get(seq.tokens[-1], ()):
            at = -1
            for depth, token in enumerate(rest):
                if (at, token) not in children:
                    if len(tokens) == most or not budget.go_on(b, depth, Probs.of_point(token)):
                        break
                    children[at, token] = len(tokens)
                    parents.append(at)
                    tokens.append(token)
                at = children[at, token]
                if token in seq.end_ids:
                    break  # nothing follows an end id
        return Draft(tokens, parents, [0, len(tokens)], [Probs.of_point(token) for token in tokens])


def build(options: Options, target: Target) -> Drafter:
    """Return a drafter that needs no model."""
    return LookaheadDrafter(options)
