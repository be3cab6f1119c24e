"""PaSS: the target guesses several tokens at once from trained look-ahead embeddings (Monea et al. 2023, 2311.13581).

T trained vectors LA_1 .. LA_T replace the embeddings of the next tokens. At LA_j the target computes a distribution of
the token j places after the next token, whichever tokens come between. In the paper the vectors run in a separate pass,
so that a round has two passes. Here the vectors are rows of the pass that verifies the previous draft. For each number
of tokens that the pass may accept, the pass has one chain of vectors. Once the number of accepted tokens is known, the
chain for this number gives the next draft. So no pass is added, only rows. In the paper the first pass draws the next
token. Here this token is the correction or bonus token of the round.

A budget is split between drafted tokens and vectors so that its rows bring the largest expected number of accepted
tokens. Tokens are drawn from the logits at the vectors, with the request's temperature and filters. Keys and values of
the vectors are never kept. `forerun train head --method pass` trains the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from operator import mul
from typing import Any

from forerun.drafters import Drafter, Known, Needs, Seen, Target
from forerun.drafters.shared import artifacts, head_files
from forerun.drafters.shared.chain import Chain, Row, next_of
from forerun.models.configs import size
from forerun.registry import option
from forerun.types import Budget, Coins, Draft, Extra, Rows, Sequence

# P(a guess is accepted), given that the guesses before it were; later guesses have the last value. Held-out agreement
# with SmolLM2 after half a million tokens of training: 0.27, 0.14, 0.20, and overlap 0.25, 0.16, 0.13.
RATES = (0.27, 0.15, 0.15)


@dataclass(frozen=True)
class Options:
    """The options: the folder of the trained vectors."""

    path: str | None = option(None, head_files.path_help("pass"))


@cache
def chain_lengths(num_nodes: int, num_rows: int, depth: int) -> tuple[tuple[int, ...], float]:
    """Return the best length for each chain of vectors, and the summed value of all draft nodes and vectors.

    The chain with index a gives the next draft if exactly a nodes are accepted, so there are num_nodes + 1 chains.
    num_rows: the number of vectors in all chains together. depth: the largest number of vectors in one chain. The value
    of a node is the probability that the node is accepted. The value of a vector is the product of two probabilities:
    that its chain gives the next draft, and that the vector's guess is then accepted.
    """
    reached = list(accumulate([1.0, *(RATES[min(i, len(RATES) - 1)] for i in range(max(num_nodes, depth)))], mul))
    stops = [reached[a] - (reached[a + 1] if a < num_nodes else 0.0) for a in range(num_nodes + 1)]
    worth = sorted(
        ((stop * reached[j], -j, -a) for a, stop in enumerate(stops) for j in range(1, depth + 1)), reverse=True
    )
    best = worth[:num_rows]
    counts = [0] * (num_nodes + 1)
    for _, _, a in best:
        counts[-a] += 1
    return tuple(counts), sum(reached[1 : num_nodes + 1]) + sum(value for value, *_ in best)


@cache
def num_nodes(num_known: int, budget: int, depth: int) -> int:
    """Return how many of the `num_known` guesses to draft, so that drafted tokens and vectors have the largest value.

    budget: the number of rows for both. depth: the largest number of vectors in one chain (see `chain_lengths`).
    """
    return max(range(min(num_known, budget) + 1), key=lambda n: (chain_lengths(n, budget - n, depth)[1], n))


@dataclass
class _Text:
    """The state of one sequence.

    rows: the target's outputs at the look-ahead vectors, which guess the tokens after the first `num_tokens` tokens.
    asked: the input tokens of the sequence's rows in the pass that verifies the last draft, vectors included. places:
    for each number of accepted tokens, the rows in that pass that hold this number's chain of vectors.
    """

    rows: Seq[Row] = ()
    num_tokens: int = -1
    asked: list[int] = field(default_factory=list)
    places: list[range] = field(default_factory=list)


class PassDrafter(Drafter):
    """Adds look-ahead vectors to each pass as rows, and drafts from the target's outputs at these rows."""

    drafts_behind = False  # the outputs guess the tokens right after the last committed token

    def __init__(self, vectors: Rows) -> None:
        self._vectors = [vectors[i] for i in range(len(vectors))]
        self._texts: dict[int, _Text] = {}

    def begin(self, seq: Sequence) -> None:
        self._texts[seq.id] = _Text()

    def end(self, seq: Sequence) -> None:
        self._texts.pop(seq.id, None)

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        for seq, view in zip(seqs, seen, strict=True):
            asked = self._texts[seq.id]
            text = self._texts[seq.id] = _Text(num_tokens=view.start + len(view.kept) + 1)
            if asked.asked and view.kept and list(view.tokens) == asked.asked:  # not another drafter's draft
                place = asked.places[len(view.kept) - 1]
                best, logits = view.scores.best[view.run], view.scores.logits[view.run]
                text.rows = best[place.start : place.stop] if best else list(logits[place.start : place.stop].copy())

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        return Draft.joined([self._draft(seq, b, budget, coins[b]) for b, seq in enumerate(seqs)])

    def _draft(self, seq: Sequence, b: int, budget: Budget, coins: Coins) -> Draft:
        text = self._texts[seq.id]
        most = budget.num_tokens[b]
        depth = len(self._vectors)
        chain = Chain()
        rows = text.rows if text.num_tokens == len(seq.tokens) else ()
        for row in rows[: num_nodes(len(rows), most, depth)]:
            following = next_of(row, seq, chain.tokens)
            if following is None or not chain.grow(*following, seq, b, budget, coins):
                break
        drafted = Draft.chains([chain.tokens], [chain.probs])
        counts, _ = chain_lengths(len(chain.tokens), most - len(chain.tokens), depth)
        extra, text.places = self._extra(counts)
        text.asked = [seq.tokens[-1], *chain.tokens, *extra.tokens]
        return replace(drafted, extra={0: extra} if extra.tokens else {})

    def _extra(self, counts: Seq[int]) -> tuple[Extra, list[range]]:
        """Return extra rows with one chain of vectors for each number of accepted tokens, and the rows of each chain.

        counts: the length of each chain. The rows of a chain are indices among the sequence's rows of the pass.
        """
        first = len(counts) - 1  # the nodes come first
        extra, places = Extra([], [], {}), list[range]()
        vectors = dict[int, Any]()
        for a, num in enumerate(counts):
            start = first + len(extra.tokens)
            for j in range(num):
                vectors[len(extra.tokens)] = self._vectors[j]
                extra.parents.append(start + j - 1 if j else a - 1)
                extra.tokens.append(0)
            places.append(range(1 + start, 1 + start + num))
        return replace(extra, vectors=vectors), places


def needs(options: Options, target: Known) -> Needs:
    """Return the memory needs of the vectors. Raises the errors of `build` if there are no fitting vectors."""
    path = head_files.located(options.path, "pass")
    head_files.read_config(path, "pass", target.fingerprint)
    return Needs(weights=head_files.own_weights(path, target, all_rows=False))


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter from the folder of trained look-ahead vectors. Raises the errors of shared/head_files.py."""
    path = head_files.located(options.path, "pass")
    config = head_files.read_config(path, "pass", artifacts.fingerprint(target.tokenizer, target.num_ids))
    shapes = {head_files.LOOK_AHEAD: (size(config, "num_look_ahead"), target.model.config.hidden_size)}
    weights = head_files.read_weights(path, shapes, target.model, target.num_ids)
    return PassDrafter(target.model.rows.from_host(weights[head_files.LOOK_AHEAD].float32()))
