"""Keeps a draft model's cache up to date with the committed tokens of each sequence.

After a round the cache lacks one committed token, or two if the whole draft was accepted, because the last drafted
token was never run. Before the model drafts for a sequence, it runs the tokens that the cache lacks (at first the whole
prompt), within a budget. Until the cache has caught up, the sequence has no draft and decodes plainly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from forerun.drafters import Seen
from forerun.drafters.shared.chain import Row
from forerun.drafters.shared.model_options import USUAL, Draws
from forerun.drafters.shared.searching import SearchingDrafter
from forerun.drafters.shared.short_vocab import SIZES, ShortVocabulary
from forerun.kv import KVCache
from forerun.models.runner import Run, Runner, Scores
from forerun.sampling import only_filters, takes_the_best
from forerun.types import ROUND_TOKENS, Budget, SamplingParams, Sequence

SHORT_TOKENS = 32  # most tokens forced by a grammar that a model runs in one pass with the token before them
Feeds = dict[int, tuple[Sequence, list[int]]]  # by index in a call of `propose`: the sequence, and the tokens to run


@dataclass(slots=True)
class _Fed:
    """The tokens of one sequence that are in the draft model's cache; the first `num_sure` of them are committed.

    params: the sampling parameters of the sequence's draws. best_only: whether the draws need only the id of the
    largest logit. only_filters: whether the draws use only filters, and no bias, penalties or masks.
    """

    tokens: list[int]
    num_sure: int
    params: SamplingParams
    best_only: bool
    only_filters: bool


class Space:
    """Counts the cache blocks that a pass may still reserve, for all its sequences together."""

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.num_blocks = cache, cache.free_tokens() // cache.block_tokens

    def take(self, slot: int, num_tokens: int) -> int:
        """Set blocks aside for at most `num_tokens` more rows of sequence `slot`. Returns how many rows have room."""
        missing = self.cache.missing_blocks(slot, num_tokens)
        if missing > self.num_blocks:
            missing = self.num_blocks
            num_tokens = self.cache.room(slot).slack + missing * self.cache.block_tokens
        self.num_blocks -= missing
        return num_tokens


class FedModel(SearchingDrafter):
    """A drafter with a model whose cache follows the committed tokens. options: how tokens are drawn."""

    def __init__(self, runner: Runner, options: Draws = USUAL) -> None:
        self.runner: Runner = runner
        self.options = options
        self.width = runner.width  # ids in the distribution of a row
        self.short: ShortVocabulary | None = None
        self.finds_best = runner.finds_best
        self.caught_up: dict[int, int] = {}
        self._fed: dict[int, _Fed] = {}
        self.guessing: set[int] = set()  # sequences whose drafted tokens are in the cache

    def shorten(self, short: ShortVocabulary | None) -> None:
        """Draft only the first ids of the vocabulary from now on, as many as `short` chooses. None = change nothing."""
        if short is None:
            return
        self.short = short
        self.width = min(self.width, SIZES[0])
        self.runner.narrow(short.best())

    def begin(self, seq: Sequence) -> None:
        num_cached = self.runner.cache.open(seq.id, seq.tokens, seq.salt)
        if self.runner.sources is not None:
            self.runner.sources.open(seq.id, seq.source_ids, seq.params.cache_salt)
        params = self._draft_params(seq.params)
        only = only_filters(params, seq.bad_word_ids)
        best_only = self.finds_best and takes_the_best(params, seq.bad_word_ids)
        self._fed[seq.id] = _Fed(seq.tokens[:num_cached], num_cached, params, best_only, only)
        super().begin(seq)

    def end(self, seq: Sequence) -> None:
        self._fed.pop(seq.id, None)
        super().end(seq)
        self.guessing.discard(seq.id)
        if self.short is not None:
            self.short.forget(seq)
        self.runner.cache.release(seq.id)
        if self.runner.sources is not None:
            self.runner.sources.release(seq.id)

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """Free the cache rows of rejected tokens, before the scheduler asks how many rows are free."""
        for seq in seqs:
            if seq.id in self.guessing:
                self._forget_rejected(seq)

    def free_tokens(self, without: Collection[int] = ()) -> int | None:
        sources = self.runner.sources
        return self.runner.cache.free_tokens(without if sources is None else sources.slots(without))

    def catch_up(self, seqs: Seq[Sequence], num_tokens: int) -> None:
        """Run the committed tokens that the cache lacks, but not the last one: the round runs it for its logits."""
        self.caught_up, self.catchup_s = {}, 0.0
        self._catch_up(*self._read_sources(seqs, num_tokens))

    def _catch_up(self, seqs: Seq[Sequence], num_tokens: int) -> None:
        """Do the work of `catch_up` for sequences whose encoder inputs have been run, or that have none."""
        room, feeds = Space(self.runner.cache), Feeds()
        for b, seq in enumerate(seqs):
            self._forget_rejected(seq)
            start = len(self._fed[seq.id].tokens)
            take = self._known(seq, start, min(len(seq.tokens) - 1 - start, num_tokens))
            take = room.take(seq.id, take) if take > 0 else 0
            if take > 0:
                feeds[b] = (seq, seq.tokens[start : start + take])
                num_tokens -= take
        if not feeds:
            return
        started = self.clock()
        self._feed(feeds, "none")
        for seq, tokens in feeds.values():
            self.commit(seq, tokens)
        self._count({seq.id: len(tokens) for seq, tokens in feeds.values()}, self.clock() - started)

    def _count(self, num_tokens: Mapping[int, int], seconds: float) -> None:
        """Add to `caught_up` the tokens that were run only to catch up, and to `catchup_s` the seconds of this run.

        num_tokens: the number of tokens, by sequence id.
        """
        self.caught_up |= {id_: self.caught_up.get(id_, 0) + num for id_, num in num_tokens.items()}
        self.catchup_s += seconds

    def _read_sources(self, seqs: Seq[Sequence], num_tokens: int) -> tuple[Seq[Sequence], int]:
        """Run the sources (the encoder's inputs), which an encoder-decoder needs before it can draft.

        A source is run as a whole, if it fits into the cache and into the remaining `num_tokens`. The first source that
        a call runs is an exception: it may exceed `num_tokens`. Returns the sequences that have no unrun source, and
        the number of remaining tokens.
        """
        sources = self.runner.sources
        if sources is None or not any(sources.num_unrun(seq.id) for seq in seqs):
            return seqs, num_tokens
        num_blocks = Space(self.runner.cache).num_blocks
        run = dict[int, int]()
        for seq in seqs:
            num = sources.num_unrun(seq.id)
            missing = sources.missing_blocks(seq.id)
            if num and missing <= num_blocks and (num <= num_tokens or (num_tokens > 0 and not run)):
                run[seq.id] = num
                num_tokens = max(0, num_tokens - num)
                num_blocks -= missing
        if run:
            started = self.clock()
            sources.run(list(run))
            self._count(run, self.clock() - started)
        return [seq for seq in seqs if not sources.num_unrun(seq.id)], num_tokens

    def ready(self, seqs: Seq[Sequence], budget: Budget) -> tuple[list[int], Feeds]:
        """Catch up within the budget. Returns how many tokens may be drafted, [B], and the tokens to run first.

        A sequence is in the second result only if one round can run all committed tokens that the cache lacks. Only
        these sequences draft. The numbers leave room in the cache for these tokens, and for all drafted tokens but the
        last.
        """
        if self.short is not None:
            self.short.read(seqs)
            self.runner.narrow(self.short.best())
        self.caught_up, self.catchup_s = {}, 0.0
        wanted = [seq for b, seq in enumerate(seqs) if budget.num_tokens[b] > 0]
        read, catchup_tokens = self._read_sources(wanted, budget.catchup_tokens)
        unread = {seq.id for seq in wanted} - {seq.id for seq in read}
        room = Space(self.runner.cache)
        limits = [self._granted(seq, b, seq.id in unread, budget, room) for b, seq in enumerate(seqs)]
        missing = {b: self._missing(seq) for b, seq in enumerate(seqs) if limits[b] > 0}
        most = dict.fromkeys(missing, ROUND_TOKENS)
        for b, tokens in missing.items():
            num_more = len(tokens) - ROUND_TOKENS
            if seqs[b].grammar is not None and 0 < num_more <= min(catchup_tokens, SHORT_TOKENS):
                most[b], catchup_tokens = len(tokens), catchup_tokens - num_more
        if behind := [seqs[b] for b, tokens in missing.items() if len(tokens) > most[b]]:
            self._catch_up(behind, catchup_tokens)
            missing = {b: self._missing(seqs[b]) for b in missing}
        return limits, {b: (seqs[b], tokens) for b, tokens in missing.items() if len(tokens) <= most[b]}

    def _granted(self, seq: Sequence, b: int, is_unread: bool, budget: Budget, room: Space) -> int:
        """Return how many tokens the model may draft for sequence b. is_unread: whether its encoder input was not run.

        Lowers `budget.limits[b]` to the number of nodes, forced tokens included, that the model can run. room: the
        cache blocks that are still free in this pass.
        """
        granted = 0 if is_unread else budget.num_tokens[b]
        most = budget.limits[b] if budget.limits else 0
        if not granted or not most:
            return self._limit(seq, granted, room)
        budget.limits[b] = self._limit(seq, max(granted, most), room)
        return min(granted, budget.limits[b])

    def _limit(self, seq: Sequence, granted: int, room: Space) -> int:
        """Return how many tokens to draft: at most `granted`, limited by the model's positions and room in the cache.

        Drafted token i (counted from 1) is run at index L + i - 1, where L is the number of committed tokens. room: see
        `_granted`.
        """
        config = self.runner.model.config
        self._forget_rejected(seq)
        missing = self._missing(seq)
        limit = min(granted, config.max_positions - len(seq.tokens) + 1)
        if limit <= 0 or max(missing) >= config.vocab_size:
            return 0  # no drafts past the model's positions, or after a token without a row in the model's embedding
        return max(0, room.take(seq.id, len(missing) + limit - 1) - len(missing) + 1)

    def run(self, seq: Sequence, tokens: Seq[int], wanted: str, reads_logits: bool) -> Run:
        """Return the Run that feeds `tokens` of a sequence to the model. wanted: the rows with logits (Run.logits).

        If the draws need only the id of the largest logit, and pacing reads no logits, the Run asks only for this id.
        """
        return Run(seq.id, tokens, wanted, None, self._fed[seq.id].best_only and not reads_logits)

    def rows(self, scores: Scores, b: int) -> Seq[Row]:
        """Return the output for the wanted rows of run b of a pass: the ids of the largest logits, or the logits."""
        return scores.best[b] or scores.logits[b]  # type: ignore[return-value]

    def params(self, seq: Sequence) -> SamplingParams:
        """Return the sampling parameters for drafting tokens of a sequence."""
        return self._fed[seq.id].params

    def doubt(self, seq: Sequence, start: int) -> None:
        """Record that the committed tokens of a sequence may have changed from index `start` on."""
        fed = self._fed[seq.id]
        fed.num_sure = min(fed.num_sure, start)

    def num_unread(self, seq: Sequence) -> int:
        sources = self.runner.sources
        return len(seq.tokens) - self.num_held(seq) + (0 if sources is None else sources.num_unrun(seq.id))

    def num_held(self, seq: Sequence) -> int:
        """Return how many tokens of a sequence the cache holds. Pending (written, uncommitted) rows do not count."""
        return len(self._fed[seq.id].tokens)

    def keep_pending(self, seq: Sequence, rows: Seq[int]) -> None:
        """Keep the pending cache rows `rows`, which hold the next committed tokens, and drop all other pending rows."""
        self.runner.cache.keep({seq.id: rows})
        held = self.num_held(seq)
        self.commit(seq, seq.tokens[held : held + len(rows)])

    def _forget_rejected(self, seq: Sequence) -> None:
        """Cut the cache to the committed tokens without the last committed token, because the round runs it next."""
        fed = self._fed[seq.id]
        end = min(len(fed.tokens), len(seq.tokens) - 1)
        same = min(fed.num_sure, end)
        while same < end and fed.tokens[same] == seq.tokens[same]:
            same += 1
        same = self.runner.cache.truncate_to(seq.id, same)
        del fed.tokens[same:]
        fed.num_sure = same
        self.guessing.discard(seq.id)

    def guess(self, seq: Sequence, tokens: list[int]) -> None:
        """Record that drafted tokens were run after the committed tokens."""
        if tokens:
            self._fed[seq.id].tokens += tokens
            self.guessing.add(seq.id)

    def commit(self, seq: Sequence, tokens: list[int]) -> None:
        """Record that the committed tokens `tokens` were run, and let other sequences share their cache blocks."""
        fed = self._fed[seq.id]
        fed.tokens += tokens
        fed.num_sure = len(fed.tokens)
        self.runner.cache.publish(seq.id, fed.tokens)

    def _missing(self, seq: Sequence) -> list[int]:
        """Return the committed tokens that the cache lacks."""
        return seq.tokens[len(self._fed[seq.id].tokens) :]

    def _known(self, seq: Sequence, start: int, num_tokens: int) -> int:
        """Return `num_tokens` if the model can run that many tokens from index `start` on, else 0.

        The tokens must lie within the model's positions, and their ids within its vocabulary.
        """
        config = self.runner.model.config
        inside = num_tokens > 0 and start + num_tokens <= config.max_positions
        return num_tokens if inside and max(seq.tokens[start : start + num_tokens]) < config.vocab_size else 0

    def _feed(self, feeds: Feeds, wanted: str = "last", reads_logits: bool = False) -> dict[int, Row]:
        """Run the tokens of `feeds`, and keep their cache rows. With wanted="last", return each last token's output."""
        if not feeds:
            return {}
        scores = self.runner.forward([self.run(seq, tokens, wanted, reads_logits) for seq, tokens in feeds.values()])
        self.runner.cache.keep({seq.id: range(len(tokens)) for seq, tokens in feeds.values()})
        if wanted != "last":
            return {}
        return {b: self.rows(scores, i)[-1] for i, b in enumerate(feeds)}

    def _draft_params(self, params: SamplingParams) -> SamplingParams:
        """Return the request's parameters, changed by the drafter's own options.

        The request for log-probabilities is removed, and so are biases of ids that the draft model lacks. The drafter's
        options for draws are not used for a beam search, because a beam search draws nothing.
        """
        o = self.options
        changed: dict[str, Any] = {} if params.logprobs is None else {"logprobs": None}
        if params.logit_bias:
            changed["logit_bias"] = {i: bias for i, bias in params.logit_bias.items() if i < self.width}
        if o.draft_temperature is not None and not params.searches:
            changed["temperature"] = o.draft_temperature
        if o.draft_top_k is not None and not params.searches:
            changed["top_k"] = o.draft_top_k
        return dataclasses.replace(params, **changed) if changed else params
