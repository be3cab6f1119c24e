"""DFlash: a few small layers that guess a whole block of tokens in one pass (Chen et al. 2026, arXiv 2602.06036).

The rows of a block are the last committed token and masks. Each row attends to the whole block, and to a context: one
vector for each token before the block. To compute this vector, the target's residual streams of the token after several
layers are concatenated and multiplied by one matrix. The keys and values of the context are cached for each committed
token. So K tokens cost one pass, while an autoregressive draft model needs K passes. Row i does not depend on the
tokens drafted before it. Each token is drawn from exactly the distribution of its row, so every rule for chains is
exact. The layers use the target's embedding and LM head. Heads of `forerun train head` use only the LM head's rows of
the ids that the target emits most often. A prefix that the target finds in its KV cache is not run again, so the
context begins after that prefix.

With `shape=tree` the same pass drafts a tree (DDTree, Ringel and Romano 2026, arXiv 2604.12989, algorithm 1). All rows
are known before a token is drafted, so the value of any path is known, too: the product of the probabilities of its
tokens. A heap finds the paths with the largest values. With `draws=point`, as in the paper, and for greedy requests,
the tokens of these paths are point masses, which each rule for trees judges exactly. Otherwise siblings are drawn
without replacement. The r-th drawn sibling is then valued by its rank: its value uses the r-th largest probability,
whichever token was drawn. So the decision to draw a child depends on distributions and on tokens drawn before the
child, and never on the child's own token. Exactness requires this independence (docs/exactness.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np

from forerun.config import Quantization
from forerun.drafters import Drafter, Known, Needs, OwnModel, Seen, Target
from forerun.drafters.shared import artifacts, head_files
from forerun.drafters.shared.chain import next_of
from forerun.drafters.shared.chains import draw_chains
from forerun.drafters.shared.continuations import SHAPES, check_shape
from forerun.drafters.shared.dflash_model import ContextModel, DFlashConfig, make, shapes
from forerun.drafters.shared.draft_models import cache_for
from forerun.drafters.shared.feeding import Space
from forerun.drafters.shared.head_matrices import is_packed, quantization_of
from forerun.drafters.shared.siblings import children_of, distribution, kind_of, likeliest
from forerun.errors import BadOption, InternalError, shown
from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, Runner, float_type, pack
from forerun.registry import option
from forerun.sampling import History, only_filters, takes_the_best
from forerun.sampling.arithmetic import Row as Logits
from forerun.sampling.largest import Ids, Rows, best
from forerun.theory.trees import best_nodes
from forerun.types import Budget, Coins, Draft, Probs, Sequence

MOST_WAITING = 32  # features of so many tokens may wait for the next draft; more are written to the cache at once


@dataclass(frozen=True)
class Options:
    """The options: the folder of the layers, how their weights are kept in memory, and the shape of the drafts."""

    path: str | None = option(None, head_files.path_help("dflash"))
    quantization: str = option(
        "auto", "int8 or int4[:group=N], none, or auto: int8 beside a target of 4 or 8 bits, else none"
    )
    shape: str = option("path", "path = a token of each row, tree = the likeliest paths through the rows")
    draws: str = option("distinct", "of a tree's siblings: distinct or point")

    def __post_init__(self) -> None:
        if self.quantization not in ("auto", "none"):
            Quantization.parse(self.quantization)
        check_shape("dflash", self.shape)
        if self.draws not in ("distinct", "point"):
            raise BadOption(f"dflash:draws={shown(self.draws)} is not possible: distinct or point")
        if self.draws == "point" and self.shape != "tree":
            raise BadOption("dflash:draws=point is of siblings, which a path has not: add shape=tree")


@dataclass
class _Text:
    """The context of one sequence, which is computed from features: the target's residual streams of each token.

    first: the index of the first token with features. num_kept: the number of tokens, from `first` on, whose keys and
    values are in the cache. waiting: the features of the tokens after these `num_kept` tokens. Each pass of the target
    adds one entry: a list with the features after each layer. is_over: whether the sequence is longer than the model's
    positions allow, so that its context was dropped.
    """

    first: int = -1
    num_kept: int = 0
    waiting: list[list[Any]] = field(default_factory=list)
    is_over: bool = False

    @property
    def num_waiting(self) -> int:
        return sum(len(rows[0]) for rows in self.waiting)

    @property
    def num_known(self) -> int:
        """The index after the last token with features."""
        return self.first + self.num_kept + self.num_waiting


class DFlashDrafter(Drafter):
    """Drafts whole blocks with DFlash layers, batched over sequences."""

    drafts_behind = False  # the layers read the target's rows of the committed tokens

    def __init__(
        self, model: ContextModel, config: DFlashConfig, ids: Ids, cache: BlockCache, num_ids: int, options: Options
    ) -> None:
        self.model, self.config, self.cache, self.hidden_layers = model, config, cache, config.layers
        self.shape = SHAPES[options.shape]
        if self.shape == "tree":
            self.draws = options.draws
        self._runner = Runner(model, cache)
        self._ids, self._num_ids = ids, num_ids
        self._texts: dict[int, _Text] = {}

    def begin(self, seq: Sequence) -> None:
        self.cache.open(seq.id)
        self._texts[seq.id] = _Text()

    def end(self, seq: Sequence) -> None:
        self._texts.pop(seq.id, None)
        self.cache.release(seq.id)

    def free_tokens(self, without: Collection[int] = ()) -> int | None:
        return self.cache.free_tokens(without)

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """Store the target's residual streams of the tokens that were not rejected."""
        for seq, view in zip(seqs, seen, strict=True):
            text = self._texts[seq.id]
            if text.is_over:
                continue
            if text.first < 0:
                text.first = view.start
            if view.start != text.num_known:
                raise InternalError(f"features of token {view.start} came, and token {text.num_known} was expected")
            if len(view.kept):
                text.waiting.append([view.layer(k) for k in self.hidden_layers])
        self._remember([seq for seq in seqs if self._texts[seq.id].num_waiting > MOST_WAITING])

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        self._remember([seq for seq, num in zip(seqs, budget.num_tokens, strict=True) if num > 0])
        space, block = Space(self.cache), self.config.block
        ready = [seq for b, seq in enumerate(seqs) if budget.num_tokens[b] > 0 and self._is_ready(seq)]
        ready = [seq for seq in ready if space.take(seq.id, block) == block]
        if not ready:
            return Draft.empty(len(seqs))
        most = min(max(budget.num_tokens), block - 1)
        guessed = self.model.rows.to_host(self._guess(ready, most))
        self.model.wait()
        logits = guessed.astype(float_type(self.model), copy=False).reshape(len(ready), most, -1)
        guesses = {seq.id: Guess(row, self._ids, self._num_ids) for seq, row in zip(ready, logits, strict=True)}
        if self.shape == "tree":
            empty = Draft.empty(1)
            return Draft.joined(
                [
                    draw_tree(guesses[seq.id], seq, b, budget, coins[b], self.draws) if seq.id in guesses else empty
                    for b, seq in enumerate(seqs)
                ]
            )
        return draw_chains(
            seqs,
            budget,
            coins,
            lambda seq, drafted: guesses[seq.id].distribution(seq, drafted) if seq.id in guesses else None,
            lambda seq, depth: guesses[seq.id].whole(depth) if budget.reads_logits else None,
        )

    def _guess(self, seqs: Seq[Sequence], most: int) -> Any:
        """Run a block after each sequence's context, and return the logits of each sequence's next `most` tokens.

        The result is one array [len(seqs) * most, ids], sequence by sequence.
        """
        block, masks = self.config.block, [self.config.mask_id] * (self.config.block - 1)
        scores = self._runner.forward([Run(seq.id, [seq.tokens[-1], *masks], "none") for seq in seqs])
        for seq in seqs:  # the block's own cache rows are of no use any more
            self.cache.truncate_to(seq.id, self._texts[seq.id].num_kept)
        rows = [block * b + i for b in range(len(seqs)) for i in range(1, most + 1)]
        return self.model.logits(self.model.rows.take(scores.hidden, rows))[:, : len(self._ids)]

    def _is_ready(self, seq: Sequence) -> bool:
        """Return whether a block can run: the context of all tokens but the last is cached, and there are positions."""
        text, config = self._texts[seq.id], self.config
        is_whole = not text.waiting and not text.is_over and text.num_known == len(seq.tokens) - 1
        return is_whole and text.num_kept > 0 and text.num_kept + config.block <= config.decoder.max_positions

    def _remember(self, seqs: Seq[Sequence]) -> None:
        """Compute the keys and values of waiting features, and write them into the cache.

        If the cache has no room for all waiting features of a sequence, all of them keep waiting. A sequence that
        exceeds the model's positions loses its context.
        """
        space, feeds = Space(self.cache), list[_Text]()
        runs = list[Run]()
        for seq in seqs:
            text = self._texts[seq.id]
            num, end = text.num_waiting, text.num_kept + text.num_waiting
            if end > self.config.decoder.max_positions:
                self.cache.truncate_to(seq.id, 0)
                text.is_over, text.num_kept, text.waiting = True, 0, []
            if text.is_over or not num or space.take(seq.id, num) < num:
                continue
            feeds.append(text)
            runs.append(Run(seq.id, [0] * num, "none"))
        if not feeds:
            return
        for run in runs:
            self.cache.reserve(run.slot, len(run.tokens))
        taps = zip(*(rows for text in feeds for rows in text.waiting), strict=True)
        self.model.remember(pack(runs, self.cache), self.cache, [self.model.rows.join(rows) for rows in taps])
        self.cache.keep({run.slot: range(len(run.tokens)) for run in runs})
        for text in feeds:
            text.num_kept += text.num_waiting
            text.waiting = []


Child = tuple[int, Probs, float]  # a token, the distribution that goes with it, and the head's confidence in it


class Law(NamedTuple):
    """The distribution from which the children of a node are drawn.

    rates: by rank, the probability that is used as the value of the child with that rank, in descending order. points:
    the children, if all of them are chosen at once; () = the children are drawn one by one.
    """

    probs: Probs
    rates: Seq[float]
    points: Seq[Child]

    @staticmethod
    def of(probs: Probs, kind: str, most: int, depth: int, coins: Coins) -> Law:
        """Return the Law for drawing at most `most` children. kind: as `kind_of` in shared/siblings.py returns it.

        depth: the depth of the children. coins: the sequence's random numbers (see `Coins`).
        """
        if kind == "distinct" and probs.point is None:
            return Law(probs, [probs.at(token) for token in likeliest(probs, most)], ())
        points = list(children_of(probs, kind, most, depth, coins, 0))
        return Law(probs, [confidence for *_, confidence in points], points)

    def children(self, depth: int, coins: Coins, lane: int) -> Iterator[Child]:
        """Return an iterator over the children. Children that are not chosen already are drawn one by one, on demand.

        lane: the lane (see `Coins`) of the first child's random draw. depth: the depth of the children. coins: the
        sequence's random numbers.
        """
        num = len(self.rates)
        return iter(self.points) if self.points else children_of(self.probs, "distinct", num, depth, coins, lane)


@dataclass
class Guess:
    """The logits of one pass for the next K tokens of one sequence, and the distributions made from these logits.

    logits [K, n]: by depth, the logits of the ids that may be drafted. ids [n]: the ids that may be drafted. num_ids:
    the number of the target's ids. spread: by depth, the logits of all the target's ids, filled in by `whole`.
    """

    logits: Rows
    ids: Ids
    num_ids: int
    spread: dict[int, Logits] = field(default_factory=dict)
    laws: dict[int, Law | None] = field(default_factory=dict)  # by depth, where no path changes them

    def distribution(self, seq: Sequence, drafted: Seq[int]) -> Probs | None:
        """Return the distribution of the token after the tokens `drafted`; None if masks leave no token.

        Returns None also without finite logits at that depth. The tokens `drafted` affect only penalties and masks.
        """
        depth = len(drafted)
        if not self.has(depth):
            return None
        if takes_the_best(seq.params, seq.bad_word_ids):
            return Probs.of_point(int(self.ids[best(self.logits[depth : depth + 1])[0]]))
        following = next_of(self.whole(depth), seq, drafted)
        return None if following is None else following[0]

    def law(self, seq: Sequence, path: Seq[int], draws: str, most: int, coins: Coins) -> Law | None:
        """Return the Law for drawing at most `most` tokens after the drafted tokens `path`; None if no token is left.

        Without penalties and masks, all paths of the same length have the same Law. draws: the option that says how
        siblings are drawn. coins: the sequence's random numbers (see `Coins`).
        """
        depth, params = len(path), replace(seq.params, logprobs=None)
        if depth not in self.laws or not only_filters(params, seq.bad_word_ids):
            probs = distribution(self.whole(depth), params, History.of(seq, path), draws) if self.has(depth) else None
            self.laws[depth] = None if probs is None else Law.of(probs, kind_of(draws, params, seq), most, depth, coins)
        return self.laws[depth]

    def has(self, depth: int) -> bool:
        """Return whether the largest logit at a depth is finite."""
        return depth < len(self.logits) and bool(np.isfinite(self.logits[depth].max()))

    def whole(self, depth: int) -> Logits:
        """Return the logits of all the target's ids at a depth, [num_ids]; -inf for ids that are not drafted."""
        if depth not in self.spread:
            self.spread[depth] = np.full(self.num_ids, -np.inf, self.logits.dtype)
            self.spread[depth][self.ids] = self.logits[depth]
        return self.spread[depth]


def draw_tree(guess: Guess, seq: Sequence, b: int, budget: Budget, coins: Coins, draws: str) -> Draft:
    """Draft the paths with the largest values through the rows of a guess, best first. b: the index in `budget`.

    The value of a path is a product of probabilities. The factor of a token that was drawn as the r-th sibling is the
    r-th largest probability in its row. So values never rise with rank or depth. Therefore the heap of `best_nodes`
    yields the paths in order without computing all paths. draws: the option that says how siblings are drawn. coins:
    the sequence's random numbers (see `Coins`).
    """
    most = budget.num_tokens[b]
    tokens, parents, probs = list[int](), list[int](), list[Probs]()
    paths, laws = {-1: list[int]()}, dict[int, Law]()  # by node: the tokens down to it, and the law of its children
    children = dict[int, Iterator[Child]]()  # drawn one by one
    rates = dict[int, Seq[float]]()
    num_parents = Counter[int]()  # by depth: each parent gets its own lanes for its children

    def logits(depth: int) -> Logits | None:
        return guess.whole(depth) if budget.reads_logits else None

    def open_behind(node: int) -> None:
        depth = len(paths[node])
        law = guess.law(seq, paths[node], draws, most, coins)
        if law is not None and budget.go_on(b, depth, law.probs, logits(depth)):
            laws[node], rates[node] = law, law.rates
            children[node] = law.children(depth, coins, most * num_parents[depth])
            num_parents[depth] += 1

    open_behind(-1)
    for node, (parent, _, depth, _) in enumerate(islice(best_nodes(rates), most)):
        token, stated, _ = next(children[parent])
        tokens.append(token)
        parents.append(parent)
        probs.append(stated)
        paths[node] = [*paths[parent], token]
        goes_on = budget.go_behind(b, depth, token, laws[parent].probs, logits(depth))
        if goes_on and token not in seq.end_ids and node + 1 < most:
            open_behind(node)
    return Draft(tokens, parents, [0, len(tokens)], probs)


def _config(path: str, tokenizer: str | None) -> DFlashConfig:
    raw = head_files.published_config(path, "dflash_config")
    raw = raw if raw is not None else head_files.published_config(path, "architectures")
    return DFlashConfig.from_json(raw or head_files.read_config(path, "dflash", tokenizer), path)


def needs(options: Options, target: Known) -> Needs:
    """Return the needs: the target's layers that the drafter reads, the spec of its own layers, its weights' memory.

    Raises the errors of `build` for a folder without DFlash layers, or with layers for another tokenizer.
    """
    path = head_files.located(options.path, "dflash")
    config = _config(path, target.fingerprint)
    rounded = quantization_of(options.quantization, shapes(config).values(), pays=target.is_packed)
    weights = head_files.own_weights(path, target, rounded, all_rows=False)
    return Needs(config.layers, makes=OwnModel(config=config.decoder), weights=weights)


def build(options: Options, target: Target) -> Drafter:
    """Build the drafter from a folder. Raises the errors of shared/head_files.py, and BadOption for other sizes."""
    path = head_files.located(options.path, "dflash")
    config = _config(path, artifacts.fingerprint(target.tokenizer, target.num_ids))
    model = target.model
    if config.decoder.hidden_size != model.config.hidden_size:
        raise BadOption(
            f"{shown(path)} reads rows of {config.decoder.hidden_size}, and the target has rows of "
            f"{model.config.hidden_size}: name one of this target"
        )
    if config.mask_id >= model.config.vocab_size:
        raise BadOption(
            f"{shown(path)} has mask_token_id={config.mask_id}, and the target has {model.config.vocab_size} "
            "embeddings: name one of this target"
        )
    weights = head_files.read_weights(path, shapes(config), model, target.num_ids)
    ids = head_files.draft_ids(path, weights.pop("d2t", None), target.num_ids)
    rounded = quantization_of(options.quantization, shapes(config).values(), pays=is_packed(model))
    layers = make(config, weights, ids, model, rounded)
    cache = cache_for(layers, target, prefix_caching=False, kv_cache_dtype="auto")
    return DFlashDrafter(layers, config, ids, cast(BlockCache, cache), target.num_ids, options)
