"""Trees from draft models: their law with siblings and levels, what they keep in its cache, and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import support
from engine.load import run
from forerun import pacing
from forerun.config import EngineConfig
from forerun.drafters.shared.artifacts import fingerprint, save
from forerun.drafters.shared.siblings import children_of
from forerun.engine import fitting
from forerun.engine.engine import Engine, philox_coins
from forerun.engine.opened import Opened
from forerun.errors import BadOption, UnsupportedModel
from forerun.testing.engines import HORIZON, drafter_for
from forerun.train.shares import accepted_shares, measure
from forerun.types import Probs, SamplingParams, Sequence
from house.enumeration import Case
from house.test_lossless_trees import check_first_round
from house.test_same_as_plain import check_draft_cache, prompts
from support import heard, random_decoder, rounds_of

TREES: list[dict[str, Any]] = [
    {"shape": "2x1"},
    {"shape": "2x1", "draws": "independent"},
    {"shape": "2x2", "draws": "point"},
    {"shape": "best_first", "draws": "point", "top_k": 2, "width": 2, "depth": 2},
]


@pytest.mark.parametrize("rule", ["ratio", pytest.param("match", marks=pytest.mark.parity)])
@pytest.mark.parametrize("options", TREES, ids=str)
def test_a_tree_of_siblings_and_levels_says_what_the_target_says(options: dict[str, Any], rule: str) -> None:
    for sampling in ({}, {"temperature": 0.0}):
        params = SamplingParams(max_tokens=2 * HORIZON, acceptance=rule, **sampling)
        rounds = check_first_round(partial(drafter_for, Case("tree", params, options)), params)
        if options.get("draws") != "independent" or sampling == {}:
            assert any(round.parents.count(-1) > 1 for round in rounds), "siblings"
        assert any(max(round.parents) >= 0 for round in rounds), "levels"


def test_siblings_are_drawn_without_those_before_them() -> None:
    """Each is drawn from what it states. The law of a tree of few ids may not show it: what is left is certain then."""
    params = SamplingParams(temperature=1.0)
    assert drafter_for(Case("tree", params, {"shape": "3x1"})).draws == "distinct"
    probs, seconds = Probs(dense=torch.tensor([0.6, 0.3, 0.1])), set[int]()
    for seed in range(40):
        children = list(children_of(probs, "distinct", 3, 0, philox_coins(Sequence(seed, [1], 1, params, seed, 64)), 0))
        tokens = [token for token, _, _ in children]
        assert sorted(tokens) == [0, 1, 2]
        for i, (_, own, _) in enumerate(children):
            assert [own.at(token) for token in tokens[:i]] == [0.0] * i
            assert sum(own.at(token) for token in tokens[i:]) == pytest.approx(1)
        seconds.add(tokens[1])
    assert seconds == {0, 1, 2}


@pytest.mark.parametrize("rule", ["ratio", "match"])
def test_chains_of_several_models_say_what_the_target_says(rule: str) -> None:
    """Two levels; the chains begin alike in some rounds, and each token has the law of its own model."""
    params = SamplingParams(max_tokens=2 * HORIZON, acceptance=rule)
    case = Case("several", params, {"of": "model+(model:draft_temperature=0.5)"})
    rounds = check_first_round(partial(drafter_for, case), params)
    assert {tuple(round.parents) for round in rounds} == {(-1, -1, 0, 1)}
    assert any(round.tokens[0] == round.tokens[1] for round in rounds)
    assert any(round.draft_probs[0] != round.draft_probs[1] for round in rounds)


@pytest.mark.parametrize("shape", [{}, {"shape": "best_first", "draws": "point"}], ids=str)
def test_rows_of_the_accepted_path_are_kept_and_right(shape: dict[str, Any]) -> None:
    """The draft's cache equals a rebuild from committed tokens, and accepted nodes are not run again."""
    model = random_decoder(1, row_by_row=True)
    drafter = support.drafter_for("tree", model, **shape)
    engine = Engine(support.runner_for(model), drafter, pacing.make("fixed", 9), max_seq_len=256)
    request = engine.add(prompts()[4], SamplingParams(max_tokens=30, temperature=0.8, seed=5))
    reports = heard(engine)
    missing = set()
    while request.seq.finish_reason is None:
        engine.step()
        if request.seq.finish_reason is None:
            missing.add(len(request.seq.tokens) - check_draft_cache(drafter.model, request.seq))
    assert max(missing) <= 2, "a deepest node was not run, and the last token is not"
    assert max(report.num_accepted for report in reports) >= 2


# ------------------------------------------------------------------------------------------------------ measured shares


def test_shares_of_ranks_add_up_to_the_acceptance_of_all_children() -> None:
    """Two ids: the first child of q = (.3, .7) is accepted for p = (.7, .3) with .6, the second for sure."""
    rng = np.random.default_rng(0)
    p, q = np.array([0.7, 0.3]), np.array([0.3, 0.7])
    shares = np.mean([accepted_shares(p, q, 3, rng) for _ in range(4000)], axis=0)
    assert shares.sum() == pytest.approx(1)
    assert shares[0] == pytest.approx(0.6, abs=0.03)
    assert shares[2] == 0


def shares_file(path: Path, model: Any, kind: str = "tree") -> str:
    shares = np.array([[0.5, 0.4, 0.3, 0.35], [0.9, 0.05, 0.02, 0.01]])
    save(path, kind, {"shares": shares}, fingerprint(None, support.VOCAB))
    return str(path)


def test_sequoia_drafts_the_best_tree_of_the_measured_shares(tmp_path: Path) -> None:
    model = random_decoder(1, row_by_row=True)
    drafter = support.drafter_for("tree", model, shape="sequoia", file=shares_file(tmp_path / "shares", model))
    for temperature, roots in ((0.0, 4), (0.8, 1)):  # of seven nodes; a rank is no likelier than the one before it
        engine = Engine(support.runner_for(model), drafter, pacing.make("fixed", 7), max_seq_len=256)
        rounds = rounds_of(engine)
        run(engine, [engine.add(prompts()[4], SamplingParams(max_tokens=20, temperature=temperature))])
        full = [round for round in rounds if len(round.tokens) == 7]
        assert full
        assert {round.parents.count(-1) for round in full} == {roots}


def test_a_file_of_another_method_is_refused(tmp_path: Path) -> None:
    model = random_decoder(1)
    with pytest.raises(BadOption, match="not by `forerun train tree`"):
        support.drafter_for("tree", model, shape="sequoia", file=shares_file(tmp_path / "shares", model, "ngram"))


def test_a_draft_model_that_is_the_target_has_all_shares_at_the_first_child() -> None:
    target = random_decoder(1)
    texts = [prompts()[4], prompts()[5]]
    alike = measure(support.checkpoint_of(target), support.checkpoint_of(target), texts, 3, longest=16)
    assert alike == pytest.approx(np.array([[1, 0, 0], [1, 0, 0]]))
    other = measure(support.checkpoint_of(target), support.checkpoint_of(random_decoder(2)), texts, 3, longest=16)
    assert (other[:, 0] < 0.9).all()
    assert (other.sum(axis=1) <= 1).all()


def test_shares_that_cannot_be_used_are_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    llm_tokenizer = fitting.refuse_early(Opened.of(EngineConfig(target="shipped"))).opened.tokenizer
    assert llm_tokenizer is not None
    own = fingerprint(llm_tokenizer, llm_tokenizer.num_ids)
    for name, arrays, tokenizer, error in (
        ("other", np.full((2, 3), 0.5), "other", BadOption),
        ("flat", np.full(3, 0.5), own, UnsupportedModel),
        ("large", np.full((2, 3), 1.5), own, UnsupportedModel),
    ):
        save(tmp_path / name, "tree", {"shares": arrays}, tokenizer)
        for spec in ("tree:shape=sequoia,file={}", "mixed:of=lookup+(tree:shape=sequoia,file={})"):
            with pytest.raises(error, match=name):
                fitting.refuse_early(Opened.of(EngineConfig(target="shipped", draft=spec.format(tmp_path / name))))
