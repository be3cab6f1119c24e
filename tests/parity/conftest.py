"""What long comparisons say is on the terminal while they run."""

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[str], None]]:
    """Print progress to the terminal."""
    with capsys.disabled():
        yield lambda text: print(text, flush=True)
