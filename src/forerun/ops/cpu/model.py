"""A whole model on the native operators: packed weights, and one native call for each pass."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from forerun import blocks
from forerun.blocks import (
    EMBEDDING,
    HEAD,
    LAYER_EMBEDDING,
    LAYER_PRODUCTS,
    POSITIONS,
    Attention,
    Buckets,
    Spec,
    products,
)
from forerun.config import Quantization
from forerun.errors import BadOption, InternalError
from forerun.host_tensor import Floats, HostTensor, address
from forerun.kv.cache import BlockCache
from forerun.kv.pool import HostPools, type_number
from forerun.kv.states import runs_alone
from forerun.ops.cpu.packed import PackedMatrix, distances_of, run_numbers, source_numbers, state_numbers
from forerun.ops.operators import HostRows
from forerun.ops.passes import (
    Lent,
    Passed,
    RanAhead,
    batch_of_sources,
    check_layers,
    check_pass,
    check_rows,
    check_sources,
    end_of,
    float_rows,
    kinds_in_words,
)
from forerun.ops.quantised import QuantisedMatrix, dequantised
from forerun.ops.quantising import RoundedWeights
from forerun.ops.rotary import Rotations, buckets_of_distances, sinusoids
from forerun.types import EDGES, Draw, Probs, RaggedBatch, Stop

if TYPE_CHECKING:
    from forerun.ops.cpu.operators import CpuOps


def _probs_of(token: int, distribution: tuple[Any, Any] | None) -> Probs:
    """Return the distribution from which a token was drawn.

    distribution: a pair of ids and probabilities. If the ids are None, the probabilities are for all ids. If the whole
    pair is None, the likeliest token was taken without a draw.
    """
    if distribution is None:
        return Probs.of_point(token)
    ids, weights = distribution
    return Probs(dense=weights) if ids is None else Probs(ids=ids, listed=weights)


class CpuModel:
    """The packed weights of a model, and the native object that runs a pass in one call.

    Input and output rows are float32. Keys and values are kept in the dtype of the weights (`weight_dtype`). weights,
    consume: see ops.load_model. Where `weights` is a dictionary, consumed weights are removed from it.
    """

    device = "cpu"
    activation_dtype = "float32"
    make_pools = HostPools
    rows = HostRows()
    tells_confidence = True  # `run_ahead` takes stops
    draws_ahead = True  # `run_ahead` takes draws
    feeds_itself = True  # `run_ahead` takes a head's own rows as features

    def __init__(
        self,
        ops: CpuOps,
        spec: Spec,
        weights: Mapping[str, HostTensor | QuantisedMatrix],
        *,
        consume: bool = False,
        lent: Lent | None = None,
    ) -> None:
        self.config, self.ops, self._lent = spec, ops, lent
        # The model keeps these arrays alive, because the native object has only their addresses.
        self._vectors: dict[str, Floats] = {}  # norms and their biases
        self._tables: dict[str, HostTensor] = {}  # tables whose rows are looked up
        self._places: dict[str, tuple[PackedMatrix, int, int]] = {}  # by weight: where it is packed, first row, rows
        source = _Source(weights, consume)
        weights_of_spec = blocks.weights(spec)
        groups = {product: [w.name for w in members] for product, members in products(weights_of_spec).items()}
        embedding = groups.pop("embedding", [])
        # The LM head, the largest matrix, comes first: the memory for packing it is free again before the others.
        if lent is None or spec.head:
            head = self._pack(source, groups.pop("head", embedding))
        else:
            head = lent.target.matrices["head"]
        self.matrices = {"head": head}
        self._embedding = head if spec.tied else self._take_table(source, EMBEDDING) if embedding else None
        of_layers = LAYER_PRODUCTS[0]
        if groups.pop(of_layers, []) and (table := self._take_table(source, LAYER_EMBEDDING)) is not None:
            self.matrices[of_layers] = table
        self.weight_dtype = head.dtype if lent is None else lent.target.weight_dtype
        self.cache_dtype = self.weight_dtype
        for product, names in groups.items():
            is_paired = product.endswith(".gate_up") and len(names) == 2
            is_wide = product.endswith(blocks.SCORES)
            self.matrices[product] = self._pack(source, names, paired=is_paired, is_wide=is_wide)
        for weight in weights_of_spec:
            if weight.role == "vector" and not weight.product:
                self._vectors[weight.name] = _vector(source.weights[weight.name])
        self._take_positions(source, spec, POSITIONS)
        self._take_biases(source, spec, "model.")
        if spec.encoder is not None:
            self._take_positions(source, spec.encoder, blocks.of_encoder(POSITIONS))
            self._take_biases(source, spec.encoder, "encoder.")
        self._native, self._rotations = self._made(spec)
        self._encoder = None if spec.encoder is None else self._made(spec.encoder, "encoder.")
        scale = HostTensor.of(np.float32(spec.embed_scale)).to(self.weight_dtype)
        self._embed_scale = float(scale.float32())  # rounded to the type, as published code does

    def _take_table(self, source: _Source, name: str) -> PackedMatrix | None:
        """Take over an embedding that is kept apart from the LM head.

        A quantised embedding is packed and returned. A dense embedding is kept as it is, and None is returned.
        """
        table = source.weights[name]
        if not isinstance(table, QuantisedMatrix):
            self._tables[name] = table.contiguous()
            return None
        packed = self.ops.pack(table)
        self._places[name] = (packed, 0, table.shape[0])
        return packed

    def _turns(self, end: int) -> list[tuple[int, int]]:
        """Return the address of each table of cos and sin, and its number of positions, which is at least `end`."""
        return turns(self._rotations, end)

    def _take_positions(self, source: _Source, spec: Spec, name: str) -> None:
        """Keep the table of position embeddings of a spec, if it has one. name: the name of the table's weight."""
        positions = spec.positions
        if positions is None:
            return
        if positions.kind == "sinusoidal":
            table: HostTensor | QuantisedMatrix = HostTensor.of(
                sinusoids(positions.num + positions.offset, spec.hidden_size)
            )
        else:
            table = source.weights[name]
        dense = dequantised(table) if isinstance(table, QuantisedMatrix) else table
        self._tables[name] = dense.to(self.weight_dtype).contiguous()

    def _take_biases(self, source: _Source, spec: Spec, part: str) -> None:
        """Keep the biases of relative positions in two forms: as they are stored, and in the order of distances.

        The kernels read the second form; see Biases in csrc/kernels.h. part: the prefix of the weight names.
        """
        for i, block in enumerate(spec.blocks):
            a = block.attention
            if a is None or not isinstance(a.bias, Buckets):
                continue
            name = f"{part}layers.{i}.{blocks.attention_name(a)}relative_attention_bias."
            table = _vector(source.weights[f"{name}weight"])
            buckets = buckets_of_distances(a.bias)[
                np.clip(distances_of(a.bias), -a.bias.max_distance, a.bias.max_distance) + a.bias.max_distance
            ]
            self._vectors |= {f"{name}weight": table, f"{name}by_distance": np.ascontiguousarray(table[buckets].T)}

    def _made(self, spec: Spec, part: str = "model.") -> tuple[Any, list[Rotations]]:
        """Return the native object of a spec, and the rotations that it needs. part: the prefix of the weight names."""

        def named(weights: Mapping[str, Any], of: Callable[[Any], Any]) -> dict[str, Any]:
            parts = (part, "head", EMBEDDING, *(blocks.BEFORE_BLOCKS if spec.features else ()))
            of_part = {name: of(weight) for name, weight in weights.items() if name.startswith(parts)}
            return {name.replace(part, "model.", 1): weight for name, weight in of_part.items()}

        matrices = named(self.matrices, lambda matrix: matrix.handle)
        if spec.own_embedding and part == "encoder.":
            matrices["embedding"] = self.matrices[blocks.of_encoder("embedding")].handle
        elif self._embedding is not None:
            matrices["embedding"] = self._embedding.handle
        native = self.ops.extension.make_model(
            self.ops.backend,
            spec,
            self.weight_dtype == "bfloat16",
            matrices,
            named(self._vectors, address),
            named(self._tables, lambda table: address(table.values)),
            *(() if self._lent is None else (self._lent.target._native, self._lent.ids)),
        )
        turned = [cast(Attention, spec.blocks[i].attention) for i in native.rotations]
        ropes = [(a.rope, a.head_dim) for a in turned]
        return native, [Rotations(rope, dim) for rope, dim in ropes if rope is not None]

    @property
    def weight_bits(self) -> tuple[int, ...]:
        """The bit widths of the quantised matrices, ascending; () = no matrix is quantised."""
        return tuple(sorted({bits for matrix in self._all_matrices() for bits in matrix.bits}))

    @property
    def has_dense(self) -> bool:
        """Whether some matrix is not quantised."""
        return bool(self._tables) or not all(matrix.bits for matrix in self._all_matrices())

    @property
    def bytes_per_pass(self) -> int:
        """The bytes of weights that a pass of a few rows reads: every packed matrix and norm once.

        Weights that are only applied to an encoder's input do not count. In a mixture of experts, only the experts of
        a single row are counted.
        """
        of_sources = [name for name in self.matrices if name.startswith("encoder.") or name.endswith(".kv")]
        decoders = {name: matrix for name, matrix in self.matrices.items() if name not in of_sources}
        read = round(sum(matrix.nbytes * blocks.read_share(self.config, name) for name, matrix in decoders.items()))
        return read + sum(v.nbytes for name, v in self._vectors.items() if not name.startswith("encoder."))

    def stored(self) -> Iterator[tuple[str, HostTensor]]:
        """Yield each weight with its name, as it is in memory."""
        for name, matrix in self.matrices.items():
            yield name, matrix.stored
            if matrix.bias is not None:
                yield f"{name}.bias", HostTensor.of(matrix.bias)
        yield from ((name, HostTensor.of(vector)) for name, vector in self._vectors.items())
        yield from self._tables.items()

    @property
    def precision(self) -> str:
        """The precision of the weights in words, such as "4-bit and 8-bit weights" or "bfloat16 weights"."""
        return kinds_in_words(self.weight_bits, [self.weight_dtype] * self.has_dense)

    def forward(
        self,
        batch: RaggedBatch,
        cache: BlockCache | None,
        layers: Seq[int] | None = None,
        hidden: Floats | None = None,
        taps: Seq[int] = (),
    ) -> Passed:
        """Run one pass; see TorchModel.forward. The returned rows are float32."""
        chosen, is_normed = check_pass(self.config, batch, layers, hidden, taps)
        if cache is None and any(block.attention is not None for block in self.config.blocks):
            raise InternalError("native models keep keys and values in a cache and were given none")
        tokens, positions = batch.ids()
        states = self._states(batch, cache)
        hidden = None if hidden is None else np.ascontiguousarray(hidden, np.float32)
        size = (len(tokens), self.config.hidden_size)
        out = np.empty(size, np.float32)
        inner = {k: np.empty(size, np.float32) for k in taps}
        num_experts = list[int]()
        if tokens:
            num_experts = self._native.forward(
                tokens,
                positions,
                self._turns(end_of(batch)),
                len(batch.slots),
                *self._cached(batch, cache),
                list(chosen),
                address(hidden),
                [(k, address(inner[k])) for k in sorted(taps)],
                is_normed,
                address(out),
                sources=[] if cache is None else self._sources(batch, cache),
                states=states,
            )
        return Passed(out, inner, num_experts)

    def _cached(self, batch: RaggedBatch, cache: BlockCache | None) -> tuple[list[list[int]], Any]:
        """Encode a pass's runs as integers, one list for each of CacheShape.kinds. Return the lists and the KV pools.

        Without a cache, there is one list, and the pools keep no rows.
        """
        if cache is not None:
            return [run_numbers(batch, kind.tables(batch)) for kind in cache.kinds], cache.pools.native
        tables = [list(batch.run(b)) for b in range(len(batch.slots))]
        nowhere = [0] * self.config.num_layers
        kept = type_number(self.cache_dtype)  # the inputs of convolutions are rounded as if they were kept
        pools = self.ops.extension.Pools(nowhere, nowhere, 1, [(0, 0)], [batch.run_starts[-1]], kept)
        return [run_numbers(batch, tables)], pools

    def _states(self, batch: RaggedBatch, cache: BlockCache | None, counts: Seq[int] | None = None) -> list[int]:
        """Encode the states and rows that recurrent blocks read and write as integers, run by run.

        The list is empty without recurrent blocks. counts: see `StateTables.plan`.
        """
        if all(block.recurrence is None for block in self.config.blocks):
            return []
        if cache is None or cache.states is None:
            return state_numbers(runs_alone(batch))
        return state_numbers(cache.states.plan(batch, counts))

    def remember(self, batch: RaggedBatch, cache: BlockCache, layer_rows: Seq[Floats]) -> None:
        """Write the keys and values of these tokens' features into the cache; see TorchModel.remember."""
        rows = [float_rows(layer, self._feature_size, batch.run_starts[-1]) for layer in layer_rows]
        numbers, pools = self._cached(batch, cache)
        where = batch.ids()[1], self._turns(end_of(batch)), len(batch.slots), numbers, pools
        self._native.remember(*where, [address(layer) for layer in rows])

    def features(self, layer_rows: Seq[Floats]) -> Floats:
        """Return a draft head's features, float32 [n, H].

        layer_rows: the target's hidden states [n, size] after each layer that the head reads.
        """
        rows = [float_rows(layer, self._feature_size, len(layer_rows[0])) for layer in layer_rows]
        out = np.empty((len(rows[0]), self.config.hidden_size), np.float32)
        self._native.features([address(layer) for layer in rows], len(out), address(out))
        return out

    def fed(self, hidden: Floats) -> Floats:
        """Project a draft head's output to rows that replace the target's hidden states when the head drafts on.

        See TorchModel.fed.
        """
        return self.ops.linear(float_rows(hidden, self.config.hidden_size), self.matrices["output"])

    @property
    def _feature_size(self) -> int:
        return self.config.hidden_size if self.config.features is None else self.config.features.size

    def begin(self, sources: Mapping[int, Seq[int]], cache: BlockCache) -> None:
        """Run the encoder over each of its inputs, and fill the decoder's cache; see TorchModel.begin."""
        encoder = self.config.encoder
        if encoder is None or self._encoder is None:
            raise InternalError(f"model_type={self.config.model_type!r} has no encoder, and was given a source")
        batch, (native, rotations) = batch_of_sources(sources), self._encoder
        tokens, positions = batch.ids()
        shape, num = encoder.cache_shape, encoder.num_layers
        kept = HostTensor.empty((2, len(tokens), shape.num_kv_heads, shape.head_dim), self.cache_dtype)  # of one layer
        number = type_number(self.cache_dtype)
        row_bytes = shape.num_kv_heads * shape.head_dim * kept.values.itemsize
        addresses = [address(kept.values[0])] * num, [address(kept.values[1])] * num
        pools = self.ops.extension.Pools(*addresses, 1, [(row_bytes, row_bytes)], [len(tokens)], number)
        rows = np.empty((len(tokens), encoder.hidden_size), np.float32)
        native.forward(
            tokens,
            positions,
            turns(rotations, end_of(batch)),
            len(batch.slots),
            [run_numbers(batch, [list(batch.run(b)) for b in range(len(batch.slots))])],
            pools,
            list(range(num)),
            0,
            [],
            True,
            address(rows),
        )
        places = np.concatenate([cache.rows(slot, 0, len(source)) for slot, source in sources.items()])
        for i in cache.shape.kept:
            a = self.config.blocks[i].attention
            if a is not None and a.sees == "encoder":
                keys_values = self.ops.linear(rows, self.matrices[f"model.layers.{i}.kv"])
                pairs = keys_values.reshape(len(rows), 2, a.kv_heads, a.head_dim)
                cache.pools[i].write(places, pairs[:, 0], pairs[:, 1])

    def _sources(self, batch: RaggedBatch, cache: BlockCache) -> list[int]:
        """Encode the cache rows of each run's encoder input as integers; the list is empty without an encoder."""
        if self._encoder is None:
            return []
        check_sources(batch)
        return source_numbers(batch, [cache.table(source.slot) for source in batch.sources])

    def run_ahead(
        self,
        batch: RaggedBatch,
        lengths: list[int],
        cache: BlockCache,
        num_ids: int,
        layers: Seq[int] | None = None,
        hidden: Floats | None = None,
        *,
        stops: Seq[Stop] = (),
        layer_rows: Seq[Floats] = (),
        draws: Seq[Draw] = (),
    ) -> RanAhead | None:
        """Continue each run b by lengths[b] token ids in one call. Returns None if a row's largest logit is not finite.

        batch: runs of committed tokens, one for each sequence. Cache rows are reserved for these tokens and for
        lengths[b] - 1 more ids, which are fed one by one. layers: the layers to compute; None = all. The final norm
        follows the last of these layers. ids[b][i] is chosen from the first `num_ids` logits after the run's tokens and
        ids[b][:i]. draws: for each run, the settings with which ids are drawn; () = the likeliest ids are taken. stops:
        for each run, the rule that ends the run early; () = no run ends early.

        A draft head takes one of two inputs. hidden [T, H] is the tokens' features. layer_rows are the target's hidden
        states [T, size] after each layer that the head reads. For an id that is fed, the features are the head's own
        output for the token before that id.
        """
        chosen = range(self.config.num_layers) if layers is None else layers
        check_layers(self.config, chosen)
        if not batch.slots:
            return RanAhead([])
        counts = [end - start for start, end in itertools.pairwise(batch.run_starts)]
        ends = [0, *itertools.accumulate(count + length - 1 for count, length in zip(counts, lengths, strict=True))]
        fed = dataclasses.replace(batch, run_starts=ends)
        numbers = [run_numbers(fed, kind.tables(fed)) for kind in cache.kinds]
        rotated = self._turns(end_of(batch) + max(lengths, default=0))
        check_rows([] if hidden is None else [hidden], batch, self.config.hidden_size)
        check_rows(layer_rows, batch, self._feature_size)
        hidden = None if hidden is None else np.ascontiguousarray(hidden, np.float32)
        pools = cache.pools.native
        rows = [np.ascontiguousarray(layer, np.float32) for layer in layer_rows]
        given = list(map(address, rows))
        native_stops = [self.ops.extension.Stop(EDGES, stop.shares, stop.least) for stop in stops]
        states = self._states(fed, cache, counts)
        result = self._native.run_ahead(
            *batch.ids(),
            counts,
            lengths,
            rotated,
            numbers,
            pools,
            list(chosen),
            num_ids,
            address(hidden),
            native_stops,
            given,
            self._sources(batch, cache),
            [
                self.ops.extension.Draw(*draw.filters, draw.shares_noise, draw.seed, draw.position, draw.round)
                for draw in draws
            ],
            states,
        )
        if result is None:
            return None
        ids, confidences, distributions = result
        of_draws = zip(ids, distributions, strict=True) if draws else ()
        probs = [list(map(_probs_of, drawn, kept)) for drawn, kept in of_draws]
        return RanAhead(ids, confidences if stops else (), probs)

    def wait(self) -> None:
        """Do nothing, because every call of this model returns only after its results are computed."""

    def rounded(self, quantization: Quantization) -> CpuModel:
        """Return a second model of these weights with every matrix rounded; this model stays as it is.

        Raises BadOption if some matrix already has at most `quantization.bits` bits, or if the group size does not
        divide the length of a row.
        """
        if self.weight_bits and self.weight_bits[0] <= quantization.bits:
            raise BadOption(
                f"quantization={str(quantization)!r} is not possible: the model has {self.precision} in memory; load "
                "it with dtype='float32' or from an unquantised checkpoint"
            )
        spec_weights = blocks.weights(self.config)
        weights = RoundedWeights(spec_weights, self.matrix_rows, self.vector, quantization, None)
        return CpuModel(self.ops, self.config, weights, lent=self._lent)

    def embed(self, ids: Seq[int]) -> Floats:
        """Return the embeddings of these token ids, float32 [n, H], with the same bits as in a pass.

        A draft head returns zeros, because it takes features in place of embeddings.
        """
        if self.config.features is not None:
            return np.zeros((len(ids), self.config.hidden_size), np.float32)
        table = self._embedding
        stored = self._tables[EMBEDDING][list(ids)] if table is None else table.unpack(ids)
        rows = stored.float32()
        return rows if self._embed_scale == 1 else rows * np.float32(self._embed_scale)

    def norm(self, hidden: Floats) -> Floats:
        """Apply the final norm to rows of the residual stream [R, H], float32, with the same bits as in a pass."""
        hidden = float_rows(hidden, self.config.hidden_size)
        out = np.empty_like(hidden)
        self._native.norm(address(hidden), len(hidden), address(out))
        return out

    def logits(self, hidden: Floats, num_ids: int | None = None) -> Floats:
        """Compute the logits: hidden [R, H] -> float32 [R, V], or [R, num_ids] for the first `num_ids` token ids."""
        width = min(num_ids or self.config.vocab_size, self.config.vocab_size)
        hidden = float_rows(hidden, self.config.hidden_size)
        out = np.empty((len(hidden), width), np.float32)
        if len(hidden):
            self._native.logits(address(hidden), len(hidden), width, address(out))
        return out

    def best(self, hidden: Floats, rows: list[int], num_ids: int) -> tuple[list[int], list[float]]:
        """Return the token id and the value of the largest logit in each row of hidden [T, H] that `rows` lists.

        Only the first `num_ids` ids are considered. Ties go to the lowest id, and NaN counts as the largest. The values
        have the same bits as in `logits`. No other logits are written to memory.
        """
        if not rows:
            return [], []
        hidden = float_rows(hidden, self.config.hidden_size)
        return self._native.argmax(address(hidden), len(hidden), rows, num_ids)  # type: ignore[no-any-return]

    def head(self, ids: Seq[int]) -> Floats:
        """Return the LM head's rows for these token ids, float32 [n, H], as they were before packing."""
        return self.matrices["head"].unpack(ids).float32()

    def weight(self, name: str) -> Floats:
        """Return a weight by its name in a checkpoint, float32, as it was before packing."""
        if name in self._tables:
            return self._tables[name].float32()
        if name in self._vectors or name.endswith(".bias"):
            return self.vector(name).float32()
        return self.matrix_rows(name, range(self._places[name][2])).float32()

    def vector(self, name: str) -> HostTensor:
        """Return a norm or a bias by its name in a checkpoint, float32.

        If only some matrices of a product have a bias, the other matrices have a bias of 0.
        """
        if name in self._vectors:
            return HostTensor.of(self._vectors[name])
        if name in self._tables:
            return self._tables[name].to("float32")
        matrix = EMBEDDING if name == "lm_head.bias" and self.config.tied else name.removesuffix("bias") + "weight"
        packed, first, num = self._places[matrix]
        assert packed.bias is not None
        return HostTensor.of(packed.bias[first : first + num])

    def matrix_rows(self, name: str, rows: range) -> HostTensor:
        """Return rows of a matrix by its name in a checkpoint, [rows, I], as they were before packing."""
        if name in self._tables:
            return self._tables[name][rows.start : rows.stop]
        packed, first, _ = self._places[name]
        return packed.unpack(range(first + rows.start, first + rows.stop))

    def _all_matrices(self) -> list[PackedMatrix]:
        return [*self.matrices.values(), *([] if self._embedding is None else [self._embedding])]

    def _pack(self, source: _Source, names: Seq[str], *, paired: bool = False, is_wide: bool = False) -> PackedMatrix:
        parts, bias = source.parts(names)
        if is_wide:
            parts = [(dequantised(part) if isinstance(part, QuantisedMatrix) else part).to("float32") for part in parts]
        sizes = [part.shape[0] for part in parts]
        packed = self.ops.pack(parts, bias, paired=paired, consume=source.consume)
        for name, size, end in zip(names, sizes, itertools.accumulate(sizes), strict=True):
            self._places[name] = (packed, end - size, size)
        return packed


def turns(rotations: Seq[Rotations], end: int) -> list[tuple[int, int]]:
    """Return the address of each table of cos and sin, and its number of positions, which is at least `end`."""
    return [(address(rotation.table(end)), rotation.num_positions) for rotation in rotations]


def _vector(weight: HostTensor | QuantisedMatrix) -> Floats:
    """Return a float32 copy of a vector, for the model to keep."""
    assert isinstance(weight, HostTensor)
    return np.array(weight.float32(), order="C")


@dataclass(frozen=True)
class _Source:
    """The weights from which a model is packed. Each weight is looked up once, and released when it is packed.

    consume: whether to remove the weights from the dictionary that holds them.
    """

    weights: Mapping[str, HostTensor | QuantisedMatrix]
    consume: bool

    def parts(self, names: Seq[str]) -> tuple[list[HostTensor | QuantisedMatrix], HostTensor | None]:
        """Return the matrices of these names, and their biases joined to one vector; None = no matrix has a bias."""
        parts = [self.weights[name] for name in names]
        ends = {EMBEDDING: "lm_head.bias", HEAD: "lm_head.bias"}
        bias_names = [ends.get(name, name.removesuffix("weight") + "bias") for name in names]
        biases = [self.weights.get(name) for name in bias_names]
        if self.consume and isinstance(self.weights, MutableMapping):
            for name in names:
                del self.weights[name]
        if all(bias is None for bias in biases):
            return parts, None
        filled = [
            np.zeros(part.shape[0], np.float32) if bias is None else _vector(bias)
            for part, bias in zip(parts, biases, strict=True)
        ]
        return parts, HostTensor.of(np.concatenate(filled))
