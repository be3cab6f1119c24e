"""Command-line flags that several commands share, made from the dataclasses that hold the defaults.

A flag that is not given is None. The option's value then comes from the FORERUN_* variable, or else from the config
file, or else it is the default. This module does not import numpy.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.help import ENGINE
from forerun.cli.signatures import Fields
from forerun.config import EngineConfig
from forerun.errors import BadOption, shown
from forerun.models.named import DRAWING, USUAL
from forerun.registry import by_name, unknown
from forerun.types import SamplingParams

TargetArgument = Annotated[
    str | None, typer.Argument(help=EngineConfig.__dataclass_fields__["target"].metadata["help"], show_default=False)
]
TargetsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help=EngineConfig.__dataclass_fields__["target"].metadata["help"] + "; several are served together",
        show_default=False,
    ),
]
UseSpeculativeDecoding = Annotated[
    bool | None,
    typer.Option(
        "--speculative-decoding/--no-speculative-decoding",
        help="off: the same as --draft none; on: refused where no draft is named [default: as --draft says]",
        show_default=False,
        rich_help_panel=f"{ENGINE}Speculation",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="file with engine options, TOML, or JSON where it ends in .json.",
        show_default=False,
        rich_help_panel=f"{ENGINE}Model",
    ),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", help="more numbers behind each output: alpha-hat and others", rich_help_panel="Output"),
]
# The engine's options of most commands that measure.
MODEL = (*(one.name for one in dataclasses.fields(EngineConfig) if one.metadata.get("measured")), "config")

_APART: dict[str, Any] = {"use_speculative_decoding": UseSpeculativeDecoding, "config": ConfigFile}


@dataclass(frozen=True)
class _EngineFields(Fields):
    """The flags of EngineConfig's fields, and two more flags: the config file, and whether to draft at all."""

    cls: type[Any] = EngineConfig
    panel: str | None = "Memory and batches"
    before: str = ENGINE

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield each flag's name, and the parameter for it in a command's signature."""
        names = [name for name in self.names if name not in _APART]
        if names or not self.names:
            yield from Fields(EngineConfig, names, self.leave_out, panel=self.panel, before=self.before).parameters()
        for name, annotation in _APART.items():
            if name in self.names or not self.names:
                yield name, Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def engine(*names: str, leave_out: Collection[str] = ()) -> Fields:
    """Return the flags of these engine options, in this order. Without names, return all flags but `leave_out`."""
    return _EngineFields(names=names, leave_out=leave_out)


def everyday(*more: str) -> Fields:
    """Return the flags of the everyday options, of `more` and of the config file, in the order of EngineConfig.

    These flags are for commands with which one person uses one model. The model is an argument of such a command.
    """
    fields = EngineConfig.__dataclass_fields__.values()
    return engine(*(field.name for field in fields if field.metadata.get("everyday") or field.name in more), "config")


def sampling(*names: str) -> Fields:
    """Return the flags of these sampling parameters, in this order. Without names, return the flags of all parameters.

    A parameter with the name of an engine option, such as draft, gets no flag, because the engine option has that flag
    already. A prompt file can set such a parameter for each request.
    """
    fields = SamplingParams.__dataclass_fields__
    usual = {name: f"the model's own, else {fields[name].default}" for name in DRAWING}
    usual |= {
        name: f"the model's own, else {USUAL[name]} for a chat model, else {fields[name].default}" for name in USUAL
    }
    return Fields(SamplingParams, names, _ENGINE, usual, "Sampling")


Prompt = str | list[int] | list[dict[str, Any]]  # a text, ids, or a conversation
Request = tuple[Prompt, SamplingParams]  # a prompt, and how it is continued

_ENGINE = frozenset({*EngineConfig.__dataclass_fields__, "use_speculative_decoding"})
_SAMPLING = frozenset(SamplingParams.__dataclass_fields__)


def sampling_params(flags: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> SamplingParams:
    """Return a command's sampling parameters: the given flags win over `fields`, and `fields` over the defaults.

    flags: the values of the command's flags, None = not given. fields: the parameters that the checkpoint sets.
    """
    read: dict[str, Callable[[Any], Any]] = {
        "logit_bias": _biases,
        "early_stopping": _yes_or_no,
        "prediction": _text_or_file,
        "json_schema": lambda value: _file_or_text("json_schema", value, "{"),
        "grammar": lambda value: _file_or_text("grammar", value, ""),
    }
    given = {k: v for k, v in flags.items() if k in _SAMPLING - _ENGINE and v is not None}
    given |= {name: read[name](given[name]) for name in read.keys() & given.keys()}
    return SamplingParams(**{**(fields or {}), **given})


def _yes_or_no(value: str) -> bool | str:
    """Return the boolean for true or false. Return any other text unchanged; SamplingParams then checks the text."""
    return {"true": True, "false": False}.get(value.lower(), value)


def read_file(file: Path, what: str) -> str:
    """Read a text file. Raises the errors of `read_text_file`. what: the word for the file in errors."""
    from forerun.text.files import read_text_file

    return read_text_file(file, what)


def _text_or_file(value: str) -> str:
    """Return the contents of FILE for @FILE, and any other value as it is. A leading @@ stands for a literal @."""
    if value.startswith("@@") or not value.startswith("@"):
        return value.removeprefix("@")
    return read_file(Path(value[1:]), "file of --prediction")


def _file_or_text(name: str, value: str, begins: str) -> str:
    """Return a text: the value of an option itself, or the contents of the file that the value names.

    The value is a text if it has several lines, is true or false, or begins with `begins`. Where `begins` is empty, a
    value that contains a colon, as grammar rules do, is a text, too, unless a file has that name. Any other value names
    a file.
    """
    flag = "--" + name.replace("_", "-")
    is_text = "\n" in value or value.strip() in ("true", "false")
    is_text |= value.lstrip().startswith(begins) if begins else ":" in value and not Path(value).exists()
    return value if is_text else read_file(Path(value), f"file of {flag}")


def requests(text: str, defaults: SamplingParams, ignored: Collection[str] = ()) -> list[Request]:
    """Read one request per line of a JSON Lines text: a prompt or messages, and any fields of SamplingParams.

    "prompt" is a text or a list of token ids. A field that a line does not have is taken from `defaults`. ignored: the
    names of fields to skip. Raises BadOption with the number of the line.
    """
    read = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may contain other line separators
        if line.strip():
            try:
                read.append(_request(json.loads(line), defaults, ignored))
            except BadOption as error:
                raise BadOption(f"line {number}: {error}") from None
            except (ValueError, RecursionError) as error:
                raise BadOption(f"line {number} is not valid JSON: {error}") from None
    return read


def _request(line: Any, defaults: SamplingParams, ignored: Collection[str]) -> Request:
    if not isinstance(line, dict) or not line.keys() & {"prompt", "messages"}:
        raise BadOption('there is no prompt: write {"prompt": "a text or a list of ids"}, or "messages" with a list')
    if line.keys() >= {"prompt", "messages"}:
        raise BadOption("there is a prompt and there are messages: drop one of them")
    fields = {k: v for k, v in line.items() if k not in ("prompt", "messages", *ignored)}
    for name in fields:
        if name not in _SAMPLING:
            known = ["prompt", "messages", *_SAMPLING]
            raise BadOption(by_name(name, known, "LLM") or unknown("field", name, known))
    bias = fields.get("logit_bias")
    if isinstance(bias, dict):  # keys in JSON are strings
        fields["logit_bias"] = {_token_id(token, bias): value for token, value in bias.items()}
    return _conversation(line) if "messages" in line else _text_or_ids(line), dataclasses.replace(defaults, **fields)


def _text_or_ids(line: dict[str, Any]) -> Prompt:
    prompt: Prompt = line["prompt"]
    ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (ids or isinstance(prompt, str)):
        raise BadOption(f"prompt={shown(prompt)} is not possible: it must be a text or a list of ids, not empty")
    return prompt


def _conversation(line: dict[str, Any]) -> Prompt:
    messages: Prompt = line["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise BadOption(
            f'messages={shown(messages)} is not possible: it must be a list like [{{"role": "user", "content": "..."}}]'
        )
    return messages


def _biases(pairs: Iterable[str]) -> dict[int, float]:
    """Read biases from texts of the form ID=VALUE. Raises BadOption for any other text."""
    biases = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        number = _token_id(token, pair)
        try:
            biases[number] = float(value)
        except ValueError:
            raise BadOption(f"logit_bias={shown(pair)} is not possible: write ID=VALUE, for example 5=-1.5") from None
    return biases


def _token_id(text: str, given: object) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadOption(f"logit_bias={shown(given)} is not possible: {shown(text)} is no token id") from None


def engine_config(flags: Mapping[str, Any], **usual: Any) -> EngineConfig:
    """Return the engine's options. A command's flags win over FORERUN_* variables, and these over the config file.

    An option that is set nowhere has its default. usual: defaults of this command, in place of the usual defaults.
    """
    if flags.get("draft") == "none" and flags.get("spec_length") is not None:
        raise BadOption(f"--spec-length {flags['spec_length']} says nothing with --draft none: drop one of them")
    return EngineConfig.from_sources(*_sources(flags), usual)


def engine_configs(flags: Mapping[str, Any], targets: Seq[str]) -> list[EngineConfig | tuple[str, EngineConfig]]:
    """Return the options of an engine for each target, or for each model of a config file; see EngineConfig.several."""
    return EngineConfig.several(targets, *_sources(flags))


def _sources(flags: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    config_file = flags.get("config")
    return {k: v for k, v in flags.items() if k in _ENGINE}, str(config_file) if config_file else None
