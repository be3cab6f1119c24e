"""A drafter of trees from inner hidden states, as one file beside the others; extra rows; likeliest tokens; counts."""

import os
from collections.abc import Iterator, Sequence as Seq
from pathlib import Path

import numpy as np
import pytest

from engine.load import DRAFT, MODEL, greedy, heard, run, runner_with
from forerun import LLM, BadOption, SamplingParams, drafters, registry
from forerun.drafters import Drafter, Seen
from forerun.engine.engine import Engine
from forerun.engine.router import Router
from forerun.models.runner import Run
from forerun.pacing import make
from forerun.types import Budget, Coins, Draft, Extra, Probs, Sequence
from forerun.verify import match
from support import rounds_of

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return"
GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.7, seed=3, ignore_eos=True)
pytestmark = pytest.mark.once("about drafts of trees")


@pytest.fixture
def with_neighbours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """tests/drafters/neighbours.py as one more file of the drafters' room, and nothing else."""
    folder = str(Path(__file__).parents[1] / "drafters")
    drafters.__path__.append(folder)
    yield
    drafters.__path__.remove(folder)


def test_a_file_that_comes_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are not read again from files that were read, which takes a millisecond for each request."""
    room = tmp_path / "a_room"
    room.mkdir()
    (room / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.names("a_room") == ()
    (room / "walk.py").write_text("\nclass Options: ...\n", encoding="utf-8")
    os.utime(room, ns=(1, 1))  # whatever the clock of the file system counts in
    assert registry.names("a_room") == ("walk",)


@pytest.mark.parametrize("spec_length", [2, 6])
def test_a_drafter_of_trees_is_one_file(with_neighbours: None, spec_length: int) -> None:
    """Texts are plain decoding's, bit for bit, trees are accepted and rejected, and no block leaks."""
    plain = LLM("shipped", draft="none").generate([PROMPT, PROMPT[:60]], [GREEDY, SAMPLED])
    llm = LLM("shipped", draft="neighbours:width=3", spec_length=spec_length, max_seq_len=512)
    rounds = rounds_of(llm)
    for _ in range(2):  # the second time the target's cache holds the prompt, and the drafter must see it all the same
        outs = llm.generate([PROMPT, PROMPT[:60]], [GREEDY, SAMPLED])
        assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
        assert all(out.report.num_cached_tokens == 0 for out in outs)
    trees = [r for r in rounds if r.parents.count(-1) > 1]
    assert {len(r.accepted) for r in trees} == ({0, 1} if spec_length == 2 else {0, 1, 2})
    for report in (out.report for out in outs):
        assert report.num_accepted <= report.num_tested <= report.num_drafted
        assert len(report.drafted_per_position) <= 2, "two levels"
        assert sum(report.accepted_per_position) == report.num_accepted
        assert all(rate <= 1 for rate in report.acceptance_per_position)
        assert report.origins.count("accepted") == report.num_accepted
    llm.engine.runner.cache.check_integrity()
    assert not llm.engine.drafter.first._rows  # type: ignore[attr-defined]


def test_a_pair_that_cannot_be_judged_is_refused_when_it_is_added(
    with_neighbours: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM("shipped", draft="neighbours", max_seq_len=512)
    monkeypatch.setattr(match, "SHAPES", ("chain",))
    with pytest.raises(BadOption, match=r"'match' cannot judge .*'neighbours' \(tree, point\): use .*'ratio'"):
        llm.generate(PROMPT, SAMPLED)
    assert llm.generate(PROMPT, GREEDY)[0].token_ids
    assert llm.generate(PROMPT, SamplingParams(max_tokens=4, seed=3, draft="none"))[0].token_ids


class Watcher(Drafter):
    """A drafter of one token and two extra rows below it, which records what it is shown."""

    draws, top_logits = "point", 2

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int], Seen]] = []

    def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
        draft = Draft.chains([[1] for _ in seqs], [[Probs.of_point(1)] for _ in seqs])
        extra = {b: Extra([2, 3], [0, 1]) for b in range(len(seqs)) if budget.num_tokens[b] >= 3}
        return Draft(draft.tokens, draft.parents, draft.node_starts, draft.probs, extra)

    def observe(self, seqs: Seq[Sequence], seen: Seq[Seen]) -> None:
        self.seen += [(seq.id, list(seq.tokens), one) for seq, one in zip(seqs, seen, strict=True)]


def logits_behind(tokens: list[int]) -> np.ndarray:
    """Of the model alone, in one pass."""
    runner = runner_with(MODEL, 400)
    runner.cache.open(0)
    return runner.forward([Run(0, tokens, "last")]).logits[0][-1]


def test_extra_rows_are_scored_shown_and_never_kept() -> None:
    """What stands behind 1, 2 and 1, 2, 3 is what the model says of a text that ends so."""
    watcher = Watcher()
    engine = Engine(runner_with(MODEL, 400), Router({"watcher": watcher}), make("fixed", 3))
    request, other = engine.add([1, 2, 3, 4], greedy(8)), engine.add([4, 3], greedy(8, draft="none"))
    outputs = run(engine, [request, other])
    plain = Engine(runner_with(MODEL, 400), Router({"none": Drafter()}), make("fixed", 3))
    assert outputs == run(plain, [plain.add([1, 2, 3, 4], greedy(8)), plain.add([4, 3], greedy(8))])
    assert {seq for seq, _, _ in watcher.seen} == {request.seq.id}, "its own sequences only"
    decoded = [(tokens, one) for _, tokens, one in watcher.seen if len(one.scored) == 4]
    assert decoded
    for tokens, one in decoded:
        ids, values = one.top(2)
        assert ids.shape == values.shape == (4, 2)
        before = tokens[: one.start + 1]  # the last committed token was run at index `start`
        for row, behind in enumerate(([], [1], [1, 2], [1, 2, 3])):
            logits = logits_behind([*before, *behind])
            best = np.argsort(-logits, kind="stable")[:2]
            assert ids[row].tolist() == best.tolist()
            np.testing.assert_allclose(values[row], logits[best], atol=1e-4)
        assert len(one.kept) == len(tokens) - len(before)
    engine.runner.cache.check_integrity()


def test_extra_rows_count_as_nodes_of_the_budget() -> None:
    engine = Engine(runner_with(MODEL, 400), Router({"watcher": Watcher()}), make("fixed", 2))
    reports = heard(engine)
    run(engine, [engine.add([1, 2, 3], SamplingParams(max_tokens=6, temperature=0))])
    assert max(report.num_rows for report in reports if report.num_decoding) == 2, "one node, and no room for two more"


def test_extra_rows_are_hidden_from_a_rule_that_needs_all_rows() -> None:
    texts = []
    for drafter in (Watcher(), Drafter()):
        engine = Engine(runner_with(MODEL, 400), Router({"watcher": drafter}), make("fixed", 3))
        draft = "watcher" if isinstance(drafter, Watcher) else "none"
        params = SamplingParams(max_tokens=8, temperature=1.0, top_k=1, acceptance="traversal", draft=draft)
        requests = [engine.add([1, 2, 3 + i], params) for i in range(2)]
        texts.append(run(engine, requests))
        assert not any(request.error for request in requests)
    assert texts[0] == texts[1]


def test_a_hidden_layer_that_the_target_lacks_is_refused_when_the_engine_is_made() -> None:
    for layer in (MODEL.config.num_layers + 1, -1):
        watcher = Watcher()
        watcher.hidden_layers = (0, layer)
        sentence = f"'watcher' reads hidden states behind {layer} layers, but the target has 1"
        with pytest.raises(BadOption, match=sentence):
            Engine(runner_with(MODEL, 400), Router({"watcher": watcher}), make("fixed", 3))
    watcher.hidden_layers = (0, MODEL.config.num_layers)
    Engine(runner_with(MODEL, 400), Router({"watcher": watcher}), make("fixed", 3))


@pytest.mark.drafter_fails
@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("parents", [[1, -1], [-1, 5], None])
def test_a_drafter_whose_draft_is_no_tree_is_done_without(
    parents: list[int] | None, num_sequences: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Or one whose draft is of another number of sequences."""

    class Broken(Drafter):
        shape = "tree"

        def propose(self, seqs: Seq[Sequence], budget: Budget, coins: Seq[Coins]) -> Draft:
            if parents is None:
                return Draft.empty(len(seqs) + 1)
            rest = Draft.empty(len(seqs) - 1).node_starts[1:]
            return Draft([1, 1], parents, [0, 2, *[2 for _ in rest]], [Probs.of_point(1)] * 2)

    texts = []
    for drafter in (Broken(), Drafter()):
        engine = Engine(runner_with(MODEL, 400), Router({"broken": drafter}), make("fixed", 3))
        params = greedy(6, draft=None if isinstance(drafter, Broken) else "none")
        texts.append(run(engine, [engine.add([1, 2, 3 + i], params) for i in range(num_sequences)]))
    assert texts[0] == texts[1]
    assert [record.message.split(" failed")[0] for record in caplog.records] == ["the drafter 'broken'"]


def test_a_drafter_hears_of_its_own_sequences_only() -> None:
    first, second = Watcher(), Watcher()
    engine = Engine(runner_with(DRAFT, 400), Router({"first": first, "second": second}), make("fixed", 1))
    requests = [engine.add([1, 2], greedy(5, draft=name)) for name in ("first", "second")]
    run(engine, requests)
    assert [{seq for seq, _, _ in watcher.seen} for watcher in (first, second)] == [{r.seq.id} for r in requests]
