"""The files of fitted drafters: arrays of token ids, and the fingerprint of the tokenizer that the ids belong to.

`forerun train ...` writes such a file, and `build` of the drafter reads it. The file is a safetensors file whose
metadata name its kind. Token ids mean something else in another tokenizer, so a file of another tokenizer is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from forerun.errors import BadOption, NotFound, raising_os_errors, shown
from forerun.text.files import unreadable
from forerun.text.tokenizer import Tokenizer

Arrays = Mapping[str, npt.NDArray[np.generic]]


def fingerprint(tokenizer: Tokenizer | None, num_ids: int) -> str:
    """Return a text that identifies a target's ids: the tokenizer's fingerprint, or else the number of ids."""
    return f"{num_ids} ids" if tokenizer is None else tokenizer.fingerprint


def save(path: Path, kind: str, arrays: Arrays, tokenizer: str, facts: Mapping[str, str] | None = None) -> None:
    """Write a file for a drafter, with the arrays that a command `forerun train ...` computed.

    kind: the command's name after `forerun train`. tokenizer: the `fingerprint` of the tokenizer to which the arrays'
    token ids belong. facts: further metadata, which `load` returns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {**(facts or {}), "forerun": kind, "tokenizer": tokenizer}
    with raising_os_errors(path):
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path, metadata=metadata)


def load(path: str, kind: str, tokenizer: str | None) -> tuple[dict[str, npt.NDArray[np.generic]], dict[str, str]]:
    """Return the arrays and the facts of a fitted file (see `save`).

    tokenizer: the `fingerprint` that the file must have; None = not compared. Raises NotFound if the file does not
    exist, UnsupportedModel if the file is empty, truncated or no safetensors file, and BadOption for a file of another
    kind or tokenizer.
    """
    file = Path(path)
    if not os.path.isfile(file):  # False also for an impossible file name
        raise NotFound(f"there is no file {shown(path)}: `forerun train {kind} --help` says how to make one")
    try:
        with safe_open(str(file), framework="numpy") as opened:
            facts = dict(opened.metadata() or {})
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise unreadable(file, error, f"a file of `forerun train {kind}`") from None
    made_by = facts.pop("forerun", None)
    if made_by != kind:
        what = "no command of forerun" if made_by is None else f"`forerun train {made_by}`"
        raise BadOption(f"{shown(path)} was made by {what} and not by `forerun train {kind}`: name such a file")
    if facts.pop("tokenizer", None) != tokenizer and tokenizer is not None:
        raise BadOption(
            f"{shown(path)} holds ids of another tokenizer than the target's: fit it again with `forerun train {kind}` "
            "and this target"
        )
    return arrays, facts
