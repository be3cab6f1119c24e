"""Checkpoint folders of torch's tensors, for tests that make their models with torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.blocks import Spec
from forerun.host_tensor import dtype_name
from forerun.models import naming, saving
from forerun.models.naming import Names
from forerun.ops.torch_tensors import HostWeights, tensor_of


def save_checkpoint(
    folder: str | Path, spec: Spec, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16, **options: Any
) -> None:
    """Write a checkpoint folder, see models.saving."""
    saving.save_checkpoint(folder, spec, HostWeights(weights), dtype_name(dtype), **options)


def published(names: Names, spec: Spec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of our names under the published ones, see models.naming."""
    return {name: tensor_of(own) for name, own in naming.published(names, spec, HostWeights(weights)).items()}
