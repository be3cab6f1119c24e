"""Every drafter, rule and policy in one batch says what plain decoding says: the short form of parity/test_mixtures.py.

What the long form relies on is tested here, too: a drafter that fails is seen, and so is what a drafter keeps.
"""

import pytest

from forerun.drafters import Drafter
from forerun.drafters.lookup import LookupDrafter
from forerun.engine.engine import Engine
from forerun.ops.cpu import CpuOps
from forerun.ops.reference import ReferenceOps
from forerun.types import SamplingParams, Sequence
from ops.native_cases import needs_native
from parity.bitwise import Models, cut_prompts
from parity.mixtures import DRAFTERS, LOSSLESS, Place, compare_mixed, leaks, lose_nothing, small_engine
from refusals import refusal

SMALL = Place("fixed", 4, 16, "paged", 5, 208)


@needs_native
def test_every_drafter_in_one_batch_says_what_plain_decoding_says() -> None:
    models = Models.shipped("bfloat16", CpuOps())
    names = [name for name in DRAFTERS if name != "forced"]  # there are no grammars here
    found = compare_mixed(models, models, [SMALL], cut_prompts(72, seed=7, longest=60), 20, seed=2, names=names)
    assert found.num_outputs == 72
    assert {name for name, num in found.drafted.items() if num} == set(names) - {"none"}
    assert {rule for _, rule in found.by_pair} == set(LOSSLESS)
    assert min(found.num_preemptions, found.num_cached, found.num_aborted, found.num_searches) > 0, str(found)
    assert found.num_rows > 1000
    assert not found.mismatches, "\n".join(found.mismatches)


def test_the_comparison_can_fail() -> None:
    """Negative control: torch's own kernels are chosen by shape."""
    fast = Models.shipped("float32", ReferenceOps())
    found = compare_mixed(fast, fast, [SMALL], cut_prompts(4, seed=7, longest=48), 4, seed=1, names=["lookup", "model"])
    assert found.num_other_rows > 0
    assert found.mismatches


def test_requests_of_every_drafter_leave_nothing() -> None:
    left = lose_nothing(60, seed=1, num_rests=2)
    assert left.num_aborted > 0
    assert left.num_preemptions > 0, str(left)


def served(engine: Engine, draft: str) -> list[str]:
    """Serve one request, and return what is left of it."""
    request = engine.add([1, 2, 3, 1, 2], SamplingParams(max_tokens=6, temperature=0, draft=draft))
    while request.seq.finish_reason is None:
        engine.step()
    return leaks(engine)


def test_what_a_drafter_keeps_of_a_request_is_found() -> None:
    engine = small_engine("fixed")
    assert not served(engine, "lookup")
    engine.drafter.members["lookup"].end = lambda seq: None  # type: ignore[method-assign]
    assert served(engine, "lookup")
    engine = small_engine("fixed")
    engine.drafter.members["model"].end = lambda seq: None  # type: ignore[method-assign]
    assert any("cache" in left for left in served(engine, "model"))


@pytest.mark.parametrize("method", ["begin", "propose", "observe", "catch_up", "end"])
def test_a_drafter_that_fails_is_not_hidden_in_this_room(method: str) -> None:
    """conftest.py sees to it."""

    class Failing(LookupDrafter):
        pass

    def failing(*_: object) -> None:
        raise ValueError("out of order")

    setattr(Failing, method, failing)
    engine = small_engine("fixed")
    drafter: Drafter = Failing(engine.drafter.members["lookup"].options)  # type: ignore[attr-defined]
    engine.drafter.members["lookup"] = drafter
    assert "out of order" in refusal(ValueError, served, engine, "lookup")


def test_the_ids_of_sequences_are_told_from_those_of_tokens() -> None:
    """Otherwise a table of tokens would look like a leak, and a leak like a table of tokens."""
    engine = small_engine("fixed")
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    assert isinstance(request.seq, Sequence)
    assert request.seq.id >= 10**9
    engine.abort(request)
