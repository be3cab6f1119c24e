"""The command line: parses arguments and calls other packages.

numpy, tokenizers and other slow packages are imported when a command runs, never to print help.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeGuard, cast

import typer

from forerun.bench.plans import SHAPE_NAMES
from forerun.cli import flags
from forerun.cli.batch import batch
from forerun.cli.bench import app as bench_app
from forerun.cli.cache import app as cache_app
from forerun.cli.certify import certify
from forerun.cli.convert_head import convert_head
from forerun.cli.doctor import doctor
from forerun.cli.elsewhere import of_ollama, on_command_line
from forerun.cli.help import App
from forerun.cli.inputs import read_requests, refuse_a_message, refuse_a_model
from forerun.cli.lab import lab
from forerun.cli.methods import MethodName, list_methods
from forerun.cli.plan import plan
from forerun.cli.prefill import prefill
from forerun.cli.quantize import quantize
from forerun.cli.serve import serve
from forerun.cli.signatures import Given
from forerun.cli.theory import theory
from forerun.cli.train import app as train_app
from forerun.cli.tune import tune
from forerun.errors import FULL, BadOption, ForerunError, UserError, not_installed
from forerun.registry import flag_of
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from forerun.engine.llm import LLM
    from forerun.engine.opened import Opened
    from forerun.engine.request import Chunk, RequestOutput
    from forerun.text.waiting import Waiting

ABORTED, BROKEN_PIPE = 130, 141  # what a shell reports for a process that SIGINT or SIGPIPE ended
# The base of click's usage errors. typer ships its own copy of click now and imported the package before.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[2]
PROMPT_FILE_HELP = (
    "file with one prompt; or, where its name ends in .jsonl, one JSON object per line: "
    '{"prompt": a text or ids, "temperature": 0.5, ...}, where flags are the defaults; "messages", a conversation for '
    "the chat template, may stand instead of prompt"
)
CHAT_HELP = (
    "a text is a message to be answered, or the beginning of a text to be continued [default: --chat if the model has "
    "a chat template]"
)
ROUNDS_HELP = "before the text, print one line per pass of the target: what was drafted, and what became of it"
PAIR_HELP = (
    "with two models that people use, Qwen2.5-Coder-Instruct of 1.5 B and 0.5 B (1.6 GB), on work of four kinds: files "
    "of the folder that FORERUN_PAIR names, else of the hub; or of those that --target and --draft name"
)
REPORT_FIELDS = (
    *("acceptance", "is_lossless", "tv_price", "num_steps", "num_drafted", "num_tested", "num_accepted", "num_emitted"),
    *("acceptance_rate", "mean_accepted_length", "alpha_hat", "acceptance_per_position", "origins"),
)

Encoded = tuple[str | list[int], SamplingParams]  # what LLM.generate takes: a prompt and its parameters

app = App("Speculative decoding that never changes what the model says.", moved={"paper": "paper"})
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
app.add_typer(cache_app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        from forerun.version import __version__

        typer.echo(f"forerun {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Speculative decoding that never changes what the model says."""


@app.command(hidden=True)
def version() -> None:
    """Show the version, as --version does."""
    _version(wanted=True)


@app.command("help", hidden=True)
def show_help(
    context: typer.Context, words: Annotated[list[str] | None, typer.Argument(metavar="COMMAND")] = None
) -> None:
    """Show the help of a command, as --help after the command does."""
    app([*(words or []), "--help"], prog_name=context.find_root().info_name, standalone_mode=False)


# -------------------------------------------------------------------------------------------------------- generate


@app.command()
def generate(
    engine: Annotated[Given, flags.engine()],
    sampling: Annotated[Given, flags.sampling()],
    prompts: Annotated[list[str] | None, typer.Argument(help="texts to continue; - = standard input")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help=PROMPT_FILE_HELP, show_default=False)] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help=CHAT_HELP, show_default=False, rich_help_panel="Model")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object per prompt", rich_help_panel="Output")
    ] = False,
    rounds: Annotated[bool, typer.Option("--rounds", help=ROUNDS_HELP, rich_help_panel="Output")] = False,
    verbose: flags.Verbose = False,
) -> None:
    """Answer or continue a text. What the model writes goes to standard output, the numbers to standard error."""
    if as_json and rounds:
        raise BadOption("--json and --rounds exclude each other: choose one")
    flags.sampling_params(sampling, {"max_tokens": None})  # refuse wrong values before anything is read
    if engine["target"] is None and prompts:
        refuse_a_model(prompts)
    with _without_collections():
        config = flags.engine_config(engine)
        from forerun.cli import waiting
        from forerun.text.terminal import note

        opened = waiting.opened(config)
        params = flags.sampling_params(sampling, opened.usual_fields)
        requests = read_requests(prompts or [], prompt_file, params)
        for name in ("logprobs", "prompt_logprobs"):
            if not as_json and any(getattr(params, name) is not None for _, params in requests):
                raise BadOption(f"{name} are printed with --json only: add it")
        if rounds and any(params.searches for _, params in requests):
            raise BadOption("--rounds shows how one text grows, and a beam search has several: drop one of them")
        requests = _with_messages(requests, opened, chat)
        continues = chat is None and any(isinstance(prompt, str) for prompt, _ in requests) and not opened.is_shipped
        if continues and sys.stderr.isatty() and not as_json:
            note(f"{opened.files.name} has no chat template: it continues the text and answers nothing")
        for text in prompts or []:
            if text.startswith("@") and Path(text[1:201]).is_file():
                note(f"{text[:201]} is sent as it is; --prompt-file reads a file")
        llm = _loaded(opened)
    encoded = [(_encoded(llm, prompt, number), params) for number, (prompt, params) in enumerate(requests, 1)]
    if as_json:
        _print_json(llm, encoded)
    elif rounds:
        _print_rounds(llm, requests, encoded, verbose)
    elif len(encoded) == 1 and encoded[0][1].n == 1 and not encoded[0][1].searches:
        _stream(llm, *encoded[0], verbose)
    else:
        _print_batch(llm, requests, encoded, verbose)
    if llm.config.draft != "none":
        llm.measure_passes()  # for the next process: this one has answered


@contextmanager
def _without_collections() -> Iterator[None]:
    """Turn garbage collection off while a model is opened.

    A collection would take 0.1 s and find no garbage, because all objects of imports and tokenizers stay in use.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _with_messages(requests: list[flags.Request], opened: Opened, chat: bool | None) -> list[flags.Request]:
    """Return the requests. Where the model answers texts (see CHAT_HELP), a text becomes the message of a user.

    Raises NotFound, before any weight is fetched, where a chat template is needed and there is none.
    """
    has_texts = any(isinstance(prompt, str) for prompt, _ in requests)
    if has_texts:
        opened.text_tokenizer()
    if chat or any(_is_conversation(prompt) for prompt, _ in requests):
        _ = opened.chat_template
    if not has_texts or chat is False or (chat is None and not opened.answers_texts):
        return requests
    try:
        _ = opened.chat_template
    except UserError as error:
        raise type(error)(f"{error}, or give --raw: the text is then continued as it is") from error
    return [
        ([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, params)
        for prompt, params in requests
    ]


def _is_conversation(prompt: flags.Prompt) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


def _encoded(llm: LLM, prompt: flags.Prompt, number: int) -> Any:
    """Turn a conversation into token ids by the checkpoint's chat template; texts and ids stay as they are.

    number: the number of the request, for the message of an error.
    """
    if not _is_conversation(prompt):
        return prompt
    try:
        return llm.apply_chat_template(prompt)
    except UserError as error:
        raise type(error)(f"request {number}: {error}") from error


def _loaded(opened: Opened) -> LLM:
    from forerun.cli.waiting import loading
    from forerun.engine.llm import LLM
    from forerun.memory.machine import spare_what_is_loaded

    with loading(opened):
        llm = LLM.from_opened(opened)
    spare_what_is_loaded()
    return llm


def _generate(llm: LLM, requests: Seq[Encoded]) -> list[RequestOutput]:
    with _answering(llm, [prompt for prompt, _ in requests]):
        return llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], raw=True)


def _answering(llm: LLM, prompts: Seq[str | list[int]]) -> Waiting:
    """Return a display that counts the prompt tokens that were read, and then the tokens that were written.

    Where all prompts are token ids, the display also shows how many prompt tokens there are.
    """
    from forerun.cli.waiting import Answering

    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    return Answering(llm, sum(map(len, ids)) if len(ids) == len(prompts) else None)


def _stream(llm: LLM, prompt: str | list[int], params: SamplingParams, verbose: bool) -> None:
    start = time.perf_counter()
    waiting = _answering(llm, [prompt])
    with waiting:
        for chunk in llm.stream(prompt, params, raw=True):
            waiting.end()
            text = _readable(llm, chunk)
            _write(text if chunk.output is None else f"{text}\n")
            if chunk.output is not None:
                _note_numbers(llm, chunk.output, params, time.perf_counter() - start, verbose)


def _readable(llm: LLM, output: Chunk | RequestOutput) -> str:
    """Return an output's text. For a model without a tokenizer, return the token ids, each with a space in front."""
    return output.text if llm.has_text else "".join(f" {token}" for token in output.token_ids)


def _write(text: str) -> None:
    """Write the model's text to standard output unchanged. In a terminal, make control characters visible."""
    from forerun.text.terminal import visible

    sys.stdout.write(visible(text, sys.stdout.isatty()))
    sys.stdout.flush()


def _note_numbers(
    llm: LLM, output: RequestOutput, params: SamplingParams, seconds: float | None, verbose: bool
) -> None:
    """Write an output's closing line to standard error. seconds: None where other requests ran at the same time."""
    from forerun.cli.words import closing_line, details, note

    note(closing_line(llm, output, params, seconds))
    if verbose:
        note(details(output.report))


def _print_batch(llm: LLM, requests: Seq[flags.Request], encoded: Seq[Encoded], verbose: bool) -> None:
    each = [(prompt, params) for prompt, params in requests for _ in range(params.n)]
    for i, (output, (prompt, params)) in enumerate(zip(_generate(llm, encoded), each, strict=True)):
        if len(each) > 1:
            _print_heading(llm, prompt, i + 1)
        _write(f"{_readable(llm, output)}\n")
        _note_numbers(llm, output, params, None, verbose)


def _print_heading(llm: LLM, prompt: flags.Prompt, number: int) -> None:
    """Print the number of an output and the end of its prompt. For a conversation, show the last user message's end."""
    from forerun.text.terminal import visible

    if _is_conversation(prompt):
        asked = [message.get("content") for message in prompt if message.get("role") == "user"]
        text = asked[-1] if asked and isinstance(asked[-1], str) else ""
    else:
        ids = cast(list[int], prompt)
        text = prompt if isinstance(prompt, str) else llm.tokenizer.decode(ids) if llm.has_text else str(ids)
    lines = text.strip().splitlines()
    typer.echo(f"==> {number}: {visible(lines[-1][-60:]) if lines else ''} <==")


def _print_rounds(llm: LLM, requests: Seq[flags.Request], encoded: Seq[Encoded], verbose: bool) -> None:
    from forerun.cli.show import RoundPrinter, watched
    from forerun.text.terminal import make_console

    console = make_console()
    for i, ((prompt, _), (tokens, params)) in enumerate(zip(requests, encoded, strict=True)):
        if len(requests) > 1:
            _print_heading(llm, prompt, i + 1)
        ids = llm.tokenizer.encode(tokens) if isinstance(tokens, str) else tokens
        printer = RoundPrinter(llm.engine.tokenizer, console, ids[-1] if ids else None)
        start = time.perf_counter()
        outputs = [chunk.output for chunk in watched(llm, ids, params, printer) if chunk.output is not None]
        seconds = time.perf_counter() - start
        for output in outputs:
            console.print()
            _write(f"{_readable(llm, output)}\n")
            _note_numbers(llm, output, params, seconds if len(outputs) == 1 else None, verbose)


def _print_json(llm: LLM, requests: Seq[Encoded]) -> None:
    for output in _generate(llm, requests):
        _write(json.dumps(_as_json(output), ensure_ascii=False) + "\n")


def _as_json(output: RequestOutput) -> dict[str, Any]:
    report = output.report
    numbers = {name: getattr(report, name) for name in REPORT_FIELDS}
    fields = {name: getattr(output, name) for name in ("text", "token_ids", "finish_reason", "seed", "index")}
    if output.logprobs is not None:
        fields["logprobs"] = [dataclasses.asdict(position) for position in output.logprobs]
    if output.prompt_logprobs is not None:
        places = output.prompt_logprobs
        fields["prompt_logprobs"] = [None if place is None else dataclasses.asdict(place) for place in places]
    if output.score is not None:
        fields |= {"score": output.score, "cumulative_logprob": output.cumulative_logprob}
        numbers["rows_per_pass"] = report.rows_per_pass
    return {**fields, "report": numbers}


# --------------------------------------------------------------------------------------------------------------- chat


CHAT_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "stop", "acceptance"),
)


@app.command()
def chat(
    engine: Annotated[Given, flags.everyday("pacing_log")],
    sampling: Annotated[Given, flags.sampling(*CHAT_SAMPLING)],
    target: flags.TargetArgument = None,
    system: Annotated[str | None, typer.Option(help="the system message, first in the conversation")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="tokens of an answer at most [default: no limit]", rich_help_panel="Sampling")
    ] = None,
    stop_loops: Annotated[bool, typer.Option(help="end an answer that repeats itself over and over")] = True,
    tools: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.py", help="its functions may be called by the model, which asks you before each call"
        ),
    ] = None,
    goes_on: Annotated[
        bool,
        typer.Option("--continue", help="the last conversation; with --kv-disk each is kept, and is not read again"),
    ] = False,
    verbose: flags.Verbose = False,
) -> None:
    """Talk to a model. Answers go to standard output; their speed and acceptance to standard error.

    From a pipe, each line is a message: `forerun generate --prompt-file` reads a text as a whole.
    """
    sampling["max_tokens"] = max_tokens
    flags.sampling_params(sampling, {"max_tokens": None})
    refuse_a_message(target)
    config = flags.engine_config({**engine, "target": target})
    from forerun.cli import chat as session, conversations, waiting
    from forerun.cli.tool_file import ToolFile

    if goes_on and config.kv_disk is None:
        raise BadOption("--continue needs --kv-disk: without it no conversation is kept")
    if goes_on and conversations.Conversations(conversations.default_folder()).last() is None:
        raise BadOption(session.NONE_KEPT)
    tool_file = None if tools is None else ToolFile(tools)  # before a model is loaded
    opened = waiting.opened(dataclasses.replace(config, max_batch_size=1))
    fields = opened.usual_fields
    is_limited = "max_tokens" in fields or max_tokens is not None
    params = session.unlimited(flags.sampling_params(sampling, fields), is_limited, opened)
    llm = session.load_models(opened)
    session.run(llm, params, system, verbose=verbose, stop_loops=stop_loops, tools=tool_file, goes_on=goes_on)


# --------------------------------------------------------------------------------------------- demo, models, drafters


@app.command()
def demo(
    engine: Annotated[Given, flags.engine("target", "ignore_config_keys", "draft", "spec_length", *flags.MODEL)],
    prompt: Annotated[
        str | None, typer.Argument(help="a text to answer or continue in place of ours", show_default=False)
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help=f"the target is widened to it in memory: {SHAPE_NAMES}, or none [default: demo for the shipped "
            "target, else none]",
            show_default=False,
        ),
    ] = None,
    pair: Annotated[bool, typer.Option("--pair", help=PAIR_HELP)] = False,
    temperature: Annotated[float, typer.Option(help="0 = greedy")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="tokens to generate at most", min=1)] = 128,
    seed: Annotated[int, typer.Option(help="the same seed, the same text")] = 1,
) -> None:
    """Let a model write texts without and with speculation, and show that speculation gives the same texts faster."""
    config = flags.engine_config(engine)
    params = flags.sampling_params({"temperature": temperature, "max_tokens": max_tokens, "seed": seed})
    from forerun.cli import demo as show_demo

    show_demo.run(config, params, shape, prompt, is_pair=pair)


@app.command()
def models() -> None:
    """List the named models, with size, licence and source, and whether they are on this machine."""
    from forerun.cli.show import model_lines
    from forerun.text.terminal import make_console

    console = make_console()
    for line in model_lines(console.width):
        typer.echo(line)
    console.print('\nA name goes wherever a model does: forerun chat smollm2, --target smollm2, LLM("smollm2").')


@app.command()
def drafters(name: MethodName = None) -> None:
    """List the drafters, or show one of them with its options."""
    how = "Choose one with --draft NAME or --draft NAME:option=value,option=value; a path means model:path=PATH."
    list_methods("forerun.drafters", "drafter", name, how)


@app.command()
def rules(name: MethodName = None) -> None:
    """List the verification rules, or show one of them with its options."""
    how = "Choose one for a request with --acceptance NAME or --acceptance NAME:option=value."
    list_methods("forerun.verify", "acceptance rule", name, how)


@app.command()
def pacings(name: MethodName = None) -> None:
    """List the pacing policies, or show one of them with its options."""
    how = "Choose one with --pacing NAME or --pacing NAME:option=value."
    list_methods("forerun.pacing", "pacing policy", name, how)


for _command in (batch, prefill, serve, lab, tune, plan, doctor, quantize, convert_head, theory, certify):
    app.command()(_command)


# --------------------------------------------------------------------------------------------------------------- main


def main(arguments: Seq[str] | None = None, commands: App = app, name: str = "forerun") -> None:
    """Run the command line and exit with a code.

    0 = success, 1 = a fault of forerun, 2 = a fault of the user, 3 = no capacity, 130 = Ctrl-C, 141 = the reader of the
    output has gone. commands, name: the commands and the name of the program, for another program that is to behave as
    `forerun` does.
    """
    _open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    code = 0
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments), commands, name)
        sys.stdout.flush()
    except BrokenPipeError:
        _write_no_more(sys.stdout)
        code = BROKEN_PIPE
    except OSError as error:
        _write_no_more(sys.stdout)
        code = code or _fail(f"the output cannot be written ({error.strerror or error}): {_way_out(error)}", 2)
    try:
        sys.stderr.flush()
    except OSError:
        _write_no_more(sys.stderr)
    sys.exit(code)


def _write_no_more(stream: TextIO) -> None:
    """Redirect an unwritable stream to the null device, because Python would report the error again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _way_out(error: OSError) -> str:
    return f"{'make room there, or name' if error.errno in FULL else 'name'} a file or folder that can be used"


def _open_what_is_closed() -> None:
    """Replace each standard stream that the caller has closed (as in `forerun models >&-`) by an empty stream.

    The streams are opened in the order of their file descriptors. So each empty stream gets the file descriptor of the
    closed stream, and no other file can get it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # until the process ends


def _run(arguments: list[str], commands: App = app, name: str = "forerun") -> int:
    try:
        code = commands(arguments, prog_name=name, standalone_mode=False)
    except ForerunError as error:
        return _fail(_as_typed(str(error), arguments), error.exit_code)
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return _fail(str(not_installed(" ".join((name, *arguments[:1])), "torch", error.name)), 2)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer's own answer to a reader that has gone
            raise error.__context__ from None
        raise
    except OSError as error:
        about = f"{str(error.filename)!r}: {error.strerror}" if error.filename else f"{error.strerror or error}"
        if not error.filename and error.errno in FULL:
            about = f"the output cannot be written ({error.strerror})"
        return _fail(f"{about}: {_way_out(error)}", 2)
    except (typer.Abort, KeyboardInterrupt):
        return ABORTED
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help text
            typer.echo(error.format_message(), err=True)
            return 2
        context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
        if context and option and not error.format_message().endswith("requires an argument."):
            there = on_command_line(arguments, option, context)
        else:
            there = of_ollama(arguments)
        command = context.command_path if context else name
        # typer has values checked by pydantic, whose words are for those who write Python.
        said = re.sub(r"Input should be (.*?)(, unable to .*)?$", r"it must be \1", error.format_message().rstrip("."))
        more = f" {command} --help lists all" if said.endswith("?") else f": see {command} --help"
        return _fail(there or said + more, 2)
    return code if isinstance(code, int) else 0


def _as_typed(message: str, arguments: Seq[str]) -> str:
    """Return an error message. Where it says `option=value` of a typed option, it now says `--option value`.

    Messages about a line of a file stay as they are, because the line gave the value.
    """
    from forerun.config import EngineConfig
    from forerun.params import SamplingParams

    typed_flags = {word.partition("=")[0] for word in takewhile(lambda word: word != "--", arguments)}
    fields = {**EngineConfig.__dataclass_fields__, **SamplingParams.__dataclass_fields__}

    def typed(match: re.Match[str]) -> str:
        name = match[1]
        flag = flag_of(fields[name]) if name in fields else f"--{name.replace('_', '-')}"
        return f"{flag} " if flag in typed_flags else match[0]

    is_of_line = re.match(r"(line|request) \d+: ", message)
    return message if is_of_line else re.sub(r"(?<![^\s(`])(\w+)=(?!True\b|False\b)(?=\S)", typed, message)


def _fail(message: str, code: int) -> int:
    from forerun.text.terminal import note

    with suppress(OSError):  # nobody can be told
        note(f"error: {' '.join(message.split())}")
    return code
