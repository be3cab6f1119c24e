"""The parts of one answer, from its ids or its text, as they come.

A call counts here if it was written to its end, with a JSON object as its arguments. No part is made of any other, so
whoever receives the parts of an answer can run nothing that the model did not write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence as Seq

from forerun.text.answer_form import AnswerForm, tail_of
from forerun.text.detokenizer import Detokenizer
from forerun.text.parts import (
    AnswerParts,
    CallArguments,
    CallBegin,
    CallEnd,
    Part,
    Piece,
    Reasoning,
    Text,
    ToolCall,
)
from forerun.text.tokenizer import Tokenizer


class PartsReader:
    """Reads the parts of one answer from its token ids, as they come.

    traces: whether tokens are told apart, too, by text and reasoning. Marks and white space between parts are neither.
    It is done wherever the model may think, since reasoning is counted.
    """

    def __init__(
        self,
        answer_form: AnswerForm,
        tokenizer: Tokenizer,
        prompt_ids: Seq[int],
        stop: Seq[str] = (),
        num_free: int = 0,
        *,
        traces: bool = False,
    ) -> None:
        declared = "" if answer_form.answer_marks.declared is None else answer_form.answer_marks.declared.text
        names = {i: tokenizer.token_of(i) or "" for i in tokenizer.special_ids}
        skip = {i for i, name in names.items() if not (_begins(name, answer_form.marks) or (name and name in declared))}
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, stop, skip, num_free)
        self._parser = Parser(answer_form, tail_of(tokenizer, prompt_ids))
        answer_marks = answer_form.answer_marks
        self._traces = (
            traces or bool(answer_marks.thoughts) or answer_marks.reads_always or answer_marks.declared is not None
        )
        self._num_read, self._last_told, self._skip = 0, -1, skip
        self._untold: list[tuple[int, str]] = []  # places of tokens that are not told apart yet, and their texts

    def push(self, ids: Seq[int]) -> list[Part]:
        """Return the parts that the next tokens make certain."""
        if not self._traces:
            return self._parser.feed(self._detokenizer.push(ids).text)
        new_parts: list[Part] = []
        for token in ids:
            text = self._detokenizer.push([token]).text
            if token not in self._skip:
                self._untold.append((self._num_read, text))
            self._num_read += 1
            parts = self._parser.feed(text)
            self._tell_apart(parts)
            new_parts += parts
        return joined(new_parts)

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return the remaining parts, as no token follows. is_cut: because there was no room for it."""
        text = self._detokenizer.finish()
        parts = [*self._parser.feed(text), *self._parser.finish(is_cut=is_cut)]
        if self._traces:
            self._untold.append((self._num_read, text))
            self._tell_apart(parts)
        return parts

    def _tell_apart(self, parts: Seq[Part]) -> None:
        """Note which tokens have made these parts. Text that the parser holds back is told apart later."""
        if not parts:
            return
        raw = "".join(text for _, text in self._untold)
        sure = len(raw) - self._parser.num_held
        spans, end = list[tuple[Part, range]](), sure
        for part in reversed(parts):
            if isinstance(part, ToolCall):
                continue
            for text in (part.text, part.text.strip()):  # there may have been a mark between white space and text
                if text and (begin := raw.rfind(text, 0, end)) >= 0:
                    spans.append((part, range(begin, begin + len(text))))
                    end = begin
                    break
        at, left = 0, list[tuple[int, str]]()
        for place, text in self._untold:
            span = range(at, at + max(1, len(text)))  # a token without a text of its own has begun the next character
            at += len(text)
            if at > sure or (at == sure and not text):
                left.append((place, text))  # some of it is held back
            maker = next((part for part, area in spans if area.start < span.stop and span.start < area.stop), None)
            if maker is None or place <= self._last_told or place == self._num_read:
                continue
            self._last_told = place
            if isinstance(maker, Text):
                self.answer_parts.said.append(place)
            else:
                self.answer_parts.num_reasoning_tokens += 1
        self._untold = left

    @property
    def answer_parts(self) -> AnswerParts:
        """The answer so far."""
        return self._parser.answer_parts


def _begins(token: str, marks: Iterable[str]) -> bool:
    """Return whether a mark begins with the text of a special token."""
    return bool(token) and any(mark.startswith(token) for mark in marks)


class Parser:
    """Reads the parts of one answer from its text, as it comes. prompt: the end of its prompt."""

    def __init__(self, answer_form: AnswerForm, prompt: str = "") -> None:
        self._scan, self.answer_parts, self._tidy = answer_form.scanner(), AnswerParts(), _Tidy()
        one_call = answer_form.tool_request is not None and not answer_form.tool_request.parallel
        self._calls = _WholeCalls(1 if one_call else None)
        self._steps: Iterator[Piece | None] = answer_form.steps(self._scan, prompt)

    @property
    def num_held(self) -> int:
        """Characters at the end that may still become a mark, or are white space between parts."""
        return len(self._scan.rest) + len(self._tidy.held)

    def feed(self, text: str) -> list[Part]:
        """Return the parts that the next text makes certain."""
        if not text:
            return []
        self._scan.rest += text
        return self._said(self._run())

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return the remaining parts, as no text follows. is_cut: because there was no room for it."""
        self._scan.is_closed, self._scan.is_cut = True, is_cut
        return self._said([*self._run(), *self._tidy.finish()])

    def _said(self, pieces: list[Piece]) -> list[Part]:
        parts = joined(part for piece in pieces for part in self._calls.add(piece))
        for part in parts:
            self.answer_parts.add(part)
        self.answer_parts.num_broken_calls = self._calls.num_broken
        return parts

    def _run(self) -> list[Piece]:
        pieces: list[Piece] = []
        try:
            for piece in self._steps:
                if piece is None:
                    break
                pieces += self._tidy.add(piece)
        except RecursionError:  # brackets within brackets within brackets: it is a text then
            self._steps = self._scan.until((), Text)
        return pieces


class _Tidy:
    """Takes away the white space between parts: it belongs to the format, and to no part."""

    def __init__(self) -> None:
        self._kind: type[Piece] | None = None
        self.held, self._is_fresh, self._has_calls = "", False, False

    def add(self, piece: Piece) -> Iterator[Piece]:
        """Yield the piece, as far as it is certain."""
        if not isinstance(piece, Text | Reasoning):
            self._kind, self.held, self._has_calls = CallBegin, "", True
            yield piece
            return
        kind = type(piece)
        if kind is not self._kind:
            self._is_fresh = self._kind is not None or kind is Reasoning
            self._kind, self.held = kind, ""
        text = self.held + piece.text
        text = text.lstrip() if self._is_fresh else text
        body = text.rstrip()
        self.held = text[len(body) :]
        if body:
            self._is_fresh = False
            yield kind(body)

    def finish(self) -> Iterator[Piece]:
        """Yield the white space at the end of an answer that is a text."""
        if self._kind is Text and self.held and not self._has_calls:
            text, self.held = self.held, ""
            yield Text(text)


class _WholeCalls:
    """Makes parts of pieces: a call when it is whole, and none where it breaks off or is cut.

    most: later calls are left out; None = none is.
    """

    def __init__(self, most: int | None) -> None:
        self._most, self._num_begun, self._num_whole = most, 0, 0
        self._name, self._arguments = "", list[str]()

    @property
    def num_broken(self) -> int:
        """The number of calls that were begun and are not whole."""
        return self._num_begun - self._num_whole

    def add(self, piece: Piece) -> Iterator[Part]:
        """Yield the part that a piece completes, if it does."""
        match piece:
            case CallBegin(name):
                self._name, self._arguments = name, []
                self._num_begun += 1
            case CallArguments(text):
                self._arguments.append(text)
            case CallEnd():
                arguments = "".join(self._arguments)
                if self._name and _is_object(arguments):
                    self._num_whole += 1
                    if self._most is None or self._num_whole <= self._most:
                        yield ToolCall(self._name, arguments)
            case _:
                yield piece


def _is_object(text: str) -> bool:
    """Return whether a text is a JSON object that can be written as JSON again: all its numbers are finite."""
    try:
        values = json.loads(text)
        json.dumps(values, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Join texts that follow each other, and drop empty ones."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Text | Reasoning) and isinstance(last, type(part)):
            merged[-1] = type(part)(last.text + part.text)
        elif isinstance(part, ToolCall) or part.text:
            merged.append(part)
    return merged
