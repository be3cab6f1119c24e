"""Command-line flags that several commands share, made from the dataclasses that hold the defaults.

A flag that is not given is None: then the FORERUN_* variable counts, else the config file, else the default.
Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.help import ENGINE
from forerun.cli.signatures import Fields
from forerun.config import EngineConfig
from forerun.errors import BadOption, NotFound, shown
from forerun.models.named import DRAWING, USUAL
from forerun.registry import by_name, names, unknown
from forerun.types import SamplingParams

# The panels of help texts, by the options of the engine and of requests that stand in them.
_PANELS = {
    "Speculation": (
        "draft extra_drafts spec_length pacing pacing_log calibrate draft_catchup_tokens use_speculative_decoding "
        "acceptance prediction draft_beams"
    ),
    "Model": "target ignore_config_keys device dtype quantization generation_config chat_template ops config",
}
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names.split()}


def _engine_panel(name: str) -> str:
    return ENGINE + _PANEL_OF.get(name, "Memory and batches")


def _engine(name: str, methods: str | None = None, flag: str | None = None) -> Any:
    """The flag of one field of EngineConfig: its help text, the methods of a room (found by scanning), its default.

    flag: of a repeated one, whose name says one of several.
    """
    field, flag = EngineConfig.__dataclass_fields__[name], flag or name.replace("_", "-")
    known = "" if methods is None else f"; methods: {', '.join(names(methods))}"
    aliases = ("--draft-model",) if name == "draft" else ()
    shown_default = "" if field.default is None else f" [default: {field.default}]"
    return typer.Option(
        f"--{flag}/--no-{flag}" if isinstance(field.default, bool) else f"--{flag}",
        *aliases,
        help=field.metadata["help"] + known + shown_default,
        show_default=False,
        rich_help_panel=_engine_panel(name),
    )


def _sampling(name: str, text: str, flag: str | None = None) -> Any:
    """Make the flag of one field of SamplingParams. flag: the name of a repeated one, which is in the singular."""
    default = SamplingParams.__dataclass_fields__[name].default
    if name in DRAWING:
        usual = f"{USUAL[name]} for a chat model, else " if name in USUAL else ""
        default = f"the model's own, else {usual}{default}"
    shown = "" if default in (None, ()) else f" [default: {default}]"
    return typer.Option(
        flag or f"--{name.replace('_', '-')}",
        help=text + shown,
        show_default=False,
        rich_help_panel=_PANEL_OF.get(name, "Sampling"),
    )


Target = Annotated[str | None, _engine("target")]
TargetArgument = Annotated[
    str | None, typer.Argument(help=EngineConfig.__dataclass_fields__["target"].metadata["help"], show_default=False)
]
Draft = Annotated[str | None, _engine("draft", methods="forerun.drafters")]
SpecLength = Annotated[int | None, _engine("spec_length")]
Pacing = Annotated[str | None, _engine("pacing", methods="forerun.pacing")]
PacingLog = Annotated[str | None, _engine("pacing_log")]
Calibrate = Annotated[bool | None, _engine("calibrate")]
Device = Annotated[str | None, _engine("device")]
Dtype = Annotated[str | None, _engine("dtype")]
Quantization = Annotated[str | None, _engine("quantization")]
GenerationConfig = Annotated[str | None, _engine("generation_config")]
IgnoreConfigKeys = Annotated[list[str] | None, _engine("ignore_config_keys", flag="ignore-config-key")]
ChatTemplate = Annotated[str | None, _engine("chat_template")]
Ops = Annotated[str | None, _engine("ops")]
CacheBackend = Annotated[str | None, _engine("kv_cache_backend")]
MaxSeqLen = Annotated[int | None, _engine("max_seq_len")]
CacheTokens = Annotated[int | None, _engine("kv_cache_tokens")]
MaxBatchSize = Annotated[int | None, _engine("max_batch_size")]
PrefixCaching = Annotated[bool | None, _engine("prefix_caching")]
PrefillChunkTokens = Annotated[int | None, _engine("prefill_chunk_tokens")]
MaxNumBatchedTokens = Annotated[int | None, _engine("max_num_batched_tokens")]
ExtraDrafts = Annotated[str | None, _engine("extra_drafts")]
UseSpeculativeDecoding = Annotated[
    bool | None,
    typer.Option(
        "--speculative-decoding/--no-speculative-decoding",
        help="off: the same as --draft none; on: refused where no draft is named [default: as --draft says]",
        show_default=False,
        rich_help_panel=_engine_panel("use_speculative_decoding"),
    ),
]
DraftCatchupTokens = Annotated[int | None, _engine("draft_catchup_tokens")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="file with engine options, TOML, or JSON where it ends in .json.",
        show_default=False,
        rich_help_panel=_engine_panel("config"),
    ),
]

_APART: dict[str, Any] = {"use_speculative_decoding": UseSpeculativeDecoding, "config": ConfigFile}


@dataclass(frozen=True)
class _EngineFields(Fields):
    """Those of EngineConfig, and what is given beside them: the config file, and whether to draft at all."""

    cls: type[Any] = EngineConfig

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield each name with its parameter of a command."""
        apart = [name for name in _APART if name in self.names or not self.names]
        fields = EngineConfig.__dataclass_fields__
        for name in self.names or [name for name, field in fields.items() if "help" in field.metadata]:
            if name not in apart:
                panel = _engine_panel(name)
                yield from Fields(EngineConfig, (name,), self.leave_out, self.usual, panel).parameters()
        for name in apart:
            yield name, Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_APART[name])


def engine(*names: str, leave_out: Collection[str] = (), **usual: Any) -> Fields:
    """Stand for flags of the engine's options, in the order of the names; without names for all of them.

    usual: what a command has in place of a default.
    """
    return _EngineFields(names=names, leave_out=leave_out, usual=usual)


MODEL = ("device", "dtype", "quantization", "ops", "kv_cache_backend", "config")  # of most commands that measure

TEMPERATURE_HELP = "0 = greedy"
TOP_K_HELP = "keep the k most likely ids; 0 = all"
TOP_P_HELP = "keep the likeliest ids that together reach this mass, in (0, 1]"
MIN_P_HELP = "drop ids below this share of the largest probability, in [0, 1]"
Temperature = Annotated[float | None, _sampling("temperature", TEMPERATURE_HELP)]
TopK = Annotated[int | None, _sampling("top_k", TOP_K_HELP)]
TopP = Annotated[float | None, _sampling("top_p", TOP_P_HELP)]
MinP = Annotated[float | None, _sampling("min_p", MIN_P_HELP)]
MaxTokens = Annotated[int | None, _sampling("max_tokens", "tokens to generate at most")]
MinTokens = Annotated[int | None, _sampling("min_tokens", "no end of sequence and no stop id before this many tokens")]
RepetitionPenalty = Annotated[float | None, _sampling("repetition_penalty", "in 1e-6 .. 1e6; over prompt and output")]
PresencePenalty = Annotated[float | None, _sampling("presence_penalty", "in [-2, 2]; over the output")]
FrequencyPenalty = Annotated[float | None, _sampling("frequency_penalty", "in [-2, 2]; over the output")]
LogitBias = Annotated[
    list[str] | None, _sampling("logit_bias", "ID=VALUE: added to the logit of an id; may be repeated")
]
BadWords = Annotated[
    list[str] | None, _sampling("bad_words", "text that must not be completed; may be repeated", "--bad-word")
]
StopTokenIds = Annotated[
    list[int] | None, _sampling("stop_token_ids", "id that ends the output; may be repeated", "--stop-token-id")
]
Logprobs = Annotated[
    int | None, _sampling("logprobs", "with --json: log-probabilities, and those of this many likely ids, 0 to 20")
]
Seed = Annotated[int | None, _sampling("seed", "the same seed, the same text; without one a seed is drawn and shown")]
Stop = Annotated[list[str] | None, _sampling("stop", "text that ends the output and is cut from it; may be repeated")]
NumOutputs = Annotated[int | None, _sampling("n", "outputs for each prompt, with seeds of their own")]
NumBeams = Annotated[int | None, _sampling("num_beams", "width of a beam search; needs --temperature 0")]
DraftBeams = Annotated[int | None, _sampling("draft_beams", "width of the drafter's own search, at least --num-beams")]
LengthPenalty = Annotated[
    float | None, _sampling("length_penalty", "of a beam search: scores are divided by length to this power")
]
EarlyStopping = Annotated[
    str | None,
    _sampling("early_stopping", "of a beam search: true = when --num-beams texts are finished; or false, or never"),
]
Priority = Annotated[int | None, _sampling("priority", "lower numbers are served first")]
CacheSalt = Annotated[
    str | None, _sampling("cache_salt", "share what is in the cache only with prompts of the same salt")
]
Prediction = Annotated[
    str | None,
    _sampling("prediction", "text that the output may resemble, or @FILE (@@ for a text with an @ first): speed alone"),
]
Acceptance = Annotated[
    str | None, _sampling("acceptance", "verification rule [default: match with a seed and temperature, else ratio]")
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", help="more numbers behind each output: alpha-hat and others", rich_help_panel="Output"),
]
IgnoreEos = Annotated[
    bool | None, typer.Option("--ignore-eos", help="go on past the end of sequence", rich_help_panel="Sampling")
]

Prompt = str | list[int] | list[dict[str, Any]]  # a text, ids, or a conversation
Request = tuple[Prompt, SamplingParams]  # a prompt, and how it is continued

_ENGINE = frozenset({*EngineConfig.__dataclass_fields__, "use_speculative_decoding"})
_SAMPLING = frozenset(SamplingParams.__dataclass_fields__)


def sampling_params(flags: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> SamplingParams:
    """Return a command's sampling parameters: its arguments over `fields` of a checkpoint, over the defaults."""
    # A name that the engine has too, such as draft, is the engine's flag: a request sets it in a prompt file.
    given = {k: v for k, v in flags.items() if k in _SAMPLING - _ENGINE and v is not None}
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"])
    if "early_stopping" in given:
        given["early_stopping"] = _yes_or_no(given["early_stopping"])
    if "prediction" in given:
        given["prediction"] = _text_or_file(given["prediction"])
    return SamplingParams(**{**(fields or {}), **given})


def _yes_or_no(value: str) -> bool | str:
    """True and false as texts; any other text as it is, which SamplingParams knows or refuses."""
    return {"true": True, "false": False}.get(value.lower(), value)


def read_file(file: Path, what: str) -> str:
    """Read a text, called `what` in errors. Raises BadOption where it is no UTF-8, NotFound where it is not there."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadOption(f"the {what} {str(file)!r} is not UTF-8 text: convert it first") from error
    except OSError as error:
        raise NotFound(f"the {what} {str(file)!r} cannot be read ({error.strerror}): check its name") from error


def _text_or_file(value: str) -> str:
    """The contents of FILE for @FILE, else the text itself; @@ stands for an @ at its beginning."""
    if value.startswith("@@") or not value.startswith("@"):
        return value.removeprefix("@")
    return read_file(Path(value[1:]), "file of --prediction")


def requests(text: str, defaults: SamplingParams, ignored: Collection[str] = ()) -> list[Request]:
    """Read one request per line of a JSON Lines text: {"prompt": a text or ids, and any field of SamplingParams}.

    A field that a line does not have is taken from `defaults`. ignored: names that are no fields. Raises BadOption with
    the number of the line.
    """
    made = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may contain other line separators
        if line.strip():
            try:
                made.append(_request(json.loads(line), defaults, ignored))
            except BadOption as error:
                raise BadOption(f"line {number}: {error}") from None
            except (ValueError, RecursionError) as error:
                raise BadOption(f"line {number} is not valid JSON: {error}") from None
    return made


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
    """Read biases from texts of the form ID=VALUE. Raises BadOption."""
    made = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        number = _token_id(token, pair)
        try:
            made[number] = float(value)
        except ValueError:
            raise BadOption(f"logit_bias={shown(pair)} is not possible: write ID=VALUE, for example 5=-1.5") from None
    return made


def _token_id(text: str, given: object) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadOption(f"logit_bias={shown(given)} is not possible: {shown(text)} is no token id") from None


def engine_config(flags: Mapping[str, Any], config_file: Path | None = None, **usual: Any) -> EngineConfig:
    """Return the engine's options: a command's arguments over FORERUN_* variables, over the file, over the defaults.

    usual: what the command has in place of a default.
    """
    config_file = flags.get("config", config_file)
    given = {k: v for k, v in flags.items() if k in _ENGINE}
    return EngineConfig.from_sources(given, str(config_file) if config_file else None, usual)
