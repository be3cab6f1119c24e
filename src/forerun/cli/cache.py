"""The commands `forerun cache ...`, which list, verify and clear the KV blocks that --kv-disk keeps in a folder."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.help import App
from forerun.errors import BadOption, shown

FolderOption = Annotated[
    Path | None, typer.Option("--folder", help="of --kv-disk; none = the one in the user's cache", show_default=False)
]
SizeOption = Annotated[
    str | None, typer.Option("--kv-disk", help="the folder as other commands name it: 20GB:FOLDER", show_default=False)
]
DAMAGED = 1

app = App("What --kv-disk keeps: blocks of KV caches, by model.")


@app.command("list")
def list_kept(folder: FolderOption = None, kv_disk: SizeOption = None) -> None:
    """List the models whose KV blocks --kv-disk keeps, with their tokens, bytes and the time of the last use."""
    from forerun.kv.disk import kept
    from forerun.text.terminal import visible

    models = kept(_folder(folder, kv_disk))
    if not models:
        typer.echo("Nothing is kept there yet.")
    for one in models:
        used = datetime.datetime.fromtimestamp(one.used_at).astimezone().strftime("%Y-%m-%d %H:%M")
        tokens = f"{one.num_tokens:,} tokens"
        typer.echo(f"{one.path.name[:8]}  {used}  {one.num_bytes / 1e9:9.3f} GB  {tokens:>18}  {visible(one.model)}")


@app.command()
def verify(folder: FolderOption = None, kv_disk: SizeOption = None) -> None:
    """Read every block and compare it with its hash. Exit code 1: there are damaged blocks, which no engine uses."""
    from forerun.kv.disk import kept

    models = kept(_folder(folder, kv_disk), verifies=True)
    num_blocks, num_damaged = (sum(getattr(one, name) for one in models) for name in ("num_blocks", "num_damaged"))
    typer.echo(f"{num_blocks:,} blocks, {num_damaged:,} of them damaged")
    if num_damaged:
        raise typer.Exit(DAMAGED)


@app.command()
def clear(
    model: Annotated[str | None, typer.Argument(help="as list shows it; none = all", show_default=False)] = None,
    folder: FolderOption = None,
    kv_disk: SizeOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Remove the stored blocks of one model or of all models. Texts must then be read again."""
    from forerun.kv.disk import clear as removed, kept_of

    path = _folder(folder, kv_disk)
    kept_of(path, model)  # a model that is not there is refused before anybody is asked
    if not yes and not sys.stdin.isatty():
        raise BadOption("nobody can be asked here whether it may be removed: add --yes")
    if not yes:
        typer.confirm(f"remove what {shown(str(path))} keeps of {model or 'all models'}?", abort=True)
    typer.echo(f"{removed(path, model) / 1e9:.3f} GB removed")


def _folder(given: Path | None, kv_disk: str | None) -> Path:
    """Return the folder of KV blocks.

    Raises BadOption where --folder and --kv-disk both name the folder, and where --kv-disk is malformed. Ends the
    command where --folder is not given and the folder of --kv-disk, or else of the user's cache, does not exist.
    """
    from forerun.kv.disk import Limit, default_path

    if given is not None and kv_disk is not None:
        raise BadOption("--folder and --kv-disk both name the folder: drop one of them")
    path = given or (default_path() if kv_disk is None else Limit.parse(kv_disk).path)
    if given is None and not path.exists():
        typer.echo("Nothing is kept yet: commands with --kv-disk 20GB keep what they read.")
        raise typer.Exit
    return path
