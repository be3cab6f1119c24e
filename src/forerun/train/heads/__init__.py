"""The drafting heads that can be trained. Each method is one file here, named like the drafter that reads the head.

The package is scanned for these files. Each file defines four names. `Options` is a frozen dataclass, whose fields have
help and range in `metadata`. `LR` is the default peak learning rate. `layers(options, config)` returns the numbers of
the residual streams of the target that the head reads. `Head(options, teacher, seed)` implements the protocol `Head` of
this module. `load` finds a method for `forerun train head`, and `Packing` makes the batches. loop.py has the training
loop.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun import registry
from forerun.blocks import Spec, weight_shapes
from forerun.drafters.shared import head_files
from forerun.errors import BadOption
from forerun.ops.model import LoadedModel
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import Rotation, TorchAttention, TorchBlock, TorchModel
from forerun.ops.torch_parts import Parts, Projections, normed
from forerun.ops.torch_rotations import TorchRotations
from forerun.ops.torch_tensors import tensor_of
from forerun.train import losses
from forerun.train.features import FeatureSource
from forerun.train.samples import Sample

WHAT = "method that can be trained"
RATED_SIZE = 576  # the target's hidden size at which the methods' learning rates, LR, were found
ROWS = 128  # rows whose logits of all ids are in memory at a time


@dataclass(frozen=True)
class Teacher:
    """Holds the parts of the target that a head may read.

    embeddings, head: the embeddings and the LM head, float32 [V, H], not trained. counts [num_ids]: how often the
    target wrote each id in the texts for training, without padding ids. probe: some embeddings, which identify the
    target (head_files.py). last: the weights of the last layer with attention, named as layer 0, and of the final norm.
    model: the whole target.
    """

    config: Spec
    embeddings: Tensor
    head: Tensor
    counts: Tensor
    probe: Tensor
    last: Mapping[str, Tensor]
    model: LoadedModel

    @classmethod
    def of(cls, model: LoadedModel, counts: Tensor, num_ids: int) -> Teacher:
        """Read the parts from a model in memory.

        counts [V]: how often the target wrote each id. num_ids: the number of ids that have a token; the other ids are
        padding.
        """
        ids = range(model.config.vocab_size)
        embedded = model.rows.to_host(model.embed(ids))
        embeddings, head = torch.from_numpy(embedded).float(), torch.from_numpy(model.head(ids)).float()
        at = f"model.layers.{max(0, last_attending(model.config))}."
        final = "model.norm.weight"
        names = [name for name in weight_shapes(model.config) if name.startswith(at)]
        weights = {name.replace(at, "model.layers.0."): model.weight(name) for name in names}
        last = {name: tensor_of(weight) for name, weight in (weights | {final: model.weight(final)}).items()}
        probe = tensor_of(head_files.probe(model, num_ids))
        return cls(model.config, embeddings, head, counts[:num_ids], probe, last, model)

    def mass(self, hidden: Tensor) -> Tensor:
        """Return the logsumexp of each row's logits, float32 [S, L]. hidden [S, L, H]: the rows after the final norm.

        The logits are the plain products with the LM head. The target's scale, cap or bias of logits is not applied, as
        everywhere in training.
        """
        parts = torch.split(hidden.flatten(0, 1), ROWS)
        rows = torch.cat([F.linear(part.float(), self.head).logsumexp(-1) for part in parts])
        return torch.unflatten(rows, 0, hidden.shape[:2])

    def decoder(self, ops: ReferenceOps) -> TorchModel:
        """Return a float32 copy of the target that computes with `ops`. The copy takes 4 bytes for each weight."""
        weights = {name: tensor_of(self.model.weight(name)) for name in weight_shapes(self.config)}
        return TorchModel(self.config, weights, ops)


def last_attending(target: Spec) -> int:
    """Return the index of the last layer with attention; -1 = no layer has attention."""
    return max((i for i, block in enumerate(target.blocks) if block.attention is not None), default=-1)


def own_blocks(target: Spec, num: int, **changes: Any) -> Spec:
    """Return the spec of a head: `num` blocks like the target's last block with attention, but without a window.

    changes: other values for fields of the spec. Raises BadOption for a target whose block has parts that training does
    not support.
    """
    block = target.blocks[last_attending(target)]
    a = block.attention
    plain = a is not None and (a.softcap, a.sinks, a.bias, a.position_scale) == (None, False, None, None)
    if a is None or not plain or a.rope is None or block.mlp is None or target.positions is not None:
        raise BadOption(
            f"a head with layers cannot be trained for model_type={target.model_type!r}, whose blocks have parts that "
            "training does not know: train medusa"
        )
    return replace(target, blocks=(replace(block, attention=replace(a, window=None)),) * num, **changes)


class TrainedBlock:
    """One transformer block of a head, computed with gradients by the code that also runs models. Rows are [S, L, H].

    i: the index of the block in the spec. weights: all weights of the head. at: the prefix of the names of this block's
    weights.
    """

    def __init__(self, spec: Spec, weights: Mapping[str, Tensor], at: str, i: int = 0) -> None:
        block = spec.blocks[i]
        assert block.attention is not None
        assert block.attention.rope is not None
        self.ops, self.spec = ReferenceOps(), block.attention
        self._block = TorchBlock(block, Parts(weights, torch.float32, Projections.of, apart=True), at)
        self._rotations = TorchRotations(block.attention.rope, self.spec.head_dim, torch.device("cpu"), torch.float32)
        self.scale = self.spec.scale or self.spec.head_dim**-0.5  # of scores

    @property
    def _attention(self) -> TorchAttention:
        assert self._block.attention is not None
        return self._block.attention

    def read(self, x: Tensor) -> Tensor:
        """Return the input of attention: the rows x of the residual stream after the norm, [S, L, H]."""
        return normed(self._block.pre_attention, self.ops, x)

    def queries(self, y: Tensor, at: Tensor) -> Tensor:
        """Return the queries [S, heads, L, D]. y [S, L, H]: the result of `read`. at [S, L]: the positions."""
        rows = self._attention.project(self.ops, y.flatten(0, 1), "q_proj")["q_proj"]
        return _by_text(self._attention.queries(self.ops, rows, self._turned(at)), len(y))

    def keys_values(self, y: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [S, heads, L, D]. y [S, L, H]: the result of `read`. at [S, L]: the positions.

        Each key-value head is repeated for all query heads of its group.
        """
        rows = self._attention.project(self.ops, y.flatten(0, 1), "k_proj")
        k, v = self._attention.keys_values(self.ops, rows, self._turned(at))
        num = self.spec.heads // self.spec.kv_heads
        return _by_text(k, len(y)).repeat_interleave(num, dim=1), _by_text(v, len(y)).repeat_interleave(num, dim=1)

    def behind(self, x: Tensor, y: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after the block.

        x: the residual stream before the block. y: the result of `read`. attended [S, heads, L, D]: the result of
        attention.
        """
        rows = self._attended(x, y, attended)
        return torch.unflatten(self._block.fed_forward(self.ops, rows, rows), 0, x.shape[:2])

    def inner(self, x: Tensor, y: Tensor, attended: Tensor) -> Tensor:
        """Return the input of the last matrix of the feed-forward part, [S * L, size]. Arguments: see `behind`."""
        assert self._block.mlp is not None
        rows = self._attended(x, y, attended)
        return self._block.mlp.inner(self.ops, normed(self._block.pre_mlp, self.ops, rows))

    def _attended(self, x: Tensor, y: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after attention, [S * L, H]. Arguments: see `behind`."""
        rows = attended.transpose(1, 2).flatten(2).flatten(0, 1)
        if self.spec.gate:
            rows = rows * self._attention.project(self.ops, y.flatten(0, 1), "gate_proj")["gate_proj"].sigmoid()
        return self._block.attended(self.ops, x.flatten(0, 1), self._attention.o.apply(self.ops, rows)[0])

    def _turned(self, at: Tensor) -> Rotation:
        return self._rotations.at(at.flatten(), int(at.max()) + 1 if at.numel() else 1)


def _by_text(rows: Tensor, num: int) -> Tensor:
    """Reshape [S * L, heads, D] to [S, heads, L, D]."""
    return torch.unflatten(rows, 0, (num, -1)).transpose(1, 2)


def norm_of(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Apply a root mean square norm to the rows x, and return them in float32. offset: added to the weight."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + offset if offset else weight)


class Vocabulary:
    """Holds the ids that a head drafts: the `num_ids` ids that the target writes most often.

    ids [n]: these ids, ascending. rows [n, H]: the rows of the LM head for these ids.
    """

    def __init__(self, teacher: Teacher, num_ids: int) -> None:
        self.ids = teacher.counts.argsort(descending=True, stable=True)[:num_ids].sort().values
        self.rows = teacher.head[self.ids]
        self._has = torch.zeros(teacher.config.vocab_size, dtype=torch.bool)
        self._has[self.ids] = True

    def has(self, ids: Tensor) -> Tensor:
        """Return, for each entry of `ids`, whether the head drafts this id."""
        return self._has[ids]

    def logits(self, hidden: Tensor) -> Tensor:
        """Map rows after the final norm [R, H] to float32 logits of the drafted ids [R, n]."""
        return F.linear(hidden.to(self.rows.dtype), self.rows).float()

    def offsets(self) -> Tensor:
        """Return the tensor d2t of published heads, [n]: for each draft id, the target's id minus the draft id."""
        return self.ids - torch.arange(len(self.ids))


@dataclass(frozen=True)
class Batch:
    """Holds texts, packed into S rows of L tokens.

    ids [S, L] int64. text [S, L] int64: the number of the token's text within the row, -1 = padding. at [S, L]: the
    token's index in its text. is_written [S, L] bool: whether the target wrote the token. layers [S, L, k, H] and
    hidden [S, L, H] bfloat16, best [S, L] int64: the target's features of each token (see Features). mass [S, L]
    float32: see Teacher.mass; 0 in batches for training.
    """

    ids: Tensor
    text: Tensor
    at: Tensor
    is_written: Tensor
    layers: Tensor
    hidden: Tensor
    best: Tensor
    mass: Tensor

    @property
    def inside(self) -> Tensor:
        """Whether another token of the same text follows each token, [S, L] bool.

        The target does not run the last token of a text, so the recorded features of this token are zeros.
        """
        inside = (self.text == shifted(self.text, 1)) & (self.text >= 0)
        inside[:, -1] = False
        return inside

    def ahead(self, num: int) -> Tensor:
        """Return for each token whether the target wrote the token `num` positions later in its text, [S, L] bool."""
        same = torch.zeros_like(self.is_written)
        if num < same.shape[1]:
            end = same.shape[1] - num
            same[:, :end] = (self.text[:, :end] == self.text[:, num:]) & (self.text[:, :end] >= 0)
            same[:, :end] &= self.is_written[:, num:]
        return same


@dataclass(frozen=True)
class Rows:
    """Holds the reference values for one guess of a head after each token [S, L] of a batch.

    The guess is of the token at a fixed distance. wanted: whether the text has a token at this distance. learned:
    whether the head has logits after this token. ids [n]: the ids that the head drafts. best: the target's likeliest id
    for the guessed token. mass: see Teacher.mass.
    """

    wanted: Tensor
    learned: Tensor
    ids: Tensor
    best: Tensor
    mass: Tensor

    def agreement(self, logits: Tensor) -> Tensor:
        """Return whether head and target agree on the likeliest id, [S, L] bool; False where the head has no logits.

        logits [R, n]: the head's logits of the learned rows.
        """
        agrees = torch.zeros_like(self.wanted)
        agrees[self.learned] = self.ids[logits.argmax(-1)] == self.best[self.learned]
        return agrees

    def numbers(self, at: str, logits: Tensor, target: Tensor, reached: Tensor) -> dict[str, tuple[float, float]]:
        """Return agreement, overlap and loss, each as a sum and its divisor. at: a suffix for these three names.

        agreement is alpha at temperature 0: among the rows where all earlier positions agreed (`reached`), the share of
        rows where the head's likeliest id is the target's. overlap is alpha at temperature 1: the mean of
        sum min(p, q) over all rows in `wanted`. overlap is a little too low, because a row counts as 0 if the head does
        not draft the target's likeliest id. logits, target [R, n]: the logits of head and target for the learned rows.
        """
        probs = (target - self.mass[self.learned].unsqueeze(-1)).exp()
        overlap = torch.minimum(probs, logits.softmax(-1)).sum()
        here = self.wanted & reached
        ce = cross_entropy(logits, target)
        return {
            f"agreement{at}": (float((self.agreement(logits) & here).sum()), float(here.sum())),
            f"overlap{at}": (float(overlap), float(self.wanted.sum())),
            f"loss{at}": (float(ce.sum()), float(len(ce))),
        }


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return each row's cross entropy -sum p ln q, [R]. p is the target's distribution, q the head's.

    logits, target [R, n]: the logits of head and target for the same ids.
    """
    return F.cross_entropy(logits, target.softmax(-1), reduction="none")


def decayed(parts: Iterable[tuple[Tensor, Tensor, Tensor]], decay: float, loss: str = "kl") -> Tensor:
    """Return the loss over all positions k (from 0): the sum of decay^k times the mean loss of position k.

    parts: for each position, the learned rows, and the logits of head and target [R, n] for these rows. loss: the name
    of a loss in losses.py.
    """
    total = torch.zeros(())
    for k, (_, logits, target) in enumerate(parts):
        # A batch may have nothing to learn: the sum of no rows is 0, with a gradient of 0.
        total = total + (decay**k * losses.by_row(loss, logits, target).mean() if len(logits) else logits.sum())
    return total


def measured(
    parts: Iterable[tuple[Tensor, Tensor, Tensor]], batch: Batch, ids: Tensor, *, of_learned: bool = False
) -> dict[str, tuple[float, float]]:
    """Return agreement, overlap and loss (`Rows.numbers`) by position, for heads that guess after every token.

    parts: as for `decayed`. ids [n]: the ids that the head drafts. of_learned: True = measure only the learned rows;
    False = measure all rows for which the target wrote a token at the position.
    """
    numbers = dict[str, tuple[float, float]]()
    reached = torch.ones_like(batch.is_written)
    for k, (learned, logits, target) in enumerate(parts):
        wanted = learned if of_learned else batch.ahead(k + 2)
        rows = Rows(wanted, learned, ids, shifted(batch.best, k + 1), shifted(batch.mass, k + 1))
        numbers |= rows.numbers(f"_{k + 1}", logits, target, reached)
        reached = reached & rows.agreement(logits)
    return numbers


def visible(batch: Batch) -> Tensor:
    """Return the causal mask, [S, 1, L, L] bool: a token attends to itself and to earlier tokens of its text."""
    length = batch.ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return ((batch.text.unsqueeze(1) == batch.text.unsqueeze(2)) & causal).unsqueeze(1)


def shifted(rows: Tensor, num: int) -> Tensor:
    """Shift rows [S, L, ...] to the front by `num` positions: row i of the result is row i + `num`.

    The last `num` rows are filled with copies of the last row, which must not be used.
    """
    return torch.cat((rows[:, num:], rows[:, -1:].expand(-1, num, *rows.shape[2:])), 1) if num else rows


class Head(Protocol):
    """The interface of a head that is trained. weights: the trained weights, by their names in the head's file.

    Seven further members are optional. `ids` has the ids that the head drafts; a head without `ids` drafts all ids.
    `at(share)` is called before each step with the share of finished steps. `rates` has the learning rates of some
    weights, by name, as multiples of the usual rate. `backbone` is a copy of the target that is trained too
    (backbone.py). `go_on_as(config)` takes over settings from the config.json of an earlier head, whose weights are the
    first weights. `read(folder)` reads the weights of an earlier head whose file uses other names.
    `save_beside(out, checkpoint)` writes more files to the out folder.

    The module of a head may define `remark(checkpoint)`, which returns a warning for the user about this target, or
    None.
    """

    weights: dict[str, Tensor]

    def begin(self, batches: Iterable[Batch]) -> None:
        """Fit the first weights on some batches, before the first step."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, with its gradient."""

    def measure(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Return agreement, overlap and loss for each position (`Rows.numbers`), each as a sum and its divisor."""

    def files(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the config.json that the head's drafter reads."""


def rate_of(spec: str, hidden_size: int = RATED_SIZE) -> float:
    """Return the default peak learning rate of `method[:option=value,...]` for a target. Raises BadOption.

    The methods' rates were found at hidden size 576. For matrices of a wider target, the rate is multiplied by
    576 / hidden_size (Yang et al. 2022, arXiv 2203.03466, table 3: Adam's rate of hidden weights). At hidden size 1,536
    the unscaled rate made a head worse from step to step.
    """
    name, _ = registry.parse_spec(spec)
    method = registry.load(__name__, name, WHAT)
    narrower = 1.0 if getattr(method, "TRAINS_VECTORS", False) else min(1.0, RATED_SIZE / hidden_size)
    return float(method.LR) * narrower


def load(spec: str, config: Spec) -> tuple[str, Any, Any]:
    """Return the name, the module and the options of the method that `spec`, `method[:option=value,...]`, describes.

    Raises BadOption for an unknown method or option, and for layers that the target does not have.
    """
    name, options = registry.parse_spec(spec)
    module = registry.load(__name__, name, WHAT)
    given = registry.make_options(module.Options, options, name)
    if wrong := [k for k in module.layers(given, config) if not 0 <= k <= config.num_layers]:
        raise BadOption(f"{name}: the target has {config.num_layers} layers, so none has {wrong[0]} before it")
    return name, module, given


class Packing:
    """Packs whole texts into rows, and makes batches of these rows. A batch depends only on the seed and the step.

    Each epoch has a new order of texts. In this order, each text is put into the first open row with enough room; at
    most 8 rows are open. Texts longer than a row are cut. Raises BadOption where there is no text.
    """

    def __init__(self, samples: Seq[Sample], source: FeatureSource, length: int, rows: int, seed: int) -> None:
        if not samples:
            raise BadOption("there are too few samples to learn from: let `forerun train sample` go on")
        self.samples, self._source, self._length, self._rows, self._seed = samples, source, length, rows, seed
        self._packed = cache(self._pack)
        self._firsts = [0]

    def batch(self, step: int) -> Batch:
        """Return the batch of one step."""
        return self.joined([self._row(i) for i in range(step * self._rows, (step + 1) * self._rows)])

    def epoch(self) -> list[list[int]]:
        """Return all rows of the first epoch in order. A row is a list of indices of samples."""
        return self._packed(0)

    def joined(self, rows: Seq[Seq[int]]) -> Batch:
        """Return a batch of the given rows. A row is a list of indices of samples."""
        filled = [self._filled(row) for row in rows]
        return Batch(*(torch.stack([getattr(row, name) for row in filled]) for name in Batch.__dataclass_fields__))

    def _row(self, number: int) -> list[int]:
        epoch = 0
        while True:
            rows = self._packed(epoch)
            if number < len(rows):
                return rows[number]
            number, epoch = number - len(rows), epoch + 1

    def _pack(self, epoch: int) -> list[list[int]]:
        order = list(range(len(self.samples)))
        random.Random(f"{self._seed} {epoch}").shuffle(order)
        rows: list[list[int]] = []
        waiting: list[tuple[int, list[int]]] = []  # room that is left, and the row
        for i in order:
            size = min(len(self.samples[i].ids), self._length)
            place = next((n for n, (room, _) in enumerate(waiting) if room >= size), None)
            if place is None:
                rows.append([])
                waiting.append((self._length, rows[-1]))
                place = len(waiting) - 1
                if len(waiting) > 8:
                    waiting.pop(0)
                    place -= 1
            room, row = waiting[place]
            row.append(i)
            waiting[place] = (room - size, row)
        return rows

    def _filled(self, row: Seq[int]) -> Batch:
        parts: list[Batch] = []
        left = self._length
        for number, i in enumerate(row):
            sample = self.samples[i]
            n = min(left, len(sample.ids))
            features = self._source.of(sample)
            index = torch.arange(n)
            parts.append(
                Batch(
                    torch.from_numpy(sample.ids[:n].astype("int64")),
                    torch.full((n,), number),
                    index,
                    index >= sample.num_given,
                    features.layers[:n],
                    features.hidden[:n],
                    features.best[:n],
                    torch.zeros(n),
                )
            )
            left -= n
        if left:
            padding = {name: rows.new_zeros(left, *rows.shape[1:]) for name, rows in vars(parts[0]).items()}
            parts.append(Batch(**{**padding, "text": torch.full((left,), -1)}))
        return Batch(*(torch.cat([getattr(part, name) for part in parts]) for name in Batch.__dataclass_fields__))
