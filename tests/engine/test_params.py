"""Every sampling parameter is honoured or refused by its own name, whatever is given: huge, negative, no number."""

import decimal
import fractions
import itertools
import math
import warnings
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from forerun import native
from forerun.errors import BadOption
from forerun.sampling import History, arithmetic, probs
from forerun.types import SamplingParams
from refusals import refusal

pytestmark = pytest.mark.once("no engine runs: parameters and one row of logits")

INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "n", "spec_length", "priority")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
OTHERS = (
    *("logit_bias", "bad_words", "stop", "stop_token_ids", "ignore_eos", "acceptance", "draft", "cache_salt"),
    "prediction",
)
ODD = (
    *(0, 1, 5, -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**30, 10**400, -(10**5000)),
    *(0.0, -0.0, 0.5, 1.0, -2.0, 1e-320, 1e-6, 1e6, 1e39, -1e39, 1e308, math.nan, math.inf, -math.inf),
    *(True, False, None, "", "5", b"ab", "\ud800", 1j, [], [1], (), {}, {1: 1.0}, {"a": 1}, {3}, object(), len),
    *(np.int8(3), np.uint64(2**64 - 1), np.int64(-1), np.bool_(True), np.float16(0.5), np.float32(1e30)),
    *(np.float64("nan"), np.longdouble("1e4000"), np.array(3), np.array(1.5), np.array([1, 2]), np.array([True])),
    *(decimal.Decimal(1), fractions.Fraction(1, 2), fractions.Fraction(10**400), torch.tensor(3), torch.tensor(0.5)),
    *([2**31], [-1], [10**5000], [True], [1.0], {2**31: 1}, {-1: 1}, {10**5000: 1}, {True: 1}, {1: True}, {1.0: 1}),
    *({1: 1e39}, {1: -1e39}, {1: 1e20}, {1: -math.inf}, {1: math.inf}, {1: math.nan}, {1: 10**400}, {1: None}),
    *({np.int64(1): np.float32(2)}, ["a", 1], [""], ["a"] * 10**6, "a" * 10**6, list(range(10**5))),
)
IDS = 8
LOGITS = np.array([3.0, -2.0, 0.0, 1e20, -1e20, 1.0, -np.inf, 0.5], dtype=np.float32)
HISTORY = History([0, 1, 3, 4, 4, 6, 6, 6], 4, frozenset({2}))


def take_row(params: SamplingParams) -> None:
    """What a step does with the parameters, on each implementation: a distribution, and no warning on the way."""
    arithmetic_of = [None] if native.isa() == "reference" else [None, arithmetic.native_sampler()]
    for implementation in arithmetic_of:
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("error")
            patch.setattr(arithmetic, "native_sampler", lambda found=implementation: found)
            made = probs(LOGITS, params, HISTORY)
            total = sum(made.at(i) for i in range(IDS))
        assert total == pytest.approx(1, abs=1e-6), params


def accepted(**values: object) -> SamplingParams | None:
    """The parameters; None where they are refused, by the name of one of them and in a short line."""
    try:
        return SamplingParams(**values)
    except BadOption as error:
        said = str(error)
    assert said.startswith(tuple(f"{name}=" for name in values))
    assert len(said) < 250
    assert "\n" not in said
    return None


@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS, *OTHERS])
def test_each_value_is_honoured_or_refused_by_name(name):
    for value in ODD:
        params = accepted(**{name: value})
        if params is None:
            continue
        kept = getattr(params, name)
        if name in INTEGERS and value is not None:
            assert (type(kept), kept) == (int, int(value))
        if name in NUMBERS:
            assert (type(kept), kept) == (float, float(value))
        if not isinstance(kept, Mapping) or all(token < IDS for token in kept):
            take_row(params)


def test_values_at_the_bounds_are_honoured_together():
    """The products are the largest that the ranges allow: none of them leaves float32."""
    ends = {
        "temperature": (0.0, 1e-5, 1e308),
        "top_k": (0, 2**63 - 1),
        "top_p": (1e-320, 1.0),
        "min_p": (1e-320, 0.0),
        "repetition_penalty": (1e-6, 1e6),
        "frequency_penalty": (-2.0, 2.0),
        "logit_bias": (dict.fromkeys(range(4), 1e20), dict.fromkeys(range(1, 8), -1e20)),
    }
    for values in itertools.product(*ends.values()):
        take_row(SamplingParams(**dict(zip(ends, values, strict=True))))


INTEGER_LIKE = st.one_of(st.integers(), st.integers(-(2**70), 2**70), st.booleans(), st.floats(), st.text(max_size=3))
NUMBER_LIKE = st.one_of(
    st.floats(), st.integers(-(2**70), 2**70), st.booleans(), st.floats(width=32).map(np.float32), st.none()
)
BIASES = st.dictionaries(st.one_of(st.integers(-1, IDS - 1), st.booleans()), NUMBER_LIKE, max_size=3)
FIELDS = {**dict.fromkeys(INTEGERS, INTEGER_LIKE), **dict.fromkeys(NUMBERS, NUMBER_LIKE)}
FIELDS |= {"logit_bias": BIASES, "stop_token_ids": st.lists(INTEGER_LIKE, max_size=3)}


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_any_mixture_is_honoured_or_refused_by_name(values):
    params = accepted(**values)
    if params is not None:
        take_row(params)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"top_k": 2**63}, "top_k=9223372036854775808 is not possible: it must be an integer of 64 bits"),
        ({"top_k": 10**5000}, "top_k=an integer of 16610 bits is not possible: it must be an integer of 64 bits"),
        ({"logit_bias": {3: 1e39}}, "logit_bias={3: 1e+39} is not possible: it must be from ids in 0 .. 2**31 - 1 to "),
        ({"repetition_penalty": 1e-320}, "repetition_penalty=1e-320 is not possible: it must be in [1e-6, 1e6]"),
        ({"n": 10**9}, "n=1000000000 is not possible: it must be in 1 .. 16384"),
        ({"stop_token_ids": b"ab"}, "stop_token_ids=b'ab' is not possible: it must be several integers"),
    ],
)
def test_what_a_refusal_says(values, words):
    assert refusal(BadOption, SamplingParams, **values).startswith(words)


def test_a_field_says_all_that_is_said_of_a_parameter():
    for name, field in SamplingParams.__dataclass_fields__.items():
        about = field.metadata
        assert about["help"], name
        assert about["kind"].what, name
        is_counted = about["kind"].what.startswith("an integer") and name != "priority"
        assert not is_counted or "min" in about, f"{name} has no least value"


def test_one_text_or_several_are_texts():
    for name in ("stop", "bad_words"):
        kept = [getattr(SamplingParams(**{name: value}), name) for value in ("ab", ["ab"], ("a", "b"))]
        assert kept == [("ab",), ("ab",), ("a", "b")]
