"""Answers an option that a command lacks: names the command that has the option, or the option's name in forerun."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from forerun.cli.help import ENGINE
from forerun.registry import Place, answer, normal


def on_command_line(words: Seq[str], option: str, context: Any) -> str | None:
    """Return the answer to an option that a command lacks.

    None where neither another command of forerun nor another engine (data/peers.json) has the option. words: the
    command line. option: the word that the parser refused. context: click's context of the command, whose root has all
    commands.
    """
    root = context.find_root()
    command = context.command_path
    typed = _whole_word(words, option)
    parsers = dict(_commands(root.command, root.command_path))
    elsewhere = _of_another_command(typed, command, parsers)
    if elsewhere is not None and elsewhere.runs_engine:
        return elsewhere.text
    commands = {path: _names(parser) for path, parser in parsers.items()}

    def find(entry: str) -> Place:
        ours, _, value = entry.partition("=")
        for path in (command, *commands):
            flag = commands.get(path, {}).get(ours)
            if flag is not None:
                text = f"{flag} {value}".rstrip() if flag.startswith("-") else f"the argument {value or flag}"
                return Place(text, "" if path == command else path)
        return Place(entry, "the --config file")

    return answer(typed, find) or (None if elsewhere is None else elsewhere.text)


# A command of Ollama -> what does the same here.
OLLAMA = {
    "run": "forerun chat MODEL is a conversation, and forerun generate answers one text",
    "pull": "a model of the hub is fetched when it is first used, as by forerun chat org/name",
    "download": "a model of the hub is fetched when it is first used, as by forerun chat org/name",
    "list": "forerun models lists the models that have a name, and what is here of them",
    "ls": "forerun models lists the models that have a name, and what is here of them",
    "show": "forerun plan --target MODEL says what a model takes, and forerun doctor what this machine has",
    "ps": "a model runs as long as its command does",
    "stop": "a model runs as long as its command does",
    "rm": "models of the hub are removed by hf cache delete, packages by pip uninstall",
    "create": "a model is its folder or file, and its options are flags or a file behind --config",
}


def of_ollama(words: Seq[str]) -> str | None:
    """Return the answer to a command that Ollama has and forerun lacks; None for any other command.

    words: the command line. Its first word that is no flag names the command.
    """
    name = next((word for word in words if not word.startswith("-")), "")
    return f"there is no command {name} here: {OLLAMA[name]}" if name in OLLAMA else None


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a command and all commands below it, each with its path.

    command: click's object of the command. path: the words with which a user types it, such as "forerun bench".
    """
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{path} {name}")


def _names(command: Any) -> Mapping[str, str]:
    """Map the name of each parameter of a command to its form in help: a flag, or an argument's name in capitals."""
    names = {}
    for param in command.params:
        if param.param_type_name == "option":
            names[param.name] = param.opts[0]
        else:
            names[param.name.removesuffix("s")] = param.name.upper()
    return names


@dataclass(frozen=True)
class _Elsewhere:
    """The answer to a flag of another command. runs_engine: whether the other command has options of the engine."""

    text: str
    runs_engine: bool


def _of_another_command(flag: str, command: str, parsers: Mapping[str, Any]) -> _Elsewhere | None:
    """Return the answer to a flag that `command` lacks and another command has. None where no other command has it.

    The answer names the first subcommand of `command` that has the flag, or else the first other command that has it.
    command: the path of the typed command. parsers: click's object of each command, by path.
    """
    homes = {
        path: param
        for path, parser in parsers.items()
        for param in parser.params
        if param.param_type_name == "option" and normal(flag) in map(normal, param.opts)
    }
    if not homes or command in homes:
        return None
    home = next((path for path in homes if path.startswith(f"{command} ")), next(iter(homes)))
    text = f"{flag} is an option of {home}, "
    arguments = [p.name for p in parsers[command].params if p.param_type_name == "argument"]
    if homes[home].name in arguments:
        text += f"and the argument {homes[home].name.upper()} of {command}: write it without {flag}"
    elif home.startswith(f"{command} "):
        text += f"not of {command}: write it behind {home.rpartition(' ')[2]}"
    else:
        text += f"not of {command}: {_way_out(homes[home], parsers[command], home)}"
    return _Elsewhere(text, any(_is_of_engine(param) for param in parsers[home].params))


def _way_out(param: Any, parser: Any, home: str) -> str:
    """Return what a user can do about an option that is a flag of the command `home`, but not of the typed command.

    A measurement is written to a file by --json, where other commands have --out. An option of the engine can be set by
    a FORERUN_* variable or in the config file, if the typed command runs an engine. Any other option must be left out,
    or used with `home`. param: click's object of the option. parser: click's object of the typed command. home: the
    path of the command that has the option.
    """
    if param.name == "out" and any("--json" in p.opts and not p.is_flag for p in parser.params):
        return "use --json FILE, which writes what was measured"
    if not _is_of_engine(param) or not any(map(_is_of_engine, parser.params)):
        return f"leave it out or use {home}"
    has_file = any(p.name == "config" for p in parser.params)
    return f"set FORERUN_{param.name.upper()}" + (" or use --config" if has_file else "")


def _is_of_engine(param: Any) -> bool:
    return (getattr(param, "rich_help_panel", None) or "").startswith(ENGINE)


def _whole_word(words: Seq[str], option: str) -> str:
    """Return the option as it was typed, without a value after `=`.

    For `-md` the parser refuses only `-m`. For `-hf` it refuses `-f`, because `-h` is a flag.
    """
    for word in words:
        typed = word.partition("=")[0]
        if typed == option or (option[1:2] != "-" and typed[:2] in (option, "-h") and option[1:] in typed[1:3]):
            return typed
    return option
