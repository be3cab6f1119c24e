"""`forerun train seq2seq` trains a small T5 on examples of sources and targets, or from a larger one's soft labels.

The paper's pairs were T5 models (Leviathan et al. 2023, section 4); this makes some of the same kind. Their form is
that of T5 version 1.1: gated feed-forward parts, an LM head of its own, a bias by distance. The blocks that are trained
are those that serve. The result is a standard checkpoint folder, `model/` in the out folder.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from forerun.blocks import Spec, difference
from forerun.errors import BadOption, shown
from forerun.models import t5
from forerun.models.loading import load_checkpoint, read_config, read_raw_config, small_files
from forerun.models.saving import save_checkpoint
from forerun.ops.torch import TorchModel
from forerun.registry import REQUIRED, check_fields, inherited, option
from forerun.train import batches, examples, loop, losses
from forerun.train.config import LoopConfig, LossName, check_teacher
from forerun.train.examples import Example
from forerun.train.loop import autocast
from forerun.train.model import drawn_weights, read_weights
from forerun.train.ops import PairOps, run_pairs
from forerun.train.tokenizer import (
    END,
    PAD,
    copy_tokenizer,
    load_tokenizer,
    save_tokenizer,
    tokenizer_hash,
    train_pair_tokenizer,
)

PAD_ID, END_ID = 0, 1
TOKENIZER_EXAMPLES = 50_000  # of each folder, that a tokenizer is made of
POOL = 8192  # examples among which those of one length are found


@dataclass(frozen=True)
class PairShape:
    """The sizes of a T5 of version 1.1, in elements; each part of a layer has `num_heads` heads of `head_size`."""

    hidden_size: int = option(256, "width of the residual stream, elements", min=1)
    encoder_layers: int = option(3, "layers of the encoder", min=1)
    decoder_layers: int = option(6, "layers of the decoder", min=1)
    num_heads: int = option(4, "heads of each attention", flag="--heads", min=1)
    head_size: int = option(64, "elements of a head", min=1)
    ffn_size: int = option(512, "width of the feed-forward blocks, elements", min=1)
    vocab_size: int = option(2048, "token ids; at least 258 if a tokenizer is trained", min=1)

    def __post_init__(self) -> None:
        check_fields(self)

    @functools.cache  # noqa: B019
    def spec(self) -> Spec:
        """Return the shape as a list of blocks."""
        return t5.read(
            {
                "d_model": self.hidden_size,
                "num_layers": self.encoder_layers,
                "num_decoder_layers": self.decoder_layers,
                "num_heads": self.num_heads,
                "d_kv": self.head_size,
                "d_ff": self.ffn_size,
                "vocab_size": self.vocab_size,
                "feed_forward_proj": "gated-gelu",
                "tie_word_embeddings": False,
            }
        )


@dataclass(frozen=True, kw_only=True)
class PairConfig(LoopConfig):
    """One run of `forerun train seq2seq`."""

    shape: PairShape
    data: tuple[Path, ...] = option(
        REQUIRED, "folder of `train examples`; one that is named twice is seen twice as often"
    )
    steps: int = inherited(LoopConfig, "steps", 4000)
    tokens_per_step: int = inherited(
        LoopConfig,
        "tokens_per_step",
        2048,
        help="tokens of sources and targets of one batch at most, padding included",
    )
    seq_len_tokens: int = inherited(
        LoopConfig,
        "seq_len_tokens",
        96,
        help="tokens of a source at most, which is cut; longer targets are left out",
    )
    warmup_steps: int = inherited(LoopConfig, "warmup_steps", 150)
    decay_share: float = inherited(LoopConfig, "decay_share", 0.5)
    validate_every_steps: int = inherited(LoopConfig, "validate_every_steps", 250)
    loss: LossName = option(
        "ce", "ce (the targets), kl (the teacher's distribution) or alpha (acceptance)", choices=get_args(LossName)
    )
    teacher: str | None = option(None, "the target model, for kl and alpha: a folder")
    init_from: Path | None = option(None, "checkpoint folder of the same sizes to start from")
    tokenizer: Path | None = option(None, "tokenizer.json to use", usual="the teacher's, else one is trained")
    validation_examples: int = option(400, "held-out examples of each folder in a validation")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_teacher(self.loss, self.teacher)
        if not self.data:
            raise BadOption("there is nothing to learn from: give --data FOLDER, which `forerun train examples` makes")


@dataclass(frozen=True)
class Batch:
    """Padded ids: sources [S, L], where they are filled, what the decoder reads [S, M], and what follows it [S, M]."""

    sources: Tensor
    filled: Tensor
    texts: Tensor
    following: Tensor  # -1 where nothing follows

    @property
    def learned(self) -> Tensor:
        """Which rows have something to learn, [S * M]."""
        return (self.following >= 0).flatten()


@dataclass(frozen=True)
class Encoded:
    """Examples as ids, each text with its end, one behind the other."""

    sources: Seq[NDArray[np.uint16]]
    targets: Seq[NDArray[np.uint16]]

    @classmethod
    def joined(cls, parts: Seq[Encoded]) -> Encoded:
        """Return all of several, one behind the other."""
        return cls([own for part in parts for own in part.sources], [own for part in parts for own in part.targets])

    def __len__(self) -> int:
        return len(self.sources)

    @functools.cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each source and target, [N, 2]."""
        return np.array([[len(s), len(t)] for s, t in zip(self.sources, self.targets, strict=True)]).reshape(-1, 2)

    def batch(self, chosen: Seq[int]) -> Batch:
        """Return these examples, padded."""
        sources = _padded([self.sources[i] for i in chosen], PAD_ID)
        following = _padded([self.targets[i] for i in chosen], -1)
        begun = torch.full((len(following), 1), PAD_ID, dtype=torch.int64)
        texts = torch.cat((begun, following[:, :-1].clamp(min=0)), 1)
        lengths = torch.from_numpy(self.lengths[list(chosen), 0])
        return Batch(sources, torch.arange(sources.shape[1]) < lengths[:, None], texts, following)

    def cut(self, order: Iterable[int], tokens: int) -> Iterator[list[int]]:
        """Cut examples, in this order, into batches of so many tokens at most, padding included."""
        own: list[int] = []
        longest = np.zeros(2, dtype=np.int64)
        for i in order:
            grown = np.maximum(longest, self.lengths[i])
            if own and int(grown.sum()) * (len(own) + 1) > tokens:
                yield own
                own, grown = [], self.lengths[i]
            own.append(i)
            longest = grown
        if own:
            yield own


def _padded(rows: Seq[NDArray[np.uint16]], fill: int) -> Tensor:
    made = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for row, own in zip(made, rows, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(made)


@dataclass
class PairBatches:
    """An endless sequence of batches of examples of nearly one length; each epoch has all of them in a new order."""

    examples: Encoded
    tokens: int
    seed: int
    _epochs: list[int] = field(default_factory=list)  # batches of each, as far as known
    _last: tuple[int, list[list[int]]] = (-1, [])

    def batch(self, step: int) -> Batch:
        """Return the batch of one step."""
        for epoch in range(step + 1):
            num = self._epochs[epoch] if epoch < len(self._epochs) else len(self._epoch(epoch))
            self._epochs[epoch:] = [num]
            if step < num:
                return self.examples.batch(self._epoch(epoch)[step])
            step -= num
        raise AssertionError("every epoch has a batch")

    def _epoch(self, epoch: int) -> list[list[int]]:
        if self._last[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            order = rng.permutation(len(self.examples))
            lengths = self.examples.lengths
            pools = (order[first : first + POOL] for first in range(0, len(order), POOL))
            found = [
                batch
                for pool in pools
                for batch in self.examples.cut(pool[np.lexsort(lengths[pool].T[::-1])].tolist(), self.tokens)
            ]
            self._last = epoch, [found[i] for i in rng.permutation(len(found))]
        return self._last[1]


@dataclass(frozen=True)
class PairTask:
    """A T5 that is trained, as the loop wants it. held_out: by task."""

    config: PairConfig
    batches: PairBatches
    held_out: Mapping[str, Encoded]
    facts: Mapping[str, Any]
    ops: PairOps
    model: TorchModel
    weights: dict[str, Tensor]
    teacher: TorchModel | None

    @property
    def identity(self) -> dict[str, Any]:
        """See `Task`: the shape, the loss, and what it learns from."""
        own = {name: getattr(self.config, name) for name in ("shape", "loss", "teacher", "seed")}
        return own | {name: self.facts[name] for name in ("examples_sha256", "tokenizer_sha256")}

    @property
    def rates(self) -> Mapping[str, float]:
        """See `Task`: queries learn slower, as if scores were divided by the root of a head's size, which T5 omits.

        A step of Adam is as large for small weights as for large ones: without this the scores grow until each row
        sees one other alone, and nothing is learned any more.
        """
        return dict.fromkeys(filter(is_of_queries, self.weights), query_scale(self.config.shape))

    def loss(self, step: int) -> Tensor:
        """See `Task`."""
        batch = self.batches.batch(step)
        target = None if self.config.loss == "ce" else self._target(batch)
        return losses.loss_of(self.config.loss, self._logits(self.model, batch), _next_ids(batch), target)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Measure cross entropy in nats per token of held-out targets, of all and by task.

        With a teacher also, by task, KL, alpha at temperature 1, and the share of tokens on which both agree greedily.
        """
        numbers = dict[str, float]()
        for task, own in self.held_out.items():
            sums, num = dict[str, float](), 0
            for chosen in own.cut(range(len(own)), self.config.tokens_per_step):
                batch = own.batch(chosen)
                logits, following = self._logits(self.model, batch), _next_ids(batch)
                found = {"loss": losses.cross_entropy(logits, following)}
                if (target := self._target(batch)) is not None:
                    found["kl"] = losses.forward_kl(logits, target)
                    found["alpha"] = losses.overlap(logits, target).mean()
                    found["agreement"] = losses.agreement(logits, target)
                for name, value in found.items():
                    sums[name] = sums.get(name, 0.0) + float(value) * len(following)
                num += len(following)
            numbers |= {f"{name}_{task}": value / num for name, value in sums.items()}
        whole = [value for name, value in numbers.items() if name.startswith("loss_")]
        return {"validation_loss": sum(whole) / len(whole), **numbers}

    def export(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Write the checkpoint folder out/model."""
        folder, tokenizer = self.config.out / "model", self.config.out / "tokenizer"
        save_checkpoint(folder, self.config.shape.spec(), self.weights, end_ids={END_ID}, tokenizer_folder=tokenizer)

    def _logits(self, model: TorchModel, batch: Batch) -> Tensor:
        """Return logits [R, V] of the rows that have something to learn."""
        with autocast(self.config):
            hidden = run_pairs(model, self.ops, batch.sources, batch.filled, batch.texts)
            return model.logits(hidden[batch.learned])

    @torch.no_grad()
    def _target(self, batch: Batch) -> Tensor | None:
        return None if self.teacher is None else self._logits(self.teacher, batch)


def _next_ids(batch: Batch) -> Tensor:
    return batch.following.flatten()[batch.learned]


def train(config: PairConfig, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train an encoder-decoder by `loop.train`. Raises BadOption where the out folder's state is of another run."""
    return loop.train(config, lambda: prepare(config), resume=resume, quiet=quiet)


def prepare(config: PairConfig) -> PairTask:
    """Read the examples, and make tokenizer and model; it takes a minute for half a million of examples."""
    config.out.mkdir(parents=True, exist_ok=True)
    folders = list(dict.fromkeys(config.data))
    learned = {folder: examples.read(folder, "train") for folder in folders}
    held_out = [own for folder in folders for own in examples.read(folder, "validation")[: config.validation_examples]]
    if not any(learned.values()) or not held_out:
        raise BadOption(f"{shown(str(config.data[0]))} has too few examples: make more of them")
    ops = PairOps()
    teacher = load_teacher(config, ops)
    tokenizer = make_tokenizer(config, list(learned.values()))
    weights = first_weights(config)
    for weight in weights.values():
        weight.requires_grad_(True)
    parts = {folder: encode(own, tokenizer, config.seq_len_tokens) for folder, own in learned.items()}
    encoded = Encoded.joined([parts[folder] for folder in config.data])
    return PairTask(
        config=config,
        batches=PairBatches(encoded, config.tokens_per_step, config.seed),
        held_out={
            task: encode([own for own in held_out if own.task == task], tokenizer, config.seq_len_tokens)
            for task in dict.fromkeys(own.task for own in held_out)
        },
        facts={
            "num_parameters": config.shape.spec().num_weights,
            "num_examples": len(encoded),
            "num_source_tokens": int(encoded.lengths[:, 0].sum()),
            "num_target_tokens": int(encoded.lengths[:, 1].sum()),
            "examples_sha256": fingerprint(example for folder in config.data for example in learned[folder]),
            "tokenizer_sha256": tokenizer_hash(config.out / "tokenizer"),
        },
        ops=ops,
        model=TorchModel(config.shape.spec(), weights, ops),
        weights=weights,
        teacher=teacher,
    )


def first_weights(config: PairConfig) -> dict[str, Tensor]:
    """Return random weights, or those of config.init_from. Raises BadOption for those of another shape."""
    if config.init_from is None:
        return drawn_weights(config.shape.spec(), config.seed, deviations(config.shape).__getitem__)
    if (other := difference(config.shape.spec(), read_config(read_raw_config(config.init_from)))) is not None:
        raise BadOption(f"{shown(str(config.init_from))} has {other}, and the model does not: give the same sizes")
    return read_weights(config.init_from)


def deviations(shape: PairShape) -> dict[str, float]:
    """Return the standard deviations of T5's first weights, by the modules that they are of.

    Embeddings are large, so that each token is still seen behind the encoder's layers: with small ones all rows of a
    source become alike, and the decoder learns to do without it. Scores are not divided by the root of a head's size,
    but the weights of queries are.
    """
    hidden, heads = shape.hidden_size**-0.5, (shape.num_heads * shape.head_size) ** -0.5
    return {
        "embed_tokens": 1.0,
        "lm_head": hidden,
        "q_proj": hidden * query_scale(shape),
        "k_proj": hidden,
        "v_proj": hidden,
        "o_proj": heads,
        "relative_attention_bias": hidden,
        "gate_proj": hidden,
        "up_proj": hidden,
        "down_proj": shape.ffn_size**-0.5,
    }


def is_of_queries(name: str) -> bool:
    """Whether a weight makes queries."""
    return name.endswith(".q_proj.weight")


def query_scale(shape: PairShape) -> float:
    """Return what scores are multiplied by elsewhere (Vaswani et al. 2017, 3.2.1)."""
    return float(shape.head_size**-0.5)


def load_teacher(config: PairConfig, ops: PairOps) -> TorchModel | None:
    """The target. Raises BadOption for one without an encoder, or with another number of ids."""
    if config.teacher is None:
        return None
    model = load_checkpoint(config.teacher, dtype="float32", ops=ops).model
    assert isinstance(model, TorchModel)
    had, wanted = model.config.vocab_size, config.shape.vocab_size
    if model.encoder is None or model.config.model_type != "t5":
        raise BadOption(f"{shown(config.teacher)} is no T5: name a model of `forerun train seq2seq`")
    if had != wanted:
        raise BadOption(f"{shown(config.teacher)} has {had} ids and the model {wanted}: give --vocab-size {had}")
    return model


def make_tokenizer(config: PairConfig, learned: Seq[Seq[Example]]) -> Tokenizer:
    """Return the given tokenizer, else the teacher's, else a newly trained one; its files go to out/tokenizer."""
    folder = config.out / "tokenizer"
    if config.tokenizer is None and config.teacher is not None:
        copy_tokenizer(small_files(config.teacher), folder)
        return checked(load_tokenizer(folder), config)
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer)
    else:
        texts = (text for own in learned for e in own[:TOKENIZER_EXAMPLES] for text in (e.source, e.target))
        tokenizer = train_pair_tokenizer(texts, config.shape.vocab_size)
    save_tokenizer(checked(tokenizer, config), folder, config.seq_len_tokens, bos=None, end=END)
    return tokenizer


def checked(tokenizer: Tokenizer, config: PairConfig) -> Tokenizer:
    """Return a tokenizer. Raises BadOption where its special ids are not those of T5, or the model has fewer ids."""
    if [tokenizer.token_to_id(token) for token in (PAD, END)] != [PAD_ID, END_ID]:
        raise BadOption(f"the tokenizer must have {PAD} as id {PAD_ID} and {END} as id {END_ID}: leave --tokenizer out")
    if tokenizer.get_vocab_size() > config.shape.vocab_size:
        raise BadOption(f"the tokenizer has {tokenizer.get_vocab_size()} ids, the model {config.shape.vocab_size}")
    return tokenizer


def encode(found: Seq[Example], tokenizer: Tokenizer, longest: int) -> Encoded:
    """Return examples as ids. A longer source loses its end; an example with a longer target is left out."""
    sources, targets, dtype = list[NDArray[np.uint16]](), list[NDArray[np.uint16]](), batches.id_type(tokenizer)
    for first in range(0, len(found), 10_000):
        part = found[first : first + 10_000]
        ids = [
            [e.ids for e in tokenizer.encode_batch(texts)]
            for texts in zip(*((e.source, e.target) for e in part), strict=True)
        ]
        for source, target in zip(*ids, strict=True):
            if len(target) <= longest:
                sources.append(np.array(source if len(source) <= longest else [*source[: longest - 1], END_ID], dtype))
                targets.append(np.array(target, dtype))
    return Encoded(sources, targets)


def fingerprint(found: Iterable[Example]) -> str:
    """Return the SHA-256 of examples in their order."""
    digest = hashlib.sha256()
    for example in found:
        digest.update(f"{example.source}\0{example.target}\0".encode())
    return digest.hexdigest()
