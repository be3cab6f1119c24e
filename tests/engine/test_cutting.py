"""Drafts are kept free of ids that only a chat template writes, in the one place that all drafts pass."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.engine import cutting
from forerun.engine.llm import LLM
from forerun.engine.opened import SHIPPED_TARGET
from forerun.types import Draft, Extra, Probs, SamplingParams

pytestmark = pytest.mark.once("about drafts that the tests make")

MARK = "assert"
TEMPLATE = """{% for m in messages %}{{ 'assert' + m.role + '\\n' + m.content + '<|endoftext|>\\n' }}{% endfor -%}
{% if add_generation_prompt %}{{ 'assertassistant\\n' }}{% endif %}"""


def points(*tokens: int) -> list[Probs]:
    return [Probs.of_point(token) for token in tokens]


def test_nodes_go_with_what_hangs_below_them_and_extra_rows_are_numbered_anew():
    """Of the second sequence, 5 - 9 - 6 and 7 - 8, 9 goes and 6 with it. Extra rows hang from 8 and from 6."""
    tokens, parents = [9, 4, 5, 9, 6, 7, 8], [-1, 0, -1, 2, 3, -1, 5]
    behind = [-1, 4, 2, 7]  # the root, the node 8, the node 6, and the row before
    extra = Extra([1, 2, 3, 4], behind, {1: torch.ones(1), 3: torch.zeros(1)})
    draft = Draft(tokens, parents, [0, 2, 7], points(*tokens), {1: extra})
    cut = cutting.without(draft, frozenset({9}))
    assert (cut.tokens, cut.parents, cut.node_starts) == ([5, 7, 8], [-1, -1, 1], [0, 0, 3])
    left = cut.extra[1]
    assert (left.tokens, left.parents, left.vectors) == ([1, 2], [-1, 2], {1: torch.ones(1)})
    assert [probs.point for probs in cut.probs] == cut.tokens
    cut.check(1)
    assert cutting.without(draft, frozenset({3})) is draft


def test_distributions_are_those_without_the_ids():
    """A token that was not one of them was drawn from its distribution on that condition; a list of ids stays one."""
    dense = Probs(dense=np.array([0.5, 0.25, 0.125, 0.125]))
    listed = Probs(ids=np.array([1, 3]), listed=np.array([0.25, 0.75]))
    draft = Draft.chains([[2, 2, 3], [0]], [[dense, dense, listed], [Probs(dense=np.array([0.0, 1.0]))]])
    cut = cutting.without(draft, frozenset({1, 77}))
    assert (cut.tokens, cut.node_starts) == ([2, 2, 3], [0, 3, 3])
    first, second, third = cut.probs
    assert first is second, "siblings that were drawn from one distribution still were"
    assert first.weights.tolist() == pytest.approx([2 / 3, 0, 1 / 6, 1 / 6])
    assert [third.at(i) for i in range(4)] == [0, 0, 0, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The shipped model with a chat template, which begins messages with a token that counts as special here."""
    made = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(SHIPPED_TARGET, made)
    (made / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer = json.loads((made / "tokenizer.json").read_text(encoding="utf-8"))
    entry = {**tokenizer["added_tokens"][0], "id": tokenizer["model"]["vocab"][MARK], "content": MARK}
    tokenizer["added_tokens"].append(entry)
    (made / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return made


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("draft", ["suffix", "suffix:shape=tree", "lookup"])
def test_the_search_proposes_no_beginning_of_a_message(folder, draft, temperature):
    """Behind the generation prompt comes a new line, and behind the one before a message began."""
    with LLM(folder, draft=draft, pacing="fixed", spec_length=4, max_seq_len=256) as llm:
        mark = llm.tokenizer.encode(MARK)[0]
        assert llm.engine.drafter.unwritten == {mark}
        drafted: list[int] = []
        llm.listen(lambda report: drafted.extend(t for r in report.rounds for t in r.tokens), detail=True)
        for unwritten in (llm.engine.drafter.unwritten, frozenset()):
            drafted.clear()
            apart = str(unwritten)  # the second answer is not guessed by the first one
            params = SamplingParams(max_tokens=12, temperature=temperature, seed=1, cache_salt=apart)
            llm.engine.drafter.unwritten = unwritten
            (out,) = llm.chat([{"role": "user", "content": "x = 1"}], params)
            assert out.prompt_ids.count(mark) == 2
            assert (mark in drafted) == (not unwritten), "the search itself proposes it, or nothing was shown"
