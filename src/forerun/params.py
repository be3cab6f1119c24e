"""How one request is decoded: every sampling parameter, its default and its range.

Logits are float32. The ranges of logit_bias and repetition_penalty are chosen so that no combination of parameters
leaves float32 on logits of up to 1e20: (1e20 + 1e20) * 1e6, divided by the least temperature 1e-5, is 2e31.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any

from forerun.errors import BadOption, shown
from forerun.registry import by_name, unknown


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Every field works with speculation, which never changes the output distribution.

    Where one text or several may be given, the field is a tuple of them afterwards. Raises BadOption, naming the field
    and its value, for anything that cannot be honoured.
    """

    max_tokens: int | None = 128  # tokens to generate at most; None = as far as max_seq_len goes
    min_tokens: int = 0  # end-of-sequence and stop ids cannot be drawn before this many tokens
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # keep the k most likely ids; 0 = all
    top_p: float = 1.0  # keep the shortest prefix of the sorted ids whose mass reaches top_p, in (0, 1]
    min_p: float = 0.0  # drop ids below min_p times the largest probability, in [0, 1]
    repetition_penalty: float = 1.0  # in [1e-6, 1e6]; over prompt and output
    presence_penalty: float = 0.0  # in [-2, 2]; over the output
    frequency_penalty: float = 0.0  # in [-2, 2]; over the output
    logit_bias: Mapping[int, float] | None = None  # id -> added to its logit, in [-1e20, 1e20]; -inf forbids the id
    bad_words: str | Sequence[str] = ()  # texts that must not be completed
    stop: str | Sequence[str] = ()  # texts that end the output; they are cut from `text`
    stop_token_ids: Sequence[int] = ()  # ids that end the output
    ignore_eos: bool = False  # go on past the model's end-of-sequence ids
    seed: int | None = None  # 64 bit; None = one is drawn and reported
    logprobs: int | None = None  # per token: its log-probability and this many alternatives, 0 to 20
    n: int = 1  # outputs for the prompt, 1 to 16384, with seeds derived from `seed`, or the n best of a beam search
    num_beams: int = 1  # width of a beam search, 1 to 64; needs temperature=0
    draft_beams: int | None = None  # width of the drafter's own search, from num_beams to 64; None = num_beams
    length_penalty: float = 1.0  # of a beam search, -16 to 16: a score is the sum of log-probabilities / length^it
    early_stopping: bool | str = False  # True = at num_beams finished texts; False, "never" = while one may get better
    acceptance: str | None = None  # a verification rule; None = match for a seed and temperature > 0, else ratio
    draft: str | None = None  # a drafter that the engine was started with, or none; None = the engine's own choice
    prediction: str | Sequence[int] | None = (
        None  # what the output may resemble, as text or ids: a hint, for speed alone
    )
    spec_length: int | None = None  # tokens drafted per step, whatever the engine's pacing; None = as it paces
    priority: int = 0  # lower numbers are served first, and preempted last
    cache_salt: str | None = None  # prompts share what is in the cache only with those of the same salt

    if not TYPE_CHECKING:  # checkers know the fields, and refuse other names themselves

        def __new__(cls, *_: Any, **given: Any) -> SamplingParams:
            """Raises BadOption for a name that is no field, with what it is called here or the nearest field."""
            for name in given.keys() - cls.__dataclass_fields__.keys():
                raise BadOption(no_field(name))
            return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            if (value := getattr(self, name)) is not default:  # what is left as it is needs no look
                self._accept(name, value, name == "max_tokens" or default is None)
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "at most max_tokens")
        for token, bias in (self.logit_bias or {}).items():
            ok = 0 <= token < _NUM_IDS and (bias == -math.inf or abs(bias) <= 1e20)
            _require(ok, "logit_bias", {token: bias}, "from ids in 0 .. 2**31 - 1 to numbers in [-1e20, 1e20], or -inf")
        self._check_beams()

    def _check_beams(self) -> None:
        """Raise BadOption for what a beam search cannot honour, and for its options without one."""
        if not self.searches:
            for name in ("length_penalty", "early_stopping"):
                if (value := getattr(self, name)) != _DEFAULTS[name]:
                    raise BadOption(f"{name}={shown(value)} belongs to a beam search: add num_beams, or drop it")
            return
        width = f"num_beams={self.num_beams}"
        search = width if self.num_beams > 1 else f"draft_beams={self.draft_beams}"
        if not self.greedy:
            raise BadOption(
                f"{search} is not possible with temperature={self.temperature}: a beam search draws nothing; add "
                "temperature=0"
            )
        _require(self.n <= self.num_beams, "n", self.n, f"at most {width}")
        draft_beams = self.draft_beams or self.num_beams
        _require(draft_beams >= self.num_beams, "draft_beams", draft_beams, f"at least {width}")
        for name, why in _NOT_WITH_BEAMS.items():
            if (value := getattr(self, name)) is not None:
                raise BadOption(f"{name}={shown(value)} is not possible with {search}: {why}; drop one of them")

    def _accept(self, name: str, value: Any, optional: bool) -> None:
        """Convert one field and check its range."""
        if value is None and optional:
            return
        convert, what = _KINDS[name]
        try:
            value = convert(value)
        except (TypeError, ValueError, OverflowError):
            _require(False, name, value, f"{what}, or None" if optional else what)
        object.__setattr__(self, name, value)
        if name in _RANGES:
            is_inside, what = _RANGES[name]
            _require(is_inside(value), name, value, what)

    @property
    def greedy(self) -> bool:
        """True where the next token is the argmax."""
        return self.temperature == 0

    @property
    def searches(self) -> bool:
        """True where the output is found by a beam search; one beam is one where draft_beams is given."""
        return self.num_beams > 1 or self.draft_beams is not None


_NOT_WITH_BEAMS = {
    "logprobs": "an output has its score and the sum of its log-probabilities",
    "acceptance": "all beams are compared, no token is accepted or rejected by itself",
    "prediction": "it is one text, and beams are several",
}

# Of the fields, for help() and completion: that of __new__ would say nothing.
SamplingParams.__signature__ = Signature(list(signature(SamplingParams.__init__).parameters.values())[1:])  # type: ignore[attr-defined]


def no_field(name: str) -> str:
    """Return the sentence for a name that is no field of SamplingParams."""
    known = SamplingParams.__dataclass_fields__
    return by_name(name, known, "LLM") or unknown("sampling parameter", name, known)


def _instance(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _wide(value: Any) -> int:
    """An integer that native code can take. Raises OverflowError for a wider one."""
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
    """A text. One that UTF-8 cannot hold (half a surrogate pair) is a ValueError."""
    text: str = _instance(value, str)
    text.encode()
    return text


def _number(value: Any) -> float:
    return float(_instance(value, numbers.Real))


def _texts(value: Any) -> tuple[str, ...]:
    """None, one text, or several."""
    if isinstance(value, Mapping):
        raise TypeError
    texts = (value,) if isinstance(value, str) else tuple(_instance(() if value is None else value, Iterable))
    return tuple(map(_text, texts))


def _biases(value: Any) -> dict[int, float]:
    return {_integer(token): _number(bias) for token, bias in _instance(value, Mapping).items()}


# What a field takes: how it becomes a plain Python value, and the words for a value that does not.
_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "logprobs"), (_wide, "an integer of 64 bits")),
    **dict.fromkeys(("n", "spec_length", "priority", "num_beams", "draft_beams"), (_wide, "an integer of 64 bits")),
    "length_penalty": (_number, "a number"),
    "early_stopping": (lambda value: value if value == "never" else _instance(value, bool), "True, False or 'never'"),
    "seed": (_integer, "an integer"),
    **dict.fromkeys(("temperature", "top_p", "min_p"), (_number, "a number")),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), (_number, "a number")),
    **dict.fromkeys(("stop", "bad_words"), (_texts, "a text or several, in valid UTF-8")),
    "stop_token_ids": (_integers, "several integers"),
    "prediction": (_text_or_ids, "a text in valid UTF-8 or several integers"),
    "logit_bias": (_biases, "a mapping from integers to numbers"),
    "ignore_eos": (lambda value: _instance(value, bool), "True or False"),
    **dict.fromkeys(("acceptance", "draft", "cache_salt"), (lambda value: _instance(value, str), "a text")),
}

MAX_BEAMS = 64
_NUM_IDS = 2**31  # no vocabulary is larger; which ids a model has is checked when a request is added

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_tokens": (lambda n: n >= 1, "at least 1, or None"),
    "min_tokens": (lambda n: n >= 0, "at least 0"),
    # Below 1e-5 a temperature only amplifies rounding: use 0, which is exactly greedy.
    "temperature": (lambda t: t == 0 or 1e-5 <= t < math.inf, "0 (greedy) or a finite number of at least 1e-5"),
    "top_k": (lambda k: k >= 0, "0 (all ids) or at least 1"),
    "top_p": (lambda p: 0 < p <= 1, "in (0, 1]"),
    "min_p": (lambda p: 0 <= p <= 1, "in [0, 1]"),
    "repetition_penalty": (lambda x: 1e-6 <= x <= 1e6, "in [1e-6, 1e6]"),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (lambda x: -2 <= x <= 2, "in [-2, 2]")),
    "stop_token_ids": (lambda ids: all(0 <= i < _NUM_IDS for i in ids), "ids in 0 .. 2**31 - 1"),
    "prediction": (
        lambda given: isinstance(given, str) or all(0 <= i < _NUM_IDS for i in given),
        "a text, or ids in 0 .. 2**31 - 1",
    ),
    **dict.fromkeys(("stop", "bad_words"), (all, "texts that are not empty")),
    "seed": (lambda n: 0 <= n < 2**64, "in 0 .. 2**64 - 1, or left out for one that is drawn"),
    "n": (lambda n: 1 <= n <= 16384, "in 1 .. 16384"),
    **dict.fromkeys(("num_beams", "draft_beams"), (lambda n: 1 <= n <= MAX_BEAMS, f"in 1 .. {MAX_BEAMS}")),
    "length_penalty": (lambda x: -16 <= x <= 16, "in [-16, 16]"),
    "spec_length": (lambda k: 1 <= k <= 64, "in 1 .. 64"),
    "logprobs": (lambda n: 0 <= n <= 20, "in 0 .. 20"),
}
_DEFAULTS = {name: SamplingParams.__dataclass_fields__[name].default for name in _KINDS}


def _require(ok: bool, name: str, value: object, what: str) -> None:
    if not ok:
        raise BadOption(f"{name}={shown(value)} is not possible: it must be {what}")
