"""Computes which token ids may come next in an output that must follow a grammar.

A grammar is a JSON schema, a regex, a choice of texts, or rules. llguidance compiles the grammar and computes which
tokens may follow a text (github.com/guidance-ai/llguidance). This file converts the grammars of requests, gives the
vocabulary to llguidance, limits compiling, and keeps the state of a grammar for each sequence and each path of its
drafts. A forbidden id has probability 0 in the distributions of the target and of draft models. So verification needs
no special case for grammars (docs/exactness.md).

Where the grammar allows only one text for the next characters, llguidance allows only the token with which the
tokenizer would begin that text, and no other tokenization.
"""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from forerun.errors import BadOption, shown
from forerun.params import telling
from forerun.sampling.behind import Behind
from forerun.sampling.matching import Matching
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Bits = npt.NDArray[np.bool_]

# The most characters of a grammar, characters of a schema, and values of a schema at all depths. A grammar within
# these limits compiles within about a second.
MOST_CHARS, MOST_SCHEMA_CHARS, MOST_VALUES = 1 << 16, 1 << 18, 1 << 12
MOST_REMAINDERS = 100_000  # the largest product of all multipleOf of a schema
# Compiled grammars are kept for later requests: their largest number, characters of text, and memory. The last number
# is the least memory that a grammar is taken to need.
MOST_KEPT = 64
MOST_KEPT_CHARS = 1 << 20
MOST_KEPT_BYTES = 512 << 20
LEAST_BYTES = 8 << 20
MOST_MASKS = 256  # of the paths of one step
# Processor time of the engine's thread, which all requests share: how much a request may take at once, how much more
# for each of its tokens, and how much drafts may take in one step. A mask of a schema takes a tenth of a millisecond.
BURST_S, TOKEN_S, DRAFT_S = 0.25, 0.005, 0.01
# The longest time of one mask, and how many first masks are tried before a grammar is accepted.
MOST_MASK_S, _WALKED = 0.05, 16
# The most characters of a short text, and of short rules: the time of repetitions in rules grows with the third power.
_SHORT_CHARS, _SHORT_RULES_CHARS = 1 << 11, 1 << 8
# Marks of texts that need products of automata: compiling such a text may take for ever, however short it is.
_PRODUCTS = re.compile(r"[&~]|\\u|allOf|pattern|multipleOf|x-guidance|%regex")
_END = b"<|end of grammar|>"  # the one end id that llguidance wants; where it is allowed, the model's end ids are, too
_SEPARATORS = {
    "compact": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    "spaced": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    # Any number of blanks would let a model that has lost its way write blanks for ever.
    "free": {"whitespace_flexible": True, "whitespace_pattern": r"\x20|\n[\x20\t]{0,64}"},
}


class Spelling(Protocol):
    """The part of a tokenizer (forerun.text.tokenizer.Tokenizer) that grammars need."""

    @property
    def token_bytes(self) -> Seq[bytes] | None: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class Allowed(NamedTuple):
    """The token ids that may come next.

    bits [num_ids]: for each id, whether it may come next. only: the id, if exactly one id may come next.
    """

    bits: Bits
    only: int | None


class Vocabulary:
    """Holds the tokens of one tokenizer in llguidance's form, and a cache of the grammars compiled for these tokens.

    Raises BadOption where the tokenizer does not tell which bytes a token stands for.
    """

    def __init__(self, tokenizer: Spelling) -> None:
        from llguidance import LLTokenizer

        tokens = tokenizer.token_bytes
        if tokens is None:
            raise BadOption(
                "no output of this model can be held to a grammar: its tokenizer does not say which bytes a token "
                "stands for; leave json_schema, json_object, regex, choice and grammar out"
            )
        self.num_ids = len(tokens)
        self.special_ids = tokenizer.special_ids
        self.tokens: LLTokenizer = LLTokenizer(_Wrapper(tokenizer, tokens))  # type: ignore[arg-type]
        self._kept: OrderedDict[tuple[str, str], Grammar | BadOption] = OrderedDict()
        self._lock = threading.Lock()

    def compiled(self, params: SamplingParams, num_bytes: int = LEAST_BYTES) -> Grammar | None:
        """Return the compiled grammar of a request; None where the request has no grammar.

        Any thread may call this method. A grammar that is in the cache is not compiled again. num_bytes: the measured
        memory of the compiled grammar, in bytes; at least LEAST_BYTES are counted. Raises BadOption for a grammar that
        llguidance cannot compile, or that takes too much time or memory.
        """
        if (key := params.constraint) is None:
            return None
        if (kept := self._find(key)) is not None:
            return kept
        grammar = Grammar(key, self)  # without the lock: other requests go on
        grammar.num_bytes = max(LEAST_BYTES, num_bytes)
        self._keep(key, grammar)
        return grammar

    def has(self, key: tuple[str, str]) -> bool:
        """Return whether the cache has the compiled grammar of `key`. key: as in `Grammar`.

        Raises BadOption if the cache has a refusal of this grammar (`refuse`).
        """
        return self._find(key) is not None

    def refuse(self, key: tuple[str, str], refusal: BadOption) -> None:
        """Store the error `refusal` for the grammar of `key`. Later requests for this grammar raise it at once."""
        self._keep(key, refusal)

    def forget(self, grammar: Grammar) -> None:
        """Remove a compiled grammar from the cache, so that the next request compiles the grammar again.

        Used where the grammar's lexer, which all its requests share, has failed.
        """
        with self._lock:
            if self._kept.get(grammar.key) is grammar:
                del self._kept[grammar.key]

    def _find(self, key: tuple[str, str]) -> Grammar | None:
        with self._lock:
            if (entry := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
        if isinstance(entry, BadOption):
            raise BadOption(str(entry))
        return entry

    def _keep(self, key: tuple[str, str], entry: Grammar | BadOption) -> None:
        with self._lock:
            self._kept[key] = entry
            while (
                len(self._kept) > MOST_KEPT
                or sum(len(text) for _, text in self._kept) > MOST_KEPT_CHARS
                or sum(one.num_bytes for one in self._kept.values() if isinstance(one, Grammar)) > MOST_KEPT_BYTES
            ):
                self._kept.popitem(last=False)


_vocabularies: weakref.WeakKeyDictionary[Spelling, Vocabulary] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def vocabulary(tokenizer: Spelling) -> Vocabulary:
    """Return the Vocabulary of a tokenizer. The first call takes some tenths of a second.

    Raises BadOption where the tokenizer does not tell which bytes a token stands for.
    """
    with _making:
        if tokenizer not in _vocabularies:
            _vocabularies[tokenizer] = Vocabulary(tokenizer)
        return _vocabularies[tokenizer]


class _Wrapper:
    """Adapts a tokenizer to the interface of llguidance: the bytes of each token, special ids, and a call to encode."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Spelling, tokens: Seq[bytes]) -> None:
        self.tokens = [*tokens, _END]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*sorted(tokenizer.special_ids), self.eos_token_id]
        self._tokenizer = weakref.ref(tokenizer)  # weak: the tokenizer is the key of a weak dictionary that holds this
        self._special = tokenizer.special_ids
        self._guard = tokenizer.encode("\x02", add_special_tokens=False)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the token ids of `text` as it is encoded within a longer text.

        The blank that some tokenizers add before a whole text is left out. The name of a special token is encoded as
        plain text.
        """
        tokenizer = self._tokenizer()
        given = text.decode() if isinstance(text, bytes) else text
        if tokenizer is None or not given:
            return []
        ids = tokenizer.encode("\x02" + given, add_special_tokens=False)
        rest = ids[len(self._guard) :]
        if ids[: len(self._guard)] != self._guard:
            rest = tokenizer.encode(given, add_special_tokens=False)
        if self._special.isdisjoint(rest) or len(given) == 1:
            return rest
        return [*self(given[:1]), *self(given[1:])]  # the name of a special token, which is to be a text here


_PANIC = "llguidance, which reads it, fails on it"  # in place of the message of Rust's code when it panics
# Matches llguidance's message about a schema inside a grammar, such as a tool's: the reason, and the schema's line.
_IN_SCHEMA = re.compile(r"failed to compile JSON schema: ((?s:.*?))\n\s+\d+ \|(?s:.*)%json (.*)\n\s*\^")


class Grammar:
    """Holds one grammar, compiled for a vocabulary. key: (kind, text), as in `SamplingParams.constraint`.

    Raises BadOption where llguidance refuses the grammar, or where the grammar takes too much time or memory.
    """

    def __init__(self, key: tuple[str, str], vocabulary: Vocabulary) -> None:
        from llguidance import LLMatcher

        self.kind, text = self.key = key
        self.vocabulary, self.num_bytes = vocabulary, LEAST_BYTES
        _refuse_multiples(self.name, text)
        most = MOST_SCHEMA_CHARS if self.name == "json_schema" else MOST_CHARS
        if len(text) > most:
            raise BadOption(f"{self.name} has {len(text):,} characters: it must have at most {most:,}")
        try:
            self._start = LLMatcher(vocabulary.tokens, _source(self.kind, text), log_level=0, limits=_limits())
        except BadOption:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust's code
                raise
            why = str(error)[:200] if isinstance(error, Exception) else _PANIC
            raise BadOption(f"{self.name} cannot be honoured: {why}; change it, or leave it out") from None
        self._refuse(self._start)
        self._walk()

    def _walk(self) -> None:
        """Raise BadOption where the masks along a random path of at most 16 tokens take too long.

        A mask, and the reading of a token, may each take at most MOST_MASK_S seconds of processor time. They are timed
        before a request uses the grammar, because slow masks would delay the engine's steps.
        """
        matcher = self.matcher()
        chance = np.random.default_rng(0)
        for _ in range(_WALKED):
            begun_s = time.thread_time()
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            mask_s = time.thread_time() - begun_s
            if matcher.is_stopped() or not bits.any():
                break
            some = chance.permutation(np.flatnonzero(bits))[0]
            place = chance.permutation(np.flatnonzero(np.unpackbits(bits[some : some + 1], bitorder="little")))[0]
            begun_s = time.thread_time()
            if mask_s < MOST_MASK_S and not matcher.try_consume_tokens([int(8 * some + place)]):
                break
            if max(mask_s, time.thread_time() - begun_s) > MOST_MASK_S:
                raise BadOption(
                    f"{self.name} cannot be honoured: to say which tokens may come next takes more than "
                    f"{1e3 * MOST_MASK_S:g} ms; make it simpler, with fewer ways to read one text"
                )
        self._refuse(matcher)

    def start(self, end_ids: frozenset[int], num_prompt_tokens: int) -> GrammarState:
        """Return the state at the beginning of a sequence's output. end_ids: token ids that end the output."""
        return GrammarState(self, end_ids, num_prompt_tokens)

    def matcher(self) -> LLMatcher:
        """Return a new matcher of llguidance, at the beginning of the grammar."""
        return self._start.deep_copy()

    def _refuse(self, matcher: LLMatcher) -> None:
        """Raise BadOption where a matcher has failed, because the grammar is wrong or exceeds llguidance's limits."""
        if matcher.is_error():
            name, why = self.name, matcher.get_error()
            if name == "grammar" and (match := _IN_SCHEMA.search(why)):
                name, why = "a JSON schema", f"{match[1]}, in {match[2]:.160}"
            why = _PANIC if why.startswith("panic") else " ".join(why.replace("<non-verbose/>", "").split())[:300]
            if "oneOf constraints" in why:
                why = "a text may match two ways of oneOf, which is not told: write anyOf, if that is as good"
            raise BadOption(f"{name} cannot be honoured: {why}; change it, or leave it out")

    check = _refuse

    @property
    def name(self) -> str:
        """The name of the request's field that holds the grammar."""
        return self.kind.partition(":")[0]


@dataclass(eq=False)
class GrammarState:
    """Holds the state of a grammar for one sequence: after the committed tokens, or after a path of drafted tokens.

    Only the engine's thread uses a state. Between calls, tokens may be appended to `committed`, but its earlier tokens
    must not change.
    """

    grammar: Grammar
    end_ids: frozenset[int]
    num_prompt_tokens: int

    def __post_init__(self) -> None:
        self.failure: BadOption | None = None  # set once the limits are exceeded; the request ends with this error
        self._at = Matching(self.grammar.matcher, self.num_prompt_tokens)
        self._masks: dict[tuple[int, ...], Allowed] = {}  # by path after the first `_num_committed` tokens
        self._num_committed = -1
        # The request's remaining time; the time since the last committed token, and in the step before; the number of
        # masks since the last committed token.
        self._left_s = BURST_S
        self._step_s = 0.0
        self._last_step_s = 0.0
        self._num_masks = 0
        size = self.grammar.vocabulary.num_ids
        self._ends = [i for i in sorted(self.end_ids) if i < size]
        special = self.grammar.vocabulary.special_ids
        self._text_ends = [i for i in self._ends if i not in special]

    @property
    def may_draft(self) -> bool:
        """Whether drafters may query the grammar.

        True if the grammar has not failed, and took less than DRAFT_S seconds in this step and in the step before.
        """
        return self.failure is None and max(self._step_s, self._last_step_s) < DRAFT_S

    def allowed(self, committed: Seq[int], drafted: Seq[int] = ()) -> Allowed:
        """Return the token ids that may follow `committed` (prompt included) and `drafted`.

        End ids are allowed where the grammar may end. An end id that is a special token is also allowed where the
        grammar names this token. Raises BadOption if the grammar refuses one of the given tokens, or exceeds its
        limits.
        """
        if len(committed) != self._num_committed or len(self._masks) > MOST_MASKS:
            self._masks, self._num_committed = {}, len(committed)
        path = tuple(drafted)
        if (allowed := self._masks.get(path)) is None:
            if not self._go(committed, path):
                raise BadOption(f"the {self.grammar.kind} of the request refuses the text so far")
            allowed = self._masks[path] = self._mask(bool(path))
        return allowed

    def takes(self, committed: Seq[int], drafted: Seq[int]) -> bool:
        """Return whether the grammar allows the text of `drafted` after `committed`, under any tokenization."""
        return self._go(committed, drafted)

    def is_over(self, committed: Seq[int], drafted: Seq[int] = ()) -> bool:
        """Return whether no token can follow `committed` and `drafted`, because their text is complete by the grammar.

        Returns False where this computation exceeds the grammar's limits. The request then ends later, with `failure`.
        """
        try:
            return self._go(committed, drafted) and self._at.matcher.is_stopped() and not self._at.matcher.is_error()
        except BadOption:
            return False

    def forced(self, committed: Seq[int], drafted: Seq[int] = ()) -> list[int]:
        """Return the tokens that must follow `committed` and `drafted`; [] where several texts are possible.

        The tokens end where the grammar allows a second text, or where the text has a second tokenization. Returns []
        also where `may_draft` is False, and where the grammar refuses the given tokens or exceeds its limits.
        """
        try:
            if not self.may_draft or not self._go(committed, drafted):
                return []
            with self._timed(is_draft=True):
                return list(self._at.matcher.compute_ff_tokens())
        except BadOption:  # the error comes again where the row is judged
            return []

    def behind(self, committed: Seq[int], sure: Seq[int]) -> Behind:
        """Return this constraint with the forced tokens `sure` treated as committed. This state does not change."""
        return Behind(self, committed, tuple(sure))

    def _go(self, committed: Seq[int], drafted: Seq[int]) -> bool:
        """Move the matcher to the end of `committed` and `drafted`, and return whether the grammar allows these tokens.

        Raises `failure` if it is set, and BadOption where the matcher fails or the time limit is exceeded.
        """
        if self.failure is not None:
            raise self.failure
        had = self._at.num_sure
        with self._timed(bool(drafted)):
            is_there = self._at.go(committed, drafted)
        num_sure = len(committed) - self.num_prompt_tokens
        if num_sure > had:
            self._left_s = min(BURST_S, self._left_s + TOKEN_S * (num_sure - had))
            self._last_step_s = self._step_s
            self._step_s = 0.0
            self._num_masks = 0
        self._check(bool(drafted))
        return is_there

    def _mask(self, is_draft: bool) -> Allowed:
        size = self.grammar.vocabulary.num_ids
        with self._timed(is_draft):
            packed = np.frombuffer(self._at.matcher.compute_bitmask(), np.uint8)
        self._num_masks += 1
        self._check(is_draft)
        bits = np.unpackbits(packed, bitorder="little").astype(np.bool_)
        may_end = bool(bits[size])
        bits = bits[:size]
        bits[self._text_ends] = False
        if may_end:
            bits[self._ends] = True
        num = int(np.count_nonzero(bits))
        return Allowed(bits, int(bits.argmax()) if num == 1 else None)

    @contextmanager
    def _timed(self, is_draft: bool) -> Iterator[None]:
        begun_s = time.thread_time()
        yield
        taken_s = time.thread_time() - begun_s
        self._step_s += taken_s
        self._left_s -= 0.0 if is_draft else taken_s  # drafts have their own limit, and no request ends by them

    def _check(self, is_draft: bool) -> None:
        """Raise BadOption where the matcher has failed, or where the request's grammar has taken too much time.

        is_draft: whether the matcher has read drafted tokens. If not, the error is kept as `failure` and ends the
        request. After drafted tokens the error is not kept, because these tokens may never be committed.
        """
        try:
            self.grammar.check(self._at.matcher)
            if (self._left_s if not is_draft else BURST_S + TOKEN_S * self._num_masks - self._step_s) < 0:
                raise BadOption(
                    f"{self.grammar.name} cannot be honoured: to say which tokens may come next takes more than "
                    f"{1e3 * TOKEN_S:g} ms a token; make it simpler, with fewer ways to read one text"
                )
        except BadOption as failure:
            if self._at.matcher.is_error():
                self.grammar.vocabulary.forget(self.grammar)
            if not is_draft:
                self.failure = failure
            elif self._at.matcher.is_error():  # a failed matcher stays failed: a new one reads the committed tokens
                self._at.begin_again()
            raise


def masked(row: npt.NDArray[Any], allowed: Allowed) -> npt.NDArray[Any]:
    """Return a copy of the logits `row` [V] with -inf for every id that is not in `allowed`."""
    bits = allowed.bits[: len(row)]
    out = np.full_like(row, -np.inf)
    np.copyto(out[: len(bits)], row[: len(bits)], where=bits)
    return out


# ------------------------------------------------------------------------------------------ what requests may give


def is_short(key: tuple[str, str]) -> bool:
    """Return whether a grammar is short and simple, so that it surely compiles quickly. key: as in `Grammar`."""
    kind, text = key
    most = _SHORT_RULES_CHARS if kind == "grammar" else _SHORT_CHARS
    return kind == "choice" or (len(text) <= most and _PRODUCTS.search(text) is None)


def _source(kind: str, text: str) -> str:
    """Return a grammar in llguidance's own form. kind, text: as in `SamplingParams.constraint`. Raises BadOption."""
    from llguidance import LLMatcher

    name, _, whitespace = kind.partition(":")
    if name in ("json_schema", "json_object"):
        whole = json.loads(text)
        _refuse_values(name, whole)
        text = json.dumps(_telling(whole), ensure_ascii=False)
        schema = text if text.lstrip().startswith("{") else '{"anyOf": [' + text + "]}"
        return LLMatcher.grammar_from_json_schema(schema, overrides=_SEPARATORS[whitespace])  # type: ignore[arg-type]
    if name == "regex":
        return LLMatcher.grammar_from_regex(_without_anchors(text))
    if name == "choice":
        texts = [json.dumps(one, ensure_ascii=False) for one in json.loads(text)]
        return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
    return LLMatcher.grammar_from_lark(_lark(text))


def _refuse_values(name: str, schema: Any) -> None:
    """Raise BadOption for a schema with more than MOST_VALUES values, or with bounds that llguidance misreads.

    name: the request's field that holds the schema.
    """
    num, waiting = 0, [schema]
    while waiting:
        one = waiting.pop()
        num += 1
        waiting.extend(one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
        if isinstance(one, dict):
            _refuse_bounds(name, one)
    if num > MOST_VALUES:
        raise BadOption(f"{name} has {num:,} values: it must have at most {MOST_VALUES:,}")


def _telling(schema: Any) -> Any:
    """Return a copy of a schema that has only the entries that restrict the text, at all depths."""
    if isinstance(schema, list):
        return [_telling(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: value if key in ("enum", "const") else _telling(value) for key, value in telling(schema).items()}


def _refuse_bounds(name: str, schema: Mapping[str, Any]) -> None:
    """Raise BadOption for bounds such as -4.5 <= x < -4, because llguidance 1.9.1 allows x = -4 there."""
    below = schema.get("exclusiveMaximum")
    if not isinstance(below, int | float) or below >= 0 or below != int(below):
        return
    for least in (schema.get("minimum"), schema.get("exclusiveMinimum")):
        if isinstance(least, int | float) and below - 1 < least < below:
            raise BadOption(
                f"{name} asks for numbers from {least} to below {below}, which is not possible: give maximum in the "
                "place of exclusiveMaximum, or a smaller minimum"
            )


def _refuse_multiples(name: str, text: str) -> None:
    """Raise BadOption where the product of the multipleOf values in `text` is above MOST_REMAINDERS.

    The automaton counts remainders modulo this product, so compiling it would take minutes.
    """
    plain = re.sub(r"\\u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), text)
    product = 1
    for digits in set(re.findall(r'"multipleOf"\s*:\s*[+-]?([0-9.]+)', plain)):
        product *= int(digits.replace(".", "") or 1) or 1
        if product > MOST_REMAINDERS:
            raise BadOption(
                f"{name} has multipleOf whose product is above {MOST_REMAINDERS:,}: ask for smaller numbers"
            )


def _without_anchors(text: str) -> str:
    """Return a regex without ^ and $ around it, because the whole output must match the regex anyway."""
    text = text.removeprefix("^")
    if text.endswith("$"):
        slashes = len(text[:-1]) - len(text[:-1].rstrip("\\"))
        text = text[:-1] if slashes % 2 == 0 else text
    return text


def _lark(text: str) -> str:
    """Return a grammar in Lark's form. A grammar of llama.cpp (GBNF), which has ::= in its rules, is converted.

    Raises BadOption for a grammar that cannot be converted.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises errors of several kinds
        raise BadOption(f"grammar={shown(text)} is no grammar in GBNF: {str(error)[:200]}") from None


def _limits() -> LLParserLimits:
    """Return llguidance's limits: tens of megabytes for a compiled grammar, and some milliseconds for a mask."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
