"""Draft heads for toy models, computed by the reference operators in torch.

The heads compute in the toy's dtype, so that tests that enumerate all outputs stay exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from forerun.blocks import Spec
from forerun.kv.lent import LentCache
from forerun.ops.operators import HostRows, Operators
from forerun.ops.passes import Lent, Passed
from forerun.ops.reference import ReferenceOps
from forerun.ops.torch import TorchModel, placed
from forerun.ops.torch_tensors import torch_dtype
from forerun.sampling.arithmetic import Row
from forerun.types import RaggedBatch


def load(
    spec: Spec,
    weights: Mapping[str, Any],
    operators: Operators,
    *,
    device: str = "cpu",
    consume: bool = False,
    lent: Lent | None = None,
) -> ToyHead:
    """Return a draft head whose hidden states have the toy's dtype. ops.load_model explains the parameters."""
    return ToyHead(spec, weights, lent, operators.rows_dtype("float32"))


class _Tensors:
    """The methods of a toy that its draft head calls, with torch tensors in place of numpy arrays."""

    def __init__(self, toy: Any) -> None:
        self._toy = toy

    def embed(self, ids: Seq[int]) -> Tensor:
        """Return the toy's embedding of each id."""
        return torch.from_numpy(self._toy.embed(ids))

    def logits(self, hidden: Tensor, num_ids: int | None = None) -> Tensor:
        """Return the toy's logits of hidden states."""
        return torch.from_numpy(self._toy.logits(hidden.numpy(), num_ids))


class _TensorPools:
    """A toy's cache, whose rows are read as torch tensors."""

    native = None

    def __init__(self, pools: Any) -> None:
        self._pools = pools

    def __getitem__(self, block: int) -> _TensorPools:
        return _TensorPools(self._pools[block])

    def read(self, rows: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of these rows."""
        keys, values = self._pools.read(rows)
        return torch.from_numpy(keys), torch.from_numpy(values)


class ToyHead:
    """A draft head that takes and returns numpy arrays, as a toy does. Inside, it is a torch model."""

    in_torch: TorchModel

    def __init__(self, spec: Spec, weights: Mapping[str, Any], lent: Lent | None, dtype: str) -> None:
        tensors = {name: tensor.to(torch_dtype(dtype)) for name, tensor in placed(spec, weights, "cpu").items()}
        if lent is not None:
            target = lent.target
            lent = Lent(target.in_torch if isinstance(target, ToyHead) else _Tensors(target), lent.ids)
        self.in_torch = TorchModel(spec, tensors, ReferenceOps(), lent=lent)
        self.rows = HostRows()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.in_torch, name)

    def forward(
        self,
        batch: RaggedBatch,
        cache: Any,
        layers: Seq[int] | None = None,
        hidden: Row | None = None,
        taps: Seq[int] = (),
    ) -> Passed:
        """Run a pass with numpy arrays, like `TorchModel.forward`."""
        given = None if hidden is None else torch.from_numpy(hidden)
        if isinstance(cache, LentCache):
            cache = cache.through(_TensorPools(cache.pools))
        passed = self.in_torch.forward(batch, cache, layers, given, taps)
        return Passed(passed.hidden.numpy(), {k: rows.numpy() for k, rows in passed.taps.items()})

    def features(self, layer_rows: Seq[Row]) -> Row:
        """Return the head's features as a numpy array, like `TorchModel.features`."""
        return self.in_torch.features(list(map(torch.from_numpy, layer_rows))).numpy()

    def fed(self, hidden: Row) -> Row:
        """Return the rows for the head's next step as a numpy array, like `TorchModel.fed`."""
        return self.in_torch.fed(torch.from_numpy(hidden)).numpy()

    def remember(self, batch: RaggedBatch, cache: Any, layer_rows: Seq[Row]) -> None:
        """Write the features' keys and values into the cache, like `TorchModel.remember`. layer_rows: numpy arrays."""
        self.in_torch.remember(batch, cache, list(map(torch.from_numpy, layer_rows)))

    def embed(self, ids: Seq[int]) -> Row:
        """Return the embedding of each id."""
        return self.in_torch.embed(ids).numpy()

    def norm(self, hidden: Row) -> Row:
        """Return hidden states after the final norm."""
        return self.in_torch.norm(torch.from_numpy(hidden)).numpy()

    def logits(self, hidden: Row, num_ids: int | None = None) -> Row:
        """Return the logits of hidden states. num_ids: only the logits of the first ids."""
        return self.in_torch.logits(torch.from_numpy(hidden), num_ids).numpy()
