"""The ids of the largest logits, against a sort of the whole row."""

import numpy as np
import pytest

from forerun.sampling import largest
from tiny import numbers


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("num_ids", [1, 7, 64, 640, 64 * 9, 5003])
def test_the_largest_logits_of_each_row(num_ids: int, dtype: type[np.floating]) -> None:
    """For rows of every kind of width: narrow, a multiple of the stripes, and with a rest behind them."""
    generator = np.random.default_rng(num_ids)
    for num_rows in (0, 1, 5):
        logits = generator.standard_normal((num_rows, num_ids)).astype(dtype)
        logits[:, ::3] = -np.inf
        order = np.argsort(-logits, axis=1, kind="stable")
        for num in (1, 8):
            ids, values = largest.top(logits, num)
            wanted = np.take_along_axis(logits, order[:, :num], axis=1)
            finite = np.isfinite(wanted)
            np.testing.assert_array_equal(values, wanted)
            np.testing.assert_array_equal(ids[finite], order[:, :num][finite])
            np.testing.assert_array_equal(np.take_along_axis(logits, ids, axis=1), values)
            assert values.dtype == dtype
        assert largest.best(logits) == order[:, 0].tolist()


def test_the_last_columns_count() -> None:
    """Those behind the last whole stripe."""
    logits = np.zeros((1, 64 * 20 + 3), np.float32)
    logits[0, -3:] = [1.0, 3.0, 2.0]
    assert largest.top(logits, 3)[0].tolist() == [[1281, 1282, 1280]]


def test_the_lowest_id_on_ties() -> None:
    assert largest.best([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]]) == [1, 0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("num_ids", [5, 64 * 20 + 3])
def test_ties_go_to_the_lowest_ids(num_ids: int, dtype: type[np.floating]) -> None:
    """Where a handful of values are many times in a row, also across the end of what is asked for."""
    logits = np.floor(numbers(7, 3, num_ids) * 2).astype(dtype)
    for num in (1, 3, 5):
        wanted = [sorted(range(num_ids), key=lambda i: (-row[i], i))[:num] for row in logits.tolist()]
        assert largest.top(logits, num)[0].tolist() == wanted
        assert largest.best(logits) == [ids[0] for ids in wanted]


def test_rows_of_no_numbers_have_ids_all_the_same() -> None:
    logits = np.full((2, 64 * 20), np.nan, np.float32)
    logits[1, 5] = 1.0
    ids, values = largest.top(logits, 4)
    assert ids.shape == values.shape == (2, 4)
    assert ids[1, 0] == 5
