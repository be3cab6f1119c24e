"""Conversion of published heads whose weights are stored only as pickles.

torch unpickles only tensors and plain containers (weights_only), so no code in the file is run.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.drafters.shared.head_files import CONFIG, PICKLES, WEIGHTS
from forerun.errors import NotFound, UnsupportedModel, raising_os_errors, shown
from forerun.models.saving import new_folder
from forerun.text.files import unreadable


def convert_head(folder: Path, out: Path) -> int:
    """Write config.json and all tensors of a folder's pickles into the new folder `out`. Returns the number of tensors.

    Raises NotFound for a folder without config.json or pickles, UnsupportedModel for a pickle that does not hold named
    tensors only, and BadOption for an output folder that is not empty.
    """
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}")
    with new_folder(out):
        files = sorted(file for file in folder.glob("*") if file.suffix in PICKLES)
        if not files or not (folder / CONFIG).is_file():
            missing = CONFIG if files else f"pickle ({', '.join(PICKLES)})"
            raise NotFound(f"there is no {missing} in {folder}: name the folder of a head")
        tensors = dict[str, Tensor]()
        for file in files:
            for name, tensor in _tensors(file).items():
                if name in tensors:
                    raise UnsupportedModel(f"{file} has the tensor {shown(name)} of another file, too: take one away")
                tensors[name] = tensor.contiguous().clone()  # names that share memory cannot be saved
        with raising_os_errors(out / WEIGHTS):
            save_file(tensors, out / WEIGHTS, {"format": "pt"})
        shutil.copyfile(folder / CONFIG, out / CONFIG)
        return len(tensors)


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsupportedModel(
            f"{file} holds more than tensors, and loading it would run code ({shown(str(error).partition('.')[0])}): "
            "ask its authors for safetensors"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise unreadable(file, error, "a file that torch.save has written") from error
    entries = loaded.items() if isinstance(loaded, Mapping) else [(None, loaded)]
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in entries):
        raise UnsupportedModel(f"{file} holds no tensors by their names alone: ask its authors for safetensors")
    return dict(loaded)
