"""`forerun train lm` trains a small llama on Python source or on token ids, or from a target's soft labels for them.

The shipped target and its draft were both trained by it. Arithmetic is float32 (or bfloat16 autocast where the
processor has it); the result is a standard checkpoint folder, `model/` in the out folder. loop.py says what else is
written there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
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
class Data:
    """What is learned from, and what the checkpoint needs of it. validation [n, seq_len + 1].

    facts: for run.json. tokenizer_folder, end_id: None where ids are all there is.
    """

    batches: batches.Mixture
    validation: Tensor
    facts: Mapping[str, Any]
    tokenizer_folder: Path | None = None
    end_id: int | None = None


@dataclass(frozen=True)
class LanguageModel:
    """A llama that is trained, as the loop wants it."""

    config: TrainConfig
    data: Data
    model: Decoder
    weights: dict[str, Tensor]
    teacher: Decoder | None

    @property
    def identity(self) -> ModelShape:
        """See `Task`: the shape."""
        return self.config.shape

    @property
    def facts(self) -> Mapping[str, Any]:
        """See `Task`."""
        mixture = self.data.batches
        return {
            "num_parameters": self.config.shape.num_parameters,
            **self.data.facts,
            "num_text_tokens": mixture.text.num_tokens,
            "num_sample_tokens": 0 if mixture.samples is None else mixture.samples.num_tokens,
        }

    def loss(self, step: int) -> Tensor:
        """See `Task`."""
        windows = self.data.batches.batch(step).to(self.config.device)
        with autocast(self.config):
            logits = self.model.logits(run_windows(self.model, windows[:, :-1]))
        return losses.loss_of(self.config.loss, logits, windows[:, 1:].reshape(-1), self._teacher_logits(windows))

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Measure cross entropy in nats per token on held-out modules or rows.

        With a teacher also alpha at temperature 1, and the share of tokens on which both agree greedily.
        """
        sums: dict[str, float] = {}
        rows_per_step, validation = self.config.rows_per_step, self.data.validation
        for start in range(0, len(validation), rows_per_step):
            windows = validation[start : start + rows_per_step].to(self.config.device)
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
        return {key: value / len(validation) for key, value in sums.items()}

    def export(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Write the checkpoint folder out/model."""
        data, folder = self.data, self.config.out / "model"
        export(folder, self.config.shape, self.weights, data.tokenizer_folder, data.end_id)

    def _teacher_logits(self, windows: Tensor) -> Tensor | None:
        """Return the target's logits [S * L, V] for windows [S, L + 1], or None where the loss does not need them."""
        if self.teacher is None or self.config.loss == "ce":
            return None
        with torch.no_grad(), autocast(self.config):
            return self.teacher.logits(run_windows(self.teacher, windows[:, :-1]))


def prepare(config: TrainConfig) -> LanguageModel:
    """Read the data, and make tokenizer and model. A large corpus takes minutes."""
    config.out.mkdir(parents=True, exist_ok=True)
    data = text_data(config) if config.ids is None else ids_data(config, config.ids)
    weights = first_weights(config)
    ops = TrainingOps(config.seq_len_tokens)
    for weight in weights.values():
        weight.requires_grad_(True)
    return LanguageModel(
        config=config,
        data=data,
        model=Decoder(config.shape.decoder_config(), weights, ops),
        weights=weights,
        teacher=load_decoder(config.teacher, ops, config.device) if config.teacher else None,
    )


def text_data(config: TrainConfig) -> Data:
    """Read the corpus, and encode it with a tokenizer that is made of it where none is given."""
    corpus = load_corpus(config.text)
    tokenizer = make_tokenizer(config, corpus)
    held_out = batches.encode_documents(corpus.validation, tokenizer)
    folder = config.out / "tokenizer"
    return Data(
        make_mixture(config, corpus, tokenizer),
        batches.validation_windows(held_out, config.seq_len_tokens, config.validation_windows),
        {"corpus_sha256": corpus.fingerprint(), "tokenizer_sha256": tokenizer_hash(folder)},
        folder,
        tokenizer.token_to_id(END_OF_TEXT),
    )


def ids_data(config: TrainConfig, path: Path) -> Data:
    """Read rows of ids, of which every 16th is held out. Raises as `batches.load_rows`."""
    rows = batches.load_rows(path, config.shape.vocab_size, config.seq_len_tokens)
    seen, held_out = batches.split_rows(rows)
    return Data(
        batches.Mixture(batches.WholeRows(seen, config.seed), config.rows_per_step),
        torch.from_numpy(held_out[: config.validation_windows]),
        {"ids_sha256": hashlib.sha256(rows.tobytes()).hexdigest()},
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
