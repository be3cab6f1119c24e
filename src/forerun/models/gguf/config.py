"""Converts the metadata of a GGUF file into the config.json of the checkpoint from which the file was made.

Each family's `GGUF` maps metadata keys to keys of config.json. Other metadata keys of the architecture are copied into
config.json unchanged. configs.py then refuses those that might change what the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.blocks import FINAL_NORM, Rope
from forerun.errors import UnsupportedModel
from forerun.models.configs import MOST_TOKENS, RANGES, ROPE_KINDS, number, share
from forerun.models.families import gguf_families
from forerun.models.gguf.header import Header, Texts, Value
from forerun.models.naming import ROPE_FREQS, Gguf, Metadata
from forerun.ops.rotary import attention_factor, inverse_frequencies

ROPE_SHORT, ROPE_LONG = (f"rope_factors_{name}.weight" for name in ("short", "long"))
ROPE_TENSORS = (ROPE_FREQS, ROPE_SHORT, ROPE_LONG)  # the last two are longrope's
# Keys that are read elsewhere, repeat what the tensors show, or count what is not there.
_READ = (
    "attention.sliding_window rope.scaling.type rope.scaling.factor rope.scale_linear rope.scaling.finetuned "
    "rope.scaling.original_context_length rope.dimension_count attention.value_length vocab_size "
    "tensor_data_layout expert_used_count"
)
READ = frozenset(_READ.split())
# Keys of rotary positions that are scaled by YaRN -> keys of `rope_scaling`.
YARN = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
TEMPERATURE = "rope.scaling.attn_factor"  # cos and sin are multiplied by it, in addition to YaRN's factor
TOLERANCE = 1e-5  # of the factors of rotary frequencies, which are stored in float32


def read_config(header: Header, rope_factors: Mapping[str, NDArray[np.float32]], path: Path) -> dict[str, Any]:
    """Return the config.json of a GGUF file. rope_factors: the contents of those ROPE_TENSORS that are in the file.

    Raises UnsupportedModel for an architecture that no family reads, and for a model that config.json cannot describe.
    """
    kind, model_type, gguf = family_of(header, path)
    metadata = {
        key.removeprefix(f"{kind}."): _plain(v) for key, v in header.metadata.items() if key.startswith(f"{kind}.")
    }
    raw: dict[str, Any] = {"model_type": model_type, "vocab_size": _rows(header, gguf, path)}
    raw |= {name: _one_for_all(metadata[key]) for key, name in gguf.keys.items() if key in metadata}
    for key in ("embedding_length", "attention.head_count"):
        name = gguf.keys[key]
        if type(raw.get(name)) is not int or raw[name] < 1:
            raise UnsupportedModel(f"{path} sets no possible number as {name} of {kind}: fetch it again")
    raw["tie_word_embeddings"] = "output.weight" not in header.tensors
    if "rope.freq_base" in gguf.keys:
        raw |= _rotary(gguf, metadata, rope_factors, raw, path)
    factors = {name: stored.tolist() for name, stored in rope_factors.items() if gguf.takes_factors}
    raw |= gguf.more({**metadata, **factors}, header.tensors)
    embedded = header.tensors["token_embd.weight"].type
    raw["torch_dtype"] = "bfloat16" if embedded.scheme else embedded.dtype
    scaling = raw.get("rope_scaling") or {}
    scaled = {*YARN, *gguf.yarn, TEMPERATURE} if scaling.get("rope_type") == "yarn" else set[str]()
    scaled |= {TEMPERATURE} if scaling.get("rope_type") == "longrope" else set()
    if scaling.get("rope_type") == "yarn" and not gguf.rounds_yarn:
        raw["rope_scaling"] = {**scaling, "truncate": False}
    unknown = metadata.keys() - READ - gguf.keys.keys() - gguf.by_more - scaled
    return raw | {f"{kind}.{key}": metadata[key] for key in sorted(unknown)}


def family_of(header: Header, path: Path) -> tuple[str, str, Gguf]:
    """Return a file's architecture, the model_type of the architecture's family, and the family's `Gguf`."""
    kind = text(header.metadata, "general.architecture", path)
    known = gguf_families()
    if kind not in known:
        raise UnsupportedModel(
            f"{path} has general.architecture={kind!r:.80}, which is not supported: it must be one of {list(known)}"
        )
    return kind, *known[kind]


def _rotary(
    gguf: Gguf, metadata: Metadata, factors: Mapping[str, NDArray[np.float32]], raw: dict[str, Any], path: Path
) -> dict[str, Any]:
    """Return the entries of config.json for the head size and rotary positions.

    Also sets the head size, and the rotated share of a head, in `raw`. factors: the contents of the ROPE_TENSORS that
    are in the file, by name.
    """
    head_dim = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    turned = metadata.get("rope.dimension_count", head_dim)
    whole = ["rope.dimension_count", "attention.value_length"]
    if gguf.turned_part is not None and type(head_dim) is int and type(turned) is int and 0 < turned <= head_dim:
        raw[gguf.turned_part] = share(turned, head_dim)
        whole.remove("rope.dimension_count")
    for key in whole:
        if metadata.get(key, head_dim) != head_dim:
            raise UnsupportedModel(
                f"{path} sets {gguf.architecture}.{key}={metadata[key]!r:.80}, which forerun does not compute: it must "
                f"be the size of a head, {head_dim!r:.80}"
            )
    raw["head_dim"] = head_dim
    return {"head_dim": head_dim, "rope_scaling": _rope_scaling(gguf, metadata, factors, raw, path)}


def text(metadata: Mapping[str, Value], key: str, path: Path, default: str | None = None) -> str:
    """Return the text under `key` of the metadata, or `default` where the key is missing.

    Raises UnsupportedModel for a text that is not UTF-8, and for a missing key without a default.
    """
    value = metadata.get(key)
    if value is None and default is not None:
        return default
    try:
        if isinstance(value, bytes):
            return value.decode()
    except UnicodeDecodeError:
        pass
    raise UnsupportedModel(f"{path} sets no UTF-8 text as {key}: fetch it again")


def _plain(value: Value) -> Any:
    """Convert a metadata value to a value that JSON can hold."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Texts):
        return [item.decode(errors="replace") for item in value.read()]
    return value.tolist() if isinstance(value, np.ndarray) else value


def _one_for_all(value: Any) -> Any:
    """If `value` is a list of equal values, one for each layer, return the first; return any other value unchanged."""
    return value[0] if isinstance(value, list) and value and all(item == value[0] for item in value) else value


def _rows(header: Header, gguf: Gguf, path: Path) -> int:
    norms = [f"{theirs}.weight" for theirs, ours in gguf.names.outer.items() if f"{ours}.weight" == FINAL_NORM]
    for names in (["token_embd.weight"], norms):
        if not header.tensors.keys() & set(names):
            raise UnsupportedModel(f"{path} has no tensor {names[0]}: fetch it again, whole and with weights")
    return header.tensors["token_embd.weight"].shape[0]


# -------------------------------------------------------------------------------------------------- rotary positions


def _rope_scaling(
    gguf: Gguf, metadata: Metadata, tensors: Mapping[str, NDArray[np.float32]], raw: Mapping[str, Any], path: Path
) -> dict[str, Any] | None:
    factors = tensors.get(ROPE_FREQS)
    if tensors.keys() - {ROPE_FREQS}:
        return _longrope(metadata, tensors, raw, path)
    kind = metadata.get("rope.scaling.type", "linear")  # as in llama.cpp, where only a factor is given
    factor = metadata.get("rope.scaling.factor") or metadata.get("rope.scale_linear") or 1
    if kind == "yarn" and factors is None:
        return _yarn(metadata, factor, {**YARN, **gguf.yarn})
    if kind not in ("none", "linear"):
        return {"rope_type": kind, "factor": factor}  # which configs.py refuses
    linear = {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else None
    if factors is None or bool((factors == 1).all()):
        return linear
    if linear is None and (scaling := _llama3(factors, raw)) is not None:
        return scaling
    raise UnsupportedModel(
        f"{path} has factors of rotary frequencies ({ROPE_FREQS}) that are not those of Llama 3, {sorted(ROPE_KINDS)} "
        "being the kinds that are computed: use a file of the model without them"
    )


def _yarn(metadata: Metadata, factor: float, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the rope_scaling of YaRN. keys: maps metadata keys to keys of rope_scaling.

    If a file sets mscale_all_dim, mscale becomes 1, as in llama.cpp.
    """
    said = {"factor": factor, **{name: metadata[key] for key, name in keys.items() if key in metadata}}
    said |= {"mscale": 1.0} if said.get("mscale_all_dim") else {}
    times = metadata.get(TEMPERATURE, 1)
    if times != 1:
        rope = Rope(kind="yarn", factor=factor, mscale=said.get("mscale"), mscale_all_dim=said.get("mscale_all_dim"))
        said["attention_factor"] = attention_factor(rope) * times
    return {"rope_type": "yarn", **said}


def _longrope(
    metadata: Metadata, factors: Mapping[str, NDArray[np.float32]], raw: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """Return the rope_scaling of longrope. factors: the two lists of factors, which are tensors of the file."""
    if factors.keys() != {ROPE_SHORT, ROPE_LONG}:
        raise UnsupportedModel(f"{path} has only {sorted(factors)} of {ROPE_SHORT} and {ROPE_LONG}: fetch it again")
    lists = {"short_factor": factors[ROPE_SHORT].tolist(), "long_factor": factors[ROPE_LONG].tolist()}
    trained = metadata.get("rope.scaling.original_context_length")
    said = {} if trained is None else {"original_max_position_embeddings": trained}
    times, longest = metadata.get(TEMPERATURE), raw.get("max_position_embeddings")
    if type(times) is float and type(longest) is int and type(trained) is int and 1 < trained <= longest:
        usual = attention_factor(Rope(kind="longrope", factor=longest / trained, original_max_positions=trained))
        said |= {} if abs(times - usual) <= TOLERANCE * usual else {"attention_factor": times}
    return {"rope_type": "longrope", **lists, **said}


def _llama3(factors: NDArray[np.float32], raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rope_scaling of Llama 3 that gives the frequency factors `factors`; None if no scaling gives them.

    A file holds the factors in place of the scaling. High frequencies are unchanged (factor 1), and low frequencies are
    divided by `factor`. For each other frequency, the factor f follows from 1 / f = (1 - s) / factor + s. Here s = (L
    freq / 2 pi - low) / (high - low), and L is the original context length. The factors determine only the ratios of L,
    low and high, so low is taken as 1, as in all published models. raw: the entries of config.json so far; only
    head_dim and rope_theta are read.
    """
    theta = number({"rope_theta": 10000.0, **raw}, "rope_theta")
    head_dim = raw["head_dim"]
    if len(factors) * 2 != head_dim or not np.isfinite(factors).all() or factors.min() != 1:
        return None
    if factors.max() > RANGES["factor"][1]:
        return None
    plain = inverse_frequencies(Rope(theta), head_dim).astype(np.float64)
    factor = float(factors.max())
    between = (factors > 1) & (factors < factor)
    guesses = [(8192, 4.0)]
    turns = plain[between] / (2 * np.pi)
    if len(turns) > 1 and turns[0] > turns[-1]:  # numpy's polyfit warns of lines like these, or fails
        smooth = (1 / factors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
        away = turns - turns.mean()
        slope = float(away @ smooth / (away @ away))
        at_zero = float(smooth.mean() - slope * turns.mean())
        # slope = L / (high - 1), at_zero = -1 / (high - 1)
        if at_zero < 0 < slope and -slope / at_zero < MOST_TOKENS and -1 / at_zero < RANGES["high_freq_factor"][1]:
            guesses.append((round(-slope / at_zero), round(1 - 1 / at_zero, 3)))
    for length, high in guesses:
        rope = Rope(theta, "llama3", factor, 1.0, high, length)
        scaled = inverse_frequencies(rope, head_dim)
        if high > 1 and np.allclose(plain / scaled, factors, rtol=TOLERANCE, atol=0):
            keys = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high}
            return {"rope_type": "llama3", **keys, "original_max_position_embeddings": length}
    return None
