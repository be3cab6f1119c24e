"""What is taken as a prompt, and the sentence for everything else."""

import array
import re

import numpy as np
import pytest
import torch

from forerun import LLM, BadOption, SamplingParams
from forerun.engine.prompts import as_list, conversations, only_one, params_for
from refusals import refusal

pytestmark = pytest.mark.once("what is refused before anything runs")

IDS = [3, 1, 2]
TAKEN = {
    "a text": ("abc", ["abc"]),
    "ids": (IDS, [IDS]),
    "a tuple": ((3, 1, 2), [IDS]),
    "a range": (range(3), [[0, 1, 2]]),
    "numpy": (np.array(IDS, dtype=np.int32), [IDS]),
    "unsigned": (np.array(IDS, dtype=np.uint64), [IDS]),
    "numpy's items": ([np.int64(3), np.uint8(1), 2], [IDS]),
    "torch": (torch.tensor(IDS), [IDS]),
    "torch's items": ([torch.tensor(3), 1, 2], [IDS]),
    "an array": (array.array("q", IDS), [IDS]),
    "rows": (np.array([IDS, IDS]), [IDS, IDS]),
    "a mixture": (["abc", IDS, np.array(IDS), np.str_("x")], ["abc", IDS, IDS, "x"]),
    "an array of a text": (np.array("abc"), ["abc"]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("given", TAKEN)
def test_what_is_taken(given):
    prompts, wanted = TAKEN[given]
    made = as_list(prompts)
    assert made == wanted
    assert all(type(token) is int for prompt in made if not isinstance(prompt, str) for token in prompt)


REFUSED = {
    "bytes": (b"abc", "not b'abc'; decode bytes to a text first"),
    "a bytearray": (bytearray(b"abc"), "; decode bytes to a text first"),
    "a memoryview": (memoryview(b"abc"), "; decode bytes to a text first"),
    "bytes among others": (["a", b"abc"], "not b'abc'"),
    "an array of bytes": (np.array(b"abc"), "not array(b'abc'"),
    "one number": (5, "not 5"),
    "one numpy number": (np.int64(5), "not "),
    "an array of no dimension": (np.array(3), "not array(3)"),
    "a tensor of no dimension": (torch.tensor(3), "not tensor(3)"),
    "a mapping": ({"a": 1}, "not {'a': 1}; LLM.chat takes conversations"),
    "messages": ([{"role": "user", "content": "a"}], "; LLM.chat takes conversations"),
    "a set": ({1, 2}, "not {1, 2}"),
    "None": (None, "not None"),
    "None among others": (["a", None], "not None"),
    "a number": (3.5, "not 3.5"),
    "numbers": ([1.0, 2.0], "not 1.0"),
    "an array of numbers": (np.array([1.0, 2.0]), "not 1.0"),
    "ids and a number": ([1, 2.0], "not [1, 2.0]"),
    "ids and a text": ([1, "a"], "not [1, 'a']"),
    "a text and an id": (["a", 1], "not 1"),
    "truth values": ([True, False], "not True"),
    "an array of truth values": (np.array([True]), "not True"),
    "a tensor of truth values": (torch.tensor([True]), "not True"),
    "ids and a truth value": ([1, True], "not [1, True]"),
    "nested": ([[1, [2]]], "not [1, [2]]"),
    "three dimensions": (np.zeros((2, 2, 2), dtype=int), "not [[0, 0], [0, 0]]"),
    "a complex number": ([1j], "not 1j"),
    "an object": (len, "not <built-in function len>"),
}


@pytest.mark.parametrize("given", REFUSED)
@pytest.mark.parametrize("door", [as_list, only_one])
def test_what_is_refused(given, door):
    prompts, words = REFUSED[given]
    with pytest.raises(BadOption, match="a prompt must be a text or a sequence of token ids, not ") as refused:
        door(prompts)
    assert words in str(refused.value)


@pytest.mark.parametrize("huge", [["a"] * 10**6 + [1.5], [1] * 10**6 + [1.5], np.ones(10**6), [10**5000], [[10**30]]])
def test_a_refusal_is_one_short_line(huge):
    said = refusal(BadOption, as_list, huge)
    assert len(said) < 250
    assert "\n" not in said


@pytest.mark.parametrize("odd", [np.array(3), 5, None, b"abc", len, np.zeros((2, 2)), torch.tensor(1.0)])
def test_other_doors_refuse_in_a_sentence_too(odd):
    with pytest.raises(BadOption, match=r"^messages=.* is not possible: it must be a list of messages"):
        conversations(odd)
    if odd is not None:
        with pytest.raises(BadOption, match=r"^params=.* is not possible: it must be SamplingParams"):
            params_for(1, odd, SamplingParams())


def test_an_llm_refuses_ids_that_its_model_lacks():
    llm, params = LLM("shipped", draft="none"), SamplingParams(max_tokens=1)
    last = llm.engine.runner.num_ids - 1
    for prompt, wrong in (([1, -1], -1), ([last + 1], last + 1), (np.array([1, 2**30]), 2**30)):
        words = f"the prompt holds the id {wrong}, but the model's ids are 0 .. {last}"
        with pytest.raises(BadOption, match=re.escape(words)):
            llm.generate(prompt, params)
    assert "which is beyond every model's vocabulary" in refusal(BadOption, llm.generate, [1, 2**40], params)
    assert "a prompt must be a text" in refusal(BadOption, list, llm.stream(b"abc", params))
    with pytest.raises(BadOption, match=r"surrogate|UTF-8"):
        llm.generate("a\ud800", params)
