"""200 grammars and schemas that are meant to take long, to take much, or to break what reads them.

Of each kind there are several sizes, the largest of which take for ever where nothing stops them: references in
circles, texts that can be read in very many ways, automata that are products of others, a million values, numbers that
are none.
"""

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

NUM = 200
Fields = dict[str, Any]
_TEXT: Fields = {"type": "string"}
_PATTERNS = (
    *("(a+)+b", "(a|a|aa)*b", "(.*)*x", "(.*a){20}", "(a|b)*a(a|b){200}", "(a{1,99}){1,99}", "x{1,100000}"),
    *("(((a?){0,99}b){0,99}c){0,99}", "[^a]{0,65535}[^b]{0,65535}", r"\p{L}{1,500}\p{N}{1,500}", "(?i:ß|ﬀ)*"),
    *("(?=a)b", r"(a)\1", "(?<!x)y", "a**", "[z-a]", "(" * 2000, "x?" * 3000, "a{0,1000}{0,1000}", "(?R)"),
)


def hostile(seed: int = 1) -> list[tuple[str, bytes]]:
    """The name of each and what is in a body beside its other fields: JSON without the braces around it."""
    chance = random.Random(seed)
    found = [(name, json.dumps(fields)[1:-1].encode()) for name, fields in _fields(chance)] + list(_raw())
    chance.shuffle(found)
    return found[:NUM]


def _raw() -> Iterator[tuple[str, bytes]]:
    """What no Python value says."""
    for text in ("NaN", "Infinity", "-1e999", "9" * 400, "1" + "0" * 5000, "1e308", "1e-320", "-0.0"):
        yield f"bound {text[:9]}", f'"json_schema": {{"type": "number", "minimum": {text}, "maximum": 5}}'.encode()
    for char in ("\\ud800", "\\udfff\\ud800", "\\u0000"):
        yield f"lone {char}", f'"json_schema": {{"const": "{char}"}}'.encode()
        yield f"choice of {char}", f'"choice": ["{char}", "b"]'.encode()
    for depth in (100, 1000, 100_000):
        deep = '{"items": ' * depth + "true" + "}" * depth
        yield f"nested {depth}", f'"json_schema": {deep}'.encode()
        yield f"as a text, nested {depth}", f'"json_schema": {json.dumps(deep)}'.encode()
    yield "the same key", b'"json_schema": {' + b", ".join([b'"minimum": 3'] * 5000) + b"}"
    yield "no JSON", b'"json_schema": {"type": "string"'
    yield "no UTF-8", b'"regex": "\xff\xfe"'


def _fields(chance: random.Random) -> Iterator[tuple[str, Fields]]:
    for name, schema in _schemas(chance):
        yield name, {"json_schema": schema}
    for name, grammar in _grammars(chance):
        yield name, {"grammar": grammar}
    for pattern in _PATTERNS:
        yield f"regex {pattern[:20]}", {"regex": pattern}
        yield f"pattern {pattern[:20]}", {"json_schema": {"type": "string", "pattern": pattern}}
        yield f"pattern and length {pattern[:20]}", {"json_schema": _TEXT | {"pattern": pattern, "maxLength": 10**6}}
    for num in (1000, 4000, 10**6):
        values = [f"{chance.randrange(16**6):06x}{i}" for i in range(num)]
        yield f"enum of {num}", {"json_schema": {"enum": values}}
        yield f"choice of {num}", {"choice": values}
    yield "1 MB of a regex", {"regex": "a?b" * 350_000}
    yield "1 MB of a grammar", {"grammar": 'start: "' + "x" * 10**6 + '"'}
    yield "1 MB in a schema", {"json_schema": {"const": "x" * 10**6}}
    yield "60 kB of words", {"regex": "|".join(f"(?i:word{chance.randrange(10**6)})" for _ in range(3500))}


def _schemas(chance: random.Random) -> Iterator[tuple[str, Any]]:
    yield "itself", {"$ref": "#"}
    yield "each other", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    yield "all of itself", {"allOf": [{"$ref": "#"}, _TEXT]}
    yield "not itself", {"not": {"$ref": "#"}}
    yield "arrays without an end", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
    yield "objects without an end", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    for ref in ("http://127.0.0.1:9/x", "file:///etc/passwd", "#/nowhere", "#/$defs/%ZZ", "x" * 50_000, "#/" * 9000):
        yield f"reference to {ref[:20]}", {"$ref": ref}
    yield "another base", {"$id": "http://127.0.0.1:9/", "$ref": "y", "$schema": "http://127.0.0.1:9/schema"}
    for kind in ("anyOf", "allOf", "oneOf"):
        for num in (8, 40, 500):
            parts = [{"type": "object", "properties": {f"p{i}": _TEXT}} for i in range(num)]
            yield f"{kind} of {num} objects", {kind: parts}
        yield f"{kind} twice, 30 deep", _doubled(30, partial(_both, kind))
        yield (
            f"{kind} of 500 times the same",
            {"$defs": {"a": {kind: [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 500}}, "$ref": "#/$defs/a"},
        )
    for num in (3, 7):
        products = [{"anyOf": [{"properties": {f"p{i}_{j}": _TEXT}} for j in range(num)]} for i in range(num)]
        yield f"all of any, {num} times {num}", {"allOf": products}
    for num in (100, 500, 1300, 5000):
        yield f"{num} optional properties", {"type": "object", "properties": {f"p{i}": _TEXT for i in range(num)}}
    yield "long keys", {"type": "object", "properties": {chr(97 + i) * 9000: _TEXT for i in range(20)}}
    yield "objects, 25 deep", _doubled(25, lambda part: {"type": "object", "properties": {"a": part, "b": part}})
    for patterns in (
        [f"^{i:04d}.*$" for i in range(1300)],
        [f"^(a|b)*{chr(97 + i)}(a|b){{12}}{i}$" for i in range(20)],
        [".*a", ".*b"],
    ):
        yield f"{len(patterns)} patterns of names", {"patternProperties": dict.fromkeys(patterns, _TEXT)}
    yield "names", {"propertyNames": {"pattern": "(a|b)*a(a|b){99}"}, "minProperties": 10**6}
    for numbers in ([97], [9973], [99_991], [999_999_937], [0], [0.1], [1e-9], [1e15], [3, 7, 11, 13, 17, 19, 23]):
        for kind in ("integer", "number"):
            asked = [{"type": kind, "multipleOf": number} for number in numbers]
            yield f"multiples of {numbers}", asked[0] if len(asked) == 1 else {"allOf": asked}
    yield "multiples in a row", {"prefixItems": [{"multipleOf": number} for number in (41, 43, 47)]}
    for least, most in ((-1e308, 1e308), (-1e308, 1.23456789e308), (1e-300, 2e-300), (5, 4), (0.1, 0.1 + 1e-17)):
        for kind in ("integer", "number"):
            yield f"{kind} {least} to {most}", {"type": kind, "minimum": least, "exclusiveMaximum": most}
    ranges = [sorted(chance.sample(range(10**15), 2)) for _ in range(800)]
    yield "800 ranges", {"anyOf": [{"type": "integer", "minimum": a, "maximum": b} for a, b in ranges]}
    for num in (10**4, 10**6, 10**9, -1):
        yield f"length {num}", _TEXT | {"minLength": num, "maxLength": 2 * num}
        yield f"items {num}", {"type": "array", "items": _TEXT, "minItems": num}
        yield f"at most {num} items", {"type": "array", "items": {"type": "array", "maxItems": num}, "maxItems": num}
    yield "700 lengths", {"properties": {f"p{i}": _TEXT | {"minLength": i, "maxLength": 60_000} for i in range(700)}}
    yield "500 arrays", {"anyOf": [{"type": "array", "minItems": 10**5 + i, "items": _TEXT} for i in range(500)]}
    wrong: list[Any] = [{"type": "none"}, {"type": []}, {"properties": []}, {"enum": []}]
    for schema in [*wrong, {"x-guidance": {"lenient": 5}}, 3, []]:
        yield f"no schema {schema}"[:30], schema


def _both(kind: str, part: Fields) -> Fields:
    return {kind: [part, part | {"minLength": 1}]}


def _doubled(depth: int, twice: Callable[[Fields], Fields]) -> Fields:
    """A schema each of whose definitions asks for the next one twice."""
    parts = {f"d{i}": twice({"$ref": f"#/$defs/d{i + 1}"}) for i in range(depth)}
    return {"$defs": parts | {f"d{depth}": _TEXT}, "$ref": "#/$defs/d0"}


def _grammars(chance: random.Random) -> Iterator[tuple[str, str]]:
    yield "left and right", 'start: start start | "a"'
    yield "nothing or more", 'start: s\ns: s s s s | "a" | ""'
    yield "nothing at all", 'start: s\ns: s s | ""'
    yield "itself", "start: start"
    yield "late", 'start: "{" /[a-z]{40}/ s\ns: s s s | "a" | "b" | ""'
    for num in (30, 300, 1000, 4000, 13_000):
        yield f"{num} times the same rule", "start: a\na: " + " | ".join(["a a"] * num) + ' | "x"'
        yield f"{num} that may be empty", "start: " + " ".join(["a"] * num) + '\na: "a"?'
        yield f"late, {num} that may be empty", 'start: /[a-z]{20}/ "," ' + " ".join(["a"] * num) + '\na: "a"?'
    for num in (40, 2000):
        rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}?" for i in range(num))
        yield f"{num} rules twice", f'start: r0\n{rules}\nr{num}: "a"'
    rules = "\n".join(f't{i}: "a"* s?' for i in range(400))
    yield "400 kinds of a", "start: s+\ns: " + " | ".join(f"t{i}" for i in range(400)) + f"\n{rules}"
    for primes in ((7, 11), (7, 11, 13, 17), (7, 11, 13, 17, 19, 23, 29)):
        for sign in ("", "~"):
            parts = " & ".join(f"{sign}/(.{{{prime}}})*/" for prime in primes)
            yield f"{sign}lengths {primes}", f"start: T\nT: {parts}"
    for sign in ("", "~"):
        parts = " & ".join(f"{sign}/.*{chr(97 + i)}.{{9}}/" for i in range(20))
        yield f"{sign}20 letters", f"start: T\nT: {parts}"
    many = "\n".join(f"T{i}: /.*{chance.randrange(10**4)}.*/" for i in range(1500))
    yield "1500 terminals", "start: " + " | ".join(f"T{i}" for i in range(1500)) + f"\n{many}"
    yield "repeated", 'start: a{0,9999}\na: b{0,9999}\nb: "b"?'
    yield "a million times", 'start: a{1000000,2000000}\na: "b" | "c"'
    yield "JSON inside", 'start: %json {"type": "integer", "multipleOf": 99991}'
    yield "JSON inside, nested", "start: %json " + '{"items": ' * 500 + "true" + "}" * 500
    yield "parts of a text", 'start: %regex {"substring_chars": "' + "abc d" * 12_000 + '"}'
    yield "all of all", "start: /(?s:.*)/ /(?s:.*)/ /(?s:.*)/ " + '"x"'
    for text in ("start: missing", "start: %json {", "\x00", "start: /(/", "%import nowhere\nstart: nowhere", "::="):
        yield f"no grammar {text[:12]!r}", text
    yield "GBNF, parentheses", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000
    yield "GBNF, repeated", "root ::= " + "(" * 200 + '"a"' + "?)*" * 200
    yield "GBNF, itself", "root ::= root"
    yield "GBNF, both sides", 'root ::= x root x | x\nx ::= "a" | "a" x |'
    yield "GBNF, long", "root ::= " + " ".join(['"a"'] * 16_000)
