"""EAGLE: one decoder layer that reads hidden states of the target and runs ahead of it (Li et al., arXiv 2503.01840).

Row i joins the features of token i with the embedding of token i+1, and guesses token i+2. The features of a token are
the target's residual streams after a few layers, joined by one matrix product. For tokens that the target has not run,
the head's own output in the row before replaces the features. After a round, the cache rows of these tokens are
dropped, and the accepted tokens are run with the target's features. `forerun train head --method eagle` trains a head.

As in EAGLE-3, the features come from several layers, and the head is trained on its own outputs. Unlike in EAGLE-3, one
matrix product makes the layer's input from embedding and features, as in EAGLE-1. So the layer is an ordinary decoder
layer: training can start from the target's last layer, and native operators run the layer in one call. The head's LM
head consists of the target's LM head rows for the ids that the target emits most often, so only these ids are drafted.
A prefix that the target finds in its cache is not run again, so the head begins after that prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.config import Quantization
from forerun.drafters import WITHOUT_MODEL, Drafter, Known, Needs, OwnModel, Seen, Target
from forerun.drafters.shared import artifacts, head_files, head_layouts
from forerun.drafters.shared.chain import Chain, Row, next_of
from forerun.drafters.shared.draft_models import cache_for
from forerun.drafters.shared.eagle_model import EagleConfig, HeadModel, input_shapes, layer_shapes, make
from forerun.drafters.shared.feeding import Space
from forerun.drafters.shared.head_matrices import is_packed, quantization_of
from forerun.drafters.shared.searching import SEARCH, SearchingDrafter
from forerun.errors import BadOption, InternalError, shown
from forerun.kv import KVCache
from forerun.models.runner import Run, Runner, Scores, float_type
from forerun.registry import option
from forerun.sampling import takes_the_best
from forerun.sampling.arithmetic import Row as Logits
from forerun.sampling.largest import Ids
from forerun.types import Budget, Coins, Draft, Probs, Sequence, Stop

ROUND_ROWS = 32  # waiting rows that a round may run; more than that is catching up


@dataclass(frozen=True)
class Options:
    """The options: the folder of the head, and how its weights are kept in memory."""

    path: str | None = option(None, head_files.path_help("eagle"))
    quantization: str = option(
        "auto",
        "int8 or int4[:group=N], none, or auto: as its file is quantised; else int8 for a head of `forerun train "
        "head`, and beside a target of 4 or 8 bits; else none",
    )

    search: str = field(default=WITHOUT_MODEL, metadata=SEARCH)

    def __post_init__(self) -> None:
        if self.quantization not in ("auto", "none"):
            Quantization.parse(self.quantization)


@dataclass
class _Text:
    """The head's state for one sequence. The head reads features: the target's hidden states of each token.

    first: the index of the first token with features. waiting: features that the head has not run yet, one row for each
    token. A matrix product has made each row from the rows of all layers. seen: features of the `num_seen` tokens after
    the tokens of `waiting`, with separate rows for each layer. Each pass of the target adds one entry to `seen`: a list
    with the features after each layer. num_run: the number of cache rows run with the target's features.
    """

    first: int = -1
    waiting: list[Any] = field(default_factory=list)
    seen: list[list[Any]] = field(default_factory=list)
    num_seen: int = 0
    num_run: int = 0

    @property
    def num_waiting(self) -> int:
        return sum(len(rows) for rows in self.waiting) + self.num_seen

    @property
    def num_known(self) -> int:
        """The index after the last token with features."""
        return self.first + self.num_run + self.num_waiting


class EagleDrafter(SearchingDrafter):
    """A drafter that runs a head ahead of the target, batched over sequences."""

    drafts_behind = False  # the head reads the target's rows of the committed tokens

    def __init__(self, model: HeadModel, config: EagleConfig, ids: Ids, cache: KVCache, num_ids: int) -> None:
        self.model, self.hidden_layers = model, config.layers
        self._fed = None if config.norm_output else config.decoder.num_layers  # the tap with drafted tokens' features
        self.runner: Runner = Runner(model, cache, taps=() if self._fed is None else (self._fed,))
        self.tells_confidence = model.feeds_itself and self.runner.tells_confidence
        self.caught_up: dict[int, int] = {}
        self._num_ids = num_ids
        self._own_ids = ids
        self._ids = ids.tolist()
        self._texts: dict[int, _Text] = {}

    def begin(self, seq: Sequence) -> None:
        self.runner.cache.open(seq.id)
        self._texts[seq.id] = _Text()
        super().begin(seq)

    def end(self, seq: Sequence) -> None:
        super().end(seq)
        self._texts.pop(seq.id, None)
        self.runner.cache.release(seq.id)

    def free_tokens(self, without: Collection[int] = ()) -> int | None:
        return self.runner.cache.free_tokens(without)

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """Store the target's features of the tokens that were not rejected, and drop the last draft's cache rows."""
        for seq, view in zip(seqs, seen, strict=True):
            text = self._texts[seq.id]
            self.runner.cache.truncate_to(seq.id, text.num_run)
            if text.first < 0:
                text.first = view.start
            if view.start != text.num_known:
                raise InternalError(f"features of token {view.start} came, and token {text.num_known} was expected")
            if len(view.kept):
                text.seen.append([view.layer(k) for k in self.hidden_layers] or [view.hidden])
                text.num_seen += len(view.kept)
            if text.num_seen > ROUND_ROWS:
                # Joined features take less memory; joining every few rows would be wasted where nothing is drafted.
                self._join(text)

    def catch_up(self, seqs: Seq[Sequence], num_tokens: int) -> None:
        """Run the head on all waiting features except the last token's features, which the next round runs."""
        feeds: list[tuple[Sequence, int]] = []
        space = Space(self.runner.cache)
        self.caught_up, self.catchup_s = {}, 0.0
        started = self.clock()
        for seq in seqs:
            num = min(self._texts[seq.id].num_waiting - 1, num_tokens)
            num = space.take(seq.id, num) if num > 0 else 0
            if num > 0:
                feeds.append((seq, num))
                self.caught_up[seq.id] = num
                num_tokens -= num
        if feeds:
            self._feed(feeds, "none")
            self.catchup_s = self.clock() - started

    def own_draft(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        behind = [seq for b, seq in enumerate(seqs) if budget.num_tokens[b] and self.num_unread(seq) > ROUND_ROWS]
        self.catch_up(behind, budget.catchup_tokens)
        limits = self._limits(seqs, budget)
        fed = [b for b in range(len(seqs)) if limits[b] > 0]
        is_greedy = all(self._takes_the_best(seqs[b], budget.reads_logits) for b in fed)
        if is_greedy and self.model.feeds_itself and not budget.stops_early:
            return self._run_ahead(seqs, fed, limits, budget)
        reads_logits = budget.reads_logits or bool(budget.stops)
        chains = [Chain() for _ in seqs]
        rows = self._feed([(seqs[b], self.num_unread(seqs[b])) for b in fed], "last", reads_logits)
        state = dict(zip(fed, rows, strict=True))
        depth = 0
        while state:
            grown = [b for b, (row, _) in state.items() if self._grow(chains[b], row, seqs[b], b, budget, coins[b])]
            depth += 1
            going = [b for b in grown if depth < limits[b]]
            feeds = [(seqs[b], chains[b].tokens[-1], state[b][1]) for b in going]
            rows = self._step(feeds, reads_logits)
            state = dict(zip(going, rows, strict=True))
        return Draft.chains([c.tokens for c in chains], [c.probs for c in chains])

    def _join(self, text: _Text) -> None:
        if text.seen:
            text.waiting = [*text.waiting, self.model.features(self._by_layer(text.seen))]
            text.seen = []
            text.num_seen = 0

    def num_unread(self, seq: Sequence) -> int:
        return self._texts[seq.id].num_waiting

    def _limits(self, seqs: Seq[Sequence], budget: Budget) -> list[int]:
        """Return how many tokens to draft for each sequence, limited by the head's positions and the room in its cache.

        The number is 0 if features are missing, or if more features are waiting than one round may run.
        """
        space, limits = Space(self.runner.cache), list[int]()
        for b, seq in enumerate(seqs):
            text = self._texts[seq.id]
            waits = text.num_waiting
            positions = self.model.config.max_positions - text.num_run - waits
            limit = min(budget.num_tokens[b], positions + 1)
            if limit <= 0 or not 0 < waits <= ROUND_ROWS or text.num_known != len(seq.tokens) - 1:
                limits.append(0)
                continue
            limits.append(max(0, space.take(seq.id, waits + limit - 1) - waits + 1))
        return limits

    def _feed(self, feeds: Seq[tuple[Sequence, int]], wanted: str, reads_logits: bool = False) -> list[tuple[Row, Any]]:
        """Run the head on the first waiting features of each sequence. Each feature is joined with the token after it.

        The cache rows are kept. feeds: each sequence, and the number of its features to run. wanted: as in Run.logits.
        Returns the result of `_last`; [] with wanted="none". reads_logits: whether pacing reads the logits, so that the
        id of the largest logit is not enough.
        """
        if not feeds:
            return []
        runs = [self._take(seq, num, wanted, self._takes_the_best(seq, reads_logits)) for seq, num in feeds]
        scores = self.runner.forward(runs)
        self.runner.cache.keep({run.slot: range(len(run.tokens)) for run in runs})
        if wanted == "none":
            return []
        return self._last(scores)

    def _run_ahead(self, seqs: Seq[Sequence], fed: Seq[int], limits: Seq[int], budget: Budget) -> Draft:
        """Draft the likeliest tokens of all sequences in one call. The loop in `own_draft` drafts the same tokens.

        fed: the indices of the sequences that draft. limits: for each sequence, the number of tokens to draft.
        """
        lengths = [limits[b] for b in fed]
        stops = [budget.stops.get(b) or Stop.never(limits[b]) for b in fed] if budget.stops else ()
        if fed and not any(self._texts[seqs[b].id].waiting for b in fed):
            layer_rows = self._by_layer([rows for b in fed for rows in self._texts[seqs[b].id].seen])
            runs = [self._take_seen(seqs[b]) for b in fed]
            ahead = self.runner.run_ahead(runs, lengths, stops, layer_rows)
        else:
            runs = [self._take(seqs[b], self.num_unread(seqs[b]), "last", True) for b in fed]
            ahead = self.runner.run_ahead(runs, lengths, stops)
        for stop, confidences in zip(stops, ahead.confidences, strict=False):
            stop.confidences += confidences
        self.runner.cache.keep({run.slot: range(len(run.tokens)) for run in runs})  # and no rows of drafted tokens
        chains: list[list[int]] = [[] for _ in seqs]
        for b, guessed in zip(fed, ahead.ids, strict=True):
            chains[b] = [self._ids[i] for i in guessed]
        return Draft.chains(chains, [[Probs.of_point(token) for token in chain] for chain in chains])

    def _take(self, seq: Sequence, num: int, wanted: str, best_only: bool) -> Run:
        """Remove the first `num` waiting features, and return a Run that joins each feature with its next token."""
        text = self._texts[seq.id]
        self._join(text)
        features = self.model.rows.join(text.waiting)
        at = text.first + text.num_run + 1
        text.waiting = [features[num:]] if num < len(features) else []
        text.num_run += num
        vectors = dict(enumerate(features[:num]))
        return Run(seq.id, seq.tokens[at : at + num], wanted, best_only=best_only, vectors=vectors)

    def _take_seen(self, seq: Sequence) -> Run:
        """Remove the features in `seen` (see `_Text`), and return a Run of the tokens after them.

        `waiting` must be empty.
        """
        text = self._texts[seq.id]
        at = text.first + text.num_run + 1
        text.num_run += text.num_seen
        text.seen = []
        text.num_seen = 0
        return Run(seq.id, seq.tokens[at : text.first + text.num_run + 1], "last", best_only=True)

    def _step(self, feeds: Seq[tuple[Sequence, int, Any]], reads_logits: bool) -> list[tuple[Row, Any]]:
        """Run the head on one drafted token of each sequence. feeds: sequence, token, and the head's last output.

        reads_logits: see `_feed`. Returns the result of `_last`.
        """
        if not feeds:
            return []
        runs = [
            Run(seq.id, [token], "last", best_only=self._takes_the_best(seq, reads_logits), vectors={0: row})
            for seq, token, row in feeds
        ]
        scores = self.runner.forward(runs)
        self.runner.cache.keep({seq.id: range(1) for seq, _, _ in feeds})
        return self._last(scores)

    def _last(self, scores: Scores) -> list[tuple[Row, Any]]:
        """Return, for the last row of each sequence's run, the prediction, and the output row that the next step reads.

        The prediction is the id of the largest logit if the run has `best_only`, else logits.
        """
        lasts = [best[-1] if best else logits[-1] for best, logits in zip(scores.best, scores.logits, strict=True)]
        fed = scores.hidden if self._fed is None else scores.taps[self._fed]
        return [(row, fed[rows[-1]]) for row, rows in zip(lasts, scores.rows, strict=True)]

    def _by_layer(self, seen: Seq[list[Any]]) -> list[Any]:
        """Join the target's features of several passes. Returns one array [n, H] for each layer."""
        return [self.model.rows.join(rows) for rows in zip(*seen, strict=True)]

    def _takes_the_best(self, seq: Sequence, reads_logits: bool) -> bool:
        """Return whether a draw needs only the id of the largest logit, and the runner can return this id alone.

        reads_logits: see `_feed`.
        """
        return self.runner.finds_best and not reads_logits and takes_the_best(seq.params, seq.bad_word_ids)

    def _grow(self, chain: Chain, row: Row, seq: Sequence, b: int, budget: Budget, coins: Coins) -> bool:
        """Draw one more token, unless pacing stops or masks leave no token. Returns whether a further token may follow.

        row: the head's logits, or the id of the largest logit. b: the sequence's index in `budget`. coins: the
        sequence's random numbers (see `Coins`).
        """
        following = next_of(row, seq, chain.tokens, self._ids, self._spread)
        return following is not None and chain.grow(*following, seq, b, budget, coins)

    def _spread(self, logits: Logits) -> Logits:
        """Return logits of all the target's ids, [num_ids]: the head's logits [n], and -inf for all other ids."""
        whole: Logits = np.full(self._num_ids, -np.inf, float_type(self.model))
        whole[self._own_ids] = logits
        return whole


def _own_config(path: str, tokenizer: str | None) -> EagleConfig:
    return EagleConfig.from_json(head_files.read_config(path, "eagle", tokenizer))


def needs(options: Options, target: Known) -> Needs:
    """Return the needs: the target's layers that the head reads, the spec of its own layers, and its weights' memory.

    Raises the errors of `build` for a folder that holds no head, or a head of another tokenizer.
    """
    path = head_files.located(options.path, "eagle")
    published = head_layouts.find(path, "eagle", target.config.ignored_config_keys)
    if published is None:
        config = _own_config(path, target.fingerprint)
        layers = config.layers
        rounded = _rounded(options, path, config, is_own=True, is_packed=target.is_packed)
    else:
        config = head_layouts.eagle_config(published)
        layers = head_layouts.eagle_layers(published, target.num_layers)
        rounded = _rounded(options, path, config, is_own=False, is_packed=target.is_packed)
    weights = head_files.own_weights(path, target, rounded, all_rows=False)
    return Needs(layers, makes=OwnModel(config=config.decoder), weights=weights)


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter from a head's folder.

    Raises the errors of shared/head_files.py and shared/head_layouts.py, and BadOption if the head's sizes do not fit
    the target's.
    """
    path = head_files.located(options.path, "eagle")
    published = head_layouts.find(path, "eagle", target.opened.config.ignored_config_keys)
    if published is not None:
        settings = head_layouts.eagle_config(published, target.model.config.cache_shape.num_layers)
        config, weights, ids = head_layouts.read_eagle(published, settings, target)
    else:
        config, weights, ids = _read_own(path, target)
    rounded = _rounded(options, path, config, is_own=published is None, is_packed=is_packed(target.model))
    is_whole = published is not None and len(ids) == target.num_ids
    model = make(config, weights, ids, target.model, rounded, lends_head=is_whole)
    drafter = EagleDrafter(model, config, ids, cache_of(model, target), target.num_ids)
    drafter.search_by(options.search, "eagle", target)
    return drafter


def cache_of(model: HeadModel, target: Target) -> KVCache:
    """Make a head's cache. It keeps all rows even with windows, because the target's hidden states come only once."""
    return cache_for(model, target, keeps_all=True, prefix_caching=False, kv_cache_dtype="auto")


def _rounded(options: Options, path: str, config: EagleConfig, *, is_own: bool, is_packed: bool) -> Quantization | None:
    """Return the format to which a head's weights are rounded; None = no rounding.

    is_own: whether `forerun train head` trained the head; False = others published the head. With `auto`, an own head
    has the format in which its file is quantised. Else it is rounded to 8 bits, because a pass reads all of its
    weights, and the head drafts as well with 8 bits as with 16. A published head keeps its weights, unless the target
    is packed (weights of 4 or 8 bits).
    """
    stored = head_files.stored_quantization(Path(path)) if is_own else None
    if options.quantization == "auto" and stored is not None:
        return stored
    shapes = {**input_shapes(config), **layer_shapes(config)}.values()
    return quantization_of(options.quantization, shapes, pays=is_own or is_packed)


def _read_own(path: str, target: Target) -> tuple[EagleConfig, dict[str, Any], Ids]:
    config = _own_config(path, artifacts.fingerprint(target.tokenizer, target.num_ids))
    width = target.model.config.hidden_size
    if config.decoder.hidden_size != width:
        raise BadOption(
            f"{shown(path)} reads rows of {config.decoder.hidden_size}, and the target has rows of {width}: "
            "name a head of this target"
        )
    shapes = {**input_shapes(config), **layer_shapes(config), "d2t": (config.decoder.vocab_size,)}
    weights = head_files.read_weights(path, shapes, target.model, target.num_ids)
    return config, weights, head_files.draft_ids(path, weights.pop("d2t"), target.num_ids)
