"""Token Recycling: draft the tokens that the target once held to be likeliest after the same token (Luo et al. 2024).

Every pass of the target computes logits at each row, but choosing the next token needs the logits of only one row. This
drafter keeps the ids of the largest logits at each row, also at rows of rejected guesses. These ids form a matrix: each
token has a row with the ids that may follow it, best first (arXiv 2408.08696, section 3.1). A draft is a tree of tokens
from that matrix. Each node has a fixed rank among its siblings, and the nodes come in a fixed order. The value of a
node is the product of the acceptance rates of the ranks along its path, and nodes with larger values come first. If the
rates fall with the rank, no tree with the same number of nodes has more accepted tokens on average (Sequoia, Chen et
al. 2024, arXiv 2402.12374).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

from forerun.drafters import Drafter, Seen, Target
from forerun.drafters.shared.by_salt import BySalt
from forerun.drafters.shared.chains import READ_TOKENS
from forerun.drafters.shared.continuations import check_shape
from forerun.registry import option
from forerun.theory.trees import best_first
from forerun.types import Budget, Coins, Draft, Probs, Sequence

# P(the target's choice is the token of this rank), given that the parent is right. Measured; docs/methods/recycle.md.
RANK_RATES = (0.44, 0.14, 0.05, 0.03, 0.025, 0.015, 0.01, 0.01)
MAX_NODES = 128  # nodes of the fixed order: more than a draft has, because tokens without a row have no children


@dataclass(frozen=True)
class Options:
    """The options: the contents of the matrix, and the shape of the drafts."""

    shape: str = option("tree", "tree, or path: the likeliest token behind each, one by one")
    top: int = option(8, "tokens kept behind each token, best first", min=1, max=len(RANK_RATES))
    shared: bool = option(False, "one matrix for all requests of a cache_salt; false = one per request")
    from_prompt: bool = option(True, "begin with the pairs of tokens of the prompt")
    max_rows: int = option(16384, "tokens that a matrix has a row for; the longest unseen go first", min=1)

    def __post_init__(self) -> None:
        check_shape("recycle", self.shape)


class Matrix:
    """Stores, for each of at most `max_rows` tokens, a row of the ids that may follow the token, best first."""

    def __init__(self, max_rows: int) -> None:
        self.rows: dict[int, array[int]] = {}  # the row that was written last comes last
        self._max_rows = max_rows

    def put(self, token: int, ids: Seq[int]) -> None:
        """Set the row of a token to `ids`. If there are too many rows, the row that was set longest ago is dropped."""
        self.rows.pop(token, None)
        self.rows[token] = array("i", ids)
        if len(self.rows) > self._max_rows:
            del self.rows[next(iter(self.rows))]

    def put_first(self, token: int, follower: int, width: int) -> None:
        """Move or add the id `follower` to the beginning of a token's row. The row keeps at most `width` ids."""
        row = self.rows.get(token, ())
        if not row or row[0] != follower:
            self.put(token, [follower, *(other for other in row if other != follower)][:width])


class RecycleDrafter(Drafter):
    """A drafter that keeps a matrix of likely next tokens, and drafts trees of point masses from it.

    There is one matrix for each request, or one for each cache salt.
    """

    draws = "point"
    is_free = True

    def __init__(self, options: Options) -> None:
        self.options = options
        self.shape = "tree" if options.shape == "tree" and options.top > 1 else "chain"
        self.top_logits = options.top
        self._order = best_first(RANK_RATES[: options.top if options.shape == "tree" else 1], MAX_NODES)
        self._matrices = BySalt(
            lambda: Matrix(options.max_rows),
            lambda matrix: len(matrix.rows),
            options.max_rows,
            is_shared=options.shared,
        )
        self._num_read: dict[int, int] = {}  # by sequence: the number of prompt tokens with pairs in its matrix

    def begin(self, seq: Sequence) -> None:
        matrix = self._matrices.begin(seq)
        if self.options.from_prompt:
            for token, follower in pairwise(seq.source_ids[-READ_TOKENS:]):
                matrix.put_first(token, follower, self.options.top)

    def end(self, seq: Sequence) -> None:
        self._num_read.pop(seq.id, None)
        self._matrices.end(seq)

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        return Draft.joined([self._tree(seq, b, budget) for b, seq in enumerate(seqs)])

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        for seq, view in zip(seqs, seen, strict=True):
            matrix = self._matrices.of(seq)
            ids = view.top(self.options.top)[0].tolist()
            if ids:
                for token, row in view.rows.items():
                    matrix.put(token, ids[row])
            elif self.options.from_prompt:
                self._read(seq, matrix, view.start + len(view.kept))

    def _read(self, seq: Sequence, matrix: Matrix, stop: int) -> None:
        """Put the unread pairs of neighbouring tokens into the matrix, if they begin before index `stop`."""
        start = self._num_read.get(seq.id, 0)
        for token, follower in pairwise(seq.tokens[start : stop + 1]):
            matrix.put_first(token, follower, self.options.top)
        self._num_read[seq.id] = stop

    def _tree(self, seq: Sequence, b: int, budget: Budget) -> Draft:
        rows = self._matrices.of(seq).rows
        places = {-1: -1}  # node of the fixed order -> node of the draft
        tokens, parents = list[int](), list[int]()
        for node, (parent, rank, depth, _) in enumerate(self._order):
            if len(tokens) == budget.num_tokens[b]:
                break
            at = places.get(parent)
            if at is None:
                continue
            before = tokens[at] if at >= 0 else seq.tokens[-1]
            row = rows.get(before, ())
            if rank >= len(row) or (at >= 0 and before in seq.end_ids):  # nothing follows an end id
                continue
            if budget.go_on(b, depth, Probs.of_point(row[rank])):
                places[node] = len(tokens)
                parents.append(at)
                tokens.append(row[rank])
        return Draft(tokens, parents, [0, len(tokens)], [Probs.of_point(token) for token in tokens])


def build(options: Options, target: Target) -> Drafter:
    """Return a drafter that needs no model."""
    return RecycleDrafter(options)
