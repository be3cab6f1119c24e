"""No drafter fails silently in this room: what one raises passes through the router, which would decode plainly."""

from collections.abc import Iterator

import pytest

from parity.mixtures import unspared


@pytest.fixture(autouse=True)
def _unspared() -> Iterator[None]:
    with unspared():
        yield
