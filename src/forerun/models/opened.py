"""Opens a checkpoint (a folder, a file or a model of the hub) without reading its weights.

Files other than the weights, such as config.json, are read when they are first needed, and then kept in memory.
`load_checkpoint` loads the weights of opened checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import xxhash

from forerun.blocks import MATRIX_BITS, Spec, Weight, weights
from forerun.errors import BadOption, NotFound, UnsupportedModel, UserError, shown
from forerun.host_tensor import HELD_AS
from forerun.models import naming, packings, refusals
from forerun.models.families import computes, family, model_types, published_names, run_by
from forerun.models.generation import end_ids_of
from forerun.models.hub import fetch_weights, is_hub_id, locate
from forerun.models.naming import NamedSource
from forerun.models.source import Source, Stored, open_source
from forerun.ops.quantised import Scheme
from forerun.text.json_files import read_json
from forerun.text.small_files import SmallFiles
from forerun.text.tokenizer import Tokenizer


class OpenedCheckpoint:
    """A checkpoint whose files are read and checked, except the weights.

    asked: the name that the caller gave. path: the path of the checkpoint's folder or file. raw: config.json without
    ignored keys. spec: the spec that the family read from `raw`. source: reads the tensors; None = the tensors are in
    memory, or there are none. small: the files besides the weights, such as the tokenizer; None = the files in the
    source's folder. original: for a model that was made in memory, the checkpoint on the disk from which the model was
    made, if both have the same hidden size and vocabulary. Drafters for the new model, such as an MTP block, are looked
    for in the files of `original` and beside these files.
    """

    original: OpenedCheckpoint | None = None

    def __init__(
        self,
        asked: str | Path,
        path: Path,
        raw: Mapping[str, Any],
        spec: Spec,
        source: Source | None = None,
        small: SmallFiles | None = None,
    ) -> None:
        self.asked, self.path = asked, path
        self.raw, self.spec, self.source = raw, spec, source
        if small is not None:
            self.small = small

    @classmethod
    def of(
        cls,
        name: str | Path,
        ignore_config_keys: Collection[str] = (),
        *,
        config_only: bool = False,
        with_tokenizer: bool = True,
    ) -> OpenedCheckpoint:
        """Open a folder, a file or a model of the hub. All files of a hub model but the weights are fetched.

        ignore_config_keys: the keys of config.json to treat as missing. config_only: only config.json is fetched and
        read; `name` may then be the path of a config.json. with_tokenizer: whether to refuse a tokenizer that cannot be
        read. Raises UserError for any fault in files other than the weights, and NotFound if the weights or another
        necessary file are missing.
        """
        if config_only and Path(name).suffix == ".json" and Path(name).is_file():
            raw = without(read_json(Path(name)), ignore_config_keys)
            return cls(name, Path(name), raw, read_config(raw), small=SmallFiles(None))
        path = locate(name, config_only=config_only, weights=False)
        source = open_source(path)
        raw = without(source.config, ignore_config_keys)
        opened = cls(name, path, raw, read_config(raw, path), source, SmallFiles(None) if config_only else None)
        if not config_only:
            _ = opened.end_ids
            if not opened.is_of_hub:  # the names in its listing are checked already
                source.check(with_tokenizer)
        return opened

    @classmethod
    def in_memory(
        cls, config: Any, tokenizer: Tokenizer | None = None, end_ids: Collection[int] = (), name: str = "model"
    ) -> OpenedCheckpoint:
        """Return an opened checkpoint for a model made in memory. config: the model, such as a Spec or ToyConfig."""
        raw = {"eos_token_id": sorted(end_ids)}
        opened = cls(name, Path(name), raw, config, small=SmallFiles(None).with_tokenizer(tokenizer))
        opened.tensors = {}
        return opened

    def as_model(self) -> OpenedCheckpoint:
        """Return this checkpoint. Raises BadOption for a checkpoint that can only draft for another model."""
        if (method := run_by(self.raw)) is not None:
            raise BadOption(
                f"{shown(str(self.asked))} is no model by itself, but drafts for one: name its target, and it as the "
                f"draft, {shown(f'{method}:path={self.asked}')}"
            )
        return self

    def widened(self, spec: Spec, tokenizer: Tokenizer | None = None) -> OpenedCheckpoint:
        """Return an OpenedCheckpoint with this checkpoint's files and the spec `spec`. No weights are read or computed.

        The result describes a model that the caller makes in memory by changing or widening this checkpoint's model.
        tokenizer: the tokenizer of the new model; None = this checkpoint's tokenizer.
        """
        small = self.small if tokenizer is None else self.small.with_tokenizer(tokenizer)
        widened = OpenedCheckpoint(self.asked, self.path, without(self.raw, refusals.KEYS), spec, small=small)
        if (spec.hidden_size, spec.vocab_size) == (self.spec.hidden_size, self.spec.vocab_size):
            widened.original = self.original or self
        return widened

    @property
    def name(self) -> str:
        """The name to show: the name of the folder or the file, or the hub id."""
        return str(self.asked) if self.is_of_hub else self.path.resolve().name

    @cached_property
    def is_of_hub(self) -> bool:
        """Whether the checkpoint was named as a model of the hub. If so, its weights may not have been fetched yet."""
        return self.source is not None and is_hub_id(self.asked)

    @cached_property
    def small(self) -> SmallFiles:
        """The checkpoint's files other than weights, such as config.json and the tokenizer."""
        return SmallFiles(None if self.source is None else self.source.folder)

    @property
    def folder(self) -> Path:
        """The folder with config.json and the tokenizer's files."""
        return self.path if self.small.folder is None else self.small.folder

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where the checkpoint has none."""
        return self.small.tokenizer

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises NotFound where the checkpoint has none."""
        if self.tokenizer is None:
            raise NotFound(f"there is no tokenizer.json in {self.folder}: name a checkpoint folder that holds one")
        return self.tokenizer

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The token ids that end an output, see `end_ids_of`."""
        return end_ids_of(self.small, self.raw)

    # ------------------------------------------------------------------------------------------------------- tensors

    @property
    def stored_dtype(self) -> str:
        """The dtype that config.json names; float32 where config.json names none."""
        named = str(self.raw.get("dtype") or self.raw.get("torch_dtype"))
        return named if named in HELD_AS else "float32"

    @cached_property
    def weights(self) -> Source:
        """The source of the weights, with tensors under the names of `blocks.weights`.

        Raises as `Source.tensors`, and UnsupportedModel where the checkpoint has no files.
        """
        if self.source is None:
            raise UnsupportedModel(f"{self.asked} has no weights: name {refusals.WANTED}")
        return under_our_names(self.source, self.spec)

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """The stored form of each tensor, from the headers of the weights.

        If the headers cannot be read, the stored forms are derived from config.json (`said_tensors`). The error is
        raised later, when the model is loaded.
        """
        try:
            headers = {} if self.source is None else self.weights.tensors
        except (UserError, OSError):
            headers = {}
        return headers or said_tensors(self.spec, self.raw)

    @property
    def has_files(self) -> bool:
        """Whether there are files with the weights, or with the weights that were widened in memory."""
        return (self.original or self).source is not None

    @cached_property
    def fingerprint(self) -> str:
        """A hex digest of the model's sizes, and of its norms and biases in bfloat16.

        Quantisation changes none of these numbers, so quantised files of a model have the same fingerprint as the
        original files. A widened model has the fingerprint of its files. Raises as `weights`.
        """
        files = self.original or self
        spec, digest = files.spec, xxhash.xxh3_128()
        digest.update(f"{spec.hidden_size} {spec.vocab_size} {spec.num_layers}".encode())
        for name, stored in sorted(files.weights.tensors.items()):
            if len(stored.shape) == 1:
                for block in files.weights.blocks(name):
                    digest.update(name.encode() + block.to("bfloat16").values.tobytes())
        return digest.hexdigest()

    def fetch_weights(self) -> None:
        """Fetch the weights of a hub model, from the commit whose other files were opened. Raises as `locate`."""
        if self.is_of_hub:
            fetch_weights(str(self.asked), self.path)

    def close(self) -> None:
        """Close the files with weights. Call this method once the weights are in memory."""
        if self.source is not None:
            self.source.close()


def spec_of(name: str | Path) -> Spec:
    """Read the spec of a folder, a file or a model of the hub from config.json alone."""
    return OpenedCheckpoint.of(name, config_only=True).spec


def under_our_names(source: Source, spec: Spec) -> Source:
    """Return a source of the same tensors under the names of `blocks.weights`.

    `source` itself is returned if its tensors have these names already, and config.json declares no multi-token
    prediction block. The tensors of such a block are left out.
    """
    names = source.names or published_names(source.config, spec)
    if naming.says_next_tokens(source.config):
        names = naming.USUAL if names is None else replace(names, beside=(*names.beside, *naming.NEXT))
    return source if names is None else cast(Source, NamedSource(source, names, spec))


def without(config: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    """Return config.json without the keys in `ignore`."""
    return {key: value for key, value in config.items() if key not in ignore}


def read_config(raw: Mapping[str, Any], path: Path | None = None) -> Spec:
    """Return the spec that config.json (`raw`) describes, read by the family of its model_type.

    Raises UnsupportedModel for a model that forerun cannot compute. path: the checkpoint's folder or file, for the
    message; None = unknown.
    """
    try:
        refusals.refuse_code(raw, model_types(), computes(raw))
        module = family(raw.get("model_type"))
        packings.layout_of(raw)
        return module.read({key: value for key, value in raw.items() if key not in refusals.KEYS})
    except UnsupportedModel as error:
        if path is not None and path.is_file():  # its config.json is generated, and nobody would find it
            raise UnsupportedModel(f"{path}, whose metadata is read as a config.json: {error}") from error
        raise


def said_tensors(config: Spec, raw: Mapping[str, Any]) -> Mapping[str, Stored]:
    """Return the stored form of each tensor by name, derived from config.json alone.

    The embedding and the LM head are assumed not to be quantised, as in most quantised checkpoints.
    """
    file = Path("config.json")
    return {w.name: Stored(file, w.shape, "float32", _said_scheme(w, raw)) for w in weights(config)}


def _said_scheme(weight: Weight, raw: Mapping[str, Any]) -> Scheme | None:
    if weight.least_bits != MATRIX_BITS:
        return None
    return packings.said_scheme(raw, weight.shape[1], is_expert=weight.role == "experts")
