"""Trains a small language model, for `forerun train lm`.

The model learns from Python source, token ids, texts of a target, or a target's distributions. It is a llama (like the
shipped target and its draft, which this command trained), a GPT-2, a mixture of experts, or a hybrid in which most
layers keep a state. Arithmetic is float32, or bfloat16 autocast if the processor has instructions for bfloat16. The
result is a standard checkpoint folder, `model/` in the out folder. loop.py lists the other files there.

Several drafts of one target can be trained one after another. Each draft learns only from tokens at which no earlier
draft (`after`) agrees with the target on the likeliest token. So all drafts together agree with the target more often
than a single draft (SpecInfer, Miao et al. 2023, arXiv 2305.09781, section 3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """Train a language model with `loop.train`. Returns the measures of the last validation, by name.

    Raises BadOption where the state in the out folder belongs to another run.
    """

    def shown_prepare() -> LanguageModel:
        with loop.progress_bar(quiet) as progress:
            progress.add_task("reading texts", total=None, note="")
            return prepare(config)

    return loop.train(config, shown_prepare, resume=resume, quiet=quiet)


@dataclass(frozen=True)
class Data:
    """Holds the data of a run, and the tokenizer and end ids for the checkpoint.

    batches: the batches for training. validation [n, seq_len + 1]: the held-out windows. facts: entries for run.json.
    end_id: the id after each text in training. end_ids: the ids that end an output. tokenizer_folder and end_id are
    None if the data are rows of ids, without text.
    """

    batches: batches.Mixture
    validation: Tensor
    facts: Mapping[str, Any]
    tokenizer_folder: Path | None = None
    end_id: int | None = None
    end_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class LanguageModel:
    """Implements `Task` for the training of a decoder.

    teacher: the target; None = there is no target. earlier: drafts of the same target that were trained before.
    """

    config: TrainConfig
    data: Data
    model: TorchModel
    weights: dict[str, Tensor]
    teacher: TorchModel | None
    earlier: Sequence[TorchModel]
    ops: TrainingOps
    rates: Mapping[str, float] = field(default_factory=dict)  # none differs from the usual one

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that must not change when a run is resumed (see `Task`).

        These are the shape, the loss, the teacher, the earlier drafts, the seed and the data. There may be more samples
        in a resumed run.
        """
        names = ("shape", "loss", "teacher", "after", "seed")
        return {**{name: getattr(self.config, name) for name in names}, **self.data.facts}

    @property
    def facts(self) -> Mapping[str, Any]:
        """The entries for run.json: the number of parameters, facts about the data, and the numbers of tokens."""
        mixture = self.data.batches
        return {
            "num_parameters": self.config.shape.num_parameters,
            **self.data.facts,
            "num_text_tokens": 0 if mixture.text is None else mixture.text.num_tokens,
            "num_sample_tokens": 0 if mixture.samples is None else mixture.samples.num_tokens,
        }

    def loss(self, step: int) -> Tensor:
        """Return the loss of the batch of one step.

        Tokens at which an earlier draft model and the target have the same likeliest token are left out.
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
        """Measure the model on the held-out modules, rows of ids, or texts of the target. Returns the measures by name.

        validation_loss is the cross entropy in nats per token. With a teacher, there are also kl (the KL divergence),
        alpha (at temperature 1), and agreement (the share of tokens with the same likeliest token as the teacher's).
        With earlier drafts, there are also coverage_before (the share of tokens at which an earlier draft agrees with
        the teacher), and coverage (the share at which an earlier draft or this model agrees with the teacher).
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
        """Write the checkpoint folder out/model. log is not used."""
        data, folder = self.data, self.config.out / "model"
        export(folder, self.config.shape, self.weights, data.tokenizer_folder, data.end_id, data.end_ids)

    def _covered(self, windows: Tensor, target: Tensor) -> Tensor:
        """Return for each token whether any earlier draft model agrees with the target on the likeliest id.

        windows [S, L + 1]: the ids. target [S * L, V]: the target's logits. The result is bool [S * L].
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
    """Read the data, and make the tokenizer and the model of a run. A large corpus takes minutes."""
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
    """Read and encode the texts of a run. If neither a tokenizer nor a teacher is given, train a tokenizer.

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
    """Read rows of ids from the file `path`, and hold out every 16th row. Raises errors as `batches.load_rows` does."""
    rows = batches.load_rows(path, config.shape.vocab_size, config.seq_len_tokens)
    seen, held_out = batches.split_rows(rows)
    return Data(
        batches.Mixture(batches.WholeRows(seen, config.seed), config.rows_per_step),
        torch.from_numpy(held_out[: config.validation_windows]),
        {"ids_sha256": hashlib.sha256(rows.tobytes()).hexdigest()},
    )


def load_teacher(config: TrainConfig, ops: TrainingOps) -> tuple[TorchModel | None, frozenset[int]]:
    """Load the target that config.teacher names. Returns the target and the ids that end its output.

    Returns None and no ids if there is no teacher. Raises BadOption where the target's vocabulary or number of
    positions does not fit the run, and where the target has sliding windows.
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
    """Load an earlier draft of the target.

    Raises BadOption where the draft's vocabulary or number of positions does not fit the run.
    """
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
    """Return the tokenizer of the options, or else the teacher's, or else a tokenizer trained on `corpus`.

    The tokenizer's files are written to out/tokenizer. Raises BadOption for a tokenizer with more ids than the model.
    """
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
    """Return the id that training puts after each text: END_OF_TEXT, or else the lowest of `end_ids`.

    Raises BadOption where there is neither.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None and not end_ids:
        raise BadOption(f"the tokenizer has no token {END_OF_TEXT}, which training puts behind each text: take another")
    return min(end_ids) if end is None else int(end)


def num_ids_of(teacher: str) -> int:
    """Return the vocabulary size of a target from its config.json. The drafts of the target must have the same size."""
    return spec_of(teacher).vocab_size


def first_weights(config: TrainConfig) -> dict[str, Tensor]:
    """Return the first weights of a run: random weights, or the weights of the model config.init_from.

    If this model has fewer layers than the run's shape, layers are added (`deepen`). Raises NotFound and BadOption as
    `read_shape` and `deepen` do.
    """
    if config.init_from is None:
        return initial_weights(config.shape, config.seed, device=config.device)
    grown = deepen(read_weights(config.init_from), read_shape(config.init_from), config.shape, config.seed)
    return {name: weight.to(config.device) for name, weight in grown.items()}


def make_mixture(config: TrainConfig, corpus: Corpus | None, tokenizer: Tokenizer, end: int) -> batches.Mixture:
    """Make the batches of a run from the train split of `corpus`, from texts that the target wrote, or from both.

    end: the id after each text.
    """
    num_rows, text, samples = config.rows_per_step, None, None
    if corpus is not None and config.reads_text:
        tokens = batches.encode_documents(corpus.train, tokenizer, end, seed=config.seed)
        text = batches.WindowStream(tokens, config.seq_len_tokens, config.seed)
    if config.samples is None:
        return batches.Mixture(text, num_rows)
    written = batches.load_samples(config.samples, tokenizer, end)
    samples = batches.WindowStream(written, config.seq_len_tokens, config.seed + 1)
    return batches.Mixture(text, num_rows, samples, config.num_sample_rows)
