"""The lists of methods: `forerun drafters`, `rules`, `pacings` and `train heads`."""

from __future__ import annotations

from typing import Annotated

import typer

MethodName = Annotated[str | None, typer.Argument(help="show this one with its options", show_default=False)]


def list_methods(package: str, what: str, name: str | None, how: str) -> None:
    """Print the methods of a package, or the method `name` with its options. how: a text to print at the end.

    what: the word for a method of this package in errors.
    """
    from forerun.cli.folding import folded
    from forerun.cli.show import method_lines, option_lines
    from forerun.text.terminal import make_console

    width = make_console().width
    for line in method_lines(package, width) if name is None else option_lines(package, name, what, width):
        typer.echo(line)
    typer.echo("\n" + folded(how, width))
