"""`forerun cache`: what --kv-disk keeps in its folder: list it, verify it, clear it."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.help import App

FolderOption = Annotated[
    Path | None, typer.Option("--folder", help="of --kv-disk; none = the one in the user's cache", show_default=False)
]
DAMAGED = 1

app = App("What --kv-disk keeps: blocks of KV caches, by model.")


@app.command("list")
def list_kept(folder: FolderOption = None) -> None:
    """List the models of the folder: tokens, bytes, and when they were used last."""
    from forerun.kv.disk import kept

    found = kept(_folder(folder))
    if not found:
        typer.echo("Nothing is kept there yet.")
    for one in found:
        used = datetime.datetime.fromtimestamp(one.used_at).astimezone().strftime("%Y-%m-%d %H:%M")
        tokens = f"{one.num_tokens:,} tokens"
        typer.echo(f"{one.path.name[:8]}  {used}  {one.num_bytes / 1e9:9.3f} GB  {tokens:>18}  {_shown(one.model)}")


@app.command()
def verify(folder: FolderOption = None) -> None:
    """Read every block and compare it with its hash. Exit code 1: some are damaged; no engine uses these."""
    from forerun.kv.disk import kept

    found = kept(_folder(folder), verifies=True)
    num_blocks, num_damaged = (sum(getattr(one, name) for one in found) for name in ("num_blocks", "num_damaged"))
    typer.echo(f"{num_blocks:,} blocks, {num_damaged:,} of them damaged")
    if num_damaged:
        raise typer.Exit(DAMAGED)


@app.command()
def clear(
    model: Annotated[str | None, typer.Argument(help="as list shows it; none = all", show_default=False)] = None,
    folder: FolderOption = None,
) -> None:
    """Remove what is kept, of one model or of all. Texts are then read again."""
    from forerun.kv.disk import clear as removed

    typer.echo(f"{removed(_folder(folder), model) / 1e9:.3f} GB removed")


def _folder(given: Path | None) -> Path:
    from forerun.kv.disk import default_path

    return given or default_path()


def _shown(text: str) -> str:
    from forerun.text.terminal import visible

    return visible(text)
