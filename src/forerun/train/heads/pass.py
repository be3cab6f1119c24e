"""PaSS: look-ahead vectors, with which the target itself drafts (Monea et al. 2023, arXiv 2311.13581).

The vectors LA_1 .. LA_T are the target's inputs at the positions of tokens m+1 .. m+T. The target's output at LA_j
learns the target's distribution of token m+j+1. The target is not changed: only the T x H numbers of the vectors are
learned, by gradients through all layers of the target. Every n-th token of a row (`every`) is a token m with a group of
vectors. The texts are run once, without gradients. Then each vector attends to the keys and values of its text up to m,
and to the earlier vectors of its group. The drafter is drafters/pass.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.blocks import Spec
from forerun.drafters.shared import head_files
from forerun.errors import BadOption
from forerun.ops.torch import TorchModel
from forerun.registry import option
from forerun.train import losses
from forerun.train.heads import Batch, Teacher, decayed, measured, shifted, visible
from forerun.train.ops import RememberingOps, run_rows

LR = 1e-2  # high, for so few numbers
TRAINS_VECTORS = True  # and no matrices, so that the target's width does not change the rate


@dataclass(frozen=True)
class Options:
    """The options of the method: the number of vectors, and the settings of their training."""

    vectors: int = option(4, "look-ahead vectors, one for each token ahead", min=1, max=16)
    every: int = option(16, "tokens from one place of a text that is learned to the next", min=1)
    decay: float = option(0.8, "weight of a vector's loss relative to the vector before")
    loss: str = option("kl", losses.HELP)

    def __post_init__(self) -> None:
        losses.check(self.loss)


def layers(options: Options, config: Spec) -> tuple[int, ...]:
    """Return no layers, because the method reads only the target's output.

    Raises BadOption for a target with sliding windows or recurrent states.
    """
    if config.has_windows:
        raise BadOption("pass cannot be trained for a target with sliding windows: train medusa or eagle")
    if config.has_states:
        raise BadOption("pass cannot be trained for a target that keeps states: train medusa")
    return ()


class Head:
    """Holds the look-ahead vectors, which are trained, and a float32 copy of the target, which is not trained."""

    def __init__(self, options: Options, teacher: Teacher, seed: int) -> None:
        self.options, self._rows = options, teacher.head
        self._ops = RememberingOps()
        self._target: TorchModel = teacher.decoder(self._ops)
        # The mean embedding of what the target writes: an input of the usual size.
        mean = teacher.counts @ teacher.embeddings[: len(teacher.counts)] / teacher.counts.sum().clamp(min=1)
        self.weights = {head_files.LOOK_AHEAD: mean.repeat(options.vectors, 1)}
        self.ids = torch.arange(len(teacher.head))

    def begin(self, batches: Iterable[Batch]) -> None:
        """Do nothing, because no first weights are fitted."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, with its gradient."""
        return decayed(self._heads(batch), self.options.decay, self.options.loss)

    def measure(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Return agreement, overlap and loss (`Rows.numbers`) by position.

        Only guesses after every n-th token (`every`) are measured, as in `loss`.
        """
        return measured(self._heads(batch), batch, self.ids, of_learned=True)

    def files(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the config.json that the drafter reads."""
        weights = {name: weight.detach().clone() for name, weight in self.weights.items()}
        return weights, {"num_look_ahead": self.options.vectors, "hidden_size": self._rows.shape[1]}

    def _heads(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each look-ahead vector the learned tokens, its logits, and the target's logits.

        The learned tokens, [S, L] bool, are the tokens before a group of vectors. The logits are float32 [R, V], with
        one row for each learned token.
        """
        length = batch.ids.shape[1]
        places = torch.arange(min(self.options.every, length) - 1, length, self.options.every)
        is_place = torch.zeros(length, dtype=torch.bool)
        is_place[places] = True
        behind = self._run(batch, places)
        for j in range(self.options.vectors):
            learned = batch.ahead(j + 2) & is_place
            logits = F.linear(behind[:, :, j][learned[:, places]], self._rows).float()
            with torch.no_grad():
                target = F.linear(shifted(batch.hidden, j + 1)[learned].to(self._rows.dtype), self._rows).float()
            yield learned, logits, target

    def _run(self, batch: Batch, places: Tensor) -> Tensor:
        """Return the target's hidden states at the look-ahead vectors, [S, n, T, H].

        places [n]: the indices of the tokens after which a group of T vectors is run.
        """
        num, num_rows = self.options.vectors, len(batch.ids)
        mask = visible(batch)
        with torch.no_grad():
            self._ops.begin(mask, remembers=True)
            run_rows(self._target, batch.ids, batch.at)
        row = torch.arange(num * len(places))
        before = (row // num == row.unsqueeze(1) // num) & (row <= row.unsqueeze(1))
        before = before.expand(num_rows, 1, -1, -1)
        self._ops.begin(torch.cat((mask[:, :, places].repeat_interleave(num, 2), before), -1), remembers=False)
        at = (batch.at[:, places].unsqueeze(-1) + torch.arange(1, num + 1)).flatten(1)
        vectors = self.weights[head_files.LOOK_AHEAD].repeat(num_rows * len(places), 1)
        hidden = run_rows(self._target, torch.zeros_like(at), at, vectors)
        return torch.unflatten(hidden, 0, (num_rows, len(places), num))
