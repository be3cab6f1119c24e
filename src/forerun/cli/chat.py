"""`forerun chat` holds a conversation in the terminal, and shows speed and acceptance of every answer."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from forerun import verify
from forerun.cli.conversations import Conversations, default_folder
from forerun.cli.tool_file import ToolFile
from forerun.cli.waiting import Answering, loading
from forerun.cli.words import counted, drafting, drawing, ending, lossy, model_name, note, percent, precision
from forerun.engine.llm import LLM
from forerun.engine.opened import Opened
from forerun.engine.prompts import Message
from forerun.errors import BadOption, CapacityError, UserError
from forerun.memory.machine import spare_what_is_loaded
from forerun.models.named import DRAWING
from forerun.native import cache_folder
from forerun.output_file import write_whole
from forerun.registry import unknown
from forerun.text.parts import AnswerParts, Part, Reasoning, Span, Text, ToolCall
from forerun.text.terminal import make_console, redraws, unechoed, visible
from forerun.types import FinishReason, SamplingParams, StepReport

PROMPT, MORE = "> ", ". "
HELP = """\
/help             this list
/set              how answers are drawn: names and values
/set NAME VALUE   change one, such as /set temperature 0.2
/retry            drop the last answer and ask again
/system TEXT      change the system message; without TEXT, there is none
/save FILE        write the conversation: as Markdown for FILE.md, else as a line for --prompt-file
/save! FILE       the same, over a file that is there
/load FILE        go on with a conversation that was saved as a line; with --kv-disk it is not read again
/load             go on with the last one that was kept; with --kv-disk each is kept by itself
/reset            forget the conversation
/exit             leave; so does Ctrl-D
Ctrl-C stops an answer; what was written stays in the conversation.
Alt-Enter, or a backslash at the end of a line, begins a new line; a pasted text is one message.
A message that begins with / is written with //."""
SHIPPED_NOTE = "The shipped model knows no questions and answers: it continues the Python code that you type."
SHIPPED_MAX_TOKENS = 128  # the shipped model seldom ends an answer by itself
MOST_REFUSED = 3  # messages of a pipe in a row
MOST_CALLS = 32  # different calls in one answer
HOT = 2.0  # temperature above which any model writes noise
LOOP_TOKENS, LOOP_TIMES, LONGEST_LOOP = 8, 6, 128  # a loop: the same 8 to 128 tokens, 6 times in a row
LOOPED = "stopped, for it repeats itself: /retry asks again, /set repetition_penalty 1.1 may help"
KEPT = "The conversation is kept: forerun chat --continue, with the same options, goes on with it."
NONE_KEPT = "no conversation was kept yet: with --kv-disk each is, behind its first answer"
LEFT_OUT = "the answer has a call of a tool that is not whole, which was left out"
FORGOTTEN = "nothing was answered, so this message is forgotten"
COMMANDS = list(dict.fromkeys(line.split()[0] for line in HELP.splitlines() if line.startswith("/")))
ALONE = ("/retry", "/reset", "/help")  # commands that no text follows
LEAVING = frozenset(("exit", "quit", "bye", "q", ":q"))  # what people type to leave
HOW_TO_LEAVE = "to leave, type /exit or Ctrl-D; {0} is sent to the model if you type it again"
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
SETTABLE = (*sorted(DRAWING), "max_tokens", *PENALTIES, "seed", "draft")


@dataclass
class Numbers:
    """A listener that adds up the steps of one answer, and notes when the first token came."""

    started_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None  # the end of the first step that committed
    later_s: float = 0.0  # of the steps behind it, without what the user was asked between two of them
    num_first: int = 0  # tokens of that step
    num_tokens: int = 0
    num_passes: int = 0  # passes of the target that brought tokens
    num_drafted: int = 0
    num_tested: int = 0
    num_accepted: int = 0

    def __call__(self, report: StepReport) -> None:
        self.num_passes += report.num_committed > 0
        self.num_drafted += report.num_drafted
        self.num_tested += report.num_tested
        self.num_accepted += report.num_accepted
        self.num_tokens += report.num_committed
        if self.first_s is not None:
            self.later_s += report.seconds
        elif report.num_committed:
            self.first_s, self.num_first = time.perf_counter(), report.num_committed

    def summary(
        self,
        reason: FinishReason | None,
        params: SamplingParams,
        tv_price: float | None = None,
        *,
        verbose: bool = False,
        plain_token_s: float | None = None,
    ) -> str:
        """Return a line like [12 tokens, first after 0.10 s, 31.2 tokens/s, acceptance rate 82%].

        The speed leaves out the first step. reason: why the answer ended; None where Ctrl-C or a loop ended it.
        tv_price: the TV price that a lossy rule has measured, if any. plain_token_s: the measured duration of a target
        pass over one row, on which the estimated speed-up is based; None = it was not measured.
        """
        parts = [counted(self.num_tokens, "token")]
        if self.first_s is not None:
            parts.append(f"first after {self.first_s - self.started_s:.2f} s")
            if self.num_tokens > self.num_first and self.later_s:
                speed = (self.num_tokens - self.num_first) / self.later_s
                parts.append(f"{speed:.1f} tokens/s")
                if self.num_drafted and plain_token_s is not None:
                    parts.append(f"{speed * plain_token_s:.1f}x plain (estimated)")
        if self.num_drafted:
            parts.append(f"acceptance rate {percent(self.num_accepted / self.num_drafted)}")
        if params.acceptance is not None and not verify.find(params.acceptance).is_lossless:
            parts.append(lossy(params.acceptance, tv_price))
        if verbose and self.num_passes:
            parts.append(f"{self.num_tokens / self.num_passes:.2f} tokens per target pass")
        if verbose and self.num_tested:
            parts.append(f"alpha-hat {self.num_accepted / self.num_tested:.2f}")
        return f"[{', '.join([*parts, *ending(reason, self.num_tokens, params)])}]"


def answering(params: SamplingParams) -> SamplingParams:
    """Return the parameters unchanged. Raises BadOption where they leave no room for an answer."""
    if params.max_tokens == 0:
        raise BadOption("max_tokens=0 is not possible in a conversation: nothing would be answered; give at least 1")
    return params


class Chat:
    """One conversation with an LLM. params: the parameters of every answer. system: the system message, if any.

    verbose: whether the line after each answer has more measures. stop_loops: whether to end an answer that repeats
    itself. tools: functions that the model may call. may_run: returns whether a call, given as text, may be run. kept:
    saves the conversation automatically; None = the conversation is not saved.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None = None,
        *,
        verbose: bool = False,
        stop_loops: bool = True,
        tools: ToolFile | None = None,
        may_run: Callable[[str], bool] = lambda _: False,
        kept: Conversations | None = None,
    ) -> None:
        self.kept = kept
        self.llm, self.params, self.verbose, self.stop_loops = llm, params, verbose, stop_loops
        self.tools, self._may_run = tools, may_run
        self._given: dict[str, Any] = {} if tools is None else {"tools": tools.schemas}
        self._answer_form = llm.answer_form(**self._given)
        self._asked_back: SamplingParams | None = None
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = list(self._opening)
        self._saved: set[Path] = set()  # files that this conversation was written to

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._opening)
        self._begin()

    def _begin(self, file: Path | None = None) -> None:
        """Save later messages to a new file, or to `file`, which holds the conversation up to now."""
        if self.kept is not None:
            self.kept.begin()
            self.kept.file = file

    def set(self, words: str) -> str:
        """Change a parameter of the answers, as in "temperature 0.2", and return a text for the user.

        Without words, return all parameters with their values. Raises BadOption for a name or value that is not
        possible. A temperature above HOT is only set when it is given a second time.
        """
        name, *rest = re.split(r"\s*=\s*|\s+", words.strip(), maxsplit=1)
        value = "".join(rest)
        if not name:
            return "\n".join(f"{name} {self._value(name)}" for name in SETTABLE)
        name = name.replace("-", "_")
        if name not in SETTABLE:
            raise BadOption(unknown("parameter", name, SETTABLE))
        if not value.strip():
            raise BadOption(f"there is no value for {name}: write /set {name} VALUE")
        changes: dict[str, Any] = {name: value.strip() if name == "draft" else _read(value.strip())}
        params = answering(dataclasses.replace(self.params, **changes))
        self.llm.engine.drafter.chosen(params.draft)
        is_sure, self._asked_back = self._asked_back == params, params
        if name == "temperature" and params.temperature > HOT and not is_sure:
            return f"above {HOT:g} any model writes noise, and 0.2 to 1 is usual: say it again if it is meant"
        self.params = params
        return f"{name} is now {self._value(name)}"

    def _value(self, name: str) -> str:
        if name == "draft":
            chosen, params = self.llm.engine.drafter.chosen, self.params
            return chosen(params.draft, acceptance=params.acceptance or "ratio", searches=params.searches)
        value = getattr(self.params, name)
        if value is None:
            return {"seed": "a new one for each answer", "max_tokens": "no limit"}[name]
        return f"{value:g}" if isinstance(value, float) else str(value)

    def system(self, text: str) -> str:
        """Change the system message, and return a text for the user. An empty text removes the message."""
        rest = self.messages[len(self._opening) :]
        self._opening = [{"role": "system", "content": text}] if text else []
        self.messages = [*self._opening, *rest]
        return "the system message is changed" if text else "there is no system message now"

    def retry(self) -> str:
        """Drop the last answer, and return the message before it. Raises BadOption where nothing was answered yet."""
        if len(self.messages) < len(self._opening) + 2:
            raise BadOption("nothing was answered yet: type a message first")
        last = max(i for i, message in enumerate(self.messages) if message["role"] == "user")
        self.messages, question = self.messages[:last], self.messages[last]
        return str(question["content"])

    def save(self, name: str, *, overwrites: bool = False) -> str:
        """Write the conversation to a file, and return a text for the user. Raises BadOption if it cannot be written.

        overwrites: whether to replace an existing file that this conversation was not saved to before.
        """
        file = Path(name).expanduser()
        if not name or file.is_dir():
            what = f"{name} is a folder" if name else "there is no file to write"
            raise BadOption(f"{what}: write /save FILE.md or /save FILE.jsonl")
        if file.exists() and not overwrites and file.resolve() not in self._saved:
            raise BadOption(f"{name} is there already: name another file, or write /save! {name}")
        if file.suffix.lower() == ".md":
            text = "\n\n".join(f"## {one['role']}\n\n{one['content']}" for one in self.messages)
        else:
            text = json.dumps({"messages": self.messages}, ensure_ascii=False)
        try:
            write_whole(file, f"{text}\n")
        except OSError as error:
            raise BadOption(f"{name} cannot be written ({error.strerror}): name another file") from None
        self._saved.add(file.resolve())
        return f"written to {file}"

    def load(self, name: str) -> str:
        """Continue a conversation that `save` wrote as a line, and return a text for the user.

        Without a name, load the last conversation that was saved automatically. Raises BadOption if there is none.
        """
        last = self.kept.last() if self.kept is not None and not name else None
        if self.kept is not None and not name and last is None:
            raise BadOption(NONE_KEPT)
        if last is None and not name:
            raise BadOption("there is no file to read: write /load FILE.jsonl")
        file = last or Path(name).expanduser()
        try:
            messages = json.loads(file.read_text(encoding="utf-8"))["messages"]
            roles = [(message["role"], message["content"]) for message in messages]
        except OSError as error:
            raise BadOption(f"{name or file} cannot be read ({error.strerror}): write /load FILE.jsonl") from None
        except (ValueError, TypeError, KeyError):
            raise BadOption(f"{name} holds no conversation: load what /save FILE.jsonl wrote") from None
        self._opening = [message for message in messages[:1] if message["role"] == "system"]
        self.messages = messages
        self._begin(last)
        num = sum(role == "user" for role, _ in roles)
        return f"{num} question{'s' * (num != 1)} and what was answered are back"

    def answer(self, text: str, out: TextIO, *, keys: bool = False) -> str:
        """Write the answer to `out` as it grows, add it to the conversation, and return the line with its speed.

        text: the user's message. keys: whether Ctrl-C ends only the answer, and not the chat. Raises UserError or
        CapacityError where the conversation cannot be continued; the message is then forgotten. It is also forgotten
        where the answer was stopped before its first text.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        numbers = Numbers()
        end = self.llm.listen(numbers)
        try:
            with _one_interrupt() if keys else nullcontext(_Interrupt()) as interrupt:
                answer = self._write(messages, out, interrupt)
                done = set[str]()
                while answer.calls and answer.finish_reason is not None:
                    asked = {call.name + call.arguments_on_a_line() for call in answer.calls}
                    is_new = bool(asked - done) and len(done) < MOST_CALLS
                    done = done | asked
                    if is_new:
                        messages += [answer.message, *map(self._result, answer.calls)]
                    # Small models call the same again and again: then they answer without tools.
                    answer = self._write(messages, out, interrupt, may_call=is_new)
        finally:
            end()
        if not answer.text and not answer.calls and answer.finish_reason is None:
            return FORGOTTEN
        if not answer.text:
            out.write("\n")
        self.messages = [*messages, answer.message]
        if self.kept is not None:
            self.kept.write(self.messages)
        target = self.llm.pass_times()[""]
        line = numbers.summary(
            answer.finish_reason,
            self.params,
            answer.tv_price,
            verbose=self.verbose,
            plain_token_s=target.one_row_s if target.fit is None else None,
        )
        remarks = [LOOPED] * answer.is_loop + [LEFT_OUT] * (answer.num_broken_calls > 0)
        return "\n".join([line, *remarks])

    def _result(self, call: ToolCall) -> Message:
        """Run a call of a tool if the user allows it, and return its result or the user's refusal as a message."""
        asked = f"{call.name}({call.arguments_on_a_line()})"
        may_run = self.tools is not None and self._may_run(asked)
        text = self.tools.run(call) if may_run and self.tools is not None else "the user did not allow this call"
        note(f"{asked} -> {text[:200]}" if may_run else f"{asked} was not run")
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}

    def _write(self, messages: list[Message], out: TextIO, interrupt: _Interrupt, *, may_call: bool = True) -> Answer:
        """Write one output of the model to `out` as it grows, and return it. may_call: whether the model gets tools."""
        given = self._given if may_call else {}
        answer_form = self._answer_form if may_call else self.llm.answer_form()
        answer, ids = Answer(), list[int]()
        with suppress(_Stopped), unechoed(), ExitStack() as stack:
            interrupt.is_awaited = True
            try:
                prompt = self.llm.apply_chat_template(messages, **given)
                waiting = stack.enter_context(Answering(self.llm, len(prompt)))
                show = None
                for chunk in self.llm.stream(prompt, self.params, answer_form=answer_form):
                    ids += chunk.token_ids
                    for part in chunk.parts if chunk.parts is not None else [Text(chunk.text)]:
                        text = answer.add(part)
                        if text and show is None:
                            waiting.end()
                            show = stack.enter_context(_shown(out))
                        if show is not None:
                            show(text)
                    if chunk.output is not None:
                        answer.finish_reason, answer.tv_price = chunk.finish_reason, chunk.output.report.tv_price
                        answer.num_broken_calls = chunk.output.num_broken_calls
                    elif self.stop_loops and is_loop(ids):
                        answer.is_loop = True
                        break
            finally:
                interrupt.is_awaited = False
        return answer


@dataclass
class Answer:
    """The written answer, and why it ended. finish_reason: None if Ctrl-C or a loop ended it."""

    answer_parts: AnswerParts = field(default_factory=AnswerParts)
    finish_reason: FinishReason | None = None
    tv_price: float | None = None
    num_broken_calls: int = 0
    is_loop: bool = False

    def add(self, part: Part) -> str:
        """Add a part, and return the text to show for it: <think> marks enclose reasoning, and calls are not shown."""
        before = self.answer_parts.items[-1] if self.answer_parts.items else None
        self.answer_parts.add(part)
        was_thinking = isinstance(before, Span) and before.kind == "reasoning"
        match part:
            case Reasoning(text):
                return text if was_thinking else f"<think>\n{text}"
            case Text(text):
                return f"\n</think>\n\n{text}" if was_thinking else text
        return ""

    @property
    def text(self) -> str:
        """The answer's text, or its reasoning where there is no text."""
        return self.answer_parts.text or self.answer_parts.reasoning

    @property
    def calls(self) -> list[ToolCall]:
        """The tool calls in the answer."""
        return self.answer_parts.calls

    @property
    def message(self) -> Message:
        """The answer as a message of the conversation."""
        return self.answer_parts.message()


def is_loop(ids: Seq[int]) -> bool:
    """Return whether the ids end in a loop: the same LOOP_TOKENS to LONGEST_LOOP tokens, LOOP_TIMES in a row."""
    sizes = range(LOOP_TOKENS, min(LONGEST_LOOP, len(ids) // LOOP_TIMES) + 1)
    return any(all(ids[-i] == ids[-i - size] for i in range(1, size * (LOOP_TIMES - 1) + 1)) for size in sizes)


@contextmanager
def _shown(out: TextIO) -> Iterator[Callable[[str], object]]:
    """Yield a function that writes pieces of text to `out`.

    Where `out` is a terminal that can redraw a line, the pieces are shown as Markdown, see page.py. Elsewhere they are
    written as they are.
    """
    console = make_console()
    if out is sys.stdout and redraws(console):
        from forerun.cli.page import page

        with page(console) as growing:
            yield growing.write
        return
    last = ""

    def write(text: str) -> None:
        nonlocal last
        last = text or last
        out.write(visible(text, out.isatty()))
        out.flush()

    try:
        yield write
    finally:
        out.write("\n" if last and not last.endswith("\n") else "")
        out.flush()


def _read(value: str) -> Any:
    """Return the JSON value in a text, such as a number. Return None for "none", and any other text unchanged.

    Where the parameter must be a number, SamplingParams refuses the text.
    """
    try:
        return None if value.lower() == "none" else json.loads(value)
    except ValueError:
        return value


class _Stopped(KeyboardInterrupt):
    """The exception that Ctrl-C raises while an answer grows."""


@dataclass
class _Interrupt:
    """A handler for Ctrl-C that raises _Stopped once, while an answer is awaited.

    A second Ctrl-C is ignored, because it would interrupt the program while it writes the end of the answer. A Ctrl-C
    just after the end of the answer is ignored, too.
    """

    is_awaited: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_awaited:
            self.is_awaited = False
            raise _Stopped


@contextmanager
def _one_interrupt() -> Iterator[_Interrupt]:
    """Yield an _Interrupt that handles Ctrl-C until the end of the `with` block."""
    before = signal.getsignal(signal.SIGINT)
    interrupt = _Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def load_models(opened: Opened) -> LLM:
    """Load the LLM of a chat. A checkpoint without a chat template is refused before its weights are fetched."""
    _ = opened.chat_template
    with unechoed(), loading(opened):
        llm = LLM.from_opened(opened)
    spare_what_is_loaded()
    return llm


def unlimited(params: SamplingParams, is_limited: bool, opened: Opened) -> SamplingParams:
    """Return the parameters of an answer: `params`, but without a limit of tokens unless `is_limited`.

    is_limited: whether the user or the checkpoint gives a limit. If not, the shipped model gets SHIPPED_MAX_TOKENS.
    Raises BadOption for a limit that leaves no room for an answer.
    """
    if is_limited:
        return answering(params)
    return dataclasses.replace(params, max_tokens=SHIPPED_MAX_TOKENS if opened.is_shipped else None)


def banner(llm: LLM, params: SamplingParams) -> str:
    """Return a line with the model, its precision, the drafter, and how answers are drawn."""
    return f"{model_name(llm)}: {precision(llm)}, {drafting(llm, params.draft)}, {drawing(params)}"


def run(
    llm: LLM,
    params: SamplingParams,
    system: str | None,
    *,
    verbose: bool = False,
    stop_loops: bool = True,
    tools: ToolFile | None = None,
    goes_on: bool = False,
) -> None:
    """Answer messages until the input ends: messages that are typed in a terminal, or the lines of a pipe.

    A terminal offers editing and history. A tool call is run only if a user at a terminal allows it. With kv_disk, the
    conversation is saved automatically. system, verbose, stop_loops: as in Chat. goes_on: whether to continue the last
    conversation that was saved automatically. Raises BadOption if no conversation was saved.
    """
    kept = None if llm.config.kv_disk is None else Conversations(default_folder())
    terminal = sys.stdin is not None and sys.stdin.isatty()
    more: dict[str, Any] = {"may_run": _asked} if terminal else {}
    chat = Chat(llm, params, system, verbose=verbose, stop_loops=stop_loops, tools=tools, kept=kept, **more)
    back = chat.load("") if goes_on else ""
    if goes_on and system is not None:
        chat.system(system)
    opening = [*chat.messages, {"role": "user", "content": "?"}]
    # A model that cannot have this conversation is refused before the banner.
    chat.llm.apply_chat_template(opening, **({} if tools is None else {"tools": tools.schemas}))
    if terminal:
        note(banner(llm, params))
        if llm.opened.is_shipped:
            note(SHIPPED_NOTE)
        if tools is not None:
            note(f"The model may call {', '.join(tools.names)}; you are asked before each call.")
        note("Type a message. /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends.")
    if back:
        note(back)
    try:
        _talk(chat, terminal)
    finally:
        if kept is not None and kept.file is not None:
            note(KEPT)


def _talk(chat: Chat, terminal: bool) -> None:
    """Answer messages and obey commands, until the input ends.

    If MOST_REFUSED lines of a pipe in a row cannot be answered, the last error is raised. This happens when a long text
    is piped in.
    """
    leaving = set(LEAVING) if terminal else set[str]()
    num_refused = 0
    for text in _typed() if terminal else _piped():
        if text.strip().lower() in leaving:
            note(HOW_TO_LEAVE.format(text.strip()))
            leaving.clear()
            continue
        command = text.strip() if text.startswith("/") and not text.startswith("//") else None
        if command is not None and command.partition(" ")[0][1:] in LEAVING:
            return
        try:
            if command == "/retry":
                note(chat.answer(chat.retry(), sys.stdout, keys=terminal))
            elif command is not None:
                note(_obey(chat, command))
            else:
                note(chat.answer(text.removeprefix("/"), sys.stdout, keys=terminal))
            num_refused = 0
        except (UserError, CapacityError) as error:
            num_refused += 1
            if num_refused == MOST_REFUSED and not terminal:
                raise
            hint = " (/reset forgets the conversation)" if command is None and len(chat.messages) > 1 else ""
            note(f"error: {error}{hint}")


def _asked(call: str) -> bool:
    """Ask the user whether a tool call may be run, and return the answer."""
    sys.stderr.write(f"run {visible(call)}? [y/N] ")
    sys.stderr.flush()
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _obey(chat: Chat, command: str) -> str:
    name, _, rest = command.partition(" ")
    if rest and name in ALONE:
        return f"{name} takes no text: type it alone"
    if name == "/set":
        return chat.set(rest)
    if name == "/system":
        return chat.system(rest.strip())
    if name in ("/save", "/save!"):
        return chat.save(rest.strip(), overwrites=name == "/save!")
    if name == "/load":
        return chat.load(rest.strip())
    if name == "/reset":
        chat.reset()
        return "the conversation is forgotten"
    if name == "/help":
        return HELP
    return f"{unknown('command', name, COMMANDS)}; a message that begins with / is written with //"


def _typed() -> Iterator[str]:
    """Yield the typed messages that are not blank. Ctrl-C at the prompt drops what was typed, as in a shell."""
    session = _session()
    while True:
        try:
            text: str = session.prompt(PROMPT)
        except KeyboardInterrupt:
            note("(Ctrl-D or /exit ends)")
            continue
        except EOFError:
            return
        if text.strip():
            yield text


def _session() -> Any:
    """Return a prompt that edits lines, remembers messages between sessions, and takes a paste as one message.

    The prompt is shown on standard error where standard output is a file.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            """Write a message to the file. Errors are ignored, so that a full disk does not end the conversation."""
            with suppress(OSError):
                super().store_string(string)

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        multiline=True,
        key_bindings=keys,
        history=InMemoryHistory() if (file := _history_file()) is None else History(str(file)),
        prompt_continuation=MORE,
        enable_suspend=True,
        output=None if sys.stdout.isatty() else create_output(sys.stderr),
    )


def _history_file() -> Path | None:
    """Return the file of past messages, which only its owner can read; None where it cannot be written."""
    file = cache_folder() / "chat-history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except OSError:
        return None
    return file


def _piped() -> Iterator[str]:
    """Yield the lines of standard input that are not blank, as messages. Lines that end with a backslash are joined."""
    lines: list[str] = []
    while sys.stdin is not None:
        try:
            line = sys.stdin.readline()
            line.encode()  # which Python reads as other characters, where the environment names no encoding
        except UnicodeError:
            raise BadOption("a message is not UTF-8 text: convert the input first") from None
        text = line.removesuffix("\n")
        if line and text.endswith("\\"):
            lines.append(text[:-1])
            continue
        text, lines = "\n".join([*lines, text]), []
        if text.strip():
            yield text
        if not line:
            return
