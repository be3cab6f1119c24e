"""EAGLE: one decoder layer that reads hidden states of the target and runs ahead of it (Li et al., arXiv 2503.01840).

Row i pairs what the target has computed for token i, its residual stream behind a few layers joined by one product,
with the embedding of token i+1, and guesses token i+2. Where the target has not been, the row's own output of the step
before stands for the features. After a round these rows are dropped, and the accepted tokens are run with the target's
features (`forerun train head --method eagle` makes a head).

As in EAGLE-3 the features come from several layers, and the head learns on its own outputs. Unlike there, one product
makes the layer's input of embedding and features, as in EAGLE-1, so that the layer is one of any decoder: it can begin
as the target's last one, and native operators run it in one call. Its LM head are rows of the target's: only the ids
that the target writes most often are drafted. A prefix that the target finds in its cache is not run again; the head
then begins behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from forerun.config import Quantization
from forerun.drafters import Drafter, OwnModel, Seen, Target, artifacts, head_files
from forerun.drafters.model import Chain, Row, Space, cache_for
from forerun.errors import BadOption, InternalError, UnsupportedModel, shown
from forerun.kv.cache import BlockCache
from forerun.models.layers import Decoder, DecoderConfig, parameter_shapes
from forerun.models.loading import read_config
from forerun.models.runner import NO_NUMBERS, Model, Run, Runner, Scores
from forerun.models.saving import config_to_dict
from forerun.ops.quantised import QuantisedMatrix
from forerun.ops.quantising import quantise, scheme_of
from forerun.sampling import History, probs, takes_the_best
from forerun.types import Budget, Coins, Draft, Probs, RaggedBatch, Sequence

EMBEDDING = "model.embed_tokens.weight"  # of a decoder: here the LM head's rows, for nothing is looked up
SIDES = ("embedding_norm", "hidden_norm")
ROUND_ROWS = 32  # rows that a round may leave to run; more of them are catching up


@dataclass(frozen=True)
class Options:
    """Which head, and how it is kept in memory."""

    path: str | None = field(default=None, metadata={"help": "folder that `forerun train head --method eagle` made"})
    quantization: str = field(
        default="auto",
        metadata={"help": "int8 or int4[:group=N], none, or auto: int8 beside a target of 4 or 8 bits, else none"},
    )

    def __post_init__(self) -> None:
        if self.quantization not in ("auto", "none"):
            Quantization.parse(self.quantization)


@dataclass(frozen=True)
class EagleConfig:
    """The sizes of a head. decoder: its layer, as a decoder over the ids that it drafts, tied to its LM head.

    layers: behind which of the target's layers it reads.
    """

    decoder: DecoderConfig
    layers: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """For config.json; a layer id is that of the layer whose input is read, as published EAGLE-3 heads count."""
        own = {"architectures": ["ForerunEagle"], "eagle_aux_hidden_state_layer_ids": list(self.layers)}
        return {**config_to_dict(self.decoder), **own}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> EagleConfig:
        """Read what `to_json` wrote. Raises UnsupportedModel for what would be computed wrongly."""
        rest = dict(raw)
        layers = rest.pop("eagle_aux_hidden_state_layer_ids", None)
        if not isinstance(layers, list) or not layers or not all(type(k) is int and k >= 0 for k in layers):
            raise UnsupportedModel(
                f"config.json has eagle_aux_hidden_state_layer_ids={shown(str(layers))}: it must list layers"
            )
        config = cls(read_config(rest), tuple(layers))
        if config.decoder.num_layers != 1:
            raise UnsupportedModel(f"config.json has num_hidden_layers={config.decoder.num_layers}: a head has 1")
        return config


def input_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the weights before the layer.

    fc_norm: of each of the target's rows, before `fc` joins them. embedding_norm, hidden_norm: of what `input` joins.
    """
    h, num = config.decoder.hidden_size, len(config.layers)
    norms = {f"{name}.weight": (h,) for name in (*(f"fc_norm.{i}" for i in range(num)), *SIDES)}
    return {**norms, "fc.weight": (h, h * num), "input.weight": (h, 2 * h)}


def layer_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the weights of the layer and of the norm behind it."""
    return {name: shape for name, shape in parameter_shapes(config.decoder).items() if name != EMBEDDING}


class EagleModel:
    """A head as a model that Runner runs: a token's row is its embedding beside the features given in its place.

    The batch's tokens are the target's ids. `forward` returns the rows behind the final norm, and the residual stream
    as the tap behind its one layer: what the next step takes for features. ids [n]: the target's ids of its own.
    """

    def __init__(
        self, config: EagleConfig, weights: Mapping[str, Tensor], ids: Tensor, target: Model, quantization: str
    ) -> None:
        self.head_config, self.config, self.ids, self._target = config, config.decoder, ids, target
        self.device, self.ops, self.cache_dtype = target.device, target.ops, target.cache_dtype
        self.weight_dtype, self.activation_dtype = target.weight_dtype, target.activation_dtype
        own = {name: weight.to(self.device, self.weight_dtype) for name, weight in weights.items()}
        rounded = None if quantization == "none" else Quantization.parse(quantization)
        self._norms = {n: w.to(self.activation_dtype) for n, w in own.items() if w.ndim == 1}
        self._fc, self._input = (self._matrix(own[f"{name}.weight"], rounded) for name in ("fc", "input"))
        rows = target.head(ids.tolist()).to(self.weight_dtype)
        layer = Decoder(config.decoder, {EMBEDDING: rows, **{n: own[n] for n in layer_shapes(config)}}, self.ops)
        self.layer = layer if rounded is None else layer.rounded(rounded)
        self.compiled = self.layer.compiled

    @property
    def bytes_per_pass(self) -> int:
        """Bytes that a pass reads, about: the weights of its layer."""
        return self.layer.bytes_per_pass

    def joined(self, features: Seq[Tensor]) -> Tensor:
        """The target's rows [n, H] behind each of the layers, as features of the head [n, H]."""
        parts = []
        for i, rows in enumerate(features):
            rows = rows.to(self.activation_dtype).clamp(-head_files.LARGEST, head_files.LARGEST)
            parts.append(self._normed(rows, f"fc_norm.{i}"))
        return self.ops.linear(torch.cat(parts, -1), self._fc)

    def forward(
        self,
        batch: RaggedBatch,
        cache: BlockCache,
        layers: Seq[int] | None = None,
        hidden: Tensor | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """hidden [T, H]: features of each row; None = zeros."""
        tokens = batch.ids()[0]
        features = self.embed(tokens) if hidden is None else hidden.to(self.activation_dtype)
        embedded = self._target.embed(tokens).to(self.activation_dtype)
        sides = self._normed(embedded, SIDES[0]), self._normed(features, SIDES[1])
        x = self.ops.linear(torch.cat(sides, -1), self._input)
        return self.layer.forward(replace(batch, tokens=[0] * len(tokens)), cache, None, x, taps)

    def rounded(self, quantization: Quantization) -> Model:
        """A head is rounded when it is made."""
        raise InternalError("a head is no target, and has no rounded copy")

    def embed(self, ids: Seq[int]) -> Tensor:
        """Rows without features [n, H]: zeros."""
        return torch.zeros(len(ids), self.config.hidden_size, dtype=self.activation_dtype, device=self.device)

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of rows [R, H]."""
        return self.layer.norm(hidden)

    def head(self, ids: Seq[int]) -> Tensor:
        """Rows of its LM head, by its own ids, float32 [n, H]."""
        return self.layer.head(ids)

    def logits(self, hidden: Tensor, num_ids: int | None = None) -> Tensor:
        """hidden [R, H] -> logits of its own ids [R, n]."""
        return self.layer.logits(hidden, num_ids)

    def best(self, hidden: Tensor, rows: list[int], num_ids: int) -> tuple[list[int], list[float]]:
        """Its own id and value of the largest logit of each of these rows; only with native operators."""
        return self.layer.best(hidden, rows, num_ids)

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        return self.ops.rms_norm(rows, self._norms[f"{name}.weight"], self.config.norm_eps)

    def _matrix(self, weight: Tensor, rounded: Quantization | None) -> Any:
        """A matrix as the operators take it."""
        if rounded is None:
            return cast(Any, self.ops).pack(weight) if self.ops.packs else weight
        if weight.shape[1] % rounded.group:
            raise BadOption(
                f"quantization={str(rounded)!r} is not possible: the head has rows of {weight.shape[1]} weights; "
                "choose a group that divides them, or none"
            )
        scheme = scheme_of(rounded.bits, rounded.group)
        if self.ops.packs:
            shape = weight.shape[0], weight.shape[1]
            return cast(Any, self.ops).pack(QuantisedMatrix(scheme, shape, lambda: iter([quantise(weight, scheme)])))
        return quantise(weight, scheme).dequantise().to(weight.dtype)


@dataclass
class _Text:
    """What the head knows of one sequence.

    first: index of the token whose features come first. waiting: joined features that were not run yet. num_run: rows
    in the cache with true features.
    """

    first: int = -1
    waiting: list[Tensor] = field(default_factory=list)
    num_run: int = 0

    @property
    def num_waiting(self) -> int:
        return sum(len(rows) for rows in self.waiting)

    @property
    def num_known(self) -> int:
        """Tokens behind the last one with features."""
        return self.first + self.num_run + self.num_waiting


class EagleDrafter(Drafter):
    """Runs a head ahead of the target, batched over sequences."""

    def __init__(self, model: EagleModel, cache: BlockCache, num_ids: int) -> None:
        self.model, self.hidden_layers = model, model.head_config.layers
        self.runner: Runner = Runner(cast(Model, model), cache, taps=(1,))
        self.caught_up: dict[int, int] = {}
        self._num_ids = num_ids
        self._ids = model.ids.tolist()
        self._texts: dict[int, _Text] = {}

    def begin(self, seq: Sequence) -> None:
        self.runner.cache.open(seq.id)
        self._texts[seq.id] = _Text()

    def end(self, seq: Sequence) -> None:
        self._texts.pop(seq.id, None)
        self.runner.cache.release(seq.id)

    def free_tokens(self, without: Collection[int] = ()) -> int | None:
        return self.runner.cache.free_tokens(without)

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        """Take the features of what was kept, and drop the rows of the last draft."""
        for seq, own in zip(seqs, seen, strict=True):
            text = self._texts[seq.id]
            self.runner.cache.truncate_to(seq.id, text.num_run)
            if text.first < 0:
                text.first = own.start
            if own.start != text.num_known:
                raise InternalError(f"features of token {own.start} came where those of {text.num_known} were to come")
            if len(own.kept):
                text.waiting.append(self.model.joined([own.layer(k) for k in self.hidden_layers]))

    def catch_up(self, seqs: Seq[Sequence], num_tokens: int) -> None:
        """Run features that wait, but for those that a round may run."""
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

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        behind = [seq for b, seq in enumerate(seqs) if budget.num_tokens[b] and self._waits(seq) > ROUND_ROWS]
        self.catch_up(behind, budget.catchup_tokens)
        limits = self._limits(seqs, budget)
        chains = [Chain() for _ in seqs]
        fed = [b for b in range(len(seqs)) if limits[b] > 0]
        rows = self._feed([(seqs[b], self._waits(seqs[b])) for b in fed], "last", budget.reads_logits)
        state = dict(zip(fed, rows, strict=True))
        depth = 0
        while state:
            grown = [b for b, (row, _) in state.items() if self._grow(chains[b], row, seqs[b], b, budget, coins[b])]
            depth += 1
            going = [b for b in grown if depth < limits[b]]
            feeds = [(seqs[b], chains[b].tokens[-1], state[b][1]) for b in going]
            rows = self._step(feeds, budget.reads_logits)
            state = dict(zip(going, rows, strict=True))
        return Draft.chains([c.tokens for c in chains], [c.probs for c in chains])

    def _waits(self, seq: Sequence) -> int:
        return self._texts[seq.id].num_waiting

    def _limits(self, seqs: Seq[Sequence], budget: Budget) -> list[int]:
        """How many tokens to draft for each sequence, within positions and room; 0 where features are missing."""
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

    def _feed(
        self, feeds: Seq[tuple[Sequence, int]], wanted: str, reads_logits: bool = False
    ) -> list[tuple[Row, Tensor]]:
        """Run the first waiting features of sequences, each with the token behind it, and keep the rows.

        Returns what follows the last row of each, and its output, if wanted="last".
        """
        if not feeds:
            return []
        runs = []
        for seq, num in feeds:
            text = self._texts[seq.id]
            features = text.waiting[0] if len(text.waiting) == 1 else torch.cat(text.waiting)
            at = text.first + text.num_run + 1
            vectors = dict(enumerate(features[:num]))
            best_only = self._takes_the_best(seq, reads_logits)
            runs.append(Run(seq.id, seq.tokens[at : at + num], wanted, best_only=best_only, vectors=vectors))
            text.waiting = [features[num:]] if num < len(features) else []
            text.num_run += num
        scores = self.runner.forward(runs)
        self.runner.cache.keep({run.slot: range(len(run.tokens)) for run in runs})
        if wanted == "none":
            return []
        return _last(scores)

    def _step(self, feeds: Seq[tuple[Sequence, int, Tensor]], reads_logits: bool) -> list[tuple[Row, Tensor]]:
        """Run one drafted token of each sequence with the output of the step before."""
        if not feeds:
            return []
        runs = [
            Run(seq.id, [token], "last", best_only=self._takes_the_best(seq, reads_logits), vectors={0: row})
            for seq, token, row in feeds
        ]
        scores = self.runner.forward(runs)
        self.runner.cache.keep({seq.id: range(1) for seq, _, _ in feeds})
        return _last(scores)

    def _takes_the_best(self, seq: Sequence, reads_logits: bool) -> bool:
        """Whether the largest logit is all that a draw needs, and can be had alone."""
        return self.runner.finds_best and not reads_logits and takes_the_best(seq.params, seq.bad_word_ids)

    def _grow(self, chain: Chain, row: Row, seq: Sequence, b: int, budget: Budget, coins: Coins) -> bool:
        """Draw one more token, unless the pacing policy stops here or masks leave none; whether more may follow."""
        depth, whole = len(chain.tokens), None
        if isinstance(row, int):
            if row == NO_NUMBERS:
                return False
            law = Probs.of_point(self._ids[row])
        else:
            if not bool(row.max().isfinite()):
                return False
            whole = self._spread(row)
            try:
                law = probs(whole, replace(seq.params, logprobs=None), History.of(seq, chain.tokens))
            except BadOption:
                return False
        if not budget.go_on(b, depth, law, whole):
            return False
        token = (coins.pick if seq.acceptance == "match" else coins.draft)(law, depth)
        chain.tokens.append(token)
        chain.probs.append(law)
        return budget.go_behind(b, depth, token, law, whole)

    def _spread(self, logits: Tensor) -> Tensor:
        """Logits of its own ids [n] as logits of the target's [num_ids], -inf elsewhere."""
        whole = torch.full((self._num_ids,), -torch.inf, dtype=logits.dtype)
        whole[self.model.ids] = logits.cpu()
        return whole


def _last(scores: Scores) -> list[tuple[Row, Tensor]]:
    """What follows the last row of each run, and the output of that row."""
    found = [best[-1] if best else logits[-1] for best, logits in zip(scores.best, scores.logits, strict=True)]
    return [(row, scores.taps[1][rows[-1]]) for row, rows in zip(found, scores.rows, strict=True)]


def _config(options: Options, tokenizer: str | None) -> EagleConfig:
    if options.path is None:
        raise BadOption(
            "eagle needs a head: make one with `forerun train head --method eagle --target TARGET --out FOLDER`, then "
            "write eagle:path=FOLDER/head"
        )
    return EagleConfig.from_json(head_files.read_config(options.path, "eagle", tokenizer))


def check(options: Options, tokenizer: Any, ignore_config_keys: frozenset[str]) -> None:
    """Refuse a folder that is no head, or one of another tokenizer, before any weight is read."""
    _config(options, artifacts.fingerprint(tokenizer, tokenizer.num_ids))


def hidden_layers(options: Options) -> tuple[int, ...]:
    """Return the target's layers behind which the head reads."""
    return _config(options, None).layers if options.path is not None else ()


def own_model(options: Options, num_layers: int) -> OwnModel:
    """Return what the memory plan counts: a cache of one layer; its weights are small beside the target's."""
    return OwnModel(num_layers=1)


def build(options: Options, target: Target) -> Drafter:
    """Read a head. Raises what head_files.py raises, and BadOption for a target of another shape."""
    config = _config(options, artifacts.fingerprint(target.tokenizer, target.num_ids))
    assert options.path is not None
    width = target.model.config.hidden_size
    if config.decoder.hidden_size != width:
        raise BadOption(
            f"{shown(options.path)} reads rows of {config.decoder.hidden_size}, and the target has rows of {width}: "
            "name a head of this target"
        )
    shapes = {**input_shapes(config), **layer_shapes(config), "d2t": (config.decoder.vocab_size,)}
    weights = head_files.read_weights(options.path, shapes, target.model, target.num_ids)
    ids = head_files.draft_ids(options.path, weights.pop("d2t"), target.num_ids)
    quantization = options.quantization
    if quantization == "auto":
        quantization = "int8" if getattr(target.model, "weight_bits", ()) else "none"
    model = EagleModel(config, weights, ids, target.model, quantization)
    return EagleDrafter(model, cache_for(cast(Model, model), replace(target, prefix_caching=False)), target.num_ids)
