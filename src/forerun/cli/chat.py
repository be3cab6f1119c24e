"""`forerun chat` holds a conversation in the terminal, and shows speed and acceptance of every answer."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import TextIO

import typer

from forerun.config import EngineConfig
from forerun.engine.factory import is_shipped, refuse_without_template
from forerun.engine.llm import LLM
from forerun.engine.prompts import Message
from forerun.errors import BadOption, CapacityError, UserError
from forerun.memory.machine import spare_what_is_loaded
from forerun.models.hub import is_hub_id
from forerun.text.terminal import make_console, visible
from forerun.types import SamplingParams, StepReport

PROMPT, MORE = "> ", ". "
HELP = """\
/help    this list
/reset   forget the conversation
/exit    leave; so does Ctrl-D
Ctrl-C stops an answer; what was written stays in the conversation. Ctrl-\\ ends the program.
A line that ends with a backslash goes on in the next one; a message that begins with / is written with //."""
SHIPPED_NOTE = "The shipped model knows no questions and answers: it continues the Python code that you type."
SHIPPED_MAX_TOKENS = 128  # the shipped model seldom ends an answer by itself
FORGOTTEN = "nothing was answered, so this message is forgotten"


@dataclass
class Numbers:
    """A listener that adds up the steps of one answer and notes when its first token came."""

    started_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None  # the end of the first step that committed
    last_s: float = 0.0
    num_first: int = 0  # tokens of that step
    num_tokens: int = 0
    num_tested: int = 0
    num_accepted: int = 0

    def __call__(self, report: StepReport) -> None:
        self.num_tested += report.num_tested
        self.num_accepted += report.num_accepted
        self.num_tokens += report.num_committed
        self.last_s = time.perf_counter()
        if self.first_s is None and report.num_committed:
            self.first_s, self.num_first = self.last_s, report.num_committed

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
    """One conversation with an LLM. params: those of every answer. system: the first message, if any."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self.llm, self.params = llm, params
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = list(self._opening)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._opening)

    def answer(self, text: str, out: TextIO, *, keys: bool = False) -> str:
        """Write the answer to `out` as it grows, remember both turns, and return the line of numbers.

        keys: whether Ctrl-C ends the answer and nothing else. Raises UserError or CapacityError where the conversation
        cannot be continued; then this turn is forgotten, as it is where the answer is empty.
        """
        messages, numbers = [*self.messages, {"role": "user", "content": text}], Numbers()
        end = self.llm.listen(numbers)
        try:
            with _one_interrupt() if keys else nullcontext():
                answer, finish_reason = self._write(messages, out, keys)
        finally:
            end()
        if not answer and finish_reason is None:
            return FORGOTTEN
        out.write("\n" if not answer.endswith("\n") else "")
        out.flush()
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return numbers.summary(finish_reason)

    def _write(self, messages: list[Message], out: TextIO, keys: bool) -> tuple[str, str | None]:
        """Write the answer, and return its text and why it ended; None where Ctrl-C ended it."""
        answer = ""
        with suppress(KeyboardInterrupt) if keys else nullcontext():
            for chunk in self.llm.stream(self.llm.apply_chat_template(messages), self.params):
                answer += chunk.text
                out.write(visible(chunk.text, out.isatty()))
                out.flush()
                if chunk.finish_reason is not None:
                    return answer, chunk.finish_reason
        return answer, None


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt once: an impatient second one would interrupt the end of the answer."""
    before = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def open_models(config: EngineConfig) -> LLM:
    """Load the LLM of a chat, for one sequence at a time, with a spinner on a terminal's standard error.

    A checkpoint without a chat template is refused before its weights are fetched.
    """
    config = dataclasses.replace(config, max_batch_size=1)
    refuse_without_template(config)
    fetches = any(name is not None and is_hub_id(name) for name in (config.target, config.draft))
    # Downloads have progress bars of their own, and a spinner on the same line would make them scroll.
    with nullcontext() if fetches else make_console(stderr=True).status("loading ..."):
        llm = LLM.from_config(config)
    spare_what_is_loaded()
    return llm


def unlimited(params: SamplingParams, is_limited: bool, config: EngineConfig) -> SamplingParams:
    """Return the parameters of an answer, which ends where the model ends it, unless the user set a limit."""
    if is_limited:
        return params
    return dataclasses.replace(params, max_tokens=SHIPPED_MAX_TOKENS if is_shipped(config.target) else None)


def run(llm: LLM, params: SamplingParams, system: str | None) -> None:
    """Read messages until the input ends: lines of a terminal with editing and history, or lines of a pipe."""
    chat = Chat(llm, params, system)
    chat.llm.apply_chat_template([*chat.messages, {"role": "user", "content": "?"}])  # refuse before the user types
    terminal = sys.stdin is not None and sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines and remembers them once this is imported)
        if is_shipped(llm.checkpoint.folder):
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
            _note(chat.answer(text.removeprefix("/"), sys.stdout, keys=terminal))
        except (UserError, CapacityError) as error:
            _note(f"error: {error}" + (" (/reset forgets the conversation)" if len(chat.messages) > 1 else ""))


def _obey(chat: Chat, command: str) -> str:
    if command == "/reset":
        chat.reset()
        return "the conversation is forgotten"
    return HELP if command == "/help" else f"there is no command {command.split()[0]}: /help lists them"


def _messages(terminal: bool) -> Iterator[str]:
    """Yield the messages that are not blank. Ctrl-C at the prompt drops the line, as in a shell."""
    lines: list[str] = []
    while True:
        try:
            line = _line(MORE if lines else PROMPT, terminal)
        except KeyboardInterrupt:
            if not terminal:
                raise
            _note("\n(Ctrl-D or /exit ends)")
            lines = []
            continue
        if line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            continue
        text, lines = "\n".join(lines if line is None else [*lines, line]), []
        if text.strip():
            yield text
        if line is None:
            return


def _line(prompt: str, terminal: bool) -> str | None:
    """Read the next line; None at the end of the input. The prompt is shown on terminals only."""
    if sys.stdin is None:
        return None
    if terminal and not sys.stdout.isatty():
        typer.echo(prompt, nl=False, err=True)
        prompt = ""
    try:
        return input(prompt if terminal else "")
    except EOFError:
        _note("" if terminal else None)
        return None
    except UnicodeDecodeError:
        raise BadOption("a message is not UTF-8 text: convert the input first") from None


def _note(text: str | None) -> None:
    """Write a note to standard error, because standard output has the answers alone."""
    if text is not None:
        typer.echo(visible(text), err=True)
