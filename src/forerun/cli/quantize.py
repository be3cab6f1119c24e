"""The command `forerun quantize`: writes the weights of a checkpoint or a head in 8 or 4 bits to a new folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli import flags
from forerun.cli.signatures import Given


def quantize(
    engine: Annotated[Given, flags.engine("ignore_config_keys")],
    source: Annotated[
        str, typer.Argument(help="checkpoint: a folder or a hub id; or the folder of a head", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="folder to write, new or empty", show_default=False)],
    quantization: Annotated[str, typer.Option(help="int8 or int4[:group=N]")] = "int4:group=32",
) -> None:
    """Write a checkpoint with weights of 8 or 4 bits (compressed-tensors), which loads without rounding again.

    If the source is a head that `forerun train head` has written, the result is a head, too.
    """
    from forerun.config import EngineConfig, Quantization
    from forerun.drafters.shared.head_files import is_head, quantise_head
    from forerun.models.saving_quantised import quantise_checkpoint
    from forerun.text.terminal import visible

    wanted = Quantization.parse(quantization)
    keys = EngineConfig.make(ignore_config_keys=engine["ignore_config_keys"] or None).ignored_config_keys
    if is_head(Path(source)):
        before, after = quantise_head(Path(source), out, wanted)
    else:
        before, after = quantise_checkpoint(source, out, wanted, keys)
    typer.echo(f"{visible(str(out))}: {wanted}, {after / 1e6:.1f} MB of weights, which were {before / 1e6:.1f} MB")
