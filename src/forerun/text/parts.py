"""The parts of an answer: text, reasoning and tool calls, read from the model's text as the text grows.

A model writes all parts into one text, and each family of models uses its own marks. A generator over a `Scanner` reads
the parts. The generator yields each piece as soon as no later text can change the piece, and None when it needs more
text. So the parts do not depend on how the text was cut into pieces. A call becomes a part once it is complete, so that
nobody runs a call that is not completely written.
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
    """Return a new id for a call: nine letters and digits, because some templates accept no other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. arguments: the text of a JSON object, as the model wrote it."""

    name: str
    arguments: str = "{}"
    id: str = field(default_factory=new_id, compare=False)

    def values(self) -> dict[str, Any]:
        """Return the arguments by name."""
        values: dict[str, Any] = json.loads(self.arguments)
        return values

    def arguments_on_a_line(self) -> str:
        """Return the arguments as JSON on one line, for people to read."""
        return json.dumps(self.values(), ensure_ascii=False)

    def message(self) -> dict[str, Any]:
        """Return the call as an entry of a message's tool_calls."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


Part: TypeAlias = Text | Reasoning | ToolCall


@dataclass(frozen=True)
class CallBegin:
    """The beginning of a call. name: the name of the tool."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The end of a complete call. An incomplete call has no such piece."""


# The output of a dialect, in which a call comes in pieces.
Piece: TypeAlias = Text | Reasoning | CallBegin | CallArguments | CallEnd
# A reader of text, as a generator: it yields pieces, or None where it needs more text, and returns a result.
Steps: TypeAlias = Generator[Piece | None, None, Any]


@dataclass
class Span:
    """A stretch of an answer that is all text or all reasoning. kind: "text" or "reasoning"."""

    kind: str
    text: str = ""


@dataclass
class AnswerParts:
    """An answer put together from its parts. items: the answer's spans and calls, in order.

    num_reasoning_tokens: how many of the answer's tokens are reasoning. num_broken_calls: the number of calls that were
    begun and did not become complete. said: the indices of the answer's tokens that have made the text; filled only if
    PartsReader traces the tokens.
    """

    items: list[Span | ToolCall] = field(default_factory=list)
    num_reasoning_tokens: int = 0
    num_broken_calls: int = 0
    said: list[int] = field(default_factory=list)

    def add(self, part: Part) -> None:
        """Append the next part."""
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
        """The reasoning before the answer."""
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
    """A text that grows at its end and is consumed at its beginning. Methods that may need more text return Steps.

    rest: the text that is not consumed yet. log: the text consumed since `begin`; it is put back if it turns out to be
    no call. hidden: the marks that are kept out of the text for the user. is_closed: whether the text has ended.
    is_cut: whether the text has ended because there was no room for more.
    """

    def __init__(self, hidden: Seq[str] = ()) -> None:
        self.rest = ""
        self.log = ""
        self._hidden = tuple(hidden)
        self.is_closed = False
        self.is_cut = False

    @property
    def is_over(self) -> bool:
        """Whether the text has ended and was consumed to its end."""
        return self.is_closed and not self.rest

    def begin(self) -> None:
        """Empty `log`, so that `undo` puts back only text that is consumed from now on."""
        self.log = ""

    def put_back(self, text: str) -> None:
        """Put back `text`, the end of the consumed text, so that it is read again."""
        self.rest, self.log = text + self.rest, self.log.removesuffix(text)

    def undo(self) -> None:
        """Put back the text consumed since `begin`. If the answer has ended, the text is dropped instead."""
        if not self.is_over:
            self.put_back(self.log)

    def take(self, num_chars: int) -> str:
        """Consume and return the first num_chars characters."""
        taken, self.rest = self.rest[:num_chars], self.rest[num_chars:]
        self.log += taken
        return taken

    def until(self, marks: Seq[str], piece: Callable[[str], Piece]) -> Steps:
        """Yield the text up to one of `marks`, in pieces made by `piece`. Consumes and returns the mark.

        Returns None if the text ends before a mark.
        """
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
        """Consume the text up to one of `marks`, and the mark. Returns the text and the mark.

        The returned mark is None if the text ends before a mark.
        """
        while (hit := first_of(self.rest, marks)) is None:
            if self.is_closed:
                return self.take(len(self.rest)), None
            yield None
        return self.take(hit[0]), self.take(len(hit[1]))

    def starts(self, *options: str) -> Steps:
        """Return the longest of `options` with which the remaining text begins; None if no option fits.

        If the answer was cut off inside an option, the beginning of the option is consumed.
        """
        while is_open := any(o.startswith(self.rest) and o != self.rest for o in options):
            if self.is_closed:
                break
            yield None
        if is_open and self.is_cut and self.rest not in options:
            self.take(len(self.rest))
        return max((o for o in options if self.rest.startswith(o)), key=len, default=None)

    def skip(self, *options: str) -> Steps:
        """Consume and return the longest of `options` with which the remaining text begins; None if no option fits."""
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
        """Consume one JSON value, and the white space before the value. Returns the value's text.

        Returns None if there is no value, if the text ends inside the value, or if brackets do not match. piece: makes
        pieces of the consumed text, which are yielded as the value grows.
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
    """Finds the end of a JSON value by its brackets and quotes. The text between brackets or quotes is not checked.

    Outside of strings, "<" begins a mark. A mark ends the value, even if the value is incomplete.
    """

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._in_text = self._is_escaped = self._has_begun = self._is_wrong = self.is_over = False

    @property
    def is_whole(self) -> bool:
        """Whether the text read so far is a complete value. A bare word is complete after each of its characters."""
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
    """Return (start, mark) of the first mark in a text; None without a mark.

    Of several marks with the same start, the longest is returned.
    """
    hits = [(start, -len(mark), mark) for mark in marks if (start := text.find(mark)) >= 0]
    if not hits:
        return None
    start, _, mark = min(hits)
    return start, mark


def open_tail(text: str, marks: Seq[str]) -> int:
    """Return the length of the longest suffix of `text` with which a mark begins; 0 = there is no such suffix.

    The suffix is shorter than the longest mark. The text must not contain a whole mark.
    """
    longest = min(len(text), max((len(mark) - 1 for mark in marks), default=0))
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
