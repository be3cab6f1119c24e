"""`forerun train lm` trains a small model on Python source, token ids, a target's text, or a target's soft labels.

The model is a llama (like the shipped target and its draft, which this command trained), a GPT-2, a mixture of experts,
or a hybrid in which most layers keep a state. Arithmetic is float32, or bfloat16 autocast where the processor has it.
The result is a standard checkpoint folder, `model/` in the out folder. loop.py lists the other files there.

Several drafts of one target can be trained one after another. Each learns only where no earlier draft (`after`) agrees
with the target on the likeliest token. So all drafts together cover more than any one alone (SpecInfer, Miao et al.
2023, arXiv 2305.09781, section 3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from forerun.errors import BadOption, shown
from forerun.models.loading import load_checkpoint
from forerun.models.opened import OpenedCheckpoint, spec_of
from forerun.ops.torch import TorchModel
from forerun.train import batches, loop, losses
from forerun.train.config import TrainConfig
from forerun.train.corpus import Corpus, load_corpus
from forerun.train.loop import autocast
from forerun.train.model import deepen, export, initial_weights, load_decoder, read_shape, read_weights, run_windows
from forerun.train.ops import TrainingOps
from forerun.train.samples import begun_with
from forerun.train.tokenizer import (
    END_OF_TEXT,
    copy_tokenizer,
    load_tokenizer,
    save_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)

BALANCE = 0.01  # weight of each router's imbalance (Fedus, Zoph, Shazeer 2021, section 2.2)


def train(config: TrainConfig, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train a language model by `loop.train`. Raises BadOption where the out folder's state belongs to another run."""

    def shown_prepare() -> LanguageModel:
        with loop.progress_bar(quiet) as progress:
            progress.add_task("reading texts", total=None, note="")
            return prepare(config)

    return loop.train(config, shown_prepare, resume=resume, quiet=quiet)


@dataclass(frozen=True)
class Data:
    """The data of a run, and the tokenizer and end ids that the checkpoint needs. validation [n, seq_len + 1].

    facts: the entries for run.json. tokenizer_folder, end_id: None where the data are rows of ids, without text.
    end_id: the id after each text. end_ids: the ids that end an output.
    """

    batches: batches.Mixture
    validation: Tensor
    facts: Mapping[str, Any]
    tokenizer_folder: Path | None = None
    end_id: int | None = None
    end_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class LanguageModel:
    """A decoder that is trained, as a `Task` of the training loop.

    earlier: drafts of the same target that were trained before.
    """

    config: TrainConfig
    data: Data
    model: TorchModel
    weights: dict[str, Tensor]
    teacher: TorchModel | None
    earlier: Sequence[TorchModel]
    ops: TrainingOps

    @property
    def identity(self) -> dict[str, Any]:
        """The shape, the loss and the data, see `Task`. A run may resume with more samples."""
        names = ("shape", "loss", "teacher", "after", "seed")
        return {**{name: getattr(self.config, name) for name in names}, **self.data.facts}

    @property
    def rates(self) -> Mapping[str, float]:
        """Empty, because all weights have the usual learning rate, see `Task`."""
        return {}

    @property
    def facts(self) -> Mapping[str, Any]:
        """The entries for run.json, see `Task`."""
        mixture = self.data.batches
        return {
            "num_parameters": self.config.shape.num_parameters,
            **self.data.facts,
            "num_text_tokens": 0 if mixture.text is None else mixture.text.num_tokens,
            "num_sample_tokens": 0 if mixture.samples is None else mixture.samples.num_tokens,
        }

    def loss(self, step: int) -> Tensor:
        """Return the loss of one step's batch.

        Tokens that an earlier draft model predicts as the target does are left out.
        """
        windows = self.data.batches.batch(step).to(self.config.device)
        self.ops.imbalances.clear()
        with autocast(self.config):
            hidden = run_windows(self.model, windows[:, :-1])
        unevenness = sum(self.ops.imbalances)
        needs_target = self.earlier or self.config.loss != "ce"
        target = self._logits(self.teacher, windows) if needs_target else None
        next_tokens = windows[:, 1:].reshape(-1)
        if self.earlier and target is not None:
            missed = ~self._covered(windows, target)
            hidden, target, next_tokens = hidden[missed], target[missed], next_tokens[missed]
            if not len(hidden):
                return hidden.sum()  # 0, with a gradient of 0
        with autocast(self.config):
            logits = self.model.logits(hidden)
        return losses.loss_of(self.config.loss, logits, next_tokens, target) + BALANCE * unevenness

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Measure the cross entropy in nats per token on held-out modules or rows, or on held-out texts of the target.

        With a teacher, also measure the KL divergence, alpha at temperature 1, and the share of tokens on which both
        models agree greedily. With earlier drafts, also measure the share of tokens on which at least one earlier draft
        agrees with the teacher, and the share on which an earlier draft or this model agrees.
        """
        sums: dict[str, float] = {}
        rows_per_step, validation = self.config.rows_per_step, self.data.validation
        for start in range(0, len(validation), rows_per_step):
            windows = validation[start : start + rows_per_step].to(self.config.device)
            with autocast(self.config):
                logits = self.model.logits(run_windows(self.model, windows[:, :-1]))
            numbers = {"validation_loss": losses.cross_entropy(logits, windows[:, 1:].reshape(-1))}
            if (target := self._logits(self.teacher, windows)) is not None:
                numbers["kl"] = losses.forward_kl(logits, target)
                numbers["alpha"] = losses.overlap(logits, target).mean()
                numbers["agreement"] = losses.agreement(logits, target)
                if self.earlier:
                    covered = self._covered(windows, target)
                    numbers["coverage_before"] = covered.float().mean()
                    numbers["coverage"] = (covered | (logits.argmax(-1) == target.argmax(-1))).float().mean()
            for key, value in numbers.items():
                sums[key] = sums.get(key, 0.0) + float(value) * len(windows)
        return {key: value / len(validation) for key, value in sums.items()}

    def export(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Write the checkpoint folder out/model."""
        data, folder = self.data, self.config.out / "model"
        export(folder, self.config.shape, self.weights, data.tokenizer_folder, data.end_id, data.end_ids)

    def _covered(self, windows: Tensor, target: Tensor) -> Tensor:
        """Return for each token whether any earlier draft model agrees with the target on the likeliest id.

        windows [S, L + 1] -> bool [S * L].
        """
        best = target.argmax(-1)
        hits = [logits.argmax(-1) == best for m in self.earlier if (logits := self._logits(m, windows)) is not None]
        return torch.stack(hits).any(0)

    @torch.no_grad()
    def _logits(self, model: TorchModel | None, windows: Tensor) -> Tensor | None:
        """Return a model's logits [S * L, V] for windows [S, L + 1]; None where there is no model."""
        if model is None:
            return None
        with autocast(self.config):
            return model.logits(run_windows(model, windows[:, :-1]))


def prepare(config: TrainConfig) -> LanguageModel:
    """Read the data, and make tokenizer and model. A large corpus takes minutes."""
    config.out.mkdir(parents=True, exist_ok=True)
    weights = first_weights(config)
    ops = TrainingOps(config.seq_len_tokens)
    for weight in weights.values():
        weight.requires_grad_(True)
    teacher, end_ids = load_teacher(config, ops)
    return LanguageModel(
        config=config,
        data=text_data(config, end_ids) if config.ids is None else ids_data(config, config.ids),
        model=TorchModel(config.shape.spec(), weights, ops),
        weights=weights,
        teacher=teacher,
        earlier=[load_earlier(name, config, ops) for name in config.after],
        ops=ops,
    )


def text_data(config: TrainConfig, end_ids: frozenset[int]) -> Data:
    """Read the texts, and encode them. Where there is no tokenizer, one is trained on these texts.

    end_ids: the ids that end the teacher's output.
    """
    trains_tokenizer = config.teacher is None and config.tokenizer is None
    corpus = load_corpus(config.text) if config.reads_text or trains_tokenizer else None
    tokenizer = make_tokenizer(config, corpus)
    folder = config.out / "tokenizer"
    end = end_of_text(tokenizer, end_ids)
    if corpus is not None and config.reads_text:
        held_out = batches.encode_documents(corpus.validation, tokenizer, end)
    else:
        assert config.samples is not None
        held_out = batches.load_samples(config.samples, tokenizer, end, held_out=True)
    corpus_hash = None if corpus is None else corpus.fingerprint()
    return Data(
        make_mixture(config, corpus, tokenizer, end),
        batches.validation_windows(held_out, config.seq_len_tokens, config.validation_windows),
        {
            "corpus_sha256": corpus_hash,
            "tokenizer_sha256": tokenizer_hash(folder),
            "samples": None if config.samples is None else dict(begun_with(config.samples)),
        },
        folder,
        end,
        end_ids,
    )


def ids_data(config: TrainConfig, path: Path) -> Data:
    """Read rows of ids, and hold out every 16th row. Raises the errors of `batches.load_rows`."""
    rows = batches.load_rows(path, config.shape.vocab_size, config.seq_len_tokens)
    seen, held_out = batches.split_rows(rows)
    return Data(
        batches.Mixture(batches.WholeRows(seen, config.seed), config.rows_per_step),
        torch.from_numpy(held_out[: config.validation_windows]),
        {"ids_sha256": hashlib.sha256(rows.tobytes()).hexdigest()},
    )


def load_teacher(config: TrainConfig, ops: TrainingOps) -> tuple[TorchModel | None, frozenset[int]]:
    """Return the target, and the ids that end its output. Without a target, return None and no ids.

    Raises BadOption where the target's ids or positions do not fit the run, and where it has sliding windows.
    """
    if config.teacher is None:
        return None, frozenset()
    checkpoint = load_checkpoint(config.teacher, dtype="float32", device=config.device, ops=ops)
    model = checkpoint.model
    assert isinstance(model, TorchModel)
    _check_fits(config.teacher, model, config)
    if model.config.has_windows:
        raise BadOption(f"the teacher {shown(config.teacher)} has sliding windows, which training does not compute")
    return model, checkpoint.end_ids


def load_earlier(name: str, config: TrainConfig, ops: TrainingOps) -> TorchModel:
    """Load an earlier draft of the target. Raises BadOption where its ids or positions do not fit the run."""
    model = load_decoder(name, ops, config.device)
    _check_fits(name, model, config)
    return model


def _check_fits(name: str, model: TorchModel, config: TrainConfig) -> None:
    had, wanted = model.config.vocab_size, config.shape.vocab_size
    if had != wanted:
        raise BadOption(f"{shown(name)} has {had} ids and the model {wanted}: give --vocab-size {had}")
    if (longest := model.config.max_positions) < config.seq_len_tokens:
        raise BadOption(f"{shown(name)} reads {longest} tokens at most: give --seq-len-tokens {longest}, or fewer")


def make_tokenizer(config: TrainConfig, corpus: Corpus | None) -> Tokenizer:
    """Return the given tokenizer, or else the teacher's, or else a new one. Its files are written to out/tokenizer."""
    folder = config.out / "tokenizer"
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer)
    elif config.teacher is not None:
        copy_tokenizer(OpenedCheckpoint.of(config.teacher).folder, folder)
        tokenizer = load_tokenizer(folder)
    else:
        assert corpus is not None
        tokenizer = train_tokenizer((document.text for document in corpus.train), config.shape.vocab_size)
    if tokenizer.get_vocab_size() > config.shape.vocab_size:
        raise BadOption(f"the tokenizer has {tokenizer.get_vocab_size()} ids, the model {config.shape.vocab_size}")
    if config.teacher is None or config.tokenizer is not None:
        save_tokenizer(tokenizer, folder, config.shape.max_positions)
    return tokenizer


def end_of_text(tokenizer: Tokenizer, end_ids: Collection[int]) -> int:
    """Return the id that training puts after each text: END_OF_TEXT, or else the lowest end id of the target."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None and not end_ids:
        raise BadOption(f"the tokenizer has no token {END_OF_TEXT}, which training puts behind each text: take another")
    return min(end_ids) if end is None else int(end)


def num_ids_of(teacher: str) -> int:
    """Return the vocabulary size in the config.json of a target, which its drafts must share."""
    return spec_of(teacher).vocab_size


def first_weights(config: TrainConfig) -> dict[str, Tensor]:
    """Return random weights, or the weights of config.init_from, deepened where that model has fewer layers.

    Raises NotFound and BadOption as `read_shape` and `deepen` do.
    """
    if config.init_from is None:
        return initial_weights(config.shape, config.seed, device=config.device)
    grown = deepen(read_weights(config.init_from), read_shape(config.init_from), config.shape, config.seed)
    return {name: weight.to(config.device) for name, weight in grown.items()}


def make_mixture(config: TrainConfig, corpus: Corpus | None, tokenizer: Tokenizer, end: int) -> batches.Mixture:
    """Make batches from the train split, from texts that the target wrote, or from both."""
    num_rows, text, samples = config.rows_per_step, None, None
    if corpus is not None and config.reads_text:
        tokens = batches.encode_documents(corpus.train, tokenizer, end, seed=config.seed)
        text = batches.WindowStream(tokens, config.seq_len_tokens, config.seed)
    if config.samples is None:
        return batches.Mixture(text, num_rows)
    written = batches.load_samples(config.samples, tokenizer, end)
    samples = batches.WindowStream(written, config.seq_len_tokens, config.seed + 1)
    return batches.Mixture(text, num_rows, samples, config.num_sample_rows)
