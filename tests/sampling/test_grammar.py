"""Grammars: what each kind allows, where it ends, the way of a state along paths, and what is refused at the door."""

import contextlib
import itertools
import json
import random
import re
import time

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from forerun.errors import BadOption
from forerun.sampling import History, likeliest, probs
from forerun.sampling.grammar import MOST_SCHEMA_CHARS, GrammarState, vocabulary
from forerun.text.tokenizer import Tokenizer
from forerun.types import SamplingParams
from refusals import refusal
from tiny import byte_tokenizer

END = 0
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["x", "yy"]}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer("<|end|>").save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def walk(tokenizer, end_ids: frozenset[int] = frozenset({END}), num_prompt_tokens: int = 0, **fields) -> GrammarState:
    return vocabulary(tokenizer).compiled(SamplingParams(**fields)).start(end_ids, num_prompt_tokens)


def texts(tokenizer, own: GrammarState, text: str = "") -> set[str]:
    """What may follow a text: characters, and "" for the end."""
    bits = own.allowed([], tokenizer.encode(text)).bits
    return {"" if i == END else tokenizer.decode([i]) for i in np.flatnonzero(bits).tolist()}


def takes(tokenizer, own: GrammarState, text: str) -> bool:
    """Whether a text is allowed to its end, and may end there."""
    ids = tokenizer.encode(text)
    try:
        return all(own.allowed([], ids[:i]).bits[id_] for i, id_ in enumerate([*ids, END]))
    except BadOption:
        return False


# ---------------------------------------------------------------------------------------------------------- each kind


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"regex": "(yes|no)[0-9]{2}"}, ["yes00", "no42"], ["yes", "no4", "no422", "maybe"]),
        ({"regex": "^a+$"}, ["a", "aaaa"], ["", "b", "^a$"]),
        ({"regex": r"a\$"}, ["a$"], ["a", "a\\"]),
        ({"choice": ["red", "dark red", "é\"\n"]}, ["red", "dark red", "é\"\n"], ["re", "dark", "redd", "blue"]),
        ({"json_schema": SCHEMA}, ['{"name": "x", "n": 3}', '{"name":"yy","n":-12}', '{\n  "name": "x",\n  "n": 0\n}'],
         ['{"name": "z", "n": 3}', '{"n": 3, "name": "x"}', '{"name": "x"}', '{"name":   "x", "n": 3}', "{}"]),
        ({"json_schema": json.dumps(SCHEMA), "json_whitespace": "compact"}, ['{"name":"x","n":3}'],
         ['{"name": "x", "n": 3}']),
        ({"json_schema": SCHEMA, "json_whitespace": "spaced"}, ['{"name": "x", "n": 3}'], ['{"name":"x","n":3}']),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "3", '{"a": nul}', ""]),
        ({"json_schema": True}, ["3", "[1, 2]", '"é"'], ["x", "[1,]"]),
        ({"grammar": 'start: "a" b+\nb: "b" | "c"'}, ["ab", "acb"], ["a", "ba", "abd"]),
        ({"grammar": 'root ::= "a" b+\nb ::= [bc] | "d"'}, ["ab", "acd"], ["a", "ae"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_each_kind_allows_its_texts_and_no_others(tokenizer, fields, right, wrong):
    own = walk(tokenizer, **fields)
    assert [text for text in right if not takes(tokenizer, own, text)] == []
    assert [text for text in wrong if takes(tokenizer, own, text)] == []


@pytest.mark.parametrize("low", [-22, -21.25, -21, -0.5, 0, 0.5, 20.5])
@pytest.mark.parametrize("high", [-21, -20.75, -0.25, 0, 21, 21.5, 100])
def test_no_number_beyond_its_bounds_is_allowed(tokenizer, low, high):
    """Bounds may be refused, and never be read wrongly."""
    for lowest, highest in itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        try:
            own = walk(tokenizer, json_schema={"type": "number", lowest: low, highest: high})
        except BadOption:
            continue
        beyond = [low - 0.25, high + 0.25, *[low] * (lowest != "minimum"), *[high] * (highest != "maximum")]
        for text in {spelled for value in beyond for spelled in (f"{value:g}", f"{float(value)}", f"{value:.2f}")}:
            assert not takes(tokenizer, own, text), (lowest, highest, text)


def test_an_end_may_come_where_the_grammar_may_end_and_nowhere_else(tokenizer):
    own = walk(tokenizer, choice=["a", "ab"])
    assert texts(tokenizer, own) == {"a"}
    assert texts(tokenizer, own, "a") == {"", "b"}
    assert texts(tokenizer, own, "ab") == {""}
    assert [own.is_over(tokenizer.encode(text)) for text in ("", "a", "ab")] == [False, False, True]
    without = walk(tokenizer, frozenset(), choice=["a", "ab"])
    assert texts(tokenizer, without, "a") == {"b"}
    assert texts(tokenizer, without, "ab") == set(), "no id ends this request"


def test_a_stop_id_that_is_a_text_ends_no_text_too_early(tokenizer):
    (comma,) = tokenizer.encode(",")
    own = walk(tokenizer, frozenset({comma}), regex="a,?b(,c)?")
    assert texts(tokenizer, own, "a") == {"b"}
    assert texts(tokenizer, own, "ab") == {","}, "as the end, and there alone"


def test_the_prompt_is_no_part_of_the_text(tokenizer):
    own, prompt = walk(tokenizer, num_prompt_tokens=3, regex="ab"), tokenizer.encode("xyz")
    assert own.allowed(prompt).only == tokenizer.encode("a")[0]
    assert own.allowed([*prompt, *tokenizer.encode("a")]).only == tokenizer.encode("b")[0]


def test_behind_a_refused_path_there_is_nothing_and_the_state_goes_on(tokenizer):
    own = walk(tokenizer, regex="abc")
    assert "the regex of the request refuses the text" in refusal(BadOption, own.allowed, [], tokenizer.encode("ax"))
    assert texts(tokenizer, own, "ab") == {"c"}


# Too many ways behind "x", and further away than what is tried when a grammar is compiled.
MANY = 'start: "' + "a" * 30 + '" ("x" rest | "b")\nrest: ' + " ".join(["x"] * 3000) + '\nx: "x"?'


def test_what_takes_too_much_behind_a_draft_does_not_end_a_request(tokenizer):
    own, (a, b, x) = walk(tokenizer, grammar=MANY), (tokenizer.encode(text)[0] for text in "abx")
    begun = [a] * 30
    assert refusal(BadOption, own.allowed, begun, [x]).startswith("grammar cannot be honoured")
    assert own.failure is None
    assert own.allowed(begun).bits[b]
    assert own.allowed([*begun, b]).only == END
    own = walk(tokenizer, grammar=MANY)
    assert not own.is_over([*begun, x])
    assert "grammar cannot be honoured" in str(own.failure)
    assert "non-verbose" not in str(own.failure)  # a word of the library's, for whoever reads its logs
    assert (own.forced([*begun, x]), own.may_draft) == ([], False)
    assert refusal(BadOption, own.allowed, [*begun, x]).startswith("grammar cannot be honoured")


def test_a_request_has_so_much_time_for_its_grammar(tokenizer, monkeypatch):
    """By a clock that counts: with 3 ms an answer it goes on for ever, with 8 ms until its time is over."""
    for tick, is_fast in ((0.0015, True), (0.004, False)):
        clock = itertools.count()
        monkeypatch.setattr(time, "thread_time", lambda clock=clock, tick=tick: tick * next(clock))
        own, text = walk(tokenizer, regex="a*"), tokenizer.encode("a") * 400
        num = 0
        with contextlib.suppress(BadOption):
            for num in range(len(text)):
                own.allowed(text[:num])
        assert (own.failure is None, num == 399) == (is_fast, is_fast)
        assert is_fast or 60 < num < 200


def test_what_must_come_is_forced(tokenizer):
    own = walk(tokenizer, json_schema=SCHEMA, json_whitespace="spaced")
    assert tokenizer.decode(own.forced([])) == '{"name": "'
    assert tokenizer.decode(own.forced([], tokenizer.encode('{"name": "y'))) == 'y", "n": '


# ------------------------------------------------------------------------------------------------------- the pipeline


def history(tokenizer, text: str = "", drafted: str = "", end_ids: frozenset[int] = frozenset({END}), **fields):
    own = walk(tokenizer, end_ids, **{k: v for k, v in fields.items() if k in ("regex", "choice")})
    return History(tokenizer.encode(text), 0, end_ids, drafted=tokenizer.encode(drafted), grammar=own)


def test_a_forbidden_id_has_probability_0_whatever_its_logit(tokenizer):
    params = SamplingParams(regex="[ab]c?")
    logits = np.random.default_rng(1).standard_normal(257, np.float32) * 9
    a, b, c = (tokenizer.encode(text)[0] for text in "abc")
    for drafted, allowed in (("", [a, b]), ("a", [END, c]), ("bc", [END])):
        made = probs(logits, params, history(tokenizer, drafted=drafted, regex=params.regex))
        assert [i for i in range(257) if made.at(i) > 0] == sorted(allowed)
        weights = softmax(logits[sorted(allowed)].astype(np.float64))
        assert [made.at(i) for i in sorted(allowed)] == pytest.approx(weights.tolist(), rel=1e-5)
        greedy = SamplingParams(regex=params.regex, temperature=0)
        made = probs(logits, greedy, history(tokenizer, drafted=drafted, regex=params.regex))
        assert made.point == max(allowed, key=logits.__getitem__)


def test_a_beam_search_scores_what_is_allowed_alone(tokenizer):
    logits = np.random.default_rng(1).standard_normal(257, np.float32)
    a, b = (tokenizer.encode(text)[0] for text in "ab")
    params = SamplingParams(regex="[ab]", temperature=0, num_beams=4)
    ids, scores = likeliest(logits, params, history(tokenizer, regex="[ab]"), 4)
    assert sorted(ids) == sorted([a, b])
    expected = log_softmax(logits.astype(np.float64))[ids]
    assert scores == pytest.approx(expected.tolist(), abs=1e-6), "and normalises nothing"


@pytest.mark.parametrize("also", [{}, {"temperature": 0}], ids=str)
def test_a_row_that_is_left_empty_says_so(tokenizer, also):
    assert tokenizer.encode("a") == [65]
    params = SamplingParams(regex="ab", logit_bias={65: -float("inf")}, **also)
    with pytest.raises(BadOption, match="the grammar forbid every id"):
        probs(np.zeros(257, np.float32), params, history(tokenizer, regex="ab"))


# ------------------------------------------------------------------------------------------------------- at the door


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"regex": "a", "choice": ["b"]}, "regex and choice are two grammars for one output"),
        ({"json_object": True, "json_schema": {}}, "json_schema and json_object are two grammars"),
        ({"json_schema": "{"}, "json_schema='{' is not possible"),
        ({"json_schema": [1]}, "json_schema=\\[1\\] is not possible"),
        ({"json_schema": "[1]"}, "it must be a JSON schema"),
        ({"json_schema": "{bad"}, "the text is no JSON: Expecting property name"),
        ({"json_schema": {"const": float("nan")}}, "json_schema=.* is not possible"),
        ({"regex": ""}, "regex='' is not possible: it must be a text that is not empty"),
        ({"regex": 3}, "regex=3 is not possible"),
        ({"grammar": "\ud800"}, "grammar=.* is not possible"),
        ({"choice": ["a", ""]}, "choice=.* is not possible: it must be a text that is not empty"),
        ({"json_whitespace": "tabs"}, "json_whitespace='tabs' is not possible: it must be free, compact or spaced"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_grammar_is_refused_before_anything_is_compiled(fields, says):
    with pytest.raises(BadOption, match=says):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"regex": "a("}, "^regex cannot be honoured"),
        ({"regex": "(?=a)b"}, "^regex cannot be honoured"),
        ({"grammar": "start: missing"}, "^grammar cannot be honoured"),
        (
            {"grammar": 'start: a\na: %json {"uniqueItems": true}\nb: "c"'},
            r'^a JSON schema cannot be honoured: Unimplemented keys: \["uniqueItems"\], in {"uniqueItems": true}',
        ),
        ({"json_schema": {"type": "string", "format": "iri"}}, r"^json_schema cannot be honoured: Unknown format: iri"),
        ({"grammar": 'root ::= "a" ('}, "is no grammar in GBNF"),
        (
            {"grammar": 'start: (text "b")+\ntext[lazy]: /[ac]*/'},
            "^grammar cannot be honoured: llguidance, which reads it, fails on it; change it, or leave it out$",
        ),
        ({"json_schema": {"type": "strange"}}, "^json_schema cannot be honoured"),
        ({"json_schema": {"oneOf": [{"type": "object"}, {"type": "object", "properties": {}}]}}, "write anyOf"),
        ({"json_schema": {"oneOf": 3}}, "oneOf must be an array"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "^json_schema cannot be honoured.*uniqueItems"),
        ({"json_schema": False}, "^json_schema cannot be honoured"),
        ({"json_schema": {"enum": ["x" * MOST_SCHEMA_CHARS]}}, "^json_schema has 262,1.. characters"),
        ({"json_schema": {"enum": list(range(5_000))}}, "^json_schema has 5,00. values"),
        ({"regex": "a" * 70_000}, "^regex has 70,000 characters"),
        ({"json_schema": '{"items": ' * 300 + "true" + "}" * 300}, "^json_schema cannot be honoured.*recursion"),
        ({"json_schema": {"items": {"minimum": -4.5, "exclusiveMaximum": -4.0}}}, "^json_schema asks for numbers"),
        ({"json_schema": {"type": "integer", "multipleOf": 999_983}}, "^json_schema has multipleOf"),
        ({"grammar": 'start: %json {"multiple\\u004ff": 999983}'}, "^grammar has multipleOf"),
        ({"json_schema": {"$ref": "http://example.com/x.json"}}, "^json_schema cannot be honoured"),
    ],
    ids=lambda value: re.sub(r"\W+", "_", str(value))[:30],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_when_it_is_compiled(tokenizer, fields, says):
    with pytest.raises(BadOption, match=says):
        vocabulary(tokenizer).compiled(SamplingParams(**fields))


@pytest.mark.parametrize(
    ("schema", "most", "value"),
    [({"type": "string"}, "maxLength", "abc"), ({"type": "array"}, "maxItems", [1]), ({}, "maxProperties", {"a": 1})],
)
def test_a_maximum_that_no_text_reaches_says_nothing(tokenizer, schema, most, value):
    """Nobody can count to it, and a property may have its name."""
    whole = {"type": "object", "properties": {most: {**schema, most: 2**40}}, "required": [most]}
    assert takes(tokenizer, walk(tokenizer, json_schema=whole), json.dumps({most: value}))
    least = {"type": "string", "minLength": 2**40}
    assert texts(tokenizer, walk(tokenizer, json_schema=least), '"abc') & {"d", '"'} == {"d"}


def hostile() -> list[dict]:
    """200 grammars that are meant to take long, to take much, or to break what reads them."""
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40))
    text = {"type": "string"}
    found: list[dict] = [
        {"json_schema": '{"type": "array", "items": ' * 2000 + "true" + "}" * 2000},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"json_schema": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
        {"json_schema": {"type": "array", "minItems": 10**9, "items": text}},
        {"json_schema": {"type": "string", "minLength": 10**9}},
        {"json_schema": {"type": "string", "minLength": -1}},
        {"json_schema": {"type": "integer", "multipleOf": 999_999_937}},
        {"json_schema": {"type": "integer", "multipleOf": 0}},
        {"json_schema": {"type": "number", "minimum": 5, "maximum": 4}},
        {"json_schema": {"type": "number", "minimum": -1e300, "maximum": 1.23456789e300}},
        {"json_schema": {"allOf": [{"multipleOf": n, "type": "integer"} for n in (7, 11, 13, 17, 19, 23)]}},
        {"json_schema": {"anyOf": [{"type": "object", "properties": {f"p{i}": text}} for i in range(500)]}},
        {"json_schema": {"type": "object", "properties": {f"p{i}": text for i in range(1500)}}},
        {"json_schema": {"not": text}},
        {"json_schema": {"$ref": "file:///etc/passwd"}},
        {"json_schema": {"$id": "http://127.0.0.1:1/x", "$ref": "y"}},
        {"json_schema": {"type": ["string", "no type"]}},
        {"json_schema": {"properties": []}},
        {"json_schema": {"x-guidance": {"whitespace_flexible": "maybe"}}},
        {"grammar": "start: a\na: a a a | a a | " + '"a" | ""'},
        {"grammar": f'start: r0\n{rules}\nr40: "a"'},
        {"grammar": "start: /(?s:.*)/ /(?s:.*)/ /(?s:.*)/ " + '"x"'},
        {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
        {"grammar": "root ::= " + " ".join(['"a"'] * 16_000)},
        {"grammar": "root ::= root"},
        {"grammar": "start: %json {"},
        {"grammar": "\x00"},
        {"choice": [f"value number {i * 7919}" for i in range(3000)]},
        {"choice": ["a" * n for n in range(1, 300)]},
    ]
    repeated = ("(a+)+", "(a|a|aa)*", "(.*)*", "[a-z]{1000}", "(a{1,99}){1,99}", "x?" * 50)
    parts = (*repeated, r"\p{L}{1,500}", ".{0,999}", "(?i:ß)", "[^a]*")
    found += [{"regex": one + other} for one in parts for other in parts]
    found += [
        {"json_schema": {"type": "string", "pattern": f"^{one}b{other}$"}} for one in parts for other in parts[:7]
    ]
    return found


def test_hostile_grammars_are_refused_or_served(tokenizer):
    """None raises anything else, however it is made, and rows have ids or say why they have none."""
    cases, served, refusals = hostile(), 0, list[str]()
    assert len(cases) == 200
    for fields in cases:
        try:
            own = walk(tokenizer, **fields)
            path: list[int] = []
            while len(path) < 8 and not own.is_over([]):
                ids = np.flatnonzero(own.allowed([], path).bits).tolist()
                path.append(ids[-1])
                if ids[-1] == END:
                    break
            served += 1
        except BadOption as refused:
            refusals.append(str(refused))
    assert [said for said in refusals if "\n" in said or len(said) > 500] == []
    assert served > 100


def test_a_grammar_is_compiled_once_and_few_are_kept(tokenizer):
    known = vocabulary(tokenizer)
    first = known.compiled(SamplingParams(regex="only once"))
    assert known.compiled(SamplingParams(regex="only once", temperature=0.3)) is first
    for i in range(80):
        known.compiled(SamplingParams(regex=f"other {i}"))
    assert known.compiled(SamplingParams(regex="only once")) is not first


def test_a_grammar_whose_lexer_has_failed_is_compiled_anew(tokenizer):
    """All its requests share the lexer, which stays failed."""
    known, params = vocabulary(tokenizer), SamplingParams(regex=".{0,3000}a.{0,3000}b.{0,3000}c.{0,3000}")
    first, chance = known.compiled(params), random.Random(1)
    with pytest.raises(BadOption, match="too many states"):  # noqa: PT012
        for _ in range(100):
            own, text = first.start(frozenset(), 0), []
            for _ in range(300):
                text.append(chance.choice(np.flatnonzero(own.allowed(text).bits).tolist()))
    again = known.compiled(params)
    assert again is not first
    assert again.start(frozenset(), 0).allowed([]).bits.any()


def test_grammars_that_hold_much_are_not_kept_for_long(tokenizer):
    known = vocabulary(tokenizer)
    for i in range(6):
        known.compiled(SamplingParams(regex=f"much {i}"), 200 << 20)
    kept = [("regex", f"much {i}") for i in range(6) if known.has(("regex", f"much {i}"))]
    assert kept == [("regex", "much 4"), ("regex", "much 5")]


def test_a_schema_is_text_afterwards_and_keeps_its_order():
    params = SamplingParams(json_schema={"b": 1, "a": 2})
    assert params.json_schema == '{"b": 1, "a": 2}'
    assert SamplingParams(json_schema=params.json_schema) == params
    assert hash(params) == hash(SamplingParams(json_schema='{"b":1,"a":2}'))
