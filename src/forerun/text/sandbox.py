"""The sandbox of chat templates. Templates are programs that come with a model, and must not be able to do harm.

The environment follows transformers (utils/chat_template_utils.py): Jinja's immutable sandbox, blocks trimmed, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML characters, and the `generation` tag.
It is stricter in two points. Access to a forbidden attribute is an error at once, even if the result is not used. And
the steps, characters and time of a rendering are limited (`limits`). Because of the limits, no part of a template is
evaluated when it is compiled, and three functions that could make any amount of text are missing: lipsum, wordwrap and
urlize. No template of a published model uses them.

This file imports Jinja, so it is itself imported only where a template is needed.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, wraps
from types import CodeType, GeneratorType
from typing import Any, NoReturn

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from forerun.errors import BadOption, UnsupportedModel
from forerun.text import limits
from forerun.text.limits import Budget, TooMuch
from forerun.text.template_files import ANOTHER


@dataclass(frozen=True)
class CompiledTemplate:
    """One template, ready to run.

    where: the template's origin, for messages. source: the template's text. reads: the variables that the template
    looks up, without the environment's functions. texts: the template's string constants, such as names of roles.
    """

    where: str
    source: str
    code: CodeType
    reads: frozenset[str]
    texts: frozenset[str]

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text that the template prints.

        variables: plain data (see `messages.plain`), which are not changed. Raises BadOption if the template refuses
        the messages by `raise_exception`. Raises UnsupportedModel if the template does something forbidden, exceeds a
        limit, or fails.
        """
        environment = _Environment()  # with a budget of this rendering
        try:
            template = Template.from_code(environment, self.code, environment.make_globals(None))
            text = template.render(variables)
            limits.check_printed(text)
            return text
        except TooMuch as error:
            raise UnsupportedModel(
                f"{self.where}{_line(error)} {error}, which no template of a published model does: {ANOTHER}"
            ) from None
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


@lru_cache(maxsize=16)  # opening a model asks three times, and a large template takes some 20 ms
def compile_template(source: str, where: str) -> CompiledTemplate:
    """Compile a template. Raises UnsupportedModel for an invalid template; the message names the line.

    where: the template's origin, for the message.
    """
    environment = _Environment()
    try:
        tree = environment.parse(source)
        reads = find_undeclared_variables(tree) - environment.globals.keys()
        texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return CompiledTemplate(where, source, environment.compile(source), frozenset(reads), frozenset(texts))
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
    """Return a value as JSON. This function replaces Jinja's filter `tojson`, which escapes <, >, & and ' for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# -------------------------------------------------------------------------------------------------- the environment


class _Refusal(Exception):
    """The error that `raise_exception` raises."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(message)


class _GenerationTag(Extension):
    """The tag {% generation %}. For training it marks the model's own text; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """`dict` without its methods except fromkeys, because dict.update(message, ...) would get past the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return dict.fromkeys(*args)."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` without names that begin with _, such as __call__, because Python itself would look up such names."""

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


# Filters whose cost does not grow with the texts in the lists that they take.
_NAMES = """
attr batch count d default dictsort first groupby items last length list map max min random reject rejectattr reverse
select selectattr slice sort sum unique"""
_OF_LISTS = frozenset(_NAMES.split())

# Methods of texts and numbers that could make any amount of text, or values whose methods could.
_TEXT_MAKERS = frozenset(["expandtabs", "translate", "encode", "to_bytes"])


class _Counting(NodeTransformer):
    """Inserts counting calls into a template: in the body of each loop, and around joined texts, new lists and slices.

    `_Environment` itself counts calls and operators. The names of the methods are Jinja's.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        num_characters = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_call("spend", nodes.Const(0), node), node.test, lineno=node.lineno)
        step = _call("spend", nodes.Const(num_characters), node)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [part if isinstance(part, nodes.Const) else _call("weighed", part, part) for part in node.nodes]
        return node

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") != "load"
        parts = [item.value if isinstance(item, nodes.Pair) else item for item in node.items]
        if is_target or all(isinstance(part, nodes.Const) for part in parts):
            return node
        return _call("weighed", node, node)

    visit_Tuple = visit_Dict = visit_List  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("cut", node, node) if isinstance(node.arg, nodes.Slice) else node


def _call(method: str, argument: nodes.Expr, place: nodes.Node) -> nodes.Call:
    """Return a syntax node that calls this method of the environment, on the line of `place`."""
    line = place.lineno
    return nodes.Call(nodes.EnvironmentAttribute(method, lineno=line), [argument], [], None, None, lineno=line)


def _listed(value: Any) -> Any:
    """Return a generator's values as a list, so that their number is known; anything else as it is."""
    return list(value) if isinstance(value, GeneratorType) else value


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that counts each step of a rendering against a budget. Compiling a template evaluates no part of it."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            optimized=False,
            finalize=self.printed,  # it needs a context, so that constants are not printed when compiling
        )
        self.budget = Budget()
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: datetime.now().strftime(format),
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        del self.globals["lipsum"]
        del self.filters["wordwrap"], self.filters["urlize"]
        self.filters["tojson"] = to_json
        self.filters = {name: self._counted(name, function) for name, function in self.filters.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree

    def spend(self, num_characters: int) -> bool:
        """Count an iteration of a loop against the budget. Raises TooMuch beyond a limit of the budget.

        Returns True, so that the call can stand before a loop's condition, joined by `and`. num_characters: the length
        of the template text inside the loop; 0 for a call in a condition.
        """
        self.budget.step(num_characters)
        return True

    def weighed(self, value: Any) -> Any:
        """Count a value that is put into a text or list, and return it."""
        self.budget.step(self.budget.weigh(value))
        return value

    def cut(self, value: Any) -> Any:
        """Count a slice of a text or list, and return it."""
        self.budget.step(limits.made(value))
        return value

    @pass_context
    def printed(self, context: Context, value: Any) -> Any:
        """Count a value before it is printed, and return it. This is Jinja's `finalize`."""
        return self.weighed(value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = __self.budget
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        budget.step(limits.numbers([*args, *kwargs.values()]) if isinstance(owner, str | int | float) else 0)
        if isinstance(owner, str):
            args = tuple(map(_listed, args))
            budget.add(sum(map(budget.weigh, [*args, *kwargs.values()])))
            if __obj.__name__ == "join":
                budget.add(limits.join(owner, *args[:1]))
            elif __obj.__name__ == "replace":
                budget.add(limits.replace(owner, *args[:2]))
        result = super().call(__context, __obj, *args, **kwargs)
        budget.add(limits.made(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        cost = {"*": self.budget.product, "**": limits.power, "%": limits.percent}.get(operator)
        self.budget.step(cost(left, right) if cost else 0)
        result = super().call_binop(context, operator, left, right)
        self.budget.add(limits.made(result))
        return result

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter so that each call counts as a step, with the characters that the call will make or has made.

        name: the filter's name.
        """
        first = int(hasattr(function, "jinja_pass_arg"))  # index of the filtered value, after the context if any

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            budget = self.budget
            before, given = args[:first], list(args[first:])
            rest = [*given[1:], *kwargs.values()]
            budget.step(limits.numbers(rest))
            if name in ("join", "sum"):
                given[0] = _listed(given[0])
            if name == "join":
                budget.add(limits.join(str(rest[0]) if rest else "", given[0]))
            if name not in _OF_LISTS:
                budget.add(sum(map(budget.weigh, [*given[:1], *rest])))
            if name in ("tojson", "indent"):
                budget.add(budget.weigh(given[0]) * (limits.numbers(rest) + budget.weigh(rest)))
            elif name == "replace":
                budget.add(limits.replace(str(given[0]), *rest[:2]))
            elif name == "sum" and any(isinstance(value, list) for value in rest):  # lists are copied at each step
                budget.add(budget.weigh(given[0]) * len(given[0]))
            elif name == "format":
                budget.add(limits.percent(given[0], rest))
            result = function(*before, *given, **kwargs)
            budget.add(limits.made(result))
            return result

        return counted

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            self.budget.step(limits.widths(value.__self__))
        return wrapped

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _TEXT_MAKERS and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Raise SecurityError at once.

        Jinja's own method returns a value that prints as an empty text, and raises only in other uses.
        """
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")


def _line(error: Exception) -> str:
    """Return ' in line n' for the template's innermost line in the error's traceback; '' where there is none."""
    frames = [line for frame, line in traceback.walk_tb(error.__traceback__) if _is_template(frame.f_code.co_filename)]
    return f" in line {frames[-1]}" if frames else ""


def _is_template(filename: str) -> bool:
    return filename in ("<template>", "<unknown>")
