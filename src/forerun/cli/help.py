"""typer as forerun uses it: plain help texts, as wide as the terminal and broken at spaces only."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence as Seq
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from forerun.cli.folding import folded
from forerun.cli.signatures import expanded
from forerun.errors import BadOption

# The headings of a command's options in help, in this order.
PANELS = ("Options", "Model", "Sampling", "Structured output", "Speculation", "Memory and batches", "Output")
ENGINE = "engine/"  # before the panel of an option that FORERUN_<NAME> and the --config file can set, too
LEAST_WIDTH = 40  # columns
NARROW = 76  # columns; below, flags have less room beside their texts
SETTINGS = {"help_option_names": ["-h", "--help"]}
UsageError: Any = typer.BadParameter.__mro__[1]  # click's own, which typer has under no public name
TARGET = "--target"
MODEL_ARGUMENTS = frozenset(("target", "targets", "models", "source"))
GAP = 2  # columns between a flag and its text
_FORMATTER: Any = typer.Context.formatter_class


class HelpFormatter(_FORMATTER):  # type: ignore[misc]  # typer ships its own copy of click now and imported it before
    """click's formatter without its limit of 78 columns and its line breaks at hyphens."""

    def __init__(self, **_: Any) -> None:
        super().__init__(width=max(shutil.get_terminal_size().columns, LEAST_WIDTH))  # 80 in a pipe

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write the line that says how a command is called."""
        self.write(folded(args, self.width, f"{prefix or 'Usage: '}{prog} ", " " * 4) + "\n")

    def write_text(self, text: str) -> None:
        """Write the paragraphs of a text, which are separated by empty lines."""
        indent = " " * self.current_indent
        paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
        self.write("\n\n".join(folded(paragraph, self.width, indent, indent) for paragraph in paragraphs) + "\n")

    def write_dl(self, rows: Seq[tuple[str, str]], col_max: int = 30, col_spacing: int = GAP) -> None:
        """Write names with their texts beside them. A name that is too long gets a line of its own."""
        most = col_max if self.width >= NARROW else col_max // 2
        column = self.current_indent + min(max(len(name) for name, _ in rows), most) + col_spacing
        for name, text in rows:
            left = " " * self.current_indent + name
            if len(left) + col_spacing > column:
                self.write(f"{left}\n")
                left = ""
            self.write(folded(" ".join(text.split()), self.width, left.ljust(column), " " * column).rstrip() + "\n")


def panel_of(param: Any) -> str:
    """Return the panel under which a help text shows an option."""
    return (getattr(param, "rich_help_panel", None) or PANELS[0]).removeprefix(ENGINE)


def first_sentence(text: str) -> str:
    """Return the first sentence, without its full stop. The dots of an omission (...) do not end a sentence."""
    return re.split(r"(?<!\.)\.(?:\s|$)", text.partition("\n\n")[0], maxsplit=1)[0]


class _Context(typer.Context):
    formatter_class = HelpFormatter


class _Command(TyperCommand):
    context_class = _Context

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line. `--target MODEL` may take the place of an argument that names a model."""
        flags = {flag for param in self.params for flag in param.opts}
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        model = next((param for param in arguments if param.name in MODEL_ARGUMENTS and TARGET not in flags), None)
        try:
            words, models = (args, []) if model is None else _without_flag(args, TARGET)
            if model is None or not models or model is arguments[0]:
                return super().parse_args(ctx, [*models, *words])
            rest = super().parse_args(ctx, words)
            if ctx.params[model.name] is not None:
                raise UsageError(f"The model is named twice, by {TARGET} and as an argument.")
            ctx.params[model.name] = models[-1]
            return rest
        except UsageError as error:
            error.ctx = error.ctx or ctx  # of the command whose help is of use; click's parser leaves it out
            if model is not None and getattr(error, "possibilities", None) is not None:
                error.possibilities = get_close_matches(
                    error.option_name, [TARGET, *(flag for flag in flags if flag.startswith("--"))]
                )
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options of each panel; options without a panel come first."""
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in PANELS}
        arguments = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                arguments.append(record)
            else:
                panels[panel_of(param)].append(record)
        for title, records in (("Arguments", arguments), *panels.items()):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _without_flag(args: list[str], flag: str) -> tuple[list[str], list[str]]:
    """Return the words of a command line without a flag, and the flag's values. Words after `--` are no flags."""
    end = args.index("--") if "--" in args else len(args)
    words, values = list[str](), list[str]()
    rest = iter(args[:end])
    for word in rest:
        value = next(rest, "-") if word == flag else word.removeprefix(f"{flag}=")
        if word == flag and value.startswith("-"):
            raise UsageError(f"Option '{flag}' requires an argument.")
        (words if value == word else values).append(value)
    return [*words, *args[end:]], values


class _Group(TyperGroup):
    context_class = _Context
    moved: Mapping[str, str] = {}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that is called. Raises BadOption for a former command; the error says where it is now."""
        if args[0] in self.moved:
            raise BadOption(
                f"{ctx.command_path} {args[0]} is a developer's benchmark, which is not in the package: in a copy of "
                f"forerun's repository, python -m benchmarks.{self.moved[args[0]]} runs it"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the whole first sentence of each command's help, which click would cut off at the end of the line."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        texts = [(name, (command.help or "") if command else "") for name, command in commands]
        with formatter.section("Commands"):
            formatter.write_dl([(name, first_sentence(text)) for name, text in texts])


class App(typer.Typer):
    """A command with subcommands. text: its help. moved: former subcommand -> the benchmark that replaces it."""

    def __init__(self, text: str, moved: Mapping[str, str] | None = None) -> None:
        super().__init__(
            help=text,
            cls=type("_Group", (_Group,), {"moved": moved or {}}),
            no_args_is_help=True,
            add_completion=False,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings=SETTINGS,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Add a command as typer.Typer.command does. Each `Fields` in the command's signature becomes flags."""
        add = super().command(name, **{"cls": _Command, "context_settings": SETTINGS, **settings})
        return lambda command: add(expanded(command))
