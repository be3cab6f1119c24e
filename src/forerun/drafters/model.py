"""An autoregressive draft model with its own cache, batched over requests (Leviathan et al. 2023; Chen et al. 2023).

Its probabilities go through the same pipeline as the target's, with two options of its own: draft_temperature and
draft_top_k replace the request's values for the draws only. The output's distribution does not depend on them, because
the verifier is told the distribution that each token was drawn from. draft_vocab leaves only the first ids of the
tokenizer to be drafted (short_vocab.py). The others have probability 0 in the draft.

After a round the draft's cache lacks one committed token, or two when everything was accepted, because the last drafted
token was never fed. Before it drafts for a sequence the model runs the tokens that its cache lacks (at first the whole
prompt) within a budget; until that is done the sequence has no draft and decodes plainly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from forerun import ops
from forerun.blocks import Spec
from forerun.config import AUTO, Quantization
from forerun.drafters import Drafter, Known, Needs, OwnCheckpoint, Seen, Target, needs_a_model
from forerun.drafters.shared.searching import SEARCH, SearchingDrafter
from forerun.drafters.shared.short_vocab import LARGE, SIZES, ShortVocabulary
from forerun.errors import BadOption, shown
from forerun.kv import KVCache
from forerun.kv.cache import BlockCache
from forerun.models.branches import Branches, settle
from forerun.models.loading import Checkpoint, load_checkpoint
from forerun.models.runner import NO_NUMBERS, Run, Runner, Scores
from forerun.ops.model import KeepsCache, Model, ModelConfig
from forerun.sampling import History, arithmetic, filters_of, likeliest, only_filters, probs, takes_the_best
from forerun.sampling.arithmetic import Row as Logits
from forerun.sampling.random import PhiloxCoins
from forerun.text.tokenizer import compare
from forerun.types import ROUND_TOKENS, Budget, Coins, Draft, Draw, Next, Probs, SamplingParams, Sequence, Stop

SHORT_TOKENS = 32  # forced by a grammar, that a model reads in one pass with the token that it drafts behind

Row = Logits | int  # logits [V] of a sequence's next token, or the id of the largest one
Feeds = dict[int, tuple[Sequence, list[int]]]  # by index in a call of `propose`: the sequence, and tokens to run


TEMPERATURE = {"help": "temperature of the draws; none = the request's", "min": 0.0, "max": 100.0}
TOP_K = {"help": "top-k of the draws, 0 = all; none = the request's", "min": 0}
PATH = {"help": "folder, GGUF file, name or hub id of the draft model; none = the shipped one"}
QUANTIZATION = {
    "help": "int8 or int4[:group=N]: its weights are rounded while they are loaded, with :again also those that its "
    "file has rounded already; auto = int4:again of a large model on operators that compute with it; none = as stored"
}
VOCAB = {
    "help": "ids that are drafted, the first ones of the tokenizer: no other rows of the LM head are read; auto = as "
    "many as pay in the text, where the vocabulary is large; none = all"
}


class Draws(Protocol):
    """How a draft model draws: the options that every drafter with a model has."""

    @property
    def draft_temperature(self) -> float | None: ...
    @property
    def draft_top_k(self) -> int | None: ...
    @property
    def draft_vocab(self) -> str: ...


class Loads(Protocol):
    """Which draft model is loaded: the options that every drafter with a checkpoint has."""

    @property
    def path(self) -> str | None: ...
    @property
    def quantization(self) -> str: ...


def head_rows(method: str, draft_vocab: str) -> int | None:
    """How many ids are drafted at most, None = all. Raises BadOption."""
    if draft_vocab in ("none", AUTO):
        return None
    if not draft_vocab.isdecimal() or int(draft_vocab) < 1:
        raise BadOption(
            f"{method}:draft_vocab={shown(draft_vocab)} is not possible: it must be auto, none or at least 1"
        )
    return int(draft_vocab)


def check_temperature(method: str, value: float | None) -> None:
    """Raise BadOption for a temperature between greedy and the least that the pipeline takes."""
    if value is not None and 0 < value < 1e-5:
        raise BadOption(f"{method}:draft_temperature={value} must be 0 (greedy) or at least 1e-5")


def rounding(quantization: str) -> str | None:
    """What a draft model's weights are rounded to, as it is loaded; None = nothing. Raises BadOption."""
    if quantization not in ("none", AUTO):
        Quantization.parse(quantization)
    return None if quantization == "none" else quantization


@dataclass(frozen=True)
class Options:
    """Which model, and how it draws."""

    path: str | None = field(default=None, metadata=PATH)
    quantization: str = field(default=AUTO, metadata=QUANTIZATION)
    draft_temperature: float | None = field(default=None, metadata=TEMPERATURE)
    draft_top_k: int | None = field(default=None, metadata=TOP_K)
    draft_vocab: str = field(default=AUTO, metadata=VOCAB)
    search: str = field(default="suffix", metadata=SEARCH)

    def __post_init__(self) -> None:
        rounding(self.quantization)
        head_rows("model", self.draft_vocab)
        check_temperature("model", self.draft_temperature)


@dataclass(slots=True)
class _Fed:
    """The tokens of one sequence that the draft's cache holds; the first `num_sure` of them are committed.

    best_only: whether its draws need only the largest logit. only_filters: whether they need nothing but filters.
    """

    tokens: list[int]
    num_sure: int
    params: SamplingParams
    best_only: bool
    only_filters: bool


@dataclass(slots=True)
class Chain:
    """The draft of one sequence while it grows: tokens, and the distribution that each was drawn from.

    forced: places of tokens that a grammar leaves no choice about.
    """

    tokens: list[int] = field(default_factory=list)
    probs: list[Probs] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)

    def force(self, run: Seq[int]) -> None:
        """Add tokens that the grammar forces behind those that were drawn."""
        self.forced += range(len(self.tokens), len(self.tokens) + len(run))
        self.tokens += run
        self.probs += map(Probs.of_point, run)

    def draft(self) -> Draft:
        """Return it as a draft of one sequence."""
        return dataclasses.replace(Draft.chains([self.tokens], [self.probs]), forced=frozenset(self.forced))

    def grow(
        self, draft_probs: Probs, logits: Logits | None, seq: Sequence, b: int, budget: Budget, coins: Coins
    ) -> bool:
        """Draw one more token, unless the pacing policy stops here. Returns whether another may follow."""
        depth = len(self.tokens)
        if not budget.go_on(b, depth, draft_probs, logits):
            return False
        # Match verification accepts most when drafter and target share the noise (docs/exactness.md).
        token = (coins.pick if seq.acceptance == "match" else coins.draft)(draft_probs, depth)
        self.tokens.append(token)
        self.probs.append(draft_probs)
        if (stop := budget.stops.get(b)) is not None and not stop.goes_on(_confidence(token, draft_probs, logits)):
            return False
        return budget.go_behind(b, depth, token, draft_probs, logits)


def _confidence(token: int, draft_probs: Probs, logits: Logits | None) -> float:
    """The probability of a drawn token: of a point mass, which says nothing, by softmax(logits) [V]."""
    if draft_probs.point is None or logits is None:
        return draft_probs.at(token)
    return arithmetic.chance(logits, token)


def next_of(
    row: Row,
    seq: Sequence,
    drafted: Seq[int],
    ids: Seq[int] | None = None,
    spread: Callable[[Logits], Logits] | None = None,
) -> tuple[Probs, Logits | None] | None:
    """What a request's sampling makes of a head's row behind the drafted tokens: the distribution, and its logits [V].

    None where the row has no numbers or masks leave no token: the target raises where none is left there either. A row
    that is a token has no logits. ids: the target's ids of a head's own; spread: its logits as logits of the target's.
    """
    if isinstance(row, int):
        return None if row == NO_NUMBERS else (Probs.of_point(row if ids is None else ids[row]), None)
    if not np.isfinite(row.max()):
        return None
    logits = row if spread is None else spread(row)
    try:
        return probs(logits, dataclasses.replace(seq.params, logprobs=None), History.of(seq, drafted)), logits
    except BadOption:
        return None


@dataclass(slots=True)
class _Search:
    """What the model holds of one beam search: its rows, and the logits behind them."""

    branches: Branches = field(default_factory=Branches)
    logits: dict[int, Logits] = field(default_factory=dict)


class Space:
    """The blocks that a pass may still reserve, counted over all its sequences."""

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.num_blocks = cache, cache.free_tokens() // cache.block_tokens

    def take(self, slot: int, num_tokens: int) -> int:
        """Set blocks aside for `num_tokens` more rows of a slot, and return how many of the rows there is room for."""
        missing = self.cache.missing_blocks(slot, num_tokens)
        if missing > self.num_blocks:
            missing = self.num_blocks
            num_tokens = self.cache.room(slot).slack + missing * self.cache.block_tokens
        self.num_blocks -= missing
        return num_tokens


class ModelDrafter(SearchingDrafter):
    """A drafter that runs the model of `runner` ahead of the target."""

    branches = True

    def __init__(self, runner: Runner, options: Draws | None = None) -> None:
        self.runner: Runner = runner
        self.tells_confidence = runner.tells_confidence
        self.options: Draws = options or Options()
        self.width = runner.width  # ids of the distributions that `distribution` gives
        self.short: ShortVocabulary | None = None
        self.finds_best, self.draws_ahead = runner.finds_best, runner.draws_ahead
        self.caught_up: dict[int, int] = {}
        self._fed: dict[int, _Fed] = {}
        self.guessing: set[int] = set()  # sequences whose drafted tokens are in the cache
        self._searches: dict[int, _Search] = {}

    def shorten(self, short: ShortVocabulary | None) -> None:
        """Draft only so many ids as pay, from now on."""
        if short is None:
            return
        self.short = short
        self.width = min(self.width, SIZES[0])
        self.runner.narrow(short.best())

    def begin(self, seq: Sequence) -> None:
        found = self.runner.cache.open(seq.id, seq.tokens, seq.salt)
        if self.runner.sources is not None:
            self.runner.sources.open(seq.id, seq.source_ids, seq.params.cache_salt)
        params = self._draft_params(seq.params)
        only = only_filters(params, seq.bad_word_ids)
        best_only = self.finds_best and takes_the_best(params, seq.bad_word_ids)
        self._fed[seq.id] = _Fed(seq.tokens[:found], found, params, best_only, only)
        super().begin(seq)

    def end(self, seq: Sequence) -> None:
        self._fed.pop(seq.id, None)
        super().end(seq)
        self._searches.pop(seq.id, None)
        self.guessing.discard(seq.id)
        if self.short is not None:
            self.short.forget(seq)
        self.runner.cache.release(seq.id)
        if self.runner.sources is not None:
            self.runner.sources.release(seq.id)

    def free_tokens(self, without: Collection[int] = ()) -> int | None:
        sources = self.runner.sources
        return self.runner.cache.free_tokens(without if sources is None else sources.slots(without))

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """Give the cache rows of rejected tokens back, before the scheduler asks how much room there is."""
        if not self.guessing and not self._searches:
            return
        for seq in seqs:
            if seq.id in self.guessing:
                self._forget_rejected(seq)
            elif seq.id in self._searches:
                self._follow(seq)

    def catch_up(self, seqs: Seq[Sequence], num_tokens: int) -> None:
        """Run committed tokens, all but the last: the round runs that one, because it needs the logits after it."""
        self.caught_up, self.catchup_s = {}, 0.0
        self._catch_up(*self._read_sources(seqs, num_tokens))

    def _catch_up(self, seqs: Seq[Sequence], num_tokens: int) -> None:
        """Do what `catch_up` does for sequences whose sources are read."""
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
        """Add what was run only to catch up, by sequence."""
        self.caught_up |= {id_: self.caught_up.get(id_, 0) + num for id_, num in num_tokens.items()}
        self.catchup_s += seconds

    def _read_sources(self, seqs: Seq[Sequence], num_tokens: int) -> tuple[Seq[Sequence], int]:
        """Run the sources that an encoder-decoder is to read first, not before it is to draft.

        Those that fit are run at once: within so many tokens, but one at least, and within the cache. Returns the
        sequences whose sources are read, and how many tokens are left.
        """
        sources = self.runner.sources
        if sources is None or not any(sources.num_unrun(seq.id) for seq in seqs):
            return seqs, num_tokens
        num_blocks, run = Space(self.runner.cache).num_blocks, dict[int, int]()
        for seq in seqs:
            num, missing = sources.num_unrun(seq.id), sources.missing_blocks(seq.id)
            if num and missing <= num_blocks and (num <= num_tokens or (num_tokens > 0 and not run)):
                run[seq.id] = num
                num_tokens, num_blocks = max(0, num_tokens - num), num_blocks - missing
        if run:
            started = self.clock()
            sources.run(list(run))
            self._count(run, self.clock() - started)
        return [seq for seq in seqs if not sources.num_unrun(seq.id)], num_tokens

    def own_draft(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        limits, feeds = self.ready(seqs, budget)
        return self._proposed(seqs, budget, coins, limits, feeds)

    def _proposed(
        self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins], limits: Seq[int], feeds: Feeds
    ) -> Draft:
        """Return what the model drafts within these limits, once the missing tokens are fed."""
        if not budget.stops_early and (draws := self._draws(feeds, coins)) is not None:
            return self._run_ahead(feeds, limits, budget, draws)
        reads_logits = budget.reads_logits or bool(budget.stops)
        chains, rows, depth = [Chain() for _ in seqs], self._feed(feeds, reads_logits=reads_logits), 0
        for seq, tokens in feeds.values():
            self.commit(seq, tokens)
        while rows:
            grown = [b for b, row in rows.items() if self._grow(chains[b], row, seqs[b], b, budget, coins[b])]
            depth += 1
            # The last token of a full chain is not fed: no draw needs the logits after it.
            feeds = {b: (seqs[b], self._to_run(chains[b], seqs[b], b, budget)) for b in grown if depth < limits[b]}
            feeds = {b: (seq, tokens) for b, (seq, tokens) in feeds.items() if tokens}
            rows = self._feed(feeds, reads_logits=reads_logits)
            for seq, tokens in feeds.values():
                self.guess(seq, tokens)
        return Draft.joined([chain.draft() for chain in chains])

    def _to_run(self, chain: Chain, seq: Sequence, b: int, budget: Budget) -> list[int]:
        """Return the tokens to run before the next draw, in the model's ids; none where no other draw has room.

        They are the last one, and what the grammar forces behind it, which needs no pass of its own.
        """
        last, most = chain.tokens[-1], budget.limits[b] if budget.limits else 0
        if most:
            run = self.forced(seq, chain.tokens)
            num_own, num_nodes = len(chain.tokens) - len(chain.forced), len(chain.tokens) + len(run)
            if num_nodes >= most or len(run) > SHORT_TOKENS or not budget.carries(b, num_own, len(run)):
                return []
            chain.force(run)
            return [last, *run]
        return [self.own_id(last)]

    def forced(self, seq: Sequence, drafted: Seq[int]) -> list[int]:
        """Return what the grammar of a sequence forces behind drafted tokens, as far as the model reads its ids."""
        run = seq.grammar.forced(seq.tokens, drafted) if seq.grammar is not None else []
        return run if max(run, default=0) < self.runner.model.config.vocab_size else []

    def branch(self, seqs: Seq[Sequence], levels: Seq[Seq[int]], catchup_tokens: int) -> list[list[Next | None]]:
        """Run the nodes of a level of all searches, and those between them and the base, in one pass."""
        self.caught_up, self.catchup_s = {}, 0.0
        searches = [self._searches.setdefault(seq.id, _Search()) for seq in seqs]
        read, catchup_tokens = self._read_sources(seqs, catchup_tokens)
        if behind := [seq for seq in read if self.num_held(seq) < len(seq.tokens) - 1]:
            self._catch_up(behind, catchup_tokens)
        room, runs, fed = Space(self.runner.cache), list[Run](), list[tuple[_Search, list[int]]]()
        for seq, search, level in zip(seqs, searches, levels, strict=True):
            nodes = self._nodes(seq, search.branches, level)
            if nodes and room.take(seq.id, len(nodes)) == len(nodes) and seq.hypotheses is not None:
                runs.append(search.branches.run(seq.id, seq.hypotheses, nodes, seq.tokens[-1])._replace(pending=True))
                fed.append((search, nodes))
        logits = self.runner.forward(runs).logits if runs else []
        for (search, nodes), rows in zip(fed, logits, strict=True):
            search.branches.add(nodes)
            search.logits |= zip(nodes, rows, strict=True)
        return [
            [self._next(seq, node, search.logits.get(node)) for node in level]
            for seq, search, level in zip(seqs, searches, levels, strict=True)
        ]

    def _nodes(self, seq: Sequence, branches: Branches, level: Seq[int]) -> list[int]:
        """Return the nodes to run for a level, each behind its parent; none where one of them cannot be run."""
        tree, config = seq.hypotheses, self.runner.model.config
        if tree is None or self.num_unread(seq) > 1:
            return []
        if not branches.rows:
            branches.forget(tree.base)
        paths = [[tree.base, *tree.path(node, tree.base)] for node in level]
        nodes = sorted({node for path in paths for node in path if node not in branches.rows})
        is_known = all(tree.tokens[node] < config.vocab_size for node in nodes if node >= 0)
        deepest = len(seq.tokens) - 1 + max(map(len, paths), default=0)
        return nodes if is_known and deepest <= config.max_positions else []

    def _next(self, seq: Sequence, node: int, row: Logits | None) -> Next | None:
        """Return what may follow a node, with the same penalties and masks as the target's scores."""
        if row is None or seq.hypotheses is None:
            return None
        history = History.of(seq, seq.hypotheses.text(node, seq.hypotheses.base))
        return partial(likeliest, row, self.params(seq), history)

    def _follow(self, seq: Sequence) -> None:
        """Keep the rows of what a search has committed, and give those of the texts that it has given up back."""
        search, tree = self._searches[seq.id], seq.hypotheses
        if tree is not None:
            held = self.num_held(seq)
            num_kept = settle(self.runner.cache, seq.id, search.branches, tree)
            self.commit(seq, seq.tokens[held : held + num_kept])
            search.logits = {node: row for node, row in search.logits.items() if node in search.branches.rows}

    def ready(self, seqs: Seq[Sequence], budget: Budget) -> tuple[list[int], Feeds]:
        """Catch up within the budget. Returns how many tokens may be drafted, [B], and what has to be run first.

        Only sequences that can be drafted for are fed: those whose committed tokens a round can run. There is room in
        the cache for what is fed first and for all but one of the drafted tokens.
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
        """How many tokens the model may draft; and set how many nodes it may have with those that are forced."""
        granted = 0 if is_unread else budget.num_tokens[b]
        most = budget.limits[b] if budget.limits else 0
        if not granted or not most:
            return self._limit(seq, granted, room)
        budget.limits[b] = self._limit(seq, max(granted, most), room)
        return min(granted, budget.limits[b])

    def run(self, seq: Sequence, tokens: Seq[int], wanted: str, reads_logits: bool) -> Run:
        """Return a run of these tokens of a sequence.

        It asks for the largest logits alone, where the draws need no others and pacing does not read them, either.
        """
        return Run(seq.id, tokens, wanted, None, self._fed[seq.id].best_only and not reads_logits)

    def params(self, seq: Sequence) -> SamplingParams:
        """Return the parameters that a sequence's draws use."""
        return self._fed[seq.id].params

    def own_id(self, token: int) -> int:
        """Return the model's own id of a drafted token."""
        return token

    def doubt(self, seq: Sequence, start: int) -> None:
        """Record that tokens of a sequence that were committed may be others, from the index `start` on."""
        fed = self._fed[seq.id]
        fed.num_sure = min(fed.num_sure, start)

    def num_unread(self, seq: Sequence) -> int:
        sources = self.runner.sources
        return len(seq.tokens) - self.num_held(seq) + (0 if sources is None else sources.num_unrun(seq.id))

    def num_held(self, seq: Sequence) -> int:
        """Return how many of the committed tokens the cache holds, pending rows not counted."""
        return len(self._fed[seq.id].tokens)

    def keep_pending(self, seq: Sequence, rows: Seq[int]) -> None:
        """Keep these pending rows, which are of the committed tokens behind those that the cache holds; drop others."""
        self.runner.cache.keep({seq.id: rows})
        held = self.num_held(seq)
        self.commit(seq, seq.tokens[held : held + len(rows)])

    def rows(self, scores: Scores, b: int) -> Seq[Row]:
        """Return the rows of run b that were asked for."""
        return scores.best[b] or scores.logits[b]  # type: ignore[return-value]

    def distribution(self, row: Row, seq: Sequence, drafted: Seq[int]) -> Probs:
        """Return the distribution that a token behind the committed ones and `drafted` is drawn from.

        Raises BadOption where masks and filters leave no token.
        """
        if isinstance(row, int):
            return Probs.of_point(row)
        return probs(row, self._fed[seq.id].params, History.of(seq, drafted))

    def _draws(self, feeds: Feeds, coins: Seq[Coins]) -> list[Draw] | None:
        """How the runner is to draw the tokens of these sequences in one call: [] = the likeliest; None = it cannot."""
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

        The result is that of the loop in `_proposed` where pacing stops no draw early.
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
        """Draw one more token for a sequence, unless the pacing policy stops here or its masks leave no token.

        Returns whether another one may follow.
        """
        try:
            draft_probs = self.distribution(row, seq, chain.tokens)
        except BadOption:
            return False  # no token is left here; the target raises where none is left there either
        return chain.grow(draft_probs, None if isinstance(row, int) else row, seq, b, budget, coins)

    def _limit(self, seq: Sequence, granted: int, room: Space) -> int:
        """Return how many tokens to draft, at most `granted`, within the model's positions and the room in the cache.

        Drafted token i (from 1) is fed at index L + i - 1, where L is the number of committed tokens.
        """
        config = self.runner.model.config
        self._forget_rejected(seq)
        missing = self._missing(seq)
        limit = min(granted, config.max_positions - len(seq.tokens) + 1)
        if limit <= 0 or max(missing) >= config.vocab_size:
            return 0  # past the model's positions, or a token without a row in its embedding: no drafts
        return max(0, room.take(seq.id, len(missing) + limit - 1) - len(missing) + 1)

    def _forget_rejected(self, seq: Sequence) -> None:
        """Cut the cache to the committed tokens that it holds, at most all but the last, which is fed next."""
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
        """Record that drafted tokens were fed behind committed ones."""
        if tokens:
            self._fed[seq.id].tokens += tokens
            self.guessing.add(seq.id)

    def _missing(self, seq: Sequence) -> list[int]:
        """Return the committed tokens that the cache lacks."""
        return seq.tokens[len(self._fed[seq.id].tokens) :]

    def commit(self, seq: Sequence, tokens: list[int]) -> None:
        """Record that committed tokens were fed, and let other sequences share them."""
        fed = self._fed[seq.id]
        fed.tokens += tokens
        fed.num_sure = len(fed.tokens)
        self.runner.cache.publish(seq.id, fed.tokens)

    def _known(self, seq: Sequence, start: int, num_tokens: int) -> int:
        """Return how many of these tokens can be run: all, or 0 where the model lacks a position or an id for one."""
        config = self.runner.model.config
        inside = num_tokens > 0 and start + num_tokens <= config.max_positions
        return num_tokens if inside and max(seq.tokens[start : start + num_tokens]) < config.vocab_size else 0

    def _feed(self, feeds: Feeds, wanted: str = "last", reads_logits: bool = False) -> dict[int, Row]:
        """Run these tokens and keep their rows. Returns what follows each sequence's last row, if wanted="last"."""
        if not feeds:
            return {}
        scores = self.runner.forward([self.run(seq, tokens, wanted, reads_logits) for seq, tokens in feeds.values()])
        self.runner.cache.keep({seq.id: range(len(tokens)) for seq, tokens in feeds.values()})
        if wanted != "last":
            return {}
        return {b: self.rows(scores, i)[-1] for i, b in enumerate(feeds)}

    def _draft_params(self, params: SamplingParams) -> SamplingParams:
        """Return the request's parameters with the drafter's own options put in.

        Log-probabilities and biases of ids that the draft model does not have are left out. A beam search draws
        nothing, so that the options of draws say nothing to it.
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


def needs(options: Options, target: Known) -> Needs:
    """Return the draft model. Refuses one whose tokenizer is another than the target's."""
    if options.path is not None and target.tokenizer is not None:
        compare(target.tokenizer, target.open(options.path).text_tokenizer, str(options.path))
    return Needs(loads=OwnCheckpoint(options.path, rounding(options.quantization)))


def build(options: Options, target: Target) -> Drafter:
    """Load the draft model beside the target: same device and dtype, and the best operators that compute it.

    Raises VocabularyMismatch where an id has one token in the target's map and another in the draft's. Ids that only
    one of them knows are never drafted. End-of-sequence ids may differ, as those of a chat model and of a base model
    do: only the target's ids end the output, and a draft goes on past them.
    """
    found = loaded("model", options, target)
    _check_pair(found, target)
    drafter = over(found.model, target, options, _holes(found, target))
    drafter.search_by(options.search, "model", target)
    return drafter


def over(model: Model, target: Target, options: Draws, holes: Seq[int], layers: Seq[int] | None = None) -> ModelDrafter:
    """Make a drafter that runs this model beside the target, with a cache as large as the target's.

    holes: ids that are never drafted. layers: those that run, and alone have a cache; None = all.
    """
    cache = cache_for(model, target, layers)
    rows = head_rows("model", options.draft_vocab)
    drafter = ModelDrafter(Runner(model, cache, target.num_ids, holes, layers=layers, head_rows=rows), options)
    if options.draft_vocab == AUTO and drafter.width > LARGE and layers is None:
        drafter.shorten(_short_vocabulary(model.config, target.model.config, drafter.width))
    return drafter


def _short_vocabulary(own: ModelConfig, others: ModelConfig, num_ids: int) -> ShortVocabulary | None:
    """What chooses how many ids a draft model drafts. Weights stand for bytes, and bytes for time."""
    if not isinstance(own, Spec) or not isinstance(others, Spec):
        return None
    head, tables = num_ids * own.hidden_size, 0 if own.tied else own.vocab_size * own.hidden_size
    return ShortVocabulary(num_ids, head / (own.num_weights - tables), own.num_weights / others.num_weights)


def cache_for(
    model: Model, target: Target, layers: Seq[int] | None = None, *, keeps_all: bool = False, **options: Any
) -> KVCache:
    """Make a cache for a draft model, as large as the target's. layers: those that have rows; None = all.

    keeps_all: whether layers with windows give nothing back, for drafters that cannot run a text again. options: of the
    engine, that are others for this cache.
    """
    if isinstance(model, KeepsCache):
        return model.own_cache()
    opened, config = target.opened, dataclasses.replace(target.opened.config, **options)
    shape = dataclasses.replace(model.config.cache_shape, windows=None) if keeps_all else model.config.cache_shape
    return BlockCache.of(
        model,
        config.kv_cache_backend,  # type: ignore[arg-type]
        shape=shape if layers is None else shape.only(layers),
        max_batch_size=config.max_batch_size * model.config.num_slots,
        max_seq_len=opened.max_seq_len,
        num_tokens=opened.kv_cache_tokens,
        dtype=ops.kv_dtype(config.kv_cache_dtype, model, must=False),
        prefix_caching=config.prefix_caching,
    )


def _holes(checkpoint: Checkpoint, target: Target) -> list[int]:
    """Return the ids that the target or the draft's tokenizer lacks: their rows of the LM head are untrained."""
    holes = set(target.holes)
    if checkpoint.tokenizer is not None:
        known = checkpoint.tokenizer.id_to_token
        holes |= {i for i in range(min(target.num_ids, checkpoint.model.config.vocab_size)) if i not in known}
    return sorted(holes)


def loaded(method: str, options: Loads, target: Target) -> Checkpoint:
    """Return the draft model that a method's options name: loaded now, by the caller, or the shipped one.

    Drafters of one engine that name the same one get the same. Raises BadOption where there is none.
    """
    quantization = rounding(options.quantization)
    if options.path is None and target.loaded_draft is not None:
        if quantization not in (None, AUTO, target.loaded_draft.quantization):
            raise BadOption(
                f"{method}:quantization={shown(quantization)} contradicts the loaded draft model "
                f"({target.loaded_draft.quantization}): load it that way instead"
            )
        return target.loaded_draft
    name, model = options.path or target.opened.shipped_draft, target.model
    if name is None:
        raise BadOption(needs_a_model(method))
    load = partial(
        load_checkpoint,
        target.opened.open(name),
        dtype=model.weight_dtype,
        device=model.device,
        ops=target.operators,
        with_tokenizer=target.tokenizer is not None,
        quantization=quantization,
        max_seq_len=target.max_seq_len,
    )
    return target.shared(OwnCheckpoint(name, quantization).weights(None), load)


def has_encoder(model: Model) -> bool:
    """Return whether a model is an encoder-decoder."""
    return model.config.encoder is not None


def _check_pair(checkpoint: Checkpoint, target: Target) -> None:
    if has_encoder(checkpoint.model) and not has_encoder(target.model):
        raise BadOption(
            f"{checkpoint.name} is an encoder-decoder and the target is none, so it has no source to read: name a "
            "draft model without an encoder"
        )
    if target.tokenizer is not None:
        compare(target.tokenizer, checkpoint.tokenizer or checkpoint.opened.text_tokenizer, checkpoint.name)
