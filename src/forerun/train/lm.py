"""`forerun train lm` trains a small llama on Python source, from the text or from a target's soft labels.

The shipped target and its draft were both trained by it. Arithmetic is float32 (or bfloat16 autocast where the
processor has it); the result is a standard checkpoint folder, `model/` in the out folder. loop.py says what else is
written there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from forerun.errors import BadOption
from forerun.models.layers import Decoder
from forerun.train import batches, loop, losses
from forerun.train.config import TrainConfig
from forerun.train.corpus import Corpus, load_corpus
from forerun.train.loop import autocast
from forerun.train.model import (
    ModelShape,
    deepen,
    export,
    initial_weights,
    load_decoder,
    read_shape,
    read_weights,
    run_windows,
)
from forerun.train.ops import TrainingOps
from forerun.train.tokenizer import END_OF_TEXT, load_tokenizer, save_tokenizer, tokenizer_hash, train_tokenizer


def train(config: TrainConfig, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train a language model by `loop.train`. Raises BadOption where the out folder's state is of another shape."""
    return loop.train(config, prepare(config), resume=resume, quiet=quiet)


@dataclass(frozen=True)
class LanguageModel:
    """A llama that is trained, as the loop wants it. validation [n, seq_len + 1]."""

    config: TrainConfig
    corpus: Corpus
    tokenizer: Tokenizer
    model: Decoder
    weights: dict[str, Tensor]
    data: batches.Mixture
    validation: Tensor
    teacher: Decoder | None

    @property
    def identity(self) -> ModelShape:
        """See `Task`: the shape."""
        return self.config.shape

    @property
    def facts(self) -> Mapping[str, Any]:
        """See `Task`."""
        return {
            "num_parameters": self.config.shape.num_parameters,
            "corpus_sha256": self.corpus.fingerprint(),
            "tokenizer_sha256": tokenizer_hash(self.config.out / "tokenizer"),
            "num_text_tokens": len(self.data.text.tokens),
            "num_sample_tokens": 0 if self.data.samples is None else len(self.data.samples.tokens),
        }

    def loss(self, step: int) -> Tensor:
        """See `Task`."""
        windows = self.data.batch(step).to(self.config.device)
        with autocast(self.config):
            logits = self.model.logits(run_windows(self.model, windows[:, :-1]))
        return losses.loss_of(self.config.loss, logits, windows[:, 1:].reshape(-1), self._teacher_logits(windows))

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Measure cross entropy in nats per token on held-out modules.

        With a teacher also alpha at temperature 1, and the share of tokens on which both agree greedily.
        """
        sums: dict[str, float] = {}
        rows_per_step = self.config.rows_per_step
        for start in range(0, len(self.validation), rows_per_step):
            windows = self.validation[start : start + rows_per_step].to(self.config.device)
            with autocast(self.config):
                logits = self.model.logits(run_windows(self.model, windows[:, :-1]))
            numbers = {"validation_loss": losses.cross_entropy(logits, windows[:, 1:].reshape(-1))}
            if self.teacher is not None:
                with autocast(self.config):
                    target = self.teacher.logits(run_windows(self.teacher, windows[:, :-1]))
                numbers["kl"] = losses.forward_kl(logits, target)
                numbers["alpha"] = losses.overlap(logits, target).mean()
                numbers["agreement"] = losses.agreement(logits, target)
            for key, value in numbers.items():
                sums[key] = sums.get(key, 0.0) + float(value) * len(windows)
        return {key: value / len(self.validation) for key, value in sums.items()}

    def export(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Write the checkpoint folder out/model."""
        end_id, out = self.tokenizer.token_to_id(END_OF_TEXT), self.config.out
        assert end_id is not None
        export(out / "model", self.config.shape, self.weights, out / "tokenizer", end_id)

    def _teacher_logits(self, windows: Tensor) -> Tensor | None:
        """Return the target's logits [S * L, V] for windows [S, L + 1], or None where the loss does not need them."""
        if self.teacher is None or self.config.loss == "ce":
            return None
        with torch.no_grad(), autocast(self.config):
            return self.teacher.logits(run_windows(self.teacher, windows[:, :-1]))


def prepare(config: TrainConfig) -> LanguageModel:
    """Read the data, and make tokenizer and model. A large corpus takes minutes."""
    config.out.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(config.text)
    tokenizer = make_tokenizer(config, corpus)
    weights = first_weights(config)
    ops = TrainingOps(config.seq_len_tokens)
    for weight in weights.values():
        weight.requires_grad_(True)
    held_out = batches.encode_documents(corpus.validation, tokenizer)
    return LanguageModel(
        config=config,
        corpus=corpus,
        tokenizer=tokenizer,
        model=Decoder(config.shape.decoder_config(), weights, ops),
        weights=weights,
        data=make_mixture(config, corpus, tokenizer),
        validation=batches.validation_windows(held_out, config.seq_len_tokens, config.validation_windows),
        teacher=load_decoder(config.teacher, ops, config.device) if config.teacher else None,
    )


def make_tokenizer(config: TrainConfig, corpus: Corpus) -> Tokenizer:
    """Return the given tokenizer, else the teacher's, else a newly trained one; its files go to out/tokenizer."""
    source = config.tokenizer or config.teacher
    if source is not None:
        tokenizer = load_tokenizer(source)
    else:
        tokenizer = train_tokenizer((document.text for document in corpus.train), config.shape.vocab_size)
    if tokenizer.get_vocab_size() > config.shape.vocab_size:
        raise BadOption(f"the tokenizer has {tokenizer.get_vocab_size()} ids, the model {config.shape.vocab_size}")
    save_tokenizer(tokenizer, config.out / "tokenizer", config.shape.max_positions)
    return tokenizer


def first_weights(config: TrainConfig) -> dict[str, Tensor]:
    """Return random weights, or those of config.init_from, with new layers where it is shallower. Raises BadOption."""
    if config.init_from is None:
        return initial_weights(config.shape, config.seed, config.device)
    grown = deepen(read_weights(config.init_from), read_shape(config.init_from), config.shape, config.seed)
    return {name: weight.to(config.device) for name, weight in grown.items()}


def make_mixture(config: TrainConfig, corpus: Corpus, tokenizer: Tokenizer) -> batches.Mixture:
    """Make the batches from the train split, and from the target's own text where it is given."""
    tokens = batches.encode_documents(corpus.train, tokenizer, seed=config.seed)
    text = batches.WindowStream(tokens, config.seq_len_tokens, config.seed)
    if config.samples is None:
        return batches.Mixture(text, config.rows_per_step)
    own = batches.WindowStream(batches.load_samples(config.samples, tokenizer), config.seq_len_tokens, config.seed + 1)
    return batches.Mixture(text, config.rows_per_step, own, round(config.rows_per_step * config.samples_share))
