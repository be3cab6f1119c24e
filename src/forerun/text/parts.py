"""The parts of an answer: text, reasoning and tool calls, made of the model's text as it grows.

A model writes all of them into one text, each family with marks of its own. A generator over a `Scanner` reads
them: it yields each piece as soon as no later text can change it, and None where it needs more. So a text gives the
same parts however it was cut. A call is a part when it is whole: nobody runs a call that is not written yet.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Generator, Iterable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Text:
    """A piece of the text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


def new_id() -> str:
    """Make an id of a call: nine letters and digits, which the templates that check ids ask for."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. arguments: the text of a JSON object, as it was written."""

    name: str
    arguments: str = "{}"
    id: str = field(default_factory=new_id, compare=False)

    def values(self) -> dict[str, Any]:
        """Return the arguments by name."""
        values: dict[str, Any] = json.loads(self.arguments)
        return values

    def arguments_on_a_line(self) -> str:
        """Return the arguments for people: JSON on one line."""
        return json.dumps(self.values(), ensure_ascii=False)

    def message(self) -> dict[str, Any]:
        """Return the call as a message has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Part: TypeAlias = Text | Reasoning | ToolCall


@dataclass(frozen=True)
class CallBegin:
    """A tool is called."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of the arguments."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call ends. It is missing where the text breaks off or ends in the call."""


# The output of a dialect: a call comes in pieces.
Piece: TypeAlias = Text | Reasoning | CallBegin | CallArguments | CallEnd
# A reader of text: it yields pieces, None where it needs more text, and returns something.
Steps: TypeAlias = Generator[Piece | None, None, Any]


@dataclass
class Span:
    """One stretch of an answer: kind is "text" or "reasoning"."""

    kind: str
    text: str = ""


@dataclass
class AnswerParts:
    """An answer put together from its parts. items: its stretches and calls, in order.

    num_reasoning_tokens: tokens of the answer that are reasoning. num_broken_calls: begun and never whole.
    said: places in the answer of the tokens that make its text, as far as they are told apart (see PartsReader).
    """

    items: list[Span | ToolCall] = field(default_factory=list)
    num_reasoning_tokens: int = 0
    num_broken_calls: int = 0
    said: list[int] = field(default_factory=list)

    def add(self, part: Part) -> None:
        """Take the next part."""
        match part:
            case Text(text):
                self._span("text").text += text
            case Reasoning(text):
                self._span("reasoning").text += text
            case ToolCall():
                self.items.append(part)

    def _span(self, kind: str) -> Span:
        last = self.items[-1] if self.items else None
        if not isinstance(last, Span) or last.kind != kind:
            last = Span(kind)
            self.items.append(last)
        return last

    def _text(self, kind: str) -> str:
        return "".join(item.text for item in self.items if isinstance(item, Span) and item.kind == kind)

    @property
    def text(self) -> str:
        """The text for the user."""
        return self._text("text")

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return self._text("reasoning")

    @property
    def calls(self) -> list[ToolCall]:
        """The calls, in order."""
        return [item for item in self.items if isinstance(item, ToolCall)]

    def message(self) -> dict[str, Any]:
        """Return the answer as a message of a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.message() for call in self.calls]
        return message


class Scanner:
    """Text that grows at its end and is consumed at its beginning. Its methods are steps of a generator (Steps).

    log: the text consumed since `begin`, for readers that find it to be no call after all. hidden: marks that no text
    shows. is_closed: no more text comes; is_cut: because there was no room for more.
    """

    def __init__(self, hidden: Seq[str] = ()) -> None:
        self.rest, self.log, self._hidden, self.is_closed, self.is_cut = "", "", tuple(hidden), False, False

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended in the text consumed last."""
        return self.is_closed and not self.rest

    def begin(self) -> None:
        """Forget the consumed text."""
        self.log = ""

    def put_back(self, text: str) -> None:
        """Let the end of the consumed text come again."""
        self.rest, self.log = text + self.rest, self.log.removesuffix(text)

    def undo(self) -> None:
        """Let the text consumed since `begin` come again; where the answer has ended in it, it is left out."""
        if not self.is_over:
            self.put_back(self.log)

    def take(self, num_chars: int) -> str:
        """Consume and return the first characters."""
        taken, self.rest = self.rest[:num_chars], self.rest[num_chars:]
        self.log += taken
        return taken

    def until(self, marks: Seq[str], piece: Callable[[str], Piece]) -> Steps:
        """Give text up to a mark in pieces. Returns the mark, which is consumed; None at the end of the text."""
        known = (*marks, *self._hidden) if piece is Text else tuple(marks)
        while True:
            if (hit := first_of(self.rest, known)) is not None:
                start, mark = hit
                if start:
                    yield piece(self.take(start))
                self.take(len(mark))
                if mark in marks:
                    return mark
                continue
            num_open = 0 if self.is_closed and not self.is_cut else open_tail(self.rest, known)
            if num_sure := len(self.rest) - num_open:
                yield piece(self.take(num_sure))
            if self.is_closed:
                self.take(num_open)
                return None
            yield None

    def collect(self, marks: Seq[str]) -> Steps:
        """Return the text up to a mark, and the mark, which is consumed; None where the text ends before."""
        while (hit := first_of(self.rest, marks)) is None:
            if self.is_closed:
                return self.take(len(self.rest)), None
            yield None
        text = self.take(hit[0])
        return text, self.take(len(hit[1]))

    def starts(self, *options: str) -> Steps:
        """Return the longest option with which the text goes on; None where it is another text.

        Where an answer was cut inside an option, its remainder is consumed.
        """
        while is_open := any(o.startswith(self.rest) and o != self.rest for o in options):
            if self.is_closed:
                break
            yield None
        if is_open and self.is_cut and self.rest not in options:
            self.take(len(self.rest))
        return max((o for o in options if self.rest.startswith(o)), key=len, default=None)

    def skip(self, *options: str) -> Steps:
        """Consume one of the options, if the text goes on so, and return it."""
        option: str | None = yield from self.starts(*options)
        return None if option is None else self.take(len(option))

    def space(self) -> Steps:
        """Consume white space, and return it."""
        taken = ""
        while True:
            taken += self.take(len(self.rest) - len(self.rest.lstrip()))
            if self.rest or self.is_closed:
                return taken
            yield None

    def next(self) -> Steps:
        """Return the next character without consuming it; '' at the end of the text."""
        while not self.rest and not self.is_closed:
            yield None
        return self.rest[:1]

    def json(self, piece: Callable[[str], Piece] | None = None) -> Steps:
        """Consume one JSON value, and the white space before it.

        Returns its text; None where there is none, or the text ends in it, or its brackets do not match. piece: makes
        pieces of what is consumed, while it grows.
        """
        yield from self.space()
        text, value = "", _JsonValue()
        while True:
            taken = self.take(value.read(self.rest))
            text += taken
            if taken and piece is not None:
                yield piece(taken)
            if value.is_over or self.is_closed:
                return text if text and value.is_whole else None
            yield None


class _JsonValue:
    """Finds the end of a JSON value by its brackets and quotes; what is between them is not looked at.

    Where a mark begins outside of texts, the value is over, whole or not.
    """

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._in_text = self._is_escaped = self._has_begun = self._is_wrong = self.is_over = False

    @property
    def is_whole(self) -> bool:
        """Whether the text read is a whole value: a bare word is one at any moment."""
        return self._has_begun and not self._is_wrong and not self._in_text and not self._closers

    def read(self, text: str) -> int:
        """Return how many characters of the next text belong to the value."""
        for i, char in enumerate(text):
            if self._in_text:
                self._in_text = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
                ends = not self._in_text and not self._closers
            elif char in "}]":
                if not self._closers or self._closers[-1] != char:
                    return self._end(i, is_wrong=bool(self._closers))
                self._closers.pop()
                ends = not self._closers
            elif char == "<":
                return self._end(i, is_wrong=bool(self._closers))
            elif not self._closers and (char in ",:" or char.isspace()):
                return self._end(i)
            elif char in '"{[':
                if self._has_begun and not self._closers:
                    return self._end(i, is_wrong=True)
                self._in_text = char == '"'
                self._closers += {"{": "}", "[": "]"}.get(char, "")
                ends = False
            else:
                ends = False
            self._has_begun = True
            if ends:
                return self._end(i + 1)
        return len(text)

    def _end(self, num_chars: int, *, is_wrong: bool = False) -> int:
        self.is_over, self._is_wrong = True, is_wrong
        return num_chars


def first_of(text: str, marks: Iterable[str]) -> tuple[int, str] | None:
    """Return (start, mark) of the mark that begins first, the longest one there; None where there is none."""
    hits = [(start, -len(mark), mark) for mark in marks if (start := text.find(mark)) >= 0]
    if not hits:
        return None
    start, _, mark = min(hits)
    return start, mark


def open_tail(text: str, marks: Seq[str]) -> int:
    """Return the length of the longest end of a text that is a true beginning of some mark."""
    longest = min(len(text), max((len(mark) - 1 for mark in marks), default=0))
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
