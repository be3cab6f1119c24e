"""How one request is decoded: every sampling parameter, its default and its range.

Logits are float32. The ranges of logit_bias and repetition_penalty are chosen so that, for logits of up to 1e20, no
combination of parameters exceeds float32: (1e20 + 1e20) * 1e6, divided by the least temperature 1e-5, is 2e31.
"""

from __future__ import annotations

import json
import math
import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any

from forerun.errors import BadOption, shown
from forerun.registry import by_name, check_range, option, unknown, with_fields


def _instance(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _wide(value: Any) -> int:
    """Return an integer of at most 64 bits, as native code takes it. Raises OverflowError for a wider integer."""
    number = _integer(value)
    if not -(2**63) <= number < 2**63:
        raise OverflowError
    return number


def _integers(value: Any) -> tuple[int, ...]:
    if isinstance(value, bytes | bytearray | Mapping):  # these would be read as integers, too
        raise TypeError
    return tuple(map(_integer, () if value is None else value))


def _text_or_ids(value: Any) -> str | tuple[int, ...]:
    return _text(value) if isinstance(value, str) else _integers(_instance(value, Iterable))


def _text(value: Any) -> str:
    """Return a text. Raises ValueError for a text that UTF-8 cannot encode (half a surrogate pair)."""
    text: str = _instance(value, str)
    text.encode()
    return text


def _number(value: Any) -> float:
    return float(_instance(value, numbers.Real))


def _texts(value: Any) -> tuple[str, ...]:
    """Return None, one text or several texts as a tuple of texts."""
    if isinstance(value, Mapping):
        raise TypeError
    texts = (value,) if isinstance(value, str) else tuple(_instance(() if value is None else value, Iterable))
    return tuple(map(_text, texts))


def _biases(value: Any) -> dict[int, float]:
    return {_integer(token): _number(bias) for token, bias in _instance(value, Mapping).items()}


class _Json(str):
    """The text of a JSON value that was parsed already, so that it is not parsed again."""

    __slots__ = ()


def _schema(value: Any) -> str:
    """Return a JSON schema as text. value: a mapping, a truth value, or the JSON text of either."""
    if isinstance(value, _Json):
        return value
    read = value
    if isinstance(value, str):
        try:
            read = json.loads(_text(value))
        except RecursionError:
            raise ValueError from None
    if not isinstance(read, Mapping | bool):
        raise TypeError
    try:
        return _Json(json.dumps(_plain(read), ensure_ascii=False, allow_nan=False))
    except RecursionError:
        raise ValueError from None


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


@dataclass(frozen=True)
class Kind:
    """The kind of value that a field takes.

    convert: turns a value into plain Python. what: the words that say what the value must be.
    """

    convert: Callable[[Any], Any]
    what: str


@dataclass(frozen=True)
class Thinking:
    """A limit on the number of reasoning tokens. A chat gives this limit in place of a grammar.

    The tokens are counted, and no grammar rules are needed for that. opening: the token ids that begin the reasoning;
    () = the prompt has begun the reasoning. closing: the token id that ends the reasoning. most: the largest number of
    tokens between opening and closing. rules: a grammar for the output from the closing id on, and for an output
    without reasoning; "" = any text.
    """

    opening: tuple[int, ...]
    closing: int
    most: int
    rules: str = ""


def _rules(value: Any) -> str | Thinking:
    return value if isinstance(value, Thinking) else _text(value)


CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar")  # a request has at most one of them
# Formats of texts that JSON Schema defines; any other is a note to people, such as pydantic's "path" and "password".
FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "regex"),
        "relative-json-pointer",
    )
)
NO_LIMIT = 1 << 24  # characters, items or properties: no context holds a text with so many
_MOST, _LEAST = ("maxLength", "maxItems", "maxProperties"), ("minLength", "minItems", "minProperties")
MAX_BEAMS = 64
NUM_IDS = 2**31  # no vocabulary is larger; which ids a model has is checked when a request is added

INTEGER = Kind(_wide, "an integer of 64 bits")
SEED = Kind(_integer, "an integer")
NUMBER = Kind(_number, "a number")
FLAG = Kind(lambda value: _instance(value, bool), "True or False")
STOPPING = Kind(lambda value: value if value == "never" else _instance(value, bool), "True, False or 'never'")
TEXT = Kind(lambda value: _instance(value, str), "a text")
UTF8 = Kind(_text, "a text in valid UTF-8")
RULES = Kind(_rules, UTF8.what)
SCHEMA = Kind(_schema, "a JSON schema: a mapping, a truth value, or the text of one")
TEXTS = Kind(_texts, "a text or several, in valid UTF-8")
IDS = Kind(_integers, "several integers")
TEXT_OR_IDS = Kind(_text_or_ids, "a text in valid UTF-8 or several integers")
A_TEXT: Mapping[str, Any] = {  # metadata of the options that take a text
    "kind": TEXT_OR_IDS,
    "min": 0,
    "max": NUM_IDS - 1,
    "range": "a text, or ids in 0 .. 2**31 - 1",
    "takes": str,
}
BIASES = Kind(_biases, "a mapping from integers to numbers")


@with_fields
@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Every field works with speculation, which never changes the output distribution.

    A field that takes one text or several texts stores a tuple of texts. Raises BadOption for a value that cannot be
    honoured; the message names the field and the value.
    """

    # A field says everything about a parameter: `forerun generate --help`, the server's schema, the API page and the
    # refused values follow from it. kind: the kind of value that it takes. min, max: bounds of each entry, included;
    # above: a bound, excluded. also: values outside of the bounds. range: the words for the bounds, where they do not
    # follow from these. python: what the API page says, where that is not the command's help text. of_beams: whether
    # the parameter belongs to a beam search; beams: why it cannot go with one. suggested: the parameter's key in
    # generation_config.json.

    max_tokens: int | None = option(
        128,
        "tokens to generate at most",
        kind=INTEGER,
        unit="tokens",
        min=0,
        suggested="max_new_tokens",
        python="tokens to generate at most; 0 = the prompt is read, and scored for prompt_logprobs; None = as far as "
        "max_seq_len goes",
    )
    min_tokens: int = option(
        0,
        "no end of sequence, stop id or stop text before this many tokens",
        kind=INTEGER,
        unit="tokens",
        min=0,
        suggested="min_new_tokens",
    )
    temperature: float = option(
        1.0,
        "0 = greedy",
        kind=NUMBER,
        min=1e-5,  # below it only amplifies rounding: use 0, which is exactly greedy
        max=sys.float_info.max,
        also=(0,),
        range="0 (greedy) or a finite number of at least 1e-5",
        python="0 = greedy, else a finite number of at least 1e-5",
        suggested="temperature",
    )
    top_k: int = option(
        0,
        "keep the k most likely ids; 0 = all",
        kind=INTEGER,
        unit="ids",
        min=0,
        range="0 (all ids) or at least 1",
        suggested="top_k",
    )
    top_p: float = option(
        1.0,
        "keep the likeliest ids that together reach this mass, in (0, 1]",
        kind=NUMBER,
        above=0,
        max=1,
        suggested="top_p",
        python="keep the likeliest ids that together reach this mass, in (0, 1]",
    )
    min_p: float = option(
        0.0,
        "drop ids below this share of the largest probability, in [0, 1]",
        kind=NUMBER,
        min=0,
        max=1,
        suggested="min_p",
    )
    repetition_penalty: float = option(
        1.0,
        "in 1e-6 .. 1e6; over prompt and output",
        kind=NUMBER,
        min=1e-6,
        max=1e6,
        range="in [1e-6, 1e6]",
        python="in [1e-6, 1e6]; over prompt and output",
        suggested="repetition_penalty",
    )
    presence_penalty: float = option(
        0.0, "in [-2, 2]; over the output", kind=NUMBER, min=-2, max=2, suggested="presence_penalty"
    )
    frequency_penalty: float = option(
        0.0, "in [-2, 2]; over the output", kind=NUMBER, min=-2, max=2, suggested="frequency_penalty"
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        "ID=VALUE: added to the logit of an id; may be repeated",
        kind=BIASES,
        takes=list[str],
        python="id -> added to its logit, in [-1e20, 1e20]; -inf forbids the id",
    )
    bad_words: str | Sequence[str] = option(
        (),
        "text that must not be completed; may be repeated",
        kind=TEXTS,
        flag="--bad-word",
        takes=list[str],
        python="texts that must not be completed",
    )
    stop: str | Sequence[str] = option(
        (),
        "text that ends the output and is cut from it; may be repeated",
        kind=TEXTS,
        takes=list[str],
        python="texts that end the output; they are cut from `text`",
    )
    stop_token_ids: Sequence[int] = option(
        (),
        "id that ends the output; may be repeated",
        kind=IDS,
        min=0,
        max=NUM_IDS - 1,
        range="ids in 0 .. 2**31 - 1",
        flag="--stop-token-id",
        takes=list[int],
        python="ids that end the output, beside the model's own",
    )
    forced_eos_token_id: int | None = option(
        None,
        "id that an output ends with where it is cut: the last of --max-tokens",
        kind=INTEGER,
        min=0,
        max=NUM_IDS - 1,
        suggested="forced_eos_token_id",
        python="id that an output ends with where it is cut: the last of max_tokens, whatever the model would say",
    )
    json_schema: Mapping[str, Any] | bool | str | None = option(
        None,
        "FILE or text of a JSON schema that the output must match",
        kind=SCHEMA,
        takes=str,
        panel="Structured output",
        python="a JSON schema that the output must match: a mapping, or its text",
    )
    json_object: bool = option(False, "the output must be a JSON object", kind=FLAG, panel="Structured output")
    regex: str | None = option(
        None, "regular expression that the whole output must match", kind=UTF8, panel="Structured output"
    )
    choice: str | Sequence[str] = option(
        (),
        "text that the output may be; repeated for the others",
        kind=TEXTS,
        takes=list[str],
        panel="Structured output",
        python="texts; the output must be one of them",
    )
    grammar: str | Thinking | None = option(
        None,
        "FILE or text of a grammar that the output must follow, in Lark's form or llama.cpp's (GBNF)",
        kind=RULES,
        takes=str,
        panel="Structured output",
        python="a grammar that the output must follow, in Lark's form as llguidance reads it, or llama.cpp's (GBNF)",
    )
    json_whitespace: str = option(
        "free",
        "white space in JSON: free, compact (none), or spaced (one blank behind , and :)",
        kind=TEXT,
        panel="Structured output",
        python="white space in JSON: free (a blank, or a line break and its indentation), compact (none), or spaced "
        "(one blank behind a comma and a colon, as json.dumps writes)",
    )
    ignore_eos: bool = option(False, "go on past the end of sequence", kind=FLAG)
    seed: int | None = option(
        None,
        "the same seed, the same text; without one a seed is drawn and shown",
        kind=SEED,
        min=0,
        max=2**64 - 1,
        range="in 0 .. 2**64 - 1, or left out for one that is drawn",
        python="64 bits: the same seed, the same text; None = one is drawn and reported",
    )
    logprobs: int | None = option(
        None,
        "with --json: log-probabilities, and those of this many likely ids, 0 to 20",
        kind=INTEGER,
        unit="ids",
        min=0,
        max=20,
        beams="an output has its score and the sum of its log-probabilities",
        python="per token: its log-probability and this many alternatives, 0 to 20; None = none",
    )
    prompt_logprobs: int | None = option(
        None,
        "with --json: the same of the prompt's tokens, behind the first",
        kind=INTEGER,
        unit="ids",
        min=0,
        max=20,
        beams="an output has its score and the sum of its log-probabilities",
        python="the same of the prompt's tokens, all but the first; the prompt is then not looked for in the cache",
    )
    n: int = option(
        1,
        "outputs for each prompt, with seeds of their own",
        kind=INTEGER,
        min=1,
        max=16384,
        python="outputs for the prompt, 1 to 16384, with seeds derived from `seed`; of a beam search the n best",
    )
    num_beams: int = option(
        1,
        "width of a beam search; needs --temperature 0",
        kind=INTEGER,
        unit="beams",
        min=1,
        max=MAX_BEAMS,
        python="width of a beam search, 1 to 64; needs temperature=0",
    )
    draft_beams: int | None = option(
        None,
        "width of the drafter's own search, at least --num-beams",
        kind=INTEGER,
        unit="beams",
        min=1,
        max=MAX_BEAMS,
        panel="Speculation",
        python="width of the drafter's own search, from num_beams to 64; None = num_beams",
    )
    length_penalty: float = option(
        1.0,
        "of a beam search: scores are divided by length to this power",
        kind=NUMBER,
        min=-16,
        max=16,
        of_beams=True,
        python="of a beam search, -16 to 16: a score is the sum of log-probabilities / length to this power",
    )
    early_stopping: bool | str = option(
        False,
        "of a beam search: true = when --num-beams texts are finished; or false, or never",
        kind=STOPPING,
        takes=str,
        of_beams=True,
        python="of a beam search: True = at num_beams finished texts; False, 'never' = while one may get better",
    )
    acceptance: str | None = option(
        None,
        "verification rule",
        kind=TEXT,
        usual="match with a seed and temperature, else ratio",
        beams="all beams are compared, no token is accepted or rejected by itself",
        panel="Speculation",
        python="verification rule; None = match for a seed and temperature > 0, else ratio",
    )
    draft: str | None = option(
        None,
        "a drafter that the engine was started with, or none",
        kind=TEXT,
        python="a drafter that the engine was started with, or none; None = the engine's own choice",
    )
    prediction: str | Sequence[int] | None = option(
        None,
        "text that the output may resemble, or @FILE (@@ for a text with an @ first): speed alone",
        **A_TEXT,
        beams="it is one text, and beams are several",
        panel="Speculation",
        python="what the output may resemble, as text or ids: a hint, for speed alone",
    )
    decoder_prompt: str | Sequence[int] | None = option(
        None,
        "text that the answer of an encoder-decoder begins with, or @FILE (@@ for a text with an @ first)",
        **A_TEXT,
        python="what the answer of an encoder-decoder begins with, as text or ids; it is no part of the output",
    )
    spec_length: int | None = option(
        None,
        "tokens drafted per step, whatever the engine's pacing",
        kind=INTEGER,
        unit="tokens",
        min=1,
        max=64,
        python="tokens drafted per step, 1 to 64, whatever the engine's pacing; None = as it paces",
    )
    priority: int = option(
        0, "lower numbers are served first", kind=INTEGER, python="lower numbers are served first, and preempted last"
    )
    cache_salt: str | None = option(None, "share what is in the cache only with prompts of the same salt", kind=TEXT)

    if not TYPE_CHECKING:  # checkers know the fields, and refuse other names themselves

        def __new__(cls, *_: Any, **given: Any) -> SamplingParams:
            """Raise BadOption for a name that is no field. The message gives forerun's name, or the nearest name."""
            for name in given.keys() - cls.__dataclass_fields__.keys():
                raise BadOption(no_field(name))
            return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, field in _FIELDS.items():
            if (value := getattr(self, name)) is not field.default:  # a default needs no check
                self._accept(field, value)
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "at most max_tokens")
        for token, bias in (self.logit_bias or {}).items():
            ok = 0 <= token < NUM_IDS and (bias == -math.inf or abs(bias) <= 1e20)
            _require(ok, "logit_bias", {token: bias}, "from ids in 0 .. 2**31 - 1 to numbers in [-1e20, 1e20], or -inf")
        self._check_constraint()
        self._check_beams()

    def _check_constraint(self) -> None:
        """Raise BadOption for two grammars at once, an empty grammar, and an unknown kind of white space."""
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False, ())]
        if len(given) > 1:
            raise BadOption(f"{given[0]} and {given[1]} are two grammars for one output: drop one of them")
        for name in ("regex", "grammar"):
            _require(getattr(self, name) != "", name, "", "a text that is not empty")
        kinds = ("free", "compact", "spaced")
        _require(self.json_whitespace in kinds, "json_whitespace", self.json_whitespace, "free, compact or spaced")

    def _check_beams(self) -> None:
        """Raise BadOption for options that a beam search cannot honour, and for its options without a beam search."""
        if not self.searches:
            for name, field in _FIELDS.items():
                if field.metadata.get("of_beams") and (value := getattr(self, name)) != field.default:
                    raise BadOption(f"{name}={shown(value)} belongs to a beam search: add num_beams, or drop it", name)
            return
        width = f"num_beams={self.num_beams}"
        asked = "num_beams" if self.num_beams > 1 else "draft_beams"
        search = f"{asked}={getattr(self, asked)}"
        if self.max_tokens == 0:
            raise BadOption(f"{search} is not possible with max_tokens=0: there is nothing to search for", asked)
        if not self.greedy:
            raise BadOption(
                f"{search} is not possible where tokens are drawn: a beam search draws nothing; set temperature to 0",
                asked,
            )
        _require(self.n <= self.num_beams, "n", self.n, f"at most {width}")
        draft_beams = self.draft_beams or self.num_beams
        _require(draft_beams >= self.num_beams, "draft_beams", draft_beams, f"at least {width}")
        for name, field in _FIELDS.items():
            if "beams" in field.metadata and (value := getattr(self, name)) is not None:
                why = field.metadata["beams"]
                raise BadOption(f"{name}={shown(value)} is not possible with {search}: {why}; drop one of them", name)

    def _accept(self, field: Field[Any], value: Any) -> None:
        """Convert one field and check its range."""
        about = field.metadata
        kind: Kind = about["kind"]
        is_optional = field.default is None or field.name == "max_tokens"
        if value is None and is_optional:
            return
        try:
            value = kind.convert(value)
        except (TypeError, ValueError, OverflowError) as error:
            what = f"{kind.what}, or None" if is_optional else kind.what
            if isinstance(error, json.JSONDecodeError):
                what += f"; the text is no JSON: {error}"
            _require(False, field.name, value, what)
        object.__setattr__(self, field.name, value)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, str) and kind is TEXTS:
                _require(one != "", field.name, one, "a text that is not empty")
            elif not isinstance(one, str):
                check_range(one, about, f"{field.name}={shown(value)}", field.name)

    @property
    def greedy(self) -> bool:
        """Whether each next token is the argmax."""
        return self.temperature == 0

    @property
    def constraint(self) -> tuple[str, str] | None:
        """The grammar that the output must follow, as its kind and its text; None = any text.

        The kind is the name of the field, such as regex. For JSON, a colon and the kind of white space follow the name.
        """
        if self.json_schema is not None:
            return f"json_schema:{self.json_whitespace}", str(self.json_schema)
        if self.json_object:
            return f"json_object:{self.json_whitespace}", '{"type": "object"}'
        if self.choice:
            return "choice", json.dumps(self.choice)
        rules = self.thinking.rules or None if self.thinking is not None else self.grammar
        for name, text in (("regex", self.regex), ("grammar", rules)):
            if isinstance(text, str):
                return name, text
        return None

    @property
    def thinking(self) -> Thinking | None:
        """The limit on the request's reasoning; None = no limit. A grammar applies only after the reasoning."""
        return self.grammar if isinstance(self.grammar, Thinking) else None

    @property
    def is_held(self) -> bool:
        """Whether the output so far restricts the tokens that may come next."""
        return self.constraint is not None or self.thinking is not None

    @property
    def searches(self) -> bool:
        """Whether the output comes from a beam search: several beams, or a single beam with draft_beams given."""
        return self.num_beams > 1 or self.draft_beams is not None


_FIELDS = SamplingParams.__dataclass_fields__

# The signature of the fields, for help() and completion, because the signature of __new__ would say nothing.
SamplingParams.__signature__ = Signature(list(signature(SamplingParams.__init__).parameters.values())[1:])  # type: ignore[attr-defined]


def telling(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a JSON schema that restrict a text.

    Formats that JSON Schema does not define are left out, and so are maxima of NO_LIMIT or more, which no text reaches.
    A minimum above NO_LIMIT becomes NO_LIMIT, because larger numbers could not be counted.
    """
    kept = dict[str, Any]()
    for key, value in schema.items():
        is_large = isinstance(value, int | float) and value >= NO_LIMIT
        if (key == "format" and isinstance(value, str) and value not in FORMATS) or (key in _MOST and is_large):
            continue
        kept[key] = NO_LIMIT if key in _LEAST and is_large else value
    return kept


def no_field(name: str) -> str:
    """Return the error message for a name that is no field of SamplingParams."""
    known = SamplingParams.__dataclass_fields__
    return by_name(name, known, "LLM") or unknown("sampling parameter", name, known)


def _require(ok: bool, name: str, value: object, what: str) -> None:
    if not ok:
        raise BadOption(f"{name}={shown(value)} is not possible: it must be {what}", name)
