"""A head as in EAGLE-3, with training-time test (Li et al. 2025, arXiv 2503.01840); the drafter is drafters/eagle.py.

In step 0, row m reads the target's features of token m and the embedding of token m+1, and learns the target's
distribution of token m+2. Then every n-th row (`every`) continues as the head does in drafting. In step j, the row
reads the head's output of step j-1 instead of the target's features, and the embedding of token m+j+1. The row attends
to the step-0 rows up to m of its text, and to its own rows of steps 1 to j.

The loss is the sum over steps of decay^j times a loss of losses.py over the drafted ids. A row is left out if the head
does not draft the target's likeliest id. Rows that are not needed for any loss are not computed.

The head's layer begins as the target's last layer with attention, with its feed-forward part narrowed (narrowing.py).
The target's final norm and LM head follow this layer. The layer's input for token m+1 is not known, because the target
has not run this token. So before the first step, a least squares fit (`begin`) predicts this input from the features of
token m and the embedding of token m+1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.blocks import SIDES, Norm, Spec
from forerun.drafters.shared import head_files
from forerun.drafters.shared.eagle_model import EagleConfig, input_shapes, layer_shapes
from forerun.errors import BadOption
from forerun.registry import option, parse_list
from forerun.train import losses
from forerun.train.heads import (
    Batch,
    Teacher,
    TrainedBlock,
    Vocabulary,
    decayed,
    last_attending,
    measured,
    norm_of,
    own_blocks,
    shifted,
    visible,
)
from forerun.train.narrowing import Narrowing, narrowed

LAYER = "model.layers.0."
RIDGE = 1e-3  # of the mean square of the inputs, added to the fit's normal equations
LR = 8e-4
LEAST_MLP = 2048  # inner outputs, where no number is asked for


@dataclass(frozen=True, kw_only=True)
class Learning:
    """The training options of a head that continues from its own outputs."""

    draft_vocab: int = option(8192, "ids that it drafts, those that the target wrote most often", min=2)
    steps: int = option(4, "tokens that it learns to draft one after another", min=1)
    every: int = option(3, "of so many rows one goes on with its own; those rows take most of the time", min=1)
    decay: float = option(0.8, "weight of a step's loss relative to the step before")
    loss: str = option("kl", losses.HELP)

    def __post_init__(self) -> None:
        losses.check(self.loss)


@dataclass(frozen=True, kw_only=True)
class Options(Learning):
    """The options of the method: the layers and sizes of the head, and the settings of its training."""

    layers: str | None = option(
        None,
        "layers of the target behind which it reads, ascending, as in 15+29+30; none = half of them, "
        "all but one, and all",
    )
    mlp: int | None = option(
        None,
        "width of its feed-forward part, which keeps the target's inner outputs that "
        "add most; none = twice the hidden size, or 2,048 where that is more",
        min=1,
    )


def layers(options: Options, config: Spec) -> tuple[int, ...]:
    """Return the numbers of the target's residual streams that are read; k = the stream after the first k layers."""
    if options.layers is not None:
        return tuple(int(part) if part.isdigit() else -1 for part in parse_list(options.layers))
    num = config.num_layers
    return tuple(sorted({num // 2, max(0, last_attending(config)), num}))


def stepping_block(target: Spec, **changes: Any) -> Spec:
    """Return the spec of a head of one layer (see `own_blocks`).

    Raises BadOption for a target whose layer or final norm training does not support.
    """
    decoder = own_blocks(target, 1, **changes)
    norm = target.final_norm or Norm()
    if norm.kind != "rms" or norm.bias:
        raise BadOption(
            f"eagle and mtp cannot be trained for model_type={target.model_type!r}, whose last norm is a layer norm: "
            "train medusa"
        )
    return decoder


class SteppingHead:
    """A head of one layer that continues from its own outputs, in float32, with gradients.

    decoder: the spec of the head. weights: the weights of the layer, of the norms, and of the projection `input`, which
    maps the embedding of a token and the features of the token before to the layer's input. fitted: the index in
    `Batch.layers` of the input of the target's last layer with attention; None if this input is not read.
    """

    def __init__(
        self,
        teacher: Teacher,
        decoder: Spec,
        vocab: Vocabulary,
        weights: dict[str, Tensor],
        learning: Learning,
        fitted: int | None,
    ) -> None:
        self.weights, self.ids = weights, vocab.ids
        self._teacher, self._vocab, self._learning, self._fitted = teacher, vocab, learning, fitted
        self._block = TrainedBlock(decoder, weights, LAYER)
        self._norm = decoder.final_norm or Norm()
        self._eps = self._norm.eps

    def features(self, batch: Batch) -> Tensor:
        """Return the features of each token, which the head computes from the target's hidden states, [S, L, H]."""
        raise NotImplementedError

    def fed(self, stream: Tensor) -> Tensor:
        """Return the features [1, n, H] that the head reads in its next step j, which is one guess (see the module).

        stream [1, n, H]: the residual stream of n rows after the head's layer.
        """
        return stream

    @torch.no_grad()
    def begin(self, batches: Iterable[Batch]) -> None:
        """Fit the projection `input` by least squares to the input of the target's own layer at the next token.

        The squared error of a row is divided by the mean square of the target's row. If the input of the target's layer
        is not read (`fitted` is None), the weights are not changed.
        """
        if self._fitted is None:
            return
        width = self._teacher.config.hidden_size
        squares, products = torch.zeros(2 * width, 2 * width), torch.zeros(2 * width, width)
        for batch in batches:
            inputs = self._inputs(F.embedding(shifted(batch.ids, 1), self._teacher.embeddings), self.features(batch))
            rows = batch.inside & shifted(batch.inside, 1)
            x = inputs[rows]
            y = shifted(batch.layers[:, :, self._fitted], 1)[rows].float()
            weight = y.pow(2).mean(-1, keepdim=True).clamp(min=1e-6).rsqrt()
            squares += (x * weight).T @ (x * weight)
            products += (x * weight).T @ (y * weight)
        ridge = RIDGE * squares.diagonal().mean() * torch.eye(2 * width)
        self.weights["input.weight"].copy_(torch.linalg.solve(squares + ridge, products).T)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch. Every n-th row (`every`) continues after step 0.

        The offset of these rows depends only on the batch, so a resumed run has the same rows.
        """
        every = self._learning.every
        going_on = torch.arange(batch.ids.shape[1]) % every == int(batch.ids.sum()) % every
        return decayed(self._steps(batch, going_on), self._learning.decay, self._learning.loss)

    def measure(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Return agreement, overlap and loss (`Rows.numbers`) by step j of the head (see the module).

        In every step, all rows are measured.
        """
        return measured(self._steps(batch), batch, self.ids)

    def _steps(self, batch: Batch, going_on: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each step j of the head (see the module) the learned rows, their logits, and the target's logits.

        The rows are [S, L] bool, and the logits float32 [R, n]. R is the number of learned rows, and n the number of
        drafted ids. going_on [L] bool: the rows that continue after step 0; None = all rows.
        """
        steps = range(self._learning.steps)
        learned = [batch.ahead(j + 2) & self._vocab.has(shifted(batch.best, j + 1)) for j in steps]
        if going_on is not None:
            learned[1:] = [rows & going_on for rows in learned[1:]]
        needed = list(accumulate(reversed(learned), torch.logical_or))[::-1]
        mask, feature = visible(batch), self.features(batch)
        x, y = self._read(shifted(batch.ids, 1), feature)
        first = self._block.keys_values(y, batch.at)
        later = list[tuple[Tensor, Tensor]]()
        x, y = x[needed[0]][None], y[needed[0]][None]
        for j in steps:
            rows = needed[j]
            at = batch.at[rows][None] + j
            if j > 0:
                stays = rows[needed[j - 1]]
                x, y = self._read(shifted(batch.ids, j + 1)[rows][None], feature[:, stays])
                later = [(keys[:, :, stays], values[:, :, stays]) for keys, values in later]
                later.append(self._block.keys_values(y, at))
            attended = _attend(self._block.queries(y, at)[0], first, later, mask, rows, self._block.scale)
            stream = self._block.behind(x, y, attended[None])
            feature = self.fed(stream)
            logits = self._vocab.logits(self.normed(stream[0, learned[j][rows]]))
            with torch.no_grad():
                target = self._vocab.logits(shifted(batch.hidden, j + 1)[learned[j]])
            yield learned[j], logits, target

    def normed(self, rows: Tensor) -> Tensor:
        """Return rows after the head's final norm."""
        return norm_of(rows, self.weights["model.norm.weight"], self._eps, self._norm.offset)

    def _inputs(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """Return the input of the projection `input`: normed embeddings and normed features, joined, [S, L, 2 H]."""
        eps = self._eps
        sides = zip((embedded, feature), SIDES, strict=True)
        return torch.cat([norm_of(rows, self.weights[f"{name}.weight"], eps) for rows, name in sides], -1)

    def _read(self, ids: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream before the layer, and the input of the layer's attention, both [S, L, H].

        ids [S, L]: the token after each row's token. feature [S, L, H]: the features of each row's token.
        """
        inputs = self._inputs(F.embedding(ids, self._teacher.embeddings), feature)
        x = F.linear(inputs, self.weights["input.weight"])
        return x, self._block.read(x)


class Head(SteppingHead):
    """The head of the drafter eagle."""

    def __init__(self, options: Options, teacher: Teacher, seed: int) -> None:
        vocab = Vocabulary(teacher, options.draft_vocab)
        read = layers(options, teacher.config)
        whole = stepping_block(teacher.config, vocab_size=len(vocab.ids), tied=True)
        wanted = last_attending(teacher.config)
        fitted = read.index(wanted) if wanted in read else None
        decoder = narrowed(whole, options.mlp or max(LEAST_MLP, 2 * whole.hidden_size))
        if fitted is None:
            if options.mlp is not None and decoder != whole:
                raise BadOption(
                    f"mlp={options.mlp} keeps the inner outputs that add most, which only the rows before the target's "
                    f"last layer tell: add {wanted} to layers, or leave mlp out"
                )
            decoder = whole
        self.config = EagleConfig(decoder, read)
        super().__init__(teacher, decoder, vocab, _first_weights(self.config, teacher), options, fitted)
        self._narrowing = None
        if decoder != whole and fitted is not None:
            self._narrowing = Narrowing(whole, teacher.last, LAYER, fitted)

    @torch.no_grad()
    def begin(self, batches: Iterable[Batch]) -> None:
        """Fit the projection `input`. If the feed-forward part is narrower than the target's, fit its weights, too."""
        if self._narrowing is None:
            super().begin(batches)
            return
        super().begin(self._narrowing.seen(batches))
        down = self.weights[f"{LAYER}mlp.down_proj.weight"]
        for name, weight in self._narrowing.weights(down.shape[1]).items():
            self.weights[name].copy_(weight)
        self._narrowing = None  # frees its sums, too

    def features(self, batch: Batch) -> Tensor:
        """Return the features [S, L, H]: the rows of several layers, each after its own norm, joined by one matrix."""
        w, num = self.weights, batch.layers.shape[2]
        rows = batch.layers.float().clamp(-head_files.LARGEST, head_files.LARGEST)
        norms = torch.stack([w[f"fc_norm.{i}.weight"] for i in range(num)])
        return F.linear(norm_of(rows, norms, self._eps).flatten(2), w["fc.weight"])

    def files(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the config.json that the drafter reads."""
        weights = {name: weight.detach().bfloat16() for name, weight in self.weights.items()}
        return weights | {"d2t": self._vocab.offsets()}, self.config.to_json()


def _first_weights(config: EagleConfig, teacher: Teacher) -> dict[str, Tensor]:
    """Return the first weights: copies of the target's layer and final norm, and 1 for the weights of other norms.

    The first features are the last of the residual streams that are read.
    """
    width = config.decoder.hidden_size
    weights = {name: torch.ones(shape) for name, shape in input_shapes(config).items() if len(shape) == 1}
    weights["fc.weight"] = torch.cat((torch.zeros(width, width * (len(config.layers) - 1)), torch.eye(width)), 1)
    weights["input.weight"] = torch.eye(width).repeat(1, 2)
    for name, shape in layer_shapes(config).items():
        weights[name] = teacher.last[name][tuple(slice(size) for size in shape)].clone()
    return weights


def _attend(
    q: Tensor, first: tuple[Tensor, Tensor], later: Seq[tuple[Tensor, Tensor]], mask: Tensor, rows: Tensor, scale: float
) -> Tensor:
    """Return the attention of some rows to all keys of step 0, under the mask, and to own keys of later steps.

    rows [S, L] bool: the rows that attend. q [heads, R, D]: the queries of these rows, in order. first: keys and values
    of step 0, [S, heads, L, D]. later: keys and values of each later step, [1, heads, R, D]; row r attends only to key
    r. The result is [heads, R, D].
    """
    attended, begin = list[Tensor](), 0
    for packed, num in enumerate(rows.sum(1).tolist()):
        here = slice(begin, begin + num)
        scores = (q[:, here] @ first[0][packed].transpose(-1, -2)).float()
        scores = scores.masked_fill(~mask[packed][:, rows[packed]], -torch.inf)
        steps = [(q[:, here] * keys[0, :, here]).sum(-1, keepdim=True).float() for keys, _ in later]
        weights = (torch.cat((scores, *steps), -1) * scale).softmax(-1).to(q.dtype)
        length = mask.shape[-1]
        out: Tensor = weights[..., :length] @ first[1][packed]
        for i, (_, values) in enumerate(later):
            out = out + weights[..., length + i, None] * values[0, :, here]
        attended.append(out)
        begin += num
    return torch.cat(attended, 1)
