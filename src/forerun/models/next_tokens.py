"""Reads and writes the multi-token prediction (MTP) block in a model's files.

The MTP block is built like the model's blocks, so its weights are read under the names of the model's blocks, as the
weights of a draft head. In published files, its tensor names begin with `mtp.layers.0.`, while the names in the model's
first block begin with `model.layers.0.`. In GGUF files, the MTP block is the last block. The input of the MTP block is
a projection of two normed vectors: a token's embedding, and the hidden state of the token before. A norm follows the
MTP block (Gloeckle et al. 2024; DeepSeek-V3, arXiv 2412.19437, eq. 21 to 24).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np

from forerun.blocks import HEAD, SIDES, Norm, Spec, weights
from forerun.errors import UserError
from forerun.host_tensor import HostTensor
from forerun.models import safetensors_file
from forerun.models.families import published_names
from forerun.models.naming import NEXT, SAID, USUAL, NamedSource, Names, published
from forerun.models.open_file import OpenFile
from forerun.models.opened import OpenedCheckpoint
from forerun.models.refusals import CONFIG, INDEX, SINGLE, shard_names
from forerun.models.saving import write_json
from forerun.models.source import QuantisedSource, Source, Stored, Wrapped
from forerun.ops.quantised import QuantisedMatrix

INPUT, NORM = "input", "model.norm"
# Modules before and after the block -> our names. FOLDER: as published files name them, after one of PREFIXES. GGUF: as
# GGUF files name them, after the block's number.
FOLDER = {"fc": INPUT, "pre_fc_norm_embedding": SIDES[0], "pre_fc_norm_hidden": SIDES[1], "norm": NORM}
PREFIXES = ("mtp.", "model.mtp.")
GGUF = {"eh_proj": INPUT, "enorm": SIDES[0], "hnorm": SIDES[1], "shared_head_norm": NORM}


@dataclass(frozen=True)
class NextTokens:
    """The MTP block of a checkpoint.

    decoder: the spec of a model that consists of the MTP block and the norm after it. source: the source of the block's
    tensors, by our names.
    """

    decoder: Spec
    source: Source

    @property
    def side_offset(self) -> float:
        """The number to add to the stored weights of the norms before the projection, and of all other norms."""
        return (self.decoder.final_norm or Norm()).offset


def find(opened: OpenedCheckpoint) -> NextTokens | None:
    """Return the MTP block of a checkpoint; None if there is none, or if it has unexpected tensors or shapes.

    The files must be on this machine: fetch the weights of a hub model first.
    """
    source, spec = opened.source, opened.spec
    if source is None:
        return None
    try:
        block = next((block for block in reversed(spec.blocks) if block.attention is not None), None)
        names = source.names or published_names(source.config, spec) or USUAL
        of_block = _Renamed.of(source, spec, names)
        if block is None or of_block is None:
            return None
        decoder = replace(spec, blocks=(block,), tied=False, head=False, encoder=None, positions=None)
        named = cast(Source, NamedSource(cast(Source, of_block), names, decoder))
        joined = cast(Source, _Joined(named, of_block))
        return NextTokens(decoder, joined) if _is_whole(named, of_block, decoder) else None
    except (UserError, OSError):
        return None


def published_block(decoder: Spec, weights: Mapping[str, HostTensor], names: Names | None) -> dict[str, HostTensor]:
    """Return the weights of an MTP block under the published names, which `find` expects in a checkpoint folder.

    weights: the weights of the block, of the modules before it and of the norm after it, by our names; the block is
    layer 0. names: the map of the model's published tensor names; None = our names.
    """
    names = names or USUAL
    outer = {ours: theirs for theirs, ours in FOLDER.items()}
    offset = (decoder.final_norm or Norm()).offset
    around, inner = dict[str, HostTensor](), dict[str, HostTensor]()
    for name, weight in weights.items():
        module, _, ending = name.rpartition(".")
        if module not in outer:
            inner[name] = weight
            continue
        if module in SIDES and offset:
            weight = HostTensor.of(weight.float32() - np.float32(offset)).to(weight.dtype)
        around[f"{PREFIXES[0]}{outer[module]}.{ending}"] = weight
    start = names.prefix + names.block.format(0)
    of_block = {name.removeprefix(start): weight for name, weight in published(names, decoder, inner).items()}
    return {f"{PREFIXES[0]}layers.0.{name}": weight for name, weight in of_block.items()} | around


def save_with_block(folder: Path, original: OpenedCheckpoint, tensors: Mapping[str, HostTensor]) -> None:
    """Copy the checkpoint folder of `original` to `folder`, and write an MTP block as a separate shard.

    tensors: the block's tensors, see `published_block`. Any MTP block of `original` is left out. Shards that an earlier
    call copied are not copied again, so a training run may write its block many times.
    """
    assert original.source is not None
    source, single = original.source.folder, original.source.folder / SINGLE
    paths = [single] if single.exists() else [source / name for name in shard_names(source / INDEX)]
    headers = {path: safetensors_file.read_header(OpenFile(path)) for path in paths}
    shards = {path: entries for path, entries in headers.items() if _without_block(entries)}
    files = [f"model-{i + 1:05}-of-{len(shards) + 1:05}.safetensors" for i in range(len(shards) + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    places, num_bytes = dict[str, str](), 0
    for (shard, entries), name in zip(shards.items(), files, strict=False):
        _copy(shard, folder / name, entries)
        kept = _without_block(entries)
        places |= dict.fromkeys(kept, name)
        num_bytes += sum(entry.num_bytes for entry in kept.values())
    _write(folder / files[-1], tensors)
    num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    places |= dict.fromkeys(tensors, files[-1])
    write_json(folder / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": places})
    for file in source.iterdir():
        if file.suffix in SMALL and file.name not in (CONFIG, INDEX):
            shutil.copyfile(file, folder / file.name)
    config = dict(original.source.config)
    text = config.get("text_config")
    said = {"text_config": {**text, SAID: 1}} if isinstance(text, Mapping) else {SAID: 1}
    write_json(folder / CONFIG, {**config, **said})


def _write(file: Path, tensors: Mapping[str, HostTensor]) -> None:
    """Write a safetensors file atomically."""
    partial = file.with_name(f"{file.name}.partial")
    safetensors_file.write(partial, tensors, {"format": "pt"})
    partial.replace(file)


def _without_block(entries: Mapping[str, safetensors_file.Entry]) -> dict[str, safetensors_file.Entry]:
    return {tensor: entry for tensor, entry in entries.items() if not tensor.startswith(NEXT)}


def _copy(shard: Path, to: Path, entries: Mapping[str, safetensors_file.Entry]) -> None:
    """Copy `shard` to `to` without the tensors of an MTP block, unless an earlier call has copied this shard.

    A copy has the modification time of the shard, so that later calls recognise the copy. entries: the tensors in the
    shard's header, by name.
    """
    kept = _without_block(entries)
    changed_ns = shard.stat().st_mtime_ns
    is_whole = len(kept) == len(entries)
    is_there = to.exists() and to.stat().st_mtime_ns == changed_ns
    if is_whole and not (is_there and to.stat().st_size == shard.stat().st_size):
        shutil.copy2(shard, to)
    elif not is_whole and not is_there:
        _write(to, {tensor: entry.whole() for tensor, entry in kept.items()})
        os.utime(to, ns=(changed_ns, changed_ns))


SMALL = (".json", ".jinja", ".txt", ".model")  # endings of the files that a model needs beside weights


def _is_whole(named: Source, of_block: _Renamed, decoder: Spec) -> bool:
    """Whether the MTP block has exactly the tensors that it needs, each with the right shape.

    named: the tensors of the block itself. of_block: the source that also has the tensors before and after the block.
    decoder: the spec of the block.
    """
    h = decoder.hidden_size
    wanted = {weight.name: weight.shape for weight in weights(replace(decoder, own_embedding=False))}
    wanted.pop("model.embed_tokens.weight", None)
    wanted |= {f"{INPUT}.weight": (h, 2 * h), **{f"{side}.weight": (h,) for side in SIDES}}
    there = {**named.tensors, **of_block.joining}
    return {name: stored.shape for name, stored in there.items() if name != HEAD} == wanted


class _Renamed(Wrapped):
    """A source of an MTP block's tensors. Each has the name that the same tensor of the model's first block has.

    theirs: maps these names to the names of the MTP block's tensors in the files. outer: maps our names of the tensors
    before and after the MTP block to the names of these tensors in the files.
    """

    def __init__(self, source: Source, tensors: Mapping[str, Stored], theirs: dict[str, str], outer: dict[str, str]):
        super().__init__(source)
        self._tensors, self._theirs, self._outer = tensors, theirs, outer

    @classmethod
    def of(cls, source: Source, spec: Spec, names: Names) -> _Renamed | None:
        """Find the MTP block among the tensors of a source. names: the published names of the model's tensors.

        Returns None if there is no MTP block, if the block has its own embedding or LM head, or if a folder has several
        MTP blocks. Of several MTP blocks in a GGUF file, the first is taken.
        """
        tensors: Mapping[str, Stored] = getattr(source, "next_tensors", None) or source.tensors
        theirs, outer = dict[str, str](), dict[str, str]()
        is_gguf = source.names is not None
        for name in tensors:
            if is_gguf:
                match = re.fullmatch(rf"blk\.{spec.num_layers}\.(nextn\.)?(.+)\.(\w+)", name)
                known = GGUF
            else:
                match = re.fullmatch(rf"(?:{'|'.join(map(re.escape, PREFIXES))})(layers\.0\.)?(.+)\.(\w+)", name)
                known = FOLDER
            if match is None:
                continue
            is_inside = (match[1] is None) if is_gguf else (match[1] is not None)
            if is_inside:
                theirs[f"{names.block.format(0)}{match[2]}.{match[3]}"] = name
            elif match[2] in known:
                outer[f"{known[match[2]]}.{match[3]}"] = name
            else:
                return None  # separate embeddings, a separate head, or a further block
        return cls(source, tensors, theirs, outer) if theirs and f"{INPUT}.weight" in outer else None

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """The stored form of the MTP block's tensors, by the names of the same tensors in the model's first block."""
        return {name: self._tensors[theirs] for name, theirs in self._theirs.items()}

    @cached_property
    def joining(self) -> Mapping[str, Stored]:
        """The stored form of the tensors before and after the MTP block, by our names."""
        return {ours: self._tensors[theirs] for ours, theirs in self._outer.items()}

    def blocks(self, name: str) -> Iterator[HostTensor]:
        """Yield the rows of a tensor of `tensors` or `joining`. See `Source.blocks`."""
        return self.source.blocks(self._theirs.get(name) or self._outer[name])

    def quantised(self, name: str) -> QuantisedMatrix:
        """Return a quantised tensor of `tensors` or `joining`."""
        return cast(QuantisedSource, self.source).quantised(self._theirs.get(name) or self._outer[name])


class _Joined(Wrapped):
    """A source of the tensors of an MTP block and of the modules before and after the block, all by our names."""

    def __init__(self, named: Source, beside: _Renamed) -> None:
        super().__init__(named)
        self._beside = beside

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """The stored form of each tensor, by our name."""
        return {**self.source.tensors, **self._beside.joining}

    def blocks(self, name: str) -> Iterator[HostTensor]:
        """Yield the rows of a tensor in order. See `Source.blocks`."""
        return (self._beside if name in self._beside.joining else self.source).blocks(name)

    def quantised(self, name: str) -> QuantisedMatrix:
        """Return a quantised tensor. Raises UnsupportedModel for a matrix that is stored transposed."""
        holder = self._beside if name in self._beside.joining else self.source
        return cast(QuantisedSource, holder).quantised(name)
