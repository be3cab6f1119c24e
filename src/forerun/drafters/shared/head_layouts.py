"""Folders of heads that others have published: their tensors and config.json, translated into our own names.

The names of the tensors, or `speculators_model_type`, show which kind of head a folder holds. Layers are counted in two
ways. At the top of config.json (EAGLE-3's reference code, vLLM, speculators), layer id j in
`eagle_aux_hidden_state_layer_ids` means that the *input* of layer j is read. Inside of `eagle_config` (SGLang,
SpecForge), layer id j means that the *output* of layer j is read. A reader that is off by one loses a few per cent of
acceptance without any error. We store the number of layers that a row has passed when it is read.

Such a folder names no tokenizer, so only sizes can be compared with the target.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from forerun.blocks import SIDES, Spec
from forerun.drafters import Target
from forerun.drafters.shared import head_files
from forerun.drafters.shared.eagle_model import OWN_EMBEDDING, OWN_HEAD, EagleConfig, layer_shapes
from forerun.errors import BadOption, UnsupportedModel, shown
from forerun.host_tensor import HostTensor
from forerun.models.configs import flag, refuse_unknown, size
from forerun.models.opened import read_config, without
from forerun.ops.model import Model
from forerun.sampling.largest import Ids
from forerun.text.json_files import read_json

Shapes = Mapping[str, tuple[int, ...]]
EAGLE_1, EAGLE_3, MEDUSA = "EAGLE-1", "EAGLE-3", "Medusa"
# Kind of head -> pattern for the beginning of a tensor's name; the first kind with such a tensor is the head's.
SIGNS = {
    "P-EAGLE": r"mask_hidden$",
    "DSpark": r"(markov|confidence)_head\.",
    "MTP": r"(model\.)?mtp",
    "Hydra": r"hydra_",
    MEDUSA: r"\d+\.\d+\.linear\.weight$|blocks\.\d+\.layers\.\d+\.weight$",
    EAGLE_3: r"midlayer\.|layers\.0\.hidden_norm\.",
    "DFlash": r"hidden_norm\.weight$",
    EAGLE_1: r"fc\.weight$",
}
SPECULATORS = {"eagle3": EAGLE_3, "peagle": "P-EAGLE", "dflash": "DFlash", "dspark": "DSpark", "mtp": "MTP"}
NOT_COMPUTED = ("P-EAGLE", "DSpark")
DRAFTERS = {EAGLE_1: "eagle", EAGLE_3: "eagle", MEDUSA: "medusa", "Hydra": "hydra", "DFlash": "dflash",
            "MTP": "mtp"}  # fmt: skip
MOST_PADDING = 1024  # most rows of a vocabulary without a token
COMPARED_ROWS = 4096  # rows of embeddings that are compared at a time

FIRST = "model.layers.0."
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SWITCHES = frozenset({"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"})
EAGLE_KEYS = SWITCHES | {"draft_vocab_size", "target_hidden_size", "eagle_config", "qkv_bias", LAYER_IDS}
# Entries of speculators' config.json: the ones above, and entries that change nothing.
SPECULATORS_KEYS = EAGLE_KEYS | {
    *("speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config", "model_type"),
    *("has_no_defaults_at_init", "embed_requires_grad", "tie_word_embeddings", "torch_dtype", "dtype"),
}
# Entries that `eagle_config` may have beside layer ids and switches: these values change nothing, or are what we do.
NESTED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "next_layer_regular": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


@dataclass(frozen=True)
class Published:
    """A published head whose weights have not been read yet.

    files: the files with its weights. config: the entries of its config.json. kind: a key of SIGNS. shapes: the shapes
    of its tensors.
    """

    path: str
    files: tuple[Path, ...]
    config: Mapping[str, Any]
    kind: str
    shapes: Shapes

    @property
    def is_speculators(self) -> bool:
        return "speculators_model_type" in self.config

    @property
    def decoder(self) -> Mapping[str, Any]:
        """The entries of config.json that describe the decoder."""
        if not self.is_speculators:
            keys = EAGLE_KEYS if self.kind == EAGLE_3 else {"bias", "qkv_bias"}
            rest = {key: value for key, value in self.config.items() if key not in keys}
            # Some files give the target's number of layers, though the name "midlayer" says that the head has one.
            is_one = self.kind == EAGLE_3 and any(name.startswith("midlayer.") for name in self.shapes)
            return rest | ({"num_hidden_layers": 1} if is_one else {})
        decoder = self.config.get("transformer_layer_config")
        if not isinstance(decoder, Mapping):
            raise UnsupportedModel(f"config.json has transformer_layer_config={shown(decoder)}: it must be a mapping")
        return decoder

    @property
    def nested(self) -> Mapping[str, Any]:
        """The entries of `eagle_config` in config.json."""
        nested = self.config.get("eagle_config") or {}
        if not isinstance(nested, Mapping):
            raise UnsupportedModel(f"config.json has eagle_config={shown(nested)}: it must be a mapping")
        return nested

    @property
    def own(self) -> Mapping[str, Any]:
        """All entries of config.json and its `eagle_config` that are not null. config.json takes precedence."""
        return {key: value for key, value in {**self.nested, **self.config}.items() if value is not None}

    def read(self, must: Shapes, may: Shapes) -> dict[str, HostTensor]:
        """Return all tensors named in `must`, and the existing tensors named in `may`, by their published names.

        Raises UnsupportedModel for a tensor that is missing, has another shape, or is in neither `must` nor `may`.
        """
        present = {name: shape for name, shape in self.shapes.items() if not head_files.IGNORED.match(name)}
        wanted = {**must, **{name: shape for name, shape in may.items() if name in present}}
        head_files.check_shapes(str(self.files[0]), present, wanted, "fetch the head again, or name one of this target")
        return {name: tensor for file in self.files for name, tensor in head_files.tensors(file, wanted).items()}


def find(path: str, method: str, ignore: Collection[str] = ()) -> Published | None:
    """Return the published head in a folder; None if config.json or the weights are missing.

    Returns None also for a folder of `forerun train head`. ignore: entries of config.json to ignore. Raises BadOption
    for a head that another drafter than `method` reads, and UnsupportedModel for weights that no drafter reads.
    """
    folder = Path(path)
    files = [folder / name for name in head_files.weight_files([file.name for file in folder.glob("*")])]
    if not files or not (folder / head_files.CONFIG).is_file():
        return None
    config = without(read_json(folder / head_files.CONFIG), ignore)
    if "forerun" in config:
        return None
    config = _unwrapped(config)
    shapes = {name: shape for file in files for name, shape in head_files.shapes(file).items()}
    kind = _kind(path, config, shapes)
    if kind in NOT_COMPUTED:
        raise UnsupportedModel(
            f"{shown(path)} is a head of {kind}, which forerun does not compute: use an EAGLE-3 or Medusa head of the "
            "target, or train one with `forerun train head`"
        )
    if DRAFTERS[kind] != method:
        raise BadOption(
            f"{shown(path)} is a head of {kind}, which {method} does not read: name it as {DRAFTERS[kind]}:path=FOLDER"
        )
    return Published(path, tuple(files), config, kind, shapes)


def _unwrapped(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json in the form of EAGLE-1's authors, without the wrapper that vLLM adds."""
    inner = config.get("model")
    if config.get("model_type") != "eagle" or not isinstance(inner, Mapping):
        return config
    known = {"model", "model_type", "eagle_fc_bias", "truncated_vocab_size"}
    size_said = config.get("truncated_vocab_size")
    refuse_unknown(config, known if size_said in (None, inner.get("vocab_size")) else known - {"truncated_vocab_size"})
    return {**inner, "bias": config.get("eagle_fc_bias", inner.get("bias", False))}


def _kind(path: str, config: Mapping[str, Any], names: Collection[str]) -> str:
    if (named := config.get("speculators_model_type")) is not None:
        if named not in SPECULATORS:
            raise UnsupportedModel(
                f"config.json has speculators_model_type={shown(named)}, which forerun does not know: use a head of "
                "eagle3"
            )
        return SPECULATORS[named]
    for kind, sign in SIGNS.items():
        if any(re.match(sign, name) for name in names):
            return kind
    raise UnsupportedModel(
        f"{shown(path)} holds {shown(', '.join(sorted(names)[:3]))} and is no head that forerun knows: name a folder "
        "of EAGLE-1 to 3.1, of speculators or of Medusa, or one of `forerun train head`"
    )


# -------------------------------------------------------------------------------------------------------------- EAGLE


def eagle_layers(head: Published, num_layers: int) -> tuple[int, ...]:
    """Return the target's layers after which a head reads hidden states; () = after the final norm.

    num_layers: the number of the target's layers.
    """
    if head.kind == EAGLE_1:
        return ()
    inputs, outputs = _layer_ids(head.config), _layer_ids(head.nested)
    if inputs and outputs and inputs != tuple(j + 1 for j in outputs):
        raise UnsupportedModel(
            f"config.json has {LAYER_IDS}={list(inputs)}, of layers whose input is read, and in eagle_config "
            f"{list(outputs)}, of those whose output is: the first must be one more than the second, so take out those "
            "that are wrong"
        )
    return inputs or tuple(j + 1 for j in outputs) or (2, num_layers // 2, num_layers - 3)


def eagle_config(head: Published, num_layers: int | None = None) -> EagleConfig:
    """Return the sizes and switches of a head.

    num_layers: the number of the target's layers; None = not known, and then the result has layers=(). Raises
    UnsupportedModel for settings that would be computed wrongly.
    """
    _check_switches(head)
    settings = head.own
    has_bias = any(name.endswith("self_attn.q_proj.bias") for name in head.shapes)
    decoder = _head_spec(read_config(head.decoder), has_bias, is_first=head.kind == EAGLE_1)
    layers = () if num_layers is None else eagle_layers(head, num_layers)
    if head.kind == EAGLE_1:
        return EagleConfig(decoder, layers)
    if "draft_vocab_size" in settings:
        decoder = replace(decoder, vocab_size=size(settings, "draft_vocab_size"))
    return EagleConfig(
        decoder,
        layers,
        size(settings, "target_hidden_size") if "target_hidden_size" in settings else None,
        norm_before_residual=flag(settings, "norm_before_residual"),
        norm_output=flag(settings, "norm_output"),
    )


def _head_spec(decoder: Spec, has_bias: bool, *, is_first: bool) -> Spec:
    """Return the spec of a head, made from the spec that config.json gives for its decoder.

    is_first: True = an EAGLE-1 head, False = an EAGLE-3 head. In both, the first block has no norm before its
    attention. An EAGLE-1 head never norms the block's input, and has no final norm. In an EAGLE-3 head, the block's
    input is normed already, and the block's attention reads both the embedding and the features.
    """
    changed = [replace(block, attention=block.attention and replace(block.attention, qkv_bias=has_bias))
               for block in decoder.blocks]  # fmt: skip
    first = changed[0]
    assert first.attention is not None
    reads = None if is_first else 2 * decoder.hidden_size
    changed[0] = replace(first, pre_attention=None, attention=replace(first.attention, reads=reads))
    norm = None if is_first else decoder.final_norm
    return replace(decoder, tied=True, blocks=tuple(changed), final_norm=norm)


def read_eagle(head: Published, config: EagleConfig, target: Target) -> tuple[EagleConfig, dict[str, HostTensor], Ids]:
    """Return a head's configuration, its weights by our names, and the target's ids that the head drafts.

    The vocabulary of the returned configuration consists of these ids only. Raises BadOption for a head of another
    target, and UnsupportedModel for tensors that do not fit.
    """
    num_vocab = size(head.decoder, "vocab_size")
    width = target.model.config.hidden_size
    _check_vocabulary(head, num_vocab, target)
    must, may = _eagle_shapes(head, config, num_vocab, width)
    names = {ours: _published_name(head, ours) for ours in (*must, *may)}
    tensors = head.read({names[n]: must[n] for n in must}, {names[n]: may[n] for n in may})
    weights = {ours: tensors[name] for ours, name in names.items() if name in tensors}
    ids = np.arange(config.decoder.vocab_size)
    if (offsets := weights.pop("d2t", None)) is not None:
        ids = _distinct(head, "d2t", ids + offsets.values.astype(np.int64), num_vocab)
    kept = ids < target.num_ids
    if OWN_HEAD in weights and not kept.all():
        weights[OWN_HEAD] = weights[OWN_HEAD][kept]
    if OWN_EMBEDDING in weights and _is_of_target(weights[OWN_EMBEDDING], target):
        del weights[OWN_EMBEDDING]
    ids = ids[kept]
    return replace(config, decoder=replace(config.decoder, vocab_size=len(ids))), weights, ids


def _layer_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    ids = raw.get(LAYER_IDS) or []
    if not isinstance(ids, list) or not all(type(j) is int and j >= 0 for j in ids):
        raise UnsupportedModel(f"config.json has {LAYER_IDS}={shown(ids)}: it must list layers")
    return tuple(ids)


def _check_switches(head: Published) -> None:
    """Raise UnsupportedModel for settings that forerun does not compute. The decoder's settings are not checked."""
    if head.is_speculators:
        refuse_unknown(head.config, SPECULATORS_KEYS)
        if head.config.get("norm_before_residual") is None:
            raise UnsupportedModel(
                "config.json has no norm_before_residual, which some readers take for true and some for false: add the "
                "value that the head was trained with"
            )
    for key, value in head.nested.items():
        if key in NESTED and value not in (None, NESTED[key]):
            raise UnsupportedModel(
                f"config.json has {key}={shown(value)} in eagle_config, which forerun does not compute: use a head "
                f"with {NESTED[key]}"
            )
        if key in SWITCHES and head.config.get(key) not in (None, value):
            raise UnsupportedModel(f"config.json has two values of {key}, of which one is in eagle_config: keep one")
    refuse_unknown(head.nested, SWITCHES | NESTED.keys() | {LAYER_IDS})


def _eagle_shapes(
    head: Published, config: EagleConfig, num_vocab: int, width: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return two maps from our names to shapes: of weights that a head must have, and of weights that it may have.

    width: the target's hidden size.
    """
    if config.reads_size != width:
        raise BadOption(
            f"{shown(head.path)} reads rows of {config.reads_size}, and the target has rows of {width}: name a head "
            "of this target"
        )
    h, num_ids = config.decoder.hidden_size, config.decoder.vocab_size
    must = layer_shapes(config)
    may: dict[str, tuple[int, ...]] = {OWN_EMBEDDING: (num_vocab, h)}
    if head.kind == EAGLE_1:
        must["input.weight"] = (h, 2 * h)
        may[OWN_HEAD] = (num_ids, h)  # mostly a copy of the target's LM head; without it, the target's is used
        (must if head.config.get("bias") is True else may)["input.bias"] = (h,)
        return must, may
    num = len(config.layers)
    must |= {"fc.weight": (h, num * width), **{f"{side}.weight": (h,) for side in SIDES}}
    if flag(head.own, "fc_norm"):
        must |= {f"fc_norm.{i}.weight": (width,) for i in range(num)}
    if flag(head.own, "norm_before_fc"):
        must["input_norm.weight"] = (num * width,)
    (may if num_ids == num_vocab else must)["d2t"] = (num_ids,)
    fits = h == width  # whether the target's embeddings and LM head fit the head
    (may if fits else must).update({OWN_EMBEDDING: (num_vocab, h), OWN_HEAD: (num_ids, h)})
    return must, may


def _published_name(head: Published, ours: str) -> str:
    """Return the published name of a weight, given our name."""
    if head.kind == EAGLE_1:
        return ours.replace("input.", "fc.", 1) if ours.startswith("input.") else ours.removeprefix("model.")
    first = "midlayer." if any(name.startswith("midlayer.") for name in head.shapes) else "layers.0."
    sides = {f"{SIDES[0]}.weight": "input_layernorm.weight", f"{SIDES[1]}.weight": "hidden_norm.weight"}
    if ours in sides:
        return first + sides[ours]
    return first + ours.removeprefix(FIRST) if ours.startswith(FIRST) else ours.removeprefix("model.")


def _is_of_target(table: HostTensor, target: Target) -> bool:
    """Return whether an embedding equals the target's, so that it need not be in memory twice."""
    model: Model = target.model
    if table.shape[1] != model.config.hidden_size:
        return False
    for first in range(0, target.num_ids, COMPARED_ROWS):
        ids = range(first, min(first + COMPARED_ROWS, target.num_ids))
        head_rows = table[ids.start : ids.stop].to(model.weight_dtype)
        target_rows = model.rows.to_host(model.embed(list(ids)))
        model.wait()
        if not np.array_equal(head_rows.float32(), target_rows.astype(np.float32)):
            return False
    return True


# ------------------------------------------------------------------------------------------------------------- Medusa


@dataclass(frozen=True)
class MedusaHeads:
    """Medusa heads, with weights under the names of `forerun train head`.

    The LM heads are `lm_head.{head}.weight`, or one `lm_head.weight` for all heads. ids: the ids that the heads draft.
    """

    num_heads: int
    num_blocks: int
    weights: Mapping[str, HostTensor]
    ids: Ids


def read_medusa(heads: Published, target: Target) -> MedusaHeads:
    """Read Medusa heads. The number of heads is counted from the tensors, because old config files say 2 for 5 heads.

    Raises BadOption for heads of another target, and UnsupportedModel for tensors that do not fit.
    """
    block, lm_head = "{0}.{1}.linear.", "{0}.{1}.weight"
    if any(name.startswith("blocks.") for name in heads.shapes):  # as vLLM writes them
        block, lm_head = "blocks.{0}.layers.{1}.", "lm_heads.{0}.weight"
    pattern = re.compile(re.escape(block).replace(r"\{0\}", r"(\d+)").replace(r"\{1\}", r"(\d+)") + "weight")
    places = [match.groups() for name in heads.shapes if (match := pattern.fullmatch(name))]
    num_heads, num_blocks = (len({place[i] for place in places}) for i in (0, 1))
    width = target.model.config.hidden_size
    must, may, names = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]](), dict[str, str]()
    for head in range(num_heads):
        for i in range(num_blocks):
            ours, theirs = f"{head}.{i}.linear.", block.format(head, i)
            must[theirs + "weight"], may[theirs + "bias"] = (width, width), (width,)
            names |= {ours + part: theirs + part for part in ("weight", "bias")}
    lm_names = {f"lm_head.{head}.weight": lm_head.format(head, num_blocks) for head in range(num_heads)}
    if heads.config.get("original_lm_head"):  # vLLM's word for an LM head that all heads share
        shared = [n for n in ("lm_head.weight", lm_names["lm_head.0.weight"]) if n in heads.shapes] if lm_names else []
        if not shared:
            raise UnsupportedModel(
                f"{shown(heads.path)} has original_lm_head=true in config.json and no LM head: add the tensor "
                "lm_head.weight, or drop that key, and the heads use the target's"
            )
        lm_names = {"lm_head.weight": shared[0]}
    num_rows = [heads.shapes[name][0] for name in lm_names.values() if name in heads.shapes]
    if num_rows:  # otherwise the heads use the target's LM head
        must |= dict.fromkeys(lm_names.values(), (num_rows[0], width))
        names |= lm_names
    if "token_map" in heads.shapes:
        must["token_map"] = heads.shapes["token_map"][:1]
    tensors = heads.read(must, may)
    weights = {ours: tensors[name] for ours, name in names.items() if name in tensors}
    token_map = tensors["token_map"].values.astype(np.int64) if "token_map" in tensors else None
    ids, rows = _medusa_ids(heads, token_map, num_rows[0] if num_rows else None, target)
    if rows is not None:
        weights |= {name: weights[name][rows] for name in lm_names}
    return MedusaHeads(num_heads, num_blocks, weights, ids)


def _medusa_ids(
    heads: Published, token_map: Ids | None, num_rows: int | None, target: Target
) -> tuple[Ids, Ids | None]:
    """Return the ids that Medusa heads draft, and the indices of the rows to take from the LM heads in the files.

    The indices are None if all rows are taken, or if the files have no LM heads. token_map: the ids that the heads
    draft; None = all ids. num_rows: the number of rows of an LM head in the files; None = the files have no LM heads.
    """
    if token_map is None:
        if num_rows is not None:
            _check_vocabulary(heads, num_rows, target)
        ids = np.arange(target.num_ids)
        return ids, None if num_rows in (None, target.num_ids) else ids
    num_vocab = size(heads.config, "vocab_size")
    _check_vocabulary(heads, num_vocab, target)
    ids = _distinct(heads, "token_map", token_map, num_vocab)
    kept = ids < target.num_ids
    if num_rows is None or len(ids) == num_rows:
        return ids[kept], None if num_rows is None or kept.all() else np.flatnonzero(kept)
    if num_rows != num_vocab:
        raise UnsupportedModel(
            f"{shown(heads.path)} has LM heads of {num_rows} rows, and {len(ids)} ids in token_map: fetch the heads "
            "again"
        )
    return ids[kept], ids[kept]


# --------------------------------------------------------------------------------------------------------------- both


def _check_vocabulary(head: Published, num_vocab: int, target: Target) -> None:
    """Raise BadOption if the head's vocabulary size differs from the target's by more than padding."""
    num_ids, padded = target.num_ids, target.model.config.vocab_size
    if num_vocab != padded and not num_ids <= num_vocab <= num_ids + MOST_PADDING:
        raise BadOption(
            f"{shown(head.path)} was made for a vocabulary of {num_vocab} ids, and the target has {num_ids}: name a "
            "head of this target"
        )


def _distinct(head: Published, name: str, ids: Ids, num_vocab: int) -> Ids:
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= num_vocab or len(set(ids.tolist())) < len(ids):
        raise UnsupportedModel(
            f"{shown(head.path)}: {name} must lead to different ids below {num_vocab}: fetch the head again"
        )
    return ids
