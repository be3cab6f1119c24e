"""Writes quantised checkpoints in the pack-quantized format of compressed-tensors.

Such a checkpoint is later loaded without rounding. Each matrix becomes several tensors, see packings.py. Other tensors,
and the small files of the checkpoint such as the tokenizer, are copied. config.json gets a quantization_config.
transformers 5 can read int8 checkpoints (CompressedTensorsConfig(dequantize=True)). It cannot read int4 checkpoints,
because they have two schemes: 4 bits for the layers, 8 bits for embedding and LM head.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forerun.blocks import itemsize
from forerun.config import Quantization
from forerun.errors import BadOption, UnsupportedModel
from forerun.host_tensor import Array, HostTensor
from forerun.models.families import names_of
from forerun.models.hub import SMALL
from forerun.models.loading import checked
from forerun.models.naming import Names
from forerun.models.opened import OpenedCheckpoint
from forerun.models.packings import pack
from forerun.models.quantising import QuantisingSource
from forerun.models.refusals import CONFIG
from forerun.models.saving import SHARD_BYTES, new_folder, write_json, write_weights
from forerun.models.source import Stored
from forerun.ops.quantised import QuantisedMatrix


def quantise_checkpoint(
    name: str | Path, folder: Path, quantization: Quantization, ignore_config_keys: Collection[str] = ()
) -> tuple[int, int]:
    """Quantise the checkpoint `name` (a folder or a hub id), and write the result to the new folder `folder`.

    Returns the size of the weights in bytes, before and after. Raises UserError for a checkpoint that cannot be loaded
    or is quantised already.
    """
    opened = OpenedCheckpoint.of(name, ignore_config_keys, with_tokenizer=False).as_model()
    config = opened.spec
    names = names_of(config)
    if names is not None and not names.only_renames:
        raise UnsupportedModel(
            f"a model of model_type={config.model_type!r} is not written with fewer bits, because its files join "
            "matrices: load it with quantization= instead"
        )
    opened.fetch_weights()
    source = opened.weights
    config = checked(source, config, opened.path)
    for tensor, stored in source.tensors.items():
        if stored.scheme is not None:
            raise BadOption(f"{name} is quantised already ({tensor}: {stored.scheme}): name the unquantised original")
    before = sum(math.prod(stored.shape) * itemsize(stored.dtype) for stored in source.tensors.values())
    return before, save_quantised(QuantisingSource(source, config, quantization), folder, names)


def save_quantised(source: QuantisingSource, folder: Path, names: Names | None = None) -> int:
    """Write a folder with the rounded weights of a source. Returns the size of the written weights in bytes.

    names: the published tensor names of the source, where they differ from ours. Raises BadOption for a folder that is
    not empty.
    """
    with new_folder(folder):
        tensors = dict[str, HostTensor]()
        for name in source.tensors:
            module, _, ending = name.rpartition(".")
            theirs = module if names is None else names.published(module)
            tensors |= {f"{theirs}.{part}": tensor for part, tensor in _tensors(source, name, ending).items()}
        write_weights(folder, tensors, None, SHARD_BYTES)
        for pattern in SMALL:
            for path in source.folder.glob(pattern):
                to = folder / path.relative_to(source.folder)
                to.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, to)
        write_json(folder / CONFIG, {**source.config, "quantization_config": quantization_config(source, names)})
        return sum(tensor.nbytes for tensor in tensors.values())


def _tensors(source: QuantisingSource, name: str, ending: str) -> dict[str, HostTensor]:
    """Return the tensors in which compressed-tensors stores the weight `name`. The keys are the names' last parts.

    ending: the last part of the weight's published name, which is the only key if the weight is not quantised.
    """
    stored = source.tensors[name]
    if stored.scheme is None:
        return {ending: HostTensor.joined([block.copy() for block in source.blocks(name)])}
    return parts_of(source.quantised(name))


def parts_of(matrix: QuantisedMatrix) -> dict[str, HostTensor]:
    """Return the tensors in which compressed-tensors stores a rounded matrix. The keys are the names' last parts."""
    bits = matrix.scheme.bits
    codes = list[Array]()
    scales = list[HostTensor]()
    zeros = list[Array]()
    for rows in matrix.blocks():
        assert rows.zeros is not None
        codes.append(pack(rows.codes, bits))
        scales.append(rows.scales)
        zeros.append(rows.zeros)
    tensors = {
        "weight_packed": HostTensor.of(np.concatenate(codes)),
        "weight_scale": HostTensor.joined(scales),
        "weight_shape": HostTensor.of(np.array(matrix.shape, np.int64)),
    }
    if bits == 4:  # 8 bits are symmetric
        tensors["weight_zero_point"] = HostTensor.of(pack(np.concatenate(zeros).T, bits)).T.contiguous()
    return tensors


def quantization_config(source: QuantisingSource, names: Names | None = None) -> dict[str, Any]:
    """Return the quantization_config for the config.json that `save_quantised` writes."""
    whole = [name.rpartition(".")[0] for name, stored in source.tensors.items() if _is_whole_matrix(stored)]
    return said_of(source.quantization, whole if names is None else [names.published(module) for module in whole])


def said_of(quantization: Quantization, whole: Sequence[str] = ()) -> dict[str, Any]:
    """Return the quantization_config that describes rounded weights. whole: the modules that are not rounded."""
    bits, group = quantization.bits, quantization.group
    if bits == 8:
        groups = {"group_0": _config_group(["Linear", "Embedding"], 8, group)}
    else:
        groups = {"group_0": _config_group(["Linear"], bits, group)}
        groups["group_1"] = _config_group(["re:.*embed_tokens$", "re:.*lm_head$"], 8, group)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(whole),
        "kv_cache_scheme": None,
    }


def _is_whole_matrix(stored: Stored) -> bool:
    return len(stored.shape) == 2 and stored.scheme is None


def _config_group(targets: list[str], bits: int, group: int) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": bits == 8,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
    }
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
