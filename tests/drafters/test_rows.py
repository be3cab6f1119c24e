"""Rows: those that drafters see of a pass, as they were then, and what may follow one."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.drafters import Seen
from forerun.drafters.shared.chain import next_of
from forerun.models.runner import NO_NUMBERS, Scores
from forerun.types import Probs
from tiny import write_tiny


@pytest.mark.parametrize("kept", [[], [2], [0, 1, 2], range(1, 4), [0, 2, 3], [1, 4]])
def test_rows_of_what_was_kept(kept: Any) -> None:
    rows = torch.arange(10.0).view(5, 2)
    scores = cast(Scores, type("S", (), {"taps": {3: rows}, "hidden": rows})())
    found, wanted = Seen(0, kept, range(5), 0, scores).layer(3), rows[list(kept)]
    assert found.equal(wanted)
    rows += 1  # the next pass may write where this one did
    assert found.equal(wanted)


def test_a_row_without_numbers_is_followed_by_nothing(tmp_path: Path) -> None:
    request = LLM(write_tiny(tmp_path / "target"), draft="none").engine.add([5, 6], SamplingParams(max_tokens=2))
    for wrong in (NO_NUMBERS, torch.full((257,), -torch.inf), torch.full((257,), torch.nan)):
        assert next_of(wrong, request.seq, []) is None
    row = torch.arange(257.0)
    law, logits = next_of(row, request.seq, []) or (None, None)
    assert law is not None
    assert logits is row
    assert next_of(1, request.seq, [], ids=[7, 9]) == (Probs.of_point(9), None)
