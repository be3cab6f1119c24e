"""`forerun chat`: a conversation in the terminal, with the speed and the acceptance of every answer."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TextIO

import typer
from rich.status import Status

from forerun.engine.llm import LLM, SHIPPED_TARGET, Message
from forerun.errors import UserError
from forerun.show import make_console
from forerun.types import SamplingParams, StepReport

PROMPT, MORE = "> ", ". "
HELP = """\
/help    this list
/reset   forget the conversation
/exit    leave; so does Ctrl-D
Ctrl-C stops an answer, and what was written stays in the conversation.
A line that ends with a backslash goes on in the next one; a message that begins with / is written with //."""
SHIPPED_NOTE = "The shipped model knows no questions and answers: it continues the Python code that you type."
SHIPPED_MAX_TOKENS = 128  # it seldom ends by itself


class Stopped(Exception):
    """Ctrl-C during a step that shows nothing yet."""


@dataclass
class Numbers:
    """A listener: what the steps of one answer add up to, and when its first token came."""

    started_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None  # the end of the first step that committed
    last_s: float = 0.0
    num_first: int = 0  # tokens of that step
    num_tokens: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    interrupted: bool = False

    def __call__(self, report: StepReport) -> None:
        self.num_tested += report.num_tested
        self.num_accepted += report.num_accepted
        self.num_tokens += report.num_committed
        self.last_s = time.perf_counter()
        if self.first_s is None and report.num_committed:
            self.first_s, self.num_first = self.last_s, report.num_committed
        if self.interrupted and not report.num_committed:
            raise Stopped  # a step is over and nothing is shown of it: the only other place to stop is a chunk

    def summary(self, finish_reason: str | None) -> str:
        """[12 tokens, first after 0.1 s, 31.2 tokens/s, alpha-hat 0.82]; the rate is that behind the first step."""
        parts = [f"{self.num_tokens} tokens"]
        if self.first_s is not None:
            parts.append(f"first after {self.first_s - self.started_s:.2f} s")
            if self.num_tokens > self.num_first:
                parts.append(f"{(self.num_tokens - self.num_first) / (self.last_s - self.first_s):.1f} tokens/s")
        if self.num_tested:
            parts.append(f"alpha-hat {self.num_accepted / self.num_tested:.2f}")
        notes = {None: "stopped", "length": "cut at the most tokens allowed", "abort": "aborted"}
        parts += [notes[finish_reason]] if finish_reason in notes else []
        return f"[{', '.join(parts)}]"


class Chat:
    """One conversation over an LLM. params: of every answer. system: the first message, if any."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self.llm, self.params = llm, params
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = list(self._opening)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._opening)

    def answer(self, text: str, out: TextIO) -> str:
        """Write the answer to `out` as it grows, remember both turns, return the line of numbers.

        Raises UserError where the conversation cannot be continued; then this turn is forgotten.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.llm.apply_chat_template(messages)
        pieces, numbers, finish_reason = list[str](), Numbers(), None
        end = self.llm.listen(numbers)
        try:
            with _interrupts(numbers), suppress(Stopped):
                for chunk in self.llm.stream(ids, self.params):
                    pieces.append(chunk.text)
                    out.write(chunk.text)
                    out.flush()
                    finish_reason = chunk.finish_reason
                    if numbers.interrupted:
                        break
        finally:
            end()
        answer = "".join(pieces)
        out.write("\n" if not answer.endswith("\n") else "")
        out.flush()
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return numbers.summary(finish_reason)


@contextmanager
def _interrupts(numbers: Numbers) -> Iterator[None]:
    """Ctrl-C sets a mark that is read between two steps: an exception inside a step would tear it apart."""

    def mark(number: int, frame: FrameType | None) -> None:
        if numbers.interrupted:
            raise KeyboardInterrupt  # the second press: whoever is that impatient may have the torn step
        numbers.interrupted = True

    before = signal.signal(signal.SIGINT, mark)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def loading() -> Status:
    """A spinner on standard error, where that is a terminal, for as long as the models are loaded."""
    return make_console(stderr=True).status("loading ...")


def unlimited(params: SamplingParams, max_tokens: int | None, llm: LLM) -> SamplingParams:
    """Parameters of an answer: it ends where the model ends it, unless somebody set a limit.

    max_tokens: the limit on the command line; one that generation_config.json suggests counts as set, too.
    """
    if max_tokens is not None or llm.default_params.max_tokens != SamplingParams().max_tokens:
        return params
    return dataclasses.replace(params, max_tokens=SHIPPED_MAX_TOKENS if _is_shipped(llm) else None)


def _is_shipped(llm: LLM) -> bool:
    return Path(llm.checkpoint.folder) == SHIPPED_TARGET


def run(llm: LLM, params: SamplingParams, system: str | None) -> None:
    """Read messages until the input ends: lines of a terminal with editing and history, or lines of a pipe."""
    chat = Chat(llm, params, system)
    chat.llm.apply_chat_template([*chat.messages, {"role": "user", "content": "?"}])  # refuse before anybody types
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines and remembers them once this is imported)
        if _is_shipped(llm):
            _note(SHIPPED_NOTE)
        _note("Type a message. /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends.")
    for text in _messages(terminal):
        command = text.strip() if text.startswith("/") and not text.startswith("//") else None
        if command == "/exit":
            return
        if command is not None:
            _note(_obey(chat, command))
            continue
        try:
            _note(chat.answer(text.removeprefix("/"), sys.stdout))
        except UserError as error:
            _note(f"error: {error}" + (" (/reset forgets the conversation)" if len(chat.messages) > 1 else ""))


def _obey(chat: Chat, command: str) -> str:
    if command == "/reset":
        chat.reset()
        return "the conversation is forgotten"
    return HELP if command == "/help" else f"there is no command {command.split()[0]}: /help lists them"


def _messages(terminal: bool) -> Iterator[str]:
    """Messages that are not blank. Ctrl-C at the prompt drops the line, as a shell does."""
    lines: list[str] = []
    while True:
        try:
            line = input((MORE if lines else PROMPT) if terminal else "")
        except EOFError:
            _note("" if terminal else None)
            line, ended = "", True
        except KeyboardInterrupt:
            if not terminal:
                raise
            _note("\n(Ctrl-D or /exit ends)")
            lines = []
            continue
        else:
            ended = False
        if line.endswith("\\") and not ended:
            lines.append(line[:-1])
            continue
        text, lines = "\n".join([*lines, line] if not ended else lines), []
        if text.strip():
            yield text
        if ended:
            return


def _note(text: str | None) -> None:
    """To standard error: standard output holds the answers alone."""
    if text is not None:
        typer.echo(text, err=True)
