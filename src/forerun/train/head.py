"""Trains a head, a drafter that reads its target's hidden states, on text that the target wrote.

The command is `forerun train head`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun import registry
from forerun.drafters.shared import artifacts, head_files
from forerun.drafters.shared.head_matrices import dense_of
from forerun.errors import BadOption, shown
from forerun.models.loading import Checkpoint
from forerun.models.saving import config_to_dict
from forerun.ops.model import LoadedModel
from forerun.ops.torch_tensors import HostWeights, host_of, tensor_of
from forerun.text.json_files import read_json
from forerun.train import heads, loop
from forerun.train.config import HeadConfig
from forerun.train.features import FeatureSource, Recomputed, Stored, facts_of, stored_layers
from forerun.train.fingerprint import fingerprint
from forerun.train.heads import Packing, Teacher
from forerun.train.loop import autocast
from forerun.train.samples import Sample, read_samples

PREPARING = "preparing the head"
NUM_DRAFTED = {"vocab_size", "draft_vocab_size"}  # config.json entries that may change: a head may go on with other ids


@dataclass
class HeadTask:
    """Implements `Task` for the training of a head.

    data, held_out: the batches for training and for validation. tokenizer: the fingerprint of the target's tokenizer.
    facts: entries for run.json. checkpoint: the target.
    """

    config: HeadConfig
    head: heads.Head
    data: Packing
    held_out: Packing
    teacher: heads.Teacher
    tokenizer: str
    facts: Mapping[str, Any]
    checkpoint: Checkpoint
    options: Any  # of the method, with its defaults, which another version may change
    weights: Mapping[str, Tensor] = field(init=False)
    rates: Mapping[str, float] = field(init=False)
    masses: dict[int, Tensor] = field(default_factory=dict, init=False)  # of the held-out batches

    def __post_init__(self) -> None:
        self.weights = self.head.weights
        self.rates = getattr(self.head, "rates", {})

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that must not change when a run is resumed (see `Task`).

        These are the method with its options, the seed, the earlier head, and the samples' options. There may be more
        samples in a resumed run.
        """
        begun = {"method": self.config.method, "seed": self.config.seed, "init_from": self.config.init_from}
        return begun | {"options": dataclasses.asdict(self.options), "samples": self.facts["samples"]}

    def loss(self, step: int) -> Tensor:
        """Return the loss of the batch of one step."""
        if hasattr(self.head, "at"):
            self.head.at(step / self.config.steps)
        with autocast(self.config):
            return self.head.loss(self.data.batch(step))

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Measure the head on held-out texts, and return the mean of each measure of `Head.measure`, by name."""
        sums: dict[str, tuple[float, float]] = {}
        rows = self.held_out.epoch()[: self.config.validation_rows]
        for start in range(0, len(rows), self.config.rows_per_step):
            batch = self.held_out.joined(rows[start : start + self.config.rows_per_step])
            if start not in self.masses:
                self.masses[start] = self.teacher.mass(batch.hidden)
            with autocast(self.config):
                numbers = self.head.measure(replace(batch, mass=self.masses[start]))
            for name, (total, count) in numbers.items():
                had = sums.get(name, (0.0, 0.0))
                sums[name] = had[0] + total, had[1] + count
        return {name: total / max(count, 1) for name, (total, count) in sums.items()}

    def export(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Write the head to the folder out/head. log: the lines of log.jsonl.

        If the target was trained too, or if the head is added to a copy of the target, also write out/model.
        """
        weights, sizes = self.head.files()
        method, _ = registry.parse_spec(self.config.method)
        head_files.save(
            self.config.out / "head",
            method,
            HostWeights(weights | {head_files.PROBE: self.teacher.probe}),
            sizes,
            self.tokenizer,
            opened.fingerprint if (opened := self.checkpoint.opened).has_files else None,
        )
        if (save_beside := getattr(self.head, "save_beside", None)) is not None:
            save_beside(self.config.out, self.checkpoint)
        if (backbone := getattr(self.head, "backbone", None)) is not None:
            numbers = {name: value for line in log for name, value in line.items()}
            backbone.save(self.config.out / "model", self.checkpoint, numbers, self.config.method)


def train(
    config: HeadConfig,
    checkpoint: Checkpoint,
    *,
    resume: bool = False,
    quiet: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train a head for a target. Returns the measures of the last validation, by name.

    warn: called with warnings about the samples and the target. Raises BadOption for samples of another tokenizer, and
    for too few samples.
    """

    return loop.train(config, lambda: shown_prepare(config, checkpoint, quiet, warn), resume=resume, quiet=quiet)


def shown_prepare(config: HeadConfig, checkpoint: Checkpoint, quiet: bool, warn: Callable[[str], None]) -> HeadTask:
    """Call `prepare`, and show progress meanwhile: of hidden states that are stored, and that weights are fitted."""
    with loop.progress_bar(quiet) as progress:
        row = progress.add_task(PREPARING, total=None, note="")

        def say(num: int, of: int) -> None:
            progress.update(row, description=PREPARING if num == of else "hidden states", completed=num, total=of)

        return prepare(config, checkpoint, say, warn)


def prepare(
    config: HeadConfig,
    checkpoint: Checkpoint,
    say: Callable[[int, int], None] = lambda num, of: None,
    warn: Callable[[str], None] = lambda text: None,
) -> HeadTask:
    """Read the samples, store features if the options name a folder for features, and make the head.

    say: called with the number of texts whose features are stored, and the number of all texts. warn: see `train`.
    """
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    if tokenizer is None:
        raise BadOption("a head needs its target's tokenizer: load the checkpoint with it")
    if model.config.encoder is not None:
        raise BadOption(
            f"{checkpoint.name} is an encoder-decoder, for which no head is trained, because samples hold no sources: "
            "use a published head, a draft model or suffix"
        )
    samples, options = _samples(config, tokenizer.fingerprint)
    if options["weights"] != fingerprint(model):
        warn(
            f"{config.samples} was written with other weights than {checkpoint.name} has: go on only where both "
            "are one model, such as in other bits"
        )
    name, module, method_options = heads.load(config.method, model.config)
    if (text := getattr(module, "remark", lambda of: None)(checkpoint)) is not None:
        warn(text)
    known = artifacts.fingerprint(tokenizer, tokenizer.num_ids)
    before = None if config.init_from is None else Before.read(config.init_from, name, known, tokenizer.num_ids)
    parts = [[s for s in samples if s.is_held_out == is_held_out] for is_held_out in (False, True)]
    counts = torch.zeros(model.config.vocab_size)
    for sample in parts[0]:
        written = torch.from_numpy(sample.ids[sample.num_given :].astype("int64"))
        counts += torch.bincount(written, minlength=len(counts))
    # Ids that the earlier head drafts rank after ids that were written, and before all others.
    ranks = counts if before is None else counts.index_add(0, before.ids, torch.full(before.ids.shape, 0.5))
    teacher = Teacher.of(model, ranks, tokenizer.num_ids)
    head = module.Head(method_options, teacher, config.seed)
    writes_model = hasattr(head, "save_beside") or getattr(head, "backbone", None) is not None
    if writes_model and (config.out / "model").resolve() == checkpoint.folder.resolve():
        raise BadOption(f"--out {config.out} would write over the target, in {config.out / 'model'}: choose another")
    if before is not None:  # may refuse, so before hours of storing
        before.go_on(head, model, tokenizer.num_ids)
    layers = module.layers(method_options, model.config)
    stored = layers if config.features is None else stored_layers(config.features, layers)
    computed = Recomputed(model, stored, max((len(sample.ids) for sample in samples), default=1))
    source: FeatureSource = computed
    if config.features is not None:
        source = Stored(config.features, samples, computed, layers, facts_of(model, options), say)
    data, held_out = (Packing(part, source, config.seq_len_tokens, config.rows_per_step, config.seed) for part in parts)
    if before is None:
        head.begin(data.batch(step) for step in range(max(1, config.fit_tokens // config.tokens_per_step)))
    facts = {
        "num_parameters": sum(weight.numel() for weight in head.weights.values()),
        "samples": dict(options),
        "num_samples": len(samples),
        "num_tokens": sum(len(sample.ids) for sample in samples),
        "target": checkpoint.name,
        "share_drafted": float(counts[head.ids].sum() / counts.sum()) if hasattr(head, "ids") else 1.0,
    }
    return HeadTask(config, head, data, held_out, teacher, known, facts, checkpoint, method_options)


@dataclass(frozen=True)
class Before:
    """Holds an earlier head, whose weights are the first weights of a run.

    config: the head's config.json. ids: the ids that the head drafts; empty = the head drafts all ids.
    """

    folder: str
    config: Mapping[str, Any]
    ids: Tensor

    @classmethod
    def read(cls, name: str, method: str, tokenizer: str, num_ids: int) -> Before:
        """Read a head that `forerun train head` made. name: a folder, a name or a hub id. method: the head's method.

        Raises UserError where there is no such head, and for a head of another method or tokenizer.
        """
        folder = head_files.located(name, method)
        file = Path(folder) / head_files.CONFIG
        if file.is_file() and "forerun" not in read_json(file):
            raise BadOption(f"{shown(name)} was not made by `forerun train head`, which goes on with its own alone")
        config = head_files.read_config(folder, method, tokenizer)
        d2t = head_files.tensors(Path(folder) / head_files.WEIGHTS, {"d2t"}).get("d2t")
        ids = torch.arange(0) if d2t is None else torch.from_numpy(head_files.draft_ids(folder, d2t, num_ids))
        return cls(folder, config, ids)

    @torch.no_grad()
    def go_on(self, head: heads.Head, model: LoadedModel, num_ids: int) -> None:
        """Copy the weights of the earlier head into `head`.

        model: the target. Raises UserError for weights of another target, and for weights that were trained with other
        options.
        """
        if (go_on_as := getattr(head, "go_on_as", None)) is not None:
            go_on_as(self.config)
        tensors, config = head.files()
        of_target = config_to_dict(model.config)  # its files may round otherwise; shapes and probe are compared
        chosen = {key for key in config if config[key] != of_target.get(key)}
        for key in chosen - NUM_DRAFTED:
            if self.config.get(key) != config[key]:
                raise BadOption(
                    f"{shown(self.folder)} has {key}={shown(str(self.config.get(key)))}, and asked for is "
                    f"{config[key]}: write the options that it was trained with behind --method"
                )
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        draft_ids = {"d2t": tuple(self.ids.shape)} if "d2t" in shapes else {}
        weights = head_files.read_weights(self.folder, {**shapes, **draft_ids}, model, num_ids)
        if (read := getattr(head, "read", None)) is not None:
            weights = {name: host_of(weight) for name, weight in read(self.folder).items()}
        for name, weight in head.weights.items():
            if name in weights:  # the weights of a target that is trained along are in another folder
                weight.copy_(tensor_of(dense_of(weights[name])))


def _samples(config: HeadConfig, tokenizer: str) -> tuple[list[Sample], Mapping[str, Any]]:
    """Return the samples that the run uses, and the options of the file of samples.

    Raises BadOption for ids of another tokenizer.
    """
    file = read_samples(config.samples)
    if file.options["tokenizer"] != tokenizer:
        raise BadOption(
            f"{shown(str(config.samples))} holds ids of another tokenizer than the target's: let this target write "
            "its own with `forerun train sample`"
        )
    chosen, num_tokens = list[Sample](), 0
    for sample in file.samples:
        if config.num_tokens is not None and num_tokens >= config.num_tokens:
            break
        num_tokens += len(sample.ids)
        chosen.append(sample)
    return chosen, file.options
