"""EAGLE-3: one decoder layer that reads inner hidden states of the target and runs ahead of it (arXiv 2503.01840).

Row i pairs what the target has computed for token i, its residual stream behind a few layers joined by one product,
with the embedding of token i+1, and guesses token i+2. Where the target has not been, the row's own output of the step
before stands for the features. After a round these rows are dropped, and the accepted tokens are run with the target's
features (`forerun train head --method eagle` makes a head).

The layer reads the normed embedding and the normed features side by side, so its q, k and v have twice the width. Its
LM head are rows of the target's: only the ids that the target writes most often are drafted. A prefix that the target
finds in its cache is not run again; the head then begins behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from forerun.config import Quantization
from forerun.drafters import Drafter, OwnModel, Seen, Target, artifacts, head_files
from forerun.drafters.model import Chain, Space, cache_for
from forerun.errors import BadOption, InternalError, UnsupportedModel, shown
from forerun.kv.cache import BlockCache, CacheShape
from forerun.models.configs import flag, size
from forerun.models.layers import DecoderConfig, Rope
from forerun.models.llama import read_config
from forerun.models.runner import Model, Run, Runner
from forerun.models.saving import config_to_dict
from forerun.ops.quantised import QuantisedMatrix
from forerun.ops.quantising import quantise, scheme_of
from forerun.sampling import History, probs, takes_the_best
from forerun.types import Budget, Coins, Draft, Probs, RaggedBatch, Sequence

LAYER, ATTENTION = "midlayer.", "midlayer.self_attn."
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
    """The sizes of a head. decoder: those of its layer. layers: behind which of the target's layers it reads.

    has_fc_norm: whether each of these rows is normed before they are joined (EAGLE 3.1). vocab_size and hidden_size: of
    the head as a model, whose ids are those that it drafts.
    """

    decoder: DecoderConfig
    layers: tuple[int, ...]
    draft_vocab: int
    has_fc_norm: bool = True

    @property
    def vocab_size(self) -> int:
        return self.draft_vocab

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def max_positions(self) -> int:
        return self.decoder.max_positions

    @property
    def cache_shape(self) -> CacheShape:
        return self.decoder.cache_shape

    def to_json(self) -> dict[str, Any]:
        """As published heads have it; a layer id is that of the layer whose input is read."""
        own = {"draft_vocab_size": self.draft_vocab, "eagle_aux_hidden_state_layer_ids": list(self.layers)}
        own["fc_norm"] = self.has_fc_norm
        return {**config_to_dict(self.decoder), "architectures": ["LlamaForCausalLMEagle3"], **own}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> EagleConfig:
        """Read what `to_json` wrote. Raises UnsupportedModel for what would be computed wrongly."""
        rest = dict(raw)
        layers, draft_vocab = rest.pop("eagle_aux_hidden_state_layer_ids", None), size(rest, "draft_vocab_size")
        has_fc_norm = flag(rest, "fc_norm")
        for key in ("draft_vocab_size", "fc_norm"):
            rest.pop(key, None)
        if not isinstance(layers, list) or not layers or not all(type(k) is int and k >= 0 for k in layers):
            raise UnsupportedModel(
                f"config.json has eagle_aux_hidden_state_layer_ids={shown(str(layers))}: it must list layers"
            )
        return cls(read_config(rest), tuple(layers), draft_vocab, has_fc_norm)


def parameter_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every trained weight, under the names of published heads."""
    c = config.decoder
    h, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, h * len(config.layers)), "norm.weight": (h,)}
    shapes |= {f"fc_norm.{i}.weight": (h,) for i in range(len(config.layers) * config.has_fc_norm)}
    shapes |= {f"{LAYER}{name}.weight": (h,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    shapes |= {f"{ATTENTION}{name}_proj.weight": (rows, 2 * h) for name, rows in (("q", q), ("k", kv), ("v", kv))}
    shapes |= {f"{ATTENTION}o_proj.weight": (h, q), f"{LAYER}mlp.down_proj.weight": (h, c.ffn_size)}
    return shapes | {f"{LAYER}mlp.{name}_proj.weight": (c.ffn_size, h) for name in ("gate", "up")}


class EagleModel:
    """A head as a model that Runner runs: a token's row is its embedding beside the features given in its place.

    `forward` returns the rows behind the final norm, and the residual stream as the tap behind its one layer: what the
    next step takes for features. ids [n]: the target's ids of its own.
    """

    def __init__(
        self, config: EagleConfig, weights: Mapping[str, Tensor], ids: Tensor, target: Model, quantization: str
    ) -> None:
        self.config, self.ids, self._target = config, ids, target
        self.device, self.ops = target.device, target.ops
        self.weight_dtype, self.activation_dtype = target.weight_dtype, target.activation_dtype
        self.cache_dtype, self._quantization = target.cache_dtype, quantization
        self._eps = config.decoder.norm_eps
        own = {name: weight.to(self.device, self.weight_dtype) for name, weight in weights.items()}
        self._norms = {n: w.to(self.activation_dtype) for n, w in own.items() if w.ndim == 1}
        self._fc = self._matrix(own["fc.weight"])
        self._qkv = self._matrix(torch.cat([own[f"{ATTENTION}{name}_proj.weight"] for name in "qkv"]))
        self._o = self._matrix(own[f"{ATTENTION}o_proj.weight"])
        self._down = self._matrix(own[f"{LAYER}mlp.down_proj.weight"])
        self._gate_up = self._matrix(own[f"{LAYER}mlp.gate_proj.weight"], own[f"{LAYER}mlp.up_proj.weight"])
        self._head = self._matrix(target.head(ids.tolist()).to(self.weight_dtype))
        self._rope = Rope(config.decoder.rope, config.decoder.head_dim, self.device, self.activation_dtype)

    @property
    def bytes_per_pass(self) -> int:
        """Bytes that a pass reads, about: its weights."""
        parts = (self._qkv, self._o, self._down, self._gate_up, self._head)
        return sum(int(part.nbytes) for part in parts)

    def joined(self, features: Tensor) -> Tensor:
        """The target's features [n, layers * H] as rows for the layer [n, H]."""
        rows = features.to(self.activation_dtype).clamp(-head_files.LARGEST, head_files.LARGEST)
        if self.config.has_fc_norm:
            parts = torch.split(rows, self.config.hidden_size, -1)
            norms = [self._norms[f"fc_norm.{i}.weight"] for i in range(len(parts))]
            normed = [self.ops.rms_norm(part, norm, self._eps) for part, norm in zip(parts, norms, strict=True)]
            rows = torch.cat(normed, -1)
        return self.ops.linear(rows, self._fc)

    def forward(
        self,
        batch: RaggedBatch,
        cache: BlockCache,
        layers: Seq[int] | None = None,
        hidden: Tensor | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """hidden [T, H]: features of each row; None = zeros. The batch's tokens are the target's ids."""
        c, ops, norms = self.config.decoder, self.ops, self._norms
        tokens, positions = batch.ids()
        num = len(tokens)
        x = self.embed(tokens) if hidden is None else hidden.to(self.activation_dtype)
        embedded = self._target.embed(tokens).to(self.activation_dtype)
        sides = (
            ops.rms_norm(embedded, norms[f"{LAYER}input_layernorm.weight"], c.norm_eps),
            ops.rms_norm(x, norms[f"{LAYER}hidden_norm.weight"], c.norm_eps),
        )
        sizes = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        q, k, v = torch.split_with_sizes(ops.linear(torch.cat(sides, -1), self._qkv), sizes, dim=-1)
        rotation = self._rope.at(torch.tensor(positions, device=self.device), max(positions, default=0) + 1)
        out = ops.attention(
            ops.rope(q.reshape(num, c.num_heads, c.head_dim), *rotation),
            ops.rope(k.reshape(num, c.num_kv_heads, c.head_dim), *rotation),
            v.reshape(num, c.num_kv_heads, c.head_dim),
            keys=cache.keys[0],
            values=cache.values[0],
            view=ops.plan(cache.view(batch)),
            window=None,
        )
        x = self._fed_forward(x, out.flatten(1))
        for behind, tap in (taps or {}).items():
            if behind != 1:
                raise InternalError(f"a head has one layer, and no tap {behind}")
            tap.copy_(x)
        return self.norm(x)

    def rounded(self, quantization: Quantization) -> Model:
        """A head is rounded when it is made."""
        raise InternalError("a head is no target, and has no rounded copy")

    def embed(self, ids: Seq[int]) -> Tensor:
        """Rows without features [n, H]: zeros."""
        return torch.zeros(len(ids), self.config.hidden_size, dtype=self.activation_dtype, device=self.device)

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of rows [R, H]."""
        return self.ops.rms_norm(hidden.to(self.activation_dtype), self._norms["norm.weight"], self._eps)

    def head(self, ids: Seq[int]) -> Tensor:
        """Rows of its LM head, by its own ids, float32 [n, H]."""
        return self._target.head(self.ids[list(ids)].tolist())

    def logits(self, hidden: Tensor, num_ids: int | None = None) -> Tensor:
        """hidden [R, H] -> logits of its own ids [R, draft_vocab]."""
        return self.ops.linear(hidden, self._head)[:, :num_ids]

    def _fed_forward(self, x: Tensor, attended: Tensor) -> Tensor:
        ops, norm = self.ops, self._norms[f"{LAYER}post_attention_layernorm.weight"]
        eps = self.config.decoder.norm_eps
        if ops.packs:
            native = cast(Any, ops)
            x = native.add_linear(x, attended, self._o)
            return cast(Tensor, native.add_gated(x, ops.rms_norm(x, norm, eps), self._gate_up, self._down))
        x = x + ops.linear(attended, self._o)
        gate, up = ops.linear(ops.rms_norm(x, norm, eps), self._gate_up).chunk(2, -1)
        return x + ops.linear(ops.silu_mul(gate, up), self._down)

    def _matrix(self, *parts: Tensor) -> Any:
        """A matrix as the operators take it; several parts: gate and up."""
        made: list[Tensor | QuantisedMatrix] = [self._rounded(part) for part in parts]
        if self.ops.packs:
            return cast(Any, self.ops).pack(made, paired=len(made) > 1)
        return torch.cat([cast(Tensor, part) for part in made])

    def _rounded(self, part: Tensor) -> Tensor | QuantisedMatrix:
        if self._quantization == "none":
            return part
        wanted = Quantization.parse(self._quantization)
        if part.shape[1] % wanted.group:
            raise BadOption(
                f"quantization={shown(self._quantization)} is not possible: the head has rows of {part.shape[1]} "
                "weights; choose a group that divides them, or none"
            )
        scheme = scheme_of(wanted.bits, wanted.group)
        if self.ops.packs:
            return QuantisedMatrix(scheme, (part.shape[0], part.shape[1]), lambda: iter([quantise(part, scheme)]))
        return quantise(part, scheme).dequantise().to(part.dtype)


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
        self.model, self.hidden_layers = model, model.config.layers
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
                rows = torch.cat([own.layer(k) for k in self.hidden_layers], -1)
                text.waiting.append(self.model.joined(rows))

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
        rows = self._feed([(seqs[b], self._waits(seqs[b])) for b in fed], "last")
        state = dict(zip(fed, rows, strict=True))
        depth = 0
        while state:
            grown = [
                b for b, (logits, _) in state.items() if self._grow(chains[b], logits, seqs[b], b, budget, coins[b])
            ]
            depth += 1
            going = [b for b in grown if depth < limits[b]]
            rows = self._step([(seqs[b], chains[b].tokens[-1], state[b][1]) for b in going])
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

    def _feed(self, feeds: Seq[tuple[Sequence, int]], wanted: str) -> list[tuple[Tensor, Tensor]]:
        """Run the first waiting features of sequences, each with the token behind it, and keep the rows.

        Returns the logits and the output of the last row of each, if wanted="last".
        """
        if not feeds:
            return []
        runs = []
        for seq, num in feeds:
            text = self._texts[seq.id]
            features = text.waiting[0] if len(text.waiting) == 1 else torch.cat(text.waiting)
            at = text.first + text.num_run + 1
            runs.append(Run(seq.id, seq.tokens[at : at + num], wanted, vectors=dict(enumerate(features[:num]))))
            text.waiting = [features[num:]] if num < len(features) else []
            text.num_run += num
        scores = self.runner.forward(runs)
        self.runner.cache.keep({run.slot: range(len(run.tokens)) for run in runs})
        if wanted == "none":
            return []
        return [(scores.logits[i][-1], scores.taps[1][rows[-1]]) for i, rows in enumerate(scores.rows)]

    def _step(self, feeds: Seq[tuple[Sequence, int, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Run one drafted token of each sequence with the output of the step before."""
        if not feeds:
            return []
        scores = self.runner.forward([Run(seq.id, [token], "last", vectors={0: row}) for seq, token, row in feeds])
        self.runner.cache.keep({seq.id: range(1) for seq, _, _ in feeds})
        return [(scores.logits[i][-1], scores.taps[1][rows[-1]]) for i, rows in enumerate(scores.rows)]

    def _grow(self, chain: Chain, logits: Tensor, seq: Sequence, b: int, budget: Budget, coins: Coins) -> bool:
        """Draw one more token, unless the pacing policy stops here or masks leave none; whether more may follow."""
        if not bool(logits.max().isfinite()):
            return False
        depth = len(chain.tokens)
        is_best = takes_the_best(seq.params, seq.bad_word_ids)
        whole = None if is_best and not budget.reads_logits else self._spread(logits)
        try:
            if is_best:
                law = Probs.of_point(self._ids[int(logits.argmax())])
            else:
                law = probs(cast(Tensor, whole), replace(seq.params, logprobs=None), History.of(seq, chain.tokens))
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
    if config.hidden_size != target.model.config.hidden_size:
        raise BadOption(
            f"{shown(options.path)} reads rows of {config.hidden_size}, and the target has rows of "
            f"{target.model.config.hidden_size}: name a head of this target"
        )
    shapes = {**parameter_shapes(config), "d2t": (config.draft_vocab,)}
    weights = head_files.read_weights(options.path, shapes, target.model, target.num_ids)
    ids = head_files.draft_ids(options.path, weights.pop("d2t"), target.num_ids)
    quantization = options.quantization
    if quantization == "auto":
        quantization = "int8" if getattr(target.model, "weight_bits", ()) else "none"
    model = EagleModel(config, weights, ids, target.model, quantization)
    return EagleDrafter(model, cache_for(cast(Model, model), replace(target, prefix_caching=False)), target.num_ids)
