"""Refusals echo what was given in one short line, however large it is."""

import copy
import pickle

import numpy as np
import pytest

from forerun import LLM, registry
from forerun.config import EngineConfig
from forerun.drafters import lookup
from forerun.errors import BadOption, UserError, shown
from refusals import refusal

pytestmark = pytest.mark.once("what is refused before anything runs")

LONG = "x" * 10**6  # each door must also be quick: in one that copied per character this took 90 s


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


LARGE = {
    "a text": LONG,
    "bytes": LONG.encode(),
    "two lines": "a\nb" * 99,
    "texts": [LONG] * 1000,
    "a mapping of texts": {LONG: LONG},
    "a mapping": {i: i for i in range(999)},
    "a set": set(range(999)),
    "integers": list(range(10**5)),
    "an integer that Python does not write": 10**5000,
    "an array": np.ones((99, 99)),
    "nested": (((((((1,),),),),),),),
    "an object that does not say what it is": Broken(),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_shown_is_one_short_line(name):
    assert 0 < len(shown(LARGE[name])) <= 120
    assert "\n" not in shown(LARGE[name])


@pytest.mark.parametrize(
    "value", ["a", 5, -1.5, None, [1, True], {"b": 1, "a": 2}, {3: 1e39}, 2**64, "/a/" * 30, (), b"abc"]
)
def test_short_values_are_shown_as_they_are(value):
    assert shown(value) == repr(value)


DOORS = {
    "an option": lambda value: EngineConfig.make(spec_length=value),
    "a name": lambda value: EngineConfig.make(dtype=value),
    "an alias": lambda value: EngineConfig.make(draft="lookup", draft_model=value),
    "what turns drafts on": lambda value: EngineConfig.make(use_speculative_decoding=value),
    "quantization": lambda value: EngineConfig.make(quantization=value),
    "a drafter's option": lambda value: registry.make_options(lookup.Options, {"max_n": value}, "lookup"),
    "an unknown name": lambda value: registry.make_options(lookup.Options, {str(value): 1}, "lookup"),
    "a rule": lambda value: registry.load("forerun.verify", str(value), "verification rule"),
    "a spec": lambda value: registry.parse_spec(f"lookup:{value}"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("value", [LONG, [LONG] * 5, {LONG: LONG}], ids=["text", "list", "mapping"])
def test_every_door_echoes_little(door, value):
    assert len(refusal(UserError, DOORS[door], value)) < 500


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_says_why_it_cannot_be_pickled(duplicate):
    with pytest.raises(BadOption, match=r"^an LLM cannot be pickled: it holds .*; make one in each process$"):
        duplicate(LLM("shipped", draft="none"))
