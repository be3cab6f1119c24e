"""Conversions between host tensors and torch tensors, without a copy on a CPU, and names of dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.host_tensor import HELD_AS, HostTensor, dtype_name
from forerun.sampling.largest import top

_BYTES = {1: torch.uint8, 2: torch.int16}  # torch types that numpy has too, by the bytes of a number


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of this name."""
    return getattr(torch, name)  # type: ignore[no-any-return]


def tensor_of(numbers: HostTensor | np.ndarray[Any, Any], device: str | torch.device = "cpu") -> Tensor:
    """Return a host tensor or numpy array as a torch tensor. If `device` is a CPU, both share one memory."""
    if not isinstance(numbers, HostTensor):
        numbers = HostTensor.of(numbers)
    values = numbers.values
    if numbers.dtype == "bfloat16":
        tensor = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    elif numbers.dtype == "float8_e4m3fn":
        tensor = torch.from_numpy(values).view(torch.float8_e4m3fn)
    else:
        tensor = torch.from_numpy(values)
    return tensor.to(device)


def host_of(tensor: Tensor) -> HostTensor:
    """Return a torch tensor as a host tensor. If the torch tensor is on a CPU, both share one memory."""
    on_host = tensor.detach().cpu()
    name = dtype_name(tensor.dtype)
    if name in ("bfloat16", "float8_e4m3fn"):
        return HostTensor(on_host.view(_BYTES[on_host.dtype.itemsize]).numpy().view(HELD_AS[name]), name)
    return HostTensor(on_host.numpy(), name)


class TorchRows:
    """Operations on a model's hidden states [T, H] that are tensors on its device. See ops.model.RowsOf."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def empty(self, num: int, width: int) -> Tensor:
        """Return uninitialised float32 rows [num, width]."""
        return torch.empty(num, width, device=self._device)

    def join(self, parts: Seq[Tensor]) -> Tensor:
        """Concatenate several arrays of rows, in order."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def take(self, rows: Tensor, places: Seq[int]) -> Tensor:
        """Return a copy of the rows at these indices."""
        return rows[list(places)]

    def from_host(self, rows: np.ndarray[Any, Any]) -> Tensor:
        """Return a numpy array of rows as a tensor on the model's device."""
        return torch.from_numpy(rows).to(self._device)

    def top(self, logits: Tensor, num: int) -> np.ndarray[Any, Any]:
        """Return the token ids of each row's `num` largest logits, the best first: a numpy array [R, num].

        On a CPU, the lowest of equally good ids comes first. On another device, the order of equally good ids is
        undefined.
        """
        if logits.device.type == "cpu":
            return top(logits.detach().float().numpy(), num)[0]
        return logits.topk(min(num, logits.shape[1])).indices.cpu().numpy()

    def to_host(self, rows: Tensor) -> np.ndarray[Any, Any]:
        """Return the rows as a numpy array, whose values are valid only after `TorchModel.wait`.

        Rows on another device are copied once. bfloat16 rows become float32, because numpy has no bfloat16.
        """
        rows = rows.detach()
        if rows.dtype == torch.bfloat16:
            rows = rows.float()
        if rows.device.type == "cpu":
            return rows.numpy()
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.device.type == "cuda")
        return host.copy_(rows, non_blocking=True).numpy()


class DeviceWeights(Mapping[str, Any]):
    """Host weights, each copied to a device when it is looked up; quantised matrices stay as they are."""

    def __init__(self, weights: Mapping[str, Any], device: str) -> None:
        self._weights, self._device = weights, device

    def __getitem__(self, name: str) -> Any:
        weight = self._weights[name]
        return tensor_of(weight, self._device) if isinstance(weight, HostTensor) else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class HostWeights(Mapping[str, HostTensor]):
    """Torch tensors by name, each converted to a host tensor when it is looked up."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> HostTensor:
        return host_of(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def dtype_of(weights: Mapping[str, Any]) -> str:
    """Return the dtype in which weights are read: `weights.dtype` if it is set, else the first weight's dtype."""
    dtype: str | None = getattr(weights, "dtype", None)
    return dtype or dtype_name(next(iter(weights.values())).dtype)


def as_tensors(weights: Mapping[str, Any], empty: Callable[[], dict[str, Tensor]]) -> Mapping[str, Tensor]:
    """Return weights as a dictionary of tensors. A dictionary of tensors is returned as it is.

    The weights of any other mapping are read into the tensors of `empty()`. If the mapping has a method `blocks(name)`,
    each weight is read some rows at a time.
    """
    if isinstance(weights, dict) and all(isinstance(weight, Tensor) for weight in weights.values()):
        return weights
    placed = empty()
    for name, place in placed.items():
        if (blocks := getattr(weights, "blocks", None)) is None:
            place.copy_(tensor_of(weights[name]))
            continue
        first = 0
        for block in blocks(name):
            place[first : first + len(block)].copy_(tensor_of(block))
            first += len(block)
    return placed
