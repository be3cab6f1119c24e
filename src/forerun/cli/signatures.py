"""Commands whose flags come from dataclasses: a field with a help text is a flag, with its type, range and default.

`engine: Annotated[Given, Fields(EngineConfig, ("target", "draft"))]` in a command's signature stands for the flags of
these fields. The command gets the given values, by field name. So an option is written once, as a field.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.errors import BadOption, shown
from forerun.registry import REQUIRED, flag_of, names as registered

STANDARD_OUTPUT = Path("-")  # stands for standard output in place of a file
Given = dict[str, Any]  # the given values, by field name


@dataclass(frozen=True)
class Fields:
    """The flags of a dataclass's fields, in place of one parameter of a command.

    names: the fields that get flags, in the order of the flags; () = all fields that have a help text. leave_out: the
    fields that get no flag. usual: by field name, the value that help shows in place of the field's default. panel: the
    heading in help for flags whose fields name no heading. before: a prefix of each heading. is_plan: whether an option
    that is not given has the field's default. Otherwise such an option is None, and a variable or a config file may set
    it.
    """

    cls: type[Any]
    names: Seq[str] = ()
    leave_out: Collection[str] = ()
    usual: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    panel: str | None = None
    before: str = ""
    is_plan: bool = False

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield each field's name, and the parameter for it in a command's signature."""
        fields = self.cls.__dataclass_fields__
        hints = typing.get_type_hints(self.cls)
        for name in self.names or [name for name, field in fields.items() if "help" in field.metadata]:
            if name not in self.leave_out:
                yield name, (self._of_plan if self.is_plan else self._of_source)(fields[name], hints[name])

    def _of_source(self, field: dataclasses.Field[Any], hint: Any) -> Parameter:
        about = field.metadata
        value = self.usual.get(field.name, field.default)
        known = f"; methods: {', '.join(registered(about['methods']))}" if "methods" in about else ""
        is_silent = "usual" in about or value in (None, ()) or (value is False and hint is bool)
        text = about["help"] + known + ("" if is_silent else f" [default: {value}]")
        option = typer.Option(
            _flags(field),
            *about.get("aliases", ()),
            help=_default_last(text, about),
            show_default=False,
            rich_help_panel=self._panel(about),
        )
        return _parameter(field.name, None, about.get("takes", _kind(hint)) | None, option)

    def _of_plan(self, field: dataclasses.Field[Any], hint: Any) -> Parameter:
        about = field.metadata
        default: Any = field.default
        is_required, is_list = default is REQUIRED, typing.get_origin(hint) is tuple
        text = about["help"] + ("; may be repeated" if is_list else "")
        if is_list and default and not is_required and "usual" not in about:
            text += f" [default: {_listed(default)}]"
        given = {name: about[name] for name in ("min", "max", "envvar") if name in about}
        if about.get("is_written"):
            given["callback"] = writable
        has_default = not (is_required or is_list or default is None or "usual" in about)
        option = typer.Option(
            _flags(field),
            help=_default_last(text, about),
            show_default=has_default,
            rich_help_panel=self._panel(about),
            **given,
        )
        kind = about.get("takes", _kind(hint))
        name = flag_of(field).removeprefix("--").replace("-", "_")
        if is_required:
            return _parameter(name, Parameter.empty, kind, option)
        return _parameter(name, default if has_default else None, kind if has_default else kind | None, option)

    def _panel(self, about: Mapping[str, Any]) -> str | None:
        panel = about.get("panel", self.panel)
        return None if panel is None else self.before + panel

    def given(self, values: Mapping[str, Any]) -> Given:
        """Return the values of a command's flags by field name. For a plan, leave out values that were not given."""
        if not self.is_plan:
            return dict(values)
        frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return {name: value for name, value in frozen.items() if value is not None and value != ()}


def writable(option: typer.CallbackParam, file: Path | None) -> Path | None:
    """Return the file of an option. Raises BadOption, before anything is measured, if the file cannot be written."""
    if file is None or file == STANDARD_OUTPUT:
        return file
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise BadOption(
            f"{option.opts[0]} {shown(str(file))} cannot be written: name a file in a folder that may be written to"
        )
    return file


def _parameter(name: str, default: Any, kind: Any, option: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _flags(field: dataclasses.Field[Any]) -> str:
    """Return a field's flag. A flag that is on by default gets a --no- form, too."""
    flag = flag_of(field)
    return f"{flag}/--no-{flag.removeprefix('--')}" if field.default is True else flag


def _kind(hint: Any) -> Any:
    """Return the type of a flag's value for a field's type: a list for a tuple, str for a Literal, and never None."""
    if typing.get_origin(hint) is typing.Literal:
        return str
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    if typing.get_origin(hint) is tuple:
        return list[kinds[0]]  # type: ignore[valid-type]
    return kinds[0] if kinds else hint


def _default_last(text: str, about: Mapping[str, Any]) -> str:
    return f"{text} [default: {about['usual']}]" if "usual" in about else text


def _listed(values: Seq[Any]) -> str:
    *first, last = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return f"{', '.join(first)} and {last}" if first else last


def expanded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command for typer: each `Fields` in the command's signature is replaced by the flags of its fields."""
    hints = typing.get_type_hints(command, include_extras=True)
    shown = list[Parameter]()
    groups = dict[str, tuple[Fields, dict[str, str]]]()
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        fields = next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Fields)), None)
        if fields is None:
            shown.append(parameter.replace(annotation=hint, kind=Parameter.KEYWORD_ONLY))
            continue
        flags = list(fields.parameters())
        groups[parameter.name] = fields, {name: one.name for name, one in flags}
        shown += [one for _, one in flags]
    if not groups:
        return command

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        for group, (fields, names) in groups.items():
            values[group] = fields.given({name: values.pop(parameter) for name, parameter in names.items()})
        return command(**values)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in shown}
    return run
