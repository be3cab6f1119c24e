"""Loads models with their weights from checkpoints that opened.py has opened.

A checkpoint that would be computed wrongly is refused, with the reason. configs.py checks config.json, refusals.py
rejects checkpoints of other formats, source/ reads the known formats, and weights.py checks the weights.
"""

from __future__ import annotations

import ctypes
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from forerun.blocks import EMBEDDING, HEAD, Spec, reaching, weight_shapes
from forerun.config import AUTO, Quantization
from forerun.errors import BadOption, InternalError, UnsupportedModel, shown
from forerun.host_tensor import dtype_name
from forerun.models.opened import OpenedCheckpoint
from forerun.models.quantising import QuantisingSource, usual_rounding
from forerun.models.source import Source
from forerun.models.weights import StoredWeights, same
from forerun.ops import load_model, make
from forerun.ops.model import LoadedModel
from forerun.ops.operators import Operators
from forerun.ops.passes import kinds_in_words
from forerun.ops.quantised import Scheme
from forerun.text.tokenizer import Tokenizer, needed

LOG = logging.getLogger(__name__)
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Checkpoint:
    """Holds a loaded model. opened: the checkpoint from which the model was loaded.

    tokenizer: None where the caller did not ask for a tokenizer, or the checkpoint has none. quantization: the option
    with which the model was loaded. stored: the dtypes in which the files hold the matrices, in words.
    """

    opened: OpenedCheckpoint
    model: LoadedModel
    tokenizer: Tokenizer | None = None
    quantization: str | None = None
    stored: str | None = None

    @property
    def name(self) -> str:
        """The name of the folder or the file, or the hub id."""
        return self.opened.name

    @property
    def folder(self) -> Path:
        """The folder with config.json and the tokenizer's files."""
        return self.opened.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """The config.json from which the model was read."""
        return self.opened.raw

    @property
    def end_ids(self) -> frozenset[int]:
        """The token ids that end an output, see `end_ids_of`."""
        return self.opened.end_ids

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The weights by name, as torch tensors. Raises InternalError where a backend has packed them."""
        weights: Mapping[str, Any] | None = getattr(self.model, "weights", None)
        if weights is None:
            raise InternalError(f"the weights of {self.name} are packed: load it for the reference operators")
        return weights

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises NotFound where there is none."""
        return needed(self.tokenizer, self.name)


def load_checkpoint(
    name: str | Path | OpenedCheckpoint,
    *,
    dtype: object = "auto",
    device: str = "cpu",
    ops: Operators | Callable[[Spec], Operators] | None = None,
    with_tokenizer: bool = False,
    ignore_config_keys: Collection[str] = (),
    quantization: str | None = None,
    max_seq_len: int | None = None,
) -> Checkpoint:
    """Load a checkpoint: a folder in the format of `save_pretrained`, a GGUF file, or a model of the hub.

    name: the checkpoint's name, see `locate`, or an opened checkpoint. dtype: the dtype of the weights: "float32",
    "bfloat16", a torch type, or "auto" (see `Operators.auto_dtype`). "auto" means bfloat16 for the native operators on
    a CPU, float32 for other operators on a CPU, and usually the checkpoint's dtype on other devices. ops: the
    operators, or a function that gets the spec and returns operators; None = the reference operators. with_tokenizer:
    whether to load the tokenizer; it is loaded before the weights. ignore_config_keys: the keys of config.json to treat
    as missing.

    quantization: int8 or int4[:group=N][:again] rounds matrices while they are read; see `Quantization`, which explains
    `again`. "auto" rounds matrices where this makes a draft model faster. Operators that cannot compute with rounded
    weights get the rounded values in `dtype`. max_seq_len: the number of tokens in the longest text, for rotary
    positions that depend on it, see `blocks.reaching`.

    Operators that pack weights get the tensors one by one, and each tensor is freed once it is packed. Other operators
    get all tensors, each read into its final place. So the peak memory use is the size of the model plus some 20 MB.

    Raises NotFound for a missing checkpoint, BadOption for a checkpoint that cannot run as a model by itself,
    UnsupportedModel for a checkpoint that would be computed wrongly, CapacityError where the disk or the memory is too
    small.
    """
    opened = name
    if not isinstance(opened, OpenedCheckpoint):
        opened = OpenedCheckpoint.of(opened, ignore_config_keys, with_tokenizer=with_tokenizer)
    opened.as_model().fetch_weights()
    source = opened.weights
    config = reaching(opened.spec, max_seq_len)
    if (kind := opened.raw.get("model_type")) != config.model_type:
        LOG.warning("%s is a %s, of which the text model runs alone, a %s", opened.asked, kind, config.model_type)
    tokenizer = opened.tokenizer if with_tokenizer else None
    config = checked(source, config, opened.path)
    matrices = [stored for stored in source.tensors.values() if len(stored.shape) == 2]
    bits = [stored.scheme.bits for stored in matrices if stored.scheme is not None]
    in_words = kinds_in_words(bits, [stored.dtype for stored in matrices if stored.scheme is None])
    operators = make("reference", device) if ops is None else ops if isinstance(ops, Operators) else ops(config)
    if quantization == AUTO:
        packs = packed_schemes(operators, _dtype(dtype, device, source, operators))
        quantization = usual_rounding(source.tensors, packs)
    if quantization is not None:
        source = cast(Source, QuantisingSource(source, config, Quantization.parse(quantization)))
    computed = _dtype(dtype, device, source, operators)
    stored = StoredWeights(source, computed, packed_schemes(operators, computed))
    # Quantised matrices are among the weights only where the operators say that they pack them.
    packed = packed_schemes(operators, computed)
    schemes = {name: tensor.scheme or tensor.floats for name, tensor in source.tensors.items()}
    is_packed = {name: scheme is not None and packed(scheme) for name, scheme in schemes.items()}
    widened = [each.was for name, each in source.tensors.items() if each.was and (each.scheme or not is_packed[name])]
    for was, num in Counter(widened).items():
        hint = ": quantization=int8 rounds them" if quantization is None else ""
        said = "%s has %d matrices of %s, which become numbers while they are loaded%s"
        LOG.warning(said, opened.asked, num, was, hint)
    model = load_model(config, stored, operators, device=device, consume=True)
    opened.close()
    _give_freed_memory_back()
    return Checkpoint(opened, model, tokenizer, quantization, in_words)


def packed_schemes(ops: Operators, dtype: str) -> Callable[[Scheme], bool]:
    """Return a function that gets a scheme, and returns whether the operators compute with its codes directly.

    dtype: the dtype of the model. Unless it is bfloat16, the function always returns False, because products with
    quantised matrices round their inputs to int8.
    """
    return ops.packs_scheme if dtype == "bfloat16" else Operators().packs_scheme


def _give_freed_memory_back() -> None:
    """Return freed memory to the system. Otherwise glibc's allocator would keep some 10 MB of freed blocks."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)


# ------------------------------------------------------------------------------------------------------------ weights


def checked(source: Source, spec: Spec, path: Path) -> Spec:
    """Check the names and shapes of all stored tensors, and return the spec with which to load the model.

    The returned spec is `spec`, but with an untied LM head if the files store such a head (see `as_stored`). Raises
    UnsupportedModel unless the source has exactly the tensors of the returned spec. path: the checkpoint, for messages.
    """
    spec = as_stored(source, spec)
    check_shapes(stored_shapes(source, spec), weight_shapes(spec), str(path), in_one_file=path.is_file())
    return spec


def as_stored(source: Source, config: Spec) -> Spec:
    """Return the spec `config`. If the files store an LM head that differs from the embedding, untie it.

    transformers 5 writes such files and uses the stored LM head, but transformers 4 uses the embedding. So
    UnsupportedModel is raised unless config.json says that transformers 5 or later wrote the files.
    """
    if not config.tied or not {HEAD, EMBEDDING} <= source.tensors.keys() or same(source, HEAD, EMBEDDING):
        return config
    version = re.match(r"\d+", str(source.config.get("transformers_version")))
    if version is not None and int(version[0]) >= 5:
        return replace(config, tied=False)
    raise UnsupportedModel(
        f"{source.folder} sets tie_word_embeddings=True and holds a different {HEAD}: set it to False, or drop that "
        "tensor"
    )


def stored_shapes(source: Source, config: Spec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the stored tensors, by name.

    A stored LM head is left out if the spec ties it to the embedding, and the embedding is stored, too.
    """
    shapes = {name: stored.shape for name, stored in source.tensors.items()}
    return {name: shape for name, shape in shapes.items() if name != HEAD or not (config.tied and EMBEDDING in shapes)}


def check_shapes(
    stored: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    where: str,
    *,
    in_one_file: bool = False,
) -> None:
    """Raise UnsupportedModel if a tensor is missing, is not wanted, or has a wrong shape.

    stored, wanted: the shapes by tensor name. where: the checkpoint, for the message. in_one_file: whether config and
    weights are one file, as in GGUF.
    """
    config, way_out = ("metadata", "fetch the file again") if in_one_file else ("config.json", _FROM_ONE_PLACE)
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise UnsupportedModel(
            f"{where} has no tensor {_first(missing)}, which its {config} asks for: "
            f"{_NO_HEAD if missing[0] == HEAD and not in_one_file else way_out}"
        )
    for name, shape in wanted.items():
        if stored[name] != shape:
            raise UnsupportedModel(
                f"{where} has {name} of shape {list(stored[name])}, and its {config} asks for {list(shape)}: {way_out}"
            )
    if more := [name for name in stored if name not in wanted]:
        raise UnsupportedModel(
            f"{where} holds the tensor {_first(more)}, which its {config} does not ask for: {way_out}, or "
            "name another checkpoint"
        )


_FROM_ONE_PLACE = "weights and config.json must be of one model, so fetch both again from one place"

_NO_HEAD = (
    "set tie_word_embeddings to true if the embedding is meant; or save the model again with AutoModelForCausalLM, if "
    "AutoModel saved it, which leaves the head out"
)


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _dtype(dtype: object, device: str, source: Source, ops: Operators) -> str:
    if not isinstance(dtype, str):
        return dtype_name(dtype)
    name = dtype.removeprefix("torch.")
    if name == "auto":
        stored = source.tensors[EMBEDDING]
        return ops.auto_dtype(device, stored.dtype if stored.scheme is None else "bfloat16")
    if name not in DTYPES:
        raise BadOption(f"dtype={shown(name)} is not possible: it must be one of {['auto', *DTYPES]}")
    return name
