"""The command `forerun convert-head`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert_head(
    folder: Annotated[Path, typer.Argument(help="folder of a head: config.json and pickles", show_default=False)],
    out: Annotated[Path, typer.Argument(help="folder to write, new or empty", show_default=False)],
) -> None:
    """Convert a head from a published pickle (pytorch_model.bin) to safetensors, without running the pickle's code."""
    from forerun.drafters.shared import converting
    from forerun.text.terminal import visible

    num = converting.convert_head(folder, out)
    typer.echo(f"{visible(str(out))}: {num} tensors; name it as METHOD:path={visible(str(out))}")
