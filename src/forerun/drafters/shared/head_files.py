"""Folders of trained heads: config.json, and model.safetensors under the names that published heads use.

`forerun train head` writes such folders. The entry "forerun" of config.json names the method that reads the folder, the
tokenizer of the head's ids, and the fingerprint of the target, by which `draft=auto` finds a head that ships. The
tensor `target_probe` holds some embeddings of the target for which the head was trained. A head for another target is
refused, because its drafts would be rejected. A head for the same target with fewer bits is accepted.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
import os
import re
from collections.abc import Collection, Container, Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forerun import native
from forerun.blocks import MATRIX_BITS, TABLE_BITS, Features
from forerun.config import Quantization
from forerun.drafters import Known
from forerun.drafters.shared import head_gguf
from forerun.drafters.shared.head_matrices import quantised
from forerun.errors import BadOption, NotFound, UnsupportedModel, program, shown
from forerun.host_tensor import Floats, HostTensor
from forerun.models import hub, named, safetensors_file
from forerun.models.open_file import OpenFile
from forerun.models.outline import Beside
from forerun.models.saving import new_folder
from forerun.models.saving_quantised import parts_of, said_of
from forerun.models.source.safetensors import Parts, SafetensorsFolder
from forerun.ops.model import Model
from forerun.ops.quantised import QuantisedMatrix, Scheme
from forerun.ops.quantising import scheme_of
from forerun.output_file import write_whole
from forerun.sampling.arithmetic import mass
from forerun.sampling.largest import Ids
from forerun.text.json_files import read_json

CONFIG, WEIGHTS, PROBE = "config.json", "model.safetensors", "target_probe"
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
PACKAGE = "forerun_heads"  # as heads/pyproject.toml has it
IGNORED = re.compile(r"t2d$|verifier_(norm|lm_head)\.|.*rotary_emb\.inv_freq$")  # tensors that change nothing
OWN_IDS = ("d2t", "token_map")  # tensors that say which ids are drafted
LM_HEAD = re.compile(r".*lm_head|\d+\.\d+\.weight$")  # an LM head that a head brings along, by its published names
LOOK_AHEAD = "look_ahead"  # the vectors of pass
EMBEDDINGS = "embed_tokens.weight"  # an embedding that a head brings along
TABLES = (LOOK_AHEAD, EMBEDDINGS)  # tensors that are in no matrix product, because their rows are looked up
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NUM_PROBES = 8  # embeddings of the target in a probe, spread over its ids
MOST_UNLIKE = 0.25  # largest difference between probes, over the probe's norm; rounding to 4 bits makes about 0.1
LARGEST = Features.largest  # bound on the hidden states that a head reads


def probe(model: Model, num_ids: int) -> HostTensor:
    """Return the embeddings of some ids of a target, bfloat16 [n, H]. Folders of heads store them as `target_probe`."""
    step = max(1, num_ids // NUM_PROBES)
    rows = model.rows.to_host(model.embed(list(range(0, num_ids, step))[:NUM_PROBES]))
    model.wait()
    return HostTensor.of(rows.astype(np.float32)).to("bfloat16")


def save(
    folder: Path,
    method: str,
    weights: Mapping[str, HostTensor],
    config: Mapping[str, Any],
    tokenizer: str,
    target: str | None = None,
) -> None:
    """Write a head's folder. Each old file stays in place until the new file is complete.

    tokenizer: the `artifacts.fingerprint` of the head's ids. target: the `OpenedCheckpoint.fingerprint` of the target;
    None = unknown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entry = {"method": method, "tokenizer": tokenizer} | ({} if target is None else {"target": target})
    text = json.dumps({**config, "forerun": entry}, indent=2) + "\n"
    partial = folder / f"{WEIGHTS}.partial"
    safetensors_file.write(partial, weights, {"format": "pt"})
    partial.replace(folder / WEIGHTS)
    write_whole(folder / CONFIG, text)


def path_help(method: str) -> str:
    """Return the help text of the option that names a head."""
    return f"what `forerun train head --method {method}` made, or a published head: a folder, a name, or a hub id"


def located(path: str | None, method: str) -> str:
    """Return the folder of a head. A head on the hub is first fetched as a whole into huggingface_hub's cache.

    path: a folder; a GGUF file, which is unpacked; the name of a head that ships with forerun; or a hub id
    org/name[@revision]. Raises BadOption if `path` is None, NotFound if the head does not exist or cannot be fetched,
    and UnsupportedModel for a pickle.
    """
    if path is None:
        raise BadOption(
            f"{method} needs a head that was trained for its target: make one with `forerun train drafter --method "
            f"{method} --target TARGET --out FOLDER`, then write {method}:path=FOLDER/head; a published one is named "
            "by its folder or hub id"
        )
    folder = os.path.expanduser(path)
    if head_gguf.is_file(folder):
        return head_gguf.unpacked(folder, method)
    if os.path.exists(folder):
        return folder
    shipped = shipped_folders()
    if path in shipped:
        return str(shipped[path])
    fetched = hub.fetch_files(path, partial(_wanted, method))
    if fetched is None:
        near = difflib.get_close_matches(path.lower(), shipped, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise NotFound(f"there is no head {shown(path)}{hint}: name {_known(method)}")
    return str(fetched)


def shipped_folders() -> dict[str, Path]:
    """Return the folders of the heads that ship with forerun, by name. A head has its target's name.

    Small heads are in the package. Larger ones are in the folder `heads` of the repository. A checkout reads them
    there. Elsewhere they are in a package of their own, PACKAGE.
    """
    places = [named.DATA / "heads"]
    if (root := native.checkout()) is not None:
        places.append(root / "heads")
    if (package := importlib.util.find_spec(PACKAGE)) is not None:
        places += map(Path, package.submodule_search_locations or ())
    return {file.parent.name: file.parent for place in places for file in sorted(place.glob(f"*/{CONFIG}"))}


def weight_files(names: Collection[str]) -> list[str]:
    """Return the files in `names` that hold a head's weights. Shards are in order."""
    return [MEDUSA_WEIGHTS] if MEDUSA_WEIGHTS in names else sorted(n for n in names if fnmatch(n, "model*.safetensors"))


def _wanted(method: str, names: Collection[str], where: str) -> list[str]:
    """Return the names of a head's weight files on the hub.

    Raises NotFound if there is no head, and UnsupportedModel if there are only pickles, before any file is fetched.
    """
    files = weight_files(names)
    pickles = sorted(name for name in names if Path(name).suffix in PICKLES)
    if not files and pickles:
        raise UnsupportedModel(
            f"{where} has weights in {pickles[0]} only, which is a pickle and runs code when it is loaded: fetch it "
            f"with `{program('hf')} download {where} --local-dir FOLDER`, {_convert()}, and write {method}:path=OUT"
        )
    if CONFIG not in names or not files:
        raise NotFound(f"{where} holds no {CONFIG if files else WEIGHTS}, and is no head: name {_known(method)}")
    return files


def _known(method: str) -> str:
    """Return the end of an error message, which lists the ways to name a head."""
    shipped = shipped_folders()
    listed = f", or one that ships here ({', '.join(shipped)})" if shipped else ""
    return (
        f"a folder with {CONFIG} and {WEIGHTS}, which `forerun train drafter --method {method} --out FOLDER` writes as "
        f"FOLDER/head, one that was published for the target, by its folder or as org/name of the hub{listed}"
    )


def read_config(path: str, method: str, tokenizer: str | None = None) -> dict[str, Any]:
    """Return the entries of a head's config.json, without the entry "forerun".

    tokenizer: the fingerprint that "forerun" must name; None = not compared. Raises NotFound if there is no head,
    BadOption for a head of another method or tokenizer, and UnsupportedModel for a pickle and for an unreadable file.
    """
    folder = Path(path)
    if folder.suffix in PICKLES or (not (folder / WEIGHTS).is_file() and any(_pickles(folder))):
        raise UnsupportedModel(
            f"{shown(path)} is a pickle, which runs code when it is loaded: {_convert()}, and name that folder"
        )
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise NotFound(f"{shown(path)} is no folder with {CONFIG} and {WEIGHTS}: name {_known(method)}")
    config = dict(read_json(folder / CONFIG))
    entry = config.pop("forerun", None)
    if not isinstance(entry, dict):
        raise BadOption(f"{shown(path)} is no head that {method} reads: name {_known(method)}")
    if entry.get("method") != method:
        raise BadOption(
            f"{shown(path)} is a head of {shown(str(entry.get('method')))} and not of {method}: name it as the drafter "
            "that it is for"
        )
    if tokenizer is not None and entry.get("tokenizer") != tokenizer:
        raise BadOption(f"{shown(path)} holds ids of another tokenizer than the target's: train a head for this target")
    return config


def read_weights(path: str, shapes: Mapping[str, tuple[int, ...]], target: Model, num_ids: int) -> dict[str, Any]:
    """Return the weights of a head as they are stored, by name: tensors, and quantised matrices.

    shapes: by name, the shapes of the weights that the head must have. Raises UnsupportedModel for a truncated file and
    for a tensor that is missing, misshapen or unknown. Raises BadOption for a head of another target.
    """
    file, weights = Path(path) / WEIGHTS, stored(Path(path))
    had = weights.pop(PROBE, None)
    if had is not None:
        _check_probe(path, had.float32(), probe(target, num_ids).float32())
    check_shapes(
        str(file), {name: tuple(tensor.shape) for name, tensor in weights.items()}, shapes, "train the head again"
    )
    return weights


def check_target(path: str, target: Model, num_ids: int) -> None:
    """Raise BadOption if `path` is a folder of `forerun train head` whose head was trained for another target."""
    if is_head(Path(path)):
        had = tensors(Path(path) / WEIGHTS, {PROBE})[PROBE]
        _check_probe(path, had.float32(), probe(target, num_ids).float32())


def stored(folder: Path) -> dict[str, Any]:
    """Return a head's weights by name, as HostTensor or QuantisedMatrix. Raises UnsupportedModel for a broken file."""
    source, matrices = _quantised(folder)
    parts = {name for matrix in matrices.values() for name in matrix.names.values()}
    whole: dict[str, Any] = {n: tensor for n, tensor in tensors(folder / WEIGHTS).items() if n not in parts}
    return whole | {name: source.quantised(name) for name in matrices}


def _quantised(folder: Path) -> tuple[SafetensorsFolder, Mapping[str, Parts]]:
    """Return a head's opened folder, and by name its quantised matrices, which are not read yet.

    Only folders of `forerun train head` have quantised matrices.
    """
    source = SafetensorsFolder(folder)
    return source, source.matrices if "forerun" in source.config else {}


def is_head(folder: Path) -> bool:
    """Return whether `forerun train head` has written this folder."""
    return (folder / CONFIG).is_file() and "forerun" in read_json(folder / CONFIG)


def stored_quantization(folder: Path) -> Quantization | None:
    """Return the format of a head's matrices; None unless `quantise_head` wrote the folder."""
    config = read_json(folder / CONFIG)
    if "forerun" not in config or "quantization_config" not in config:
        return None
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    return Quantization(weights["num_bits"], weights["group_size"])


def quantise_head(folder: Path, out: Path, quantization: Quantization) -> tuple[int, int]:
    """Write a copy of a head with quantised matrices into a new folder. Returns all weights' bytes before and after.

    Raises BadOption for an output folder that is not empty, for groups that do not divide the rows of a matrix, and for
    a head that is quantised already.
    """
    with new_folder(out):
        config = dict(read_json(folder / CONFIG))
        weights = stored(folder)
        entry = config.pop("forerun")
        written = dict[str, HostTensor]()
        scheme = scheme_of(quantization.bits, quantization.group)
        for name, weight in weights.items():
            if isinstance(weight, QuantisedMatrix):
                raise BadOption(f"{folder} is quantised already ({name}: {weight.scheme}): name the unquantised head")
            if weight.ndim != 2 or name in (*TABLES, PROBE):
                written[name] = weight
                continue
            if weight.shape[1] % scheme.group:
                raise BadOption(
                    f"quantization={str(quantization)!r} is not possible: groups of {scheme.group} do not divide the "
                    f"{weight.shape[1]} inputs of {name}"
                )
            parts = parts_of(quantised(weight, scheme))
            written |= {f"{name.removesuffix('weight')}{part}": numbers for part, numbers in parts.items()}
        said = {"quantization_config": said_of(quantization)}
        save(out, entry["method"], written, {**config, **said}, entry["tokenizer"], entry.get("target"))
        before, after = (sum(tensor.nbytes for tensor in some.values()) for some in (weights, written))
        return before, after


def tensors(file: Path, names: Container[str] | None = None) -> dict[str, HostTensor]:
    """Return the tensors `names` of a file; None = all tensors. Raises UnsupportedModel for a broken file."""
    entries = safetensors_file.read_header(OpenFile(file))
    return {name: entry.whole() for name, entry in entries.items() if names is None or name in names}


def shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a safetensors file's tensors by name, without reading the tensors."""
    return {name: entry.shape for name, entry in safetensors_file.read_header(OpenFile(file)).items()}


def own_weights(path: str, target: Known, rounded: Quantization | None = None, *, all_rows: bool) -> Beside:
    """Return how much memory a head takes beside its target, by the headers of the files in the head's folder.

    rounded: the format to which matrices are rounded; None = no rounding. A rounded LM head keeps at least TABLE_BITS
    bits, as in any model. A head without an LM head copies rows of the target's LM head for the ids that it drafts.
    all_rows: whether a head that drafts every id copies all these rows. Embeddings are counted even if they equal the
    target's, because the headers do not show whether they are equal.
    """
    folder = Path(path)
    files = weight_files([file.name for file in folder.glob("*")])
    head_shapes = {tensor: shape for file in files for tensor, shape in shapes(folder / file).items()}
    for name, parts in _quantised(folder)[1].items():
        head_shapes = {n: s for n, s in head_shapes.items() if n not in parts.names.values()} | {name: parts.shape}
    num_rows = next(
        (head_shapes[ids][0] for ids in OWN_IDS if ids in head_shapes), target.vocab_size if all_rows else 0
    )
    kept = {n: s for n, s in head_shapes.items() if n not in (*OWN_IDS, PROBE) and not IGNORED.match(n)}
    matrices = [
        ((s[0], s[1]), _scheme(rounded, TABLE_BITS if LM_HEAD.match(n) else MATRIX_BITS))
        for n, s in kept.items()
        if len(s) == 2 and n not in TABLES
    ]
    if num_rows and not any(map(LM_HEAD.match, kept)):
        matrices.append(((num_rows, target.hidden_size), _scheme(rounded, TABLE_BITS)))
    floats = [shape for tensor, shape in kept.items() if len(shape) != 2 or tensor == LOOK_AHEAD]
    return Beside(tuple(matrices), math.prod(kept.get(EMBEDDINGS, (0,))), sum(map(math.prod, floats)))


def _scheme(rounded: Quantization | None, least_bits: int) -> Scheme | None:
    return None if rounded is None else scheme_of(max(least_bits, rounded.bits), rounded.group)


def check_shapes(
    where: str, held: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], again: str
) -> None:
    """Raise UnsupportedModel for a tensor that is missing, has another shape, or is unknown.

    where: the file's name. held: the shapes of the file's tensors. wanted: the shapes that the tensors must have.
    again: the advice at the end of messages about missing or unknown tensors.
    """
    for name, shape in wanted.items():
        if name not in held:
            raise UnsupportedModel(f"{shown(where)} has no tensor {name}: {again}")
        if held[name] != shape:
            raise UnsupportedModel(
                f"{shown(where)} has {name} of shape {list(held[name])}, and its config.json and the target ask for "
                f"{list(shape)}: name a head of this target"
            )
    if more := sorted(held.keys() - wanted.keys()):
        raise UnsupportedModel(f"{shown(where)} holds the tensor {shown(more[0])}, which no such head has: {again}")


def draft_ids(path: str, d2t: HostTensor | None, num_ids: int) -> Ids:
    """Return the ids [n] of the target that a head drafts, in ascending order.

    d2t [n]: for each id of the head, the number to add to get the target's id; None = the head drafts all ids of the
    target. Raises UnsupportedModel if the ids do not ascend, or are no ids of the target.
    """
    if d2t is None:
        return np.arange(num_ids)
    ids = np.arange(len(d2t)) + d2t.values.astype(np.int64)
    if len(ids) == 0 or ids[0] < 0 or ids[-1] >= num_ids or not (ids[1:] > ids[:-1]).all():
        raise UnsupportedModel(f"{shown(path)}: d2t must lead to ascending ids below {num_ids}: train the head again")
    return ids


def feed_forward_shapes(num_heads: int, inner: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of the layer of the drafter blockwise, by name.

    inner: the number of hidden units. width: the target's hidden size.
    """
    outer = num_heads * width
    return {
        "hidden.weight": (inner, width),
        "hidden.bias": (inner,),
        "output.weight": (outer, inner),
        "output.bias": (outer,),
    }


def _check_probe(path: str, had: Floats, wanted: Floats) -> None:
    if had.shape != wanted.shape or _size(had - wanted) > MOST_UNLIKE**2 * _size(had):
        raise BadOption(
            f"{shown(path)} was trained for a target with other weights than this one: train a head for this target"
        )


def _size(numbers: Floats) -> float:
    """Return the sum of the squares of all numbers."""
    return mass(np.square(numbers).ravel())


def _pickles(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*") if file.suffix in PICKLES] if folder.is_dir() else []


def published_config(path: str, key: str) -> dict[str, Any] | None:
    """Return the entries of a published head's config.json; None for any other folder, or if `key` is missing."""
    folder = Path(path)
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        return None
    config = read_json(folder / CONFIG)
    return config if key in config and "forerun" not in config else None


def _convert() -> str:
    return f"convert it with `{program('forerun')} convert-head FOLDER OUT`, which runs none of it"
