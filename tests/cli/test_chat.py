"""`forerun chat`: in a terminal (a real one, with keys), and through pipes."""

import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pexpect
import pyte
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

import processes
from cli.conftest import little_room, said
from forerun import LLM, SamplingParams
from forerun.cli import chat as chat_command, conversations
from forerun.cli.chat import KEPT, LOOP_TIMES, LOOP_TOKENS, Chat, Numbers, is_loop
from forerun.cli.conversations import Conversations
from forerun.cli.page import page
from forerun.config import EngineConfig
from forerun.engine.opened import Opened
from forerun.errors import BadOption, UnsupportedModel
from forerun.types import StepReport
from refusals import refusal
from support import heard
from tiny import write_tiny

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"
SPEED = r"(, \d+\.\d tokens/s)?(?:, \d+\.\dx plain \(estimated\))?"
NUMBERS = rf"\[\d+ tokens?, first after \d+\.\d\d s{SPEED}(, acceptance rate \d+%)?(, [a-z -]+)?\]"
READY = "\x1b[?2004h"  # what a terminal is told when a prompt waits for keys: that it may paste a text as a whole
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SHORT = SamplingParams(temperature=0, max_tokens=9)
SHORT_FLAGS = ("--draft", "none", "--temperature", "0", "--max-tokens", "9")
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template, and so many positions and no id that ends it that only Ctrl-C does."""
    folder = write_tiny(tmp_path_factory.mktemp("chat") / "talker", seed=3, max_positions=1_000_000)
    for name in ("config.json", "generation_config.json"):
        said = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps({**said, "eos_token_id": None}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture
def chat(talker: Path) -> Chat:
    """A conversation with that model, which drafts nothing."""
    return Chat(LLM(talker, draft="none"), GREEDY)


def ask(child: Any, text: str) -> None:
    """Type a line when the prompt waits for one."""
    child.expect_exact(READY)
    child.send(f"{text}\r")


def leave(child: Any) -> None:
    """End the command with Ctrl-D when the prompt waits for a line."""
    child.expect_exact(READY)
    child.sendeof()
    child.expect(pexpect.EOF)


def shown(child: Any) -> list[str]:
    """The lines of the terminal that are not blank."""
    return [line.rstrip() for line in child.screen.display if line.strip()]


@pytest.fixture
def terminal(talker: Path) -> Iterator[Any]:
    """terminal(*flags) -> a chat with that model in a pseudo-terminal, driven by keys; `child.screen` is its screen."""
    children = []

    def start(*flags: str, columns: int = 120) -> pexpect.spawn:
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}  # the terminal says it
        environment["FORERUN_CACHE_DIR"] = str(talker.parent / "cache")
        environment |= {"TERM": "xterm", "OMP_NUM_THREADS": "1", "PROMPT_TOOLKIT_NO_CPR": "1"}
        command = [sys.executable, "-m", "forerun", "chat", str(talker), *flags]
        child = processes.spawn(command, env=environment, encoding="utf-8", timeout=90, dimensions=(40, columns))
        child.screen = pyte.Screen(columns, 40)
        child.logfile_read = SimpleNamespace(write=pyte.Stream(child.screen).feed, flush=lambda: None)
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


def test_what_a_user_is_asked_between_two_steps_takes_no_time() -> None:
    """As whether a tool may be run: the speed is that of the steps."""
    numbers = Numbers()
    for seconds in (9.0, 0.5, 1.5):
        numbers(StepReport(num_committed=4, score_s=seconds))
        time.sleep(0.01)
    assert ", 4.0 tokens/s, " in numbers.summary(None, SamplingParams())


def test_a_conversation_in_a_terminal(terminal: Any) -> None:
    child = terminal("--draft", "lookup", "--temperature", "0", "--max-tokens", "12")
    for typed, answer in (
        ("hello", NUMBERS),
        ("/help", "forget the conversation"),
        ("/hlep now", r"did you mean '/help'[^;]*; a message that begins with / is written\s+with //"),
        ("two \\\rlines", NUMBERS),
        ("quit", "to leave, type /exit or Ctrl-D; quit is sent to the model if you type it again"),
        ("quit", NUMBERS),
        ("/reset", "the conversation is forgotten"),
    ):
        ask(child, typed)
        child.expect(answer)
    leave(child)
    assert child.wait() == 0
    lines = shown(child)
    assert "Traceback" not in "".join(lines)
    assert lines[lines.index("> two") + 1] == ". lines"


def test_the_banner_names_model_precision_drafter_and_temperature(terminal: Any) -> None:
    child = terminal("--draft", "lookup", "--dtype", "float32", columns=60)
    child.expect_exact(READY)
    banner = "talker: float32, drafts from the text (lookup), temperature 0.7, top-p 0.9 Type"
    assert banner in " ".join(shown(child))
    assert shown(child)[0].endswith((",", "drafts", "text", "top-p", "temperature")), "folded by words"
    child.sendeof()


def test_a_pasted_text_is_one_message_and_is_remembered(terminal: Any) -> None:
    child = terminal("--draft", "none", "--temperature", "0", "--max-tokens", "4")
    child.expect_exact(READY)
    child.send("\x1b[200~one\ntwo\nthree\x1b[201~")
    child.expect_exact("three")
    child.send("\r")
    child.expect(NUMBERS)
    child.expect_exact(READY)
    child.send("\x1b[A")  # the key up: the last message, all of its lines
    child.expect_exact("three")
    child.send("!\r")
    child.expect(NUMBERS)
    leave(child)
    lines = shown(child)
    starts = [i for i, line in enumerate(lines) if line == "> one"]
    assert [lines[i : i + 3] for i in starts] == [["> one", ". two", ". three"], ["> one", ". two", ". three!"]]


def test_what_is_typed_during_an_answer_waits_for_the_prompt(terminal: Any) -> None:
    child = terminal("--draft", "none", "--temperature", "0", "--max-tokens", "400", columns=200)
    ask(child, "hello")
    child.expect_exact("2004l")  # the prompt has ended
    child.send("typed ahead")
    child.expect(NUMBERS)
    assert "typed" not in child.before
    child.expect_exact(READY)
    child.expect_exact("typed ahead")
    child.send("\x15")  # as nothing
    child.sendeof()
    child.expect(pexpect.EOF)


def test_a_history_that_cannot_be_written_ends_no_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        session = chat_command._session()
        (tmp_path / "chat-history").unlink()
        (tmp_path / "chat-history").mkdir()
        session.history.append_string("hello")
        assert session.history.get_strings() == ["hello"]


def test_ctrl_c_stops_the_answer_and_nothing_else(terminal: Any) -> None:
    child = terminal("--draft", "none", "--temperature", "0", "--max-seq-len", "1000000", "--no-stop-loops")
    child.expect_exact("Ctrl-D ends.")
    for _ in range(2):
        ask(child, "hello")
        child.expect_exact("2004l")  # the prompt has ended
        child.expect(r"[^\x1b\r\n]{30,}")  # the answer has begun
        child.sendintr()
        child.expect(NUMBERS)
        assert child.match.group(3) == ", stopped"
    child.expect_exact(READY)
    child.send("half a line")
    child.expect_exact("line")
    child.sendintr()
    child.expect_exact("(Ctrl-D or /exit ends)")
    ask(child, "/exit")
    child.expect(pexpect.EOF)
    assert child.wait() == 0


def test_ctrl_c_that_comes_when_the_answer_has_ended_does_nothing(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Chat._write

    def late(*arguments: Any) -> Any:
        answer = write(*arguments)
        signal.raise_signal(signal.SIGINT)
        return answer

    monkeypatch.setattr(Chat, "_write", late)
    assert chat.answer("hello", io.StringIO(), keys=True).startswith("[12 tokens, ")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_loop_ends_an_answer_and_is_named(talker: Path) -> None:
    llm = LLM(talker, draft="none", max_seq_len=4096)
    greedy = SamplingParams(temperature=0, max_tokens=2000, logit_bias={65: 1e4}, ignore_eos=True)  # one id for ever
    line = Chat(llm, greedy).answer("hello", out := io.StringIO())
    assert line.endswith("stopped, for it repeats itself: /retry asks again, /set repetition_penalty 1.1 may help")
    assert LOOP_TOKENS * LOOP_TIMES <= len(out.getvalue()) < 100
    Chat(llm, dataclasses.replace(greedy, max_tokens=100), stop_loops=False).answer("hello", out := io.StringIO())
    assert len(out.getvalue().strip()) == 100


def test_what_is_a_loop() -> None:
    eight = [1, 2, 3, 4, 5, 6, 7, 8]
    assert is_loop([9, *eight * 6])
    assert is_loop([*range(100), *[*range(50)] * 6])
    assert not is_loop(eight * 5)
    assert not is_loop([*eight * 6, 9])
    assert not is_loop(eight[:7] * 6), "short ones are lists and tables"


def test_a_temperature_that_makes_noise_is_asked_back(chat: Chat) -> None:
    assert "say it again if it is meant" in chat.set("temperature 99")
    assert chat.params.temperature == 0
    assert chat.set("temperature 99") == "temperature is now 99"
    assert chat.set("temperature 1.5") == "temperature is now 1.5"


def test_a_save_that_fails_leaves_the_old_file(chat: Chat, tmp_path: Path) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    chat.save(str(old))
    text = old.read_text(encoding="utf-8")
    chat.messages = [{"role": "user", "content": "long " * 20}]
    for file in (old, new):
        with pytest.raises(BadOption, match=r"cannot be written \(File too large\): name another file"), little_room():
            chat.save(str(file))
    assert old.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [old]


def test_a_save_keeps_who_may_read_a_file_and_replaces_no_pipe(chat: Chat, tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "talk.jsonl", tmp_path / "link", tmp_path / "pipe"
    chat.save(str(file))
    file.chmod(0o600)
    link.symlink_to(file)
    chat.messages = [{"role": "user", "content": "more"}]
    chat.save(str(link), overwrites=True)
    assert "more" in file.read_text(encoding="utf-8")
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        chat.save(str(pipe), overwrites=True)
        assert "more" in reader.communicate()[0]
    assert pipe.is_fifo()


def test_a_conversation_is_asked_again_saved_and_opened_otherwise(chat: Chat, tmp_path: Path, written: Any) -> None:
    talk = tmp_path / "talk.jsonl"
    assert "nothing was answered yet" in refusal(BadOption, chat.retry)
    chat.answer("one", io.StringIO())
    chat.answer("two", io.StringIO())
    assert chat.retry() == "two"
    assert [one["role"] for one in chat.messages] == ["user", "assistant"]
    assert chat.system("be brief") == "the system message is changed"
    assert [one["role"] for one in chat.messages] == ["system", "user", "assistant"]
    chat.save(str(talk))
    assert json.loads(talk.read_text(encoding="utf-8"))["messages"] == chat.messages
    other = Chat(chat.llm, chat.params, "another system message")
    assert other.load(str(talk)).startswith("1 question ")
    assert other.messages == chat.messages
    other.reset()
    assert other.messages == chat.messages[:1], "the system message came with it"
    assert "cannot be read" in refusal(BadOption, other.load, str(tmp_path / "nowhere.jsonl"))
    assert "holds no conversation" in refusal(BadOption, other.load, written("[1]", "other.jsonl"))
    other = Chat(chat.llm, chat.params)
    there = "talk.jsonl is there already: name another file, or write /save! "
    assert there in refusal(BadOption, other.save, str(talk))
    assert other.save(str(talk), overwrites=True).startswith("written to")
    chat.save(str(talk))  # it has written there before
    chat.save(str(tmp_path / "talk.md"))
    assert (tmp_path / "talk.md").read_text(encoding="utf-8").startswith("## system\n\nbe brief\n\n## user\n\none\n")
    assert "cannot be written" in refusal(BadOption, chat.save, str(tmp_path / "nowhere" / "talk.md"))
    chat.reset()
    assert [one["role"] for one in chat.messages] == ["system"]
    assert chat.system("") == "there is no system message now"


def test_an_answer_is_shown_as_markdown_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines stay lines, HTML and addresses stay to be read, code is left alone, and no word is cut at the edge."""
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal has 80 columns, whatever is said
    console = Console(file=io.StringIO(), width=30, force_terminal=True, color_system=None, legacy_windows=False)
    text = "# Title\n\none\ntwo <b> [x](http://a.b) and some more words\n\n```\na  <b>\n\nb\n```\n\n* item\n"
    with page(console) as made:
        for i in range(0, len(text), 5):
            made.write(text[i : i + 5])
    screen = pyte.Screen(30, 40)
    pyte.Stream(screen).feed(console.file.getvalue().replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert [line.strip() for line in lines[:4]] == ["Title", "one", "two <b> x (http://a.b) and", "some more words"]
    assert [line.strip() for line in lines[4:]] == ["a  <b>", "b", "\u2022 item"]


def test_parameters_can_be_set(talker: Path) -> None:
    chat = Chat(LLM(talker, draft="lookup"), GREEDY)
    assert chat.set("temperature 0.2") == "temperature is now 0.2"
    assert chat.set("top-p=0.5") == "top_p is now 0.5"
    assert "draft lookup" in chat.set("").splitlines()
    assert chat.set("draft none") == "draft is now none"
    assert Chat(LLM(talker, draft="none"), GREEDY).set("").endswith("draft none")
    assert chat.set("max_tokens none") == "max_tokens is now no limit"
    params = SamplingParams(temperature=0.2, top_p=0.5, draft="none", max_tokens=None)
    assert chat.params == params
    assert "temperature 0.2\n" in chat.set("")
    for words, sentence in {
        "temprature 1": "there is no parameter 'temprature' (did you mean 'temperature'?)",
        "temperature": "there is no value for temperature",
        "temperature warm": "temperature='warm' is not possible",
        "max_tokens 0": "max_tokens=0 is not possible in a conversation: nothing would be answered",
        "draft = lookup:max_n=4": "there is no drafter in this engine 'lookup:max_n=4'",
        "draft model": "there is no drafter in this engine 'model': it must be one of auto, forced, lookup, none, ",
    }.items():
        assert sentence in refusal(BadOption, chat.set, words)
    # No engine starts with that.
    with pytest.raises(BadOption, match=r"did you mean 'none'.*of auto, forced, lookup, none, prediction$"):
        chat.set("draft nonee")
    assert chat.params == params


def test_help_says_how_a_conversation_is_drawn(cli: Any) -> None:
    page = " ".join(cli("chat", "--help").stdout.split())
    for flag, default in {
        "--temperature": "the model's own, else 0.7 for a chat model, else 1.0",
        "--top-p": "the model's own, else 0.9 for a chat model, else 1.0",
        "--top-k": "the model's own, else 0",
        "--generation-config": "auto",
    }.items():
        assert f"[default: {default}]" in page.partition(f" {flag} ")[2].partition(" --")[0]


def test_a_model_with_sampling_values_of_its_own(talker: Path, tmp_path: Path) -> None:
    def fields(**values: Any) -> dict[str, Any]:
        (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
        return usual_fields()

    def usual_fields(**options: Any) -> Mapping[str, Any]:
        return Opened.of(EngineConfig(target=str(folder), **options)).usual_fields

    folder = shutil.copytree(talker, tmp_path / "model")
    assert fields(eos_token_id=0) == {"temperature": 0.7, "top_p": 0.9}
    assert fields(repetition_penalty=1.1) == {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
    assert fields(temperature=0.6, top_k=20) == {"temperature": 0.6, "top_k": 20}
    assert fields(do_sample=False) == {"temperature": 0.0}
    assert usual_fields(generation_config="none") == {}
    assert fields(temperature=0.6, typical_p=0.9) == {"temperature": 0.6}  # what is not done is logged
    assert "typical_p=0.9" in refusal(UnsupportedModel, usual_fields, generation_config="model")
    llm = LLM(folder, draft="none")
    assert llm.default_params == SamplingParams(temperature=0.6)
    assert llm.params(max_tokens=3, top_p=0.5) == SamplingParams(temperature=0.6, top_p=0.5, max_tokens=3)


def test_a_text_is_a_message_everywhere(cli: Any, talker: Path) -> None:
    """LLM.generate, stream and `forerun generate` mean the same by a text; raw continues it."""
    llm = LLM(talker, draft="none")
    answer, continued = (llm.generate("hello", SHORT, raw=raw)[0].text for raw in (False, True))
    assert answer == llm.chat(HELLO, SHORT)[0].text
    assert answer == "".join(chunk.text for chunk in llm.stream("hello", SHORT))
    assert continued == llm.generate(llm.tokenizer.encode("hello"), SHORT)[0].text != answer
    base = ("generate", "--target", str(talker), *SHORT_FLAGS, "hello")
    for more, text in ((), answer), (("--raw",), continued):
        done = cli(*base, *more)
        assert done.stdout == f"{text}\n"
        assert done.stderr.startswith("[talker, ")  # nothing but the closing line
    assert "temperature 0.7, top-p 0.9" in cli(*base[:5], "--max-tokens", "2", "hello").stderr


def test_through_pipes_standard_output_is_the_answers_alone(cli: Any, talker: Path) -> None:
    done = cli("chat", str(talker), *SHORT_FLAGS, stdin="hello\nand more\n", code=0)
    llm = LLM(talker, draft="none")
    first = llm.chat(HELLO, SHORT)[0].text
    history = [*HELLO, {"role": "assistant", "content": first}]
    second = llm.chat([*history, {"role": "user", "content": "and more"}], SHORT)
    ended = [text if text.endswith("\n") else text + "\n" for text in (first, second[0].text)]
    assert done.stdout == "".join(ended)
    assert len(re.findall(NUMBERS, done.stderr)) == 2


def test_the_whole_conversation_is_the_next_prompt(talker: Path) -> None:
    llm = LLM(talker, draft="lookup")
    prompts: list[list[int]] = []
    make = llm.engine.make
    llm.engine.make = lambda ids, params: (prompts.append(list(ids)), make(ids, params))[1]  # type: ignore[method-assign]
    chat = Chat(llm, GREEDY, system="be brief")
    chat.answer("one", io.StringIO())
    line = chat.answer("two", out := io.StringIO())
    answers = [m["content"] for m in chat.messages if m["role"] == "assistant"]
    assert llm.tokenizer.decode(prompts[1]) == (f"<system>be brief<user>one<assistant>{answers[0]}<user>two<assistant>")
    assert out.getvalue().rstrip("\n") == answers[1].rstrip("\n")
    assert re.fullmatch(NUMBERS, line)
    assert line.endswith(", cut at --max-tokens]")
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "be brief"}]


def test_the_numbers_are_those_of_the_report(talker: Path) -> None:
    llm = LLM(talker, draft="lookup")
    steps = heard(llm)
    line = Chat(llm, GREEDY, verbose=True).answer("a a a a a a", io.StringIO())
    names = ("num_drafted", "num_tested", "num_accepted")
    drafted, tested, accepted = (sum(getattr(step, name) for step in steps) for name in names)
    assert line.startswith("[12 tokens, ")
    assert tested > 0
    assert f"acceptance rate {accepted / drafted:.0%}" in line
    assert f"alpha-hat {accepted / tested:.2f}" in line
    assert "alpha-hat" not in Chat(llm, GREEDY).answer("a a a a a a", io.StringIO())


def test_a_message_that_cannot_be_honoured_is_forgotten(cli: Any, talker: Path) -> None:
    """The conversation goes on behind a message that does not fit."""
    long = "x" * 100 + "\n"
    words = long + long + "hello\n" + long + "//help\n"  # three that are refused, but not in a row
    done = cli("chat", str(talker), *SHORT_FLAGS, "--max-seq-len", "100", stdin=words, code=0)
    assert "error: the prompt has 1" in done.stderr
    assert len(re.findall(NUMBERS, done.stderr)) == 2  # //help is a message that begins with a slash
    assert "Traceback" not in done.stderr


def test_a_command_that_takes_no_text_does_nothing_with_one(cli: Any, talker: Path) -> None:
    """But what leaves does so whatever follows."""
    words = "hello\n/reset all\n/retry it\n/help me\n/retry\n/exit now\nhello\n"
    done = cli("chat", str(talker), *SHORT_FLAGS, stdin=words, code=0)
    for name in ("/reset", "/retry", "/help"):
        assert f"{name} takes no text: type it alone\n" in done.stderr
    assert len(re.findall(NUMBERS, done.stderr)) == 2  # of the first message and of /retry
    assert "there is no command" not in done.stderr


def test_a_long_text_in_a_pipe_is_not_refused_line_by_line(cli: Any, talker: Path) -> None:
    done = cli("chat", str(talker), *SHORT_FLAGS, "--max-seq-len", "100", stdin=("x" * 100 + "\n") * 20, code=2)
    assert said(done.stderr).count("error: the prompt has 1") == 3


def test_a_checkpoint_without_a_template_is_refused_before_the_user_types(refused: Any) -> None:
    sentence = refused("chat", "llama", stdin="hello\n")
    assert "chat template" in sentence
    assert "--chat-template" in sentence


def test_a_template_may_be_named(cli: Any, talker: Path) -> None:
    template = ("--chat-template", str(talker / "chat_template.jinja"))
    done = cli("chat", "llama", *SHORT_FLAGS, *template, stdin="hello\n", code=0)
    assert len(re.findall(NUMBERS, done.stderr)) == 1


def test_the_shipped_model_talks_by_its_name(cli: Any) -> None:
    done = cli("chat", "shipped", "--temperature", "0", "--max-tokens", "16", stdin="def fib(n):\n", code=0)
    assert done.stdout.strip()
    assert "acceptance rate" in done.stderr  # of its own draft model


def test_conversations_in_a_file_of_requests(ok: Any, refused: Any, talker: Path, written: Any) -> None:
    file = written('{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}\n', "requests.jsonl")
    arguments = ("--target", str(talker), "--draft", "none", "--temperature", "0", "--seed", "1", "--json")
    by_file = ok("generate", *arguments, "--prompt-file", file)
    assert by_file == ok("generate", *arguments, "--raw", "--max-tokens", "9", "<user>hello<assistant>")
    sentence = refused("generate", *arguments, "--prompt-file", written('{"messages": "hello"}\n', "requests.jsonl"))
    assert "line 1: messages='hello' is not possible: it must be a list like" in sentence


LONG = "word " * 3000  # its prefill takes many steps


def wait_until_heard(llm: LLM) -> None:
    """In a step: wait until the thread that reads the answer has asked for its end, which it may be late to do."""
    ends = time.monotonic() + 60
    while llm._loop._commands.empty() and time.monotonic() < ends:
        time.sleep(0.001)


def test_an_answer_stopped_before_its_first_token_is_forgotten(talker: Path) -> None:
    """The next turn of a template that refuses empty messages would fail for ever."""
    chat = Chat(LLM(talker, draft="none", prefill_chunk_tokens=16), GREEDY)
    steps = list[StepReport]()

    def press(report: StepReport) -> None:
        steps.append(report)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        elif len(steps) > 3:
            wait_until_heard(chat.llm)

    end = chat.llm.listen(press)
    out = io.StringIO()
    assert chat.answer(LONG[:600], out, keys=True) == "nothing was answered, so this message is forgotten"
    end()
    assert (chat.messages, out.getvalue()) == ([], "")
    assert not chat.llm._loop.call(lambda: chat.llm.engine.scheduler.running)
    assert re.fullmatch(NUMBERS, chat.answer("hello", io.StringIO(), keys=True))


def test_impatient_keys_end_the_answer_alone(talker: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Twice within one step; and before anything runs, while the conversation is still being encoded."""
    chat = Chat(LLM(talker, draft="none"), SamplingParams(temperature=0, max_tokens=200))
    pressed = list[int]()

    def press_twice(report: StepReport) -> None:
        if not pressed:  # in the first step; one that ends behind the answer would interrupt the test itself
            pressed.append(2)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        else:
            wait_until_heard(chat.llm)

    end = chat.llm.listen(press_twice)
    assert chat.answer("hello", io.StringIO(), keys=True).endswith(("stopped]", "forgotten"))
    end()
    chat.llm._loop.call(lambda: None)  # the step in which the keys were pressed is over
    encode, steps = chat.llm.apply_chat_template, heard(chat.llm)

    def press_and_encode(messages: Any) -> list[int]:
        signal.raise_signal(signal.SIGINT)
        return encode(messages)

    chat.llm.apply_chat_template = press_and_encode  # type: ignore[method-assign]
    assert chat.answer("hello", io.StringIO(), keys=True).endswith(("stopped]", "forgotten"))
    assert steps == []
    assert not chat.llm._loop.call(lambda: chat.llm.engine.scheduler.running)
    assert "Traceback" not in capfd.readouterr().err


def test_with_standard_output_in_a_file_the_prompt_is_on_the_terminal(talker: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    command = f"{sys.executable} -m forerun chat {talker} --draft none --temperature 0 --max-tokens 9 > {out}"
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    child = pexpect.spawn("bash", ["-c", command], encoding="utf-8", timeout=90, env=environment)
    child.expect_exact(READY)
    child.sendline("hello")
    child.expect(NUMBERS)
    leave(child)
    (answer,) = LLM(talker, draft="none").chat(HELLO, SHORT)
    assert out.read_text(encoding="utf-8").rstrip("\n") == answer.text.rstrip("\n")


def test_a_pipe_that_is_no_text_or_no_input_at_all(refused: Any, talker: Path) -> None:
    assert refused("chat", str(talker), stdin=b"caf\xe9\n") == "a message is not UTF-8 text: convert the input first"
    command = f"{sys.executable} -m forerun chat {talker} <&-"
    closed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=90, check=False)
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, "", "")


def test_a_cache_that_is_full_does_not_end_the_conversation(cli: Any, talker: Path) -> None:
    done = cli("chat", str(talker), *SHORT_FLAGS, "--kv-cache-tokens", "64", stdin="hi\n" + "x" * 80 + "\nyo\n", code=0)
    assert done.stderr.count("error: ") == 1
    assert len(re.findall(NUMBERS, done.stderr)) == 2


def test_ctrl_c_ends_a_chat_through_pipes(talker: Path) -> None:
    command = [sys.executable, "-m", "forerun", "chat", str(talker), "--temperature", "0", "--draft", "none"]
    pipe = subprocess.PIPE
    with processes.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8") as run:
        run.stdin.write("hello\nhello\n")
        run.stdin.flush()
        assert run.stdout.read(1)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130
        run.stdin.close()


def test_a_suggested_limit_is_a_limit_whatever_its_value(cli: Any, talker: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(talker, tmp_path / "model")
    for limit in (127, 128):
        (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "max_new_tokens": limit}))
        done = cli("chat", str(folder), "--draft", "none", "--no-stop-loops", stdin="hello\n")
        assert f"[{limit} tokens, " in done.stderr


# --------------------------------------------------------------------------------------------- what is kept by itself


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of conversations, in a cache of its own."""
    monkeypatch.setenv("FORERUN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "chats"


def test_a_conversation_is_kept_behind_every_answer(talker: Path, chats: Path) -> None:
    llm = LLM(talker, draft="none")
    chat = Chat(llm, GREEDY, kept=Conversations(chats))
    assert "no conversation was kept yet" in refusal(BadOption, chat.load, "")
    assert not chats.exists(), "nothing was answered yet"
    chat.answer("one", io.StringIO())
    (file,) = chats.iterdir()
    assert (file.stat().st_mode & 0o777, chats.stat().st_mode & 0o777) == (0o600, 0o700)
    chat.answer("two", io.StringIO())
    assert json.loads(file.read_text(encoding="utf-8"))["messages"] == chat.messages
    assert [*chats.iterdir()] == [file]

    again = Chat(llm, GREEDY, kept=Conversations(chats))
    assert again.load("").startswith("2 questions ")
    assert again.messages == chat.messages
    again.answer("three", io.StringIO())
    assert [*chats.iterdir()] == [file], "it goes on in the same file"
    again.reset()
    again.answer("four", io.StringIO())
    assert len([*chats.iterdir()]) == 2, "what is forgotten here stays as it was"
    assert json.loads(file.read_text(encoding="utf-8"))["messages"][-2]["content"] == "three"
    again.load(str(file))
    again.answer("five", io.StringIO())
    assert json.loads(file.read_text(encoding="utf-8"))["messages"][-2]["content"] == "three"
    assert len([*chats.iterdir()]) == 3, "one that was named goes on elsewhere, and its file stays as it is"


def test_the_oldest_conversations_go_and_a_chat_goes_on_where_nothing_can_be_written(
    chats: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conversations, "MOST_KEPT", 3)
    kept = Conversations(chats)
    for number in range(5):
        kept.begin()
        kept.write([{"role": "user", "content": str(number)}])
        assert kept.file is not None
        os.utime(kept.file, (number, number))
    texts = {json.loads(file.read_text(encoding="utf-8"))["messages"][0]["content"] for file in chats.iterdir()}
    assert texts == {"2", "3", "4"}
    assert kept.last() == kept.file
    chats.rename(chats.with_name("away"))
    chats.write_text("a file")
    for _ in range(2):
        kept.write([{"role": "user", "content": "6"}])
    assert capsys.readouterr().err.count("the conversation is not kept") == 1


def test_a_chat_goes_on_behind_the_end_of_its_process(talker: Path, chats: Path, tmp_path: Path) -> None:
    """In a terminal; what was read is found on disk, and without kv_disk nothing is written."""
    disk = ("--kv-disk", f"1GB:{tmp_path / 'kv'}")
    common = ("--draft", "none", "--temperature", "0", "--max-tokens", "40")
    command = [sys.executable, "-m", "forerun", "chat", str(talker), *common]
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}

    def held(*more: str, message: str) -> str:
        child = processes.spawn([*command, *more], env=environment, encoding="utf-8", timeout=90, dimensions=(50, 120))
        ask(child, message)
        child.expect(r"\[\d+ tokens")
        leave(child)
        child.close()
        return str(child.before).replace("\r\n", "\n")

    assert "is kept" not in held(message="a question that nobody else is to read")
    assert not chats.exists()
    said = held(*disk, message="a question that is asked here for the first time")
    assert " ".join(said.split()).endswith(KEPT)
    (file,) = chats.iterdir()
    asked = [*command, *disk, "--continue", "--system", "be brief"]
    again = subprocess.run(asked, input="and a second one\n", capture_output=True, text=True, timeout=90)
    assert again.returncode == 0, again.stderr
    assert "1 question and what was answered are back" in again.stderr
    assert again.stderr.rstrip().endswith(KEPT)
    messages = json.loads(file.read_text(encoding="utf-8"))["messages"]
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(("more", "why"), [((), "needs --kv-disk"), (("--kv-disk", "1GB"), "no conversation was kept")])
def test_there_is_nothing_to_continue(refused: Any, talker: Path, chats: Path, more: tuple[str, ...], why: str) -> None:
    assert why in refused("chat", str(talker), "--continue", *more, FORERUN_CACHE_DIR=str(chats.parent))
