"""EAGLE-3 and DFlash heads in GGUF files, as llama.cpp's converter writes them.

Such a file is unpacked once into a folder of the cache. The folder has the names, sizes and layer ids of a published
head's folder, so that the same code reads both. The blocks of a head are blocks of a llama or of a Qwen 3 model, and
the code for these models reads them. The tensors outside the blocks have special names. Quantised weights become
bfloat16 in the folder. On loading they are rounded again, like the weights of a published head.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from forerun.blocks import Spec
from forerun.errors import BadOption, UnsupportedModel, shown
from forerun.host_tensor import HostTensor
from forerun.models import safetensors_file
from forerun.models.gguf.blocks import TYPES
from forerun.models.gguf.header import Entry, Header, Texts, read_model
from forerun.models.kept_folder import kept_folder
from forerun.models.source.gguf import SUFFIX, GgufFile

VERSION = 1  # the version of the folders that are written
EMBEDDING = "token_embd.weight"
WRONG = (ValueError, TypeError, LookupError, ArithmeticError, StopIteration)  # raised by values that no head has
MOST_PADDING = 1024  # rows of a target's embedding without a token
LAYER = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class _Kind:
    """Describes the GGUF files that hold heads of one architecture.

    method: the drafter that reads the files. blocks: the model architecture of the head's blocks. outer: maps the GGUF
    names of tensors outside the blocks to their published names. layer: the beginning of a block's published names; {}
    stands for the block's number. inner: maps the endings of GGUF names of tensors in a block to their published names.
    `inner` lists only tensors whose published names differ from the usual names of the architecture `blocks`. keys: the
    names of the metadata entries that describe the head.
    """

    method: str
    blocks: str
    outer: Mapping[str, str]
    layer: str
    inner: Mapping[str, str]
    keys: tuple[str, ...]


KINDS = {
    "eagle3": _Kind(
        "eagle",
        "llama",
        {"fc.weight": "fc.weight", "output_norm.weight": "norm.weight", "output.weight": "lm_head.weight",
         EMBEDDING: "embed_tokens.weight", "d2t": "d2t", "enc.output_norm.weight": "input_norm.weight"},
        "midlayer.",
        {"attn_norm_2.weight": "hidden_norm.weight"},
        ("target_layers", "target_hidden_size", "norm_before_residual", "norm_before_fc"),
    ),
    "dflash": _Kind(
        "dflash",
        "qwen3",
        {"fc.weight": "fc.weight", "output_norm.weight": "norm.weight", "d2t": "d2t",
         "enc.output_norm.weight": "hidden_norm.weight"},
        "layers.{}.",
        {},
        ("target_layers", "block_size", "attention.causal"),
    ),
}  # fmt: skip


def is_file(path: str) -> bool:
    """Return whether a path is an existing file with the ending of GGUF files."""
    return path.lower().endswith(SUFFIX) and Path(path).is_file()


def method_of(header: Header) -> str | None:
    """Return the method that reads a file with this header; None if no drafter reads the file."""
    kind = KINDS.get(_text(header.metadata.get("general.architecture")))
    return None if kind is None else kind.method


def fits(path: str, target: Spec) -> bool:
    """Return whether the hidden size and the number of token ids in a GGUF file's metadata fit the target.

    The target may have up to MOST_PADDING more ids, as padding. Raises the errors of `read_model`.
    """
    metadata = read_model(Path(path)).metadata
    name = _text(metadata.get("general.architecture"))
    width = metadata.get(f"{name}.target_hidden_size", metadata.get(f"{name}.embedding_length"))
    tokens = metadata.get("tokenizer.ggml.tokens")
    num_ids = tokens.num if isinstance(tokens, Texts) else -1
    return width == target.hidden_size and 0 <= target.vocab_size - num_ids <= MOST_PADDING


def unpacked(path: str, method: str) -> str:
    """Return the folder into which a GGUF file is unpacked. The file is unpacked now if the folder does not exist.

    Raises BadOption for a file that the drafter `method` does not read, UnsupportedModel for an invalid head, and
    CapacityError if the folder cannot be written.
    """
    header = read_model(Path(path))
    name = _text(header.metadata.get("general.architecture"))
    kind = KINDS.get(name)
    if kind is None or kind.method != method:
        reads = f"name it as {kind.method}:path=FILE" if kind else f"name one of {', '.join(KINDS)}"
        raise BadOption(f"{shown(path)} has general.architecture={shown(name)}, which {method} does not read: {reads}")
    place = Path(path).resolve()
    changed_ns = Path(path).stat().st_mtime_ns
    of_place, of_content = _digest(place), _digest(f"{VERSION} {header.digest} {changed_ns}")

    def write(folder: Path) -> None:
        try:
            config, tensors = _published(Path(path), name, kind, header)
            text = json.dumps(config, indent=2) + "\n"
        except WRONG as error:
            raise UnsupportedModel(f"{shown(path)} is no whole head of {name} ({error}): fetch it again") from error
        safetensors_file.write(folder / "model.safetensors", tensors, {"format": "pt"})
        (folder / "config.json").write_text(text, encoding="utf-8")

    files = ("config.json", "model.safetensors")
    folder = kept_folder(f"heads/{of_place}-{of_content}", files, write, f"the head of {shown(path)}")
    for older in set(folder.parent.glob(f"{of_place}-*")) - {folder}:  # folders of earlier versions of the file
        shutil.rmtree(older, ignore_errors=True)
    return str(folder)


def _published(path: Path, name: str, kind: _Kind, header: Header) -> tuple[dict[str, Any], dict[str, HostTensor]]:
    """Return the entries of config.json and the tensors of a GGUF head, in the form of published folders."""
    said = {key.removeprefix(f"{name}."): value for key, value in header.metadata.items() if key.startswith(f"{name}.")}
    of_head: dict[str, Any] = {key: said.pop(key) for key in kind.keys if key in said}
    around = {tensor: ours for tensor, ours in kind.outer.items() if tensor in header.tensors}
    around |= {
        tensor: f"{_at(kind, tensor)}{ours}"
        for tensor in header.tensors
        for ending, ours in kind.inner.items()
        if tensor.startswith("blk.") and tensor.endswith(f".{ending}")
    }
    source = GgufFile(path, _as_model(path, kind, said, header), tuple(around))
    names, tensors = source.names, dict[str, HostTensor]()
    for tensor in (*source.tensors, *source.next_tensors):
        if tensor in header.tensors and (tensor in around or tensor.startswith("blk.")):
            of_model = names.ours(tensor)
            ours = around.get(tensor) or (of_model[0][0] if of_model else tensor)
            ours = ours.replace(f"model.layers.{tensor.split('.')[1]}.", _at(kind, tensor)) if of_model else ours
            rows = HostTensor.joined([block[:] for block in source.blocks(tensor)])
            tensors[ours] = rows.to("bfloat16") if header.tensors[tensor].type.scheme else rows
    config = {key: value for key, value in source.config.items() if "." not in key}
    layers = [int(layer) for layer in np.atleast_1d(of_head.get("target_layers", []))]
    if (ids := tensors.get("d2t")) is not None:
        tensors["d2t"] = HostTensor.of(ids.values.astype(np.int64) - np.arange(len(ids)))
    drafted = {} if ids is None else {"draft_vocab_size": len(ids)}
    if kind.method == "eagle":
        switches = {key: value for key, value in of_head.items() if key != "target_layers"}
        return {**config, "draft_vocab_size": config["vocab_size"], **drafted, **switches, LAYER: layers}, tensors
    mask = {"mask_token_id": header.metadata.get("tokenizer.ggml.mask_token_id")}
    ids_read = {"target_layer_ids": [layer - 1 for layer in layers], **{k: v for k, v in mask.items() if v is not None}}
    more = {"block_size": of_head["block_size"]} if "block_size" in of_head else {}
    causal = {"is_causal": True} if of_head.get("attention.causal") is True else {}
    return {**config, **drafted, **more, **causal, "dflash_config": ids_read}, tensors


def _at(kind: _Kind, tensor: str) -> str:
    """Return the beginning of the published name of a block's tensor; "" for a tensor outside the blocks."""
    return kind.layer.format(tensor.split(".")[1]) if tensor.startswith("blk.") else ""


def _as_model(path: Path, kind: _Kind, said: Mapping[str, Any], header: Header) -> Header:
    """Return the header that a GGUF file of a whole model with the head's blocks would have.

    If the head has no embedding, the header lists an embedding without bytes, whose shape gives the number of token
    ids.
    """
    kept = {key: value for key, value in header.metadata.items() if not key.startswith(("general.arch", "split."))}
    metadata = {"general.architecture": kind.blocks.encode(), **kept}
    metadata |= {f"{kind.blocks}.{key}": value for key, value in said.items()}
    tensors = dict(header.tensors)
    if EMBEDDING not in tensors:
        tokens, width = header.metadata.get("tokenizer.ggml.tokens"), said.get("embedding_length")
        if not isinstance(tokens, Texts) or type(width) is not int:
            raise UnsupportedModel(f"{path} has neither an embedding nor a tokenizer, so that its ids are not known")
        some = next(iter(tensors.values()))
        tensors[EMBEDDING] = Entry(some.file, (tokens.num, width), TYPES[1], 0, 0)
    return replace(header, metadata=metadata, tensors=tensors)


def _digest(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()[:16]


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
