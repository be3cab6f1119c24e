"""Reads the parts of one answer from its token ids or its text, while the answer grows.

A call becomes a part only if it was written to its end, with a JSON object as its arguments. Any other call is dropped.
So whoever receives the parts of an answer can run no call that the model did not completely write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence as Seq
from typing import NamedTuple

from forerun.text.answer_form import AnswerForm, tail_of
from forerun.text.detokenizer import Detokenizer
from forerun.text.parts import AnswerParts, CallArguments, CallBegin, CallEnd, Part, Piece, Reasoning, Text, ToolCall
from forerun.text.tokenizer import Tokenizer


class PartsReader:
    """Reads the parts of one answer from its token ids, as they come.

    traces: whether the reader notes for each token if it is text, reasoning, or neither, such as a mark or the white
    space between two parts. If the model may reason, its tokens are always traced, because reasoning tokens are
    counted.
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
        # Where a stop string may begin, text comes later than its tokens. A second detokenizer, which has no stop
        # strings, tells the text that each token adds.
        self._unstopped = Detokenizer(tokenizer, prompt_ids, (), skip) if stop else None
        self._parser = Parser(answer_form, tail_of(tokenizer, prompt_ids))
        answer_marks = answer_form.answer_marks
        self._traces = (
            traces or bool(answer_marks.thoughts) or answer_marks.reads_always or answer_marks.declared is not None
        )
        self._num_read, self._last_told, self._skip = 0, -1, skip
        self._untold: list[tuple[int, str]] = []  # (index in the answer, text) of each token not told apart yet
        self._untold_at = 0  # the number of characters before these tokens

    def push(self, ids: Seq[int]) -> list[Part]:
        """Read the next tokens, and return the parts that later tokens cannot change."""
        if not self._traces:
            return self._parser.feed(self._detokenizer.push(ids).text)
        new_parts: list[Part] = []
        for token in ids:
            text = self._detokenizer.push([token]).text
            if token not in self._skip:
                added = text if self._unstopped is None else self._unstopped.push([token]).text
                self._untold.append((self._num_read, added))
            self._num_read += 1
            new_parts += self._parser.feed(text)
            self._tell_apart()
        return joined(new_parts)

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return the remaining parts, because no token follows. is_cut: whether there was no room for more tokens."""
        text = self._detokenizer.finish()
        parts = [*self._parser.feed(text), *self._parser.finish(is_cut=is_cut)]
        if self._traces:
            added = text if self._unstopped is None else self._unstopped.finish()
            self._untold.append((self._num_read, added))  # the text that the last token has left open
            self._tell_apart()
        return parts

    def _tell_apart(self) -> None:
        """Note for the spans that the parser has just found which tokens are text and which are reasoning.

        Characters are counted from the beginning of the answer. Tokens whose text the parser holds back are noted
        later.
        """
        spans = self._parser.take_spans()
        if not spans:
            return
        sure, begin = self._parser.num_sure, self._untold_at
        left = list[tuple[int, str]]()
        for place, text in self._untold:
            end = begin + len(text)
            last = max(end, begin + 1)  # a token without a text of its own has begun the next character
            maker = next((span for span in spans if span.begin < last and begin < span.end), None)
            if maker is not None and self._last_told < place < self._num_read:
                self._last_told = place
                if maker.is_text:
                    self.answer_parts.said.append(place)
                else:
                    self.answer_parts.num_reasoning_tokens += 1
            if not left and last <= sure:
                self._untold_at = end
            else:
                left.append((place, text))  # some of the token's text is held back
            begin = end
        self._untold = left

    @property
    def answer_parts(self) -> AnswerParts:
        """The parts of the answer so far."""
        return self._parser.answer_parts


def _begins(token: str, marks: Iterable[str]) -> bool:
    """Return whether any mark begins with the text of this special token."""
    return bool(token) and any(mark.startswith(token) for mark in marks)


class _Span(NamedTuple):
    """A range of an answer's characters that is all text or all reasoning."""

    begin: int
    end: int
    is_text: bool


class Parser:
    """Reads the parts of one answer from its text, as the text grows. prompt: the end of the prompt."""

    def __init__(self, answer_form: AnswerForm, prompt: str = "") -> None:
        self._scan = answer_form.scanner()
        self.answer_parts = AnswerParts()
        self._tidy = _Tidy()
        one_call = answer_form.tool_request is not None and not answer_form.tool_request.parallel
        self._calls = _WholeCalls(1 if one_call else None)
        self._steps: Iterator[Piece | None] = answer_form.steps(self._scan, prompt)
        # Runs of characters without a mark inside: the present run, and the run before it.
        self._num_fed, self._run, self._before = 0, range(0), range(0)
        self._spans: list[_Span] = []

    @property
    def num_sure(self) -> int:
        """The number of leading characters that are settled.

        Later text cannot make these characters part of a mark, or of the white space between parts.
        """
        return self._num_fed - len(self._scan.rest) - len(self._tidy.held)

    def take_spans(self) -> list[_Span]:
        """Return the spans of text and of reasoning that were noted since this method was last called."""
        spans, self._spans = self._spans, []
        return spans

    def feed(self, text: str) -> list[Part]:
        """Append the next text, and return the parts that later text cannot change."""
        if not text:
            return []
        self._scan.rest += text
        self._num_fed += len(text)
        return self._said(self._pieces())

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return the remaining parts, because no text follows. is_cut: whether there was no room for more text."""
        self._scan.is_closed, self._scan.is_cut = True, is_cut
        return self._said([*self._pieces(), *map(self._spanned, self._tidy.finish())])

    def _said(self, pieces: list[Piece]) -> list[Part]:
        parts = joined(part for piece in pieces for part in self._calls.add(piece))
        for part in parts:
            self.answer_parts.add(part)
        self.answer_parts.num_broken_calls = self._calls.num_broken
        return parts

    def _pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        try:
            for piece in self._steps:
                if piece is None:
                    break
                if isinstance(piece, Text | Reasoning):
                    self._extend(len(piece.text))
                pieces += map(self._spanned, self._tidy.add(piece))
        except RecursionError:  # brackets within brackets within brackets: it is a text then
            self._steps = self._scan.until((), Text)
        return pieces

    def _extend(self, num_chars: int) -> None:
        """Note that the last `num_chars` consumed characters were text or reasoning."""
        end = self._num_fed - len(self._scan.rest)
        if end - num_chars != self._run.stop:
            self._before = self._run
            self._run = range(end - num_chars, end)
        self._run = range(self._run.start, end)

    def _spanned(self, piece: Piece) -> Piece:
        """Note where the characters of a piece stand in the answer, and return the piece.

        A piece may begin with white space that was held back before a mark. Then its characters stand on both sides of
        the mark.
        """
        if isinstance(piece, Text | Reasoning):
            is_text = isinstance(piece, Text)
            begin = self.num_sure - len(piece.text)
            if (num_earlier := self._run.start - begin) > 0:
                self._spans.append(_Span(self._before.stop - num_earlier, self._before.stop, is_text))
            self._spans.append(_Span(max(begin, self._run.start), self.num_sure, is_text))
        return piece


class _Tidy:
    """Removes the white space between parts, which belongs to the format and to no part."""

    def __init__(self) -> None:
        self._kind: type[Piece] | None = None
        self.held, self._is_fresh, self._has_calls = "", False, False

    def add(self, piece: Piece) -> Iterator[Piece]:
        """Yield the piece without the white space between parts. Pieces of calls are yielded unchanged.

        White space at the end of the piece is held back, because another part may follow.
        """
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
        """Yield the white space at the end of an answer that ends with text and has no calls."""
        if self._kind is Text and self.held and not self._has_calls:
            text, self.held = self.held, ""
            yield Text(text)


class _WholeCalls:
    """Turns pieces into parts. A call becomes a part once it is complete. An incomplete call is dropped.

    most: the number of calls to keep; later calls are dropped. None = no limit.
    """

    def __init__(self, most: int | None) -> None:
        self._most, self._num_begun, self._num_whole = most, 0, 0
        self._name, self._arguments = "", list[str]()

    @property
    def num_broken(self) -> int:
        """The number of calls that were begun and did not become complete."""
        return self._num_begun - self._num_whole

    def add(self, piece: Piece) -> Iterator[Part]:
        """Yield the part that this piece completes, if any."""
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
    """Return whether a text is a JSON object that can be written as JSON again, because all its numbers are finite."""
    try:
        values = json.loads(text)
        json.dumps(values, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Join consecutive parts of the same kind, text or reasoning, and drop empty parts."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Text | Reasoning) and isinstance(last, type(part)):
            merged[-1] = type(part)(last.text + part.text)
        elif isinstance(part, ToolCall) or part.text:
            merged.append(part)
    return merged
