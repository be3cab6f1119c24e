"""Chat templates are programs that come with a model: here they are compiled and run so that they can do no harm.

The environment is that of transformers (utils/chat_template_utils.py): Jinja's immutable sandbox, blocks trimmed, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that leaves HTML characters alone, and the `generation` tag.
It is stricter in one point: touching a forbidden attribute is an error at once, even where the result is not used.

This file imports Jinja; whoever needs it only sometimes imports this file at that moment.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from forerun.errors import BadOption, UnsupportedModel

ANOTHER = "name another template with --chat-template FILE (chat_template= in Python)"


@dataclass(frozen=True)
class CompiledTemplate:
    """One template, ready to run.

    where: where it came from, for messages. reads: the variables that it looks up, without the functions it is given.
    """

    where: str
    template: Template
    reads: frozenset[str]

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. `variables` must be plain data, see `messages.plain`, and are not changed.

        Raises BadOption where the template refuses them by `raise_exception`, UnsupportedModel where it does something
        forbidden or fails.
        """
        try:
            return self.template.render(variables)
        except _Refusal as refusal:
            raise BadOption(f"the chat template refuses these messages ({refusal}): change them accordingly") from None
        except SecurityError as error:
            raise UnsupportedModel(
                f"{self.where}{_line(error)} does what a chat template must not do ({error}): {ANOTHER}"
            ) from error
        except Exception as error:  # a template can raise whatever Python can
            raise UnsupportedModel(
                f"{self.where} fails on these messages{_line(error)} ({type(error).__name__}: {error}): it may expect "
                f"them in another shape, or {ANOTHER}"
            ) from error


def compile_template(source: str, where: str) -> CompiledTemplate:
    """Compile a template. Raises UnsupportedModel, with the line, for one that is not valid."""
    environment = _Environment()
    try:
        reads = find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
        return CompiledTemplate(where, environment.from_string(source), frozenset(reads))
    except TemplateSyntaxError as error:
        raise UnsupportedModel(
            f"{where} has a syntax error in line {error.lineno} ({error.message}): mend it, or {ANOTHER}"
        ) from error
    except Exception as error:  # too deep for the compiler, and the like
        raise UnsupportedModel(f"{where} cannot be compiled ({type(error).__name__}: {error}): {ANOTHER}") from error


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`: json.dumps, where Jinja's own would escape <, >, & and ' for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# -------------------------------------------------------------------------------------------------- the environment


class _Refusal(Exception):
    """What `raise_exception` raises."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _GenerationTag(Extension):
    """{% generation %} marks what the model wrote, for training; here it is only a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """`dict` without its methods: dict.update(message, ...) would get past the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As dict.fromkeys."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` without names like __call__, which Python itself would look up."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that namespace(self=1) works, as in Jinja
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = to_json
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Jinja returns a value that raises when used; printed alone, it would be an empty text."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")


def _line(error: Exception) -> str:
    """' in line n' of the template, innermost first; Jinja puts these lines into the traceback."""
    frames = [line for frame, line in traceback.walk_tb(error.__traceback__) if _is_template(frame.f_code.co_filename)]
    return f" in line {frames[-1]}" if frames else ""


def _is_template(filename: str) -> bool:
    return filename in ("<template>", "<unknown>")
