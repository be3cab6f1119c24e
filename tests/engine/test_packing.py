"""Several drafts of one sequence share the rows of equal prefixes; a row for each node is the oracle."""

import pytest

from engine.load import heard, run
from forerun.engine.engine import Engine
from forerun.pacing import make
from forerun.types import Draft, Probs, SamplingParams
from support import VOCAB, drafter_for, random_decoder, runner_for

pytestmark = pytest.mark.once("about drafts that the tests make")

A, C, D, E, F, G, H = range(7)


def test_the_known_answer() -> None:
    """Drafts (c,e) (c,f) (d,g) (d,h) need the rows c, e, f, d, g, h: 6 for 8 drafted tokens."""
    draft = Draft([C, E, C, F, D, G, D, H], [-1, 0, -1, 2, -1, 4, -1, 6], [0, 8], [Probs.of_point(0)] * 8)
    packed = draft.shared_rows(0)
    assert packed.tokens == [C, E, F, D, G, H]
    assert packed.parents == [-1, 0, 0, -1, 3, 3]
    assert packed.places == [0, 1, 0, 2, 3, 4, 3, 5]


def test_only_what_is_equal_from_the_root_on_is_merged() -> None:
    """Equal tokens below different tokens have different rows; a second sequence is numbered from 0."""
    packed = Draft([A, A, C, E, D, E, C], [-1, -1, -1, 2, -1, 4, -1], [0, 1, 7], [Probs.of_point(0)] * 7).shared_rows(1)
    assert packed.tokens == [A, C, E, D, E]
    assert packed.parents == [-1, -1, 1, -1, 3]
    assert packed.places == [0, 1, 2, 3, 4, 1]


@pytest.mark.parametrize("rule", ["ratio", "traversal", "kseq"])
def test_packed_and_unpacked_say_the_same(rule: str) -> None:
    """K independent chains of one request, as one prefix tree and as a batch of chains: texts, counts and logprobs."""
    found, rows = [], []
    for packs in (True, False):
        model = random_decoder(1, row_by_row=True)
        drafter = drafter_for("tree", model, of="model", shape="4x1x1", draws="independent")
        engine = Engine(runner_for(model), drafter, make("fixed", 12), max_seq_len=256, max_batch_size=3)
        engine.drafter.packs_siblings = packs
        reports = heard(engine)
        params = [
            SamplingParams(max_tokens=20, temperature=0.6, acceptance=rule, seed=7 + i, logprobs=1) for i in range(3)
        ]
        requests = [engine.add([i + 1, 5, 9, i + 1, 5], each) for i, each in enumerate(params)]
        run(engine, requests)
        assert all(request.error is None for request in requests)
        assert all(token < VOCAB for request in requests for token in request.seq.output_ids)
        found.append([(r.seq.output_ids, r.seq.logprobs, r.report.num_accepted) for r in requests])
        rows.append(sum(report.num_rows for report in reports))
    assert found[0] == found[1]
    assert rows[0] < rows[1], "some siblings were equal, or nothing was compared"
