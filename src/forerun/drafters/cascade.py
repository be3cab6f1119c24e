"""A draft model with a cheaper drafter that drafts for it (Chen et al. 2023, arXiv 2312.11462; Spector, Re 2023, arXiv
2308.04623).

The draft model verifies the cheaper drafter's guesses with its own distribution q, by speculative sampling. So the
tokens that it emits, corrections included, are distributed as q. The target's rule then tests these tokens with q,
which is stored for every position. A draft may end at a fixed length or at the end of an inner round. The pacing policy
may also end the draft before a position, after reading the q of that position. Each of these decisions depends on
earlier tokens alone (docs/exactness.md). So a draft needs fewer sequential passes of the draft model, and is as good as
a draft of the model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np

from forerun import drafters, verify
from forerun.drafters import Drafter, Known, Needs, Target
from forerun.drafters.shared.chain import Chain, Row
from forerun.drafters.shared.compound import Compound, made, of_model
from forerun.drafters.shared.feeding import Feeds
from forerun.drafters.shared.model_drafter import ModelDrafter
from forerun.errors import BadOption, shown
from forerun.registry import option
from forerun.types import Budget, Coins, Draft, Probs, Sequence

Emitted = tuple[int, Probs, Row]  # a token, the draft model's distribution q of it, and the output row that q is from


@dataclass(frozen=True)
class Options:
    """The options: the draft model, and the drafter that drafts for it."""

    of: str = option("model", "spec of the draft model, as in (model:path=FOLDER)")
    inner: str = option("lookup", "spec of the drafter that drafts for it")
    inner_length: int = option(8, "most tokens of an inner guess", min=1, max=64)

    def __post_init__(self) -> None:
        of_model("cascade", self.of)
        drafters.resolve(self.inner)


class _InnerCoins:
    """The random numbers of one inner round, in which the draft model judges one guess of the inner drafter.

    All of them come from the outer round's `Coins`, on lanes (see `Coins.draft`) that no other inner round uses. start:
    the depth of the inner round's first token within the outer round. round: the number of the inner round.
    """

    def __init__(self, coins: Coins, start: int, round: int) -> None:
        self._coins, self._start, self._lane = coins, start, 4 * round

    def accept(self, prob: float, depth: int, lane: int = 0) -> bool:
        if not 0 < prob < 1:
            return prob >= 1
        outcomes = Probs(dense=np.array([1 - prob, prob]))
        return self._coins.draft(outcomes, self._start + depth, self._lane) == 1

    def draw(self, probs: Probs, depth: int) -> int:
        return self._coins.draft(probs, self._start + depth, self._lane + 2)

    def draft(self, probs: Probs, depth: int, lane: int = 0) -> int:
        return self._coins.draft(probs, self._start + depth, 2 * lane + 1)  # only round 0 calls this

    def pick(self, probs: Probs, depth: int) -> int:
        return self._coins.pick(probs, self._start + depth)

    def picks(self, probs: Probs, depth: int, num: int) -> list[int]:
        return self._coins.picks(probs, self._start + depth, num)


class _LazyProbs(Seq[Probs]):
    """The draft model's distributions at the positions of one inner round, computed on demand.

    end: the first computed position at which masks leave no token; `length` if there is none so far. No token may be
    drafted at that position or later.
    """

    def __init__(self, make: Callable[[int], Probs], length: int) -> None:
        self._make, self.end = make, length
        self._found: list[Probs | None] = [None] * length

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, row):  # type: ignore[no-untyped-def]
        computed = self._found[row]
        if computed is None:
            try:
                computed = self._make(row)
            except BadOption:  # no token is left; the target raises if it has no token left either
                computed, self.end = Probs.of_point(0), min(self.end, row)
            self._found[row] = computed
        return computed


class CascadeDrafter(Compound):
    """Drafts with the draft model `model`. Each pass of the model verifies a guess of the drafter `inner`."""

    def __init__(self, model: ModelDrafter, inner: Drafter, inner_length: int) -> None:
        super().__init__([model, inner])
        self.model, self.inner, self.inner_length = model, inner, inner_length

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        self.start()
        limits, feeds = self.model.ready(seqs, budget)
        self.count(self.model)
        chains, round = [Chain() for _ in seqs], 0
        guesses = self._first_guesses(limits, seqs, budget, coins, list(feeds))
        while feeds:
            inner_coins = {b: _InnerCoins(coins[b], len(chains[b].tokens), round) for b in feeds}
            emitted = self._pass(feeds, guesses, chains, inner_coins, round == 0, budget.reads_logits)
            grown = [b for b in feeds if self._extend(chains[b], emitted[b], b, budget, limits[b])]
            feeds = {b: (seqs[b], [chains[b].tokens[-1]]) for b in grown}
            guesses = {b: self._guess(seqs[b], chains[b].tokens, limits[b]) for b in grown}
            round += 1
        return Draft.chains([chain.tokens for chain in chains], [chain.probs for chain in chains])

    def _first_guesses(
        self, limits: Seq[int], seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins], fed: list[int]
    ) -> dict[int, Draft]:
        """Return the inner drafter's guesses after the committed tokens of each sequence whose index is in `fed`.

        Each guess leaves room for one more token, because the draft model adds a token to the guess. limits: for each
        sequence, the most tokens to draft. coins: for each sequence, its random numbers (see `Coins`).
        """
        lengths = [max(0, min(self.inner_length, limit - 1)) for limit in limits]
        asked = [b for b in fed if lengths[b]]
        inner_coins = [_InnerCoins(its, 0, 0) for its in coins]
        guesses = self.ask(self.inner, asked, seqs, Budget(lengths, budget.catchup_tokens), inner_coins)
        return dict.fromkeys(fed, Draft.empty(1)) | dict(zip(asked, guesses, strict=True))

    def _guess(self, seq: Sequence, drafted: Seq[int], limit: int) -> Draft:
        """Return the inner drafter's guess after the tokens `drafted`, which the inner drafter does not remember.

        limit: the largest number of tokens in the whole draft.
        """
        length = min(self.inner_length, limit - len(drafted) - 1)
        tokens = self.inner.ahead(seq, drafted, length) if length > 0 else ()
        return Draft.chains([tokens], [[Probs.of_point(token) for token in tokens]])

    def _pass(
        self,
        feeds: Feeds,
        guesses: Mapping[int, Draft],
        chains: Seq[Chain],
        coins: Mapping[int, Coins],
        is_first: bool,
        reads_logits: bool,
    ) -> dict[int, list[Emitted]]:
        """Run each sequence's tokens and guess through the draft model, and verify the guess with its distributions.

        feeds: the tokens of each sequence to run before its guess. chains: the drafts so far. coins: see `_InnerCoins`.
        is_first: whether the tokens in `feeds` are committed. Returns the emitted tokens of each sequence, by index.
        They are distributed as the draft model's own draws. Each token comes with the draft model's distribution and
        output row for the token's position.
        """
        model = self.model
        guesses = {b: self._cut(guess) for b, guess in guesses.items()}
        runs = [[*tokens, *guesses[b].tokens[: self._num_known(guesses[b])]] for b, (_, tokens) in feeds.items()]
        scores = model.runner.forward(
            [model.run(seq, run, "all", reads_logits) for (seq, _), run in zip(feeds.values(), runs, strict=True)]
        )
        emitted, kept = {}, {}
        for i, (b, (seq, tokens)) in enumerate(feeds.items()):
            rows, guess = model.rows(scores, i)[len(tokens) - 1 :], guesses[b].tokens
            each_probs = _LazyProbs(partial(self._distribution, rows, seq, chains[b].tokens, guess), len(guess) + 1)
            rule = verify.find("match" if seq.acceptance == "match" else "ratio")
            path, last, _ = rule.rule(guesses[b], 0, each_probs, coins[b])
            kept[b] = guess[: len(path)]
            emitted[b] = list(zip([*kept[b], last], each_probs, rows, strict=False))[: each_probs.end]
        model.runner.cache.keep({seq.id: range(len(tokens) + len(kept[b])) for b, (seq, tokens) in feeds.items()})
        for b, (seq, tokens) in feeds.items():
            (model.commit if is_first else model.guess)(seq, tokens)
            model.guess(seq, kept[b])
        return emitted

    def _num_known(self, guess: Draft) -> int:
        """Return how many tokens of a guess precede its first token outside the draft model's vocabulary."""
        num_ids = self.model.runner.model.config.vocab_size
        return next((i for i, token in enumerate(guess.tokens) if token >= num_ids), len(guess.tokens))

    def _cut(self, guess: Draft) -> Draft:
        """Return a guess without the tokens after its first token outside the draft model's vocabulary.

        That first token stays and must be judged, because the inner drafter drew it. The draft model gives it
        probability 0, so it is rejected and is never run.
        """
        length = self._num_known(guess) + 1
        return guess if length >= len(guess.tokens) else Draft.chains([guess.tokens[:length]], [guess.probs[:length]])

    def _distribution(self, rows: Seq[Row], seq: Sequence, drafted: Seq[int], guess: Seq[int], row: int) -> Probs:
        return self.model.distribution(rows[row], seq, [*drafted, *guess[:row]])

    @staticmethod
    def _extend(chain: Chain, emitted: Seq[Emitted], b: int, budget: Budget, limit: int) -> bool:
        """Add emitted tokens to the draft of sequence b until pacing stops. Returns whether the draft may go on.

        limit: the largest number of tokens in the draft.
        """
        for token, draft_probs, row in emitted:
            depth = len(chain.tokens)
            logits = None if isinstance(row, int) else row
            if not budget.go_on(b, depth, draft_probs, logits):
                return False
            chain.tokens.append(token)
            chain.probs.append(draft_probs)
            if not budget.go_behind(b, depth, token, draft_probs, logits):
                return False
        return bool(emitted) and len(chain.tokens) < limit


def needs(options: Options, target: Known) -> Needs:
    """Return the specs of the draft model and of the inner drafter."""
    return Needs(parts=(options.of, options.inner))


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter. Raises BadOption if `of` names no draft model, or if the inner drafter drafts trees."""
    model, inner = made([options.of, options.inner], target)
    if not isinstance(model, ModelDrafter):
        raise BadOption(f"cascade:of={shown(options.of)} is not possible: it is no draft model; name one")
    if inner.shape != "chain":
        raise BadOption(f"cascade:inner={shown(options.inner)} is not possible: it drafts trees; name one of chains")
    return CascadeDrafter(model, inner, options.inner_length)
