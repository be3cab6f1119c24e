"""Refuses checkpoints that forerun does not read. The error messages say how to get a readable checkpoint.

A checkpoint is judged by the names of its files, in a folder or in the hub's listing. No function here reads weights,
so that a bad checkpoint is refused early. Unless stated otherwise, the errors are NotFound or UnsupportedModel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from forerun.errors import NotFound, UnsupportedModel, shown
from forerun.models.gguf.pieces import models_of
from forerun.text.files import unreadable
from forerun.text.json_files import read_json

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
KEYS = ("quantization_config", "compression_config")  # keys of config.json that say how weights are quantised
READABLE = "GPTQ, AWQ, FP8, MXFP4 or compressed-tensors of 4 or 8 bits"
# Files that older quantisers leave instead of a key in config.json -> their key that names the method.
QUANTISERS = {
    "quantize_config.json": "quant_method",
    "quant_config.json": "version",
    "hf_quant_config.json": "producer",
}

WANTED = (
    "a model of `forerun models`, a folder that holds config.json, model.safetensors and tokenizer.json, a GGUF file, "
    "or a model of the hub as org/name"
)
GGUF, PICKLES = (".gguf",), (".bin", ".pt", ".pth", ".ckpt")
OTHERS = (".safetensors", ".h5", ".msgpack", ".onnx")

ReadJson = Callable[[str], Mapping[str, Any]]


def refuse_path(path: Path) -> NoReturn:
    """Raise an error for a path that no file format recognises: a folder without config.json, or a file.

    The message depends on the path, and says how to go on.
    """
    if path.is_dir():
        refuse_without_weights(names_in(path), str(path), lambda name: read_json(path / name))
        raise _no_config(str(path))
    if path.suffix in PICKLES:
        raise UnsupportedModel(f"{path} is {_pickle_way_out(str(path.parent))}")
    if path.suffix in OTHERS:
        raise UnsupportedModel(
            f"{path} is one file of a checkpoint: name its folder, {path.parent}, which must hold config.json and "
            "tokenizer.json too"
        )
    raise NotFound(f"{path} is a file that holds no model: name {WANTED}")


def refuse_without_weights(names: Collection[str], where: str, read: ReadJson) -> None:
    """Raise an error unless the files `names` include model.safetensors or an index of shards.

    The message gives advice for the files that exist. Without config.json and without weights in another format, no
    error is raised. where: the folder or the hub id, for messages. read(name): returns the object in a JSON file.
    """
    if SINGLE in names or INDEX in names:
        return
    if ADAPTER in names:
        raise UnsupportedModel(_adapter(where, read(ADAPTER).get("base_model_name_or_path")))
    if files := _with_suffix(names, GGUF):
        models = list(models_of(files))
        named = Path(where, models[0]) if Path(where).is_dir() else f"{where}:{models[0]}"
        raise UnsupportedModel(f"{where} has weights in {_few(models)} only: name one such file, as {named}")
    if files := _with_suffix(names, PICKLES):
        raise UnsupportedModel(f"{where} has weights in {_few(files)} only, {_pickle_way_out(where)}")
    if files := _with_suffix(names, OTHERS):
        raise UnsupportedModel(
            f"{where} has weights in {_few(files)} only, and forerun reads {SINGLE}, or the shards that {INDEX} names: "
            "name a checkpoint that has them, as save_pretrained of transformers writes it"
        )
    if CONFIG in names:
        raise NotFound(f"there is neither {SINGLE} nor {INDEX} in {where}: fetch the whole checkpoint")


def refuse_without_config(names: Collection[str], where: str, read: ReadJson) -> None:
    """Raise an error if `names` has no config.json. The message gives advice for weights of other formats.

    where, read: see `refuse_without_weights`.
    """
    if CONFIG not in names:
        refuse_without_weights(names, where, read)
        raise _no_config(where)


def names_in(folder: Path) -> list[str]:
    """Return the names of the files and folders in a folder. Raises NotFound for an unreadable folder."""
    try:
        return [path.name for path in folder.iterdir()]
    except OSError as error:
        raise unreadable(folder, error) from error


def shard_names(index: Path) -> list[str]:
    """Return the file names that an index of shards lists, without repetition.

    Raises NotFound for a name that is not a plain file name: a path, `..`, an empty name, or a name with control
    characters. Raises UnsupportedModel for an index that lists no files.
    """
    places = read_json(index).get("weight_map")
    names = list(places.values()) if isinstance(places, Mapping) else []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", "..") or not name.isprintable():
            raise NotFound(f"{index} names {shown(name)}, which is no file beside it: fetch the whole checkpoint")
    if not names:
        raise UnsupportedModel(f"{index} names no file of weights: fetch it again")
    return sorted(set(names))


def refuse_without_tokenizer(names: Collection[str], where: str) -> None:
    """Raise an error if `names` has no tokenizer.json. where: the folder or the hub id, for the message."""
    refuse_slow_tokenizer(names, where)
    if TOKENIZER not in names:
        raise NotFound(f"there is no tokenizer.json in {where}: copy it from the model that this one was made of")


def refuse_slow_tokenizer(names: Collection[str], where: str) -> None:
    """Raise UnsupportedModel if `names` has files of a slow tokenizer, such as vocab.txt, and no tokenizer.json.

    The message says how to convert the tokenizer. A folder without any tokenizer is not refused, because the ids of its
    model may stand for something other than text.
    """
    slow = [name for name in ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt") if name in names]
    if TOKENIZER in names or not slow:
        return
    raise UnsupportedModel(
        f"{where} has its tokenizer in {_few(slow)} only, and forerun reads tokenizer.json: convert it with "
        f"transformers, AutoTokenizer.from_pretrained({where!r}).save_pretrained(FOLDER), where FOLDER holds the rest "
        "of the checkpoint"
    )


def refuse_code(raw: Mapping[str, Any], known: Collection[str], computed: str | None = None) -> None:
    """Raise UnsupportedModel if config.json asks for Python code that comes with the checkpoint (`auto_map`).

    For a model_type that forerun knows, only code for the model itself is refused. For any other model_type, all code
    is refused. known: the model_types that forerun reads. computed: a model class that is not refused for a known
    model_type, because forerun computes the same results; None = no such class.
    """
    auto_map = raw.get("auto_map")
    classes = auto_map if isinstance(auto_map, Mapping) else {}
    own_model = next((name for name in classes if name.startswith("AutoModel") and classes[name] != computed), None)
    is_known = raw.get("model_type") in known
    if not classes or (is_known and own_model is None):
        return
    entry = own_model or next(iter(classes))
    way_out = "take auto_map out of config.json if that code computes what the plain architecture does"
    raise UnsupportedModel(
        f"config.json has auto_map={shown({entry: classes[entry]})} for model_type={shown(raw.get('model_type'))}, and "
        f"forerun never runs a checkpoint's code: use a checkpoint of model_type {' or '.join(known)} without it"
        + (f", or {way_out}" if is_known else "")
    )


def refuse_quantiser_files(names: Collection[str], where: str, read: ReadJson) -> None:
    """Raise UnsupportedModel if a quantiser wrote its settings into a separate file (QUANTISERS), not into config.json.

    The message names the quantisation method if that file names it. where, read: see `refuse_without_weights`.
    """
    left = sorted(QUANTISERS.keys() & set(names))
    if left and CONFIG in names and any(read(CONFIG).get(key) for key in KEYS):
        return  # config.json says how weights are quantised
    for name in left:
        method = read(name).get(QUANTISERS[name])
        said = f" ({QUANTISERS[name]}={shown(method)})" if method is not None else ""
        raise UnsupportedModel(f"{where} holds {name}{said}, {_QUANTISED}")


def quantised_tensor(name: str, file: Path, dtype: str) -> UnsupportedModel:
    """Return the error for a tensor whose dtype occurs only in quantised checkpoints."""
    return UnsupportedModel(f"{name} in {file} has type {dtype}, {_QUANTISED}")


def _no_config(where: str) -> NotFound:
    return NotFound(f"there is no config.json in {where}: name {WANTED}")


_QUANTISED = (
    "which means quantised weights, and no quantization_config in config.json says how they are to be read: name the "
    f"unquantised original, or one quantised as {READABLE} by a tool that writes that key"
)


def _adapter(where: str, base: object) -> str:
    named = shown(base) if base else "a model that it does not name"
    return (
        f"{where} is an adapter to {named} and not a whole model: merge it with peft, AutoPeftModelForCausalLM."
        f"from_pretrained({where!r}).merge_and_unload().save_pretrained(FOLDER), and copy the tokenizer's files of "
        f"{base if base else 'that model'} into FOLDER"
    )


def _pickle_way_out(where: str) -> str:
    return (
        "a pickle, which may run any code while it is read, so forerun reads safetensors only: if you trust it, "
        f"convert it with transformers, AutoModelForCausalLM.from_pretrained({where!r}).save_pretrained(FOLDER), and "
        "the same with AutoTokenizer"
    )


def _with_suffix(names: Collection[str], suffixes: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if name.endswith(suffixes))


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
