"""`benchmarks.t5 train` trains a small T5 on examples of sources and targets, or from a larger one's soft labels.

The paper's pairs were T5 models (Leviathan et al. 2023, section 4); this makes some of the same kind. Their form is
that of T5 version 1.1: gated feed-forward parts, an LM head of its own, a bias by distance. The blocks that are trained
are those that serve. The result is a standard checkpoint folder, `model/` in the out folder.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.t5 import examples
from benchmarks.t5.batches import Batch, Encoded, PairBatches, encode, fingerprint
from benchmarks.t5.config import PairConfig, PairShape
from benchmarks.t5.passes import PairOps, run_pairs
from benchmarks.t5.tokenizer import END_ID, make_tokenizer
from forerun.blocks import difference
from forerun.errors import BadOption, shown
from forerun.models.loading import load_checkpoint
from forerun.models.opened import spec_of
from forerun.models.saving import save_checkpoint
from forerun.ops.torch import TorchModel
from forerun.ops.torch_tensors import HostWeights
from forerun.train import loop, losses
from forerun.train.loop import autocast
from forerun.train.model import drawn_weights, read_weights
from forerun.train.tokenizer import tokenizer_hash


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
        save_checkpoint(
            folder, self.config.shape.spec(), HostWeights(self.weights), end_ids={END_ID}, tokenizer_folder=tokenizer
        )

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
    if (other := difference(config.shape.spec(), spec_of(config.init_from))) is not None:
        raise BadOption(f"{shown(str(config.init_from))} has {other}, and the model does not: give the same sizes")
    return read_weights(config.init_from)


def deviations(shape: PairShape) -> dict[str, float]:
    """Return the standard deviations of T5's first weights, by the modules that they are of.

    Embeddings are large, so that each token is still seen behind the encoder's layers: with small ones all rows of a
    source become alike, and the decoder learns to do without it. Scores are not divided by the root of a head's size,
    but the weights of queries are.
    """
    hidden, heads = shape.hidden_size**-0.5, (shape.num_heads * shape.head_size) ** -0.5
    usual = dict.fromkeys(("lm_head", "k_proj", "v_proj", "relative_attention_bias", "gate_proj", "up_proj"), hidden)
    queries = {"q_proj": hidden * query_scale(shape)}
    return {"embed_tokens": 1.0, **usual, **queries, "o_proj": heads, "down_proj": shape.ffn_size**-0.5}


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
        raise BadOption(f"{shown(config.teacher)} is no T5: name a model of `benchmarks.t5 train`")
    if had != wanted:
        raise BadOption(f"{shown(config.teacher)} has {had} ids and the model {wanted}: give --vocab-size {had}")
    return model
