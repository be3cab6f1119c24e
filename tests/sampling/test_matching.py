"""A state that went to and fro between drafts allows what a state allows that was never anywhere else.

Every kind of grammar that requests and dialects of tools make, and rules that people may write. A few walks of each
here; 10,000 of each in `make parity`.
"""

import functools
import random
import tempfile
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers

from forerun.errors import BadOption
from forerun.params import SamplingParams
from forerun.sampling.grammar import vocabulary
from forerun.sampling.thinking import Limited
from forerun.text.answer_form import THOUGHTS, AnswerForm, AnswerMarks
from forerun.text.calls import dialect, dialects
from forerun.text.tokenizer import Tokenizer
from forerun.text.tools import ToolRequest, Tools
from forerun.types import Constraint
from text.test_calls import SIGNS

pytestmark = pytest.mark.once("no model")
END, OPEN, CLOSE = "<|unread|>", "<think>", "</think>"
MERGED = ('{"', '":', '": ', ', "', '"}', "ab", "abc", "bc", "cd", "name", "na", "me", "\n  ", "\n\n", "12", " t", ">,")
LIKED = '"}]{),<:0 \n'  # by what says little, so that texts come to their ends


@functools.cache
def tokenizer(is_special: bool) -> Tokenizer:
    """Bytes, some longer tokens, the marks of all dialects, special or none; and marks of reasoning that are texts."""
    spelled = {chr(i): chr(i) for i in range(33, 127)} | {" ": "Ġ", "\n": "Ċ"}
    vocab = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = list[tuple[str, str]]()
    for text in MERGED:
        whole = "".join(spelled[char] for char in text)
        for num in range(2, len(whole) + 1):
            if whole[:num] not in vocab:
                merges.append((whole[: num - 1], whole[num - 1]))
                vocab[whole[:num]] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = sorted({mark for one in dialects() for mark in one.marks}) if is_special else []
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in [*marks, END]])
    backend.add_tokens([AddedToken(mark, special=False) for mark in (OPEN, CLOSE)])
    with tempfile.TemporaryDirectory() as folder:
        backend.save(f"{folder}/tokenizer.json")
        return Tokenizer.load(Path(folder))


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["abc", "abd", "b"]},
        "n": {"type": "integer", "minimum": -3, "maximum": 120},
        "list": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"$ref": "#"}]}, "maxItems": 3},
        "code": {"type": "string", "pattern": "^[ab]{2,5}-?[0-9]+$"},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = Tools.of([{"name": name, "parameters": schema} for name, schema in (("abc", SCHEMA), ("now", NOTHING))])
GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": SCHEMA},
    "compact schema": {"json_schema": SCHEMA, "json_whitespace": "compact"},
    "spaced schema": {"json_schema": SCHEMA, "json_whitespace": "spaced"},
    "object": {"json_object": True},
    "expression": {"regex": "(ab|c)+[a-d]{2,7}x?"},
    "choice": {"choice": ["abc", "abcd", "ab", "name", "na", "\n\n12"]},
    "rules": {"grammar": 'start: "<" item ("," item)* ">"\nitem: /[0-9]{1,3}/ | "name" | list\nlist: "[" item* "]"'},
    "counted rules": {"grammar": 'start: item{2,5} "."\nitem: "ab" | /c{1,3}/ | "\\n"{1,2}'},
    "up to a text": {"grammar": 'start: (text /[0-9]+/)+\ntext[suffix="ab"]: /(?s:.*)/'},
    "lazy rules": {"grammar": 'start: (text "b")+\ntext[lazy]: /[ac]+/'},
    "of llama.cpp": {"grammar": 'root ::= "ab" item{1,4}\nitem ::= [cd] | "name" root?'},
    "rules with a schema": {"grammar": 'start: "ab" value\nvalue: %json {"type": "object", "minProperties": 1}'},
}
# Rules of tokens by their ids, which llguidance cannot lead back; "a" and "b" stand for ids.
COUNTED: dict[str, str] = {
    "tokens up to one": "start: <[A]> t{0,4} <[B]> <[*]>*\nt: <[^B]>",
    "tokens from the first": "start: t{0,3} <[B]> <[*]>*\nt: <[^B]>",
    "two counts": "start: t{2,4} <[A]> u{2,3}\nt: <[^A]>\nu: <[40-60]>",
    "any tokens": "start: <[*]>{0,6} <[B]> <[*]>*",
    "a token in a text": "start: /[ab]*/ <[A]> /[cd]+/ <[B]> /[ab]+/",
    "tokens in turn": "start: (<[^A]> <[A]>)* <[B]>",
    "a list of tokens": 'start: (<[A,B,97,98]> "ab")*',
    "a limit of tokens": 'start: (text "12")+\ntext[max_tokens=4]: /[ab]+/',
    "a stop": 'start: (text "12")+\ntext[stop="ab"]: /[a-d]+/',
}


def start_of(params: SamplingParams, spelling: Tokenizer) -> Callable[[], Constraint]:
    grammar = vocabulary(spelling).compiled(params)
    held = grammar if params.thinking is None else Limited(params.thinking, grammar, spelling.num_ids)
    return functools.partial(held.start, frozenset(spelling.encode(END)), 0)


def of_chat(
    name: str = "", choice: str = "", limit: int | None = None, prompt: str = "x", is_special: bool = True, **form: Any
) -> Callable[[], Constraint]:
    """What holds an answer in a dialect, or in none. form: a schema of the answer."""
    answer_marks = AnswerMarks(dialect(name) if name else None, THOUGHTS[:1] if is_special else (), SIGNS.get(name, ""))
    use = ToolRequest(TOOLS, choice, strict=frozenset(TOOLS)) if choice else None
    spelling = tokenizer(is_special)
    params = AnswerForm(answer_marks, use, limit).constrained(SamplingParams(**form), spelling, spelling.encode(prompt))
    return start_of(params, spelling)


@functools.cache
def kinds() -> dict[str, Callable[[], Callable[[], Constraint]]]:
    """What compiles each kind of grammar."""
    spelling = tokenizer(False)
    made = {name: functools.partial(start_of, SamplingParams(**given), spelling) for name, given in GRAMMARS.items()}
    for name, rules in COUNTED.items():
        for of, a, b in (("text", "c", "#"), ("special", END, CLOSE)):
            ids = [str(spelling.encode(text)[0]) for text in (a, b)]
            text = rules.replace("A", ids[0]).replace("B", ids[1])
            made[f"{name}, {of}"] = functools.partial(start_of, SamplingParams(grammar=text), spelling)
    for one in dialects():
        for choice in ("required", "auto"):
            made[f"{one.name}, special, {choice}"] = functools.partial(of_chat, one.name, choice)
            made[f"{one.name}, spelled, {choice}"] = functools.partial(of_chat, one.name, choice, is_special=False)
            made[f"{one.name}, special, {choice}, limited"] = functools.partial(of_chat, one.name, choice, 4)
    for prompt in ("x", OPEN):
        made[f"limited, special, behind {prompt}"] = functools.partial(of_chat, limit=3, prompt=prompt)
        schema = functools.partial(of_chat, limit=5, prompt=prompt, json_schema=SCHEMA)
        made[f"limited, special, behind {prompt}, and a schema"] = schema
        made[f"special, behind {prompt}, and a schema"] = functools.partial(of_chat, prompt=prompt, json_schema=SCHEMA)
    made["limited, special, in channels"] = functools.partial(of_chat, "harmony", limit=4)
    return made


def differences(start: Callable[[], Constraint], liked: frozenset[int], end: int, num_walks: int) -> list[str]:
    """What a state says differently behind paths of drafts than one that read nothing else, by the path."""
    known: dict[tuple[int, ...], tuple[str, bool, list[int] | None]] = {}
    wrong = list[str]()
    for seed in range(num_walks):
        rng, walk = random.Random(seed), start()
        committed, paths = list[int](), [list[int]()]
        for _ in range(rng.randint(4, 24)):
            path = rng.choice(paths[-3:])
            if rng.random() < 0.25:  # a part of a path is committed; the paths behind it go on
                num = rng.randint(0, len(path))
                committed += path[:num]
                paths = [[], *(other[num:] for other in paths if other[:num] == path[:num] and len(other) > num)]
                path = rng.choice(paths)
            text = (*committed, *path)
            if text not in known:
                known[text] = said(start(), text, ())
            own, fresh = said(walk, committed, path), known[text]
            is_same = own[:2] == fresh[:2] and (None in (own[2], fresh[2]) or own[2] == fresh[2])
            if not is_same:
                wrong.append(f"seed {seed}: {committed} {path}")
                break
            may = [i for i in np.flatnonzero(np.frombuffer(bytes.fromhex(own[0]), bool)).tolist() if i != end]
            if may and len(text) < 40:
                paths.append([*path, rng.choices(may, [12 if i in liked else 1 for i in may])[0]])
    return wrong


def said(walk: Constraint, committed: Seq[int], path: Seq[int]) -> tuple[str, bool, list[int] | None]:
    """Which ids may follow, whether the text is over, and what is forced; None where drafts have had their time."""
    try:
        bits = walk.allowed(committed, path).bits.tobytes().hex()
    except BadOption:
        bits = ""
    is_over = walk.behind(committed, path).is_over(committed)
    forced = walk.forced(committed, path)
    return bits, is_over, forced if walk.may_draft else None


def walks(kind: str, num: int) -> None:
    spelling = tokenizer("special" in kind)
    liked = frozenset(i for char in LIKED for i in spelling.encode(char)) | spelling.special_ids
    liked |= frozenset(spelling.encode(mark)[0] for mark in (OPEN, CLOSE))
    wrong = differences(kinds()[kind](), liked, spelling.encode(END)[0], num)
    assert not wrong, f"{len(wrong)} of {num}, the first: {wrong[0]}"


@pytest.mark.parametrize("kind", kinds())
def test_a_state_is_what_it_would_be_had_it_never_been_elsewhere(kind: str) -> None:
    walks(kind, 8)


@pytest.mark.parity
@pytest.mark.parametrize("kind", kinds())
def test_no_state_of_many_differs(kind: str) -> None:
    walks(kind, 10_000)
