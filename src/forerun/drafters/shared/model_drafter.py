"""The drafter whose model runs ahead of the target: token by token, or a whole round in one call of the runner."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forerun.drafters.shared.branching import BranchingModel
from forerun.drafters.shared.chain import Chain, Row
from forerun.drafters.shared.feeding import SHORT_TOKENS, Feeds
from forerun.drafters.shared.model_options import USUAL, Draws
from forerun.errors import BadOption
from forerun.models.runner import Run, Runner
from forerun.sampling import History, filters_of, probs
from forerun.sampling.random import PhiloxCoins
from forerun.types import Budget, Coins, Draft, Draw, Probs, Sequence, Stop


class ModelDrafter(BranchingModel):
    """A drafter that runs the model of `runner` ahead of the target."""

    def __init__(self, runner: Runner, options: Draws = USUAL) -> None:
        super().__init__(runner, options)
        self.tells_confidence = runner.tells_confidence
        self.draws_ahead = runner.draws_ahead

    def own_draft(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        limits, feeds = self.ready(seqs, budget)
        return self._proposed(seqs, budget, coins, limits, feeds)

    def _proposed(
        self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins], limits: Seq[int], feeds: Feeds
    ) -> Draft:
        """Run the tokens of `feeds`, which the cache lacks, then draft at most limits[b] tokens for sequence b."""
        if not budget.stops_early and (draws := self._draws(feeds, coins)) is not None:
            return self._run_ahead(feeds, limits, budget, draws)
        reads_logits = budget.reads_logits or bool(budget.stops)
        chains = [Chain() for _ in seqs]
        rows = self._feed(feeds, reads_logits=reads_logits)
        depth = 0
        for seq, tokens in feeds.values():
            self.commit(seq, tokens)
        while rows:
            grown = [b for b, row in rows.items() if self._grow(chains[b], row, seqs[b], b, budget, coins[b])]
            depth += 1
            # The last token of a full chain is not run, because no draw needs the logits after it.
            feeds = {b: (seqs[b], self._to_run(chains[b], seqs[b], b, budget)) for b in grown if depth < limits[b]}
            feeds = {b: (seq, tokens) for b, (seq, tokens) in feeds.items() if tokens}
            rows = self._feed(feeds, reads_logits=reads_logits)
            for seq, tokens in feeds.values():
                self.guess(seq, tokens)
        return Draft.joined([chain.draft() for chain in chains])

    def _to_run(self, chain: Chain, seq: Sequence, b: int, budget: Budget) -> list[int]:
        """Return the tokens to run before the next draw, in the model's ids; [] if no further token is to be drawn.

        The tokens are the last drafted token and the tokens that the grammar forces after it. No further token is drawn
        if the forced tokens fill the limit, if they are too many for one pass, or if they are not worth their rows in
        the target's pass.
        """
        last = chain.tokens[-1]
        most = budget.limits[b] if budget.limits else 0
        if most:
            run = self.forced(seq, chain.tokens)
            num_own, num_nodes = len(chain.tokens) - len(chain.forced), len(chain.tokens) + len(run)
            if num_nodes >= most or len(run) > SHORT_TOKENS or not budget.carries(b, num_own, len(run)):
                return []
            chain.force(run)
            return [last, *run]
        return [self.own_id(last)]

    def forced(self, seq: Sequence, drafted: Seq[int]) -> list[int]:
        """Return the tokens that a grammar forces after the tokens `drafted`; [] if the model lacks one of them."""
        run = seq.grammar.forced(seq.tokens, drafted) if seq.grammar is not None else []
        return run if max(run, default=0) < self.runner.model.config.vocab_size else []

    def own_id(self, token: int) -> int:
        """Return the model's own id of a drafted token."""
        return token

    def distribution(self, row: Row, seq: Sequence, drafted: Seq[int]) -> Probs:
        """Return the distribution of the token after the committed tokens and the tokens `drafted`.

        row: the model's output for that token: logits, or the id of the largest logit. Raises BadOption if masks and
        filters leave no token.
        """
        if isinstance(row, int):
            return Probs.of_point(row)
        return probs(row, self._fed[seq.id].params, History.of(seq, drafted))

    def _draws(self, feeds: Feeds, coins: Seq[Coins]) -> list[Draw] | None:
        """Return a Draw for each sequence, with which the runner draws the tokens of all sequences in one call.

        [] = the runner takes the likeliest tokens. None = the runner cannot draw the tokens in one call. coins: for
        each sequence of the batch, its random numbers (see `Coins`).
        """
        fed = [self._fed[seq.id] for seq, _ in feeds.values()]
        if all(own.best_only for own in fed):
            return []
        draws = list[Draw]()
        for (b, (seq, _)), own in zip(feeds.items(), fed, strict=True):
            thrown = coins[b]
            is_plain = own.only_filters and seq.grammar is None
            if not (self.draws_ahead and is_plain and isinstance(thrown, PhiloxCoins)):
                return None
            # The same choice between two kinds of draws as in Chain.grow.
            draws.append(thrown.ahead(filters_of(own.params, self.runner.width), seq.acceptance == "match"))
        return draws

    def _run_ahead(self, feeds: Feeds, limits: Seq[int], budget: Budget, draws: Seq[Draw]) -> Draft:
        """Draft the tokens of all sequences in one call of the runner.

        The loop in `_proposed` would make the same draft, unless pacing stops the draft early.
        """
        runs = [Run(seq.id, tokens) for seq, tokens in feeds.values()]
        stops = [budget.stops.get(b) or Stop.never(limits[b]) for b in feeds] if budget.stops else ()
        ahead = self.runner.run_ahead(runs, [limits[b] for b in feeds], stops, draws=draws)
        for stop, confidences in zip(stops, ahead.confidences, strict=False):
            stop.confidences += confidences
        chains: list[list[int]] = [[] for _ in limits]
        drawn: list[list[Probs]] = [[] for _ in limits]
        fed = zip(feeds.values(), ahead.ids, strict=True)
        self.runner.cache.keep({seq.id: range(len(tokens) + len(chain) - 1) for (seq, tokens), chain in fed})
        for i, ((b, (seq, tokens)), chain) in enumerate(zip(feeds.items(), ahead.ids, strict=True)):
            self.commit(seq, tokens)
            self.guess(seq, chain[:-1])
            chains[b] = chain
            drawn[b] = list(ahead.probs[i]) if draws else [Probs.of_point(token) for token in chain]
        return Draft.chains(chains, drawn)

    def _grow(self, chain: Chain, row: Row, seq: Sequence, b: int, budget: Budget, coins: Coins) -> bool:
        """Draw one more token for a sequence, unless pacing stops the chain or masks leave no token.

        Returns whether another token may follow. row: the model's logits, or the id of the largest logit. b: the
        sequence's index in `budget`. coins: the sequence's random numbers (see `Coins`).
        """
        try:
            draft_probs = self.distribution(row, seq, chain.tokens)
        except BadOption:
            return False  # no token is left; the target raises if it has no token left either
        return chain.grow(draft_probs, None if isinstance(row, int) else row, seq, b, budget, coins)
