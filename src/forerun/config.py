"""The engine's options with their defaults, in one frozen, validated dataclass.

Precedence: request > command-line flag > FORERUN_* variable > config file > default.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import BadOption, NotFound, UserError, shown
from forerun.native import VARIABLES
from forerun.params import SamplingParams
from forerun.registry import by_name, by_value, checked, flag_of, not_among, option, stated, unknown, with_fields

DEFAULT_SPEC_LENGTH = 5  # of pacing=fixed
AUTO_SPEC_LENGTH = 16  # the most that pacing=auto grants
MOST_CONFIG_BYTES = 10**6  # of a file with some twenty options
COMMAND_VARIABLES = ("FORERUN_API_KEY", "FORERUN_PAIR")  # read by commands such as serve; they are no engine options
# Variables that Kubernetes sets in every pod for a Service whose name begins with "forerun" (FORERUN_SERVICE_HOST,
# FORERUN_PORT=tcp://...), and variables by which linked containers tell of each other, are not meant for us.
_SERVICE_LINK = re.compile(r"FORERUN_(\w+_)?(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP))(_\w+)?")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+")


GROUPS = {8: (16, 32, 64, 128), 4: (32, 64, 128)}  # how many weights may share a scale, by their bits
HOW_QUANTISED = "write int8 or int4, or one with a group of weights to a scale: " + " and ".join(
    f"int{bits}:group={', '.join(map(str, sizes[:-1]))} or {sizes[-1]}" for bits, sizes in GROUPS.items()
)

AUTO = "auto"  # in place of a draft model's quantization: the one that pays for this model


@dataclass(frozen=True)
class Quantization:
    """Weights of `bits` bits, in groups of `group` weights that share a scale. `parse` reads the texts of `str`.

    again: whether every matrix with more bits is rounded, even the embedding, the LM head and a matrix that a file has
    quantised already. This is for draft models only, because their guesses need no exactness.
    """

    bits: int
    group: int = 32
    again: bool = False

    def __str__(self) -> str:
        return f"int{self.bits}:group={self.group}" + ":again" * self.again

    @classmethod
    def parse(cls, text: str) -> Quantization:
        """Parse int8 or int4, optionally followed by :group=N and :again. Raises BadOption for any other text."""
        match = re.fullmatch(r"int([48])(?::group=(\d{1,4}))?(:again)?", text)
        if match is None or (match[2] is not None and int(match[2]) not in GROUPS[int(match[1])]):
            said = by_value("quantization", text) or f"quantization={shown(text)} is not possible: {HOW_QUANTISED}"
            raise BadOption(said, "quantization")
        return cls(int(match[1]), int(match[2] or cls.group), match[3] is not None)


@with_fields
@dataclass(frozen=True)
class EngineConfig:
    """The options that an engine is started with. Raises BadOption for an option that cannot be honoured."""

    target: str | None = option(
        None,
        "checkpoint folder, GGUF file, hub id (org/name[@revision]), or a name that `forerun models` lists; none = "
        "smollm2, which must be here",
        panel="Model",
    )
    draft: str = option(
        "auto",
        "auto, none, a method with options such as lookup:max_n=3, or a draft model's folder or hub id",
        methods="forerun.drafters",
        panel="Speculation",
        aliases=("--draft-model",),
        everyday=True,
    )
    extra_drafts: str | None = option(
        None,
        "more drafters that requests may choose, separated by semicolons; lookup and none are always there",
        panel="Speculation",
    )
    spec_length: int | None = option(
        None,
        "tokens drafted per step (K) by requests that draft; none = as many as pay; with pacing=auto the most that are "
        "granted",
        min=1,
        max=64,
        panel="Speculation",
        unit="tokens",
        everyday=True,
    )
    pacing: str | None = option(
        None,
        "policy that decides how far to draft; none = fixed where spec_length is given, else auto",
        methods="forerun.pacing",
        panel="Speculation",
        everyday=True,
    )
    pacing_log: str | None = option(
        None,
        "file for one JSON line per round: what was granted, drafted and accepted, and the policy's own numbers",
        panel="Speculation",
    )
    calibrate: bool = option(
        True,
        "pacing=auto measures what passes take, once per machine and model, while no request comes; off: never",
        panel="Speculation",
        everyday=True,
    )
    dtype: str = option(
        "auto",
        "auto, float32 or bfloat16",
        panel="Model",
        choices=("auto", "float32", "bfloat16"),
        everyday=True,
        measured=True,
    )
    quantization: str | None = option(
        None,
        "int8 or int4[:group=N]: the target's weights are rounded to so many bits while they are loaded",
        panel="Model",
        everyday=True,
        measured=True,
    )
    device: str = option(
        "auto",
        "auto (cpu), cpu or cuda",
        panel="Model",
        choices=("auto", "cpu", "cuda"),
        everyday=True,
        measured=True,
    )
    generation_config: str = option(
        "auto",
        "auto: the sampling values of generation_config.json become the defaults, or 0.7 and top-p 0.9 those of a chat "
        "model that has none; model: refuse to start where one of its values cannot be honoured; none: temperature 1",
        panel="Model",
        choices=("auto", "model", "none"),
        everyday=True,
    )
    ignore_config_keys: str | None = option(
        None,
        "keys of config.json to read it without, separated by commas: of all models that are loaded",
        flag="--ignore-config-key",
        takes=list[str],
        panel="Model",
        everyday=True,
    )
    chat_template: str | None = option(
        None,
        "file with the chat template (Jinja); none = the checkpoint's own",
        panel="Model",
        everyday=True,
    )
    ops: str = option(
        "auto",
        "auto, native (a CPU's kernels), reference (torch), or reference_row_by_row (slow; any device)",
        panel="Model",
        choices=("auto", *stated("forerun.ops", "NAME").values()),
        measured=True,
    )
    kv_cache_backend: str = option(
        "paged",
        "paged (blocks of 16 tokens) or contiguous (one block per sequence)",
        choices=("paged", "contiguous"),
        measured=True,
    )
    kv_cache_dtype: str = option(
        "auto",
        "numbers of the KV cache: auto (as weights are computed), bfloat16, float32, or int8, which takes half to "
        "two thirds of bfloat16's memory and is faster at long contexts; on a CPU",
        choices=("auto", "bfloat16", "float32", "int8"),
        everyday=True,
        measured=True,
    )
    kv_cache_tokens: int | None = option(
        None,
        "tokens in the KV cache; none = max_batch_size * max_seq_len, and where max_seq_len is not given 4096 for each "
        "sequence of a batch, 32768 at least",
        min=16,
        unit="tokens",
        everyday=True,
    )
    max_batch_size: int = option(8, "sequences that run together at most", min=1, max=1024, unit="sequences")
    max_seq_len: int | None = option(
        None,
        "prompt + output tokens; none = the model's, at most what the KV cache holds, and 4096 where memory is short",
        min=2,
        unit="tokens",
        everyday=True,
    )
    kv_disk: str | None = option(
        None,
        "keep blocks of the KV cache in a folder, so that what was read once is not read again: its size, as 20GB or "
        "20GB:FOLDER. The folder shows what was asked; it is readable by its owner alone",
        everyday=True,
    )
    prefix_caching: bool = option(True, "let requests share what equal beginnings left in the KV cache (paged only)")
    prefill_chunk_tokens: int = option(512, "prompt tokens run per step at most", min=1, unit="tokens")
    prefill_stretch: float | None = option(
        3.0,
        "while requests decode, of this model or another in the process, prompts make a step at most so many times as "
        "long as usual; 0 = as prefill_chunk_tokens allows",
        min=1.1,
        also=(0,),
        unit="times",
    )
    max_itl_ms: float | None = option(
        None,
        "while requests decode, prompts make a step at most so long; beside prefill_stretch the smaller of both holds",
        min=1.0,
        also=(0,),
        unit="ms",
    )
    max_num_batched_tokens: int = option(
        1024, "rows of one target pass at most: sequences that decode, prompt tokens and drafts", min=1, unit="rows"
    )
    draft_catchup_tokens: int = option(
        512,
        "committed tokens per step that draft models run to catch up, at most; fewer where that would double a step",
        min=1,
        panel="Speculation",
        unit="tokens",
    )

    if not TYPE_CHECKING:  # checkers know the fields, and refuse other names themselves

        def __new__(cls, *_: Any, **given: Any) -> EngineConfig:
            """Raise BadOption for a name that is no field."""
            for name in given.keys() - cls.__dataclass_fields__.keys():
                raise BadOption(_no_option(name, given[name]), name)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        keys = self.ignore_config_keys
        if isinstance(keys, list | tuple) and all(isinstance(key, str) for key in keys):
            object.__setattr__(self, "ignore_config_keys", ",".join(keys))
        fields = dataclasses.fields(self)
        given = {f.name: _as_text(v) for f in fields if (v := getattr(self, f.name)) is not f.default}
        for name, value in checked(type(self), given).items():
            object.__setattr__(self, name, value)
        for name in ("target", "draft"):
            if getattr(self, name) == "":
                raise BadOption(f"{name}='' names nothing: leave {name} out, or give it a value", name)
            if getattr(self, name) is not None:
                object.__setattr__(self, name, hub_id_of(getattr(self, name)))
        if self.quantization is not None:
            Quantization.parse(self.quantization)
        if self.max_num_batched_tokens < self.max_batch_size:
            raise BadOption(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is not possible: it must be at least "
                f"max_batch_size={self.max_batch_size}, for each sequence decodes one token per step",
                "max_num_batched_tokens",
            )
        for field in fields:
            choices = field.metadata.get("choices")
            value = getattr(self, field.name)
            if choices is not None and value not in choices:
                said = by_value(field.name, value) or not_among(field.name, value, choices)
                raise BadOption(said, field.name)

    def options(self) -> dict[str, Any]:
        """Return all options but the target as keyword arguments of LLM, for a target that is loaded already."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "target"}

    @property
    def longest_draft(self) -> int:
        """The number of drafted tokens per step for which memory is planned. A request may still ask for more."""
        return self.spec_length or (AUTO_SPEC_LENGTH if self.pacing_spec.startswith("auto") else DEFAULT_SPEC_LENGTH)

    @property
    def extra_draft_specs(self) -> tuple[str, ...]:
        """The drafters in `extra_drafts`, each as a name with its options, in order."""
        return tuple(filter(None, (part.strip() for part in (self.extra_drafts or "").split(";"))))

    @property
    def ignored_config_keys(self) -> frozenset[str]:
        """The names of the config.json entries that `ignore_config_keys` lists."""
        return frozenset(filter(None, (part.strip() for part in (self.ignore_config_keys or "").split(","))))

    @property
    def pacing_spec(self) -> str:
        """The spec of the pacing policy: `pacing` if given, otherwise fixed if spec_length is given, otherwise auto."""
        return self.pacing or ("auto" if self.spec_length is None else "fixed")

    @classmethod
    def make(cls, **options: Any) -> EngineConfig:
        """Make a configuration from keyword options, under forerun's names or the names that other engines use.

        Raises BadOption for unknown and for contradictory options.
        """
        values = _resolve_aliases(options)
        if values.pop(_USE, None) and "draft" not in values:
            raise BadOption(NO_DRAFT)
        return cls(**values)

    @classmethod
    def from_sources(
        cls, flags: Mapping[str, Any], config_file: str | None = None, usual: Mapping[str, Any] | None = None
    ) -> EngineConfig:
        """Merge flags (None = not given), FORERUN_* variables, a file, `usual` and the defaults; earlier sources win.

        usual: a command's own defaults for some options. The file is TOML, or JSON where its name ends in .json.
        Without `config_file`, FORERUN_CONFIG names the file.

        Aliases are resolved within each source, so options contradict each other only within a source. Raises BadOption
        and NotFound.
        """
        file, variables, given = _read_sources(flags, config_file)
        if (models := _models_of(file.options)) is not None:
            raise BadOption(
                f"the config file names models ({', '.join(models)}), as `forerun serve` takes them: write the options "
                "of one model, without [models]"
            )
        return _merged((_Source(usual or {}), file, variables, given))

    @classmethod
    def several(
        cls, targets: Seq[str], flags: Mapping[str, Any], config_file: str | None = None
    ) -> list[EngineConfig | tuple[str, EngineConfig]]:
        """Make one configuration per engine, from the sources of `from_sources`.

        There is an engine for each of `targets`, or for each table [models.NAME] of the file. The result for a table is
        a pair: NAME and the configuration. Options outside of the tables hold for all engines, and a table overrides
        them. Without targets and tables there is one engine, and other sources name its target. Raises BadOption and
        NotFound.
        """
        file, variables, given = _read_sources(flags, config_file)
        models = _models_of(file.options)
        if models is None:
            named = [{"target": target} for target in targets] or [{}]
            return [_merged((file, variables, given, _Source(one))) for one in named]
        if targets:
            raise BadOption(
                f"the config file names models ({', '.join(models)}) and the command does, too ({', '.join(targets)}): "
                "name them in one place"
            )
        rest = {name: value for name, value in file.options.items() if name != _MODELS}
        if "target" in rest or "target" in variables.options:
            raise BadOption("target and [models] contradict each other: drop one of them")
        configs = list[EngineConfig | tuple[str, EngineConfig]]()
        for name, options in models.items():
            table = _Source(options, f"{file.place}[models.{name}]: ")
            try:
                configs.append((name, _merged((replace(file, options=rest), table, variables, given))))
            except BadOption as error:
                raise (error if error.option else table.named(error)) from error
        return configs


_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[\w.-]+)(?:/(?P<file>[^?#]+\.gguf))?)?/?(?P<kind>:[\w.-]+)?(?:[?#].*)?",
    re.IGNORECASE,
)


def _no_option(name: str, value: object) -> str:
    """Return the error message for a name that is no option of the engine."""
    if (there := _of_requests(name)) is not None:
        return f"{name}={shown(value)} is no option of the engine: {there}"
    known = EngineConfig.__dataclass_fields__
    return by_name(name, known, "SamplingParams") or unknown("option", name, known)


def _of_requests(name: str) -> str | None:
    """Return what to do instead, if the name is a parameter of requests; otherwise None."""
    field = SamplingParams.__dataclass_fields__.get(name)
    if field is None:
        return None
    return f"give it with each request: in SamplingParams, by {flag_of(field)}, or as {name} in a body"


def hub_id_of(text: str) -> str:
    """Return the hub id for the address of a model on the hub; return any other text unchanged.

    https://huggingface.co/org/name/tree/main is org/name@main, .../blob/main/FILE.gguf is org/name@main:FILE.gguf.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        return text
    revision, file, kind = match["revision"], match["file"], match["kind"]
    at = f"@{revision}" if revision and revision != "main" else ""
    return f"{match['id']}{at}" + (f":{file}" if file else "") + (kind or "")


def _as_text(value: Any) -> Any:
    """Write a Path as text that cannot be taken for a hub id; other values stay as they are."""
    if not isinstance(value, Path):
        return value
    text = str(value)
    return text if value.is_absolute() or text.startswith((".", "~")) else os.path.join(".", text)


_MODELS = "models"  # of a config file: a table of options for each model of a server
_USE, _OFF = "use_speculative_decoding", "none"
NO_DRAFT = (
    "use_speculative_decoding=True needs a draft: name one, such as draft='auto', 'lookup', or a model's folder; "
    "without it the engine drafts where that pays"
)
_ALIASES = {"draft_model": "draft", "num_speculative_tokens": "spec_length"}
_AS_IT_IS = {"batching_mode": "continuous", "use_cuda_graphs": False}  # others' options with one possible value here
_SWITCH = {"true": True, "1": True, "false": False, "0": False}
# Methods of speculative_config that have another name here; vLLM takes the first two in place of a model, too.
_LOOKUP = {"ngram": "lookup", "[ngram]": "lookup"}
_OTHER_NAMES = {**_LOOKUP, "draft_model": "model"}
_HEADS = {"eagle": "eagle", "eagle3": "eagle", "medusa": "medusa"}  # methods for which `model` is the folder of a head
_METHOD_OPTIONS = {  # by our name of a method: vLLM's name of each option, and ours
    "lookup": {"prompt_lookup_max": "max_n", "prompt_lookup_min": "min_n"},
    "suffix": {
        f"suffix_decoding_{name}": name for name in ("max_spec_factor", "min_token_prob", "max_cached_requests")
    },
}


def _resolve_aliases(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return one source's options under forerun's names.

    draft_model, num_speculative_tokens and speculative_config are replaced by forerun's options.
    use_speculative_decoding=False becomes draft="none"; True is kept, because another source may name the draft. Some
    options of other engines have only one possible value in forerun. They are checked and removed.
    """
    may_be_none = {"draft", "speculative_config", *_ALIASES, *_AS_IT_IS}
    given = {k: v for k, v in options.items() if v is not None or k not in may_be_none}
    for name, only in _AS_IT_IS.items():
        value = given.pop(name, only)
        value = _SWITCH.get(value.lower(), value) if isinstance(value, str) else value
        if value != only:
            raise BadOption(f"{name}={shown(value)} is not possible: it is {only!r} here, and may be left out")
    for key, value in _flatten(given.pop("speculative_config", {})).items():
        _set(given, key, value, f"speculative_config[{shown(key)}]")
    for alias, name in _ALIASES.items():
        if alias in given:
            _set(given, name, given.pop(alias), alias)
    use = given.pop(_USE, None)
    use = _SWITCH.get(use.lower(), use) if isinstance(use, str) else use
    if use is not None and not isinstance(use, bool):
        raise BadOption(f"{_USE}={shown(use)} is not possible: it must be true or false, or be left out")
    if use is False:
        _set(given, "draft", _OFF, f"{_USE}=False")
    if use is True:
        if given.get("draft") == _OFF:
            raise BadOption(f"{_USE}=True contradicts draft={_OFF!r}: drop one of them")
        given[_USE] = True
    return given


def _flatten(config: Any) -> dict[str, Any]:
    """Return speculative_config as options. Raises BadOption if it is no dictionary or contradicts itself.

    The option `draft` is the config's model, or the config's method if there is no model. vLLM's options of the methods
    lookup and suffix become options of the drafter.
    """
    if not isinstance(config, Mapping):
        raise BadOption(f"speculative_config={shown(config)} is not possible: it must be a dictionary")
    options = {k: v for k, v in config.items() if v is not None}
    method, model = options.pop("method", None), options.pop("model", None)
    if model is not None and (head := _HEADS.get(str(method))) is not None:
        method, model = None, f"{head}:path={model}"
    method, model = _OTHER_NAMES.get(str(method), method), _LOOKUP.get(str(model), model)
    if model is not None and method not in (None, "model", model):
        raise BadOption(
            by_value("draft", str(method))
            or f"speculative_config has method={shown(method)} and model={shown(model)}: drop one of them"
        )
    draft = method if model is None else model
    if draft in _METHOD_OPTIONS:
        draft = _with_own_options(str(draft), options)
    if draft is not None:
        _set(options, "draft", draft, "speculative_config")
    return options


def _with_own_options(method: str, options: dict[str, Any]) -> str:
    """Return `method` with its options as in `draft`, and delete these from `options`. min_n alone also sets max_n."""
    given = {ours: options.pop(theirs) for theirs, ours in _METHOD_OPTIONS[method].items() if theirs in options}
    if "min_n" in given:
        given = {"max_n": given["min_n"], **given}
    return ":".join(filter(None, (method, ",".join(f"{name}={value}" for name, value in given.items()))))


def _set(options: dict[str, Any], name: str, value: Any, alias: str) -> None:
    if name in options and str(options[name]) != str(value):
        raise BadOption(
            f"{alias} says {name}={shown(value)} but {name}={shown(options[name])} was given too: drop one of them"
        )
    options[name] = value


@dataclass(frozen=True)
class _Source:
    """Holds the options of one source. place: the source in words, with which an error begins; "" for flags.

    is_environment: whether the options are environment variables.
    """

    options: Mapping[str, Any]
    place: str = ""
    is_environment: bool = False

    def named(self, error: BadOption) -> BadOption:
        """Return an error that calls the option by the name in this source, and says which source it is."""
        name, message = error.option, str(error)
        if name is not None and message.startswith(name):
            given = next((alias for alias, ours in _ALIASES.items() if ours == name and alias in self.options), name)
            shown_name = f"FORERUN_{given.upper()}" if self.is_environment else given
            message = shown_name + message.removeprefix(name)
        return BadOption(self.place + message, error.option)


def _merged(sources: Seq[_Source]) -> EngineConfig:
    """Merge sources. Later sources override earlier sources. Raises BadOption, which names the source."""
    merged, origins, needs_draft = dict[str, Any](), dict[str, _Source](), False
    for source in sources:
        try:
            values = _resolve_aliases(source.options)
        except BadOption as error:
            raise source.named(error) from error
        on = values.pop(_USE, None)
        if on and merged.get("draft") == _OFF:
            del merged["draft"]  # a later source switches drafting on, which an earlier one had switched off
        merged |= values
        origins |= dict.fromkeys(values, source)
        needs_draft = needs_draft if on is None else on
    if needs_draft and "draft" not in merged:
        raise BadOption(NO_DRAFT)
    try:
        return EngineConfig.make(**merged)
    except BadOption as error:
        if error.option not in origins:
            raise
        raise origins[error.option].named(error) from error


def _read_sources(flags: Mapping[str, Any], config_file: str | None) -> tuple[_Source, _Source, _Source]:
    """Return three sources: the config file, the environment variables, and the given flags."""
    variables = _read_environment()
    path = variables.pop("config", None) if config_file is None else config_file
    given = {name: value for name, value in flags.items() if value is not None}
    file = _Source(_read_file(path) if path else {}, f"the config file {shown(path)}: ")
    return file, _Source(variables, is_environment=True), _Source(given)


def _models_of(file: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]] | None:
    """Return the tables [models.NAME] of a file, or None if the file has no `models`.

    Raises BadOption if `models` has no tables or holds anything else, or if a table has no target.
    """
    if _MODELS not in file:
        return None
    models: Any = file[_MODELS]
    are_tables = isinstance(models, dict) and bool(models) and all(isinstance(one, dict) for one in models.values())
    if not are_tables:
        raise BadOption(
            f"models={shown(models)} is not possible: write [models.NAME] and that model's options below it"
        )
    tables = dict[str, Mapping[str, Any]](models)
    for name, options in tables.items():
        if "target" not in options:
            raise BadOption(f'[models.{name}] has no target: write target = "..." below it')
    return tables


def _read_environment() -> dict[str, Any]:
    """Return the values of FORERUN_* variables by option name. Raises BadOption for an unknown FORERUN_* variable."""
    known = [*EngineConfig.__dataclass_fields__, *_ALIASES, *_AS_IT_IS, _USE, "config"]
    names = {f"FORERUN_{name.upper()}": name for name in known}
    allowed = [*names, *VARIABLES, *COMMAND_VARIABLES]
    for variable, value in os.environ.items():
        is_a_link = _SERVICE_LINK.fullmatch(variable) or _SERVICE_ADDRESS.fullmatch(value)
        if variable.startswith("FORERUN_") and variable not in allowed and not is_a_link:
            option = variable.removeprefix("FORERUN_").lower()
            there = by_name(option, EngineConfig.__dataclass_fields__, "SamplingParams", "FORERUN_")
            there = there or _of_requests(option)
            raise BadOption(f"there is no {variable}: {there}" if there else unknown("variable", variable, allowed))
    return {name: os.environ[variable] for variable, name in names.items() if variable in os.environ}


def _read_file(path: str) -> dict[str, Any]:
    """Return the options in a config file. Raises NotFound for a missing file, BadOption for an unreadable one."""
    file = Path(path)
    form = "JSON" if file.suffix == ".json" else "TOML"
    try:
        if not file.exists():
            raise NotFound(f"the config file {path!r} does not exist")
        if not file.is_file() or file.stat().st_size > MOST_CONFIG_BYTES:
            why = "it is no file" if not file.is_file() else "it has more than 1 MB"
            raise BadOption(f"the config file {path!r} cannot be read ({why}): name a {form} file")
        text = file.read_text(encoding="utf-8")
        options = json.loads(text) if form == "JSON" else tomllib.loads(text)
    except UserError:
        raise
    except OSError as error:
        raise BadOption(f"the config file {path!r} cannot be read ({error.strerror}): name a {form} file") from None
    except (ValueError, RecursionError) as error:  # of another form, or not UTF-8
        raise BadOption(f"the config file {path!r} is not valid {form}: {error}") from None
    if not isinstance(options, dict):
        raise BadOption(f'the config file {path!r} holds no options: write {{"option": value}}')
    return options


# The signature of the fields, for help() and completion, because the signature of __new__ would say nothing.
EngineConfig.__signature__ = Signature(list(signature(EngineConfig.__init__).parameters.values())[1:])  # type: ignore[attr-defined]
