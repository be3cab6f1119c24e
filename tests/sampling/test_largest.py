"""The ids of the largest logits, against a sort of the whole row."""

from __future__ import annotations

import pytest
import torch

from forerun.sampling import largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_ids", [1, 7, 64, 640, 64 * 9, 5003])
def test_the_largest_logits_of_each_row(num_ids: int, dtype: torch.dtype) -> None:
    """For rows of every kind of width: narrow, a multiple of the stripes, and with a rest behind them."""
    generator = torch.Generator().manual_seed(num_ids)
    for num_rows in (0, 1, 5):
        logits = torch.randn(num_rows, num_ids, generator=generator, dtype=dtype)
        logits[:, ::3] = -torch.inf
        wanted = logits.sort(dim=1, descending=True, stable=True)
        for num in (1, 8):
            ids, values = largest.top(logits, num)
            finite = wanted.values[:, :num].isfinite()
            assert values.equal(wanted.values[:, :num])
            assert ids[finite].equal(wanted.indices[:, :num][finite])
            assert logits.gather(1, ids).equal(values)
        assert largest.best(logits) == wanted.indices[:, 0].tolist()


def test_the_last_columns_count() -> None:
    """Those behind the last whole stripe."""
    logits = torch.zeros(1, 64 * 20 + 3)
    logits[0, -3:] = torch.tensor([1.0, 3.0, 2.0])
    assert largest.top(logits, 3)[0].tolist() == [[1281, 1282, 1280]]


def test_the_lowest_id_on_ties() -> None:
    assert largest.best(torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])) == [1, 0]
