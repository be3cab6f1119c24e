"""Defines the form of maps from published tensor names to our names, which are the names in `blocks.weights`.

Most families publish their tensors under our names. Any other family has a map `NAMES`, which gives for each published
tensor the names of our tensors inside it, and their layout: fused, transposed or ordered by head. `GGUF` describes the
tensors of llama.cpp's files in the same way, and also maps metadata keys to keys of config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, TypeVar, cast

from forerun.blocks import EMBEDDING, FINAL_NORM, HEAD, Spec, weight_shapes
from forerun.errors import UnsupportedModel
from forerun.host_tensor import HostTensor
from forerun.models.source import STACKED, QuantisedSource, Source, Stored, Wrapped
from forerun.ops.quantised import QuantisedMatrix, QuantisedRows

Rows = TypeVar("Rows", HostTensor, QuantisedRows)


@dataclass(frozen=True)
class Fused:
    """Describes a published tensor that holds several of our matrices (`parts`), or one matrix in another layout.

    By default, all rows of the first part come first, then all rows of the next part. by_head: the rows are ordered by
    head, and within a head by part. in_turn: rows of the parts alternate: row 0 of each part, then row 1 of each part,
    and so on. by_key_head: the rows are ordered by the key heads of a recurrence, and within a key head by part; a part
    that joins q, k and v has the rows of q, k and v in this order within each key head. transposed: the tensor is
    stored as inputs x outputs. either_way: the tensor is transposed in some files only, and its shape tells in which.
    squeezed: the tensor has an extra middle dimension of size 1, as torch's convolution weights have.
    """

    parts: tuple[str, ...]
    transposed: bool = False
    either_way: bool = False
    by_head: bool = False
    in_turn: bool = False
    by_key_head: bool = False
    squeezed: bool = False


@dataclass(frozen=True)
class Names:
    """Maps published module names to our module names. A module name is a tensor name without `.weight` or `.bias`.

    outer: the map for modules outside of blocks. block: the prefix of published names inside a block; {} is the block's
    number. inner: the map for names after that prefix; {} is an expert's number. Modules in neither map are published
    under our names. prefix: a prefix that published names may have or lack. ignored: name endings of tensors that are
    not weights. beside: name prefixes of tensors that do not belong to the text model.

    ours_at: the prefix of our names inside a block; {} is the published block number times `step`, plus `first`. more:
    maps for other blocks. exact: maps whole tensor names to our tensor names, for vectors that files store as a matrix
    of one row. bare: the names in `inner` that are whole tensor names, without `.weight` or `.bias`. A bare tensor is
    our `.bias` if its name ends with `_bias` and our name does not; otherwise it is our `.weight`.
    """

    outer: Mapping[str, str]
    block: str
    inner: Mapping[str, str | Fused]
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    ours_at: str = "model.layers.{}."
    step: int = 1
    first: int = 0
    more: tuple[Names, ...] = ()
    exact: Mapping[str, str] = field(default_factory=dict)
    bare: frozenset[str] = frozenset()

    @property
    def only_renames(self) -> bool:
        """Whether published tensors have the same shapes and layout as our tensors, so that only names differ."""
        plain = not self.exact and not self.bare and all(isinstance(how, str) for how in self.inner.values())
        return plain and all(names.only_renames for names in self.more)

    def ours(self, name: str) -> tuple[list[str], Fused] | None:
        """Return our names of the tensors inside the published tensor `name`, and their layout; None if unknown."""
        if name in self.exact:
            return [self.exact[name]], Fused((self.exact[name],))
        module, _, ending = name.removeprefix(self.prefix).rpartition(".")
        if module in self.outer:
            return [f"{self.outer[module]}.{ending}"], Fused((self.outer[module],))
        head, tail = map(re.escape, self.block.split("{}"))
        within = rf"{head}(0|[1-9]\d{{0,3}}){tail}(.+)"
        match = re.fullmatch(within, name.removeprefix(self.prefix)) if self.bare else None
        key, expert = (None, "") if match is None else _without_expert(match[2], self.bare)
        if key is not None:
            ending = _ending(key, self.inner[key])
        else:
            match = re.fullmatch(within, module)
            key, expert = (None, "") if match is None else _without_expert(match[2], self.inner.keys() - self.bare)
        if match is None or key is None:
            others = (names.ours(name.removeprefix(self.prefix)) for names in self.more)
            return next((known for known in others if known is not None), None)
        entry = self.inner[key]
        how = Fused((entry,)) if isinstance(entry, str) else entry
        at = self.ours_at.format(int(match[1]) * self.step + self.first)
        return [f"{at}{part.format(expert)}.{ending}" for part in how.parts], how

    def theirs(self, module: str) -> str | None:
        """Return the published name of one of our modules, without `prefix`; None for an unknown module."""
        known = self._theirs(module)
        return None if known is None else known[0]

    def _theirs(self, module: str, ending: str = "weight") -> tuple[str, bool] | None:
        """Return the published name of one of our modules, and whether this is a whole tensor name (see `bare`).

        Returns None for an unknown module. ending: "weight" or "bias", the last part of our tensor's name.
        """
        outer = {ours: theirs for theirs, ours in self.outer.items()}
        if module in outer:
            return outer[module], False
        head, tail = map(re.escape, self.ours_at.split("{}"))
        match = re.fullmatch(rf"{head}(\d+){tail}(.+)", module)
        for theirs, how in self.inner.items():
            if match is None:
                break
            if theirs in self.bare and _ending(theirs, how) != ending:
                continue
            number, rest = divmod(int(match[1]) - self.first, self.step)
            part, expert = _without_expert(match[2], how.parts if isinstance(how, Fused) else (how,))
            if rest == 0 and part is not None:
                return f"{self.block.format(number)}{theirs.format(expert)}", theirs in self.bare
        return next((known for names in self.more if (known := names._theirs(module, ending)) is not None), None)

    def published(self, module: str) -> str:
        """Return the published name of one of our modules, with `prefix` unless the module is the LM head.

        An unknown module keeps our name.
        """
        theirs = self.theirs(module)
        head = HEAD.removesuffix(".weight")
        return module if theirs is None else theirs if module == head else self.prefix + theirs

    def published_tensor(self, name: str) -> str:
        """Return the published name of one of our tensors."""
        module, _, ending = name.rpartition(".")
        known = self._theirs(module, ending)
        if known is not None and known[1]:
            return self.prefix + known[0]
        return f"{self.published(module)}.{ending}"


def _ending(bare: str, how: str | Fused) -> str:
    ours = how.parts[0] if isinstance(how, Fused) else how
    return "bias" if bare.removesuffix(".{}").endswith("_bias") and not ours.endswith("_bias") else "weight"


def _without_expert(module: str, known: Collection[str]) -> tuple[str | None, str]:
    """Return the name in `known` that fits a module, and the number of the expert, as text.

    The name has {} in place of the number. The number is '' where the module has none. For an unknown module, the name
    is None.
    """
    if module in known:
        return module, ""
    match = re.fullmatch(r"(.+?\.)(0|[1-9]\d{0,3})(\..+)?", module)
    if match is None or (name := f"{match[1]}{{}}{match[3] or ''}") not in known:
        return None, ""
    return name, match[2]


SAID = "mtp_num_hidden_layers"  # in config.json: the number of multi-token prediction blocks (next_tokens.py)
NEXT = ("mtp.", "model.mtp.", "model.mtp_")  # prefixes of the tensors of these blocks
USUAL = Names({}, "model.layers.{}.", {}, beside=NEXT)  # for files with our names


def says_next_tokens(config: Mapping[str, Any]) -> bool:
    """Whether config.json declares a multi-token prediction block."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    return any(part.get(key) for part in parts for key in (SAID, "num_mtp_layers"))


@dataclass(frozen=True)
class Place:
    """Locates one of our tensors inside a published tensor.

    name: the name of the published tensor. rows: the indices of the published rows that make up our tensor, in our
    order; None = all rows. num_rows: the number of rows that the published tensor must have. is_row: whether our tensor
    is a vector, published as the only row of a matrix. transposed, squeezed: see Fused.
    """

    name: str
    rows: list[int] | None = None
    num_rows: int = 0
    transposed: bool = False
    is_row: bool = False
    squeezed: bool = False


def places(names: Names | None, spec: Spec, published: Collection[str]) -> dict[str, Place]:
    """Map the name of each of our tensors to its place in the published tensors.

    A published tensor with an unknown name keeps this name, unless `names` ignores it. Tensors that the model never
    reads are left out. published: the published names, or a mapping from these names to stored tensors. The shapes of
    the stored tensors tell whether tensors with `Fused.either_way` are transposed.
    """
    where, shapes = dict[str, Place](), weight_shapes(spec)
    for name in published:
        known = None if names is None else names.ours(name)
        if known is None:
            if names is None or not (name.endswith(names.ignored) or name.startswith(names.beside)):
                where[name] = Place(name)
            continue
        ours, how = known
        if any(_is_unread(own, spec) for own in ours):
            continue
        sizes = [shapes[part][0] if part in shapes else 0 for part in ours]
        is_turned = how.transposed
        if how.either_way and isinstance(published, Mapping) and ours[0] in shapes:
            is_turned = tuple(published[name].shape) != (sum(sizes), *shapes[ours[0]][1:])
        for our_name, rows in zip(ours, _rows(how, sizes, spec), strict=True):
            where[our_name] = Place(
                name,
                rows if len(ours) > 1 else None,
                sum(sizes),
                is_turned and our_name.endswith(".weight"),
                names is not None and name in names.exact,
                how.squeezed and our_name.endswith(".weight"),
            )
    return where


def _is_unread(name: str, spec: Spec) -> bool:
    """Whether the model never reads a tensor, because the tensor's block uses the keys and values of another block."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.\w+", name)
    a = spec.blocks[int(match[1])].attention if match is not None and int(match[1]) < spec.num_layers else None
    return a is not None and a.shares_kv_of is not None


def _rows(how: Fused, sizes: list[int], spec: Spec) -> Iterator[list[int]]:
    """Yield, for each part of a fused tensor, the part's row indices in the tensor. sizes: each part's row count."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if how.in_turn:
        yield from (list(range(i, sum(sizes), len(sizes))) for i in range(len(sizes)))
        return
    if how.by_key_head:
        yield from _rows_by_key_head(sizes, spec)
        return
    if not how.by_head:
        yield from (list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
        return
    [heads] = {a.heads for block in spec.blocks if (a := block.attention) is not None}
    step = sum(sizes) // heads
    each = [size // heads for size in sizes]
    for i, size in enumerate(each):
        first = sum(each[:i])
        yield [head * step + first + row for head in range(heads) for row in range(size)]


def _rows_by_key_head(sizes: list[int], spec: Spec) -> Iterator[list[int]]:
    """Yield, for each part of a fused tensor whose rows are ordered by key head, the part's row indices in the tensor.

    `Fused.by_key_head` describes this order. The indices are in the order of our matrix. If a part joins the matrices
    q, k and v, the indices of all rows of q come first, then of all rows of k, then of all rows of v. sizes: each
    part's row count. The lists are empty unless the spec's blocks have one kind of recurrence.
    """
    recurrences = {block.recurrence for block in spec.blocks if block.recurrence is not None}
    if len(recurrences) != 1:
        yield from ([] for _ in sizes)  # nothing asks for these tensors
        return
    [r] = recurrences
    joined = [r.key_heads * r.key_dim] * 2 + [r.value_heads * r.value_dim]
    pieces = [joined if size == sum(joined) else [size] for size in sizes]
    each = [size // r.key_heads for part in pieces for size in part]
    step, first = sum(each), 0
    for part in pieces:
        rows = list[int]()
        for size in (whole // r.key_heads for whole in part):
            rows += (head * step + first + row for head in range(r.key_heads) for row in range(size))
            first += size
        yield rows


class NamedSource(Wrapped):
    """Wraps a source, and gives each of its tensors our name and our layout."""

    def __init__(self, source: Source, names: Names, spec: Spec) -> None:
        super().__init__(source)
        self._places = places(names, spec, source.tensors)

    @cached_property  # which each weight is looked up in
    def tensors(self) -> Mapping[str, Stored]:
        """The stored form of each tensor, by our name."""
        return {ours: placed(self.source.tensors[place.name], place) for ours, place in self._places.items()}

    def blocks(self, name: str) -> Iterator[HostTensor]:
        """Yield the rows of the tensor that has our name `name`, in order. See `Source.blocks`."""
        place = self._places[name]
        if place.is_row:
            yield HostTensor.joined([block.copy() for block in self.source.blocks(place.name)])[0]
        elif place.squeezed:
            yield from (block.reshape(len(block), block.shape[-1]) for block in self.source.blocks(place.name))
        elif not place.transposed:
            yield from chosen(partial(self.source.blocks, place.name), place.rows)
        else:
            whole = HostTensor.joined([block.copy() for block in self.source.blocks(place.name)]).T
            yield (whole if place.rows is None else whole[place.rows]).contiguous()

    def quantised(self, name: str) -> QuantisedMatrix:
        """Return the quantised matrix that has our name `name`.

        Raises UnsupportedModel for a matrix that is stored transposed.
        """
        place = self._places[name]
        if place.transposed:
            raise UnsupportedModel(
                f"{place.name} in {self.source.tensors[place.name].file} is quantised the other way round than it is "
                "computed: use the unquantised original"
            )
        matrix = cast(QuantisedSource, self.source).quantised(place.name)
        return matrix if place.rows is None else part_of(matrix, place.rows)


def placed(stored: Stored, place: Place) -> Stored:
    """Return the stored form of the tensor at `place`, with the shape that the tensor has in our layout.

    stored: the stored form of the published tensor. If it has an unexpected number of rows, its whole shape is kept.
    """
    shape = stored.shape[::-1] if place.transposed else stored.shape
    if place.rows is not None and shape[:1] != (place.num_rows,):
        return replace(stored, shape=shape)
    shape = shape[1:] if place.is_row else shape
    shape = (shape[0], shape[2]) if place.squeezed and len(shape) == 3 and shape[1] == 1 else shape
    return replace(stored, shape=shape if place.rows is None else (len(place.rows), *shape[1:]))


def part_of(matrix: QuantisedMatrix, rows: list[int]) -> QuantisedMatrix:
    """Return a quantised matrix of some rows of `matrix`. rows: the indices of these rows, in the order to return."""
    stored = None if matrix.stored is None else matrix.stored.chosen(rows)
    return QuantisedMatrix(matrix.scheme, (len(rows), matrix.shape[1]), lambda: chosen(matrix.blocks, rows), stored)


def chosen(read: Callable[[], Iterator[Rows]], rows: list[int] | None) -> Iterator[Rows]:
    """Yield some rows of a tensor in blocks. rows: the indices of these rows, in the order to yield; None = all rows.

    read(): yields the whole tensor in blocks. It is called once for each stretch of `rows` in which indices ascend.
    """
    if rows is None:
        yield from read()
        return
    falls: list[int] = [i for i, (row, following) in enumerate(pairwise(rows), 1) if following <= row]
    for begin, end in pairwise([0, *falls, len(rows)]):
        yield from _ascending(read(), rows[begin:end])


def _ascending(blocks: Iterator[Rows], rows: list[int]) -> Iterator[Rows]:
    """Yield some rows of a tensor that is given in blocks. rows: the indices of these rows, which must ascend."""
    first = at = 0
    for block in blocks:
        end = first + len(block)
        stop = at
        while stop < len(rows) and rows[stop] < end:
            stop += 1
        if stop > at:
            yield _picked(block, [row - first for row in rows[at:stop]])
        first, at = end, stop
        if at == len(rows):
            return


def _picked(block: Any, rows: list[int]) -> Any:
    if isinstance(block, HostTensor):
        return block[rows]
    numbers = {
        name: part[rows]
        for name in ("codes", "scales", "zeros", "minimums", "super_scales", "super_minimums")
        if (part := getattr(block, name)) is not None
    }
    return replace(block, **numbers)


def published(names: Names, spec: Spec, weights: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """Convert `weights`, which have our names, to the tensors of the family's published files, by published name."""
    groups: dict[str, dict[str, HostTensor]] = {}
    tensors = dict[str, HostTensor]()
    rows = {ours: theirs for theirs, ours in names.exact.items()}
    for name, weight in weights.items():
        if name in rows:
            tensors[rows[name]] = weight[None]
            continue
        groups.setdefault(names.published_tensor(name), {})[name] = weight
    for theirs, parts in groups.items():
        held = places(names, spec, [theirs])
        first = held[next(iter(parts))]
        if first.rows is None:
            [whole] = parts.values()
        else:
            some = next(iter(parts.values()))
            whole = HostTensor.empty((sum(len(part) for part in parts.values()), *some.shape[1:]), some.dtype)
            for our_name, part in parts.items():
                whole.values[held[our_name].rows] = part.values
        whole = whole[:, None] if first.squeezed else whole
        tensors[theirs] = whole.T.contiguous() if first.transposed else whole
    return _stacked(tensors)


def _stacked(tensors: dict[str, HostTensor]) -> dict[str, HostTensor]:
    """Join the tensors of single experts into one tensor of all experts, if published files have such a tensor."""
    single, parts = dict[str, HostTensor](), dict[str, list[HostTensor]]()
    for name, tensor in tensors.items():
        if STACKED.fullmatch(name.rpartition(".")[0]):
            parts.setdefault(name.rpartition(".")[0], []).append(tensor)
        else:
            single[name] = tensor
    return single | {name: HostTensor.joined([part[None] for part in experts]) for name, experts in parts.items()}


# ---------------------------------------------------------------------------------------------------------------- GGUF

OUTER = {"token_embd": EMBEDDING, "output_norm": FINAL_NORM, "output": HEAD}
OUTER = {module: ours.removesuffix(".weight") for module, ours in OUTER.items()}
INNER: Mapping[str, str | Fused] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = Fused(("mlp.gate_proj", "mlp.up_proj"))
NEOX_NAMES = ("attn_norm", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
NEOX_INNER: Mapping[str, str | Fused] = {**{name: INNER[name] for name in NEOX_NAMES}, "attn_qkv": Fused(QKV)}
# Names of the norms in families that also have a norm after each part of a block.
NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERT_GATE_UP = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
# Tensors that stack all experts; source/gguf.py splits them into one for each expert.
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps.{}": "mlp.experts.{}.gate_proj",
    "ffn_up_exps.{}": "mlp.experts.{}.up_proj",
    "ffn_down_exps.{}": "mlp.experts.{}.down_proj",
}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Keys of an architecture -> keys of config.json.
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}


def nested(more: Collection[str] = (), *, beside: Collection[str]) -> Names:
    """Return the map from published tensor names to our names, for a text model in a multimodal checkpoint.

    The map covers the names that versions 4 and 5 of transformers write. more: the modules that the text model's blocks
    have and Llama's blocks lack. beside: names of the checkpoint's other parts, such as the vision model. Tensors of
    these parts are left out.
    """
    inner = {name: name for how in (*INNER.values(), *more) if isinstance(name := how, str)}
    outer = {ours: ours.removeprefix("model.") for ours in OUTER.values()}

    def at(start: str) -> Names:
        modules = {start + name: ours for ours, name in outer.items() if ours.startswith("model.")}
        return Names(modules, f"{start}layers.{{}}.", inner)

    return nested_at(at, beside)


def nested_at(at: Callable[[str], Names], beside: Collection[str]) -> Names:
    """Return the map of tensor names for a text model in a multimodal checkpoint.

    at: a function that gets a prefix, and returns the map for names with that prefix. beside: see `nested`.
    """
    plain = at("language_model.model.")
    return replace(
        plain,
        outer={**plain.outer, "language_model.lm_head": "lm_head"},
        more=(at("model.language_model."),),
        beside=(*plain.beside, *(f"{start}{part}." for part in beside for start in ("", "model."))),
    )


Metadata = Mapping[str, Any]  # the metadata keys of an architecture, without the architecture's name before them
More = Callable[[Metadata, Collection[str]], dict[str, Any]]


@dataclass(frozen=True)
class Gguf:
    """Describes how to read the GGUF files of a family.

    architecture: the value of general.architecture. keys: maps metadata keys to keys of config.json. more: a function
    that makes further entries of config.json from the metadata and the tensor names. by_more: the metadata keys that
    only `more` reads. names: the map of tensor names. turned: whether the rows of q and k alternate between the two
    halves of a head. stored_offset: a number that the file's writer added to the weights of norms. as_stored: prefixes,
    inside a block, of the names of norms without this offset.

    turned_part: the key of config.json for the rotated share of a head, for families that may rotate only a part.
    takes_factors: whether `more` also gets the factors of rotary frequencies, as a list under ROPE_FREQS. rounds_yarn:
    the value of YaRN's setting `truncate`, which GGUF files do not store. yarn: maps further metadata keys to keys of
    YaRN's scaling. next_blocks: the metadata key for the number of multi-token prediction blocks, which are the last
    blocks of a file; None = there are no such blocks.
    """

    architecture: str
    keys: Mapping[str, str] = field(default_factory=lambda: SIZES)
    more: More = lambda metadata, tensors: {}
    by_more: frozenset[str] = frozenset()
    names: Names = Names(OUTER, "blk.{}.", INNER)
    turned: bool = False
    stored_offset: float = 0.0
    turned_part: str | None = None
    takes_factors: bool = False
    rounds_yarn: bool = True
    yarn: Mapping[str, str] = field(default_factory=dict)
    as_stored: tuple[str, ...] = ()
    next_blocks: str | None = None


ROPE_FREQS = "rope_freqs.weight"  # factors of rotary frequencies: Llama 3's, Gemma 4's


def has_bias(tensors: Collection[str], module: str) -> bool:
    """Whether a module of the first block has a bias. module: the module's name in GGUF files."""
    return f"blk.0.{module}.bias" in tensors


def biases_of(tensors: Collection[str], **modules: str) -> dict[str, Any]:
    """Return the entry `key: True` of config.json for each key in `modules` whose module has a bias.

    modules: maps keys of config.json to module names in GGUF files. tensors: the tensor names of the file.
    """
    return {key: True for key, module in modules.items() if has_bias(tensors, module)}
