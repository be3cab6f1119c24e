"""DFlash: a few small layers that guess a whole block of tokens in one pass (Chen et al. 2026, arXiv 2602.06036).

The rows of a block are the last committed token and masks. Each row sees the whole block and the context: what the
target has computed for the tokens before, its residual stream behind a few layers joined by one product. Keys and
values of the context are kept for each committed token. So K tokens cost one pass where a draft model takes K. What
row i says does not depend on the tokens drafted before it: its distribution is stated as it is, which every rule for
chains judges exactly. Embedding and LM head are the target's; a head of `forerun train head --method dflash` reads the
rows of the LM head of the ids that the target writes most often. A prefix that the target finds in its cache is not run
again; the context then begins behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from forerun.config import Quantization
from forerun.drafters import Drafter, Known, Needs, OwnModel, Seen, Target, artifacts, head_files
from forerun.drafters.chains import draw_chains
from forerun.drafters.dflash_model import ContextModel, DFlashConfig, make, shapes
from forerun.drafters.head_matrices import is_packed, quantization_of
from forerun.drafters.model import Space, cache_for, next_of
from forerun.errors import BadOption, InternalError, shown
from forerun.kv.cache import BlockCache
from forerun.models.runner import Run, Runner, float_type, pack
from forerun.sampling import takes_the_best
from forerun.sampling.arithmetic import Row as Logits
from forerun.sampling.largest import Ids, Rows, best
from forerun.types import Budget, Coins, Draft, Probs, Sequence

MOST_WAITING = 32  # tokens whose features wait for the next draft; more of them are remembered at once


@dataclass(frozen=True)
class Options:
    """Which layers, and how they are kept in memory."""

    path: str | None = field(default=None, metadata={"help": head_files.path_help("dflash")})
    quantization: str = field(
        default="auto",
        metadata={"help": "int8 or int4[:group=N], none, or auto: int8 beside a target of 4 or 8 bits, else none"},
    )

    def __post_init__(self) -> None:
        if self.quantization not in ("auto", "none"):
            Quantization.parse(self.quantization)


@dataclass
class _Text:
    """What is known of one sequence.

    first: index of the token whose features come first. num_kept: tokens whose keys and values are in the cache.
    waiting: features of the tokens behind them, each as the target's rows behind its layers. is_over: it went past the
    positions, and nothing more is kept.
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
        """Tokens up to the last one with features, that one included."""
        return self.first + self.num_kept + self.num_waiting


class DFlashDrafter(Drafter):
    """Guesses blocks, batched over sequences."""

    drafts_behind = False  # it reads the target's rows of the committed tokens

    def __init__(self, model: ContextModel, config: DFlashConfig, ids: Ids, cache: BlockCache, num_ids: int) -> None:
        self.model, self.config, self.cache, self.hidden_layers = model, config, cache, config.layers
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
        """Take the features of what was kept."""
        for seq, own in zip(seqs, seen, strict=True):
            text = self._texts[seq.id]
            if text.is_over:
                continue
            if text.first < 0:
                text.first = own.start
            if own.start != text.num_known:
                raise InternalError(f"features of token {own.start} came where those of {text.num_known} were to come")
            if len(own.kept):
                text.waiting.append([own.layer(k) for k in self.hidden_layers])
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
        guesses = {seq.id: _Guess(own, self._ids, self._num_ids) for seq, own in zip(ready, logits, strict=True)}
        return draw_chains(
            seqs,
            budget,
            coins,
            lambda seq, drafted: guesses[seq.id].distribution(seq, drafted) if seq.id in guesses else None,
            lambda seq, depth: guesses[seq.id].whole(depth) if budget.reads_logits else None,
        )

    def _guess(self, seqs: Seq[Sequence], most: int) -> Any:
        """Logits of `most` tokens that follow each text, one text behind the other, of a block behind its context."""
        block, masks = self.config.block, [self.config.mask_id] * (self.config.block - 1)
        scores = self._runner.forward([Run(seq.id, [seq.tokens[-1], *masks], "none") for seq in seqs])
        for seq in seqs:  # the block's own rows are of no use any more
            self.cache.truncate_to(seq.id, self._texts[seq.id].num_kept)
        rows = [block * b + i for b in range(len(seqs)) for i in range(1, most + 1)]
        return self.model.logits(self.model.rows.take(scores.hidden, rows))[:, : len(self._ids)]

    def _is_ready(self, seq: Sequence) -> bool:
        """Whether the context of all tokens but the last is in the cache, and the block within the positions."""
        text, config = self._texts[seq.id], self.config
        is_whole = not text.waiting and not text.is_over and text.num_known == len(seq.tokens) - 1
        return is_whole and text.num_kept > 0 and text.num_kept + config.block <= config.decoder.max_positions

    def _remember(self, seqs: Seq[Sequence]) -> None:
        """Bring the features that wait into the cache, of those texts for which there is room and are positions."""
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
            text.num_kept, text.waiting = text.num_kept + text.num_waiting, []


@dataclass
class _Guess:
    """What a pass said of one sequence: logits [K, n] of the drafted ids [n], and by depth those of all ids."""

    logits: Rows
    ids: Ids
    num_ids: int
    spread: dict[int, Logits] = field(default_factory=dict)

    def distribution(self, seq: Sequence, drafted: Seq[int]) -> Probs | None:
        """The distribution of the token behind the drafted ones; None where none is left.

        It depends on them by penalties and masks alone.
        """
        depth = len(drafted)
        if depth >= len(self.logits) or not np.isfinite(self.logits[depth].max()):
            return None
        if takes_the_best(seq.params, seq.bad_word_ids):
            return Probs.of_point(int(self.ids[best(self.logits[depth : depth + 1])[0]]))
        found = next_of(self.whole(depth), seq, drafted)
        return None if found is None else found[0]

    def whole(self, depth: int) -> Logits:
        """Logits of all ids [num_ids], -inf where they are not drafted."""
        if depth not in self.spread:
            self.spread[depth] = np.full(self.num_ids, -np.inf, self.logits.dtype)
            self.spread[depth][self.ids] = self.logits[depth]
        return self.spread[depth]


def _config(path: str, tokenizer: str | None) -> DFlashConfig:
    raw = head_files.published_config(path, "dflash_config")
    raw = raw if raw is not None else head_files.published_config(path, "architectures")
    return DFlashConfig.from_json(raw or head_files.read_config(path, "dflash", tokenizer), path)


def needs(options: Options, target: Known) -> Needs:
    """Return the layers that it reads, the cache of its own, and what their weights take.

    Refuses a folder without such layers, or with those of another tokenizer.
    """
    path = head_files.located(options.path, "dflash")
    config = _config(path, target.fingerprint)
    rounded = quantization_of(options.quantization, shapes(config).values(), pays=target.is_packed)
    weights = head_files.own_weights(path, target, rounded, all_rows=False)
    return Needs(config.layers, makes=OwnModel(config=config.decoder), weights=weights)


def build(options: Options, target: Target) -> Drafter:
    """Read the layers. Raises what head_files.py raises, and BadOption for a target of another shape."""
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
    return DFlashDrafter(layers, config, ids, cast(BlockCache, cache), target.num_ids)
